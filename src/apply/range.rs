//! Parts of a tensor: a range of elements, and the changed elements.

use super::engine::Engine;
use super::memory::Role;
use super::moves::Moves;
use super::plan::{Plan, Task};
use super::request::Request;
use crate::base::PaddedBase;
use crate::batches::Pool;
use crate::source::zeroed;
use std::ops::Range;
use tpde_core::error::{Error, Result};
use tpde_core::lane::with_lane;
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

/// The bytes of a range of elements. Decodes only the chunks that have bytes of the range.
pub(super) fn range<B: Source>(request: &Request<'_, B>, name: &str, elements: Range<u64>) -> Result<Vec<u8>> {
    let (plan, size) = Plan::of_range(request.pair.index(), name, elements, request.base)?;
    let mut out = zeroed(size).map_err(|e| Error::io("allocate", name.as_ref(), e))?;
    // A range is not part of what is announced to the watcher.
    let engine = Engine { progress: &|_| {}, ..request.engine(&plan) };
    engine.execute(&mut [&mut out], Role::Target, |_, _| Ok(()), |()| {})?;
    Ok(out)
}

/// The elements whose bits differ between base and target, with their new values.
pub(super) fn changes<B: Source>(request: &Request<'_, B>, name: &str) -> Result<Changes> {
    let plan = Plan::of_changes(request.pair.index(), name, request.base)?;
    let element = plan.items[0].tensor.element_bytes();
    let layouts: Vec<_> = plan.items.iter().map(|item| item.tensor.layout()).collect();
    let of_chunk = |task: Task, old: &[u8], new: &[u8]| {
        let start = plan.bytes_of(task).0;
        let position = |n: u64| {
            let at = start + n * element as u64;
            layouts[task.item].as_ref().map_or(at, |layout| layout.at(at)) / element as u64
        };
        let mut in_chunk = Changes::default();
        in_chunk.collect(position, old, new, element);
        in_chunk
    };
    let mut changes = Changes::default();
    compare_lanes(request, &plan, of_chunk, |in_chunk| {
        changes.positions.extend(in_chunk.positions);
        changes.values.extend(in_chunk.values);
    })?;
    changes.sort(element);
    Ok(changes)
}

/// How far the lanes of a tensor move.
pub(super) fn moves<B: Source>(request: &Request<'_, B>, name: &str) -> Result<Moves> {
    let plan = Plan::of_changes(request.pair.index(), name, request.base)?;
    let dtype = plan.items[0].tensor.dtype;
    let mut moves = Moves::default();
    let of_chunk = |_, old: &[u8], new: &[u8]| with_lane!(dtype.lane_bytes(), L => Moves::of::<L>(dtype, old, new));
    compare_lanes(request, &plan, of_chunk, |in_chunk| moves.add(&in_chunk))?;
    let lanes = plan.items.iter().map(|item| item.tensor.lanes).sum::<u64>();
    moves.unchanged = lanes - moves.changed();
    Ok(moves)
}

/// Decodes the chunks of a plan. Calls `of_chunk` with the base and the target lanes of each chunk, on any thread and in any order,
/// and `add` with the results in the order of the plan.
fn compare_lanes<B: Source, T: Send>(
    request: &Request<'_, B>,
    plan: &Plan<'_>,
    of_chunk: impl Fn(Task, &[u8], &[u8]) -> T + Sync,
    add: impl FnMut(T),
) -> Result<()> {
    let buffers = Pool::new(Vec::new);
    let observe = |task: Task, new: &[u8]| {
        let base = PaddedBase::new(Some(request.base), plan.items[task.item].base.as_ref());
        buffers.with(|buffer| Ok(of_chunk(task, base.bytes(plan.bytes_of(task).0, new.len(), buffer)?, new)))
    };
    request.engine(plan).execute(&mut [], Role::Target, observe, add).map(drop)
}
