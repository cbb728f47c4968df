//! The index: validated once, then trusted (spec sections 5 to 10; section 13, steps 1 to 6).
//!
//! Decoders accept only a [`ValidatedIndex`], and only [`ValidatedIndex::parse`] creates one.

#![forbid(unsafe_code)]

mod derived;
mod digests;
mod files;
mod header;
mod parts;
mod records;
mod tables;
mod tensors;
mod view;

pub use parts::IndexParts;
pub use view::{Chunk, Part, TargetFile, Tensor};

#[doc(hidden)]
pub use self::{
    files::{FileNames, is_file_name},
    tables::MAX_TABLE_SETS,
    tensors::check_holdable,
};

use crate::codec::TableSet;
use crate::codec::zstd::Expander;
use crate::error::{Error, Result, Rule, hex};
use crate::format::{
    ChunkMetadata, ChunkSums, DIGEST_SIZE, FEATURE_DERIVED, FEATURE_DIGESTS, FEATURE_PARTS, FEATURE_PAYLOAD_LIST,
    INDEX_HEADER_SIZE, IndexHeader, PAIR_DIGEST_SIZE, SECTION_ALIGN, Section,
};
use crate::limits::{Limits, OpenOptions};
use crate::prelude::*;
use crate::rectangle::{Rectangle, first_gap};
use crate::source::Buffer;
use zerocopy::FromBytes;

/// An index that satisfies every rule of the spec that can be checked without the blob and the base.
///
/// It holds the bytes of the file and the parsed tables. Records, sums and digests are read in place.
#[derive(Debug)]
pub struct ValidatedIndex {
    bytes: Buffer,
    header: IndexHeader,
    tensors: tensors::TensorTable,
    tables: Vec<TableSet>,
    files: files::FileTable,
    digest: [u8; 32],
    /// Number of chunks with a payload.
    payloads: u32,
}

impl ValidatedIndex {
    /// Parses and validates the bytes of a `.tpde-index`.
    ///
    /// Cost: one BLAKE3 pass over the bytes and one linear pass over the records; about 15 ms for a million records.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the first violated rule, in the order of section 13;
    /// [`Error::Limit`] if the index or a section is larger than `limits` allow.
    pub fn parse(bytes: impl Into<Buffer>, limits: &Limits) -> Result<Self> {
        Self::parse_with(bytes, &OpenOptions::from(*limits))
    }

    /// [`ValidatedIndex::parse`] with options. An expected pair digest is compared before anything is parsed.
    ///
    /// # Errors
    /// The errors of [`ValidatedIndex::parse`]; [`Error::UnexpectedPair`] if the bytes have another pair digest than expected.
    pub fn parse_with(bytes: impl Into<Buffer>, options: &OpenOptions) -> Result<Self> {
        let bytes = bytes.into();
        let limits = &options.limits;
        if let Some(expected) = &options.expect {
            limits.check_index_size(bytes.len() as u64)?;
            let found = header::pair_digest(&bytes);
            if found.as_ref() != Some(expected) {
                let found = found.map_or_else(|| format!("a file of {} bytes", bytes.len()), |digest| hex(&digest));
                return Err(Error::UnexpectedPair { expected: hex(expected), found });
            }
        }
        let header = header::parse(&bytes, bytes.len() as u64, limits)?;
        let digest = options.expect.or_else(|| header::pair_digest(&bytes)).unwrap_or_default();
        header::check_digest(&bytes, &digest)?;
        header::check_padding(&bytes, &header)?;
        let mut frames = Expander::default();
        let mut expand = |section| header::expand(&bytes, &header, section, &mut frames);
        let mut tensors = tensors::TensorTable::parse(&expand(Section::Tensors)?, &header)?;
        let tables = tables::parse(&expand(Section::Tables)?, &mut tensors)?;
        let is_used = tensors.has_parts() || !header.has(FEATURE_PARTS);
        Rule::HeaderRequiredFeatures.check(is_used, "bit 2 only with an entry that describes a part", "none")?;
        let is_used = tensors.has_derived() || !header.has(FEATURE_DERIVED);
        Rule::HeaderRequiredFeatures.check(is_used, "bit 4 only with an entry that has a derived base", "none")?;
        digests::check(&bytes, &header, &tensors)?;
        let files = files::FileTable::parse(&expand(Section::Files)?, &header)?;
        let mut index = Self { bytes, header, tensors, tables, files, digest, payloads: 0 };
        let tensors = index.tensors();
        index.payloads = records::validate(&index.header, index.records(), index.sums(), index.payload_list(), tensors)?;
        Ok(index)
    }

