"""Weights that are rebuilt when they are used, the scratch memory that they share, and the operator that uses them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple, Optional

import torch
from torch import nn

from . import _tpde
from ._device import Device, DevicePair
from ._errors import Misuse
from ._memory import Memory, describe
from ._open import Entry
from ._torch_memory import dtype_of

#: Bytes that scratch memory is aligned to.
ALIGN = 256


class Weight:
    """A weight that is rebuilt when it is used. Kept by its layers; the operator knows it by its handle."""

    _numbers = itertools.count(1)
    #: All that are alive.
    known: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()

    def __init__(self, pair: _tpde.Pair, entry: Entry, base: torch.Tensor | None) -> None:
        self.pair = pair
        self.entry = entry
        self.base = None if base is None else base.detach()
        self.shape = tuple(entry.shape)
        self.dtype = dtype_of(entry.dtype)
        self.bytes = self.shape[0] * self.shape[1] * self.dtype.itemsize
        self.handle = next(self._numbers)
        self.known[self.handle] = self

    def __deepcopy__(self, _: Any) -> Weight:
        return self  # copies of a model share what is never written

    def memory(self, scratch: torch.Tensor) -> Memory:
        """The scratch memory as this tensor."""
        return self.entry.name, self.entry.dtype, self.entry.shape, scratch.data_ptr(), self.bytes, scratch

    def view(self, scratch: torch.Tensor) -> torch.Tensor:
        """The weight that lies in scratch memory."""
        return scratch[: self.bytes].view(self.dtype).view(self.shape)

    def base_memory(self) -> list[Memory]:
        """The base where it lies."""
        if self.base is None:
            return []
        name, expected = self.entry.base_name, (self.entry.dtype, self.entry.shape)
        return [describe(name, self.base, expected, device=self.base.device)]

    def rebuilt(self) -> torch.Tensor:
        """The weight in memory of its own."""
        raise NotImplementedError

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        """What the layer gives; ``cast``: in the dtype of ``x``, whatever the weight's."""
        raise NotImplementedError


def _compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
    """The layer with a weight that lies in scratch memory."""
    if cast:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return nn.functional.linear(x, weight, bias)


class HostWeight(Weight):
    """A weight on the CPU, decoded by the thread that calls."""

    _scratch = threading.local()

    def _decode(self, scratch: torch.Tensor, digests: bool = False) -> None:
        self.pair.read([self.memory(scratch)], self.base_memory(), digests, None)

    def check(self) -> None:
        """Decodes once with all checks."""
        self._decode(self._room(), digests=True)

    def rebuilt(self) -> torch.Tensor:
        own = torch.empty(self.bytes, dtype=torch.uint8)
        self._decode(own)
        return self.view(own)

    def _room(self) -> torch.Tensor:
        room: torch.Tensor | None = getattr(self._scratch, "room", None)
        if room is None or room.numel() < self.bytes:
            with torch.inference_mode(False):
                whole = torch.empty(self.bytes + ALIGN, dtype=torch.uint8)
                start = -whole.data_ptr() % ALIGN
                self._scratch.room = room = whole[start : start + self.bytes]
        return room

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        scratch = self._room()
        self._decode(scratch)
        return _compute(x, self.view(scratch), bias, cast)


class _Filling(NamedTuple):
    """How a slot is filled with a weight: made once."""

    rebuild: _tpde.Rebuild
    #: What it works in.
    memory: torch.Tensor
    #: The weight in the slot.
    weight: torch.Tensor
    #: Where its payload is copied to, if it is.
    payload: torch.Tensor | None


class _Slot:
    """Scratch memory for a weight, and what is known of it."""

    def __init__(self) -> None:
        self.dense: torch.Tensor | None = None
        self.payload: torch.Tensor | None = None
        #: The weight that is or will be there, and not used yet.
        self.holds: int | None = None
        #: Behind the decoding of a weight, and behind its last use.
        self.ready, self.used, self.copied = (torch.cuda.Event() for _ in range(3))  # type: ignore[no-untyped-call]
        self.rebuilds: dict[int, _Filling] = {}


