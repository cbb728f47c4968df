//! Chunks on the device: their lanes, and what the kernels find out about them.

use super::session::{Session, SessionGuard};
use super::source::Source;
use crate::abi::{self, EncodeChunk, EncodeState, form};
use crate::hashes::HashRange;
use crate::runtime::memory::{DeviceSlice, PinnedBuffer};
use std::collections::HashMap;
use std::sync::Arc;
use tpde::internals::{Candidate, LaneEstimate, LaneRange, Plan, low_bits};
use tpde_core::codec::conditioned::{ModelTables, estimated_size, shape, size_of_cost, tokens_within};
use tpde_core::codec::{Codec, TableSet};
use tpde_core::error::Result;
use tpde_core::format::BaseKind;
use zerocopy::FromBytes;

/// Lanes per block, for which the kernels keep a level of activity.
const BLOCK: u64 = 128;
/// Alignment of the memory of a chunk, in bytes.
const ALIGN: u64 = 16;

/// Sizes of masks of changed and of coded lanes, of levels and tiles of a chunk, in bytes.
fn analysis_sizes(lanes: u64, lane_log2: u32) -> [u64; 4] {
    let blocks = lanes.div_ceil(BLOCK);
    [blocks * BLOCK / 8, blocks * BLOCK / 8, 2 * blocks, 2 * lanes.div_ceil(tile_lanes(lane_log2))]
}

/// Returns the size of the memory for a chunk of up to `lanes` lanes, from lane `first` of an entry on: what the analysis finds
/// out, copies of lanes, and entries of lists.
pub(super) fn memory_of(source: &Source, plan: &Plan, first: u64, lanes: u64) -> u64 {
    // Its description is in the lists of the analysis, of the streams twice, and of the payloads.
    const LISTS: usize = size_of::<EncodeState>() + 4 * size_of::<EncodeChunk>() + size_of::<HashRange>() + 32;
    let lanes = lanes.min(plan.lanes - first);
    let analysis: u64 = analysis_sizes(lanes, plan.width().ilog2()).iter().map(|bytes| bytes.next_multiple_of(ALIGN)).sum();
    analysis + source.copied_per_lane(plan) * lanes + LISTS as u64 + source.list_bytes(plan)
}

/// Returns the size of the memory for chunks.
pub(super) fn memory_of_all(source: &Source, jobs: &[ChunkJob<'_>]) -> u64 {
    let memory =
        |&(_, plan, number): &ChunkJob<'_>| memory_of(source, plan, number << plan.chunk_lanes_log2, 1 << plan.chunk_lanes_log2);
    jobs.iter().map(memory).sum()
}

/// Memory for what the kernels find out about chunks.
pub(super) struct AnalysisMemory {
    /// Size of masks, levels and tiles, in bytes.
    pub bytes: u64,
    /// Size of the states, in bytes.
    pub states: u64,
    /// Number of parts of all chunks.
    pub parts: u32,
}

/// Sets `first_part` of chunks, and their places in the memory: offsets, until [`AnalysisMemory::place`] makes them addresses.
pub(super) fn analysis_memory(chunks: &mut [EncodeChunk]) -> AnalysisMemory {
    let (mut at, mut parts) = (0, 0);
    let mut take = |bytes: u64| {
        let start = at;
        at = (at + bytes).next_multiple_of(ALIGN);
        start
    };
    for chunk in chunks.iter_mut() {
        let sizes = analysis_sizes(chunk.lanes.into(), chunk.lane_log2.into());
        [chunk.masks, chunk.coded, chunk.levels, chunk.tiles] = sizes.map(&mut take);
        chunk.first_part = parts;
        parts += chunk.lanes.div_ceil(abi::ENCODE_PART);
    }
    AnalysisMemory { bytes: at, states: (chunks.len() * size_of::<EncodeState>()) as u64, parts }
}

impl AnalysisMemory {
    pub fn place(&self, chunks: &mut [EncodeChunk], memory: &DeviceSlice, states: &DeviceSlice) {
        for (i, chunk) in (0..).zip(chunks) {
            for offset in [&mut chunk.masks, &mut chunk.coded, &mut chunk.levels, &mut chunk.tiles] {
                *offset += memory.address();
            }
            chunk.state = states.address() + i * size_of::<EncodeState>() as u64;
        }
    }
}

/// Returns the number of tiles of a chunk.
pub(super) fn tiles_of(chunk: &EncodeChunk) -> u32 {
    chunk.lanes.div_ceil(tile_lanes(chunk.lane_log2.into()) as u32)
}

/// Returns the number of lanes of a tile.
fn tile_lanes(lane_log2: u32) -> u64 {
    if lane_log2 <= 1 { 1024 } else { 2048 >> lane_log2 }
}

/// Returns the number of tokens of a chunk's values.
pub(super) fn tokens_of(chunk: &EncodeChunk) -> u32 {
    tokens_within((8 << chunk.lane_log2) - u32::from(chunk.low_bits)) as u32
}

/// The table sets on the device.
pub(super) struct Tables {
    /// Index of each set, by its address.
    places: HashMap<usize, u32>,
    memory: DeviceSlice,
}

impl Tables {
    /// Uploads the sets with which plans are coded from their base (`true`) or from zeros.
    pub fn upload<'p>(session: &Session<'_>, plans: impl Iterator<Item = (&'p Plan, bool)>) -> Result<Self> {
        let mut places = HashMap::new();
        let mut words = Vec::<u32>::new();
        for (plan, from_base) in plans {
            let Some(set) = tables_of(plan, from_base) else { continue };
            let next = places.len() as u32;
            if *places.entry(Arc::as_ptr(set).addr()).or_insert(next) < next {
                continue;
            }
            let width = plan.width() as usize;
            let model = ModelTables::new(set, low_bits(plan.dtype, from_base), width);
            words.extend(model.entries.iter().flat_map(|entry| [*entry as u32, (*entry >> 32) as u32]));
            words.extend(model.costs.iter().flat_map(|costs| costs.iter().copied().chain([0])));
            words.extend(&model.present);
        }
        Ok(Self { places, memory: session.upload(&words)? })
    }

    /// Index of the set with which a plan is coded from its base, or from zeros.
    fn place(&self, plan: &Plan, from_base: bool) -> u32 {
        let place = tables_of(plan, from_base).and_then(|set| self.places.get(&Arc::as_ptr(set).addr()).copied());
        place.unwrap_or(abi::NO_TABLES)
    }

    pub fn address(&self) -> u64 {
        self.memory.address()
    }
}

fn tables_of(plan: &Plan, from_base: bool) -> Option<&Arc<TableSet>> {
    plan.tables_of(Candidate { from_base, codec: Codec::Conditioned })
}

/// A chunk to encode: the index of its tensor, the plan of the tensor, and its number in the tensor.
pub(super) type ChunkJob<'a> = (usize, &'a Plan, u64);

