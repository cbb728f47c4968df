"""The tables of the format: fields in the order of their offsets, dtypes, base kinds."""

import struct
from collections import namedtuple


def table(name, text):
    """A named tuple with the fields of one row of a table. `text` has a type of `struct` and a name for each field."""
    words = text.split()
    row = namedtuple(name, words[1::2])
    row.struct = struct.Struct("<" + "".join(words[::2]))
    row.rows = classmethod(
        lambda cls, data, count, start=0: [cls(*cls.struct.unpack_from(data, start + i * cls.struct.size)) for i in range(count)]
    )
    return row


IndexHeader = table(
    "IndexHeader",
    """
    8s magic               H version_major        H version_minor       I header_size
    Q required_features    Q optional_features    Q index_size          Q blob_size
    I chunk_count          I tensor_count         I file_count          I reserved
    144s sections          32s payload_root       12s reserved2        I header_crc32
""",
)
SectionEntry = table("SectionEntry", "Q offset  Q stored_size  Q expanded_size")
Record = table(
    "Record",
    """
    Q blob_offset   I compressed_size   I uncompressed_size   I num_deltas   I crc32   Q output_offset
""",
)
Sums = table("Sums", "Q base_sum  Q target_sum")
Digests = table("Digests", "16s base_digest  16s target_digest")
TensorEntry = table(
    "TensorEntry",
    """
    I name_size            I base_name_size       H dtype               H rank
    H base_kind            H codec                B chunk_lanes_log2    B part
    2s reserved            I tables_size          I first_chunk         I chunk_count
    Q base_param
""",
)
FileEntry = table(
    "FileEntry",
    """
    H kind   H reserved   I name_size   Q content_size   16s content_digest   8s reserved2
""",
)
BlobHeader = table(
    "BlobHeader",
    """
    8s magic               H version_major        H version_minor       I header_size
    Q blob_size            32s pair_digest        I reserved            I header_crc32
""",
)

DIGESTS, PAYLOAD_LIST, PARTS, DERIVED = 1, 2, 4, 16  # bits of required_features
NONE, SAME, PREFIX, CAST, DEQUANTISED = range(5)  # base kinds; the last two with feature `derived`
WHOLE, FIRST, FURTHER = 0, 1, 2  # field `part` of an entry of the tensor table
SAFETENSORS, HEADER_OF_BASE, VERBATIM, AS_BASE = 0, 1, 2, 3  # kinds of files

Dtype = namedtuple("Dtype", "name bits lane_bytes ordered")
DTYPES = {
    code: Dtype(*row)
    for code, *row in (
        (0, "BOOL", 8, 1, False),
        (1, "U8", 8, 1, False),
        (2, "I8", 8, 1, False),
        (3, "U16", 16, 2, False),
        (4, "I16", 16, 2, False),
        (5, "U32", 32, 4, False),
        (6, "I32", 32, 4, False),
        (7, "U64", 64, 8, False),
        (8, "I64", 64, 8, False),
        (16, "F16", 16, 2, True),
        (17, "BF16", 16, 2, True),
        (18, "F32", 32, 4, True),
        (19, "F64", 64, 8, True),
        (20, "C64", 64, 4, True),
        (32, "F8_E4M3", 8, 1, True),
        (33, "F8_E5M2", 8, 1, True),
        (34, "F8_E4M3FNUZ", 8, 1, True),
        (35, "F8_E5M2FNUZ", 8, 1, True),
        (36, "F8_E8M0", 8, 1, False),
        (48, "F4", 4, 1, False),
        (49, "F6_E2M3", 6, 1, False),
        (50, "F6_E3M2", 6, 1, False),
    )
}
