//! The blob of a pair that is encoded.

use crate::runtime::inner::Inner;
use crate::runtime::memory::PinnedBuffer;
use std::io::{self, Write};
use std::sync::Arc;
use tpde::internals::NewBlob;
use tpde_core::error::Result;
use tpde_core::format::BLOB_HEADER_SIZE;

/// A blob that payloads are written to.
pub(super) trait Blob: Write {
    /// Returns the blob if it is in pinned memory. Then the device copies payloads to their places.
    fn pinned(&mut self) -> Option<&mut PinnedBlob> {
        None
    }
}

impl Blob for Vec<u8> {}
impl Blob for NewBlob {}

/// A blob in pinned memory.
pub(super) struct PinnedBlob {
    device: Arc<Inner>,
    memory: Option<PinnedBuffer>,
    /// Number of bytes that are written.
    written: usize,
}

impl PinnedBlob {
    pub fn new(device: &Arc<Inner>) -> Self {
        Self { device: device.clone(), memory: None, written: 0 }
    }

    pub fn written(&self) -> usize {
        self.written
    }

    /// Returns memory for the next `bytes` bytes. If there is too little memory, gets memory for `expected` bytes in all, or more.
    pub fn reserve(&mut self, bytes: usize, expected: usize) -> Result<&mut [u8]> {
        let end = self.written + bytes;
        if self.memory.as_ref().is_none_or(|memory| memory.len() < end) {
            let cx = self.device.context.enter()?;
            let mut memory = PinnedBuffer::new(&self.device, &cx, end.max(expected))?;
            if let Some(old) = &self.memory {
                memory[..self.written].copy_from_slice(&old[..self.written]);
            }
            self.memory = Some(memory);
        }
        Ok(self.memory.as_mut().map_or(&mut [], |memory| &mut memory[self.written..end]))
    }

    /// The next `bytes` bytes are written.
    pub fn commit(&mut self, bytes: usize) {
        self.written += bytes;
    }

    /// Ends the blob with its header.
    pub fn finish(mut self, header: &[u8; BLOB_HEADER_SIZE as usize]) -> Result<PinnedBuffer> {
        let mut memory = match self.memory.take() {
            Some(memory) => memory,
            None => PinnedBuffer::new(&self.device, &self.device.context.enter()?, self.written)?,
        };
        memory.truncate(self.written);
        memory[..header.len()].copy_from_slice(header);
        Ok(memory)
    }
}

impl Write for PinnedBlob {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.reserve(bytes.len(), 0).map_err(io::Error::other)?.copy_from_slice(bytes);
        self.commit(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Blob for PinnedBlob {
    fn pinned(&mut self) -> Option<&mut PinnedBlob> {
        Some(self)
    }
}
