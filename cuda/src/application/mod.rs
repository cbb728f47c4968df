//! Applications: prepared once, then launched on a caller's stream any number of times.

mod digests;
#[cfg(feature = "nvcomp")]
mod frames;
mod launch;
#[cfg(not(feature = "nvcomp"))]
mod no_frames;
pub(super) mod outcome;
mod prepared;
mod streams;
mod targets;

use self::launch::Launcher;
use self::outcome::{Captured, Pending};
use self::prepared::{LastLaunch, LaunchData};
use super::abi::{DeviceTensor, STATUS_NOT_RUN, STATUS_OK};
use super::plan::binding::{self, Binding};
use super::plan::payloads::{Mode, Payloads};
use super::plan::program::{Program, Variation};
use super::plan::targets::Targets;
use super::plan::{ApplyPlan, check_devices, tensor_range, tensor_table};
use super::runtime::copies;
use super::runtime::driver::{self, EnterGuard, RawEvent, RawStream};
use super::runtime::memory::{Allocation, DeviceSlice, PinnedBuffer};
use super::runtime::stream::Stream;
use std::sync::{Arc, PoisonError};
use tpde::{InPlace, PayloadDigests};
use tpde_core::error::{Error, Result};

/// An application of a pair that is ready to be launched.
#[derive(Debug)]
pub struct Application<'a> {
    prepared: Arc<LaunchData>,
    payloads: Payloads<'a>,
    program: Program,
}

/// Guard while a launch is being queued. After a panic, for example in a caller's [`Source`](tpde::Source), it waits on
/// the host for all queued work and resets the application. Then the memory may be freed, or the application launched again.
struct Unwinding<'a>(&'a Launcher<'a>);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        let Launcher { prepared, cx, stream, .. } = *self.0;
        prepared.streams.all().chain([stream]).for_each(|stream| driver::drain(cx, stream));
        _ = prepared.reset(cx, stream);
        driver::drain(cx, stream);
    }
}

impl<'a> Application<'a> {
    /// Prepares a planned application in memory of this crate.
    ///
    /// Cost: a few allocations and one small copy, and sometimes a read of all payloads: [`ApplyPlan::payload_digests`]. The call waits
    /// for no stream. Device memory: 8 bytes per chunk, and 48 bytes
    /// per tensor, or 80 if some have gaps between rows, or 128 if some have derived bases. The first application of a device
    /// with such tensors compiles their kernels. [`InPlace::AllChecked`](tpde::InPlace::AllChecked) adds lists of changes and
    /// targets, up to 1 GiB.
    /// [`InPlace::ChunkByChunk`](tpde::InPlace::ChunkByChunk) adds scratch memory once per device.
    ///
    /// # Errors
    /// [`Error::Device`] if memory or the driver fails.
    pub fn prepare(plan: ApplyPlan<'a>) -> Result<Self> {
        Self::new(plan, None)
    }

    fn new(plan: ApplyPlan<'a>, memory: Option<DeviceSlice>) -> Result<Self> {
        let payloads = plan.payloads.clone();
        let (prepared, program) = LaunchData::new(plan, memory)?;
        Ok(Self { prepared: Arc::new(prepared), payloads, program })
    }

    /// Prepares a planned application in the caller's memory only: [`ApplyPlan::bytes`] bytes, aligned to 256. Work on
    /// [`Device::copy_stream`](super::Device::copy_stream) may use the memory at once. Nothing else may use it until the
    /// application is dropped and its launches have completed. If payloads are copied, a launch is refused while the previous
    /// launch is running.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the memory is too small or not aligned; [`Error::Device`] if the driver fails.
    pub fn prepare_in(plan: ApplyPlan<'a>, memory: DeviceSlice) -> Result<Self> {
        Self::new(plan, Some(memory))
    }

