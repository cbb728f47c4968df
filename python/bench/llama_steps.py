"""The steps of `llama_8b.py`. That script runs each step in its own process.

    python bench/llama_steps.py STEP --folder FOLDER --settings JSON ...

The result is written to FOLDER/STEP.json.
"""

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import tpde
import tpde.nn
import tpde.torch

GIB = 1 << 30
#: Bytes kept free for activations, the cache, workspaces of libraries and rounding of the allocator, for every contender.
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
#: Memory budgets of the small model. The keys are those of the large model in GiB: in 12 all compressed layers fit, in 8 only some.
SMALL_BUDGETS = {12: RESERVE + 7_100_000, 8: RESERVE + 4_500_000}
#: Steps before those that are counted: the prompt, a step, and one that captures a graph.
WARM_UP = 3
#: Lanes that are made at a time, so that making them takes little memory.
PIECE = 4 << 20


class NotHere(Exception):
    """A step cannot be measured on this machine. The text says why."""


class Model:
    """A model whose weights are made on demand, from their names."""

    def __init__(self, how: argparse.Namespace) -> None:
        self.how, self.folder, self.begin = how, how.folder, time.perf_counter()
        self.device = torch.device(how.device)
        self.is_gpu = self.device.type == "cuda"
        self.is_small = how.settings["config"] == "small"
        self.config = self.configured()
        empty = self.empty(self.config)
        self.shapes = {name: parameter.shape for name, parameter in empty.named_parameters()}
        self.bytes = {name: 2 * shape.numel() for name, shape in self.shapes.items()}
        self.linears = [f"{name}.weight" for name, m in empty.named_modules() if type(m) is nn.Linear and "layers" in name]
        self.dense_bytes = {name: self.bytes[name] for name in self.linears}
        self.others = [name for name in self.shapes if name not in self.dense_bytes]
        self.other_bytes = sum(self.bytes[name] for name in self.others)

    def say(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def left(self) -> float:
        """Seconds left of the time limit."""
        return float(self.how.seconds - (time.perf_counter() - self.begin))

    def configured(self, **other: int) -> LlamaConfig:
        return LlamaConfig(
            **{**SHAPES[self.how.settings["config"]], **other},
            max_position_embeddings=2048,
            rope_theta=500000.0,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )

    def empty(self, config: LlamaConfig | None = None) -> LlamaForCausalLM:
        """The model without weights."""
        with torch.device("meta"):
            model = LlamaForCausalLM(config or self.config).to(torch.bfloat16).eval()
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config=self.config).to(self.device)
        return model

    def weight(self, name: str, where: str = "device") -> torch.Tensor:
        """A weight on the device, in pinned memory or on the host: always the same, made on the device."""
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        place = self.device if where == "device" else torch.device("cpu")
        made = torch.empty(self.shapes[name], dtype=torch.bfloat16, device=place, pin_memory=where == "pinned" and self.is_gpu)
        flat = made.view(-1)
        for start in range(0, len(flat), PIECE):
            part = flat[start : start + PIECE]
            piece = torch.randn(len(part), generator=generator, device=self.device).mul_(0.02)
            part.copy_((piece + 1 if "norm" in name else piece).to(torch.bfloat16))
        return made

    def put(self, model: nn.Module, names: Iterable[str], where: str = "device") -> None:
        """Puts dense weights into the model."""
        for name in names:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Parameter(self.weight(name, where), requires_grad=False))

    @torch.no_grad()
    def run(self, model: nn.Module, count: int) -> tuple[torch.Tensor, list[int], float]:
        """Logits and token of each step, and tokens per second. Steps of warm-up are not counted."""
        tokens = torch.arange(1, 17, device=self.device).view(1, 16)
        cache, logits, found, begin = StaticCache(config=model.config, max_cache_len=count + 24), [], [], 0.0
        for step in range(count + WARM_UP):
            if step == WARM_UP:
                self.wait()
                begin = time.perf_counter()
            logits.append(model(tokens, past_key_values=cache, use_cache=True).logits[:, -1])
            tokens = logits[-1].argmax(-1, keepdim=True)
            found.append(int(tokens))  # reading the token is part of generating
        self.wait()
        seconds = time.perf_counter() - begin
        return torch.cat(logits).cpu(), found, count / seconds

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def warm_up(self) -> None:
        """Runs a model of one layer, so that libraries which every contender needs are loaded and their memory is known."""
        if self.is_gpu:
            config = self.configured(num_hidden_layers=1, vocab_size=1000)
            model = self.empty(config)
            for name, parameter in list(model.named_parameters()):
                path, _, last = name.rpartition(".")
                weight = nn.Parameter(torch.zeros_like(parameter, device=self.device), requires_grad=False)
                setattr(model.get_submodule(path), last, weight)
            self.run(model, 2)
            del model, parameter, weight
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def beside(self) -> int:
        """Bytes of the device that PyTorch's allocator does not hold: context and libraries, and what others hold."""
        if not self.is_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())

    def peak(self) -> int:
        """The largest number of bytes in use on the whole device since this process began."""
        return self.beside() + int(torch.cuda.max_memory_reserved()) if self.is_gpu else 0


