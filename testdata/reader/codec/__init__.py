"""The registry of codecs.md, section 1. One module per codec, each with:

sizes_fit(record, w, lanes)                     whether a chunk of `lanes` lanes of `w` bytes can have
                                                a record with these sizes
changes(payload, record, tensor, base_lanes)    positions and deltas of the chunk; the rules that all codecs
                                                share are checked by the caller
HAS_TABLES                                      whether its tensors may have tables; if so, also:
read_tables(content, owned)                     what `changes` finds as the tensor's `tables`; `owned` is a list
                                                for the tables that later tensors may refer to
"""

from . import conditioned, raw, zstd

RAW, ZSTD, CONDITIONED = 0, 1, 2
CODECS = {RAW: raw, ZSTD: zstd, CONDITIONED: conditioned}
