"""Weights on CUDA devices, decoded ahead of their use into scratch memory that all weights of a stream share.

State and its invariants: :mod:`tpde.nn._slot`. In addition, for streams and their memory:

7. The memory of a slot is written only on the slot's stream. So work that an interrupted call has queued runs before the next
   filling, and cannot overwrite it.
8. The filling of a slot waits for the slot's last use (event ``used``). Uses wait for the filling (event ``filled``), once per
   filling: all of them are on the prefetcher's stream. Only the last use is recorded: an event takes time.
9. A slot is filled with a *group*: a weight, and those that follow it, as far as slot and buffer have room. A weight joins a group
   only if it followed the one before it in two passes in a row. All are of one model, which raises their error.
10. The first filling of a slot with a weight waits for the work queued on the prefetcher's stream, and for the work queued when
   the weight was created, because its base may still be copied. Base and payload are recorded with the slot's stream, so their
   memory is freed after that stream has read it.
11. Finalizers can run at any point, even while their thread holds the lock. They record deleted weights, and never wait for a
    lock.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch

from .. import _tpde
from .._core.errors import TpdeError
from .._engine.device import Device, DevicePair, copy_on
from .._memory.tensor import Entry, Memory
from ._capture import Capture, captured_linear
from ._rebuilt import ALIGN, Weight, compute
from ._slot import Failures, Ready, Slot

#: Maximum number of other weights' chunks between the chunks of a group. Each of them needs 40 bytes of device memory.
MOST_BETWEEN = 1024

#: Number of passes without groups behind a weight whose successor has changed. A new group needs a new plan, so the order must not
#: depend on the input there, as it does between experts.
PATIENCE = 32


class DeviceSlot(Slot):
    """A slot on a device."""

    def __init__(self, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__(memory)
        #: Stream that fills the slot. No other stream does.
        self.stream = stream
        #: Events after the last filling, and after the last use.
        self.filled, self.used = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        #: Whether there may be a use behind the event ``used``. Set before the use, so that an interruption loses none.
        self.is_used_since = False
        #: Generation of the filling that the prefetcher's stream waits for.
        self.awaited = 0
        #: Decoder into this slot and views of the weights, by the handle of a group's first weight and the number of the payload buffer.
        self.rebuilds: dict[tuple[int, Optional[int]], tuple[_tpde.Rebuild, dict[int, torch.Tensor]]] = {}

    def record_use(self, stream: torch.cuda.Stream) -> None:
        """Records the event ``used`` behind all uses."""
        self.used.record(stream)
        self.is_used_since = False


class _Link(NamedTuple):
    """Successor of a weight in the last pass."""

    handle: int
    #: Above 0 if it was the same in the pass before. After a change it begins at minus ``PATIENCE``.
    repeated: int


class _Launch(NamedTuple):
    """A queued decoding whose status is not known yet."""

    launched: _tpde.Launched
    slot: DeviceSlot
    generation: int
    failures: Failures


class Prefetcher:
    """Scratch memory of a stream, which decodes weights ahead of their use.

    It has two slots for groups of weights: one is in use while the other is filled on a side stream. A slot is filled again as soon as
    its last weight has been used. It has two buffers for payloads in pinned memory. Those of a group are copied to the device as soon
    as a buffer is free.
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
        #: Successors of weights, by handle.
        self.next: dict[int, _Link] = {}
        self.last: int | None = None
        #: Handles of the weights of each group, by the first one. A new group ends before the first weight of another one, so passes
        #: in one order come to have the same groups.
        self.groups: dict[int, list[int]] = {}
        #: Weights of a group whose payloads were copied together. Key: the first one of the group copied before.
        self.next_copied: dict[int, tuple[int, ...]] = {}
        self.last_copied: int | None = None
        #: The first weight of the payloads that were copied last.
        self.queued: int | None = None
        self.pending: deque[_Launch] = deque()
        self.capture: Capture | None = None
        #: Handles of deleted weights.
        self.gone: deque[int] = deque()

    @classmethod
    def current(cls, device: Device) -> Prefetcher:
        """Returns the prefetcher of the current stream."""
        return cls._made.get((device.torch, device.current())) or cls.of(device, device.stream())

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
                for key, (_, views) in list(slot.rebuilds.items()):
                    if handle in views:
                        slot.rebuilds.pop(key, None)
            self.groups.clear()
            self.next.pop(handle, None)
            self.next_copied.pop(handle, None)
            if self.last == handle:
                self.last = None
            if self.last_copied == handle:
                self.last_copied = None
            if self.queued == handle:
                self.queued = None

    def settle(self, wait: bool = False) -> None:
        """Records the errors of completed decodings for the models of their weights. With ``wait``, waits for all decodings."""
        with self.lock:
            self._drop_gone()
            self._settle(wait)

    def _settle(self, wait: bool = False) -> None:
        while self.pending:
            launch = self.pending[0]
            try:
                if wait:
                    launch.launched.wait()
                elif not launch.launched.is_done():
                    return
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
        self.groups.clear()  # they may not fit any more
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

    def _copy(self, copied: list[DeviceWeight], buffer: DeviceSlot) -> None:
        """Queues the copies of payloads into a buffer."""
        generation = buffer.begin()
        self.copying.wait_event(buffer.used)
        parts = list(parts_of(buffer.memory, [weight.payload.numel() for weight in copied]))
        for weight, part in zip(copied, parts):
            copy_on(self.copying, part, weight.payload)
        buffer.filled.record(self.copying)
        buffer.publish(generation, {weight.handle: part for weight, part in zip(copied, parts)})
        self.queued = copied[0].handle

    def _payloads(self, copied: list[DeviceWeight]) -> int:
        """Returns the number of the buffer with these payloads. Queues copies if they were not prefetched together."""
        handles = tuple(weight.handle for weight in copied)
        number = next((number for number, buffer in enumerate(self.buffers) if _has(buffer, handles)), None)
        found = None if number is None else self.buffers[number].state
        for buffer in self.buffers:
            # Payloads are prefetched in the order of the last pass. If others were copied before these, that order has changed, and
            # they will not be used.
            state = buffer.state
            if isinstance(state, Ready) and not (isinstance(found, Ready) and state.generation >= found.generation):
                buffer.clear()
        if number is None:
            number = 0
            self._copy(copied, self.buffers[number])
        if self.last_copied is not None:
            self.next_copied[self.last_copied] = handles
        self.last_copied = handles[0]
        return number

    def _copy_ahead(self) -> None:
        """Fills free buffers with the next payloads of the last pass."""
        for buffer in self.buffers:
            following = self.next_copied.get(self.queued or 0)
            if following is None or not buffer.is_free or any(_has(other, following) for other in self.buffers):
                continue
            copied = [weight for handle in following if (weight := self._known(handle)) is not None]
            # Larger weights may have been attached since the buffers were allocated.
            if len(copied) == len(following) and ends([one.payload.numel() for one in copied])[-1] <= buffer.memory.numel():
                self._copy(copied, buffer)

    def _known(self, handle: int | None) -> DeviceWeight | None:
        """Returns the weight, or None if it was deleted."""
        weight = Weight.known.get(handle or 0)
        return weight if isinstance(weight, DeviceWeight) and weight.device is self.device else None

    def _group(self, first: DeviceWeight) -> list[DeviceWeight]:
        """Returns the group of a weight: the weight, and those behind it that are decoded with it. May replace all slots."""
        handles = self.groups.get(first.handle)
        if handles is not None and self.slots:
            group = [first, *(weight for handle in handles[1:] if (weight := self._known(handle)) is not None)]
            if len(group) == len(handles):
                return group
        self._reserve(first)
        group = [first]
        while (link := self.next.get(group[-1].handle)) is not None and link.repeated > 0:
            following = self._known(link.handle)
            if following is None or following.handle in self.groups or not self._fits([*group, following]):
                self.groups[first.handle] = [weight.handle for weight in group]
                break
            group.append(following)
        return group

    def _fits(self, group: list[DeviceWeight]) -> bool:
        """Whether these weights can be decoded together, and slots and buffers have room for them."""
        first, last = group[0], group[-1]
        if last in group[:-1] or last.on_device is not first.on_device or last.failures is not first.failures:
            return False
        held: dict[str, int] = {}
        for weight in group:
            for (name, _, _), base in zip(weight.entry.bases, weight.bases):
                if held.setdefault(name, base.data_ptr()) != base.data_ptr():
                    return False  # a plan has one base of a name
        span = max(weight.chunks.stop for weight in group) - min(weight.chunks.start for weight in group)
        copied = [weight.payload.numel() for weight in group if weight.is_copied]
        return (
            span - sum(len(weight.chunks) for weight in group) <= MOST_BETWEEN
            and ends([weight.bytes for weight in group])[-1] <= self.slots[0].memory.numel()
            and (not copied or ends(copied)[-1] <= self.buffers[0].memory.numel())
        )

    def _rebuild(
        self, group: list[DeviceWeight], slot: DeviceSlot, number: int | None
    ) -> tuple[_tpde.Rebuild, dict[int, torch.Tensor]]:
        """Returns the decoder of a group into a slot, and the views of its weights. The decoder reads payloads, or the buffer."""
        key, handles = (group[0].handle, number), [weight.handle for weight in group]
        found = slot.rebuilds.get(key)
        if found is None or list(found[1]) != handles:
            for weight in group:
                weight.begin_on(slot.stream, self.stream)
            dense = list(parts_of(slot.memory, [weight.bytes for weight in group]))
            copied = [weight.payload.numel() for weight in group if weight.is_copied]
            copies = iter(() if number is None else parts_of(self.buffers[number].memory, copied))
            payloads = [next(copies) if weight.is_copied else weight.payload for weight in group]
            with torch.inference_mode(False):
                rebuild = rebuild_of(group, dense, payloads, slot.stream)[0]
                found = rebuild, {weight.handle: weight.view(part) for weight, part in zip(group, dense)}
            slot.rebuilds[key] = found
        return found

    def _fill(self, group: list[DeviceWeight], slot: DeviceSlot) -> None:
        """Queues the decoding of a group into a slot."""
        self._settle()
        generation = slot.begin()
        copied = [weight for weight in group if weight.is_copied]
        number = self._payloads(copied) if copied else None
        rebuild, views = self._rebuild(group, slot, number)
        buffer = None if number is None else self.buffers[number]
        if buffer is not None:
            slot.stream.wait_event(buffer.filled)
        if slot.is_used_since:
            slot.record_use(self.stream)
        slot.stream.wait_event(slot.used)
        launched = rebuild.launch(self.device.raw, slot.stream.cuda_stream)
        slot.filled.record(slot.stream)
        if buffer is not None:
            buffer.used.record(slot.stream)
            buffer.clear()
        # Appended after the events were recorded. If a call is interrupted before that, its decoding may be invalid without an
        # error of the pair, and must not be reported.
        self.pending.append(_Launch(launched, slot, generation, group[0].failures))
        slot.publish(generation, views)
        if buffer is not None:
            self._copy_ahead()

    def _holding(self, handle: int) -> DeviceSlot | None:
        """Returns the slot that contains this weight."""
        for slot in self.slots:
            if slot.holding(handle) is not None:
                return slot
        return None

    def _prefetch(self, after: DeviceWeight, used: DeviceSlot) -> None:
        """Starts to decode the next groups of the last pass: into the other slot, and into this one if it is free."""
        number, state = self.slots.index(used), used.state
        last = [*state.views][-1] if isinstance(state, Ready) else after.handle
        for into in (1 - number, number):
            link = self.next.get(last)
            # Two groups ahead is further than a guess is good for.
            if link is None or (into == number and (not self.slots[into].is_free or link.repeated <= 0)):
                return
            slot = self._holding(link.handle)
            if slot is None:
                following = self._known(link.handle)
                if following is None:
                    return
                group = self._group(following)  # may make new slots
                slot = self.slots[into]
                self._fill(group, slot)
            elif slot is not self.slots[into]:
                return
            state = slot.state
            if not isinstance(state, Ready):
                return
            last = [*state.views][-1]

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
        if self.gone:
            self._drop_gone()
        weight.failures.throw()
        handle = weight.handle
        slot = self._holding(handle)
        if slot is None:
            group = self._group(weight)
            slot = next((slot for slot in self.slots if slot.is_free), self.slots[0])
            self._fill(group, slot)
        ready = slot.holding(handle)
        assert ready is not None
        if slot.awaited != ready.generation:
            self.stream.wait_event(slot.filled)
            slot.awaited = ready.generation
        slot.is_used_since = True
        y = compute(x, ready.views[handle], bias, cast)
        if len(ready.views) == 1:
            slot.record_use(self.stream)
        slot.drop(handle)
        self._follow(handle)
        try:
            self._prefetch(weight, slot)
        except (TpdeError, torch.OutOfMemoryError):
            # The output is complete. The call of the next weight's layer raises this error.
            pass
        return y

    def _follow(self, handle: int) -> None:
        """Notes that this weight was used after the last one."""
        last, self.last = self.last, handle
        if last is None:
            return
        link = self.next.get(last)
        if link is None:
            self.next[last] = _Link(handle, 0)
        elif link.handle != handle:
            if link.repeated > 0:
                self.groups.clear()
            self.next[last] = _Link(handle, -PATIENCE)
        elif link.repeated <= 0:
            self.next[last] = _Link(handle, link.repeated + 1)


