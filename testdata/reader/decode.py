"""Decoding chunks and whole tensors: steps 8 to 12 of section 13."""

import zlib

from blake3 import blake3

from .codec import CODECS
from .common import align, at, need
from .lanes import apply_delta, lane_sum, pack_lanes, unpack_lanes
from .layout import NONE


def decode_tensors(index, blob, base):
    """Base and target bytes of every tensor, by name; all chunks are checked, but no digests."""
    result = {}
    for tensor in index.tensors:
        with at(tensor=tensor.name):
            data, chunks = base.bytes_of(tensor), []
            for c, first, lanes in tensor.chunks():
                with at(chunk=c):
                    chunks.append(decode_chunk(index.records[c], index.sums[c], blob, tensor, data, first, lanes))
            result[tensor.name] = data, b"".join(chunks)
    return result


def decode_chunk(record, sums, blob, tensor, base, first, lanes):
    """Target bytes of a chunk of `lanes` lanes from `first` on, from all bytes of the base tensor."""
    w = tensor.dtype.lane_bytes
    old = base[w * first : w * (first + lanes)].ljust(w * lanes, b"\0")
    need(lane_sum(old) == sums.base_sum, "chunk.base_sum")
    new = old
    if record.num_deltas:
        base_lanes = unpack_lanes(old, w)
        target_lanes = base_lanes.copy()
        for position, delta in read_changes(record, blob, tensor, base_lanes):
            target_lanes[position] = apply_delta(base_lanes[position], delta, 8 * w, tensor.dtype.ordered)
        new = pack_lanes(target_lanes, w)
    need(lane_sum(new) == sums.target_sum, "chunk.target_sum")
    return new


def read_changes(record, blob, tensor, base_lanes):
    """Pairs of a position and a delta. After the codec's own rules come those shared by all codecs."""
    w, end = tensor.dtype.lane_bytes, record.blob_offset + record.compressed_size
    payload = blob[record.blob_offset : end]
    need(zlib.crc32(payload) == record.crc32, "payload.crc32")
    need(not any(blob[end : align(end, 16)]), "payload.padding")
    positions, deltas = CODECS[tensor.entry.codec].changes(payload, record, tensor, base_lanes)
    need(all(a < b for a, b in zip(positions, positions[1:])), "payload.positions", "order")
    need(not positions or positions[-1] < len(base_lanes), "payload.positions", "past the end")
    need(len(positions) == len(deltas) == record.num_deltas, "payload.deltas", "count")
    need(all(0 < delta < 1 << 8 * w for delta in deltas), "payload.deltas", "zero or too large")
    return zip(positions, deltas)


def check_digests(index, tensors):
    base_hashes = target_hashes = b""
    for tensor, digest in zip(index.tensors, index.digests):
        base, target = tensors[tensor.name]
        base_hash = bytes(32) if tensor.entry.base_kind == NONE else blake3(base)
        target_hash = blake3(target)
        with at(tensor=tensor.name):
            need(base_hash[:16] == digest.base_digest, "tensor.base_digest")
            need(target_hash[:16] == digest.target_digest, "tensor.target_digest")
        base_hashes += base_hash
        target_hashes += target_hash
    need(blake3(base_hashes) == index.base_root, "digest.base_root")
    need(blake3(target_hashes) == index.target_root, "digest.target_root")
