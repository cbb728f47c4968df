#!/usr/bin/env python3
"""A Llama 3.1 8B on a GPU that is held to 12 or 8 GiB of memory, generating at batch 1; and many fine-tunes over one base.

    python bench/llama_8b.py [--seconds 380] [--tokens 16] [--tunes 8]
    python bench/llama_8b.py --config small --device cpu        # the same steps on the CPU, for a look at the script

The class is that of transformers, the weights are made up (normal, 0.02) and nothing is downloaded. Budgets are of the whole
device, with the context and all libraries: PyTorch's allocator is capped, and `mem_get_info` is asked after each contender.
Embedding, head and norms are dense and resident for every contender; each then fills its budget with resident layers, spread
evenly, and streams the others from pinned memory while the layers before them compute:

- dense: layers are resident, or copied to one of two slots;
- tpde: layers are compressed without a base, on the device or in pinned memory, and rebuilt just in time; where all compressed
  layers fit, the rest of the budget takes dense ones;
  once kernel by kernel, and where all is on the device as a CUDA graph too (what streams waits for the bus, not for the host);
- accelerate: `dispatch_model`, with the layers that do not fit on the CPU; for reference.

Every contender is fed the tokens of the unrestricted model, and its logits are compared with that one's, bit for bit.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import tpde
import tpde.nn
import tpde.torch

GIB = 1 << 30
#: Kept free for activations, the cache, workspaces of libraries and what the allocator rounds up; the same for all.
RESERVE = 448 << 20
SHAPES = {
    "8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "small": dict(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, vocab_size=2000
    ),
}


class Bench:
    """Weights on the host, and the plain model's logits."""

    def __init__(self, how: argparse.Namespace, folder: Path) -> None:
        self.how, self.folder, self.begin = how, folder, time.perf_counter()
        self.device = torch.device(how.device)
        self.is_gpu = self.device.type == "cuda"
        self.config = LlamaConfig(
            **SHAPES[how.config],
            max_position_embeddings=2048,
            rope_theta=500000.0,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        self.say(f"{torch.cuda.get_device_name() if self.is_gpu else 'CPU'}, PyTorch {torch.__version__}, tpde {tpde.__version__}")
        self.host = self.make_weights()
        self.linears = [f"{name}.weight" for name, m in self.empty().named_modules() if type(m) is nn.Linear and "layers" in name]
        self.dense_bytes = {name: self.host[name].nbytes for name in self.linears}
        total = sum(tensor.nbytes for tensor in self.host.values())
        self.say(f"{total / GIB:.2f} GiB of weights, {sum(self.dense_bytes.values()) / GIB:.2f} of them in {len(self.linears)} layers")

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begin:5.0f} s] {text}", flush=True)

    def left(self) -> float:
        """Seconds."""
        return self.how.seconds - (time.perf_counter() - self.begin)

    def empty(self) -> LlamaForCausalLM:
        """The model without weights."""
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config).to(torch.bfloat16).eval()
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config=self.config).to(self.device)
        return model

    def make_weights(self) -> dict[str, torch.Tensor]:
        """Weights in pinned memory, made on the device."""
        made = {}
        torch.manual_seed(0)
        for name, parameter in self.empty().named_parameters():
            weight = torch.randn(parameter.shape, device=self.device).mul_(0.02)
            weight = (weight + 1 if "norm" in name else weight).to(torch.bfloat16)
            made[name] = torch.empty(parameter.shape, dtype=torch.bfloat16, pin_memory=self.is_gpu).copy_(weight)
        return made

    def put(self, model: nn.Module, names: Iterable[str]) -> None:
        """Dense weights on the device."""
        for name in names:
            self.set(model, name, self.host[name].to(self.device))

    @staticmethod
    def set(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(tensor, requires_grad=False))

    @torch.no_grad()
    def run(self, model: nn.Module, count: int, graph: bool = False) -> tuple[torch.Tensor, float]:
        """Logits of each step, and tokens a second; two steps come before those that count. The tokens must be the plain model's.
        With ``graph``, those that count are replays of a CUDA graph of one step."""
        tokens = torch.arange(1, 17, device=self.device).view(1, 16)
        cache, logits, begin = StaticCache(config=self.config, max_cache_len=64), [], 0.0
        replay = None
        for step in range(count + 2):
            if step == 2:
                if graph:
                    given, replay = tokens.clone(), torch.cuda.CUDAGraph()
                    with torch.cuda.graph(replay):
                        made = model(given, past_key_values=cache, use_cache=True).logits[:, -1]
                self.wait()
                begin = time.perf_counter()
            if replay is not None:
                given.copy_(tokens)
                replay.replay()
                logits.append(made.clone())
            else:
                logits.append(model(tokens, past_key_values=cache, use_cache=True).logits[:, -1])
            tokens = logits[-1].argmax(-1, keepdim=True)
            if hasattr(self, "tokens"):
                assert int(tokens) == self.tokens[step], f"another token at step {step}"
        self.wait()
        seconds = time.perf_counter() - begin
        return torch.cat(logits).cpu(), count / seconds

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def reference(self) -> None:
        """The unrestricted model."""
        model = self.empty()
        self.put(model, self.host)
        self.logits, speed = self.run(model, self.how.tokens)
        self.tokens = self.logits.argmax(-1).tolist()
        self.say(f"unrestricted: {speed:.1f} tokens/s, {self.used() / GIB:.2f} GiB of the device")
        del model
        self.clean()

    def used(self) -> int:
        if not self.is_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def clean(self) -> None:
        gc.collect()
        if self.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def contender(
        self, what: str, budget: int, build: Callable[[int], nn.Module], count: int | None = None, graph: bool = False
    ) -> float:
        """Builds a model that uses what is left of the budget, and runs it."""
        self.clean()
        room = budget
        if self.is_gpu:
            total = torch.cuda.mem_get_info()[1]
            beside = self.used() - torch.cuda.memory_reserved()  # context and libraries
            torch.cuda.set_per_process_memory_fraction((budget - beside) / total)
            room = budget - beside
        fixed = sum(tensor.nbytes for name, tensor in self.host.items() if name not in self.dense_bytes)
        speed = 0.0
        model = None
        try:
            begin = time.perf_counter()
            # A graph has scratch memory of its own.
            model = build(room - fixed - RESERVE - (2 * max(self.dense_bytes.values()) if graph else 0))
            self.put(model, (n for n, p in model.named_parameters() if p.is_meta and n in self.host and n not in self.dense_bytes))
            took = time.perf_counter() - begin
            count = min(count or self.how.tokens, self.how.tokens)
            logits, speed = self.run(model, count, graph)
            same = torch.equal(logits.view(torch.int16), self.logits[: count + 2].view(torch.int16))
            used = self.used()
            self.say(
                f"{what}: {speed:.2f} tokens/s, {used / GIB:.2f} of {budget / GIB:.0f} GiB, "
                f"logits {'equal bit for bit' if same else 'DIFFER'} (built in {took:.0f} s)"
            )
            assert same and used <= budget, what
        except Exception:
            self.failed = True
            self.say(f"{what}: FAILED")
            traceback.print_exc(file=sys.stdout)
        finally:
            del model
            if self.is_gpu:
                torch.cuda.set_per_process_memory_fraction(1.0)
            self.clean()
        return speed

    failed = False

    # ---- dense with prefetch

    def dense(self, room: int) -> nn.Module:
        model = self.empty()
        largest = max(self.dense_bytes.values())
        resident = spread(self.linears, self.dense_bytes, room - 2 * largest)
        streamed = [name for name in self.linears if name not in resident]
        self.put(model, [name for name in self.host if name not in streamed])
        streamer = Streamer(self.device, largest, [self.host[name] for name in streamed])
        for place, name in enumerate(streamed):
            path, _, last = name.rpartition(".")[0].rpartition(".")
            setattr(model.get_submodule(path), last, Streamed(streamer, place))
        gib = sum(self.dense_bytes[name] for name in streamed) / GIB
        self.say(f"  dense: {len(resident)} layers resident, {len(streamed)} streamed, {gib:.2f} GiB a token")
        return model

    # ---- tpde

    def anchor(self) -> None:
        """The layers compressed without a base."""
        begin = time.perf_counter()
        layers = {name: self.host[name] for name in self.linears}
        report = tpde.torch.save_file(None, layers, self.folder / "anchor", codec="conditioned")
        took = time.perf_counter() - begin
        self.stored = {tensor.name: tensor.payload_bytes for tensor in report.tensors}
        self.say(f"anchor: {report.stored_bytes / GIB:.2f} GiB, {report.ratio:.3f}:1, {report.target_bytes / took / 1e9:.1f} GB/s to encode")

    def compressed(self, room: int) -> nn.Module:
        model = self.empty()
        room -= 2 * max(self.dense_bytes.values()) + (16 << 20)
        dense: set[str] = set()
        if sum(self.stored.values()) <= room:
            on_device = set(self.linears)
            gain = {name: self.dense_bytes[name] - self.stored[name] for name in self.linears}
            dense = spread(self.linears, gain, room - sum(self.stored.values()))
        else:
            on_device = spread(self.linears, self.stored, room - 2 * max(self.stored.values()))
        # Embedding and head before the layers, as the pair does not have them.
        self.put(model, [name for name in self.host if name not in self.dense_bytes])
        self.attached = tpde.nn.attach(
            model,
            self.folder / "anchor",
            device=self.device,
            payloads=lambda name: "device" if name in on_device else "pinned",
            only=lambda name: name not in dense,
            check=False,  # each is checked whenever it is rebuilt
        )
        streamed = [name for name in self.linears if name not in on_device]
        gib = sum(self.stored[name] for name in streamed) / GIB
        self.say(
            f"  tpde: {len(dense)} layers dense, {len(on_device) - len(dense)} compressed on the device, "
            f"{len(streamed)} in pinned memory, {gib:.2f} GiB a token"
        )
        return model

    # ---- accelerate

    def offloaded(self, room: int) -> nn.Module:
        import accelerate

        model = self.empty()
        for name, tensor in self.host.items():
            self.set(model, name, tensor)
        fixed = sum(tensor.nbytes for name, tensor in self.host.items() if name not in self.dense_bytes)
        plan = accelerate.infer_auto_device_map(
            model, max_memory={0: room + fixed - (1 << 30), "cpu": 100 * GIB}, no_split_module_classes=["LlamaDecoderLayer"]
        )
        return accelerate.dispatch_model(model, plan, main_device=0)

    # ---- many fine-tunes over one base

    @torch.no_grad()
    def tune(self, name: str, base: torch.Tensor, number: int, share: float) -> torch.Tensor:
        """A weight of a fine-tune: so many lanes moved by a unit in the last place, the same whenever it is asked for."""
        generator = torch.Generator(base.device).manual_seed(hash((number, len(name), sum(name.encode()))) & 0x7FFFFFFF)
        moved = torch.rand(base.shape, generator=generator, device=base.device) < share
        return (base.view(torch.int16) + moved.to(torch.int16)).view(torch.bfloat16)

    def swaps(self, tunes: int, share: float) -> None:
        base = {name: tensor.to(self.device) for name, tensor in self.host.items()}
        live = {name: tensor.clone() for name, tensor in base.items()}
        dense = {name: torch.empty_like(tensor, pin_memory=self.is_gpu) for name, tensor in self.host.items()}
        pairs, sizes = [], []
        for number in range(tunes):
            for name, tensor in base.items():
                dense[name].copy_(self.tune(name, tensor, number, share))
            report = tpde.torch.save_file(self.host, dense, self.folder / f"tune-{number}", codec="conditioned", replace=True)
            sizes.append(report.stored_bytes)
            path = self.folder / f"tune-{number}"
            pairs.append(tpde.torch.DevicePair(path, self.device, payloads="pinned") if self.is_gpu else path)
            if self.left() < 60:
                break
        times, copies = [], []
        for turn in range(max(2 * len(pairs), 5)):
            self.wait()
            begin = time.perf_counter()
            tpde.torch.apply_(live, pairs[turn % len(pairs)], base=base)
            self.wait()
            times.append(time.perf_counter() - begin)
            if turn < len(pairs):
                for name, tensor in base.items():
                    wanted = self.tune(name, tensor, turn, share)
                    assert torch.equal(live[name].view(torch.int16), wanted.view(torch.int16)), f"fine-tune {turn}, {name}"
        for _ in range(4):
            self.wait()
            begin = time.perf_counter()
            for name, tensor in live.items():
                tensor.copy_(dense[name], non_blocking=True)
            self.wait()
            copies.append(time.perf_counter() - begin)
        swap, copy = statistics.median(times[1:]), statistics.median(copies[1:])
        self.say(
            f"{len(pairs)} fine-tunes, {share:.0%} changed: {statistics.mean(sizes) / GIB:.3f} GiB each; a swap {1e3 * swap:.1f} ms, "
            f"of the dense model {1e3 * copy:.1f} ms: 1/{copy / swap:.1f}; every tensor compared"
        )


