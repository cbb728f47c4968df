"""What engines do with parameters between two versions: adapters, compiled code, sleep, several updates at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

from raised import raises  # noqa: E402
import loaders  # noqa: E402 (needs torch)
from test_recorder import same  # noqa: E402
from test_sync import Engine, Trainer, weights_of  # noqa: E402

import tpde.slices  # noqa: E402
import tpde.sync  # noqa: E402


@pytest.mark.parametrize("kind", loaders.MODELS, ids=lambda kind: kind.__name__)
def test_models_follow_with_all_that_they_do_to_weights(kind: type[loaders.Model], tmp_path: Path) -> None:
    """Tied weights, a padded vocabulary, FP8 with scales, NaN payloads, and four ranks, which replicate key and value heads. GptOss has
    parameters that cannot be patched, and takes the second way."""
    state = {"version": 0}
    publisher = tpde.sync.Publisher(lambda: weights_of(state["version"], kind), tpde.sync.Folder(tmp_path), timeout=0)
    base = weights_of(0, kind)
    models = [kind(rank, 4) for rank in range(4)]
    subscribers = []
    for rank, model in enumerate(models):
        model.load_weights(base.items())
        found = tpde.slices.record(model.load_weights, base, model.parameters)
        found.check(refused=True)  # padding too is written by the loader
        kept = found.keep(base) if found.refusals else None
        reload = model.load_weights if kept is not None else None
        channel = tpde.sync.Folder(tmp_path)
        subscribers.append(tpde.sync.Subscriber(found, channel, f"rank{rank}", version=0, kept=kept, reload=reload))
    assert any(one.isnan().any() for one in base.values() if one.dtype in (torch.bfloat16, torch.float32))
    for version in (1, 2):
        state["version"] = version
        publisher.publish()
        for rank, (model, subscriber) in enumerate(zip(models, subscribers)):
            assert subscriber.stage() == [version]
            assert [one.version for one in subscriber.commit()] == [version]
            assert same(model.parameters, kind(rank, 4).loaded(weights_of(version, kind)))


def test_tied_weights_and_shared_experts_are_patched_once(tmp_path: Path) -> None:
    """One memory under two names, an expert that two layers share, and a replica of an expert in other memory."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight
            self.layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(2)])
            for layer in self.layers:
                layer.expert = self.layers[0].expert if layer is not self.layers[0] else torch.nn.Linear(8, 8, bias=False)
                layer.replica = torch.nn.Linear(8, 8, bias=False)
            self.bfloat16()

        def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
            for name, one in tensors:
                for own in (self.embed, self.head) if name == "embed" else ():
                    own.weight.data.copy_(one)
                for layer in self.layers if name == "expert" else ():
                    layer.expert.weight.data.copy_(one)
                    layer.replica.weight.data.copy_(one)

    model, weights = Model(), {"embed": torch.randn(16, 8).bfloat16(), "expert": torch.randn(8, 8).bfloat16()}
    model.load_weights(iter(weights.items()))
    found = tpde.slices.record(model.load_weights, weights, model)
    assert found.tied == {"embed.weight": ["head.weight"], "layers.0.expert.weight": ["layers.1.expert.weight"]}
    assert len(found.pieces) == 4  # the embedding, the expert, and two replicas
    publisher = tpde.sync.Publisher(lambda: weights, tpde.sync.Folder(tmp_path))
    subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path), "one", version=0)
    for version in (1, 2):
        weights = {name: one * 1.5 for name, one in weights.items()}
        publisher.publish()
        assert subscriber.stage() == [version] and [one.version for one in subscriber.commit()] == [version]
        assert torch.equal(model.head.weight, weights["embed"]) and model.head.weight is model.embed.weight
        for layer in model.layers:
            assert torch.equal(layer.expert.weight, weights["expert"]) and torch.equal(layer.replica.weight, weights["expert"])


def test_adapters_of_lora_are_left_alone(tmp_path: Path) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
            self.lora_a, self.lora_b = (torch.nn.Parameter(torch.full((2, 8), 0.5)) for _ in range(2))

    layer, weights = Layer(), {"q": torch.randn(8, 8).bfloat16()}

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, one in tensors:
            layer.base_layer.weight.data.copy_(one)

    load(iter(weights.items()))
    found = tpde.slices.record(load, weights, layer)
    with pytest.raises(tpde.NotRecorded, match="lora_a"):
        found.check()
    found.check(missing="*lora_*")
    publisher = tpde.sync.Publisher(lambda: weights, tpde.sync.Folder(tmp_path))
    subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path), "one", version=0)
    weights = {"q": weights["q"] * 1.5}
    publisher.publish()
    subscriber.update()
    assert torch.equal(layer.base_layer.weight, weights["q"])
    assert all(torch.equal(one, torch.full((2, 8), 0.5)) for one in (layer.lora_a, layer.lora_b))


