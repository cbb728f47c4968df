//! Applications: tensors, payloads and a mode made ready once, then launched on a caller's stream as often as wanted.

use super::binding::{self, Binding};
use super::device::Scratch;
use super::driver::{self, Entered, OwnStream, RawEvent, RawStream};
use super::frames::Frames;
use super::index::DeviceIndex;
use super::launch::Launcher;
use super::layout::{self, DeviceTensor, STATUS_NOT_RUN, STATUS_OK};
use super::memory::{self, Allocation, DeviceSlice, PinnedBuffer};
use super::outcome::{Captured, Pending};
use super::plan::Plan;
use super::planned::{Layout, Mode, Payloads, Planned, SIDES, check_devices, table_of};
use super::stream::Stream;
use crate::delta::InPlace;
use crate::error::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};
use zerocopy::IntoBytes;

impl DeviceIndex {
    /// Rebuilds tensors out of place: what [`DeviceIndex::prepare`] and [`Application::launch`] do.
    ///
    /// # Errors
    /// As those two. What is wrong with the data is found by [`Pending::wait`].
    pub fn apply(&self, tensors: &[Binding], payloads: Payloads<'_>, stream: &Stream) -> Result<Pending> {
        self.prepare(tensors, Mode::OutOfPlace, payloads)?.launch(stream)
    }

    /// Changes tensors where they lie: what [`DeviceIndex::prepare`] and [`Application::launch`] do.
    ///
    /// # Errors
    /// As those two. What is wrong with the data is found by [`Pending::wait`].
    pub fn apply_in_place(&self, tensors: &[Binding], mode: InPlace, payloads: Payloads<'_>, stream: &Stream) -> Result<Pending> {
        self.prepare(tensors, Mode::InPlace(mode), payloads)?.launch(stream)
    }

    /// Makes an application of some or all tensors of the pair ready, in memory of its device.
    ///
    /// Cost: a few allocations and one small copy, without waiting for a stream; memory of the device: 4 bytes a chunk for the
    /// order of work and 4 for its outcome, 48 a tensor; for [`InPlace::AllChecked`] what lists of changes take, up to 48 MiB;
    /// and once for the device scratch memory for [`InPlace::ChunkByChunk`]. What it launches may be launched again.
    ///
    /// # Errors
    /// [`Error::Misuse`] if a tensor is missing or given twice, a length or an alignment is wrong, memory overlaps, a base is
    /// the output of an application out of place, or payloads of codec `zstd` are to come from the device;
    /// [`Error::Device`] if memory or the driver fails.
    pub fn prepare<'a>(&self, tensors: &[Binding], mode: Mode, payloads: Payloads<'a>) -> Result<Application<'a>> {
        self.plan(tensors, mode, payloads)?.prepare()
    }

    /// [`DeviceIndex::prepare`] with staging by slices of whole chunks of about `slice_bytes` bytes: each is copied while the
    /// one before is decoded.
    ///
    /// # Errors
    /// As [`DeviceIndex::prepare`].
    pub fn prepare_in_slices<'a>(
        &self,
        tensors: &[Binding],
        mode: Mode,
        payloads: Payloads<'a>,
        slice_bytes: u64,
    ) -> Result<Application<'a>> {
        self.plan_in_slices(tensors, mode, payloads, slice_bytes)?.prepare()
    }
}

impl<'a> Planned<'a> {
    /// Makes the application ready in memory of the crate's.
    ///
    /// # Errors
    /// [`Error::Device`] if memory or the driver fails.
    pub fn prepare(self) -> Result<Application<'a>> {
        self.ready(None)
    }

    /// Makes the application ready in memory of the caller's, and takes no other: as much as [`Planned::bytes`] says, at a
    /// multiple of 256. What is queued on [`Device::copy_stream`](super::Device::copy_stream) may use the memory at once, and
    /// nobody else does until the application is dropped and the streams that it was launched on have passed. Where payloads
    /// are copied, a launch is refused while the one before it is under way.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the memory is too small or not aligned; [`Error::Device`] if the driver fails.
    pub fn prepare_in(self, memory: DeviceSlice) -> Result<Application<'a>> {
        self.ready(Some(memory))
    }

    fn ready(self, memory: Option<DeviceSlice>) -> Result<Application<'a>> {
        let scratch = self.scratch(memory.is_some());
        let layout = self.layout(scratch, if memory.is_some() { self.plan.staged_bytes } else { 0 });
        let memory = memory.map(|given| given.room_for(layout.bytes, self.index.device())).transpose()?;
        let Self { index, bindings, mode, plan, payloads, .. } = self;
        let shared = Arc::new(Shared::new(&index, bindings, mode, plan, layout, memory, scratch)?);
        Ok(Application { shared, payloads })
    }
}

