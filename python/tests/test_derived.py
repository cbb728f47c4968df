"""The arithmetic of derived bases, of spec sections 8.5 and 8.6, against PyTorch and transformers on the CPU. Ours is that of the second
reader in `testdata/reader`. NaNs follow a rule of the text; the tests say where PyTorch has another one."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "testdata"))
from reader import derived, floats  # noqa: E402

TYPES = {
    "F32": (torch.float32, np.dtype(np.uint32)),
    "BF16": (torch.bfloat16, np.dtype(np.uint16)),
    "F16": (torch.float16, np.dtype(np.uint16)),
    "F8_E4M3": (torch.float8_e4m3fn, np.dtype(np.uint8)),
    "F8_E5M2": (torch.float8_e5m2, np.dtype(np.uint8)),
}
#: For each cast: the number of NaN lanes in the source, and the number for which PyTorch gives another NaN.
CASTS = {
    ("BF16", "F32"): (254, 126),  # PyTorch leaves signalling NaNs as they are
    ("F16", "F32"): (2046, 0),
    ("F8_E4M3", "BF16"): (2, 2),  # PyTorch has one NaN for all
    ("F8_E4M3", "F16"): (2, 0),
    ("F8_E5M2", "BF16"): (6, 5),
    ("F8_E5M2", "F16"): (6, 0),
}


def lanes_to_torch(lanes: np.ndarray, dtype: str) -> torch.Tensor:
    kind, width = TYPES[dtype]
    signed = lanes.astype(width).view(f"i{width.itemsize}")
    return torch.from_numpy(signed).view(kind)


def torch_to_lanes(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    width = TYPES[dtype][1]
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[width.itemsize]
    return tensor.contiguous().view(whole).numpy().view(width)


def by_torch(lanes: np.ndarray, source: str, target: str) -> np.ndarray:
    return torch_to_lanes(lanes_to_torch(lanes, source).to(TYPES[target][0]), target)


def by_us(lanes: np.ndarray, source: str, target: str) -> np.ndarray:
    formats = floats.FORMATS[source], floats.FORMATS[target]
    return np.array([floats.cast(u, *formats) for u in lanes.tolist()], dtype=TYPES[target][1])


def nans_of(lanes: np.ndarray, dtype: str) -> np.ndarray:
    return np.array([floats.FORMATS[dtype].is_nan(u) for u in lanes.tolist()], dtype=bool)


def with_signs(lanes: np.ndarray) -> np.ndarray:
    """Lanes of F32 without sign, as positive and as negative ones."""
    lanes = np.unique(lanes[(lanes >= 0) & (lanes < 2**31)])
    return np.concatenate([lanes, lanes | 2**31])


def boundaries(target: str) -> np.ndarray:
    """The lanes of F32 at which a cast to `target` may change its result, each with two neighbours on both sides: the values of
    all finite lanes of the target, the middle between each and the next, and 2^(bias + 1). A cast is monotone, and so are two
    that agree here equal for all lanes of F32."""
    form = floats.FORMATS[target]
    values = by_torch(np.arange(form.top << form.M), target, "F32").view(np.float32).astype(np.float64)
    edges = np.append(values, 2.0 ** (form.bias + 1))
    with np.errstate(over="ignore"):
        places = np.concatenate([edges, (edges[1:] + edges[:-1]) / 2]).astype(np.float32).view(np.uint32).astype(np.int64)
    return with_signs(np.concatenate([places + step for step in (-2, -1, 0, 1, 2)]))


@pytest.mark.parametrize("source, target", CASTS)
def test_casts_of_all_lanes_of_8_and_16_bits(source: str, target: str) -> None:
    lanes = np.arange(1 << 8 * TYPES[source][1].itemsize)
    ours, theirs, nans = by_us(lanes, source, target), by_torch(lanes, source, target), nans_of(lanes, source)
    assert np.array_equal(ours[~nans], theirs[~nans])
    assert (nans.sum(), (ours[nans] != theirs[nans]).sum()) == CASTS[source, target]
    assert nans_of(ours, target).tolist() == nans.tolist()


@pytest.mark.parametrize("target", ["BF16", "F16"])
def test_casts_from_f32_at_every_boundary(target: str) -> None:
    lanes = boundaries(target)
    lanes = lanes[~nans_of(lanes, "F32")]
    assert len(lanes) > 600_000
    assert np.array_equal(by_us(lanes, "F32", target), by_torch(lanes, "F32", target))


@pytest.mark.parametrize("target", ["BF16", "F16"])
def test_casts_from_f32_in_a_sample(target: str) -> None:
    lanes = np.random.default_rng(13).integers(0, 2**32, 200_000, dtype=np.uint64)
    lanes = lanes[~nans_of(lanes, "F32")]
    ours, theirs = by_us(lanes, "F32", target), by_torch(lanes, "F32", target)
    assert np.array_equal(ours, theirs)
    if target == "F16":  # NumPy has BF16 only with other packages
        with np.errstate(over="ignore"):
            assert np.array_equal(ours, lanes.astype(np.uint32).view(np.float32).astype(np.float16).view(np.uint16))


def test_nans_of_f32_keep_sign_and_upper_payload() -> None:
    lanes = np.array([0x7F800001, 0xFF800001, 0x7F812345, 0xFFFFFFFF, 0x7FC00000, 0x7FA00000])
    assert by_us(lanes, "F32", "BF16").tolist() == [0x7FC0, 0xFFC0, 0x7FC1, 0xFFFF, 0x7FC0, 0x7FE0]
    assert by_us(lanes, "F32", "F16").tolist() == [0x7E00, 0xFE00, 0x7E09, 0xFFFF, 0x7E00, 0x7F00]
    # PyTorch keeps signs and payloads in F16, where the processor converts, and drops them in BF16.
    assert not np.array_equal(by_torch(lanes, "F32", "BF16"), by_us(lanes, "F32", "BF16"))


def scales_at_edges() -> np.ndarray:
    """Lanes of F32: zeros, subnormals, the largest ones, infinity, powers of two, mantissas that make ties, and a sample."""
    powers = np.arange(0, 255, dtype=np.int64) << 23
    special = [0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x400000, 0x400001]
    ties = [power | mantissa for power in (powers[1], powers[120], powers[254]) for mantissa in range(1, 1 << 23, 65521)]
    sample = np.random.default_rng(7).integers(0, 0x7F800000, 500)
    return with_signs(np.concatenate([powers, special, ties, sample]))


def test_products_of_all_lanes_of_fp8() -> None:
    quantised, scales = np.arange(256), scales_at_edges()
    theirs = lanes_to_torch(quantised, "F8_E4M3").to(torch.float32)[:, None] * lanes_to_torch(scales, "F32")[None, :]
    ours = np.array([[floats.product(u, v) for v in scales.tolist()] for u in quantised.tolist()], dtype=np.uint32)
    nans = theirs.isnan().numpy()
    assert np.array_equal(ours[~nans], torch_to_lanes(theirs, "F32")[~nans])
    assert set(ours[nans].tolist()) == {0x7FC00000}
    assert nans.sum() == 2 * len(scales) + 2 * 2  # two lanes of FP8 are NaN, and zeros times infinities


def test_products_that_are_rounded_twice() -> None:
    """Products just beside a tie of BF16, which F32 cannot tell from the tie: the second rounding is to even."""
    inverse = pow(15, -1, 2**20)
    mantissas = [
        (2**19 + beside) * inverse % 2**20 + high for beside in (-3, -2, -1, 1, 2, 3) for high in range(2**23, 2**24, 2**20)
    ]
    lanes = np.array([127 << 23 | n - 2**23 for n in mantissas])
    once = [floats.rounded(0, 15 * n, -26, floats.BF16) for n in mantissas]
    twice = [floats.cast(floats.product(0x3F, v), floats.F32, floats.BF16) for v in lanes.tolist()]  # 3F is 15 / 8
    theirs = lanes_to_torch(np.array([0x3F]), "F8_E4M3").float() * lanes_to_torch(lanes, "F32")
    assert twice == torch_to_lanes(theirs.bfloat16(), "BF16").tolist()
    assert sum(a != b for a, b in zip(once, twice)) > 10


def tensor(kind: str, form: int, shape: list[int], target: str) -> SimpleNamespace:
    dtype = next(dtype for dtype in derived.DTYPES.values() if dtype.name == target)
    return SimpleNamespace(shape=shape, dtype=dtype, derivation=SimpleNamespace(form=form, base_dtype=kind))


@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("shape", [(256, 128), (128, 384), (256, 256)])
def test_fp8_blocks_are_those_of_transformers(shape: tuple[int, int], target: str) -> None:
    op = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    random = np.random.default_rng(3)
    weight = random.integers(0, 256, shape)
    weight[weight % 128 == 127] = 0x3F
    scales = (random.random((shape[0] // 128, shape[1] // 128)) * 1e-3).astype(np.float32)
    theirs = op._dequantize_one(lanes_to_torch(weight, "F8_E4M3"), torch.from_numpy(scales), TYPES[target][0])
    ours = derived.formed(tensor("F8_E4M3", 1, list(shape), target), weight.astype(np.uint8).tobytes(), scales.tobytes())
    assert ours == torch_to_lanes(theirs, target).tobytes()


def test_fp8_blocks_at_the_ends_are_those_of_the_kernel_of_deepseek() -> None:
    """Blocks at the ends are cut off: the row and the column of a scale are those of the element, divided by 128."""
    rows, columns = 130, 259
    random = np.random.default_rng(5)
    weight = random.integers(0, 127, (rows, columns))
    scales = random.random((2, 3)).astype(np.float32)
    spread = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:rows, :columns]
    theirs = (lanes_to_torch(weight, "F8_E4M3").float() * torch.from_numpy(spread.copy())).bfloat16()
    ours = derived.formed(tensor("F8_E4M3", 1, [rows, columns], "BF16"), weight.astype(np.uint8).tobytes(), scales.tobytes())
    assert ours == torch_to_lanes(theirs, "BF16").tobytes()


def test_microscaled_lanes_of_all_scales_are_those_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    experts, columns, blocks = 2, 128, 3  # of 32 lanes in 16 bytes
    random = np.random.default_rng(11)
    packed = random.integers(0, 256, (experts, columns, blocks, 16), dtype=np.uint8)
    packed[:, :, 0] = np.arange(16) * 17  # each nibble with each scale
    scales = np.tile(np.arange(256, dtype=np.uint8).reshape(experts, columns, 1), (1, 1, blocks))
    theirs = mxfp4._convert_moe_packed_tensors(torch.from_numpy(packed), torch.from_numpy(scales))
    shape = [experts, blocks * 32, columns]
    assert list(theirs.shape) == shape
    ours = derived.formed(tensor("U8", 3, shape, "BF16"), packed.tobytes(), scales.tobytes())
    assert ours == torch_to_lanes(theirs, "BF16").tobytes()
    rows = derived.formed(tensor("U8", 2, [experts, columns, blocks * 32], "BF16"), packed.tobytes(), scales.tobytes())
    assert rows == torch_to_lanes(theirs.transpose(1, 2), "BF16").tobytes()


def test_lanes_beyond_the_largest_are_infinite() -> None:
    assert [floats.microscaled(v, 254) for v in (3, 4, 12)] == [0x7F40, 0x7F80, 0xFF80]
    assert [floats.microscaled(v, 255) for v in (0, 1, 2, 8)] == [0, 0x7F00, 0x7F80, 0x8000]
    assert floats.microscaled(1, 0) == struct.unpack("<I", struct.pack("<f", 2.0**-128))[0] >> 16
