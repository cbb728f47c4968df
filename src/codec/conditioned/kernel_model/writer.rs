//! Chunks for the tests: payloads in which every choice that the format leaves is the test's, and what the decoder of the crate
//! makes of them.

use super::memory::Memory;
use super::prologue::BLOCK;
use super::tables::DeviceTables;
use super::{Chunk, Config, Mode, Outcome, run};
use crate::codec::conditioned::TableSet;
use crate::codec::conditioned::tables::{extra_bits, token_of, tokens_within};
use crate::codec::{ChunkDecoder, Codec, Encoded};
use crate::error::Rule;
use crate::format::ConditionedHeader;
use crate::lane::{Context, Dtype, Lane, lanes_of, lanes_of_mut, with_lane};
use crate::sums::chunk_sum;
use zerocopy::IntoBytes;

/// Numbers that look random and are the same every time.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The choices of a payload.
#[derive(Debug, Clone)]
pub struct Plan {
    pub low_bits: u32,
    pub center: u32,
    pub states_log2: u8,
    pub segments_log2: u8,
    pub activity_bits: u8,
    pub first_context: u16,
    /// A map for each activity, all of the same size.
    pub maps: Vec<Vec<u8>>,
    /// Of each block.
    pub activities: Vec<u8>,
    /// One change in so many is listed though it could be coded.
    pub listed: usize,
    /// A changed lane that is listed too, against the rules.
    pub clash: Option<usize>,
}

/// A chunk, right or wrong.
#[derive(Clone)]
pub struct Case {
    pub dtype: Dtype,
    pub lanes: usize,
    pub set: Option<TableSet>,
    /// The base's lanes, which may be fewer; then zeros follow.
    pub base: Vec<u8>,
    pub payload: Vec<u8>,
    /// What follows the payload up to a multiple of 16 bytes.
    pub padding: u8,
    pub num_deltas: u32,
    pub crc32: u32,
    pub base_sum: u64,
    pub target_sum: u64,
}

impl Case {
    pub fn new(dtype: Dtype, set: Option<TableSet>, base: Vec<u8>, target: &[u8], payload: Vec<u8>) -> Self {
        let lanes = target.len() / dtype.lane_bytes();
        let mut case = Self { dtype, lanes, set, base, crc32: 0, payload, padding: 0, num_deltas: 0, base_sum: 0, target_sum: 0 };
        let base = case.all_base_lanes();
        let pairs = base.chunks(dtype.lane_bytes()).zip(target.chunks(dtype.lane_bytes()));
        case.num_deltas = pairs.filter(|(base, target)| base != target).count() as u32;
        (case.base_sum, case.target_sum) = (chunk_sum(&base), chunk_sum(target));
        case.sign();
        case
    }

    /// Makes the record's CRC that of the payload.
    pub fn sign(&mut self) {
        self.crc32 = crc32fast::hash(&self.payload);
    }

    pub fn all_base_lanes(&self) -> Vec<u8> {
        let mut base = self.base.clone();
        base.resize(self.lanes * self.dtype.lane_bytes(), 0);
        base
    }

    fn padded(&self) -> Vec<u8> {
        let mut padded = self.payload.clone();
        padded.resize(self.payload.len().next_multiple_of(16), self.padding);
        padded
    }

    /// What the decoder of the crate makes of it, in the order of section 13, steps 8 to 11.
    pub fn decode(&self) -> Result<Vec<u8>, Rule> {
        let rule = |broken: bool, rule: Rule| if broken { Err(rule) } else { Ok(()) };
        let mut lanes = self.all_base_lanes();
        rule(chunk_sum(&lanes) != self.base_sum, Rule::ChunkBaseSum)?;
        if self.num_deltas == 0 {
            return Ok(lanes);
        }
        rule(crc32fast::hash(&self.payload) != self.crc32, Rule::PayloadCrc32)?;
        rule(self.padding != 0 && !self.payload.len().is_multiple_of(16), Rule::PayloadPadding)?;
        let encoded = Encoded { uncompressed_size: lanes.len() as u32, num_deltas: self.num_deltas };
        let tables = self.set.as_ref();
        let mut decoder = ChunkDecoder::new();
        let sum = decoder
            .decode(Codec::Conditioned, tables, self.dtype, encoded, &self.payload, self.base_sum, &mut lanes, &mut |_, _| Ok(()))
            .map_err(|e| e.rule().expect("a rule is broken"))?;
        assert_eq!(sum, chunk_sum(&lanes));
        rule(sum != self.target_sum, Rule::ChunkTargetSum)?;
        Ok(lanes)
    }

