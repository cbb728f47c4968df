//! The driver's functions, found in its library when they are first called.
//!
//! cudarc declares them too, and has the types of their arguments. But there an answer is an enum, and an answer that it lacks, as a
//! driver that is newer may give, is undefined behaviour as soon as it is returned. Here an answer is a number. What a function
//! takes is compared with cudarc's declaration when this is compiled.

#![allow(non_snake_case)] // as the driver has it

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph, CUgraphNode,
    CUhostFn, CUjit_option, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUmodule, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus, CUuserObject,
};
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

/// What the driver answers: a `CUresult`, or a number that this crate does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(in crate::cuda) struct Code(pub u32);

impl Code {
    pub const SUCCESS: Self = Self(sys::CUresult::CUDA_SUCCESS as u32);
    pub const NOT_READY: Self = Self(sys::CUresult::CUDA_ERROR_NOT_READY as u32);
    /// Our answer in the place of a function that is not in the library, or of a library that is not there.
    const NOT_FOUND: Self = Self(sys::CUresult::CUDA_ERROR_NOT_FOUND as u32);
}

/// Whether the driver's library is there.
pub(in crate::cuda) fn are_there() -> bool {
    library().is_some()
}

fn library() -> Option<&'static libloading::Library> {
    static IS_THERE: OnceLock<bool> = OnceLock::new();
    // SAFETY: loads a library by the driver's name, as every use of CUDA does; its initialisers are trusted.
    let is_there = *IS_THERE.get_or_init(|| unsafe { sys::is_culib_present() });
    // SAFETY: as above. It panics where there is none.
    is_there.then(|| unsafe { sys::culib() })
}

/// A function of the library.
///
/// # Safety
/// `F` is a pointer to a function, of the type that the one with this name has.
unsafe fn find<F: Copy>(name: &str) -> Option<F> {
    // SAFETY: promised by the caller; the library stays loaded.
    library().and_then(|library| unsafe { library.get::<F>(name.as_bytes()).ok().map(|found| *found) })
}

/// A function that calls the driver's of its name.
macro_rules! call {
    ($name:ident($($argument:ident: $type:ty),*)) => {
        /// # Safety
        /// As CUDA's documentation of the driver has it.
        pub(in crate::cuda) unsafe fn $name($($argument: $type),*) -> Code {
            type Function = unsafe extern "C" fn($($type),*) -> Code;
            static FOUND: OnceLock<Option<Function>> = OnceLock::new();
            // SAFETY: the types are those of the driver's header, where an answer is an enum of C's of 32 bits.
            match FOUND.get_or_init(|| unsafe { find(stringify!($name)) }) {
                // SAFETY: promised by the caller.
                Some(function) => unsafe { function($($argument),*) },
                None => Code::NOT_FOUND,
            }
        }
    };
}

/// Functions, each compared with cudarc's declaration.
macro_rules! calls {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            call!($name($($argument: $type),*));
            const _: unsafe fn($($type),*) -> sys::CUresult = sys::$name;
        )*
    };
}

// In the place of the enum, what it has 32 bits for.
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
    cuUserObjectCreate(object: *mut CUuserObject, given: *mut c_void, destroy: CUhostFn, references: c_uint, flags: c_uint);
    cuUserObjectRelease(object: CUuserObject, references: c_uint);
}

/// The type of `cuLaunchKernel` and that of cudarc's declaration. A function of ours around it would have as many arguments.
macro_rules! launch_kernel {
    ($($argument:ident: $type:ty),*) => {
        pub(in crate::cuda) type LaunchKernel = unsafe extern "C" fn($($argument: $type),*) -> Code;
        type Declared = unsafe fn($($argument: $type),*) -> sys::CUresult;
        const _: Declared = sys::cuLaunchKernel;
    };
}

launch_kernel!(
    function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
    shared: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void
);

/// `cuLaunchKernel`, or the answer in its place.
pub(in crate::cuda) fn launch_kernel() -> Result<LaunchKernel, Code> {
    static FOUND: OnceLock<Option<LaunchKernel>> = OnceLock::new();
    // SAFETY: the type is that of the driver's header, where an answer is an enum of C's of 32 bits.
    FOUND.get_or_init(|| unsafe { find("cuLaunchKernel") }).ok_or(Code::NOT_FOUND)
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
        // SAFETY: there is none that could be called.
        assert_eq!(unsafe { cuNoSuchFunction(1) }, Code::NOT_FOUND);
    }
}
