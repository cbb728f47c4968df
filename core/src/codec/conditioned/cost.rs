//! Costs in fractions of a bit. Costs are integers, so an encoder makes the same choices on every machine.

use super::tables::{MAX_CLASSES, MAX_TOKENS, SCALE_LOG2, TableSet};
use crate::prelude::*;

/// Cost units per bit.
pub const BIT: u64 = 256;

/// Cost of a symbol of frequency 0 where exceptions are not allowed. Larger than the cost of any exception.
pub(super) const IMPOSSIBLE: u64 = 1 << 20;

/// Returns the size of an exception in bytes: a position of 4 bytes, and a delta of `width` bytes.
pub(super) fn exception_bytes(width: usize) -> usize {
    4 + width
}

/// Returns the cost of an exception, for lanes of `width` bytes.
pub(super) fn exception_cost(width: usize) -> u64 {
    8 * exception_bytes(width) as u64 * BIT
}

/// Returns the fractional part of the logarithm of a mantissa in 1..2, in cost units, rounded down. The mantissa is scaled by 2^31.
const fn fraction(mut mantissa: u64) -> u64 {
    let mut fraction = 0;
    let mut bit = 0;
    // Squaring doubles the logarithm; a carry is the next fractional bit.
    while bit < BIT.ilog2() {
        mantissa = (mantissa * mantissa) >> 31;
        let carry = mantissa >> 32;
        fraction = fraction << 1 | carry;
        mantissa >>= carry;
        bit += 1;
    }
    fraction
}

/// log2 of the number of mantissas per entry of [`FRACTIONS`].
const REST_BITS: u32 = 23;

/// For each value of the eight bits after the first bit of a mantissa: the smallest fraction of such mantissas in the low 8 bits,
/// and in 24 bits each the rest of the smallest mantissas with a fraction that is larger by 1 and by 2, 2^23 if there are none. The
/// fractions differ by at most 2.
static FRACTIONS: [u64; 256] = {
    let mut fractions = [0; 256];
    let mut i = 0;
    while i < 256 {
        let first = (256 + i as u64) << REST_BITS;
        let start = fraction(first);
        fractions[i] = start;
        let mut step = 0;
        while step < 2 {
            let (mut low, mut high) = (first, first + (1 << REST_BITS));
            if fraction(high - 1) > start + step {
                while high - low > 1 {
                    let middle = low.midpoint(high);
                    if fraction(middle - 1) > start + step { high = middle } else { low = middle }
                }
            } else {
                low = high;
            }
            fractions[i] |= (low - first) << (8 + 24 * step);
            step += 1;
        }
        i += 1;
    }
    fractions
};

/// Returns log2 of `x` in cost units, rounded down. `x` must not be 0.
#[inline(always)]
pub(super) fn log2(x: u64) -> u64 {
    let zeros = x.leading_zeros();
    let mantissa = x << zeros >> 32;
    let packed = FRACTIONS[(mantissa >> REST_BITS & 255) as usize];
    let rest = mantissa & ((1 << REST_BITS) - 1);
    let more = u64::from(rest >= packed >> 8 & 0xFF_FFFF) + u64::from(rest >= packed >> 32);
    u64::from(63 - zeros) * BIT + (packed & 0xFF) + more
}

/// Cost of each token in each class of a table set, without extra bits. Row: token. Column: class - 1.
pub(super) struct Costs(pub Vec<[u32; MAX_CLASSES]>);

impl Costs {
    /// Computes the costs of a set. A symbol of frequency 0 costs `missing`.
    pub fn new(set: &TableSet, missing: u64) -> Self {
        let mut costs = vec![[missing as u32; MAX_CLASSES]; MAX_TOKENS];
        for (class, frequencies) in set.classes().enumerate() {
            for (cost, &frequency) in costs.iter_mut().zip(frequencies).filter(|(_, frequency)| **frequency != 0) {
                cost[class] = (u64::from(SCALE_LOG2) * BIT - log2(frequency.into())) as u32;
            }
        }
        Self(costs)
    }

    /// Returns the total cost of a histogram of tokens, per class from class 1 on.
    pub fn of(&self, histogram: &[u32]) -> [u64; MAX_CLASSES] {
        let mut sums = [0; MAX_CLASSES];
        for (&count, costs) in histogram.iter().zip(&self.0).filter(|(count, _)| **count != 0) {
            sums.iter_mut().zip(costs).for_each(|(sum, &cost)| *sum += u64::from(count) * u64::from(cost));
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms() {
        assert_eq!([1, 2, 4, 1 << 40].map(log2), [0, BIT, 2 * BIT, 40 * BIT]);
        assert_eq!(log2(3), 405); // 1.58496 · 256 = 405.7
        assert_eq!(log2(4095), 12 * BIT - 1);
        assert!((1..100_000).all(|x| log2(x) <= log2(x + 1)));
    }

    #[test]
    fn fractions_of_logarithms_are_those_of_repeated_squares() {
        let check = |mantissa: u64| assert_eq!(log2(mantissa), 31 * BIT + fraction(mantissa), "{mantissa:#x}");
        for (i, packed) in (256u64..).zip(&FRACTIONS) {
            let (first, last) = (i << REST_BITS, ((i + 1) << REST_BITS) - 1);
            let next = [packed >> 8 & 0xFF_FFFF, packed >> 32].map(|rest| first + rest);
            [first, last].into_iter().for_each(check);
            next.iter().flat_map(|&next| [next - 1, next]).filter(|mantissa| (first..=last).contains(mantissa)).for_each(check);
            (first..last).step_by(99_991).for_each(check);
        }
    }
}
