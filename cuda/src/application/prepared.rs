//! The memory of an application, and state shared by its launches.

use super::digests::DeviceDigests;
#[cfg(feature = "nvcomp")]
use super::frames::Frames;
#[cfg(not(feature = "nvcomp"))]
use super::no_frames::Frames;
use super::targets::DeviceTargets;
use crate::abi::{self, DeviceTensor, STATUS_NOT_RUN, TensorForm, TensorRows};
use crate::index::DeviceIndex;
use crate::plan::binding::Binding;
use crate::plan::payloads::Mode;
use crate::plan::schedule::Schedule;
use crate::plan::targets::Targets;
use crate::plan::{ApplyPlan, SIDES, table_bytes, table_offsets, tensor_range, tensor_table};
use crate::runtime::copies;
use crate::runtime::driver::{EnterGuard, OwnStream, RawEvent, RawStream};
use crate::runtime::kernels::Variant;
use crate::runtime::memory::{Allocation, DeviceSlice, PinnedBuffer};
use crate::runtime::scratch::Scratch;
use std::sync::{Arc, Mutex};
use tpde::{InPlace, PayloadDigests};
use tpde_core::codec::Codec;
use tpde_core::error::{Error, Result};
use tpde_core::format::{ChunkMetadata, DIGEST_SIZE};
use zerocopy::IntoBytes;

/// Data that must exist until the last launch has completed.
#[derive(Debug)]
pub(super) struct LaunchData {
    pub index: DeviceIndex,
    pub mode: Mode,
    pub schedule: Schedule,
    /// Bindings of the tensors. They keep the memory of the tensors alive.
    pub bindings: Vec<Binding>,
    pub scratch: Option<Scratch>,
    pub frames: Option<Frames>,
    pub digests: Option<DeviceDigests>,
    pub targets: Option<DeviceTargets>,
    /// The plan of `targets`.
    pub target_plan: Option<Targets>,
    /// The payload list, if the host has formed it.
    host_list: Vec<[u8; DIGEST_SIZE]>,
    pub compared: PayloadDigests,
    /// Tensor table, launch order ([`Schedule::order`]), records with staging offsets ([`Schedule::records`]), pieces of payload
    /// digests, status words, nodes and list of payload digests, flag and scratch memory, one after the other. Memory of the caller
    /// also has the staging memory at its end.
    _memory: DeviceSlice,
    /// Whether all memory belongs to the caller.
    pub in_caller_memory: bool,
    pub tensors: u64,
    /// Rows of the tensors, if some are not [`Variant::Plain`], else 0.
    pub rows: u64,
    /// How base lanes are converted, if some bases are derived, else 0.
    pub forms: u64,
    pub order: u64,
    pub records: u64,
    /// Status words of a graph. A launch has its own, in pinned memory.
    pub statuses: u64,
    /// Number of status words of chunks, payload digests and targets.
    pub own_status_words: usize,
    pub flag: u64,
    /// Side streams: slice `n` uses stream `n` mod their number. So a slice does not wait for the last chunks of another slice.
    /// Empty if there is only one slice.
    pub sides: Vec<OwnStream>,
    /// Recorded behind the copies to this memory.
    pub copied: Arc<RawEvent>,
    /// Recorded behind the fills that reset memory after a launch.
    was_reset: Arc<RawEvent>,
    pub last_launch: Mutex<LastLaunch>,
}

#[derive(Debug, Default)]
pub(super) struct LastLaunch {
    /// Recorded behind all work of the last launch that reads the staging memory.
    pub done: Option<Arc<RawEvent>>,
    /// Recorded behind all work of the last launch. The next launch waits for it.
    pub ready: Option<Arc<RawEvent>>,
    /// Staging memory of the last launch.
    pub spare: Option<DeviceSlice>,
    /// The current tensor table, if the table on the device is outdated.
    pub table: Option<PinnedBuffer>,
}

