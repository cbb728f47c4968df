//! Chunks with one fault each, and the violated rule.

use super::writer::{Plan, random_set, tile, write};
use super::{Case, Random, random_lanes};
use std::cell::RefCell;
use tpde_core::codec::TableSet;
use tpde_core::codec::conditioned::tokens_within;
use tpde_core::error::Rule;
use tpde_core::lane::{Dtype, Lane, lanes_of_mut, with_lane};

/// A chunk, and the rule that it violates. `None` if the chunk is valid.
pub struct Fault {
    pub name: String,
    pub case: Case,
    pub rule: Option<Rule>,
}

/// Returns all faults.
pub fn all() -> Vec<Fault> {
    [
        one_at_a_time(),
        changed_twice(),
        values_that_do_not_fit(),
        values_that_do_not_fit_in_any_tile(),
        full_lists(),
        low_bits_at_the_end(),
        nothing_coded(),
        changed_by_low_bits_twice(),
        changed_and_back(),
        exceptions(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns a chunk that uses all features: 2,725 lanes in 22 blocks and 3 tiles, 5 contexts, 2 segments of 4 states.
fn rich(low_bits: u32) -> Case {
    let random = &mut Random(11);
    let dtype = Dtype::Bf16;
    let (base, target) = random_lanes(random, dtype, 2725, 3);
    let set = random_set(random, 3, 16 - low_bits, true);
    let plan = Plan {
        low_bits,
        center: u32::from(low_bits != 0) * 5,
        states_log2: 2,
        segments_log2: 1,
        activity_bits: 1,
        first_context: 120,
        maps: vec![vec![1, 2, 3, 1, 2], vec![2, 0, 1, 0, 3]],
        activities: (0..22).map(|block| block % 5 % 2).collect(),
        listed: 7,
        clash: None,
        too_large: None,
    };
    let payload = write(dtype, &plan, &set, &base, &target);
    Case::new(dtype, Some(set), base, &target, payload)
}

/// Payloads that violate one rule.
fn one_at_a_time() -> Vec<Fault> {
    let faults = RefCell::new(Vec::new());
    for low_bits in [0, 3] {
        faults.borrow_mut().push(Fault { name: format!("rich, {low_bits} low bits"), case: rich(low_bits), rule: None });
    }
    let check = |name: &str, rule: Rule, low_bits: u32, damage: &dyn Fn(&mut Case)| {
        let mut case = rich(low_bits);
        damage(&mut case);
        faults.borrow_mut().push(Fault { name: name.into(), case, rule: Some(rule) });
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
    // Offsets of the parts of this payload: header, maps of 3 bytes, activities of 3, positions, deltas, low bits, one size.
    let listed = word(&rich(0).payload, 8) as usize;
    let positions = 16 + 6 + 3;
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
    set(Rule::PayloadSize, 0, 24, 0x40 | rich(0).payload[24]);
    edit("low bits past the last lane", Rule::PayloadSize, 3, &|payload| {
        let listed = word(payload, 8) as usize;
        // 2,725 · 3 bits are 1,021 bytes and 7 bits.
        payload[positions + 6 * listed + 1021] |= 0x80;
    });

    for (at, value) in [(0, 17), (0, 255), (1, 6), (2, 6), (2, 2), (3, 3), (6, 0), (6, 65), (7, 1), (10, 1), (12, 1), (15, 1)] {
        set(Rule::PayloadHeader, 0, at, value);
    }
    set(Rule::PayloadHeader, 3, 13, 0x20);

    set(Rule::PayloadClasses, 0, 16, 0x24);
    set(Rule::PayloadClasses, 0, 21, 0x13);

    set(Rule::PayloadSize, 0, sizes + 3, 255);
    set(Rule::PayloadStream, 0, streams + 2, 0);
    edit("a word too many", Rule::PayloadStream, 0, &|payload| payload.extend([0, 0]));
    edit("a word missing", Rule::PayloadStream, 0, &|payload| payload.truncate(payload.len() - 2));

    edit("not below L", Rule::PayloadPositions, 0, &|payload| payload[deltas - 4..deltas].copy_from_slice(&2725u32.to_le_bytes()));
    edit("far", Rule::PayloadPositions, 0, &|payload| payload[deltas - 1] = 255);
    edit("twice", Rule::PayloadPositions, 0, &|payload| payload.copy_within(positions..positions + 4, positions + 4));
    edit("no delta", Rule::PayloadDeltas, 0, &|payload| payload[deltas..deltas + 2].fill(0));
    check("fewer changes", Rule::PayloadDeltas, 0, &|case| case.num_deltas += 1);
    check("more changes", Rule::PayloadDeltas, 0, &|case| case.num_deltas -= 1);

    check("another base", Rule::ChunkBaseSum, 0, &|case| case.base[77] ^= 1);
    check("another base's sum", Rule::ChunkBaseSum, 0, &|case| case.base_sum ^= 1 << 40);
    check("another target", Rule::ChunkTargetSum, 0, &|case| case.target_sum += 1);
    edit("another delta", Rule::ChunkTargetSum, 0, &|payload| payload[deltas] ^= 2);
    faults.into_inner()
}

/// Returns a plan with one class for all lanes, and no optional features.
fn plain(maps: Vec<Vec<u8>>) -> Plan {
    Plan {
        low_bits: 0,
        center: 0,
        states_log2: 5,
        segments_log2: 0,
        activity_bits: 0,
        first_context: 0,
        maps,
        activities: Vec::new(),
        listed: usize::MAX,
        clash: None,
        too_large: None,
    }
}

/// Coded lanes that also have an exception, one per case. They are in whole steps, and in the shorter steps at the end of tiles.
fn changed_twice() -> Vec<Fault> {
    let (dtype, lanes) = (Dtype::Bf16, 1300);
    let (base, target) = random_lanes(&mut Random(1), dtype, lanes, 1);
    let set = random_set(&mut Random(2), 1, 16, true);
    // Two of three contexts are coded, so that tiles end with partial steps.
    let maps = vec![(0..64).map(|context| u8::from(context % 3 != 0)).collect()];
    let fault = |lane| {
        let plan = Plan { clash: Some(lane), ..plain(maps.clone()) };
        let payload = write(dtype, &plan, &set, &base, &target);
        let mut case = Case::new(dtype, Some(set.clone()), base.clone(), &target, payload);
        case.num_deltas += 1;
        // A lane that is not coded already has an exception, so the number of changes is wrong.
        Fault { name: format!("lane {lane} changed twice"), rule: case.decode().err(), case }
    };
    (0..lanes).step_by(23).chain(lanes - 20..lanes).map(fault).collect()
}

/// Values that do not fit: narrow lanes with a table set for wide lanes.
fn values_that_do_not_fit() -> Vec<Fault> {
    let mut class = vec![20u16; 180];
    class[0] += 496;
    let set = TableSet::new(&[class]);
    let plan = Plan { states_log2: 0, ..plain(vec![vec![1]]) };
    let mut faults = Vec::new();
    for (dtype, largest) in [(Dtype::U8, 67u32), (Dtype::Bf16, 83), (Dtype::F32, 115), (Dtype::F64, 179)] {
        let base = vec![0; dtype.lane_bytes()];
        let target: Vec<u8> = base.iter().map(|_| 0x77).collect();
        let mut case = Case::new(dtype, Some(set.clone()), base.clone(), &target, write(dtype, &plan, &set, &base, &target));
        faults.push(Fault { name: format!("a value of {dtype}"), case: case.clone(), rule: None });
        if largest < 179 {
            let at = case.payload.len().min(18);
            let slot = 20 * (largest + 1) + 496;
            case.payload[at..at + 4].copy_from_slice(&(1 << 16 | slot).to_le_bytes());
            case.sign();
            faults.push(Fault { name: format!("a value too large for {dtype}"), case, rule: Some(Rule::PayloadDeltas) });
        }
    }
    faults
}

/// A value that does not fit in one of several tiles, followed by valid values. The cases cover all ways to share segments among
/// warps.
fn values_that_do_not_fit_in_any_tile() -> Vec<Fault> {
    let mut faults = Vec::new();
    // Complete tiles with and without a base, and tiles of the general path.
    for (dtype, low_bits) in
        [(Dtype::Bf16, 8), (Dtype::Bf16, 5), (Dtype::F32, 12), (Dtype::Bf16, 0), (Dtype::F32, 0), (Dtype::I16, 0)]
    {
        // A warp has several tiles of a shared segment, or of its own.
        for (segments_log2, tiles) in [(0u8, 17), (3, 24), (4, 48)] {
            let random = &mut Random(u64::from(low_bits) + 100 * u64::from(segments_log2));
            let bits = 8 * dtype.lane_bytes() as u32 - low_bits;
            let lanes = tiles * tile(dtype);
            let mut base = vec![0; lanes * dtype.lane_bytes()];
            if low_bits == 0 {
                base.iter_mut().for_each(|byte| *byte = random.bits() as u8);
            }
            // All other values are 0 or 1, so that no other tile has extra bits.
            let mut class = vec![0u16; tokens_within(bits) + 1];
            class[0] = 4094;
            class[1] = 1;
            class[tokens_within(bits)] = 1;
            let set = TableSet::new(&[class]);
            for at in [0, tiles / 2, tiles - 1] {
                // The adjacent lane changes. The chunk has no other fault.
                let lane = at * tile(dtype) + 77;
                let mut target = base.clone();
                with_lane!(dtype.lane_bytes(), L => {
                    let changed = &mut lanes_of_mut::<L>(&mut target)[lane + 1];
                    *changed = L::apply(L::load(*changed), L::from_u64(1), dtype.order()).store();
                });
                let plan = Plan { low_bits, segments_log2, first_context: u16::MAX, too_large: Some(lane), ..plain(vec![vec![1]]) };
                let payload = write(dtype, &plan, &set, &base, &target);
                let kept = if low_bits == 0 { base.clone() } else { Vec::new() };
                let case = Case::new(dtype, Some(set.clone()), kept, &target, payload);
                let name =
                    format!("a value too large in tile {at} of {tiles}, {dtype}, {low_bits} low bits, 2^{segments_log2} segments");
                faults.push(Fault { name, case, rule: Some(Rule::PayloadDeltas) });
            }
        }
    }
    faults
}

/// Exactly as many changes as a list can have, and more changes than the record states. Kernels must not write behind a list,
/// because the list of another chunk follows.
fn full_lists() -> Vec<Fault> {
    let mut faults = Vec::new();
    for (dtype, room) in [(Dtype::F8E4m3, 256usize), (Dtype::Bf16, 128), (Dtype::F32, 32)] {
        let width = dtype.lane_bytes();
        for (listed, more) in [(usize::MAX, 0), (usize::MAX, 1), (usize::MAX, 40), (2, 0), (2, 1), (2, 33)] {
            let random = &mut Random(room as u64);
            let lanes = 2 * tile(dtype) + 100;
            let base: Vec<u8> = (0..lanes * width).map(|_| random.bits() as u8).collect();
            let mut target = base.clone();
            with_lane!(width, L => for lane in lanes_of_mut::<L>(&mut target).iter_mut().step_by(lanes / 300).take(room + more) {
                *lane = L::apply(L::load(*lane), L::from_u64(3), dtype.order()).store();
            });
            let set = random_set(random, 1, 8 * width as u32, true);
            let plan = Plan { listed, first_context: u16::MAX, ..plain(vec![vec![1]]) };
            let payload = write(dtype, &plan, &set, &base, &target);
            let mut case = Case::new(dtype, Some(set), base, &target, payload);
            assert_eq!(case.num_deltas as usize, room + more);
            case.num_deltas = room as u32;
            let rule = (more != 0).then_some(Rule::PayloadDeltas);
            let of = if listed == 2 { "listed and coded" } else { "coded" };
            faults.push(Fault { name: format!("{} changes, {of}, in a list of {room} of {dtype}", room + more), case, rule });
        }
    }
    faults
}

/// Low bits at the end of the payload, or a few bytes before its end. Kernels read them word by word, and must not read past the
/// padding.
fn low_bits_at_the_end() -> Vec<Fault> {
    let mut faults = Vec::new();
    for (dtype, low_bits) in [(Dtype::Bf16, 3), (Dtype::Bf16, 8), (Dtype::Bf16, 16), (Dtype::F32, 9), (Dtype::F32, 32)] {
        let lanes = 2 * tile(dtype);
        let base = vec![0; lanes * dtype.lane_bytes()];
        let mut target = base.clone();
        target[0] = 2;
        let set = random_set(&mut Random(9), 1, 8 * dtype.lane_bytes() as u32 - low_bits, true);
        for entries in (1..33).step_by(2) {
            let plan = Plan { low_bits, first_context: u16::MAX, ..plain(vec![vec![1; entries]]) };
            let mut payload = write(dtype, &plan, &set, &base, &target);
            let end = 16 + entries.div_ceil(2) + lanes * low_bits as usize / 8;
            payload.truncate(end.next_multiple_of(2));
            let case = Case::new(dtype, Some(set.clone()), Vec::new(), &target, payload);
            let name = format!("{low_bits} low bits of {dtype} that end at byte {end}");
            faults.push(Fault { name, rule: case.decode().err(), case });
        }
    }
    faults
}

/// No step reads a word.
fn nothing_coded() -> Vec<Fault> {
    let (base, target) = random_lanes(&mut Random(3), Dtype::F32, 9000, 500);
    let plan = Plan { segments_log2: 4, listed: 1, ..plain(vec![vec![0]]) };
    let set = TableSet::new(&[vec![4096]]);
    let payload = write(Dtype::F32, &plan, &set, &base, &target);
    let mut faults = Vec::new();
    for (set, with) in [(None, "without tables"), (Some(set), "with tables")] {
        let mut case = Case::new(Dtype::F32, set, base.clone(), &target, payload.clone());
        faults.push(Fault { name: format!("nothing coded, {with}"), case: case.clone(), rule: None });
        let last = case.payload.len() - 1;
        case.payload[last] = 1;
        case.sign();
        faults.push(Fault { name: format!("nothing coded, a state too large, {with}"), case, rule: Some(Rule::PayloadStream) });
    }
    faults
}

/// A lane that is not coded, whose low bits lead to a context that is coded, and which has an exception as well. The exception leads
/// back, so the sums fit. Many lanes change, so in place all base lanes are kept.
fn changed_by_low_bits_twice() -> Vec<Fault> {
    let set = random_set(&mut Random(4), 1, 32, true);
    let fault = |(dtype, shift): (Dtype, u32), lane: usize| {
        let below_one = (127u32 << shift) - 1;
        let base_of = |i: usize| if i == lane { below_one } else { below_one - 200 + i as u32 % 100 };
        let bytes_of = |lane_of: &dyn Fn(usize) -> u32| -> Vec<u8> {
            (0..2500).flat_map(|i| lane_of(i).to_le_bytes().into_iter().take(dtype.lane_bytes())).collect()
        };
        let base = bytes_of(&base_of);
        // The delta of each change is 2, within the low bits. The exception has delta 1: one back.
        let changed = bytes_of(&|i| base_of(i) + u32::from(i == lane || i.is_multiple_of(3)));
        let target = bytes_of(&|i| base_of(i) + u32::from(i != lane && i.is_multiple_of(3)));
        let plan = Plan { low_bits: 8, first_context: 126, clash: Some(lane), ..plain(vec![vec![0, 1]]) };
        let mut case = Case::new(dtype, Some(set.clone()), base.clone(), &target, write(dtype, &plan, &set, &base, &changed));
        case.num_deltas += 2;
        Fault {
            name: format!("{dtype}, lane {lane} changed by low bits and an exception"),
            case,
            rule: Some(Rule::PayloadPositions),
        }
    };
    let dtypes = [(Dtype::Bf16, 7), (Dtype::F32, 23)];
    dtypes.into_iter().flat_map(|dtype| [5, 700, 2499].map(|lane| fault(dtype, lane))).collect()
}

/// A coded lane that changes, and whose exception leads back, so the sums and the number of changes fit. Many or few other lanes
/// change, so in place all base lanes or a list of changes are kept.
fn changed_and_back() -> Vec<Fault> {
    let set = random_set(&mut Random(5), 1, 16, true);
    let fault = |(dtype, shift): (Dtype, u32), step: usize, lane: usize| {
        let base_of = |i: usize| (127u32 << shift) - 200 + i as u32 % 100;
        let bytes_of = |moves: &dyn Fn(usize) -> bool| -> Vec<u8> {
            let lane_of = |i: usize| base_of(i) + u32::from(moves(i));
            (0..2500).flat_map(|i| lane_of(i).to_le_bytes().into_iter().take(dtype.lane_bytes())).collect()
        };
        let base = bytes_of(&|_| false);
        let changed = bytes_of(&|i| i == lane || i.is_multiple_of(step));
        let target = bytes_of(&|i| i != lane && i.is_multiple_of(step));
        let plan = Plan { first_context: 126, clash: Some(lane), ..plain(vec![vec![1]]) };
        let mut case = Case::new(dtype, Some(set.clone()), base.clone(), &target, write(dtype, &plan, &set, &base, &changed));
        case.num_deltas += 2;
        let name = format!("{dtype}, one in {step} lanes, lane {lane} changed and back by an exception");
        Fault { name, case, rule: Some(Rule::PayloadPositions) }
    };
    let dtypes = [(Dtype::Bf16, 7), (Dtype::F32, 23)];
    let steps = dtypes.into_iter().flat_map(|dtype| [(dtype, 3), (dtype, 50)]);
    steps.flat_map(|(dtype, step)| [5, 700, 2047, 2499].map(|lane| fault(dtype, step, lane))).collect()
}

/// Lists of exceptions in lanes of every size, of which hundreds are in one tile, and one damage each.
fn exceptions() -> Vec<Fault> {
    let mut faults = Vec::new();
    for dtype in [Dtype::F8E4m3, Dtype::Bf16, Dtype::F32, Dtype::F64] {
        let (lanes, width) = (2725, dtype.lane_bytes());
        let (base, target) = random_lanes(&mut Random(3), dtype, lanes, 3);
        let set = random_set(&mut Random(6), 1, 8 * width as u32, true);
        let payload = write(dtype, &plain(vec![vec![1]]), &set, &base, &target);
        let valid = Case::new(dtype, Some(set), base, &target, payload);
        let count = u32::from_le_bytes(*valid.payload[8..].first_chunk().unwrap()) as usize;
        // The map has one byte.
        let position = |i: usize| 17 + 4 * i;
        let deltas = position(count);
        assert!(count > 300, "{dtype}: {count}");
        let mut fault = |name: &str, rule: Option<Rule>, edit: &dyn Fn(&mut [u8])| {
            let mut case = valid.clone();
            edit(&mut case.payload);
            case.sign();
            faults.push(Fault { name: format!("{dtype}, exceptions, {name}"), case, rule });
        };
        let unsorted = Some(Rule::PayloadPositions);
        fault("valid", None, &|_| ());
        fault("twice", unsorted, &|payload| payload.copy_within(position(7)..position(8), position(8)));
        fault("swapped", unsorted, &|payload| payload[position(20)..position(22)].rotate_left(4));
        fault("ends swapped", unsorted, &|payload| {
            let (first, last) = payload[position(0)..deltas].split_at_mut(4 * (count - 1));
            first[..4].swap_with_slice(last);
        });
        fault("after the last lane", unsorted, &|payload| {
            payload[position(count - 1)..deltas].copy_from_slice(&(lanes as u32).to_le_bytes());
        });
        fault("all the same", unsorted, &|payload| {
            (1..count).for_each(|i| payload.copy_within(position(0)..position(1), position(i)));
        });
        fault("no delta", Some(Rule::PayloadDeltas), &|payload| {
            payload[deltas + width * (count / 2)..][..width].fill(0);
        });
    }
    faults
}

/// The processor refuses each chunk with its rule.
#[test]
fn each_breaks_its_rule() {
    for Fault { name, case, rule } in all() {
        assert_eq!(case.decode().err(), rule, "{name}");
    }
}
