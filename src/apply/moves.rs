//! How far lanes move from base to target.

use tpde_core::lane::{Dtype, Lane, lanes_of};

/// Number of lanes of a tensor by the distance between base and target lane. The result of
/// [`Apply::moves`](crate::Apply::moves).
///
/// The distance counts steps in the order of values (spec section 9). A step leads to the next value that the dtype can hold: a
/// unit in the last place, for floating-point numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moves {
    /// Number of lanes that do not change.
    pub unchanged: u64,
    /// Entry `i`: number of lanes that move up by 2^i to 2^(i+1) − 1 steps.
    pub up: [u64; 64],
    /// The same for lanes that move down.
    pub down: [u64; 64],
}

impl Default for Moves {
    fn default() -> Self {
        Self { unchanged: 0, up: [0; 64], down: [0; 64] }
    }
}

impl Moves {
    /// Returns the number of lanes that change.
    pub fn changed(&self) -> u64 {
        self.up.iter().chain(&self.down).sum()
    }

    /// Adds the lanes of another tensor.
    pub fn add(&mut self, other: &Self) {
        self.unchanged += other.unchanged;
        self.up.iter_mut().zip(other.up).for_each(|(sum, n)| *sum += n);
        self.down.iter_mut().zip(other.down).for_each(|(sum, n)| *sum += n);
    }

    /// Counts the changes of some lanes.
    pub(super) fn of<L: Lane>(dtype: Dtype, base: &[u8], target: &[u8]) -> Self {
        let mut moves = Self::default();
        for (base, target) in lanes_of::<L>(base).iter().zip(lanes_of::<L>(target)) {
            let delta = L::delta(L::load(*base), L::load(*target), dtype.order()).to_u64();
            // The zigzag form of a step up is even, that of a step down is odd.
            match (delta, delta % 2) {
                (0, _) => moves.unchanged += 1,
                (_, 0) => moves.up[(delta / 2).ilog2() as usize] += 1,
                _ => moves.down[(delta / 2 + 1).ilog2() as usize] += 1,
            }
        }
        moves
    }
}
