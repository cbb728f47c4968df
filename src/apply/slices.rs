//! Rebuilds rectangles of tensors, in new memory or in place. Only the chunks that have elements of a rectangle are decoded.

use super::chunk::{Chunks, DecodeWorker, base_lanes, decode};
use super::in_place::InPlace;
use super::kept::{KEPT_PAYLOADS, Kept};
use super::payloads::Compared;
use super::run::{ApplyReport, Run};
use crate::batches::{Pool, in_batches};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::cut::{Cut, Piece};
use crate::error::{Error, Escaped, Result};
use crate::format::BaseKind;
use crate::index::Tensor;
use crate::reader::Pair;
use crate::rectangle::{Rectangle, Runs};
use crate::slice::{Slice, SliceCheckpoint, SliceLayout, SliceMut};
use crate::source::Source;
use crate::sums::ChunkSum;
use crate::watch::{NoProgress, Progress};
use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock};

/// An entry of the pair that has elements of a slice.
struct Touched<'a> {
    /// Position of the slice.
    slice: usize,
    entry: Tensor<'a>,
    /// The bytes of a part within its tensor.
    runs: Option<Runs>,
    /// The chunks with elements of the slice.
    chunks: Vec<u32>,
}

/// One chunk to decode.
struct Job<'t, 'a> {
    touched: &'t Touched<'a>,
    chunk: u32,
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

    /// The error for a chunk of which `what` lacks lanes. `slice` is the part with which the pair would fit.
    fn not_held(&self, chunk: u32, what: &'static str, slice: &SliceMut<'_>) -> Error {
        let (entry, lanes) = (self.entry.rectangle(), self.entry.chunk_range(chunk));
        let Rectangle { origin, extent } = &slice.rectangle;
        Error::NotHeld {
            tensor: self.entry.name.to_owned(),
            chunk,
            reason: format!(
                "{what} lacks some of the lanes {}..{} of {:?} + {:?}. A pair fits in which the tensor is cut at the part {origin:?} + \
                 {extent:?}",
                lanes.start, lanes.end, entry.origin, entry.extent
            ),
        }
    }

    fn is_complete(&self) -> bool {
        self.chunks.len() == self.entry.chunk_count as usize
    }
}

/// The layouts of slices, and the entries and chunks that they touch, in the order of the pair. The pair has all elements of each
/// slice.
fn touched<'a, B: Source>(pair: &'a Pair<B>, slices: &[SliceMut<'_>]) -> Result<(Vec<SliceLayout>, Vec<Touched<'a>>)> {
    let index = pair.index();
    let mut layouts = Vec::with_capacity(slices.len());
    let mut all = Vec::new();
    for (number, slice) in slices.iter().enumerate() {
        let missing = || Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(slice.name)));
        let first = index.find(slice.name).ok_or_else(missing)?;
        let size = slice.bytes.len() as u64;
        let layout = SliceLayout::new(slice.name, first.dtype, first.whole_shape(), &slice.rectangle, slice.pitch, size)?;
        let mut covered = 0;
        for entry in index.entries(slice.name) {
            let mut touched = Touched { slice: number, entry, runs: entry.runs(), chunks: Vec::new() };
            for chunk in entry.chunks() {
                let (offset, size) = touched.bytes_of(chunk);
                let held = touched.try_each(&layout, offset, size, |_, _| Ok(()))?;
                covered += held as u64;
                if held > 0 {
                    touched.chunks.push(chunk);
                }
            }
            if !touched.chunks.is_empty() {
                all.push(touched);
            }
        }
        check_covered(slice, &first, covered)?;
        layouts.push(layout);
    }
    Ok((layouts, all))
}

fn jobs<'t, 'a>(touched: &'t [Touched<'a>]) -> impl Iterator<Item = Job<'t, 'a>> {
    touched.iter().flat_map(|touched| touched.chunks.iter().map(move |&chunk| Job { touched, chunk }))
}

