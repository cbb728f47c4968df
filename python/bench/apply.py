#!/usr/bin/env python3
"""Times of `tpde.torch` on a CUDA device, against copies of the dense tensors, in one run.

    python bench/apply.py FOLDER [--tiles 24] [--pair rl20] [--keep FOLDER] [--tpde PROGRAM]

FOLDER has base.safetensors, or a pair `anchor` without a base from which it is rebuilt, and a pair on it. Every tensor is repeated
`--tiles` times along its first dim, so that checkpoints are as large as a model. All results are compared with the target. Files
are in the page cache.

Times are medians of wall times of repeated calls, with the device idle before and after; the time of the first call is printed
too. `host` is the time until all work of a call is queued. With `--tpde`, each row also has the time that the program measures for
the same library without Python.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch

import tpde
import tpde.torch
from tpde._engine.device import Device


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
    parser.add_argument("--tpde", type=Path, help="the program, built with CUDA")
    how = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = how.keep or Path(name)
        work.mkdir(exist_ok=True)
        bench(how.folder, how.pair, how.tiles, work, how.tpde)


#: By place of a pair's payloads: the place and the clock of the corresponding row of the program, in which all digests are compared
#: too. The program measures no wall times for payloads on the device.
ALIKE = {
    "path": ("files, opened anew", "wall"),
    "file": ("host memory", "wall"),
    "pinned": ("pinned memory", "wall"),
    "device": ("device memory", "device"),
}


def without_python(program: Path, work: Path) -> dict[tuple[str, str, str], float]:
    """Seconds that the program measures for the same checkpoints: by mode, where payloads are, and clock."""
    files = [str(work / f"{name}.safetensors") for name in ("base", "target")]
    command = [str(program), "bench", *files, "--device", "cuda", "--runs", "9", "-T", "0", "--codec", "conditioned", "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {(row["what"], row["from"], row["clock"]): row["seconds"] for row in report["pairs"][0]["rows"]}


def bench(folder: Path, pair_name: str, tiles: int, work: Path, program: Path | None) -> None:
    if (folder / "base.safetensors").exists():
        one = safetensors.torch.load_file(folder / "base.safetensors")
    else:
        one = tpde.torch.load_file(folder / "anchor")
    tuned = tpde.torch.load_file(folder / pair_name, base=one)
    host = {name: torch.cat([tensor] * tiles) for name, tensor in one.items()}
    host_target = {name: torch.cat([tensor] * tiles) for name, tensor in tuned.items()}
    dense_file, pair = work / "target.safetensors", work / "tiled"
    safetensors.torch.save_file(host, work / "base.safetensors")
    safetensors.torch.save_file(host_target, dense_file)
    report = tpde.encode(dense_file, pair, base=work / "base.safetensors", codec="conditioned", replace=True)
    size = report.target_bytes
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: {size / 1e9:.2f} GB in {len(host)} tensors, ", end="")
    print(f"{report.stored_bytes:,} bytes stored, {report.ratio:.1f}:1")

    program_takes = without_python(program, work) if program else {}
    base = {name: tensor.cuda() for name, tensor in host.items()}
    target = {name: tensor.cuda() for name, tensor in host_target.items()}
    live = {name: tensor.clone() for name, tensor in base.items()}

    def row(what: str, seconds: float, more: str = "") -> float:
        print(f"{what:64} {1e3 * seconds:9.3f} ms {size / seconds / 1e9:9.1f} GB/s{more}", flush=True)
        return seconds

    device = Device.of("cuda")

    def calls(
        what: str, payloads: str, mode: str, work: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> float:
        """The row of a call, with its first time, and what it is to the program's."""
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        first = time.perf_counter() - begin
        hosts = []

        def measured() -> object:
            begin = time.perf_counter()
            result = work()
            hosts.append(device.queued - begin)
            return result

        seconds = timed(measured, before)
        more = f"   first {1e3 * first:8.3f} ms, host {1e6 * statistics.median(hosts[2:]):6.0f} us"
        where, clock = ALIKE[payloads]
        alone = program_takes.get((f"{mode}, all digests", where, clock))
        if alone is not None:
            more += f", from Rust {1e3 * alone:7.3f} ms ({clock}): {alone / seconds:.0%} of its speed"
        return row(what, seconds, more)

    def restore() -> None:
        for name, tensor in live.items():
            tensor.copy_(base[name])

    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    room = torch.empty(size, dtype=torch.uint8, device="cuda")
    dense = row("pinned dense copy, one piece", timed(partial(room.copy_, pinned, non_blocking=True)))
    source = room.clone()
    row("dense copy within the device, one piece", timed(partial(room.copy_, source)))
    del source, room, pinned
    loaded = row(
        "safetensors.torch.load_file of the target, to the device",
        timed(lambda: safetensors.torch.load_file(dense_file, device="cuda")),
    )

    made = {"the path": ("path", pair)}
    for payloads in ("file", "pinned", "device"):
        begin = time.perf_counter()
        made[f"DevicePair, payloads {payloads}"] = payloads, tpde.torch.DevicePair(pair, "cuda", payloads=payloads)
        print(f"making a DevicePair, payloads {payloads}: {1e3 * (time.perf_counter() - begin):.3f} ms")
    for mode, name in {"all_checked": "in place, all checked", "chunk_by_chunk": "in place, chunk by chunk"}.items():
        for what, (payloads, given) in made.items():
            calls(f"apply_, {mode}, {what}", payloads, name, lambda: tpde.torch.apply_(live, given, mode=mode), restore)
            equal(live, target)
    best = 0.0
    for what, (payloads, given) in made.items():
        name = f"load_file from the base on the device, {what}"
        seconds = calls(name, payloads, "out of place", lambda: tpde.torch.load_file(given, base=base, device="cuda"))
        equal(tpde.torch.load_file(given, base=base, device="cuda"), target)
        best = best or seconds
        calls(f"apply_(base=…), {what}", payloads, "out of place", lambda: tpde.torch.apply_(live, given, base=base))
        equal(live, target)
    print(
        f"load_file of the path: {loaded / best:.1f} times as fast as safetensors, {dense / best:.1f} times as a pinned dense copy"
    )

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
        # All checked, targets are rebuilt in two batches of 256 MiB, and hashed there.
        assert more <= report.stored_bytes + ((576 if mode == "all_checked" else 64) << 20)


if __name__ == "__main__":
    main()
