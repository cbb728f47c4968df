"""What a loader has written to the memory of parameters: which elements come from which tensor, and which are constants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._core.errors import NotRecorded, and_more
from ._strides import MOST_RECTANGLES, Loop, NotRectangles, Placed, Region, Regions, merged, rectangles, regions, remaining

#: Most names of tensors in a message.
MOST_NAMES = 8


@dataclass(frozen=True)
class Refusal:
    """Something that a loader does and a map cannot express."""

    #: Name of the operation in PyTorch, such as ``"aten.mul"``.
    operation: str
    #: The checkpoint's tensors that it has as arguments.
    tensors: tuple[str, ...]
    #: The parameter that lacks its values for this reason; ``None`` if the result was copied to no parameter.
    parameter: str | None
    #: File, line and function of the loader.
    where: str
    reason: str

    def __str__(self) -> str:
        of = f" of {', '.join(self.tensors[:MOST_NAMES])}{and_more(self.tensors, MOST_NAMES)}" if self.tensors else ""
        to = f" for parameter {self.parameter}" if self.parameter else ""
        at = f" at {self.where}" if self.where else ""
        return f"{self.operation}{of}{to}{at}: {self.reason}"

    def _error(self, more: str = "", operation: str | None = None) -> NotRecorded:
        """The refusal as an error, with more text. The error may be of a later operation."""
        of = {"tensor": self.tensors[0] if self.tensors else None, "parameter": self.parameter}
        return NotRecorded(f"{self}{more}", operation=operation or self.operation, where=self.where, **of)


@dataclass(frozen=True)
class Elements:
    """Elements of a parameter."""

    parameter: str
    index: tuple[slice, ...]

    def __str__(self) -> str:
        return f"{self.parameter}[{', '.join(f'{one.start}:{one.stop}' for one in self.index)}]"


@dataclass(frozen=True)
class Target:
    """A parameter: its names, the first of which counts, and its memory, as :func:`tpde.slices._model.memory_range` has it."""

    names: list[str]
    tensor: Any
    bytes: range
    #: Its dims in the order of memory.
    order: tuple[int, ...]
    #: Whether it belongs in a map. Other tensors that a model has are followed, and refused if they are loaded.
    is_listed: bool = True


@dataclass(frozen=True)
class Copy:
    """A copy from a tensor to a parameter."""

    tensor: str
    #: Strides in the tensor, and in the parameter's memory.
    loops: tuple[Loop, ...]
    start: int
    #: Offset in the parameter's memory.
    offset: int
    #: Not compared: loaders of tied weights copy twice.
    where: str = field(compare=False)


class Run(NamedTuple):
    """Elements that are read: those of a tensor from ``start`` on, or constants. ``offset`` counts elements of the destination."""

    tensor: str | None
    loops: tuple[Loop, ...]
    start: int
    offset: int
    #: The elements of the parameter, if the loader has not written them before.
    unwritten: Region | None = None


class Contents:
    """What the memory of a parameter holds at a point of the program. Its dims are in the order of memory.

    An element that is copied from a tensor is not written again, except by the same copy. So the order of writes does not matter after
    they were checked.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.shape = tuple(target.tensor.shape[dim] for dim in target.order)
        self.copies: dict[Copy, None] = {}
        self.refusals: list[Refusal] = []
        #: Per rectangle of the parameter, the tensor that it comes from, and the rectangle's offset and strides in the tensor.
        self._copied = Regions()
        self._filled: list[Region] = []
        #: Elements that the loader has read as they were before.
        self._read: list[Region] = []

    @property
    def name(self) -> str:
        """The first name."""
        return self.target.names[0]

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was written."""
        return not (self.copies or self.refusals or self._filled)

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors that the parameter has elements of."""
        names = [one.tensor for one in self.copies] + [name for one in self.refusals for name in one.tensors]
        return list(dict.fromkeys(names))

    def copy(self, copy: Copy) -> None:
        """Adds a copy, which may replace constants. Raises ``NotRecorded`` for elements that come from elsewhere already, or were
        read before, and ``NotRectangles``."""
        if copy in self.copies:
            return
        swapped = [Loop(loop.size, loop.memory, loop.source) for loop in copy.loops]
        placed = rectangles(swapped, copy.offset, self.shape, copy.start)
        written = [Region(one.origin, one.extent) for one in placed]
        self._refuse_twice(written, copy.tensor)
        self._refuse_late(written)
        self.copies[copy] = None
        for region, one in zip(written, placed):
            self._copied.add(region, (copy.tensor, one))

    def fill(self, shape: Iterable[int], strides: Iterable[int], offset: int) -> None:
        """Adds a write of constants. Raises as :meth:`copy`."""
        written = regions([*shape], [*strides], offset, self.shape)
        self._refuse_twice(written, "constants")
        self._refuse_late(written)
        self._filled += written

    def refuse(self, refusal: Refusal) -> None:
        """Adds a write that a map cannot express. Raises ``NotRecorded`` if elements were read before."""
        self._refuse_late([self._every])
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def read(self, loops: Iterable[Loop], offset: int) -> list[Run]:
        """The elements that loops walk from ``offset`` on, in the order of their rectangles. Raises ``NotRectangles``."""
        runs: list[Run] = []
        for view in rectangles(loops, offset, self.shape, 0):
            region = Region(view.origin, view.extent)
            rest = [region]
            for own, (tensor, placed) in self._copied.near(region):
                if common := region.common(own):
                    rest = [part for one in rest for part in one.without(common)]
                    runs.append(Run(tensor, *_walk(common, placed, view)))
            unwritten = remaining(rest, self._filled)
            runs += [Run(None, *_walk(one, view, view)) for one in remaining(rest, unwritten)]
            runs += [Run(None, *_walk(one, view, view), one) for one in unwritten]
            if len(runs) > MOST_RECTANGLES:
                raise NotRectangles(f"parameter {self.name} has more than {MOST_RECTANGLES} rectangles of tensors")
        return runs

    def read_as_it_was(self, elements: Region | None = None) -> None:
        """Marks elements, by default all, as read before the first write."""
        self._read.append(elements or self._every)

    @property
    def _every(self) -> Region:
        return Region((0,) * len(self.shape), self.shape)

    def _refuse_twice(self, written: list[Region], by: str) -> None:
        for region in written:
            if found := self._copied.find(region):
                where, tensor = Elements(self.name, self._index(found[0])), found[1][0]
                raise NotRecorded(f"{where} is written twice: from {tensor} and {by}", tensor=tensor, parameter=self.name)

    def _refuse_late(self, written: list[Region]) -> None:
        for region in written:
            for one in self._read:
                if common := region.common(one):
                    where = Elements(self.name, self._index(common))
                    raise NotRecorded(f"{where} is read before it is written", parameter=self.name)

    def replace(self) -> None:
        """Adds a replacement of the memory. Raises ``NotRecorded`` if elements were read before."""
        self._refuse_late([self._every])

    def constants(self) -> list[Elements]:
        """The elements that are written, but not from a checkpoint."""
        apart: list[Region] = []
        for region in self._filled:
            apart += remaining([region], apart)
        return self._elements(remaining(apart, [region for region, _ in self._copied.every]))

    def missing(self) -> list[Elements]:
        """The elements that are not written."""
        if 0 in self.shape:
            return []
        return self._elements(remaining([self._every], [*(region for region, _ in self._copied.every), *self._filled]))

    def _elements(self, found: list[Region]) -> list[Elements]:
        return [Elements(self.name, self._index(one)) for one in found]

    def _index(self, region: Region) -> tuple[slice, ...]:
        """The elements as an index of the parameter."""
        index = [slice(0, 0)] * len(self.shape)
        for dim, one in zip(self.target.order, region.index):
            index[dim] = one
        return tuple(index)


def _walk(region: Region, source: Placed, memory: Placed) -> tuple[tuple[Loop, ...], int, int]:
    """Loops over a region of two rectangles, and where it begins in their memory."""
    loops = merged(Loop(size, source.strides[dim], memory.strides[dim]) for dim, size in enumerate(region.extent) if size > 1)
    starts = [
        one.offset + sum((at - first) * stride for at, first, stride in zip(region.origin, one.origin, one.strides))
        for one in (source, memory)
    ]
    return tuple(loops), starts[0], starts[1]
