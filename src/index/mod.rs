//! The index: validated once, then trusted (spec sections 5 to 10 and steps 1 to 6 of section 13).
//!
//! [`ValidatedIndex::parse`] is the only way to get one, and the only thing that a decoder accepts.

#![forbid(unsafe_code)]

mod files;
mod header;
mod parts;
mod records;
mod tables;
mod tensors;

pub use parts::IndexParts;

pub(crate) use files::{FileNames, is_file_name};
pub(crate) use tables::MAX_TABLE_SETS;
pub(crate) use tensors::check_holdable;

use crate::codec::{Codec, TableSet};
use crate::error::{Error, Result, hex};
use crate::format::{
    BaseKind, ChunkMetadata, ChunkSums, DIGEST_SIZE, FileKind, INDEX_HEADER_SIZE, IndexHeader, PAIR_DIGEST_SIZE, SECTION_ALIGN,
    Section, TensorDigests,
};
use crate::lane::Dtype;
use crate::limits::Limits;
use crate::source::{Buffer, FileSource, Source};
use std::ops::Range;
use zerocopy::FromBytes;

/// An index that satisfies every rule of the spec that can be checked without the blob and the base.
///
/// It holds the bytes of the file, in which the flat arrays are read in place, and the expanded tables.
#[derive(Debug)]
pub struct ValidatedIndex {
    bytes: Buffer,
    header: IndexHeader,
    tensors: tensors::TensorTable,
    tables: tables::TableSets,
    files: files::FileTable,
    digest: [u8; 32],
}

impl ValidatedIndex {
    /// Parses and validates the bytes of a `.tpde-index`.
    ///
    /// Cost: one BLAKE3 pass over the bytes and one linear pass over the records; a million records take some 15 ms.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the first rule that is broken, in the order of section 13; [`Error::Limit`] if the index is
    /// larger than `limits` allow.
    pub fn parse(bytes: impl Into<Buffer>, limits: &Limits) -> Result<Self> {
        let bytes = bytes.into();
        let header = header::parse(&bytes, bytes.len() as u64, limits)?;
        let digest = header::check_digest(&bytes)?;
        header::check_padding(&bytes, &header)?;
        let mut tensors = tensors::TensorTable::parse(&header::expand(&bytes, &header, Section::Tensors)?, &header)?;
        let tables = tables::TableSets::parse(&header::expand(&bytes, &header, Section::Tables)?, &mut tensors)?;
        let digests = &stored(&bytes, &header, Section::Digests)[crate::format::ROOTS_SIZE as usize..];
        tensors.check_digests(digests_of(digests))?;
        let files = files::FileTable::parse(&header::expand(&bytes, &header, Section::Files)?, &header)?;
        let index = Self { bytes, header, tensors, tables, files, digest };
        records::validate(&index)?;
        Ok(index)
    }

    /// Reads an index file: its header first, so that a file that is no index of its size is refused before it is read whole.
    ///
    /// # Errors
    /// As [`ValidatedIndex::parse`], and [`Error::Io`].
    pub(crate) fn read(file: &FileSource, limits: &Limits) -> Result<Self> {
        let mut head = [0; INDEX_HEADER_SIZE as usize];
        let head = &mut head[..file.size().min(INDEX_HEADER_SIZE.into()) as usize];
        file.read(0, head)?;
        header::parse(head, file.size(), limits)?;
        // The header is parsed again: the file may have changed.
        Self::parse(file.read_all("size of the index", limits.index_size)?, limits)
    }

    /// The header as it stands in the file.
    pub fn header(&self) -> &IndexHeader {
        &self.header
    }

    /// The pair digest: identifies the pair, quoted by its blob.
    pub fn pair_digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// The bytes of the file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Bytes of the index file.
    pub fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The index map: one record a chunk, in place.
    pub fn chunks(&self) -> &[ChunkMetadata] {
        <[ChunkMetadata]>::ref_from_bytes(stored(&self.bytes, &self.header, Section::Chunks)).unwrap_or(&[])
    }

    /// The chunk sums, one entry a record, in place.
    pub fn sums(&self) -> &[ChunkSums] {
        <[ChunkSums]>::ref_from_bytes(stored(&self.bytes, &self.header, Section::Sums)).unwrap_or(&[])
    }

