//! Arguments and functions shared by verbs that read checkpoints and write files.

use super::text;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use globset::{Glob, GlobSet};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tpde::{
    Chain, Checkpoint, Codec, CodecChoice, EncodeOptions, Error, Escaped, Favor, FileSource, Layout, MemoryCheckpoint, OpenOptions,
    Pair, Rectangle, Result, SafetensorsCheckpoint, Source, Tensor, UnknownName, ValidatedIndex,
};

/// Coding of payloads.
#[derive(Args)]
pub struct CodecArgs {
    /// Codec of the payloads. auto and device choose a codec per tensor, and whether it uses its base. Any other value is the
    /// codec of all tensors
    #[arg(long, default_value = CodecChoice::default().name(), value_parser = named(CodecChoice::ALL, CodecChoice::name))]
    codec: CodecChoice,
    /// Layout of codec zstd; implies --codec zstd. auto chooses a layout per chunk
    #[arg(long, default_value = "auto", value_parser = layouts())]
    layout: LayoutChoice,
    /// Maximum number of lanes per chunk: a power of two, at least 4096. More chunks can be decoded in parallel if chunks are
    /// small. Below the default, --favor ratio also divides chunks into more streams
    #[arg(long, value_name = "N", default_value_t = EncodeOptions::default().chunk_lanes)]
    chunk_lanes: u64,
    /// Goal of codec conditioned
    #[arg(long, default_value = Favor::default().name(), value_parser = favors())]
    favor: Favor,
}

#[derive(Clone)]
struct LayoutChoice(Option<Layout>);

/// Returns a parser for the names of these values. The help lists all names.
pub fn named<T>(all: &'static [T], name: fn(T) -> &'static str) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = UnknownName> + Copy + Send + Sync,
{
    PossibleValuesParser::new(all.iter().map(|&value| name(value))).try_map(|name| name.parse())
}

fn layouts() -> impl TypedValueParser<Value = LayoutChoice> {
    PossibleValuesParser::new(std::iter::once("auto").chain(Layout::ALL.iter().map(|layout| layout.name())))
        .map(|name| LayoutChoice(name.parse().ok()))
}

pub fn favors() -> impl TypedValueParser<Value = Favor> {
    named(Favor::ALL, Favor::name)
}

/// Returns the end of the help text: the purpose of each value of `--codec` and `--favor`.
pub fn jobs() -> String {
    let codecs = CodecChoice::ALL.iter().map(|choice| ("--codec", choice.name(), choice.job(), *choice == CodecChoice::default()));
    let favors = Favor::ALL.iter().map(|favor| ("--favor", favor.name(), favor.job(), *favor == Favor::default()));
    let mut table = "Purpose of each value:\n".to_owned();
    for (option, name, job, default) in codecs.chain(favors) {
        let default = if default { " [default]" } else { "" };
        table += &format!("  {option} {name:<13}{job}{default}\n");
    }
    table
}

impl CodecArgs {
    pub fn options(&self) -> EncodeOptions {
        // A layout implies codec zstd.
        let codec = match (self.codec, self.layout.0) {
            (CodecChoice::Auto, Some(_)) => Codec::Zstd.into(),
            (codec, _) => codec,
        };
        EncodeOptions::default().codec(codec).layout(self.layout.0).chunk_lanes(self.chunk_lanes).favor(self.favor)
    }
}

/// Restricts a verb to the pair with this digest.
#[derive(Args)]
pub struct ExpectArgs {
    /// Pair digest that the pair must have: 64 hexadecimal digits, as inspect prints them. It is compared before anything of the
    /// pair is parsed. For several pairs, the digest of the last one: what is rebuilt must have the digests that it states
    #[arg(long, value_name = "DIGEST", value_parser = digest)]
    expect: Option<[u8; 32]>,
}

impl ExpectArgs {
    /// Opens pairs that are applied one after the other. The last one must have the digest. If the bytes of one of several pairs
    /// are at fault, the error names it.
    pub fn open_chain<'a, B>(&self, paths: impl IntoIterator<Item = &'a Path>, open: OpenPair<B>) -> Result<Vec<Pair<B>>> {
        let paths: Vec<_> = paths.into_iter().collect();
        let Some((last, earlier)) = paths.split_last() else { return Ok(Vec::new()) };
        let count = paths.len();
        let last = open(last, &self.options()).map_err(|error| error.in_step(count, count, last))?;
        let any = OpenOptions::default();
        let earlier = earlier.iter().zip(1..).map(|(path, n)| open(path, &any).map_err(|error| error.in_step(n, count, path)));
        earlier.chain([Ok(last)]).collect()
    }

    /// Opens the pair at `path`.
    pub fn open(&self, path: &Path) -> Result<Pair<FileSource>> {
        read_pair(path, &self.options())
    }

    fn options(&self) -> OpenOptions {
        self.expect.map_or_else(OpenOptions::default, |digest| OpenOptions::default().expect(digest))
    }
}

