//! Rebuilds rectangles of tensors, in new memory or in place. Only the chunks that have elements of a rectangle are decoded.

use super::chunk::{Chunks, DecodeWorker, decode, decode_from};
use super::in_place::{InPlace, check_in_place};
use super::kept::{KEPT_PAYLOADS, Kept};
use super::payloads::Compared;
use super::run::{ApplyReport, DigestCheck, Run};
use crate::base::PaddedBase;
use crate::batches::{Pool, in_batches};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::cut::{Cut, Piece};
use crate::reader::Pair;
use crate::slice::{Held, Memories, Slice, SliceCheckpoint, SliceLayout, check_disjoint};
use crate::watch::{NoProgress, Progress};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock};
use tpde_core::error::{Error, Escaped, List, Result};
use tpde_core::format::BaseKind;
use tpde_core::index::Tensor;
use tpde_core::rectangle::Runs;
use tpde_core::source::Source;
use tpde_core::sums::ChunkSum;

/// An entry of the pair that has elements of slices.
struct Touched<'a> {
    /// Position of the tensor among those with slices, in order of name.
    tensor: usize,
    entry: Tensor<'a>,
    /// The bytes of a part within its tensor.
    runs: Option<Runs>,
    /// The chunks with elements of slices.
    chunks: Vec<TouchedChunk>,
}

struct TouchedChunk {
    chunk: u32,
    /// Positions of the slices that have elements of the chunk.
    slices: Vec<usize>,
    /// How many bytes of the chunk the slices have.
    held: usize,
}

/// One chunk to decode.
struct Job<'t, 'a> {
    touched: &'t Touched<'a>,
    chunk: &'t TouchedChunk,
}

impl Touched<'_> {
    /// Offset and size of a chunk in bytes.
    fn bytes_of(&self, chunk: u32) -> (u64, usize) {
        let (lanes, width) = (self.entry.chunk_range(chunk), self.entry.lane_bytes() as u64);
        (lanes.start * width, ((lanes.end - lanes.start) * width) as usize)
    }

    /// Calls `each` for the bytes that the slice has, of `size` bytes from byte `offset` of the entry on: with their offset in
    /// the memory of the slice, and their range within the `size` bytes. Returns how many these are.
    fn try_each(
        &self,
        layout: &SliceLayout,
        offset: u64,
        size: usize,
        mut each: impl FnMut(usize, Range<usize>) -> Result<()>,
    ) -> Result<usize> {
        let Some(runs) = &self.runs else { return layout.try_each(offset, size, each) };
        let mut held = 0;
        runs.try_each(offset, size, |at, run| -> Result<()> {
            held += layout.try_each(at, run.len(), |place, range| each(place, run.start + range.start..run.start + range.end))?;
            Ok(())
        })?;
        Ok(held)
    }

    /// The error for a chunk of which `what` lacks lanes.
    fn not_held(&self, chunk: &TouchedChunk, what: &'static str, slices: &[Held<'_>]) -> Error {
        let (entry, lanes) = (self.entry.rectangle(), self.entry.chunk_range(chunk.chunk));
        let parts: Vec<_> = chunk.slices.iter().map(|&slice| &slices[slice].rectangle).collect();
        let (part, parts) = (if parts.len() > 1 { "parts" } else { "part" }, List(&parts));
        Error::NotHeld {
            tensor: self.entry.name.to_owned(),
            chunk: chunk.chunk,
            reason: format!(
                "{what} lacks some of the lanes {}..{} of {entry}. A pair fits in which the tensor is cut at the {part} {parts}",
                lanes.start, lanes.end
            ),
        }
    }

    fn is_complete(&self) -> bool {
        self.chunks.len() == self.entry.chunk_count as usize
    }
}

/// The layouts of slices, and the entries and chunks that they touch, in the order of the pair.
struct Plan<'a> {
    layouts: Vec<SliceLayout>,
    touched: Vec<Touched<'a>>,
    /// Number of tensors with slices.
    tensors: usize,
}

impl<'a> Plan<'a> {
    /// Checks the slices. The pair has all elements of each slice.
    fn new<B: Source>(pair: &'a Pair<B>, held: &Memories<'_>) -> Result<Self> {
        let mut plan = Self { layouts: Vec::with_capacity(held.slices.len()), touched: Vec::new(), tensors: 0 };
        for slices in held.slices.chunk_by(|a, b| a.name == b.name) {
            plan.add(pair, slices)?;
        }
        held.check_apart(&plan.layouts)?;
        Ok(plan)
    }

