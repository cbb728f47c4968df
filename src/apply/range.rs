//! Parts of a tensor: a range of elements, and the changed elements.

use super::chunk::{Chunks, DecodeWorker, base_lanes, decode};
use super::run::Run;
use crate::batches::{Pool, in_batches};
use crate::error::{Error, Escaped, Result};
use crate::index::Tensor;
use crate::source::Source;
use crate::sums::ChunkSum;
use std::ops::Range;

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
    /// Adds the elements that differ between `old` and `new`. `first` is the position of their first element in the tensor.
    fn collect(&mut self, first: u64, old: &[u8], new: &[u8], element: usize) {
        const BLOCK: usize = 1024;
        for (block, (old, new)) in old.chunks(BLOCK).zip(new.chunks(BLOCK)).enumerate() {
            if old == new {
                continue;
            }
            let first = first + (block * BLOCK / element) as u64;
            for (i, (old, new)) in old.chunks(element).zip(new.chunks(element)).enumerate() {
                if old != new {
                    self.positions.push(first + i as u64);
                    self.values.extend_from_slice(new);
                }
            }
        }
    }
}

fn find<'a, B: Source>(run: &Run<'a, B>, name: &str) -> Result<Tensor<'a>> {
    run.pair.index().find(name).ok_or_else(|| Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(name))))
}

/// The bytes of a range of elements. Decodes only the chunks that overlap the range.
pub(super) fn range<B: Source>(run: &Run<'_, B>, name: &str, elements: Range<u64>) -> Result<Vec<u8>> {
    let tensor = find(run, name)?;
    let (lanes, chunks) = tensor.locate(elements)?;
    let base = run.find_base(&tensor)?;
    let width = tensor.lane_bytes() as u64;
    let mut out = Vec::new();
    let mut worker = DecodeWorker::new();
    let compared = run.compared(chunks.clone());
    for chunk in chunks {
        let range = tensor.chunk_range(chunk);
        let mut buffer = vec![0; ((range.end - range.start) * width) as usize];
        let fill = |first, lanes: &mut [u8], sum: &mut ChunkSum| base_lanes(&tensor, run.base(), base, first, lanes, sum);
        decode(&compared, &tensor, chunk, fill, &mut worker, &mut buffer, false)?;
        let from = lanes.start.max(range.start) - range.start;
        let to = lanes.end.min(range.end) - range.start;
        out.extend_from_slice(&buffer[(from * width) as usize..(to * width) as usize]);
    }
    compared.finish()?;
    Ok(out)
}

/// The elements whose bits differ between base and target, with their new values.
pub(super) fn changes<B: Source>(run: &Run<'_, B>, name: &str) -> Result<Changes> {
    let tensor = find(run, name)?;
    let base = run.find_base(&tensor)?;
    let width = tensor.lane_bytes() as u64;
    let element = tensor.element_bytes();
    let workers = Pool::new(DecodeWorker::new);
    let mut changes = Changes::default();
    let compared = run.compared(tensor.chunks());
    in_batches(
        tensor.chunks().filter(|&chunk| compared.encoded(chunk).num_deltas > 0),
        |&chunk| (tensor.chunk_range(chunk).end - tensor.chunk_range(chunk).start) * width,
        |&mut chunk| {
            let range = tensor.chunk_range(chunk);
            let size = ((range.end - range.start) * width) as usize;
            let fill = |first, lanes: &mut [u8], sum: &mut ChunkSum| base_lanes(&tensor, run.base(), base, first, lanes, sum);
            let mut in_chunk = Changes::default();
            workers.with(|worker| {
                worker.with_lanes(2 * size, |worker, lanes| -> Result<()> {
                    let (new, old) = lanes.split_at_mut(size);
                    decode(&compared, &tensor, chunk, fill, worker, new, false)?;
                    fill(range.start, old, &mut ChunkSum::default())?;
                    in_chunk.collect(range.start * width / element as u64, old, new, element);
                    Ok(())
                })
            })?;
            run.progress.done(size as u64)?;
            Ok(in_chunk)
        },
        |_, in_chunk| {
            changes.positions.extend(in_chunk.positions);
            changes.values.extend(in_chunk.values);
            Ok(())
        },
    )?;
    compared.finish()?;
    Ok(changes)
}
