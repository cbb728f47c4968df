//! Contexts and classes of base lanes (`spec/codecs.md` sections 4.1 and 4.4).

use crate::dispatch::vectorized;
use crate::lane::{Context, Dtype, Lane, lanes_of};

/// Lanes per block.
pub const BLOCK: usize = 128;
/// Lanes per half block. One 64-bit mask covers a half block.
pub const HALF: usize = 64;
/// Returns the number of blocks per tile, for lanes of `width` bytes. The last tile can have fewer.
pub const fn tile_blocks(width: usize) -> usize {
    if width <= 2 { 8 } else { 16 / width }
}
/// Maximum number of contexts per map.
pub const MAX_CONTEXTS: usize = 64;

/// Writes min(max(c, `first`) − `first`, 255) to `out` for each lane with context c, and 255 beyond the last lane.
pub fn indexes<L: Lane>(lanes: &[u8], dtype: Dtype, first: u16, out: &mut [u8]) {
    let lanes = lanes_of::<L>(lanes);
    let (used, unused) = out.split_at_mut(lanes.len());
    unused.fill(255);
    let first = L::saturate(first);
    // One loop per kind of context, so that the compiler vectorises each.
    match dtype.context() {
        Context::Exponent { shift, bits } => write_indexes::<L>(
            used,
            lanes,
            #[inline(always)]
            |lane: L| lane.exponent(shift, bits).index_from(first),
        ),
        Context::SignedBits => write_indexes::<L>(
            used,
            lanes,
            #[inline(always)]
            |lane: L| lane.magnitude().bit_count().index_from(first),
        ),
        Context::Bits => write_indexes::<L>(
            used,
            lanes,
            #[inline(always)]
            |lane: L| lane.bit_count().index_from(first),
        ),
    }
}

#[inline(always)]
fn write_indexes<L: Lane>(out: &mut [u8], lanes: &[L::Le], index_of: impl Fn(L) -> u8) {
    vectorized!(out.iter_mut().zip(lanes).for_each(|(out, lane)| *out = index_of(L::load(*lane))));
}

/// The maps of a payload, from context and activity to class.
#[derive(Debug, Clone)]
pub struct Maps {
    /// First context with its own entry; lower ones share it.
    pub first: u16,
    /// Number of entries of a map.
    pub count: u8,
    /// Class of each entry, per activity; 0 past the last entry.
    pub classes: [[u8; MAX_CONTEXTS]; 4],
}
