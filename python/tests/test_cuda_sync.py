"""Versions staged and applied on a CUDA device, or on the stand-in for its driver (see `stand_in`, `test_stand_in`)."""

from __future__ import annotations

import gc
import importlib
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

import tpde

# If TPDE_GPU is set, a missing PyTorch fails here.
torch = importlib.import_module("torch") if "TPDE_GPU" in os.environ else pytest.importorskip("torch")

from stand_in import IS_USED, captured_copy, is_busy, raw, spin, to_device, waits_for  # noqa: E402 (needs torch)
from test_sync import Loaded, Small, Trainer, weights_of  # noqa: E402

import tpde.slices  # noqa: E402
import tpde.sync  # noqa: E402
from tpde import _device  # noqa: E402

has_device = IS_USED or "TPDE_GPU" in os.environ or torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not has_device, reason="SKIPPED: PyTorch shows no CUDA device here")


class Engine(Loaded):
    """A rank whose parameters are on the device."""

    def __init__(self, folder: Path, name: str, rank: int, ranks: int) -> None:
        super().__init__(name, rank, ranks, 0)
        self.live = {name: to_device(one) for name, one in self.model.parameters.items()}
        self.subscriber = tpde.sync.Subscriber(self.map.bind(self.live), tpde.sync.Folder(folder), name, version=0)

    def has(self, version: int) -> bool:
        expected = Small(self.rank, self.ranks).loaded(weights_of(version))
        return all(raw(self.live[name]) == one.view(torch.uint8).numpy().tobytes() for name, one in expected.items())


class Calls:
    """The plans that are made, and the launches: whether they write, and whether they compare digests of targets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[bool] = []
        self.launches: list[bool] = []
        init, run = _device.Application.__init__, _device.Application.run

        def planned(application: Any, *arguments: Any, digests: bool = True) -> None:
            self.plans.append(digests)
            init(application, *arguments, digests=digests)

        def ran(*arguments: Any, commits: bool = True) -> bool:
            self.launches.append(commits)
            return run(*arguments, commits=commits)

        monkeypatch.setattr(_device.Application, "__init__", planned)
        monkeypatch.setattr(_device.Application, "run", ran)

    def taken(self) -> tuple[list[bool], list[bool]]:
        taken, self.plans, self.launches = (self.plans, self.launches), [], []
        return taken


def test_a_commit_is_one_launch_that_was_planned_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tmp_path)
    trainer.publisher._bucket = 100
    engines, calls = [Engine(tmp_path, f"rank{rank}", rank, 2) for rank in range(2)], Calls(monkeypatch)
    for version in (1, 2):
        trainer.publish()
        pairs = len(trainer.channel.version(version)["difference"]["pairs"])
        assert pairs > 2
        for engine in engines:
            assert engine.subscriber.stage() == [version] and engine.has(version - 1)
            # Each bucket is checked with digests, and nothing is written. Then the commit is planned, without digests.
            assert calls.taken() == ([True] * pairs + [False], [False] * pairs)
            assert [one.version for one in engine.subscriber.commit()] == [version] and engine.has(version)
            assert calls.taken() == ([], [True])


def test_graphs_that_were_captured_over_the_parameters_see_new_weights(tmp_path: Path) -> None:
    trainer, engine = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1)
    graphs = {name: captured_copy(one) for name, one in engine.live.items()}
    for version in (1, 2):
        trainer.publish()
        assert engine.subscriber.stage() == [version]
        assert [one.version for one in engine.subscriber.commit()] == [version]
        for name, (replay, copy) in graphs.items():
            assert raw(copy) != raw(engine.live[name])
            replay()
            assert raw(copy) == raw(engine.live[name])
    assert engine.has(2)


def test_parameters_that_move_after_they_were_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine, calls = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1), Calls(monkeypatch)
    trainer.publish()
    engine.subscriber.stage()
    calls.taken()
    before = engine.live["qk"]
    engine.live["qk"] = to_device(before)
    # The map has the dict of the parameters, as an engine's module.
    engine.subscriber._weights._owner["qk"] = engine.live["qk"]
    left = raw(before)
    assert [one.version for one in engine.subscriber.commit()] == [1] and engine.has(1)
    assert calls.taken() == ([False], [True]) and raw(before) == left


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrong_base_is_found_before_and_after_it_was_staged(when: str, tmp_path: Path) -> None:
    trainer, engine = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1)
    trainer.publish()
    lane = engine.live["qk"].view(torch.int16)
    if when == "before":
        lane[3, 3] ^= 1
        with pytest.raises(tpde.WrongBase):
            engine.subscriber.stage()
    else:
        engine.subscriber.stage()
        lane[3, 3] ^= 1
        with pytest.raises(tpde.WrongBase):
            engine.subscriber.commit()
    lane[3, 3] ^= 1
    assert engine.has(0)
    assert [one.version for one in engine.subscriber.update()] == [1] and engine.has(1)


def test_memory_beside_one_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Working memory follows from the buckets and the changes, and not from the largest tensor."""
    base = torch.randn(2048, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    state = {"embed": base, "norm": torch.ones(8, dtype=torch.bfloat16)}
    publisher = tpde.sync.Publisher(lambda: state, tpde.sync.Folder(tmp_path), bucket=1 << 14)
    live = {name: to_device(one) for name, one in state.items()}
    found = tpde.slices.record(lambda tensors: [live[name].copy_(one) for name, one in tensors], state, live)
    subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path), "one", version=0)
    state = {name: one.clone() for name, one in state.items()}
    state["embed"].view(torch.int16).view(-1)[::200] ^= 1
    sync = publisher.publish()
    assert len(publisher._channel.version(1)["difference"]["pairs"]) > 16  # type: ignore[union-attr]
    used, most = [0], [0]
    memory = _device.Device.of("cuda").__class__.memory

    def freed(bytes: int) -> None:
        used[0] -= bytes

    def counted(device: Any, bytes: int, what: str) -> Any:
        taken = memory(device, bytes, what)
        used[0] += bytes
        most[0] = max(most[0], used[0])
        weakref.finalize(taken, freed, bytes)
        return taken

    monkeypatch.setattr(_device.Device.of("cuda").__class__, "memory", counted)
    assert subscriber.stage() == [1]
    assert [one.version for one in subscriber.commit()] == [1]
    gc.collect()
    assert used[0] == 0, "memory is kept after the version"
    assert 0 < most[0] < sync.bytes + base.nbytes // 4, f"{most[0]} bytes beside a tensor of {base.nbytes}"
    assert raw(live["embed"]) == state["embed"].view(torch.uint8).numpy().tobytes()


