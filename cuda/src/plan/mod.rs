//! Plans of applications: tensors, order of the chunks, and memory.

pub(super) mod binding;
pub(super) mod digests;
pub(super) mod payloads;
pub(super) mod program;
pub(super) mod schedule;
pub(super) mod targets;

use self::binding::Binding;
use self::digests::{DigestPiece, DigestPlan};
use self::payloads::{Mode, Payloads};
use self::program::SIDES;
use self::schedule::Schedule;
use self::targets::Targets;
use super::abi::{self, DeviceTensor, TensorForm, TensorRows};
use super::index::{DeviceIndex, PayloadDigestSource};
use super::rows::tensor_rows;
use super::runtime::inner::Inner;
use super::runtime::kernels::Variant;
use super::runtime::layout::MemoryLayout;
use super::runtime::memory::DeviceSlice;
use super::runtime::scratch::Scratch;
use std::sync::Arc;
use tpde::{InPlace, PayloadDigests};
use tpde_core::codec::Codec;
use tpde_core::error::{Error, Result};
use tpde_core::format::{ChunkMetadata, PAYLOAD_ALIGN};
use zerocopy::IntoBytes;

/// Default bound of scratch memory in bytes, and its bound in memory of the caller.
const MAX_SCRATCH_BYTES: u64 = 1 << 30;
const MAX_CALLER_SCRATCH_BYTES: u64 = 48 << 20;

/// A checked plan to rebuild or change tensors of a pair. It has no device memory.
#[derive(Debug)]
pub struct ApplyPlan<'a> {
    pub(super) index: DeviceIndex,
    pub(super) bindings: Vec<Binding>,
    pub(super) mode: Mode,
    pub(super) schedule: Schedule,
    pub(super) payloads: Payloads<'a>,
    pub(super) digests: Option<DigestPlan>,
    pub(super) compared: PayloadDigests,
    targets: Targets,
    compares_targets: bool,
    /// Limit for scratch memory, if the caller has set one.
    max_scratch_bytes: Option<u64>,
    /// Whether the outputs are scratch memory, see [`ApplyPlan::in_scratch`].
    is_in_scratch: bool,
}

/// Offsets of the parts of an application's memory.
pub(super) struct Offsets {
    pub table: u64,
    pub order: u64,
    pub records: u64,
    pub pieces: u64,
    pub warps: u64,
    pub list_record: u64,
    pub host_list: u64,
    pub target_order: u64,
    pub target_digests: u64,
    /// End of the parts that are copied from the host.
    pub copied: u64,
    pub statuses: u64,
    /// Number of status words: of chunks, of payload digests if they are compared, and of targets if they are compared.
    pub status_words: usize,
    pub nodes: u64,
    pub target_nodes: u64,
    pub list: u64,
    pub flag: u64,
    pub scratch: u64,
    pub target_scratch: u64,
    pub staging: u64,
    /// Size of all parts, in bytes.
    pub bytes: u64,
}

impl<'a> ApplyPlan<'a> {
    /// Plans an application of some or all tensors of a pair. Cost: one pass over the records of their chunks. It allocates no
    /// device memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if
    /// - a tensor does not exist, or is bound twice to different memory,
    /// - a length or an alignment is wrong,
    /// - memory overlaps, or an output of an application out of place overlaps a base,
    /// - memory or payloads are on another device,
    /// - the blob has another size, or a part of it lacks payloads of these tensors,
    /// - payloads of codec `zstd` are in device memory, and the pair is not trusted.
    pub fn new(index: &DeviceIndex, tensors: &[Binding], mode: Mode, payloads: Payloads<'a>) -> Result<Self> {
        let (mut chunks, mut bytes) = (0u64, 0u64);
        for binding in tensors {
            for chunk in binding.chunks(index.tensor(binding.tensor)?) {
                // Bindings are checked later.
                let record = index.uploaded.records.get(chunk as usize);
                chunks += 1;
                bytes += record.map_or(0, |record| u64::from(record.compressed_size.get()));
            }
        }
        // With many slices decoding starts early. But each slice must fill the device, because a smaller slice takes as long. And
        // its copy must take longer than its launches.
        let chunks_to_fill = 2 * u64::from(index.device().multiprocessors());
        let slices = (chunks / chunks_to_fill).clamp(1, SIDES as u64);
        Self::in_slices(index, tensors, mode, payloads, (bytes / slices).max(512 << 10))
    }

