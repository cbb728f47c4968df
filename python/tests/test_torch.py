"""State dicts and live modules of PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tpde
from conftest import CHUNK, SHAPES, Made

torch = pytest.importorskip("torch")

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F64": torch.float64,
}


def tensors_of(raw: dict[str, bytes]) -> dict[str, torch.Tensor]:
    """Tensors of these bytes."""
    made = {}
    for name, (dtype, shape) in SHAPES.items():
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        if raw[name]:
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(raw[name]), dtype=torch.uint8))
        made[name] = tensor
    return made


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def raw_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in tensors.items()}


class Tied(torch.nn.Module):
    """An embedding tied to the head, some layers, and a buffer."""

    def __init__(self, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(100, 64, dtype=dtype)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64, dtype=dtype) for _ in range(2)])
        self.head = torch.nn.Linear(64, 100, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def tuned(model: torch.nn.Module, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """A copy of a module's tensors in which some lanes change by one unit in the last place."""
    torch.manual_seed(3)
    target = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in target.items():
        if (names is None or name in names) and name != "head.weight":
            lanes = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
            lanes += (torch.rand(tensor.shape) < 0.05).to(lanes.dtype)
    if "head.weight" in target:
        target["head.weight"] = target["embed.weight"]
    return target


@pytest.fixture
def model(tmp_path: Path) -> tuple[Tied, dict[str, torch.Tensor], Path]:
    made = Tied()
    target = tuned(made)
    tpde.torch.save_file(target, tmp_path / "p", base=made)
    return made, target, tmp_path / "p"


def test_load_file(made: Made) -> None:
    for base in (made.base, tensors_of(made.base_bytes)):
        loaded = tpde.torch.load_file(made.pair, base=base)
        assert raw_of(loaded) == made.target_bytes
        assert {name: tensor.dtype for name, tensor in loaded.items()} == {n: DTYPES[d] for n, (d, _) in SHAPES.items()}
        assert all(tuple(loaded[name].shape) == shape for name, (_, shape) in SHAPES.items())
    assert raw_of(tpde.torch.load_file(made.pair, base=made.base, digests=False)) == made.target_bytes
    with pytest.raises(tpde.AlreadyApplied):
        tpde.torch.load_file(made.pair, base=made.target)


def test_safe_open(made: Made) -> None:
    with tpde.safe_open(made.pair, base=made.base, framework="pt", device=torch.device("cpu")) as target:
        whole = target.get_tensor("embed.weight")
        assert raw(whole) == made.target_bytes["embed.weight"]
        view = target.get_slice("embed.weight")
        for index in ((slice(3, 9),), (slice(5, 290, 7), slice(1, 60, 3)), (7,), (7, 3), (..., 3), (slice(5, 5),)):
            found = view[index]
            assert torch.equal(found, whole[index]) and found.is_contiguous()
            assert found.untyped_storage().nbytes() == found.nbytes
        scale = target.get_slice("layers.0.scale")[3:5]
        assert scale.dtype == torch.float8_e4m3fn and raw(scale) == made.target_bytes["layers.0.scale"][3 * 72 : 5 * 72]


def test_save_file_of_state_dicts_and_modules(made: Made, tmp_path: Path) -> None:
    base, target = tensors_of(made.base_bytes), tensors_of(made.target_bytes)
    tpde.torch.save_file(target, tmp_path / "a", base=base)
    assert raw_of(tpde.torch.load_file(tmp_path / "a", base=base)) == made.target_bytes
    tpde.torch.save_file(target, tmp_path / "b", base=made.base)
    assert raw_of(tpde.torch.load_file(tmp_path / "b", base=made.base)) == made.target_bytes
    tpde.torch.save_file(Tied(), tmp_path / "c")
    assert raw_of(tpde.torch.load_file(tmp_path / "c")) == raw_of(Tied().state_dict())


