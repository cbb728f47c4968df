//! Decodes a payload: turns base lanes into target lanes (`spec/codecs.md` sections 4.4 to 4.6).

use super::coded::{Classifier, CodedLanes, tiles_of};
use super::context::{BLOCK, HALF, tile_blocks};
use super::payload::{Payload, segment};
use super::stream::{CodedSteps, Stream};
use super::tables::{Lookup, TableSet};
use super::window::Window;
use crate::codec::simd::{GROUP, Platform, PrefetchedLines, StreamFence, Tiles};
use crate::codec::{CopiedBase, Encoded, Fill};
use crate::dispatch::vectorized;
use crate::error::{Result, Rule};
use crate::lane::{Dtype, Lane, Order, lanes_of, lanes_of_mut, with_order};
use crate::prelude::*;
use crate::sums::{ChunkSum, lane_term};
use core::ops::Range;

/// Tiles per batch, so that a batch fits in the L2 cache. Small in tests, so that short chunks span several batches.
const BATCH: usize = if cfg!(any(test, fuzzing)) { 1 } else { 64 };

/// Tiles per batch if one segment is decoded at a time and base lanes are copied by pieces. The size of a piece is a multiple of the
/// size of a batch, and no batch crosses the end of a piece.
const PIECE_BATCH: usize = if cfg!(any(test, fuzzing)) { 1 } else { 8 };

/// Two segments of at most this many bytes are decoded together: lanes and lists of both stay in the L2 cache.
const PAIRED_BYTES: usize = 256 << 10;

/// An [`EncodedChunk`](crate::codec::EncodedChunk) of this codec.
#[derive(Debug, Clone, Copy)]
pub struct ConditionedChunk<'a> {
    pub dtype: Dtype,
    pub tables: Option<&'a TableSet>,
    pub encoded: Encoded,
    pub payload: &'a [u8],
    pub base_sum: u64,
}

/// Buffers and look-up table of a thread that decodes chunks, reused for every chunk.
#[derive(Default)]
pub struct Decoder {
    platform: Platform,
    lookup: Lookup,
    /// Activities of the blocks in the current batch.
    activities: Vec<u8>,
    /// Buffers of the streams that are decoded together.
    batches: [Batch; 2],
    /// Buffer of lanes that are copied from the base.
    copied: Vec<u8>,
}

/// Buffers for the coded lanes of a batch.
#[derive(Default)]
struct Batch {
    coded: CodedLanes,
    values: Values,
}

/// A segment whose stream is being decoded.
struct Segment<'a> {
    /// Tiles that are left.
    tiles: Range<usize>,
    stream: Stream<'a>,
    /// Lanes of the current batch.
    batch: Range<usize>,
}

/// Values of the coded lanes of a batch, padded to whole steps with 0, and masks of nonzero values, one per 16 values. The
/// buffers never shrink, because growing them again would clear them.
#[derive(Default)]
struct Values {
    bytes: Vec<u8>,
    changed: Vec<u16>,
}

impl Decoder {
    /// Creates a decoder for this platform.
    pub fn with_platform(platform: Platform) -> Self {
        Self { platform, ..Self::default() }
    }

    /// See [`crate::codec::ChunkDecoder::decode`].
    pub fn decode<L: Lane>(&mut self, chunk: ConditionedChunk<'_>, lanes: &mut [u8], fill: Fill<'_>) -> Result<u64> {
        self.decode_window::<L>(chunk, Window::Filled { lanes, fill })
    }

    /// See [`crate::codec::ChunkDecoder::decode_copied`].
    pub fn decode_copied<L: Lane>(
        &mut self,
        chunk: ConditionedChunk<'_>,
        lanes: &mut [u8],
        base: &mut CopiedBase<'_>,
    ) -> Result<u64> {
        if !self.platform.has_prefetch() {
            return self.decode::<L>(chunk, lanes, &mut |lanes, end| {
                base.copy_to_end_of_block(lanes, end);
                Ok(())
            });
        }
        let mut buffer = core::mem::take(&mut self.copied);
        let (platform, requested) = (self.platform, PrefetchedLines::default());
        let window = Window::Buffered { lanes, base, platform, fence: StreamFence, buffer: &mut buffer, start: 0, requested };
        let sum = self.decode_window::<L>(chunk, window);
        self.copied = buffer;
        sum
    }

