"""Indices of tensors: integers, slices and ``...``, as NumPy has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .._core.errors import InvalidArgument, make_error
from .._core.names import matching_names


def complete(index: Any, rank: int) -> list[Any]:
    """Completes an index to one entry per dim: ``...`` and missing entries become full slices."""
    indices = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, one in enumerate(indices) if one is Ellipsis]
    if len(dots) > 1:
        raise InvalidArgument("an index has at most one '...'")
    missing = rank - (len(indices) - len(dots))
    if missing < 0:
        raise make_error("out_of_range", f"{len(indices)} indices for {rank} dims")
    at = dots[0] if dots else len(indices)
    return [*indices[:at], *[slice(None)] * missing, *indices[at + 1 :]]


def selected(index: Any, dim: int) -> tuple[range, bool]:
    """The positions in a dim that an index selects, and whether it is a single integer."""
    if isinstance(index, slice):
        try:
            positions = range(*index.indices(dim))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"bad slice {index}: {error}") from error
        if positions.step < 0:
            raise InvalidArgument("slices with a negative step cannot be read")
        return range(positions.start, max(positions.start, positions.stop), positions.step), False
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise InvalidArgument(f"a {type(index).__name__} as index: integers, slices and '...' can be read")
    try:
        at = index.__index__()
    except TypeError as error:  # an array or tensor of several elements
        raise InvalidArgument(f"a {type(index).__name__} as index: integers, slices and '...' can be read") from error
    if not -dim <= at < dim:
        raise make_error("out_of_range", f"index {at} is beyond a dim of {dim}")
    return range(at % dim, at % dim + 1), True


class Rectangle(NamedTuple):
    """Elements of a tensor: first index and number of indexes in each dim."""

    origin: list[int]
    extent: list[int]
    #: Whether the index keeps each dim. A dim with an integer as index is dropped.
    kept: list[bool]

    @property
    def shape(self) -> list[int]:
        """Shape of an array of these elements."""
        return [extent for extent, is_kept in zip(self.extent, self.kept) if is_kept]


def rectangle(name: str, index: Any, shape: list[int]) -> Rectangle:
    """The elements of a tensor that an index selects. Unlike indexing, refuses ends beyond the tensor.

    Raises:
        InvalidArgument (out_of_range): The index has too many dims, or an end beyond the tensor.
        InvalidArgument: Anything else that selects no rectangle.
    """
    try:
        wanted = []
        for one, dim in zip(complete(index, len(shape)), shape):
            positions, is_one = selected(one, dim)
            if len(positions) > 1 and positions.step != 1:
                raise InvalidArgument(f"a slice with a step of {positions.step} selects no rectangle")
            bounds = [one.start, one.stop] if isinstance(one, slice) else []
            for bound in bounds:
                if bound is not None and not -dim <= bound <= dim:
                    raise make_error("out_of_range", f"index {bound} is beyond a dim of {dim}")
            wanted.append((positions, not is_one))
    except InvalidArgument as error:
        raise make_error(error.code, f"slice of tensor {name!r} of shape {shape}: {error}") from None
    origin, extent = [positions.start for positions, _ in wanted], [len(positions) for positions, _ in wanted]
    return Rectangle(origin, extent, [is_kept for _, is_kept in wanted])


def rectangles_of(parts: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Origin and extent of the rectangles that each tensor has: an index as NumPy has it, or a list of several."""
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    for pattern, indices in parts.items():
        for name in sorted(matching_names(shapes, [pattern])):
            ones = [rectangle(name, index, shapes[name]) for index in (indices if isinstance(indices, list) else [indices])]
            found.setdefault(name, []).extend((one.origin, one.extent) for one in ones)
    return found
