//! Memory of the device and pinned memory of the host.
//!
//! No call here waits for work on a caller's stream. Device memory comes from a pool of the driver and goes back to it in the
//! order of a stream of its own, the *reaper*, which waits for whatever used the memory. Pinned memory is kept for the next who
//! asks, once the reaper has passed its last use: asking the driver for it is slow.

use super::calls;
use super::device::{Device, Inner};
use super::driver::{Entered, OwnStream, RawEvent, RawStream, check};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of memory that kernels work in.
pub(super) const MEMORY_ALIGN: u64 = 256;
/// Pinned memory is asked for in powers of two up to this, and in multiples of it.
const PINNED_STEP: usize = 64 << 20;
/// Most streams that are kept for the next who asks.
const STREAMS: usize = 32;

/// Where a device's memory comes from.
#[derive(Debug)]
pub(super) struct Pools {
    /// None where the driver has no pools: then memory is asked for piece by piece.
    pool: Option<Pool>,
    /// Nothing but allocations is queued here, so that they are done at once.
    pub alloc: OwnStream,
    pub reaper: OwnStream,
    pinned: Mutex<Vec<Block>>,
    streams: Mutex<Vec<OwnStream>>,
}

#[derive(Debug)]
struct Pool(sys::CUmemoryPool);

// SAFETY: pools may be used by any thread.
unsafe impl Send for Pool {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Pool {}

/// Pinned memory that nobody has, or will have once the event is passed.
#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    capacity: usize,
    free_after: Option<RawEvent>,
}

// SAFETY: a block is memory that nobody refers to.
unsafe impl Send for Block {}

impl Pools {
    pub fn new(cx: &Entered<'_>) -> Result<Self> {
        let supported = cx.context().attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0;
        let pool = if supported { Some(make_pool(cx)?) } else { None };
        Ok(Self {
            pool,
            alloc: OwnStream::new(cx)?,
            reaper: OwnStream::new(cx)?,
            pinned: Mutex::default(),
            streams: Mutex::default(),
        })
    }

    /// A stream that nothing is queued on: making one is slow.
    pub fn stream(&self, cx: &Entered<'_>) -> Result<OwnStream> {
        let kept = self.streams.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.map_or_else(|| OwnStream::new(cx), Ok)
    }

    /// Takes a stream back.
    pub fn take_back(&self, cx: &Entered<'_>, mut stream: OwnStream) {
        let is_idle = stream.is_idle(cx);
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if is_idle && streams.len() < STREAMS { streams.push(stream) } else { stream.destroy(cx) }
    }

    pub fn allocate(&self, cx: &Entered<'_>, bytes: u64) -> Result<u64> {
        let doing = "allocate memory of the device";
        let bytes = usize::try_from(bytes.max(1)).map_err(|_| Error::Misuse(format!("{bytes} bytes of device memory")))?;
        let mut address = 0;
        let Some(pool) = &self.pool else {
            // SAFETY: `address` is a place for an address.
            check(unsafe { calls::cuMemAlloc_v2(&mut address, bytes) }, doing)?;
            return Ok(address);
        };
        // SAFETY: pool and stream are alive, and `address` is a place for an address.
        check(unsafe { calls::cuMemAllocFromPoolAsync(&mut address, bytes, pool.0, self.alloc.raw()) }, doing)?;
        // Passed at once, since the stream holds nothing else; then any stream may use the memory.
        let done = RawEvent::new(cx, false)?;
        done.record(cx, self.alloc.raw())?;
        done.wait(cx)?;
        Ok(address)
    }

    /// Frees in the order of the reaper.
    pub fn free(&self, address: u64) {
        // SAFETY: the address came from `allocate`, and its owner is gone. An error means that the context is lost, and the
        // memory with it.
        unsafe {
            if self.pool.is_some() {
                calls::cuMemFreeAsync(address, self.reaper.raw());
            } else {
                calls::cuStreamSynchronize(self.reaper.raw());
                calls::cuMemFree_v2(address);
            }
        }
    }

