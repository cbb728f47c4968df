//! Tests of the contexts of base lanes, on every platform.

use super::*;
use crate::codec::conditioned::context::indexes;
use crate::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

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
        let expected = base.chunks(dtype.lane_bytes()).map(index).chain(core::iter::repeat(255));
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