    /// Binds the same tensors to other memory, for later launches. Returns false and changes nothing if the set of tensors that
    /// share memory differs, or if a tensor needs other kernels or has other chunks: it has gaps between rows that had none before, or
    /// the reverse, or its slice is another one.
    /// That requires a new application.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] as [`ApplyPlan::new`], or if a [`Pending`] or [`Captured`] of an earlier launch still exists.
    pub fn rebind(&mut self, tensors: &[Binding]) -> Result<bool> {
        let busy = || {
            Error::InvalidArgument("the application cannot be rebound: a Pending or Captured of an earlier launch exists".into())
        };
        let prepared = Arc::get_mut(&mut self.prepared).ok_or_else(busy)?;
        check_devices(&prepared.index.device().inner, tensors)?;
        let bindings = binding::check(&prepared.index.uploaded.tensors, tensors, prepared.request.mode != Mode::OutOfPlace)?;
        let chunks_of = |one: &Binding| one.portion.as_ref().map(|portion| portion.chunks.clone());
        let kernels_of =
            |bindings: &[Binding]| bindings.iter().map(|one| (one.tensor, one.variant, chunks_of(one))).collect::<Vec<_>>();
        if kernels_of(&bindings) != kernels_of(&prepared.bindings) {
            return Ok(false);
        }
        let mut table = tensor_table(&prepared.index, &bindings, prepared.request.mode)?;
        let target_plan = match &prepared.targets {
            Some(on_device) => {
                let targets = Targets::new(&prepared.index, &bindings, &prepared.schedule, prepared.request.mode)?;
                table.extend(targets.table(on_device.scratch));
                Some(targets)
            }
            None => None,
        };
        let device = &prepared.index.device().inner;
        let cx = device.context.enter()?;
        let mut pinned = PinnedBuffer::new(device, &cx, table.len())?;
        pinned.copy_from_slice(&table);
        prepared.last_launch.get_mut().unwrap_or_else(PoisonError::into_inner).table = Some(pinned);
        prepared.bindings = bindings;
        prepared.target_plan = target_plan;
        Ok(true)
    }

    /// Takes the payloads of later launches from another copy of the blob, in host memory or in pinned memory. Launches that are queued
    /// and graphs that are captured keep theirs. Nothing is copied.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if either copy is in device memory, or if the new one has another size or is of another device.
    pub fn read_payloads_from(&mut self, payloads: Payloads<'a>) -> Result<()> {
        if self.payloads.on_device().is_some() || payloads.on_device().is_some() {
            return Err(Error::InvalidArgument(
                "payloads on the device cannot be exchanged: expected two copies on the host".into(),
            ));
        }
        payloads.check(&self.prepared.index, &self.prepared.bindings)?;
        payloads.check_device(&self.prepared.index.device().inner)?;
        self.payloads = payloads;
        self.program = self.prepared.program(&self.payloads, Variation::Whole);
        Ok(())
    }

    /// Returns which payloads a launch compares with the digests that the pair digest covers. A wrong digest is an error like any
    /// other: out of place, discard the output; in place nothing is written, or the chunk is unchanged.
    pub fn payload_digests(&self) -> PayloadDigests {
        self.prepared.compared
    }

    /// Returns whether the processor reads or expands payloads during a launch.
    pub fn reads_on_host(&self) -> bool {
        self.program.has_host_work()
    }

    /// Queues the copy of a tensor table.
    fn send_table(&self, cx: &EnterGuard<'_>, table: Option<&PinnedBuffer>, stream: RawStream) -> Result<()> {
        let Some(table) = table else { return Ok(()) };
        let first = tensor_range(&self.prepared.bindings).start;
        let to = self.prepared.table.tensors.wrapping_add((first * size_of::<DeviceTensor>()) as u64);
        // SAFETY: a table of the same tensors has the same length. The stream waits for the last launch, and both memories are
        // held until the stream has completed.
        unsafe { copies::copy_in(cx, to, table.as_ptr(), table.len(), stream) }
    }

