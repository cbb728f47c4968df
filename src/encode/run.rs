//! Encodes the difference of two checkpoints as a pair.

use super::analysis::Analysis;
use super::assembly::{Assembly, Chunk, MAX_HELD_BYTES};
use super::bases::{UnusedBase, has_base};
use super::candidates::{Outcome, Worker};
use super::cuts::{Selection, unused_bases};
use super::estimate::choose_coding;
use super::options::{CodecChoice, EncodeOptions};
use super::plan::{Plan, check_holdable};
use super::processor::Processor;
use super::train::train;
use crate::batches::{Pool, in_batches};
use crate::checkpoint::{Checkpoint, Region};
use crate::watch::Progress;
use serde::Serialize;
use std::io::Write;
use tpde_core::codec::Codec;
use tpde_core::derived::BaseForm;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::{BaseKind, FormatVersion, MIN_CHUNK_LANES_LOG2};
use tpde_core::lane::Dtype;
use tpde_core::writer::{FileSpec, Finished, PairBuilder};

/// The result of an encoding: sizes in total and per tensor.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct EncodeReport {
    /// Size of all target tensors in bytes.
    pub target_bytes: u64,
    /// Size of the index file in bytes.
    pub index_bytes: u64,
    /// Size of the blob file in bytes.
    pub blob_bytes: u64,
    /// Size, in the index, of the tensor table (with names and shapes) and the digests, in bytes.
    pub tensor_table_bytes: u64,
    /// All tensors, in ascending order of name.
    pub tensors: Vec<TensorReport>,
    /// Names of the base tensors that no target tensor uses.
    pub removed: Vec<String>,
    /// Names of the target tensors for which the base has no tensor. Empty without a base.
    pub added: Vec<String>,
    /// Base tensors that were found for target tensors, and are not used, or not as they were meant.
    pub unused: Vec<UnusedBase>,
}

/// Sizes and counts of one tensor of a pair.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct TensorReport {
    /// Name in the target.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions of the tensor, or extents of the part.
    pub shape: Vec<u64>,
    /// For a part of a tensor, its place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<PartReport>,
    /// Source of the base lanes.
    pub base_kind: BaseKind,
    /// Dtype of the base tensor, if it differs from `dtype`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_dtype: Option<Dtype>,
    /// Form of a quantised base.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_form: Option<BaseForm>,
    /// Codec of the payloads.
    pub codec: Codec,
    /// Number of chunks.
    pub chunks: u32,
    /// Number of lanes.
    pub lanes: u64,
    /// Number of lanes that differ from the base lanes.
    pub changed: u64,
    /// Size of the target tensor in bytes.
    pub bytes: u64,
    /// Size of the payloads in bytes, including padding.
    pub payload_bytes: u64,
}

/// The place of a part in its tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PartReport {
    /// Shape of the tensor.
    pub whole: Vec<u64>,
    /// First index of the part in each dimension.
    pub origin: Vec<u64>,
}

impl TensorReport {
    /// The report of a tensor, from its records in the index. Cost: one pass over them.
    pub fn new(index: &tpde_core::index::ValidatedIndex, tensor: &tpde_core::index::Tensor<'_>) -> Self {
        let chunks = tensor.chunks();
        let records = &index.records()[chunks.start as usize..chunks.end as usize];
        Self {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            part: tensor.part.map(|part| PartReport { whole: part.whole.to_vec(), origin: part.origin.to_vec() }),
            base_kind: tensor.base_kind,
            base_dtype: tensor.derived.map(|derived| derived.base_dtype),
            base_form: tensor.derived.and_then(|derived| Some(derived.scales?.0)),
            codec: tensor.codec,
            chunks: tensor.chunk_count,
            lanes: tensor.lanes,
            changed: records.iter().map(|r| u64::from(r.num_deltas.get())).sum(),
            bytes: tensor.bytes(),
            payload_bytes: records
                .iter()
                .map(|r| u64::from(r.compressed_size.get()).next_multiple_of(tpde_core::format::PAYLOAD_ALIGN))
                .sum(),
        }
    }
}

