"""Functions on files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, Union

from .. import _tpde
from .._core.arguments import check_kinds
from .._core.errors import InvalidArgument, make_error
from .._core.names import matching_names
from .._core.options import EncodeOptions, Unpack, checked
from .._core.progress import Progress, progress_callback

StrPath = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
#: A pair digest: 64 hexadecimal digits, or 32 bytes.
Digest = Union[str, bytes]
T = TypeVar("T")


def is_path(value: Any) -> bool:
    """Whether this is a path, and not tensors."""
    return isinstance(value, (str, bytes, os.PathLike))


def path_of(path: StrPath) -> str:
    """A path as text. Bytes that cannot be decoded become surrogates, as elsewhere in Python."""
    text = os.fsdecode(path)
    if not text:
        raise InvalidArgument("a path is empty")
    if "\0" in text:
        raise InvalidArgument(f"no file can have the path {text!r}: it has a NUL")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"no file can have the path {text!r}: {error.reason}") from error
    return text


def path_or_none(path: StrPath | None) -> str | None:
    return None if path is None else path_of(path)


def new_pair_of(path: StrPath, target: str | None = None, *, is_with_base: bool) -> str:
    """The name of a new pair. Without a base, another checkpoint of this name was probably meant as the base, or the target."""
    name = path_of(path)
    if is_with_base or not _is_checkpoint(name) or (target is not None and os.path.realpath(target) == os.path.realpath(name)):
        return name
    raise InvalidArgument(f"path is the checkpoint {name!r}: expected the name of a new pair; the base is passed as base=")


def _is_checkpoint(path: str) -> bool:
    if not os.path.isdir(path):
        return path.endswith(".safetensors") and os.path.exists(path)
    with contextlib.suppress(OSError):
        return any(name.endswith(".safetensors") for name in os.listdir(path))
    return False


@dataclass(frozen=True)
class TensorReport:
    """Figures about a tensor of a pair."""

    #: Name in the target.
    name: str
    #: Element type, as safetensors names it: ``"BF16"``.
    dtype: str
    shape: tuple[int, ...]
    #: Source of its base lanes: ``"none"``, ``"same"`` (equal dtype and shape), ``"prefix"`` (another number of rows), ``"cast"``
    #: (another dtype), or ``"dequantised"`` (quantised weights and their scales).
    base_kind: str
    #: ``"raw"``, ``"zstd"`` or ``"conditioned"``.
    codec: str
    chunks: int
    #: Number of lanes, changed or not. An element is one lane, except in complex dtypes (two lanes) and packed dtypes (a lane is a
    #: byte).
    lanes: int
    #: Number of lanes that differ from the base.
    changed: int
    #: Size of the target tensor in bytes.
    bytes: int
    #: Size of its payloads in bytes, with padding.
    payload_bytes: int
    #: For a part of a tensor, its place: the shape of the tensor, ``"whole"``, and the first index in each dimension, ``"origin"``.
    part: dict[str, list[int]] | None = None
    #: Dtype of the base tensor, if it is another one.
    base_dtype: str | None = None
    #: Form of a quantised base: ``"fp8_blocks"``, ``"mxfp4"`` or ``"mxfp4_transposed"``.
    base_form: str | None = None


@dataclass(frozen=True)
class UnusedBase:
    """A base tensor that was found for a target tensor, and is not used, or not as it was meant."""

    #: Name of the target tensor.
    tensor: str
    #: Name of the base tensor.
    base: str
    #: ``"dtype"`` or ``"shape"`` (the base tensor has another), ``"scales"`` (those of a quantised base tensor do not fit),
    #: ``"blocks"`` (a part of the target has a part of a block), ``"held"`` (the base has only some elements), or ``"larger"`` (the
    #: pair is smaller without it).
    cause: str
    #: What was expected and found.
    reason: str


class StoredBytes:
    """The size of the two files of a pair."""

    index_bytes: int
    blob_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Size of index and blob in bytes."""
        return self.index_bytes + self.blob_bytes


class Sizes(StoredBytes):
    """The sizes of a pair and of its target."""

    target_bytes: int

    @property
    def ratio(self) -> float:
        """Ratio of the target's tensors in bytes to the bytes stored."""
        return self.target_bytes / self.stored_bytes


