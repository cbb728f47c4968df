"""The registry of codecs.md, section 1. A module a codec, and in each:

    sizes_fit(record, w, lanes)                     whether a chunk of so many lanes, of `w` bytes each, can have
                                                    a record with these sizes
    changes(payload, record, tensor, base_lanes)    positions and deltas of the chunk; the rules that all codecs
                                                    share are checked by the caller
"""

from . import raw, zstd

RAW, ZSTD = 0, 1
CODECS = {RAW: raw, ZSTD: zstd}
