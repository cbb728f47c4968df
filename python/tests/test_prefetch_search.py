"""Searches for orders of calls in which the prefetcher of `tpde.nn._prefetch` fails, on a fake device."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

import tpde.nn  # noqa: E402 (needs torch)
from fake_cuda import FakeDevice, FakeModel, FakeStream, World, attached_of, install  # noqa: E402
from points import Interrupted, at, interrupt, marked, point  # noqa: E402
from tpde.nn import _capture, _prefetch, _rebuilt, _slot  # noqa: E402
from tpde.nn._prefetch import Prefetcher  # noqa: E402

#: Seconds to search the package as it is.
SEARCH = float(os.environ.get("TPDE_MODEL_CHECK_SECONDS", "8"))


class Search:
    """A random program: models are attached, called, interrupted, damaged, captured, released, checked and dropped."""

    def __init__(self, seed: int, world: World, device: FakeDevice, name: str = "model") -> None:
        self.random = random.Random(seed)
        self.world, self.device, self.name = world, device, name
        self.models: list[FakeModel] = []
        self.attached = 0
        self.log: list[str] = []

    def attach(self) -> None:
        rows = [self.random.choice([1, 2, 3, 8]) for _ in range(self.random.randrange(1, 5))]
        copied = [self.random.random() < 0.5 for _ in rows]
        payloads = [self.random.choice([8, 16, 40]) for _ in rows]
        self.attached += 1
        self.models.append(FakeModel(self.world, self.device, f"{self.name} {self.attached}", rows, copied, payloads))

    def forward(self, model: FakeModel) -> None:
        """Some layers, in order or shuffled. After a few passes in order, weights are decoded in groups."""
        weights = list(model.weights) * self.random.randrange(1, 4)
        if self.random.random() < 0.5:
            weights = self.random.choices(weights, k=6)
        for weight in weights:
            try:
                model.forward(weight)
            except tpde.Invalid as error:
                model.raised(error)
            except (Interrupted, tpde.OutOfMemory) as error:
                self.log.append(type(error).__name__)

    def check(self, model: FakeModel) -> None:
        """Asserts that every fault that spoilt an output was raised. Another thread may add faults meanwhile."""
        attached, before = attached_of(model), dict(model.faults)
        for step in (attached.check, attached.release) if self.random.random() < 0.3 else (attached.check,):
            for _ in range(100):
                try:
                    step()
                    break
                except tpde.Invalid as error:
                    model.raised(error)
                except Interrupted as error:
                    model.interrupted(error)
                    raise
        for fault, was_used in before.items():
            if model.faults.pop(fault, None) is not None and was_used:
                self.world.violations.append(f"fault {fault} of {model.name} has spoilt an output, and nobody was told")

    def capture(self, model: FakeModel) -> None:
        number = self.world.main.capture = next(self.world.captures)
        damaged, model.damaged = model.damaged, {}
        before = {stream: stream.ticks for stream in self.beside()}
        try:
            self.forward(model)
        finally:
            for stream in self.beside():
                # An interrupted call leaves streams that were not joined; the driver refuses to end such a capture.
                is_joined = max(self.world.main.clock.get(stream.number, 0), before.get(stream, 0)) >= stream.ticks
                if stream.capture == number and not is_joined and not self.world.call.aborted:
                    self.world.violations.append("a stream was not joined when the capture ended")
                stream.capture = None
            self.world.main.capture = None
            model.damaged = damaged
            if number in self.device.graphs:
                self.device.graphs[number].gone = True

    def beside(self) -> list[FakeStream]:
        prefetchers = [one for one in list(Prefetcher._made.values()) if one.stream is self.world.main]
        return [stream for prefetcher in prefetchers for stream in (prefetcher.copying, *prefetcher.decoding)]

    def step(self) -> None:
        what = self.random.random()
        if not self.models or what < 0.08:
            return self.attach()
        model = self.random.choice(self.models)
        if what < 0.14:
            self.log.append(f"{model.name} goes")
            self.models.remove(model)
            model.weights.clear()
        elif what < 0.22:
            self.log.append(f"check {model.name}")
            self.check(model)
        elif what < 0.30:
            name = self.random.choice(model.weights).entry.name
            self.log.append(f"damage {name}")
            model.damaged[name] = self.random.randrange(1, 3)
        elif what < 0.34:
            self.device.refuses = self.random.randrange(1, 3)
        elif what < 0.40:
            self.log.append(f"capture {model.name}")
            self.capture(model)
        else:
            self.log.append(f"forward {model.name}")
            self.forward(model)

    def other_thread(self) -> None:
        """A call of any model from another thread, which runs as soon as the lock is free."""
        model = self.random.choice(self.models) if self.models else None
        is_taken = Prefetcher._making._is_owned()  # type: ignore[attr-defined]
        is_taken |= any(prefetcher.lock.locked() for prefetcher in Prefetcher.on(self.device.torch))
        if model is None or self.world.main.capture is not None or is_taken:
            return
        stream = self.world.main
        thread = threading.Thread(target=lambda: (self.world.use(stream), self.forward(model)), daemon=True)
        thread.start()
        thread.join(20)
        if thread.is_alive():
            self.world.violations.append("a thread waits for ever")

    def dropped(self) -> None:
        """Drops a model during a call of another one, so that the finalizers of the dropped model run during that call."""
        if len(self.models) > 1:
            self.models.pop(0).weights.clear()

    def run(self, steps: int) -> list[str]:
        """Runs steps, and returns the first violation."""
        for _ in range(steps):
            action = self.random.choice([interrupt, interrupt, self.dropped, self.other_thread])
            number = int(self.random.expovariate(1 / 120)) + 1 if self.random.random() < 0.6 else 0
            try:
                with at(number, action):
                    self.step()
            except Interrupted:
                self.log.append("interrupted")
            except AssertionError as error:
                self.world.violations.append(f"{error!r} in the package")
            self.device.refuses = 0
            if self.world.violations:
                return self.world.violations
        for model in self.models:
            self.check(model)
        return self.world.violations


def search(seconds: float, prepare: Callable[[pytest.MonkeyPatch], None] = lambda patch: None) -> str:
    """Runs random programs until one fails. Returns a description of the failure."""
    end, seed = time.monotonic() + seconds, 0
    gc.disable()
    try:
        while time.monotonic() < end:
            seed += 1
            with marked(_prefetch, _capture, _slot, _rebuilt), pytest.MonkeyPatch.context() as patch:
                prepare(patch)
                world = World(seed)
                program = Search(seed, world, install(world, patch))
                violations = program.run(60)
                log = program.log[-8:]
                program.models.clear()
                world.close()
                if violations:
                    return f"seed {seed}: {violations[0]}, after {log}"
    finally:
        gc.enable()
    print(f"{seed} programs")
    return ""


#: Python reports an exception in a finalizer and continues, so finalizers must have no points.
finalizers_end = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@finalizers_end
def test_no_random_program_goes_wrong() -> None:
    assert search(SEARCH) == ""


@finalizers_end
def test_no_random_programs_of_three_threads_go_wrong() -> None:
    """Each thread has its own stream. One thread's programs change and release models while the others call or capture."""
    end, seed, before = time.monotonic() + SEARCH / 2, 0, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        while time.monotonic() < end:
            seed += 1
            with marked(_prefetch, _capture, _slot, _rebuilt), pytest.MonkeyPatch.context() as patch:
                world = World(seed)
                device = install(world, patch)
                programs = [Search(3 * seed + n, world, device, f"model of thread {n},") for n in range(3)]

                def work(program: Search) -> None:
                    world.use(FakeStream(world))
                    try:
                        program.run(40)
                    except BaseException as error:
                        world.violations.append(f"{program.name} {error!r}")
                        raise

                threads = [threading.Thread(target=work, args=(program,)) for program in programs]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                for program in programs:
                    program.models.clear()
                world.close()
                assert world.violations == [], f"seed {seed}: {[program.log[-8:] for program in programs]}"
    finally:
        sys.setswitchinterval(before)
    print(f"{seed} times three programs")


