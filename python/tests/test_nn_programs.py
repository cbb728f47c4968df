"""Layers of `tpde.nn` under other tools: derivatives, exported and compiled programs, wrappers, hooks."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tpde
from test_nn import TOKENS, Deep, deep, loaded, target_of  # noqa: F401 (a fixture)
from test_torch import raw_of

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint.state_dict as dcp_state  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import tpde.nn  # noqa: E402 (needs torch)
from tpde.nn import _operator  # noqa: E402

X = torch.linspace(-1, 1, 3 * 64).view(3, 64).to(torch.bfloat16)


@pytest.fixture
def layer(deep: tuple[Deep, Deep, Path]) -> tpde.nn.JITCompressedLinear:
    base, _, pair = deep
    return tpde.nn.attach(base, pair).layers["blocks.0.up"]


def traced(layer: Any) -> Callable[..., torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Callable[..., torch.Tensor] = torch.jit.trace(layer, (X,))
    return made


def exported(layer: Any) -> Callable[..., torch.Tensor]:
    made: Callable[..., torch.Tensor] = torch.export.export(layer, (X,)).module()
    return made


def operator(layer: Any) -> Callable[..., torch.Tensor]:
    return lambda x: torch.ops.tpde.linear(x, layer.bias, layer.key, layer.out_features)


class TestDerivatives:
    @pytest.mark.parametrize(
        "program", [lambda layer: layer, traced, exported, operator], ids=["layer", "traced", "exported", "operator"]
    )
    def test_an_input_that_requires_gradients_is_refused(self, program: Any, layer: tpde.nn.JITCompressedLinear) -> None:
        call, x = program(layer), X.clone().requires_grad_()
        with pytest.raises((tpde.InvalidArgument, RuntimeError), match="no gradients"):
            call(x)
        with torch.no_grad():
            assert torch.equal(call(x), layer(X))

    def test_a_bias_that_requires_gradients_is_refused(self, layer: tpde.nn.JITCompressedLinear) -> None:
        layer.bias.requires_grad_()
        with pytest.raises(tpde.InvalidArgument, match="no gradients"):
            layer(X)

    @pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
    def test_tangents_are_refused(self, context: Any, layer: tpde.nn.JITCompressedLinear) -> None:
        with torch.autograd.forward_ad.dual_level(), context():
            dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
            with pytest.raises(tpde.InvalidArgument, match="no tangents"):
                layer(dual)
            assert torch.equal(layer(X), layer(X))

    @pytest.mark.parametrize(
        "derive",
        [
            lambda f: torch.func.grad(lambda x: f(x).sum())(X),
            lambda f: torch.func.vjp(f, X),
            lambda f: torch.func.jvp(f, (X,), (torch.ones_like(X),)),
            lambda f: torch.func.jacfwd(f)(X[0]),
            lambda f: torch.func.jacrev(f)(X[0]),
            lambda f: torch.func.linearize(f, X),
        ],
        ids=["grad", "vjp", "jvp", "jacfwd", "jacrev", "linearize"],
    )
    def test_transforms_that_derive_are_refused(self, derive: Any, layer: tpde.nn.JITCompressedLinear) -> None:
        for f in (layer, operator(layer)):
            with pytest.raises((tpde.InvalidArgument, RuntimeError), match="no gradients|no tangents"):
                derive(f)

    def test_mapping_over_inputs_works(self, layer: tpde.nn.JITCompressedLinear) -> None:
        with torch.no_grad():
            assert torch.equal(torch.func.vmap(layer)(X), torch.stack([layer(x) for x in X]))


class Watcher(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class TestObserved:
    """Modes and tracers see one operator per layer, although plain calls skip the dispatcher."""

    def test_a_plain_call_takes_the_shortcut(self, layer: tpde.nn.JITCompressedLinear, monkeypatch: pytest.MonkeyPatch) -> None:
        with torch.no_grad():
            expected = operator(layer)(X)
            monkeypatch.setattr(_operator, "linear", None)
            assert torch.equal(layer(X), expected)
        with torch.inference_mode():
            assert torch.equal(layer(X.clone()), expected)
        assert torch.equal(layer(X), expected)

    def test_modes_see_the_operator(self, layer: tpde.nn.JITCompressedLinear) -> None:
        with torch.no_grad(), Watcher() as watcher:
            layer(X)
        assert watcher.seen == ["tpde.linear.default"]

    @pytest.mark.parametrize("pre_dispatch", [False, True])
    def test_tracers_see_the_operator(self, pre_dispatch: bool, layer: tpde.nn.JITCompressedLinear) -> None:
        with torch.no_grad():
            graph = make_fx(lambda x: layer(x), pre_dispatch=pre_dispatch)(X).graph
        assert [str(node.target) for node in graph.nodes if "linear" in str(node.target)] == ["tpde.linear.default"]

    def test_other_inputs_are_as_for_the_operator(self, layer: tpde.nn.JITCompressedLinear) -> None:
        with torch.no_grad():
            for wrong in (X[:, :-1], X[0, 0], X.to_sparse()):
                outcomes = []
                for call in (layer, operator(layer)):
                    with pytest.raises((tpde.InvalidArgument, NotImplementedError, RuntimeError)) as raised:
                        call(wrong)
                    outcomes.append(raised.type)
                assert outcomes[0] is outcomes[1], f"{wrong.layout} {tuple(wrong.shape)}"


class TestPrograms:
    """A saved program identifies the pair and the tensor, not an index in a list of this process."""

    RUN = """
