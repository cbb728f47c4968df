//! A device: its context, kernels, streams and memory.

use super::calls;
use super::driver::{self, Context, Entered, Kernel, OwnStream, RawEvent, RawStream, check};
use super::frames::{self, Kernels};
use super::index::DeviceIndex;
use super::layout::{self, LIST_STEP};
use super::memory::{self, Allocation, DeviceSlice, PinnedBuffer, Pools};
use super::staging::Ring;
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::index::ValidatedIndex;
use cudarc::driver::sys;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const RAW_PTX: &str = include_str!("../../kernels/raw.ptx");
const CONDITIONED_PTX: &str = include_str!("../../kernels/conditioned.ptx");
const WITHOUT_BASE_PTX: &str = include_str!("../../kernels/without_base.ptx");
const FRAMES_PTX: &str = include_str!("../../kernels/frames.ptx");
const LAYOUT_PTX: &str = include_str!("../../kernels/layout.ptx");

/// Bytes of a slot of scratch memory: the changes of a chunk, mostly.
const SCRATCH_SLOT: u32 = 256 << 10;
/// Slots for each multiprocessor: more than blocks that it holds at once, so that one is soon found.
const BLOCKS: u32 = 4;
/// Blocks of `tpde_conditioned` that a multiprocessor holds at once: there are no slots to spare then.
const BLOCKS_LEAST: u32 = 3;

/// What opening a device took, once: none of it is in the times of later calls.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct FirstCall {
    /// Loading the driver and opening the device's context, where the process had none.
    pub context: Duration,
    /// Compiling the kernels for the device, or finding them in the driver's cache; but for the one for chunks without a base,
    /// which comes with the first index that has such.
    pub kernels: Duration,
    /// Streams, and pinning the staging ring.
    pub memory: Duration,
}

/// A CUDA device that is ready to rebuild tensors. Clones are the same device.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub context: Context,
    pub pools: Pools,
    /// Copies to the device from the staging ring and from pinned memory. It never waits for a caller's stream.
    pub copy: OwnStream,
    pub ring: Mutex<Ring>,
    pub raw: Kernel,
    pub conditioned: Kernel,
    layout: Kernel,
    modules: Vec<Module>,
    multiprocessors: u32,
    scratch: Mutex<Option<Scratch>>,
    without_base: Mutex<Option<(Kernel, Vec<Module>)>>,
    frames: Mutex<Option<(Kernels, Vec<Module>)>>,
    first_call: FirstCall,
}

pub(super) struct Module(sys::CUmodule);

// SAFETY: modules may be used by any thread.
unsafe impl Send for Module {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Module {}

/// Scratch memory of a mode in place, see `kernels/README.md`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scratch {
    pub address: u64,
    pub slots: u32,
    pub slot_bytes: u32,
    /// How large it is.
    pub bytes: u64,
}

impl Scratch {
    /// Slots that chunks take while they are decoded. It has no address yet, like all that follow.
    fn new(slots: u32, slot_bytes: u32) -> Self {
        let bytes = layout::scratch_head(slots) + u64::from(slots) * u64::from(slot_bytes);
        Self { address: 0, slots, slot_bytes, bytes }
    }

    /// What keeps the changes of so many chunks, which take `changes` bytes, from one launch to the next, within `most` bytes; none
    /// if there are none, or no room.
    pub fn kept(chunks: u32, changes: u64, most: u64) -> Option<Self> {
        let slots = chunks + 1;
        let head = layout::scratch_head(slots);
        let bytes = changes.min(most.saturating_sub(head)).min(u32::MAX.into()) / LIST_STEP * LIST_STEP;
        (bytes > 0).then_some(Self { address: 0, slots, slot_bytes: bytes as u32, bytes: head + bytes })
    }

    /// What serves so many chunks that change, whose lists of changes take at most `changes` bytes each, within `most` bytes; none if
    /// there are none.
    pub fn planned(chunks: u32, changes: u64, multiprocessors: u32, most: u64) -> Option<Self> {
        let wanted = changes.min(SCRATCH_SLOT.into());
        let room = |slots: u32| (most.saturating_sub(layout::scratch_head(slots)) / u64::from(slots)) / LIST_STEP * LIST_STEP;
        let slots = [BLOCKS, BLOCKS_LEAST].map(|blocks| (blocks * multiprocessors).min(chunks)).into_iter();
        let slots = slots.filter(|slots| *slots > 0).collect::<Vec<_>>();
        let found = slots.iter().find(|slots| room(**slots) >= wanted).or(slots.last())?;
        let slot_bytes = room(*found).min(wanted) as u32;
        (slot_bytes > 0).then_some(Self::new(*found, slot_bytes))
    }

