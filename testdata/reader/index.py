"""Opening an index: steps 1 to 6 of section 13, in their order. The result is valid."""

import re
import struct
import zlib
from collections import namedtuple
from dataclasses import dataclass
from itertools import takewhile
from math import prod

from blake3 import blake3

from .codec import CODECS
from .common import Parts, Refused, align, at, expand, need
from .derived import check_blocks, derivation
from .layout import (
    AS_BASE,
    CAST,
    DEQUANTISED,
    DERIVED,
    DIGESTS,
    DTYPES,
    FIRST,
    FURTHER,
    HEADER_OF_BASE,
    NONE,
    PARTS,
    PAYLOAD_LIST,
    PREFIX,
    SAFETENSORS,
    SAME,
    VERBATIM,
    WHOLE,
    Digests,
    FileEntry,
    IndexHeader,
    Record,
    SectionEntry,
    Sums,
    TensorEntry,
)
from .parts import check_part, precedes

MAGIC = b"\x89TPI\r\n\x1a\n"
INDEX_LIMIT, SECTION_LIMIT = 1 << 30, 256 << 20
SHARD, SHARD_INDEX = ".safetensors", ".safetensors.index.json"  # endings of names

Index = namedtuple("Index", "header sections records sums payload_list base_root target_root digests tensors files pair_digest")
File = namedtuple("File", "name kind content entry")  # content is None if it comes from the base


@dataclass
class Tensor:
    """A tensor, or a part of one: an entry of the tensor table."""

    entry: TensorEntry
    name: str  # that of the tensor, also for further parts; so is the base name
    base_name: str
    shape: list  # of the whole tensor
    base_shape: list  # None for base kind `none`
    base_dtype: str
    lanes: int
    origin: list = None  # of a part
    extent: list = None
    derivation: object = None  # of a derived base
    scales_name: str = ""  # of base kind `dequantised`
    tables: object = None  # in the codec's form

    @property
    def dtype(self):
        return DTYPES[self.entry.dtype]

    def chunks(self):
        """For each chunk: index of its record, first lane, number of lanes."""
        size = 1 << self.entry.chunk_lanes_log2
        for k in range(self.entry.chunk_count):
            yield self.entry.first_chunk + k, k * size, min(size, self.lanes - k * size)


def open_index(data):
    header = read_header(data)
    sections = read_sections(data, header)
    need(blake3(data[:-32]) == data[-32:], "index.digest")

    starts = [s.offset for s in sections] + [len(data) - 32]
    for s, following in zip(sections, starts[1:]):
        need(not any(data[s.offset + s.stored_size : following]), "section.padding")
    chunks, sums, digests, tensors, files, tables = (expanded(data, s) for s in sections)
    tensors = read_tensors(tensors, header, len(tables))
    read_tables(tables, tensors)
    if header.required_features & PARTS:
        need(any(tensor.entry.part != WHOLE for tensor in tensors), "header.required_features", "bit 2 without parts")
    if header.required_features & DERIVED:
        need(any(tensor.derivation for tensor in tensors), "header.required_features", "bit 4 without a derived base")
    payload_list = None
    if header.required_features & PAYLOAD_LIST:
        listed = sums[16 * header.chunk_count :]
        need(blake3(listed) == header.payload_root, "header.payload_root")
        payload_list = [listed[i : i + 16] for i in range(0, len(listed), 16)]
    tensor_digests = Digests.rows(digests, header.tensor_count, 64)
    for tensor, digest in zip(tensors, tensor_digests):
        with at(tensor=tensor.name):
            need(tensor.entry.base_kind != NONE or not any(digest.base_digest), "digest.none")
    if header.required_features & DIGESTS:
        need(blake3(b"".join(d.base_digest for d in tensor_digests)) == digests[:32], "digest.base_root")
        need(blake3(b"".join(d.target_digest for d in tensor_digests)) == digests[32:64], "digest.target_root")
    index = Index(
        header,
        sections,
        Record.rows(chunks, header.chunk_count),
        Sums.rows(sums, header.chunk_count),
        payload_list,
        digests[:32],
        digests[32:64],
        tensor_digests,
        tensors,
        read_files(files, header.file_count),
        data[-32:],
    )
    check_records(index)
    return index