/// A chunk, and what is known about it.
pub(super) struct Chunk<'a> {
    pub job: ChunkJob<'a>,
    pub device: EncodeChunk,
    pub state: EncodeState,
}

/// Chunks that are analysed together, with the memory of the results.
pub(super) struct Wave<'a> {
    pub chunks: Vec<Chunk<'a>>,
    pub states: DeviceSlice,
    _memory: (DeviceSlice, Option<DeviceSlice>),
}

/// Chunks whose analysis is queued. It needs no tables.
pub(super) struct Analysis {
    chunks: Vec<EncodeChunk>,
    sizes: AnalysisMemory,
    states: DeviceSlice,
    memory: (DeviceSlice, Option<DeviceSlice>),
}

impl Analysis {
    /// Queues the analysis of the chunks of a wave.
    pub fn of_wave(session: &Session<'_>, source: &Source, jobs: &[ChunkJob<'_>]) -> Result<Self> {
        Self::queue(session, source, ranges_of(jobs).map(|(range, _)| range))
    }

    fn queue<'p>(session: &Session<'_>, source: &Source, ranges: impl Iterator<Item = LaneRange<'p>>) -> Result<Self> {
        let (mut chunks, copies) = source.chunks(session, ranges)?;
        let sizes = analysis_memory(&mut chunks);
        let (analysis, states) = (session.alloc(sizes.bytes)?, session.alloc(sizes.states)?);
        sizes.place(&mut chunks, &analysis, &states);
        let uploaded = session.upload(&chunks)?;
        session.clear(&states)?;
        let (count, parts) = (chunks.len() as u32, sizes.parts);
        let parameter = abi::Encode { chunks: uploaded.address(), count, parts, ..abi::Encode::default() };
        session.launch(session.kernels.survey, parts, &parameter)?;
        Ok(Self { chunks, sizes, states, memory: (analysis, copies) })
    }
}

/// Chunks with what the kernels found out about them, in device memory.
struct AnalysisResults {
    chunks: Vec<EncodeChunk>,
    /// The states.
    found: PinnedBuffer,
    states: DeviceSlice,
    memory: (DeviceSlice, Option<DeviceSlice>),
}

impl AnalysisResults {
    /// Of analysed chunks that are coded with tables, chooses the maps and counts the coded lanes.
    fn new<'p>(
        session: &Session<'_>,
        tables: &Tables,
        analysis: Analysis,
        ranges: impl Iterator<Item = (LaneRange<'p>, Codec)>,
    ) -> Result<Self> {
        let Analysis { mut chunks, sizes, states, memory } = analysis;
        for (chunk, (range, _)) in chunks.iter_mut().zip(ranges).filter(|(_, (_, codec))| *codec == Codec::Conditioned) {
            chunk.tables = tables.place(range.plan, range.from_base);
        }
        let tokens = chunks.iter().map(tokens_of).max().unwrap_or(0);
        let scratch = session.scratch(chunks.len() as u32, tokens)?;
        let uploaded = session.upload(&chunks)?;
        let _drained = SessionGuard(session);
        let parameter = abi::Encode {
            chunks: uploaded.address(),
            tables: tables.address(),
            scratch: scratch.memory.address(),
            slot_bytes: scratch.slot_bytes,
            count: chunks.len() as u32,
            parts: sizes.parts,
            ..abi::Encode::default()
        };
        if chunks.iter().any(|chunk| chunk.tables != abi::NO_TABLES) {
            session.launch(session.kernels.choose, scratch.slots, &parameter)?;
            session.launch(session.kernels.count, sizes.parts, &parameter)?;
        }
        let [found] = session.read([&states.slice(0, sizes.states)?])?;
        Ok(Self { chunks, found, states, memory })
    }
}