def digests(logits: torch.Tensor) -> list[str]:
    """Digest of the logits of each step."""
    return [hashlib.sha256(row.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:32] for row in logits]


def reference(m: Model) -> dict[str, Any]:
    """The unrestricted model."""
    model = m.empty()
    m.put(model, m.shapes)
    logits, tokens, speed = m.run(model, m.how.tokens)
    total = sum(m.bytes.values())
    on = torch.cuda.get_device_name() if m.is_gpu else "CPU"
    return {
        "say": f"{on}, PyTorch {torch.__version__}, tpde {tpde.__version__}; {total / GIB:.2f} GiB of weights, "
        f"{sum(m.dense_bytes.values()) / GIB:.2f} of them in {len(m.linears)} layers; unrestricted: {speed:.1f} tokens/s",
        "tokens_per_s": speed,
        "peak_bytes": m.peak(),
        "tokens": tokens,
        "digests": digests(logits),
    }


def contender(m: Model, gib: int, build: Callable[[Model, int], nn.Module], count: int) -> dict[str, Any]:
    """Builds a model that uses what is left of the budget, and runs it."""
    wanted = json.loads((m.folder / "reference.json").read_text())["digests"]
    m.warm_up()
    beside = m.beside()
    budget = SMALL_BUDGETS[gib] + beside if m.is_small else gib * GIB
    if beside > budget // 2:
        raise NotHere(f"{beside / GIB:.2f} GiB of the device are in use before anything was done")
    if m.is_gpu:
        torch.cuda.set_per_process_memory_fraction((budget - beside) / torch.cuda.mem_get_info()[1])
    begin = time.perf_counter()
    room = budget - beside - m.other_bytes - RESERVE
    model = build(m, room)
    m.put(model, (name for name, parameter in model.named_parameters() if parameter.is_meta and name in m.others))
    m.wait()
    took = time.perf_counter() - begin
    logits, _, speed = m.run(model, min(count, m.how.tokens))
    graphs = getattr(getattr(model, "attached", None), "graphs", None)
    if graphs is not None and graphs.replays < min(count, m.how.tokens):
        raise RuntimeError(f"{graphs.replays} steps were replays of a graph: {graphs.reason}")
    found, peak = digests(logits), m.peak()
    differs = next((step for step, digest in enumerate(found) if digest != wanted[step]), None)
    equal = "equal bit for bit" if differs is None else f"DIFFER from step {differs} on"
    return {
        "ok": differs is None and peak <= budget,
        "say": f"{speed:.2f} tokens/s, at most {peak / GIB:.2f} of {budget / GIB:.2f} GiB of the device"
        f"{' EXCEEDED' if peak > budget else ''}, logits {equal} (built in {took:.0f} s)",
        "tokens_per_s": speed,
        "peak_bytes": peak,
        "budget_bytes": budget,
        "context_bytes": beside,
        "logits_equal": differs is None,
        "digest": hashlib.sha256("".join(found).encode()).hexdigest(),
        "reference_digest": hashlib.sha256("".join(wanted[: len(found)]).encode()).hexdigest(),
        "build_s": took,
    }


