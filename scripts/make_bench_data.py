#!/usr/bin/env python3
"""Makes checkpoints for benchmarks from a seed. `drawn` needs NumPy; the others need PyTorch and use a GPU if there is one.

    python3 scripts/make_bench_data.py layers OUT
    python3 scripts/make_bench_data.py model OUT [--layers 32 --vocabulary 128256]
    python3 scripts/make_bench_data.py drawn OUT --like BASE TARGET [--layers 32 --vocabulary 128256]

layers  OUT/layer.base and OUT/layer.target: one F32 tensor of 1024×4096, of which a tenth is moved by N(0, 0.01).
        OUT/large.base and OUT/large.target: the same with 16384×4096.
model   OUT/model.base and OUT/model.target: tensors with the names and shapes of Llama 3.1 8B. Weights are N(0, 0.02) in FP32,
        before and after one step of Adam at a rate of 7e-7, with the moments of eight gradients of N(0, 1), rounded to BF16.
drawn   OUT/drawn.base and OUT/drawn.target: the same names and shapes. Each lane and its change are drawn from the tensors of
        BASE and TARGET that have the same role.

All files end with .safetensors. The same seed, version of PyTorch and kind of device give the same bytes.
"""

import argparse
import json
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SEED = 4
RATE, GRADIENTS, BETAS, EPSILON = 7e-7, 8, (0.9, 0.999), 1e-8
WIDTH, INNER, KEYS = 4096, 14336, 8 * 128
PIECE = 64 << 20  # bytes that are written at once
THREADS = 16
DRAWN = 4 << 20  # lanes that are drawn together, with one generator
# Real tensors for `drawn`, by a part of the name that they are for.
LIKE = {
    "embed_tokens": "embeddings.word_embeddings.weight",
    "lm_head": "embeddings.word_embeddings.weight",
    "model.norm": "embeddings.LayerNorm.weight",
    "input_layernorm": "encoder.layer.{}.attention.output.LayerNorm.weight",
    "post_attention_layernorm": "encoder.layer.{}.output.LayerNorm.weight",
    "q_proj": "encoder.layer.{}.attention.self.query.weight",
    "k_proj": "encoder.layer.{}.attention.self.key.weight",
    "v_proj": "encoder.layer.{}.attention.self.value.weight",
    "o_proj": "encoder.layer.{}.attention.output.dense.weight",
    "gate_proj": "encoder.layer.{}.intermediate.dense.weight",
    "up_proj": "encoder.layer.{}.intermediate.dense.weight",
    "down_proj": "encoder.layer.{}.output.dense.weight",
}


class Output:
    """A safetensors file whose tensors are written one by one, by many threads."""

    def __init__(self, path, tensors, pool):
        header, end = {}, 0
        self.places = {}
        for name, (dtype, shape, size) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            self.places[name], end = end, end + size
        header = json.dumps(header, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self.start, self.pool = 8 + len(header), pool
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self.file, struct.pack("<Q", len(header)) + header, 0)
        os.ftruncate(self.file, self.start + end)

    def write(self, name, data, at=0):
        """Bytes of a tensor from its byte `at` on."""
        data, at = memoryview(data).cast("B"), self.start + self.places[name] + at
        pieces = range(0, len(data), PIECE)
        list(self.pool.map(lambda i: write_all(self.file, data[i : i + PIECE], at + i), pieces))


def write_all(file, data, at):
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done


def shapes(layers, vocabulary):
    """Names and shapes of Llama 3.1 8B, and how many layers it is made with."""
    yield "model.embed_tokens.weight", [vocabulary, WIDTH]
    yield "lm_head.weight", [vocabulary, WIDTH]
    yield "model.norm.weight", [WIDTH]
    for layer in range(layers):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", [WIDTH]
        yield name + "post_attention_layernorm.weight", [WIDTH]
        yield name + "self_attn.q_proj.weight", [WIDTH, WIDTH]
        yield name + "self_attn.k_proj.weight", [KEYS, WIDTH]
        yield name + "self_attn.v_proj.weight", [KEYS, WIDTH]
        yield name + "self_attn.o_proj.weight", [WIDTH, WIDTH]
        yield name + "mlp.gate_proj.weight", [INNER, WIDTH]
        yield name + "mlp.up_proj.weight", [INNER, WIDTH]
        yield name + "mlp.down_proj.weight", [WIDTH, INNER]


def torch_here():
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch, device, torch.Generator(device).manual_seed(SEED)


