"""Publisher and subscribers over a group of ranks: rounds, failures, and ranks that end at any call."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

from raised import raises  # noqa: E402
from groups import Ended, Hub, Rank, together  # noqa: E402 (needs torch)
from test_recorder import same  # noqa: E402
from test_sync import Loaded, Small, weights_of  # noqa: E402

import tpde.slices  # noqa: E402
import tpde.sync  # noqa: E402

IS_LONG = "TPDE_LONG" in os.environ


class Engine(Loaded):
    """One that subscribes to a group, again after each of its deaths."""

    def __init__(self, name: str, rank: int, ranks: int, version: int = 0) -> None:
        super().__init__(name, rank, ranks, version)
        self.version = version

    def connect(self, communicator: Any, path: Path | None = None) -> Engine:
        channel = tpde.sync.Group(tpde.sync.Communicator(communicator), path)
        self.subscriber = tpde.sync.Subscriber(self.map, channel, self.name, version=self.version)
        return self

    def update(self) -> list[int]:
        try:
            return [one.version for one in self.subscriber.update()]
        finally:
            self.version = self.subscriber.version

    def until(self, version: int) -> None:
        """Updates at once, or stages first and answers when the next version is staged, by turns."""
        turns = 0
        while self.version < version:
            turns += 1
            if turns % 2 == 0:
                self.update()
                continue
            try:
                self.subscriber.stage()
                self.subscriber.commit(answer=False)
            finally:
                self.version = self.subscriber.version
        self.subscriber.answer()

    def check(self) -> None:
        """The parameters are those of the version, and of no other."""
        if self.version >= 0:
            assert same(self.model.parameters, Small(self.rank, self.ranks).loaded(weights_of(self.version)))


class Trainer:
    """A source whose weights are those of the next version. Buckets of a few rows of a tensor, or of several tensors."""

    def __init__(self, communicator: Any, path: Path | None = None, **how: Any) -> None:
        self.channel = tpde.sync.Group(tpde.sync.Communicator(communicator), path, **how)
        versions = self.channel.versions()
        self.version = versions[-1] if versions else 0
        self.publisher = tpde.sync.Publisher(lambda: weights_of(self.version), self.channel, bucket=100)

    def publish(self) -> tpde.sync.Sync:
        self.version = self.publisher.version + 1
        sync = self.publisher.publish()
        self.publisher.wait()
        return sync


def connected(*engines: Engine) -> tuple[Trainer, Hub]:
    hub = Hub(len(engines) + 1)
    for rank, engine in enumerate(engines):
        engine.connect(Rank(hub, rank + 1))
    return Trainer(Rank(hub, 0)), hub


def results(*found: Any) -> list[Any]:
    """Raises what a rank raised that should not."""
    for one in sorted(found, key=lambda one: getattr(one, "code", None) == "disconnected"):
        if isinstance(one, BaseException):
            raise one
    return list(found)


def test_versions_reach_all_ranks_in_buckets() -> None:
    engines = [Engine(f"rank{rank}", rank, 2) for rank in range(2)]
    trainer, _ = connected(*engines)
    for version in (1, 2, 3):
        sync, *others = results(*together(trainer.publish, *(engine.subscriber.update for engine in engines)))
        assert sync.version == version and 0.1 < sync.changed < 0.6 and sync.bytes > 0
        for engine, received in zip(engines, others):
            assert [one.version for one in received] == [version] and received[0].bytes == sync.bytes
            assert received[0].milliseconds.keys() == {"plan", "apply"}
            engine.version = version
            engine.check()
        record = trainer.channel.version(version)
        assert len(record["difference"]["pairs"]) == 4 and record["whole"] is None  # q and o are cut by rows
        answers = [one["answer"] for one in trainer.channel.subscribers().values()]
        assert [one["digests"] for one in answers] == [[one["digest"] for one in record["difference"]["pairs"]]] * 2
    results(*together(trainer.channel.close, *(engine.update for engine in engines)))


def test_parameters_are_only_read_until_the_commit() -> None:
    engine = Engine("one", 0, 1)
    trainer, _ = connected(engine)
    before = {name: one.clone() for name, one in engine.model.parameters.items()}
    addresses = [one.data_ptr() for one in engine.model.parameters.values()]

    def stage() -> None:
        assert engine.subscriber.stage() == [1] and same(engine.model.parameters, before)
        with pytest.raises(tpde.InvalidArgument, match="by another thread"), engine.subscriber._alone():
            engine.subscriber.commit()
        (sync,) = engine.subscriber.commit(answer=False)
        assert sync.version == 1 and sync.milliseconds.keys() == {"receive", "check", "merge", "plan", "apply"}
        assert engine.subscriber.is_owed  # the publisher waits
        engine.subscriber.answer()
        assert not engine.subscriber.is_owed

    results(*together(trainer.publish, stage))
    engine.version = 1
    engine.check()
    assert addresses == [one.data_ptr() for one in engine.model.parameters.values()]
    assert engine.subscriber.commit() == []  # nothing is applied twice


def test_a_failed_check_stops_the_version_everywhere() -> None:
    engines = [Engine("sound", 0, 1), Engine("damaged", 0, 1)]
    trainer, _ = connected(*engines)
    engines[1].model.parameters["qk"].view(torch.int16)[3, 3] ^= 1
    before = [{name: one.clone() for name, one in engine.model.parameters.items()} for engine in engines]

    def again() -> Any:
        with raises("not_acknowledged", match="damaged failed: wrong_base") as caught:
            trainer.publish()
        assert caught.value.failed.keys() == {"damaged"} and trainer.channel.versions() == [0]
        assert all(same(engine.model.parameters, one) for engine, one in zip(engines, before))
        engines[1].model.parameters["qk"].view(torch.int16)[3, 3] ^= 1
        return trainer.publish().version

    def damaged() -> list[int]:
        with pytest.raises(tpde.WrongBase):
            engines[1].update()
        return engines[1].update()

    assert results(*together(again, engines[0].update, damaged)) == [1, [1], [1]]
    for engine in engines:
        engine.check()


def test_a_failure_after_the_check_reaches_the_publisher() -> None:
    engine, other = Engine("one", 0, 1), Engine("other", 0, 1)
    trainer, _ = connected(engine, other)

    def moved() -> None:
        engine.subscriber.stage()
        engine.model.parameters["qk"].view(torch.int16)[3, 3] ^= 1  # something writes between check and commit
        before = {name: one.clone() for name, one in engine.model.parameters.items()}
        with pytest.raises(tpde.WrongBase):
            engine.subscriber.commit()
        assert engine.subscriber.version == 0 and same(engine.model.parameters, before)
        engine.model.parameters["qk"].view(torch.int16)[3, 3] ^= 1
        assert engine.update() == [1] and engine.update() == [2]

    def trains() -> None:
        with raises("not_acknowledged", match="one failed: wrong_base"):
            trainer.publish()
        assert trainer.channel.versions() == [0, 1]
        trainer.publish()

    results(*together(trains, moved, lambda: other.until(2)))
    for one in (engine, other):
        one.check()


def test_late_ranks_catch_up(tmp_path: Path) -> None:
    first, path = Engine("first", 0, 1), tmp_path / "trainer"
    hub = Hub(2)
    first.connect(Rank(hub, 1))
    trainer = Trainer(Rank(hub, 0), path)
    for _ in range(3):
        results(*together(trainer.publish, first.update))
    # A new group, in which one rank has missed pairs, one has another layout, and one has no version.
    hub, late = Hub(5), [Engine("late", 0, 1, version=1), Engine("layout", 1, 2, version=2), Engine("none", 0, 1, version=-1)]
    for rank, engine in enumerate([first, *late]):
        engine.connect(Rank(hub, rank + 1))
    trainer.publisher._channel = trainer.channel = tpde.sync.Group(tpde.sync.Communicator(Rank(hub, 0)), path)
    found = results(*together(trainer.publish, *(lambda one=one: one.until(4) for one in [first, *late])))
    assert found[0].version == 4
    record = trainer.channel.version(4)
    assert len(record["whole"]["layouts"]) == 2 and record["difference"] is not None
    for engine in [first, *late]:
        engine.check()


def test_old_versions_are_deleted(tmp_path: Path) -> None:
    engine = Engine("one", 0, 1).connect(Rank(hub := Hub(2), 1), tmp_path / "engine")
    trainer = Trainer(Rank(hub, 0), tmp_path / "trainer", history=2)
    for _ in range(5):
        results(*together(trainer.publish, engine.update))
    assert trainer.channel.versions() == [0, 4, 5]
    assert {path.name[:8] for path in (tmp_path / "trainer" / "pairs").iterdir()} == {"00000004", "00000005"}
    assert not list((tmp_path / "engine" / "pairs").iterdir())


def rounds(tmp_path: Path, ends: dict[int, int]) -> tuple[Trainer, list[Engine], list[tuple[str, ...]]]:
    """Two versions, with ranks that end at a call. Then a new group, in which they begin again."""
    hub = Hub(3)
    ranks = [Rank(hub, rank, ends.get(rank)) for rank in range(3)]
    engines = [Engine(f"rank{rank}", rank, 2) for rank in range(2)]

    def trains() -> None:
        trainer = Trainer(ranks[0], tmp_path / "trainer")
        for _ in range(2):
            trainer.publish()

    def follows(engine: Engine) -> None:
        engine.connect(ranks[engine.rank + 1]).until(2)

    found = together(trains, *(lambda engine=engine: follows(engine) for engine in engines))
    for one in found:
        assert one is None or isinstance(one, Ended) or getattr(one, "code", None) in ("disconnected", "not_acknowledged"), repr(
            one
        )
    for rank, engine in enumerate(engines):
        engine.check()  # one version, whichever rank ended at which call
        if isinstance(found[rank + 1], Ended):
            engines[rank] = Engine(engine.name, rank, 2, version=0)  # its memory is gone
    hub = Hub(3)
    for engine in engines:
        engine.connect(Rank(hub, engine.rank + 1))
    trainer = Trainer(Rank(hub, 0), tmp_path / "trainer")
    return trainer, engines, ranks[0].calls


def ended_anywhere(tmp_path: Path, ends: dict[int, int]) -> list[tuple[str, ...]]:
    """Returns the calls of the publisher. Those of the other ranks are the same ones, in the same order."""
    trainer, engines, calls = rounds(tmp_path, ends)
    wanted = trainer.publisher.version + 1
    results(*together(trainer.publish, *(lambda engine=engine: engine.until(wanted) for engine in engines)))
    for engine in engines:
        assert engine.version == wanted
        engine.check()
    return calls


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_at_any_call(rank: int, tmp_path: Path) -> None:
    """Each call with TPDE_LONG. Otherwise, for each place in the code from which the channel calls, the last call of the last version,
    and one between two buckets."""
    calls = ended_anywhere(tmp_path / "all", {})
    assert len(calls) >= 40
    last = {place: at for at, place in enumerate(calls)}
    between = [at for at, place in enumerate(calls) if any("_send_pair" in one for one in place)][3]
    assert len(last) > 8 and between < max(last.values()) // 2
    for at in range(len(calls)) if IS_LONG else sorted({between, *last.values()}):
        ended_anywhere(tmp_path / str(at), {rank: at})


@pytest.mark.parametrize("seed", range(8))
def test_random_ends_of_several_ranks(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    for attempt in range(4 if IS_LONG else 1):
        ends = {rank: source.randrange(40) for rank in source.sample(range(3), source.choice([1, 2, 3]))}
        ended_anywhere(tmp_path / str(attempt), ends)


def test_a_channel_that_is_disconnected_stays_so() -> None:
    engine = Engine("one", 0, 1)
    trainer, hub = connected(engine)
    hub.barrier.abort()
    for work in (trainer.publish, trainer.publish, engine.update, engine.update):
        with raises("disconnected", match="the channel is disconnected: ConnectionError: a rank has ended"):
            work()
    engine.check()


def test_groups_that_make_no_sense_are_refused() -> None:
    hub = Hub(2)
    with pytest.raises(tpde.InvalidArgument, match="the group has 1 rank"):
        tpde.sync.Group(tpde.sync.Communicator(Rank(Hub(1), 0)))
    with pytest.raises(tpde.InvalidArgument, match="a object has no rank, world_size, device, broadcast, all_gather"):
        tpde.sync.Communicator(object())
    disabled = Rank(hub, 0)
    disabled.disabled = True  # type: ignore[attr-defined]
    with pytest.raises(tpde.InvalidArgument, match="disabled"):
        tpde.sync.Communicator(disabled)
    with pytest.raises(tpde.InvalidArgument, match="rank 0 has the publisher"):
        Engine("one", 0, 1).connect(Rank(hub, 0))
    with pytest.raises(tpde.InvalidArgument, match="this is rank 1: the publisher is rank 0"):
        Trainer(Rank(hub, 1)).publish()
