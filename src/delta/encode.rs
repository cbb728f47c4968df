//! Encoding: two checkpoints in, a pair out.

use super::{Pool, Progress, in_batches};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::codec::{ChunkEncoder, Codec, Encoded, Layout};
use crate::digest;
use crate::error::{Error, Escaped, Result};
use crate::format::{BaseKind, MAX_CHUNK_BYTES, MIN_CHUNK_LANES_LOG2};
use crate::publish::Publication;
use crate::reader::{Pair, PairPaths};
use crate::sums::chunk_sum;
use crate::writer::{FileSpec, Finished, PairBuilder, TensorSpec};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

/// What an encoder may choose.
#[derive(Debug, Clone)]
pub struct EncodeOptions {
    /// Codec of all tensors.
    pub codec: Codec,
    /// Layout of codec `zstd`; without it each chunk gets what suits it.
    pub layout: Option<Layout>,
    /// Most lanes of a chunk, a power of two of at least 4,096; bounded further by 4 MiB. Smaller chunks decode in more
    /// parallel pieces and cost more: 48 bytes each in the index.
    pub chunk_lanes: u64,
    /// Base tensors of targets that were renamed: target name to base name.
    pub renamed: BTreeMap<String, String>,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self { codec: Codec::Zstd, layout: None, chunk_lanes: 1 << 20, renamed: BTreeMap::new() }
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
    pub dtype: crate::lane::Dtype,
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

/// One target tensor with its base.
struct Plan {
    spec: TensorSpec,
    target: usize,
    base: Option<usize>,
    lanes: u64,
}

impl Plan {
    fn width(&self) -> u64 {
        self.spec.dtype.lane_bytes() as u64
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

#[derive(Default)]
struct Worker {
    encoder: Option<ChunkEncoder>,
    base: Vec<u8>,
    target: Vec<u8>,
}

/// Encodes the difference of `target` from `base` (`None`: from zeros) into `builder`.
///
/// `files` describe the files that readers shall rebuild. Bytes are the same for any number of threads; memory is bounded by
/// the threads and one batch of payloads, whatever the size of the checkpoints.
///
/// # Errors
/// [`Error::Io`] from the checkpoints or the blob, [`Error::Misuse`] for options that make no sense, and
/// [`Error::Limit`] for more than the format holds.
pub fn encode<W: Write>(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    files: Vec<FileSpec>,
    options: &EncodeOptions,
    mut builder: PairBuilder<W>,
    progress: Progress<'_>,
) -> Result<(Finished<W>, EncodeReport)> {
    check_options(base, target, options)?;
    let plans: Vec<Plan> = (0..target.tensors().len()).map(|i| plan(base, target, i, options)).collect::<Result<_>>()?;
    let workers = Pool::new(Worker::default);
    let mut open = 0; // plans whose tensor has begun
    let (mut base_hashes, mut target_hashes) = (Vec::new(), Vec::new());
    // Ends tensor `open - 1` and begins others until `until` have begun, those without chunks included.
    let mut advance = |builder: &mut PairBuilder<W>,
                       base_hashes: &mut Vec<_>,
                       target_hashes: &mut Vec<_>,
                       until: usize,
                       last: bool|
     -> Result<()> {
        while open < until || (last && open == until) {
            if open > 0 {
                end_tensor(builder, &plans[open - 1], base, base_hashes, target_hashes)?;
            }
            if open == plans.len() {
                break;
            }
            builder.begin_tensor(&plans[open].spec);
            open += 1;
        }
        Ok(())
    };
    let jobs = plans.iter().enumerate().flat_map(|(i, plan)| {
        let chunk = plan.width() << plan.spec.chunk_lanes_log2;
        let bytes = plan.lanes * plan.width();
        (0..bytes.div_ceil(chunk)).map(move |k| (i, Job { plan, offset: k * chunk, size: chunk.min(bytes - k * chunk) as usize }))
    });
    in_batches(
        jobs,
        |(_, job)| job.size as u64,
        |(_, job)| {
            let chunk = workers.with(|worker| encode_chunk(base, target, job, options, worker));
            progress(job.size as u64);
            chunk
        },
        |(i, _), chunk| {
            advance(&mut builder, &mut base_hashes, &mut target_hashes, i + 1, false)?;
            base_hashes.extend(chunk.base_hash);
            target_hashes.push(chunk.target_hash);
            builder.chunk(&chunk.payload, chunk.encoded, chunk.base_sum, chunk.target_sum)
        },
    )?;
    advance(&mut builder, &mut base_hashes, &mut target_hashes, plans.len(), true)?;
    for file in files {
        builder.file(file);
    }
    let finished = builder.finish()?;
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
/// As [`encode`]; on any error no file of the pair is changed. [`Error::Io`] if the pair exists and `replace` is false.
pub fn encode_to_path(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    files: Vec<FileSpec>,
    options: &EncodeOptions,
    path: &Path,
    replace: bool,
    progress: Progress<'_>,
) -> Result<EncodeReport> {
    let paths = PairPaths::new(path);
    let mut publication = Publication::new(&paths.index, replace);
    let blob = BufWriter::with_capacity(1 << 20, publication.add(&paths.blob)?);
    let mut index = publication.add(&paths.index)?;
    let builder = PairBuilder::new(blob, paths.blob.clone())?;
    let (mut finished, report) = encode(base, target, files, options, builder, progress)?;
    let blob = &mut finished.blob;
    let written = blob.seek(SeekFrom::Start(0)).and_then(|_| blob.write_all(&finished.blob_header)).and_then(|()| blob.flush());
    written.map_err(|e| Error::io("write", &paths.blob, e))?;
    index.write_all(finished.index.as_bytes()).map_err(|e| Error::io("write", &paths.index, e))?;
    publication.commit()?;
    Ok(report)
}

fn check_options(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, options: &EncodeOptions) -> Result<()> {
    if !options.chunk_lanes.is_power_of_two() || options.chunk_lanes < 1 << MIN_CHUNK_LANES_LOG2 {
        return Err(Error::Misuse(format!("{} lanes a chunk: not a power of two of at least 4096", options.chunk_lanes)));
    }
    if options.layout.is_some() && options.codec != Codec::Zstd {
        return Err(Error::Misuse(format!("codec {} has no layouts", options.codec)));
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

fn plan(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, place: usize, options: &EncodeOptions) -> Result<Plan> {
    let info = &target.tensors()[place];
    let TensorInfo { name, dtype, shape } = info.clone();
    let lanes =
        dtype.lanes(&shape).ok_or_else(|| Error::Misuse(format!("tensor {} has an impossible shape {shape:?}", Escaped(&name))))?;
    let base_name = options.renamed.get(&name);
    let found = base.and_then(|base| base.find(base_name.unwrap_or(&name)).map(|i| (i, &base.tensors()[i])));
    let (base, base_kind, base_param) = match found {
        Some((i, base)) if base.dtype == dtype && base.shape == shape => (Some(i), BaseKind::Same, 0),
        Some((i, base)) if base.dtype == dtype && is_prefix(&base.shape, &shape) => (Some(i), BaseKind::Prefix, base.shape[0]),
        // Another dtype or other trailing dims: the base says nothing that this version can use.
        _ => (None, BaseKind::None, 0),
    };
    let width = dtype.lane_bytes() as u64;
    let chunk_lanes_log2 = options.chunk_lanes.min(MAX_CHUNK_BYTES / width).ilog2() as u8;
    let base_name = base_name.filter(|_| base.is_some()).cloned();
    let spec = TensorSpec { name, base_name, dtype, shape, base_kind, base_param, codec: options.codec, chunk_lanes_log2 };
    Ok(Plan { spec, target: place, base, lanes })
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
    let Worker { encoder, base: base_buffer, target: target_buffer } = worker;
    let encoder = match encoder {
        Some(encoder) => encoder,
        None => encoder.insert(ChunkEncoder::new(options.codec, options.layout)?),
    };
    let target_bytes = plan.lanes * plan.width();
    let target_lanes = target.bytes(plan.target, offset, size, target_buffer)?;
    let base_lanes = match (base, plan.base, plan.spec.base_kind) {
        (Some(base), Some(place), BaseKind::Same) => base.bytes(place, offset, size, base_buffer)?,
        (base, place, _) => {
            let base_bytes = base.zip(place).map_or(0, |(base, place)| base.tensors()[place].bytes());
            base_buffer.clear();
            base_buffer.resize(size, 0);
            let present = base_bytes.saturating_sub(offset).min(size as u64) as usize;
            if let (Some(base), Some(place), 1..) = (base, place, present) {
                base.read(place, offset, &mut base_buffer[..present])?;
            }
            base_buffer
        }
    };
    let mut payload = Vec::new();
    let encoded = encoder.encode(plan.spec.dtype, base_lanes, target_lanes, &mut payload)?;
    let base_sum = chunk_sum(base_lanes);
    let base_hash = (plan.spec.base_kind == BaseKind::Same).then(|| digest::of_piece(base_lanes, offset, target_bytes));
    // An unchanged chunk has its base's sum and, in a tensor of the same length, its base's hash.
    let changed = encoded.num_deltas > 0;
    let target_sum = if changed { chunk_sum(target_lanes) } else { base_sum };
    let target_hash = base_hash.filter(|_| !changed).unwrap_or_else(|| digest::of_piece(target_lanes, offset, target_bytes));
    Ok(Chunk { payload, encoded, base_sum, target_sum, base_hash, target_hash })
}

fn end_tensor<W: Write>(
    builder: &mut PairBuilder<W>,
    plan: &Plan,
    base: Option<&dyn Checkpoint>,
    base_hashes: &mut Vec<[u8; 32]>,
    target_hashes: &mut Vec<[u8; 32]>,
) -> Result<()> {
    let base_hash = match (plan.spec.base_kind, base, plan.base) {
        (BaseKind::Same, ..) => Some(digest::combine(base_hashes)),
        (BaseKind::Prefix, Some(base), Some(place)) => Some(super::apply::hash_tensor(base, place)?),
        _ => None,
    };
    builder.end_tensor(base_hash, digest::combine(target_hashes));
    base_hashes.clear();
    target_hashes.clear();
    Ok(())
}

fn report<W>(finished: &Finished<W>, base: Option<&dyn Checkpoint>, plans: &[Plan]) -> EncodeReport {
    use crate::format::Section;
    let index = &finished.index;
    let tensors: Vec<_> = index.tensors().map(|tensor| TensorReport::new(index, &tensor)).collect();
    let mut used = vec![false; base.map_or(0, |base| base.tensors().len())];
    plans.iter().filter_map(|plan| plan.base).for_each(|place| used[place] = true);
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
