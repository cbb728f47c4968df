//! Pairs on CUDA devices, in PyTorch's memory and on its streams.
//!
//! All device memory used here belongs to PyTorch tensors. `tpde/_engine/device.py` allocates the tensors in the order of the device's
//! copy stream and records them with the stream that uses them. Nothing here frees device memory, so values can be dropped at any
//! time.

use crate::bound::{BoundTensors, on_device};
use crate::device::Device;
use crate::errors;
use crate::memory::{DeviceTensors, Memory, SliceMemory, UnownedTensors};
use crate::pair::{self, Pair};
use crate::read_ahead::ReadAhead;
use crate::rebuild::{Owners, Plan};
use crate::run::{LOOK, run, run_here, tell};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use tpde::{Codec, Error, FileSource, InPlace, Result, Source};
use tpde_cuda::{
    Application, ApplyChain, ApplyPlan, BlobPart, ChainStep, DeviceIndex, DeviceSlice, Mode, Payloads, Pending, PinnedBuffer,
};

/// Size in bytes of one read of the blob, and of its copy to the device.
const PIECE: usize = 16 << 20;

/// Where the payloads of a pair are kept.
enum PayloadStorage {
    File,
    /// As `File`, but read to pinned memory before they are needed.
    Ahead(ReadAhead),
    Pinned(Arc<PinnedBuffer>),
    Device(DeviceSlice),
}

/// A pair whose index is on a device.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct DevicePair {
    pair: Arc<tpde::Pair<FileSource>>,
    index: DeviceIndex,
    stored: PayloadStorage,
}

/// Device memory of a PyTorch tensor: address, and size in bytes.
pub type DeviceMemory = (u64, u64);

/// # Safety
/// The memory belongs to a tensor that is recorded with the stream that uses it. See the module documentation.
unsafe fn slice((address, bytes): DeviceMemory) -> DeviceSlice {
    // SAFETY: promised by the caller.
    unsafe { DeviceSlice::from_raw(address, bytes) }
}

fn mode(name: &str) -> Result<Mode> {
    match name {
        "out_of_place" => Ok(Mode::OutOfPlace),
        "all_checked" => Ok(Mode::InPlace(InPlace::AllChecked)),
        "chunk_by_chunk" => Ok(Mode::InPlace(InPlace::ChunkByChunk)),
        _ => Err(Error::InvalidArgument(format!("no mode {name}"))),
    }
}

#[pymethods]
impl DevicePair {
    /// Size in bytes of a pair's index on the device.
    #[staticmethod]
    fn index_bytes(py: Python<'_>, pair: &Pair) -> PyResult<u64> {
        DeviceIndex::bytes_of(pair.shared().index()).map_err(|e| errors::to_python(py, &e))
    }

