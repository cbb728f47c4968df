//! The blob: its header, and the checks of a payload (spec section 11; section 13, steps 7 and 10).

#![forbid(unsafe_code)]

use crate::codec::{ChunkDecoder, Encoded, EncodedChunk};
use crate::digest;
use crate::error::{Error, Result, Rule, hex};
use crate::format::{
    BLOB_HEADER_CRC_SPAN, BLOB_HEADER_SIZE, BLOB_MAGIC, BlobHeader, ChunkMetadata, DIGEST_SIZE, PAYLOAD_ALIGN, VERSION_MAJOR,
};
use crate::index::{Tensor, ValidatedIndex};
use crate::source::Source;
use crate::sums::chunk_sum;
use alloc::vec::Vec;
use binrw::BinRead;
use binrw::io::Cursor;

/// Checks that a blob belongs to an index. `header` has the first [`BLOB_HEADER_SIZE`] bytes of the blob, or all if there are
/// fewer, and `size` is the size of the blob.
///
/// # Errors
/// [`Error::Invalid`] with a `blob` rule.
pub fn check_header(index: &ValidatedIndex, header: &[u8], size: u64) -> Result<()> {
    let expected = index.header().blob_size;
    if size < u64::from(BLOB_HEADER_SIZE) || header.len() < BLOB_HEADER_SIZE as usize {
        return Err(Rule::BlobBlobSize.broken(expected, size));
    }
    // Check the magic before the size, so that a file that is not a blob is reported as such.
    Rule::BlobMagic.check(header[..8] == BLOB_MAGIC, hex(&BLOB_MAGIC), hex(&header[..8]))?;
    Rule::BlobBlobSize.check_eq(expected, size)?;
    let fields = BlobHeader::read(&mut Cursor::new(header)).map_err(|e| Rule::BlobBlobSize.broken("a header", e))?;
    Rule::BlobVersionMajor.check_eq(VERSION_MAJOR, fields.version_major)?;
    Rule::BlobHeaderSize.check_eq(BLOB_HEADER_SIZE, fields.header_size)?;
    let crc = crc32fast::hash(&header[..BLOB_HEADER_CRC_SPAN]);
    Rule::BlobCrc32.check(crc == fields.header_crc32, format_args!("{:08x}", fields.header_crc32), format_args!("{crc:08x}"))?;
    Rule::BlobReserved.check_eq(0, fields.reserved)?;
    Rule::BlobVersionMinor.check_eq(index.header().version_minor, fields.version_minor)?;
    Rule::BlobBlobSize.check_eq(expected, fields.blob_size)?;
    let own = index.pair_digest();
    Rule::BlobPairDigest.check(*own == fields.pair_digest, hex(own), hex(&fields.pair_digest))
}

/// Size in bytes that a payload takes in the blob, with padding.
pub fn stored_size(record: &ChunkMetadata) -> usize {
    (record.compressed_size.get() as usize).next_multiple_of(PAYLOAD_ALIGN as usize)
}

/// The payload of a record, after checking its CRC, its digest if one is known, and its padding. `stored` has the
/// [`stored_size`] bytes of the blob from the record's `blob_offset` on.
///
/// # Errors
/// [`Error::Invalid`] with the chunk if the payload is damaged; [`Error::InvalidArgument`] if `stored` has another size.
pub fn check_payload<'a>(
    stored: &'a [u8],
    record: &ChunkMetadata,
    digest: Option<&[u8; DIGEST_SIZE]>,
    chunk: u32,
) -> Result<&'a [u8]> {
    let size = stored_size(record);
    if stored.len() != size {
        return Err(Error::InvalidArgument(alloc::format!("{} bytes for a payload of {size}, with padding", stored.len())));
    }
    let (payload, padding) = stored.split_at(record.compressed_size.get() as usize);
    let (expected, found) = (record.crc32.get(), crc32fast::hash(payload));
    let at = |e: Error| e.in_chunk(chunk);
    Rule::PayloadCrc32.check(expected == found, format_args!("{expected:08x}"), format_args!("{found:08x}")).map_err(at)?;
    if let Some(expected) = digest {
        let found = digest::of_payload(payload);
        Rule::PayloadDigest.check(*expected == found, hex(expected), hex(&found)).map_err(at)?;
    }
    Rule::PayloadPadding.check(padding.iter().all(|&b| b == 0), "zeros after the payload", "other bytes").map_err(at)?;
    Ok(payload)
}

