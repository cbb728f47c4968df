//! Views of the tensors, chunks and files of an index.

use crate::codec::{Codec, TableSet};
use crate::derived::Derived;
use crate::error::{Error, Result, hex};
use crate::format::{BaseKind, ChunkMetadata, ChunkSums, DIGEST_SIZE, FileKind, TensorDigests};
use crate::lane::Dtype;
use crate::layout::StridedLayout;
use crate::prelude::*;
use crate::rectangle::Rectangle;
use core::ops::Range;

/// The place of a part in its tensor. Its extents are [`Tensor::shape`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Part<'a> {
    /// Shape of the tensor.
    pub whole: &'a [u64],
    /// First index of the part in each dimension.
    pub origin: &'a [u64],
}

/// One entry of a pair: a tensor, or a part of a tensor.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Tensor<'a> {
    /// Index in the tensor table.
    pub place: usize,
    /// Name in the target.
    pub name: &'a str,
    /// Name of the base tensor. Equals `name` unless the tensor was renamed. Has no meaning for [`BaseKind::None`].
    pub base_name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions of the tensor, or extents of the part. Empty for a scalar.
    pub shape: &'a [u64],
    /// Set if this is a part of a tensor. Lanes, chunks, codec and digests are then those of the part.
    pub part: Option<Part<'a>>,
    /// Source of the base lanes.
    pub base_kind: BaseKind,
    /// Number of rows of the base tensor for [`BaseKind::Prefix`], four fields for a derived base, else 0.
    pub base_param: u64,
    /// The tensors from which base lanes are formed, for [`BaseKind::Cast`] and [`BaseKind::Dequantised`].
    pub derived: Option<Derived<'a>>,
    /// Codec of the payloads.
    pub codec: Codec,
    /// Tables of codec `conditioned`, if any.
    pub tables: Option<&'a TableSet>,
    /// Number of lanes.
    pub lanes: u64,
    /// Number of lanes per chunk. The last chunk may have fewer.
    pub chunk_lanes: u64,
    /// Index of the first chunk in the index map.
    pub first_chunk: u32,
    /// Number of chunks.
    pub chunk_count: u32,
    /// Digests of the base tensor and of the target tensor.
    pub digests: &'a TensorDigests,
}

impl<'a> Tensor<'a> {
    /// Size of a lane in bytes.
    pub fn lane_bytes(&self) -> usize {
        self.dtype.lane_bytes()
    }

    /// Size of an element in bytes; 1 for packed dtypes.
    pub fn element_bytes(&self) -> usize {
        self.dtype.bits().div_ceil(8) as usize
    }

    /// Size of the target tensor in bytes.
    pub fn bytes(&self) -> u64 {
        self.lanes * self.lane_bytes() as u64
    }

    /// Indexes of the tensor's chunks in the index map.
    pub fn chunks(&self) -> Range<u32> {
        self.first_chunk..self.first_chunk + self.chunk_count
    }

    /// The lanes of a chunk, as a range of the tensor's lanes. `chunk` must be one of [`Tensor::chunks`].
    pub fn chunk_range(&self, chunk: u32) -> Range<u64> {
        let start = u64::from(chunk - self.first_chunk) * self.chunk_lanes;
        start..(start + self.chunk_lanes).min(self.lanes)
    }

