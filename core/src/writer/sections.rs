//! The bytes of the index: header and sections (spec sections 5 and 6).

use super::specs::FileSpec;
use crate::codec::Codec;
use crate::digest;
use crate::error::{Error, Result};
use crate::format::*;
use crate::prelude::*;
use binrw::BinWrite;
use binrw::io::Cursor;
use zerocopy::IntoBytes;

/// What the index will hold, section by section.
#[derive(Default)]
pub(super) struct Sections {
    pub records: Vec<ChunkMetadata>,
    pub sums: Vec<ChunkSums>,
    pub entries: Vec<TensorEntry>,
    pub dims: Vec<u64>,
    pub names: Vec<u8>,
    /// Encoded tables of all tensors.
    pub tables: Vec<u8>,
    pub digests: Vec<TensorDigests>,
    /// Roots over hashes of tensors, for format 1.1.
    pub base_root: digest::Root,
    pub target_root: digest::Root,
    /// Digests of payloads, for format 1.2.
    pub payloads: Vec<[u8; DIGEST_SIZE]>,
    pub files: Vec<FileSpec>,
    pub form: Form,
}

impl Sections {
    pub fn new(form: Form) -> Self {
        Self { form, ..Self::default() }
    }

    /// Adds the digests of the next tensor, also to the roots, from format 1.2 on.
    pub fn add_digests(&mut self, digests: &TensorDigests) {
        self.digests.push(*digests);
        self.base_root.add(&digests.base_digest);
        self.target_root.add(&digests.target_digest);
    }

    pub fn has_parts(&self) -> bool {
        self.entries.iter().any(|entry| entry.part != PART_WHOLE)
    }

    pub fn has_derived(&self) -> bool {
        let is_derived = |entry: &TensorEntry| BaseKind::from_code(entry.base_kind).is_some_and(BaseKind::is_derived);
        self.entries.iter().any(is_derived)
    }

    /// The lowest minor version that has all features of the pair.
    pub fn version_minor(&self) -> u16 {
        let is_conditioned = |entry: &TensorEntry| entry.codec == Codec::Conditioned.code();
        match self.form.version {
            FormatVersion::V1_2 | FormatVersion::V1_3 => 2 + u16::from(self.has_derived()),
            FormatVersion::V1_1 => u16::from(self.entries.iter().any(is_conditioned)),
        }
    }

    fn required_features(&self) -> u64 {
        let features = [
            (self.form.version >= FormatVersion::V1_2, FEATURE_DIGESTS),
            (self.form.payload_digests, FEATURE_PAYLOAD_LIST),
            (self.has_parts(), FEATURE_PARTS),
            (self.has_derived(), FEATURE_DERIVED),
        ];
        features.into_iter().filter(|(has, _)| *has).map(|(_, bit)| bit).sum()
    }

