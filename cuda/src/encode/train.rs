//! Samples for the tables of codec `conditioned`, and estimates for the codec profile `device`. The device counts tokens; the host
//! makes tables from the counts.

use super::chunks::{Tables, analysis_memory, estimate, memory_of};
use super::job::Job;
use super::session::{Session, SessionGuard};
use super::source::Source;
use crate::abi;
use std::collections::BTreeMap;
use tpde::Watch;
use tpde::internals::{Estimator, Group, LaneEstimate, LaneRange, PIECE, Pieces, Plan, choose_coding, group, low_bits, train_with};
use tpde_core::codec::conditioned::{Sample, tokens_within};
use tpde_core::error::Result;

/// Maximum number of pieces per launch.
const PIECES: usize = 2048;
/// Number of rows that are copied to the host with their number.
const ROWS: usize = 512;

/// Sets tables and choice of every plan for profile `device`, as the encoder of the processor does.
pub(super) fn choose(session: &Session<'_>, source: &Source, job: &Job<'_>, plans: &mut [Plan]) -> Result<()> {
    choose_coding(job.options, plans, &mut OnDevice { session, source, job, queued: &mut || {} })
}

/// Sets the tables of every plan, as the encoder of the processor does. `queued` is called when the kernels of a sample are queued,
/// and the host would only wait. `sampled` is called when the first samples have been taken, to give the device work while the host
/// makes tables.
pub(super) fn train(
    session: &Session<'_>,
    source: &Source,
    job: &Job<'_>,
    plans: &[Plan],
    queued: &mut dyn FnMut(),
    sampled: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut estimator = OnDevice { session, source, job, queued };
    let mut sampled = Some(sampled);
    train_with(job.options, plans, &|_, plan| Some(group(plan)), |pieces, add| {
        estimator.sample(pieces, add)?;
        sampled.take().map_or(Ok(()), |sampled| sampled())
    })
}

/// Reads lanes on the device.
struct OnDevice<'a> {
    session: &'a Session<'a>,
    source: &'a Source,
    job: &'a Job<'a>,
    /// Called when the kernels of a sample are queued.
    queued: &'a mut dyn FnMut(),
}

impl Estimator for OnDevice<'_> {
    fn sample(&mut self, pieces: Pieces<'_, '_>, add: &mut dyn FnMut(Group, Sample)) -> Result<()> {
        let Self { session, source, job, queued } = self;
        // The pieces of each group that are sampled next, and the size of their memory.
        let mut groups = BTreeMap::<Group, (Vec<LaneRange<'_>>, u64)>::new();
        for (plan, group, piece) in pieces {
            let first = piece * PIECE;
            let (pieces, memory) = groups.entry(group).or_default();
            let more = memory_of(source, plan, first, PIECE);
            if pieces.len() == PIECES || (*memory + more > job.limits.wave && !pieces.is_empty()) {
                add(group, sample(session, source, group, pieces, job.watcher, queued)?);
                pieces.clear();
                *memory = 0;
            }
            pieces.push(LaneRange { plan, from_base: group.from_base, first, lanes: PIECE.min(plan.lanes - first) });
            *memory += more;
        }
        for (group, (pieces, _)) in groups {
            add(group, sample(session, source, group, &pieces, job.watcher, queued)?);
        }
        Ok(())
    }

    fn estimate(&mut self, ranges: &[LaneRange<'_>]) -> Result<Vec<LaneEstimate>> {
        let Self { session, source, job, .. } = *self;
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let tables = Tables::upload(session, ranges.iter().map(|range| (range.plan, range.from_base)))?;
        let mut results = Vec::with_capacity(ranges.len());
        let mut rest = ranges;
        while !rest.is_empty() {
            job.watcher.done(0)?;
            let mut memory = 0;
            let count = rest.iter().take(PIECES).take_while(|range| {
                let is_first = memory == 0;
                memory += memory_of(source, range.plan, range.first, range.lanes);
                is_first || memory <= job.limits.wave
            });
            let (now, after) = rest.split_at(count.count());
            results.extend(estimate(session, source, &tables, now)?);
            rest = after;
        }
        Ok(results)
    }
}

/// Returns the sample of some pieces of a group's tensors. Calls `queued` before it waits for the device.
fn sample(
    session: &Session<'_>,
    source: &Source,
    of: Group,
    pieces: &[LaneRange<'_>],
    progress: &dyn Watch,
    queued: &mut dyn FnMut(),
) -> Result<Sample> {
    progress.done(0)?;
    let low_bits = low_bits(of.dtype, of.from_base);
    let tokens = tokens_within(8 * of.dtype.lane_bytes() as u32 - low_bits) as u32;
    let (mut chunks, _copies) = source.chunks(session, pieces.iter().copied())?;
    let _copied = SessionGuard(session);
    let memory = analysis_memory(&mut chunks);

    let row = 1 + u64::from(tokens);
    let counts = u64::from(abi::ENCODE_GROUPS) * u64::from(tokens) * 8;
    let (analysis, states) = (session.alloc(memory.bytes)?, session.alloc(memory.states)?);
    let scratch = session.scratch(chunks.len() as u32, tokens)?;
    let counters = session.alloc(counts)?;
    // The number of rows and of changed lanes, then the rows.
    let found = session.alloc(8 + u64::from(abi::ENCODE_GROUPS) * row * 8)?;
    memory.place(&mut chunks, &analysis, &states);
    let uploaded = session.upload(&chunks)?;
    let _drained = SessionGuard(session);
    session.clear(&states)?;
    session.clear(&counters)?;
    session.clear(&found.slice(0, 8)?)?;
    let parameter = abi::Encode {
        chunks: uploaded.address(),
        scratch: scratch.memory.address(),
        slot_bytes: scratch.slot_bytes,
        groups: counters.address(),
        rows: found.address() + 8,
        found: found.address(),
        count: chunks.len() as u32,
        parts: memory.parts,
        tokens,
        ..abi::Encode::default()
    };
    session.launch(session.kernels.survey, memory.parts, &parameter)?;
    session.launch(session.kernels.sample, scratch.slots, &parameter)?;
    let warps = abi::ENCODE_THREADS / 32;
    session.launch(session.kernels.groups, abi::ENCODE_GROUPS.div_ceil(warps), &parameter)?;
    queued();

    // Most samples have fewer rows, which one copy then returns.
    let bytes_of = |count: usize| 8 * (1 + count * row as usize);
    let [mut read] = session.read([&found.slice(0, bytes_of(ROWS) as u64)?])?;
    let head = read.first_chunk().map_or(0, |head| u64::from_le_bytes(*head));
    let (count, changed) = (head as u32 as usize, head >> 32);
    if count > ROWS {
        [read] = session.read([&found.slice(0, bytes_of(count) as u64)?])?;
    }
    let words = read.get(8..bytes_of(count)).unwrap_or_default().as_chunks().0;
    let groups = words.chunks_exact(row as usize).map(|row| {
        let (number, counts) = (u64::from_le_bytes(row[0]) as u32, &row[1..]);
        let used = counts.iter().rposition(|n| *n != [0; 8]).map_or(1, |last| last + 1);
        // Counts saturate, as those of the processor do.
        let counts = counts[..used].iter().map(|n| u32::try_from(u64::from_le_bytes(*n)).unwrap_or(u32::MAX)).collect();
        ((number / abi::ENCODE_MAGNITUDES) as u8, (number % abi::ENCODE_MAGNITUDES) as u16, counts)
    });
    Ok(Sample::from_counts(changed, groups))
}
