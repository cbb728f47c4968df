"""The base of modules that cannot be patched, for the engine's own reload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .._core.errors import InvalidArgument, Poisoned, and_more, reason_of
from .._memory.slices import Slice
from ._map import module_of


@dataclass(eq=False)
class Kept:
    """Slices of the base, in memory of their own, for modules that are loaded again by the engine. :meth:`Map.keep` makes it.

    :func:`apply_` turns it into the target together with the live parameters, so it always is the base of the next pair. Its size is
    that of the rank's slices, or of whole tensors where the loader's use of them is not known.
    """

    #: Names of the modules.
    modules: list[str]
    #: The slices, as :func:`tpde.torch.apply_slices_` takes them.
    slices: list[Slice] = field(repr=False)
    #: Whether the slices have changed since the modules were loaded.
    is_pending: bool = False
    #: Modules that are loaded together, because they share tensors, and these tensors.
    _groups: list[tuple[list[str], list[str]]] = field(default_factory=list, repr=False)
    #: Further names of tensors.
    _equal: dict[str, list[str]] = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> int:
        """Size of the slices."""
        return sum(one.tensor.numel() * one.tensor.element_size() for one in self.slices)

    def reload(self, load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any]) -> list[str]:
        """Call the engine's loader for each module, with the tensors that the module has elements of. Returns the modules' names.

        Raises:
            Poisoned: The loader failed. Some modules do not have the weights that are kept. Calling again repeats all of them.
        """
        by_tensor: dict[str, list[Slice]] = {}
        for one in self.slices:
            by_tensor.setdefault(one.name, []).append(one)
        done = 0
        for modules, tensors in self._groups:
            try:
                load_weights((each, _whole(by_tensor[name])) for name in tensors for each in (name, *self._equal.get(name, ())))
            except Exception as error:
                message = f"loading module {modules[0]!r} again failed, after {done} others: {reason_of(error)}"
                raise Poisoned(message, written=[], total=0) from error
            done += len(modules)
        self.is_pending = False
        return list(self.modules)


def _whole(slices: list[Slice]) -> torch.Tensor:
    """The tensor of these slices, with zeros elsewhere."""
    shape = tuple(slices[0].shape or ())
    if len(slices) == 1 and tuple(slices[0].tensor.shape) == shape:
        kept: torch.Tensor = slices[0].tensor
        return kept
    tensor = torch.zeros(shape, dtype=slices[0].tensor.dtype)
    for one in slices:
        tensor[one.index] = one.tensor
    return tensor


def keep(weights: Any, base: Any, modules: Iterable[str], *, pinned: bool) -> Kept:
    """Copies the slices of the base that modules need. See :meth:`Map.keep`."""
    every = {module_of(name) for name in weights.tensors_of}
    wanted = {module_of(name) for name in weights.refused}
    for name in [modules] if isinstance(modules, str) else modules:
        if name not in every:
            raise InvalidArgument(f"no module {name!r} in the map")
        wanted.add(name)
    groups = _grouped(weights.tensors_of, wanted, [*weights._shapes], is_one=weights._loads_once)
    kept_modules = [module for modules, _ in groups for module in modules]
    indices = _indices(weights, set(kept_modules), {name for _, tensors in groups for name in tensors})
    first: dict[str, str] = {other: name for name, others in weights._equal.items() for other in others}
    slices: list[Slice] = []
    for one in base.items() if isinstance(base, Mapping) else base:
        if not isinstance(one, tuple) or len(one) != 2 or not hasattr(one[1], "detach"):
            raise InvalidArgument(f"the base has {one!r:.80}: expected tuples of a name and a PyTorch tensor")
        own, tensor = str(one[0]), one[1]
        name = first.get(own, own)
        shape = weights._shapes.get(name)
        for index in indices.pop(name, []):
            if tuple(tensor.shape) != shape:
                raise InvalidArgument(f"tensor {name!r} of the base has shape {[*tensor.shape]}: expected {[*shape]}, as recorded")
            part = tensor.detach()[index]
            memory = torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned)
            slices.append(Slice(name, index, memory.copy_(part), shape))
    if indices:
        raise InvalidArgument(f"the base lacks tensor {next(iter(indices))!r}{and_more(indices)}")
    return Kept(kept_modules, slices, _groups=groups, _equal=weights._equal)


def _grouped(
    tensors_of: Mapping[str, list[str]], wanted: Iterable[str], order: list[str], *, is_one: bool
) -> list[tuple[list[str], list[str]]]:
    """Modules and their tensors, in the order of the checkpoint. Modules that share tensors are one group, also those that are not
    listed, or all are."""
    places = {name: place for place, name in enumerate(order)}
    tensors: dict[str, list[str]] = {}
    modules: dict[str, list[str]] = {}
    for parameter, names in tensors_of.items():
        tensors.setdefault(module_of(parameter), []).extend(names)
        for name in names:
            modules.setdefault(name, []).append(module_of(parameter))
    groups, done = [], set()
    for module in sorted(wanted):
        group: list[str] = []
        pending = [module]
        while pending:
            one = pending.pop()
            if one not in done:
                done.add(one)
                group.append(one)
                pending += [other for name in tensors.get(one, ()) for other in modules[name]]
        if group:
            groups.append((group, [name for one in group for name in tensors.get(one, ())]))
    if is_one and groups:
        groups = [([one for group, _ in groups for one in group], [name for _, names in groups for name in names])]
    return [(group, sorted(set(names), key=places.__getitem__)) for group, names in groups]


def _indices(weights: Any, modules: set[str], names: set[str]) -> dict[str, list[tuple[slice, ...]]]:
    """The rectangles of each tensor that the modules need: those of the map, or the whole tensor where the map lacks them."""
    whole = {name for parameter in weights.refused for name in weights.tensors_of.get(parameter, ())}
    needed = names - whole
    indices: dict[str, list[tuple[slice, ...]]] = {}
    for one in weights.pieces:
        if one.tensor in needed and module_of(one.parameter) in modules:
            known = indices.setdefault(one.tensor, [])
            if one.index not in known:
                known.append(one.index)
    for name in names & whole:
        indices[name] = [tuple(slice(0, size) for size in weights._shapes[name])]
    return indices
