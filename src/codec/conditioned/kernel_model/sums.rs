//! Chunk sums (`spec/tpde-format.md` section 6.1) of the lanes of a thread.

use super::memory::LANES;
use crate::lane::Lane;
// The weights, 12 KiB in constant global memory: every block of a multiprocessor finds them in its first-level cache, where in
// shared memory each would have a copy of its own.
use crate::sums::{P, Q, ROW};

/// The sum of the 8 lanes from lane `at` of the chunk on, `at` a multiple of 8. They are whole words of one row: one load of
/// `P`, loads of 16 bytes of `Q`, one wide multiplication a word and one product of 64 bits for all.
pub fn sum_of<L: Lane>(at: usize, lanes: &[L; LANES]) -> u64 {
    let first = at * L::BYTES / 4;
    let per_word = (4 / L::BYTES).max(1);
    let word = |j: usize| match L::BYTES {
        8 => (lanes[j / 2].to_u64() >> (32 * (j % 2))) as u32,
        _ => (0..per_word).fold(0, |word, k| word | (lanes[j * per_word + k].to_u64() as u32) << (8 * L::BYTES * k)),
    };
    let inner = (0..2 * L::BYTES).fold(0u64, |sum, j| {
        let weight = Q[first % ROW..][..2 * L::BYTES][j];
        sum.wrapping_add(u64::from(word(j)) * u64::from(weight))
    });
    // Lanes past the end of the largest chunk are zeros, whatever their weight.
    P[first / ROW % ROW].wrapping_mul(inner)
}
