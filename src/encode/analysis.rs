//! One pass over a chunk before it is encoded: changed lanes, sums, hashes.

use super::plan::Plan;
use tpde_core::codec::{Difference, GROUP, cleared, compare};
use tpde_core::digest::PieceHasher;
use tpde_core::lane::with_lane;
use tpde_core::sums::ChunkSum;

/// Size of a tile in bytes. Two tiles, of base and target, fit in the L2 cache.
const TILE: usize = 1 << 16;
/// If fewer than 1 in `FEW` lanes of a tile change, its target sum is computed from its base sum and the changes. One change costs
/// as much as summing about 200 BF16 lanes.
const FEW: usize = 256;

/// The properties of a chunk that encoding needs with every codec.
pub(super) struct Analysis<'a> {
    pub difference: Difference<'a>,
    pub base_sum: u64,
    pub target_sum: u64,
    /// BLAKE3 hash of the base lanes as a subtree of their tensor. `None` unless base and target tensor have the same length.
    pub base_hash: Option<[u8; 32]>,
    pub target_hash: [u8; 32],
}

impl<'a> Analysis<'a> {
    /// Analyses the chunk that begins at byte `offset` of its tensor. `masks` is overwritten.
    ///
    /// Each tile is read from memory once. Cost: one pass, mostly BLAKE3. As long as the target equals the base, only the base is
    /// hashed.
    pub fn of(plan: &Plan, base: &'a [u8], target: &'a [u8], offset: u64, masks: &'a mut Vec<u64>) -> Self {
        let dtype = plan.dtype;
        let mut hashes = Hashes::new(plan, offset);
        let (mut base_sum, mut target_sum) = (ChunkSum::default(), ChunkSum::default());
        let (mut changed, mut first_lane) = (0, 0);
        let tile_masks = cleared(dtype, base.len(), masks).chunks_mut(TILE / (GROUP * dtype.lane_bytes()));
        for ((base, target), masks) in base.chunks(TILE).zip(target.chunks(TILE)).zip(tile_masks) {
            // Hash first: hashing is the slowest step, so it hides more of the memory latency than the others.
            hashes.update(base, target);
            let tile = Difference { dtype, base, target, changed: compare(dtype, base, target, masks), masks };
            let before = base_sum.value;
            base_sum.add(base);
            if FEW * tile.changed < tile.lanes() {
                let change = with_lane!(dtype.lane_bytes(), L => tile.sum_change::<L>(first_lane));
                target_sum.add_known(target.len(), base_sum.value.wrapping_sub(before).wrapping_add(change));
            } else {
                target_sum.add(target);
            }
            changed += tile.changed;
            first_lane += tile.lanes();
        }
        let (base_hash, target_hash) = hashes.finish();
        let difference = Difference { dtype, base, target, masks, changed };
        Self { difference, base_sum: base_sum.value, target_sum: target_sum.value, base_hash, target_hash }
    }
}

/// Hashers of base and target lanes, as subtrees of their tensors.
struct Hashes {
    /// `None` if the base tensor has another length than the target. `Assembly::end_tensor` then hashes the base tensor.
    base: Option<PieceHasher>,
    /// `None` as long as the target equals the base.
    target: Option<PieceHasher>,
}

impl Hashes {
    fn new(plan: &Plan, offset: u64) -> Self {
        let hasher = PieceHasher::new(offset, plan.lanes * plan.width());
        match plan.base_kind {
            kind if kind.has_all_lanes() => Self { base: Some(hasher), target: None },
            _ => Self { base: None, target: Some(hasher) },
        }
    }

    fn update(&mut self, base: &[u8], target: &[u8]) {
        if self.target.is_none() && base != target {
            self.target = self.base.clone();
        }
        for (hasher, lanes) in [(&mut self.base, base), (&mut self.target, target)] {
            hasher.iter_mut().for_each(|hasher| hasher.update(lanes));
        }
    }

    fn finish(self) -> (Option<[u8; 32]>, [u8; 32]) {
        let base = self.base.map(PieceHasher::finish);
        (base, self.target.map(PieceHasher::finish).or(base).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::EncodeOptions;
    use super::super::plan::plan;
    use super::*;
    use crate::checkpoint::{Checkpoint, MemoryCheckpoint, TensorInfo};
    use tpde_core::digest;
    use tpde_core::lane::Dtype;
    use tpde_core::sums::chunk_sum;

    /// Targets with changes in no tile, in one tile, or in all tiles; with few or many changes.
    fn targets(base: &[u8]) -> Vec<Vec<u8>> {
        let changed = |offsets: &mut dyn Iterator<Item = usize>| {
            let mut target = base.to_vec();
            offsets.filter(|&offset| offset < base.len()).for_each(|offset| target[offset] ^= 0x41);
            target
        };
        vec![
            base.to_vec(),
            changed(&mut std::iter::once(0)),
            changed(&mut std::iter::once(base.len().saturating_sub(1))),
            changed(&mut std::iter::once(TILE)),
            changed(&mut (TILE + 5..).step_by(1000).take(50)),
            changed(&mut (0..base.len()).step_by(3)),
        ]
    }

    #[test]
    fn one_pass_gives_what_each_function_gives() {
        for (dtype, lanes) in [(Dtype::U8, 3 * TILE + 77), (Dtype::Bf16, TILE), (Dtype::F32, TILE / 4 + 1), (Dtype::F64, TILE / 2)]
        {
            let size = lanes * dtype.lane_bytes();
            let base: Vec<u8> = (0..size as u32).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 23) as u8).collect();
            for (case, target) in targets(&base).into_iter().enumerate() {
                // A base of the same length, a shorter base, no base.
                for base_lanes in [Some(lanes), Some(lanes - 1), None] {
                    let checkpoint = |bytes, lanes: usize| {
                        let info = TensorInfo { name: "t".into(), dtype, shape: vec![lanes as u64] };
                        MemoryCheckpoint::new([(info, bytes)]).unwrap()
                    };
                    let of_base = base_lanes.map(|lanes| checkpoint(&base[..lanes * dtype.lane_bytes()], lanes));
                    let of_base = of_base.as_ref().map(|base| base as &dyn Checkpoint);
                    let options = EncodeOptions::default();
                    let plan = plan(of_base, &checkpoint(&target[..], lanes), 0, &options).unwrap();
                    let mut masks = vec![u64::MAX; 9];
                    let analysis = Analysis::of(&plan, &base, &target, 0, &mut masks);
                    let mut expected = Vec::new();
                    let difference = Difference::find(dtype, &base, &target, &mut expected);
                    assert_eq!(analysis.difference.changed, difference.changed, "{dtype:?}, case {case}");
                    assert_eq!(analysis.difference.masks, difference.masks);
                    assert_eq!(
                        (analysis.base_sum, analysis.target_sum),
                        (chunk_sum(&base), chunk_sum(&target)),
                        "{dtype:?}, case {case}"
                    );
                    let hash = |lanes: &[u8]| digest::of_piece(lanes, 0, size as u64);
                    assert_eq!(analysis.target_hash, hash(&target), "{dtype:?}, case {case}");
                    assert_eq!(analysis.base_hash, (base_lanes == Some(lanes)).then(|| hash(&base)));
                }
            }
        }
    }
}
