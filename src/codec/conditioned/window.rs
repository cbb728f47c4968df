//! The lanes of a chunk while they are decoded.

use crate::codec::simd::{Platform, StreamFence};
use crate::codec::{CopiedBase, Fill};
use crate::error::Result;
use std::ops::Range;

/// Size of the pieces in which base lanes are copied.
const PIECE: usize = if cfg!(any(test, fuzzing)) { 4096 } else { 8192 };

/// The lanes of a chunk. A decoder turns base lanes into target lanes in ascending order: it requests base lanes, changes them,
/// and releases them.
pub(super) enum Window<'a, 'b> {
    /// Base lanes are written to the chunk's own memory and changed there.
    InPlace { lanes: &'a mut [u8], fill: Fill<'a> },
    /// Base lanes are copied to a small buffer and changed there. Released lanes go to the chunk's memory with stores that bypass
    /// the cache. So each line of the chunk is transferred once, and not read before it is written.
    Buffered {
        lanes: &'a mut [u8],
        base: &'a mut CopiedBase<'b>,
        platform: Platform,
        fence: StreamFence,
        /// The chunk's bytes from `start` to the end of the copied base lanes. Never shrinks.
        buffer: &'a mut Vec<u8>,
        /// End of the released bytes.
        start: usize,
    },
}

impl<'a> Window<'a, '_> {
    /// Returns the size of the chunk in bytes.
    pub fn size(&self) -> usize {
        match self {
            Self::InPlace { lanes, .. } | Self::Buffered { lanes, .. } => lanes.len(),
        }
    }

    /// Supplies the base lanes, at least up to byte `end`.
    pub fn fill(&mut self, end: usize) -> Result<()> {
        match self {
            Self::InPlace { lanes, fill } => fill(lanes, end),
            Self::Buffered { lanes, base, buffer, start, .. } => {
                let end = end.next_multiple_of(PIECE).min(lanes.len());
                if end > base.copied() {
                    let size = end - *start;
                    if buffer.len() < size {
                        buffer.resize(size, 0);
                    }
                    let first = base.copied() - *start;
                    base.copy(&mut buffer[first..size]);
                }
                Ok(())
            }
        }
    }

    /// Returns a range of bytes that were supplied and are not released.
    pub fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        match self {
            Self::InPlace { lanes, .. } => &mut lanes[range],
            Self::Buffered { buffer, start, .. } => &mut buffer[range.start - *start..range.end - *start],
        }
    }

    /// Returns the first byte that is not released. In place, bytes are never released.
    pub fn start(&self) -> usize {
        match self {
            Self::InPlace { .. } => 0,
            Self::Buffered { start, .. } => *start,
        }
    }

    /// Releases the lanes up to byte `end`, which have been supplied.
    pub fn release(&mut self, end: usize) {
        let Self::Buffered { lanes, base, platform, fence, buffer, start } = self else { return };
        let (size, kept) = (end - *start, end - *start..base.copied() - *start);
        // The base lanes that `fill` copies next are read from memory meanwhile.
        platform.stream(&buffer[..size], &mut lanes[*start..end], base.rest(), fence);
        buffer.copy_within(kept, 0);
        *start = end;
    }

    /// Returns all lanes of the chunk. All must have been released.
    pub fn into_lanes(self) -> &'a mut [u8] {
        match self {
            Self::InPlace { lanes, .. } | Self::Buffered { lanes, .. } => lanes,
        }
    }
}
