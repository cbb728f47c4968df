"""Functions on whole state dicts, shared by `tpde.torch` and `tpde.numpy`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from . import _tpde
from ._entry import Entry
from ._errors import AlreadyApplied, Misuse, Poisoned, TpdeError
from ._memory import describe_all, describe_each, device_of
from ._open import Reader, bases, state_of
from ._paths import EncodeReport, StrPath, is_path, path_of, report
from ._progress import Progress, told
from ._tensor import Memory

Outcome = Literal["applied", "already_applied", "nothing"]
Mode = Literal["all_checked", "chunk_by_chunk"]


def load(pair: Any, *, base: Any, framework: str, device: Any, digests: bool, progress: Progress) -> dict[str, Any]:
    """All tensors of the target."""
    if hasattr(pair, "_load_again") and framework == "pt" and not is_path(base):
        loaded: dict[str, Any] | None = pair._load_again(None if base is None else state_of(base), device, progress)
        if loaded is not None:
            return loaded
    reader = Reader(pair, base, framework, device)
    return reader.read(list(reader.entries), digests=digests, progress=progress)


def save(
    tensors: Any, path: StrPath, *, base: Any, options: dict[str, Any], replace: bool, progress: Progress
) -> EncodeReport:
    """Writes the difference of two state dicts as a pair."""
    if base is not None:
        base = path_of(base) if is_path(base) else describe_all(saved_of(base))
    with told(progress, "encode") as tell:
        text = _tpde.encode_memory(base, describe_all(saved_of(tensors)), path_of(path), options, replace, tell)
    return report(EncodeReport, text)


def saved_of(value: Any) -> Mapping[str, Any]:
    """The tensors of a state dict, or those that a module saves, which excludes some buffers."""
    if not isinstance(value, Mapping) and hasattr(value, "state_dict"):
        refuse_rebuilt(value)
        value = value.state_dict()
    return state_of(value)


def refuse_rebuilt(module: Any) -> None:
    """Raises for a module with layers of :mod:`tpde.nn`: it lacks their weights, which would be omitted silently."""
    nn = sys.modules.get("tpde.nn")
    if nn is None or not hasattr(module, "named_modules"):
        return
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.JITCompressedLinear)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise Misuse(
            f"layer {names[0]!r}{more} of the module rebuilds its weight, which is not among the module's tensors: give a dict "
            "with the weight of each such layer, layer.weight, or the model as it was before tpde.nn.attach"
        )


def apply_(
    target: Any,
    pair: Any,
    *,
    base: Any = None,
    mode: Mode,
    strict: bool,
    progress: Progress,
    written: Callable[[Mapping[str, Any], list[Entry]], list[str]],
    again: Callable[[list[Any]], None],
) -> Outcome:
    """Change tensors in place, or overwrite them from ``base``. Calls ``written`` whenever tensors may have been written; it returns
    the names that it notified. Calls ``again`` with these tensors when they are written once more."""
    if mode not in ("all_checked", "chunk_by_chunk"):
        raise Misuse(f"unknown mode {mode!r}: expected 'all_checked' or 'chunk_by_chunk'")
    if not strict:
        refuse_rebuilt(target)
    tensors = dict(state_of(target))  # a copy: others may change their dict meanwhile
    path = path_of(base) if is_path(base) else None
    kept = getattr(pair, "_pair", None)  # of a DevicePair
    bases_of = None if base is None or path is not None else state_of(base)
    if kept is not None and path is None:
        ready = pair._again(tensors, bases_of, mode if base is None else "out_of_place", strict)
        if ready is not None:
            return _apply_again(pair, ready, tensors, again, base is not None, progress)
    opened = kept if kept is not None and path is None else _tpde.Pair(path_of(pair), path)
    entries = pair._entries() if opened is kept else list(map(Entry._make, opened.tensors()))
    missing = [entry.name for entry in entries if entry.name not in tensors]
    if missing and strict:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Misuse(f"the pair changes tensor {missing[0]!r}{more}, which is missing (strict=False skips it)")
    entries = [entry for entry in entries if entry.name in tensors]
    if not entries:
        return "nothing"
    device = device_of(tensors[entry.name] for entry in entries)
    on_device = None if device is None else _on(device, pair, opened)
    where = "cpu" if device is None else device
    names, expected = [entry.name for entry in entries], [(entry.dtype, entry.shape) for entry in entries]
    found = describe_each(names, [tensors[name] for name in names], expected, writable=True, device=where)
    if base is not None:
        entries = [entry._replace(changes=True) for entry in entries]
    ready = None
    try:
        if base is not None:
            applied, ready = True, _overwrite(opened, on_device, entries, found, base, mode == "all_checked", where, progress)
        elif on_device is not None:
            applied, ready = on_device._apply(found, [], mode, progress)
        else:
            with told(progress, "apply") as tell:
                applied = opened.apply_in_place(found, mode == "all_checked", tell)
    except BaseException as error:
        # Of this package's errors, only Poisoned comes after a write. Any other exception may come at any time.
        if isinstance(error, Poisoned) or not isinstance(error, TpdeError):
            written(tensors, entries)
        raise
    if applied:
        to_tell = written(tensors, entries)
        if ready is not None and on_device is not None and on_device is pair:
            pair._remember(ready, tensors, bases_of, told=to_tell, is_complete=not missing)
    return "applied" if applied else "already_applied"


def _apply_again(
    pair: Any, ready: Any, tensors: Mapping[str, Any], again: Callable[[list[Any]], None], overwrites: bool, progress: Progress
) -> Outcome:
    """Repeats the previous call, which has checked the tensors."""
    pair._device.refuse_capture("applying a pair")
    told = [tensors[name] for name in ready.told]
    try:
        try:
            applied = ready.run(pair, progress)
            if overwrites and not applied:
                raise AlreadyApplied("already applied: the base is the target of this pair")
        except TpdeError as error:
            if overwrites and not isinstance(error, Misuse):
                raise _spoilt(error) from error
            raise
    except BaseException as error:
        if isinstance(error, Poisoned) or not isinstance(error, TpdeError):
            again(told)
        raise
    pair._kept[""] = ready
    if applied:
        again(told)
    return "applied" if applied else "already_applied"


def _spoilt(error: TpdeError) -> Poisoned:
    return Poisoned(f"the tensors are now neither unchanged nor the target: {error}", written=[], total=0)


def _on(device: Any, pair: Any, opened: _tpde.Pair) -> Any:
    """The opened pair on this device."""
    from ._device import DevicePair

    if not isinstance(pair, DevicePair):
        return DevicePair._of_opened(pair, opened, device)
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
) -> Any:
    """Rebuild tensors from a base elsewhere, whatever they contain. Returns the application, on a device."""
    given = None
    if not is_path(base):
        given = bases(entries, state_of(base), where)
    elif on_device is not None:
        raise Misuse("the base of tensors on a CUDA device must lie there too, not in files")
    try:
        if on_device is not None:
            return on_device._rebuild(found, given or [], progress)
        with told(progress, "apply") as tell:
            opened.read(found, given, digests, tell)
    except Misuse:
        raise
    except TpdeError as error:
        raise _spoilt(error) from error
    return None
