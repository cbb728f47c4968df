//! `tpde encode`: writes the pair of two checkpoints.

use super::common::Common;
use super::device::{DeviceName, open_cuda};
use super::inputs::{CodecArgs, jobs, named, open, operands};
use super::renames::{Suggestion, rename, suggested};
use super::text::{self, BOLD, JsonPath};
use anyhow::Context;
use clap::Args;
use indicatif::ProgressBar;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tpde::{
    BaseKind, EncodeOptions, EncodeReport, Error, Escaped, FileSource, FormatVersion, PairPaths, Result, SafetensorsCheckpoint,
    Split, TensorReport, UnusedBase, UnusedCause,
};

/// Maximum size of a rename map in bytes.
const RENAME_MAP_LIMIT: u64 = 100_000_000;

/// Write the difference of a target checkpoint from a base
///
/// Tensors are paired by name. If only the number of rows differs, the base's rows are used. A base of another dtype is converted:
/// F32 into BF16 and F16 and back, F8 into BF16 and F16, and quantised weights with their scales, NAME with NAME_scale_inv (FP8) or
/// NAME_blocks with NAME_scales (MXFP4). A tensor is stored without a base if the base lacks it, if the base does not fit, or if
/// that is smaller.
#[derive(Args)]
#[command(visible_alias = "diff")]
#[command(override_usage = "tpde encode [OPTIONS] BASE TARGET -o OUT\n       tpde encode [OPTIONS] --no-base TARGET -o OUT")]
#[command(after_long_help = jobs())]
pub struct Encode {
    /// Base checkpoint: a .safetensors file, or a folder of such files
    #[arg(value_name = "BASE")]
    pub first: PathBuf,
    /// Target checkpoint
    #[arg(value_name = "TARGET", required_unless_present = "no_base")]
    pub second: Option<PathBuf>,
    /// Make a pair that needs no base
    #[arg(long, conflicts_with = "second")]
    pub no_base: bool,
    #[command(flatten)]
    pub made: PairArgs,
    /// Pair a target tensor with a base tensor of another name; may be repeated. With * in both names, all tensors whose names match:
    /// 'model.language_model.*=model.*' replaces a prefix
    #[arg(long, value_name = "TARGET=BASE", value_parser = rename)]
    pub rename: Vec<(String, String)>,
    /// JSON file that maps names of target tensors to names of base tensors: {"target name": "base name", ...}
    #[arg(long, value_name = "FILE.json")]
    pub rename_map: Option<PathBuf>,
    /// Encoding device: cpu, cuda or cuda:N. A CUDA device needs --codec device, conditioned or raw, and memory for both checkpoints
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceName,
}

/// The pair to make: its name and its coding.
#[derive(Args)]
pub struct PairArgs {
    /// Name of the pair: OUT.tpde-index and OUT.tpde-blob
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// Replace existing files
    #[arg(short, long)]
    pub force: bool,
    #[command(flatten)]
    pub codec: CodecArgs,
    /// Newest version of the format that the pair may use. 1.2 has no bases of another dtype. 1.1 is for readers that do not
    /// know 1.2; its pair digest does not cover payloads
    #[arg(long, value_name = "VERSION", default_value = FormatVersion::default().name(), value_parser = named(FormatVersion::ALL, FormatVersion::name))]
    pub format: FormatVersion,
    /// Do not use base tensors of another dtype. They need format 1.3
    #[arg(long)]
    pub no_derived: bool,
    /// Store the digest of each payload, 16 bytes per chunk, so that readers of a part of the pair can compare them
    #[arg(long)]
    pub payload_digests: bool,
    /// Cut tensors into parts, so that the ranks of a distributed job read their own: GLOB=DIM:N cuts dimension DIM into N parts
    /// as torch.chunk does, PRESET:N cuts those of a model family (llama, qwen, mistral, gemma, mixtral, deepseek). The first
    /// rule that matches a name applies; several are separated by commas
    #[arg(long, value_name = "RULES", default_value = "", hide_default_value = true)]
    pub split: Split,
}

impl PairArgs {
    pub fn options(&self) -> EncodeOptions {
        let options = self.codec.options().format(self.format).payload_digests(self.payload_digests);
        options.split(self.split.clone()).derived(!self.no_derived)
    }