def ends(sizes: list[int]) -> list[int]:
    """Ends of parts of these sizes in bytes, which lie one behind the other and begin at multiples of ``ALIGN``."""
    found, end = [], 0
    for size in sizes:
        end = -(-end // ALIGN) * ALIGN + size
        found.append(end)
    return found


def parts_of(memory: torch.Tensor, sizes: list[int]) -> Iterator[torch.Tensor]:
    """Parts of these sizes in bytes. Their ends are those of :func:`ends`."""
    return (memory[end - size : end] for end, size in zip(ends(sizes), sizes))


def _has(buffer: DeviceSlot, handles: tuple[int, ...]) -> bool:
    """Whether the buffer contains the payloads of these weights and no others."""
    state = buffer.state
    return isinstance(state, Ready) and tuple(state.views) == handles


class DeviceWeight(Weight):
    """A weight on a CUDA device."""

    def __init__(
        self,
        on_device: DevicePair,
        entry: Entry,
        base: list[torch.Tensor],
        payload: torch.Tensor,
        start: int,
        chunks: range,
        failures: Failures | None = None,
    ) -> None:
        super().__init__(on_device._pair, entry, base, failures)
        self.on_device = on_device
        self.device = on_device._device
        self.torch_device = self.device.torch
        #: Bytes of the blob from ``start`` on, in device memory or pinned memory.
        self.payload = payload
        self.is_copied = payload.device.type == "cpu" and payload.numel() > 0
        self.start = start
        #: Chunks of the weight in the index.
        self.chunks = chunks
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
        """As :func:`rebuild_of`, for this weight alone."""
        return rebuild_of([self], [dense], [part], stream)

    def check(self) -> None:
        self.rebuilt()

    def rebuilt(self) -> torch.Tensor:
        own = torch.empty(self.bytes, dtype=torch.uint8, device=self.torch_device)
        self.on_device._apply([self.memory(own)], self.base_memory(), "out_of_place", None)
        return self.view(own)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
        return Prefetcher.current(self.device).linear(self, x, bias, cast, self.device.is_capturing())


def rebuild_of(
    group: list[DeviceWeight], dense: list[torch.Tensor], payloads: list[torch.Tensor], stream: torch.cuda.Stream
) -> tuple[_tpde.Rebuild, torch.Tensor]:
    """Returns a decoder of weights of one pair from their payloads into ``dense``, and the decoder's working memory.

    The decoder has no references to ``payloads``, ``dense`` and the bases. The caller must keep them while the decoder runs.
    """
    on_device, device = group[0].on_device, group[0].device
    outputs = [_unowned(weight.memory(part)) for weight, part in zip(group, dense)]
    bases = {memory[0]: _unowned(memory) for weight in group for memory in weight.base_memory()}
    parts = [(weight.start, _unowned(_bytes_of(part))) for weight, part in zip(group, payloads)]
    plan = on_device._raw.plan(outputs, list(bases.values()), parts)
    memory = device.memory(plan.bytes(), "decoding a weight")
    for used in (memory, on_device._index):
        used.record_stream(stream)
    return plan.prepare(_bytes_of(memory)), memory


def _bytes_of(memory: torch.Tensor) -> Memory:
    return "", "U8", [memory.numel()], memory.data_ptr(), memory.numel(), memory


def _unowned(memory: Memory) -> Memory:
    return (*memory[:5], None)
