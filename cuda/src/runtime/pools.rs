//! Pools of memory, streams and events.
//!
//! No call here waits for work on a caller's stream. Device memory comes from a pool of the driver. It is freed in the order of
//! the *reaper*, a stream that waits for all users of the memory. Pinned memory is slow to allocate. So it is reused when the
//! reaper has passed its last use.

use super::calls;
use super::driver::{EnterGuard, OwnStream, RawEvent, RawStream, check};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};
use tpde_core::error::{Error, Result};

/// Capacities of pinned memory are powers of two up to this size in bytes, and multiples of it above.
const PINNED_STEP: usize = 64 << 20;
/// Maximum number of idle streams that are kept for reuse.
const STREAMS: usize = 32;
/// Maximum number of events that are kept for reuse.
const EVENTS: usize = 256;

/// The pools of a device.
#[derive(Debug)]
pub(crate) struct Pools {
    /// `None` if the device has no pools. Then each allocation calls the driver.
    pool: Option<Pool>,
    /// Stream with only allocations, which therefore complete at once.
    pub alloc: OwnStream,
    pub reaper: OwnStream,
    pinned: Mutex<Vec<Block>>,
    streams: Mutex<Vec<OwnStream>>,
    urgent_streams: Mutex<Vec<OwnStream>>,
    events: Mutex<Vec<Arc<RawEvent>>>,
}

#[derive(Debug)]
struct Pool(sys::CUmemoryPool);

// SAFETY: pools may be used by any thread.
unsafe impl Send for Pool {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Pool {}

/// A point of a stream. Its event is reused as soon as this is dropped: a wait is for what the event has recorded when the wait is
/// queued, not for what it records later.
#[derive(Debug)]
pub(crate) struct Mark<'a> {
    event: Arc<RawEvent>,
    pools: &'a Pools,
}

impl Mark<'_> {
    /// Makes later work of the stream wait for this point.
    pub fn hold(&self, cx: &EnterGuard<'_>, stream: RawStream) -> Result<()> {
        self.event.hold(cx, stream)
    }
}

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        self.pools.take_back_event(self.event.clone());
    }
}

/// Pinned memory for reuse. It is free when the event has completed.
#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    capacity: usize,
    free_after: Option<Arc<RawEvent>>,
}

// SAFETY: nothing else refers to the memory of a block.
unsafe impl Send for Block {}

impl Pools {
    pub fn new(cx: &EnterGuard<'_>) -> Result<Self> {
        let supported = cx.context().attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0;
        let pool = if supported { Some(make_pool(cx)?) } else { None };
        Ok(Self {
            pool,
            alloc: OwnStream::new(cx)?,
            reaper: OwnStream::new(cx)?,
            pinned: Mutex::default(),
            streams: Mutex::default(),
            urgent_streams: Mutex::default(),
            events: Mutex::default(),
        })
    }

    /// Returns an idle stream, or creates a stream, which is slow.
    pub fn stream(&self, cx: &EnterGuard<'_>) -> Result<OwnStream> {
        let kept = self.streams.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.map_or_else(|| OwnStream::new(cx), Ok)
    }

    /// Returns an idle stream of high priority, or creates one, which is slow.
    pub fn urgent_stream(&self, cx: &EnterGuard<'_>) -> Result<OwnStream> {
        let kept = self.urgent_streams.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.map_or_else(|| OwnStream::urgent(cx), Ok)
    }

    /// Records an event behind the work queued on a stream.
    pub fn mark(&self, cx: &EnterGuard<'_>, stream: RawStream) -> Result<Mark<'_>> {
        let mark = Mark { event: self.event(cx)?, pools: self };
        mark.event.record(cx, stream)?;
        Ok(mark)
    }

    /// Returns an event without timing, for one owner. Waits that were queued for its earlier records are not affected.
    fn event(&self, cx: &EnterGuard<'_>) -> Result<Arc<RawEvent>> {
        let kept = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.map_or_else(|| RawEvent::new(cx, false).map(Arc::new), Ok)
    }

    /// Keeps an event for reuse.
    fn take_back_event(&self, event: Arc<RawEvent>) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < EVENTS {
            events.push(event);
        }
    }

    /// Returns a stream to the pool.
    pub fn take_back(&self, cx: &EnterGuard<'_>, stream: OwnStream) {
        keep(&self.streams, cx, stream);
    }

    /// Returns a stream of high priority to the pool.
    pub fn take_back_urgent(&self, cx: &EnterGuard<'_>, stream: OwnStream) {
        keep(&self.urgent_streams, cx, stream);
    }

    pub fn allocate(&self, cx: &EnterGuard<'_>, bytes: u64) -> Result<u64> {
        let action = "allocate device memory";
        let bytes = usize::try_from(bytes.max(1)).map_err(|_| Error::InvalidArgument(format!("{bytes} bytes of device memory")))?;
        let mut address = 0;
        let Some(pool) = &self.pool else {
            // SAFETY: `address` is valid for an address.
            check(unsafe { calls::cuMemAlloc_v2(&mut address, bytes) }, action)?;
            return Ok(address);
        };
        // SAFETY: pool and stream are alive, and `address` is valid for an address.
        check(unsafe { calls::cuMemAllocFromPoolAsync(&mut address, bytes, pool.0, self.alloc.raw()) }, action)?;
        // Completes at once, because the stream has no other work. Then any stream may use the memory.
        let done = RawEvent::new(cx, false)?;
        done.record(cx, self.alloc.raw())?;
        done.wait(cx)?;
        Ok(address)
    }

