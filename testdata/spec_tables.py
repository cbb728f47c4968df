#!/usr/bin/env python3
"""Writes annotated.md, the examples and tables of spec/ that follow from the vectors: of tpde-format.md the annotated dump of
two small pairs (section 14) and the index from each rule to its vectors (section 15.2), of codecs.md the worked examples (section
5).

    python3 testdata/spec_tables.py            rewrites it
    python3 testdata/spec_tables.py --check    says whether it is current, and whether each rule is a MUST with a step
"""

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
SPEC = HERE.parent / "spec"
sys.path.insert(0, str(HERE))  # for versions.py, in this folder
import versions  # noqa: E402

FOLDERS = {name: versions.folder(name) for name in versions.names()}
EXAMPLE = "shape_scalar"
PARTS_EXAMPLE = "parts_example"
WALKTHROUGH = "conditioned_walkthrough"
MOST = 4  # vectors listed per rule; the manifest has all

#: Bytes of payloads that SMALL and ONE_STATE quote. Of codec `zstd` the content, which the frames store as it is.
QUOTED = {
    "raw_example": "03000000 14000000 2C010000 0200 0100 9001",
    "zstd_gaps_example": "01 020190 000001 03 10 FF18",
    "zstd_elias_delta_example": "02 020190 000001 614448C0",
    "zstd_nibble_gaps_example": "03 13 0F FF FF 81 00 01 FF09",
    "conditioned_example": "00 00 00 00 7F00 02 00 01000000 00000000 01 03000000 0500 00 C23EAC00 1080",
}
SMALL = """BF16, so *w* = 2; *L* = 4,096; lanes 3, 20 and 300 change by +1, −1 and +200 ULP: deltas 2, 1, 400. The vectors are `raw_example` and `zstd_*_example`.

- `raw`, 18 bytes: `03000000 14000000 2C010000 0200 0100 9001`.
- `zstd`, layout `gaps`: gaps 3, 16, 279. Content `01`, planes `02 01 90` and `00 00 01`, gaps `03`, `10`, `FF 18`: 11 bytes.
- layout `elias-delta`: *y* = 4, 17, 280 have *j* = 2, 4, 8: `0 11 00`, `00 101 0001`, `000 1001 00011000`. Content `02`, the planes, `61 44 48 C0`.
- layout `nibble-gaps`: *q* = 1, 0, 399: tokens `13`, `0F`, `FF`; escape `FF` (399 − 15 is above 255); planes of 399 − 270 = 129: `81`, `00`; continued gaps 16 − 15 = 1: `01`; 279 − 15 = 264: `FF 09`. Content `03 13 0F FF FF 81 00 01 FF 09`."""
ONE_STATE = """The vector `conditioned_example`: BF16, *L* = 5, base lanes `3F80`, `3C01`, `3F85`, `4100`, `BFFF`; lanes 0, 2, 3 and 4 change by +1, +40, −3 and −1 ULP: deltas 2, 80, 5, 1.

- Tables: *K* = 1, frequencies 3,072, 512, 511 and 1 of the tokens 0, 1, 2 and 64, whose `cum` are 0, 3,072, 3,584 and 4,095: `0000`, `01`, `41`, `8018 8004 FF03`, 61 bytes `00`, `01`.
- Contexts: 127, 120, 127, 130, 127. With `first_context` 127, lane 1 counts as context 127. The map is (1, 0), so lane 3, whose *i* is 3, is not coded, and its delta is an exception. The coded lanes 0, 1, 2 and 4 have the values 2, 0, 80 and 1; 80 = (2 + 0)·2^5 + 16 is token 64 and the extra bits 16.
- Payload, 30 bytes: header `00 00 00 00 7F00 02 00 01000000 00000000`, map `01`, exception `03000000 0500`, padding `00` (the pieces before have 23 bytes), state `C23EAC00`, word `1080`.

| lane | *x* | mod 4,096 | token | then *x* is |
|---|---|---|---|---|
| 0 | 11,288,258 | 3,778 | 2 | 511·2,755 + 3,778 − 3,584 = 1,407,999 |
| 1 | 1,407,999 | 3,071 | 0 | 3,072·343 + 3,071 − 0 = 1,056,767 |
| 2 | 1,056,767 | 4,095 | 64 | 1·257 + 4,095 − 4,095 = 257, below 2^16: 2^16·257 + 32,784 = 16,875,536 |
| 2 | 16,875,536 | | | extra bits 16,875,536 mod 2^5 = 16; ⌊16,875,536 / 2^5⌋ = 527,360 |
| 4 | 527,360 | 3,072 | 1 | 512·128 + 3,072 − 3,072 = 65,536 = 2^16 |"""

