#!/usr/bin/env python3
"""Tests the programs of examples/minimal: the reader on all vectors, the writer on random checkpoints, the reader on damaged pairs.

    python3 tests/python/check_minimal.py [--tpde target/release/tpde]

Needs numpy, zstandard and blake3. The writer's pairs are also read by testdata/reader and by the program tpde, if it is given;
then the reader also reads pairs of that program.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ROOT / "examples/minimal"
sys.path.insert(0, str(MINIMAL))
from common import DTYPES, Refused, hash_of  # noqa: E402
from reader import read_pair  # noqa: E402
import writer  # noqa: E402

sys.path.append(str(ROOT / "testdata"))
import versions  # noqa: E402

LINES = 320  # per file: the programs are there to be read
PAIRS, SECOND_READER, MUTANTS = 40, 10, 2000
LEAST = {"rebuilt": 312, "refused": 648}  # vectors
UNSUPPORTED = 1 << 2 | 1 << 4  # features: parts, derived


def check_lines():
    for path in sorted(MINIMAL.glob("*.py")):
        assert len(path.read_text().splitlines()) <= LINES, path


def hashes(contents):
    return {name: hash_of(content).hex() for name, content in contents.items()}


def check_vectors():
    """The outcome of each vector. Gives the valid ones that were rebuilt, for `check_mutants`."""
    outcomes, rebuilt = Counter(), []
    for folder in map(versions.folder, versions.names()):
        for vector in json.loads((folder / "manifest.json").read_text("utf-8"))["vectors"]:
            paths = [vector[part] and folder / vector[part] for part in ("index", "blob", "base")]
            index, blob = paths[0].read_bytes(), paths[1].read_bytes()
            try:
                tensors, files = read_pair(index, blob, paths[2])
            except Refused as refused:
                if refused.rule == "unsupported":
                    assert int.from_bytes(index[16:24], "little") & UNSUPPORTED, vector["name"]
                    outcomes["unsupported"] += 1
                    continue
                assert refused.rule == vector.get("rule"), f"{vector['name']}: {refused}"
                assert ascii(vector.get("tensor", "")).strip("'") in refused.place, f"{vector['name']}: {refused}"
                assert refused.place.endswith(f"chunk {vector['chunk']}" if "chunk" in vector else ""), vector["name"]
                outcomes["refused"] += 1
                continue
            assert (hashes(tensors), hashes(files)) == (vector.get("tensors"), vector.get("files")), vector["name"]
            rebuilt.append((index, blob, paths[2], (tensors, files)))
            outcomes["rebuilt"] += 1
    assert all(outcomes[outcome] >= least for outcome, least in LEAST.items()), outcomes
    return outcomes, rebuilt


# Random checkpoints.


def random_shape(rng, dtype):
    if rng.random() < 0.1:
        return [int(rng.integers(900, 3100)) * 4]  # up to four chunks of 4,096 lanes
    shape = [int(dim) for dim in rng.choice([0, 1, 2, 3, 8, 17, 64, 100], size=rng.integers(0, 4), p=[0.04] + [0.96 / 7] * 7)]
    return shape if np.prod(shape) * dtype.bits % 8 == 0 else [*shape, 4]


def random_bytes(rng, dtype, shape):
    size = int(np.prod(shape)) * dtype.bits // 8
    if dtype.name == "BF16" and rng.random() < 0.8:  # like weights
        return (rng.normal(0, 0.02, size // 2).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return rng.bytes(size)


def changed(rng, data, dtype):
    """Data of which a share of the lanes is changed, by a little or at random."""
    lanes = np.frombuffer(data, f"<u{dtype.lane_bytes}").copy()
    which = rng.random(len(lanes)) < rng.choice([0, 0.001, 0.02, 0.3, 1])
    if rng.random() < 0.7:
        lanes[which] += rng.choice([1, 2, 3], size=int(which.sum())).astype(lanes.dtype)
        return lanes.tobytes()
    return np.where(which, np.frombuffer(rng.bytes(len(data)), lanes.dtype), lanes).tobytes()


def random_checkpoints(rng):
    """Tensors of a base and a target: name to dtype, shape and data."""
    base, target = {}, {}
    kinds = list(DTYPES.values())
    for number in range(int(rng.integers(0, 12))):
        name, dtype = str(rng.choice(["w", "ß", "層.", '"', "a\\b", " "])) + str(number), kinds[rng.integers(len(kinds))]
        dtype = DTYPES[17] if rng.random() < 0.3 else dtype
        shape = random_shape(rng, dtype)
        base[name] = (dtype, shape, random_bytes(rng, dtype, shape))
        fate = rng.choice(["changed", "removed", "retyped", "new", "shape"], p=[0.8, 0.05, 0.05, 0.05, 0.05])
        if fate == "changed":
            target[name] = (dtype, shape, changed(rng, base[name][2], dtype))
        elif fate in ("retyped", "new", "shape"):
            dtype = dtype if fate == "shape" else kinds[rng.integers(len(kinds))]
            shape = random_shape(rng, dtype) if fate == "shape" else shape if np.prod(shape) * dtype.bits % 8 == 0 else [8]
            target[name + "+" * (fate == "new")] = (dtype, shape, random_bytes(rng, dtype, shape))
    return base, target


def safetensors(tensors):
    """The bytes of a file."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype.name, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, ensure_ascii=len(tensors) % 2 == 0).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def run(*command):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def check_writer(folder, tpde):
    """Random pairs. Gives them, for `check_mutants`, and how many tensors have which codec."""
    pairs, codecs = [], Counter()
    base, target, pair = folder / "base.safetensors", folder / "target.safetensors", folder / "pair"
    for seed in range(PAIRS):
        old, new = random_checkpoints(np.random.default_rng(seed))
        base.write_bytes(safetensors(old))
        target.write_bytes(safetensors(new))
        given = base if seed % 8 else None
        writer.CHUNK_LANES_LOG2 = 12 if seed % 2 else 18
        index, blob = writer.encode_pair(given, target)
        if seed % 4 < 2:
            assert (index, blob) == writer.encode_pair(given, target), f"{seed}: not the same bytes twice"
        result = read_pair(index, blob, given)
        assert result[1] == {"": target.read_bytes()}, seed
        assert result[0] == {name: data for name, (_, _, data) in new.items()}, seed
        pairs.append((index, blob, given and given.read_bytes(), result))
        (folder / "pair.tpde-index").write_bytes(index)
        (folder / "pair.tpde-blob").write_bytes(blob)
        options = ["--base", base] if given else []
        if seed < SECOND_READER:
            read = json.loads(run(sys.executable, ROOT / "testdata/reader", pair, "--json", *options))
            assert read["files"] == hashes(result[1]), seed
        if tpde:
            run(tpde, "verify", pair, *(options or ["--no-base"]))
            run(tpde, "apply", given or "--no-base", pair, "--force", "-o", folder / "rebuilt.safetensors")
            assert (folder / "rebuilt.safetensors").read_bytes() == target.read_bytes(), seed
            codecs.update(row["codec"] for row in json.loads(run(tpde, "inspect", pair, "--tensors", "--json"))["tensors"])
            # Another program's pairs. It may take a base of another dtype, which is `derived`, unless it is asked not to.
            codec = ("auto", "conditioned", "zstd", "raw")[seed % 4]
            command = [tpde, "encode", target, "--no-base"] if given is None else [tpde, "encode", base, target, "--no-derived"]
            run(*command, "--codec", codec, "--force", "-o", folder / "theirs")
            theirs = [(folder / f"theirs.tpde-{part}").read_bytes() for part in ("index", "blob")]
            assert read_pair(*theirs, given)[1] == result[1], f"{seed}: {codec}"
    return pairs, codecs


