//! `tpde merge`: makes one pair of several.

use super::common::Common;
use super::text::{self, BOLD, JsonPath};
use anyhow::Context;
use clap::Args;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tpde::{FileSource, MergeReport, Pair, PairPaths, Result};

/// Make one pair of several
///
/// The pairs must have different tensors, and must be made from one base. Payloads are checked and copied, and not decoded. The
/// result has format 1.2, or 1.3 if a base has another dtype. It describes the files of all pairs.
///
/// Payloads of formats 1.0 and 1.1 have no digests. A forged payload of such a pair is copied, and the new pair digest covers it.
#[derive(Args)]
pub struct Merge {
    /// Pairs: their names, or the path of either file of each
    #[arg(value_name = "PAIR", required = true)]
    pub pairs: Vec<PathBuf>,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The pair that a verb makes of other pairs.
#[derive(Args)]
pub struct OutputArgs {
    /// Name of the new pair: OUT.tpde-index and OUT.tpde-blob
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// Replace existing files
    #[arg(short, long)]
    pub force: bool,
    /// Describe only tensors, without the files of the target
    #[arg(long)]
    pub no_files: bool,
    /// Store the digest of each payload, 16 bytes per chunk, even if no input does
    #[arg(long)]
    pub payload_digests: bool,
}

/// Describes the new pair.
#[derive(Serialize)]
pub struct MergeOutput {
    index: JsonPath,
    blob: JsonPath,
    /// Number of pairs of which the new pair is made.
    pairs: u64,
    #[serde(flatten)]
    made: MergeReport,
    seconds: f64,
    gb_per_second: f64,
    threads: usize,
}

impl Merge {
    pub fn run(&self, common: &Common) -> anyhow::Result<MergeOutput> {
        self.merge(common).with_context(|| format!("merge {}", text::path(&self.output.output)))
    }

    fn merge(&self, common: &Common) -> anyhow::Result<MergeOutput> {
        let open = |pair: &PathBuf| Pair::open(pair).with_context(|| format!("open {}", text::path(pair)));
        let pairs = self.pairs.iter().map(open).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(self.output.write(tpde::Merge::new(&pairs), "merge", pairs.len(), common)?)
    }
}

impl OutputArgs {
    /// Writes the result of `merge`, a merge of `pairs` pairs.
    pub fn write(
        &self,
        merge: tpde::Merge<'_, FileSource>,
        verb: &'static str,
        pairs: usize,
        common: &Common,
    ) -> Result<MergeOutput> {
        let paths = PairPaths::new(&self.output);
        let merge = merge.files(!self.no_files).payload_digests(self.payload_digests).overwrite(self.force);
        let bar = common.bar(verb, merge.progress_bytes());
        let start = Instant::now();
        let made = merge.progress(|bytes| bar.inc(bytes)).to_path(&self.output)?;
        let seconds = start.elapsed().as_secs_f64();
        bar.finish_and_clear();
        Ok(MergeOutput {
            index: JsonPath(paths.index),
            blob: JsonPath(paths.blob),
            pairs: pairs as u64,
            seconds,
            gb_per_second: text::speed(made.payload_bytes, seconds),
            made,
            threads: rayon::current_num_threads(),
        })
    }
}

impl fmt::Display for MergeOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MergeReport { tensors, chunks, files, index_bytes, blob_bytes, .. } = self.made;
        let blob = self.blob.file_name().map_or(&*self.blob, Path::new);
        writeln!(f, "{BOLD}wrote {} and {}{BOLD:#}", text::path(&self.index), text::path(blob))?;
        let files = if files == 0 { "none, tensors only".to_owned() } else { text::count(files) };
        text::facts(
            f,
            &[
                ("made of", text::counted(self.pairs, "pair")),
                ("holds", format!("{}, {}", text::counted(tensors, "tensor"), text::counted(chunks, "chunk"))),
                ("files", files),
                ("size", text::pair_size(self.made.target_bytes, index_bytes, blob_bytes)),
                ("speed", text::speed_fact(self.gb_per_second, self.seconds, self.threads)),
            ],
        )
    }
}
