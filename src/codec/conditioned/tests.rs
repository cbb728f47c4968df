//! The codec against the model, on every path of vector instructions: payloads of our encoder, payloads of every shape that an
//! encoder may choose, and damaged ones.

use super::context::indexes;
use super::model::{self, Shape};
use super::tables::{MAX_TOKENS, SCALE, extra_bits, least_value};
use super::*;
use crate::codec::Encoded;
use crate::error::Rule;
use crate::lane::{Dtype, Lane, Order, lanes_of_mut, with_lane};
use crate::simd::{Broken, Path, STEP, Words};
use crate::{Result, chunk_sum};
use proptest::prelude::*;

/// Bytes of a payload's header, and where its fields begin.
const HEADER: usize = 16;
const LOW_BITS: usize = 0;
const STATES: usize = 1;
const SEGMENTS: usize = 2;
const ACTIVITY_BITS: usize = 3;
const CONTEXT_COUNT: usize = 6;
const RESERVED: usize = 7;
const EXCEPTIONS: usize = 8;
const CENTER: usize = 12;

struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn any(&mut self) -> u64 {
        (self.next() << 32) ^ self.next()
    }

    /// Any bits, or few of them, or those of zeros, infinities and NaNs.
    fn lane(&mut self, dtype: Dtype) -> u64 {
        let bits = 8 * dtype.lane_bytes() as u32;
        let any = self.any();
        match self.below(4) {
            0 => any,
            1 => any % (1 << ((any >> 40) as u32 % bits.min(63))),
            2 => [0, u64::MAX, 1, 1 << (bits - 1), u64::MAX >> (65 - bits)][any as usize % 5],
            // An exponent of all ones or of zeros.
            _ => {
                let mantissa = dtype.mantissa_bits().unwrap_or(bits / 2);
                let top = [0, u64::MAX][(any >> 60) as usize % 2] << mantissa;
                (top ^ ((any & 1) << (bits - 1))) | [0, 1, 1 << (mantissa - 1)][(any >> 20) as usize % 3]
            }
        }
    }

    /// Lanes most of which lie around a few magnitudes, as weights do.
    fn lanes(&mut self, dtype: Dtype, count: usize) -> Vec<u8> {
        let width = dtype.lane_bytes();
        let shift = self.below(8 * width as u64 / 2 + 1);
        let lane = |_| {
            let lane =
                if self.below(8) == 0 { self.lane(dtype) } else { (self.any() << (64 - 8 * width) >> (64 - 8 * width)) >> shift };
            lane.to_le_bytes()[..width].to_vec()
        };
        (0..count).flat_map(lane).collect()
    }

    /// `base` with about `rate` of 1,024 lanes changed.
    fn changed(&mut self, dtype: Dtype, base: &[u8], rate: u64) -> Vec<u8> {
        let mut target = base.to_vec();
        let largest = self.below(4);
        with_lane!(dtype.lane_bytes(), L => {
            for lane in lanes_of_mut::<L>(&mut target) {
                if self.below(1024) < rate {
                    let delta = match (largest, self.below(16)) {
                        (0, _) => 1 + self.below(2),
                        (1, _) => 1 + self.below(40),
                        (_, 0) => self.any(),
                        _ => self.any() >> (20 + self.below(44)),
                    };
                    let value = if largest == 3 { L::truncate(self.lane(dtype)) } else { L::apply(L::load(*lane), L::truncate(delta), dtype.order()) };
                    *lane = value.store();
                }
            }
        });
        target
    }

    /// A set of so many classes, with tokens up to `most`.
    fn set(&mut self, classes: usize, most: usize) -> TableSet {
        let class = |_| {
            let count = 1 + self.below(most as u64) as usize;
            let mut class = vec![0; count];
            class[count - 1] = 1;
            let mut left = SCALE as u16 - 1;
            while left > 0 {
                let part = 1 + self.below(u64::from(left)) as u16;
                // Small tokens more often, and most tokens at times.
                let token = self.below(count as u64) * self.below(5) / 4;
                class[token as usize % count] += part.min(if part.is_multiple_of(3) { 40 } else { part });
                left = SCALE as u16 - class.iter().sum::<u16>();
            }
            class
        };
        TableSet::new(&(0..classes).map(class).collect::<Vec<_>>())
    }
}

fn count_changed(dtype: Dtype, base: &[u8], target: &[u8]) -> u32 {
    let width = dtype.lane_bytes();
    base.chunks(width).zip(target.chunks(width)).filter(|(base, target)| base != target).count() as u32
}

/// Tables made from these lanes.
fn trained(dtype: Dtype, low_bits: u32, base: &[u8], target: &[u8]) -> Option<TableSet> {
    let mut trainer = Trainer::default();
    trainer.add(&Sample::gather(dtype, low_bits, base, target));
    trainer.finish(8 * dtype.lane_bytes() as u32 - low_bits, low_bits != 0)
}

