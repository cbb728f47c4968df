"""Descriptions of tensors, files and pairs, and the writer that makes their bytes."""

import json
import struct
import zlib
from dataclasses import dataclass, field

from blake3 import blake3

from .conditioned import Payload, set_bytes
from .data import (CAST, CONDITIONED, DEQUANTISED, DIGESTS, DTYPES, GAPS, M64, NONE, ORDERED, PAYLOAD_LIST, PREFIX, RAW, SAME, VERBATIM, ZSTD,
    bytes_of,
                   chunk_sum, delta_of, lanes_of, moved, raw_name, up)
from .zstd import encode, library, raw_payload


@dataclass
class Tensor:
    name: object  # str, or bytes if it is not UTF-8
    dtype: str
    shape: list
    target: bytes
    base: bytes = None  # all bytes of the base tensor
    kind: int = SAME
    codec: int = ZSTD
    layout: object = GAPS  # or a list with one per chunk
    rows: int = 0  # of the base, for kind `prefix`
    base_name: object = ""
    log2: int = 12
    tables: object = None  # codec 2: the frequencies of each class, or the number of an earlier set, or bytes
    plan: object = None  # codec 2: a `Plan`, or a list with one per chunk
    # Of a part, whose bytes are `target` and `base`; the shape is that of the tensor.
    part: int = 0
    origin: list = None
    extent: list = None
    whole: bytes = None  # the target bytes of the tensor, if its parts tile it
    # Of a derived base, whose formed lanes are `base`.
    base_dtype: str = None
    form: int = 0
    scales_name: object = ""

    def dims(self):
        return [self.shape, self.shape + (self.origin or []) + (self.extent or []),
            (self.origin or []) + (self.extent or [])][self.part]

    def base_param(self):
        if self.kind in (CAST, DEQUANTISED):
            return DTYPES[self.base_dtype][0] | self.form << 16 | len(raw_name(self.scales_name)) << 32
        return self.rows if self.kind == PREFIX else 0

    def placed(self):
        """The bytes of the tensor in a file."""
        return self.whole if self.part else self.target


@dataclass
class File:
    kind: int
    name: object
    content: bytes
    order: list = field(default_factory=list)  # the tensors in the order of their data, for kinds 0 and 1

    def rebuilt(self, tensors):
        targets = {t.name: t.placed() for t in tensors}
        return self.content + b"".join(targets[name] for name in self.order)


@dataclass
class Model:
    tensors: list
    files: list = field(default_factory=list)
    frame: object = library  # makes frames of payloads
    section_frame: object = None  # makes frames of sections; None: stored
    minor: int = 0
    optional: int = 0
    features: int = 0


def head_of(tensors, metadata=None, text=None):
    """A safetensors header for the targets of `tensors`, in their order."""
    entries, at = {}, 0
    if metadata:
        entries["__metadata__"] = metadata
    for t in tensors:
        if t.part < 2:
            entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + len(t.placed())]}
            at += len(t.placed())
    text = text or json.dumps(entries, separators=(",", ":"))
    data = text.encode("utf-8")
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def lone(tensors, name="", kind=0):
    """One file with all `tensors`."""
    return [File(kind, name, head_of(tensors), [t.name for t in tensors if t.part < 2])]


def safetensors(tensors):
    """A base file: {name: (dtype, shape, bytes)}."""
    rows = [Tensor(name, dtype, shape, data) for name, (dtype, shape, data) in tensors.items()]
    return head_of(rows) + b"".join(t.target for t in rows)


def change(data, dtype, steps, p=7, r=1):
    """`data` with each lane i, i mod p = r, moved by the next element of `steps`."""
    w, lanes = DTYPES[dtype][2], lanes_of(data, DTYPES[dtype][2])
    for turn, i in enumerate(range(r, len(lanes), p)):
        lanes[i] = moved(lanes[i], steps[turn % len(steps)], w, dtype in ORDERED)
    return bytes_of(lanes, w)


def part(layout, row):
    """The bytes of one table row, given as a dict in the order of its fields."""
    return struct.pack(layout, *row.values())


