"""Fakes of engines: a model with fused parameters, the classes of vLLM that the package uses, and workers."""

from __future__ import annotations

import sys
import types
from abc import ABC
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import loaders
import pytest
import torch
from test_recorder import same

A, B = TypeVar("A"), TypeVar("B")


class Module(torch.nn.Module):
    """A rank of a made-up model, as a module."""

    def __init__(self, kind: type[loaders.Model], rank: int, ranks: int) -> None:
        super().__init__()
        self.inner = kind(rank, ranks)
        self.hooks = 0
        for name, tensor in self.inner.parameters.items():
            *path, last = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_buffer(last, tensor)
        self.register_parameter("lora_a", torch.nn.Parameter(torch.ones(3)))

    def load_weights(self, weights: Any) -> None:
        self.inner.load_weights(weights)

    def post_load_weights(self) -> None:
        self.hooks += 1


def weights_of(kind: type[loaders.Model], version: int) -> loaders.Weights:
    base = loaders.random_weights(kind.shapes, 1)
    return loaders.changed(base, version, 0.1) if version else base


class Factory:
    """A factory of vLLM."""

    def __init__(self) -> None:
        self.registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, kind: str) -> None:
        if name in self.registry:
            raise ValueError(f"{name} is already registered")
        self.registry[name] = module, kind


def restore_layer_on_meta(layer: Any, info: Any) -> None:
    """Parameters that the loader writes take the place of others."""
    layer._parameters.clear()
    layer._parameters.update(info.restore_metadata[0])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The classes of vLLM that the package uses, as its release has them: see test_contract.py."""

    class WeightTransferEngine(ABC, Generic[A, B]):
        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
            self.device, self.model = device, model

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.update_info_cls(**update_info))  # type: ignore[attr-defined]

    class TrainerWeightTransferEngine(ABC, Generic[A]):
        def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
            self.client, self.source, self.is_sender = client, source, is_sender

    @dataclass
    class TrainerInitInfo:
        rank: int

        @property
        def is_sender(self) -> bool:
            return self.rank == 0

    base, factory = types.ModuleType("base"), types.ModuleType("factory")
    empty = dataclass(type("Info", (), {}))
    vars(base).update(WeightTransferEngine=WeightTransferEngine, TrainerWeightTransferEngine=TrainerWeightTransferEngine)
    vars(base).update(WeightTransferInitInfo=empty, WeightTransferUpdateInfo=empty, TrainerInitInfo=TrainerInitInfo)
    vars(factory).update(WeightTransferEngineFactory=Factory(), WeightTransferTrainerFactory=Factory())
    package = types.ModuleType("vllm.distributed.weight_transfer")
    vars(package).update(base=base, factory=factory)
    layerwise, meta, attention = (types.ModuleType(name) for name in ("layerwise", "meta", "attention"))
    vars(layerwise).update(
        get_layerwise_info=lambda layer: types.SimpleNamespace(restore_metadata=getattr(layer, "loaded", ({}, {})))
    )
    vars(meta).update(restore_layer_on_meta=restore_layer_on_meta)
    vars(attention).update(is_deferred_attention_layer=lambda layer: hasattr(layer, "process_weights_after_loading"))
    for name, module in {
        "vllm.model_executor.layers.attention": attention,
        "vllm.model_executor.model_loader.reload.layerwise": layerwise,
        "vllm.model_executor.model_loader.reload.meta": meta,
        "vllm": types.ModuleType("vllm"),
        "vllm.distributed": types.ModuleType("vllm.distributed"),
        "vllm.distributed.weight_transfer": package,
        "vllm.distributed.weight_transfer.base": base,
        "vllm.distributed.weight_transfer.factory": factory,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("tpde_engines.vllm_worker", "tpde_engines.vllm_trainer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return factory


def engine_of(model: torch.nn.Module, rank: int = 0, ranks: int = 1) -> Any:
    """A worker's half of the backend, around a model."""
    from tpde_engines.vllm_worker import Engine

    parallel = types.SimpleNamespace(rank=rank, world_size=ranks, data_parallel_index=0)
    config = types.SimpleNamespace(parallel_config=parallel, model_config=types.SimpleNamespace(dtype=torch.bfloat16))
    return Engine(None, config, torch.device("cpu"), model)


class Workers:
    """The workers of an engine. The trainer calls them through this client."""

    def __init__(self, kind: type[loaders.Model], ranks: int) -> None:
        self.kind, self.ranks, self.calls = kind, ranks, []
        self.models = [Module(kind, rank, ranks) for rank in range(ranks)]
        self.engines = []
        for rank, model in enumerate(self.models):
            model.load_weights(weights_of(kind, 0).items())
            self.engines.append(engine_of(model, rank, ranks))
            self.engines[-1]._reload = lambda modules, tensors, model=model: model.load_weights(tensors.items())  # vLLM's own

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.init_transfer_engine(engine.init_info_cls(**init_info))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.update_weights(update_info)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def check(self, version: int) -> None:
        for rank, model in enumerate(self.models):
            assert same(model.inner.parameters, self.kind(rank, self.ranks).loaded(weights_of(self.kind, version)))
            assert torch.equal(model.lora_a, torch.ones(3))


class Source:
    def __init__(self, kind: type[loaders.Model]) -> None:
        self.kind, self.version = kind, 0

    def metadata(self) -> list[Any]:
        return [types.SimpleNamespace(name=name, dtype=dtype, shape=shape) for name, (shape, dtype) in self.kind.shapes.items()]

    def __iter__(self) -> Any:
        return iter(weights_of(self.kind, self.version).items())
