//! Encodes the difference of two checkpoints as a pair, and explains the size of a pair (spec section 9).

#![forbid(unsafe_code)]

mod analysis;
mod assembly;
mod bases;
mod builder;
mod candidates;
mod cuts;
#[doc(hidden)]
mod estimate;
mod explain;
mod options;
#[doc(hidden)]
mod plan;
mod processor;
#[doc(hidden)]
mod renames;
mod run;
mod split;
#[doc(hidden)]
mod train;

pub use bases::{UnusedBase, UnusedCause};
pub use builder::{Encode, Streamed};
pub use explain::{Explain, Explanation, TableSetReport, TensorExplanation, WayReport};
pub use options::{CodecChoice, EncodeOptions, Favor};
pub use run::{EncodeReport, PartReport, TensorReport, encode};
pub use split::Split;

// The encoder on a device shares these, through `internals`.
pub use cuts::Selection;
pub use estimate::{Estimator, LaneEstimate, LaneRange, choose_coding};
pub use options::Candidate;
pub use plan::{Plan, check_holdable, low_bits};
pub use renames::ChainNames;
pub use run::{check_options, report};
pub use train::{Group, PIECE, Pieces, group, train_with};
