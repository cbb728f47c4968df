//! Tests with damaged payloads: the decoders give the same result as the model.

use super::*;
use crate::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// A valid payload in which header, maps or streams have arbitrary bytes.
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

    /// On streams of arbitrary words, decoding ends on every platform, with the result of the model.
    #[test]
    fn any_stream_ends(dtype in dtypes(), lanes in 1usize..5000, stream in proptest::collection::vec(any::<u16>(), 2..600), seed: u64) {
        let mut random = Random::new(seed);
        let shape = Shape { low_bits: 0, list_every: 0, ..shape(&mut random, 5, 0, 1) };
        let Some(mut chunk) = Chunk::new(&mut random, dtype, lanes, shape) else { return Ok(()) };
        // With equal base and target, a payload has only header, maps, activities and a stream.
        chunk.target.clone_from(&chunk.base);
        let start = HEADER + 2 * usize::from(chunk.payload[CONTEXT_COUNT]).div_ceil(2) + lanes.div_ceil(128).div_ceil(8);
        let mut payload = chunk.payload[..start].to_vec();
        payload[EXCEPTIONS..EXCEPTIONS + 4].fill(0);
        payload.resize(payload.len().next_multiple_of(2), 0);
        payload.extend(stream.iter().flat_map(|word| (word | 1).to_le_bytes()));
        chunk.assert_as_model(&mut decoders(), 1 + random.below(lanes as u64) as u32, &payload);
    }
}

/// Returns small payloads of all kinds.
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
    // Payloads of the library's encoder.
    for (dtype, low_bits, rate) in [(Dtype::Bf16, 0, 100), (Dtype::Bf16, 8, 1024), (Dtype::F32, 24, 500), (Dtype::I16, 0, 300)] {
        let base = random.lanes(dtype, 280);
        let target = random.changed(dtype, &base, rate);
        let tables = trained(dtype, low_bits, &base, &target);
        let payload = encode(&mut Encoder::default(), dtype, tables.as_ref(), low_bits, &base, &target);
        chunks.push(Chunk { dtype, tables, base, target, payload });
    }
    chunks
}

/// Even without the CRC, damage is found: a damaged payload is refused, or has another chunk sum, or still gives the target.
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

/// A decoder that has decoded other chunks and damaged payloads gives the same results as a new decoder.
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
