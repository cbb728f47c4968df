"""Dtypes, by their names in safetensors."""

from __future__ import annotations

import math

#: Bits per element.
BITS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"], 8),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 16),
    **dict.fromkeys(["U32", "I32", "F32"], 32),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}

#: Names in NumPy, in ml_dtypes where NumPy has none.
NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
#: Names in PyTorch.
TORCH = {**NUMPY, **ML_DTYPES}

#: Substitutes for dtypes that a library lacks: unsigned integers of the same width.
VIEWS = {"BF16": "U16", **{name: "U8" for name in BITS if name.startswith(("F8", "F6", "F4"))}}


def is_packed(dtype: str) -> bool:
    """Whether elements do not fill whole bytes."""
    return BITS[dtype] % 8 != 0


def size(dtype: str, shape: list[int]) -> int:
    """Size of a tensor in bytes."""
    return math.prod(shape) * BITS[dtype] // 8


def byte_shape(dtype: str, shape: list[int]) -> list[int]:
    """Shape of a packed tensor as bytes: the last dim counts bytes. If rows are not whole bytes, there is only one dim."""
    if shape and shape[-1] * BITS[dtype] % 8 == 0:
        return [*shape[:-1], shape[-1] * BITS[dtype] // 8]
    return [size(dtype, shape)]
