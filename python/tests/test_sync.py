"""Publisher and subscribers over a folder: versions, failures, and processes that end at any moment."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

from raised import raises  # noqa: E402
import loaders  # noqa: E402 (needs torch)
from test_recorder import Repacking, same  # noqa: E402

import tpde.slices  # noqa: E402
import tpde.sync  # noqa: E402
from tpde._engine import application as _application  # noqa: E402


class Small(loaders.Model):
    """Rows of two tensors in one parameter, columns of a third, and a vector."""

    shapes: loaders.Shapes = {
        "q": ((16, 8), loaders.BF16),
        "k": ((8, 8), loaders.BF16),
        "o": ((8, 16), loaders.BF16),
        "norm": ((8,), loaders.F32),
    }

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.fused("qk", {"q": loaders.part(16, rank, ranks), "k": loaders.part(8, rank, ranks)}, (8,))
        self.columns("o", (8, 16))
        self.whole("norm", (8,), loaders.F32)


def weights_of(version: int, kind: type[loaders.Model] = Small) -> loaders.Weights:
    """The trainer's weights of a version."""
    base = loaders.random_weights(kind.shapes, 1)
    return loaders.changed(base, 1000 + version, 0.2) if version else base


class Trainer:
    """A source whose weights are those of the next version."""

    def __init__(self, folder: Path, kind: type[loaders.Model] = Small) -> None:
        self.kind = kind
        self.channel = tpde.sync.Folder(folder)
        versions = self.channel.versions()
        self.version = versions[-1] if versions else 0
        self.publisher = tpde.sync.Publisher(lambda: weights_of(self.version, kind), self.channel, timeout=0)

    def publish(self) -> tpde.sync.Sync:
        self.version = self.publisher.version + 1
        return self.publisher.publish()


class Loaded:
    """A rank of an engine that has loaded a version. Without a version its memory is random."""

    def __init__(self, name: str, rank: int, ranks: int, version: int) -> None:
        self.name, self.rank, self.ranks = name, rank, ranks
        self.model = Small(rank, ranks)
        self.model.load_weights(weights_of(max(version, 0)).items())
        if version < 0:
            for parameter in self.model.parameters.values():
                parameter.view(torch.uint8).bitwise_xor_(77)
        self.map = tpde.slices.record(self.model.load_weights, weights_of(0), self.model.parameters)


class Engine(Loaded):
    """One that subscribes."""

    def __init__(self, folder: Path, name: str, rank: int, ranks: int, version: int) -> None:
        super().__init__(name, rank, ranks, version)
        self.subscriber = tpde.sync.Subscriber(self.map, tpde.sync.Folder(folder), name, version=version)

    def update(self) -> list[int]:
        return [one.version for one in self.subscriber.update()]

    def check(self) -> None:
        """The parameters are those of the subscriber's version, and of no other."""
        if self.subscriber.version >= 0:
            assert same(self.model.parameters, Small(self.rank, self.ranks).loaded(weights_of(self.subscriber.version)))


def test_subscribers_follow_version_by_version(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    engines = [Engine(tmp_path, f"rank{rank}", rank, 2, version=0) for rank in range(2)]
    assert engines[0].update() == []
    for version in (1, 2, 3):
        sync = trainer.publish()
        assert sync.version == version and sync.bytes > 0 and sync.changed is not None and 0.1 < sync.changed < 0.6
        assert sync.favor == "ratio" and sync.milliseconds.keys() == {"wait", "snapshot", "encode", "check", "commit"}
        for engine in engines:
            (received,) = engine.subscriber.update()
            assert (received.version, received.bytes) == (version, sync.bytes)
            assert received.milliseconds.keys() == {"plan", "apply"} and engine.update() == []
            engine.check()
        assert trainer.publisher.wait() == []


def test_a_commit_leaves_digests_to_the_checks_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1, version=0)
    trainer.publisher._bucket = 100
    compared, opened = [], _application.open_pair

    class Spied:
        def __init__(self, *args: Any, **how: Any) -> None:
            self._pair = opened(*args, **how)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._pair, name)

        def apply_in_place(self, *args: Any, digests: bool, **how: Any) -> bool:
            compared.append(digests)
            return self._pair.apply_in_place(*args, digests=digests, **how)

    monkeypatch.setattr(_application, "open_pair", Spied)
    trainer.publish()
    assert engine.subscriber.stage() == [1] and compared == []
    lane = engine.model.parameters["qk"].view(torch.int16)
    lane[3, 3] ^= 1
    with pytest.raises(tpde.WrongBase):
        engine.subscriber.commit()  # by the sums
    lane[3, 3] ^= 1
    assert engine.subscriber.stage() == [1] and [one.version for one in engine.subscriber.commit()] == [1]
    assert compared == [False, False]
    engine.check()
    trainer.publish()
    assert engine.update() == [2] and compared == [False, False, True]  # nothing was checked before
    engine.check()


