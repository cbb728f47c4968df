//! From a payload and base lanes to target lanes (`spec/codecs.md` sections 4.4 to 4.6).

use super::coded::{Coded, tiles_of};
use super::context::{BLOCK, HALF, tile_blocks};
use super::payload::{Payload, segment};
use super::stream::Stream;
use super::tables::{Lookup, TableSet};
use crate::codec::simd::{GROUP, Path, Tiles};
use crate::codec::{Encoded, Fill};
use crate::dispatch::vectorized;
use crate::error::{Result, Rule};
use crate::lane::{Dtype, Lane, Order, lanes_of, lanes_of_mut};
use crate::sums::{chunk_sum, lane_term};

/// Tiles that are worked on at once: what fits in the second-level cache, and in tests so few that short chunks have several of
/// them.
const BATCH: usize = if cfg!(any(test, fuzzing)) { 1 } else { 64 };

/// What a thread needs to decode chunks, used again for every chunk.
pub(crate) struct Decoder {
    path: Path,
    lookup: Lookup,
    /// Of the blocks in work.
    activities: Vec<u8>,
    coded: Coded,
    values: Values,
}

/// The values of the places of coded lanes, 0 where there is none, and a mask for each 16 of them of those that are not 0. They are
/// never made shorter, because growing them again would clear them.
#[derive(Default)]
struct Values {
    bytes: Vec<u8>,
    changed: Vec<u16>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::with_path(Path::best())
    }
}

impl Decoder {
    /// A decoder that uses these instructions.
    pub fn with_path(path: Path) -> Self {
        Self { path, lookup: Lookup::default(), activities: Vec::new(), coded: Coded::default(), values: Values::default() }
    }

    /// See [`crate::codec::ChunkDecoder::decode`].
    #[expect(clippy::too_many_arguments, reason = "all that a record and a tensor say of a chunk")]
    pub fn decode<L: Lane>(
        &mut self,
        dtype: Dtype,
        tables: Option<&TableSet>,
        payload: &[u8],
        encoded: Encoded,
        base_sum: u64,
        lanes: &mut [u8],
        fill: Fill<'_>,
    ) -> Result<u64> {
        let count = lanes.len() / L::BYTES;
        let classes = tables.map_or(0, |tables| tables.classes().len());
        let payload = Payload::parse(payload, count, L::BYTES, encoded.num_deltas, classes)?;
        // Without tables no lane is coded, and whatever stands here is not looked at.
        if let Some(tables) = tables.filter(|tables| !self.lookup.is_of(tables)) {
            self.lookup.set(tables);
        }

        // A term a change is dearer than its share of a pass over all lanes.
        let few = 16 * (encoded.num_deltas as usize) < count && payload.low_bits == 0;
        let mut target = Target { order: dtype.order(), sum: few.then_some(base_sum), changed: 0 };
        let mut exceptions = Exceptions::<L>::new(&payload, count)?;
        let (blocks, tile) = (count.div_ceil(BLOCK), tile_blocks(L::BYTES));
        let (states, path) = (1 << payload.states_log2, self.path);
        for (s, stream) in payload.streams().enumerate() {
            let mut tiles = segment(s, payload.segments, blocks.div_ceil(tile));
            let mut stream = Stream::begin(stream?, states, 8 * L::BYTES as u32 - payload.low_bits)?;
            while !tiles.is_empty() {
                let batch = tiles.start * tile..blocks.min(tiles.end.min(tiles.start + BATCH) * tile);
                tiles.start += BATCH;
                let (first, end) = (batch.start * BLOCK, count.min(batch.end * BLOCK));
                fill(lanes, end * L::BYTES)?;
                exceptions.take_bases(lanes, end);
                let lanes_of_batch = &mut lanes[first * L::BYTES..end * L::BYTES];
                self.activities.clear();
                self.activities.extend(batch.map(|block| payload.activity(block)));
                let positions = few.then_some(first);
                self.coded.find::<L>(path, dtype, &payload.maps, &self.activities, states, lanes_of_batch, positions);
                let (values, changed) = self.values.decode::<L>(path, &self.lookup, &mut stream, self.coded.classes())?;
                let halves = Halves { masks: self.coded.masks(), values, tiles: tiles_of::<L>(states) };
                if payload.low_bits != 0 {
                    target.rebuild::<L>(&payload, halves, first, lanes_of_batch);
                } else if few {
                    target.patch_few::<L>(self.coded.positions(), values, changed, lanes);
                } else {
                    target.patch_many::<L>(halves, changed, lanes_of_batch);
                }
            }
            stream.end()?;
        }
        target.except(&exceptions, lanes)?;
        Rule::PayloadDeltas.check_eq(encoded.num_deltas as usize, target.changed)?;
        Ok(target.sum.unwrap_or_else(|| chunk_sum(lanes)))
    }
}

