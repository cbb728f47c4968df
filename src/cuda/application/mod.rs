//! Applications: tensors, payloads and a mode made ready once, then launched on a caller's stream as often as wanted.

mod frames;
mod launch;
pub(super) mod outcome;
mod prepared;

use self::launch::Launcher;
use self::outcome::{Captured, Pending};
use self::prepared::{LastLaunch, Prepared};
use super::abi::{DeviceTensor, STATUS_OK};
use super::plan::binding::{self, Binding};
use super::plan::payloads::{Mode, Payloads};
use super::plan::{ApplyPlan, check_devices, tensor_range, tensor_table};
use super::runtime::copies;
use super::runtime::driver::{self, Entered, OwnStream, RawEvent, RawStream};
use super::runtime::memory::{Allocation, DeviceSlice, PinnedBuffer};
use super::runtime::stream::Stream;
use crate::error::{Error, Result};
use std::sync::{Arc, PoisonError};
use zerocopy::IntoBytes;

/// An application of a pair that is ready to be launched.
#[derive(Debug)]
pub struct Application<'a> {
    prepared: Arc<Prepared>,
    payloads: Payloads<'a>,
}

/// While a launch is queued. If that ends by a panic, of a caller's [`Source`](crate::source::Source) for example, the host waits
/// for all that was queued, so that its memory may be freed, and the application is ready for the next launch.
struct Unwinding<'a>(&'a Launcher<'a>);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        let Launcher { prepared, cx, stream, .. } = *self.0;
        let sides = prepared.sides.iter().map(OwnStream::raw);
        [prepared.index.device().inner.copy.raw(), stream].into_iter().chain(sides).for_each(|stream| driver::drain(cx, stream));
        _ = prepared.reset(cx, stream);
        driver::drain(cx, stream);
    }
}

impl<'a> Application<'a> {
    /// Makes a planned application ready, in memory of the crate's.
    ///
    /// Cost: a few allocations and one small copy, without waiting for a stream; memory of the device: 4 bytes per chunk for the
    /// order of work and 4 for its outcome, 48 per tensor; for [`InPlace::AllChecked`](crate::InPlace::AllChecked) what lists of
    /// changes take, up to 48 MiB; and once per device scratch memory for
    /// [`InPlace::ChunkByChunk`](crate::InPlace::ChunkByChunk).
    ///
    /// # Errors
    /// [`Error::Device`] if memory or the driver fails.
    pub fn prepare(plan: ApplyPlan<'a>) -> Result<Self> {
        let payloads = plan.payloads.clone();
        Ok(Self { prepared: Arc::new(Prepared::new(plan, None)?), payloads })
    }

    /// Makes a planned application ready in memory of the caller's, and takes no other: as much as [`ApplyPlan::bytes`] says, at
    /// a multiple of 256. What is queued on [`Device::copy_stream`](super::Device::copy_stream) may use the memory at once, and
    /// nobody else does until the application is dropped and the streams that it was launched on have passed. Where payloads
    /// are copied, a launch is refused while the one before it is under way.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the memory is too small or not aligned; [`Error::Device`] if the driver fails.
    pub fn prepare_in(plan: ApplyPlan<'a>, memory: DeviceSlice) -> Result<Self> {
        let payloads = plan.payloads.clone();
        Ok(Self { prepared: Arc::new(Prepared::new(plan, Some(memory))?), payloads })
    }

    /// Binds the same tensors to other memory, for the launches from here on. False if other work is to be prepared for that,
    /// because of tensors that are one now, or no longer; nothing has changed then.
    ///
    /// # Errors
    /// [`Error::Misuse`] as [`ApplyPlan::new`], or if something is kept of an earlier launch that was not waited for.
    pub fn rebind(&mut self, tensors: &[Binding]) -> Result<bool> {
        let busy = || Error::Misuse("an application is bound anew, and a launch of it was not waited for".into());
        let prepared = Arc::get_mut(&mut self.prepared).ok_or_else(busy)?;
        check_devices(&prepared.index.device().inner, tensors)?;
        let bindings = binding::check(&prepared.index.uploaded.tensors, tensors, prepared.mode != Mode::OutOfPlace)?;
        let places = |bindings: &[Binding]| bindings.iter().map(|binding| binding.tensor).collect::<Vec<_>>();
        if places(&bindings) != places(&prepared.bindings) {
            return Ok(false);
        }
        let table = tensor_table(&prepared.index, &bindings, prepared.mode)?;
        let device = &prepared.index.device().inner;
        let cx = device.context.enter()?;
        let mut pinned = PinnedBuffer::new(device, &cx, size_of_val(&table[..]))?;
        pinned.copy_from_slice(table.as_bytes());
        prepared.last_launch.get_mut().unwrap_or_else(PoisonError::into_inner).table = Some(pinned);
        prepared.bindings = bindings;
        Ok(true)
    }

    /// Whether a launch has the processor read payloads.
    pub fn reads_on_host(&self) -> bool {
        matches!(self.payloads, Payloads::Host(_) | Payloads::Kept(_)) || self.prepared.schedule.has_expanded
    }

