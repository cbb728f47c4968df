#!/usr/bin/env python3
"""Writes fuzz/seeds/ from the published vectors: python3 fuzz/make_seeds.py

Needs `zstandard`, for the second reader. Sections and payloads are expanded, because mutation gets nowhere inside a frame.
"""

import json
import shutil
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "testdata"))
import reader  # noqa: E402

SEEDS = ROOT / "fuzz" / "seeds"
VECTORS = ROOT / "testdata" / "v1"
DTYPES = list(reader.DTYPES)  # in the order of the crate's list


def save(target, name, data):
    folder = SEEDS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def expanded(index):
    """The index with its sections as they are; the targets put offsets, length, CRC and digest right."""
    out = bytearray(index[:256])
    for i in range(6):
        offset, stored, size = reader.SECTION_ENTRY.unpack_from(index, 64 + 24 * i)
        data = index[offset:offset + stored]
        if stored < size:
            data = reader.expand(data, size, "section.frame")
        out += bytes(-len(out) % 8)
        reader.SECTION_ENTRY.pack_into(out, 64 + 24 * i, len(out), size, size)
        out += data
    return bytes(out) + bytes(-len(out) % 8) + index[-32:]


def main():
    shutil.rmtree(SEEDS, ignore_errors=True)
    for vector in json.loads((VECTORS / "manifest.json").read_text())["vectors"]:
        name, valid = vector["name"], vector["verdict"] == "valid"
        index, blob = ((VECTORS / vector[part]).read_bytes() for part in ("index", "blob"))
        if not valid:
            if vector["when"] == "open_index" and vector["rule"].split(".")[0] in ("tensor", "file", "section") and len(index) < 1000:
                save("open_index", name, b"\x01" + index)
            continue
        opened = reader.open_index(index)
        plain = expanded(index)
        if len(plain) <= 1500 and not name.startswith(("lanes_", "size_")):
            save("open_index", name, b"\x00" + plain)
        if len(plain) + len(blob) <= 2500:
            save("apply_pair", name, b"\x00" + struct.pack("<H", len(plain)) + plain + blob)
        for i, file in enumerate(opened.files):
            content = file.content if file.content is not None else b""
            if file.entry.kind == 0:
                data = max((o for t in json.loads(content[8:]).values() for o in t.get("data_offsets", [0])), default=0)
                save("safetensors_header", f"{name}_{i}", b"\x02" + struct.pack("<H", data % 65536) + content[8:])
            elif file.entry.kind == 2:
                save("safetensors_header", f"{name}_{i}", b"\x01" + content)
        for tensor in opened.tensors[:3]:
            first = tensor.entry.first_chunk
            for record in opened.records[first:first + min(1, tensor.entry.chunk_count)]:
                lanes = min(tensor.lanes, 1 << tensor.entry.chunk_lanes_log2)
                payload = blob[record.blob_offset:record.blob_offset + record.compressed_size]
                if not payload or lanes > 4200:
                    continue
                head = struct.pack("<BHHBB", DTYPES.index(tensor.entry.dtype), lanes - 1, record.num_deltas - 1, 0, 0)
                chunk = f"{name}_{first}"
                if tensor.entry.codec == reader.RAW:
                    save("decode_raw", chunk, head + payload)
                    continue
                content = reader.expand(payload, record.uncompressed_size, "payload.frame")
                if len(content) <= 4200:
                    save("decode_zstd", chunk, head[:-1] + b"\x01" + content)
                if "frame" in name or "example" in name:
                    save("decode_zstd", chunk + "_frame", head + struct.pack("<H", record.uncompressed_size) + payload)
    index = {"metadata": {"total_size": 4}, "weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    save("safetensors_header", "shard_index", b"\x01" + json.dumps(index).encode())
    for i, pattern in enumerate([bytes(40), bytes(range(160)), b"\xa5\x01\x7f" * 80]):
        save("roundtrip", f"pattern_{i}", pattern)


if __name__ == "__main__":
    main()
