//! Pairs on CUDA devices, in memory that PyTorch gives and on its streams.
//!
//! All memory of the device that is used here is a tensor of PyTorch's, which `tpde/_device.py` makes in the order of the device's
//! copy stream and tells of the stream that works with it. So nothing here frees any, and dropping is always right.

use crate::memory::Memory;
use crate::pair::{self, Pair};
use crate::run::run;
use crate::{errors, memory};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use tpde::cuda::{self, Application, Binding, DeviceIndex, DeviceSlice, Mode, Payloads, Pending, PinnedBuffer, Planned, Stream};
use tpde::error::Escaped;
use tpde::format::BaseKind;
use tpde::source::{FileSource, Source};
use tpde::{Checkpoint, Error, InPlace, Result, TensorInfo};

/// Bytes of a blob that are read and copied at once.
const PIECE: usize = 16 << 20;

/// A device, opened once in a process.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Device(cuda::Device);

#[pymethods]
impl Device {
    /// Opens the device of this number, PyTorch's and the driver's.
    #[new]
    fn open(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        static OPEN: Mutex<Vec<(u32, u32, cuda::Device)>> = Mutex::new(Vec::new());
        run(py, None, 0, |_| {
            let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
            let key = (std::process::id(), ordinal);
            if let Some((.., device)) = open.iter().find(|(process, ordinal, _)| (*process, *ordinal) == key) {
                return Ok(Self(device.clone()));
            }
            let device = cuda::Device::open(ordinal)?;
            open.push((key.0, key.1, device.clone()));
            Ok(Self(device))
        })
    }

    /// Handle of the stream in whose order memory is to be free that is given.
    fn copy_stream(&self) -> usize {
        self.0.copy_stream().addr()
    }
}

/// Where the payloads of a pair are while they are not used.
enum Stored {
    File,
    Pinned(Arc<PinnedBuffer>),
    Device(DeviceSlice),
}

/// A pair whose index is on a device.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct DevicePair {
    pair: Arc<tpde::Pair<FileSource>>,
    index: DeviceIndex,
    stored: Stored,
}

/// Device memory of PyTorch's: address and bytes.
type Given = (u64, u64);

/// # Safety
/// It is as the module says: a tensor's, told of the stream that works with it.
unsafe fn slice((address, bytes): Given) -> DeviceSlice {
    // SAFETY: promised by the caller.
    unsafe { DeviceSlice::from_raw(address, bytes) }
}

fn mode(name: &str) -> Result<Mode> {
    match name {
        "out_of_place" => Ok(Mode::OutOfPlace),
        "all_checked" => Ok(Mode::InPlace(InPlace::AllChecked)),
        "chunk_by_chunk" => Ok(Mode::InPlace(InPlace::ChunkByChunk)),
        _ => Err(Error::Misuse(format!("no mode {name}"))),
    }
}

#[pymethods]
impl DevicePair {
    /// Bytes of device memory for the index of a pair.
    #[staticmethod]
    fn index_bytes(py: Python<'_>, pair: &Pair) -> PyResult<u64> {
        DeviceIndex::bytes_of(pair.shared().index()).map_err(|e| errors::to_python(py, &e))
    }

    /// Uploads the index to `memory`. Payloads stay in the blob's file, or are read into pinned memory, or into `blob`.
    #[new]
    fn upload(
        py: Python<'_>,
        device: &Device,
        pair: &Pair,
        memory: Given,
        pinned: bool,
        blob: Option<Given>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let (device, pair) = (device.0.clone(), pair.shared());
        let total = if pinned || blob.is_some() { pair.blob().size() } else { 0 };
        run(py, progress, total, |steering| {
            // SAFETY: as the module says.
            let index = device.upload_to(pair.index(), unsafe { slice(memory) })?;
            let read = |out: &mut [u8], from: u64| -> Result<()> {
                use rayon::prelude::*;
                out.par_chunks_mut(1 << 20)
                    .enumerate()
                    .try_for_each(|(i, part)| pair.blob().read(from + ((i << 20) as u64), part))?;
                tpde::Watch::done(steering, out.len() as u64)
            };
            let size = pair.blob().size();
            let stored = match blob {
                Some(given) => {
                    // SAFETY: as the module says.
                    let room = unsafe { slice(given) }.slice(0, size)?;
                    let mut piece = device.pinned(PIECE.min(size as usize))?;
                    for at in (0..size).step_by(PIECE) {
                        let bytes = (size - at).min(PIECE as u64);
                        read(&mut piece[..bytes as usize], at)?;
                        device.write(&room.slice(at, bytes)?, &piece[..bytes as usize])?;
                    }
                    Stored::Device(room)
                }
                None if pinned => {
                    let mut buffer = device.pinned(size as usize)?;
                    for at in (0..size).step_by(PIECE) {
                        let bytes = (size - at).min(PIECE as u64) as usize;
                        read(&mut buffer[at as usize..][..bytes], at)?;
                    }
                    Stored::Pinned(Arc::new(buffer))
                }
                None => Stored::File,
            };
            Ok(Self { pair, index, stored })
        })
    }

