//! Tries the candidates for the coding of a chunk, to find the smallest.
//!
//! A chunk is encoded as every candidate that may be the smallest. For clearly larger ones the size is only estimated. The result
//! depends only on the chunk's lanes and the options, not on the number of threads.

use super::options::{Candidate, CodecChoice, EncodeOptions};
use super::plan::Plan;
use crate::base::PaddedBase;
use crate::checkpoint::Checkpoint;
use crate::cut::Piece;
use std::borrow::Cow;
use std::cell::LazyCell;
use std::ops::RangeInclusive;
use tpde_core::codec::conditioned::uncoded_bytes;
use tpde_core::codec::count;
use tpde_core::codec::zstd::is_repeats;
use tpde_core::codec::{ChunkEncoder, Codec, Difference, Encoded, Layout, LayoutSize, Layouts, raw_size};
use tpde_core::digest;
use tpde_core::error::Result;
use tpde_core::format::{DIGEST_SIZE, PAYLOAD_ALIGN};
use tpde_core::lane::Dtype;

/// Minimum and maximum number of lanes per run. Candidates are first tried on a sample of `RUNS` runs of the chunk.
const RUN: RangeInclusive<usize> = 512..=4096;
/// Number of masks in the shortest run. A mask covers 64 lanes.
const MASKS: usize = *RUN.start() / 64;
/// Number of runs per sample, spread evenly over the chunk.
const RUNS: usize = 8;
/// Minimum number of lanes of a chunk that is sampled. Smaller chunks are encoded quickly.
const SAMPLED_LANES: usize = 4 * RUNS * *RUN.start();
/// Codec `zstd` encodes up to `2 * FEW` changes quickly, so such chunks are not sampled. If there are more changes, on at most a
/// quarter of the lanes, the sample has at least `FEW` changes.
const FEW: u64 = 1 << 9;
/// If a payload is smaller than 1/`SMALL` of the chunk, a rough estimate of the other candidates is enough.
const SMALL: u64 = 64;
/// Estimated size, in bytes, of the parts of a payload that do not grow with the number of lanes: headers and tables.
const FIXED_BYTES: u64 = 128;

/// The outcome of trying a candidate on a chunk.
pub(super) struct Outcome {
    pub candidate: Candidate,
    /// Size of the padded payload in bytes. An estimate if `payload` is `None`.
    pub size: u64,
    pub payload: Option<(Vec<u8>, Encoded)>,
    /// Digest of the payload, after [`Outcome::hash`].
    pub digest: Option<[u8; DIGEST_SIZE]>,
}

impl Outcome {
    fn made(candidate: Candidate, payload: (Vec<u8>, Encoded)) -> Self {
        let size = (payload.0.len() as u64).next_multiple_of(PAYLOAD_ALIGN);
        Self { candidate, size, payload: Some(payload), digest: None }
    }

    /// Hashes the payload, so that the builder, which works on one thread, need not.
    pub fn hash(&mut self) {
        self.digest = self.payload.as_ref().map(|(payload, _)| digest::of_payload(payload));
    }
}

/// The encoding state of a thread: encoders and buffers.
#[derive(Default)]
pub(super) struct Worker {
    pub encoders: Encoders,
    pub lanes: Lanes,
    pub masks: Vec<u64>,
}

/// Two chunk encoders, for lanes coded from the base (`[0]`) and from zeros (`[1]`). Each is created on first use and caches the
/// data that it derives from a table set.
#[derive(Default)]
pub(super) struct Encoders {
    encoders: [Option<ChunkEncoder>; 2],
    zeros: Vec<u8>,
    masks: Vec<u64>,
}

