//! A checkpoint whose tensors are rectangles of the tensors of another checkpoint, or are formed from them.

#![forbid(unsafe_code)]

mod formed;
mod pieces;
mod runs;

pub(crate) use formed::Formed;
pub(crate) use pieces::{Cut, Piece};
pub(crate) use runs::read_runs;
