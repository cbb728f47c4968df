//! Encoding: two checkpoints in, a pair out.

use super::choose::{Lanes, choose};
use super::{Pool, Progress, in_batches};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::codec::{ChunkEncoder, Codec, Coding, Encoded, Layout, Pace, TableSet};
use crate::digest;
use crate::error::{Error, Escaped, Result};
use crate::format::{BaseKind, FileEntry, MAX_CHUNK_BYTES, MAX_CHUNKS, MAX_FILES, MAX_TENSORS, MIN_CHUNK_LANES_LOG2, TensorEntry};
use crate::index::{self, FileNames};
use crate::lane::Dtype;
use crate::limits::Limits;
use crate::publish::{Publication, check_apart};
use crate::reader::{Pair, PairPaths, check_pair_name};
use crate::sums::chunk_sum;
use crate::writer::{FileSpec, Finished, PairBuilder, TensorSpec};
use serde::Serialize;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What an encoder may choose.
#[derive(Debug, Clone)]
pub struct EncodeOptions {
    /// Codec of all tensors; without it each gets the one that makes it smallest, `conditioned` if nothing else does.
    pub codec: Option<Codec>,
    /// Layout of codec `zstd`; without it each chunk gets what suits it.
    pub layout: Option<Layout>,
    /// Most lanes of a chunk, a power of two of at least 4,096; bounded further by 4 MiB. Smaller chunks decode in more
    /// parallel pieces and cost more: 48 bytes each in the index.
    pub chunk_lanes: u64,
    /// What to favor where codec `conditioned` has the choice.
    pub favor: Favor,
    /// Base tensors of targets that were renamed: target name to base name.
    pub renamed: BTreeMap<String, String>,
    /// Files besides the checkpoints that the caller has read for this encoding. No file of the pair may replace one of them.
    pub inputs: Vec<PathBuf>,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self { codec: None, layout: None, chunk_lanes: 1 << 20, favor: Favor::Ratio, renamed: BTreeMap::new(), inputs: Vec::new() }
    }
}

/// What an encoder favors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Favor {
    /// Small pairs.
    #[default]
    Ratio,
    /// Fast decoding, above all on a device: where few lanes change, fewer of them are coded, and changes of others are listed one
    /// by one. Pairs grow by some percent, or to twice their size where all lanes change alike seldom.
    Speed,
}

impl Favor {
    /// All of them.
    pub const ALL: &[Self] = &[Self::Ratio, Self::Speed];

    /// The name that users know.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ratio => "ratio",
            Self::Speed => "speed",
        }
    }

    /// For chunks of at most so many lanes: who wants small ones wants them to be decoded soon.
    fn pace(self, chunk_lanes: u64) -> Pace {
        match self {
            Self::Ratio if chunk_lanes >= EncodeOptions::default().chunk_lanes => Pace::default(),
            Self::Ratio => Pace { steps: 512, ..Pace::default() },
            Self::Speed => Pace { lane: 256, steps: 512 },
        }
    }
}

/// What encoding did.
#[derive(Debug, Clone, Serialize)]
pub struct EncodeReport {
    /// Bytes of all target tensors.
    pub target_bytes: u64,
    /// Bytes of the index file.
    pub index_bytes: u64,
    /// Bytes of the blob file.
    pub blob_bytes: u64,
    /// Bytes of the index that tell of tensors: table, names, shapes, digests.
    pub tensor_table_bytes: u64,
    /// Every tensor, names ascending.
    pub tensors: Vec<TensorReport>,
    /// Base tensors that no target tensor uses.
    pub removed: Vec<String>,
}

/// What a pair says of a tensor, in figures.
#[derive(Debug, Clone, Serialize)]
pub struct TensorReport {
    /// Name in the target.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dims.
    pub shape: Vec<u64>,
    /// Where its base lanes come from.
    pub base_kind: BaseKind,
    /// Codec of its payloads.
    pub codec: Codec,
    /// Number of chunks.
    pub chunks: u32,
    /// Lanes, changed or not.
    pub lanes: u64,
    /// Lanes that differ from the base's.
    pub changed: u64,
    /// Bytes of the target tensor.
    pub bytes: u64,
    /// Bytes of its payloads, padded.
    pub payload_bytes: u64,
}

