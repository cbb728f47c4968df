"""Layers of `tpde.nn` in models of transformers: saved by it and by accelerate, and with adapters of PEFT."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest

import tpde
from test_torch import raw_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import safetensors.torch  # noqa: E402 (needs torch)
import tpde.nn  # noqa: E402

transformers.logging.set_verbosity_error()
TOKENS = torch.arange(10).view(1, 10)


def llama(*, tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        vocab_size=250,
        intermediate_size=96,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).bfloat16().eval().requires_grad_(False)


@pytest.fixture(params=[False, True], ids=["", "tied"])
def pair_of(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """A model with attached layers, and the plain target."""
    model = llama(tied=request.param)
    target = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(1.01)
    tpde.torch.save_file(target.state_dict(), tmp_path / "p", base=model.state_dict())
    attached = tpde.nn.attach(model, tmp_path / "p")
    assert len(attached.layers) == 14 + (not request.param)
    return model, target


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def shards_of(folder: Path) -> dict[str, dict[str, bytes]]:
    """The tensors in each file."""
    return {path.name: raw_of(safetensors.torch.load_file(path)) for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_save_pretrained_writes_the_shards_of_the_target(size: str, pair_of: tuple[Any, Any], tmp_path: Path) -> None:
    model, target = pair_of
    for name, one in (("m", model), ("t", target)):
        one.save_pretrained(tmp_path / name, max_shard_size=size)
    assert shards_of(tmp_path / "m") == shards_of(tmp_path / "t")
    assert (size == "5GB") == (tmp_path / "m" / "model.safetensors").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert raw_of(again.state_dict()) == raw_of(target.state_dict())


def test_safetensors_saves_the_tensors_of_the_target(pair_of: tuple[Any, Any], tmp_path: Path) -> None:
    for name, one in zip("mt", pair_of):
        safetensors.torch.save_model(one, str(tmp_path / name))
    assert raw_of(safetensors.torch.load_file(tmp_path / "m")) == raw_of(safetensors.torch.load_file(tmp_path / "t"))


def test_accelerate(pair_of: tuple[Any, Any], tmp_path: Path) -> None:
    model, target = pair_of
    for name, one in (("m", model), ("t", target)):
        accelerate.Accelerator(cpu=True).save_model(one, tmp_path / name)
    assert shards_of(tmp_path / "m") == shards_of(tmp_path / "t")
    accelerate.load_checkpoint_in_model(model, tmp_path / "m")
    with torch.no_grad():
        other = copy.deepcopy(target)
        other.model.layers[1].mlp.up_proj.weight.mul_(2)
    other.save_pretrained(tmp_path / "o")
    with pytest.raises(tpde.InvalidArgument, match="cannot be replaced"):
        accelerate.load_checkpoint_in_model(model, tmp_path / "o")
    with pytest.raises((ValueError, tpde.InvalidArgument)):
        accelerate.load_checkpoint_in_model(model, tmp_path / "o", device_map={"": "cpu"})
    expected = logits(target)
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(accelerate.cpu_offload(model, execution_device="cpu")), expected)


class TestAdapters:
    @pytest.fixture(autouse=True)
    def peft(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield pytest.importorskip("peft")

    def adapted(self, peft: Any, model: Any, **how: Any) -> Any:
        torch.manual_seed(1)
        made = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **how)
        )
        return made.eval()

    @pytest.mark.parametrize("how", [{}, {"use_dora": True}], ids=["lora", "dora"])
    def test_outputs_are_those_of_the_adapted_target(self, how: dict[str, Any], peft: Any, pair_of: tuple[Any, Any]) -> None:
        model, target = (self.adapted(peft, one, **how) for one in pair_of)
        assert torch.equal(logits(model), logits(target))
        assert raw_of(model.state_dict()) == raw_of(target.state_dict())
        with model.disable_adapter(), target.disable_adapter():
            assert torch.equal(logits(model), logits(target))
        assert torch.equal(logits(model.unload()), logits(target.unload()))

    def test_adapters_are_saved_and_loaded(self, peft: Any, pair_of: tuple[Any, Any], tmp_path: Path) -> None:
        model, target = pair_of
        again = copy.deepcopy(model)
        adapted = [self.adapted(peft, one) for one in (model, target)]
        for name, one in zip("mt", adapted):
            one.save_pretrained(tmp_path / name)
        saved = [safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors") for name in "mt"]
        assert raw_of(saved[0]) == raw_of(saved[1])
        found = peft.PeftModel.from_pretrained(again, tmp_path / "t").eval()
        assert torch.equal(logits(found), logits(adapted[1]))

    @pytest.mark.parametrize("safe", [False, True])
    def test_merging_is_refused(self, safe: bool, peft: Any, pair_of: tuple[Any, Any]) -> None:
        model, target = (self.adapted(peft, one) for one in pair_of)
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(tpde.InvalidArgument, match="attached layer"):
                merge(safe_merge=safe)
        for layer in model.modules():
            if hasattr(layer, "merged_adapters"):
                assert not layer.merged_adapters
        assert torch.equal(logits(model), logits(target))

    def test_training_is_refused(self, peft: Any, pair_of: tuple[Any, Any]) -> None:
        model = self.adapted(peft, pair_of[0]).train()
        with pytest.raises(tpde.InvalidArgument, match="no gradients"):
            model(TOKENS, labels=TOKENS).loss.backward()

    def test_replaced_heads_of_an_adapter_are_not_ignored(self, peft: Any, pair_of: tuple[Any, Any], tmp_path: Path) -> None:
        model, target = pair_of
        trained = self.adapted(peft, target, modules_to_save=["lm_head"])
        with torch.no_grad():
            trained.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
        trained.save_pretrained(tmp_path / "a")
        try:
            found = peft.PeftModel.from_pretrained(model, tmp_path / "a").eval()
        except tpde.InvalidArgument as error:
            assert "cannot be replaced" in str(error)
        else:
            assert torch.equal(logits(found), logits(trained))

    def test_a_wrapped_model_is_refused(self, peft: Any, tmp_path: Path) -> None:
        model = llama(tied=False)
        target = {name: tensor + 1 for name, tensor in model.state_dict().items()}
        tpde.torch.save_file(target, tmp_path / "p", base=model.state_dict())
        with pytest.raises(tpde.InvalidArgument, match="not in the model"):
            tpde.nn.attach(self.adapted(peft, model), tmp_path / "p")
