//! What a block does before it looks at a lane: CRC, header, maps, segments, exceptions (`spec/codecs.md` section 4.4).
//!
//! All sizes fit in 32 bits: a chunk has at most 4 MiB and 2^22 lanes, and exceptions are fewer than those before their size is
//! formed. Nothing here takes long: the payload is read once, by all threads, for its CRC; the rest is some hundred bytes.

use super::crc::{CrcTables, block_crc32};
use super::memory::Payload;
use super::status::*;
use super::tables::{DeviceTables, Lookup};
use super::warp::{WARP, ballot, inclusive_scan, per_lane};
use super::{Chunk, Status};

/// Lanes of a block of lanes, which have one activity.
pub const BLOCK: usize = 128;
/// Entries of a map in shared memory: 64, and one for the contexts past them.
pub const MAP: usize = 65;

/// The parts of a payload: one thread writes it to shared memory.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    pub low_bits: u32,
    /// States of a stream, and segments.
    pub states: usize,
    pub segments: usize,
    pub activity_bits: usize,
    pub first_context: i32,
    contexts: usize,
    pub exceptions: usize,
    pub center: u64,
    maps_at: usize,
    pub activities_at: usize,
    pub positions_at: usize,
    pub deltas_at: usize,
    pub low_at: usize,
    sizes_at: usize,
    streams_at: usize,
}

/// What all threads know after the prologue.
pub struct Prologue {
    pub layout: Layout,
    /// Class of each context, four maps of [`MAP`] entries.
    pub classes: [u8; 4 * MAP],
    /// The tables; none that are ever looked at if the tensor has none.
    pub lookup: Lookup,
    /// Where the stream of each segment begins, and where the last one ends: bytes of the payload.
    pub streams: [usize; WARP + 1],
}

impl Layout {
    /// One thread: the header, and where the parts are.
    fn parse(payload: &Payload<'_>, lanes: usize, width: usize, num_deltas: u32) -> Result<Self, Status> {
        if payload.size < 16 {
            return Err(PAYLOAD_SIZE);
        }
        let blocks = lanes.div_ceil(BLOCK);
        let bits = 8 * width as u32;
        let [low_bits, states_log2, segments_log2, activity_bits] = payload.word(0).to_le_bytes();
        let [.., contexts, reserved] = payload.word(4).to_le_bytes();
        let (exceptions, center) = (payload.word(8), payload.word(12));
        let low_bits = u32::from(low_bits);
        if low_bits > bits
            || states_log2 > 5
            || segments_log2 > 5
            || 1 << segments_log2 > blocks
            || activity_bits > 2
            || !(1..=64).contains(&contexts)
            || reserved != 0
            || exceptions > num_deltas
        {
            return Err(PAYLOAD_HEADER);
        }
        let center_bits = if low_bits == 0 { 0 } else { bits - low_bits };
        if center_bits < 32 && center >> center_bits != 0 {
            return Err(PAYLOAD_HEADER);
        }
        let mut layout = Self {
            low_bits,
            states: 1 << states_log2,
            segments: 1 << segments_log2,
            activity_bits: activity_bits.into(),
            first_context: payload.half(4).into(),
            contexts: contexts.into(),
            exceptions: exceptions as usize,
            center: center.into(),
            maps_at: 16,
            ..Self::default()
        };
        let activities = blocks * layout.activity_bits;
        let low = lanes * low_bits as usize;
        layout.activities_at = layout.maps_at + (layout.contexts.div_ceil(2) << activity_bits);
        layout.positions_at = layout.activities_at + activities.div_ceil(8);
        layout.deltas_at = layout.positions_at + 4 * layout.exceptions;
        layout.low_at = layout.deltas_at + width * layout.exceptions;
        layout.sizes_at = layout.low_at + low.div_ceil(8);
        let end = layout.sizes_at + 4 * (layout.segments - 1);
        layout.streams_at = end.next_multiple_of(2);
        if layout.streams_at > payload.size || !(payload.size - layout.streams_at).is_multiple_of(2) {
            return Err(PAYLOAD_SIZE);
        }
        // Zeros up to the end of a byte, and of a word.
        let clean = |bits: usize, end: usize| bits.is_multiple_of(8) || payload.byte(end - 1) >> (bits % 8) == 0;
        let padded = end == layout.streams_at || payload.byte(end) == 0;
        if !(clean(activities, layout.positions_at) && clean(low, layout.sizes_at) && padded) {
            return Err(PAYLOAD_SIZE);
        }
        Ok(layout)
    }

