//! The driver, loaded at its first use: errors, devices, contexts, streams and events.
//!
//! Owners of handles free them. Every call that needs a current context takes [`EnterGuard`]. This guard pushes the context, and
//! pops it when it is dropped. The caller's current context is unchanged afterwards.

use super::calls::{self, Code};
use cudarc::driver::sys;
use std::ffi::{CStr, CString, c_int, c_void};
use std::marker::PhantomData;
use std::ptr;
use tpde_core::error::{Error, Result};

/// The kernels' PTX (ISA 8.4) needs CUDA 12.4, which is driver 550.
const MIN_VERSION: c_int = 12_040;
const MIN_CAPABILITY: c_int = 80;

/// Converts a result code to a result. `action` completes "cannot …".
pub(crate) fn check(code: Code, action: &'static str) -> Result<()> {
    if code == Code::SUCCESS { Ok(()) } else { Err(failed(code, action)) }
}

#[cold]
fn failed(code: Code, action: &'static str) -> Error {
    let text = |get: unsafe fn(Code, *mut *const std::ffi::c_char) -> Code| {
        let mut text = ptr::null();
        // SAFETY: `text` is valid for a pointer. The driver sets it to a static string, or leaves it null for an unknown code.
        unsafe {
            get(code, &mut text);
            if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy()) }
        }
    };
    let reason = match (text(calls::cuGetErrorString), text(calls::cuGetErrorName)) {
        (Some(description), Some(name)) => format!("{description} ({name}, {})", code.0),
        _ => format!("unknown error {}", code.0),
    };
    Error::Device { action, reason }
}

/// Loads and initialises the driver. The error names the missing part.
fn start() -> Result<()> {
    if !calls::is_present() {
        return Err(Error::NoDevice("the NVIDIA driver's library, libcuda.so.1, is not installed".into()));
    }
    let not_started = |e: Error| match e {
        Error::Device { reason, .. } => Error::NoDevice(format!("the NVIDIA driver does not start: {reason}")),
        e => e,
    };
    let mut version = 0;
    // SAFETY: `version` is valid for an int. Both calls are allowed before anything else.
    unsafe {
        check(calls::cuInit(0), "start the driver").map_err(not_started)?;
        check(calls::cuDriverGetVersion(&mut version), "query the driver's version").map_err(not_started)?;
    }
    if version < MIN_VERSION {
        let shown = |v: c_int| format!("{}.{}", v / 1000, v % 1000 / 10);
        let (version, required) = (shown(version), shown(MIN_VERSION));
        return Err(Error::NoDevice(format!(
            "the NVIDIA driver supports CUDA {version}, but {required} (driver 550) or later is required"
        )));
    }
    Ok(())
}

/// Returns the number of visible devices, or an error without a driver.
pub(crate) fn count() -> Result<u32> {
    start()?;
    let mut count = 0;
    // SAFETY: `count` is valid for an int.
    check(unsafe { calls::cuDeviceGetCount(&mut count) }, "count devices")?;
    Ok(count.max(0) as u32)
}

