"""Tensors as passed to the Rust half: name, dtype, dims, address, size in bytes, and the object that owns the memory.

Every tensor is checked here first: contiguous, little-endian, on the CPU or on the device of the call. NumPy arrays are checked
in `_numpy_memory`, PyTorch tensors in `_torch_memory`, which is imported only if such a tensor is passed.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from ._arguments import check_name
from . import _tpde
from ._errors import InvalidArgument, TpdeError
from ._numpy_memory import describe_array
from ._tensor import Memories, Memory


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
            from . import _torch_memory

            return _torch_memory.describe(name, value, expected, device, writable=writable, has_rows=has_rows)
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
        from . import _torch_memory

        columns = _torch_memory.columns_of(outline.names(), values, device)
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
