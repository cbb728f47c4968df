//! The blob: its header, and the checks of a payload (spec section 11; section 13, steps 7 and 10).

#![forbid(unsafe_code)]

use crate::digest;
use crate::error::{Error, Result, Rule, hex};
use crate::format::{
    BLOB_HEADER_CRC_SPAN, BLOB_HEADER_SIZE, BLOB_MAGIC, BlobHeader, ChunkMetadata, DIGEST_SIZE, PAYLOAD_ALIGN, VERSION_MAJOR,
};
use crate::index::ValidatedIndex;
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
