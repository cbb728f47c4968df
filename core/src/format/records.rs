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

#[cfg(feature = "arbitrary")]
mod arbitrary_impls {
    use super::{ChunkMetadata, ChunkSums, TensorDigests};
    use arbitrary::{Arbitrary, Result, Unstructured};

    impl<'a> Arbitrary<'a> for ChunkMetadata {
        fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
            Ok(Self {
                blob_offset: u.arbitrary::<u64>()?.into(),
                compressed_size: u.arbitrary::<u32>()?.into(),
                uncompressed_size: u.arbitrary::<u32>()?.into(),
                num_deltas: u.arbitrary::<u32>()?.into(),
                crc32: u.arbitrary::<u32>()?.into(),
                output_offset: u.arbitrary::<u64>()?.into(),
            })
        }
    }

    impl<'a> Arbitrary<'a> for ChunkSums {
        fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
            Ok(Self { base_sum: u.arbitrary::<u64>()?.into(), target_sum: u.arbitrary::<u64>()?.into() })
        }
    }

    impl<'a> Arbitrary<'a> for TensorDigests {
        fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
            Ok(Self { base_digest: u.arbitrary()?, target_digest: u.arbitrary()? })
        }
    }
}
