"""Cuts tensors where receivers hold them, so that every receiver has all elements of the parts that it needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise, product
from typing import Any

from .._core.arguments import check_name
from .._core.errors import InvalidArgument
from .._memory.slices import Slice

#: Rectangles of tensors, by name: first index and index behind the last one, per dim.
Rectangles = Mapping[str, Iterable[tuple[slice, ...]]]
#: The elements of a bucket: a rectangle of each of its tensors.
Bucket = Mapping[str, tuple[slice, ...]]


def cut(tensors: Mapping[str, Any], rectangles: Iterable[Rectangles]) -> list[Slice]:
    """Slices that tile whole tensors. Each rectangle of each receiver is made of some of them.

    The slices form a grid: a tensor is cut at each begin and end of a rectangle, and between experts if their matrices are cut.
    Tensors without rectangles are one slice.

    Raises:
        InvalidArgument: A rectangle is of no tensor, or not within it.
    """
    if not isinstance(tensors, Mapping):
        raise InvalidArgument(f"tensors is a {type(tensors).__name__}: expected a dict of tensors")
    shapes = {}
    for name, tensor in tensors.items():
        try:
            shapes[check_name(name)] = tuple(tensor.shape)
        except (AttributeError, RuntimeError) as error:
            raise InvalidArgument(f"tensor {name!r} is a {type(tensor).__name__}: expected one with a shape ({error})") from error
    try:
        found = grid(shapes, rectangles)
    except InvalidArgument:
        raise
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        message = f"rectangles is a {type(rectangles).__name__}: expected several results of Map.rectangles ({error})"
        raise InvalidArgument(message) from error
    return [
        Slice(name, index, _part(name, tensors[name], index), shapes[name]) for name, indices in found.items() for index in indices
    ]


def _part(name: str, tensor: Any, index: Any) -> Any:
    try:
        return tensor[index]
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidArgument(f"tensor {name!r} is a {type(tensor).__name__} that cannot be cut: {error}") from error


def grid(shapes: Mapping[str, tuple[int, ...]], rectangles: Iterable[Rectangles]) -> dict[str, list[Any]]:
    """The indices of :func:`cut`, by name of the tensor."""
    bounds: dict[str, list[set[int]]] = {name: [{0, size} for size in shape] for name, shape in shapes.items()}
    for receiver in rectangles:
        for name, indices in receiver.items():
            if name not in bounds:
                raise InvalidArgument(f"a receiver has slices of tensor {name!r}, which is missing")
            for index in indices:
                _check(name, index, shapes[name])
                for dim, one in enumerate(index):
                    bounds[name][dim] |= {one.start, one.stop}
    return {name: _tiles(shape, [sorted(dim) for dim in bounds[name]]) for name, shape in shapes.items()}


def _check(name: str, index: tuple[slice, ...], shape: tuple[int, ...]) -> None:
    is_within = len(index) == len(shape) and all(0 <= one.start <= one.stop <= size for one, size in zip(index, shape))
    if not is_within:
        raise InvalidArgument(f"a receiver has the slice {index} of tensor {name!r} of shape {[*shape]}, which is not within it")


def _tiles(shape: tuple[int, ...], bounds: list[list[int]]) -> list[Any]:
    if 0 in shape or not shape:
        return [...]
    # Rows of a slice must be at equal distances. So if a dim other than the last is cut, the dims before it are cut at each index.
    # The parts still form a grid, so they nest as the format requires.
    last_cut = max((dim for dim in range(1, len(shape) - 1) if len(bounds[dim]) > 2), default=0)
    cells = product(*(pairwise(range(shape[dim] + 1) if dim < last_cut else one) for dim, one in enumerate(bounds)))
    return [tuple(slice(start, stop) for start, stop in cell) for cell in cells]


def buckets(shapes: Mapping[str, tuple[int, ...]], most: int) -> Iterator[Bucket]:
    """Divides tensors into buckets of at most this many elements. A larger tensor is cut between rows of its first dim, and a row is not
    cut."""
    bucket: dict[str, tuple[slice, ...]] = {}
    used = 0
    for name, shape in shapes.items():
        row = math.prod(shape[1:])
        rows = shape[0] if shape and row * shape[0] > most else 0
        step = max(1, most // max(row, 1))
        pieces = [(slice(at, min(at + step, rows)), *whole_of(shape[1:])) for at in range(0, rows, step)] or [whole_of(shape)]
        for piece in pieces:
            if bucket and used + volume(piece) > most:
                yield bucket
                bucket, used = {}, 0
            bucket[name] = piece
            used += volume(piece)
    if bucket:
        yield bucket


def whole_of(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of all elements."""
    return tuple(slice(0, size) for size in shape)


def index_of(origin: Iterable[int], extent: Iterable[int]) -> tuple[slice, ...]:
    """The index of a rectangle."""
    return tuple(slice(start, start + size) for start, size in zip(origin, extent))


def volume(index: tuple[slice, ...]) -> int:
    """Number of elements of a rectangle."""
    return math.prod(one.stop - one.start for one in index)


def is_within(index: Any, held: tuple[slice, ...]) -> bool:
    """Whether a rectangle, or ``...`` for all elements, is part of another one."""
    return index is ... or all(own.start <= one.start and one.stop <= own.stop for one, own in zip(index, held))


def within(index: Any, held: tuple[slice, ...]) -> Any:
    """The index of a rectangle's elements in another one, of which it is a part."""
    return index if index is ... else tuple(slice(one.start - own.start, one.stop - own.start) for one, own in zip(index, held))