impl Encoders {
    /// Encodes a chunk as `candidate`. `difference` is that from the base lanes, or from zeros if the tensor has no base.
    pub fn encode(
        &mut self,
        plan: &Plan,
        candidate: Candidate,
        options: &EncodeOptions,
        difference: Difference<'_>,
    ) -> Result<(Vec<u8>, Encoded)> {
        let Difference { target, .. } = difference;
        let difference = match candidate.from_base == plan.has_base() {
            true => difference,
            false => Difference::find(plan.dtype, zeros(&mut self.zeros, target.len()), target, &mut self.masks),
        };
        let encoder = encoder(&mut self.encoders, candidate)?;
        if candidate.codec == Codec::Zstd && !matches!(options.codec, CodecChoice::Only(_)) {
            let mut state = CandidateState::begin(encoder, plan, candidate, difference, u64::MAX)?;
            if state.outcome.payload.is_none() {
                state.end(encoder, plan, difference, u64::MAX)?;
            }
            return Ok(state.outcome.payload.unwrap_or_default());
        }
        // If the options fix the codec, they may also fix the layout. Otherwise the encoder chooses it for this chunk.
        let mut payload = Vec::new();
        let encoded = encoder.encode_difference(plan.coding(candidate, options.layout), difference, &mut payload)?;
        Ok((payload, encoded))
    }

    /// Estimated size in bytes of a payload of codec `conditioned`. `difference` is that from the base lanes or from zeros.
    pub fn estimate(&mut self, plan: &Plan, from_base: bool, difference: Difference<'_>) -> Result<u64> {
        let candidate = Candidate { from_base, codec: Codec::Conditioned };
        Ok(encoder(&mut self.encoders, candidate)?.estimate(plan.coding(candidate, None), difference))
    }

    /// Tries all candidates on a chunk. `difference` is as for [`encode`](Self::encode).
    ///
    /// Each candidate is first tried on a part of the chunk. Those that are estimated close to the smallest are then tried on the
    /// whole chunk, in ascending order of the estimates.
    pub fn try_candidates(&mut self, plan: &Plan, options: &EncodeOptions, difference: Difference<'_>) -> Result<Vec<Outcome>> {
        let candidates = match plan.choice.get() {
            Some(&candidate) => vec![candidate],
            None => options.codec.candidates(plan.has_base()),
        };
        if let [candidate] = candidates[..] {
            return Ok(vec![Outcome::made(candidate, self.encode(plan, candidate, options, difference)?)]);
        }
        let Self { encoders, zeros: buffer, masks } = self;
        let target = difference.target;
        let zeros = zeros(buffer, target.len());
        let part_from_zeros = LazyCell::new(|| Part::of_lanes(plan.dtype, zeros, target).filter(Part::mostly_changes));
        let from_zeros = LazyCell::new(|| Difference::find(plan.dtype, zeros, target, masks));
        let mut states: Vec<CandidateState> = Vec::with_capacity(candidates.len());
        let mut best = u64::MAX;
        for &candidate in &candidates {
            let encoder = encoder(encoders, candidate)?;
            let state = if candidate.from_base == plan.has_base() {
                CandidateState::begin(encoder, plan, candidate, difference, best)?
            } else if let Some(part) = &*part_from_zeros {
                match SMALL * best < target.len() as u64 {
                    true => CandidateState::of_part(encoder, plan, candidate, &part.quarter(plan.dtype), best)?,
                    false => CandidateState::of_part(encoder, plan, candidate, part, best)?,
                }
            } else {
                CandidateState::begin(encoder, plan, candidate, *from_zeros, best)?
            };
            best = best.min(state.outcome.size);
            states.push(state);
        }
        let mut order: Vec<usize> = (0..states.len()).collect();
        order.sort_by_key(|&i| states[i].outcome.size);
        let mut best = states.iter().filter(|state| state.outcome.payload.is_some()).map(|state| state.outcome.size).min();
        for state in order {
            let state = &mut states[state];
            if state.outcome.payload.is_none() && best.is_none_or(|best| state.may_be_below(best)) {
                let candidate = state.outcome.candidate;
                let difference = if candidate.from_base == plan.has_base() { difference } else { *from_zeros };
                state.end(encoder(encoders, candidate)?, plan, difference, best.unwrap_or(u64::MAX))?;
                best = best.into_iter().chain([state.outcome.size]).min();
            }
        }
        Ok(states.into_iter().map(|state| state.outcome).collect())
    }
}

fn encoder(encoders: &mut [Option<ChunkEncoder>; 2], candidate: Candidate) -> Result<&mut ChunkEncoder> {
    match &mut encoders[usize::from(!candidate.from_base)] {
        Some(encoder) => Ok(encoder),
        none => Ok(none.insert(ChunkEncoder::new()?)),
    }
}