    /// Checks the header of an index of `size` bytes, so that a reader can refuse a file before it reads all of it. `head` has the
    /// first [`INDEX_HEADER_SIZE`] bytes, or all if there are fewer.
    ///
    /// # Errors
    /// The errors of [`ValidatedIndex::parse`].
    pub fn check_header(head: &[u8], size: u64, limits: &Limits) -> Result<()> {
        header::parse(head, size, limits).map(|_| ())
    }

    /// The header.
    pub fn header(&self) -> &IndexHeader {
        &self.header
    }

    /// The pair digest. It identifies the pair, and the header of the blob has it too.
    pub fn pair_digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// The bytes of the index file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Size of the index file in bytes.
    pub fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Version of the format: major, minor.
    pub fn version(&self) -> (u16, u16) {
        (self.header.version_major, self.header.version_minor)
    }

    /// Size, in bytes, of the blob that belongs to the index.
    pub fn blob_size(&self) -> u64 {
        self.header.blob_size
    }

    /// Number of chunks.
    pub fn chunk_count(&self) -> u32 {
        self.header.chunk_count
    }

    /// The record of a chunk.
    ///
    /// # Panics
    /// If `chunk` is not below [`ValidatedIndex::chunk_count`].
    pub fn chunk(&self, chunk: u32) -> Chunk {
        Chunk::new(&self.records()[chunk as usize], &self.sums()[chunk as usize])
    }