HEADER = [
    (8, "`magic`"),
    (2, "`version_major` 1"),
    (2, "`version_minor` 0"),
    (4, "`header_size` 256"),
    (8, "`required_features`"),
    (8, "`optional_features`"),
    (8, "`index_size`"),
    (8, "`blob_size`"),
    (4, "`chunk_count`"),
    (4, "`tensor_count`"),
    (4, "`file_count`"),
    (4, "reserved"),
]
SECTIONS = ["chunks", "sums", "digests", "tensors", "files", "tables"]
RECORD = [
    (8, "`blob_offset`"),
    (4, "`compressed_size`"),
    (4, "`uncompressed_size`"),
    (4, "`num_deltas`"),
    (4, "`crc32`"),
    (8, "`output_offset`"),
]
TENSOR = [
    (4, "`name_size`"),
    (4, "`base_name_size`"),
    (2, "`dtype`"),
    (2, "`rank`"),
    (2, "`base_kind`"),
    (2, "`codec`"),
    (1, "`chunk_lanes_log2`"),
    (1, "`part`"),
    (2, "reserved"),
    (4, "`tables_size`"),
    (4, "`first_chunk`"),
    (4, "`chunk_count`"),
    (8, "`base_param`"),
]
FILE = [(2, "`kind`"), (2, "reserved"), (4, "`name_size`"), (8, "`content_size`"), (16, "`content_digest`"), (8, "reserved")]
BLOB = [
    (8, "`magic`"),
    (2, "`version_major`"),
    (2, "`version_minor`"),
    (4, "`header_size` 64"),
    (8, "`blob_size`"),
    (32, "`pair_digest`"),
    (4, "reserved"),
    (4, "`header_crc32`"),
]


def rows(data, fields, start=0):
    """One table row per field, from the start of `data`. The fields must cover all of it."""
    at, out = 0, []
    for size, what in fields:
        text = data[at : at + size].hex(" ").upper()
        if size > 16 and not any(data[at : at + size]):
            text = f"00 × {size}"
        value = int.from_bytes(data[at : at + size], "little")
        plain = "`" in what and not any(word in what for word in ("magic", "crc32", "sum`", " 64", " 256"))
        number = f" = {value:,}" if size <= 8 and plain and value > 9 else ""
        out.append(f"| {start + at} | `{text}` | {what}{number} |")
        at += size
    assert at == len(data), (at, len(data))
    return out


def dump():
    index = (FOLDERS["v1"] / f"valid/{EXAMPLE}.tpde-index").read_bytes()
    blob = (FOLDERS["v1"] / f"valid/{EXAMPLE}.tpde-blob").read_bytes()
    fields, sections = list(HEADER), []
    for i, name in enumerate(SECTIONS):
        entry = index[64 + 24 * i : 88 + 24 * i]
        sections.append((name, *(int.from_bytes(entry[8 * k : 8 * k + 8], "little") for k in range(3))))
        fields += [(8, f"`{name}`: offset"), (8, f"`{name}`: `stored_size`"), (8, f"`{name}`: `expanded_size`")]
    fields += [(32, "`payload_root`, reserved without feature `digests`"), (12, "reserved"), (4, "`header_crc32`")]
    end = 256
    for name, offset, stored, expanded in sections:
        fields += [(offset - end, "padding")] if offset > end else []
        body = {
            "chunks": RECORD,
            "sums": [(8, "`base_sum`"), (8, "`target_sum`")],
            "digests": [(32, "`base_root`"), (32, "`target_root`"), (16, "`base_digest`"), (16, "`target_digest`")],
            "tensors": TENSOR,
            "files": FILE,
        }.get(name, [])
        if stored != expanded:
            body = [(stored, f"`{name}`, one zstd frame")]
        rest = stored - sum(size for size, _ in body)
        fields += body + ([(rest, f"{name}: names" if name == "tensors" else "files: content")] if rest else [])
        end = offset + stored
    fields += [(len(index) - 32 - end, "padding")] if len(index) - 32 > end else []
    fields += [(32, "pair digest")]
    payload = int.from_bytes(index[264:268], "little")
    blob_fields = BLOB + [(payload, "payload of chunk 0"), (len(blob) - 64 - payload, "padding")]
    head = "| offset | bytes | |\n|---|---|---|\n"
    return (
        f"The vector `{EXAMPLE}`: a scalar of one lane that changed. `{EXAMPLE}.tpde-index`, {len(index)} bytes:\n\n{head}"
        + "\n".join(rows(index, fields))
        + f"\n\n`{EXAMPLE}.tpde-blob`, {len(blob)} bytes:\n\n{head}"
        + "\n".join(rows(blob, blob_fields))
    )


