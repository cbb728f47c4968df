"""Versions staged and applied on a CUDA device, or on the stand-in for its driver (see `stand_in`, `test_stand_in`)."""

from __future__ import annotations

import gc
import importlib
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

import tpde

# If TPDE_GPU is set, a missing PyTorch fails here.
torch = importlib.import_module("torch") if "TPDE_GPU" in os.environ else pytest.importorskip("torch")

from stand_in import IS_USED, captured_copy, is_busy, raw, spin, to_device, waits_for  # noqa: E402 (needs torch)
from test_sync import Engine as OnCpu  # noqa: E402
from test_sync import Loaded, Small, Trainer, weights_of  # noqa: E402

import tpde.slices  # noqa: E402
import tpde.sync  # noqa: E402
from tpde._engine import device as _device  # noqa: E402

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


class Behind:
    """An engine that is three versions behind, and one that holds the last version."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, buckets: tuple[int, ...] = (1 << 27,) * 3) -> None:
        self.trainer, self.late = Trainer(folder), Engine(folder, "late", 0, 1)
        self.fast = OnCpu(folder, "fast", 0, 1, version=0)
        for version, bucket in enumerate(buckets, 1):
            self.trainer.publisher._bucket = bucket
            self.trainer.publish()
            self.trainer.channel.drop("late")
            assert self.fast.update() == [version]
        self.commits = 0
        apply_after = _device.DevicePair._apply_after

        def counted(*arguments: Any, **how: Any) -> bool:
            self.commits += 1
            return apply_after(*arguments, **how)

        monkeypatch.setattr(_device.DevicePair, "_apply_after", counted)

    def blob(self, version: int) -> Path:
        name = self.trainer.channel.version(version)["difference"]["pairs"][0]["pair"]
        return self.trainer.channel.pair(name).with_suffix(".tpde-blob")

    def answer(self) -> dict[str, Any]:
        """The last answer that the publisher gets."""
        answers = sorted((self.trainer.channel.path / "answers" / f"late.{self.late.subscriber._session}").glob("*.json"))
        return {**json.loads(answers[-1].read_bytes())}

    def continues(self) -> None:
        """The engine has answered, and gets the next version."""
        assert self.answer()["version"] == 3 and self.answer()["error"] is None
        self.trainer.publish()
        assert [one.version for one in self.late.subscriber.update()] == [4] == self.fast.update() and self.late.has(4)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("buckets", [(1 << 27,) * 3, (100, 1 << 27, 40)])
def test_an_engine_that_is_behind_catches_up_in_one_commit(
    staged: bool, buckets: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind, calls = Behind(tmp_path, monkeypatch, buckets), Calls(monkeypatch)
    subscriber = behind.late.subscriber
    if staged:
        assert subscriber.stage() == [1, 2, 3] and behind.late.has(0) and behind.commits == 0
        calls.taken()
    done = subscriber.commit() if staged else subscriber.update()
    assert [one.version for one in done] == [1, 2, 3] and behind.late.has(3) and subscriber.version == 3
    # One commit, and no other launch.
    assert behind.commits == 1 and calls.taken() == ([], [])
    assert [one.bytes for one in done] == [behind.trainer.channel.version(version)["bytes"] for version in (1, 2, 3)]
    assert all(one.changed for one in done) and done[0].milliseconds == {} and "apply" in done[2].milliseconds
    assert ("merge" in done[2].milliseconds) == staged
    behind.continues()
    assert behind.commits == 1


@pytest.mark.parametrize("staged", [False, True])
def test_a_fault_of_any_version_that_is_missing_writes_nothing(
    staged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = Behind(tmp_path, monkeypatch)
    subscriber = behind.late.subscriber
    for version in (2, 3) if staged else (1, 2, 3):
        sound = behind.blob(version).read_bytes()
        damaged = sound[:70] + bytes([sound[70] ^ 1]) + sound[71:]
        behind.blob(version).write_bytes(damaged)
        if staged:
            assert subscriber.stage() == [1, 2, 3]
        with pytest.raises(tpde.Step) as caught:
            subscriber.commit() if staged else subscriber.update()
        assert caught.value.number == version and isinstance(caught.value.__cause__, tpde.Invalid)
        assert behind.late.has(0) and subscriber.version == 0
        assert behind.answer()["version"] == version and behind.answer()["error"].startswith("step: ")
        behind.blob(version).write_bytes(sound)
    # Another base, which only the first version finds. It is then applied alone, which says more.
    parameter = behind.late.live["qk"].view(torch.int16)
    parameter[3, 3] ^= 1
    left = {name: raw(one) for name, one in behind.late.live.items()}
    with pytest.raises(tpde.WrongBase):
        subscriber.update()
    assert behind.answer()["version"] == 1 and left == {name: raw(one) for name, one in behind.late.live.items()}
    parameter[3, 3] ^= 1
    assert [one.version for one in subscriber.update()] == [1, 2, 3] and behind.late.has(3)
    behind.continues()


def test_a_damaged_index_is_the_fault_of_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behind = Behind(tmp_path, monkeypatch)
    index = behind.blob(3).with_suffix(".tpde-index")
    sound = index.read_bytes()
    index.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(tpde.TpdeError):
        behind.late.subscriber.update()
    assert behind.answer()["version"] == 3 and behind.late.subscriber.version == 2 and behind.late.has(2)
    index.write_bytes(sound)
    assert [one.version for one in behind.late.subscriber.update()] == [3] and behind.late.has(3)


def test_too_little_memory_for_all_versions_suffices_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behind = Behind(tmp_path, monkeypatch)

    def refuse(*_: object, **__: object) -> None:
        raise tpde.OutOfMemory("all versions")

    monkeypatch.setattr("tpde.sync._subscriber.open_pair", refuse)
    assert [one.version for one in behind.late.subscriber.update()] == [1, 2, 3] and behind.late.has(3)


def test_versions_that_do_not_fit_one_commit_are_applied_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = Behind(tmp_path, monkeypatch)

    def refused(*_: Any, **__: Any) -> bool:
        raise tpde.InvalidArgument("a tensor that one pair has in other parts")

    monkeypatch.setattr(_device.DevicePair, "_apply_after", refused)
    assert behind.late.subscriber.stage() == [1, 2, 3]
    assert [one.version for one in behind.late.subscriber.commit()] == [1, 2, 3] and behind.late.has(3)
    behind.continues()


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
