//! Receives encoded chunks in order, chooses each tensor's candidate, and passes the tensors to the builder.

use super::candidates::{Outcome, Worker};
use super::options::{Candidate, EncodeOptions};
use super::plan::Plan;
use crate::batches::hash_piece;
use crate::checkpoint::Checkpoint;
use crate::cut::Piece;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Write;
use std::sync::{Arc, OnceLock};
use tpde_core::codec::{Codec, Difference, TableSet};
use tpde_core::digest;
use tpde_core::error::Result;
use tpde_core::format::BaseKind;
use tpde_core::writer::PairBuilder;

/// Maximum size, in bytes, of the payloads held for a tensor before its candidate is chosen.
pub(super) const MAX_HELD_BYTES: usize = 64 << 20;

/// One chunk, encoded.
pub(super) struct Chunk {
    pub offset: u64,
    pub size: usize,
    /// The outcomes of the candidates that are tried for the tensor.
    pub outcomes: Vec<Outcome>,
    pub base_sum: u64,
    pub target_sum: u64,
    pub base_hash: Option<[u8; 32]>,
    pub target_hash: [u8; 32],
}

/// Receives chunks in order and passes them to the builder, with the table entry and the digests of each tensor.
pub(super) struct Assembly<'a, W> {
    builder: PairBuilder<W>,
    max_held_bytes: usize,
    options: &'a EncodeOptions,
    plans: &'a [Plan],
    base: Option<&'a dyn Checkpoint>,
    target: &'a dyn Checkpoint,
    /// Number of tensors that have begun. All but the last have ended.
    begun: usize,
    /// Chunks of the last tensor that have not yet been passed to the builder.
    held: Vec<Chunk>,
    /// Size of their payloads in bytes.
    held_bytes: usize,
    /// Whether the last tensor's table entry has been passed to the builder.
    is_begun_in_builder: bool,
    base_hashes: Vec<[u8; 32]>,
    target_hashes: Vec<[u8; 32]>,
    shares: Shares,
    /// Cached hashes of complete base tensors, by tensor number. Several target tensors may share a base tensor.
    whole_bases: BTreeMap<u32, blake3::Hash>,
    worker: Worker,
}

impl<'a, W: Write> Assembly<'a, W> {
    pub fn new(
        builder: PairBuilder<W>,
        max_held_bytes: usize,
        options: &'a EncodeOptions,
        plans: &'a [Plan],
        base: Option<&'a dyn Checkpoint>,
        target: &'a dyn Checkpoint,
    ) -> Self {
        Self {
            builder,
            max_held_bytes,
            options,
            plans,
            base,
            target,
            begun: 0,
            held: Vec::new(),
            held_bytes: 0,
            is_begun_in_builder: false,
            base_hashes: Vec::new(),
            target_hashes: Vec::new(),
            shares: Shares::new(plans),
            whole_bases: BTreeMap::new(),
            worker: Worker::default(),
        }
    }

    /// Adds the next chunk, which belongs to tensor `tensor_index`.
    pub fn add(&mut self, tensor_index: usize, chunk: Chunk) -> Result<()> {
        self.begin_until(tensor_index + 1)?;
        self.base_hashes.extend(chunk.base_hash);
        self.target_hashes.push(chunk.target_hash);
        self.held_bytes += chunk.outcomes.iter().filter_map(|outcome| outcome.payload.as_ref()).map(|p| p.0.len()).sum::<usize>();
        self.held.push(chunk);
        if self.held_bytes > self.max_held_bytes || self.plans[tensor_index].choice.get().is_some() {
            self.flush(&self.plans[tensor_index])?;
        }
        Ok(())
    }

    /// Ends the current tensor, adds the remaining tensors, which have no chunks, and returns the builder.
    pub fn finish(mut self) -> Result<PairBuilder<W>> {
        self.begin_until(self.plans.len())?;
        self.end_tensor()?;
        Ok(self.builder)
    }

    fn begin_until(&mut self, count: usize) -> Result<()> {
        while self.begun < count {
            self.end_tensor()?;
            self.begun += 1;
        }
        Ok(())
    }

