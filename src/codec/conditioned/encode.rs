//! From base and target lanes to a payload. What a decoder must accept is in the spec; what is chosen here is free.

use super::context::{BLOCK, HALF, MAX_CONTEXTS, Maps, indexes};
use super::cost::{BIT, Costs};
use super::payload::segment;
use super::stats::{LEVELS, Row, Split, Stats};
use super::stream::LEAST_STATE;
use super::tables::{SCALE_LOG2, TableSet, token_of};
use crate::codec::Encoded;
use crate::format::ConditionedHeader;
use crate::lane::{Dtype, Lane, count_changed, lanes_of};
use crate::simd::{Path, STEP};
use std::ops::Range;
use zerocopy::IntoBytes;

/// Lanes of blocks whose contexts are taken at once.
const TILE: usize = 32 * BLOCK;
/// Most steps that a stream should have, so that a chunk is decoded in few rounds trips of a processor's latency.
const STEPS: usize = 2048;
/// Least payload for each state, so that their 2 wasted bytes do not show.
const BYTES_PER_STATE: u64 = 40;

/// What a thread needs to encode chunks, used again for every chunk.
pub(crate) struct Encoder {
    path: Path,
    model: Option<Model>,
    masks: Vec<u64>,
    classes: Vec<u8>,
    values: Vec<u64>,
    words: Vec<u16>,
}

/// A table set in the forms that an encoder wants.
struct Model {
    set: TableSet,
    costs: Costs,
    symbols: Vec<Vec<Symbol>>,
}

/// A token of a class.
#[derive(Clone, Copy, Default)]
struct Symbol {
    frequency: u32,
    start: u32,
    /// ⌊2^44 / frequency⌋ + 1: a state below frequency·2^20 times this, shifted right by 44, is divided exactly.
    reciprocal: u64,
}

impl Model {
    fn new(set: &TableSet) -> Self {
        let symbols = set.classes().map(|class| {
            let mut start = 0;
            let symbol = |&frequency: &u16| {
                let frequency = u32::from(frequency);
                let reciprocal = (1u64 << 44).checked_div(frequency.into()).map_or(0, |r| r + 1);
                let symbol = Symbol { frequency, start, reciprocal };
                start += frequency;
                symbol
            };
            class.iter().map(symbol).collect()
        });
        Self { costs: Costs::new(set), symbols: symbols.collect(), set: set.clone() }
    }

    fn has(&self, class: u8, token: u8) -> bool {
        self.symbols[usize::from(class) - 1].get(usize::from(token)).is_some_and(|symbol| symbol.frequency != 0)
    }
}

/// How a chunk is to be coded, and what that is thought to cost.
struct Choice {
    activity_bits: u8,
    maps: Maps,
    cost: u64,
}

impl Default for Encoder {
    fn default() -> Self {
        Self { path: Path::best(), model: None, masks: Vec::new(), classes: Vec::new(), values: Vec::new(), words: Vec::new() }
    }
}

impl Encoder {
    /// Appends the payload of a chunk to `payload`: nothing if no lane has changed. `low_bits` is 0, or the bits of each delta
    /// to store as they are.
    pub fn encode<L: Lane>(
        &mut self,
        dtype: Dtype,
        tables: Option<&TableSet>,
        low_bits: u32,
        base: &[u8],
        target: &[u8],
        payload: &mut Vec<u8>,
    ) -> Encoded {
        let changed = count_changed::<L>(base, target);
        if changed == 0 {
            return Encoded::default();
        }
        let start = payload.len();
        let coded = tables.is_some_and(|tables| self.encode_coded::<L>(dtype, tables, low_bits, base, target, changed, payload));
        let most = base.len() + base.len() / 64 + 64;
        if !coded || payload.len() - start > most {
            payload.truncate(start);
            put_plain::<L>(dtype, base, target, payload);
        }
        Encoded { uncompressed_size: base.len() as u32, num_deltas: changed as u32 }
    }

