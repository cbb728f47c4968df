//! How the chunks of a tensor may be coded, and which way makes them smallest.
//!
//! A chunk is coded in every way that may win. What a way that is far off would make of it is estimated: nobody needs that payload.
//! All of this is a function of the chunk's lanes, so that the bytes are the same for any number of threads.

use super::options::{CodecChoice, EncodeOptions, Way};
use super::plan::Plan;
use crate::base::PaddedBase;
use crate::checkpoint::Checkpoint;
use crate::codec::conditioned::uncoded_size;
use crate::codec::count;
use crate::codec::zstd::is_repeats;
use crate::codec::{ChunkEncoder, Codec, Difference, Encoded, Layout, LayoutSize, Layouts, raw_size};
use crate::error::Result;
use crate::format::{BaseKind, PAYLOAD_ALIGN};
use crate::lane::Dtype;
use std::borrow::Cow;
use std::cell::LazyCell;
use std::ops::RangeInclusive;

/// Lanes of the runs that the part of a chunk is made of on which ways are tried first, the fewest and the most.
const RUN: RangeInclusive<usize> = 512..=4096;
/// Masks of 64 lanes in the shortest run.
const MASKS: usize = *RUN.start() / 64;
/// Number of these runs, spread over the chunk.
const RUNS: usize = 8;
/// Changes that codec `zstd` takes little time for; of more, where they are few of the lanes, it is tried on a part first, of so many.
const FEW: u64 = 1 << 9;
/// A chunk is small in a way if it has fewer bytes than one in this many. Other ways must then be small too, or are far off.
const SMALL: u64 = 64;
/// Bytes of a payload that a part has as well as the whole: headers and tables.
const PART: u64 = 128;

/// What a way makes of a chunk.
pub(super) struct Attempt {
    pub way: Way,
    /// Bytes of the payload with its padding, or about that where there is no payload.
    pub size: u64,
    pub payload: Option<(Vec<u8>, Encoded)>,
}

impl Attempt {
    fn made(way: Way, payload: (Vec<u8>, Encoded)) -> Self {
        Self { way, size: padded(&payload.0), payload: Some(payload) }
    }

    fn not_made(way: Way, size: u64) -> Self {
        Self { way, size, payload: None }
    }
}

/// What a thread needs to encode chunks.
#[derive(Default)]
pub(super) struct Worker {
    pub encoders: Encoders,
    pub lanes: Lanes,
    pub masks: Vec<u64>,
}

/// Encoders of chunks from their base and from zeros. Each keeps what it has made of a table set, and is made when it is first used.
#[derive(Default)]
pub(super) struct Encoders {
    encoders: [Option<ChunkEncoder>; 2],
    zeros: Vec<u8>,
    masks: Vec<u64>,
}

impl Encoders {
    /// The payload of a chunk in a way. `difference` is that from the chunk's base lanes, or from zeros if its tensor has no base.
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
        // A codec that was named has the layout that was named, or the one that suits the chunk.
        let mut payload = Vec::new();
        let encoded = encoder.encode_difference(plan.coding(way, options.layout), difference, &mut payload)?;
        Ok((payload, encoded))
    }

    /// What each way makes of a chunk. `difference` is as for [`encode`](Self::encode).
    ///
    /// Each way is tried on a part of the chunk first. Then the ways that are close are tried on all of it, the smallest first.
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

/// A way that may be tried on a whole chunk.
struct Trial {
    attempt: Attempt,
    /// Layouts of codec `zstd` that are to be tried; none if all are.
    layouts: Vec<Layout>,
    precision: Precision,
}

/// What is known of the size that a way makes of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Precision {
    /// The size.
    Exact,
    /// About the size.
    Near,
    /// Too much, perhaps by far: the part is made of repeats, and the whole may have more of them.
    Repeats,
}

impl Trial {
    fn new(way: Way, size: u64, precision: Precision) -> Self {
        Self { attempt: Attempt::not_made(way, size.next_multiple_of(PAYLOAD_ALIGN)), layouts: Vec::new(), precision }
    }

