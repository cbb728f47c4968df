#!/usr/bin/env python3
"""Times of `tpde.torch` on a CUDA device, against copies of the dense tensors, in one run.

    python bench/apply.py FOLDER [--tiles 24] [--pair rl20] [--keep FOLDER]

FOLDER has base.safetensors, or a pair `anchor` without a base that gives it, and a pair on it. Both checkpoints are tiled, so
that they are as large as a model: every tensor so many times along its first dim. All results are compared with the
target. Files are in the page cache. Times are medians of wall times, with the device idle before and after.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

import tpde
import tpde.torch


def timed(work: Callable[[], object], before: Callable[[], object] = lambda: None, runs: int = 9) -> float:
    """Median seconds of `work`, of which two runs count for nothing; `before` readies each run."""
    times = []
    for run in range(runs + 2):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        if run >= 2:
            times.append(time.perf_counter() - begin)
        del result
    return statistics.median(times)


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiles", type=int, default=24)
    parser.add_argument("--pair", default="rl20")
    parser.add_argument("--keep", type=Path, help="leave the tiled checkpoints there")
    how = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = how.keep or Path(name)
        work.mkdir(exist_ok=True)
        bench(how.folder, how.pair, how.tiles, work)


def bench(folder: Path, pair_name: str, tiles: int, work: Path) -> None:
    if (folder / "base.safetensors").exists():
        one = safetensors.torch.load_file(folder / "base.safetensors")
    else:
        one = tpde.torch.load_file(folder / "anchor")
    tuned = tpde.torch.load_file(folder / pair_name, one)
    host = {name: torch.cat([tensor] * tiles) for name, tensor in one.items()}
    host_target = {name: torch.cat([tensor] * tiles) for name, tensor in tuned.items()}
    dense_file, pair = work / "target.safetensors", work / "tiled"
    safetensors.torch.save_file(host, work / "base.safetensors")
    safetensors.torch.save_file(host_target, dense_file)
    report = tpde.encode(work / "base.safetensors", dense_file, pair, codec="conditioned", replace=True)
    size = report.target_bytes
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: {size / 1e9:.2f} GB in {len(host)} tensors, ", end="")
    print(f"{report.stored_bytes:,} bytes stored, {report.ratio:.1f}:1")

    base = {name: tensor.cuda() for name, tensor in host.items()}
    target = {name: tensor.cuda() for name, tensor in host_target.items()}
    live = {name: tensor.clone() for name, tensor in base.items()}

    def row(what: str, seconds: float) -> float:
        print(f"{what:64} {1e3 * seconds:9.3f} ms {size / seconds / 1e9:9.1f} GB/s", flush=True)
        return seconds

    def restore() -> None:
        for name, tensor in live.items():
            tensor.copy_(base[name])

    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    room = torch.empty(size, dtype=torch.uint8, device="cuda")
    dense = row("pinned dense copy, one piece", timed(lambda: room.copy_(pinned, non_blocking=True)))
    source = room.clone()
    row("dense copy within the device, one piece", timed(lambda: room.copy_(source)))
    del source, room, pinned
    loaded = row("safetensors.torch.load_file of the target, to the device", timed(lambda: safetensors.torch.load_file(dense_file, device="cuda")))

    made = {"the path": pair}
    for payloads in ("file", "pinned", "device"):
        made[f"DevicePair, payloads {payloads}"] = tpde.torch.DevicePair(pair, "cuda", payloads=payloads)
    for mode in ("all_checked", "chunk_by_chunk"):
        for what, given in made.items():
            row(f"apply_, {mode}, {what}", timed(lambda: tpde.torch.apply_(live, given, mode=mode), restore))
            equal(live, target)
    best = 0.0
    for what, given in made.items():
        seconds = row(f"load_file from the base on the device, {what}", timed(lambda: tpde.torch.load_file(given, base, device="cuda")))
        equal(tpde.torch.load_file(given, base, device="cuda"), target)
        best = best or seconds
        row(f"apply_(base=…), {what}", timed(lambda: tpde.torch.apply_(live, given, base=base)))
        equal(live, target)
    print(f"load_file of the path: {loaded / best:.1f} times as fast as safetensors, {dense / best:.1f} times as a pinned dense copy")

    # Memory that a call takes beside the tensors.
    del made
    for mode in ("all_checked", "chunk_by_chunk"):
        restore()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        free, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        tpde.torch.apply_(live, pair, mode=mode)
        more = free - torch.cuda.mem_get_info()[0]  # PyTorch keeps what it has asked for
        peak = torch.cuda.max_memory_allocated() - held
        print(f"apply_, {mode}: {more / 2**20:.1f} MiB more of the device, {peak / 2**20:.1f} MiB at most in use by PyTorch")
        assert more <= report.stored_bytes + (64 << 20)


if __name__ == "__main__":
    main()
