"""A fake CUDA device for tests of the prefetcher. It detects every missing order between operations.

Operations take effect in host memory when they are queued. Each also gets a vector clock of the operations that it follows by
streams, events and waits of the host. Two accesses to the same memory, one of which writes, must be ordered; if not, a device could
run them in either order, and the world reports a race. Freed memory counts as reused at once, in the order of the main stream and
of the streams that the tensor was recorded with.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
import threading
import weakref
from typing import Any

import pytest
import torch

import tpde
import tpde.nn
from tpde.nn import _capture, _prefetch
from tpde._memory.tensor import Entry

Clock = dict[int, int]
CPU = torch.device("cpu")


def merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


class Call:
    """A call of a layer, as the fake device sees it. An aborted call has no output to compare."""

    def __init__(self) -> None:
        self.aborted = False
        self.outcomes: list[Outcome] = []


class Outcome:
    """The result of one decoding: whether the test damaged it, and whether a race spoilt it."""

    def __init__(self, weight: str, fault: int | None) -> None:
        self.weight, self.fault, self.spoilt = weight, fault, ""


class Access:
    def __init__(self, begin: int, end: int, stream: int, tick: int, writes: bool, by: Any) -> None:
        self.begin, self.end, self.stream, self.tick, self.writes, self.by = begin, end, stream, tick, writes, by


class World:
    """Clocks, memory, and the violations found."""

    def __init__(self, seed: int = 0) -> None:
        #: Guards all attributes below and all clocks, and makes each operation atomic.
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.violations: list[str] = []
        #: Copies, decodings and uses in the order in which they were queued, with the weight's name.
        self.log: list[tuple[str, str]] = []
        #: Names of the weights of each decoding, in order.
        self.launches: list[list[str]] = []
        #: Number of plans that were made.
        self.plans = 0
        self.names: dict[int, str] = {}
        self.host: Clock = {}
        self.accesses: list[Access] = []
        #: Decoded weights by the address of their memory.
        self.contents: dict[int, Outcome] = {}
        #: Source address of each copy, by its destination address.
        self.copied: dict[int, int] = {}
        self.recorded: dict[int, set[FakeStream]] = {}
        self._of_thread = threading.local()
        self.streams: list[FakeStream] = []
        self.captures, self.faults = itertools.count(1), itertools.count(1)
        self._first = FakeStream(self)
        #: Replacements for the package's dicts while this world is its device.
        self.held: tuple[dict[Any, Any], ...] = ({}, {}, {})

    @property
    def main(self) -> FakeStream:
        """The thread's current stream."""
        return getattr(self._of_thread, "stream", self._first)

    def use(self, stream: FakeStream) -> None:
        self._of_thread.stream = stream

    @property
    def call(self) -> Call:
        """The thread's current call of a layer."""
        return getattr(self._of_thread, "call", None) or self.begin_call()

    def begin_call(self) -> Call:
        self._of_thread.call = Call()
        return self._of_thread.call

    def operation(self, stream: FakeStream, accesses: list[tuple[int, int, bool]], by: Any) -> str:
        """Queues an operation. Returns a description of its races; the caller decides whether they are violations."""
        merge(stream.clock, self.host)
        stream.clock[stream.number] = tick = stream.clock.get(stream.number, 0) + 1
        races = ""
        for begin, end, writes in accesses:
            kept = []
            for other in self.accesses:
                meets = other.begin < end and begin < other.end
                is_ordered = stream.clock.get(other.stream, 0) >= other.tick
                if meets and (writes or other.writes) and not is_ordered:
                    races += self.race(other, by)
                if not (meets and writes and is_ordered and begin <= other.begin and other.end <= end):
                    kept.append(other)
            self.accesses = [*kept, Access(begin, end, stream.number, tick, writes, by)]
        return races

    def race(self, earlier: Access, by: Any) -> str:
        """Describes a race; empty if the reader is an aborted call. A decoding that raced must not be used or reported."""
        if isinstance(earlier.by, Call):
            return "" if earlier.by.aborted else f"{by} overwrites what a call still reads; "
        if isinstance(earlier.by, Outcome):
            earlier.by.spoilt = f"{by} raced with it"
        return f"{by} races with {earlier.by}; "

    def allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        with self.lock:
            self.accesses = [other for other in self.accesses if other.end <= begin or end <= other.begin]
            self.contents = {address: outcome for address, outcome in self.contents.items() if not begin <= address < end}
            self.recorded.pop(begin, None)
            self.copied.pop(begin, None)
        if self.main.capture is None:  # else it is in the graph's pool, which only the graph uses
            self.watch(tensor)
        return tensor

    def watch(self, tensor: torch.Tensor) -> None:
        weakref.finalize(tensor, self.freed, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, self.main).atexit = False

    def freed(self, begin: int, end: int, made_on: FakeStream) -> None:
        with self.lock:
            clock = dict(made_on.clock)
            for stream in self.recorded.pop(begin, ()):
                merge(clock, stream.clock)
            for other in self.accesses:
                if begin < other.end and other.begin < end and clock.get(other.stream, 0) < other.tick and not is_aborted(other.by):
                    self.violations.append(f"memory was freed while {other.by} uses it")
            self.accesses = [other for other in self.accesses if other.end <= begin or end <= other.begin]

    def close(self) -> None:
        """Clears the package's dicts. This must happen before their attributes are patched back: when CPython 3.11 replaces a
        class attribute, a finalizer that runs meanwhile gets the old value, which is being freed."""
        for held in self.held:
            held.clear()

    def written(self, tensor: torch.Tensor) -> None:
        """The test writes this tensor on the main stream."""
        with self.lock:
            self.operation(self.main, [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, True)], "a write to a base")