    /// The 32-byte root over all base tensors.
    pub fn base_root(&self) -> &[u8] {
        &stored(&self.bytes, &self.header, Section::Digests)[..32]
    }

    /// The 32-byte root over all target tensors.
    pub fn target_root(&self) -> &[u8] {
        &stored(&self.bytes, &self.header, Section::Digests)[32..64]
    }

    /// Number of tensors.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The tensor at this place of the table, names ascending.
    ///
    /// # Panics
    /// If `i` is not below [`ValidatedIndex::tensor_count`].
    pub fn tensor(&self, i: usize) -> Tensor<'_> {
        let digests = &stored(&self.bytes, &self.header, Section::Digests)[crate::format::ROOTS_SIZE as usize..];
        self.tensors.view(i, &digests_of(digests)[i], &self.tables)
    }

    /// All tensors, names ascending.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        (0..self.tensor_count()).map(|i| self.tensor(i))
    }

    /// The tensor of this name. Cost: a binary search.
    pub fn find(&self, name: &str) -> Option<Tensor<'_>> {
        self.tensors.find(name).map(|i| self.tensor(i))
    }

    /// The table sets of codec `conditioned`, which tensors share.
    pub fn table_sets(&self) -> &[TableSet] {
        self.tables.all()
    }

    /// The place among [`ValidatedIndex::table_sets`] of the set that the tensor at place `i` of the table uses.
    ///
    /// # Panics
    /// If `i` is not below [`ValidatedIndex::tensor_count`].
    pub fn table_set(&self, i: usize) -> Option<usize> {
        self.tensors.table_set(i)
    }

    /// Bytes of the index by purpose; they add up to [`ValidatedIndex::size`].
    pub fn parts(&self) -> IndexParts {
        let stored = |section| self.header.section(section).stored_size;
        IndexParts {
            header: u64::from(INDEX_HEADER_SIZE) + PAIR_DIGEST_SIZE,
            records: stored(Section::Chunks),
            sums: stored(Section::Sums),
            digests: stored(Section::Digests),
            tensors: stored(Section::Tensors),
            files: stored(Section::Files),
            tables: stored(Section::Tables),
            // Each section begins at a multiple of SECTION_ALIGN.
            padding: Section::ALL.iter().map(|&section| stored(section).wrapping_neg() % SECTION_ALIGN).sum(),
        }
    }

    /// The target files that the pair can rebuild, none if it holds tensors only.
    pub fn files(&self) -> impl ExactSizeIterator<Item = TargetFile<'_>> {
        self.files.iter()
    }

    /// Bytes of all base tensors that decoding needs, and of all target tensors.
    pub fn tensor_bytes(&self) -> (u64, u64) {
        self.tensors().fold((0, 0), |(b, t), tensor| (b.saturating_add(tensor.base_bytes()), t.saturating_add(tensor.bytes())))
    }
}

fn digests_of(bytes: &[u8]) -> &[TensorDigests] {
    <[TensorDigests]>::ref_from_bytes(bytes).unwrap_or(&[])
}

/// A section's bytes as stored; in bounds because [`header::parse`] has said so.
fn stored<'a>(bytes: &'a [u8], header: &IndexHeader, section: Section) -> &'a [u8] {
    let entry = header.section(section);
    &bytes[entry.offset as usize..][..entry.stored_size as usize]
}

/// One tensor of a pair.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Place in the table.
    pub place: usize,
    /// Name in the target.
    pub name: &'a str,
    /// Name of its base tensor; equal to `name` unless it was renamed. Meaningless for [`BaseKind::None`].
    pub base_name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Dims; none for a scalar.
    pub shape: &'a [u64],
    /// Where its base lanes come from.
    pub base_kind: BaseKind,
    /// Parameter of the base kind: rows of the base for [`BaseKind::Prefix`].
    pub base_param: u64,
    /// Codec of its payloads.
    pub codec: Codec,
    /// Tables of codec `conditioned`, if it has some.
    pub tables: Option<&'a TableSet>,
    /// The place of these tables in [`ValidatedIndex::table_sets`].
    #[cfg(feature = "cuda")]
    pub(crate) table_set: Option<usize>,
    /// Lanes of the tensor.
    pub lanes: u64,
    /// Lanes of a chunk.
    pub chunk_lanes: u64,
    /// Place of its first chunk in the index map.
    pub first_chunk: u32,
    /// Number of its chunks.
    pub chunk_count: u32,
    /// Digests before and after.
    pub digests: &'a TensorDigests,
}

