//! Copies and fills that are queued on a stream.

use super::calls;
use super::driver::{EnterGuard, RawStream, check};
use cudarc::driver::sys;
use std::ptr;
use tpde_core::error::Result;

/// Maximum distance of rows that the driver copies in one call. Every device supports this one.
const MAX_PITCH: u64 = i32::MAX as u64;

/// Queues a copy from the host.
///
/// # Safety
/// Until the copy has completed, `from` stays unchanged and `to` is device memory. The driver copies pageable memory before it
/// returns.
pub(crate) unsafe fn copy_in(_: &EnterGuard<'_>, to: u64, from: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream) }, "copy to the device")
}

/// Queues a copy to the host.
///
/// # Safety
/// Until the copy has completed, `to` is host memory without other users, and `from` device memory.
pub(crate) unsafe fn copy_out(_: &EnterGuard<'_>, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream) }, "copy from the device")
}

/// Queues a copy within the device.
///
/// # Safety
/// Both are device memory until the copy has completed, and do not overlap.
pub(crate) unsafe fn copy_within(_: &EnterGuard<'_>, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream) }, "copy within the device")
}

/// Rows of equal length in device memory, to be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CopyRows {
    /// Address of the first row.
    pub from: u64,
    /// Size of a row in bytes.
    pub bytes: u64,
    /// Distance between the beginnings of rows in bytes.
    pub pitch: u64,
    pub count: u64,
}

/// Queues a copy of rows within the device, to memory without gaps.
///
/// # Safety
/// Both are device memory until the copy has completed, and do not overlap.
pub(crate) unsafe fn copy_rows(cx: &EnterGuard<'_>, to: u64, rows: CopyRows, stream: RawStream) -> Result<()> {
    let CopyRows { from, bytes, pitch, count } = rows;
    if bytes == 0 || count == 0 {
        return Ok(());
    }
    if count == 1 || pitch > MAX_PITCH {
        // SAFETY: promised by the caller.
        return (0..count).try_for_each(|n| unsafe { copy_within(cx, to + n * bytes, from + n * pitch, bytes, stream) });
    }
    let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: device,
        srcHost: ptr::null(),
        srcDevice: from,
        srcArray: ptr::null_mut(),
        srcPitch: pitch as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: device,
        dstHost: ptr::null_mut(),
        dstDevice: to,
        dstArray: ptr::null_mut(),
        dstPitch: bytes as usize,
        WidthInBytes: bytes as usize,
        Height: count as usize,
    };
    // SAFETY: promised by the caller. The driver reads the description before it returns.
    check(unsafe { calls::cuMemcpy2DAsync_v2(&copy, stream) }, "copy rows within the device")
}

/// Queues a fill with `count` copies of a word.
///
/// # Safety
/// `to` is device memory of `count` words until the fill has completed.
pub(crate) unsafe fn fill(_: &EnterGuard<'_>, to: u64, word: u32, count: usize, stream: RawStream) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemsetD32Async(to, word, count, stream) }, "fill device memory")
}

/// Queues a fill with `count` copies of a byte.
///
/// # Safety
/// `to` is device memory of `count` bytes until the fill has completed.
pub(crate) unsafe fn fill_bytes(_: &EnterGuard<'_>, to: u64, byte: u8, count: u64, stream: RawStream) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemsetD8Async(to, byte, count as usize, stream) }, "fill device memory")
}
