#!/usr/bin/env python3
"""Times of an update on one CUDA device: encoded by `tpde.torch.Encoder`, and applied to live weights, against copies.

    python bench/encode.py FOLDER [--tiles 24] [--pair rl20] [--cpu]

FOLDER is as for bench/apply.py. Every tensor is repeated along its first dim, so that checkpoints are as large as a model. Pairs are
written to memory of the host (/dev/shm). Times are medians of wall times with the device idle before and after. Each pair is applied,
and the result compared with the target.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from apply import equal, timed

import tpde
import tpde.torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiles", type=int, default=24)
    parser.add_argument("--pair", default="rl20")
    parser.add_argument("--cpu", action="store_true", help="encode on the CPU too, which takes seconds")
    how = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as work:
        bench(how.folder, how.pair, how.tiles, Path(work), with_cpu=how.cpu)


def bench(folder: Path, pair_name: str, tiles: int, work: Path, *, with_cpu: bool) -> None:
    if (folder / "base.safetensors").exists():
        one = safetensors.torch.load_file(folder / "base.safetensors")
    else:
        one = tpde.torch.load_file(folder / "anchor")
    tuned = tpde.torch.load_file(folder / pair_name, base=one)
    base = {name: torch.cat([tensor] * tiles).cuda() for name, tensor in one.items()}
    target = {name: torch.cat([tensor] * tiles).cuda() for name, tensor in tuned.items()}
    live = {name: tensor.clone() for name, tensor in base.items()}
    size = sum(tensor.nbytes for tensor in target.values())
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: {pair_name} ×{tiles}, {size / 1e9:.2f} GB", flush=True)

    def row(what: str, seconds: float, more: str = "") -> float:
        print(f"{what:56} {1e3 * seconds:9.2f} ms {size / seconds / 1e9:8.1f} GB/s{more}", flush=True)
        return seconds

    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    room = torch.empty(size, dtype=torch.uint8, device="cuda")
    out = row("copy to pinned memory", timed(lambda: pinned.copy_(room, non_blocking=True)))
    back = row("copy from pinned memory", timed(lambda: room.copy_(pinned, non_blocking=True)))

    def restore() -> None:
        for name, tensor in live.items():
            tensor.copy_(base[name])

    encoder = tpde.torch.Encoder()
    # The pair before, of which the base is the target.
    encoder.save_file(base, work / "before")
    for favor in ("ratio", "speed"):
        for known in (None, work / "before"):
            pair = work / f"{favor}-{known is not None}"
            encode: Callable[[], object] = partial(
                encoder.save_file, target, pair, base=base, base_pair=known, favor=favor, replace=True
            )
            digests = "digests of target" if known else "both digests"
            encoded = timed(encode)
            stored = sum(Path(f"{pair}{end}").stat().st_size for end in (".tpde-index", ".tpde-blob"))
            row(f"encode, favor {favor}, {digests}", encoded, f"   {stored:,} bytes, {size / stored:.1f}:1")
            applied = row("  apply_, all checked", timed(partial(tpde.torch.apply_, live, pair), restore))
            equal(live, target)
            row("  together", encoded + applied, f"   {(encoded + applied) / (out + back):.2f} of both copies")
    if with_cpu:
        how = {"base": {name: tensor.cpu() for name, tensor in base.items()}, "codec": "conditioned", "replace": True}

        def on_cpu() -> None:
            tpde.torch.save_file({name: tensor.cpu() for name, tensor in target.items()}, work / "cpu", **how)

        row("encode on the CPU, after a copy of the target", timed(on_cpu, runs=1))
        assert (work / "cpu.tpde-blob").read_bytes() == (work / "ratio-False.tpde-blob").read_bytes()


if __name__ == "__main__":
    main()
