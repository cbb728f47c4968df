//! Functions of the driver. Each is looked up in the driver's library at its first call.
//!
//! The crate `cudarc` declares the functions too, and provides the argument types. But its declarations return an enum. A newer
//! driver can return a value that the enum lacks, which is undefined behaviour. Here the result is a number. The argument types
//! are compared with those of cudarc at compile time.

#![allow(non_snake_case)] // names of the driver

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph, CUgraphNode,
    CUhostFn, CUjit_option, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUmodule, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus, CUuserObject,
};
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

/// A result code of the driver: a `CUresult`, or an unknown number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Code(pub u32);

impl Code {
    pub const SUCCESS: Self = Self(sys::CUresult::CUDA_SUCCESS as u32);
    pub const NOT_READY: Self = Self(sys::CUresult::CUDA_ERROR_NOT_READY as u32);
    /// Returned if the function or the library is missing.
    const NOT_FOUND: Self = Self(sys::CUresult::CUDA_ERROR_NOT_FOUND as u32);
}

/// Returns whether the driver's library is present.
pub(crate) fn is_present() -> bool {
    library().is_some()
}

fn library() -> Option<&'static libloading::Library> {
    static IS_PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loads a library by the driver's name, as every use of CUDA does; its initialisers are trusted.
    let is_present = *IS_PRESENT.get_or_init(|| unsafe { sys::is_culib_present() });
    // SAFETY: as above. It panics only if the library is missing.
    is_present.then(|| unsafe { sys::culib() })
}

/// Looks up a function of the library.
///
/// # Safety
/// `F` is a function pointer with the type of the function of this name.
unsafe fn find<F: Copy>(name: &str) -> Option<F> {
    // SAFETY: promised by the caller; the library stays loaded.
    library().and_then(|library| unsafe { library.get::<F>(name.as_bytes()).ok().map(|function| *function) })
}

/// Defines a function that calls the driver's function of the same name.
macro_rules! call {
    ($name:ident($($argument:ident: $type:ty),*)) => {
        /// # Safety
        /// See the documentation of the CUDA driver API.
        pub(crate) unsafe fn $name($($argument: $type),*) -> Code {
            type Function = unsafe extern "C" fn($($type),*) -> Code;
            static FUNCTION: OnceLock<Option<Function>> = OnceLock::new();
            // SAFETY: the types are those of the driver's header, where the result is a C enum of 32 bits.
            match FUNCTION.get_or_init(|| unsafe { find(stringify!($name)) }) {
                // SAFETY: promised by the caller.
                Some(function) => unsafe { function($($argument),*) },
                None => Code::NOT_FOUND,
            }
        }
    };
}

/// Defines functions, and compares each with cudarc's declaration.
macro_rules! calls {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            call!($name($($argument: $type),*));
            const _: unsafe fn($($type),*) -> sys::CUresult = sys::$name;
        )*
    };
}

// These functions take a result code, which is a 32-bit number here instead of an enum.
call!(cuGetErrorName(code: Code, name: *mut *const c_char));
call!(cuGetErrorString(code: Code, text: *mut *const c_char));

calls! {
    cuCtxPopCurrent_v2(context: *mut CUcontext);
    cuCtxPushCurrent_v2(context: CUcontext);
    cuCtxSynchronize();
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDriverGetVersion(version: *mut c_int);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    cuEventQuery(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventSynchronize(event: CUevent);
    cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
    cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint);
    cuInit(flags: c_uint);
    cuMemAllocFromPoolAsync(address: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream);
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    cuMemFreeHost(start: *mut c_void);
    cuMemFree_v2(address: CUdeviceptr);
    cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps);
    cuMemPoolDestroy(pool: CUmemoryPool);
    cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    cuMemcpy2DAsync_v2(copy: *const sys::CUDA_MEMCPY2D, stream: CUstream);
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemsetD32Async(to: CUdeviceptr, word: c_uint, count: usize, stream: CUstream);
    cuMemsetD8Async(to: CUdeviceptr, byte: c_uchar, count: usize, stream: CUstream);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuModuleLoadDataEx(
        module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut CUjit_option, values: *mut *mut c_void
    );
    cuModuleUnload(module: CUmodule);
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamQuery(stream: CUstream);
    cuStreamGetCaptureInfo_v2(
        stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut u64, graph: *mut CUgraph, dependencies: *mut *const CUgraphNode,
        count: *mut usize
    );
    cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
    cuUserObjectCreate(object: *mut CUuserObject, value: *mut c_void, destroy: CUhostFn, references: c_uint, flags: c_uint);
    cuUserObjectRelease(object: CUuserObject, references: c_uint);
}

/// Defines the type of `cuLaunchKernel`, and compares it with cudarc's declaration. The function has no wrapper and is called by
/// pointer, because a wrapper with its 11 arguments would break the lint `clippy::too_many_arguments`.
macro_rules! launch_kernel {
    ($($argument:ident: $type:ty),*) => {
        pub(crate) type LaunchKernel = unsafe extern "C" fn($($argument: $type),*) -> Code;
        type Declared = unsafe fn($($argument: $type),*) -> sys::CUresult;
        const _: Declared = sys::cuLaunchKernel;
    };
}

launch_kernel!(
    function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
    shared: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void
);

/// Returns `cuLaunchKernel`, or the result code if it is missing.
pub(crate) fn launch_kernel() -> Result<LaunchKernel, Code> {
    static FUNCTION: OnceLock<Option<LaunchKernel>> = OnceLock::new();
    // SAFETY: the type is that of the driver's header, where the result is a C enum of 32 bits.
    FUNCTION.get_or_init(|| unsafe { find("cuLaunchKernel") }).ok_or(Code::NOT_FOUND)
}

#[cfg(test)]
calls! {
    cuCtxCreate_v2(context: *mut sys::CUcontext, flags: c_uint, device: sys::CUdevice);
    cuCtxDestroy_v2(context: sys::CUcontext);
    cuCtxGetCurrent(context: *mut sys::CUcontext);
    cuGraphDestroy(graph: sys::CUgraph);
    cuGraphExecDestroy(ready: sys::CUgraphExec);
    cuGraphInstantiateWithFlags(ready: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: std::ffi::c_ulonglong);
    cuGraphLaunch(ready: sys::CUgraphExec, stream: sys::CUstream);
    cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode);
    cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_is_missing_has_an_answer() {
        call!(cuNoSuchFunction(number: c_int));
        // SAFETY: the driver has no such function, so nothing is called.
        assert_eq!(unsafe { cuNoSuchFunction(1) }, Code::NOT_FOUND);
    }
}
