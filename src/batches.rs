//! Work on all threads of the pool, in batches whose results come in order.

#![forbid(unsafe_code)]

use crate::checkpoint::Checkpoint;
use crate::digest;
use crate::error::Result;
use crate::watch::Progress;
use blake3::Hash;
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Bytes of lanes that are in work at once: enough chunks to keep all threads busy, few enough to bound memory.
const BATCH_BYTES: u64 = 48 << 20;

/// Works through jobs on all threads of the pool, a batch at a time, and hands the results over in order.
///
/// Memory is bounded by the results of a batch, whatever the number of jobs. The first error in order is returned.
pub(crate) fn in_batches<J: Send, R: Send>(
    jobs: impl IntoIterator<Item = J>,
    bytes: impl Fn(&J) -> u64,
    work: impl Fn(&mut J) -> Result<R> + Sync,
    mut done: impl FnMut(J, R) -> Result<()>,
) -> Result<()> {
    let mut jobs = jobs.into_iter().peekable();
    while jobs.peek().is_some() {
        let mut batch = Vec::new();
        let mut size = 0;
        while let Some(job) = jobs.next_if(|_| size < BATCH_BYTES) {
            size += bytes(&job).max(64); // empty jobs cost something too
            batch.push(job);
        }
        let results: Vec<_> = batch.par_iter_mut().with_max_len(1).map(&work).collect();
        for (job, result) in batch.into_iter().zip(results) {
            done(job, result?)?;
        }
    }
    Ok(())
}

/// Things that a thread takes for a job and puts back: contexts and buffers that are dear to make.
pub(crate) struct Pool<T> {
    free: Mutex<Vec<T>>,
    make: fn() -> T,
}

impl<T> Pool<T> {
    pub fn new(make: fn() -> T) -> Self {
        Self { free: Mutex::new(Vec::new()), make }
    }

    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let free = || self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = free().pop();
        let mut thing = taken.unwrap_or_else(self.make);
        let result = work(&mut thing);
        free().push(thing);
        result
    }
}

/// The hash of a whole tensor of a checkpoint, by all threads.
pub(crate) fn hash_tensor(checkpoint: &dyn Checkpoint, place: usize, progress: Progress<'_>) -> Result<Hash> {
    const PIECE: u64 = 1 << 20;
    let bytes = checkpoint.tensors()[place].bytes();
    let buffers = Pool::new(Vec::new);
    let mut pieces = Vec::new();
    in_batches(
        (0..bytes.div_ceil(PIECE)).map(|i| i * PIECE),
        |_| PIECE,
        |&mut offset| {
            let size = PIECE.min(bytes - offset) as usize;
            progress.done(size as u64)?;
            buffers.with(|buffer| Ok(digest::of_piece(checkpoint.bytes(place, offset, size, buffer)?, offset, bytes)))
        },
        |_, piece| {
            pieces.push(piece);
            Ok(())
        },
    )?;
    Ok(digest::combine(&pieces))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_end_when_they_have_enough_bytes_and_results_come_in_order() {
        // Most jobs that are worked on before the first of them is done, by their bytes.
        let batch = |bytes: u64, jobs: usize| {
            let worked = Mutex::new(0);
            let mut most = 0;
            let mut order = Vec::new();
            in_batches(
                0..jobs,
                |_| bytes,
                |job| {
                    *worked.lock().unwrap() += 1;
                    Ok(*job)
                },
                |job, result| {
                    assert_eq!(job, result);
                    most = most.max(*worked.lock().unwrap() - order.len());
                    order.push(job);
                    Ok(())
                },
            )
            .unwrap();
            assert!(order.iter().copied().eq(0..jobs));
            most
        };
        assert_eq!(batch(BATCH_BYTES, 4), 1);
        assert_eq!(batch(BATCH_BYTES / 2, 5), 2);
        assert_eq!(batch(BATCH_BYTES / 2 + 1, 5), 2);
        assert_eq!(batch(BATCH_BYTES - 1, 5), 2);
        assert_eq!(batch(2 * BATCH_BYTES, 3), 1);
        assert_eq!(batch(0, 3 * (BATCH_BYTES / 64) as usize), (BATCH_BYTES / 64) as usize);
    }
}
