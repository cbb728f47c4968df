#!/usr/bin/env python3
"""Writes the parts of spec/tpde-format.md that follow from the vectors: the annotated dump of a small pair (section 14) and
the index from each rule to its vectors (section 15). Standard library only.

    python3 testdata/spec_tables.py            rewrites them
    python3 testdata/spec_tables.py --check    says whether they are current
"""

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
SPEC = HERE.parent / "spec"
EXAMPLE = "shape_scalar"
MOST = 4  # vectors named for a rule; the manifest has all

HEADER = [(8, "`magic`"), (2, "`version_major` 1"), (2, "`version_minor` 0"), (4, "`header_size` 256"),
          (8, "`required_features`"), (8, "`optional_features`"), (8, "`index_size`"), (8, "`blob_size`"),
          (4, "`chunk_count`"), (4, "`tensor_count`"), (4, "`file_count`"), (4, "reserved")]
SECTIONS = ["chunks", "sums", "digests", "tensors", "files", "tables"]
RECORD = [(8, "`blob_offset`"), (4, "`compressed_size`"), (4, "`uncompressed_size`"), (4, "`num_deltas`"), (4, "`crc32`"),
          (8, "`output_offset`")]
TENSOR = [(4, "`name_size`"), (4, "`base_name_size`"), (2, "`dtype`"), (2, "`rank`"), (2, "`base_kind`"), (2, "`codec`"),
          (1, "`chunk_lanes_log2`"), (3, "reserved"), (4, "`tables_size`"), (4, "`first_chunk`"), (4, "`chunk_count`"),
          (8, "`base_param`")]
FILE = [(2, "`kind`"), (2, "reserved"), (4, "`name_size`"), (8, "`content_size`"), (16, "`content_digest`"), (8, "reserved")]
BLOB = [(8, "`magic`"), (2, "`version_major`"), (2, "`version_minor`"), (4, "`header_size` 64"), (8, "`blob_size`"),
        (32, "`pair_digest`"), (4, "reserved"), (4, "`header_crc32`")]


def rows(data, fields):
    """A row of the table for each field, from the front of `data` on; the fields must fill it."""
    at, out = 0, []
    for size, what in fields:
        text = data[at:at + size].hex(" ").upper()
        if size > 16 and not any(data[at:at + size]):
            text = f"00 × {size}"
        value = int.from_bytes(data[at:at + size], "little")
        plain = what.startswith("`") and not any(word in what for word in ("magic", "crc32", "sum`", " 64", " 256"))
        number = f" = {value:,}" if size <= 8 and plain and value > 9 else ""
        out.append(f"| {at} | `{text}` | {what}{number} |")
        at += size
    assert at == len(data), (at, len(data))
    return out


def dump():
    index = (HERE / f"v1/valid/{EXAMPLE}.tpde-index").read_bytes()
    blob = (HERE / f"v1/valid/{EXAMPLE}.tpde-blob").read_bytes()
    fields, sections = list(HEADER), []
    for i, name in enumerate(SECTIONS):
        entry = index[64 + 24 * i:88 + 24 * i]
        sections.append((name, *(int.from_bytes(entry[8 * k:8 * k + 8], "little") for k in range(3))))
        fields += [(8, f"`{name}`: offset"), (8, f"`{name}`: `stored_size`"), (8, f"`{name}`: `expanded_size`")]
    fields += [(44, "reserved"), (4, "`header_crc32`")]
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
    return (f"The vector `{EXAMPLE}`: a scalar of one lane that changed. `{EXAMPLE}.tpde-index`, {len(index)} bytes:\n\n{head}"
            + "\n".join(rows(index, fields))
            + f"\n\n`{EXAMPLE}.tpde-blob`, {len(blob)} bytes:\n\n{head}" + "\n".join(rows(blob, blob_fields)))


def rule_index(text):
    vectors = {}
    for vector in json.loads((HERE / "v1/manifest.json").read_text())["vectors"]:
        if "rule" in vector:
            vectors.setdefault(vector["rule"], []).append(vector["name"])
    ids = dict.fromkeys(re.findall(r"`((?:[a-z]+)\.[a-z0-9_]+)`", text))
    ids = [rule for rule in ids if rule in vectors]
    lines = []
    for rule in ids:
        names = vectors[rule]
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        lines.append(f"| `{rule}` | " + ", ".join(f"`{name}`" for name in names[:MOST]) + more + " |")
    return "| rule | vectors in `testdata/v1/invalid` |\n|---|---|\n" + "\n".join(lines)


def put(text, mark, body):
    return re.sub(rf"(<!-- {mark} -->\n).*?(\n<!-- end -->)", lambda m: m[1] + body + m[2], text, flags=re.S)


def main():
    path = SPEC / "tpde-format.md"
    old = path.read_text()
    rules_from = re.sub(r"<!-- rules -->.*?<!-- end -->", "", old, flags=re.S) + (SPEC / "codecs.md").read_text()
    new = put(put(old, "dump", dump()), "rules", rule_index(rules_from))
    if sys.argv[1:] == ["--check"]:
        if new != old:
            sys.exit("spec/tpde-format.md is not current: run testdata/spec_tables.py")
        print("sections 14 and 15 of spec/tpde-format.md are current")
        return
    path.write_text(new)


main()
