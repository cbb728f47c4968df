//! Blob header (spec section 11).

use binrw::{BinRead, BinWrite};

/// The first 64 bytes of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, BinRead, BinWrite)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[brw(little)]
pub struct BlobHeader {
    /// [`BLOB_MAGIC`](super::BLOB_MAGIC).
    pub magic: [u8; 8],
    /// Major version.
    pub version_major: u16,
    /// Minor version. Equal to the index's.
    pub version_minor: u16,
    /// Size of this header in bytes: 64.
    pub header_size: u32,
    /// Size of the blob file, in bytes.
    pub blob_size: u64,
    /// The last 32 bytes of the index.
    pub pair_digest: [u8; 32],
    /// Zero.
    pub reserved: u32,
    /// CRC-32 of the preceding bytes.
    pub header_crc32: u32,
}