    /// Adds the slices of a tensor.
    fn add<B: Source>(&mut self, pair: &'a Pair<B>, slices: &[Held<'_>]) -> Result<()> {
        let (index, name) = (pair.index(), slices[0].name);
        let missing = || Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(name)));
        let tensor = index.find(name).ok_or_else(missing)?;
        let first = self.layouts.len();
        for slice in slices {
            let size = slice.range.len() as u64;
            self.layouts.push(SliceLayout::new(name, tensor.dtype, tensor.whole_shape(), &slice.rectangle, slice.pitch, size)?);
        }
        check_disjoint(name, slices.iter().map(|slice| &slice.rectangle))?;
        slices.iter().try_for_each(|slice| index.check_has(name, &slice.rectangle))?;
        for entry in index.entries(name) {
            let mut touched = Touched { tensor: self.tensors, entry, runs: entry.runs(), chunks: Vec::new() };
            for chunk in entry.chunks() {
                let (offset, size) = touched.bytes_of(chunk);
                let mut of_chunk = TouchedChunk { chunk, slices: Vec::new(), held: 0 };
                for slice in first..self.layouts.len() {
                    let held = touched.try_each(&self.layouts[slice], offset, size, |_, _| Ok(()))?;
                    if held > 0 {
                        of_chunk.held += held;
                        of_chunk.slices.push(slice);
                    }
                }
                if of_chunk.held > 0 {
                    touched.chunks.push(of_chunk);
                }
            }
            if !touched.chunks.is_empty() {
                self.touched.push(touched);
            }
        }
        self.tensors += 1;
        Ok(())
    }

    fn jobs(&self) -> impl Iterator<Item = Job<'_, 'a>> {
        self.touched.iter().flat_map(|touched| touched.chunks.iter().map(move |chunk| Job { touched, chunk }))
    }

    /// Indexes of the touched chunks in the index map.
    fn chunks(&self) -> impl Iterator<Item = u32> {
        self.jobs().map(|job| job.chunk.chunk)
    }
}

impl Job<'_, '_> {
    /// Offset and size of the chunk in bytes of its entry.
    fn bytes(&self) -> (u64, usize) {
        self.touched.bytes_of(self.chunk.chunk)
    }
}

/// Rebuilds slices in memory whose content is ignored. Entries of which all chunks are decoded are compared with their digests.
pub(super) fn rebuild<B: Source>(mut run: Run<'_, B>, mut held: Memories<'_>) -> Result<ApplyReport> {
    let plan = Plan::new(run.pair, &held)?;
    let bases: Vec<_> = plan.touched.iter().map(|touched| run.find_base(&touched.entry)).collect::<Result<_>>()?;
    for (touched, base) in plan.touched.iter().zip(&bases) {
        let Some(base) = *base else { continue };
        for chunk in &touched.chunks {
            let (offset, size) = touched.bytes_of(chunk.chunk);
            let size = touched.entry.base_bytes().saturating_sub(offset).min(size as u64) as usize;
            if size > 0 && !run.base().holds(base, offset, size) {
                return Err(touched.not_held(chunk, "the base", &held.slices));
            }
        }
    }
    let (mut jobs, mut bases_of_complete) = (Vec::new(), Vec::new());
    run.selected.clear();
    for (touched, base) in plan.touched.iter().zip(bases) {
        // The digest of a base with other rows covers all of its rows.
        let base_bytes = touched.entry.base_bytes() as usize;
        let is_held = || base.is_none_or(|base| run.base().holds(base, 0, base_bytes));
        let is_hashable = touched.is_complete() && (touched.entry.base_kind != BaseKind::Prefix || is_held());
        let complete = is_hashable.then_some(run.selected.len());
        if complete.is_some() {
            run.selected.push(touched.entry.place);
            bases_of_complete.push(base);
        }
        jobs.extend(touched.chunks.iter().map(|chunk| (Job { touched, chunk }, base, complete)));
    }
    let compared = run.compared(plan.chunks());
    let mut check = DigestCheck::new(&run, &bases_of_complete);
    let workers = Pool::new(DecodeWorker::new);
    let outcome = in_batches(
        jobs,
        |(job, ..)| job.bytes().1 as u64,
        |(job, base, complete)| {
            let (size, entry) = (job.bytes().1, &job.touched.entry);
            let is_hashed = run.digests && complete.is_some();
            let mut decoded = vec![0; size];
            let (base, chunk) = (PaddedBase::new(Some(run.base()), *base), job.chunk.chunk);
            let hashes = workers.with(|worker| decode_from(base, &compared, entry, chunk, worker, &mut decoded, is_hashed))?;
            run.progress.done(size as u64)?;
            Ok((decoded, hashes))
        },
        |(job, _, complete), (decoded, hashes)| {
            if let Some(at) = complete {
                check.add(at, hashes)?;
            }
            let (offset, size) = job.bytes();
            for &slice in &job.chunk.slices {
                let Held { memory, range: within, .. } = &held.slices[slice];
                let out = &mut held.bytes[*memory][within.clone()];
                job.touched.try_each(&plan.layouts[slice], offset, size, |at, range| {
                    out[at..at + range.len()].copy_from_slice(&decoded[range]);
                    Ok(())
                })?;
            }
            Ok(())
        },
    );
    outcome.and_then(|()| check.finish()).map_err(|e| compared.explain(run.explain(e, &bases_of_complete)))?;
    Ok(ApplyReport {
        tensors: plan.tensors as u64,
        bytes: held.slices.iter().map(|slice| slice.range.len() as u64).sum(),
        digests_checked: run.digests && run.selected.len() == plan.touched.len(),
        payload_digests: compared.finish()?,
        removed: Vec::new(),
    })
}