fn encode(encoder: &mut Encoder, dtype: Dtype, tables: Option<&TableSet>, low_bits: u32, base: &[u8], target: &[u8]) -> Vec<u8> {
    let mut payload = vec![0xEE; 3];
    let encoded = with_lane!(dtype.lane_bytes(), L => encoder.encode::<L>(dtype, tables, low_bits, base, target, &mut payload));
    let changed = count_changed(dtype, base, target);
    let size = if changed == 0 { 0 } else { base.len() as u32 };
    assert_eq!(encoded, Encoded { uncompressed_size: size, num_deltas: changed });
    assert_eq!(payload[..3], [0xEE; 3]);
    payload.split_off(3)
}

/// The chunk sum and the lanes that a payload decodes to.
fn decode(
    decoder: &mut Decoder,
    dtype: Dtype,
    tables: Option<&TableSet>,
    num_deltas: u32,
    payload: &[u8],
    base: &[u8],
) -> Result<(u64, Vec<u8>)> {
    let encoded = Encoded { uncompressed_size: base.len() as u32, num_deltas };
    let mut lanes = base.to_vec();
    let sum = with_lane!(dtype.lane_bytes(), L => {
        decoder.decode::<L>(dtype, tables, payload, encoded, chunk_sum(base), &mut lanes, &mut |_, _| Ok(()))
    })?;
    Ok((sum, lanes))
}

fn decoders() -> Vec<Decoder> {
    Path::available().into_iter().map(Decoder::with_path).collect()
}

/// Decodes a payload with each decoder and asserts that it gives `target`.
fn assert_decodes(decoders: &mut [Decoder], dtype: Dtype, tables: Option<&TableSet>, payload: &[u8], base: &[u8], target: &[u8]) {
    let changed = count_changed(dtype, base, target);
    for (path, decoder) in Path::available().into_iter().zip(decoders) {
        let (sum, lanes) = decode(decoder, dtype, tables, changed, payload, base).unwrap();
        assert!(lanes == target, "{dtype} on {path:?}");
        assert_eq!(sum, chunk_sum(target), "{dtype} on {path:?}");
    }
}

/// Decodes anything with each decoder: all come to what the model comes to, and errors name rules of payloads.
fn assert_as_model(
    decoders: &mut [Decoder],
    dtype: Dtype,
    tables: Option<&TableSet>,
    num_deltas: u32,
    payload: &[u8],
    base: &[u8],
) -> Option<Vec<u8>> {
    let expected = model::decode(dtype, tables, num_deltas, payload, base);
    for (path, decoder) in Path::available().into_iter().zip(decoders) {
        match (decode(decoder, dtype, tables, num_deltas, payload, base), &expected) {
            (Ok((sum, lanes)), Some(expected)) => {
                assert!(lanes == *expected, "{dtype} on {path:?}");
                assert_eq!(sum, chunk_sum(&lanes), "{dtype} on {path:?}");
                assert_eq!(count_changed(dtype, base, &lanes), num_deltas);
            }
            (Err(error), None) => assert!(error.rule().is_some_and(|rule| rule.id().starts_with("payload.")), "{error}"),
            (found, expected) => panic!("{dtype} on {path:?}: {:?}, the model {}", found.err(), expected.is_some()),
        }
    }
    expected
}

/// Frequencies that add up to 4,096: `least` for each of `count` tokens, and what is left for the first.
fn flat(count: usize, least: u16) -> Vec<u16> {
    let mut class = vec![least; count];
    class[0] += SCALE as u16 - count as u16 * least;
    class
}

/// Sets that a stranger may make: one token; no token for 0, so that no lane can be left alone; all tokens; the largest alone.
fn handmade() -> Vec<TableSet> {
    let alone = |token: usize| [vec![0; token], vec![SCALE as u16]].concat();
    vec![
        one_token(0),
        one_token(3),
        TableSet::new(&[flat(2, 2048)]),
        TableSet::new(&[flat(MAX_TOKENS, 30), alone(MAX_TOKENS - 1), flat(2, 1)]),
        TableSet::new(&vec![flat(20, 100); 15]),
        TableSet::new(&[alone(0), alone(1), alone(15), alone(16), alone(17), flat(40, 1)]),
    ]
}