/// One chunk to encode.
struct Job<'a> {
    plan: &'a Plan,
    offset: u64,
    size: usize,
}

/// Encodes the difference of `target` from `base` into `builder`. Without a base, the difference is from zeros.
///
/// `files` describes the files that readers rebuild. Errors: those of [`Encode::to_path`](crate::Encode::to_path), except those
/// about paths.
pub fn encode<W: Write>(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    files: Vec<FileSpec>,
    options: &EncodeOptions,
    builder: PairBuilder<W>,
    progress: Progress<'_>,
) -> Result<(Finished<W>, EncodeReport)> {
    encode_holding(MAX_HELD_BYTES, base, target, files, options, builder, progress)
}

/// Size in bytes of the tensors and parts of tensors that [`encode`] encodes.
pub fn encoded_bytes(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, options: &EncodeOptions) -> Result<u64> {
    let selection = Selection::new(base, target, options)?;
    Ok(selection.target().tensors().iter().fold(0, |sum, tensor| u64::saturating_add(sum, tensor.bytes())))
}

/// [`encode`] with a parameter for tests: a tensor's coding is chosen once over `max_held_bytes` bytes of payloads are held.
pub(super) fn encode_holding<W: Write>(
    max_held_bytes: usize,
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    files: Vec<FileSpec>,
    options: &EncodeOptions,
    builder: PairBuilder<W>,
    progress: Progress<'_>,
) -> Result<(Finished<W>, EncodeReport)> {
    check_options(base, target, options)?;
    let selection = Selection::new(base, target, options)?;
    let files = if selection.is_complete() { files } else { Vec::new() };
    let (whole_base, whole_target) = (base, target);
    let (base, target) = (selection.base(), selection.target());
    let mut plans = selection.plans(options)?;
    check_holdable(base, target, &plans, &files)?;
    let workers = Pool::new(Worker::default);
    match options.codec {
        CodecChoice::Device => choose_coding(options, &mut plans, &mut Processor { base, target, workers: &workers, progress })?,
        _ => train(base, target, options, &plans, &workers, progress)?,
    }
    let mut assembly = Assembly::new(builder, max_held_bytes, options, &plans, base, target);
    let jobs = plans.iter().enumerate().flat_map(|(i, plan)| {
        let chunk = plan.width() << plan.chunk_lanes_log2;
        let bytes = plan.lanes * plan.width();
        (0..bytes.div_ceil(chunk)).map(move |k| (i, Job { plan, offset: k * chunk, size: chunk.min(bytes - k * chunk) as usize }))
    });
    in_batches(
        jobs,
        |(_, job)| job.size as u64,
        |(_, job)| {
            let chunk = workers.with(|worker| encode_chunk(base, target, job, options, worker));
            progress.done(job.size as u64)?;
            chunk
        },
        |(i, _), chunk| assembly.add(i, chunk),
    )?;
    let mut builder = assembly.finish()?;
    for file in files {
        builder.file(file);
    }
    let finished = builder.finish()?;
    target.check_unchanged()?;
    base.map_or(Ok(()), |base| base.check_unchanged())?;
    // The digest of a derived base is that of the converted lanes.
    let derived = plans.iter().filter(|plan| plan.derived.is_some() && plan.choice.get().is_some_and(|choice| choice.from_base));
    let converted_from = derived.filter_map(|plan| plan.base).flat_map(|i| selection.base_regions(i as usize));
    check_digests(&finished, whole_base, whole_target, converted_from)?;
    let bases = plans.iter().filter_map(|plan| plan.base).flat_map(|i| selection.base_tensors(i as usize));
    let report = report(&finished, whole_base, whole_target, options, bases);
    Ok((finished, report))
}

