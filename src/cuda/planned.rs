//! Applications that have been worked out: what is done to which tensors, in what order, and in how much memory.

use super::binding::{self, Binding};
use super::device::{Device, Scratch};
use super::index::{DeviceIndex, laid_out};
use super::layout::{self, DeviceTensor};
use super::memory::{DeviceSlice, PinnedBuffer};
use super::plan::{Plan, Route};
use crate::codec::Codec;
use crate::delta::InPlace;
use crate::error::{Error, Escaped, Result};
use crate::format::{ChunkMetadata, PAYLOAD_ALIGN};
use crate::source::Source;
use std::fmt;
use std::sync::Arc;

/// Most slices that are decoded at once: as many as the driver keeps apart.
pub(super) const SIDES: usize = 8;

/// Most bytes of scratch memory that a caller gives, unless told otherwise.
const SCRATCH_MOST: u64 = 48 << 20;

/// What becomes of the base. In every mode CRC and sums are checked on the device, and digests are not: see the
/// [module](super#what-is-checked).
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
    /// [`DeviceIndex::trust`].
    Device(DeviceSlice),
    /// A part of the blob, from byte `at` of it on, in memory of the device: all payloads of the tensors that are bound, see
    /// [`DeviceIndex::payloads_of`]. The first byte lies as far behind a multiple of 16 as in the blob.
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
    pub(super) fn on_device(&self) -> Option<u64> {
        match self {
            Payloads::Host(_) | Payloads::Kept(_) | Payloads::Pinned(_) => None,
            Payloads::Device(slice) => Some(slice.address()),
            Payloads::Part { at, memory } => Some(memory.address().wrapping_sub(*at)),
        }
    }

    fn check_device(&self, device: &Device) -> Result<()> {
        match self {
            Payloads::Host(_) | Payloads::Kept(_) => Ok(()),
            Payloads::Pinned(pinned) => pinned.check_device(device),
            Payloads::Device(memory) | Payloads::Part { memory, .. } => memory.check_device(device),
        }
    }

    /// Whether these can be the payloads of the tensors.
    fn check(&self, index: &DeviceIndex, tensors: &[Binding]) -> Result<()> {
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
        if found != index.0.blob_size {
            let needed = index.0.blob_size;
            return Err(Error::Misuse(format!("a blob of {found} bytes for a pair whose blob has {needed}")));
        }
        Ok(())
    }
}

impl DeviceIndex {
    /// The first half of [`DeviceIndex::prepare`]: all that needs no memory of the device. What comes out says how much of it
    /// the other half needs, for those who want to give it.
    ///
    /// # Errors
    /// [`Error::Misuse`], as [`DeviceIndex::prepare`].
    pub fn plan<'a>(&self, tensors: &[Binding], mode: Mode, payloads: Payloads<'a>) -> Result<Planned<'a>> {
        let (mut chunks, mut bytes) = (0, 0);
        for binding in tensors {
            let of_tensor = self.tensor(binding.tensor)?.chunks();
            chunks += of_tensor.len() as u64;
            let records = &self.0.records[of_tensor.start as usize..of_tensor.end as usize];
            bytes += records.iter().map(|record| u64::from(record.compressed_size.get())).sum::<u64>();
        }
        // As many slices as can be decoded at once, so that the first is soon there; but each should fill the device, as one
        // that does not takes as long, and be so large that launches cost little beside copies.
        let full = 2 * u64::from(self.device().multiprocessors());
        let slices = (chunks / full).clamp(1, SIDES as u64);
        self.plan_in_slices(tensors, mode, payloads, (bytes / slices).max(512 << 10))
    }

    pub(super) fn plan_in_slices<'a>(
        &self,
        tensors: &[Binding],
        mode: Mode,
        payloads: Payloads<'a>,
        slice_bytes: u64,
    ) -> Result<Planned<'a>> {
        payloads.check(self, tensors)?;
        payloads.check_device(self.device())?;
        check_devices(self.device(), tensors)?;
        let bindings = binding::check(&self.0.tensors, tensors, mode != Mode::OutOfPlace)?.bindings;
        let route = match payloads.on_device() {
            Some(blob) if !blob.is_multiple_of(PAYLOAD_ALIGN) => {
                return Err(Error::Misuse(format!("a blob at {blob:#x}, which is no multiple of {PAYLOAD_ALIGN}")));
            }
            Some(_) => Route::OnDevice,
            None => Route::Staged { slice_bytes },
        };
        let plan = Plan::new(self, &bindings, route)?;
        Ok(Planned { index: self.clone(), bindings, mode, plan, payloads, scratch_most: SCRATCH_MOST })
    }
}