def read_header(data):
    need(MAGIC.startswith(data[:8]), "header.magic")
    need(len(data) >= 256, "header.index_size", "shorter than its header")
    (header,) = IndexHeader.rows(data, 1)
    need(header.version_major == 1, "header.version_major")
    need(header.header_size == 256, "header.header_size")
    need(zlib.crc32(data[:252]) == header.header_crc32, "header.crc32")
    features = header.required_features
    need(features & ~(DIGESTS | PAYLOAD_LIST | PARTS | DERIVED) == 0, "header.required_features", "unknown")
    need(not features & PAYLOAD_LIST or features & DIGESTS, "header.required_features", "bit 1 without bit 0")
    need(not features & PARTS or features & PAYLOAD_LIST, "header.required_features", "bit 2 without bit 1")
    need(not features & DIGESTS or any(header.payload_root), "header.required_features", "no payload root")
    need(features & DIGESTS or not any(header.payload_root), "header.reserved")
    need(header.reserved == 0 and not any(header.reserved2), "header.reserved")
    need(header.chunk_count < 2**31, "header.chunk_count")
    need(header.tensor_count <= 2**24, "header.tensor_count")
    need(header.file_count <= 2**16, "header.file_count")
    need(header.index_size == len(data) >= 352, "header.index_size")
    return header


def read_sections(data, header):
    sections = SectionEntry.rows(header.sections, 6)
    sums = 32 if header.required_features & PAYLOAD_LIST else 16
    fixed = [32 * header.chunk_count, sums * header.chunk_count, 64 + 32 * header.tensor_count]
    end = 256
    for i, s in enumerate(sections):
        need(s.offset == align(end, 8), "header.sections", f"offset of section {i}")
        if i < len(fixed):
            need(s.stored_size == s.expanded_size == fixed[i], "header.sections", f"sizes of section {i}")
        else:
            need(s.stored_size <= s.expanded_size, "header.sections", f"sizes of section {i}")
        end = s.offset + s.stored_size
        need(end <= len(data), "header.sections", f"section {i} leaves the file")
    need(len(data) == align(end, 8) + 32, "header.index_size", "not the end of the sections")
    need(len(data) <= INDEX_LIMIT and all(s.expanded_size <= SECTION_LIMIT for s in sections[3:]), "limit")
    return sections


def expanded(data, section):
    stored = data[section.offset : section.offset + section.stored_size]
    return stored if len(stored) == section.expanded_size else expand(stored, section.expanded_size, "section.frame")


def read_tensors(section, header, tables_size):
    names_at = 40 * header.tensor_count
    need(names_at <= len(section), "tensors.size")
    entries, with_parts = TensorEntry.rows(section, header.tensor_count), header.required_features & PARTS
    kinds = (NONE, SAME, PREFIX, CAST, DEQUANTISED) if header.required_features & DERIVED else (NONE, SAME, PREFIX)
    for e, before in zip(entries, [None, *entries]):
        need(not with_parts or e.part in (WHOLE, FIRST, FURTHER), "tensor.part", "unknown")
        need(not with_parts or e.part != FURTHER or (before and before.part != WHOLE), "tensor.part", "without a first part")
    dims = Parts(section, "tensors.size", names_at)
    lists = {WHOLE: 1, FIRST: 3, FURTHER: 2} if with_parts else {}
    names = Parts(section, "tensors.size", names_at + 8 * sum(e.rank * lists.get(e.part, 1) for e in entries))
    tensors, chunks = [], 0
    for i, e in enumerate(entries):
        before = tensors[-1] if tensors else None
        if with_parts and e.part == FURTHER:
            name = before.name
            with at(tensor=name):
                need(e.name_size == 0, "tensor.name", "of a further part")
        else:
            need(1 <= e.name_size <= 4096, "tensor.name", "size")
            name = read_name(names.take(e.name_size), "tensor.name")
        with at(tensor=name):
            if not with_parts or e.part != FURTHER:
                need(before is None or before.name.encode() < name.encode(), "tensor.name_order")
            last = i + 1 == len(entries) or entries[i + 1].part != FURTHER
            tensors.append(read_tensor(e, name, names, dims, chunks, tensors, with_parts, last, kinds))
        chunks += e.chunk_count
    names.finish()
    need(sum(e.tables_size for e in entries) == tables_size, "tensor.tables_size")
    need(chunks == header.chunk_count, "header.chunk_count")
    return tensors


