//! Encodes base and target lanes as a payload. The spec defines the valid payloads; this module chooses one of them by estimated
//! cost.

use super::coded::{Classifier, CodedLanes, tiles_of};
use super::context::{HALF, MAX_CONTEXTS, Maps, tile_blocks};
use super::cost::{BIT, Costs, IMPOSSIBLE, exception_bytes, exception_cost};
use super::payload::{MAX_LOG2, segment};
use super::stats::{CONTEXTS, LEVELS, Row, Split, Stats, all_lanes};
use super::stream::{self, RANS_LOWER_BOUND};
use super::tables::TableSet;
use super::values::Lanes;
use crate::codec::simd::{EncodeTable, Platform, STEP, Tiles};
use crate::codec::{Difference, Encoded};
use crate::dispatch::vectorized;
use crate::format::ConditionedHeader;
use crate::lane::{Dtype, Lane, lanes_of, lanes_of_mut};
use std::ops::Range;
use zerocopy::IntoBytes;

/// Maximum number of steps per stream, if each state has enough payload. Streams with fewer steps decode faster, because the
/// steps of a stream are decoded one after another. More streams have more states, and each state costs 3 bytes.
const STEPS: usize = 512;
/// Minimum number of payload bytes per state: in a chunk that is split into streams of [`STEPS`], and in a chunk with one stream.
const MIN_STATE_BYTES: u64 = 80;
const MIN_STATE_BYTES_OF_ONE_STREAM: u64 = 40;
/// All lanes of the blocks with one activity are coded if this costs at most 1/`ROWS` more. Steps are then rows of adjacent
/// lanes.
const ROWS: u64 = 64;
/// Number of contexts above the largest sampled context that the maps still cover, because blocks outside of the sample can have
/// them.
const UNSEEN: usize = 3;
/// Maps without holes are chosen if they cost at most 1/`WITHOUT_HOLES_FRACTION` plus `WITHOUT_HOLES_BITS` bits more than maps
/// with holes.
const WITHOUT_HOLES_FRACTION: u64 = 100;
const WITHOUT_HOLES_BITS: u64 = 8 * 12;

/// Model and buffers of a thread that encodes chunks, reused for every chunk.
pub(crate) struct Encoder {
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

/// A table set, and what the encoder derives from it.
struct Model {
    set: TableSet,
    /// Cost of a value without a token.
    missing: u64,
    costs: Costs,
    divisors: EncodeTable,
}

impl Model {
    fn new(set: &TableSet, missing: u64) -> Self {
        let mut divisors = EncodeTable::default();
        for (class, frequencies) in (1..).zip(set.classes()) {
            let mut start = 0;
            for (token, &frequency) in (0..).zip(frequencies).filter(|(_, frequency)| **frequency != 0) {
                divisors.set(class, token, start, frequency.into());
                start += u32::from(frequency);
            }
        }
        Self { costs: Costs::new(set, missing), missing, divisors, set: set.clone() }
    }

    /// Returns whether a class has a token.
    #[inline(always)]
    fn has(&self, class: u8, token: u8) -> bool {
        self.divisors.has(class, token)
    }
}

/// What an encoder on a device reads of a table set.
#[cfg(feature = "cuda")]
pub(crate) struct ModelTables {
    /// Entries of [`EncodeTable`].
    pub entries: Vec<u64>,
    /// Costs of each token, per class from class 1 on.
    pub costs: Vec<[u32; super::tables::MAX_CLASSES]>,
}

#[cfg(feature = "cuda")]
impl ModelTables {
    /// For chunks of lanes of `width` bytes with `low_bits` low bits.
    pub fn new(set: &TableSet, low_bits: u32, width: usize) -> Self {
        let model = Model::new(set, missing_cost(low_bits, width));
        Self { entries: model.divisors.entries().to_vec(), costs: model.costs.rows().to_vec() }
    }
}

/// Cost of a value without a token: that of an exception, if exceptions are possible.
fn missing_cost(low_bits: u32, width: usize) -> u64 {
    if low_bits == 0 { exception_cost(width) } else { IMPOSSIBLE }
}

/// Activities and maps for a chunk, with their estimated cost.
struct Choice {
    activity_bits: u8,
    maps: Maps,
    cost: u64,
}

impl Default for Encoder {
    fn default() -> Self {
        Self {
            platform: Platform::best(),
            model: None,
            all: Vec::new(),
            coded: CodedLanes::default(),
            values: Vec::new(),
            words: Vec::new(),
            streams: Vec::new(),
        }
    }
}

/// Weight of decoding time against payload size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Cost of decoding a coded lane, in 256ths of a bit.
    pub lane: u64,
    /// Maximum number of steps per stream. A stream is split further only if each state has enough payload.
    pub steps: usize,
    /// Minimum number of payload bytes per state, for splitting a stream that has more than `steps` steps.
    pub state: u64,
}

