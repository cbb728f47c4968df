"""What `tpde.torch` and `tpde.numpy` share: whole state dicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from . import _tpde
from ._errors import Misuse, Poisoned, TpdeError
from ._memory import describe, describe_all
from ._open import Entry, Reader, state_of
from ._paths import EncodeReport, StrPath, options, report
from ._progress import Progress, told

Outcome = Literal["applied", "already_applied"]
Mode = Literal["all_checked", "chunk_by_chunk"]


def load(pair: StrPath, base: Any, framework: str, device: Any, digests: bool, progress: Progress) -> dict[str, Any]:
    """All tensors of the target."""
    reader = Reader(pair, base, framework, device)
    return reader.read(list(reader.entries), digests, progress)


def save(base: Any, target: Any, path: StrPath, replace: bool, progress: Progress, **how: Any) -> EncodeReport:
    """The difference of two state dicts as a pair."""
    if base is not None and not isinstance(base, (str, os.PathLike)):
        base = describe_all(saved_of(base))
    with told(progress, "encode") as tell:
        text = _tpde.encode_memory(base, describe_all(saved_of(target)), path, options(**how), replace, tell)
    return report(EncodeReport, text)


def saved_of(value: Any) -> Mapping[str, Any]:
    """The tensors of a state dict, or those that a module saves: not all of its buffers."""
    if not isinstance(value, Mapping) and hasattr(value, "state_dict"):
        value = value.state_dict()
    return state_of(value)


def apply_(
    target: Any,
    pair: StrPath,
    mode: Mode,
    strict: bool,
    progress: Progress,
    written: Callable[[Mapping[str, Any], list[Entry]], None],
) -> Outcome:
    """Change tensors where they lie, and tell ``written`` whenever some may have been."""
    if mode not in ("all_checked", "chunk_by_chunk"):
        raise Misuse(f"no mode {mode!r}: 'all_checked' and 'chunk_by_chunk' are known")
    tensors = state_of(target)
    opened = _tpde.Pair(pair)
    entries = [Entry(*entry) for entry in opened.tensors()]
    missing = [entry.name for entry in entries if entry.name not in tensors]
    if missing and strict:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Misuse(f"the pair changes tensor {missing[0]!r}{more}, which is not there (strict=False leaves it)")
    entries = [entry for entry in entries if entry.name in tensors]
    found = [describe(entry.name, tensors[entry.name], (entry.dtype, entry.shape), writable=True) for entry in entries]
    with told(progress, "apply") as tell:
        try:
            applied = opened.apply_in_place(found, mode == "all_checked", tell)
        except BaseException as error:
            # Of our own errors, one alone comes after a write; anything else may have come at any time.
            if isinstance(error, Poisoned) or not isinstance(error, TpdeError):
                written(tensors, entries)
            raise
    if applied:
        written(tensors, entries)
    return "applied" if applied else "already_applied"
