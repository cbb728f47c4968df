//! Streams and payloads of the chunks of a wave.

use super::chunks::{Chunk, Tables, Wave, states_in, tiles_of};
use super::limits::Limits;
use super::session::{Session, SessionGuard};
use crate::abi::{self, EncodeChunk, EncodeState, form};
use crate::hashes::{HashLaunch, HashPlan};
use crate::runtime::memory::DeviceSlice;
use std::cmp::Reverse;
use std::mem::offset_of;
use std::ops::Range;
use tpde_core::codec::conditioned::{size_of_cost, uncoded_bytes};
use tpde_core::codec::raw_size;
use tpde_core::digest;
use tpde_core::error::{Error, Result};
use tpde_core::format::{ChunkMetadata, ChunkSums, ConditionedHeader, DIGEST_SIZE, PAYLOAD_ALIGN};

/// Payloads of consecutive chunks, one after the other, each with padding.
pub(super) struct Payloads {
    pub chunks: Vec<EncodedChunk>,
    /// `None` if all payloads are empty.
    pub memory: Option<DeviceSlice>,
}

/// What the pair stores of a chunk.
pub(super) struct EncodedChunk {
    /// Index of the tensor.
    pub tensor: usize,
    /// Its offset is that of the payload among those that are written together.
    pub record: ChunkMetadata,
    pub sums: ChunkSums,
    pub digest: [u8; DIGEST_SIZE],
    /// Size of the lanes in bytes.
    pub bytes: u64,
}

