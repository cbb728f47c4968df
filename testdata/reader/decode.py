"""Decoding chunks and whole tensors: steps 8 to 12 of section 13."""

import zlib

from blake3 import blake3

from .codec import CODECS
from .common import align, at, need
from .lanes import apply_delta, lane_sum, pack_lanes, unpack_lanes
from .layout import DIGESTS, NONE


def decode_tensors(index, blob, base):
    """Base and target bytes of each entry of the tensor table; all chunks are checked, but no digests of tensors."""
    result = []
    for tensor in index.tensors:
        with at(tensor=tensor.name):
            data, chunks = base.bytes_of(tensor), []
            for c, first, lanes in tensor.chunks():
                with at(chunk=c):
                    chunks.append(decode_chunk(index, c, blob, tensor, data, first, lanes))
            result.append((data, b"".join(chunks)))
    return result


def decode_chunk(index, c, blob, tensor, base, first, lanes):
    """Target bytes of chunk `c` of `lanes` lanes from `first` on, from all bytes of the base tensor or of its part."""
    record, sums, w = index.records[c], index.sums[c], tensor.dtype.lane_bytes
    old = base[w * first : w * (first + lanes)].ljust(w * lanes, b"\0")
    need(lane_sum(old) == sums.base_sum, "chunk.base_sum")
    new = old
    if record.num_deltas:
        base_lanes = unpack_lanes(old, w)
        target_lanes = base_lanes.copy()
        for position, delta in read_changes(index, c, blob, tensor, base_lanes):
            target_lanes[position] = apply_delta(base_lanes[position], delta, 8 * w, tensor.dtype.ordered)
        new = pack_lanes(target_lanes, w)
    need(lane_sum(new) == sums.target_sum, "chunk.target_sum")
    return new


def read_changes(index, c, blob, tensor, base_lanes):
    """Pairs of a position and a delta. After the codec's own rules come those shared by all codecs."""
    record = index.records[c]
    w, end = tensor.dtype.lane_bytes, record.blob_offset + record.compressed_size
    payload = blob[record.blob_offset : end]
    need(zlib.crc32(payload) == record.crc32, "payload.crc32")
    need(index.payload_list is None or blake3(payload)[:16] == index.payload_list[c], "payload.digest")
    need(not any(blob[end : align(end, 16)]), "payload.padding")
    positions, deltas = CODECS[tensor.entry.codec].changes(payload, record, tensor, base_lanes)
    need(all(a < b for a, b in zip(positions, positions[1:])), "payload.positions", "order")
    need(not positions or positions[-1] < len(base_lanes), "payload.positions", "past the end")
    need(len(positions) == len(deltas) == record.num_deltas, "payload.deltas", "count")
    need(all(0 < delta < 1 << 8 * w for delta in deltas), "payload.deltas", "zero or too large")
    return zip(positions, deltas)


def check_digests(index, blob, tensors):
    if index.header.required_features & DIGESTS and index.payload_list is None:
        payloads = (blob[r.blob_offset : r.blob_offset + r.compressed_size] for r in index.records)
        listed = b"".join(blake3(payload)[:16] if payload else bytes(16) for payload in payloads)
        need(blake3(listed) == index.header.payload_root, "header.payload_root")
    base_hashes = target_hashes = b""
    for tensor, digest, (base, target) in zip(index.tensors, index.digests, tensors):
        base_hash = bytes(32) if tensor.entry.base_kind == NONE else blake3(base)
        target_hash = blake3(target)
        with at(tensor=tensor.name):
            need(base_hash[:16] == digest.base_digest, "tensor.base_digest")
            need(target_hash[:16] == digest.target_digest, "tensor.target_digest")
        base_hashes += base_hash
        target_hashes += target_hash
    if not index.header.required_features & DIGESTS:  # otherwise they were compared when the index was opened
        need(blake3(base_hashes) == index.base_root, "digest.base_root")
        need(blake3(target_hashes) == index.target_root, "digest.target_root")