    /// The bytes of the index file, for a blob of this size.
    pub fn index_bytes(&self, blob_size: u64) -> Result<Vec<u8>> {
        let roots = [self.base_root.finish(), self.target_root.finish()];
        let mut tensors = table_bytes(&self.entries)?;
        tensors.extend(self.dims.iter().flat_map(|d| d.to_le_bytes()));
        tensors.extend(&self.names);

        let mut compress = section_compressor()?;
        let (tensors_size, tensors) = compress(tensors)?;
        let (files_size, files) = compress(self.files_bytes()?)?;
        let (tables_size, tables) = compress(self.tables.clone())?;
        let payload_list = if self.form.payload_digests { self.payloads.as_flattened() } else { &[] };
        let payload_root = match self.form.version {
            FormatVersion::V1_1 => [0; 32],
            FormatVersion::V1_2 | FormatVersion::V1_3 => digest::payload_root(&self.payloads),
        };
        // For each section: the parts to concatenate, and the expanded size if the section is compressible.
        let sections: [(&[&[u8]], Option<u64>); 6] = [
            (&[self.records.as_bytes()], None),
            (&[self.sums.as_bytes(), payload_list], None),
            (&[roots.as_flattened(), self.digests.as_bytes()], None),
            (&[&tensors], Some(tensors_size)),
            (&[&files], Some(files_size)),
            (&[&tables], Some(tables_size)),
        ];
        let mut index = vec![0; INDEX_HEADER_SIZE as usize];
        let entries = sections.map(|(parts, expanded_size)| {
            pad(&mut index);
            let offset = index.len() as u64;
            parts.iter().for_each(|part| index.extend_from_slice(part));
            let stored_size = index.len() as u64 - offset;
            SectionEntry { offset, stored_size, expanded_size: expanded_size.unwrap_or(stored_size) }
        });
        pad(&mut index);
        let mut header = IndexHeader {
            magic: INDEX_MAGIC,
            version_major: VERSION_MAJOR,
            version_minor: self.version_minor(),
            header_size: INDEX_HEADER_SIZE,
            required_features: self.required_features(),
            optional_features: 0,
            index_size: index.len() as u64 + PAIR_DIGEST_SIZE,
            blob_size,
            chunk_count: count(self.records.len(), MAX_CHUNKS, "chunks")?,
            tensor_count: count(self.entries.len(), MAX_TENSORS, "tensors")?,
            file_count: count(self.files.len(), MAX_FILES, "files")?,
            reserved_0: 0,
            sections: entries,
            payload_root,
            reserved_1: [0; 12],
            header_crc32: 0,
        };
        header.header_crc32 = crc32fast::hash(&table_bytes(&[header])?[..INDEX_HEADER_CRC_SPAN]);
        index[..INDEX_HEADER_SIZE as usize].copy_from_slice(&table_bytes(&[header])?);
        let digest = digest::of(&index);
        index.extend(digest.as_bytes());
        Ok(index)
    }

    fn files_bytes(&self) -> Result<Vec<u8>> {
        let entries = self.files.iter().map(|file| FileEntry {
            kind: file.kind.code(),
            reserved_0: 0,
            name_size: file.name.len() as u32,
            content_size: file.content_size,
            content_digest: file.content_digest,
            reserved_1: 0,
        });
        let mut bytes = table_bytes(&entries.collect::<Vec<_>>())?;
        bytes.extend(self.files.iter().flat_map(|file| file.name.as_bytes()));
        bytes.extend(self.files.iter().filter(|file| file.kind.is_stored()).flat_map(|file| &file.content));
        Ok(bytes)
    }
}

pub(super) fn count(value: usize, limit: u32, what: &'static str) -> Result<u32> {
    Error::check_limit(what, limit.into(), value as u64)?;
    Ok(value as u32)
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(SECTION_ALIGN as usize), 0);
}

/// The expanded size of a section, and its stored form.
type StoredSection = (u64, Vec<u8>);

/// Returns a function that compresses a section, unless compression makes it larger. One compressor serves all sections: allocating its memory takes longer than compressing a small section.
#[cfg(feature = "zstd")]
fn section_compressor() -> Result<impl FnMut(Vec<u8>) -> Result<StoredSection>> {
    /// On real checkpoints, higher levels gain nothing and cost up to fifty times as much. That matters for small pairs, because
    /// this part of encoding is serial.
    const LEVEL: i32 = 6;
    let failed = |error| Error::InvalidArgument(format!("the zstd library failed: {error}"));
    let mut compressor = zstd::bulk::Compressor::new(LEVEL).map_err(failed)?;
    Ok(move |expanded: Vec<u8>| {
        let size = expanded.len() as u64;
        let frame = compressor.compress(&expanded).map_err(failed)?;
        Ok((size, if (frame.len() as u64) < size { frame } else { expanded }))
    })
}

/// Without the C library, sections are stored as they are.
#[cfg(not(feature = "zstd"))]
fn section_compressor() -> Result<impl FnMut(Vec<u8>) -> Result<StoredSection>> {
    Ok(|expanded: Vec<u8>| Ok((expanded.len() as u64, expanded)))
}

pub(super) fn table_bytes<T>(rows: &[T]) -> Result<Vec<u8>>
where
    for<'a> T: BinWrite<Args<'a> = ()> + binrw::meta::WriteEndian,
{
    let mut out = Cursor::new(Vec::new());
    for row in rows {
        row.write(&mut out).map_err(|e| Error::InvalidArgument(format!("a layout could not be written: {e}")))?;
    }
    Ok(out.into_inner())
}
