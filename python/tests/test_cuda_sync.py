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

from stand_in import IS_USED, raw, to_device  # noqa: E402 (needs torch)
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
