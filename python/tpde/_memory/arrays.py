"""Tensors as passed to the Rust half: name, dtype, dims, address, size in bytes, and the object that owns the memory.

Every tensor is checked here first: contiguous, little-endian, on the CPU or on the device of the call. PyTorch tensors are
checked in `torch_tensors`, which is imported only if such a tensor is passed.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from .. import _tpde
from .._core.arguments import check_name
from .._core.errors import InvalidArgument, TpdeError, make_error
from .tensor import BITS, ML_DTYPES, NUMPY, VIEWS, Memories, Memory, as_expected, byte_shape, is_packed, no_memory, pitch_and_size


def is_torch(value: Any) -> bool:
    """Whether this is a PyTorch tensor. Does not import PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def describe(
    name: str,
    value: Any,
    expected: tuple[str, list[int]] | None = None,
    *,
    writable: bool = False,
    device: Any = "cpu",
    has_rows: bool = False,
) -> Memory:
    """Checks an array or tensor on this device and describes its memory. ``expected`` is the dtype and shape in the pair. It
    distinguishes unsigned integers from elements of a dtype that the library lacks and represents as such integers. If it
    ``has_rows``, it need not be contiguous: the size is then that from the first row to the last."""
    try:
        if is_torch(value):
            from . import torch_tensors

            return torch_tensors.describe(name, value, expected, device, writable=writable, has_rows=has_rows)
        if str(device) != "cpu":
            raise InvalidArgument(f"tensor {name!r} is an array on the CPU, others are on {device}")
        return describe_array(name, value, expected, writable=writable, has_rows=has_rows)
    except TpdeError:
        raise
    except Exception as error:  # nested tensors, lazy tensors and subclasses raise different ones
        raise InvalidArgument(f"tensor {name!r} is a {type(value).__name__} that cannot be read: {error}") from error


def strides_of(value: Any) -> tuple[int, ...]:
    """Strides of an array or tensor in bytes."""
    return tuple(stride * value.element_size() for stride in value.stride()) if is_torch(value) else tuple(value.strides)


def device_of(values: Iterable[Any]) -> Any:
    """The CUDA device of the first tensor that is on one; ``None`` if there is none."""
    for value in values:
        if is_torch(value) and value.device.type == "cuda":
            return value.device
    return None


#: A mapping of the process that cannot be written: its first address, and the one behind it.
_READ_ONLY = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .-", re.MULTILINE)


def check_writable(places: Iterable[tuple[str, int, int]]) -> None:
    """Raises if memory on the CPU is mapped read-only, such as that of a file. A write would end the process. Only Linux is asked.

    Args:
        places: Name, address and size in bytes of each tensor.
    """
    try:
        with open("/proc/self/maps", "rb") as maps:
            found = _READ_ONLY.findall(maps.read())
    except OSError:
        return
    starts, ends = ([int(one[at], 16) for one in found] for at in range(2))
    for name, address, size in places:
        at = bisect_right(ends, address)
        if size and at < len(starts) and starts[at] < address + size:
            raise InvalidArgument(f"tensor {name!r} is in memory that is mapped read-only: expected memory that can be written")


def places_of(memories: Memories) -> list[tuple[str, int, int]]:
    """Name, address and size in bytes of tensors that are described, for :func:`check_writable`."""
    listed = memories if isinstance(memories, list) else memories.memories()
    return [(one[0], one[3], one[4]) for one in listed]


def describe_each(outline: _tpde.Outline, values: list[Any], *, writable: bool = False, device: Any = "cpu") -> Memories:
    """Calls :func:`describe` for each tensor of the outline."""
    if values and is_torch(values[0]):
        from . import torch_tensors

        columns = torch_tensors.columns_of(outline.names(), values, device)
        described = None if columns is None else outline.plain(columns)
        if described is not None:
            return described
    likes = [
        (dtype, [*getattr(value, "shape", [])] if shape is None else shape)
        for value, (dtype, shape) in zip(values, outline.expected())
    ]
    each = zip(outline.names(), values, likes)
    return [describe(name, value, like, writable=writable, device=device) for name, value, like in each]


def together(outline: _tpde.Outline, memories: list[Memory]) -> Memories:
    """The memory of the tensors of an outline, in the form that costs the Rust half least."""
    if not memories:
        return memories
    names, dtypes, shapes, addresses, sizes, owners = zip(*memories)
    columns = (list(names), list(dtypes), list(map(tuple, shapes)), list(addresses), [0] * len(names), list(sizes), owners)
    return outline.plain(columns) or memories


def describe_all(tensors: Mapping[str, Any], device: Any = "cpu") -> list[Memory]:
    """Describes all tensors of a state dict, on this device."""
    return [describe(check_name(name), value, device=device) for name, value in tensors.items()]


