#!/usr/bin/env python3
"""Makes other checkpoints out of BF16 ones in safetensors files; standard library only.

    scripts/make_variants.py shard IN OUT_FOLDER N        N shards, a shard index and a file that is no part of the checkpoint
    scripts/make_variants.py mixed BASE TARGET OUT_BASE OUT_TARGET      the same numbers in many dtypes

`mixed` gives the tensors these dtypes in turn: BF16 as it is; F32 and F64, widened; F16, rounded; C64, of
neighbours; F8_E4M3, the upper bytes; I8, the lower bytes; BOOL, the lowest bits. It adds a scalar that changes, an empty
tensor, a tensor that only the target has, one that only the base has, and one with more rows in the target.
"""

import json
import struct
import sys
from array import array
from pathlib import Path


def read(path):
    """Name to dtype, shape and bytes, in the order of the data."""
    data = memoryview(Path(path).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        tensors[name] = entry["dtype"], entry["shape"], data[start + begin : start + end]
    return tensors


def write(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            file.write(data)


def shard(source, folder, count):
    tensors, folder = read(source), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(len(data) for _, _, data in tensors.values())
    shards, done = [{} for _ in range(count)], 0
    for name, tensor in tensors.items():
        shards[min(done * count // max(total, 1), count - 1)][name] = tensor
        done += len(tensor[2])
    places = {}
    for i, part in enumerate(shards, 1):
        file = f"model-{i:05}-of-{count:05}.safetensors"
        write(folder / file, part)
        places.update((name, file) for name in part)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text('{"model_type": "none"}\n')


def widened(data):
    """BF16 as F32: the same upper half, zeros below."""
    out = bytearray(2 * len(data))
    out[2::4], out[3::4] = data[0::2], data[1::2]
    return out


def floats(data):
    values = array("f")
    values.frombytes(widened(data))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def packed(data, code):
    values = floats(data)
    return b"".join(
        struct.pack(f"<{len(part)}{code}", *part) for part in (values[i : i + 65536] for i in range(0, len(values), 65536))
    )


LAYER = 16  # tensors of a layer: the same weight has another dtype in the next layer
LOWEST_BIT = bytes(i & 1 for i in range(256))
KINDS = [
    ("BF16", lambda data: data),
    ("F32", widened),
    ("F16", lambda data: packed(data, "e")),
    ("F8_E4M3", lambda data: bytes(data[1::2])),
    ("I8", lambda data: bytes(data[0::2])),
    ("BOOL", lambda data: bytes(data[0::2]).translate(LOWEST_BIT)),
    ("F64", lambda data: packed(data, "d")),
    ("C64", widened),
]


def mixed(source):
    out = {}
    for place, (name, (dtype, shape, data)) in enumerate(read(source).items()):
        assert dtype == "BF16", f"{name} is {dtype}"
        kind, convert = KINDS[(place + place // LAYER) % len(KINDS)]
        if kind == "C64":
            if not shape or shape[-1] % 2:
                kind, convert = KINDS[0]
            else:
                shape = [*shape[:-1], shape[-1] // 2]
        out[name] = kind, shape, convert(data)
    return out


def row(i):
    return struct.pack("<16f", *(i + j / 16 for j in range(16)))


def pair(base, target, out_base, out_target):
    old, new = mixed(base), mixed(target)
    for tensors, step, rows in ((old, 20, 40), (new, 21, 48)):
        tensors["extra.step"] = "I64", [], step.to_bytes(8, "little")
        tensors["extra.empty"] = "F32", [0, 7], b""
        tensors["extra.resized"] = "F32", [rows, 16], b"".join(map(row, range(rows)))
    old["extra.only_in_base"] = "U8", [5], bytes(5)
    new["extra.only_in_target"] = "U16", [3], bytes(range(6))
    write(out_base, old)
    write(out_target, new)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["shard", source, folder, count] if int(count) > 0:
            shard(source, folder, int(count))
        case ["mixed", base, target, out_base, out_target]:
            pair(base, target, out_base, out_target)
        case _:
            sys.exit(__doc__)