    /// Shape of the whole tensor, also for a part.
    pub fn whole_shape(&self) -> &'a [u64] {
        self.part.map_or(self.shape, |part| part.whole)
    }

    /// The elements of the tensor that this entry describes.
    pub fn rectangle(&self) -> Rectangle {
        let whole = || vec![0; self.shape.len()];
        Rectangle::new(self.part.map_or_else(whole, |part| part.origin.to_vec()), self.shape)
    }

    /// The bytes of a part within the bytes of its tensor; `None` for a whole tensor.
    pub fn layout(&self) -> Option<StridedLayout> {
        self.part.map(|part| StridedLayout::of_rectangle(self.dtype.bits(), part.whole, None, part.origin, self.shape))
    }

    /// Shape that the base tensor must have; `None` if the tensor has no base. The base of a part is the same rectangle of a
    /// tensor of the whole shape.
    pub fn base_shape(&self) -> Option<Vec<u64>> {
        match self.base_kind {
            BaseKind::None => None,
            BaseKind::Same | BaseKind::Cast => Some(self.whole_shape().to_vec()),
            BaseKind::Dequantised => {
                let form = self.derived.and_then(|derived| derived.scales).map(|(form, _)| form);
                form.map(|form| form.base_shape(self.whole_shape()))
            }
            BaseKind::Prefix => {
                let mut shape = self.shape.to_vec();
                shape[0] = self.base_param;
                Some(shape)
            }
        }
    }

    /// Dtype that the base tensor must have. Has no meaning for [`BaseKind::None`].
    pub fn base_dtype(&self) -> Dtype {
        self.derived.map_or(self.dtype, |derived| derived.base_dtype)
    }

    /// Name, dtype and shape that the tensor of scales must have, for [`BaseKind::Dequantised`].
    pub fn scales(&self) -> Option<(&'a str, Dtype, Vec<u64>)> {
        let (form, name) = self.derived?.scales?;
        Some((name, form.scales_dtype(), form.scales_dims(self.whole_shape())))
    }

    /// Number of lanes of the base tensor, or of the part's rectangle of it; 0 if the tensor has no base. For a derived base, the
    /// number of formed lanes.
    pub fn base_lanes(&self) -> u64 {
        if self.part.is_some() || self.base_kind.has_all_lanes() {
            return if self.base_kind == BaseKind::None { 0 } else { self.lanes };
        }
        // The table parser has checked that this shape is valid.
        self.base_shape().and_then(|shape| self.dtype.lanes(&shape)).unwrap_or(0)
    }

    /// Size of the base tensor in bytes; 0 if the tensor has no base. For a derived base, the size of the formed lanes.
    pub fn base_bytes(&self) -> u64 {
        self.base_lanes() * self.lane_bytes() as u64
    }

    /// Digest of the base tensor: the first 16 bytes of its BLAKE3 hash. Zeros if the tensor has no base. For a derived base, the
    /// digest of the formed lanes.
    pub fn base_digest(&self) -> &'a [u8; DIGEST_SIZE] {
        &self.digests.base_digest
    }

    /// Digest of the target tensor: the first 16 bytes of its BLAKE3 hash.
    pub fn target_digest(&self) -> &'a [u8; DIGEST_SIZE] {
        &self.digests.target_digest
    }

    /// Compares bytes with the digest of the target tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`] with rule `tensor.target_digest`.
    pub fn check_target(&self, bytes: &[u8]) -> Result<()> {
        let (expected, found) = (self.target_digest(), crate::digest::short(&crate::digest::of(bytes)));
        let checked = crate::error::Rule::TensorTargetDigest.check(*expected == found, hex(expected), hex(&found));
        checked.map_err(|e| e.in_tensor(self.name))
    }

    /// The lanes of a range of elements, and the chunks that contain these lanes. Elements and lanes of a part count from its
    /// start.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range is not inside the tensor, or splits a byte of a packed dtype.
    pub fn locate(&self, elements: Range<u64>) -> Result<(Range<u64>, Range<u32>)> {
        let lanes = self.lanes_of(elements, self.lanes)?;
        let chunks = self.chunks_of(&lanes);
        Ok((lanes, chunks))
    }

    /// The lanes of a range of elements of the whole tensor.
    ///
    /// # Errors
    /// As for [`Tensor::locate`].
    pub fn lanes_of_whole(&self, elements: Range<u64>) -> Result<Range<u64>> {
        // The table parser has checked that this shape is valid.
        self.lanes_of(elements, self.dtype.lanes(self.whole_shape()).unwrap_or(0))
    }

    /// The lanes of a range of elements, of a tensor of `count` lanes.
    fn lanes_of(&self, elements: Range<u64>, count: u64) -> Result<Range<u64>> {
        let lane_bits = self.lane_bytes() as u64 * 8;
        let bits = |e: u64| e.checked_mul(self.dtype.bits()).filter(|b| b % lane_bits == 0).map(|b| b / lane_bits);
        match (bits(elements.start), bits(elements.end)) {
            (Some(start), Some(end)) if start <= end && end <= count => Ok(start..end),
            _ => Err(Error::InvalidArgument(format!(
                "elements {}..{} of tensor {}: expected a range of its {} elements that begins and ends on a byte",
                elements.start,
                elements.end,
                crate::error::Escaped(self.name),
                count * lane_bits / self.dtype.bits()
            ))),
        }
    }

    /// The chunks that contain a range of lanes.
    pub fn chunks_of(&self, lanes: &Range<u64>) -> Range<u32> {
        if lanes.is_empty() {
            return self.first_chunk..self.first_chunk;
        }
        let first = self.first_chunk + (lanes.start / self.chunk_lanes) as u32;
        first..self.first_chunk + ((lanes.end - 1) / self.chunk_lanes) as u32 + 1
    }
}

/// The record of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// Offset of the payload in the blob, in bytes.
    pub blob_offset: u64,
    /// Size of the payload in bytes.
    pub compressed_size: u32,
    /// Size of the expanded payload in bytes.
    pub uncompressed_size: u32,
    /// Number of changed lanes.
    pub num_deltas: u32,
    /// CRC-32 of the payload.
    pub crc32: u32,
    /// First lane of the chunk in its tensor.
    pub output_offset: u64,
    /// Chunk sum of the base lanes.
    pub base_sum: u64,
    /// Chunk sum of the target lanes.
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
    /// Name of the file. Empty if the target is a single file.
    pub name: &'a str,
    /// Structure of the file.
    pub kind: FileKind,
    /// Size of the content in bytes. The content is a safetensors header with its length field, or the whole file.
    pub content_size: u64,
    /// BLAKE3-128 of the content.
    pub content_digest: [u8; DIGEST_SIZE],
    /// The content, if the pair stores it.
    pub content: Option<&'a [u8]>,
}