def test_what_is_staged_does_not_wait_for_the_current_stream(tmp_path: Path) -> None:
    """The engine generates on the current stream meanwhile. A commit waits for what was staged."""
    trainer, engine, device = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1), _device.Device.of("cuda")
    trainer.publisher._bucket = 100
    side = engine.subscriber._side.stream
    assert side is not None and side.cuda_stream != device.stream().cuda_stream
    trainer.publish()
    spin(device.stream())
    assert waits_for(device.stream(), engine.subscriber.stage, seconds=20) == (False, [1])
    spin(side)
    waits, (sync,) = waits_for(side, engine.subscriber.commit)
    assert waits and sync.version == 1 and engine.has(1)


def test_checks_in_a_thread_do_not_wait_for_the_current_stream(tmp_path: Path) -> None:
    """Those of a group run while pairs arrive."""
    trainer, engine, device = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1), _device.Device.of("cuda")
    trainer.publish()
    pairs, checker = trainer.channel.version(1)["difference"]["pairs"], engine.subscriber._checker
    checker.begin(0)
    spin(device.stream())
    for one in pairs:
        checker.add(one["pair"])
    assert waits_for(device.stream(), lambda: checker.error(1), seconds=20) == (False, None) and checker.has_checked(pairs)


def test_what_is_staged_waits_for_parameters_that_are_loading(tmp_path: Path) -> None:
    trainer, engine, device = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1), _device.Device.of("cuda")
    trainer.publish()
    spin(device.stream())
    found = engine.map.bind(engine.live)
    engine.subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path), "one", version=0)
    assert waits_for(device.stream(), engine.subscriber.stage) == (True, [1])


def test_what_is_staged_waits_for_modules_that_are_loaded_again(tmp_path: Path) -> None:
    device = _device.Device.of("cuda")
    state = {f"{name}.weight": torch.randn(64, 64).bfloat16() for name in ("patched", "repacked")}
    live = {name: to_device(one) for name, one in state.items()}
    found = tpde.slices.record(lambda tensors: [live[name].copy_(one) for name, one in tensors], state, live)

    def reload(tensors: Any) -> None:
        for name, one in tensors:
            live[name].copy_(one)
        spin(device.stream())  # an engine does not wait for its copies

    publisher = tpde.sync.Publisher(lambda: state, tpde.sync.Folder(tmp_path))
    kept = found.keep(state, ["repacked"])
    subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path), "one", version=0, kept=kept, reload=reload)
    for version in (1, 2):
        state = {name: one * 1.5 for name, one in state.items()}
        publisher.publish()
        if version == 1:
            assert subscriber.stage() == [1]
        else:
            assert waits_for(device.stream(), subscriber.stage) == (True, [2])
        (sync,) = subscriber.commit()
        assert sync.version == version and sync.reloaded == ["repacked"] and is_busy(device.stream())
    assert all(raw(live[name]) == one.view(torch.uint8).numpy().tobytes() for name, one in state.items())
