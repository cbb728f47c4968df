"""Names of tensors within wrappers of a model, such as those of ``torch.compile``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ._errors import InvalidArgument

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
