//! The bytes of a pair by purpose, and the size of each tensor in every way to encode it.

use super::assembly::Shares;
use super::candidates::{Outcome, Worker};
use super::options::{Candidate, EncodeOptions, Favor};
use super::plan::{Plan, plan, plan_from};
use super::train::train;
use crate::apply::{Plan as ApplyPlan, RebuiltTarget, Request};
use crate::batches::{Pool, in_batches};
use crate::checkpoint::Checkpoint;
use crate::reader::Pair;
use crate::watch::{Watch, Watcher, progress_methods};
use serde::Serialize;
use tpde_core::codec::{Codec, Difference, PayloadParts};
use tpde_core::error::Result;
use tpde_core::format::{BLOB_HEADER_SIZE, BaseKind, MAX_CHUNK_BYTES, PAYLOAD_ALIGN};
use tpde_core::index::{IndexParts, Tensor};
use tpde_core::source::Source;

/// Explains the size of a pair.
///
/// ```
/// # use tpde::{Dtype, Encode, Explain, MemoryCheckpoint, TensorInfo};
/// # fn main() -> tpde::Result<()> {
/// # let info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![3] };
/// # let base = MemoryCheckpoint::new([(info.clone(), &[1, 2, 3, 4, 5, 6][..])])?;
/// # let target = MemoryCheckpoint::new([(info, &[1, 2, 3, 4, 5, 7][..])])?;
/// # let (pair, _) = Encode::new(&target).base(&base).to_memory()?;
/// let explained = Explain::new(&pair).base(&base).run()?;
/// assert_eq!(explained.index.total(), pair.index().size());
/// let taken = explained.tensors[0].ways.iter().find(|way| way.taken);
/// assert_eq!(taken.map(|way| way.payload_bytes), Some(explained.tensors[0].parts.total()));
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is explained before `run` is called"]
pub struct Explain<'a, B> {
    pair: &'a Pair<B>,
    base: Option<&'a dyn Checkpoint>,
    favor: Favor,
    watcher: Watcher<'a>,
}

/// The result of [`Explain::run`].
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// Size of the index in bytes, by purpose.
    pub index: IndexParts,
    /// Size of the blob's header in bytes. Payloads take the rest of the blob.
    pub blob_header: u64,
    /// Size of all payloads in bytes, by purpose.
    pub payloads: PayloadParts,
    /// The table sets of codec `conditioned`, in the order of the index.
    pub table_sets: Vec<TableSetReport>,
    /// All tensors, in ascending order of name.
    pub tensors: Vec<TensorExplanation>,
}

/// A table set of codec `conditioned`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TableSetReport {
    /// Number of the set in the pair, from 1.
    pub number: usize,
    /// Size in bytes before compression: the set itself, and 2 bytes per tensor that uses it.
    pub expanded_bytes: u64,
    /// Number of tensors that use the set.
    pub tensors: u64,
    /// Name of the first tensor that uses the set.
    pub first_tensor: String,
}

/// The sizes of a tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TensorExplanation {
    /// Size of the tensor's payloads in bytes, by purpose.
    pub parts: PayloadParts,
    /// Number of the table set that the tensor uses, from 1, if any.
    pub table_set: Option<usize>,
    /// The size of the tensor in each way to encode it. Empty if no base is set, and for an unchanged tensor.
    pub ways: Vec<WayReport>,
}

/// The size of a tensor in one way to encode it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct WayReport {
    /// The codec.
    pub codec: Codec,
    /// `true` if the tensor is encoded from its base, `false` if from zeros.
    pub from_base: bool,
    /// Whether the tensor is encoded in this way in the pair.
    pub taken: bool,
    /// Size of the payloads in bytes, including padding.
    pub payload_bytes: u64,
    /// Whether `payload_bytes` is an estimate, from a part of the lanes or from a bound. If a way is clearly larger than another,
    /// the encoder does not encode all lanes in it.
    pub estimated: bool,
    /// Estimated size, in the index, of the tables that this way needs, divided among the tensors that share them.
    pub table_bytes: u64,
}

impl WayReport {
    /// The size in bytes by which the encoder compares ways: payloads and tables.
    pub fn bytes(&self) -> u64 {
        self.payload_bytes + self.table_bytes
    }
}

impl<'a, B: Source> Explain<'a, B> {
    /// Explains the bytes of `pair`, without comparing ways to encode it.
    pub fn new(pair: &'a Pair<B>) -> Self {
        Self { pair, base: None, favor: Favor::default(), watcher: Watcher::Nobody }
    }

    /// Also compares the ways to encode each tensor. `base` is the base of the pair. For a pair without a base, pass an empty
    /// [`MemoryCheckpoint`](crate::MemoryCheckpoint).
    pub fn base(mut self, base: &'a dyn Checkpoint) -> Self {
        self.base = Some(base);
        self
    }

