"""Descriptions of tensors in memory for the Rust half, independent of the framework."""

from __future__ import annotations

from typing import Any

from ._dtypes import VIEWS, byte_shape, is_packed, size
from ._errors import OutOfMemory

#: Name, dtype, dims, address, size in bytes, and an owner that keeps the memory in place.
Memory = tuple[str, str, list[int], int, int, Any]


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
