//! Small pairs for tests.

use super::{PairBuilder, TensorSpec};
use crate::codec::{ChunkEncoder, Codec, Coding, DecodeCost};
use crate::digest;
use crate::format::BaseKind;
use crate::index::ValidatedIndex;
use crate::lane::Dtype;
use crate::prelude::*;
use crate::sums::chunk_sum;

/// The index of a pair without tensors.
pub(crate) fn empty() -> ValidatedIndex {
    PairBuilder::new(Vec::new(), "memory".into(), Default::default()).unwrap().finish().unwrap().index
}

/// The index of a pair of one tensor of one chunk, with a base.
pub(crate) fn of_chunk(codec: Codec, dtype: Dtype, base: &[u8], target: &[u8]) -> ValidatedIndex {
    let coding = match codec {
        Codec::Raw => Coding::Raw,
        Codec::Zstd => Coding::Zstd(None),
        Codec::Conditioned => Coding::Conditioned { tables: None, low_bits: 0, decode_cost: DecodeCost::default() },
    };
    let mut payload = Vec::new();
    let encoded = ChunkEncoder::new().unwrap().encode(coding, dtype, base, target, &mut payload).unwrap();
    let mut builder = PairBuilder::new(Vec::new(), "memory".into(), Default::default()).unwrap();
    builder.begin_tensor(&TensorSpec {
        name: "t".into(),
        base_name: None,
        dtype,
        shape: vec![(target.len() / dtype.lane_bytes()) as u64],
        part: None,
        base_kind: BaseKind::Same,
        base_param: 0,
        derived: None,
        codec,
        tables: None,
        chunk_lanes_log2: 12,
    });
    builder.chunk(&payload, encoded, chunk_sum(base), chunk_sum(target)).unwrap();
    builder.end_tensor(Some(digest::of(base)), digest::of(target));
    builder.finish().unwrap().index
}
