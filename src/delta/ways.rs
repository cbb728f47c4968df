//! How the chunks of a tensor may be coded, and which way makes them smallest.
//!
//! A chunk is coded in every way that may win. What a way that is far off would make of it is estimated: nobody needs that payload.
//! All of this is a function of the chunk's lanes, so that the bytes are the same for any number of threads.

use super::options::{EncodeOptions, Way};
use super::plan::Plan;
use crate::checkpoint::Checkpoint;
use crate::codec::{ChunkEncoder, Codec, Difference, Encoded, Layout, raw_size};
use crate::error::Result;
use crate::format::{BaseKind, PAYLOAD_ALIGN};
use crate::lane::Dtype;
use std::borrow::Cow;
use std::ops::RangeInclusive;

/// Lanes of the runs that the part of a chunk is made of on which ways are tried first, the fewest and the most.
const RUN: RangeInclusive<usize> = 512..=4096;
/// Masks of 64 lanes in the shortest run.
const MASKS: usize = *RUN.start() / 64;
/// Number of these runs, spread over the chunk. A chunk with fewer than twice their lanes is tried as a whole.
const RUNS: usize = 8;
/// Changes that codec `zstd` takes little time for; of more, where they are few of the lanes, it is tried on a part first, of so many.
const FEW: u64 = 1 << 9;
/// Bytes of a payload that a part has as well as the whole: headers and tables.
const PART: u64 = 128;
/// How many times smaller than the target a chunk must be coded from its base, for the target not to be tried alone.
const FAR: u64 = 32;

/// What a way makes of a chunk.
pub(super) struct Attempt {
    pub way: Way,
    /// Bytes of the payload with its padding, or about that where there is no payload.
    pub size: u64,
    pub payload: Option<(Vec<u8>, Encoded)>,
}

/// What a thread needs to encode chunks.
#[derive(Default)]
pub(super) struct Worker {
    pub encoders: Encoders,
    pub lanes: Lanes,
}

/// Encoders of chunks from their base and from zeros: each keeps what it has made of a table set.
#[derive(Default)]
pub(super) struct Encoders {
    sides: [Side; 2],
    zeros: Vec<u8>,
}

/// What coding from the base, or from zeros, needs. Made when it is first wanted.
#[derive(Default)]
struct Side {
    encoder: Option<ChunkEncoder>,
    masks: Vec<u64>,
}

impl Encoders {
    /// The payload of a chunk in a way.
    pub fn encode(
        &mut self,
        plan: &Plan,
        way: Way,
        layout: Option<Layout>,
        base: &[u8],
        target: &[u8],
    ) -> Result<(Vec<u8>, Encoded)> {
        let Side { encoder, masks } = &mut self.sides[usize::from(!way.from_base)];
        let base = if way.from_base { base } else { zeros(&mut self.zeros, target.len()) };
        encode(encoder, plan, way, layout, Difference::find(plan.dtype, base, target, masks))
    }

    /// What each way makes of a chunk.
    pub fn attempts(&mut self, plan: &Plan, options: &EncodeOptions, base: &[u8], target: &[u8]) -> Result<Vec<Attempt>> {
        let ways = match plan.way.get() {
            Some(&way) => vec![way],
            None => options.codec.ways(plan.base_kind != BaseKind::None),
        };
        let mut attempts: Vec<Attempt> = Vec::with_capacity(ways.len());
        let mut least = u64::MAX;
        let Self { sides, zeros: buffer } = self;
        for (from_base, side) in [true, false].into_iter().zip(sides) {
            if ways.iter().all(|way| way.from_base != from_base) {
                continue;
            }
            if !attempts.is_empty() && least.saturating_mul(FAR) <= target.len() as u64 {
                let far = |way: &Way| Attempt { way: *way, size: target.len() as u64, payload: None };
                attempts.extend(ways.iter().filter(|way| way.from_base == from_base).map(far));
                continue;
            }
            let base = if from_base { base } else { zeros(buffer, target.len()) };
            let difference = Difference::find(plan.dtype, base, target, &mut side.masks);
            for &way in ways.iter().filter(|way| way.from_base == from_base) {
                let attempt = if attempts.is_empty() {
                    let (payload, encoded) = encode(&mut side.encoder, plan, way, options.layout, difference)?;
                    Attempt { way, size: padded(&payload), payload: Some((payload, encoded)) }
                } else {
                    attempt(&mut side.encoder, plan, way, difference, least)?
                };
                least = least.min(attempt.size);
                attempts.push(attempt);
            }
        }
        Ok(attempts)
    }
}

fn encode(
    encoder: &mut Option<ChunkEncoder>,
    plan: &Plan,
    way: Way,
    layout: Option<Layout>,
    difference: Difference<'_>,
) -> Result<(Vec<u8>, Encoded)> {
    let encoder = match encoder {
        Some(encoder) => encoder,
        none => none.insert(ChunkEncoder::new()?),
    };
    let mut payload = Vec::new();
    let encoded = encoder.encode_difference(plan.coding(way, layout), difference, &mut payload)?;
    Ok((payload, encoded))
}

