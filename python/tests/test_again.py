"""Repeated calls with the same tensors, for which a `DevicePair` keeps its application. The device is the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tpde
from conftest import Made
from raised import raises
from test_torch import raw_of, tensors_of

torch = pytest.importorskip("torch")


def listed(tensors: Any) -> list[tuple]:
    return tensors.memories() if isinstance(tensors, tpde._tpde.PlainTensors) else tensors


class Planned:
    """Stands in for a device's application. The CPU decodes."""

    def __init__(self, of: FakePair, tensors: list[tuple], base: list[tuple], mode: str) -> None:
        self.of, self.tensors, self.base, self.mode = of, tensors, base, mode

    def bytes(self) -> int:
        return 5

    def prepare(self, memory: tuple[int, int]) -> Planned:
        return self

    def move_to(self, tensors: list[int], base: list[int] | None = None) -> bool:
        self.tensors = [(*memory[:3], address, *memory[4:]) for memory, address in zip(self.tensors, tensors)]
        if base is not None:
            self.base = [(*memory[:3], address, *memory[4:]) for memory, address in zip(self.base, base)]
        return self.of.can_move

    def run(self, stream: int, tell: object, *, commits: bool, meanwhile: Callable[[], object] | None) -> tuple[bool, float]:
        assert commits
        if meanwhile is not None:
            meanwhile()
        self.of.runs += 1
        if self.mode == "out_of_place":
            self.of._pair.read(self.tensors, base=self.base, digests=False, progress=None)
            return True, 0.0
        how = {"checked": self.mode == "all_checked", "digests": True}
        return self.of._pair.apply_in_place(self.tensors, before=[], **how, progress=None), 0.0


