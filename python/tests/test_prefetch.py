"""Behaviour of the prefetcher of `tpde.nn._prefetch` on a fake device."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

import tpde.nn  # noqa: E402 (needs torch)
from fake_cuda import FakeDevice, FakeModel, FakePair, World, attached_of, install  # noqa: E402
from points import Interrupted, at, interrupt, marked  # noqa: E402
from tpde.nn import _capture, _prefetch, _rebuilt, _slot  # noqa: E402
from tpde.nn._prefetch import Prefetcher  # noqa: E402


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
        # Each weight is decoded once per use, and as many more are prefetched as there are slots. After the first round, each
        # decoding is queued before the use of its predecessor.
        assert decoded == (uses + uses)[: len(uses) + min(count, 2)]
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
        # Each payload is copied once per use, in the order of the decodings, and two copies, or all if fewer, are queued ahead.
        ahead = min(len(copied), 2)
        assert len(decoded) == 3 * len(copied) and seen == (decoded * 2)[ahead : ahead + len(decoded)]

    @pytest.mark.parametrize("copied", [False, True])
    def test_weights_are_decoded_together_if_a_slot_has_room(self, copied: bool, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        rows, payloads = [2, 2, 2, 2, 2, 2, 2, 8, 7, 1], [16, 16, 16, 16, 16, 16, 16, 64, 8, 8]
        model = FakeModel(world, device, "m", rows, [copied] * len(rows), payloads)
        expected = [names(model)[begin:end] for begin, end in ((0, 4), (4, 7), (7, 8), (8, 10))]
        for turn in range(8):
            if turn == 4:
                world.launches.clear()
                world.log.clear()
            for weight in model.weights:
                model.forward(weight)
        # One group is decoded ahead.
        begin = expected.index(world.launches[0])
        assert world.launches == (expected * 5)[begin : begin + len(world.launches)] and len(world.launches) == 4 * 4
        copies = [name for what, name in world.log if what == "copy"]
        assert len(copies) == (4 * len(rows) if copied else 0)

    def test_the_order_of_use_changes(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [1] * 6 + [8], [False, True] * 3 + [True], [8] * 6 + [64])
        for weight in model.weights * 4:
            model.forward(weight)
        assert max(map(len, world.launches)) == 6
        for order in ([5, 4, 3, 2, 1, 0], [0, 0, 1, 1, 6], [2, 6, 4], [0, 1, 2, 3, 4, 5, 6]):
            for _ in range(4):
                for place in order:
                    model.forward(model.weights[place])
            world.launches.clear()
        for weight in model.weights * 2:
            model.forward(weight)
        assert max(map(len, world.launches)) > 1

    @pytest.mark.parametrize("copied", [False, True])
    def test_an_order_that_depends_on_the_input_needs_no_new_plans(
        self, copied: bool, fake: tuple[World, FakeDevice], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_prefetch, "PATIENCE", 32)
        world, device = fake
        model = FakeModel(world, device, "m", [1] * 24 + [8], [copied] * 25, [8] * 24 + [64])
        choose = random.Random(1)
        for turn in range(200):
            if turn == 100:
                begin = world.plans
                world.launches.clear()
            for layer in range(4):  # two weights that are always used, and two of four experts
                places = [6 * layer, 6 * layer + 1, *choose.sample(range(6 * layer + 2, 6 * layer + 6), 2)]
                for place in places:
                    model.forward(model.weights[place])
            model.forward(model.weights[24])
        assert world.plans - begin <= 12, "combinations of slots and buffers that had not occurred"
        assert max(map(len, world.launches)) == 2

    def test_nothing_is_kept_of_models_that_are_gone(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [1, 2], [True, False])
        for turn in range(20):
            other = FakeModel(world, device, f"{turn}", [1, 2], [True, False])
            for weight in [*model.weights, *other.weights] * 3:
                weight.on_device.forward(weight)
            del weight
            other.weights.clear()
            gc.collect()
        for weight in model.weights * 2:
            model.forward(weight)
        (prefetcher,) = Prefetcher._made.values()
        for kept in (prefetcher.next, prefetcher.next_copied, prefetcher.groups):
            assert len(kept) <= 2
        assert all(len(slot.rebuilds) <= 6 for slot in prefetcher.slots)

    def test_payloads_of_no_bytes_need_no_buffers(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [1, 1, 8], [False] * 3, [0, 0, 0])
        for weight in model.weights:
            assert not _prefetch.DeviceWeight(
                model, weight.entry, weight.bases, torch.empty(0, dtype=torch.uint8), 0, range(0)
            ).is_copied
        for weight in model.weights * 4:
            model.forward(weight)

    def test_weights_that_cannot_be_decoded_together(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        one, other = (FakeModel(world, device, name, [1, 1], [False] * 2) for name in ("one", "other"))
        one.weights[1].chunks = range(2000, 2001)  # far from the other weight in the index
        large = FakeModel(world, device, "large", [8], [False])
        for weight in [*one.weights, *other.weights, *large.weights] * 4:
            weight.on_device.forward(weight)
        assert {len(launch) for launch in world.launches} == {1, 2}
        assert [launch for launch in world.launches if len(launch) == 2][0] == names(other)

    def test_a_fault_in_a_group_is_raised_and_gone_afterwards(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [1, 1, 1, 8], [False] * 4)
        for weight in model.weights * 4:
            model.forward(weight)
        model.damaged[names(model)[1]] = 1
        raised = 0
        for weight in model.weights * 3:
            try:
                model.forward(weight)
            except tpde.Invalid as error:
                model.raised(error)
                raised += 1
        attached_of(model).check()
        assert raised == 1 and not model.faults
        assert [len(launch) for launch in world.launches[-2:]] in ([3, 1], [1, 3])

    def test_payloads_are_copied_two_ahead_after_another_order(self, fake: tuple[World, FakeDevice]) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [1, 1, 8, 8, 8], [True] * 5, [8, 8, 40, 40, 40])
        for order in ([0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4]):
            for turn in range(7):
                if turn == 6:
                    begin = len(world.log)
                for place in order:
                    model.forward(model.weights[place])
            for now, (what, name) in enumerate(world.log):
                if what == "decode" and now >= begin:
                    following = names(model)[order[(order.index(names(model).index(name)) + 1) % len(order)]]
                    before = [entry for entry in world.log[:now] if entry in (("copy", following), ("decode", following))]
                    assert before[-1] == ("copy", following), f"{name} was decoded before {following} was copied"

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
            # As if another thread had registered the large weights while this one computed the maximum.
            _prefetch.DeviceWeight._largest[weights[0].torch_device] = (weights[0].bytes, weights[0].payload.numel())

    def test_no_scratch_memory_for_the_next_weight_leaves_an_output(
        self, fake: tuple[World, FakeDevice], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world, device = fake
        model = FakeModel(world, device, "m", [2] * 2, [False] * 2)
        large = FakeModel(world, device, "large", [2], [False])
        for weight in [*model.weights, *large.weights] * 2:
            weight.on_device.forward(weight)
        # A larger weight is registered: the next prefetch has to allocate larger slots.
        later = FakeModel(world, device, "later", [8], [False])
        prefetcher = Prefetcher.of(device, world.main)
        prefetcher.groups.clear()
        for slot in prefetcher.slots:
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
                models[1].forward(weight)  # a layer of the other model, on the same stream
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
        model.damaged["m.2"] = 1
        model.forward(model.weights[0])  # prefetches the weight after the next one, which fails
        prefetcher = Prefetcher.of(device, world.main)
        prefetcher.settle(wait=True)
        assert [slot.state for slot in prefetcher.slots if isinstance(slot.state, _slot.Failed)]
        with pytest.raises(tpde.Invalid) as caught:
            model.forward(model.weights[1])
        model.raised(caught.value)
        for weight in model.weights[1:]:
            model.forward(weight)

    def test_a_call_beneath_a_call_has_memory_of_its_own(
        self, fake: tuple[World, FakeDevice], monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
            # Runs in a thread, so that a deadlock fails the test instead of blocking it.
            thread = threading.Thread(target=lambda: found.append(Prefetcher.of(device, world.main)), daemon=True)
            thread.start()
            thread.join(20)
        assert len(found) == 2 and found[0] is found[1] is Prefetcher.of(device, world.main)

    def test_making_a_weight_does_not_make_it_visible(
        self, fake: tuple[World, FakeDevice], monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
            world.main.capture = number  # the second begins before the first ends
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
            # The first graph, which still exists, and the one being captured.
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
            failures.throw()  # no error is left
