//! Tries the ways in which a chunk may be coded, to find the smallest.
//!
//! A chunk is encoded in every way that may be the smallest. For clearly larger ways the size is only estimated. The result depends
//! only on the chunk's lanes and the options, not on the number of threads.

use super::options::{CodecChoice, EncodeOptions, Way};
use super::plan::Plan;
use crate::base::PaddedBase;
use crate::checkpoint::Checkpoint;
use std::borrow::Cow;
use std::cell::LazyCell;
use std::ops::RangeInclusive;
use tpde_core::codec::conditioned::uncoded_size;
use tpde_core::codec::count;
use tpde_core::codec::zstd::is_repeats;
use tpde_core::codec::{ChunkEncoder, Codec, Difference, Encoded, Layout, LayoutSize, Layouts, raw_size};
use tpde_core::digest;
use tpde_core::error::Result;
use tpde_core::format::{BaseKind, DIGEST_SIZE, PAYLOAD_ALIGN};
use tpde_core::lane::Dtype;

/// Minimum and maximum number of lanes per run. Ways are first tried on a sample of the chunk, which consists of `RUNS` runs.
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
/// If a payload is smaller than 1/`SMALL` of the chunk, a rough estimate of the other ways is enough.
const SMALL: u64 = 64;
/// Estimated size, in bytes, of the parts of a payload that do not grow with the number of lanes: headers and tables.
const FIXED_BYTES: u64 = 128;

/// The result of trying a way on a chunk.
pub(super) struct Attempt {
    pub way: Way,
    /// Size of the padded payload in bytes. An estimate if `payload` is `None`.
    pub size: u64,
    pub payload: Option<(Vec<u8>, Encoded)>,
    /// Digest of the payload, after [`Attempt::hash`].
    pub digest: Option<[u8; DIGEST_SIZE]>,
}

impl Attempt {
    fn made(way: Way, payload: (Vec<u8>, Encoded)) -> Self {
        Self { way, size: padded(&payload.0), payload: Some(payload), digest: None }
    }