/// Changes slices from base to target. The slices are the base.
pub(super) fn in_place<B: Source>(
    pair: &Pair<B>,
    mut held: Memories<'_>,
    mode: InPlace,
    digests: bool,
    progress: Progress<'_>,
) -> Result<ApplyReport> {
    let plan = Plan::new(pair, &held)?;
    for touched in &plan.touched {
        check_in_place(&touched.entry)?;
        let is_cut = |chunk: &&TouchedChunk| chunk.held < touched.bytes_of(chunk.chunk).1;
        if let Some(chunk) = touched.chunks.iter().find(is_cut) {
            let what = if chunk.slices.len() > 1 { "the memory of the slices" } else { "the slice" };
            return Err(touched.not_held(chunk, what, &held.slices));
        }
    }
    pair.authenticate(&NoProgress(progress))?;
    let kept = Kept::new(pair, KEPT_PAYLOADS);
    let chunks: &dyn Chunks = if mode == InPlace::AllChecked { &kept } else { pair };
    if mode == InPlace::AllChecked {
        check(pair, chunks, &held, &plan, digests, progress)?;
    }
    let memory: Vec<_> = held.bytes.iter_mut().map(|bytes| RwLock::new(&mut **bytes)).collect();
    let workers = Pool::new(DecodeWorker::new);
    let written = Mutex::new(Vec::new());
    let outcome = in_batches(
        plan.jobs(),
        |job| job.bytes().1 as u64,
        |job| {
            let slices = job.chunk.slices.iter().map(|&slice| &held.slices[slice]);
            // Each memory is locked once: a second lock of one thread could wait for a writer that waits for the first.
            let memories: BTreeSet<_> = slices.clone().map(|slice| slice.memory).collect();
            let lock = |number: usize| (number, memory[number].read().unwrap_or_else(PoisonError::into_inner));
            let locked: BTreeMap<_, _> = memories.into_iter().map(lock).collect();
            let bytes: Vec<_> = slices.map(|slice| &locked[&slice.memory][slice.range.clone()]).collect();
            let decoded = workers.with(|worker| decode_held(chunks, job, &plan.layouts, &bytes, worker))?;
            if mode == InPlace::ChunkByChunk {
                progress.done(decoded.len() as u64)?;
            }
            Ok(decoded)
        },
        |job, decoded| {
            for &slice in &job.chunk.slices {
                let Held { memory: number, range: within, .. } = &held.slices[slice];
                let mut locked = memory[*number].write().unwrap_or_else(PoisonError::into_inner);
                let out = &mut locked[within.clone()];
                job.touched.try_each(&plan.layouts[slice], job.bytes().0, decoded.len(), |at, range| {
                    out[at..at + range.len()].copy_from_slice(&decoded[range]);
                    Ok(())
                })?;
            }
            written.lock().unwrap_or_else(PoisonError::into_inner).push(job.chunk.chunk);
            Ok(())
        },
    );
    let mut written = written.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Err(source) = outcome {
        let changes = |&chunk: &u32| {
            let owner = plan.touched.iter().find(|touched| touched.entry.chunks().contains(&chunk));
            let has_base = owner.is_none_or(|touched| touched.entry.base_kind != BaseKind::None);
            !has_base || pair.index().records()[chunk as usize].num_deltas.get() > 0
        };
        let is_changed = written.iter().any(changes);
        written.sort_unstable();
        return match is_changed {
            true => Err(Error::Poisoned { written, total: plan.chunks().count() as u32, source: Box::new(source) }),
            false => Err(source),
        };
    }
    Ok(ApplyReport {
        tensors: plan.tensors as u64,
        bytes: held.slices.iter().map(|slice| slice.range.len() as u64).sum(),
        digests_checked: mode == InPlace::AllChecked && digests && plan.touched.iter().all(Touched::is_complete),
        payload_digests: Compared::new(pair, plan.chunks()).finish()?,
        removed: Vec::new(),
    })
}

