//! Requests out of place: a pair, a base, and a selection or slices (spec section 13).

use super::accelerator::Accelerator;
use super::engine::Engine;
use super::memory::Role;
use super::plan::{Plan, Task};
use crate::checkpoint::Checkpoint;
use crate::reader::{Pair, PayloadDigests, VerifyReport};
use crate::slice::Memories;
use crate::watch::Progress;
use rayon::prelude::*;
use serde::Serialize;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::index::Tensor;
use tpde_core::source::Source;

/// Receives rebuilt bytes. Calls come from any thread; their byte ranges never overlap.
pub trait Sink: Sync {
    /// Stores `bytes` at byte `offset` of the tensor at position `tensor_index` of the pair's index.
    ///
    /// # Errors
    /// Any error that prevents the sink from storing the bytes. It ends the application.
    fn write(&self, tensor_index: usize, offset: u64, bytes: &[u8]) -> Result<()>;
}

/// The result of an application.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ApplyReport {
    /// Number of rebuilt tensors.
    pub tensors: u64,
    /// Size of the rebuilt tensors in bytes.
    pub bytes: u64,
    /// Whether base and target were compared with the digests of the pair.
    pub digests_checked: bool,
    /// Whether payloads were compared with the digests that the pair digest covers.
    pub payload_digests: PayloadDigests,
    /// Files of the output's folder that programs would have read instead of the output. They were removed when it was published.
    pub removed: Vec<String>,
}

impl ApplyReport {
    pub(super) fn of_slices(memories: &Memories<'_>, digests_checked: bool, payload_digests: PayloadDigests) -> Self {
        let (tensors, bytes) = (memories.names().count() as u64, memories.held_bytes());
        Self { tensors, bytes, digests_checked, payload_digests, removed: Vec::new() }
    }
}

/// The parameters of an application.
pub(crate) struct Request<'a, B> {
    pub pair: &'a Pair<B>,
    pub base: &'a dyn Checkpoint,
    /// Indexes of the selected tensors in the pair's index, ascending.
    pub selected: Vec<usize>,
    pub digests: bool,
    pub progress: Progress<'a>,
    pub accelerator: Option<&'a dyn Accelerator>,
}

impl<'a, B: Source> Request<'a, B> {
    /// A request of all tensors, with all checks, on the processor.
    pub fn new(pair: &'a Pair<B>, base: &'a dyn Checkpoint, progress: Progress<'a>) -> Self {
        let selected = (0..pair.index().tensor_count()).collect();
        Self { pair, base, selected, digests: true, progress, accelerator: None }
    }

    /// The selected tensors.
    pub fn selected(&self) -> impl Iterator<Item = Tensor<'a>> + '_ {
        self.selected.iter().map(|&i| self.pair.index().tensor(i))
    }

    /// An engine that executes a plan of this request.
    pub fn engine<'r>(&'r self, plan: &'r Plan<'r>) -> Engine<'r, B> {
        Engine { digests: self.digests, ..Engine::new(self.pair, self.base, plan, self.progress) }
    }

    /// Rebuilds into buffers: one per selected tensor, of the tensor's size.
    pub fn to_buffers(&self, outputs: &mut [&mut [u8]]) -> Result<ApplyReport> {
        if outputs.len() != self.selected.len() {
            let (expected, found) = (self.selected.len(), outputs.len());
            return Err(Error::InvalidArgument(format!("expected {expected} buffers, one per tensor, found {found}")));
        }
        for (output, tensor) in outputs.iter().zip(self.selected()) {
            if output.len() as u64 != tensor.bytes() {
                let (name, found, expected) = (Escaped(tensor.name), output.len(), tensor.bytes());
                return Err(Error::InvalidArgument(format!("the buffer of tensor {name} has {found} bytes: expected {expected}")));
            }
        }
        let plan = Plan::in_memories(self.selected(), self.base)?;
        let engine = self.engine(&plan);
        let outcome = match self.accelerator {
            Some(accelerator) => engine.execute_on(accelerator, &mut |i, bytes| {
                outputs[i].copy_from_slice(bytes);
                Ok(())
            }),
            None => engine.execute(outputs, Role::Target, |_, _| Ok(()), |()| {}),
        };
        Ok(self.report(outcome.map_err(|e| engine.explain(e))?))
    }

    /// Rebuilds slices in `bytes`, memory whose content is ignored; without `bytes`, decodes and checks without storing. Entries of
    /// which all chunks are decoded are compared with their digests.
    pub fn to_slices(&self, memories: &Memories<'_>, bytes: Option<&mut [&mut [u8]]>) -> Result<ApplyReport> {
        let mut plan = Plan::out_of_place(self.pair.index(), memories, self.base)?;
        if bytes.is_none() {
            plan.items.iter_mut().for_each(|item| item.places.clear());
        }
        let engine = self.engine(&plan);
        let outcome = engine.execute(bytes.unwrap_or_default(), Role::Target, |_, _| Ok(()), |()| {});
        let payload_digests = outcome.map_err(|e| engine.explain(e))?;
        Ok(ApplyReport::of_slices(memories, self.digests && plan.is_complete(), payload_digests))
    }

    /// Rebuilds into a sink, chunk by chunk.
    pub fn to_sink(&self, sink: &dyn Sink) -> Result<ApplyReport> {
        self.rebuild(|tensor_index, offset, bytes| sink.write(tensor_index, offset, bytes)).map(|digests| self.report(digests))
    }

    /// Rebuilds and discards the result.
    pub fn verify(&self) -> Result<VerifyReport> {
        let payload_digests = self.rebuild(|_, _, _| Ok(()))?;
        Ok(VerifyReport {
            tensors: self.selected.len() as u64,
            chunks: self.selected().map(|t| u64::from(t.chunk_count)).sum(),
            stored_bytes: self.pair.index().size() + self.pair.index().header().blob_size,
            base_checked: self.digests,
            target_checked: self.digests,
            payload_digests,
        })
    }

    fn rebuild(&self, write: impl Fn(usize, u64, &[u8]) -> Result<()> + Sync) -> Result<PayloadDigests> {
        let plan = Plan::whole(self.selected(), self.base)?;
        let engine = self.engine(&plan);
        let outcome = match self.accelerator {
            Some(accelerator) => engine.execute_on(accelerator, &mut |i, bytes| {
                let pieces = bytes.par_chunks(1 << 20).enumerate();
                pieces.try_for_each(|(n, piece)| write(self.selected[i], (n as u64) << 20, piece))
            }),
            None => {
                let observe = |task: Task, lanes: &[u8]| write(plan.items[task.item].tensor.place, plan.bytes_of(task).0, lanes);
                engine.execute(&mut [], Role::Target, observe, |()| {})
            }
        };
        outcome.map_err(|e| engine.explain(e))
    }

    fn report(&self, payload_digests: PayloadDigests) -> ApplyReport {
        ApplyReport {
            tensors: self.selected.len() as u64,
            bytes: self.selected().map(|tensor| tensor.bytes()).sum(),
            digests_checked: self.digests,
            payload_digests,
            removed: Vec::new(),
        }
    }
}