/// An application that has been worked out and has no memory of the device yet.
#[derive(Debug)]
pub struct Planned<'a> {
    pub(super) index: DeviceIndex,
    pub(super) bindings: Vec<Binding>,
    pub(super) mode: Mode,
    pub(super) plan: Plan,
    pub(super) payloads: Payloads<'a>,
    scratch_most: u64,
}

/// Where in the memory of an application its parts begin, and how large all is.
pub(super) struct Layout {
    pub table: u64,
    pub order: u64,
    pub records: u64,
    /// Behind the parts that are copied to the device.
    pub copied: u64,
    pub statuses: u64,
    pub flag: u64,
    pub scratch: u64,
    pub staging: u64,
    pub bytes: u64,
}

impl Planned<'_> {
    /// Bytes of device memory for [`Planned::prepare_in`]: 4 a chunk for the order of work and 4 for its outcome, 48 a tensor;
    /// the payloads, where they are copied; and what changes take in place until they are carried out, up to 48 MiB.
    pub fn bytes(&self) -> u64 {
        self.layout(self.scratch(true), self.plan.staged_bytes).bytes
    }

    /// Bounds the memory for changes of chunks: with less than they take, chunks are decoded twice.
    #[must_use]
    pub fn scratch_most(self, bytes: u64) -> Self {
        Self { scratch_most: bytes, ..self }
    }

    /// The scratch memory of the application's own, yet without an address. To check all first, it has room for all changes, while
    /// there is: chunks without it are decoded twice. Chunk by chunk there is some only where memory is the caller's: slots as
    /// large as the changes of these chunks want it, and as many as blocks may have at once, while there is room. Where there is
    /// not, it is better to have a slot for each block and some chunks decoded twice than blocks that wait.
    pub(super) fn scratch(&self, is_given: bool) -> Option<Scratch> {
        let (mut chunks, mut most, mut all) = (0, 0, 0);
        for binding in &self.bindings {
            let Ok(tensor) = self.index.tensor(binding.tensor) else { continue };
            if tensor.codec != Codec::Conditioned {
                continue;
            }
            let (of_tensor, lane_log2) = (tensor.chunks(), tensor.device.lane_log2);
            for record in &self.index.0.records[of_tensor.start as usize..of_tensor.end as usize] {
                let changes = u64::from(record.num_deltas.get());
                if changes > 0 {
                    chunks += 1;
                    let bytes = layout::list_bytes(changes, lane_log2);
                    (most, all) = (most.max(bytes), all + bytes);
                }
            }
        }
        match self.mode {
            Mode::InPlace(InPlace::AllChecked) => Scratch::kept(self.plan.order.len() as u32, all, self.scratch_most),
            Mode::InPlace(InPlace::ChunkByChunk) if is_given => {
                Scratch::planned(chunks, most, self.index.device().multiprocessors(), self.scratch_most)
            }
            _ => None,
        }
    }

    pub(super) fn layout(&self, scratch: Option<Scratch>, staged_bytes: u64) -> Layout {
        // Of the tensor table, only from the first to the last tensor that is used.
        let first = self.bindings.first().map_or(0, |binding| binding.tensor);
        let end = self.bindings.last().map_or(0, |binding| binding.tensor + 1);
        let scratch = scratch.map_or(0, |scratch| scratch.bytes);
        let ([table, order, records, statuses, flag, scratch, staging], bytes) = laid_out([
            (size_of::<DeviceTensor>() * (end - first)) as u64,
            4 * self.plan.order.len() as u64,
            (size_of::<ChunkMetadata>() * self.plan.records.len()) as u64,
            4 * self.plan.span.len() as u64,
            4,
            scratch,
            staged_bytes,
        ]);
        Layout { table, order, records, copied: statuses, statuses, flag, scratch, staging, bytes }
    }
}

/// Whether work on this device may use the memory of these tensors.
pub(super) fn check_devices(device: &Device, tensors: &[Binding]) -> Result<()> {
    let mut memory = tensors.iter().flat_map(|binding| binding.base.iter().chain([&binding.output]));
    memory.try_for_each(|memory| memory.check_device(device))
}

/// What kernels are told of the tensors, from the first that is bound to the last.
pub(super) fn table_of(index: &DeviceIndex, bindings: &[Binding], mode: Mode) -> Result<Vec<DeviceTensor>> {
    let first = bindings.first().map_or(0, |binding| binding.tensor);
    let end = bindings.last().map_or(0, |binding| binding.tensor + 1);
    let mut table = vec![DeviceTensor::default(); end - first];
    for binding in bindings {
        let tensor = &index.tensor(binding.tensor)?.device;
        let output = binding.output.address();
        let base = match mode {
            Mode::OutOfPlace => binding.base.as_ref().map_or(0, DeviceSlice::address),
            Mode::InPlace(_) => output,
        };
        table[binding.tensor - first] = DeviceTensor { base, output, ..*tensor };
    }
    Ok(table)
}