/// An application of a pair that is ready to be launched.
#[derive(Debug)]
pub struct Application<'a> {
    shared: Arc<Shared>,
    payloads: Payloads<'a>,
}

/// What the device works with until the last launch has passed.
#[derive(Debug)]
pub(super) struct Shared {
    pub index: DeviceIndex,
    pub mode: Mode,
    pub plan: Plan,
    /// Keeps the memory of the tensors.
    pub bindings: Vec<Binding>,
    pub scratch: Option<Scratch>,
    pub frames: Option<Frames>,
    /// Tensor table, order, own records, status words, the flag and scratch memory, in this order; a caller's has room for the rest
    /// too.
    _memory: DeviceSlice,
    /// Whether all memory is the caller's.
    is_given: bool,
    pub tensors: u64,
    pub order: u64,
    pub records: u64,
    pub statuses: u64,
    pub flag: u64,
    /// Streams that slices take turns on, so that one does not wait for the last chunks of another; none for one slice.
    pub sides: Vec<OwnStream>,
    /// Behind the copy of all that.
    ready: RawEvent,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Behind the last launch.
    last: Option<RawEvent>,
    /// Behind all of that launch that reads the staging memory.
    done: Option<Arc<RawEvent>>,
    /// Staging memory of that launch.
    spare: Option<DeviceSlice>,
    /// The tensor table, if the one on the device is of other memory.
    table: Option<PinnedBuffer>,
}

impl Shared {
    fn new(
        index: &DeviceIndex,
        bindings: Vec<Binding>,
        mode: Mode,
        plan: Plan,
        layout: Layout,
        given: Option<DeviceSlice>,
        scratch: Option<Scratch>,
    ) -> Result<Self> {
        let first = bindings.first().map_or(0, |binding| binding.tensor);
        let table = table_of(index, &bindings, mode)?;

        let device = &index.device().0;
        let _relaxed = driver::Relaxed::new()?;
        let cx = device.context.enter()?;
        let is_given = given.is_some();
        let memory = match given {
            Some(given) => given,
            None => DeviceSlice::owned(Allocation::new(device, &cx, layout.bytes)?, layout.bytes),
        };
        let at = |offset: u64| memory.address() + offset;
        let own_head = scratch.map_or(0, |scratch| layout::scratch_head(scratch.slots));
        let scratch = match mode {
            Mode::InPlace(InPlace::ChunkByChunk) if !is_given => Some(device.scratch(&cx)?),
            _ => scratch.map(|scratch| scratch.at(at(layout.scratch))),
        };
        let parts: [&[u8]; 3] = [table.as_bytes(), plan.order.as_bytes(), plan.records.as_bytes()];
        let starts = [layout.table, layout.order, layout.records];
        let copied = layout.copied as usize;
        let mut pinned = PinnedBuffer::new(device, &cx, copied)?;
        for (part, start) in parts.into_iter().zip(starts) {
            pinned[start as usize..][..part.len()].copy_from_slice(part);
        }
        let frames = Frames::new(index, &plan, device, &cx)?;
        if is_given && frames.is_some() {
            return Err(Error::Misuse("nvCOMP takes memory of its own: it cannot be used with the caller's".into()));
        }
        let copy = device.copy.raw();
        let ready = RawEvent::new(&cx, false)?;
        let queueing = device.queueing(&cx, copy);
        // SAFETY: all of it lies within memory that the layout has room in, and that was allocated or given for this; that and
        // the pinned memory are held until the copy has passed, also after an error.
        unsafe {
            memory::copy_in(&cx, at(0), pinned.as_ptr(), copied, copy)?;
            memory::fill(&cx, at(layout.statuses), STATUS_NOT_RUN, plan.span.len(), copy)?;
            memory::fill(&cx, at(layout.flag), 0, 1, copy)?;
            memory::fill(&cx, at(layout.scratch), 0, own_head as usize / 4, copy)?;
        }
        queueing.end_with(&ready)?;
        // Kernels count chunks and tensors of the whole pair: these addresses are where number 0 would be.
        let from_zero = |offset: u64, number: usize, bytes: usize| at(offset).wrapping_sub((number * bytes) as u64);
        let staging = if is_given { Some(memory.slice(layout.staging, plan.staged_bytes)?) } else { None };
        // Last, so that an error before loses none.
        let sides = match plan.slices.len() {
            0 | 1 => Vec::new(),
            slices => (0..slices.min(SIDES)).map(|_| device.pools.stream(&cx)).collect::<Result<_>>()?,
        };
        Ok(Self {
            index: index.clone(),
            mode,
            scratch,
            frames,
            is_given,
            tensors: from_zero(starts[0], first, size_of::<DeviceTensor>()),
            order: at(starts[1]),
            records: if plan.records.is_empty() { index.0.chunks() } else { from_zero(starts[2], plan.span.start as usize, 32) },
            statuses: from_zero(layout.statuses, plan.span.start as usize, 4),
            flag: at(layout.flag),
            plan,
            sides,
            bindings,
            _memory: memory,
            ready,
            state: Mutex::new(State { spare: staging, ..State::default() }),
        })
    }

