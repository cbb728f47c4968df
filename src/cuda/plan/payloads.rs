//! The mode of an application, and the source of its payloads.

use super::binding::Binding;
use crate::apply::InPlace;
use crate::cuda::index::DeviceIndex;
use crate::cuda::runtime::inner::Inner;
use crate::cuda::runtime::memory::{DeviceSlice, PinnedBuffer};
use crate::error::{Error, Escaped, Result};
use crate::source::Source;
use std::fmt;
use std::sync::Arc;

/// Destination of an application: out of place or in place. Every mode makes the same [checks](crate::cuda#what-is-checked).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Reads the base and writes all lanes of the target elsewhere. If a chunk fails, discard the output.
    OutOfPlace,
    /// Turns the base into the target in place.
    InPlace(InPlace),
}

/// The source of the payloads: the blob of the pair.
#[derive(Clone)]
#[non_exhaustive]
pub enum Payloads<'a> {
    /// A file, a mapping or host memory. The launching thread, and rayon's threads, read it into the staging ring.
    Host(&'a dyn Source),
    /// As [`Payloads::Host`], owned by the application.
    Kept(Arc<dyn Source + Send>),
    /// Pinned memory, which the device copies without the processor. The processor expands only payloads of codec `zstd`.
    Pinned(Arc<PinnedBuffer>),
    /// Device memory, aligned to 16. Payloads of codec `zstd` are allowed only with
    /// [`DeviceIndex::trust`](crate::cuda::DeviceIndex::trust).
    Device(DeviceSlice),
    /// A part of the blob in device memory. It must hold all payloads of the bound tensors, see
    /// [`DeviceIndex::payloads_of`](crate::cuda::DeviceIndex::payloads_of). Its address modulo 16 must equal `at` modulo 16.
    Part {
        /// Offset of the part in the blob.
        at: u64,
        /// The bytes of the part.
        memory: DeviceSlice,
    },
}

impl fmt::Debug for Payloads<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Payloads::Host(source) => write!(f, "Host({} bytes)", source.size()),
            Payloads::Kept(source) => write!(f, "Kept({} bytes)", source.size()),
            Payloads::Pinned(pinned) => write!(f, "{pinned:?}"),
            Payloads::Device(slice) => write!(f, "{slice:?}"),
            Payloads::Part { at, memory } => write!(f, "{memory:?} from {at} on"),
        }
    }
}

impl Payloads<'_> {
    /// Returns the device address of blob offset 0. With a part of the blob this address may be outside of the memory. Only the
    /// part is read.
    pub(in crate::cuda) fn on_device(&self) -> Option<u64> {
        match self {
            Payloads::Host(_) | Payloads::Kept(_) | Payloads::Pinned(_) => None,
            Payloads::Device(slice) => Some(slice.address()),
            Payloads::Part { at, memory } => Some(memory.address().wrapping_sub(*at)),
        }
    }

    pub(in crate::cuda) fn check_device(&self, device: &Arc<Inner>) -> Result<()> {
        match self {
            Payloads::Host(_) | Payloads::Kept(_) => Ok(()),
            Payloads::Pinned(pinned) => pinned.check_device(device),
            Payloads::Device(memory) | Payloads::Part { memory, .. } => memory.check_device(device),
        }
    }

    /// Checks that the payloads of all bound tensors are present.
    pub(in crate::cuda) fn check(&self, index: &DeviceIndex, tensors: &[Binding]) -> Result<()> {
        let blob_size = match self {
            Payloads::Host(source) => source.size(),
            Payloads::Kept(source) => source.size(),
            Payloads::Pinned(pinned) => pinned.len() as u64,
            Payloads::Device(slice) => slice.bytes(),
            Payloads::Part { at, memory } => {
                let end = at.checked_add(memory.bytes()).ok_or_else(|| {
                    Error::InvalidArgument(format!("the part of the blob from byte {at} on ends after byte 2^64"))
                })?;
                for binding in tensors {
                    let payloads = index.payloads_of(binding.tensor)?;
                    if !payloads.is_empty() && (payloads.start < *at || payloads.end > end) {
                        let name = Escaped(&index.tensor(binding.tensor)?.name);
                        return Err(Error::InvalidArgument(format!(
                            "the part of the blob has bytes {at}..{end}, but the payloads of tensor {name} are bytes {payloads:?}"
                        )));
                    }
                }
                return Ok(());
            }
        };
        if blob_size != index.uploaded.blob_size {
            let needed = index.uploaded.blob_size;
            return Err(Error::InvalidArgument(format!(
                "the blob has {blob_size} bytes, expected the {needed} of the pair's blob"
            )));
        }
        Ok(())
    }
}
