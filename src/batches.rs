//! Runs jobs on all threads of the pool, in batches, and returns their results in order.

#![forbid(unsafe_code)]

use crate::checkpoint::Checkpoint;
use crate::cut::Piece;
use crate::watch::Progress;
use blake3::Hash;
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};
use tpde_core::digest;
use tpde_core::error::Result;

/// Size of a batch, in bytes of lanes. A batch has enough chunks to keep all threads busy, and few enough to bound memory.
const BATCH_BYTES: u64 = 48 << 20;

/// Runs jobs on all threads of the pool, one batch at a time, and passes the results to `done` in order.
///
/// Memory is bounded by the results of one batch, for any number of jobs. Returns the first error in the order of the jobs.
pub(crate) fn in_batches<J: Send, R: Send>(
    jobs: impl IntoIterator<Item = J>,
    bytes: impl Fn(&J) -> u64,
    work: impl Fn(&mut J) -> Result<R> + Sync,
    done: impl FnMut(J, R) -> Result<()>,
) -> Result<()> {
    in_batches_of(BATCH_BYTES, jobs, bytes, work, done)
}

/// [`in_batches`] with batches of at least `batch_bytes` bytes.
pub(crate) fn in_batches_of<J: Send, R: Send>(
    batch_bytes: u64,
    jobs: impl IntoIterator<Item = J>,
    bytes: impl Fn(&J) -> u64,
    work: impl Fn(&mut J) -> Result<R> + Sync,
    mut done: impl FnMut(J, R) -> Result<()>,
) -> Result<()> {
    batches_of(batch_bytes, jobs, bytes).try_for_each(|batch| in_parallel(batch, &work, &mut done))
}

/// Divides jobs into batches. For callers that prepare each batch.
pub(crate) fn batches<J>(jobs: impl IntoIterator<Item = J>, bytes: impl Fn(&J) -> u64) -> impl Iterator<Item = Vec<J>> {
    batches_of(BATCH_BYTES, jobs, bytes)
}

fn batches_of<J>(batch_bytes: u64, jobs: impl IntoIterator<Item = J>, bytes: impl Fn(&J) -> u64) -> impl Iterator<Item = Vec<J>> {
    let mut jobs = jobs.into_iter().peekable();
    std::iter::from_fn(move || {
        let mut batch = Vec::new();
        let mut size = 0;
        while let Some(job) = jobs.next_if(|_| size < batch_bytes) {
            size += bytes(&job).max(64); // an empty job has a cost too
            batch.push(job);
        }
        (!batch.is_empty()).then_some(batch)
    })
}

/// Runs the jobs of a batch on all threads of the pool, and passes the results to `done` in order. Returns the first error in the
/// order of the jobs.
pub(crate) fn in_parallel<J: Send, R: Send>(
    mut batch: Vec<J>,
    work: impl Fn(&mut J) -> Result<R> + Sync,
    mut done: impl FnMut(J, R) -> Result<()>,
) -> Result<()> {
    let results: Vec<_> = batch.par_iter_mut().with_max_len(1).map(&work).collect();
    batch.into_iter().zip(results).try_for_each(|(job, result)| done(job, result?))
}

/// Pool of contexts or buffers that are expensive to create. A thread takes an item for a job, and returns the item after it.
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
        let reused = free().pop();
        let mut item = reused.unwrap_or_else(self.make);
        let result = work(&mut item);
        free().push(item);
        result
    }
}

/// Hashes a piece of a checkpoint on all threads.
pub(crate) fn hash_piece(of: &dyn Checkpoint, piece: &Piece, progress: Progress<'_>) -> Result<Hash> {
    const PIECE: u64 = 1 << 20;
    let bytes = piece.size(of);
    let buffers = Pool::new(Vec::new);
    let mut pieces = Vec::new();
    in_batches(
        (0..bytes.div_ceil(PIECE)).map(|i| i * PIECE),
        |_| PIECE,
        |&mut offset| {
            let size = PIECE.min(bytes - offset) as usize;
            progress.done(size as u64)?;
            buffers.with(|buffer| Ok(digest::of_piece(piece.bytes(of, offset, size, buffer)?, offset, bytes)))
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
        // Returns the number of jobs that run before the first result is passed to `done`, for jobs of `bytes` bytes.
        let batch = |bytes: u64, jobs: usize| {
            let run = Mutex::new(0);
            let mut largest = 0;
            let mut order = Vec::new();
            in_batches(
                0..jobs,
                |_| bytes,
                |job| {
                    *run.lock().unwrap() += 1;
                    Ok(*job)
                },
                |job, result| {
                    assert_eq!(job, result);
                    largest = largest.max(*run.lock().unwrap() - order.len());
                    order.push(job);
                    Ok(())
                },
            )
            .unwrap();
            assert!(order.iter().copied().eq(0..jobs));
            largest
        };
        assert_eq!(batch(BATCH_BYTES, 4), 1);
        assert_eq!(batch(BATCH_BYTES / 2, 5), 2);
        assert_eq!(batch(BATCH_BYTES / 2 + 1, 5), 2);
        assert_eq!(batch(BATCH_BYTES - 1, 5), 2);
        assert_eq!(batch(2 * BATCH_BYTES, 3), 1);
        assert_eq!(batch(0, 3 * (BATCH_BYTES / 64) as usize), (BATCH_BYTES / 64) as usize);
    }
}
