//! Rebuilds ranges of tensors when they are read; the target of a pair as a checkpoint.

use super::chunk::{DecodeWorker, decode};
use super::plan::Plan;
use crate::base::PaddedBase;
use crate::batches::Pool;
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::reader::Pair;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use tpde_core::error::{Error, Result};
use tpde_core::index::Tensor;
use tpde_core::source::Source;
use tpde_core::sums::ChunkSum;

/// Fills a buffer with base lanes of an entry, from a byte of the entry on. Returns the chunk sum of these lanes if it is known.
pub(crate) type FillBase<'a> = &'a dyn Fn(&Tensor<'_>, u64, &mut [u8]) -> Result<Option<u64>>;

/// A chunk of the cache.
struct CachedChunk {
    chunk: u32,
    /// Size of the chunk in bytes.
    size: u64,
    /// Empty until a thread has rebuilt the chunk. Other threads wait for that thread.
    bytes: Arc<Mutex<Vec<u8>>>,
}

/// Maximum number of chunks that are kept, because every read searches them.
const MAX_KEPT: usize = 256;

/// Rebuilds ranges of the entries of a pair. Every rebuilt chunk has passed the checks of its CRC and sums; digests of tensors are
/// not compared.
///
/// A range that is a whole chunk is rebuilt in the buffer of the caller. For other ranges, the most recently used chunks are kept:
/// two per thread, and more up to `kept_bytes`.
pub(crate) struct Rebuilder<'a, B> {
    pair: &'a Pair<B>,
    kept_bytes: u64,
    /// The chunks that were read last, the most recent first.
    recent: Mutex<VecDeque<CachedChunk>>,
    workers: Pool<DecodeWorker>,
}

impl<'a, B: Source> Rebuilder<'a, B> {
    pub fn new(pair: &'a Pair<B>) -> Self {
        Self { pair, kept_bytes: 0, recent: Mutex::default(), workers: Pool::new(DecodeWorker::new) }
    }

    /// Sets how many bytes of chunks are kept, at least.
    pub fn keep(&mut self, bytes: u64) {
        self.kept_bytes = bytes;
    }

    /// Fills `out` with the bytes of an entry from byte `offset` on. If they are a whole chunk, returns its target sum, which has
    /// been compared.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the entry does not have these bytes; [`Error::Invalid`] with the chunk; the errors of `base`.
    pub fn read(&self, entry: usize, offset: u64, mut out: &mut [u8], base: FillBase<'_>) -> Result<Option<u64>> {
        let index = self.pair.index();
        let end = offset.checked_add(out.len() as u64);
        if entry >= index.tensor_count() || end.is_none_or(|end| end > index.tensor(entry).bytes()) {
            return Err(Error::InvalidArgument(format!("tensor {entry} does not have {} bytes from byte {offset} on", out.len())));
        }
        let tensor = index.tensor(entry);
        let chunk_bytes = tensor.chunk_lanes * tensor.lane_bytes() as u64;
        let mut offset = offset;
        let is_one_chunk = offset.is_multiple_of(chunk_bytes) && out.len() as u64 <= chunk_bytes;
        let mut known = None;
        while !out.is_empty() {
            let (number, within) = (offset / chunk_bytes, offset % chunk_bytes);
            let size = chunk_bytes.min(tensor.bytes() - number * chunk_bytes);
            let (part, rest) = out.split_at_mut((size - within).min(out.len() as u64) as usize);
            let chunk = tensor.first_chunk + number as u32;
            if part.len() as u64 == size {
                if !self.copy_kept(chunk, part) {
                    self.rebuild(&tensor, chunk, part, base)?;
                }
                known = is_one_chunk.then(|| index.sums()[chunk as usize].target_sum.get());
            } else {
                let cached = self.kept(chunk, size);
                let mut bytes = cached.lock().unwrap_or_else(PoisonError::into_inner);
                if bytes.is_empty() {
                    let mut rebuilt = vec![0; size as usize];
                    self.rebuild(&tensor, chunk, &mut rebuilt, base)?;
                    *bytes = rebuilt;
                }
                part.copy_from_slice(&bytes[within as usize..][..part.len()]);
            }
            offset += part.len() as u64;
            out = rest;
        }
        Ok(known)
    }

    fn rebuild(&self, tensor: &Tensor<'_>, chunk: u32, out: &mut [u8], base: FillBase<'_>) -> Result<()> {
        let first_lane = tensor.chunk_range(chunk).start;
        let known = base(tensor, first_lane * tensor.lane_bytes() as u64, out)?;
        let fill = |lane, lanes: &mut [u8], sum: &mut ChunkSum| {
            match known {
                // The first block stands for all blocks.
                Some(known) => sum.add_known(lanes.len(), if lane == first_lane { known } else { 0 }),
                None => sum.add(lanes),
            }
            Ok(())
        };
        self.workers.with(|worker| decode(self.pair, tensor, chunk, fill, worker, out, false)).map(drop)
    }

