//! Makes one pair of several, or of some tensors of one, without decoding (spec section 12.2).

#![forbid(unsafe_code)]

mod builder;
mod copy;
mod files;
mod input;
mod parts;
mod plan;

pub use builder::{Merge, MergeReport};