    /// Where in the blob the payloads of a tensor are, first byte and the one behind the last; none if the processor has to
    /// expand them.
    fn payloads(&self, py: Python<'_>, name: &str) -> PyResult<Option<(u64, u64)>> {
        let find = || -> Result<_> {
            let place = self.place(name)?;
            let Range { start, end } = self.index.payloads_of(place)?;
            Ok(self.index.is_decoded_alone(place)?.then_some((start, end)))
        };
        find().map_err(|e| errors::to_python(py, &e))
    }

    /// Reads bytes of the blob into memory of the host that nobody else uses meanwhile.
    fn read_payloads(&self, py: Python<'_>, start: u64, mut output: Memory) -> PyResult<()> {
        run(py, None, 0, |_| {
            use rayon::prelude::*;
            // SAFETY: as the caller says.
            let out = unsafe { output.bytes_mut() };
            let part = |(i, part): (usize, &mut [u8])| self.pair.blob().read(start + ((i << 20) as u64), part);
            out.par_chunks_mut(1 << 20).enumerate().try_for_each(part)
        })
    }

    /// Bytes of device memory that [`DevicePair::apply`] of the same takes.
    fn apply_bytes(&self, py: Python<'_>, pair: &Pair, tensors: Vec<Memory>, base: Vec<Memory>, mode: &str) -> PyResult<u64> {
        run(py, None, 0, |_| {
            let mode = self::mode(mode)?;
            Ok(self.index.plan(&self.bindings(pair, &tensors, &base, mode)?, mode, self.stored())?.bytes())
        })
    }

    /// Rebuilds tensors from `base`, or changes them where they lie, on a stream, and waits for the outcome. True if they were
    /// changed, false if they were the target.
    #[expect(clippy::too_many_arguments, reason = "as Python hands them over")]
    fn apply(
        &self,
        py: Python<'_>,
        pair: &Pair,
        tensors: Vec<Memory>,
        base: Vec<Memory>,
        mode: &str,
        memory: Given,
        stream: usize,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<bool> {
        let total = tensors.iter().map(|tensor| tensor.range().len() as u64).sum();
        run(py, progress, total, |steering| {
            let mode = self::mode(mode)?;
            let bindings = self.bindings(pair, &tensors, &base, mode)?;
            let planned = self.index.plan(&bindings, mode, self.stored())?;
            // SAFETY: as the module says.
            let application = planned.prepare_in(unsafe { slice(memory) })?;
            let Err(error) = application.launch(&self.stream(stream)).and_then(Pending::wait) else { return Ok(true) };
            let in_place = mode != Mode::OutOfPlace;
            let lying = OnDevice::new(self.index.device(), if in_place { &tensors } else { &base })?;
            let names: Vec<_> = tensors.iter().map(Memory::name).collect();
            match self.pair.explain(error, &names, &lying, in_place, steering) {
                Error::AlreadyApplied => Ok(false),
                error => Err(error),
            }
        })
    }

    /// Works out how a tensor is rebuilt from payloads on the device: the blob's bytes from `start` on, in `part`.
    fn plan(&self, py: Python<'_>, pair: &Pair, output: Memory, base: Option<Memory>, start: u64, part: Memory) -> PyResult<Plan> {
        let base: Vec<_> = base.into_iter().collect();
        let plan = || -> Result<_> {
            let tensors = std::slice::from_ref(&output);
            let bindings = self.bindings(pair, tensors, &base, Mode::OutOfPlace)?;
            // SAFETY: the owner is held by what is made here, and told of the streams by Python's half.
            let payloads = Payloads::Part { at: start, memory: unsafe { part.device_slice() } };
            self.index.plan(&bindings, Mode::OutOfPlace, payloads)
        };
        let planned = plan().map_err(|e| errors::to_python(py, &e))?;
        Ok(Plan { planned: Mutex::new(Some((planned, Owners(base.into_iter().chain([output, part]).collect())))) })
    }
}

/// What has to stay while an application is used.
struct Owners(Vec<Memory>);

impl DevicePair {
    fn place(&self, name: &str) -> Result<usize> {
        self.index.find(name).ok_or_else(|| pair::unknown(name))
    }

    fn stored(&self) -> Payloads<'_> {
        match &self.stored {
            Stored::File => Payloads::Host(self.pair.blob()),
            Stored::Pinned(pinned) => Payloads::Pinned(pinned.clone()),
            Stored::Device(slice) => Payloads::Device(slice.clone()),
        }
    }

    fn stream(&self, raw: usize) -> Stream {
        // SAFETY: PyTorch's stream of this device, which it never destroys.
        unsafe { self.index.device().borrow_stream(std::ptr::with_exposed_provenance_mut(raw)) }
    }

