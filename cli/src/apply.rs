//! `tpde apply`: rebuilds the target from a base and a pair.

use super::common::Common;
use super::device::DeviceArgs;
use super::inputs::{ChainArgs, OpenedChain, glob, last_of, matchers, read_pair};
#[cfg(feature = "mmap")]
use super::inputs::{MapArgs, map_pair};
use super::text::{self, BOLD, JsonPath};
use anyhow::Context;
use clap::Args;
use globset::Glob;
use serde::Serialize;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tpde::{BaseKind, Error, PayloadDigests, Result, Source};

/// Rebuild the target from a base and a pair, or a chain of pairs
///
/// Writes the files of the target bit for bit: one file, or a folder of shards with its index. No file appears before all files
/// are written and compared with the digests of the pair.
///
/// Several pairs are applied one after the other, in one pass and without files in between: each is made from the target of the
/// one before.
#[derive(Args)]
#[command(visible_alias = "patch")]
#[command(override_usage = "tpde apply [OPTIONS] BASE PAIR... -o OUT\n       tpde apply [OPTIONS] --no-base PAIR... -o OUT")]
pub struct Apply {
    #[command(flatten)]
    pub chain: ChainArgs,
    /// File or folder to write
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// Replace existing files
    #[arg(short, long)]
    pub force: bool,
    /// Write only tensors whose names match, into one safetensors file; may be repeated
    #[arg(long, value_name = "GLOB", value_parser = glob)]
    pub tensor: Vec<Glob>,
    #[cfg(feature = "mmap")]
    #[command(flatten)]
    pub map: MapArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// Describes what was rebuilt.
#[derive(Serialize)]
pub struct ApplyOutput {
    output: JsonPath,
    /// Number of pairs that were applied.
    pairs: usize,
    tensors: u64,
    target_bytes: u64,
    digests_checked: bool,
    /// Files that programs would have read instead of the output.
    removed: Vec<String>,
    payload_digests: PayloadDigests,
    #[serde(skip)]
    needs_base: bool,
    /// Copies what else is in the base's folder.
    #[serde(skip)]
    copy: Option<String>,
    seconds: f64,
    gb_per_second: f64,
    threads: usize,
}

impl Apply {
    pub fn run(&self, common: &Common) -> anyhow::Result<ApplyOutput> {
        self.apply(common).with_context(|| format!("apply {} to {}", self.chain.shown(), text::path(&self.output)))
    }

    fn apply(&self, common: &Common) -> Result<ApplyOutput> {
        #[cfg(feature = "mmap")]
        if self.map.mmap {
            return self.rebuild(&self.chain.open(map_pair)?, common);
        }
        self.rebuild(&self.chain.open(read_pair)?, common)
    }

    fn rebuild<B: Source>(&self, opened: &OpenedChain<B>, common: &Common) -> Result<ApplyOutput> {
        let (pair, chain) = last_of(opened.base(), &opened.pairs)?;
        let globs = matchers(&self.tensor, pair.index())?;
        let is_wanted = |name: &str| globs.iter().any(|glob| glob.is_match(name));

        if !globs.is_empty() || pair.index().files().all(|file| file.name.is_empty()) {
            check_names_file(&self.output)?;
        }
        self.device.check_pairs(opened.pairs.len())?;
        let device = self.device.open()?;
        let mut apply = tpde::Apply::new(pair).overwrite(self.force);
        if !globs.is_empty() {
            apply = apply.tensors(is_wanted);
        }
        if !self.chain.no_base || opened.pairs.len() > 1 {
            apply = apply.base(&chain);
        }
        if let Some(device) = &device {
            apply = apply.on(&**device);
        }
        let bar = common.bar("apply", apply.selected().map(|tensor| tensor.bytes()).sum());
        let needs_base = apply.selected().any(|tensor| tensor.base_kind != BaseKind::None);
        let start = Instant::now();
        let count = opened.pairs.len();
        let report = apply.progress(|bytes| bar.inc(bytes)).to_path(&self.output);
        let report = report.map_err(|error| error.in_step(count, count, self.chain.last()))?;
        let seconds = start.elapsed().as_secs_f64();
        bar.finish_and_clear();
        Ok(ApplyOutput {
            output: JsonPath(self.output.clone()),
            pairs: opened.pairs.len(),
            tensors: report.tensors,
            target_bytes: report.bytes,
            digests_checked: report.digests_checked,
            removed: report.removed,
            payload_digests: report.payload_digests,
            needs_base,
            copy: opened.copy(&self.output),
            seconds,
            gb_per_second: text::speed(report.bytes, seconds),
            threads: rayon::current_num_threads(),
        })
    }
}

/// Refuses a folder as the output of a pair whose target is a single file.
fn check_names_file(output: &Path) -> Result<()> {
    let bytes = output.as_os_str().as_bytes();
    if !output.is_dir() && !bytes.is_empty() && !bytes.ends_with(b"/") {
        return Ok(());
    }
    let example = text::path(&output.join("model.safetensors"));
    Err(Error::InvalidArgument(format!("-o must name a file here, as in {example}: the output is one file")))
}

impl fmt::Display for ApplyOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{BOLD}rebuilt {}{BOLD:#}", text::path(&self.output))?;
        let checked = match (self.digests_checked, self.needs_base) {
            (true, true) if self.pairs > 1 => "target has the digests of the last pair",
            (true, true) => "base and target have the digests of the pair",
            (true, false) => "target has the digests of the pair; no base is needed",
            (false, _) => "digests not compared",
        };
        let mut facts = vec![
            ("size", format!("{} in {}", text::bytes(self.target_bytes), text::counted(self.tensors, "tensor"))),
            ("checked", checked.into()),
            ("payload", text::payload_digests(self.payload_digests).into()),
            ("speed", text::speed_fact(self.gb_per_second, self.seconds, self.threads)),
        ];
        if !self.removed.is_empty() {
            facts.push(("removed", format!("what programs would have read instead: {}", text::some(&self.removed))));
        }
        facts.extend(
            self.copy
                .iter()
                .map(|copy| ("copy", format!("other files should come with the pair; if they are those of the base: {copy}"))),
        );
        text::facts(f, &facts)
    }
}
