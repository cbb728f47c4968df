//! Converts base lanes from tensors of other dtypes (spec section 8.5).

use crate::checkpoint::{Checkpoint, Region};
use std::ops::Range;
use tpde_core::derived::{BaseForm, FP8_BLOCK, MXFP4_BLOCK, MXFP4_BLOCK_BYTES};
use tpde_core::error::{Error, Result};
use tpde_core::floats::{cast_lanes, scale_lanes, scale_nibbles};
use tpde_core::lane::Dtype;
use tpde_core::layout::StridedLayout;
use tpde_core::rectangle::Rectangle;

/// Maximum number of lanes converted from one read of the base. The bytes that were read then stay in the second-level cache.
const BLOCK_LANES: usize = 1 << 15;
/// Maximum number of bytes of quantised blocks that are read together to be transposed.
const TRANSPOSED_BYTES: u64 = 1 << 20;

/// A tensor, or a rectangle of one, whose lanes are converted from tensors of another dtype.
///
/// Long ranges cost less per lane, because each read also reads the scales of its range. A read of form `mxfp4_transposed` reads a
/// part of each row of the base. Memory of a read: 3 MiB, or for form `fp8_blocks` at most 8 bytes per lane.
#[derive(Debug, Clone)]
pub struct ConvertedTensor {
    dtype: Dtype,
    base_dtype: Dtype,
    /// Extents of the rectangle.
    shape: Vec<u64>,
    base: Region,
    /// The tensor of scales, for base kind `dequantised`.
    scales: Option<(BaseForm, Region)>,
    /// Shape of the tensor of scales, and the origin of the rectangle in it.
    scales_shape: Vec<u64>,
    scales_origin: Vec<u64>,
}

impl ConvertedTensor {
    /// A cast of a rectangle of tensor `base`, whose shape is `whole`.
    pub fn cast(dtype: Dtype, base_dtype: Dtype, whole: &[u64], part: &Rectangle, base: usize) -> Self {
        let base = Region::new(base, base_dtype, whole, &part.origin, &part.extent);
        let (scales, scales_shape, scales_origin) = (None, Vec::new(), Vec::new());
        Self { dtype, base_dtype, shape: part.extent.clone(), base, scales, scales_shape, scales_origin }
    }

    /// A rectangle of the tensor of shape `whole` that tensors `base` and `scales` give. It consists of whole blocks.
    pub fn dequantised(dtype: Dtype, form: BaseForm, whole: &[u64], part: &Rectangle, base: usize, scales: usize) -> Self {
        let (origin, extent) = (form.scales_dims(&part.origin), form.scales_dims(&part.extent));
        let (scales_shape, scales_origin) = (form.scales_dims(whole), origin.clone());
        let of_scales = Region::new(scales, form.scales_dtype(), &scales_shape, &origin, &extent);
        let of_base = match form {
            BaseForm::Fp8Blocks => Region::new(base, form.base_dtype(), whole, &part.origin, &part.extent),
            BaseForm::Mxfp4 | BaseForm::Mxfp4Transposed => {
                let (origin, extent) = ([origin, vec![0]].concat(), [extent, vec![MXFP4_BLOCK_BYTES]].concat());
                Region::new(base, form.base_dtype(), &form.base_shape(whole), &origin, &extent)
            }
        };
        let scales = Some((form, of_scales));
        let shape = part.extent.clone();
        Self { dtype, base_dtype: form.base_dtype(), shape, base: of_base, scales, scales_shape, scales_origin }
    }

    /// The regions of the base tensor and of the tensor of scales.
    pub(super) fn regions(&self) -> (&Region, Option<&Region>) {
        (&self.base, self.scales.as_ref().map(|(_, scales)| scales))
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.dtype.lanes(&self.shape).unwrap_or(0) * self.dtype.lane_bytes() as u64
    }

    /// Whether a checkpoint has the bytes from which `size` bytes from byte `offset` on are converted. For a quantised base,
    /// `false` unless the checkpoint has all bytes of the rectangle.
    pub fn is_held(&self, of: &dyn Checkpoint, offset: u64, size: usize) -> bool {
        match &self.scales {
            Some((_, scales)) => self.base.is_held(of, 0..self.base.size(of)) && scales.is_held(of, 0..scales.size(of)),
            None => {
                let (from, to) = (self.dtype.lane_bytes() as u64, self.base_dtype.lane_bytes() as u64);
                let end = offset.saturating_add(size as u64);
                self.base.is_held(of, offset / from * to..end.div_ceil(from).saturating_mul(to))
            }
        }
    }

