//! Tests that decoding gives back the encoded lanes.

use super::*;
use crate::prelude::*;

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
                        // Maximum size of a payload (section 6 of the format).
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
fn what_a_payload_is_appended_to_changes_nothing() {
    let (mut encoder, mut random) = (Encoder::default(), Random::new(6));
    for dtype in [Dtype::Bf16, Dtype::F32, Dtype::U8] {
        let base = random.lanes(dtype, 9000);
        let target = random.changed(dtype, &base, 40);
        let tables = trained(dtype, 0, &base, &target);
        let alone = encode(&mut encoder, dtype, tables.as_ref(), 0, &base, &target);
        let mut payload = vec![0xEE; 1 << 20];
        let mut masks = Vec::new();
        let difference = Difference::find(dtype, &base, &target, &mut masks);
        with_lane!(dtype.lane_bytes(), L => {
            encoder.encode::<L>(difference, tables.as_ref(), 0, DecodeCost::default(), &mut payload)
        });
        assert!(payload[1 << 20..] == alone, "{dtype}");
    }
}

#[test]
fn a_lane_that_no_sample_saw_unchanged_comes_back() {
    // The tables lack a token for 0, and one of many lanes does not change.
    let tables = one_token(1);
    let base = vec![0x77; 1 << 18];
    for unchanged in [5, 700, 5 * 128 + 3, 99_000] {
        let target: Vec<u8> = base.chunks(2).flat_map(|lane| (u16::from_le_bytes([lane[0], lane[1]]) - 1).to_le_bytes()).collect();
        let target = [&target[..2 * unchanged], &base[..2], &target[2 * unchanged + 2..]].concat();
        let payload = encode(&mut Encoder::default(), Dtype::U16, Some(&tables), 0, &base, &target);
        assert_decodes(&mut decoders(), Dtype::U16, Some(&tables), &payload, &base, &target);
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

/// An encoder keeps the look-up of its table set, and its buffers. This must not affect later payloads.
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

#[test]
fn all_states_segments_and_activities_come_back() {
    let mut random = Random::new(4);
    let mut decoders = decoders();
    let mut coded = 0;
    for states_log2 in 0..=5 {
        for segments_log2 in 0..=5 {
            for activity_bits in 0..=2 {
                for (dtype, lanes) in [
                    (Dtype::Bf16, 33_000),
                    (Dtype::F32, 512 << segments_log2),
                    (Dtype::F64, 8300),
                    (Dtype::I8, 40_000),
                    // One tile per segment. The last tile has one lane.
                    (Dtype::F16, (1024 << segments_log2) - 1023),
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
}