/// The state of trying a candidate on a chunk.
struct CandidateState {
    outcome: Outcome,
    /// Layouts of codec `zstd` to try on the whole chunk. If empty, all are tried.
    layouts: Vec<Layout>,
    precision: Precision,
}

/// The precision of a candidate's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Precision {
    /// The exact size.
    Exact,
    /// A close estimate.
    Near,
    /// An estimate that may be far too large: the part compresses to repeats, and the whole chunk may repeat even more.
    Repeats,
}

impl CandidateState {
    fn new(candidate: Candidate, size: u64, precision: Precision) -> Self {
        let outcome = Outcome { candidate, size: size.next_multiple_of(PAYLOAD_ALIGN), payload: None, digest: None };
        Self { outcome, layouts: Vec::new(), precision }
    }

    /// Tries a candidate on a chunk, or on a part of it. `best` is the smallest size so far.
    fn begin(encoder: &mut ChunkEncoder, plan: &Plan, candidate: Candidate, difference: Difference<'_>, best: u64) -> Result<Self> {
        if difference.changed == 0 {
            return Ok(Self { outcome: Outcome::made(candidate, Default::default()), ..Self::new(candidate, 0, Precision::Exact) });
        }
        if let Some(size) = size_without_tables(plan, candidate, difference) {
            return Ok(Self::new(candidate, size, Precision::Exact));
        }
        // If at most half of the lanes change, the first candidate is usually the smallest.
        let whole = best == u64::MAX && 2 * difference.changed <= difference.lanes();
        match if whole { None } else { Part::of(candidate.codec, difference) } {
            Some(part) => Self::of_part(encoder, plan, candidate, &part, best),
            None => {
                let mut state = Self::new(candidate, 0, Precision::Near);
                state.end(encoder, plan, difference, best)?;
                Ok(state)
            }
        }
    }

    /// Estimates the size of a chunk as `candidate` from a part of the chunk.
    fn of_part(encoder: &mut ChunkEncoder, plan: &Plan, candidate: Candidate, part: &Part<'_>, best: u64) -> Result<Self> {
        let difference = part.difference(plan.dtype);
        if let Some(size) = size_without_tables(plan, candidate, difference) {
            return Ok(Self::new(candidate, part.whole(size), Precision::Near));
        }
        let mut state = Self::new(candidate, 0, Precision::Near);
        let mut payload = Vec::new();
        if candidate.codec == Codec::Zstd {
            let many = part.many;
            // Layouts differ less in size if many lanes change, so the limit is tighter.
            let enough = part.share(best.saturating_mul(if many { 9 } else { 10 }) / 8) + FIXED_BYTES;
            let (encoded, sizes) = encoder.smallest_frame(difference, Layouts::Any, enough, &mut payload)?;
            if is_repeats(encoded, payload.len()) {
                state.precision = Precision::Repeats;
            } else {
                state.layouts = close(&sizes, payload.len(), many);
            }
        } else {
            encoder.encode_difference(plan.coding(candidate, None), difference, &mut payload)?;
        }
        state.outcome.size = part.whole((payload.len() as u64).saturating_sub(FIXED_BYTES));
        Ok(state)
    }

    /// Whether this candidate may give at most `best` bytes.
    fn may_be_below(&self, best: u64) -> bool {
        let size = self.outcome.size;
        match self.precision {
            Precision::Exact => size <= best,
            Precision::Near => 16 * size <= 17 * best,
            Precision::Repeats => size <= 8 * best,
        }
    }

    /// Encodes the whole chunk. `best` is the smallest size so far.
    fn end(&mut self, encoder: &mut ChunkEncoder, plan: &Plan, difference: Difference<'_>, best: u64) -> Result<()> {
        let candidate = self.outcome.candidate;
        let mut payload = Vec::new();
        let encoded = match candidate.codec {
            Codec::Zstd => {
                let layouts = if self.layouts.is_empty() { Layouts::Any } else { Layouts::These(&self.layouts) };
                let enough = if self.precision == Precision::Repeats { u64::MAX } else { best.saturating_mul(3) / 2 };
                encoder.smallest_frame(difference, layouts, enough, &mut payload)?.0
            }
            _ => encoder.encode_difference(plan.coding(candidate, None), difference, &mut payload)?,
        };
        self.outcome = Outcome::made(candidate, (payload, encoded));
        Ok(())
    }
}