    /// Fills `out` with bytes of the converted lanes, from byte `offset` on. `of` has the base tensors.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are no such bytes; the errors of [`Checkpoint::read`].
    pub fn read(&self, of: &dyn Checkpoint, offset: u64, out: &mut [u8]) -> Result<()> {
        let width = self.dtype.lane_bytes() as u64;
        let Some(end) = offset.checked_add(out.len() as u64).filter(|&end| end <= self.size()) else {
            let size = out.len();
            return Err(Error::InvalidArgument(format!("a converted tensor does not have {size} bytes from byte {offset} on")));
        };
        // A read begins and ends with a block of MXFP4, or with a lane.
        let unit = width * if self.dtype != Dtype::Bf16 || self.base_dtype != Dtype::U8 { 1 } else { MXFP4_BLOCK };
        let (from, to) = (offset / unit * unit, end.next_multiple_of(unit));
        if (from, to) == (offset, end) {
            return self.read_lanes(of, offset / width, out);
        }
        let mut aligned = vec![0; (to - from) as usize];
        self.read_lanes(of, from / width, &mut aligned)?;
        out.copy_from_slice(&aligned[(offset - from) as usize..][..out.len()]);
        Ok(())
    }

    /// Fills `out` with lanes from lane `first` on, which begins a block of MXFP4, as does the end.
    fn read_lanes(&self, of: &dyn Checkpoint, first: u64, out: &mut [u8]) -> Result<()> {
        match &self.scales {
            None => self.read_cast(of, first, out),
            Some((BaseForm::Fp8Blocks, scales)) => self.read_fp8(of, scales, first, out),
            Some((BaseForm::Mxfp4, scales)) => self.read_mxfp4(of, scales, first, out),
            Some((BaseForm::Mxfp4Transposed, scales)) => self.read_transposed(of, scales, first, out),
        }
    }

    fn read_cast(&self, of: &dyn Checkpoint, mut first: u64, out: &mut [u8]) -> Result<()> {
        let (width, base_width) = (self.dtype.lane_bytes(), self.base_dtype.lane_bytes());
        let mut scratch = Vec::new();
        for out in out.chunks_mut(BLOCK_LANES * width) {
            let lanes = out.len() / width;
            let base = self.base.bytes(of, first * base_width as u64, lanes * base_width, &mut scratch)?;
            cast_lanes(self.base_dtype, self.dtype, base, out);
            first += lanes as u64;
        }
        Ok(())
    }

    fn read_fp8(&self, of: &dyn Checkpoint, scales: &Region, first: u64, out: &mut [u8]) -> Result<()> {
        let (width, columns) = (self.dtype.lane_bytes(), self.shape.last().copied().unwrap_or(0).max(1));
        let across = columns.div_ceil(FP8_BLOCK);
        let mut products = Products::new(self.dtype);
        let (mut lane, mut rest) = (first, out);
        let (mut scratch, mut of_scales) = (Vec::new(), Vec::new());
        while !rest.is_empty() {
            let (row, column) = (lane / columns, lane % columns);
            // A range of a row that is not longer than a block of lanes.
            let count = (columns - column).min((rest.len() / width) as u64).min(BLOCK_LANES as u64);
            let blocks = column / FP8_BLOCK..(column + count).div_ceil(FP8_BLOCK);
            let number = row / FP8_BLOCK * across;
            products.prepare(number + blocks.start..number + blocks.end, |numbers| {
                scales.bytes(of, numbers.start * 4, (numbers.end - numbers.start) as usize * 4, &mut of_scales)
            })?;
            let base = self.base.bytes(of, lane, count as usize, &mut scratch)?;
            let (mut segment, after) = rest.split_at_mut(count as usize * width);
            rest = after;
            let mut base = base;
            let mut at = column;
            while !base.is_empty() {
                let size = (FP8_BLOCK - at % FP8_BLOCK).min(base.len() as u64) as usize;
                let (lanes, next) = base.split_at(size);
                let (converted, next_segment) = segment.split_at_mut(size * width);
                products.convert((at / FP8_BLOCK - blocks.start) as usize, lanes, converted);
                (base, segment) = (next, next_segment);
                at += size as u64;
            }
            lane += count;
        }
        Ok(())
    }

    fn read_mxfp4(&self, of: &dyn Checkpoint, scales: &Region, mut first: u64, out: &mut [u8]) -> Result<()> {
        let (mut scratch, mut of_scales) = (Vec::new(), Vec::new());
        for out in out.chunks_mut(BLOCK_LANES * 2) {
            let lanes = out.len() / 2;
            let base = self.base.bytes(of, first / 2, lanes / 2, &mut scratch)?;
            let of_scales = scales.bytes(of, first / MXFP4_BLOCK, lanes / MXFP4_BLOCK as usize, &mut of_scales)?;
            let blocks = base.chunks(MXFP4_BLOCK_BYTES as usize).zip(out.chunks_mut(2 * MXFP4_BLOCK as usize));
            blocks.zip(of_scales).for_each(|((block, out), &scale)| scale_nibbles(block, scale, out));
            first += lanes as u64;
        }
        Ok(())
    }

