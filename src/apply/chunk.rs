//! Decoding one chunk: steps 8 to 11 of spec section 13.

use crate::base::PaddedBase;
use crate::checkpoint::Checkpoint;
use crate::codec::{ChunkDecoder, Encoded, EncodedChunk};
use crate::digest::{self, PieceHasher};
use crate::error::{Error, Escaped, Result, Rule};
use crate::format::BaseKind;
use crate::index::{Tensor, ValidatedIndex};
use crate::reader::Pair;
use crate::source::Source;
use crate::sums::ChunkSum;
use std::cell::Cell;

/// The chunks of a pair: an index, and the payloads that belong to it.
pub(crate) trait Chunks: Sync {
    fn index(&self) -> &ValidatedIndex;

    /// The payload of a chunk, its CRC and padding checked: in memory as it is, or read into `scratch`.
    fn payload<'a>(&'a self, chunk: u32, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]>;

    /// What the record of a chunk says to its codec.
    fn encoded(&self, chunk: u32) -> Encoded {
        let record = &self.index().records()[chunk as usize];
        Encoded { uncompressed_size: record.uncompressed_size.get(), num_deltas: record.num_deltas.get() }
    }
}

impl<B: Source> Chunks for Pair<B> {
    fn index(&self) -> &ValidatedIndex {
        self.index()
    }

    fn payload<'a>(&'a self, chunk: u32, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        self.payload(chunk, scratch)
    }
}

/// What a thread needs to decode chunks.
pub(super) struct Worker {
    decoder: ChunkDecoder,
    payload: Vec<u8>,
    lanes: Vec<u8>,
}

impl Worker {
    pub fn new() -> Self {
        Self { decoder: ChunkDecoder::new(), payload: Vec::new(), lanes: Vec::new() }
    }

    /// Works with `size` bytes for lanes, whose content is left from other chunks. They are taken out of the worker meanwhile, so
    /// that it can decode into them.
    pub fn with_lanes<R>(&mut self, size: usize, work: impl FnOnce(&mut Self, &mut [u8]) -> R) -> R {
        let mut lanes = std::mem::take(&mut self.lanes);
        lanes.resize(size.max(lanes.len()), 0);
        let result = work(self, &mut lanes[..size]);
        self.lanes = lanes;
        result
    }
}

/// Hashes of a chunk's lanes as pieces of their tensors, where they are asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hashes {
    pub base: Option<[u8; 32]>,
    pub target: [u8; 32],
}

/// The place of a tensor's base tensor in `base`, checked for dtype and shape; `None` without a base.
pub(crate) fn find_base(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Result<Option<usize>> {
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

/// Step 8 for a block: fills `lanes` with the base lanes from `first_lane` on, zeros where the base has none (section 8.2), and
/// adds them to `sum`.
pub(super) fn base_lanes(
    tensor: &Tensor<'_>,
    base: &dyn Checkpoint,
    place: Option<usize>,
    first_lane: u64,
    lanes: &mut [u8],
    sum: &mut ChunkSum,
) -> Result<()> {
    // What lies where a tensor without a base is to be is not its base.
    let base = PaddedBase::new(Some(base), place.filter(|_| tensor.base_kind != BaseKind::None));
    let offset = first_lane * tensor.lane_bytes() as u64;
    match base.in_place(offset, lanes.len()) {
        Some(bytes) => sum.copy(bytes, lanes),
        None => {
            base.read(offset, lanes)?;
            sum.add(lanes);
        }
    }
    Ok(())
}

/// Steps 8 to 11: fills `lanes`, as long as the chunk, with its target lanes.
///
/// `fill` is given blocks of `lanes` with the lane at which each begins in the tensor; it puts the base lanes there and adds
/// them to the sum. They are summed, hashed and decoded block by block, while they are in the nearest cache. An error of `fill`
/// is returned as it is: without the base lanes nothing is known about the chunk.
pub(super) fn decode(
    chunks: &dyn Chunks,
    tensor: &Tensor<'_>,
    chunk: u32,
    fill: impl Fn(u64, &mut [u8], &mut ChunkSum) -> Result<()>,
    worker: &mut Worker,
    lanes: &mut [u8],
    with_hashes: bool,
) -> Result<Option<Hashes>> {
    const BLOCK: usize = 8 * ChunkSum::BLOCK;
    let at = |e: Error| e.in_chunk(chunk).in_tensor(tensor.name);
    let sums = &chunks.index().sums()[chunk as usize];
    let (base_sum, target_sum) = (sums.base_sum.get(), sums.target_sum.get());
    let width = tensor.lane_bytes();
    let first_lane = tensor.chunk_range(chunk).start;
    let offset = first_lane * width as u64;

    // A `prefix` base has another length than its target: it is hashed apart.
    let hash_base = with_hashes && tensor.base_kind == BaseKind::Same;
    let mut hasher = hash_base.then(|| PieceHasher::new(offset, tensor.base_bytes()));
    let mut sum = ChunkSum::default();
    let mut filled = 0;
    let unfilled = Cell::new(false);
    let mut fill = |lanes: &mut [u8], end: usize| {
        while filled < end {
            let block = filled..lanes.len().min(filled + BLOCK);
            fill(first_lane + (block.start / width) as u64, &mut lanes[block.clone()], &mut sum)
                .inspect_err(|_| unfilled.set(true))?;
            filled = block.end;
            if let Some(hasher) = &mut hasher {
                hasher.update(&lanes[block]);
            }
        }
        Ok(())
    };

    let encoded = chunks.encoded(chunk);
    let found = (encoded.num_deltas > 0).then(|| {
        let payload = chunks.payload(chunk, &mut worker.payload)?;
        let chunk = EncodedChunk { codec: tensor.codec, dtype: tensor.dtype, tables: tensor.tables, encoded, payload, base_sum };
        worker.decoder.decode(&chunk, lanes, &mut fill)
    });
    if let (Some(Err(_)), true) = (&found, unfilled.get()) {
        return found.transpose().map(|_| None);
    }
    // Whatever a payload seems to lack on a wrong base, the base is what is wrong.
    fill(lanes, lanes.len())?;
    Rule::ChunkBaseSum.check_eq(base_sum, sum.value).map_err(at)?;
    if let Some(found) = found {
        Rule::ChunkTargetSum.check_eq(target_sum, found.map_err(at)?).map_err(at)?;
    }
    let base_hash = hasher.map(PieceHasher::finish);
    let target_hash = match base_hash {
        Some(hash) if encoded.num_deltas == 0 => Some(hash),
        _ => with_hashes.then(|| digest::of_piece(lanes, offset, tensor.bytes())),
    };
    Ok(target_hash.map(|target| Hashes { base: base_hash, target }))
}
