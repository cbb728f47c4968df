"""Describes tensors for the Rust half: name, dtype, dims, address, bytes, and an owner that keeps the memory in place.

All tensors are checked here: contiguous, little-endian, and in host memory or on the requested device. `_numpy_memory` handles
NumPy, and `_torch_memory` PyTorch; the latter is imported when the first PyTorch tensor is passed.
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
    """Whether this is a PyTorch tensor. Does not import PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def describe(
    name: str, value: Any, expected: tuple[str, list[int]] | None = None, *, writable: bool = False, device: Any = "cpu"
) -> Memory:
    """A tensor of either kind, on this device. ``expected``, dtype and shape, tells integers from an integer view."""
    try:
        if is_torch(value):
            from . import _torch_memory

            return _torch_memory.describe(name, value, expected, device)
        if str(device) != "cpu":
            raise Misuse(f"tensor {name!r} is an array, others are on {device}")
        return describe_array(name, value, expected, writable)
    except TpdeError:
        raise
    except Exception as error:  # nested tensors, lazy tensors and foreign classes raise various errors
        raise Misuse(f"tensor {name!r} is a {type(value).__name__} that cannot be read: {error}") from error


def device_of(values: Iterable[Any]) -> Any:
    """The CUDA device of the first tensor that is on one; ``None`` if there is none."""
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
