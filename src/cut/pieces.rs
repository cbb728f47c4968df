//! Pieces of the tensors of a checkpoint, as a checkpoint.

use super::converted::ConvertedTensor;
use crate::checkpoint::{Checkpoint, Region, TensorInfo, read_into};
use std::path::PathBuf;
use tpde_core::error::{Error, Result};
use tpde_core::layout::StridedLayout;

/// Where the bytes of a tensor are in a checkpoint.
#[derive(Debug, Clone)]
pub(crate) enum Piece {
    /// A tensor of the checkpoint, or a rectangle of it.
    Of(Region),
    /// Lanes that are converted from tensors of the checkpoint.
    Converted(ConvertedTensor),
}

impl Piece {
    /// A tensor by its number in the checkpoint. `runs` are the bytes of the piece in that tensor; `None` for all.
    pub fn of(tensor: usize, runs: Option<StridedLayout>) -> Self {
        Self::Of(Region { tensor, runs })
    }

    /// Size in bytes.
    pub fn size(&self, of: &dyn Checkpoint) -> u64 {
        match self {
            Self::Of(region) => region.size(of),
            Self::Converted(converted) => converted.size(),
        }
    }

    /// Fills `out` with bytes from byte `offset` on.
    pub fn read(&self, of: &dyn Checkpoint, offset: u64, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Of(region) => region.read(of, offset, out),
            Self::Converted(converted) => converted.read(of, offset, out),
        }
    }

    /// `size` bytes from byte `offset` on, if they are in memory.
    pub fn in_place<'a>(&self, of: &'a dyn Checkpoint, offset: u64, size: usize) -> Option<&'a [u8]> {
        match self {
            Self::Of(region) => region.in_place(of, offset, size),
            Self::Converted(_) => None,
        }
    }

    /// `size` bytes from byte `offset` on: borrowed if they are in memory, else read into `scratch`.
    pub fn bytes<'a>(&self, of: &'a dyn Checkpoint, offset: u64, size: usize, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        if let Some(bytes) = self.in_place(of, offset, size) {
            return Ok(bytes);
        }
        read_into(scratch, size, |out| self.read(of, offset, out))
    }

    /// Whether the checkpoint has the bytes that `size` bytes from byte `offset` on need.
    pub fn is_held(&self, of: &dyn Checkpoint, offset: u64, size: usize) -> bool {
        match self {
            Self::Of(region) => region.is_held(of, offset..offset.saturating_add(size as u64)),
            Self::Converted(converted) => converted.is_held(of, offset, size),
        }
    }

    /// The regions of the checkpoint that the piece needs.
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
        piece.read(self.of, offset, out)
    }

    fn in_place(&self, tensor_index: usize, offset: u64, size: usize) -> Option<&[u8]> {
        self.pieces.get(tensor_index)?.in_place(self.of, offset, size)
    }

    fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        self.pieces.get(tensor_index).is_some_and(|piece| piece.is_held(self.of, offset, size))
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.of.paths()
    }

    fn check_unchanged(&self) -> Result<()> {
        self.of.check_unchanged()
    }
}
