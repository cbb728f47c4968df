//! The encoder's view of base and target: the values of coded lanes, and the list of exceptions.

use super::coded::tiles_of;
use super::context::HALF;
use super::stats::Split;
use crate::codec::simd::{Platform, Tiles};
use crate::dispatch::run_vectorized;
use crate::lane::{Dtype, Lane, lanes_of, lanes_of_mut, with_order};
use crate::prelude::*;
use core::ops::Range;

/// Base and target lanes of a chunk, and the rule that splits deltas into values and low bits.
pub(super) struct Lanes<'a> {
    pub base: &'a [u8],
    pub target: &'a [u8],
    pub dtype: Dtype,
    pub split: Split,
    /// Masks of the lanes that have a value, one per half block: the changed lanes, or with low bits all lanes.
    pub changed: &'a [u64],
}

impl Lanes<'_> {
    /// Returns the delta of a lane.
    pub fn delta<L: Lane>(&self, position: usize) -> L {
        let (base, target) = (lanes_of::<L>(self.base)[position], lanes_of::<L>(self.target)[position]);
        L::delta(L::load(base), L::load(target), self.dtype.order())
    }

    /// Computes the values of the coded lanes of whole tiles, in a reused buffer. Each tile is padded to whole steps of `states`
    /// lanes. `coded` has one mask per half block. Changed lanes that are not coded are appended to `listed`.
    pub fn values<'b, L: Lane>(
        &self,
        platform: Platform,
        halves: Range<usize>,
        coded: &[u64],
        states: usize,
        buffer: &'b mut Vec<u8>,
        listed: &mut Vec<u32>,
    ) -> &'b mut [L::Le] {
        let tiles = tiles_of::<L>(states);
        let coded_in = |tile: &[u64]| tile.iter().map(|mask| mask.count_ones() as usize).sum();
        let count = coded.chunks(tiles.halves).map(|tile| tiles.padded_len(coded_in(tile))).sum::<usize>();
        buffer.clear();
        buffer.resize((count + HALF) * L::BYTES, 0);
        let values = lanes_of_mut::<L>(buffer);
        let lanes = halves.start * HALF * L::BYTES..(halves.end * HALF * L::BYTES).min(self.base.len());
        let part = Part {
            base: lanes_of::<L>(&self.base[lanes.clone()]),
            target: lanes_of::<L>(&self.target[lanes]),
            changed: &self.changed[halves.start..halves.end.min(self.changed.len())],
            coded,
            tiles,
        };
        // One loop per way to compute a value, so that the loops have no branch on it.
        let order = self.dtype.order();
        match self.split.low_bits {
            0 => with_order!(order, ORDER => part.pack::<L>(platform, |base, target| L::delta(base, target, ORDER), values)),
            _ => {
                let bits = 8 * L::BYTES as u32;
                let value = |base, target| L::from_u64(self.split.value(L::delta(base, target, order).to_u64(), bits));
                part.pack::<L>(platform, value, values);
            }
        }
        for ((half, changed), coded) in halves.zip(part.changed).zip(coded) {
            let mut left = changed & !coded;
            while left != 0 {
                listed.push((half * HALF) as u32 + left.trailing_zeros());
                left &= left - 1;
            }
        }
        &mut values[..count]
    }
}

/// Range of half blocks, as input for computing values.
struct Part<'a, T> {
    base: &'a [T],
    target: &'a [T],
    changed: &'a [u64],
    coded: &'a [u64],
    tiles: Tiles,
}

impl<T: Copy> Part<'_, T> {
    /// Writes the values in order to `out`, which must be zero and at least 64 elements longer than the values.
    #[inline(always)]
    fn pack<L: Lane<Le = T>>(&self, platform: Platform, value: impl Fn(L, L) -> L, out: &mut [T]) {
        run_vectorized(
            #[inline(always)]
            || {
                let (mut start, mut done, mut left) = (0, 0, self.tiles.halves);
                let lanes = self.base.chunks(HALF).zip(self.target.chunks(HALF));
                for (((base, target), &changed), &coded) in lanes.zip(self.changed).zip(self.coded) {
                    if left == 0 {
                        start += self.tiles.padded_len(done - start);
                        (done, left) = (start, self.tiles.halves);
                    }
                    left -= 1;
                    if changed & coded != 0 {
                        let mut values = [L::default().store(); HALF];
                        if let (Ok(base), Ok(target)) = (<&[T; HALF]>::try_from(base), <&[T; HALF]>::try_from(target)) {
                            each::<L>(base, target, &value, &mut values);
                        } else {
                            each::<L>(base, target, &value, &mut values);
                        }
                        platform.pack::<L>(&values, coded, &mut out[done..]);
                    }
                    done += coded.count_ones() as usize;
                }
            },
        );
    }
}

#[inline(always)]
fn each<L: Lane>(base: &[L::Le], target: &[L::Le], value: &impl Fn(L, L) -> L, values: &mut [L::Le; HALF]) {
    for ((out, base), target) in values.iter_mut().zip(base).zip(target) {
        *out = value(L::load(*base), L::load(*target)).store();
    }
}