    fn decode_window<L: Lane>(&mut self, chunk: ConditionedChunk<'_>, mut window: Window<'_, '_>) -> Result<u64> {
        let ConditionedChunk { dtype, tables, encoded, payload, base_sum } = chunk;
        let count = window.size() / L::BYTES;
        let classes = tables.map_or(0, |tables| tables.classes().len());
        let payload = Payload::parse(payload, count, L::BYTES, encoded.num_deltas, classes)?;
        // Without tables no lane is coded, so the look-up table of an earlier chunk is not used.
        if let Some(tables) = tables.filter(|tables| !self.lookup.is_of(tables)) {
            self.lookup.set(tables);
        }

        // Updating the sum costs more per change than recomputing it costs per lane. So it is updated only if few lanes change.
        let is_sparse = 16 * (encoded.num_deltas as usize) < count && payload.low_bits == 0;
        let rows = (!is_sparse).then(ChunkSum::default);
        let mut target = Target { order: dtype.order(), sum: if is_sparse { base_sum } else { 0 }, rows, finished: 0, changed: 0 };
        let mut exceptions = Exceptions::<L>::new(&payload, count)?;
        let (blocks, tile) = (count.div_ceil(BLOCK), tile_blocks(L::BYTES));
        let (states, platform, lookup) = (1 << payload.states_log2, self.platform, &self.lookup);
        let classifier = Classifier { dtype, maps: &payload.maps, states };
        let begin = |(s, stream): (usize, Result<_>)| -> Result<_> {
            let stream = Stream::begin(stream?, states, 8 * L::BYTES as u32 - payload.low_bits)?;
            Ok(Segment { tiles: segment(s, payload.segments, blocks.div_ceil(tile)), stream, batch: 0..0 })
        };
        let are_paired = !is_sparse && window.size() <= PAIRED_BYTES * payload.segments;
        let by_piece = matches!(window, Window::Buffered { .. }) && !are_paired;
        let batch_tiles = if by_piece { PIECE_BATCH } else { BATCH };
        let mut segments = payload.streams().enumerate().map(begin).peekable();
        while let Some(first) = segments.next() {
            let mut segments_now = vec![first?];
            // A segment that cannot begin waits until those before it have been decoded.
            segments_now.extend(segments.next_if(|next| are_paired && next.is_ok()).transpose()?);
            while segments_now.iter().any(|segment| !segment.tiles.is_empty()) {
                for (segment, Batch { coded, .. }) in segments_now.iter_mut().zip(&mut self.batches) {
                    let Range { start, end } = segment.tiles;
                    let tiles = start..end.min(start + batch_tiles - if by_piece { start % batch_tiles } else { 0 });
                    segment.tiles.start = tiles.end;
                    let batch = blocks.min(tiles.start * tile)..blocks.min(tiles.end * tile);
                    segment.batch = count.min(batch.start * BLOCK)..count.min(batch.end * BLOCK);
                    let Range { start, end } = segment.batch;
                    window.fill(end * L::BYTES)?;
                    exceptions.save_bases(&mut window, end);
                    self.activities.clear();
                    self.activities.extend(batch.map(|block| payload.activity(block)));
                    let positions = is_sparse.then_some(start);
                    let (lanes, prefetch) = window.bytes_and_prefetch(start * L::BYTES..end * L::BYTES);
                    coded.find::<L>(platform, classifier, &self.activities, lanes, positions, prefetch);
                }
                let prefetch = window.prefetch();
                match (&mut segments_now[..], &mut self.batches) {
                    ([one, two], [batch, other]) => {
                        let steps = [batch.steps::<L>(), other.steps::<L>()];
                        Stream::decode_two::<L>([&mut one.stream, &mut two.stream], platform, lookup, steps, prefetch)?;
                    }
                    ([one], [batch, _]) => one.stream.decode::<L>(platform, lookup, batch.steps::<L>(), prefetch)?,
                    _ => unreachable!("one or two segments are decoded at a time"),
                }
                for (segment, batch) in segments_now.iter().zip(&self.batches) {
                    let Range { start, end } = segment.batch;
                    let (coded, (values, changed)) = (&batch.coded, batch.values.of::<L>(batch.coded.classes().len()));
                    let halves = Halves { masks: coded.masks(), values, tiles: tiles_of::<L>(states) };
                    let lanes = window.bytes(start * L::BYTES..end * L::BYTES);
                    if payload.low_bits != 0 {
                        target.rebuild::<L>(&payload, halves, start, lanes);
                    } else if is_sparse {
                        target.patch_few::<L>(coded.positions(), values, changed, start, lanes);
                    } else {
                        target.patch_many::<L>(halves, changed, lanes);
                    }
                }
                if let [segment] = &segments_now[..] {
                    target.finish(&mut window, segment.batch.end * L::BYTES);
                }
            }
            let end = segments_now.last().map_or(0, |segment| segment.batch.end * L::BYTES);
            segments_now.into_iter().try_for_each(|segment| segment.stream.end())?;
            target.finish(&mut window, end);
        }
        target.sum = target.sum.wrapping_add(target.rows.as_ref().map_or(0, |rows| rows.value));
        target.except(&exceptions, window.into_lanes())?;
        Rule::PayloadDeltas.check_eq(encoded.num_deltas as usize, target.changed)?;
        Ok(target.sum)
    }
}

