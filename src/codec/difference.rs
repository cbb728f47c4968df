//! Which lanes of a chunk change, found once for every way of coding it.

use super::simd::Path;
use crate::dispatch::vectorized;
use crate::lane::{Dtype, Lane, lanes_of};
use std::ops::Range;

/// Lanes that share a mask.
const GROUP: usize = 64;

/// Base and target lanes of a chunk, and which of them differ.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Difference<'a> {
    pub dtype: Dtype,
    /// Lanes as bytes, as many in the target as in the base.
    pub base: &'a [u8],
    pub target: &'a [u8],
    /// A mask for each 64 lanes of those that differ.
    pub masks: &'a [u64],
    /// How many differ.
    pub changed: usize,
}

impl<'a> Difference<'a> {
    /// Compares lanes; `masks` is filled. Cost: one pass over both.
    pub fn find(dtype: Dtype, base: &'a [u8], target: &'a [u8], masks: &'a mut Vec<u64>) -> Self {
        let width = dtype.lane_bytes();
        masks.clear();
        masks.resize(base.len().div_ceil(GROUP * width), 0);
        Path::best().differ(width, base, target, masks);
        let changed = vectorized(
            #[inline(always)]
            || count(masks),
        );
        Self { dtype, base, target, masks, changed }
    }

    /// Number of lanes, changed or not.
    pub fn lanes(self) -> usize {
        self.base.len() / self.dtype.lane_bytes()
    }

    /// That of some of the masks, and the lanes which they are for.
    pub fn part(self, masks: Range<usize>) -> Self {
        let at = |mask: usize| (mask * GROUP * self.dtype.lane_bytes()).min(self.base.len());
        let bytes = at(masks.start)..at(masks.end);
        let masks = &self.masks[masks];
        Self { base: &self.base[bytes.clone()], target: &self.target[bytes], masks, changed: count(masks), ..self }
    }

    /// Position and delta of every changed lane, in order.
    pub fn changes<L: Lane>(self) -> Changes<L> {
        let mut changes = Changes { positions: Vec::with_capacity(self.changed), deltas: Vec::with_capacity(self.changed) };
        let (base, target) = (lanes_of::<L>(self.base), lanes_of::<L>(self.target));
        let order = self.dtype.order();
        for (first, mask) in (0..).step_by(GROUP).zip(self.masks) {
            let mut left = *mask;
            while left != 0 {
                let position = first + left.trailing_zeros() as usize;
                changes.positions.push(position as u32);
                changes.deltas.push(L::delta(L::load(base[position]), L::load(target[position]), order));
                left &= left - 1;
            }
        }
        changes
    }
}

/// How many lanes masks select.
#[inline(always)]
pub(crate) fn count(masks: &[u64]) -> usize {
    masks.iter().map(|mask| mask.count_ones() as usize).sum()
}

/// The changes of a chunk, as lists.
#[derive(Debug)]
pub(crate) struct Changes<L> {
    pub positions: Vec<u32>,
    pub deltas: Vec<L>,
}