    /// Returns false if a value has no token and cannot be an exception.
    #[expect(clippy::too_many_arguments, reason = "all of a chunk")]
    fn encode_coded<L: Lane>(
        &mut self,
        dtype: Dtype,
        tables: &TableSet,
        low_bits: u32,
        base: &[u8],
        target: &[u8],
        changed: usize,
        payload: &mut Vec<u8>,
    ) -> bool {
        let model = match &mut self.model {
            Some(model) if model.set == *tables => model,
            model => model.insert(Model::new(tables)),
        };
        let split = Split::for_lanes::<L>(base, target, dtype, low_bits);
        let stats = Stats::gather::<L>(base, target, dtype, split, changed);
        let choice = choose(&stats, &model.costs, split, L::BYTES);
        let levels: Vec<u8> = stats.levels.iter().map(|&level| activity(level, choice.activity_bits)).collect();
        let coded = find_coded::<L>(self.path, dtype, &choice.maps, &levels, base, &mut self.masks, &mut self.classes);

        let Some(exceptions) = collect_values::<L>(base, target, dtype, split, &self.masks, &self.classes, model, &mut self.values)
        else {
            return false;
        };
        let blocks = base.len().div_ceil(BLOCK * L::BYTES);
        let (states, segments) = shape(coded, choice.cost / BIT / 8, blocks);
        let header = ConditionedHeader {
            low_bits: low_bits as u8,
            states_log2: states.ilog2() as u8,
            segments_log2: segments.ilog2() as u8,
            activity_bits: choice.activity_bits,
            first_context: choice.maps.first.into(),
            context_count: choice.maps.count,
            reserved: 0,
            exception_count: (exceptions.len() as u32).into(),
            center: (split.center as u32).into(),
        };
        let start = payload.len();
        payload.extend(header.as_bytes());
        put_maps(&choice, payload);
        put_bits(levels.iter().map(|&level| level.into()), choice.activity_bits.into(), payload);
        payload.extend(exceptions.iter().flat_map(|(position, _)| position.to_le_bytes()));
        payload.extend(exceptions.iter().flat_map(|(_, delta)| delta.to_le_bytes().into_iter().take(L::BYTES)));
        if low_bits != 0 {
            put_bits(deltas::<L>(base, target, dtype).map(|delta| delta & ((1 << low_bits) - 1)), low_bits, payload);
        }
        let sizes_at = payload.len();
        payload.resize(sizes_at + 4 * (segments - 1), 0);
        payload.resize(payload.len() + (payload.len() - start) % 2, 0);
        let mut done = 0;
        for s in 0..segments {
            let halves = segment(s, segments, blocks);
            let halves = 2 * halves.start..(2 * halves.end).min(self.masks.len());
            let count: u32 = self.masks[halves].iter().map(|mask| mask.count_ones()).sum();
            let symbols = done..done + count as usize;
            done = symbols.end;
            let before = payload.len();
            put_stream(&model.symbols, states, &self.classes[symbols.clone()], &self.values[symbols], &mut self.words, payload);
            let size = (payload.len() - before) / 2;
            if let Some(at) = payload[sizes_at..].as_chunks_mut().0[..segments - 1].get_mut(s) {
                *at = (size as u32).to_le_bytes();
            }
        }
        true
    }
}

/// The zigzag deltas of all lanes.
fn deltas<L: Lane>(base: &[u8], target: &[u8], dtype: Dtype) -> impl Iterator<Item = u64> {
    let lanes = lanes_of::<L>(base).iter().zip(lanes_of::<L>(target));
    lanes.map(move |(base, target)| L::delta(L::load(*base), L::load(*target), dtype.order()).widen())
}

/// A payload whose deltas are stored as they are.
fn put_plain<L: Lane>(dtype: Dtype, base: &[u8], target: &[u8], payload: &mut Vec<u8>) {
    let header = ConditionedHeader { low_bits: 8 * L::BYTES as u8, context_count: 1, ..ConditionedHeader::default() };
    payload.extend(header.as_bytes());
    payload.push(0);
    let start = payload.len();
    payload.extend(deltas::<L>(base, target, dtype).flat_map(|delta| delta.to_le_bytes().into_iter().take(L::BYTES)));
    // Header and map have 17 bytes.
    payload.resize(payload.len() + (payload.len() - start + 1) % 2, 0);
    payload.extend(LEAST_STATE.to_le_bytes());
}

/// The activity that stands for a level.
fn activity(level: u8, activity_bits: u8) -> u8 {
    match activity_bits {
        0 => 0,
        1 => level.min(1),
        _ => level,
    }
}

/// Chooses activities and maps.
fn choose(stats: &Stats, costs: &Costs, split: Split, width: usize) -> Choice {
    let mut best = choose_maps(stats, costs, split, width, 0, &[0..LEVELS]);
    let blocks = stats.levels.len() as u64;
    if blocks >= 32 {
        for (bits, groups) in [(1, &[0..1, 1..LEVELS][..]), (2, &[0..1, 1..2, 2..3, 3..4][..])] {
            let mut choice = choose_maps(stats, costs, split, width, bits, groups);
            choice.cost += blocks * u64::from(bits) * BIT;
            if choice.cost < best.cost {
                best = choice;
            }
        }
    }
    best
}

