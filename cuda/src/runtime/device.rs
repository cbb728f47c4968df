//! A device: its properties, memory, streams and copies.

use super::copies;
use super::driver::{self, Context, OwnStream};
use super::inner::Inner;
use super::kernels::Kernels;
use super::memory::{Allocation, DeviceSlice, PinnedBuffer, same_length};
use super::stream::Stream;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tpde_core::error::Result;

/// Time spent on opening a device. Later calls do not repeat this work.
#[derive(Debug, Clone, Copy, serde::Serialize)]
#[non_exhaustive]
pub struct FirstCall {
    /// Time to load the driver and to open the device's context, if the process had no context.
    pub context: Duration,
    /// Time to compile the kernels for the device, or to find them in the driver's cache. Excludes the kernel for chunks without
    /// a base, which the first index with such chunks compiles.
    pub kernels: Duration,
    /// Time to create streams and to pin the staging ring.
    pub memory: Duration,
}

/// An open CUDA device. Clones share it.
#[derive(Clone)]
pub struct Device {
    pub(crate) inner: Arc<Inner>,
    first_call: FirstCall,
}

impl Device {
    /// Returns the number of visible devices.
    ///
    /// # Errors
    /// [`Error::NoDevice`](tpde::Error::NoDevice) without a working driver.
    pub fn count() -> Result<u32> {
        driver::count()
    }

    /// Opens a device by its ordinal. The caller's current context stays unchanged.
    ///
    /// Cost: a few tenths of a second in a process that has not used the device yet, see [`Device::first_call`].
    ///
    /// # Errors
    /// [`Error::NoDevice`](tpde::Error::NoDevice) if there is no driver or it is too old, if there is no such device, or if its
    /// compute capability is too low; [`Error::Device`](tpde::Error::Device) if another call of the driver fails.
    pub fn open(ordinal: u32) -> Result<Self> {
        let start = Instant::now();
        let context = Context::open(ordinal)?;
        let cx = context.enter()?;
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

    /// Returns the time spent on opening the device.
    pub fn first_call(&self) -> FirstCall {
        self.first_call
    }

    /// Returns the name of the device, from the driver.
    pub fn name(&self) -> String {
        self.inner.context.name()
    }

    /// Returns the number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.inner.multiprocessors
    }

    /// Calls `work` on this thread. While `work` runs, the thread may make calls that a capture elsewhere in the process would
    /// forbid, like allocations. These calls do not become part of the graph.
    ///
    /// # Errors
    /// [`Error::Device`](tpde::Error::Device) if the driver refuses.
    pub fn beside_captures<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let _relaxed = driver::RelaxedCapture::new()?;
        Ok(work())
    }

    /// Returns the handle (`CUstream`) of the copy stream. Memory passed to this crate must be free in the order of this stream.
    pub fn copy_stream(&self) -> *mut c_void {
        self.inner.copy.raw().cast()
    }

    /// Allocates device memory. Its content is undefined.
    ///
    /// # Errors
    /// [`Error::Device`](tpde::Error::Device) if there is not enough.
    pub fn alloc(&self, bytes: u64) -> Result<DeviceSlice> {
        let cx = self.inner.context.enter()?;
        Ok(DeviceSlice::owned(Allocation::new(&self.inner, &cx, bytes)?, bytes))
    }

    /// Allocates pinned host memory. The first allocation of a size is slow; dropped buffers are reused.
    ///
    /// # Errors
    /// [`Error::Device`](tpde::Error::Device) if there is not enough.
    pub fn pinned(&self, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(&self.inner, &self.inner.context.enter()?, bytes)
    }

    /// Creates a stream that does not synchronise with the default stream.
    ///
    /// # Errors
    /// [`Error::Device`](tpde::Error::Device) if the driver refuses.
    pub fn stream(&self) -> Result<Stream> {
        let cx = self.inner.context.enter()?;
        Ok(Stream::new(&self.inner, OwnStream::new(&cx)?.raw(), true))
    }

    /// Wraps a caller's stream, for example PyTorch's. Null is the legacy default stream.
    ///
    /// # Safety
    /// The stream belongs to this device's primary context, and exists while the result is used.
    pub unsafe fn borrow_stream(&self, raw: *mut c_void) -> Stream {
        Stream::new(&self.inner, raw.cast(), false)
    }

    /// Copies to the device, and waits for completion.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](tpde::Error::InvalidArgument) if the lengths differ;
    /// [`Error::Device`](tpde::Error::Device) if the driver fails.
    pub fn write(&self, to: &DeviceSlice, from: &[u8]) -> Result<()> {
        same_length(to, from.len())?;
        let cx = self.inner.context.enter()?;
        // SAFETY: the slice is device memory as long as `from`, which lives until the copy is waited for, also after an error.
        let queued = unsafe { copies::copy_in(&cx, to.address(), from.as_ptr(), from.len(), self.inner.copy.raw()) };
        self.inner.wait_for(&cx, self.inner.copy.raw()).and(queued)
    }

    /// Copies from the device, and waits for completion. Earlier work on other streams must have completed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](tpde::Error::InvalidArgument) if the lengths differ;
    /// [`Error::Device`](tpde::Error::Device) if the driver fails.
    pub fn read(&self, from: &DeviceSlice, to: &mut [u8]) -> Result<()> {
        same_length(from, to.len())?;
        let cx = self.inner.context.enter()?;
        // SAFETY: the slice is device memory as long as `to`, which lives until the copy is waited for, also after an error.
        let queued = unsafe { copies::copy_out(&cx, to.as_mut_ptr(), from.address(), to.len(), self.inner.copy.raw()) };
        self.inner.wait_for(&cx, self.inner.copy.raw()).and(queued)
    }

    /// Returns the report of the kernel `tpde_layout`, for a test.
    #[doc(hidden)]
    pub fn layout_report(&self, words: usize) -> Result<Vec<u32>> {
        let mut report = vec![0; 4 * words];
        let slice = self.alloc(report.len() as u64)?;
        self.write(&slice, &report)?;
        let cx = self.inner.context.enter()?;
        // SAFETY: the kernel takes the address of memory for its report; the caller passes its length.
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