    /// Queues the application on a stream. [`Pending::wait`] gives the outcome, including errors of reading payloads.
    ///
    /// The call waits for no stream. With payloads in pinned or device memory it only queues work. Payloads in host memory are
    /// read before the call returns, through a ring of fixed size. Payloads of codec `zstd` are expanded before the call returns.
    /// Launches of one application run one after the other, even on different streams. All memory of this crate is held until
    /// the stream has completed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a stream of another device, and for a stream that is being captured, see
    /// [`Application::capture`]; [`Error::Device`] if the driver refuses.
    pub fn launch(&self, stream: &Stream) -> Result<Pending> {
        self.queue(stream, &self.program)
    }

    /// Queues the checks of [`Application::launch`] and writes no tensor. [`Pending::wait`] gives the error that the launch would
    /// have. Otherwise as [`Application::launch`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless the mode is [`InPlace::AllChecked`](tpde::InPlace::AllChecked), and those of
    /// [`Application::launch`].
    pub fn check(&self, stream: &Stream) -> Result<Pending> {
        if self.prepared.request.mode != Mode::InPlace(InPlace::AllChecked) {
            let reason = "only an application in place that checks all chunks first can be checked without writing";
            return Err(Error::InvalidArgument(reason.into()));
        }
        self.queue(stream, &self.prepared.program(&self.payloads, Variation::WithoutCommit))
    }

    /// Queues a launch.
    fn queue(&self, stream: &Stream, program: &Program) -> Result<Pending> {
        let prepared = &self.prepared;
        let device = &prepared.index.device().inner;
        self.check_device(stream)?;
        let cx = device.context.enter()?;
        let raw = stream.raw();
        if driver::is_capturing(&cx, raw)? {
            return Err(Error::InvalidArgument("the stream is being captured into a graph: use Application::capture".into()));
        }
        // Kernels write their status words to it, so nothing is copied behind them.
        let mut words = PinnedBuffer::new(device, &cx, prepared.status_bytes())?;
        words.fill_words(STATUS_NOT_RUN);
        let mut last_launch = prepared.last_launch.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = self.staging(&cx, &mut last_launch)?;
        last_launch.ready.as_ref().unwrap_or(&prepared.copied).hold(&cx, raw)?;

        let staging_at = staging.as_ref().map(DeviceSlice::address);
        let (statuses, payloads) = (words.address(), &self.payloads);
        let launcher = Launcher { prepared, program, payloads, cx: &cx, stream: raw, staging: staging_at, statuses, words: &words };
        let done = Arc::new(RawEvent::new(&cx, false)?);
        let unwinding = Unwinding(&launcher);
        let queued = self.send_table(&cx, last_launch.table.as_ref(), raw).and_then(|()| launcher.run());
        // From here on the memory of all queued work is held, also after an error. The error may have occurred before the streams
        // were joined.
        let gathered = if queued.is_err() { launcher.gather() } else { Ok(()) };
        let held = gathered
            .and_then(|()| done.record(&cx, raw))
            .and_then(|()| {
                last_launch.done = Some(done.clone());
                prepared.reset_behind(&cx, raw, &done)
            })
            .and_then(|ready| last_launch.ready.insert(ready).hold(&cx, device.pools.reaper.raw()));
        std::mem::forget(unwinding);
        let pending = Pending::new(prepared.clone(), done, words);
        if let Err(e) = held {
            // The point at which the device no longer uses the memory is unknown: leak the memory.
            std::mem::forget((pending, staging, prepared.clone(), self.payloads.clone()));
            return Err(e);
        }
        // The table counts as sent only on success: after an error the device may still have the old table.
        let _sent = if queued.is_ok() { last_launch.table.take() } else { None };
        last_launch.spare = staging;
        queued.map(|host_error| pending.with_host_error(host_error))
    }

