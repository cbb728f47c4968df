#!/usr/bin/env python3
"""Writes fuzz/seeds/ from the published vectors and from pairs of our encoder. fuzz/run.sh calls it before each run.

    $(scripts/environment) fuzz/make_seeds.py

Needs `zstandard`, for the second reader, and cargo, for the encoder. Sections and payloads are expanded, because mutations of a
frame are nearly always refused. All files are replaced, so an input that fuzzing finds becomes a test or a vector.
"""

import json
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "testdata"))
import reader  # noqa: E402
from reader.layout import Record, TensorEntry  # noqa: E402
import versions  # noqa: E402

SEEDS = ROOT / "fuzz" / "seeds"
VECTORS = [versions.folder(name) for name in versions.names()]
DTYPES = list(reader.DTYPES)  # in the order of the crate's list
BF16, F32, I8, F8_E4M3 = 17, 18, 2, 32
CONDITIONED = 2
MOST_LANES = 4200  # of a chunk that a target decodes
SAVED_TABLES = set()


def save(target, name, data):
    folder = SEEDS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def expanded(index):
    """The index with its sections as they are; the targets put offsets, length, CRC and digest right."""
    out = bytearray(index[:256])
    for i in range(6):
        offset, stored, size = reader.SECTION_ENTRY.unpack_from(index, 64 + 24 * i)
        data = index[offset : offset + stored]
        if stored < size:
            data = reader.expand(data, size, "section.frame")
        out += bytes(-len(out) % 8)
        reader.SECTION_ENTRY.pack_into(out, 64 + 24 * i, len(out), size, size)
        out += data
    return bytes(out) + bytes(-len(out) % 8) + index[-32:]


def base_lanes(seed, size):
    """The lanes that the targets decode against: fuzz/src/lib.rs makes the same."""
    out, state, mask = b"", 0x9E3779B97F4A7C15, 2**64 - 1
    while len(out) < 64 * seed + size:
        state ^= state << 13 & mask
        state ^= state >> 7
        state ^= state << 17 & mask
        out += struct.pack("<Q", state)
    return out[64 * seed : 64 * seed + size]


def chunk_head(dtype, lanes, num_deltas, seed, wrapped):
    """What all targets that decode a chunk begin with."""
    return struct.pack("<BHHBB", DTYPES.index(dtype), lanes - 1, num_deltas - 1, seed, wrapped)


