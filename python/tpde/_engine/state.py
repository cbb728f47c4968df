"""Functions on whole state dicts, shared by `tpde.torch` and `tpde.numpy`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace as replace_fields
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
from .application import Change, Mode, Outcome, Written, base_of, on_device, opened_of, split_steps
from .reader import Reader, state_of


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
    device = device_of_slices(target) if isinstance(target, list) else device_of(target.values())
    device = device if encoder is None else encoder.device
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
    scratch: int | None = None,
    progress: Progress,
) -> Outcome:
    """Changes tensors in place, or overwrites them from ``base``."""
    check_needed(mode=mode)
    check_kinds(strict=strict, scratch=scratch)
    before, pair = split_steps(pair, base, mode)
    if not strict:
        refuse_rebuilt(target)
    tensors: Mapping[str, Any] = dict(state_of(target))  # a copy, because another thread may change the caller's dict
    base_tensors = None if base is None or is_path(base) else state_of(base)
    how = mode if base is None else "out_of_place"
    if not is_path(base) and not before and getattr(pair, "_pair", None) is not None:
        check_digest(pair._pair, expect)
        if (kept := pair._take_kept(how, base_tensors, tensors, strict=strict)) is not None:
            known = Written({name: tensors[name] for name in kept.versioned})
            return known.by(lambda: pair._run_again(kept, progress, meanwhile=lambda: known.tell), overwrites=base is not None)
    opened, ready, columns, base_columns = _open(pair, tensors, base, base_tensors, expect)
    steps = [(opened_of(one), one) for one in before]
    whole = opened.outline()
    outline, names, under = _resolved(whole, steps, tensors, target, strict=strict)
    if not names:
        return "nothing"
    values = [under[name] for name in names]
    device = device_of(values)
    on: Any = None if device is None else ready if ready is not None and ready.device == device else on_device(device, pair, opened)
    plain = None if columns is None or under is not tensors else outline.plain(columns)
    outputs = plain or describe_each(outline, values, writable=True, device="cpu" if device is None else device)
    if device is None:
        check_writable(places_of(outputs))
    # Earlier steps may change what the last one does not.
    is_written = [True] * len(names) if base is not None or before else outline.is_written()
    written = Written(under, [*compress(names, is_written)])
    of_base = None if base is None else base_of("tensors", outline, base, on, base_columns)
    change = Change(opened, on, outputs, how, of_base, steps, base is None or mode == "all_checked", scratch)

    def work() -> bool:
        applied, application = change.run(progress, meanwhile=lambda: written.tell)
        if applied and application is not None and on is pair:
            pair._remember(application, under, base_tensors, versioned=written.names, is_complete=outline is whole)
        return applied

    return written.by(work, overwrites=base is not None)


def _resolved(
    outline: _tpde.Outline, before: list[tuple[_tpde.Pair, Any]], tensors: Mapping[str, Any], target: Any, *, strict: bool
) -> tuple[_tpde.Outline, list[str], Mapping[str, Any]]:
    """The tensors of a pair that are among the given ones, their names, and all given ones under the pair's names."""
    names = outline.names()
    tensors = renamed(tensors, names)
    found = [name in tensors for name in names]
    if not all(found):
        if strict:
            _refuse_missing(names, tensors, target)
        return outline.select(found), [*compress(names, found)], tensors
    for number, (one, _) in enumerate(before if strict else [], 1):
        if further := {*one.outline().names()} - {*names}:
            name = min(further)
            raise InvalidArgument(f"pair {number} has tensor {name!r}, which the last pair lacks; strict=False leaves it as it is")
    return outline, names, tensors


def _open(
    pair: Any, tensors: Mapping[str, Any], base: Any, base_tensors: Mapping[str, Any] | None, expect: Digest | None
) -> tuple[_tpde.Pair, Any, _tpde.Columns | None, _tpde.Columns | None]:
    """The open pair. If tensors are on a CUDA device, a thread opens it there, while the columns of tensors and base are made."""
    device = device_of([*islice(tensors.values(), 1)])
    if is_path(base) or device is None or getattr(pair, "_pair", None) is not None:
        # The base in files goes with the files of the pair.
        return opened_of(pair if not is_path(base) else path_of(pair), base, expect), None, None, None
    from .device import open_ahead

    opened, ready, (columns, base_columns) = open_ahead(pair, expect, device, tensors, base_tensors)
    return opened, ready, columns, base_columns


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
