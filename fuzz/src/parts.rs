//! A pair split into parts, which can be changed one by one and written again. The integration tests share this file.

use super::sign::{chunk_bytes, lanes_of_base, repair_layout, repair_pair};
use binrw::{BinRead, BinWrite};
use std::io::Cursor;
use tpde::{BaseKind, Dtype, TensorInfo, ValidatedIndex};
use tpde_core::codec::TableSet;
use tpde_core::format::{DerivedParam, FileEntry, IndexHeader, PART_FIRST, PART_FURTHER, Section, TensorEntry};

#[derive(Debug, Clone)]
pub struct Parts {
    pub header: IndexHeader,
    pub roots: Vec<u8>,
    pub tensors: Vec<TensorPart>,
    pub files: Vec<FilePart>,
}

#[derive(Debug, Clone)]
pub struct TensorPart {
    pub entry: TensorEntry,
    pub dims: Vec<u64>,
    pub name: Vec<u8>,
    pub base_name: Vec<u8>,
    /// Empty unless the base is dequantised.
    pub scales_name: Vec<u8>,
    /// The tables as stored: a number, and possibly a set.
    pub tables: Vec<u8>,
    pub digests: Vec<u8>,
    pub chunks: Vec<ChunkPart>,
    /// The table set that the tensor uses in the seed.
    pub set: Option<TableSet>,
}

impl TensorPart {
    pub fn dtype(&self) -> Option<Dtype> {
        Dtype::from_code(self.entry.dtype)
    }

    /// Origins and extents of a part; `None` for a whole tensor.
    pub fn rectangle(&mut self) -> Option<(&mut [u64], &mut [u64])> {
        let lists = match self.entry.part {
            PART_FIRST => 3,
            PART_FURTHER => 2,
            _ => return None,
        };
        let rank = self.dims.len() / lists;
        let (_, origins_and_extents) = self.dims.split_at_mut_checked((lists - 2) * rank)?;
        origins_and_extents.split_at_mut_checked(rank)
    }
}

#[derive(Debug, Clone)]
pub struct ChunkPart {
    pub uncompressed_size: u32,
    pub compressed_size: u32,
    pub num_deltas: u32,
    pub output_offset: u64,
    pub sums: Vec<u8>,
    pub payload: Vec<u8>,
    /// Base lanes of the chunk in the seed.
    pub base: Vec<u8>,
}

#[derive(Debug, Clone)]
pub struct FilePart {
    pub entry: FileEntry,
    pub name: Vec<u8>,
    pub content: Vec<u8>,
}

impl Parts {
    /// Splits a pair into parts. Base lanes of chunks are taken from `bases`.
    pub fn new<B: AsRef<[u8]>>(valid: &ValidatedIndex, blob: &[u8], bases: &[(TensorInfo, B)]) -> Self {
        let (header, bytes) = (*valid.header(), valid.as_bytes());
        let section = |section| {
            let entry = header.section(section);
            let stored = &bytes[entry.offset as usize..][..entry.stored_size as usize];
            match entry.expanded_size {
                size if size == entry.stored_size => stored.to_vec(),
                size => zstd::bulk::decompress(stored, size as usize).expect("a frame of a valid index"),
            }
        };
        let (sums, digests, tables) = (section(Section::Sums), section(Section::Digests), section(Section::Tables));
        let mut tables = &tables[..];
        let mut entries = Cursor::new(section(Section::Tensors));
        let tensors = valid.tensors().map(|tensor| {
            let entry = TensorEntry::read(&mut entries).expect("an entry");
            let own = tables.split_off(..entry.tables_size as usize).expect("tables");
            let mut lanes = lanes_of_base(&tensor, bases);
            lanes.resize(tensor.bytes() as usize, 0);
            let chunks = tensor.chunks().map(|chunk| {
                let record = &valid.records()[chunk as usize];
                ChunkPart {
                    uncompressed_size: record.uncompressed_size.get(),
                    compressed_size: record.compressed_size.get(),
                    num_deltas: record.num_deltas.get(),
                    output_offset: record.output_offset.get(),
                    sums: sums[16 * chunk as usize..][..16].to_vec(),
                    payload: blob[record.blob_offset.get() as usize..][..record.compressed_size.get() as usize].to_vec(),
                    base: lanes[chunk_bytes(&tensor, chunk)].to_vec(),
                }
            });
            TensorPart {
                entry,
                dims: match (tensor.part, entry.part) {
                    (Some(part), PART_FIRST) => [part.whole, part.origin, tensor.shape].concat(),
                    (Some(part), _) => [part.origin, tensor.shape].concat(),
                    (None, _) => tensor.shape.to_vec(),
                },
                name: if entry.name_size == 0 { Vec::new() } else { tensor.name.as_bytes().to_vec() },
                base_name: if entry.base_name_size == 0 { Vec::new() } else { tensor.base_name.as_bytes().to_vec() },
                scales_name: tensor.scales().map_or(Vec::new(), |(name, ..)| name.as_bytes().to_vec()),
                tables: own.to_vec(),
                digests: digests[64 + 32 * tensor.place..][..32].to_vec(),
                chunks: chunks.collect(),
                set: tensor.tables.cloned(),
            }
        });
        let tensors = tensors.collect();
        let mut entries = Cursor::new(section(Section::Files));
        let files = valid.files().map(|file| FilePart {
            entry: FileEntry::read(&mut entries).expect("an entry"),
            name: file.name.as_bytes().to_vec(),
            content: file.content.unwrap_or_default().to_vec(),
        });
        Self { header, roots: digests[..64].to_vec(), files: files.collect(), tensors }
    }

