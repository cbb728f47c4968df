"""Time from a trainer's step until all receivers' weights are live. Receivers are bare: there is no engine.

    python integrations/bench/sync.py --channel group --receivers 2 --layers 2 --changed 0.002 0.01 0.045
    python integrations/bench/sync.py --channel group --backend nccl --layers 32 --width 4096 --hidden 14336     # a rank per GPU
    python integrations/bench/sync.py --channel folder --path /shared/run --receivers 1

Beside each row, over the same ranks and in the same run: a dense broadcast, and a broadcast of int32 positions and values. Every weight of
every receiver is compared, by SHA-256 of all bytes, after each of the three. Rows are JSON, one per line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

import tpde.slices
import tpde.sync

Weights = dict[str, torch.Tensor]


def shapes(layers: int, width: int, hidden: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Those of a Llama with a quarter as many key-value heads as heads."""
    found: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width), "norm": (width,)}
    for layer in range(layers):
        rows = {"q": width, "k": width // 4, "v": width // 4, "o": width, "gate": hidden, "up": hidden}
        found |= {f"{layer}.{name}": (size, width) for name, size in rows.items()}
        found |= {f"{layer}.down": (width, hidden), f"{layer}.norm": (width,)}
    return found


def digest(weights: Weights) -> str:
    """Of all bytes."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(weights[name].cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def stepped(weights: Weights, share: float, seed: int) -> None:
    """Changes a share of the weights by one unit in the last place, as small steps of an optimizer do."""
    generator = torch.Generator(next(iter(weights.values())).device).manual_seed(seed)
    for one in weights.values():
        mask = torch.rand(one.shape, generator=generator, device=one.device) < share
        one.view(torch.int16).add_(mask.to(torch.int16))


class Ranks:
    """The group of all processes of the benchmark: it times a step over all of them, and compares their weights."""

    def __init__(self, group: tpde.sync.TorchGroup) -> None:
        self.group, self.rank = group, group.rank

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Milliseconds until all ranks have done their work."""
        self._wait()
        begin = time.perf_counter()
        result = work()
        self._wait()
        return 1e3 * (time.perf_counter() - begin), result

    def _wait(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        distributed.barrier()

    def compare(self, weights: Weights, what: str) -> None:
        own = torch.frombuffer(bytearray.fromhex(digest(weights)), dtype=torch.uint8).to(self.group.device)
        every = torch.empty((self.group.size, own.numel()), dtype=torch.uint8, device=own.device)
        self.group.all_gather(every, own)
        assert bool((every == every[0]).all()), f"{what}: weights differ"


def dense(ranks: Ranks, weights: Weights) -> None:
    """All weights."""
    for one in weights.values():
        ranks.group.broadcast(one.view(torch.uint8))


def coo(ranks: Ranks, weights: Weights, last: Weights) -> int:
    """Positions of changed weights as int32, and their values. Returns bytes."""
    total = 0
    for name, one in weights.items():
        flat, count = one.view(torch.int16).view(-1), torch.zeros(1, dtype=torch.int64, device=one.device)
        positions = torch.empty(0, dtype=torch.int32)
        if ranks.rank == 0:
            positions = (flat != last[name].view(torch.int16).view(-1)).nonzero().view(-1).to(torch.int32)
            count += positions.numel()
        ranks.group.broadcast(count.view(torch.uint8))
        size = int(count)
        if ranks.rank == 0:
            values = flat[positions.long()]
        else:
            positions = torch.empty(size, dtype=torch.int32, device=one.device)
            values = torch.empty(size, dtype=torch.int16, device=one.device)
        for buffer in (positions, values) if size else ():
            ranks.group.broadcast(buffer.view(torch.uint8))
        if ranks.rank:
            flat[positions.long()] = values
        total += 6 * size + 8
    return total


def run(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // (options.receivers + 1)))
    device = torch.device("cuda", rank) if options.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    how: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": options.receivers + 1}
    distributed.init_process_group(options.backend, timeout=timedelta(minutes=10), **how)
    ranks = Ranks(tpde.sync.TorchGroup(device=device))
    generator = torch.Generator(device).manual_seed(0)
    found = shapes(options.layers, options.width, options.hidden, options.vocabulary)
    weights = {name: (torch.randn(shape, generator=generator, device=device) * 0.02).bfloat16() for name, shape in found.items()}
    size = sum(one.nbytes for one in weights.values())
    channel: tpde.sync.Folder
    if options.channel == "folder":
        channel = tpde.sync.Folder(options.path or f"{folder}/channel")
    else:
        channel = tpde.sync.Group(tpde.sync.TorchGroup(distributed.new_group(), device))
    publisher: tpde.sync.Publisher | None = None
    subscriber: tpde.sync.Subscriber | None = None
    if rank == 0:
        publisher = tpde.sync.Publisher(lambda: weights, channel, favor=options.favor, bucket=options.bucket, timeout=600)
    distributed.barrier()
    if rank:
        load = lambda tensors: [weights[name].copy_(one) for name, one in tensors]  # noqa: E731
        weights_map = tpde.slices.record(load, weights, weights)
        subscriber = tpde.sync.Subscriber(weights_map, channel, f"rank{rank}", version=0)

    def sync(version: int) -> tpde.sync.Sync:
        if publisher is not None:
            sent = publisher.publish()
            publisher.wait()
            return sent
        assert subscriber is not None
        done: list[tpde.sync.Sync] = []
        while subscriber.version < version:
            if subscriber.stage() or subscriber.is_owed:
                done += subscriber.commit()
        return done[-1]

    for version, share in enumerate(options.changed, 1):
        last = {name: one.clone() for name, one in weights.items()}
        if rank == 0:
            stepped(weights, share, version)
        stepped_weights = {name: one.clone() for name, one in weights.items()} if rank == 0 else {}
        rows = {}
        for name, work in (("dense", lambda: dense(ranks, weights)), ("coo", lambda: coo(ranks, weights, last))):
            took, sent = ranks.timed(work)
            ranks.compare(weights, name)
            rows[name] = {"ms": round(took, 1), "bytes": size if sent is None else sent}
            if rank:
                for one, former in last.items():
                    weights[one].copy_(former)
        took, done = ranks.timed(lambda version=version: sync(version))
        ranks.compare(weights, "tpde")
        stages: list[Any] = [None] * (options.receivers + 1)
        distributed.all_gather_object(stages, done.milliseconds)
        if rank == 0:
            assert all(torch.equal(one.view(torch.int16), weights[name].view(torch.int16)) for name, one in stepped_weights.items())
            row = {
                "receivers": f"{options.receivers} bare receivers, no engine",
                "channel": options.channel if options.channel == "folder" else options.backend,
                "target_bytes": size,
                "changed_asked": share,
                "changed": round(done.changed or 0.0, 5),
                "favor": done.favor,
                "tpde": {"ms": round(took, 1), "bytes": done.bytes},
                **rows,
                "publisher_ms": {stage: round(one, 1) for stage, one in stages[0].items()},
                "pause_ms": round(max(one["apply"] for one in stages[1:]), 1),
            }
            print(json.dumps(row), flush=True)
    if isinstance(channel, tpde.sync.Group):
        if rank == 0:
            channel.close()
        else:
            assert subscriber is not None
            while not channel.is_closed:
                subscriber.update()
            channel.close()
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channel", choices=["folder", "group"], default="group")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: rank N on GPU N")
    parser.add_argument("--path", help="folder of the channel; it must be empty")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--changed", type=float, nargs="+", default=[0.002, 0.01, 0.045, 0.2, 0.4])
    parser.add_argument("--favor", choices=["speed", "ratio", "size"], default="speed")
    parser.add_argument("--bucket", type=int, default=1 << 27, help="elements per bucket")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--vocabulary", type=int, default=16384)
    options = parser.parse_args()
    if options.path and any(Path(options.path).glob("versions/*.json")):
        parser.error(f"{options.path} has versions of another run: expected an empty folder")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (options, folder), nprocs=options.receivers + 1)


if __name__ == "__main__":
    main()