def test_buffers_that_a_module_does_not_save(tmp_path: Path) -> None:
    module = Tied()
    module.register_buffer("cache", torch.ones(4), persistent=False)
    tpde.torch.save_file(tuned(module), tmp_path / "p", base=module)
    assert tpde.torch.apply_(module, tmp_path / "p") == "applied"
    tpde.torch.save_file(module, tmp_path / "q")
    assert set(tpde.torch.load_file(tmp_path / "q")) == set(module.state_dict())


def test_memory_is_held_while_in_use(tmp_path: Path) -> None:
    base, target = torch.randn(16 << 20), torch.nn.Parameter(torch.randn(16 << 20))
    wanted = target.detach().clone()
    told: list[int] = []

    def take_away(done: int, total: int) -> None:
        told.append(done)
        target.data = torch.empty(0)  # the parameter releases its memory
        torch.zeros(16 << 20)  # which this allocation could reuse

    for _ in range(10):
        told.clear()
        target.data = wanted.clone()
        tpde.torch.save_file({"w": target}, tmp_path / "p", base={"w": base}, progress=take_away, replace=True)
        assert not target.numel() and torch.equal(tpde.torch.load_file(tmp_path / "p", base={"w": base})["w"], wanted)
        if len(told) > 1:  # reported before all was read
            return
    pytest.fail("the work was always done first")


