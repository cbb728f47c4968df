#!/usr/bin/env python3
"""A second reader of TPDE pairs, written from spec/tpde-format.md and spec/codecs.md alone.

    python3 testdata/reader.py PAIR_STEM [--base FILE_OR_FOLDER] [--json]
    python3 testdata/reader.py --manifest testdata/v1/manifest.json

It favours being plainly the text of the specification over speed. Needs `zstandard`.
"""

import argparse
import json
import re
import struct
import sys
import zlib
from collections import namedtuple
from math import prod
from operator import mul
from pathlib import Path

import zstandard

sys.path.insert(0, str(Path(__file__).parent))
from blake3 import blake3  # noqa: E402  (the file beside this one)

U64 = 2**64 - 1
INDEX_LIMIT, SECTION_LIMIT = 1 << 30, 256 << 20
RAW, ZSTD = 0, 1
NONE, SAME, PREFIX = 0, 1, 2

INDEX_HEADER = struct.Struct("<8sHHIQQQQIIII")
SECTION_ENTRY = struct.Struct("<QQQ")
BLOB_HEADER = struct.Struct("<8sHHIQ32sII")
DTYPES = {  # code: name, bits an element, bytes a lane, ordered
    0: ("BOOL", 8, 1, False), 1: ("U8", 8, 1, False), 2: ("I8", 8, 1, False),
    3: ("U16", 16, 2, False), 4: ("I16", 16, 2, False), 5: ("U32", 32, 4, False),
    6: ("I32", 32, 4, False), 7: ("U64", 64, 8, False), 8: ("I64", 64, 8, False),
    16: ("F16", 16, 2, True), 17: ("BF16", 16, 2, True), 18: ("F32", 32, 4, True),
    19: ("F64", 64, 8, True), 20: ("C64", 64, 4, True),
    32: ("F8_E4M3", 8, 1, True), 33: ("F8_E5M2", 8, 1, True), 34: ("F8_E4M3FNUZ", 8, 1, True),
    35: ("F8_E5M2FNUZ", 8, 1, True), 36: ("F8_E8M0", 8, 1, False),
    48: ("F4", 4, 1, False), 49: ("F6_E2M3", 6, 1, False), 50: ("F6_E3M2", 6, 1, False),
}
DTYPE_BITS = {name: bits for name, bits, _, _ in DTYPES.values()}


def table(name, layout, fields):
    """A named tuple with the fields of one row of a table, and the struct that reads it."""
    row = namedtuple(name, fields)
    row.struct = struct.Struct(layout)
    row.read = classmethod(lambda cls, data, i: cls(*cls.struct.unpack_from(data, i * cls.struct.size)))
    return row


Record = table("Record", "<QIIIIQ", "blob_offset compressed_size uncompressed_size num_deltas crc32 output_offset")
Sums = table("Sums", "<QQ", "base_sum target_sum")
Digests = table("Digests", "<16s16s", "base_digest target_digest")
TensorEntry = table("TensorEntry", "<IIHHHHB3sIIIQ", "name_size base_name_size dtype rank base_kind codec "
                    "chunk_lanes_log2 reserved tables_size first_chunk chunk_count base_param")
FileEntry = table("FileEntry", "<HHIQ16s8s", "kind reserved name_size content_size content_digest reserved2")
Tensor = namedtuple("Tensor", "name base_name dtype shape base_shape lane_bytes ordered lanes chunk_lanes entry")
File = namedtuple("File", "name kind content entry")
Index = namedtuple("Index", "header sections records sums base_root target_root digests tensors files pair_digest")


class Refused(Exception):
    """The pair, or what was given as its base, breaks `rule`. `chunk` counts as the records do."""

    def __init__(self, rule, tensor=None, chunk=None, detail=""):
        super().__init__(rule, detail)
        self.rule, self.tensor, self.chunk, self.detail = rule, tensor, chunk, detail
        self.when = None


def need(holds, rule, tensor=None, chunk=None, detail=""):
    if not holds:
        raise Refused(rule, tensor, chunk, detail)


