//! Internals for the project's own tests, benchmarks and fuzz targets. Not part of the public interface: anything here can change
//! in any release.

pub use crate::encode::encode;

use crate::apply::find_base;
use crate::checkpoint::Checkpoint;
use tpde_core::index::Tensor;

/// Returns the lanes that a base gives for an entry with a derived base; `None` for another entry, and if the base does not have
/// the tensors that the entry states.
pub fn converted_lanes(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Option<Vec<u8>> {
    let converted = find_base(tensor, base).ok()??.converted(tensor)?;
    let mut lanes = vec![0; usize::try_from(tensor.bytes()).ok()?];
    converted.read(base, 0, &mut lanes).ok()?;
    Some(lanes)
}
