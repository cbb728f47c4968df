//! Writes a pair, payload by payload (spec sections 4 to 11).

#[cfg(test)]
pub(crate) mod sample;
mod sections;
mod specs;

pub use specs::{DerivedSpec, FileSpec, PartSpec, TensorSpec};

use crate::codec::{Encoded, TableSet};
use crate::digest;
use crate::error::{Error, Result};
use crate::format::*;
use crate::index::{MAX_TABLE_SETS, ValidatedIndex};
use crate::limits::Limits;
use crate::prelude::*;
use alloc::sync::Arc;
use blake3::Hash;
use sections::{Sections, count, table_bytes};
use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;

/// An entry with a name, whose base name may not be known yet.
struct Entry {
    entry: usize,
    name: String,
    base_name: String,
    /// Scales names of the entry and of further parts, which follow the base name.
    scales_names: String,
    is_part: bool,
}

/// Builds a pair: writes payloads to `blob` as they arrive, and assembles the index at the end.
///
/// For each tensor, in ascending order of name, call [`begin_tensor`](Self::begin_tensor), then [`chunk`](Self::chunk) for each
/// chunk in order, then [`end_tensor`](Self::end_tensor). At the end, call [`finish`](Self::finish). Memory: 64 bytes per chunk
/// and about 100 bytes per tensor.
pub struct PairBuilder<W> {
    blob: W,
    blob_path: PathBuf,
    blob_size: u64,
    sections: Sections,
    /// The last entry with a name.
    last_named: Option<Entry>,
    /// Number of each table set, from 1, in the order of the first tensors that use them.
    sets: HashMap<Arc<TableSet>, u32>,
    /// Numbers of the sets by address, because hashing a set takes longer. The map keeps the sets, so no address is reused.
    set_addresses: HashMap<usize, (Arc<TableSet>, u32)>,
}

impl<W: Write> PairBuilder<W> {
    /// Creates a builder that writes a placeholder for the header and then payloads to `blob`. `blob_path` is for error messages.
    ///
    /// # Errors
    /// [`Error::Io`] if writing the placeholder fails; [`Error::InvalidArgument`] if the version lacks a feature of `form`.
    pub fn new(mut blob: W, blob_path: PathBuf, form: Form) -> Result<Self> {
        if form.payload_digests && form.version == FormatVersion::V1_1 {
            return Err(Error::InvalidArgument("format 1.1 cannot store payload digests: they need format 1.2".into()));
        }
        // The header contains the pair digest, which is not known before `finish`.
        blob.write_all(&[0; BLOB_HEADER_SIZE as usize]).map_err(|e| Error::io("write", &blob_path, e))?;
        Ok(Self {
            blob,
            blob_path,
            blob_size: BLOB_HEADER_SIZE.into(),
            sections: Sections::new(form),
            last_named: None,
            sets: HashMap::new(),
            set_addresses: HashMap::new(),
        })
    }

    /// Begins the next tensor, or the next part of a tensor.
    pub fn begin_tensor(&mut self, tensor: &TensorSpec) {
        let base_name = tensor.base_name.as_deref().filter(|base| *base != tensor.name).unwrap_or_default();
        let is_further =
            self.last_named.as_ref().is_some_and(|last| last.is_part && tensor.part.is_some() && last.name == tensor.name);
        let part = match (&tensor.part, is_further) {
            (None, _) => PART_WHOLE,
            (Some(_), false) => PART_FIRST,
            (Some(_), true) => PART_FURTHER,
        };
        if !is_further {
            self.end_names();
            self.sections.names.extend(tensor.name.as_bytes());
            let (entry, name) = (self.sections.entries.len(), tensor.name.clone());
            self.last_named =
                Some(Entry { entry, name, base_name: String::new(), scales_names: String::new(), is_part: tensor.part.is_some() });
        }
        // The base name is stated once for all parts. Parts of base kind `none` have none.
        if let Some(last) = self.last_named.as_mut().filter(|_| !base_name.is_empty()) {
            last.base_name = base_name.to_owned();
        }
        let scales_name = tensor.derived.as_ref().and_then(|derived| derived.scales.as_ref());
        if let (Some(last), Some((_, name))) = (&mut self.last_named, scales_name) {
            last.scales_names.push_str(name);
        }
        if let Some(PartSpec { whole, origin }) = &tensor.part {
            self.sections.dims.extend(whole.iter().filter(|_| !is_further));
            self.sections.dims.extend(origin);
        }
        self.sections.dims.extend(&tensor.shape);
        let tables_size = tensor.tables.as_ref().map_or(0, |set| self.put_tables(set));
        self.sections.entries.push(TensorEntry {
            name_size: if is_further { 0 } else { tensor.name.len() as u32 },
            base_name_size: 0, // set by `end_names`
            dtype: tensor.dtype.code(),
            rank: tensor.shape.len() as u16,
            base_kind: tensor.base_kind.code(),
            codec: tensor.codec.code(),
            chunk_lanes_log2: tensor.chunk_lanes_log2,
            part,
            reserved: [0; 2],
            tables_size,
            first_chunk: self.sections.records.len() as u32,
            chunk_count: 0,
            base_param: tensor.derived.as_ref().map_or(tensor.base_param, |derived| derived.param().to_bits()),
        });
    }

