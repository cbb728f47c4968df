//! The engine of the processor: decodes the chunks of a plan, and compares digests (spec section 13, steps 8 to 12).

use super::accelerator::{Accelerator, TensorHashes, Work};
use super::chunk::{Chunks, DecodeWorker, Hashes, decode, decode_from, decode_to};
use super::digests::DigestCheck;
use super::find::wrong_base;
use super::memory::{ChunkMemory, RUN_BYTES, Role, divide};
use super::payloads::ComparedPayloads;
use super::plan::{Item, Plan, Task};
use crate::base::PaddedBase;
use crate::batches::{Pool, batches, hash_piece, in_parallel};
use crate::checkpoint::{Checkpoint, Region};
use crate::cut::Piece;
use crate::reader::{Pair, PayloadDigests};
use crate::watch::{NoProgress, Progress};
use blake3::Hash;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use tpde_core::digest::{self, short};
use tpde_core::error::{Error, Result, Rule};
use tpde_core::format::BaseKind;
use tpde_core::source::Source;
use tpde_core::sums::chunk_sum;

/// A plan, and what its chunks are decoded from.
pub(crate) struct Engine<'a, B> {
    pub pair: &'a Pair<B>,
    /// Source of the payloads: the pair, or the payloads that were kept from an earlier pass.
    pub chunks: &'a dyn Chunks,
    /// The checkpoint in which items have their base tensors. Not read if the memory has the base.
    pub base: &'a dyn Checkpoint,
    pub plan: &'a Plan<'a>,
    /// Whether digests of complete items are compared.
    pub digests: bool,
    pub progress: Progress<'a>,
    /// Hashes of whole base tensors, by position in the base. Several target tensors may share a base tensor.
    pub(super) whole_bases: Mutex<BTreeMap<usize, Hash>>,
}

impl<'a, B: Source> Engine<'a, B> {
    pub fn new(pair: &'a Pair<B>, base: &'a dyn Checkpoint, plan: &'a Plan<'a>, progress: Progress<'a>) -> Self {
        Self { pair, chunks: pair, base, plan, digests: true, progress, whole_bases: Mutex::default() }
    }