    /// Sets the [`Favor`] with which the compared ways are encoded. Use the one that the pair was encoded with; the pair does not
    /// store it.
    pub fn favor(mut self, favor: Favor) -> Self {
        self.favor = favor;
        self
    }

    progress_methods!("[`progress_bytes`](Self::progress_bytes)");

    /// Total number of bytes that will be reported as progress.
    pub fn progress_bytes(&self) -> u64 {
        let index = self.pair.index();
        let payloads: u64 = index.records().iter().map(|record| u64::from(record.compressed_size.get())).sum();
        let compared = index.tensors().filter(|tensor| self.base.is_some() && changes(self.pair, tensor));
        compared.fold(payloads, |sum, tensor| sum.saturating_add(tensor.bytes()))
    }

    /// Reads every payload, checks its CRC, and counts its bytes by purpose without decoding it.
    ///
    /// With a base, also rebuilds every tensor that changes, checks its CRC and sums, and encodes it again in every way of
    /// [`CodecChoice::Auto`](crate::CodecChoice::Auto), with the chunk sizes of the pair.
    ///
    /// Memory: about 200 bytes per tensor; with a base, about 600 bytes per tensor and the memory of encoding. Time: one CRC of
    /// the blob; with a base, also the time of applying and encoding.
    ///
    /// # Errors
    /// - [`Error::Invalid`](crate::Error::Invalid) with tensor and chunk if a payload is damaged.
    /// - [`Error::Io`](crate::Error::Io), and any error of the watcher.
    /// - With a base, also [`Error::WrongBase`](crate::Error::WrongBase) and
    ///   [`Error::AlreadyApplied`](crate::Error::AlreadyApplied).
    pub fn run(&self) -> Result<Explanation> {
        let index = self.pair.index();
        let mut tensors = self.parts()?;
        if let Some(base) = self.base {
            self.compare(base, &mut tensors)?;
        }
        let mut payloads = PayloadParts::default();
        let mut table_sets: Vec<TableSetReport> = Vec::new();
        for (i, tensor) in tensors.iter_mut().enumerate() {
            payloads += tensor.parts;
            let Some(set) = index.table_set(i) else { continue };
            // Sets are numbered in the order of the first tensors that use them.
            if set == table_sets.len() {
                let (owner, bytes) = (index.tensor(i).name, index.table_sets()[set].to_bytes());
                let (number, expanded_bytes) = (set + 1, bytes.len() as u64);
                table_sets.push(TableSetReport { number, expanded_bytes, tensors: 0, first_tensor: owner.to_owned() });
            }
            tensor.table_set = Some(set + 1);
            table_sets[set].tensors += 1;
            table_sets[set].expanded_bytes += 2;
        }
        Ok(Explanation { index: index.parts(), blob_header: BLOB_HEADER_SIZE.into(), payloads, table_sets, tensors })
    }

    /// For each tensor, the bytes of its payloads by purpose.
    fn parts(&self) -> Result<Vec<TensorExplanation>> {
        /// Minimum number of bytes that a payload adds to the size of a batch, because its result takes memory too.
        const MIN_BYTES: u64 = 1024;
        let index = self.pair.index();
        let mut explanations = vec![TensorExplanation::default(); index.tensor_count()];
        let records = index.records();
        let chunks = index.tensors().flat_map(|tensor| tensor.chunks().map(move |chunk| (tensor, chunk)));
        let buffers = Pool::new(Vec::new);
        in_batches(
            chunks.filter(|(_, chunk)| records[*chunk as usize].num_deltas.get() > 0),
            |(_, chunk)| u64::from(records[*chunk as usize].compressed_size.get()).max(MIN_BYTES),
            |&mut (tensor, chunk)| {
                let (record, lanes) = (&records[chunk as usize], tensor.chunk_range(chunk));
                let lanes = (lanes.end - lanes.start) as usize;
                self.watcher.done(record.compressed_size.get().into())?;
                buffers.with(|buffer| {
                    let payload = self.pair.payload(chunk, buffer).map_err(|e| e.in_tensor(tensor.name))?;
                    let parts = tensor.codec.parts(payload, record.num_deltas.get(), lanes, tensor.lane_bytes(), tensor.tables);
                    let padding = (payload.len() as u64).wrapping_neg() % PAYLOAD_ALIGN;
                    let mut parts = parts.map_err(|e| e.in_chunk(chunk).in_tensor(tensor.name))?;
                    parts.padding = padding;
                    Ok(parts)
                })
            },
            |(tensor, _), parts| {
                explanations[tensor.place].parts += parts;
                Ok(())
            },
        )?;
        Ok(explanations)
    }