impl EncodedChunk {
    /// Offset of the end of the payload with its padding, among those that are written together.
    pub fn end(&self) -> u64 {
        self.record.blob_offset.get() + u64::from(self.record.compressed_size.get()).next_multiple_of(PAYLOAD_ALIGN)
    }
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

/// Returns the number of bytes reserved for the streams of a chunk, or for its payload if it has none.
fn stream_bytes(chunk: &Chunk<'_>) -> u64 {
    if chunk.device.form == form::CODED { 2 * words(chunk) } else { payload_size(chunk) }
}

/// Returns the estimated cost of a segment of a chunk, in steps.
fn segment_cost(chunk: &Chunk<'_>) -> u32 {
    let EncodeChunk { states_log2, segments_log2, .. } = chunk.device;
    // A tile costs about 4 steps more: it is read, and its last step may be short.
    let steps = (chunk.state.coded >> states_log2) + 4 * tiles_of(&chunk.device);
    steps >> segments_log2
}

/// Returns the size of a payload in bytes, without padding.
fn payload_size(chunk: &Chunk<'_>) -> u64 {
    let Chunk { device, state, .. } = chunk;
    let (width, changed) = (chunk.plan().width() as usize, state.changed as usize);
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

/// Writes the payloads of a wave, some at a time, and passes them to `sink` in order.
pub(super) fn write<E: From<Error>>(
    session: &Session<'_>,
    tables: &Tables,
    limits: Limits,
    wave: &mut Wave<'_>,
    sink: &mut dyn FnMut(Payloads) -> Result<(), E>,
) -> Result<(), E> {
    for chunk in wave.chunks.iter_mut().filter(|chunk| chunk.device.form == form::CODED) {
        let coded = chunk.state.coded;
        let size = size_of_cost(chunk.state.cost, coded as usize, chunk.device.low_bits.into(), chunk.plan().decode_cost);
        // Half of the bytes are words; 256ths of words per coded lane.
        let estimated = (size / 2 * limits.room).div_ceil(u64::from(coded.max(1)));
        chunk.device.words_scale = estimated.min(256 * words_max(&chunk.device)) as u32;
    }
    let mut first = 0;
    while first < wave.chunks.len() {
        // Ranges have about the same size: a small one would leave much of the device idle.
        let rest: u64 = wave.chunks[first..].iter().map(stream_bytes).sum();
        let even = rest.div_ceil(rest.div_ceil(limits.payloads.max(1)).max(1));
        let (mut end, mut bytes) = (first, 0);
        while end < wave.chunks.len() {
            let more = stream_bytes(&wave.chunks[end]);
            if end > first && more > 0 && (bytes >= even || bytes + more > limits.payloads) {
                break;
            }
            (bytes, end) = (bytes + more, end + 1);
        }
        let payloads = write_range(session, tables, limits, wave, first..end)?;
        first += payloads.chunks.len();
        sink(payloads)?;
    }
    Ok(())
}

/// Writes the payloads of the first chunks of a range: of all, unless their streams need more memory than expected.
fn write_range(
    session: &Session<'_>,
    tables: &Tables,
    limits: Limits,
    wave: &mut Wave<'_>,
    mut range: Range<usize>,
) -> Result<Payloads> {
    let mut pending: Vec<usize> = range.clone().filter(|&i| wave.chunks[i].device.form == form::CODED).collect();
    // The memory of each round is needed until the payloads are gathered.
    let mut rounds = Vec::new();
    while !pending.is_empty() {
        // Chunks of an earlier round, or of an earlier range that ended before them: their exceptions are counted again.
        for device in pending.iter().map(|&i| &wave.chunks[i].device).filter(|device| device.again != 0) {
            let exceptions = offset_of!(EncodeState, exceptions) as u64;
            session.clear(&wave.states.slice(device.state - wave.states.address() + exceptions, 8)?)?;
        }
        rounds.push(encode_streams(session, tables, limits, wave, &pending, range.clone())?);
        pending.iter().for_each(|&i| wave.chunks[i].device.again = 1);
        pending.retain(|&i| wave.chunks[i].state.overflow != 0);
        for &i in &pending {
            let device = &mut wave.chunks[i].device;
            // This room is always enough.
            device.words_scale = 256 * words_max(device) as u32;
        }
        // Some are encoded again; the chunk from which on there is too little memory begins the next range.
        let mut bytes = 0;
        let fitting = pending.iter().take_while(|&&i| {
            let is_first = bytes == 0;
            bytes += 2 * words(&wave.chunks[i]);
            is_first || bytes <= limits.payloads
        });
        let fitting = fitting.count();
        range.end = pending.get(fitting).copied().unwrap_or(range.end);
        pending.truncate(fitting);
    }

    let mut bytes = 0;
    for chunk in &mut wave.chunks[range.clone()] {
        let width = chunk.plan().width() as usize;
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
    let (memory, digests) = match bytes {
        0 => (None, Vec::new()),
        _ => {
            let output = session.alloc_payloads(bytes)?;
            let digests = gather(session, wave, range.clone(), &output)?;
            (Some(output), digests)
        }
    };
    let mut digests = digests.into_iter();
    let chunks = wave.chunks[range].iter().map(|chunk| EncodedChunk {
        tensor: chunk.job.0,
        record: record(chunk),
        sums: sums(chunk),
        digest: if chunk.device.payload_size == 0 { digest::of_payload(&[]) } else { digests.next().unwrap_or_default() },
        bytes: chunk.bytes(),
    });
    Ok(Payloads { chunks: chunks.collect(), memory })
}

/// Encodes the streams of some chunks, returns their memory, and reads the states of `range`.
fn encode_streams(
    session: &Session<'_>,
    tables: &Tables,
    limits: Limits,
    wave: &mut Wave<'_>,
    pending: &[usize],
    range: Range<usize>,
) -> Result<DeviceSlice> {
    let bytes: u64 = pending.iter().map(|&i| (2 * words(&wave.chunks[i])).next_multiple_of(16)).sum();
    let memory = session.alloc(bytes)?;
    let (mut at, mut segments) = (memory.address(), 0);
    let mut list = Vec::with_capacity(pending.len());
    // Longest segments first, to balance the multiprocessors.
    let mut longest_first = pending.to_vec();
    longest_first.sort_by_key(|&i| Reverse(segment_cost(&wave.chunks[i])));
    for &i in &longest_first {
        let room = (2 * words(&wave.chunks[i])).next_multiple_of(16);
        let device = &mut wave.chunks[i].device;
        (device.words, device.first_segment) = (at, segments);
        (at, segments) = (at + room, segments + (1 << device.segments_log2));
        list.push(*device);
    }
    // Many segments keep the device busy with a warp each. Few, and much longer ones, get a block each, to take less time.
    let costs = || longest_first.iter().map(|&i| (&wave.chunks[i], segment_cost(&wave.chunks[i])));
    let count_of = |chunk: &Chunk<'_>| 1u32 << chunk.device.segments_log2;
    let total: u64 = costs().map(|(chunk, cost)| u64::from(cost) * u64::from(count_of(chunk))).sum();
    let long = 2 * (total / u64::from(segments.max(1)));
    let first_alone = if u64::from(segments) < limits.alone * u64::from(session.device.multiprocessors) {
        segments
    } else {
        costs().take_while(|&(_, cost)| u64::from(cost) > long).map(|(chunk, _)| count_of(chunk)).sum()
    };
    let uploaded = session.upload(&list)?;
    let _drained = SessionGuard(session);
    let parameter = abi::Encode {
        chunks: uploaded.address(),
        tables: tables.address(),
        count: list.len() as u32,
        parts: segments,
        first_alone,
        ..abi::Encode::default()
    };
    let blocks = first_alone + (segments - first_alone).div_ceil(abi::ENCODE_STREAM_THREADS / 32);
    session.launch(session.kernels.streams, blocks, &parameter)?;
    let [states] = session.read([&states_of(wave, &range)?])?;
    set_states(wave, range, &states);
    Ok(memory)
}

/// Writes the payloads of some chunks, reads their states, and returns the digests of those that are not empty.
fn gather(session: &Session<'_>, wave: &mut Wave<'_>, range: Range<usize>, output: &DeviceSlice) -> Result<Vec<[u8; DIGEST_SIZE]>> {
    let mut segments = 0;
    let list = wave.chunks[range.clone()].iter().filter(|chunk| chunk.device.form != form::NONE).map(|chunk| {
        let payload = output.address() + chunk.device.payload;
        let device = EncodeChunk { payload, first_segment: segments, ..chunk.device };
        if device.form == form::CODED {
            segments += 1 << device.segments_log2;
        }
        device
    });
    let list: Vec<_> = list.collect();
    let mut plan = HashPlan::default();
    for device in &list {
        plan.add(&output.slice(device.payload - output.address(), device.payload_size.into())?, None)?;
    }
    let uploaded = session.upload(&list)?;
    let parts = session.upload(&plan.parts)?;
    let (nodes, hashes) = (session.alloc(plan.node_bytes().max(4))?, session.alloc(32 * u64::from(plan.len()))?);
    let _drained = SessionGuard(session);
    session.clear(&nodes)?;
    let parameter = abi::Encode { chunks: uploaded.address(), count: list.len() as u32, parts: segments, ..abi::Encode::default() };
    session.launch(session.kernels.gather, list.len() as u32, &parameter)?;
    session.launch(session.kernels.copy, segments, &parameter)?;
    session.launch(session.kernels.crc, list.len() as u32, &parameter)?;
    let launch = HashLaunch { ranges: parts.address(), nodes: nodes.address(), hashes: hashes.address(), ..HashLaunch::default() };
    session.hash(&plan, &launch)?;
    let [states, hashes] = session.read([&states_of(wave, &range)?, &hashes])?;
    set_states(wave, range, &states);
    Ok(hashes.as_chunks::<32>().0.iter().filter_map(|hash| hash.first_chunk().copied()).collect())
}

/// The states of some chunks on the device.
fn states_of(wave: &Wave<'_>, range: &Range<usize>) -> Result<DeviceSlice> {
    let size = size_of::<EncodeState>();
    wave.states.slice((range.start * size) as u64, (range.len() * size) as u64)
}

fn set_states(wave: &mut Wave<'_>, range: Range<usize>, states: &[u8]) {
    wave.chunks[range].iter_mut().zip(states_in(states)).for_each(|(chunk, state)| chunk.state = state);
}

fn record(chunk: &Chunk<'_>) -> ChunkMetadata {
    let Chunk { device, state, job: (_, plan, number) } = chunk;
    let uncompressed_size = match device.form {
        form::NONE => 0,
        form::RAW => device.payload_size,
        _ => chunk.bytes() as u32,
    };
    ChunkMetadata {
        blob_offset: device.payload.into(),
        compressed_size: device.payload_size.into(),
        uncompressed_size: uncompressed_size.into(),
        num_deltas: state.changed.into(),
        crc32: state.crc32.into(),
        output_offset: (number << plan.chunk_lanes_log2).into(),
    }
}

/// The sums of a chunk. Without a base, the base lanes are zeros, whose sum is 0.
fn sums(chunk: &Chunk<'_>) -> ChunkSums {
    ChunkSums { base_sum: chunk.state.base_sum.into(), target_sum: chunk.state.target_sum.into() }
}