    /// What the model makes of it, and what it leaves in the output.
    pub fn model(&self, config: Config, mode: Mode, base_at: usize, output_at: usize) -> (Outcome, Vec<u8>) {
        let tables = self.set.as_ref().map(DeviceTables::new);
        let payload = self.padded();
        let chunk = Chunk {
            dtype: self.dtype,
            lanes: self.lanes,
            tables: tables.as_ref(),
            payload: &payload,
            size: self.payload.len(),
            num_deltas: self.num_deltas,
            crc32: self.crc32,
            base_sum: self.base_sum,
            target_sum: self.target_sum,
        };
        let width = self.dtype.lane_bytes();
        let (base_at, output_at) = (base_at * width, output_at * width);
        let mut memory = with_lane!(width, L => Memory::new::<L>(mode, &self.base, self.lanes, base_at, output_at));
        let outcome = run(&chunk, &mut memory, config);
        (outcome, memory.output().to_vec())
    }

    /// Compares the model with the decoder, in every mode; `n` chooses how the model is run. Returns both verdicts.
    pub fn compare(&self, n: usize) -> (Option<Rule>, Option<Rule>) {
        let expected = self.decode();
        let mut verdict = None;
        let whole = self.base.len() == self.lanes * self.dtype.lane_bytes();
        let modes = [Mode::OutOfPlace, Mode::Dry, Mode::InPlace];
        for (i, mode) in modes.into_iter().enumerate().filter(|(_, mode)| whole || *mode != Mode::InPlace) {
            let n = n + i;
            let config = Config { warps: 1 << (n % 5), decoder: n / 2, backwards: false };
            // From aligned to 16 bytes down to a single lane.
            let places = ([0, 8, 1, 2, 3, 4, 7][n % 7], [0, 4, 3, 1, 8][n % 5]);
            let (outcome, output) = self.model(config, mode, places.0, places.1);
            let found = super::rule(outcome.status);
            let told = format!("{:?} {mode:?} {config:?}: {found:?}, expected {:?}", self.dtype, expected.as_ref().err());
            let again = self.model(Config { backwards: true, ..config }, mode, places.0, places.1);
            assert!(again == (outcome, output.clone()), "the outcome depends on the order of warps: {told}");
            assert!(is_same_kind(expected.as_ref().err().copied(), found), "{told}");
            match &expected {
                Ok(lanes) => {
                    assert_eq!(outcome.changed, self.num_deltas);
                    assert_eq!((outcome.base_sum, outcome.target_sum), (self.base_sum, self.target_sum));
                    assert!(mode == Mode::Dry || output == *lanes, "other lanes: {told}");
                }
                Err(_) => assert!(mode != Mode::InPlace || output == self.base, "stored in place: {told}"),
            }
            verdict = verdict.or(found);
        }
        (expected.err(), verdict)
    }
}

/// Whether verdicts agree, as far as a payload that breaks several rules allows.
pub fn is_same_kind(expected: Option<Rule>, found: Option<Rule>) -> bool {
    // The sizes of all segments are checked first; the decoder may have found a fault in an earlier segment.
    let early = found == Some(Rule::PayloadSize) && expected.map(kind) == Some(kind(Rule::PayloadStream));
    early || expected.map(kind) == found.map(kind)
}

/// Rules that are checked at the same time. A payload that breaks several of a kind may be reported under any of them.
fn kind(rule: Rule) -> u8 {
    match rule {
        Rule::PayloadCrc32 => 0,
        Rule::PayloadPadding => 1,
        Rule::PayloadSize | Rule::PayloadHeader | Rule::PayloadClasses => 2,
        Rule::PayloadStream | Rule::PayloadPositions | Rule::PayloadDeltas | Rule::ChunkTargetSum => 3,
        Rule::ChunkBaseSum => 4,
        _ => panic!("no rule of a chunk: {rule:?}"),
    }
}

