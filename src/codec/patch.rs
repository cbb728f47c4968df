//! Types shared by decoders: applying changes to lanes, and the arguments from records and callers.

use crate::error::{Result, Rule};
use crate::lane::{Lane, Order, lanes_of_mut};
use crate::sums::{chunk_sum, lane_term};
use zerocopy::IntoBytes;

/// Applies changes to lanes in ascending order, and refuses invalid ones.
pub(crate) struct Patch<'a, L: Lane> {
    lanes: &'a mut [L::Le],
    order: Order,
    next: usize,
    /// The chunk sum of the current lanes, if it is updated per change.
    sum: Option<u64>,
}

impl<'a, L: Lane> Patch<'a, L> {
    /// A patch of at most `count` changes to lanes whose chunk sum is `sum`.
    pub fn new(lanes: &'a mut [u8], count: usize, sum: u64, order: Order) -> Self {
        let lanes = lanes_of_mut::<L>(lanes);
        // If few lanes change, the sum is updated per change. That costs more per change than a pass costs per lane.
        let sum = (16 * count < lanes.len()).then_some(sum);
        Self { lanes, order, next: 0, sum }
    }

    /// The chunk sum of the lanes.
    pub fn finish(self) -> u64 {
        self.sum.unwrap_or_else(|| chunk_sum(self.lanes.as_bytes()))
    }

    /// Changes the lane that is `gap` lanes after the previous one.
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

/// An encoder's description of a payload. The rest of the record follows from the payload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Bytes of the expanded payload.
    pub uncompressed_size: u32,
    /// Changed lanes.
    pub num_deltas: u32,
}

/// Callback that fills in the base lanes of a chunk, at least up to a byte offset. Called with ascending offsets, so that lanes
/// are copied and checked while they are in the cache for decoding. Does nothing if the lanes already are the base's.
pub type Fill<'a> = &'a mut dyn FnMut(&mut [u8], usize) -> Result<()>;
