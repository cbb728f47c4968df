"""The prefetcher of `tpde._prefetch` on a fake device: what it does, and a search for orders in which it goes wrong."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

import tpde.nn  # noqa: E402 (needs torch)
from fake_cuda import FakeDevice, FakeModel, FakePair, FakeStream, World, install  # noqa: E402
from points import at, marked, point  # noqa: E402
from tpde import _capture, _prefetch, _rebuilt, _slot  # noqa: E402
from tpde._prefetch import Prefetcher  # noqa: E402

#: Seconds for the search, and for each fault that is put back.
SEARCH = float(os.environ.get("TPDE_MODEL_CHECK_SECONDS", "8"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, FakeDevice]]:
    world = World()
    yield world, install(world, monkeypatch)
    world.close()
    assert world.violations == []


def names(model: FakeModel) -> list[str]:
    return [weight.entry.name for weight in model.weights]


class TestPrefetcher:
    @pytest.mark.parametrize("count", [1, 2, 3, 6])
    def test_the_next_weight_is_decoded_while_one_is_used(self, fake: tuple[World, FakeDevice], count: int) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [2] * count, [False] * count)
        for _ in range(4):
            for weight in model.weights:
                model.forward(weight)
        uses = [name for what, name in world.log if what == "use"]
        decoded = [name for what, name in world.log if what == "decode"]
        assert uses == names(model) * 4
        # Each is decoded once a use, and one more is foreseen; after the first round always before the one before is done.
        assert decoded == (uses + uses)[: len(uses) + 1]
        for n in range(count + 1, len(uses)):
            before = [i for i, entry in enumerate(world.log) if entry == ("decode", uses[n])][n // count]
            assert before < [i for i, entry in enumerate(world.log) if entry[0] == "use"][n - 1]

    @pytest.mark.parametrize("copied", [[0], [1, 4], [0, 2, 5], [0, 1, 2, 3, 4, 5]])
    def test_payloads_are_copied_two_ahead(self, copied: list[int], fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [2] * 6, [place in copied for place in range(6)])
        for turn in range(6):
            if turn == 3:
                world.log.clear()
            for weight in model.weights:
                model.forward(weight)
        of_copied = {names(model)[place] for place in copied}
        decoded = [name for what, name in world.log if what == "decode" and name in of_copied]
        seen = [name for what, name in world.log if what == "copy"]
        # Each is copied once a use, in the order of the decodings, and two or as many as there are are under way.
        ahead = min(len(copied), 2)
        assert len(decoded) == 3 * len(copied) and seen == (decoded * 2)[ahead : ahead + len(decoded)]

    def test_memory_is_two_slots_and_goes_with_the_last_weight(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [1, 2, 3, 8], [True] * 4)
        for weight in model.weights * 2:
            model.forward(weight)
        del weight
        (prefetcher,) = Prefetcher._made.values()
        assert [slot.memory.numel() for slot in prefetcher.slots] == [8 * 2 * 4] * 2
        assert [buffer.memory.numel() for buffer in prefetcher.buffers] == [16] * 2
        handle = model.weights.pop().handle
        model.forward(model.weights[0])
        assert not any(key[0] == handle for slot in prefetcher.slots for key in slot.rebuilds)
        model.weights.clear()
        gc.collect()
        assert not Prefetcher._made

    def test_memory_is_given_back(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [1, 2, 3], [True, False, True])
        for _ in range(3):
            for weight in model.weights:
                model.forward(weight)
            (prefetcher,) = Prefetcher._made.values()
            assert prefetcher.slots and prefetcher.buffers
            prefetcher.release()
            assert not prefetcher.slots and not prefetcher.buffers

    def test_larger_weights_come_later(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        models = [FakeModel(world, device, "m", [1, 1], [True] * 2)]
        for rows in (4, 8):
            for weight in [weight for model in models for weight in model.weights] * 2:
                weight.on_device.forward(weight)
            models.append(FakeModel(world, device, str(rows), [rows], [True]))

    def test_a_payload_that_buffers_have_no_room_for_is_not_copied_ahead(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        models = [FakeModel(world, device, name, [1, 1], [True] * 2, payload) for name, payload in (("small", 16), ("large", 64))]
        weights = [weight for model in models for weight in model.weights]
        for _ in range(3):
            for weight in weights:
                weight.on_device.forward(weight)
            (prefetcher,) = Prefetcher._made.values()
            prefetcher.release()
            # As if another thread had made the large weights while this one looked for the largest.
            _prefetch.DeviceWeight._largest[weights[0].torch_device] = (weights[0].bytes, weights[0].payload.numel())

    def test_no_scratch_memory_for_the_next_weight_leaves_an_output(
        self, fake: tuple[World, FakeDevice], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [2] * 2, [False] * 2)
        large = FakeModel(world, device, "large", [2], [False])
        for weight in [*model.weights, *large.weights] * 2:
            weight.on_device.forward(weight)
        # A larger one comes: there are to be new slots as soon as the next is begun.
        later = FakeModel(world, device, "later", [8], [False])
        for slot in Prefetcher.of(device, world.main).slots:
            slot.clear()
        refused = []

        def refuses(prefetcher: Prefetcher, *_: Any) -> None:
            refused.append(prefetcher)
            raise torch.OutOfMemoryError("no memory, says the test")

        reserve = Prefetcher._reserve
        reserves = iter([reserve, refuses])
        monkeypatch.setattr(Prefetcher, "_reserve", lambda *how: next(reserves, reserve)(*how))
        model.forward(model.weights[0])
        assert len(refused) == 1
        for weight in [*model.weights, *later.weights]:
            weight.on_device.forward(weight)

    def test_no_memory_for_the_next_weight_leaves_an_output(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [2] * 3, [False] * 3)
        for weight in model.weights:
            model.forward(weight)
        for slot in Prefetcher.of(device, world.main).slots:
            slot.rebuilds.clear()
            slot.clear()
        model.forward(model.weights[0])
        for slot in Prefetcher.of(device, world.main).slots:
            slot.rebuilds.clear()
        device.refuses = 1
        model.forward(model.weights[1])
        assert device.refuses == 0
        model.forward(model.weights[2])

    def test_what_went_wrong_is_raised_later_by_its_model(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        models = [FakeModel(world, device, name, [2] * 3, [False] * 3) for name in "ab"]
        models[0].damaged["a.1"] = 1
        models[0].forward(models[0].weights[1])
        for _ in range(3):
            for weight in models[1].weights:
                models[1].forward(weight)  # of the other model, on the same stream
        attached_of(models[1]).check()
        with pytest.raises(tpde.Invalid, match="of a.1"):
            attached_of(models[0]).check()
        for weight in models[0].weights * 2:
            models[0].forward(weight)
        attached_of(models[0]).check()
        models[0].faults.clear()

    def test_a_slot_that_failed_is_filled_again(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [2] * 3, [False] * 3)
        for weight in model.weights * 2:
            model.forward(weight)
        model.damaged["m.1"] = 1
        model.forward(model.weights[0])  # begins the next, which fails
        prefetcher = Prefetcher.of(device, world.main)
        prefetcher.settle(wait=True)
        assert [slot.state for slot in prefetcher.slots if isinstance(slot.state, _slot.Failed)]
        with pytest.raises(tpde.Invalid) as caught:
            model.forward(model.weights[1])
        model.raised(caught.value)
        model.forward(model.weights[1])

    def test_a_call_beneath_a_call_has_memory_of_its_own(self, fake: tuple[World, FakeDevice], monkeypatch: pytest.MonkeyPatch) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [2] * 3, [False] * 3)
        compute, inner = _prefetch.compute, []

        def calls_another(*how: Any) -> torch.Tensor:
            if not inner:  # as a signal handler would
                inner.append(None)
                inner[0] = model.weights[2].linear(torch.ones(1, 2), None, False)
            return compute(*how)

        monkeypatch.setattr(_prefetch, "compute", calls_another)
        model.forward(model.weights[0])
        assert torch.equal(inner[0], torch.full((1, 2), 2 * model.values["m.2"]))

    def test_threads_that_begin_at_once_share_the_prefetcher_of_a_stream(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        barrier, found = threading.Barrier(8), []
        init = Prefetcher.__init__

        def slow(prefetcher: Prefetcher, *how: Any) -> None:
            init(prefetcher, *how)
            time.sleep(0.02)

        def work() -> None:
            barrier.wait()
            found.append(Prefetcher.of(device, world.main))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Prefetcher, "__init__", slow)
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(set(map(id, found))) == 1

    def test_a_call_that_comes_into_the_making_of_a_prefetcher_shares_it(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        init, found = Prefetcher.__init__, []

        def interrupted(prefetcher: Prefetcher, *how: Any) -> None:
            init(prefetcher, *how)
            if not found:
                found.append(prefetcher)
                found[0] = Prefetcher.of(device, world.main)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Prefetcher, "__init__", interrupted)
            # In a thread, so that one that waits for itself fails the test.
            thread = threading.Thread(target=lambda: found.append(Prefetcher.of(device, world.main)), daemon=True)
            thread.start()
            thread.join(20)
        assert len(found) == 2 and found[0] is found[1] is Prefetcher.of(device, world.main)

    def test_making_a_weight_does_not_make_it_visible(self, fake: tuple[World, FakeDevice], monkeypatch: pytest.MonkeyPatch) -> None:
        world, device = fake
        seen = []
        monkeypatch.setattr(_prefetch.DeviceWeight, "register", lambda weight: seen.append(weight.handle in weight.known))
        model = FakeModel(world, device, "m", [2] * 3, [True] * 3)
        assert seen == [False] * 3 and not any(weight.handle in weight.known for weight in model.weights)

    def test_weights_are_looked_for_while_others_come_and_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        monkeypatch.setattr(_rebuilt.Weight, "known", known)
        kept = [FakePair(str(number)) for number in range(200)]
        known.update(enumerate(kept))
        is_over, before = threading.Event(), sys.getswitchinterval()

        def come_and_go() -> None:
            number = len(kept)
            while not is_over.is_set():
                number += 1
                known[number] = FakePair("")

        thread = threading.Thread(target=come_and_go)
        sys.setswitchinterval(1e-6)
        thread.start()
        try:
            for _ in range(500):
                assert set(map(id, kept)) <= set(map(id, _rebuilt.Weight.alive()))
        finally:
            is_over.set()
            thread.join()
            sys.setswitchinterval(before)

    def test_captures_on_one_stream_have_memory_of_their_own(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [2] * 2, [False] * 2)
        captures = []
        for number in (1, 2):
            world.main.capture = number  # the second begins before the first has ended, on another stream with this handle
            model.forward(model.weights[0])
            captures.append(Prefetcher.of(device, world.main).capture)
        world.main.capture = None
        assert captures[0] is not captures[1] and [capture.number for capture in captures] == [1, 2]

    def test_a_capture_makes_room_for_what_was_attached_after_it_began(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [1, 2], [False] * 2)
        world.main.capture = 1
        for weight in model.weights:
            model.forward(weight)
        large = FakeModel(world, device, "large", [8, 4], [True, False], payload=64)
        for weight in [*large.weights, *model.weights] * 2:
            weight.on_device.forward(weight)
        world.main.capture = None

    def test_what_graphs_refer_to_goes_with_them(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [2] * 2, [False] * 2)
        for number in range(1, 20):
            world.main.capture = number
            model.forward(model.weights[0])
            device.graphs[number].gone = number > 1
            # The first, which is still there, and the one that is being captured.
            assert len(_capture.Graph._kept) == min(number, 2)
        world.main.capture = None
        for prefetcher in Prefetcher.on(device.torch):
            prefetcher.release()
        attached_of(model).check()
        assert len(_capture.Graph._kept) == 1


class TestFailures:
    def test_an_error_is_not_lost_to_a_signal(self) -> None:
        for number in range(1, 20):
            failures, error = _slot.Failures(), tpde.Invalid("damage", rule="payload.crc32")
            failures.add(1, error)
            told = []
            with marked(_slot):
                for call in (number, 0):
                    try:
                        with at(call, interrupt):
                            failures.throw()
                    except (Interrupted, tpde.Invalid) as caught:
                        told += [one for one in (caught, caught.__context__) if one is error]
            assert told and told == [error] * len(told)
            failures.throw()  # nothing is left


class Interrupted(KeyboardInterrupt):
    """A signal's exception."""


