//! Applies a pair to tensors in memory, in place (spec section 13, modes of application).

use super::chunk::{Chunks, DecodeWorker, decode};
use super::kept::Kept;
use super::payloads::Compared;
use super::run::{ApplyReport, Run};
use crate::batches::{Pool, in_batches};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::cut::{Cut, Piece};
use crate::reader::Pair;
use crate::watch::{NoProgress, Progress};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::BaseKind;
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::rectangle::{Rectangle, Runs};
use tpde_core::source::Source;
use tpde_core::sums::ChunkSum;

/// The checks that an application in place makes before it writes.
///
/// Only digests detect a forged blob, because CRC and chunk sums are linear. If the pair digest covers the payloads (format 1.2),
/// both modes compare digests of payloads before they write: if the index does not store them, all payloads of the pair are
/// hashed first, and each again when it is decoded. The descriptions of the modes hold for the CPU. On a CUDA device both
/// modes compare digests of targets, and chunk by chunk, some chunks are written before they are checked, and restored if a
/// check fails; see module `cuda`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InPlace {
    /// Decode and check everything in a first pass, then write in a second pass. If a check fails, the tensors are unchanged.
    ///
    /// The bytes written are the bytes checked, even if the blob changes between the passes. Up to 256 MiB of payloads are kept
    /// in memory. Other payloads are read again in the second pass and compared with the BLAKE3 digest from the first. A
    /// difference is [`Error::Changed`], and a failed read is [`Error::Io`]; either is wrapped in [`Error::Poisoned`] if a tensor
    /// has already changed. If all payloads are kept, the second pass does not read the blob and cannot fail in these ways.
    ///
    /// The bytes of the tensors are not copied. The exclusive borrow prevents other Rust code from writing to them between the
    /// passes. If foreign code can reach the memory, the caller must prevent it from writing, because the second pass detects
    /// such a write only by chunk sums.
    #[default]
    AllChecked,
    /// Check each chunk just before it is written, in one pass. An error after the first write leaves a mixture of base and
    /// target and is reported as [`Error::Poisoned`].
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
        let indexes: Vec<_> = tensors.iter().flat_map(|tensor| index.entries(tensor.name).map(|entry| entry.place)).collect();
        // The chunks of a tensor are disjoint ranges of its memory. Those of a part are scattered over the memory of its tensor,
        // so all parts of a tensor share that memory.
        let (with_parts, whole): (Vec<_>, Vec<_>) = tensors.iter_mut().partition(|memory| has_parts(index, memory.name));
        let with_parts: Vec<_> = with_parts.into_iter().map(|memory| (memory.name, RwLock::new(&mut *memory.bytes))).collect();
        let whole = whole.into_iter().filter_map(|memory| Some((index.find(memory.name)?, &mut *memory.bytes)));
        let jobs_of_whole = whole.flat_map(|(tensor, bytes)| {
            let chunk_bytes = tensor.chunk_lanes as usize * tensor.lane_bytes();
            let lanes = bytes.chunks_mut(chunk_bytes);
            tensor.chunks().zip(lanes).map(move |(chunk, lanes)| Job { tensor, chunk, lanes: Lanes::Whole(lanes) })
        });
        let jobs_of_parts = with_parts.iter().flat_map(|(name, memory)| {
            index.entries(name).flat_map(move |tensor| {
                let runs = tensor.runs().map(Arc::new);
                let job = move |chunk| Some(Job { tensor, chunk, lanes: Lanes::OfPart(memory, runs.clone()?) });
                tensor.chunks().filter_map(job).collect::<Vec<_>>()
            })
        });
        let workers = Pool::new(DecodeWorker::new);
        let written = Mutex::new(Vec::new());
        let changed = AtomicBool::new(false);
        let note = |tensor: &Tensor<'_>, chunk: u32| {
            written.lock().unwrap_or_else(PoisonError::into_inner).push(chunk);
            if tensor.base_kind == BaseKind::None || chunks.encoded(chunk).num_deltas > 0 {
                changed.store(true, Ordering::Relaxed);
            }
        };
        let outcome = in_batches(
            jobs_of_whole.chain(jobs_of_parts),
            Job::bytes,
            |job| {
                let (size, tensor, chunk) = (job.bytes(), job.tensor, job.chunk);
                let decoded = match &mut job.lanes {
                    Lanes::Whole(lanes) => {
                        workers.with(|worker| commit(chunks, &tensor, chunk, lanes, worker))?;
                        note(&tensor, chunk);
                        None
                    }
                    Lanes::OfPart(memory, runs) => {
                        let memory = memory.read().unwrap_or_else(PoisonError::into_inner);
                        Some(workers.with(|worker| decode_part(chunks, &tensor, chunk, &memory, runs, worker))?)
                    }
                };
                if self.mode == InPlace::ChunkByChunk {
                    self.progress.done(size)?;
                }
                Ok(decoded)
            },
            |job, decoded| {
                if let (Lanes::OfPart(memory, runs), Some(decoded)) = (&job.lanes, decoded) {
                    let mut memory = memory.write().unwrap_or_else(PoisonError::into_inner);
                    let offset = job.tensor.chunk_range(job.chunk).start * job.tensor.lane_bytes() as u64;
                    runs.try_each(offset, decoded.len(), |at, range| {
                        memory[at as usize..][..range.len()].copy_from_slice(&decoded[range]);
                        Ok::<_, Error>(())
                    })?;
                    note(&job.tensor, job.chunk);
                }
                Ok(())
            },
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
            removed: Vec::new(),
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
            self.pair.index().entries(memory.name).try_for_each(|entry| check_in_place(&entry))?;
            self.pair.index().check_has(memory.name, &Rectangle::whole(tensor.whole_shape()))?;
            let whole = TensorInfo { name: String::new(), dtype: tensor.dtype, shape: tensor.whole_shape().to_vec() };
            let (expected, found) = (whole.bytes(), memory.bytes.len());
            if found as u64 != expected {
                return Err(Error::InvalidArgument(format!("tensor {name} has {found} bytes in memory, expected {expected}")));
            }
        }
        Ok(())
    }

    /// Calls `work` with a run over `chunks` that uses the tensors in memory as its base.
    fn on_snapshot<R>(&self, tensors: &[TensorMut<'_>], chunks: &dyn Chunks, work: impl FnOnce(&Run<'_, B>) -> R) -> R {
        let index = self.pair.index();
        let snapshot = tensors.iter().filter_map(|memory| Some((index.find(memory.name)?, &*memory.bytes)));
        let (infos, data) = snapshot
            .map(|(tensor, bytes)| {
                let shape = tensor.whole_shape().to_vec();
                (TensorInfo { name: tensor.base_name.to_owned(), dtype: tensor.dtype, shape }, bytes)
            })
            .unzip();
        let base = Snapshot { infos, data };
        let mut cut = Cut::new(&base);
        let mut selected = Vec::new();
        for (number, memory) in tensors.iter().enumerate() {
            for tensor in index.entries(memory.name) {
                let info = TensorInfo { shape: tensor.shape.to_vec(), ..base.infos[number].clone() };
                cut.push(info, Piece::of(number, tensor.runs()));
                selected.push(tensor.place);
            }
        }
        let mut run = Run::new(self.pair, &cut, self.progress);
        run.selected = selected;
        run.digests = self.digests;
        run.chunks = chunks;
        run.in_order = true; // each tensor is its own base; two may have the same base name
        work(&run)
    }
}

