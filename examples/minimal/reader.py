#!/usr/bin/env python3
"""Rebuilds the target of a TPDE pair, a file or a folder: python3 reader.py PAIR [BASE] OUT

It follows spec/tpde-format.md, whose sections the comments name, and makes every check of section 13. files.py has section 10,
payloads.py the codecs. Parts of tensors and derived bases are refused as `unsupported`. Base, pair and target are held in memory.
"""

import struct
import sys
import zlib
from collections import namedtuple
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from common import DTYPES, NONE, PREFIX, SAME, U64, Cursor, Refused, align, at, check, expand, hash_of, lanes_of, need, shape_fits
from files import Base, publish, read_files, rebuild_files
from payloads import CONDITIONED, decode, read_tables, sizes_fit

TARGET_LIMIT = 1 << 36  # bytes. A few bytes of an index can describe terabytes

# Section 5: header, sections.

Header = namedtuple(
    "Header",
    "magic version_major version_minor header_size features optional_features index_size blob_size"
    " chunk_count tensor_count file_count reserved sections payload_root reserved2 crc32",
)


def open_index(data):
    """Steps 1 to 6 of section 13.1."""
    check("header", magic=b"\x89TPI\r\n\x1a\n".startswith(data[:8]), index_size=len(data) >= 256)
    h = Header._make(struct.unpack("<8sHHI4Q4I144s32s12sI", data[:256]))
    check("header", version_major=h.version_major == 1, header_size=h.header_size == 256, crc32=h.crc32 == zlib.crc32(data[:252]))
    digests, payload_list, parts, derived = (h.features >> bit & 1 for bit in (0, 1, 2, 4))
    root = any(h.payload_root)
    check("header", required_features=h.features & ~0b10111 == 0 and parts <= payload_list <= digests <= root)
    need(not parts, "unsupported", "parts of tensors (section 8.4)")
    need(not derived, "unsupported", "derived bases (section 8.5)")
    check("header", reserved=h.reserved == 0 and not any(h.reserved2) and digests == root, chunk_count=h.chunk_count < 2**31)
    check("header", tensor_count=h.tensor_count <= 2**24, file_count=h.file_count <= 2**16)
    check("header", index_size=h.index_size == len(data) >= 352)
    fixed = [32 * h.chunk_count, 16 * (1 + payload_list) * h.chunk_count, 64 + 32 * h.tensor_count]
    entries, end = list(struct.iter_unpack("<3Q", h.sections)), 256
    for k, (offset, stored, expanded) in enumerate(entries):
        fits = stored == expanded == fixed[k] if k < 3 else stored <= expanded
        check("header", sections=offset == align(end, 8) and fits and offset + stored <= len(data))
        end = offset + stored
    check("header", index_size=len(data) == align(end, 8) + 32)
    need(len(data) <= 1 << 30 and max(expanded for _, _, expanded in entries[3:]) <= 1 << 28, "limit")
    check("index", digest=hash_of(data[:-32]) == data[-32:])
    stored = [data[offset : offset + size] for offset, size, _ in entries]
    starts = [offset for offset, _, _ in entries[1:]] + [len(data) - 32]
    check("section", padding=not any(any(data[e[0] + e[1] : start]) for e, start in zip(entries, starts)))
    sizes = [expanded for _, _, expanded in entries]
    sections = [part if len(part) == size else expand(part, size, "section.frame") for part, size in zip(stored, sizes)]
    records, sums, hashes, table, files, tables = sections

    tensors, cursor, sets = read_tensors(table, h.tensor_count), Cursor(tables, "tensor.tables_size"), []
    check("tensor", tables_size=sum(tensor.tables_size for tensor in tensors) == len(tables))
    check("header", chunk_count=sum(tensor.chunk_count for tensor in tensors) == h.chunk_count)
    for tensor in tensors:
        with at(tensor.place):
            tensor.table_set = read_tables(cursor.take(tensor.tables_size), sets)
    listed = sums[16 * h.chunk_count :]
    check("header", payload_root=not payload_list or hash_of(listed) == h.payload_root)
    for tensor, (base_digest, target_digest) in zip(tensors, struct.iter_unpack("16s16s", hashes[64:])):
        tensor.base_digest, tensor.target_digest = base_digest, target_digest
        with at(tensor.place):
            check("digest", none=tensor.base_kind != NONE or not any(base_digest))
    index = SimpleNamespace(header=h, tensors=tensors, digests=digests, payload_list=payload_list, pair_digest=data[-32:])
    index.base_root, index.target_root = hashes[:32], hashes[32:64]
    if digests:
        check_roots(index, [tensor.base_digest for tensor in tensors], [tensor.target_digest for tensor in tensors])
    index.files = read_files(files, h.file_count)
    listed = struct.iter_unpack("16s", listed) if payload_list else [(None,)] * h.chunk_count
    read_chunks(index, struct.iter_unpack("<Q4IQ", records), struct.iter_unpack("<2Q", sums[: 16 * h.chunk_count]), listed)
    return index