    fn pin(&self, cx: &Entered<'_>, bytes: usize) -> Result<(NonNull<u8>, usize)> {
        let capacity = match bytes {
            ..=PINNED_STEP => Some(bytes.max(4096).next_power_of_two()),
            _ => bytes.checked_next_multiple_of(PINNED_STEP),
        };
        let capacity = capacity.ok_or_else(|| Error::Misuse(format!("{bytes} bytes of pinned memory")))?;
        {
            let mut blocks = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
            let free = |block: &Block| match &block.free_after {
                Some(event) => event.is_passed(cx).unwrap_or(false),
                None => true,
            };
            if let Some(at) = blocks.iter().position(|block| block.capacity == capacity && free(block)) {
                return Ok((blocks.swap_remove(at).start, capacity));
            }
        }
        let mut start: *mut c_void = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `start` is a place for a pointer.
        check(unsafe { calls::cuMemHostAlloc(&mut start, capacity, flags) }, "pin memory of the host")?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| Error::Device { doing: "pin memory of the host", reason: "the driver gave none".into() })?;
        // SAFETY: fresh memory of `capacity` bytes; from here on all of it has a value.
        unsafe { start.write_bytes(0, capacity) };
        Ok((start, capacity))
    }

    fn unpin(&self, cx: Option<&Entered<'_>>, start: NonNull<u8>, capacity: usize) {
        let Some(cx) = cx else { return }; // the context is lost
        let event = RawEvent::new(cx, false).and_then(|event| event.record(cx, self.reaper.raw()).map(|()| event));
        // Without an event nobody knows when the memory is free: it is given up.
        if let Ok(event) = event {
            let block = Block { start, capacity, free_after: Some(event) };
            self.pinned.lock().unwrap_or_else(PoisonError::into_inner).push(block);
        }
    }

    /// Gives everything back. Waits for what is still queued on the reaper.
    pub fn destroy(&mut self, cx: &Entered<'_>) {
        // SAFETY: the device is going, and with it everyone who could use these; the reaper has waited for their last uses.
        unsafe {
            calls::cuStreamSynchronize(self.reaper.raw());
            for block in self.pinned.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
                calls::cuMemFreeHost(block.start.as_ptr().cast());
            }
            if let Some(pool) = self.pool.take() {
                calls::cuMemPoolDestroy(pool.0);
            }
        }
        self.streams.get_mut().unwrap_or_else(PoisonError::into_inner).iter_mut().for_each(|stream| stream.destroy(cx));
        self.alloc.destroy(cx);
        self.reaper.destroy(cx);
    }
}

fn make_pool(cx: &Entered<'_>) -> Result<Pool> {
    let mut pool = ptr::null_mut();
    // SAFETY: all zeros is a value of this struct of integers and pointers: no handle type, no limit.
    let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = cx.context().ordinal();
    // SAFETY: places for a pool and its properties.
    check(unsafe { calls::cuMemPoolCreate(&mut pool, &properties) }, "make a pool of memory")?;
    let pool = Pool(pool);
    let mut keep = u64::MAX;
    let mut off = 0i32;
    let set = |which, value: *mut c_void| {
        // SAFETY: the pool is alive, and the value has the type that the attribute has.
        check(unsafe { calls::cuMemPoolSetAttribute(pool.0, which, value) }, "set up a pool of memory")
    };
    use sys::CUmemPool_attribute as Attribute;
    // Memory is not given back and asked for anew between applications, and never waits for a stream that still uses it.
    set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, ptr::from_mut(&mut keep).cast())?;
    set(Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, ptr::from_mut(&mut off).cast())?;
    Ok(pool)
}

/// Memory of the device, freed once everything has passed that was told to use it.
pub(super) struct Allocation {
    device: Arc<Inner>,
    address: u64,
}

impl Allocation {
    pub fn new(device: &Arc<Inner>, cx: &Entered<'_>, bytes: u64) -> Result<Self> {
        Ok(Self { device: device.clone(), address: device.pools.allocate(cx, bytes)? })
    }

    pub fn address(&self) -> u64 {
        self.address
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Allocation({:#x})", self.address)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Ok(_cx) = self.device.context.enter() {
            self.device.pools.free(self.address);
        }
    }
}

/// A run of device memory: a part of what this crate has allocated, which it keeps, or a caller's.
#[derive(Debug, Clone)]
pub struct DeviceSlice {
    address: u64,
    bytes: u64,
    keep: Option<Arc<Allocation>>,
}

impl DeviceSlice {
    /// A caller's memory, a tensor of another library for example.
    ///
    /// # Safety
    /// `bytes` bytes from `address` on are memory of the device (or memory of the host that the device sees at this address)
    /// until all work that was queued with this slice has passed.
    pub unsafe fn from_raw(address: u64, bytes: u64) -> Self {
        Self { address, bytes, keep: None }
    }

    pub(super) fn owned(allocation: Allocation, bytes: u64) -> Self {
        Self { address: allocation.address(), bytes, keep: Some(Arc::new(allocation)) }
    }

