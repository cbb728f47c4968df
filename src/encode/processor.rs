//! Samples and estimates of tensors on the processor, for the codec profile `device`.

use super::candidates::{Lanes, Worker};
use super::estimate::{Estimator, LaneEstimate, LaneRange};
use super::plan::low_bits;
use super::train::{Group, PIECE, Pieces};
use crate::batches::{Pool, in_batches};
use crate::checkpoint::Checkpoint;
use crate::watch::Progress;
use tpde_core::codec::Difference;
use tpde_core::codec::conditioned::Sample;
use tpde_core::error::Result;

/// Reads lanes of base and target on the threads of the pool.
pub(super) struct Processor<'a> {
    pub base: Option<&'a dyn Checkpoint>,
    pub target: &'a dyn Checkpoint,
    pub workers: &'a Pool<Worker>,
    pub progress: Progress<'a>,
}

impl Processor<'_> {
    /// Base and target lanes of a range. Lanes that are coded from zeros have base lanes of 0.
    fn read<'l>(&'l self, lanes: &'l mut Lanes, range: &LaneRange<'_>) -> Result<(&'l [u8], &'l [u8])> {
        let width = range.plan.width();
        let base = self.base.filter(|_| range.from_base);
        self.progress.done(0)?;
        lanes.read(base, self.target, range.plan, range.first * width, (range.lanes * width) as usize)
    }
}

impl Estimator for Processor<'_> {
    fn sample(&mut self, pieces: Pieces<'_, '_>, add: &mut dyn FnMut(Group, Sample)) -> Result<()> {
        in_batches(
            pieces,
            |(plan, ..)| PIECE * plan.width(),
            |&mut (plan, Group { from_base, .. }, k)| {
                let first = k * PIECE;
                let range = LaneRange { plan, from_base, first, lanes: PIECE.min(plan.lanes - first) };
                self.workers.with(|worker| {
                    let (base, target) = self.read(&mut worker.lanes, &range)?;
                    Ok(Sample::gather(plan.dtype, low_bits(plan.dtype, from_base), base, target))
                })
            },
            |(_, group, _), sample| {
                add(group, sample);
                Ok(())
            },
        )
    }

    fn estimate(&mut self, ranges: &[LaneRange<'_>]) -> Result<Vec<LaneEstimate>> {
        let mut results = Vec::with_capacity(ranges.len());
        in_batches(
            ranges,
            |range| range.lanes * range.plan.width(),
            |&mut range| {
                self.workers.with(|Worker { encoders, lanes, masks }| {
                    let (base, target) = self.read(lanes, range)?;
                    let difference = Difference::find(range.plan.dtype, base, target, masks);
                    let conditioned = encoders.estimate(range.plan, range.from_base, difference)?;
                    Ok(LaneEstimate { changed: difference.changed as u32, conditioned })
                })
            },
            |_, result| {
                results.push(result);
                Ok(())
            },
        )?;
        Ok(results)
    }
}