    /// Uploads the index to `memory`. The payloads are read into `blob` if it is set, else into pinned memory if `pinned` is set;
    /// otherwise they stay in the blob's file. For a pair that is applied once, `ahead` lets other threads read it to pinned memory
    /// now, unless it is large.
    #[new]
    #[pyo3(signature = (device, pair, memory, *, pinned, blob, ahead, progress))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn upload(
        py: Python<'_>,
        device: &Device,
        pair: &Pair,
        memory: DeviceMemory,
        pinned: bool,
        blob: Option<DeviceMemory>,
        ahead: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let (device, pair) = (device.0.clone(), pair.shared());
        if !pinned && blob.is_none() {
            return run_here(py, || {
                let read = if ahead { ReadAhead::start(&device, &pair) } else { None };
                // SAFETY: the tensor that owns the memory is recorded with the copy stream (module documentation).
                let index = DeviceIndex::upload_to(&device, pair.index(), unsafe { slice(memory) })?;
                Ok(Self::for_one_call(pair, index, read))
            });
        }
        let total = pair.blob().size();
        run(py, progress, total, |steering| {
            // SAFETY: the tensor that owns the memory is recorded with the copy stream (module documentation).
            let index = DeviceIndex::upload_to(&device, pair.index(), unsafe { slice(memory) })?;
            let read = |out: &mut [u8], from: u64| -> Result<()> {
                use rayon::prelude::*;
                out.par_chunks_mut(1 << 20)
                    .enumerate()
                    .try_for_each(|(i, part)| pair.blob().read(from + ((i << 20) as u64), part))?;
                tpde::Watch::done(steering, out.len() as u64)
            };
            let size = pair.blob().size();
            let stored = match blob {
                Some(blob) => {
                    // SAFETY: the tensor that owns the memory is recorded with the copy stream (module documentation).
                    let memory = unsafe { slice(blob) }.slice(0, size)?;
                    let mut piece = device.pinned(PIECE.min(size as usize))?;
                    for at in (0..size).step_by(PIECE) {
                        let bytes = (size - at).min(PIECE as u64);
                        read(&mut piece[..bytes as usize], at)?;
                        device.write(&memory.slice(at, bytes)?, &piece[..bytes as usize])?;
                    }
                    PayloadStorage::Device(memory)
                }
                None => {
                    let mut buffer = device.pinned(size as usize)?;
                    for at in (0..size).step_by(PIECE) {
                        let bytes = (size - at).min(PIECE as u64) as usize;
                        read(&mut buffer[at as usize..][..bytes], at)?;
                    }
                    PayloadStorage::Pinned(Arc::new(buffer))
                }
            };
            Ok(Self { pair, index, stored })
        })
    }

    /// Byte range of a tensor's payloads in the blob, as (start, end), and the range of its chunks in the index. `None` if the CPU has
    /// to expand them.
    fn payloads(&self, py: Python<'_>, name: &str) -> PyResult<Option<(u64, u64, u32, u32)>> {
        let find = || -> Result<_> {
            let entries = self.index.entries(name);
            if entries.is_empty() {
                return Err(pair::unknown(name));
            }
            let mut range: Option<(u64, u64)> = None;
            let of_entries = self.pair.index().entries(name).map(|tensor| tensor.chunks());
            let chunks = of_entries.reduce(|all, own| all.start.min(own.start)..all.end.max(own.end)).unwrap_or_default();
            for entry in entries {
                if !self.index.is_decoded_alone(entry)? {
                    return Ok(None);
                }
                let of_entry = self.index.payloads_of(entry)?;
                if !of_entry.is_empty() {
                    range = Some(range.map_or((of_entry.start, of_entry.end), |(start, _)| (start, of_entry.end)));
                }
            }
            let (start, end) = range.unwrap_or_default();
            Ok(Some((start, end, chunks.start, chunks.end)))
        };
        find().map_err(|e| errors::to_python(py, &e))
    }

    /// Reads a part of the blob that begins at `start` and fills `output`. Nothing else may use that memory during the call.
    fn read_payloads(&self, py: Python<'_>, start: u64, mut output: Memory) -> PyResult<()> {
        run(py, None, 0, |_| {
            use rayon::prelude::*;
            // SAFETY: the caller promises that nothing else uses the memory during the call, so this is the only slice of it.
            let out = unsafe { output.bytes_mut() };
            let part = |(i, part): (usize, &mut [u8])| self.pair.blob().read(start + ((i << 20) as u64), part);
            out.par_chunks_mut(1 << 20).enumerate().try_for_each(part)
        })
    }

    /// Plans how tensors, or slices of tensors, are rebuilt from `base`, or changed in place. Lists of changes take at most
    /// `scratch_most` bytes. `digests` is whether the digests of targets are compared.
    #[pyo3(signature = (tensors, base, mode, *, scratch_most, digests))]
    fn plan_all(
        &self,
        py: Python<'_>,
        tensors: DeviceTensors,
        base: DeviceTensors,
        mode: &str,
        scratch_most: u64,
        digests: bool,
    ) -> PyResult<PlanOfAll> {
        let is_whole = tensors.is_whole();
        let (tensors, base) = (tensors.into_unowned(), base.into_unowned());
        let plan = || {
            let (pair, index) = (self.pair.clone(), self.index.clone());
            let (ahead, payloads) = match &self.stored {
                PayloadStorage::Ahead(read) if self.is_prepared_first() => (Some(read.clone()), self.in_file()),
                _ => (None, self.stored()),
            };
            let bound = BoundTensors { pair, index, mode: self::mode(mode)?, is_whole, tensors, base, ahead };
            let plan = ApplyPlan::new(&self.index, &bound.bindings()?, bound.mode, payloads)?.digests(digests);
            Ok((plan.max_scratch_bytes(scratch_most), bound))
        };
        let (planned, bound) = py.detach(plan).map_err(|e| errors::to_python(py, &e))?;
        Ok(PlanOfAll { bytes: planned.bytes(), made: Mutex::new(Some((planned, bound))) })
    }

    /// Size in bytes of the scratch memory in which [`Self::apply_chain`] checks the pairs of a chain: at most `scratch`, or the
    /// size of the largest tensor.
    #[staticmethod]
    #[pyo3(signature = (pairs, tensors, *, scratch))]
    fn chain_bytes(py: Python<'_>, pairs: Vec<Py<Self>>, tensors: DeviceTensors, scratch: Option<u64>) -> PyResult<u64> {
        let is_whole = tensors.is_whole();
        let tensors = tensors.into_unowned();
        let bytes = || -> Result<u64> {
            let (steps, bound) = (steps(&pairs), bound_to_last(&pairs, tensors, is_whole)?);
            let tensors = bound.tensors.slices();
            let slices = on_device(bound.wanted(&tensors)?);
            let chain = ApplyChain::new(&steps, &slices);
            match scratch {
                Some(bytes) => chain.scratch_bytes(bytes).bytes(),
                None => chain.bytes(),
            }
        };
        // Waits for payloads that are read ahead.
        py.detach(bytes).map_err(|e| errors::to_python(py, &e))
    }

    /// Applies the pairs of a chain to tensors or slices in place, in the order of a stream, with all checks of all pairs before the
    /// first write. Waits, and returns whether they were changed; false if they are the last target already. The caller must hold the
    /// memory of all tensors.
    #[staticmethod]
    #[pyo3(signature = (pairs, tensors, stream, scratch, *, progress))]
    fn apply_chain(
        py: Python<'_>,
        pairs: Vec<Py<Self>>,
        tensors: DeviceTensors,
        stream: usize,
        scratch: DeviceMemory,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<bool> {
        let is_whole = tensors.is_whole();
        let tensors = tensors.into_unowned();
        let total = tensors.size();
        // Not on a thread of the pool: it may be within the read that this waits for.
        let steps = py.detach(|| steps(&pairs));
        run(py, progress, total, |steering| {
            let bound = bound_to_last(&pairs, tensors, is_whole)?;
            // SAFETY: the handle is of a PyTorch stream of this device. PyTorch never destroys its streams.
            let stream = unsafe { bound.index.device().borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
            // SAFETY: the Python half holds the tensor until this call returns.
            let scratch = unsafe { slice(scratch) };
            let tensors = bound.tensors.slices();
            let slices = on_device(bound.wanted(&tensors)?);
            match ApplyChain::new(&steps, &slices).scratch_bytes(scratch.bytes()).scratch(scratch).run(&stream) {
                Ok(()) => tpde::Watch::done(steering, total).map(|()| true),
                // Nothing was written, so the tensors are compared with the last target and with the first base.
                Err(Error::Step { number: 1, pair, source }) => {
                    if let Error::Invalid(invalid) = &*source
                        && let Error::AlreadyApplied { .. } = bound.explain(Error::Invalid(invalid.clone()), steering)
                    {
                        return Ok(false);
                    }
                    let first = pairs[0].get();
                    let bound = BoundTensors { pair: first.pair.clone(), index: first.index.clone(), ..bound };
                    let source = Box::new(bound.explain(*source, steering));
                    Err(Error::Step { number: 1, pair, source })
                }
                Err(error) => Err(error),
            }
        })
    }

    /// Plans how tensors are rebuilt together, from payloads that are on the device. Each part holds the bytes of the blob from its
    /// offset on.
    fn plan(&self, py: Python<'_>, outputs: Vec<Memory>, base: Vec<Memory>, parts: Vec<(u64, Memory)>) -> PyResult<Plan> {
        let unowned = |memory: &Memory| SliceMemory::whole(memory.unowned());
        let bound = BoundTensors {
            pair: self.pair.clone(),
            index: self.index.clone(),
            mode: Mode::OutOfPlace,
            is_whole: true,
            tensors: UnownedTensors::Slices(outputs.iter().map(unowned).collect()),
            base: UnownedTensors::Slices(base.iter().map(unowned).collect()),
            ahead: None,
        };
        let plan = || -> Result<_> {
            let bindings = bound.bindings()?;
            // SAFETY: the plan holds the owners of the memory, and the Python half records the tensors with the streams that use them.
            let part = |(at, memory): &(u64, Memory)| BlobPart { at: *at, memory: unsafe { memory.device_slice() } };
            let payloads = Payloads::Parts(parts.iter().map(part).collect());
            // A layer rebuilds its weights in every pass. Hashing them each time would cost more than decoding them.
            Ok(ApplyPlan::new(&self.index, &bindings, Mode::OutOfPlace, payloads)?.digests(false))
        };
        let planned = plan().map_err(|e| errors::to_python(py, &e))?;
        let owners = base.into_iter().chain(outputs).chain(parts.into_iter().map(|(_, part)| part));
        Ok(Plan { planned: Mutex::new(Some((planned, Owners(owners.collect())))) })
    }
}

impl DevicePair {
    /// A pair for one call, whose payloads are being read unless they stay in the file.
    pub fn for_one_call(pair: Arc<tpde::Pair<FileSource>>, index: DeviceIndex, read: Option<ReadAhead>) -> Self {
        Self { pair, index, stored: read.map_or(PayloadStorage::File, PayloadStorage::Ahead) }
    }

    /// Whether an application is prepared before its payloads have been read. Payloads of codec `zstd` may be hashed then.
    fn is_prepared_first(&self) -> bool {
        self.pair.index().tensors().all(|tensor| tensor.codec != Codec::Zstd)
    }

    fn in_file(&self) -> Payloads<'static> {
        Payloads::Kept(Arc::new(Blob(self.pair.clone())))
    }

    /// The payloads. Waits until those that are read ahead are complete, so it must not be called on a thread of the pool.
    fn stored(&self) -> Payloads<'static> {
        match &self.stored {
            PayloadStorage::File => self.in_file(),
            // After an error the launch reads the file, and reports what it finds.
            PayloadStorage::Ahead(read) => read.wait().map_or_else(|| self.in_file(), Payloads::Pinned),
            PayloadStorage::Pinned(pinned) => Payloads::Pinned(pinned.clone()),
            PayloadStorage::Device(slice) => Payloads::Device(slice.clone()),
        }
    }
}