/// Chooses a map for each group of levels.
fn choose_maps(stats: &Stats, costs: &Costs, split: Split, width: usize, activity_bits: u8, groups: &[Range<usize>]) -> Choice {
    let exception = |row: &Row| match split.low_bits {
        0 => row.others() * 8 * (4 + width as u64) * BIT,
        _ => u64::MAX / 1024,
    };
    // A lane that is coded costs time, so a class has to gain a little by it.
    let best_class = |row: &Row| -> (u8, u64) {
        let time = row.lanes() * u64::from(split.low_bits == 0);
        let extra = row.extra_bits() * BIT;
        let classes = (1..).zip(costs.of(&row.counts)).map(|(class, cost)| (class, cost + extra + time));
        classes.chain([(0, exception(row))]).min_by_key(|&(class, cost)| (cost, class)).unwrap_or_default()
    };
    // By group: the contexts that occur, their best classes and what those cost.
    let rows: Vec<Vec<(usize, Row, u8, u64)>> = groups
        .iter()
        .map(|levels| {
            let contexts = stats.contexts(levels.clone());
            let row = |context| {
                let row = stats.row(levels.clone(), context);
                let (class, cost) = best_class(&row);
                (context, row, class, cost)
            };
            contexts.map(row).collect()
        })
        .collect();
    let all = || rows.iter().flatten();
    let coded = || all().filter(|(_, _, class, _)| *class != 0).map(|(context, ..)| *context);
    let last = coded().max().unwrap_or(0);
    let lowest = coded().min().unwrap_or(0);
    // Contexts before the first one share its entry: fewer entries, and a worse fit.
    let share = |first: usize| -> (u64, Vec<u8>) {
        let merged = rows.iter().map(|rows| {
            let mut row = Row::default();
            rows.iter().filter(|(context, ..)| *context <= first).for_each(|(_, other, ..)| row.add(other));
            if row.counts.is_empty() { (0, 0) } else { best_class(&row) }
        });
        let (classes, costs): (Vec<u8>, Vec<u64>) = merged.unzip();
        let rest: u64 = all().filter(|(context, ..)| *context > first).map(|(.., cost)| *cost).sum();
        let entries = (last + 1 - first).next_multiple_of(2) as u64;
        (costs.iter().sum::<u64>() + rest + groups.len() as u64 * entries * 4 * BIT, classes)
    };
    let candidates = lowest.max((last + 1).saturating_sub(MAX_CONTEXTS))..=last;
    let first = candidates.clone().min_by_key(|&first| share(first).0).unwrap_or(last);
    let (cost, firsts) = share(first);

    let mut maps = Maps { first: stats.first + first as u16, count: (last + 1 - first) as u8, classes: [[0; MAX_CONTEXTS]; 4] };
    for ((map, rows), class) in maps.classes.iter_mut().zip(&rows).zip(firsts) {
        map[0] = class;
        for (context, _, class, _) in rows.iter().filter(|(context, ..)| *context > first && *context <= last) {
            map[context - first] = *class;
        }
    }
    Choice { activity_bits, maps, cost }
}

/// States of a stream and segments of a chunk with `coded` coded lanes and a payload of about `size` bytes.
fn shape(coded: usize, size: u64, blocks: usize) -> (usize, usize) {
    let wanted = coded.div_ceil(STEPS).max(1).next_power_of_two();
    let affordable = 1usize << (size / BYTES_PER_STATE).max(1).ilog2();
    let states = wanted.max(coded.min(STEP)).min(affordable);
    let states = 1usize << states.max(1).ilog2();
    let segments = (states / STEP).clamp(1, 1 << super::payload::MAX_LOG2).min(1 << blocks.ilog2());
    (states.min(STEP), segments)
}

/// As in the decoder: masks of the coded lanes, and their classes. Returns how many there are.
fn find_coded<L: Lane>(
    path: Path,
    dtype: Dtype,
    maps: &Maps,
    activities: &[u8],
    base: &[u8],
    masks: &mut Vec<u64>,
    classes: &mut Vec<u8>,
) -> usize {
    let count = base.len() / L::BYTES;
    masks.clear();
    let room = count.next_multiple_of(BLOCK) + HALF;
    if classes.len() < room {
        classes.resize(room, 0);
    }
    let mut coded = 0;
    let mut tile = [0; TILE];
    for (t, lanes) in base.chunks(TILE * L::BYTES).enumerate() {
        let size = (lanes.len() / L::BYTES).next_multiple_of(BLOCK);
        indexes::<L>(lanes, dtype, maps.first, &mut tile[..size]);
        for (h, half) in tile[..size].as_chunks::<HALF>().0.iter().enumerate() {
            let map = &maps.classes[usize::from(activities[t * (TILE / BLOCK) + h / 2])];
            let Some(room) = classes[coded..].first_chunk_mut() else { return coded };
            let mask = path.compact(half, map, room);
            coded += mask.count_ones() as usize;
            masks.push(mask);
        }
    }
    coded
}

