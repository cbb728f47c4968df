//! The public types for streams and events.

use super::calls;
use super::copies;
use super::driver::{self, EnterGuard, RawEvent, RawStream};
use super::graph::{self, Graph};
use super::inner::Inner;
use super::memory::{DeviceSlice, PinnedBuffer, same_length};
use std::ffi::c_void;
use std::sync::Arc;
use tpde_core::error::{Error, Result};

/// A stream: a queue of work on a device. It belongs to this crate or to the caller.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Inner>,
    raw: RawStream,
    owned: bool,
}

// SAFETY: streams may be used by any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(device: &Arc<Inner>, raw: RawStream, owned: bool) -> Self {
        Self { device: device.clone(), raw, owned }
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.raw
    }

    pub(crate) fn device(&self) -> &Arc<Inner> {
        &self.device
    }

    /// Returns the driver's handle, a `CUstream`.
    pub fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Records a timed event behind all work queued so far.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses.
    pub fn record(&self) -> Result<Event> {
        let cx = self.device.context.enter()?;
        let event = RawEvent::new(&cx, true)?;
        event.record(&cx, self.raw)?;
        Ok(Event { device: self.device.clone(), raw: event })
    }

    /// Queues a copy within the device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the lengths differ, the ranges overlap, the memory is on another device, or the stream is
    /// being captured into a graph; [`Error::Device`] if the driver refuses.
    pub fn copy(&self, to: &DeviceSlice, from: &DeviceSlice) -> Result<()> {
        check_copy(to, from)?;
        let cx = self.begin(&[to, from])?;
        let queueing = self.device.queueing(&cx, self.raw);
        // SAFETY: both are device memory, do not overlap, and are held until the stream has completed, also after an error.
        unsafe { copies::copy_within(&cx, to.address(), from.address(), to.bytes(), self.raw)? };
        queueing.end()
    }

    /// Queues a fill of memory with a byte.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the memory is on another device, or the stream is being captured into a graph;
    /// [`Error::Device`] if the driver refuses.
    pub fn fill(&self, to: &DeviceSlice, byte: u8) -> Result<()> {
        let cx = self.begin(&[to])?;
        let queueing = self.device.queueing(&cx, self.raw);
        // SAFETY: device memory, held until the stream has completed, also after an error.
        unsafe { copies::fill_bytes(&cx, to.address(), byte, to.bytes(), self.raw)? };
        queueing.end()
    }

    /// Queues a copy from pinned memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the lengths differ, the memory is on another device, or the stream is being captured into a
    /// graph; [`Error::Device`] if the driver refuses.
    pub fn copy_in(&self, to: &DeviceSlice, from: &Arc<PinnedBuffer>) -> Result<()> {
        same_length(to, from.len())?;
        from.check_device(&self.device)?;
        let cx = self.begin(&[to])?;
        let queueing = self.device.queueing(&cx, self.raw);
        // SAFETY: the slice is device memory. Both sides are held until the stream has completed, also after an error, because
        // the reaper frees pinned memory. If the caller changes the bytes meanwhile, the copy has old and new bytes.
        unsafe { copies::copy_in(&cx, to.address(), from.as_ptr(), from.len(), self.raw)? };
        queueing.end()
    }

    /// Returns the id of the capture of the stream, or `None` if the stream is not being captured. Ids are unique in the process.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses, or if the capture was invalidated.
    pub fn capture_id(&self) -> Result<Option<u64>> {
        graph::capture_id(&self.device.context.enter()?, self.raw)
    }

    /// Returns the graph that the stream is being captured into.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the stream is not being captured; [`Error::Device`] if the driver refuses.
    pub fn captured_graph(&self) -> Result<Graph> {
        Graph::of_capture(&self.device.context.enter()?, self.raw)
    }

    /// Checks the memory and makes the context current.
    fn begin(&self, memory: &[&DeviceSlice]) -> Result<EnterGuard<'_>> {
        memory.iter().try_for_each(|slice| slice.check_device(&self.device))?;
        let cx = self.device.context.enter()?;
        // A graph could run after the memory is freed. And the reaper must not become part of the graph.
        if driver::is_capturing(&cx, self.raw)? {
            return Err(Error::InvalidArgument("the stream is being captured into a graph, which cannot hold the memory".into()));
        }
        Ok(cx)
    }
}

/// Checks a copy within the device. The driver leaves the result of overlapping copies undefined.
fn check_copy(to: &DeviceSlice, from: &DeviceSlice) -> Result<()> {
    if to.bytes() != from.bytes() {
        return Err(Error::InvalidArgument(format!(
            "a copy from {} bytes to {} bytes: the lengths differ",
            from.bytes(),
            to.bytes()
        )));
    }
    let (to_end, from_end) = (to.end()?, from.end()?);
    if to.bytes() > 0 && to.address() < from_end && from.address() < to_end {
        let (bytes, to, from) = (to.bytes(), to.address(), from.address());
        return Err(Error::InvalidArgument(format!("a copy of {bytes} bytes from {from:#x} to {to:#x}, which overlap")));
    }
    Ok(())
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let (true, Ok(_cx)) = (self.owned, self.device.context.enter()) {
            // SAFETY: created by this crate, without other users. Queued work still runs.
            unsafe { calls::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A timed event in a stream.
#[derive(Debug)]
pub struct Event {
    device: Arc<Inner>,
    raw: RawEvent,
}

impl Event {
    /// Waits on the host until the event has completed.
    ///
    /// # Errors
    /// [`Error::Device`] if work before the event failed.
    pub fn wait(&self) -> Result<()> {
        self.raw.wait(&self.device.context.enter()?)
    }

    /// Returns whether the event has completed.
    ///
    /// # Errors
    /// [`Error::Device`] if work before the event failed.
    pub fn is_passed(&self) -> Result<bool> {
        self.raw.is_passed(&self.device.context.enter()?)
    }

    /// Returns the seconds on the device from `start` to this event. Both events must have completed.
    ///
    /// # Errors
    /// [`Error::Device`] if an event has not completed.
    pub fn since(&self, start: &Event) -> Result<f64> {
        Ok(f64::from(self.raw.since(&self.device.context.enter()?, &start.raw)?) / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_onto_itself_in_part_is_refused() {
        // SAFETY: nothing is done with the memory.
        let slice = |address, bytes| unsafe { DeviceSlice::from_raw(address, bytes) };
        for (to, from) in [(1000, 1099), (1099, 1000), (1000, 1000), (1000, 1001)] {
            let refused = check_copy(&slice(to, 100), &slice(from, 100));
            assert!(matches!(&refused, Err(Error::InvalidArgument(why)) if why.contains("overlap")), "{to} {from}: {refused:?}");
        }
        for (to, from) in [(1000, 1100), (1100, 1000)] {
            check_copy(&slice(to, 100), &slice(from, 100)).unwrap();
        }
        check_copy(&slice(1000, 0), &slice(1000, 0)).unwrap();
        assert!(matches!(check_copy(&slice(1000, 100), &slice(2000, 99)), Err(Error::InvalidArgument(_))));
        assert!(matches!(check_copy(&slice(u64::MAX - 9, 100), &slice(1000, 100)), Err(Error::InvalidArgument(_))));
    }
}
