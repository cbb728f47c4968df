"""Ranks of jobs that save or load a checkpoint of PyTorch."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tpde.dcp
import tpde.store

STEPS = 3


def model_of() -> nn.Module:
    """Its sizes are no multiples of the numbers of ranks."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(96, 70), nn.GELU(), nn.Linear(70, 96), nn.LayerNorm(96))


def full(value: Any) -> Any:
    """All of a sharded tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def columns(mesh: Any, step: int) -> DTensor:
    """A tensor that is sharded by columns, as tensor parallelism does."""
    generator = torch.Generator().manual_seed(11)
    whole = torch.randn(33, 50, generator=generator) + step
    return distribute_tensor(whole, mesh, [Shard(1)])


def trained(rank: int, ranks: int, folder: Path) -> None:
    """Trains with FSDP2, and saves after each step."""
    store, mesh = tpde.store.Store(folder / "store"), init_device_mesh("cpu", (ranks,))
    model = model_of()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        model(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights, state = get_state_dict(model, optimizer)
        every = {"model": weights, "optimizer": state, "columns": columns(mesh, step), "step": step, "none": torch.zeros(0, 4)}
        writer = tpde.dcp.StorageWriter(store, metadata={"step": str(step)})
        dcp.save(every, storage_writer=writer)
        if rank == 0:
            assert writer.version is not None and writer.version.number == step
        expected = {name: full(one) for name, one in weights.items()}
        moments = {f"{name}.{key}": full(one) for name, values in state["state"].items() for key, one in values.items()}
        if rank == 0:
            torch.save({"model": expected, "moments": moments, "columns": columns(mesh, step).full_tensor()}, folder / f"{step}.pt")
        else:
            columns(mesh, step).full_tensor()


def loaded(rank: int, ranks: int, folder: Path) -> None:
    """Loads each version into another sharding, and compares it bit for bit."""
    store, mesh = tpde.store.Store(folder / "store"), init_device_mesh("cpu", (ranks,))
    for step in reversed(range(STEPS)):
        model = model_of()
        if ranks > 1:
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        weights, state = get_state_dict(model, optimizer)
        every = {"model": weights, "optimizer": state, "columns": columns(mesh, -1), "step": -1, "none": torch.zeros(0, 4)}
        dcp.load(every, storage_reader=tpde.dcp.StorageReader(store, f"main@{step}"))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        found = torch.load(folder / f"{step}.pt")
        weights, state = get_state_dict(model, optimizer)
        moments = {f"{name}.{key}": full(one) for name, values in state["state"].items() for key, one in values.items()}
        for expected, one in ((found["model"], weights), (found["moments"], moments), (found["columns"], every["columns"])):
            one, expected = (one, expected) if isinstance(one, dict) else ({"": one}, {"": expected})
            assert one.keys() == expected.keys() and expected
            assert all(torch.equal(full(one[name]), expected[name]) for name in expected)
        assert every["step"] == step


def conflict(rank: int, ranks: int, folder: Path) -> str:
    """Another writer stores a version while the ranks encode."""
    store = tpde.store.Store(folder / "store")

    class Slow(tpde.dcp.StorageWriter):
        def finish(self, **arguments: Any) -> None:
            tpde.store.Store(folder / "store").put({"w": torch.ones(3)})
            super().finish(**arguments)

    try:
        dcp.save({"w": columns(init_device_mesh("cpu", (ranks,)), 0)}, storage_writer=Slow(store))
    except dcp.api.CheckpointException as error:
        return ", ".join(one[0].code for one in error.failures.values())
    return "no error"


def numbers(step: int) -> dict[str, torch.Tensor]:
    """Tensors that cannot be compressed, in four rows and in many."""
    generator = torch.Generator().manual_seed(13)
    wide = torch.randint(-(2**31), 2**31 - 1, (4, 1 << 20), dtype=torch.int32, generator=generator)
    tall = torch.randint(-(2**31), 2**31 - 1, (1024, 2048), dtype=torch.int32, generator=generator)
    wide[:, :: 50 + step] += step
    tall[:: 1 + step] ^= step
    return {"tall": tall, "wide": wide}


def saved_otherwise(rank: int, ranks: int, folder: Path) -> str:
    """Saves shards, against a version that was cut otherwise. Returns how much of the blobs was read."""
    store, mesh = tpde.store.Store(folder / "store"), init_device_mesh("cpu", (ranks,))
    step = store.version("main").number + 1
    state = {name: distribute_tensor(one, mesh, [Shard(name == "wide")]) for name, one in numbers(step).items()}
    cache = folder / f"cache-{step}-{rank}"

    class Cached:
        """Keeps what is read of a version."""

        def __init__(self, of: Any) -> None:
            self.of = of

        def __getattr__(self, name: str) -> Any:
            return getattr(self.of, name)

        def open_version(self, version: str, **how: Any) -> Any:
            return self.of.open_version(version, **{**how, "cache": str(cache)})

    class Store(tpde.store.Store):
        @property
        def _store(self) -> Any:
            return Cached(super()._store)

    dcp.save(state, storage_writer=tpde.dcp.StorageWriter(Store(folder / "store"), chunk_lanes=1 << 14))
    blobs = [blob.stat() for blob in cache.glob("*.tpde-blob")]
    return f"{sum(512 * blob.st_blocks for blob in blobs)} {sum(blob.st_size for blob in blobs)}"


def main(what: str, rank: int, ranks: int, folder: Path, result: Path) -> None:
    """Runs in a process of its own. Writes `result` if it ends well."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / f"{what}{ranks}"), ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    found = {"trained": trained, "loaded": loaded, "conflict": conflict, "saved_otherwise": saved_otherwise}[what](
        rank, ranks, folder
    )
    distributed.barrier()
    result.write_text(found or "done")
    os._exit(0)  # as in gloo_rank.py: without taking gloo down
