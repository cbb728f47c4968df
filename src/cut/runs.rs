//! Reads rectangles of tensors.

use crate::checkpoint::Checkpoint;
use std::ops::Range;
use tpde_core::error::{Error, Result};
use tpde_core::lane::Dtype;
use tpde_core::layout::StridedLayout;

/// Maximum distance in bytes of runs that are read together. Reading a page costs less than a call.
const MAX_GAP: u64 = 4096;
/// Maximum number of bytes that are read together.
const MAX_SPAN: u64 = 64 << 10;

/// A tensor of a checkpoint, or a rectangle of it.
pub(crate) struct Region {
    /// Tensor number in the checkpoint.
    pub tensor: usize,
    /// The bytes of the rectangle in that tensor; `None` for the whole tensor.
    pub runs: Option<StridedLayout>,
}

impl Region {
    /// A rectangle of a tensor of this dtype and shape.
    pub fn new(tensor: usize, dtype: Dtype, shape: &[u64], origin: &[u64], extent: &[u64]) -> Self {
        Self { tensor, runs: (shape != extent).then(|| StridedLayout::of_rectangle(dtype.bits(), shape, None, origin, extent)) }
    }

    /// Size in bytes.
    pub fn bytes(&self, of: &dyn Checkpoint) -> u64 {
        self.runs.as_ref().map_or_else(|| of.tensors()[self.tensor].bytes(), StridedLayout::bytes)
    }

    /// Fills `out` with bytes from byte `offset` on.
    pub fn read_into(&self, of: &dyn Checkpoint, offset: u64, out: &mut [u8]) -> Result<()> {
        let Some(runs) = &self.runs else { return of.read(self.tensor, offset, out) };
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > runs.bytes()) {
            let reason = format!("a part of tensor {} does not have {} bytes from byte {offset} on", self.tensor, out.len());
            return Err(Error::InvalidArgument(reason));
        }
        read_runs(of, self.tensor, runs, offset, out)
    }

    /// `size` bytes from byte `offset` on, if they are in memory.
    pub fn in_place<'a>(&self, of: &'a dyn Checkpoint, offset: u64, size: usize) -> Option<&'a [u8]> {
        let at = match &self.runs {
            Some(runs) => runs.contiguous_at(offset, size)?,
            None => offset,
        };
        of.in_place(self.tensor, at, size)
    }

    /// `size` bytes from byte `offset` on: borrowed if they are in memory, else read into `scratch`.
    pub fn read<'a>(&self, of: &'a dyn Checkpoint, offset: u64, size: usize, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        if let Some(bytes) = self.in_place(of, offset, size) {
            return Ok(bytes);
        }
        scratch.resize(size.max(scratch.len()), 0);
        self.read_into(of, offset, &mut scratch[..size])?;
        Ok(&scratch[..size])
    }

    /// Whether a checkpoint has a range of bytes.
    pub fn is_held(&self, of: &dyn Checkpoint, bytes: Range<u64>) -> bool {
        let (offset, size) = (bytes.start, (bytes.end - bytes.start) as usize);
        let holds = |at: u64, size: usize| of.holds(self.tensor, at, size);
        let each =
            |runs: &StridedLayout| runs.try_each(offset, size, |at, range| if holds(at, range.len()) { Ok(()) } else { Err(()) });
        self.runs.as_ref().map_or_else(|| holds(offset, size), |runs| each(runs).is_ok())
    }
}

/// Fills `out` with bytes of a rectangle of a tensor, from byte `offset` of the rectangle on. The rectangle must have these bytes.
/// Runs that are near each other are read together, with the bytes between them if the checkpoint holds those.
pub(crate) fn read_runs(of: &dyn Checkpoint, tensor: usize, runs: &StridedLayout, offset: u64, out: &mut [u8]) -> Result<()> {
    if of.read_part(tensor, runs, offset, out)? {
        return Ok(());
    }
    let mut scratch = Vec::new();
    let mut near: Vec<(u64, Range<usize>)> = Vec::new();
    runs.try_each(offset, out.len(), |at, range| -> Result<()> {
        let is_near = |(start, _): &(u64, Range<usize>), (last, bytes): &(u64, Range<usize>)| {
            at - (last + bytes.len() as u64) <= MAX_GAP && at + range.len() as u64 - start <= MAX_SPAN
        };
        if !near.first().zip(near.last()).is_none_or(|(first, last)| is_near(first, last)) {
            read_near(of, tensor, &near, out, &mut scratch)?;
            near.clear();
        }
        near.push((at, range));
        Ok(())
    })?;
    read_near(of, tensor, &near, out, &mut scratch)
}

/// Reads runs of a tensor into their ranges of `out`, together with the bytes between them if the checkpoint holds those.
fn read_near(
    of: &dyn Checkpoint,
    tensor: usize,
    runs: &[(u64, Range<usize>)],
    out: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<()> {
    if let [(start, _), .., (last, bytes)] = runs {
        let size = (last - start) as usize + bytes.len();
        if of.holds(tensor, *start, size) {
            let span = of.bytes(tensor, *start, size, scratch)?;
            for (at, range) in runs {
                out[range.clone()].copy_from_slice(&span[(at - start) as usize..][..range.len()]);
            }
            return Ok(());
        }
    }
    runs.iter().try_for_each(|(at, range)| of.read(tensor, *at, &mut out[range.clone()]))
}