def test_what_safetensors_writes(made: Made, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    base, target = tensors_of(made.base_bytes), tensors_of(made.target_bytes)
    safetensors.save_file(base, tmp_path / "base.safetensors")
    safetensors.save_file(target, tmp_path / "target.safetensors")
    tpde.encode(tmp_path / "target.safetensors", tmp_path / "p", base=tmp_path / "base.safetensors")
    tpde.apply(tmp_path / "p", tmp_path / "out.safetensors", base=tmp_path / "base.safetensors")
    assert raw_of(safetensors.load_file(tmp_path / "out.safetensors")) == made.target_bytes


class TestApply:
    @pytest.mark.parametrize("mode", ["all_checked", "chunk_by_chunk"])
    def test_live_parameters(self, model: tuple, mode: str) -> None:
        module, target, pair = model
        before = {name: (parameter, parameter.data_ptr()) for name, parameter in module.named_parameters()}
        assert tpde.torch.apply_(module, pair, mode=mode) == "applied"
        assert raw_of(module.state_dict()) == raw_of(target)
        for name, parameter in module.named_parameters():
            assert parameter is before[name][0] and parameter.data_ptr() == before[name][1] and parameter.requires_grad
        assert tpde.torch.apply_(module, pair, mode=mode) == "already_applied"
        assert raw_of(module.state_dict()) == raw_of(target)

    def test_weights_are_overwritten_from_a_base_elsewhere(self, model: tuple, tmp_path: Path) -> None:
        base, target, pair = model
        module = Tied(seed=9)  # other weights, which are overwritten
        versions = {name: parameter._version for name, parameter in module.named_parameters()}
        before = raw_of(base.state_dict())
        assert tpde.torch.apply_(module, pair, base=base) == "applied"
        assert raw_of(module.state_dict()) == raw_of(target) and raw_of(base.state_dict()) == before
        assert module.head.weight is module.embed.weight
        assert all(parameter._version > versions[name] for name, parameter in module.named_parameters())
        with pytest.raises(tpde.InvalidArgument, match="shares memory with the base"):
            tpde.torch.apply_(module, pair, base=module)
        with pytest.raises(tpde.Poisoned) as caught:
            tpde.torch.apply_(module, pair, base=Tied(seed=9))
        assert isinstance(caught.value.__cause__, tpde.WrongBase)
        with pytest.raises(tpde.Poisoned) as caught:
            tpde.torch.apply_(Tied(), pair, base=target)
        assert isinstance(caught.value.__cause__, tpde.AlreadyApplied)

    @pytest.mark.parametrize("given", [{}, {"other": torch.ones(3)}], ids=["none", "others"])
    def test_nothing_to_apply_to_is_not_applied(self, given: dict, model: tuple) -> None:
        base, _, pair = model
        before = raw_of(given)
        assert tpde.torch.apply_(given, pair, strict=False) == "nothing"
        assert tpde.torch.apply_(given, pair, strict=False, mode="chunk_by_chunk") == "nothing"
        assert tpde.torch.apply_(given, pair, strict=False, base=base) == "nothing"
        assert tpde.numpy.apply_({}, pair, strict=False) == "nothing"
        assert raw_of(given) == before
        message = "the pair has '.*', given is 'other'" if given else "which is missing among the given ones; strict=False skips it"
        with pytest.raises(tpde.InvalidArgument, match=message):
            tpde.torch.apply_(given, pair)

    def test_state_dicts(self, model: tuple) -> None:
        module, target, pair = model
        assert tpde.torch.apply_(module.state_dict(), pair) == "applied"
        assert raw_of(module.state_dict()) == raw_of(target)

    def test_every_dtype(self, made: Made) -> None:
        tensors = tensors_of(made.base_bytes)
        assert tpde.torch.apply_(tensors, made.pair) == "applied"
        assert raw_of(tensors) == made.target_bytes

    def test_tied_weights_are_patched_once(self, model: tuple) -> None:
        module, target, pair = model
        assert {"embed.weight", "head.weight"} <= set(tensor.name for tensor in tpde.inspect(pair).tensors)
        assert tpde.torch.apply_(module, pair) == "applied"
        assert module.head.weight is module.embed.weight and raw(module.embed.weight) == raw(target["embed.weight"])

    def test_tied_weights_of_two_values_are_refused(self, model: tuple, tmp_path: Path) -> None:
        module, target, _ = model
        target["head.weight"] = target["head.weight"].clone()
        target["head.weight"].view(torch.int16)[0, 0] ^= 1
        tpde.torch.save_file(target, tmp_path / "q", base=module)
        before = raw_of(module.state_dict())
        with pytest.raises(tpde.InvalidArgument, match="share memory"):
            tpde.torch.apply_(module, tmp_path / "q")
        assert raw_of(module.state_dict()) == before

    def test_tensors_that_overlap_in_part_are_refused(self, tmp_path: Path) -> None:
        storage = torch.zeros(100)
        base = {"a": storage[:60], "b": storage[40:]}
        target = {name: tensor + 1 for name, tensor in base.items()}
        tpde.torch.save_file(target, tmp_path / "p", base=base)
        with pytest.raises(tpde.InvalidArgument, match="share a part"):
            tpde.torch.apply_(base, tmp_path / "p")
        assert not storage.any()

    def test_storage_offsets_and_unaligned_views(self, made: Made) -> None:
        tensors = {}
        for offset, (name, (dtype, shape)) in enumerate(SHAPES.items(), start=1):
            content = made.base_bytes[name]
            if not content:
                tensors[name] = torch.empty(shape, dtype=DTYPES[dtype])
                continue
            # Neither the storage nor the offset is aligned to the elements.
            buffer = bytearray(b"\xaa" * offset + content + b"\xbb" * 9)
            count = len(content) // torch.empty((), dtype=DTYPES[dtype]).element_size()
            flat = torch.frombuffer(buffer, dtype=DTYPES[dtype], offset=offset, count=count)
            tensors[name] = flat.view(shape)
        whole = torch.zeros(3, 300, 64, dtype=torch.bfloat16)
        whole[1] = tensors["embed.weight"]
        tensors["embed.weight"] = whole[1]
        assert whole[1].storage_offset() == 300 * 64
        assert tpde.torch.apply_(tensors, made.pair) == "applied"
        assert raw_of(tensors) == made.target_bytes
        assert not whole[0].any() and not whole[2].any()

    def test_tensors_looked_at_together_are_what_each_is_alone(self, tmp_path: Path) -> None:
        from tpde._memory import torch_tensors as _torch_memory

        tensors = {
            "plain": torch.randn(4, 6),
            "parameter": torch.nn.Parameter(torch.randn(3).bfloat16()),
            "offset": torch.arange(20, dtype=torch.int16)[5:15].view(2, 5),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(1.0),
            "fp8": torch.zeros(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        }

        def outline_of(tensors: dict[str, torch.Tensor]) -> Any:
            tpde.torch.save_file({name: tensor.detach() for name, tensor in tensors.items()}, tmp_path / "pair", replace=True)
            return tpde._tpde.Pair(tmp_path / "pair").outline()

        def together(outline: Any, tensors: dict[str, torch.Tensor]) -> list[Any] | None:
            columns = _torch_memory.columns_of(list(tensors), list(tensors.values()), "cpu")
            plain = None if columns is None else outline.plain(columns)
            return None if plain is None else plain.memories()

        alone = {name: _torch_memory.describe(name, tensor) for name, tensor in tensors.items()}
        outline = outline_of(tensors)
        others = {**tensors, "other": torch.zeros(2)}
        described = together(outline, others)
        assert described is not None and [one[0] for one in described] == sorted(tensors)
        for one in described:
            assert one[:5] == alone[one[0]][:5]
            # The owner keeps all tensors and their storages.
            assert any(tensor is tensors[one[0]] for tensor in one[5][0])
            assert [storage.data_ptr() for storage in one[5][1]] == [
                tensor.untyped_storage().data_ptr() for tensor in others.values()
            ]
        some = outline.select([name != "scalar" for name in outline.names()])
        assert [one[0] for one in together(some, tensors)] == sorted(tensors.keys() - {"scalar"})
        # The fast path leaves every unusual tensor to the full check.
        assert together(outline, {name: tensor for name, tensor in tensors.items() if name != "scalar"}) is None
        emptied = torch.zeros(6)
        emptied.untyped_storage().resize_(8)
        behind = torch.zeros(8)[2:]
        behind.untyped_storage().resize_(31)
        for odd in (
            torch.zeros(4, 6).t(),
            torch.zeros(6, dtype=torch.complex64),
            torch.zeros(6).to_sparse(),
            torch.zeros(6, dtype=torch.complex64).conj().imag,
            torch.zeros(6, device="meta"),
            torch.zeros(6, dtype=torch.int32),
            torch.zeros(1, 6),
            torch.zeros(7),
            emptied,
            behind,
        ):
            like = {"plain": tensors["plain"], "odd": torch.zeros(6, 4) if odd.dim() == 2 and len(odd) > 1 else torch.zeros(6)}
            assert together(outline_of(like), like) is not None
            assert together(outline_of(like), {**like, "odd": odd}) is None

        outline = outline_of({"odd": torch.zeros(6)})

        def within(tensor: torch.Tensor) -> torch.Tensor:
            assert together(outline, {"odd": tensor}) is None
            with pytest.raises(tpde.InvalidArgument, match="without memory of its own"):
                _torch_memory.describe("odd", tensor)
            return tensor

        torch.vmap(within)(torch.zeros(2, 6))

    def test_versions_tell_autograd(self, model: tuple) -> None:
        module, _, pair = model
        loss = module(torch.arange(10)).float().sum()
        before = {name: (parameter._version, raw(parameter)) for name, parameter in module.named_parameters()}
        assert tpde.torch.apply_(module, pair) == "applied"
        for name, parameter in module.named_parameters():
            version, bits = before[name]
            assert (parameter._version > version) == (raw(parameter) != bits), name
        assert module.embed.weight._version > before["embed.weight"][0]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        module(torch.arange(10)).float().sum().backward()  # leaves that require gradients still get gradients
        assert module.embed.weight.grad is not None
        versions = {name: parameter._version for name, parameter in module.named_parameters()}
        assert tpde.torch.apply_(module, pair) == "already_applied"
        assert all(parameter._version == versions[name] for name, parameter in module.named_parameters())

    def test_a_dict_that_changes_meanwhile(self, made: Made) -> None:
        tensors = tensors_of(made.base_bytes)
        given, versions = dict(tensors), {name: tensor._version for name, tensor in tensors.items()}
        assert tpde.torch.apply_(given, made.pair, progress=lambda *_: given.clear()) == "applied"
        assert not given and raw_of(tensors) == made.target_bytes
        assert tensors["embed.weight"]._version > versions["embed.weight"]

    def test_versions_where_one_tensor_is_taken_at_a_time(self, model: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
        module, _, pair = model
        increment = torch.autograd.graph.increment_version

        def of_one(tensor: torch.Tensor) -> None:
            if not isinstance(tensor, torch.Tensor):
                raise RuntimeError("increment_version expect a Tensor as input")
            increment(tensor)

        monkeypatch.setattr(torch.autograd.graph, "increment_version", of_one)
        before = module.embed.weight._version
        assert tpde.torch.apply_(module, pair) == "applied"
        assert module.embed.weight._version > before

    def test_versions_of_what_does_not_change_stay(self, tmp_path: Path) -> None:
        module = Tied()
        tpde.torch.save_file(tuned(module, ["layers.0.weight"]), tmp_path / "p", base=module)
        versions = {name: parameter._version for name, parameter in module.named_parameters()}
        assert tpde.torch.apply_(module, tmp_path / "p") == "applied"
        moved = [name for name, parameter in module.named_parameters() if parameter._version > versions[name]]
        assert moved == ["layers.0.weight"]

    def test_names_that_share_memory_with_a_changed_one_have_their_versions_raised(self, tmp_path: Path) -> None:
        weight = torch.randn(64, 64)
        other = weight.data  # the same memory, but its own version counter
        tpde.torch.save_file({"w": weight + 1}, tmp_path / "p", base={"w": weight})
        version = other._version
        assert tpde.torch.apply_({"w": weight, "another name": other}, tmp_path / "p") == "applied"
        assert other._version > version

    def test_arrays_among_the_tensors(self, made: Made) -> None:
        tensors = {
            name: tensor.numpy() if name == "frozen.weight" else tensor for name, tensor in tensors_of(made.base_bytes).items()
        }
        assert tpde.torch.apply_(tensors, made.pair) == "applied"

    def test_inference_tensors(self, tmp_path: Path) -> None:
        with torch.inference_mode():
            weight = torch.randn(64, 64)
        target = weight + 1
        tpde.torch.save_file({"w": target}, tmp_path / "p", base={"w": weight})
        with torch.inference_mode():
            assert tpde.torch.apply_({"w": weight}, tmp_path / "p") == "applied"
        assert raw(weight) == raw(target)

    def test_wrong_base_and_damage_leave_the_weights(self, made: Made) -> None:
        tensors = tensors_of(made.base_bytes)
        tensors["frozen.weight"].view(torch.int16)[0, 0] ^= 1
        before, versions = raw_of(tensors), {name: tensor._version for name, tensor in tensors.items()}
        with pytest.raises(tpde.WrongBase) as caught:
            tpde.torch.apply_(tensors, made.pair)
        assert caught.value.tensor == "frozen.weight"
        tensors = {**tensors, "frozen.weight": tensors_of(made.base_bytes)["frozen.weight"]}
        with pytest.raises(tpde.Invalid):
            tpde.torch.apply_(tensors, made.damaged("layers.1.mlp.weight"))
        del before["frozen.weight"], versions["frozen.weight"]
        assert before.items() <= raw_of(tensors).items()
        assert versions.items() <= {name: tensor._version for name, tensor in tensors.items()}.items()

    def test_chunk_by_chunk_compares_payload_digests_before_it_writes(self, made: Made) -> None:
        tensors = tensors_of(made.base_bytes)
        with pytest.raises(tpde.Invalid):
            tpde.torch.apply_(tensors, made.damaged("layers.1.mlp.weight"), mode="chunk_by_chunk")
        assert raw_of(tensors).items() <= made.base_bytes.items()

    def test_chunk_by_chunk_tells_what_it_has_written(self, made: Made, tmp_path: Path) -> None:
        tensors = tensors_of(made.base_bytes)
        version = tensors["embed.weight"]._version
        # Format 1.1 has no payload digests, so a damaged payload is found when it is decoded.
        tpde.encode(made.target, tmp_path / "old", base=made.base, chunk_lanes=CHUNK, format="1.1")
        with pytest.raises(tpde.Poisoned) as caught:
            tpde.torch.apply_(tensors, made.damaged("layers.1.mlp.weight", tmp_path / "old"), mode="chunk_by_chunk")
        assert isinstance(caught.value.__cause__, tpde.Invalid) and 0 < len(caught.value.written) < caught.value.total
        assert tensors["embed.weight"]._version > version
        for name, tensor in tensors.items():  # each chunk is entirely base or entirely target
            assert raw(tensor)[:100] in (made.base_bytes[name][:100], made.target_bytes[name][:100])

    def test_missing_and_additional_tensors(self, model: tuple) -> None:
        module, target, pair = model
        part = {name: tensor for name, tensor in module.state_dict().items() if "layers" in name}
        with pytest.raises(tpde.InvalidArgument, match="'embed.weight' and 2 more"):
            tpde.torch.apply_(part, pair)
        more = {"more": torch.ones(2), "text": "x", "sparse": torch.ones(3).to_sparse(), "meta": torch.ones(3, device="meta")}
        assert tpde.torch.apply_({**part, **more}, pair, strict=False) == "applied"
        assert all(raw(part[name]) == raw(target[name]) for name in part)

    def test_invalid_arguments(self, model: tuple) -> None:
        module, _, pair = model
        for wrong in (module.float(), Tied(dtype=torch.float16), 3, [1], {**module.state_dict(), "scale": torch.ones(4)}):
            with pytest.raises(tpde.InvalidArgument):
                tpde.torch.apply_(wrong, pair)
        with pytest.raises(tpde.InvalidArgument):
            tpde.torch.apply_(Tied(), pair, mode="fast")

    def test_no_tensor_of_the_weights_size_is_made(self, tmp_path: Path) -> None:
        code = f"""
import resource, torch, tpde, tpde.torch
torch.manual_seed(0)
base = {{"w": torch.randn(48 << 20)}}                   # 192 MiB
target = {{"w": base["w"].clone()}}
target["w"][::1000] += 1
tpde.torch.save_file(target, {str(tmp_path / "p")!r}, base=base)
del target
# The earlier peak is above the size of two such tensors, so it is reset before each measurement.
for mode in ("all_checked", "chunk_by_chunk"):
    open("/proc/self/clear_refs", "w").write("5")       # the peak begins here
    status = lambda key: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) >> 10
    before = status("VmRSS")
    assert tpde.torch.apply_(base, {str(tmp_path / "p")!r}, mode=mode) == "applied"
    growth = status("VmHWM") - before
    assert growth < 96, f"{{mode}}: {{growth}} MiB more"
    base["w"][::1000] -= 1
    base["w"] = base["w"].clone()
    torch.manual_seed(0)
    base["w"] = torch.randn(48 << 20)
"""
        subprocess.run([sys.executable, "-c", code], check=True)


class TestStreams:
    def test_weights(self, made: Made) -> None:
        assert raw_of(dict(tpde.torch.iter_weights(made.pair, base=made.base))) == made.target_bytes
        changed = dict(tpde.torch.iter_weights(made.pair, base=made.base, changed_only=True))
        assert set(made.target_bytes) - set(changed) == {"frozen.weight", "empty"}

    def test_patches_turn_base_into_target(self, made: Made) -> None:
        tensors = tensors_of(made.base_bytes)
        patches = list(tpde.torch.iter_patches(made.pair, base=tensors))
        kinds = {}
        for name, shape, dtype, values, indices in patches:
            flat = tensors[name].view(-1)
            assert tuple(tensors[name].shape) == shape and flat.dtype == dtype == values.dtype
            kinds[name] = "dense" if indices is None else "sparse"
            if indices is None:
                assert len(values) == flat.numel()
                flat.copy_(values)
            else:
                assert indices.dtype == torch.int32 and len(values) == len(indices) and (indices.diff() > 0).all()
                flat.view(torch.uint8).view(len(flat), -1)[indices.long()] = values.view(torch.uint8).view(len(values), -1)
        assert raw_of(tensors) == made.target_bytes
        assert "frozen.weight" not in kinds and kinds["embed.weight"] == kinds["layers.0.scale"] == "sparse"
        assert kinds["layers.1.steps"] == "dense"

        def names(kind: str) -> list[str]:
            return [patch.name for patch in tpde.torch.iter_patches(made.pair, base=made.base, kind=kind)]

        assert names("sparse") == [name for name, kind in kinds.items() if kind == "sparse"]
        assert names("dense") == [name for name, kind in kinds.items() if kind == "dense"]
        with pytest.raises(tpde.InvalidArgument):
            names("some")

    def test_patches_with_nan_are_dense(self, tmp_path: Path) -> None:
        base = {"w": torch.zeros(10)}
        tpde.torch.save_file({"w": torch.tensor([0.0] * 9 + [float("nan")])}, tmp_path / "p", base=base)
        (patch,) = tpde.torch.iter_patches(tmp_path / "p", base=base)
        assert patch.indices is None and patch.values.isnan().sum() == 1

    def test_negative_zeros_and_nan_payloads_come_back(self, tmp_path: Path) -> None:
        base = torch.zeros(6, dtype=torch.int32)
        target = torch.tensor([-(1 << 31), 0x7FC00001, 0x7F800001, -1, 1, 0], dtype=torch.int32)
        state = {"w": base.view(torch.float32)}
        tpde.torch.save_file({"w": target.view(torch.float32)}, tmp_path / "p", base=state)
        assert tpde.torch.apply_(state, tmp_path / "p") == "applied"
        assert torch.equal(base, target)

    def test_new_tensors_are_dense(self, tmp_path: Path) -> None:
        tpde.torch.save_file({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "p", base={"a": torch.ones(3)})
        (patch,) = tpde.torch.iter_patches(tmp_path / "p", base={"a": torch.ones(3)})
        assert patch.name == "b" and patch.indices is None


def test_packed_dtypes(tmp_path: Path) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this PyTorch has no float4_e2m1fn_x2")
    base = torch.randint(0, 256, (5, 16), dtype=torch.uint8)
    target = base ^ (torch.rand(5, 16) < 0.2).to(torch.uint8)
    state = {"w": base.view(torch.float4_e2m1fn_x2)}
    report = tpde.torch.save_file({"w": target.view(torch.float4_e2m1fn_x2)}, tmp_path / "p", base=state)
    assert report.tensors[0].dtype == "F4" and report.tensors[0].shape == (5, 32)
    loaded = tpde.torch.load_file(tmp_path / "p", base=state)["w"]
    assert loaded.dtype == torch.float4_e2m1fn_x2 and torch.equal(loaded.view(torch.uint8), target)
    with tpde.safe_open(tmp_path / "p", base={"w": base.numpy()}, framework="np", as_integers=True) as opened:
        assert opened.get_tensor("w").tobytes() == raw(target)
        with pytest.raises(tpde.InvalidArgument):
            opened.get_slice("w")[0]
    assert tpde.torch.apply_(state, tmp_path / "p") == "applied"
    assert torch.equal(base, target)


class TestModules:
    def test_tensors_are_those_that_a_module_lists(self) -> None:
        class Own(torch.nn.Linear):
            def named_parameters(self, *args: object, **how: object) -> object:
                return iter([("other", self.weight)])

        parametrized = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
        for module in (
            Tied(),
            torch.nn.Sequential(Tied(), torch.nn.BatchNorm1d(4), parametrized, torch.nn.Linear(2, 2, bias=False)),
            torch.nn.Transformer(16, 2, 1, 1, 16),
            torch.nn.Sequential(torch.nn.Linear(2, 2), Own(2, 2)),
            torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2))),
            Own(2, 2),
        ):
            named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            found = tpde._engine.reader.state_of(module)
            assert list(found) == [name for name, _ in named] and all(found[name].data_ptr() == t.data_ptr() for name, t in named)