def interrupt() -> None:
    raise Interrupted


class Search:
    """A random program: models come and go, are called, interrupted, damaged, captured, released and checked."""

    def __init__(self, seed: int, world: World, device: FakeDevice, name: str = "model") -> None:
        self.random = random.Random(seed)
        self.world, self.device, self.name = world, device, name
        self.models: list[FakeModel] = []
        self.attached = 0
        self.log: list[str] = []

    def attach(self) -> None:
        rows = [self.random.choice([1, 2, 3, 8]) for _ in range(self.random.randrange(1, 5))]
        copied = [self.random.random() < 0.5 for _ in rows]
        self.attached += 1
        self.models.append(FakeModel(self.world, self.device, f"{self.name} {self.attached}", rows, copied))

    def forward(self, model: FakeModel) -> None:
        """Some layers, in their order or in another."""
        weights = list(model.weights)
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
        """Afterwards nothing is owed: every fault that had spoilt an output was raised. Another thread may add some meanwhile."""
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
                # An interrupted call leaves some; the driver refuses to end such a capture.
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
        """A call of any model from another thread, which has the lock as soon as it is free."""
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
        """A model goes while another is called: its finalizers run there."""
        if len(self.models) > 1:
            self.models.pop(0).weights.clear()

    def run(self, steps: int) -> list[str]:
        """What was found wrong."""
        for _ in range(steps):
            action = self.random.choice([interrupt, interrupt, self.dropped, self.other_thread])
            number = int(self.random.expovariate(1 / 120)) + 1 if self.random.random() < 0.6 else 0
            try:
                with at(number, action):
                    self.step()
            except Interrupted:
                self.log.append("interrupted")
            self.device.refuses = 0
            if self.world.violations:
                return self.world.violations
        for model in self.models:
            self.check(model)
        return self.world.violations