    /// Recomputes every field that is determined by others.
    pub fn derive(&mut self) {
        let mut next = 0;
        for tensor in &mut self.tensors {
            let entry = &mut tensor.entry;
            entry.name_size = tensor.name.len() as u32;
            entry.base_name_size = tensor.base_name.len() as u32;
            if BaseKind::from_code(entry.base_kind).is_some_and(BaseKind::is_derived) {
                let param = DerivedParam::from_bits(entry.base_param);
                entry.base_param = DerivedParam { scales_name_size: tensor.scales_name.len() as u32, ..param }.to_bits();
            }
            // A part has several lists of dims.
            entry.rank = match entry.part {
                PART_FIRST => tensor.dims.len() / 3,
                PART_FURTHER => tensor.dims.len() / 2,
                _ => tensor.dims.len(),
            } as u16;
            entry.tables_size = tensor.tables.len() as u32;
            entry.first_chunk = next;
            entry.chunk_count = tensor.chunks.len() as u32;
            next += entry.chunk_count;
            for (i, chunk) in tensor.chunks.iter_mut().enumerate() {
                chunk.compressed_size = chunk.payload.len() as u32;
                chunk.output_offset = (i as u64) << (entry.chunk_lanes_log2 % 32);
            }
        }
        for file in &mut self.files {
            let stored = file.entry.kind % 2 == 0;
            file.entry.name_size = file.name.len() as u32;
            if stored {
                file.entry.content_size = file.content.len() as u64;
                file.entry.content_digest.copy_from_slice(&blake3::hash(&file.content).as_bytes()[..16]);
            }
        }
        self.header.chunk_count = next;
        self.header.tensor_count = self.tensors.len() as u32;
        self.header.file_count = self.files.len() as u32;
    }

    /// Writes the index and the blob. Computes everything that depends on the bytes: offsets, sizes, CRCs and the pair digest.
    pub fn write(&self) -> (Vec<u8>, Vec<u8>) {
        let chunks = || self.tensors.iter().flat_map(|tensor| &tensor.chunks);
        let (mut records, mut sums) = (Vec::new(), Vec::new());
        for chunk in chunks() {
            records.extend([0; 8]);
            for field in [chunk.compressed_size, chunk.uncompressed_size, chunk.num_deltas, 0] {
                records.extend(field.to_le_bytes());
            }
            records.extend(chunk.output_offset.to_le_bytes());
            sums.extend(&chunk.sums);
        }
        if self.header.has(tpde_core::format::FEATURE_PAYLOAD_LIST) {
            sums.resize(2 * sums.len(), 0);
        }
        let mut digests = self.roots.clone();
        let (mut tensors, mut dims, mut names, mut tables) = (Cursor::new(Vec::new()), Vec::new(), Vec::new(), Vec::new());
        for tensor in &self.tensors {
            digests.extend(&tensor.digests);
            tensor.entry.write(&mut tensors).expect("a write to memory");
            dims.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            names.extend([&tensor.name[..], &tensor.base_name, &tensor.scales_name].concat());
            tables.extend(&tensor.tables);
        }
        let mut files = Cursor::new(Vec::new());
        self.files.iter().for_each(|file| file.entry.write(&mut files).expect("a write to memory"));
        let mut files = files.into_inner();
        self.files.iter().for_each(|file| files.extend(&file.name));
        self.files.iter().for_each(|file| files.extend(&file.content));

        let mut header = self.header;
        let tensors = [tensors.into_inner(), dims, names].concat();
        let sections = [records, sums, digests, tensors, files, tables];
        let mut body = Vec::new();
        for (entry, section) in header.sections.iter_mut().zip(sections) {
            (entry.stored_size, entry.expanded_size) = (section.len() as u64, section.len() as u64);
            body.extend(section);
            body.resize(body.len().next_multiple_of(8), 0);
        }
        let mut index = Cursor::new(Vec::new());
        header.write(&mut index).expect("a write to memory");
        let mut index = [index.into_inner(), body, vec![0; 32]].concat();
        // Moves payloads to the offsets that the records will have.
        repair_layout(&mut index);
        let mut blob = vec![0; 64];
        for chunk in chunks() {
            let size = (chunk.compressed_size as usize).min(chunk.payload.len() + 64);
            blob.extend(&chunk.payload[..size.min(chunk.payload.len())]);
            blob.resize(blob.len() + size.saturating_sub(chunk.payload.len()), 0);
            blob.resize(blob.len().next_multiple_of(16), 0);
        }
        repair_pair(&mut index, &mut blob);
        (index, blob)
    }
}
