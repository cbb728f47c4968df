//! Chunk records and sums (spec section 6; section 13, step 6).

use super::view::Tensor;
use crate::error::{Result, Rule};
use crate::format::*;

/// Validates all records and sums in one linear pass. Almost every field has exactly one valid value, because the format is
/// canonical.
///
/// `payloads` is the payload list, if the index has one. Returns the number of payloads.
pub(super) fn validate<'a>(
    header: &IndexHeader,
    records: &[ChunkMetadata],
    sums: &[ChunkSums],
    payloads: Option<&[[u8; DIGEST_SIZE]]>,
    tensors: impl Iterator<Item = Tensor<'a>>,
) -> Result<u32> {
    let mut end = u64::from(BLOB_HEADER_SIZE);
    let mut count = 0;
    for tensor in tensors {
        let chunks = tensor.chunks();
        let range = chunks.start as usize..chunks.end as usize;
        for ((chunk, record), sums) in chunks.zip(&records[range.clone()]).zip(&sums[range]) {
            let payload = payloads.map(|payloads| &payloads[chunk as usize]);
            end = check(&tensor, chunk, record, sums, payload, end).map_err(|e| e.in_chunk(chunk).in_tensor(tensor.name))?;
            count += u32::from(record.compressed_size.get() > 0);
        }
    }
    Rule::RecordBlobSize.check_eq(end, header.blob_size)?;
    Ok(count)
}

/// Checks one record. Its payload must begin at `end`, the end of the previous payload. Returns the offset of the next payload.
#[inline]
fn check(
    tensor: &Tensor<'_>,
    chunk: u32,
    record: &ChunkMetadata,
    sums: &ChunkSums,
    payload: Option<&[u8; DIGEST_SIZE]>,
    end: u64,
) -> Result<u64> {
    let range = tensor.chunk_range(chunk);
    let lanes = range.end - range.start;
    let (compressed, uncompressed) = (record.compressed_size.get(), record.uncompressed_size.get());
    let changed = record.num_deltas.get();
    Rule::RecordNumDeltas.check(u64::from(changed) <= lanes, "at most the chunk's lanes", changed)?;
    if changed == 0 || compressed == 0 {
        let empty = changed == 0 && compressed == 0 && uncompressed == 0 && record.crc32.get() == 0;
        Rule::RecordEmpty.check(empty, "sizes, deltas and CRC all zero", "some that are not")?;
    } else {
        let bound = u64::from(uncompressed) + u64::from(uncompressed) / 64 + 64;
        Rule::RecordSizes.check(u64::from(compressed) <= bound, "a compressed size within its bound", compressed)?;
        // The number of lanes fits in u32: a chunk has at most 4 MiB of lanes.
        let sizes = tensor.codec.check_sizes(compressed, uncompressed, changed, lanes as u32, tensor.lane_bytes());
        Rule::RecordSizes.check(sizes, "sizes that the codec allows", format_args!("{compressed} for {uncompressed}"))?;
    }
    if let Some(digest) = payload {
        let is_zero = *digest == [0; DIGEST_SIZE];
        let expected = if compressed == 0 { "zeros for a chunk without a payload" } else { "the digest of a payload" };
        Rule::PayloadDigest.check(is_zero == (compressed == 0), expected, if is_zero { "zeros" } else { "other bytes" })?;
    }
    Rule::RecordBlobOffset.check_eq(end, record.blob_offset.get())?;
    Rule::RecordOutputOffset.check_eq(range.start, record.output_offset.get())?;
    let (base, target) = (sums.base_sum.get(), sums.target_sum.get());
    Rule::RecordSums.check(tensor.base_kind != BaseKind::None || base == 0, "a base sum of 0 without a base", base)?;
    Rule::RecordSums.check(changed != 0 || base == target, "equal sums of an unchanged chunk", target)?;
    let next = end.checked_add(u64::from(compressed)).and_then(|x| x.checked_next_multiple_of(PAYLOAD_ALIGN));
    next.ok_or_else(|| Rule::RecordBlobOffset.broken("an offset below 2^64", end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::lane::Dtype;
    use crate::writer::sample::of_chunk;

    #[test]
    fn a_payload_may_be_as_large_as_its_bound_and_no_larger() {
        let index = of_chunk(Codec::Zstd, Dtype::Bf16, &[0; 8192], &[1; 8192]);
        let (tensor, sums) = (index.tensor(0), index.sums()[0]);
        for (uncompressed, bound) in [(2u32, 66u32), (63, 127), (64, 129), (65, 130), (127, 192), (128, 194), (6400, 6564)] {
            let checked = |compressed: u32| {
                let mut record = index.records()[0];
                (record.compressed_size, record.uncompressed_size) = (compressed.into(), uncompressed.into());
                check(&tensor, 0, &record, &sums, None, record.blob_offset.get())
            };
            assert_eq!(checked(bound).unwrap(), 64 + u64::from(bound).next_multiple_of(16));
            assert_eq!(checked(bound + 1).unwrap_err().rule(), Some(Rule::RecordSizes), "{uncompressed} bytes");
        }
    }
}
