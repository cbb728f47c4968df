//! What verbs that read checkpoints and write files have in common.

use super::text;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::path::Path;
use tpde::{Checkpoint, Codec, EncodeOptions, Error, Favor, Layout, Result, SafetensorsCheckpoint};

/// How payloads are coded.
#[derive(Args)]
pub struct CodecArgs {
    /// Codec of the payloads; auto takes the smallest for each tensor. For a device: conditioned, which it decodes alone
    #[arg(long, default_value = "auto", value_parser = codecs())]
    codec: CodecChoice,
    /// Layout of codec zstd, which this implies; auto lets each chunk have what suits it
    #[arg(long, default_value = "auto", value_parser = layouts())]
    layout: LayoutChoice,
    /// Most lanes of a chunk, a power of two of at least 4096; small chunks decode in more parallel pieces
    #[arg(long, value_name = "N", default_value_t = EncodeOptions::default().chunk_lanes)]
    chunk_lanes: u64,
    /// What to favor in codec conditioned: speed codes fewer lanes where few change, and decodes faster on a device
    #[arg(long, default_value = Favor::default().name(), value_parser = favors())]
    favor: Favor,
}

#[derive(Clone)]
struct CodecChoice(Option<Codec>);

#[derive(Clone)]
struct LayoutChoice(Option<Layout>);

fn codecs() -> impl TypedValueParser<Value = CodecChoice> {
    PossibleValuesParser::new(std::iter::once("auto").chain(Codec::ALL.iter().map(|codec| codec.name())))
        .map(|name| CodecChoice(Codec::ALL.iter().copied().find(|codec| codec.name() == name)))
}

fn layouts() -> impl TypedValueParser<Value = LayoutChoice> {
    PossibleValuesParser::new(std::iter::once("auto").chain(Layout::ALL.iter().map(|layout| layout.name())))
        .map(|name| LayoutChoice(Layout::ALL.iter().copied().find(|layout| layout.name() == name)))
}

fn favors() -> impl TypedValueParser<Value = Favor> {
    PossibleValuesParser::new(Favor::ALL.iter().map(|favor| favor.name()))
        .map(|name| Favor::ALL.iter().copied().find(|favor| favor.name() == name).unwrap_or_default())
}

impl CodecArgs {
    pub fn options(&self) -> EncodeOptions {
        // Who names a layout means the codec that has layouts.
        let codec = self.codec.0.or(self.layout.0.map(|_| Codec::Zstd));
        EncodeOptions { codec, layout: self.layout.0, chunk_lanes: self.chunk_lanes, favor: self.favor, ..EncodeOptions::default() }
    }
}

/// Tells the base from the operand after it, which stands first where there is no base.
pub fn operands<'a>(first: &'a Path, second: Option<&'a Path>) -> (Option<&'a Path>, &'a Path) {
    match second {
        Some(second) => (Some(first), second),
        None => (None, first),
    }
}

/// Creates a folder where there is none.
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
