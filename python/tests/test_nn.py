"""Linear layers that rebuild their weights, on the CPU. `test_cuda_layers.py` tests them on a GPU."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import tpde
from raised import raises
from test_torch import Tied, raw, raw_of, tuned

torch = pytest.importorskip("torch")

import tpde.nn  # noqa: E402 (needs torch)
from quantised import Resident, base_of, finetune_of, outputs_of  # noqa: E402 (needs torch)


class Deep(torch.nn.Module):
    """Linear layers of several shapes, a norm, a head tied to the embedding, a layer used twice, and two layers with one weight."""

    def __init__(self, seed: int = 1, dtype: torch.dtype = torch.bfloat16, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(100, width, dtype=dtype)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "norm": torch.nn.LayerNorm(width, dtype=dtype),
                    "up": torch.nn.Linear(width, 3 * width, dtype=dtype),
                    "down": torch.nn.Linear(3 * width, width, bias=False, dtype=dtype),
                }
            )
            for _ in range(3)
        )
        self.again = self.blocks[0]["up"]
        self.twin = torch.nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.twin.weight = self.blocks[1]["up"].weight
        self.head = torch.nn.Linear(width, 100, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](block["norm"](x))))
        x = x + self.blocks[2]["down"](self.again(x)) + self.blocks[0]["down"](self.twin(x))
        return self.head(x)


def target_of(model: torch.nn.Module, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """A fine-tuned state of the model. Tied tensors have equal values."""
    target, firsts = tuned(model, names), {}
    for name, tensor in model.state_dict().items():
        target[name] = target[firsts.setdefault(tensor.data_ptr(), name)]
    return target


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_module_with_rebuilt_weights_is_not_changed_in_place(deep: tuple, wrapped: bool) -> None:
    base, target, pair = deep
    attached = tpde.nn.attach(base, pair)
    name = next(name for name, _ in base.named_modules() if name in attached.layers)
    module = torch.nn.Sequential(base) if wrapped else base
    more = len(set(attached.layers.values())) - 1  # one module has two names
    for strict in (False, True):
        with pytest.raises(tpde.InvalidArgument, match=f"'{'0.' if wrapped else ''}{name}' and {more} more .*rebuild"):
            tpde.torch.apply_(module, pair, strict=strict)
    assert raw_of(base.state_dict()) == raw_of(target.state_dict())


def loaded(state: dict[str, torch.Tensor], device: str = "cpu", **how: object) -> Deep:
    """The plain model with these weights."""
    model = Deep(seed=5, **how)
    model.load_state_dict(state)
    return model.to(device)


@pytest.fixture
def deep(tmp_path: Path) -> tuple[Deep, Deep, Path]:
    """A base, the plain target model, and their pair."""
    base = Deep()
    target = target_of(base)
    tpde.torch.save_file(target, tmp_path / "p", base=base, codec="conditioned", chunk_lanes=4096)
    return base, loaded(target), tmp_path / "p"


TOKENS = torch.arange(24).view(2, 12)
JIT = {f"blocks.{i}.{kind}" for i in range(3) for kind in ("up", "down")} | {"again", "twin"}


def test_outputs_are_the_targets(deep: tuple[Deep, Deep, Path]) -> None:
    base, target, pair = deep
    weights = {name: parameter for name, parameter in base.named_parameters(remove_duplicate=False)}
    before = raw_of(base.state_dict())
    model = copy.copy(base)
    attached = tpde.nn.attach(base, pair)
    assert set(attached.layers) == JIT
    # The head is tied to the embedding, so it stays dense, and both are still the same tensor.
    assert {"embed.weight", "head.weight"} <= set(attached.dense) and base.head.weight is base.embed.weight
    assert type(base.head) is torch.nn.Linear
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(base(TOKENS), target(TOKENS))
    for name, layer in attached.layers.items():
        # The base tensor is the original one, and it was only read.
        assert layer._weight.bases[0].data_ptr() == weights[f"{name}.weight"].data_ptr()
        assert raw(weights[f"{name}.weight"]) == before[f"{name}.weight"]
        assert raw(layer.weight) == raw(target.state_dict()[f"{name}.weight"])
        assert "weight" not in dict(layer.named_parameters())
    assert base.again is not target.again and base.again._weight is base.blocks[0]["up"]._weight
    assert base.twin._weight is base.blocks[1]["up"]._weight
    assert 0 < attached.stored_bytes < sum(w.nbytes for n, w in weights.items() if n.rpartition(".")[0] in JIT) / 3
    attached.check()
    del model


def test_one_base_for_several_targets(tmp_path: Path) -> None:
    base = Deep()
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        state = target_of(base)
        state["blocks.0.norm.bias"] = state["blocks.0.norm.bias"] + seed
        states.append(state)
        tpde.torch.save_file(state, tmp_path / str(seed), base=base)
    before = raw_of(base.state_dict())
    models = []
    for seed in range(3):
        # Another model that shares every tensor.
        model = Deep()
        for name, parameter in base.named_parameters(remove_duplicate=False):
            first, _, last = name.rpartition(".")
            setattr(model.get_submodule(first), last, parameter)
        attached = tpde.nn.attach(model, tmp_path / str(seed))
        for name, layer in attached.layers.items():
            assert layer._weight.bases[0].data_ptr() == base.get_parameter(f"{name}.weight").data_ptr()
        models.append(model)
    assert raw_of(base.state_dict()) == before
    with torch.no_grad():
        for model, state in zip(models, states):
            assert torch.equal(model(TOKENS), loaded(state)(TOKENS))


def test_a_pair_without_a_base_needs_no_weights(deep: tuple[Deep, Deep, Path], tmp_path: Path) -> None:
    _, target, _ = deep
    tpde.torch.save_file(target, tmp_path / "anchor")
    with torch.device("meta"):
        model = Deep()
    model.head.weight = model.embed.weight
    attached = tpde.nn.attach(model, tmp_path / "anchor", device="cpu")
    assert all(layer._weight.bases == [] for layer in attached.layers.values())
    assert not any(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(TOKENS), target(TOKENS))


def test_all_tensors_that_would_stay_on_meta_are_named(deep: tuple[Deep, Deep, Path], tmp_path: Path) -> None:
    _, target, _ = deep
    tpde.torch.save_file(target, tmp_path / "anchor")
    for on_meta in [["first", "second"], ["first"], []]:
        with torch.device("meta"):
            model = Deep()
        model.head.weight = model.embed.weight
        for name in ["first", "second"]:
            model.register_buffer(name, torch.ones(2, device="meta" if name in on_meta else "cpu"), persistent=False)
        if on_meta:
            with pytest.raises(tpde.InvalidArgument, match=", ".join(map(repr, on_meta))):
                tpde.nn.attach(model, tmp_path / "anchor", device="cpu")
            assert all(parameter.is_meta for parameter in model.parameters())
        else:
            tpde.nn.attach(model, tmp_path / "anchor", device="cpu")
            with torch.no_grad():
                assert torch.equal(model(TOKENS), target(TOKENS))


def test_only_some_layers(deep: tuple[Deep, Deep, Path]) -> None:
    base, target, pair = deep
    attached = tpde.nn.attach(base, pair, only=lambda name: "down" in name)
    assert set(attached.layers) == {f"blocks.{i}.down" for i in range(3)}
    with torch.no_grad():
        assert torch.equal(base(TOKENS), target(TOKENS))


def test_layers_that_do_not_change_stay(tmp_path: Path) -> None:
    base = Deep()
    target = target_of(base, ["blocks.1.down.weight"])
    tpde.torch.save_file(target, tmp_path / "p", base=base)
    weight = base.blocks[0]["down"].weight
    attached = tpde.nn.attach(base, tmp_path / "p")
    assert set(attached.layers) == {"blocks.1.down"} and attached.dense == []
    assert base.blocks[0]["down"].weight is weight
    with torch.no_grad():
        assert torch.equal(base(TOKENS), loaded(target)(TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_and_autocast(dtype: torch.dtype, tmp_path: Path) -> None:
    base = Deep(dtype=dtype)
    target = target_of(base)
    tpde.torch.save_file(target, tmp_path / "p", base=base)
    plain = loaded(target, dtype=dtype)
    tpde.nn.attach(base, tmp_path / "p")
    with torch.no_grad():
        assert torch.equal(base(TOKENS), plain(TOKENS))
        if dtype == torch.float32:
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(base(TOKENS), plain(TOKENS))
                compiled = torch.compile(base, fullgraph=True, backend="aot_eager")
                assert torch.equal(compiled(TOKENS), plain(TOKENS))
    with pytest.raises(tpde.InvalidArgument, match="expected an input in"), torch.no_grad():
        base.twin(torch.ones(1, 64, dtype=torch.bfloat16))
    with torch.inference_mode():
        assert torch.equal(base(TOKENS), plain(TOKENS))


class TestCompiled:
    def test_whole_graph(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        compiled = torch.compile(base, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(compiled(TOKENS), target(TOKENS))
            for rows in (3, 5):  # other shapes
                assert torch.equal(compiled(TOKENS[:, :rows]), target(TOKENS[:, :rows]))

    def test_a_layer_with_inductor(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        x = torch.randn(7, 64, dtype=torch.bfloat16)
        with torch.no_grad():
            found = torch.compile(base.blocks[0]["up"], fullgraph=True)(x)
            assert torch.equal(found, target.blocks[0]["up"](x))

    def test_the_operator(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, _, pair = deep
        layer = tpde.nn.attach(base, pair).layers["blocks.0.up"]
        x = torch.randn(4, 2, 64, dtype=torch.bfloat16)
        torch.library.opcheck(
            torch.ops.tpde.linear.default,
            (x, layer.bias.detach(), layer.key, layer.out_features),
            test_utils=("test_schema", "test_faketensor"),
        )
        with torch._subclasses.FakeTensorMode() as mode:
            y = torch.ops.tpde.linear(mode.from_tensor(x), None, mode.from_tensor(layer.key), layer.out_features)
            assert y.shape == (4, 2, 192) and y.dtype == torch.bfloat16


class TestMemory:
    def test_scratch_is_shared_and_aligned(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, _, pair = deep
        attached = tpde.nn.attach(base, pair)
        with torch.no_grad():
            base(TOKENS)
        largest = max(layer._weight.bytes for layer in attached.layers.values())
        room = attached.layers["twin"]._weight._slot().memory
        assert room.data_ptr() % 256 == 0
        assert all(layer._weight._slot().memory.data_ptr() == room.data_ptr() for layer in attached.layers.values())
        assert room.numel() >= largest

    def test_outputs_do_not_lie_in_scratch(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        x = torch.randn(4, 64, dtype=torch.bfloat16)
        with torch.no_grad():
            first = base.blocks[0]["up"](x)
            kept = first.clone()
            base.blocks[1]["up"](x)
            assert torch.equal(first, kept) and torch.equal(first, target.blocks[0]["up"](x))

    def test_a_layer_that_is_gone(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, _, pair = deep
        key = tpde.nn.attach(copy.deepcopy(base), pair).layers["twin"].key
        gc.collect()
        with pytest.raises(tpde.InvalidArgument, match="no longer exists"):
            torch.ops.tpde.linear(torch.ones(1, 64, dtype=torch.bfloat16), None, key, 192)

    def test_copies_share_the_base(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        other = copy.deepcopy(base)
        assert other.twin._weight is base.twin._weight
        with torch.no_grad():
            assert torch.equal(other(TOKENS), target(TOKENS))

    def test_threads(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        wanted, found = target(TOKENS).detach(), []

        def work() -> None:
            with torch.no_grad():
                found.extend(base(TOKENS) for _ in range(5))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 15 and all(torch.equal(one, wanted) for one in found)

    def test_weights_are_not_held(self, tmp_path: Path) -> None:
        code = f"""
