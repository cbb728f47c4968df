"""Checkpoints for the tests: random tensors of several dtypes. About 3 % of the elements change in their lowest bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tpde

#: Lanes per chunk. Test tensors are longer than a chunk, and not a multiple of one.
CHUNK = 4096
SHAPES = {
    "embed.weight": ("BF16", (300, 64)),
    "layers.0.mlp.weight": ("BF16", (128, 96)),
    "layers.0.norm.weight": ("F32", (96,)),
    "layers.0.scale": ("F8_E4M3", (64, 72)),
    "layers.1.mlp.weight": ("F32", (70, 64)),
    "layers.1.steps": ("I64", (5, 2)),
    "layers.1.mask": ("BOOL", (9,)),
    "frozen.weight": ("F16", (50, 100)),
    "empty": ("F32", (0, 7)),
    "scalar": ("F64", ()),
}
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "BOOL": 1, "F16": 2, "F64": 8}


def make_tensors(seed: int = 7) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Bytes of the base's tensors and of the target's tensors, by name."""
    random = np.random.default_rng(seed)
    base, target = {}, {}
    for name, (dtype, shape) in SHAPES.items():
        n = int(np.prod(shape, dtype=np.int64))
        normal = (random.standard_normal(n) * 0.02).astype(np.float32)
        if dtype == "BF16":
            lanes = (normal.view(np.uint32) >> 16).astype(np.uint16)
        elif dtype == "F32":
            lanes = normal.view(np.uint32)
        elif dtype == "F16":
            lanes = normal.astype(np.float16).view(np.uint16)
        elif dtype == "F64":
            lanes = normal.astype(np.float64).view(np.uint64)
        elif dtype == "BOOL":
            lanes = random.integers(0, 2, n).astype(np.uint8)
        elif dtype == "I64":
            lanes = random.integers(-1000, 1000, n).astype(np.int64).view(np.uint64)
        else:
            lanes = random.integers(0, 120, n).astype(np.uint8)
        moved = lanes.copy()
        if name != "frozen.weight" and n:
            at = random.random(n) < 0.03
            at[n // 2] = True
            moved[at] ^= np.array(1, lanes.dtype)
        base[name], target[name] = lanes.tobytes(), moved.tobytes()
    return base, target


def write_safetensors(path: Path, tensors: dict[str, bytes], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file with NumPy alone."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, raw in tensors.items():
        dtype, shape = SHAPES[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


class Made:
    """Base and target in files, their pair, and their tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base_bytes, self.target_bytes = make_tensors()
        self.base, self.target, self.pair = folder / "base.safetensors", folder / "target.safetensors", folder / "update"
        write_safetensors(self.base, self.base_bytes, {"format": "pt"})
        write_safetensors(self.target, self.target_bytes, {"format": "pt", "step": "20"})
        self.report = tpde.encode(self.target, self.pair, base=self.base, chunk_lanes=CHUNK)

    def damaged(self, name: str, pair: Path | None = None) -> Path:
        """A copy of ``pair``, or of the pair, with one bit of a payload of this tensor flipped."""
        pair = pair or self.pair
        copy = self.folder / "damaged"
        index = pair.with_suffix(".tpde-index").read_bytes()
        blob = bytearray(pair.with_suffix(".tpde-blob").read_bytes())
        offset = 64  # payloads follow the blob's header in the order of the tensors
        for tensor in tpde.inspect(pair).tensors:
            if tensor.name == name:
                break
            offset += tensor.payload_bytes
        blob[offset + 3] ^= 16
        copy.with_suffix(".tpde-index").write_bytes(index)
        copy.with_suffix(".tpde-blob").write_bytes(blob)
        return copy


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def raw(array: np.ndarray) -> bytes:
    """The bytes of an array."""
    return array.tobytes()
