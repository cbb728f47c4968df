//! The model against the decoder, on chunks that are right.

use super::crc::{CrcTables, block_crc32};
use super::memory::Payload;
use super::shapes::{Shape, case_of, shapes};
use super::warp::WARP;
use super::writer::{Case, Random, random_lanes};
use super::{Config, Mode};
use crate::codec::conditioned::{Sample, Trainer};
use crate::codec::{ChunkEncoder, Coding};
use crate::lane::{Dtype, Lane, lanes_of_mut};
use proptest::prelude::*;

/// The chunk as the encoder would store it, with tables made for it.
fn encoded(dtype: Dtype, low_bits: u32, base: Vec<u8>, target: &[u8]) -> Case {
    let bits = 8 * dtype.lane_bytes() as u32;
    let mut trainer = Trainer::default();
    trainer.add(&Sample::gather(dtype, low_bits, &base, target));
    let set = trainer.finish(bits - low_bits, low_bits != 0);
    let mut payload = Vec::new();
    let coding = Coding::Conditioned { tables: set.as_ref(), low_bits };
    let encoded = ChunkEncoder::new().unwrap().encode(coding, dtype, &base, target, &mut payload).unwrap();
    let case = Case::new(dtype, set, base, target, payload);
    assert_eq!(case.num_deltas, encoded.num_deltas);
    case
}

#[test]
fn what_the_encoder_makes_of_every_dtype_and_density() {
    let mut n = 0;
    for &dtype in Dtype::ALL {
        for rarity in [1, 2, 9, 100, 3000] {
            for lanes in [1, 127, 4096, 10_001] {
                let (base, target) = random_lanes(&mut Random(n as u64), dtype, lanes, rarity);
                let case = encoded(dtype, 0, base, &target);
                assert_eq!(case.compare(n), (None, None));
                n += 1;
            }
        }
    }
}

#[test]
fn what_the_encoder_makes_without_a_base() {
    for (n, dtype) in [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::F64, Dtype::F8E4m3].into_iter().enumerate() {
        let (_, target) = random_lanes(&mut Random(n as u64), dtype, 5000, 1);
        let low_bits = dtype.mantissa_bits().unwrap() + 1;
        let mut case = encoded(dtype, low_bits, vec![0; target.len()], &target);
        assert_eq!(case.compare(n), (None, None));
        case.base.clear();
        assert_eq!(case.compare(n), (None, None));
    }
}

#[test]
fn unchanged_chunks_are_copied() {
    for (n, lanes) in [1, 7, 8, 255, 4096, 70_003].into_iter().enumerate() {
        let (base, _) = random_lanes(&mut Random(5), Dtype::Bf16, lanes, 1);
        let mut case = Case::new(Dtype::Bf16, None, base.clone(), &base, Vec::new());
        assert_eq!(case.compare(n), (None, None));
        case.base[0] ^= 1;
        assert!(case.compare(n).1.is_some());
    }
}

/// Every number of states with every number of segments, on blocks of every number of warps.
#[test]
fn every_shape() {
    for states_log2 in 0..6 {
        for segments_log2 in 0..6 {
            for warps_log2 in 0..5 {
                let n = usize::from(states_log2) * 100 + usize::from(segments_log2) * 10 + warps_log2;
                let case = case_of(Shape {
                    dtype: [Dtype::Bf16, Dtype::F32][n % 2],
                    lanes: 12_345,
                    rarity: 5,
                    classes: 7,
                    states_log2,
                    segments_log2,
                    activity_bits: n as u8 % 3,
                    low: 0,
                    all_tokens: true,
                    clash: false,
                    seed: n as u64,
                });
                let lanes = case.decode().unwrap();
                for decoder in 0..2 {
                    let config = Config { warps: 1 << warps_log2, decoder, backwards: decoder == 1 };
                    let (outcome, output) = case.model(config, Mode::OutOfPlace, 0, 0);
                    assert_eq!(super::rule(outcome.status), None);
                    assert!(output == lanes);
                }
            }
        }
    }
}

/// How a chunk of 2^20 lanes keeps a block busy: prints the numbers of the module's introduction, which depend on the encoder's
/// choices, and checks those that do not.
#[test]
fn steps_and_barriers_of_large_chunks() {
    let lanes = 1 << 20;
    let report = |name: &str, below: f32, by: f32| {
        let random = &mut Random(7);
        let mut uniform = move || (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
        // Normally distributed weights, of which those below a limit may move.
        let mut normal = || (-2.0 * uniform().max(1e-300).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        let weights: Vec<f32> = (0..lanes).map(|_| normal() as f32 * 0.02).collect();
        let moved: Vec<f32> = weights.iter().map(|w| if w.abs() < below { w + normal() as f32 * by } else { *w }).collect();
        let bf16 = |x: &f32| (x.to_bits().wrapping_add(0x8000) >> 16) as u16;
        let mut base = vec![0; 2 * lanes];
        let mut target = base.clone();
        for (lane, w) in lanes_of_mut::<u16>(&mut base).iter_mut().zip(&weights) {
            *lane = bf16(w).store();
        }
        for (lane, w) in lanes_of_mut::<u16>(&mut target).iter_mut().zip(&moved) {
            *lane = bf16(w).store();
        }
        let case = encoded(Dtype::Bf16, 0, base, &target);
        let expected = case.decode().unwrap();
        for warps in [8, 16] {
            let config = Config { warps, decoder: 3, backwards: false };
            let (outcome, output) = case.model(config, Mode::OutOfPlace, 0, 0);
            assert_eq!(outcome.status, 0);
            assert!(output == expected);
            let [_, states, segments, activity] = case.payload[..4].try_into().unwrap();
            let counts = outcome.counts;
            let turns = (1usize << segments).div_ceil(warps);
            // BF16 has at most 14 extra bits, so one round.
            assert!(counts.extra_rounds <= counts.steps && counts.searches <= 3 * counts.steps);
            assert!(counts.put_off <= 31 * counts.tiles && counts.barriers <= 3 * counts.tiles + turns);
            assert_eq!(counts.tiles, turns * lanes.div_ceil(turns * warps * 256));
            println!(
                "{name}, {warps} warps: {:.1} % changed, {} bytes, N = {}, S = {}, activity {activity}, K = {}: {:?}",
                100.0 * f64::from(case.num_deltas) / lanes as f64,
                case.payload.len(),
                1 << states,
                1 << segments,
                case.set.as_ref().unwrap().classes().len(),
                outcome.counts
            );
        }
    };
    report("sparse", 0.0009, 1e-6);
    report("sparse", 0.0018, 2e-6);
    report("middle", 1.0, 3e-6);
    report("dense", 1.0, 3e-4);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn any_choice_of_the_format(shape in shapes(), n in 0usize..1000) {
        prop_assert_eq!(case_of(shape).compare(n), (None, None));
    }

    #[test]
    fn crc_of_any_payload(mut bytes in proptest::collection::vec(any::<u8>(), 0..9000), warps_log2 in 0usize..5) {
        let (size, warps) = (bytes.len(), 1 << warps_log2);
        let expected = crc32fast::hash(&bytes);
        bytes.resize(size.next_multiple_of(16), 0x5A);
        prop_assert_eq!(block_crc32(&Payload::new(&bytes, size), &CrcTables::new(warps * WARP), warps), expected);
    }
}
