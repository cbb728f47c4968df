#!/usr/bin/env python3
"""Measures other ways to store the difference of two safetensors files.

    python3 -m venv target/venv-peers && target/venv-peers/bin/pip install numpy zstandard==0.25.0
    target/venv-peers/bin/pip install --no-deps zipnn==0.5.4    # for its row
    target/venv-peers/bin/python scripts/bench_peers.py BASE TARGET

The ratio is the bytes of the target's tensors divided by the stored bytes. Stored bytes are the compressed frames alone,
without names, lengths or checksums, which favours the peers. A tensor that equals its base costs nothing, except in the
rows of ZipNN, of deltas and of --patch-from. A tensor that the base lacks, or has with another dtype or shape, is stored
as its difference from zeros. Stored bytes are decoded again and compared with the target, bit for bit.

    xor, zstd-1            each tensor XOR its base
    xor planes, zstd-3     the same, its bytes regrouped: all first bytes of the lanes, all second bytes, and so on
    u16 gaps, zstd-1       the gaps before a tensor's changed lanes, then their XOR values, in one frame. A gap is the
                           number of unchanged lanes, as u16; 65535 means that 65535 lanes are unchanged and more follow
    NeMo-RL's, zstd-1      as NeMo-RL sends it (weight_transfer_sparse_codec.py): gaps as u16, or u32 or u64 in a tensor
                           with a larger gap, none for a tensor whose changes are one run; one frame for all tensors,
                           first all gaps, then all values, grouped by width. Metadata and container, which NeMo-RL
                           compresses too, are left out
    gaps of deltas, zstd-3 the layouts of benches/nvcomp.cu: a delta is the distance from base to target in units in the last
    planes of deltas,      place, zigzag. Tensors are joined to one run per dtype, cut into chunks of 65,536 lanes with a frame
      zstd-3               each: gaps and then deltas of the changed lanes, or deltas of all lanes, by byte planes
    --patch-from, -3, -19  `zstd --patch-from=BASE TARGET`: whole files, headers included, by the program zstd
    ZipNN                  its delta of byte buffers (`delta_compressed_type="byte"`), one buffer for all tensors of a
                           dtype, on one thread. Speeds are bytes of the target per second, medians of 5 runs, and
                           include the XOR, which ZipNN does in NumPy. Tensors whose dtype ZipNN does not know are left
                           out of its row, and counted below the table

ZipNN imports PyTorch, which takes some GB. For byte buffers it only looks up names of dtypes there. Without PyTorch, an
empty stand-in is imported instead. The code that is timed is that of ZipNN, unchanged.
"""

import importlib.util
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types
from itertools import groupby
from pathlib import Path

import numpy as np
import zstandard

from make_variants import read

