"""Names of tensors. Tied tensors are several names of one memory. A state dict has all of these names, the files of a model have one.
Wrappers of a model, such as those of ``torch.compile``, put prefixes before names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from .errors import InvalidArgument


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


T = TypeVar("T")
#: What `torch.compile`, `DistributedDataParallel` and PEFT put before names.
PREFIXES = ("_orig_mod.", "module.", "base_model.model.")


def prefix_of(name: str) -> str:
    """The prefixes that a name begins with."""
    rest = name
    while prefix := next((one for one in PREFIXES if rest.startswith(one)), ""):
        rest = rest[len(prefix) :]
    return name[: len(name) - len(rest)]


def _common_prefix(names: Iterable[str]) -> str:
    """The prefixes that all names begin with: a wrapper of a model puts its prefix before each name."""
    return prefix_of(os.path.commonprefix([prefix_of(name) for name in names]))


def _plain(name: str, prefix: str) -> str:
    """The name without this prefix, and without those of modules that were compiled on their own."""
    return name[len(prefix) :].replace("._orig_mod.", ".")


def renamed(tensors: Mapping[str, T], names: Iterable[str]) -> Mapping[str, T]:
    """The tensors under these names, where names differ in prefixes of wrappers alone. A prefix is one of a wrapper if all given names
    have it. If some names are equal, none has one.

    Raises:
        InvalidArgument: Several tensors, or several names, are the same without prefixes.
    """
    names = [*names]
    missing = [name for name in names if name not in tensors]
    if not missing:
        return tensors
    wanted = {*names} - {*missing}
    own_prefix, prefix = ("", "") if wanted else (_common_prefix(tensors), _common_prefix(names))
    by_plain: dict[str, list[str]] = {}
    for own in tensors:
        if own not in wanted:
            by_plain.setdefault(_plain(own, own_prefix), []).append(own)
    taken: dict[str, str] = {}
    for name in missing:
        found = by_plain.get(_plain(name, prefix), [])
        if not found:
            continue
        if len(found) > 1 or found[0] in taken:
            several, of = (found, "given tensors") if len(found) > 1 else ([taken[found[0]], name], "tensors of the pair")
            raise InvalidArgument(
                f"{of} {several[0]!r} and {several[1]!r} differ in the prefix of a wrapper alone: expected one, with the pair's name"
            )
        taken[found[0]] = name
    return {taken.get(own, own): tensor for own, tensor in tensors.items()} if taken else tensors


def matching_names(names: Iterable[str], tensors: str | Iterable[str] | Callable[[str], bool]) -> set[str]:
    """The names that match a pattern, one of several patterns, or a function of the name. Each pattern must match a name."""
    if callable(tensors):
        return {name for name in names if tensors(name)}
    wanted: set[str] = set()
    for pattern in [tensors] if isinstance(tensors, str) else tensors:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise InvalidArgument(f"no tensor of the pair matches {pattern!r}")
        wanted |= found
    return wanted
