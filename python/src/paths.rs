//! Functions that work on paths.

use crate::device::Device;
use crate::errors;
use crate::memory::Tensors;
use crate::pair::open;
use crate::run::{Steering, run};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use serde_json::json;
use std::collections::{BTreeMap, HashSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use tpde::{
    Apply, Chain, Checkpoint, Codec, CodecChoice, Encode, EncodeOptions, EncodeReport, Error, Favor, FileSource, FormatVersion,
    Layout, MemoryCheckpoint, Merge, OutputFile, Pair, PairPaths, Rectangle, Result, SafetensorsCheckpoint, TensorReport, Verify,
};

/// Path of a pair, and the pair digest that the caller expects.
type PairName = (PathBuf, Option<[u8; 32]>);

/// Encode options as passed from Python.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Options {
    codec: Option<String>,
    layout: Option<String>,
    chunk_lanes: Option<u64>,
    favor: Option<String>,
    renamed: BTreeMap<String, String>,
    format: Option<String>,
    payload_digests: bool,
    derived: bool,
    split: Option<String>,
}

impl Options {
    pub fn parse(self) -> Result<EncodeOptions> {
        let layout: Option<Layout> = self.layout.map(|name| name.parse()).transpose()?;
        let codec: Option<CodecChoice> = self.codec.map(|name| name.parse()).transpose()?;
        let favor: Option<Favor> = self.favor.map(|name| name.parse()).transpose()?;
        let format: Option<FormatVersion> = self.format.map(|name| name.parse()).transpose()?;
        // A layout implies codec zstd.
        let codec = match (codec.unwrap_or_default(), layout) {
            (CodecChoice::Auto, Some(_)) => Codec::Zstd.into(),
            (codec, _) => codec,
        };
        let defaults = EncodeOptions::default();
        let chunk_lanes = self.chunk_lanes.unwrap_or(defaults.chunk_lanes);
        let favor = favor.unwrap_or(defaults.favor);
        let format = format.unwrap_or(defaults.format);
        let options = defaults.codec(codec).layout(layout).chunk_lanes(chunk_lanes).favor(favor).renamed(self.renamed);
        let split = self.split.map(|rules| rules.parse()).transpose()?.unwrap_or_default();
        Ok(options.format(format).payload_digests(self.payload_digests).derived(self.derived).split(split))
    }

    /// The options for these tensors. Without rules, they are cut at the slices.
    pub fn parse_for(self, target: &Tensors) -> Result<EncodeOptions> {
        let options = self.parse()?;
        Ok(if options.split.is_empty() { options.cuts(target.rectangles()) } else { options })
    }
}

/// Opens several pairs, none of which is applied to another. If the bytes of a pair are at fault, the error has its path.
fn open_each(pairs: &[PairName], steering: &Steering) -> Result<Vec<Pair<FileSource>>> {
    let open = |pair: &PairName| {
        open(&pair.0, pair.1, steering).map_err(|mut error| {
            if let Error::Invalid(invalid) = &mut error {
                invalid.at.pair = Some(pair.0.display().to_string());
            }
            error
        })
    };
    pairs.iter().map(open).collect()
}

/// Opens the pairs of a chain. If the bytes of one of several pairs are at fault, the error has its number and path.
fn open_chain(pairs: &[PairName], steering: &Steering) -> Result<Vec<Pair<FileSource>>> {
    let open = |(number, pair): (usize, &PairName)| {
        open(&pair.0, pair.1, steering).map_err(|error| error.in_step(number, pairs.len(), &pair.0))
    };
    (1..).zip(pairs).map(open).collect()
}

/// A base that is opened; without tensors if there is none.
struct Base(Option<SafetensorsCheckpoint>);

impl Base {
    fn open(path: Option<PathBuf>) -> Result<Self> {
        Ok(Self(path.as_deref().map(SafetensorsCheckpoint::open).transpose()?))
    }

    fn checkpoint(&self) -> &dyn Checkpoint {
        static EMPTY: MemoryCheckpoint<'static> = MemoryCheckpoint::EMPTY;
        self.0.as_ref().map_or(&EMPTY, |base| base)
    }
}

/// Writes a file unless it exists, and returns whether it did. The file appears complete and synced.
#[pyfunction]
pub fn write_new(py: Python<'_>, path: PathBuf, content: PyBackedBytes) -> PyResult<bool> {
    run(py, None, 0, |_| match OutputFile::create(&path, &[], false).and_then(|file| file.publish(&content)) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::AlreadyExists => Ok(false),
        written => written.map(|()| true),
    })
}

/// Names of the tensors of a checkpoint in files.
#[pyfunction]
pub fn tensor_names(py: Python<'_>, checkpoint: PathBuf) -> PyResult<Vec<String>> {
    run(py, None, 0, |_| {
        let checkpoint = SafetensorsCheckpoint::open(&checkpoint)?;
        Ok(checkpoint.tensors().iter().map(|tensor| tensor.name.clone()).collect())
    })
}

pub fn bytes_of(checkpoint: &dyn Checkpoint) -> u64 {
    checkpoint.tensors().iter().map(|tensor| tensor.bytes()).sum()
}