# Section 6: chunk records and sums.

Chunk = namedtuple(
    "Chunk",
    "first_lane lanes place blob_offset compressed_size uncompressed_size num_deltas crc32 output_offset"
    " base_sum target_sum digest",
)


def read_chunks(index, records, sums, listed):
    """Gives each tensor its chunks. `listed` is the payload list."""
    rows, offset = enumerate(zip(records, sums, listed)), 64
    for tensor in index.tensors:
        tensor.chunks, width = [], tensor.dtype.lane_bytes
        for first in range(0, tensor.lanes, tensor.chunk_lanes):
            number, (record, pair, digest) = next(rows)
            lanes = min(tensor.chunk_lanes, tensor.lanes - first)
            c = Chunk(first, lanes, f"{tensor.place}, chunk {number}", *record, *pair, *digest)
            with at(c.place):
                size, expanded, unchanged = c.compressed_size, c.uncompressed_size, c.num_deltas == 0
                check("record", num_deltas=c.num_deltas <= lanes)
                if unchanged or size == 0:
                    check("record", empty=c.num_deltas == size == expanded == c.crc32 == 0)
                else:
                    fits = size <= expanded + expanded // 64 + 64
                    check("record", sizes=fits and sizes_fit(tensor.codec, c, width, lanes))
                check("payload", digest=not index.payload_list or any(c.digest) == (size > 0))
                check("record", blob_offset=c.blob_offset == offset, output_offset=c.output_offset == first)
                check("record", sums=c.base_sum == 0 or tensor.base_kind != NONE)
                check("record", sums=c.base_sum == c.target_sum or not unchanged)
            tensor.chunks.append(c)
            offset = align(offset + size, 16)
    check("record", blob_size=index.header.blob_size == offset)


def mix(i):
    h = (i + 1) * U64(0x9E3779B97F4A7C15)
    h = (h ^ h >> 30) * U64(0xBF58476D1CE4E5B9)
    h = (h ^ h >> 27) * U64(0x94D049BB133111EB)
    return h ^ h >> 31


P, Q = mix(np.arange(1024, 2048, dtype=U64)) | 1, mix(np.arange(1024, dtype=U64)) >> 32 | 1


