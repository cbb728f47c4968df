//! `tpde subset`: makes a pair of some tensors of another, or of some of their parts.

use super::common::Common;
use super::inputs::{ExpectArgs, PartArg, glob, matchers, rectangles};
use super::merge::{MergeOutput, OutputArgs};
use super::text;
use anyhow::Context;
use clap::Args;
use globset::Glob;
use std::path::PathBuf;
use tpde::Result;

/// Make a pair of some tensors of another, or of some of their parts
///
/// Payloads are checked and copied, and not decoded. The result has format 1.2, or 1.3 if a base has another dtype. It describes those files of which it has all
/// tensors, if its tensors are in no other file and the pair stores the headers of these files; otherwise no files.
#[derive(Args)]
pub struct Subset {
    /// Pair: its name, or the path of either file
    #[arg(value_name = "PAIR")]
    pub pair: PathBuf,
    /// Keep the tensors whose names match; may be repeated
    #[arg(long, value_name = "GLOB", required_unless_present = "part", value_parser = glob)]
    pub tensor: Vec<Glob>,
    /// Of the tensors whose names match, keep only the parts within a rectangle, as in '*.o_proj.weight=[:, 0:512]'; may be
    /// repeated. The ranges are those of the dimensions in order. A missing bound is that of the tensor, and so is a missing range
    /// at the end. A part that is only partly within the rectangle is an error
    #[arg(long, value_name = "GLOB=[RANGES]", value_parser = PartArg::parse)]
    pub part: Vec<PartArg>,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub expect: ExpectArgs,
}

impl Subset {
    pub fn run(&self, common: &Common) -> anyhow::Result<MergeOutput> {
        self.subset(common).with_context(|| format!("subset {}", text::path(&self.pair)))
    }

    fn subset(&self, common: &Common) -> Result<MergeOutput> {
        let pair = self.expect.open(&self.pair)?;
        let globs = matchers(&self.tensor, pair.index())?;
        let parts = rectangles(&self.part, pair.index())?;
        let is_wanted = |name: &str| parts.contains_key(name) || globs.iter().any(|glob| glob.is_match(name));
        let merge = tpde::Merge::new([&pair]).tensors(is_wanted).parts(parts.clone())?;
        self.output.write(merge, "subset", 1, common)
    }
}
