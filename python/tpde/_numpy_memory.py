"""NumPy arrays as memory for the Rust half."""

from __future__ import annotations

import sys
from typing import Any

from ._errors import InvalidArgument, make_error
from ._tensor import BITS, ML_DTYPES, Memory, NUMPY, VIEWS, as_expected, byte_shape, is_packed, no_memory, pitch_and_size

_NAMES = {numpy: name for name, numpy in (NUMPY | ML_DTYPES).items()}
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
    dtype = _NAMES.get(value.dtype.name)
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
