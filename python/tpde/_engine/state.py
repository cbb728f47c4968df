"""Functions on whole state dicts, shared by `tpde.torch` and `tpde.numpy`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace as replace_fields
from functools import cached_property
from itertools import compress, islice
from typing import Any, Union

from .. import _tpde
from .._core.arguments import check_kinds, check_needed
from .._core.errors import InvalidArgument, and_more
from .._core.names import first_names, fitting, groups, prefix_of, rank_of, renamed
from .._core.progress import Progress, progress_callback
from .._files.paths import Digest, EncodeReport, StrPath, check_digest, is_path, new_pair_of, open_pair, path_of, report
from .._memory.arrays import check_writable, describe_all, describe_each, device_of, places_of
from .._memory.slices import Slice, checked, describe_saved, device_of_slices, is_slices
from .._memory.tensor import Entry, Memories
from .application import Mode, Outcome, apply_steps, on_device, opened_of, split_steps, told_if_written, unusable_after_errors
from .reader import Reader, bases, state_of


def load(
    pair: Any,
    *,
    base: Any,
    framework: str,
    device: Any,
    digests: bool,
    expect: Digest | None,
    progress: Progress,
    as_integers: bool = False,
) -> dict[str, Any]:
    """Rebuilds all tensors of the target."""
    check_kinds(digests=digests, as_integers=as_integers)
    if hasattr(pair, "_pair"):
        check_digest(pair._pair, expect)
    if hasattr(pair, "_load_again") and framework == "pt" and not is_path(base):
        loaded: dict[str, Any] | None = pair._load_again(None if base is None else state_of(base), device, progress)
        if loaded is not None:
            return loaded
    reader = Reader(pair, base, framework, device, expect=expect, is_read_once=True, as_integers=as_integers)
    return reader.read(digests=digests, progress=progress)


def save(
    tensors: Any,
    path: StrPath,
    *,
    base: Any,
    options: dict[str, Any],
    replace: bool,
    progress: Progress,
    encoder: Any = None,
    base_pair: StrPath | None = None,
) -> EncodeReport:
    """Writes the difference of two state dicts as a pair: on the CPU, or on the CUDA device of ``encoder`` or of the tensors."""
    check_kinds(replace=replace)
    target = held(tensors)
    further: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    before = None if base is None else path_of(base) if is_path(base) else held(base)
    if before is not None and isinstance(target, Mapping):
        rank = rank_of(tensors, base, target)
        target, further = _fitting(target, before, options, rank)
        first = first_names(before, rank) if isinstance(before, Mapping) else {}
        # Files have one name of tied tensors of the base.
        options = {**options, "renamed": {**{name: first[name] for name in target if name in first}, **options["renamed"]}}
    device = device_of_held(target) if encoder is None else encoder.device
    how = {"options": options, "replace": replace}
    name = new_pair_of(path, is_with_base=base is not None)
    encode: Callable[..., str] = _tpde.encode_memory
    if device is not None:
        if isinstance(before, str):
            raise InvalidArgument("the base of tensors on a CUDA device must be on that device too, not in files")
        encode, how = _encode_on(device, encoder, base_pair, how)
    if before is not None and not isinstance(before, str):
        before = describe_held(before, device)
    described = describe_held(target, device)
    with progress_callback(progress, "encode") as callback:
        text = encode(described, name, base=before, progress=callback, **how)
    written = report(EncodeReport, text)
    return replace_fields(written, tied=further, removed=[name for name in written.removed if name not in first])


def _fitting(
    target: Mapping[str, Any], base: Any, options: dict[str, Any], rank: Callable[[str], Any]
) -> tuple[Mapping[str, Any], dict[str, list[str]]]:
    """Tensors of a state dict under the names that the base has. See :func:`fitting`."""
    if not groups(target):
        return target, {}
    if isinstance(base, str):
        names = set(_tpde.tensor_names(base))
    else:
        names = set(base) if isinstance(base, Mapping) else {one.name for one in base}
    return fitting(target, names | set(options["renamed"]), rank)


def _encode_on(
    device: Any, encoder: Any, base_pair: StrPath | None, how: dict[str, Any]
) -> tuple[Callable[..., str], dict[str, Any]]:
    """The function that encodes on a CUDA device, and its arguments. ``base_pair`` is the pair of which the base is the target."""
    from .device import Device

    on_device = Device.of(device)
    on_device.refuse_capture("encoding")
    options = how["options"]
    if options["codec"] is None and options["layout"] is None:
        options = {**options, "codec": "conditioned"}
    known = None if base_pair is None else open_pair(base_pair)
    raw = _tpde.Encoder(on_device.raw) if encoder is None else encoder._raw
    return on_device.with_room(raw.encode), {
        **how,
        "options": options,
        "base_pair": known,
        "stream": on_device.stream().cuda_stream,
    }


#: Tensors by name, or slices of tensors.
Held = Union[Mapping[str, Any], list[Slice]]


def held(value: Any) -> Held:
    """The tensors of a state dict or of a module, or slices."""
    return checked(value) if is_slices(value) else saved_of(value)


def device_of_held(value: Held) -> Any:
    """The CUDA device of the tensors or slices; ``None`` for the CPU."""
    return device_of_slices(value) if isinstance(value, list) else device_of(value.values())


def describe_held(value: Held, device: Any) -> list[Any]:
    """The memory of tensors or slices, on this CUDA device; ``None`` for the CPU."""
    device = "cpu" if device is None else device
    return describe_saved(value, device) if isinstance(value, list) else describe_all(value, device)


def saved_of(value: Any) -> Mapping[str, Any]:
    """The tensors of a state dict, or those that a module saves. A module does not save all of its buffers."""
    if not isinstance(value, Mapping) and hasattr(value, "state_dict"):
        value = value.state_dict()
    return state_of(value)


def refuse_rebuilt(module: Any) -> None:
    """Raises for a module with layers of :mod:`tpde.nn`: their weights are not in memory and cannot be changed in place."""
    nn = sys.modules.get("tpde.nn")
    if nn is None or not hasattr(module, "named_modules"):
        return
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.JITCompressedLinear)]
    if names:
        raise InvalidArgument(
            f"layer {names[0]!r}{and_more(names)} of the module rebuilds its weight, which cannot be changed in place: apply the pair to the "
            "model as it was before tpde.nn.attach, or to its state_dict() in a model without attached layers"
        )


def apply_(
    target: Any,
    pair: Any,
    *,
    base: Any = None,
    mode: Mode,
    strict: bool,
    expect: Digest | None,
    progress: Progress,
    to_inform: Callable[[Mapping[str, Any], list[str]], list[str]],
    inform: Callable[[list[Any]], Callable[[], None]],
    scratch: int | None = None,
) -> Outcome:
    """Changes tensors in place, or overwrites them from ``base``.

    ``to_inform(tensors, written)`` returns the names of the tensors that share memory with those that are written. ``inform`` of these
    tensors returns a function, which is called when they have, or may have, been written.
    """
    check_needed(mode=mode)
    check_kinds(strict=strict, scratch=scratch)
    before, pair = split_steps(pair, base, mode)
    if not strict:
        refuse_rebuilt(target)
    tensors = dict(state_of(target))  # a copy, because another thread may change the caller's dict
    base_tensors = None if base is None or is_path(base) else state_of(base)
    if not is_path(base) and not before and getattr(pair, "_pair", None) is not None:
        check_digest(pair._pair, expect)
        kept = pair._take_kept(tensors, base_tensors, mode if base is None else "out_of_place", strict=strict)
        if kept is not None:
            written = _Written(tensors, lambda: list(kept.versioned), inform)
            overwriting = unusable_after_errors() if base is not None else contextlib.nullcontext()
            with told_if_written(written.tell), overwriting:
                applied = pair._run_again(kept, progress, meanwhile=written.prepare)
            return written.outcome(applied=applied)
    opened, ready, columns, base_columns = _open(pair, tensors, base, base_tensors, expect)
    outline = opened.outline()
    names, is_written = outline.names(), outline.is_written()
    under = renamed(tensors, names)
    if under is not tensors:
        tensors, columns = dict(under), None
    found = [name in tensors for name in names]
    is_complete = all(found)
    if strict and not is_complete:
        _refuse_missing(names, tensors, target)
    if strict and before:
        _check_steps(before, set(names))
    if not is_complete:
        outline, names, is_written = outline.select(found), [*compress(names, found)], [*compress(is_written, found)]
    if not names:
        return "nothing"
    values = [tensors[name] for name in names]
    device = device_of(values)
    on: Any = None if device is None else ready if ready is not None and ready.device == device else on_device(device, pair, opened)
    where = "cpu" if device is None else device
    outputs = (None if columns is None else outline.plain(columns)) or describe_each(outline, values, writable=True, device=where)
    if device is None:
        check_writable(places_of(outputs))
    # Earlier steps may change what the last one does not.
    changed = names if base is not None or before else [*compress(names, is_written)]
    written = _Written(tensors, lambda: to_inform(tensors, changed), inform)
    application = None
    is_checked = mode == "all_checked"
    with told_if_written(written.tell):
        if base is not None:
            bases_of = _base_of(outline, base, on, base_columns)
            applied, application = True, _overwrite(opened, on, outputs, bases_of, written, progress, digests=is_checked)
        elif before or on is None:
            applied = apply_steps(before, opened, on, outputs, progress, scratch, checked=is_checked, digests=True)
        else:
            applied, application = on._apply(outputs, [], mode, progress, meanwhile=written.prepare)
    outcome = written.outcome(applied=applied)
    if applied and application is not None and on is pair:
        pair._remember(application, tensors, base_tensors, versioned=written.names, is_complete=is_complete)
    return outcome


class _Written:
    """The tensors that share memory with those that a call writes. What it takes to inform autograd is found once, which a device's
    work can hide."""

    def __init__(
        self, tensors: Mapping[str, Any], find: Callable[[], list[str]], inform: Callable[[list[Any]], Callable[[], None]]
    ) -> None:
        self._tensors, self._find, self._inform = tensors, find, inform

    @cached_property
    def names(self) -> list[str]:
        """Their names."""
        return self._find()

    @cached_property
    def prepared(self) -> Callable[[], None]:
        """The function to call when they have, or may have, been written."""
        return self._inform([self._tensors[name] for name in self.names])

    def prepare(self) -> None:
        """Finds all that :meth:`tell` needs."""
        _ = self.prepared

    def tell(self) -> None:
        """Informs autograd."""
        self.prepared()

    def outcome(self, *, applied: bool) -> Outcome:
        """The outcome of a call that has ended without an error."""
        if applied:
            self.tell()
        return "applied" if applied else "already_applied"


def _open(
    pair: Any, tensors: Mapping[str, Any], base: Any, base_tensors: Mapping[str, Any] | None, expect: Digest | None
) -> tuple[_tpde.Pair, Any, _tpde.Columns | None, _tpde.Columns | None]:
    """The open pair. If tensors are on a CUDA device, a thread opens it there, while the columns of tensors and base are made."""
    device = device_of([*islice(tensors.values(), 1)])
    if is_path(base) or device is None or getattr(pair, "_pair", None) is not None:
        # The base in files goes with the files of the pair.
        return opened_of(pair if not is_path(base) else path_of(pair), base, expect)[0], None, None, None
    from .device import Opening

    opening = Opening(pair, expect, device)
    columns = opening.columns_of(tensors)
    base_columns = None if base_tensors is None else opening.columns_of(base_tensors)
    return *opening.wait(), columns, base_columns


def _base_of(outline: _tpde.Outline, base: Any, on: Any, columns: _tpde.Columns | None) -> Memories | None:
    """The base tensors; ``None`` if the base is files."""
    if not is_path(base):
        return bases(outline, state_of(base), "cpu" if on is None else on.device, columns)
    if on is not None:
        raise InvalidArgument("the base of tensors on a CUDA device must be on that device too, not in files")
    return None


def _overwrite(
    opened: _tpde.Pair, on: Any, outputs: Memories, base: Memories | None, written: _Written, progress: Progress, *, digests: bool
) -> Any:
    """Rebuilds tensors from a separate base, whatever they hold. Returns the application if one ran on a device."""
    with unusable_after_errors():
        if on is not None:
            return on._rebuild(outputs, base or [], progress, meanwhile=written.prepare)
        with progress_callback(progress, "apply") as callback:
            opened.read(outputs, base=base, digests=digests, progress=callback)
    return None


def _refuse_missing(names: list[str], tensors: Mapping[str, Any], target: Any) -> None:
    """Raises because tensors of the pair are missing."""
    refuse_rebuilt(target)
    missing = [name for name in names if name not in tensors]
    if len(missing) == len(names) and tensors:
        ours = next(iter(tensors))
        raise InvalidArgument(f"no tensor of the pair is among the given ones: the pair has {missing[0]!r}, given is {ours!r}")
    prefix = next(filter(None, map(prefix_of, tensors)), "")
    but = f", some of which begin with {prefix!r}" if prefix else ""
    raise InvalidArgument(
        f"the pair has tensor {missing[0]!r}{and_more(missing)}, which is missing among the given ones{but}; strict=False skips it"
    )


def _check_steps(before: list[Any], last: set[str]) -> None:
    """Raises if a pair before the last one has a tensor that the last one lacks: it would keep its old content."""
    for number, one in enumerate(before, 1):
        opened = one._pair if hasattr(one, "_pair") else open_pair(one)
        for entry in map(Entry._make, opened.tensors()):
            if entry.name not in last:
                raise InvalidArgument(
                    f"pair {number} has tensor {entry.name!r}, which the last pair lacks; strict=False leaves it as it is"
                )