impl Values {
    fn decode<L: Lane>(
        &mut self,
        path: Path,
        lookup: &Lookup,
        stream: &mut Stream<'_>,
        classes: &[u8],
    ) -> Result<(&[L::Le], &[u16])> {
        let (size, masks) = (classes.len() * L::BYTES, classes.len().div_ceil(GROUP));
        if self.bytes.len() < size {
            self.bytes.resize(size, 0);
        }
        if self.changed.len() < masks {
            self.changed.resize(masks, 0);
        }
        let (values, changed) = (lanes_of_mut::<L>(&mut self.bytes[..size]), &mut self.changed[..masks]);
        stream.decode::<L>(path, lookup, classes, values, changed)?;
        Ok((values, changed))
    }
}

/// What is known of the target lanes as they come into being.
struct Target {
    order: Order,
    /// The chunk sum of the lanes as they are now, while it is kept.
    sum: Option<u64>,
    /// Lanes that have changed.
    changed: usize,
}

impl Target {
    /// Changes the lanes of a chunk that have a value, at their positions.
    fn patch_few<L: Lane>(&mut self, positions: &[u32], values: &[L::Le], changed: &[u16], lanes: &mut [u8]) {
        let lanes = lanes_of_mut::<L>(lanes);
        let order = self.order;
        let (sum, count) = vectorized(
            #[inline(always)]
            || patch_few::<L>(positions, values, changed, order, lanes),
        );
        self.sum = self.sum.map(|before| before.wrapping_add(sum));
        self.changed += count;
    }

    /// Changes the lanes of some tiles that have a place by their values.
    fn patch_many<L: Lane>(&mut self, halves: Halves<'_, L>, changed: &[u16], lanes: &mut [u8]) {
        self.changed += changed.iter().map(|mask| mask.count_ones() as usize).sum::<usize>();
        let lanes = lanes_of_mut::<L>(lanes);
        // One loop for each order, so that nothing is decided inside.
        match self.order {
            Order::Plain => vectorized(
                #[inline(always)]
                || patch_many::<L>(halves, Order::Plain, lanes),
            ),
            Order::Ordered => vectorized(
                #[inline(always)]
                || patch_many::<L>(halves, Order::Ordered, lanes),
            ),
        }
    }

    /// Makes the changes that are listed; they come last, and are for lanes that nothing has changed yet.
    fn except<L: Lane>(&mut self, exceptions: &Exceptions<'_, L>, lanes: &mut [u8]) -> Result<()> {
        let lanes = lanes_of_mut::<L>(lanes);
        for (position, delta, base) in exceptions.each() {
            let now = L::load(lanes[position]);
            Rule::PayloadPositions.check(now == base, "an exception for an unchanged lane", position)?;
            Rule::PayloadDeltas.check(
                delta != L::default(),
                "a delta that is not zero",
                format_args!("zero at lane {position}"),
            )?;
            let target = L::apply(base, delta, self.order);
            lanes[position] = target.store();
            self.changed += 1;
            if let Some(sum) = &mut self.sum {
                *sum = sum.wrapping_add(lane_term(position, base, target));
            }
        }
        Ok(())
    }

    /// Changes the lanes of some tiles where part of each delta is stored as it is.
    fn rebuild<L: Lane>(&mut self, payload: &Payload<'_>, halves: Halves<'_, L>, first: usize, lanes: &mut [u8]) {
        let low = &payload.low[first / 8 * payload.low_bits as usize..];
        let lanes = lanes_of_mut::<L>(lanes);
        // One loop for each order, so that nothing is decided inside.
        self.changed += match self.order {
            Order::Plain => vectorized(
                #[inline(always)]
                || rebuild::<L>(payload, low, halves, Order::Plain, lanes),
            ),
            Order::Ordered => vectorized(
                #[inline(always)]
                || rebuild::<L>(payload, low, halves, Order::Ordered, lanes),
            ),
        };
    }
}