def a_slot_keeps_what_it_held_until_it_is_filled(patch: pytest.MonkeyPatch) -> None:
    """Fault: the memory is written before the state is updated, so an interrupt in between leaves a wrong state."""
    patch.setattr(_slot.Slot, "begin", lambda slot: next(slot._generations))


def a_slot_is_published_before_it_is_filled(patch: pytest.MonkeyPatch) -> None:
    fill = Prefetcher._fill

    def early(prefetcher: Prefetcher, group: list[Any], slot: Any) -> None:
        slot.publish(slot.begin(), {weight.handle: weight.view(slot.memory) for weight in group})
        patch.setattr(_slot.Slot, "begin", lambda slot: next(slot._generations))
        fill(prefetcher, group, slot)

    patch.setattr(Prefetcher, "_fill", early)


def a_slot_that_failed_is_used_again(patch: pytest.MonkeyPatch) -> None:
    """Fault: a prefetched weight that is known to be bad is kept, and its error was reported before it is used."""
    patch.setattr(_slot.Slot, "fail", lambda slot, generation, error: None)


def failures_are_raised_by_whoever_comes_next(patch: pytest.MonkeyPatch) -> None:
    all_models = _slot.Failures()
    init = FakeModel.__init__

    def shared(model: FakeModel, *how: Any) -> None:
        patch.setattr(_slot, "Failures", lambda: all_models)
        init(model, *how)

    patch.setattr(FakeModel, "__init__", shared)


