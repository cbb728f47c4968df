"""Layers of `tpde.nn` on a CUDA device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import tpde
from test_cuda import MIB, gpu
from test_nn import JIT, TOKENS, Deep, loaded, target_of
from test_nn_storm import FORWARDS, modes_are_restored, soak, under_signals  # noqa: F401 (a fixture)

torch = pytest.importorskip("torch")

import tpde.nn  # noqa: E402 (needs torch)
from quantised import Resident, base_of, finetune_of, outputs_of  # noqa: E402 (needs torch)


@pytest.fixture
def deep(tmp_path: Path) -> tuple[Deep, Deep, Path]:
    """A base on the device, the plain target model on the device, and their pair."""
    base = Deep(width=256)
    target = target_of(base)
    tpde.torch.save_file(target, tmp_path / "p", base=base, codec="conditioned", chunk_lanes=4096)
    return base.cuda(), loaded(target, "cuda", width=256), tmp_path / "p"


@gpu
class TestLayers:
    @pytest.mark.parametrize("payloads", ["pinned", "device"])
    @pytest.mark.parametrize("where", ["device", "host"])
    def test_outputs_are_the_targets(self, where: str, payloads: str, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        if where == "host":
            base.cpu()
        weights = dict(base.named_parameters(remove_duplicate=False))
        attached = tpde.nn.attach(base, pair, device="cuda", payloads=payloads)
        assert set(attached.layers) == JIT and base.head.weight is base.embed.weight
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(base(TOKENS.cuda()), target(TOKENS.cuda()))
        attached.check()
        for name, layer in attached.layers.items():
            if where == "device":
                assert layer._weight.bases[0].data_ptr() == weights[f"{name}.weight"].data_ptr()
            else:
                assert layer._weight.bases[0].is_pinned()
            assert torch.equal(layer.weight, target.get_parameter(f"{name}.weight"))

    @pytest.mark.parametrize("where", ["device", "host"])
    @pytest.mark.parametrize("convert", [lambda model: model, lambda model: model.float(), lambda model: model.half()])
    def test_states_are_those_of_the_target(self, convert: Any, where: str, deep: tuple[Deep, Deep, Path], tmp_path: Path) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base.cpu() if where == "host" else base, pair, device="cuda")
        base, target = convert(base), convert(target)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(base(TOKENS.cuda()), target(TOKENS.cuda()))
            found, expected = base.state_dict(), target.state_dict()
            assert list(found) == list(expected) and {one.device for one in found.values()} == {torch.device("cuda", 0)}
            assert all(torch.equal(found[name], one) for name, one in expected.items())
            base.load_state_dict(expected)
        torch.save(found, tmp_path / "state")
        assert all(torch.equal(one, expected[name]) for name, one in torch.load(tmp_path / "state").items())
        for refused in (
            lambda: base.load_state_dict({name: one + 1 for name, one in expected.items()}, strict=False),
            lambda: base.twin.weight.zero_(),
            lambda: tpde.torch.apply_(base.state_dict(), pair),
            lambda: base.twin.cpu(),
        ):
            with pytest.raises(tpde.InvalidArgument):
                refused()
        with torch.no_grad():
            assert torch.equal(base(TOKENS.cuda()), target(TOKENS.cuda()))
        attached.check()

    @pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
    def test_weights_that_stay_quantised(self, kind: str, tmp_path: Path) -> None:
        base, image = base_of(kind)
        target = finetune_of(image)
        tpde.torch.save_file(target, tmp_path / "p", base=base, codec="conditioned", chunk_lanes=4096)
        x = torch.randn(5, 256, device="cuda").to(torch.bfloat16)
        wanted = outputs_of({name: weight.cuda() for name, weight in target.items()}, x)
        for where, payloads in (("device", "device"), ("device", "pinned"), ("host", "pinned")):
            held = {name: tensor.cuda() for name, tensor in base.items()} if where == "device" else base
            model = Resident(held)
            attached = tpde.nn.attach(model, tmp_path / "p", device="cuda", payloads=payloads)
            assert set(attached.layers) == {"up", "down"}
            with torch.no_grad():
                for _ in range(3):
                    assert torch.equal(model(x), wanted)
            attached.check()
        on_device = {name: tensor.cuda() for name, tensor in base.items()}
        found = tpde.torch.load_file(tmp_path / "p", base=on_device, device="cuda")
        assert all(torch.equal(found[name], weight.cuda()) for name, weight in target.items())

    def test_a_pair_without_a_base(self, deep: tuple[Deep, Deep, Path], tmp_path: Path) -> None:
        _, target, _ = deep
        tpde.torch.save_file({name: t.cpu() for name, t in target.state_dict().items()}, tmp_path / "a", codec="conditioned")
        for payloads in ("pinned", "device"):
            with torch.device("meta"):
                model = Deep(width=256)
            model.head.weight = model.embed.weight
            tpde.nn.attach(model, tmp_path / "a", device="cuda", payloads=payloads).check()
            with torch.no_grad():
                assert torch.equal(model(TOKENS.cuda()), target(TOKENS.cuda()))

    def test_a_pair_made_ready(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        for payloads in ("file", "device"):
            model = loaded({name: tensor.cpu() for name, tensor in base.state_dict().items()}, "cuda", width=256)
            tpde.nn.attach(model, tpde.torch.DevicePair(pair, "cuda", payloads=payloads))
            with torch.no_grad():
                assert torch.equal(model(TOKENS.cuda()), target(TOKENS.cuda()))

    def test_streams_have_scratch_of_their_own(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        with torch.no_grad():
            wanted = target(TOKENS.cuda())
            torch.cuda.synchronize()
            streams, found = [torch.cuda.Stream() for _ in range(3)], []
            for _ in range(3):
                for stream in streams:
                    with torch.cuda.stream(stream):
                        found.append(base(TOKENS.cuda()))
            torch.cuda.synchronize()
        assert all(torch.equal(one, wanted) for one in found)
        prefetchers = [tpde.nn._prefetch.Prefetcher.of(base.twin._weight.device, stream) for stream in streams]
        memory = {slot.memory.data_ptr() for prefetcher in prefetchers for slot in prefetcher.slots}
        assert len(memory) == 6 and all(address % 256 == 0 for address in memory)

    def test_scratch_is_all_the_memory(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        width, layers = 2048, 16
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
        tpde.torch.save_file(model, tmp_path / "a", codec="conditioned")
        plain, weight = model.cuda(), width * width * 2
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
        x = torch.randn(1, width, dtype=torch.bfloat16, device="cuda")
        attached = tpde.nn.attach(model, tmp_path / "a", device="cuda")
        torch.cuda.synchronize()
        with torch.no_grad():
            wanted = plain(x)
            held = torch.cuda.memory_allocated()
            for _ in range(3):
                assert torch.equal(model(x), wanted)
            torch.cuda.synchronize()
            # Two slots, each for a weight and its payload, and little memory per layer.
            assert 3 * weight <= torch.cuda.memory_allocated() - held <= 4 * weight + 8 * MIB
            attached.release()
            assert torch.cuda.memory_allocated() - held <= 8 * MIB
            assert torch.equal(model(x), wanted)

    def test_compiled(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        compiled = torch.compile(base, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(compiled(TOKENS.cuda()), target(TOKENS.cuda()))

    @pytest.mark.parametrize("payloads", ["pinned", "device"])
    def test_in_a_graph(self, payloads: str, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, payloads=payloads)
        tokens = TOKENS.cuda()
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                base(tokens)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = base(tokens)
            for shift in range(3):
                tokens.copy_((TOKENS.cuda() + shift) % 100)
                graph.replay()
                assert torch.equal(y, target(tokens))
                assert torch.equal(base(tokens), target(tokens))  # between replays, without the graph
        attached.check()

    def test_memory_beside_a_graph(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair)
        tokens, device = TOKENS.cuda(), base.twin._weight.device
        with torch.no_grad():
            base(tokens)
            torch.cuda.synchronize()
            # The scratch memory of the layers is not in the graph's pool. Use up all free blocks of the ordinary pool first.
            held, filling = torch.cuda.memory_reserved(), []
            while torch.cuda.memory_reserved() == held:
                filling.append(device.memory(1 << 16, "a test"))
            filling += [device.memory(1 << 16, "a test") for _ in range(31)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = base(tokens)
            graph.replay()
            assert torch.equal(y, target(tokens))
        attached.check()

    @pytest.mark.parametrize("payloads", ["pinned", "device"])
    def test_graphs_of_parts(self, payloads: str, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair, payloads=payloads)
        names = list(attached.layers)
        x = {
            name: torch.randn(2, layer.in_features, dtype=torch.bfloat16, device="cuda") for name, layer in attached.layers.items()
        }
        wanted = {name: target.get_submodule(name)(x[name]) for name in names}
        graphs = []
        pool = torch.cuda.graph_pool_handle()
        with torch.no_grad():
            for n, of in enumerate((names, names[:1], names[2:5], names[::-1], names[:2] * 3)):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool if n % 2 else None):  # some graphs share a pool
                    found = [(name, attached.layers[name](x[name])) for name in of]
                graphs.append((graph, found))
            for _ in range(3):
                for graph, found in graphs:
                    graph.replay()
                    assert all(torch.equal(y, wanted[name]) for name, y in found)
                    assert torch.equal(base(TOKENS.cuda()), target(TOKENS.cuda()))
        attached.check()

    def test_damage_is_found(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair)
        payload = attached.layers["blocks.2.up"]._weight.payload
        payload[len(payload) // 2] ^= 4
        with pytest.raises(tpde.Invalid) as caught, torch.no_grad():
            base(TOKENS.cuda())
            attached.check()
        assert caught.value.rule.startswith("payload.") and caught.value.tensor == "blocks.2.up.weight"
        payload[len(payload) // 2] ^= 4
        for _ in range(4):  # errors of queued work are raised too
            try:
                attached.check()
            except tpde.Invalid:
                continue
        with torch.no_grad():
            base(TOKENS.cuda())
            assert torch.equal(base(TOKENS.cuda()), target(TOKENS.cuda()))
        attached.check()

    def test_a_wrong_base(self, deep: tuple[Deep, Deep, Path]) -> None:
        _, target, pair = deep
        with pytest.raises(tpde.WrongBase):
            tpde.nn.attach(Deep(seed=8, width=256).cuda(), pair)
        with pytest.raises(tpde.AlreadyApplied):
            tpde.nn.attach(target, pair)

    def test_threads(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        with torch.no_grad():
            wanted = target(TOKENS.cuda())
        found: list[torch.Tensor] = []

        def work() -> None:  # all threads use the same stream
            with torch.no_grad():
                found.extend(base(TOKENS.cuda()) for _ in range(5))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert len(found) == 15 and all(torch.equal(one, wanted) for one in found)

    def test_three_models_in_three_threads(self, tmp_path: Path) -> None:
        soak(tmp_path, "cuda", FORWARDS)

    def test_signals(self, deep: tuple[Deep, Deep, Path]) -> None:
        under_signals(*deep, "cuda")

    @pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
    def test_modes_of_the_compiler(self, mode: str, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        layer, plain = base.blocks[0]["up"], target.blocks[0]["up"]
        x = torch.randn(3, 256, dtype=torch.bfloat16, device="cuda")
        torch._dynamo.reset()
        compiled = torch.compile(layer, mode=mode, fullgraph=True)
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(compiled(x), plain(x))

    def test_a_default_device(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        before = torch.get_default_device()
        try:
            torch.set_default_device("cuda")
            tpde.nn.attach(base.cpu(), pair, device="cpu")
        finally:
            torch.set_default_device(before)
        with torch.no_grad():
            assert torch.equal(base(TOKENS), target.cpu()(TOKENS))

    def test_a_base_that_is_still_queued(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        tpde.nn.attach(base, pair)
        with torch.no_grad():
            for _ in range(3):
                wanted = target(TOKENS.cuda())
                base(TOKENS.cuda())  # allocates the scratch memory
                late = Deep(width=256).cuda()
                states = {name: tensor.clone() for name, tensor in late.state_dict().items()}
                for tensor in late.state_dict().values():
                    tensor.zero_()
                torch.cuda.synchronize()
                torch.cuda._sleep(100_000_000)
                for name, tensor in late.state_dict().items():
                    tensor.copy_(states[name])
                attached = tpde.nn.attach(late, pair, check=False)
                assert torch.equal(late(TOKENS.cuda()), wanted)
                attached.check()

    def test_faults_are_raised_by_their_model(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        other = loaded({name: tensor.cpu() for name, tensor in base.state_dict().items()}, "cuda", width=256)
        models = [tpde.nn.attach(model, pair) for model in (base, other)]
        weight = models[0].layers["blocks.2.up"]._weight
        x = torch.randn(2, 256, dtype=torch.bfloat16, device="cuda")
        weight.payload[len(weight.payload) // 2] ^= 4
        with torch.no_grad():
            models[0].layers["blocks.2.up"](x)
            torch.cuda.synchronize()
            for _ in range(3):
                assert torch.equal(other(TOKENS.cuda()), target(TOKENS.cuda()))
        models[1].check()
        with pytest.raises(tpde.Invalid) as caught:
            models[0].check()
        assert caught.value.tensor == "blocks.2.up.weight"

    def test_a_graph_before_its_first_replay_and_after_its_end(self, deep: tuple[Deep, Deep, Path]) -> None:
        base, target, pair = deep
        attached = tpde.nn.attach(base, pair)
        weight = attached.layers["blocks.2.up"]._weight
        tokens = TOKENS.cuda()
        with torch.no_grad():
            base(tokens)
            # The words that report errors are in pinned memory and are reused.
            weight.payload[len(weight.payload) // 2] ^= 4
            for _ in range(3):
                with pytest.raises(tpde.Invalid):
                    base(tokens)
                    attached.check()
            weight.payload[len(weight.payload) // 2] ^= 4
            for _ in range(20):
                try:
                    attached.check()
                    break
                except tpde.Invalid:
                    continue
            attached.release()
            with pytest.raises(ValueError, match="stop"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                base(tokens)
                raise ValueError("stop")
            attached.check()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = base(tokens)
            attached.check()
            graph.replay()
            assert torch.equal(y, target(tokens))
            attached.check()
            for _ in range(5):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = base(tokens)
                graph.replay()
                assert torch.equal(y, target(tokens))
            torch.cuda.synchronize()
            tpde.nn._capture.Graph.prune()
            assert len(tpde.nn._capture.Graph._kept) <= 2