    /// Appends the base name of the last entry with a name, then the scales names of its parts. Further parts of the tensor may
    /// have stated the base name.
    fn end_names(&mut self) {
        if let Some(Entry { entry, base_name, scales_names, .. }) = self.last_named.take() {
            self.sections.names.extend(base_name.as_bytes());
            self.sections.names.extend(scales_names.as_bytes());
            self.sections.entries[entry].base_name_size = base_name.len() as u32;
        }
    }

    /// Appends the tables of a tensor: the number of an earlier equal set, or else the set. Returns the number of bytes appended.
    fn put_tables(&mut self, set: &Arc<TableSet>) -> u32 {
        let before = self.sections.tables.len();
        let next = self.sets.len() as u32 + 1;
        let address = Arc::as_ptr(set).addr();
        let &mut (_, number) = self
            .set_addresses
            .entry(address)
            .or_insert_with(|| (Arc::clone(set), *self.sets.entry(Arc::clone(set)).or_insert(next)));
        if self.sets.len() as u32 == next {
            self.sections.tables.extend([0; 2]);
            self.sections.tables.extend(set.to_bytes());
        } else {
            self.sections.tables.extend((number as u16).to_le_bytes());
        }
        (self.sections.tables.len() - before) as u32
    }

    /// Adds the next chunk of the current tensor: the payload, the encoder's description of the payload, and the chunk sums.
    ///
    /// # Errors
    /// [`Error::Io`] if the blob cannot be written; [`Error::InvalidArgument`] if no tensor has begun.
    pub fn chunk(&mut self, payload: &[u8], encoded: Encoded, base_sum: u64, target_sum: u64) -> Result<()> {
        self.hashed_chunk(payload, digest::of_payload(payload), encoded, base_sum, target_sum)
    }

    /// [`PairBuilder::chunk`] for a payload whose digest is known. Format 1.1 ignores the digest.
    ///
    /// # Errors
    /// As for [`PairBuilder::chunk`].
    pub fn hashed_chunk(
        &mut self,
        payload: &[u8],
        payload_digest: [u8; DIGEST_SIZE],
        encoded: Encoded,
        base_sum: u64,
        target_sum: u64,
    ) -> Result<()> {
        let Some(entry) = self.sections.entries.last_mut() else {
            return Err(Error::InvalidArgument("a chunk was added before the first tensor was begun".into()));
        };
        self.sections.records.push(ChunkMetadata {
            blob_offset: self.blob_size.into(),
            compressed_size: (payload.len() as u32).into(),
            uncompressed_size: encoded.uncompressed_size.into(),
            num_deltas: encoded.num_deltas.into(),
            crc32: if payload.is_empty() { 0 } else { crc32fast::hash(payload) }.into(),
            output_offset: (u64::from(entry.chunk_count) << entry.chunk_lanes_log2).into(),
        });
        self.sections.sums.push(ChunkSums { base_sum: base_sum.into(), target_sum: target_sum.into() });
        if self.sections.form.version >= FormatVersion::V1_2 {
            self.sections.payloads.push(payload_digest);
        }
        entry.chunk_count += 1;
        let padding = payload.len().next_multiple_of(PAYLOAD_ALIGN as usize) - payload.len();
        let written = self.blob.write_all(payload).and_then(|()| self.blob.write_all(&[0; PAYLOAD_ALIGN as usize][..padding]));
        written.map_err(|e| Error::io("write", &self.blob_path, e))?;
        self.blob_size += (payload.len() + padding) as u64;
        Ok(())
    }

    /// Adds the next chunks of the current tensor: consecutive chunks of a tensor of another pair that has the same lanes per
    /// chunk.
    /// `stored` has their payloads with padding, `digests` the digests of the payloads. Format 1.1 ignores the digests.
    ///
    /// # Errors
    /// As for [`PairBuilder::chunk`].
    pub fn copied_chunks(
        &mut self,
        stored: &[u8],
        records: &[ChunkMetadata],
        sums: &[ChunkSums],
        digests: &[[u8; DIGEST_SIZE]],
    ) -> Result<()> {
        self.placed_chunks(stored.len() as u64, records, sums, digests)?;
        self.blob.write_all(stored).map_err(|e| Error::io("write", &self.blob_path, e))
    }

    /// [`PairBuilder::copied_chunks`] for payloads of `stored` bytes with padding that the caller writes to the blob.
    pub fn placed_chunks(
        &mut self,
        stored: u64,
        records: &[ChunkMetadata],
        sums: &[ChunkSums],
        digests: &[[u8; DIGEST_SIZE]],
    ) -> Result<()> {
        let (Some(entry), Some(first)) = (self.sections.entries.last_mut(), records.first()) else {
            return Err(Error::InvalidArgument("chunks are added to no tensor, or there are none".into()));
        };
        let (from, to) = (first.blob_offset.get(), self.blob_size);
        let moved =
            |record: &ChunkMetadata| ChunkMetadata { blob_offset: (record.blob_offset.get() - from + to).into(), ..*record };
        self.sections.records.extend(records.iter().map(moved));
        self.sections.sums.extend(sums);
        if self.sections.form.version >= FormatVersion::V1_2 {
            self.sections.payloads.extend(digests);
        }
        entry.chunk_count += records.len() as u32;
        self.blob_size += stored;
        Ok(())
    }

