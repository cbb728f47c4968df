//! Types that the decoders share.

use crate::error::{Result, Rule};
use crate::format::ChunkMetadata;
use crate::lane::{Lane, Order, lanes_of_mut};
use crate::sums::{ChunkSum, chunk_sum, lane_term};
use zerocopy::IntoBytes;

/// Applies changes to lanes in ascending order. Refuses invalid changes.
pub struct Patch<'a, L: Lane> {
    lanes: &'a mut [L::Le],
    order: Order,
    next: usize,
    /// Chunk sum of the current lanes; `None` if the sum is computed at the end.
    sum: Option<u64>,
}

impl<'a, L: Lane> Patch<'a, L> {
    /// Starts a patch of at most `count` changes, to lanes whose chunk sum is `sum`.
    pub fn new(lanes: &'a mut [u8], count: usize, sum: u64, order: Order) -> Self {
        let lanes = lanes_of_mut::<L>(lanes);
        // Updating the sum costs more per change than recomputing it costs per lane. So it is updated only if few lanes change.
        let sum = (16 * count < lanes.len()).then_some(sum);
        Self { lanes, order, next: 0, sum }
    }

    /// Returns the chunk sum of the lanes.
    pub fn finish(self) -> u64 {
        self.sum.unwrap_or_else(|| chunk_sum(self.lanes.as_bytes()))
    }

    /// Skips `gap` lanes after the previous change, and changes the next lane.
    #[inline(always)]
    pub fn change(&mut self, gap: usize, delta: L) -> Result<()> {
        let position = self.next.saturating_add(gap);
        let count = self.lanes.len();
        let Some(lane) = self.lanes.get_mut(position) else {
            return Err(Rule::PayloadPositions.broken(format_args!("a position below {count}"), position));
        };
        if delta == L::default() {
            return Err(Rule::PayloadDeltas.broken("a delta that is not zero", format_args!("zero at lane {position}")));
        }
        let base = L::load(*lane);
        let target = L::apply(base, delta, self.order);
        if let Some(sum) = &mut self.sum {
            *sum = sum.wrapping_add(lane_term(position, base, target));
        }
        *lane = target.store();
        self.next = position + 1;
        Ok(())
    }
}

/// Fields of a record that an encoder returns with a payload. The other fields are computed from the payload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Size of the expanded payload, in bytes.
    pub uncompressed_size: u32,
    /// Number of changed lanes.
    pub num_deltas: u32,
}

impl From<&ChunkMetadata> for Encoded {
    fn from(record: &ChunkMetadata) -> Self {
        Self { uncompressed_size: record.uncompressed_size.get(), num_deltas: record.num_deltas.get() }
    }
}

/// Callback that writes the base lanes of a chunk, at least up to a byte offset. A decoder calls it just before it needs the lanes,
/// so lanes are copied and checked while they are in the cache. Offsets need not ascend. The callback does nothing if the buffer
/// already has the base lanes.
pub type Fill<'a> = &'a mut dyn FnMut(&mut [u8], usize) -> Result<()>;

/// Base lanes of a chunk in memory, which are copied in ascending order, and their sum.
pub struct CopiedBase<'a> {
    lanes: &'a [u8],
    copied: usize,
    sum: ChunkSum,
}

impl<'a> CopiedBase<'a> {
    /// Base lanes that are copied from `lanes`.
    pub fn new(lanes: &'a [u8]) -> Self {
        Self { lanes, copied: 0, sum: ChunkSum::default() }
    }

    /// Returns the number of copied bytes.
    pub fn copied(&self) -> usize {
        self.copied
    }

    /// Returns the lanes that are not copied yet.
    pub fn rest(&self) -> &'a [u8] {
        &self.lanes[self.copied..]
    }

    /// Copies the next lanes to all of `out`. Its size must be a multiple of [`ChunkSum::BLOCK`], except at the end.
    pub fn copy(&mut self, out: &mut [u8]) {
        self.sum.copy(&self.rest()[..out.len()], out);
        self.copied += out.len();
    }

    /// Counts the next rows as copied by the caller. `inner_sums` is as in [`ChunkSum::add_inner_sums`].
    pub fn add_copied(&mut self, inner_sums: &[u64]) {
        self.copied += inner_sums.len() * ChunkSum::BLOCK;
        self.sum.add_inner_sums(inner_sums);
    }

    /// Copies lanes to their places in `out`, which has the size of the chunk, at least up to byte `end`.
    pub fn copy_to_end_of_block(&mut self, out: &mut [u8], end: usize) {
        let end = end.next_multiple_of(8 * ChunkSum::BLOCK).min(out.len());
        if end > self.copied {
            self.copy(&mut out[self.copied..end]);
        }
    }

    /// Returns the sum of all lanes.
    pub fn sum(mut self) -> u64 {
        self.sum.add(self.rest());
        self.sum.value
    }
}