impl TensorReport {
    /// The figures of one tensor of a pair. Cost: one pass over its records.
    pub fn new(index: &crate::index::ValidatedIndex, tensor: &crate::index::Tensor<'_>) -> Self {
        let chunks = tensor.chunks();
        let records = &index.chunks()[chunks.start as usize..chunks.end as usize];
        Self {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            base_kind: tensor.base_kind,
            codec: tensor.codec,
            chunks: tensor.chunk_count,
            lanes: tensor.lanes,
            changed: records.iter().map(|r| u64::from(r.num_deltas.get())).sum(),
            bytes: tensor.bytes(),
            payload_bytes: records
                .iter()
                .map(|r| u64::from(r.compressed_size.get()).next_multiple_of(crate::format::PAYLOAD_ALIGN))
                .sum(),
        }
    }
}

/// One target tensor with its base. Small: a model may have very many.
pub(super) struct Plan {
    /// Places in the checkpoints.
    pub target: u32,
    pub base: Option<u32>,
    pub base_kind: BaseKind,
    pub dtype: Dtype,
    pub chunk_lanes_log2: u8,
    pub pace: Pace,
    pub lanes: u64,
    pub codec: Codec,
    /// Of codec `conditioned`.
    pub tables: Option<Arc<TableSet>>,
}

impl Plan {
    pub fn width(&self) -> u64 {
        self.dtype.lane_bytes() as u64
    }

    /// Bits of each delta that codec `conditioned` stores as they are: the mantissa and the sign of floats without a base.
    pub fn low_bits(&self) -> u32 {
        if self.base_kind == BaseKind::None { self.dtype.mantissa_bits().map_or(0, |bits| bits + 1) } else { 0 }
    }

    /// How `codec` is to code a chunk of this tensor.
    pub fn coding(&self, codec: Codec, layout: Option<Layout>) -> Coding<'_> {
        match codec {
            Codec::Raw => Coding::Raw,
            Codec::Zstd => Coding::Zstd(layout),
            Codec::Conditioned => {
                Coding::Conditioned { tables: self.tables.as_deref(), low_bits: self.low_bits(), pace: self.pace }
            }
        }
    }

    /// Name of the base tensor, where it is not the target's.
    fn base_name<'a>(&self, base: Option<&'a dyn Checkpoint>, target: &dyn Checkpoint) -> Option<&'a str> {
        let name = base.zip(self.base).map(|(base, place)| base.tensors()[place as usize].name.as_str());
        name.filter(|name| *name != target.tensors()[self.target as usize].name)
    }

    fn spec(&self, base: Option<&dyn Checkpoint>, target: &dyn Checkpoint) -> TensorSpec {
        let TensorInfo { name, dtype, shape } = target.tensors()[self.target as usize].clone();
        let base = base.zip(self.base).map(|(base, place)| &base.tensors()[place as usize]);
        let base_param = match (self.base_kind, base) {
            (BaseKind::Prefix, Some(base)) => base.shape[0],
            _ => 0,
        };
        let base_name = base.map(|base| base.name.clone());
        TensorSpec {
            name,
            base_name,
            dtype,
            shape,
            base_kind: self.base_kind,
            base_param,
            codec: self.codec,
            tables: self.tables.clone(),
            chunk_lanes_log2: self.chunk_lanes_log2,
        }
    }
}

/// One chunk to encode.
struct Job<'a> {
    plan: &'a Plan,
    offset: u64,
    size: usize,
}

struct Chunk {
    payload: Vec<u8>,
    encoded: Encoded,
    base_sum: u64,
    target_sum: u64,
    base_hash: Option<[u8; 32]>,
    target_hash: [u8; 32],
}

/// What a thread needs to encode chunks.
#[derive(Default)]
pub(super) struct Worker {
    encoder: Option<ChunkEncoder>,
    pub lanes: Lanes,
}

impl Worker {
    /// The encoder, made when it is first wanted, and the buffers.
    pub fn parts(&mut self) -> Result<(&mut ChunkEncoder, &mut Lanes)> {
        let encoder = match &mut self.encoder {
            Some(encoder) => encoder,
            none => none.insert(ChunkEncoder::new()?),
        };
        Ok((encoder, &mut self.lanes))
    }
}