import torch, tpde, tpde.torch, tpde.nn
status = lambda key: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) >> 10
make = lambda: torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)))   # 192 MiB
model = make()
target = {{name: tensor.clone() for name, tensor in model.state_dict().items()}}
for tensor in target.values(): tensor.view(-1)[::1000] += 1
tpde.torch.save_file(target, {str(tmp_path / "p")!r}, base=model)
del target
tpde.nn.attach(model, {str(tmp_path / "p")!r})
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
with torch.no_grad(): model(torch.ones(1, 2048))
growth = status("VmHWM") - before
assert growth < 64, f"{{growth}} MiB more"
"""
        subprocess.run([sys.executable, "-c", code], check=True)


class TestRefused:
    def test_gradients(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, _, pair = deep
        layer = tpde.nn.attach(base, pair).layers["twin"]
        with pytest.raises(tpde.InvalidArgument, match="no_grad"):
            layer(torch.ones(1, 64, dtype=torch.bfloat16, requires_grad=True))

    def test_a_wrong_base_leaves_the_model(self, deep: tuple[Deep, Deep, Path]) -> None:
        _, target, pair = deep
        other = Deep(seed=8)
        modules = dict(other.named_modules())
        with pytest.raises(tpde.WrongBase):
            tpde.nn.attach(other, pair)
        assert dict(other.named_modules()) == modules
        with pytest.raises(tpde.AlreadyApplied):
            tpde.nn.attach(target, pair)

    def test_damage(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, _, pair = deep
        blob = bytearray(pair.with_suffix(".tpde-blob").read_bytes())
        blob[len(blob) // 3] ^= 1
        pair.with_suffix(".tpde-blob").write_bytes(blob)
        with pytest.raises(tpde.Invalid):
            tpde.nn.attach(base, pair)

    def test_another_model(self, deep: tuple[Deep, Deep, Path], tmp_path: Path) -> None:
        base, _, pair = deep
        for other in (Tied(), Deep(width=32), Deep(dtype=torch.float16)):
            with pytest.raises(tpde.InvalidArgument):
                tpde.nn.attach(other, pair)
        with pytest.raises(tpde.InvalidArgument):
            tpde.nn.attach(base, pair, payloads="disk")
        wrong: dict[str, object] = {"check": "no", "progress": 3, "only": "up", "payloads": lambda _: "disk"}
        for name, value in wrong.items():
            with pytest.raises(tpde.InvalidArgument, match=name):
                tpde.nn.attach(base, pair, **{name: value})
        if not torch.cuda.is_available():
            with raises("no_device"):
                tpde.nn.attach(base, pair, device="cuda")

    def test_tied_weights_of_two_values(self, tmp_path: Path) -> None:
        base = Deep()
        target = target_of(base)
        target["twin.weight"] = target["twin.weight"] + 1
        tpde.torch.save_file(target, tmp_path / "p", base=base)
        with pytest.raises(tpde.InvalidArgument, match="one tensor in the model, but differ in the pair"):
            tpde.nn.attach(base, tmp_path / "p")


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
class TestQuantised:
    """Models that stay in FP8 or MXFP4, from which BF16 weights are rebuilt."""

    def test_outputs_are_the_finetunes(self, kind: str, tmp_path: Path) -> None:
        base, image = base_of(kind)
        target = finetune_of(image)
        tpde.torch.save_file(target, tmp_path / "p", base=base, codec="conditioned", chunk_lanes=4096)
        assert {tensor.base_kind for tensor in tpde.inspect(tmp_path / "p").tensors} == {"dequantised"}
        model = Resident(base)
        held = {name: tensor.data_ptr() for name, tensor in base.items()}
        attached = tpde.nn.attach(model, tmp_path / "p")
        assert set(attached.layers) == {"up", "down"} and attached.dense == []
        x = torch.randn(5, 256).to(torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(model(x), outputs_of(target, x))
        for name, layer in attached.layers.items():
            assert raw(layer.weight) == raw(target[f"{name}.weight"])
            assert [tensor.data_ptr() for tensor in layer._weight.bases] == [
                held[key] for key in held if key.startswith(f"{name}.")
            ]
        assert raw_of(tpde.torch.load_file(tmp_path / "p", base=base)) == raw_of(target)

    def test_dense_weights(self, kind: str, tmp_path: Path) -> None:
        base, image = base_of(kind)
        target = finetune_of(image)
        tpde.torch.save_file(target, tmp_path / "p", base=base)
        model = Resident(base)
        attached = tpde.nn.attach(model, tmp_path / "p", only=lambda name: name.startswith("up"))
        assert (set(attached.layers), attached.dense) == ({"up"}, ["down.weight"])
        assert raw(model.down.weight) == raw(target["down.weight"])

    def test_another_base_and_missing_scales(self, kind: str, tmp_path: Path) -> None:
        base, image = base_of(kind)
        tpde.torch.save_file(finetune_of(image), tmp_path / "p", base=base)
        other, _ = base_of(kind, seed=9)
        with pytest.raises(tpde.WrongBase):
            tpde.nn.attach(Resident(other), tmp_path / "p")
        model = Resident(base)
        scales = next(name for name in base if name.startswith("up.weight_scale")).rpartition(".")[2]
        delattr(model.up, scales)
        with pytest.raises(tpde.InvalidArgument, match=f"'up.{scales}', which is not in the model"):
            tpde.nn.attach(model, tmp_path / "p")
        model.up.register_buffer(scales, base[f"up.{scales}"][:1])
        with pytest.raises(tpde.InvalidArgument, match=scales):
            tpde.nn.attach(model, tmp_path / "p")
