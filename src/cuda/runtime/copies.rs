//! Copies and fills that are queued on a stream.

use super::calls;
use super::driver::{Entered, RawStream, check};
use crate::error::Result;

/// Queues a copy from the host.
///
/// # Safety
/// `from` stays as it is, and `to` is memory of the device, until the copy has passed. Of pageable memory the driver makes a
/// copy first.
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
/// `to` is memory of the host that nobody else uses, and `from` memory of the device, until the copy has passed.
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
/// Both are memory of the device until the copy has passed, and do not overlap.
pub(in crate::cuda) unsafe fn copy_within(_: &Entered<'_>, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream) }, "copy within the device")
}

/// Queues the writing of one word `count` times.
///
/// # Safety
/// `to` is memory of the device for as many words until this has passed.
pub(in crate::cuda) unsafe fn fill(_: &Entered<'_>, to: u64, word: u32, count: usize, stream: RawStream) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemsetD32Async(to, word, count, stream) }, "fill memory of the device")
}

/// Queues the writing of one byte `count` times.
///
/// # Safety
/// `to` is memory of the device for as many bytes until this has passed.
pub(in crate::cuda) unsafe fn fill_bytes(_: &Entered<'_>, to: u64, byte: u8, count: u64, stream: RawStream) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    check(unsafe { calls::cuMemsetD8Async(to, byte, count as usize, stream) }, "fill memory of the device")
}
