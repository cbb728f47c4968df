//! Tests that each violation is reported with its rule.

use super::*;
use crate::codec::conditioned::tables::{base_value, extra_bits};
use crate::error::Rule;
use crate::lane::{Lane, Order, lanes_of_mut};
use crate::prelude::*;

/// Returns a chunk of 2,200 BF16 lanes, which are three tiles. The exponents 0 to 3 alternate every four lanes. `changes` lists
/// position and delta of each change.
fn example(shape: Shape, changes: &[(usize, u16)]) -> Chunk {
    let set = TableSet::new(&[flat(16, 100), flat(70, 50)]);
    let base: Vec<u8> = (0..2200u16).flat_map(|lane| (lane << 5 & 0x1FF).to_le_bytes()).collect();
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

/// Breaks payloads in each possible way, and checks the reported rule.
#[test]
fn rules_are_told_apart() {
    // The exponents 1 and 2 are coded. So the change of lane 0 is an exception.
    let plain = Shape { context_count: 3, classes: vec![0, 1, 2], ..Shape::default() };
    let split = Shape { activity_bits: 1, activities: vec![0, 1, 1], segments_log2: 1, states_log2: 2, ..plain.clone() };
    let low = Shape { low_bits: 5, center: 100, classes: vec![], ..plain.clone() };
    let changes = [(0, 9), (5, 3), (6, 1), (1338, 7)];
    let chunks = [example(plain, &changes), example(split, &changes), example(low, &[(3, 9), (100, 31)])];
    for chunk in &chunks {
        chunk.assert_decodes(&mut decoders());
    }
    let listed = HEADER + 2; // position and delta of the exception, 6 bytes, after a map of 2 bytes
    let activities = HEADER + 4; // 3 bytes, after two maps
    let sizes = activities + 3 + 6; // size of segment 0, a u32, after the activities and an exception; a byte of padding follows
    let low = HEADER + 2; // 2,200 lanes of 5 low bits: 1,375 bytes, and a byte of padding
    let streams = [listed + 6, sizes + 5, low + 1376];
    let last = chunks[0].payload.len() - 1;
    for (chunk, at, bytes, rule) in [
        (0, LOW_BITS, &[17][..], Rule::PayloadHeader),
        (0, STATES, &[6], Rule::PayloadHeader),
        (0, SEGMENTS, &[2], Rule::PayloadHeader),
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
        (1, activities + 2, &[0x07], Rule::PayloadSize),
        (1, sizes + 4, &[1], Rule::PayloadSize),
        (1, sizes, &[255; 4], Rule::PayloadSize),
        (1, sizes, &[7, 0, 0, 0], Rule::PayloadStream),
        (0, streams[0], &[255, 255, 0, 0], Rule::PayloadStream),
        (1, streams[1] + 4, &[255, 255, 0, 0], Rule::PayloadStream),
        (2, streams[2], &[1], Rule::PayloadStream),
        (0, last, &[!chunks[0].payload[last]], Rule::PayloadStream),
        (0, listed, &[0x98, 8], Rule::PayloadPositions),
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
    // Two exceptions whose positions are swapped or equal.
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
    // One more byte is half a word. Two more bytes are a word that is not read.
    assert_refused(&chunks[0], &[&chunks[0].payload[..], &[0]].concat(), Rule::PayloadSize);
    assert_refused(&chunks[0], &[&chunks[0].payload[..], &[0, 0]].concat(), Rule::PayloadStream);
    assert_refused(&chunks[0], &chunks[0].payload[..last - 1], Rule::PayloadStream);
    assert_refused(&chunks[0], &chunks[0].payload[..HEADER - 1], Rule::PayloadSize);
}

/// A payload may have one segment per tile. More segments than tiles are refused.
#[test]
fn a_segment_has_a_tile() {
    for (dtype, tile) in [(Dtype::U8, 1024), (Dtype::U16, 1024), (Dtype::U32, 512), (Dtype::U64, 256)] {
        for segments_log2 in 0..5 {
            let width = dtype.lane_bytes();
            let lanes = (tile << segments_log2) - tile + 1;
            let base = vec![0; lanes * width];
            let mut target = base.clone();
            target[0] = 1;
            let shape = Shape { segments_log2, context_count: 1, ..Shape::default() };
            let payload = model::encode(dtype, None, &shape, &base, &target).unwrap();
            let mut chunk = Chunk { dtype, tables: None, base, target, payload };
            chunk.assert_decodes(&mut decoders());
            // With one tile less, the header is refused before other parts are read.
            chunk.base.truncate(chunk.base.len() - width);
            chunk.target.truncate(chunk.base.len());
            if segments_log2 > 0 {
                assert_refused(&chunk, &chunk.payload, Rule::PayloadHeader);
            }
        }
    }
}

/// Every token whose values fit in a lane is decoded, with small and large values. Larger tokens are refused.
#[test]
fn the_largest_values_fit() {
    for (dtype, tokens) in [(Dtype::U8, 68), (Dtype::U16, 84), (Dtype::U32, 116), (Dtype::U64, 180)] {
        let width = dtype.lane_bytes();
        for lanes in [1, 31, 32, 33, 64] {
            for token in 1..tokens {
                let least = base_value(token as u8);
                let extra = (1 << extra_bits(token as u8)) - 1;
                for value in [least, least + extra / 3, least + extra] {
                    let base = vec![0; lanes * width];
                    let mut target = base.clone();
                    with_lane!(width, L => {
                        let lane = |lane: &mut _| *lane = L::apply(L::default(), L::from_u64(value), dtype.order()).store();
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
                    // The stream has enough words, so only the value is invalid.
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

/// Counts and sizes far beyond the end of the payload are refused.
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
    // All lanes are coded, but the stream has no words.
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
