"""Made-up models whose loaders copy slices to parameters as those of inference engines do, for one rank of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Weights = dict[str, torch.Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
#: Bits that random weights have: all values, NaN with payloads included.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def random_weights(shapes: Shapes, seed: int) -> Weights:
    """Tensors of random bits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (shape, dtype) in shapes.items():
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        weights[name] = bits.view(dtype).reshape(shape)
    return weights


def changed(weights: Weights, seed: int, share: float = 0.05) -> Weights:
    """The tensors with some of their elements changed in the lowest bit."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in weights.items():
        integers = tensor.clone().view(INTEGERS[tensor.element_size()])
        mask = torch.rand(tensor.shape, generator=generator) < share
        result[name] = (integers ^ mask.to(integers.dtype)).view(tensor.dtype)
    return result


def part(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The part of a dim that a rank has: the first ranks have one element more if the dim does not divide."""
    small, more = divmod(size, ranks)
    start = rank * small + min(rank, more)
    return start, start + small + (rank < more)


def in_layers(shapes: Shapes) -> Shapes:
    """These tensors in each of two layers."""
    return {f"layers.{layer}.{name}": one for layer in range(2) for name, one in shapes.items()}


class Model:
    """Parameters of one rank, and the functions that load tensors into them."""

    shapes: Shapes = {}

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.parameters: Weights = {}
        self.loaders: dict[str, Callable[[torch.Tensor], None]] = {}

    def parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = BF16) -> torch.Tensor:
        self.parameters[name] = torch.zeros(shape, dtype=dtype)
        return self.parameters[name]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name in self.loaders:
                self.loaders[name](weight)

    def loaded(self, weights: Weights) -> Weights:
        """Copies of the parameters after loading these weights."""
        self.load_weights(weights.items())
        return {name: parameter.clone() for name, parameter in self.parameters.items()}

    def whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = BF16) -> None:
        memory = self.parameter(name, shape, dtype)
        self.loaders[name] = lambda weight: memory.data.copy_(weight)

    def rows(self, memory: torch.Tensor, at: int, start: int, stop: int) -> Callable[[torch.Tensor], None]:
        """Loads the rows from ``start`` to ``stop`` to those from ``at`` on."""
        return lambda weight: memory.data.narrow(0, at, stop - start).copy_(weight.narrow(0, start, stop - start))

    def fused(self, name: str, parts: dict[str, tuple[int, int]], columns: tuple[int, ...], dtype: torch.dtype = BF16) -> None:
        """Rows of several tensors in one parameter."""
        memory = self.parameter(name, (sum(stop - start for start, stop in parts.values()), *columns), dtype)
        at = 0
        for tensor, (start, stop) in parts.items():
            self.loaders[tensor] = self.rows(memory, at, start, stop)
            at += stop - start

    def columns(self, name: str, shape: tuple[int, int], dtype: torch.dtype = BF16) -> None:
        """The columns of a rank."""
        start, stop = part(shape[1], self.rank, self.ranks)
        memory = self.parameter(name, (shape[0], stop - start), dtype)
        self.loaders[name] = lambda weight: memory.data.copy_(weight[:, start:stop])

    def padded_rows(self, name: str, shape: tuple[int, ...], each: int) -> None:
        """Rows of a rank in a parameter with ``each`` rows. Those beyond the tensor are zeros."""
        memory = self.parameter(name, (each, *shape[1:]))
        start, stop = min(self.rank * each, shape[0]), min((self.rank + 1) * each, shape[0])

        def load(weight: torch.Tensor) -> None:
            memory[: stop - start].data.copy_(weight[start:stop])
            memory[stop - start :].data.fill_(0)

        self.loaders[name] = load