def spread(names: list[str], sizes: dict[str, int], room: int) -> set[str]:
    """Names, chosen evenly from all, whose sizes fit in `room`."""
    fraction = min(1.0, max(0.0, room / sum(sizes.values())))
    taken, held, owed = set(), 0, 0.0
    for name in names:
        owed += sizes[name] * fraction
        if owed >= sizes[name] and held + sizes[name] <= room or fraction == 1.0:
            taken.add(name)
            held, owed = held + sizes[name], owed - sizes[name]
    return taken


# ---- dense with prefetch


def dense(m: Model, room: int) -> nn.Module:
    model = m.empty()
    largest = max(m.dense_bytes.values())
    resident = spread(m.linears, m.dense_bytes, room - 2 * largest)
    streamed = [name for name in m.linears if name not in resident]
    m.put(model, [name for name in m.shapes if name not in streamed])
    streamer = Streamer(m.device, largest, [m.weight(name, "pinned") for name in streamed])
    for place, name in enumerate(streamed):
        path, _, last = name.rpartition(".")[0].rpartition(".")
        setattr(model.get_submodule(path), last, Streamed(streamer, place))
    gib = sum(m.dense_bytes[name] for name in streamed) / GIB
    m.say(f"{len(resident)} layers resident, {len(streamed)} streamed, {gib:.2f} GiB a token")
    return model


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


# ---- tpde

#: Lanes per chunk for layers that are rebuilt one by one. A layer then has about as many chunks as a device decodes at once.
LAYER_CHUNK = 1 << 16
#: Lanes per chunk for fine-tunes, which are rebuilt as a whole.
TUNE_CHUNK = 1 << 19


def anchor(m: Model) -> dict[str, Any]:
    """The layers compressed without a base."""
    layers = {name: m.weight(name, "host") for name in m.linears}
    begin = time.perf_counter()
    report = tpde.torch.save_file(layers, m.folder / "anchor", codec="conditioned", chunk_lanes=LAYER_CHUNK, replace=True)
    took = time.perf_counter() - begin
    speed = report.target_bytes / took / 1e9
    return {
        "say": f"{report.stored_bytes / GIB:.2f} GiB, {report.ratio:.3f}:1, encoded in {took:.0f} s, {speed:.1f} GB/s",
        "stored_bytes": report.stored_bytes,
        "ratio": report.ratio,
        "encode_s": took,
    }


def graphed(m: Model, room: int) -> nn.Module:
    return compressed(m, room, graph=True)


def compressed(m: Model, room: int, **how: bool) -> nn.Module:
    model = m.empty()
    stored = {tensor.name: tensor.payload_bytes for tensor in tpde.inspect(m.folder / "anchor").tensors}
    # Two slots for weights, the index, and two buffers for payloads.
    room -= 2 * max(m.dense_bytes.values()) + (0 if m.is_small else 16 << 20)
    plain: set[str] = set()
    if sum(stored.values()) <= room:
        on_device = set(m.linears)
        gain = {name: m.dense_bytes[name] - stored[name] for name in m.linears}
        plain = spread(m.linears, gain, room - sum(stored.values()))
    else:
        on_device = spread(m.linears, stored, room - 2 * max(stored.values()))
    # Puts embedding and head into the model before the layers are attached: the pair has neither.
    m.put(model, m.others)
    attached = tpde.nn.attach(
        model,
        m.folder / "anchor",
        device=m.device,
        payloads=lambda name: "device" if name in on_device else "pinned",
        only=lambda name: name not in plain,
        check=False,  # each is checked whenever it is rebuilt
        **how,
    )
    object.__setattr__(model, "attached", attached)
    streamed = [name for name in m.linears if name not in on_device]
    gib = sum(stored[name] for name in streamed) / GIB
    m.say(
        f"{len(plain)} layers dense, {len(on_device) - len(plain)} compressed on the device, "
        f"{len(streamed)} in pinned memory, {gib:.2f} GiB a token"
    )
    return model


