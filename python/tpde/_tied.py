"""Tied tensors: several names of one memory. A state dict has all names, the files of its model have one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any


def groups(tensors: Mapping[str, Any]) -> list[list[str]]:
    """Names of equal memory, elements and layout, for each memory with several names. Views that only overlap are not tied."""
    names: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        place = _place(tensor)
        if place is not None:
            names.setdefault(place, []).append(name)
    return [found for found in names.values() if len(found) > 1]


def _place(tensor: Any) -> Any:
    """Where the elements of a tensor are; ``None`` if it has no elements, or no memory that can be compared."""
    try:
        if hasattr(tensor, "data_ptr"):
            if tensor.numel() == 0 or tensor.device.type == "meta":
                return None
            flags = tensor.is_conj(), tensor.is_neg()
            return tensor.data_ptr(), str(tensor.device), tuple(tensor.shape), tensor.stride(), tensor.dtype, flags
        if tensor.size == 0:
            return None
        return tensor.ctypes.data, "cpu", tensor.shape, tensor.strides, tensor.dtype.str
    except Exception:  # neither a tensor nor an array, or sparse, quantised, or a subclass: the check of each tensor says why
        return None


def fitting(
    tensors: Mapping[str, Any], names_of_base: Collection[str], rank: Callable[[str], Any]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Tensors under the names that a base has, and the names that were left out, by a kept one: those that the base lacks, if it has
    another name of their memory. If it has no name of a memory, all are kept.

    Args:
        tensors: The target.
        names_of_base: Names of the base's tensors, and of tensors that have a base by ``renamed``.
        rank: The order in which names of one memory are preferred.
    """
    further: dict[str, list[str]] = {}
    for group in groups(tensors):
        kept = [name for name in group if name in names_of_base]
        if kept and len(kept) < len(group):
            further[min(kept, key=rank)] = [name for name in group if name not in kept]
    left_out = {name for names in further.values() for name in names}
    return {name: one for name, one in tensors.items() if name not in left_out}, further


def first_names(tensors: Mapping[str, Any], rank: Callable[[str], Any]) -> dict[str, str]:
    """The preferred name of the memory, for each other name of tied tensors."""
    found = {}
    for group in groups(tensors):
        first = min(group, key=rank)
        found.update({name: first for name in group if name != first})
    return found


def rank_of(*sources: Any) -> Callable[[str], Any]:
    """The order in which the files of a model prefer names. Transformers writes the name that ``_tied_weights_keys`` does not list;
    safetensors the first one in alphabetical order. For dicts, the order is theirs."""
    listed = [pattern for one in sources if hasattr(one, "named_modules") for pattern in _listed(one)]
    is_plain_module = not listed and any(hasattr(one, "named_modules") for one in sources)
    order: dict[str, int] = {}
    for one in sources:
        for name in one if isinstance(one, Mapping) else ():
            order.setdefault(name, len(order))

    def rank(name: str) -> Any:
        return any(one.search(name) for one in listed), 0 if is_plain_module else order.get(name, 0), name

    return rank


def _listed(module: Any) -> Iterable[re.Pattern[str]]:
    """Patterns of the names that Transformers leaves out of its files."""
    for prefix, one in module.named_modules():
        keys = getattr(one, "_tied_weights_keys", None)
        for key in keys if isinstance(keys, (list, tuple, set, Mapping)) else ():
            try:
                yield re.compile((re.escape(prefix) + r"\." if prefix else "^") + key)
            except (re.error, TypeError):
                continue