def table_set(classes):
    """A set with these frequencies."""
    out = bytes([len(classes)])
    for frequencies in classes:
        out += bytes([len(frequencies)])
        out += b"".join(bytes([f]) if f < 128 else bytes([128 + f % 128, f // 128]) for f in frequencies)
    return out


def flat(tokens, least):
    """Frequencies of `least`, but for the first token, which has all that is left."""
    return [4096 - (tokens - 1) * least] + [least] * (tokens - 1)


def save_conditioned(name, plain, blob):
    """The table sets, and small chunks, of a pair whose sections are expanded."""
    sections = [reader.SECTION_ENTRY.unpack_from(plain, 64 + 24 * i) for i in range(6)]
    section = [plain[offset : offset + size] for offset, size, _ in sections]
    tensors = TensorEntry.rows(section[3], struct.unpack_from("<I", plain, 52)[0])
    records = Record.rows(section[0], struct.unpack_from("<I", plain, 48)[0])
    tables, sets, base = section[5], [], 0
    for i, entry in enumerate(tensors):
        own, tables = tables[: entry.tables_size], tables[entry.tables_size :]
        if len(own) > 2:
            sets.append(own[2:])
            if own not in SAVED_TABLES:  # many vectors have the same
                save("conditioned_tables", f"{name}_{i}", b"\x00" + own[2:])
                SAVED_TABLES.add(own)
        if entry.codec != CONDITIONED:
            continue
        number = int.from_bytes(own[:2], "little") if len(own) == 2 else len(sets) if own else 0
        table = b"\x01" + sets[number - 1] if 0 < number <= len(sets) else b"\x00"
        for k, record in enumerate(records[entry.first_chunk : entry.first_chunk + min(1, entry.chunk_count)]):
            lanes = record.uncompressed_size // reader.DTYPES[entry.dtype].lane_bytes
            payload = blob[record.blob_offset : record.blob_offset + record.compressed_size]
            if 0 < lanes <= MOST_LANES and payload:
                seed = 255 if entry.base_kind == reader.layout.NONE else base
                head = chunk_head(entry.dtype, lanes, record.num_deltas, seed, 0)
                save("decode_conditioned", f"{name}_{i}_{k}", head + table + payload)
        base += entry.base_kind != reader.layout.NONE


def shaped():
    """Chunks for `decode_conditioned` that the target makes itself: tables, shape and changes."""
    few, many = table_set([flat(3, 200), flat(20, 100)]), table_set([flat(180, 20)] * 3)
    shape = struct.Struct("<BBBBHBIB")
    ends = bytes([1, 0, 1, 2]), bytes([0, 1, 2, 3])  # classes and activities, after a byte with their number
    lists = b"".join(bytes([len(part)]) + part for part in ends)
    step = struct.pack("<HHHQ", 3, 900, 6, 1)
    any_bits = struct.pack("<HHHQ", 50, 20, 77, 0x123456789ABCDEF)
    for name, dtype, lanes, table, fields, edits in [
        ("steps", BF16, 700, few, (0, 5, 0, 0, 60, 63, 0, 0), [step]),
        ("segments", BF16, 4100, few, (0, 5, 5, 2, 100, 63, 0, 0), [step]),
        ("one_state", I8, 300, few, (0, 0, 1, 1, 0, 9, 0, 3), [step]),
        ("wide", F32, 600, many, (0, 5, 2, 0, 0, 63, 0, 0), [step, any_bits]),
        ("low_bits", F32, 500, many, (24, 5, 1, 0, 200, 55, 255, 0), [any_bits]),
        ("all_low", F8_E4M3, 129, few, (8, 3, 0, 0, 0, 0, 0, 0), [step]),
    ]:
        data = b"\x01" + table + shape.pack(*fields) + lists + bytes([len(edits)]) + b"".join(edits)
        for damage in (b"", struct.pack("<HB", 2, 4), struct.pack("<HB", 70, 0x10)):
            save(
                "decode_conditioned",
                f"shaped_{name}_{len(damage)}{damage[:1].hex()}",
                chunk_head(dtype, lanes, 1, 5, 1) + data + damage,
            )


def safetensors(tensors):
    """A file with these tensors: name, dtype, shape, bytes."""
    header, data = {}, b""
    for name, dtype, shape, lanes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(lanes)]}
        data += lanes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def changed(lanes, width, every):
    """Adds a small number to the lowest byte of every `every`-th lane."""
    out = bytearray(lanes)
    for at in range(0, len(lanes), width * every):
        out[at] = (out[at] + 1 + at // width % 3) % 256
    return bytes(out)


def save_ours():
    """Pairs of our encoder, from the base tensors that the targets will have."""
    for name, parts in {
        "bf16": [("BF16", 2, 600, 9, True)],
        "bf16_4096": [("BF16", 2, 4096, 50, True)],
        "mixed": [("BF16", 2, 300, 9, True), ("F32", 4, 129, 2, True), ("I8", 1, 400, 30, True), ("BF16", 2, 130, 3, True)],
        "no_base": [("F32", 4, 200, 1, False), ("BF16", 2, 150, 1, False)],
    }.items():
        base, target = [], []
        for i, (dtype, width, lanes, every, has_base) in enumerate(parts):
            before = base_lanes(len(base), width * lanes)
            after = changed(before, width, every) if has_base else before
            if has_base:
                base.append((f"t{i}", dtype, [lanes], before))
            target.append((f"t{i}", dtype, [lanes], after))
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            (folder / "base.safetensors").write_bytes(safetensors(base))
            (folder / "target.safetensors").write_bytes(safetensors(target))
            command = ["cargo", "run", "--release", "--quiet", "--", "--quiet", "encode", "base.safetensors", "target.safetensors"]
            command += ["-o", "pair", "--codec", "conditioned", "--chunk-lanes", "4096"]
            manifest = ["--manifest-path", str(ROOT / "Cargo.toml")]
            subprocess.run(command[:2] + manifest + command[2:], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            plain = expanded((folder / "pair.tpde-index").read_bytes())
            blob = (folder / "pair.tpde-blob").read_bytes()
        save("open_index", "ours_" + name, b"\x00" + plain)
        save("apply_pair", "ours_" + name, b"\x00" + struct.pack("<H", len(plain)) + plain + blob)
        save_conditioned("ours_" + name, plain, blob)


def manifests():
    """Manifests of a store. Names, and what must agree with them, are those of fuzz_targets/manifests.rs."""

    def stored(*sizes):
        return {"bytes": sum(sizes), "segments": [{"digest": f"{size:064x}", "bytes": size} for size in sizes]}

    def at(branch, number):
        return {"branch": branch, "number": number, "id": f"{number:032x}"}

    pair = {"digest": "ab" * 32, "index": stored(600), "blob": stored(64, 4096)}
    files = [{"name": "1_Pooling/config.json", "content": stored(7)}, {"name": "empty.txt", "content": stored()}]
    contents = [{"whole": pair}, {"difference": pair}, {"external": {"hint": "hub/base"}}, "same", "deleted"]
    for i, content in enumerate(contents):
        version = {
            "schema": "tpde.store.version/1",
            **at("main", i + 1),
            "parent": at("main", i) if i else None,
            "state": "cd" * 32,
            "tensors": 2,
            "tensor_bytes": 4096,
            "content": content,
            "files": [] if content == "deleted" else files,
            "created": 1_700_000_000,
            "metadata": {"step": "20"},
        }
        save("manifests", f"version_{i}", json.dumps(version).encode())
    shortcut = {"schema": "tpde.store.shortcut/1", "from": at("main", 1), "to": at("side", 9), "pair": pair, "created": 0}
    save("manifests", "shortcut", json.dumps(shortcut).encode())
    store = {"schema": "tpde.store/1", "grace": 86400, "anchor_every": 100, "anchor_percent": 100}
    save("manifests", "store", json.dumps(store).encode())
    for i, name in enumerate(
        (
            "main@3",
            "branches/main/0000000003.json",
            "branches/main/0000000003.pruned",
            "shortcuts/side/0000000009/main@1.json",
        )
    ):
        save("manifests", f"name_{i}", name.encode())


def main():
    shutil.rmtree(SEEDS, ignore_errors=True)
    for folder, vector in [(f, v) for f in VECTORS for v in json.loads((f / "manifest.json").read_text())["vectors"]]:
        name, valid = vector["name"], vector["verdict"] == "valid"
        index, blob = ((folder / vector[part]).read_bytes() for part in ("index", "blob"))
        if not valid:
            if (
                vector["when"] == "open_index"
                and vector["rule"].split(".")[0] in ("tensor", "file", "section")
                and len(index) < 1000
            ):
                save("open_index", name, b"\x01" + index)
            continue
        opened = reader.open_index(index)
        plain = expanded(index)
        if len(plain) <= 1500 and not name.startswith(("lanes_", "size_")):
            save("open_index", name, b"\x00" + plain)
        if len(plain) + len(blob) <= 2500:
            save("apply_pair", name, b"\x00" + struct.pack("<H", len(plain)) + plain + blob)
        save_conditioned(name, plain, blob)
        for i, file in enumerate(opened.files):
            content = file.content if file.content is not None else b""
            if file.entry.kind == 0:
                data = max((o for t in json.loads(content[8:]).values() for o in t.get("data_offsets", [0])), default=0)
                save("safetensors_header", f"{name}_{i}", b"\x02" + struct.pack("<H", data % 65536) + content[8:])
            elif file.entry.kind == 2:
                save("safetensors_header", f"{name}_{i}", b"\x01" + content)
        for tensor in opened.tensors[:3]:
            first = tensor.entry.first_chunk
            for record in opened.records[first : first + min(1, tensor.entry.chunk_count)]:
                lanes = min(tensor.lanes, 1 << tensor.entry.chunk_lanes_log2)
                payload = blob[record.blob_offset : record.blob_offset + record.compressed_size]
                if not payload or lanes > MOST_LANES or tensor.entry.codec == CONDITIONED:
                    continue
                head = chunk_head(tensor.entry.dtype, lanes, record.num_deltas, 0, 0)
                chunk = f"{name}_{first}"
                if tensor.entry.codec == reader.RAW:
                    save("decode_raw", chunk, head + payload)
                    continue
                content = reader.expand(payload, record.uncompressed_size, "payload.frame")
                if len(content) <= 4200:
                    save("decode_zstd", chunk, head[:-1] + b"\x01" + content)
                if "frame" in name or "example" in name:
                    save("decode_zstd", chunk + "_frame", head + struct.pack("<H", record.uncompressed_size) + payload)
    save_ours()
    shaped()
    manifests()
    for i, classes in enumerate([[[4096]], [flat(180, 20)], [flat(16, 100)] * 15, [[0] * 179 + [4096], [4000, 96]]]):
        for repair in range(2):
            save("conditioned_tables", f"set_{i}_{repair}", bytes([repair]) + table_set(classes))
    index = {"metadata": {"total_size": 4}, "weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    save("safetensors_header", "shard_index", b"\x01" + json.dumps(index).encode())
    for i in range(0, 256, 4):
        save("mutated_pair", f"seed_{i}", struct.pack("<HB", i, 0))
        save("open_index", f"seed_{i}", b"\xff" + struct.pack("<HB", i, 0))
    (SEEDS / "conditioned_paths").symlink_to("decode_conditioned")
    (SEEDS / "mapped_pair").symlink_to("apply_pair")
    for i, pattern in enumerate([bytes(40), bytes(range(160)), b"\xa5\x01\x7f" * 80]):
        save("roundtrip", f"pattern_{i}", pattern)
        save("merge_pairs", f"pattern_{i}", pattern)
    print(f"{sum(path.is_file() for path in SEEDS.glob('*/*'))} seeds for {len(list(SEEDS.iterdir()))} targets")


if __name__ == "__main__":
    main()
