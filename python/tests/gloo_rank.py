"""A rank of a job with gloo, for tests that start several: ``gloo_rank.py WHAT RANK RANKS FOLDER [KILLED AT]``."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed

import tpde
import tpde.sync

ROWS, COLUMNS = 300, 400


class Killed(tpde.sync.TorchGroup):
    """A group whose rank is killed at a call."""

    left = -1

    def _count(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def broadcast(self, buffer: torch.Tensor) -> None:
        self._count()
        super().broadcast(buffer)

    def all_gather(self, buffers: torch.Tensor, own: torch.Tensor) -> None:
        self._count()
        super().all_gather(buffers, own)


def sync(rank: int, folder: Path, killed: int, at: int) -> None:
    """Rank 0 publishes three versions, the others follow."""
    from test_group import Engine
    from test_sync import weights_of

    group = Killed()
    group.left = at if rank == killed else -1
    channel = tpde.sync.Group(group, folder / f"rank{rank}")
    versions = channel.versions()
    last = versions[-1] if versions else 0
    engine = Engine(f"rank{rank}", rank - 1, 2) if rank else None
    try:
        if engine is None:
            state = {"version": last}
            publisher = tpde.sync.Publisher(lambda: weights_of(state["version"]), channel, bucket=100)
            for _ in range(3):
                state["version"] = publisher.version + 1
                publisher.publish()
                publisher.wait()
            print("published", publisher.version)
            channel.close()
        else:
            engine.subscriber = tpde.sync.Subscriber(engine.map, channel, engine.name, version=0)
            while not channel.is_closed:
                engine.update()
            print("follows", engine.version)
        is_together = True
    except ConnectionError:
        print("disconnected")
        is_together = False
    finally:
        if engine is not None:
            engine.check()
    leave(is_together=is_together)


def fsdp_weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = {
        "up.weight": torch.randn(ROWS, COLUMNS, generator=generator),
        "up.bias": torch.randn(ROWS, generator=generator),
        "down.weight": torch.randn(COLUMNS, ROWS, generator=generator),
    }
    weights["down.bias"] = torch.randn(COLUMNS, generator=generator)
    generator.manual_seed(version)
    for one in weights.values():
        if version:
            one.mul_(1 + 0.01 * (torch.rand(one.shape, generator=generator) < 0.1))
    weights["up.weight"][0, 0] = float("nan")
    return weights


def fsdp(rank: int, folder: Path) -> None:
    """FSDP2's shards on two ranks, in 32 bits, published in BF16."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = nn.Sequential()
    model.add_module("up", nn.Linear(COLUMNS, ROWS))
    model.add_module("down", nn.Linear(ROWS, COLUMNS))
    mesh = distributed.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)

    def load(version: int) -> None:
        for name, tensor in model.state_dict().items():
            assert isinstance(tensor, DTensor)
            whole = distributed.tensor.distribute_tensor(fsdp_weights(version)[name], mesh, tensor.placements)
            tensor.to_local().copy_(whole.to_local())

    load(0)
    source = tpde.sync.Source(model, dtype=torch.bfloat16, group=tpde.sync.TorchGroup())
    publish(rank, folder, source, load)


def tp(rank: int, folder: Path) -> None:
    """Slices of tensor parallelism: rows of one tensor, columns of another, and equal copies of the rest."""
    state: dict[str, Any] = {}

    def load(version: int) -> None:
        state.update(fsdp_weights(version))

    def slices() -> list[tpde.Slice]:
        rows, columns = slice(150 * rank, 150 * (rank + 1)), slice(0, 160) if rank == 0 else slice(160, 300)
        return [
            tpde.Slice("up.weight", (rows, slice(0, COLUMNS)), state["up.weight"][rows], (ROWS, COLUMNS)),
            tpde.Slice("down.weight", (slice(0, COLUMNS), columns), state["down.weight"][:, columns], (COLUMNS, ROWS)),
            tpde.Slice("up.bias", rows, state["up.bias"][rows], (ROWS,)),
            tpde.Slice("down.bias", ..., state["down.bias"], (COLUMNS,)),
        ]

    load(0)
    publish(rank, folder, tpde.sync.Source(slices, dtype=torch.bfloat16, group=tpde.sync.TorchGroup()), load)


def publish(rank: int, folder: Path, source: tpde.sync.Source, load: Any) -> None:
    publisher = tpde.sync.Publisher(source, tpde.sync.Folder(folder / "channel") if rank == 0 else None, bucket=1)
    # A subscriber joins when the first rank has made the channel.
    (folder / "ready").touch()
    while not (folder / "joined").exists():
        pass
    for version in (1, 2):
        load(version)
        sync = publisher.publish()
        assert sync.version == version and sync.bytes > 0 and 0.01 < (sync.changed or 0) < 0.2, sync
        publisher.wait()
    print("published", publisher.version)
    leave()


def refused(rank: int, folder: Path) -> None:
    """Shards that overlap, or lack elements, or are only on one rank an error: all ranks say so."""
    group, whole = tpde.sync.TorchGroup(), torch.zeros(300, 300)
    for rows, problem in (((slice(0, 200), slice(100, 300)), "overlapping"), ((slice(0, 100), slice(200, 300)), "lack elements")):
        held = rows[rank]
        source = tpde.sync.Source(lambda: [tpde.Slice("w", held, whole[held], (300, 300))], group=group)
        try:
            source.snapshot()
        except tpde.InvalidArgument as error:
            assert problem in str(error), error
        else:
            raise AssertionError(problem)
    channel = tpde.sync.Folder(folder / "channel") if rank == 0 else None
    held = slice(0, 150) if rank == 0 else slice(150, 300)
    publisher = tpde.sync.Publisher(
        tpde.sync.Source(lambda: [tpde.Slice("w", held, whole[held], (300, 300))], group=group), channel, timeout=0
    )
    if channel is not None:
        channel.join("absent", 0, {"w": [(slice(0, 300), slice(0, 300))]})
    publisher.publish()
    try:
        publisher.publish()
    except tpde.SyncError as error:
        assert "absent sent no answer" in str(error)
        print("refused", publisher.version)
    leave()


def leave(*, is_together: bool = True) -> NoReturn:
    """Ends the process, once all ranks have come here. gloo is not taken down: now and then that aborts a rank if another one has
    ended."""
    if is_together:
        distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    what, rank, ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    if what == "sync":
        sync(rank, folder, int(sys.argv[5]), int(sys.argv[6]))
    else:
        {"fsdp": fsdp, "tp": tp, "refused": refused}[what](rank, folder)


if __name__ == "__main__":
    main()
