//! Base tensors of other dtypes, and the lanes that they give, element by element from the formulas of spec section 8.5.

use crate::base_lanes;
use arbitrary::Arbitrary;
use tpde::{Dtype, TensorInfo};
use tpde_core::floats::{cast_lanes, scale_lanes, scale_nibbles};

/// What the base of a tensor is made of.
#[derive(Arbitrary, Debug, Clone, Copy)]
pub enum Origin {
    Cast(Dtype),
    Fp8(u8, u8),
    Mxfp4(u8, u8, u8),
    /// Base rows are columns of the target.
    Mxfp4Transposed(u8, u8, u8),
}

/// A base tensor with its bytes.
pub type Base = (TensorInfo, &'static [u8]);

/// A target tensor, its base tensors, and the lanes that they give. Its shape and its dtype are changed to what the origin allows.
/// `None` if there is no cast to its dtype.
pub fn derived(origin: Origin, mut info: TensorInfo, seed: u8) -> Option<(TensorInfo, Vec<Base>, Vec<u8>)> {
    let base = |suffix: &str, dtype, shape: &[u64], seed| {
        let info = TensorInfo { name: format!("{}{suffix}", info.name), dtype, shape: shape.to_vec() };
        let bytes = base_lanes(seed, info.bytes() as usize);
        (info, bytes)
    };
    let dim = |size: u8| u64::from(size) % 5;
    match origin {
        Origin::Cast(from) => {
            let bases = vec![base("", from, &info.shape, seed)];
            let mut formed = vec![0; info.bytes() as usize];
            cast_lanes(from, info.dtype, bases[0].1, &mut formed).then_some((info, bases, formed))
        }
        Origin::Fp8(rows, columns) => {
            let (rows, columns) = (u64::from(rows), u64::from(columns) * 2);
            let across = columns.div_ceil(128);
            let scales = base("_scale_inv", Dtype::F32, &[rows.div_ceil(128), across], seed.wrapping_add(1));
            let bases = vec![base("", Dtype::F8E4m3, &[rows, columns], seed), scales];
            info.shape = vec![rows, columns];
            if !matches!(info.dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32) {
                info.dtype = Dtype::Bf16;
            }
            let mut formed = vec![0; info.bytes() as usize];
            for (i, lane) in formed.chunks_mut(info.dtype.lane_bytes()).enumerate() {
                let (row, column) = (i as u64 / columns, i as u64 % columns);
                let scale = bases[1].1.as_chunks::<4>().0[(row / 128 * across + column / 128) as usize];
                assert!(scale_lanes(&bases[0].1[i..=i], u32::from_le_bytes(scale), info.dtype, lane));
            }
            Some((info, bases, formed))
        }
        Origin::Mxfp4(experts, rows, blocks) | Origin::Mxfp4Transposed(experts, rows, blocks) => {
            let is_transposed = matches!(origin, Origin::Mxfp4Transposed(..));
            let (experts, rows, blocks) = (dim(experts), u64::from(rows) % 40, dim(blocks));
            // A shape that both forms have is taken for the form of the names.
            let [of_blocks, of_scales] = if is_transposed { ["_blocks", "_scales"] } else { [".blocks", ".scales"] };
            let scales = base(of_scales, Dtype::U8, &[experts, rows, blocks], seed.wrapping_add(1));
            let bases = vec![base(of_blocks, Dtype::U8, &[experts, rows, blocks, 16], seed), scales];
            info.dtype = Dtype::Bf16;
            let columns = 32 * blocks;
            info.shape = if is_transposed { vec![experts, columns, rows] } else { vec![experts, rows, columns] };
            let mut formed = vec![0; info.bytes() as usize];
            for ((block, scale), out) in bases[0].1.chunks(16).zip(bases[1].1).zip(formed.chunks_mut(64)) {
                scale_nibbles(block, *scale, out);
            }
            if is_transposed {
                let lanes = formed.clone();
                for (i, lane) in formed.chunks_mut(2).enumerate() {
                    let i = i as u64;
                    let (expert, column, row) = (i / (columns * rows), i / rows % columns, i % rows);
                    lane.copy_from_slice(&lanes[2 * ((expert * rows + row) * columns + column) as usize..][..2]);
                }
            }
            Some((info, bases, formed))
        }
    }
}
