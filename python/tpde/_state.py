"""What `tpde.torch` and `tpde.numpy` share: whole state dicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from . import _tpde
from ._errors import Misuse, Poisoned, TpdeError
from ._memory import Memory, describe, describe_all, device_of
from ._open import Entry, Reader, bases, state_of
from ._paths import EncodeReport, StrPath, options, report
from ._progress import Progress, told

Outcome = Literal["applied", "already_applied"]
Mode = Literal["all_checked", "chunk_by_chunk"]


def load(pair: Any, base: Any, framework: str, device: Any, digests: bool, progress: Progress) -> dict[str, Any]:
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
    pair: Any,
    mode: Mode,
    strict: bool,
    progress: Progress,
    written: Callable[[Mapping[str, Any], list[Entry]], None],
    base: Any = None,
) -> Outcome:
    """Change tensors where they lie, or overwrite them from ``base``, and tell ``written`` whenever some may have been."""
    if mode not in ("all_checked", "chunk_by_chunk"):
        raise Misuse(f"no mode {mode!r}: 'all_checked' and 'chunk_by_chunk' are known")
    tensors = state_of(target)
    path = base if isinstance(base, (str, os.PathLike)) else None
    kept = getattr(pair, "_pair", None)  # that of a DevicePair
    opened = kept if kept is not None and path is None else _tpde.Pair(pair, path)
    entries = [Entry(*entry) for entry in opened.tensors()]
    missing = [entry.name for entry in entries if entry.name not in tensors]
    if missing and strict:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Misuse(f"the pair changes tensor {missing[0]!r}{more}, which is not there (strict=False leaves it)")
    entries = [entry for entry in entries if entry.name in tensors]
    device = device_of(tensors[entry.name] for entry in entries)
    on_device = None if device is None else _on(device, pair)
    where = "cpu" if device is None else device
    found = [
        describe(entry.name, tensors[entry.name], (entry.dtype, entry.shape), writable=True, device=where) for entry in entries
    ]
    if base is not None:
        entries = [entry._replace(changes=True) for entry in entries]
    try:
        if base is not None:
            applied = _overwrite(opened, on_device, entries, found, base, mode == "all_checked", where, progress)
        elif on_device is not None:
            applied = on_device._apply(found, [], mode, progress)
        else:
            with told(progress, "apply") as tell:
                applied = opened.apply_in_place(found, mode == "all_checked", tell)
    except BaseException as error:
        # Of our own errors, one alone comes after a write; anything else may have come at any time.
        if isinstance(error, Poisoned) or not isinstance(error, TpdeError):
            written(tensors, entries)
        raise
    if applied:
        written(tensors, entries)
    return "applied" if applied else "already_applied"


def _on(device: Any, pair: Any) -> Any:
    """The pair on this device."""
    from ._device import DevicePair

    if not isinstance(pair, DevicePair):
        return DevicePair(pair, device, payloads="file")
    if pair.device != device:
        raise Misuse(f"the pair is on {pair.device}, the tensors are on {device}")
    return pair


def _overwrite(
    opened: _tpde.Pair,
    on_device: Any,
    entries: list[Entry],
    found: list[Memory],
    base: Any,
    digests: bool,
    where: Any,
    progress: Progress,
) -> bool:
    """Rebuild tensors from a base elsewhere, whatever they hold."""
    given = None
    if not isinstance(base, (str, os.PathLike)):
        given = bases(entries, state_of(base), where)
    elif on_device is not None:
        raise Misuse("the base of tensors on a CUDA device must lie there too, not in files")
    try:
        if on_device is not None:
            on_device._rebuild(found, given or [], progress)
        else:
            with told(progress, "apply") as tell:
                opened.read(found, given, digests, tell)
    except Misuse:
        raise
    except TpdeError as error:
        message = f"the tensors are neither what they were nor the target now: {error}"
        raise Poisoned(message, written=[], total=0) from error
    return True