/// The primary context of a device, shared with other users of CUDA in this process.
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: contexts may be pushed and popped by any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a device that can run the kernels.
    pub fn open(ordinal: u32) -> Result<Self> {
        let count = count()?;
        if ordinal >= count {
            let devices = if count == 0 { "none".to_owned() } else { format!("0 to {}", count - 1) };
            return Err(Error::NoDevice(format!("there is no device {ordinal}; the driver has {devices}")));
        }
        let mut device = 0;
        let mut raw = ptr::null_mut();
        // SAFETY: `device` is valid for a device.
        check(unsafe { calls::cuDeviceGet(&mut device, ordinal as c_int) }, "find the device")?;
        let capability = [
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        ];
        let [major, minor] = capability.map(|which| attribute(device, which));
        let (major, minor) = (major?, minor?);
        if 10 * major + minor < MIN_CAPABILITY {
            let reason = format!("device {ordinal} has compute capability {major}.{minor}, but 8.0 or later is required");
            return Err(Error::NoDevice(reason));
        }
        // SAFETY: `raw` is valid for a context; it is released once, in `drop`.
        check(unsafe { calls::cuDevicePrimaryCtxRetain(&mut raw, device) }, "open the device's context")?;
        Ok(Self { device, raw })
    }

    /// Makes the context current until the guard is dropped. Captures of other streams forbid no call meanwhile:
    /// see [`RelaxedCapture`].
    pub fn enter(&self) -> Result<EnterGuard<'_>> {
        let relaxed = RelaxedCapture::new()?;
        // SAFETY: the context is retained while `self` lives, which the guard borrows.
        check(unsafe { calls::cuCtxPushCurrent_v2(self.raw) }, "make the device's context current")?;
        Ok(EnterGuard { context: self, _relaxed: relaxed, here: PhantomData })
    }

    pub fn attribute(&self, which: sys::CUdevice_attribute) -> Result<c_int> {
        attribute(self.device, which)
    }

    pub fn ordinal(&self) -> c_int {
        self.device
    }

    pub fn name(&self) -> String {
        let mut name = [0; 256];
        // SAFETY: the buffer has the passed length plus a terminating zero.
        unsafe {
            match calls::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, self.device) {
                Code::SUCCESS => CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(),
                _ => "unnamed device".into(),
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. A driver that is already unloaded returns an error, which has no effect.
        unsafe { calls::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<c_int> {
    let mut value = 0;
    // SAFETY: `value` is valid for an int.
    check(unsafe { calls::cuDeviceGetAttribute(&mut value, which, device) }, "query an attribute of the device")?;
    Ok(value)
}

/// Guard: while it lives, the context is current for this thread.
pub(crate) struct EnterGuard<'a> {
    context: &'a Context,
    _relaxed: RelaxedCapture,
    /// Not `Send`: a context is current per thread.
    here: PhantomData<*const ()>,
}

impl EnterGuard<'_> {
    pub fn context(&self) -> &Context {
        self.context
    }
}

impl Drop for EnterGuard<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: undoes the push of `enter`. Guards are dropped in reverse order, because each is a local variable.
        unsafe { calls::cuCtxPopCurrent_v2(&mut popped) };
    }
}

/// Handle of a stream of this crate or of the caller.
pub(crate) type RawStream = sys::CUstream;

/// A stream of this crate that does not synchronise with the default stream. Its owner destroys it.
#[derive(Debug)]
pub(crate) struct OwnStream(RawStream);

// SAFETY: streams may be used by any thread.
unsafe impl Send for OwnStream {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for OwnStream {}

impl OwnStream {
    pub fn new(_: &EnterGuard<'_>) -> Result<Self> {
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` is valid for a stream.
        check(unsafe { calls::cuStreamCreate(&mut raw, flags) }, "create a stream")?;
        Ok(Self(raw))
    }

    /// Creates a stream whose blocks start before those of other streams.
    pub fn urgent(_: &EnterGuard<'_>) -> Result<Self> {
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` is valid for a stream. The driver clamps the priority to its range.
        check(unsafe { calls::cuStreamCreateWithPriority(&mut raw, flags, c_int::MIN) }, "make a stream")?;
        Ok(Self(raw))
    }

    pub fn raw(&self) -> RawStream {
        self.0
    }

    /// Returns whether all queued work has completed.
    pub fn is_idle(&self, _: &EnterGuard<'_>) -> bool {
        // SAFETY: the stream is alive.
        unsafe { calls::cuStreamQuery(self.0) == calls::Code::SUCCESS }
    }

