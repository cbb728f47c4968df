//! The mode of an application, and the source of its payloads.

use super::binding::Binding;
use crate::index::DeviceIndex;
use crate::runtime::inner::Inner;
use crate::runtime::memory::{DeviceSlice, PinnedBuffer};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use tpde::InPlace;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::source::Source;

/// Destination of an application: out of place or in place. Every mode makes the same [checks](crate#what-is-checked).
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
    /// `DeviceIndex::trust`.
    Device(DeviceSlice),
    /// Parts of the blob in device memory. One part must contain all payloads of a bound tensor. Their range is
    /// [`DeviceIndex::payloads_of`](crate::DeviceIndex::payloads_of).
    Parts(Vec<BlobPart>),
}

/// A part of a blob in device memory.
#[derive(Debug, Clone)]
pub struct BlobPart {
    /// Offset of the part in the blob.
    pub at: u64,
    /// The bytes of the part. Their address modulo 16 must equal `at` modulo 16.
    pub memory: DeviceSlice,
}

impl BlobPart {
    /// Returns the address that offset 0 of the blob would have. Only the part is read.
    fn blob(&self) -> u64 {
        self.memory.address().wrapping_sub(self.at)
    }

    /// Checks that its end is less than 2^64.
    fn check(&self) -> Result<()> {
        if self.at.checked_add(self.memory.bytes()).is_none() {
            return Err(Error::InvalidArgument(format!("the part of the blob from byte {} on ends after byte 2^64", self.at)));
        }
        Ok(())
    }

    /// Returns whether a range of the blob is within the part.
    fn has(&self, range: &Range<u64>) -> bool {
        self.at <= range.start && range.end - self.at <= self.memory.bytes()
    }
}

impl fmt::Debug for Payloads<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Payloads::Host(source) => write!(f, "Host({} bytes)", source.size()),
            Payloads::Kept(source) => write!(f, "Kept({} bytes)", source.size()),
            Payloads::Pinned(pinned) => write!(f, "{pinned:?}"),
            Payloads::Device(slice) => write!(f, "{slice:?}"),
            Payloads::Parts(parts) => write!(f, "{parts:?}"),
        }
    }
}

impl Payloads<'_> {
    /// Returns the device address of blob offset 0, if the payloads are on the device. With several parts of the blob it is 0: then
    /// records have addresses, see [`Schedule::place`](super::schedule::Schedule::place).
    pub(crate) fn on_device(&self) -> Option<u64> {
        match self {
            Payloads::Host(_) | Payloads::Kept(_) | Payloads::Pinned(_) => None,
            Payloads::Device(slice) => Some(slice.address()),
            Payloads::Parts(parts) => match &parts[..] {
                [part] => Some(part.blob()),
                _ => Some(0),
            },
        }
    }

    /// Returns the device addresses that blob offset 0 would have, one for each part of the blob.
    pub(crate) fn blobs(&self) -> Vec<u64> {
        match self {
            Payloads::Host(_) | Payloads::Kept(_) | Payloads::Pinned(_) => Vec::new(),
            Payloads::Device(slice) => vec![slice.address()],
            Payloads::Parts(parts) => parts.iter().map(BlobPart::blob).collect(),
        }
    }

    /// Returns the address that blob offset 0 would have for the part with this range. `None` for an empty range, and if there are not
    /// several parts.
    pub(crate) fn blob_of(&self, range: &Range<u64>) -> Option<u64> {
        match self {
            Payloads::Parts(parts) if parts.len() > 1 && !range.is_empty() => {
                parts.iter().find(|part| part.has(range)).map(BlobPart::blob)
            }
            _ => None,
        }
    }

    pub(crate) fn check_device(&self, device: &Arc<Inner>) -> Result<()> {
        match self {
            Payloads::Host(_) | Payloads::Kept(_) => Ok(()),
            Payloads::Pinned(pinned) => pinned.check_device(device),
            Payloads::Device(memory) => memory.check_device(device),
            Payloads::Parts(parts) => parts.iter().try_for_each(|part| part.memory.check_device(device)),
        }
    }

    /// Checks that the payloads of all bound tensors are present.
    pub(crate) fn check(&self, index: &DeviceIndex, tensors: &[Binding]) -> Result<()> {
        let blob_size = match self {
            Payloads::Host(source) => source.size(),
            Payloads::Kept(source) => source.size(),
            Payloads::Pinned(pinned) => pinned.len() as u64,
            Payloads::Device(slice) => slice.bytes(),
            Payloads::Parts(parts) => {
                parts.iter().try_for_each(BlobPart::check)?;
                for binding in tensors {
                    let payloads = index.payloads_of(binding.tensor)?;
                    if !payloads.is_empty() && !parts.iter().any(|part| part.has(&payloads)) {
                        let name = Escaped(&index.tensor(binding.tensor)?.name);
                        let found: Vec<_> = parts.iter().map(|part| part.at..part.at + part.memory.bytes()).collect();
                        return Err(Error::InvalidArgument(format!(
                            "the payloads of tensor {name} are bytes {payloads:?} of the blob, but the parts have {found:?}"
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