impl Batch {
    /// The steps to decode: the classes of the coded lanes, and buffers for their values.
    fn steps<L: Lane>(&mut self) -> CodedSteps<'_, L::Le> {
        let classes = self.coded.classes();
        let (size, masks) = (classes.len() * L::BYTES, classes.len().div_ceil(GROUP));
        let Values { bytes, changed } = &mut self.values;
        if bytes.len() < size {
            bytes.resize(size, 0);
        }
        if changed.len() < masks {
            changed.resize(masks, 0);
        }
        CodedSteps { classes, values: lanes_of_mut::<L>(&mut bytes[..size]), changed: &mut changed[..masks] }
    }
}

impl Values {
    /// The values of `count` coded lanes, and the masks of nonzero ones.
    fn of<L: Lane>(&self, count: usize) -> (&[L::Le], &[u16]) {
        (lanes_of::<L>(&self.bytes[..count * L::BYTES]), &self.changed[..count.div_ceil(GROUP)])
    }
}

/// Running totals of a chunk whose target lanes are being produced.
struct Target {
    order: Order,
    /// The chunk sum of the current lanes if few lanes change, or 0. Does not include `rows`.
    sum: u64,
    /// The sum of the finished lanes, unless few lanes change.
    rows: Option<ChunkSum>,
    /// End of the finished lanes in bytes, a multiple of [`ChunkSum::BLOCK`] or the size of the chunk.
    finished: usize,
    /// Number of lanes changed so far.
    changed: usize,
}

impl Target {
    /// Sums the lanes up to byte `end`, which do not change again except by exceptions. A last incomplete row is left for the next
    /// call.
    fn finish(&mut self, window: &mut Window<'_, '_>, end: usize) {
        let end = if end == window.size() { end } else { end / ChunkSum::BLOCK * ChunkSum::BLOCK };
        if let Some(rows) = &mut self.rows {
            rows.add(window.bytes(self.finished..end));
        }
        window.release(end);
        self.finished = end;
    }

    /// Applies nonzero values to the lanes at their positions. `lanes` begins with lane `first`.
    fn patch_few<L: Lane>(&mut self, positions: &[u32], values: &[L::Le], changed: &[u16], first: usize, lanes: &mut [u8]) {
        let lanes = lanes_of_mut::<L>(lanes);
        let order = self.order;
        let (sum, count) = vectorized!(patch_few::<L>(positions, values, changed, order, first, lanes));
        self.sum = self.sum.wrapping_add(sum);
        self.changed += count;
    }

    /// Applies values to the coded lanes of whole tiles.
    fn patch_many<L: Lane>(&mut self, halves: Halves<'_, L>, changed: &[u16], lanes: &mut [u8]) {
        self.changed += changed.iter().map(|mask| mask.count_ones() as usize).sum::<usize>();
        let lanes = lanes_of_mut::<L>(lanes);
        with_order!(self.order, ORDER => vectorized!(patch_many::<L>(halves, ORDER, lanes)));
    }

