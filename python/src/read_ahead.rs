//! Payloads that threads of the pool read to pinned memory while the interpreter describes tensors.

use crate::later::Later;
use rayon::prelude::*;
use std::sync::Arc;
use tpde::{FileSource, Pair, Result, Source};
use tpde_cuda::{Device, PinnedBuffer};

/// Maximum size in bytes of a blob that is read ahead. The device keeps pinned memory for later calls.
const MAX_BYTES: u64 = 64 << 20;
/// Size in bytes of what a thread reads at a time.
const PIECE: usize = 256 << 10;

/// A blob that is being read to pinned memory.
#[derive(Clone)]
pub struct ReadAhead(Arc<Later<Option<Arc<PinnedBuffer>>>>);

impl ReadAhead {
    /// Starts to read the blob of a pair. `None` if it is too large, or if no thread can start.
    pub fn start(device: &Device, pair: &Arc<Pair<FileSource>>) -> Option<Self> {
        if pair.blob().size() > MAX_BYTES {
            return None;
        }
        let (device, pair) = (device.clone(), pair.clone());
        Later::start(move || read(&device, pair.blob()).ok().map(Arc::new)).map(Self)
    }

    /// Waits until the read has ended. Returns `None` after an error. Must not be called on a thread of the pool.
    pub fn wait(&self) -> Option<Arc<PinnedBuffer>> {
        self.0.get().flatten()
    }
}

fn read(device: &Device, blob: &FileSource) -> Result<PinnedBuffer> {
    let mut buffer = device.pinned(blob.size() as usize)?;
    if rayon::current_thread_index().is_none() {
        // The thread that waits reads by itself: all threads of the pool are busy.
        blob.read(0, &mut buffer)?;
        return Ok(buffer);
    }
    let pieces = buffer.par_chunks_mut(PIECE).enumerate();
    pieces.try_for_each(|(i, piece)| blob.read((i * PIECE) as u64, piece))?;
    Ok(buffer)
}
