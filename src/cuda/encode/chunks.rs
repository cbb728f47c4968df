//! Chunks on the device: their lanes, and what the kernels find out about them.

use super::session::{Drained, Session};
use super::source::Source;
use crate::codec::conditioned::{ModelTables, shape, size_of_cost, tokens_within};
use crate::codec::{Codec, TableSet};
use crate::cuda::abi::{self, EncodeChunk, EncodeState, form};
use crate::cuda::hashes::HashRange;
use crate::cuda::runtime::memory::DeviceSlice;
use crate::encode::{Plan, low_bits};
use crate::error::Result;
use crate::format::BaseKind;
use std::collections::HashMap;
use std::sync::Arc;

/// Lanes per block, for which the kernels keep a level of activity.
const BLOCK: u64 = 128;
/// Alignment of the memory of a chunk, in bytes.
const ALIGN: u64 = 16;

/// Sizes of masks of changed and of coded lanes, of levels and tiles of a chunk, in bytes.
fn survey_sizes(lanes: u64, lane_log2: u32) -> [u64; 4] {
    let blocks = lanes.div_ceil(BLOCK);
    [blocks * BLOCK / 8, blocks * BLOCK / 8, 2 * blocks, 2 * lanes.div_ceil(tile_lanes(lane_log2))]
}

/// Returns the size of the memory for a chunk of up to `lanes` lanes, from lane `first` of an entry on: what the survey finds out,
/// copies of lanes, and entries of lists.
pub(super) fn memory_of(source: &Source, plan: &Plan, first: u64, lanes: u64) -> u64 {
    // Its description is in the lists of the survey, of the streams twice, and of the payloads.
    const LISTS: usize = size_of::<EncodeState>() + 4 * size_of::<EncodeChunk>() + size_of::<HashRange>() + 32;
    let lanes = lanes.min(plan.lanes - first);
    let survey: u64 = survey_sizes(lanes, plan.width().ilog2()).iter().map(|bytes| bytes.next_multiple_of(ALIGN)).sum();
    survey + source.copied_per_lane(plan) * lanes + LISTS as u64 + source.list_bytes(plan)
}

/// Memory for what the kernels find out about chunks.
pub(super) struct SurveyMemory {
    /// Size of masks, levels and tiles, in bytes.
    pub bytes: u64,
    /// Size of the states, in bytes.
    pub states: u64,
    /// Number of parts of all chunks.
    pub parts: u32,
}

/// Sets `first_part` of chunks, and their places in the memory: offsets, until [`SurveyMemory::place`] makes them addresses.
pub(super) fn survey_memory(chunks: &mut [EncodeChunk]) -> SurveyMemory {
    let (mut at, mut parts) = (0, 0);
    let mut take = |bytes: u64| {
        let start = at;
        at = (at + bytes).next_multiple_of(ALIGN);
        start
    };
    for chunk in chunks.iter_mut() {
        let sizes = survey_sizes(chunk.lanes.into(), chunk.lane_log2.into());
        [chunk.masks, chunk.coded, chunk.levels, chunk.tiles] = sizes.map(&mut take);
        chunk.first_part = parts;
        parts += chunk.lanes.div_ceil(abi::ENCODE_PART);
    }
    SurveyMemory { bytes: at, states: (chunks.len() * size_of::<EncodeState>()) as u64, parts }
}

impl SurveyMemory {
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
    /// Uploads the sets of all plans.
    pub fn upload(session: &Session<'_>, plans: &[Plan]) -> Result<Self> {
        let mut places = HashMap::new();
        let mut words = Vec::<u32>::new();
        for plan in plans {
            let Some(set) = tables_of(plan) else { continue };
            let next = places.len() as u32;
            if *places.entry(Arc::as_ptr(set).addr()).or_insert(next) < next {
                continue;
            }
            let width = plan.width() as usize;
            let model = ModelTables::new(set, low_bits(plan.dtype, plan.base_kind != BaseKind::None), width);
            words.extend(model.entries.iter().flat_map(|entry| [*entry as u32, (*entry >> 32) as u32]));
            words.extend(model.costs.iter().flat_map(|costs| costs.iter().copied().chain([0])));
            words.extend(&model.present);
        }
        Ok(Self { places, memory: session.upload(&words)? })
    }

