//! Doors for fuzz targets and for nobody else: there under `cfg(fuzzing)` alone.

use super::{Encoded, TableSet, conditioned};
use crate::codec::simd::Path;
use crate::error::Result;
use crate::lane::{Dtype, with_lane};

pub use super::conditioned::model;

/// Reads a table set.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if it is none.
pub fn parse_tables(bytes: &[u8]) -> Result<TableSet> {
    TableSet::parse(bytes)
}

/// The bytes of a table set.
pub fn tables_to_bytes(set: &TableSet) -> Vec<u8> {
    set.to_bytes()
}

/// Asserts that all forms in which decoders look up a set agree.
pub fn check_lookup(set: &TableSet) {
    conditioned::check_lookup(set);
}

/// Decoders of codec `conditioned`, one for each path that the processor can take, used again for every chunk.
pub struct Decoders(Vec<conditioned::Decoder>);

impl Default for Decoders {
    fn default() -> Self {
        Self(Path::available().into_iter().map(conditioned::Decoder::with_path).collect())
    }
}

impl Decoders {
    /// The instructions that the decoders use.
    pub fn names() -> Vec<String> {
        Path::available().iter().map(|path| format!("{path:?}")).collect()
    }

    /// Decodes a payload on every path: the chunk sum or the error, and the lanes. Arguments as in
    /// [`ChunkDecoder::decode`](super::ChunkDecoder::decode).
    pub fn decode(
        &mut self,
        tables: Option<&TableSet>,
        dtype: Dtype,
        encoded: Encoded,
        payload: &[u8],
        base_sum: u64,
        base: &[u8],
    ) -> Vec<(Result<u64>, Vec<u8>)> {
        let decode = |decoder: &mut conditioned::Decoder| {
            let mut lanes = base.to_vec();
            let sum = with_lane!(dtype.lane_bytes(), L => {
                decoder.decode::<L>(dtype, tables, payload, encoded, base_sum, &mut lanes, &mut |_, _| Ok(()))
            });
            (sum, lanes)
        };
        self.0.iter_mut().map(decode).collect()
    }
}