def sum_of(data):
    words = lanes_of(data + bytes(-len(data) % 4), 4)
    j = np.arange(len(words))
    return int((P[j // 1024] * Q[j % 1024] * words).sum())


# Section 7: digests.


def check_roots(index, base, target):
    check(
        "digest", base_root=hash_of(b"".join(base)) == index.base_root, target_root=hash_of(b"".join(target)) == index.target_root
    )


# Section 8: tensors.


def read_tensors(section, count):
    names = Cursor(section, "tensors.size")
    entries = list(struct.iter_unpack("<2I4H2BH3IQ", names.take(40 * count)))
    dims = Cursor(names.take(8 * sum(entry[3] for entry in entries)), "tensors.size")
    tensors, chunks = [], 0
    for name_size, base_size, code, rank, kind, codec, log2, part, reserved, tables_size, first, chunk_count, param in entries:
        name = read_name(names, name_size, 1, "tensor.name")
        with at(place := f"tensor {name!a}"):
            check("tensor", name_order=not tensors or tensors[-1].name.encode() < name.encode())
            base_name = read_name(names, base_size, 0, "tensor.base_name")
            check("tensor", base_name=base_name != name, dtype=code in DTYPES, rank=rank <= 32)
            dtype, shape = DTYPES[code], list(struct.unpack(f"<{rank}Q", dims.take(8 * rank)))
            check("tensor", shape=shape_fits(shape, dtype), base_kind=kind in (NONE, SAME, PREFIX))
            check("tensor", base_name=kind != NONE or not base_name, codec=codec <= CONDITIONED)
            check("tensor", chunk_lanes=log2 >= 12 and dtype.lane_bytes << log2 <= 4 << 20, reserved=part == reserved == 0)
            lanes = prod(shape) * dtype.bits // 8 // dtype.lane_bytes
            check("tensor", tables_size=codec == CONDITIONED or tables_size == 0)
            check("tensor", first_chunk=first == chunks, chunk_count=chunk_count == -(-lanes >> log2))
            base_shape = [param, *shape[1:]] if kind == PREFIX else shape
            prefix = rank > 0 and base_shape != shape and shape_fits(base_shape, dtype)
            check("tensor", base_param=prefix if kind == PREFIX else param == 0)
        tensor = SimpleNamespace(
            name=name, place=place, base_name=base_name or name, dtype=dtype, shape=shape, base_shape=base_shape
        )
        tensor.base_kind, tensor.codec, tensor.tables_size = kind, codec, tables_size
        tensor.lanes, tensor.chunk_lanes, tensor.chunk_count = lanes, 1 << log2, chunk_count
        tensors.append(tensor)
        chunks += chunk_count
    names.finish()
    return tensors


def read_name(names, size, least, rule):
    need(least <= size <= 4096, rule, "size")
    try:
        name = names.take(size).decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(rule, "not UTF-8") from None
    need("\0" not in name, rule, "NUL")
    return name


# Section 9: lane arithmetic, for arrays of lanes.


def ordered(lanes, dtype):
    bits = 8 * dtype.lane_bytes
    top, mask = 1 << bits - 1, (1 << bits) - 1
    return np.where(lanes & top, mask - lanes, lanes + top) if dtype.ordered else lanes


def unordered(lanes, dtype):
    bits = 8 * dtype.lane_bytes
    top, mask = 1 << bits - 1, (1 << bits) - 1
    return np.where(lanes & top, lanes - top, mask - lanes) if dtype.ordered else lanes


def target_lanes(base, deltas, dtype):
    d = deltas >> 1 ^ 0 - (deltas & 1)
    return unordered(ordered(base, dtype) + d & (1 << 8 * dtype.lane_bytes) - 1, dtype)


# Section 11: blob.


def open_blob(data, index):
    check("blob", blob_size=len(data) >= 64)
    magic, major, minor, header_size, size, digest, reserved, crc32 = struct.unpack("<8s2HIQ32s2I", data[:64])
    check("blob", magic=magic == b"\x89TPB\r\n\x1a\n", blob_size=len(data) == index.header.blob_size, version_major=major == 1)
    check("blob", header_size=header_size == 64, crc32=crc32 == zlib.crc32(data[:60]), reserved=reserved == 0)
    check("blob", version_minor=minor == index.header.version_minor, blob_size=size == len(data))
    check("blob", pair_digest=digest == index.pair_digest)


# Section 13: decoding.


def read_pair(index, blob, base=None):
    """Target bytes of all tensors and contents of all files, by name. `index` and `blob` are bytes, `base` is a path."""
    index = open_index(index)
    open_blob(blob, index)
    need(sum(tensor.lanes * tensor.dtype.lane_bytes for tensor in index.tensors) <= TARGET_LIMIT, "limit", "bytes of the target")
    base, targets, payloads = Base(base), {}, []
    for tensor in index.tensors:
        with at(tensor.place):
            data, chunks = base.bytes_of(tensor), []
        for chunk in tensor.chunks:
            with at(chunk.place):
                payloads.append(blob[chunk.blob_offset : chunk.blob_offset + chunk.compressed_size])
                chunks.append(decode_chunk(chunk, tensor, data, payloads[-1], blob))
        targets[tensor.name] = b"".join(chunks)
    hashes = [hash_of(payload)[:16] if payload else bytes(16) for payload in payloads]
    check("header", payload_root=not index.digests or hash_of(b"".join(hashes)) == index.header.payload_root)
    bases = [bytes(32) if tensor.base_kind == NONE else hash_of(base.bytes_of(tensor)) for tensor in index.tensors]
    hashes = [hash_of(targets[tensor.name]) for tensor in index.tensors]
    for tensor, base_hash, target_hash in zip(index.tensors, bases, hashes):
        with at(tensor.place):
            check(
                "tensor", base_digest=base_hash[:16] == tensor.base_digest, target_digest=target_hash[:16] == tensor.target_digest
            )
    if not index.digests:
        check_roots(index, bases, hashes)
    return targets, rebuild_files(index, targets, base)


def decode_chunk(chunk, tensor, base, payload, blob):
    """Steps 8.3 to 11."""
    width, end = tensor.dtype.lane_bytes, chunk.blob_offset + chunk.compressed_size
    start, size = width * chunk.first_lane, width * chunk.lanes
    data = base[start : start + size].ljust(size, b"\0")
    check("chunk", base_sum=sum_of(data) == chunk.base_sum)
    if chunk.num_deltas > 0:
        check("payload", crc32=zlib.crc32(payload) == chunk.crc32, digest=chunk.digest in (None, hash_of(payload)[:16]))
        check("payload", padding=not any(blob[end : align(end, 16)]))
        lanes = lanes_of(data, width)
        lanes = target_lanes(lanes, decode(payload, chunk, tensor, lanes), tensor.dtype)
        data = lanes.astype(f"<u{width}").tobytes()
    check("chunk", target_sum=sum_of(data) == chunk.target_sum)
    return data


def main(pair, *paths):
    *base, out = map(Path, paths)
    _, files = read_pair(Path(f"{pair}.tpde-index").read_bytes(), Path(f"{pair}.tpde-blob").read_bytes(), *base)
    need(files, "unsupported", "a pair of tensors without files (section 10.1)")
    publish(files, out)


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (Refused, OSError, MemoryError) as error:
        sys.exit(f"refused: {error}")
