//! What all decoders share: changes that are written into lanes, and what a record and a caller give them.

use crate::error::{Result, Rule};
use crate::lane::{Lane, Order, lanes_of_mut};
use crate::sums::{chunk_sum, lane_term};
use zerocopy::IntoBytes;

/// Writes changes into lanes one after the other, and refuses what is not a valid list of them.
pub(crate) struct Patch<'a, L: Lane> {
    lanes: &'a mut [L::Le],
    order: Order,
    next: usize,
    /// The chunk sum of the lanes as they are now, while it is kept.
    sum: Option<u64>,
}

impl<'a, L: Lane> Patch<'a, L> {
    /// A patch of at most `count` changes to lanes whose chunk sum is `sum`.
    pub fn new(lanes: &'a mut [u8], count: usize, sum: u64, order: Order) -> Self {
        let lanes = lanes_of_mut::<L>(lanes);
        // A term a change is dearer than its share of a pass over all lanes.
        let sum = (16 * count < lanes.len()).then_some(sum);
        Self { lanes, order, next: 0, sum }
    }

    /// The chunk sum of the lanes.
    pub fn finish(self) -> u64 {
        self.sum.unwrap_or_else(|| chunk_sum(self.lanes.as_bytes()))
    }

    /// Changes the lane `gap` lanes after the last one.
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

/// What an encoder says of a payload; the rest of the record follows from it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Bytes that the payload expands to.
    pub uncompressed_size: u32,
    /// Changed lanes.
    pub num_deltas: u32,
}

/// Puts base lanes into the lanes of a chunk, at least up to a byte, where they are not there yet: from the first to the last,
/// and each once, so that they can be copied and checked while they are in the cache for decoding. Does nothing for lanes that
/// begin as the base's.
pub type Fill<'a> = &'a mut dyn FnMut(&mut [u8], usize) -> Result<()>;
