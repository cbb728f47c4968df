//! Devices that decode in place of the processor.

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::index::ValidatedIndex;
use crate::source::Source;

/// Decodes in place of the processor: a device, for [`Apply::on`](crate::Apply::on).
pub trait Accelerator: Sync {
    /// Rebuilds tensors out of place, and hands each of them over whole, in their order. CRC and sums are checked, digests are
    /// not.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) naming the chunk that is wrong, any error of `done`, and errors of the device.
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
    /// Places of tensors in the index, and of their bases in the base, whose dtypes and shapes have been checked.
    pub tensors: &'a [(usize, Option<usize>)],
}
