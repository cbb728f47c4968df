//! The trait of decoders that run on a device instead of the CPU.

use crate::checkpoint::Checkpoint;
use crate::reader::PayloadDigests;
use tpde_core::error::Result;
use tpde_core::index::ValidatedIndex;
use tpde_core::source::Source;

/// A decoder that runs on a device instead of the CPU. [`Apply::on`](crate::Apply::on) selects it.
pub trait Accelerator: Sync {
    /// Rebuilds the tensors of `work` in new memory, and calls `done` with each complete tensor, in the order of `work.tensors`.
    /// The first argument of `done` is the tensor's position in that list. CRC and sums are checked. Digests of tensors
    /// are compared by the caller, with the hashes that [`Work::hashed`] received for the tensor, or with hashes of the CPU.
    /// Returns which payloads were compared with the digests that the pair digest covers.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a damaged chunk, with the chunk's index; any error of `done`; errors of the
    /// device.
    fn rebuild(&self, work: &Work<'_>, done: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<PayloadDigests>;
}

/// BLAKE3 hashes of a rebuilt tensor, and of its base lanes unless the base kind is
/// [`BaseKind::None`](tpde_core::format::BaseKind::None) or
/// [`BaseKind::Prefix`](tpde_core::format::BaseKind::Prefix).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorHashes {
    /// The base tensor.
    pub base: Option<[u8; 32]>,
    /// The target tensor.
    pub target: [u8; 32],
}

/// The input of an [`Accelerator`].
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Work<'a> {
    /// The index.
    pub index: &'a ValidatedIndex,
    /// The blob of the same pair.
    pub blob: &'a dyn Source,
    /// The base lanes: a tensor for each of `tensors` that has a base. Tensors are found by position. Their names may repeat.
    pub base: &'a dyn Checkpoint,
    /// For each tensor, its position in the index, and the position of its base tensor in `base`. Dtypes and shapes have been
    /// checked.
    pub tensors: &'a [(usize, Option<usize>)],
    /// Set if digests of tensors are compared. An accelerator that hashes tensors itself calls it before `done` of each tensor.
    pub hashed: Option<&'a (dyn Fn(TensorHashes) + Sync)>,
}
