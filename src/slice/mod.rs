//! Rectangles of tensors in memory, with rows at a distance from each other: the slices that ranks of a distributed job hold.

#![forbid(unsafe_code)]

mod checkpoint;
mod memory;
mod view;

pub use checkpoint::SliceCheckpoint;
pub use memory::{FusedSlices, Slice, SliceMut};
pub(crate) use memory::{Memories, PlacedSlice};
#[cfg(feature = "cuda")]
pub(crate) use view::Views;
pub(crate) use view::{View, check_disjoint};