/// The value of each coded lane, and the changes that are listed: of lanes that are not coded, and values without a token.
/// `None` if such a value cannot be listed.
#[expect(clippy::too_many_arguments, reason = "all of a chunk")]
fn collect_values<L: Lane>(
    base: &[u8],
    target: &[u8],
    dtype: Dtype,
    split: Split,
    masks: &[u64],
    classes: &[u8],
    model: &Model,
    values: &mut Vec<u64>,
) -> Option<Vec<(u32, u64)>> {
    values.clear();
    let mut exceptions = Vec::new();
    let bits = 8 * L::BYTES as u32;
    let halves = base.chunks(HALF * L::BYTES).zip(target.chunks(HALF * L::BYTES));
    for (h, ((base, target), &mask)) in halves.zip(masks).enumerate() {
        let coded = values.len();
        if split.low_bits == 0 && base == target {
            values.resize(coded + mask.count_ones() as usize, 0);
            continue;
        }
        for (i, delta) in deltas::<L>(base, target, dtype).enumerate() {
            let listed = (h * HALF + i) as u32;
            if mask >> i & 1 == 0 {
                if delta != 0 {
                    exceptions.push((listed, delta));
                }
                continue;
            }
            let value = split.value(delta, bits);
            if model.has(classes[values.len()], token_of(value).0) {
                values.push(value);
            } else if split.low_bits == 0 && delta != 0 && model.has(classes[values.len()], 0) {
                values.push(0);
                exceptions.push((listed, delta));
            } else {
                return None;
            }
        }
    }
    (split.low_bits == 0 || exceptions.is_empty()).then_some(exceptions)
}

fn put_maps(choice: &Choice, payload: &mut Vec<u8>) {
    for map in &choice.maps.classes[..1 << choice.activity_bits] {
        let entries = &map[..usize::from(choice.maps.count)];
        payload.extend(entries.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4)));
    }
}

/// Packs `bits` bits of each number, from the low bits of each byte up.
fn put_bits(numbers: impl Iterator<Item = u64>, bits: u32, payload: &mut Vec<u8>) {
    if bits == 0 {
        return;
    }
    let mut pending = 0u128;
    let mut count = 0;
    for number in numbers {
        pending |= u128::from(number) << count;
        count += bits;
        while count >= 8 {
            payload.push(pending as u8);
            pending >>= 8;
            count -= 8;
        }
    }
    if count > 0 {
        payload.push(pending as u8);
    }
}

/// Appends a stream: coded back to front, because a decoder undoes the last symbol first.
fn put_stream(symbols: &[Vec<Symbol>], count: usize, classes: &[u8], values: &[u64], words: &mut Vec<u16>, payload: &mut Vec<u8>) {
    words.clear();
    let mut states = [LEAST_STATE; STEP];
    for (classes, values) in classes.chunks(count).zip(values.chunks(count)).rev() {
        let mut tokens = [(0u8, 0u32); STEP];
        let mut most = 0u32;
        for (token, &value) in tokens.iter_mut().zip(values) {
            *token = token_of(value);
            most = most.max(token.1);
        }
        for round in (0..most.div_ceil(16)).rev() {
            for ((state, &(_, extra)), &value) in states.iter_mut().zip(&tokens[..values.len()]).zip(values).rev() {
                let bits = extra.saturating_sub(16 * round).min(16);
                if bits > 0 {
                    if *state >> (32 - bits) != 0 {
                        words.push(*state as u16);
                        *state >>= 16;
                    }
                    *state = *state << bits | (value >> (16 * round)) as u32 & ((1 << bits) - 1);
                }
            }
        }
        for ((state, (token, _)), class) in states.iter_mut().zip(&tokens[..values.len()]).zip(classes).rev() {
            let symbol = symbols[usize::from(*class) - 1][usize::from(*token)];
            if u64::from(*state) >= u64::from(symbol.frequency) << (32 - SCALE_LOG2) {
                words.push(*state as u16);
                *state >>= 16;
            }
            let quotient = ((u128::from(*state) * u128::from(symbol.reciprocal)) >> 44) as u32;
            *state = (quotient << SCALE_LOG2) + (*state - quotient * symbol.frequency) + symbol.start;
        }
    }
    payload.extend(states[..count].iter().flat_map(|state| state.to_le_bytes()));
    payload.extend(words.iter().rev().flat_map(|word| word.to_le_bytes()));
}
