"""Names of tensors within wrappers of a model, such as those of ``torch.compile``."""

from __future__ import annotations

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


def _plain(name: str) -> str:
    """The name without prefixes, and without those of modules that were compiled on their own."""
    return name[len(prefix_of(name)) :].replace("._orig_mod.", ".")


def renamed(tensors: Mapping[str, T], names: Iterable[str]) -> Mapping[str, T]:
    """The tensors under these names, where names differ in prefixes of wrappers alone. Equal names come first.

    Raises:
        InvalidArgument: Several tensors, or several names, are the same without prefixes.
    """
    missing = [name for name in names if name not in tensors]
    if not missing:
        return tensors
    wanted = {*names} - {*missing}
    by_plain: dict[str, list[str]] = {}
    for own in tensors:
        if own not in wanted:
            by_plain.setdefault(_plain(own), []).append(own)
    taken: dict[str, str] = {}
    for name in missing:
        found = by_plain.get(_plain(name), [])
        if not found:
            continue
        if len(found) > 1 or found[0] in taken:
            several, of = (found, "given tensors") if len(found) > 1 else ([taken[found[0]], name], "tensors of the pair")
            raise InvalidArgument(
                f"{of} {several[0]!r} and {several[1]!r} differ in the prefix of a wrapper alone: expected one, with the pair's name"
            )
        taken[found[0]] = name
    return {taken.get(own, own): tensor for own, tensor in tensors.items()} if taken else tensors