impl Default for Pace {
    /// Returns a low weight, for small payloads.
    fn default() -> Self {
        Self { lane: 16, steps: 1024, state: 80 }
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
        pace: Pace,
        payload: &mut Vec<u8>,
    ) -> Encoded {
        let Difference { dtype, base, target, changed, .. } = difference;
        if changed == 0 {
            return Encoded::default();
        }
        let start = payload.len();
        let coded = tables.is_some_and(|tables| self.encode_coded::<L>(difference, tables, low_bits, pace, payload));
        if !coded || payload.len() - start > uncoded_size(difference) {
            payload.truncate(start);
            if listed_size(difference) < base.len() {
                put_listed::<L>(difference, payload);
            } else {
                put_plain::<L>(dtype, base, target, payload);
            }
        }
        Encoded { uncompressed_size: base.len() as u32, num_deltas: changed as u32 }
    }

    /// Encodes the chunk with tables. Returns false if a value has no token and cannot be an exception.
    fn encode_coded<L: Lane>(
        &mut self,
        difference: Difference<'_>,
        tables: &TableSet,
        low_bits: u32,
        pace: Pace,
        payload: &mut Vec<u8>,
    ) -> bool {
        let Difference { dtype, base, target, masks, changed } = difference;
        let missing = missing_cost(low_bits, L::BYTES);
        let model = match &mut self.model {
            Some(model) if model.set == *tables && model.missing == missing => model,
            model => model.insert(Model::new(tables, missing)),
        };
        let split = Split::for_lanes::<L>(base, target, dtype, low_bits);
        // Masks of the lanes that have a value: the changed lanes, or with low bits all lanes.
        let valued = match low_bits {
            0 => masks,
            _ => all_lanes(difference.lanes(), &mut self.all),
        };
        let stats = Stats::gather::<L>(base, target, dtype, split, valued, changed);
        let choice = choose(&stats, model, split, pace.lane, L::BYTES);
        let levels: Vec<u8> = stats.levels.iter().map(|&level| activity(level, choice.activity_bits)).collect();
        let (blocks, tile) = (levels.len(), tile_blocks(L::BYTES));
        let tiles = blocks.div_ceil(tile);
        let classifier = Classifier { dtype, maps: &choice.maps, states: STEP };
        self.coded.find::<L>(self.platform, classifier, &levels, base, None);
        let coded = self.coded.masks().iter().map(|mask| mask.count_ones() as usize).sum();
        let (states, segments) = shape(coded, size_of_cost(choice.cost, coded, low_bits, pace), tiles, pace);
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

        let header = ConditionedHeader {
            low_bits: low_bits as u8,
            states_log2: states.ilog2() as u8,
            segments_log2: segments.ilog2() as u8,
            activity_bits: choice.activity_bits,
            first_context: choice.maps.first.into(),
            context_count: choice.maps.count,
            reserved: 0,
            exception_count: (listed.len() as u32).into(),
            center: (split.center as u32).into(),
        };
        let start = payload.len();
        payload.extend(header.as_bytes());
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

/// Returns the size in bytes of a payload that lists all changes of a chunk as exceptions.
fn listed_size(difference: Difference<'_>) -> usize {
    listed_bytes(difference.changed, difference.dtype.lane_bytes())
}

/// Returns the size in bytes of `changed` exceptions, for lanes of `width` bytes.
pub(crate) fn listed_bytes(changed: usize, width: usize) -> usize {
    changed * exception_bytes(width)
}

/// Returns the size in bytes of a payload without coded lanes: header, map, deltas or exceptions, padding to an even size, and
/// one state.
pub(crate) fn uncoded_size(difference: Difference<'_>) -> usize {
    uncoded_bytes(difference.changed, difference.dtype.lane_bytes(), difference.base.len())
}

/// [`uncoded_size`] of a chunk of `size` bytes in which `changed` lanes of `width` bytes change.
pub(crate) fn uncoded_bytes(changed: usize, width: usize, size: usize) -> usize {
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
    end_uncoded(listed_size(difference), payload);
}

/// Appends a payload that stores all deltas uncoded.
fn put_plain<L: Lane>(dtype: Dtype, base: &[u8], target: &[u8], payload: &mut Vec<u8>) {
    let header = ConditionedHeader { low_bits: 8 * L::BYTES as u8, context_count: 1, ..ConditionedHeader::default() };
    payload.extend(header.as_bytes());
    payload.push(0);
    let start = payload.len();
    payload.resize(start + base.len(), 0);
    let lanes = lanes_of_mut::<L>(&mut payload[start..]).iter_mut().zip(lanes_of::<L>(base)).zip(lanes_of::<L>(target));
    vectorized(
        #[inline(always)]
        || lanes.for_each(|((lane, base), target)| *lane = L::delta(L::load(*base), L::load(*target), dtype.order()).store()),
    );
    end_uncoded(base.len(), payload);
}

/// Ends a payload without coded lanes. `size` bytes follow its header and map, which have 17 bytes.
fn end_uncoded(size: usize, payload: &mut Vec<u8>) {
    payload.resize(payload.len() + (size + 1) % 2, 0);
    payload.extend(RANS_LOWER_BOUND.to_le_bytes());
}

/// Returns the activity, of `activity_bits` bits, for a level.
fn activity(level: u8, activity_bits: u8) -> u8 {
    match activity_bits {
        0 => 0,
        1 => level.min(1),
        _ => level,
    }
}

/// Chooses activities and maps.
fn choose(stats: &Stats, model: &Model, split: Split, lane_cost: u64, width: usize) -> Choice {
    let fit = |row: &Row| Fit::new(row, model, split, lane_cost, width);
    let blocks = stats.levels.len() as u64;
    let choices = |bits: u8, groups: &[Range<usize>]| {
        let groups = Groups::new(stats, groups, fit);
        [false, true].map(|holes| {
            let (maps, cost) = groups.maps(stats.first, holes);
            Choice { activity_bits: bits, maps, cost: cost + blocks * u64::from(bits) * BIT }
        })
    };
    let mut best = choices(0, std::slice::from_ref(&(0..LEVELS)));
    if blocks >= 32 {
        for (bits, groups) in [(1, &[0..1, 1..LEVELS][..]), (2, &[0..1, 1..2, 2..3, 3..4][..])] {
            for (best, choice) in best.iter_mut().zip(choices(bits, groups)) {
                if choice.cost < best.cost {
                    *best = choice;
                }
            }
        }
    }
    let [whole, holed] = best;
    if whole.cost <= holed.cost + holed.cost / WITHOUT_HOLES_FRACTION + WITHOUT_HOLES_BITS * BIT { whole } else { holed }
}

/// Cost of the lanes that share a context and a group of levels.
#[derive(Debug, Clone, Copy, Default)]
struct Fit {
    /// Cost if the changed lanes are listed as exceptions.
    uncoded: u64,
    /// Cost if the lanes are coded with the cheapest class.
    coded: u64,
    /// The cheapest class; 0 if there are no lanes.
    class: u8,
}

impl Fit {
    /// Larger than any real cost, and small enough that a sum over all contexts does not overflow.
    const NEVER: u64 = 1 << 52;

    fn new(row: &Row, model: &Model, split: Split, lane_cost: u64, width: usize) -> Self {
        let (time, uncoded) = match split.low_bits {
            0 => (row.lanes() * lane_cost, row.others() * exception_cost(width)),
            _ => (0, Self::NEVER),
        };
        let mut fit = Self { uncoded, coded: Self::NEVER, class: 0 };
        let rest = row.extra_bits() * BIT + time;
        for (class, cost) in (1..).zip(model.costs.of(&row.counts)) {
            if cost + rest < fit.coded && (split.low_bits != 0 || model.has(class, 0)) {
                (fit.coded, fit.class) = (cost + rest, class);
            }
        }
        fit
    }

    /// Returns class and cost of an entry that precedes a coded entry. With `holes`, the entry can be uncoded.
    fn between(&self, holes: bool) -> (u8, u64) {
        if holes && self.uncoded <= self.coded { (0, self.uncoded) } else { (self.class, self.coded) }
    }

    fn occurs(&self) -> bool {
        self.class != 0 || self.coded != 0
    }
}

/// Costs of contexts for groups of levels. Each group has its own map.
struct Groups {
    /// Costs by group and context.
    fits: Vec<[Fit; CONTEXTS]>,
    /// Candidates for the first context of the maps. Per candidate and group: the cost of that context together with all lower
    /// contexts.
    firsts: Vec<(usize, Vec<Fit>)>,
    /// End of a map that codes all lanes: [`UNSEEN`] contexts above the largest sampled context.
    end: usize,
}

impl Groups {
    fn new(stats: &Stats, groups: &[Range<usize>], fit: impl Fn(&Row) -> Fit) -> Self {
        let rows = |levels: &Range<usize>| -> Vec<(usize, Row)> {
            stats.contexts(levels.clone()).map(|context| (context, stats.row(levels.clone(), context))).collect()
        };
        let rows: Vec<_> = groups.iter().map(rows).collect();
        let fits_of = |rows: &Vec<(usize, Row)>| {
            let mut fits = [Fit::default(); CONTEXTS];
            rows.iter().for_each(|(context, row)| fits[*context] = fit(row));
            fits
        };
        let fits: Vec<_> = rows.iter().map(fits_of).collect();

        let coded = |context: &usize| fits.iter().any(|fits| fits[*context].coded < fits[*context].uncoded);
        let lowest = (0..CONTEXTS).find(coded).unwrap_or(0);
        let last = (0..CONTEXTS).rfind(coded).unwrap_or(0);
        let mut shared = vec![Row::default(); groups.len()];
        let mut firsts = Vec::new();
        // Rows are in ascending order of context.
        let mut left: Vec<_> = rows.iter().map(|rows| rows.iter().peekable()).collect();
        for first in 0..=last {
            let mut grown = false;
            for (rows, shared) in left.iter_mut().zip(&mut shared) {
                while let Some((_, row)) = rows.next_if(|(context, _)| *context == first) {
                    shared.add(&row.counts);
                    grown = true;
                }
            }
            if first == lowest || (first > lowest && grown) {
                let fit = |row: &Row| if row.counts.is_empty() { Fit::default() } else { fit(row) };
                firsts.push((first, shared.iter().map(fit).collect()));
            }
        }
        let seen = (0..CONTEXTS).rfind(|&context| fits.iter().any(|fits| fits[context].occurs()));
        Self { fits, firsts, end: CONTEXTS.min(seen.map_or(1, |seen| seen + 1 + UNSEEN)) }
    }

    /// Chooses maps, and returns them with their cost. Without `holes`, the coded entries of each map come first. A decoder can
    /// then find coded lanes by comparing magnitudes.
    fn maps(&self, first_context: u16, holes: bool) -> (Maps, u64) {
        let tails: Vec<_> = self.fits.iter().map(|fits| tails(fits, holes)).collect();
        // Contexts below the first context share its entry. A higher first context saves entries, but raises the cost of the
        // lanes.
        let mut best = (u64::MAX, 0, 1, Vec::new());
        for (first, shared) in &self.firsts {
            let (mut cost, mut count) = (0, 1);
            let mut entries = Vec::new();
            for (fit, tails) in shared.iter().zip(&tails) {
                let tail = tails[first + 1];
                let coded = fit.between(holes).1 + tail.cost;
                let uncoded = fit.uncoded + tail.uncoded;
                let all = fit.coded + tail.all;
                let in_rows = coded < uncoded && all - coded <= coded / ROWS && self.end <= first + MAX_CONTEXTS;
                let end = match in_rows {
                    true => self.end,
                    false if coded < uncoded => tail.end.max(first + 1),
                    false => 0,
                };
                cost += if in_rows { all } else { coded.min(uncoded) };
                count = count.max(end.saturating_sub(*first));
                entries.push((*fit, end, in_rows));
            }
            cost += self.fits.len() as u64 * count.next_multiple_of(2) as u64 * 4 * BIT;
            if count <= MAX_CONTEXTS && cost < best.0 {
                best = (cost, *first, count, entries);
            }
        }
        let (cost, first, count, entries) = best;

        let mut maps = Maps { first: first_context + first as u16, count: count as u8, classes: [[0; MAX_CONTEXTS]; 4] };
        for ((map, fits), (shared, end, in_rows)) in maps.classes.iter_mut().zip(&self.fits).zip(entries) {
            let fit = |context| if context == first { &shared } else { &fits[context] };
            let class_of = |fit: &Fit| if in_rows { fit.class } else { fit.between(holes).0 };
            // A context that does not occur in the sample gets the class of the next higher context that does, or else of the
            // highest.
            let mut class = (first..end).rev().map(fit).find(|fit| fit.occurs()).map_or(0, class_of);
            for context in (first..end).rev() {
                if fit(context).occurs() {
                    class = class_of(fit(context));
                }
                map[context - first] = class;
            }
        }
        (maps, cost)
    }
}

/// Cost of all contexts from a given context on.
#[derive(Debug, Clone, Copy, Default)]
struct Tail {
    /// Cost if contexts before `end` are coded. `end` has the value with the lowest cost.
    cost: u64,
    /// End of the coded contexts; 0 if no context is coded.
    end: usize,
    /// Cost if no context is coded.
    uncoded: u64,
    /// Cost if all contexts are coded.
    all: u64,
}

/// Returns the tail that starts at each context, and an empty last tail.
fn tails(fits: &[Fit; CONTEXTS], holes: bool) -> [Tail; CONTEXTS + 1] {
    let mut tails = [Tail::default(); CONTEXTS + 1];
    for (context, fit) in fits.iter().enumerate().rev() {
        let after = tails[context + 1];
        let (coded, uncoded) = (fit.between(holes).1 + after.cost, fit.uncoded + after.uncoded);
        let all = fit.coded + after.all;
        tails[context] = match coded < uncoded {
            true => Tail { cost: coded, end: after.end.max(context + 1), uncoded, all },
            false => Tail { cost: uncoded, end: 0, uncoded, all },
        };
    }
    tails
}

/// Returns the size in bytes of a payload whose choice has this cost. Part of the cost is decoding time. It is subtracted, because
/// it adds nothing to the size of the payload.
pub(crate) fn size_of_cost(cost: u64, coded: usize, low_bits: u32, pace: Pace) -> u64 {
    let time = if low_bits == 0 { coded as u64 * pace.lane } else { 0 };
    cost.saturating_sub(time) / BIT / 8
}

/// Returns the number of states per stream and the number of segments, for a chunk of `tiles` tiles with `coded` coded lanes and
/// a payload of about `size` bytes. Streams have at most `pace.steps` steps, unless states would have too little payload.
pub(crate) fn shape(coded: usize, size: u64, tiles: usize, pace: Pace) -> (usize, usize) {
    let Pace { steps: max_steps, state, .. } = pace;
    // On average, half of a tile's last step is unused.
    let steps = coded.div_ceil(STEP) + tiles / 2;
    let segments = [(STEPS, state.max(MIN_STATE_BYTES)), (max_steps, state)].map(|(max_steps, bytes)| {
        let affordable = 1usize << (size / bytes / STEP as u64).max(1).ilog2();
        steps.div_ceil(max_steps).next_power_of_two().min(affordable)
    });
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
