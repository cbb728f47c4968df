"""Calls that take the path of a pair, on a CUDA device or on the stand-in for its driver (see `stand_in`, `test_stand_in`)."""

from __future__ import annotations

import importlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tpde
from conftest import Made
from raised import raises

# If TPDE_GPU is set, a missing PyTorch fails here.
torch = importlib.import_module("torch") if "TPDE_GPU" in os.environ else pytest.importorskip("torch")

import tpde.store  # noqa: E402
import tpde.torch  # noqa: E402 (needs torch)
from stand_in import DEVICE, IS_USED, raw, to_device  # noqa: E402
from test_torch import tensors_of  # noqa: E402
from tpde import _tpde  # noqa: E402
from tpde._engine import device as _device, state as _state  # noqa: E402

has_device = IS_USED or "TPDE_GPU" in os.environ or torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not has_device, reason="SKIPPED: PyTorch shows no CUDA device here")
MODES = ["all_checked", "chunk_by_chunk"]


def moved(contents: dict[str, bytes]) -> dict[str, Any]:
    return {name: to_device(tensor) for name, tensor in tensors_of(contents).items()}


def back(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: raw(tensor.reshape(-1)) for name, tensor in tensors.items()}


@pytest.fixture(params=["index ahead", "larger index"])
def opened_by_a_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small index, a thread uploads it; a larger one is uploaded when its size is known."""
    if request.param == "larger index":
        monkeypatch.setattr(_device, "_INDEX_AHEAD", 256)


@pytest.mark.usefixtures("opened_by_a_thread")
class TestApplyPaths:
    @pytest.mark.parametrize("mode", MODES)
    def test_in_place(self, mode: Any, made: Made) -> None:
        # In another order than in the pair, and with tensors that it does not name.
        tensors = {"more": to_device(torch.ones(4).t()), **dict(reversed(moved(made.base_bytes).items()))}
        assert tpde.torch.apply_(tensors, made.pair, mode=mode) == "applied"
        assert raw(tensors.pop("more")) == torch.ones(4).numpy().tobytes()
        assert back(tensors) == made.target_bytes
        assert tpde.torch.apply_(tensors, made.pair, mode=mode) == "already_applied"
        assert back(tensors) == made.target_bytes

    def test_from_a_base(self, made: Made) -> None:
        base = moved(made.base_bytes)
        tensors = {name: to_device(torch.zeros_like(tensor)) for name, tensor in tensors_of(made.base_bytes).items()}
        assert tpde.torch.apply_(tensors, made.pair, base=base) == "applied"
        assert back(tensors) == made.target_bytes and back(base) == made.base_bytes
        loaded = tpde.torch.load_file(made.pair, base={"more": base["scalar"], **base}, device=DEVICE)
        assert list(loaded) == sorted(made.target_bytes) and back(loaded) == made.target_bytes
        with pytest.raises(tpde.AlreadyApplied):
            tpde.torch.load_file(made.pair, base=moved(made.target_bytes), device=DEVICE)

    def test_some_tensors(self, made: Made) -> None:
        tensors = moved(made.base_bytes)
        del tensors["embed.weight"]
        with pytest.raises(tpde.InvalidArgument, match="embed.weight"):
            tpde.torch.apply_(tensors, made.pair)
        assert tpde.torch.apply_(tensors, made.pair, strict=False) == "applied"
        assert back(tensors) == {name: made.target_bytes[name] for name in tensors}
        assert tpde.torch.apply_({"other": tensors["scalar"]}, made.pair, strict=False) == "nothing"

    def test_tied_tensors(self, tmp_path: Path) -> None:
        for is_equal in (True, False):
            base = {name: torch.zeros(100, 64) for name in ("a", "b")}
            target = {"a": torch.ones(100, 64), "b": torch.ones(100, 64) if is_equal else torch.zeros(100, 64)}
            tpde.torch.save_file(target, tmp_path / "pair", base=base, replace=True)
            shared = to_device(base["a"])
            if is_equal:
                assert tpde.torch.apply_({"a": shared, "b": shared}, tmp_path / "pair") == "applied"
                assert raw(shared) == target["a"].numpy().tobytes()
            else:
                with pytest.raises(tpde.InvalidArgument, match="share memory"):
                    tpde.torch.apply_({"a": shared, "b": shared}, tmp_path / "pair")
                assert raw(shared) == base["a"].numpy().tobytes()

    def test_tensors_in_one_memory(self, tmp_path: Path) -> None:
        """Neighbours are changed. Those that have bytes in common are refused, for each order in memory."""
        base = {name: torch.zeros(100, 64) for name in ("a", "b")}
        target = {"a": torch.ones(100, 64), "b": torch.full((100, 64), 2.0)}
        tpde.torch.save_file(target, tmp_path / "pair", base=base)
        both = to_device(torch.zeros(200, 64))
        assert tpde.torch.apply_({"a": both[100:], "b": both[:100]}, tmp_path / "pair") == "applied"
        assert raw(both) == torch.cat([target["b"], target["a"]]).numpy().tobytes()
        both = to_device(torch.zeros(199, 64))
        for tensors in ({"a": both[99:], "b": both[:100]}, {"a": both[:100], "b": both[99:]}):
            with pytest.raises(tpde.InvalidArgument, match="a part of their memory"):
                tpde.torch.apply_(tensors, tmp_path / "pair")
        assert not any(raw(both))

    @pytest.mark.parametrize("kind", ["other rows", "no base", "renamed", "several names"])
    def test_bases_of_other_kinds(self, kind: str, tmp_path: Path) -> None:
        base = {"a": torch.arange(6400.0).view(100, 64), "b": torch.zeros(30)}
        target = {"a": base["a"] + 1, "b": base["b"] - 1}
        renamed = {}
        if kind == "other rows":
            target["a"] = torch.cat([target["a"], torch.ones(7, 64)])
        elif kind == "no base":
            target["c"] = torch.arange(50)
        else:
            target["c"] = target.pop("a") if kind == "renamed" else target["a"] + 1
            renamed = {"c": "a"}
        tpde.torch.save_file(target, tmp_path / "pair", base=base, renamed=renamed)
        on_device = {name: to_device(tensor) for name, tensor in base.items()}
        expected = {name: tensor.numpy().tobytes() for name, tensor in sorted(target.items())}
        assert back(tpde.torch.load_file(tmp_path / "pair", base=on_device, device=DEVICE)) == expected
        tensors = {name: to_device(torch.zeros_like(tensor)) for name, tensor in target.items()}
        assert tpde.torch.apply_(tensors, tmp_path / "pair", base=on_device) == "applied"
        assert back(dict(sorted(tensors.items()))) == expected
        del on_device["a"]
        with pytest.raises(tpde.InvalidArgument, match="base tensor a"):
            tpde.torch.apply_(tensors, tmp_path / "pair", base=on_device)

    def test_what_does_not_fit_is_refused_with_nothing_written(self, made: Made, tmp_path: Path) -> None:
        tensors = moved(made.base_bytes)
        tensors["embed.weight"].view(torch.int16)[0, 0] ^= 1
        before = back(tensors)
        with pytest.raises(tpde.WrongBase, match="embed.weight"):
            tpde.torch.apply_(tensors, made.pair)
        assert back(tensors) == before
        tensors = moved(made.base_bytes)
        for name, odd, error in (
            ("frozen.weight", to_device(torch.zeros(100, 50, dtype=torch.float16)), tpde.InvalidArgument),
            ("frozen.weight", to_device(torch.zeros(50, 100, dtype=torch.int16)), tpde.InvalidArgument),
            ("frozen.weight", to_device(torch.zeros(100, 50, dtype=torch.float16)).t(), "not_contiguous"),
            ("frozen.weight", to_device(torch.zeros(50, 100, dtype=torch.float16)).cpu().clone(), tpde.InvalidArgument),
        ):
            with raises(error):
                tpde.torch.apply_({**tensors, name: odd}, made.pair)
        with pytest.raises(tpde.Invalid) as damage:
            tpde.torch.apply_(tensors, made.damaged("layers.1.mlp.weight"))
        assert damage.value.rule.startswith("payload.")
        with raises("unexpected_pair"):
            tpde.torch.apply_(tensors, made.pair, expect=bytes(32))
        with pytest.raises(tpde.SystemRefused):
            tpde.torch.apply_(tensors, tmp_path / "absent")
        (tmp_path / "short.tpde-index").write_bytes(Path(f"{made.pair}.tpde-index").read_bytes()[:300])
        shutil.copy(f"{made.pair}.tpde-blob", tmp_path / "short.tpde-blob")
        with pytest.raises(tpde.Invalid):
            tpde.torch.apply_(tensors, tmp_path / "short")
        assert back(tensors) == made.base_bytes

    def test_threads(self, made: Made) -> None:
        both = threading.Barrier(2)

        def apply(_: int) -> bool:
            tensors, base = moved(made.base_bytes), moved(made.base_bytes)
            both.wait()
            outcomes = [tpde.torch.apply_(tensors, made.pair), tpde.torch.apply_(tensors, made.pair, base=base)]
            return outcomes == ["applied"] * 2 and back(tensors) == made.target_bytes

        with ThreadPoolExecutor(2) as threads:
            assert all(threads.map(apply, range(2)))


def test_a_pair_that_is_replaced_while_it_is_opened(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has opened one of the two pairs, with its own blob."""
    base, versions = tensors_of(made.base_bytes), []
    for columns in (1, 2):
        version = tensors_of(made.target_bytes)
        version["embed.weight"].view(torch.int16)[:, :columns] ^= 1
        versions.append(version)
    columns_of = _device._columns_of

    def replaced(tensors: Any, device: Any) -> Any:
        tpde.torch.save_file(versions[1], tmp_path / "pair", base=base, replace=True)
        return columns_of(tensors, device)

    monkeypatch.setattr(_device, "_columns_of", replaced)
    for _ in range(5):
        tpde.torch.save_file(versions[0], tmp_path / "pair", base=base, replace=True)
        tensors = moved(made.base_bytes)
        assert tpde.torch.apply_(tensors, tmp_path / "pair") == "applied"
        assert back(tensors) in list(map(back, versions))


