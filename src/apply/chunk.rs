//! Decoding one chunk: steps 8 to 11 of spec section 13.

use crate::base::PaddedBase;
use crate::reader::Pair;
use std::cell::Cell;
use tpde_core::codec::{ChunkDecoder, Codec, CopiedBase, Encoded, EncodedChunk};
use tpde_core::digest::{self, PieceHasher};
use tpde_core::error::{Error, Result, Rule};
use tpde_core::format::BaseKind;
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::source::Source;
use tpde_core::sums::ChunkSum;

/// Access to the chunks of a pair: the index and the payloads.
pub(crate) trait Chunks: Sync {
    fn index(&self) -> &ValidatedIndex;

    /// Whether [`Chunks::payload`] gives only payloads that the pair digest covers.
    fn is_authentic(&self) -> bool;

    /// Compares all payloads with the payload root, if the index has one.
    fn authenticate(&self) -> Result<()>;

    /// The payload of a chunk, after checking its CRC and padding. Borrowed if the blob is in memory, else read into `scratch`.
    fn payload<'a>(&'a self, chunk: u32, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]>;

    /// The fields of a chunk's record that the codec needs.
    fn encoded(&self, chunk: u32) -> Encoded {
        Encoded::from(&self.index().records()[chunk as usize])
    }
}

impl<B: Source> Chunks for Pair<B> {
    fn index(&self) -> &ValidatedIndex {
        self.index()
    }

    fn is_authentic(&self) -> bool {
        self.is_authentic()
    }

    fn authenticate(&self) -> Result<()> {
        self.authenticate(&|_| {})
    }

    fn payload<'a>(&'a self, chunk: u32, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        self.payload(chunk, scratch)
    }
}

/// The decoding state of a thread: codec contexts and buffers.
pub(super) struct DecodeWorker {
    decoder: ChunkDecoder,
    payload: Vec<u8>,
    lanes: Vec<u8>,
}

impl DecodeWorker {
    pub fn new() -> Self {
        Self { decoder: ChunkDecoder::new(), payload: Vec::new(), lanes: Vec::new() }
    }

    /// Calls `work` with a buffer of `size` bytes for lanes. The buffer is not cleared between calls. During the call it is moved
    /// out of the worker, so that `work` can borrow the worker too.
    pub fn with_lanes<R>(&mut self, size: usize, work: impl FnOnce(&mut Self, &mut [u8]) -> R) -> R {
        let mut lanes = std::mem::take(&mut self.lanes);
        lanes.resize(size.max(lanes.len()), 0);
        let result = work(self, &mut lanes[..size]);
        self.lanes = lanes;
        result
    }
}

/// BLAKE3 hashes of a chunk's lanes as subtrees of their tensors. `base` is `None` unless base and target have the same length.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hashes {
    pub base: Option<[u8; 32]>,
    pub target: [u8; 32],
}

