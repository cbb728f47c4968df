//! The caller's memory, divided among chunks.

use super::plan::{Plan, Task};
use std::ops::Range;
use tpde_core::error::{Error, Result};
use tpde_core::format::BaseKind;
use tpde_core::index::Tensor;
use tpde_core::sums::ChunkSum;

/// What the caller's memory is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It receives the target. Its content is ignored, and undefined after an error.
    Target,
    /// It has the base, which is read.
    Base,
    /// It has the base. Each chunk is checked before it is replaced by the target.
    InPlace,
}

/// The bytes of a chunk that are in memory: ranges of the chunk, ascending, and their memory. No other chunk has this memory.
pub(super) struct ChunkMemory<'m>(Vec<(Range<usize>, &'m mut [u8])>);

impl ChunkMemory<'_> {
    /// All bytes of a chunk of `size` bytes, if they are in one piece.
    pub fn whole(&mut self, size: usize) -> Option<&mut [u8]> {
        match &mut self.0[..] {
            [(range, memory)] if range.len() == size => Some(memory),
            _ => None,
        }
    }

    /// Replaces the bytes in memory by those of a chunk.
    pub fn store(&mut self, chunk: &[u8]) {
        self.0.iter_mut().for_each(|(range, memory)| memory.copy_from_slice(&chunk[range.clone()]));
    }

    /// Fills blocks of a chunk of `tensor` with base lanes, all of which are in memory. For [`decode`](super::chunk::decode).
    pub fn base_lanes(&self, tensor: &Tensor<'_>, chunk: u32) -> impl Fn(u64, &mut [u8], &mut ChunkSum) -> Result<()> {
        let (first, width, base_kind) = (tensor.chunk_range(chunk).start, tensor.lane_bytes(), tensor.base_kind);
        move |lane, block, sum| {
            // The old bytes of a tensor without a base are not its base.
            if base_kind == BaseKind::None {
                block.fill(0);
                sum.add(block);
            } else {
                self.load((lane - first) as usize * width, block, sum);
            }
            Ok(())
        }
    }

    fn load(&self, at: usize, block: &mut [u8], sum: &mut ChunkSum) {
        let end = at + block.len();
        let first = self.0.partition_point(|(range, _)| range.end <= at);
        let near = self.0[first..].iter().take_while(|(range, _)| range.start < end);
        if let Some((range, memory)) = self.0.get(first).filter(|(range, _)| range.start <= at && end <= range.end) {
            return sum.copy(&memory[at - range.start..][..block.len()], block);
        }
        for (range, memory) in near {
            let (from, to) = (range.start.max(at), range.end.min(end));
            block[from - at..to - at].copy_from_slice(&memory[from - range.start..to - range.start]);
        }
        sum.add(block);
    }
}

/// Memory in bytes that [`divide`] needs for a run, with room for growing lists.
pub(super) const RUN_BYTES: u64 = 128;

/// Divides memory among chunks. Memory: [`RUN_BYTES`] for each run of the chunks.
///
/// # Errors
/// [`Error::InvalidArgument`] if two chunks share bytes. Plans exclude that.
pub(super) fn divide<'m>(memories: &'m mut [&mut [u8]], plan: &Plan<'_>, tasks: Vec<Task>) -> Result<Vec<(Task, ChunkMemory<'m>)>> {
    let mut runs = Vec::new();
    for (job, &task) in tasks.iter().enumerate() {
        let (offset, size) = plan.bytes_of(task);
        for place in &plan.items[task.item].places {
            place.placement.try_each(offset, size, |at, range| {
                runs.push((place.memory, at, range, job));
                Ok::<_, Error>(())
            })?;
        }
    }
    runs.sort_by_key(|(memory, at, ..)| (*memory, *at));
    let mut jobs: Vec<_> = tasks.into_iter().map(|task| (task, ChunkMemory(Vec::new()))).collect();
    let mut runs = runs.into_iter().peekable();
    for (number, memory) in memories.iter_mut().enumerate() {
        let (mut rest, mut start) = (&mut **memory, 0);
        while let Some((_, at, range, job)) = runs.next_if(|(memory, ..)| *memory == number) {
            let end = at.saturating_add(range.len());
            let behind = at.checked_sub(start).and_then(|gap| rest.split_at_mut_checked(gap));
            let Some((piece, behind)) = behind.and_then(|(_, behind)| behind.split_at_mut_checked(range.len())) else {
                let reason = format!("bytes {at}..{end} of memory {number} belong to two chunks, or are not there");
                return Err(Error::InvalidArgument(reason));
            };
            jobs[job].1.0.push((range, piece));
            (rest, start) = (behind, end);
        }
    }
    jobs.iter_mut().for_each(|(_, memory)| memory.0.sort_by_key(|(range, _)| range.start));
    Ok(jobs)
}