def attached_of(model: FakeModel) -> tpde.nn.Attached:
    layers: Any = {weight.entry.name: type("Layer", (), {"_weight": weight}) for weight in model.weights}
    return tpde.nn.Attached(layers, [], 0, model.failures)


def search(seconds: float, prepare: Callable[[pytest.MonkeyPatch], None] = lambda patch: None) -> str:
    """Runs random programs until one goes wrong; says how."""
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


#: What a finalizer raises is told and ignored: none of them may have a point.
finalizers_end = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@finalizers_end
def test_no_random_program_goes_wrong() -> None:
    assert search(SEARCH) == ""


@finalizers_end
def test_no_random_programs_of_three_threads_go_wrong() -> None:
    """On a stream each, which what a model is told of, released or let go reaches too; with captures in one beside calls in the others."""
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
    """The memory is written before the state says so: an interrupt in between leaves a state that lies."""
    patch.setattr(_slot.Slot, "begin", lambda slot: next(slot._generations))


def a_slot_is_published_before_it_is_filled(patch: pytest.MonkeyPatch) -> None:
    fill = Prefetcher._fill

    def early(prefetcher: Prefetcher, weight: Any, slot: Any) -> None:
        slot.publish(weight.handle, slot.begin(), weight.view(slot.memory))
        patch.setattr(_slot.Slot, "begin", lambda slot: next(slot._generations))
        fill(prefetcher, weight, slot)

    patch.setattr(Prefetcher, "_fill", early)


def a_slot_that_failed_is_used_again(patch: pytest.MonkeyPatch) -> None:
    """What was prefetched and is known to be bad is still there, and its failure was told before it is used."""
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
        stream.world.recorded.pop(weight.base.data_ptr(), None)

    patch.setattr(_prefetch.DeviceWeight, "begin_on", unrecorded)


def payload_buffers_keep_what_they_held(patch: pytest.MonkeyPatch) -> None:
    def late(prefetcher: Prefetcher, weight: Any, buffer: Any) -> None:
        part = buffer.memory[: weight.payload.numel()]
        buffer.publish(weight.handle, 0, part)
        point()
        prefetcher.copying.wait_event(buffer.used)
        _prefetch.copy_on(prefetcher.copying, part, weight.payload)
        buffer.filled.record(prefetcher.copying)
        prefetcher.queued = weight.handle

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
    found = search(120, fault)  # it ends as soon as something is found
    assert found
    print(found)