    /// The place of a chunk in the cache.
    fn kept(&self, chunk: u32, size: u64) -> Arc<Mutex<Vec<u8>>> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let known = recent.iter().position(|kept| kept.chunk == chunk).and_then(|i| recent.remove(i));
        let kept = known.unwrap_or_else(|| CachedChunk { chunk, size, bytes: Arc::default() });
        let bytes = kept.bytes.clone();
        recent.push_front(kept);
        let mut total = 0;
        let fits = |kept: &&CachedChunk| {
            total += kept.size;
            total <= self.kept_bytes
        };
        let count = recent.iter().take(MAX_KEPT).take_while(fits).count();
        recent.truncate(count.max(2 * rayon::current_num_threads() + 2));
        bytes
    }

    /// Copies a chunk from the cache, if it is there.
    fn copy_kept(&self, chunk: u32, out: &mut [u8]) -> bool {
        let find = |recent: &VecDeque<CachedChunk>| recent.iter().find(|kept| kept.chunk == chunk).map(|kept| kept.bytes.clone());
        let Some(kept) = find(&self.recent.lock().unwrap_or_else(PoisonError::into_inner)) else { return false };
        let bytes = kept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_rebuilt = bytes.len() == out.len();
        if is_rebuilt {
            out.copy_from_slice(&bytes);
        }
        is_rebuilt
    }
}

/// The target of a pair, with one tensor per entry of the pair.
pub(crate) struct RebuiltTarget<'a, B> {
    rebuilder: Rebuilder<'a, B>,
    base: &'a dyn Checkpoint,
    /// The plan of all entries.
    plan: &'a Plan<'a>,
    tensors: Vec<TensorInfo>,
}

impl<'a, B: Source> RebuiltTarget<'a, B> {
    /// The target that `pair` gives with `base`. The plan has all entries.
    pub fn new(pair: &'a Pair<B>, base: &'a dyn Checkpoint, plan: &'a Plan<'a>) -> Self {
        let info =
            |tensor: Tensor<'_>| TensorInfo { name: tensor.name.to_owned(), dtype: tensor.dtype, shape: tensor.shape.to_vec() };
        Self { rebuilder: Rebuilder::new(pair), base, plan, tensors: pair.index().tensors().map(info).collect() }
    }
}

impl<B: Source> Checkpoint for RebuiltTarget<'_, B> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let base = |tensor: &Tensor<'_>, offset, lanes: &mut [u8]| {
            PaddedBase::new(Some(self.base), self.plan.items[tensor.place].base.as_ref()).read(offset, lanes).map(|()| None)
        };
        self.rebuilder.read(tensor_index, offset, out, &base).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Encode, EncodeOptions, MemoryCheckpoint};

    #[test]
    fn any_range_of_a_rebuilt_tensor_has_the_bytes_of_the_target() {
        let lanes = 3 * 4096 + 100;
        let base: Vec<u8> = (0..2 * lanes).map(|i| (i % 251) as u8).collect();
        let mut target = base.clone();
        // The second chunk does not change.
        target[..8192].iter_mut().step_by(30).for_each(|byte| *byte ^= 1);
        target[3 * 8192 - 50..].iter_mut().step_by(7).for_each(|byte| *byte ^= 1);
        let of = |bytes| {
            let info = TensorInfo { name: "t".into(), dtype: Dtype::U16, shape: vec![lanes] };
            MemoryCheckpoint::new([(info, bytes)]).unwrap()
        };
        let (base, target_checkpoint) = (of(&base[..]), of(&target[..]));
        let options = EncodeOptions { chunk_lanes: 4096, ..EncodeOptions::default() };
        let (pair, _) = Encode::new(&target_checkpoint).base(&base).options(options).to_memory().unwrap();
        let plan = Plan::whole(pair.index().tensors(), &base).unwrap();
        let rebuilt = RebuiltTarget::new(&pair, &base, &plan);
        assert_eq!(rebuilt.tensors(), target_checkpoint.tensors());
        let offsets = [0, 1, 2, 99, 8191, 8192, 8193, 8200, 16384, 16385, 24000, 24575, 24576, 24578, 24775, 24776];
        for (i, &start) in offsets.iter().enumerate() {
            for &end in &offsets[i..] {
                let mut out = vec![0xA5; end - start];
                rebuilt.read(0, start as u64, &mut out).unwrap();
                assert!(out == target[start..end], "{start}..{end}");
            }
        }
        for (tensor_index, offset, size) in [(0, 24776, 1), (0, 24777, 0), (0, u64::MAX, 2), (1, 0, 0)] {
            let outcome = rebuilt.read(tensor_index, offset, &mut vec![0; size]);
            assert!(matches!(outcome, Err(Error::InvalidArgument(_))), "{tensor_index} {offset} {size}");
        }
    }
}