def read_tensor(e, name, names, dims, chunks_before, tensors, with_parts, last, kinds):
    """The tensor or part of entry `e`. `tensors` are those before; `last` says that no further part follows; `kinds` are the base
    kinds that the features allow."""
    part = e.part if with_parts else WHOLE
    before = tensors[-1] if part == FURTHER else None
    need(e.base_name_size <= (0 if before else 4096), "tensor.base_name", "size")
    base_name = read_name(names.take(e.base_name_size), "tensor.base_name")
    need(base_name != name, "tensor.base_name", "equals the name")
    need(e.dtype in DTYPES and (before is None or e.dtype == before.entry.dtype), "tensor.dtype")
    need(e.rank <= 32 and (part != FIRST or e.rank >= 1) and (before is None or e.rank == before.entry.rank), "tensor.rank")
    bits, lane_bytes = DTYPES[e.dtype].bits, DTYPES[e.dtype].lane_bytes
    lists = [None] * (part == FURTHER) + [list(struct.unpack(f"<{e.rank}Q", dims.take(8 * e.rank))) for _ in range((1, 3, 2)[part])]
    shape, origin, extent = (lists + [None, None])[:3]
    if before is None:
        need(shape_fits(shape, bits), "tensor.shape")
    else:
        shape, base_name = before.shape, before.base_name
    if part != WHOLE:
        check_part(shape, origin, extent, bits)
    if before is not None:
        need(precedes((before.origin, before.extent), (origin, extent)), "tensor.part_order")
    need(e.base_kind in kinds and (part == WHOLE or e.base_kind != PREFIX), "tensor.base_kind")
    parts = [] if e.base_kind == NONE else takewhile(lambda t: t.name == name, reversed(tensors))
    other = next((t for t in parts if t.entry.base_kind != NONE), None)  # a part before this one that has a base
    need(other is None or e.base_kind == other.entry.base_kind, "tensor.base_kind", "differs from that of another part")
    if part == WHOLE:
        need(e.base_kind != NONE or e.base_name_size == 0, "tensor.base_name", "without a base")
    elif last:
        entries = [e] + [t.entry for t in takewhile(lambda t: t.name == name, reversed(tensors))]
        unused = all(entry.base_kind == NONE for entry in entries)
        need(not unused or all(entry.base_name_size == 0 for entry in entries), "tensor.base_name", "without a base")
    need(e.codec in CODECS, "tensor.codec")
    need(e.chunk_lanes_log2 >= 12 and lane_bytes << e.chunk_lanes_log2 <= 4 << 20, "tensor.chunk_lanes")
    need(not any(e.reserved) and (with_parts or e.part == 0), "tensor.reserved")
    need(e.tables_size == 0 or CODECS[e.codec].HAS_TABLES, "tensor.tables_size")
    need(e.first_chunk == chunks_before, "tensor.first_chunk")
    lanes = prod(shape if part == WHOLE else extent) * bits // (8 * lane_bytes)
    need(e.chunk_count == -(-lanes // (1 << e.chunk_lanes_log2)), "tensor.chunk_count")
    tensor = Tensor(e, name, base_name or name, shape, shape, DTYPES[e.dtype].name, lanes, origin, extent)
    if e.base_kind == PREFIX:
        need(shape and shape[0] != e.base_param, "tensor.base_param")
        tensor.base_shape = [e.base_param, *shape[1:]]
        need(shape_fits(tensor.base_shape, bits), "tensor.base_param")
    elif e.base_kind in (CAST, DEQUANTISED):
        read_derivation(tensor, names, other)
    else:
        need(e.base_param == 0, "tensor.base_param")
        tensor.base_shape = None if e.base_kind == NONE else shape
    return tensor


def read_derivation(tensor, names, other):
    """The base parameter and the scales name of a derived base. `other` is a part before it that has a base."""
    found = tensor.derivation = derivation(tensor.entry, tensor.shape)
    tensor.base_dtype, tensor.base_shape = found.base_dtype, found.base_shape
    if other:
        stated = other.derivation
        need((found.base_dtype, found.form) == (stated.base_dtype, stated.form), "tensor.base_param", "differs between parts")
    if tensor.entry.base_kind == CAST:
        return
    if tensor.origin is not None:
        check_blocks(found.block, tensor.shape, tensor.origin, tensor.extent)
    need(1 <= found.scales_name_size <= 4096, "tensor.scales_name", "size")
    tensor.scales_name = read_name(names.take(found.scales_name_size), "tensor.scales_name")
    need(tensor.scales_name != tensor.base_name, "tensor.scales_name", "equals the name of the base tensor")
    need(not other or tensor.scales_name == other.scales_name, "tensor.scales_name", "differs between parts")


def read_tables(section, tensors):
    parts, owned = Parts(section, "tensor.tables_size"), []
    for tensor in tensors:
        content, codec = parts.take(tensor.entry.tables_size), CODECS[tensor.entry.codec]
        with at(tensor=tensor.name):
            tensor.tables = codec.read_tables(content, owned) if codec.HAS_TABLES else None


def read_name(data, rule):
    try:
        name = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(rule, "not UTF-8") from None
    need("\0" not in name, rule, "NUL")
    return name


def shape_fits(shape, bits):
    total = prod(shape) * bits  # a Python integer: no intermediate product can overflow
    return total < 2**63 and total % 8 == 0


def read_files(section, file_count):
    names_at = 40 * file_count
    need(names_at <= len(section), "files.size")
    entries = FileEntry.rows(section, file_count)
    names = Parts(section, "files.size", names_at)
    contents = Parts(section, "files.size", names_at + sum(e.name_size for e in entries))
    files = []
    for e in entries:
        need(e.kind in (SAFETENSORS, HEADER_OF_BASE, VERBATIM, AS_BASE), "file.kind")
        need(e.reserved == 0, "file.reserved")
        need(e.name_size <= 255, "file.name", "size")
        name = names.take(e.name_size)
        is_safetensors = e.kind in (SAFETENSORS, HEADER_OF_BASE)
        if name or file_count != 1 or not is_safetensors:
            need(is_file_name(name, SHARD if is_safetensors else SHARD_INDEX), "file.name")
            need(not files or files[-1].name.encode() < name, "file.name", "order")
            need(all(file.name.lower() != name.decode().lower() for file in files), "file.name", "case")
        need(not is_safetensors or e.content_size >= 8, "file.content_size")
        need(not any(e.reserved2), "file.reserved")
        content = None
        if e.kind in (SAFETENSORS, VERBATIM):
            content = contents.take(e.content_size)
            need(blake3(content)[:16] == e.content_digest, "file.content_digest")
        files.append(File(name.decode(), e.kind, content, e))
    contents.finish()
    return files


def is_file_name(name, ending):
    return (
        len(name) <= 255
        and name.endswith(ending.encode())
        and len(name) > len(ending)
        and re.fullmatch(rb"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) is not None
    )


def check_records(index):
    blob_offset = 64
    for tensor in index.tensors:
        for c, first, lanes in tensor.chunks():
            record, sums = index.records[c], index.sums[c]
            with at(tensor=tensor.name, chunk=c):
                need(record.num_deltas <= lanes, "record.num_deltas")
                check_sizes(record, tensor, lanes)
                if index.payload_list is not None:
                    need(any(index.payload_list[c]) == (record.compressed_size > 0), "payload.digest", "zero or not")
                need(record.blob_offset == blob_offset, "record.blob_offset")
                need(record.output_offset == first, "record.output_offset")
                need(tensor.entry.base_kind != NONE or sums.base_sum == 0, "record.sums")
                need(record.num_deltas or sums.base_sum == sums.target_sum, "record.sums")
            blob_offset = align(blob_offset + record.compressed_size, 16)
    need(index.header.blob_size == blob_offset, "record.blob_size")


def check_sizes(record, tensor, lanes):
    stored, size = record.compressed_size, record.uncompressed_size
    if record.num_deltas == 0 or stored == 0:
        need(record.num_deltas == stored == size == record.crc32 == 0, "record.empty")
    else:
        need(stored <= size + size // 64 + 64, "record.sizes")
        need(CODECS[tensor.entry.codec].sizes_fit(record, tensor.dtype.lane_bytes, lanes), "record.sizes")