RUNS, CHUNK = 5, 65536
# A lane is the unit whose change is stored. A complex number is two lanes, and packed dtypes have bytes as lanes.
LANE_BYTES = {
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32", "C64"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
ZIPNN_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def pairs(base_path, target_path):
    """dtype, base and target of each tensor of the target, both as arrays of unsigned lanes."""
    bases, result = read(base_path), []
    for name, (dtype, shape, data) in read(target_path).items():
        lane = f"<u{LANE_BYTES.get(dtype, 1)}"
        target = np.frombuffer(data, lane)
        known = name in bases and bases[name][:2] == (dtype, shape)
        base = np.frombuffer(bases[name][2], lane) if known else np.zeros_like(target)
        result.append((dtype, base, target))
    return result


def compress(level, data):
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def decompress(frame):
    return zstandard.ZstdDecompressor().decompress(frame)


def changed(all_pairs):
    return [(base, target) for _, base, target in all_pairs if not np.array_equal(base, target)]


def check(rebuilt, target):
    if not np.array_equal(rebuilt, target):
        sys.exit("a peer's result differs from the target")


def xor(all_pairs):
    stored = 0
    for base, target in changed(all_pairs):
        frame = compress(1, (base ^ target).tobytes())
        stored += len(frame)
        check(base ^ np.frombuffer(decompress(frame), base.dtype), target)
    return stored


def xor_planes(all_pairs):
    stored = 0
    for base, target in changed(all_pairs):
        width = base.itemsize
        frame = compress(3, (base ^ target).view(np.uint8).reshape(-1, width).T.tobytes())
        stored += len(frame)
        lanes = np.frombuffer(decompress(frame), np.uint8).reshape(width, -1).T.copy().view(base.dtype)
        check(base ^ lanes.reshape(-1), target)
    return stored


def gaps_of(base, target):
    """Positions of the changed lanes, the number of unchanged lanes before each, and the XOR values."""
    where = np.flatnonzero(base != target)
    return where, np.diff(where, prepend=-1) - 1, (base ^ target)[where]


def u16_gaps(all_pairs):
    stored = 0
    for base, target in changed(all_pairs):
        where, gaps, values = gaps_of(base, target)
        escapes, rest = np.divmod(gaps, 65535)
        words = np.full(len(gaps) + int(escapes.sum()), 65535, "<u2")
        words[np.cumsum(escapes + 1) - 1] = rest
        frame = compress(1, words.tobytes() + values.tobytes())
        stored += len(frame)

        # How many words there are is known here; a real format would have to store it.
        content = decompress(frame)
        words = np.frombuffer(content, "<u2", len(words))
        values = np.frombuffer(content, base.dtype, offset=words.nbytes)
        ends = np.cumsum(words, dtype=np.int64)[words != 65535]
        rebuilt = base.copy()
        rebuilt[ends + np.arange(len(ends))] ^= values
        check(rebuilt, target)
    return stored


def nemo(all_pairs):
    indices, values, plan = [], {}, []
    for base, target in changed(all_pairs):
        where, gaps, xors = gaps_of(base, target)
        run = int(where[-1] - where[0]) + 1 == len(where)
        greatest = int(gaps.max())
        width = 0 if run else 2 if greatest <= 0xFFFF else 4 if greatest <= 0xFFFFFFFF else 8
        if width:
            indices.append(gaps.astype(f"<u{width}").tobytes())
        values.setdefault(base.itemsize, []).append(xors.tobytes())
        plan.append((base, target, width, len(where), int(where[0])))
    frame = compress(1, b"".join(indices) + b"".join(part for group in values.values() for part in group))

    content, at = decompress(frame), 0
    starts = {}
    end = sum(map(len, indices))
    for size, group in values.items():
        starts[size] = end
        end += sum(map(len, group))
    for base, target, width, count, first in plan:
        if width:
            gaps = np.frombuffer(content, f"<u{width}", count, at).astype(np.int64)
            at += gaps.size * width
            where = np.cumsum(gaps + 1) - 1
        else:
            where = np.arange(first, first + count)
        rebuilt = base.copy()
        rebuilt[where] ^= np.frombuffer(content, base.dtype, count, starts[base.itemsize])
        starts[base.itemsize] += count * base.itemsize
        check(rebuilt, target)
    return len(frame) if plan else 0


def runs(all_pairs):
    """Base and target of all tensors of a dtype, joined; and whether the lanes are floats."""
    ordered = sorted(all_pairs, key=lambda pair: pair[0])
    for dtype, group in groupby(ordered, key=lambda pair: pair[0]):
        bases, targets = zip(*((base, target) for _, base, target in group), strict=True)
        yield dtype[0] in "BFC" and dtype != "BOOL", np.concatenate(bases), np.concatenate(targets)


def in_order(lanes, floats):
    """Bit patterns of floats in the order of their values; the inverse is the same but for the sign bit."""
    top = lanes.dtype.type(1 << (8 * lanes.itemsize - 1))
    return np.where(lanes & top, ~lanes, lanes | top) if floats else lanes


def out_of_order(lanes, floats):
    top = lanes.dtype.type(1 << (8 * lanes.itemsize - 1))
    return np.where(lanes & top, lanes & ~top, ~lanes) if floats else lanes


def planes_of(lanes):
    return lanes.view(np.uint8).reshape(-1, lanes.itemsize).T.tobytes()


def of_planes(content, dtype, count):
    return np.frombuffer(content, np.uint8, count * dtype.itemsize).reshape(dtype.itemsize, count).T.copy().view(dtype).reshape(-1)


def deltas(all_pairs, as_gaps):
    stored = 0
    for floats, base, target in runs(all_pairs):
        signed = np.dtype(f"<i{base.itemsize}")
        distance = (in_order(target, floats) - in_order(base, floats)).view(signed)
        zigzag = (distance << 1 ^ distance >> (8 * base.itemsize - 1)).view(base.dtype)
        rebuilt = np.zeros_like(zigzag)
        for start in range(0, len(zigzag), CHUNK):
            chunk = zigzag[start : start + CHUNK]
            where = np.flatnonzero(chunk)
            if as_gaps:
                gaps = (np.diff(where, prepend=-1) - 1).astype("<u2")
                frame = compress(3, planes_of(gaps) + planes_of(chunk[where]))
                content = decompress(frame)
                places = np.cumsum(of_planes(content, gaps.dtype, len(where)).astype(np.int64) + 1) - 1
                rebuilt[start + places] = of_planes(content[2 * len(where) :], chunk.dtype, len(where))
            else:
                frame = compress(3, planes_of(chunk))
                rebuilt[start : start + CHUNK] = of_planes(decompress(frame), chunk.dtype, len(chunk))
            stored += len(frame)
        one = base.dtype.type(1)
        distance = rebuilt >> one ^ (~(rebuilt & one) + one)
        check(out_of_order((in_order(base, floats) + distance).astype(base.dtype), floats), target)
    return stored


def patch_from(base, target, level):
    with tempfile.TemporaryDirectory() as folder:
        frame, rebuilt = Path(folder, "frame"), Path(folder, "rebuilt")
        subprocess.run(["zstd", "-q", f"-{level}", f"--patch-from={base}", target, "-o", frame], check=True)
        subprocess.run(["zstd", "-q", "-d", "--long=31", f"--patch-from={base}", frame, "-o", rebuilt], check=True)
        if rebuilt.read_bytes() != Path(target).read_bytes():
            sys.exit("a peer's result differs from the target")
        return frame.stat().st_size


def import_zipnn():
    """The package, with a stand-in for PyTorch if there is none; and whether there was."""
    real = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("safetensors") is not None
    if not real:

        class Absent(types.ModuleType):
            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                # A type, since some of the names stand in annotations; kept, so that a name means one thing.
                setattr(self, name, type(name, (), {}))
                return getattr(self, name)

        torch = Absent("torch")
        torch.jit = types.SimpleNamespace(script=lambda function: function)
        safetensors = types.ModuleType("safetensors")
        safetensors.torch = Absent("safetensors.torch")
        sys.modules.update({"torch": torch, "safetensors": safetensors, "safetensors.torch": safetensors.torch})
    import zipnn

    return zipnn.ZipNN, real


def zipnn(all_pairs):
    """Bytes in, bytes stored, seconds to compress and to decompress, and whether PyTorch was there."""
    ZipNN, real = import_zipnn()
    taken = sorted((pair for pair in all_pairs if pair[0] in ZIPNN_NAMES and pair[2].size), key=lambda pair: pair[0])
    size = stored = 0
    seconds = [0.0, 0.0]
    for dtype, group in groupby(taken, key=lambda pair: pair[0]):
        group = list(group)
        base = b"".join(pair[1].tobytes() for pair in group)
        target = b"".join(pair[2].tobytes() for pair in group)
        times = [], []
        for _ in range(RUNS):
            codec = ZipNN(bytearray_dtype=ZIPNN_NAMES[dtype], delta_compressed_type="byte", threads=1)
            began = time.perf_counter()
            frame = codec.compress(target, delta_second_data=base)
            times[0].append(time.perf_counter() - began)
            codec = ZipNN(bytearray_dtype=ZIPNN_NAMES[dtype], delta_compressed_type="byte", threads=1)
            began = time.perf_counter()
            rebuilt = codec.decompress(frame, delta_second_data=base)
            times[1].append(time.perf_counter() - began)
            if rebuilt != target:
                sys.exit("ZipNN's result differs from the target")
        size, stored = size + len(target), stored + len(frame)
        for i in 0, 1:
            seconds[i] += statistics.median(times[i])
    return size, stored, seconds, real


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    all_pairs = pairs(*sys.argv[1:])
    total = sum(target.nbytes for _, _, target in all_pairs)
    lanes = sum(target.size for _, _, target in all_pairs)
    moved = sum(int(np.count_nonzero(base != target)) for _, base, target in all_pairs)
    dtypes = ", ".join(sorted({dtype for dtype, _, _ in all_pairs}))
    if not total:
        sys.exit("the target has no data")
    print(f"{total:,} bytes of {dtypes}; {moved / lanes:.3%} of {lanes:,} lanes changed\n")
    print(f"{'':24} {'ratio':>9} {'stored':>13} {'compress':>10} {'decompress':>10}")

    def row(name, size, stored, speeds=()):
        ratio = f"{size / stored:.2f}x" if stored else "-"
        print(f"{name:24} {ratio:>9} {stored:13,} " + " ".join(f"{speed:5.2f} GB/s" for speed in speeds), flush=True)

    row("xor, zstd-1", total, xor(all_pairs))
    row("xor planes, zstd-3", total, xor_planes(all_pairs))
    row("u16 gaps, zstd-1", total, u16_gaps(all_pairs))
    row("NeMo-RL's, zstd-1", total, nemo(all_pairs))
    row("gaps of deltas, zstd-3", total, deltas(all_pairs, as_gaps=True))
    row("planes of deltas, zstd-3", total, deltas(all_pairs, as_gaps=False))
    for level in (3, 19) if shutil.which("zstd") else ():
        row(f"--patch-from, -{level}", total, patch_from(*sys.argv[1:], level))
    print("\nall results compared with the target")
    if importlib.util.find_spec("zipnn") is None:
        return
    size, stored, seconds, real = zipnn(all_pairs)
    if size:
        row("ZipNN, 1 thread", size, stored, [size / value / 1e9 for value in seconds])
    print("PyTorch for ZipNN:", "installed" if real else "a stand-in")
    if size < total:
        print(f"ZipNN left out {total - size:,} bytes of dtypes that it does not know")


if __name__ == "__main__":
    main()