impl LaunchData {
    /// Allocates and fills the memory of a planned application. `caller_memory` replaces the allocation.
    pub fn new(plan: ApplyPlan<'_>, caller_memory: Option<DeviceSlice>) -> Result<Self> {
        let device = &plan.index.device().inner;
        let in_caller_memory = caller_memory.is_some();
        let mut scratch = plan.scratch(in_caller_memory);
        let mut offsets = plan.offsets(scratch, if in_caller_memory { plan.schedule.staged_bytes } else { 0 });
        let caller_memory = caller_memory.map(|memory| memory.reserve(offsets.bytes, device)).transpose()?;
        let ApplyPlan { ref index, ref bindings, mode, ref schedule, .. } = plan;
        let first = tensor_range(bindings).start;
        let mut table = tensor_table(index, bindings, mode)?;
        let hash = plan.targets().map(|_| device.kernels.hash(&device.context)).transpose()?;

        for run in schedule.slices.iter().flat_map(|slice| &slice.runs) {
            // Kernels are compiled here, because a launch must be quick and may be captured.
            for variant in Variant::ALL.into_iter().filter(|&variant| run.has[variant as usize]) {
                device.kernels.decoder(&device.context, run.group.decoder(), variant)?;
            }
        }
        let cx = device.context.enter()?;
        let memory = match caller_memory {
            Some(memory) => memory,
            None => {
                let mut allocation = Allocation::new(device, &cx, offsets.bytes);
                if allocation.is_err() && scratch.take().is_some() {
                    // Without scratch memory of its own, the application decodes more chunks twice.
                    offsets = plan.offsets(None, 0);
                    allocation = Allocation::new(device, &cx, offsets.bytes);
                }
                DeviceSlice::owned(allocation?, offsets.bytes)
            }
        };
        let at = |offset: u64| memory.address() + offset;
        if let Some(targets) = plan.targets() {
            table.extend(targets.table(at(offsets.target_scratch)));
        }
        let own_head = scratch.map_or(0, |scratch| abi::scratch_head(scratch.slots));
        let scratch = match mode {
            Mode::InPlace(InPlace::ChunkByChunk) if !in_caller_memory && scratch.is_none() => Some(device.scratch(&cx)?),
            _ => scratch.map(|scratch| scratch.at(at(offsets.scratch))),
        };
        let digest_plan = plan.digests.as_ref();
        let list_record = digest_plan.and_then(DeviceDigests::list_record);
        let host_list = match digest_plan {
            Some(digests) if digests.is_formed_by_host => DeviceDigests::form_list(index, &plan.payloads)?,
            _ => Vec::new(),
        };
        let parts: [(u64, &[u8]); 9] = [
            (offsets.table, &table),
            (offsets.order, schedule.order.as_bytes()),
            (offsets.records, schedule.records.as_bytes()),
            (offsets.pieces, digest_plan.map_or(&[], |digests| digests.pieces.as_bytes())),
            (offsets.warps, digest_plan.map_or(&[], |digests| digests.warps.as_bytes())),
            (offsets.list_record, list_record.as_ref().map_or(&[], IntoBytes::as_bytes)),
            (offsets.host_list, host_list.as_flattened()),
            (offsets.target_order, plan.targets().map_or(&[], |targets| targets.order.as_bytes())),
            (offsets.target_digests, plan.targets().map_or(&[], |targets| targets.expected.as_flattened())),
        ];
        let pinned = PinnedBuffer::with_parts(device, &cx, offsets.copied, &parts)?;
        let frames = Frames::new(index, schedule, device, &cx)?;
        if in_caller_memory && frames.is_some() {
            return Err(Error::InvalidArgument("nvCOMP takes memory of its own: it cannot be used with the caller's".into()));
        }
        let copy = device.copy.raw();
        let (copied, was_reset) = (Arc::new(RawEvent::new(&cx, false)?), Arc::new(RawEvent::new(&cx, false)?));
        let queueing = device.queueing(&cx, copy);
        // SAFETY: all parts are within the memory that was laid out, and that was allocated or passed for this. It and the pinned
        // memory are held until the copy has completed, also after an error.
        unsafe {
            copies::copy_in(&cx, at(0), pinned.as_ptr(), offsets.copied as usize, copy)?;
            // Nodes, flag, and the head of the scratch memory, which follow each other.
            let zeros = if own_head == 0 { offsets.flag + 4 } else { offsets.scratch + own_head } - offsets.nodes;
            copies::fill(&cx, at(offsets.nodes), 0, zeros as usize / 4, copy)?;
        }
        queueing.end_with(&copied)?;
        // Kernels use chunk and tensor indexes of the whole pair. Only a span of each array is allocated, so these are the
        // addresses that element 0 would have.
        let from_zero = |offset: u64, number: usize, bytes: usize| at(offset).wrapping_sub((number * bytes) as u64);
        let first_chunk = schedule.span.start as usize;
        let records = match schedule.records.is_empty() {
            true => index.uploaded.chunks(),
            false => from_zero(offsets.records, first_chunk, size_of::<ChunkMetadata>()),
        };
        let (tensors, order) = (from_zero(offsets.table, first, size_of::<DeviceTensor>()), at(offsets.order));
        let (rows_at, forms_at, _) = table_offsets(bindings);
        let rows = rows_at.map_or(0, |rows| from_zero(offsets.table + rows, first, size_of::<TensorRows>()));
        let forms = forms_at.map_or(0, |forms| from_zero(offsets.table + forms, first, size_of::<TensorForm>()));
        let (statuses, flag) = (at(offsets.statuses), at(offsets.flag));
        let staging = if in_caller_memory { Some(memory.slice(offsets.staging, schedule.staged_bytes)?) } else { None };
        let mut digests = digest_plan
            .map(|digests| DeviceDigests::new(index, digests, &offsets, memory.address(), schedule.span.clone()))
            .transpose()?;
        let table_at = at(offsets.table) + table_bytes(bindings);
        let mut targets = hash
            .zip(plan.targets())
            .map(|(hash, targets)| DeviceTargets::new(hash, targets, table_at, &offsets, memory.address(), rows_at.is_some()));
        // Taken last, so that an earlier error leaks no stream.
        let mut sides = match schedule.slices.len() {
            0 | 1 => Vec::new(),
            slices => (0..slices.min(SIDES)).map(|_| device.pools.stream(&cx)).collect::<Result<_>>()?,
        };
        // Payloads with an entry in a payload list are compared before their chunks are written one by one, and frames before
        // nvCOMP expands them. A payload root alone is compared after all payloads have been hashed, so it stops no chunk.
        let stops_chunks = mode == Mode::InPlace(InPlace::ChunkByChunk) && digest_plan.is_some_and(|plan| plan.list.is_none());
        let taken = (|| {
            if let Some(digests) = digests.as_mut().filter(|_| !stops_chunks && frames.is_none()) {
                digests.beside = Some(device.pools.urgent_stream(&cx)?);
            }
            let has_batches = plan.targets().is_some_and(|targets| targets.batches.len() > 1);
            if let Some(targets) = targets.as_mut().filter(|_| has_batches) {
                targets.beside = Some(device.pools.stream(&cx)?);
            }
            Ok(())
        })();
        if let Err(e) = taken {
            sides.drain(..).for_each(|side| device.pools.take_back(&cx, side));
            let beside = digests.as_mut().and_then(|digests| digests.beside.take());
            beside.into_iter().for_each(|stream| device.pools.take_back_urgent(&cx, stream));
            return Err(e);
        }
        drop(cx);
        let ApplyPlan { ref index, ref bindings, compared, .. } = plan;
        let (index, bindings) = (index.clone(), bindings.clone());
        let (schedule, target_plan) = plan.into_schedule_and_targets();
        let last_launch = Mutex::new(LastLaunch { spare: staging, ..LastLaunch::default() });
        Ok(Self {
            index,
            mode,
            schedule,
            bindings,
            scratch,
            frames,
            digests,
            targets,
            target_plan,
            host_list,
            compared,
            _memory: memory,
            in_caller_memory,
            tensors,
            rows,
            forms,
            order,
            records,
            statuses,
            own_status_words: offsets.status_words,
            flag,
            sides,
            copied,
            was_reset,
            last_launch,
        })
    }