    /// Runs an encoding and returns what a report needs.
    pub fn write(&self, encode: tpde::Encode<'_>, verb: &'static str, common: &Common) -> Result<NewPair> {
        self.timed(encode.progress_bytes()?, verb, common, |bar| {
            encode.overwrite(self.force).progress(|bytes| bar.inc(bytes)).to_path(&self.output)
        })
    }

    /// Times an encoding that reports this number of bytes to the bar.
    pub fn timed(
        &self,
        bytes: u64,
        verb: &'static str,
        common: &Common,
        encode: impl FnOnce(&ProgressBar) -> Result<EncodeReport>,
    ) -> Result<NewPair> {
        let bar = common.bar(verb, bytes);
        let start = Instant::now();
        let report = encode(&bar)?;
        let seconds = start.elapsed().as_secs_f64();
        bar.finish_and_clear();
        Ok(NewPair { paths: PairPaths::new(&self.output), report, seconds })
    }
}

/// A pair that was written.
pub struct NewPair {
    paths: PairPaths,
    report: EncodeReport,
    seconds: f64,
}

/// Describes what was written.
#[derive(Serialize)]
pub struct EncodeOutput {
    index: JsonPath,
    blob: JsonPath,
    has_base: bool,
    target_bytes: u64,
    stored_bytes: u64,
    index_bytes: u64,
    blob_bytes: u64,
    ratio: Option<f64>,
    lanes: u64,
    changed: u64,
    changed_tensors: u64,
    tensor_table_bytes: u64,
    seconds: f64,
    gb_per_second: f64,
    threads: usize,
    /// Tensors that are not in the base.
    added: Vec<String>,
    /// Tensors whose base has another dtype. They are stored without a base.
    retyped: Vec<String>,
    /// Tensors whose base has other dims. Only a base of the target's dtype may have another number of rows. They are stored without a
    /// base.
    reshaped: Vec<String>,
    /// Tensors whose base fits, but which are smaller without it. They are stored without a base.
    unrelated: Vec<String>,
    /// Base tensors that are not used, or not as they were meant, with reasons. Includes those of the three lists above.
    unused_bases: Vec<UnusedBase>,
    /// Tensors whose base has another dtype, and was converted or dequantised.
    derived: Vec<String>,
    /// Tensors whose base has another number of rows.
    resized: Vec<String>,
    /// Tensors that only the base has.
    removed: Vec<String>,
    /// Other files in the target's folder.
    not_included: Vec<String>,
    /// Copies these files.
    #[serde(skip)]
    copy: Option<String>,
    /// A pattern for `--rename` that pairs many of `added` with many of `removed`.
    suggested_rename: Option<String>,
    #[serde(skip)]
    note: Option<String>,
    tensors: Vec<TensorReport>,
}

impl Encode {
    pub fn run(&self, common: &Common) -> anyhow::Result<EncodeOutput> {
        self.encode(common).with_context(|| format!("encode {}", text::path(&self.made.output)))
    }

    fn encode(&self, common: &Common) -> Result<EncodeOutput> {
        let (base, target) = operands(&self.first, self.second.as_deref());
        let base = base.map(open).transpose()?;
        let target = open(target)?;
        let options = self.made.options().renamed(self.renamed()?);
        let written = match self.device {
            DeviceName::Cpu => {
                let mut encode = tpde::Encode::new(&target).options(options).inputs(&self.rename_map);
                if let Some(base) = &base {
                    encode = encode.base(base);
                }
                self.made.write(encode, "encode", common)?
            }
            DeviceName::Cuda(ordinal) => self.encode_on(&open_cuda(ordinal)?, base.as_ref(), &target, options, common)?,
        };
        let copy = text::copy(target.path(), target.not_included(), "OUT");
        Ok(EncodeOutput { not_included: target.not_included().to_vec(), copy, ..EncodeOutput::new(written, base.is_some()) })
    }