    /// First byte, as the device sees it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it does not lie within.
    pub fn slice(&self, offset: u64, bytes: u64) -> Result<Self> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(Self { address: self.address + offset, bytes, keep: self.keep.clone() }),
            _ => Err(Error::Misuse(format!("{bytes} bytes from {offset} on do not lie in {} of device memory", self.bytes))),
        }
    }

    /// Checks that work on this device may use the memory. Another [`Device`] frees its memory without waiting for this one.
    pub(super) fn check_device(&self, device: &Device) -> Result<()> {
        match &self.keep {
            Some(allocation) => same_device(&allocation.device, device),
            None => Ok(()),
        }
    }

    /// The first `bytes` of a caller's memory, if it is large enough, aligned, and memory of this device.
    pub(super) fn room_for(&self, bytes: u64, device: &Device) -> Result<Self> {
        self.check_device(device)?;
        if !self.address.is_multiple_of(MEMORY_ALIGN) || self.bytes < bytes {
            let (found, at) = (self.bytes, self.address);
            return Err(Error::Misuse(format!(
                "{found} bytes of device memory at {at:#x} for {bytes} at a multiple of {MEMORY_ALIGN}"
            )));
        }
        self.slice(0, bytes)
    }

    pub(super) fn end(&self) -> Result<u64> {
        let end = self.address.checked_add(self.bytes);
        end.ok_or_else(|| Error::Misuse(format!("{} bytes at {:#x} of device memory", self.bytes, self.address)))
    }
}

/// Pinned memory of the host: the device copies from and to it without a detour, and reads it itself.
pub struct PinnedBuffer {
    device: Arc<Inner>,
    start: NonNull<u8>,
    bytes: usize,
    capacity: usize,
}

// SAFETY: it owns its memory, like a Vec.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    pub(super) fn new(device: &Arc<Inner>, cx: &Entered<'_>, bytes: usize) -> Result<Self> {
        let (start, capacity) = device.pools.pin(cx, bytes)?;
        Ok(Self { device: device.clone(), start, bytes, capacity })
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// As [`DeviceSlice::check_device`].
    pub(super) fn check_device(&self, device: &Device) -> Result<()> {
        same_device(&self.device, device)
    }

    /// A word that the device may be writing.
    pub(super) fn word(&self, at: usize) -> u32 {
        assert!(4 * at + 4 <= self.bytes);
        // SAFETY: in bounds, and aligned because the memory is to pages.
        unsafe { self.start.cast::<u32>().add(at).read_volatile() }
    }
}

impl std::ops::Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: our memory, all of it with a value since it was pinned; the device writes it only where `word` is used, or
        // before the caller has waited.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl std::ops::DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; what the device still reads is held in an `Arc`, of which nobody has a mutable reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer({} bytes)", self.bytes)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let cx = self.device.context.enter();
        self.device.pools.unpin(cx.as_ref().ok(), self.start, self.capacity);
    }
}

fn same_device(owner: &Arc<Inner>, device: &Device) -> Result<()> {
    if Arc::ptr_eq(owner, &device.0) {
        return Ok(());
    }
    Err(Error::Misuse("memory of one device is given to another, or to the same one opened twice".into()))
}

/// Queues a copy from the host.
///
/// # Safety
/// `from` stays as it is, and `to` is memory of the device, until the copy has passed. Of pageable memory the driver makes a
/// copy first.
pub(super) unsafe fn copy_in(_: &Entered<'_>, to: u64, from: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream) }, "copy to the device")
}

/// Queues a copy to the host.
///
/// # Safety
/// `to` is memory of the host that nobody else uses, and `from` memory of the device, until the copy has passed.
pub(super) unsafe fn copy_out(_: &Entered<'_>, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream) }, "copy from the device")
}

/// Queues a copy within the device.
///
/// # Safety
/// Both are memory of the device until the copy has passed, and do not overlap.
pub(super) unsafe fn copy_within(_: &Entered<'_>, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream) }, "copy within the device")
}

/// Queues the writing of one word `count` times.
///
/// # Safety
/// `to` is memory of the device for as many words until this has passed.
pub(super) unsafe fn fill(_: &Entered<'_>, to: u64, word: u32, count: usize, stream: RawStream) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemsetD32Async(to, word, count, stream) }, "fill memory of the device")
}

/// Queues the writing of one byte `count` times.
///
/// # Safety
/// `to` is memory of the device for as many bytes until this has passed.
pub(super) unsafe fn fill_bytes(_: &Entered<'_>, to: u64, byte: u8, count: u64, stream: RawStream) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemsetD8Async(to, byte, count as usize, stream) }, "fill memory of the device")
}