/// Opens a pair.
pub type OpenPair<B> = fn(&Path, &OpenOptions) -> Result<Pair<B>>;

/// Opens a pair whose blob is read.
pub fn read_pair(path: &Path, options: &OpenOptions) -> Result<Pair<FileSource>> {
    Pair::open_with(path, options, &|_| {})
}

/// Opens a pair whose blob is mapped.
#[cfg(feature = "mmap")]
#[expect(unsafe_code)]
pub fn map_pair(path: &Path, options: &OpenOptions) -> Result<Pair<tpde::MappedSource>> {
    // SAFETY: only `--mmap` leads here. Its help states the condition, and who passes it promises that the blob stays as it is.
    unsafe { Pair::open_mapped(path, options, &|_| {}) }
}

/// Selects how blobs are read.
#[cfg(feature = "mmap")]
#[derive(Args)]
pub struct MapArgs {
    /// Map the blobs of pairs instead of reading them, which is faster if they are cached and only checked, not decoded. Nothing
    /// may change a blob meanwhile: if one is cut short, a signal (SIGBUS) ends tpde
    #[arg(long)]
    pub mmap: bool,
}

/// A base and pairs that are applied one after the other.
#[derive(Args)]
pub struct ChainArgs {
    /// Base checkpoint of the first pair
    #[arg(value_name = "BASE", required = true)]
    first: PathBuf,
    /// Pairs, in the order in which they are applied: their names, or the path of either file of each
    #[arg(value_name = "PAIR", required_unless_present = "no_base")]
    rest: Vec<PathBuf>,
    /// The first pair needs no base
    #[arg(long)]
    pub no_base: bool,
    #[command(flatten)]
    expect: ExpectArgs,
}

/// The opened operands of a verb that takes a base and pairs.
pub struct OpenedChain<B = FileSource> {
    pub pairs: Vec<Pair<B>>,
    base: Option<SafetensorsCheckpoint>,
}

/// A base without tensors.
pub static EMPTY: MemoryCheckpoint<'static> = MemoryCheckpoint::EMPTY;

impl<B> OpenedChain<B> {
    /// The base; without tensors if the first pair needs none.
    pub fn base(&self) -> &dyn Checkpoint {
        self.base.as_ref().map_or(&EMPTY, |base| base)
    }

    /// A command that copies the other files of the base's folder into `output`.
    pub fn copy(&self, output: &Path) -> Option<String> {
        let base = self.base.as_ref().filter(|_| output.is_dir())?;
        let missing: Vec<_> = base.not_included().iter().filter(|name| !output.join(name).exists()).cloned().collect();
        text::copy(base.path(), &missing, &text::quoted(output.to_str()?)?)
    }
}

/// The last pair and its base, after checking that the pairs fit. The base of one pair is checked when the pair is applied.
pub fn last_of<'a, B: Source>(base: &'a dyn Checkpoint, pairs: &'a [Pair<B>]) -> Result<(&'a Pair<B>, Chain<'a, B>)> {
    let last = pairs.last().ok_or_else(|| Error::InvalidArgument("no pair is given".into()))?;
    let chain = if pairs.len() > 1 { Chain::new(base, pairs)?.without_last() } else { Chain::new(base, [])? };
    Ok((last, chain))
}

impl ChainArgs {
    /// The last pair.
    pub fn last(&self) -> &Path {
        self.rest.last().unwrap_or(&self.first)
    }

    /// The pairs as messages name them: the path of one, or the number of several.
    pub fn shown(&self) -> String {
        let last = self.last();
        match self.rest.len() + usize::from(self.no_base) {
            0 | 1 => text::path(last),
            count => format!("{count} pairs"),
        }
    }

    /// Opens the pairs, then the base. `--expect` is about the last pair.
    pub fn open<B>(&self, pair: OpenPair<B>) -> Result<OpenedChain<B>> {
        let (base, pairs) = match self.no_base {
            true => (None, std::iter::once(&self.first).chain(&self.rest).collect::<Vec<_>>()),
            false => (Some(&self.first), self.rest.iter().collect()),
        };
        let pairs = self.expect.open_chain(pairs.into_iter().map(PathBuf::as_path), pair)?;
        Ok(OpenedChain { pairs, base: base.map(|base| open(base)).transpose()? })
    }
}

