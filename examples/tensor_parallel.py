#!/usr/bin/env python3
"""Send a training step from four trainer ranks to two ranks that serve the model. Both sides use tensor parallelism.

Each trainer holds a quarter of the rows or columns of every tensor, before and after the step, and encodes the difference of that.
The four pairs are merged without decoding. Each receiver holds a half of every tensor. Query, key and value rows are fused in one
parameter, and so are gate and up rows. A subset of the pair has what one receiver needs. The receiver patches its parameters in
place, and they are compared with the trained weights.

    pip install ./python numpy
    python examples/tensor_parallel.py
"""

import tempfile
from pathlib import Path

import numpy as np

import tpde
import tpde.numpy

LAYERS, WIDTH, HIDDEN, KEYS = 4, 256, 512, 64
TRAINERS, RECEIVERS = 4, 2
#: Shape of each tensor of a layer, and the dim that tensor parallelism cuts.
SHAPES = {
    "self_attn.q_proj.weight": ((WIDTH, WIDTH), 0),
    "self_attn.k_proj.weight": ((KEYS, WIDTH), 0),
    "self_attn.v_proj.weight": ((KEYS, WIDTH), 0),
    "self_attn.o_proj.weight": ((WIDTH, WIDTH), 1),
    "mlp.gate_proj.weight": ((HIDDEN, WIDTH), 0),
    "mlp.up_proj.weight": ((HIDDEN, WIDTH), 0),
    "mlp.down_proj.weight": ((WIDTH, HIDDEN), 1),
    "input_layernorm.weight": ((WIDTH,), None),
}
#: Parameters of a layer, and the tensors that they are fused of.
FUSED = {
    "qkv": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "o": ["self_attn.o_proj.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down": ["mlp.down_proj.weight"],
    "norm": ["input_layernorm.weight"],
}
Arrays = dict[str, np.ndarray]


def index_of(tensor: str, rank: int, ranks: int) -> tuple[slice, ...]:
    """The rows or columns of a tensor that a rank holds."""
    shape, dim = SHAPES[tensor]
    index = [slice(None)] * len(shape)
    if dim is not None:
        size = shape[dim] // ranks
        index[dim] = slice(size * rank, size * (rank + 1))
    return tuple(index)


def shards(weights: Arrays, rank: int, ranks: int) -> tuple[Arrays, list[tpde.Slice]]:
    """The parameters of a rank with these weights, and the slices that they consist of."""
    parameters: Arrays = {}
    slices = []
    for layer in range(LAYERS):
        for parameter, tensors in FUSED.items():
            held = [weights[f"model.layers.{layer}.{tensor}"][index_of(tensor, rank, ranks)] for tensor in tensors]
            fused = parameters[f"{layer}.{parameter}"] = np.concatenate(held)
            row = 0
            for tensor, values in zip(tensors, held):
                view = fused[row : row + len(values)]
                row += len(values)
                index, shape = index_of(tensor, rank, ranks), SHAPES[tensor][0]
                slices.append(tpde.Slice(f"model.layers.{layer}.{tensor}", index, view, shape))
    return parameters, slices


def is_encoded_by(one: tpde.Slice, rank: int) -> bool:
    """Whether a trainer encodes a slice. All trainers have the norms, and the first one encodes them."""
    return rank == 0 or "norm" not in one.name


def main() -> None:
    random = np.random.default_rng(0)
    old: Arrays = {}
    for layer in range(LAYERS):
        for tensor, (shape, _) in SHAPES.items():
            old[f"model.layers.{layer}.{tensor}"] = random.standard_normal(shape).astype(np.float16)
    new = {name: weight.copy() for name, weight in old.items()}
    for weight in new.values():
        weight.view(np.uint16)[random.random(weight.shape) < 0.02] ^= 1

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(TRAINERS):
            target, base = (
                [one for one in shards(weights, rank, TRAINERS)[1] if is_encoded_by(one, rank)] for weights in (new, old)
            )
            tpde.numpy.save_file(target, folder / f"trainer-{rank}", base=base)
        merged = tpde.merge([folder / f"trainer-{rank}" for rank in range(TRAINERS)], folder / "step")
        print(f"{TRAINERS} pairs merged: {merged.tensors} tensors and parts, {merged.stored_bytes:,} bytes")

        for rank in range(RECEIVERS):
            parameters, slices = shards(old, rank, RECEIVERS)
            addresses = {name: parameter.ctypes.data for name, parameter in parameters.items()}
            own = tpde.subset(folder / "step", folder / f"receiver-{rank}", parts={one.name: one.index for one in slices})
            assert tpde.numpy.apply_slices_(slices, folder / f"receiver-{rank}") == "applied"
            expected, _ = shards(new, rank, RECEIVERS)
            for name, parameter in parameters.items():
                assert parameter.tobytes() == expected[name].tobytes() and parameter.ctypes.data == addresses[name]
            print(f"receiver {rank}: {len(slices)} slices of {len(parameters)} parameters patched from {own.stored_bytes:,} bytes")


if __name__ == "__main__":
    main()
