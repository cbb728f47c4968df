#!/usr/bin/env python3
"""Writes the test vectors of TPDE, from spec/tpde-format.md and spec/codecs.md alone.

    python3 testdata/make_vectors.py            # write testdata/v1
    python3 testdata/make_vectors.py --check    # compare with the committed files, write nothing

Published vectors never change: add new ones, do not edit old ones.

Numbers in the vectors follow two patterns. Lane i of a base is the top bits of
(i mod 1021) * 9E3779B97F4A7C15 + seed * D1B54A32D192ED03 (mod 2^64), so it repeats with the prime
period 1021. A target changes each lane i with i mod p = r by the next of a short list of steps.

Another version of the zstd library may compress to other bytes. So --check takes the frames it
finds in a committed vector that expand to the content it wants, and then compares whole files byte
by byte. All invalid vectors, and some valid ones, have frames made by hand, without the library.
"""

import argparse
import json
import struct
import sys
import zlib
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import zstandard

sys.path.insert(0, str(Path(__file__).parent))
from blake3 import blake3  # noqa: E402  (the file beside this one)

V1 = Path(__file__).parent / "v1"
M64 = 2**64
RAW, ZSTD = 0, 1
PLANES, GAPS, ELIAS, NIBBLE_GAPS, NIBBLE_PLANES = range(5)
LAYOUTS = ("planes", "gaps", "elias_delta", "nibble_gaps", "nibble_planes")
NONE, SAME, PREFIX = 0, 1, 2
HEADER_OF_BASE, VERBATIM, AS_BASE = 1, 2, 3
ORDERED = {"F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
DTYPES = {  # name: code, bits an element, bytes a lane
    "BOOL": (0, 8, 1), "U8": (1, 8, 1), "I8": (2, 8, 1), "U16": (3, 16, 2), "I16": (4, 16, 2),
    "U32": (5, 32, 4), "I32": (6, 32, 4), "U64": (7, 64, 8), "I64": (8, 64, 8), "F16": (16, 16, 2),
    "BF16": (17, 16, 2), "F32": (18, 32, 4), "F64": (19, 64, 8), "C64": (20, 64, 4),
    "F8_E4M3": (32, 8, 1), "F8_E5M2": (33, 8, 1), "F8_E4M3FNUZ": (34, 8, 1), "F8_E5M2FNUZ": (35, 8, 1),
    "F8_E8M0": (36, 8, 1), "F4": (48, 4, 1), "F6_E2M3": (49, 6, 1), "F6_E3M2": (50, 6, 1)}


def up(x, a):
    """align(x, a)"""
    return (x + a - 1) // a * a


def raw_name(name):
    return name if isinstance(name, bytes) else name.encode("utf-8")


# --- Lanes, steps and sums ----------------------------------------------------------------------


def lanes_of(data, w):
    return list(struct.unpack("<%d%s" % (len(data) // w, {1: "B", 2: "H", 4: "I", 8: "Q"}[w]), data))


def bytes_of(lanes, w):
    return struct.pack("<%d%s" % (len(lanes), {1: "B", 2: "H", 4: "I", 8: "Q"}[w]), *lanes)


def pattern(count, w, seed=0):
    return [(i % 1021 * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03) % M64 >> 64 - 8 * w for i in range(count)]


def rank_of(u, w, ordered):
    """`ordered` of section 9."""
    if not ordered:
        return u
    half = 1 << 8 * w - 1
    return 2 * half - 1 - u if u >= half else u + half


def moved(u, step, w, ordered):
    """The lane `step` places from `u` in that order."""
    half = 1 << 8 * w - 1
    place = (rank_of(u, w, ordered) + step) % (2 * half)
    if not ordered:
        return place
    return place - half if place >= half else 2 * half - 1 - place


def delta_of(base, target, w, ordered):
    d = (rank_of(target, w, ordered) - rank_of(base, w, ordered)) % (1 << 8 * w)
    return 2 * d if d < 1 << 8 * w - 1 else 2 * ((1 << 8 * w) - d) - 1


def mix(x):
    z = (x + 1) * 0x9E3779B97F4A7C15 % M64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % M64
    return z ^ (z >> 31)


Q = [(mix(c) >> 32) | 1 for c in range(1024)]


def chunk_sum(data):
    total = 0
    for j, word in enumerate(lanes_of(data + bytes(-len(data) % 4), 4)):
        if word:
            total += ((mix(1024 + j // 1024) | 1) * Q[j % 1024] % M64) * word
    return total % M64


# --- zstd frames --------------------------------------------------------------------------------


def by_hand(content, *, size="content", single=True, window=None, dictionary=None, checksum=None, runs=False,
            block=1 << 17, magic=b"\x28\xb5\x2f\xfd", reserved_bit=0):
    """A frame of raw blocks (and of run blocks where `runs`), with every field of its header to choose."""
    stated = len(content) if size == "content" else size
    fcs = b"" if stated is None else next(
        (i, stated.to_bytes(n, "little")) for i, n, top in ((2, 4, 2**32), (3, 8, M64)) if stated < top)
    if stated is not None:
        if single and stated < 256:
            fcs = (0, bytes([stated]))
        elif 256 <= stated < 65792:
            fcs = (1, (stated - 256).to_bytes(2, "little"))
    flag, fcs = fcs if fcs else (0, b"")
    single = single and stated is not None and window is None
    descriptor = flag << 6 | single << 5 | reserved_bit << 3 | (checksum is not None) << 2 | (dictionary is not None) * 3
    out = magic + bytes([descriptor])
    if not single:
        out += bytes([window if window is not None else 10 - 2 << 3 if len(content) <= 4096 else 8 << 3])
    if dictionary is not None:
        out += dictionary.to_bytes(4, "little")
    out += fcs
    blocks, at = [], 0
    while at < len(content):
        run = at
        while runs and run < len(content) and content[run] == content[at]:
            run += 1
        if run - at >= 8:
            blocks.append((run - at, 1, content[at:at + 1]))
            at = run
        else:
            end = min(at + block, len(content))
            if runs:
                end = next((i for i in range(at, end) if len(content) - i >= 8 and
                            content[i:i + 8] == content[i:i + 1] * 8), end)
            blocks.append((end - at, 0, content[at:end]))
            at = end
    blocks = blocks or [(0, 0, b"")]
    for i, (length, kind, data) in enumerate(blocks):
        out += (length << 3 | kind << 1 | (i == len(blocks) - 1)).to_bytes(3, "little") + data
    return out + (checksum or b"")


def by_runs(content):
    return by_hand(content, runs=True)


class Library:
    """Frames made by the zstd library, or those that a committed vector already has for the same content."""

    def __init__(self):
        self.known = {}

    def harvest(self, data):
        at = data.find(b"\x28\xb5\x2f\xfd")
        while at >= 0:
            try:
                expander = zstandard.ZstdDecompressor().decompressobj()
                content = expander.decompress(data[at:])
                if expander.eof:
                    end = len(data) - len(expander.unused_data)
                    self.known.setdefault((content, data[at + 4] >> 2 & 1), data[at:end])
            except zstandard.ZstdError:
                pass
            at = data.find(b"\x28\xb5\x2f\xfd", at + 1)

    def __call__(self, content, checksum=False):
        return self.known.get((content, int(checksum))) or zstandard.ZstdCompressor(
            level=19, write_checksum=checksum).compress(content)


library = Library()


def with_checksum(content):
    return library(content, checksum=True)


# --- Layouts ------------------------------------------------------------------------------------


def planes(values, w):
    data = bytes_of(values, w)
    return b"".join(data[row::w] for row in range(w))


def continued(gap):
    return b"\xff" * (gap // 255) + bytes([gap % 255])


def elias_bits(gap):
    x = gap + 1
    size = x.bit_length() - 1
    head = f"{size + 1:b}"
    return "0" * (len(head) - 1) + head + f"{x:b}"[1:]


def packed_bits(bits):
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i:i + 8], 2) for i in range(0, len(bits), 8))


def escapes(values, w):
    """Parts 2 and 3 of the nibble layouts."""
    return (bytes(min(v - 15, 255) for v in values if v >= 15)
            + planes([v - 270 for v in values if v >= 270], w))


def encode(layout, positions, deltas, w, count):
    """The content of a payload of codec `zstd`."""
    gaps = [p - q - 1 for p, q in zip(positions, [-1] + positions)]
    every = [0] * count
    for position, delta in zip(positions, deltas):
        every[position] = delta
    if layout == PLANES:
        body = planes(every, w)
    elif layout == GAPS:
        body = planes(deltas, w) + b"".join(map(continued, gaps))
    elif layout == ELIAS:
        body = planes(deltas, w) + packed_bits("".join(map(elias_bits, gaps)))
    elif layout == NIBBLE_GAPS:
        values = [delta - 1 for delta in deltas]
        body = (bytes(min(g, 15) | min(v, 15) << 4 for g, v in zip(gaps, values)) + escapes(values, w)
                + b"".join(continued(g - 15) for g in gaps if g >= 15))
    else:
        small = [min(z, 15) for z in every] + [0] * (-count % 64)
        tokens = bytes(small[b + j] | small[b + j + 32] << 4 for b in range(0, len(small), 64) for j in range(32))
        body = tokens + escapes(every, w)
    return bytes([layout]) + body


def raw_payload(positions, deltas, w):
    head = bytes_of(positions, 4)
    return head + bytes(-len(head) % w) + bytes_of(deltas, w)


# --- Models -------------------------------------------------------------------------------------


@dataclass
class Tensor:
    name: object  # str, or bytes where it is not UTF-8
    dtype: str
    shape: list
    target: bytes
    base: bytes = None  # all bytes of the base tensor
    kind: int = SAME
    codec: int = ZSTD
    layout: object = GAPS  # or a list of one a chunk
    rows: int = 0  # of the base, for kind `prefix`
    base_name: object = ""
    log2: int = 12


@dataclass
class File:
    kind: int
    name: object
    content: bytes
    order: list = field(default_factory=list)  # the tensors in the order of their data, for kinds 0 and 1

    def rebuilt(self, tensors):
        targets = {t.name: t.target for t in tensors}
        return self.content + b"".join(targets[name] for name in self.order)


@dataclass
class Model:
    tensors: list
    files: list = field(default_factory=list)
    frame: object = library  # makes the frames of payloads
    section_frame: object = None  # makes those of sections; None: stored
    minor: int = 0
    optional: int = 0


def head_of(tensors, metadata=None, text=None):
    """A safetensors header for the targets of `tensors`, in their order."""
    entries, at = {}, 0
    if metadata:
        entries["__metadata__"] = metadata
    for t in tensors:
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + len(t.target)]}
        at += len(t.target)
    text = text or json.dumps(entries, separators=(",", ":"))
    data = text.encode("utf-8")
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def lone(tensors, name="", kind=0):
    """One file with all `tensors`."""
    return [File(kind, name, head_of(tensors), [t.name for t in tensors])]


def safetensors(tensors):
    """A base file: {name: (dtype, shape, bytes)}."""
    rows = [Tensor(name, dtype, shape, data) for name, (dtype, shape, data) in tensors.items()]
    return head_of(rows) + b"".join(t.target for t in rows)


def change(data, dtype, steps, p=7, r=1):
    """`data` with each lane i, i mod p = r, moved by the next of `steps`."""
    w, lanes = DTYPES[dtype][2], lanes_of(data, DTYPES[dtype][2])
    for turn, i in enumerate(range(r, len(lanes), p)):
        lanes[i] = moved(lanes[i], steps[turn % len(steps)], w, dtype in ORDERED)
    return bytes_of(lanes, w)


# --- The writer ---------------------------------------------------------------------------------


def part(layout, row):
    """The bytes of one table row, given as a dict in the order of its fields."""
    return struct.pack(layout, *row.values())


class Draft:
    """A pair in the making. `edits` change it after the named step; later steps follow the change."""

    def __init__(self, model, edits=None):
        self.model, edits = model, dict(edits or {})
        for step in (self.chunks, self.contents, self.payloads, self.records, self.entries, self.tensors,
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
        self.content = [
            b"" if not c["positions"] else raw_payload(c["positions"], c["deltas"], c["w"])
            if c["tensor"].codec == RAW else
            encode(c["layout"], c["positions"], c["deltas"], c["w"], len(c["base"]) // c["w"]) for c in self.cut]

    def payloads(self):
        self.payload = [content if c["tensor"].codec == RAW or not content else self.model.frame(content)
                        for c, content in zip(self.cut, self.content)]

    def records(self):
        self.record, self.sums, offset = [], [], 64
        for c, content, payload in zip(self.cut, self.content, self.payload):
            self.record.append({
                "blob_offset": offset, "compressed_size": len(payload), "uncompressed_size": len(content),
                "num_deltas": len(c["positions"]), "crc32": zlib.crc32(payload),
                "output_offset": c["k"] << c["tensor"].log2})
            offset = up(offset + len(payload), 16)
            self.sums.append({"base_sum": chunk_sum(c["base"]), "target_sum": chunk_sum(c["target"])})
        bases = [bytes(32) if t.kind == NONE else blake3(t.base) for t in self.model.tensors]
        targets = [blake3(t.target) for t in self.model.tensors]
        self.roots = {"base_root": blake3(b"".join(bases)), "target_root": blake3(b"".join(targets))}
        self.digests = [{"base_digest": b[:16], "target_digest": t[:16]} for b, t in zip(bases, targets)]

    def entries(self):
        self.entry, self.dims, self.names, first = [], [], [], 0
        for t in self.model.tensors:
            code, _, w = DTYPES[t.dtype]
            count = -(-len(t.target) // (w << t.log2))
            self.entry.append({
                "name_size": len(raw_name(t.name)), "base_name_size": len(raw_name(t.base_name)), "dtype": code,
                "rank": len(t.shape), "base_kind": t.kind, "codec": t.codec, "chunk_lanes_log2": t.log2,
                "reserved": bytes(3), "tables_size": 0, "first_chunk": first, "chunk_count": count,
                "base_param": t.rows if t.kind == PREFIX else 0})
            self.dims.append(list(t.shape))
            self.names.append(raw_name(t.name) + raw_name(t.base_name))
            first += count

    def tensors(self):
        self.tensors_section = (b"".join(part("<IIHHHHB3sIIIQ", e) for e in self.entry)
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
        self.tables_section = b""

    def stored(self):
        plain = [b"".join(part("<QIIIIQ", r) for r in self.record), b"".join(part("<QQ", s) for s in self.sums),
                 part("<32s32s", self.roots) + b"".join(part("<16s16s", d) for d in self.digests),
                 self.tensors_section, self.files_section, self.tables_section]
        self.store = list(plain)
        self.expanded = [len(section) for section in plain]
        if self.model.section_frame:
            for i in (3, 4):
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
            "required_features": 0, "optional_features": self.model.optional,
            "index_size": 256 + len(self.body) + 32,
            "blob_size": up(last["blob_offset"] + last["compressed_size"], 16) % M64,
            "chunk_count": len(self.record), "tensor_count": len(self.entry), "file_count": len(self.file_entry),
            "reserved": 0}
        self.tail = bytes(44)

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


# --- Vectors ------------------------------------------------------------------------------------


class Set:
    """The files to be, by path below v1, and the manifest."""

    def __init__(self, committed=None):
        self.files, self.manifest, self.committed = {}, [], committed

    def base(self, name, data):
        """A base shared by name: the bytes of a file, or those of a folder's files by name."""
        path = f"{name}.base" + (".safetensors" if isinstance(data, bytes) else "")
        for key, value in {path: data}.items() if isinstance(data, bytes) else data.items():
            self.files[path if isinstance(data, bytes) else f"{path}/{key}"] = value
        return path

    def pair(self, folder, name, model, edits, base, facts):
        stem = f"{folder}/{name}"
        assert all(stem != v["index"][:-11] for v in self.manifest), name
        library.known = {}
        if self.committed:
            for ending in (".tpde-index", ".tpde-blob"):
                path = self.committed / (stem + ending)
                library.harvest(path.read_bytes() if path.exists() else b"")
        draft = Draft(model, edits)
        self.files[stem + ".tpde-index"], self.files[stem + ".tpde-blob"] = draft.index_file, draft.blob_file
        self.manifest.append({"name": name, **facts, "index": stem + ".tpde-index", "blob": stem + ".tpde-blob",
                              "base": base})
        return self.manifest[-1], draft

    def valid(self, name, about, model, base=None):
        model.tensors.sort(key=lambda t: raw_name(t.name))
        entry, _ = self.pair("valid", name, model, {}, base, {"about": about, "verdict": "valid"})
        entry["tensors"] = {t.name: blake3(t.target).hex() for t in model.tensors}
        entry["files"] = {f.name: blake3(f.rebuilt(model.tensors)).hex() for f in model.files}

    def invalid(self, name, about, rule, when, model, base=None, *, error=None, tensor=None, chunk=None, **edits):
        entry, draft = self.pair("invalid", name, model, edits, base, {"about": about, "verdict": "invalid"})
        entry.update(rule=rule, when=when)
        entry.update({k: v for k, v in (("error", error), ("tensor", tensor), ("chunk", chunk)) if v is not None})
        return draft


def zeros_but(count, w, changes):
    """Lanes of zero with some others: {position: lane}."""
    lanes = [0] * count
    for position, lane in changes.items():
        lanes[position] = lane
    return bytes_of(lanes, w)


def valid_vectors(out):
    def one(name, about, tensors, base=None, files=True, **options):
        out.valid(name, about, Model(tensors, (lone(tensors) if files is True else files or []), **options), base)

    # The worked examples of section 5 of codecs.md.
    data = bytes_of(pattern(4096, 2, 1), 2)
    lanes = lanes_of(data, 2)
    for position, step in ((3, 1), (20, -1), (300, 200)):
        lanes[position] = moved(lanes[position], step, 2, True)
    base = out.base("valid/example", safetensors({"w": ("BF16", [4096], data)}))
    for name, codec, layout in [("raw", RAW, 0)] + [("zstd_" + name, ZSTD, i) for i, name in enumerate(LAYOUTS)]:
        one(f"{name}_example", "The worked example of codecs.md: lanes 3, 20 and 300 of 4,096 change by +1, -1 "
            "and +200 ULP.", [Tensor("w", "BF16", [4096], bytes_of(lanes, 2), data, codec=codec, layout=layout)],
            base, frame=by_hand)

    # Each dtype.
    shape, sources = [13, 8], {}
    for seed, (dtype, (_, bits, w)) in enumerate(DTYPES.items()):
        sources[dtype] = (dtype, shape, bytes_of(pattern(prod(shape) * bits // (8 * w), w, seed), w))
    base = out.base("valid/dtypes", safetensors(sources))
    for i, (dtype, (_, _, data)) in enumerate(sources.items()):
        if dtype == "BOOL":
            data = bytes(byte & 1 for byte in data)  # booleans proper: a base of its own
            base_of_bool = out.base("valid/dtype_bool", safetensors({"BOOL": ("BOOL", shape, data)}))
        one(f"dtype_{dtype.lower()}", f"A tensor of {dtype}.",
            [Tensor(dtype, dtype, shape, change(data, dtype, [1, -1, 2, 3, -60], 5, 2) if dtype != "BOOL" else
                    bytes(b ^ (i % 5 == 2) for i, b in enumerate(data)), data, codec=ZSTD if i % 4 else RAW,
                    layout=i % 5)], base_of_bool if dtype == "BOOL" else base)

    # Each width of lanes with each codec and layout; the second chunk has one lane.
    sources = {f"w{8 * w}": (dtype, [4097], bytes_of(pattern(4097, w, w), w))
               for dtype, w in (("U8", 1), ("F16", 2), ("I32", 4), ("F64", 8))}
    base = out.base("valid/lanes", safetensors(sources))
    for name, (dtype, shape, data) in sources.items():
        top = 1 << DTYPES[dtype][1] - 1
        steps = [step for step in (1, -1, 2, -7, 8, 9, -100, 127, 134, 135, -135, 136, 30000, -2**30, 2**60)
                 if abs(step) < top]
        for codec, layout, label in [(RAW, 0, "raw")] + [(ZSTD, i, text) for i, text in enumerate(LAYOUTS)]:
            one(f"lanes_{name}_{label}", f"4,097 lanes of {name[1:]} bits, every seventh changed, {label}.",
                [Tensor(name, dtype, shape, change(data, dtype, steps, 7, 1), data, codec=codec, layout=layout)], base)
            dense = change(data, dtype, steps, 2, 0)
            if codec == ZSTD:
                one(f"lanes_{name}_{label}_dense", f"4,097 lanes of {name[1:]} bits, every second changed, {label}.",
                    [Tensor(name, dtype, shape, dense, data, codec=codec, layout=layout)], base)

    # Sizes at the boundaries of chunks, and of the words of sums.
    for count in (1, 2, 3, 63, 64, 65, 4093, 4094, 4095, 4096, 4097, 8191, 8192, 8193):
        one(f"size_{count}", f"{count} lanes of 8 bits in chunks of 4,096, the last lane changed.",
            [Tensor("t", "U8", [count], zeros_but(count, 1, {count // 2: 9, count - 1: 200}), kind=NONE,
                    layout=NIBBLE_PLANES)])
    data = bytes_of(pattern(12 * 4096 + 1, 1, 5), 1)
    base = out.base("valid/many_chunks", safetensors({"t": ("I8", [12 * 4096 + 1], data)}))
    one("many_chunks", "13 chunks with a different layout each, five of them without changes.",
        [Tensor("t", "I8", [12 * 4096 + 1], b"".join(
            data[i:i + 4096] if k in (0, 3, 4, 9, 11) else change(data[i:i + 4096], "I8", [1, -2, 17, -128], 101, 0)
            for k, i in enumerate(range(0, len(data), 4096))), data, layout=[k % 5 for k in range(13)])], base)
    count = 23 * 4096 + 5
    one("many_chunks_none", "24 chunks without a base, three of them changed.",
        [Tensor("t", "U8", [count], zeros_but(count, 1, {4096: 1, 50000: 2, count - 1: 3}), kind=NONE)])
    one("chunk_lanes_largest", "The largest chunks of each width of lanes, for tensors that fill little of them.",
        [Tensor(f"w{8 * w}", dtype, [600], zeros_but(600, w, {5: 1, 599: 2}), kind=NONE, log2=22 - w.bit_length() + 1,
                layout=GAPS) for dtype, w in (("U8", 1), ("U16", 2), ("U32", 4), ("U64", 8))])
    count = 150_001
    one("chunk_of_many_words", "One chunk of 150,001 bytes: its sum has 37 rows, and the content of its payload more "
        "than one zstd block.", [Tensor("t", "U8", [count], zeros_but(count, 1, {i: i % 251 + 1 for i in
                                                                                range(0, count, 1009)}),
                                        kind=NONE, log2=20, layout=PLANES)])

    # Escapes.
    def spaced(gaps):
        positions, at = [], -1
        for gap in gaps:
            at += gap + 1
            positions.append(at)
        return positions

    gaps = [0, 253, 254, 255, 256, 508, 509, 510, 511, 0]
    one("gaps_continued_bytes", "Gaps of 253 to 256 and 508 to 511, where continued bytes change their number.",
        [Tensor("t", "U16", [4096], zeros_but(4096, 2, dict.fromkeys(spaced(gaps), 3)), kind=NONE, layout=GAPS)])
    gaps = [13, 14, 15, 16, 268, 269, 270, 271, 524, 525, 526]
    one("nibble_gaps_gap_escapes", "Gaps of 13 to 16, 268 to 271 and 524 to 526, where the nibble escapes.",
        [Tensor("t", "U16", [4096], zeros_but(4096, 2, dict.fromkeys(spaced(gaps), 3)), kind=NONE,
                layout=NIBBLE_GAPS)])
    gaps = [0, 1, 2, 3, 4, 6, 7, 8, 14, 15, 16, 30, 31, 32, 62, 63, 64, 254, 255, 256, 510, 511, 512]
    one("elias_delta_gaps", "Gaps about the powers of two, where the lengths of the Elias code change.",
        [Tensor("t", "U16", [4096], zeros_but(4096, 2, dict.fromkeys(spaced(gaps), 3)), kind=NONE, layout=ELIAS)])
    one("elias_delta_longest", "The longest gap of a chunk, and of a large one: x = 4,096 and 2^20 + 1.",
        [Tensor("a", "U8", [4096], zeros_but(4096, 1, {4095: 1}), kind=NONE, layout=ELIAS),
         Tensor("b", "U8", [2**20 + 1], zeros_but(2**20 + 1, 1, {2**20: 1}), kind=NONE, layout=ELIAS, log2=21)],
        files=False)
    values = [13, 14, 15, 16, 17, 254, 255, 256, 268, 269, 270, 271, 272, 524, 525, 526, 65534, 65535]
    steps = {100 + 3 * i: (delta >> 1 if delta % 2 == 0 else -(delta + 1 >> 1)) % 65536
             for i, delta in enumerate(values)}
    for layout in (NIBBLE_GAPS, NIBBLE_PLANES):
        one(f"{LAYOUTS[layout]}_delta_escapes", "Deltas about 15 and 270, where the nibble and its byte escape.",
            [Tensor("t", "I16", [200], zeros_but(200, 2, steps), kind=NONE, layout=layout)])
    for codec, layout, label in [(RAW, 0, "raw")] + [(ZSTD, i, text) for i, text in enumerate(LAYOUTS)]:
        one(f"delta_largest_{label}", f"The largest delta, 2^w - 1, in lanes of each width, {label}.",
            [Tensor(f"w{8 * w}", dtype, [70], zeros_but(70, w, {0: 1 << 8 * w - 1, 64: 1 << 8 * w - 1}), kind=NONE,
                    codec=codec, layout=layout) for dtype, w in (("U8", 1), ("U16", 2), ("U32", 4), ("U64", 8))])
    one("delta_every_lane_w8", "All 255 deltas of lanes of 8 bits, each once, in every layout.",
        [Tensor(f"t{i}", "U8", [255], bytes(range(1, 256)), kind=NONE, layout=i) for i in range(5)])
    one("every_lane_changed", "All lanes of two chunks change, in every layout.",
        [Tensor(f"t{i}", "U16", [4160], bytes_of([i % 500 + 1 for i in range(4160)], 2), kind=NONE, layout=i)
         for i in range(5)])
    one("raw_padding", "Codec raw with lanes of 64 bits and an odd number of changes, so that padding is needed, "
        "and an even one.", [Tensor("even", "U64", [10], zeros_but(10, 8, {1: 5, 9: 6}), kind=NONE, codec=RAW),
                             Tensor("odd", "U64", [10], zeros_but(10, 8, {1: 5, 7: 2**63, 9: 6}), kind=NONE, codec=RAW)])

    # Bit patterns of floats that a comparison of values would lose.
    specials = {
        "F16": [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFE00, 0x7FFF,
                0xFFFF, 0x3C00],
        "BF16": [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFC0,
                 0x7FFF, 0xFFFF, 0x3F80],
        "F32": [0, 2**31, 1, 2**31 + 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001,
                0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000],
        "F64": [0, 2**63, 1, 2**63 + 1, 2**52 - 1, 2**52, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000,
                0x7FF0000000000001, 0x7FF8000000000000, 0xFFF8000000000000, 2**63 - 1, 2**64 - 1, 0x3FF0000000000000]}
    grid = {dtype: [(a, b) for a in lanes for b in lanes] for dtype, lanes in specials.items()}
    base = out.base("valid/float_specials", safetensors(
        {dtype: (dtype, [15, 15], bytes_of([a for a, _ in pairs], DTYPES[dtype][2])) for dtype, pairs in grid.items()}))
    for i, (dtype, pairs) in enumerate(grid.items()):
        w = DTYPES[dtype][2]
        one(f"float_specials_{dtype.lower()}", f"{dtype} from and to each of zero, -0.0, subnormals, infinities, NaNs "
            "with payloads, and finite numbers.",
            [Tensor(dtype, dtype, [15, 15], bytes_of([b for _, b in pairs], w), bytes_of([a for a, _ in pairs], w),
                    codec=ZSTD if i else RAW, layout=i)], base)
    flips = bytes_of([lane ^ 0x8000 for lane in pattern(225, 2, 9)], 2)
    base = out.base("valid/sign_flips", safetensors({"t": ("BF16", [225], bytes_of(pattern(225, 2, 9), 2))}))
    one("sign_flips", "Every lane of a BF16 tensor changes its sign.",
        [Tensor("t", "BF16", [225], flips, bytes_of(pattern(225, 2, 9), 2), layout=PLANES)], base)

    # Bases.
    short, tall = bytes_of(pattern(3 * 700, 2, 3), 2), bytes_of(pattern(13 * 700, 2, 3), 2)
    base = out.base("valid/bases", safetensors({
        "a": ("I16", [3, 700], short), "b": ("I16", [13, 700], tall), "empty": ("I16", [0, 700], b""),
        "none_in_a_row": ("I16", [5, 0], b""), "nibbles": ("F4", [4, 6], bytes_of(pattern(12, 1, 2), 1))}))
    grown = change(short + bytes(10 * 1400), "I16", [1, -5], 61, 60)
    one("base_same", "Base kind same.", [Tensor("a", "I16", [3, 700], change(short, "I16", [1, -1]), short)], base)
    one("base_same_unchanged", "A tensor without any change: two records of zeros and no payload.",
        [Tensor("b", "I16", [13, 700], tall, tall)], base)
    one("base_none", "Base kind none, the lanes all changed from zero.",
        [Tensor("new", "I16", [40], bytes_of(range(1, 41), 2), kind=NONE)])
    one("base_none_of_zeros", "Base kind none and a target of zeros: no payload.",
        [Tensor("new", "I16", [4100], bytes(8200), kind=NONE)])
    one("base_none_ordered", "Base kind none for floats: deltas count from +0.0.",
        [Tensor("new", "BF16", [6], bytes_of([0x3F80, 0x0000, 0x8000, 0x0001, 0x8001, 0xFFFF], 2), kind=NONE,
                codec=RAW)])
    one("base_prefix_grown", "Base kind prefix, three rows grown to thirteen: a chunk is partly, two wholly beyond "
        "the base.", [Tensor("a", "I16", [13, 700], grown, short, PREFIX, rows=3)], base)
    one("base_prefix_shrunk", "Base kind prefix, thirteen rows shrunk to three; the base digest covers all thirteen.",
        [Tensor("b", "I16", [3, 700], change(tall[:4200], "I16", [1, -1]), tall, PREFIX, rows=13)], base)
    one("base_prefix_of_zero_rows", "Base kind prefix with a base without rows.",
        [Tensor("empty", "I16", [2, 700], change(bytes(2800), "I16", [4]), b"", PREFIX, rows=0)], base)
    one("base_prefix_to_zero_rows", "Base kind prefix to a target without rows: no chunks.",
        [Tensor("a", "I16", [0, 700], b"", short, PREFIX, rows=3)], base)
    one("base_prefix_without_lanes", "Base kind prefix between shapes that both have no elements.",
        [Tensor("none_in_a_row", "I16", [7, 0], b"", b"", PREFIX, rows=5)], base)
    nibbles = bytes_of(pattern(12, 1, 2), 1)
    one("base_prefix_packed", "Base kind prefix for F4: rows of half as many lanes as elements.",
        [Tensor("nibbles", "F4", [6, 6], change(nibbles + bytes(6), "F4", [3], 4), nibbles, PREFIX, rows=4)], base)
    one("base_renamed", "The base tensor has another name.",
        [Tensor("z", "I16", [3, 700], change(short, "I16", [1, -1]), short, base_name="a")], base)
    one("base_tied", "Two targets from the same base tensor, one by its own name.",
        [Tensor("a", "I16", [3, 700], change(short, "I16", [1, -1]), short),
         Tensor("z", "I16", [3, 700], change(short, "I16", [2, -2]), short, base_name="a")], base)
    one("base_crossed", "Two targets that each take the other's namesake as base, both of kind prefix.",
        [Tensor("a", "I16", [3, 700], change(tall[:4200], "I16", [7], 301), tall, PREFIX, rows=13, base_name="b"),
         Tensor("b", "I16", [13, 700], grown, short, PREFIX, rows=3, base_name="a")], base)

    # Shapes.
    one("shape_scalar", "Rank 0: a scalar.", [Tensor("s", "F32", [], struct.pack("<f", 1.5), kind=NONE)])
    one("shape_empty", "A dim of zero: an empty tensor without chunks, between two others.",
        [Tensor("a", "U8", [3], b"\1\2\3", kind=NONE), Tensor("b", "U8", [4, 0, 2], b"", kind=NONE),
         Tensor("c", "U8", [3], b"\1\2\3", kind=NONE)])
    one("shape_empty_huge", "A dim of zero beside dims whose product would not fit in any width.",
        [Tensor("t", "F64", [2**40, 2**63, 0, 2**64 - 1], b"", kind=NONE)], files=False)
    one("shape_rank_32", "The largest rank.", [Tensor("t", "U8", [1] * 31 + [3], b"\1\0\3", kind=NONE)])

    # Sections.
    many = [Tensor(f"model.layers.{i}.weight", "BF16", [4, 2], zeros_but(8, 2, {i % 8: 300 + i}), kind=NONE)
            for i in range(30)]
    one("sections_stored", "30 tensors, sections as they are.", many)
    one("sections_compressed", "30 tensors, the sections tensors and files compressed by zstd.", many,
        section_frame=library)
    one("sections_compressed_by_hand", "The same with frames of raw and run blocks.", many, section_frame=by_runs)
    one("sections_checksum", "The same with content checksums in the sections' frames.", many,
        section_frame=with_checksum)
    one("section_tensors_compressed", "Only the section tensors is compressed.", many, files=False,
        section_frame=library)

    # Frames of payloads.
    some = change(bytes(400), "U16", [1, 2, 3], 3)
    for name, about, frame in [
            ("content_checksum", "a content checksum", with_checksum),
            ("multi_block", "blocks of 41 bytes", lambda c: by_hand(c, block=41)),
            ("run_blocks", "raw and run blocks", by_runs),
            ("window_descriptor", "a window descriptor, not a single segment", lambda c: by_hand(c, single=False)),
            ("window_largest", "a window of 2^27 bytes", lambda c: by_hand(c, single=False, window=17 << 3)),
            ("content_size_8_bytes", "a content size in 8 bytes",
             lambda c: b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", len(c)) + by_hand(c, size=len(c))[len(
                 by_hand(c)) - len(c) - 3:]),
            ("empty_last_block", "an empty last block", lambda c: by_hand(c)[:-len(c) - 3] + (len(c) << 3).to_bytes(
                3, "little") + c + b"\1\0\0")]:
        one(f"frame_{name}", f"A payload's frame with {about}.",
            [Tensor("t", "U16", [200], some, kind=NONE, layout=PLANES)], frame=frame)
    one("frame_larger_than_content", "Stored sizes above expanded ones, the one allowed way round for payloads.",
        [Tensor("t", "U8", [2], b"\5\0", kind=NONE, layout=NIBBLE_GAPS)], frame=by_hand)

    # Names of tensors.
    def named(name, about, names):
        one(name, about, [Tensor(text, "U8", [2], bytes([i + 1, 0]), kind=NONE, codec=RAW)
                          for i, text in enumerate(names)])

    named("names_unicode", "Names of many scripts, and two that differ in normalisation only.",
          ["wéight", "we\u0301ight", "重み", "вес", "وزن", "🧠", "e\u200dx"])
    named("names_byte_order", "Names whose order as bytes is not that of UTF-16 or of a dictionary.",
          ["Z", "a", "a.10", "a.9", "a0", "é", "\uffee", "\U00010000", "~"])
    named("names_long", "Names of 4,096 bytes that differ in the last.", ["x" * 4095 + c for c in "ab"])
    named("names_escapes", "Names with control characters, which a reader must not print as they are.",
          ["\x1b[31mred", "a\nb", "tab\tquote\"back\\slash", "\x7f\u0085\u202e\u2028", " "])
    named("names_like_paths", "A name is a label: these are no paths.", ["../../secret", "/etc/hosts", "C:\\x", ".", ".."])

    # Versions and features.
    some = [Tensor("t", "U8", [5], b"\1\0\2\0\3", kind=NONE)]
    one("version_minor_7", "A higher minor version.", some, minor=7)
    one("optional_features", "Unknown optional feature bits.", some, optional=2**63 + 5)
    out.valid("empty_pair", "No tensors, no files: 352 bytes of index.", Model([]))
    one("empty_file", "No tensors, one file with an empty header.", [])

    # Files.
    rows = {f"layer.{i}": ("BF16", [6, 4], bytes_of(pattern(24, 2, i), 2)) for i in range(4)}
    targets = [Tensor(name, dtype, shape, change(data, dtype, [1, -1], 5), data)
               for name, (dtype, shape, data) in rows.items()]
    base = out.base("valid/file_lone", safetensors(rows))
    one("files_none", "file_count 0: tensors only.", targets, base, files=False)
    one("file_lone", "A lone file with its header stored.", targets, base)
    one("file_lone_header_of_base", "A lone file whose header is the base's.", targets, base,
        lone(targets, kind=HEADER_OF_BASE))
    one("file_lone_named", "A lone file with a name.", targets, base, lone(targets, "Model-1_x.y.safetensors"))
    shuffled = [targets[i] for i in (2, 0, 3, 1)]
    text = json.dumps({t.name: {"shape": t.shape, "data_offsets": [48 * i, 48 * i + 48], "dtype": t.dtype}
                       for i, t in reversed(list(enumerate(shuffled)))} | {"__metadata__": {"format": "pt", "é": "\n"}},
                      indent=1) + " \n  "
    one("file_header_untidy", "A header with spaces, metadata, keys in no order, and data in another order than the "
        "tensor table.", targets, base, [File(0, "", head_of(shuffled, text=text), [t.name for t in shuffled])])

    def sharded(group, **changed):
        """Two shards and their index, as targets; kinds by name in `changed`."""
        halves, files = (targets[:2], targets[2:]), []
        for i, half in enumerate(halves):
            name = f"model-0000{i + 1}-of-00002.safetensors"
            kind = changed.get("heads", 0)
            files.append(File(kind, name, head_of(half, {"format": group}), [t.name for t in half]))
        text = json.dumps({"metadata": {"group": group}, "weight_map": {
            t.name: files[i].name for i, half in enumerate(halves) for t in half}}, indent=2)
        files.append(File(changed.get("map", VERBATIM), "model.safetensors.index.json", text.encode()))
        return files

    def folder(files):
        """The base's folder that has the same heads and maps as `files`."""
        bases = {t.name: t.base for t in targets}
        return {f.name: f.content + b"".join(bases[name] for name in f.order) for f in files}

    base = out.base("valid/sharded", folder(sharded("one")))
    one("files_sharded", "Two shards and their index file, all stored.", targets, base, sharded("two"))
    one("files_sharded_map_of_base", "Two shards stored, and the base's index file.", targets, base,
        sharded("two")[:2] + sharded("one", map=AS_BASE)[2:])
    one("files_sharded_all_of_base", "Two shards with the base's headers, and the base's index file.", targets, base,
        sharded("one", heads=HEADER_OF_BASE, map=AS_BASE))
    one("files_resharded", "The base's two shards become one lone file.", targets, base, lone(targets))
    one("file_map_alone", "A verbatim index file beside one shard with all tensors, sections compressed.", targets,
        base, sorted(lone(targets, "model.safetensors") + sharded("one")[2:], key=lambda f: f.name),
        section_frame=library)


def invalid_vectors(out):
    # Most vectors break one thing in this pair. Records: a 0; b 1 and 2; c 3 and 4 (without changes); d 5.
    rows = {"a": ("F32", [5], bytes_of(pattern(5, 4, 1), 4)), "b": ("BF16", [3, 1400], bytes_of(pattern(4200, 2, 2), 2)),
            "c": ("U8", [4100], bytes_of(pattern(4100, 1, 3), 1))}
    base = out.base("invalid/small", safetensors(rows))

    def small(**options):
        a, b, c = (row[2] for row in rows.values())
        tensors = [Tensor("a", "F32", [5], change(a, "F32", [1, -1], 2), a, codec=RAW),
                   Tensor("b", "BF16", [3, 1400], change(b, "BF16", [1, -1, 40], 599, 5), b, layout=NIBBLE_GAPS),
                   Tensor("c", "U8", [4100], change(c[:4096], "U8", [3], 1999) + c[4096:], c),
                   Tensor("d", "I16", [6], bytes_of([0, 1, 2, 3, 0, 65535], 2), kind=NONE, codec=RAW)]
        model = Model(tensors, lone(tensors), frame=by_hand)
        for key, value in options.items():
            setattr(model, key, value)
        return model

    def bad(name, about, rule, when, *, where=None, chunk=None, model=None, over=base, error=None, **edits):
        return out.invalid(name, about, rule, when, model or small(), over, tensor=where, chunk=chunk, error=error,
                           **edits)

    def index(name, about, rule, where=None, chunk=None, model=None, over=base, **edits):
        return bad(name, about, rule, "open_index", where=where, chunk=chunk, model=model, over=over, **edits)

    def put(attribute, i=None, /, **fields):
        """An edit: set fields of a row of the draft."""
        def edit(draft):
            row = getattr(draft, attribute)
            row = row if i is None else row[i]
            assert fields.keys() <= row.keys()
            row.update(fields)
        return edit

    def replace(attribute, function):
        """An edit: a function of the old value."""
        return lambda draft: setattr(draft, attribute, function(getattr(draft, attribute)))

    def at(i, function):
        """For lists in `replace`: change one element."""
        return lambda values: [function(v) if j == i % len(values) else v for j, v in enumerate(values)]

    def flip(i, bits=1):
        return lambda data: data[:i % len(data)] + bytes([data[i % len(data)] ^ bits]) + data[i % len(data) + 1:]

    # The index file's header.
    index("header_magic", "The first byte has lost its top bit.", "header.magic", header=put("head", magic=b"\x09TPI\r\n\x1a\n"))
    index("header_magic_crlf", "The magic as after a conversion of line ends.", "header.magic",
          header=put("head", magic=b"\x89TPI\n\x1a\n\0"))
    model = small()
    model.tensors[3] = Tensor("d", "I16", [60], bytes_of(range(60), 2), kind=NONE, codec=RAW)
    model.files = lone(model.tensors)
    draft = index("swapped_files", "Index and blob have changed places.", "header.magic", model=model)
    stem = "invalid/swapped_files"
    assert len(draft.blob_file) >= 256
    out.files[stem + ".tpde-index"], out.files[stem + ".tpde-blob"] = draft.blob_file, draft.index_file
    index("header_version_major_2", "Major version 2.", "header.version_major", header=put("head", version_major=2),
          blob_header=put("blob_head", version_major=2))
    index("header_version_major_0", "Major version 0.", "header.version_major", header=put("head", version_major=0),
          blob_header=put("blob_head", version_major=0))

    def big_endian(draft):
        data = struct.pack(">8sHHIQQQQIIII", *draft.head.values()) + b"".join(
            struct.pack(">QQQ", *s.values()) for s in draft.section) + draft.tail
        draft.start = data + struct.pack(">I", zlib.crc32(data))

    index("header_big_endian", "All fields of the header are big-endian.", "header.version_major",
          header_bytes=big_endian)
    index("header_size_252", "header_size 252.", "header.header_size", header=put("head", header_size=252))
    index("header_size_264", "header_size 264.", "header.header_size", header=put("head", header_size=264))
    index("header_crc32", "A bit of the header's CRC is flipped.", "header.crc32", header_bytes=replace("start", flip(255)))
    index("header_crc32_of_flipped_bit", "A bit of an ignored field is flipped; only the CRC shows it.", "header.crc32",
          header_bytes=replace("start", flip(24)))
    index("header_required_features_bit_0", "A required feature that no reader of 1.0 knows.",
          "header.required_features", header=put("head", required_features=1))
    index("header_required_features_bit_63", "The last required feature bit.", "header.required_features",
          header=put("head", required_features=2**63))
    index("header_reserved_60", "The reserved field at 60 is not zero.", "header.reserved", header=put("head", reserved=1))
    index("header_reserved_208", "The first reserved byte at 208 is not zero.", "header.reserved",
          header=replace("tail", flip(0)))
    index("header_reserved_251", "The last reserved byte is not zero.", "header.reserved", header=replace("tail", flip(43, 128)))
    index("header_chunk_count_2_31", "chunk_count 2^31.", "header.chunk_count", header=put("head", chunk_count=2**31))
    index("header_chunk_count_largest", "chunk_count 2^32 - 1, which times 32 overflows 32 bits.", "header.chunk_count",
          header=put("head", chunk_count=2**32 - 1))
    index("header_tensor_count", "tensor_count 2^24 + 1.", "header.tensor_count", header=put("head", tensor_count=2**24 + 1))
    index("header_file_count", "file_count 2^16 + 1.", "header.file_count", header=put("head", file_count=2**16 + 1))
    spare = {"blob_offset": 0, "compressed_size": 0, "uncompressed_size": 0, "num_deltas": 0, "crc32": 0, "output_offset": 0}

    def one_record_more(draft):
        last = draft.record[-1]
        draft.record.append({**spare, "blob_offset": up(last["blob_offset"] + last["compressed_size"], 16)})
        draft.sums.append({"base_sum": 0, "target_sum": 0})

    index("header_chunk_count_one_more", "One record more than the tensors have chunks.", "header.chunk_count",
          records=one_record_more)

    def one_record_less(draft):
        del draft.record[-1], draft.sums[-1]

    model = small()
    model.tensors[3].target = bytes(12)
    index("header_chunk_count_one_less", "One record less than the tensors have chunks.", "header.chunk_count",
          model=model, records=one_record_less)
    index("index_empty", "The index has no bytes.", "header.index_size", index=replace("index_file", lambda data: b""))
    index("index_of_255_bytes", "The index ends within its header.", "header.index_size",
          index=replace("index_file", lambda data: data[:255]))

    def header_alone(draft):
        draft.head["index_size"] = 351
        draft.header_bytes()
        draft.index_file = (draft.start + draft.body)[:351]

    index("index_of_351_bytes", "The index is shorter than any can be, and says so.", "header.index_size",
          index=header_alone)
    index("index_truncated", "The last byte of the index is missing.", "header.index_size",
          index=replace("index_file", lambda data: data[:-1]))
    index("index_truncated_in_records", "The index ends within its records.", "header.index_size",
          index=replace("index_file", lambda data: data[:400]))
    index("index_trailing_byte", "A byte follows the index.", "header.index_size",
          index=replace("index_file", lambda data: data + b"\0"))
    index("index_size_field", "index_size is 8 too large.", "header.index_size",
          header=lambda d: d.head.update(index_size=d.head["index_size"] + 8))
    index("index_gap_before_digest", "Eight zero bytes more before the pair digest, counted in index_size.",
          "header.index_size", sections=replace("body", lambda data: data + bytes(8)))

    # Sections.
    def section(i, key, function):
        return lambda draft: draft.section[i].update({key: function(draft.section[i][key]) % M64})

    def shifted(draft):  # everything after the header 8 bytes later
        draft.body = bytes(8) + draft.body
        for entry in draft.section:
            entry["offset"] += 8

    index("sections_first_offset", "The first section begins at 264, after a gap of zeros.", "header.sections",
          sections=shifted)

    def gap_before_files(draft):
        files = draft.section[4]["offset"] - 256
        draft.body = draft.body[:files] + bytes(8) + draft.body[files:]
        for entry in draft.section[4:]:
            entry["offset"] += 8

    index("sections_gap", "Eight zero bytes too many before the section files.", "header.sections",
          sections=gap_before_files)
    index("sections_overlap", "The section sums begins within the section chunks.", "header.sections",
          sections=section(1, "offset", lambda x: x - 8))
    index("sections_offset_unaligned", "The offset of the section files is not a multiple of 8.", "header.sections",
          sections=section(4, "offset", lambda x: x - 1))
    index("sections_swapped", "The entries of the sections tensors and files have changed places.", "header.sections",
          sections=lambda d: d.section.__setitem__(slice(3, 5), [d.section[4], d.section[3]]))
    index("sections_chunks_expanded_size", "The expanded size of the section chunks is 32 too large.", "header.sections",
          sections=section(0, "expanded_size", lambda x: x + 32))
    index("sections_chunks_stored_size", "The section chunks pretends to be compressed.", "header.sections",
          sections=section(0, "stored_size", lambda x: x - 32))
    index("sections_sums_size", "The section sums is 16 bytes short in both sizes.", "header.sections",
          sections=lambda d: d.section[1].update(stored_size=16 * 5, expanded_size=16 * 5))
    index("sections_digests_size", "The section digests has 32 bytes too many in both sizes.", "header.sections",
          stored=lambda d: (d.store.__setitem__(2, d.store[2] + bytes(32)), d.expanded.__setitem__(2, d.expanded[2] + 32)))
    index("sections_stored_above_expanded", "The stored size of the section tensors is above its expanded one.",
          "header.sections", sections=section(3, "expanded_size", lambda x: x - 1))
    index("sections_size_wraps", "The stored size of the section tensors makes its end wrap to its beginning.",
          "header.sections", sections=lambda d: d.section[3].update(stored_size=M64 - 8, expanded_size=M64 - 8))
    index("sections_align_wraps", "The end of the section tables wraps only once it is aligned.",
          "header.sections", sections=lambda d: d.section[5].update(
              stored_size=M64 - 1 - d.section[5]["offset"], expanded_size=M64 - 1 - d.section[5]["offset"]))
    index("sections_past_the_end", "The section files reaches beyond the file.", "header.sections",
          sections=lambda d: d.section[4].update(stored_size=2**20, expanded_size=2**20))
    index("section_padding_tensors", "A byte of the padding after the section tensors is not zero.", "section.padding",
          sections=lambda d: setattr(d, "body", flip(d.section[4]["offset"] - 256 - 1)(d.body)))

    def padded_last(draft):
        files = draft.section[4]
        assert files["stored_size"] % 8 == 7
        draft.body = flip(files["offset"] - 256 + files["stored_size"])(draft.body)

    model = small()
    model.files[0].name = "x" * 27 + ".safetensors"
    index("section_padding_files", "The padding after the section files, before the empty section tables, is not zero.",
          "section.padding", model=model, sections=padded_last)
    index("index_digest", "A bit of the pair digest is flipped, and the blob quotes it.", "index.digest",
          index=replace("index_file", flip(-1)))
    index("index_digest_of_flipped_sum", "A bit of a chunk's sum is flipped; only the pair digest shows it at opening.",
          "index.digest", index=replace("index_file", flip(256 + 32 * 6 + 3)))
    index("index_digest_truncated_hash", "The pair digest is 16 bytes of the hash and 16 zeros.", "index.digest",
          index=replace("index_file", lambda data: data[:-16] + bytes(16)))

    # Compressed sections.
    def wide(**options):
        model = small(section_frame=by_runs, **options)
        model.tensors[3].name = "d" * 300
        model.files = lone(model.tensors)
        return model

    def stored(i, function):
        return lambda d: d.store.__setitem__(i, function(d.store[i], (d.tensors_section, d.files_section)[i - 3]))

    def frame_case(name, about, function, i=3):
        index(f"section_frame_{name}", f"The section {('tensors', 'files')[i - 3]}: {about}.", "section.frame",
              model=wide(), stored=stored(i, function))

    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
    frame_case("not_zstd", "no zstd magic", lambda f, c: flip(0)(f))
    frame_case("cut_off", "the frame is cut off", lambda f, c: f[:-1])
    frame_case("trailing_byte", "a byte follows the frame", lambda f, c: f + b"\0", 4)
    frame_case("trailing_frame", "an empty frame follows the frame", lambda f, c: f + by_hand(b""))
    frame_case("skippable_after", "a skippable frame follows the frame", lambda f, c: f + skippable)
    frame_case("skippable_before", "a skippable frame precedes the frame", lambda f, c: skippable + f)
    frame_case("dictionary", "the frame names a dictionary", lambda f, c: by_hand(c, runs=True, dictionary=7))
    frame_case("window", "the window is 2^28 bytes", lambda f, c: by_hand(c, runs=True, window=18 << 3))
    frame_case("no_content_size", "the frame states no content size", lambda f, c: by_hand(c, runs=True, size=None), 4)
    frame_case("content_size_low", "the frame states and has one byte less", lambda f, c: by_runs(c[:-1]))
    frame_case("content_size_high", "the frame states and has one byte more", lambda f, c: by_runs(c + b"\0"))
    frame_case("bomb", "the blocks give more than the frame states",
               lambda f, c: by_hand(c + bytes(2**17), runs=True, size=len(c)))
    frame_case("too_little", "the blocks give less than the frame states",
               lambda f, c: by_hand(c[:-1], runs=True, size=len(c)))
    frame_case("checksum", "the content checksum is wrong", lambda f, c: by_hand(c, runs=True, checksum=b"\1\2\3\4"))
    frame_case("empty", "no bytes are stored for a section that is not empty", lambda f, c: b"")
    frame_case("reserved_block", "a block has the reserved kind",
               lambda f, c: reserved_block(f))
    index("limit_section", "The expanded size of the section tensors is 2^40.", "limit", model=wide(),
          stored=lambda d: (d.expanded.__setitem__(3, 2**40),
                            d.store.__setitem__(3, by_hand(d.tensors_section, size=2**40, single=False))))

    # The tensor table.
    index("tensors_size_byte_over", "A byte follows the names.", "tensors.size",
          tensors=replace("tensors_section", lambda data: data + b"\0"))
    index("tensors_size_byte_short", "The last name is cut off.", "tensors.size",
          tensors=replace("tensors_section", lambda data: data[:-1]))
    index("tensors_size_no_room_for_entries", "The section is shorter than its entries.", "tensors.size",
          tensors=replace("tensors_section", lambda data: data[:39]))
    index("tensors_size_empty", "The section is empty, though there are tensors.", "tensors.size",
          tensors=replace("tensors_section", lambda data: b""))
    index("tensors_size_name_size", "name_size reaches beyond the section.", "tensors.size",
          entries=put("entry", 3, name_size=4096))

    def renamed(name, about, rule, value, i=1, **facts):
        model = small()
        model.tensors[i].name = value
        model.files = []
        index(name, about, rule, model=model, **facts)

    renamed("tensor_name_empty", "A tensor without a name.", "tensor.name", b"", 0)
    renamed("tensor_name_long", "A name of 4,097 bytes.", "tensor.name", "b" * 4097)
    renamed("tensor_name_not_utf8", "A name with a lone continuation byte.", "tensor.name", b"b\x80")
    renamed("tensor_name_overlong", "A name with an overlong form of a slash.", "tensor.name", b"b\xc0\xaf")
    renamed("tensor_name_surrogate", "A name with a surrogate in UTF-8.", "tensor.name", b"b\xed\xa0\x80")
    renamed("tensor_name_cut", "A name that ends within a character.", "tensor.name", b"b\xc3")
    renamed("tensor_name_nul", "A name with a NUL.", "tensor.name", b"b\0")
    renamed("tensor_name_order", "The second name is below the first.", "tensor.name_order", "A")
    renamed("tensor_name_twice", "Two tensors of one name.", "tensor.name_order", "a")
    renamed("tensor_name_order_of_bytes", "Names in the order of UTF-16, not of bytes.", "tensor.name_order",
            "\U00010000", 2, entries=lambda d: (d.names.__setitem__(3, "\uffee".encode()),
                                                d.entry[3].update(name_size=3)))

    def based(name, about, value, i=1, size=None):
        model = small()
        model.tensors[i].base_name = value
        index(name, about, "tensor.base_name", where=model.tensors[i].name, model=model)

    based("tensor_base_name_long", "A base name of 4,097 bytes.", "n" * 4097)
    based("tensor_base_name_not_utf8", "A base name that is not UTF-8.", b"\xff")
    based("tensor_base_name_nul", "A base name with a NUL.", b"x\0")
    based("tensor_base_name_equal", "A base name that equals the name.", "b")
    based("tensor_base_name_of_none", "A base name for base kind none.", "x", 3)

    def entry(name, about, rule, i, **fields):
        index(name, about, rule, where="abcd"[i], entries=put("entry", i, **fields))

    entry("tensor_dtype_9", "dtype 9.", "tensor.dtype", 1, dtype=9)
    entry("tensor_dtype_51", "dtype 51.", "tensor.dtype", 1, dtype=51)
    entry("tensor_dtype_private", "A private dtype.", "tensor.dtype", 1, dtype=0x8000)
    index("tensor_rank", "Rank 33, dims all 1.", "tensor.rank", where="d",
          entries=lambda d: (d.entry[3].update(rank=33), d.dims[3].extend([1] * 32)))
    entry("tensor_base_kind_3", "Base kind 3, which is reserved.", "tensor.base_kind", 1, base_kind=3)
    entry("tensor_base_kind_4", "Base kind 4, which is reserved.", "tensor.base_kind", 1, base_kind=4)
    entry("tensor_base_kind_private", "A private base kind.", "tensor.base_kind", 1, base_kind=0x8000)
    entry("tensor_codec_2", "Codec 2, which is reserved.", "tensor.codec", 1, codec=2)
    entry("tensor_codec_private", "A private codec.", "tensor.codec", 1, codec=0x8001)
    entry("tensor_codec_never", "Codec 0xFFFF, which is never assigned.", "tensor.codec", 1, codec=0xFFFF)
    entry("tensor_chunk_lanes_11", "Chunks of 2^11 lanes.", "tensor.chunk_lanes", 3, chunk_lanes_log2=11)
    entry("tensor_chunk_lanes_0", "Chunks of one lane.", "tensor.chunk_lanes", 3, chunk_lanes_log2=0)
    entry("tensor_chunk_lanes_22", "Chunks of 2^22 lanes of 16 bits: 8 MiB.", "tensor.chunk_lanes", 3, chunk_lanes_log2=22)
    entry("tensor_chunk_lanes_64", "Chunks of 2^64 lanes, which a shift may take for 1.", "tensor.chunk_lanes", 3,
          chunk_lanes_log2=64)
    entry("tensor_chunk_lanes_255", "Chunks of 2^255 lanes.", "tensor.chunk_lanes", 3, chunk_lanes_log2=255)
    entry("tensor_reserved_17", "The first reserved byte is not zero.", "tensor.reserved", 1, reserved=b"\1\0\0")
    entry("tensor_reserved_19", "The last reserved byte is not zero.", "tensor.reserved", 1, reserved=b"\0\0\x80")
    index("tensor_tables_size", "A byte of tables for a codec that has none.", "tensor.tables_size", where="b",
          entries=put("entry", 1, tables_size=1), files=replace("tables_section", lambda data: b"\0"))
    index("tensor_tables_size_sum", "The section tables has a byte that no tensor claims.", "tensor.tables_size",
          files=replace("tables_section", lambda data: b"\0"))
    entry("tensor_first_chunk", "first_chunk one too large.", "tensor.first_chunk", 2, first_chunk=4)
    entry("tensor_first_chunk_shared", "Two tensors with the same first chunk.", "tensor.first_chunk", 2, first_chunk=1)
    index("tensor_chunk_count_more", "A tensor with one chunk more than its lanes need.", "tensor.chunk_count", where="d",
          records=one_record_more, entries=put("entry", 3, chunk_count=2))
    index("tensor_chunk_count_less", "A tensor with one chunk less than its lanes need.", "tensor.chunk_count", where="c",
          records=lambda d: (d.record.pop(4), d.sums.pop(4)),
          entries=lambda d: (d.entry[2].update(chunk_count=1), d.entry[3].update(first_chunk=4)))
    entry("tensor_base_param_none", "A parameter for base kind none.", "tensor.base_param", 3, base_param=1)
    entry("tensor_base_param_same", "A parameter for base kind same.", "tensor.base_param", 1, base_param=3)
    entry("tensor_base_param_equal_rows", "Base kind prefix with the target's own number of rows.", "tensor.base_param",
          1, base_kind=PREFIX, base_param=3)
    entry("tensor_base_param_overflow", "Base kind prefix with 2^60 rows of 1,400 lanes.", "tensor.base_param", 1,
          base_kind=PREFIX, base_param=2**60)
    entry("tensor_base_param_wraps", "Base kind prefix with rows whose bits wrap to the target's own.",
          "tensor.base_param", 1, base_kind=PREFIX, base_param=2**57 + 3)
    scalar = Tensor("s", "F32", [], b"\1\0\0\0", b"\0\0\0\0")
    index("tensor_base_param_rank_0", "Base kind prefix for a scalar.", "tensor.base_param", where="s",
          model=Model([scalar], frame=by_hand), over=None, entries=put("entry", 0, base_kind=PREFIX, base_param=5))
    nibbles = Tensor("n", "F4", [2, 3], b"\1\2\3", bytes(6), PREFIX, rows=4)
    index("tensor_base_param_packed", "Base kind prefix for F4 with a base of an odd number of elements.",
          "tensor.base_param", where="n", model=Model([nibbles], frame=by_hand), over=None,
          entries=put("entry", 0, base_param=1))

    def shaped(name, about, dtype, shape, target=b"", count=None):
        model = Model([Tensor("t", dtype, shape, target, kind=NONE)], frame=by_hand)
        index(name, about, "tensor.shape", where="t", model=model, over=None)

    shaped("tensor_shape_2_63_bits", "2^60 bytes: 2^63 bits, one too many.", "U8", [2**60])
    shaped("tensor_shape_wraps", "Dims whose product is 2^64: zero in 64 bits.", "U8", [2**32, 2**32])
    shaped("tensor_shape_wraps_to_one", "Dims whose product is 1 in 64 bits.", "U8",
           [3, 0xAAAAAAAAAAAAAAAB], b"\1")
    shaped("tensor_shape_bits_wrap", "Elements that fit, but not times 64 bits.", "F64", [2**58])
    shaped("tensor_shape_f4_odd", "Three elements of F4.", "F4", [3], b"\1\2")
    shaped("tensor_shape_f6_odd", "Six elements of F6_E2M3: 36 bits.", "F6_E2M3", [6], b"\1\2\3\4\5")

    # Digests of tensors without a base.
    index("digest_none", "A base digest for base kind none.", "digest.none", where="d",
          records=put("digests", 3, base_digest=blake3(bytes(12))[:16]))

    # The file table.
    def filed(files, **options):
        return small(files=files, **options)

    tensors = small().tensors
    shard = lone(tensors, "m.safetensors")[0]
    note = File(VERBATIM, "m.safetensors.index.json", b"{}")
    index("files_size_byte_over", "A byte follows the contents.", "files.size", files=replace("files_section", lambda f: f + b"\0"))
    index("files_size_byte_short", "The last content is cut off.", "files.size", files=replace("files_section", lambda f: f[:-1]))
    index("files_size_empty", "The section is empty, though there are files.", "files.size",
          files=replace("files_section", lambda f: b""))
    index("files_size_of_no_files", "file_count 0 and a section that is not empty.", "files.size", model=filed([]),
          files=replace("files_section", lambda f: bytes(40)))
    index("files_size_content_wraps", "A content_size of 2^64 - 8.", "files.size",
          file_entries=put("file_entry", 0, content_size=M64 - 8))
    index("file_kind", "File kind 4.", "file.kind", file_entries=put("file_entry", 0, kind=4))
    index("file_reserved_2", "The reserved field at 2 is not zero.", "file.reserved", file_entries=put("file_entry", 0, reserved=1))
    index("file_reserved_32", "The reserved field at 32 is not zero.", "file.reserved",
          file_entries=put("file_entry", 0, reserved2=2**63))

    def file_name(name, about, value, kind=0):
        file = lone(tensors, value)[0] if kind == 0 else File(VERBATIM, value, b"{}")
        index(f"file_name_{name}", about, "file.name",
              model=filed([file] if kind == 0 else [shard, file] if raw_name(value) > b"m.s" else [file, shard]))

    file_name("parent", "A name that climbs out of the folder.", "../x.safetensors")
    file_name("slash", "A name with a folder.", "a/x.safetensors")
    file_name("backslash", "A name with a backslash.", "a\\x.safetensors")
    file_name("absolute", "An absolute name.", "/x.safetensors")
    file_name("drive", "A name with a colon.", "C:x.safetensors")
    file_name("hidden", "A name that begins with a dot.", ".x.safetensors")
    file_name("ending", "A name with another ending.", "x.safetensors.sh")
    file_name("only_ending", "A name that is nothing but the ending.", ".safetensors")
    file_name("case_of_ending", "A name with the ending in capitals.", "x.SAFETENSORS")
    file_name("space", "A name with a space.", "x y.safetensors")
    file_name("not_ascii", "A name with a letter beyond ASCII.", "é.safetensors")
    file_name("nul", "A name with a NUL.", "x\0.safetensors")
    file_name("newline", "A name with a line end after the ending.", "x.safetensors\n")
    file_name("long", "A name of 256 characters.", "x" * 244 + ".safetensors")
    file_name("verbatim_of_safetensors", "A verbatim file with the ending of safetensors.", "n.safetensors", VERBATIM)
    index("file_name_header_of_json", "A safetensors file with the ending of an index file.", "file.name",
          model=filed(lone(tensors, "m.safetensors.index.json")))
    index("file_name_empty_of_two", "An empty name beside another file.", "file.name",
          model=filed([lone(tensors, "")[0], note]))
    index("file_name_empty_verbatim", "An empty name of a verbatim file.", "file.name",
          model=filed([File(VERBATIM, "", b"{}")]))
    index("file_name_order", "Names that do not ascend.", "file.name", model=filed([note, shard]))
    halves = [lone(tensors[:2], "m.safetensors")[0], lone(tensors[2:], "m.safetensors")[0]]
    index("file_name_twice", "Two files of one name.", "file.name", model=filed(halves))
    halves = [lone(tensors[:2], "M.safetensors")[0], lone(tensors[2:], "m.safetensors")[0]]
    index("file_name_case", "Two names that differ in case alone.", "file.name", model=filed(halves))
    index("file_content_size", "A header of 7 bytes.", "file.content_size", model=filed([File(0, "", bytes(7))]))
    index("file_content_digest", "The stored header has another digest.", "file.content_digest",
          file_entries=lambda d: d.file_entry[0].update(content_digest=flip(15)(d.file_entry[0]["content_digest"])))
    index("file_content_digest_verbatim", "A stored verbatim file has another digest.", "file.content_digest",
          model=filed([shard, note]), file_entries=put("file_entry", 1, content_digest=blake3(b"{ }")[:16]))

    # Records.
    def record(name, about, rule, chunk, **fields):
        index(name, about, rule, where="abbccd"[chunk], chunk=chunk, records=put("record", chunk, **fields))

    record("record_num_deltas", "More changes than lanes.", "record.num_deltas", 0, num_deltas=6)
    record("record_num_deltas_largest", "2^32 - 1 changes: times 4 they overflow 32 bits.", "record.num_deltas", 3,
           num_deltas=2**32 - 1)
    record("record_num_deltas_of_partial_chunk", "More changes than lanes of the last chunk, fewer than of others.",
           "record.num_deltas", 2, num_deltas=105)
    record("record_empty_num_deltas", "Changes without a payload.", "record.empty", 4, num_deltas=1)
    record("record_empty_uncompressed_size", "A chunk without changes expands to something.", "record.empty", 4,
           uncompressed_size=2)
    record("record_empty_crc32", "A chunk without changes has a CRC.", "record.empty", 4, crc32=1)
    index("record_empty_payload", "A payload without changes.", "record.empty", where="c", chunk=4,
          payloads=lambda d: d.payload.__setitem__(4, b"\1" * 16))
    record("record_sizes_raw_uncompressed", "Codec raw with an expanded size that differs.", "record.sizes", 0,
           uncompressed_size=17)
    index("record_sizes_raw_of_other_num_deltas", "Codec raw with sizes of two changes and a count of three.",
          "record.sizes", where="d", chunk=5, records=put("record", 5, num_deltas=3))
    record("record_sizes_zstd_one", "Codec zstd that expands to one byte.", "record.sizes", 3, uncompressed_size=1)
    record("record_sizes_zstd_zero", "Codec zstd that expands to nothing.", "record.sizes", 3, uncompressed_size=0)
    record("record_sizes_zstd_above", "Codec zstd that expands to one byte more than any layout may take.",
           "record.sizes", 3, uncompressed_size=4 * 4096 + 65)
    record("record_sizes_zstd_of_partial_chunk", "The same for the last chunk of a tensor.", "record.sizes", 2,
           uncompressed_size=5 * 104 + 65)

    def stuffed(draft):  # a frame of many empty blocks
        frame, content = draft.payload[3], draft.content[3]
        spare_blocks = len(content) + len(content) // 64 + 65 - len(frame)
        head = len(frame) - len(content) - 3
        count = -(-spare_blocks // 3)
        draft.payload[3] = frame[:head] + bytes(3 * count) + frame[head:]

    index("record_sizes_compressed", "A payload larger than its bound, padded by empty blocks.", "record.sizes",
          where="c", chunk=3, payloads=stuffed)
    record("record_blob_offset_first", "The first payload begins at 80.", "record.blob_offset", 0, blob_offset=80)
    record("record_blob_offset_header", "The first payload begins in the header.", "record.blob_offset", 0, blob_offset=0)

    def gapped(draft):
        for r in draft.record[3:]:
            r["blob_offset"] += 16
        draft.payload[2] += bytes(16)  # after the record was made: the blob has the gap too

    index("record_blob_offset_gap", "Sixteen zero bytes too many before a payload.", "record.blob_offset", where="c",
          chunk=3, records=gapped)
    index("record_blob_offset_overlap", "A payload that is that of the chunk before.", "record.blob_offset", where="b",
          chunk=2, records=lambda d: d.record[2].update(d.record[1], output_offset=4096))
    record("record_blob_offset_unaligned", "An offset that is not a multiple of 16.", "record.blob_offset", 1, blob_offset=103)
    record("record_blob_offset_wraps", "An offset that wraps once the size is added.", "record.blob_offset", 3,
           blob_offset=M64 - 16)
    record("record_blob_offset_of_empty", "A chunk without changes that does not keep the running offset.",
           "record.blob_offset", 4, blob_offset=0)
    index("record_blob_offset_swapped", "Two records of a tensor have changed places.", "record.blob_offset", where="b",
          chunk=1, model=swappable(rows), records=lambda d: d.record.__setitem__(slice(1, 3), d.record[2:0:-1]))
    record("record_output_offset", "A chunk that begins a lane late.", "record.output_offset", 2, output_offset=4097)
    record("record_output_offset_of_first", "The first chunk of a tensor counts on from the tensor before.",
           "record.output_offset", 1, output_offset=5)
    record("record_output_offset_of_empty", "A chunk without changes that begins elsewhere.", "record.output_offset", 4,
           output_offset=0)
    index("record_sums_none", "A base sum for base kind none.", "record.sums", where="d", chunk=5,
          records=put("sums", 5, base_sum=1))
    index("record_sums_unchanged", "Two different sums for a chunk without changes.", "record.sums", where="c", chunk=4,
          records=put("sums", 4, target_sum=1))
    index("record_blob_size", "Sixteen bytes more of blob than the records imply, in all places.", "record.blob_size",
          header=lambda d: d.head.update(blob_size=d.head["blob_size"] + 16),
          blob=replace("blob_file", lambda data: data + bytes(16)))
    index("record_blob_size_low", "blob_size without the last padding.", "record.blob_size",
          header=lambda d: d.head.update(blob_size=d.head["blob_size"] - 4),
          blob=replace("blob_file", lambda data: data[:-4]))

    # The blob's header.
    def blob(name, about, rule, **edits):
        bad(name, about, rule, "open_blob", **edits)

    blob("blob_truncated", "The last 16 bytes of the blob are missing.", "blob.blob_size",
         blob=replace("blob_file", lambda data: data[:-16]))
    blob("blob_trailing_byte", "A byte follows the blob.", "blob.blob_size", blob=replace("blob_file", lambda data: data + b"\0"))
    blob("blob_empty", "The blob has no bytes.", "blob.blob_size", blob=replace("blob_file", lambda data: b""))
    blob("blob_of_63_bytes", "The blob ends within its header.", "blob.blob_size", blob=replace("blob_file", lambda data: data[:63]))
    blob("blob_magic", "The blob has the magic of an index.", "blob.magic",
         blob_header=put("blob_head", magic=b"\x89TPI\r\n\x1a\n"))
    blob("blob_is_the_index", "The index is given as the blob too.", "blob.magic",
         blob=lambda d: setattr(d, "blob_file", d.index_file))
    blob("blob_is_text", "The blob is some other, longer file.", "blob.magic",
         blob=replace("blob_file", lambda data: b"version https://example.org/\n" * 99))
    blob("blob_version_major", "The blob has major version 2.", "blob.version_major", blob_header=put("blob_head", version_major=2))
    blob("blob_header_size", "The blob's header_size is 256.", "blob.header_size", blob_header=put("blob_head", header_size=256))
    blob("blob_crc32", "A bit of the CRC of the blob's header is flipped.", "blob.crc32", blob=replace("blob_file", flip(60)))
    blob("blob_reserved", "The reserved field of the blob's header is not zero.", "blob.reserved",
         blob_header=put("blob_head", reserved=1))
    blob("blob_version_minor", "The blob has another minor version than the index.", "blob.version_minor",
         blob_header=put("blob_head", version_minor=1))
    blob("blob_size_field", "blob_size of the blob's header is not the length of the file.", "blob.blob_size",
         blob_header=lambda d: d.blob_head.update(blob_size=d.blob_head["blob_size"] - 16))
    blob("blob_pair_digest", "The blob quotes another pair digest.", "blob.pair_digest",
         blob_header=lambda d: d.blob_head.update(pair_digest=flip(31)(d.blob_head["pair_digest"])))
    other = small()
    other.tensors[3].target = bytes_of([0, 1, 2, 3, 0, 65534], 2)
    draft = Draft(other)
    blob("blob_of_another_pair", "The blob belongs to a pair with other changes and the same sizes.",
         "blob.pair_digest", blob=lambda d: setattr(d, "blob_file", draft.blob_file))

    # Payloads. The pair has one tensor of 100 lanes, of which the changed ones are given.
    def decode(name, about, rule, where, chunk, **edits):
        bad(name, about, rule, "decode", where=where, chunk=chunk, **edits)

    decode("payload_crc32", "A bit of a payload is flipped.", "payload.crc32", "b", 1,
           blob=lambda d: setattr(d, "blob_file", flip(d.record[1]["blob_offset"] + 12)(d.blob_file)))
    decode("payload_crc32_field", "A bit of the CRC in a record is flipped.", "payload.crc32", "b", 1,
           records=lambda d: d.record[1].update(crc32=d.record[1]["crc32"] ^ 1))
    decode("payload_crc32_swapped", "Two payloads of the same size have changed places.", "payload.crc32", "b", 1,
           model=swappable(rows), records=lambda d: d.payload.__setitem__(slice(1, 3), d.payload[2:0:-1]))

    def pad(draft):
        end = draft.record[1]["blob_offset"] + draft.record[1]["compressed_size"]
        assert end % 16
        draft.blob_file = flip(end)(draft.blob_file)

    decode("payload_padding", "The first byte of the padding after a payload is not zero.", "payload.padding", "b", 1,
           blob=pad)
    decode("payload_padding_last", "The last byte of the blob is not zero.", "payload.padding", "d", 5,
           blob=replace("blob_file", flip(-1)))

    def payload(name, about, rule, layout, changes, content=None, dtype="U16", frame=None, count=100, **edits):
        """Codec `zstd`, or `raw` where the layout is None; `content` and `frame` are edits of bytes."""
        target = zeros_but(count, DTYPES[dtype][2], changes)
        tensor = Tensor("t", dtype, [count], target, kind=NONE, codec=RAW if layout is None else ZSTD, layout=layout)
        if content:
            edits["contents"] = replace("content", at(0, content))
        if frame:
            edits["payloads"] = lambda d: d.payload.__setitem__(0, frame(d.payload[0], d.content[0]))
        bad(name, about, rule, "decode", where="t", chunk=0, model=Model([tensor], frame=by_hand), over=None, **edits)

    some = {3: 1, 20: 2, 90: 300}  # deltas 2, 4 and 600

    def payload_frame(name, about, function):
        payload(f"payload_frame_{name}", f"A payload: {about}.", "payload.frame", PLANES, some, frame=function)

    payload_frame("not_zstd", "no zstd magic", lambda f, c: flip(3)(f))
    payload_frame("plain", "the content without a frame", lambda f, c: c)
    payload_frame("cut_off", "the frame is cut off", lambda f, c: f[:-1])
    payload_frame("trailing_byte", "a byte follows the frame", lambda f, c: f + b"\0")
    payload_frame("trailing_frame", "an empty frame follows the frame", lambda f, c: f + by_hand(b""))
    payload_frame("two_frames", "two frames, each half the content", lambda f, c: by_hand(c[:100]) + by_hand(c[100:]))
    payload_frame("skippable_before", "a skippable frame precedes the frame", lambda f, c: skippable + f)
    payload_frame("skippable_after", "a skippable frame follows the frame", lambda f, c: f + skippable)
    payload_frame("skippable_alone", "a skippable frame and nothing else", lambda f, c: skippable)
    payload_frame("dictionary", "the frame names a dictionary", lambda f, c: by_hand(c, dictionary=1))
    payload_frame("window", "the window is 2^28 bytes", lambda f, c: by_hand(c, window=18 << 3))
    payload_frame("no_content_size", "the frame states no content size", lambda f, c: by_hand(c, size=None))
    payload_frame("content_size", "the frame states and has one byte more than the record", lambda f, c: by_hand(c + b"\0"))
    payload_frame("bomb", "the blocks give 1.5 MiB more than the frame states",
                  lambda f, c: bomb(c))
    payload_frame("too_little", "the blocks give less than the frame states", lambda f, c: by_hand(c[:-1], size=len(c)))
    payload_frame("checksum", "the content checksum is wrong", lambda f, c: by_hand(c, checksum=b"\1\2\3\4"))
    payload_frame("reserved_bit", "the reserved bit of the frame's header is set", lambda f, c: by_hand(c, reserved_bit=1))
    payload_frame("reserved_block", "a block has the reserved kind", lambda f, c: reserved_block(f))

    def set_byte(i, value):
        return lambda data: data[:i % len(data)] + bytes([value]) + data[i % len(data) + 1:]

    payload("payload_layout_5", "Layout 5.", "payload.layout", PLANES, some, set_byte(0, 5))
    payload("payload_layout_255", "Layout 255.", "payload.layout", PLANES, some, set_byte(0, 255))
    for layout, label in enumerate(LAYOUTS):
        payload(f"payload_size_{label}_over", f"A byte too many, {label}.", "payload.size", layout, some, lambda c: c + b"\0")
        payload(f"payload_size_{label}_short", f"A byte too few, {label}.", "payload.size", layout, some, lambda c: c[:-1])
        payload(f"payload_size_{label}_nearly_empty", f"The layout byte and one more, {label}.", "payload.size", layout,
                some, lambda c: c[:2])
    payload("payload_size_elias_delta_bits", "The rest of the last byte is not zeros.", "payload.size", ELIAS, some,
            flip(-1))
    payload("payload_size_gaps_continued", "The last gap ends in a byte 255.", "payload.size", GAPS, {3: 1, 20: 2},
            set_byte(-1, 255), count=4096)

    # Positions.
    def raw_of(positions, deltas, w=2):
        return lambda content: raw_payload(positions, deltas, w)

    payload("payload_positions_raw_order", "Codec raw, two positions exchanged.", "payload.positions", None, some,
            raw_of([20, 3, 90], [4, 2, 600]))
    payload("payload_positions_raw_twice", "Codec raw, a position twice.", "payload.positions", None, some,
            raw_of([3, 3, 90], [2, 4, 600]))
    payload("payload_positions_raw_past_the_end", "Codec raw, a position past the last lane.", "payload.positions", None,
            some, raw_of([3, 20, 100], [2, 4, 600]))
    payload("payload_positions_raw_largest", "Codec raw, position 2^32 - 1.", "payload.positions", None, some,
            raw_of([3, 20, 2**32 - 1], [2, 4, 600]))
    payload("payload_positions_raw_padding", "Codec raw, padding that is not zero.", "payload.positions", None,
            {1: 1, 2: 2, 3: 3}, flip(15), dtype="U64")

    def gaps_of(layout, gaps, deltas=(2, 4, 600)):
        positions = [sum(gaps[:i + 1]) + i for i in range(len(gaps))]
        return lambda content: encode(layout, positions, list(deltas), 2, max(positions) + 1)

    for layout in (GAPS, ELIAS, NIBBLE_GAPS):
        label = LAYOUTS[layout]
        payload(f"payload_positions_{label}_past_the_end", f"The last position is that after the last lane, {label}.",
                "payload.positions", layout, some, gaps_of(layout, [3, 16, 79]))
        payload(f"payload_positions_{label}_first_past_the_end", f"The first gap is as long as the chunk, {label}.",
                "payload.positions", layout, {3: 1}, gaps_of(layout, [100], [2]))
    payload("payload_positions_elias_delta_long_gap", "A gap above the lanes of the chunk: x = 2^20.",
            "payload.positions", ELIAS, some, gaps_of(ELIAS, [3, 16, 2**20 - 1]))
    payload("payload_positions_elias_delta_long_code", "A code of five zeros: N + 1 of six bits.", "payload.positions",
            ELIAS, {3: 1}, lambda c: c[:3] + packed_bits("00000" + "100000" + "0" * 31))
    payload("payload_positions_elias_delta_zeros", "Zeros where a code should begin, for ever.", "payload.positions",
            ELIAS, {3: 1}, lambda c: c[:3] + bytes(20))
    payload("payload_positions_nibble_planes_past_the_end", "A low nibble of a lane past the last.", "payload.positions",
            NIBBLE_PLANES, {3: 1, 20: 2, 60: 300}, lambda c: set_byte(39, c[39] | 0x01)(c), count=70)
    payload("payload_positions_nibble_planes_high_past_the_end", "A high nibble of a lane past the last.",
            "payload.positions", NIBBLE_PLANES, some, lambda c: set_byte(37, c[37] | 0x10)(c))

    # Deltas.
    payload("payload_deltas_raw_zero", "Codec raw, a delta of zero.", "payload.deltas", None, some,
            raw_of([3, 20, 90], [2, 0, 600]))
    payload("payload_deltas_gaps_zero", "Layout gaps, a delta of zero.", "payload.deltas", GAPS, some,
            gaps_of(GAPS, [3, 16, 69], [2, 0, 600]))
    payload("payload_deltas_elias_delta_zero", "Layout elias-delta, a delta of zero.", "payload.deltas", ELIAS, some,
            gaps_of(ELIAS, [3, 16, 69], [2, 0, 600]))
    payload("payload_deltas_planes_fewer", "Layout planes with a change fewer than the record has.", "payload.deltas",
            PLANES, some, lambda c: encode(PLANES, [3, 90], [2, 600], 2, 100))
    payload("payload_deltas_planes_more", "Layout planes with a change more than the record has.", "payload.deltas",
            PLANES, some, lambda c: encode(PLANES, [3, 20, 21, 90], [2, 4, 1, 600], 2, 100))
    payload("payload_deltas_nibble_planes_fewer", "Layout nibble-planes with a change fewer than the record has.",
            "payload.deltas", NIBBLE_PLANES, some, lambda c: encode(NIBBLE_PLANES, [3, 90], [2, 600], 2, 100))
    payload("payload_deltas_nibble_planes_more", "Layout nibble-planes with a change more than the record has.",
            "payload.deltas", NIBBLE_PLANES, some,
            lambda c: encode(NIBBLE_PLANES, [3, 20, 21, 90], [2, 4, 1, 600], 2, 100))
    tail = lambda value: lambda c: c[:-2] + bytes([value & 255, value >> 8])  # noqa: E731  (the one escaped lane)
    close = {3: 1, 4: 2, 5: 300}  # no gap escapes, so the escaped lane comes last
    payload("payload_deltas_nibble_gaps_2_16", "Layout nibble-gaps, v = 2^16 - 1: the delta 2^16 does not fit.",
            "payload.deltas", NIBBLE_GAPS, close, tail(0xFFFF - 270))
    payload("payload_deltas_nibble_gaps_wraps", "Layout nibble-gaps, v - 270 = 2^16 - 1.", "payload.deltas", NIBBLE_GAPS,
            close, tail(0xFFFF))
    payload("payload_deltas_nibble_planes_2_16", "Layout nibble-planes, z = 2^16 does not fit.", "payload.deltas",
            NIBBLE_PLANES, some, tail(0x10000 - 270))
    payload("payload_deltas_nibble_planes_wraps", "Layout nibble-planes, z - 270 = 2^16 - 1.", "payload.deltas",
            NIBBLE_PLANES, some, tail(0xFFFF))
    payload("payload_deltas_nibble_gaps_w64_wraps", "Layout nibble-gaps, v - 270 = 2^64 - 1 in lanes of 64 bits.",
            "payload.deltas", NIBBLE_GAPS, close, lambda c: c[:-8] + b"\xff" * 8, dtype="U64")
    payload("payload_deltas_nibble_gaps_w8", "Layout nibble-gaps, an escape byte 255 in lanes of 8 bits, with its third "
            "part.", "payload.deltas", NIBBLE_GAPS, {3: 1, 4: 100}, lambda c: c[:-1] + b"\xff\0", dtype="U8")
    payload("payload_deltas_nibble_gaps_w8_240", "Layout nibble-gaps, v = 255 in lanes of 8 bits: the delta 256.",
            "payload.deltas", NIBBLE_GAPS, {3: 1, 4: 100}, set_byte(-1, 240), dtype="U8")
    payload("payload_deltas_nibble_planes_w8", "Layout nibble-planes, an escape byte 255 in lanes of 8 bits, with its "
            "third part.", "payload.deltas", NIBBLE_PLANES, {3: 1, 4: 100}, lambda c: c[:-1] + b"\xff\0", dtype="U8")
    payload("payload_deltas_nibble_planes_w8_241", "Layout nibble-planes, z = 256 in lanes of 8 bits.", "payload.deltas",
            NIBBLE_PLANES, {3: 1, 4: 100}, set_byte(-1, 241), dtype="U8")

    # Sums, and the base.
    decode("chunk_base_sum", "The base sum of a chunk is wrong.", "chunk.base_sum", "b", 2,
           records=lambda d: d.sums[2].update(base_sum=d.sums[2]["base_sum"] ^ 1))
    decode("chunk_base_sum_of_unchanged", "Both sums of a chunk without changes are wrong.", "chunk.base_sum", "c", 4,
           records=put("sums", 4, base_sum=1, target_sum=1))
    decode("chunk_target_sum", "The target sum of a chunk is wrong.", "chunk.target_sum", "b", 2,
           records=lambda d: d.sums[2].update(target_sum=d.sums[2]["target_sum"] ^ 2**63))
    decode("chunk_target_sum_of_delta", "A delta is another than that of which the sums were made.", "chunk.target_sum",
           "d", 5, contents=replace("content", at(5, flip(-2, 2))))

    def rebased(name, about, rule, **changed):
        """Another base file: rows replaced by name, or left out where None."""
        path = out.base(f"invalid/{name}", safetensors({k: v for k, v in (rows | changed.pop("files")).items() if v}))
        bad(name, about, rule, "decode", over=path, **changed)

    late = rows["b"][2]
    rebased("wrong_base", "One lane of the base, in the second chunk of b, is another.", "chunk.base_sum", where="b",
            chunk=2, error="wrong_base", files={"b": ("BF16", [3, 1400], flip(8300)(late))})
    rebased("wrong_base_unchanged_chunk", "One lane of the base, in a chunk without changes, is another.",
            "chunk.base_sum", where="c", chunk=4, error="wrong_base",
            files={"c": ("U8", [4100], flip(4099)(rows["c"][2]))})
    rebased("already_applied", "The base is the target.", "chunk.base_sum", where="a", chunk=0, error="already_applied",
            files={t.name: (t.dtype, t.shape, t.target) for t in small().tensors})
    rebased("base_tensor_missing", "The base has no tensor b.", "base.tensor", where="b", files={"b": None})
    rebased("base_tensor_dtype", "The base's b is F16.", "base.tensor", where="b", files={"b": ("F16", [3, 1400], late)})
    rebased("base_tensor_shape", "The base's b is [1400, 3].", "base.tensor", where="b", files={"b": ("BF16", [1400, 3], late)})
    rebased("base_tensor_rank", "The base's b is [4200].", "base.tensor", where="b", files={"b": ("BF16", [4200], late)})
    bad("base_absent", "No base is given.", "base.tensor", "decode", where="a", over=None)

    # Digests of whole tensors.
    def apply(name, about, rule, **edits):
        bad(name, about, rule, "apply", **edits)

    tall = bytes_of(pattern(50, 2, 4), 2)
    shrunk = lambda: Model([Tensor("p", "I16", [3, 10], change(tall[:60], "I16", [1], 4), tall, PREFIX, rows=5)],  # noqa: E731
                           frame=by_hand)
    path = out.base("invalid/tensor_base_digest_unused_rows", safetensors({"p": ("I16", [5, 10], flip(99)(tall))}))
    apply("tensor_base_digest_unused_rows", "Base kind prefix: the base differs only in rows that no chunk reads.",
          "tensor.base_digest", where="p", error="wrong_base", model=shrunk(), over=path)
    path = out.base("invalid/base_tensor_rows", safetensors({"p": ("I16", [4, 10], tall[:80])}))
    bad("base_tensor_rows", "Base kind prefix: the base has another number of rows.", "base.tensor", "decode", where="p",
        model=shrunk(), over=path)
    apply("tensor_base_digest", "A base digest is wrong, with right sums and roots.", "tensor.base_digest", where="b",
          records=lambda d: d.digests[1].update(base_digest=flip(0)(d.digests[1]["base_digest"])))
    apply("tensor_target_digest", "A target digest is wrong, with right sums and roots.", "tensor.target_digest",
          where="b", records=lambda d: d.digests[1].update(target_digest=flip(15)(d.digests[1]["target_digest"])))
    apply("tensor_target_digest_none", "The same for base kind none.", "tensor.target_digest", where="d",
          records=put("digests", 3, target_digest=bytes(16)))
    empty = Model([Tensor("e", "U8", [0], b"", kind=NONE)], frame=by_hand)
    apply("tensor_target_digest_empty", "An empty tensor with a digest of zeros, not that of no bytes.",
          "tensor.target_digest", where="e", model=empty, over=None, records=put("digests", 0, target_digest=bytes(16)))
    apply("digest_base_root", "The base root is wrong, with right digests.", "digest.base_root",
          records=lambda d: d.roots.update(base_root=flip(0)(d.roots["base_root"])))
    apply("digest_target_root", "The target root is wrong, with right digests.", "digest.target_root",
          records=lambda d: d.roots.update(target_root=flip(31)(d.roots["target_root"])))
    apply("digest_target_root_of_digests", "The target root hashes the 16-byte digests.", "digest.target_root",
          records=lambda d: d.roots.update(target_root=blake3(b"".join(x["target_digest"] for x in d.digests))))
    apply("digest_base_root_without_none", "The base root leaves out the tensor without a base.", "digest.base_root",
          records=lambda d: d.roots.update(base_root=blake3(b"".join(blake3(row[2]) for row in rows.values()))))

    # Rebuilding files.
    apply("base_file_header", "A header said to be the base's, which has another.", "base.file",
          model=filed(lone(tensors, kind=HEADER_OF_BASE)))
    apply("base_file_missing", "A file said to be the base's, which has none of that name.",
          "base.file", model=filed([shard, File(AS_BASE, "m.safetensors.index.json", b"{}")]))

    def headed(name, about, files):
        apply(f"file_tensors_{name}", about, "file.tensors", model=filed(files))

    def head(text=None, **changed):
        """The lone file's header with some entries changed, or all of its text."""
        data = head_of(tensors)
        entries = {k: v | changed.get(k, {}) for k, v in json.loads(data[8:]).items() if changed.get(k, 1) is not None}
        entries |= {k: v for k, v in changed.items() if k not in entries and v is not None}
        return [File(0, "", head_of(tensors, text=text or json.dumps(entries)))]

    ends = json.loads(head_of(tensors)[8:])
    end = ends["d"]["data_offsets"][1]
    headed("unknown", "A header with a tensor that the pair lacks.",
           head(e={"dtype": "U8", "shape": [1], "data_offsets": [end, end + 1]}))
    headed("left_out", "A tensor of the pair that no file has.", lone(tensors[:3]))
    headed("no_file", "Only an index file, so that all tensors are in no file.", [note])
    headed("twice", "A tensor in two files.",
           [lone(tensors, "m.safetensors")[0], lone(tensors[3:], "n.safetensors")[0]])
    headed("dtype", "A header that gives a tensor another dtype of the same size.", head(d={"dtype": "BF16"}))
    headed("shape", "A header that gives a tensor another shape of the same size.", head(d={"shape": [2, 3]}))
    headed("gap", "A header that leaves a gap in the data.",
           head(d={"data_offsets": [end - 12 + 8, end + 8]}))
    headed("overlap", "A header with two tensors in one place.", head(d={"data_offsets": [0, 12]}))
    headed("length", "A header length that is not the rest of the content.",
           [File(0, "", struct.pack("<Q", 1) + head_of(tensors)[8:])])
    headed("not_json", "A header that is not JSON.", head(text=json.dumps(ends)[:-1]))
    headed("key_twice", "A header with one name twice.", head(text=json.dumps(ends)[:-1] + ', "d": '
                                                             + json.dumps(ends["d"]) + "}"))


def reserved_block(frame):
    """The frame with the kind of its last block made 3. All frames here begin with a 4-byte magic."""
    single = frame[4] >> 5 & 1
    at = 5 + (1 - single) + (1 if single and not frame[4] >> 6 else 1 << (frame[4] >> 6) if frame[4] >> 6 else 0)
    return frame[:at] + bytes([frame[at] | 6]) + frame[at + 1:]


def bomb(content):
    """A frame that states the size of `content` and goes on with twelve run blocks of 128 KiB."""
    block = 1 << 17
    head = by_hand(content)[:-len(content) - 3]
    return (head + (len(content) << 3).to_bytes(3, "little") + content
            + ((block << 3 | 2).to_bytes(3, "little") + b"\0") * 11 + (block << 3 | 3).to_bytes(3, "little") + b"\0")


def swappable(rows):
    """A pair whose records 1 and 2 have payloads of the same size, of one tensor."""
    a, b = rows["a"][2], rows["b"][2]
    lanes = lanes_of(b, 2)
    for position, step in ((5, 1), (4096 + 5, 2)):
        lanes[position] = moved(lanes[position], step, 2, True)
    return Model([Tensor("a", "F32", [5], change(a, "F32", [1, -1], 2), a, codec=RAW),
                  Tensor("b", "BF16", [3, 1400], bytes_of(lanes, 2), b, layout=GAPS)], frame=by_hand)


# --- Command line -------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    out = Set(V1 if check else None)
    valid_vectors(out)
    invalid_vectors(out)
    out.files["manifest.json"] = (json.dumps({"version": 1, "vectors": out.manifest}, indent=1, ensure_ascii=True)
                                  + "\n").encode()
    if not check:
        for path, data in out.files.items():
            (V1 / path).parent.mkdir(parents=True, exist_ok=True)
            (V1 / path).write_bytes(data)
    present = {path.relative_to(V1).as_posix() for path in V1.rglob("*") if path.is_file()}
    stray = sorted(present - out.files.keys())
    wrong = sorted(path for path, data in out.files.items() if path not in present or (V1 / path).read_bytes() != data)
    for label, paths in (("not ours", stray), ("differs", wrong)):
        for path in paths:
            print(f"{label}: {path}")
    valid = sum(v["verdict"] == "valid" for v in out.manifest)
    print(f"{valid} valid, {len(out.manifest) - valid} invalid vectors; {len(out.files)} files, "
          f"{sum(map(len, out.files.values()))} bytes")
    return int(bool(stray or wrong))


if __name__ == "__main__":
    sys.exit(main())
