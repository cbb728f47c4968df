"""Calls of models as CUDA graphs, `tpde.nn.attach(..., graph=True)`, on a device."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import tpde
from test_cuda import gpu
from test_nn import TOKENS, Deep, loaded, target_of

torch = pytest.importorskip("torch")

import tpde.nn  # noqa: E402 (needs torch)

Made = tuple[Deep, Deep, Path]


@pytest.fixture
def deep(tmp_path: Path) -> Made:
    """A base on the device, the plain target model on the device, and their pair."""
    base = Deep(width=256)
    target = target_of(base)
    tpde.torch.save_file(target, tmp_path / "p", base=base, codec="conditioned", chunk_lanes=4096)
    return base.cuda().eval(), loaded(target, "cuda", width=256).eval(), tmp_path / "p"


def tokens_of(shift: int, rows: int = 2) -> torch.Tensor:
    return (TOKENS.cuda()[:rows] + shift) % 100


def compare(base: Any, target: Any, count: int = 4, rows: int = 2) -> None:
    """Calls both models with several values."""
    for shift in range(count):
        assert torch.equal(base(tokens_of(shift, rows)), target(tokens_of(shift, rows)))


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, vocab_size=500
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture
def llamas(tmp_path: Path) -> tuple[Any, Any, tpde.nn.Attached]:
    """A plain model, and one with compressed layers and graphs."""
    plain = llama()
    tpde.torch.save_file(plain, tmp_path / "a", codec="conditioned", chunk_lanes=4096)
    model = llama()
    attached = tpde.nn.attach(model, tmp_path / "a", device="cuda", payloads="device", graph=True)
    return plain.cuda(), model, attached


class Keeping(torch.nn.Module):
    """A model with a forward that the test chooses."""

    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
        self.drop = torch.nn.Dropout(0.5)
        self.scale, self.calls, self.chosen = 1.0, 0, forward

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return self.chosen(self, x, *others)


def kept(folder: Path, forward: Callable[..., Any]) -> tuple[Keeping, Keeping, Any]:
    plain = Keeping(forward).eval()
    tpde.torch.save_file(plain, folder / "k", codec="conditioned", chunk_lanes=4096)
    model = Keeping(forward).eval()
    attached = tpde.nn.attach(model, folder / "k", device="cuda", graph=True)
    return plain.cuda(), model, attached.graphs


def input_of(shift: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + shift, 512, device="cuda").view(2, 256).to(torch.bfloat16)


@gpu
@pytest.mark.usefixtures("no_gradients")
class TestLayersInGraphs:
    @pytest.fixture
    def no_gradients(self) -> Any:
        with torch.no_grad():
            yield

    @pytest.mark.parametrize("payloads", ["pinned", "device"])
    @pytest.mark.parametrize("is_inference", [False, True])
    def test_outputs_are_the_targets(self, is_inference: bool, payloads: str, deep: Made) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, payloads=payloads, graph=True)
        with torch.inference_mode() if is_inference else nullcontext():
            found = [base(tokens_of(shift)) for shift in range(6)]
            wanted = [target(tokens_of(shift)) for shift in range(6)]
        # Outputs of earlier calls are not overwritten by later ones.
        assert all(map(torch.equal, found, wanted))
        assert (attached.graphs.captured, attached.graphs.replays, attached.graphs.reason) == (1, 5, "")
        attached.check()

    def test_each_shape_has_a_graph(self, deep: Made) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, graph=True)
        for _ in range(3):
            for rows in (1, 2):
                compare(base, target, 2, rows)
        assert (attached.graphs.captured, attached.graphs.replays) == (2, 10)
        for length in range(1, 12):  # more than are kept
            for _ in range(2):
                assert torch.equal(base(tokens_of(1)[:, :length]), target(tokens_of(1)[:, :length]))
                assert torch.equal(base(tokens_of(1)[:1, :length]), target(tokens_of(1)[:1, :length]))
        assert attached.graphs.captured <= tpde.nn._graphed.MOST_CALLS
        compare(base, target)
        attached.check()

    def test_values_that_are_written_in_place_are_seen(self, deep: Made) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, graph=True)
        compare(base, target)
        for model in (base, target):
            model.blocks[1]["norm"].weight.mul_(2)
        compare(base, target)
        assert attached.graphs.captured == 1 and attached.graphs.replays == 7

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: setattr(model.blocks[1]["norm"], "weight", torch.nn.Parameter(model.blocks[1]["norm"].weight * 2)),
            lambda model: setattr(model.blocks[1]["norm"].weight, "data", model.blocks[1]["norm"].weight * 2),
            lambda model: setattr(model.blocks[1]["norm"], "eps", 0.5),
            lambda model: model.blocks[1].add_module("norm", torch.nn.Identity()),
            lambda model: model.float(),
            lambda model: model.blocks[0]["up"].register_forward_hook(lambda module, inputs, output: output * 2),
            lambda model: model.blocks[0]["up"].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
            lambda model: setattr(model.blocks[0]["up"], "forward", lambda x: torch.nn.functional.pad(x, (0, 512))),
            lambda model: setattr(model.blocks[0]["up"], "bias", torch.nn.Parameter(model.blocks[0]["up"].bias * 2)),
        ],
        ids=["parameter", "data", "attribute", "module", "dtype", "hook", "pre-hook", "forward", "bias"],
    )
    def test_changes_of_the_model_are_seen(self, change: Callable[[Any], object], deep: Made) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, graph=True)
        compare(base, target)
        assert attached.graphs.replays == 3
        change(base)
        change(target)
        before = target(tokens_of(0))
        compare(base, target)
        assert not torch.equal(before, loaded(target_of(Deep(width=256)), "cuda", width=256)(tokens_of(0)))
        attached.check()

    def test_hooks_are_called_by_every_call(self, deep: Made) -> None:
        base, _, pair = deep
        attached = tpde.nn.attach(base, pair, graph=True)
        called: list[None] = []
        base(tokens_of(0))
        handle = base.blocks[0]["norm"].register_forward_hook(lambda *_: called.append(None))
        for shift in range(3):
            base(tokens_of(shift))
        assert len(called) == 3 and "hooks" in attached.graphs.reason
        handle.remove()
        own = base.register_forward_hook(lambda *_: called.append(None))
        for shift in range(4):
            base(tokens_of(shift))
        own.remove()
        # Hooks of the model itself are outside of its forward.
        assert len(called) == 7 and attached.graphs.replays > 0

    def test_training_has_dropout_again(self, tmp_path: Path) -> None:
        _, model, graphs = kept(tmp_path, lambda self, x: self.drop(self.layer(x)))
        for _ in range(3):
            y = model(input_of(0))
        assert graphs.replays == 2 and int((y == 0).sum()) == 0
        model.train()
        assert all(int((model(input_of(0)) == 0).sum()) > 100 for _ in range(3))
        one, other = model(input_of(0)), model(input_of(0))
        assert graphs.reason == "" and not torch.equal(one, other)  # each replay has random numbers of its own

    @pytest.mark.parametrize(
        ("forward", "reason"),
        [
            (lambda self, x: (setattr(self, "calls", self.calls + 1), self.layer(x) * self.calls)[1], "changed the model"),
            (lambda self, x: (self.layer(x), {"made": object()}), "returns a object"),
            (lambda self, x: (self.layer(x), torch.zeros(2)), "on cpu"),
            (lambda self, x: self.layer(x.add_(1)), "writes to a tensor that is passed"),
        ],
        ids=["counter", "object", "cpu", "written input"],
    )
    def test_forwards_that_are_not_replayed(self, forward: Callable[..., Any], reason: str, tmp_path: Path) -> None:
        plain, model, graphs = kept(tmp_path, forward)
        x, wanted_x = input_of(0), input_of(0)
        for _ in range(4):
            y, wanted = model(x), plain(wanted_x)
            y, wanted = (y[0], wanted[0]) if isinstance(y, tuple) else (y, wanted)
            assert torch.equal(y, wanted) and torch.equal(x, wanted_x)
        assert graphs.replays == graphs.captured == 0 and reason in graphs.reason

    def test_a_forward_that_waits_for_the_device_is_refused(self, tmp_path: Path) -> None:
        _, model, graphs = kept(tmp_path, lambda self, x: self.layer(x) * float(x.max()))
        model(input_of(0))
        for _ in range(2):
            with pytest.raises(tpde.InvalidArgument, match="cannot be captured into a CUDA graph"):
                model(input_of(0))
        assert graphs.captured == 0
        torch.cuda.synchronize()
        assert torch.ones(3, device="cuda").sum().item() == 3

    def test_arguments_are_told_apart(self, tmp_path: Path) -> None:
        def forward(self: Any, x: Any, factor: Any = 1, more: Any = None) -> Any:
            y = self.layer(x) * factor
            return y if more is None else y + sum(more["terms"])

        plain, model, graphs = kept(tmp_path, forward)
        terms = [input_of(3), input_of(4)]
        for _ in range(3):
            for arguments in ((2,), (3,), (2.5,), (input_of(2),), (2, {"terms": terms}), (2, {"terms": terms[:1]}), (2, None)):
                assert torch.equal(model(input_of(1), *arguments), plain(input_of(1), *arguments))
        assert graphs.captured == 7
        # Strides of a tensor are those of its graph.
        wide = input_of(0).repeat(1, 2)
        for _ in range(3):
            assert torch.equal(model(wide[:, ::2]), plain(wide[:, ::2]))
            assert torch.equal(model(input_of(0)[:1].expand(2, 256)), plain(input_of(0)[:1].expand(2, 256)))

    def test_calls_that_are_not_captured(self, deep: Made) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, graph=True)
        compare(base, target)
        with torch.enable_grad(), pytest.raises(tpde.InvalidArgument, match="no gradients"):
            base(tokens_of(0))
        assert "gradients are enabled" in attached.graphs.reason
        with torch.autocast("cuda", torch.float16):
            compare(base, target)
        assert "autocast" in attached.graphs.reason
        with pytest.raises(RuntimeError):
            base(TOKENS)
        assert "is on cpu" in attached.graphs.reason
        graph, tokens = torch.cuda.CUDAGraph(), tokens_of(0)
        attached.release()
        with torch.cuda.graph(graph):
            y = base(tokens)
        assert "another graph" in attached.graphs.reason
        graph.replay()
        assert torch.equal(y, target(tokens))
        compare(base, target)
        attached.check()

    def test_damage_is_raised_by_the_next_call(self, deep: Made) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, payloads="device", graph=True)
        compare(base, target)
        payload = attached.layers["blocks.2.up"]._weight.payload
        payload[len(payload) // 2] ^= 4
        base(tokens_of(0))
        torch.cuda.synchronize()
        with pytest.raises(tpde.Invalid) as caught:
            base(tokens_of(0))
        assert caught.value.rule.startswith("payload.") and caught.value.tensor == "blocks.2.up.weight"
        base(tokens_of(0))
        with pytest.raises(tpde.Invalid):
            attached.check()
        payload[len(payload) // 2] ^= 4
        torch.cuda.synchronize()
        with pytest.raises(tpde.Invalid):
            base(tokens_of(0))
        compare(base, target)
        attached.check()

    def test_another_fine_tune_in_the_base_is_an_error(self, deep: Made, tmp_path: Path) -> None:
        base, target, pair = deep
        plain = Deep(width=256)
        other = target_of(plain)
        for name in other:
            if name.startswith("blocks.2.up"):
                other[name] = other[name] + 1
        tpde.torch.save_file(other, tmp_path / "other", base=plain, codec="conditioned")
        weights = {name: tensor for name, tensor in base.state_dict().items()}
        attached = tpde.nn.attach(base, pair, graph=True)
        compare(base, target)
        tpde.torch.apply_(weights, tmp_path / "other")
        base(tokens_of(0))
        with pytest.raises(tpde.TpdeError):
            attached.check()

    def test_release(self, deep: Made) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, graph=True)
        for _ in range(3):
            compare(base, target)
            assert attached.graphs.captured == 1
            attached.release()
            assert attached.graphs.captured == 0
        attached.check()

    def test_streams_and_threads(self, deep: Made) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, graph=True)
        compare(base, target)
        streams, found = [torch.cuda.Stream() for _ in range(2)], []
        torch.cuda.synchronize()
        for shift in range(20):
            with torch.cuda.stream(streams[shift % 2]):
                torch.cuda._sleep(1_000_000 * (shift % 3))
                found.append((shift, base(tokens_of(shift))))
        torch.cuda.synchronize()

        def work() -> None:
            with torch.no_grad():
                found.extend((shift, base(tokens_of(shift))) for shift in range(10))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert len(found) == 50 and all(torch.equal(y, target(tokens_of(shift))) for shift, y in found)
        attached.check()

    def test_copies_and_ends_of_models(self, deep: Made) -> None:
        _, target, pair = deep
        base = Deep(width=256).cuda().eval()
        attached = tpde.nn.attach(base, pair, graph=True)
        compare(base, target)
        deep_copy, shallow = copy.deepcopy(base), copy.copy(base)
        deep_copy.blocks[1]["norm"].weight.mul_(2)
        compare(base, target)
        wanted = copy.deepcopy(target)
        wanted.blocks[1]["norm"].weight.mul_(2)
        compare(deep_copy, wanted)
        compare(shallow, target)
        assert "shallow copy" in attached.graphs.reason and isinstance(base, Deep) and type(base).__name__ == "Deep"
        compiled = torch.compile(base, backend="aot_eager")
        compare(compiled, target)
        torch._dynamo.reset()
        alive = weakref.ref(base)
        del base, deep_copy, shallow, compiled, attached
        gc.collect()  # torch.compile refers to the model
        assert alive() is None
        again = Deep(width=256).cuda().eval()
        attached = tpde.nn.attach(again, pair, graph=True)
        compare(again, target)
        held, alive = torch.cuda.memory_allocated(), weakref.ref(again)
        gc.disable()
        try:
            del again, attached
            assert alive() is None and torch.cuda.memory_allocated() < held
        finally:
            gc.enable()

    def test_a_static_cache(self, llamas: tuple[Any, Any, tpde.nn.Attached]) -> None:
        from transformers import StaticCache

        plain, model, attached = llamas

        def generate(of: Any, cache: Any, count: int) -> list[torch.Tensor]:
            tokens, found = torch.arange(1, 9, device="cuda")[None], []
            for _ in range(count):
                found.append(of(tokens, past_key_values=cache, use_cache=True).logits[:, -1])
                tokens = found[-1].argmax(-1, keepdim=True)
            return found

        wanted = generate(plain, StaticCache(config=plain.config, max_cache_len=32), 12)
        caches = [StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
        for cache in caches:
            assert all(map(torch.equal, generate(model, cache, 12), wanted))
        # A prompt, a first step, and ten replays, for each cache.
        assert (attached.graphs.captured, attached.graphs.replays) == (2, 20)
        for cache in caches:
            cache.reset()
            assert all(map(torch.equal, generate(model, cache, 12), wanted))
        assert attached.graphs.replays > 40
        before = attached.graphs.replays
        # The memory of the cache is replaced, and the cache is the same object.
        for of, cache in ((plain, StaticCache(config=plain.config, max_cache_len=32)), (model, caches[0])):
            cache.reset()
            generate(of, cache, 4)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            tokens = torch.tensor([[3]], device="cuda")
            if of is plain:
                wanted = [plain(tokens, past_key_values=cache).logits for _ in range(4)]
            else:
                assert all(torch.equal(model(tokens, past_key_values=cache).logits, one) for one in wanted)
        assert attached.graphs.replays > before
        # A cache that its owner has dropped is not kept.
        gone = weakref.ref(caches.pop().layers[0].keys)
        del cache
        gc.collect()
        assert gone() is None
        attached.check()

    def test_a_cache_that_grows_is_not_captured(self, llamas: tuple[Any, Any, tpde.nn.Attached]) -> None:
        from transformers import DynamicCache

        plain, model, attached = llamas
        caches = [DynamicCache(config=plain.config), DynamicCache(config=plain.config)]
        for step in range(5):
            tokens = torch.tensor([[step + 1]], device="cuda")
            one, other = (of(tokens, past_key_values=cache).logits for of, cache in zip((plain, model), caches))
            assert torch.equal(one, other)
        assert attached.graphs.replays == 0 and "changed the model or an argument" in attached.graphs.reason
        assert torch.equal(plain(tokens, use_cache=True).logits, model(tokens, use_cache=True).logits)
        assert attached.graphs.reason == "it returns a DynamicCache that it made"

    def test_generate(self, llamas: tuple[Any, Any, tpde.nn.Attached]) -> None:
        plain, model, attached = llamas
        how = dict(max_new_tokens=12, do_sample=False, cache_implementation="static", disable_compile=True, pad_token_id=0)
        prompt = torch.arange(1, 9, device="cuda")[None]
        for _ in range(3):
            assert torch.equal(model.generate(prompt, **how), plain.generate(prompt, **how))
        assert attached.graphs.replays >= 20, attached.graphs.reason
        attached.check()