# Damaged pairs.


def sign(index, blob, count):
    """Makes CRCs, payload digests and pair digests fit, so that a change reaches the checks behind them."""
    index, blob = bytearray(index), bytearray(blob)
    features, listed = index[16], b""
    for record in range(256, 256 + 32 * count, 32):
        offset, size = struct.unpack_from("<QI", index, record)
        payload = blob[offset : offset + size]
        struct.pack_into("<I", index, record + 20, zlib.crc32(payload))
        listed += hash_of(payload)[:16] if payload else bytes(16)
    if features & 2:
        at = 256 + 48 * count
        index[at : at + len(listed)] = listed
    if features & 1:
        index[208:240] = hash_of(listed)
    index[252:256] = struct.pack("<I", zlib.crc32(index[:252]))
    index[-32:] = hash_of(index[:-32])
    blob[24:56] = index[-32:]
    blob[60:64] = struct.pack("<I", zlib.crc32(blob[:60]))
    return bytes(index), bytes(blob)


def check_mutants(pairs, folder):
    """Each damaged pair is refused, or gives the target."""
    rng, outcomes, base = np.random.default_rng(0), Counter(), folder / "mutant"
    pairs = [pair for pair in pairs if sum(map(len, pair[3][0].values())) < 20_000]  # quick ones
    for number in range(MUTANTS):
        index, blob, old, expected = pairs[rng.integers(len(pairs))]
        if isinstance(old, bytes):
            base.write_bytes(old)
        given = base if isinstance(old, bytes) else old
        damaged = [bytearray(index), bytearray(blob)]
        part = damaged[rng.integers(2)]
        for _ in range(rng.integers(1, 4)):
            part[rng.integers(len(part))] = rng.choice([0, 1, 127, 128, 255, int(rng.integers(256))])
        if number % 5 == 0:
            del part[rng.integers(len(part)) :]
        else:
            damaged = sign(*damaged, int.from_bytes(index[48:52], "little")) if number % 5 > 1 else damaged
        try:
            result = read_pair(*map(bytes, damaged), given)
        except Refused as refused:
            outcomes[refused.rule] += 1
            continue
        assert result == expected, number
        outcomes["target"] += 1
    return outcomes


