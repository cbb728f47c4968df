"""Pairs and PyTorch: state dicts, live parameters, and streams of weights for inference engines.

Tensors are on the CPU or on a CUDA device. On a device, kernels decode pairs on PyTorch's current stream, in memory of its
allocator: besides the tensors, the compressed bytes and at most 64 MiB, and 512 MiB more where ``apply_`` checks everything before
it writes. Calls return when their outcome is known.
:class:`DevicePair` keeps a pair on the device for repeated use.

What is checked: on every device, the CRC of each payload and the sums of each chunk. They find accidents. Random damage passes the
CRC with a probability of 2^-32. Random changes of the result pass the target sum with a probability of about 2^-64, or 2^-32 at
worst. They do not find forgery: a blob can be changed to give other weights under the same index and pair digest, so an authentic
pair digest does not help if only CRC and sums are checked. Only digests of payloads or tensors detect forgery. The CPU compares
those of bases and targets, a device those of targets. Layers of :mod:`tpde.nn` compare at most those of payloads: if
you do not trust the author of a pair, call :func:`tpde.verify` with ``base`` before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union

import torch
from torch import nn

from ._core.arguments import check_needed
from ._core.options import EncodeOptions, Unpack, checked
from ._core.progress import Progress
from ._engine import state as _state
from ._engine.application import Mode, Outcome, SlicesApplication
from ._engine.device import DevicePair
from ._engine.encoder import Encoder, Encoding
from ._engine.reader import Reader
from ._files.paths import Digest, EncodeReport, StrPath
from ._memory.slices import Slice
from ._memory.tensor import Entry
from ._memory.torch_tensors import INTEGERS, dtype_of, values_of

__all__ = [
    "CheckpointWeightPatch",
    "DevicePair",
    "Encoder",
    "Encoding",
    "apply_",
    "apply_slices_",
    "iter_patches",
    "iter_weights",
    "load_file",
    "save_file",
]

State = Mapping[str, torch.Tensor]
Base = Union[StrPath, State, nn.Module, None]
Pair = Union[StrPath, DevicePair]
#: A pair, or the pairs of a chain in the order in which they are applied.
Pairs = Union[Pair, list[Pair], tuple[Pair, ...]]


def load_file(
    pair: Pair,
    device: str | torch.device = "cpu",
    *,
    base: Base = None,
    digests: bool = True,
    expect: Digest | None = None,
    progress: Progress = None,
) -> dict[str, torch.Tensor]:
    """All tensors of the target of ``pair``, rebuilt from ``base``: name to tensor, each in memory of its own.

    Args:
        pair: Name of the pair, or either file; or a :class:`DevicePair`.
        device: Where the tensors go: the CPU or a CUDA device. They are decoded on that device if the base is there or none is
            needed, otherwise on the CPU and copied.
        base: The checkpoint that the pair was made from: a path, a state dict or a module. ``None`` if the pair needs none.
            Tensors must be contiguous, on the CPU or all on ``device``. They are not changed, and must not be written during
            the call.
        digests: Whether base and target are compared with the digests of the pair, on the CPU. Without digests, decoding is
            about three times as fast. CRC and sums find damage; forgery is found from format 1.2 on. A CUDA device always
            compares the target.
        expect: As for :func:`tpde.apply`.
        progress: As for :func:`tpde.encode`.

    Raises:
        WrongBase, AlreadyApplied, Invalid, BadCheckpoint, SystemRefused, OutOfMemory: As their names say.
        InvalidArgument: A base tensor that cannot be read.
        NotHeld (incomplete): The pair has only some parts of a tensor.
        DeviceError: There is no such device, or it fails.
    """
    return _state.load(pair, base=base, framework="pt", device=device, digests=digests, expect=expect, progress=progress)


def save_file(
    tensors: State | nn.Module | Iterable[Slice],
    path: StrPath,
    *,
    base: Base | Iterable[Slice] = None,
    replace: bool = False,
    progress: Progress = None,
    **options: Unpack[EncodeOptions],
) -> EncodeReport:
    """Write the difference of ``tensors`` from ``base`` as the pair ``path``.

    Tensors are read without a copy. They must be contiguous, of a dtype that safetensors knows, on the CPU or on one CUDA device.
    They must not be written during the call. The pair holds tensors, not files: :func:`tpde.apply` rebuilds one file with a new header.

    Tied weights have several names in a state dict, and one in the files of the model. They are stored under those names that the base
    has, and ``tied`` of the report has the others. If the base is in memory and ties them, they are stored under each name, as
    differences from the name that files have. Without a base, or if it has none of the names, they are stored under each name.

    On a device, the base must be there too. Kernels encode after the work that is queued on the current stream, and only the
    compressed bytes are copied to the host. :class:`Encoder` keeps memory for several pairs.

    Args:
        tensors: The target: a state dict or a module. The weights of layers of :mod:`tpde.nn` are rebuilt, all at once. Or the
            slices that a rank of a distributed job holds, with ``shape``: the pair then has
            these as parts, or with ``split`` the parts that the rank holds. :func:`tpde.merge` makes one pair of those of all
            ranks.
        path: Name of the pair: ``path.tpde-index`` and ``path.tpde-blob`` are written.
        base: Path of a checkpoint, a state dict, a module, or the slices of the base that the rank holds; ``None`` for a pair that
            needs no base.
        replace, progress, options: As for :func:`tpde.encode`. On a CUDA device ``codec`` is ``"conditioned"``, which is the default
            there, ``"device"`` or ``"raw"``.

    Raises:
        InvalidArgument: A tensor that cannot be read, a name that is not a string, or an option that a device lacks.
        NotHeld: The slices have only some elements of a part.
        DeviceError: Tensors are on two devices, or on one that is neither the CPU nor a CUDA device; the device
            fails.
        SystemRefused, BadCheckpoint: As their names say. Nothing is written then.
    """
    return _state.save(tensors, path, base=base, options=checked(EncodeOptions, options), replace=replace, progress=progress)


def apply_(
    tensors: State | nn.Module,
    pair: Pairs,
    *,
    base: Base = None,
    mode: Mode = "all_checked",
    strict: bool = True,
    expect: Digest | None = None,
    scratch: int | None = None,
    progress: Progress = None,
) -> Outcome:
    """Turn live base weights into target weights in place: parameters stay the same objects at the same addresses.

    Memory beyond the weights: a few chunks per thread; on a CUDA device the compressed bytes and at most 192 MiB.
    Tied weights are changed once. Autograd is informed: the version counters of all tensors that change are incremented, also
    those of leaves that require gradients. Tensors that the pair does not name are not changed.

    Args:
        tensors: The base: a dict of tensors, or a module, whose parameters and buffers are used. Contiguous (any storage offset;
            on the CPU any alignment), all on the CPU or all on one CUDA device. There the work follows what is queued on the
            current stream. Nothing else may read or write the tensors during the call.
        pair: Name of the pair, or either file; or a :class:`DevicePair`. Or a list of pairs, each made from the target of the one
            before: all are applied in one commit, and nothing is written before all checks of all pairs have passed. Each tensor is
            in all of these pairs, under one name and with one dtype and shape.
        base: The base, if ``tensors`` hold something else, such as another fine-tune of the base. The tensors are then overwritten
            in one pass, and the base is not changed. For weights on a CUDA device, the base must be tensors on that device. If the
            call fails midway, the weights are unusable: :class:`Poisoned` has the reason as its ``__cause__``.
        mode: What is checked before the first write:

            - ``"all_checked"``: everything. Writing is not interrupted, so whatever is raised, the weights are the base or the
              target. The exception is a blob that changes or cannot be read, or a device that fails, while the weights are written.
              On the CPU, CRC, sums and all digests are compared; on a CUDA device, CRC, sums and digests of targets.
            - ``"chunk_by_chunk"``: CRC and sums of each chunk. A chunk that fails is unchanged. On a CUDA device, digests of
              targets are compared afterwards, and nothing else may access the weights during the call. If the call fails
              midway, :class:`Poisoned` is raised. If it is interrupted midway, the exception of the interruption (such as
              ``KeyboardInterrupt``) has a :class:`Poisoned` as its ``__cause__``. Either way the weights are a mixture. On the
              CPU, a forged blob is detected from format 1.2 on.
        strict: Whether every tensor of the pair must be among ``tensors``. A module with layers of :mod:`tpde.nn` is refused in
            either case, and so is its state dict, because their weights are not in memory.
        expect: As for :func:`tpde.apply`. Of several pairs, the digest of the last one.
        scratch: Bytes of memory in which several pairs are checked on a CUDA device; by default 128 MiB. At least the size of the
            largest tensor, and never more than that of all. If all tensors fit in it without gaps between rows, each pair is decoded
            once, otherwise twice, in groups of tensors.
        progress: As for :func:`tpde.encode`.

    Returns:
        ``"applied"``; ``"already_applied"`` if the weights are the target's already; or ``"nothing"`` if no tensor of the pair
        is among ``tensors``, which requires ``strict=False``. Nothing was written in the last two cases.

    Raises:
        Invalid, WrongBase, SystemRefused: As their names say. Nothing was written.
        Poisoned: See ``mode``.
        InvalidArgument: A tensor cannot be changed in place, is missing, has another dtype or shape than in the
            pair, or shares memory with a tensor that has other values in the pair; or a CUDA graph is being captured, which cannot
            wait for the outcome. Nothing was written.
        NotHeld (incomplete): The pair has only some parts of a tensor. Nothing was written.
        Step: A check of one of several pairs has failed. It has the number of the pair, and its error as ``__cause__``. Nothing was
            written.
        DeviceError, OutOfMemory: There is no such device, it fails, or its memory does not suffice.
    """
    how: Any = {"base": base, "mode": mode, "strict": strict, "expect": expect, "scratch": scratch}
    return _state.apply_(tensors, pair, **how, progress=progress)


def apply_slices_(
    slices: Iterable[Slice],
    pair: Pairs,
    *,
    base: Base | Iterable[Slice] = None,
    mode: Mode = "all_checked",
    expect: Digest | None = None,
    scratch: int | None = None,
    progress: Progress = None,
) -> Outcome:
    """Turn slices of live base weights into slices of target weights in place, for a rank of a distributed job.

    Only the chunks with elements of the slices are decoded. A pair whose tensors are cut where the ranks cut them, by
    ``encode(split=...)``, gives each rank its own chunks. A parameter that is fused of several tensors is several slices, each with
    a view of the parameter. Autograd is informed, as by :func:`apply_`.

    On a CUDA device, one launch changes all slices, on the current stream. At most one slice has chunks of a part.

    Args:
        slices: The slices, on the CPU or all on one CUDA device. No element belongs to two of them, but their rows may interleave,
            as in views of columns of one parameter. Nothing else may read or write them during the call.
        pair: As for :func:`apply_`.
        base: The base, if ``slices`` hold something else: a path, a dict of whole tensors, a module, or the slices of the base that
            the rank holds, with the names of the base's tensors. For slices on a CUDA device, the base must be tensors or slices on
            that device. It shares no memory with the slices, and on the CPU has no rows between theirs. The slices are then
            overwritten in one pass. If the call fails midway, they are unusable: :class:`Poisoned` has the reason as its
            ``__cause__``.
        mode: As for :func:`apply_`. ``"all_checked"`` compares the digests of those tensors and parts of which the slices have all
            elements. For others it compares CRC and sums, and the digests of payloads, which every pair with parts has. On a CUDA
            device it compares CRC, sums, digests of payloads, and digests of those targets of which all chunks are decoded.
        expect, scratch, progress: As for :func:`apply_`.

    Returns:
        ``"applied"``; ``"already_applied"`` if the slices are the target's already; or ``"nothing"`` if they have no elements.

    Raises:
        Invalid, WrongBase, SystemRefused: As their names say. Nothing was written.
        NotHeld: In place, or on a CUDA device, the slices have only some elements of a chunk; or the base lacks lanes of a chunk. On
            a CUDA device, also if several slices have chunks of one part. Encode the pair with these slices as parts. Nothing was
            written.
        NotHeld (incomplete): The pair lacks elements of a slice. Nothing was written.
        InvalidArgument: A slice is not within its tensor, has another dtype or shape, has no regular rows, is
            read-only, or shares memory with another one; or a CUDA graph is being captured. Nothing was written.
        Step, DeviceError, OutOfMemory: As for :func:`apply_`.
        Poisoned: See ``mode`` of :func:`apply_`, and ``base``.
    """
    return SlicesApplication(slices, pair, base=base, mode=mode, expect=expect, scratch=scratch).apply(progress)


def iter_weights(
    pair: Pair,
    *,
    base: Base = None,
    device: str | torch.device = "cpu",
    changed_only: bool = False,
    digests: bool = True,
    expect: Digest | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The target's tensors one by one, names ascending, for the ``load_weights`` of inference engines.

    Memory: one tensor at a time, besides those that the caller keeps.

    Args:
        pair, base, device, digests, expect: As for :func:`load_file`.
        changed_only: Whether tensors that equal their base are left out.

    Raises:
        As :func:`load_file`. The first call of ``next`` opens the pair; each call raises the errors of its tensor.
    """
    reader = Reader(pair, base, "pt", device, expect=expect)
    for entry in reader.entries.values():
        if entry.changes or not entry.is_same or not changed_only:
            yield entry.name, reader.read([entry.name], digests=digests)[entry.name]


