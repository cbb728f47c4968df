//! Bytes at offsets, and owned bytes.

use crate::error::{Error, Result};
use crate::prelude::*;
use core::fmt;

/// Bytes that can be read at any offset, by many threads at once.
pub trait Source: Sync {
    /// Size of the source in bytes.
    fn size(&self) -> u64;

    /// Fills `out` with bytes from `offset` on.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read or is too short; [`Error::InvalidArgument`] if memory is too short.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// `size` bytes from `offset` on: borrowed if the source supports that, else read into `scratch`.
    ///
    /// # Errors
    /// The errors of [`Source::read`].
    fn bytes<'a>(&'a self, offset: u64, size: usize, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        if scratch.len() < size {
            scratch.resize(size, 0);
        }
        let out = &mut scratch[..size];
        self.read(offset, out)?;
        Ok(out)
    }

    /// All bytes, if they are in memory that cannot change while the source is borrowed. A caller that reads such bytes twice need
    /// not copy them. `None` for a mapped file, which another process can change.
    fn in_memory(&self) -> Option<&[u8]> {
        None
    }
}

#[doc(hidden)]
pub fn slice(bytes: &[u8], offset: u64, size: usize) -> Result<&[u8]> {
    let range = usize::try_from(offset).ok().and_then(|start| Some(start..start.checked_add(size)?));
    range
        .and_then(|range| bytes.get(range))
        .ok_or_else(|| Error::InvalidArgument(format!("{size} bytes from byte {offset} on are not within {} bytes", bytes.len())))
}

macro_rules! in_memory {
    ($($type:ty),+) => {$(
        impl Source for $type {
            fn size(&self) -> u64 {
                self.len() as u64
            }
            fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
                out.copy_from_slice(slice(self, offset, out.len())?);
                Ok(())
            }
            fn bytes<'a>(&'a self, offset: u64, size: usize, _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
                slice(self, offset, size)
            }
            fn in_memory(&self) -> Option<&[u8]> {
                Some(self)
            }
        }
    )+};
}

in_memory!(&[u8], Vec<u8>);

/// Owned bytes that do not change.
pub struct Buffer(Box<dyn AsRef<[u8]> + Send + Sync>);

impl Buffer {
    /// Takes memory of any kind, such as a mapped file, without a copy.
    ///
    /// # Safety
    /// Each call of `as_ref` must give the same bytes, and nothing may change them while the buffer exists.
    pub unsafe fn new(memory: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self(Box::new(memory))
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Box::new(bytes))
    }
}

impl core::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}