/// What a way makes of a chunk, where others make at least `least` bytes.
fn attempt(encoder: &mut Option<ChunkEncoder>, plan: &Plan, way: Way, difference: Difference<'_>, least: u64) -> Result<Attempt> {
    let (lanes, changed, width) = (difference.lanes() as u64, difference.changed as u64, plan.dtype.lane_bytes());
    if changed == 0 {
        return Ok(Attempt { way, size: 0, payload: Some((Vec::new(), Encoded::default())) });
    }
    // What a way makes of the chunk, where that is known. Without tables codec `conditioned` makes no less than `raw`.
    let bound = match way.codec {
        Codec::Raw => raw_size(changed as u32, width).next_multiple_of(PAYLOAD_ALIGN),
        Codec::Conditioned if plan.tables_of(way).is_none() => raw_size(changed as u32, width).min(difference.target.len() as u64),
        // A bound below what it makes would count for a size in the tensor's sum.
        Codec::Conditioned | Codec::Zstd => 0,
    };
    if bound > least {
        return Ok(Attempt { way, size: bound, payload: None });
    }
    let mut layouts = layouts_of(way.codec, changed, lanes);
    if let Some(part) = Part::of(way.codec, difference) {
        let mut masks = Vec::new();
        let made =
            smallest(encoder, plan, way, &layouts, part.difference(plan.dtype, &mut masks), part.share(least * 5 / 4) + PART)?;
        let size = part.whole((made.payload.len() as u64).saturating_sub(PART));
        if 16 * size > 17 * least {
            return Ok(Attempt { way, size, payload: None });
        }
        // The longer the content, the more repeats are found in some layouts: of few changes, all are tried again.
        if 4 * changed > lanes {
            layouts = vec![made.layout];
        }
    }
    let made = smallest(encoder, plan, way, &layouts, difference, least * 3 / 2)?;
    Ok(Attempt { way, size: padded(&made.payload), payload: Some((made.payload, made.encoded)) })
}

/// The smallest payload of the layouts, or that of the first one if it has more than `enough` bytes: others gain little.
fn smallest(
    encoder: &mut Option<ChunkEncoder>,
    plan: &Plan,
    way: Way,
    layouts: &[Option<Layout>],
    difference: Difference<'_>,
    enough: u64,
) -> Result<Made> {
    let mut best: Option<Made> = None;
    for &layout in layouts {
        let (payload, encoded) = encode(encoder, plan, way, layout, difference)?;
        let size = payload.len();
        if best.as_ref().is_none_or(|best| size < best.payload.len()) {
            best = Some(Made { layout, payload, encoded });
        }
        if size as u64 > enough {
            break;
        }
    }
    Ok(best.unwrap_or_default())
}

/// A payload, and the layout that was asked for.
#[derive(Default)]
struct Made {
    layout: Option<Layout>,
    payload: Vec<u8>,
    encoded: Encoded,
}

/// The layouts that a codec may be tried in where so many lanes change, the first of them what suits a chunk by rule. Those that
/// say something of every lane are for many changes.
fn layouts_of(codec: Codec, changed: u64, lanes: u64) -> Vec<Option<Layout>> {
    let named: &[Layout] = match codec {
        Codec::Zstd if 8 * changed <= lanes => &[Layout::Gaps, Layout::EliasDelta, Layout::NibbleGaps],
        Codec::Zstd => Layout::ALL,
        _ => &[],
    };
    std::iter::once(None).chain(named.iter().copied().map(Some)).collect()
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
            _ => (lanes >= 2 * RUNS * RUN.start()).then(|| Self::of_lanes(difference)),
        }
    }

    /// Runs of lanes from all over a chunk, put together.
    fn of_lanes(difference: Difference<'a>) -> Self {
        let Difference { base, target, .. } = difference;
        let width = difference.dtype.lane_bytes();
        let step = difference.lanes() / RUNS;
        let run = (step / 16).next_multiple_of(*RUN.start()).clamp(*RUN.start(), *RUN.end());
        let runs = |lanes: &[u8]| {
            let runs: Vec<&[u8]> = (0..RUNS).map(|r| &lanes[(r * step + (step - run) / 2) * width..][..run * width]).collect();
            Cow::from(runs.concat())
        };
        Self { base: runs(base), target: runs(target), of: ((RUNS * run * width) as u64, target.len() as u64) }
    }

    /// The lanes around the change in the middle, with a sixteenth of the changes, or [`FEW`].
    fn of_changes(difference: Difference<'a>) -> Self {
        let Difference { masks, .. } = difference;
        let changed = difference.changed as u64;
        let wanted = FEW.max(changed / 16);
        let (mut seen, mut range) = (0, 0..masks.len());
        for (start, masks) in (0..).step_by(MASKS).zip(masks.chunks(MASKS)) {
            let before = seen;
            seen += masks.iter().map(|mask| u64::from(mask.count_ones())).sum::<u64>();
            if seen <= (changed - wanted) / 2 {
                range.start = start + masks.len();
            } else if before >= (changed + wanted) / 2 {
                range.end = start;
                break;
            }
        }
        let part = difference.part(range);
        Self { base: part.base.into(), target: part.target.into(), of: ((part.changed as u64).max(1), changed) }
    }

    /// What differs in it.
    fn difference<'b>(&'b self, dtype: Dtype, masks: &'b mut Vec<u64>) -> Difference<'b> {
        Difference::find(dtype, &self.base, &self.target, masks)
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
        let base_lanes = match (base, plan.base, plan.base_kind) {
            (Some(base), Some(place), BaseKind::Same) => base.bytes(place as usize, offset, size, &mut self.base)?,
            (base, place, _) => {
                let base_bytes = base.zip(place).map_or(0, |(base, place)| base.tensors()[place as usize].bytes());
                self.base.clear();
                self.base.resize(size, 0);
                let present = base_bytes.saturating_sub(offset).min(size as u64) as usize;
                if let (Some(base), Some(place), 1..) = (base, place, present) {
                    base.read(place as usize, offset, &mut self.base[..present])?;
                }
                &self.base
            }
        };
        Ok((base_lanes, target_lanes))
    }
}
