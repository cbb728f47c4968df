//! `tpde inspect`: describes a pair. Reads only its index, except with `--explain`.

use super::common::Common;
use super::explain::{self, Bytes, ExplainedTensor};
use super::inputs::{ExpectArgs, favors, open};
use super::text::{self, BOLD, JsonPath};
use anyhow::Context;
use clap::Args;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::cmp::Reverse;
use std::fmt;
use std::path::PathBuf;
use tpde::{
    BaseKind, Checkpoint, Codec, Escaped, Explain, Explanation, Favor, FileKind, FileSource, MemoryCheckpoint, Pair, PairPaths,
    PartReport, Result, TensorReport, ValidatedIndex,
};

/// Describe a pair
///
/// Tensors with the largest payloads come first. Reads the index and the blob's header, and no payload. Memory: at most the size
/// of the index, twice its expanded sections, and 250 bytes per tensor. An index of a few megabytes can expand to 256 MiB per
/// section.
///
/// --explain adds the purpose of the bytes of both files, per tensor, and the reason for each tensor's codec. It reads every
/// payload and checks its CRC-32, but decodes none. A pair does not say how large a tensor would be in another codec. To find
/// out, add --base or --no-base: every tensor that changes is rebuilt and encoded again with each codec, which takes as long as
/// apply and encode together. Memory: 200 bytes per tensor more, or 600 with a base.
///
/// --html writes a page. With --base it decodes every chunk that changes, and checks it as apply does. Memory: 500 bytes more for
/// each name of a tensor without its numbers.
#[derive(Args)]
pub struct Inspect {
    /// Pair: its name, or the path of either file
    #[arg(value_name = "PAIR")]
    pub pair: PathBuf,
    /// Print only the table of tensors
    #[arg(long, conflicts_with = "chunks")]
    pub tensors: bool,
    /// Print only the chunk records, in the order of the index map
    #[arg(long)]
    pub chunks: bool,
    /// Explain the purpose of the bytes, and the codec of each tensor; reads all payloads
    #[arg(long, conflicts_with = "chunks", group = "reads")]
    pub explain: bool,
    #[cfg(feature = "html")]
    /// Write a page with drawings to FILE: changes and sizes by layer, stored bytes, chunks, and with --base how far lanes move.
    /// The page is one file of HTML, without scripts
    #[arg(long, value_name = "FILE", conflicts_with_all = ["chunks", "tensors", "explain"], group = "reads")]
    pub html: Option<PathBuf>,
    #[cfg(feature = "html")]
    /// With --html: replace an existing file
    #[arg(short, long, requires = "html")]
    pub force: bool,
    /// The base checkpoint of the pair. With --explain, the codecs are compared with and without it. With --html, the page shows
    /// how far lanes move
    #[arg(long, value_name = "BASE", requires = "reads")]
    pub base: Option<PathBuf>,
    /// With --explain: compare the codecs, for a pair without a base
    #[arg(long, requires = "explain", conflicts_with = "base")]
    pub no_base: bool,
    /// With --base or --no-base: the --favor with which the pair was encoded, which the pair does not contain
    #[arg(long, requires = "explain", default_value = Favor::default().name(), value_parser = favors())]
    pub favor: Favor,
    #[command(flatten)]
    pub expect: ExpectArgs,
}

/// Pair, and the requested parts of the report. Rows are generated while printing and never stored, because an index of a few
/// megabytes can have gigabytes of rows.
pub struct InspectOutput {
    pair: Pair<FileSource>,
    summary: Option<Summary>,
    rows: Rows,
    explanation: Option<Explanation>,
}

enum Rows {
    /// Indices of the tensors, largest payloads first.
    Tensors(Vec<u32>),
    Chunks,
}