/// The steps of a chain.
fn steps(pairs: &[Py<DevicePair>]) -> Vec<ChainStep<'static>> {
    pairs.iter().map(|pair| ChainStep::new(&pair.get().index, pair.get().stored())).collect()
}

/// Tensors in place, bound to the last pair of a chain.
fn bound_to_last(pairs: &[Py<DevicePair>], tensors: UnownedTensors, is_whole: bool) -> Result<BoundTensors> {
    let last = pairs.last().ok_or_else(|| Error::InvalidArgument("no pair is given".into()))?.get();
    let (pair, index, mode) = (last.pair.clone(), last.index.clone(), Mode::InPlace(InPlace::AllChecked));
    Ok(BoundTensors { pair, index, mode, is_whole, tensors, base: UnownedTensors::Slices(Vec::new()), ahead: None })
}

/// The blob of a pair as a source.
struct Blob(Arc<tpde::Pair<FileSource>>);

impl Source for Blob {
    fn size(&self) -> u64 {
        self.0.blob().size()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.0.blob().read(offset, out)
    }

    fn bytes<'a>(&'a self, offset: u64, size: usize, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        self.0.blob().bytes(offset, size, scratch)
    }
}

/// A plan to apply some or all tensors, which still needs working memory.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct PlanOfAll {
    bytes: u64,
    made: Mutex<Option<(ApplyPlan<'static>, BoundTensors)>>,
}