/// The class of each lane.
fn classes_of<L: Lane>(dtype: Dtype, plan: &Plan, base: &[L]) -> Vec<u8> {
    let count = |lane: u64| u64::from(64 - lane.leading_zeros());
    let top = 1u64 << (8 * L::BYTES - 1);
    let class = |(i, lane): (usize, &L)| {
        let context = match dtype.context() {
            Context::Exponent { shift, bits } => lane.to_u64() >> shift & ((1 << bits) - 1),
            Context::SignedBits if lane.to_u64() & top != 0 => count(!lane.to_u64() & (top - 1)),
            Context::SignedBits | Context::Bits => count(lane.to_u64()),
        };
        let index = context.saturating_sub(plan.first_context.into()) as usize;
        let activity = if plan.activity_bits == 0 { 0 } else { plan.activities[i / BLOCK] };
        plan.maps[usize::from(activity)].get(index).copied().unwrap_or(0)
    };
    base.iter().enumerate().map(class).collect()
}

fn put_bits(bits: impl Iterator<Item = (u64, u32)>, payload: &mut Vec<u8>) {
    let mut used = 0;
    for (number, count) in bits {
        for bit in 0..count {
            if used % 8 == 0 {
                payload.push(0);
            }
            *payload.last_mut().unwrap() |= ((number >> bit & 1) as u8) << (used % 8);
            used += 1;
        }
    }
}

/// A payload that follows the plan. The tables must have the token of an unchanged lane in every class.
pub fn write(dtype: Dtype, plan: &Plan, set: &TableSet, base: &[u8], target: &[u8]) -> Vec<u8> {
    with_lane!(dtype.lane_bytes(), L => write_lanes::<L>(dtype, plan, set, base, target))
}

fn write_lanes<L: Lane>(dtype: Dtype, plan: &Plan, set: &TableSet, base: &[u8], target: &[u8]) -> Vec<u8> {
    let load = |bytes: &[u8]| -> Vec<L> { lanes_of::<L>(bytes).iter().map(|&lane| L::load(lane)).collect() };
    let (base, target) = (load(base), load(target));
    let bits = 8 * L::BYTES as u32;
    let low = plan.low_bits;
    let tables: Vec<&[u16]> = set.classes().collect();
    let mask = 1u64.checked_shl(bits - low).unwrap_or(0).wrapping_sub(1);
    let value =
        |delta: u64| if low == 0 { delta } else { u64::from(plan.center).wrapping_sub(delta.checked_shr(low).unwrap_or(0)) & mask };
    let has = |class: u8, value: u64| {
        tables[usize::from(class) - 1].get(usize::from(token_of(value).0)).is_some_and(|&frequency| frequency != 0)
    };

    let classes = classes_of(dtype, plan, &base);
    let mut deltas = Vec::new();
    let mut exceptions = Vec::new();
    for (i, ((&base, &target), &class)) in base.iter().zip(&target).zip(&classes).enumerate() {
        let delta = L::delta(base, target, dtype.order()).to_u64();
        let possible = match class {
            0 => delta.checked_shr(low).unwrap_or(0) == 0,
            class => has(class, value(delta)),
        };
        if delta != 0 && (!possible || exceptions.len() % 3 != 2 && (i + 1).is_multiple_of(plan.listed)) {
            assert!(class == 0 || has(class, value(0)), "no token for an unchanged lane");
            exceptions.push((i as u32, delta));
            deltas.push(0);
        } else {
            deltas.push(delta);
            if plan.clash == Some(i) {
                exceptions.push((i as u32, 1));
            }
        }
    }

    let header = ConditionedHeader {
        low_bits: low as u8,
        states_log2: plan.states_log2,
        segments_log2: plan.segments_log2,
        activity_bits: plan.activity_bits,
        first_context: plan.first_context.into(),
        context_count: plan.maps[0].len() as u8,
        reserved: 0,
        exception_count: (exceptions.len() as u32).into(),
        center: plan.center.into(),
    };
    let mut payload = header.as_bytes().to_vec();
    for map in &plan.maps {
        payload.extend(map.chunks(2).map(|pair| pair[0] | pair.get(1).copied().unwrap_or(0) << 4));
    }
    let blocks = base.len().div_ceil(BLOCK);
    if plan.activity_bits != 0 {
        put_bits(plan.activities[..blocks].iter().map(|&a| (a.into(), plan.activity_bits.into())), &mut payload);
    }
    payload.extend(exceptions.iter().flat_map(|(position, _)| position.to_le_bytes()));
    payload.extend(exceptions.iter().flat_map(|(_, delta)| delta.to_le_bytes().into_iter().take(L::BYTES)));
    put_bits(deltas.iter().map(|&delta| (delta, low)), &mut payload);

    let segments = 1usize << plan.segments_log2;
    let streams: Vec<Vec<u8>> = (0..segments)
        .map(|s| {
            let lanes = s * blocks / segments * BLOCK..((s + 1) * blocks / segments * BLOCK).min(base.len());
            let coded = lanes.filter(|&i| classes[i] != 0).map(|i| (classes[i], value(deltas[i]))).collect::<Vec<_>>();
            stream(&tables, &coded, 1 << plan.states_log2)
        })
        .collect();
    payload.extend(streams[..segments - 1].iter().flat_map(|stream| (stream.len() as u32 / 2).to_le_bytes()));
    payload.resize(payload.len().next_multiple_of(2), 0);
    payload.extend(streams.concat());
    payload
}

