"""Builds the map of a recorded loader, and checks that it is complete."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .._core.errors import InvalidArgument
from .._memory.slices import Slice
from ._contents import Copy, Elements, Refusal
from ._model import memory_range
from ._recorder import Recording
from ._strides import NotRectangles, Placed, Region, Regions, rectangles, with_rows


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


def module_of(parameter: str) -> str:
    """The name of the module of a parameter."""
    return parameter.rpartition(".")[0]


def build(
    recording: Recording, shapes: Mapping[str, tuple[int, ...]], offered: Mapping[str, Any], equal: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of a map. ``equal`` has the first name of each tensor that has several, by its further ones."""
    listed = [one for one in recording.contents if one.target.is_listed]
    refusals = [*recording.refusals]
    tensors_of = {one.name: one.tensors for one in listed}
    for refusal in refusals:
        if refusal.parameter is not None:
            known = tensors_of.setdefault(refusal.parameter, [])
            known += [name for name in refusal.tensors if name not in known]
    # The loader gets them again in the order of the checkpoint.
    places = {name: place for place, name in enumerate(shapes)}
    tensors_of = {name: sorted(names, key=places.__getitem__) for name, names in tensors_of.items()}
    refused = {one.parameter for one in refusals}
    pieces: list[Piece] = []
    constants: list[Elements] = []
    missing: list[Elements] = []
    for contents in listed:
        own, reason = [], None
        for copy in () if contents.name in refused else contents.copies:
            try:
                own += _pieces(copy, contents.name, shapes[copy.tensor], offered[copy.tensor][0].dtype)
            except NotRectangles as error:
                reason = reason or Refusal("aten.copy_", (copy.tensor,), contents.name, copy.where, str(error))
        if reason is None and (interleaved := _interleaved(own)):
            where = next(one.where for one in contents.copies if one.tensor == interleaved[1].tensor)
            text = f"its rows are between those of tensor {interleaved[0].tensor}"
            reason = Refusal("aten.copy_", (interleaved[1].tensor,), contents.name, where, text)
        if reason is not None:
            refusals.append(reason)
        elif contents.name not in refused:
            pieces += own
            constants += contents.constants()
            missing += contents.missing()
    pieces, overlapping = _without_overlaps(pieces)
    refusals += overlapping
    used = {tensor for names in tensors_of.values() for tensor in names}
    return {
        "pieces": pieces,
        "refusals": refusals,
        "constants": constants,
        "missing": missing,
        "unused": [name for name in shapes if equal.get(name, name) not in used],
        "tied": {one.name: one.target.names[1:] for one in listed if one.target.names[1:]},
        "tensors_of": tensors_of,
        "_shapes": dict(shapes),
        "_loads_once": recording.ends_refused,
        "_equal": {first: [name for name in equal if equal[name] == first] for first in equal.values()},
        "_layouts": {one.name: Layout.of(one.target.tensor) for one in listed},
    }


def _pieces(copy: Copy, parameter: str, shape: tuple[int, ...], dtype: Any) -> list[Piece]:
    placed = [row for one in rectangles(copy.loops, copy.start, shape, copy.offset) for row in with_rows(one)]
    return [Piece(copy.tensor, Region(one.origin, one.extent).index, parameter, one.offset, one.strides, dtype) for one in placed]


def span_of(tensor: torch.Tensor) -> int:
    """Size in bytes from the first element to the last."""
    span = memory_range(tensor)
    return len(span[1]) if span else 0


def in_pair(slices: Iterable[Slice], equal: Mapping[str, list[str]], names: Container[str]) -> list[Slice]:
    """The slices, with a name of their tensor that is among ``names`` if it has one."""
    if not equal:
        return [*slices]
    return [
        replace(each, name=next((name for name in (each.name, *equal.get(each.name, ())) if name in names), each.name))
        for each in slices
    ]


def check_tied(live: Mapping[str, torch.Tensor], tied: Mapping[str, list[str]], names: Iterable[str]) -> None:
    """Raises unless those of these parameters are one memory that were so when the loader was recorded."""
    places: list[tuple[int, int, int, str]] = []
    for name in names:
        if (first := memory_range(live[name])) is None:
            continue
        places.append((first[0], first[1].start, first[1].stop, name))
        for other in tied.get(name, ()):
            if other in live and (memory_range(live[other]) != first or Layout.of(live[other]) != Layout.of(live[name])):
                raise InvalidArgument(
                    f"parameters {name!r} and {other!r} are not the same memory: expected tied parameters, as recorded"
                )
    for before, after in pairwise(sorted(places)):
        if before[0] == after[0] and after[1] < before[2]:
            both = sorted([before[3], after[3]])
            raise InvalidArgument(f"parameters {both[0]!r} and {both[1]!r} share memory: expected separate ones, as recorded")


def _interleaved(pieces: list[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces of a parameter, where rows of one are between rows of the other."""
    last, end = None, 0
    for one in sorted(pieces, key=lambda piece: piece.offset):
        if last is not None and one.offset < end:
            return last, one
        last, end = one, Placed((), one.extent, one.offset, one.strides).end
    return None


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