/// Checks that memory of an entry's base can hold its target.
///
/// # Errors
/// [`Error::InvalidArgument`] if the base is longer or shorter.
pub(super) fn check_in_place(entry: &Tensor<'_>) -> Result<()> {
    let reason = match entry.base_kind {
        BaseKind::None | BaseKind::Same => return Ok(()),
        BaseKind::Prefix => "changes its number of rows, which cannot be done in place".to_owned(),
        BaseKind::Cast | BaseKind::Dequantised => {
            let (from, to) = (entry.base_dtype(), entry.dtype);
            format!("has a base of {from} and a target of {to}, which cannot be changed in place: rebuild it in other memory")
        }
    };
    Err(Error::InvalidArgument(format!("tensor {} {reason}", Escaped(entry.name))))
}

/// Whether the pair has parts of the tensor of this name.
fn has_parts(index: &ValidatedIndex, name: &str) -> bool {
    index.find(name).is_some_and(|tensor| tensor.part.is_some())
}

/// A chunk to decode, and where its lanes are.
struct Job<'a> {
    tensor: Tensor<'a>,
    chunk: u32,
    lanes: Lanes<'a>,
}

enum Lanes<'a> {
    /// The lanes of a chunk of a whole tensor.
    Whole(&'a mut [u8]),
    /// The memory of a tensor with parts, and the part's bytes in it.
    OfPart(&'a RwLock<&'a mut [u8]>, Arc<Runs>),
}

impl Job<'_> {
    fn bytes(&self) -> u64 {
        let range = self.tensor.chunk_range(self.chunk);
        (range.end - range.start) * self.tensor.lane_bytes() as u64
    }
}

/// Decodes a chunk of a part. `memory` is that of the whole tensor.
fn decode_part(
    chunks: &dyn Chunks,
    tensor: &Tensor<'_>,
    chunk: u32,
    memory: &[u8],
    runs: &Runs,
    worker: &mut DecodeWorker,
) -> Result<Vec<u8>> {
    let range = tensor.chunk_range(chunk);
    let width = tensor.lane_bytes();
    let mut decoded = vec![0; (range.end - range.start) as usize * width];
    let fill = |first_lane: u64, block: &mut [u8], sum: &mut ChunkSum| {
        if tensor.base_kind == BaseKind::None {
            block.fill(0);
        } else {
            runs.try_each(first_lane * width as u64, block.len(), |at, range| {
                let size = range.len();
                block[range].copy_from_slice(&memory[at as usize..][..size]);
                Ok::<_, Error>(())
            })?;
        }
        sum.add(block);
        Ok(())
    };
    decode(chunks, tensor, chunk, fill, worker, &mut decoded, false)?;
    Ok(decoded)
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
