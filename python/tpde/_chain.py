"""Makes one pair of a chain of pairs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import _tpde
from ._arguments import check_kinds
from ._errors import InvalidArgument
from ._options import FoldOptions, checked
from ._paths import Digest, EncodeReport, StrPath, pair_names, path_of, path_or_none, report
from ._progress import Progress, progress_callback

if TYPE_CHECKING:
    from typing_extensions import Unpack


def fold(
    pairs: StrPath | Iterable[StrPath],
    path: StrPath,
    *,
    base: StrPath | None = None,
    replace: bool = False,
    expect: Digest | None = None,
    device: str | None = None,
    progress: Progress = None,
    **options: Unpack[FoldOptions],
) -> EncodeReport:
    """Make the pair ``path`` of a chain of pairs: it leads from ``base`` to the target of the last one.

    Each pair is made from the target of the one before. The result has the same bytes as a pair that :func:`encode` makes of the two
    checkpoints with the same options. No checkpoint is written: each chunk is decoded through all pairs, in bounded memory. Renamed
    tensors are followed. Without ``split``, tensors are cut into parts as in the last pair.

    Args:
        pairs: The pairs, in the order in which they are applied: their names, or either file of each. A single one is encoded anew.
        path: Name of the new pair: ``path.tpde-index`` and ``path.tpde-blob`` are written.
        base: The checkpoint that the first pair was made from; ``None`` if it needs none.
        replace, progress, options: As for :func:`encode`.
        expect: The pair digest of the last pair, as for :func:`apply`.
        device: A CUDA device, ``"cuda"`` or ``"cuda:1"``, that applies the pairs and encodes; by default the CPU does. It takes
            codec ``device`` (its default), ``conditioned`` or ``raw``, and memory of its own, not of PyTorch's allocator, for base
            and last target, and one more version if a pair changes names, dtypes or shapes.

    Raises:
        Step: A pair does not fit the version before it, or is damaged; ``__cause__`` says which.
        SystemRefused (already_exists): The new pair exists and ``replace`` is false.
        InvalidArgument: No pair is passed, the output is an input, under any name or link, or an option has no such value.
        DeviceError: There is no such device, it fails, or its memory does not suffice.
        Invalid, BadCheckpoint, SystemRefused: As their names say. Nothing is written then.
    """
    check_kinds(device=device)
    how = checked(FoldOptions, options)
    if device not in (None, "cpu") and how["codec"] is None and how["layout"] is None:
        how["codec"] = "device"
    return _write("fold", pairs, path, base, how, expect, progress, replace=replace, device=_device(device))


def revert(
    pairs: StrPath | Iterable[StrPath],
    path: StrPath,
    *,
    base: StrPath | None = None,
    replace: bool = False,
    expect: Digest | None = None,
    progress: Progress = None,
    **options: Unpack[FoldOptions],
) -> EncodeReport:
    """Make the pair ``path`` that leads back: from the target of a pair, or of the last of several, to ``base``.

    Otherwise like :func:`fold`, with its arguments and exceptions. The new pair rebuilds the tensors of ``base`` and its files.
    """
    return _write("revert", pairs, path, base, checked(FoldOptions, options), expect, progress, replace=replace)


def _write(
    verb: str,
    pairs: StrPath | Iterable[StrPath],
    path: StrPath,
    base: StrPath | None,
    how: dict[str, Any],
    expect: Digest | None,
    progress: Progress,
    *,
    replace: bool,
    device: _tpde.Device | None = None,
) -> EncodeReport:
    names, path, base = pair_names(pairs, expect), path_of(path), path_or_none(base)
    with progress_callback(progress, verb) as callback:
        is_back = verb == "revert"
        text = _tpde.fold(names, path, base=base, is_back=is_back, options=how, replace=replace, device=device, progress=callback)
    return report(EncodeReport, text)


def _device(name: str | None) -> _tpde.Device | None:
    """The CUDA device of this name; ``None`` for the CPU."""
    if name is None or name == "cpu":
        return None
    found = re.fullmatch(r"cuda(?::(\d{1,4}))?", name) if isinstance(name, str) else None
    if found is None:
        raise InvalidArgument(f"expected device 'cpu', 'cuda' or 'cuda:N', found {name!r}")
    return _tpde.Device(int(found[1] or 0))
