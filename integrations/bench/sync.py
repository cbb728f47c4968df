"""Time from a trainer's step until all receivers' weights are live. Receivers are bare: there is no engine.

    python integrations/bench/sync.py --receivers 2 --layers 2 --changed 0.002 0.01 0.045        # gloo, on the CPU
    python integrations/bench/sync.py --backend nccl --size 8b --gigabits 100 25 10 1            # the trainer on GPU 0
    python integrations/bench/sync.py --device cuda --size 8b --receivers 2 --tensor-parallel 2  # two ranks, also on one GPU
    python integrations/bench/sync.py --channel folder --path /shared/run
    python integrations/bench/sync.py --address 10.0.0.1:29500 --rank 1                          # one rank, on any host

Weights and changes have the statistics of real ones: see changes.py. Each row has three other methods,
over the same link and in the same run: all weights; positions as int32 and values; gaps and values in zstd. After each method every
weight of every receiver is compared. Rows are JSON, one per line. With --gigabits, a token bucket limits what is sent, for the share --throttled-share.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

# Processes that are started import this file again.
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
from changes import Changes  # noqa: E402
from receivers import Link, Memory, Replica, Weights, shapes, timed, wait_for  # noqa: E402
from rivals import Rivals  # noqa: E402
from torch import distributed, multiprocessing  # noqa: E402

import tpde  # noqa: E402
import tpde.sync  # noqa: E402

SIZES = {"small": (2, 1024, 3584, 16384), "1b": (16, 2048, 8192, 128256), "8b": (32, 4096, 14336, 128256)}
#: What a dense broadcast takes longer than this is computed from its bytes.
LONGEST = 20.0


class Run:
    """What one rank does."""

    def __init__(self, rank: int, options: argparse.Namespace, folder: str) -> None:
        self.rank, self.options = rank, options
        receivers = options.receivers
        self.device = self._device_of(rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (receivers + 1)))
        method = f"tcp://{options.address}" if options.address else f"file://{folder}/store"
        distributed.init_process_group(
            "gloo", init_method=method, rank=rank, world_size=receivers + 1, timeout=timedelta(minutes=10)
        )
        buffers = self.device if options.backend == "nccl" else torch.device("cpu")
        groups = [distributed.new_group(backend=options.backend, timeout=timedelta(minutes=5)) for _ in range(2)]
        #: Of the channel, and of other methods. Comparisons have no limit of speed.
        self.channel_link = Link(tpde.sync.TorchGroup(groups[0], buffers), buffers)
        self.link = Link(tpde.sync.TorchGroup(groups[1], buffers), self.device)
        self.link.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))
        self.channel_link.broadcast(torch.zeros(1, dtype=torch.uint8, device=buffers))
        self.shapes = shapes(*options.shape)
        self.bytes = sum(2 * torch.Size(shape).numel() for shape in self.shapes.values())
        self.changes = Changes(self.device)
        self.weights: Weights = {}
        self.last: Weights = {}
        self.replica: Replica | None = None
        #: Milliseconds of the last commit, in which nothing can be generated.
        self.pause = 0.0
        if rank == 0:
            self.weights = {name: self.changes.weights(shape) for name, shape in self.shapes.items()}
        else:
            ranks = options.tensor_parallel
            self.replica = Replica(self.shapes, (rank - 1) % ranks, ranks, self.device)
        held = self.weights if self.replica is None else self.replica.parameters
        self.last = {name: one.clone() for name, one in held.items()}
        self.rivals = Rivals(self.link, self.shapes, self.weights, self.last, self.replica)
        self.rivals.dense()
        self._keep()
        self.memory = Memory(self.device)
        self.before = self.memory.used()
        self._connect(folder)

    def _device_of(self, rank: int) -> torch.device:
        """The trainer has a GPU of its own if there are two."""
        if self.options.device == "cpu":
            return torch.device("cpu")
        count = torch.cuda.device_count()
        return torch.device("cuda", 0 if rank == 0 or count == 1 else 1 + (rank - 1) % (count - 1))

    def _connect(self, folder: str) -> None:
        options = self.options
        if options.channel == "folder":
            self.channel: tpde.sync.Folder = tpde.sync.Folder(options.path or f"{folder}/channel")
        else:
            # In memory, if there is room for the pairs of two versions.
            is_large = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > self.bytes
            self.pairs = tempfile.TemporaryDirectory(prefix="tpde-", dir="/dev/shm" if is_large else None)
            self.channel = tpde.sync.Group(self.channel_link, self.pairs.name, history=1)
        if self.rank == 0:
            source = tpde.sync.Source(lambda: self.weights, device=self.device)
            how: dict[str, Any] = {"favor": options.favor, "bucket": options.bucket, "timeout": 600}
            self.publisher = tpde.sync.Publisher(source, self.channel, **how)
        distributed.barrier()
        if self.replica is not None:
            self.subscriber = tpde.sync.Subscriber(self.replica.map(self.shapes), self.channel, f"rank{self.rank}", version=0)

    def _keep(self) -> None:
        """What receivers go back to after each method, and the trainer compares with."""
        held = self.weights if self.replica is None else self.replica.parameters
        for name, one in held.items():
            self.last[name].copy_(one)

    def _restore(self) -> None:
        if self.replica is not None:
            for name, one in self.replica.parameters.items():
                one.copy_(self.last[name])

    def _compare(self, what: str) -> None:
        differing: list[Any] = [None] * (self.options.receivers + 1)
        distributed.all_gather_object(differing, self.rivals.differing())
        assert not any(differing), f"{what}: so many tensors differ, by rank: {differing}"

    def _sync(self) -> tpde.sync.Sync:
        """The next version, until it is live and all have answered."""
        if self.rank == 0:
            begin, copied = time.perf_counter(), threading.Event()

            def is_copied() -> None:
                wait_for(self.device)  # a step may use another stream
                copied.set()

            with ThreadPoolExecutor(1) as thread:  # the trainer goes on when its weights are copied
                published = thread.submit(self.publisher.publish, copied=is_copied)
                while not copied.wait(0.1) and not published.done():
                    pass
                blocked = time.perf_counter() - begin
                sent = published.result()
            sent.milliseconds.update(publish=1e3 * (time.perf_counter() - begin), blocked=1e3 * blocked)
            self.publisher.wait()
            return sent
        version, done = self.subscriber.version + 1, []
        while self.subscriber.version < version:
            if self.subscriber.stage() or self.subscriber.is_owed:
                begin = time.perf_counter()
                done += self.subscriber.commit(answer=False)
                self.pause = 1e3 * (time.perf_counter() - begin)
                self.subscriber.answer()
            elif self.options.channel == "folder":
                time.sleep(0.001)
        return done[-1]

    def version(self, share: float, gigabits: float | None, *, is_warm: bool = False, is_sampled: bool = False) -> None:
        """Publishes a version in all ways, and prints a row. The first uses of memory, kernels and connections are not counted."""
        if self.rank == 0:
            self.changes.step(self.weights, share)
        rows: dict[str, Any] = {}
        for name, method in self.rivals.methods.items() if not is_sampled else ():
            if name in self.options.without:
                continue
            seconds = self.bytes * 8e-9 / gigabits if gigabits else 0.0
            is_computed = name == "dense" and seconds > LONGEST
            self.link.gigabits, self.link.bytes = None if is_computed else gigabits, 0
            took, _ = timed(self.device, method)
            sent, self.link.gigabits = self.link.bytes, None
            self._compare(name)
            self._restore()
            rows[name] = {"ms": round(took + (1e3 * seconds if is_computed else 0), 1), "bytes": sent}
            if is_computed:
                rows[name]["computed"] = True
        self.channel_link.gigabits = gigabits
        if is_sampled:
            self.memory.used()
            took, done = timed(self.device, lambda: self.memory.during(self._sync))
        else:
            took, done = timed(self.device, self._sync)
        self.channel_link.gigabits = None
        self._compare("tpde")
        self._keep()
        every: list[Any] = [None] * (self.options.receivers + 1)
        distributed.all_gather_object(every, (done.milliseconds, self.memory.peak - self.before, str(self.device), self.pause))
        if self.rank == 0 and is_sampled:
            self._print({"extra_device_bytes": {f"rank {rank}, {one[2]}": one[1] for rank, one in enumerate(every)}}, share)
        elif self.rank == 0 and not is_warm:
            sent = {stage: round(one, 1) for stage, one in every[0][0].items()}
            row = {
                "changed": round(done.changed or 0.0, 5),
                "gigabits": gigabits,
                "tpde": {"ms": round(took, 1), "bytes": done.bytes},
                **rows,
                "blocked_ms": {"publish": sent["publish"], "publish in a thread": sent["blocked"]},
                "pause_ms": round(max(one[3] for one in every[1:]), 1),
                "publisher_ms": sent,
                "receiver_ms": {stage: round(max(one[0].get(stage, 0) for one in every[1:]), 1) for stage in every[1][0]},
            }
            self._print(row, share)

    def _print(self, row: dict[str, Any], share: float) -> None:
        options = self.options
        ranks = f", {options.tensor_parallel} ranks per replica" if options.tensor_parallel > 1 else ""
        how = {
            "receivers": f"{options.receivers} bare receivers, no engine{ranks}",
            "channel": options.channel if options.channel == "folder" else options.backend,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "favor": options.favor,
            "target_bytes": self.bytes,
            "changed_asked": share,
        }
        print(json.dumps({**how, **row}), flush=True)

    def close(self) -> None:
        """Ends the channel."""
        if isinstance(self.channel, tpde.sync.Group):
            while self.rank and not self.channel.is_closed:
                self.subscriber.update()
            self.channel.close()
        distributed.barrier()
        distributed.destroy_process_group()


def run(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank."""
    one = Run(rank, options, folder)
    one.version(options.throttled_share, None, is_warm=True)
    for share in options.changed:
        one.version(share, None)
    for gigabits in options.gigabits:
        one.version(options.throttled_share, gigabits)
    if options.device == "cuda":
        one.version(options.throttled_share, None, is_sampled=True)
    one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channel", choices=["folder", "group"], default="group")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: a GPU per rank")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where weights are; cuda with nccl")
    parser.add_argument("--path", help="folder of the channel; it must be empty")
    parser.add_argument("--receivers", type=int, default=1, help="ranks of all replicas")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks per replica")
    parser.add_argument("--changed", type=float, nargs="*", default=[0.002, 0.01, 0.045, 0.2, 0.4])
    parser.add_argument("--gigabits", type=float, nargs="*", default=[], help="speeds of a limited link, in Gb/s")
    parser.add_argument("--throttled-share", type=float, default=0.01)
    parser.add_argument("--without", nargs="*", default=[], help="methods to leave out: dense, coo, 'gaps + zstd'")
    parser.add_argument("--favor", choices=["speed", "ratio", "size"], default="speed")
    parser.add_argument("--bucket", type=int, default=1 << 27, help="elements per bucket")
    parser.add_argument("--size", choices=[*SIZES], default="small")
    parser.add_argument("--shape", type=int, nargs=4, metavar=("LAYERS", "WIDTH", "HIDDEN", "VOCABULARY"))
    parser.add_argument("--address", help="host and port of rank 0, for ranks that are started one by one")
    parser.add_argument("--rank", type=int, help="with --address")
    options = parser.parse_args()
    options.shape = options.shape or SIZES[options.size]
    options.device = options.device or ("cuda" if options.backend == "nccl" else "cpu")
    if options.receivers % options.tensor_parallel:
        parser.error(f"{options.receivers} receivers: expected a multiple of {options.tensor_parallel}")
    if (options.address is None) != (options.rank is None):
        parser.error("expected both --address and --rank, or neither")
    if options.path and any(Path(options.path).glob("versions/*.json")):
        parser.error(f"{options.path} has versions of another run: expected an empty folder")
    with tempfile.TemporaryDirectory() as folder:
        if options.rank is not None:
            run(options.rank, options, folder)
        else:
            multiprocessing.spawn(run, (options, folder), nprocs=options.receivers + 1)


if __name__ == "__main__":
    main()