#[derive(Serialize)]
struct Summary {
    index: JsonPath,
    blob: JsonPath,
    version: String,
    pair_digest: String,
    base_root: String,
    target_root: String,
    base_bytes: u64,
    target_bytes: u64,
    stored_bytes: u64,
    index_bytes: u64,
    blob_bytes: u64,
    ratio: Option<f64>,
    lanes: u64,
    changed: u64,
    chunks: u32,
    tensors: u32,
    files: Vec<TargetFile>,
    device: Needs,
}

/// Requirements for decoding the whole pair on a device.
#[derive(Serialize)]
struct Needs {
    /// Codecs decoded by kernels.
    kernels: Vec<Codec>,
    /// Codecs whose payloads the CPU expands before the device decodes them.
    expanded_by_host: Vec<Codec>,
    /// Size of the index on the device in bytes, without tables.
    index_bytes: u64,
    /// Size in bytes of the payloads that are copied to the device as stored.
    payload_bytes: u64,
    /// Size of the tensors on the device in bytes, out of place and in place.
    out_of_place_bytes: u64,
    in_place_bytes: u64,
    largest_tensor_bytes: u64,
    /// Number of tensors that cannot be changed in place.
    out_of_place_only: u64,
}

#[derive(Serialize)]
struct TargetFile {
    name: String,
    kind: FileKind,
    content_bytes: u64,
}

/// A chunk record, with the name of its tensor.
#[derive(Serialize)]
struct Chunk<'a> {
    chunk: u32,
    tensor: &'a str,
    output_offset: u64,
    lanes: u64,
    num_deltas: u32,
    blob_offset: u64,
    compressed_size: u32,
    uncompressed_size: u32,
    crc32: String,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Inspect {
    pub fn run(&self, common: &Common) -> anyhow::Result<InspectOutput> {
        self.inspect(common).with_context(|| format!("inspect {}", text::path(&self.pair)))
    }

    fn inspect(&self, common: &Common) -> Result<InspectOutput> {
        let pair = self.expect.open(&self.pair)?;
        #[cfg(feature = "html")]
        if let Some(path) = &self.html {
            page::write(self, &pair, path, common)?;
        }
        if self.chunks {
            return Ok(InspectOutput { pair, summary: None, rows: Rows::Chunks, explanation: None });
        }
        let explanation = self.explain.then(|| self.explanation(&pair, common)).transpose()?;
        let index = pair.index();
        let payload_bytes = |place: &u32| TensorReport::new(index, &index.tensor(*place as usize)).payload_bytes;
        let mut places: Vec<_> = (0..index.tensor_count() as u32).collect();
        places.sort_by_cached_key(|place| Reverse(payload_bytes(place))); // stable: names break ties
        let summary = (!self.tensors).then(|| summary(index, PairPaths::new(&self.pair)));
        Ok(InspectOutput { pair, summary, rows: Rows::Tensors(places), explanation })
    }

    fn explanation(&self, pair: &Pair<FileSource>, common: &Common) -> Result<Explanation> {
        let base = self.base.as_deref().map(open).transpose()?;
        let none = MemoryCheckpoint::default();
        let base = match &base {
            Some(base) => Some(base as &dyn Checkpoint),
            None => self.no_base.then_some(&none as &dyn Checkpoint),
        };
        let explain = base.into_iter().fold(Explain::new(pair).favor(self.favor), Explain::base);
        let bar = common.bar("explain", explain.progress_bytes());
        let explanation = explain.progress(|bytes| bar.inc(bytes)).run()?;
        bar.finish_and_clear();
        Ok(explanation)
    }
}

fn summary(index: &ValidatedIndex, paths: PairPaths) -> Summary {
    let (major, minor) = index.version();
    let (base_bytes, target_bytes) = index.tensor_bytes();
    let stored_bytes = index.size() + index.blob_size();
    Summary {
        index: JsonPath(paths.index),
        blob: JsonPath(paths.blob),
        version: format!("{major}.{minor}"),
        pair_digest: hex(index.pair_digest()),
        base_root: hex(index.base_root()),
        target_root: hex(index.target_root()),
        base_bytes,
        target_bytes,
        stored_bytes,
        index_bytes: index.size(),
        blob_bytes: index.blob_size(),
        ratio: text::ratio(target_bytes, stored_bytes),
        lanes: index.tensors().map(|tensor| tensor.lanes).sum(),
        changed: index.chunks().map(|chunk| u64::from(chunk.num_deltas)).sum(),
        chunks: index.chunk_count(),
        tensors: index.tensor_count() as u32,
        files: index
            .files()
            .map(|file| TargetFile { name: file.name.to_owned(), kind: file.kind, content_bytes: file.content_size })
            .collect(),
        device: needs(index),
    }
}

