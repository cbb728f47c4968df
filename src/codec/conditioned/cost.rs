//! Costs in fractions of a bit. Costs are integers, so an encoder makes the same choices on every machine.

use super::tables::{MAX_CLASSES, MAX_TOKENS, SCALE_LOG2, TableSet};

/// Cost units per bit.
pub(crate) const BIT: u64 = 256;

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

/// Returns log2 of `x` in cost units, rounded down. `x` must not be 0.
pub(super) fn log2(x: u64) -> u64 {
    let whole = x.ilog2();
    // The mantissa, in 1..2, scaled by 2^31. Squaring doubles its logarithm; a carry is the next fractional bit.
    let mut mantissa = if whole >= 31 { x >> (whole - 31) } else { x << (31 - whole) };
    let mut fraction = 0;
    for _ in 0..BIT.ilog2() {
        mantissa = (mantissa * mantissa) >> 31;
        let carry = mantissa >> 32;
        fraction = fraction << 1 | carry;
        mantissa >>= carry;
    }
    u64::from(whole) * BIT + fraction
}

/// Cost of each token in each class of a table set, without extra bits. Row: token. Column: class - 1.
pub(super) struct Costs(Vec<[u32; MAX_CLASSES]>);

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

    /// Returns the costs of each token, per class from class 1 on.
    #[cfg(feature = "cuda")]
    pub fn rows(&self) -> &[[u32; MAX_CLASSES]] {
        &self.0
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
}