    /// The records of all chunks.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = Chunk> {
        self.records().iter().zip(self.sums()).map(|(record, sums)| Chunk::new(record, sums))
    }

    /// The index map: one record per chunk.
    pub fn records(&self) -> &[ChunkMetadata] {
        <[ChunkMetadata]>::ref_from_bytes(header::stored(&self.bytes, &self.header, Section::Chunks)).unwrap_or(&[])
    }

    /// The chunk sums: one entry per record.
    pub fn sums(&self) -> &[ChunkSums] {
        let stored = header::stored(&self.bytes, &self.header, Section::Sums);
        <[ChunkSums]>::ref_from_bytes(&stored[..size_of::<ChunkSums>() * self.header.chunk_count as usize]).unwrap_or(&[])
    }

    /// The payload list: the digest of each payload, zeros for chunks without one. `None` if the index does not store it.
    pub fn payload_list(&self) -> Option<&[[u8; DIGEST_SIZE]]> {
        digests::payload_list(&self.bytes, &self.header)
    }

    /// Compares a payload list, formed from the payloads of the blob, with the payload root.
    ///
    /// # Errors
    /// [`Error::Invalid`] with rule `header.payload_root` if a payload differs.
    pub fn check_payload_list(&self, list: &[[u8; DIGEST_SIZE]]) -> Result<()> {
        digests::check_payload_root(&self.header, list)
    }

    /// Whether the pair digest covers the payloads: the header has a digest over all of them.
    pub fn has_payload_root(&self) -> bool {
        self.header.has(FEATURE_DIGESTS)
    }

    /// Whether the index has the digest of each payload, so that readers of a part of the payloads can compare them.
    pub fn has_payload_digests(&self) -> bool {
        self.header.has(FEATURE_PAYLOAD_LIST)
    }

    /// Number of chunks with a payload.
    pub fn payload_count(&self) -> u32 {
        self.payloads
    }

    /// The base root: a 32-byte hash over the hashes of all base tensors, or over their digests if the header has a payload root.
    pub fn base_root(&self) -> &[u8] {
        &header::stored(&self.bytes, &self.header, Section::Digests)[..32]
    }

    /// The target root: a 32-byte hash over the hashes of all target tensors, or over their digests if the header has a payload
    /// root.
    pub fn target_root(&self) -> &[u8] {
        &header::stored(&self.bytes, &self.header, Section::Digests)[32..64]
    }

    /// Number of entries of the tensor table: whole tensors and parts of tensors.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// Entry `i` of the tensor table, in ascending order of name. Parts of a tensor are entries of their own.
    ///
    /// # Panics
    /// If `i` is not below [`ValidatedIndex::tensor_count`].
    pub fn tensor(&self, i: usize) -> Tensor<'_> {
        self.tensors.view(i, &digests::of_tensors(&self.bytes, &self.header)[i], &self.tables)
    }

    /// All entries of the tensor table, in ascending order of name: whole tensors and parts of tensors.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        (0..self.tensor_count()).map(|i| self.tensor(i))
    }

    /// The tensor of this name. If the pair has parts of the tensor, the first part. Cost: a binary search.
    pub fn find(&self, name: &str) -> Option<Tensor<'_>> {
        self.entries(name).next()
    }

    /// The entries of this name: a whole tensor, or its parts in ascending order of their origins. Parts are disjoint, and need
    /// not cover the tensor. Cost: a binary search.
    pub fn entries(&self, name: &str) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.tensors.find(name).map(|i| self.tensor(i))
    }

    /// Whether the pair has parts of tensors.
    pub fn has_parts(&self) -> bool {
        self.header.has(FEATURE_PARTS)
    }

    /// Whether an entry of the pair has a derived base: base kind `cast` or `dequantised`.
    pub fn has_derived(&self) -> bool {
        self.header.has(FEATURE_DERIVED)
    }

    /// Whether the entries of this name have all elements of the tensor.
    pub fn is_tiled(&self, name: &str) -> bool {
        self.find(name).is_some_and(|tensor| self.first_gap(name, &Rectangle::whole(tensor.whole_shape())).is_none())
    }

    /// The first elements of a rectangle of a tensor that the pair lacks; `None` if it has all of them. The rectangle must be
    /// within the tensor.
    pub fn first_gap(&self, name: &str, within: &Rectangle) -> Option<Rectangle> {
        let parts: Vec<_> = self.entries(name).map(|entry| entry.rectangle()).collect();
        first_gap(&parts, within)
    }

    /// Checks that the pair has all elements of a rectangle of a tensor. The rectangle must be within the tensor.
    pub fn check_has(&self, name: &str, within: &Rectangle) -> Result<()> {
        let incomplete = |missing| Err(Error::Incomplete { tensor: name.to_owned(), missing });
        self.first_gap(name, within).map_or(Ok(()), incomplete)
    }

    /// The table sets of codec `conditioned`, which tensors share.
    pub fn table_sets(&self) -> &[TableSet] {
        &self.tables
    }

    /// Index into [`ValidatedIndex::table_sets`] of the set that tensor `i` uses.
    ///
    /// # Panics
    /// If `i` is not below [`ValidatedIndex::tensor_count`].
    pub fn table_set(&self, i: usize) -> Option<usize> {
        self.tensors.table_set(i)
    }

    /// The bytes of the index by purpose. Their total is [`ValidatedIndex::size`].
    pub fn parts(&self) -> IndexParts {
        let stored = |section| self.header.section(section).stored_size;
        let payload_digests = if self.has_payload_digests() { stored(Section::Sums) / 2 } else { 0 };
        IndexParts {
            header: u64::from(INDEX_HEADER_SIZE) + PAIR_DIGEST_SIZE,
            records: stored(Section::Chunks),
            sums: stored(Section::Sums) - payload_digests,
            payload_digests,
            digests: stored(Section::Digests),
            tensors: stored(Section::Tensors),
            files: stored(Section::Files),
            tables: stored(Section::Tables),
            // Each section is padded to a multiple of SECTION_ALIGN.
            padding: Section::ALL.iter().map(|&section| stored(section).wrapping_neg() % SECTION_ALIGN).sum(),
        }
    }

    /// The target files that the pair describes. Empty if it describes only tensors.
    pub fn files(&self) -> impl ExactSizeIterator<Item = TargetFile<'_>> {
        self.files.iter()
    }

    /// Total size in bytes of the base lanes that decoding needs, and of the target tensors.
    pub fn tensor_bytes(&self) -> (u64, u64) {
        self.tensors().fold((0, 0), |(b, t), tensor| (b.saturating_add(tensor.base_bytes()), t.saturating_add(tensor.bytes())))
    }
}