impl InspectOutput {
    fn tensors<'a>(&'a self, places: &'a [u32]) -> impl Iterator<Item = TensorReport> + Clone + 'a {
        let index = self.pair.index();
        places.iter().map(move |&place| TensorReport::new(index, &index.tensor(place as usize)))
    }

    fn explained<'a>(
        &'a self,
        places: &'a [u32],
        explanation: &'a Explanation,
    ) -> impl Iterator<Item = ExplainedTensor<'a>> + Clone + 'a {
        let found = places.iter().map(|&place| &explanation.tensors[place as usize]);
        self.tensors(places).zip(found).map(|(tensor, found)| ExplainedTensor::new(tensor, found))
    }

    fn chunks(&self) -> impl Iterator<Item = Chunk<'_>> + Clone {
        let index = self.pair.index();
        (0..index.tensor_count()).map(|place| index.tensor(place)).flat_map(move |tensor| {
            tensor.chunks().map(move |chunk| {
                let record = index.chunk(chunk);
                let range = tensor.chunk_range(chunk);
                Chunk {
                    chunk,
                    tensor: tensor.name,
                    output_offset: record.output_offset,
                    lanes: range.end - range.start,
                    num_deltas: record.num_deltas,
                    blob_offset: record.blob_offset,
                    compressed_size: record.compressed_size,
                    uncompressed_size: record.uncompressed_size,
                    crc32: format!("{:08x}", record.crc32),
                }
            })
        })
    }
}

impl Serialize for InspectOutput {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut parts = serializer.serialize_map(None)?;
        if let Some(summary) = &self.summary {
            parts.serialize_entry("summary", summary)?;
        }
        if let Some(explanation) = &self.explanation {
            parts.serialize_entry("bytes", &Bytes::new(explanation))?;
            parts.serialize_entry("table_sets", &explanation.table_sets)?;
        }
        match (&self.rows, &self.explanation) {
            (Rows::Tensors(places), Some(explanation)) => {
                parts.serialize_entry("tensors", &Sequence(self.explained(places, explanation)))?;
            }
            (Rows::Tensors(places), None) => parts.serialize_entry("tensors", &Sequence(self.tensors(places)))?,
            (Rows::Chunks, _) => parts.serialize_entry("chunks", &Sequence(self.chunks()))?,
        }
        parts.end()
    }
}

/// Serializes an iterator as a sequence, one item at a time.
struct Sequence<I>(I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for Sequence<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.clone())
    }
}

fn needs(index: &ValidatedIndex) -> Needs {
    let used = |codec: &&Codec| index.tensors().any(|tensor| tensor.codec == **codec && tensor.chunk_count > 0);
    let (kernels, expanded_by_host) = Codec::ALL.iter().filter(used).partition(|codec| **codec != Codec::Zstd);
    let (base_bytes, target_bytes) = index.tensor_bytes();
    Needs {
        kernels,
        expanded_by_host,
        // A record, two sums and the tensor's index per chunk.
        index_bytes: (32 + 16 + 4) * u64::from(index.chunk_count()),
        payload_bytes: index.chunks().map(|chunk| u64::from(chunk.compressed_size).next_multiple_of(16)).sum(),
        out_of_place_bytes: base_bytes.saturating_add(target_bytes),
        in_place_bytes: target_bytes,
        largest_tensor_bytes: index.tensors().map(|tensor| tensor.bytes()).max().unwrap_or(0),
        out_of_place_only: index.tensors().filter(|tensor| tensor.base_kind == BaseKind::Prefix).count() as u64,
    }
}