    /// [`ApplyPlan::new`] with payloads staged in slices of whole chunks, about `slice_bytes` bytes each. Each slice is copied
    /// while the previous slice is decoded.
    ///
    /// # Errors
    /// As [`ApplyPlan::new`].
    pub fn in_slices(
        index: &DeviceIndex,
        tensors: &[Binding],
        mode: Mode,
        payloads: Payloads<'a>,
        slice_bytes: u64,
    ) -> Result<Self> {
        payloads.check(index, tensors)?;
        let device = &index.device().inner;
        payloads.check_device(device)?;
        check_devices(device, tensors)?;
        let bindings = binding::check(&index.uploaded.tensors, tensors, mode != Mode::OutOfPlace)?;
        if let Some(blob) = payloads.blobs().into_iter().find(|blob| !blob.is_multiple_of(PAYLOAD_ALIGN)) {
            return Err(Error::InvalidArgument(format!("the blob is at {blob:#x}, expected a multiple of {PAYLOAD_ALIGN}")));
        }
        let slice_bytes = if payloads.on_device().is_some() { None } else { Some(slice_bytes) };
        let mut schedule = Schedule::new(index, &bindings, slice_bytes)?;
        for binding in &bindings {
            if let Some(blob) = payloads.blob_of(&index.payloads_of(binding.tensor)?) {
                schedule.place(index, binding.chunks(index.tensor(binding.tensor)?), blob);
            }
        }
        let targets = Targets::new(index, &bindings, &schedule, mode)?;
        let plan = Self {
            index: index.clone(),
            bindings,
            mode,
            schedule,
            payloads,
            digests: None,
            compared: PayloadDigests::NotCompared,
            targets,
            compares_targets: true,
            max_scratch_bytes: None,
            is_in_scratch: false,
        };
        Ok(plan.payload_digests(true))
    }

    /// Returns the size of the device memory for [`Application::prepare_in`](super::Application::prepare_in), in bytes: 8 per
    /// chunk for order and status, 48 per tensor, or 80 if some have gaps between rows, or 128 if some have derived bases, the
    /// payloads if they are copied, 32 per chunk if they are in several parts, and in place lists of changes and copies of lanes, up
    /// to `max_scratch_bytes`. Comparing payload digests adds 4 per chunk, 16 per chunk of the pair if the index has only the root,
    /// and 16 to 70 per 32 KiB of a payload. Comparing digests of tensors adds 68 per tensor and 34 per 32 KiB of the targets. With [`InPlace::AllChecked`] it also adds
    /// the targets, up to 512 MiB, or two chunks if these are larger.
    pub fn bytes(&self) -> u64 {
        self.offsets(self.scratch(true), self.schedule.staged_bytes).bytes
    }

    /// Sets whether the application compares payload digests, if the index has them. The default is true. A caller that launches an
    /// application repeatedly, with payloads that stay in device memory, may compare them in the first launch only.
    ///
    /// If the index has only the digest over all payloads, the host reads all payloads once, when the application is prepared, in two
    /// cases:
    /// - The application reads all payloads, and the host expands some.
    /// - The application changes some chunks of an entry in place, and the payloads are not on the device.
    #[must_use]
    pub fn payload_digests(mut self, compared: bool) -> Self {
        // As on the processor: in place, some chunks of an entry are written after their payloads are known to be those of the pair.
        let has_portion = self.mode != Mode::OutOfPlace && self.bindings.iter().any(|binding| binding.portion.is_some());
        let forms_list = has_portion && !self.is_in_scratch && self.payloads.on_device().is_none();
        self.digests = if compared { DigestPlan::new(&self.index, &self.schedule, forms_list) } else { None };
        let reads_all = self.schedule.payload_count(&self.index) == self.index.uploaded.payload_count as usize;
        self.compared = match self.index.uploaded.payload_digests {
            PayloadDigestSource::List if compared && reads_all => PayloadDigests::All,
            PayloadDigestSource::List if compared => PayloadDigests::EachRead,
            PayloadDigestSource::Root if self.digests.is_some() => PayloadDigests::All,
            _ => PayloadDigests::NotCompared,
        };
        self
    }

    /// Sets whether the application compares the targets with their digests in the index, on the device. The default is true. A
    /// target with another digest is an error like any other. Digests of bases are not compared, nor those of entries of which
    /// only some chunks are decoded.
    ///
    /// | mode | compared | cost |
    /// |---|---|---|
    /// | out of place | after all tensors are written | a hash of the targets |
    /// | [`InPlace::AllChecked`] | before anything is written: the targets are rebuilt in scratch memory first, 256 MiB at a time | a hash of the targets, and decoding once more |
    /// | [`InPlace::ChunkByChunk`] | after all chunks are written; a wrong digest is [`Error::Poisoned`] | a hash of the targets |
    #[must_use]
    pub fn digests(self, compared: bool) -> Self {
        Self { compares_targets: compared, ..self }
    }

    /// States that the outputs are scratch memory, which may become a mixture: the host then does not read payloads of other chunks.
    /// Called before [`ApplyPlan::payload_digests`].
    pub(super) fn in_scratch(self) -> Self {
        Self { is_in_scratch: true, ..self }
    }

