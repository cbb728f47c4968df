//! Applying where the tensors lie (spec section 13, modes of application).

use super::chunk::{Chunks, Worker, decode};
use super::kept::Kept;
use super::run::{ApplyReport, Run};
use crate::batches::{Pool, in_batches};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, Escaped, Result};
use crate::format::BaseKind;
use crate::index::Tensor;
use crate::reader::Pair;
use crate::source::Source;
use crate::sums::ChunkSum;
use crate::watch::Progress;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// How far an in-place application checks before it writes.
///
/// Only digests detect a forged blob: CRC and chunk sums are linear, and a signed pair digest does not cover payloads. On a CUDA
/// device digests are compared in neither mode, see module `cuda`. The descriptions of the modes are
/// those of the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InPlace {
    /// Decode and check everything first, and only then write: a refused pair leaves the tensors as they were.
    ///
    /// What is written is what was checked, also when the blob changes meanwhile. Payloads are kept in memory between the two
    /// passes, up to 256 MiB of them. The others are read again and compared with their
    /// BLAKE3 digests: a difference is [`Error::Changed`], within [`Error::Poisoned`] if something was written by then. So is
    /// another failure to read them. While all payloads are kept, the second pass reads nothing and cannot fail in this way.
    ///
    /// The bytes of the tensors are not copied. The exclusive borrow keeps the rest of a Rust program from writing them between
    /// the passes. Where other code can reach the memory, the caller must keep it from writing. The second pass detects
    /// such a write by chunk sums only.
    #[default]
    AllChecked,
    /// Check each chunk before it is written, reading everything once: a failure in the middle leaves a mixture, which
    /// [`Error::Poisoned`] tells.
    ///
    /// Compares CRC and chunk sums and no digests, so it does not detect a forged blob.
    ChunkByChunk,
}

/// A tensor to be changed where it lies.
#[derive(Debug)]
pub struct TensorMut<'a> {
    /// Name in the target.
    pub name: &'a str,
    /// Its bytes, row-major and little-endian: the base's before, the target's after.
    pub bytes: &'a mut [u8],
}

/// Tensors in memory seen as a checkpoint, while nobody writes them.
struct Snapshot<'a> {
    infos: Vec<TensorInfo>,
    data: Vec<&'a [u8]>,
}

impl Checkpoint for Snapshot<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read(&self, place: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        // Lengths were compared with the table before this was made.
        out.copy_from_slice(&self.data[place][offset as usize..][..out.len()]);
        Ok(())
    }

    fn in_place(&self, place: usize, offset: u64, size: usize) -> Option<&[u8]> {
        self.data.get(place)?.get(offset as usize..)?.get(..size)
    }
}

/// An application of a pair to tensors in memory.
pub(super) struct InPlaceRun<'a, B> {
    pub pair: &'a Pair<B>,
    pub mode: InPlace,
    /// Whether [`InPlace::AllChecked`] compares digests.
    pub digests: bool,
    /// Bytes of payloads that [`InPlace::AllChecked`] keeps.
    pub keep: u64,
    pub progress: Progress<'a>,
}

