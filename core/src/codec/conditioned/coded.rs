//! Finds coded lanes and their classes (`spec/codecs.md` section 4.4).

use super::context::{BLOCK, HALF, Maps, indexes, tile_blocks};
use crate::codec::simd::{self, Platform, Prefetch, Tiles};
use crate::lane::{Dtype, Lane};
use crate::prelude::*;

/// Number of blocks whose contexts are computed together. A multiple of the blocks per tile.
const BATCH: usize = 32;

/// Returns the tiles and steps of lanes of this type, for streams with `states` states.
pub(super) fn tiles_of<L: Lane>(states: usize) -> Tiles {
    Tiles { halves: tile_blocks(L::BYTES) * (BLOCK / HALF), step: states }
}

/// Rule that assigns classes to base lanes, and the number of coded lanes per step.
#[derive(Clone, Copy)]
pub(super) struct Classifier<'a> {
    pub dtype: Dtype,
    pub maps: &'a Maps,
    pub states: usize,
}

/// List of coded lanes in ascending order, in reused buffers. Each tile is padded to whole steps with class 0.
#[derive(Default)]
pub(super) struct CodedLanes {
    masks: Vec<u64>,
    /// Class and position of each coded lane. Both lists can be longer than `count`: they never shrink, because growing them
    /// again would clear them.
    classes: Vec<u8>,
    positions: Vec<u32>,
    count: usize,
}

impl CodedLanes {
    /// Finds the coded lanes among the base lanes of whole tiles. `activities` has one entry per block. `first` is the position
    /// of the first lane in its chunk, or `None` if positions are not needed. Lines of `prefetch` may be requested meanwhile.
    pub fn find<L: Lane>(
        &mut self,
        platform: Platform,
        classifier: Classifier<'_>,
        activities: &[u8],
        lanes: &[u8],
        first: Option<usize>,
        mut prefetch: Option<Prefetch<'_>>,
    ) {
        let Classifier { dtype, maps, states } = classifier;
        self.masks.resize(2 * activities.len(), 0);
        self.count = 0;
        let batches = lanes.chunks(BATCH * BLOCK * L::BYTES).zip(activities.chunks(BATCH)).zip(self.masks.chunks_mut(2 * BATCH));
        for (t, ((lanes, activities), masks)) in batches.enumerate() {
            // Grown by half of the needed size, so that few chunks make the buffer grow. Not sized for the worst case, because
            // the system must supply and clear new memory.
            let needed = self.count + activities.len() * BLOCK + HALF;
            if self.classes.len() < needed {
                self.classes.resize(needed + needed / 2, 0);
            }
            if first.is_some() && self.positions.len() < needed {
                self.positions.resize(needed + needed / 2, 0);
            }
            let mut out = simd::CompactedLanes {
                masks,
                classes: &mut self.classes[self.count..],
                positions: if first.is_some() { &mut self.positions[self.count..] } else { &mut [] },
            };
            let first = (first.unwrap_or_default() + t * BATCH * BLOCK) as u32;
            let tiles = tiles_of::<L>(states);
            if dtype == Dtype::Bf16 && lanes.len() == activities.len() * BLOCK * L::BYTES {
                // One pass over the lanes instead of two.
                let (lanes, lowest) = (lanes.as_chunks().0, maps.first.min(255) as u8);
                let prefetch = prefetch.as_mut().map(Prefetch::reborrow);
                let added = platform.compact_bf16(lanes, lowest, activities, &maps.classes, tiles, first, prefetch, &mut out);
                if let Some(added) = added {
                    self.count += added;
                    continue;
                }
            }
            let mut batch = [0; BATCH * BLOCK];
            let batch = &mut batch[..activities.len() * BLOCK];
            indexes::<L>(lanes, dtype, maps.first, batch);
            self.count += platform.compact(batch.as_chunks().0, activities, &maps.classes, tiles, first, &mut out);
        }
    }

    /// Converts steps of `from` states to shorter steps of `to` states. The result equals that of [`find`](Self::find) with `to`
    /// states, without positions. Cost: one pass over the classes.
    pub fn shorten_steps<L: Lane>(&mut self, from: usize, to: usize) {
        let (long, short) = (tiles_of::<L>(from), tiles_of::<L>(to));
        let (mut read, mut written) = (0, 0);
        for masks in self.masks.chunks(long.halves) {
            let count: usize = masks.iter().map(|mask| mask.count_ones() as usize).sum();
            self.classes.copy_within(read..read + count, written);
            let end = written + short.padded_len(count);
            self.classes[written + count..end].fill(0);
            read += long.padded_len(count);
            written = end;
        }
        self.count = written;
    }

    /// Returns the masks of coded lanes, one per half block.
    pub fn masks(&self) -> &[u64] {
        &self.masks
    }

    /// Returns the class of each coded lane, in order, with padding.
    pub fn classes(&self) -> &[u8] {
        &self.classes[..self.count]
    }

    /// Returns the position of each coded lane. Undefined where the class is 0, and if [`find`](Self::find) was called without
    /// `first`.
    pub fn positions(&self) -> &[u32] {
        self.positions.get(..self.count).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::conditioned::context::MAX_CONTEXTS;
    use crate::codec::simd::STEP;

    #[test]
    fn shortened_steps_are_those_found_with_short_ones() {
        // The context of a U8 is its bit length. Lanes of 5 bits are not coded.
        let mut classes = [[0; MAX_CONTEXTS]; 4];
        classes[0][..9].copy_from_slice(&[1, 2, 3, 4, 5, 0, 6, 7, 8]);
        let maps = Maps { first: 0, count: 9, classes };
        let random = |i: u32| (i.wrapping_mul(0x9E37_79B9) ^ i.wrapping_mul(0x85EB_CA6B) >> 15) >> 24;
        for lanes in [1, 100, 1024, 5000, 3 * BATCH * BLOCK + 77] {
            // Every third tile has no coded lanes.
            let lanes: Vec<u8> = (0..lanes as u32).map(|i| if i / 1024 % 3 == 1 { 31 } else { random(i) as u8 }).collect();
            let activities = vec![0; lanes.len().div_ceil(BLOCK)];
            let find = |states| {
                let mut coded = CodedLanes::default();
                coded.find::<u8>(
                    Platform::best(),
                    Classifier { dtype: Dtype::U8, maps: &maps, states },
                    &activities,
                    &lanes,
                    None,
                    None,
                );
                coded
            };
            for states in [1, 2, 16, STEP / 2, STEP] {
                let (mut shortened, expected) = (find(STEP), find(states));
                shortened.shorten_steps::<u8>(STEP, states);
                assert_eq!(shortened.masks(), expected.masks());
                assert!(shortened.classes() == expected.classes(), "{} lanes, {states} states", lanes.len());
            }
        }
    }
}
