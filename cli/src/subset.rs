//! `tpde subset`: makes a pair of some tensors of another, or of some of their parts.

use super::common::Common;
use super::inputs::{ExpectArgs, glob, matchers};
use super::merge::{OutputArgs, Report};
use super::text;
use anyhow::Context;
use clap::Args;
use globset::Glob;
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use tpde::{Error, Escaped, Rectangle, Result, Tensor};

/// Make a pair of some tensors of another, or of some of their parts
///
/// Payloads are checked and copied, and not decoded. The result has format 1.2. It describes those files of which it has all
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
    pub fn run(&self, common: &Common) -> anyhow::Result<Report> {
        self.subset(common).with_context(|| format!("subset {}", text::path(&self.pair)))
    }

    fn subset(&self, common: &Common) -> Result<Report> {
        let pair = self.expect.open(&self.pair)?;
        let globs = matchers(&self.tensor, &pair)?;
        let globs_of_parts: Vec<_> = self.part.iter().map(|part| part.glob.clone()).collect();
        let mut parts: BTreeMap<String, Vec<Rectangle>> = BTreeMap::new();
        for (glob, part) in matchers(&globs_of_parts, &pair)?.iter().zip(&self.part) {
            let mut names = HashSet::new();
            for tensor in pair.index().tensors().filter(|tensor| glob.is_match(tensor.name) && names.insert(tensor.name)) {
                parts.entry(tensor.name.to_owned()).or_default().push(part.rectangle(&tensor)?);
            }
        }
        let is_wanted = |name: &str| parts.contains_key(name) || globs.iter().any(|glob| glob.is_match(name));
        let merge = tpde::Merge::new([&pair]).tensors(is_wanted).parts(parts.clone())?;
        self.output.write(merge, "subset", 1, common)
    }
}

/// A rectangle of the tensors whose names match.
#[derive(Clone)]
pub struct PartArg {
    glob: Glob,
    /// First index and end in each dimension; `None` is the tensor's.
    ranges: Vec<(Option<u64>, Option<u64>)>,
}

impl PartArg {
    fn parse(text: &str) -> Result<Self, String> {
        let expected = "expected GLOB=[RANGES], as in '*.o_proj.weight=[:, 0:512]'";
        let (name, ranges) = text.strip_suffix(']').and_then(|text| text.rsplit_once("=[")).ok_or(expected)?;
        let bound = |text: &str| match text.trim() {
            "" => Ok(None),
            digits => digits.parse().map(Some).map_err(|_| expected),
        };
        let range = |text: &str| {
            let (start, end) = text.split_once(':').ok_or(expected)?;
            Ok::<_, &str>((bound(start)?, bound(end)?))
        };
        let ranges = ranges.split(',').map(range).collect::<Result<_, _>>()?;
        Ok(Self { glob: glob(name)?, ranges })
    }

    /// The rectangle of a tensor.
    fn rectangle(&self, tensor: &Tensor<'_>) -> Result<Rectangle> {
        let shape = tensor.whole_shape();
        if self.ranges.len() > shape.len() {
            let (name, ranges) = (Escaped(tensor.name), self.ranges.len());
            return Err(Error::InvalidArgument(format!("tensor {name} of {shape:?} has no {ranges} dimensions")));
        }
        let mut rectangle = Rectangle::whole(shape);
        for (dim, &(start, end)) in self.ranges.iter().enumerate() {
            let start = start.unwrap_or(0);
            rectangle.origin[dim] = start;
            rectangle.extent[dim] = end.unwrap_or(shape[dim]).saturating_sub(start);
        }
        Ok(rectangle)
    }
}
