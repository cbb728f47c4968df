//! Which lanes are coded, and in which class (`spec/codecs.md` section 4.4).

use super::context::{BLOCK, HALF, Maps, indexes};
use crate::lane::{Dtype, Lane};
use crate::simd::{self, Path};

/// Blocks whose contexts are taken at once.
const TILE: usize = 32;

/// The coded lanes of a range of blocks, found in buffers that are used again.
#[derive(Default)]
pub(super) struct Coded {
    masks: Vec<u64>,
    /// The two below are longer than `count`, and never made shorter, because growing them again would clear them.
    classes: Vec<u8>,
    positions: Vec<u32>,
    count: usize,
}

impl Coded {
    /// Looks at the base lanes of blocks with these activities. Positions count from the first lane, and are only taken down if
    /// they are wanted.
    pub fn find<L: Lane>(&mut self, path: Path, dtype: Dtype, maps: &Maps, activities: &[u8], lanes: &[u8], positions: bool) {
        self.masks.resize(2 * activities.len(), 0);
        self.count = 0;
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
            if positions && self.positions.len() < room {
                self.positions.resize(room + room / 2, 0);
            }
            let mut out = simd::Coded {
                masks,
                classes: &mut self.classes[self.count..],
                positions: if positions { &mut self.positions[self.count..] } else { &mut [] },
            };
            let first = (t * TILE * BLOCK) as u32;
            self.count += path.compact(tile.as_chunks().0, activities, &maps.classes, first, &mut out);
        }
    }

    /// A mask for each half of a block.
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