class FakePair(tpde.torch.DevicePair):
    """A `DevicePair` whose device is the CPU."""

    def __init__(self, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans = self.runs = 0
        self.can_move = True
        self._path, self._pair = str(pair), tpde._tpde.Pair(pair)
        self._index, self._blob, self._listed, self._kept = torch.zeros(1, dtype=torch.uint8), None, None, {}
        self._is_kept = True
        self._device = self._raw = self
        self.queued = 0.0
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        monkeypatch.setattr(tpde._engine.state, "device_of", lambda _: torch.device("cpu"))

    torch = torch.device("cpu")
    cuda_stream = 0

    def stream(self) -> FakePair:
        return self

    def refuse_capture(self, what: str) -> None: ...

    def memory(self, bytes: int, what: str) -> torch.Tensor:
        return torch.zeros(bytes, dtype=torch.uint8)

    def plan_all(self, tensors: list[tuple], base: list[tuple], mode: str, *, scratch_most: int, digests: bool) -> Planned:
        assert scratch_most and digests
        self.plans += 1
        return Planned(self, listed(tensors), listed(base), mode)


class TestAgain:
    """Repeated calls, for which the pair keeps its application."""

    @pytest.fixture
    def pair(self, made: Made, monkeypatch: pytest.MonkeyPatch) -> FakePair:
        return FakePair(made.pair, monkeypatch)

    def put(self, tensors: dict[str, torch.Tensor], bytes: dict[str, bytes]) -> None:
        for name, tensor in tensors_of(bytes).items():
            tensors[name].copy_(tensor)

    @pytest.mark.parametrize("mode", ["all_checked", "chunk_by_chunk"])
    def test_apply(self, mode: str, pair: FakePair, made: Made) -> None:
        tensors = tensors_of(made.base_bytes)
        for time in range(3):
            self.put(tensors, made.base_bytes)
            versions = {name: tensor._version for name, tensor in tensors.items()}
            assert tpde.torch.apply_(tensors, pair, mode=mode) == "applied"
            assert raw_of(tensors) == made.target_bytes
            for name in ("embed.weight", "layers.0.norm.weight", "frozen.weight"):
                assert (tensors[name]._version > versions[name]) == (name != "frozen.weight")
        assert (pair.plans, pair.runs) == (1, 3)
        assert tpde.torch.apply_(tensors, pair, mode=mode) == "already_applied"
        assert tpde.torch.apply_(tensors, pair, mode=mode) == "already_applied"

    def test_other_tensors_are_looked_at(self, pair: FakePair, made: Made) -> None:
        for plans in (1, 1, 1):  # new memory each time
            tensors = tensors_of(made.base_bytes)
            assert tpde.torch.apply_(tensors, pair) == "applied" and pair.plans == plans
            assert raw_of(tensors) == made.target_bytes
        pair.can_move = False
        tensors = tensors_of(made.base_bytes)
        assert tpde.torch.apply_(tensors, pair) == "applied" and pair.plans == 2
        for wrong, error in [
            (tensors["frozen.weight"].view(100, 50), tpde.InvalidArgument),
            (tensors["frozen.weight"].view(torch.int16), tpde.InvalidArgument),
            (torch.zeros(100, 50, dtype=torch.float16).t(), "not_contiguous"),
            (torch.zeros(50, 100).to_sparse(), tpde.InvalidArgument),
            (torch.zeros(50, 100, dtype=torch.float16, device="meta"), tpde.InvalidArgument),
        ]:
            with raises(error):
                tpde.torch.apply_({**tensors, "frozen.weight": wrong}, pair)
        del tensors["frozen.weight"]
        with pytest.raises(tpde.InvalidArgument, match="frozen.weight"):
            tpde.torch.apply_(tensors, pair)
        self.put({**tensors, "frozen.weight": torch.zeros(50, 100, dtype=torch.float16)}, made.base_bytes)
        assert tpde.torch.apply_(tensors, pair, strict=False) == "applied"
        with pytest.raises(tpde.InvalidArgument, match="frozen.weight"):
            tpde.torch.apply_(tensors, pair)

    def test_a_tensor_that_was_put_elsewhere(self, pair: FakePair, made: Made) -> None:
        tensors = tensors_of(made.base_bytes)
        assert tpde.torch.apply_(tensors, pair) == "applied"
        self.put(tensors, made.base_bytes)
        tensors["embed.weight"].data = tensors["embed.weight"].clone()
        assert tpde.torch.apply_(tensors, pair) == "applied" and pair.plans == 1
        assert raw_of(tensors) == made.target_bytes

    def test_a_storage_that_was_resized_in_place(self, pair: FakePair, made: Made) -> None:
        tensors = tensors_of(made.base_bytes)
        assert tpde.torch.apply_(tensors, pair) == "applied"
        for size in (tensors["embed.weight"].nbytes - 1, 5, 0):
            self.put(tensors, made.base_bytes)
            weight = tensors["embed.weight"].clone()
            assert tpde.torch.apply_({**tensors, "embed.weight": weight}, pair) == "applied"
            weight.untyped_storage().resize_(size)
            with pytest.raises(tpde.InvalidArgument, match="'embed.weight'.* without memory of its own"):
                tpde.torch.apply_({**tensors, "embed.weight": weight}, pair)
        assert pair.plans == 1

    def test_a_storage_that_was_resized_and_is_at_the_same_address(
        self, pair: FakePair, made: Made, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensors = tensors_of(made.base_bytes)
        assert tpde.torch.apply_(tensors, pair) == "applied"
        self.put(tensors, made.base_bytes)
        weight = tensors["embed.weight"]
        needed, storage, address = weight.nbytes, weight.untyped_storage().data_ptr(), weight.data_ptr()
        weight.untyped_storage().resize_(needed - 1)
        # An allocator may reuse the address. If it does not, the test pretends that it did: then only sizes differ.
        data_ptr, storage_ptr = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr
        moved = storage_ptr(weight.untyped_storage())
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda one: address if one is weight else data_ptr(one))
        monkeypatch.setattr(
            torch.UntypedStorage, "data_ptr", lambda one: storage if storage_ptr(one) == moved else storage_ptr(one)
        )
        runs = pair.runs
        with pytest.raises(tpde.InvalidArgument, match="'embed.weight'.* without memory of its own"):
            tpde.torch.apply_(tensors, pair)
        assert pair.runs == runs

    def test_a_base_or_results_of_which_a_storage_was_resized(self, pair: FakePair, made: Made) -> None:
        base, tensors = tensors_of(made.base_bytes), tensors_of(made.base_bytes)
        assert tpde.torch.apply_(tensors, pair, base=base) == "applied"
        reader = tpde._engine.reader.Reader(made.pair, base, "pt")
        reader.device, reader.on_device, reader.on_device_is_kept = torch.device("cpu"), pair, True
        assert raw_of(reader.read(list(reader.entries))) == made.target_bytes
        base["embed.weight"].untyped_storage().resize_(5)
        assert pair._load_again(base, "cpu", None) is None  # nothing is kept for such a base
        with pytest.raises(tpde.InvalidArgument, match="'embed.weight'.* without memory of its own"):
            tpde.torch.apply_(tensors, pair, base=base)

    @pytest.mark.parametrize(
        "changed",
        [
            lambda weight: weight.untyped_storage().resize_(weight.untyped_storage().nbytes() + 8),
            lambda weight: weight.set_(weight.untyped_storage(), 1, weight.shape, weight.stride()),
            lambda weight: weight.set_(weight.untyped_storage(), 0, weight.shape, weight.stride()[::-1]),
            lambda weight: weight.set_(weight.untyped_storage(), 0, weight.shape[::-1], weight.stride()),
            lambda weight: weight.set_(torch.zeros(40)),
            lambda weight: setattr(weight, "data", torch.zeros(5, 4, dtype=torch.int32)),
            lambda weight: setattr(weight, "data", weight.data.view(torch.int32)),
            lambda weight: setattr(weight, "data", torch._neg_view(weight.data)),
            lambda weight: setattr(weight, "__class__", type("Own", (torch.Tensor,), {})),
        ],
        ids=["storage", "offset", "strides", "shape", "memory", "memory and dtype", "dtype", "sign", "class"],
    )
    def test_every_change_of_a_tensor_is_seen(self, changed: object) -> None:
        from tpde._memory import torch_tensors as _torch_memory

        tensors = {"other": torch.ones(3), "weight": torch.zeros(50)[2:].narrow(0, 0, 20).view(5, 4)}
        snapshot = _torch_memory.StateSnapshot(tensors)
        assert snapshot.same(tensors) and snapshot.same(dict(tensors))
        assert not snapshot.same({"weight": tensors["weight"], "other": tensors["other"]})
        changed(tensors["weight"])
        assert not snapshot.same(tensors)
        moved = _torch_memory.StateSnapshot(dict.fromkeys(["a"], torch.zeros(3)))
        assert not moved.same({"a": torch.zeros(3, device="meta")})

    def test_from_a_base(self, pair: FakePair, made: Made) -> None:
        base, tensors = tensors_of(made.base_bytes), tensors_of(made.base_bytes)
        for _ in range(3):
            for tensor in tensors.values():
                tensor.zero_()
            assert tpde.torch.apply_(tensors, pair, base=base) == "applied"
            assert raw_of(tensors) == made.target_bytes
        assert (pair.plans, pair.runs) == (1, 3)
        base = tensors_of(made.base_bytes)
        assert tpde.torch.apply_(tensors, pair, base=base) == "applied" and raw_of(tensors) == made.target_bytes
        with pytest.raises(tpde.Poisoned):
            base["embed.weight"].zero_()
            tpde.torch.apply_(tensors, pair, base=base)

    def test_load(self, pair: FakePair, made: Made) -> None:
        base = tensors_of(made.base_bytes)
        reader = tpde._engine.reader.Reader(made.pair, base, "pt")
        reader.device, reader.on_device, reader.on_device_is_kept = torch.device("cpu"), pair, True
        assert raw_of(reader.read()) == made.target_bytes and pair.plans == 1
        loaded = [tpde.torch.load_file(pair, base=base) for _ in range(3)]
        assert (pair.plans, pair.runs) == (1, 4)
        assert all(raw_of(one) == made.target_bytes for one in loaded)
        assert len({tensor.data_ptr() for one in loaded for tensor in one.values() if tensor.numel()}) == 3 * 9
        assert tpde.torch.apply_(base, pair) == "applied"  # by a new application
        with pytest.raises(tpde.TpdeError):
            tpde.torch.load_file(pair, base=base)
        assert pair.runs == 5

    def test_the_same_memory_with_and_without_version_counters(self, pair: FakePair, made: Made) -> None:
        with torch.inference_mode():
            tensors = tensors_of(made.base_bytes)
        assert tpde.torch.apply_(tensors, pair) == "applied"

        def counted(tensor: torch.Tensor) -> torch.Tensor:
            raw = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())
            return raw.view(tensor.dtype).view(tensor.shape)

        alias = {name: counted(one) if one.numel() else torch.empty(one.shape) for name, one in tensors.items()}
        self.put(alias, made.base_bytes)
        version = alias["embed.weight"]._version
        assert tpde.torch.apply_(alias, pair) == "applied" and (pair.plans, pair.runs) == (1, 2)
        assert alias["embed.weight"]._version == version + 1 and raw_of(alias) == made.target_bytes

    def test_what_is_kept_does_not_hold_the_pair(self, pair: FakePair, made: Made) -> None:
        assert tpde.torch.apply_(tensors_of(made.base_bytes), pair) == "applied"
        assert not any(value is pair for value in vars(pair._kept[""]).values())  # a cycle would keep device memory allocated

    def test_a_failure_is_told_and_forgotten(self, pair: FakePair, made: Made) -> None:
        tensors = tensors_of(made.base_bytes)
        assert tpde.torch.apply_(tensors, pair) == "applied"
        self.put(tensors, made.base_bytes)
        tensors["embed.weight"].view(torch.int16)[0, 0] ^= 1
        for _ in range(2):
            with pytest.raises(tpde.WrongBase):
                tpde.torch.apply_(tensors, pair)
        self.put(tensors, made.base_bytes)
        assert tpde.torch.apply_(tensors, pair) == "applied" and pair.plans == 3