    /// Position of an exception; past all of them, one that no lane has.
    pub fn position(&self, payload: &Payload<'_>, exception: usize) -> usize {
        if exception < self.exceptions { payload.unaligned(self.positions_at + 4 * exception, 4) as usize } else { usize::MAX }
    }
}

/// The prologue of a chunk that has a payload.
pub fn prologue(chunk: &Chunk<'_>, payload: &Payload<'_>, crc: &CrcTables, warps: usize) -> Result<Prologue, Status> {
    let width = chunk.dtype.lane_bytes();
    if block_crc32(payload, crc, warps) != chunk.crc32 {
        return Err(PAYLOAD_CRC32);
    }
    // One thread for each byte of the padding.
    if (payload.size..payload.size.next_multiple_of(16)).any(|at| payload.byte(at) != 0) {
        return Err(PAYLOAD_PADDING);
    }
    // One thread, then a barrier.
    let layout = Layout::parse(payload, chunk.lanes, width, chunk.num_deltas)?;

    // One thread an entry of the maps.
    let known = chunk.tables.map_or(0, DeviceTables::classes);
    let mut classes = [0; 4 * MAP];
    let map_size = layout.contexts.div_ceil(2);
    for (entry, class) in classes.iter_mut().enumerate() {
        let (map, i) = (entry / MAP, entry % MAP);
        if map < 1 << layout.activity_bits && i < 2 * map_size {
            *class = payload.byte(layout.maps_at + map * map_size + i / 2) >> (4 * (i % 2)) & 15;
            if usize::from(*class) > if i < layout.contexts { known } else { 0 } {
                return Err(PAYLOAD_CLASSES);
            }
        }
    }
    let streams = segment_streams(payload, &layout)?;

    // All threads, an exception each at a time.
    for exception in 0..layout.exceptions {
        let position = layout.position(payload, exception);
        if position >= chunk.lanes || (exception > 0 && position <= layout.position(payload, exception - 1)) {
            return Err(PAYLOAD_POSITIONS);
        }
        if payload.unaligned(layout.deltas_at + width * exception, width) == 0 {
            return Err(PAYLOAD_DELTAS);
        }
    }
    let lookup = chunk.tables.map(Lookup::new).unwrap_or_default();
    Ok(Prologue { layout, classes, lookup, streams })
}

/// One warp: where the streams are. A thread has the size of a segment's stream.
fn segment_streams(payload: &Payload<'_>, layout: &Layout) -> Result<[usize; WARP + 1], Status> {
    let words = ((payload.size - layout.streams_at) / 2) as u32;
    let last = layout.segments - 1;
    let size = per_lane(|lane| if lane < last { payload.unaligned(layout.sizes_at + 4 * lane, 4) as u32 } else { 0 });
    // More than there are is too much already, and keeps the sum within 32 bits.
    let end = inclusive_scan(size.map(|size| size.min(words + 1)));
    if ballot(&end.map(|end| end > words)) != 0 {
        return Err(PAYLOAD_SIZE);
    }
    let mut streams = [layout.streams_at; WARP + 1];
    (0..last).for_each(|lane| streams[lane + 1] += 2 * end[lane] as usize);
    streams[layout.segments] = payload.size;
    Ok(streams)
}
