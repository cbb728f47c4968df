//! Chooses the candidate of each tensor for the codec profile `device`: by estimated sizes, before chunks are encoded. A device
//! makes the same estimates, so it writes the same bytes.
//!
//! 1. Tables are trained for lanes coded from the base.
//! 2. Tensors that may be smaller if they are coded from zeros train a second set of tables.
//! 3. Each tensor takes the candidate with the smallest estimate.

use super::assembly::Shares;
use super::options::EncodeOptions;
use super::plan::{Plan, low_bits};
use super::train::{Group, PIECE, Pieces, group_in, train_with};
use std::sync::OnceLock;
use tpde_core::codec::conditioned::Sample;
use tpde_core::codec::{Codec, raw_size};
use tpde_core::error::Result;
use tpde_core::format::PAYLOAD_ALIGN;

/// Number of runs of lanes from which a large tensor is estimated.
const RUNS: u64 = 8;
/// A tensor of at most this many lanes is estimated from all of its chunks.
const WHOLE: u64 = RUNS * PIECE;
/// A large tensor is estimated from all of its chunks too if at most one in `SPARSE` lanes of its runs changes. Codec `raw` may then
/// be smaller, which depends on the number of all changes.
const SPARSE: u64 = 1 << 11;

/// Lanes of a tensor whose payload is estimated.
#[derive(Clone, Copy)]
pub struct LaneRange<'a> {
    pub plan: &'a Plan,
    pub from_base: bool,
    pub first: u64,
    pub lanes: u64,
}

/// Estimated payload of a range.
#[derive(Clone, Copy)]
pub struct LaneEstimate {
    /// Number of lanes that change.
    pub changed: u32,
    /// Size of the payload of codec `conditioned` in bytes, with the tables of the plan.
    pub conditioned: u64,
}

/// Reads lanes, on the processor or on a device.
pub trait Estimator {
    /// Samples pieces of tensors: as [`train_with`] needs it.
    fn sample(&mut self, pieces: Pieces<'_, '_>, add: &mut dyn FnMut(Group, Sample)) -> Result<()>;

