"""Tensors as the compiled half sees them: name, dtype, dims, address, bytes, and what keeps the memory where it is.

Everything that is handed over has been looked at here: contiguous, little-endian, in host memory, or in that of the
device that was asked for. The NumPy half is in
`_numpy_memory`, the PyTorch half in `_torch_memory`, which is imported when a tensor of PyTorch's comes along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ._errors import Misuse, TpdeError
from ._numpy_memory import describe_array
from ._paths import check_name
from ._tensor import Memory


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
        return describe_array(name, value, expected, writable)
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
