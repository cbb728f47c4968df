"""Makes one pair of several: of other tensors each, or of a chain; or of some tensors of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import _tpde
from .._core.arguments import check_kinds
from .._core.errors import InvalidArgument
from .._core.options import FoldOptions, Unpack, checked
from .._core.progress import Progress, progress_callback
from .._memory.index import rectangles_of
from .paths import (
    Digest,
    EncodeReport,
    StoredBytes,
    StrPath,
    digest_of,
    inspect,
    is_path,
    matching,
    pair_names,
    path_of,
    path_or_none,
    report,
)


@dataclass(frozen=True)
class MergeReport(StoredBytes):
    """Results of :func:`merge` and :func:`subset`: the new pair."""

    index: str
    blob: str
    tensors: int
    chunks: int
    #: Number of different table sets of codec conditioned.
    table_sets: int
    #: Number of target files that the pair describes; 0 if it describes only tensors.
    files: int
    #: Size of all target tensors in bytes.
    target_bytes: int
    #: Size of the copied payloads in bytes, without padding.
    payload_bytes: int
    index_bytes: int
    blob_bytes: int


def merge(
    pairs: Iterable[StrPath],
    path: StrPath,
    *,
    files: bool = True,
    payload_digests: bool = False,
    replace: bool = False,
    progress: Progress = None,
) -> MergeReport:
    """Make the pair ``path`` of several pairs, which must have different tensors and one base.

    Payloads are checked and copied, and not decoded. No base is needed. The result has format 1.2, or 1.3 if a
    base has another dtype. Payloads of formats 1.0 and 1.1 have no digests: a forged payload of such a pair is copied, and the new
    pair digest covers it. :func:`verify` with ``base`` detects that, before or after.

    Args:
        pairs: Names of the pairs, or either file of each.
        path: Name of the new pair: ``path.tpde-index`` and ``path.tpde-blob`` are written.
        files: Whether the new pair describes the files of all pairs. Without files, the target is rebuilt as tensors, or as one
            safetensors file.
        payload_digests: Whether the index stores the digest of each payload even if no index of ``pairs`` does.
        replace: Whether an existing pair is replaced.
        progress: As for :func:`encode`.

    Raises:
        InvalidArgument (not_mergeable): Two pairs have the same tensor, different bases, or files that cannot be those of one target.
        Invalid: A pair is damaged, or its payloads are not those that its digest covers.
        InvalidArgument: A file of the new pair is a file of ``pairs``.
        SystemRefused, Invalid: As their names say. Nothing is written then.
    """
    if is_path(pairs):
        raise InvalidArgument(f"pairs is the path {pairs!r}: expected several")
    how: Any = {"files": files, "payload_digests": payload_digests, "replace": replace}
    return merge_expected([(pair, None) for pair in pairs], path, progress, **how)


def merge_expected(
    pairs: Iterable[tuple[StrPath, bytes | None]],
    path: StrPath,
    progress: Progress = None,
    *,
    verb: str = "merge",
    wanted: set[str] | None = None,
    parts: dict[str, list[tuple[list[int], list[int]]]] | None = None,
    **flags: bool,
) -> MergeReport:
    """Like :func:`merge` and :func:`subset`, of pairs that must have these digests."""
    names = [(path_of(pair), digest) for pair, digest in pairs]
    how: Any = {"files": True, "payload_digests": False, "replace": False, **flags, "wanted": wanted, "parts": parts or {}}
    with progress_callback(progress, verb) as callback:
        return report(MergeReport, _tpde.merge(names, path_of(path), **how, progress=callback))


def subset(
    pair: StrPath,
    path: StrPath,
    *,
    tensors: str | Iterable[str] | Callable[[str], bool] | None = None,
    parts: Mapping[str, Any] | None = None,
    files: bool = True,
    payload_digests: bool = False,
    replace: bool = False,
    expect: Digest | None = None,
    progress: Progress = None,
) -> MergeReport:
    """Make the pair ``path`` of some tensors of ``pair``, or of some of their parts, as :func:`merge` does.

    ::

        tpde.subset("step100", "rank3", tensors="*norm*", parts={"*.o_proj.weight": np.s_[:, 1536:2048]})

    The new pair describes those files of ``pair`` of which it has all tensors, if its tensors are in no other file and ``pair``
    stores the headers of these files; otherwise no files.

    Args:
        pair: Name of the pair, or either file.
        path: Name of the new pair: ``path.tpde-index`` and ``path.tpde-blob`` are written.
        tensors: The tensors to keep: a pattern with ``*``, several patterns, or a function of the name.
        parts: Rectangles by pattern. A tensor whose name matches keeps only its parts within a rectangle. A rectangle is an
            index as NumPy has it, such as ``np.s_[0:512, :]``; a list has several. Payloads are copied whole, so a part that is
            only partly within the rectangles is an error.
        files: Whether the new pair describes files.
        payload_digests: Whether the index stores the digest of each payload even if ``pair`` does not.
        replace: Whether an existing pair is replaced.
        expect: As for :func:`apply`.
        progress: As for :func:`encode`.

    Raises:
        Invalid: The pair is another one, or damaged, or its payloads are not those that its digest covers.
        InvalidArgument: A pattern matches no tensor; a rectangle is not within its tensor, has only some elements of a part, or has no
            part; or a file of the new pair is a file of ``pair``.
        SystemRefused, Invalid: As their names say. Nothing is written then.
    """
    pair, digest = path_of(pair), digest_of(expect)
    check_kinds(parts=parts)
    if tensors is None and not parts:
        raise InvalidArgument("neither tensors nor parts: expected what the new pair has")
    wanted = set() if tensors is None else matching(pair, digest, tensors)
    rectangles: dict[str, list[tuple[list[int], list[int]]]] = {}
    if parts:
        shapes = {one.name: one.part["whole"] if one.part else [*one.shape] for one in inspect(pair, expect=digest).tensors}
        rectangles = rectangles_of(parts, shapes)
    how: Any = {"files": files, "payload_digests": payload_digests, "replace": replace}
    return merge_expected(
        [(pair, digest)], path, progress, verb="subset", wanted=wanted | rectangles.keys(), parts=rectangles, **how
    )


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
    return _fold("fold", pairs, path, base, how, expect, progress, replace=replace, device=_device(device))


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
    return _fold("revert", pairs, path, base, checked(FoldOptions, options), expect, progress, replace=replace)


def _fold(
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