@dataclass(frozen=True)
class EncodeReport(Sizes):
    """Results of encoding."""

    index: str
    blob: str
    #: Size of all target tensors in bytes.
    target_bytes: int
    index_bytes: int
    blob_bytes: int
    tensors: list[TensorReport] = field(repr=False)
    #: Base tensors that no target tensor uses.
    removed: list[str] = field(repr=False)
    #: Target tensors for which the base has no tensor. Empty without a base.
    added: list[str] = field(repr=False)
    #: Base tensors that were found for target tensors, and are not used, or not as they were meant.
    unused: list[UnusedBase] = field(repr=False)
    #: Other files in the target's folder, which are not part of the pair.
    not_included: list[str] = field(repr=False)
    #: Names of tied tensors that were left out because the base has their memory under another name, by that name.
    tied: dict[str, list[str]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ApplyReport:
    """Results of an application."""

    tensors: int
    bytes: int
    #: Whether base and target were compared with the digests of the pair.
    digests_checked: bool
    #: Which payloads were compared with the digests that the pair digest covers: ``"all"``, ``"each_read"`` or ``"not_compared"``.
    payload_digests: str
    #: Files of the output's folder that programs would have read instead of the output. With ``replace=True`` they were removed.
    removed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class VerifyReport:
    """The result of :func:`verify` for a valid pair. ``tpde verify --json`` prints the same fields."""

    tensors: int
    chunks: int
    #: Size of index and blob in bytes.
    stored_bytes: int
    #: Whether a base was supplied and has the digests of the pair.
    base_checked: bool
    #: Whether a target was supplied or rebuilt, and has the digests of the pair.
    target_checked: bool
    #: Which payloads were compared with the digests that the pair digest covers: ``"all"``, ``"each_read"`` or ``"not_compared"``.
    payload_digests: str
    #: ``"checked"`` if all payloads were compared with the digests that the pair digest covers, or all tensors were rebuilt and
    #: compared with the target digests, so that no payload is forged; otherwise ``"not_checked"``.
    payload_authenticity: str
    #: Whether :func:`apply` can write the target as files, as far as the file system allows; ``None`` if that is unknown because no
    #: tensor was rebuilt.
    writable: bool | None
    #: The reason why it cannot.
    not_writable: str | None
    #: Id of the rule that the target's files break, if the reason is one.
    not_writable_rule: str | None


@dataclass(frozen=True)
class Inspection(Sizes):
    """Contents of a pair."""

    version: str
    pair_digest: str
    base_root: str
    target_root: str
    base_bytes: int
    target_bytes: int
    index_bytes: int
    blob_bytes: int
    chunks: int
    #: Files that the pair can rebuild: dicts of ``name``, ``kind`` and ``content_bytes``.
    files: list[dict[str, Any]] = field(repr=False)
    tensors: list[TensorReport] = field(repr=False)


def report(kind: type[T], text: str) -> T:
    """Parses a report of the Rust half."""
    values = json.loads(text)
    if isinstance(values.get("tensors"), list):
        for tensor in values["tensors"]:
            tensor["shape"] = tuple(tensor["shape"])
        values["tensors"] = [TensorReport(**tensor) for tensor in values["tensors"]]
    if isinstance(values.get("unused"), list):
        values["unused"] = [UnusedBase(**one) for one in values["unused"]]
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})  # type: ignore[arg-type]


