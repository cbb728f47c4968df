//! A second, slow implementation of section 4 of `spec/codecs.md`, for tests and fuzz targets: a reference decoder, and an
//! encoder whose caller makes all choices. It shares no code with the codec except the parser of tables and the order of lanes.

use super::tables::TableSet;
use crate::lane::{Dtype, Lane, with_lane};
use crate::prelude::*;

/// The choices of an encoder for a payload.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub struct Shape {
    /// Number of low bits of each delta that are stored uncoded.
    pub low_bits: u8,
    /// log2 of the number of states per stream.
    pub states_log2: u8,
    /// log2 of the number of segments.
    pub segments_log2: u8,
    /// Bits per activity.
    pub activity_bits: u8,
    /// First context with its own entry.
    pub first_context: u16,
    /// Number of entries per map.
    pub context_count: u8,
    /// With low bits, a value is `center` minus the high bits of the delta.
    pub center: u32,
    /// Classes of the entries of all maps, repeated cyclically.
    pub classes: Vec<u8>,
    /// Activities of the blocks, repeated cyclically.
    pub activities: Vec<u8>,
    /// Every n-th change is an exception, even if its lane is coded. With 0, coded lanes have no exceptions.
    pub list_every: u8,
}

impl Shape {
    /// Reduces every field to a valid value, for a chunk of `lanes` lanes in a tensor with `classes` classes.
    pub fn bounded(mut self, dtype: Dtype, lanes: usize, classes: usize) -> Self {
        let bits = 8 * dtype.lane_bytes() as u8;
        self.low_bits %= bits + 1;
        self.states_log2 %= 6;
        self.segments_log2 = (self.segments_log2 % 6).min(lanes.div_ceil(tile(dtype)).ilog2() as u8);
        self.activity_bits %= 3;
        self.context_count = self.context_count % 64 + 1;
        let high = bits - self.low_bits;
        self.center = match (self.low_bits, high) {
            (0, _) => 0,
            (_, 32..) => self.center,
            _ => self.center & ((1 << high) - 1),
        };
        self.classes.iter_mut().for_each(|class| *class %= classes as u8 + 1);
        self.activities.iter_mut().for_each(|activity| *activity &= (1 << self.activity_bits) - 1);
        self
    }

    fn map(&self, activity: usize) -> Vec<u8> {
        let start = activity * usize::from(self.context_count);
        let classes = self.classes.iter().copied().cycle().skip(start % self.classes.len().max(1));
        let mut map: Vec<_> = classes.take(self.context_count.into()).collect();
        map.resize(self.context_count.into(), 0);
        map
    }

    fn activity(&self, block: usize) -> u8 {
        self.activities.get(block % self.activities.len().max(1)).copied().unwrap_or(0)
    }
}

/// Reads the lanes, of `width` bytes, as numbers.
fn numbers(lanes: &[u8], width: usize) -> Vec<u64> {
    let number = |lane: &[u8]| {
        let mut number = [0; 8];
        number[..width].copy_from_slice(lane);
        u64::from_le_bytes(number)
    };
    lanes.chunks_exact(width).map(number).collect()
}

fn bits_of(number: u64) -> u64 {
    u64::from(u64::BITS - number.leading_zeros())
}

fn low_mask(bits: u32) -> u64 {
    if bits == 64 { u64::MAX } else { (1 << bits) - 1 }
}

/// Section 4.1: the context of lane `u`.
pub fn context(dtype: Dtype, u: u64) -> u64 {
    use Dtype::*;
    let bits = 8 * dtype.lane_bytes() as u32;
    match dtype {
        F16 => (u >> 10) % (1 << 5),
        Bf16 => (u >> 7) % (1 << 8),
        F32 | C64 => (u >> 23) % (1 << 8),
        F64 => (u >> 52) % (1 << 11),
        F8E4m3 | F8E4m3Fnuz => (u >> 3) % (1 << 4),
        F8E5m2 | F8E5m2Fnuz => (u >> 2) % (1 << 5),
        I8 | I16 | I32 | I64 if u >> (bits - 1) == 1 => bits_of(!u & low_mask(bits)),
        _ => bits_of(u),
    }
}