_NUMPY_NAMES = {numpy: name for name, numpy in (NUMPY | ML_DTYPES).items()}
#: The key of dtype and shape of a tensor among the metadata of the dtype of an array, if the array has its bits as integers.
_TAG = "tpde"


def describe_array(
    name: str, value: Any, expected: tuple[str, list[int]] | None, *, writable: bool, has_rows: bool = False
) -> Memory:
    """Checks an array and describes its memory. An array that ``has_rows`` need not be contiguous."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        raise InvalidArgument(f"tensor {name!r} is a {type(value).__name__}, neither a NumPy array nor a PyTorch tensor")
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise InvalidArgument(f"tensor {name!r} is a masked array, whose mask would be lost: filled() makes an array of it")
    value = value.view(numpy.ndarray)  # a subclass may override dtype, shape and flags
    dtype = _NUMPY_NAMES.get(value.dtype.name)
    if dtype is None or not (value.dtype.isnative or value.dtype.itemsize == 1) or sys.byteorder != "little":
        raise InvalidArgument(f"tensor {name!r} has dtype {value.dtype.str} ({value.dtype.name}), which cannot be in a checkpoint")
    if has_rows:
        size = pitch_and_size(name, value.shape, value.strides, value.itemsize)[1]
    elif value.flags.c_contiguous:
        size = value.nbytes
    else:
        raise make_error(
            "not_contiguous", f"tensor {name!r} is not contiguous (shape {value.shape}, strides {value.strides})", tensor=name
        )
    if writable and not value.flags.writeable:
        raise InvalidArgument(f"tensor {name!r} is read-only")
    dtype, shape = as_expected(name, *_tagged(value, dtype), expected)
    # The memoryview exports the buffer, so NumPy refuses to resize the array while it exists.
    owner = (value, memoryview(value.view(f"u{value.itemsize}")) if size else None)
    return name, dtype, shape, value.ctypes.data, size, owner


def _tagged(value: Any, dtype: str) -> tuple[str, list[int]]:
    """Dtype and shape of the tensor whose bits an array has. An array that was computed from others has no tag."""
    tagged, dims = (value.dtype.metadata or {}).get(_TAG, (dtype, list(value.shape)))
    if dtype != VIEWS.get(tagged):
        return dtype, list(value.shape)
    if not is_packed(tagged):
        return tagged, list(value.shape)
    if list(value.shape) == byte_shape(tagged, dims):
        return tagged, list(dims)
    return tagged, [*value.shape[:-1], value.shape[-1] * 8 // BITS[tagged]]


class NumPyAllocator:
    """Allocates arrays. With ``as_integers``, tensors of a dtype that NumPy lacks are unsigned integers with the same bits."""

    def __init__(self, *, as_integers: bool) -> None:
        import numpy

        self.numpy = numpy
        self._as_integers = as_integers
        self.ml_dtypes: Any = None
        try:
            import ml_dtypes

            self.ml_dtypes = ml_dtypes
        except ImportError:
            pass

    def dtype(self, name: str, dtype: str, shape: list[int]) -> Any:
        """The dtype of the array of a tensor."""
        if dtype in NUMPY:
            return self.numpy.dtype(NUMPY[dtype])
        if self._as_integers:
            return self.numpy.dtype(NUMPY[VIEWS[dtype]], metadata={_TAG: (dtype, tuple(shape))})
        own = getattr(self.ml_dtypes, ML_DTYPES.get(dtype, ""), None)
        if own is not None:
            return self.numpy.dtype(own)
        where, then = "NumPy", "install the package ml_dtypes, which has it"
        if is_packed(dtype):
            where, then = "NumPy and ml_dtypes", "read it with PyTorch"
        elif self.ml_dtypes is not None:
            where, then = f"ml_dtypes {self.ml_dtypes.__version__}", "install a newer ml_dtypes"
        bits = f"as_integers=True reads the bits as {NUMPY[VIEWS[dtype]]}"
        raise InvalidArgument(f"tensor {name!r} has dtype {dtype}, which {where} lacks as an array: {then}; {bits}")

    def empty(self, name: str, dtype: str, shape: list[int]) -> tuple[Any, Memory]:
        """A new array, and its memory."""
        dims = byte_shape(dtype, shape) if is_packed(dtype) else shape
        own = self.dtype(name, dtype, shape)
        try:
            array = self.numpy.empty(dims, own)
        except (MemoryError, ValueError) as error:
            raise no_memory(name, dtype, shape) from error
        return array, (name, dtype, shape, array.ctypes.data, array.nbytes, array)

    def contiguous(self, array: Any, shape: list[int]) -> Any:
        """A contiguous copy in this shape."""
        return array.reshape(shape).copy(order="C")
