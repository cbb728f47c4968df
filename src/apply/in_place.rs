//! Applies a pair to tensors in memory, in place (spec section 13, modes of application).

use super::chunk::{Chunks, DecodeWorker, decode};
use super::kept::Kept;
use super::payloads::Compared;
use super::run::{ApplyReport, Run};
use crate::batches::{Pool, in_batches};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, Escaped, Result};
use crate::format::BaseKind;
use crate::index::Tensor;
use crate::reader::Pair;
use crate::source::Source;
use crate::sums::ChunkSum;
use crate::watch::{NoProgress, Progress};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The checks that an application in place makes before it writes.
///
/// Only digests detect a forged blob, because CRC and chunk sums are linear. If the pair digest covers the payloads (format 1.2),
/// both modes compare digests of payloads before they write: if the index does not store them, all payloads of the pair are
/// hashed first, and each again when it is decoded. The descriptions of the modes hold for the CPU. On a CUDA device neither mode
/// compares digests; see module `cuda`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InPlace {
    /// Decode and check everything in a first pass, then write in a second pass. If a check fails, the tensors are unchanged.
    ///
    /// The bytes written are the bytes checked, even if the blob changes between the passes. Up to 256 MiB of payloads are kept in
    /// memory. Other payloads are read again in the second pass and compared with the BLAKE3 digest from the first. A difference
    /// is [`Error::Changed`], and a failed read is [`Error::Io`]; either is wrapped in [`Error::Poisoned`] if a tensor has already
    /// changed. If all payloads are kept, the second pass does not read the blob and cannot fail in these ways.
    ///
    /// The bytes of the tensors are not copied. The exclusive borrow prevents other Rust code from writing to them between the
    /// passes. If foreign code can reach the memory, the caller must prevent it from writing, because the second pass detects
    /// such a write only by chunk sums.
    #[default]
    AllChecked,
    /// Check each chunk just before it is written, in one pass. An error after the first write leaves a mixture of base and target
    /// and is reported as [`Error::Poisoned`].
    ///
    /// Compares CRC and chunk sums but no digests of tensors. It detects a forged blob only from format 1.2 on.
    ChunkByChunk,
}

/// A tensor to be changed in place.
#[derive(Debug)]
pub struct TensorMut<'a> {
    /// Name in the target.
    pub name: &'a str,
    /// The tensor's bytes, row-major and little-endian: base bytes before the call, target bytes after it.
    pub bytes: &'a mut [u8],
}

/// The caller's tensors as a checkpoint, used while nothing writes to them.
struct Snapshot<'a> {
    infos: Vec<TensorInfo>,
    data: Vec<&'a [u8]>,
}

impl Checkpoint for Snapshot<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        // `InPlaceRun::check` has compared the lengths with the index.
        out.copy_from_slice(&self.data[tensor_index][offset as usize..][..out.len()]);
        Ok(())
    }

    fn in_place(&self, tensor_index: usize, offset: u64, size: usize) -> Option<&[u8]> {
        self.data.get(tensor_index)?.get(offset as usize..)?.get(..size)
    }
}

/// An application of a pair to tensors in memory.
pub(super) struct InPlaceRun<'a, B> {
    pub pair: &'a Pair<B>,
    pub mode: InPlace,
    /// Whether [`InPlace::AllChecked`] compares digests of tensors.
    pub digests: bool,
    /// Maximum size, in bytes, of the payloads that [`InPlace::AllChecked`] keeps.
    pub max_kept_bytes: u64,
    pub progress: Progress<'a>,
}

