//! Payloads that threads of the pool read to pinned memory while the interpreter describes tensors.

use crate::run::spawn;
use rayon::prelude::*;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use tpde::cuda::{Device, PinnedBuffer};
use tpde::{FileSource, Pair, Result, Source};

/// Maximum size in bytes of a blob that is read ahead. The device keeps pinned memory for later calls.
const MAX_BYTES: u64 = 64 << 20;
/// Size in bytes of what a thread reads at a time.
const PIECE: usize = 256 << 10;

/// A blob that is being read to pinned memory.
#[derive(Default)]
pub struct ReadAhead {
    /// Set when the read has ended: the bytes, or `None` after an error.
    read: Mutex<Option<Option<Arc<PinnedBuffer>>>>,
    has_ended: Condvar,
}

impl ReadAhead {
    /// Starts to read the blob of a pair. `None` if it is too large, or if no thread can start.
    pub fn start(device: &Device, pair: &Arc<Pair<FileSource>>) -> Option<Arc<Self>> {
        if pair.blob().size() > MAX_BYTES {
            return None;
        }
        let this = Arc::new(Self::default());
        // Ends the read also if it panics.
        let (end, device, pair) = (End(this.clone()), device.clone(), pair.clone());
        spawn(move || end.with(read(&device, pair.blob()).ok())).ok()?;
        Some(this)
    }

    /// Waits until the read has ended. Returns `None` after an error.
    pub fn wait(&self) -> Option<Arc<PinnedBuffer>> {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let read = self.has_ended.wait_while(read, |read| read.is_none()).unwrap_or_else(PoisonError::into_inner);
        read.clone().flatten()
    }
}

/// Ends a read, with an error unless it has ended before.
struct End(Arc<ReadAhead>);

impl End {
    fn with(&self, read: Option<PinnedBuffer>) {
        self.0.read.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| read.map(Arc::new));
        self.0.has_ended.notify_all();
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.with(None);
    }
}

fn read(device: &Device, blob: &FileSource) -> Result<PinnedBuffer> {
    let mut buffer = device.pinned(blob.size() as usize)?;
    let pieces = buffer.par_chunks_mut(PIECE).enumerate();
    pieces.try_for_each(|(i, piece)| blob.read((i * PIECE) as u64, piece))?;
    Ok(buffer)
}
