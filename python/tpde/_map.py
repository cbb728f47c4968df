"""Builds the map of a recorded loader, and checks that it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ._errors import InvalidArgument, NotRecorded
from ._recorder import Copy, Fill, Recording, Refusal, Target
from ._slices import Slice
from ._strides import NotRectangles, Placed, Region, Regions, rectangles, regions, remaining, with_rows


class Layout(NamedTuple):
    """What a parameter must have for a map to fit it."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} with strides {list(self.strides)}"


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, and its place in a parameter."""

    tensor: str
    #: The elements of the tensor.
    index: tuple[slice, ...]
    parameter: str
    #: Where the rectangle begins in the parameter's memory, in elements.
    offset: int
    #: Distances between neighbours in each dim of the rectangle, in elements of the parameter's memory.
    strides: tuple[int, ...]
    #: Dtype of the tensor. That of the parameter may be another one of the same size, if the loader views it so.
    dtype: Any

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the rectangle."""
        return tuple(one.stop - one.start for one in self.index)

    def memory(self, parameter: torch.Tensor) -> torch.Tensor:
        """The elements of the parameter, in the shape of the rectangle."""
        viewed = parameter.detach()
        if viewed.dtype != self.dtype:
            viewed = viewed.view(self.dtype)
        return viewed.as_strided(self.extent, self.strides, viewed.storage_offset() + self.offset)


@dataclass(frozen=True)
class Elements:
    """Elements of a parameter."""

    parameter: str
    index: tuple[slice, ...]

    def __str__(self) -> str:
        return f"{self.parameter}[{', '.join(f'{one.start}:{one.stop}' for one in self.index)}]"


def module_of(parameter: str) -> str:
    """The name of the module of a parameter."""
    return parameter.rpartition(".")[0]


def parameters_of(owner: Any) -> dict[str, torch.Tensor]:
    """The tensors of a dict, or parameters and persistent buffers of a module, under all of their names."""
    if isinstance(owner, Mapping):
        return dict(owner)
    if not hasattr(owner, "named_modules"):
        raise InvalidArgument(f"parameters is a {type(owner).__name__}: expected a dict of tensors or a module")
    found: dict[str, torch.Tensor] = {}
    for prefix, module in owner.named_modules(remove_duplicate=False):
        own = [*module._parameters.items()]
        own += [(name, one) for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set]
        found |= {f"{prefix}.{name}" if prefix else name: tensor for name, tensor in own if tensor is not None}
    return found


