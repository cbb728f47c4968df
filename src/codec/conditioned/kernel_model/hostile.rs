//! The model against the decoder, on chunks that are wrong.

use super::memory::{Memory, Shared, Who};
use super::shapes::{Shape, case_of, shapes};
use super::writer::{Case, Plan, Random, random_lanes, random_set, write};
use super::{Config, Mode};
use crate::codec::conditioned::TableSet;
use crate::error::Rule;
use crate::lane::Dtype;
use proptest::prelude::*;

/// A chunk with something of everything: 700 lanes in 6 blocks, 5 contexts, 2 segments of 4 states.
fn rich(low_bits: u32) -> Case {
    let random = &mut Random(11);
    let dtype = Dtype::Bf16;
    let (base, target) = random_lanes(random, dtype, 701, 3);
    let set = random_set(random, 3, 16 - low_bits, true);
    let plan = Plan {
        low_bits,
        center: u32::from(low_bits != 0) * 5,
        states_log2: 2,
        segments_log2: 1,
        activity_bits: 1,
        first_context: 120,
        maps: vec![vec![1, 2, 3, 1, 2], vec![2, 0, 1, 0, 3]],
        activities: vec![0, 1, 1, 0, 0, 1],
        listed: 7,
        clash: None,
    };
    let payload = write(dtype, &plan, &set, &base, &target);
    Case::new(dtype, Some(set), base, &target, payload)
}

/// A payload that breaks one rule is refused under that rule by both.
#[test]
fn one_fault_at_a_time() {
    let check = |name: &str, rule: Rule, low_bits: u32, damage: &dyn Fn(&mut Case)| {
        let mut case = rich(low_bits);
        assert_eq!(case.compare(3), (None, None), "{name}: right without the damage");
        damage(&mut case);
        for n in 0..5 {
            assert_eq!(case.compare(n), (Some(rule), Some(rule)), "{name}");
        }
    };
    let edit = |name: &str, rule: Rule, low_bits: u32, edit: &dyn Fn(&mut Vec<u8>)| {
        check(name, rule, low_bits, &|case| {
            edit(&mut case.payload);
            case.sign();
        });
    };
    let set = |rule: Rule, low_bits: u32, at: usize, value: u8| {
        edit(&format!("byte {at} = {value}"), rule, low_bits, &|payload| payload[at] = value);
    };
    let word = |payload: &[u8], at: usize| u32::from_le_bytes(payload[at..at + 4].try_into().unwrap());
    // Where the parts of this payload are: header, maps of 3 bytes, activities, positions, deltas, low bits, one size.
    let listed = word(&rich(0).payload, 8) as usize;
    let positions = 16 + 6 + 1;
    let deltas = positions + 4 * listed;
    let sizes = deltas + 2 * listed;
    let streams = (sizes + 4).next_multiple_of(2);
    assert!(listed > 3 && streams == sizes + 5);

    check("a bit", Rule::PayloadCrc32, 0, &|case| case.payload[100] ^= 4);
    check("the record", Rule::PayloadCrc32, 0, &|case| case.crc32 ^= 1);
    check("padding", Rule::PayloadPadding, 0, &|case| case.padding = 1);

    for size in [0, 1, 3, 4, 15] {
        edit("no header", Rule::PayloadSize, 0, &|payload| payload.truncate(size));
    }
    edit("no sizes", Rule::PayloadSize, 0, &|payload| payload.truncate(streams - 2));
    edit("half a word", Rule::PayloadSize, 0, &|payload| payload.truncate(payload.len() - 1));
    set(Rule::PayloadSize, 0, streams - 1, 1);
    set(Rule::PayloadSize, 0, 22, 0x40 | rich(0).payload[22]);
    edit("low bits past the last lane", Rule::PayloadSize, 3, &|payload| {
        let listed = word(payload, 8) as usize;
        // 701 · 3 bits are 262 bytes and 7 bits.
        payload[positions + 6 * listed + 262] |= 0x80;
    });

    for (at, value) in [(0, 17), (0, 255), (1, 6), (2, 6), (2, 3), (3, 3), (6, 0), (6, 65), (7, 1), (10, 1), (12, 1), (15, 1)] {
        set(Rule::PayloadHeader, 0, at, value);
    }
    set(Rule::PayloadHeader, 3, 13, 0x20);

    set(Rule::PayloadClasses, 0, 16, 0x24);
    set(Rule::PayloadClasses, 0, 21, 0x13);

    set(Rule::PayloadSize, 0, sizes + 3, 255);
    set(Rule::PayloadStream, 0, streams + 2, 0);
    edit("a word too many", Rule::PayloadStream, 0, &|payload| payload.extend([0, 0]));
    edit("a word missing", Rule::PayloadStream, 0, &|payload| payload.truncate(payload.len() - 2));

    edit("not below L", Rule::PayloadPositions, 0, &|payload| payload[deltas - 4..deltas].copy_from_slice(&701u32.to_le_bytes()));
    edit("far", Rule::PayloadPositions, 0, &|payload| payload[deltas - 1] = 255);
    edit("twice", Rule::PayloadPositions, 0, &|payload| payload.copy_within(positions..positions + 4, positions + 4));
    edit("no delta", Rule::PayloadDeltas, 0, &|payload| payload[deltas..deltas + 2].fill(0));
    check("fewer changes", Rule::PayloadDeltas, 0, &|case| case.num_deltas += 1);
    check("more changes", Rule::PayloadDeltas, 0, &|case| case.num_deltas -= 1);

    check("another base", Rule::ChunkBaseSum, 0, &|case| case.base[77] ^= 1);
    check("another base's sum", Rule::ChunkBaseSum, 0, &|case| case.base_sum ^= 1 << 40);
    check("another target", Rule::ChunkTargetSum, 0, &|case| case.target_sum += 1);
    edit("another delta", Rule::ChunkTargetSum, 0, &|payload| payload[deltas] ^= 2);
}

