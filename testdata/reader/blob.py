"""Opening a blob: step 7 of section 13. Payloads are checked when their chunks are decoded."""

import zlib

from .common import need
from .layout import BlobHeader


def open_blob(index, data):
    need(len(data) >= 64, "blob.blob_size", "shorter than its header")
    (header,) = BlobHeader.rows(data, 1)
    need(header.magic == b"\x89TPB\r\n\x1a\n", "blob.magic")
    need(len(data) == index.header.blob_size, "blob.blob_size")
    need(header.version_major == 1, "blob.version_major")
    need(header.header_size == 64, "blob.header_size")
    need(zlib.crc32(data[:60]) == header.header_crc32, "blob.crc32")
    need(header.reserved == 0, "blob.reserved")
    need(header.version_minor == index.header.version_minor, "blob.version_minor")
    need(header.blob_size == len(data), "blob.blob_size")
    need(header.pair_digest == index.pair_digest, "blob.pair_digest")
