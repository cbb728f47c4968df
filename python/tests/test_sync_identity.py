"""Versions have an identity, and all have the same tensors: what no subscriber could follow is refused on both sides."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

from raised import raises  # noqa: E402
from groups import Hub, Rank, together  # noqa: E402 (needs torch)
from test_group import Engine as GroupEngine  # noqa: E402
from test_group import Trainer as GroupTrainer  # noqa: E402
from test_group import connected, results  # noqa: E402
from test_recorder import same  # noqa: E402
from test_sync import Engine, Small, Trainer, weights_of  # noqa: E402

import tpde.slices  # noqa: E402
import tpde.sync  # noqa: E402


def followed(folder: Path, versions: int) -> tuple[Trainer, Engine]:
    """A trainer and an engine that has followed it."""
    trainer, engine = Trainer(folder), Engine(folder, "one", 0, 1, version=0)
    for version in range(1, versions + 1):
        trainer.publish()
        assert engine.update() == [version]
    return trainer, engine


def test_a_number_that_the_channel_does_not_have_is_refused(tmp_path: Path) -> None:
    trainer, _ = followed(tmp_path, 1)
    for version in (2, 3, 10**9):
        with raises("unknown_version", match=f"has no version {version}: its last one is 1") as caught:
            Engine(tmp_path, "other", 0, 1, version=version)
        assert caught.value.version == version
    assert trainer.channel.subscribers().keys() == {"one"}
    for wrong in (-2, True, 1.0, "1", None):
        with pytest.raises(tpde.InvalidArgument, match="has version .*: expected a number"):
            tpde.sync.Subscriber(Engine(tmp_path, "x", 0, 1, version=0).map, trainer.channel, "x", version=wrong)  # type: ignore[arg-type]


def test_a_version_of_another_run_is_refused(tmp_path: Path) -> None:
    _, engine = followed(tmp_path / "old", 2)
    version = engine.subscriber.version
    assert version == 2 and pickle.loads(pickle.dumps(version)).id == version.id is not None
    # A trainer that began again on a new folder, and has got as far.
    trainer, _ = followed(tmp_path / "new", 2)
    for channel in (trainer.channel, tpde.sync.Folder(tmp_path / "empty")):
        with raises("unknown_version", match="is of another run|it has no versions") as caught:
            tpde.sync.Subscriber(engine.map, channel, "late", version=version)
        assert caught.value.found == version.id != caught.value.expected
    assert trainer.channel.subscribers().keys() == {"one"}
    # One of this run is not, also an old one.
    late = tpde.sync.Subscriber(Engine(tmp_path / "new", "x", 0, 1, version=0).map, trainer.channel, "x", version=0)
    assert [one.version for one in late.update()] == [1, 2]
    assert trainer.publish().version == 3


@pytest.mark.parametrize("versions", [0, 1, 2, 3])
def test_a_folder_that_was_replaced(versions: int, tmp_path: Path) -> None:
    """The old engine neither follows the new run nor is counted, and the old publisher does not write to it."""
    trainer, engine = followed(tmp_path / "run", 2)
    shutil.rmtree(tmp_path / "run")
    followed(tmp_path / "run", versions)
    before = {name: one.clone() for name, one in engine.model.parameters.items()}
    for work in (engine.update, engine.update, engine.subscriber.stage, trainer.publish):
        with raises("unknown_version"):
            work()
    assert engine.subscriber.version == 2 and same(engine.model.parameters, before)
    assert tpde.sync.Folder(tmp_path / "run").versions() == list(range(versions + 1))


def test_a_folder_that_went_back_to_a_copy(tmp_path: Path) -> None:
    _, engine = followed(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    trainer = Trainer(tmp_path / "run")
    trainer.publish()
    assert engine.update() == [2]
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "copy").rename(tmp_path / "run")
    with raises("unknown_version", match="has no version 2"):
        engine.update()
    tpde.sync.Folder(tmp_path / "run").drop("one")
    Trainer(tmp_path / "run").publish()
    with raises("unknown_version", match="version 2 of .* is of another run"):
        engine.update()


def test_a_subscriber_without_a_version_notices_another_run(tmp_path: Path) -> None:
    followed(tmp_path / "run", 1)
    engine = Engine(tmp_path / "run", "none", 0, 1, version=-1)
    shutil.rmtree(tmp_path / "run")
    Trainer(tmp_path / "run")
    with raises("unknown_version"):
        engine.update()
    # It has no version, so it may join any run.
    again = tpde.sync.Subscriber(engine.map, tpde.sync.Folder(tmp_path / "run"), "none", version=engine.subscriber.version)
    Trainer(tmp_path / "run").publish()
    assert [one.version for one in again.update()] == [1]


def test_a_publisher_does_not_count_a_version_of_another_run(tmp_path: Path) -> None:
    """A subscriber joined before the publisher began, or records of subscribers are those of another run."""
    engine = Engine(tmp_path, "early", 0, 1, version=3)
    trainer = Trainer(tmp_path)
    for work in (trainer.publish, trainer.publisher.wait):
        with raises("not_acknowledged", match="early failed: unknown_version: .* has no version 3") as caught:
            work()
        assert caught.value.failed.keys() == {"early"} and trainer.channel.versions() == [0]
    with raises("unknown_version"):
        engine.update()
    engine = Engine(tmp_path, "early", 0, 1, version=0)
    trainer.publish()
    assert engine.update() == [1]
    (record,) = (tmp_path / "subscribers").iterdir()
    (answer,) = (tmp_path / "answers" / record.stem).iterdir()
    changed = json.loads(answer.read_text())
    answer.write_text(json.dumps({**changed, "id": "0" * 32}))
    with raises("not_acknowledged", match="early failed: unknown_version: version 1 .* is of another run"):
        trainer.publish()


def test_a_channel_of_an_older_release_has_no_ids(tmp_path: Path) -> None:
    trainer, engine = followed(tmp_path, 1)
    for path in (tmp_path / "versions").iterdir():
        record = json.loads(path.read_text())
        del record["id"]
        record.pop("tensors", None)
        path.write_text(json.dumps(record))
    trainer.channel.drop("one")
    engine, trainer = Engine(tmp_path, "one", 0, 1, version=1), Trainer(tmp_path)
    trainer.publish()
    assert engine.update() == [2]
    trainer.publish()
    assert engine.update() == [3] and engine.subscriber.version.id is not None
    engine.check()


def again(engine: GroupEngine, rank: Rank, version: int) -> None:
    """Joins a group with the parameters that the engine has."""
    engine.version = version
    engine.connect(rank)


@pytest.mark.parametrize("claimed", ["another run", "a future version"])
def test_a_group_refuses_on_both_sides(claimed: str, tmp_path: Path) -> None:
    old, versions = GroupEngine("old", 0, 1), 2 if claimed == "another run" else 0
    trainer, _ = connected(old)
    for _ in range(2):
        results(*together(trainer.publish, lambda: old.until(trainer.publisher.version + 1)))
    begun = Trainer(tmp_path)  # another run, which has got as far
    for _ in range(versions):
        begun.publish()
    hub, sound = Hub(3), GroupEngine("sound", 0, 1, version=versions)
    again(old, Rank(hub, 1), old.subscriber.version if claimed == "another run" else 7)
    sound.connect(Rank(hub, 2))
    trainer = GroupTrainer(Rank(hub, 0), tmp_path)

    def trains() -> int:
        with raises("not_acknowledged", match="old failed: unknown_version") as caught:
            trainer.publish()
        assert caught.value.failed.keys() == {"old"} and trainer.publisher.version == versions
        return trainer.publish().version

    def refused() -> list[int]:
        with raises("unknown_version"):
            old.subscriber.update()
        # It joins again, without a version.
        old.subscriber = tpde.sync.Subscriber(old.map, old.subscriber._channel, "old", version=-1)
        return old.update()

    new = versions + 1
    assert results(*together(trains, refused, sound.update)) == [new, [new], [new]]
    for engine in (old, sound):
        engine.check()


def test_a_group_takes_old_versions_of_its_run(tmp_path: Path) -> None:
    engine = GroupEngine("one", 0, 1)
    engine.connect(Rank(hub := Hub(2), 1))
    trainer = GroupTrainer(Rank(hub, 0), tmp_path)
    results(*together(trainer.publish, engine.update))
    first = engine.subscriber.version
    trainer.channel._sender.shutdown()
    # The trainer is started again in a new group, and the engine has a version with an id.
    hub = Hub(2)
    again(engine, Rank(hub, 1), first)
    trainer = GroupTrainer(Rank(hub, 0), tmp_path)
    results(*together(trainer.publish, lambda: engine.until(2)))
    engine.check()
    assert engine.subscriber.version.id == trainer.publisher.version.id


def test_records_of_another_run_in_the_folder_of_a_rank_are_not_used(tmp_path: Path) -> None:
    for run in range(2):
        engine = GroupEngine("one", 0, 1).connect(Rank(hub := Hub(2), 1), tmp_path / "engine")
        trainer = GroupTrainer(Rank(hub, 0), tmp_path / f"trainer{run}")
        for _ in range(3 - run):
            results(*together(trainer.publish, engine.update))
        engine.check()


# Tensors.


def without(weights: Any, name: str) -> Any:
    return {one: tensor for one, tensor in weights.items() if one != name}


CHANGES: dict[str, tuple[Callable[[Any], Any], dict[str, list[str]]]] = {
    "lacks one": (lambda weights: without(weights, "norm"), {"missing": ["norm"], "extra": [], "changed": []}),
    "has one more": (lambda weights: {**weights, "new": torch.ones(3)}, {"missing": [], "extra": ["new"], "changed": []}),
    "retyped": (lambda weights: {**weights, "norm": weights["norm"].double()}, {"missing": [], "extra": [], "changed": ["norm"]}),
    "reshaped": (lambda weights: {**weights, "o": weights["o"].T.contiguous()}, {"missing": [], "extra": [], "changed": ["o"]}),
    "shorter": (lambda weights: {**weights, "q": weights["q"][:8]}, {"missing": [], "extra": [], "changed": ["q"]}),
    "renamed": (
        lambda weights: {("p" if name == "q" else name): one for name, one in weights.items()},
        {"missing": ["q"], "extra": ["p"], "changed": []},
    ),
    "none": (lambda _: {}, {"missing": ["q", "k", "o", "norm"], "extra": [], "changed": []}),
}


class Changing:
    """A source whose tensors may change."""

    def __init__(self) -> None:
        self.version, self.change = 0, None

    def __call__(self) -> Any:
        weights = weights_of(self.version)
        return weights if self.change is None else self.change(weights)


def check_refused(work: Callable[[], Any], expected: dict[str, list[str]]) -> None:
    with raises("other_tensors") as caught:
        work()
    assert {name: getattr(caught.value, name) for name in expected} == expected
    assert all(repr(name) in str(caught.value) for names in expected.values() for name in names[:3])


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_other_tensors_are_not_published_to_a_folder(what: str, is_restarted: bool, tmp_path: Path) -> None:  # noqa: FBT001
    change, expected = CHANGES[what]
    source = Changing()
    publisher = tpde.sync.Publisher(source, tpde.sync.Folder(tmp_path), timeout=0)
    engine = Engine(tmp_path, "one", 0, 1, version=0)
    source.version = 1
    publisher.publish()
    assert engine.update() == [1]
    if is_restarted:
        publisher = tpde.sync.Publisher(source, tpde.sync.Folder(tmp_path), timeout=0)
    source.version, source.change = 2, change
    files = sorted(path.name for path in (tmp_path / "pairs").iterdir())
    for _ in range(2):
        check_refused(publisher.publish, expected)
    assert publisher.version == 1 and sorted(path.name for path in (tmp_path / "pairs").iterdir()) == files
    assert engine.update() == [] and publisher.wait() == []
    source.change = None
    assert publisher.publish().version == 2 and engine.update() == [2]
    engine.check()


@pytest.mark.parametrize("what", CHANGES)
def test_other_tensors_are_not_published_to_a_group(what: str) -> None:
    change, expected = CHANGES[what]
    source, engine, hub = Changing(), GroupEngine("one", 0, 1), Hub(2)
    engine.connect(Rank(hub, 1))
    publisher = tpde.sync.Publisher(source, tpde.sync.Group(tpde.sync.Communicator(Rank(hub, 0))), bucket=100)

    def trains() -> int:
        source.version, source.change = 1, change
        check_refused(publisher.publish, expected)
        source.change = None
        return publisher.publish().version

    assert results(*together(trains, engine.update)) == [1, [1]]
    engine.check()


@pytest.mark.parametrize("what", CHANGES)
def test_other_tensors_of_several_ranks(what: str, tmp_path: Path) -> None:
    """One rank of the trainer has the tensor that changes; all ranks raise."""
    change, expected = CHANGES[what]
    expected = {name: sorted(names) for name, names in expected.items()}
    hub, source, engine = Hub(2), Changing(), Engine(tmp_path, "one", 0, 1, version=0)

    def rank(number: int) -> Callable[[], int]:
        def run() -> int:
            def held() -> Any:
                return {name: one for name, one in source().items() if (name in ("q", "p")) == (number == 0)}

            own = tpde.sync.Source(held, group=tpde.sync.Communicator(Rank(hub, number)))
            publisher = tpde.sync.Publisher(own, tpde.sync.Folder(tmp_path) if number == 0 else None, timeout=0)
            hub.barrier.wait()
            source.version, source.change = 1, change
            check_refused(publisher.publish, expected)
            hub.barrier.wait()
            source.change = None
            hub.barrier.wait()
            return publisher.publish().version

        return run

    assert results(*together(rank(0), rank(1))) == [1, 1]
    assert engine.update() == [1]
    engine.check()


@pytest.mark.parametrize("weights", [{}, {"q": torch.ones(16, 8).bfloat16()}], ids=["none", "one"])
def test_a_source_that_no_subscriber_can_follow(weights: Any, tmp_path: Path) -> None:
    if not weights:
        with pytest.raises(tpde.InvalidArgument, match="the source has no tensors"):
            tpde.sync.Publisher(lambda: weights, tpde.sync.Folder(tmp_path))
        assert tpde.sync.Folder(tmp_path).versions() == []
        return
    early = Engine(tmp_path, "early", 0, 1, version=0)
    publisher = tpde.sync.Publisher(lambda: weights, tpde.sync.Folder(tmp_path), timeout=0)
    with raises("other_tensors", match="lack a tensor that the subscriber holds: 'k'"):
        Engine(tmp_path, "late", 0, 1, version=0)
    with raises("not_acknowledged", match="early failed: other_tensors"):
        publisher.publish()
    assert publisher.version == 0 and early.subscriber.version == 0
    assert Small.shapes.keys() > weights.keys()
