//! Chunks with one fault each, and the rule that it breaks.

use super::writer::{Plan, random_set, write};
use super::{Case, Random, random_lanes};
use crate::codec::TableSet;
use crate::error::Rule;
use crate::lane::Dtype;
use std::cell::RefCell;

/// A chunk, and the rule that it breaks, if it breaks one.
pub struct Fault {
    pub name: String,
    pub case: Case,
    pub rule: Option<Rule>,
}

/// All of them.
pub fn all() -> Vec<Fault> {
    [one_at_a_time(), changed_twice(), values_that_do_not_fit(), nothing_coded()].into_iter().flatten().collect()
}

/// A chunk with something of everything: 2,725 lanes in 22 blocks and 3 tiles, 5 contexts, 2 segments of 4 states.
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
    };
    let payload = write(dtype, &plan, &set, &base, &target);
    Case::new(dtype, Some(set), base, &target, payload)
}

/// A payload that breaks one rule.
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
    // Where the parts of this payload are: header, maps of 3 bytes, activities of 3, positions, deltas, low bits, one size.
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

/// One class for all lanes, and none of the choices.
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
    }
}

/// Coded lanes that are listed too, one in turn: those of whole steps, and those of the shorter ones that end tiles.
fn changed_twice() -> Vec<Fault> {
    let (dtype, lanes) = (Dtype::Bf16, 1300);
    let (base, target) = random_lanes(&mut Random(1), dtype, lanes, 1);
    let set = random_set(&mut Random(2), 1, 16, true);
    // Two contexts of three are coded, so that tiles do not end with whole steps.
    let maps = vec![(0..64).map(|context| u8::from(context % 3 != 0)).collect()];
    let fault = |lane| {
        let plan = Plan { clash: Some(lane), ..plain(maps.clone()) };
        let payload = write(dtype, &plan, &set, &base, &target);
        let mut case = Case::new(dtype, Some(set.clone()), base.clone(), &target, payload);
        case.num_deltas += 1;
        // A lane that was not coded is listed already, and then it is the number of changes that is wrong.
        Fault { name: format!("lane {lane} changed twice"), rule: case.decode().err(), case }
    };
    (0..lanes).step_by(23).chain(lanes - 20..lanes).map(fault).collect()
}

/// Values that do not fit: a set for wide lanes, used by narrow ones.
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

/// No step ever reads a word.
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

/// The processor refuses each under its rule.
#[test]
fn each_breaks_its_rule() {
    for Fault { name, case, rule } in all() {
        assert_eq!(case.decode().err(), rule, "{name}");
    }
}