class Draft:
    """A pair under construction. `edits` change it after the named step; later steps use the changed values."""

    def __init__(self, model, edits=None):
        self.model, edits = model, dict(edits or {})
        for step in (self.chunks, self.contents, self.payloads, self.records, self.listed, self.rooted, self.entries,
            self.tensors,
                     self.file_entries, self.files, self.stored, self.sections, self.header, self.header_bytes,
                     self.index, self.blob_header, self.blob):
            step()
            edits.pop(step.__name__, lambda draft: None)(self)
        assert not edits, f"no such step: {list(edits)}"

    def chunks(self):
        self.cut = []
        for t in self.model.tensors:
            w, size = DTYPES[t.dtype][2], len(t.target)
            base = (t.base or b"")[:size].ljust(size, b"\0") if t.kind != NONE else bytes(size)
            step = w << t.log2
            for k, at in enumerate(range(0, size, step)):
                old, new = base[at:at + step], t.target[at:at + step]
                deltas = [delta_of(a, b, w, t.dtype in ORDERED) if a != b else 0
                          for a, b in zip(lanes_of(old, w), lanes_of(new, w))]
                positions = [i for i, delta in enumerate(deltas) if delta]
                layout = t.layout[k] if isinstance(t.layout, list) else t.layout
                self.cut.append({"tensor": t, "k": k, "w": w, "base": old, "target": new, "layout": layout,
                                 "positions": positions, "deltas": [deltas[i] for i in positions]})

    def contents(self):
        self.content = [self.content_of(c) if c["positions"] else b"" for c in self.cut]

    def content_of(self, c):
        t, positions, deltas, w = c["tensor"], c["positions"], c["deltas"], c["w"]
        if t.codec == RAW:
            return raw_payload(positions, deltas, w)
        if t.codec == CONDITIONED:
            plan = t.plan[c["k"]] if isinstance(t.plan, list) else t.plan
            return Payload(plan, self.set_of(t), t.dtype, w, lanes_of(c["base"], w), dict(zip(positions, deltas)))
        return encode(c["layout"], positions, deltas, w, len(c["base"]) // w)

    def set_of(self, tensor):
        """The table set of a tensor: its own, or the one that it refers to."""
        if isinstance(tensor.tables, int):
            return [t.tables for t in self.model.tensors if isinstance(t.tables, list)][tensor.tables - 1]
        return tensor.tables or []

    def payloads(self):
        self.payload = [content.bytes() if isinstance(content, Payload) else
                        content if c["tensor"].codec == RAW or not content else self.model.frame(content)
                        for c, content in zip(self.cut, self.content)]

    def records(self):
        self.record, self.sums, offset = [], [], 64
        for c, content, payload in zip(self.cut, self.content, self.payload):
            self.record.append({
                "blob_offset": offset, "compressed_size": len(payload),
                "uncompressed_size": len(c["base"] if isinstance(content, Payload) else content),
                "num_deltas": len(c["positions"]), "crc32": zlib.crc32(payload),
                "output_offset": c["k"] << c["tensor"].log2})
            offset = up(offset + len(payload), 16)
            self.sums.append({"base_sum": chunk_sum(c["base"]), "target_sum": chunk_sum(c["target"])})
        bases = [bytes(32) if t.kind == NONE else blake3(t.base) for t in self.model.tensors]
        targets = [blake3(t.target) for t in self.model.tensors]
        self.roots = {"base_root": blake3(b"".join(bases)), "target_root": blake3(b"".join(targets))}
        self.digests = [{"base_digest": b[:16], "target_digest": t[:16]} for b, t in zip(bases, targets)]

    def listed(self):
        self.payload_list = [blake3(payload)[:16] if payload else bytes(16) for payload in self.payload]

    def rooted(self):
        self.payload_root = blake3(b"".join(self.payload_list))
        if self.model.features & DIGESTS:
            self.roots = {f"{side}_root": blake3(b"".join(d[f"{side}_digest"] for d in self.digests)) for side in ("base",
                "target")}

    def entries(self):
        self.entry, self.dims, self.names, self.tables, first = [], [], [], [], 0
        for t in self.model.tensors:
            self.tables.append(set_bytes(t.tables))
            code, _, w = DTYPES[t.dtype]
            count = -(-len(t.target) // (w << t.log2))
            name, base_name = (raw_name("" if t.part == 2 else text) for text in (t.name, t.base_name))
            self.entry.append({
                "name_size": len(name), "base_name_size": len(base_name), "dtype": code,
                "rank": len(t.shape), "base_kind": t.kind, "codec": t.codec, "chunk_lanes_log2": t.log2,
                "part": t.part, "reserved": bytes(2), "tables_size": len(self.tables[-1]), "first_chunk": first,
                "chunk_count": count,
                "base_param": t.base_param()})
            self.dims.append(list(t.dims()))
            self.names.append(name + base_name + raw_name(t.scales_name))
            first += count

    def tensors(self):
        self.tensors_section = (b"".join(part("<IIHHHHBB2sIIIQ", e) for e in self.entry)
                                + b"".join(bytes_of(dims, 8) for dims in self.dims) + b"".join(self.names))

    def file_entries(self):
        self.file_entry = [{
            "kind": f.kind, "reserved": 0, "name_size": len(raw_name(f.name)), "content_size": len(f.content),
            "content_digest": blake3(f.content)[:16], "reserved2": 0} for f in self.model.files]
        self.file_names = [raw_name(f.name) for f in self.model.files]
        self.file_contents = [f.content for f in self.model.files if f.kind in (0, VERBATIM)]

    def files(self):
        self.files_section = (b"".join(part("<HHIQ16sQ", e) for e in self.file_entry)
                              + b"".join(self.file_names) + b"".join(self.file_contents))
        self.tables_section = b"".join(self.tables)

    def stored(self):
        plain = [b"".join(part("<QIIIIQ", r) for r in self.record), b"".join(part("<QQ", s) for s in self.sums)
                 + b"".join(self.payload_list if self.model.features & PAYLOAD_LIST else []),
                 part("<32s32s", self.roots) + b"".join(part("<16s16s", d) for d in self.digests),
                 self.tensors_section, self.files_section, self.tables_section]
        self.store = list(plain)
        self.expanded = [len(section) for section in plain]
        if self.model.section_frame:
            for i in (3, 4, 5):
                frame = self.model.section_frame(plain[i])
                self.store[i] = min(plain[i], frame, key=len)

    def sections(self):
        self.section, self.body = [], b""
        for store, expanded in zip(self.store, self.expanded):
            self.section.append({"offset": 256 + len(self.body), "stored_size": len(store), "expanded_size": expanded})
            self.body += store + bytes(-len(store) % 8)

    def header(self):
        last = self.record[-1] if self.record else {"blob_offset": 64, "compressed_size": 0}
        self.head = {
            "magic": b"\x89TPI\r\n\x1a\n", "version_major": 1, "version_minor": self.model.minor, "header_size": 256,
            "required_features": self.model.features, "optional_features": self.model.optional,
            "index_size": 256 + len(self.body) + 32,
            "blob_size": up(last["blob_offset"] + last["compressed_size"], 16) % M64,
            "chunk_count": len(self.record), "tensor_count": len(self.entry), "file_count": len(self.file_entry),
            "reserved": 0}
        self.tail = self.payload_root + bytes(12) if self.model.features & DIGESTS else bytes(44)

    def header_bytes(self):
        data = part("<8sHHIQQQQIIII", self.head) + b"".join(part("<QQQ", s) for s in self.section) + self.tail
        self.start = data + struct.pack("<I", zlib.crc32(data))

    def index(self):
        data = self.start + self.body
        self.index_file = data + blake3(data)

    def blob_header(self):
        self.blob_head = {
            "magic": b"\x89TPB\r\n\x1a\n", "version_major": 1, "version_minor": self.model.minor, "header_size": 64,
            "blob_size": self.head["blob_size"], "pair_digest": self.index_file[-32:], "reserved": 0}

    def blob(self):
        data = part("<8sHHIQ32sI", self.blob_head)
        self.blob_file = data + struct.pack("<I", zlib.crc32(data)) + b"".join(
            payload + bytes(-len(payload) % 16) for payload in self.payload)
