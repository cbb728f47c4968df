//! Access to private parts for fuzz targets, only under `cfg(fuzzing)`.

use super::{EncodedChunk, conditioned};
use crate::codec::simd::Platform;
use crate::error::Result;
use crate::lane::with_lane;
use crate::prelude::*;

pub use super::conditioned::{check_lookup, model};

/// Decoders of codec `conditioned`, one per platform that the processor supports, reused for every chunk.
pub struct Decoders(Vec<conditioned::Decoder>);

impl Default for Decoders {
    fn default() -> Self {
        Self(Platform::available().into_iter().map(conditioned::Decoder::with_platform).collect())
    }
}

impl Decoders {
    /// Returns the names of the decoders' platforms.
    pub fn names() -> Vec<String> {
        Platform::available().iter().map(|platform| format!("{platform:?}")).collect()
    }

    /// Decodes a chunk on every platform. Returns the chunk sum or the error, and the lanes. See
    /// [`ChunkDecoder::decode`](super::ChunkDecoder::decode).
    pub fn decode(&mut self, chunk: &EncodedChunk<'_>, base: &[u8]) -> Vec<(Result<u64>, Vec<u8>)> {
        let EncodedChunk { dtype, tables, encoded, payload, base_sum, .. } = *chunk;
        let chunk = conditioned::ConditionedChunk { dtype, tables, encoded, payload, base_sum };
        let decode = |decoder: &mut conditioned::Decoder| {
            let mut lanes = base.to_vec();
            let sum = with_lane!(dtype.lane_bytes(), L => decoder.decode::<L>(chunk, &mut lanes, &mut |_, _| Ok(())));
            (sum, lanes)
        };
        self.0.iter_mut().map(decode).collect()
    }
}