/// Turns the base lanes of a chunk into its target lanes, in place. Compares CRC, digest if the index stores it, padding, base sum and
/// target sum. `tensor` is an entry of `index`, and `chunk` is one of its chunks.
///
/// A forged payload can have the right sum. [`Tensor::check_target`] finds it when all chunks of the tensor are decoded.
///
/// # Errors
/// - [`Error::InvalidArgument`] if `chunk` is not one of the tensor, or `lanes` has another size than the chunk.
/// - [`Error::Invalid`] with rule `chunk.base_sum` if the base lanes are not those that the pair was made from. `lanes` is unchanged.
/// - [`Error::Invalid`] with another rule if the payload is damaged. `lanes` is then a mixture of base lanes and target lanes.
/// - The errors of [`Source::bytes`].
pub fn decode_chunk(
    index: &ValidatedIndex,
    tensor: &Tensor<'_>,
    chunk: u32,
    blob: &(impl Source + ?Sized),
    decoder: &mut ChunkDecoder,
    lanes: &mut [u8],
) -> Result<()> {
    let (Some(record), Some(sums), true) =
        (index.records().get(chunk as usize), index.sums().get(chunk as usize), tensor.chunks().contains(&chunk))
    else {
        return Err(Error::InvalidArgument(alloc::format!("chunk {chunk} of a tensor with chunks {:?}", tensor.chunks())));
    };
    let range = tensor.chunk_range(chunk);
    let expected = (range.end - range.start) * tensor.lane_bytes() as u64;
    if lanes.len() as u64 != expected {
        return Err(Error::InvalidArgument(alloc::format!("{} bytes for a chunk of {expected}", lanes.len())));
    }
    let (base_sum, target_sum) = (sums.base_sum.get(), sums.target_sum.get());
    let found = chunk_sum(lanes);
    let at = |e: Error| e.in_chunk(chunk).in_tensor(tensor.name);
    Rule::ChunkBaseSum.check(found == base_sum, format_args!("{base_sum:016x}"), format_args!("{found:016x}")).map_err(at)?;
    let mut scratch = Vec::new();
    let stored = blob.bytes(record.blob_offset.get(), stored_size(record), &mut scratch)?;
    let digest = index.payload_list().map(|list| &list[chunk as usize]);
    let payload = check_payload(stored, record, digest, chunk).map_err(at)?;
    if record.num_deltas.get() == 0 {
        return Ok(()); // the index has equal sums for an unchanged chunk
    }
    let encoded = Encoded::from(record);
    let (codec, dtype, tables) = (tensor.codec, tensor.dtype, tensor.tables);
    let chunk = EncodedChunk { codec, dtype, tables, encoded, payload, base_sum };
    let sum = decoder.decode(&chunk, lanes, &mut |_, _| Ok(())).map_err(at)?;
    Rule::ChunkTargetSum.check(sum == target_sum, format_args!("{target_sum:016x}"), format_args!("{sum:016x}")).map_err(at)
}

/// Turns the base lanes of an entry into its target lanes, in place: [`decode_chunk`] for each chunk, then [`Tensor::check_target`].
///
/// # Errors
/// - [`Error::InvalidArgument`] if `lanes` has another size than the entry.
/// - The errors of [`decode_chunk`] and [`Tensor::check_target`]. `lanes` is then a mixture of base lanes and target lanes.
pub fn decode_tensor(index: &ValidatedIndex, tensor: &Tensor<'_>, blob: &(impl Source + ?Sized), lanes: &mut [u8]) -> Result<()> {
    if lanes.len() as u64 != tensor.bytes() {
        return Err(Error::InvalidArgument(alloc::format!("{} bytes for a tensor of {}", lanes.len(), tensor.bytes())));
    }
    let mut decoder = ChunkDecoder::new();
    let size = tensor.chunk_lanes as usize * tensor.lane_bytes();
    for (chunk, lanes) in tensor.chunks().zip(lanes.chunks_mut(size)) {
        decode_chunk(index, tensor, chunk, blob, &mut decoder, lanes)?;
    }
    tensor.check_target(lanes)
}