    /// Where the status words begin that are copied back: that of the first chunk of the span.
    pub fn first_status(&self) -> u64 {
        self.statuses.wrapping_add(4 * u64::from(self.plan.span.start))
    }

    /// Bytes of status words that come back: after those of the kernels that decode, those of frames.
    pub fn status_bytes(&self) -> usize {
        4 * self.plan.span.len() * if self.frames.is_some() { 2 } else { 1 }
    }

    /// Readies status words, flag and scratch memory for the next launch.
    pub fn reset(&self, cx: &Entered<'_>, stream: RawStream) -> Result<()> {
        // SAFETY: within the memory of this application, which is held until the stream has passed.
        unsafe {
            memory::fill(cx, self.first_status(), STATUS_NOT_RUN, self.plan.span.len(), stream)?;
            if self.mode == Mode::InPlace(InPlace::AllChecked) {
                memory::fill(cx, self.flag, 0, 1, stream)?;
                if let Some(scratch) = self.scratch {
                    memory::fill(cx, scratch.address, 0, layout::scratch_head(scratch.slots) as usize / 4, stream)?;
                }
            }
        }
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let device = &self.index.device().0;
        // Streams are asked whether they are idle, also while another thread captures.
        let _relaxed = driver::Relaxed::new();
        if let Ok(cx) = device.context.enter() {
            self.sides.drain(..).for_each(|side| device.pools.take_back(&cx, side));
        }
    }
}

/// While a launch is queued. If that ends by a panic, of a caller's [`Source`](crate::source::Source) for example, the host waits
/// for all that was queued, so that its memory may be freed, and the application is ready for the next launch.
struct Unwinding<'a>(&'a Launcher<'a>);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        let Launcher { shared, cx, stream, .. } = *self.0;
        let sides = shared.sides.iter().map(OwnStream::raw);
        [shared.index.device().0.copy.raw(), stream].into_iter().chain(sides).for_each(|stream| driver::drain(cx, stream));
        _ = shared.reset(cx, stream);
        driver::drain(cx, stream);
    }
}

