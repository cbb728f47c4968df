//! Encoding: the builder, and the work from two checkpoints to a pair.

use super::assembly::{Assembly, Chunk, HELD};
use super::options::{CodecChoice, EncodeOptions};
use super::plan::{Plan, check_holdable, plan};
use super::survey::Survey;
use super::train::train;
use super::ways::Worker;
use super::{Pool, in_batches};
use crate::checkpoint::Checkpoint;
use crate::codec::Codec;
use crate::error::{Error, Escaped, Result};
use crate::format::{BaseKind, MIN_CHUNK_LANES_LOG2};
use crate::lane::Dtype;
use crate::publish::{Publication, check_apart};
use crate::reader::{Pair, PairPaths, check_pair_name};
use crate::safetensors::{SafetensorsCheckpoint, check_composable};
use crate::watch::{Progress, Watch, Watcher};
use crate::writer::{FileSpec, Finished, PairBuilder};
use serde::Serialize;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Encodes a target checkpoint as a pair, as its difference from a base.
///
/// ```
/// # use tpde::{Dtype, Encode, MemoryCheckpoint, TensorInfo};
/// # fn main() -> tpde::Result<()> {
/// # let folder = tempfile::tempdir().expect("a temporary folder");
/// # let path = folder.path().join("update");
/// let info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![3] };
/// let base = MemoryCheckpoint::new([(info.clone(), &[1, 2, 3, 4, 5, 6][..])])?;
/// let target = MemoryCheckpoint::new([(info, &[1, 2, 3, 4, 5, 7][..])])?;
/// let report = Encode::new(&target).base(&base).to_path(&path)?;
/// assert_eq!(report.tensors[0].changed, 1);
/// # Ok(())
/// # }
/// ```
///
/// The bytes of a pair depend on base, target, options and the version of zstd, not on threads, time or machine. Memory is bounded
/// by the number of threads, one batch of payloads and 64 MiB of the payloads of one tensor, whatever the size of the checkpoints.
#[must_use = "nothing is encoded before `to_path` or `to_memory` is called"]
pub struct Encode<'a> {
    target: &'a dyn Checkpoint,
    base: Option<&'a dyn Checkpoint>,
    options: EncodeOptions,
    inputs: Vec<PathBuf>,
    overwrite: bool,
    watcher: Watcher<'a>,
}

impl<'a> Encode<'a> {
    /// An encoding of `target` as a whole, with the default options.
    ///
    /// The pair of a [`SafetensorsCheckpoint`] describes its files too, so that they are rebuilt byte for byte. The target of
    /// another checkpoint is rebuilt as one safetensors file with a header of its own.
    pub fn new(target: &'a dyn Checkpoint) -> Self {
        let options = EncodeOptions::default();
        Self { target, base: None, options, inputs: Vec::new(), overwrite: false, watcher: Watcher::Nobody }
    }

    /// The checkpoint that readers of the pair have.
    pub fn base(mut self, base: &'a dyn Checkpoint) -> Self {
        self.base = Some(base);
        self
    }

    /// How to encode.
    pub fn options(mut self, options: EncodeOptions) -> Self {
        self.options = options;
        self
    }