# The programs themselves.


def program(name, *arguments):
    done = subprocess.run([sys.executable, MINIMAL / f"{name}.py", *arguments], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def check_programs(folder):
    """A lone file, a folder of shards, no base; a refusal leaves nothing behind."""
    rng = np.random.default_rng(1)
    bf16, u8 = DTYPES[17], DTYPES[1]
    old = {"a": (bf16, [64, 64], random_bytes(rng, bf16, [64, 64])), "b": (u8, [9], b"123456789")}
    new = {name: (dtype, shape, changed(rng, data, dtype)) for name, (dtype, shape, data) in old.items()}
    for path, tensors in (("base", old), ("target", new)):
        (folder / path).mkdir()
        for name, tensor in tensors.items():
            (folder / path / f"{name}.safetensors").write_bytes(safetensors({name: tensor}))
        weight_map = {name: f"{name}.safetensors" for name in tensors}
        (folder / path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    cases = [("base", "target"), ("base", "target/b.safetensors"), ("base/a.safetensors", "target"), (None, "target")]
    for base, target in cases:
        base, target = base and folder / base, folder / target
        with tempfile.TemporaryDirectory(dir=folder) as work:
            pair, out = f"{work}/pair", Path(work) / "out"
            assert program("writer", base or "--no-base", target, pair).returncode == 0
            for wrong in [folder / "target/a.safetensors", folder / "absent"] if base else []:
                refused = program("reader", pair, wrong, out)
                assert refused.returncode == 1 and refused.stderr.startswith("refused: "), refused.stderr
            assert sorted(path.name for path in Path(work).iterdir()) == ["pair.tpde-blob", "pair.tpde-index"]
            assert program("reader", pair, *([base] if base else []), out).returncode == 0
            expected, rebuilt = ([path, *sorted(path.glob("*"))] for path in (target, out))
            assert [path.name for path in expected[1:]] == [path.name for path in rebuilt[1:]]
            assert all(a.read_bytes() == b.read_bytes() for a, b in zip(expected, rebuilt) if a.is_file())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tpde", help="the program tpde")
    tpde = parser.parse_args().tpde
    check_lines()
    vectors, rebuilt = check_vectors()
    with tempfile.TemporaryDirectory() as work:
        check_programs(Path(work))
        pairs, codecs = check_writer(Path(work), tpde)
        mutants = check_mutants(pairs + rebuilt, Path(work))
    print("mutants:", ", ".join(f"{rule} {count}" for rule, count in mutants.most_common()))
    print("codecs:", dict(codecs) if tpde else "not looked at, without the program tpde")
    print(
        f"vectors: {vectors['rebuilt']} rebuilt, {vectors['refused']} refused, {vectors['unsupported']} unsupported;"
        f" {PAIRS} random pairs; {MUTANTS} mutants, {mutants['target']} of them harmless"
    )


if __name__ == "__main__":
    main()
