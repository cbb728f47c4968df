//! The memory of an application, and state shared by its launches.

use super::digests::DeviceDigests;
#[cfg(feature = "nvcomp")]
use super::frames::Frames;
#[cfg(not(feature = "nvcomp"))]
use super::no_frames::Frames;
use super::streams::Streams;
use super::targets::{DeviceTargets, Table};
use crate::abi::{self, DeviceTensor, STATUS_NOT_RUN, TensorForm, TensorRows};
use crate::index::DeviceIndex;
use crate::plan::binding::Binding;
use crate::plan::digests::DigestPlan;
use crate::plan::payloads::{Mode, Payloads};
use crate::plan::program::{Origin, PayloadChecks, Program, Request, TargetChecks, Variation};
use crate::plan::schedule::Schedule;
use crate::plan::targets::Targets;
use crate::plan::{ApplyPlan, Offsets, table_bytes, table_offsets, tensor_range, tensor_table};
use crate::runtime::copies;
use crate::runtime::driver::{EnterGuard, Kernel, RawEvent, RawStream};
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
    pub streams: Streams,
    pub request: Request,
    pub index: DeviceIndex,
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
    pub table: Table,
    pub records: u64,
    /// Status words of a graph. A launch has its own, in pinned memory.
    pub statuses: u64,
    /// Number of status words of chunks, payload digests and targets.
    pub own_status_words: usize,
    pub flag: u64,
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

/// The memory of an application that is being made.
struct Parts {
    memory: DeviceSlice,
    offsets: Offsets,
    /// Scratch memory of the application alone, if it has some.
    scratch: Option<Scratch>,
}

impl Parts {
    /// Allocates the memory of a plan, or takes that of the caller.
    fn new(plan: &ApplyPlan<'_>, cx: &EnterGuard<'_>, caller_memory: Option<DeviceSlice>) -> Result<Self> {
        let device = &plan.index.device().inner;
        let mut scratch = plan.scratch(caller_memory.is_some());
        let mut offsets = plan.offsets(scratch, if caller_memory.is_some() { plan.schedule.staged_bytes } else { 0 });
        let memory = match caller_memory {
            Some(memory) => memory.reserve(offsets.bytes, device)?,
            None => {
                let mut allocation = Allocation::new(device, cx, offsets.bytes);
                if allocation.is_err() && scratch.take().is_some() {
                    // Without scratch memory of its own, the application decodes more chunks twice.
                    offsets = plan.offsets(None, 0);
                    allocation = Allocation::new(device, cx, offsets.bytes);
                }
                DeviceSlice::owned(allocation?, offsets.bytes)
            }
        };
        let scratch = scratch.map(|scratch| scratch.at(memory.address() + offsets.scratch));
        Ok(Self { memory, offsets, scratch })
    }

    fn at(&self, offset: u64) -> u64 {
        self.memory.address() + offset
    }

    /// Returns the address that element 0 of an array would have. Kernels use chunk and tensor indexes of the whole pair, and only
    /// a span of each array is allocated.
    fn element_0(&self, offset: u64, first: usize, bytes: usize) -> u64 {
        self.at(offset).wrapping_sub((first * bytes) as u64)
    }

    /// Returns where the tensor table and the order of chunks are.
    fn table(&self, bindings: &[Binding]) -> Table {
        let (first, offset, (rows, forms, _)) = (tensor_range(bindings).start, self.offsets.table, table_offsets(bindings));
        Table {
            tensors: self.element_0(offset, first, size_of::<DeviceTensor>()),
            rows: rows.map_or(0, |rows| self.element_0(offset + rows, first, size_of::<TensorRows>())),
            forms: forms.map_or(0, |forms| self.element_0(offset + forms, first, size_of::<TensorForm>())),
            order: self.at(self.offsets.order),
        }
    }

    /// Returns where the records of the chunks are.
    fn records(&self, index: &DeviceIndex, schedule: &Schedule) -> u64 {
        match schedule.records.is_empty() {
            true => index.uploaded.chunks(),
            false => self.element_0(self.offsets.records, schedule.span.start as usize, size_of::<ChunkMetadata>()),
        }
    }

    /// Queues the copy of all that the host provides, and the fill of what begins as zeros, on the copy stream. Returns the event
    /// behind them.
    fn fill(&self, plan: &ApplyPlan<'_>, cx: &EnterGuard<'_>, host_list: &[[u8; DIGEST_SIZE]]) -> Result<Arc<RawEvent>> {
        let device = &plan.index.device().inner;
        let (offsets, schedule, digests) = (&self.offsets, &plan.schedule, plan.digests.as_ref());
        let mut table = tensor_table(&plan.index, &plan.bindings, plan.mode)?;
        if let Some(targets) = plan.targets() {
            table.extend(targets.table(self.at(offsets.target_scratch)));
        }
        let list_record = digests.and_then(DeviceDigests::list_record);
        let parts: [(u64, &[u8]); 9] = [
            (offsets.table, &table),
            (offsets.order, schedule.order.as_bytes()),
            (offsets.records, schedule.records.as_bytes()),
            (offsets.pieces, digests.map_or(&[], |digests| digests.pieces.as_bytes())),
            (offsets.warps, digests.map_or(&[], |digests| digests.warps.as_bytes())),
            (offsets.list_record, list_record.as_ref().map_or(&[], IntoBytes::as_bytes)),
            (offsets.host_list, host_list.as_flattened()),
            (offsets.target_order, plan.targets().map_or(&[], |targets| targets.order.as_bytes())),
            (offsets.target_digests, plan.targets().map_or(&[], |targets| targets.expected.as_flattened())),
        ];
        let pinned = PinnedBuffer::with_parts(device, cx, offsets.copied, &parts)?;
        let copy = device.copy.raw();
        let copied = Arc::new(RawEvent::new(cx, false)?);
        let queueing = device.queueing(cx, copy);
        // SAFETY: all parts are within the memory that was laid out, and that was allocated or passed for this. It and the pinned
        // memory are held until the copy has completed, also after an error.
        unsafe {
            copies::copy_in(cx, self.at(0), pinned.as_ptr(), offsets.copied as usize, copy)?;
            // Nodes, flag, and the head of the scratch memory, which follow each other.
            let end = self.scratch.map_or(offsets.flag + 4, |scratch| offsets.scratch + abi::scratch_head(scratch.slots));
            copies::fill(cx, self.at(offsets.nodes), 0, (end - offsets.nodes) as usize / 4, copy)?;
        }
        queueing.end_with(&copied)?;
        Ok(copied)
    }
}