/// Encodes the difference of `target` from `base` (`None`: from zeros) into `builder`.
///
/// `files` describe the files that readers shall rebuild. Bytes are the same for any number of threads; memory is bounded by
/// the threads and one batch of payloads, whatever the size of the checkpoints.
///
/// # Errors
/// [`Error::Io`] from the checkpoints or the blob, [`Error::Changed`] if a checkpoint has changed since it was opened,
/// [`Error::Misuse`] for options that make no sense, and what `progress` ends the work with. Before any lane is read:
/// [`Error::Invalid`] for a name or a shape that the format cannot hold, naming the tensor or the file, and [`Error::Limit`] for
/// more than it holds.
pub fn encode<W: Write>(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    files: Vec<FileSpec>,
    options: &EncodeOptions,
    builder: PairBuilder<W>,
    progress: Progress<'_>,
) -> Result<(Finished<W>, EncodeReport)> {
    check_options(base, target, options)?;
    let mut plans: Vec<Plan> = (0..target.tensors().len()).map(|i| plan(base, target, i, options)).collect::<Result<_>>()?;
    check_holdable(base, target, &plans, &files)?;
    let workers = Pool::new(Worker::default);
    choose(base, target, options, &mut plans, &workers, progress)?;
    let mut assembly = Assembly {
        builder,
        plans: &plans,
        base,
        target,
        begun: 0,
        base_hashes: Vec::new(),
        target_hashes: Vec::new(),
        whole_bases: BTreeMap::new(),
    };
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
    let report = report(&finished, base, &plans);
    Ok((finished, report))
}

/// [`encode`] into memory.
///
/// # Errors
/// As [`encode`].
pub fn encode_to_memory(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    options: &EncodeOptions,
) -> Result<(Pair<Vec<u8>>, EncodeReport)> {
    let builder = PairBuilder::new(Vec::new(), "memory".into())?;
    let (finished, report) = encode(base, target, Vec::new(), options, builder, &|_| {})?;
    Ok((finished.into_pair()?, report))
}

/// [`encode`] into the files of the pair `path`, published together: first the blob, then the index, whose rename is the commit.
///
/// # Errors
/// As [`encode`]; [`Error::Misuse`] if a file of the pair is, or is inside, a file or folder of the checkpoints, or is
/// one of [`EncodeOptions::inputs`]; [`Error::Io`] if the pair exists and `replace` is false, or another process holds a lock on
/// the folder for 30 seconds. An error before the first rename leaves the old pair as it was, and everything but the renames comes before. If the system
/// refuses the second rename, the old index stands beside the new blob, and readers refuse the two.
pub fn encode_to_path(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    files: Vec<FileSpec>,
    options: &EncodeOptions,
    path: &Path,
    replace: bool,
    progress: Progress<'_>,
) -> Result<EncodeReport> {
    check_pair_name(path)?;
    let paths = PairPaths::new(path);
    let checkpoints = base.iter().flat_map(|base| base.paths()).chain(target.paths());
    let inputs: Vec<_> = checkpoints.chain(options.inputs.iter().cloned()).collect();
    check_apart(&[paths.index.clone(), paths.blob.clone()], &inputs)?;
    let mut publication = Publication::files(&paths.index, replace);
    let blob = BufWriter::with_capacity(1 << 20, publication.add(&paths.blob)?);
    let mut index = publication.add(&paths.index)?;
    let builder = PairBuilder::new(blob, paths.blob.clone())?;
    let (mut finished, report) = encode(base, target, files, options, builder, progress)?;
    let blob = &mut finished.blob;
    let written = blob.seek(SeekFrom::Start(0)).and_then(|_| blob.write_all(&finished.blob_header)).and_then(|()| blob.flush());
    written.map_err(|e| Error::io("write", &paths.blob, e))?;
    index.write_all(finished.index.as_bytes()).map_err(|e| Error::io("write", &paths.index, e))?;
    publication.commit(progress)?;
    Ok(report)
}

fn check_options(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, options: &EncodeOptions) -> Result<()> {
    if !options.chunk_lanes.is_power_of_two() || options.chunk_lanes < 1 << MIN_CHUNK_LANES_LOG2 {
        return Err(Error::Misuse(format!("{} lanes a chunk: not a power of two of at least 4096", options.chunk_lanes)));
    }
    if options.layout.is_some() && options.codec != Some(Codec::Zstd) {
        return Err(Error::Misuse("layouts are for codec zstd".into()));
    }
    for (name, base_name) in &options.renamed {
        if target.find(name).is_none() {
            return Err(Error::Misuse(format!("the target has no tensor {} to rename", Escaped(name))));
        }
        if base.is_none_or(|base| base.find(base_name).is_none()) {
            return Err(Error::Misuse(format!("the base has no tensor {} for {}", Escaped(base_name), Escaped(name))));
        }
    }
    Ok(())
}