impl<B: Source> InPlaceRun<'_, B> {
    /// Changes base tensors to target tensors. Each byte counts once as progress, when it is checked.
    pub fn run(&self, tensors: &mut [TensorMut<'_>]) -> Result<ApplyReport> {
        tensors.sort_by(|a, b| a.name.cmp(b.name));
        self.check(tensors)?;
        let kept = Kept::new(self.pair, self.keep);
        let chunks: &dyn Chunks = match self.mode {
            InPlace::AllChecked => {
                self.on_snapshot(tensors, &kept, |run| run.verify().map(|_| ()))?;
                &kept
            }
            InPlace::ChunkByChunk => self.pair,
        };
        let table = self.pair.index();
        let mut places = Vec::new();
        for tensor in tensors.iter() {
            places.extend(table.find(tensor.name).map(|found| found.place));
        }
        let jobs = tensors.iter_mut().zip(&places).flat_map(|(given, &place)| {
            let tensor = table.tensor(place);
            let chunk_bytes = tensor.chunk_lanes as usize * tensor.lane_bytes();
            tensor.chunks().zip(given.bytes.chunks_mut(chunk_bytes)).map(move |(chunk, lanes)| (tensor, chunk, lanes))
        });
        let workers = Pool::new(Worker::new);
        let written = Mutex::new(Vec::new());
        let changed = AtomicBool::new(false);
        let outcome = in_batches(
            jobs,
            |(_, _, lanes)| lanes.len() as u64,
            |(tensor, chunk, lanes)| {
                workers.with(|worker| commit(chunks, tensor, *chunk, lanes, worker))?;
                written.lock().unwrap_or_else(PoisonError::into_inner).push(*chunk);
                if tensor.base_kind == BaseKind::None || chunks.encoded(*chunk).num_deltas > 0 {
                    changed.store(true, Ordering::Relaxed);
                }
                if self.mode == InPlace::ChunkByChunk { self.progress.done(lanes.len() as u64) } else { Ok(()) }
            },
            |_, ()| Ok(()),
        );
        let mut written = written.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Err(source) = outcome {
            // Chunks that stay as they are count as written: if there are no others, the tensors are still what they were.
            if !changed.into_inner() {
                return Err(self.on_snapshot(tensors, chunks, |run| run.explain_in_order(source)));
            }
            written.sort_unstable();
            let total = places.iter().map(|&place| table.tensor(place).chunk_count).sum();
            return Err(Error::Poisoned { written, total, source: Box::new(source) });
        }
        let bytes = tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum();
        Ok(ApplyReport { tensors: tensors.len() as u64, bytes, digests_checked: self.mode == InPlace::AllChecked && self.digests })
    }

    fn check(&self, tensors: &[TensorMut<'_>]) -> Result<()> {
        let mut before = None;
        for given in tensors {
            let name = Escaped(given.name);
            let tensor = self
                .pair
                .index()
                .find(given.name)
                .ok_or_else(|| Error::InvalidArgument(format!("no tensor {name} in the pair")))?;
            if before.replace(given.name) == Some(given.name) {
                return Err(Error::InvalidArgument(format!("tensor {name} is given twice")));
            }
            if tensor.base_kind == BaseKind::Prefix {
                return Err(Error::InvalidArgument(format!(
                    "tensor {name} changes its number of rows, which cannot be done in place"
                )));
            }
            if given.bytes.len() as u64 != tensor.bytes() {
                return Err(Error::InvalidArgument(format!(
                    "tensor {name} is given with {} bytes, it has {}",
                    given.bytes.len(),
                    tensor.bytes()
                )));
            }
        }
        Ok(())
    }

    /// Calls `work` with a run of `chunks` whose base is the tensors as they are.
    fn on_snapshot<R>(&self, tensors: &[TensorMut<'_>], chunks: &dyn Chunks, work: impl FnOnce(&Run<'_, B>) -> R) -> R {
        let found = tensors.iter().filter_map(|given| Some((self.pair.index().find(given.name)?, &*given.bytes)));
        let (infos, data) = found
            .map(|(tensor, bytes)| {
                let info = TensorInfo { name: tensor.base_name.to_owned(), dtype: tensor.dtype, shape: tensor.shape.to_vec() };
                (info, bytes)
            })
            .unzip();
        let base = Snapshot { infos, data };
        let mut run = Run::new(self.pair, &base, self.progress);
        run.places = tensors.iter().filter_map(|given| Some(self.pair.index().find(given.name)?.place)).collect();
        run.digests = self.digests;
        run.chunks = chunks;
        run.in_order = true; // each tensor is its own base, also where two were made from one
        work(&run)
    }
}

/// Decodes a chunk apart from its lanes, checks it, and only then stores it.
fn commit(chunks: &dyn Chunks, tensor: &Tensor<'_>, chunk: u32, lanes: &mut [u8], worker: &mut Worker) -> Result<()> {
    let first = tensor.chunk_range(chunk).start;
    worker.with_lanes(lanes.len(), |worker, decoded| {
        let fill = |first_lane: u64, block: &mut [u8], sum: &mut ChunkSum| {
            match tensor.base_kind {
                // The lanes begin as zeros, whatever lies there.
                BaseKind::None => {
                    block.fill(0);
                    sum.add(block);
                }
                _ => sum.copy(&lanes[(first_lane - first) as usize * tensor.lane_bytes()..][..block.len()], block),
            }
            Ok(())
        };
        decode(chunks, tensor, chunk, fill, worker, decoded, false)?;
        lanes.copy_from_slice(decoded);
        Ok(())
    })
}

#[cfg(test)]
mod tests;
