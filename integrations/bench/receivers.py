"""Bare receivers: parameters as an engine has them, without an engine. And what all ranks of the benchmark do together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

import tpde.slices
import tpde.sync

Weights = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


def shapes(layers: int, width: int, hidden: int, vocabulary: int) -> Shapes:
    """Those of a Llama with a quarter as many key-value heads as heads."""
    found: Shapes = {"embed": (vocabulary, width), "norm": (width,), "head": (vocabulary, width)}
    for layer in range(layers):
        rows = {"q": width, "k": width // 4, "v": width // 4, "gate": hidden, "up": hidden}
        found |= {f"{layer}.{name}": (size, width) for name, size in rows.items()}
        found |= {f"{layer}.o": (width, width), f"{layer}.down": (width, hidden)}
        found |= {f"{layer}.norm_{at}": (width,) for at in "ab"}
    return found


class Replica:
    """One rank of a replica: fused rows, and rows or columns of a rank of tensor parallelism."""

    FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
    COLUMNS = ("o", "down")

    def __init__(self, of: Shapes, rank: int, ranks: int, device: torch.device) -> None:
        self.parameters: Weights = {}
        self._rank, self._ranks = rank, ranks
        self._places: dict[str, tuple[str, int]] = {}
        sizes: dict[str, tuple[int, ...]] = {}
        for name, shape in of.items():
            layer, _, own = name.rpartition(".")
            parameter = f"{layer}.{self.FUSED[own]}" if own in self.FUSED else name
            rows = sizes[parameter][0] if parameter in sizes else 0
            self._places[name] = parameter, rows
            sizes[parameter] = rows + self._own(name, shape)[0], *self._own(name, shape)[1:]
        for name, size in sizes.items():
            self.parameters[name] = torch.zeros(size, dtype=torch.bfloat16, device=device)

    def _cut(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The dim that ranks share."""
        return None if len(shape) < 2 else 1 if name.rpartition(".")[2] in self.COLUMNS else 0

    def _own(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        cut = self._cut(name, shape)
        return tuple(size // self._ranks if dim == cut else size for dim, size in enumerate(shape))

    def load_weights(self, weights: Any) -> None:
        """As engines have it."""
        for name, tensor in weights:
            parameter, row = self._places[name]
            cut, own = self._cut(name, tuple(tensor.shape)), self._own(name, tuple(tensor.shape))
            part = tensor if cut is None else tensor.narrow(cut, self._rank * own[cut], own[cut])
            self.parameters[parameter].narrow(0, row, own[0]).copy_(part)

    def map(self, of: Shapes) -> tpde.slices.Map:
        """The recorded loader."""
        metas = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in of.items()}
        found = tpde.slices.record(self.load_weights, metas, self.parameters)
        found.check()
        return found


class Link:
    """A group of ranks whose broadcasts take as long as on a link of a limited speed: a token bucket without a burst."""

    def __init__(self, group: tpde.sync.TorchGroup, device: torch.device) -> None:
        self._group, self.rank, self.size = group, group.rank, group.size
        #: Where buffers are. The group may need them elsewhere.
        self.device = device
        #: Gb/s; ``None`` for the speed of the group.
        self.gigabits: float | None = None
        #: Bytes that were sent.
        self.bytes = 0
        self._free = 0.0

    def broadcast(self, buffer: torch.Tensor) -> None:
        if buffer.device == self._group.device:
            self._group.broadcast(buffer)
        else:  # gloo, and weights on a device
            staged = buffer.to(self._group.device)
            self._group.broadcast(staged)
            if self.rank:
                buffer.copy_(staged)
        self._wait(buffer.nbytes)

    def all_gather(self, buffers: torch.Tensor, own: torch.Tensor) -> None:
        self._group.all_gather(buffers, own)
        self._wait(buffers.nbytes)

    def _wait(self, size: int) -> None:
        self.bytes += size
        if self.gigabits is None:
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._free = max(self._free, time.perf_counter()) + size * 8 / (self.gigabits * 1e9)
        time.sleep(max(0.0, self._free - time.perf_counter()))


def wait_for(device: torch.device) -> None:
    """Waits for the work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds until all ranks have done their work."""
    wait_for(device)
    distributed.barrier()
    begin = time.perf_counter()
    result = work()
    wait_for(device)
    distributed.barrier()
    return 1e3 * (time.perf_counter() - begin), result


class Memory:
    """The most memory of a device that is in use while work runs, by all processes together."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.peak = device, 0

    def used(self) -> int:
        """Bytes in use, without what PyTorch keeps for later."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return self._used()

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def during(self, work: Callable[[], Any]) -> Any:
        """Does the work and samples the memory in use, every 2 ms."""
        if self._device.type != "cuda":
            return work()
        ends = threading.Event()

        def sample() -> None:
            while not ends.wait(0.002):
                self.peak = max(self.peak, self._used())

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            return work()
        finally:
            ends.set()
            thread.join()
