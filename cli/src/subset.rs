//! `tpde subset`: makes a pair of some tensors of another.

use super::common::Common;
use super::inputs::{ExpectArgs, glob, matchers};
use super::merge::{OutputArgs, Report};
use super::text;
use anyhow::Context;
use clap::Args;
use globset::Glob;
use std::path::PathBuf;
use tpde::Result;

/// Make a pair of some tensors of another
///
/// Payloads are checked and copied, and not decoded. The result has format 1.2. It describes those files of which it has all
/// tensors, if its tensors are in no other file and the pair stores the headers of these files; otherwise no files.
#[derive(Args)]
pub struct Subset {
    /// Pair: its name, or the path of either file
    #[arg(value_name = "PAIR")]
    pub pair: PathBuf,
    /// Keep the tensors whose names match; may be repeated
    #[arg(long, value_name = "GLOB", required = true, value_parser = glob)]
    pub tensor: Vec<Glob>,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub expect: ExpectArgs,
}

impl Subset {
    pub fn run(&self, common: &Common) -> anyhow::Result<Report> {
        self.subset(common).with_context(|| format!("subset {}", text::path(&self.pair)))
    }

    fn subset(&self, common: &Common) -> Result<Report> {
        let pair = self.expect.open(&self.pair)?;
        let globs = matchers(&self.tensor, &pair)?;
        let merge = tpde::Merge::new([&pair]).tensors(|name| globs.iter().any(|glob| glob.is_match(name)));
        self.output.write(merge, "subset", 1, common)
    }
}
