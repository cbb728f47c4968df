"""Descriptions of tensors in memory for the Rust half, independent of the framework."""

from __future__ import annotations

from typing import Any, NamedTuple, Union

from . import _tpde
from ._dtypes import VIEWS, byte_shape, is_packed, size
from ._errors import OutOfMemory, make_error

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
