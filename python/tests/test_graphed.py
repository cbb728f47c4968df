"""Which calls of a model are replays of a graph, without a device. `test_cuda_graphed.py` tests the graphs."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tpde
from test_nn import TOKENS, Deep, deep  # noqa: F401 (a fixture)
from test_torch import raw_of

torch = pytest.importorskip("torch")

import tpde.nn  # noqa: E402 (needs torch)
from tpde.nn import _graphed  # noqa: E402
from tpde.nn._fixed import Memory, ModelState, ObjectState  # noqa: E402


class TestAttach:
    @pytest.mark.parametrize("device", [None, "cpu"])
    def test_the_cpu_has_no_graphs(self, device: str | None, deep: tuple[Deep, Deep, Path]) -> None:  # noqa: F811
        base, _, pair = deep
        before, kind = raw_of(base.state_dict()), type(base)
        with pytest.raises(tpde.InvalidArgument, match="graph=True: expected all layers on one CUDA device, found cpu"):
            tpde.nn.attach(base, pair, device=device, graph=True)
        assert raw_of(base.state_dict()) == before and type(base) is kind
        assert tpde.nn.attach(base, pair, graph=False).graphs is None

    def test_models_without_such_layers(self, deep: tuple[Deep, Deep, Path]) -> None:  # noqa: F811
        base, _, pair = deep
        with pytest.raises(tpde.InvalidArgument, match="found no layer whose weight is rebuilt"):
            tpde.nn.attach(base, pair, only=lambda _: False, graph=True)
        with pytest.raises(tpde.InvalidArgument, match="graph is 'yes': expected True or False"):
            tpde.nn.attach(base, pair, graph="yes")
        base.forward = lambda tokens: tokens
        with pytest.raises(tpde.InvalidArgument, match="found one of the model"):
            _graphed.Graphs.of(base, {torch.device("cuda", 0)})


class Cache:
    """As caches of transformers: layers with tensors and numbers."""

    def __init__(self) -> None:
        self.layers = [SimpleNamespace(keys=torch.zeros(3), length=1000 + n, name="keys") for n in range(2)]
        self.sizes = {"first": (1, 2)}


class TestStates:
    @pytest.mark.parametrize(
        "change",
        [
            lambda cache: setattr(cache, "more", None),
            lambda cache: delattr(cache, "sizes"),
            lambda cache: cache.layers.append(cache.layers[0]),
            lambda cache: cache.layers.reverse(),
            lambda cache: setattr(cache.layers[1], "length", 1002),
            lambda cache: setattr(cache.layers[1], "keys", torch.zeros(3)),
            lambda cache: setattr(cache.layers[1].keys, "data", torch.zeros(3)),
            lambda cache: cache.layers[1].keys.add_(1),
            lambda cache: cache.sizes.update(second=1),
            lambda cache: cache.sizes.update(first=(1, 3)),
        ],
    )
    def test_changes_of_objects(self, change: Callable[[Any], object]) -> None:
        cache = Cache()
        state = ObjectState(cache)
        assert state.unknown is None and state.holds()
        change(cache)
        assert not state.holds()
        assert ObjectState(cache).holds()

    def test_objects_whose_state_is_unknown(self) -> None:
        class Slots:
            __slots__ = ("value",)

        class More(Slots):
            pass

        for unknown in (Slots(), More(), {1}, iter([1]), torch.Generator()):
            assert ObjectState([unknown]).unknown is type(unknown)
        assert ObjectState([len, Cache, TestStates.test_changes_of_objects, torch.float16, Deep()]).unknown is None

    def test_objects_that_refer_to_themselves(self) -> None:
        cache = Cache()
        cache.layers.append(cache)
        assert ObjectState(cache).holds()

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: setattr(model.twin, "weight", torch.nn.Parameter(model.twin.weight.detach())),
            lambda model: setattr(model.twin.weight, "data", model.twin.weight.data.clone()),
            lambda model: setattr(model.twin, "forward", lambda x: x),
            lambda model: setattr(model.twin, "_dtype", torch.float32),
            lambda model: setattr(model.twin, "__class__", torch.nn.Identity),
            lambda model: (setattr(model.blocks[0]["norm"], "more", 1), delattr(model.blocks[0]["norm"], "eps")),
            lambda model: setattr(model, "more", 1),
            lambda model: setattr(model, "training", False),
            lambda model: setattr(model, "twin", torch.nn.Linear(64, 192)),
            lambda model: setattr(model.blocks[0]["norm"], "eps", 0.5),
            lambda model: model.blocks[0]["norm"].eval(),
            lambda model: model.blocks.append(torch.nn.Identity()),
            lambda model: model.register_buffer("more", torch.zeros(1)),
            lambda model: model.twin.register_forward_hook(lambda *_: None),
            lambda model: model.twin.register_forward_pre_hook(lambda *_: None),
        ],
    )
    def test_changes_of_models(self, change: Callable[[Any], object]) -> None:
        model = Deep()
        state = ModelState(model)
        assert state.holds() and not state.has_hooks
        change(model)
        assert not state.holds() and ModelState(model).holds()

    @pytest.mark.parametrize(
        "change",
        [
            lambda layer: setattr(layer, "forward", lambda x: x),
            lambda layer: setattr(layer, "bias", torch.nn.Parameter(layer.bias * 2, requires_grad=False)),
            lambda layer: setattr(layer.bias, "data", layer.bias.data * 2),
            lambda layer: layer._parameters.update(bias=None),
            lambda layer: setattr(layer, "__class__", torch.nn.Identity),
            lambda layer: layer.float(),
            lambda layer: layer.register_forward_hook(lambda *_: None),
            lambda layer: layer.register_forward_pre_hook(lambda *_: None),
            lambda layer: layer.eval(),
        ],
    )
    def test_changes_of_attached_layers(self, change: Callable[[Any], object], deep: tuple[Deep, Deep, Path]) -> None:  # noqa: F811
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair)
        state = ModelState(base)
        with torch.no_grad():
            assert torch.equal(base(TOKENS), target(TOKENS))
        base.train()  # it was in this mode before
        base.state_dict()
        assert state.holds() and not state.has_hooks
        change(attached.layers["blocks.0.up"])
        assert not state.holds() and ModelState(base).holds()

    def test_values_on_the_cpu_are_part_of_the_state(self) -> None:
        tensor = torch.zeros(2)
        memory = Memory([tensor])
        with torch.inference_mode():
            tensor.add_(1)
        assert not memory.holds()


class Stream:
    cuda_stream = 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[_graphed.Graphs]:
    """Graphs whose replays return what was captured, so that a replay that should not have been is seen."""

    def capture(captured: Any, forward: Callable[..., Any], call: Any, pool: Any, stream: Any) -> None:
        captured.result = "captured", forward(*call.with_tensors(call.tensors)[0], **call.with_tensors(call.tensors)[1])

    monkeypatch.setattr(_graphed._Captured, "capture", capture)
    monkeypatch.setattr(_graphed._Captured, "replay", lambda captured, call: captured.result)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(_graphed._Captured, "pool", lambda captured: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, query=lambda: True))
    with torch.no_grad():
        yield _graphed.Graphs(torch.device("cpu"))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, cache: Any = None, **more: Any) -> torch.Tensor:
        if getattr(cache, "grows", False):
            cache.layers.append(None)
        return self.layer(x)


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class TestCalls:
    def test_the_second_call_of_a_kind_is_captured(self, graphs: _graphed.Graphs) -> None:
        model, x = Model(), torch.ones(1, 2)
        graphs.install(model)
        cache = Cache()
        for arguments, named in (((x,), {}), ((x, cache), {}), ((x, cache), {"more": 1}), ((x, cache), {"more": [x, True]})):
            found = [model(*arguments, **named) for _ in range(3)]
            assert isinstance(found[0], torch.Tensor) and found[1][0] == found[2][0] == "captured" and graphs.reason == ""
        assert (graphs.captured, graphs.replays) == (4, 8)
        # Of none of these kinds.
        for arguments, named in (
            ((torch.ones(2, 2),), {}),
            ((x.double().float().t().contiguous().t(), Cache()), {}),
            ((x, cache), {"more": True}),
            ((x, cache), {"more": 1.0}),
            ((x, cache), {"other": 1}),
            ((x, cache), {"more": (x, True)}),
            ((x, cache), {"more": [x, 1]}),
        ):
            assert isinstance(model(*arguments, **named), torch.Tensor)

    def test_a_change_makes_a_call_unknown(self, graphs: _graphed.Graphs) -> None:
        model, x, cache = Model(), torch.ones(1, 2), Cache()
        graphs.install(model)
        for change in (lambda: model.eval(), lambda: cache.layers.pop(), lambda: model.layer.weight.add_(1), graphs.release):
            assert [type(model(x, cache)) for _ in range(3)] == [torch.Tensor, tuple, tuple]
            change()
        assert isinstance(model(x, cache), torch.Tensor)

    def test_a_cache_that_grows(self, graphs: _graphed.Graphs) -> None:
        model, x, cache = Model(), torch.ones(1, 2), Cache()
        cache.grows = True
        graphs.install(model)
        for _ in range(3):
            assert isinstance(model(x, cache), torch.Tensor)
        assert "changed the model or an argument" in graphs.reason and len(cache.layers) == 5

    def test_what_is_kept(self, graphs: _graphed.Graphs) -> None:
        model, x = Model(), torch.ones(1, 2)
        graphs.install(model)
        for number in range(3 * _graphed.MOST_CALLS):
            for _ in range(2):
                model(x, more=number)
                model(x)
            assert graphs.captured == min(number + 2, _graphed.MOST_CALLS)
        assert isinstance(model(x), tuple)  # it was used all the time
        for _ in range(3 * _graphed.MOST_CALLS):
            cache = Cache()
            for _ in range(2):
                model(x, cache)
        del cache
        gc.collect()
        assert graphs.captured == _graphed.MOST_CALLS
        model(x, more=0)
        assert graphs.captured == _graphed.MOST_CALLS - 1  # caches that are gone made no other call be forgotten

    def test_modes(self, graphs: _graphed.Graphs) -> None:
        model, x = Model(), torch.ones(1, 2)
        graphs.install(model)
        for _ in range(2):
            model(x)
        for mode, reason in (
            (torch.enable_grad(), "gradients are enabled"),
            (torch.autocast("cpu"), "autocast"),
            (Mode(), "a mode, transform or tracer"),
            (torch.inference_mode(), "first call of its kind"),
            (torch.device("meta"), "first call of its kind"),
        ):
            with mode:
                assert isinstance(model(x), torch.Tensor)
            assert reason in graphs.reason
        assert isinstance(torch.vmap(model)(x.expand(2, 1, 2)), torch.Tensor)
        assert isinstance(torch.jit.trace(model, x, check_trace=False), torch.jit.ScriptModule)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert isinstance(compiled(x), torch.Tensor)
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            assert isinstance(model(x), torch.Tensor) and "hooks" in graphs.reason
        finally:
            handle.remove()
        assert [type(model(x)) for _ in range(2)][1] is tuple

    def test_copies_of_a_model(self, graphs: _graphed.Graphs) -> None:
        model, x = Model(), torch.ones(1, 2)
        graphs.install(model)
        for _ in range(2):
            model(x)
        deep_copy, shallow = copy.deepcopy(model), copy.copy(model)
        deep_copy.layer.weight.add_(1)
        assert torch.equal(deep_copy(x), deep_copy.layer(x)) and not torch.equal(deep_copy(x)[1], model.layer(x))
        assert isinstance(shallow(x), torch.Tensor) and "shallow copy" in graphs.reason
        assert (
            isinstance(model, Model) and type(model).__name__ == "Model" and [*model.state_dict()] == ["layer.weight", "layer.bias"]
        )

    def test_models_and_caches_are_freed_at_once(self, graphs: _graphed.Graphs) -> None:
        model, x, cache = Model(), torch.ones(1, 2), Cache()
        graphs.install(model)
        for _ in range(3):
            model(x, cache)
        kept, alive, layer = weakref.ref(cache.layers[0].keys), weakref.ref(model), weakref.ref(model.layer)
        gc.disable()
        try:
            del cache
            assert kept() is None
            del model
            assert alive() is None
            graphs.release()
            assert layer() is None
        finally:
            gc.enable()

    def test_a_call_within_a_call(self, graphs: _graphed.Graphs) -> None:
        model, x = Model(), torch.ones(1, 2)
        graphs.install(model)
        inner = []
        graphs.call(lambda x: inner.append(model(x)), model, (x,), {})
        assert isinstance(inner[0], torch.Tensor)