/// Payload size in bytes, for candidates whose size can be computed without encoding: codec `raw`, and codec `conditioned` without
/// tables.
fn size_without_tables(plan: &Plan, candidate: Candidate, difference: Difference<'_>) -> Option<u64> {
    let (changed, width) = (difference.changed, plan.dtype.lane_bytes());
    match candidate.codec {
        Codec::Raw => Some(raw_size(changed as u32, width)),
        Codec::Conditioned if plan.tables_of(candidate).is_none() => {
            Some(uncoded_bytes(changed, width, difference.base.len()) as u64)
        }
        Codec::Conditioned | Codec::Zstd => None,
    }
}

/// The layouts to try on the whole chunk, in ascending order of `sizes`, which were measured on the part. If `many` lanes change,
/// only the smallest layout. Otherwise all layouts of up to 1.5 times `smallest`, because the whole chunk may repeat more in them.
fn close(sizes: &[LayoutSize], smallest: usize, many: bool) -> Vec<Layout> {
    let most = if many { smallest } else { smallest * 3 / 2 };
    let mut close: Vec<LayoutSize> = sizes.iter().copied().filter(|(_, size)| *size <= most).collect();
    close.sort_by_key(|(_, size)| *size);
    close.truncate(if many { 1 } else { close.len() });
    close.into_iter().map(|(layout, _)| layout).collect()
}

fn zeros(buffer: &mut Vec<u8>, size: usize) -> &[u8] {
    if buffer.len() < size {
        buffer.resize(size, 0);
    }
    &buffer[..size]
}

/// Sizes of a part and of its chunk, in the same unit.
#[derive(Clone, Copy)]
struct Scale {
    part: u64,
    chunk: u64,
}

/// A part of a chunk, used as its sample.
struct Part<'a> {
    base: Cow<'a, [u8]>,
    target: Cow<'a, [u8]>,
    masks: Cow<'a, [u64]>,
    changed: usize,
    /// Whether more than a quarter of the chunk's lanes change.
    many: bool,
    /// Sizes of part and chunk, both in bytes of lanes or both in number of changes.
    scale: Scale,
}

impl<'a> Part<'a> {
    /// The part on which a codec is tried first. `None` if the codec is fast enough on the whole chunk.
    fn of(codec: Codec, difference: Difference<'a>) -> Option<Self> {
        let (lanes, changed) = (difference.lanes(), difference.changed as u64);
        match codec {
            Codec::Raw => None,
            // If few lanes change, the time of codec `zstd` depends on the number of changes rather than the number of lanes.
            Codec::Zstd if 4 * changed <= lanes as u64 => {
                (lanes >= SAMPLED_LANES && changed > 2 * FEW).then(|| Self::of_changes(difference))
            }
            _ => {
                let part = Self::of_lanes(difference.dtype, difference.base, difference.target)?;
                Some(Self { many: 4 * changed > lanes as u64, ..part })
            }
        }
    }

    /// `RUNS` runs of lanes, spread over the chunk and concatenated. `None` if the chunk has fewer than
    /// [`SAMPLED_LANES`].
    fn of_lanes(dtype: Dtype, base: &'a [u8], target: &'a [u8]) -> Option<Self> {
        let width = dtype.lane_bytes();
        let lanes = base.len() / width;
        if lanes < SAMPLED_LANES {
            return None;
        }
        let step = lanes / RUNS;
        let run = (step / 16).next_multiple_of(*RUN.start()).clamp(*RUN.start(), *RUN.end());
        let runs = |lanes: &[u8]| {
            let runs: Vec<&[u8]> = (0..RUNS).map(|r| &lanes[(r * step + (step - run) / 2) * width..][..run * width]).collect();
            runs.concat()
        };
        let (base, whole) = (runs(base), target.len() as u64);
        let target = runs(target);
        let mut masks = Vec::new();
        let Difference { changed, .. } = Difference::find(dtype, &base, &target, &mut masks);
        let scale = Scale { part: base.len() as u64, chunk: whole };
        Some(Self { base: base.into(), target: target.into(), masks: masks.into(), changed, many: 4 * changed > RUNS * run, scale })
    }