/// Decodes all touched chunks without storing anything. Entries that are held completely are compared with their digests.
fn check<B: Source>(
    pair: &Pair<B>,
    chunks: &dyn Chunks,
    held: &Memories<'_>,
    plan: &Plan<'_>,
    digests: bool,
    progress: Progress<'_>,
) -> Result<()> {
    let info = |slice: &Held<'_>| {
        let tensor = pair.index().find(slice.name)?;
        let shape = tensor.whole_shape().to_vec();
        Some(TensorInfo { name: slice.name.to_owned(), dtype: tensor.dtype, shape })
    };
    let slices = held.slices.iter().filter_map(|slice| {
        Some(Slice { pitch: slice.pitch, ..Slice::new(info(slice)?, slice.rectangle.clone(), held.of(slice)) })
    });
    let base = SliceCheckpoint::new(slices)?;
    let (complete, partial): (Vec<_>, Vec<_>) = plan.touched.iter().partition(|touched| touched.is_complete());
    let cut = cut_held(&base, &complete);
    let mut run = Run::new(pair, &cut, progress);
    run.selected = complete.iter().map(|touched| touched.entry.place).collect();
    (run.digests, run.chunks, run.in_order) = (digests, chunks, true);
    run.verify()?;

    let cut = cut_held(&base, &partial);
    let workers = Pool::new(DecodeWorker::new);
    let jobs = partial.iter().enumerate().flat_map(|(at, touched)| touched.chunks.iter().map(move |chunk| (at, chunk.chunk)));
    in_batches(
        jobs,
        |&(at, chunk)| partial[at].bytes_of(chunk).1 as u64,
        |&mut (at, chunk)| {
            let (entry, size) = (&partial[at].entry, partial[at].bytes_of(chunk).1);
            let decode = |worker: &mut DecodeWorker, lanes: &mut [u8]| {
                decode_from(PaddedBase::new(Some(&cut), Some(at)), chunks, entry, chunk, worker, lanes, false)
            };
            workers.with(|worker| worker.with_lanes(size, decode))?;
            progress.done(size as u64)
        },
        |_, ()| Ok(()),
    )
}

/// The touched entries as tensors of a checkpoint that holds slices.
fn cut_held<'a>(base: &'a SliceCheckpoint<'_>, touched: &[&Touched<'_>]) -> Cut<'a> {
    let mut cut = Cut::new(base);
    for touched in touched {
        let info = TensorInfo { shape: touched.entry.shape.to_vec(), ..base.tensors()[touched.tensor].clone() };
        cut.push(info, Piece::of(touched.tensor, touched.runs.clone()));
    }
    cut
}

/// Decodes a chunk whose base lanes are in the memory of slices. `held` has the memory of each slice of the chunk.
fn decode_held(
    chunks: &dyn Chunks,
    job: &Job<'_, '_>,
    layouts: &[SliceLayout],
    held: &[&[u8]],
    worker: &mut DecodeWorker,
) -> Result<Vec<u8>> {
    let Job { touched, chunk } = job;
    let entry = &touched.entry;
    let mut decoded = vec![0; job.bytes().1];
    let fill = |first_lane: u64, block: &mut [u8], sum: &mut ChunkSum| {
        if entry.base_kind == BaseKind::None {
            block.fill(0);
        } else {
            for (&slice, held) in chunk.slices.iter().zip(held) {
                touched.try_each(&layouts[slice], first_lane * entry.lane_bytes() as u64, block.len(), |at, range| {
                    let size = range.len();
                    block[range].copy_from_slice(&held[at..at + size]);
                    Ok(())
                })?;
            }
        }
        sum.add(block);
        Ok(())
    };
    decode(chunks, entry, chunk.chunk, fill, worker, &mut decoded, false)?;
    Ok(decoded)
}
