//! What becomes of the base, and where payloads are.

use super::binding::Binding;
use crate::cuda::index::DeviceIndex;
use crate::cuda::runtime::inner::Inner;
use crate::cuda::runtime::memory::{DeviceSlice, PinnedBuffer};
use crate::delta::InPlace;
use crate::error::{Error, Escaped, Result};
use crate::source::Source;
use std::fmt;
use std::sync::Arc;

/// What becomes of the base. In every mode CRC and sums are checked on the device, and digests are not: see the
/// [module](crate::cuda#what-is-checked).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It is read, and all lanes of the target are written elsewhere. If a chunk fails, the output is to be discarded.
    OutOfPlace,
    /// It turns into the target where it lies.
    InPlace(InPlace),
}

/// Where the payloads of a pair are: its blob, from the first byte on.
#[derive(Clone)]
pub enum Payloads<'a> {
    /// A file, a mapping or memory of the host: read into the staging ring by the thread that launches, with help from rayon's.
    Host(&'a dyn Source),
    /// The same, kept by the application.
    Kept(Arc<dyn Source + Send>),
    /// Pinned memory: copied by the device alone, but for payloads of codec `zstd`, which the processor expands.
    Pinned(Arc<PinnedBuffer>),
    /// Memory of the device, the first byte at a multiple of 16; payloads of codec `zstd` only with
    /// [`DeviceIndex::trust`](crate::cuda::DeviceIndex::trust).
    Device(DeviceSlice),
    /// A part of the blob, from byte `at` of it on, in memory of the device: all payloads of the tensors that are bound, see
    /// [`DeviceIndex::payloads_of`](crate::cuda::DeviceIndex::payloads_of). The first byte lies as far behind a multiple
    /// of 16 as in the blob.
    Part {
        /// Where in the blob the part begins.
        at: u64,
        /// Its bytes.
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
    /// Where the blob begins in the device's memory, or would: only what of it is there is ever read.
    pub(in crate::cuda) fn on_device(&self) -> Option<u64> {
        match self {
            Payloads::Host(_) | Payloads::Kept(_) | Payloads::Pinned(_) => None,
            Payloads::Device(slice) => Some(slice.address()),
            Payloads::Part { at, memory } => Some(memory.address().wrapping_sub(*at)),
        }
    }

    pub(super) fn check_device(&self, device: &Arc<Inner>) -> Result<()> {
        match self {
            Payloads::Host(_) | Payloads::Kept(_) => Ok(()),
            Payloads::Pinned(pinned) => pinned.check_device(device),
            Payloads::Device(memory) | Payloads::Part { memory, .. } => memory.check_device(device),
        }
    }

    /// Whether these can be the payloads of the tensors.
    pub(super) fn check(&self, index: &DeviceIndex, tensors: &[Binding]) -> Result<()> {
        let found = match self {
            Payloads::Host(source) => source.size(),
            Payloads::Kept(source) => source.size(),
            Payloads::Pinned(pinned) => pinned.len() as u64,
            Payloads::Device(slice) => slice.bytes(),
            Payloads::Part { at, memory } => {
                let end = at.checked_add(memory.bytes()).ok_or_else(|| Error::Misuse(format!("a part of a blob from {at} on")))?;
                for binding in tensors {
                    let payloads = index.payloads_of(binding.tensor)?;
                    if !payloads.is_empty() && (payloads.start < *at || payloads.end > end) {
                        let name = Escaped(&index.tensor(binding.tensor)?.name);
                        return Err(Error::Misuse(format!(
                            "bytes {at} to {end} of a blob, and tensor {name} has its payloads at {payloads:?}"
                        )));
                    }
                }
                return Ok(());
            }
        };
        if found != index.uploaded.blob_size {
            let needed = index.uploaded.blob_size;
            return Err(Error::Misuse(format!("a blob of {found} bytes for a pair whose blob has {needed}")));
        }
        Ok(())
    }
}