    /// Copies both checkpoints to a device, and encodes there.
    #[cfg(feature = "cuda")]
    fn encode_on(
        &self,
        device: &tpde_cuda::Device,
        base: Option<&SafetensorsCheckpoint>,
        target: &SafetensorsCheckpoint,
        options: EncodeOptions,
        common: &Common,
    ) -> Result<NewPair> {
        use tpde::Checkpoint;
        use tpde_cuda::DeviceCheckpoint;
        tpde_cuda::Encode::check_options(&options)?;
        let base = base.map(|base| base as &dyn Checkpoint);
        let size = |checkpoint: &dyn Checkpoint| checkpoint.tensors().iter().map(|tensor| tensor.bytes()).sum::<u64>();
        // The target is read, and then encoded.
        let bytes = 2 * size(target) + base.map_or(0, size);
        self.made.timed(bytes, "encode", common, |bar| {
            let upload = |checkpoint| DeviceCheckpoint::upload_watched(device, checkpoint, &|bytes| bar.inc(bytes));
            let (on_device, base_on_device) = (upload(target)?, base.map(upload).transpose()?);
            let mut encode = tpde_cuda::Encode::new(&on_device).options(options).inputs(&self.rename_map).read_from(target, base);
            if let Some(base) = &base_on_device {
                encode = encode.base(base);
            }
            encode.overwrite(self.made.force).progress(|bytes| bar.inc(bytes)).to_path(&self.made.output)
        })
    }

    #[cfg(not(feature = "cuda"))]
    fn encode_on(
        &self,
        device: &super::device::NoCuda,
        _: Option<&SafetensorsCheckpoint>,
        _: &SafetensorsCheckpoint,
        _: EncodeOptions,
        _: &Common,
    ) -> Result<NewPair> {
        match *device {}
    }

    fn renamed(&self) -> Result<BTreeMap<String, String>> {
        let mut renamed = self.rename_map.as_deref().map(read_map).transpose()?.unwrap_or_default();
        renamed.extend(self.rename.iter().cloned());
        Ok(renamed)
    }
}

impl EncodeOutput {
    /// The report of a pair that was written.
    pub fn new(written: NewPair, has_base: bool) -> Self {
        let NewPair { paths, report, seconds } = written;
        let names = |wanted: &dyn Fn(&TensorReport) -> bool| -> Vec<String> {
            report.tensors.iter().filter(|tensor| wanted(tensor)).map(|tensor| tensor.name.clone()).collect()
        };
        let unused = |cause: UnusedCause| {
            let of_cause = report.unused.iter().filter(|unused| unused.cause == cause);
            of_cause.map(|unused| unused.tensor.clone()).collect::<Vec<_>>()
        };
        let paired: BTreeSet<_> = report.unused.iter().map(|unused| &unused.base).collect();
        let removed: Vec<_> = report.removed.iter().filter(|name| !paired.contains(name)).cloned().collect();
        let suggested = suggested(&report.added, &removed);
        let note = note(&report, &removed, suggested.as_ref());
        let stored_bytes = report.index_bytes + report.blob_bytes;
        Self {
            index: JsonPath(paths.index),
            blob: JsonPath(paths.blob),
            has_base,
            target_bytes: report.target_bytes,
            stored_bytes,
            index_bytes: report.index_bytes,
            blob_bytes: report.blob_bytes,
            ratio: text::ratio(report.target_bytes, stored_bytes),
            lanes: report.tensors.iter().map(|tensor| tensor.lanes).sum(),
            changed: report.tensors.iter().map(|tensor| tensor.changed).sum(),
            changed_tensors: report.tensors.iter().filter(|tensor| tensor.changed > 0).count() as u64,
            tensor_table_bytes: report.tensor_table_bytes,
            seconds,
            gb_per_second: text::speed(report.target_bytes, seconds),
            threads: rayon::current_num_threads(),
            added: if has_base { report.added } else { Vec::new() },
            derived: names(&|tensor| tensor.base_kind.is_derived()),
            resized: names(&|tensor| tensor.base_kind == BaseKind::Prefix),
            retyped: unused(UnusedCause::Dtype),
            reshaped: unused(UnusedCause::Shape),
            unrelated: unused(UnusedCause::Larger),
            removed,
            unused_bases: report.unused,
            not_included: Vec::new(),
            copy: None,
            suggested_rename: suggested.map(|suggested| suggested.pattern),
            note,
            tensors: report.tensors,
        }
    }
}