def encode(
    target: StrPath,
    path: StrPath,
    *,
    base: StrPath | None = None,
    replace: bool = False,
    progress: Progress = None,
    **options: Unpack[EncodeOptions],
) -> EncodeReport:
    """Write the difference of the checkpoint ``target`` from ``base`` as the pair ``path``.

    Args:
        target: The checkpoint that the pair rebuilds: a ``.safetensors`` file or a folder of shards.
        path: Name of the pair: ``path.tpde-index`` and ``path.tpde-blob`` are written.
        base: The checkpoint that ``target`` is compared with; ``None`` for a pair that needs no base.
        replace: Whether an existing pair is replaced.
        progress: ``True`` shows a tqdm bar. An existing tqdm bar is updated. A callable is called with bytes done and bytes in
            total.
        codec: How payloads are coded. ``None`` means ``"auto"``:

            - ``"auto"``: Store or send. Each tensor takes its smallest codec.
            - ``"device"``: Rebuild on a GPU. Each tensor takes conditioned or raw.
            - ``"conditioned"``: Training steps and fine-tunes. One codec throughout.
            - ``"zstd"``: Readers with zstd and no other entropy decoder.
            - ``"raw"``: Debugging, and the simplest readers. Large.
        favor: What codec conditioned is tuned for. ``None`` means ``"ratio"``:

            - ``"ratio"``: Most jobs. Small, and fast to decode.
            - ``"speed"``: Rebuilt often on a GPU. Faster, and larger.
            - ``"size"``: Archives and slow links. Smallest, and slower.
        chunk_lanes: Maximum lanes per chunk, a power of two of at least 4096.
        layout: Layout of codec zstd. ``None`` chooses one per chunk.
        renamed: Tensors that have another name in the base: target name to base name. With ``*`` in both names, all tensors
            whose names match: ``{"model.language_model.*": "model.*"}`` replaces a prefix.
        format: Newest version of the format that the pair may use. ``None`` means ``"1.3"``, which only derived bases need; ``"1.1"``
            is for readers that do not know 1.2, and its pair digest does not cover payloads.
        payload_digests: Whether the digest of each payload is stored, 16 bytes per chunk. Readers of a part of the pair then
            compare digests too.
        derived: Whether base tensors of another dtype are converted or dequantised. They need format 1.3.
        split: Rules that cut tensors into parts, so that the ranks of a distributed job read their own: ``"PATTERN=DIM:N"`` cuts a
            dimension as ``torch.chunk`` does, ``"PRESET:N"`` cuts as tensor parallelism does for ``llama``, ``qwen``, ``mistral``,
            ``gemma``, ``mixtral`` or ``deepseek``. Rules are separated by commas.

    Raises:
        SystemRefused (already_exists): The pair exists and ``replace`` is false.
        InvalidArgument: The output is, contains, or is inside an input, under any name or link; or without a base, ``path`` is another
            checkpoint; or an option has no such value.
        BadCheckpoint, SystemRefused: As their names say. Nothing is written then.
    """
    target, base = path_of(target), path_or_none(base)
    path = new_pair_of(path, target, is_with_base=base is not None)
    how = checked(EncodeOptions, options)
    with progress_callback(progress, "encode") as callback:
        return report(EncodeReport, _tpde.encode(target, path, base=base, options=how, replace=replace, progress=callback))


def apply(
    pair: StrPath | Iterable[StrPath],
    path: StrPath,
    *,
    base: StrPath | None = None,
    tensors: str | Iterable[str] | Callable[[str], bool] | None = None,
    replace: bool = False,
    expect: Digest | None = None,
    progress: Progress = None,
) -> ApplyReport:
    """Rebuild the target's files from ``base`` and ``pair`` at ``path``, byte for byte.

    Nothing appears at ``path`` before all of it is written and compared with the digests of the pair.

    Args:
        pair: Name of the pair, or either file. Or several pairs, which are applied one after the other: each is made from the target
            of the one before. They are decoded in one pass, and nothing is written in between.
        path: The file to write, or the folder if the target is sharded.
        base: The checkpoint that the pair, or the first of several, was made from; ``None`` if it needs none.
        tensors: Writes only these tensors, to one file with a header of its own: a pattern with ``*``, several patterns, or a
            function of the name.
        replace: Whether existing files are replaced. Older weights that programs would read instead of the output are then
            removed when it appears.
        expect: The pair digest that the pair must have, as 64 hexadecimal digits or 32 bytes. It is compared before anything of the
            pair is parsed. Of several pairs, the last one must have it, because the result has the digests that the last pair
            states.
        progress: As for :func:`encode`.

    Raises:
        Step: One of several pairs does not fit, or is damaged.
        WrongBase: ``base`` is not what the pair was made from.
        AlreadyApplied: ``base`` is the target already.
        Invalid: The pair is damaged.
        InvalidArgument: A file of the output is, contains, or is inside an input, under any name or link.
        SystemRefused, BadCheckpoint, Invalid: As their names say. Nothing is written then.
    """
    pairs, path, base = pair_names(pair, expect), path_of(path), path_or_none(base)
    wanted = None if tensors is None else matching(*pairs[-1], tensors)
    with progress_callback(progress, "apply") as callback:
        text = _tpde.apply(pairs, path, base=base, wanted=wanted, replace=replace, progress=callback)
    return report(ApplyReport, text)