/// Lets base and target compare the digests of the tensors that were read. `converted_from` are base tensors, or rectangles of
/// them, from which lanes were converted.
fn check_digests<W>(
    finished: &Finished<W>,
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    converted_from: impl Iterator<Item = Region>,
) -> Result<()> {
    let entries = || finished.index.tensors();
    target.check_digests(&mut entries().filter_map(|tensor| {
        Some((Region { tensor: target.find(tensor.name)?, runs: tensor.layout() }, Some(tensor.target_digest())))
    }))?;
    let Some(base) = base else { return Ok(()) };
    let copied = entries().filter(|tensor| tensor.base_kind != BaseKind::None && tensor.derived.is_none());
    let copied = copied.filter_map(|tensor| {
        Some((Region { tensor: base.find(tensor.base_name)?, runs: tensor.layout() }, Some(tensor.base_digest())))
    });
    base.check_digests(&mut copied.chain(converted_from.map(|region| (region, None))))
}

/// Checks what options ask for, before data is read.
pub fn check_options(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, options: &EncodeOptions) -> Result<()> {
    if !options.chunk_lanes.is_power_of_two() || options.chunk_lanes < 1 << MIN_CHUNK_LANES_LOG2 {
        return Err(Error::InvalidArgument(format!(
            "{} lanes per chunk: expected a power of two of at least 4096",
            options.chunk_lanes
        )));
    }
    if options.layout.is_some() && options.codec != CodecChoice::Only(Codec::Zstd) {
        return Err(Error::InvalidArgument("a layout requires codec zstd".into()));
    }
    if options.payload_digests && options.format == FormatVersion::V1_1 {
        return Err(Error::InvalidArgument("payload digests need format 1.2".into()));
    }
    for (name, base_name) in &options.renamed {
        if target.find(name).is_none() {
            return Err(Error::InvalidArgument(format!("the target has no tensor {} to rename", Escaped(name))));
        }
        if base.is_none_or(|base| !has_base(base, base_name)) {
            return Err(Error::InvalidArgument(format!("the base has no tensor {} for {}", Escaped(base_name), Escaped(name))));
        }
    }
    Ok(())
}

fn encode_chunk(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    job: &Job<'_>,
    options: &EncodeOptions,
    worker: &mut Worker,
) -> Result<Chunk> {
    let Job { plan, offset, size } = *job;
    let Worker { encoders, lanes, masks } = worker;
    let (base_lanes, target_lanes) = lanes.read(base, target, plan, offset, size)?;
    let Analysis { difference, base_sum, target_sum, base_hash, target_hash } =
        Analysis::of(plan, base_lanes, target_lanes, offset, masks);
    let mut outcomes = encoders.try_candidates(plan, options, difference)?;
    if options.format >= FormatVersion::V1_2 {
        outcomes.iter_mut().for_each(Outcome::hash);
    }
    Ok(Chunk { offset, size, outcomes, base_sum, target_sum, base_hash, target_hash })
}

/// `in_use` gives the numbers of the base tensors that the target uses.
pub fn report<W>(
    finished: &Finished<W>,
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    options: &EncodeOptions,
    in_use: impl Iterator<Item = usize>,
) -> EncodeReport {
    use tpde_core::format::Section;
    let index = &finished.index;
    let tensors: Vec<_> = index.tensors().map(|tensor| TensorReport::new(index, &tensor)).collect();
    let mut used = vec![false; base.map_or(0, |base| base.tensors().len())];
    in_use.for_each(|base_index| used[base_index] = true);
    let base_tensors = base.map_or(&[][..], |base| base.tensors());
    let unused = base.map_or_else(Vec::new, |base| unused_bases(base, target, options, index));
    let is_added = |name: &str| base.is_some_and(|base| !has_base(base, options.base_name(name)));
    EncodeReport {
        target_bytes: tensors.iter().map(|t| t.bytes).sum(),
        index_bytes: index.size(),
        blob_bytes: index.header().blob_size,
        tensor_table_bytes: index.header().section(Section::Tensors).stored_size
            + index.header().section(Section::Digests).stored_size,
        tensors,
        removed: base_tensors.iter().zip(used).filter(|(_, used)| !used).map(|(info, _)| info.name.clone()).collect(),
        added: target.tensors().iter().map(|info| &info.name).filter(|name| is_added(name)).cloned().collect(),
        unused,
    }
}
