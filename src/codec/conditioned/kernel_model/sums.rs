//! Chunk sums (`spec/tpde-format.md` section 6.1) of the lanes of a thread.

use super::memory::LANES;
use crate::lane::Lane;

/// Words of a row.
const ROW: usize = 1024;

const fn mix(x: u64) -> u64 {
    let mut z = (x + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The weights, 12 KiB in constant global memory: every block of a multiprocessor finds them in its first-level cache, where in
/// shared memory each would have a copy of its own.
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

/// The sum of the 8 lanes from lane `at` of the chunk on, `at` a multiple of 8. They are whole words of one row: one load of
/// `P`, loads of 16 bytes of `Q`, one wide multiplication a word and one product of 64 bits for all.
pub fn sum_of<L: Lane>(at: usize, lanes: &[L; LANES]) -> u64 {
    let first = at * L::BYTES / 4;
    let per_word = (4 / L::BYTES).max(1);
    let word = |j: usize| match L::BYTES {
        8 => (lanes[j / 2].widen() >> (32 * (j % 2))) as u32,
        _ => (0..per_word).fold(0, |word, k| word | (lanes[j * per_word + k].widen() as u32) << (8 * L::BYTES * k)),
    };
    let inner = (0..2 * L::BYTES).fold(0u64, |sum, j| {
        let weight = Q[first % ROW..][..2 * L::BYTES][j];
        sum.wrapping_add(u64::from(word(j)) * u64::from(weight))
    });
    // Lanes past the end of the largest chunk are zeros, whatever their weight.
    P[first / ROW % ROW].wrapping_mul(inner)
}

/// What the sum grows by when lane `at` changes from `old` to `new`.
pub fn lane_term<L: Lane>(at: usize, old: L, new: L) -> u64 {
    let weight = |word: usize| P[word / ROW].wrapping_mul(Q[word % ROW].into());
    let difference = |low: u64, high: u64| high.wrapping_sub(low);
    let byte = at * L::BYTES;
    let (old, new) = (old.widen(), new.widen());
    if L::BYTES == 8 {
        let low = difference(old & 0xFFFF_FFFF, new & 0xFFFF_FFFF);
        let high = difference(old >> 32, new >> 32);
        return weight(byte / 4).wrapping_mul(low).wrapping_add(weight(byte / 4 + 1).wrapping_mul(high));
    }
    weight(byte / 4).wrapping_mul(difference(old << (byte % 4 * 8), new << (byte % 4 * 8)))
}