    /// Returns all streams of this application beside that of the caller.
    pub fn streams(&self) -> impl Iterator<Item = &OwnStream> {
        let of_digests = self.digests.as_ref().and_then(|digests| digests.beside.as_ref());
        let of_targets = self.targets.as_ref().and_then(|targets| targets.beside.as_ref());
        self.sides.iter().chain(of_digests).chain(of_targets)
    }

    /// Returns the size of the status words on the host, in bytes: the words of the decoding kernels, of payload digests, of
    /// targets, and of the frame kernels.
    pub fn status_bytes(&self) -> usize {
        4 * (self.own_status_words + if self.frames.is_some() { self.schedule.span.len() } else { 0 })
    }

    /// Returns the index of the first status word of the targets, which are in the order of the bindings.
    pub fn target_statuses(&self) -> usize {
        self.schedule.span.len() * (1 + usize::from(self.digests.is_some()))
    }

    /// Returns the digest of a payload that the host expands, if it is known and to be compared.
    pub fn digest_on_host(&self, chunk: u32) -> Option<&[u8; DIGEST_SIZE]> {
        if self.compared == PayloadDigests::NotCompared {
            return None;
        }
        let list = if self.host_list.is_empty() { &self.index.uploaded.host_list } else { &self.host_list };
        list.get(chunk as usize)
    }