    /// Returns the targets, if their digests are compared.
    pub(super) fn targets(&self) -> Option<&Targets> {
        Some(&self.targets).filter(|_| self.compares_targets)
    }

    pub(super) fn into_schedule_and_targets(self) -> (Schedule, Option<Targets>) {
        (self.schedule, Some(self.targets).filter(|_| self.compares_targets))
    }

    /// Returns which payloads a launch compares with the digests that the pair digest covers.
    pub fn compared(&self) -> PayloadDigests {
        self.compared
    }

    /// Limits the scratch memory of an application in place. It keeps lanes of chunks until the chunks are checked.
    /// Chunks that do not fit are decoded twice. The default is 1 GiB, or 48 MiB in memory of the caller.
    #[must_use]
    pub fn max_scratch_bytes(self, bytes: u64) -> Self {
        Self { max_scratch_bytes: Some(bytes), ..self }
    }

    /// Returns the scratch memory of this application, without an address. A chunk keeps a list of its changes, or all its lanes
    /// if the list is not short.
    /// - [`InPlace::AllChecked`]: memory for all chunks, within the limit.
    /// - [`InPlace::ChunkByChunk`]: one slot per concurrent block, as large as the most that a chunk keeps. If that exceeds the
    ///   limit, or no chunk keeps all its lanes, slots are for lists alone: in the scratch memory of the device, or in memory of the
    ///   caller. If lists exceed the limit, slots are smaller: decoding some chunks twice costs less than blocks that wait for a
    ///   slot.
    pub(super) fn scratch(&self, in_caller_memory: bool) -> Option<Scratch> {
        let (mut chunks, mut largest_list, mut largest_copy, mut all) = (0, 0, 0, 0);
        for binding in &self.bindings {
            let Ok(tensor) = self.index.tensor(binding.tensor) else { continue };
            if tensor.codec != Codec::Conditioned {
                continue;
            }
            let lane_log2 = tensor.device.lane_log2;
            for chunk in binding.chunks(tensor) {
                let changes = u64::from(self.index.uploaded.records[chunk as usize].num_deltas.get());
                let lanes = tensor.chunk_lanes(chunk);
                let base_lanes = tensor.device.base_lanes.saturating_sub(tensor.first_lane(chunk)).min(lanes);
                // Chunks without base lanes keep nothing.
                if changes == 0 || base_lanes == 0 {
                    continue;
                }
                chunks += 1;
                let (list, copy) = (abi::list_bytes(changes, lane_log2), lanes << lane_log2);
                if base_lanes == lanes && abi::is_short_list(list, copy) {
                    largest_list = largest_list.max(list);
                    all += list;
                } else {
                    // Chunk by chunk, only whole bases are copied.
                    largest_copy = largest_copy.max(if base_lanes == lanes { copy } else { 0 });
                    all += copy.next_multiple_of(abi::LIST_STEP);
                }
            }
        }
        let multiprocessors = self.index.device().multiprocessors();
        let most = self.max_scratch_bytes.unwrap_or(if in_caller_memory { MAX_CALLER_SCRATCH_BYTES } else { MAX_SCRATCH_BYTES });
        match self.mode {
            Mode::OutOfPlace => None,
            Mode::InPlace(InPlace::AllChecked) => Scratch::kept(self.schedule.order.len() as u32, all, most),
            // Chunk by chunk.
            Mode::InPlace(_) => {
                let slot_bytes = largest_copy.max(largest_list);
                let of_lanes = || Scratch::of_lanes(chunks, slot_bytes, multiprocessors, most);
                let of_lists = || Scratch::of_chunks(chunks, largest_list, multiprocessors, most);
                let of_lanes = (largest_copy > 0).then(of_lanes).flatten();
                of_lanes.or_else(|| in_caller_memory.then(of_lists).flatten())
            }
        }
    }

