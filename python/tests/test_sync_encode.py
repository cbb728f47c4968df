"""Buckets that two threads encode, as on a CUDA device. The device is imitated: what encodes is the CPU."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_sync import Loaded, Small, weights_of  # noqa: E402 (needs torch)

import tpde.sync  # noqa: E402
import tpde.torch  # noqa: E402


class Trainer:
    """A publisher of small buckets, whose source says that it is on a device if ``imitates``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, imitates: bool) -> None:
        self.version, self.base_pairs, self.running, self.most = 0, list[Any](), 0, 0
        #: Bucket that cannot be encoded.
        self.fails: int | None = None
        self.lock = threading.Lock()
        source = tpde.sync.Source(lambda: weights_of(self.version, Small))
        self.publisher = tpde.sync.Publisher(source, tpde.sync.Folder(folder), timeout=0, bucket=64)
        if imitates:
            monkeypatch.setattr(self.publisher, "_is_on_device", True)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream of the caller")
            monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(self.publisher, "_save", self.save)

    @contextlib.contextmanager
    def entered(self, stream: str) -> Any:
        assert stream == "the stream of the caller"
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1

    def save(self, slices: Any, path: Path, *, base_pair: Path | None = None, **how: Any) -> Any:
        number = int(path.name.rsplit("-", 1)[1])
        # The first of two ends last.
        time.sleep(0.02 * (1 - number % 2))
        if number == self.fails:
            raise OSError("no room")
        with self.lock:
            self.base_pairs.append((number, None if base_pair is None else int(base_pair.name.rsplit("-", 1)[1]), base_pair))
        return tpde.torch.save_file(slices, path, **how)

    def publish(self) -> tpde.sync.Sync:
        self.version = self.publisher.version + 1
        return self.publisher.publish()

    def pairs(self) -> list[bytes]:
        channel = self.publisher._channel
        assert channel is not None
        record = channel.version(self.publisher.version)
        names = [one["pair"] for one in record["difference"]["pairs"]]
        return [
            channel.pair(name).with_name(name + ending).read_bytes() for name in names for ending in (".tpde-index", ".tpde-blob")
        ]


def test_the_pairs_are_those_of_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as one:
        alone = Trainer(tmp_path / "one", one, imitates=False)
        expected = []
        for _ in range(3):
            alone.publish()
            expected.append(alone.pairs())
    trainer = Trainer(tmp_path / "two", monkeypatch, imitates=True)
    for version in range(3):
        trainer.base_pairs.clear()
        trainer.publish()
        assert trainer.pairs() == expected[version]
        assert len(expected[version]) > 6 and trainer.most == 2 and trainer.running == 0
        # The digests of the base come from the pair of the same bucket, of the version before.
        for number, of, path in trainer.base_pairs:
            assert of == (number if version else None)
            assert path is None or path.name.startswith(f"{version:08}-")


def test_a_bucket_that_cannot_be_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tmp_path, monkeypatch, imitates=True)
    engine = Loaded("engine", 0, 1, 0)
    subscriber = tpde.sync.Subscriber(engine.map, tpde.sync.Folder(tmp_path), "engine", version=0)
    trainer.publish()
    subscriber.update()
    for fails in range(4):
        trainer.fails = fails
        with pytest.raises(OSError, match="no room"):
            trainer.publish()
        # No thread goes on, and nothing is published.
        assert trainer.running == 0 and trainer.publisher.version == 1
        assert trainer.publisher._channel is not None and trainer.publisher._channel.versions() == [0, 1]
    trainer.fails = None
    trainer.publish()
    subscriber.update()
    assert subscriber.version == 2
    loaded = Small(0, 1).loaded(weights_of(2))
    assert all(torch.equal(raw(engine.model.parameters[name]), raw(one)) for name, one in loaded.items())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