def is_aborted(by: Any) -> bool:
    return isinstance(by, Call) and by.aborted


class FakeStream:
    def __init__(self, world: World) -> None:
        with world.lock:
            world.streams.append(self)
            self.world, self.number, self.clock = world, len(world.streams), {}
        self.cuda_stream = self.number
        self.capture: int | None = None

    @property
    def ticks(self) -> int:
        return self.clock.get(self.number, 0)

    def wait_event(self, event: FakeEvent) -> None:
        with self.world.lock:
            merge(self.clock, event.clock)
            self.capture = event.capture or self.capture

    def wait_stream(self, stream: FakeStream) -> None:
        with self.world.lock:
            merge(self.clock, stream.clock)


class FakeEvent:
    def __init__(self) -> None:
        self.clock: Clock = {}
        self.capture: int | None = None

    def record(self, stream: FakeStream) -> None:
        with stream.world.lock:
            merge(stream.clock, stream.world.host)
            self.clock, self.capture = dict(stream.clock), stream.capture


class FakePair:
    def __init__(self, name: str) -> None:
        self.name = name

    def digest(self) -> bytes:
        return hashlib.sha256(self.name.encode()).digest()


class FakeGraph:
    def __init__(self) -> None:
        self.gone = False

    def is_destroyed(self) -> bool:
        return self.gone


class FakeDevice:
    """Stands in for `_device.Device` and `_tpde.Device`."""

    def __init__(self, world: World) -> None:
        self.world, self.torch, self.raw = world, CPU, self
        self.refuses = 0
        self.graphs: dict[int, FakeGraph] = {}

    def stream(self) -> FakeStream:
        return self.world.main

    def current(self) -> int:
        return self.world.main.cuda_stream

    def is_capturing(self) -> bool:
        return self.world.main.capture is not None

    def capture_id(self, stream: int) -> int | None:
        return self.world.main.capture

    def captured_graph(self, stream: int) -> FakeGraph:
        assert self.world.main.capture is not None
        return self.graphs.setdefault(self.world.main.capture, FakeGraph())

    def memory(self, bytes: int, what: str) -> torch.Tensor:
        if self.refuses:
            self.refuses -= 1
            raise tpde.OutOfMemory("no memory, says the test", tensor=what, bytes=bytes)
        return torch.empty(max(bytes, 1), dtype=torch.uint8)


