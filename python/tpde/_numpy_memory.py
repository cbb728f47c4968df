"""NumPy arrays as memory for the Rust half."""

from __future__ import annotations

import sys
from typing import Any

from ._dtypes import ML_DTYPES, NUMPY, VIEWS, byte_shape, is_packed
from ._errors import InvalidArgument, NotContiguous
from ._tensor import Memory, as_expected, no_memory, pitch_and_size

_NAMES = {numpy: name for name, numpy in (NUMPY | ML_DTYPES).items()}


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
    dtype = _NAMES.get(value.dtype.name)
    if dtype is None or not (value.dtype.isnative or value.dtype.itemsize == 1) or sys.byteorder != "little":
        raise InvalidArgument(f"tensor {name!r} has dtype {value.dtype.str} ({value.dtype.name}), which cannot be in a checkpoint")
    if has_rows:
        size = pitch_and_size(name, value.shape, value.strides, value.itemsize)[1]
    elif value.flags.c_contiguous:
        size = value.nbytes
    else:
        raise NotContiguous(f"tensor {name!r} is not contiguous (shape {value.shape}, strides {value.strides})", tensor=name)
    if writable and not value.flags.writeable:
        raise InvalidArgument(f"tensor {name!r} is read-only")
    dtype, shape = as_expected(name, dtype, list(value.shape), expected)
    # The memoryview exports the buffer, so NumPy refuses to resize the array while it exists.
    owner = (value, memoryview(value.view(f"u{value.itemsize}")) if size else None)
    return name, dtype, shape, value.ctypes.data, size, owner


class NumPyAllocator:
    """Allocates arrays."""

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
        """The dtype of arrays; an unsigned integer of the same width if ml_dtypes is missing or lacks the dtype."""
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
        """A contiguous copy in this shape."""
        return array.reshape(shape).copy(order="C")
