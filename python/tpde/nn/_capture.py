"""Layers in CUDA graphs. Every replay of a graph decodes their weights, in memory of the graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from .. import _tpde
from .._engine.device import Device, copy_on
from ._rebuilt import ALIGN, compute


class GraphWeight(Protocol):
    """Interface of a weight on a device, as graphs use it."""

    torch_device: torch.device
    bytes: int
    payload: torch.Tensor
    is_copied: bool

    @property
    def handle(self) -> int: ...
    def largest(self) -> tuple[int, int]: ...
    def view(self, dense: torch.Tensor) -> torch.Tensor: ...
    def rebuild(self, dense: torch.Tensor, part: torch.Tensor, stream: torch.cuda.Stream) -> tuple[_tpde.Rebuild, torch.Tensor]: ...


class Streams(Protocol):
    """A stream, its side streams, and its current capture."""

    device: Device
    stream: torch.cuda.Stream
    copying: torch.cuda.Stream
    decoding: list[torch.cuda.Stream]
    capture: Capture | None


class Graph:
    """Objects that a graph refers to. They are kept until the graph is destroyed, even if the model is deleted earlier."""

    _kept: dict[int, Graph] = {}

    def __init__(self, raw: _tpde.Graph) -> None:
        self.raw = raw
        self.used: list[tuple[GraphWeight, _tpde.Rebuild, _tpde.Captured, torch.Tensor]] = []
        self._kept[id(self)] = self

    def raise_error(self) -> None:
        """Raises an error of the last replay, if there is one. The replay must have completed."""
        for _, _, captured, _ in list(self.used):
            captured.check()

    @classmethod
    def prune(cls) -> None:
        """Drops the objects of destroyed graphs."""
        for number, graph in list(cls._kept.items()):
            if graph.raw.is_destroyed():
                cls._kept.pop(number, None)

    @classmethod
    def check(cls, weights: Iterable[GraphWeight]) -> None:
        """Raises an error that one of these weights had in the last replay of a graph, if there is such an error.

        The replay must have completed.
        """
        cls.prune()
        handles = {weight.handle for weight in weights}
        for graph in list(cls._kept.values()):
            for weight, _, captured, _ in list(graph.used):
                if weight.handle in handles:
                    captured.check()


class Capture:
    """State of a graph during its capture: memory from the graph's pool, and the events after which this memory is free."""

    #: Number of slots. A third slot would make a graph 2.5 % faster, but take memory that can hold dense weights instead.
    SLOTS = 2

    def __init__(self, streams: Streams, weight: GraphWeight, number: int) -> None:
        dense, payload = weight.largest()
        device = weight.torch_device
        #: Id of the capture. The driver never reuses ids, unlike handles of streams.
        self.number = number
        self.graph = Graph(streams.device.raw.captured_graph(streams.stream.cuda_stream))
        self.slots = [torch.empty(dense, dtype=torch.uint8, device=device) for _ in range(self.SLOTS)]
        self.buffers = [torch.empty(payload, dtype=torch.uint8, device=device) for _ in range(2)] if payload else []
        self.slot = self.filled = self.count = self.copies = 0
        self.begin(streams)
        #: Whether a call has begun and not ended. If a new call finds this set, the earlier call was interrupted.
        self.is_interrupted = False

    def begin(self, streams: Streams) -> None:
        """Makes the side streams wait for the work captured so far."""
        begin = _event_on(streams.stream)
        for beside in (streams.copying, *streams.decoding):
            beside.wait_event(begin)
        #: Events. ``free``: per slot, after the last use of its previous content. ``used``: per slot, after the last use of its
        #: current content. ``decoded``: per buffer, after the decoding of its payload.
        self.free, self.used, self.decoded = [begin] * self.SLOTS, [begin] * self.SLOTS, [begin] * 2

    def fits(self, weight: GraphWeight) -> bool:
        """Returns whether the memory is large enough for this weight, which may have been attached after the capture began."""
        payload = weight.payload.numel() if weight.is_copied else 0
        return weight.bytes <= self.slots[0].numel() and (payload == 0 or any(payload <= one.numel() for one in self.buffers))

    def recover(self, streams: Streams) -> None:
        """Orders the captured work of an interrupted call before later work. Otherwise it could overwrite later results."""
        for beside in (streams.copying, *streams.decoding):
            streams.stream.wait_event(_event_on(beside))
        self.begin(streams)

    def lay(self, bytes: int) -> torch.Tensor:
        """Returns memory for the next weight. The memory is free after the event ``free[slot]``.

        Consecutive weights share a slot while they fit. Decoding a single small weight would not use the whole device.
        """
        if self.filled + bytes > self.slots[self.slot].numel():
            self.slot, self.filled = (self.slot + 1) % self.SLOTS, 0
            self.free[self.slot] = self.used[self.slot]
        begin = self.filled
        self.filled += -(-bytes // ALIGN) * ALIGN
        return self.slots[self.slot][begin : begin + bytes]


def captured_linear(streams: Streams, weight: GraphWeight, x: torch.Tensor, bias: torch.Tensor | None, cast: bool) -> torch.Tensor:
    """Returns a layer's output within a graph.

    Copies and decodings wait only for free memory, so a replay runs them as early as possible. The captured stream waits for all
    of this work here, so a capture can end after any layer.
    """
    own = _capture(streams, weight)
    own.is_interrupted = True
    dense, slot = own.lay(weight.bytes), own.slot
    decoding, own.count = streams.decoding[own.count % len(streams.decoding)], own.count + 1
    decoding.wait_event(own.free[slot])
    part, number = weight.payload, own.copies % 2
    if weight.is_copied:
        own.copies += 1
        part = own.buffers[number][: weight.payload.numel()]
        streams.copying.wait_event(own.decoded[number])
        copy_on(streams.copying, part, weight.payload)
        decoding.wait_event(_event_on(streams.copying))
    rebuild, memory = weight.rebuild(dense, part, decoding)
    own.graph.used.append((weight, rebuild, rebuild.capture(streams.device.raw, decoding.cuda_stream), memory))
    ready = _event_on(decoding)
    if weight.is_copied:
        own.decoded[number] = ready
    streams.stream.wait_event(ready)
    y = compute(x, weight.view(dense), bias, cast)
    own.used[slot] = _event_on(streams.stream)
    own.is_interrupted = False
    return y


def _capture(streams: Streams, weight: GraphWeight) -> Capture:
    """Returns the state of the current capture. Creates it for the first layer, and again for a weight that does not fit."""
    number = streams.device.raw.capture_id(streams.stream.cuda_stream)
    assert number is not None
    own = streams.capture
    if own is not None and own.number == number:
        if own.is_interrupted:
            own.recover(streams)
        if own.fits(weight):
            return own
    Graph.prune()
    # The previous state is freed first, because graphs can share a memory pool.
    own = streams.capture = None
    own = streams.capture = Capture(streams, weight, number)
    return own


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Returns an event after all work queued on the stream so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