class FakeModel:
    """Weights on the device. All elements of a weight are the same number, so an output identifies its weight."""

    def __init__(
        self, world: World, device: FakeDevice, name: str, rows: list[int], copied: list[bool], payload: int | list[int] = 16
    ) -> None:
        self.world, self.name, self._device, self._raw = world, name, device, self
        self._pair: Any = FakePair(name)
        self._index = torch.empty(1, dtype=torch.uint8)
        self.failures = tpde.nn._slot.Failures()
        self.values: dict[str, float] = {}
        #: Number of the next decodings that fail, by weight.
        self.damaged: dict[str, int] = {}
        #: Decodings that failed, and whether a layer has used the result.
        self.faults: dict[int, bool] = {}
        #: Thread that first received the error of each failed decoding.
        self.told: dict[int, int] = {}
        self.payloads: dict[str, int] = {}
        self.weights: list[_prefetch.DeviceWeight] = []
        payloads = [payload] * len(rows) if isinstance(payload, int) else payload
        for i, (count, is_copied, bytes) in enumerate(zip(rows, copied, payloads)):
            weight = f"{name}.{i}"
            self.values[weight] = float(world.random.randrange(1, 1 << 20))
            base = torch.zeros(count, 2)
            world.written(base)
            entry = Entry(weight, "F32", [count, 2], "same", weight, True, [(weight, "F32", [count, 2])])
            made = _prefetch.DeviceWeight(
                self, entry, [base], torch.empty(bytes, dtype=torch.uint8), 0, range(i, i + 1), self.failures
            )
            made.is_copied = is_copied
            made.register()
            self.payloads[weight] = made.payload.data_ptr()
            world.names[made.payload.data_ptr()] = weight
            world.watch(made.bases[0])
            self.weights.append(made)
        _prefetch.DeviceWeight._largest.clear()

    def plan(self, outputs: list[Any], base: list[Any], parts: list[tuple[int, Any]]) -> FakePlan:
        return FakePlan(self, outputs, base, [part for _, part in parts])

    def _apply(self, outputs: list[Any], base: list[Any], mode: str, progress: None) -> None:
        """Rebuilds a weight in new memory and waits for it."""
        fill(outputs[0][3], outputs[0][4], self.values[outputs[0][0]])

    def forward(self, weight: _prefetch.DeviceWeight) -> None:
        """Calls a layer and compares its output with the expected one."""
        call = self.world.begin_call()
        try:
            y = weight.linear(torch.ones(1, 2), None, False)
        except BaseException as error:
            call.aborted = True
            self.interrupted(error)
            raise
        name = weight.entry.name
        self.world.log.append(("use", name))
        for outcome in call.outcomes:
            if outcome.weight != name or outcome.spoilt:
                self.world.violations.append(f"{name} was computed with {outcome.weight} {outcome.spoilt}")
            elif outcome.fault is not None:
                self.faults[outcome.fault] = True
        is_damaged = any(outcome.fault is not None for outcome in call.outcomes)
        if not is_damaged and not torch.equal(y, torch.full((1, weight.shape[0]), 2 * self.values[name])):
            self.world.violations.append(f"{name} gave {y}")

    def interrupted(self, error: BaseException) -> None:
        """Handles a signal's exception whose context is a fault: the fault may be raised a second time."""
        shown = getattr(error.__context__, "fault", None)
        if shown in self.faults:
            self.faults[shown] = False

    def raised(self, error: tpde.Invalid) -> None:
        """An error raised by a call or check of this model must be its own. Two threads may receive the same error at once."""
        fault = getattr(error, "fault", 0)
        thread = threading.get_ident()
        if self.told.setdefault(fault, thread) == thread and fault not in self.faults:
            self.world.violations.append(f"{self.name} raised {error}, which is not its fault")
        # A decoding reports its first fault for all.
        for known in (fault, *getattr(error, "beside", ())):
            self.faults.pop(known, None)


