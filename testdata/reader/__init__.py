"""A second reader of TPDE pairs, written from spec/tpde-format.md and spec/codecs.md alone.

It follows the text of the specification as directly as possible, at the cost of speed. Needs `zstandard`; BLAKE3 is in the file
beside this folder. `read_pair` below is the whole of it; the modules follow the specification, and are best read in this order:

    common        refusals, parts of a row of bytes, zstd frames       sections 2, 5
    layout        the tables of fields, dtypes and base kinds          sections 5 to 8, 10, 11
    index         opening an index: every check of it                  section 13, steps 1 to 6
    blob          opening a blob                                       section 13, step 7
    parts         rectangles of tensors                                section 8.4
    floats        arithmetic on lanes of floats                        section 8.6
    derived       base lanes formed from another dtype                 section 8.5
    lanes         the arithmetic of lanes and their sums               sections 6.1, 9
    codec         one module per codec: from payloads to changes       codecs.md
    decode        chunks, tensors and their digests                    section 13, steps 8 to 12
    safetensors   the base, and the files that are rebuilt             section 10

`python3 testdata/reader` runs it (`__main__`): on one pair, or on all vectors.
"""

from pathlib import Path

from .blob import open_blob
from .codec import RAW
from .common import Refused, at, expand
from .decode import check_digests, decode_tensors
from .index import open_index
from .layout import DTYPES, BlobHeader, SectionEntry
from .safetensors import Base, rebuild_files

SECTION_ENTRY = SectionEntry.struct
__all__ = ["DTYPES", "RAW", "SECTION_ENTRY", "BlobHeader", "Refused", "expand", "open_blob", "open_index", "read_pair"]


def read_pair(index_path, blob_path, base_path=None):
    """The index, the target bytes of each tensor by name and the rebuilt files, all checked. The bytes of a tensor with parts are
    those of its parts, one after the other. A refusal says at which step it occurred."""
    with at(when="open_index"):
        index = open_index(Path(index_path).read_bytes())
    with at(when="open_blob"):
        blob = Path(blob_path).read_bytes()
        open_blob(index, blob)
    with at(when="decode"):
        base = Base(base_path)
        tensors = decode_tensors(index, blob, base)
    with at(when="apply"):
        check_digests(index, blob, tensors)
        targets = [target for _, target in tensors]
        by_name = {}
        for tensor, target in zip(index.tensors, targets):
            by_name[tensor.name] = by_name.get(tensor.name, b"") + target
        return index, by_name, rebuild_files(index, targets, base)