# ---- accelerate


def offloaded(m: Model, room: int) -> nn.Module:
    try:
        import accelerate
    except ImportError as error:
        raise NotHere(f"accelerate cannot be imported: {error}") from error
    if not m.is_gpu:
        raise NotHere("accelerate offloads from a GPU")
    model = m.empty()
    m.put(model, m.shapes, "pinned")
    most = room + m.other_bytes - (0 if m.is_small else 1 << 30)
    plan = accelerate.infer_auto_device_map(
        model, max_memory={0: most, "cpu": 100 * GIB}, no_split_module_classes=["LlamaDecoderLayer"]
    )
    m.say(f"{sum(str(place) == 'cpu' for place in plan.values())} of {len(plan)} modules on the CPU")
    return accelerate.dispatch_model(model, plan, main_device=0)


# ---- DFloat11


def dfloat11(m: Model) -> dict[str, Any]:
    """The decoder layers in the format of DFloat11."""
    check_dfloat11(m)
    import df11

    begin = time.perf_counter()
    stored = df11.write(m.folder / "df11", m.config.num_hidden_layers, m.weight, m.say)
    took = time.perf_counter() - begin
    ratio = sum(m.dense_bytes.values()) / stored
    return {"say": f"{stored / GIB:.2f} GiB, {ratio:.3f}:1, encoded in {took:.0f} s", "stored_bytes": stored, "ratio": ratio}


def check_dfloat11(m: Model) -> None:
    if not m.is_gpu:
        raise NotHere("DFloat11 needs a GPU")
    try:
        import dfloat11.dfloat11  # noqa: F401
    except ImportError as error:
        raise NotHere(f"DFloat11 cannot be imported: {error}") from error


def by_dfloat11(m: Model, room: int) -> nn.Module:
    check_dfloat11(m)
    import df11

    model = m.empty()
    m.put(model, m.others, "host")
    # A decoder layer is decoded as a whole, and an offloaded layer is on the device while it is used.
    layer = sum(m.dense_bytes.values()) // m.config.num_hidden_layers
    return df11.load(m.folder / "df11", model, m.config.num_hidden_layers, layer, room, m.say)


# ---- many fine-tunes over one base


@torch.no_grad()
def tuned(name: str, base: torch.Tensor, number: int, share: float) -> torch.Tensor:
    """A weight of a fine-tune: `share` of the lanes are moved by a unit in the last place. Equal arguments give equal weights."""
    generator = torch.Generator(base.device).manual_seed(zlib.crc32(f"{number} {name}".encode()))
    moved = torch.rand(base.shape, generator=generator, device=base.device) < share
    return (base.view(torch.int16) + moved.to(torch.int16)).view(torch.bfloat16)


