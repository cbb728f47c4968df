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
#[doc(hidden)]
pub mod model;
mod parts;
mod payload;
mod stats;
mod stream;
mod tables;
mod train;
mod values;
mod window;

#[doc(hidden)]
pub use choice::ModelTables;
#[doc(hidden)]
pub use cost::BIT;
#[doc(hidden)]
pub use decode::{ConditionedChunk, Decoder};
pub use encode::DecodeCost;
#[doc(hidden)]
pub use encode::Encoder;
#[doc(hidden)]
pub use encode::uncoded_size;
#[doc(hidden)]
pub use encode::{estimated_size, listed_bytes, shape, size_of_cost, uncoded_bytes};
#[doc(hidden)]
pub use parts::parts;
#[doc(hidden)]
pub use stats::sample_offset;
pub use tables::TableSet;
#[cfg(fuzzing)]
#[doc(hidden)]
pub use tables::check_lookup;
#[doc(hidden)]
pub use tables::token_of;
#[doc(hidden)]
pub use tables::tokens_within;
#[doc(hidden)]
pub use train::{Sample, Trainer};

#[cfg(test)]
mod tests;