/// Changes that are listed.
struct Exceptions<'a, L: Lane> {
    positions: &'a [[u8; 4]],
    deltas: &'a [L::Le],
    /// The base lanes of the first ones.
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

    /// Takes down the base lanes of those before lane `end`, which have not changed yet.
    fn take_bases(&mut self, lanes: &[u8], end: usize) {
        let left = self.positions[self.bases.len()..].iter().map(|position| u32::from_le_bytes(*position) as usize);
        let lanes = lanes_of::<L>(lanes);
        self.bases.extend(left.take_while(|position| *position < end).map(|position| L::load(lanes[position])));
    }

    /// Position, delta and base lane of each.
    fn each(&self) -> impl Iterator<Item = (usize, L, L)> {
        let positions = self.positions.iter().map(|position| u32::from_le_bytes(*position) as usize);
        positions.zip(self.deltas).zip(&self.bases).map(|((position, delta), base)| (position, L::load(*delta), *base))
    }
}

/// The coded lanes of some tiles: a mask for each half of a block, and a value for each place.
struct Halves<'a, L: Lane> {
    masks: &'a [u64],
    values: &'a [L::Le],
    tiles: Tiles,
}

impl<L: Lane> Halves<'_, L> {
    /// Calls `f` with the number of each half of a block, its lanes, their mask, and the values of those that it selects.
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
            self.values = &self.values[self.tiles.places(taken)..];
        }
    }
}

/// Returns what a chunk sum grows by, and the number of changes.
#[inline(always)]
fn patch_few<L: Lane>(positions: &[u32], values: &[L::Le], changed: &[u16], order: Order, lanes: &mut [L::Le]) -> (u64, usize) {
    let (mut sum, mut count) = (0u64, 0);
    // Four groups at once: where a loop ends is a guess, and wrong as often as there are loops.
    for (at, masks) in changed.chunks(4).enumerate() {
        let mut left = masks.iter().rev().fold(0u64, |left, &mask| left << GROUP | u64::from(mask));
        count += left.count_ones() as usize;
        while left != 0 {
            let j = 4 * GROUP * at + left.trailing_zeros() as usize;
            left &= left - 1;
            let position = positions[j] as usize;
            let base = L::load(lanes[position]);
            let target = L::apply(base, L::load(values[j]), order);
            lanes[position] = target.store();
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

/// Returns the number of changes. `low` begins with the bits of the first lane.
#[inline(always)]
fn rebuild<L: Lane>(payload: &Payload<'_>, low: &[u8], halves: Halves<'_, L>, order: Order, lanes: &mut [L::Le]) -> usize {
    let low_bits = payload.low_bits;
    let high_mask = 1u64.checked_shl(8 * L::BYTES as u32 - low_bits).unwrap_or(0).wrapping_sub(1);
    // With 64 low bits there are no high ones to be shifted.
    let high = |value: &L::Le| (payload.center.wrapping_sub(L::load(*value).to_u64()) & high_mask) << low_bits.min(63);
    // The low bits of half a block begin with a byte.
    let size = HALF / 8 * low_bits as usize;
    let mut changed = 0;
    halves.each(
        lanes,
        #[inline(always)]
        |h, half, mut mask, found| {
            let low = &low[h * size..];
            let mut deltas = low_bits_of_half(&low[..size.min(low.len())], low_bits);
            if found.len() == HALF {
                deltas.iter_mut().zip(found).for_each(|(delta, value)| *delta |= high(value));
            } else {
                for value in found {
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

/// Numbers of `count` bits, 1 to 64, from the begin of a string of bits; 0 where it has ended.
#[inline(always)]
fn low_bits_of_half(bytes: &[u8], count: u32) -> [u64; HALF] {
    let mut numbers = [0; HALF];
    if count == 8 {
        numbers.iter_mut().zip(bytes).for_each(|(number, byte)| *number = u64::from(*byte));
        return numbers;
    }
    // Room for a window at the last number.
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