/// Rebuilds slices in memory whose content is ignored.
pub(super) fn rebuild<B: Source>(run: &Run<'_, B>, slices: &mut [SliceMut<'_>]) -> Result<ApplyReport> {
    let (layouts, touched) = touched(run.pair, slices)?;
    let bases: Vec<_> = touched.iter().map(|touched| run.find_base(&touched.entry)).collect::<Result<_>>()?;
    for (touched, base) in touched.iter().zip(&bases) {
        let Some(base) = *base else { continue };
        for &chunk in &touched.chunks {
            let (offset, size) = touched.bytes_of(chunk);
            let size = touched.entry.base_bytes().saturating_sub(offset).min(size as u64) as usize;
            if size > 0 && !run.base().holds(base, offset, size) {
                return Err(touched.not_held(chunk, "the base", &slices[touched.slice]));
            }
        }
    }
    let compared = run.compared(touched.iter().flat_map(|touched| touched.chunks.iter().copied()));
    let workers = Pool::new(DecodeWorker::new);
    in_batches(
        touched
            .iter()
            .zip(bases)
            .flat_map(|(touched, base)| touched.chunks.iter().map(move |&chunk| (Job { touched, chunk }, base))),
        |(job, _)| job.touched.bytes_of(job.chunk).1 as u64,
        |(job, base)| {
            let (size, entry) = (job.touched.bytes_of(job.chunk).1, &job.touched.entry);
            let mut decoded = vec![0; size];
            let fill = |first, lanes: &mut [u8], sum: &mut ChunkSum| base_lanes(entry, run.base(), *base, first, lanes, sum);
            workers.with(|worker| decode(&compared, entry, job.chunk, fill, worker, &mut decoded, false))?;
            run.progress.done(size as u64)?;
            Ok(decoded)
        },
        |(Job { touched, chunk }, _), decoded| {
            let (offset, size) = touched.bytes_of(chunk);
            let out = &mut *slices[touched.slice].bytes;
            touched.try_each(&layouts[touched.slice], offset, size, |at, range| {
                out[at..at + range.len()].copy_from_slice(&decoded[range]);
                Ok(())
            })?;
            Ok(())
        },
    )?;
    Ok(ApplyReport {
        tensors: slices.len() as u64,
        bytes: slices.iter().map(|slice| slice.bytes.len() as u64).sum(),
        digests_checked: false,
        payload_digests: compared.finish()?,
    })
}

/// Checks that the pair has all elements of a slice. Entries do not overlap, so their sizes can be added. `covered` is in bytes.
fn check_covered(slice: &SliceMut<'_>, tensor: &Tensor<'_>, covered: u64) -> Result<()> {
    // The slice lies within the tensor, so the product does not overflow unless a dimension is 0.
    let extent = &slice.rectangle.extent;
    let bits = if extent.contains(&0) { 0 } else { extent.iter().product::<u64>() * tensor.dtype.bits() };
    if covered * 8 == bits {
        return Ok(());
    }
    let name = Escaped(slice.name);
    Err(Error::InvalidArgument(format!("the pair has {covered} of {} bytes of the slice of tensor {name}", bits / 8)))
}

/// Changes slices from base to target. The slices are the base.
pub(super) fn in_place<B: Source>(
    pair: &Pair<B>,
    slices: &mut [SliceMut<'_>],
    mode: InPlace,
    digests: bool,
    progress: Progress<'_>,
) -> Result<ApplyReport> {
    slices.sort_by(|a, b| a.name.cmp(b.name));
    if let Some(twice) = slices.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Error::InvalidArgument(format!("two slices are of tensor {}", Escaped(twice[0].name))));
    }
    let (layouts, touched) = touched(pair, slices)?;
    for touched in &touched {
        if touched.entry.base_kind == BaseKind::Prefix {
            let name = Escaped(touched.entry.name);
            return Err(Error::InvalidArgument(format!("tensor {name} changes its number of rows, which cannot be done in place")));
        }
        for &chunk in &touched.chunks {
            let (offset, size) = touched.bytes_of(chunk);
            if touched.try_each(&layouts[touched.slice], offset, size, |_, _| Ok(()))? < size {
                return Err(touched.not_held(chunk, "the slice", &slices[touched.slice]));
            }
        }
    }
    pair.authenticate(&NoProgress(progress))?;
    let kept = Kept::new(pair, KEPT_PAYLOADS);
    let chunks: &dyn Chunks = if mode == InPlace::AllChecked { &kept } else { pair };
    if mode == InPlace::AllChecked {
        check(pair, chunks, slices, &touched, digests, progress)?;
    }
    let memory: Vec<_> = slices.iter_mut().map(|slice| RwLock::new(&mut *slice.bytes)).collect();
    let workers = Pool::new(DecodeWorker::new);
    let written = Mutex::new(Vec::new());
    let outcome = in_batches(
        jobs(&touched),
        |job| job.touched.bytes_of(job.chunk).1 as u64,
        |job| {
            let Job { touched, chunk } = *job;
            let held = memory[touched.slice].read().unwrap_or_else(PoisonError::into_inner);
            let decoded = workers.with(|worker| decode_held(chunks, touched, &layouts[touched.slice], chunk, &held, worker))?;
            if mode == InPlace::ChunkByChunk {
                progress.done(decoded.len() as u64)?;
            }
            Ok(decoded)
        },
        |Job { touched, chunk }, decoded| {
            let mut held = memory[touched.slice].write().unwrap_or_else(PoisonError::into_inner);
            touched.try_each(&layouts[touched.slice], touched.bytes_of(chunk).0, decoded.len(), |at, range| {
                held[at..at + range.len()].copy_from_slice(&decoded[range]);
                Ok(())
            })?;
            written.lock().unwrap_or_else(PoisonError::into_inner).push(chunk);
            Ok(())
        },
    );
    let mut written = written.into_inner().unwrap_or_else(PoisonError::into_inner);
    let all = || touched.iter().flat_map(|touched| touched.chunks.iter().copied());
    if let Err(source) = outcome {
        let changes = |&chunk: &u32| {
            let owner = touched.iter().find(|touched| touched.entry.chunks().contains(&chunk));
            let has_base = owner.is_none_or(|touched| touched.entry.base_kind != BaseKind::None);
            !has_base || pair.index().records()[chunk as usize].num_deltas.get() > 0
        };
        let is_changed = written.iter().any(changes);
        written.sort_unstable();
        return match is_changed {
            true => Err(Error::Poisoned { written, total: all().count() as u32, source: Box::new(source) }),
            false => Err(source),
        };
    }
    Ok(ApplyReport {
        tensors: slices.len() as u64,
        bytes: slices.iter().map(|slice| slice.bytes.len() as u64).sum(),
        digests_checked: mode == InPlace::AllChecked && digests && touched.iter().all(Touched::is_complete),
        payload_digests: Compared::new(pair, all()).finish()?,
    })
}