    /// Destroys the stream. Work queued on it still runs.
    pub fn destroy(&mut self, _: &EnterGuard<'_>) {
        // SAFETY: made in `new`; the owner does not use it afterwards.
        unsafe { calls::cuStreamDestroy_v2(self.0) };
    }
}

/// Waits on the host for all work of a stream. It is called after errors that leave no event to wait for. If the call fails,
/// waits for all work of the context. If that fails too, the context is lost and its work has ended.
#[cold]
pub(crate) fn drain(_: &EnterGuard<'_>, stream: RawStream) {
    // SAFETY: the stream is ours or promised by the caller, and the context is current.
    unsafe {
        if calls::cuStreamSynchronize(stream) != Code::SUCCESS {
            calls::cuCtxSynchronize();
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(crate) struct RawEvent(sys::CUevent);

// SAFETY: events may be used by any thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    /// Creates an event. An event without timing is cheaper.
    pub fn new(_: &EnterGuard<'_>, timed: bool) -> Result<Self> {
        let mut raw = ptr::null_mut();
        let flags = if timed { sys::CUevent_flags::CU_EVENT_DEFAULT } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING };
        // SAFETY: `raw` is valid for an event.
        check(unsafe { calls::cuEventCreate(&mut raw, flags as u32) }, "create an event")?;
        Ok(Self(raw))
    }

    /// Records the event behind all work queued on the stream so far.
    pub fn record(&self, _: &EnterGuard<'_>, stream: RawStream) -> Result<()> {
        // SAFETY: both handles are alive: the event is ours, and streams are ours or promised by the caller.
        check(unsafe { calls::cuEventRecord(self.0, stream) }, "record an event")
    }

    /// Makes later work of the stream wait for the event. The host does not wait.
    pub fn hold(&self, _: &EnterGuard<'_>, stream: RawStream) -> Result<()> {
        // SAFETY: as in `record`.
        check(unsafe { calls::cuStreamWaitEvent(stream, self.0, 0) }, "make a stream wait for an event")
    }

    /// Waits on the host until the event has completed.
    pub fn wait(&self, _: &EnterGuard<'_>) -> Result<()> {
        // SAFETY: the event is ours.
        check(unsafe { calls::cuEventSynchronize(self.0) }, "finish work on the device")
    }

    /// Returns whether the event has completed.
    pub fn is_passed(&self, _: &EnterGuard<'_>) -> Result<bool> {
        // SAFETY: the event is ours.
        match unsafe { calls::cuEventQuery(self.0) } {
            Code::NOT_READY => Ok(false),
            code => check(code, "finish work on the device").map(|()| true),
        }
    }

    /// Returns the milliseconds from `start` to this event. Both events must be timed and completed.
    pub fn since(&self, _: &EnterGuard<'_>, start: &Self) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are ours, and `milliseconds` is valid for a float.
        check(unsafe { calls::cuEventElapsedTime(&mut milliseconds, start.0, self.0) }, "measure the time between two events")?;
        Ok(milliseconds)
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        // SAFETY: made in `new`. The driver frees a pending event once it has completed.
        unsafe { calls::cuEventDestroy_v2(self.0) };
    }
}

/// Returns whether the stream is being captured into a graph.
pub(crate) fn is_capturing(_: &EnterGuard<'_>, stream: RawStream) -> Result<bool> {
    // The status is a number instead of an enum, as for result codes.
    let mut status = 0u32;
    // SAFETY: the stream is ours or promised by the caller, and `status` has the size of a status.
    check(unsafe { calls::cuStreamIsCapturing(stream, (&raw mut status).cast()) }, "query whether a stream is being captured")?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32)
}

/// Guard: allows this thread to make calls, like allocations, that a capture elsewhere in the process forbids. They do not become
/// part of the graph. Without it, such a call would also end the capture.
#[derive(Debug)]
pub(crate) struct RelaxedCapture(u32);

impl RelaxedCapture {
    pub fn new() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        // SAFETY: `mode` has the size of a mode. It is exchanged with the thread's mode.
        check(unsafe { calls::cuThreadExchangeStreamCaptureMode((&raw mut mode).cast()) }, "allow calls during a capture")?;
        Ok(Self(mode))
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: as in `new`, in reverse.
        unsafe { calls::cuThreadExchangeStreamCaptureMode((&raw mut self.0).cast()) };
    }
}

/// A module of compiled kernels.
#[derive(Debug, Clone)]
pub(crate) struct Module(sys::CUmodule);

