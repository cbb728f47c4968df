//! Which lanes are coded, and in which class (`spec/codecs.md` section 4.4).

use super::context::{BLOCK, HALF, Maps, indexes, tile_blocks};
use crate::codec::simd::{self, Path, Tiles};
use crate::lane::{Dtype, Lane};

/// Blocks whose contexts are taken at once: whole tiles.
const BATCH: usize = 32;

/// The tiles of lanes of this type in a stream of `states` states.
pub(super) fn tiles_of<L: Lane>(states: usize) -> Tiles {
    Tiles { halves: tile_blocks(L::BYTES) * (BLOCK / HALF), step: states }
}

/// Coded lanes in order, in buffers that are used again. Each tile takes whole steps: places after its last lane have class 0.
#[derive(Default)]
pub(super) struct Coded {
    masks: Vec<u64>,
    /// The two below are longer than `count`, and never made shorter, because growing them again would clear them.
    classes: Vec<u8>,
    positions: Vec<u32>,
    count: usize,
}

impl Coded {
    /// Looks at the base lanes of tiles whose blocks have these activities, for those that are coded in steps of `states`. Their
    /// positions, in lanes, count from `first` for the first one looked at, and are only taken down if they are wanted.
    #[expect(clippy::too_many_arguments, reason = "all that says which lanes are coded, and what is wanted of them")]
    pub fn find<L: Lane>(
        &mut self,
        path: Path,
        dtype: Dtype,
        maps: &Maps,
        activities: &[u8],
        states: usize,
        lanes: &[u8],
        first: Option<usize>,
    ) {
        self.masks.resize(2 * activities.len(), 0);
        self.count = 0;
        let mut batch = [0; BATCH * BLOCK];
        let batches = lanes.chunks(batch.len() * L::BYTES).zip(activities.chunks(BATCH)).zip(self.masks.chunks_mut(2 * BATCH));
        for (t, ((lanes, activities), masks)) in batches.enumerate() {
            let batch = &mut batch[..activities.len() * BLOCK];
            indexes::<L>(lanes, dtype, maps.first, batch);
            // No more room than is needed: untouched memory has to be got from the system and cleared.
            let room = self.count + batch.len() + HALF;
            if self.classes.len() < room {
                self.classes.resize(room + room / 2, 0);
            }
            if first.is_some() && self.positions.len() < room {
                self.positions.resize(room + room / 2, 0);
            }
            let mut out = simd::Coded {
                masks,
                classes: &mut self.classes[self.count..],
                positions: if first.is_some() { &mut self.positions[self.count..] } else { &mut [] },
            };
            let first = (first.unwrap_or_default() + t * BATCH * BLOCK) as u32;
            self.count += path.compact(batch.as_chunks().0, activities, &maps.classes, tiles_of::<L>(states), first, &mut out);
        }
    }

    /// Turns steps of `from` states into shorter ones of `to`: what [`find`](Self::find) gives for `to`, without positions. Cost: one
    /// pass over the classes.
    pub fn shorten_steps<L: Lane>(&mut self, from: usize, to: usize) {
        let (long, short) = (tiles_of::<L>(from), tiles_of::<L>(to));
        let (mut read, mut written) = (0, 0);
        for masks in self.masks.chunks(long.halves) {
            let count: usize = masks.iter().map(|mask| mask.count_ones() as usize).sum();
            self.classes.copy_within(read..read + count, written);
            let end = written + short.places(count);
            self.classes[written + count..end].fill(0);
            read += long.places(count);
            written = end;
        }
        self.count = written;
    }

    /// A mask for each half of a block.
    pub fn masks(&self) -> &[u64] {
        &self.masks
    }

    /// The class of each coded lane, in order, and those that fill up steps.
    pub fn classes(&self) -> &[u8] {
        &self.classes[..self.count]
    }

    /// The position of each coded lane, if it was wanted; undefined where the class is 0.
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
        // Contexts of U8 are numbers of bits; those of 5 bits are not coded.
        let mut classes = [[0; MAX_CONTEXTS]; 4];
        classes[0][..9].copy_from_slice(&[1, 2, 3, 4, 5, 0, 6, 7, 8]);
        let maps = Maps { first: 0, count: 9, classes };
        let random = |i: u32| (i.wrapping_mul(0x9E37_79B9) ^ i.wrapping_mul(0x85EB_CA6B) >> 15) >> 24;
        for lanes in [1, 100, 1024, 5000, 3 * BATCH * BLOCK + 77] {
            // Every third tile has no coded lanes.
            let lanes: Vec<u8> = (0..lanes as u32).map(|i| if i / 1024 % 3 == 1 { 31 } else { random(i) as u8 }).collect();
            let activities = vec![0; lanes.len().div_ceil(BLOCK)];
            let find = |states| {
                let mut coded = Coded::default();
                coded.find::<u8>(Path::best(), Dtype::U8, &maps, &activities, states, &lanes, None);
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