import sys, torch, tpde, tpde.torch, tpde.nn
sys.path.insert(0, {tests!r})
from test_nn import Deep
base = Deep()
base.load_state_dict(torch.load({base!r}))
if {pair!r}:
    attached = tpde.nn.attach(base, {pair!r})
load = (lambda path: torch.export.load(path).module()) if {path!r}.endswith("pt2") else torch.jit.load
with torch.no_grad():
    torch.save(load({path!r})(torch.load({x!r})), {out!r})
"""

    @pytest.mark.parametrize("kind", ["pt2", "jit"])
    def test_in_another_process(self, kind: str, deep: tuple[Deep, Deep, Path], tmp_path: Path) -> None:
        base, target, pair = deep
        torch.save(base.state_dict(), tmp_path / "base")
        torch.save(X, tmp_path / "x")
        state = target_of(base)
        state["blocks.1.up.weight"] = state["twin.weight"] = state["blocks.1.up.weight"] + 1
        tpde.torch.save_file(state, tmp_path / "other", base=base)
        layer = tpde.nn.attach(base, pair).layers["blocks.1.up"]
        path = tmp_path / f"program.{kind}"
        if kind == "pt2":
            torch.export.save(torch.export.export(layer, (X,)), path)
        else:
            traced(layer).save(str(path))

        def run(attached: Path | str) -> subprocess.CompletedProcess[str]:
            names = {"base": tmp_path / "base", "path": path, "x": tmp_path / "x", "out": tmp_path / "out", "pair": attached}
            code = self.RUN.format(tests=str(Path(__file__).parent), **{name: str(value) for name, value in names.items()})
            return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        same = run(pair)
        assert same.returncode == 0, same.stderr
        with torch.no_grad():
            assert torch.equal(torch.load(tmp_path / "out"), target.blocks[1]["up"](X))
        for attached in (tmp_path / "other", ""):
            other = run(attached)
            assert other.returncode != 0 and "is not attached" in other.stderr, other.stderr

    def test_shapes_are_checked(self, layer: tpde.nn.JITCompressedLinear) -> None:
        for x, outputs in ((X, 191), (X[:, :32], 192), (torch.ones((), dtype=torch.bfloat16), 192)):
            with pytest.raises(tpde.InvalidArgument, match="found an input of"):
                torch.ops.tpde.linear(x, None, layer.key, outputs)
        for key in (torch.tensor(3), torch.tensor([], dtype=torch.int64), layer.key[:1]):
            with pytest.raises(tpde.InvalidArgument, match="not attached"):
                torch.ops.tpde.linear(X, None, key, 192)

    def test_weights_are_found_as_soon_as_a_model_is_attached(
        self, deep: tuple[Deep, Deep, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base, target, pair = deep
        gc.collect()  # other tests attach the same pair
        keys: list[torch.Tensor] = []

        def is_found(key: torch.Tensor) -> bool:
            try:
                return tpde.nn._rebuilt.Weight.find(key, torch.device("cpu")) is not None
            except tpde.InvalidArgument as error:
                assert "is not attached" in str(error)
                return False

        check = tpde.nn._rebuilt.HostWeight.check

        def looked_at(weight: Any) -> None:
            keys.append(torch.tensor(weight.key))
            assert not any(map(is_found, keys))
            check(weight)

        monkeypatch.setattr(tpde.nn._rebuilt.HostWeight, "check", looked_at)
        wrong = Deep()
        wrong.load_state_dict(base.state_dict())
        with torch.no_grad():
            wrong.blocks[2]["down"].weight.view(torch.int16)[0, 0] ^= 1
        with pytest.raises(tpde.WrongBase) as caught:
            tpde.nn.attach(wrong, pair)
        assert len(keys) > 1 and not any(map(is_found, keys)), caught  # `caught` keeps the weights alive
        keys.clear()
        tpde.nn.attach(base, pair)
        assert all(map(is_found, keys))

    def test_whole_models_are_exported(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        with torch.no_grad():
            assert torch.equal(torch.export.export(base, (TOKENS,)).module()(TOKENS), target(TOKENS))


class TestCompiled:
    @pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
    def test_modes(self, mode: str, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        layer, plain = base.blocks[0]["up"], target.blocks[0]["up"]
        torch._dynamo.reset()
        compiled = torch.compile(layer, mode=mode, fullgraph=True)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(compiled(X), plain(X))

    def test_the_operator_is_left_out_of_graphs_that_the_compiler_makes(self) -> None:
        assert torch.Tag.cudagraph_unsafe in torch.ops.tpde.linear.default.tags

    def test_regions_of_one_shape_are_one_graph(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        torch._dynamo.reset()
        graphs = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph

        for block in base.blocks:
            block["up"].compile(backend=backend, fullgraph=True)
        with torch.no_grad():
            for block, plain in zip(base.blocks, target.blocks):
                assert torch.equal(block["up"](X), plain["up"](X))
        assert len(graphs) == 1


class TestAttaching:
    def test_another_default_device(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        before = torch.get_default_device()
        try:
            torch.set_default_device("meta")
            attached = tpde.nn.attach(base, pair)
            weight = attached.layers["twin"].weight
        finally:
            torch.set_default_device(before)
        with torch.no_grad():
            assert torch.equal(base(TOKENS), target(TOKENS)) and torch.equal(weight, target.twin.weight)

    def test_a_model_that_is_one_linear_layer(self, tmp_path: Path) -> None:
        model, plain = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)
        plain.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
        tpde.torch.save_file(plain, tmp_path / "p", base=model)
        assert set(tpde.nn.attach(model, tmp_path / "p").layers) == {""}
        with torch.no_grad():
            assert torch.equal(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))

    def test_biases_of_other_models_stay_trainable(self, deep: tuple[Deep, Deep, Path], tmp_path: Path) -> None:
        base, target, _ = deep
        state = {**base.state_dict(), "blocks.0.up.weight": target.state_dict()["blocks.0.up.weight"]}
        state["again.weight"] = state["blocks.0.up.weight"]
        tpde.torch.save_file(state, tmp_path / "q", base=base)
        bias = base.blocks[0]["up"].bias
        tpde.nn.attach(base, tmp_path / "q")
        own = base.blocks[0]["up"].bias
        assert bias.requires_grad and not own.requires_grad and own.data_ptr() == bias.data_ptr()

    def test_layers_stay_the_same_objects(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        layers = dict(base.named_modules(remove_duplicate=False))
        up, down, twin = base.blocks[0]["up"], base.blocks[0]["down"], base.twin
        up.note = "kept"
        seen: list[str] = []
        handle = up.register_forward_hook(lambda *_: seen.append("hook"))
        up.register_forward_pre_hook(lambda *_: seen.append("before"))
        old = down.forward  # as accelerate does
        down.forward = lambda x: (seen.append("own"), old(x))[1]
        outside = [twin]
        tpde.nn.attach(base, pair)
        assert base.again is up and up.note == "kept"
        assert all(module is layers[name] for name, module in base.named_modules(remove_duplicate=False))
        with torch.no_grad():
            assert torch.equal(up(X), target.blocks[0]["up"](X)) and seen == ["before", "hook"]
            handle.remove()
            x = torch.ones(2, 192, dtype=torch.bfloat16)
            assert torch.equal(down(x), target.blocks[0]["down"](x)) and seen == ["before", "hook", "own"]
            assert torch.equal(outside[0](X), target.twin(X))

    def test_an_import_after_a_purge(self, deep: tuple[Deep, Deep, Path], tmp_path: Path) -> None:
        base, target, pair = deep
        torch.save((base.state_dict(), target.state_dict()), tmp_path / "states")
        code = f"""
