//! `tpde inspect`: what a pair holds, from its index alone.

use super::text::{self, BOLD};
use anyhow::Context;
use clap::Args;
use serde::Serialize;
use std::cmp::Reverse;
use std::fmt;
use std::path::PathBuf;
use tpde::delta::TensorReport;
use tpde::error::Escaped;
use tpde::format::{BaseKind, FileKind};
use tpde::reader::PairPaths;
use tpde::{Codec, Pair, Result, ValidatedIndex};

/// Show what a pair holds
///
/// The largest payloads come first. Cheap: reads the index and the blob's header, no payload.
#[derive(Args)]
pub struct Inspect {
    /// The pair: its name, or either file
    #[arg(value_name = "PAIR")]
    pub pair: PathBuf,
    /// Only the table of tensors
    #[arg(long, conflicts_with = "chunks")]
    pub tensors: bool,
    /// Only the chunk records, in the order of the index map
    #[arg(long)]
    pub chunks: bool,
}

/// The parts that were asked for.
#[derive(Serialize)]
pub struct Report {
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chunks: Option<Vec<Chunk>>,
}

#[derive(Serialize)]
struct Summary {
    index: PathBuf,
    blob: PathBuf,
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

/// What a device needs to decode all of the pair.
#[derive(Serialize)]
struct Needs {
    /// Codecs that kernels decode.
    kernels: Vec<Codec>,
    /// Codecs whose payloads the processor expands on the way.
    expanded_by_host: Vec<Codec>,
    /// Bytes of index on the device, tables apart.
    index_bytes: u64,
    /// Bytes of payloads that go to the device where they stay as stored.
    payload_bytes: u64,
    /// Bytes of tensors on the device, out of place and in place.
    out_of_place_bytes: u64,
    in_place_bytes: u64,
    largest_tensor_bytes: u64,
    /// Tensors that cannot be changed in place.
    out_of_place_only: u64,
}

#[derive(Serialize)]
struct TargetFile {
    name: String,
    kind: FileKind,
    content_bytes: u64,
}

/// A record with what it belongs to.
#[derive(Serialize)]
struct Chunk {
    chunk: u32,
    tensor: String,
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
    pub fn run(&self) -> anyhow::Result<Report> {
        self.inspect().with_context(|| format!("inspect {}", text::path(&self.pair)))
    }

