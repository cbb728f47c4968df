//! Sizes of the parts of a payload.

use super::payload::Payload;
use super::stream::Stream;
use super::tables::TableSet;
use crate::codec::PayloadParts;
use crate::error::Result;

/// See [`Codec::parts`](crate::codec::Codec::parts).
pub fn parts(payload: &[u8], num_deltas: u32, lanes: usize, lane_bytes: usize, tables: Option<&TableSet>) -> Result<PayloadParts> {
    let classes = tables.map_or(0, |tables| tables.classes().len());
    let payload = Payload::parse(payload, lanes, lane_bytes, num_deltas, classes)?;
    let mut parts = PayloadParts {
        headers: payload.headers as u64,
        activities: payload.activities.len() as u64,
        exceptions: (4 * payload.positions.len() + payload.deltas.len()) as u64,
        low_bits: payload.low.len() as u64,
        ..PayloadParts::default()
    };
    let (states, bits) = (1usize << payload.states_log2, 8 * lane_bytes as u32 - payload.low_bits);
    for stream in payload.streams() {
        let stream = stream?;
        // Checks that the initial states are present and valid.
        Stream::begin(stream, states, bits)?;
        parts.states += 4 * states as u64;
        parts.words += (stream.len() - 4 * states) as u64;
    }
    Ok(parts)
}