    /// Passes the held chunks to the builder, after the tensor's table entry if it is not there yet. If no candidate is chosen yet,
    /// chooses the one that makes the held chunks smallest.
    fn flush(&mut self, plan: &'a Plan) -> Result<()> {
        let known = plan.choice.get().is_some();
        let candidate =
            *plan.choice.get_or_init(|| self.smallest(plan).unwrap_or_else(|| self.options.codec.candidates(plan.has_base())[0]));
        if !self.is_begun_in_builder {
            // An unchanged tensor needs no tables. That is known only if all its chunks are held; otherwise assume a change.
            let tables = known || self.held_bytes > self.max_held_bytes || self.held.iter().any(|chunk| changes(chunk, candidate));
            self.builder.begin_tensor(&plan.spec(candidate, tables, self.base, self.target));
            self.is_begun_in_builder = true;
        }
        for chunk in self.held.drain(..) {
            let outcome = chunk.outcomes.into_iter().find(|outcome| outcome.candidate == candidate);
            let (made, digest) = outcome.map_or((None, None), |outcome| (outcome.payload, outcome.digest));
            let (payload, encoded) = match made {
                Some(made) => made,
                None => {
                    let Worker { encoders, lanes, masks } = &mut self.worker;
                    let (base, target) = lanes.read(self.base, self.target, plan, chunk.offset, chunk.size)?;
                    encoders.encode(plan, candidate, self.options, Difference::find(plan.dtype, base, target, masks))?
                }
            };
            let base_sum = if candidate.from_base { chunk.base_sum } else { 0 };
            let digest = digest.unwrap_or_else(|| digest::of_payload(&payload));
            self.builder.hashed_chunk(&payload, digest, encoded, base_sum, chunk.target_sum)?;
        }
        self.held_bytes = 0;
        Ok(())
    }

    /// The first candidate that makes the held chunks smallest, including its share of tables. `None` if there are no chunks.
    fn smallest(&self, plan: &Plan) -> Option<Candidate> {
        let candidates = self.held.first()?.outcomes.iter().map(|outcome| outcome.candidate);
        let size = |i: usize, candidate: Candidate| -> u64 {
            let payloads: u64 = self.held.iter().map(|chunk| chunk.outcomes.get(i).map_or(0, |outcome| outcome.size)).sum();
            payloads + self.shares.of(plan, candidate, payloads)
        };
        candidates.enumerate().min_by_key(|&(i, candidate)| size(i, candidate)).map(|(_, candidate)| candidate)
    }

    /// Ends the last tensor, if one has begun.
    fn end_tensor(&mut self) -> Result<()> {
        let Some(plan) = self.begun.checked_sub(1).map(|last| &self.plans[last]) else { return Ok(()) };
        if !self.is_begun_in_builder || !self.held.is_empty() {
            self.flush(plan)?;
        }
        self.is_begun_in_builder = false;
        let from_base = plan.choice.get().is_some_and(|candidate| candidate.from_base);
        let base_hash = match (plan.base_kind, self.base, plan.base) {
            (kind, ..) if from_base && kind.has_all_lanes() => Some(digest::combine(&self.base_hashes)),
            (BaseKind::Prefix, Some(base), Some(base_index)) if from_base => Some(match self.whole_bases.entry(base_index) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => *new.insert(hash_piece(base, &Piece::of(base_index as usize, None), &|_| {})?),
            }),
            _ => None,
        };
        self.builder.end_tensor(base_hash, digest::combine(&self.target_hashes));
        self.base_hashes.clear();
        self.target_hashes.clear();
        Ok(())
    }
}

/// For each table set, its estimated size in the index divided by the number of tensors that may use it. The key is the set's
/// address.
pub(super) struct Shares(BTreeMap<usize, u64>);

impl Shares {
    pub fn new(plans: &[Plan]) -> Self {
        let mut users = BTreeMap::<usize, (u64, u64)>::new();
        for set in plans.iter().flat_map(|plan| plan.tables.iter().filter_map(OnceLock::get)) {
            let (_, users) = users.entry(Arc::as_ptr(set).addr()).or_insert_with(|| (stored_bytes(set), 0));
            *users += 1;
        }
        Self(users.into_iter().map(|(set, (bytes, users))| (set, bytes / users)).collect())
    }