class Arena:
    """The scratch memory of a stream: two slots, one in use while the other is filled on streams beside it."""

    _made: dict[tuple[torch.device, int], Arena] = {}

    def __init__(self, device: Device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.stream = stream
        self.copying, self.decoding = (torch.cuda.Stream(device.torch) for _ in range(2))  # type: ignore[no-untyped-call]
        self.slots = [_Slot(), _Slot()]
        self.lock = threading.RLock()
        #: Which weight was used after which, the last time.
        self.next: dict[int, int] = {}
        self.last: int | None = None
        self.pending: deque[_tpde.Launched] = deque()

    @classmethod
    def of(cls, device: Device, stream: torch.cuda.Stream) -> Arena:
        key = (device.torch, stream.cuda_stream)
        if key not in cls._made:
            cls._made[key] = cls(device, stream)
        return cls._made[key]

    @classmethod
    def on(cls, device: torch.device) -> list[Arena]:
        """Those of all streams of a device."""
        return [arena for (where, _), arena in cls._made.items() if where == device]

    @classmethod
    def forget(cls, device: torch.device, handle: int) -> None:
        """Lets go of what is held for a weight that is gone, and of all scratch memory with the last one."""
        DeviceWeight._largest.pop(device, None)
        alive = any(isinstance(one, DeviceWeight) and one.device.torch == device for one in list(Weight.known.values()))
        for key, arena in list(cls._made.items()):
            if key[0] == device:
                with arena.lock:
                    for slot in arena.slots:
                        slot.rebuilds.pop(handle, None)
                if not alive:
                    cls._made.pop(key, None)

    def settle(self, wait: bool = False) -> None:
        """Raises what was wrong with decodings that have passed, or with all of them."""
        with self.lock:
            while self.pending and (wait or self.pending[0].is_done()):
                self.pending.popleft().wait()

    def _room(self, weight: DeviceWeight, slot: _Slot) -> None:
        """Sees to it that a slot has room for all weights of the device."""
        dense, payload = weight.largest()
        held = 0 if slot.payload is None else slot.payload.numel()
        if slot.dense is not None and slot.dense.numel() >= dense and held >= payload:
            return
        slot.rebuilds.clear()
        slot.dense = slot.payload = slot.holds = None
        # Made in the order of the stream, so the others begin behind what it still does with that memory.
        with torch.inference_mode(False):
            slot.dense = torch.empty(dense, dtype=torch.uint8, device=self.device.torch)
            slot.payload = torch.empty(payload, dtype=torch.uint8, device=self.device.torch) if payload else None
        for beside in (self.copying, self.decoding):
            beside.wait_stream(self.stream)
            for made in (slot.dense, slot.payload):
                if made is not None:
                    made.record_stream(beside)

    def fill(self, weight: DeviceWeight, slot: _Slot) -> None:
        """Queues the decoding of a weight into a slot."""
        self._room(weight, slot)
        filling = slot.rebuilds.get(weight.handle)
        if filling is None:
            assert slot.dense is not None
            copied = slot.payload[: weight.payload.numel()] if weight.is_copied and slot.payload is not None else None
            part = weight.payload if copied is None else copied
            with torch.inference_mode(False):
                filling = _Filling(*weight.rebuild(slot.dense, part, self.decoding), weight.view(slot.dense), copied)
            slot.rebuilds[weight.handle] = filling
        if filling.payload is not None:
            self.copying.wait_event(slot.ready)  # what was decoded from there
            with torch.cuda.stream(self.copying):
                filling.payload.copy_(weight.payload, non_blocking=True)
            slot.copied.record(self.copying)
            self.decoding.wait_event(slot.copied)
        self.decoding.wait_event(slot.used)
        launched = filling.rebuild.launch(self.device.raw, self.decoding.cuda_stream)
        slot.ready.record(self.decoding)
        slot.holds = weight.handle
        self.pending.append(launched)

    def linear(self, weight: DeviceWeight, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        """A layer, decoded before where it was foreseen; then the next one is begun."""
        with self.lock:
            self.settle()
            handle = weight.handle
            slot = next((slot for slot in self.slots if slot.holds == handle), None)
            if slot is None:
                slot = next((slot for slot in self.slots if slot.holds is None), self.slots[0])
                self.fill(weight, slot)
            self.stream.wait_event(slot.ready)
            y = _compute(x, slot.rebuilds[handle].weight, bias, cast)
            slot.used.record(self.stream)
            slot.holds = None
            if self.last is not None:
                self.next[self.last] = handle
            self.last = handle
            following = Weight.known.get(self.next.get(handle, 0))
            if isinstance(following, DeviceWeight) and following.device is self.device:
                if all(other.holds != following.handle for other in self.slots):
                    self.fill(following, next(other for other in self.slots if other is not slot))
            return y


class DeviceWeight(Weight):
    """A weight on a CUDA device."""

    def __init__(
        self, on_device: DevicePair, entry: Entry, base: torch.Tensor | None, payload: torch.Tensor, start: int
    ) -> None:
        super().__init__(on_device._pair, entry, base)
        self.on_device = on_device
        self.device = on_device._device
        #: Bytes of the blob from `start` on, on the device or in pinned memory.
        self.payload = payload
        self.is_copied = payload.device.type == "cpu"
        self.start = start
        self._largest.pop(self.device.torch, None)
        #: What graphs refer to.
        self.captured: list[tuple[_tpde.Rebuild, _tpde.Captured, torch.Tensor]] = []
        weakref.finalize(self, Arena.forget, self.device.torch, self.handle).atexit = False

    #: By device, what `largest` has found.
    _largest: dict[torch.device, tuple[int, int]] = {}

    def largest(self) -> tuple[int, int]:
        """Bytes of the largest weight of the device, and of the largest payload that is copied."""
        found = self._largest.get(self.device.torch)
        if found is None:
            alive = [one for one in list(self.known.values()) if isinstance(one, DeviceWeight) and one.device is self.device]
            copied = max((one.payload.numel() for one in alive if one.is_copied), default=0)
            found = self._largest[self.device.torch] = max(one.bytes for one in alive), copied
        return found

    def rebuild(
        self, dense: torch.Tensor, part: torch.Tensor, stream: torch.cuda.Stream, keep: bool = True
    ) -> tuple[_tpde.Rebuild, torch.Tensor]:
        """The decoding into this memory, and the memory that it works in. ``keep``: holds dense and part."""
        output = self.memory(dense)
        payload: Memory = ("", "U8", [part.numel()], part.data_ptr(), part.numel(), part)
        if not keep:
            output, payload = (*output[:5], None), (*payload[:5], None)
        base = self.base_memory()
        plan = self.on_device._raw.plan(output, base[0] if base else None, self.start, payload)
        memory = self.device.memory(plan.bytes(), "decoding a weight")
        for used in (memory, self.on_device._index):
            used.record_stream(stream)
        return plan.prepare(("", "U8", [memory.numel()], memory.data_ptr(), memory.numel(), memory)), memory

    def check(self) -> None:
        """Decodes once, and waits for what the checks say."""
        dense = torch.empty(self.bytes, dtype=torch.uint8, device=self.device.torch)
        self.on_device._rebuild([self.memory(dense)], self.base_memory(), None)

    def rebuilt(self) -> torch.Tensor:
        own = torch.empty(self.bytes, dtype=torch.uint8, device=self.device.torch)
        self.on_device._rebuild([self.memory(own)], self.base_memory(), None)
        return self.view(own)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        stream = self.device.stream()
        if self.device.is_capturing():
            return self._captured_linear(x, bias, cast, stream)
        return Arena.of(self.device, stream).linear(self, x, bias, cast)

    def _captured_linear(
        self, x: torch.Tensor, bias: torch.Tensor | None, cast: bool, stream: torch.cuda.Stream
    ) -> torch.Tensor:
        """The same within a graph: all in the order of the stream, in scratch memory of the graph's, which other operations of
        it use before and after."""
        dense = torch.empty(self.bytes, dtype=torch.uint8, device=self.device.torch)
        part = self.payload
        if part.device.type == "cpu":
            part = torch.empty(part.numel(), dtype=torch.uint8, device=self.device.torch)
            part.copy_(self.payload, non_blocking=True)
        rebuild, memory = self.rebuild(dense, part, stream, keep=False)
        self.captured.append((rebuild, rebuild.capture(self.device.raw, stream.cuda_stream), memory))
        return _compute(x, self.view(dense), bias, cast)


_library: Any = torch.library.Library("tpde", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "linear(Tensor x, Tensor? bias, SymInt handle, SymInt out_features, bool cast=False) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _linear(
    x: torch.Tensor, bias: Optional[torch.Tensor], handle: int, out_features: int, cast: bool = False
) -> torch.Tensor:
    weight = Weight.known.get(handle)
    if weight is None:
        raise Misuse(f"no weight has the handle {handle}: its layer is gone")
    return weight.linear(x, bias, cast)


def _linear_fake(
    x: torch.Tensor, bias: Optional[torch.Tensor], handle: int, out_features: int, cast: bool = False
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


for _key in ("CPU", "CUDA"):
    _library.impl("linear", _linear, _key)
torch.library.register_fake("tpde::linear", _linear_fake)