/// The stream of coded lanes, each a class and a value: the decoder's steps, undone from the last to the first.
fn stream(tables: &[&[u16]], coded: &[(u8, u64)], states: usize) -> Vec<u8> {
    let mut x = vec![1u32 << 16; states];
    let mut words = Vec::new();
    let mut put = |x: &mut u32, least: u64| {
        if u64::from(*x) >= least {
            words.push(*x as u16);
            *x >>= 16;
        }
    };
    for step in coded.chunks(states).rev() {
        for round in (0..4).rev() {
            for (x, &(_, value)) in x.iter_mut().zip(step).rev() {
                let now = extra_bits(token_of(value).0).saturating_sub(16 * round).min(16);
                if now != 0 {
                    put(x, 1 << (32 - now));
                    *x = *x << now | (value >> (16 * round)) as u32 & ((1 << now) - 1);
                }
            }
        }
        for (x, &(class, value)) in x.iter_mut().zip(step).rev() {
            let (table, token) = (tables[usize::from(class) - 1], usize::from(token_of(value).0));
            let frequency = u32::from(table[token]);
            let start: u32 = table[..token].iter().map(|&f| u32::from(f)).sum();
            put(x, u64::from(frequency) << 20);
            *x = (*x / frequency) << 12 | (*x % frequency + start);
        }
    }
    x.iter().flat_map(|x| x.to_le_bytes()).chain(words.iter().rev().flat_map(|word| word.to_le_bytes())).collect()
}

/// A set of `classes` classes for values of `bits` bits. With `all` no token is missing; else some are, but never the first.
pub fn random_set(random: &mut Random, classes: usize, bits: u32, all: bool) -> TableSet {
    let class = |random: &mut Random| {
        let most = tokens_within(bits);
        let count = if all { most } else { 1 + random.below(most) };
        let mut class: Vec<u16> = (0..count).map(|t| u16::from(all || t == 0 || t + 1 == count || random.once_in(2))).collect();
        let mut left = 4096 - class.iter().sum::<u16>();
        while left != 0 {
            // Some classes are skewed, some flat.
            let token = random.below(count) * random.below(2) * random.below(2);
            let part = 1 + random.below(left.into()) as u16;
            if class[token] != 0 {
                class[token] += part;
                left -= part;
            }
        }
        class
    };
    TableSet::new(&(0..classes).map(|_| class(random)).collect::<Vec<_>>())
}

/// Base and target lanes: one lane in `rarity` changes, by a few units or by anything.
pub fn random_lanes(random: &mut Random, dtype: Dtype, lanes: usize, rarity: usize) -> (Vec<u8>, Vec<u8>) {
    let width = dtype.lane_bytes();
    let bits = 8 * width as u32;
    let mut base = vec![0; lanes * width];
    // Lanes of all magnitudes, as their contexts tell them apart.
    base.chunks_mut(width).for_each(|lane| {
        let shift = if random.once_in(2) { random.below(bits as usize) as u32 } else { 0 };
        let value = (random.bits() >> (64 - bits) >> shift) ^ if random.once_in(2) { u64::MAX } else { 0 };
        lane.copy_from_slice(&value.to_le_bytes()[..width]);
    });
    let mut target = base.clone();
    with_lane!(width, L => for lane in lanes_of_mut::<L>(&mut target) {
        if random.once_in(rarity) {
            let delta = if random.once_in(8) { random.bits() } else { 1 + random.below(30) as u64 };
            *lane = L::apply(L::load(*lane), L::from_u64(delta), dtype.order()).store();
        }
    });
    (base, target)
}