    fn not_made(way: Way, size: u64) -> Self {
        Self { way, size, payload: None, digest: None }
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
    /// Encodes a chunk in `way`. `difference` is the difference from the base lanes, or from zeros if the tensor has no base.
    pub fn encode(
        &mut self,
        plan: &Plan,
        way: Way,
        options: &EncodeOptions,
        difference: Difference<'_>,
    ) -> Result<(Vec<u8>, Encoded)> {
        let Difference { target, .. } = difference;
        let difference = match way.from_base == has_base(plan) {
            true => difference,
            false => Difference::find(plan.dtype, zeros(&mut self.zeros, target.len()), target, &mut self.masks),
        };
        let encoder = encoder(&mut self.encoders, way)?;
        if way.codec == Codec::Zstd && !matches!(options.codec, CodecChoice::Only(_)) {
            let trial = Trial::begin(encoder, plan, way, difference, u64::MAX)?;
            return trial.payload(encoder, plan, difference);
        }
        // If the options fix the codec, they may also fix the layout. Otherwise the encoder chooses it for this chunk.
        let mut payload = Vec::new();
        let encoded = encoder.encode_difference(plan.coding(way, options.layout), difference, &mut payload)?;
        Ok((payload, encoded))
    }

    /// Estimated size in bytes of a payload of codec `conditioned`. `difference` is the difference from the base lanes, or from zeros.
    pub fn estimate(&mut self, plan: &Plan, from_base: bool, difference: Difference<'_>) -> Result<u64> {
        let way = Way { from_base, codec: Codec::Conditioned };
        Ok(encoder(&mut self.encoders, way)?.estimate(plan.coding(way, None), difference))
    }

    /// Tries all ways on a chunk. `difference` is as for [`encode`](Self::encode).
    ///
    /// Each way is first tried on a part of the chunk. Ways whose estimates are close to the smallest are then tried on the whole
    /// chunk, in ascending order of the estimates.
    pub fn attempts(&mut self, plan: &Plan, options: &EncodeOptions, difference: Difference<'_>) -> Result<Vec<Attempt>> {
        let ways = match plan.way.get() {
            Some(&way) => vec![way],
            None => options.codec.ways(has_base(plan)),
        };
        if let [way] = ways[..] {
            return Ok(vec![Attempt::made(way, self.encode(plan, way, options, difference)?)]);
        }
        let Self { encoders, zeros: buffer, masks } = self;
        let target = difference.target;
        let zeros = zeros(buffer, target.len());
        let part_from_zeros = LazyCell::new(|| Part::of_lanes(plan.dtype, zeros, target).filter(Part::mostly_changes));
        let from_zeros = LazyCell::new(|| Difference::find(plan.dtype, zeros, target, masks));
        let mut trials: Vec<Trial> = Vec::with_capacity(ways.len());
        let mut least = u64::MAX;
        for &way in &ways {
            let encoder = encoder(encoders, way)?;
            let trial = if way.from_base == has_base(plan) {
                Trial::begin(encoder, plan, way, difference, least)?
            } else if let Some(part) = &*part_from_zeros {
                match SMALL * least < target.len() as u64 {
                    true => Trial::of_part(encoder, plan, way, &part.quarter(plan.dtype), least)?,
                    false => Trial::of_part(encoder, plan, way, part, least)?,
                }
            } else {
                Trial::begin(encoder, plan, way, *from_zeros, least)?
            };
            least = least.min(trial.attempt.size);
            trials.push(trial);
        }
        let mut order: Vec<usize> = (0..trials.len()).collect();
        order.sort_by_key(|&i| trials[i].attempt.size);
        let mut least = trials.iter().filter(|trial| trial.attempt.payload.is_some()).map(|trial| trial.attempt.size).min();
        for trial in order {
            let trial = &mut trials[trial];
            if trial.attempt.payload.is_none() && least.is_none_or(|least| trial.may_be_below(least)) {
                let way = trial.attempt.way;
                let difference = if way.from_base == has_base(plan) { difference } else { *from_zeros };
                trial.end(encoder(encoders, way)?, plan, difference, least.unwrap_or(u64::MAX))?;
                least = least.into_iter().chain([trial.attempt.size]).min();
            }
        }
        Ok(trials.into_iter().map(|trial| trial.attempt).collect())
    }
}

fn has_base(plan: &Plan) -> bool {
    plan.base_kind != BaseKind::None
}

fn encoder(encoders: &mut [Option<ChunkEncoder>; 2], way: Way) -> Result<&mut ChunkEncoder> {
    match &mut encoders[usize::from(!way.from_base)] {
        Some(encoder) => Ok(encoder),
        none => Ok(none.insert(ChunkEncoder::new()?)),
    }
}

/// The state of trying a way on a chunk.
struct Trial {
    attempt: Attempt,
    /// Layouts of codec `zstd` to try on the whole chunk. If empty, all are tried.
    layouts: Vec<Layout>,
    precision: Precision,
}

/// The precision of a trial's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Precision {
    /// The exact size.
    Exact,
    /// A close estimate.
    Near,
    /// An estimate that may be far too large: the part compresses to repeats, and the whole chunk may repeat even more.
    Repeats,
}

impl Trial {
    fn new(way: Way, size: u64, precision: Precision) -> Self {
        Self { attempt: Attempt::not_made(way, size.next_multiple_of(PAYLOAD_ALIGN)), layouts: Vec::new(), precision }
    }

    /// Tries a way on a chunk, or on a part of it. `least` is the smallest size so far.
    fn begin(encoder: &mut ChunkEncoder, plan: &Plan, way: Way, difference: Difference<'_>, least: u64) -> Result<Self> {
        if difference.changed == 0 {
            return Ok(Self { attempt: Attempt::made(way, Default::default()), ..Self::new(way, 0, Precision::Exact) });
        }
        if let Some(size) = size_without_tables(plan, way, difference) {
            return Ok(Self::new(way, size, Precision::Exact));
        }
        // If at most half of the lanes change, the first way is usually the smallest.
        let whole = least == u64::MAX && 2 * difference.changed <= difference.lanes();
        match if whole { None } else { Part::of(way.codec, difference) } {
            Some(part) => Self::of_part(encoder, plan, way, &part, least),
            None => {
                let mut trial = Self::new(way, 0, Precision::Near);
                trial.end(encoder, plan, difference, least)?;
                Ok(trial)
            }
        }
    }