/// The lanes and codecs of chunks.
fn ranges_of<'j, 'a>(jobs: &'j [ChunkJob<'a>]) -> impl Iterator<Item = (LaneRange<'a>, Codec)> + use<'j, 'a> {
    jobs.iter().map(|&(_, plan, number)| {
        let first = number << plan.chunk_lanes_log2;
        let lanes = (plan.lanes - first).min(1 << plan.chunk_lanes_log2);
        let candidate = candidate_of(plan);
        (LaneRange { plan, from_base: candidate.from_base, first, lanes }, candidate.codec)
    })
}

impl<'a> Wave<'a> {
    /// Chooses maps for the analysed chunks, and sets the form of each payload that follows from what is found.
    pub fn new(session: &Session<'_>, tables: &Tables, jobs: &[ChunkJob<'a>], analysis: Analysis) -> Result<Self> {
        let AnalysisResults { chunks, found, states, memory } = AnalysisResults::new(session, tables, analysis, ranges_of(jobs))?;
        let chunks = jobs.iter().zip(chunks).zip(states_in(&found)).map(|((&job, device), state)| {
            let mut chunk = Chunk { job, device, state };
            chunk.choose_form();
            chunk
        });
        Ok(Self { chunks: chunks.collect(), states, _memory: memory })
    }
}

/// Estimates payloads, as the encoder of the processor does. `tables` has the sets of all plans.
pub(super) fn estimate(session: &Session<'_>, source: &Source, tables: &Tables, of: &[LaneRange<'_>]) -> Result<Vec<LaneEstimate>> {
    let analysis = Analysis::queue(session, source, of.iter().copied())?;
    let analysed = AnalysisResults::new(session, tables, analysis, of.iter().map(|&range| (range, Codec::Conditioned)))?;
    let result = |((range, chunk), state): ((&LaneRange<'_>, &EncodeChunk), EncodeState)| {
        let choice = (chunk.tables != abi::NO_TABLES).then_some((state.cost, state.coded as usize));
        let size = ((u64::from(chunk.lanes) << chunk.lane_log2) as usize, 1 << chunk.lane_log2);
        let (changed, low_bits) = (state.changed, chunk.low_bits.into());
        let conditioned = estimated_size(changed as usize, choice, low_bits, size, range.plan.decode_cost);
        LaneEstimate { changed, conditioned }
    };
    Ok(of.iter().zip(&analysed.chunks).zip(states_in(&analysed.found)).map(result).collect())
}

/// Reads states from host memory, one at a time: the pages of a list of all would be allocated anew for each wave.
pub(super) fn states_in(bytes: &[u8]) -> impl Iterator<Item = EncodeState> {
    bytes.chunks_exact(size_of::<EncodeState>()).filter_map(|state| EncodeState::read_from_bytes(state).ok())
}

/// The candidate with which a plan's chunks are coded.
fn candidate_of(plan: &Plan) -> Candidate {
    // Each plan has one when waves begin.
    plan.choice.get().copied().unwrap_or(Candidate { from_base: plan.base_kind != BaseKind::None, codec: Codec::Raw })
}

impl Chunk<'_> {
    pub fn plan(&self) -> &Plan {
        self.job.1
    }

    /// Chooses the form of the payload, and its states and segments, as the encoder of the processor does.
    fn choose_form(&mut self) {
        let uncoded = self.uncoded();
        let Self { job: (_, plan, _), device, state } = self;
        device.form = match candidate_of(plan).codec {
            _ if state.changed == 0 => form::NONE,
            Codec::Raw => form::RAW,
            // Exceptions replace no low bits.
            _ if device.tables == abi::NO_TABLES || (device.low_bits != 0 && state.exceptions != 0) => uncoded,
            _ => {
                let coded = state.coded as usize;
                let size = size_of_cost(state.cost, coded, device.low_bits.into(), plan.decode_cost);
                let (states, segments) = shape(coded, size, tiles_of(device) as usize, plan.decode_cost);
                (device.states_log2, device.segments_log2) = (states.ilog2() as u8, segments.ilog2() as u8);
                form::CODED
            }
        };
    }

    /// The form of a payload without coded lanes.
    pub fn uncoded(&self) -> u8 {
        let listed = tpde_core::codec::conditioned::listed_bytes(self.state.changed as usize, self.plan().width() as usize);
        if (listed as u64) < self.bytes() { form::LISTED } else { form::PLAIN }
    }

    /// Size of the lanes in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.device.lanes) << self.device.lane_log2
    }
}