def build(recording: Recording, shapes: Mapping[str, tuple[int, ...]], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a map."""
    targets = {target.names[0]: target for target in recording.targets.values()}
    by_parameter: dict[str, list[Copy | Fill]] = {name: [] for name in targets}
    for write in recording.writes:
        by_parameter[write.parameter].append(write)
    refusals, tensors_of = [*recording.refusals], {}
    pieces: list[Piece] = []
    constants: list[Elements] = []
    missing: list[Elements] = []
    for name, target in targets.items():
        writes = list(dict.fromkeys(by_parameter[name]))
        copies = [one for one in writes if isinstance(one, Copy)]
        refused = [one for one in recording.refusals if one.parameter == name]
        names = [one.tensor for one in copies] + [tensor for one in refused for tensor in one.tensors]
        tensors_of[name] = list(dict.fromkeys(names))
        own: list[Piece] = []
        coverage = _Coverage(target)
        for write in writes:
            try:
                coverage.add(write)
                if isinstance(write, Copy):
                    own += _pieces(write, shapes[write.tensor], offered[write.tensor][0].dtype)
            except NotRectangles as error:
                tensors = (write.tensor,) if isinstance(write, Copy) else ()
                where = write.where if isinstance(write, Copy) else ""
                refused.append(Refusal("aten.copy_" if tensors else "aten.fill_", tensors, name, where, str(error)))
                refusals.append(refused[-1])
        if not refused and (interleaved := _interleaved(own)):
            reason = f"its rows are between those of tensor {interleaved[0].tensor}"
            where = next(one.where for one in copies if one.tensor == interleaved[1].tensor)
            refused = [Refusal("aten.copy_", (interleaved[1].tensor,), name, where, reason)]
            refusals += refused
        if refused:
            continue
        pieces += own
        constants += [Elements(name, index) for index in coverage.constants()]
        missing += [Elements(name, index) for index in coverage.missing()]
    pieces, overlapping = _without_overlaps(pieces)
    refusals += overlapping
    used = {tensor for names in tensors_of.values() for tensor in names}
    return {
        "pieces": pieces,
        "refusals": refusals,
        "constants": constants,
        "missing": missing,
        "unused": [name for name in shapes if name not in used],
        "tied": {name: target.names[1:] for name, target in targets.items() if target.names[1:]},
        "tensors_of": tensors_of,
        "_shapes": dict(shapes),
        "_layouts": {name: Layout.of(target.tensor) for name, target in targets.items()},
    }


def _pieces(copy: Copy, shape: tuple[int, ...], dtype: Any) -> list[Piece]:
    placed = [row for one in rectangles(copy.loops, copy.start, shape, copy.offset) for row in with_rows(one)]
    return [
        Piece(copy.tensor, Region(one.origin, one.extent).index, copy.parameter, one.offset, one.strides, dtype) for one in placed
    ]


def _interleaved(pieces: list[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces of a parameter, where rows of one are between rows of the other."""
    last, end = None, 0
    for one in sorted(pieces, key=lambda piece: piece.offset):
        if last is not None and one.offset < end:
            return last, one
        last, end = one, Placed((), one.extent, one.offset, one.strides).end
    return None


class _Coverage:
    """The elements of a parameter that are written, with its dims in the order of memory."""

    def __init__(self, target: Target) -> None:
        self.name, self.order = target.names[0], target.order
        self.shape = tuple(target.tensor.shape[dim] for dim in target.order)
        self.copied = Regions()
        self.filled: list[Region] = []

    def add(self, write: Copy | Fill) -> None:
        """Adds the elements of a write. A copy may follow a write of constants."""
        if isinstance(write, Fill):
            written = regions(write.shape, write.strides, write.offset, self.shape)
            self._refuse_twice(written, "constants")
            self.filled += written
            return
        sizes, strides = [loop.size for loop in write.loops], [loop.memory for loop in write.loops]
        written = regions(sizes, strides, write.offset, self.shape)
        self._refuse_twice(written, write.tensor)
        for region in written:
            self.copied.add(region, write.tensor)

    def _refuse_twice(self, written: list[Region], by: str) -> None:
        for region in written:
            if found := self.copied.find(region):
                where, tensor = Elements(self.name, self._index(found[0])), found[1]
                raise NotRecorded(f"{where} is written twice: from {tensor} and {by}", tensor=tensor, parameter=self.name)

    def constants(self) -> list[tuple[slice, ...]]:
        """The elements that are written, but not from a checkpoint."""
        apart: list[Region] = []
        for region in self.filled:
            apart += remaining([region], apart)
        return [self._index(one) for one in remaining(apart, [region for region, _ in self.copied.every])]

    def missing(self) -> list[tuple[slice, ...]]:
        """The elements that are not written."""
        if 0 in self.shape:
            return []
        every = Region((0,) * len(self.shape), self.shape)
        return [self._index(one) for one in remaining([every], [*(region for region, _ in self.copied.every), *self.filled])]

    def _index(self, region: Region) -> tuple[slice, ...]:
        """The elements as an index of the parameter."""
        index = [slice(0, 0)] * len(self.order)
        for dim, one in zip(self.order, region.index):
            index[dim] = one
        return tuple(index)


def _without_overlaps(pieces: list[Piece]) -> tuple[list[Piece], list[Refusal]]:
    """Refuses parameters with some, but not all, elements of a rectangle that another parameter has: one call cannot change both."""
    by_tensor: dict[str, Regions] = {}
    known: set[tuple[str, Region]] = set()
    refusals: dict[str, Refusal] = {}
    for one in pieces:
        region = Region(tuple(part.start for part in one.index), one.extent)
        if (one.tensor, region) in known:
            continue
        others = by_tensor.setdefault(one.tensor, Regions())
        if found := others.find(region):
            reason = f"parameter {found[1]} has some of the same elements"
            refusals.setdefault(one.parameter, Refusal("aten.copy_", (one.tensor,), one.parameter, "", reason))
            continue
        known.add((one.tensor, region))
        others.add(region, one.parameter)
    return [one for one in pieces if one.parameter not in refusals], list(refusals.values())


def without_copies(slices: list[Slice]) -> tuple[list[Slice], list[tuple[Slice, Slice]]]:
    """The first slice of each rectangle, and the others with the first one of the same rectangle."""
    first: dict[Any, Slice] = {}
    copies = []
    for one in slices:
        key = one.name, tuple((part.start, part.stop) for part in one.index)
        if key in first:
            copies.append((first[key], one))
        else:
            first[key] = one
    return list(first.values()), copies


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits."""
    integers = _INTEGERS[one.element_size()]
    return torch.equal(one.view(integers), other.view(integers))
