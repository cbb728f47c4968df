//! A checkpoint whose tensors are rectangles of the tensors of another checkpoint, or are converted from them.

#![forbid(unsafe_code)]

mod converted;
mod pieces;

pub use converted::ConvertedTensor;
pub(crate) use pieces::{Cut, Piece};
