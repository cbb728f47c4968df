"""Applies pairs to slices in memory. Applications to whole tensors share parts of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, Union

from .. import _tpde
from .._core.arguments import check_kinds, check_needed
from .._core.errors import InvalidArgument, Poisoned, TpdeError
from .._core.progress import Progress, progress_callback
from .._files.paths import Digest, check_digest, is_path, open_pair, path_of
from .._memory.arrays import check_writable, is_torch, places_of
from .._memory.slices import checked, describe_slices, device_of_slices, is_slices
from .._memory.tensor import Entry, Memories, SliceMemory
from .reader import bases, state_of

Outcome = Literal["applied", "already_applied", "nothing"]
Mode = Literal["all_checked", "chunk_by_chunk"]


class Written:
    """Tensors that a call may write. Autograd is informed if they have, or may have, been written.

    Args:
        tensors: Tensors, or arrays, by name. Without ``changed``, either tensors or arrays.
        changed: Those of these names whose memory is written; all tensors in such memory count. ``None``: all of ``tensors``.
    """

    def __init__(self, tensors: Mapping[Any, Any], changed: list[str] | None = None) -> None:
        self._tensors, self._changed = tensors, changed

    @cached_property
    def names(self) -> list[Any]:
        """Names of the tensors that share memory with those that are written."""
        if self._changed is None or not any(map(is_torch, self._tensors.values())):
            return list(self._tensors)
        from .._memory.torch_tensors import in_storages_of

        return in_storages_of(self._tensors, self._changed)

    @cached_property
    def tell(self) -> Callable[[], None]:
        """Informs autograd. What that takes is found once, which the work of a device can hide."""
        tensors = [*map(self._tensors.__getitem__, self.names)]
        if not tensors or not is_torch(tensors[0]):
            return lambda: None
        from .._memory.torch_tensors import version_raiser

        return version_raiser(tensors)

    def by(self, work: Callable[[], bool], *, overwrites: bool) -> Outcome:
        """Calls a function that changes the tensors, or ``overwrites`` them, and returns whether it did."""
        try:
            applied = work()
        except TpdeError as error:
            is_unusable = overwrites and not isinstance(error, InvalidArgument)
            if is_unusable or isinstance(error, Poisoned):  # no other error is raised after a write
                self.tell()
            if not is_unusable:
                raise
            message = f"the tensors are now neither unchanged nor the target: {error._message}"
            raise Poisoned(message, written=[], total=0, _hint=error._hint) from error
        except BaseException:  # at any time
            self.tell()
            raise
        if applied:
            self.tell()
        return "applied" if applied else "already_applied"


def split_steps(pair: Any, base: Any, mode: Mode) -> tuple[list[Any], Any]:
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


def opened_of(pair: Any, base: Any = None, expect: Digest | None = None) -> _tpde.Pair:
    """The open pair, which must have the digest ``expect``, with the base if that is files."""
    opened: _tpde.Pair | None = getattr(pair, "_pair", None)
    if opened is None:
        return open_pair(pair, path_of(base) if is_path(base) else None, expect)
    check_digest(opened, expect)
    return opened


def on_device(device: Any, pair: Any, opened: _tpde.Pair, payloads: Any = "file") -> Any:
    """The opened pair on this device."""
    from .device import DevicePair

    if not isinstance(pair, DevicePair):
        return DevicePair._of_opened(pair, opened, device, payloads)
    if pair.device != device:
        raise InvalidArgument(f"the pair is on {pair.device}, the tensors are on {device}")
    return pair


class Change(NamedTuple):
    """What a call changes, and by what: all that needs no writing is done."""

    pair: _tpde.Pair
    #: The pair on a device; ``None`` for memory of the CPU.
    on: Any
    memories: Union[Memories, list[SliceMemory]]
    #: A :data:`Mode`, or ``"out_of_place"``.
    mode: str
    #: The base, out of place; ``None`` if it is files.
    base: Union[Memories, list[SliceMemory], None] = None
    #: The pairs before the last one, open, and as they were passed.
    before: Sequence[tuple[_tpde.Pair, Any]] = ()
    digests: bool = True
    scratch: int | None = None
    #: The application on a device, if it is planned.
    planned: Any = None

    def run(self, progress: Progress, meanwhile: Callable[[], object] | None = None) -> tuple[bool, Any]:
        """Changes the memory. Returns false if it already was the last target, and the application that ran on a device."""
        on = self.on
        if on is not None and self.before:
            steps = [on_device(on.device, pair, opened) for opened, pair in self.before]
            return on._apply_after(steps, self.memories, progress, scratch=self.scratch), None
        if self.planned is not None:
            on._device.refuse_capture("applying a pair")
            return self.planned.run(on, progress), None
        if on is not None:
            applied: tuple[bool, Any] = on._apply(self.memories, self.base or [], self.mode, progress, meanwhile=meanwhile)
            return applied
        with progress_callback(progress, "apply") as callback:
            if self.mode == "out_of_place":
                self.pair.read(self.memories, base=self.base, digests=self.digests, progress=callback)
                return True, None
            how: Any = {"before": [opened for opened, _ in self.before], "checked": self.mode == "all_checked"}
            return self.pair.apply_in_place(self.memories, **how, digests=self.digests, progress=callback), None


class SlicesApplication:
    """Slices, all on the CPU or on one CUDA device, that are bound to a pair: all that needs no writing is done.

    Args:
        slices, pair, base, mode, expect, scratch: As for :func:`tpde.torch.apply_slices_`.
        digests: Whether digests of tensors are compared. Sums and the digests of payloads are compared in any case.
        is_planned: Whether on a device the payloads are read to pinned memory, and the launch is planned.
    """

    def __init__(
        self,
        slices: Any,
        pair: Any,
        *,
        base: Any = None,
        mode: Mode = "all_checked",
        expect: Digest | None = None,
        scratch: int | None = None,
        digests: bool = True,
        is_planned: bool = False,
    ) -> None:
        check_needed(mode=mode)
        check_kinds(scratch=scratch)
        before, pair = split_steps(pair, base, mode)
        if is_planned:
            pair = path_of(pair)
        slices = checked(slices)
        self._written = Written(dict(enumerate(one.tensor for one in slices if is_torch(one.tensor))))
        self._change: Change | None = None
        opened = opened_of(pair, base, expect)
        entries = {entry.name: entry for entry in map(Entry._make, opened.tensors())}
        device = device_of_slices(slices)
        memories = describe_slices(slices, entries, writable=True, device="cpu" if device is None else device)
        if not memories:
            return
        on = planned = of_base = None
        if device is not None:
            on = on_device(device, pair, opened, "pinned" if is_planned else "file")
        elif opened is getattr(pair, "_pair", None):
            raise InvalidArgument(f"the pair is on {pair.device}, the slices are on the CPU")
        else:
            check_writable(places_of([memory for memory, *_ in memories]))
        if base is not None:
            of_base = _base_of_slices(opened, [entries[one.name] for one in slices], base, on)
        if is_planned and on is not None:
            from .device import Application

            planned = Application(on, memories, [], mode, digests=digests)
        how = mode if base is None else "out_of_place"
        digests &= base is None or mode == "all_checked"
        steps = [(opened_of(one), one) for one in before]
        self._change, self._is_kept = Change(opened, on, memories, how, of_base, steps, digests, scratch, planned), on is pair

    def check(self) -> None:
        """Checks everything on the device, and writes nothing."""
        assert self._change is not None
        self._change.on._device.refuse_capture("checking a pair")
        self._change.planned.run(self._change.on, None, commits=False)

    def apply(self, progress: Progress = None) -> Outcome:
        """Changes the slices, or overwrites them from the base."""
        change = self._change
        if change is None:
            return "nothing"

        def work() -> bool:
            applied, application = change.run(progress)
            if applied and application is not None and self._is_kept:
                change.on._remember(application, None, None)
            return applied

        return self._written.by(work, overwrites=change.mode == "out_of_place")


def base_of(what: str, outline: _tpde.Outline, base: Any, on: Any, columns: _tpde.Columns | None = None) -> Memories | None:
    """The base tensors of these tensors; ``None`` if the base is files. ``columns`` are those of the base."""
    if not is_path(base):
        return bases(outline, state_of(base), "cpu" if on is None else on.device, columns)
    if on is not None:
        raise InvalidArgument(f"the base of {what} on a CUDA device must be on that device too, not in files")
    return None


def _base_of_slices(pair: _tpde.Pair, entries: list[Entry], base: Any, on: Any) -> list[SliceMemory] | Memories | None:
    """The base tensors of these entries, or the slices of base tensors that the caller holds; ``None`` if the base is files."""
    if not is_slices(base):
        return base_of("slices", pair.outline([entry.name for entry in entries]), base, on)
    slices = checked(base)
    by_base_name = {name: entry._replace(dtype=dtype, shape=shape) for entry in entries for name, dtype, shape in entry.bases}
    for entry in by_base_name.values():
        if entry.base_kind == "prefix":
            raise InvalidArgument(f"tensor {entry.name!r} changes its number of rows: its base must be a whole tensor")
    where = "cpu" if on is None else on.device
    return describe_slices([one for one in slices if one.name in by_base_name], by_base_name, device=where)
