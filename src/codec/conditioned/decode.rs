//! From a payload and base lanes to target lanes (`spec/codecs.md` sections 4.4 to 4.6).

use super::context::{BLOCK, HALF, indexes};
use super::payload::{Payload, segment};
use super::stream;
use super::tables::{Lookup, TableSet};
use crate::codec::Encoded;
use crate::error::{Result, Rule};
use crate::lane::{Dtype, Lane, Order, lanes_of, lanes_of_mut};
use crate::simd::Path;
use crate::sums::{chunk_sum, lane_term};

/// Blocks whose contexts are taken at once.
const TILE_BLOCKS: usize = 32;

/// What a thread needs to decode chunks, used again for every chunk.
pub(crate) struct Decoder {
    path: Path,
    lookup: Lookup,
    /// Of the segment in work: a mask for each half of a block, the classes of the coded lanes, and their values. The last two
    /// are never made shorter, because growing them again would clear them.
    masks: Vec<u64>,
    coded: usize,
    classes: Vec<u8>,
    values: Vec<u8>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::with_path(Path::best())
    }
}

impl Decoder {
    /// A decoder that uses these instructions.
    pub fn with_path(path: Path) -> Self {
        Self { path, lookup: Lookup::default(), masks: Vec::new(), coded: 0, classes: Vec::new(), values: Vec::new() }
    }

    /// See [`crate::codec::ChunkDecoder::decode`].
    pub fn decode<L: Lane>(
        &mut self,
        dtype: Dtype,
        tables: Option<&TableSet>,
        payload: &[u8],
        encoded: Encoded,
        base_sum: u64,
        lanes: &mut [u8],
    ) -> Result<u64> {
        let count = lanes.len() / L::BYTES;
        let classes = tables.map_or(0, |tables| tables.classes().len());
        let payload = Payload::parse(payload, count, L::BYTES, encoded.num_deltas, classes)?;
        // Without tables no lane is coded, and whatever stands here is not looked at.
        if let Some(tables) = tables.filter(|tables| !self.lookup.is_of(tables)) {
            self.lookup = Lookup::new(tables);
        }

        // A term a change is dearer than its share of a pass over all lanes.
        let sparse = 16 * (encoded.num_deltas as usize) < count && payload.low_bits == 0;
        let mut target = Target { order: dtype.order(), sum: sparse.then_some(base_sum), changed: 0 };
        let exceptions = Exceptions::<L>::find(&payload, lanes)?;
        let blocks = count.div_ceil(BLOCK);
        for (s, stream) in payload.streams().enumerate() {
            let blocks = segment(s, payload.segments, blocks);
            let first = blocks.start * BLOCK;
            let lanes = &mut lanes[first * L::BYTES..(blocks.end * BLOCK).min(count) * L::BYTES];
            self.find_coded::<L>(dtype, &payload, blocks.start, lanes);
            self.decode_stream::<L>(&payload, stream?)?;
            if payload.low_bits == 0 {
                target.patch::<L>(&self.masks, lanes_of::<L>(&self.values), first, lanes);
            } else {
                target.rebuild::<L>(&payload, &self.masks, lanes_of::<L>(&self.values), first, lanes);
            }
        }
        target.except(exceptions, lanes)?;
        Rule::PayloadDeltas.check_eq(encoded.num_deltas as usize, target.changed)?;
        Ok(target.sum.unwrap_or_else(|| chunk_sum(lanes)))
    }

    /// Finds the coded lanes of a segment, which begins with block `first_block`.
    fn find_coded<L: Lane>(&mut self, dtype: Dtype, payload: &Payload<'_>, first_block: usize, lanes: &[u8]) {
        let count = lanes.len() / L::BYTES;
        self.masks.clear();
        self.coded = 0;
        let room = count.next_multiple_of(BLOCK) + HALF;
        if self.classes.len() < room {
            self.classes.resize(room, 0);
        }
        let mut tile = [0; TILE_BLOCKS * BLOCK];
        for (t, lanes) in lanes.chunks(tile.len() * L::BYTES).enumerate() {
            let size = (lanes.len() / L::BYTES).next_multiple_of(BLOCK);
            indexes::<L>(lanes, dtype, payload.maps.first, &mut tile[..size]);
            for (b, block) in tile[..size].as_chunks::<HALF>().0.iter().enumerate() {
                let activity = payload.activity(first_block + t * TILE_BLOCKS + b / 2);
                let map = &payload.maps.classes[usize::from(activity)];
                // The classes have room for one half more than there are lanes.
                let Some(room) = self.classes[self.coded..].first_chunk_mut() else { return };
                let mask = self.path.compact(block, map, room);
                self.coded += mask.count_ones() as usize;
                self.masks.push(mask);
            }
        }
    }