// SAFETY: modules may be used by any thread.
unsafe impl Send for Module {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles PTX for the device.
    pub fn load(_: &EnterGuard<'_>, ptx: &str) -> Result<Self> {
        let image = CString::new(ptx).map_err(|_| Error::InvalidArgument("PTX with a NUL".into()))?;
        let mut log = [0u8; 2048];
        let mut options = [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(log.len() - 1)];
        let mut module = ptr::null_mut();
        // SAFETY: the image is a terminated string, there are as many values as options, and the log has the passed length.
        let code =
            unsafe { calls::cuModuleLoadDataEx(&mut module, image.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr()) };
        check(code, "compile the kernels for this device").map_err(|e| match (e, CStr::from_bytes_until_nul(&log)) {
            (Error::Device { action, reason }, Ok(log)) => {
                Error::Device { action, reason: format!("{reason} {}", log.to_string_lossy()).trim_end().to_owned() }
            }
            (e, _) => e,
        })?;
        Ok(Self(module))
    }

    /// Prepares a kernel of the module for launches. It is valid until the module is [unloaded](Module::unload).
    pub fn kernel(&self, _: &EnterGuard<'_>, name: &str, threads: u32, shared: u32) -> Result<Kernel> {
        let name = CString::new(name).map_err(|_| Error::InvalidArgument("a kernel's name with a NUL".into()))?;
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, and the name is terminated.
        check(unsafe { calls::cuModuleGetFunction(&mut function, self.0, name.as_ptr()) }, "find a kernel")?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        if shared > 0 {
            // SAFETY: the function belongs to the module.
            check(unsafe { calls::cuFuncSetAttribute(function, attribute, shared as c_int) }, "set the shared memory of a kernel")?;
        }
        let mut registers = 0;
        // This query loads the function, which would otherwise happen at its first launch.
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: the function belongs to the module, and `registers` is valid for an int.
        check(unsafe { calls::cuFuncGetAttribute(&mut registers, attribute, function) }, "load a kernel")?;
        Ok(Kernel { function, threads, shared })
    }

    /// Unloads the module.
    ///
    /// # Safety
    /// All work that uses its functions has completed.
    pub unsafe fn unload(self, _: &EnterGuard<'_>) {
        // SAFETY: promised by the caller.
        unsafe { calls::cuModuleUnload(self.0) };
    }
}

/// A kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    pub function: sys::CUfunction,
    pub threads: u32,
    pub shared: u32,
}

// SAFETY: functions of a loaded module may be launched by any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Compiles a kernel for the device and prepares it for launches.
    ///
    /// The kernel is valid until the owner of the module [unloads](Module::unload) it.
    pub fn load(cx: &EnterGuard<'_>, ptx: &str, name: &str, threads: u32, shared: u32) -> Result<(Self, Module)> {
        let module = Module::load(cx, ptx)?;
        Ok((module.kernel(cx, name, threads, shared)?, module))
    }

    /// Returns the kernel with `shared` bytes of dynamic shared memory. [`Kernel::load`] sets the maximum.
    pub fn with_shared(self, shared: u32) -> Self {
        debug_assert!(shared <= self.shared);
        Self { shared, ..self }
    }

    /// Queues a launch of `blocks` blocks with one parameter, which is copied.
    ///
    /// # Safety
    /// The parameter has the kernel's type, and its pointers remain valid until the launch has completed.
    pub unsafe fn launch<T>(&self, _: &EnterGuard<'_>, stream: RawStream, blocks: u32, parameter: &T) -> Result<()> {
        let mut parameters = [ptr::from_ref(parameter).cast_mut().cast::<c_void>()];
        let (grid, block, parameters) = (blocks, self.threads, parameters.as_mut_ptr());
        // SAFETY: the driver copies the parameter before it returns. The rest is promised by the caller.
        let launch = |launch: calls::LaunchKernel| unsafe {
            launch(self.function, grid, 1, 1, block, 1, 1, self.shared, stream, parameters, ptr::null_mut())
        };
        check(calls::launch_kernel().map_or_else(|code| code, launch), "launch a kernel")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result codes of a newer driver are errors like others.
    #[test]
    fn unknown_answers_are_errors() {
        for code in [4242, u32::MAX] {
            let error = check(Code(code), "try").unwrap_err();
            assert!(matches!(error, Error::Device { action: "try", .. }));
            let text = error.to_string();
            assert!(text.contains(&format!("unknown error {code}")), "{text}");
        }
        check(Code::SUCCESS, "try").unwrap();
    }
}
