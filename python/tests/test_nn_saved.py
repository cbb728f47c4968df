"""Layers of `tpde.nn` that are saved, loaded, converted, copied and written: the outcome is that of the plain target, or an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tpde
from test_nn import TOKENS, Deep, deep, loaded, target_of  # noqa: F401 (a fixture)
from test_torch import raw, raw_of

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402 (needs torch)
import torch.distributed.checkpoint.state_dict as dcp_state  # noqa: E402
import tpde.nn  # noqa: E402
import tpde.sync  # noqa: E402
from quantised import Resident, base_of, finetune_of  # noqa: E402
from tpde._memory.torch_tensors import ReadOnly  # noqa: E402

Made = tuple[Deep, Deep, Path]
UP = "blocks.0.up.weight"


@pytest.fixture
def attached(deep: Made) -> tuple[Deep, Deep]:
    """A model with attached layers, and the plain target."""
    base, target, pair = deep
    tpde.nn.attach(base, pair)
    return base, target


def outputs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        y: torch.Tensor = model(TOKENS)
    return y


class TestStateDict:
    def test_it_is_that_of_the_plain_target(self, attached: tuple[Deep, Deep]) -> None:
        model, target = attached
        for how in ({}, {"prefix": "a.b."}, {"keep_vars": True}):
            found, expected = model.state_dict(**how), target.state_dict(**how)
            assert list(found) == list(expected) and raw_of(found) == raw_of(expected)
            assert all(one.device.type == "cpu" and not one.is_inference() for one in found.values())
        with torch.inference_mode():
            assert raw_of(model.state_dict()) == raw_of(target.state_dict())
            assert not any(one.is_inference() for one in model.state_dict().values())
        into: dict[str, Any] = {}
        model.blocks[0].state_dict(destination=into)
        assert raw_of(into) == raw_of(target.blocks[0].state_dict())
        layer = model.blocks[0]["up"]
        assert list(layer.state_dict()) == ["weight", "bias"] and raw(layer.state_dict()["weight"]) == raw(target.state_dict()[UP])

    def test_tied_weights_are_tied(self, attached: tuple[Deep, Deep]) -> None:
        model, target = attached

        def ties(state: dict[str, torch.Tensor]) -> list[list[str]]:
            groups: dict[int, list[str]] = {}
            for name, tensor in state.items():
                groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
            return list(groups.values())

        first, second = model.state_dict(), model.state_dict()
        assert ties(first) == ties(second) == ties(target.state_dict())
        assert first[UP].data_ptr() != second[UP].data_ptr()

    def test_functions_that_save_a_model_save_the_target(self, attached: tuple[Deep, Deep], tmp_path: Path) -> None:
        model, target = attached
        expected = raw_of(target.state_dict())
        torch.save(model.state_dict(), tmp_path / "state.pt")
        found = torch.load(tmp_path / "state.pt", weights_only=True)
        assert raw_of(found) == expected and {type(one) for one in found.values()} == {torch.Tensor}
        assert raw_of(pickle.loads(pickle.dumps(model.state_dict()))) == expected
        assert raw_of(copy.deepcopy(model.state_dict())) == expected
        safetensors.torch.save_model(model, str(tmp_path / "m.safetensors"))
        safetensors.torch.save_model(target, str(tmp_path / "t.safetensors"))
        saved = [raw_of(safetensors.torch.load_file(tmp_path / f"{one}.safetensors")) for one in "mt"]
        assert saved[0] == saved[1]
        again = Deep(seed=9)
        safetensors.torch.load_model(again, str(tmp_path / "m.safetensors"))
        assert raw_of(again.state_dict()) == expected
        assert raw_of(dcp_state.get_model_state_dict(model)) == expected
        assert raw_of(torch.compile(model, backend="eager").state_dict()).keys() == {f"_orig_mod.{name}" for name in expected}

    def test_pairs_are_made_of_it(self, deep: Made, tmp_path: Path) -> None:
        base, target, pair = deep
        plain = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        expected = raw_of(target.state_dict())
        tpde.nn.attach(base, pair)
        tpde.torch.save_file(base, tmp_path / "q", base=plain)
        assert raw_of(tpde.torch.load_file(tmp_path / "q", base=plain)) == expected
        later = {name: tensor + 1 for name, tensor in target.state_dict().items()}
        tpde.torch.save_file(later, tmp_path / "r", base=base)
        assert raw_of(tpde.torch.load_file(tmp_path / "r", base=base.state_dict())) == raw_of(later)
        channel = tpde.sync.Folder(tmp_path / "channel")
        snapshot = tpde.sync.Source(base).snapshot()
        assert {name for name in snapshot.shapes} == set(expected)
        del channel

    def test_other_versions_are_not_in_it(self, tmp_path: Path) -> None:
        for kind in ("fp8", "mxfp4"):
            base, image = base_of(kind)
            target = finetune_of(image)
            tpde.torch.save_file(target, tmp_path / kind, base=base)
            for only in (None, lambda name: name.startswith("up"), lambda _: False):
                model = Resident(base)
                tpde.nn.attach(model, tmp_path / kind, only=only)
                assert raw_of(model.state_dict()) == raw_of(target)
                model.load_state_dict(model.state_dict())

    def test_damage_is_found(self, attached: tuple[Deep, Deep]) -> None:
        model, _ = attached
        model.blocks[0]["up"]._weight.bases[0].view(torch.int16)[0, 0] ^= 1
        with pytest.raises(tpde.TpdeError):
            model.state_dict()


class TestLoading:
    def test_equal_weights_are_accepted(self, attached: tuple[Deep, Deep]) -> None:
        model, target = attached
        wide = {name: one.double() for name, one in target.state_dict().items()}
        for state, assign in [(wide, False), *((one.state_dict(), assign) for one in (model, target) for assign in (False, True))]:
            assert model.load_state_dict(state, assign=assign) == ([], [])
            assert torch.equal(outputs(model), outputs(target))

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("assign", [False, True])
    def test_other_weights_are_refused_before_anything_is_loaded(
        self, strict: bool, assign: bool, attached: tuple[Deep, Deep]
    ) -> None:
        model, target = attached
        other = {name: tensor + 1 for name, tensor in target.state_dict().items()}
        only = {**target.state_dict(), "twin.weight": other["twin.weight"]}
        odd = [{**target.state_dict(), UP: one} for one in (None, target.state_dict()[UP][:1], target.state_dict()[UP].to("meta"))]
        for wrong in (other, only, {"blocks.2.down.weight": other["blocks.2.down.weight"]}, *odd):
            for module, state in ((model, wrong), (torch.nn.Sequential(model), {f"0.{name}": one for name, one in wrong.items()})):
                with pytest.raises(tpde.InvalidArgument, match="cannot be replaced"):
                    module.load_state_dict(state, strict=strict, assign=assign)
                assert raw_of(model.state_dict()) == raw_of(target.state_dict())
                assert torch.equal(outputs(model), outputs(target))
        with pytest.raises(tpde.InvalidArgument, match="cannot be replaced"):
            model.blocks[2]["down"].load_state_dict({"weight": other["blocks.2.down.weight"]}, strict=strict, assign=assign)

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_part_of_a_model_is_checked_before_it_is_loaded(self, strict: bool, attached: tuple[Deep, Deep]) -> None:
        model, target = attached
        before, other = raw_of(model.state_dict()), Deep(seed=9)
        for part in ("blocks", "blocks.0", "blocks.0.up"):
            for one in (model, copy.deepcopy(model)):
                with pytest.raises(
                    tpde.InvalidArgument, match="cannot be replaced. Nothing was loaded|Nothing of this layer was loaded"
                ):
                    one.get_submodule(part).load_state_dict(other.get_submodule(part).state_dict(), strict=strict)
                assert raw_of(one.state_dict()) == before
        model.blocks.load_state_dict(target.blocks.state_dict(), strict=strict)
        # A module around the model is loaded before it. The error says so.
        around, wrong = (torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4), "model": one}) for one in (model, other))
        with pytest.raises(
            tpde.InvalidArgument, match="Nothing of 'model' was loaded, but tensors of modules around it may have been"
        ):
            around.load_state_dict(wrong.state_dict(), strict=strict)
        assert raw_of(model.state_dict()) == before

    def test_missing_and_unexpected_names_are_those_of_the_plain_model(self, attached: tuple[Deep, Deep]) -> None:
        model, target = attached
        state = {"more": torch.ones(1), "blocks.0.up.more": torch.ones(1), "embed.weight": target.embed.weight.detach()}
        found, expected = model.load_state_dict(state, strict=False), target.load_state_dict(state, strict=False)
        assert found == expected
        with pytest.raises(RuntimeError, match=UP):
            model.load_state_dict(state)

    def test_a_plain_model_becomes_the_target(self, attached: tuple[Deep, Deep]) -> None:
        model, target = attached
        for assign in (False, True):
            plain = Deep(seed=9)
            state = {name: one if isinstance(one, ReadOnly) else one.clone() for name, one in model.state_dict().items()}
            plain.load_state_dict(state, assign=assign)
            assert raw_of(plain.state_dict()) == raw_of(target.state_dict())
            optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
            plain(TOKENS).float().sum().backward()
            optimizer.step()
            assert raw(plain.twin.weight) != raw(target.twin.weight) and torch.equal(outputs(model), outputs(target))
            copied = copy.deepcopy(plain)
            assert isinstance(copied.twin.weight, torch.nn.Parameter) and torch.equal(outputs(copied), outputs(plain))
            buffer = io.BytesIO()
            torch.save(plain, buffer)
            buffer.seek(0)
            assert torch.equal(outputs(torch.load(buffer, weights_only=False)), outputs(plain))


class TestConversions:
    @pytest.mark.parametrize(
        "convert",
        [
            lambda model: model.float(),
            lambda model: model.to(torch.float64),
            lambda model: model.half(),
            lambda model: model.float().bfloat16(),
            lambda model: model.float().half(),
            lambda model: model.double().float().bfloat16().half(),
            lambda model: model.to("cpu").share_memory(),
            lambda model: model.type(torch.float32),
            lambda model: model.half().half(),
        ],
    )
    def test_outputs_and_state_are_those_of_the_plain_model(
        self, convert: Callable[[Any], Any], attached: tuple[Deep, Deep]
    ) -> None:
        model, target = (convert(one) for one in attached)
        assert raw_of(model.state_dict()) == raw_of(target.state_dict())
        assert torch.equal(outputs(model), outputs(target)) and torch.equal(outputs(copy.deepcopy(model)), outputs(target))
        model.load_state_dict(target.state_dict())
        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(TOKENS), outputs(target))
            assert torch.equal(torch.export.export(model, (TOKENS,)).module()(TOKENS), outputs(target))

    def test_two_conversions_with_loss_are_refused(self, attached: tuple[Deep, Deep]) -> None:
        model, target = attached[0].half(), attached[1].half()
        for convert in (model.float, model.bfloat16, lambda: model.blocks[0]["up"].to(torch.float64)):
            with pytest.raises(tpde.InvalidArgument, match=r"converted from torch.bfloat16 to torch.float16 and then to"):
                convert()
        x = torch.ones(2, 64)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(tpde.InvalidArgument, match="and then to"):
            model.twin(x)
        del target

    def test_other_devices_are_refused(self, attached: tuple[Deep, Deep]) -> None:
        model, target = attached
        for convert in (lambda: model.to("meta"), lambda: model.to_empty(device="meta"), lambda: model.blocks[0]["up"].to("meta")):
            with pytest.raises(tpde.InvalidArgument, match="cannot be moved from cpu to meta"):
                convert()
        layer = model.blocks[1]["down"]
        assert raw(layer.weight) == raw(target.blocks[1]["down"].weight)

    def test_an_input_of_another_dtype_is_refused(self, attached: tuple[Deep, Deep]) -> None:
        with pytest.raises(tpde.InvalidArgument, match="expected an input in torch.bfloat16, found torch.float32"):
            attached[0].twin(torch.ones(1, 64))

    def test_autocast_after_a_conversion(self, attached: tuple[Deep, Deep]) -> None:
        model, target = (one.float() for one in attached)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert torch.equal(outputs(model), outputs(target))


class TestCopies:
    def test_it_is_not_pickled(self, attached: tuple[Deep, Deep]) -> None:
        model, _ = attached
        for save in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
            for one in (model, model.twin):
                with pytest.raises(tpde.InvalidArgument, match="not pickled: save the model's state_dict"):
                    save(one)

    def test_a_second_pair_is_refused(self, deep: Made, tmp_path: Path) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        for again in (base, copy.deepcopy(base)):
            with pytest.raises(tpde.InvalidArgument, match="attached before: attach to the original model.*tpde.fold"):
                tpde.nn.attach(again, pair)
            assert torch.equal(outputs(again), outputs(target))

    def test_a_pair_of_other_layers(self, tmp_path: Path) -> None:
        base, states = Deep(), []
        for number, name in enumerate(["blocks.1.down.weight", "blocks.2.up.weight"]):
            state = {name: base.state_dict()[name] + 1}
            tpde.torch.save_file(state, tmp_path / str(number), base={name: base.state_dict()[name]})
            states.append(state)
        target = loaded({**base.state_dict(), **states[0], **states[1]})
        for number in range(2):
            tpde.nn.attach(base, tmp_path / str(number))
        assert torch.equal(outputs(base), outputs(target)) and raw_of(base.state_dict()) == raw_of(target.state_dict())


WRITES: dict[str, Callable[[torch.nn.Linear], Any]] = {
    "copy_": lambda layer: layer.weight.copy_(torch.ones_like(layer.weight)),
    "zero_": lambda layer: layer.weight.zero_(),
    "an element": lambda layer: layer.weight.__setitem__((0, 0), 1),
    "data": lambda layer: layer.weight.data.fill_(1),
    "data +=": lambda layer: layer.weight.data.__iadd__(1),
    "data =": lambda layer: setattr(layer.weight, "data", torch.ones(1)),
    "a view": lambda layer: layer.weight[0].fill_(1),
    "a row of the transposed": lambda layer: layer.weight.T[3].mul_(2),
    "detached": lambda layer: layer.weight.detach().view(-1).add_(1),
    "init": lambda layer: torch.nn.init.normal_(layer.weight),
    "reset": lambda layer: layer.reset_parameters(),
    "out": lambda layer: torch.add(layer.weight, 1, out=layer.weight),
    "foreach": lambda layer: torch._foreach_add_([layer.weight], 1.0),
    "inplace": lambda layer: torch.nn.functional.relu(layer.weight, inplace=True),
    "another parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones(192, 64))),
    "another tensor": lambda layer: setattr(layer, "weight", torch.ones(192, 64)),
    "registered": lambda layer: layer.register_parameter("weight", torch.nn.Parameter(torch.ones(192, 64))),
    "called with another": lambda layer: torch.func.functional_call(layer, {"weight": torch.ones(192, 64)}, torch.ones(1, 64)),
    "state dict": lambda layer: layer.state_dict()["weight"].copy_(torch.ones(192, 64)),
    "parametrized": lambda layer: torch.nn.utils.parametrizations.weight_norm(layer),
}


class TestWrites:
    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize("write", WRITES)
    def test_a_write_that_would_be_lost_is_refused(self, write: str, context: Any, attached: tuple[Deep, Deep]) -> None:
        model, target = attached
        error = ValueError if write == "parametrized" else tpde.InvalidArgument
        with context(), pytest.raises(error):
            WRITES[write](model.blocks[0]["up"])
        assert torch.equal(outputs(model), outputs(target)) and raw_of(model.state_dict()) == raw_of(target.state_dict())

    def test_pairs_are_not_applied_to_copies(self, deep: Made, tmp_path: Path) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        later = {name: tensor + 1 for name, tensor in target.state_dict().items()}
        tpde.torch.save_file(later, tmp_path / "q", base=target)
        for mode in ("all_checked", "chunk_by_chunk"):
            for strict in (False, True):
                for tensors in (base, base.state_dict(), {"twin.weight": base.twin.weight}):
                    with pytest.raises(tpde.InvalidArgument):
                        tpde.torch.apply_(tensors, tmp_path / "q", mode=mode, strict=strict)
        with pytest.raises(tpde.InvalidArgument, match="attached layer"):
            tpde.torch.apply_slices_([tpde.Slice("twin.weight", (slice(0, 192),), base.twin.weight)], tmp_path / "q")
        assert raw_of(base.state_dict()) == raw_of(target.state_dict())

    def test_other_uses_are_those_of_a_tensor(self, attached: tuple[Deep, Deep]) -> None:
        model, target = attached
        one, plain = model.twin.weight, target.twin.weight.detach()
        assert isinstance(one, ReadOnly) and isinstance(one, torch.Tensor) and not one.requires_grad
        for use in (
            lambda w: w.float() @ w.T.float(),
            lambda w: torch.nn.functional.linear(torch.ones(2, 64, dtype=w.dtype), w),
            lambda w: w.clone().zero_(),
            lambda w: w.float().mul_(2),
            lambda w: torch.cat([w, w]).mul_(2),
            lambda w: torch.nn.Parameter(w).detach().clone(),
            lambda w: copy.deepcopy(w).mul_(2),
            lambda w: pickle.loads(pickle.dumps(w)).mul_(2),
            lambda w: torch.zeros_like(w).copy_(w),
            lambda w: w.view(torch.int16)[::2],
            lambda w: torch.func.vmap(lambda row: row * 2)(w),
            lambda w: torch.from_numpy(w.view(torch.int16).numpy()),
            lambda w: torch.tensor(w[:2, :2].tolist()),
        ):
            for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with context():
                    assert raw(use(one)) == raw(use(plain))
        assert safetensors.torch.save({"w": one}) == safetensors.torch.save({"w": plain})
        x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.linear(x, one).sum().backward()
        assert x.grad is not None


class TestParameters:
    def test_weights_are_not_parameters(self, attached: tuple[Deep, Deep]) -> None:
        model, target = attached
        weights = {f"{name}.weight" for name, one in model.named_modules() if isinstance(one, tpde.nn.JITCompressedLinear)}
        names = {name for name, _ in target.named_parameters()}
        assert {name for name, _ in model.named_parameters()} == names - weights and not list(model.named_buffers())
        assert isinstance(model.twin, torch.nn.Linear)