    /// Queues the copy of a tensor table.
    fn send_table(&self, cx: &Entered<'_>, table: Option<&PinnedBuffer>, stream: RawStream) -> Result<()> {
        let Some(table) = table else { return Ok(()) };
        let first = tensor_range(&self.prepared.bindings).start;
        let to = self.prepared.tensors.wrapping_add((first * size_of::<DeviceTensor>()) as u64);
        // SAFETY: a table of the same tensors is as long as that which the memory was made for. The stream is behind the last
        // launch, and both memories are held until it has passed.
        unsafe { copies::copy_in(cx, to, table.as_ptr(), table.len(), stream) }
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
        let prepared = &self.prepared;
        let device = &prepared.index.device().inner;
        self.check_device(stream)?;
        let _relaxed = driver::Relaxed::new()?;
        let cx = device.context.enter()?;
        let raw = stream.raw();
        if driver::is_capturing(&cx, raw)? {
            return Err(Error::Misuse("the stream is being captured into a graph: that is Application::capture".into()));
        }
        let statuses = PinnedBuffer::new(device, &cx, prepared.status_bytes())?;
        let mut last_launch = prepared.last_launch.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = self.staging(&cx, &mut last_launch)?;
        if let Some(end) = &last_launch.end {
            end.hold(&cx, raw)?;
        }
        prepared.ready.hold(&cx, raw)?;

        let launcher = Launcher { prepared, cx: &cx, stream: raw, staging: staging.as_ref().map(DeviceSlice::address) };
        let (done, end) = (Arc::new(RawEvent::new(&cx, false)?), RawEvent::new(&cx, false)?);
        let unwinding = Unwinding(&launcher);
        let queued = self.send_table(&cx, last_launch.table.as_ref(), raw).and_then(|()| launcher.run(&self.payloads, &statuses));
        // From here on whatever was queued is held, also after an error, which may have come before the streams were joined.
        let gathered = if queued.is_err() { launcher.gather() } else { Ok(()) };
        let held = gathered
            .and_then(|()| done.record(&cx, raw))
            .and_then(|()| prepared.reset(&cx, raw))
            .and_then(|()| end.record(&cx, raw))
            .and_then(|()| end.hold(&cx, device.pools.reaper.raw()));
        std::mem::forget(unwinding);
        let pending = Pending::new(prepared.clone(), done.clone(), statuses);
        if let Err(e) = held {
            // Nobody knows when the device is done with the memory: it is given up.
            std::mem::forget((pending, staging, prepared.clone()));
            return Err(e);
        }
        // After an error the table on the device may still be the old one.
        let _sent = if queued.is_ok() { last_launch.table.take() } else { None };
        last_launch.spare = staging;
        last_launch.end = Some(end);
        last_launch.done = Some(done);
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
        let prepared = &self.prepared;
        let device = &prepared.index.device().inner;
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
        if prepared.frames.is_some() {
            return Err(Error::Misuse("a graph cannot have frames expanded by nvCOMP".into()));
        }
        let mut statuses = PinnedBuffer::new(device, &cx, prepared.status_bytes())?;
        // Pinned memory is used again. Until a launch of the graph has written these words, nothing is wrong with one.
        statuses.fill(const { STATUS_OK as u8 });
        let mut fresh = if prepared.is_given { None } else { Some(LastLaunch::default()) };
        let mut own = prepared.last_launch.lock().unwrap_or_else(PoisonError::into_inner);
        if own.table.is_some() {
            return Err(Error::Misuse("an application that was bound anew is launched before it is captured".into()));
        }
        let staging = self.staging(&cx, fresh.as_mut().unwrap_or(&mut own))?;
        // What was queued outside of the capture cannot be waited for in it; this is a copy that was queued long ago.
        prepared.ready.wait(&cx)?;
        let launcher = Launcher { prepared, cx: &cx, stream: raw, staging: staging.as_ref().map(DeviceSlice::address) };
        let queued = prepared.reset(&cx, raw).and_then(|()| launcher.run_in_order(&self.payloads, &statuses));
        let captured = Captured::new(prepared.clone(), statuses, staging, self.keep());
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
        if Arc::ptr_eq(stream.device(), &self.prepared.index.device().inner) {
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
    fn staging(&self, cx: &Entered<'_>, last_launch: &mut LastLaunch) -> Result<Option<DeviceSlice>> {
        let bytes = self.prepared.schedule.staged_bytes;
        if bytes == 0 {
            return Ok(None);
        }
        let is_free = last_launch.done.as_ref().map(|done| done.is_passed(cx)).transpose()?.unwrap_or(true);
        if self.prepared.is_given {
            let given = last_launch.spare.clone().filter(|_| is_free);
            let busy = || Error::Misuse("the memory given for payloads is in use by the launch before".into());
            return given.ok_or_else(busy).map(Some);
        }
        match last_launch.spare.take() {
            Some(memory) if is_free => Ok(Some(memory)),
            _ => Ok(Some(DeviceSlice::owned(Allocation::new(&self.prepared.index.device().inner, cx, bytes)?, bytes))),
        }
    }
}