fn digest(text: &str) -> Result<[u8; 32], &'static str> {
    let digits = text.as_bytes().as_chunks::<2>().0.iter().map(|pair| {
        let digit = |byte: u8| (byte as char).to_digit(16);
        Some((digit(pair[0])? << 4 | digit(pair[1])?) as u8)
    });
    let bytes: Option<Vec<u8>> = digits.collect();
    bytes.filter(|_| text.len() == 64).and_then(|bytes| bytes.try_into().ok()).ok_or("expected 64 hexadecimal digits")
}

/// Splits one or two positional arguments into base and operand. A single argument is the operand.
pub fn operands<'a>(first: &'a Path, second: Option<&'a Path>) -> (Option<&'a Path>, &'a Path) {
    match second {
        Some(second) => (Some(first), second),
        None => (None, first),
    }
}

/// Creates a folder if it does not exist.
pub fn create_folder(path: &Path) -> Result<()> {
    let error = |source| Error::Io { action: "use as a folder", path: path.to_owned(), source };
    if path.exists() && !path.is_dir() {
        return Err(error(std::io::ErrorKind::NotADirectory.into()));
    }
    std::fs::create_dir_all(path).map_err(error)
}

pub fn open(path: &Path) -> Result<SafetensorsCheckpoint> {
    let checkpoint = SafetensorsCheckpoint::open(path)?;
    tracing::info!(path = text::path(path), tensors = checkpoint.tensors().len(), bytes = checkpoint.file_bytes(), "checkpoint");
    Ok(checkpoint)
}

/// Parses a pattern. The error does not quote the pattern, because clap's message about the argument already does.
pub fn glob(text: &str) -> Result<Glob, String> {
    Glob::new(text).map_err(|e| e.kind().to_string())
}

/// Compiles patterns for names of tensors. Each must match a tensor of the pair, so that a mistyped pattern is an error.
pub fn matchers(globs: &[Glob], index: &ValidatedIndex) -> Result<Vec<GlobSet>> {
    let compiled = globs.iter().map(|glob| {
        // `Glob::compile_matcher` would panic on a pattern that is too large or nested too deeply.
        let matcher = GlobSet::builder()
            .add(glob.clone())
            .build()
            .map_err(|e| Error::InvalidArgument(format!("pattern {} is too large: {}", Escaped(glob.glob()), e.kind())))?;
        if index.tensors().any(|tensor| matcher.is_match(tensor.name)) {
            return Ok(matcher);
        }
        Err(Error::InvalidArgument(format!("no tensor of the pair matches {}", Escaped(glob.glob()))))
    });
    compiled.collect()
}

/// A rectangle of the tensors whose names match.
#[derive(Clone)]
pub struct PartArg {
    glob: Glob,
    /// First index and end in each dimension; `None` is the tensor's.
    ranges: Vec<(Option<u64>, Option<u64>)>,
}

impl PartArg {
    pub fn parse(text: &str) -> Result<Self, String> {
        let expected = "expected GLOB=[RANGES], as in '*.o_proj.weight=[:, 0:512]'";
        let (name, ranges) = text.strip_suffix(']').and_then(|text| text.rsplit_once("=[")).ok_or(expected)?;
        let bound = |text: &str| match text.trim() {
            "" => Ok(None),
            digits => digits.parse().map(Some).map_err(|_| expected),
        };
        let range = |text: &str| {
            let (start, end) = text.split_once(':').ok_or(expected)?;
            let (start, end) = (bound(start)?, bound(end)?);
            match (start, end) {
                (Some(start), Some(end)) if start > end => Err(format!("range {start}:{end} starts after its end")),
                range => Ok(range),
            }
        };
        let ranges = ranges.split(',').map(range).collect::<Result<_, String>>()?;
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

/// The rectangles of the tensors whose names match. Each pattern must match a tensor of the pair.
pub fn rectangles(parts: &[PartArg], index: &ValidatedIndex) -> Result<BTreeMap<String, Vec<Rectangle>>> {
    let globs: Vec<_> = parts.iter().map(|part| part.glob.clone()).collect();
    let mut rectangles: BTreeMap<String, Vec<Rectangle>> = BTreeMap::new();
    for (glob, part) in matchers(&globs, index)?.iter().zip(parts) {
        let mut names = HashSet::new();
        for tensor in index.tensors().filter(|tensor| glob.is_match(tensor.name) && names.insert(tensor.name)) {
            rectangles.entry(tensor.name.to_owned()).or_default().push(part.rectangle(&tensor)?);
        }
    }
    Ok(rectangles)
}