    /// Queues the application on a stream that is being captured into a graph. Each launch of the graph then runs the
    /// application. Payloads must be in device or pinned memory.
    ///
    /// # Safety
    /// While the graph may still run, keep the result and the memory of the tensors and payloads. Launches of the graph, and of
    /// the application, must not overlap: queue them on one stream, or wait for the stream in between. Waiting for a [`Pending`] is not
    /// enough, because memory is reset behind it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a stream of another device, a stream that is not being captured, and payloads that the
    /// processor reads or nvCOMP expands; [`Error::Device`] if the driver refuses.
    pub unsafe fn capture(&self, stream: &Stream) -> Result<Captured> {
        let prepared = &self.prepared;
        let device = &prepared.index.device().inner;
        self.check_device(stream)?;
        let cx = device.context.enter()?;
        let raw = stream.raw();
        if !driver::is_capturing(&cx, raw)? {
            return Err(Error::InvalidArgument("the stream is not being captured".into()));
        }
        if self.reads_on_host() {
            return Err(Error::InvalidArgument(
                "the application cannot be captured: the CPU reads its payloads at each launch".into(),
            ));
        }
        if prepared.frames.is_some() {
            return Err(Error::InvalidArgument("the application cannot be captured: nvCOMP expands its frames".into()));
        }
        let mut words = PinnedBuffer::new(device, &cx, prepared.status_bytes())?;
        // Before the first launch of the graph all chunks count as correct.
        words.fill_words(STATUS_OK);
        let mut own_last_launch = if prepared.in_caller_memory { None } else { Some(LastLaunch::default()) };
        let mut own = prepared.last_launch.lock().unwrap_or_else(PoisonError::into_inner);
        if own.table.is_some() {
            return Err(Error::InvalidArgument("a rebound application must be launched once before it is captured".into()));
        }
        let staging = self.staging(&cx, own_last_launch.as_mut().unwrap_or(&mut own))?;
        // A captured stream cannot wait for work outside of the capture, so the host waits. `prepare` queued these copies, which are
        // short.
        prepared.copied.wait(&cx)?;
        let staging_at = staging.as_ref().map(DeviceSlice::address);
        let program = &prepared.program(&self.payloads, Variation::Serial);
        let (statuses, payloads) = (prepared.statuses, &self.payloads);
        let launcher = Launcher { prepared, program, payloads, cx: &cx, stream: raw, staging: staging_at, statuses, words: &words };
        let queued = prepared.reset_statuses(&cx, raw).and_then(|()| launcher.run()).and_then(|_| prepared.reset(&cx, raw));
        let captured = Captured::new(prepared.clone(), words, staging, self.pinned_payloads());
        match queued {
            Ok(_) => Ok(captured),
            Err(e) => {
                // Work captured before the error may still run as part of the caller's graph: reset behind it, and leak its memory.
                _ = prepared.reset(&cx, raw);
                std::mem::forget(captured);
                Err(e)
            }
        }
    }

    fn check_device(&self, stream: &Stream) -> Result<()> {
        if Arc::ptr_eq(stream.device(), &self.prepared.index.device().inner) {
            return Ok(());
        }
        Err(Error::InvalidArgument("the stream and the index are of different devices".into()))
    }

    fn pinned_payloads(&self) -> Option<Arc<PinnedBuffer>> {
        match &self.payloads {
            Payloads::Pinned(pinned) => Some(pinned.clone()),
            _ => None,
        }
    }

    /// Returns staging memory if payloads are copied: the memory of a completed launch, or a new allocation.
    fn staging(&self, cx: &EnterGuard<'_>, last_launch: &mut LastLaunch) -> Result<Option<DeviceSlice>> {
        let bytes = self.prepared.schedule.staged_bytes;
        if bytes == 0 {
            return Ok(None);
        }
        let is_free = last_launch.done.as_ref().map(|done| done.is_passed(cx)).transpose()?.unwrap_or(true);
        if self.prepared.in_caller_memory {
            let spare = last_launch.spare.clone().filter(|_| is_free);
            let busy = || Error::InvalidArgument("the staging memory is in use by the previous launch".into());
            return spare.ok_or_else(busy).map(Some);
        }
        match last_launch.spare.take() {
            Some(memory) if is_free => Ok(Some(memory)),
            _ => Ok(Some(DeviceSlice::owned(Allocation::new(&self.prepared.index.device().inner, cx, bytes)?, bytes))),
        }
    }
}
