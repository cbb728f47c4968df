//! Trains the tables of codec `conditioned` on samples of the tensors. The sampled positions are fixed, so the same checkpoints
//! give the same pair. Samples are read twice: here, and when they are encoded.

use super::candidates::Worker;
use super::options::{CodecChoice, EncodeOptions, Favor};
use super::plan::{Plan, low_bits};
use crate::batches::{Pool, in_batches};
use crate::checkpoint::Checkpoint;
use crate::watch::Progress;
use std::collections::BTreeMap;
use std::sync::Arc;
use tpde_core::codec::conditioned;
use tpde_core::derived::BaseForm;
use tpde_core::error::Result;
use tpde_core::lane::Dtype;

/// Number of lanes per piece. A piece is the unit of sampling.
pub const PIECE: u64 = 1 << 14;
/// Range for the number of pieces that the first round samples per group. Within it, the number is a tenth of the group's pieces.
const PIECES: std::ops::RangeInclusive<u64> = 128..=512;
/// Later rounds sample a group until its samples have this many changes, or until all its pieces are sampled.
const CHANGES: u64 = 1 << 11;

/// The tensors that share tables.
///
/// Lanes of a derived base lack low bits, or have few values, so their changes differ from those of other bases.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    pub dtype: Dtype,
    /// `true` if the lanes are coded from a base, `false` if from zeros.
    pub from_base: bool,
    /// Dtype and form of a derived base.
    pub derived: Option<(Dtype, Option<BaseForm>)>,
}

/// The samples of a group.
#[derive(Default)]
struct GroupSamples {
    trainer: conditioned::Trainer,
    /// Number of pieces of the group's tensors.
    pieces: u64,
    /// The first round samples one piece out of every `stride` pieces.
    stride: u64,
    /// Number of changes in the sampled pieces.
    changes: u64,
}

/// The stride for a group of `all` pieces.
fn stride(all: u64, favor: Favor) -> u64 {
    match favor {
        Favor::Size => 1,
        _ => all.div_ceil((all / 10).clamp(*PIECES.start(), *PIECES.end())).max(1),
    }
}

pub fn group(plan: &Plan) -> Group {
    group_in(plan, plan.has_base())
}

/// The group of a tensor whose lanes are coded from the base, or from zeros.
pub(crate) fn group_in(plan: &Plan, from_base: bool) -> Group {
    let derived = plan.derived.as_ref().filter(|_| from_base);
    let derived = derived.map(|derived| (derived.base_dtype, derived.scales.as_ref().map(|(form, _)| *form)));
    Group { dtype: plan.dtype, from_base, derived }
}

/// Sets the tables of every plan. For each dtype there is one set for lanes coded from a base, and one for lanes coded from zeros.
/// All tensors of the dtype share them.
pub(super) fn train(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    options: &EncodeOptions,
    plans: &[Plan],
    workers: &Pool<Worker>,
    progress: Progress<'_>,
) -> Result<()> {
    train_with(options, plans, &|_, plan| Some(group(plan)), |pieces, add| {
        in_batches(
            pieces,
            |(plan, ..)| PIECE * plan.width(),
            |&mut (plan, _, k)| {
                progress.done(0)?;
                workers.with(|worker| sample(base, target, options, plan, k, worker))
            },
            |(plan, ..), (from_base, from_zeros)| {
                for (from_base, sample) in [(true, from_base), (false, from_zeros)] {
                    if let Some(sample) = sample {
                        add(group_in(plan, from_base), sample);
                    }
                }
                Ok(())
            },
        )
    })
}

/// Pieces to sample: a plan, its group, and the number of the piece in its tensor.
pub type Pieces<'a, 'p> = &'a mut dyn Iterator<Item = (&'p Plan, Group, u64)>;

