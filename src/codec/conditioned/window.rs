//! The lanes of a chunk while they are decoded.

use crate::codec::simd::{PIECE, Platform, Prefetch, PrefetchedLines};
use crate::codec::{CopiedBase, Fill};
use crate::error::Result;
use std::ops::Range;

/// The lanes of a chunk. A decoder turns base lanes into target lanes in ascending order: it requests base lanes, and changes them.
pub(super) enum Window<'a, 'b> {
    /// The caller writes the base lanes.
    Filled { lanes: &'a mut [u8], fill: Fill<'a> },
    /// Base lanes are copied by pieces. While other work is done, base lanes and memory of the next pieces are prefetched.
    ByPiece { lanes: &'a mut [u8], base: &'a mut CopiedBase<'b>, platform: Platform, requested: PrefetchedLines },
}

impl<'a> Window<'a, '_> {
    /// Returns the size of the chunk in bytes.
    pub fn size(&self) -> usize {
        match self {
            Self::Filled { lanes, .. } | Self::ByPiece { lanes, .. } => lanes.len(),
        }
    }

    /// Supplies the base lanes, at least up to byte `end`.
    pub fn fill(&mut self, end: usize) -> Result<()> {
        match self {
            Self::Filled { lanes, fill } => fill(lanes, end)?,
            Self::ByPiece { lanes, base, platform, requested } => {
                while end > base.copied() {
                    let to = &mut lanes[base.copied()..];
                    match (base.rest().first_chunk::<PIECE>(), to.first_chunk_mut()) {
                        (Some(from), Some(to)) => base.add_copied(&platform.copy_piece(from, to)),
                        _ => base.copy(to),
                    }
                    *requested = PrefetchedLines::default();
                }
            }
        }
        Ok(())
    }

    /// Returns a range of bytes that were supplied.
    pub fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        match self {
            Self::Filled { lanes, .. } | Self::ByPiece { lanes, .. } => &mut lanes[range],
        }
    }

    /// Returns a range of bytes that were supplied, and the memory to prefetch, if any.
    pub fn bytes_and_prefetch(&mut self, range: Range<usize>) -> (&mut [u8], Option<Prefetch<'_>>) {
        match self {
            Self::Filled { lanes, .. } => (&mut lanes[range], None),
            Self::ByPiece { lanes, base, requested, .. } => {
                let (supplied, to) = lanes.split_at_mut(base.copied());
                (&mut supplied[range], Some(Prefetch { from: base.rest(), to, requested }))
            }
        }
    }

    /// Returns all lanes of the chunk.
    pub fn into_lanes(self) -> &'a mut [u8] {
        match self {
            Self::Filled { lanes, .. } | Self::ByPiece { lanes, .. } => lanes,
        }
    }
}