/// Every coded lane in turn is listed too: those whose step is complete in their tile, and those that are put off.
#[test]
fn each_lane_changed_twice() {
    let (dtype, lanes) = (Dtype::Bf16, 1000);
    let (base, target) = random_lanes(&mut Random(1), dtype, lanes, 1);
    let set = random_set(&mut Random(2), 1, 16, true);
    for lane in 0..lanes {
        // Two contexts of three are coded, so that tiles of 256 lanes do not end with their steps.
        let plan = Plan {
            low_bits: 0,
            center: 0,
            states_log2: 5,
            segments_log2: 0,
            activity_bits: 0,
            first_context: 0,
            maps: vec![(0..64).map(|context| u8::from(context % 3 != 0)).collect()],
            activities: Vec::new(),
            listed: usize::MAX,
            clash: Some(lane),
        };
        let payload = write(dtype, &plan, &set, &base, &target);
        let mut case = Case::new(dtype, Some(set.clone()), base.clone(), &target, payload);
        case.num_deltas += 1;
        let (expected, found) = case.compare(0);
        assert_eq!(expected, found);
    }
}

/// Values that do not fit: a set for wide lanes, used by narrow ones.
#[test]
fn values_that_do_not_fit() {
    let flat = vec![30u16; 136];
    let mut class = flat.clone();
    class[0] += 16;
    let set = TableSet::new(&[class]);
    let plan = Plan {
        low_bits: 0,
        center: 0,
        states_log2: 0,
        segments_log2: 0,
        activity_bits: 0,
        first_context: 0,
        maps: vec![vec![1]],
        activities: Vec::new(),
        listed: usize::MAX,
        clash: None,
    };
    for (dtype, largest) in [(Dtype::U8, 23u32), (Dtype::Bf16, 39), (Dtype::F32, 71), (Dtype::F64, 135)] {
        let base = vec![0; dtype.lane_bytes()];
        let target: Vec<u8> = base.iter().map(|_| 0x77).collect();
        let right = Case::new(dtype, Some(set.clone()), base.clone(), &target, write(dtype, &plan, &set, &base, &target));
        assert_eq!(right.compare(0), (None, None));
        if largest < 135 {
            let mut case = right;
            let at = case.payload.len().min(18);
            let slot = 30 * (largest + 1) + 16;
            case.payload[at..at + 4].copy_from_slice(&(1 << 16 | slot).to_le_bytes());
            case.sign();
            assert_eq!(case.compare(0), (Some(Rule::PayloadDeltas), Some(Rule::PayloadDeltas)));
        }
    }
}