/// A question about bases that are probably not those that were meant.
fn note(report: &EncodeReport, removed: &[String], suggested: Option<&Suggestion>) -> Option<String> {
    if let Some(Suggestion { pattern, tensors }) = suggested {
        let tensors = text::counted(*tensors, "tensor");
        return Some(format!(
            "the base has {tensors} of the target under another prefix: is --rename '{}' meant?",
            Escaped(pattern)
        ));
    }
    if !removed.is_empty() && !report.added.is_empty() && report.tensors.iter().all(|tensor| report.added.contains(&tensor.name)) {
        let note = "no tensor of the target is in the base: is it the right base? --rename and --rename-map give other names";
        return Some(note.to_owned());
    }
    let is_unrelated = report.unused.iter().any(|unused| unused.cause == UnusedCause::Larger);
    let is_related = report.tensors.iter().any(|tensor| tensor.base_kind != BaseKind::None && tensor.lanes > 0);
    (is_unrelated && !is_related).then(|| "no tensor is smaller with its base: is it the right base?".to_owned())
}

fn read_map(path: &Path) -> Result<BTreeMap<String, String>> {
    let content = FileSource::open(path)?.read_all("size of the rename map", RENAME_MAP_LIMIT)?;
    serde_json::from_slice(&content)
        .map_err(|e| Error::InvalidArgument(format!("{} does not map target names to base names: {e}", text::path(path))))
}

impl fmt::Display for EncodeOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blob = self.blob.file_name().map_or(&*self.blob, Path::new);
        writeln!(f, "{BOLD}wrote {} and {}{BOLD:#}", text::path(&self.index), text::path(blob))?;
        let tensors = self.tensors.len() as u64;
        let mut facts = vec![
            ("ratio", text::times(self.ratio)),
            ("size", text::pair_size(self.target_bytes, self.index_bytes, self.blob_bytes)),
            (
                "changed",
                format!(
                    "{} of {} lanes, in {} of {}",
                    text::share(self.changed, self.lanes),
                    text::count(self.lanes),
                    text::count(self.changed_tensors),
                    text::counted(tensors, "tensor")
                ),
            ),
            (
                "table",
                format!(
                    "{}, {:.1} B per tensor",
                    text::bytes(self.tensor_table_bytes),
                    self.tensor_table_bytes as f64 / tensors.max(1) as f64
                ),
            ),
            ("speed", text::speed_fact(self.gb_per_second, self.seconds, self.threads)),
        ];
        let is_listed = |cause| matches!(cause, UnusedCause::Dtype | UnusedCause::Shape | UnusedCause::Larger);
        let others = self.unused_bases.iter().filter(|unused| !is_listed(unused.cause));
        let unused: Vec<_> = others.map(|unused| format!("{} for {} ({})", unused.base, unused.tensor, unused.reason)).collect();
        let lists = [
            ("added", &self.added, "tensor", "stored whole"),
            ("retyped", &self.retyped, "tensor", "the base has another dtype, stored whole"),
            ("reshaped", &self.reshaped, "tensor", "the base has another shape, stored whole"),
            ("unrelated", &self.unrelated, "tensor", "smaller without the base, stored whole"),
            ("unused", &unused, "base tensor", "not used as it was meant"),
            ("derived", &self.derived, "tensor", "from a base of another dtype"),
            ("resized", &self.resized, "tensor", "another number of rows"),
            ("removed", &self.removed, "tensor", "in the base only"),
            ("left out", &self.not_included, "file", "in the folder, not part of the checkpoint"),
        ];
        for (label, names, thing, why) in lists {
            if !names.is_empty() {
                let count = text::counted(names.len() as u64, thing);
                facts.push((label, format!("{count}, {why}: {}", text::some(names))));
            }
        }
        facts.extend(
            self.copy.iter().map(|copy| ("copy", format!("send these files with the pair, `apply` does not write them: {copy}"))),
        );
        facts.extend(self.note.iter().map(|note| ("note", note.clone())));
        text::facts(f, &facts)
    }
}
