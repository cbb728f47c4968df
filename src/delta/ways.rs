//! How the chunks of a tensor may be coded, and which way makes them smallest.
//!
//! A chunk is coded in every way that may win. What a way that is far off would make of it is estimated: nobody needs that payload.
//! All of this is a function of the chunk's lanes, so that the bytes are the same for any number of threads.

use super::options::{EncodeOptions, Way};
use super::plan::Plan;
use crate::checkpoint::Checkpoint;
use crate::codec::{ChunkEncoder, Codec, Encoded, Layout, raw_size};
use crate::error::Result;
use crate::format::{BaseKind, PAYLOAD_ALIGN};
use crate::lane::{count_changed, with_lane};
use std::ops::RangeInclusive;

/// Lanes of the runs that the part of a chunk is made of on which ways are tried first, the fewest and the most.
const RUN: RangeInclusive<usize> = 512..=4096;
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

/// Encoders of chunks from their base and from zeros: each keeps what it has made of a table set. Made when they are first wanted.
#[derive(Default)]
pub(super) struct Encoders {
    encoders: [Option<ChunkEncoder>; 2],
    zeros: Vec<u8>,
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
        let encoder = match &mut self.encoders[usize::from(!way.from_base)] {
            Some(encoder) => encoder,
            none => none.insert(ChunkEncoder::new()?),
        };
        let base = if way.from_base { base } else { zeros(&mut self.zeros, target.len()) };
        let mut payload = Vec::new();
        let encoded = encoder.encode(plan.coding(way, layout), plan.dtype, base, target, &mut payload)?;
        Ok((payload, encoded))
    }

    /// What each way makes of a chunk.
    pub fn attempts(&mut self, plan: &Plan, options: &EncodeOptions, base: &[u8], target: &[u8]) -> Result<Vec<Attempt>> {
        let ways = match plan.way.get() {
            Some(&way) => vec![way],
            None => options.codec.ways(plan.base_kind != BaseKind::None),
        };
        let mut attempts: Vec<Attempt> = Vec::with_capacity(ways.len());
        let mut least = u64::MAX;
        // Lanes that differ from the base and from zero, once they have been counted.
        let mut changed = [None, None];
        for (i, way) in ways.iter().copied().enumerate() {
            let attempt = if i == 0 {
                let (payload, encoded) = self.encode(plan, way, options.layout, base, target)?;
                changed[usize::from(!way.from_base)] = Some(u64::from(encoded.num_deltas));
                Attempt { way, size: padded(&payload), payload: Some((payload, encoded)) }
            } else if !way.from_base && ways[0].from_base && least.saturating_mul(FAR) <= target.len() as u64 {
                Attempt { way, size: target.len() as u64, payload: None }
            } else {
                let changed = match &mut changed[usize::from(!way.from_base)] {
                    Some(changed) => *changed,
                    none => {
                        let base = if way.from_base { base } else { zeros(&mut self.zeros, target.len()) };
                        *none.insert(with_lane!(plan.dtype.lane_bytes(), L => count_changed::<L>(base, target) as u64))
                    }
                };
                self.attempt(plan, way, base, target, changed, least)?
            };
            least = least.min(attempt.size);
            attempts.push(attempt);
        }
        Ok(attempts)
    }

    /// What a way makes of a chunk of which so many lanes change, where others make at least `least` bytes.
    fn attempt(&mut self, plan: &Plan, way: Way, base: &[u8], target: &[u8], changed: u64, least: u64) -> Result<Attempt> {
        let width = plan.dtype.lane_bytes();
        let lanes = target.len() / width;
        if changed == 0 {
            return Ok(Attempt { way, size: 0, payload: Some((Vec::new(), Encoded::default())) });
        }
        // What a way makes of the chunk, where that is known. Without tables codec `conditioned` makes no less than `raw`.
        let bound = match way.codec {
            Codec::Raw => raw_size(changed as u32, width).next_multiple_of(PAYLOAD_ALIGN),
            Codec::Conditioned if plan.tables_of(way).is_none() => raw_size(changed as u32, width).min(target.len() as u64),
            // A bound below what it makes would count for a size in the tensor's sum.
            Codec::Conditioned | Codec::Zstd => 0,
        };
        if bound > least {
            return Ok(Attempt { way, size: bound, payload: None });
        }
        let mut layouts = layouts_of(way.codec, changed, lanes);
        let from = if way.from_base { base } else { zeros(&mut self.zeros, target.len()) };
        if let Some(part) = Part::of(way.codec, width, from, target, changed) {
            let made = self.smallest(plan, way, &layouts, &part.base, &part.target, part.share(least * 5 / 4) + PART)?;
            let size = part.whole((made.payload.len() as u64).saturating_sub(PART));
            if 16 * size > 17 * least {
                return Ok(Attempt { way, size, payload: None });
            }
            // The longer the content, the more repeats are found in some layouts: of few changes, all are tried again.
            if 4 * changed > lanes as u64 {
                layouts = vec![made.layout];
            }
        }
        let made = self.smallest(plan, way, &layouts, base, target, least * 3 / 2)?;
        Ok(Attempt { way, size: padded(&made.payload), payload: Some((made.payload, made.encoded)) })
    }

    /// The smallest payload of the layouts, or that of the first one if it has more than `enough` bytes: others gain little.
    fn smallest(
        &mut self,
        plan: &Plan,
        way: Way,
        layouts: &[Option<Layout>],
        base: &[u8],
        target: &[u8],
        enough: u64,
    ) -> Result<Made> {
        let mut best: Option<Made> = None;
        for &layout in layouts {
            let (payload, encoded) = self.encode(plan, way, layout, base, target)?;
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
fn layouts_of(codec: Codec, changed: u64, lanes: usize) -> Vec<Option<Layout>> {
    let named: &[Layout] = match codec {
        Codec::Zstd if 8 * changed <= lanes as u64 => &[Layout::Gaps, Layout::EliasDelta, Layout::NibbleGaps],
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
struct Part {
    base: Vec<u8>,
    target: Vec<u8>,
    /// How much of how much it is.
    of: (u64, u64),
}

impl Part {
    /// The part on which a codec is tried first; none if the whole takes it little time. `changed` lanes of the chunk change.
    fn of(codec: Codec, width: usize, base: &[u8], target: &[u8], changed: u64) -> Option<Self> {
        let lanes = (target.len() / width) as u64;
        match codec {
            Codec::Raw => None,
            // The time of codec `zstd` goes with the changes where these are few.
            Codec::Zstd if 4 * changed <= lanes => (changed > 2 * FEW).then(|| Self::of_changes(width, base, target, changed)),
            _ => (lanes >= (2 * RUNS * RUN.start()) as u64).then(|| Self::of_lanes(width, base, target)),
        }
    }

    /// Runs of lanes from all over a chunk, put together.
    fn of_lanes(width: usize, base: &[u8], target: &[u8]) -> Self {
        let step = target.len() / width / RUNS;
        let run = (step / 16).next_multiple_of(*RUN.start()).clamp(*RUN.start(), *RUN.end());
        let runs = |lanes: &[u8]| {
            let runs: Vec<&[u8]> = (0..RUNS).map(|r| &lanes[(r * step + (step - run) / 2) * width..][..run * width]).collect();
            runs.concat()
        };
        Self { base: runs(base), target: runs(target), of: ((RUNS * run * width) as u64, target.len() as u64) }
    }

    /// The lanes around the change in the middle, with a sixteenth of the changes, or [`FEW`].
    fn of_changes(width: usize, base: &[u8], target: &[u8], changed: u64) -> Self {
        let run = RUN.start() * width;
        let wanted = FEW.max(changed / 16);
        let (mut seen, mut range) = (0, 0..target.len());
        for (start, (base, target)) in (0..).step_by(run).zip(base.chunks(run).zip(target.chunks(run))) {
            let here = with_lane!(width, L => count_changed::<L>(base, target) as u64);
            let before = seen;
            seen += here;
            if seen <= (changed - wanted) / 2 {
                range.start = start + run;
            } else if before >= (changed + wanted) / 2 {
                range.end = start;
                break;
            }
        }
        let (base, target) = (base[range.clone()].to_vec(), target[range].to_vec());
        let of = with_lane!(width, L => count_changed::<L>(&base, &target) as u64);
        Self { base, target, of: (of.max(1), changed) }
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
