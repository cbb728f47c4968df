//! Parts of a tensor: a range of elements, and the changed elements.

use super::chunk::{Chunks, DecodeWorker, decode_from};
use super::moves::Moves;
use super::run::Run;
use crate::base::PaddedBase;
use crate::batches::{Pool, in_batches};
use std::ops::Range;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::index::Tensor;
use tpde_core::lane::with_lane;
use tpde_core::rectangle::{Rectangle, Runs};
use tpde_core::source::Source;

/// The changed elements of a tensor. The result of [`Apply::changes`](crate::Apply::changes).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Changes {
    /// Positions of the changed elements in row-major order, ascending.
    pub positions: Vec<u64>,
    /// New values of these elements, concatenated.
    pub values: Vec<u8>,
}

impl Changes {
    /// Adds the elements that differ between `old` and `new`. `position` gives the position in the tensor of the n-th element.
    fn collect(&mut self, position: impl Fn(u64) -> u64, old: &[u8], new: &[u8], element: usize) {
        const BLOCK: usize = 1024;
        for (block, (old, new)) in old.chunks(BLOCK).zip(new.chunks(BLOCK)).enumerate() {
            if old == new {
                continue;
            }
            let first = (block * BLOCK / element) as u64;
            for (i, (old, new)) in old.chunks(element).zip(new.chunks(element)).enumerate() {
                if old != new {
                    self.positions.push(position(first + i as u64));
                    self.values.extend_from_slice(new);
                }
            }
        }
    }

    /// Sorts by position. Fast if there are a few ascending runs.
    fn sort(&mut self, element: usize) {
        if self.positions.is_sorted() {
            return;
        }
        let mut order: Vec<usize> = (0..self.positions.len()).collect();
        order.sort_by_key(|&i| self.positions[i]);
        let (positions, values) = (&self.positions, &self.values);
        *self = Self {
            positions: order.iter().map(|&i| positions[i]).collect(),
            values: order.iter().flat_map(|&i| &values[i * element..][..element]).copied().collect(),
        };
    }
}

/// One chunk to decode.
#[derive(Clone, Copy)]
struct Job<'t, 'a> {
    entry: &'t Entry<'a>,
    chunk: u32,
}

/// An entry of the pair: the tensor, or a part of it.
struct Entry<'a> {
    tensor: Tensor<'a>,
    base: Option<usize>,
    /// The bytes of a part within its tensor.
    runs: Option<Runs>,
}

impl<'a> Entry<'a> {
    /// The entries of a tensor.
    fn all<B: Source>(run: &Run<'a, B>, name: &str) -> Result<Vec<Self>> {
        let entries = run.pair.index().entries(name);
        let entries: Vec<_> =
            entries.map(|tensor| Ok(Self { tensor, base: run.find_base(&tensor)?, runs: tensor.runs() })).collect::<Result<_>>()?;
        match entries.is_empty() {
            true => Err(Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(name)))),
            false => Ok(entries),
        }
    }

    /// The base lanes of the entry.
    fn base_lanes<'r, B: Source>(&self, run: &'r Run<'_, B>) -> PaddedBase<'r> {
        PaddedBase::new(Some(run.base()), self.base)
    }

    /// Those of these bytes of the tensor that the entry has.
    fn bytes_in(&self, bytes: &Range<u64>) -> Range<u64> {
        match &self.runs {
            Some(runs) => runs.before(bytes.start)..runs.before(bytes.end),
            None => bytes.clone(),
        }
    }

    /// The chunks that contain a range of bytes of the entry.
    fn chunks_of(&self, bytes: &Range<u64>) -> Range<u32> {
        let width = self.tensor.lane_bytes() as u64;
        self.tensor.chunks_of(&(bytes.start / width..bytes.end / width))
    }
}

impl Job<'_, '_> {
    /// The bytes of the chunk in its entry.
    fn bytes(&self) -> Range<u64> {
        let (lanes, width) = (self.entry.tensor.chunk_range(self.chunk), self.entry.tensor.lane_bytes() as u64);
        lanes.start * width..lanes.end * width
    }

    fn size(&self) -> usize {
        (self.bytes().end - self.bytes().start) as usize
    }
}