/// A chunk like those of [`shapes`], small enough to be damaged often.
fn small() -> impl Strategy<Value = Shape> {
    shapes().prop_map(|shape| Shape { lanes: 1 + shape.lanes % 3000, ..shape })
}

/// Where to flip a bit, which one, and whether early in the payload.
fn flips() -> impl Strategy<Value = Vec<(prop::sample::Index, u8, bool)>> {
    proptest::collection::vec((any::<prop::sample::Index>(), 0u8..8, any::<bool>()), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// Lanes that change by a value and by an exception, the value before or after the exception's tile.
    #[test]
    fn changed_twice(shape in shapes(), n in 0usize..1000) {
        let mut case = case_of(Shape { clash: true, ..shape });
        let (expected, found) = case.compare(n);
        case.num_deltas += 1;
        let (next_expected, next_found) = case.compare(n);
        // The lane may have been listed already, and then nothing is wrong with it but the number of changes.
        if expected.is_none() {
            prop_assert_eq!((next_expected, next_found), (Some(Rule::PayloadDeltas), Some(Rule::PayloadDeltas)));
        } else {
            prop_assert_eq!((next_expected, next_found), (Some(Rule::PayloadPositions), Some(Rule::PayloadPositions)));
            prop_assert!(found.is_some());
        }
    }

    #[test]
    fn flipped_bits(shape in small(), flips in flips(), n in 0usize..1000) {
        let mut case = case_of(shape);
        for (at, bit, early) in flips {
            // Half of them where the small parts are.
            let end = if early { case.payload.len().min(64) } else { case.payload.len() };
            case.payload[at.index(end)] ^= 1 << bit;
        }
        case.compare(n);
        case.sign();
        case.compare(n);
    }

    #[test]
    fn cut_short_or_too_long(shape in small(), size in any::<prop::sample::Index>(), more in 0usize..40, n in 0usize..1000) {
        let mut case = case_of(shape);
        let size = size.index(case.payload.len() + more + 1);
        case.payload.resize(size, more as u8);
        case.sign();
        case.compare(n);
    }

    /// Streams of anything behind a right header.
    #[test]
    fn any_stream(shape in small(), seed: u64, part in 1usize..5, n in 0usize..1000) {
        let mut case = case_of(shape);
        let random = &mut Random(seed);
        let size = case.payload.len();
        case.payload[size - size / part..].iter_mut().skip(22).for_each(|byte| *byte = random.bits() as u8);
        case.sign();
        case.compare(n);
    }

    #[test]
    fn any_payload(shape in small(), bytes in proptest::collection::vec(any::<u8>(), 0..300), plausible: bool, n in 0usize..1000) {
        let mut case = case_of(shape);
        let header: [u8; 16] = std::array::from_fn(|i| case.payload[i]);
        case.payload = bytes;
        if plausible {
            case.payload.splice(0..case.payload.len().min(16), header);
        }
        case.sign();
        case.compare(n);
    }

    /// A base with a changed lane is a wrong base, however the stream then ends.
    #[test]
    fn another_base(shape in small(), at in any::<prop::sample::Index>(), bit in 0u8..8, n in 0usize..1000) {
        let mut case = case_of(shape);
        prop_assume!(!case.base.is_empty());
        let at = at.index(case.base.len());
        case.base[at] ^= 1 << bit;
        prop_assert_eq!(case.compare(n), (Some(Rule::ChunkBaseSum), Some(Rule::ChunkBaseSum)));
    }
}

/// A set of one class without tokens but that of the value 0, for chunks that have nothing coded: no step ever reads a word.
#[test]
fn nothing_coded() {
    let (base, target) = random_lanes(&mut Random(3), Dtype::F32, 3000, 500);
    let plan = Plan {
        low_bits: 0,
        center: 0,
        states_log2: 5,
        segments_log2: 4,
        activity_bits: 0,
        first_context: 0,
        maps: vec![vec![0]],
        activities: Vec::new(),
        listed: 1,
        clash: None,
    };
    let set = TableSet::new(&[vec![4096]]);
    let payload = write(Dtype::F32, &plan, &set, &base, &target);
    for set in [None, Some(set)] {
        let mut case = Case::new(Dtype::F32, set, base.clone(), &target, payload.clone());
        assert_eq!(case.compare(1), (None, None));
        let last = case.payload.len() - 1;
        case.payload[last] = 1;
        case.sign();
        assert_eq!(case.compare(1), (Some(Rule::PayloadStream), Some(Rule::PayloadStream)));
    }
}

/// What the model is for: it panics where a device would read or write what it must not.
mod faults_of_a_kernel {
    use super::*;

    const ME: Who = Who { group: 0, phase: 1, warp: 0 };
    const OTHER: Who = Who { group: 0, phase: 1, warp: 1 };

    fn memory(mode: Mode, at: usize) -> Memory {
        Memory::new::<u16>(mode, &[0; 64], 32, at, at)
    }

    #[test]
    #[should_panic(expected = "a race")]
    fn a_missing_barrier() {
        let mut shared = Shared::new(1);
        shared.set(ME, 0, 1);
        shared.get(OTHER, 0);
    }

    #[test]
    #[should_panic(expected = "a race")]
    fn a_missing_barrier_before_a_write() {
        let mut shared = Shared::new(1);
        shared.set(Who { phase: 0, ..ME }, 0, 1);
        shared.get(ME, 0);
        shared.get(OTHER, 0);
        shared.set(ME, 0, 1);
    }

    #[test]
    #[should_panic(expected = "read before it is written")]
    fn nothing_there() {
        Shared::<u8>::new(1).get(ME, 0);
    }

    #[test]
    #[should_panic(expected = "a race of two groups")]
    fn two_groups() {
        let mut memory = memory(Mode::InPlace, 0);
        memory.store_lane(ME, 3, 7u16);
        memory.load::<u16>(Who { group: 1, ..OTHER }, 0, 8);
    }

    #[test]
    #[should_panic(expected = "out of bounds")]
    fn past_the_end() {
        memory(Mode::OutOfPlace, 0).store_lane(ME, 32, 7u16);
    }

    #[test]
    fn a_barrier_in_between() {
        let mut shared = Shared::new(1);
        shared.set(ME, 0, 1);
        assert_eq!(shared.get(Who { phase: 2, ..OTHER }, 0), 1);
    }

    #[test]
    fn accesses_are_as_wide_as_the_address_allows() {
        for (at, accesses) in [(0, 1), (16, 1), (8, 2), (4, 4), (2, 8), (6, 8)] {
            let mut memory = memory(Mode::Dry, at);
            memory.load::<u16>(ME, 8, 8);
            assert_eq!(memory.wide, accesses);
        }
    }

    /// The order of warps and the choice of the one that decodes are not seen in the outcome.
    #[test]
    fn any_warp_can_decode() {
        let case = rich(0);
        let config = Config { warps: 16, decoder: 0, backwards: false };
        let expected = case.model(config, Mode::OutOfPlace, 0, 0);
        for decoder in 1..16 {
            assert_eq!(case.model(Config { decoder, ..config }, Mode::OutOfPlace, 0, 0), expected);
        }
    }
}
