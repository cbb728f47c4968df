"""Weights that are rebuilt when they are used, the scratch memory that they share, and the operator that uses them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from typing import Any, Optional, TypeGuard

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


class _Room:
    """Memory of the device for a payload that is copied, before it is decoded from there."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        #: The weight whose payload is or will be there, and not decoded yet.
        self.holds: int | None = None
        #: Behind the copying, and behind the decoding.
        self.copied, self.decoded = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]


class _Slot:
    """Scratch memory for a weight, and what is known of it."""

    def __init__(self, decoding: torch.cuda.Stream) -> None:
        self.dense: torch.Tensor | None = None
        #: Outside of graphs each slot decodes on a stream of its own: the next weight begins where the last blocks of one leave room.
        self.decoding = decoding
        #: The weight that is or will be there, and not used yet.
        self.holds: int | None = None
        #: Behind the decoding of a weight, and behind its last use.
        self.ready, self.used = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        #: What fills it with a weight, by its handle and the room its payload is copied to; and the weight in it.
        self.rebuilds: dict[tuple[int, int | None], tuple[_tpde.Rebuild, torch.Tensor]] = {}
        self.weight: torch.Tensor | None = None


class _Capture:
    """What a graph that is being captured has of its own: memory of its pool, and where in the graph it is free again."""

    #: A third one makes a graph 2.5 % faster, and takes the place of weights that could be dense.
    SLOTS = 2

    def __init__(self, weight: DeviceWeight, begin: torch.cuda.Event) -> None:
        dense, payload = weight.largest()
        device = weight.device.torch
        self.slots = [torch.empty(dense, dtype=torch.uint8, device=device) for _ in range(self.SLOTS)]
        self.rooms = [torch.empty(payload, dtype=torch.uint8, device=device) for _ in range(2)] if payload else []
        #: Of each slot, behind the last use of what lay there before, and of what lies there; of each room, behind the decoding.
        self.free, self.used, self.decoded = [begin] * self.SLOTS, [begin] * self.SLOTS, [begin] * 2
        self.slot = self.filled = 0
        self.count = self.copies = 0

    def lay(self, bytes: int) -> torch.Tensor:
        """Memory for the next weight, free behind ``free[slot]``. Weights that are used one after the other lie so, as many as the
        slot has room for: small ones alone would not fill the device. Then it is the next slot's turn."""
        if self.filled + bytes > self.slots[self.slot].numel():
            self.slot, self.filled = (self.slot + 1) % self.SLOTS, 0
            self.free[self.slot] = self.used[self.slot]
        begin = self.filled
        self.filled += -(-bytes // ALIGN) * ALIGN
        return self.slots[self.slot][begin : begin + bytes]


class Arena:
    """The scratch memory of a stream: two slots for weights, one in use while the other is filled on streams beside it, and two
    rooms for payloads that are copied, as far ahead as they are free."""

    _made: dict[tuple[torch.device, int], Arena] = {}

    def __init__(self, device: Device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.stream = stream
        self.copying: torch.cuda.Stream = torch.cuda.Stream(device.torch)  # type: ignore[no-untyped-call]
        #: A slot has one of them; weights of a graph take turns on all.
        self.decoding: list[torch.cuda.Stream] = [torch.cuda.Stream(device.torch) for _ in range(4)]  # type: ignore[no-untyped-call]
        self.slots = [_Slot(decoding) for decoding in self.decoding[:2]]
        self.rooms = [_Room() for _ in range(2)]
        self.lock = threading.RLock()
        #: Which weight was used after which, the last time; and of those that are copied, which was copied after which.
        self.next: dict[int, int] = {}
        self.next_copied: dict[int, int] = {}
        self.last: int | None = None
        self.last_copied: int | None = None
        #: The weight whose payload was copied last.
        self.queued: int | None = None
        self.pending: deque[_tpde.Launched] = deque()
        self.capture: _Capture | None = None

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
                        for room in (None, *range(len(arena.rooms))):
                            slot.rebuilds.pop((handle, room), None)
                if not alive:
                    cls._made.pop(key, None)

    def settle(self, wait: bool = False) -> None:
        """Raises what was wrong with decodings that have passed, or with all of them."""
        with self.lock:
            while self.pending and (wait or self.pending[0].is_done()):
                self.pending.popleft().wait()

    def release(self) -> None:
        """Gives all memory back; what was foreseen is decoded again."""
        with self.lock:
            try:
                self.settle(wait=True)
            finally:
                self._let_go()
                self.capture = None

    def _let_go(self) -> None:
        for slot in self.slots:
            slot.rebuilds.clear()
            slot.dense = slot.weight = slot.holds = None
        for room in self.rooms:
            room.memory = room.holds = None

    def _see_to_memory(self, weight: DeviceWeight) -> None:
        """Sees to it that slots and rooms are large enough for all weights of the device."""
        dense, payload = weight.largest()
        large = [slot.dense is not None and slot.dense.numel() >= dense for slot in self.slots]
        large += [payload == 0 or (room.memory is not None and room.memory.numel() >= payload) for room in self.rooms]
        if all(large):
            return
        self._let_go()
        beside = [self.copying, *(slot.decoding for slot in self.slots)]
        # Made in the order of the stream, so the others begin behind what it still does with that memory.
        with torch.inference_mode(False):
            for slot in self.slots:
                slot.dense = torch.empty(dense, dtype=torch.uint8, device=self.device.torch)
            for room in self.rooms if payload else ():
                room.memory = torch.empty(payload, dtype=torch.uint8, device=self.device.torch)
        for stream in beside:
            stream.wait_stream(self.stream)
            for made in [slot.dense for slot in self.slots] + [room.memory for room in self.rooms]:
                if made is not None:
                    made.record_stream(stream)

    def _copy(self, weight: DeviceWeight, room: _Room) -> None:
        """Queues the copying of a payload."""
        assert room.memory is not None
        self.copying.wait_event(room.decoded)  # what was decoded from there
        with torch.cuda.stream(self.copying):
            room.memory[: weight.payload.numel()].copy_(weight.payload, non_blocking=True)
        room.copied.record(self.copying)
        room.holds = self.queued = weight.handle

    def _room_of(self, weight: DeviceWeight) -> int:
        """The room that has the weight's payload, or will have: copied before where it was foreseen."""
        place = next((place for place, room in enumerate(self.rooms) if room.holds == weight.handle), None)
        if place is None:
            # Another order than the last time: nothing that was foreseen is of use.
            for room in self.rooms:
                room.holds = None
            place = 0
            self._copy(weight, self.rooms[place])
        if self.last_copied is not None:
            self.next_copied[self.last_copied] = weight.handle
        self.last_copied = weight.handle
        return place

    def _foresee_copies(self) -> None:
        """Fills the rooms that are free with what was copied next the last time."""
        for room in self.rooms:
            following = Weight.known.get(self.next_copied.get(self.queued or 0, 0))
            if room.holds is not None or not self._is_here(following) or any(other.holds == following.handle for other in self.rooms):
                continue
            self._copy(following, room)

    def _is_here(self, weight: Weight | None) -> TypeGuard[DeviceWeight]:
        return isinstance(weight, DeviceWeight) and weight.device is self.device

    def fill(self, weight: DeviceWeight, slot: _Slot) -> None:
        """Queues the decoding of a weight into a slot."""
        self._see_to_memory(weight)
        place = self._room_of(weight) if weight.is_copied else None
        filling = slot.rebuilds.get((weight.handle, place))
        if filling is None:
            assert slot.dense is not None
            room = None if place is None else self.rooms[place].memory
            part = weight.payload if room is None else room[: weight.payload.numel()]
            with torch.inference_mode(False):
                filling = weight.rebuild(slot.dense, part, slot.decoding)[0], weight.view(slot.dense)
            slot.rebuilds[weight.handle, place] = filling
        rebuild, slot.weight = filling
        if place is not None:
            slot.decoding.wait_event(self.rooms[place].copied)
        slot.decoding.wait_event(slot.used)
        launched = rebuild.launch(self.device.raw, slot.decoding.cuda_stream)
        slot.ready.record(slot.decoding)
        slot.holds = weight.handle
        self.pending.append(launched)
        if place is not None:
            self.rooms[place].decoded.record(slot.decoding)
            self.rooms[place].holds = None
            self._foresee_copies()

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
            assert slot.weight is not None
            y = _compute(x, slot.weight, bias, cast)
            slot.used.record(self.stream)
            slot.holds = None
            if self.last is not None:
                self.next[self.last] = handle
            self.last = handle
            following = Weight.known.get(self.next.get(handle, 0))
            if self._is_here(following) and all(other.holds != following.handle for other in self.slots):
                self.fill(following, next(other for other in self.slots if other is not slot))
            return y

    def captured_linear(self, weight: DeviceWeight, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        """The same within a graph, in memory of the graph's. What is decoded and copied waits for nothing but its memory, so that
        replays do it as far ahead as that is free; and all of it is waited for here, wherever the graph ends."""
        with self.lock:
            own = self._own_capture(weight)
            dense, slot = own.lay(weight.bytes), own.slot
            decoding, own.count = self.decoding[own.count % len(self.decoding)], own.count + 1
            decoding.wait_event(own.free[slot])
            part, room = weight.payload, own.copies % 2
            if weight.is_copied:
                own.copies += 1
                part = own.rooms[room][: weight.payload.numel()]
                self.copying.wait_event(own.decoded[room])
                with torch.cuda.stream(self.copying):
                    part.copy_(weight.payload, non_blocking=True)
                decoding.wait_event(_event_on(self.copying))
            rebuild, memory = weight.rebuild(dense, part, decoding, keep=False)
            weight.captured.append((rebuild, rebuild.capture(self.device.raw, decoding.cuda_stream), memory))
            ready = _event_on(decoding)
            if weight.is_copied:
                own.decoded[room] = ready
            self.stream.wait_event(ready)
            y = _compute(x, weight.view(dense), bias, cast)
            own.used[slot] = _event_on(self.stream)
            return y

    def _own_capture(self, weight: DeviceWeight) -> _Capture:
        """What the graph has that is being captured; made by its first layer, which finds the streams beside outside of it."""
        with torch.cuda.stream(self.decoding[0]):
            begun = torch.cuda.is_current_stream_capturing()
        if self.capture is None or not begun:
            # That of the graph before goes first: graphs may share a pool.
            self.capture = None
            begin = _event_on(self.stream)
            for beside in (self.copying, *self.decoding):
                beside.wait_event(begin)
            self.capture = _Capture(weight, begin)
        return self.capture


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what the stream has so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


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
        arena = Arena.of(self.device, stream)
        return (arena.captured_linear if self.device.is_capturing() else arena.linear)(self, x, bias, cast)


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
