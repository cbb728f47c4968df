//! nvCOMP, NVIDIA's library that expands zstd frames on the device. It is optional and loaded at run time.

use super::runtime::driver::{EnterGuard, RawStream};
use super::runtime::kernels::FrameKernels;
use std::ffi::{OsStr, c_void};
use std::fmt;
use std::sync::Arc;
use tpde_core::error::{Error, Result};

/// File name of the library. This module uses the interface of version 6.
const NAME: &str = "libnvcomp.so.6";

/// nvCOMP, loaded. Clones share one library.
///
/// With [`DeviceIndex::trust`](super::DeviceIndex::trust), nvCOMP expands payloads of codec `zstd` on the device instead of on
/// the processor.
///
/// nvCOMP does not withstand hostile data: *a frame can make it read and write any memory that the device can access*. A kernel
/// compares the CRC of each frame before nvCOMP reads it. That finds accidents only. The writer of the pair must be trusted.
#[derive(Clone)]
pub struct Nvcomp(Arc<Library>);

struct Library {
    temporary_bytes: TemporaryBytes,
    expand: Expand,
    /// Keeps the function pointers valid.
    _loaded: libloading::Library,
}

/// `nvcompBatchedZstdDecompressOpts_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Options {
    backend: i32,
    reserved: [u8; 60],
}

const DEFAULT: Options = Options { backend: 0, reserved: [0; 60] };

/// `nvcompBatchedZstdDecompressGetTempSize`: number of chunks, size of the largest content, options, result, total size of the
/// contents, stream.
type TemporaryBytes = unsafe extern "C" fn(usize, usize, Options, *mut usize, usize, *mut c_void) -> i32;

/// `nvcompBatchedZstdDecompressAsync`: see [`Batch`].
type Expand = unsafe extern "C" fn(
    *const c_void,
    *const c_void,
    *const c_void,
    *mut c_void,
    usize,
    *mut c_void,
    usize,
    *const c_void,
    Options,
    *mut c_void,
    *mut c_void,
) -> i32;

/// Frames to expand together: addresses of arrays on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Batch {
    pub frames: u64,
    pub frame_bytes: u64,
    /// Capacity of the memory for each content, in bytes.
    pub capacities: u64,
    /// Size of each content, in bytes, which nvCOMP writes.
    pub content_bytes: u64,
    pub contents: u64,
    pub outcomes: u64,
    pub count: usize,
    pub temporary: u64,
    pub temporary_bytes: usize,
}

impl Nvcomp {
    /// Loads `libnvcomp.so.6` from the search path of the system's loader.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] if the file is missing, or lacks the functions of nvCOMP.
    pub fn load() -> Result<Self> {
        // SAFETY: the name is that of NVIDIA's library, whose initialisers may run in any process.
        unsafe { Self::open(NAME) }
    }

    /// Loads nvCOMP from a file.
    ///
    /// # Safety
    /// The file is nvCOMP, version 6.
    ///
    /// # Errors
    /// As [`Nvcomp::load`].
    pub unsafe fn open(path: impl AsRef<OsStr>) -> Result<Self> {
        let missing = |e: libloading::Error| Error::NoLibrary { library: NAME, reason: e.to_string() };
        // SAFETY: promised by the caller. The functions have these types in the headers of nvCOMP, and the library stays loaded
        // with them.
        unsafe {
            let loaded = libloading::Library::new(path.as_ref()).map_err(missing)?;
            let temporary_bytes = *loaded.get(b"nvcompBatchedZstdDecompressGetTempSize").map_err(missing)?;
            let expand = *loaded.get(b"nvcompBatchedZstdDecompressAsync").map_err(missing)?;
            Ok(Self(Arc::new(Library { temporary_bytes, expand, _loaded: loaded })))
        }
    }

    /// Returns the size of the temporary device memory for an expansion, in bytes.
    pub(super) fn temporary_bytes(&self, _: &EnterGuard<'_>, count: usize, largest: usize, all: usize) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: `bytes` is valid for the result, and the null stream always exists.
        let code = unsafe { (self.0.temporary_bytes)(count, largest, DEFAULT, &mut bytes, all, std::ptr::null_mut()) };
        check(code).map(|()| bytes)
    }

    /// Queues the expansion of a batch.
    ///
    /// # Safety
    /// The addresses are device memory with the sizes of [`Batch`] until the stream has completed. The frames are from a trusted
    /// writer.
    pub(super) unsafe fn expand(&self, _: &EnterGuard<'_>, batch: &Batch, stream: RawStream) -> Result<()> {
        let at = |address: u64| std::ptr::without_provenance_mut::<c_void>(address as usize);
        // SAFETY: promised by the caller.
        let code = unsafe {
            (self.0.expand)(
                at(batch.frames),
                at(batch.frame_bytes),
                at(batch.capacities),
                at(batch.content_bytes),
                batch.count,
                at(batch.temporary),
                batch.temporary_bytes,
                at(batch.contents),
                DEFAULT,
                at(batch.outcomes),
                stream.cast(),
            )
        };
        check(code)
    }
}

impl fmt::Debug for Nvcomp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nvcomp")
    }
}

fn check(code: i32) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::Device { action: "expand frames with nvCOMP", reason: format!("nvCOMP returned status {code}") })
}

/// Library and kernels for an index whose frames nvCOMP expands.
#[derive(Debug, Clone)]
pub(super) struct NvcompSupport {
    pub nvcomp: Nvcomp,
    pub kernels: FrameKernels,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_or_another_is_named() {
        for path in ["/no/such/libnvcomp.so.6", "libc.so.6"] {
            // SAFETY: the first file does not exist. The second library is already loaded in this process.
            match unsafe { Nvcomp::open(path) } {
                Err(Error::NoLibrary { library: "libnvcomp.so.6", reason }) => assert!(!reason.is_empty()),
                other => panic!("{path}: {other:?}"),
            }
        }
    }

    #[test]
    fn options_are_as_large_as_theirs() {
        assert_eq!((size_of::<Options>(), align_of::<Options>()), (64, 4));
    }
}