/// Section 4.3: number of extra bits and smallest value of a token.
fn token(t: usize) -> (u32, u64) {
    if t < 64 {
        return (0, t as u64);
    }
    let extra = (t as u32 - 64) / 2 + 5;
    (extra, (2 + t as u64 % 2) << extra)
}

/// Section 4.3: the token of a value.
fn token_of(value: u64) -> usize {
    if value < 64 {
        return value as usize;
    }
    let extra = value.ilog2() - 1;
    64 + 2 * (extra as usize - 5) + (value >> extra) as usize % 2
}

fn delta(dtype: Dtype, base: u64, target: u64) -> u64 {
    with_lane!(dtype.lane_bytes(), L => L::delta(L::from_u64(base), L::from_u64(target), dtype.order()).to_u64())
}

fn apply(dtype: Dtype, base: u64, delta: u64) -> u64 {
    with_lane!(dtype.lane_bytes(), L => L::apply(L::from_u64(base), L::from_u64(delta), dtype.order()).to_u64())
}

/// Packs a bit string, least significant bits first.
fn pack(numbers: impl Iterator<Item = (u64, u32)>) -> Vec<u8> {
    let bits: Vec<u8> = numbers.flat_map(|(number, bits)| (0..bits).map(move |i| (number >> i & 1) as u8)).collect();
    bits.chunks(8).map(|bits| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit)).collect()
}

fn unpack(bytes: &[u8], at: usize, bits: usize) -> u64 {
    (at..at + bits).rev().fold(0, |number, bit| number << 1 | u64::from(bytes[bit / 8] >> (bit % 8) & 1))
}

/// Slots of a token.
#[derive(Clone, Copy)]
struct Slots {
    start: u64,
    frequency: u64,
}

/// Returns the slots of each token, per class from class 1 on.
fn slots(tables: Option<&TableSet>) -> Vec<Vec<Slots>> {
    let class = |frequencies: &[u16]| {
        let mut start = 0;
        let slots = frequencies.iter().map(|&frequency| {
            start += u64::from(frequency);
            Slots { start: start - u64::from(frequency), frequency: frequency.into() }
        });
        slots.collect()
    };
    tables.map_or(Vec::new(), |tables| tables.classes().map(class).collect())
}

/// Section 4.4: number of lanes per tile.
fn tile(dtype: Dtype) -> usize {
    128 * [0, 8, 8, 0, 4, 0, 0, 0, 2][dtype.lane_bytes()]
}

fn segments(count: usize, tile: usize, lanes: usize) -> impl Iterator<Item = core::ops::Range<usize>> {
    let tiles = lanes.div_ceil(tile);
    (0..count).map(move |s| (tile * (s * tiles / count)).min(lanes)..(tile * ((s + 1) * tiles / count)).min(lanes))
}

/// Section 4.5: the steps of a segment, as ranges of indexes in `positions`, the positions of its coded lanes.
fn steps(positions: &[usize], tile: usize, count: usize) -> Vec<core::ops::Range<usize>> {
    let mut steps: Vec<core::ops::Range<usize>> = Vec::new();
    for (j, position) in positions.iter().enumerate() {
        match steps.last_mut() {
            Some(step) if step.len() < count && positions[step.start] / tile == position / tile => step.end += 1,
            _ => steps.push(j..j + 1),
        }
    }
    steps
}

/// An operation of a decoder on a state.
#[derive(Clone, Copy)]
enum Operation {
    /// Decodes a symbol with these slots.
    Token(Slots),
    /// Reads a number of extra bits, with this value.
    Bits(u32, u32),
}