impl fmt::Display for InspectOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(summary) = &self.summary {
            write!(f, "{summary}")?;
            writeln!(f)?;
        }
        match (&self.rows, &self.explanation) {
            (Rows::Tensors(places), Some(explanation)) => explain::write(f, explanation, self.explained(places, explanation)),
            (Rows::Tensors(places), None) => write_tensors(f, self.tensors(places)),
            (Rows::Chunks, _) => write_chunks(f, self.chunks()),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{BOLD}{}{BOLD:#}, TPDE {}", text::path(&self.index.with_extension("")), self.version)?;
        text::facts(f, &self.facts())
    }
}

impl Summary {
    fn facts(&self) -> [(&'static str, String); 7] {
        let files = match &self.files[..] {
            [] => "none, tensors only".to_owned(),
            [lone] if lone.name.is_empty() && lone.kind.is_stored() => "one safetensors file".to_owned(),
            [lone] if lone.name.is_empty() => "one safetensors file, its header is the base's".to_owned(),
            files => {
                let names: Vec<_> = files.iter().map(|file| file.name.clone()).collect();
                format!("{}: {}", text::count(files.len() as u64), text::some(&names))
            }
        };
        [
            ("ratio", text::times(self.ratio)),
            ("size", text::pair_size(self.target_bytes, self.index_bytes, self.blob_bytes)),
            ("changed", format!("{} of {} lanes", text::share(self.changed, self.lanes), text::count(self.lanes))),
            ("holds", format!("{}, {}", text::counted(self.tensors.into(), "tensor"), text::counted(self.chunks.into(), "chunk"))),
            ("files", files),
            ("base", if self.base_bytes == 0 { "none".into() } else { format!("{} of tensors", text::bytes(self.base_bytes)) }),
            ("digest", self.pair_digest.clone()),
        ]
    }
}

fn write_tensors(f: &mut fmt::Formatter<'_>, tensors: impl Iterator<Item = TensorReport> + Clone) -> fmt::Result {
    let header = ["tensor, by bytes", "dtype", "shape", "base", "codec", "changed", "ratio", "bytes"];
    let row = |tensor: TensorReport| {
        vec![
            Escaped(&tensor.name).to_string(),
            tensor.dtype.to_string(),
            shape(&tensor.shape, tensor.part.as_ref()),
            tensor.base_kind.to_string(),
            tensor.codec.to_string(),
            text::share(tensor.changed, tensor.lanes),
            text::times(text::ratio(tensor.bytes, tensor.payload_bytes)),
            text::count(tensor.payload_bytes),
        ]
    };
    let (mut count, mut changed, mut lanes, mut bytes, mut payload) = (0, 0, 0, 0, 0);
    for tensor in tensors.clone() {
        count += 1;
        changed += tensor.changed;
        lanes += tensor.lanes;
        bytes += tensor.bytes;
        payload += tensor.payload_bytes;
    }
    let all = vec![
        text::counted(count, "tensor"),
        String::new(),
        String::new(),
        String::new(),
        String::new(),
        text::share(changed, lanes),
        text::times(text::ratio(bytes, payload)),
        text::count(payload),
    ];
    text::table(f, 5, &header, tensors.map(row).chain([all]))
}

fn write_chunks<'a>(f: &mut fmt::Formatter<'_>, chunks: impl Iterator<Item = Chunk<'a>> + Clone) -> fmt::Result {
    let header = ["tensor", "chunk", "first lane", "lanes", "changed", "blob offset", "stored", "expanded", "crc32"];
    let row = |chunk: Chunk<'_>| {
        vec![
            Escaped(chunk.tensor).to_string(),
            chunk.chunk.to_string(),
            chunk.output_offset.to_string(),
            chunk.lanes.to_string(),
            chunk.num_deltas.to_string(),
            chunk.blob_offset.to_string(),
            chunk.compressed_size.to_string(),
            chunk.uncompressed_size.to_string(),
            chunk.crc32,
        ]
    };
    text::table(f, 1, &header, chunks.map(row))
}

