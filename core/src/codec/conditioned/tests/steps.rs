//! Tests of the steps of a stream, on every platform with vector code for them.

use super::*;
use crate::codec::conditioned::encode;
use crate::codec::conditioned::tables::Lookup;
use crate::codec::simd::{DecodeTable, Fault, STEP, StreamSteps, Words};
use crate::format::ConditionedHeader;
use crate::prelude::*;
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

/// Decodes a step as section 4.5 defines it, from frequencies.
fn plain_step(
    classes: &[u8],
    set: &[Vec<u16>],
    tokens: usize,
    words: &mut Words<'_>,
    states: &mut [u32; STEP],
) -> Result<Vec<u64>, Fault> {
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
            return Err(Fault::Value);
        }
        *x = words.renormalize(u32::from(class[token]) * (*x / SCALE) + slot)?;
        found.push(token as u64);
    }
    let mut values: Vec<u64> = found.iter().map(|&t| if t < 64 { t } else { (2 + t % 2) << ((t - 64) / 2 + 5) }).collect();
    for round in 0..4 {
        for ((x, &token), value) in states.iter_mut().zip(&found).zip(&mut values) {
            let extra = if token < 64 { 0 } else { (token - 64) / 2 + 5 };
            let bits = extra.saturating_sub(16 * round).min(16);
            *value += u64::from(*x % (1 << bits)) << (16 * round);
            *x = words.renormalize(*x >> bits)?;
        }
    }
    Ok(values)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Arbitrary states and words decode to values, as long as no word is missing and all tokens are allowed.
    /// Two streams are decoded together as each alone.
    #[test]
    fn steps_are_the_same_on_every_path(
        classes in 1usize..16,
        most in proptest::sample::select(&[1usize, 2, 64, 65, 78, 84, 116][..]),
        allowed in proptest::sample::select(&[2usize, 64, 68, 84, 116][..]),
        steps in 0usize..40,
        count in proptest::sample::select(&[16, STEP][..]),
        size in prop_oneof![3 => Just(1 << 16), 1 => 0usize..3000],
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let set = random.set(classes, most);
        let mut lookup = Lookup::default();
        lookup.set(&set);
        let frequencies: Vec<_> = set.classes().map(<[u16]>::to_vec).collect();
        let coded: Vec<u8> = (0..count * steps).map(|_| 1 + random.below(classes as u64) as u8).collect();
        let mut initial = [0; STEP];
        initial.iter_mut().for_each(|x| *x = (random.any() as u32 >> random.below(16)).max(1 << 16));
        let stream: Vec<[u8; 2]> = (0..size).map(|_| (random.next() as u16 >> random.below(16)).to_le_bytes()).collect();

        let (mut states, mut words) = (initial, Words { words: &stream, read: 0 });
        let expected: Result<Vec<_>, _> =
            coded.chunks(count).map(|classes| plain_step(classes, &frequencies, allowed, &mut words, &mut states)).collect();
        let expected = expected.map(|values| values.concat());
        let other: Vec<u8> = coded.iter().rev().copied().collect();
        for platform in Platform::available().into_iter().filter(|platform| platform.has_steps()) {
            let table = DecodeTable { entries: &lookup.entries, tokens: allowed };
            let begin = || (initial, Words { words: &stream, read: 0 }, vec![U32::new(0xAAAA_AAAA); coded.len()], vec![0xAAAA; coded.len() / 16]);
            let (mut found_states, mut found_words, mut values, mut changed) = begin();
            let result = platform.decode_steps::<u32, 1>(
                count,
                table,
                [StreamSteps { words: &mut found_words, states: &mut found_states, classes: &coded, values: &mut values, changed: &mut changed }],
                None,
            );
            let (mut a, mut b, mut alone) = (begin(), begin(), begin());
            let alone_result = platform.decode_steps::<u32, 1>(
                count,
                table,
                [StreamSteps { words: &mut alone.1, states: &mut alone.0, classes: &other, values: &mut alone.2, changed: &mut alone.3 }],
                None,
            );
            let both = platform.decode_steps::<u32, 2>(
                count,
                table,
                [
                    StreamSteps { words: &mut a.1, states: &mut a.0, classes: &coded, values: &mut a.2, changed: &mut a.3 },
                    StreamSteps { words: &mut b.1, states: &mut b.0, classes: &other, values: &mut b.2, changed: &mut b.3 },
                ],
                None,
            );
            prop_assert_eq!(both.is_ok(), result.is_ok() && alone_result.is_ok());
            if both.is_ok() {
                prop_assert_eq!((&a.0, a.1.read, &a.2, &a.3), (&found_states, found_words.read, &values, &changed));
                prop_assert_eq!((b.0, b.1.read, b.2, b.3), (alone.0, alone.1.read, alone.2, alone.3));
            }
            match result {
                Ok(()) => {
                    prop_assert!(expected.as_ref().is_ok_and(|expected| expected.iter().copied().eq(values.iter().map(|&value| u64::from(value.get())))));
                    prop_assert_eq!((found_states, found_words.read), (states, words.read), "{:?}", platform);
                    let not_zero = |lanes: &[U32]| lanes.iter().rev().fold(0, |mask, value| mask << 1 | u16::from(value.get() != 0));
                    prop_assert!(values.chunks(16).map(not_zero).eq(changed));
                }
                // If a step has two errors, vector code can find the other error first.
                Err(broken) => {
                    prop_assert!(expected.is_err(), "{:?} on {:?}", broken, platform);
                    prop_assert!(broken != Fault::Value || most > allowed, "{:?}", platform);
                    prop_assert!(broken != Fault::Short || size < 1 << 16, "{:?}", platform);
                }
            }
        }
    }
}