    /// The same at an address; its head is to be zeroed.
    pub fn at(self, address: u64) -> Self {
        Self { address, ..self }
    }
}

impl Device {
    /// Number of devices that the driver shows.
    ///
    /// # Errors
    /// [`Error::NoDevice`] without a driver that serves.
    pub fn count() -> Result<u32> {
        driver::count()
    }

    /// Opens a device, by its place among those that the driver shows. The caller's current context stays as it is.
    ///
    /// Cost: some tenths of a second in a process that has not used the device, see [`Device::first_call`].
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no driver, none recent enough, no such device, or one too old for the kernels;
    /// [`Error::Device`] if the driver refuses something else.
    pub fn open(ordinal: u32) -> Result<Self> {
        let start = Instant::now();
        let context = Context::open(ordinal)?;
        let cx = context.enter()?;
        let _relaxed = driver::Relaxed::new()?;
        let with_context = Instant::now();
        let mut modules = Vec::new();
        let mut kernel = |ptx, name: &str, threads, shared| load(&cx, &mut modules, ptx, name, threads, shared);
        let raw = kernel(RAW_PTX, "tpde_raw", layout::RAW_THREADS, layout::RAW_SHARED)?;
        let shared = layout::CONDITIONED_SHARED + layout::CONDITIONED_TABLES_MAX;
        let conditioned = kernel(CONDITIONED_PTX, "tpde_conditioned", layout::CONDITIONED_THREADS, shared)?;
        let layout = kernel(LAYOUT_PTX, "tpde_layout", 1, 0)?;
        let with_kernels = Instant::now();
        let multiprocessors = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let (pools, copy, ring) = (Pools::new(&cx)?, OwnStream::new(&cx)?, Ring::new(&cx)?);
        drop(cx);
        let first_call =
            FirstCall { context: with_context - start, kernels: with_kernels - with_context, memory: with_kernels.elapsed() };
        tracing::debug!(?first_call, "opened CUDA device {ordinal}");
        Ok(Self(Arc::new(Inner {
            context,
            pools,
            copy,
            ring: Mutex::new(ring),
            raw,
            conditioned,
            layout,
            modules,
            multiprocessors,
            scratch: Mutex::new(None),
            without_base: Mutex::new(None),
            frames: Mutex::new(None),
            first_call,
        })))
    }

    /// What opening took.
    pub fn first_call(&self) -> FirstCall {
        self.0.first_call
    }

    /// Name of the device, as the driver has it.
    pub fn name(&self) -> String {
        self.0.context.name()
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }

    /// Uploads what kernels need of an index: records, sums, tensors and tables. Once a pair; 52 bytes a chunk on the device and
    /// 32 on the host. The first index with chunks without a base has their kernel compiled, unless the driver's cache has it.
    ///
    /// The copies are queued behind each other and done when something that was prepared with the result runs.
    ///
    /// # Errors
    /// [`Error::Device`] if memory or the driver fails.
    pub fn upload(&self, index: &ValidatedIndex) -> Result<DeviceIndex> {
        DeviceIndex::new(self, index, None)
    }

    /// [`Device::upload`] to memory of the caller's: as much as [`DeviceIndex::bytes_of`] says, at a multiple of 256. What is
    /// queued on [`Device::copy_stream`] may use the memory at once, and nobody else does until the index is dropped and all
    /// work with it has passed.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the memory is too small or not aligned; [`Error::Device`] if the driver fails.
    pub fn upload_to(&self, index: &ValidatedIndex, memory: DeviceSlice) -> Result<DeviceIndex> {
        DeviceIndex::new(self, index, Some(memory))
    }

