//! Streams and events, as the interface shows them.

use super::calls;
use super::device::{Device, same_length};
use super::driver::{RawEvent, RawStream};
use super::memory::{self, DeviceSlice, PinnedBuffer};
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::sync::Arc;

/// A queue of work on a device: ours or a caller's.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    raw: RawStream,
    owned: bool,
}

// SAFETY: streams may be used by any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(device: &Device, raw: RawStream, owned: bool) -> Self {
        Self { device: device.clone(), raw, owned }
    }

    pub(super) fn raw(&self) -> RawStream {
        self.raw
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle, a `CUstream`.
    pub fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// A point behind all that is queued now, for taking times.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses.
    pub fn record(&self) -> Result<Event> {
        let cx = self.device.0.context.enter()?;
        let event = RawEvent::new(&cx, true)?;
        event.record(&cx, self.raw)?;
        Ok(Event { device: self.device.clone(), raw: event })
    }

    /// Queues a copy from one place of the device to another.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the lengths differ, [`Error::Device`] if the driver refuses.
    pub fn copy(&self, to: &DeviceSlice, from: &DeviceSlice) -> Result<()> {
        if to.bytes() != from.bytes() {
            return Err(Error::Misuse(format!("a copy of {} bytes to {}", from.bytes(), to.bytes())));
        }
        let cx = self.device.0.context.enter()?;
        // SAFETY: both are memory of the device by their making, and their memory is held until the stream has passed.
        unsafe { memory::copy_within(&cx, to.address(), from.address(), to.bytes(), self.raw)? };
        self.device.0.hold_memory(&cx, self.raw)
    }

    /// Queues the writing of a byte to all of some memory.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses.
    pub fn fill(&self, to: &DeviceSlice, byte: u8) -> Result<()> {
        let cx = self.device.0.context.enter()?;
        // SAFETY: memory of the device by its making, held until the stream has passed.
        unsafe { memory::fill_bytes(&cx, to.address(), byte, to.bytes(), self.raw)? };
        self.device.0.hold_memory(&cx, self.raw)
    }

    /// Queues a copy from pinned memory.
    ///
    /// # Errors
    /// As [`Stream::copy`].
    pub fn copy_in(&self, to: &DeviceSlice, from: &Arc<PinnedBuffer>) -> Result<()> {
        same_length(to, from.len())?;
        let cx = self.device.0.context.enter()?;
        // SAFETY: the slice is memory of the device by its making; both are held until the stream has passed, since pinned
        // memory goes back by the reaper. A caller who changes the bytes meanwhile gets a mixture of them on the device.
        unsafe { memory::copy_in(&cx, to.address(), from.as_ptr(), from.len(), self.raw)? };
        self.device.0.hold_memory(&cx, self.raw)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let (true, Ok(_cx)) = (self.owned, self.device.0.context.enter()) {
            // SAFETY: made by us, and nobody else has it; what is queued on it still runs.
            unsafe { calls::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A point in a stream, with the time when it was passed.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: RawEvent,
}

impl Event {
    /// Waits until the point is passed.
    ///
    /// # Errors
    /// [`Error::Device`] if something before it failed.
    pub fn wait(&self) -> Result<()> {
        self.raw.wait(&self.device.0.context.enter()?)
    }

    /// Whether the point is passed.
    ///
    /// # Errors
    /// [`Error::Device`] if something before it failed.
    pub fn is_passed(&self) -> Result<bool> {
        self.raw.is_passed(&self.device.0.context.enter()?)
    }

    /// Seconds on the device from `start` to this point, both passed.
    ///
    /// # Errors
    /// [`Error::Device`] if one of them is not.
    pub fn since(&self, start: &Event) -> Result<f64> {
        Ok(f64::from(self.raw.since(&self.device.0.context.enter()?, &start.raw)?) / 1e3)
    }
}