def test_weights_may_change_when_they_are_copied(tmp_path: Path) -> None:
    trained = {name: one.clone() for name, one in weights_of(0).items()}
    publisher = tpde.sync.Publisher(lambda: trained, tpde.sync.Folder(tmp_path), timeout=0)
    engine = Engine(tmp_path, "one", 0, 1, version=0)
    for name, one in weights_of(1).items():
        trained[name].copy_(one)
    publisher.publish(copied=lambda: [one.zero_() for one in trained.values()] and None)
    assert engine.update() == [1]
    engine.check()


def test_versions_never_run_ahead(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    fast, slow = Engine(tmp_path, "fast", 0, 1, version=0), Engine(tmp_path, "slow", 0, 1, version=0)
    trainer.publish()
    assert fast.update() == [1]
    with raises("not_acknowledged", match="version 1 is not confirmed by all subscribers: slow sent no answer") as caught:
        trainer.publish()
    assert (caught.value.version, caught.value.waiting, caught.value.failed) == (1, ["slow"], {})
    assert trainer.channel.versions() == [0, 1] and trainer.publisher.version == 1
    trainer.channel.drop("slow")
    assert trainer.publish().version == 2
    # One that was dropped still catches up, by the pairs that it missed.
    assert slow.update() == [1, 2] and fast.update() == [2]
    slow.check()


def test_a_subscriber_that_joins_late(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    first = Engine(tmp_path, "first", 0, 2, version=0)
    for _ in range(2):
        trainer.publish()
        first.update()
    same_layout = Engine(tmp_path, "second", 0, 2, version=0)
    with raises("not_acknowledged", match="second sent no answer"):
        trainer.publish()
    assert same_layout.update() == [1, 2]  # by the pairs that it missed
    other_layout, unknown = Engine(tmp_path, "third", 1, 2, version=0), Engine(tmp_path, "fourth", 0, 1, version=-1)
    assert other_layout.update() == [] and unknown.update() == []  # no pair is cut for them yet
    trainer.publish()
    whole = trainer.channel.version(3)["whole"]
    assert whole is not None and len(whole["layouts"]) == 3
    for engine in (first, same_layout, other_layout, unknown):
        assert engine.update() == [3]
        engine.check()
    assert other_layout.subscriber.update() == [] and trainer.publish().version == 4
    assert trainer.channel.version(4)["whole"] is None


def test_a_failure_reaches_the_trainer(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    engine = Engine(tmp_path, "rank0", 0, 1, version=0)
    engine.model.parameters["qk"].view(torch.int16)[3, 3] ^= 1
    before = {name: parameter.clone() for name, parameter in engine.model.parameters.items()}
    trainer.publish()
    with pytest.raises(tpde.WrongBase):
        engine.update()
    assert engine.subscriber.version == 0 and same(engine.model.parameters, before)
    with raises("not_acknowledged", match="rank0 failed: .*does not hold the base|rank0 failed: ") as caught:
        trainer.publish()
    assert caught.value.failed.keys() == {"rank0"} and trainer.channel.versions() == [0, 1]
    # The memory is what it was: the same version can be applied again.
    engine.model.parameters["qk"].view(torch.int16)[3, 3] ^= 1
    assert engine.update() == [1]
    trainer.publish()
    # Or the engine joins again, without a version.
    engine = Engine(tmp_path, "rank0", 0, 1, version=-1)
    trainer.publish()
    assert engine.update() == [3]
    engine.check()


def test_a_damaged_pair_is_refused_and_reported(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    engine = Engine(tmp_path, "rank0", 0, 1, version=0)
    trainer.publish()
    blob = trainer.channel.pair(trainer.channel.version(1)["difference"]["pairs"][0]["pair"]).with_suffix(".tpde-blob")
    sound = blob.read_bytes()
    blob.write_bytes(sound[:70] + bytes([sound[70] ^ 1]) + sound[71:])
    with pytest.raises(tpde.Invalid):
        engine.update()
    engine.check()
    blob.write_bytes(sound)
    assert engine.update() == [1]
    engine.check()


def test_repacked_modules_are_loaded_again(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, Repacking)
    model = Repacking(0, 1)
    model.load_weights(weights_of(0, Repacking).items())
    found = tpde.slices.record(model.load_weights, weights_of(0, Repacking), model.parameters)
    kept = found.keep(weights_of(0, Repacking), ["layers.0.experts", "layers.1.experts"])
    subscriber = tpde.sync.Subscriber(found, trainer.channel, "rank0", version=0, kept=kept, reload=model.load_weights)
    for version in (1, 2):
        trainer.publish()
        (sync,) = subscriber.update()
        assert sync.reloaded == kept.modules
        assert same(model.parameters, Repacking(0, 1).loaded(weights_of(version, Repacking)))


def test_sources_are_cast_and_copied(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    publisher = tpde.sync.Publisher(model, tpde.sync.Folder(tmp_path), dtype=torch.bfloat16, favor="speed")
    live = {name: tensor.detach().bfloat16() for name, tensor in model.state_dict().items()}

    def load(weights: Any) -> None:
        for name, weight in weights:
            live[name].copy_(weight)

    found = tpde.slices.record(load, {name: one.clone() for name, one in live.items()}, live)
    subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path), "one", version=0)
    with torch.no_grad():
        model.weight.mul_(1.5)
    assert publisher.publish().favor == "speed"
    assert subscriber.update()[0].version == 1 and torch.equal(live["weight"], model.weight.detach().bfloat16())


def test_two_publishers_do_not_mix(tmp_path: Path) -> None:
    one, other = Trainer(tmp_path), Trainer(tmp_path)
    engine = Engine(tmp_path, "rank0", 0, 1, version=0)
    one.publish()
    with pytest.raises(tpde.InvalidArgument, match="version 1 exists already: another publisher uses"):
        other.publish()
    assert engine.update() == [1]
    engine.check()
    for name in ("", "a.b", "a/b", "x" * 101):
        with pytest.raises(tpde.InvalidArgument, match="a subscriber is named"):
            Engine(tmp_path, name, 0, 1, version=0)


class Ended(BaseException):
    """Stands for the end of a process: nothing of it runs after this."""


class Ending:
    """Ends the caller before or after one of its steps on the file system, or while a pair is applied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        for owner, name in ((tpde.sync.Folder, "_write"), (tpde.sync, "save_file"), (tpde.slices.Prepared, "apply")):
            monkeypatch.setattr(owner, name, self.step(getattr(owner, name)))

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.count()
            result = function(*args, **options)
            self.count()
            return result

        return run

    def count(self) -> None:
        if self.left is not None:
            if self.left == 0:
                self.left = -1
            if self.left < 0:
                raise Ended
            self.left -= 1


def test_a_publisher_that_ends_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch)
    for step in range(100):
        folder = tmp_path / str(step)
        trainer = Trainer(folder)
        engine = Engine(folder, "rank0", 0, 1, version=0)
        trainer.publish()
        engine.update()
        ending.left = step
        try:
            trainer.publish()
        except Ended:
            ending.left = None
        else:
            break
        engine.update()
        engine.check()
        again = Trainer(folder)  # knows no weights of the last version, so the next one is whole
        sync = again.publish()
        assert sync.version == again.version and sync.changed is None
        assert engine.update() == [sync.version]
        engine.check()
    assert step == 4  # before and after the pair, and the record


def test_a_subscriber_that_ends_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch)
    for step in range(100):
        folder = tmp_path / str(step)
        trainer = Trainer(folder)
        engine, other = Engine(folder, "rank0", 0, 1, version=0), Engine(folder, "rank1", 0, 1, version=0)
        trainer.publish()
        other.update()
        ending.left = step
        try:
            engine.update()
        except Ended:
            ending.left = None
        else:
            break
        engine = Engine(folder, "rank0", 0, 1, version=0)  # its memory is gone: it loads the checkpoint again
        assert engine.update() == [1]
        trainer.publish()
        for one in (engine, other):
            assert one.update() == [2]
            one.check()
    assert step == 4  # before and after applying, and the answer


@pytest.mark.parametrize("seed", range(6))
def test_random_interleavings(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, source = Ending(monkeypatch), random.Random(seed)
    trainer, engines, published = Trainer(tmp_path), {}, 0

    def ended(work: Callable[[], Any]) -> bool:
        """Runs something that may end at a random step."""
        ending.left = source.choice([None, None, 0, 1, 2, 3, 4, 5])
        try:
            work()
        except Ended:
            return True
        except tpde.SyncError:
            pass
        finally:
            ending.left = None
        return False

    def step_of(engine: Engine) -> Callable[[], Any]:
        """All at once, or staged, applied and answered at different times."""

        def staged() -> None:
            engine.subscriber.stage()

        return source.choice([engine.update, staged, lambda: engine.subscriber.commit(answer=False), engine.subscriber.answer])

    for _ in range(60):
        kind = source.choice(["publish", "publish", "update", "update", "update", "join", "leave"])
        if kind == "publish":
            answers = [one["answer"] or one for one in trainer.channel.subscribers().values()]
            before = trainer.channel.versions()[-1]
            if ended(trainer.publish):
                trainer = Trainer(tmp_path)
            published = trainer.channel.versions()[-1]
            if published > before:  # all that could have the last version had it
                late = [one["version"] for one in answers if one["version"] < before]
                assert all(trainer.channel.version(published)["whole"] for _ in late)
        elif kind == "join" and len(engines) < 4:
            ranks = source.choice([1, 2])
            name = f"engine{source.randrange(4)}"
            version = source.choice([0, -1, published])
            engines[name] = Engine(tmp_path, name, source.randrange(ranks), ranks, version)
        elif engines:
            name = source.choice(list(engines))
            if kind == "leave":
                trainer.channel.drop(name)
                del engines[name]
            elif ended(step_of(engines[name])):
                engines[name] = Engine(tmp_path, name, engines[name].rank, engines[name].ranks, source.choice([0, -1]))
        for engine in engines.values():
            engine.check()
    # In the end all of them have the same version.
    for _ in range(2):
        for engine in engines.values():
            engine.update()
        trainer.publish()
    for engine in engines.values():
        engine.update()
        assert engine.subscriber.version == trainer.publisher.version
        engine.check()


PUBLISHER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import tpde
from test_sync import Trainer
trainer = Trainer(Path(sys.argv[2]))
print("ready", flush=True)
while True:
    trainer.publish()
"""


def test_a_publisher_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "channel"
    Trainer(folder)
    engine = Engine(folder, "late", 0, 1, version=-1)
    for round in range(2):
        tpde.sync.Folder(folder).drop("late")  # nobody is waited for, so it publishes as fast as it can
        process = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(Path(__file__).parent), str(folder)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.3 + 0.11 * round)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode == -signal.SIGKILL
        engine = Engine(folder, "late", 0, 1, version=-1)
        trainer = Trainer(folder)
        assert trainer.publisher.version > round
        trainer.publish()
        assert engine.update() == [trainer.publisher.version]
        engine.check()