impl<B: Source> InPlaceRun<'_, B> {
    /// Changes base tensors to target tensors. Progress counts each byte once: when it is checked, in the first pass.
    pub fn run(&self, tensors: &mut [TensorMut<'_>]) -> Result<ApplyReport> {
        tensors.sort_by(|a, b| a.name.cmp(b.name));
        self.check(tensors)?;
        // Without a payload list in the index, one payload cannot be compared before all were hashed, and nothing may be written
        // before it is compared.
        self.pair.authenticate(&NoProgress(self.progress))?;
        let kept = Kept::new(self.pair, self.max_kept_bytes);
        let chunks: &dyn Chunks = match self.mode {
            InPlace::AllChecked => {
                self.on_snapshot(tensors, &kept, |run| run.verify().map(|_| ()))?;
                &kept
            }
            InPlace::ChunkByChunk => self.pair,
        };
        let index = self.pair.index();
        let mut indexes = Vec::new();
        for tensor in tensors.iter() {
            indexes.extend(index.find(tensor.name).map(|tensor| tensor.place));
        }
        let jobs = tensors.iter_mut().zip(&indexes).flat_map(|(memory, &tensor_index)| {
            let tensor = index.tensor(tensor_index);
            let chunk_bytes = tensor.chunk_lanes as usize * tensor.lane_bytes();
            tensor.chunks().zip(memory.bytes.chunks_mut(chunk_bytes)).map(move |(chunk, lanes)| (tensor, chunk, lanes))
        });
        let workers = Pool::new(DecodeWorker::new);
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
            // `written` includes unchanged chunks. If it has no others, the tensors still equal the base.
            if !changed.into_inner() {
                return Err(self.on_snapshot(tensors, chunks, |run| run.explain_in_order(source)));
            }
            written.sort_unstable();
            let total = indexes.iter().map(|&i| index.tensor(i).chunk_count).sum();
            return Err(Error::Poisoned { written, total, source: Box::new(source) });
        }
        let bytes = tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum();
        let chunks_read = indexes.iter().flat_map(|&i| index.tensor(i).chunks());
        Ok(ApplyReport {
            tensors: tensors.len() as u64,
            bytes,
            digests_checked: self.mode == InPlace::AllChecked && self.digests,
            payload_digests: Compared::new(self.pair, chunks_read).finish()?,
        })
    }

    fn check(&self, tensors: &[TensorMut<'_>]) -> Result<()> {
        let mut previous = None;
        for memory in tensors {
            let name = Escaped(memory.name);
            let tensor = self
                .pair
                .index()
                .find(memory.name)
                .ok_or_else(|| Error::InvalidArgument(format!("no tensor {name} in the pair")))?;
            if previous.replace(memory.name) == Some(memory.name) {
                return Err(Error::InvalidArgument(format!("tensor {name} occurs twice in the arguments")));
            }
            if tensor.base_kind == BaseKind::Prefix {
                return Err(Error::InvalidArgument(format!(
                    "tensor {name} changes its number of rows, which cannot be done in place"
                )));
            }
            if memory.bytes.len() as u64 != tensor.bytes() {
                return Err(Error::InvalidArgument(format!(
                    "tensor {name} has {} bytes in memory, expected {}",
                    memory.bytes.len(),
                    tensor.bytes()
                )));
            }
        }
        Ok(())
    }

    /// Calls `work` with a run over `chunks` that uses the tensors in memory as its base.
    fn on_snapshot<R>(&self, tensors: &[TensorMut<'_>], chunks: &dyn Chunks, work: impl FnOnce(&Run<'_, B>) -> R) -> R {
        let snapshot = tensors.iter().filter_map(|memory| Some((self.pair.index().find(memory.name)?, &*memory.bytes)));
        let (infos, data) = snapshot
            .map(|(tensor, bytes)| {
                let info = TensorInfo { name: tensor.base_name.to_owned(), dtype: tensor.dtype, shape: tensor.shape.to_vec() };
                (info, bytes)
            })
            .unzip();
        let base = Snapshot { infos, data };
        let mut run = Run::new(self.pair, &base, self.progress);
        run.selected = tensors.iter().filter_map(|tensor| Some(self.pair.index().find(tensor.name)?.place)).collect();
        run.digests = self.digests;
        run.chunks = chunks;
        run.in_order = true; // each tensor is its own base; two may have the same base name
        work(&run)
    }
}

/// Decodes a chunk into a buffer, checks it, and only then writes its lanes.
fn commit(chunks: &dyn Chunks, tensor: &Tensor<'_>, chunk: u32, lanes: &mut [u8], worker: &mut DecodeWorker) -> Result<()> {
    let first = tensor.chunk_range(chunk).start;
    worker.with_lanes(lanes.len(), |worker, decoded| {
        let fill = |first_lane: u64, block: &mut [u8], sum: &mut ChunkSum| {
            match tensor.base_kind {
                // The base lanes are zeros, not the bytes in memory.
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