impl Application<'_> {
    /// Binds the same tensors to other memory, for the launches from here on. False if other work is to be prepared for that,
    /// because of tensors that are one now, or no longer; nothing has changed then.
    ///
    /// # Errors
    /// [`Error::Misuse`] as [`DeviceIndex::prepare`], or if something is kept of an earlier launch that was not waited for.
    pub fn rebind(&mut self, tensors: &[Binding]) -> Result<bool> {
        let busy = || Error::Misuse("an application is bound anew, and a launch of it was not waited for".into());
        let shared = Arc::get_mut(&mut self.shared).ok_or_else(busy)?;
        check_devices(shared.index.device(), tensors)?;
        let bindings = binding::check(&shared.index.0.tensors, tensors, shared.mode != Mode::OutOfPlace)?.bindings;
        let places = |bindings: &[Binding]| bindings.iter().map(|binding| binding.tensor).collect::<Vec<_>>();
        if places(&bindings) != places(&shared.bindings) {
            return Ok(false);
        }
        let table = table_of(&shared.index, &bindings, shared.mode)?;
        let device = &shared.index.device().0;
        let cx = device.context.enter()?;
        let mut pinned = PinnedBuffer::new(device, &cx, size_of_val(&table[..]))?;
        pinned.copy_from_slice(table.as_bytes());
        shared.state.get_mut().unwrap_or_else(PoisonError::into_inner).table = Some(pinned);
        shared.bindings = bindings;
        Ok(true)
    }

    /// Whether a launch has the processor read payloads.
    pub fn reads_on_host(&self) -> bool {
        matches!(self.payloads, Payloads::Host(_) | Payloads::Kept(_)) || self.shared.plan.has_expanded
    }

    /// Queues the copy of a tensor table.
    fn send_table(&self, cx: &Entered<'_>, table: Option<&PinnedBuffer>, stream: RawStream) -> Result<()> {
        let Some(table) = table else { return Ok(()) };
        let first = self.shared.bindings.first().map_or(0, |binding| binding.tensor);
        let to = self.shared.tensors.wrapping_add((first * size_of::<DeviceTensor>()) as u64);
        // SAFETY: a table of the same tensors is as long as that which the memory was made for. The stream is behind the last
        // launch, and both memories are held until it has passed.
        unsafe { memory::copy_in(cx, to, table.as_ptr(), table.len(), stream) }
    }

    /// Queues the application on a stream, and returns. The outcome, and an error of what is read from the host meanwhile, is
    /// [`Pending::wait`]'s to tell.
    ///
    /// The call waits for no stream. From pinned and device memory it does nothing but queue; payloads of the host are read,
    /// and those of codec `zstd` expanded, before it returns, through a ring of fixed size. Launches of one application follow
    /// each other, whatever their streams. All memory that this crate owns is kept until the stream has passed.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stream of another device, or one that is being captured, see [`Application::capture`];
    /// [`Error::Device`] if the driver refuses.
    pub fn launch(&self, stream: &Stream) -> Result<Pending> {
        let shared = &self.shared;
        let device = &shared.index.device().0;
        self.check_device(stream)?;
        let _relaxed = driver::Relaxed::new()?;
        let cx = device.context.enter()?;
        let raw = stream.raw();
        if driver::is_capturing(&cx, raw)? {
            return Err(Error::Misuse("the stream is being captured into a graph: that is Application::capture".into()));
        }
        let statuses = PinnedBuffer::new(device, &cx, shared.status_bytes())?;
        let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = self.staging(&cx, &mut state)?;
        if let Some(last) = &state.last {
            last.hold(&cx, raw)?;
        }
        shared.ready.hold(&cx, raw)?;

        let launcher = Launcher { shared, cx: &cx, stream: raw, staging: staging.as_ref().map(DeviceSlice::address) };
        let (done, last) = (Arc::new(RawEvent::new(&cx, false)?), RawEvent::new(&cx, false)?);
        let unwinding = Unwinding(&launcher);
        let queued = self.send_table(&cx, state.table.as_ref(), raw).and_then(|()| launcher.run(&self.payloads, &statuses));
        // From here on whatever was queued is held, also after an error, which may have come before the streams were joined.
        let gathered = if queued.is_err() { launcher.gather() } else { Ok(()) };
        let held = gathered
            .and_then(|()| done.record(&cx, raw))
            .and_then(|()| shared.reset(&cx, raw))
            .and_then(|()| last.record(&cx, raw))
            .and_then(|()| last.hold(&cx, device.pools.reaper.raw()));
        std::mem::forget(unwinding);
        let pending = Pending::new(shared.clone(), done.clone(), statuses);
        if let Err(e) = held {
            // Nobody knows when the device is done with the memory: it is given up.
            std::mem::forget((pending, staging, shared.clone()));
            return Err(e);
        }
        // After an error the table on the device may still be the old one.
        let _sent = if queued.is_ok() { state.table.take() } else { None };
        state.spare = staging;
        state.last = Some(last);
        state.done = Some(done);
        queued.map(|host_error| pending.with_host_error(host_error))
    }

    /// Queues the application on a stream that is being captured into a graph: each launch of the graph is then one of the
    /// application. Payloads must be in device or pinned memory.
    ///
    /// # Safety
    /// While the graph may still run, the result is kept, and so is the memory of the tensors and payloads. Launches of the
    /// graph, and of the application, do not overlap.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stream of another device, one that is not captured, or payloads that the processor reads or
    /// nvCOMP expands;
    /// [`Error::Device`] if the driver refuses.
    pub unsafe fn capture(&self, stream: &Stream) -> Result<Captured> {
        let shared = &self.shared;
        let device = &shared.index.device().0;
        self.check_device(stream)?;
        let _relaxed = driver::Relaxed::new()?;
        let cx = device.context.enter()?;
        let raw = stream.raw();
        if !driver::is_capturing(&cx, raw)? {
            return Err(Error::Misuse("the stream is not being captured".into()));
        }
        if self.reads_on_host() {
            return Err(Error::Misuse("a graph cannot read payloads through the processor".into()));
        }
        if shared.frames.is_some() {
            return Err(Error::Misuse("a graph cannot have frames expanded by nvCOMP".into()));
        }
        let mut statuses = PinnedBuffer::new(device, &cx, shared.status_bytes())?;
        // Pinned memory is used again. Until a launch of the graph has written these words, nothing is wrong with one.
        statuses.fill(const { STATUS_OK as u8 });
        let mut state = if shared.is_given { None } else { Some(State::default()) };
        let mut own = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        if own.table.is_some() {
            return Err(Error::Misuse("an application that was bound anew is launched before it is captured".into()));
        }
        let staging = self.staging(&cx, state.as_mut().unwrap_or(&mut own))?;
        // What was queued outside of the capture cannot be waited for in it; this is a copy that was queued long ago.
        shared.ready.wait(&cx)?;
        let launcher = Launcher { shared, cx: &cx, stream: raw, staging: staging.as_ref().map(DeviceSlice::address) };
        let queued = shared.reset(&cx, raw).and_then(|()| launcher.run_in_order(&self.payloads, &statuses));
        let captured = Captured::new(shared.clone(), statuses, staging, self.keep());
        match queued {
            Ok(()) => Ok(captured),
            Err(e) => {
                // What was captured before the error may be run as a part of the caller's graph: its memory is given up.
                std::mem::forget(captured);
                Err(e)
            }
        }
    }

    fn check_device(&self, stream: &Stream) -> Result<()> {
        if Arc::ptr_eq(&stream.device().0, &self.shared.index.device().0) {
            return Ok(());
        }
        Err(Error::Misuse("the stream and the index are of different devices".into()))
    }

    fn keep(&self) -> Option<Arc<PinnedBuffer>> {
        match &self.payloads {
            Payloads::Pinned(pinned) => Some(pinned.clone()),
            _ => None,
        }
    }

    /// Staging memory, if payloads are to be copied: that of an earlier launch which has passed, or fresh.
    fn staging(&self, cx: &Entered<'_>, state: &mut State) -> Result<Option<DeviceSlice>> {
        let bytes = self.shared.plan.staged_bytes;
        if bytes == 0 {
            return Ok(None);
        }
        let is_free = state.done.as_ref().map(|done| done.is_passed(cx)).transpose()?.unwrap_or(true);
        if self.shared.is_given {
            let given = state.spare.clone().filter(|_| is_free);
            let busy = || Error::Misuse("the memory given for payloads is in use by the launch before".into());
            return given.ok_or_else(busy).map(Some);
        }
        match state.spare.take() {
            Some(memory) if is_free => Ok(Some(memory)),
            _ => Ok(Some(DeviceSlice::owned(Allocation::new(&self.shared.index.device().0, cx, bytes)?, bytes))),
        }
    }
}
