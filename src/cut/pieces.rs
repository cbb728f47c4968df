//! Pieces of the tensors of a checkpoint, as a checkpoint.

use super::converted::ConvertedTensor;
use super::runs::Region;
use crate::checkpoint::{Checkpoint, TensorInfo};
use std::path::PathBuf;
use tpde_core::error::{Error, Result};
use tpde_core::layout::StridedLayout;

/// A tensor of a [`Cut`].
pub(crate) enum Piece {
    /// A tensor of the other checkpoint, or a rectangle of it.
    Of(Region),
    /// Lanes that are converted from tensors of the other checkpoint.
    Converted(ConvertedTensor),
}

impl Piece {
    /// A tensor by its number in the other checkpoint. `runs` are the bytes of the piece in that tensor; `None` for all.
    pub fn of(tensor: usize, runs: Option<StridedLayout>) -> Self {
        Self::Of(Region { tensor, runs })
    }

    /// The regions of the other checkpoint that the piece needs.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        let (first, second) = match self {
            Piece::Of(region) => (region, None),
            Piece::Converted(converted) => converted.regions(),
        };
        std::iter::once(first).chain(second)
    }
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

    /// Tensor number, in the other checkpoint, of a piece. For a converted piece, the number of its base tensor.
    pub fn tensor(&self, piece: usize) -> usize {
        self.regions_of(piece).next().map_or(usize::MAX, |region| region.tensor)
    }

    /// The regions of the other checkpoint that a piece needs.
    pub fn regions_of(&self, piece: usize) -> impl Iterator<Item = &Region> {
        self.pieces[piece].regions()
    }
}

impl Checkpoint for Cut<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let piece = self.pieces.get(tensor_index).ok_or_else(|| Error::InvalidArgument(format!("no piece {tensor_index}")))?;
        match piece {
            Piece::Of(region) => region.read_into(self.of, offset, out),
            Piece::Converted(converted) => converted.read(self.of, offset, out),
        }
    }

    fn in_place(&self, tensor_index: usize, offset: u64, size: usize) -> Option<&[u8]> {
        match self.pieces.get(tensor_index)? {
            Piece::Of(region) => region.in_place(self.of, offset, size),
            Piece::Converted(_) => None,
        }
    }

    fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        match self.pieces.get(tensor_index) {
            Some(Piece::Of(region)) => region.is_held(self.of, offset..offset.saturating_add(size as u64)),
            Some(Piece::Converted(converted)) => converted.is_held(self.of, offset, size),
            None => false,
        }
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.of.paths()
    }

    fn check_unchanged(&self) -> Result<()> {
        self.of.check_unchanged()
    }
}
