//! Streams and payloads of chunks.

use super::blob::PinnedBlob;
use super::chunks::{Chunk, Limits, Tables, Wave};
use super::session::{Drained, Session};
use crate::codec::conditioned::{size_of_cost, uncoded_bytes};
use crate::codec::raw_size;
use crate::cuda::abi::{self, EncodeChunk, EncodeState, form};
use crate::cuda::runtime::memory::PinnedBuffer;
use crate::error::Result;
use crate::format::{ConditionedHeader, PAYLOAD_ALIGN};
use std::mem::offset_of;
use std::ops::Range;

/// Payloads of consecutive chunks of a wave, one after the other, each with padding.
pub(super) struct Payloads {
    pub chunks: Range<usize>,
    /// `None` if they are in the reserved memory of the blob.
    pub stored: Option<PinnedBuffer>,
}

/// What takes the payloads of a wave.
pub(super) trait Sink {
    /// Returns the blob if it is in pinned memory, and the size that is expected if `bytes` bytes of payloads follow for `lanes`
    /// bytes of lanes.
    fn pinned(&mut self, bytes: u64, lanes: u64) -> Option<(&mut PinnedBlob, usize)>;

    /// Takes payloads in order.
    fn add(&mut self, wave: &Wave<'_>, payloads: Payloads) -> Result<()>;
}

/// Returns the worst-case number of words per coded lane: one for the symbol, and one per 16 extra bits.
fn words_max(chunk: &EncodeChunk) -> u64 {
    1 + (1u64 << chunk.lane_log2).div_ceil(2)
}

/// Returns the room for the streams of a chunk in words. `words_scale` and `segments_log2` are set.
fn words(chunk: &Chunk<'_>) -> u64 {
    let segments = 1u64 << chunk.device.segments_log2;
    u64::from(chunk.state.coded) * u64::from(chunk.device.words_scale) / 256 + segments * u64::from(abi::ENCODE_SPARE)
}

/// Returns the size of a payload in bytes, without padding.
fn payload_size(chunk: &Chunk<'_>) -> u64 {
    let Chunk { device, state, plan, .. } = chunk;
    let (width, changed) = (plan.width() as usize, state.changed as usize);
    match device.form {
        form::NONE => 0,
        form::RAW => raw_size(state.changed, width),
        form::LISTED | form::PLAIN => uncoded_bytes(changed, width, chunk.bytes() as usize) as u64,
        _ => {
            let (lanes, segments) = (u64::from(device.lanes), 1usize << device.segments_log2);
            let maps = u64::from(state.context_count).div_ceil(2) << state.activity_bits;
            let activities = (lanes.div_ceil(128) * u64::from(state.activity_bits)).div_ceil(8);
            let exceptions = u64::from(state.exceptions) * (4 + width as u64);
            let low = (lanes * u64::from(device.low_bits)).div_ceil(8);
            let parts = size_of::<ConditionedHeader>() as u64 + maps + activities + exceptions + low + 4 * (segments as u64 - 1);
            let streams: u64 = state.stream_words[..segments].iter().map(|&words| u64::from(words)).sum();
            parts.next_multiple_of(2) + 2 * streams
        }
    }
}

/// Writes the payloads of a wave, some at a time, and passes them to `sink` in order. Sets `payload_size` and the state of each
/// chunk.
pub(super) fn write(
    session: &Session<'_>,
    tables: &Tables,
    limits: Limits,
    wave: &mut Wave<'_>,
    sink: &mut dyn Sink,
) -> Result<()> {
    for chunk in wave.chunks.iter_mut().filter(|chunk| chunk.device.form == form::CODED) {
        let size = size_of_cost(chunk.state.cost, chunk.state.coded as usize, chunk.device.low_bits.into(), chunk.plan.pace);
        // Half of the bytes are words; 256ths of words per coded lane.
        let estimated = (size / 2 * limits.room).div_ceil(u64::from(chunk.state.coded.max(1)));
        chunk.device.words_scale = estimated.min(256 * words_max(&chunk.device)) as u32;
    }
    let mut first = 0;
    while first < wave.chunks.len() {
        let (mut end, mut bytes) = (first, 0);
        while end < wave.chunks.len() {
            let chunk = &wave.chunks[end];
            let more = if chunk.device.form == form::CODED { 2 * words(chunk) } else { payload_size(chunk) };
            if end > first && bytes + more > limits.payloads {
                break;
            }
            (bytes, end) = (bytes + more, end + 1);
        }
        let payloads = write_range(session, tables, limits, wave, first..end, sink)?;
        sink.add(wave, payloads)?;
        first = end;
    }
    Ok(())
}

fn write_range(
    session: &Session<'_>,
    tables: &Tables,
    limits: Limits,
    wave: &mut Wave<'_>,
    range: Range<usize>,
    sink: &mut dyn Sink,
) -> Result<Payloads> {
    let mut pending: Vec<usize> = range.clone().filter(|&i| wave.chunks[i].device.form == form::CODED).collect();
    // The memory of each round is needed until the payloads are gathered.
    let mut rounds = Vec::new();
    while !pending.is_empty() {
        let bytes: u64 = pending.iter().map(|&i| (2 * words(&wave.chunks[i])).next_multiple_of(16)).sum();
        let memory = session.alloc(bytes)?;
        let (mut at, mut segments) = (memory.address(), 0);
        let mut list = Vec::with_capacity(pending.len());
        for &i in &pending {
            let room = (2 * words(&wave.chunks[i])).next_multiple_of(16);
            let device = &mut wave.chunks[i].device;
            (device.words, device.first_segment) = (at, segments);
            (at, segments) = (at + room, segments + (1 << device.segments_log2));
            list.push(*device);
        }
        // Many segments keep the device busy with a warp each. Few need several warps, to be encoded in less time.
        let alone = u64::from(segments) >= limits.alone * u64::from(session.device.multiprocessors);
        let uploaded = session.upload(&list)?;
        let _drained = Drained(session);
        let parameter = abi::Encode {
            chunks: uploaded.address(),
            tables: tables.address(),
            count: list.len() as u32,
            parts: segments,
            alone: u32::from(alone),
            ..abi::Encode::default()
        };
        let blocks = if alone { segments.div_ceil(abi::ENCODE_STREAM_THREADS / 32) } else { segments };
        session.launch(session.kernels.streams, blocks, &parameter)?;
        let found = read_states(session, wave, range.clone())?;
        for &i in &pending {
            wave.chunks[i].state = found[i - range.start];
        }
        pending.retain(|&i| wave.chunks[i].state.overflow != 0);
        for &i in &pending {
            let device = &mut wave.chunks[i].device;
            // This room is always enough.
            device.words_scale = 256 * words_max(device) as u32;
            let overflow = offset_of!(EncodeState, overflow) as u64;
            let state = device.state - wave.states.address();
            session.clear(&wave.states.slice(state + overflow, 4)?)?;
        }
        rounds.push(memory);
    }

    let mut bytes = 0;
    for chunk in &mut wave.chunks[range.clone()] {
        let width = chunk.plan.width() as usize;
        let mut size = payload_size(chunk);
        let most = uncoded_bytes(chunk.state.changed as usize, width, chunk.bytes() as usize) as u64;
        if chunk.device.form == form::CODED && size > most {
            chunk.device.form = chunk.uncoded();
            size = most;
        }
        chunk.device.payload_size = size as u32;
        chunk.device.payload = bytes;
        bytes += size.next_multiple_of(PAYLOAD_ALIGN);
    }
    let lanes = wave.chunks[range.clone()].iter().map(Chunk::bytes).sum();
    let mut pinned = None;
    let to = match sink.pinned(bytes, lanes) {
        Some((blob, expected)) => blob.reserve(bytes as usize, expected)?,
        None => &mut pinned.insert(session.pinned(bytes)?)[..],
    };
    if bytes > 0 {
        let output = session.alloc(bytes)?;
        let mut segments = 0;
        let list = wave.chunks[range.clone()].iter().map(|chunk| {
            let device = EncodeChunk { payload: output.address() + chunk.device.payload, first_segment: segments, ..chunk.device };
            if device.form == form::CODED {
                segments += 1 << device.segments_log2;
            }
            device
        });
        let list: Vec<_> = list.collect();
        let uploaded = session.upload(&list)?;
        let _drained = Drained(session);
        let parameter =
            abi::Encode { chunks: uploaded.address(), count: list.len() as u32, parts: segments, ..abi::Encode::default() };
        session.launch(session.kernels.gather, list.len() as u32, &parameter)?;
        session.launch(session.kernels.copy, segments, &parameter)?;
        session.launch(session.kernels.crc, list.len() as u32, &parameter)?;
        session.read_into(&output, to)?;
        let found = read_states(session, wave, range.clone())?;
        for (chunk, state) in wave.chunks[range.clone()].iter_mut().zip(found) {
            chunk.state = state;
        }
    }
    Ok(Payloads { chunks: range, stored: pinned })
}

/// Reads the states of some chunks.
fn read_states(session: &Session<'_>, wave: &Wave<'_>, range: Range<usize>) -> Result<Vec<EncodeState>> {
    let size = size_of::<EncodeState>();
    session.read(&wave.states.slice((range.start * size) as u64, (range.len() * size) as u64)?, range.len())
}
