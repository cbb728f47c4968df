//! What an encoder decides before it encodes: tables for codec `conditioned`, and the codec of each tensor.
//!
//! Both come from samples, in fixed places, so that the same checkpoints give the same pair and little is read twice.

use super::encode::{EncodeOptions, Plan, Worker};
use super::{Pool, Progress, in_batches};
use crate::checkpoint::Checkpoint;
use crate::codec::{Codec, conditioned};
use crate::error::Result;
use crate::format::{BaseKind, PAYLOAD_ALIGN};
use crate::lane::Dtype;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Lanes of a piece that a sample is made of.
const PIECE: u64 = 1 << 14;
/// About how many pieces tables are made from: a tenth of the checkpoint, but enough, and no more than 8 million lanes.
const PIECES: std::ops::RangeInclusive<u64> = 128..=512;
/// Most lanes of a tensor that is encoded whole with every codec, and lanes that are of a larger one.
const TRIAL: (u64, u64) = (1 << 14, 1 << 12);

/// More than what payloads of codec `conditioned` begin with: header, maps and states.
const PREFIX: u64 = 192;

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

/// Gives every plan its codec, and its tables.
pub(super) fn choose(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    options: &EncodeOptions,
    plans: &mut [Plan],
    workers: &Pool<Worker>,
    progress: Progress<'_>,
) -> Result<()> {
    if options.codec.is_some_and(|codec| codec != Codec::Conditioned) {
        return Ok(());
    }
    train(base, target, plans, workers, progress)?;
    if options.codec.is_some() {
        return Ok(());
    }
    let mut codecs = Vec::with_capacity(plans.len());
    in_batches(
        0..plans.len(),
        |_| TRIAL.0,
        |i| {
            progress.done(0)?;
            workers.with(|worker| try_codecs(base, target, &plans[*i], worker))
        },
        |_, codec| {
            codecs.push(codec);
            Ok(())
        },
    )?;
    for (plan, codec) in plans.iter_mut().zip(codecs) {
        plan.codec = codec;
        if codec != Codec::Conditioned {
            plan.tables = None;
        }
    }
    Ok(())
}

/// Of how many of `all` pieces one is looked at.
fn stride(all: u64) -> u64 {
    all.div_ceil((all / 10).clamp(*PIECES.start(), *PIECES.end())).max(1)
}

/// Makes table sets, one for all tensors of a dtype with a base, and one for those without.
fn train(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    plans: &mut [Plan],
    workers: &Pool<Worker>,
    progress: Progress<'_>,
) -> Result<()> {
    let pieces = |plan: &Plan| plan.lanes.div_ceil(PIECE);
    let all = plans.iter().map(pieces).sum::<u64>();
    let stride = stride(all);
    let group = |plan: &Plan| (plan.dtype, plan.base_kind != BaseKind::None);
    let mut trainers = BTreeMap::<(Dtype, bool), (u32, conditioned::Trainer)>::new();
    let places = plans.iter().flat_map(|plan| (0..pieces(plan)).map(move |k| (plan, k)));
    in_batches(
        places.step_by(stride as usize),
        |(plan, _)| PIECE * plan.width(),
        |&mut (plan, k)| {
            progress.done(0)?;
            workers.with(|worker| {
                let lanes = PIECE.min(plan.lanes - k * PIECE) * plan.width();
                let (base, target) = worker.lanes.read(base, target, plan, k * PIECE * plan.width(), lanes as usize)?;
                Ok(conditioned::Sample::gather(plan.dtype, plan.low_bits(), base, target))
            })
        },
        |(plan, _), sample| {
            let (low_bits, trainer) = trainers.entry(group(plan)).or_default();
            *low_bits = plan.low_bits();
            trainer.add(&sample);
            Ok(())
        },
    )?;
    let sets: BTreeMap<_, _> = trainers
        .into_iter()
        .map(|(group, (low_bits, trainer))| {
            let bits = 8 * group.0.lane_bytes() as u32 - low_bits;
            (group, trainer.finish(bits, low_bits != 0).map(Arc::new))
        })
        .collect();
    for plan in plans {
        plan.tables = sets.get(&group(plan)).cloned().flatten();
    }
    Ok(())
}

/// The codec that makes a small tensor smallest, or a part of a large one clearly smaller; else `conditioned`. In a part, what
/// every payload begins with counts for more than it will in the tensor.
fn try_codecs(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, plan: &Plan, worker: &mut Worker) -> Result<Codec> {
    let (lanes, margin) = if plan.lanes <= TRIAL.0 { (plan.lanes, 0) } else { (TRIAL.1, PREFIX) };
    // From the middle: the first rows of an embedding are no sample of it.
    let offset = (plan.lanes - lanes) / 2 / TRIAL.1 * TRIAL.1 * plan.width();
    let (encoder, buffers) = worker.parts()?;
    let (base, target) = buffers.read(base, target, plan, offset, (lanes * plan.width()) as usize)?;
    let mut payload = Vec::new();
    let mut stored = |codec| -> Result<u64> {
        payload.clear();
        encoder.encode(plan.coding(codec, None), plan.dtype, base, target, &mut payload)?;
        Ok((payload.len() as u64).next_multiple_of(PAYLOAD_ALIGN))
    };
    let mut best = (stored(Codec::Conditioned)?, Codec::Conditioned);
    if best.0 == 0 {
        return Ok(best.1);
    }
    for codec in [Codec::Zstd, Codec::Raw] {
        let size = stored(codec)? + margin;
        if size < best.0 {
            best = (size, codec);
        }
    }
    Ok(best.1)
}

#[cfg(test)]
mod tests {
    use super::stride;

    #[test]
    fn tables_are_made_from_a_tenth_of_the_pieces_if_these_are_neither_few_nor_many() {
        let strides = [(0, 1), (1, 1), (128, 1), (129, 2), (1280, 10), (2560, 10), (5120, 10), (5121, 11), (51200, 100)];
        for (all, expected) in strides {
            assert_eq!(stride(all), expected, "{all} pieces");
        }
    }
}
