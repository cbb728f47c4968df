//! The memory of an application, with all that its launches share.

use super::frames::Frames;
use crate::cuda::abi::{self, DeviceTensor, STATUS_NOT_RUN};
use crate::cuda::index::DeviceIndex;
use crate::cuda::plan::binding::Binding;
use crate::cuda::plan::payloads::Mode;
use crate::cuda::plan::schedule::Schedule;
use crate::cuda::plan::{ApplyPlan, SIDES, tensor_range, tensor_table};
use crate::cuda::runtime::copies;
use crate::cuda::runtime::driver::{self, Entered, OwnStream, RawEvent, RawStream};
use crate::cuda::runtime::memory::{Allocation, DeviceSlice, PinnedBuffer};
use crate::cuda::runtime::scratch::Scratch;
use crate::delta::InPlace;
use crate::error::{Error, Result};
use crate::format::ChunkMetadata;
use std::sync::{Arc, Mutex};
use zerocopy::IntoBytes;

/// What the device works with until the last launch has passed.
#[derive(Debug)]
pub(super) struct Prepared {
    pub index: DeviceIndex,
    pub mode: Mode,
    pub schedule: Schedule,
    /// Keeps the memory of the tensors.
    pub bindings: Vec<Binding>,
    pub scratch: Option<Scratch>,
    pub frames: Option<Frames>,
    /// Tensor table, order, own records, status words, the flag and scratch memory, in this order; a caller's has room for the rest
    /// too.
    _memory: DeviceSlice,
    /// Whether all memory is the caller's.
    pub is_given: bool,
    pub tensors: u64,
    pub order: u64,
    pub records: u64,
    pub statuses: u64,
    pub flag: u64,
    /// Streams that slices take turns on, so that one does not wait for the last chunks of another; none for one slice.
    pub sides: Vec<OwnStream>,
    /// Behind the copy of all that.
    pub ready: RawEvent,
    pub last_launch: Mutex<LastLaunch>,
}

#[derive(Debug, Default)]
pub(super) struct LastLaunch {
    /// Behind the last launch.
    pub end: Option<RawEvent>,
    /// Behind all of that launch that reads the staging memory.
    pub done: Option<Arc<RawEvent>>,
    /// Staging memory of that launch.
    pub spare: Option<DeviceSlice>,
    /// The tensor table, if the one on the device is of other memory.
    pub table: Option<PinnedBuffer>,
}