    /// Estimated share, in bytes, of a tensor whose payloads have `payloads` bytes as this candidate. 0 if it has no tables.
    pub fn of(&self, plan: &Plan, candidate: Candidate, payloads: u64) -> u64 {
        let tables = plan.tables_of(candidate).filter(|_| candidate.codec == Codec::Conditioned && payloads > 0);
        tables.and_then(|set| self.0.get(&Arc::as_ptr(set).addr())).copied().unwrap_or(0)
    }
}

/// Estimated size of a table set in the index, in bytes: the number of bytes that differ from the previous one, plus 8. The index
/// is compressed, and repeated bytes compress well.
fn stored_bytes(set: &TableSet) -> u64 {
    let bytes = set.to_bytes();
    bytes.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64 + 8
}

/// Whether a chunk has changed lanes if it is coded as `candidate`.
fn changes(chunk: &Chunk, candidate: Candidate) -> bool {
    chunk.outcomes.iter().any(|outcome| outcome.candidate == candidate && outcome.size > 0)
}

#[cfg(test)]
mod tests {
    use crate::encode::run::encode_holding;
    use crate::{Apply, Dtype, EncodeOptions, MemoryCheckpoint, Pair, TensorInfo};
    use tpde_core::writer::PairBuilder;

    /// Base and target. In the first chunk all lanes change to 0; in the others all lanes below 16 grow by 1.
    fn checkpoints(chunks: u32) -> (Vec<u8>, Vec<u8>) {
        let hash = |i: u32| (i.wrapping_mul(0x9E37_79B9) ^ i.wrapping_mul(0x85EB_CA6B) >> 13) >> 8;
        let base = |i| if hash(i) & 0x1000 == 0 { hash(i) as u16 & 15 } else { hash(i) as u16 | 0x8000 };
        let target = |i| match base(i) {
            _ if i < 4096 => 0,
            lane => lane + u16::from(lane < 16),
        };
        let bytes = |lane: &dyn Fn(u32) -> u16| (0..chunks << 12).flat_map(|i| lane(i).to_le_bytes()).collect();
        (bytes(&base), bytes(&target))
    }

    fn encoded(max_held_bytes: usize, base: &[u8], target: &[u8], threads: usize) -> Pair<Vec<u8>> {
        let of = |bytes| {
            let info = TensorInfo { name: "t".into(), dtype: Dtype::U16, shape: vec![target.len() as u64 / 2] };
            MemoryCheckpoint::new([(info, bytes)]).unwrap()
        };
        let (base, target) = (of(base), of(target));
        let options = EncodeOptions { chunk_lanes: 4096, ..EncodeOptions::default() };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let builder = PairBuilder::new(Vec::new(), "memory".into(), Default::default()).unwrap();
        let made = pool.install(|| encode_holding(max_held_bytes, Some(&base), &target, Vec::new(), &options, builder, &|_| {}));
        made.unwrap().0.try_into().unwrap()
    }

    #[test]
    fn what_is_held_decides_for_the_rest_of_a_tensor() {
        let (base, target) = checkpoints(40);
        let of = |max_held_bytes, threads| encoded(max_held_bytes, &base, &target, threads);
        let (early, late) = (of(0, 1), of(usize::MAX, 1));
        let coding = |pair: &Pair<Vec<u8>>| pair.index().tensors().next().map(|tensor| (tensor.codec, tensor.base_kind)).unwrap();
        // The smallest candidate of the first chunk differs from that of the other chunks.
        assert_ne!(coding(&early), coding(&late));
        assert!(late.blob().len() < early.blob().len());
        for pair in [&early, &late] {
            let info = TensorInfo { name: "t".into(), dtype: Dtype::U16, shape: vec![base.len() as u64 / 2] };
            let mut rebuilt = vec![0; target.len()];
            Apply::new(pair).base(&MemoryCheckpoint::new([(info, &base[..])]).unwrap()).to_buffers(&mut [&mut rebuilt]).unwrap();
            assert!(rebuilt == target);
        }
        for max_held_bytes in [0, 30_000, usize::MAX] {
            assert!(of(max_held_bytes, 1).blob() == of(max_held_bytes, 3).blob(), "{max_held_bytes}");
        }
    }
}