impl Tensor<'_> {
    /// Bytes of a lane.
    pub fn lane_bytes(&self) -> usize {
        self.dtype.lane_bytes()
    }

    /// Bytes of an element; 1 for packed dtypes.
    pub fn element_bytes(&self) -> usize {
        self.dtype.bits().div_ceil(8) as usize
    }

    /// Bytes of the target tensor.
    pub fn bytes(&self) -> u64 {
        self.lanes * self.lane_bytes() as u64
    }

    /// Places of its chunks in the index map.
    pub fn chunks(&self) -> Range<u32> {
        self.first_chunk..self.first_chunk + self.chunk_count
    }

    /// The lanes of the chunk at this place of the index map, which must be one of [`Tensor::chunks`].
    pub fn chunk_range(&self, chunk: u32) -> Range<u64> {
        let start = u64::from(chunk - self.first_chunk) * self.chunk_lanes;
        start..(start + self.chunk_lanes).min(self.lanes)
    }

    /// Shape that the base tensor must have; `None` without a base.
    pub fn base_shape(&self) -> Option<Vec<u64>> {
        match self.base_kind {
            BaseKind::None => None,
            BaseKind::Same => Some(self.shape.to_vec()),
            BaseKind::Prefix => {
                let mut shape = self.shape.to_vec();
                shape[0] = self.base_param;
                Some(shape)
            }
        }
    }

    /// Lanes of the base tensor; 0 without a base.
    pub fn base_lanes(&self) -> u64 {
        // The table was refused if this did not fit.
        self.base_shape().and_then(|shape| self.dtype.lanes(&shape)).unwrap_or(0)
    }

    /// Bytes of the base tensor; 0 without a base.
    pub fn base_bytes(&self) -> u64 {
        self.base_lanes() * self.lane_bytes() as u64
    }

    /// Target digest, hexadecimal.
    pub fn target_digest(&self) -> String {
        hex(&self.digests.target_digest)
    }

    /// Lanes that hold a range of elements, and the chunks that hold those.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the range is not inside the tensor, or splits a byte of a packed dtype.
    pub fn locate(&self, elements: Range<u64>) -> Result<(Range<u64>, Range<u32>)> {
        let lane_bits = self.lane_bytes() as u64 * 8;
        let bits = |e: u64| e.checked_mul(self.dtype.bits()).filter(|b| b % lane_bits == 0).map(|b| b / lane_bits);
        let lanes = match (bits(elements.start), bits(elements.end)) {
            (Some(start), Some(end)) if start <= end && end <= self.lanes => start..end,
            _ => {
                return Err(Error::Misuse(format!(
                    "elements {}..{} are no range of whole bytes in tensor {} of {} {} lanes",
                    elements.start,
                    elements.end,
                    crate::error::Escaped(self.name),
                    self.lanes,
                    self.dtype
                )));
            }
        };
        let chunks = if lanes.is_empty() {
            self.first_chunk..self.first_chunk
        } else {
            let first = self.first_chunk + (lanes.start / self.chunk_lanes) as u32;
            first..self.first_chunk + ((lanes.end - 1) / self.chunk_lanes) as u32 + 1
        };
        Ok((lanes, chunks))
    }
}

/// One target file.
#[derive(Debug, Clone, Copy)]
pub struct TargetFile<'a> {
    /// Name, empty for a lone file.
    pub name: &'a str,
    /// What it is made of.
    pub kind: FileKind,
    /// Bytes of the content: a safetensors header with its length, or the whole file.
    pub content_size: u64,
    /// BLAKE3-128 of the content.
    pub content_digest: [u8; DIGEST_SIZE],
    /// The content, where it is stored.
    pub content: Option<&'a [u8]>,
}
