"""Memory that is mapped read-only: a typed error before anything is written, not the end of the process."""

from __future__ import annotations

import ctypes
import mmap
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tpde
import tpde.numpy

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

import torch.distributed.checkpoint as dcp  # noqa: E402 (needs torch)

import tpde.dcp  # noqa: E402
import tpde.slices  # noqa: E402
import tpde.store  # noqa: E402
import tpde.torch  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped read-only")
COUNT = 4096


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    base, target = torch.arange(COUNT, dtype=torch.float32), torch.arange(COUNT, dtype=torch.float32)
    target[::7] += 1
    tensors = {"a": base, "w": base, "same": base}, {"a": target, "w": target, "same": base}
    tpde.torch.save_file(tensors[1], tmp_path / "pair", base=tensors[0])
    base.numpy().tofile(tmp_path / "raw")
    return tmp_path / "pair"


@pytest.fixture
def mapped(pair: Path) -> Iterator[Any]:
    """The base in a file that is mapped read-only."""
    with (pair.parent / "raw").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = torch.frombuffer(memory, dtype=torch.float32)
        yield one
        del one


def tensors(mapped: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(COUNT, dtype=torch.float32), "w": mapped, "same": torch.arange(COUNT, dtype=torch.float32)}


def by_map(state: dict[str, torch.Tensor], pair: Path) -> None:
    def load(weights: Any) -> None:
        for name, weight in weights:
            state[name].copy_(weight)

    tpde.slices.apply_(tpde.slices.record(load, {name: one.to("meta") for name, one in state.items()}, state), pair)


def by_copies(state: dict[str, torch.Tensor], pair: Path) -> None:
    """The second place of a tensor is read-only."""
    parameters = {"first": state["a"], "second": state["w"]}

    def load(weights: Any) -> None:
        for _, weight in weights:
            parameters["first"].copy_(weight)
            parameters["second"].copy_(weight)

    tpde.slices.apply_(tpde.slices.record(load, {"a": state["a"].to("meta")}, parameters), pair)


def by_checkpoint(state: dict[str, torch.Tensor], pair: Path, dtype: torch.dtype = torch.float32) -> None:
    store = tpde.store.init(pair.parent / "store")
    saved = {name: torch.zeros(COUNT, dtype=dtype) for name in state}
    dcp.save(saved, storage_writer=tpde.dcp.StorageWriter(store), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(state, storage_reader=tpde.dcp.StorageReader(store), no_dist=True)
    raise caught.value.failures[0][0]


CALLS: dict[str, Callable[[dict[str, torch.Tensor], Path], Any]] = {
    "state dict": lambda state, pair: tpde.torch.apply_(state, pair),
    "unchanged": lambda state, pair: tpde.torch.apply_({**state, "w": state["same"], "same": state["w"]}, pair),
    "chunk by chunk": lambda state, pair: tpde.torch.apply_(state, pair, mode="chunk_by_chunk"),
    "overwritten": lambda state, pair: tpde.torch.apply_(
        state, pair, base={name: torch.arange(COUNT, dtype=torch.float32) for name in state}
    ),
    "slices": lambda state, pair: tpde.torch.apply_slices_([tpde.Slice(name, ..., one) for name, one in state.items()], pair),
    "map": by_map,
    "second place": by_copies,
    "checkpoint": by_checkpoint,
    "checkpoint of another dtype": lambda state, pair: by_checkpoint(state, pair, torch.float64),
}


@pytest.mark.parametrize("call", CALLS)
def test_memory_that_is_mapped_read_only(call: str, pair: Path, mapped: torch.Tensor) -> None:
    state = tensors(mapped)
    before = state["a"].clone()
    with pytest.raises(tpde.InvalidArgument, match="tensor '(a|w|same)' is in memory that is mapped read-only"):
        CALLS[call](state, pair)
    assert torch.equal(state["a"], before)


def test_arrays_in_memory_that_is_mapped_read_only(pair: Path, mapped: torch.Tensor) -> None:
    """The array says that it can be written."""
    memory = (ctypes.c_float * COUNT).from_address(mapped.data_ptr())
    state = {name: numpy.arange(COUNT, dtype=numpy.float32) for name in ("a", "same")}
    state["w"] = numpy.ctypeslib.as_array(memory)
    assert state["w"].flags.writeable
    with pytest.raises(tpde.InvalidArgument, match="tensor 'w' is in memory that is mapped read-only"):
        tpde.numpy.apply_(state, pair)
    assert state["a"][0] == 0
