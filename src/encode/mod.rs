//! Encodes the difference of two checkpoints as a pair, and explains the size of a pair (spec section 9).

#![forbid(unsafe_code)]

mod assembly;
mod builder;
mod cuts;
mod explain;
mod options;
mod plan;
mod run;
mod split;
mod survey;
mod train;
mod ways;

pub use builder::Encode;
pub use explain::{Explain, Explanation, TableSetReport, TensorExplanation, WayReport};
pub use options::{CodecChoice, EncodeOptions, Favor};
pub use run::{EncodeReport, PartReport, TensorReport, encode};
pub use split::Split;

/// What the encoder on a device shares with this one.
#[cfg(feature = "cuda")]
pub(crate) mod shared {
    pub(crate) use super::plan::{Plan, check_holdable, low_bits, plan};
    pub(crate) use super::run::{check_options, report};
    pub(crate) use super::train::{Group, PIECE, Pieces, group, train_with};
}