def verify(
    pair: StrPath,
    *,
    base: StrPath | None = None,
    target: StrPath | None = None,
    no_base: bool = False,
    expect: Digest | None = None,
    progress: Progress = None,
) -> VerifyReport:
    """Check a pair, and whether it fits a base and a target.

    Without a base: checks every rule of the index, and the CRC-32 of every payload. From format 1.2 on, also compares the digest
    over all payloads, which is part of the pair digest, so a forged payload is refused. For formats 1.0 and 1.1, the check detects
    damage (random damage passes with a probability of 2^-32), but not forgery. With ``base`` or ``no_base``: rebuilds every tensor
    without writing it and compares all digests, which a forged payload does not pass; also plans the files as :func:`apply` does.
    With ``target``: compares a checkpoint with the target's digests, and its files byte for byte; this does not check payloads.

    A sound pair whose target cannot be written as files raises nothing: ``writable`` of the report is false then.

    Args:
        pair: Name of the pair, or either file.
        base: A checkpoint that should be the base.
        target: A checkpoint that should be the target.
        no_base: Whether to rebuild the tensors of a pair that needs no base.
        expect: As for :func:`apply`.
        progress: As for :func:`encode`.

    Raises:
        Invalid, WrongBase, AlreadyApplied, BadCheckpoint, SystemRefused: As their names say.
        InvalidArgument: ``no_base`` is true, but a base is passed, or the pair needs one.
    """
    check_kinds(no_base=no_base)
    pair, base, target = path_of(pair), path_or_none(base), path_or_none(target)
    if no_base and base is not None:
        raise InvalidArgument("base and no_base exclude each other")
    with progress_callback(progress, "verify") as callback:
        text = _tpde.verify((pair, digest_of(expect)), base=base, target=target, no_base=no_base, progress=callback)
    return report(VerifyReport, text)


def inspect(pair: StrPath, *, expect: Digest | None = None) -> Inspection:
    """Describe a pair from its index. No payload is read. ``expect`` is as for :func:`apply`.

    Raises:
        Invalid, SystemRefused: The index cannot be read, or the file is not an index.
    """
    return report(Inspection, _tpde.inspect((path_of(pair), digest_of(expect))))


def open_pair(pair: StrPath, base: StrPath | None = None, expect: Digest | None = None) -> _tpde.Pair:
    """Opens a pair, which must have the digest ``expect``, and the files of its base."""
    return _tpde.Pair(path_of(pair), path_or_none(base), digest_of(expect))


def pair_names(pairs: StrPath | Iterable[StrPath], expect: Digest | None) -> list[tuple[str, bytes | None]]:
    """Paths of pairs that are applied one after the other, at least one. The last one must have the digest ``expect``."""
    names = [path_of(pair) for pair in ([pairs] if is_path(pairs) else pairs)]  # type: ignore[union-attr,arg-type]
    if not names:
        raise InvalidArgument("no pair is given")
    return [*((name, None) for name in names[:-1]), (names[-1], digest_of(expect))]


def check_digest(pair: _tpde.Pair, expect: Digest | None) -> None:
    """Compares the digest of an open pair with the digest that the caller expects."""
    expected = digest_of(expect)
    if expected is None:
        return
    found = bytes(pair.digest())
    if expected != found:
        raise make_error(
            "unexpected_pair",
            f"not the expected pair: expected an index with pair digest {expected.hex()}, found {found.hex()}",
            expected=expected.hex(),
            found=found.hex(),
        )


def digest_of(expect: Digest | None) -> bytes | None:
    """The 32 bytes of a pair digest."""
    if expect is None:
        return None
    if isinstance(expect, str):
        expect = expect.strip()  # a digest that was signed as text ends with a line feed
    try:
        digest = bytes.fromhex(expect) if isinstance(expect, str) else bytes(memoryview(expect))
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != 32 or (isinstance(expect, str) and len(expect) != 64):
        raise InvalidArgument(f"expect={expect!r}: expected a pair digest of 64 hexadecimal digits or 32 bytes")
    return digest


def matching(pair: StrPath, digest: bytes | None, tensors: str | Iterable[str] | Callable[[str], bool]) -> set[str]:
    """Names of the tensors of a pair that match a pattern, one of several patterns, or a function of the name."""
    return matching_names([tensor.name for tensor in inspect(pair, expect=digest).tensors], tensors)
