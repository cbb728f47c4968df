//! Codec 2: entropy coding of the changes given the base lanes (`spec/codecs.md` section 4).
//!
//! One file per section: `context` (4.1), `tables` (4.2 and 4.3), `payload` (4.4), `stream` (4.5), `decode` (4.4 to 4.6). The
//! spec leaves an encoder's choices open. `train` makes tables from a sample of all tensors, and `cluster` divides its statistics
//! into classes. `stats` counts the changes of a chunk, `choice` chooses the parameters of its payload, and `encode` writes it.
//! `values` computes the values of coded lanes. `window` has the lanes that are being decoded.

mod choice;
mod cluster;
mod coded;
mod context;
mod cost;
mod decode;
mod encode;
#[cfg(any(test, fuzzing))]
#[path = "tests/model.rs"]
pub mod model;
mod parts;
mod payload;
mod stats;
mod stream;
mod tables;
mod train;
mod values;
mod window;

pub use choice::ModelTables;
pub use cost::BIT;
pub use decode::{ConditionedChunk, Decoder};
pub use encode::{DecodeCost, Encoder, estimated_size, listed_bytes, shape, size_of_cost, uncoded_bytes};
pub use parts::parts;
pub use stats::sample_offset;
#[cfg(fuzzing)]
pub use tables::check_lookup;
pub use tables::{TableSet, token_of, tokens_within};
pub use train::{Sample, Trainer};

#[cfg(test)]
mod tests;
