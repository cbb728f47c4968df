//! Decoding one chunk: steps 8 to 11 of spec section 13.

use crate::checkpoint::Checkpoint;
use crate::codec::ChunkDecoder;
use crate::digest;
use crate::error::{Error, Escaped, Result, Rule};
use crate::format::BaseKind;
use crate::index::Tensor;
use crate::reader::Pair;
use crate::source::Source;
use crate::sums::chunk_sum;

/// What a thread needs to decode chunks.
pub(super) struct Worker {
    decoder: ChunkDecoder,
    payload: Vec<u8>,
    pub lanes: Vec<u8>,
}

impl Worker {
    pub fn new() -> Self {
        Self { decoder: ChunkDecoder::new(), payload: Vec::new(), lanes: Vec::new() }
    }
}

/// Hashes of a chunk's lanes as pieces of their tensors, where they are asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hashes {
    pub base: Option<[u8; 32]>,
    pub target: [u8; 32],
}

/// The place of a tensor's base tensor in `base`, checked for dtype and shape; `None` without a base.
pub(super) fn find_base(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Result<Option<usize>> {
    let Some(shape) = tensor.base_shape() else { return Ok(None) };
    let broken = |found: &dyn std::fmt::Display| {
        let expected = format!("base tensor {} of {} {shape:?}", Escaped(tensor.base_name), tensor.dtype);
        Rule::BaseTensor.broken(expected, found).in_tensor(tensor.name)
    };
    let place = base.find(tensor.base_name).ok_or_else(|| broken(&"none"))?;
    let info = &base.tensors()[place];
    if info.dtype != tensor.dtype || info.shape != shape {
        return Err(broken(&format_args!("{} {:?}", info.dtype, info.shape)));
    }
    Ok(Some(place))
}

/// Step 8: fills `lanes` with the base lanes of a range, zeros where the base has none.
pub(super) fn base_lanes(
    tensor: &Tensor<'_>,
    base: &dyn Checkpoint,
    place: Option<usize>,
    first_lane: u64,
    lanes: &mut [u8],
) -> Result<()> {
    let width = tensor.lane_bytes() as u64;
    let present = match (tensor.base_kind, place) {
        (BaseKind::None, _) | (_, None) => 0,
        (BaseKind::Same, _) => lanes.len(),
        // The difference of two lanes of a chunk: it fits.
        (BaseKind::Prefix, _) => (tensor.base_lanes().saturating_sub(first_lane) * width).min(lanes.len() as u64) as usize,
    };
    let (from_base, zeros) = lanes.split_at_mut(present);
    zeros.fill(0);
    match place {
        Some(place) if !from_base.is_empty() => base.read(place, first_lane * width, from_base),
        _ => Ok(()),
    }
}

/// Steps 8 to 11: fills `lanes`, as long as the chunk, with its target lanes.
pub(super) fn decode<B: Source>(
    pair: &Pair<B>,
    tensor: &Tensor<'_>,
    chunk: u32,
    base: &dyn Checkpoint,
    place: Option<usize>,
    worker: &mut Worker,
    lanes: &mut [u8],
    with_hashes: bool,
) -> Result<Option<Hashes>> {
    let range = tensor.chunk_range(chunk);
    base_lanes(tensor, base, place, range.start, lanes)?;
    patch(pair, tensor, chunk, worker, lanes, with_hashes)
}

/// Steps 8 to 11 on base lanes that lie in `lanes` already.
pub(super) fn patch<B: Source>(
    pair: &Pair<B>,
    tensor: &Tensor<'_>,
    chunk: u32,
    worker: &mut Worker,
    lanes: &mut [u8],
    with_hashes: bool,
) -> Result<Option<Hashes>> {
    let at = |e: Error| e.in_chunk(chunk).in_tensor(tensor.name);
    let sums = &pair.index().sums()[chunk as usize];
    let (base_sum, target_sum) = (sums.base_sum.get(), sums.target_sum.get());
    let width = tensor.lane_bytes() as u64;
    let offset = tensor.chunk_range(chunk).start * width;

    Rule::ChunkBaseSum.check_eq(base_sum, chunk_sum(lanes)).map_err(at)?;
    // A `prefix` base has another length than its target: its pieces are hashed apart.
    let hash_base = with_hashes && tensor.base_kind == BaseKind::Same;
    let base_hash = hash_base.then(|| digest::of_piece(lanes, offset, tensor.base_bytes()));
    let encoded = pair.encoded(chunk);
    if encoded.num_deltas > 0 {
        let payload = pair.payload(chunk, &mut worker.payload).map_err(at)?;
        worker.decoder.decode(tensor.codec, tensor.dtype, encoded, payload, lanes).map_err(at)?;
        Rule::ChunkTargetSum.check_eq(target_sum, chunk_sum(lanes)).map_err(at)?;
    }
    let target_hash = match base_hash {
        Some(hash) if encoded.num_deltas == 0 => Some(hash),
        _ => with_hashes.then(|| digest::of_piece(lanes, offset, tensor.bytes())),
    };
    Ok(target_hash.map(|target| Hashes { base: base_hash, target }))
}
