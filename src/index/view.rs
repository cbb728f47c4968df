//! Tensors and files of an index, as readers see them.

use crate::codec::{Codec, TableSet};
use crate::error::{Error, Result};
use crate::format::{BaseKind, ChunkMetadata, ChunkSums, DIGEST_SIZE, FileKind, TensorDigests};
use crate::lane::Dtype;
use std::ops::Range;

/// One tensor of a pair.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Tensor<'a> {
    /// Index in the tensor table.
    pub place: usize,
    /// Name in the target.
    pub name: &'a str,
    /// Name of its base tensor, which differs only if the tensor was renamed. Meaningless for [`BaseKind::None`].
    pub base_name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions; empty for a scalar.
    pub shape: &'a [u64],
    /// Where its base lanes come from.
    pub base_kind: BaseKind,
    /// Parameter of the base kind: rows of the base for [`BaseKind::Prefix`].
    pub base_param: u64,
    /// Codec of its payloads.
    pub codec: Codec,
    /// Tables of codec `conditioned`, if it has some.
    pub(crate) tables: Option<&'a TableSet>,
    /// Lanes of the tensor.
    pub lanes: u64,
    /// Lanes of a chunk.
    pub chunk_lanes: u64,
    /// Index of its first chunk in the index map.
    pub first_chunk: u32,
    /// Number of its chunks.
    pub chunk_count: u32,
    /// Digests before and after.
    pub(crate) digests: &'a TensorDigests,
}

impl<'a> Tensor<'a> {
    /// Bytes of a lane.
    pub fn lane_bytes(&self) -> usize {
        self.dtype.lane_bytes()
    }

    /// Bytes of an element; 1 for packed dtypes.
    pub fn element_bytes(&self) -> usize {
        self.dtype.bits().div_ceil(8) as usize
    }

    /// Bytes of the target tensor.
    pub fn bytes(&self) -> u64 {
        self.lanes * self.lane_bytes() as u64
    }

    /// Indexes of its chunks in the index map.
    pub fn chunks(&self) -> Range<u32> {
        self.first_chunk..self.first_chunk + self.chunk_count
    }

    /// Lanes of a chunk, which must be one of [`Tensor::chunks`].
    pub fn chunk_range(&self, chunk: u32) -> Range<u64> {
        let start = u64::from(chunk - self.first_chunk) * self.chunk_lanes;
        start..(start + self.chunk_lanes).min(self.lanes)
    }

    /// Shape that the base tensor must have; `None` without a base.
    pub fn base_shape(&self) -> Option<Vec<u64>> {
        match self.base_kind {
            BaseKind::None => None,
            BaseKind::Same => Some(self.shape.to_vec()),
            BaseKind::Prefix => {
                let mut shape = self.shape.to_vec();
                shape[0] = self.base_param;
                Some(shape)
            }
        }
    }

    /// Lanes of the base tensor; 0 without a base.
    pub fn base_lanes(&self) -> u64 {
        // Fits: otherwise the table would have been refused.
        self.base_shape().and_then(|shape| self.dtype.lanes(&shape)).unwrap_or(0)
    }

    /// Bytes of the base tensor; 0 without a base.
    pub fn base_bytes(&self) -> u64 {
        self.base_lanes() * self.lane_bytes() as u64
    }

    /// Digest of the base tensor: the first bytes of its BLAKE3 hash; zeros without a base.
    pub fn base_digest(&self) -> &'a [u8; DIGEST_SIZE] {
        &self.digests.base_digest
    }

    /// Digest of the target tensor.
    pub fn target_digest(&self) -> &'a [u8; DIGEST_SIZE] {
        &self.digests.target_digest
    }

    /// Lanes of a range of elements, and the chunks that contain them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range is not inside the tensor, or splits a byte of a packed dtype.
    pub fn locate(&self, elements: Range<u64>) -> Result<(Range<u64>, Range<u32>)> {
        let lane_bits = self.lane_bytes() as u64 * 8;
        let bits = |e: u64| e.checked_mul(self.dtype.bits()).filter(|b| b % lane_bits == 0).map(|b| b / lane_bits);
        let lanes = match (bits(elements.start), bits(elements.end)) {
            (Some(start), Some(end)) if start <= end && end <= self.lanes => start..end,
            _ => {
                return Err(Error::InvalidArgument(format!(
                    "elements {}..{} of tensor {}: expected a range of its {} elements that begins and ends on a byte",
                    elements.start,
                    elements.end,
                    crate::error::Escaped(self.name),
                    self.lanes * lane_bits / self.dtype.bits()
                )));
            }
        };
        let chunks = if lanes.is_empty() {
            self.first_chunk..self.first_chunk
        } else {
            let first = self.first_chunk + (lanes.start / self.chunk_lanes) as u32;
            first..self.first_chunk + ((lanes.end - 1) / self.chunk_lanes) as u32 + 1
        };
        Ok((lanes, chunks))
    }
}

/// The record of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// First byte of the payload in the blob.
    pub blob_offset: u64,
    /// Bytes of the payload.
    pub compressed_size: u32,
    /// Bytes that the codec expands the payload to.
    pub uncompressed_size: u32,
    /// Lanes that change.
    pub num_deltas: u32,
    /// CRC-32 of the payload.
    pub crc32: u32,
    /// First lane of the chunk in its tensor.
    pub output_offset: u64,
    /// Sum of the base lanes.
    pub base_sum: u64,
    /// Sum of the target lanes.
    pub target_sum: u64,
}

impl Chunk {
    pub(super) fn new(record: &ChunkMetadata, sums: &ChunkSums) -> Self {
        Self {
            blob_offset: record.blob_offset.get(),
            compressed_size: record.compressed_size.get(),
            uncompressed_size: record.uncompressed_size.get(),
            num_deltas: record.num_deltas.get(),
            crc32: record.crc32.get(),
            output_offset: record.output_offset.get(),
            base_sum: sums.base_sum.get(),
            target_sum: sums.target_sum.get(),
        }
    }
}

/// One target file.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct TargetFile<'a> {
    /// Name, empty for a lone file.
    pub name: &'a str,
    /// What the file consists of.
    pub kind: FileKind,
    /// Bytes of the content: a safetensors header with its length, or the whole file.
    pub content_size: u64,
    /// BLAKE3-128 of the content.
    pub content_digest: [u8; DIGEST_SIZE],
    /// The content, where it is stored.
    pub content: Option<&'a [u8]>,
}