/// Decodes all touched chunks without storing anything. Entries that are held completely are compared with their digests.
fn check<B: Source>(
    pair: &Pair<B>,
    chunks: &dyn Chunks,
    slices: &[SliceMut<'_>],
    touched: &[Touched<'_>],
    digests: bool,
    progress: Progress<'_>,
) -> Result<()> {
    let info = |slice: &SliceMut<'_>| {
        let tensor = pair.index().find(slice.name)?;
        let shape = tensor.whole_shape().to_vec();
        Some(TensorInfo { name: slice.name.to_owned(), dtype: tensor.dtype, shape })
    };
    let held = slices
        .iter()
        .filter_map(|slice| Some(Slice { pitch: slice.pitch, ..Slice::new(info(slice)?, slice.rectangle.clone(), &*slice.bytes) }));
    let base = SliceCheckpoint::new(held)?;
    let (complete, partial): (Vec<_>, Vec<_>) = touched.iter().partition(|touched| touched.is_complete());
    let cut = cut_held(&base, &complete);
    let mut run = Run::new(pair, &cut, progress);
    run.selected = complete.iter().map(|touched| touched.entry.place).collect();
    (run.digests, run.chunks, run.in_order) = (digests, chunks, true);
    run.verify()?;

    let cut = cut_held(&base, &partial);
    let workers = Pool::new(DecodeWorker::new);
    let jobs = partial.iter().enumerate().flat_map(|(at, touched)| touched.chunks.iter().map(move |&chunk| (at, chunk)));
    in_batches(
        jobs,
        |&(at, chunk)| partial[at].bytes_of(chunk).1 as u64,
        |&mut (at, chunk)| {
            let (entry, size) = (&partial[at].entry, partial[at].bytes_of(chunk).1);
            let fill = |first, lanes: &mut [u8], sum: &mut ChunkSum| base_lanes(entry, &cut, Some(at), first, lanes, sum);
            workers
                .with(|worker| worker.with_lanes(size, |worker, lanes| decode(chunks, entry, chunk, fill, worker, lanes, false)))?;
            progress.done(size as u64)
        },
        |_, ()| Ok(()),
    )
}

/// The touched entries as tensors of a checkpoint that holds slices.
fn cut_held<'a>(base: &'a SliceCheckpoint<'_>, touched: &[&Touched<'_>]) -> Cut<'a> {
    let mut cut = Cut::new(base);
    for touched in touched {
        let info = TensorInfo { shape: touched.entry.shape.to_vec(), ..base.tensors()[touched.slice].clone() };
        cut.push(info, Piece { tensor: touched.slice, runs: touched.runs.clone() });
    }
    cut
}

/// Decodes a chunk whose base lanes are in the memory of a slice.
fn decode_held(
    chunks: &dyn Chunks,
    touched: &Touched<'_>,
    layout: &SliceLayout,
    chunk: u32,
    held: &[u8],
    worker: &mut DecodeWorker,
) -> Result<Vec<u8>> {
    let entry = &touched.entry;
    let mut decoded = vec![0; touched.bytes_of(chunk).1];
    let fill = |first_lane: u64, block: &mut [u8], sum: &mut ChunkSum| {
        if entry.base_kind == BaseKind::None {
            block.fill(0);
        } else {
            touched.try_each(layout, first_lane * entry.lane_bytes() as u64, block.len(), |at, range| {
                let size = range.len();
                block[range].copy_from_slice(&held[at..at + size]);
                Ok(())
            })?;
        }
        sum.add(block);
        Ok(())
    };
    decode(chunks, entry, chunk, fill, worker, &mut decoded, false)?;
    Ok(decoded)
}