def test_compiled_code_sees_the_new_weights_without_compiling_again(tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    state = {name: one.clone() for name, one in layer.state_dict().items()}
    found = tpde.slices.record(lambda tensors: [layer.get_parameter(name).data.copy_(one) for name, one in tensors], state, layer)
    compilations = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled, x = torch.compile(layer, backend=backend), torch.ones(2, 8, dtype=torch.bfloat16)
    addresses = [one.data_ptr() for one in layer.parameters()]
    with torch.no_grad():
        before = compiled(x)
        publisher = tpde.sync.Publisher(lambda: state, tpde.sync.Folder(tmp_path))
        subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path), "one", version=0)
        state = {name: one * 1.5 for name, one in state.items()}
        publisher.publish()
        subscriber.update()
        after = compiled(x)
        assert not torch.equal(before, after) and torch.equal(after, layer(x)) and len(compilations) == 1
    assert addresses == [one.data_ptr() for one in layer.parameters()]


def test_parameters_that_sleep_and_wake_elsewhere(tmp_path: Path) -> None:
    trainer, engine = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1, version=0)
    parameters = engine.model.parameters
    trainer.publish()
    assert engine.subscriber.stage() == [1]
    # Level 1: the weights are moved, and come back at other addresses.
    moved = {name: one.clone() for name, one in parameters.items()}
    old = {name: one.data_ptr() for name, one in parameters.items()}
    for name, one in parameters.items():
        one.data = moved[name]
        assert one.data_ptr() != old[name]
    assert [one.version for one in engine.subscriber.commit()] == [1]
    engine.check()
    # Level 2: the weights are discarded. That is found before a write, and a whole version brings them back.
    for one in parameters.values():
        one.data = torch.zeros_like(one)
    trainer.publish()
    with pytest.raises(tpde.WrongBase):
        engine.update()
    assert all(not one.view(torch.uint8).any() for one in parameters.values())
    found = engine.subscriber._weights
    engine.subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path), "one", version=-1)
    trainer.publish()
    assert engine.update() == [3]
    engine.check()


def test_two_updates_in_flight(tmp_path: Path) -> None:
    trainer, engine = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1, version=0)
    trainer.publish()
    assert engine.subscriber.stage() == [1]
    with raises("not_acknowledged", match="one sent no answer"):
        trainer.publish()  # the first one is staged, and not applied
    refused: list[BaseException] = []

    def other() -> None:
        try:
            engine.subscriber.update()
        except tpde.InvalidArgument as error:
            refused.append(error)

    with engine.subscriber._alone():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "by another thread" in str(refused[0])
    assert engine.subscriber.stage() == [1] and [one.version for one in engine.subscriber.commit()] == [1]
    assert engine.subscriber.commit() == []
    trainer.publish()
    assert engine.update() == [2]
    engine.check()


def test_a_version_that_is_applied_twice(tmp_path: Path) -> None:
    trainer, engine = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1, version=0)
    trainer.publish()
    assert engine.update() == [1]
    # Its answer is lost, and it is started again with memory that has the version already.
    engine.subscriber = tpde.sync.Subscriber(engine.subscriber._weights, tpde.sync.Folder(tmp_path), "one", version=0)
    assert engine.subscriber.stage() == [1] and [one.version for one in engine.subscriber.commit()] == [1]
    engine.check()
    assert trainer.publisher.wait() == []


def test_a_check_writes_nothing_and_finds_what_applying_finds(tmp_path: Path) -> None:
    trainer, engine = Trainer(tmp_path), Engine(tmp_path, "one", 0, 1, version=0)
    trainer.publish()
    found, channel = engine.subscriber._weights, trainer.channel
    pair = channel.pair(channel.version(1)["difference"]["pairs"][0]["pair"])
    before = {name: one.clone() for name, one in engine.model.parameters.items()}
    tpde.slices.check(found, pair)
    assert same(engine.model.parameters, before)
    engine.model.parameters["o"].view(torch.int16)[0, 0] ^= 1
    with pytest.raises(tpde.WrongBase):
        tpde.slices.check(found, pair)
    with pytest.raises(tpde.WrongBase):
        engine.subscriber.stage()
    engine.model.parameters["o"].view(torch.int16)[0, 0] ^= 1
    blob = pair.with_suffix(".tpde-blob")
    sound = blob.read_bytes()
    blob.write_bytes(sound[:70] + bytes([sound[70] ^ 1]) + sound[71:])
    with pytest.raises(tpde.Invalid):
        tpde.slices.check(found, pair)
    assert same(engine.model.parameters, before)
