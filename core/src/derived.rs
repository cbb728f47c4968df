//! Derived bases: dtypes, shapes and blocks of base lanes that are formed from tensors of another dtype (spec section
//! 8.5).

#![forbid(unsafe_code)]

use crate::format::registry;
use crate::lane::Dtype;
use crate::prelude::*;

registry! {
    /// The composition of a quantised base: how its base tensor and its tensor of scales give base lanes.
    BaseForm: u8 as "base form" {
        /// F8_E4M3 with one F32 scale per block of 128 × 128, as DeepSeek-V3 is published.
        Fp8Blocks = 1 => "fp8_blocks",
        /// MXFP4, blocks along the last dimension, as gpt-oss is published.
        Mxfp4 = 2 => "mxfp4",
        /// MXFP4, each expert transposed, as the package transformers loads gpt-oss.
        Mxfp4Transposed = 3 => "mxfp4_transposed",
    }
}

/// Number of lanes of a block of MXFP4.
pub const MXFP4_BLOCK: u64 = 32;
/// Number of bytes of a block of MXFP4.
pub const MXFP4_BLOCK_BYTES: u64 = 16;
/// Number of rows, and of columns, of a block of `fp8_blocks`.
pub const FP8_BLOCK: u64 = 128;

/// The tensors from which base lanes are formed. Part of a [`Tensor`](crate::index::Tensor) with base kind `cast` or `dequantised`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Derived<'a> {
    /// Dtype of the base tensor.
    pub base_dtype: Dtype,
    /// Form and name of the tensor of scales, for base kind `dequantised`; `None` for `cast`.
    pub scales: Option<(BaseForm, &'a str)>,
}

/// Whether base kind `cast` converts from one dtype to another.
pub fn is_cast(from: Dtype, to: Dtype) -> bool {
    match to {
        Dtype::Bf16 | Dtype::F16 => matches!(from, Dtype::F32 | Dtype::F8E4m3 | Dtype::F8E5m2),
        Dtype::F32 => matches!(from, Dtype::Bf16 | Dtype::F16),
        _ => false,
    }
}

impl BaseForm {
    /// Dtype of the base tensor.
    pub const fn base_dtype(self) -> Dtype {
        match self {
            BaseForm::Fp8Blocks => Dtype::F8E4m3,
            BaseForm::Mxfp4 | BaseForm::Mxfp4Transposed => Dtype::U8,
        }
    }

    /// Dtype of the tensor of scales.
    pub const fn scales_dtype(self) -> Dtype {
        match self {
            BaseForm::Fp8Blocks => Dtype::F32,
            BaseForm::Mxfp4 | BaseForm::Mxfp4Transposed => Dtype::U8,
        }
    }