@pytest.mark.parametrize("where", ["while the pair is opened", "when it is open"])
def test_an_interruption_writes_nothing(where: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    if where == "while the pair is opened":
        monkeypatch.setattr(_device, "_columns_of", interrupt)
    else:
        monkeypatch.setattr(_state, "describe_each", interrupt)
        monkeypatch.setattr(_device, "_columns_of", lambda *_: None)
    tensors = moved(made.base_bytes)
    versions = [tensor._version for tensor in tensors.values()]
    with pytest.raises(KeyboardInterrupt):
        tpde.torch.apply_(tensors, made.pair)
    assert back(tensors) == made.base_bytes and [tensor._version for tensor in tensors.values()] == versions
    monkeypatch.undo()
    assert tpde.torch.apply_(tensors, made.pair) == "applied"
    assert back(tensors) == made.target_bytes


def test_an_opening_does_not_wait_for_threads_that_others_keep_busy(made: Made, tmp_path: Path) -> None:
    """If no thread of the pool is free, the caller opens the pair, and reads its payloads."""
    store = tpde.store.init(tmp_path / "store")
    store.put(made.target)
    busy, is_over = threading.Semaphore(0), threading.Event()

    def blocked(_: str) -> bool:
        busy.release()
        is_over.wait(60)
        return True

    count = os.cpu_count() or 1
    with ThreadPoolExecutor(2 * count + 1) as threads:
        gets = [threads.submit(store.get, "main", tmp_path / f"out{i}", tensors=blocked) for i in range(2 * count)]
        for _ in range(len(os.sched_getaffinity(0))):
            assert busy.acquire(timeout=30)
        device = _device.Device.of(DEVICE)
        memory = device.memory(1 << 20, "a test")
        opening = _tpde.Opening.start(device.raw, str(made.pair), None, (memory.data_ptr(), memory.numel()), memory)
        try:
            pair, on_device = threads.submit(opening.wait).result(timeout=30)
            assert pair.digest() == _tpde.Pair(str(made.pair)).digest() and on_device is not None
            # Work that no thread has begun is given up.
            _tpde.Opening.start(device.raw, str(made.pair), None, (memory.data_ptr(), memory.numel()), memory)
        finally:
            is_over.set()
        for get in gets:
            get.result()


def test_an_opening_gives_its_pair_once(made: Made) -> None:
    device = _device.Device.of(DEVICE)
    memory = device.memory(1 << 20, "a test")
    opening = _tpde.Opening.start(device.raw, str(made.pair), None, (memory.data_ptr(), memory.numel()), memory)
    pair, on_device = opening.wait()
    assert pair.digest() == _tpde.Pair(str(made.pair)).digest() and on_device is not None
    assert opening.wait() is None
    # Without a wait, the end of the object waits for the thread.
    _tpde.Opening.start(device.raw, str(made.pair), None, (memory.data_ptr(), memory.numel()), memory)