    /// The tensors with their bases, each piece of memory once.
    fn bindings(&self, pair: &Pair, tensors: &[Memory], base: &[Memory], mode: Mode) -> Result<Vec<Binding>> {
        let once = pair.each_memory_once(tensors)?;
        let bases: HashMap<_, _> = base.iter().map(|base| (base.name(), base)).collect();
        let mut bindings = Vec::with_capacity(once.len());
        for (_, given) in tensors.iter().enumerate().filter(|(i, _)| once.contains(i)) {
            let place = self.place(given.name())?;
            let tensor = self.pair.index().tensor(place);
            // SAFETY: a tensor of PyTorch's on this device, as `tpde/_torch_memory.py` has looked at it; whoever called holds it
            // until the streams have passed.
            let output = unsafe { given.device_slice() };
            let wants_base = mode == Mode::OutOfPlace && tensor.base_kind != BaseKind::None;
            let base = bases.get(tensor.base_name).filter(|_| wants_base);
            if let Some(base) = base
                && (base.dtype()? != tensor.dtype || base.shape().get(1..) != tensor.shape.get(1..))
            {
                let (name, dtype, shape) = (Escaped(base.name()), base.dtype()?, base.shape());
                let expected = format!("{} {:?}", tensor.dtype, tensor.shape);
                return Err(Error::Misuse(format!("base tensor {name} is {dtype} {shape:?}, its tensor {expected}")));
            }
            // SAFETY: as above.
            let base = base.map(|base| unsafe { base.device_slice() });
            bindings.push(Binding { tensor: place, base, output });
        }
        Ok(bindings)
    }
}

/// Tensors on a device as a checkpoint, to be read when no work with them is under way.
struct OnDevice<'a> {
    device: &'a cuda::Device,
    infos: Vec<TensorInfo>,
    tensors: &'a [Memory],
}

impl<'a> OnDevice<'a> {
    fn new(device: &'a cuda::Device, tensors: &'a [Memory]) -> Result<Self> {
        Ok(Self { device, infos: tensors.iter().map(memory::info).collect::<Result<_>>()?, tensors })
    }
}

impl Checkpoint for OnDevice<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read(&self, place: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        // SAFETY: as in `bindings`; the copy is waited for.
        let slice = unsafe { self.tensors[place].device_slice() };
        self.device.read(&slice.slice(offset, out.len() as u64)?, out)
    }
}

/// A rebuilding that lacks memory to work in.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Plan {
    planned: Mutex<Option<(Planned<'static>, Owners)>>,
}

#[pymethods]
impl Plan {
    /// Bytes of device memory that it needs.
    fn bytes(&self) -> u64 {
        let planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        planned.as_ref().map_or(0, |(planned, _)| planned.bytes())
    }

    /// Makes it ready in `memory`, once.
    fn prepare(&self, py: Python<'_>, memory: Memory) -> PyResult<Rebuild> {
        let prepare = || {
            let taken = self.planned.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (planned, mut owners) = taken.ok_or_else(|| Error::Misuse("a plan is prepared once".into()))?;
            // SAFETY: the owner is held with the application.
            let application = planned.prepare_in(unsafe { memory.device_slice() })?;
            owners.0.push(memory);
            Ok(Rebuild { application, _owners: owners })
        };
        prepare().map_err(|e| errors::to_python(py, &e))
    }
}

/// A tensor's rebuilding out of place, ready to be launched again and again.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Rebuild {
    application: Application<'static>,
    _owners: Owners,
}

#[pymethods]
impl Rebuild {
    /// Queues it on a stream.
    fn launch(&self, py: Python<'_>, device: &Device, stream: usize) -> PyResult<Launched> {
        // SAFETY: PyTorch's stream of this device, which it never destroys.
        let stream = unsafe { device.0.borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
        let pending = py.detach(|| self.application.launch(&stream)).map_err(|e| errors::to_python(py, &e))?;
        Ok(Launched { pending: Mutex::new(Some(pending)) })
    }

    /// Queues it on a stream that is being captured. The caller keeps this object and the result while the graph may run.
    fn capture(&self, py: Python<'_>, device: &Device, stream: usize) -> PyResult<Captured> {
        // SAFETY: as in `launch`.
        let stream = unsafe { device.0.borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
        // SAFETY: the caller keeps what has to be kept, and replays follow each other on one stream.
        let captured = py.detach(|| unsafe { self.application.capture(&stream) });
        Ok(Captured(captured.map_err(|e| errors::to_python(py, &e))?))
    }
}

/// A rebuilding that is under way.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Launched {
    pending: Mutex<Option<Pending>>,
}

#[pymethods]
impl Launched {
    /// Whether it has passed.
    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.as_ref().map_or(Ok(true), Pending::is_done).map_err(|e| errors::to_python(py, &e))
    }

    /// Waits for it, and raises what was wrong, once.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
        match pending {
            Some(pending) => py.detach(|| pending.wait()).map_err(|e| errors::to_python(py, &e)),
            None => Ok(()),
        }
    }
}

/// A rebuilding within a graph.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Captured(cuda::Captured);

#[pymethods]
impl Captured {
    /// Raises what was wrong with the last replay, which must have passed.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.0.check().map_err(|e| errors::to_python(py, &e))
    }
}
