//! State that all clones of a device share. It ensures that memory is not freed while a stream uses it.

use super::copies;
use super::driver::{self, Context, EnterGuard, OwnStream, RawEvent, RawStream};
use super::kernels::Kernels;
use super::pools::Pools;
use super::scratch::Scratch;
use super::staging::StagingRing;
use crate::abi;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use tpde_core::error::Result;

/// An opened device.
pub(crate) struct Inner {
    pub kernels: Kernels,
    pub pools: Pools,
    /// The copy stream: copies from the staging ring and from pinned memory. It never waits for a caller's stream.
    pub copy: OwnStream,
    pub ring: Mutex<StagingRing>,
    pub multiprocessors: u32,
    scratch: Mutex<Option<Scratch>>,
    /// Dropped last, because events of the others are destroyed in it.
    pub context: Context,
}

impl Inner {
    pub fn new(context: Context, kernels: Kernels, multiprocessors: u32) -> Result<Self> {
        let cx = context.enter()?;
        let (pools, copy, ring) = (Pools::new(&cx)?, OwnStream::new(&cx)?, StagingRing::new(&cx)?);
        drop(cx);
        Ok(Self { kernels, pools, copy, ring: Mutex::new(ring), multiprocessors, scratch: Mutex::default(), context })
    }

    /// Waits on the host for the work queued on a stream of this crate. Also after an error, none of this work is still running.
    pub fn wait_for(&self, cx: &EnterGuard<'_>, stream: RawStream) -> Result<()> {
        let event = RawEvent::new(cx, false);
        let waited = event.and_then(|event| event.record(cx, stream).and_then(|()| event.wait(cx)));
        waited.inspect_err(|_| driver::drain(cx, stream))
    }

    /// Makes the reaper wait for this point of the stream. Memory that the stream uses is not freed before this point. If the
    /// driver refuses, waits on the host. So the memory may be freed after an error too.
    pub fn hold_memory(&self, cx: &EnterGuard<'_>, stream: RawStream) -> Result<()> {
        match RawEvent::new(cx, false) {
            Ok(event) => self.hold_memory_until(cx, &event, stream),
            Err(e) => {
                driver::drain(cx, stream);
                Err(e)
            }
        }
    }

    /// As [`Inner::hold_memory`], with an event of the caller.
    pub fn hold_memory_until(&self, cx: &EnterGuard<'_>, event: &RawEvent, stream: RawStream) -> Result<()> {
        let held = event.record(cx, stream).and_then(|()| event.hold(cx, self.pools.reaper.raw()));
        held.inspect_err(|_| driver::drain(cx, stream))
    }

    /// Returns a guard for queueing work that uses memory of this crate, see [`Queueing`].
    pub fn queueing<'a>(&'a self, cx: &'a EnterGuard<'a>, stream: RawStream) -> Queueing<'a> {
        Queueing { device: self, cx, stream, is_held: false }
    }

    /// Returns the scratch memory for [`InPlace::ChunkByChunk`](tpde::InPlace). The first call allocates it: about 1 MiB per
    /// multiprocessor, independent of tensor sizes.
    pub fn scratch(&self, cx: &EnterGuard<'_>) -> Result<Scratch> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(scratch) = *scratch {
            return Ok(scratch);
        }
        let scratch_sizes = Scratch::of_device(self.multiprocessors);
        let head = abi::scratch_head(scratch_sizes.slots);
        let address = self.pools.allocate(cx, scratch_sizes.bytes)?;
        // SAFETY: the head is within the memory just allocated, and the fill is waited for before anyone uses it.
        unsafe { copies::fill(cx, address, 0, head as usize / 4, self.pools.alloc.raw())? };
        self.wait_for(cx, self.pools.alloc.raw())?;
        Ok(*scratch.insert(scratch_sizes.at(address)))
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.context.ordinal())
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
        // SAFETY: all launches have completed: the pools have waited for the last use of memory.
        unsafe { self.kernels.unload(&cx) };
    }
}

/// Guard while work is queued on a stream. On every exit path, memory is not freed before the stream has completed the work.
/// Declare the guard after the memory, because it must be dropped first.
pub(crate) struct Queueing<'a> {
    device: &'a Inner,
    cx: &'a EnterGuard<'a>,
    stream: RawStream,
    is_held: bool,
}

impl Queueing<'_> {
    /// Ends the queueing: the memory is held until this point of the stream.
    pub fn end(mut self) -> Result<()> {
        self.is_held = true;
        self.device.hold_memory(self.cx, self.stream)
    }

    /// As [`Queueing::end`], with an event of the caller.
    pub fn end_with(mut self, event: &RawEvent) -> Result<()> {
        self.is_held = true;
        self.device.hold_memory_until(self.cx, event, self.stream)
    }
}

impl Drop for Queueing<'_> {
    fn drop(&mut self) {
        if !self.is_held {
            // Another error is already being reported. Also if this call fails, no work is still running.
            _ = self.device.hold_memory(self.cx, self.stream);
        }
    }
}
