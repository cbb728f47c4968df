//! Chunks become tensors of a pair, in order.

use super::options::{EncodeOptions, Way};
use super::plan::Plan;
use super::ways::{Attempt, Worker};
use crate::checkpoint::Checkpoint;
use crate::codec::{Codec, Difference, TableSet};
use crate::digest;
use crate::error::Result;
use crate::format::BaseKind;
use crate::writer::PairBuilder;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Write;
use std::sync::Arc;

/// Bytes of the payloads of a tensor that are held until it is known how all of it is coded. Of a tensor with more, those decide.
pub(super) const HELD: usize = 64 << 20;

/// One chunk, encoded.
pub(super) struct Chunk {
    pub offset: u64,
    pub size: usize,
    /// What each way makes of it that its tensor may be coded in.
    pub attempts: Vec<Attempt>,
    pub base_sum: u64,
    pub target_sum: u64,
    pub base_hash: Option<[u8; 32]>,
    pub target_hash: [u8; 32],
}

/// Hands chunks, which come in order, to the builder, and with them the tensors that they belong to.
pub(super) struct Assembly<'a, W> {
    builder: PairBuilder<W>,
    most_held: usize,
    options: &'a EncodeOptions,
    plans: &'a [Plan],
    base: Option<&'a dyn Checkpoint>,
    target: &'a dyn Checkpoint,
    /// How many tensors have begun; the last of them is not ended yet.
    begun: usize,
    /// Chunks of the last tensor that the builder has not been given, and the bytes of their payloads.
    held: Vec<Chunk>,
    held_bytes: usize,
    /// Whether the builder has been given the last tensor.
    open: bool,
    base_hashes: Vec<[u8; 32]>,
    target_hashes: Vec<[u8; 32]>,
    shares: Shares,
    /// Hashes of base tensors that were hashed as a whole, which several targets may share.
    whole_bases: BTreeMap<u32, blake3::Hash>,
    worker: Worker,
}

impl<'a, W: Write> Assembly<'a, W> {
    pub fn new(
        builder: PairBuilder<W>,
        most_held: usize,
        options: &'a EncodeOptions,
        plans: &'a [Plan],
        base: Option<&'a dyn Checkpoint>,
        target: &'a dyn Checkpoint,
    ) -> Self {
        Self {
            builder,
            most_held,
            options,
            plans,
            base,
            target,
            begun: 0,
            held: Vec::new(),
            held_bytes: 0,
            open: false,
            base_hashes: Vec::new(),
            target_hashes: Vec::new(),
            shares: Shares::new(plans),
            whole_bases: BTreeMap::new(),
            worker: Worker::default(),
        }
    }

    /// Adds the next chunk, one of the tensor at `place`.
    pub fn add(&mut self, place: usize, chunk: Chunk) -> Result<()> {
        self.begin_until(place + 1)?;
        self.base_hashes.extend(chunk.base_hash);
        self.target_hashes.push(chunk.target_hash);
        self.held_bytes += chunk.attempts.iter().filter_map(|attempt| attempt.payload.as_ref()).map(|p| p.0.len()).sum::<usize>();
        self.held.push(chunk);
        if self.held_bytes > self.most_held || self.plans[place].way.get().is_some() {
            self.flush(&self.plans[place])?;
        }
        Ok(())
    }

    /// Adds the tensors that are left, which have no chunks, and returns the builder.
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

    /// Gives the builder what is held, and before it the tensor, coded in the way that makes what is held smallest.
    fn flush(&mut self, plan: &'a Plan) -> Result<()> {
        let known = plan.way.get().is_some();
        let way = *plan.way.get_or_init(|| self.smallest(plan).unwrap_or_else(|| first_way(self.options, plan)));
        if !self.open {
            // A tensor that does not change has no use for tables; of one that is not all here that is not known.
            let tables = known || self.held_bytes > self.most_held || self.held.iter().any(|chunk| changes(chunk, way));
            self.builder.begin_tensor(&plan.spec(way, tables, self.base, self.target));
            self.open = true;
        }
        for chunk in self.held.drain(..) {
            let made = chunk.attempts.into_iter().find(|attempt| attempt.way == way).and_then(|attempt| attempt.payload);
            let (payload, encoded) = match made {
                Some(made) => made,
                None => {
                    let Worker { encoders, lanes, masks } = &mut self.worker;
                    let (base, target) = lanes.read(self.base, self.target, plan, chunk.offset, chunk.size)?;
                    encoders.encode(plan, way, self.options, Difference::find(plan.dtype, base, target, masks))?
                }
            };
            let base_sum = if way.from_base { chunk.base_sum } else { 0 };
            self.builder.chunk(&payload, encoded, base_sum, chunk.target_sum)?;
        }
        self.held_bytes = 0;
        Ok(())
    }

    /// The way that makes the chunks that are held smallest, tables included; of several, the first. None if there are no chunks.
    fn smallest(&self, plan: &Plan) -> Option<Way> {
        let ways = self.held.first()?.attempts.iter().map(|attempt| attempt.way);
        let size = |i: usize, way: Way| -> u64 {
            let payloads: u64 = self.held.iter().map(|chunk| chunk.attempts.get(i).map_or(0, |attempt| attempt.size)).sum();
            payloads + self.shares.of(plan, way, payloads)
        };
        ways.enumerate().min_by_key(|&(i, way)| size(i, way)).map(|(_, way)| way)
    }

