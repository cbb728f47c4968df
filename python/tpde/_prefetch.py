"""Weights on CUDA devices, decoded ahead of their use into scratch memory that all weights of a stream share.

State and its invariants: :mod:`tpde._slot`. In addition, for streams and their memory:

7. The memory of a slot is written only on the slot's stream. So work that an interrupted call has queued runs before the next
   filling, and cannot overwrite it.
8. The filling of a slot waits for the slot's last use (event ``used``). A use waits for the filling (event ``filled``).
9. The first filling of a slot with a weight waits for the work queued on the prefetcher's stream, and for the work queued when
   the weight was created, because its base may still be copied. Base and payload are recorded with the slot's stream, so their
   memory is freed after that stream has read it.
10. Finalizers can run at any point, even while their thread holds the lock. They record deleted weights, and never wait for a
    lock.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Optional

import torch

from . import _tpde
from ._capture import Capture, captured_linear
from ._device import Device, DevicePair, copy_on
from ._entry import Entry
from ._errors import TpdeError
from ._rebuilt import Weight, compute
from ._slot import Failures, Slot
from ._tensor import Memory


class DeviceSlot(Slot):
    """A slot on a device."""

    def __init__(self, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__(memory)
        #: Stream that fills the slot. No other stream does.
        self.stream = stream
        #: Events after the last filling, and after the last use.
        self.filled, self.used = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        #: Decoder into this slot and view of the weight, by the weight's handle and the number of the payload buffer.
        self.rebuilds: dict[tuple[int, Optional[int]], tuple[_tpde.Rebuild, torch.Tensor]] = {}


@dataclass(frozen=True)
class _Launch:
    """A queued decoding whose status is not known yet."""

    launched: _tpde.Launched
    slot: DeviceSlot
    generation: int
    failures: Failures


class Prefetcher:
    """Scratch memory of a stream, which decodes weights ahead of their use.

    It has two slots for weights: one is in use while the other is filled on a side stream. It has two buffers for payloads in
    pinned memory. A payload is copied to the device as soon as a buffer is free.
    """

    _made: dict[tuple[torch.device, int], Prefetcher] = {}
    #: Reentrant, because a signal handler that interrupts the creation can call this class.
    _making = threading.RLock()

    def __init__(self, device: Device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.stream = stream
        self.copying: torch.cuda.Stream = torch.cuda.Stream(device.torch)  # type: ignore[no-untyped-call]
        #: Each of the two slots uses one of these streams. The weights of a CUDA graph use all streams in rotation.
        self.decoding: list[torch.cuda.Stream] = [torch.cuda.Stream(device.torch) for _ in range(4)]  # type: ignore[no-untyped-call]
        self.slots: list[DeviceSlot] = []
        self.buffers: list[DeviceSlot] = []
        #: Protects all attributes.
        self.lock = threading.Lock()
        self._owner: int | None = None
        #: Successor of each weight in the last pass, by handle: in order of use, and in order of copies.
        self.next: dict[int, int] = {}
        self.next_copied: dict[int, int] = {}
        self.last: int | None = None
        self.last_copied: int | None = None
        #: Handle of the weight whose payload was copied last.
        self.queued: int | None = None
        self.pending: deque[_Launch] = deque()
        self.capture: Capture | None = None
        #: Handles of deleted weights.
        self.gone: deque[int] = deque()

    @classmethod
    def of(cls, device: Device, stream: torch.cuda.Stream) -> Prefetcher:
        """Returns the prefetcher of a stream. The first call creates it."""
        key = (device.torch, stream.cuda_stream)
        found = cls._made.get(key)
        if found is None:
            with cls._making:
                found = cls._made.get(key)
                if found is None:
                    made = cls(device, stream)
                    found = cls._made.setdefault(key, made)
        return found

    @classmethod
    def on(cls, device: torch.device) -> list[Prefetcher]:
        """Returns the prefetchers of all streams of a device."""
        return [prefetcher for (where, _), prefetcher in list(cls._made.items()) if where == device]

    @classmethod
    def forget(cls, device: torch.device, handle: int) -> None:
        """Releases the data of a deleted weight, and all scratch memory if it was the last weight. Called by finalizers."""
        DeviceWeight._largest.pop(device, None)
        is_last = not any(one.torch_device == device for one in Weight.alive())
        for key, prefetcher in list(cls._made.items()):
            if key[0] == device:
                prefetcher.gone.append(handle)
                if is_last:
                    cls._made.pop(key, None)

    def _drop_gone(self) -> None:
        """Drops the data of deleted weights."""
        while self.gone:
            handle = self.gone.popleft()
            for slot in self.slots:
                for number in (None, *range(len(self.buffers))):
                    slot.rebuilds.pop((handle, number), None)
            for following in (self.next, self.next_copied):
                following.pop(handle, None)

    def settle(self, wait: bool = False) -> None:
        """Records the errors of completed decodings for the models of their weights. With ``wait``, waits for all decodings."""
        with self.lock:
            self._drop_gone()
            self._settle(wait)

    def _settle(self, wait: bool = False) -> None:
        while self.pending:
            launch = self.pending[0]
            try:
                if not (wait or launch.launched.is_done()):
                    return
                launch.launched.wait()
            except TpdeError as error:  # not an exception of a signal handler
                launch.slot.fail(launch.generation, error)
                launch.failures.add(launch.generation, error)
            self.pending.popleft()

    def release(self) -> None:
        """Frees all memory after queued work has completed. Prefetched weights are discarded, and decoded again on their use."""
        with self.lock:
            self._settle(wait=True)
            self.slots, self.buffers, self.capture = [], [], None

    def _reserve(self, weight: DeviceWeight) -> None:
        """Makes slots and buffers large enough for this weight and all others of the device."""
        dense, payload = weight.largest()
        has_slots = bool(self.slots) and self.slots[0].memory.numel() >= dense
        has_buffers = payload == 0 or (bool(self.buffers) and self.buffers[0].memory.numel() >= payload)
        if has_slots and has_buffers:
            return
        self.slots, self.buffers = [], []
        # The memory is allocated in stream order. Side streams wait for the stream's earlier uses of this memory.
        slots = [self._slot(dense, stream) for stream in self.decoding[:2]]
        buffers = [self._slot(payload, self.copying) for _ in range(2)] if payload else []
        for buffer in buffers:
            for slot in slots:
                buffer.memory.record_stream(slot.stream)
        self.slots, self.buffers = slots, buffers

    def _slot(self, bytes: int, stream: torch.cuda.Stream) -> DeviceSlot:
        with torch.inference_mode(False):
            memory = torch.empty(bytes, dtype=torch.uint8, device=self.device.torch)
        stream.wait_stream(self.stream)
        memory.record_stream(stream)
        return DeviceSlot(memory, stream)

    def _copy(self, weight: DeviceWeight, buffer: DeviceSlot) -> None:
        """Queues the copy of a payload into a buffer."""
        generation = buffer.begin()
        self.copying.wait_event(buffer.used)
        part = buffer.memory[: weight.payload.numel()]
        copy_on(self.copying, part, weight.payload)
        buffer.filled.record(self.copying)
        buffer.publish(weight.handle, generation, part)
        self.queued = weight.handle

    def _payload(self, weight: DeviceWeight) -> int:
        """Returns the number of the buffer with the weight's payload. Queues a copy if the payload was not prefetched."""
        number = next((number for number, buffer in enumerate(self.buffers) if buffer.holding(weight.handle)), None)
        if number is None:
            # The order of weights differs from the last pass, so the prefetched payloads will not be used.
            for buffer in self.buffers:
                buffer.clear()
            number = 0
            self._copy(weight, self.buffers[number])
        if self.last_copied is not None:
            self.next_copied[self.last_copied] = weight.handle
        self.last_copied = weight.handle
        return number

    def _copy_ahead(self) -> None:
        """Fills free buffers with the next payloads of the last pass."""
        for buffer in self.buffers:
            following = self._known(self.next_copied.get(self.queued or 0), buffer.memory.numel())
            if following is None or not buffer.is_free or any(other.holding(following.handle) for other in self.buffers):
                continue
            self._copy(following, buffer)

    def _known(self, handle: int | None, capacity: float = math.inf) -> DeviceWeight | None:
        """Returns the weight, or None if it was deleted or its payload does not fit.

        Larger weights may have been attached since the buffers were allocated.
        """
        weight = Weight.known.get(handle or 0)
        if isinstance(weight, DeviceWeight) and weight.device is self.device and weight.payload.numel() <= capacity:
            return weight
        return None

    def _rebuild(self, weight: DeviceWeight, slot: DeviceSlot, number: int | None) -> tuple[_tpde.Rebuild, torch.Tensor]:
        """Returns the decoder of a weight into a slot, and the view of the weight. The decoder reads the payload or a buffer."""
        found = slot.rebuilds.get((weight.handle, number))
        if found is None:
            part = weight.payload if number is None else self.buffers[number].memory[: weight.payload.numel()]
            weight.begin_on(slot.stream, self.stream)
            with torch.inference_mode(False):
                found = weight.rebuild(slot.memory, part, slot.stream)[0], weight.view(slot.memory)
            slot.rebuilds[weight.handle, number] = found
        return found

    def _fill(self, weight: DeviceWeight, slot: DeviceSlot) -> None:
        """Queues the decoding of a weight into a slot."""
        generation = slot.begin()
        number = self._payload(weight) if weight.is_copied else None
        rebuild, view = self._rebuild(weight, slot, number)
        buffer = None if number is None else self.buffers[number]
        if buffer is not None:
            slot.stream.wait_event(buffer.filled)
        slot.stream.wait_event(slot.used)
        launched = rebuild.launch(self.device.raw, slot.stream.cuda_stream)
        slot.filled.record(slot.stream)
        if buffer is not None:
            buffer.used.record(slot.stream)
            buffer.clear()
        # Appended after the events were recorded. If a call is interrupted before that, its decoding may be invalid without an
        # error of the pair, and must not be reported.
        self.pending.append(_Launch(launched, slot, generation, weight.failures))
        slot.publish(weight.handle, generation, view)
        if buffer is not None:
            self._copy_ahead()

    def _prefetch(self, after: DeviceWeight, used: DeviceSlot) -> None:
        """Starts to decode the weight that followed in the last pass."""
        following = self._known(self.next.get(after.handle))
        if following is None or any(slot.holding(following.handle) for slot in self.slots):
            return
        self._reserve(following)
        self._fill(following, next(slot for slot in self.slots if slot is not used))

    def linear(
        self, weight: DeviceWeight, x: torch.Tensor, bias: torch.Tensor | None, cast: bool, captured: bool = False
    ) -> torch.Tensor:
        """Returns a layer's output. Uses the prefetched weight if it is this one, then prefetches the next weight."""
        thread = threading.get_ident()
        if self._owner == thread and self.lock.locked():
            # A nested call, by a signal handler or by a mode that observes the computation. It must not change any state.
            return compute(x, weight.rebuilt(), bias, cast)
        with self.lock:
            self._owner = thread
            try:
                return captured_linear(self, weight, x, bias, cast) if captured else self._linear(weight, x, bias, cast)
            finally:
                self._owner = None

    def _linear(self, weight: DeviceWeight, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        self._drop_gone()
        self._settle()
        weight.failures.throw()
        handle = weight.handle
        slot = next((slot for slot in self.slots if slot.holding(handle)), None)
        if slot is None:
            self._reserve(weight)
            slot = next((slot for slot in self.slots if slot.is_free), self.slots[0])
            self._fill(weight, slot)
        ready = slot.holding(handle)
        assert ready is not None
        self.stream.wait_event(slot.filled)
        y = compute(x, ready.view, bias, cast)
        slot.used.record(self.stream)
        slot.clear()
        if self.last is not None:
            self.next[self.last] = handle
        self.last = handle
        try:
            self._prefetch(weight, slot)
        except (TpdeError, torch.OutOfMemoryError):
            # The output is complete. The call of the next weight's layer raises this error.
            pass
        return y


class DeviceWeight(Weight):
    """A weight on a CUDA device."""

    def __init__(
        self,
        on_device: DevicePair,
        entry: Entry,
        base: list[torch.Tensor],
        payload: torch.Tensor,
        start: int,
        failures: Failures | None = None,
    ) -> None:
        super().__init__(on_device._pair, entry, base, failures)
        self.on_device = on_device
        self.device = on_device._device
        self.torch_device = self.device.torch
        #: Bytes of the blob from ``start`` on, in device memory or pinned memory.
        self.payload = payload
        self.is_copied = payload.device.type == "cpu"
        self.start = start
        #: Event on the creating stream, on which copies of base and payload may still be queued.
        self.made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.made.record(self.device.stream())
        weakref.finalize(self, Prefetcher.forget, self.torch_device, self.handle).atexit = False

    #: Cached results of ``largest``, by device.
    _largest: dict[torch.device, tuple[int, int]] = {}

    def register(self) -> None:
        super().register()
        self._largest.pop(self.torch_device, None)

    def largest(self) -> tuple[int, int]:
        """Returns the sizes in bytes of the device's largest weight and of the largest payload that is copied."""
        found = self._largest.get(self.torch_device)
        if found is None:
            alive = [one for one in self.alive() if isinstance(one, DeviceWeight) and one.device is self.device]
            copied = max((one.payload.numel() for one in alive if one.is_copied), default=0)
            found = self._largest[self.torch_device] = max((one.bytes for one in alive), default=0), copied
        # Another thread may have created a weight during the search.
        return max(found[0], self.bytes), max(found[1], self.payload.numel() if self.is_copied else 0)

    def begin_on(self, stream: torch.cuda.Stream, behind: torch.cuda.Stream) -> None:
        """Prepares the first decoding of the weight on a stream.

        The stream waits for base and payload. Their memory is not reused before the stream has read it.
        """
        stream.wait_stream(behind)
        stream.wait_event(self.made)
        for read in (*self.bases, self.payload):
            if read.device == self.torch_device:
                read.record_stream(stream)

    def rebuild(self, dense: torch.Tensor, part: torch.Tensor, stream: torch.cuda.Stream) -> tuple[_tpde.Rebuild, torch.Tensor]:
        """Returns a decoder of the weight from ``part`` into ``dense``, and the decoder's working memory.

        The decoder has no references to ``part``, ``dense`` and the base. The caller must keep them while the decoder runs.
        """
        output, base = self._unowned(self.memory(dense)), list(map(self._unowned, self.base_memory()))
        payload: Memory = ("", "U8", [part.numel()], part.data_ptr(), part.numel(), None)
        plan = self.on_device._raw.plan(output, base, self.start, payload)
        memory = self.device.memory(plan.bytes(), "decoding a weight")
        for used in (memory, self.on_device._index):
            used.record_stream(stream)
        return plan.prepare(("", "U8", [memory.numel()], memory.data_ptr(), memory.numel(), memory)), memory

    @staticmethod
    def _unowned(memory: Memory) -> Memory:
        return (*memory[:5], None)

    def check(self) -> None:
        self.rebuilt()

    def rebuilt(self) -> torch.Tensor:
        own = torch.empty(self.bytes, dtype=torch.uint8, device=self.torch_device)
        self.on_device._rebuild([self.memory(own)], self.base_memory(), None)
        return self.view(own)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        return Prefetcher.of(self.device, self.device.stream()).linear(self, x, bias, cast, self.device.is_capturing())
