//! Encodes base and target lanes as a payload. The spec defines the valid payloads; this module writes the one that `choice`
//! chooses.

use super::choice::{Choice, Model, activity, choose, missing_cost};
use super::coded::{Classifier, CodedLanes, tiles_of};
use super::context::{BLOCK, HALF, tile_blocks};
use super::cost::{BIT, exception_bytes};
use super::payload::{MAX_LOG2, segment};
use super::stats::{Split, Stats, all_lanes};
use super::stream::{self, RANS_LOWER_BOUND};
use super::tables::TableSet;
use super::values::Lanes;
use crate::codec::simd::{Platform, STEP, Tiles};
use crate::codec::{Difference, Encoded};
use crate::dispatch::vectorized;
use crate::format::ConditionedHeader;
use crate::lane::{Dtype, Lane, lanes_of, lanes_of_mut};
use crate::prelude::*;
use zerocopy::IntoBytes;

/// Maximum number of steps per stream, if each state has enough payload. Streams with fewer steps decode faster, because the
/// steps of a stream are decoded one after another. More streams have more states, and each state costs 3 bytes.
const STEPS: usize = 512;
/// Minimum number of payload bytes per state: in a chunk that is split into streams of [`STEPS`], and in a chunk with one stream.
const MIN_STATE_BYTES: u64 = 80;
const MIN_STATE_BYTES_OF_ONE_STREAM: u64 = 40;
/// In a chunk with at most [`DecodeCost::streams`] streams: minimum number of payload bytes per state, and of steps of coded lanes
/// per stream.
const MIN_STATE_BYTES_OF_FEW_STREAMS: u64 = 32;
const MIN_STEPS_OF_FEW_STREAMS: usize = 128;

/// Model and buffers of a thread that encodes chunks, reused for every chunk.
#[derive(Default)]
pub struct Encoder {
    platform: Platform,
    model: Option<Model>,
    /// Masks that select all lanes, for chunks in which every lane has a value.
    all: Vec<u64>,
    coded: CodedLanes,
    /// Values of the coded lanes of a segment.
    values: Vec<u8>,
    words: Vec<u16>,
    streams: Vec<u8>,
}

/// Weight of decoding time against payload size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeCost {
    /// Cost of decoding a coded lane, in 256ths of a bit.
    pub lane: u64,
    /// Maximum number of steps per stream. A stream is split further only if each state has enough payload.
    pub steps: usize,
    /// Minimum number of payload bytes per state, for splitting a stream that has more than `steps` steps.
    pub state: u64,
    /// Minimum number of streams of a chunk, a power of two. Chunks with few coded lanes or small payloads have fewer.
    pub streams: usize,
}

impl Default for DecodeCost {
    /// Returns a low weight, for small payloads.
    fn default() -> Self {
        Self { lane: 16, steps: 1024, state: 80, streams: 1 }
    }
}

impl Encoder {
    /// Appends the payload of a chunk to `payload`. Appends nothing if no lane changes. The `low_bits` low bits of each delta are
    /// stored uncoded.
    pub fn encode<L: Lane>(
        &mut self,
        difference: Difference<'_>,
        tables: Option<&TableSet>,
        low_bits: u32,
        decode_cost: DecodeCost,
        payload: &mut Vec<u8>,
    ) -> Encoded {
        let Difference { dtype, base, target, changed, .. } = difference;
        if changed == 0 {
            return Encoded::default();
        }
        let start = payload.len();
        let coded = tables.is_some_and(|tables| self.encode_coded::<L>(difference, tables, low_bits, decode_cost, payload));
        if !coded || payload.len() - start > uncoded_bytes(changed, L::BYTES, base.len()) {
            payload.truncate(start);
            if listed_bytes(changed, L::BYTES) < base.len() {
                put_listed::<L>(difference, payload);
            } else {
                put_plain::<L>(dtype, base, target, payload);
            }
        }
        Encoded { uncompressed_size: base.len() as u32, num_deltas: changed as u32 }
    }

    /// Returns the estimated size of the payload that [`encode`](Self::encode) writes, in bytes.
    pub fn estimate<L: Lane>(
        &mut self,
        difference: Difference<'_>,
        tables: Option<&TableSet>,
        low_bits: u32,
        decode_cost: DecodeCost,
    ) -> u64 {
        let Difference { base, changed, .. } = difference;
        let choice = match tables {
            Some(tables) if changed != 0 => {
                let Params { choice, coded, .. } = self.choose::<L>(difference, tables, low_bits, decode_cost);
                Some((choice.cost, coded))
            }
            _ => None,
        };
        estimated_size(changed, choice, low_bits, (base.len(), L::BYTES), decode_cost)
    }