def dump_of_parts():
    """What features add to an index: rows of the header that differ, and all sections with bytes."""
    index = (FOLDERS["v1.2"] / f"valid/{PARTS_EXAMPLE}.tpde-index").read_bytes()
    sections = [[number(index, 64 + 24 * i + 8 * k, 8) for k in range(3)] for i in range(len(SECTIONS))]
    (chunks, _, _), (sums, _, _), (digests, _, _), (tensors, size, _), (_, no_files, _), (_, no_tables, _) = sections
    assert not no_files and not no_tables
    entry = [(size, text) for size, text in TENSOR]
    dims = [(8, f"{what}, dim {i}") for what in ("shape", "origin", "extent") for i in range(2)]
    parts = [
        (10, [(2, "`version_minor`")]),
        (16, [(8, "`required_features`: `digests`, `payload_list`, `parts`")]),
        (48, HEADER[8:11]),
        (208, [(32, "`payload_root`"), (12, "reserved")]),
        (chunks, [(n, f"record {i}: {what}") for i in range(2) for n, what in RECORD]),
        (sums, [(8, f"{what} of chunk {i}") for i in range(2) for what in ("`base_sum`", "`target_sum`")]),
        (sums + 32, [(16, "payload list: chunk 0, which has no payload"), (16, "payload list: chunk 1")]),
        (digests, [(32, "`base_root`"), (32, "`target_root`")]),
        (digests + 64, [(16, f"`{what}_digest` of entry {i}") for i in range(2) for what in ("base", "target")]),
        (tensors, [(n, f"entry 0: {what}") for n, what in entry] + [(n, f"entry 1: {what}") for n, what in entry]),
        (tensors + 80, [(n, f"entry 0: {what}") for n, what in dims] + [(n, f"entry 1: {what}") for n, what in dims[2:]]),
        (tensors + 160, [(1, "name of entry 0")]),
        (len(index) - 32, [(32, "pair digest")]),
    ]
    assert size == 161
    lines = [line for at, fields in parts for line in rows(index[at : at + sum(n for n, _ in fields)], fields, at)]
    return (
        f"The vector `{PARTS_EXAMPLE}`: a tensor of dtype U8, shape [2, 3] and base kind `none`, in two parts. The first part is the first "
        "column and has no change. The second part is the other two columns; element [1, 1] of the tensor is 5, all others are 0. These are the "
        f"rows of `{PARTS_EXAMPLE}.tpde-index`, {len(index)} bytes, that features and parts concern:\n\n| offset | bytes | |\n|---|---|---|\n"
        + "\n".join(lines)
    )


def number(data, at, size):
    return int.from_bytes(data[at : at + size], "little")


