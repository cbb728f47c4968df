//! Index header (spec section 5).

use super::names::named;
use binrw::{BinRead, BinWrite};

named! {
    /// The sections of an index, in file order.
    enum Section as "section" {
        /// Flat array of [`ChunkMetadata`](super::ChunkMetadata).
        Chunks => "chunks",
        /// Flat array of [`ChunkSums`](super::ChunkSums).
        Sums => "sums",
        /// Roots and [`TensorDigests`](super::TensorDigests).
        Digests => "digests",
        /// [`TensorEntry`](super::TensorEntry) table, dims, names.
        Tensors => "tensors",
        /// [`FileEntry`](super::FileEntry) table, names, contents.
        Files => "files",
        /// Codec tables.
        Tables => "tables",
    }
}

/// Location of a section (24 bytes).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, BinRead, BinWrite)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[brw(little)]
pub struct SectionEntry {
    /// First byte in the index file.
    pub offset: u64,
    /// Bytes in the file.
    pub stored_size: u64,
    /// Bytes after decompression; equal to `stored_size` if the section is not compressed.
    pub expanded_size: u64,
}

/// The first 256 bytes of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, BinRead, BinWrite)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[brw(little)]
pub struct IndexHeader {
    /// [`INDEX_MAGIC`](super::INDEX_MAGIC).
    pub magic: [u8; 8],
    /// Major version; others than ours are refused.
    pub version_major: u16,
    /// Minor version; any is accepted.
    pub version_minor: u16,
    /// 256.
    pub header_size: u32,
    /// Bits that a reader must know.
    pub required_features: u64,
    /// Bits that a reader may ignore.
    pub optional_features: u64,
    /// Length of the index file in bytes.
    pub index_size: u64,
    /// Length of the blob file in bytes.
    pub blob_size: u64,
    /// Number of chunk records.
    pub chunk_count: u32,
    /// Number of tensors.
    pub tensor_count: u32,
    /// Number of target files.
    pub file_count: u32,
    /// Zero.
    pub reserved_0: u32,
    /// The six sections, in the order of [`Section::ALL`].
    pub sections: [SectionEntry; 6],
    /// Zero.
    pub reserved_1: [u8; 44],
    /// CRC-32 of the bytes before.
    pub header_crc32: u32,
}

impl IndexHeader {
    /// The entry of one section.
    pub fn section(&self, section: Section) -> SectionEntry {
        self.sections[section as usize]
    }
}
