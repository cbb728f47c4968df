//! The staging ring: pinned slots, through which bytes of any source are copied to the device at the speed of the bus.

use super::calls;
use super::copies;
use super::driver::{self, EnterGuard, RawEvent, RawStream, check};
use cudarc::driver::sys;
use rayon::prelude::*;
use std::ptr::{self, NonNull};
use tpde_core::error::{Error, Result};

/// Number of slots. While a slot is copied, the next slots are filled.
const SLOTS: usize = 8;
/// Size of a slot, in bytes.
pub(crate) const SLOT_BYTES: usize = 2 << 20;
/// Minimum number of bytes for which several threads fill a slot.
const PARALLEL_BYTES: usize = 512 << 10;

/// A ring of slots. A slot is refilled when its last copy has completed. The copy stream waits for no other stream. So a wait for
/// a slot is a wait for the bus, never for a caller's stream.
#[derive(Debug)]
pub(crate) struct StagingRing {
    start: NonNull<u8>,
    /// One event per slot, recorded behind the last copy from the slot.
    events: Vec<RawEvent>,
    next: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for StagingRing {}

impl StagingRing {
    pub fn new(cx: &EnterGuard<'_>) -> Result<Self> {
        let mut start = ptr::null_mut();
        let action = "pin the staging ring";
        // SAFETY: `start` is valid for a pointer.
        check(unsafe { calls::cuMemHostAlloc(&mut start, SLOTS * SLOT_BYTES, sys::CU_MEMHOSTALLOC_PORTABLE) }, action)?;
        let start = NonNull::new(start.cast::<u8>());
        let start = start.ok_or_else(|| Error::Device { action, reason: "the driver returned a null pointer".into() })?;
        // SAFETY: new memory of this size; this initialises it.
        unsafe { start.write_bytes(0, SLOTS * SLOT_BYTES) };
        // An event that was never recorded counts as passed.
        let events = (0..SLOTS).map(|_| RawEvent::new(cx, false)).collect::<Result<_>>()?;
        Ok(Self { start, events, next: 0 })
    }

    /// Calls `fill` with `bytes` bytes of the next slot, and queues their copy to `to` on the copy stream.
    ///
    /// # Safety
    /// `to` is device memory of `bytes` bytes until the copy has completed.
    pub unsafe fn send(
        &mut self,
        cx: &EnterGuard<'_>,
        copy: RawStream,
        to: u64,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let at = self.next;
        self.next = (at + 1) % SLOTS;
        let event = &self.events[at];
        event.wait(cx)?;
        // SAFETY: within the ring, whose memory is initialised. The last copy from the slot has completed, and `self` is
        // borrowed.
        let slot = unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at * SLOT_BYTES), SLOT_BYTES) };
        let slot = &mut slot[..bytes];
        fill(slot)?;
        // SAFETY: the slot is not written before the event, recorded next, has completed. The rest is promised by the caller.
        let copied = unsafe { copies::copy_in(cx, to, slot.as_ptr(), bytes, copy) };
        // Also after an error, the copy may run. Without an event, the host waits for it. After that the slot is free.
        event.record(cx, copy).inspect_err(|_| driver::drain(cx, copy)).and(copied)
    }

    /// Queues the copy of `bytes` to `to`, slot by slot.
    ///
    /// # Safety
    /// As [`StagingRing::send`], for all of the bytes.
    pub unsafe fn send_bytes(&mut self, cx: &EnterGuard<'_>, copy: RawStream, to: u64, bytes: &[u8]) -> Result<()> {
        for (i, piece) in bytes.chunks(SLOT_BYTES).enumerate() {
            let fill = |slot: &mut [u8]| {
                slot.copy_from_slice(piece);
                Ok(())
            };
            // SAFETY: promised by the caller.
            unsafe { self.send(cx, copy, to + (i * SLOT_BYTES) as u64, piece.len(), fill)? };
        }
        Ok(())
    }

    /// Waits for the last copies, and frees the memory.
    pub fn destroy(&mut self, cx: &EnterGuard<'_>) {
        self.events.drain(..).for_each(|event| _ = event.wait(cx));
        // SAFETY: allocated in `new`. No copy reads it any more, and the owner is being dropped.
        unsafe { calls::cuMemFreeHost(self.start.as_ptr().cast()) };
    }
}

/// Fills a slot with `read(offset, part)`, on several threads if it is large.
pub(crate) fn fill_in_parallel(slot: &mut [u8], read: impl Fn(usize, &mut [u8]) -> Result<()> + Sync) -> Result<()> {
    if slot.len() < PARALLEL_BYTES || rayon::current_num_threads() == 1 {
        return read(0, slot);
    }
    let piece = (slot.len() / 8).next_multiple_of(4096);
    slot.par_chunks_mut(piece).enumerate().try_for_each(|(i, part)| read(i * piece, part))
}
