"""Tensors as the compiled half sees them: name, dtype, dims, address, bytes, and what keeps the memory where it is.

Everything that is handed over has been looked at here: contiguous, little-endian, in host memory, or in that of the
device that was asked for. The NumPy half is in this
module, the PyTorch half in `_torch_memory`, which is imported when a tensor of PyTorch's comes along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ._dtypes import ML_DTYPES, NUMPY, VIEWS, byte_shape, is_packed, size
from ._errors import Misuse, NotContiguous, OutOfMemory, TpdeError
from ._paths import check_name

Memory = tuple[str, str, list[int], int, int, Any]


def is_torch(value: Any) -> bool:
    """Whether this is a tensor of PyTorch's, without importing it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def describe(
    name: str, value: Any, expected: tuple[str, list[int]] | None = None, *, writable: bool = False, device: Any = "cpu"
) -> Memory:
    """A tensor of either kind, on this device. ``expected``, dtype and shape, tells a view of integers from integers."""
    try:
        if is_torch(value):
            from . import _torch_memory

            return _torch_memory.describe(name, value, expected, device)
        if str(device) != "cpu":
            raise Misuse(f"tensor {name!r} is an array, others are on {device}")
        return _describe_array(name, value, expected, writable)
    except TpdeError:
        raise
    except Exception as error:  # of nested tensors, lazy ones and classes of others, each another kind
        raise Misuse(f"tensor {name!r} is a {type(value).__name__} that cannot be read: {error}") from error


def device_of(values: Iterable[Any]) -> Any:
    """The device of PyTorch's that some of these are on, one of CUDA; ``None`` if they are on the CPU, or say so themselves."""
    for value in values:
        if is_torch(value) and value.device.type == "cuda":
            return value.device
    return None


def describe_each(
    names: list[str], values: list[Any], expected: list[tuple[str, list[int]]], *, writable: bool = False, device: Any = "cpu"
) -> list[Memory]:
    """:func:`describe` of several."""
    if values and is_torch(values[0]):
        from . import _torch_memory

        found = _torch_memory.describe_many(names, values, expected, device)
        if found is not None:
            return found
    each = zip(names, values, expected)
    return [describe(name, value, like, writable=writable, device=device) for name, value, like in each]


def describe_all(tensors: Mapping[str, Any]) -> list[Memory]:
    """All tensors of a state dict."""
    return [describe(check_name(name), value) for name, value in tensors.items()]


def as_expected(name: str, dtype: str, shape: list[int], expected: tuple[str, list[int]] | None) -> tuple[str, list[int]]:
    """Dtype and shape of a tensor that may be a view of what is expected."""
    if expected is not None and dtype == VIEWS.get(expected[0]):
        is_bytes = is_packed(expected[0]) and shape == byte_shape(*expected)
        if is_bytes or (shape == expected[1] and not is_packed(expected[0])):
            return expected
    return dtype, shape


_NAMES = {numpy: name for name, numpy in (NUMPY | ML_DTYPES).items()}


def _describe_array(name: str, value: Any, expected: tuple[str, list[int]] | None, writable: bool) -> Memory:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        raise Misuse(f"tensor {name!r} is a {type(value).__name__}, neither a NumPy array nor a PyTorch tensor")
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise Misuse(f"tensor {name!r} is a masked array, whose mask would be lost: filled() makes an array of it")
    value = value.view(numpy.ndarray)  # a class of others may say of itself what it likes
    dtype = _NAMES.get(value.dtype.name)
    if dtype is None or not (value.dtype.isnative or value.dtype.itemsize == 1) or sys.byteorder != "little":
        raise Misuse(f"tensor {name!r} has dtype {value.dtype.str} ({value.dtype.name}), which cannot be in a checkpoint")
    if not value.flags.c_contiguous:
        raise NotContiguous(f"tensor {name!r} is not contiguous (shape {value.shape}, strides {value.strides})", tensor=name)
    if writable and not value.flags.writeable:
        raise Misuse(f"tensor {name!r} is read-only")
    dtype, shape = as_expected(name, dtype, list(value.shape), expected)
    # A view of its bytes exports the buffer, which refuses to be resized for as long.
    owner = (value, memoryview(value.reshape(-1).view(numpy.uint8)) if value.nbytes else None)
    return name, dtype, shape, value.ctypes.data, value.nbytes, owner


class NumPy:
    """Making arrays."""

    def __init__(self) -> None:
        import numpy

        self.numpy = numpy
        self.ml_dtypes: Any = None
        try:
            import ml_dtypes

            self.ml_dtypes = ml_dtypes
        except ImportError:
            pass

    def dtype(self, dtype: str) -> Any:
        """The dtype of arrays; one of unsigned integers where ml_dtypes is not there, or has none."""
        if dtype in NUMPY:
            return self.numpy.dtype(NUMPY[dtype])
        own = getattr(self.ml_dtypes, ML_DTYPES.get(dtype, ""), None)
        return self.numpy.dtype(own if own is not None else NUMPY[VIEWS[dtype]])

    def empty(self, name: str, dtype: str, shape: list[int]) -> tuple[Any, Memory]:
        """A new array, and its memory."""
        dims = byte_shape(dtype, shape) if is_packed(dtype) else shape
        try:
            array = self.numpy.empty(dims, self.dtype(dtype))
        except (MemoryError, ValueError) as error:
            raise no_memory(name, dtype, shape) from error
        return array, (name, dtype, shape, array.ctypes.data, array.nbytes, array)

    def contiguous(self, array: Any, shape: list[int]) -> Any:
        """The elements one after the other, in this shape."""
        return array.reshape(shape).copy(order="C")


def no_memory(name: str, dtype: str, shape: list[int]) -> OutOfMemory:
    """There is none."""
    needed = size(dtype, shape)
    return OutOfMemory(f"no memory for tensor {name!r} of {dtype} {shape}, {needed} bytes", tensor=name, bytes=needed)