def a_base_is_read_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    begin_on = _prefetch.DeviceWeight.begin_on

    def at_once(weight: Any, stream: FakeStream, behind: FakeStream) -> None:
        clock = dict(stream.clock)
        begin_on(weight, stream, behind)
        stream.clock = clock

    patch.setattr(_prefetch.DeviceWeight, "begin_on", at_once)


def a_base_is_freed_while_it_is_read(patch: pytest.MonkeyPatch) -> None:
    begin_on = _prefetch.DeviceWeight.begin_on

    def unrecorded(weight: Any, stream: FakeStream, behind: FakeStream) -> None:
        begin_on(weight, stream, behind)
        stream.world.recorded.pop(weight.bases[0].data_ptr(), None)

    patch.setattr(_prefetch.DeviceWeight, "begin_on", unrecorded)


def payload_buffers_keep_what_they_held(patch: pytest.MonkeyPatch) -> None:
    def late(prefetcher: Prefetcher, copied: list[Any], buffer: Any) -> None:
        parts = list(_prefetch.parts_of(buffer.memory, [weight.payload.numel() for weight in copied]))
        buffer.publish(0, {weight.handle: part for weight, part in zip(copied, parts)})
        point()
        prefetcher.copying.wait_event(buffer.used)
        for weight, part in zip(copied, parts):
            _prefetch.copy_on(prefetcher.copying, part, weight.payload)
        buffer.filled.record(prefetcher.copying)
        prefetcher.queued = copied[0].handle

    patch.setattr(Prefetcher, "_copy", late)


def two_threads_are_in_one_prefetcher(patch: pytest.MonkeyPatch) -> None:
    class NoLock:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def locked(self) -> bool:
            return False

    init = Prefetcher.__init__

    def unlocked(prefetcher: Prefetcher, *how: Any) -> None:
        init(prefetcher, *how)
        prefetcher.lock = NoLock()

    patch.setattr(Prefetcher, "__init__", unlocked)


def an_interrupted_capture_goes_on_as_if_nothing_had_been(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_capture.Capture, "recover", lambda *_: None)


FAULTS = [
    a_slot_keeps_what_it_held_until_it_is_filled,
    a_slot_is_published_before_it_is_filled,
    a_slot_that_failed_is_used_again,
    failures_are_raised_by_whoever_comes_next,
    a_base_is_read_before_it_is_there,
    a_base_is_freed_while_it_is_read,
    payload_buffers_keep_what_they_held,
    two_threads_are_in_one_prefetcher,
    an_interrupted_capture_goes_on_as_if_nothing_had_been,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_search_finds_a_fault_that_is_put_back(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    found = search(120, fault)  # ends as soon as a violation is found
    assert found
    print(found)