    /// Adds the sizes of each candidate to the tensors that change.
    fn compare(&self, base: &dyn Checkpoint, tensors: &mut [TensorExplanation]) -> Result<()> {
        let index = self.pair.index();
        let request = Request::new(self.pair, base, &self.watcher);
        let whole = ApplyPlan::whole(request.selected(), base)?;
        let target = RebuiltTarget::new(self.pair, base, &whole);
        let options = self.options();
        let (cut, bases) = whole.bases(base);
        let is_cut = index.has_parts() || index.has_derived();
        let plan = |i| match is_cut {
            true => {
                let plan = plan_from(Some(&cut), bases[i], &target, i, &options)?;
                Ok(plan.derived_from(index.tensor(i).derived.map(Into::into)))
            }
            false => plan(Some(base), &target, i, &options),
        };
        let plans = (0..index.tensor_count()).map(plan).collect::<Result<_>>();
        let of_plans = if is_cut { &cut } else { base };
        let compared = plans.and_then(|plans| self.compare_chunks(of_plans, &target, plans, &options, tensors));
        compared.map_err(|e| request.engine(&whole).explain(e))?;
        base.check_unchanged()
    }

    fn compare_chunks(
        &self,
        base: &dyn Checkpoint,
        target: &dyn Checkpoint,
        plans: Vec<Plan>,
        options: &EncodeOptions,
        tensors: &mut [TensorExplanation],
    ) -> Result<()> {
        let index = self.pair.index();
        let workers = Pool::new(Worker::default);
        train(Some(base), target, options, &plans, &workers, &self.watcher)?;
        let changed = index.tensors().filter(|tensor| changes(self.pair, tensor));
        in_batches(
            changed.flat_map(|tensor| tensor.chunks().map(move |chunk| (tensor, chunk))),
            |(tensor, chunk)| bytes_of(tensor, *chunk).1,
            |&mut (tensor, chunk)| {
                let (offset, size) = bytes_of(&tensor, chunk);
                self.watcher.done(size)?;
                workers.with(|worker| {
                    let plan = &plans[tensor.place];
                    let Worker { encoders, lanes, masks } = worker;
                    let (base, target) = lanes.read(Some(base), target, plan, offset, size as usize)?;
                    let outcomes = encoders.try_candidates(plan, options, Difference::find(plan.dtype, base, target, masks))?;
                    let way = |outcome: Outcome| WayReport {
                        codec: outcome.candidate.codec,
                        from_base: outcome.candidate.from_base,
                        taken: false,
                        payload_bytes: outcome.size,
                        estimated: outcome.payload.is_none(),
                        table_bytes: 0,
                    };
                    Ok(outcomes.into_iter().map(way).collect::<Vec<_>>())
                })
            },
            |(tensor, _), ways| {
                let sums = &mut tensors[tensor.place].ways;
                if sums.is_empty() {
                    *sums = ways;
                } else {
                    for (sum, way) in sums.iter_mut().zip(ways) {
                        sum.payload_bytes += way.payload_bytes;
                        sum.estimated |= way.estimated;
                    }
                }
                Ok(())
            },
        )?;
        let shares = Shares::new(&plans);
        for (tensor, explanation) in index.tensors().zip(tensors) {
            for way in &mut explanation.ways {
                way.taken = way.codec == tensor.codec && way.from_base == (tensor.base_kind != BaseKind::None);
                if way.taken {
                    (way.payload_bytes, way.estimated) = (explanation.parts.total(), false);
                }
                way.table_bytes =
                    shares.of(&plans[tensor.place], Candidate { from_base: way.from_base, codec: way.codec }, way.payload_bytes);
            }
        }
        Ok(())
    }

    /// The options with which the pair was encoded, as far as they can be derived from it.
    fn options(&self) -> EncodeOptions {
        let mut options = EncodeOptions { favor: self.favor, ..EncodeOptions::default() };
        let renamed = self.pair.index().tensors().filter(|tensor| tensor.base_name != tensor.name);
        options.renamed = renamed.map(|tensor| (tensor.name.to_owned(), tensor.base_name.to_owned())).collect();
        // Skip chunks of `MAX_CHUNK_BYTES`: that limit may have reduced the option's number of lanes.
        let is_max_size = |tensor: &Tensor<'_>| tensor.chunk_lanes * tensor.lane_bytes() as u64 == MAX_CHUNK_BYTES;
        let smallest = self.pair.index().tensors().filter(|tensor| !is_max_size(tensor)).map(|tensor| tensor.chunk_lanes).min();
        options.chunk_lanes = smallest.unwrap_or(options.chunk_lanes);
        options
    }
}

/// Whether a tensor of the pair has a changed lane.
fn changes<B: Source>(pair: &Pair<B>, tensor: &Tensor<'_>) -> bool {
    let chunks = tensor.chunks();
    pair.index().records()[chunks.start as usize..chunks.end as usize].iter().any(|record| record.num_deltas.get() > 0)
}

/// Offset of a chunk in its tensor and size of the chunk, both in bytes.
fn bytes_of(tensor: &Tensor<'_>, chunk: u32) -> (u64, u64) {
    let (lanes, width) = (tensor.chunk_range(chunk), tensor.lane_bytes() as u64);
    (lanes.start * width, (lanes.end - lanes.start) * width)
}