/// Refuses what the format cannot hold, before there is work to lose.
fn check_holdable(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, plans: &[Plan], files: &[FileSpec]) -> Result<()> {
    let most = Limits::default().section_size;
    let bounded = |what, limit, found| if found > limit { Err(Error::Limit { what, limit, found }) } else { Ok(()) };
    let mut chunks = 0u64;
    for plan in plans {
        let info = &target.tensors()[plan.target as usize];
        index::check_holdable(&info.name, plan.base_name(base, target), info.shape.len())?;
        chunks = chunks.saturating_add(plan.lanes.div_ceil(1 << plan.chunk_lanes_log2));
    }
    bounded("number of tensors", MAX_TENSORS.into(), plans.len() as u64)?;
    bounded("number of chunks", MAX_CHUNKS.into(), chunks)?;
    bounded("size of the tensor table", most, tensor_table_bytes(base, target, plans))?;
    let mut names = FileNames::default();
    for file in files {
        names.add(file.name.as_bytes(), file.kind, files.len())?;
    }
    bounded("number of files", MAX_FILES.into(), files.len() as u64)?;
    bounded("size of the file table", most, file_table_bytes(files))
}

/// Bytes of the expanded section of tensors that these plans lead to.
fn tensor_table_bytes(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, plans: &[Plan]) -> u64 {
    let entry = |plan: &Plan| {
        let info = &target.tensors()[plan.target as usize];
        let names = info.name.len() + plan.base_name(base, target).map_or(0, str::len);
        (TensorEntry::SIZE + 8 * info.shape.len() + names) as u64
    };
    plans.iter().map(entry).sum()
}

/// Bytes of the expanded section of files.
fn file_table_bytes(files: &[FileSpec]) -> u64 {
    files.iter().map(|file| (FileEntry::SIZE + file.name.len() + file.content.len()) as u64).sum()
}

fn plan(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, place: usize, options: &EncodeOptions) -> Result<Plan> {
    let TensorInfo { name, dtype, shape } = &target.tensors()[place];
    let impossible = || Error::Misuse(format!("tensor {} has an impossible shape {shape:?}", Escaped(name)));
    let lanes = dtype.lanes(shape).ok_or_else(impossible)?;
    let base_name = options.renamed.get(name).unwrap_or(name);
    let found = base.and_then(|base| base.find(base_name).map(|i| (i as u32, &base.tensors()[i])));
    let (base, base_kind) = match found {
        Some((i, base)) if base.dtype == *dtype && base.shape == *shape => (Some(i), BaseKind::Same),
        Some((i, base)) if base.dtype == *dtype && is_prefix(&base.shape, shape) => (Some(i), BaseKind::Prefix),
        // Another dtype or other trailing dims: the base says nothing that this version can use.
        _ => (None, BaseKind::None),
    };
    let chunk_lanes_log2 = options.chunk_lanes.min(MAX_CHUNK_BYTES / dtype.lane_bytes() as u64).ilog2() as u8;
    let codec = options.codec.unwrap_or(Codec::Conditioned);
    Ok(Plan {
        target: place as u32,
        base,
        base_kind,
        dtype: *dtype,
        chunk_lanes_log2,
        pace: options.favor.pace(options.chunk_lanes),
        lanes,
        codec,
        tables: None,
    })
}

/// Whether the shapes differ in the number of rows alone.
fn is_prefix(base: &[u64], target: &[u64]) -> bool {
    matches!((base, target), ([b, base @ ..], [t, target @ ..]) if b != t && base == target)
}