    pub(super) fn offsets(&self, scratch: Option<Scratch>, staged_bytes: u64) -> Offsets {
        let schedule = &self.schedule;
        let mut layout = MemoryLayout::default();
        let targets = self.targets();
        let table = layout.add(table_bytes(&self.bindings) + targets.map_or(0, |targets| targets.offsets()[2]));
        let order = layout.add(4 * schedule.order.len() as u64);
        let records = layout.add((size_of::<ChunkMetadata>() * schedule.records.len()) as u64);
        let digests = self.digests.as_ref();
        let pieces = layout.add(digests.map_or(0, |digests| size_of_val::<[DigestPiece]>(&digests.pieces) as u64));
        let warps = layout.add(digests.map_or(0, |digests| size_of_val::<[u32]>(&digests.warps) as u64));
        let list_bytes = digests.and_then(|digests| digests.list.as_ref()).map_or(0, |(bytes, _)| u64::from(*bytes));
        let list_record = layout.add(if list_bytes > 0 { size_of::<ChunkMetadata>() as u64 } else { 0 });
        let is_formed_by_host = digests.is_some_and(|digests| digests.is_formed_by_host);
        let host_list = layout.add(if is_formed_by_host { 16 * self.index.uploaded.records.len() as u64 } else { 0 });
        let target_order = layout.add(targets.map_or(0, |targets| 4 * targets.order.len() as u64));
        let target_digests = layout.add(targets.map_or(0, |targets| 16 * targets.expected.len() as u64));
        let copied = layout.bytes();
        let per_chunk = if digests.is_some() { 2 } else { 1 };
        let status_words = per_chunk * schedule.span.len() + targets.map_or(0, |targets| targets.plan.len() as usize);
        let statuses = layout.add(4 * status_words as u64);
        // From here to the head of the scratch memory all is zeroed, by one fill.
        let nodes = layout.add(digests.map_or(0, |digests| 32 * u64::from(digests.nodes)));
        let target_nodes = layout.add(targets.map_or(0, |targets| targets.plan.node_bytes()));
        let list = layout.add(list_bytes);
        let flag = layout.add(4);
        let scratch = layout.add(scratch.map_or(0, |scratch| scratch.bytes));
        let target_scratch = layout.add(targets.map_or(0, |targets| targets.scratch_bytes));
        let staging = layout.add(staged_bytes);
        Offsets {
            table,
            order,
            records,
            pieces,
            warps,
            list_record,
            host_list,
            target_order,
            target_digests,
            copied,
            statuses,
            status_words,
            nodes,
            target_nodes,
            list,
            flag,
            scratch,
            target_scratch,
            staging,
            bytes: layout.bytes(),
        }
    }
}

/// Checks that the memory of all tensors belongs to this device.
pub(super) fn check_devices(device: &Arc<Inner>, tensors: &[Binding]) -> Result<()> {
    let mut memory = tensors.iter().flat_map(|binding| binding.base.iter().chain(&binding.scales).chain([&binding.output]));
    memory.try_for_each(|memory| memory.check_device(device))
}

/// Returns the range of tensor indexes in the application's tensor table: from the first to the last bound tensor.
pub(super) fn tensor_range(bindings: &[Binding]) -> std::ops::Range<usize> {
    match (bindings.first(), bindings.last()) {
        (Some(first), Some(last)) => first.tensor..last.tensor + 1,
        _ => 0..0,
    }
}

/// Returns the offsets of rows and forms in the application's tensor table, if some tensors have them, and its size.
pub(super) fn table_offsets(bindings: &[Binding]) -> (Option<u64>, Option<u64>, u64) {
    let count = tensor_range(bindings).len();
    let (mut rows, mut forms, mut end) = (None, None, count * size_of::<DeviceTensor>());
    if bindings.iter().any(|binding| binding.variant != Variant::Plain) {
        rows = Some(end as u64);
        end += count * size_of::<TensorRows>();
    }
    if bindings.iter().any(|binding| binding.variant == Variant::Derived) {
        forms = Some(end as u64);
        end += count * size_of::<TensorForm>();
    }
    (rows, forms, end as u64)
}

/// Size of the application's tensor table in bytes.
pub(super) fn table_bytes(bindings: &[Binding]) -> u64 {
    table_offsets(bindings).2
}

/// Returns the application's tensor table, as kernels read it: the tensors, and behind them rows and forms, if some tensors
/// have them.
pub(super) fn tensor_table(index: &DeviceIndex, bindings: &[Binding], mode: Mode) -> Result<Vec<u8>> {
    let range = tensor_range(bindings);
    let mut table = vec![DeviceTensor::default(); range.len()];
    let mut rows = vec![tensor_rows(None, None); range.len()];
    let mut forms = vec![TensorForm::default(); range.len()];
    for binding in bindings {
        let tensor = index.tensor(binding.tensor)?;
        let output = binding.output_at();
        let base = if mode == Mode::OutOfPlace { binding.base_at() } else { output };
        let codec = binding.codec(&tensor.device);
        table[binding.tensor - range.start] = DeviceTensor { base: base.start, output: output.start, codec, ..tensor.device };
        if let Some(derived) = &tensor.derived {
            let scales = binding.scales.as_ref().map_or(0, DeviceSlice::address);
            forms[binding.tensor - range.start] = derived.form_of(scales, binding.scales_rows);
        }
        rows[binding.tensor - range.start] = tensor_rows(base.rows, output.rows);
    }
    let mut bytes = table.as_bytes().to_vec();
    let (rows_at, forms_at, _) = table_offsets(bindings);
    rows_at.into_iter().for_each(|_| bytes.extend_from_slice(rows.as_bytes()));
    forms_at.into_iter().for_each(|_| bytes.extend_from_slice(forms.as_bytes()));
    Ok(bytes)
}