impl Prepared {
    /// Allocates and fills the memory of a planned application; `given` is a caller's memory for all of it.
    pub fn new(plan: ApplyPlan<'_>, given: Option<DeviceSlice>) -> Result<Self> {
        let device = &plan.index.device().inner;
        let is_given = given.is_some();
        let scratch = plan.scratch(is_given);
        let offsets = plan.offsets(scratch, if is_given { plan.schedule.staged_bytes } else { 0 });
        let given = given.map(|given| given.room_for(offsets.bytes, device)).transpose()?;
        let ApplyPlan { ref index, ref bindings, mode, ref schedule, .. } = plan;
        let first = tensor_range(bindings).start;
        let table = tensor_table(index, bindings, mode)?;

        let _relaxed = driver::Relaxed::new()?;
        let cx = device.context.enter()?;
        let memory = match given {
            Some(given) => given,
            None => DeviceSlice::owned(Allocation::new(device, &cx, offsets.bytes)?, offsets.bytes),
        };
        let at = |offset: u64| memory.address() + offset;
        let own_head = scratch.map_or(0, |scratch| abi::scratch_head(scratch.slots));
        let scratch = match mode {
            Mode::InPlace(InPlace::ChunkByChunk) if !is_given => Some(device.scratch(&cx)?),
            _ => scratch.map(|scratch| scratch.at(at(offsets.scratch))),
        };
        let parts: [(u64, &[u8]); 3] = [
            (offsets.table, table.as_bytes()),
            (offsets.order, schedule.order.as_bytes()),
            (offsets.records, schedule.records.as_bytes()),
        ];
        let pinned = PinnedBuffer::with_parts(device, &cx, offsets.copied, &parts)?;
        let frames = Frames::new(index, schedule, device, &cx)?;
        if is_given && frames.is_some() {
            return Err(Error::Misuse("nvCOMP takes memory of its own: it cannot be used with the caller's".into()));
        }
        let copy = device.copy.raw();
        let ready = RawEvent::new(&cx, false)?;
        let queueing = device.queueing(&cx, copy);
        // SAFETY: all of it lies within memory that the layout has room in, and that was allocated or given for this; that and
        // the pinned memory are held until the copy has passed, also after an error.
        unsafe {
            copies::copy_in(&cx, at(0), pinned.as_ptr(), offsets.copied as usize, copy)?;
            copies::fill(&cx, at(offsets.statuses), STATUS_NOT_RUN, schedule.span.len(), copy)?;
            copies::fill(&cx, at(offsets.flag), 0, 1, copy)?;
            copies::fill(&cx, at(offsets.scratch), 0, own_head as usize / 4, copy)?;
        }
        queueing.end_with(&ready)?;
        // Kernels count chunks and tensors of the whole pair: these addresses are where number 0 would be.
        let from_zero = |offset: u64, number: usize, bytes: usize| at(offset).wrapping_sub((number * bytes) as u64);
        let first_chunk = schedule.span.start as usize;
        let records = match schedule.records.is_empty() {
            true => index.uploaded.chunks(),
            false => from_zero(offsets.records, first_chunk, size_of::<ChunkMetadata>()),
        };
        let (tensors, order) = (from_zero(offsets.table, first, size_of::<DeviceTensor>()), at(offsets.order));
        let (statuses, flag) = (from_zero(offsets.statuses, first_chunk, 4), at(offsets.flag));
        let staging = if is_given { Some(memory.slice(offsets.staging, schedule.staged_bytes)?) } else { None };
        // Last, so that an error before loses none.
        let sides = match schedule.slices.len() {
            0 | 1 => Vec::new(),
            slices => (0..slices.min(SIDES)).map(|_| device.pools.stream(&cx)).collect::<Result<_>>()?,
        };
        drop(cx);
        let ApplyPlan { index, bindings, schedule, .. } = plan;
        let last_launch = Mutex::new(LastLaunch { spare: staging, ..LastLaunch::default() });
        Ok(Self {
            index,
            mode,
            schedule,
            bindings,
            scratch,
            frames,
            _memory: memory,
            is_given,
            tensors,
            order,
            records,
            statuses,
            flag,
            sides,
            ready,
            last_launch,
        })
    }

    /// Where the status words begin that are copied back: that of the first chunk of the span.
    pub fn first_status(&self) -> u64 {
        self.statuses.wrapping_add(4 * u64::from(self.schedule.span.start))
    }

    /// Bytes of status words that come back: after those of the kernels that decode, those of frames.
    pub fn status_bytes(&self) -> usize {
        4 * self.schedule.span.len() * if self.frames.is_some() { 2 } else { 1 }
    }

    /// Readies status words, flag and scratch memory for the next launch.
    pub fn reset(&self, cx: &Entered<'_>, stream: RawStream) -> Result<()> {
        // SAFETY: within the memory of this application, which is held until the stream has passed.
        unsafe {
            copies::fill(cx, self.first_status(), STATUS_NOT_RUN, self.schedule.span.len(), stream)?;
            if self.mode == Mode::InPlace(InPlace::AllChecked) {
                copies::fill(cx, self.flag, 0, 1, stream)?;
                if let Some(scratch) = self.scratch {
                    copies::fill(cx, scratch.address, 0, abi::scratch_head(scratch.slots) as usize / 4, stream)?;
                }
            }
        }
        Ok(())
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let device = &self.index.device().inner;
        // Streams are asked whether they are idle, also while another thread captures.
        let _relaxed = driver::Relaxed::new();
        if let Ok(cx) = device.context.enter() {
            self.sides.drain(..).for_each(|side| device.pools.take_back(&cx, side));
        }
    }
}
