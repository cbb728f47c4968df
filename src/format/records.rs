//! The flat arrays: chunk records, chunk sums and digests (spec sections 6 and 7).
//!
//! These are read in place: little-endian, alignment 1, so that any byte slice of the right length is an array of them.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Location of a chunk's payload and lanes: 32 bytes, one record of the index map.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChunkMetadata {
    /// First byte of the payload in the blob file.
    pub blob_offset: U64,
    /// Bytes of the payload as stored.
    pub compressed_size: U32,
    /// Bytes of the expanded payload.
    pub uncompressed_size: U32,
    /// Changed lanes in the chunk.
    pub num_deltas: U32,
    /// CRC-32 of the payload as stored.
    pub crc32: U32,
    /// First lane of the chunk in its tensor.
    pub output_offset: U64,
}

/// Linear sums over a chunk's lanes (section 6.1).
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
    /// Digest of the base tensor; zeros if there is none.
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
