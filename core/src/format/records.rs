//! Records of the index: chunks, chunk sums and digests (spec sections 6 and 7).
//!
//! Records are little-endian and have alignment 1. So a byte slice of the right length is read in place as an array of records.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Location of a chunk's payload and lanes (32 bytes): a record of the index map.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChunkMetadata {
    /// Offset of the payload in the blob file, in bytes.
    pub blob_offset: U64,
    /// Size of the stored payload, in bytes.
    pub compressed_size: U32,
    /// Size of the expanded payload, in bytes.
    pub uncompressed_size: U32,
    /// Number of changed lanes.
    pub num_deltas: U32,
    /// CRC-32 of the stored payload.
    pub crc32: U32,
    /// Index of the chunk's first lane in its tensor.
    pub output_offset: U64,
}

/// Linear sums over the lanes of a chunk (section 6.1).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChunkSums {
    /// Sum over the base lanes.
    pub base_sum: U64,
    /// Sum over the target lanes.
    pub target_sum: U64,
}

/// BLAKE3-128 of the base and target tensors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TensorDigests {
    /// Digest of the base tensor; zeros without a base tensor.
    pub base_digest: [u8; 16],
    /// Digest of the target tensor.
    pub target_digest: [u8; 16],
}

/// Implements `Arbitrary` for records, from their bytes.
#[cfg(feature = "arbitrary")]
macro_rules! arbitrary_records {
    ($($name:ident),+) => {$(
        impl<'a> arbitrary::Arbitrary<'a> for $name {
            fn arbitrary(u: &mut arbitrary::Unstructured<'a>) -> arbitrary::Result<Self> {
                Ok(zerocopy::transmute!(u.arbitrary::<[u8; size_of::<$name>()]>()?))
            }
        }
    )+};
}
#[cfg(feature = "arbitrary")]
arbitrary_records!(ChunkMetadata, ChunkSums, TensorDigests);