    /// Calls `work` on this thread, which may allocate meanwhile, for example, although a stream is being captured into a graph
    /// somewhere in the process: what it does is not the graph's.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the driver refuses.
    pub fn beside_captures<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let _relaxed = driver::Relaxed::new()?;
        Ok(work())
    }

    /// The driver's handle, a `CUstream`, of the stream that copies to the device run on, for those who give memory: what comes
    /// to be free in the order of this stream can be given at once.
    pub fn copy_stream(&self) -> *mut c_void {
        self.0.copy.raw().cast()
    }

    /// Memory of the device, with nothing in particular in it.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough.
    pub fn alloc(&self, bytes: u64) -> Result<DeviceSlice> {
        let cx = self.0.context.enter()?;
        Ok(DeviceSlice::owned(Allocation::new(&self.0, &cx, bytes)?, bytes))
    }

    /// Pinned memory of the host. Slow the first time; what is dropped is kept for the next who asks.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough.
    pub fn pinned(&self, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(&self.0, &self.0.context.enter()?, bytes)
    }

    /// A stream of our own, which waits for no other.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses.
    pub fn stream(&self) -> Result<Stream> {
        let cx = self.0.context.enter()?;
        Ok(Stream::new(self, OwnStream::new(&cx)?.raw(), true))
    }

    /// A caller's stream, that of torch for example. Null is the legacy default stream.
    ///
    /// # Safety
    /// It is a stream of this device's primary context, and is there while it is used through the result.
    pub unsafe fn borrow_stream(&self, raw: *mut c_void) -> Stream {
        Stream::new(self, raw.cast(), false)
    }

    /// Copies to the device, and waits until it is done.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the lengths differ, [`Error::Device`] if the driver fails.
    pub fn write(&self, to: &DeviceSlice, from: &[u8]) -> Result<()> {
        same_length(to, from.len())?;
        let cx = self.0.context.enter()?;
        // SAFETY: the slice is memory of the device by its making, as long as `from`, which stays until the copy is waited for,
        // also after an error.
        let queued = unsafe { memory::copy_in(&cx, to.address(), from.as_ptr(), from.len(), self.0.copy.raw()) };
        self.0.wait_for(&cx, self.0.copy.raw()).and(queued)
    }

    /// Copies from the device, and waits until it is done. What was queued on other streams must have passed.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the lengths differ, [`Error::Device`] if the driver fails.
    pub fn read(&self, from: &DeviceSlice, to: &mut [u8]) -> Result<()> {
        same_length(from, to.len())?;
        let cx = self.0.context.enter()?;
        // SAFETY: the slice is memory of the device by its making, as long as `to`, which stays until the copy is waited for, also
        // after an error.
        let queued = unsafe { memory::copy_out(&cx, to.as_mut_ptr(), from.address(), to.len(), self.0.copy.raw()) };
        self.0.wait_for(&cx, self.0.copy.raw()).and(queued)
    }

    /// What the kernel `tpde_layout` reports of the structs, for a test.
    #[doc(hidden)]
    pub fn layout_report(&self, words: usize) -> Result<Vec<u32>> {
        let mut report = vec![0; 4 * words];
        let slice = self.alloc(report.len() as u64)?;
        self.write(&slice, &report)?;
        let cx = self.0.context.enter()?;
        // SAFETY: the kernel takes an address of memory for its report, which is as long as its caller knows it to be.
        unsafe { self.0.layout.launch(&cx, self.0.copy.raw(), 1, &slice.address())? };
        self.read(&slice, &mut report)?;
        Ok(report.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

pub(super) fn same_length(slice: &DeviceSlice, bytes: usize) -> Result<()> {
    if slice.bytes() == bytes as u64 {
        return Ok(());
    }
    Err(Error::Misuse(format!("{bytes} bytes of the host and {} of the device", slice.bytes())))
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.context.ordinal())
    }
}

impl Inner {
    /// Waits, on the host, for the work that is queued on a stream of ours. After an error too, none of it is running.
    pub fn wait_for(&self, cx: &Entered<'_>, stream: RawStream) -> Result<()> {
        let event = RawEvent::new(cx, false);
        let waited = event.and_then(|event| event.record(cx, stream).and_then(|()| event.wait(cx)));
        waited.inspect_err(|_| driver::drain(cx, stream))
    }

    /// Keeps memory that the stream uses from being freed before the stream has passed this point. If the driver refuses, the host
    /// waits for the stream: also after an error the memory may be freed.
    pub fn hold_memory(&self, cx: &Entered<'_>, stream: RawStream) -> Result<()> {
        match RawEvent::new(cx, false) {
            Ok(event) => self.hold_memory_until(cx, &event, stream),
            Err(e) => {
                driver::drain(cx, stream);
                Err(e)
            }
        }
    }

