//! Chunk sums: a linear check of a range of lanes (spec section 6.1).

#![forbid(unsafe_code)]

use crate::dispatch::vectorized;
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

/// Words of a row: within a row the weight is `Q`, between rows `P`.
const ROW: usize = 1024;

const fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

static P: [u64; ROW] = {
    let mut table = [0; ROW];
    let mut r = 0;
    while r < ROW {
        table[r] = mix((ROW + r) as u64) | 1;
        r += 1;
    }
    table
};

static Q: [u32; ROW] = {
    let mut table = [0; ROW];
    let mut c = 0;
    while c < ROW {
        table[c] = (mix(c as u64) >> 32) as u32 | 1;
        c += 1;
    }
    table
};

/// The sum of a chunk's lanes, given as the bytes in memory: at most 4 MiB, or the weights would repeat.
///
/// Cost: one multiplication for each 4 bytes, at about the speed of the second-level cache.
pub fn chunk_sum(lanes: &[u8]) -> u64 {
    debug_assert!(lanes.len() <= 4 * ROW * ROW);
    vectorized(
        #[inline(always)]
        || sum_of_rows(lanes),
    )
}

#[inline(always)]
fn sum_of_rows(lanes: &[u8]) -> u64 {
    let mut sum = 0u64;
    for (row, p) in lanes.chunks(4 * ROW).zip(P.iter().cycle()) {
        let (words, tail) = row.as_chunks::<4>();
        let words = <[U32]>::ref_from_bytes(words.as_flattened()).unwrap_or(&[]);
        let mut inner = words.iter().zip(&Q).fold(0u64, |a, (w, q)| a.wrapping_add(u64::from(w.get()) * u64::from(*q)));
        if !tail.is_empty() {
            let mut last = [0; 4];
            last[..tail.len()].copy_from_slice(tail);
            inner = inner.wrapping_add(u64::from(u32::from_le_bytes(last)) * u64::from(Q[words.len()]));
        }
        sum = sum.wrapping_add(p.wrapping_mul(inner));
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The formula of the spec, word by word.
    fn by_the_spec(lanes: &[u8]) -> u64 {
        let mut padded = lanes.to_vec();
        padded.resize(lanes.len().next_multiple_of(4), 0);
        let mut sum = 0u64;
        for (j, w) in padded.chunks(4).enumerate() {
            let word = u64::from(u32::from_le_bytes(w.try_into().unwrap()));
            let q = (mix((j % 1024) as u64) >> 32) | 1;
            let p = mix(1024 + (j / 1024) as u64) | 1;
            sum = sum.wrapping_add(p.wrapping_mul(q.wrapping_mul(word)));
        }
        sum
    }

    #[test]
    fn known_values() {
        // Computed apart from this code, from the formula of section 6.1.
        assert_eq!(mix(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(chunk_sum(&[]), 0);
        assert_eq!(chunk_sum(&[0; 4099]), 0);
    }

    proptest! {
        #[test]
        fn equals_the_formula(lanes in proptest::collection::vec(any::<u8>(), 0..20_000)) {
            prop_assert_eq!(chunk_sum(&lanes), by_the_spec(&lanes));
        }

        #[test]
        fn sees_any_change_of_one_lane(at in 0usize..20_000, flip in 1u8..) {
            let mut lanes: Vec<u8> = (0..20_000u32).map(|i| (i * 7 % 251) as u8).collect();
            let before = chunk_sum(&lanes);
            lanes[at] ^= flip;
            prop_assert_ne!(chunk_sum(&lanes), before);
        }

        #[test]
        fn sees_two_lanes_swapped(a in 0usize..10_000, b in 0usize..10_000) {
            let mut lanes: Vec<u8> = (0..20_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let before = chunk_sum(&lanes);
            lanes.swap(a, b);
            prop_assert_eq!(chunk_sum(&lanes) == before, lanes[a] == lanes[b]);
        }

        /// Affine weights would let sign flips at the corners of a parallelogram cancel.
        #[test]
        fn sees_sign_flips_at_regular_distances(start in 0usize..5_000, step in 1usize..2_000, far in 1usize..2_000) {
            let mut words = vec![0u16; 20_000];
            let corners = [start, start + step, start + step + far, start + 2 * step + far];
            for (k, i) in corners.into_iter().enumerate() {
                words[i % 20_000] = if matches!(k, 1 | 2) { 0x8000 } else { 0 };
            }
            let bytes = |w: &[u16]| w.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
            let before = chunk_sum(&bytes(&words));
            for i in corners { words[i % 20_000] ^= 0x8000; }
            prop_assert_ne!(chunk_sum(&bytes(&words)), before);
        }
    }
}