/// The bytes of a range of elements. Decodes only the chunks that have bytes of the range.
pub(super) fn range<B: Source>(run: &Run<'_, B>, name: &str, elements: Range<u64>) -> Result<Vec<u8>> {
    let entries = Entry::all(run, name)?;
    let (lanes, width) = (entries[0].tensor.lanes_of_whole(elements)?, entries[0].tensor.lane_bytes() as u64);
    let wanted = lanes.start * width..lanes.end * width;
    let of_entries: Vec<_> = entries.iter().map(|entry| (entry, entry.bytes_in(&wanted))).collect();
    let (covered, size) = (of_entries.iter().map(|(_, bytes)| bytes.end - bytes.start).sum::<u64>(), wanted.end - wanted.start);
    if covered < size {
        let name = Escaped(name);
        return Err(Error::InvalidArgument(format!(
            "the pair has parts with {covered} of {size} bytes of the range of tensor {name}"
        )));
    }
    let mut out = Vec::new();
    let size = usize::try_from(size).ok().filter(|&size| out.try_reserve_exact(size).is_ok());
    out.resize(size.ok_or_else(|| Error::io("allocate", name.as_ref(), std::io::ErrorKind::OutOfMemory.into()))?, 0);
    let compared = run.compared(of_entries.iter().flat_map(|(entry, bytes)| entry.chunks_of(bytes)));
    let mut worker = DecodeWorker::new();
    for (entry, bytes) in of_entries {
        for chunk in entry.chunks_of(&bytes) {
            let job = Job { entry, chunk };
            let in_chunk = job.bytes();
            let mut decoded = vec![0; job.size()];
            decode_from(entry.base_lanes(run), &compared, &entry.tensor, chunk, &mut worker, &mut decoded, false)?;
            let (from, to) = (bytes.start.max(in_chunk.start), bytes.end.min(in_chunk.end));
            let decoded = &decoded[(from - in_chunk.start) as usize..(to - in_chunk.start) as usize];
            let mut copy = |at: u64, range: Range<usize>| -> Result<()> {
                out[(at - wanted.start) as usize..][..range.len()].copy_from_slice(&decoded[range]);
                Ok(())
            };
            match &entry.runs {
                Some(runs) => runs.try_each(from, decoded.len(), copy)?,
                None => copy(from, 0..decoded.len())?,
            }
        }
    }
    compared.finish()?;
    Ok(out)
}

/// The elements whose bits differ between base and target, with their new values.
pub(super) fn changes<B: Source>(run: &Run<'_, B>, name: &str) -> Result<Changes> {
    let entries = Entry::all(run, name)?;
    let element = entries[0].tensor.element_bytes();
    let mut changes = Changes::default();
    let of_chunk = |job: Job<'_, '_>, old: &[u8], new: &[u8]| {
        let start = job.bytes().start;
        let position = |n: u64| {
            let at = start + n * element as u64;
            job.entry.runs.as_ref().map_or(at, |runs| runs.at(at)) / element as u64
        };
        let mut in_chunk = Changes::default();
        in_chunk.collect(position, old, new, element);
        in_chunk
    };
    changed_chunks(run, name, &entries, of_chunk, |in_chunk| {
        changes.positions.extend(in_chunk.positions);
        changes.values.extend(in_chunk.values);
    })?;
    changes.sort(element);
    Ok(changes)
}

/// How far the lanes of a tensor move.
pub(super) fn moves<B: Source>(run: &Run<'_, B>, name: &str) -> Result<Moves> {
    let entries = Entry::all(run, name)?;
    let dtype = entries[0].tensor.dtype;
    let mut moves = Moves::default();
    let of_chunk = |_: Job<'_, '_>, old: &[u8], new: &[u8]| with_lane!(dtype.lane_bytes(), L => Moves::of::<L>(dtype, old, new));
    changed_chunks(run, name, &entries, of_chunk, |in_chunk| moves.add(&in_chunk))?;
    let lanes = entries.iter().map(|entry| entry.tensor.lanes).sum::<u64>();
    moves.unchanged = lanes - moves.changed();
    Ok(moves)
}

/// Decodes the changed chunks of a tensor's entries. Calls `of_chunk` with the base and the target lanes of each chunk, on any
/// thread and in any order, and `add` with the results in the order of the chunks.
fn changed_chunks<'t, 'a, B: Source, T: Send>(
    run: &Run<'_, B>,
    name: &str,
    entries: &'t [Entry<'a>],
    of_chunk: impl Fn(Job<'t, 'a>, &[u8], &[u8]) -> T + Sync,
    mut add: impl FnMut(T),
) -> Result<()> {
    run.pair.index().check_has(name, &Rectangle::whole(entries[0].tensor.whole_shape()))?;
    let workers = Pool::new(DecodeWorker::new);
    let compared = run.compared(entries.iter().flat_map(|entry| entry.tensor.chunks()));
    let jobs = entries.iter().flat_map(|entry| entry.tensor.chunks().map(move |chunk| Job { entry, chunk }));
    in_batches(
        jobs.filter(|job| compared.encoded(job.chunk).num_deltas > 0),
        |job| job.size() as u64,
        |&mut job| {
            let Job { entry, chunk } = job;
            let (size, start) = (job.size(), job.bytes().start);
            let found = workers.with(|worker| {
                worker.with_lanes(2 * size, |worker, lanes| -> Result<T> {
                    let (new, old) = lanes.split_at_mut(size);
                    decode_from(entry.base_lanes(run), &compared, &entry.tensor, chunk, worker, new, false)?;
                    entry.base_lanes(run).read(start, old)?;
                    Ok(of_chunk(job, old, new))
                })
            })?;
            run.progress.done(size as u64)?;
            Ok(found)
        },
        |_, found| {
            add(found);
            Ok(())
        },
    )?;
    compared.finish()?;
    Ok(())
}
