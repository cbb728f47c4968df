//! Requests of whole entries: a pair, a base, and a selection (spec section 13).

use super::accelerator::Accelerator;
use super::engine::Engine;
use super::find::{BaseTensors, find_base};
use super::memory::Role;
use super::plan::{Item, Plan, Task};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::cut::{Cut, Piece};
use crate::reader::{Pair, PayloadDigests, VerifyReport};
use crate::watch::Progress;
use rayon::prelude::*;
use serde::Serialize;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::index::{Tensor, ValidatedIndex};
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

/// The parameters of an application.
pub(crate) struct Request<'a, B> {
    pub pair: &'a Pair<B>,
    /// The base of the caller. Base lanes are read from [`Request::base`].
    pub whole_base: &'a dyn Checkpoint,
    /// For a pair with parts or derived bases, the base with one tensor per entry of the pair.
    cut: Option<Cut<'a>>,
    /// Indexes of the selected tensors in the pair's index, ascending.
    pub selected: Vec<usize>,
    pub digests: bool,
    pub progress: Progress<'a>,
    pub accelerator: Option<&'a dyn Accelerator>,
}

impl<'a, B: Source> Request<'a, B> {
    /// A request of all tensors, with all checks, on the processor. `find` finds base tensors of a pair that has parts or derived
    /// bases.
    pub fn new(
        pair: &'a Pair<B>,
        base: &'a dyn Checkpoint,
        progress: Progress<'a>,
        find: impl Fn(&dyn Checkpoint, &Tensor<'_>) -> Option<usize>,
    ) -> Self {
        let is_cut = pair.index().has_parts() || pair.index().has_derived();
        let cut = is_cut.then(|| cut_base(pair.index(), base, find));
        let selected = (0..pair.index().tensor_count()).collect();
        Self { pair, whole_base: base, cut, selected, digests: true, progress, accelerator: None }
    }

    /// The checkpoint that has the base tensors. Items have positions in it.
    pub fn base(&self) -> &dyn Checkpoint {
        self.cut.as_ref().map_or(self.whole_base, |cut| cut)
    }

    /// The position in [`Request::base`] of the base tensor that an entry has at position `found` of the caller's base.
    pub fn position(&self, tensor: &Tensor<'_>, found: usize) -> usize {
        if self.cut.is_some() { tensor.place } else { found }
    }

    /// The position of a tensor's base tensor in [`Request::base`], after checking dtype and shape.
    pub fn find_base(&self, tensor: &Tensor<'_>) -> Result<Option<usize>> {
        let found = find_base(tensor, self.whole_base)?;
        Ok(found.map(|found| self.position(tensor, found.base)))
    }

    /// The selected tensors.
    pub fn selected(&self) -> impl Iterator<Item = Tensor<'a>> + '_ {
        self.selected.iter().map(|&i| self.pair.index().tensor(i))
    }

    /// An engine that executes a plan of this request.
    pub fn engine<'r>(&'r self, plan: &'r Plan<'r>) -> Engine<'r, B> {
        Engine { digests: self.digests, ..Engine::new(self.pair, self.base(), plan, self.progress) }
    }

    /// All chunks of the selected tensors. `item` makes an item of a tensor, its number, and the position of its base tensor.
    pub fn plan(&self, item: impl Fn(Tensor<'a>, usize, Option<usize>) -> Item<'a>) -> Result<Plan<'a>> {
        let items = self.selected().enumerate().map(|(i, tensor)| Ok(item(tensor, i, self.find_base(&tensor)?)));
        Ok(Plan { items: items.collect::<Result<_>>()? })
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
        let plan = self.plan(|tensor, i, base| Item::in_memory(tensor, base, i))?;
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
        let plan = self.plan(|tensor, _, base| Item::whole(tensor, base))?;
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

/// The base with one tensor per entry of the index. Entries whose base `find` does not find have an empty tensor.
fn cut_base<'a>(
    index: &ValidatedIndex,
    base: &'a dyn Checkpoint,
    find: impl Fn(&dyn Checkpoint, &Tensor<'_>) -> Option<usize>,
) -> Cut<'a> {
    let mut cut = Cut::new(base);
    for tensor in index.tensors() {
        let (name, dtype) = (tensor.base_name.to_owned(), tensor.dtype);
        if tensor.base_kind.is_derived() {
            let scales = tensor.derived.and_then(|derived| base.find(derived.scales?.1));
            let found = find(base, &tensor).map(|base| BaseTensors { base, scales });
            let converted = found.filter(|found| found.fit(&tensor, base)).and_then(|found| found.converted(&tensor));
            if let Some(converted) = converted {
                cut.push(TensorInfo { name, dtype, shape: tensor.shape.to_vec() }, Piece::Converted(converted));
                continue;
            }
        }
        let fits = |&i: &usize| base.tensors()[i].dtype == dtype && base.tensors()[i].shape == tensor.whole_shape();
        match find(base, &tensor).filter(|i| tensor.part.is_none() && tensor.derived.is_none() || fits(i)) {
            Some(i) => {
                let whole = &base.tensors()[i];
                let shape = if tensor.part.is_some() { tensor.shape } else { &whole.shape[..] };
                let info = TensorInfo { shape: shape.to_vec(), ..whole.clone() };
                cut.push(info, Piece::of(i, tensor.layout()));
            }
            None => cut.push(TensorInfo { name, dtype, shape: vec![0] }, Piece::of(usize::MAX, None)),
        }
    }
    cut
}
