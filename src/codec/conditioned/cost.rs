//! Costs in fractions of a bit, in integers: an encoder's choices must be the same on every machine.

use super::tables::{MAX_CLASSES, MAX_TOKENS, SCALE_LOG2, TableSet};

/// Units of a bit.
pub(crate) const BIT: u64 = 256;

/// What a symbol of frequency 0 costs that cannot be an exception: more than any list of them.
pub(super) const IMPOSSIBLE: u64 = 1 << 20;

/// Bytes of an exception: its position and its delta, of `width` bytes.
pub(super) fn exception_bytes(width: usize) -> usize {
    4 + width
}

/// What an exception of a lane of `width` bytes costs.
pub(super) fn exception_cost(width: usize) -> u64 {
    8 * exception_bytes(width) as u64 * BIT
}

/// log2 of `x` > 0 in units, rounded down.
pub(super) fn log2(x: u64) -> u64 {
    let whole = x.ilog2();
    // The mantissa in 32 bits, from 1 to 2; squaring doubles its logarithm, and a carry is the next bit of it.
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

/// What each token costs in each class of a set, classes from 1 on; extra bits apart.
pub(super) struct Costs(Vec<[u32; MAX_CLASSES]>);

impl Costs {
    /// Those of a set; a symbol of frequency 0 costs `missing`.
    pub fn new(set: &TableSet, missing: u64) -> Self {
        let mut costs = vec![[missing as u32; MAX_CLASSES]; MAX_TOKENS];
        for (class, frequencies) in set.classes().enumerate() {
            for (cost, &frequency) in costs.iter_mut().zip(frequencies).filter(|(_, frequency)| **frequency != 0) {
                cost[class] = (u64::from(SCALE_LOG2) * BIT - log2(frequency.into())) as u32;
            }
        }
        Self(costs)
    }

    /// What the symbols of a histogram cost in each class, classes from 1 on.
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
