"""Weights that are rebuilt on use: the base class, and weights on the CPU."""

from __future__ import annotations

import hashlib
import secrets
import struct
import threading
import weakref
from typing import Any, TypeVar

import torch
from torch import nn

from .. import _tpde
from .._core.errors import InvalidArgument
from .._memory.arrays import describe
from .._memory.tensor import Entry, Memory
from .._memory.torch_tensors import dtype_of
from ._slot import EMPTY, Failures, Slot

#: Alignment of scratch memory in bytes.
ALIGN = 256

_Value = TypeVar("_Value")


def outliving(name: str, value: _Value) -> _Value:
    """Returns the first value that was registered under this name. The operator is registered once per process, so all imports of
    the package must share its data. After a purge of ``sys.modules`` there are several imports."""
    kept: _Value = vars(torch.ops.tpde).setdefault(name, value)
    return kept


class Weight:
    """A weight that is rebuilt on use. Layers own it; the operator finds it by its key."""

    #: All live weights of attached models, by handle.
    known: weakref.WeakValueDictionary[int, Weight] = outliving("_weights", weakref.WeakValueDictionary())
    #: The device on which the operator uses the weight.
    torch_device = torch.device("cpu")

    def __init__(self, pair: _tpde.Pair, entry: Entry, base: list[torch.Tensor], failures: Failures | None = None) -> None:
        self.pair = pair
        self.entry = entry
        #: The base tensor, and the tensor of scales of a quantised base.
        self.bases = [tensor.detach() for tensor in base]
        self.shape = tuple(entry.shape)
        self.dtype = dtype_of(entry.dtype)
        self.bytes = self.shape[0] * self.shape[1] * self.dtype.itemsize
        self.failures = Failures() if failures is None else failures
        #: Name and value of the weight in the last state dict that had it.
        self.saved: tuple[str, weakref.ref[torch.Tensor]] | None = None
        #: Random, so that the handle in a program saved by another process matches no weight here.
        self.handle = secrets.randbits(63)
        #: The handle, then 256 bits that identify the weight in any process: a hash of the pair's digest and the tensor's name.
        self.key = [self.handle, *struct.unpack("<4q", hashlib.sha256(pair.digest() + entry.name.encode()).digest())]

    def register(self) -> None:
        """Makes the weight visible to the operator and to other threads. Called when it is complete and has passed its checks."""
        self.known[self.handle] = self

    @classmethod
    def alive(cls) -> list[Weight]:
        """All known weights. Unlike iterating over the dictionary, this is safe while other threads add and drop weights."""
        return [weight for reference in cls.known.valuerefs() if (weight := reference()) is not None]

    def __deepcopy__(self, _: Any) -> Weight:
        return self  # copies of a model share the weight, which is never written

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            f"the weight {self.entry.name!r} is rebuilt from a base and a pair, which are not pickled: save the model's "
            "state_dict(), or call tpde.nn.attach in the process that needs the model"
        )

    @classmethod
    def find(cls, key: torch.Tensor, device: torch.device) -> Weight:
        """The weight with this key. For a program saved by another process: the same weight of the same pair on this device."""
        wanted_key = key.tolist() if key.dim() == 1 else []
        weight = cls.known.get(wanted_key[0]) if wanted_key else None
        if weight is not None and weight.key == wanted_key:
            return weight
        for other in cls.alive():
            if other.key[1:] == wanted_key[1:] and other.torch_device == device:
                return other
        raise InvalidArgument(
            "the weight of this layer or program is not attached: its layer no longer exists, or another pair is attached in this "
            f"process, or none on {device}. Call tpde.nn.attach with the same pair first"
        )

    def memory(self, scratch: torch.Tensor) -> Memory:
        """Describes scratch memory as the target tensor."""
        return self.entry.name, self.entry.dtype, self.entry.shape, scratch.data_ptr(), self.bytes, scratch

    def view(self, scratch: torch.Tensor) -> torch.Tensor:
        """The weight as a view of scratch memory."""
        return scratch[: self.bytes].view(self.dtype).view(self.shape)

    def base_memory(self) -> list[Memory]:
        """Describes the tensors of the base."""
        given = zip(self.entry.bases, self.bases)
        return [describe(name, base, (dtype, shape), device=base.device) for (name, dtype, shape), base in given]

    def check(self) -> None:
        """Decodes once, with all checks that the device has."""
        raise NotImplementedError

    def rebuilt(self) -> torch.Tensor:
        """The weight, in new memory."""
        raise NotImplementedError

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        """The layer's output. ``cast``: compute in the dtype of ``x`` instead of the weight's."""
        raise NotImplementedError


def compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
    """The layer with a weight in scratch memory."""
    if cast:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return nn.functional.linear(x, weight, bias)


class HostWeight(Weight):
    """A weight on the CPU, decoded by the calling thread into a slot of that thread."""

    _own = threading.local()

    def _decode(self, scratch: torch.Tensor, digests: bool = False) -> None:
        self.pair.read([self.memory(scratch)], base=self.base_memory(), digests=digests, progress=None)

    def check(self) -> None:
        slot = self._slot()
        slot.begin()
        self._decode(slot.memory, digests=True)
        slot.clear()

    def rebuilt(self) -> torch.Tensor:
        own = torch.empty(self.bytes, dtype=torch.uint8, device="cpu")
        self._decode(own)
        return self.view(own)

    def _slot(self) -> Slot:
        """The thread's slot, or a new one if that slot is too small or in use. A slot is in use after an interrupted call, and
        during a call that a signal handler has interrupted to make this one."""
        slot: Slot | None = getattr(self._own, "slot", None)
        if slot is None or slot.state is not EMPTY or slot.memory.numel() < self.bytes:
            with torch.inference_mode(False):
                whole = torch.empty(self.bytes + ALIGN, dtype=torch.uint8, device="cpu")
                start = -whole.data_ptr() % ALIGN
                slot = self._own.slot = Slot(whole[start : start + self.bytes])
        return slot

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        slot = self._slot()
        generation = slot.begin()
        self._decode(slot.memory)
        weight = self.view(slot.memory)
        slot.publish(generation, {self.handle: weight})
        y = compute(x, weight, bias, cast)
        slot.clear()
        return y
