//! The lanes of a chunk while they are decoded.

use crate::codec::simd::{PIECE, Platform, Prefetch, PrefetchedLines, StreamFence};
use crate::codec::{CopiedBase, Fill};
use crate::error::Result;
use crate::prelude::*;
use core::ops::Range;

/// The lanes of a chunk. A decoder turns base lanes into target lanes in ascending order: it requests base lanes, changes them,
/// and releases them.
pub(super) enum Window<'a, 'b> {
    /// The caller writes the base lanes to the chunk's own memory.
    Filled { lanes: &'a mut [u8], fill: Fill<'a> },
    /// Base lanes are copied to a buffer, piece by piece. While other work is done, those of the next pieces are prefetched.
    /// Released lanes go to the chunk's memory with stores that bypass the cache. So each line of the chunk is transferred once,
    /// and not read before it is written. The buffer holds a piece, or two segments if they are decoded together.
    Buffered {
        lanes: &'a mut [u8],
        base: &'a mut CopiedBase<'b>,
        platform: Platform,
        fence: StreamFence,
        /// Begins with the chunk's bytes from `start` to the end of the copied base lanes. Never shrinks, so later bytes are
        /// undefined.
        buffer: &'a mut Vec<u8>,
        /// End of the released bytes.
        start: usize,
        requested: PrefetchedLines,
    },
}

impl<'a> Window<'a, '_> {
    /// Returns the size of the chunk in bytes.
    pub fn size(&self) -> usize {
        match self {
            Self::Filled { lanes, .. } | Self::Buffered { lanes, .. } => lanes.len(),
        }
    }

    /// Supplies the base lanes, at least up to byte `end`.
    pub fn fill(&mut self, end: usize) -> Result<()> {
        match self {
            Self::Filled { lanes, fill } => fill(lanes, end)?,
            Self::Buffered { lanes, base, platform, buffer, start, requested, .. } => {
                let end = end.next_multiple_of(PIECE).min(lanes.len());
                while end > base.copied() {
                    let size = end - *start;
                    if buffer.len() < size {
                        buffer.resize(size, 0);
                    }
                    let to = &mut buffer[base.copied() - *start..size];
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

    /// Returns a range of bytes that were supplied and are not released.
    pub fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        match self {
            Self::Filled { lanes, .. } => &mut lanes[range],
            Self::Buffered { buffer, start, .. } => &mut buffer[range.start - *start..range.end - *start],
        }
    }

    /// Returns a range of bytes that were supplied and are not released, and the memory to prefetch, if any.
    pub fn bytes_and_prefetch(&mut self, range: Range<usize>) -> (&mut [u8], Option<Prefetch<'_>>) {
        match self {
            Self::Filled { lanes, .. } => (&mut lanes[range], None),
            Self::Buffered { base, buffer, start, requested, .. } => {
                let lanes = &mut buffer[range.start - *start..range.end - *start];
                (lanes, Some(Prefetch { from: base.rest(), requested }))
            }
        }
    }

    /// Returns the memory to prefetch, if any.
    pub fn prefetch(&mut self) -> Option<Prefetch<'_>> {
        match self {
            Self::Filled { .. } => None,
            Self::Buffered { base, requested, .. } => Some(Prefetch { from: base.rest(), requested }),
        }
    }

    /// Returns the first byte that is not released. Bytes that the caller supplies are never released.
    pub fn start(&self) -> usize {
        match self {
            Self::Filled { .. } => 0,
            Self::Buffered { start, .. } => *start,
        }
    }

    /// Releases the lanes up to byte `end`, which have been supplied.
    pub fn release(&mut self, end: usize) {
        let Self::Buffered { lanes, base, platform, fence, buffer, start, .. } = self else { return };
        let (size, kept) = (end - *start, end - *start..base.copied() - *start);
        platform.stream(&buffer[..size], &mut lanes[*start..end], fence);
        buffer.copy_within(kept, 0);
        *start = end;
    }

    /// Returns all lanes of the chunk. Buffered lanes must all have been released. The fence is dropped, so that they can be accessed.
    pub fn into_lanes(self) -> &'a mut [u8] {
        match self {
            Self::Filled { lanes, .. } | Self::Buffered { lanes, .. } => lanes,
        }
    }
}
