//! Rectangles of tensors in memory, with rows at a distance from each other: the slices that ranks of a distributed job hold.

#![forbid(unsafe_code)]

mod checkpoint;
mod memory;
#[doc(hidden)]
mod view;

pub use checkpoint::SliceCheckpoint;
pub use memory::{FusedSlices, Slice, SliceMut};
pub(crate) use memory::{Memories, PlacedSlice};
pub(crate) use view::check_disjoint;
pub use view::{View, Views};
