"""Functions on whole state dicts, shared by `tpde.torch` and `tpde.numpy`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace as replace_fields
from itertools import compress, islice
from typing import Any, Literal, Union

from . import _tpde
from ._arguments import check_kinds, check_needed
from ._entry import Entry
from ._errors import AlreadyApplied, InvalidArgument, Poisoned, TpdeError, and_more
from ._memory import check_writable, describe_all, describe_each, device_of, places_of
from ._open import Reader, bases, state_of
from ._paths import Digest, EncodeReport, StrPath, check_digest, is_path, new_pair_of, open_pair, path_of, report
from ._progress import Progress, progress_callback
from ._slices import Slice, checked, describe_saved, describe_slices, device_of_slices, is_slices
from ._tensor import Memories
from ._tied import first_names, fitting, groups, rank_of
from ._wrapped import prefix_of, renamed

Outcome = Literal["applied", "already_applied", "nothing"]
Mode = Literal["all_checked", "chunk_by_chunk"]


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
    """Tensors of a state dict under the names that the base has. See :func:`_tied.fitting`."""
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
    from ._device import Device

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


@contextlib.contextmanager
def told_if_written(tell: Callable[[], object]) -> Iterator[None]:
    """Calls a function if the block raises an error after which tensors may have been written."""
    try:
        yield
    except BaseException as error:
        # The only error of this package that is raised after a write is `Poisoned`. Other exceptions may be raised at any time.
        if isinstance(error, Poisoned) or not isinstance(error, TpdeError):
            tell()
        raise


@contextlib.contextmanager
def unusable_after_errors() -> Iterator[None]:
    """Errors in the block, in which tensors are overwritten, become `Poisoned`, except those of wrong arguments."""
    try:
        yield
    except InvalidArgument:
        raise
    except TpdeError as error:
        message = f"the tensors are now neither unchanged nor the target: {error._message}"
        raise Poisoned(message, written=[], total=0, _hint=error._hint) from error


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
    before, pair = _split_steps(pair, base, mode)
    if not strict:
        refuse_rebuilt(target)
    tensors = dict(state_of(target))  # a copy, because another thread may change the caller's dict
    path = path_of(base) if is_path(base) else None
    device_pair = pair if path is None and getattr(pair, "_pair", None) is not None else None
    base_tensors = None if base is None or path is not None else state_of(base)
    if device_pair is not None:
        check_digest(device_pair._pair, expect)
        how = mode if base is None else "out_of_place"
        application = None if before else device_pair._take_kept(tensors, base_tensors, how, strict=strict)
        if application is not None:
            return _apply_again(device_pair, application, tensors, inform, progress, overwrites=base is not None)
    opening = None if device_pair is not None or path is not None else _open_ahead(pair, tensors, expect)
    ready = columns = base_columns = None
    if opening is not None:
        columns = opening.columns_of(tensors)
        base_columns = None if base_tensors is None else opening.columns_of(base_tensors)
        opened, ready = opening.wait()
    else:
        opened = device_pair._pair if device_pair is not None else open_pair(pair, path, expect)
    outline = opened.outline()
    names, is_written = outline.names(), outline.is_written()
    under = renamed(tensors, names)
    if under is not tensors:
        tensors, columns = dict(under), None
    missing = [name for name in names if name not in tensors]
    if missing and strict:
        refuse_rebuilt(target)
    if missing and strict and len(missing) == len(names) and tensors:
        ours = next(iter(tensors))
        raise InvalidArgument(f"no tensor of the pair is among the given ones: the pair has {missing[0]!r}, given is {ours!r}")
    if missing and strict:
        prefix = next(filter(None, map(prefix_of, tensors)), "")
        but = f", some of which begin with {prefix!r}" if prefix else ""
        raise InvalidArgument(
            f"the pair has tensor {missing[0]!r}{and_more(missing)}, which is missing among the given ones{but}; strict=False skips it"
        )
    if before and strict:
        _check_steps(before, set(names))
    if missing:
        found = [name in tensors for name in names]
        outline, names, is_written = outline.select(found), [*compress(names, found)], [*compress(is_written, found)]
    if not names:
        return "nothing"
    values = [tensors[name] for name in names]
    device = device_of(values)
    on_device = None if device is None else ready if ready is not None and ready.device == device else _on(device, pair, opened)
    where = "cpu" if device is None else device
    described = None if columns is None else outline.plain(columns)
    outputs = describe_each(outline, values, writable=True, device=where) if described is None else described
    # Earlier steps may change what the last one does not.
    written = names if base is not None or before else [*compress(names, is_written)]
    if device is None:
        check_writable(places_of(outputs))
    prepared: tuple[list[str], Callable[[], None]] | None = None

    def prepare_to_inform() -> tuple[list[str], Callable[[], None]]:
        nonlocal prepared
        if prepared is None:
            versioned = to_inform(tensors, written)
            prepared = versioned, inform([tensors[name] for name in versioned])
        return prepared

    application = None
    with told_if_written(lambda: prepare_to_inform()[1]()):
        if base is not None:
            application = _overwrite(
                opened,
                on_device,
                outline,
                outputs,
                base,
                where,
                progress,
                columns=base_columns,
                digests=mode == "all_checked",
                meanwhile=prepare_to_inform,
            )
            applied = True
        elif before:
            applied = _apply_steps(before, on_device, outputs, progress, scratch)
        elif on_device is not None:
            applied, application = on_device._apply(outputs, [], mode, progress, meanwhile=prepare_to_inform)
        else:
            with progress_callback(progress, "apply") as callback:
                applied = opened.apply_in_place(outputs, checked=mode == "all_checked", progress=callback)
    if applied:
        versioned, on_written = prepare_to_inform()
        on_written()
        if application is not None and on_device is not None and on_device is pair:
            pair._remember(application, tensors, base_tensors, versioned=versioned, is_complete=not missing)
    return "applied" if applied else "already_applied"


def _apply_again(
    pair: Any,
    application: Any,
    tensors: Mapping[str, Any],
    inform: Callable[[list[Any]], Callable[[], None]],
    progress: Progress,
    *,
    overwrites: bool,
) -> Outcome:
    """Runs the application of the last call again. The caller has checked that the tensors are the same."""
    pair._device.refuse_capture("applying a pair")
    on_written: Callable[[], None] | None = None

    def prepare_to_inform() -> Callable[[], None]:
        nonlocal on_written
        if on_written is None:
            on_written = inform([tensors[name] for name in application.versioned])
        return on_written

    with told_if_written(lambda: prepare_to_inform()()), unusable_after_errors() if overwrites else contextlib.nullcontext():
        applied = application.run(pair, progress, meanwhile=prepare_to_inform)
        if overwrites and not applied:
            raise AlreadyApplied("already applied: the base is the target of this pair")
    pair._kept[""] = application
    if applied:
        prepare_to_inform()()
    return "applied" if applied else "already_applied"


def apply_slices(
    slices: Iterable[Slice],
    pair: Any,
    *,
    base: Any,
    mode: Mode,
    expect: Digest | None,
    progress: Progress,
    on_written: Callable[[list[Any]], None],
    scratch: int | None = None,
) -> Outcome:
    """Changes slices in place, or overwrites them from ``base``. ``on_written`` is called with the arrays or tensors if they have, or
    may have, been written."""
    check_needed(mode=mode)
    check_kinds(scratch=scratch)
    before, pair = _split_steps(pair, base, mode)
    slices = checked(slices)
    device_pair = pair if getattr(pair, "_pair", None) is not None else None
    if device_pair is not None:
        check_digest(device_pair._pair, expect)
    opened = device_pair._pair if device_pair is not None else open_pair(pair, path_of(base) if is_path(base) else None, expect)
    entries = {entry.name: entry for entry in map(Entry._make, opened.tensors())}
    device = device_of_slices(slices)
    memories = describe_slices(slices, entries, writable=True, device="cpu" if device is None else device)
    if not memories:
        return "nothing"
    if device is None:
        check_writable(places_of([memory for memory, *_ in memories]))
    read_from = None
    if base is not None:
        read_from = _base_of_slices(opened, [entries[one.name] for one in slices], base, device)
    on_device = None if device is None else _on(device, pair, opened)
    if on_device is None and device_pair is not None:
        raise InvalidArgument(f"the pair is on {device_pair.device}, the slices are on the CPU")
    tensors = [one.tensor for one in slices]
    with told_if_written(lambda: on_written(tensors)), unusable_after_errors() if base is not None else contextlib.nullcontext():
        if before:
            applied = _apply_steps(before, on_device, memories, progress, scratch)
        elif on_device is not None:
            applied = _apply_on_device(on_device, memories, read_from, mode, progress, is_kept=on_device is pair)
        else:
            with progress_callback(progress, "apply") as callback:
                if base is None:
                    applied = opened.apply_slices_in_place(memories, checked=mode == "all_checked", digests=True, progress=callback)
                else:
                    applied = True
                    opened.read_slices(memories, base=read_from, digests=mode == "all_checked", progress=callback)
    if applied:
        on_written(tensors)
    return "applied" if applied else "already_applied"


def _apply_on_device(
    pair: Any, slices: list[Any], base: list[Any] | Memories | None, mode: Mode, progress: Progress, *, is_kept: bool
) -> bool:
    """Changes slices on a device, or rebuilds them from ``base``, in one launch. False if they already were the target."""
    if base is None:
        applied, application = pair._apply(slices, [], mode, progress)
    else:
        applied, application = True, pair._rebuild(slices, base, progress)
    if applied and is_kept:
        pair._remember(application, None, None)
    return bool(applied)


def _base_of_slices(pair: _tpde.Pair, entries: list[Entry], base: Any, device: Any) -> list[Any] | Memories | None:
    """The base tensors of these entries, or the slices of base tensors that the caller holds; ``None`` if the base is files."""
    if is_path(base):
        if device is not None:
            raise InvalidArgument("the base of slices on a CUDA device must be on that device too, not in files")
        return None
    where = "cpu" if device is None else device
    if not is_slices(base):
        return bases(pair.outline([entry.name for entry in entries]), state_of(base), where)
    slices = checked(base)
    by_base_name = {name: entry._replace(dtype=dtype, shape=shape) for entry in entries for name, dtype, shape in entry.bases}
    for entry in by_base_name.values():
        if entry.base_kind == "prefix":
            raise InvalidArgument(f"tensor {entry.name!r} changes its number of rows: its base must be a whole tensor")
    return describe_slices([one for one in slices if one.name in by_base_name], by_base_name, device=where)


def _split_steps(pair: Any, base: Any, mode: Mode) -> tuple[list[Any], Any]:
    """The pairs before the last one, and the last one."""
    if not isinstance(pair, (list, tuple)):
        return [], pair
    if not pair:
        raise InvalidArgument("no pair is given: expected a pair, or a list of at least one")
    if len(pair) > 1 and base is not None:
        raise InvalidArgument("several pairs are applied in place: expected no base")
    if len(pair) > 1 and mode != "all_checked":
        raise InvalidArgument(f"several pairs are checked before the first write: expected mode 'all_checked', not {mode!r}")
    return [*pair[:-1]], pair[-1]


def _check_steps(before: list[Any], last: set[str]) -> None:
    """Raises if a pair before the last one has a tensor that the last one lacks: it would keep its old content."""
    for number, one in enumerate(before, 1):
        opened = one._pair if hasattr(one, "_pair") else open_pair(one)
        for entry in map(Entry._make, opened.tensors()):
            if entry.name not in last:
                raise InvalidArgument(
                    f"pair {number} has tensor {entry.name!r}, which the last pair lacks; strict=False leaves it as it is"
                )


def _apply_steps(before: list[Any], on_device: Any, memories: Any, progress: Progress, scratch: int | None) -> bool:
    """Applies the pairs ``before`` and the one that is on the device. False if the memory already was the last target."""
    if on_device is None:
        raise InvalidArgument("several pairs change tensors on a CUDA device only: fold the pairs for tensors on the CPU")
    steps = [_on(on_device.device, one, one._pair if hasattr(one, "_pair") else open_pair(one)) for one in before]
    return bool(on_device._apply_after(steps, memories, progress, scratch=scratch))


def _open_ahead(pair: Any, tensors: Mapping[str, Any], expect: Digest | None) -> Any:
    """Lets a thread open the pair on the CUDA device of the first tensor. ``None`` if that is on the CPU."""
    device = device_of([*islice(tensors.values(), 1)])
    if device is None:
        return None
    from ._device import Opening

    return Opening(pair, expect, device)


def _on(device: Any, pair: Any, opened: _tpde.Pair) -> Any:
    """The opened pair on this device."""
    from ._device import DevicePair

    if not isinstance(pair, DevicePair):
        return DevicePair._of_opened(pair, opened, device)
    if pair.device != device:
        raise InvalidArgument(f"the pair is on {pair.device}, the tensors are on {device}")
    return pair


def _overwrite(
    opened: _tpde.Pair,
    on_device: Any,
    outline: _tpde.Outline,
    outputs: Memories,
    base: Any,
    where: Any,
    progress: Progress,
    *,
    columns: _tpde.Columns | None,
    digests: bool,
    meanwhile: Callable[[], object],
) -> Any:
    """Rebuilds tensors from a separate base, whatever their contents. Returns the application if one ran on a device, which has called
    ``meanwhile``."""
    base_memories = None
    if not is_path(base):
        base_memories = bases(outline, state_of(base), where, columns)
    elif on_device is not None:
        raise InvalidArgument("the base of tensors on a CUDA device must be on that device too, not in files")
    with unusable_after_errors():
        if on_device is not None:
            return on_device._rebuild(outputs, base_memories or [], progress, meanwhile=meanwhile)
        with progress_callback(progress, "apply") as callback:
            opened.read(outputs, base=base_memories, digests=digests, progress=callback)
    return None
