//! Copies and fills that are queued on a stream.

use super::calls;
use super::driver::{Entered, RawStream, check};
use crate::error::Result;

/// Queues a copy from the host.
///
/// # Safety
/// Until the copy has completed, `from` stays unchanged and `to` is device memory. The driver copies pageable memory before it
/// returns.
pub(in crate::cuda) unsafe fn copy_in(_: &Entered<'_>, to: u64, from: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
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
pub(in crate::cuda) unsafe fn copy_out(_: &Entered<'_>, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<()> {
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
pub(in crate::cuda) unsafe fn copy_within(_: &Entered<'_>, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream) }, "copy within the device")
}

/// Queues a fill with `count` copies of a word.
///
/// # Safety
/// `to` is device memory of `count` words until the fill has completed.
pub(in crate::cuda) unsafe fn fill(_: &Entered<'_>, to: u64, word: u32, count: usize, stream: RawStream) -> Result<()> {
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
pub(in crate::cuda) unsafe fn fill_bytes(_: &Entered<'_>, to: u64, byte: u8, count: u64, stream: RawStream) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemsetD8Async(to, byte, count as usize, stream) }, "fill device memory")
}
