//! Corrects checksums, digests and sizes of a changed pair, as an attacker would.
//!
//! Uses only the public interface of the library and its `internals`, because the integration tests share this file.

use std::ops::Range;
use tpde::internals;
use tpde::{BaseKind, MemoryCheckpoint, Tensor, TensorInfo, ValidatedIndex};
use tpde_core::codec::{ChunkDecoder, Encoded, EncodedChunk};
use tpde_core::format::{
    BLOB_HEADER_SIZE, BLOB_MAGIC, FEATURE_DERIVED, FEATURE_DIGESTS, FEATURE_PARTS, FEATURE_PAYLOAD_LIST, INDEX_HEADER_CRC_SPAN,
    INDEX_HEADER_SIZE, INDEX_MAGIC, PAIR_DIGEST_SIZE, VERSION_MAJOR,
};
use tpde_core::sums::chunk_sum;

/// Maximum size in bytes of the tensors that a target works on.
pub const MOST_BYTES: u64 = 1 << 18;

const HEADER: usize = INDEX_HEADER_SIZE as usize;
const DIGEST: usize = PAIR_DIGEST_SIZE as usize;
/// Offset of the section entries in the header, and the size of one entry in bytes.
const SECTIONS: (usize, usize) = (64, 24);

fn u32_at(bytes: &[u8], at: usize) -> usize {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |b| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

/// Offsets of the records. Their number is the header's chunk count, limited to the records that fit in the index.
fn records_of(index: &[u8]) -> impl Iterator<Item = usize> + use<> {
    let count = u32_at(index, 48).min(index.len().saturating_sub(HEADER) / 32);
    (0..count).map(|record| HEADER + 32 * record)
}

/// Required features of an index that these functions know: `digests` and `payload_list`.
fn features(index: &[u8]) -> (bool, bool) {
    let bits = index.get(16).copied().unwrap_or(0);
    (bits & FEATURE_DIGESTS as u8 != 0, bits & (FEATURE_DIGESTS | FEATURE_PAYLOAD_LIST) as u8 == 3)
}

/// Bytes of a section as stored, from its number in the header.
fn section(index: &[u8], number: usize) -> Range<usize> {
    let at = SECTIONS.0 + number * SECTIONS.1;
    let (offset, size) = (u64_at(index, at) as usize, u64_at(index, at + 8) as usize);
    let end = offset.saturating_add(size).min(index.len());
    offset.min(end)..end
}

/// Corrects the roots over stored digests, and the payload root if the index has the payload list.
fn repair_roots(index: &mut [u8]) {
    let (has_digests, has_list) = features(index);
    if !has_digests {
        return;
    }
    let digests = section(index, 2);
    let tensors = u32_at(index, 52).min(digests.len().saturating_sub(64) / 32);
    for side in [0, 16] {
        let mut root = blake3::Hasher::new();
        (0..tensors).for_each(|i| _ = root.update(&index[digests.start + 64 + 32 * i + side..][..16]));
        put(index, digests.start + 2 * side, root.finalize().as_bytes());
    }
    if has_list {
        let sums = section(index, 1);
        let list = sums.start + sums.len() / 2..sums.end;
        let root = *blake3::hash(&index[list]).as_bytes();
        put(index, 208, &root);
    }
}

/// Corrects the length, the CRC, the roots over stored digests and the pair digest of an index.
pub fn repair_digests(index: &mut [u8]) {
    if index.len() < HEADER + DIGEST {
        return;
    }
    repair_roots(index);
    let size = (index.len() as u64).to_le_bytes();
    put(index, 32, &size);
    let crc = crc32fast::hash(&index[..INDEX_HEADER_CRC_SPAN]).to_le_bytes();
    put(index, INDEX_HEADER_CRC_SPAN, &crc);
    let body = index.len() - DIGEST;
    let digest = *blake3::hash(&index[..body]).as_bytes();
    put(index, body, &digest);
}

/// Corrects fields that are constant or follow from counts and sizes: fixed header fields, offsets and padding of the sections,
/// sizes of sections that are not compressed, blob offsets of the records, the size of the blob, and the length of the index.
pub fn repair_layout(index: &mut Vec<u8>) {
    if index.len() < HEADER {
        return;
    }
    put(index, 0, &INDEX_MAGIC);
    put(index, 8, &VERSION_MAJOR.to_le_bytes());
    put(index, 12, &INDEX_HEADER_SIZE.to_le_bytes());
    let (has_digests, has_list) = features(index);
    let has_parts = has_list && index[16] & FEATURE_PARTS as u8 != 0;
    let bits = u8::from(has_digests) | u8::from(has_list) << 1 | u8::from(has_parts) << 2 | index[16] & FEATURE_DERIVED as u8;
    put(index, 16, &[bits, 0, 0, 0, 0, 0, 0, 0]);
    put(index, 60, &[0; 4]);
    if !has_digests {
        put(index, 208, &[0; 32]);
    }
    put(index, 240, &[0; 12]);
    let (chunks, tensors) = (u32_at(index, 48) as u64, u32_at(index, 52) as u64);
    let mut end = HEADER as u64;
    for section in 0..6 {
        let at = SECTIONS.0 + section * SECTIONS.1;
        let offset = end.next_multiple_of(8);
        put(index, end as usize, &[0; 8][..(offset - end) as usize]);
        put(index, at, &offset.to_le_bytes());
        if let Some(size) = [32 * chunks, (16 << u8::from(has_list)) * chunks, 64 + 32 * tensors].get(section) {
            put(index, at + 8, &size.to_le_bytes());
            put(index, at + 16, &size.to_le_bytes());
        }
        end = offset.saturating_add(u64_at(index, at + 8)).min(1 << 32);
    }
    let size = end.next_multiple_of(8) as usize + DIGEST;
    if size <= 2 * index.len() {
        index.resize(size, 0);
        index[end as usize..size - DIGEST].fill(0);
    }
    let mut offset = u64::from(BLOB_HEADER_SIZE);
    for at in records_of(index) {
        put(index, at, &offset.to_le_bytes());
        offset = (offset + u32_at(index, at + 8) as u64).next_multiple_of(16);
    }
    put(index, 40, &offset.to_le_bytes());
}

/// Makes index and blob consistent: lengths, payload CRCs, padding, the pair digest and both headers.
pub fn repair_pair(index: &mut Vec<u8>, blob: &mut Vec<u8>) {
    repair_layout(index);
    blob.resize(u64_at(index, 40).min(MOST_BYTES) as usize, 0);
    let mut list = vec![[0u8; 16]; records_of(index).count()];
    for (at, digest) in records_of(index).zip(&mut list) {
        let (from, size) = (u64_at(index, at) as usize, u32_at(index, at + 8));
        let Some(stored) = blob.get_mut(from..).and_then(|rest| rest.get_mut(..size.next_multiple_of(16))) else { break };
        stored[size..].fill(0);
        let crc = if size == 0 { 0 } else { crc32fast::hash(&stored[..size]) };
        put(index, at + 20, &crc.to_le_bytes());
        if size > 0 {
            digest.copy_from_slice(&blake3::hash(&stored[..size]).as_bytes()[..16]);
        }
    }
    let (has_digests, has_list) = features(index);
    if has_digests {
        put(index, 208, blake3::hash(list.as_flattened()).as_bytes());
    }
    if has_list {
        let sums = section(index, 1);
        put(index, sums.start + sums.len() / 2, list.as_flattened());
    }
    repair_digests(index);
    repair_blob_header(index, blob);
}

/// Corrects every field in the header of a blob.
pub fn repair_blob_header(index: &[u8], blob: &mut [u8]) {
    if index.len() < HEADER + DIGEST || blob.len() < BLOB_HEADER_SIZE as usize {
        return;
    }
    let size = (blob.len() as u64).to_le_bytes();
    put(blob, 0, &BLOB_MAGIC);
    put(blob, 8, &index[8..12]);
    put(blob, 12, &BLOB_HEADER_SIZE.to_le_bytes());
    put(blob, 16, &size);
    put(blob, 24, &index[index.len() - DIGEST..]);
    put(blob, 56, &[0; 4]);
    let crc = crc32fast::hash(&blob[..60]).to_le_bytes();
    put(blob, 60, &crc);
}

/// The bytes of an entry in those of its tensor.
pub fn part_bytes(whole: &[u8], entry: &Tensor<'_>) -> Vec<u8> {
    let Some(part) = entry.part else { return whole.to_vec() };
    let mut bytes: Vec<(usize, u8)> = Vec::new();
    for element in 0..entry.shape.iter().product() {
        let (mut rest, mut number, mut stride): (u64, u64, u64) = (element, 0, 1);
        for i in (0..entry.shape.len()).rev() {
            number += (part.origin[i] + rest % entry.shape[i]) * stride;
            rest /= entry.shape[i];
            stride = stride.wrapping_mul(part.whole[i]);
        }
        // Elements of packed dtypes share bytes.
        let range = number * entry.dtype.bits() / 8..((number + 1) * entry.dtype.bits()).div_ceil(8);
        for at in range.map(|at| at as usize) {
            if bytes.last().is_none_or(|(last, _)| *last != at) {
                bytes.push((at, whole.get(at).copied().unwrap_or(0)));
            }
        }
    }
    bytes.into_iter().map(|(_, byte)| byte).collect()
}

/// The base lanes of an entry. They are missing, in part or as a whole, where these base tensors do not fit.
pub fn lanes_of_base<B: AsRef<[u8]>>(tensor: &Tensor<'_>, bases: &[(TensorInfo, B)]) -> Vec<u8> {
    if tensor.derived.is_some() {
        let base = MemoryCheckpoint::new(bases.iter().map(|(info, bytes)| (info.clone(), bytes.as_ref())));
        return internals::converted_lanes(tensor, &base.expect("tensors as long as their shapes say")).unwrap_or_default();
    }
    let base = bases.iter().find(|(info, _)| tensor.base_kind != BaseKind::None && info.name == tensor.base_name);
    base.map_or(Vec::new(), |(_, bytes)| part_bytes(bytes.as_ref(), tensor))
}

/// Byte range of a chunk in its tensor.
pub fn chunk_bytes(tensor: &Tensor<'_>, chunk: u32) -> Range<usize> {
    let (range, width) = (tensor.chunk_range(chunk), tensor.lane_bytes() as u64);
    (range.start * width) as usize..(range.end * width) as usize
}

/// Corrects the sums and digests of a valid index for these base tensors and for the lanes that its payloads decode to, so that
/// applying a hostile pair runs to the end. A payload that does not decode gets the target sum 0.
pub fn repair_sums<B: AsRef<[u8]>>(index: &ValidatedIndex, blob: &mut [u8], bases: &[(TensorInfo, B)]) -> Vec<u8> {
    let mut bytes = index.as_bytes().to_vec();
    let sums_at = HEADER + 32 * index.records().len();
    let digests_at = section(&bytes, 2).start;
    let (mut base_root, mut target_root) = (blake3::Hasher::new(), blake3::Hasher::new());
    let mut decoder = ChunkDecoder::new();
    for (i, tensor) in index.tensors().enumerate() {
        let base = lanes_of_base(&tensor, bases);
        let mut target = base.clone();
        target.resize(tensor.bytes() as usize, 0);
        for chunk in tensor.chunks() {
            let lanes = &mut target[chunk_bytes(&tensor, chunk)];
            let base_sum = chunk_sum(lanes);
            let record = &index.records()[chunk as usize];
            let encoded = Encoded::from(record);
            let mut target_sum = base_sum;
            if encoded.num_deltas > 0 {
                let payload = &blob[record.blob_offset.get() as usize..][..record.compressed_size.get() as usize];
                let (codec, dtype, tables) = (tensor.codec, tensor.dtype, tensor.tables);
                let chunk = EncodedChunk { codec, dtype, tables, encoded, payload, base_sum };
                let decoded = decoder.decode(&chunk, lanes, &mut |_, _| Ok(()));
                target_sum = decoded.unwrap_or(0);
            }
            put(&mut bytes, sums_at + 16 * chunk as usize, &base_sum.to_le_bytes());
            put(&mut bytes, sums_at + 16 * chunk as usize + 8, &target_sum.to_le_bytes());
        }
        let (base_hash, target_hash) = (blake3::hash(&base), blake3::hash(&target));
        let base_hash = if tensor.base_kind == BaseKind::None { [0; 32] } else { *base_hash.as_bytes() };
        base_root.update(&base_hash);
        target_root.update(target_hash.as_bytes());
        put(&mut bytes, digests_at + 64 + 32 * i, &base_hash[..16]);
        put(&mut bytes, digests_at + 80 + 32 * i, &target_hash.as_bytes()[..16]);
    }
    put(&mut bytes, digests_at, base_root.finalize().as_bytes());
    put(&mut bytes, digests_at + 32, target_root.finalize().as_bytes());
    repair_digests(&mut bytes);
    repair_blob_header(&bytes, blob);
    bytes
}