    /// Decodes and checks all chunks of the plan, on all threads of the pool.
    ///
    /// `memories` are those of the plan; `role` says what they are. `observe` gets each chunk after its checks, on any thread, and
    /// after it was stored in memory. `done` gets the results in the order of the plan.
    pub(super) fn execute<T: Send>(
        &self,
        memories: &mut [&mut [u8]],
        role: Role,
        observe: impl Fn(Task, &[u8]) -> Result<T> + Sync,
        mut done: impl FnMut(T),
    ) -> Result<PayloadDigests> {
        let workers = Pool::new(DecodeWorker::new);
        let compared = ComparedPayloads::new(self.chunks, self.plan.chunks());
        let hash_base = |base: &Piece| self.hash_base(base);
        let mut check = DigestCheck::new(self.pair.index(), self.plan, &hash_base);
        // After an error no later chunk is begun in place. Earlier ones run, so that the first error is always the same.
        let failed = AtomicUsize::new(usize::MAX);
        let work = |(number, (task, memory)): &mut (usize, (Task, ChunkMemory<'_>))| {
            if role == Role::InPlace && failed.load(Ordering::Relaxed) < *number {
                return Ok(None);
            }
            let found = workers.with(|worker| self.decode(*task, memory, role, &compared, worker, &observe));
            let found = found.and_then(|found| self.progress.done(self.plan.bytes_of(*task).1 as u64).map(|()| found));
            found.map(Some).inspect_err(|_| {
                failed.fetch_min(*number, Ordering::Relaxed);
            })
        };
        let mut run = || -> Result<()> {
            for batch in batches(self.plan.tasks(), |&task| cost(self.plan, task)) {
                let jobs = divide(memories, self.plan, batch)?;
                in_parallel(jobs.into_iter().enumerate().collect(), work, |(_, (task, _)), found| {
                    let Some((hashes, observed)) = found else { return Ok(()) };
                    hashes.map_or(Ok(()), |hashes| check.add(task.item, hashes))?;
                    done(observed);
                    Ok(())
                })?;
            }
            Ok(())
        };
        let outcome = run();
        outcome.and_then(|()| if self.digests { check.finish() } else { Ok(()) }).map_err(|e| compared.explain(e))?;
        compared.finish()
    }

    /// Decodes one chunk.
    fn decode<T>(
        &self,
        task: Task,
        memory: &mut ChunkMemory<'_>,
        role: Role,
        chunks: &ComparedPayloads<'_>,
        worker: &mut DecodeWorker,
        observe: &impl Fn(Task, &[u8]) -> Result<T>,
    ) -> Result<(Option<Hashes>, T)> {
        let item = &self.plan.items[task.item];
        let (tensor, size) = (&item.tensor, item.bytes_of(task.chunk).1);
        let is_hashed = self.digests && item.is_complete;
        let base = PaddedBase::new(Some(self.base), item.base.as_ref());
        if let (Role::Target, Some(lanes)) = (role, memory.whole(size)) {
            let hashes = decode_to(base, chunks, tensor, task.chunk, worker, lanes, is_hashed)?;
            return Ok((hashes, observe(task, lanes)?));
        }
        worker.with_lanes(size, |worker, lanes| {
            let hashes = match role {
                Role::Target => decode_from(base, chunks, tensor, task.chunk, worker, lanes, is_hashed)?,
                Role::Base | Role::InPlace => {
                    let fill = memory.base_lanes(tensor, task.chunk);
                    decode(chunks, tensor, task.chunk, fill, worker, lanes, is_hashed)?
                }
            };
            if role != Role::Base {
                memory.store(lanes);
            }
            Ok((hashes, observe(task, lanes)?))
        })
    }

    /// [`Engine::execute`] on a device, for a plan of whole entries. Each tensor is hashed, by the device or by the processor, and
    /// then passed to `store` with the number of its item.
    pub fn execute_on(
        &self,
        accelerator: &dyn Accelerator,
        store: &mut dyn FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<PayloadDigests> {
        let (base, positions) = self.plan.bases(self.base);
        let tensors: Vec<_> = self.plan.items.iter().map(|item| item.tensor.place).zip(positions).collect();
        let of_device = Mutex::new(None);
        let hashed = |hashes: TensorHashes| *of_device.lock().unwrap_or_else(PoisonError::into_inner) = Some(hashes);
        let hashed: Option<&(dyn Fn(TensorHashes) + Sync)> = if self.digests { Some(&hashed) } else { None };
        let work = Work { index: self.pair.index(), blob: self.pair.blob(), base: &base, tensors: &tensors, hashed };
        let hash_base = |base: &Piece| self.hash_base(base);
        let mut check = DigestCheck::new(self.pair.index(), self.plan, &hash_base);
        let compared = accelerator.rebuild(&work, &mut |item, bytes| {
            let of_device = of_device.lock().unwrap_or_else(PoisonError::into_inner).take();
            match of_device {
                _ if !self.digests => {}
                Some(TensorHashes { base, target }) => check.add_whole(item, Hashes { base, target })?,
                None => self.hash_chunks(item, bytes)?.into_iter().try_for_each(|hashes| check.add(item, hashes))?,
            }
            store(item, bytes)?;
            self.progress.done(bytes.len() as u64)
        })?;
        if self.digests {
            check.finish()?;
        }
        Ok(compared)
    }

    /// The hashes of a rebuilt tensor's chunks, and of the base chunks.
    fn hash_chunks(&self, item: usize, target: &[u8]) -> Result<Vec<Hashes>> {
        let item = &self.plan.items[item];
        let tensor = &item.tensor;
        let chunk_bytes = tensor.chunk_lanes as usize * tensor.lane_bytes();
        let base = item.base.as_ref().filter(|_| tensor.base_kind.has_all_lanes());
        let hash = |scratch: &mut Vec<u8>, (i, lanes): (usize, &[u8])| {
            let offset = (i * chunk_bytes) as u64;
            let hash_base = |base: &Piece| -> Result<[u8; 32]> {
                let bytes = base.bytes(self.base, offset, lanes.len(), scratch)?;
                Ok(digest::of_piece(bytes, offset, tensor.base_bytes()))
            };
            let base = base.map(hash_base).transpose()?;
            Ok(Hashes { base, target: digest::of_piece(lanes, offset, tensor.bytes()) })
        };
        target.par_chunks(chunk_bytes).enumerate().map_init(Vec::new, hash).collect()
    }

    /// The hash of base lanes. That of a whole tensor is computed once. The watcher can stop the work, but no progress is reported.
    pub(super) fn hash_base(&self, base: &Piece) -> Result<Hash> {
        let known = || self.whole_bases.lock().unwrap_or_else(PoisonError::into_inner);
        let hash = || hash_piece(self.base, base, &NoProgress(self.progress));
        let Piece::Of(Region { tensor, runs: None }) = base else { return hash() };
        if let Some(hash) = known().get(tensor) {
            return Ok(*hash);
        }
        let hash = hash()?;
        known().insert(*tensor, hash);
        Ok(hash)
    }

    /// Finds the cause of an error about a chunk's base sum: hashes the base tensors of complete items, and returns
    /// [`Error::WrongBase`] or [`Error::AlreadyApplied`] if their digests show that. Other errors are returned unchanged.
    pub fn explain(&self, error: Error) -> Error {
        // An error about an earlier step of a chain is an `Error::Step`, and is not about this pair.
        match &error {
            Error::Invalid(invalid) if invalid.rule == Rule::ChunkBaseSum => match self.compare_bases(invalid.at.chunk) {
                Ok(Some(wrong)) => wrong,
                // The base matches all digests, so the sum in the index is wrong.
                Ok(None) => error,
                // Report the failed read: a base that cannot be read may still be the right one.
                Err(unread) => unread,
            },
            _ => error,
        }
    }

    /// The error for the complete items whose bases differ from their digests, if there are such: [`Error::AlreadyApplied`] if these
    /// are the target, and all other items of the plan too. `failed` is the chunk that failed.
    pub fn compare_bases(&self, failed: Option<u32>) -> Result<Option<Error>> {
        let mut wrong = None;
        let mut all_are_targets = true;
        for item in self.plan.items.iter().filter(|item| item.is_complete) {
            // A tensor that needs no base has base lanes only in an application in place. If the pair was already applied, its
            // memory holds the target.
            let (tensor, Some(base)) = (&item.tensor, &item.base) else { continue };
            let found = short(&self.hash_base(base)?);
            all_are_targets &= found == tensor.digests.target_digest;
            if tensor.base_kind != BaseKind::None && found != tensor.digests.base_digest {
                // The tensor of the chunk that failed, or else the first one whose base differs.
                let chunk = failed.filter(|chunk| tensor.chunks().contains(chunk));
                if wrong.is_none() || chunk.is_some() {
                    wrong = Some(wrong_base(tensor, &found, chunk));
                }
            }
        }
        let Some(wrong) = wrong else { return Ok(None) };
        let mut others = self.plan.items.iter().filter(|item| !item.is_complete);
        let is_applied =
            all_are_targets && others.try_fold(true, |so_far, item| Ok::<_, Error>(so_far && self.has_target_sums(item)?))?;
        Ok(Some(if is_applied { wrong.into_already_applied() } else { wrong }))
    }

    /// Whether the base lanes of an item's chunks have the sums of the target.
    fn has_target_sums(&self, item: &Item<'_>) -> Result<bool> {
        let Some(base) = item.base.as_ref().filter(|_| item.tensor.base_kind != BaseKind::Prefix) else { return Ok(false) };
        let mut buffer = Vec::new();
        for &chunk in &item.chunks {
            let (offset, size) = item.bytes_of(chunk);
            let found = chunk_sum(base.bytes(self.base, offset, size, &mut buffer)?);
            if found != self.pair.index().sums()[chunk as usize].target_sum.get() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// What a task costs in a batch: the size of its lanes, or of the list of its runs in memory if that is larger.
fn cost(plan: &Plan<'_>, task: Task) -> u64 {
    let runs = plan.items[task.item].max_runs(task.chunk).saturating_mul(RUN_BYTES);
    runs.max(plan.bytes_of(task).1 as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slice::{Memories, SliceMut};
    use crate::{Dtype, Encode, MemoryCheckpoint, Rectangle, TensorInfo};

    #[test]
    fn a_chunk_of_short_runs_costs_more_than_its_bytes() {
        let info = TensorInfo { name: "t".into(), dtype: Dtype::U8, shape: vec![1000, 2] };
        let target = MemoryCheckpoint::new([(info, &[7; 2000][..])]).unwrap();
        let (pair, _) = Encode::new(&target).to_memory().unwrap();
        let task = Task { item: 0, chunk: 0 };
        let whole = Plan::in_memories(pair.index().tensors(), &MemoryCheckpoint::EMPTY).unwrap();
        assert_eq!(cost(&whole, task), 2000);
        let mut memory = [0; 1000];
        let column = SliceMut::new("t", Rectangle::new([0, 1], [1000, 1]), &mut memory);
        let memories = Memories::new([column]).unwrap();
        let plan = Plan::of_slices(pair.index(), &memories).unwrap();
        let cost = cost(&plan, task);
        assert!((1000 * RUN_BYTES..1010 * RUN_BYTES).contains(&cost), "{cost}");
        // What it stands for: the list of runs, and the pieces.
        let run = size_of::<(usize, usize, std::ops::Range<usize>, usize)>() + size_of::<(std::ops::Range<usize>, &mut [u8])>();
        assert!(run as u64 <= RUN_BYTES);
    }
}