fn encode_chunk(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    job: &Job<'_>,
    options: &EncodeOptions,
    worker: &mut Worker,
) -> Result<Chunk> {
    let Job { plan, offset, size } = *job;
    let (encoder, lanes) = worker.parts()?;
    let (base_lanes, target_lanes) = lanes.read(base, target, plan, offset, size)?;
    let target_bytes = plan.lanes * plan.width();
    let mut payload = Vec::new();
    let encoded = encoder.encode(plan.coding(plan.codec, options.layout), plan.dtype, base_lanes, target_lanes, &mut payload)?;
    let base_sum = chunk_sum(base_lanes);
    let base_hash = (plan.base_kind == BaseKind::Same).then(|| digest::of_piece(base_lanes, offset, target_bytes));
    // An unchanged chunk has its base's sum and, in a tensor of the same length, its base's hash.
    let changed = encoded.num_deltas > 0;
    let target_sum = if changed { chunk_sum(target_lanes) } else { base_sum };
    let target_hash = base_hash.filter(|_| !changed).unwrap_or_else(|| digest::of_piece(target_lanes, offset, target_bytes));
    Ok(Chunk { payload, encoded, base_sum, target_sum, base_hash, target_hash })
}

/// Hands chunks, which come in order, to the builder, and with them the tensors that they belong to.
struct Assembly<'a, W> {
    builder: PairBuilder<W>,
    plans: &'a [Plan],
    base: Option<&'a dyn Checkpoint>,
    target: &'a dyn Checkpoint,
    /// How many tensors have begun; the last of them is not ended yet.
    begun: usize,
    base_hashes: Vec<[u8; 32]>,
    target_hashes: Vec<[u8; 32]>,
    /// Hashes of base tensors that were hashed as a whole, which several targets may share.
    whole_bases: BTreeMap<u32, blake3::Hash>,
}

impl<W: Write> Assembly<'_, W> {
    /// Adds the next chunk, one of the tensor at `place`.
    fn add(&mut self, place: usize, chunk: Chunk) -> Result<()> {
        self.begin_until(place + 1)?;
        self.base_hashes.extend(chunk.base_hash);
        self.target_hashes.push(chunk.target_hash);
        self.builder.chunk(&chunk.payload, chunk.encoded, chunk.base_sum, chunk.target_sum)
    }

    /// Adds the tensors that are left, which have no chunks, and returns the builder.
    fn finish(mut self) -> Result<PairBuilder<W>> {
        self.begin_until(self.plans.len())?;
        self.end_tensor()?;
        Ok(self.builder)
    }

    fn begin_until(&mut self, count: usize) -> Result<()> {
        while self.begun < count {
            self.end_tensor()?;
            self.builder.begin_tensor(&self.plans[self.begun].spec(self.base, self.target));
            self.begun += 1;
        }
        Ok(())
    }

    /// Ends the last tensor that has begun, if one has.
    fn end_tensor(&mut self) -> Result<()> {
        let Some(plan) = self.begun.checked_sub(1).map(|last| &self.plans[last]) else { return Ok(()) };
        let base_hash = match (plan.base_kind, self.base, plan.base) {
            (BaseKind::Same, ..) => Some(digest::combine(&self.base_hashes)),
            (BaseKind::Prefix, Some(base), Some(place)) => Some(match self.whole_bases.entry(place) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => *new.insert(super::apply::hash_tensor(base, place as usize, &|_| {})?),
            }),
            _ => None,
        };
        self.builder.end_tensor(base_hash, digest::combine(&self.target_hashes));
        self.base_hashes.clear();
        self.target_hashes.clear();
        Ok(())
    }
}

fn report<W>(finished: &Finished<W>, base: Option<&dyn Checkpoint>, plans: &[Plan]) -> EncodeReport {
    use crate::format::Section;
    let index = &finished.index;
    let tensors: Vec<_> = index.tensors().map(|tensor| TensorReport::new(index, &tensor)).collect();
    let mut used = vec![false; base.map_or(0, |base| base.tensors().len())];
    plans.iter().filter_map(|plan| plan.base).for_each(|place| used[place as usize] = true);
    let base_tensors = base.map_or(&[][..], |base| base.tensors());
    EncodeReport {
        target_bytes: tensors.iter().map(|t| t.bytes).sum(),
        index_bytes: index.size(),
        blob_bytes: index.header().blob_size,
        tensor_table_bytes: index.header().section(Section::Tensors).stored_size
            + index.header().section(Section::Digests).stored_size,
        tensors,
        removed: base_tensors.iter().zip(used).filter(|(_, used)| !used).map(|(info, _)| info.name.clone()).collect(),
    }
}

#[cfg(test)]
mod tests;
