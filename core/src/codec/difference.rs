//! Finds the changed lanes of a chunk, once for all encodings that are tried.

use super::simd::Platform;
use crate::dispatch::vectorized;
use crate::lane::{Dtype, Lane, lanes_of};
use crate::prelude::*;
use crate::sums::lane_term;
use core::ops::Range;

/// Lanes per mask.
pub const GROUP: usize = 64;

/// Base and target lanes of a chunk, and the masks of lanes that differ.
#[derive(Debug, Clone, Copy)]
pub struct Difference<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Lanes as bytes. Base and target have equal lengths.
    pub base: &'a [u8],
    /// Target lanes.
    pub target: &'a [u8],
    /// Masks of the lanes that differ, one per 64 lanes.
    pub masks: &'a [u64],
    /// Number of lanes that differ.
    pub changed: usize,
}

impl<'a> Difference<'a> {
    /// Compares the lanes and fills `masks`. Cost: one pass over both.
    pub fn find(dtype: Dtype, base: &'a [u8], target: &'a [u8], masks: &'a mut Vec<u64>) -> Self {
        let changed = compare(dtype, base, target, cleared(dtype, base.len(), masks));
        Self { dtype, base, target, masks, changed }
    }

    /// Returns the number of lanes, changed or not.
    pub fn lanes(self) -> usize {
        self.base.len() / self.dtype.lane_bytes()
    }

    /// Returns the part of the difference that has these masks.
    pub fn part(self, masks: Range<usize>) -> Self {
        let at = |mask: usize| (mask * GROUP * self.dtype.lane_bytes()).min(self.base.len());
        let bytes = at(masks.start)..at(masks.end);
        let masks = &self.masks[masks];
        Self { base: &self.base[bytes.clone()], target: &self.target[bytes], masks, changed: count(masks), ..self }
    }

    /// Returns position and delta of every changed lane, in order.
    pub fn changes<L: Lane>(self) -> Changes<L> {
        let mut changes = Changes { positions: Vec::with_capacity(self.changed), deltas: Vec::with_capacity(self.changed) };
        let order = self.dtype.order();
        self.each_changed::<L>(|position, base, target| {
            changes.positions.push(position as u32);
            changes.deltas.push(L::delta(base, target, order));
        });
        changes
    }

    /// Returns the chunk sum of the target minus the chunk sum of the base. `first` is the index of the first lane in its chunk.
    pub fn sum_change<L: Lane>(self, first: usize) -> u64 {
        let mut sum = 0u64;
        self.each_changed::<L>(|position, base, target| sum = sum.wrapping_add(lane_term(first + position, base, target)));
        sum
    }

    /// Calls `f` with the position, base value and target value of every changed lane, in order.
    #[inline(always)]
    fn each_changed<L: Lane>(self, mut f: impl FnMut(usize, L, L)) {
        let (base, target) = (lanes_of::<L>(self.base), lanes_of::<L>(self.target));
        for (first, mask) in (0..).step_by(GROUP).zip(self.masks) {
            let mut left = *mask;
            while left != 0 {
                let position = first + left.trailing_zeros() as usize;
                f(position, L::load(base[position]), L::load(target[position]));
                left &= left - 1;
            }
        }
    }
}

/// Returns zeroed masks for the lanes in `size` bytes, in a reused buffer.
pub fn cleared(dtype: Dtype, size: usize, masks: &mut Vec<u64>) -> &mut [u64] {
    masks.clear();
    masks.resize(size.div_ceil(GROUP * dtype.lane_bytes()), 0);
    masks
}

/// Sets the mask bits of lanes that differ. `masks` must be zeroed. Returns the number of these lanes.
pub fn compare(dtype: Dtype, base: &[u8], target: &[u8], masks: &mut [u64]) -> usize {
    Platform::best().differ(dtype.lane_bytes(), base, target, masks);
    vectorized!(count(masks))
}

/// Returns the number of bits set in masks.
#[inline(always)]
pub fn count(masks: &[u64]) -> usize {
    masks.iter().map(|mask| mask.count_ones() as usize).sum()
}

/// Changes of a chunk, as lists.
#[derive(Debug)]
pub struct Changes<L> {
    pub positions: Vec<u32>,
    pub deltas: Vec<L>,
}
