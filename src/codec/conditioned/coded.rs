//! Which lanes are coded, and in which class (`spec/codecs.md` section 4.4).

use super::context::{BLOCK, HALF, Maps, indexes};
use crate::lane::{Dtype, Lane};
use crate::simd::{self, Path};

/// Blocks whose contexts are taken at once.
const TILE: usize = 32;

/// Coded lanes in order, in buffers that are used again.
#[derive(Default)]
pub(super) struct Coded {
    /// Of the blocks that were looked at last.
    masks: Vec<u64>,
    /// The two below are longer than `count`, and never made shorter, because growing them again would clear them.
    classes: Vec<u8>,
    positions: Vec<u32>,
    count: usize,
}

impl Coded {
    /// Looks at the base lanes of blocks with these activities, and adds those that are coded. Their positions, in lanes, count
    /// from `first` for the first one looked at, and are only taken down if they are wanted: always or never.
    pub fn find<L: Lane>(&mut self, path: Path, dtype: Dtype, maps: &Maps, activities: &[u8], lanes: &[u8], first: Option<usize>) {
        self.masks.resize(2 * activities.len(), 0);
        let mut tile = [0; TILE * BLOCK];
        let tiles = lanes.chunks(tile.len() * L::BYTES).zip(activities.chunks(TILE)).zip(self.masks.chunks_mut(2 * TILE));
        for (t, ((lanes, activities), masks)) in tiles.enumerate() {
            let tile = &mut tile[..activities.len() * BLOCK];
            indexes::<L>(lanes, dtype, maps.first, tile);
            // No more room than is needed: untouched memory has to be got from the system and cleared.
            let room = self.count + tile.len() + HALF;
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
            let first = (first.unwrap_or_default() + t * TILE * BLOCK) as u32;
            self.count += path.compact(tile.as_chunks().0, activities, &maps.classes, first, &mut out);
        }
    }

    /// Forgets all lanes.
    pub fn clear(&mut self) {
        self.count = 0;
    }

    /// Forgets the first `count` lanes; their positions were wanted if any are left.
    pub fn forget(&mut self, count: usize) {
        if count < self.count {
            self.classes.copy_within(count..self.count, 0);
            self.positions.copy_within(count..self.count, 0);
        }
        self.count -= count;
    }

    /// A mask for each half of a block that was looked at last.
    pub fn masks(&self) -> &[u64] {
        &self.masks
    }

    /// The class of each coded lane, in order.
    pub fn classes(&self) -> &[u8] {
        &self.classes[..self.count]
    }

    /// The position of each coded lane, if it was wanted.
    pub fn positions(&self) -> &[u32] {
        self.positions.get(..self.count).unwrap_or_default()
    }
}
