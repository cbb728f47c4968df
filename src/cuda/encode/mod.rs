//! Encodes pairs on a device (spec section 9). The bytes are those of the encoder of the processor with the same options.
//!
//! | file | work |
//! |---|---|
//! | `tensors` | checkpoints in device memory |
//! | `session` | memory, launches and copies of an encoding |
//! | `chunks` | chunks: surveyed, their maps chosen, their coded lanes counted |
//! | `train` | samples for tables; the tables are made on the host |
//! | `payloads` | streams and payloads |
//! | `digests` | digests of tensors |
//! | `run` | all of it, in the order of the pair |
//! | `builder` | the builder `Encode` |

mod builder;
mod chunks;
mod digests;
mod payloads;
mod run;
mod session;
mod tensors;
mod train;

pub use builder::Encode;
#[cfg(test)]
pub(in crate::cuda) use chunks::Limits;
pub use tensors::DeviceCheckpoint;