/// The report of a pair that was written, for the Python half.
pub fn encode_report(report: &EncodeReport, output: &Path, not_included: &[String]) -> String {
    let paths = PairPaths::new(output);
    json!({
        "index": paths.index.to_string_lossy(),
        "blob": paths.blob.to_string_lossy(),
        "target_bytes": report.target_bytes,
        "index_bytes": report.index_bytes,
        "blob_bytes": report.blob_bytes,
        "tensors": report.tensors,
        "removed": report.removed,
        "added": report.added,
        "unused": report.unused,
        "not_included": not_included,
    })
    .to_string()
}

#[pyfunction]
#[pyo3(signature = (target, path, *, base, options, replace, progress))]
pub fn encode(
    py: Python<'_>,
    target: PathBuf,
    path: PathBuf,
    base: Option<PathBuf>,
    options: Options,
    replace: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let opened = run(py, None, 0, |_| {
        let base = base.as_deref().map(SafetensorsCheckpoint::open).transpose()?;
        Ok((base, SafetensorsCheckpoint::open(&target)?, options.parse()?))
    });
    let (base, target, options) = opened?;
    let total = bytes_of(&target);
    run(py, progress, total, |steering| {
        let mut encode = Encode::new(&target).options(options).overwrite(replace).watch(steering);
        if let Some(base) = &base {
            encode = encode.base(base);
        }
        let report = encode.to_path(&path)?;
        Ok(encode_report(&report, &path, target.not_included()))
    })
}

/// A checkpoint as passed from Python: a path, or tensors in memory.
#[derive(FromPyObject)]
pub enum Source {
    Memory(Tensors),
    Path(PathBuf),
}

#[pyfunction]
#[pyo3(signature = (target, path, *, base, options, replace, progress))]
pub fn encode_memory(
    py: Python<'_>,
    target: Tensors,
    path: PathBuf,
    base: Option<Source>,
    options: Options,
    replace: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    run(py, progress, target.size(), |steering| {
        let options = options.parse_for(&target)?;
        let target = target.checkpoint()?;
        let encode = Encode::new(&*target).options(options).overwrite(replace).watch(steering);
        let report = match &base {
            None => encode.to_path(&path),
            Some(Source::Memory(tensors)) => encode.base(&*tensors.checkpoint()?).to_path(&path),
            Some(Source::Path(base)) => encode.base(&SafetensorsCheckpoint::open(base)?).to_path(&path),
        };
        Ok(encode_report(&report?, &path, &[]))
    })
}

/// Makes one pair of a chain of pairs: from the base to the last target, or back.
#[pyfunction]
#[pyo3(signature = (pairs, path, *, base, is_back, options, replace, device, progress))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub fn fold(
    py: Python<'_>,
    pairs: Vec<PairName>,
    path: PathBuf,
    base: Option<PathBuf>,
    is_back: bool,
    options: Options,
    replace: bool,
    device: Option<Py<Device>>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let (pairs, base, options, total) = run(py, None, 0, |steering| {
        let (pairs, base, options) = (open_chain(&pairs, steering)?, Base::open(base)?, options.parse()?);
        let target = if is_back { bytes_of(base.checkpoint()) } else { bytes_of(&Chain::new(base.checkpoint(), &pairs)?) };
        let steps: u64 = pairs.iter().map(|pair| pair.index().tensor_bytes().1).sum();
        // A device reads the base, and rebuilds each version.
        let before = if device.is_some() { bytes_of(base.checkpoint()) + steps } else { 0 };
        Ok((pairs, base, options, before + target))
    })?;
    run(py, progress, total, |steering| {
        let chain = Chain::new(base.checkpoint(), &pairs)?;
        if let Some(device) = &device {
            let report = fold_on(&device.get().0, &chain, options, replace, &path, steering)?;
            return Ok(encode_report(&report, &path, &[]));
        }
        let encode = if is_back { Encode::revert(&chain) } else { Encode::fold(&chain) };
        let report = encode.options(options).overwrite(replace).watch(steering).to_path(&path)?;
        Ok(encode_report(&report, &path, &[]))
    })
}

/// Folds a chain on a device.
fn fold_on(
    device: &tpde_cuda::Device,
    chain: &Chain<'_, FileSource>,
    options: EncodeOptions,
    replace: bool,
    path: &Path,
    steering: &Steering,
) -> Result<EncodeReport> {
    tpde_cuda::Encode::check_fold(chain, &options, path, replace)?;
    let base = tpde_cuda::DeviceCheckpoint::upload_watched(device, chain.base(), steering)?;
    let last = tpde_cuda::Rebuild::new(chain, &base).watch(steering).run()?;
    tpde_cuda::Encode::fold(chain, &base, &last).options(options).overwrite(replace).watch(steering).to_path(path)
}