class Llama(Model):
    """Grouped-query attention with two key-value heads, which more ranks than two replicate. Tied embeddings, a padded vocabulary."""

    WIDTH, HEADS, KV, HEAD, HIDDEN, VOCABULARY = 32, 8, 2, 4, 48, 250
    BIAS = False
    shapes: Shapes = {
        "embed.weight": ((250, 32), BF16),
        "norm.weight": ((32,), BF16),
        "lm_head.weight": ((250, 32), BF16),
        **in_layers(
            {
                "q.weight": ((32, 32), BF16),
                "k.weight": ((8, 32), BF16),
                "v.weight": ((8, 32), BF16),
                "o.weight": ((32, 32), BF16),
                "gate.weight": ((48, 32), BF16),
                "up.weight": ((48, 32), BF16),
                "down.weight": ((32, 48), BF16),
                "norm.weight": ((32,), BF16),
            }
        ),
    }

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.padded_rows("embed.weight", (self.VOCABULARY, self.WIDTH), -(-256 // ranks))
        self.parameters["lm_head.weight"] = self.parameters["embed.weight"]  # tied, and the loader skips the checkpoint's tensor
        self.whole("norm.weight", (self.WIDTH,))
        for layer in range(2):
            self.attention(f"layers.{layer}")
            self.mlp(f"layers.{layer}")
            self.whole(f"layers.{layer}.norm.weight", (self.WIDTH,))

    def heads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows of queries, and of keys and values."""
        start, stop = part(self.HEADS, self.rank, self.ranks)
        copies = max(self.ranks // self.KV, 1)
        kv = part(self.KV, self.rank // copies, self.ranks // copies)
        return (start * self.HEAD, stop * self.HEAD), (kv[0] * self.HEAD, kv[1] * self.HEAD)

    def attention(self, layer: str) -> None:
        queries, keys = self.heads()
        rows = {"q": queries, "k": keys, "v": keys}
        self.fused(f"{layer}.qkv.weight", {f"{layer}.{name}.weight": one for name, one in rows.items()}, (self.WIDTH,))
        if self.BIAS:
            self.fused(f"{layer}.qkv.bias", {f"{layer}.{name}.bias": one for name, one in rows.items()}, ())
        memory = self.parameter(f"{layer}.o.weight", (self.WIDTH, queries[1] - queries[0]))
        self.loaders[f"{layer}.o.weight"] = lambda weight: memory.data.copy_(weight.narrow(1, queries[0], queries[1] - queries[0]))

    def mlp(self, layer: str) -> None:
        rows = part(self.HIDDEN, self.rank, self.ranks)
        self.fused(f"{layer}.gate_up.weight", {f"{layer}.gate.weight": rows, f"{layer}.up.weight": rows}, (self.WIDTH,))
        self.columns(f"{layer}.down.weight", (self.WIDTH, self.HIDDEN))


class Qwen(Llama):
    """Biases, and seven heads, which no number of ranks divides."""

    HEADS, BIAS = 7, True
    shapes: Shapes = {
        **Llama.shapes,
        **in_layers({"q.weight": ((28, 32), BF16), "o.weight": ((32, 28), BF16), "q.bias": ((28,), BF16)}),
        **in_layers({"k.bias": ((8,), BF16), "v.bias": ((8,), BF16)}),
    }


class Mixtral(Llama):
    """Experts stacked in two parameters: gate and up rows in one, columns of the third matrix in the other."""

    EXPERTS = 4
    shapes: Shapes = {
        **{name: one for name, one in Llama.shapes.items() if not name.endswith(("gate.weight", "up.weight", "down.weight"))},
        **in_layers({"router.weight": ((4, 32), F32)}),
        **in_layers({f"experts.{expert}.{name}.weight": ((48, 32), BF16) for expert in range(4) for name in ("w1", "w3")}),
        **in_layers({f"experts.{expert}.w2.weight": ((32, 48), BF16) for expert in range(4)}),
    }

    def mlp(self, layer: str) -> None:
        start, stop = part(self.HIDDEN, self.rank, self.ranks)
        size = stop - start
        w13 = self.parameter(f"{layer}.experts.w13", (self.EXPERTS, 2 * size, self.WIDTH))
        w2 = self.parameter(f"{layer}.experts.w2", (self.EXPERTS, self.WIDTH, size))
        self.whole(f"{layer}.router.weight", (self.EXPERTS, self.WIDTH), F32)
        for expert in range(self.EXPERTS):
            name = f"{layer}.experts.{expert}"
            self.loaders[f"{name}.w1.weight"] = lambda weight, to=w13[expert]: to[:size].copy_(weight[start:stop])
            self.loaders[f"{name}.w3.weight"] = lambda weight, to=w13[expert]: to[size:].copy_(weight[start:stop])
            self.loaders[f"{name}.w2.weight"] = self.second(w2, expert, start, stop)

    def second(self, w2: torch.Tensor, expert: int, start: int, stop: int) -> Callable[[torch.Tensor], None]:
        def load(weight: torch.Tensor) -> None:
            w2[expert] = weight.transpose(0, 1)[start:stop].transpose(0, 1)  # an index write

        return load


class DeepSeek(Model):
    """FP8 in blocks of 16 × 16 with scales, a fused low-rank projection, a shared expert, and experts in one stack of the checkpoint."""

    WIDTH, BLOCK, HEADS, LOW, HIDDEN, EXPERTS = 64, 16, 8, 32, 128, 3
    shapes: Shapes = {
        "q_a.weight": ((LOW, WIDTH), FP8),
        "q_a.scale": ((LOW // BLOCK, WIDTH // BLOCK), F32),
        "kv_a.weight": ((LOW // 2, WIDTH), FP8),
        "kv_a.scale": ((LOW // 2 // BLOCK, WIDTH // BLOCK), F32),
        "kv_b.weight": ((HEADS * 16, LOW), FP8),
        "kv_b.scale": ((HEADS, LOW // BLOCK), F32),
        "shared.gate.weight": ((HIDDEN, WIDTH), FP8),
        "shared.up.weight": ((HIDDEN, WIDTH), FP8),
        "shared.down.weight": ((WIDTH, HIDDEN), FP8),
        "shared.gate.scale": ((HIDDEN // BLOCK, WIDTH // BLOCK), F32),
        "shared.up.scale": ((HIDDEN // BLOCK, WIDTH // BLOCK), F32),
        "shared.down.scale": ((WIDTH // BLOCK, HIDDEN // BLOCK), F32),
        "experts.gate_up": ((EXPERTS, 2 * HIDDEN, WIDTH), BF16),
        "experts.down": ((EXPERTS, WIDTH, HIDDEN), BF16),
        "correction_bias": ((EXPERTS,), F32),
    }

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        block, width, low, hidden = self.BLOCK, self.WIDTH, self.LOW, self.HIDDEN
        rows = {"q_a.weight": (0, low), "kv_a.weight": (0, low // 2)}
        self.fused("qkv_a.weight", rows, (width,), FP8)
        scales = {"q_a.scale": (0, low // block), "kv_a.scale": (0, low // 2 // block)}
        self.fused("qkv_a.scale", scales, (width // block,), F32)
        heads = part(self.HEADS, rank, ranks)
        self.fused("kv_b.weight", {"kv_b.weight": (heads[0] * 16, heads[1] * 16)}, (low,), FP8)
        self.fused("kv_b.scale", {"kv_b.scale": heads}, (low // block,), F32)
        own, blocks = part(hidden, rank, ranks), part(hidden // block, rank, ranks)
        self.fused("shared.gate_up.weight", {"shared.gate.weight": own, "shared.up.weight": own}, (width,), FP8)
        self.fused("shared.gate_up.scale", {"shared.gate.scale": blocks, "shared.up.scale": blocks}, (width // block,), F32)
        self.columns("shared.down.weight", (width, hidden), FP8)
        self.columns("shared.down.scale", (width // block, hidden // block), F32)
        self.whole("correction_bias", (self.EXPERTS,), F32)
        size = own[1] - own[0]
        w13 = self.parameter("experts.w13", (self.EXPERTS, 2 * size, width))
        w2 = self.parameter("experts.w2", (self.EXPERTS, width, size))

        def gate_up(weight: torch.Tensor) -> None:
            gate, up = weight.chunk(2, dim=1)
            w13[:, :size].copy_(gate[:, own[0] : own[1]])
            w13[:, size:].copy_(up.narrow(1, own[0], size))

        self.loaders["experts.gate_up"] = gate_up
        self.loaders["experts.down"] = lambda weight: w2.copy_(weight[..., own[0] : own[1]])


class GptOss(Model):
    """Experts whose matrices the checkpoint has transposed, their biases, and a value per head."""

    WIDTH, HEADS, HIDDEN, EXPERTS = 32, 8, 32, 4
    shapes: Shapes = {
        "sinks": ((HEADS,), BF16),
        "experts.gate_up": ((EXPERTS, WIDTH, 2 * HIDDEN), BF16),
        "experts.gate_up_bias": ((EXPERTS, 2 * HIDDEN), BF16),
        "experts.down": ((EXPERTS, HIDDEN, WIDTH), BF16),
        "experts.down_bias": ((EXPERTS, WIDTH), BF16),
        "norm.weight": ((WIDTH,), BF16),
    }

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        start, stop = part(self.HIDDEN, rank, ranks)
        size = stop - start
        self.whole("norm.weight", (self.WIDTH,))
        self.fused("attention.sinks", {"sinks": part(self.HEADS, rank, ranks)}, ())
        w13 = self.parameter("experts.w13", (self.EXPERTS, 2 * size, self.WIDTH))
        bias = self.parameter("experts.w13_bias", (self.EXPERTS, 2 * size))
        w2 = self.parameter("experts.w2", (self.EXPERTS, self.WIDTH, size))
        last = self.parameter("experts.w2_bias", (self.EXPERTS, self.WIDTH))
        self.loaders["experts.gate_up"] = lambda weight: w13.copy_(weight[:, :, 2 * start : 2 * stop].permute(0, 2, 1).contiguous())
        self.loaders["experts.gate_up_bias"] = lambda weight: bias.copy_(weight[:, 2 * start : 2 * stop])
        self.loaders["experts.down"] = lambda weight: w2.copy_(weight[:, start:stop].transpose(1, 2))
        # Only the first rank adds this bias.
        self.loaders["experts.down_bias"] = lambda weight: last.copy_(weight) if rank == 0 else last.zero_()


MODELS = [Llama, Qwen, Mixtral, DeepSeek, GptOss]