class CheckpointWeightPatch(NamedTuple):
    """An update of one checkpoint tensor, with the fields of vLLM's class of this name."""

    #: Name in the checkpoint.
    name: str
    #: Shape of the whole tensor.
    shape: tuple[int, ...]
    #: Its dtype.
    dtype: torch.dtype
    #: The new values, one dim: of the elements at ``indices``, or of the whole tensor.
    values: torch.Tensor
    #: Positions in the flattened tensor, ascending (``int32``, or ``int64`` for large tensors); ``None`` for the whole tensor.
    indices: torch.Tensor | None


def iter_patches(
    pair: Pair,
    *,
    base: Base = None,
    device: str | torch.device = "cpu",
    kind: Literal["all", "sparse", "dense"] = "all",
    expect: Digest | None = None,
) -> Iterator[CheckpointWeightPatch]:
    """The changes of the pair, tensor by tensor, as patches of new values at flat indices.

    A patch is dense (``indices`` is ``None``) if any part of a tensor lacks a base of its dtype and shape, for dtypes that
    are not floating-point, and for new values that are NaN, because vLLM reads NaN as 'unchanged'. vLLM loads dense and sparse
    patches in separate calls: ``kind`` selects. Tensors that do not change have no patch.

    Chunks are checked by CRC and sums. Sparse patches are not compared with digests of tensors, so a forged blob is
    detected only if the pair was encoded with ``payload_digests``.

    Args:
        pair, base, device, expect: As for :func:`load_file`. Only base tensors that change are read.
        kind: Which patches to yield: ``"all"``, ``"sparse"`` or ``"dense"``.

    Raises:
        As :func:`load_file`.
    """
    check_needed(kind=kind)
    reader = Reader(pair, base, "pt", device, expect=expect)
    for entry in reader.entries.values():
        if entry.is_same and not entry.changes:
            continue
        patch = _sparse(reader, entry)
        if patch is None and kind != "sparse":
            tensor = reader.read([entry.name])[entry.name]
            patch = CheckpointWeightPatch(entry.name, tuple(tensor.shape), tensor.dtype, tensor.reshape(-1), None)
        if patch is not None and kind in ("all", "dense" if patch.indices is None else "sparse"):
            yield patch


