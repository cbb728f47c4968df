"""Engines that keep weights elsewhere than in the parameters that their loader writes."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import engine_of
from safetensors.torch import save_file

import tpde
import tpde.sync
from tpde_engines import live

SHAPE = (24, 16)


class Linear(torch.nn.Module):
    """As vLLM has it on a processor: the packed weight is in a closure, and the parameter may be removed."""

    def __init__(self, *, removes: bool) -> None:
        super().__init__()
        self.removes = removes
        self.weight = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16), requires_grad=False)
        self.loaded = ({"weight": torch.nn.Parameter(self.weight.to("meta"), requires_grad=False)}, {})

    def pack(self) -> None:
        packed = self.weight.detach().t().contiguous()
        self.cpu_linear = lambda x: x @ packed
        if self.removes:
            self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Embedding(Linear):
    """It keeps the parameter, beside a packed copy."""

    def __init__(self) -> None:
        super().__init__(removes=False)
        self.quant_method = types.SimpleNamespace(process_weights_after_loading=lambda layer: layer.pack())


class Attention(torch.nn.Module):
    """It keeps a product of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16), requires_grad=False)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.absorbed = self.weight.detach().to(dtype) * 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding, self.attention = Linear(removes=True), Embedding(), Attention()

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)

    def load(self, weights: dict[str, torch.Tensor]) -> Model:
        self.load_weights(weights.items())
        for layer in (self.linear, self.embedding):
            layer.pack()
        self.attention.process_weights_after_loading(torch.bfloat16)
        return self

    def reload(self, modules: list[str], tensors: dict[str, torch.Tensor]) -> None:
        """vLLM's own reload of some modules."""
        for name in modules:
            layer = self.get_submodule(name)
            weight = tensors[f"{name}.weight"]
            layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
            layer.pack()

    def answers(self) -> list[torch.Tensor]:
        x = torch.eye(SHAPE[1], dtype=torch.bfloat16)
        return [self.linear.cpu_linear(x), self.embedding.cpu_linear(x), self.embedding.weight, self.attention.absorbed]


def weights_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"{name}.weight": torch.randn(SHAPE, generator=generator).bfloat16() for name in ("linear", "embedding", "attention")}


def start(model: Model, tmp_path: Path, **how: Any) -> Any:
    save_file(weights_of(0), tmp_path / "base.safetensors")
    engine = engine_of(model)
    engine._reload = model.reload
    info = {"folder": str(tmp_path / "run"), "tensors": live.described(weights_of(0).items()), **how}
    engine.init_transfer_engine(engine.init_info_cls(**info))
    return engine


def test_packed_and_derived_weights_follow(vllm: Any, tmp_path: Path) -> None:
    version = 0
    publisher = tpde.sync.Publisher(lambda: weights_of(version), tpde.sync.Folder(tmp_path / "run"))
    model = Model().load(weights_of(0))
    engine = start(model, tmp_path, checkpoint=str(tmp_path / "base.safetensors"))
    assert engine._follower.subscriber._kept.modules == ["linear"]
    assert model.linear.weight.numel() == 0, "what the loader writes was there while it was recorded only"
    for version in (1, 2):
        publisher.publish()
        engine.update_weights({"version": version})
        fresh = Model().load(weights_of(version))
        assert all(torch.equal(own, other) for own, other in zip(model.answers(), fresh.answers()))
    engine.shutdown()


def test_removed_weights_without_a_checkpoint_are_named(vllm: Any, tmp_path: Path) -> None:
    tpde.sync.Publisher(lambda: weights_of(0), tpde.sync.Folder(tmp_path / "run"))
    with pytest.raises(tpde.WrongBase, match="'linear'") as caught:
        start(Model().load(weights_of(0)), tmp_path)
    assert caught.value.modules == ["linear"]


def test_a_reload_that_gives_other_weights_is_refused(vllm: Any, tmp_path: Path) -> None:
    """As that of vLLM 0.32 for experts on a processor: it leaves out their packing."""

    class Experts(Model):
        def load(self, weights: dict[str, torch.Tensor]) -> Model:
            super().load(weights)
            self.attention.weight.data = self.attention.weight.data.flip(0)  # packed in the same shape
            return self

        def reload(self, modules: list[str], tensors: dict[str, torch.Tensor]) -> None:
            self.attention.weight.data.copy_(tensors["attention.weight"])

    tpde.sync.Publisher(lambda: weights_of(0), tpde.sync.Folder(tmp_path / "run"))
    model = Experts().load(weights_of(0))
    model.linear = Embedding()  # only the experts are loaded again
    model.linear.weight.data.copy_(weights_of(0)["linear.weight"])
    before = model.attention.weight.clone()
    with pytest.raises(tpde.NotRecorded, match="reload of the weights that it has gives other values for 'attention.weight'"):
        start(model, tmp_path, checkpoint=str(tmp_path / "base.safetensors"))
    assert torch.equal(model.attention.weight, before)
