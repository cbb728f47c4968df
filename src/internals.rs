//! Internals for the project's own tests, benchmarks and fuzz targets, and for `tpde-cuda`, which has the version of this crate. Not
//! part of the public interface: anything here can change in any release.

pub use crate::encode::encode;
// For tpde-cuda, beside hidden methods of `Chain`. Its encoder makes the same pairs: entries, choices, samples, reports.
pub use crate::encode::{
    Candidate, ChainNames, Estimator, Group, LaneEstimate, LaneRange, PIECE, Pieces, Plan, Selection, check_holdable,
    check_options, choose_coding, group, low_bits, report, train_with,
};
// It writes the files of a pair, with the layout of the target's files.
pub use crate::pair_files::{NewBlob, NewPair};
pub use crate::safetensors::{check_composable, file_specs};
// It checks payloads that are decoded on the processor.
pub use crate::reader::checked_payload;
// Its slices are in device memory.
pub use crate::slice::{View, Views};
// Its builders report progress.
pub use crate::watch::{Watcher, progress_methods};
// Its tests compare derived bases.
pub use crate::cut::ConvertedTensor;

use crate::apply::find_base;
use crate::checkpoint::Checkpoint;
use tpde_core::index::Tensor;

/// Returns the lanes that a base gives for an entry with a derived base; `None` for another entry, and if the base does not have
/// the tensors that the entry states.
pub fn converted_lanes(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Option<Vec<u8>> {
    let piece = find_base(tensor, base).ok()?.filter(|_| tensor.derived.is_some())?;
    let mut lanes = vec![0; usize::try_from(tensor.bytes()).ok()?];
    piece.read(base, 0, &mut lanes).ok()?;
    Some(lanes)
}
