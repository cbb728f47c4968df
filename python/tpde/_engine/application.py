"""Applications of pairs to memory in place: to slices, and what those to whole tensors share with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from .. import _tpde
from .._core.arguments import check_kinds, check_needed
from .._core.errors import InvalidArgument, Poisoned, TpdeError
from .._core.progress import Progress, progress_callback
from .._files.paths import Digest, check_digest, is_path, open_pair, path_of
from .._memory.arrays import check_writable, places_of
from .._memory.slices import checked, describe_slices, device_of_slices, is_slices
from .._memory.tensor import Entry, Memories
from .reader import bases, state_of

Outcome = Literal["applied", "already_applied", "nothing"]
Mode = Literal["all_checked", "chunk_by_chunk"]


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


def opened_of(pair: Any, base: Any, expect: Digest | None) -> tuple[_tpde.Pair, Any]:
    """The open pair, which must have the digest ``expect``, with the base if that is files; and the :class:`DevicePair`, if it is one."""
    if getattr(pair, "_pair", None) is None:
        return open_pair(pair, path_of(base) if is_path(base) else None, expect), None
    check_digest(pair._pair, expect)
    return pair._pair, pair


def on_device(device: Any, pair: Any, opened: _tpde.Pair, payloads: Any = "file") -> Any:
    """The opened pair on this device."""
    from .device import DevicePair

    if not isinstance(pair, DevicePair):
        return DevicePair._of_opened(pair, opened, device, payloads)
    if pair.device != device:
        raise InvalidArgument(f"the pair is on {pair.device}, the tensors are on {device}")
    return pair


def apply_steps(
    before: list[Any], opened: _tpde.Pair, last: Any, memories: Any, progress: Progress, scratch: int | None, **how: bool
) -> bool:
    """Applies the pairs ``before`` and ``opened``, which is ``last`` on a device. False if the memory already was the last target."""
    pairs = [one._pair if hasattr(one, "_pair") else open_pair(one) for one in before]
    if last is not None:
        steps = [on_device(last.device, one, pair) for one, pair in zip(before, pairs)]
        return bool(last._apply_after(steps, memories, progress, scratch=scratch))
    with progress_callback(progress, "apply") as callback:
        return opened.apply_in_place(memories, before=pairs, **how, progress=callback)


class SlicesApplication:
    """Slices, all on the CPU or on one CUDA device, that are bound to a pair: all that needs no writing is done.

    Args:
        slices, pair, base, mode, expect, scratch: As for :func:`tpde.torch.apply_slices_`.
        digests: Whether digests of tensors are compared. Sums and the digests of payloads are compared in any case.
        is_planned: Whether on a device the payloads are read to pinned memory, and the launch is planned.
        on_written: Called with the tensors if they have, or may have, been written.
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
        on_written: Callable[[list[Any]], None],
    ) -> None:
        check_needed(mode=mode)
        check_kinds(scratch=scratch)
        self._mode, self._scratch, self._digests = mode, scratch, digests
        self._before, pair = split_steps(pair, base, mode)
        if is_planned:
            pair = path_of(pair)
        slices = checked(slices)
        self._tensors, self._on_written = [one.tensor for one in slices], on_written
        self._pair, device_pair = opened_of(pair, base, expect)
        entries = {entry.name: entry for entry in map(Entry._make, self._pair.tensors())}
        device = device_of_slices(slices)
        self._memories = describe_slices(slices, entries, writable=True, device="cpu" if device is None else device)
        self._overwrites = base is not None
        self._base: list[Any] | Memories | None = None
        #: The pair on a device, and the application to these slices there if it is planned.
        self._on_device: Any = None
        self._application: Any = None
        if not self._memories:
            return
        if device is None:
            check_writable(places_of([memory for memory, *_ in self._memories]))
        if base is not None:
            self._base = _base_of_slices(self._pair, [entries[one.name] for one in slices], base, device)
        if device is not None:
            self._on_device = on_device(device, pair, self._pair, "pinned" if is_planned else "file")
        elif device_pair is not None:
            raise InvalidArgument(f"the pair is on {device_pair.device}, the slices are on the CPU")
        self._is_kept = self._on_device is pair
        if is_planned and device is not None:
            from .device import Application

            self._application = Application(self._on_device, self._memories, [], mode, digests=digests)

    def check(self) -> None:
        """Checks everything on the device, and writes nothing."""
        self._on_device._device.refuse_capture("checking a pair")
        self._application.run(self._on_device, None, commits=False)

    def apply(self, progress: Progress = None) -> Outcome:
        """Changes the slices, or overwrites them from the base."""
        if not self._memories:
            return "nothing"
        overwriting = unusable_after_errors() if self._overwrites else contextlib.nullcontext()
        with told_if_written(lambda: self._on_written(self._tensors)), overwriting:
            applied = self._apply(progress)
        if applied:
            self._on_written(self._tensors)
        return "applied" if applied else "already_applied"

    def _apply(self, progress: Progress) -> bool:
        """False if the slices already were the target."""
        on, is_checked = self._on_device, self._mode == "all_checked"
        if self._before or on is None and not self._overwrites:
            how = {"checked": is_checked, "digests": self._digests}
            return apply_steps(self._before, self._pair, on, self._memories, progress, self._scratch, **how)
        if self._application is not None:
            on._device.refuse_capture("applying a pair")
            return bool(self._application.run(on, progress))
        if on is not None:
            if self._overwrites:
                applied, application = True, on._rebuild(self._memories, self._base, progress)
            else:
                applied, application = on._apply(self._memories, [], self._mode, progress)
            if applied and self._is_kept:
                on._remember(application, None, None)
            return bool(applied)
        with progress_callback(progress, "apply") as callback:
            self._pair.read_slices(self._memories, base=self._base, digests=is_checked, progress=callback)
        return True


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