    /// Chooses activities and maps, and finds the coded lanes. If there are low bits, sets the mask of all lanes.
    fn choose<L: Lane>(&mut self, difference: Difference<'_>, tables: &TableSet, low_bits: u32, decode_cost: DecodeCost) -> Params {
        let Difference { dtype, base, target, masks, changed } = difference;
        let model = model_of(&mut self.model, tables, low_bits, L::BYTES);
        let split = Split::for_lanes::<L>(base, target, dtype, low_bits);
        let valued = match low_bits {
            0 => masks,
            _ => all_lanes(difference.lanes(), &mut self.all),
        };
        let stats = Stats::gather::<L>(base, target, dtype, split, valued, changed);
        let choice = choose(&stats, model, split, decode_cost.lane, L::BYTES);
        let levels: Vec<u8> = stats.levels.iter().map(|&level| activity(level, choice.activity_bits)).collect();
        let classifier = Classifier { dtype, maps: &choice.maps, states: STEP };
        self.coded.find::<L>(self.platform, classifier, &levels, base, None, None);
        let coded = self.coded.masks().iter().map(|mask| mask.count_ones() as usize).sum();
        Params { split, choice, levels, coded }
    }

    /// Encodes the chunk with tables. Returns false if a value has no token and cannot be an exception.
    fn encode_coded<L: Lane>(
        &mut self,
        difference: Difference<'_>,
        tables: &TableSet,
        low_bits: u32,
        decode_cost: DecodeCost,
        payload: &mut Vec<u8>,
    ) -> bool {
        let Difference { dtype, base, target, masks, .. } = difference;
        let Params { split, choice, levels, coded } = self.choose::<L>(difference, tables, low_bits, decode_cost);
        let model = model_of(&mut self.model, tables, low_bits, L::BYTES);
        // Masks of the lanes that have a value: the changed lanes, or with low bits all lanes.
        let valued = if low_bits == 0 { masks } else { &self.all };
        let tile = tile_blocks(L::BYTES);
        let tiles = levels.len().div_ceil(tile);
        let (states, segments) = shape(coded, size_of_cost(choice.cost, coded, low_bits, decode_cost), tiles, decode_cost);
        if states != STEP {
            // The number of states depends on the number of coded lanes.
            self.coded.shorten_steps::<L>(STEP, states);
        }
        let (masks, classes) = (self.coded.masks(), self.coded.classes());
        let lanes = Lanes { base, target, dtype, split, changed: valued };
        let mut listed = Vec::new();
        let mut sizes = Vec::with_capacity(segments);
        let mut done = 0;
        self.streams.clear();
        for s in 0..segments {
            let tiles = segment(s, segments, tiles);
            let halves = 2 * tile * tiles.start..(2 * tile * tiles.end).min(masks.len());
            let masks = &masks[halves.clone()];
            let values = lanes.values::<L>(self.platform, halves.clone(), masks, states, &mut self.values, &mut listed);
            let classes = &classes[done..done + values.len()];
            done += values.len();
            let before = self.streams.len();
            let missing =
                stream::encode::<L>(self.platform, &model.divisors, states, classes, values, &mut self.words, &mut self.streams);
            listed.extend(positions(halves.start, masks, tiles_of::<L>(states), missing));
            sizes.push(((self.streams.len() - before) / 2) as u32);
        }
        if low_bits != 0 && !listed.is_empty() {
            return false;
        }
        listed.sort_unstable();

        let start = payload.len();
        payload.extend(header(split, &choice, low_bits, (states, segments), listed.len()).as_bytes());
        put_maps(&choice, payload);
        put_bits(levels.iter().map(|&level| level.into()), choice.activity_bits.into(), payload);
        payload.extend(listed.iter().flat_map(|position| position.to_le_bytes()));
        for &position in &listed {
            payload.extend(lanes.delta::<L>(position as usize).store().as_bytes());
        }
        if low_bits != 0 {
            put_bits(deltas::<L>(base, target, dtype).map(|delta| delta & ((1 << low_bits) - 1)), low_bits, payload);
        }
        payload.extend(sizes[..segments - 1].iter().flat_map(|size| size.to_le_bytes()));
        payload.resize(payload.len() + (payload.len() - start) % 2, 0);
        payload.extend(&self.streams);
        true
    }
}

/// What is chosen for a chunk with tables.
struct Params {
    split: Split,
    choice: Choice,
    /// Activity of each block.
    levels: Vec<u8>,
    /// Number of coded lanes.
    coded: usize,
}

/// Returns the header of a payload with coded lanes.
fn header(
    split: Split,
    choice: &Choice,
    low_bits: u32,
    (states, segments): (usize, usize),
    exceptions: usize,
) -> ConditionedHeader {
    ConditionedHeader {
        low_bits: low_bits as u8,
        states_log2: states.ilog2() as u8,
        segments_log2: segments.ilog2() as u8,
        activity_bits: choice.activity_bits,
        first_context: choice.maps.first.into(),
        context_count: choice.maps.count,
        reserved: 0,
        exception_count: (exceptions as u32).into(),
        center: (split.center as u32).into(),
    }
}