    /// Whether a tensor of this dtype and shape can have a base of this form.
    pub fn fits(self, dtype: Dtype, shape: &[u64]) -> bool {
        let is_blocks = |length: Option<&u64>| length.is_some_and(|length| length.is_multiple_of(MXFP4_BLOCK));
        match self {
            BaseForm::Fp8Blocks => matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32) && shape.len() == 2,
            BaseForm::Mxfp4 => dtype == Dtype::Bf16 && is_blocks(shape.last()),
            BaseForm::Mxfp4Transposed => dtype == Dtype::Bf16 && shape.len() == 3 && is_blocks(shape.get(1)),
        }
    }

    /// Shape of the tensor of scales of a tensor of this shape. Also gives the origin and the extents, in the tensor of scales,
    /// of a part that consists of whole blocks.
    pub fn scales_dims(self, dims: &[u64]) -> Vec<u64> {
        let mut dims = dims.to_vec();
        match self {
            BaseForm::Fp8Blocks => dims.iter_mut().for_each(|dim| *dim = dim.div_ceil(FP8_BLOCK)),
            BaseForm::Mxfp4 | BaseForm::Mxfp4Transposed => {
                if self == BaseForm::Mxfp4Transposed && dims.len() == 3 {
                    dims.swap(1, 2);
                }
                dims.iter_mut().last().into_iter().for_each(|dim| *dim /= MXFP4_BLOCK);
            }
        }
        dims
    }

    /// Shape of the base tensor of a tensor of this shape.
    pub fn base_shape(self, shape: &[u64]) -> Vec<u64> {
        match self {
            BaseForm::Fp8Blocks => shape.to_vec(),
            BaseForm::Mxfp4 | BaseForm::Mxfp4Transposed => [self.scales_dims(shape), vec![MXFP4_BLOCK_BYTES]].concat(),
        }
    }

    /// Length of a block in each dimension of a tensor of this rank.
    pub fn block(self, rank: usize) -> Vec<u64> {
        match self {
            BaseForm::Fp8Blocks => vec![FP8_BLOCK; rank],
            BaseForm::Mxfp4 => (1..=rank).map(|dim| if dim == rank { MXFP4_BLOCK } else { 1 }).collect(),
            BaseForm::Mxfp4Transposed => (0..rank).map(|dim| if dim == 1 { MXFP4_BLOCK } else { 1 }).collect(),
        }
    }

    /// The first dimension in which a part of a tensor of this shape has a part of a block.
    pub fn cut_dim(self, shape: &[u64], origin: &[u64], extent: &[u64]) -> Option<usize> {
        let block = self.block(shape.len());
        (0..shape.len()).find(|&dim| {
            let (length, end) = (block[dim], origin[dim].saturating_add(extent[dim]));
            !origin[dim].is_multiple_of(length) || (!end.is_multiple_of(length) && end != shape[dim])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_those_of_published_checkpoints() {
        // model.layers.0.self_attn.kv_a_proj_with_mqa.weight of DeepSeek-V3, and experts of gpt-oss-20b.
        let fp8 = BaseForm::Fp8Blocks;
        assert_eq!((fp8.base_shape(&[576, 7168]), fp8.scales_dims(&[576, 7168])), (vec![576, 7168], vec![5, 56]));
        let (blocks, scales) = (vec![32, 5760, 90, 16], vec![32, 5760, 90]);
        for (form, shape) in [(BaseForm::Mxfp4, [32, 5760, 2880]), (BaseForm::Mxfp4Transposed, [32, 2880, 5760])] {
            assert!(form.fits(Dtype::Bf16, &shape));
            assert_eq!((form.base_shape(&shape), form.scales_dims(&shape)), (blocks.clone(), scales.clone()));
        }
        assert!(!BaseForm::Mxfp4.fits(Dtype::Bf16, &[]) && !BaseForm::Mxfp4.fits(Dtype::Bf16, &[33]));
        assert!(!BaseForm::Mxfp4Transposed.fits(Dtype::Bf16, &[32, 32]) && !fp8.fits(Dtype::Bf16, &[128]));
    }

    #[test]
    fn parts_are_whole_blocks() {
        let cut = |form: BaseForm, origin: &[u64], extent: &[u64]| form.cut_dim(&[300, 300, 320][..origin.len()], origin, extent);
        assert_eq!(cut(BaseForm::Fp8Blocks, &[128, 0], &[172, 256]), None);
        assert_eq!(cut(BaseForm::Fp8Blocks, &[128, 0], &[171, 256]), Some(0));
        assert_eq!(cut(BaseForm::Fp8Blocks, &[128, 64], &[128, 64]), Some(1));
        assert_eq!(cut(BaseForm::Mxfp4, &[1, 2, 32], &[1, 7, 64]), None);
        assert_eq!(cut(BaseForm::Mxfp4, &[1, 2, 32], &[1, 7, 16]), Some(2));
        assert_eq!(cut(BaseForm::Mxfp4Transposed, &[1, 32, 5], &[1, 268, 16]), None);
        assert_eq!(cut(BaseForm::Mxfp4Transposed, &[1, 16, 5], &[1, 16, 16]), Some(1));
    }
}