class Walk:
    """Codec `conditioned` on one chunk of lanes of I64, section 4 of codecs.md step by step, and rows of tables about it."""

    W, TILE, CONTEXTS_OF_BLOCK = 8, 256, 128

    def __init__(self, name):
        index, blob, base = (
            (FOLDERS["v1"] / f"valid/{name}{ending}").read_bytes() for ending in (".tpde-index", ".tpde-blob", ".base.safetensors")
        )
        self.payload = blob[number(index, 256, 8) :][: number(index, 264, 4)]
        start = 8 + number(base, 0, 8)
        self.base = [number(base, at, 8) for at in range(start, len(base), 8)]
        self.tables = index[number(index, 64 + 5 * 24, 8) :][: number(index, 64 + 5 * 24 + 8, 8)]
        self.classes, at = [], 3
        for _ in range(self.tables[2]):
            count, at, row = self.tables[at], at + 1, []
            for _ in range(count):
                f, at = self.tables[at], at + 1
                if f > 127:
                    f, at = f - 128 + 128 * self.tables[at], at + 1
                row.append(f)
            self.classes.append(row)
        self.at, self.parts, self.codings, self.turns, self.values = 0, [], [], [], {}
        self.take_parts()

    def take(self, size, what):
        data = self.payload[self.at : self.at + size]
        text = re.sub(r"(?: 00){8,}", lambda zeros: f" (00 × {len(zeros[0]) // 3})", " " + data.hex(" ").upper()).strip()
        self.parts += [f"| {self.at} | `{text}` | {what} |"] if size else []
        self.at += size
        return data

    def take_parts(self):
        lanes, h = len(self.base), self.payload[:16]
        self.low, self.states, self.segments, bits = h[0], 1 << h[1], 1 << h[2], h[3]
        self.first, self.contexts, self.center, exceptions = number(h, 4, 2), h[6], number(h, 12, 4), number(h, 8, 4)
        self.take(
            16,
            f"header: `low_bits` {self.low}, `states_log2` {h[1]}, `segments_log2` {h[2]}, `activity_bits` {bits}, "
            f"`first_context` {self.first}, `context_count` {self.contexts}, `exception_count` {exceptions}, `center` {self.center}",
        )
        self.maps = []
        for a in range(1 << bits):
            packed = self.take(-(-self.contexts // 2), f"map {a}")
            self.maps.append([packed[i // 2] >> 4 * (i % 2) & 15 for i in range(self.contexts)])
        blocks = -(-lanes // self.CONTEXTS_OF_BLOCK)
        packed = int.from_bytes(self.take(-(-blocks * bits // 8), f"activities of {blocks} blocks"), "little")
        self.activities = [packed >> bits * i & (1 << bits) - 1 for i in range(blocks)]
        positions = self.take(4 * exceptions, "positions of exceptions")
        deltas = self.take(self.W * exceptions, "their deltas")
        self.exceptions = {number(positions, 4 * i, 4): number(deltas, 8 * i, 8) for i in range(exceptions)}
        packed = int.from_bytes(self.take(-(-lanes * self.low // 8), f"{self.low} low bits for each of {lanes} lanes"), "little")
        self.lows = [packed >> self.low * i & (1 << self.low) - 1 for i in range(lanes)]
        sizes = self.take(4 * (self.segments - 1), "words of stream 0, states included")
        self.take(self.at % 2, "padding") if self.at % 2 else None
        ends = [2 * number(sizes, 4 * s, 4) for s in range(self.segments - 1)]
        for s in range(self.segments):
            size = ends[s] if s < len(ends) else len(self.payload) - self.at
            self.stream(
                s, self.take(4 * self.states, f"stream {s}: states"), self.take(size - 4 * self.states, f"stream {s}: words")
            )
        assert self.at == len(self.payload)

    def class_of(self, lane):
        u, a = self.base[lane], self.activities[lane // self.CONTEXTS_OF_BLOCK]
        c = ((1 << 64) - 1 - u if u >> 63 else u).bit_length()
        i = max(c, self.first) - self.first
        return c, a, i, self.maps[a][i] if i < self.contexts else 0

    def stream(self, s, states, words):
        x = [number(states, 4 * k, 4) for k in range(self.states)]
        words = iter([number(words, i, 2) for i in range(0, len(words), 2)])
        tiles = -(-len(self.base) // self.TILE)

        def turn(k, lane, now, what):
            before, x[k] = x[k], now
            if now < 1 << 16:
                word = next(words)
                x[k] = now << 16 | word
                what += f"; {now:,} is below 2^16, word `{word:04X}`"
            self.turns.append(f"| {s} | {lane} | {k} | {before:,} | {what} | {x[k]:,}{' = 2^16' * (x[k] == 1 << 16)} |")

        for q in range(s * tiles // self.segments, (s + 1) * tiles // self.segments):
            coded = [lane for lane in range(q * self.TILE, min((q + 1) * self.TILE, len(self.base))) if self.class_of(lane)[3]]
            for lane in coded:
                c, a, i, row = self.class_of(lane)
                self.codings.append(f"| {lane} | {self.base[lane]} | {c} | {a} | {i} | {row} |")
            for j in range(0, len(coded), self.states):
                step, left, done = list(enumerate(coded[j : j + self.states])), {}, {}
                for k, lane in step:
                    f = self.classes[self.class_of(lane)[3] - 1]
                    residue, t = x[k] % 4096, 0
                    while residue >= sum(f[: t + 1]):
                        t += 1
                    left[k], done[k] = (t - 64) // 2 + 5 if t > 63 else 0, 0
                    self.values[lane] = t if t < 64 else (2 + t % 2) << left[k]
                    turn(k, lane, f[t] * (x[k] // 4096) + residue - sum(f[:t]), f"mod 4,096 = {residue:,}: token {t}")
                while any(left.values()):
                    for k, lane in step:
                        if m := min(left[k], 16):
                            extra = x[k] % (1 << m)
                            self.values[lane] += extra << done[k]
                            left[k], done[k] = left[k] - m, done[k] + m
                            turn(k, lane, x[k] >> m, f"{m} extra bits = {extra:,}")
        assert all(state == 1 << 16 for state in x) and next(words, None) is None

    def deltas(self):
        rows, size = [], 1 << 64 - self.low
        for lane in sorted(set(self.values) | set(self.exceptions) | {i for i, low in enumerate(self.lows) if low}):
            v, low = self.values.get(lane), self.lows[lane]
            high = 0 if v is None else (self.center - v) % size
            delta = (high << self.low) + low
            shown = f"2^62 − {size - high:,}" if high > size // 2 else f"{high:,}"
            what = "not coded" if v is None else f"{v:,}"
            if lane in self.exceptions:
                assert delta == 0
                delta, what = self.exceptions[lane], "not coded, exception"
            rows.append(f"| {lane} | {what} | {shown} | {low} | {f'2^64 − {2**64 - delta:,}' if delta >> 63 else f'{delta:,}'} |")
        return rows


def walkthrough():
    walk = Walk(WALKTHROUGH)
    classes = "\n".join(
        f"| {i + 1} | " + "; ".join(f"{t}: {f:,}" for t, f in enumerate(row) if f) + " |" for i, row in enumerate(walk.classes)
    )
    lanes, states, segments = len(walk.base), walk.states, walk.segments
    return (
        f"The vector `{WALKTHROUGH}`: I64, so *w* = 8, and a tile has 256 lanes; *L* = {lanes}, so there are 3 blocks and 2 tiles. It has "
        f"*N* = {states} states, *S* = {segments} segments, *A* = {len(walk.maps)} maps and *r* = {walk.low} low bits. "
        f"All lanes that are not in the table of coded lanes have the base lane 2^20, whose context, 21, is beyond the map.\n\nTables, {len(walk.tables)} bytes:\n\n| class | frequency of each token |\n|---|---|\n{classes}\n\n"
        f"Payload, {len(walk.payload)} bytes:\n\n| at | bytes | piece |\n|---|---|---|\n"
        + "\n".join(walk.parts)
        + "\n\nCoded lanes. The first one's context is below `first_context` and counts as that:\n\n"
        "| lane | base lane | context | activity | *i* | class |\n|---|---|---|---|---|---|\n"
        + "\n".join(walk.codings)
        + "\n\nTurns, in their order. The second step of segment 0 has one lane. In segment 1 the first step has rounds of extra bits for lane 257 "
        "alone:\n\n| segment | lane | state | *x* | turn | then *x* is |\n|---|---|---|---|---|---|\n"
        + "\n".join(walk.turns)
        + f"\n\nDeltas. high is ({walk.center} − *v*) mod 2^62:\n\n| lane | *v* | high | low bits | delta |\n|---|---|---|---|---|\n"
        + "\n".join(walk.deltas())
    )


def rule_index(text):
    vectors = {}
    for folder in FOLDERS.values():
        for vector in json.loads((folder / "manifest.json").read_text())["vectors"]:
            if "rule" in vector:
                vectors.setdefault(vector["rule"], []).append(vector["name"])
    ids = [rule for rule in ids_of(text) if rule in vectors] + ["limit"]
    lines = []
    for rule in ids:
        names = vectors[rule]
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        lines.append(f"| `{rule}` | " + ", ".join(f"`{name}`" for name in names[:MOST]) + more + " |")
    return "| rule | vectors, in the folders `invalid` of all versions |\n|---|---|\n" + "\n".join(lines)


def ids_of(text):
    """The ids of rules in a text, in its order."""
    return list(
        dict.fromkeys(
            re.findall(r"`((?:header|section|index|record|chunk|digest|tensors?|files?|base|blob|payload)\.[a-z0-9_]+)`", text)
        )
    )


def faults(text, codecs):
    """Omissions in the texts: a requirement without a key word, a rule without a step in section 13.1, a step without a rule."""
    requirements, _, rest = text.partition("\n## 13. ")
    steps = rest[rest.index("### 13.1") : rest.index("### 13.2")]
    requirements += codecs[: codecs.index("### 4.7")]
    stated = set()
    for paragraph in re.split(r"\n\n|\n(?=[-|0-9])", requirements[requirements.index("\n## 5. ") :]):
        if ids_of(paragraph) and not paragraph.lstrip().startswith("|"):
            if not re.search(r"\bMUST\b|A violation", paragraph):
                yield f"no MUST: {paragraph.strip()[:100]}"
        stated |= set(ids_of(paragraph))
    in_steps = set(ids_of(steps))
    yield from (f"`{rule}` has no step in section 13.1" for rule in sorted(stated - in_steps))
    yield from (f"`{rule}` has a step in section 13.1 and is stated nowhere" for rule in sorted(in_steps - stated))


def check_quoted():
    for name, text in QUOTED.items():
        index, blob = ((FOLDERS["v1"] / f"valid/{name}.tpde-{ending}").read_bytes() for ending in ("index", "blob"))
        payload = blob[64 : 64 + number(index, 264, 4)]
        # A frame of one raw block: magic, descriptor, content size of one byte, header of the block.
        assert bytes.fromhex(text) == (payload[9:] if name.startswith("zstd") else payload), name


def annotated(rules_from):
    check_quoted()
    return f"""# Annotated vectors

`testdata/spec_tables.py` writes this file from the vectors. It is not normative.

## Two small pairs

Section 14 of the [format](../spec/tpde-format.md).

{dump()}

{dump_of_parts()}

Bytes in the next three sections are in hexadecimal.

## `raw` and `zstd`

Section 5.1 of the [codecs](../spec/codecs.md).

{SMALL}

## `conditioned` with one state

Section 5.2 of the [codecs](../spec/codecs.md).

{ONE_STATE}

## `conditioned` with states, segments, activities and low bits

Section 5.3 of the [codecs](../spec/codecs.md).

{walkthrough()}

## From each rule to its vectors

Section 15.2 of the [format](../spec/tpde-format.md). The table names up to {MOST} vectors per rule and counts the others.

{rule_index(rules_from)}
"""


def main():
    container, codecs = ((SPEC / name).read_text() for name in ("tpde-format.md", "codecs.md"))
    if found := list(faults(container, codecs)):
        sys.exit("\n".join(found))
    path, text = HERE / "annotated.md", annotated(container + codecs)
    if sys.argv[1:] == ["--check"]:
        if not path.exists() or text != path.read_text():
            sys.exit("testdata/annotated.md is not current: run testdata/spec_tables.py")
        print("testdata/annotated.md is current, and each rule is stated and has a step")
        return
    path.write_text(text)


main()
