//! Device memory and pinned host memory, with their owners.

use super::driver::EnterGuard;
use super::inner::Inner;
use super::layout::MEMORY_ALIGN;
use tpde_core::error::{Error, Result};

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use tpde_core::source::{Source, slice};

/// Owned device memory. It is freed when all work that the reaper waits for has completed.
pub(crate) struct Allocation {
    device: Arc<Inner>,
    address: u64,
}

impl Allocation {
    pub fn new(device: &Arc<Inner>, cx: &EnterGuard<'_>, bytes: u64) -> Result<Self> {
        Ok(Self { device: device.clone(), address: device.pools.allocate(cx, bytes)? })
    }

    pub fn address(&self) -> u64 {
        self.address
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Allocation({:#x})", self.address)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Ok(_cx) = self.device.context.enter() {
            self.device.pools.free(self.address);
        }
    }
}

/// A range of device memory. It is part of an allocation of this crate, and keeps the allocation alive, or it is memory of the
/// caller.
#[derive(Debug, Clone)]
pub struct DeviceSlice {
    address: u64,
    bytes: u64,
    keep: Option<Arc<Allocation>>,
}

impl DeviceSlice {
    /// Wraps a caller's memory, for example a tensor of another library.
    ///
    /// # Safety
    /// The range is device memory (or host memory that the device can access at this address) until all work queued with this
    /// slice has completed.
    pub unsafe fn from_raw(address: u64, bytes: u64) -> Self {
        Self { address, bytes, keep: None }
    }

    pub(crate) fn owned(allocation: Allocation, bytes: u64) -> Self {
        Self { address: allocation.address(), bytes, keep: Some(Arc::new(allocation)) }
    }

    /// Returns the device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns a part of the slice.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the part is not within the slice.
    pub fn slice(&self, offset: u64, bytes: u64) -> Result<Self> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(Self { address: self.address + offset, bytes, keep: self.keep.clone() }),
            _ => Err(Error::InvalidArgument(format!(
                "{bytes} bytes from byte {offset} on are not within {} bytes of device memory",
                self.bytes
            ))),
        }
    }

    /// Returns whether another slice refers to the same allocation.
    pub(crate) fn is_shared(&self) -> bool {
        self.keep.as_ref().is_some_and(|allocation| Arc::strong_count(allocation) > 1)
    }

    /// Checks that the memory belongs to this device. Another device would free it without waiting for this device.
    pub(crate) fn check_device(&self, device: &Arc<Inner>) -> Result<()> {
        match &self.keep {
            Some(allocation) => same_device(&allocation.device, device),
            None => Ok(()),
        }
    }

    /// Returns the first `bytes` bytes of a caller's memory, after checking its size, alignment and device.
    pub(crate) fn reserve(&self, bytes: u64, device: &Arc<Inner>) -> Result<Self> {
        self.check_device(device)?;
        if !self.address.is_multiple_of(MEMORY_ALIGN) || self.bytes < bytes {
            let (found, at) = (self.bytes, self.address);
            return Err(Error::InvalidArgument(format!(
                "device memory: {found} bytes at {at:#x}, expected at least {bytes} at a multiple of {MEMORY_ALIGN}"
            )));
        }
        self.slice(0, bytes)
    }

    pub(crate) fn end(&self) -> Result<u64> {
        let end = self.address.checked_add(self.bytes);
        end.ok_or_else(|| Error::InvalidArgument(format!("{} bytes at {:#x} of device memory", self.bytes, self.address)))
    }
}

/// Pinned host memory. The device copies from and to it directly, and kernels can read and write it.
pub struct PinnedBuffer {
    device: Arc<Inner>,
    start: NonNull<u8>,
    bytes: usize,
    capacity: usize,
}

// SAFETY: it owns its memory, like a Vec.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    pub(crate) fn new(device: &Arc<Inner>, cx: &EnterGuard<'_>, bytes: usize) -> Result<Self> {
        let (start, capacity) = device.pools.pin(cx, bytes)?;
        Ok(Self { device: device.clone(), start, bytes, capacity })
    }

    /// Returns a buffer with `parts`, pairs of offset and content.
    pub(crate) fn with_parts(device: &Arc<Inner>, cx: &EnterGuard<'_>, size: u64, parts: &[(u64, &[u8])]) -> Result<Self> {
        let mut pinned = Self::new(device, cx, size as usize)?;
        for (start, part) in parts {
            pinned[*start as usize..][..part.len()].copy_from_slice(part);
        }
        Ok(pinned)
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// As [`DeviceSlice::check_device`].
    pub(crate) fn check_device(&self, device: &Arc<Inner>) -> Result<()> {
        same_device(&self.device, device)
    }

    /// Shortens the buffer.
    pub(crate) fn truncate(&mut self, bytes: usize) {
        self.bytes = self.bytes.min(bytes);
    }

    /// Returns the device address. It equals the host address, because devices of compute capability 8.0 and up have unified addressing.
    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// Fills the buffer with a word, which devices store in little-endian order.
    pub(crate) fn fill_words(&mut self, word: u32) {
        self.chunks_exact_mut(4).for_each(|to| to.copy_from_slice(&word.to_le_bytes()));
    }

    /// Reads a word that the device may be writing.
    pub(crate) fn word(&self, at: usize) -> u32 {
        assert!(4 * at + 4 <= self.bytes);
        // SAFETY: in bounds, and aligned because the memory is page-aligned.
        unsafe { self.start.cast::<u32>().add(at).read_volatile() }
    }
}

impl std::ops::Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: owned memory, initialised when it was pinned. The device writes it only where `word` is used, or before the
        // caller has waited.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl std::ops::DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above. A buffer that the device still reads is in an `Arc`, so no mutable reference to it exists.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Source for PinnedBuffer {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        (&**self).read(offset, out)
    }

    fn bytes<'a>(&'a self, offset: u64, size: usize, _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        slice(self, offset, size)
    }

    fn in_memory(&self) -> Option<&[u8]> {
        Some(self)
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer({} bytes)", self.bytes)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let cx = self.device.context.enter();
        self.device.pools.unpin(cx.as_ref().ok(), self.start, self.capacity);
    }
}

/// Checks that both sides of a copy have the same length.
pub(crate) fn same_length(slice: &DeviceSlice, bytes: usize) -> Result<()> {
    if slice.bytes() == bytes as u64 {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("a copy between {bytes} bytes of host memory and {} of device memory", slice.bytes())))
}

fn same_device(owner: &Arc<Inner>, device: &Arc<Inner>) -> Result<()> {
    if Arc::ptr_eq(owner, device) {
        return Ok(());
    }
    Err(Error::InvalidArgument("the memory belongs to another Device, or to the same device opened another time".into()))
}