    /// As [`Inner::hold_memory`], with an event that the caller keeps for the point.
    pub fn hold_memory_until(&self, cx: &Entered<'_>, event: &RawEvent, stream: RawStream) -> Result<()> {
        let held = event.record(cx, stream).and_then(|()| event.hold(cx, self.pools.reaper.raw()));
        held.inspect_err(|_| driver::drain(cx, stream))
    }

    /// A guard for queueing work on a stream that uses memory of this crate's: see [`Queueing`].
    pub fn queueing<'a>(&'a self, cx: &'a Entered<'a>, stream: RawStream) -> Queueing<'a> {
        Queueing { device: self, cx, stream, is_held: false }
    }

    /// The kernel for chunks without a base, compiled when it is first wanted.
    pub fn without_base(&self) -> Result<Kernel> {
        let mut without_base = self.without_base.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((kernel, _)) = &*without_base {
            return Ok(*kernel);
        }
        let _relaxed = driver::Relaxed::new()?;
        let cx = self.context.enter()?;
        let mut modules = Vec::new();
        let shared = layout::WITHOUT_BASE_SHARED + layout::CONDITIONED_TABLES_MAX;
        let kernel = load(&cx, &mut modules, WITHOUT_BASE_PTX, "tpde_without_base", layout::WITHOUT_BASE_THREADS, shared)?;
        *without_base = Some((kernel, modules));
        Ok(kernel)
    }

    /// The kernels of frames, compiled when they are first wanted.
    pub fn frames(&self) -> Result<Kernels> {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((kernels, _)) = &*frames {
            return Ok(*kernels);
        }
        let _relaxed = driver::Relaxed::new()?;
        let cx = self.context.enter()?;
        let mut modules = Vec::new();
        let mut kernel = |name| load(&cx, &mut modules, FRAMES_PTX, name, frames::THREADS, 0);
        let kernels = Kernels { check: kernel("tpde_frames_check")?, expand: kernel("tpde_frames_expand")? };
        *frames = Some((kernels, modules));
        Ok(kernels)
    }

    /// The scratch memory of [`InPlace::ChunkByChunk`](crate::delta::InPlace), made when it is first wanted: about 1 MiB a multiprocessor, whatever the tensors' size.
    pub fn scratch(&self, cx: &Entered<'_>) -> Result<Scratch> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(scratch) = *scratch {
            return Ok(scratch);
        }
        let planned = Scratch::new(BLOCKS * self.multiprocessors, SCRATCH_SLOT);
        let head = layout::scratch_head(planned.slots);
        let address = self.pools.allocate(cx, planned.bytes)?;
        // SAFETY: the head lies within what was just allocated, and is waited for before anyone uses it.
        unsafe { memory::fill(cx, address, 0, head as usize / 4, self.pools.alloc.raw())? };
        self.wait_for(cx, self.pools.alloc.raw())?;
        Ok(*scratch.insert(planned.at(address)))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Ok(cx) = self.context.enter() else { return };
        if let Some(scratch) = self.scratch.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            self.pools.free(scratch.address);
        }
        self.ring.get_mut().unwrap_or_else(PoisonError::into_inner).destroy(&cx);
        self.pools.destroy(&cx);
        self.copy.destroy(&cx);
        let frames = self.frames.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let without_base = self.without_base.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let (frames, without_base) =
            (frames.iter().flat_map(|(_, modules)| modules), without_base.iter().flat_map(|(_, modules)| modules));
        for module in self.modules.iter().chain(frames).chain(without_base) {
            // SAFETY: all work that uses its functions has passed: the pools have waited for the last use of memory.
            unsafe { calls::cuModuleUnload(module.0) };
        }
    }
}

/// Guard of work that is queued on a stream. On every exit path, memory is not freed before the stream has finished. Declared after
/// the memory, so that it is dropped first.
pub(super) struct Queueing<'a> {
    device: &'a Inner,
    cx: &'a Entered<'a>,
    stream: RawStream,
    is_held: bool,
}

impl Queueing<'_> {
    /// All is queued.
    pub fn end(mut self) -> Result<()> {
        self.is_held = true;
        self.device.hold_memory(self.cx, self.stream)
    }

    /// The same, with an event that the caller keeps for the point.
    pub fn end_with(mut self, event: &RawEvent) -> Result<()> {
        self.is_held = true;
        self.device.hold_memory_until(self.cx, event, self.stream)
    }
}