/// Four states, with three coded lanes in the first tile and two in the second. The fourth state codes no lane.
#[test]
fn a_tile_begins_with_the_first_state() {
    let set = TableSet::new(&[flat(2, 2048)]);
    let coded = [(5, 1), (700, 0), (1023, 1), (1024, 1), (2000, 0)];
    let mut base = vec![0u16; 2048];
    coded.iter().for_each(|&(position, _)| base[position] = 0x80);
    let target: Vec<u8> =
        (0..).zip(&base).flat_map(|(i, lane)| (lane - u16::from(coded.contains(&(i, 1)))).to_le_bytes()).collect();
    let base: Vec<u8> = base.iter().flat_map(|lane| lane.to_le_bytes()).collect();
    // With 2,048 of 4,096 slots per token, bit 11 of a state is the token. Decoding removes this bit, and moves the bits above it
    // down by one.
    let states = [1 << 18 | 1 << 12 | 1 << 11, 1 << 18, 1 << 17 | 1 << 11, 1u32 << 16];
    let mut payload = vec![0; HEADER];
    (payload[STATES], payload[CONTEXT_COUNT]) = (2, 2);
    payload.extend([0x10, 0]);
    payload.extend(states.iter().flat_map(|state| state.to_le_bytes()));

    let shape = Shape { states_log2: 2, context_count: 2, classes: vec![0, 1], ..Shape::default() };
    assert_eq!(model::encode(Dtype::Bf16, Some(&set), &shape, &base, &target).as_ref(), Some(&payload));
    assert_decodes(&mut decoders(), Dtype::Bf16, Some(&set), &payload, &base, &target);
}

/// Changes are rare, and rarer in larger lanes. The weight of decoding time decides which lanes are coded.
#[test]
fn a_dear_lane_is_coded_less_often_and_streams_are_as_short_as_they_are_wanted() {
    let mut random = Random::new(7);
    let (mut base, mut target) = (Vec::new(), Vec::new());
    for _ in 0..1 << 18 {
        let exponent = random.below(8);
        let lane = ((110 + exponent) << 7 | random.below(128)) as u16;
        let moved = lane + u16::from(random.below(32 << exponent) == 0);
        base.extend(lane.to_le_bytes());
        target.extend(moved.to_le_bytes());
    }
    let tables = trained(Dtype::Bf16, 0, &base, &target);
    let mut encoder = Encoder::default();
    let [cheap, dear, short] = [(16, 1024, 80), (256, 1024, 80), (16, 512, 2)].map(|(lane, steps, state)| {
        let payload =
            encode_at(DecodeCost { lane, steps, state, streams: 1 }, &mut encoder, Dtype::Bf16, tables.as_ref(), 0, &base, &target);
        assert_decodes(&mut decoders(), Dtype::Bf16, tables.as_ref(), &payload, &base, &target);
        let (header, _) = ConditionedHeader::read_from_prefix(&payload).unwrap();
        (payload.len(), header.exception_count.get(), header.segments_log2)
    });
    assert!(dear.1 > 2 * cheap.1 && dear.0 > cheap.0, "{cheap:?} {dear:?}");
    assert!(short.2 > cheap.2 && short.0 > cheap.0, "{cheap:?} {short:?}");
}

/// A tenth of the lanes changes at random, then one lane in a thousand.
#[test]
fn a_chunk_has_the_wanted_streams_if_their_states_have_payload() {
    let mut random = Random::new(8);
    let mut encoder = Encoder::default();
    let mut segments = |one_in: u64, streams: usize| {
        let (mut base, mut target) = (Vec::new(), Vec::new());
        for _ in 0..1 << 15 {
            let lane = 0x3F80_0000 | random.below(1 << 23) as u32;
            let moved = lane ^ if random.below(one_in) == 0 { random.below(1 << 20) as u32 } else { 0 };
            base.extend(lane.to_le_bytes());
            target.extend(moved.to_le_bytes());
        }
        let tables = trained(Dtype::F32, 0, &base, &target);
        let cost = DecodeCost { steps: 512, state: 2, streams, ..DecodeCost::default() };
        let payload = encode_at(cost, &mut encoder, Dtype::F32, tables.as_ref(), 0, &base, &target);
        assert_decodes(&mut decoders(), Dtype::F32, tables.as_ref(), &payload, &base, &target);
        ConditionedHeader::read_from_prefix(&payload).unwrap().0.segments_log2
    };
    assert_eq!([segments(10, 1), segments(10, 8), segments(10, 2)], [2, 3, 2]);
    assert_eq!(segments(1000, 8), segments(1000, 1));
}

/// Exceptions are part of the size, but no stream has them.
#[test]
fn a_chunk_with_few_coded_lanes_has_few_streams() {
    let cost = DecodeCost { steps: 512, state: 2, streams: 8, ..DecodeCost::default() };
    let segments = |coded| encode::shape(coded, 1 << 20, 256, cost).1;
    assert_eq!([0, 100, 128 * 32, 200 * 32, 300 * 32, 1000 * 32].map(segments), [1, 1, 1, 2, 4, 8]);
}