def align(x, a):
    return -(-x // a) * a


# --- Opening the index: steps 1 to 6 -----------------------------------------------------------


def open_index(data):
    need(len(data) <= INDEX_LIMIT, "limit")
    need(len(data) >= 256, "header.index_size", detail="shorter than its header")
    header = dict(zip("magic version_major version_minor header_size required_features optional_features "
                      "index_size blob_size chunk_count tensor_count file_count reserved".split(),
                      INDEX_HEADER.unpack_from(data)))
    need(header["magic"] == b"\x89TPI\r\n\x1a\n", "header.magic")
    need(header["version_major"] == 1, "header.version_major")
    need(header["header_size"] == 256, "header.header_size")
    need(zlib.crc32(data[:252]) == int.from_bytes(data[252:256], "little"), "header.crc32")
    need(header["required_features"] == 0, "header.required_features")
    need(header["reserved"] == 0 and not any(data[208:252]), "header.reserved")
    chunk_count, tensor_count, file_count = (header[k] for k in ("chunk_count", "tensor_count", "file_count"))
    need(chunk_count < 2**31, "header.chunk_count")
    need(tensor_count <= 2**24, "header.tensor_count")
    need(file_count <= 2**16, "header.file_count")
    need(header["index_size"] == len(data) >= 352, "header.index_size")

    entries = [SECTION_ENTRY.unpack_from(data, 64 + 24 * i) for i in range(6)]
    fixed = [32 * chunk_count, 16 * chunk_count, 64 + 32 * tensor_count]
    end = 256
    for i, (offset, stored, expanded) in enumerate(entries):
        need(offset == align(end, 8), "header.sections", detail=f"offset of section {i}")
        need(stored == expanded == fixed[i] if i < 3 else stored <= expanded, "header.sections",
             detail=f"sizes of section {i}")
        end = offset + stored
        need(end <= len(data) - 32, "header.sections", detail=f"section {i} leaves the file")
    need(len(data) == align(end, 8) + 32, "header.index_size", detail="not the end of the sections")
    need(all(expanded <= SECTION_LIMIT for _, _, expanded in entries[3:]), "limit")

    need(blake3(data[:-32]) == data[-32:], "index.digest")

    for (offset, stored, _), following in zip(entries, [e[0] for e in entries[1:]] + [len(data) - 32]):
        need(not any(data[offset + stored:following]), "section.padding")
    chunks, sums, digests, tensors, files = (
        data[offset:offset + stored] if stored == expanded
        else expand(data[offset:offset + stored], expanded, "section.frame")
        for offset, stored, expanded in entries[:5])  # no codec of 1.0 has tables to expand

    tensors_table = walk_tensors(tensors, tensor_count)
    need(sum(t.entry.tables_size for t in tensors_table) == entries[5][2], "tensor.tables_size")
    need(sum(t.entry.chunk_count for t in tensors_table) == chunk_count, "header.chunk_count")

    index = Index(header, entries, [Record.read(chunks, i) for i in range(chunk_count)],
                  [Sums.read(sums, i) for i in range(chunk_count)], digests[:32], digests[32:64],
                  [Digests.read(digests, 2 + i) for i in range(tensor_count)], tensors_table, [], data[-32:])
    for tensor, digest in zip(index.tensors, index.digests):
        need(tensor.entry.base_kind != NONE or not any(digest.base_digest), "digest.none", tensor.name)
    index.files.extend(walk_files(files, file_count))
    walk_records(index)
    return index


def expand(frame, size, rule, **where):
    """The content of the one standard zstd frame that fills `frame` and states `size`."""
    try:
        need(frame[:4] == b"\x28\xb5\x2f\xfd", rule, detail="no standard frame", **where)
        header = zstandard.get_frame_parameters(frame)
        need(header.content_size == size, rule, detail="content size", **where)
        need(header.dict_id == 0, rule, detail="dictionary", **where)
        need(header.window_size <= 2**27, rule, detail="window", **where)
        at, last = zstandard.frame_header_size(frame), 0
        while not last:  # the blocks, to know where the frame ends
            need(at + 3 <= len(frame), rule, detail="cut off", **where)
            block = int.from_bytes(frame[at:at + 3], "little")
            last, kind = block & 1, block >> 1 & 3
            at += 3 + (1 if kind == 1 else block >> 3)
        need(at + 4 * header.has_checksum == len(frame), rule, detail="does not fill its space", **where)
        content = zstandard.ZstdDecompressor(max_window_size=2**27).decompress(frame)
    except zstandard.ZstdError as error:
        raise Refused(rule, detail=str(error), **where) from None
    need(len(content) == size, rule, **where)
    return content


def read_name(data, rule, **where):
    try:
        name = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(rule, detail="not UTF-8", **where) from None
    need("\0" not in name, rule, detail="NUL", **where)
    return name


def walk_tensors(section, tensor_count):
    need(40 * tensor_count <= len(section), "tensors.size")
    entries = [TensorEntry.read(section, i) for i in range(tensor_count)]
    dims_at = 40 * tensor_count
    names_at = dims_at + 8 * sum(e.rank for e in entries)
    tensors, chunks = [], 0
    for e in entries:
        need(1 <= e.name_size <= 4096, "tensor.name", detail="size")
        need(names_at + e.name_size <= len(section), "tensors.size")
        name = read_name(section[names_at:names_at + e.name_size], "tensor.name")
        names_at += e.name_size
        need(not tensors or tensors[-1].name.encode() < name.encode(), "tensor.name_order", name)
        need(e.base_name_size <= 4096 and (e.base_name_size == 0 or e.base_kind != NONE), "tensor.base_name", name)
        need(names_at + e.base_name_size <= len(section), "tensors.size")
        base_name = read_name(section[names_at:names_at + e.base_name_size], "tensor.base_name", tensor=name)
        names_at += e.base_name_size
        need(base_name != name, "tensor.base_name", name, detail="equals the name")
        need(e.dtype in DTYPES, "tensor.dtype", name)
        need(e.rank <= 32, "tensor.rank", name)
        need(e.base_kind in (NONE, SAME, PREFIX), "tensor.base_kind", name)
        need(e.codec in (RAW, ZSTD), "tensor.codec", name)
        dtype, bits, lane_bytes, ordered = DTYPES[e.dtype]
        need(e.chunk_lanes_log2 >= 12 and lane_bytes << e.chunk_lanes_log2 <= 4 << 20, "tensor.chunk_lanes", name)
        need(not any(e.reserved), "tensor.reserved", name)
        need(e.tables_size == 0, "tensor.tables_size", name)
        need(e.first_chunk == chunks, "tensor.first_chunk", name)
        need(dims_at + 8 * e.rank <= len(section), "tensors.size")
        shape = list(struct.unpack_from(f"<{e.rank}Q", section, dims_at))
        dims_at += 8 * e.rank
        need(shape_fits(shape, bits), "tensor.shape", name)
        lanes = prod(shape) * bits // (8 * lane_bytes)
        chunk_lanes = 1 << e.chunk_lanes_log2
        need(e.chunk_count == -(-lanes // chunk_lanes), "tensor.chunk_count", name)
        base_shape = None if e.base_kind == NONE else shape
        if e.base_kind == PREFIX:
            need(shape and shape[0] != e.base_param, "tensor.base_param", name)
            base_shape = [e.base_param, *shape[1:]]
            need(shape_fits(base_shape, bits), "tensor.base_param", name)
        else:
            need(e.base_param == 0, "tensor.base_param", name)
        chunks += e.chunk_count
        tensors.append(Tensor(name, base_name or name, dtype, shape, base_shape, lane_bytes, ordered, lanes,
                              chunk_lanes, e))
    need(names_at == len(section), "tensors.size")
    return tensors


def shape_fits(shape, bits):
    total = prod(shape) * bits  # a Python integer: no intermediate product can overflow
    return total < 2**63 and total % 8 == 0


def walk_files(section, file_count):
    need(40 * file_count <= len(section), "files.size")
    entries = [FileEntry.read(section, i) for i in range(file_count)]
    names_at = 40 * file_count
    contents_at = names_at + sum(e.name_size for e in entries)
    files = []
    for e in entries:
        need(e.kind <= 3, "file.kind")
        need(e.reserved == 0, "file.reserved")
        need(e.name_size <= 255, "file.name", detail="size")
        need(names_at + e.name_size <= len(section), "files.size")
        name = section[names_at:names_at + e.name_size]
        names_at += e.name_size
        if name or file_count != 1 or e.kind > 1:
            ending = rb"\.safetensors" if e.kind < 2 else rb"\.safetensors\.index\.json"
            need(re.fullmatch(rb"[A-Za-z0-9_-][A-Za-z0-9._-]*" + ending, name), "file.name")
            need(not files or files[-1].name.encode() < name, "file.name", detail="order")
            need(all(file.name.lower() != name.decode().lower() for file in files), "file.name", detail="case")
        need(e.kind > 1 or e.content_size >= 8, "file.content_size")
        need(not any(e.reserved2), "file.reserved")
        content = None
        if e.kind in (0, 2):
            need(contents_at + e.content_size <= len(section), "files.size")
            content = section[contents_at:contents_at + e.content_size]
            contents_at += e.content_size
            need(blake3(content)[:16] == e.content_digest, "file.content_digest")
        files.append(File(name.decode(), e.kind, content, e))
    need(contents_at == len(section), "files.size")
    return files


def walk_records(index):
    blob_offset = 64
    for tensor in index.tensors:
        for k in range(tensor.entry.chunk_count):
            c = tensor.entry.first_chunk + k
            r, sums, at = index.records[c], index.sums[c], (tensor.name, c)
            lanes = min(tensor.chunk_lanes, tensor.lanes - k * tensor.chunk_lanes)
            need(r.num_deltas <= lanes, "record.num_deltas", *at)
            if r.num_deltas == 0 or r.compressed_size == 0:
                need(r[1:5] == (0, 0, 0, 0), "record.empty", *at)
            else:
                size, w = r.uncompressed_size, tensor.lane_bytes
                need(r.compressed_size <= size + size // 64 + 64, "record.sizes", *at)
                if tensor.entry.codec == RAW:
                    need(r.compressed_size == size == align(4 * r.num_deltas, w) + w * r.num_deltas,
                         "record.sizes", *at)
                else:
                    need(2 <= size <= (w + 3) * lanes + 64, "record.sizes", *at)
            need(r.blob_offset == blob_offset, "record.blob_offset", *at)
            blob_offset = align(blob_offset + r.compressed_size, 16)
            need(r.output_offset == k * tensor.chunk_lanes, "record.output_offset", *at)
            need(tensor.entry.base_kind != NONE or sums.base_sum == 0, "record.sums", *at)
            need(r.num_deltas or sums.base_sum == sums.target_sum, "record.sums", *at)
    need(index.header["blob_size"] == blob_offset, "record.blob_size")


# --- Opening the blob: step 7 ------------------------------------------------------------------


def open_blob(index, data):
    need(len(data) >= 64, "blob.blob_size", detail="shorter than its header")
    magic, major, minor, header_size, blob_size, pair_digest, reserved, crc = BLOB_HEADER.unpack_from(data)
    need(magic == b"\x89TPB\r\n\x1a\n", "blob.magic")
    need(len(data) == index.header["blob_size"], "blob.blob_size")
    need(major == 1, "blob.version_major")
    need(header_size == 64, "blob.header_size")
    need(zlib.crc32(data[:60]) == crc, "blob.crc32")
    need(reserved == 0, "blob.reserved")
    need(minor == index.header["version_minor"], "blob.version_minor")
    need(blob_size == len(data), "blob.blob_size")
    need(pair_digest == index.pair_digest, "blob.pair_digest")


# --- The base ----------------------------------------------------------------------------------


class Base:
    """A lone safetensors file, or a folder of them with their index files."""

    def __init__(self, path):
        self.tensors, self.heads, self.files = {}, {}, {}
        path = path and Path(path)
        for file in ([] if path is None else [path] if path.is_file() else sorted(path.iterdir())):
            data = file.read_bytes()
            names = {file.name, ""} if path.is_file() else {file.name}
            self.files.update(dict.fromkeys(names, data))
            if file.name.endswith(".safetensors"):
                start = 8 + int.from_bytes(data[:8], "little")
                self.heads.update(dict.fromkeys(names, data[:start]))
                for name, dtype, shape, begin, end in read_head(data[:start]):
                    self.tensors[name] = (dtype, shape, data[start + begin:start + end])

    def of(self, tensor):
        """The bytes of the base tensor of `tensor`; none for base kind `none`."""
        if tensor.entry.base_kind == NONE:
            return b""
        dtype, shape, data = self.tensors.get(tensor.base_name, (None, None, None))
        need((dtype, shape) == (tensor.dtype, tensor.base_shape), "base.tensor", tensor.name)
        return data


def read_head(head):
    """The tensors of a safetensors header in the order of their data: name, dtype, shape, begin, end."""
    def unique(pairs):
        need(len(dict(pairs)) == len(pairs), "file.tensors", detail="a key twice")
        return dict(pairs)

    need(len(head) == 8 + int.from_bytes(head[:8], "little"), "file.tensors", detail="header length")
    try:
        need(head[8:9] == b"{", "file.tensors", detail="header start")
        entries = json.loads(head[8:].decode("utf-8"), object_pairs_hook=unique)
        entries.pop("__metadata__", None)
        tensors = sorted(((name, e["dtype"], e["shape"], *e["data_offsets"]) for name, e in entries.items()),
                         key=lambda t: (t[3], t[4]))
        end = 0
        for name, dtype, shape, begin, stop in tensors:
            need(begin == end and 8 * (stop - begin) == prod(shape) * DTYPE_BITS[dtype], "file.tensors", name)
            end = stop
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused("file.tensors", detail=f"header: {error!r}") from None
    return tensors


# --- Decoding a chunk: steps 8 to 11 -----------------------------------------------------------


def mix(x):
    z = (x + 1) * 0x9E3779B97F4A7C15 & U64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & U64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & U64
    return z ^ z >> 31


COLUMNS = [mix(c) >> 32 | 1 for c in range(1024)]


def lane_sum(data):
    data += bytes(-len(data) % 4)
    words = struct.unpack(f"<{len(data) // 4}I", data)
    return sum((mix(1024 + r) | 1) * sum(map(mul, COLUMNS, words[1024 * r:1024 * r + 1024]))
               for r in range(-(-len(words) // 1024))) & U64


def decode_chunk(index, blob, tensor, c, base):
    """The target bytes of chunk `c`, given all bytes of the base tensor."""
    at, w, record = (tensor.name, c), tensor.lane_bytes, index.records[c]
    first = record.output_offset
    count = min(tensor.chunk_lanes, tensor.lanes - first)
    old = base[w * first:w * (first + count)].ljust(w * count, b"\0")
    need(lane_sum(old) == index.sums[c].base_sum, "chunk.base_sum", *at)
    new = bytearray(old)
    if record.num_deltas:
        end = record.blob_offset + record.compressed_size
        payload = blob[record.blob_offset:end]
        need(zlib.crc32(payload) == record.crc32, "payload.crc32", *at)
        need(not any(blob[end:align(end, 16)]), "payload.padding", *at)
        try:
            positions, deltas = changes(tensor.entry.codec, payload, record, w, count)
            need(all(a < b for a, b in zip([-1, *positions], positions)), "payload.positions", detail="order")
            need(not positions or positions[-1] < count, "payload.positions", detail="past the end")
            need(len(positions) == len(deltas) == record.num_deltas, "payload.deltas", detail="count")
            need(all(0 < delta < 1 << 8 * w for delta in deltas), "payload.deltas", detail="zero or too large")
        except Refused as error:
            raise Refused(error.rule, *at, error.detail) from None
        for position, delta in zip(positions, deltas):
            lane = slice(w * position, w * position + w)
            u = apply_delta(int.from_bytes(old[lane], "little"), delta, 8 * w, tensor.ordered)
            new[lane] = u.to_bytes(w, "little")
    need(lane_sum(bytes(new)) == index.sums[c].target_sum, "chunk.target_sum", *at)
    return bytes(new)


def apply_delta(u, delta, bits, ordered):
    top, full = 1 << bits - 1, (1 << bits) - 1
    d = delta >> 1 ^ -(delta & 1)
    if not ordered:
        return u + d & full
    x = (full - u if u & top else u + top) + d & full
    return x - top if x & top else full - x


class Parts:
    """The parts of a payload's content, taken one after the other."""

    def __init__(self, content):
        self.content, self.at = content, 0

    def take(self, size):
        self.at += size
        need(self.at <= len(self.content), "payload.size", detail="too short")
        return self.content[self.at - size:self.at]

    def planes(self, m, w):
        rows = self.take(m * w)
        return [int.from_bytes(lane, "little") for lane in zip(*(rows[m * r:m * r + m] for r in range(w)))]

    def continued(self):
        value = 0
        while (byte := self.take(1)[0]) == 255:
            value += 255
        return value + byte

    def escapes(self, values, w):
        """Parts 2 and 3 of the nibble layouts: what the values of 15 stand for."""
        values = list(values)
        open_ = [i for i, v in enumerate(values) if v == 15]
        bytes_ = self.take(len(open_))
        far = [i for i, byte in zip(open_, bytes_) if byte == 255]
        for i, byte in zip(open_, bytes_):
            values[i] += byte
        for i, rest in zip(far, self.planes(len(far), w)):
            values[i] += rest
        return values


def changes(codec, payload, record, w, lanes):
    """The positions and deltas of a payload; the caller checks what all codecs have in common."""
    n = record.num_deltas
    if codec == RAW:
        deltas_at = align(4 * n, w)
        need(not any(payload[4 * n:deltas_at]), "payload.positions", detail="padding")
        deltas = (payload[i:i + w] for i in range(deltas_at, len(payload), w))
        return struct.unpack_from(f"<{n}I", payload), [int.from_bytes(d, "little") for d in deltas]

    parts = Parts(expand(payload, record.uncompressed_size, "payload.frame"))
    layout = parts.take(1)[0]
    need(layout <= 4, "payload.layout")
    if layout == 0:
        positions, deltas = dense(parts.planes(lanes, w))
    elif layout == 1:
        deltas = parts.planes(n, w)
        positions = ascend(parts.continued() for _ in range(n))
    elif layout == 2:
        deltas = parts.planes(n, w)
        positions = ascend(elias_delta(parts.take(len(parts.content) - parts.at), n, lanes))
    elif layout == 3:
        tokens = parts.take(n)
        deltas = [v + 1 for v in parts.escapes((t >> 4 for t in tokens), w)]
        positions = ascend(g if g < 15 else 15 + parts.continued() for g in (t & 15 for t in tokens))
    else:
        tokens = parts.take(32 * -(-lanes // 64))
        z = [v for b in range(0, len(tokens), 32) for v in
             [t & 15 for t in tokens[b:b + 32]] + [t >> 4 for t in tokens[b:b + 32]]]
        need(not any(z[lanes:]), "payload.positions", detail="a token past the end")
        positions, deltas = dense(parts.escapes(z[:lanes], w))
    need(parts.at == len(parts.content), "payload.size", detail="left over")
    return positions, deltas


def dense(z):
    positions = [i for i, delta in enumerate(z) if delta]
    return positions, [z[i] for i in positions]


def ascend(gaps):
    positions, next_ = [], 0
    for gap in gaps:
        positions.append(next_ + gap)
        next_ += gap + 1
    return positions


def elias_delta(data, n, lanes):
    bits, at = "".join(f"{byte:08b}" for byte in data), 0

    def take(count):
        nonlocal at
        at += count
        need(at <= len(bits), "payload.size", detail="too short")
        return int("0" + bits[at - count:at], 2)

    for _ in range(n):
        k = 0
        while take(1) == 0:
            k += 1
            need(k <= 4, "payload.positions", detail="code too long")
        size = (1 << k | take(k)) - 1
        x = 1 << size | take(size)
        need(x <= lanes, "payload.positions", detail="gap too long")
        yield x - 1
    need(len(bits) - at < 8 and "1" not in bits[at:], "payload.size", detail="left over")


# --- Whole tensors and files: step 12 and section 10 -------------------------------------------


def decode_tensors(index, blob, base):
    """Base and target bytes of every tensor; every chunk is checked, no digest yet."""
    result = {}
    for tensor in index.tensors:
        e, data = tensor.entry, base.of(tensor)
        chunks = range(e.first_chunk, e.first_chunk + e.chunk_count)
        result[tensor.name] = data, b"".join(decode_chunk(index, blob, tensor, c, data) for c in chunks)
    return result


def check_digests(index, tensors):
    base_hashes = target_hashes = b""
    for tensor, digest in zip(index.tensors, index.digests):
        base, target = tensors[tensor.name]
        base_hash = bytes(32) if tensor.entry.base_kind == NONE else blake3(base)
        target_hash = blake3(target)
        need(base_hash[:16] == digest.base_digest, "tensor.base_digest", tensor.name)
        need(target_hash[:16] == digest.target_digest, "tensor.target_digest", tensor.name)
        base_hashes += base_hash
        target_hashes += target_hash
    need(blake3(base_hashes) == index.base_root, "digest.base_root")
    need(blake3(target_hashes) == index.target_root, "digest.target_root")


def rebuild_files(index, tensors, base):
    files, placed = {}, []
    shapes = {t.name: (t.dtype, t.shape) for t in index.tensors}
    for file in index.files:
        content = file.content
        if content is None:
            content = (base.heads if file.kind == 1 else base.files).get(file.name)
            need(content is not None and len(content) == file.entry.content_size
                 and blake3(content)[:16] == file.entry.content_digest, "base.file")
        if file.kind < 2:
            head = read_head(content)
            for name, dtype, shape, _, _ in head:
                need(shapes.get(name) == (dtype, shape), "file.tensors", name)
            placed += [name for name, *_ in head]
            content += b"".join(tensors[name][1] for name, *_ in head)
        files[file.name] = content
    need(not files or sorted(placed) == sorted(shapes), "file.tensors", detail="not each tensor once")
    return files


def read_pair(index_path, blob_path, base_path=None):
    """Everything: the index, the target tensors and the rebuilt files. A refusal says when it came."""
    when = "open_index"
    try:
        index = open_index(Path(index_path).read_bytes())
        when = "open_blob"
        blob = Path(blob_path).read_bytes()
        open_blob(index, blob)
        when = "decode"
        base = Base(base_path)
        tensors = decode_tensors(index, blob, base)
        when = "apply"
        check_digests(index, tensors)
        files = rebuild_files(index, tensors, base)
    except Refused as error:
        error.when = when
        raise
    return index, {name: target for name, (_, target) in tensors.items()}, files


# --- Command line ------------------------------------------------------------------------------


def check_vector(folder, vector):
    """What the reader and the manifest disagree about; empty if nothing."""
    try:
        _, tensors, files = read_pair(folder / vector["index"], folder / vector["blob"],
                                      vector["base"] and folder / vector["base"])
        seen = {"verdict": "valid", "tensors": {k: blake3(v).hex() for k, v in tensors.items()},
                "files": {k: blake3(v).hex() for k, v in files.items()}}
    except Refused as error:
        seen = {"verdict": "invalid", "rule": error.rule, "when": error.when, "tensor": error.tensor,
                "chunk": error.chunk, "detail": error.detail}
    wanted = {k: vector[k] for k in ("verdict", "tensors", "files", "rule", "when", "tensor", "chunk") if k in vector}
    return "" if wanted == {k: seen.get(k) for k in wanted} else f"wanted {wanted}, saw {seen}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", nargs="?", help="the path without .tpde-index")
    parser.add_argument("--base", help="a safetensors file, or a folder of them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--manifest", type=Path)
    args = parser.parse_args()
    if args.manifest:
        vectors, failed = json.loads(args.manifest.read_text("utf-8"))["vectors"], 0
        for vector in vectors:
            if difference := check_vector(args.manifest.parent, vector):
                failed += 1
                print(f"{vector['name']}: {difference}")
        print(f"{len(vectors) - failed} passed, {failed} failed")
        return int(failed > 0)
    if not args.pair:
        parser.error("PAIR_STEM or --manifest is needed")
    try:
        index, tensors, files = read_pair(args.pair + ".tpde-index", args.pair + ".tpde-blob", args.base)
    except Refused as error:
        facts = {k: getattr(error, k) for k in ("rule", "when", "tensor", "chunk", "detail")}
        print(json.dumps(facts) if args.json else "\n".join(
            f"{k}: {v!a}" if k == "tensor" else f"{k}: {v}" for k, v in facts.items() if v not in (None, "")))
        return 1
    facts = {t.name: {"dtype": t.dtype, "shape": t.shape, "blake3": blake3(tensors[t.name]).hex()}
             for t in index.tensors}
    if args.json:
        print(json.dumps({"tensors": facts, "files": {k: blake3(v).hex() for k, v in files.items()}}))
    else:
        for name, t in facts.items():
            print(t["blake3"], t["dtype"], t["shape"], json.dumps(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