    /// Returns whether a chunk has a payload that is in device memory as stored, and not expanded by the host.
    pub fn has_payload_on_device(&self, chunk: u32) -> bool {
        let is_expanded = self.index.chunk_tensor(chunk).is_ok_and(|tensor| tensor.codec == Codec::Zstd) && self.frames.is_none();
        self.index.uploaded.records[chunk as usize].compressed_size.get() > 0 && !is_expanded
    }

    /// Queues the reset of nodes of targets, flag and scratch memory behind a launch. Returns false if there is nothing to reset.
    pub fn reset(&self, cx: &EnterGuard<'_>, stream: RawStream) -> Result<bool> {
        // After an error some parts may have been hashed without the others, so their nodes are reset too. Behind the nodes of
        // targets are the list of payload digests, the flag, and the head of the scratch memory.
        let nodes = self.targets.as_ref().map(DeviceTargets::nodes);
        let end = match (self.mode, self.scratch) {
            (Mode::InPlace(InPlace::AllChecked), Some(scratch)) => scratch.address + abi::scratch_head(scratch.slots),
            (Mode::InPlace(InPlace::AllChecked), None) => self.flag + 4,
            _ => nodes.unwrap_or(0) + self.target_plan.as_ref().map_or(0, |targets| targets.plan.node_bytes()),
        };
        let start = nodes.unwrap_or(if self.mode == Mode::InPlace(InPlace::AllChecked) { self.flag } else { end });
        // SAFETY: within the memory of this application, which is held until the stream has completed.
        unsafe { copies::fill(cx, start, 0, (end - start) as usize / 4, stream)? };
        Ok(start != end)
    }

    /// As [`LaunchData::reset`], behind a launch whose work ends at `done`. Returns the event behind all of it.
    pub fn reset_behind(&self, cx: &EnterGuard<'_>, stream: RawStream, done: &Arc<RawEvent>) -> Result<Arc<RawEvent>> {
        if !self.reset(cx, stream)? {
            return Ok(done.clone());
        }
        self.was_reset.record(cx, stream)?;
        Ok(self.was_reset.clone())
    }

    /// Resets the status words of a graph.
    pub fn reset_statuses(&self, cx: &EnterGuard<'_>, stream: RawStream) -> Result<()> {
        // SAFETY: as in `reset`.
        unsafe { copies::fill(cx, self.statuses, STATUS_NOT_RUN, self.own_status_words, stream) }
    }
}

impl Drop for LaunchData {
    fn drop(&mut self) {
        let device = &self.index.device().inner;
        if let Ok(cx) = device.context.enter() {
            self.sides.drain(..).for_each(|side| device.pools.take_back(&cx, side));
            if let Some(beside) = self.digests.as_mut().and_then(|digests| digests.beside.take()) {
                device.pools.take_back_urgent(&cx, beside);
            }
            if let Some(beside) = self.targets.as_mut().and_then(|targets| targets.beside.take()) {
                device.pools.take_back(&cx, beside);
            }
        }
    }
}