    /// What a way makes of a chunk, or about that, where others make about `least` bytes.
    fn begin(encoder: &mut ChunkEncoder, plan: &Plan, way: Way, difference: Difference<'_>, least: u64) -> Result<Self> {
        if difference.changed == 0 {
            return Ok(Self { attempt: Attempt::made(way, Default::default()), ..Self::new(way, 0, Precision::Exact) });
        }
        if let Some(size) = size_without_tables(plan, way, difference) {
            return Ok(Self::new(way, size, Precision::Exact));
        }
        // Where not most lanes change the first way wins mostly.
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

    /// About what a way makes of a chunk, from a part of it.
    fn of_part(encoder: &mut ChunkEncoder, plan: &Plan, way: Way, part: &Part<'_>, least: u64) -> Result<Self> {
        let difference = part.difference(plan.dtype);
        if let Some(size) = size_without_tables(plan, way, difference) {
            return Ok(Self::new(way, part.whole(size), Precision::Near));
        }
        let mut trial = Self::new(way, 0, Precision::Near);
        let mut payload = Vec::new();
        if way.codec == Codec::Zstd {
            let many = part.many;
            // Of many changes, layouts differ less.
            let enough = part.share(least.saturating_mul(if many { 9 } else { 10 }) / 8) + PART;
            let (encoded, sizes) = encoder.smallest_frame(difference, Layouts::Any, enough, &mut payload)?;
            if is_repeats(encoded, payload.len()) {
                trial.precision = Precision::Repeats;
            } else {
                trial.layouts = close(&sizes, payload.len(), many);
            }
        } else {
            encoder.encode_difference(plan.coding(way, None), difference, &mut payload)?;
        }
        trial.attempt.size = part.whole((payload.len() as u64).saturating_sub(PART));
        Ok(trial)
    }

    /// Whether the chunk may have fewer bytes than `least` in this way.
    fn may_be_below(&self, least: u64) -> bool {
        let size = self.attempt.size;
        match self.precision {
            Precision::Exact => size <= least,
            Precision::Near => 16 * size <= 17 * least,
            Precision::Repeats => size <= 8 * least,
        }
    }

    /// The payload of the whole chunk.
    fn payload(mut self, encoder: &mut ChunkEncoder, plan: &Plan, difference: Difference<'_>) -> Result<(Vec<u8>, Encoded)> {
        loop {
            match self.attempt.payload {
                Some(payload) => return Ok(payload),
                None => self.end(encoder, plan, difference, u64::MAX)?,
            }
        }
    }

    /// Encodes the whole chunk, of which others make `least` bytes.
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

/// Bytes of a chunk in a way for which the number of changes says it; none for the others.
fn size_without_tables(plan: &Plan, way: Way, difference: Difference<'_>) -> Option<u64> {
    match way.codec {
        Codec::Raw => Some(raw_size(difference.changed as u32, plan.dtype.lane_bytes())),
        Codec::Conditioned if plan.tables_of(way).is_none() => Some(uncoded_size(difference) as u64),
        Codec::Conditioned | Codec::Zstd => None,
    }
}

/// The layouts to try on a whole chunk, the smallest of the part first. Where `many` lanes change, that is the only one. Where few
/// do, a longer content may have more repeats in another layout.
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

/// A part of a chunk that is tried for all of it.
struct Part<'a> {
    base: Cow<'a, [u8]>,
    target: Cow<'a, [u8]>,
    masks: Cow<'a, [u64]>,
    changed: usize,
    /// Whether more than a quarter of the chunk's lanes change.
    many: bool,
    /// How much of how much it is.
    of: (u64, u64),
}

impl<'a> Part<'a> {
    /// The part on which a codec is tried first; none if the whole takes it little time.
    fn of(codec: Codec, difference: Difference<'a>) -> Option<Self> {
        let (lanes, changed) = (difference.lanes(), difference.changed as u64);
        match codec {
            Codec::Raw => None,
            // The time of codec `zstd` goes with the changes where these are few.
            Codec::Zstd if 4 * changed <= lanes as u64 => (changed > 2 * FEW).then(|| Self::of_changes(difference)),
            _ => {
                let part = Self::of_lanes(difference.dtype, difference.base, difference.target)?;
                Some(Self { many: 4 * changed > lanes as u64, ..part })
            }
        }
    }

    /// Runs of lanes from all over a chunk, put together; none if the chunk has fewer than twice their lanes.
    fn of_lanes(dtype: Dtype, base: &'a [u8], target: &'a [u8]) -> Option<Self> {
        let width = dtype.lane_bytes();
        let lanes = base.len() / width;
        if lanes < 2 * RUNS * RUN.start() {
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
        let of = (base.len() as u64, whole);
        Some(Self { base: base.into(), target: target.into(), masks: masks.into(), changed, many: 4 * changed > RUNS * run, of })
    }

    /// The lanes around the change in the middle, with a sixteenth of the changes, or [`FEW`].
    fn of_changes(difference: Difference<'a>) -> Self {
        let Difference { masks, .. } = difference;
        let changed = difference.changed as u64;
        let wanted = FEW.max(changed / 16);
        let (mut seen, mut range) = (0, 0..masks.len());
        for (start, masks) in (0..).step_by(MASKS).zip(masks.chunks(MASKS)) {
            let before = seen;
            seen += count(masks) as u64;
            if seen <= (changed - wanted) / 2 {
                range.start = start + masks.len();
            } else if before >= (changed + wanted) / 2 {
                range.end = start;
                break;
            }
        }
        let Difference { base, target, masks, changed: in_part, .. } = difference.part(range);
        let of = ((in_part as u64).max(1), changed);
        Self { base: base.into(), target: target.into(), masks: masks.into(), changed: in_part, many: false, of }
    }

    /// Whether most of its lanes change.
    fn mostly_changes(&self) -> bool {
        2 * self.changed > self.masks.len() * 64
    }

    /// The first quarter of its runs, where a rougher estimate will do.
    fn quarter(&self, dtype: Dtype) -> Part<'_> {
        let Difference { base, target, masks, changed, .. } = self.difference(dtype).part(0..self.masks.len() / 4);
        let of = (base.len() as u64, self.of.1);
        Part { base: base.into(), target: target.into(), masks: masks.into(), changed, many: self.many, of }
    }

    /// What differs in it.
    fn difference(&self, dtype: Dtype) -> Difference<'_> {
        Difference { dtype, base: &self.base, target: &self.target, masks: &self.masks, changed: self.changed }
    }

    /// The part's share of a size.
    fn share(&self, whole: u64) -> u64 {
        (u128::from(whole) * u128::from(self.of.0) / u128::from(self.of.1)) as u64
    }

    /// What a size of the part is of the whole.
    fn whole(&self, size: u64) -> u64 {
        size * self.of.1 / self.of.0
    }
}

/// Lanes of base and target, read into buffers where they do not lie in memory.
#[derive(Default)]
pub(super) struct Lanes {
    base: Vec<u8>,
    target: Vec<u8>,
}

impl Lanes {
    /// `size` bytes of lanes of base and target from byte `offset` of the tensor on; zeros where there is no base.
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