#[pymethods]
impl PlanOfAll {
    /// Size in bytes of the device memory that the plan needs.
    fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the plan ready to run, with `memory` as working memory. A plan can be prepared once.
    fn prepare(&self, py: Python<'_>, memory: DeviceMemory) -> PyResult<Ready> {
        let prepare = || {
            let taken = self.made.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (planned, bound) = taken.ok_or_else(|| Error::InvalidArgument("the plan has already been prepared".into()))?;
            // SAFETY: as for `slice`. The Python half keeps the tensor as long as the object made here.
            let application = Application::prepare_in(planned, unsafe { slice(memory) })?;
            Ok(Ready { work: Mutex::new((application, bound)) })
        };
        py.detach(prepare).map_err(|e| errors::to_python(py, &e))
    }
}

/// A prepared application of some or all tensors. It can run any number of times.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Ready {
    work: Mutex<(Application<'static>, BoundTensors)>,
}

#[pymethods]
impl Ready {
    /// Moves the application to tensors of the same names and sizes at other addresses; without `base`, the bases stay. Returns
    /// false, and changes nothing, if the new addresses need another plan.
    #[pyo3(signature = (tensors, base=None))]
    fn move_to(&self, py: Python<'_>, tensors: Vec<usize>, base: Option<Vec<usize>>) -> PyResult<bool> {
        let mut work = self.work(py)?;
        let (application, bound) = &mut *work;
        let before = (bound.tensors.addresses(), bound.base.addresses());
        let base = base.unwrap_or_else(|| before.1.clone());
        if before.0 == tensors && before.1 == base {
            return Ok(true);
        }
        if (before.0.len(), before.1.len()) != (tensors.len(), base.len()) {
            return Ok(false);
        }
        bound.tensors.move_to(&tensors);
        bound.base.move_to(&base);
        let moved = bound.bindings().and_then(|bindings| application.rebind(&bindings));
        if !matches!(moved, Ok(true)) {
            bound.tensors.move_to(&before.0);
            bound.base.move_to(&before.1);
        }
        moved.map_err(|e| errors::to_python(py, &e))
    }

