"""Codec 0, `raw`: section 2 of codecs.md."""

from ..common import align, need
from ..lanes import unpack_lanes

HAS_TABLES = False


def sizes_fit(record, w, lanes):
    return record.compressed_size == record.uncompressed_size == align(4 * record.num_deltas, w) + w * record.num_deltas


def changes(payload, record, tensor, base_lanes):
    w, positions_end = tensor.dtype.lane_bytes, 4 * record.num_deltas
    deltas_at = align(positions_end, w)
    need(not any(payload[positions_end:deltas_at]), "payload.positions", "padding")
    return unpack_lanes(payload[:positions_end], 4), unpack_lanes(payload[deltas_at:], w)