    fn inspect(&self) -> Result<Report> {
        let pair = Pair::open(&self.pair)?;
        let index = pair.index();
        if self.chunks {
            let chunks = index.tensors().flat_map(|tensor| {
                tensor.chunks().map(move |chunk| {
                    let record = &index.chunks()[chunk as usize];
                    let range = tensor.chunk_range(chunk);
                    Chunk {
                        chunk,
                        tensor: tensor.name.to_owned(),
                        output_offset: record.output_offset.get(),
                        lanes: range.end - range.start,
                        num_deltas: record.num_deltas.get(),
                        blob_offset: record.blob_offset.get(),
                        compressed_size: record.compressed_size.get(),
                        uncompressed_size: record.uncompressed_size.get(),
                        crc32: format!("{:08x}", record.crc32.get()),
                    }
                })
            });
            return Ok(Report { summary: None, tensors: None, chunks: Some(chunks.collect()) });
        }
        let mut tensors: Vec<_> = index.tensors().map(|tensor| TensorReport::new(index, &tensor)).collect();
        tensors.sort_by_key(|tensor| Reverse(tensor.payload_bytes)); // stable: names stay in order where payloads are equal
        let summary = (!self.tensors).then(|| {
            let header = index.header();
            let (base_bytes, target_bytes) = index.tensor_bytes();
            let stored_bytes = index.size() + header.blob_size;
            let paths = PairPaths::new(&self.pair);
            Summary {
                index: paths.index,
                blob: paths.blob,
                version: format!("{}.{}", header.version_major, header.version_minor),
                pair_digest: hex(index.pair_digest()),
                base_root: hex(index.base_root()),
                target_root: hex(index.target_root()),
                base_bytes,
                target_bytes,
                stored_bytes,
                index_bytes: index.size(),
                blob_bytes: header.blob_size,
                ratio: text::ratio(target_bytes, stored_bytes),
                lanes: tensors.iter().map(|tensor| tensor.lanes).sum(),
                changed: tensors.iter().map(|tensor| tensor.changed).sum(),
                chunks: header.chunk_count,
                tensors: header.tensor_count,
                files: index
                    .files()
                    .map(|file| TargetFile { name: file.name.to_owned(), kind: file.kind, content_bytes: file.content_size })
                    .collect(),
                device: needs(index),
            }
        });
        Ok(Report { summary, tensors: Some(tensors), chunks: None })
    }
}

fn needs(index: &ValidatedIndex) -> Needs {
    let used = |codec: &&Codec| index.tensors().any(|tensor| tensor.codec == **codec && tensor.chunk_count > 0);
    let (kernels, expanded_by_host) = Codec::ALL.iter().filter(used).partition(|codec| **codec != Codec::Zstd);
    let (base_bytes, target_bytes) = index.tensor_bytes();
    Needs {
        kernels,
        expanded_by_host,
        // Record, sums and tensor of each chunk.
        index_bytes: (32 + 16 + 4) * u64::from(index.header().chunk_count),
        payload_bytes: index.chunks().iter().map(|record| u64::from(record.compressed_size.get()).next_multiple_of(16)).sum(),
        out_of_place_bytes: base_bytes.saturating_add(target_bytes),
        in_place_bytes: target_bytes,
        largest_tensor_bytes: index.tensors().map(|tensor| tensor.bytes()).max().unwrap_or(0),
        out_of_place_only: index.tensors().filter(|tensor| tensor.base_kind == BaseKind::Prefix).count() as u64,
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(summary) = &self.summary {
            write!(f, "{summary}")?;
            writeln!(f)?;
        }
        if let Some(tensors) = &self.tensors {
            write_tensors(f, tensors)?;
        }
        if let Some(chunks) = &self.chunks {
            write_chunks(f, chunks)?;
        }
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{BOLD}{}{BOLD:#}, TPDE {}", text::path(&self.index.with_extension("")), self.version)?;
        let files = match &self.files[..] {
            [] => "none, tensors only".to_owned(),
            [lone] if lone.name.is_empty() && lone.kind.is_stored() => "one safetensors file".to_owned(),
            [lone] if lone.name.is_empty() => "one safetensors file, its header is the base's".to_owned(),
            files => {
                let names: Vec<_> = files.iter().map(|file| file.name.clone()).collect();
                format!("{}: {}", text::count(files.len() as u64), text::some(&names))
            }
        };
        text::facts(
            f,
            &[
                ("ratio", text::times(self.ratio)),
                (
                    "size",
                    format!(
                        "{} for {} of tensors: index {}, blob {}",
                        text::bytes(self.stored_bytes),
                        text::bytes(self.target_bytes),
                        text::bytes(self.index_bytes),
                        text::bytes(self.blob_bytes)
                    ),
                ),
                ("changed", format!("{} of {} lanes", text::share(self.changed, self.lanes), text::count(self.lanes))),
                (
                    "holds",
                    format!("{}, {}", text::counted(self.tensors.into(), "tensor"), text::counted(self.chunks.into(), "chunk")),
                ),
                ("files", files),
                ("base", if self.base_bytes == 0 { "none".into() } else { format!("{} of tensors", text::bytes(self.base_bytes)) }),
                ("digest", self.pair_digest.clone()),
            ],
        )
    }
}

fn write_tensors(f: &mut fmt::Formatter<'_>, tensors: &[TensorReport]) -> fmt::Result {
    let header = ["tensor, by bytes", "dtype", "shape", "base", "codec", "changed", "ratio", "bytes"];
    let row = |tensor: &TensorReport| {
        vec![
            Escaped(&tensor.name).to_string(),
            tensor.dtype.to_string(),
            shape(&tensor.shape),
            tensor.base_kind.to_string(),
            tensor.codec.to_string(),
            text::share(tensor.changed, tensor.lanes),
            text::times(text::ratio(tensor.bytes, tensor.payload_bytes)),
            text::count(tensor.payload_bytes),
        ]
    };
    let mut rows: Vec<_> = tensors.iter().map(row).collect();
    let sum = |of: fn(&TensorReport) -> u64| tensors.iter().map(of).sum();
    let payload = sum(|tensor| tensor.payload_bytes);
    rows.push(vec![
        text::counted(tensors.len() as u64, "tensor"),
        String::new(),
        String::new(),
        String::new(),
        String::new(),
        text::share(sum(|tensor| tensor.changed), sum(|tensor| tensor.lanes)),
        text::times(text::ratio(sum(|tensor| tensor.bytes), payload)),
        text::count(payload),
    ]);
    text::table(f, 5, &header, rows)
}

fn write_chunks(f: &mut fmt::Formatter<'_>, chunks: &[Chunk]) -> fmt::Result {
    let header = ["tensor", "chunk", "first lane", "lanes", "changed", "blob offset", "stored", "expanded", "crc32"];
    let row = |chunk: &Chunk| {
        vec![
            Escaped(&chunk.tensor).to_string(),
            chunk.chunk.to_string(),
            chunk.output_offset.to_string(),
            chunk.lanes.to_string(),
            chunk.num_deltas.to_string(),
            chunk.blob_offset.to_string(),
            chunk.compressed_size.to_string(),
            chunk.uncompressed_size.to_string(),
            chunk.crc32.clone(),
        ]
    };
    text::table(f, 1, &header, chunks.iter().map(row).collect())
}

fn shape(dims: &[u64]) -> String {
    match dims {
        [] => "scalar".into(),
        dims => dims.iter().map(u64::to_string).collect::<Vec<_>>().join("×"),
    }
}
