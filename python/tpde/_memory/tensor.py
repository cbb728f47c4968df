"""Dtypes, by their names in safetensors, and descriptions of tensors in memory for the Rust half. Independent of the framework."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Union

from .. import _tpde
from .._core.errors import OutOfMemory, make_error

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


#: Name, dtype, dims, address, size in bytes, and an owner that keeps the memory in place.
Memory = tuple[str, str, list[int], int, int, Any]
#: Memory of whole tensors.
Memories = Union[list[Memory], _tpde.PlainTensors]
#: Memory that holds a rectangle of a tensor: the tensor with the address and the size of the rows, first index and number of indexes
#: in each dim, and the distance between rows in bytes, ``None`` if rows are contiguous.
SliceMemory = tuple[Memory, list[int], list[int], "int | None"]


class Entry(NamedTuple):
    """A tensor of a pair, with all parts that the pair has of it."""

    name: str
    dtype: str
    shape: list[int]
    #: ``"none"``, ``"same"``, ``"prefix"``, ``"cast"`` or ``"dequantised"``; ``"mixed"`` if some parts have a base.
    base_kind: str
    base_name: str
    changes: bool
    #: Name, dtype and shape of the base tensor, and of the tensor of scales of a quantised base.
    bases: list[tuple[str, str, list[int]]]

    @property
    def is_same(self) -> bool:
        """Whether the tensor has a base of the same dtype and shape."""
        return self.base_kind == "same"


def as_expected(name: str, dtype: str, shape: list[int], expected: tuple[str, list[int]] | None) -> tuple[str, list[int]]:
    """Resolves dtype and shape of a tensor whose library may lack the expected dtype.

    Returns the expected dtype and shape if the tensor holds the expected elements as unsigned integers; otherwise its own.
    """
    if expected is not None and dtype == VIEWS.get(expected[0]):
        is_bytes = is_packed(expected[0]) and shape == byte_shape(*expected)
        if is_bytes or (shape == expected[1] and not is_packed(expected[0])):
            return expected
    return dtype, shape


def no_memory(name: str, dtype: str, shape: list[int]) -> OutOfMemory:
    """The error for a failed allocation."""
    needed = size(dtype, shape)
    return OutOfMemory(f"no memory for tensor {name!r} of {dtype} {shape}, {needed} bytes", tensor=name, bytes=needed)


def pitch_and_size(name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int | None, int]:
    """Distance between the beginnings of rows, ``None`` if the tensor is contiguous, and size from the first row to the last; in bytes,
    as the strides. A row is what the tensor has of its last dim.

    Raises:
        InvalidArgument (not_contiguous): Elements of a row are not contiguous, or rows are not at equal distances in ascending order.
    """
    if 0 in shape:
        return None, 0
    row = itemsize * (shape[-1] if shape else 1)
    pitch, rows = row, 1
    is_regular = not shape or shape[-1] == 1 or strides[-1] == itemsize
    for dim, stride in reversed(list(zip(shape[:-1], strides))):
        if dim > 1:
            pitch = stride if rows == 1 else pitch
            is_regular &= stride == pitch * rows
            rows *= dim
    if not is_regular or pitch < row:
        raise make_error(
            "not_contiguous",
            f"slice of tensor {name!r} has shape {shape} and strides of {strides} bytes: expected contiguous rows at equal distances of "
            f"at least {row} bytes" + (": pass one slice per index of the first dim" if len(shape) > 2 else ""),
            tensor=name,
        )
    return None if pitch == row else pitch, (rows - 1) * pitch + row
