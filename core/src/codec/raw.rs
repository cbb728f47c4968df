//! Codec 0 (`spec/codecs.md` section 2).

use super::{Difference, Encoded, Patch, PayloadParts};
use crate::error::{Result, Rule};
use crate::lane::{Lane, Order, lanes_of};
use crate::prelude::*;
use zerocopy::IntoBytes;

/// Returns the offset of the deltas, in bytes.
fn deltas_at(num_deltas: u32, lane_bytes: usize) -> u64 {
    (4 * u64::from(num_deltas)).next_multiple_of(lane_bytes as u64)
}

/// Returns the size of a payload, in bytes.
pub fn size(num_deltas: u32, lane_bytes: usize) -> u64 {
    deltas_at(num_deltas, lane_bytes) + u64::from(num_deltas) * lane_bytes as u64
}

/// Returns the sizes of the parts of a payload.
pub(super) fn parts(payload: &[u8], num_deltas: u32, lane_bytes: usize) -> Result<PayloadParts> {
    Rule::PayloadSize.check_eq(size(num_deltas, lane_bytes), payload.len() as u64)?;
    let positions = deltas_at(num_deltas, lane_bytes);
    Ok(PayloadParts { positions, deltas: payload.len() as u64 - positions, ..PayloadParts::default() })
}

pub(super) fn encode<L: Lane>(difference: Difference<'_>, payload: &mut Vec<u8>) -> Encoded {
    let (count, changes) = (difference.changed, difference.changes::<L>());
    let start = payload.len();
    payload.extend(changes.positions.iter().flat_map(|p| p.to_le_bytes()));
    payload.resize(start + deltas_at(count as u32, L::BYTES) as usize, 0);
    for delta in changes.deltas {
        payload.extend_from_slice(delta.store().as_bytes());
    }
    Encoded { uncompressed_size: (payload.len() - start) as u32, num_deltas: count as u32 }
}

pub(super) fn decode<L: Lane>(payload: &[u8], num_deltas: u32, order: Order, base_sum: u64, lanes: &mut [u8]) -> Result<u64> {
    let count = num_deltas as usize;
    let deltas_at = deltas_at(num_deltas, L::BYTES) as usize;
    let (Some((positions, padding)), Some(deltas)) =
        (payload.get(..deltas_at).and_then(|p| p.split_at_checked(4 * count)), payload.get(deltas_at..))
    else {
        return Err(Rule::PayloadSize.broken(format_args!("{} bytes", size(num_deltas, L::BYTES)), payload.len()));
    };
    Rule::PayloadPositions.check(padding.iter().all(|&b| b == 0), "zeros after the positions", "other bytes")?;
    let deltas = lanes_of::<L>(deltas);
    Rule::PayloadSize.check_eq(count, deltas.len())?;
    let mut patch = Patch::<L>::new(lanes, count, base_sum, order);
    let mut next = 0;
    for (position, delta) in positions.as_chunks::<4>().0.iter().zip(deltas) {
        let position = u32::from_le_bytes(*position) as usize;
        let gap =
            position.checked_sub(next).ok_or_else(|| Rule::PayloadPositions.broken(format_args!("{next} or more"), position))?;
        patch.change(gap, L::load(*delta))?;
        next = position + 1;
    }
    Ok(patch.finish())
}
