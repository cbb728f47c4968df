//! Rectangles of tensors in memory, with rows at a distance from each other: the slices that ranks of a distributed job hold.

#![forbid(unsafe_code)]

mod checkpoint;
mod held;
mod layout;
mod memory;
mod span;

pub use checkpoint::SliceCheckpoint;
pub(crate) use held::check_disjoint;
#[cfg(feature = "cuda")]
pub(crate) use held::{HeldSlices, NewSlice};
pub(crate) use layout::SliceLayout;
pub use memory::{FusedSlices, Slice, SliceMut};
pub(crate) use memory::{Held, Memories};
#[cfg(feature = "cuda")]
pub(crate) use span::Span;