/// Encodes a payload of this shape, which must be [`Shape::bounded`]. Returns `None` if a lane cannot be coded with this shape.
pub fn encode(dtype: Dtype, tables: Option<&TableSet>, shape: &Shape, base: &[u8], target: &[u8]) -> Option<Vec<u8>> {
    let (width, r) = (dtype.lane_bytes(), u32::from(shape.low_bits));
    let high_bits = 8 * width as u32 - r;
    let (base, target) = (numbers(base, width), numbers(target, width));
    let (lanes, blocks) = (base.len(), base.len().div_ceil(128));
    let classes = slots(tables);
    let maps: Vec<_> = (0..1 << shape.activity_bits).map(|activity| shape.map(activity)).collect();
    let has =
        |class: u8, value: u64| classes[usize::from(class) - 1].get(token_of(value)).is_some_and(|slots| slots.frequency != 0);

    let (mut coded, mut low, mut listed) = (Vec::new(), Vec::new(), Vec::new());
    let mut changes = 0usize;
    for (position, (&base, &target)) in base.iter().zip(&target).enumerate() {
        let entry = context(dtype, base).max(shape.first_context.into()) - u64::from(shape.first_context);
        let map = &maps[usize::from(shape.activity(position / 128))];
        let class = map.get(entry as usize).copied().unwrap_or(0);
        let delta = delta(dtype, base, target);
        let high = if r == 64 { 0 } else { delta >> r };
        let value = |high: u64| match r {
            0 => high,
            _ => u64::from(shape.center).wrapping_sub(high) & low_mask(high_bits),
        };
        changes += usize::from(delta != 0);
        let free = |high: u64| if class == 0 { high == 0 } else { has(class, value(high)) };
        let list = delta != 0 && shape.list_every != 0 && changes.is_multiple_of(shape.list_every.into());
        let high = if free(high) && !(list && free(0)) {
            low.push(delta & low_mask(r));
            high
        } else if delta != 0 && free(0) {
            low.push(0);
            listed.push((position as u32, delta));
            0
        } else {
            return None;
        };
        if class != 0 {
            coded.push((position, class, value(high)));
        }
    }

    let mut payload = vec![shape.low_bits, shape.states_log2, shape.segments_log2, shape.activity_bits];
    payload.extend(shape.first_context.to_le_bytes());
    payload.extend([shape.context_count, 0]);
    payload.extend((listed.len() as u32).to_le_bytes());
    payload.extend(shape.center.to_le_bytes());
    maps.iter().for_each(|map| payload.extend(pack(map.iter().map(|&class| (class.into(), 4)))));
    payload.extend(pack((0..blocks).map(|block| (shape.activity(block).into(), shape.activity_bits.into()))));
    payload.extend(listed.iter().flat_map(|(position, _)| position.to_le_bytes()));
    payload.extend(listed.iter().flat_map(|(_, delta)| delta.to_le_bytes()[..width].to_vec()));
    payload.extend(pack(low.into_iter().map(|low| (low, r))));

    let mut coded = coded.into_iter().peekable();
    let mut streams = Vec::new();
    for segment in segments(1 << shape.segments_log2, tile(dtype), lanes) {
        let (mut positions, mut symbols) = (Vec::new(), Vec::new());
        while let Some((position, class, value)) = coded.next_if(|(position, ..)| *position < segment.end) {
            positions.push(position);
            symbols.push((class, value));
        }
        let count = 1 << shape.states_log2;
        let steps = steps(&positions, tile(dtype), count).into_iter().map(|step| &symbols[step]);
        streams.push(stream(steps, count, &classes));
    }
    let (_, sized) = streams.split_last()?;
    payload.extend(sized.iter().flat_map(|stream| (stream.len() as u32 / 2).to_le_bytes()));
    payload.resize(payload.len().next_multiple_of(2), 0);
    payload.extend(streams.concat());
    Some(payload)
}

