//! Index header (spec section 5).

use super::names::named;
use binrw::{BinRead, BinWrite};

named! {
    /// Sections of an index, in file order.
    enum Section as "section" {
        /// Array of [`ChunkMetadata`](super::ChunkMetadata).
        Chunks => "chunks",
        /// Array of [`ChunkSums`](super::ChunkSums).
        Sums => "sums",
        /// Roots, then an array of [`TensorDigests`](super::TensorDigests).
        Digests => "digests",
        /// Array of [`TensorEntry`](super::TensorEntry), then dims and names.
        Tensors => "tensors",
        /// Array of [`FileEntry`](super::FileEntry), then names and contents.
        Files => "files",
        /// Codec tables.
        Tables => "tables",
    }
}

/// Offset and sizes of a section (24 bytes).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, BinRead, BinWrite)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[brw(little)]
pub struct SectionEntry {
    /// Offset in the index file, in bytes.
    pub offset: u64,
    /// Size in the file, in bytes.
    pub stored_size: u64,
    /// Size after decompression, in bytes. Equal to `stored_size` if the section is not compressed.
    pub expanded_size: u64,
}

/// The first 256 bytes of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, BinRead, BinWrite)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[brw(little)]
pub struct IndexHeader {
    /// [`INDEX_MAGIC`](super::INDEX_MAGIC).
    pub magic: [u8; 8],
    /// Major version. A reader refuses other major versions than its own.
    pub version_major: u16,
    /// Minor version. A reader accepts any.
    pub version_minor: u16,
    /// Size of this header in bytes: 256.
    pub header_size: u32,
    /// Feature bits that a reader must know. A reader refuses unknown bits.
    pub required_features: u64,
    /// Feature bits that a reader may ignore.
    pub optional_features: u64,
    /// Size of the index file, in bytes.
    pub index_size: u64,
    /// Size of the blob file, in bytes.
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
    /// BLAKE3 of the digests of all payloads, if [`FEATURE_DIGESTS`](super::FEATURE_DIGESTS) is set; else zero.
    pub payload_root: [u8; 32],
    /// Zero.
    pub reserved_1: [u8; 12],
    /// CRC-32 of the preceding bytes.
    pub header_crc32: u32,
}

impl IndexHeader {
    /// Whether a required feature bit is set.
    pub fn has(&self, feature: u64) -> bool {
        self.required_features & feature != 0
    }

    /// Returns the entry of a section.
    pub fn section(&self, section: Section) -> SectionEntry {
        self.sections[section as usize]
    }
}