    fn place(&self, plan: &Plan) -> u32 {
        tables_of(plan).and_then(|set| self.places.get(&Arc::as_ptr(set).addr()).copied()).unwrap_or(abi::NO_TABLES)
    }

    pub fn address(&self) -> u64 {
        self.memory.address()
    }
}

/// The tables that a plan's chunks are coded with.
fn tables_of(plan: &Plan) -> Option<&Arc<TableSet>> {
    plan.way.get().filter(|way| way.codec == Codec::Conditioned).and_then(|way| plan.tables_of(*way))
}

/// A chunk to encode: the index of its tensor, the plan of the tensor, and its number in the tensor.
pub(super) type Job<'a> = (usize, &'a Plan, u64);

/// A chunk, and what is known about it.
pub(super) struct Chunk<'a> {
    pub job: Job<'a>,
    pub device: EncodeChunk,
    pub state: EncodeState,
}

/// Chunks that are surveyed together, with the memory of the results.
pub(super) struct Wave<'a> {
    pub chunks: Vec<Chunk<'a>>,
    pub states: DeviceSlice,
    _memory: (DeviceSlice, Option<DeviceSlice>),
}

impl<'a> Wave<'a> {
    /// Surveys chunks, chooses their maps, and counts their coded lanes. Sets the form of each payload that follows from these
    /// counts.
    pub fn new(session: &Session<'_>, source: &Source, tables: &Tables, jobs: &[Job<'a>]) -> Result<Self> {
        let of_jobs = jobs.iter().map(|&(_, plan, number)| (plan, number << plan.chunk_lanes_log2, 1 << plan.chunk_lanes_log2));
        let (mut chunks, copies) = source.chunks(session, of_jobs)?;
        let _copied = Drained(session);
        for (chunk, (_, plan, _)) in chunks.iter_mut().zip(jobs) {
            chunk.tables = tables.place(plan);
        }
        let memory = survey_memory(&mut chunks);
        let (survey, states) = (session.alloc(memory.bytes)?, session.alloc(memory.states)?);
        memory.place(&mut chunks, &survey, &states);
        let tokens = chunks.iter().map(tokens_of).max().unwrap_or(0);
        let scratch = session.scratch(chunks.len() as u32, tokens)?;
        let uploaded = session.upload(&chunks)?;
        let _drained = Drained(session);
        session.clear(&states)?;
        let parameter = abi::Encode {
            chunks: uploaded.address(),
            tables: tables.address(),
            scratch: scratch.memory.address(),
            slot_bytes: scratch.slot_bytes,
            count: chunks.len() as u32,
            parts: memory.parts,
            ..abi::Encode::default()
        };
        session.launch(session.kernels.survey, memory.parts, &parameter)?;
        if chunks.iter().any(|chunk| chunk.tables != abi::NO_TABLES) {
            session.launch(session.kernels.choose, scratch.slots, &parameter)?;
            session.launch(session.kernels.count, memory.parts, &parameter)?;
        }
        let found = session.read::<EncodeState>(&states, chunks.len())?;
        let chunks = jobs.iter().zip(chunks).zip(found).map(|((&job, device), state)| {
            let mut chunk = Chunk { job, device, state };
            chunk.choose_form();
            chunk
        });
        Ok(Self { chunks: chunks.collect(), states, _memory: (survey, copies) })
    }
}

impl Chunk<'_> {
    pub fn plan(&self) -> &Plan {
        self.job.1
    }

    /// Chooses the form of the payload, and its states and segments, as the encoder of the processor does.
    fn choose_form(&mut self) {
        let uncoded = self.uncoded();
        let Self { job: (_, plan, _), device, state } = self;
        let codec = plan.way.get().map_or(Codec::Raw, |way| way.codec);
        device.form = match codec {
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
        let listed = crate::codec::conditioned::listed_bytes(self.state.changed as usize, self.plan().width() as usize);
        if (listed as u64) < self.bytes() { form::LISTED } else { form::PLAIN }
    }

    /// Size of the lanes in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.device.lanes) << self.device.lane_log2
    }
}
