//! Decoding on CUDA devices (spec section 13, the class *GPU consumer*).
//!
//! Open a device once and upload an index once. Then rebuild tensors, or change them in place. Memory and streams are those of
//! this crate or of the caller. Kernels do steps 8 to 11 for each chunk and return a status word. Only status words leave the
//! device.
//!
//! # What is checked
//!
//! Kernels compare the CRC of each payload, and the base sum and target sum of each chunk. From format 1.2 on they also compare
//! digests of payloads, in every [`Mode`], if the index has the digest of each payload or the application reads all payloads:
//! [`Application::payload_digests`]. Unless [`ApplyPlan::digests`] is off, they compare the digest of each target too; in place,
//! with everything checked, before anything is written. They compare no digests of bases, which the base sums and the digest of
//! the target cover: another base gives another target. Only [`Apply::on`](tpde::Apply::on) compares both.
//!
//! CRC and sums find accidents. The CRC misses random damage of a payload with probability 2^-32. The target sum misses random
//! changes of the result with probability about 2^-64. The worst case is 2^-32, if only top bits differ.
//!
//! They do not find forgery. CRC and sums are linear, so an attacker can change a blob to give other weights under the same CRC and
//! sums. Digests of payloads and of targets find forgery if the pair digest is authentic. In place, chunk by chunk, digests of
//! targets are compared only after the chunks are written.
//!
//! ```no_run
//! use tpde_cuda::{Application, ApplyPlan, Binding, Device, DeviceIndex, Mode, Payloads};
//! use tpde::{InPlace, Pair};
//!
//! # fn main() -> tpde::Result<()> {
//! let device = Device::open(0)?;
//! let pair = Pair::open("rl20")?;
//! let index = DeviceIndex::upload(&device, pair.index())?;
//! let stream = device.stream()?;
//! # let weights: Vec<u8> = vec![];
//! let memory = device.alloc(weights.len() as u64)?;
//! device.write(&memory, &weights)?;
//! let tensor = index.find("layer.weight").expect("a tensor of the pair");
//! let tensors = [Binding::in_place(tensor, memory.clone())];
//! let plan = ApplyPlan::new(&index, &tensors, Mode::InPlace(InPlace::AllChecked), Payloads::Host(pair.blob()))?;
//! let pending = Application::prepare(plan)?.launch(&stream)?;
//! // Other work may be queued on the stream here.
//! pending.wait()?;
//! # Ok(())
//! # }
//! ```
//!
//! Building the crate needs no part of CUDA. The driver is loaded at run time, when a device is first requested. Feature `nvcomp`
//! adds nvCOMP, which is loaded at run time too.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

mod abi;
mod accelerator;
mod application;
mod chain;
mod checkpoint;
mod derived;
mod encode;
mod hashes;
mod index;
#[cfg(feature = "nvcomp")]
mod nvcomp;
mod plan;
mod rebuild;
mod rows;
mod runtime;
mod slices;
#[cfg(test)]
mod tests;

// The crate `tpde` has the same for its documents.
#[cfg(doctest)]
#[doc = include_str!("../../docs/cuda.md")]
struct Cuda;

#[cfg(feature = "nvcomp")]
pub use accelerator::NvcompDevice;
pub use application::Application;
pub use application::outcome::{BadChunk, Captured, Pending};
pub use chain::{ApplyChain, ChainStep};
pub use checkpoint::DeviceCheckpoint;
pub use encode::{Encode, Encoder, Encoding};
pub use hashes::Hashes;
pub use index::DeviceIndex;
#[cfg(feature = "nvcomp")]
pub use nvcomp::Nvcomp;
pub use plan::ApplyPlan;
pub use plan::binding::Binding;
pub use plan::payloads::{BlobPart, Mode, Payloads};
pub use rebuild::Rebuild;
pub use rows::Rows;
pub use runtime::device::{Device, FirstCall};
pub use runtime::graph::Graph;
pub use runtime::memory::{DeviceSlice, PinnedBuffer};
pub use runtime::stream::{Event, Stream};
pub use slices::TensorSlice;