def fill(address: int, bytes: int, value: float) -> None:
    (ctypes.c_float * (bytes // 4)).from_address(address)[:] = [value] * (bytes // 4)


class FakePlan:
    """A plan, and also the rebuild that is prepared from it."""

    def __init__(self, model: FakeModel, outputs: list[Any], base: list[Any], parts: list[Any]) -> None:
        assert len(outputs) == len(base) == len(parts), "each weight has one base and one payload"
        model.world.plans += 1
        self.model = model
        self.outputs = [(m[0], m[3], m[4]) for m in outputs]
        self.reads = [[(m[3], m[3] + m[4]) for m in of_one] for of_one in zip(base, parts)]

    def bytes(self) -> int:
        return 8

    def prepare(self, memory: Any) -> FakePlan:
        return self

    def launch(self, device: FakeDevice, stream: int) -> FakeLaunch:
        with self.model.world.lock:
            on = self.model.world.streams[stream - 1]
            self.model.world.launches.append([name for name, _, _ in self.outputs])
            return FakeLaunch([self._decode(*one, on) for one in zip(self.outputs, self.reads)], on)

    def _decode(self, output: tuple[str, int, int], reads: list[tuple[int, int]], on: FakeStream) -> Outcome:
        (name, address, bytes), world = output, self.model.world
        fault = None
        if self.model.damaged.get(name):
            self.model.damaged[name] -= 1
            fault = next(world.faults)
            self.model.faults[fault] = False
        outcome = Outcome(name, fault)
        world.log.append(("decode", name))
        accesses = [(address, address + bytes, True), *((begin, end, False) for begin, end in reads)]
        outcome.spoilt = world.operation(on, accesses, outcome)
        payload = reads[-1][0]
        if world.copied.get(payload, payload) != self.model.payloads[name]:
            outcome.spoilt += "is decoded from another payload"
        fill(address, bytes, self.model.values[name])
        for begin in [other for other in world.contents if address <= other < address + bytes]:
            del world.contents[begin]
        world.contents[address] = outcome
        return outcome

    def capture(self, device: FakeDevice, stream: int) -> FakeLaunch:
        return self.launch(device, stream)


class FakeLaunch:
    def __init__(self, outcomes: list[Outcome], stream: FakeStream) -> None:
        self.outcomes, self.world, self.clock = outcomes, stream.world, dict(stream.clock)
        self.is_passed = False

    def is_done(self) -> bool:
        if not self.is_passed and self.world.random.random() < 0.5:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        with self.world.lock:
            merge(self.world.host, self.clock)
        self.is_passed = True
        for outcome in self.outcomes:
            if outcome.spoilt:
                self.world.violations.append(f"{outcome.weight} reports an error, but {outcome.spoilt}")
        faults = [outcome for outcome in self.outcomes if outcome.fault is not None]
        if faults:
            error = tpde.Invalid(f"damage {faults[0].fault} of {faults[0].weight}", rule="payload.crc32")
            error.fault, error.beside = faults[0].fault, [outcome.fault for outcome in faults[1:]]
            raise error

    check = wait


def install(world: World, patch: pytest.MonkeyPatch) -> FakeDevice:
    """Makes the prefetcher use this world as its device."""

    def compute(x: torch.Tensor, weight: torch.Tensor, bias: None, cast: bool) -> torch.Tensor:
        begin = weight.data_ptr()
        with world.lock:
            races = world.operation(world.main, [(begin, begin + weight.nbytes, False)], world.call)
            outcome = world.contents.get(begin)
        if outcome is not None:
            world.call.outcomes.append(outcome)
        if races:
            world.violations.append(f"a layer computes while {races}")
        return torch.nn.functional.linear(x, weight)

    def copy_on(stream: FakeStream, to: torch.Tensor, source: torch.Tensor) -> None:
        if to.shape != source.shape:
            raise RuntimeError(f"a copy from {source.shape} to {to.shape}")  # as PyTorch does
        ranges = [(to.data_ptr(), to.data_ptr() + to.nbytes, True), (source.data_ptr(), source.data_ptr() + source.nbytes, False)]
        with world.lock:
            world.operation(stream, ranges, "a copy")
            world.recorded.setdefault(source.data_ptr(), set()).add(stream)  # as PyTorch does for pinned memory
            world.copied[to.data_ptr()] = source.data_ptr()
        world.log.append(("copy", world.names[source.data_ptr()]))

    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        with world.lock:
            world.recorded.setdefault(tensor.data_ptr(), set()).add(stream)

    empty = torch.empty
    patch.setattr(torch, "empty", lambda *a, **k: world.allocated(empty(*a, **k)))
    patch.setattr(torch.cuda, "Stream", lambda *_: FakeStream(world))
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(torch.Tensor, "record_stream", record_stream)
    # `World.close` clears these dicts, so the world holds them too.
    for (of, name), held in zip(
        ((_prefetch.Prefetcher, "_made"), (_capture.Graph, "_kept"), (_prefetch.DeviceWeight, "_largest")), world.held
    ):
        patch.setattr(of, name, held)
    patch.setattr(_prefetch, "ALIGN", 8)  # weights here are small
    patch.setattr(_prefetch, "PATIENCE", 1)  # so that there are groups after many changes
    for module in (_prefetch, _capture):
        patch.setattr(module, "compute", compute)
        patch.setattr(module, "copy_on", copy_on)
    return FakeDevice(world)


def attached_of(model: FakeModel) -> tpde.nn.Attached:
    layers: Any = {weight.entry.name: type("Layer", (), {"_weight": weight}) for weight in model.weights}
    return tpde.nn.Attached(layers, [], 0, model.failures)