    /// Returns the blob.
    pub fn blob(&mut self) -> &mut W {
        &mut self.blob
    }

    /// Adds the digests of the next tensor. Call it once per tensor, in the order of the tensors. Later tensors may have begun.
    ///
    /// `base` is the BLAKE3 hash of the base tensor, if any. `target` is the BLAKE3 hash of the target tensor.
    pub fn end_tensor(&mut self, base: Option<Hash>, target: Hash) {
        let base_digest = base.as_ref().map_or([0; DIGEST_SIZE], digest::short);
        let digests = TensorDigests { base_digest, target_digest: digest::short(&target) };
        if self.sections.form.version >= FormatVersion::V1_2 {
            return self.sections.add_digests(&digests);
        }
        self.sections.digests.push(digests);
        self.sections.base_root.add_hash(base.as_ref());
        self.sections.target_root.add_hash(Some(&target));
    }

    /// [`PairBuilder::end_tensor`] for digests that come from another pair.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for format 1.1, whose roots are formed from hashes of tensors.
    pub fn end_copied_tensor(&mut self, digests: &TensorDigests) -> Result<()> {
        if self.sections.form.version == FormatVersion::V1_1 {
            return Err(Error::InvalidArgument("roots of format 1.1 cannot be formed from digests: they need format 1.2".into()));
        }
        self.sections.add_digests(digests);
        Ok(())
    }

    /// Adds a target file. Files must be added in ascending order of name.
    pub fn file(&mut self, file: FileSpec) {
        self.sections.files.push(file);
    }

    /// Assembles the index and validates it as a reader would. The caller must still write [`Finished::blob_header`] to the
    /// beginning of the blob.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the calls did not describe a valid pair; [`Error::Limit`] if the pair exceeds the limits of readers.
    pub fn finish(mut self) -> Result<Finished<W>> {
        self.blob.flush().map_err(|e| Error::io("write", &self.blob_path, e))?;
        self.end_names();
        if self.sections.has_parts() {
            if self.sections.form.version == FormatVersion::V1_1 {
                return Err(Error::InvalidArgument("format 1.1 cannot store parts of tensors: they need format 1.2".into()));
            }
            self.sections.form.payload_digests = true; // a reader of some parts can then compare their payloads
        }
        if self.sections.has_derived() && self.sections.form.version < FormatVersion::V1_3 {
            let version = self.sections.form.version;
            return Err(Error::InvalidArgument(format!("format {version} cannot store derived bases: they need format 1.3")));
        }
        count(self.sets.len(), MAX_TABLE_SETS as u32, "table sets")?;
        let index = ValidatedIndex::parse(self.sections.index_bytes(self.blob_size)?, &Limits::default())?;
        let mut header = BlobHeader {
            magic: BLOB_MAGIC,
            version_major: VERSION_MAJOR,
            version_minor: self.sections.version_minor(),
            header_size: BLOB_HEADER_SIZE,
            blob_size: self.blob_size,
            pair_digest: *index.pair_digest(),
            reserved: 0,
            header_crc32: 0,
        };
        header.header_crc32 = crc32fast::hash(&table_bytes(&[header])?[..BLOB_HEADER_CRC_SPAN]);
        let mut blob_header = [0; BLOB_HEADER_SIZE as usize];
        blob_header.copy_from_slice(&table_bytes(&[header])?);
        Ok(Finished { index, blob_header, blob: self.blob })
    }
}

/// A complete pair that is not yet published.
#[derive(Debug)]
pub struct Finished<W> {
    /// The validated index. Write [`ValidatedIndex::as_bytes`] to the index file.
    pub index: ValidatedIndex,
    /// The first 64 bytes of the blob.
    pub blob_header: [u8; BLOB_HEADER_SIZE as usize],
    /// The blob, with zeros instead of its header.
    pub blob: W,
}

impl Finished<Vec<u8>> {
    /// The index, and the blob with its header.
    pub fn into_parts(mut self) -> (ValidatedIndex, Vec<u8>) {
        self.blob[..self.blob_header.len()].copy_from_slice(&self.blob_header);
        (self.index, self.blob)
    }
}

#[cfg(test)]
mod tests {
    use crate::prelude::*;

    #[test]
    fn equal_table_sets_are_stored_once() {
        let make = || alloc::sync::Arc::new(crate::codec::TableSet::new(&[vec![4096]]));
        let mut builder = super::PairBuilder::new(Vec::new(), "memory".into(), Default::default()).unwrap();
        let (first, same) = (make(), make());
        let stored = builder.put_tables(&first);
        assert_eq!(stored as usize, 2 + first.to_bytes().len());
        assert_eq!((builder.put_tables(&same), builder.put_tables(&first)), (2, 2));
        assert_eq!(builder.sections.tables[stored as usize..], [1, 0, 1, 0]);
    }
}