def spread(names: list[str], sizes: dict[str, int], room: int) -> set[str]:
    """Some of the names, evenly among all, that fit into the room."""
    fraction = min(1.0, max(0.0, room / sum(sizes.values())))
    taken, held, owed = set(), 0, 0.0
    for name in names:
        owed += sizes[name] * fraction
        if owed >= sizes[name] and held + sizes[name] <= room or fraction == 1.0:
            taken.add(name)
            held, owed = held + sizes[name], owed - sizes[name]
    return taken


class Streamer:
    """Weights of pinned memory in two slots: while one is used, the next is copied."""

    def __init__(self, device: torch.device, largest: int, weights: list[torch.Tensor]) -> None:
        self.weights, self.count = weights, 0
        self.is_gpu = device.type == "cuda"
        self.slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        if self.is_gpu:
            self.copying = torch.cuda.Stream()
            self.copying.wait_stream(torch.cuda.current_stream())
            self.ready, self.used = [torch.cuda.Event() for _ in range(2)], [torch.cuda.Event() for _ in range(2)]
        for place in range(min(2, len(weights))):
            self.fetch(place, place)

    def view(self, place: int, slot: int) -> torch.Tensor:
        weight = self.weights[place]
        return self.slots[slot][: weight.nbytes].view(weight.dtype).view(weight.shape)

    def fetch(self, place: int, slot: int) -> None:
        if not self.is_gpu:
            self.view(place, slot).copy_(self.weights[place])
            return
        self.copying.wait_event(self.used[slot])
        with torch.cuda.stream(self.copying):
            self.view(place, slot).copy_(self.weights[place], non_blocking=True)
        self.ready[slot].record(self.copying)

    def linear(self, place: int, x: torch.Tensor) -> torch.Tensor:
        slot = self.count % 2
        self.count += 1
        if self.is_gpu:
            torch.cuda.current_stream().wait_event(self.ready[slot])
        y = nn.functional.linear(x, self.view(place, slot))
        if self.is_gpu:
            self.used[slot].record()
        self.fetch((place + 2) % len(self.weights), slot)
        return y


