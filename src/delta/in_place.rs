//! Applying where the tensors lie (spec section 13, modes of application).

use super::apply::{Apply, ApplyReport};
use super::chunk::{Chunks, Worker, decode};
use super::kept::{KEPT_PAYLOADS, Kept};
use super::{Pool, Progress, in_batches};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, Escaped, Result};
use crate::format::BaseKind;
use crate::index::Tensor;
use crate::reader::Pair;
use crate::source::Source;
use crate::sums::ChunkSum;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// How far an in-place application checks before it writes.
///
/// Only digests detect a forged blob: CRC and chunk sums are linear, and a signed pair digest does not cover payloads. On a CUDA
/// device digests are compared in neither mode, see module `cuda`. The descriptions of the modes are
/// those of the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InPlace {
    /// Decode and check everything first, and only then write: a refused pair leaves the tensors as they were.
    ///
    /// What is written is what was checked, also when the blob changes meanwhile. Payloads are kept in memory between the two
    /// passes, up to [`KEPT_PAYLOADS`](super::KEPT_PAYLOADS) bytes of them. The others are read again and compared with their
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

impl<B: Source> Pair<B> {
    /// Turns base tensors into target tensors where they lie: the tensors given, in any order. Others of the pair are left.
    ///
    /// Digests are compared with [`InPlace::AllChecked`] only; see [`InPlace`] for what that means for a forged blob.
    ///
    /// # Errors
    /// With [`InPlace::AllChecked`], [`Error::WrongBase`], [`Error::AlreadyApplied`], [`Error::Invalid`] or [`Error::Io`] and
    /// nothing is written; with [`InPlace::ChunkByChunk`], and for blobs that change or fail between the passes of
    /// [`InPlace::AllChecked`], [`Error::Poisoned`] if something was. [`Error::Misuse`] for a tensor that is not in the pair, is
    /// given twice, has another length, or changes its number of rows.
    pub fn apply_in_place(&self, tensors: &mut [TensorMut<'_>], mode: InPlace) -> Result<ApplyReport> {
        self.apply_in_place_with(tensors, mode, &|_| {})
    }

    /// [`Pair::apply_in_place`], watched: each byte counts once, when it is checked.
    ///
    /// With [`InPlace::AllChecked`], `progress` cannot end what has begun to write.
    ///
    /// # Errors
    /// As [`Pair::apply_in_place`], and what `progress` ends the work with.
    pub fn apply_in_place_with(&self, tensors: &mut [TensorMut<'_>], mode: InPlace, progress: Progress<'_>) -> Result<ApplyReport> {
        self.apply_in_place_keeping(tensors, mode, KEPT_PAYLOADS, progress)
    }

    /// [`Pair::apply_in_place_with`] that keeps at most `limit` bytes of payloads.
    fn apply_in_place_keeping(
        &self,
        tensors: &mut [TensorMut<'_>],
        mode: InPlace,
        limit: u64,
        progress: Progress<'_>,
    ) -> Result<ApplyReport> {
        tensors.sort_by(|a, b| a.name.cmp(b.name));
        self.check_in_place(tensors)?;
        let kept = Kept::new(self, limit);
        let chunks: &dyn Chunks = match mode {
            InPlace::AllChecked => {
                self.on_snapshot(tensors, &kept, progress, |apply| apply.verify().map(|_| ()))?;
                &kept
            }
            InPlace::ChunkByChunk => self,
        };
        let table = self.index();
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
                if mode == InPlace::ChunkByChunk { progress.done(lanes.len() as u64) } else { Ok(()) }
            },
            |_, ()| Ok(()),
        );
        let mut written = written.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Err(source) = outcome {
            // Chunks that stay as they are count as written: if there are no others, the tensors are still what they were.
            if !changed.into_inner() {
                return Err(self.on_snapshot(tensors, chunks, progress, |apply| apply.explain_in_order(source)));
            }
            written.sort_unstable();
            let total = places.iter().map(|&place| table.tensor(place).chunk_count).sum();
            return Err(Error::Poisoned { written, total, source: Box::new(source) });
        }
        let bytes = tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum();
        Ok(ApplyReport { tensors: tensors.len() as u64, bytes, digests_checked: mode == InPlace::AllChecked })
    }

    /// What `error` means of an application by other means, of tensors of these names: an error about the sum of a base chunk
    /// is [`Error::WrongBase`] or [`Error::AlreadyApplied`] if digests say so, which are formed for that; others are themselves.
    ///
    /// `base` has the base tensors, or, for an application in place, what lies where the tensors are to be, under the names of
    /// the target.
    #[must_use]
    pub fn explain(&self, error: Error, names: &[&str], base: &dyn Checkpoint, in_place: bool, progress: Progress<'_>) -> Error {
        let apply = Apply::new(self, base).tensors(|name| names.contains(&name)).progress(progress);
        let bases = apply.selected().map(|tensor| match in_place {
            true => base.find(tensor.name),
            false => base.find(tensor.base_name).filter(|_| tensor.base_kind != BaseKind::None),
        });
        apply.explain(error, &bases.collect::<Vec<_>>())
    }

    fn check_in_place(&self, tensors: &[TensorMut<'_>]) -> Result<()> {
        let mut before = None;
        for given in tensors {
            let name = Escaped(given.name);
            let tensor = self.index().find(given.name).ok_or_else(|| Error::Misuse(format!("no tensor {name} in the pair")))?;
            if before.replace(given.name) == Some(given.name) {
                return Err(Error::Misuse(format!("tensor {name} is given twice")));
            }
            if tensor.base_kind == BaseKind::Prefix {
                return Err(Error::Misuse(format!("tensor {name} changes its number of rows, which cannot be done in place")));
            }
            if given.bytes.len() as u64 != tensor.bytes() {
                return Err(Error::Misuse(format!(
                    "tensor {name} is given with {} bytes, it has {}",
                    given.bytes.len(),
                    tensor.bytes()
                )));
            }
        }
        Ok(())
    }

    /// Works with an application of `chunks` to the tensors as they lie.
    fn on_snapshot<R>(
        &self,
        tensors: &[TensorMut<'_>],
        chunks: &dyn Chunks,
        progress: Progress<'_>,
        work: impl FnOnce(&Apply<'_, B>) -> R,
    ) -> R {
        let found = tensors.iter().filter_map(|given| Some((self.index().find(given.name)?, &*given.bytes)));
        let (infos, data) = found
            .map(|(tensor, bytes)| {
                let info = TensorInfo { name: tensor.base_name.to_owned(), dtype: tensor.dtype, shape: tensor.shape.to_vec() };
                (info, bytes)
            })
            .unzip();
        let names: Vec<_> = tensors.iter().map(|given| given.name).collect();
        let base = Snapshot { infos, data };
        let mut apply = Apply::new(self, &base).tensors(|name| names.binary_search(&name).is_ok()).progress(progress);
        apply.chunks = chunks;
        apply.in_order = true; // each tensor is its own base, also where two were made from one
        work(&apply)
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