fn stream<'a>(steps: impl Iterator<Item = &'a [(u8, u64)]>, count: usize, classes: &[Vec<Slots>]) -> Vec<u8> {
    // Lists all operations of the decoder in order. Then inverts them from the last to the first. At the end every state is 2^16.
    let mut operations = Vec::new();
    for step in steps {
        for (state, &(class, value)) in step.iter().enumerate() {
            operations.push((state, Operation::Token(classes[usize::from(class) - 1][token_of(value)])));
        }
        for round in 0..4 {
            for (state, &(_, value)) in step.iter().enumerate() {
                let bits = token(token_of(value)).0.saturating_sub(16 * round).min(16);
                if bits > 0 {
                    operations.push((state, Operation::Bits(bits, (value >> (16 * round)) as u32 & ((1 << bits) - 1))));
                }
            }
        }
    }
    let mut states = vec![1u64 << 16; count];
    let mut words = Vec::new();
    for (state, operation) in operations.into_iter().rev() {
        let x = &mut states[state];
        let limit = match operation {
            Operation::Token(slots) => slots.frequency << 20,
            Operation::Bits(bits, _) => 1 << (32 - bits),
        };
        if *x >= limit {
            words.push(*x as u16);
            *x >>= 16;
        }
        *x = match operation {
            Operation::Token(Slots { start, frequency }) => (*x / frequency) << 12 | (*x % frequency + start),
            Operation::Bits(bits, value) => *x << bits | u64::from(value),
        };
    }
    let states = states.into_iter().flat_map(|x| (x as u32).to_le_bytes());
    states.chain(words.into_iter().rev().flat_map(u16::to_le_bytes)).collect()
}

/// Unread rest of a payload.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, size: usize) -> Option<&'a [u8]> {
        let (part, rest) = self.0.split_at_checked(size)?;
        self.0 = rest;
        Some(part)
    }

    /// Takes a part of `bits` bits, which zeros pad to whole bytes.
    fn take_bits(&mut self, bits: usize) -> Option<&'a [u8]> {
        let part = self.take(bits.div_ceil(8))?;
        let clean = (bits..8 * part.len()).all(|bit| part[bit / 8] >> (bit % 8) & 1 == 0);
        clean.then_some(part)
    }

    fn number(&mut self, size: usize) -> Option<u64> {
        Some(numbers(self.take(size)?, size)[0])
    }
}

