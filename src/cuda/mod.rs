//! Decoding on CUDA devices (spec section 13, the class *GPU consumer*).
//!
//! A device is opened once, an index uploaded once, and then tensors are rebuilt or changed where they lie, in memory of the
//! device that is this crate's or a caller's, on a stream of this crate's or a caller's. Kernels do steps 8 to 11 for each chunk
//! and answer with a status word; nothing leaves the device but those.
//!
//! # What is checked
//!
//! Kernels compare the CRC of each payload, and the base sum and target sum of each chunk. They compare no digests, in any
//! [`Mode`]. That finds accidents: the CRC misses random damage of a payload with a probability of 2^-32, and the target sum
//! misses random changes of the result with one of about 2^-64, or 2^-32 at worst, where only top bits differ. It does not find forgery: CRC and sums are linear, so a blob can be changed to give
//! other weights under the same index and the same signed pair digest. Payloads whose author is not trusted take
//! [`Apply::on`](crate::Apply::on), which hashes what the device gives back and compares the digests, or
//! [`Apply::verify`](crate::Apply::verify) before.
//!
//! ```no_run
//! use tpde::cuda::{Application, ApplyPlan, Binding, Device, DeviceIndex, Mode, Payloads};
//! use tpde::{InPlace, Pair};
//!
//! # fn main() -> tpde::Result<()> {
//! let device = Device::open(0)?;
//! let pair = Pair::open("rl20".as_ref())?;
//! let index = DeviceIndex::upload(&device, pair.index())?;
//! let stream = device.stream()?;
//! # let weights: Vec<u8> = vec![];
//! let memory = device.alloc(weights.len() as u64)?;
//! device.write(&memory, &weights)?;
//! let place = index.find("layer.weight").expect("a tensor of the pair");
//! let tensors = [Binding::in_place(place, memory.clone())];
//! let plan = ApplyPlan::new(&index, &tensors, Mode::InPlace(InPlace::AllChecked), Payloads::Host(pair.blob()))?;
//! let pending = Application::prepare(plan)?.launch(&stream)?;
//! // Other work may be queued on the stream here.
//! pending.wait()?;
//! # Ok(())
//! # }
//! ```
//!
//! Nothing of CUDA is needed to build the crate; the driver is loaded when a device is first asked for.

mod abi;
mod accelerator;
mod application;
mod index;
mod nvcomp;
mod plan;
mod runtime;
#[cfg(test)]
mod tests;

pub use accelerator::NvcompDevice;
pub use application::Application;
pub use application::outcome::{BadChunk, Captured, Pending};
pub use index::DeviceIndex;
pub use nvcomp::Nvcomp;
pub use plan::ApplyPlan;
pub use plan::binding::Binding;
pub use plan::payloads::{Mode, Payloads};
pub use runtime::device::{Device, FirstCall};
pub use runtime::graph::Graph;
pub use runtime::memory::{DeviceSlice, PinnedBuffer};
pub use runtime::stream::{Event, Stream};
