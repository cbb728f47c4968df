//! The staging ring: pinned slots, through which bytes of any source reach the device by copies of full speed.

use super::calls;
use super::copies;
use super::driver::{self, Entered, RawEvent, RawStream, check};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use rayon::prelude::*;
use std::ptr::{self, NonNull};

/// Slots of the ring: while one is copied, the next are filled.
const SLOTS: usize = 8;
/// Bytes of a slot.
pub(in crate::cuda) const SLOT_BYTES: usize = 2 << 20;
/// From here on several threads fill a slot.
const PARALLEL_BYTES: usize = 512 << 10;

/// Slots in turn. A slot is filled again when its last copy has passed, and copies are on a stream that waits for nobody: so
/// whoever waits here waits for the bus, never for a caller's stream.
#[derive(Debug)]
pub(in crate::cuda) struct Ring {
    start: NonNull<u8>,
    /// Of the last copy from each slot.
    events: Vec<RawEvent>,
    next: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for Ring {}

impl Ring {
    pub fn new(cx: &Entered<'_>) -> Result<Self> {
        let mut start = ptr::null_mut();
        let doing = "pin the staging ring";
        // SAFETY: `start` is a place for a pointer.
        check(unsafe { calls::cuMemHostAlloc(&mut start, SLOTS * SLOT_BYTES, sys::CU_MEMHOSTALLOC_PORTABLE) }, doing)?;
        let start = NonNull::new(start.cast::<u8>());
        let start = start.ok_or_else(|| Error::Device { doing, reason: "the driver gave none".into() })?;
        // SAFETY: fresh memory of this size; from here on all of it has a value.
        unsafe { start.write_bytes(0, SLOTS * SLOT_BYTES) };
        // An event that was never recorded counts as passed.
        let events = (0..SLOTS).map(|_| RawEvent::new(cx, false)).collect::<Result<_>>()?;
        Ok(Self { start, events, next: 0 })
    }

    /// Lets `fill` write the next slot, as many bytes of it as it says, and queues their copy to `to` on the copy stream.
    ///
    /// # Safety
    /// `to` is memory of the device for that many bytes until the copy stream has passed.
    pub unsafe fn send(
        &mut self,
        cx: &Entered<'_>,
        copy: RawStream,
        to: u64,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let at = self.next;
        self.next = (at + 1) % SLOTS;
        let event = &self.events[at];
        event.wait(cx)?;
        // SAFETY: within the ring, whose memory has values; the last copy from the slot has passed, and `self` is borrowed.
        let slot = unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at * SLOT_BYTES), SLOT_BYTES) };
        let slot = &mut slot[..bytes];
        fill(slot)?;
        // SAFETY: nobody writes the slot before the event, recorded next, has passed; the rest is promised by the caller.
        let copied = unsafe { copies::copy_in(cx, to, slot.as_ptr(), bytes, copy) };
        // Also after an error: what was queued may run. Without an event the slot is free once the host has waited.
        event.record(cx, copy).inspect_err(|_| driver::drain(cx, copy)).and(copied)
    }

    /// Queues the copy of `bytes` to `to`, slot by slot.
    ///
    /// # Safety
    /// As [`Ring::send`], for all of the bytes.
    pub unsafe fn send_bytes(&mut self, cx: &Entered<'_>, copy: RawStream, to: u64, bytes: &[u8]) -> Result<()> {
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

    /// Gives the memory back, once the last copies have passed.
    pub fn destroy(&mut self, cx: &Entered<'_>) {
        self.events.iter().for_each(|event| _ = event.wait(cx));
        // SAFETY: allocated in `new`; no copy reads it any more, and its owner is going.
        unsafe { calls::cuMemFreeHost(self.start.as_ptr().cast()) };
    }
}

/// Fills a slot from a function of the offset, by several threads where that pays.
pub(in crate::cuda) fn fill_in_parallel(slot: &mut [u8], read: impl Fn(usize, &mut [u8]) -> Result<()> + Sync) -> Result<()> {
    if slot.len() < PARALLEL_BYTES || rayon::current_num_threads() == 1 {
        return read(0, slot);
    }
    let piece = (slot.len() / 8).next_multiple_of(4096);
    slot.par_chunks_mut(piece).enumerate().try_for_each(|(i, part)| read(i * piece, part))
}
