//! Decoders on a device, in place of the CPU.

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::index::ValidatedIndex;
use crate::source::Source;

/// A decoder on a device, in place of the CPU: set it with [`Apply::on`](crate::Apply::on).
pub trait Accelerator: Sync {
    /// Rebuilds the tensors of `work` into new memory, and calls `done` with each whole tensor, in the order of `work.tensors`.
    /// The first argument of `done` is the tensor's position in that list. CRC and sums are checked, digests are not.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a damaged chunk, which it names; any error of `done`; errors of the device.
    fn rebuild(&self, work: &Work<'_>, done: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<()>;
}

/// What an [`Accelerator`] rebuilds.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Work<'a> {
    /// The index.
    pub index: &'a ValidatedIndex,
    /// The blob that belongs to it.
    pub blob: &'a dyn Source,
    /// The base.
    pub base: &'a dyn Checkpoint,
    /// Per tensor, its number in the index and the number of its base tensor in `base`. Dtypes and shapes have been checked.
    pub tensors: &'a [(usize, Option<usize>)],
}