/// Compiles the kernels of a plan, because a launch must be quick and may be captured. Returns the kernel that hashes targets.
fn compile(plan: &ApplyPlan<'_>) -> Result<Option<Kernel>> {
    let device = &plan.index.device().inner;
    let hash = plan.targets().map(|_| device.kernels.hash(&device.context)).transpose()?;
    for run in plan.schedule.slices.iter().flat_map(|slice| &slice.runs) {
        for variant in Variant::ALL.into_iter().filter(|&variant| run.has[variant as usize]) {
            device.kernels.decoder(&device.context, run.group.decoder(), variant)?;
        }
    }
    Ok(hash)
}

impl LaunchData {
    /// Allocates and fills the memory of a planned application. `caller_memory` replaces the allocation. Also returns the program
    /// of its launches.
    pub fn new(plan: ApplyPlan<'_>, caller_memory: Option<DeviceSlice>) -> Result<(Self, Program)> {
        let device = &plan.index.device().inner.clone();
        let in_caller_memory = caller_memory.is_some();
        let hash = compile(&plan)?;
        let cx = device.context.enter()?;
        let parts = Parts::new(&plan, &cx, caller_memory)?;
        let ApplyPlan { ref index, ref bindings, mode, ref schedule, compared, .. } = plan;
        let scratch = match mode {
            Mode::InPlace(InPlace::ChunkByChunk) if !in_caller_memory && parts.scratch.is_none() => Some(device.scratch(&cx)?),
            _ => parts.scratch,
        };
        let host_list = match &plan.digests {
            Some(digests) if digests.is_formed_by_host => DeviceDigests::form_list(index, &plan.payloads)?,
            _ => Vec::new(),
        };
        let frames = Frames::new(index, schedule, device, &cx)?;
        if in_caller_memory && frames.is_some() {
            return Err(Error::InvalidArgument("nvCOMP takes memory of its own: it cannot be used with the caller's".into()));
        }
        let (copied, was_reset) = (parts.fill(&plan, &cx, &host_list)?, Arc::new(RawEvent::new(&cx, false)?));

        let (offsets, memory) = (&parts.offsets, &parts.memory);
        let (table, records) = (parts.table(bindings), parts.records(index, schedule));
        let spare = if in_caller_memory { Some(memory.slice(offsets.staging, schedule.staged_bytes)?) } else { None };
        let of_digests = |digests| DeviceDigests::new(index, digests, offsets, memory.address(), schedule.span.clone());
        let digests = plan.digests.as_ref().map(of_digests).transpose()?;
        let table_at = parts.at(offsets.table) + table_bytes(bindings);
        let of_targets = |(hash, targets)| DeviceTargets::new(hash, targets, table_at, offsets, memory.address(), table.rows != 0);
        let targets = hash.zip(plan.targets()).map(of_targets);
        let request = Request {
            mode,
            payload_checks: plan.digests.as_ref().map_or(PayloadChecks::None, DigestPlan::checks),
            target_checks: plan.targets().map_or(TargetChecks::None, Targets::checks),
            has_frames: frames.is_some(),
        };
        let program = Program::new(request, &schedule.slices, Origin::from(&plan.payloads), Variation::Whole);
        let streams = Streams::take(device, &cx, &program)?;
        let (statuses, flag) = (parts.at(offsets.statuses), parts.at(offsets.flag));
        let (index, bindings, own_status_words) = (index.clone(), bindings.clone(), offsets.status_words);
        let (schedule, target_plan) = plan.into_schedule_and_targets();
        let data = Self {
            streams,
            request,
            index,
            schedule,
            bindings,
            scratch,
            frames,
            digests,
            targets,
            target_plan,
            host_list,
            compared,
            _memory: parts.memory,
            in_caller_memory,
            table,
            records,
            statuses,
            own_status_words,
            flag,
            copied,
            was_reset,
            last_launch: Mutex::new(LastLaunch { spare, ..LastLaunch::default() }),
        };
        Ok((data, program))
    }

    /// Returns the program of a launch with these payloads.
    pub fn program(&self, payloads: &Payloads<'_>, variation: Variation) -> Program {
        Program::new(self.request, &self.schedule.slices, Origin::from(payloads), variation)
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
        let end = match (self.request.mode, self.scratch) {
            (Mode::InPlace(InPlace::AllChecked), Some(scratch)) => scratch.address + abi::scratch_head(scratch.slots),
            (Mode::InPlace(InPlace::AllChecked), None) => self.flag + 4,
            _ => nodes.unwrap_or(0) + self.target_plan.as_ref().map_or(0, |targets| targets.plan.node_bytes()),
        };
        let start = nodes.unwrap_or(if self.request.mode == Mode::InPlace(InPlace::AllChecked) { self.flag } else { end });
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