/// Step 8 for a block: fills `lanes` with the base lanes from `first_lane` on and adds them to `sum`. Lanes beyond the end of the
/// base are zero (section 8.2).
fn base_lanes(tensor: &Tensor<'_>, base: PaddedBase<'_, '_>, first_lane: u64, lanes: &mut [u8], sum: &mut ChunkSum) -> Result<()> {
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

/// [`decode`] with base lanes of a checkpoint. `base` has the dtype of the target.
pub(super) fn decode_from(
    base: PaddedBase<'_, '_>,
    chunks: &dyn Chunks,
    tensor: &Tensor<'_>,
    chunk: u32,
    worker: &mut DecodeWorker,
    lanes: &mut [u8],
    with_hashes: bool,
) -> Result<Option<Hashes>> {
    if !tensor.base_kind.is_derived() {
        let fill = |first, lanes: &mut [u8], sum: &mut ChunkSum| base_lanes(tensor, base, first, lanes, sum);
        return decode(chunks, tensor, chunk, fill, worker, lanes, with_hashes);
    }
    // Forming the lanes of a chunk at once costs less than block by block.
    base.read(tensor.chunk_range(chunk).start * tensor.lane_bytes() as u64, lanes)?;
    let fill = |_, lanes: &mut [u8], sum: &mut ChunkSum| {
        sum.add(lanes);
        Ok(())
    };
    decode(chunks, tensor, chunk, fill, worker, lanes, with_hashes)
}

/// [`decode_from`] for lanes that are not read soon, so that they need not be in the cache: faster for large chunks of codec
/// `conditioned` whose lanes are not hashed, because the decoder copies the base lanes.
pub(super) fn decode_to(
    base: PaddedBase<'_, '_>,
    chunks: &dyn Chunks,
    tensor: &Tensor<'_>,
    chunk: u32,
    worker: &mut DecodeWorker,
    lanes: &mut [u8],
    with_hashes: bool,
) -> Result<Option<Hashes>> {
    /// Smaller chunks have too few pieces to prefetch, and stay in the cache.
    const MIN_BYTES: usize = if cfg!(test) { 1 } else { 64 << 10 };
    let is_copied = tensor.codec == Codec::Conditioned && matches!(tensor.base_kind, BaseKind::Same) && !with_hashes;
    let encoded = chunks.encoded(chunk);
    let offset = tensor.chunk_range(chunk).start * tensor.lane_bytes() as u64;
    let Some(bytes) =
        base.in_place(offset, lanes.len()).filter(|_| is_copied && encoded.num_deltas > 0 && lanes.len() >= MIN_BYTES)
    else {
        return decode_from(base, chunks, tensor, chunk, worker, lanes, with_hashes);
    };
    let at = |e: Error| e.in_chunk(chunk).in_tensor(tensor.name);
    let sums = &chunks.index().sums()[chunk as usize];
    let (base_sum, target_sum) = (sums.base_sum.get(), sums.target_sum.get());
    let mut base = CopiedBase::new(bytes);
    let decoded_sum = chunks.payload(chunk, &mut worker.payload).and_then(|payload| {
        let DecodeWorker { decoder, .. } = worker;
        let chunk = EncodedChunk { codec: tensor.codec, dtype: tensor.dtype, tables: tensor.tables, encoded, payload, base_sum };
        decoder.decode_copied(&chunk, lanes, &mut base)
    });
    // As in `decode`, the base sum takes precedence.
    Rule::ChunkBaseSum.check_eq(base_sum, base.sum()).map_err(at)?;
    Rule::ChunkTargetSum.check_eq(target_sum, decoded_sum.map_err(at)?).map_err(at)?;
    Ok(None)
}

/// Steps 8 to 11: fills `lanes`, which has the chunk's length, with the chunk's target lanes.
///
/// `fill(first_lane, block, sum)` writes base lanes to `block`, beginning with lane `first_lane` of the tensor, and adds them to
/// `sum`. Each block is summed, hashed and decoded while it is in the L1 cache. An error of `fill` takes precedence over errors
/// about the chunk, because without base lanes the chunk cannot be checked.
pub(super) fn decode(
    chunks: &dyn Chunks,
    tensor: &Tensor<'_>,
    chunk: u32,
    fill: impl Fn(u64, &mut [u8], &mut ChunkSum) -> Result<()>,
    worker: &mut DecodeWorker,
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

    // A `prefix` base differs in length from its target, so `Engine::hash_base` hashes it separately.
    let hash_base = with_hashes && tensor.base_kind.has_all_lanes();
    let mut hasher = hash_base.then(|| PieceHasher::new(offset, tensor.base_bytes()));
    let mut sum = ChunkSum::default();
    let mut filled = 0;
    let fill_failed = Cell::new(false);
    let mut fill = |lanes: &mut [u8], end: usize| {
        while filled < end {
            let block = filled..lanes.len().min(filled + BLOCK);
            fill(first_lane + (block.start / width) as u64, &mut lanes[block.clone()], &mut sum)
                .inspect_err(|_| fill_failed.set(true))?;
            filled = block.end;
            if let Some(hasher) = &mut hasher {
                hasher.update(&lanes[block]);
            }
        }
        Ok(())
    };

    let encoded = chunks.encoded(chunk);
    let target_sum_or_error = (encoded.num_deltas > 0).then(|| {
        let payload = chunks.payload(chunk, &mut worker.payload)?;
        let chunk = EncodedChunk { codec: tensor.codec, dtype: tensor.dtype, tables: tensor.tables, encoded, payload, base_sum };
        worker.decoder.decode(&chunk, lanes, &mut fill)
    });
    if let (Some(Err(_)), true) = (&target_sum_or_error, fill_failed.get()) {
        return target_sum_or_error.transpose().map(|_| None);
    }
    // Check the base sum before reporting a decoding error, because a wrong base can cause both.
    fill(lanes, lanes.len())?;
    Rule::ChunkBaseSum.check_eq(base_sum, sum.value).map_err(at)?;
    if let Some(decoded_sum) = target_sum_or_error {
        Rule::ChunkTargetSum.check_eq(target_sum, decoded_sum.map_err(at)?).map_err(at)?;
    }
    let base_hash = hasher.map(PieceHasher::finish);
    let target_hash = match base_hash {
        Some(hash) if encoded.num_deltas == 0 => Some(hash),
        _ => with_hashes.then(|| digest::of_piece(lanes, offset, tensor.bytes())),
    };
    Ok(target_hash.map(|target| Hashes { base: base_hash, target }))
}