    /// Files besides the checkpoints that the caller has read for this encoding. No file of the pair may replace one of them.
    pub fn inputs(mut self, paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Self {
        self.inputs.extend(paths.into_iter().map(|path| path.as_ref().to_owned()));
        self
    }

    /// Whether [`Encode::to_path`] may replace an existing pair: off by default.
    pub fn overwrite(mut self, on: bool) -> Self {
        self.overwrite = on;
        self
    }

    /// Calls `report` from any thread with the number of bytes that are newly done. In all that is the size of the target's
    /// tensors.
    pub fn progress(mut self, report: impl Fn(u64) + Send + Sync + 'a) -> Self {
        self.watcher = Watcher::Closure(Box::new(report));
        self
    }

    /// As [`Encode::progress`], with a watcher that may end the work.
    pub fn watch(mut self, watch: &'a dyn Watch) -> Self {
        self.watcher = Watcher::Borrowed(watch);
        self
    }

    /// Writes the files of the pair `path`, which is the stem or either file: `NAME.tpde-index` and `NAME.tpde-blob`. They are
    /// published together: first the blob, then the index, whose rename is the commit.
    ///
    /// # Errors
    /// - [`Error::Io`] from the checkpoints or the files of the pair; if the pair exists and [`overwrite`](Encode::overwrite) is not
    ///   set; or if another process holds a lock on the folder for 30 seconds.
    /// - [`Error::Changed`] if a checkpoint has changed since it was opened, as far as
    ///   [`FileSource::check_unchanged`](crate::FileSource::check_unchanged) detects it.
    /// - [`Error::InvalidArgument`] for options that make no sense, and if a file of the pair is, or is inside, a file or folder of
    ///   the checkpoints, or is one of [`inputs`](Encode::inputs).
    /// - Before any lane is read: [`Error::Invalid`] for a name or a shape that the format cannot hold, naming the tensor or the
    ///   file; [`Error::Limit`] for more than it holds; [`Error::NotWritable`] if the target has no files and cannot be written
    ///   as one.
    /// - Any error of the watcher.
    ///
    /// An error before the first rename leaves the old pair as it was, and everything but the renames comes before. If the system
    /// refuses the second rename, the old index stands beside the new blob, and readers refuse the two.
    pub fn to_path(&self, path: impl AsRef<Path>) -> Result<EncodeReport> {
        let files = self.files()?;
        if SafetensorsCheckpoint::of(self.target).is_none() {
            check_composable(self.target.tensors())?;
        }
        let path = path.as_ref();
        check_pair_name(path)?;
        let paths = PairPaths::new(path);
        let checkpoints = self.base.iter().flat_map(|base| base.paths()).chain(self.target.paths());
        let inputs: Vec<_> = checkpoints.chain(self.inputs.iter().cloned()).collect();
        check_apart(&[paths.index.clone(), paths.blob.clone()], &inputs)?;
        let mut publication = Publication::files(&paths.index, self.overwrite);
        let blob = BufWriter::with_capacity(1 << 20, publication.add(&paths.blob)?);
        let mut index = publication.add(&paths.index)?;
        let builder = PairBuilder::new(blob, paths.blob.clone())?;
        let (mut finished, report) = encode(self.base, self.target, files, &self.options, builder, &self.watcher)?;
        let blob = &mut finished.blob;
        let written = blob.seek(SeekFrom::Start(0)).and_then(|_| blob.write_all(&finished.blob_header)).and_then(|()| blob.flush());
        written.map_err(|e| Error::io("write", &paths.blob, e))?;
        index.write_all(finished.index.as_bytes()).map_err(|e| Error::io("write", &paths.index, e))?;
        publication.commit(&self.watcher)?;
        Ok(report)
    }

    /// Makes the pair in memory.
    ///
    /// # Errors
    /// As [`Encode::to_path`], but for those about files of the pair.
    pub fn to_memory(&self) -> Result<(Pair<Vec<u8>>, EncodeReport)> {
        self.to_memory_in(Vec::new())
    }

    /// As [`Encode::to_memory`], with the blob in the allocation of `blob`, whose content is discarded.
    ///
    /// # Errors
    /// As [`Encode::to_memory`].
    pub fn to_memory_in(&self, mut blob: Vec<u8>) -> Result<(Pair<Vec<u8>>, EncodeReport)> {
        blob.clear();
        let builder = PairBuilder::new(blob, "memory".into())?;
        let (finished, report) = encode(self.base, self.target, self.files()?, &self.options, builder, &self.watcher)?;
        Ok((finished.into_pair()?, report))
    }

    /// The files of the target.
    fn files(&self) -> Result<Vec<FileSpec>> {
        let base = self.base.and_then(SafetensorsCheckpoint::of);
        SafetensorsCheckpoint::of(self.target).map_or(Ok(Vec::new()), |target| target.file_specs(base))
    }
}

/// What encoding did.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
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
#[non_exhaustive]
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
        let records = &index.records()[chunks.start as usize..chunks.end as usize];
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

/// One chunk to encode.
struct Job<'a> {
    plan: &'a Plan,
    offset: u64,
    size: usize,
}

/// Encodes the difference of `target` from `base` (`None`: from zeros) into `builder`.
///
/// `files` describe the files that readers rebuild. Errors are those of [`Encode::to_path`], but for those about paths.
pub fn encode<W: Write>(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    files: Vec<FileSpec>,
    options: &EncodeOptions,
    builder: PairBuilder<W>,
    progress: Progress<'_>,
) -> Result<(Finished<W>, EncodeReport)> {
    encode_holding(HELD, base, target, files, options, builder, progress)
}

/// [`encode`], with at most about `most` bytes of payloads of a tensor held until it is known how it is coded.
pub(super) fn encode_holding<W: Write>(
    most: usize,
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
    train(base, target, options, &mut plans, &workers, progress)?;
    let mut assembly = Assembly::new(builder, most, options, &plans, base, target);
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

fn check_options(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, options: &EncodeOptions) -> Result<()> {
    if !options.chunk_lanes.is_power_of_two() || options.chunk_lanes < 1 << MIN_CHUNK_LANES_LOG2 {
        return Err(Error::InvalidArgument(format!("{} lanes a chunk: not a power of two of at least 4096", options.chunk_lanes)));
    }
    if options.layout.is_some() && options.codec != CodecChoice::Only(Codec::Zstd) {
        return Err(Error::InvalidArgument("layouts are for codec zstd".into()));
    }
    for (name, base_name) in &options.renamed {
        if target.find(name).is_none() {
            return Err(Error::InvalidArgument(format!("the target has no tensor {} to rename", Escaped(name))));
        }
        if base.is_none_or(|base| base.find(base_name).is_none()) {
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
    let Survey { difference, base_sum, target_sum, base_hash, target_hash } =
        Survey::of(plan, base_lanes, target_lanes, offset, masks);
    let attempts = encoders.attempts(plan, options, difference)?;
    Ok(Chunk { offset, size, attempts, base_sum, target_sum, base_hash, target_hash })
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