import gc, sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
import tpde.nn
from test_nn import Deep, TOKENS
states = torch.load({str(tmp_path / "states")!r})
models = []
for turn in range(3):
    import tpde.nn
    base, target = Deep(), Deep()
    base.load_state_dict(states[0])
    target.load_state_dict(states[1])
    tpde.nn.attach(base, {str(pair)!r})
    models.append(base)
    with torch.no_grad():
        for model in models:
            assert torch.equal(model(TOKENS), target(TOKENS))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tpde"]:
        del sys.modules[name]
    del tpde
    gc.collect()
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class TestWrapped:
    """A group of one process. Wrappers do the same to modules as in a larger group."""

    @pytest.fixture(autouse=True)
    def group(self, tmp_path: Path) -> Any:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()

    def test_distributed_data_parallel(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        with pytest.raises(tpde.InvalidArgument, match="not in the model"):
            tpde.nn.attach(torch.nn.parallel.DistributedDataParallel(base), pair)
        tpde.nn.attach(base, pair)
        wrapped = torch.nn.parallel.DistributedDataParallel(base)
        with torch.no_grad():
            assert torch.equal(wrapped(TOKENS), target(TOKENS))

    @pytest.mark.parametrize("each", [False, True])
    def test_fully_shard(self, each: bool, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        tpde.nn.attach(base, pair)
        if each:
            for block in base.blocks:
                torch.distributed.fsdp.fully_shard(block["up"], mesh=mesh)
        torch.distributed.fsdp.fully_shard(base, mesh=mesh)
        with torch.no_grad():
            assert torch.equal(base(TOKENS), target(TOKENS))
        whole = dcp_state.get_model_state_dict(base, options=dcp_state.StateDictOptions(full_state_dict=True))
        assert raw_of(whole) == raw_of(target.state_dict()) and list(base.state_dict()) == list(whole)
        other = {name: tensor + 1 for name, tensor in whole.items()}
        with pytest.raises(tpde.InvalidArgument, match="cannot be replaced"):
            dcp_state.set_model_state_dict(base, other, options=dcp_state.StateDictOptions(full_state_dict=True, strict=False))

    def test_a_sharded_model_is_refused(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, _, pair = deep
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        torch.distributed.fsdp.fully_shard(base, mesh=mesh)
        with pytest.raises(tpde.InvalidArgument):
            tpde.nn.attach(base, pair)