/// Applies pairs, one after the other.
#[pyfunction]
#[pyo3(signature = (pairs, path, *, base, wanted, replace, progress))]
pub fn apply(
    py: Python<'_>,
    pairs: Vec<PairName>,
    path: PathBuf,
    base: Option<PathBuf>,
    wanted: Option<HashSet<String>>,
    replace: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let name = pairs.last().map_or_else(PathBuf::new, |pair| pair.0.clone());
    let (pairs, base) = run(py, None, 0, |steering| Ok((open_chain(&pairs, steering)?, Base::open(base)?)))?;
    let last = pairs.last().ok_or_else(|| errors::to_python(py, &Error::InvalidArgument("no pair is given".into())))?;
    let is_wanted = |name: &str| wanted.as_ref().is_none_or(|wanted| wanted.contains(name));
    let total = last.index().tensors().filter(|tensor| is_wanted(tensor.name)).map(|tensor| tensor.bytes()).sum();
    run(py, progress, total, |steering| {
        let mut apply = Apply::new(last).overwrite(replace).watch(steering);
        if wanted.is_some() {
            apply = apply.tensors(is_wanted);
        }
        let count = pairs.len();
        let report = if count == 1 {
            apply.base(base.checkpoint()).to_path(&path)
        } else {
            apply.base(&Chain::new(base.checkpoint(), &pairs)?.without_last()).to_path(&path)
        };
        Ok(json!(report.map_err(|error| error.in_step(count, count, &name))?).to_string())
    })
}

#[pyfunction]
#[pyo3(signature = (pair, *, base, target, no_base, progress))]
pub fn verify(
    py: Python<'_>,
    pair: PairName,
    base: Option<PathBuf>,
    target: Option<PathBuf>,
    no_base: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let (pair, base, target) = run(py, None, 0, |steering| {
        let pair = open(&pair.0, pair.1, steering)?;
        let base = base.as_deref().map(SafetensorsCheckpoint::open).transpose()?;
        Ok((pair, base, target.as_deref().map(SafetensorsCheckpoint::open).transpose()?))
    })?;
    let mut verify = Verify::new(&pair);
    if let Some(base) = &base {
        verify = verify.base(base);
    } else if no_base {
        verify = verify.without_base();
    }
    if let Some(target) = &target {
        verify = verify.target(target);
    }
    run(py, progress, verify.progress_bytes(), |steering| Ok(json!(verify.watch(steering).run()?).to_string()))
}

/// Rectangles by name of their tensor: first index and number of indexes in each dimension.
pub type Parts = BTreeMap<String, Vec<(Vec<u64>, Vec<u64>)>>;

/// Merges pairs. `wanted` selects tensors by name. `parts` keeps only the parts of its tensors that are within their rectangles.
#[pyfunction]
#[pyo3(signature = (pairs, path, *, wanted, parts, files, payload_digests, replace, progress))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub fn merge(
    py: Python<'_>,
    pairs: Vec<PairName>,
    path: PathBuf,
    wanted: Option<HashSet<String>>,
    parts: Parts,
    files: bool,
    payload_digests: bool,
    replace: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let pairs = run(py, None, 0, |steering| open_each(&pairs, steering))?;
    let merge = || {
        let merge = Merge::new(&pairs).files(files).payload_digests(payload_digests).overwrite(replace);
        let merge = match &wanted {
            Some(wanted) => merge.tensors(|name| wanted.contains(name)),
            None => merge,
        };
        let rectangle = |(origin, extent): &(Vec<u64>, Vec<u64>)| Rectangle::new(&origin[..], &extent[..]);
        let rectangles = |(name, parts): (&String, &Vec<_>)| (name.clone(), parts.iter().map(rectangle).collect());
        if parts.is_empty() { Ok(merge) } else { merge.parts(parts.iter().map(rectangles)) }
    };
    let total = merge().map_err(|error| errors::to_python(py, &error))?.progress_bytes();
    run(py, progress, total, |steering| {
        let mut report = json!(merge()?.watch(steering).to_path(&path)?);
        let paths = PairPaths::new(&path);
        report["index"] = paths.index.to_string_lossy().into();
        report["blob"] = paths.blob.to_string_lossy().into();
        Ok(report.to_string())
    })
}

#[pyfunction]
pub fn inspect(py: Python<'_>, pair: PairName) -> PyResult<String> {
    run(py, None, 0, |steering| {
        let pair = open(&pair.0, pair.1, steering)?;
        let index = pair.index();
        let (major, minor) = index.version();
        let (base_bytes, target_bytes) = index.tensor_bytes();
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let files: Vec<_> =
            index.files().map(|file| json!({"name": file.name, "kind": file.kind, "content_bytes": file.content_size})).collect();
        let tensors: Vec<_> = index.tensors().map(|tensor| TensorReport::new(index, &tensor)).collect();
        Ok(json!({
            "version": format!("{major}.{minor}"),
            "pair_digest": hex(index.pair_digest()),
            "base_root": hex(index.base_root()),
            "target_root": hex(index.target_root()),
            "base_bytes": base_bytes,
            "target_bytes": target_bytes,
            "index_bytes": index.size(),
            "blob_bytes": index.blob_size(),
            "chunks": index.chunk_count(),
            "files": files,
            "tensors": tensors,
        })
        .to_string())
    })
}