    /// Applies the exceptions, after all other changes. Reports an error if another change has already changed one of their
    /// lanes.
    fn except<L: Lane>(&mut self, exceptions: &Exceptions<'_, L>, lanes: &mut [u8]) -> Result<()> {
        let lanes = lanes_of_mut::<L>(lanes);
        for (position, delta, base) in exceptions.each() {
            let current = L::load(lanes[position]);
            Rule::PayloadPositions.check(
                current == base,
                "an exception for an unchanged lane",
                format_args!("lane {position}, which has changed"),
            )?;
            Rule::PayloadDeltas.check(
                delta != L::default(),
                "a delta that is not zero",
                format_args!("zero at lane {position}"),
            )?;
            let target = L::apply(base, delta, self.order);
            lanes[position] = target.store();
            self.changed += 1;
            self.sum = self.sum.wrapping_add(lane_term(position, base, target));
        }
        Ok(())
    }

    /// Rebuilds the lanes of whole tiles from values and low bits.
    fn rebuild<L: Lane>(&mut self, payload: &Payload<'_>, halves: Halves<'_, L>, first: usize, lanes: &mut [u8]) {
        let low = &payload.low[first / 8 * payload.low_bits as usize..];
        let lanes = lanes_of_mut::<L>(lanes);
        self.changed += with_order!(self.order, ORDER => vectorized!(rebuild::<L>(payload, low, halves, ORDER, lanes)));
    }
}

/// The exceptions of a payload.
struct Exceptions<'a, L: Lane> {
    positions: &'a [[u8; 4]],
    deltas: &'a [L::Le],
    /// Base lanes of the exceptions whose lanes were filled so far.
    bases: Vec<L>,
}

impl<'a, L: Lane> Exceptions<'a, L> {
    fn new(payload: &Payload<'a>, count: usize) -> Result<Self> {
        let mut next = 0;
        for position in payload.positions {
            let position = u32::from_le_bytes(*position) as usize;
            Rule::PayloadPositions.check(
                (next..count).contains(&position),
                format_args!("a position from {next} on, below {count}"),
                position,
            )?;
            next = position + 1;
        }
        Ok(Self { positions: payload.positions, deltas: lanes_of::<L>(payload.deltas), bases: Vec::new() })
    }

    /// Saves the base lanes of the exceptions at positions below `end`. Must be called before these lanes change.
    fn save_bases(&mut self, window: &mut Window<'_, '_>, end: usize) {
        let first = window.start() / L::BYTES;
        let lanes = lanes_of::<L>(window.bytes(first * L::BYTES..end * L::BYTES));
        let left = self.positions[self.bases.len()..].iter().map(|position| u32::from_le_bytes(*position) as usize);
        self.bases.extend(left.take_while(|position| *position < end).map(|position| L::load(lanes[position - first])));
    }

    /// Returns position, delta and base lane of each exception.
    fn each(&self) -> impl Iterator<Item = (usize, L, L)> {
        let positions = self.positions.iter().map(|position| u32::from_le_bytes(*position) as usize);
        positions.zip(self.deltas).zip(&self.bases).map(|((position, delta), base)| (position, L::load(*delta), *base))
    }
}

/// Coded lanes of whole tiles: one mask per half block, and one value per coded lane.
struct Halves<'a, L: Lane> {
    masks: &'a [u64],
    values: &'a [L::Le],
    tiles: Tiles,
}

impl<L: Lane> Halves<'_, L> {
    /// Calls `f` for each half block with the half block's index, lanes, mask, and values of coded lanes.
    #[inline(always)]
    fn each(mut self, lanes: &mut [L::Le], mut f: impl FnMut(usize, &mut [L::Le], u64, &[L::Le])) {
        let size = self.tiles.halves;
        for (t, (lanes, masks)) in lanes.chunks_mut(size * HALF).zip(self.masks.chunks(size)).enumerate() {
            let mut taken = 0;
            for (h, (half, &mask)) in lanes.chunks_mut(HALF).zip(masks).enumerate() {
                let first = taken;
                taken += mask.count_ones() as usize;
                f(t * size + h, half, mask, &self.values[first..taken]);
            }
            self.values = &self.values[self.tiles.padded_len(taken)..];
        }
    }
}