    /// Ends the last tensor that has begun, if one has.
    fn end_tensor(&mut self) -> Result<()> {
        let Some(plan) = self.begun.checked_sub(1).map(|last| &self.plans[last]) else { return Ok(()) };
        if !self.open || !self.held.is_empty() {
            self.flush(plan)?;
        }
        self.open = false;
        let from_base = plan.way.get().is_some_and(|way| way.from_base);
        let base_hash = match (plan.base_kind, self.base, plan.base) {
            (BaseKind::Same, ..) if from_base => Some(digest::combine(&self.base_hashes)),
            (BaseKind::Prefix, Some(base), Some(place)) if from_base => Some(match self.whole_bases.entry(place) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => *new.insert(crate::batches::hash_tensor(base, place as usize, &|_| {})?),
            }),
            _ => None,
        };
        self.builder.end_tensor(base_hash, digest::combine(&self.target_hashes));
        self.base_hashes.clear();
        self.target_hashes.clear();
        Ok(())
    }
}

/// About the bytes of each table set in the index, shared out among the tensors that may use it, by the address of the set.
pub(super) struct Shares(BTreeMap<usize, u64>);

impl Shares {
    pub fn new(plans: &[Plan]) -> Self {
        let mut users = BTreeMap::<usize, (u64, u64)>::new();
        for set in plans.iter().flat_map(|plan| plan.tables.iter().flatten()) {
            let (_, users) = users.entry(Arc::as_ptr(set).addr()).or_insert_with(|| (stored_bytes(set), 0));
            *users += 1;
        }
        Self(users.into_iter().map(|(set, (bytes, users))| (set, bytes / users)).collect())
    }

    /// The share of a tensor whose payloads have so many bytes in this way.
    pub fn of(&self, plan: &Plan, way: Way, payloads: u64) -> u64 {
        let tables = plan.tables_of(way).filter(|_| way.codec == Codec::Conditioned && payloads > 0);
        tables.and_then(|set| self.0.get(&Arc::as_ptr(set).addr())).copied().unwrap_or(0)
    }
}

/// About what a table set takes in the index, where repeats cost little.
fn stored_bytes(set: &TableSet) -> u64 {
    let bytes = set.to_bytes();
    bytes.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64 + 8
}

fn first_way(options: &EncodeOptions, plan: &Plan) -> Way {
    options.codec.ways(plan.base_kind != BaseKind::None)[0]
}

/// Whether a chunk has changes if it is coded in a way.
fn changes(chunk: &Chunk, way: Way) -> bool {
    chunk.attempts.iter().any(|attempt| attempt.way == way && attempt.size > 0)
}

#[cfg(test)]
mod tests {
    use crate::encode::run::encode_holding;
    use crate::writer::PairBuilder;
    use crate::{Apply, Dtype, EncodeOptions, MemoryCheckpoint, Pair, TensorInfo};

    /// Of the first chunk all lanes change to 0, of the others all small ones by 1.
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

    fn encoded(most: usize, base: &[u8], target: &[u8], threads: usize) -> Pair<Vec<u8>> {
        let of = |bytes| {
            let info = TensorInfo { name: "t".into(), dtype: Dtype::U16, shape: vec![target.len() as u64 / 2] };
            MemoryCheckpoint::new([(info, bytes)]).unwrap()
        };
        let (base, target) = (of(base), of(target));
        let options = EncodeOptions { chunk_lanes: 4096, ..EncodeOptions::default() };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let builder = PairBuilder::new(Vec::new(), "memory".into()).unwrap();
        let made = pool.install(|| encode_holding(most, Some(&base), &target, Vec::new(), &options, builder, &|_| {}));
        made.unwrap().0.into_pair().unwrap()
    }

    #[test]
    fn what_is_held_decides_for_the_rest_of_a_tensor() {
        let (base, target) = checkpoints(40);
        let of = |most, threads| encoded(most, &base, &target, threads);
        let (early, late) = (of(0, 1), of(usize::MAX, 1));
        let way = |pair: &Pair<Vec<u8>>| pair.index().tensors().next().map(|tensor| (tensor.codec, tensor.base_kind)).unwrap();
        // What makes the first chunk smallest is not what makes the others smallest.
        assert_ne!(way(&early), way(&late));
        assert!(late.blob().len() < early.blob().len());
        for pair in [&early, &late] {
            let info = TensorInfo { name: "t".into(), dtype: Dtype::U16, shape: vec![base.len() as u64 / 2] };
            let mut rebuilt = vec![0; target.len()];
            Apply::new(pair).base(&MemoryCheckpoint::new([(info, &base[..])]).unwrap()).to_buffers(&mut [&mut rebuilt]).unwrap();
            assert!(rebuilt == target);
        }
        for most in [0, 30_000, usize::MAX] {
            assert!(of(most, 1).blob() == of(most, 3).blob(), "{most}");
        }
    }
}
