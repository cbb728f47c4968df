//! The target of a pair as a checkpoint that rebuilds chunks when they are read.

use super::chunk::{DecodeWorker, base_lanes, decode};
use crate::batches::Pool;
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, Result};
use crate::index::Tensor;
use crate::reader::Pair;
use crate::source::Source;
use crate::sums::ChunkSum;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// The target of a pair. Rebuilding a chunk checks its CRC and sums, but no digests.
pub(crate) struct Rebuilt<'a, B> {
    pair: &'a Pair<B>,
    base: &'a dyn Checkpoint,
    /// For each tensor, the position of its base tensor in `base`. Dtypes and shapes have been checked.
    bases: &'a [Option<usize>],
    tensors: Vec<TensorInfo>,
    /// Cache of the last rebuilt chunks, for reads of less than a chunk. At most the number of threads plus one.
    recent: Mutex<VecDeque<(u32, Arc<Vec<u8>>)>>,
    workers: Pool<DecodeWorker>,
}

impl<'a, B: Source> Rebuilt<'a, B> {
    /// The target that `pair` gives with `base`. `bases` has the position of each tensor's base tensor.
    pub fn new(pair: &'a Pair<B>, base: &'a dyn Checkpoint, bases: &'a [Option<usize>]) -> Self {
        let info =
            |tensor: Tensor<'_>| TensorInfo { name: tensor.name.to_owned(), dtype: tensor.dtype, shape: tensor.shape.to_vec() };
        let tensors = pair.index().tensors().map(info).collect();
        Self { pair, base, bases, tensors, recent: Mutex::default(), workers: Pool::new(DecodeWorker::new) }
    }

    fn base_lanes(&self, tensor: &Tensor<'_>, first: u64, lanes: &mut [u8], sum: &mut ChunkSum) -> Result<()> {
        base_lanes(tensor, self.base, self.bases[tensor.place], first, lanes, sum)
    }

    fn rebuild(&self, tensor: &Tensor<'_>, chunk: u32, out: &mut [u8]) -> Result<()> {
        let fill = |first, lanes: &mut [u8], sum: &mut ChunkSum| self.base_lanes(tensor, first, lanes, sum);
        self.workers.with(|worker| decode(self.pair, tensor, chunk, fill, worker, out, false)).map(|_| ())
    }

    /// A complete chunk of `size` bytes, from the cache or rebuilt.
    fn chunk(&self, tensor: &Tensor<'_>, chunk: u32, size: usize) -> Result<Arc<Vec<u8>>> {
        let recent = || self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bytes)) = recent().iter().find(|(known, _)| *known == chunk) {
            return Ok(bytes.clone());
        }
        let mut bytes = vec![0; size];
        self.rebuild(tensor, chunk, &mut bytes)?;
        let bytes = Arc::new(bytes);
        let mut recent = recent();
        recent.truncate(rayon::current_num_threads());
        recent.push_front((chunk, bytes.clone()));
        Ok(bytes)
    }
}

impl<B: Source> Checkpoint for Rebuilt<'_, B> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn read(&self, tensor_index: usize, offset: u64, mut out: &mut [u8]) -> Result<()> {
        let index = self.pair.index();
        let end = offset.checked_add(out.len() as u64);
        if tensor_index >= index.tensor_count() || end.is_none_or(|end| end > index.tensor(tensor_index).bytes()) {
            return Err(Error::InvalidArgument(format!(
                "tensor {tensor_index} does not have {} bytes from byte {offset} on",
                out.len()
            )));
        }
        let tensor = index.tensor(tensor_index);
        let width = tensor.lane_bytes() as u64;
        let chunk_bytes = tensor.chunk_lanes * width;
        let mut offset = offset;
        while !out.is_empty() {
            let (number, within) = (offset / chunk_bytes, offset % chunk_bytes);
            let size = chunk_bytes.min(tensor.bytes() - number * chunk_bytes);
            let (part, rest) = out.split_at_mut((size - within).min(out.len() as u64) as usize);
            let chunk = tensor.first_chunk + number as u32;
            let unchanged = index.records()[chunk as usize].num_deltas.get() == 0;
            if part.len() as u64 == size {
                self.rebuild(&tensor, chunk, part)?;
            } else if unchanged && offset.is_multiple_of(width) && (part.len() as u64).is_multiple_of(width) {
                self.base_lanes(&tensor, offset / width, part, &mut ChunkSum::default())?;
            } else {
                let bytes = self.chunk(&tensor, chunk, size as usize)?;
                part.copy_from_slice(&bytes[within as usize..][..part.len()]);
            }
            offset += part.len() as u64;
            out = rest;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apply::chunk::find_base;
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
        let bases: Vec<_> = pair.index().tensors().map(|tensor| find_base(&tensor, &base).unwrap()).collect();
        let rebuilt = Rebuilt::new(&pair, &base, &bases);
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