    /// `out` has lanes of [*X*, *K*, *N*] in row-major order; the base has rows of *K* lanes.
    fn read_transposed(&self, of: &dyn Checkpoint, scales: &Region, first: u64, out: &mut [u8]) -> Result<()> {
        let [_, depth, columns] = self.shape[..] else { return Ok(()) };
        let (mut lane, mut rest) = (first, out);
        while !rest.is_empty() {
            let left = (rest.len() / 2) as u64;
            let (x, k, n) = (lane / (depth * columns), lane / columns % depth, lane % columns);
            // The lanes of one row from column `n` on, or of several whole rows of one expert.
            let (rows, count) = match n == 0 && left >= columns {
                true => ((left / columns).min(depth - k), columns),
                false => (1, left.min(columns - n)),
            };
            let (part, after) = rest.split_at_mut((rows * count * 2) as usize);
            let blocks = k / MXFP4_BLOCK..(k + rows).div_ceil(MXFP4_BLOCK);
            let row_bytes = (blocks.end - blocks.start) * MXFP4_BLOCK_BYTES;
            let step = (TRANSPOSED_BYTES / row_bytes).max(1);
            for from in (n..n + count).step_by(step as usize) {
                let to = (from + step).min(n + count);
                let extent = [1, to - from, blocks.end - blocks.start];
                let converted = self.read_blocks(of, scales, &[x, from, blocks.start], &extent)?;
                // Row of the tile: one column of the target.
                let lanes = ((blocks.end - blocks.start) * MXFP4_BLOCK) as usize;
                for (column, converted) in (from..to).zip(converted.chunks_exact(2 * lanes)) {
                    let skipped = (k - blocks.start * MXFP4_BLOCK) as usize;
                    for (row, lane) in converted.as_chunks::<2>().0[skipped..].iter().take(rows as usize).enumerate() {
                        let at = 2 * (row * count as usize + (column - n) as usize);
                        part[at..at + 2].copy_from_slice(lane);
                    }
                }
            }
            lane += rows * count;
            rest = after;
        }
        Ok(())
    }

    /// The lanes of a rectangle of blocks of form `mxfp4_transposed`, block after block. `origin` and `extent` count blocks.
    fn read_blocks(&self, of: &dyn Checkpoint, scales: &Region, origin: &[u64], extent: &[u64]) -> Result<Vec<u8>> {
        let count = extent.iter().product::<u64>() as usize;
        let origin: Vec<u64> = origin.iter().zip(&self.scales_origin).map(|(origin, first)| first + origin).collect();
        let mut of_scales = vec![0; count];
        let blocks = StridedLayout::of_rectangle(8, &self.scales_shape, None, &origin, extent);
        of.read_runs(scales.tensor, &blocks, 0, &mut of_scales)?;
        let bytes = |dims: &[u64], last: u64| [dims, &[last]].concat();
        let [shape, extent] = [&self.scales_shape[..], extent].map(|dims| bytes(dims, MXFP4_BLOCK_BYTES));
        let mut of_base = vec![0; count * MXFP4_BLOCK_BYTES as usize];
        let blocks = StridedLayout::of_rectangle(8, &shape, None, &bytes(&origin, 0), &extent);
        of.read_runs(self.base.tensor, &blocks, 0, &mut of_base)?;
        let mut lanes = vec![0; 2 * MXFP4_BLOCK as usize * count];
        let blocks = of_base.chunks(MXFP4_BLOCK_BYTES as usize).zip(lanes.chunks_mut(2 * MXFP4_BLOCK as usize));
        blocks.zip(of_scales).for_each(|((block, out), scale)| scale_nibbles(block, scale, out));
        Ok(lanes)
    }
}

/// For each scale of a range of scales, the products of all lanes of F8_E4M3. A block has far more lanes than there are patterns.
struct Products {
    dtype: Dtype,
    /// Numbers of the scales.
    numbers: Range<u64>,
    /// 256 lanes per scale.
    lanes: Vec<u8>,
}

impl Products {
    fn new(dtype: Dtype) -> Self {
        Self { dtype, numbers: 0..0, lanes: Vec::new() }
    }

    /// Computes the products of the scales of these numbers, unless they are those of the last call.
    fn prepare<'a>(&mut self, numbers: Range<u64>, scales: impl FnOnce(Range<u64>) -> Result<&'a [u8]>) -> Result<()> {
        if self.numbers == numbers {
            return Ok(());
        }
        let patterns: [u8; 256] = std::array::from_fn(|pattern| pattern as u8);
        let scales = scales(numbers.clone())?.as_chunks::<4>().0;
        let size = 256 * self.dtype.lane_bytes();
        self.lanes.resize(scales.len() * size, 0);
        for (scale, lanes) in scales.iter().zip(self.lanes.chunks_mut(size)) {
            scale_lanes(&patterns, u32::from_le_bytes(*scale), self.dtype, lanes);
        }
        self.numbers = numbers;
        Ok(())
    }

    /// Looks up the products of lanes of F8_E4M3 with scale `i` of the range.
    fn convert(&self, i: usize, lanes: &[u8], out: &mut [u8]) {
        fn look_up<const N: usize>(products: &[u8], lanes: &[u8], out: &mut [u8]) {
            let products = products.as_chunks::<N>().0;
            let Some(products) = products.first_chunk::<256>() else { return };
            out.as_chunks_mut::<N>().0.iter_mut().zip(lanes).for_each(|(out, &lane)| *out = products[usize::from(lane)]);
        }
        match self.dtype.lane_bytes() {
            2 => look_up::<2>(&self.lanes[512 * i..], lanes, out),
            _ => look_up::<4>(&self.lanes[1024 * i..], lanes, out),
        }
    }
}