#[test]
fn payloads_of_our_encoder_come_back() {
    let (mut encoder, mut decoders) = (Encoder::default(), decoders());
    let mut random = Random::new(1);
    for &dtype in Dtype::ALL {
        let width = dtype.lane_bytes();
        let bits = 8 * width as u32;
        let other = random.lanes(dtype, 5000);
        let other_tables = trained(dtype, 0, &other, &random.changed(dtype, &other, 100));
        for (lanes, rates) in [
            (1, &[1024][..]),
            (2, &[512]),
            (127, &[20, 1024]),
            (128, &[1, 300]),
            (129, &[20, 1024]),
            (4095, &[3, 300]),
            (4096, &[30, 1024]),
            (4097, &[1, 100, 900]),
            (1 << 15, &[10]),
        ] {
            for &rate in rates {
                let base = if rate == 300 { vec![0; lanes * width] } else { random.lanes(dtype, lanes) };
                let target = random.changed(dtype, &base, rate);
                let low = dtype.mantissa_bits().map_or(bits - 1, |bits| bits + 1);
                for low_bits in [0, low, 1, bits - 1] {
                    let mut sets = vec![None, trained(dtype, low_bits, &base, &target), other_tables.clone()];
                    sets.extend(handmade().into_iter().map(Some));
                    for tables in sets {
                        let payload = encode(&mut encoder, dtype, tables.as_ref(), low_bits, &base, &target);
                        assert_eq!(payload.is_empty(), base == target);
                        if base == target {
                            continue;
                        }
                        // What the record may say (section 6 of the format).
                        assert!(payload.len() <= base.len() + base.len() / 64 + 64, "{dtype}, {lanes} lanes");
                        let tables = tables.as_ref();
                        assert_decodes(&mut decoders, dtype, tables, &payload, &base, &target);
                        if lanes <= 4097 {
                            let changed = count_changed(dtype, &base, &target);
                            let expected = model::decode(dtype, tables, changed, &payload, &base);
                            assert!(expected.is_some_and(|expected| expected == target), "{dtype}, {lanes} lanes");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn whole_chunks_come_back() {
    let (mut encoder, mut decoders) = (Encoder::default(), decoders());
    let mut random = Random::new(2);
    for (dtype, rate) in
        [(Dtype::Bf16, 10), (Dtype::Bf16, 500), (Dtype::F32, 40), (Dtype::F64, 100), (Dtype::I8, 10), (Dtype::F8E4m3, 1024)]
    {
        let base = random.lanes(dtype, (4 << 20) / dtype.lane_bytes());
        let target = random.changed(dtype, &base, rate);
        for low_bits in [0, dtype.mantissa_bits().map_or(4, |bits| bits + 1)] {
            let tables = trained(dtype, low_bits, &base[..1 << 16], &target[..1 << 16]);
            let payload = encode(&mut encoder, dtype, tables.as_ref(), low_bits, &base, &target);
            assert!(payload.len() <= base.len() + base.len() / 64 + 64);
            assert_decodes(&mut decoders, dtype, tables.as_ref(), &payload, &base, &target);
        }
    }
}

/// The same table set is looked up once, and buffers are kept: none of it may show.
#[test]
fn an_encoder_used_again_writes_the_same() {
    let mut random = Random::new(3);
    let mut used = Encoder::default();
    for round in 0..60 {
        let dtype = Dtype::ALL[random.below(Dtype::ALL.len() as u64) as usize];
        let count = 1 + random.below(9000) as usize;
        let base = random.lanes(dtype, count);
        let rate = 1 << random.below(11);
        let target = random.changed(dtype, &base, rate);
        let low_bits = if round % 3 == 0 { 8 * dtype.lane_bytes() as u32 / 2 } else { 0 };
        let tables = if round % 5 == 0 { None } else { trained(dtype, low_bits, &base, &target) };
        let fresh = encode(&mut Encoder::default(), dtype, tables.as_ref(), low_bits, &base, &target);
        assert!(encode(&mut used, dtype, tables.as_ref(), low_bits, &base, &target) == fresh, "{dtype}, round {round}");
    }
}

/// What a chunk is made of: lanes, tables, and how they are coded.
#[derive(Debug)]
struct Chunk {
    dtype: Dtype,
    tables: Option<TableSet>,
    base: Vec<u8>,
    target: Vec<u8>,
    payload: Vec<u8>,
}

impl Chunk {
    /// A chunk of so many lanes in this shape, if those can be coded so.
    fn new(random: &mut Random, dtype: Dtype, lanes: usize, shape: Shape) -> Option<Self> {
        let tables = match random.below(8) {
            0 => None,
            1 => handmade().into_iter().nth(random.below(6) as usize),
            _ => {
                let classes = 1 + random.below(15) as usize;
                let most = [2, 16, 17, 40, MAX_TOKENS][random.below(5) as usize];
                Some(random.set(classes, most))
            }
        };
        let shape = shape.bounded(dtype, lanes, tables.as_ref().map_or(0, |tables| tables.classes().len()));
        let base = random.lanes(dtype, lanes);
        let rate = [1, 20, 400, 1024][random.below(4) as usize];
        let mut target = random.changed(dtype, &base, rate);
        target[0] ^= u8::from(base == target);
        let payload = model::encode(dtype, tables.as_ref(), &shape, &base, &target)?;
        Some(Self { dtype, tables, base, target, payload })
    }

    fn changed(&self) -> u32 {
        count_changed(self.dtype, &self.base, &self.target)
    }

    fn assert_decodes(&self, decoders: &mut [Decoder]) {
        assert_decodes(decoders, self.dtype, self.tables.as_ref(), &self.payload, &self.base, &self.target);
    }

    /// Decodes another payload, of which the record says `num_deltas`.
    fn assert_as_model(&self, decoders: &mut [Decoder], num_deltas: u32, payload: &[u8]) -> Option<Vec<u8>> {
        assert_as_model(decoders, self.dtype, self.tables.as_ref(), num_deltas, payload, &self.base)
    }
}

/// Classes and activities at random, and the rest as given.
fn shape(random: &mut Random, states_log2: u8, segments_log2: u8, activity_bits: u8) -> Shape {
    let bytes = |random: &mut Random, most: u64| (0..random.below(most)).map(|_| random.next() as u8).collect::<Vec<_>>();
    let sparse = random.below(3);
    let mut classes = bytes(random, 150);
    classes.iter_mut().for_each(|class| *class *= u8::from(random.below(3) >= sparse));
    Shape {
        low_bits: if random.below(3) == 0 { random.next() as u8 } else { 0 },
        states_log2,
        segments_log2,
        activity_bits,
        first_context: [0, 1, 60, 120, 1000, 2040, u16::MAX][random.below(7) as usize],
        context_count: random.next() as u8,
        center: random.any() as u32 >> random.below(32),
        classes,
        activities: bytes(random, 40),
        list_every: [0, 0, 1, 2, 7][random.below(5) as usize],
    }
}

#[test]
fn all_states_segments_and_activities_come_back() {
    let mut random = Random::new(4);
    let mut decoders = decoders();
    let mut coded = 0;
    for states_log2 in 0..=5 {
        for segments_log2 in 0..=5 {
            for activity_bits in 0..=2 {
                for (dtype, lanes) in [
                    (Dtype::Bf16, 4097),
                    (Dtype::F32, 128 << segments_log2),
                    (Dtype::F64, 4500),
                    (Dtype::I8, 9000),
                    (Dtype::F16, (128 << segments_log2) - 127),
                ] {
                    let shape = shape(&mut random, states_log2, segments_log2, activity_bits);
                    let Some(chunk) = Chunk::new(&mut random, dtype, lanes, shape) else { continue };
                    assert_eq!(chunk.payload[STATES..=ACTIVITY_BITS], [states_log2, segments_log2, activity_bits]);
                    chunk.assert_decodes(&mut decoders);
                    coded += 1;
                }
            }
        }
    }
    assert!(coded > 300, "{coded} of 540 chunks could be coded");
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    proptest::sample::select(Dtype::ALL)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn every_shape_comes_back(
        dtype in dtypes(),
        lanes in prop_oneof![1usize..140, 1usize..2000, 1usize..9000],
        states_log2 in 0u8..6,
        segments_log2 in 0u8..6,
        activity_bits in 0u8..3,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let shape = shape(&mut random, states_log2, segments_log2, activity_bits);
        let Some(chunk) = Chunk::new(&mut random, dtype, lanes, shape) else { return Ok(()) };
        let mut decoders = decoders();
        chunk.assert_decodes(&mut decoders);
        let expected = chunk.assert_as_model(&mut decoders, chunk.changed(), &chunk.payload);
        prop_assert!(expected.is_some_and(|expected| expected == chunk.target));
        for num_deltas in [chunk.changed() - 1, chunk.changed() + 1] {
            prop_assert_eq!(chunk.assert_as_model(&mut decoders, num_deltas, &chunk.payload), None);
        }
    }

    /// A header, maps or streams of any bytes in a payload that is in order otherwise.
    #[test]
    fn any_part_of_a_payload_may_be_anything(
        dtype in dtypes(),
        lanes in prop_oneof![1usize..300, 1usize..5000],
        states_log2 in 0u8..6,
        segments_log2 in 0u8..6,
        activity_bits in 0u8..3,
        seed: u64,
        part in 0..5,
    ) {
        let mut random = Random::new(seed);
        let shape = shape(&mut random, states_log2, segments_log2, activity_bits);
        let Some(chunk) = Chunk::new(&mut random, dtype, lanes, shape) else { return Ok(()) };
        let mut decoders = decoders();
        for _ in 0..8 {
            let mut payload = chunk.payload.clone();
            let place = match part {
                0 => 0..HEADER,
                1 => HEADER..payload.len().min(HEADER + 32),
                2 => payload.len() / 2..payload.len(),
                3 => payload.len() - 20..payload.len(),
                _ => 0..payload.len(),
            };
            for byte in &mut payload[place] {
                if part != 4 || random.below(100) == 0 {
                    *byte = (random.next() >> random.below(8)) as u8 & if random.below(4) == 0 { 0 } else { 255 };
                }
            }
            let num_deltas = if random.below(2) == 0 { chunk.changed() } else { 1 + random.below(lanes as u64) as u32 };
            chunk.assert_as_model(&mut decoders, num_deltas, &payload);
        }
    }

    /// Streams of any bytes: these are refused in the end, or else after some steps, on every path.
    #[test]
    fn any_stream_ends(dtype in dtypes(), lanes in 1usize..5000, stream in proptest::collection::vec(any::<u16>(), 2..600), seed: u64) {
        let mut random = Random::new(seed);
        let shape = Shape { low_bits: 0, list_every: 0, ..shape(&mut random, 5, 0, 1) };
        let Some(mut chunk) = Chunk::new(&mut random, dtype, lanes, shape) else { return Ok(()) };
        // The same lanes twice leave nothing but header, maps, activities and a stream.
        chunk.target.clone_from(&chunk.base);
        let start = HEADER + 2 * usize::from(chunk.payload[CONTEXT_COUNT]).div_ceil(2) + lanes.div_ceil(128).div_ceil(8);
        let mut payload = chunk.payload[..start].to_vec();
        payload[EXCEPTIONS..EXCEPTIONS + 4].fill(0);
        payload.resize(payload.len().next_multiple_of(2), 0);
        payload.extend(stream.iter().flat_map(|word| (word | 1).to_le_bytes()));
        chunk.assert_as_model(&mut decoders(), 1 + random.below(lanes as u64) as u32, &payload);
    }
}

/// A step as section 4.5 has it, on frequencies.
fn plain_step(
    classes: &[u8],
    set: &[Vec<u16>],
    tokens: usize,
    words: &mut Words<'_>,
    states: &mut [u32; STEP],
) -> Result<Vec<u64>, Broken> {
    let mut found = Vec::new();
    for (x, &class) in states.iter_mut().zip(classes) {
        let mut slot = *x % SCALE;
        let mut token = 0;
        let class = &set[usize::from(class) - 1];
        while slot >= u32::from(class[token]) {
            slot -= u32::from(class[token]);
            token += 1;
        }
        if token >= tokens {
            return Err(Broken::Value);
        }
        *x = words.renormalize(u32::from(class[token]) * (*x / SCALE) + slot)?;
        found.push(token as u64);
    }
    let mut values: Vec<u64> = found.iter().map(|&t| if t < 16 { t } else { (2 + t % 2) << ((t - 16) / 2 + 3) }).collect();
    for round in 0..4 {
        for ((x, &token), value) in states.iter_mut().zip(&found).zip(&mut values) {
            let extra = if token < 16 { 0 } else { (token - 16) / 2 + 3 };
            let bits = extra.saturating_sub(16 * round).min(16);
            *value += u64::from(*x % (1 << bits)) << (16 * round);
            *x = words.renormalize(*x >> bits)?;
        }
    }
    Ok(values)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Steps from any states and words, which always decode to something while words are there and tokens allowed.
    #[test]
    fn steps_are_the_same_on_every_path(
        classes in 1usize..16,
        most in proptest::sample::select(&[1usize, 2, 16, 17, 30, 40, 72][..]),
        allowed in proptest::sample::select(&[2usize, 16, 24, 40, 72][..]),
        steps in 0usize..40,
        count in proptest::sample::select(&[16, STEP][..]),
        size in prop_oneof![3 => Just(1 << 16), 1 => 0usize..3000],
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let set = random.set(classes, most);
        let lookup = super::tables::Lookup::new(&set);
        let frequencies: Vec<_> = set.classes().map(<[u16]>::to_vec).collect();
        let coded: Vec<u8> = (0..count * steps).map(|_| 1 + random.below(classes as u64) as u8).collect();
        let mut initial = [0; STEP];
        initial.iter_mut().for_each(|x| *x = (random.any() as u32 >> random.below(16)).max(1 << 16));
        let stream: Vec<[u8; 2]> = (0..size).map(|_| (random.next() as u16 >> random.below(16)).to_le_bytes()).collect();

        let (mut states, mut words) = (initial, Words { words: &stream, read: 0 });
        let expected: Result<Vec<_>, _> =
            coded.chunks(count).map(|classes| plain_step(classes, &frequencies, allowed, &mut words, &mut states)).collect();
        let expected = expected.map(|values| values.concat());
        for path in Path::available().into_iter().filter(|path| path.has_steps()) {
            let (mut found_states, mut found_words) = (initial, Words { words: &stream, read: 0 });
            let mut values = vec![0xAAAA_AAAA; coded.len()];
            let mut changed = vec![0xAAAA; coded.len() / 16];
            let result = path.decode_steps(
                count,
                &lookup.entries,
                allowed,
                &mut found_words,
                &mut found_states,
                &coded,
                &mut values,
                &mut changed,
            );
            match result {
                Ok(()) => {
                    prop_assert!(expected.as_ref().is_ok_and(|expected| expected.iter().copied().eq(values.iter().map(|&value| u64::from(value)))));
                    prop_assert_eq!((found_states, found_words.read), (states, words.read), "{:?}", path);
                    let not_zero = |lanes: &[u32]| lanes.iter().rev().fold(0, |mask, &value| mask << 1 | u16::from(value != 0));
                    prop_assert!(values.chunks(16).map(not_zero).eq(changed));
                }
                // In a step that is wrong in two ways a vector may find the other one first.
                Err(broken) => {
                    prop_assert!(expected.is_err(), "{:?} on {:?}", broken, path);
                    prop_assert!(broken != Broken::Value || most > allowed, "{:?}", path);
                    prop_assert!(broken != Broken::Short || size < 1 << 16, "{:?}", path);
                }
            }
        }
    }

    #[test]
    fn contexts_are_those_of_the_model(
        dtype in dtypes(),
        first in prop_oneof![0u16..300, any::<u16>()],
        lanes in 0usize..300,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let base = random.lanes(dtype, lanes);
        let mut found = vec![77; lanes.next_multiple_of(128)];
        with_lane!(dtype.lane_bytes(), L => indexes::<L>(&base, dtype, first, &mut found));
        let first = u64::from(first);
        let index = |lane: &[u8]| {
            let lane = lane.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
            (model::context(dtype, lane).max(first) - first).min(255) as u8
        };
        let expected = base.chunks(dtype.lane_bytes()).map(index).chain(std::iter::repeat(255));
        prop_assert!(found.iter().copied().eq(expected.take(lanes.next_multiple_of(128))));
    }
}

#[test]
fn contexts_of_all_lanes_of_8_and_16_bits() {
    for &dtype in Dtype::ALL.iter().filter(|dtype| dtype.lane_bytes() <= 2) {
        let width = dtype.lane_bytes();
        let lanes: Vec<u8> = (0..1u64 << (8 * width)).flat_map(|lane| lane.to_le_bytes()[..width].to_vec()).collect();
        let mut found = vec![0; 1 << (8 * width)];
        with_lane!(width, L => indexes::<L>(&lanes, dtype, 0, &mut found));
        let expected = (0..1u64 << (8 * width)).map(|lane| model::context(dtype, lane).min(255) as u8);
        assert!(found.into_iter().eq(expected), "{dtype}");
    }
}

/// Small payloads of all kinds.
fn samples() -> Vec<Chunk> {
    let mut random = Random::new(7);
    let mut chunks = Vec::new();
    for (dtype, lanes, states_log2, segments_log2, activity_bits) in [
        (Dtype::Bf16, 300, 5, 1, 1),
        (Dtype::Bf16, 129, 5, 0, 0),
        (Dtype::F32, 200, 2, 0, 2),
        (Dtype::F64, 150, 5, 1, 0),
        (Dtype::I8, 400, 5, 2, 2),
        (Dtype::F8E5m2, 1, 0, 0, 0),
        (Dtype::I64, 130, 3, 1, 1),
        (Dtype::F16, 260, 5, 0, 0),
    ] {
        let before = chunks.len();
        while chunks.len() < before + 2 {
            let shape = shape(&mut random, states_log2, segments_log2, activity_bits);
            chunks.extend(Chunk::new(&mut random, dtype, lanes, shape).filter(|chunk| chunk.payload.len() < 1500));
        }
    }
    // And some of our encoder's.
    for (dtype, low_bits, rate) in [(Dtype::Bf16, 0, 100), (Dtype::Bf16, 8, 1024), (Dtype::F32, 24, 500), (Dtype::I16, 0, 300)] {
        let base = random.lanes(dtype, 280);
        let target = random.changed(dtype, &base, rate);
        let tables = trained(dtype, low_bits, &base, &target);
        let payload = encode(&mut Encoder::default(), dtype, tables.as_ref(), low_bits, &base, &target);
        chunks.push(Chunk { dtype, tables, base, target, payload });
    }
    chunks
}

/// Without the CRC of the payload: what is not refused differs in the sum of the chunk, unless it is the target all the same.
#[test]
fn every_flipped_bit_and_every_cut_is_found() {
    let mut decoders = decoders();
    for chunk in samples() {
        chunk.assert_decodes(&mut decoders);
        let (changed, target_sum) = (chunk.changed(), chunk_sum(&chunk.target));
        let check = |decoders: &mut [Decoder], payload: &[u8]| {
            if let Some(lanes) = chunk.assert_as_model(decoders, changed, payload) {
                assert!(lanes == chunk.target || chunk_sum(&lanes) != target_sum);
            }
        };
        let mut payload = chunk.payload.clone();
        for bit in 0..8 * payload.len() {
            payload[bit / 8] ^= 1 << (bit % 8);
            check(&mut decoders, &payload);
            payload[bit / 8] ^= 1 << (bit % 8);
        }
        for size in 0..payload.len() {
            assert_eq!(chunk.assert_as_model(&mut decoders, changed, &payload[..size]), None, "cut to {size}");
        }
        for more in [&[0][..], &[0, 0], &[0, 0, 1, 0]] {
            assert_eq!(chunk.assert_as_model(&mut decoders, changed, &[&payload, more].concat()), None, "{more:?} more");
        }
    }
}

/// 512 lanes of BF16 with the exponents 0 to 3, four lanes each in turn, of which some change.
fn example(shape: Shape, changes: &[(usize, u16)]) -> Chunk {
    let set = TableSet::new(&[flat(16, 100), flat(30, 50)]);
    let base: Vec<u8> = (0..512u16).flat_map(|lane| (lane << 5 & 0x1FF).to_le_bytes()).collect();
    let mut target = base.clone();
    for &(position, delta) in changes {
        let lane = &mut lanes_of_mut::<u16>(&mut target)[position];
        *lane = u16::apply(u16::load(*lane), delta, Order::Ordered).store();
    }
    let payload = model::encode(Dtype::Bf16, Some(&set), &shape, &base, &target).unwrap();
    Chunk { dtype: Dtype::Bf16, tables: Some(set), base, target, payload }
}

fn assert_refused(chunk: &Chunk, payload: &[u8], rule: Rule) {
    for mut decoder in decoders() {
        let found = decode(&mut decoder, chunk.dtype, chunk.tables.as_ref(), chunk.changed(), payload, &chunk.base);
        let error = found.expect_err("a payload that breaks a rule");
        assert_eq!(error.rule(), Some(rule), "{error}");
    }
    assert_eq!(chunk.assert_as_model(&mut decoders(), chunk.changed(), payload), None);
}

/// Each way to break a payload, and the rule that it breaks.
#[test]
fn rules_are_told_apart() {
    // The exponents 1 and 2 are coded, so that the change of lane 0 is listed.
    let plain = Shape { context_count: 3, classes: vec![0, 1, 2], ..Shape::default() };
    let split = Shape { activity_bits: 1, activities: vec![0, 1, 1], segments_log2: 1, states_log2: 2, ..plain.clone() };
    let low = Shape { low_bits: 5, center: 100, classes: vec![], ..plain.clone() };
    let changes = [(0, 9), (5, 3), (6, 1), (330, 7)];
    let chunks = [example(plain, &changes), example(split, &changes), example(low, &[(3, 9), (100, 31)])];
    for chunk in &chunks {
        chunk.assert_decodes(&mut decoders());
    }
    let listed = HEADER + 2; // a position and a delta, after a map of two bytes
    let activities = HEADER + 4; // a byte, after two maps
    let sizes = activities + 1 + 6; // a word, after one exception; then a padding
    let low = HEADER + 2;
    let streams = [listed + 6, sizes + 5, low + 320];
    let last = chunks[0].payload.len() - 1;
    for (chunk, at, bytes, rule) in [
        (0, LOW_BITS, &[17][..], Rule::PayloadHeader),
        (0, STATES, &[6], Rule::PayloadHeader),
        (0, SEGMENTS, &[3], Rule::PayloadHeader),
        (0, SEGMENTS, &[255], Rule::PayloadHeader),
        (0, ACTIVITY_BITS, &[3], Rule::PayloadHeader),
        (0, CONTEXT_COUNT, &[0], Rule::PayloadHeader),
        (0, CONTEXT_COUNT, &[65], Rule::PayloadHeader),
        (0, RESERVED, &[1], Rule::PayloadHeader),
        (0, EXCEPTIONS, &[5], Rule::PayloadHeader),
        (0, EXCEPTIONS, &[255; 4], Rule::PayloadHeader),
        (0, CENTER, &[1], Rule::PayloadHeader),
        (2, CENTER, &[0, 8], Rule::PayloadHeader),
        (0, HEADER, &[0x30], Rule::PayloadClasses),
        (0, HEADER + 1, &[0x03], Rule::PayloadClasses),
        (0, HEADER + 1, &[0x12], Rule::PayloadClasses),
        (1, activities, &[0x16], Rule::PayloadSize),
        (1, sizes + 4, &[1], Rule::PayloadSize),
        (1, sizes, &[255; 4], Rule::PayloadSize),
        (1, sizes, &[7, 0, 0, 0], Rule::PayloadStream),
        (0, streams[0], &[255, 255, 0, 0], Rule::PayloadStream),
        (1, streams[1] + 4, &[255, 255, 0, 0], Rule::PayloadStream),
        (2, streams[2], &[1], Rule::PayloadStream),
        (0, last, &[!chunks[0].payload[last]], Rule::PayloadStream),
        (0, listed, &[0, 2], Rule::PayloadPositions),
        (0, listed, &[255; 4], Rule::PayloadPositions),
        (0, listed, &[5], Rule::PayloadPositions),
        (0, listed + 4, &[0], Rule::PayloadDeltas),
        (2, low + 8, &[255], Rule::PayloadDeltas),
    ] {
        let mut payload = chunks[chunk].payload.clone();
        assert_ne!(payload[at..at + bytes.len()], *bytes);
        payload[at..at + bytes.len()].copy_from_slice(bytes);
        assert_refused(&chunks[chunk], &payload, rule);
    }
    // Two changes are listed, and their positions change places, or become the same.
    let listed_twice = Shape { context_count: 1, classes: vec![], ..Shape::default() };
    let twice = example(listed_twice, &[(7, 4), (9, 2)]);
    twice.assert_decodes(&mut decoders());
    let at = HEADER + 1;
    assert_eq!(twice.payload[at..at + 8], [7, 0, 0, 0, 9, 0, 0, 0]);
    for positions in [[9, 7], [7, 7], [9, 9]] {
        let mut payload = twice.payload.clone();
        (payload[at], payload[at + 4]) = (positions[0], positions[1]);
        assert_refused(&twice, &payload, Rule::PayloadPositions);
    }
    // One byte more makes half a word, two are a word that nothing reads.
    assert_refused(&chunks[0], &[&chunks[0].payload[..], &[0]].concat(), Rule::PayloadSize);
    assert_refused(&chunks[0], &[&chunks[0].payload[..], &[0, 0]].concat(), Rule::PayloadStream);
    assert_refused(&chunks[0], &chunks[0].payload[..last - 1], Rule::PayloadStream);
    assert_refused(&chunks[0], &chunks[0].payload[..HEADER - 1], Rule::PayloadSize);
}

/// A set of one class that has one token.
fn one_token(token: usize) -> TableSet {
    TableSet::new(&[[vec![0; token], vec![SCALE as u16]].concat()])
}

/// Each token that fits in a lane, with the largest value and the least; the token after them is refused.
#[test]
fn the_largest_values_fit() {
    for (dtype, tokens) in [(Dtype::U8, 24), (Dtype::U16, 40), (Dtype::U32, 72), (Dtype::U64, 136)] {
        let width = dtype.lane_bytes();
        for lanes in [1, 31, 32, 33, 64] {
            for token in 1..tokens {
                let least = least_value(token as u8);
                let extra = (1 << extra_bits(token as u8)) - 1;
                for value in [least, least + extra / 3, least + extra] {
                    let base = vec![0; lanes * width];
                    let mut target = base.clone();
                    with_lane!(width, L => {
                        let lane = |lane: &mut _| *lane = L::apply(L::default(), L::truncate(value), dtype.order()).store();
                        lanes_of_mut::<L>(&mut target).iter_mut().for_each(lane);
                    });
                    for states_log2 in [0, 5] {
                        let set = one_token(token);
                        let shape = Shape { states_log2, context_count: 1, classes: vec![1], ..Shape::default() };
                        let payload = model::encode(dtype, Some(&set), &shape, &base, &target).unwrap();
                        assert_decodes(&mut decoders(), dtype, Some(&set), &payload, &base, &target);
                    }
                }
            }
            for token in tokens..MAX_TOKENS {
                for (states_log2, states) in [(0, 1), (5, 32)] {
                    // Words in plenty, so that it is the value that is wrong.
                    let mut header = [0; HEADER];
                    (header[STATES], header[CONTEXT_COUNT]) = (states_log2, 1);
                    let payload = [&header[..], &[1, 0], &[0, 0, 1, 0].repeat(states + 1000)].concat();
                    let (base, target) = (vec![0; lanes * width], vec![1; lanes * width]);
                    let chunk = Chunk { dtype, tables: Some(one_token(token)), base, target, payload };
                    assert_refused(&chunk, &chunk.payload, Rule::PayloadDeltas);
                }
            }
        }
    }
}

/// Counts and sizes that promise far more than there is: refused for what is missing.
#[test]
fn promises_of_much_are_refused() {
    let lanes = 4 << 20;
    let base = vec![0; lanes];
    let set = TableSet::new(&[flat(2, 100)]);
    let refused = |header: [u8; HEADER], rest: &[u8], rule: Rule| {
        let payload = [&header[..], rest].concat();
        for mut decoder in decoders() {
            let found = decode(&mut decoder, Dtype::U8, Some(&set), lanes as u32, &payload, &base);
            assert_eq!(found.unwrap_err().rule(), Some(rule));
        }
    };
    let exceptions = (lanes as u32).to_le_bytes();
    let mut header = [0; HEADER];
    header[CONTEXT_COUNT] = 1;
    header[EXCEPTIONS..CENTER].copy_from_slice(&exceptions);
    refused(header, &[0; 9], Rule::PayloadSize);
    header[EXCEPTIONS..CENTER].fill(0);
    header[LOW_BITS] = 8;
    refused(header, &[0; 1000], Rule::PayloadSize);
    header[LOW_BITS] = 0;
    header[SEGMENTS] = 5;
    header[STATES] = 5;
    refused(header, &[0; 100], Rule::PayloadSize);
    refused(header, &[&[0][..], &[255; 4 * 31], &[0], &[1; 200]].concat(), Rule::PayloadSize);
    // All lanes are coded, and the words for them end at once.
    header[SEGMENTS] = 0;
    refused(header, &[&[1, 0][..], &[1; 4 * 32]].concat(), Rule::PayloadStream);
    // All lanes are coded and unchanged.
    let flat = TableSet::new(&[flat(1, 1)]);
    let payload = [&header[..], &[1, 0], &[0, 0, 1, 0].repeat(32)].concat();
    for mut decoder in decoders() {
        let found = decode(&mut decoder, Dtype::U8, Some(&flat), 1, &payload, &base);
        assert_eq!(found.unwrap_err().rule(), Some(Rule::PayloadDeltas));
        assert!(decode(&mut decoder, Dtype::U8, Some(&flat), 0, &payload, &base).is_ok_and(|(_, lanes)| lanes == base));
    }
}

/// One decoder for chunks of all kinds and sizes, and for payloads that end in an error, gives what a fresh one gives.
#[test]
fn nothing_is_left_behind() {
    let mut random = Random::new(8);
    let mut chunks = samples();
    for (dtype, lanes) in [(Dtype::F64, 9000), (Dtype::U8, 20_000), (Dtype::Bf16, 4096), (Dtype::F32, 33)] {
        let before = chunks.len();
        while chunks.len() < before + 2 {
            let shape = shape(&mut random, 5, 0, 1);
            chunks.extend(Chunk::new(&mut random, dtype, lanes, shape));
        }
    }
    let mut decoders = decoders();
    for round in 0..2000 {
        let chunk = &chunks[random.below(chunks.len() as u64) as usize];
        chunk.assert_decodes(&mut decoders);
        if round % 3 == 0 {
            let chunk = &chunks[random.below(chunks.len() as u64) as usize];
            let mut payload = chunk.payload.clone();
            let at = HEADER + random.below((payload.len() - HEADER) as u64) as usize;
            payload[at] ^= 1 << random.below(8);
            chunk.assert_as_model(&mut decoders, chunk.changed(), &payload);
        }
    }
}