@torch.no_grad()
def swap(m: Model, share: float) -> dict[str, Any]:
    base = {name: m.weight(name) for name in m.shapes}
    live = {name: tensor.clone() for name, tensor in base.items()}
    pinned = {name: torch.empty(t.shape, dtype=t.dtype, pin_memory=m.is_gpu) for name, t in base.items()}
    host = {name: tensor.cpu() for name, tensor in base.items()}
    pairs: list[Any] = []
    sizes, encoded = [], []
    for number in range(m.how.tunes):
        for name, tensor in base.items():
            pinned[name].copy_(tuned(name, tensor, number, share))
        path = m.folder / f"tune-{number}"
        begin = time.perf_counter()
        report = tpde.torch.save_file(pinned, path, base=host, codec="conditioned", chunk_lanes=TUNE_CHUNK, replace=True)
        sizes.append(report.stored_bytes)
        encoded.append(time.perf_counter() - begin)
        pairs.append(tpde.torch.DevicePair(path, m.device, payloads="pinned") if m.is_gpu else path)
        if m.left() < 40 + 2 * encoded[-1]:
            break
    few = "" if len(pairs) == m.how.tunes else f" of {m.how.tunes}, NO TIME FOR MORE"
    m.say(f"{len(pairs)} fine-tunes{few} encoded in {statistics.mean(encoded):.1f} s each")
    times, copies, differ = [], [], []
    for turn in range(max(3 * len(pairs), 5)):
        m.wait()
        begin = time.perf_counter()
        tpde.torch.apply_(live, pairs[turn % len(pairs)], base=base)
        m.wait()
        times.append(time.perf_counter() - begin)
        if turn < len(pairs):
            for name, tensor in base.items():
                if not torch.equal(live[name].view(torch.int16), tuned(name, tensor, turn, share).view(torch.int16)):
                    differ.append(f"{turn}: {name}")
    for _ in range(5):
        m.wait()
        begin = time.perf_counter()
        for name, tensor in live.items():
            tensor.copy_(pinned[name], non_blocking=True)
        m.wait()
        copies.append(time.perf_counter() - begin)
    # The first call with each pair makes it ready.
    first, again, copy = (
        statistics.median(times[: len(pairs)]),
        statistics.median(times[len(pairs) :]),
        statistics.median(copies[1:]),
    )
    for file in m.folder.glob("tune-*"):
        file.unlink()
    return {
        "ok": not differ,
        "say": f"{len(pairs)} fine-tunes{few}, {share:.0%} changed: {statistics.mean(sizes) / GIB:.3f} GiB each; a swap {1e3 * again:.1f} "
        f"ms (the first with a pair {1e3 * first:.1f}), of the dense model from pinned memory {1e3 * copy:.1f} ms: "
        f"1/{copy / again:.1f}; {'every tensor compared' if not differ else f'{len(differ)} tensors DIFFER: {differ[:3]}'}",
        "tunes": len(pairs),
        "share": share,
        "stored_bytes_each": statistics.mean(sizes),
        "swap_s": again,
        "first_swap_s": first,
        "dense_copy_s": copy,
        "encode_s_each": statistics.mean(encoded),
        "peak_bytes": m.peak(),
    }


BUILDS = {"dense": dense, "tpde": compressed, "tpde-graph": graphed, "accelerate": offloaded, "dfloat11": by_dfloat11}


def step(m: Model, name: str) -> dict[str, Any]:
    if name in ("reference", "anchor", "dfloat11"):
        return {"reference": reference, "anchor": anchor, "dfloat11": dfloat11}[name](m)
    first, _, rest = name.partition("-")
    if first == "swap":
        return swap(m, int(rest) / 100)
    if rest.endswith("-graph") and not m.is_gpu:
        raise NotHere("a CUDA graph needs a GPU")
    return contender(m, int(first), BUILDS[rest], 4 if rest == "accelerate" else m.how.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--tunes", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    how = parser.parse_args()
    try:
        result = {"ok": True, **step(Model(how), how.step)}
    except NotHere as error:
        result = {"ok": None, "why": str(error)}
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        result = {"ok": False, "why": f"{type(error).__name__}: {error}"[:500]}
    written = how.folder / f"{how.step}.json.new"
    written.write_text(json.dumps({**result, "settings": how.settings}))
    written.rename(how.folder / f"{how.step}.json")
    raise SystemExit(0 if result["ok"] is not False else 1)


if __name__ == "__main__":
    main()