def make_layers(out, pool):
    torch, device, random = torch_here()
    for name, rows in ("layer", 1024), ("large", 16384):
        shape = (rows, WIDTH)
        base = torch.randn(shape, generator=random, device=device)
        moved = torch.rand(rows, WIDTH, generator=random, device=device) > 0.9
        target = base + 0.01 * torch.randn(shape, generator=random, device=device) * moved
        for which, tensor in ("base", base), ("target", target):
            tensor = tensor.cpu().view(torch.uint8).numpy()
            file = Output(out / f"{name}.{which}.safetensors", {"layer.weight": ("F32", [rows, WIDTH], tensor.nbytes)}, pool)
            file.write("layer.weight", tensor)


def make_model(out, pool, layers, vocabulary):
    torch, device, random = torch_here()
    tensors = dict(shapes(layers, vocabulary))
    sizes = {name: ("BF16", shape, 2 * math.prod(shape)) for name, shape in tensors.items()}
    outputs = [Output(out / f"model.{which}.safetensors", sizes, pool) for which in ("base", "target")]
    rows_at_once = 32768  # bounds the memory of temporaries
    for name, shape in tensors.items():
        mean, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, 0.02)
        for first in range(0, shape[0], rows_at_once):
            part = [min(rows_at_once, shape[0] - first), *shape[1:]]
            weights = torch.randn(part, generator=random, device=device).mul_(spread).add_(mean)
            first_moment, second_moment = torch.zeros_like(weights), torch.zeros_like(weights)
            for _ in range(GRADIENTS):
                gradient = torch.randn(part, generator=random, device=device)
                first_moment.lerp_(gradient, 1 - BETAS[0])
                second_moment.lerp_(gradient.square_(), 1 - BETAS[1])
            first_moment.div_(1 - BETAS[0] ** GRADIENTS)
            second_moment.div_(1 - BETAS[1] ** GRADIENTS)
            after = weights - RATE * first_moment.div_(second_moment.sqrt_().add_(EPSILON))
            for file, tensor in zip(outputs, (weights, after)):
                data = tensor.to(torch.bfloat16).view(torch.uint8)
                file.write(name, data.cpu().numpy(), 2 * first * math.prod(shape[1:]))


def read_bf16(path):
    """The tensors of a safetensors file in BF16, as arrays of lanes."""
    import numpy

    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    lanes = {}
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["dtype"] == "BF16":
            first, end = tensor["data_offsets"]
            lanes[name] = numpy.fromfile(path, "<u2", (end - first) // 2, offset=8 + size + first)
    return lanes


def make_drawn(out, pool, layers, vocabulary, like):
    import numpy

    real = [read_bf16(path) for path in like]
    real_layers = sum(name.endswith("self.query.weight") for name in real[0])
    tensors = dict(shapes(layers, vocabulary))
    sizes = {name: ("BF16", shape, 2 * math.prod(shape)) for name, shape in tensors.items()}
    outputs = [Output(out / f"drawn.{which}.safetensors", sizes, pool) for which in ("base", "target")]

    def draw(number, name, pairs, first, count):
        """Lanes of a tensor in both files. `pairs` has the real lanes: base and target."""
        random = numpy.random.Generator(numpy.random.PCG64([SEED, number, first]))
        drawn = pairs[random.integers(0, len(pairs), count, dtype=numpy.uint32)].view("<u2")
        for which, file in enumerate(outputs):
            at = file.start + file.places[name] + 2 * first
            write_all(file.file, memoryview(numpy.ascontiguousarray(drawn[which::2])).cast("B"), at)

    for number, (name, shape) in enumerate(tensors.items()):
        part = next(part for part in LIKE if part in name)
        layer = int(name.split(".")[2]) % real_layers if "layers." in name else 0
        pairs = numpy.stack([lanes[LIKE[part].format(layer)] for lanes in real], axis=1).view("<u4").ravel()
        lanes = math.prod(shape)
        draws = [(number, name, pairs, first, min(DRAWN, lanes - first)) for first in range(0, lanes, DRAWN)]
        list(pool.map(lambda draw_of: draw(*draw_of), draws))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layers", "model", "drawn"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", type=Path, nargs=2, metavar=("BASE", "TARGET"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    arguments = parser.parse_args()
    if (arguments.what == "drawn") != bool(arguments.like):
        parser.error("drawn, and nothing else, needs --like")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(THREADS) as pool:
        if arguments.what == "layers":
            make_layers(arguments.out, pool)
        elif arguments.what == "drawn":
            make_drawn(arguments.out, pool, arguments.layers, arguments.vocabulary, arguments.like)
        else:
            make_model(arguments.out, pool, arguments.layers, arguments.vocabulary)


if __name__ == "__main__":
    main()