/// Applies the nonzero values to the lanes at `positions`. `lanes` begins with lane `first`. Returns the change of the chunk sum,
/// and the number of changes.
#[inline(always)]
fn patch_few<L: Lane>(
    positions: &[u32],
    values: &[L::Le],
    changed: &[u16],
    order: Order,
    first: usize,
    lanes: &mut [L::Le],
) -> (u64, usize) {
    let (mut sum, mut count) = (0u64, 0);
    // One inner loop covers four groups, because the processor usually mispredicts the end of such a loop.
    for (at, masks) in changed.chunks(4).enumerate() {
        let mut left = masks.iter().rev().fold(0u64, |left, &mask| left << GROUP | u64::from(mask));
        count += left.count_ones() as usize;
        while left != 0 {
            let j = 4 * GROUP * at + left.trailing_zeros() as usize;
            left &= left - 1;
            let position = positions[j] as usize;
            let lane = &mut lanes[position - first];
            let base = L::load(*lane);
            let target = L::apply(base, L::load(values[j]), order);
            *lane = target.store();
            sum = sum.wrapping_add(lane_term(position, base, target));
        }
    }
    (sum, count)
}

#[inline(always)]
fn patch_many<L: Lane>(halves: Halves<'_, L>, order: Order, lanes: &mut [L::Le]) {
    halves.each(
        lanes,
        #[inline(always)]
        |_, half, mut mask, deltas| {
            if let (Ok(half), Ok(deltas)) = (<&mut [L::Le; HALF]>::try_from(&mut *half), <&[L::Le; HALF]>::try_from(deltas)) {
                patch_all::<L>(half, deltas, order);
            } else if mask != 0 {
                let mut spread = [L::default().store(); HALF];
                for delta in deltas {
                    spread[mask.trailing_zeros() as usize % HALF] = *delta;
                    mask &= mask.wrapping_sub(1);
                }
                patch_all::<L>(half, &spread, order);
            }
        },
    );
}

#[inline(always)]
fn patch_all<L: Lane>(lanes: &mut [L::Le], deltas: &[L::Le], order: Order) {
    for (lane, delta) in lanes.iter_mut().zip(deltas) {
        *lane = L::apply(L::load(*lane), L::load(*delta), order).store();
    }
}

/// Rebuilds lanes from their high and low bits. `low` starts with the low bits of the first lane. Returns the number of changes.
#[inline(always)]
fn rebuild<L: Lane>(payload: &Payload<'_>, low: &[u8], halves: Halves<'_, L>, order: Order, lanes: &mut [L::Le]) -> usize {
    let low_bits = payload.low_bits;
    let high_mask = 1u64.checked_shl(8 * L::BYTES as u32 - low_bits).unwrap_or(0).wrapping_sub(1);
    // With 64 low bits there are no high bits, and the shift count would overflow.
    let high = |value: &L::Le| (payload.center.wrapping_sub(L::load(*value).to_u64()) & high_mask) << low_bits.min(63);
    // The low bits of a half block start at a byte boundary.
    let size = HALF / 8 * low_bits as usize;
    let mut changed = 0;
    halves.each(
        lanes,
        #[inline(always)]
        |h, half, mut mask, values| {
            let low = &low[h * size..];
            let mut deltas = low_bits_of_half(&low[..size.min(low.len())], low_bits);
            if values.len() == HALF {
                deltas.iter_mut().zip(values).for_each(|(delta, value)| *delta |= high(value));
            } else {
                for value in values {
                    deltas[mask.trailing_zeros() as usize % HALF] |= high(value);
                    mask &= mask.wrapping_sub(1);
                }
            }
            for (lane, delta) in half.iter_mut().zip(deltas) {
                changed += usize::from(delta != 0);
                *lane = L::apply(L::load(*lane), L::from_u64(delta), order).store();
            }
        },
    );
    changed
}

/// Unpacks numbers of `count` bits, 1 to 64, from the start of a bit string. Numbers past its end are 0.
#[inline(always)]
fn low_bits_of_half(bytes: &[u8], count: u32) -> [u64; HALF] {
    let mut numbers = [0; HALF];
    if count == 8 {
        numbers.iter_mut().zip(bytes).for_each(|(number, byte)| *number = u64::from(*byte));
        return numbers;
    }
    // Padding keeps the 16-byte window of the last number in bounds.
    let mut string = [0; HALF * 8 + 16];
    string[..bytes.len()].copy_from_slice(bytes);
    let mask = u64::MAX >> (64 - count);
    for (i, number) in numbers.iter_mut().enumerate() {
        let bit = i * count as usize;
        let window = string[bit / 8..].first_chunk().copied().unwrap_or_default();
        *number = (u128::from_le_bytes(window) >> (bit % 8)) as u64 & mask;
    }
    numbers
}
