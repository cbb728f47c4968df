"""Steps that fail on one rank: on a subscriber, or on a rank of a trainer. Nothing is written then, and the other ranks know."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

from raised import raises  # noqa: E402
from groups import Hub, Rank, together  # noqa: E402 (needs torch)
from test_group import Engine, connected, results  # noqa: E402
from test_recorder import same  # noqa: E402
from test_sync import Engine as FolderEngine  # noqa: E402
from test_sync import Trainer as FolderTrainer  # noqa: E402

import tpde.sync  # noqa: E402
from tpde.sync import _checker  # noqa: E402


class Failing:
    """Makes a function fail while ``is_on``, as on a disk that is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
        self.is_on, self.calls = False, 0
        function = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            if self.is_on:
                self.calls += 1
                raise error
            return function(*args, **options)

        monkeypatch.setattr(owner, name, run)


ERRORS = {
    "merge": (_checker, "merge_expected", tpde.SystemRefused("no space left on the device")),
    "folder": (_checker, "TemporaryFolder", OSError("no space left on the device")),
}


@pytest.mark.parametrize("what", ERRORS)
def test_a_subscriber_of_a_folder(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer, engine = FolderTrainer(tmp_path), FolderEngine(tmp_path, "one", 0, 1, version=0)
    trainer.publisher._bucket = 100
    failing = Failing(monkeypatch, *ERRORS[what])
    trainer.publish()
    before = {name: one.clone() for name, one in engine.model.parameters.items()}
    failing.is_on = True
    assert engine.subscriber.stage() == [1]  # commit repeats what failed, and answers
    with pytest.raises(type(ERRORS[what][2]), match="no space"):
        engine.subscriber.commit()
    assert failing.calls == 2 and engine.subscriber.version == 0 and same(engine.model.parameters, before)
    failing.is_on = False
    with raises("not_acknowledged", match="one failed: .*no space"):
        trainer.publish()
    assert trainer.channel.versions() == [0, 1]
    assert engine.update() == [1]
    engine.check()
    trainer.publish()
    assert engine.update() == [2]
    engine.check()


@pytest.mark.parametrize("what", ERRORS)
def test_a_subscriber_of_a_group(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other subscriber has applied the version. The failed one applies it when its disk has room, and then the next one."""
    engine, other = Engine("one", 0, 1), Engine("other", 0, 1)
    trainer, _ = connected(engine, other)
    own, error = threading.get_ident, ERRORS[what][2]
    failing: dict[str, int] = {}
    function = _checker.Checker.merge

    def merge(self: Any, *args: Any) -> Any:
        if failing.get("thread") == own():
            failing["calls"] += 1
            raise error
        return function(self, *args)

    monkeypatch.setattr(_checker.Checker, "merge", merge)

    def follows() -> None:
        failing.update(thread=own(), calls=0)
        assert engine.subscriber.stage() == [1]
        before = {name: one.clone() for name, one in engine.model.parameters.items()}
        with pytest.raises(type(error), match="no space"):
            engine.subscriber.commit()
        assert failing.pop("calls") == 2 and engine.subscriber.version == 0 and same(engine.model.parameters, before)
        failing.clear()
        assert engine.update() == [1] and engine.update() == [2]

    def trains() -> None:
        with raises("not_acknowledged", match="one failed: .*no space"):
            trainer.publish()
        assert trainer.channel.versions() == [0, 1]
        trainer.publish()

    results(*together(trains, follows, lambda: other.until(2)))
    for one in (engine, other):
        one.check()


def test_merged_pairs_are_deleted_after_the_pause(tmp_path: Path) -> None:
    trainer, engine = FolderTrainer(tmp_path), FolderEngine(tmp_path, "one", 0, 1, version=0)
    trainer.publisher._bucket = 100
    for version, after in enumerate((engine.subscriber.answer, engine.subscriber.stage), start=1):
        trainer.publish()
        engine.subscriber.stage()
        engine.subscriber.answer()  # sends nothing, and leaves what was staged
        folder = engine.subscriber._checker._folder
        assert folder is not None
        engine.subscriber.commit(answer=False)
        assert engine.subscriber.version == version and len([*folder.path.iterdir()]) == 2
        after()
        assert not folder.path.exists()


class Sharded:
    """A trainer of two ranks, each with half of the rows of two tensors. Subscribers read a folder."""

    SHAPE = (512, 256)

    def __init__(self, path: Path) -> None:
        self.channel, self.version = tpde.sync.Folder(path), 0
        self.publishers: list[Any] = together(*self.opening())

    def opening(self) -> list[Callable[[], tpde.sync.Publisher]]:
        """Functions that make the publisher of each rank."""
        hub = Hub(2)
        return [partial(self._publisher, hub, rank) for rank in range(2)]

    def _publisher(self, hub: Hub, rank: int) -> tpde.sync.Publisher:
        def held() -> list[tpde.Slice]:
            rows = slice(256 * rank, 256 * (rank + 1))
            return [tpde.Slice(name, (rows, slice(0, 256)), one[rows], self.SHAPE) for name, one in self.weights().items()]

        source = tpde.sync.Source(held, group=tpde.sync.Communicator(Rank(hub, rank)))
        return tpde.sync.Publisher(source, self.channel if rank == 0 else None, timeout=0, bucket=512 * 256)

    def weights(self) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(5)
        return {name: (torch.randn(self.SHAPE, generator=made) * (1 + 0.01 * self.version)).bfloat16() for name in "ab"}

    def publish(self) -> list[Any]:
        """What each rank returns or raises."""
        self.version = self.publishers[0].version + 1
        return together(*(one.publish for one in self.publishers))


def replaced(folder: tpde.sync.Folder) -> Callable[..., bool]:
    """A commit that finds that another publisher has committed the version."""

    def commit(version: int, _: Any) -> bool:
        raise tpde.InvalidArgument(f"version {version} exists already: another publisher uses {folder.path}")

    return commit


@pytest.mark.parametrize("what", ["merge", "commit"])
def test_the_first_rank_of_a_trainer(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All ranks raise, nothing is published, and the next version is a difference from the one that subscribers have."""
    trainer = Sharded(tmp_path)
    live = {name: one.clone() for name, one in trainer.weights().items()}
    found = tpde.slices.record(lambda tensors: [live[name].copy_(one) for name, one in tensors], trainer.weights(), live)
    subscriber = tpde.sync.Subscriber(found, trainer.channel, "one", version=0)
    trainer.publish()
    assert [one.version for one in subscriber.update()] == [1]
    before = {name: one.clone() for name, one in live.items()}
    with monkeypatch.context() as patch:
        if what == "merge":  # of the first of two buckets
            failing = Failing(patch, tpde.sync, "merge_expected", tpde.SystemRefused("no space left on the device"))
            failing.is_on = True
            expected: type[Exception] = tpde.SystemRefused
        else:
            patch.setattr(trainer.channel, "commit", replaced(trainer.channel))
            expected = tpde.InvalidArgument
        first, second = trainer.publish()
    assert isinstance(first, expected), first
    assert (second.code, second.rank, second.reason) == ("rank_failed", 0, f"{first.code}: {first}"), second
    assert trainer.channel.versions() == [0, 1] and subscriber.update() == []
    assert all(torch.equal(one, before[name]) for name, one in live.items())
    assert [one.version for one in results(*trainer.publish())] == [2, 2]
    assert [one.version for one in subscriber.update()] == [2]
    assert all(torch.equal(one, live[name]) for name, one in trainer.weights().items())


#: Functions of a rank that may fail: an object of the publisher, and the function's name.
STEPS = {
    "the trainer's function": ("_source", "_tensors"),
    "small tensors": ("_source", "_divided"),
    "copies": ("_source", "_copied"),
    "the trainer's callback": ("", ""),
    "the slices of a bucket": ("_last", "of"),
    "encode": ("", "_save"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_fails_on_one_rank(what: str, rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It raises its error, the other one learns of it and raises too, and the next attempt publishes the version."""
    trainer, error = Sharded(tmp_path), MemoryError("no room for the weights")
    results(*trainer.publish())
    publisher = trainer.publishers[rank]
    owner, name = STEPS[what]
    with monkeypatch.context() as patch:
        failing: Any = lambda: None  # noqa: E731

        def fails(*_: Any, **__: Any) -> None:
            raise error

        if name:
            patch.setattr(getattr(publisher, owner) if owner else publisher, name, fails)
        else:
            failing = fails
        trainer.version = 2
        copied = [failing if at == rank else lambda: None for at in range(2)]
        found = together(*(lambda one=one, own=own: one.publish(copied=own) for one, own in zip(trainer.publishers, copied)))
    other = found[1 - rank]
    assert found[rank] is error
    assert (other.code, other.rank, other.reason) == ("rank_failed", rank, f"MemoryError: {error}")
    assert trainer.channel.versions() == [0, 1] and [one.version for one in trainer.publishers] == [1, 1]
    assert [one.version for one in results(*trainer.publish())] == [2, 2]


@pytest.mark.parametrize("name", ["versions", "begin"])
def test_a_channel_that_cannot_be_opened(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other rank of the trainer does not wait for the one with the channel."""

    def fails(*_: Any) -> None:
        raise OSError("no such folder")

    trainer = Sharded(tmp_path / "other")
    trainer.channel = tpde.sync.Folder(tmp_path / "channel")
    monkeypatch.setattr(trainer.channel, name, fails)
    first, second = together(*trainer.opening())
    assert isinstance(first, OSError) and second.code == "rank_failed" and second.reason == "OSError: no such folder"