/// `train`, for any way to sample pieces, and for the tensors to which `group_of` gives a group. `sample` is called once per round, and passes the
/// samples to its second argument, in any order.
pub fn train_with(
    options: &EncodeOptions,
    plans: &[Plan],
    group_of: &dyn Fn(usize, &Plan) -> Option<Group>,
    mut sample: impl for<'a, 'p> FnMut(Pieces<'a, 'p>, &mut dyn FnMut(Group, conditioned::Sample)) -> Result<()>,
) -> Result<()> {
    if !options.codec.has_tables() {
        return Ok(());
    }
    let pieces = |plan: &Plan| plan.lanes.div_ceil(PIECE);
    let mut groups = BTreeMap::<Group, GroupSamples>::new();
    for (i, plan) in plans.iter().enumerate() {
        if let Some(group) = group_of(i, plan) {
            groups.entry(group).or_default().pieces += pieces(plan);
        }
    }
    for sampled in groups.values_mut() {
        sampled.stride = stride(sampled.pieces, options.favor);
    }
    let max_stride = groups.values().map(|sampled| sampled.stride).max().unwrap_or(0);
    // The first round samples one piece out of every stride. Each later round doubles the number of sampled pieces of the groups
    // that have too few changes.
    let mut round = 0..1;
    while round.start < max_stride {
        let is_sampled = |sampled: &GroupSamples| round.start == 0 || (round.start < sampled.stride && sampled.changes < CHANGES);
        let strides: BTreeMap<Group, u64> =
            groups.iter().filter(|(_, sampled)| is_sampled(sampled)).map(|(group, sampled)| (*group, sampled.stride)).collect();
        let mut numbers = BTreeMap::<Group, u64>::new();
        let sampled = plans.iter().enumerate().filter_map(|(i, plan)| group_of(i, plan).map(|group| (plan, group)));
        let sampled = sampled.filter_map(|(plan, group)| Some((plan, group, *strides.get(&group)?)));
        let mut pieces_of_round = sampled.flat_map(|(plan, group, stride)| {
            let number = numbers.entry(group).or_default();
            let (first, end) = (*number, *number + pieces(plan));
            *number = end;
            let turns = round.start..round.end.min(stride);
            // Numbers of the pieces that are sampled of a stride. The sampling order begins at a different piece in each stride.
            let of_stride = move |s: u64| {
                let offset = conditioned::sample_offset(s, stride);
                turns.clone().map(move |turn| s * stride + (turn + stride - offset) % stride)
            };
            let numbers = (first / stride..end.div_ceil(stride)).flat_map(of_stride);
            numbers.filter(move |n| (first..end).contains(n)).map(move |n| (plan, group, n - first))
        });
        sample(&mut pieces_of_round, &mut |group, sample| {
            let sampled = groups.entry(group).or_default();
            sampled.changes += sample.changed();
            sampled.trainer.add(sample);
        })?;
        round = round.end..(2 * round.end).max(1);
    }
    let sets: BTreeMap<_, _> = groups
        .into_iter()
        .map(|(group, sampled)| {
            let Group { dtype, from_base, .. } = group;
            let low_bits = low_bits(dtype, from_base);
            let bits = 8 * dtype.lane_bytes() as u32 - low_bits;
            let seen_all = sampled.stride == 1 || (from_base && sampled.changes < CHANGES);
            (group, sampled.trainer.finish(bits, low_bits != 0, seen_all).map(Arc::new))
        })
        .collect();
    for plan in plans {
        for (i, from_base) in [true, false].into_iter().enumerate() {
            if let Some(Some(set)) = sets.get(&group_in(plan, from_base)) {
                plan.tables[i].get_or_init(|| set.clone());
            }
        }
    }
    Ok(())
}

/// The samples of a piece: coded from the base if the tensor has one, and coded from zeros if that may be smaller.
fn sample(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    options: &EncodeOptions,
    plan: &Plan,
    piece: u64,
    worker: &mut Worker,
) -> Result<(Option<conditioned::Sample>, Option<conditioned::Sample>)> {
    let lanes = PIECE.min(plan.lanes - piece * PIECE);
    let (base, target) = worker.lanes.read(base, target, plan, piece * PIECE * plan.width(), (lanes * plan.width()) as usize)?;
    let of = |from_base, base: &[u8]| conditioned::Sample::gather(plan.dtype, low_bits(plan.dtype, from_base), base, target);
    if !plan.has_base() {
        return Ok((None, Some(of(false, base))));
    }
    let from_base = of(true, base);
    let may_be_smaller = |cost: u64| 16 * cost < 17 * from_base.cost();
    let min_cost = lanes * u64::from(low_bits(plan.dtype, false)) * conditioned::BIT;
    let try_zeros = !matches!(options.codec, CodecChoice::Only(_)) && 8 * from_base.changed() >= lanes && may_be_smaller(min_cost);
    let from_zeros = try_zeros.then(|| of(false, &vec![0; target.len()])).filter(|sample| may_be_smaller(sample.cost()));
    Ok((Some(from_base), from_zeros))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_made_from_a_tenth_of_the_pieces_if_these_are_neither_few_nor_many() {
        let strides = [(0, 1), (1, 1), (128, 1), (129, 2), (1280, 10), (2560, 10), (5120, 10), (5121, 11), (51200, 100)];
        for (all, expected) in strides {
            assert_eq!(stride(all, Favor::Ratio), expected, "{all} pieces");
            assert_eq!(stride(all, Favor::Size), 1, "{all} pieces");
        }
    }
}
