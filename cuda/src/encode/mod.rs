//! Encodes pairs on a device (spec section 9). The bytes are those of the encoder of the processor with the same options.
//!
//! | file | work |
//! |---|---|
//! | `source` | base and target: the memory of each entry, and copies without gaps |
//! | `convert` | base lanes that are converted from tensors of other dtypes |
//! | `session` | memory, launches and copies of an encoding |
//! | `chunks` | chunks: analysed, their maps chosen, their coded lanes counted |
//! | `train` | samples for tables; the tables are made on the host |
//! | `blob` | the blob, in a file or in memory |
//! | `payloads` | streams and payloads |
//! | `waves` | waves of chunks, analysed while tables are trained, encoded while the payloads of those before are copied |
//! | `assembly` | the pair, in the order of its tensors |
//! | `digests` | digests of tensors, hashed on the device |
//! | `limits` | sizes of memory |
//! | `job`, `run` | all of it |
//! | `builder` | the builder `Encode` |
//! | `started` | encodings that run in threads of their own |

mod assembly;
mod blob;
mod builder;
mod chunks;
mod convert;
mod digests;
mod job;
mod limits;
mod payloads;
mod run;
mod session;
mod source;
mod started;
mod train;
mod waves;

pub use builder::Encode;
#[cfg(test)]
pub(crate) use limits::{Limits, WORKERS};
pub use session::Encoder;
#[cfg(test)]
pub(crate) use session::STEP;
pub use started::Encoding;