/// Decodes a payload to target lanes. Returns `None` if the payload violates a rule.
pub fn decode(dtype: Dtype, tables: Option<&TableSet>, num_deltas: u32, payload: &[u8], base: &[u8]) -> Option<Vec<u8>> {
    let width = dtype.lane_bytes();
    let base = numbers(base, width);
    let (lanes, blocks, bits) = (base.len(), base.len().div_ceil(128), 8 * width as u32);
    let classes = slots(tables);

    let mut rest = Rest(payload);
    let [r, states_log2, segments_log2, activity_bits] = *rest.take(4)?.first_chunk::<4>()?;
    let first_context = rest.number(2)?;
    let [context_count, reserved] = *rest.take(2)?.first_chunk::<2>()?;
    let (exception_count, center) = (rest.number(4)?, rest.number(4)?);
    let r = u32::from(r);
    let valid = r <= bits
        && states_log2 <= 5
        && segments_log2 <= 5
        && 1 << segments_log2 <= lanes.div_ceil(tile(dtype))
        && activity_bits <= 2
        && (1..=64).contains(&context_count)
        && reserved == 0
        && exception_count <= u64::from(num_deltas)
        && if r == 0 { center == 0 } else { center <= low_mask(bits - r) };
    if !valid {
        return None;
    }
    let mut maps = Vec::new();
    for _ in 0..1 << activity_bits {
        let map = rest.take_bits(4 * usize::from(context_count))?;
        let map: Vec<_> = (0..usize::from(context_count)).map(|i| unpack(map, 4 * i, 4) as usize).collect();
        if map.iter().any(|&class| class > classes.len()) {
            return None;
        }
        maps.push(map);
    }
    let activity_bits = usize::from(activity_bits);
    let activities = rest.take_bits(blocks * activity_bits)?;
    let positions = numbers(rest.take(4 * exception_count as usize)?, 4);
    let listed = numbers(rest.take(width * exception_count as usize)?, width);
    let low = rest.take_bits(lanes * r as usize)?;
    let count = 1 << segments_log2;
    let sizes = numbers(rest.take(4 * (count - 1))?, 4);
    if !(payload.len() - rest.0.len()).is_multiple_of(2) && rest.take(1)? != [0] {
        return None;
    }
    if !rest.0.len().is_multiple_of(2) {
        return None;
    }

    let mut deltas = vec![0; lanes];
    for (s, segment) in segments(count, tile(dtype), lanes).enumerate() {
        let size = sizes.get(s).map_or(rest.0.len(), |&words| 2 * words as usize);
        let stream = rest.take(size)?;
        let class = |position: usize| {
            let entry = context(dtype, base[position]).max(first_context) - first_context;
            maps[unpack(activities, position / 128 * activity_bits, activity_bits) as usize]
                .get(entry as usize)
                .copied()
                .unwrap_or(0)
        };
        let coded: Vec<_> = segment.clone().filter(|&position| class(position) != 0).collect();
        let tables: Vec<_> = coded.iter().map(|&position| &classes[class(position) - 1][..]).collect();
        let count = 1 << states_log2;
        let values = values(stream, count, steps(&coded, tile(dtype), count).into_iter().map(|step| &tables[step]))?;
        if values.iter().any(|&value| value > u128::from(low_mask(bits - r))) {
            return None;
        }
        for (position, value) in coded.into_iter().zip(values) {
            let high = if r == 0 { value as u64 } else { center.wrapping_sub(value as u64) & low_mask(bits - r) };
            deltas[position] = if r == 64 { 0 } else { high << r };
        }
        for position in segment {
            deltas[position] |= unpack(low, position * r as usize, r as usize);
        }
    }
    let mut next = 0;
    for (position, delta) in positions.into_iter().zip(listed) {
        if position < next || delta == 0 || deltas.get(position as usize) != Some(&0) {
            return None;
        }
        deltas[position as usize] = delta;
        next = position + 1;
    }
    if deltas.iter().filter(|&&delta| delta != 0).count() != num_deltas as usize {
        return None;
    }
    let mut target = Vec::with_capacity(lanes * width);
    for (&base, &delta) in base.iter().zip(&deltas) {
        target.extend(&apply(dtype, base, delta).to_le_bytes()[..width]);
    }
    Some(target)
}

/// Section 4.5: decodes one value per table of the steps. Values have 128 bits, because those of the last tokens exceed 64 bits.
fn values<'a>(stream: &[u8], count: usize, steps: impl Iterator<Item = &'a [&'a [Slots]]>) -> Option<Vec<u128>> {
    let mut rest = Rest(stream);
    let mut states = numbers(rest.take(4 * count)?, 4);
    if states.iter().any(|&x| x < 1 << 16) {
        return None;
    }
    let mut values = Vec::new();
    for step in steps {
        let mut tokens = Vec::new();
        for (x, table) in states.iter_mut().zip(step) {
            let slot = *x % 4096;
            // The last token with `start <= slot`. Tokens without slots share the start of the next one.
            let t = table.partition_point(|slots| slots.start <= slot).checked_sub(1)?;
            *x = table[t].frequency * (*x / 4096) + slot - table[t].start;
            if *x < 1 << 16 {
                *x = *x << 16 | rest.number(2)?;
            }
            tokens.push(t);
        }
        let first = values.len();
        values.extend(tokens.iter().map(|&t| u128::from(token(t).1)));
        for round in 0..4 {
            for ((x, &t), value) in states.iter_mut().zip(&tokens).zip(&mut values[first..]) {
                let bits = token(t).0.saturating_sub(16 * round).min(16);
                if bits == 0 {
                    continue;
                }
                *value |= u128::from(*x % (1 << bits)) << (16 * round);
                *x >>= bits;
                if *x < 1 << 16 {
                    *x = *x << 16 | rest.number(2)?;
                }
            }
        }
    }
    (rest.0.is_empty() && states.iter().all(|&x| x == 1 << 16)).then_some(values)
}