    /// Runs the application on a stream and waits for its outcome. Returns whether tensors were changed (false if they already were
    /// the target), and the seconds until all work was queued. The caller must hold the memory of all tensors. Unless it `commits`,
    /// it stops before the first write: everything was to be checked first. `meanwhile` is called when all work is queued; its
    /// exception is raised when the work has finished.
    #[pyo3(signature = (stream, progress, *, commits, meanwhile=None))]
    fn run(
        &self,
        py: Python<'_>,
        stream: usize,
        progress: Option<Py<PyAny>>,
        commits: bool,
        meanwhile: Option<Py<PyAny>>,
    ) -> PyResult<(bool, f64)> {
        let begin = Instant::now();
        let mut work = self.work(py)?;
        let (application, bound) = &mut *work;
        if let Some(read) = bound.ahead.take() {
            // After an error the launch reads the file, and reports what it finds.
            let set = || read.wait().map_or(Ok(()), |pinned| application.read_payloads_from(Payloads::Pinned(pinned)));
            py.detach(set).map_err(|e| errors::to_python(py, &e))?;
        }
        let (application, bound) = &*work;
        let total = bound.size();
        // SAFETY: the handle is of a PyTorch stream of this device. PyTorch never destroys its streams.
        let stream = unsafe { bound.index.device().borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
        // Reading and expanding payloads needs the threads of the pool. Queueing alone needs only this thread.
        let queue = || if commits { application.launch(&stream) } else { application.check(&stream) };
        let pending = match application.reads_on_host() {
            true => run(py, None, 0, |_| queue())?,
            false => py.detach(queue).map_err(|e| errors::to_python(py, &e))?,
        };
        let queued = begin.elapsed().as_secs_f64();
        let called = meanwhile.map_or(Ok(()), |meanwhile| meanwhile.call0(py).map(|_| ()));
        let waited = wait(py, &pending, total, progress.as_ref());
        let raised = called.and(waited);
        let error = match pending.wait() {
            Ok(()) => {
                raised?;
                return tell(py, progress.as_ref(), total, total).map(|()| (true, queued));
            }
            Err(error) => error,
        };
        let explained = match raised {
            Ok(()) => run(py, progress, total, |steering| match bound.explain(error, steering) {
                Error::AlreadyApplied { .. } => Ok(false),
                error => Err(error),
            }),
            Err(raised) => {
                raised.set_cause(py, Some(errors::to_python(py, &error))); // says what state the tensors are in
                Err(raised)
            }
        };
        explained.map(|applied| (applied, queued))
    }
}

impl Ready {
    /// Locks the application without blocking. A blocked second thread would hold the interpreter's lock, so it gets an error.
    fn work(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, (Application<'static>, BoundTensors)>> {
        let busy = || errors::to_python(py, &Error::InvalidArgument("an application is used by two threads at once".into()));
        match self.work.try_lock() {
            Ok(work) => Ok(work),
            Err(TryLockError::Poisoned(work)) => Ok(work.into_inner()),
            Err(TryLockError::WouldBlock) => Err(busy()),
        }
    }
}

/// `wait` polls without sleeping for the first `AWAKE`, then sleeps for `NAP` between polls.
const AWAKE: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(100);

/// Waits until a launch has finished. Polls on the calling thread, because waking a sleeping thread takes longer. An exception from
/// a signal or from `progress` is returned only after the launch has finished.
fn wait(py: Python<'_>, pending: &Pending, total: u64, progress: Option<&Py<PyAny>>) -> PyResult<()> {
    let begin = Instant::now();
    let mut raised = Ok(());
    let mut look = LOOK;
    loop {
        let is_done = py.detach(|| {
            loop {
                // A device error counts as done here. The caller reports it when it asks for the outcome.
                if pending.is_done().unwrap_or(true) {
                    return true;
                }
                match begin.elapsed() {
                    waited if waited >= look => return false,
                    waited if waited >= AWAKE => std::thread::sleep(NAP),
                    _ => std::hint::spin_loop(),
                }
            }
        });
        if is_done {
            return raised;
        }
        look += LOOK;
        if raised.is_ok() {
            raised = py.check_signals().and_then(|()| tell(py, progress, 0, total));
        }
    }
}
