//! Internals for the project's own tests, benchmarks and fuzz targets. Not part of the public interface: anything here can change
//! in any release.

#[cfg(fuzzing)]
pub use crate::codec::fuzzing;
pub use crate::codec::{ChunkDecoder, ChunkEncoder, Coding, DecodeCost, Encoded, EncodedChunk, TableSet};
pub use crate::encode::encode;
pub use crate::error::{MESSAGE_CHARS, SHOWN_CHARS};
pub use crate::floats::{cast_lanes, scale_lanes, scale_nibbles};
pub use crate::format::*;
pub use crate::sums::chunk_sum;
pub use crate::writer::{FileSpec, Finished, PairBuilder, PartSpec, TensorSpec};

use crate::apply::find_base;
use crate::checkpoint::Checkpoint;
use crate::index::{Tensor, ValidatedIndex};

/// Returns the header of an index.
pub fn header(index: &ValidatedIndex) -> &IndexHeader {
    index.header()
}

/// Returns the index map.
pub fn records(index: &ValidatedIndex) -> &[ChunkMetadata] {
    index.records()
}

/// Returns the chunk sums.
pub fn sums(index: &ValidatedIndex) -> &[ChunkSums] {
    index.sums()
}

/// Returns the table sets of codec `conditioned`.
pub fn table_sets(index: &ValidatedIndex) -> &[TableSet] {
    index.table_sets()
}

/// Returns the table set that a tensor uses.
pub fn tables<'a>(tensor: &Tensor<'a>) -> Option<&'a TableSet> {
    tensor.tables
}

/// Returns the digests of a tensor.
pub fn digests<'a>(tensor: &Tensor<'a>) -> &'a TensorDigests {
    tensor.digests
}

/// Returns the lanes that a base gives for an entry with a derived base; `None` for another entry, and if the base does not have
/// the tensors that the entry states.
pub fn formed_lanes(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Option<Vec<u8>> {
    let formed = find_base(tensor, base).ok()??.formed(tensor)?;
    let mut lanes = vec![0; usize::try_from(tensor.bytes()).ok()?];
    formed.read(base, 0, &mut lanes).ok()?;
    Some(lanes)
}
