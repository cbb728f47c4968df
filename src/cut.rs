//! A checkpoint whose tensors are rectangles of the tensors of another checkpoint.

#![forbid(unsafe_code)]

use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, Result};
use crate::rectangle::Runs;
use std::ops::Range;
use std::path::PathBuf;

/// Maximum distance in bytes of runs that are read together. Reading a page costs less than a call.
const MAX_GAP: u64 = 4096;
/// Maximum number of bytes that are read together.
const MAX_SPAN: u64 = 64 << 10;

/// A tensor of a [`Cut`].
pub(crate) struct Piece {
    /// Tensor number in the other checkpoint.
    pub tensor: usize,
    /// The bytes of the piece in that tensor; `None` for the whole tensor.
    pub runs: Option<Runs>,
}

/// Pieces of the tensors of a checkpoint. Several pieces may have the same name, so they are found by number.
pub(crate) struct Cut<'a> {
    of: &'a dyn Checkpoint,
    infos: Vec<TensorInfo>,
    pieces: Vec<Piece>,
}

impl<'a> Cut<'a> {
    pub fn new(of: &'a dyn Checkpoint) -> Self {
        Self { of, infos: Vec::new(), pieces: Vec::new() }
    }

    /// Adds a piece. `info` has the name, and the dtype and shape of the piece.
    pub fn push(&mut self, info: TensorInfo, piece: Piece) {
        self.infos.push(info);
        self.pieces.push(piece);
    }

    /// Tensor number, in the other checkpoint, of a piece.
    pub fn tensor(&self, piece: usize) -> usize {
        self.pieces[piece].tensor
    }
}

/// Fills `out` with bytes of a rectangle of a tensor, from byte `offset` of the rectangle on. The rectangle must have these bytes.
/// Runs that are near each other are read together, with the bytes between them if the checkpoint holds those.
pub(crate) fn read_runs(of: &dyn Checkpoint, tensor: usize, runs: &Runs, offset: u64, out: &mut [u8]) -> Result<()> {
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

impl Checkpoint for Cut<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let piece = self.pieces.get(tensor_index).ok_or_else(|| Error::InvalidArgument(format!("no piece {tensor_index}")))?;
        let Some(runs) = &piece.runs else { return self.of.read(piece.tensor, offset, out) };
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > runs.bytes()) {
            let reason = format!("piece {tensor_index} does not have {} bytes from byte {offset} on", out.len());
            return Err(Error::InvalidArgument(reason));
        }
        read_runs(self.of, piece.tensor, runs, offset, out)
    }

    fn in_place(&self, tensor_index: usize, offset: u64, size: usize) -> Option<&[u8]> {
        let piece = self.pieces.get(tensor_index)?;
        let at = match &piece.runs {
            Some(runs) => runs.contiguous(offset, size)?,
            None => offset,
        };
        self.of.in_place(piece.tensor, at, size)
    }

    fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        let Some(piece) = self.pieces.get(tensor_index) else { return false };
        let holds = |at: u64, size: usize| self.of.holds(piece.tensor, at, size);
        let each = |runs: &Runs| runs.try_each(offset, size, |at, range| if holds(at, range.len()) { Ok(()) } else { Err(()) });
        piece.runs.as_ref().map_or_else(|| holds(offset, size), |runs| each(runs).is_ok())
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.of.paths()
    }

    fn check_unchanged(&self) -> Result<()> {
        self.of.check_unchanged()
    }
}
