//! A checkpoint whose tensors are rectangles of the tensors of another checkpoint.

#![forbid(unsafe_code)]

use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, Result};
use crate::rectangle::Runs;
use std::path::PathBuf;

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
        let size = out.len();
        runs.try_each(offset, size, |at, range| {
            let out = &mut out[range];
            match self.of.in_place(piece.tensor, at, out.len()) {
                Some(bytes) => {
                    out.copy_from_slice(bytes);
                    Ok(())
                }
                None => self.of.read(piece.tensor, at, out),
            }
        })
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