/// Returns the model of a table set, which is kept for the next chunk.
fn model_of<'m>(kept: &'m mut Option<Model>, tables: &TableSet, low_bits: u32, width: usize) -> &'m Model {
    let missing = missing_cost(low_bits, width);
    if kept.as_ref().is_none_or(|model| model.set != *tables || model.missing != missing) {
        *kept = None;
    }
    kept.get_or_insert_with(|| Model::new(tables, missing))
}

/// Estimates the size of a payload in bytes, for a chunk of `size` bytes, in lanes of `width` bytes, in which `changed` lanes change.
/// `choice` has the cost of the choice and the number of coded lanes, if there are tables.
pub fn estimated_size(
    changed: usize,
    choice: Option<(u64, usize)>,
    low_bits: u32,
    (size, width): (usize, usize),
    decode_cost: DecodeCost,
) -> u64 {
    /// Bytes that a state adds to a stream, on average.
    const STATE_BYTES: usize = 3;
    if changed == 0 {
        return 0;
    }
    let uncoded = uncoded_bytes(changed, width, size) as u64;
    choice.map_or(uncoded, |(cost, coded)| {
        let lanes = size / width;
        let streams = size_of_cost(cost, coded, low_bits, decode_cost);
        let (states, segments) = shape(coded, streams, lanes.div_ceil(BLOCK * tile_blocks(width)), decode_cost);
        let low = (lanes as u64 * u64::from(low_bits)).div_ceil(8);
        let fixed = size_of::<ConditionedHeader>() + 4 * (segments - 1) + STATE_BYTES * states * segments;
        (streams + low + fixed as u64).min(uncoded)
    })
}

/// Returns the size in bytes of `changed` exceptions, for lanes of `width` bytes.
pub fn listed_bytes(changed: usize, width: usize) -> usize {
    changed * exception_bytes(width)
}

/// Returns the size in bytes of a payload without coded lanes: header, map, deltas or exceptions, padding to an even size, and
/// one state. The chunk has `size` bytes, and `changed` of its lanes of `width` bytes change.
pub fn uncoded_bytes(changed: usize, width: usize, size: usize) -> usize {
    let stored = listed_bytes(changed, width).min(size);
    (size_of::<ConditionedHeader>() + 1 + stored).next_multiple_of(2) + size_of_val(&RANS_LOWER_BOUND)
}

/// Returns the zigzag deltas of all lanes.
fn deltas<L: Lane>(base: &[u8], target: &[u8], dtype: Dtype) -> impl Iterator<Item = u64> {
    let lanes = lanes_of::<L>(base).iter().zip(lanes_of::<L>(target));
    lanes.map(move |(base, target)| L::delta(L::load(*base), L::load(*target), dtype.order()).to_u64())
}

/// Appends a payload that lists all changes as exceptions.
fn put_listed<L: Lane>(difference: Difference<'_>, payload: &mut Vec<u8>) {
    let exception_count = (difference.changed as u32).into();
    let header = ConditionedHeader { exception_count, context_count: 1, ..ConditionedHeader::default() };
    payload.extend(header.as_bytes());
    payload.push(0);
    let changes = difference.changes::<L>();
    payload.extend(changes.positions.iter().flat_map(|position| position.to_le_bytes()));
    changes.deltas.iter().for_each(|delta| payload.extend(delta.store().as_bytes()));
    end_uncoded(listed_bytes(difference.changed, L::BYTES), payload);
}

/// Appends a payload that stores all deltas uncoded.
fn put_plain<L: Lane>(dtype: Dtype, base: &[u8], target: &[u8], payload: &mut Vec<u8>) {
    let header = ConditionedHeader { low_bits: 8 * L::BYTES as u8, context_count: 1, ..ConditionedHeader::default() };
    payload.extend(header.as_bytes());
    payload.push(0);
    let start = payload.len();
    payload.resize(start + base.len(), 0);
    let lanes = lanes_of_mut::<L>(&mut payload[start..]).iter_mut().zip(lanes_of::<L>(base)).zip(lanes_of::<L>(target));
    let order = dtype.order();
    vectorized!(lanes.for_each(|((lane, base), target)| *lane = L::delta(L::load(*base), L::load(*target), order).store()));
    end_uncoded(base.len(), payload);
}

/// Ends a payload without coded lanes. `size` bytes follow its header and map, which have 17 bytes.
fn end_uncoded(size: usize, payload: &mut Vec<u8>) {
    payload.resize(payload.len() + (size + 1) % 2, 0);
    payload.extend(RANS_LOWER_BOUND.to_le_bytes());
}