    fn decode_stream<L: Lane>(&mut self, payload: &Payload<'_>, stream: &[u8]) -> Result<()> {
        let size = self.coded * L::BYTES;
        if self.values.len() < size {
            self.values.resize(size, 0);
        }
        let bits = 8 * L::BYTES as u32 - payload.low_bits;
        let (classes, values) = (&self.classes[..self.coded], lanes_of_mut::<L>(&mut self.values[..size]));
        stream::decode::<L>(self.path, &self.lookup, stream, payload.states_log2, classes, bits, values)
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
    /// Changes the lanes of a segment, whose deltas are the values, and which begins with lane `first` of its chunk.
    fn patch<L: Lane>(&mut self, masks: &[u64], mut values: &[L::Le], first: usize, lanes: &mut [u8]) {
        for (h, (half, &mask)) in lanes_of_mut::<L>(lanes).chunks_mut(HALF).zip(masks).enumerate() {
            let (deltas, rest) = values.split_at(mask.count_ones() as usize);
            values = rest;
            let changed = deltas.iter().filter(|&&delta| L::load(delta) != L::default()).count();
            self.changed += changed;
            if changed == 0 {
                continue;
            }
            if let Some(sum) = &mut self.sum {
                *sum = patch_few::<L>(half, mask, deltas, self.order, first + h * HALF, *sum);
            } else {
                patch_many::<L>(half, mask, deltas, self.order);
            }
        }
    }

    /// Makes the changes that are listed; they come last, and are for lanes that nothing has changed yet.
    fn except<L: Lane>(&mut self, exceptions: Exceptions<L>, lanes: &mut [u8]) -> Result<()> {
        let lanes = lanes_of_mut::<L>(lanes);
        for (position, delta, base) in exceptions.0 {
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

    /// [`Target::patch`] where part of each delta is stored as it is.
    fn rebuild<L: Lane>(&mut self, payload: &Payload<'_>, masks: &[u64], mut values: &[L::Le], first: usize, lanes: &mut [u8]) {
        let low_bits = payload.low_bits;
        let high_mask = 1u64.checked_shl(8 * L::BYTES as u32 - low_bits).unwrap_or(0).wrapping_sub(1);
        for (h, (half, &mask)) in lanes_of_mut::<L>(lanes).chunks_mut(HALF).zip(masks).enumerate() {
            let (found, rest) = values.split_at(mask.count_ones() as usize);
            values = rest;
            let mut found = found.iter();
            for (i, lane) in half.iter_mut().enumerate() {
                let coded = if mask >> i & 1 == 1 { found.next() } else { None };
                let high = coded.map_or(0, |value| payload.center.wrapping_sub(L::load(*value).widen()) & high_mask);
                let low = bits_at(payload.low, (first + h * HALF + i) * low_bits as usize, low_bits);
                let delta = L::truncate(high.checked_shl(low_bits).unwrap_or(0) | low);
                self.changed += usize::from(delta != L::default());
                *lane = L::apply(L::load(*lane), delta, self.order).store();
            }
        }
    }
}

/// Changes that are listed, with the base lanes that they are for.
struct Exceptions<L>(Vec<(usize, L, L)>);

impl<L: Lane> Exceptions<L> {
    /// Takes down position, delta and base lane of each, before anything changes.
    fn find(payload: &Payload<'_>, base: &[u8]) -> Result<Self> {
        let base = lanes_of::<L>(base);
        let mut next = 0;
        let exceptions = payload.positions.iter().zip(lanes_of::<L>(payload.deltas)).map(|(position, delta)| {
            let position = u32::from_le_bytes(*position) as usize;
            let lane = base.get(position).filter(|_| position >= next).ok_or_else(|| {
                Rule::PayloadPositions.broken(format_args!("a position from {next} on, below {}", base.len()), position)
            })?;
            next = position + 1;
            Ok((position, L::load(*delta), L::load(*lane)))
        });
        exceptions.collect::<Result<_>>().map(Self)
    }
}

/// Applies deltas to the lanes that `mask` selects, and returns `sum` of the chunk with their terms.
#[inline(always)]
fn patch_few<L: Lane>(half: &mut [L::Le], mut mask: u64, deltas: &[L::Le], order: Order, first: usize, mut sum: u64) -> u64 {
    for delta in deltas {
        let i = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        let delta = L::load(*delta);
        if delta != L::default() {
            // Indexes past the last lane have class 0, so that the mask has no bits there.
            let Some(lane) = half.get_mut(i) else { continue };
            let base = L::load(*lane);
            let target = L::apply(base, delta, order);
            *lane = target.store();
            sum = sum.wrapping_add(lane_term(first + i, base, target));
        }
    }
    sum
}

/// Applies deltas to the lanes that `mask` selects.
#[inline(always)]
fn patch_many<L: Lane>(half: &mut [L::Le], mut mask: u64, deltas: &[L::Le], order: Order) {
    let mut spread = [L::default().store(); HALF];
    if mask == u64::MAX {
        spread.copy_from_slice(deltas);
    } else {
        for delta in deltas {
            spread[mask.trailing_zeros() as usize % HALF] = *delta;
            mask &= mask.wrapping_sub(1);
        }
    }
    for (lane, delta) in half.iter_mut().zip(spread) {
        *lane = L::apply(L::load(*lane), L::load(delta), order).store();
    }
}

/// Bits `at` to `at + count` of a string of bits, `count` at most 64.
#[inline(always)]
fn bits_at(bytes: &[u8], at: usize, count: u32) -> u64 {
    let rest = &bytes[at / 8..];
    let window = rest.first_chunk().copied().unwrap_or_else(|| {
        let mut window = [0; 16];
        window[..rest.len()].copy_from_slice(rest);
        window
    });
    let bits = u128::from_le_bytes(window) >> (at % 8);
    (bits & ((1 << count) - 1)) as u64
}