    /// Estimates the size of a chunk in `way` from a part of the chunk.
    fn of_part(encoder: &mut ChunkEncoder, plan: &Plan, way: Way, part: &Part<'_>, least: u64) -> Result<Self> {
        let difference = part.difference(plan.dtype);
        if let Some(size) = size_without_tables(plan, way, difference) {
            return Ok(Self::new(way, part.whole(size), Precision::Near));
        }
        let mut trial = Self::new(way, 0, Precision::Near);
        let mut payload = Vec::new();
        if way.codec == Codec::Zstd {
            let many = part.many;
            // Layouts differ less in size if many lanes change, so the limit is tighter.
            let enough = part.share(least.saturating_mul(if many { 9 } else { 10 }) / 8) + FIXED_BYTES;
            let (encoded, sizes) = encoder.smallest_frame(difference, Layouts::Any, enough, &mut payload)?;
            if is_repeats(encoded, payload.len()) {
                trial.precision = Precision::Repeats;
            } else {
                trial.layouts = close(&sizes, payload.len(), many);
            }
        } else {
            encoder.encode_difference(plan.coding(way, None), difference, &mut payload)?;
        }
        trial.attempt.size = part.whole((payload.len() as u64).saturating_sub(FIXED_BYTES));
        Ok(trial)
    }

    /// Whether this way may give at most `least` bytes.
    fn may_be_below(&self, least: u64) -> bool {
        let size = self.attempt.size;
        match self.precision {
            Precision::Exact => size <= least,
            Precision::Near => 16 * size <= 17 * least,
            Precision::Repeats => size <= 8 * least,
        }
    }

    /// Encodes the whole chunk, unless that is done, and returns the payload.
    fn payload(mut self, encoder: &mut ChunkEncoder, plan: &Plan, difference: Difference<'_>) -> Result<(Vec<u8>, Encoded)> {
        loop {
            match self.attempt.payload {
                Some(payload) => return Ok(payload),
                None => self.end(encoder, plan, difference, u64::MAX)?,
            }
        }
    }

    /// Encodes the whole chunk. `least` is the smallest size so far.
    fn end(&mut self, encoder: &mut ChunkEncoder, plan: &Plan, difference: Difference<'_>, least: u64) -> Result<()> {
        let way = self.attempt.way;
        let mut payload = Vec::new();
        let encoded = match way.codec {
            Codec::Zstd => {
                let layouts = if self.layouts.is_empty() { Layouts::Any } else { Layouts::These(&self.layouts) };
                let enough = if self.precision == Precision::Repeats { u64::MAX } else { least.saturating_mul(3) / 2 };
                encoder.smallest_frame(difference, layouts, enough, &mut payload)?.0
            }
            _ => encoder.encode_difference(plan.coding(way, None), difference, &mut payload)?,
        };
        self.attempt = Attempt::made(way, (payload, encoded));
        Ok(())
    }
}

/// Payload size in bytes, for ways whose size can be computed without encoding: codec `raw`, and codec `conditioned` without
/// tables.
fn size_without_tables(plan: &Plan, way: Way, difference: Difference<'_>) -> Option<u64> {
    match way.codec {
        Codec::Raw => Some(raw_size(difference.changed as u32, plan.dtype.lane_bytes())),
        Codec::Conditioned if plan.tables_of(way).is_none() => Some(uncoded_size(difference) as u64),
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

fn padded(payload: &[u8]) -> u64 {
    (payload.len() as u64).next_multiple_of(PAYLOAD_ALIGN)
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

    /// The difference of the part's lanes.
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
        let base_lanes = PaddedBase::new(base, plan.base.map(|place| place as usize)).bytes(offset, size, &mut self.base)?;
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