def _sparse(reader: Reader, entry: Entry) -> CheckpointWeightPatch | None:
    dtype = dtype_of(entry.dtype)
    if not entry.is_same or not dtype.is_floating_point or entry.dtype == "F4":
        return None
    if reader.on_device is not None:
        return _sparse_on_device(reader, entry)
    positions, raw, size = reader.pair.changes(entry.name, reader.base_of(reader.pair.outline([entry.name])))
    values = values_of(raw, entry.dtype)
    if values.to(torch.float64).isnan().any():
        return None
    indices = torch.frombuffer(positions, dtype=torch.int32 if size == 4 else torch.int64)
    if reader.device is not None:
        values, indices = values.to(reader.device), indices.to(reader.device)
    return CheckpointWeightPatch(entry.name, tuple(entry.shape), dtype, values, indices)


def _sparse_on_device(reader: Reader, entry: Entry) -> CheckpointWeightPatch | None:
    """Like :func:`_sparse`, with the base on a device: rebuilds the whole tensor there and compares it with the base."""
    tensor = reader.read([entry.name])[entry.name].view(-1)
    base = (reader.tensors or {})[entry.base_name].detach().view(-1)
    as_integers = INTEGERS[tensor.element_size()]
    indices = (tensor.view(as_integers) != base.view(as_integers)).nonzero().view(-1)
    values = tensor[indices] if tensor.element_size() > 1 else tensor.view(as_integers)[indices].view(tensor.dtype)
    if values.to(torch.float64).isnan().any():
        return None
    fits = tensor.numel() <= torch.iinfo(torch.int32).max
    return CheckpointWeightPatch(entry.name, tuple(entry.shape), tensor.dtype, values, indices.to(torch.int32) if fits else indices)
