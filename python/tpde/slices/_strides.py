"""Strided views of memory as rectangles of tensors, in integers alone.

A *loop* walks one dim of a copy: how many elements, and how far apart they are in the source and in the memory of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

#: Most rectangles of one copy. A loader that needs more of them takes single rows or elements.
MOST_RECTANGLES = 4096


class NotRectangles(ValueError):
    """A copy that no rectangles with regular rows describe. The text says why."""


class Loop(NamedTuple):
    """One dim of a copy. Strides count elements."""

    size: int
    source: int
    memory: int


class Origin(NamedTuple):
    """Where the elements of a storage come from: the element at position ``sum(i * contiguous_stride)`` of the storage, with one index
    ``i`` per size, is the element ``offset + sum(i * stride)`` of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Placed(NamedTuple):
    """A rectangle of a tensor, and the memory of its elements: offset of the first one, and strides, in elements."""

    origin: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """Offset behind the last element."""
        return self.offset + 1 + sum((extent - 1) * stride for extent, stride in zip(self.extent, self.strides))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def whole(shape: Sequence[int]) -> Origin:
    """The origin of a tensor's own storage."""
    return Origin(tuple(shape), contiguous(shape), 0)


def follow(loops: Iterable[Loop], offset: int, origin: Origin) -> tuple[list[Loop], int]:
    """Replaces strides and offset in a storage by those in the tensor that it comes from. Cuts loops where they cross a dim. Raises
    ``NotRectangles`` if a loop begins or ends within a dim that it crosses."""
    kept = [at for at, size in enumerate(origin.sizes) if size > 1]
    sizes, strides = [origin.sizes[at] for at in kept], [origin.strides[at] for at in kept]
    steps = contiguous(sizes)
    digits = [offset // step % size for step, size in zip(steps, sizes)]
    last = [*digits]  # of all loops together
    followed: list[Loop] = []
    for loop in loops:
        pending = [loop]
        while pending:
            size, step, memory = pending.pop()
            if step == 0:
                raise NotRectangles("an element is copied to several places")
            dim = next((at for at, least in enumerate(steps) if least <= step), None)
            if dim is None or step % steps[dim]:
                raise NotRectangles("elements are not at equal distances along the dims of the tensor")
            by = step // steps[dim]
            if digits[dim] + by * (size - 1) < sizes[dim]:
                followed.append(Loop(size, by * strides[dim], memory))
                last[dim] += by * (size - 1)
                continue
            inner = sizes[dim] // by
            if dim == 0 or sizes[dim] % by or digits[dim] >= by or size % inner:
                raise NotRectangles("a range of the flattened tensor begins or ends within a row")
            pending += [Loop(size // inner, step * inner, memory * inner), Loop(inner, step, memory)]
    if any(digit >= size for digit, size in zip(last, sizes)):
        raise NotRectangles("a range of the flattened tensor begins or ends within a row")
    return followed, origin.offset + sum(digit * stride for digit, stride in zip(digits, strides))


def loops_of(shape: Sequence[int], source: Sequence[int], memory: Sequence[int]) -> list[Loop]:
    """The loops of a copy with more than one element each."""
    return [Loop(*loop) for loop in zip(shape, source, memory) if loop[0] > 1]


def rectangles(loops: Iterable[Loop], start: int, shape: Sequence[int], offset: int) -> list[Placed]:
    """The rectangles of a tensor of this shape that loops walk from element ``start`` on, and where they are in memory. Raises
    ``NotRectangles`` for more than :data:`MOST_RECTANGLES`."""
    loops, start = follow(merged(loops), start, whole(shape))
    steps = contiguous(shape)
    first = [start // step % max(size, 1) for step, size in zip(steps, shape)]
    # Per dim, the loop of neighbouring elements. All other loops become several rectangles.
    inner: dict[int, Loop] = {}
    outer: list[tuple[int, Loop]] = []
    for loop in loops:
        dim = next(at for at, step in enumerate(steps) if step <= loop.source and shape[at] > 1)
        if loop.source == steps[dim]:
            inner[dim] = loop
        else:
            outer.append((dim, loop))
    if math.prod(loop.size for _, loop in outer) > MOST_RECTANGLES:
        raise NotRectangles(f"neighbouring elements of dim {outer[0][0]} are not neighbours in the parameter")
    extent = tuple(inner[dim].size if dim in inner else 1 for dim in range(len(shape)))
    strides = tuple(inner[dim].memory if dim in inner else 0 for dim in range(len(shape)))
    placed = []
    for indices in product(*(range(loop.size) for _, loop in outer)):
        origin, place = [*first], offset
        for index, (dim, loop) in zip(indices, outer):
            origin[dim] += index * (loop.source // steps[dim])
            place += index * loop.memory
        placed.append(Placed(tuple(origin), extent, place, strides))
    return placed


def merged(loops: Iterable[Loop]) -> list[Loop]:
    """Joins loops that walk neighbouring memory on both sides."""
    joined: list[Loop] = []
    for loop in sorted(loops, key=lambda loop: -loop.source):
        last = joined[-1] if joined else None
        if last and (last.source, last.memory) == (loop.size * loop.source, loop.size * loop.memory):
            joined[-1] = Loop(last.size * loop.size, loop.source, loop.memory)
        else:
            joined.append(loop)
    return joined


def with_rows(placed: Placed) -> list[Placed]:
    """Cuts a rectangle into rectangles whose rows are contiguous and at equal, ascending distances. Raises ``NotRectangles`` if the
    elements of a row are not contiguous, as in a transposed parameter."""
    dims = [dim for dim, extent in enumerate(placed.extent) if extent > 1]
    if not dims:
        return [placed]
    last = len(placed.extent) - 1
    if last in dims and placed.strides[last] != 1:
        raise NotRectangles(f"elements of a row of the tensor are {placed.strides[last]} elements apart in the parameter")
    # Rows are walked by the dims with the nearest ones, as long as these are in the order of the tensor. Others are cut.
    rows, pitch, outer = 1, placed.extent[last], last
    cut = []
    for dim in sorted((dim for dim in dims if dim != last), key=lambda dim: (placed.strides[dim], -dim)):
        is_first = rows == 1 and placed.strides[dim] >= placed.extent[last]
        if is_first or (rows > 1 and dim < outer and placed.strides[dim] == pitch * rows):
            pitch = placed.strides[dim] if is_first else pitch
            rows, outer = rows * placed.extent[dim], dim
        else:
            cut.append(dim)
    if math.prod(placed.extent[dim] for dim in cut) > MOST_RECTANGLES:
        raise NotRectangles("rows of the tensor are not at equal distances in the parameter")
    pieces = []
    for indices in product(*(range(placed.extent[dim]) for dim in cut)):
        origin, extent, offset = [*placed.origin], [*placed.extent], placed.offset
        for index, dim in zip(indices, cut):
            origin[dim] += index
            extent[dim] = 1
            offset += index * placed.strides[dim]
        pieces.append(Placed(tuple(origin), tuple(extent), offset, placed.strides))
    return pieces


@dataclass(frozen=True, order=True)
class Region:
    """A rectangle without memory."""

    origin: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """The elements, as NumPy has them."""
        return tuple(slice(at, at + size) for at, size in zip(self.origin, self.extent))

    def common(self, other: Region) -> Region | None:
        """The elements of both; ``None`` if there are none."""
        first = [max(a, b) for a, b in zip(self.origin, other.origin)]
        ends = [min(a + m, b + n) for a, m, b, n in zip(self.origin, self.extent, other.origin, other.extent)]
        extent = [end - at for at, end in zip(first, ends)]
        return None if any(size <= 0 for size in extent) else Region(tuple(first), tuple(extent))

    def without(self, other: Region) -> list[Region]:
        """The elements that the other does not have, as at most two regions per dim."""
        common = self.common(other)
        if common is None:
            return [self]
        rest, origin, extent = [], [*self.origin], [*self.extent]
        for dim, (at, size) in enumerate(zip(common.origin, common.extent)):
            end = origin[dim] + extent[dim]
            for start, stop in ((origin[dim], at), (at + size, end)):
                if start < stop:
                    first, sizes = [*origin], [*extent]
                    first[dim], sizes[dim] = start, stop - start
                    rest.append(Region(tuple(first), tuple(sizes)))
            origin[dim], extent[dim] = at, size
        return rest


class Regions:
    """Regions of one tensor with a value each, found by the elements that they have. Those with one index in the first dim, such as
    experts, are found without looking at all others."""

    def __init__(self) -> None:
        self.every: list[tuple[Region, Any]] = []
        self._wide: list[tuple[Region, Any]] = []
        self._narrow: dict[int, list[tuple[Region, Any]]] = {}

    def add(self, region: Region, value: Any) -> None:
        """Adds a region, with what belongs to it."""
        self.every.append((region, value))
        is_narrow = bool(region.extent) and region.extent[0] == 1
        (self._narrow.setdefault(region.origin[0], []) if is_narrow else self._wide).append((region, value))

    def near(self, region: Region) -> list[tuple[Region, Any]]:
        """All regions that may have elements in common with this one."""
        is_narrow = bool(region.extent) and region.extent[0] == 1
        return [*self._wide, *self._narrow.get(region.origin[0], ())] if is_narrow else self.every

    def find(self, region: Region) -> tuple[Region, Any] | None:
        """Elements that a region has in common with one of these, and the value of that one."""
        for other, value in self.near(region):
            if common := region.common(other):
                return common, value
        return None


def remaining(regions: Iterable[Region], others: Iterable[Region]) -> list[Region]:
    """The elements of ``regions`` that none of ``others`` has."""
    rest = list(regions)
    for other in sorted(others):
        rest = [piece for region in rest for piece in region.without(other)]
    return rest


def regions(shape: Sequence[int], strides: Sequence[int], offset: int, whole_shape: Sequence[int]) -> list[Region]:
    """The elements of a view of a contiguous tensor of shape ``whole_shape``. Raises as :func:`rectangles`."""
    if 0 in shape:
        return []
    placed = rectangles(loops_of(shape, strides, contiguous(shape)), offset, whole_shape, 0)
    return [Region(one.origin, one.extent) for one in placed]
