//! Chunk sums: linear checksums of lanes (spec section 6.1).

#![forbid(unsafe_code)]

use crate::dispatch::vectorized;
use crate::lane::Lane;
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

/// Words per row. A word has the weight `P[row] · Q[column]`.
pub const ROW: usize = 1024;

const fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Weights of the lanes of a row (spec section 6.1).
pub static P: [u64; ROW] = {
    let mut table = [0; ROW];
    let mut r = 0;
    while r < ROW {
        table[r] = mix((ROW + r) as u64) | 1;
        r += 1;
    }
    table
};

/// Weights of the rows (spec section 6.1).
pub static Q: [u32; ROW] = {
    let mut table = [0; ROW];
    let mut c = 0;
    while c < ROW {
        table[c] = (mix(c as u64) >> 32) as u32 | 1;
        c += 1;
    }
    table
};

/// Returns the sum of a chunk's lanes. `lanes` are bytes, at most 4 MiB, because the weights repeat after 4 MiB.
///
/// Cost: one multiplication per 4 bytes, at about the speed of the L2 cache.
pub fn chunk_sum(lanes: &[u8]) -> u64 {
    let mut sum = ChunkSum::default();
    sum.add(lanes);
    sum.value
}

/// A chunk sum that is computed block by block. Other work on a block then finds its lanes in the cache.
#[derive(Default)]
pub struct ChunkSum {
    /// The sum so far.
    pub value: u64,
    row: usize,
}

impl ChunkSum {
    /// The size of every block except the last must be a multiple of this, in bytes.
    pub const BLOCK: usize = 4 * ROW;

    /// Adds the next block.
    pub fn add(&mut self, lanes: &[u8]) {
        self.add_rows(lanes.chunks(Self::BLOCK), inner_sum);
    }

    /// Adds the next block, of `size` bytes, whose contribution to the sum is known.
    pub fn add_known(&mut self, size: usize, part: u64) {
        self.value = self.value.wrapping_add(part);
        self.row += size.div_ceil(Self::BLOCK);
    }

    /// Adds the next rows, whose [`inner_sum`]s are known.
    pub fn add_inner_sums(&mut self, inner_sums: &[u64]) {
        self.add_rows(
            inner_sums.iter(),
            #[inline(always)]
            |sum| *sum,
        );
    }

    /// Copies the next block from `lanes` to `out`, of equal length, and adds it.
    pub fn copy(&mut self, lanes: &[u8], out: &mut [u8]) {
        self.add_rows(
            lanes.chunks(Self::BLOCK).zip(out.chunks_mut(Self::BLOCK)),
            #[inline(always)]
            |(row, out)| copy_and_sum(row, out),
        );
    }

    #[inline(always)]
    fn add_rows<R>(&mut self, rows: impl ExactSizeIterator<Item = R>, inner: impl Fn(R) -> u64) {
        let count = rows.len();
        debug_assert!(self.row + count <= ROW);
        let weights = P.iter().cycle().skip(self.row);
        let sum = vectorized!({
            let mut sum = 0u64;
            for (row, p) in rows.zip(weights) {
                sum = sum.wrapping_add(p.wrapping_mul(inner(row)));
            }
            sum
        });
        self.value = self.value.wrapping_add(sum);
        self.row += count;
    }
}

#[inline(always)]
fn term(word: u32, weight: u32) -> u64 {
    u64::from(word) * u64::from(weight)
}

/// Returns `Σ Q[c]·w_c` of a row.
#[inline(always)]
pub fn inner_sum(row: &[u8]) -> u64 {
    let (words, tail) = words_of(row);
    let sum = words.iter().zip(&Q).fold(0u64, |sum, (word, q)| sum.wrapping_add(term(word.get(), *q)));
    sum.wrapping_add(tail_sum(tail, words.len()))
}

/// Same as [`inner_sum`], but also copies the row. In one pass, memory access and arithmetic overlap.
#[inline(always)]
fn copy_and_sum(row: &[u8], out: &mut [u8]) -> u64 {
    let (words, tail) = words_of(row);
    let (out_words, out_tail) = out.split_at_mut(row.len() - tail.len());
    out_tail.copy_from_slice(tail);
    let out_words = <[U32]>::mut_from_bytes(out_words).unwrap_or(&mut []);
    let pairs = words.iter().zip(out_words).zip(&Q);
    let sum = pairs.fold(0u64, |sum, ((word, out), q)| {
        *out = *word;
        sum.wrapping_add(term(word.get(), *q))
    });
    sum.wrapping_add(tail_sum(tail, words.len()))
}

#[inline(always)]
fn words_of(row: &[u8]) -> (&[U32], &[u8]) {
    let (words, tail) = row.split_at(row.len() / 4 * 4);
    (<[U32]>::ref_from_bytes(words).unwrap_or(&[]), tail)
}

#[inline(always)]
fn tail_sum(tail: &[u8], at: usize) -> u64 {
    if tail.is_empty() {
        return 0;
    }
    let mut last = [0; 4];
    last[..tail.len()].copy_from_slice(tail);
    term(u32::from_le_bytes(last), Q[at])
}

/// Returns the change of the chunk sum if lane `position` changes from `old` to `new`.
#[inline(always)]
pub fn lane_term<L: Lane>(position: usize, old: L, new: L) -> u64 {
    let byte = position * L::BYTES;
    let weight = |word: usize| P[word / ROW % ROW].wrapping_mul(u64::from(Q[word % ROW]));
    let (old, new) = (old.to_u64(), new.to_u64());
    if L::BYTES < 8 {
        let shift = byte % 4 * 8;
        return weight(byte / 4).wrapping_mul((new << shift).wrapping_sub(old << shift));
    }
    let (low, high) = (u64::from(u32::MAX), 32);
    let low_term = weight(byte / 4).wrapping_mul((new & low).wrapping_sub(old & low));
    low_term.wrapping_add(weight(byte / 4 + 1).wrapping_mul((new >> high).wrapping_sub(old >> high)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use proptest::prelude::*;

    /// Computes the formula of the spec word by word.
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
        // These values were computed independently, from the formula of section 6.1.
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
        fn blocks_and_copies_give_the_same(lanes in proptest::collection::vec(any::<u8>(), 0..40_000)) {
            let mut sum = ChunkSum::default();
            let mut out = vec![0; lanes.len()];
            for (lanes, out) in lanes.chunks(2 * ChunkSum::BLOCK).zip(out.chunks_mut(2 * ChunkSum::BLOCK)) {
                sum.copy(lanes, out);
            }
            prop_assert_eq!(sum.value, by_the_spec(&lanes));
            prop_assert_eq!(out, lanes);
        }

        #[test]
        fn a_lane_adds_its_term(position in 0usize..3_000, new: u64) {
            let lanes: Vec<u8> = (0..24_000u32).map(|i| (i * 7 % 251) as u8).collect();
            fn check<L: Lane>(lanes: &[u8], position: usize, new: L) {
                let mut changed = lanes.to_vec();
                let lane = &mut crate::lane::lanes_of_mut::<L>(&mut changed)[position];
                let old = L::load(*lane);
                *lane = new.store();
                assert_eq!(chunk_sum(&changed), chunk_sum(lanes).wrapping_add(lane_term(position, old, new)));
            }
            check(&lanes, position, new as u8);
            check(&lanes, position, new as u16);
            check(&lanes, position, new as u32);
            check(&lanes, position, new);
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

        /// With affine weights, sign flips at the corners of a parallelogram would cancel.
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