    /// The middle of the chunk, with about a sixteenth of its changes, but at least [`FEW`].
    fn of_changes(difference: Difference<'a>) -> Self {
        let Difference { masks, .. } = difference;
        let changed = difference.changed as u64;
        let target_changes = FEW.max(changed / 16);
        let (mut seen, mut range) = (0, 0..masks.len());
        for (start, masks) in (0..).step_by(MASKS).zip(masks.chunks(MASKS)) {
            let before = seen;
            seen += count(masks) as u64;
            if seen <= (changed - target_changes) / 2 {
                range.start = start + masks.len();
            } else if before >= (changed + target_changes) / 2 {
                range.end = start;
                break;
            }
        }
        let Difference { base, target, masks, changed: in_part, .. } = difference.part(range);
        let scale = Scale { part: (in_part as u64).max(1), chunk: changed };
        Self { base: base.into(), target: target.into(), masks: masks.into(), changed: in_part, many: false, scale }
    }

    /// Whether more than half of the part's lanes change.
    fn mostly_changes(&self) -> bool {
        2 * self.changed > self.masks.len() * 64
    }

    /// The first quarter of the part's runs, for a rougher estimate.
    fn quarter(&self, dtype: Dtype) -> Part<'_> {
        let Difference { base, target, masks, changed, .. } = self.difference(dtype).part(0..self.masks.len() / 4);
        let scale = Scale { part: base.len() as u64, chunk: self.scale.chunk };
        Part { base: base.into(), target: target.into(), masks: masks.into(), changed, many: self.many, scale }
    }

    fn difference(&self, dtype: Dtype) -> Difference<'_> {
        Difference { dtype, base: &self.base, target: &self.target, masks: &self.masks, changed: self.changed }
    }

    /// Scales a size from the chunk to the part.
    fn share(&self, whole: u64) -> u64 {
        (u128::from(whole) * u128::from(self.scale.part) / u128::from(self.scale.chunk)) as u64
    }

    /// Scales a size from the part to the chunk.
    fn whole(&self, size: u64) -> u64 {
        size * self.scale.chunk / self.scale.part
    }
}

/// Buffers for lanes of base and target, unused if the checkpoints are in memory.
#[derive(Default)]
pub(super) struct Lanes {
    base: Vec<u8>,
    target: Vec<u8>,
}

impl Lanes {
    /// `size` bytes of base and target lanes, from byte `offset` of the tensor on. Base lanes that do not exist are zeros.
    pub fn read<'a>(
        &'a mut self,
        base: Option<&'a dyn Checkpoint>,
        target: &'a dyn Checkpoint,
        plan: &Plan,
        offset: u64,
        size: usize,
    ) -> Result<(&'a [u8], &'a [u8])> {
        let target_lanes = target.bytes(plan.target as usize, offset, size, &mut self.target)?;
        let piece = plan.base.map(|place| Piece::of(place as usize, None));
        let base_lanes = PaddedBase::new(base, piece.as_ref()).bytes(offset, size, &mut self.base)?;
        Ok((base_lanes, target_lanes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_chunks_are_not_sampled() {
        // Codec `zstd` samples by changes if at most a quarter of the lanes change, and by lanes if more change.
        for (changed, codec) in [(2 * FEW as usize + 1, Codec::Zstd), (SAMPLED_LANES, Codec::Zstd), (1, Codec::Conditioned)] {
            for lanes in [SAMPLED_LANES - 1, SAMPLED_LANES] {
                let (base, mut target, mut masks) = (vec![0; lanes], vec![0; lanes], Vec::new());
                target[..changed.min(lanes)].fill(1);
                let difference = Difference::find(Dtype::U8, &base, &target, &mut masks);
                assert_eq!(Part::of(codec, difference).is_some(), lanes == SAMPLED_LANES, "{changed} changes, {codec:?}");
            }
        }
    }
}
