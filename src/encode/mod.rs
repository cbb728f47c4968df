//! Encodes the difference of two checkpoints as a pair, and explains the size of a pair (spec section 9).

#![forbid(unsafe_code)]

mod analysis;
mod assembly;
mod bases;
mod builder;
mod candidates;
mod cuts;
mod estimate;
mod explain;
mod options;
mod plan;
mod processor;
mod renames;
mod run;
mod split;
mod train;

pub use bases::{UnusedBase, UnusedCause};
pub use builder::{Encode, Streamed};
pub use explain::{Explain, Explanation, TableSetReport, TensorExplanation, WayReport};
pub use options::{CodecChoice, EncodeOptions, Favor};
pub use run::{EncodeReport, PartReport, TensorReport, encode};
pub use split::Split;

// The encoder on a device shares these.
#[cfg(feature = "cuda")]
pub(crate) use cuts::Selection;
#[cfg(feature = "cuda")]
pub(crate) use estimate::{Estimator, LaneEstimate, LaneRange, choose_coding};
#[cfg(feature = "cuda")]
pub(crate) use options::Candidate;
#[cfg(feature = "cuda")]
pub(crate) use plan::{Plan, check_holdable, low_bits};
#[cfg(feature = "cuda")]
pub(crate) use renames::ChainNames;
#[cfg(feature = "cuda")]
pub(crate) use run::{check_options, report};
#[cfg(feature = "cuda")]
pub(crate) use train::{Group, PIECE, Pieces, group, train_with};