/// The dims as text, cut to a maximum length like a name.
fn shape(dims: &[u64], part: Option<&PartReport>) -> String {
    let product = |dims: &[u64]| dims.iter().map(u64::to_string).collect::<Vec<_>>().join("×");
    match (dims, part) {
        ([], _) => "scalar".into(),
        (dims, None) => Escaped(&product(dims)).to_string(),
        (dims, Some(part)) => {
            let origin = part.origin.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            Escaped(&format!("{} at {origin} of {}", product(dims), product(&part.whole))).to_string()
        }
    }
}

/// The page of `--html`.
#[cfg(feature = "html")]
mod page {
    use crate::common::Common;
    use crate::html::{self, Figures};
    use crate::inputs::open;
    use crate::inspect::{Inspect, Summary, summary};
    use crate::text;
    use std::path::Path;
    use std::time::SystemTime;
    use tpde::{Apply, Checkpoint, Escaped, FileSource, Moves, OutputFile, Pair, PairPaths, Result};

    /// Writes a page that describes the pair.
    pub fn write(inspect: &Inspect, pair: &Pair<FileSource>, path: &Path, common: &Common) -> Result<()> {
        let base = inspect.base.as_deref().map(open).transpose()?;
        let paths = PairPaths::new(&inspect.pair);
        let inputs: Vec<_> = base.iter().flat_map(|base| base.paths()).chain([paths.index, paths.blob]).collect();
        let file = OutputFile::create(path, &inputs, inspect.force)?;
        let moves = base.map(|base| moves(pair, &base, common)).transpose()?;
        let summary = summary(pair.index(), PairPaths::new(&inspect.pair));
        let page = html::page(&title(inspect, &summary), &summary.facts(), &Figures::new(pair.index(), moves));
        file.publish(page.as_bytes())
    }

    /// Name of the pair, its base as far as it is known, its target, and when its index was written. Names are cut.
    fn title(inspect: &Inspect, summary: &Summary) -> String {
        const MOST: usize = 60;
        let name = |path: &Path| path.file_name().map(|name| Escaped(&name.to_string_lossy()).to_string()).unwrap_or_default();
        let base = match &inspect.base {
            Some(path) => name(path),
            None if summary.base_bytes == 0 => "no base".into(),
            None => format!("base {}", &summary.base_root[..8]),
        };
        let target = match &summary.files[..] {
            [first, rest @ ..] if !first.name.is_empty() => {
                let others =
                    if rest.is_empty() { String::new() } else { format!(" and {}", text::counted(rest.len() as u64, "file")) };
                format!("{}{others}", html::shortened(&Escaped(&first.name).to_string(), MOST))
            }
            _ => format!("target {}", &summary.target_root[..8]),
        };
        let written = summary.index.metadata().and_then(|metadata| metadata.modified()).ok();
        let written = written.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let written = written.map_or("–".into(), |time| text::date(time.as_secs()));
        let pair = name(&summary.index.with_extension(""));
        format!("{}: {} → {target}, {written} UTC", html::shortened(&pair, MOST), html::shortened(&base, MOST))
    }

    /// How far the lanes of all tensors move.
    fn moves(pair: &Pair<FileSource>, base: &dyn Checkpoint, common: &Common) -> Result<Moves> {
        let bar = common.bar("inspect", pair.index().tensor_bytes().1);
        let apply = Apply::new(pair).base(base).progress(|bytes| bar.inc(bytes));
        let mut names: Vec<_> = pair.index().tensors().map(|tensor| tensor.name.to_owned()).collect();
        names.dedup(); // the parts of a tensor follow one another
        let mut all = Moves::default();
        for name in names {
            all.add(&apply.moves(&name)?);
        }
        bar.finish_and_clear();
        Ok(all)
    }
}
