//! A device: what is asked of it, and memory, streams and copies.

use super::copies;
use super::driver::{self, Context, OwnStream};
use super::inner::Inner;
use super::kernels::Kernels;
use super::memory::{Allocation, DeviceSlice, PinnedBuffer, same_length};
use super::stream::Stream;
use crate::error::Result;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
pub struct Device {
    pub(in crate::cuda) inner: Arc<Inner>,
    first_call: FirstCall,
}

impl Device {
    /// Number of devices that the driver shows.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) without a driver that serves.
    pub fn count() -> Result<u32> {
        driver::count()
    }

    /// Opens a device, by its place among those that the driver shows. The caller's current context stays as it is.
    ///
    /// Cost: some tenths of a second in a process that has not used the device, see [`Device::first_call`].
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) if there is no driver, none recent enough, no such device, or one too old for the
    /// kernels;
    /// [`Error::Device`](crate::Error::Device) if the driver refuses something else.
    pub fn open(ordinal: u32) -> Result<Self> {
        let start = Instant::now();
        let context = Context::open(ordinal)?;
        let cx = context.enter()?;
        let _relaxed = driver::Relaxed::new()?;
        let with_context = Instant::now();
        let kernels = Kernels::load(&cx)?;
        let with_kernels = Instant::now();
        let multiprocessors = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        drop(cx);
        let inner = Arc::new(Inner::new(context, kernels, multiprocessors)?);
        let first_call =
            FirstCall { context: with_context - start, kernels: with_kernels - with_context, memory: with_kernels.elapsed() };
        tracing::debug!(?first_call, "opened CUDA device {ordinal}");
        Ok(Self { inner, first_call })
    }

    /// What opening took.
    pub fn first_call(&self) -> FirstCall {
        self.first_call
    }

    /// Name of the device, as the driver has it.
    pub fn name(&self) -> String {
        self.inner.context.name()
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.inner.multiprocessors
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
        self.inner.copy.raw().cast()
    }

    /// Memory of the device, with nothing in particular in it.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if there is not enough.
    pub fn alloc(&self, bytes: u64) -> Result<DeviceSlice> {
        let cx = self.inner.context.enter()?;
        Ok(DeviceSlice::owned(Allocation::new(&self.inner, &cx, bytes)?, bytes))
    }

    /// Pinned memory of the host. Slow the first time; what is dropped is kept for the next who asks.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if there is not enough.
    pub fn pinned(&self, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(&self.inner, &self.inner.context.enter()?, bytes)
    }

    /// A stream of our own, which waits for no other.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the driver refuses.
    pub fn stream(&self) -> Result<Stream> {
        let cx = self.inner.context.enter()?;
        Ok(Stream::new(&self.inner, OwnStream::new(&cx)?.raw(), true))
    }

    /// A caller's stream, that of torch for example. Null is the legacy default stream.
    ///
    /// # Safety
    /// It is a stream of this device's primary context, and is there while it is used through the result.
    pub unsafe fn borrow_stream(&self, raw: *mut c_void) -> Stream {
        Stream::new(&self.inner, raw.cast(), false)
    }

    /// Copies to the device, and waits until it is done.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) if the lengths differ, [`Error::Device`](crate::Error::Device) if the driver fails.
    pub fn write(&self, to: &DeviceSlice, from: &[u8]) -> Result<()> {
        same_length(to, from.len())?;
        let cx = self.inner.context.enter()?;
        // SAFETY: the slice is memory of the device by its making, as long as `from`, which stays until the copy is waited for,
        // also after an error.
        let queued = unsafe { copies::copy_in(&cx, to.address(), from.as_ptr(), from.len(), self.inner.copy.raw()) };
        self.inner.wait_for(&cx, self.inner.copy.raw()).and(queued)
    }

    /// Copies from the device, and waits until it is done. What was queued on other streams must have passed.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) if the lengths differ, [`Error::Device`](crate::Error::Device) if the driver fails.
    pub fn read(&self, from: &DeviceSlice, to: &mut [u8]) -> Result<()> {
        same_length(from, to.len())?;
        let cx = self.inner.context.enter()?;
        // SAFETY: the slice is memory of the device by its making, as long as `to`, which stays until the copy is waited for, also
        // after an error.
        let queued = unsafe { copies::copy_out(&cx, to.as_mut_ptr(), from.address(), to.len(), self.inner.copy.raw()) };
        self.inner.wait_for(&cx, self.inner.copy.raw()).and(queued)
    }

    /// What the kernel `tpde_layout` reports of the structs, for a test.
    #[doc(hidden)]
    pub fn layout_report(&self, words: usize) -> Result<Vec<u32>> {
        let mut report = vec![0; 4 * words];
        let slice = self.alloc(report.len() as u64)?;
        self.write(&slice, &report)?;
        let cx = self.inner.context.enter()?;
        // SAFETY: the kernel takes an address of memory for its report, which is as long as its caller knows it to be.
        unsafe { self.inner.kernels.layout.launch(&cx, self.inner.copy.raw(), 1, &slice.address())? };
        self.read(&slice, &mut report)?;
        Ok(report.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
