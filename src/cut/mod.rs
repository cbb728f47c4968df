//! A checkpoint whose tensors are rectangles of the tensors of another checkpoint, or are converted from them.

#![forbid(unsafe_code)]

mod converted;
mod pieces;
mod runs;

pub use converted::ConvertedTensor;
pub(crate) use pieces::{Cut, Piece};
pub(crate) use runs::read_runs;