    /// Frees memory in the order of the reaper.
    pub fn free(&self, address: u64) {
        // SAFETY: the address came from `allocate`, and its owner is gone. An error means that the context, and the memory with
        // it, is lost.
        unsafe {
            if self.pool.is_some() {
                calls::cuMemFreeAsync(address, self.reaper.raw());
            } else {
                calls::cuStreamSynchronize(self.reaper.raw());
                calls::cuMemFree_v2(address);
            }
        }
    }

    pub fn pin(&self, cx: &EnterGuard<'_>, bytes: usize) -> Result<(NonNull<u8>, usize)> {
        let capacity = match bytes {
            ..=PINNED_STEP => Some(bytes.max(4096).next_power_of_two()),
            _ => bytes.checked_next_multiple_of(PINNED_STEP),
        };
        let capacity = capacity.ok_or_else(|| Error::InvalidArgument(format!("{bytes} bytes of pinned memory")))?;
        {
            let mut blocks = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
            let free = |block: &Block| match &block.free_after {
                Some(event) => event.is_passed(cx).unwrap_or(false),
                None => true,
            };
            if let Some(at) = blocks.iter().position(|block| block.capacity == capacity && free(block)) {
                let Block { start, free_after, .. } = blocks.swap_remove(at);
                free_after.into_iter().for_each(|event| self.take_back_event(event));
                return Ok((start, capacity));
            }
        }
        let mut start: *mut c_void = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `start` is valid for a pointer.
        check(unsafe { calls::cuMemHostAlloc(&mut start, capacity, flags) }, "pin host memory")?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| Error::Device { action: "pin host memory", reason: "the driver returned a null pointer".into() })?;
        // SAFETY: new memory of `capacity` bytes; this initialises it.
        unsafe { start.write_bytes(0, capacity) };
        Ok((start, capacity))
    }

    pub fn unpin(&self, cx: Option<&EnterGuard<'_>>, start: NonNull<u8>, capacity: usize) {
        let Some(cx) = cx else { return }; // the context is lost
        let event = self.event(cx).and_then(|event| event.record(cx, self.reaper.raw()).map(|()| event));
        // Without an event the end of its last use is unknown: leak the memory.
        if let Ok(event) = event {
            let block = Block { start, capacity, free_after: Some(event) };
            self.pinned.lock().unwrap_or_else(PoisonError::into_inner).push(block);
        }
    }

    /// Frees everything, after waiting for the reaper.
    pub fn destroy(&mut self, cx: &EnterGuard<'_>) {
        // SAFETY: the device is being dropped, so there are no other users; the reaper has waited for their last uses.
        unsafe {
            calls::cuStreamSynchronize(self.reaper.raw());
            for block in self.pinned.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
                calls::cuMemFreeHost(block.start.as_ptr().cast());
            }
            if let Some(pool) = self.pool.take() {
                calls::cuMemPoolDestroy(pool.0);
            }
        }
        self.events.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        for streams in [&mut self.streams, &mut self.urgent_streams] {
            streams.get_mut().unwrap_or_else(PoisonError::into_inner).iter_mut().for_each(|stream| stream.destroy(cx));
        }
        self.alloc.destroy(cx);
        self.reaper.destroy(cx);
    }
}

fn keep(streams: &Mutex<Vec<OwnStream>>, cx: &EnterGuard<'_>, mut stream: OwnStream) {
    let is_idle = stream.is_idle(cx);
    let mut streams = streams.lock().unwrap_or_else(PoisonError::into_inner);
    if is_idle && streams.len() < STREAMS { streams.push(stream) } else { stream.destroy(cx) }
}

fn make_pool(cx: &EnterGuard<'_>) -> Result<Pool> {
    let mut pool = ptr::null_mut();
    // SAFETY: all zeros is a value of this struct of integers and pointers: no handle type, no limit.
    let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = cx.context().ordinal();
    // SAFETY: both pointers are valid.
    check(unsafe { calls::cuMemPoolCreate(&mut pool, &properties) }, "create a memory pool")?;
    let pool = Pool(pool);
    let mut keep = u64::MAX;
    let mut off = 0i32;
    let set = |which, value: *mut c_void| {
        // SAFETY: the pool is alive, and the value has the type of the attribute.
        check(unsafe { calls::cuMemPoolSetAttribute(pool.0, which, value) }, "set up a memory pool")
    };
    use sys::CUmemPool_attribute as Attribute;
    // The pool keeps memory between applications. It must not reuse memory in a way that makes one stream wait for another.
    set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, ptr::from_mut(&mut keep).cast())?;
    set(Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, ptr::from_mut(&mut off).cast())?;
    Ok(pool)
}