    /// Estimates payloads, in the order of the ranges.
    fn estimate(&mut self, ranges: &[LaneRange<'_>]) -> Result<Vec<LaneEstimate>>;
}

/// Sums over the ranges of a tensor as one candidate, or with `lanes` 0 nothing.
#[derive(Debug, Clone, Copy, Default)]
struct Estimate {
    lanes: u64,
    changed: u64,
    /// Sizes of padded payloads in bytes.
    conditioned: u64,
    raw: u64,
}

impl Estimate {
    fn add(&mut self, range: &LaneRange<'_>, result: LaneEstimate) {
        self.lanes += range.lanes;
        self.changed += u64::from(result.changed);
        self.conditioned += result.conditioned.next_multiple_of(PAYLOAD_ALIGN);
        self.raw += raw_size(result.changed, range.plan.dtype.lane_bytes()).next_multiple_of(PAYLOAD_ALIGN);
    }

    /// Estimated size of all payloads of a tensor of `lanes` lanes. `None` for a codec whose size depends on lanes outside of the
    /// ranges: payloads of codec `raw` have no bound but the number of changes, and those of codec `conditioned` are only tens of
    /// bytes larger where few lanes change.
    fn size(&self, codec: Codec, lanes: u64) -> Option<u64> {
        let scaled = |size: u64| (u128::from(size) * u128::from(lanes) / u128::from(self.lanes.max(1))) as u64;
        match codec {
            Codec::Conditioned if self.lanes > 0 => Some(scaled(self.conditioned)),
            Codec::Raw if self.lanes == lanes => Some(self.raw),
            _ => None,
        }
    }

    /// Whether the tensor may be smaller if it is coded from zeros with tables. The low bits of its lanes are then stored uncoded.
    fn may_be_above_zeros(&self, plan: &Plan) -> bool {
        let min = self.lanes * u64::from(low_bits(plan.dtype, false)) / 8;
        self.mostly_changes() && 16 * min < 17 * self.conditioned.min(self.raw)
    }

    /// Whether the ranges have all lanes of a tensor, and none changes.
    fn is_unchanged(&self, plan: &Plan) -> bool {
        self.lanes == plan.lanes && self.changed == 0
    }

    /// Whether at least one in eight lanes changes. With fewer changes, the base is always used.
    fn mostly_changes(&self) -> bool {
        self.changed > 0 && 8 * self.changed >= self.lanes
    }
}

/// Trains tables, and sets tables and choice of every plan.
pub fn choose_coding(options: &EncodeOptions, plans: &mut [Plan], estimator: &mut impl Estimator) -> Result<()> {
    let group_of_based = |_, plan: &Plan| plan.has_base().then(|| group_in(plan, true));
    train_with(options, plans, &group_of_based, |pieces, add| estimator.sample(pieces, add))?;
    let based = estimates(plans, estimator, true, |_, plan| plan.has_base())?;
    // Without tables. A tensor that is mostly zeros may be smallest as this candidate.
    let mut zeros = estimates(plans, estimator, false, |i, plan| plan.has_base() && based[i].mostly_changes())?;

    let may_use_zeros = |i: usize, plan: &Plan| !plan.has_base() || based[i].may_be_above_zeros(plan);
    let from_zeros: Vec<bool> = plans.iter().enumerate().map(|(i, plan)| may_use_zeros(i, plan)).collect();
    let group_of_zeros = |i: usize, plan: &Plan| from_zeros[i].then(|| group_in(plan, false));
    train_with(options, plans, &group_of_zeros, |pieces, add| estimator.sample(pieces, add))?;
    // A large tensor without a base has only one candidate.
    let is_tried = |i: usize, plan: &Plan| from_zeros[i] && (plan.has_base() || plan.lanes <= WHOLE);
    let with_tables = estimates(plans, estimator, false, is_tried)?;

    for (i, plan) in plans.iter_mut().enumerate() {
        if with_tables[i].lanes > 0 {
            zeros[i] = with_tables[i];
        }
        // Sets that the tensor does not use, so that the others bear the size of these sets.
        if based[i].is_unchanged(plan) || !plan.has_base() {
            plan.tables[0].take();
        }
        if zeros[i].is_unchanged(plan) || !from_zeros[i] {
            plan.tables[1].take();
        }
    }
    let shares = Shares::new(plans);
    for (i, plan) in plans.iter_mut().enumerate() {
        let candidates = options.codec.candidates(plan.has_base());
        let sizes = candidates.iter().filter_map(|&candidate| {
            let estimate = if candidate.from_base { &based[i] } else { &zeros[i] };
            let payloads = estimate.size(candidate.codec, plan.lanes)?;
            Some((candidate, payloads + shares.of(plan, candidate, payloads)))
        });
        let candidate = sizes.min_by_key(|(_, size)| *size).map_or(candidates[0], |(candidate, _)| candidate);
        plan.choice = OnceLock::from(candidate);
    }
    Ok(())
}

/// Estimates tensors as one candidate: those that `is_tried` selects by number and plan.
fn estimates(
    plans: &[Plan],
    estimator: &mut impl Estimator,
    from_base: bool,
    is_tried: impl Fn(usize, &Plan) -> bool,
) -> Result<Vec<Estimate>> {
    let sampled = estimates_of(plans, estimator, from_base, |i, plan| if is_tried(i, plan) { ranges(plan) } else { Vec::new() })?;
    let is_sparse = |i: usize, plan: &Plan| {
        let Estimate { lanes, changed, .. } = sampled[i];
        lanes > 0 && lanes < plan.lanes && SPARSE * changed <= lanes
    };
    let whole = estimates_of(plans, estimator, from_base, |i, plan| if is_sparse(i, plan) { chunks(plan) } else { Vec::new() })?;
    Ok(sampled.into_iter().zip(whole).map(|(sampled, whole)| if whole.lanes > 0 { whole } else { sampled }).collect())
}

/// Estimates tensors as one candidate, from these ranges of their lanes.
fn estimates_of(
    plans: &[Plan],
    estimator: &mut impl Estimator,
    from_base: bool,
    ranges_of: impl Fn(usize, &Plan) -> Vec<(u64, u64)>,
) -> Result<Vec<Estimate>> {
    let tried = plans.iter().enumerate().flat_map(|(i, plan)| ranges_of(i, plan).into_iter().map(move |range| (i, plan, range)));
    let (of_tensor, ranges): (Vec<usize>, Vec<LaneRange<'_>>) =
        tried.map(|(i, plan, (first, lanes))| (i, LaneRange { plan, from_base, first, lanes })).unzip();
    let mut estimates = vec![Estimate::default(); plans.len()];
    for ((i, range), result) in of_tensor.into_iter().zip(&ranges).zip(estimator.estimate(&ranges)?) {
        estimates[i].add(range, result);
    }
    Ok(estimates)
}

/// The lanes from which a tensor is estimated: the first one of each range, and their number.
fn ranges(plan: &Plan) -> Vec<(u64, u64)> {
    if plan.lanes <= WHOLE {
        return chunks(plan);
    }
    let (pieces, run) = (plan.lanes / PIECE, PIECE.min(1 << plan.chunk_lanes_log2));
    (0..RUNS).map(|k| ((2 * k + 1) * pieces / (2 * RUNS) * PIECE, run)).collect()
}

/// The chunks of a tensor, as [`ranges`].
fn chunks(plan: &Plan) -> Vec<(u64, u64)> {
    let chunk = 1 << plan.chunk_lanes_log2;
    (0..plan.lanes.div_ceil(chunk)).map(|k| (k * chunk, chunk.min(plan.lanes - k * chunk))).collect()
}