impl Drop for Queueing<'_> {
    fn drop(&mut self) {
        if !self.is_held {
            // The error that has led here is the one to report; this one leaves nothing under way either.
            _ = self.device.hold_memory(self.cx, self.stream);
        }
    }
}

/// Compiles a kernel for the device and makes it ready to be launched.
pub(super) fn load(_: &Entered<'_>, modules: &mut Vec<Module>, ptx: &str, name: &str, threads: u32, shared: u32) -> Result<Kernel> {
    let image = CString::new(ptx).map_err(|_| Error::Misuse("PTX with a NUL".into()))?;
    let mut log = [0u8; 2048];
    let mut options = [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(log.len() - 1)];
    let mut module = ptr::null_mut();
    // SAFETY: the image is a terminated text, the options and their values are as many as is told, and the log is as long.
    let code =
        unsafe { calls::cuModuleLoadDataEx(&mut module, image.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr()) };
    check(code, "compile the kernels for this device").map_err(|e| match (e, CStr::from_bytes_until_nul(&log)) {
        (Error::Device { doing, reason }, Ok(log)) => {
            Error::Device { doing, reason: format!("{reason} {}", log.to_string_lossy()).trim_end().to_owned() }
        }
        (e, _) => e,
    })?;
    modules.push(Module(module));
    let name = CString::new(name).map_err(|_| Error::Misuse("a kernel's name with a NUL".into()))?;
    let mut function = ptr::null_mut();
    // SAFETY: the module was just loaded, and the name is terminated.
    check(unsafe { calls::cuModuleGetFunction(&mut function, module, name.as_ptr()) }, "find a kernel")?;
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    if shared > 0 {
        // SAFETY: the function is the module's.
        check(unsafe { calls::cuFuncSetAttribute(function, attribute, shared as c_int) }, "give a kernel its shared memory")?;
    }
    let mut registers = 0;
    // Asking for this loads the function, which would else happen when it is first launched.
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
    // SAFETY: the function is the module's, and the place an int's.
    check(unsafe { calls::cuFuncGetAttribute(&mut registers, attribute, function) }, "load a kernel")?;
    Ok(Kernel { function, threads, shared })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_memory_is_within_its_bound() {
        assert!(Scratch::planned(0, 0, 132, 48 << 20).is_none());
        assert!(Scratch::planned(9, 256, 132, 100).is_none());
        for (chunks, changes, multiprocessors, most, slots, slot_bytes) in [
            // A slot for each chunk, no larger than its changes want it; then as many as blocks are in flight.
            (1, 256, 132, 48 << 20, 1, 256),
            (500, 10_240, 132, 48 << 20, 500, 10_240),
            (5000, 10_240, 132, 48 << 20, 528, 10_240),
            // No room for that: one for each block, as large as there is room for.
            (5000, 109_312, 132, 48 << 20, 396, 109_312),
            (5000, 4 << 20, 132, 48 << 20, 396, 126_976),
            (5000, 4 << 20, 8, 48 << 20, 32, 262_144),
        ] {
            let scratch = Scratch::planned(chunks, changes, multiprocessors, most).unwrap();
            assert_eq!((scratch.slots, scratch.slot_bytes), (slots, slot_bytes), "{chunks} chunks of {changes} bytes");
            assert!(scratch.bytes <= most && u64::from(scratch.slot_bytes).is_multiple_of(LIST_STEP));
        }
        assert!(Scratch::kept(9, 0, 48 << 20).is_none());
        assert!(Scratch::kept(9, 256, 300).is_none());
        for (chunks, changes, most, slot_bytes, bytes) in [
            (9, 256, 512, 256, 512),
            (1000, 1 << 20, 48 << 20, 1 << 20, (1 << 20) + 4096),
            (100, 1 << 40, 48 << 20, (48 << 20) - 512, 48 << 20),
        ] {
            let scratch = Scratch::kept(chunks, changes, most).unwrap();
            assert_eq!(
                (scratch.slots, scratch.slot_bytes, scratch.bytes),
                (chunks + 1, slot_bytes, bytes),
                "{chunks} chunks, {changes} bytes"
            );
        }
    }
}