/// Returns the size in bytes of a payload whose choice has this cost. Part of the cost is decoding time. It is subtracted, because
/// it adds nothing to the size of the payload.
pub fn size_of_cost(cost: u64, coded: usize, low_bits: u32, decode_cost: DecodeCost) -> u64 {
    let time = if low_bits == 0 { coded as u64 * decode_cost.lane } else { 0 };
    cost.saturating_sub(time) / BIT / 8
}

/// Returns the number of states per stream and the number of segments, for a chunk of `tiles` tiles with `coded` coded lanes and
/// a payload of about `size` bytes. Streams have at most `decode_cost.steps` steps, and a chunk has at least `decode_cost.streams`
/// streams, unless streams or states would have too little payload.
pub fn shape(coded: usize, size: u64, tiles: usize, decode_cost: DecodeCost) -> (usize, usize) {
    let DecodeCost { steps: max_steps, state, streams, .. } = decode_cost;
    // On average, half of a tile's last step is unused.
    let steps = coded.div_ceil(STEP) + tiles / 2;
    let of_steps = |max_steps| steps.div_ceil(max_steps).next_power_of_two();
    // The size includes exceptions, which no stream has. So the number of coded lanes limits `streams`, too.
    let few = streams.min((coded / STEP).div_ceil(MIN_STEPS_OF_FEW_STREAMS).next_power_of_two());
    let segments = [
        (of_steps(STEPS), state.max(MIN_STATE_BYTES)),
        (of_steps(max_steps), state),
        (few, state.max(MIN_STATE_BYTES_OF_FEW_STREAMS)),
    ];
    let segments = segments.map(|(wanted, bytes)| wanted.min(1 << (size / bytes / STEP as u64).max(1).ilog2()));
    let segments = segments.into_iter().fold(1, usize::max).min(1 << MAX_LOG2).min(1 << tiles.ilog2());
    // A small payload has fewer states, because each costs 3 bytes.
    let states = 1 << STEP.min(coded.max(1)).min((size / state.max(MIN_STATE_BYTES_OF_ONE_STREAM)).max(1) as usize).ilog2();
    let states = STEP.min(coded.div_ceil(max_steps).next_power_of_two()).max(states);
    (if segments == 1 { states } else { STEP }, segments)
}

/// Returns the positions of coded lanes in the chunk. `ranks` are indexes in the padded list of the coded lanes of a segment.
/// `masks` are the segment's masks, from half block `first` on.
fn positions(first: usize, masks: &[u64], tiles: Tiles, mut ranks: Vec<usize>) -> Vec<u32> {
    ranks.sort_unstable();
    let mut ranks = ranks.into_iter().peekable();
    let mut positions = Vec::new();
    let (mut start, mut before) = (0, 0);
    for (h, mask) in masks.iter().enumerate() {
        if ranks.peek().is_none() {
            break;
        }
        if h % tiles.halves == 0 {
            start += tiles.padded_len(before - start);
            before = start;
        }
        let end = before + mask.count_ones() as usize;
        while let Some(rank) = ranks.next_if(|&rank| rank < end) {
            let rest = (before..rank).fold(*mask, |rest, _| rest & (rest - 1));
            positions.push(((first + h) * HALF) as u32 + rest.trailing_zeros());
        }
        before = end;
    }
    positions
}

fn put_maps(choice: &Choice, payload: &mut Vec<u8>) {
    for map in &choice.maps.classes[..1 << choice.activity_bits] {
        let entries = &map[..usize::from(choice.maps.count)];
        payload.extend(entries.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4)));
    }
}

/// Appends `bits` bits of each number. Each byte is filled from its lowest bit up.
fn put_bits(numbers: impl Iterator<Item = u64>, bits: u32, payload: &mut Vec<u8>) {
    match bits {
        0 => return,
        // Whole bytes need no packing. The compiler vectorizes this loop.
        8 => return payload.extend(numbers.map(|number| number as u8)),
        _ => {}
    }
    let mut pending = 0u128;
    let mut count = 0;
    for number in numbers {
        pending |= u128::from(number) << count;
        count += bits;
        if count >= 64 {
            payload.extend((pending as u64).to_le_bytes());
            pending >>= 64;
            count -= 64;
        }
    }
    payload.extend(&pending.to_le_bytes()[..count.div_ceil(8) as usize]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first half block has one coded lane, with rank 0. Rank 1 is the first coded lane of the second half block.
    #[test]
    fn a_place_belongs_to_the_half_that_its_lane_is_in() {
        let masks = [1 << 3, 1 << 7 | 1 << 9];
        for (place, position) in [(0, 3), (1, 64 + 7), (2, 64 + 9)] {
            assert_eq!(positions(0, &masks, tiles_of::<u16>(STEP), vec![place]), [position]);
            assert_eq!(positions(4, &masks, tiles_of::<u16>(STEP), vec![place]), [4 * 64 + position]);
        }
    }
}