class Streamed(nn.Module):
    """A linear layer whose weight is streamed."""

    def __init__(self, streamer: Streamer, place: int) -> None:
        super().__init__()
        self.streamer, self.place = streamer, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.streamer.linear(self.place, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--tunes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=380, help="what would begin after this is left out")
    how = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(how, Path(name))
        bench.reference()
        bench.anchor()
        small = sum(tensor.nbytes for tensor in bench.host.values()) < GIB
        for budget, wanted in ((12 * GIB, 3.0), (8 * GIB, 1.7)):
            if small:
                budget = 448 * (1 << 20) + 6_000_000  # of the small model about half
            dense = bench.contender(f"dense with prefetch, {budget / GIB:.0f} GiB", budget, bench.dense)
            ours = bench.contender(f"tpde, {budget / GIB:.0f} GiB", budget, bench.compressed)
            if bench.is_gpu and sum(bench.stored.values()) < budget:
                # Without the host's work between kernels, which the bus does not hide where all is on the device.
                ours = max(ours, bench.contender(f"tpde in a CUDA graph, {budget / GIB:.0f} GiB", budget, bench.compressed, graph=True))
            if dense and ours:
                bench.say(f"{budget / GIB:.0f} GiB: tpde is {ours / dense:.2f} times as fast as dense with prefetch ({wanted} wanted)")
        for tunes, share in ((how.tunes, 0.01), (1, 0.4)):
            if bench.left() < 45:
                bench.say(f"fine-tunes with {share:.0%} changed: left out, no time")
                continue
            try:
                bench.swaps(tunes, share)
            except Exception:
                bench.failed = True
                traceback.print_exc(file=sys.stdout)
            bench.clean()
        if bench.is_gpu and bench.left() > 30:
            try:
                import dfloat11  # noqa: F401

                bench.say("DFloat11 is installed; this script has no run of it yet")
            except ImportError:
                bench.say("DFloat11 is not installed")
            bench.contender("accelerate's offload, 12 GiB", 12 * GIB, bench.offloaded, count=2)
    raise SystemExit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
