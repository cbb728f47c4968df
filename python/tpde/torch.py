"""Pairs and PyTorch: state dicts, live parameters, and streams of weights for inference engines.

Tensors are on the CPU or on CUDA devices. There pairs are decoded by kernels, on PyTorch's current stream, in memory of its
allocator: beside the tensors, the compressed bytes and at most 64 MiB. Calls return when their outcome is known;
:class:`DevicePair` keeps ready what is used again.

What is checked: everywhere the CRC of each payload and the sums of each chunk. They find accidents: random damage passes the CRC
with a probability of 2^-32, and random changes of the result pass the target sum with one of about 2^-64, or 2^-32 at worst. They
do not find forgery: a blob can be changed to give other weights under the same index and the same signed pair digest. Only digests detect that, and they are
compared on the CPU alone. For a pair whose author is not trusted, call :func:`tpde.verify` with ``base`` before it is used on a
CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

import torch

from . import _state
from ._device import DevicePair
from ._entry import Entry
from ._errors import Misuse
from ._open import Reader
from ._paths import EncodeReport, StrPath
from ._progress import Progress
from ._state import Mode, Outcome
from ._torch_memory import dtype_of, storages_of, values_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CheckpointWeightPatch", "DevicePair", "apply_", "iter_patches", "iter_weights", "load_file", "save_file"]

State = Mapping[str, torch.Tensor]
Base = Union[StrPath, State, "nn.Module", None]
Pair = Union[StrPath, DevicePair]


def load_file(
    pair: Pair,
    base: Base = None,
    device: str | torch.device = "cpu",
    *,
    digests: bool = True,
    progress: Progress = None,
) -> dict[str, torch.Tensor]:
    """All tensors of the target of ``pair``, rebuilt from ``base``: name to tensor, each of its own memory.

    Args:
        pair: Name of the pair, or either file.
        base: Path of the checkpoint that the pair was made from, or its tensors (a state dict or a module: contiguous, on the
            CPU or all on ``device``, not written meanwhile), which are read and left; ``None`` if the pair needs none.
        device: Where the tensors are wanted: the CPU or a CUDA device. They are decoded there if the base is there, or none is
            needed; else on the CPU, and copied.
        digests: Whether base and target are compared with the digests of the pair, on the CPU. Without, and on a CUDA device,
            CRC and sums still find damage, on the CPU at some three times the speed; a forged blob is not detected.
        progress: As for :func:`tpde.encode`.

    Raises:
        WrongBase, AlreadyApplied, Invalid, Limit, BadCheckpoint, SystemRefused, OutOfMemory: What is wrong.
        NotContiguous, Misuse: A base tensor that cannot be read.
        DeviceUnavailable, DeviceFailed: There is no such device, or it fails.
    """
    return _state.load(pair, base, "pt", device, digests, progress)


def save_file(
    base: Base,
    target: State | nn.Module,
    path: StrPath,
    *,
    codec: str | None = None,
    layout: str | None = None,
    chunk_lanes: int | None = None,
    favor: str | None = None,
    renamed: Mapping[str, str] | None = None,
    replace: bool = False,
    progress: Progress = None,
) -> EncodeReport:
    """Write the difference of the tensors ``target`` from ``base`` as the pair ``path``.

    Tensors are read where they lie: contiguous, on the CPU (``tensor.cpu()`` copies others there), of a dtype that safetensors knows, and not written meanwhile.
    Tied weights are stored under each of their names. The pair holds tensors, no files: :func:`tpde.apply` rebuilds one file
    with a header of its own.

    Args:
        base: Path of a checkpoint, a state dict or a module; ``None`` for a pair that needs no base.
        target: A state dict or a module. A module with layers of :mod:`tpde.nn` is refused, as a base too: their weights are
            not in its state dict. Give a dict with ``layer.weight`` of each, which rebuilds it.
        path: Name of the pair.
        codec, layout, chunk_lanes, favor, renamed, replace, progress: As for :func:`tpde.encode`.

    Raises:
        NotContiguous, Misuse: A tensor that cannot be read, or a name that is not a string.
        DeviceUnavailable: A tensor on another device than the CPU.
        AlreadyExists, BadCheckpoint, SystemRefused: As their names say. Nothing is written then.
    """
    how = {"codec": codec, "layout": layout, "chunk_lanes": chunk_lanes, "favor": favor, "renamed": renamed}
    return _state.save(base, target, path, replace, progress, **how)


def apply_(
    module_or_state_dict: nn.Module | State,
    pair: Pair,
    *,
    mode: Mode = "all_checked",
    strict: bool = True,
    base: Base = None,
    progress: Progress = None,
) -> Outcome:
    """Turn live base weights into target weights where they lie: parameters stay the same objects at the same addresses.

    Memory beyond the weights: some buffers of a chunk a thread; on a CUDA device the compressed bytes and at most 64 MiB. Tied
    weights are changed once; autograd is told (the versions of the tensors that change go up, leaves that require gradients
    too). Tensors that the pair does not name are left.

    Args:
        module_or_state_dict: The base: a module, of which parameters and buffers are taken, or a dict of tensors. Contiguous
            (any storage offset; on the CPU any alignment), all on the CPU or all on one CUDA device, where the work follows
            what is queued on the current stream. Nobody else may read or write them meanwhile.
        pair: Name of the pair, or either file; or a :class:`DevicePair`.
        mode: ``"all_checked"``: everything is decoded and checked first, and only then written, which nothing interrupts: the
            weights are the base or the target, whatever is raised. On the CPU CRC, sums and all digests are compared, on a CUDA
            device CRC and sums and no digests. ``"chunk_by_chunk"``: each chunk is checked by CRC and sums and written, in one
            pass: a failure in the middle raises :class:`Poisoned`, an interruption has that as its ``__cause__``, and the
            weights are a mixture. Without digests a forged blob is not detected: see :mod:`tpde.torch`.
        strict: Whether every tensor of the pair must be there. A module with layers of :mod:`tpde.nn` lacks their weights, and
            is refused in either case.
        base: Where the base is, if the weights are something else, another fine-tune of it say: they are overwritten then, in
            one pass, and the base is left. On a CUDA device it lies there too. If that fails, the weights are of no use:
            :class:`Poisoned` has the reason as its ``__cause__``.
        progress: As for :func:`tpde.encode`.

    Returns:
        ``"applied"``; ``"already_applied"`` if the weights are the target's already; or ``"nothing"`` if no tensor of the pair
        is among those given, which takes ``strict=False``. Nothing was written in the last two cases.

    Raises:
        WrongBase, Invalid, Limit, SystemRefused: What is wrong; nothing was written.
        Poisoned: See ``mode``.
        NotContiguous, Misuse: A tensor that cannot be changed in place, is missing, has another dtype or shape than in the
            pair, or shares memory with one that the pair gives other values. Nothing was written.
            Or a CUDA graph is being captured, which cannot wait for the outcome.
        DeviceUnavailable, DeviceFailed, OutOfMemory: What is wrong with a device.
    """
    return _state.apply_(module_or_state_dict, pair, mode, strict, progress, _tell_autograd, _tell_again, base)


def _tell_autograd(tensors: Mapping[str, Any], entries: list[Entry]) -> list[str]:
    """Raises the versions of all tensors that show memory which the pair changes, those under other names too; their names."""
    storages = dict(zip(tensors, storages_of(list(tensors.values()))))
    changed = {storages[entry.name] for entry in entries if entry.changes or entry.base_kind == "none"} - {None}
    # Tensors made in inference mode have no versions.
    names = [name for name, storage in storages.items() if storage in changed and not tensors[name].is_inference()]
    _tell_again([tensors[name] for name in names])
    return names


def _tell_again(tensors: list[Any]) -> None:
    """Raises the versions of tensors that were found to need it, each once."""
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    try:
        torch.autograd.graph.increment_version(tensors)
    except (AttributeError, TypeError, RuntimeError):  # PyTorch before 2.6 takes one
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def iter_weights(
    pair: Pair,
    base: Base = None,
    device: str | torch.device = "cpu",
    *,
    changed_only: bool = False,
    digests: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The target's tensors one by one, names ascending, as the ``load_weights`` of inference engines takes them.

    One tensor is in memory at a time, apart from those that the caller keeps.

    Args:
        pair, base, device, digests: As for :func:`load_file`.
        changed_only: Whether tensors that equal their base are left out.

    Raises:
        As :func:`load_file`: the first call of ``next`` for what opening finds, later ones for what their tensor has.
    """
    reader = Reader(pair, base, "pt", device)
    for entry in reader.entries.values():
        if entry.changes or not entry.is_same or not changed_only:
            yield entry.name, reader.read([entry.name], digests)[entry.name]


class CheckpointWeightPatch(NamedTuple):
    """An update of one checkpoint tensor, with the fields of vLLM's class of this name."""

    #: Name in the checkpoint.
    name: str
    #: Shape of the whole tensor.
    shape: tuple[int, ...]
    #: Its dtype.
    dtype: torch.dtype
    #: The new values, one dim: at ``indices``, or of the whole tensor.
    values: torch.Tensor
    #: Where in the flattened tensor, ascending (``int32``, or ``int64`` for large tensors); ``None`` for the whole tensor.
    indices: torch.Tensor | None


def iter_patches(
    pair: Pair,
    base: Base = None,
    device: str | torch.device = "cpu",
    *,
    kind: Literal["all", "sparse", "dense"] = "all",
) -> Iterator[CheckpointWeightPatch]:
    """What the pair changes, tensor by tensor, as patches of new values at flat indices.

    A patch is dense (``indices`` is ``None``) where a sparse one cannot say it: for tensors without a base of their shape, for
    dtypes that are not floating, and for new values that are NaN, which vLLM takes for 'unchanged'. vLLM loads dense and sparse
    patches in calls apart: ``kind`` selects. Tensors that do not change have no patch.

    Chunks are checked by CRC and sums; sparse patches are not compared with the digests, which would take the whole tensor. So a
    forged blob is not detected: see :mod:`tpde.torch`.

    Args:
        pair, base, device: As for :func:`load_file`. The base is read as far as tensors change.
        kind: Which patches: ``"all"``, ``"sparse"`` or ``"dense"``.

    Raises:
        As :func:`load_file`.
    """
    if kind not in ("all", "sparse", "dense"):
        raise Misuse(f"no kind {kind!r} of patches: 'all', 'sparse' and 'dense' are known")
    reader = Reader(pair, base, "pt", device)
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
    positions, raw, size = reader.pair.changes(entry.name, reader.base_of([entry]))
    values = values_of(raw, entry.dtype)
    if values.to(torch.float64).isnan().any():
        return None
    indices = torch.frombuffer(positions, dtype=torch.int32 if size == 4 else torch.int64)
    if reader.device is not None:
        values, indices = values.to(reader.device), indices.to(reader.device)
    return CheckpointWeightPatch(entry.name, tuple(entry.shape), dtype, values, indices)


#: Integers as wide as an element of so many bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sparse_on_device(reader: Reader, entry: Entry) -> CheckpointWeightPatch | None:
    """The same where the base is on a device: the whole tensor is rebuilt beside it and compared."""
    tensor = reader.read([entry.name])[entry.name].view(-1)
    base = (reader.tensors or {})[entry.base_name].detach().view(-1)
    as_integers = _INTEGERS[tensor.element_size()]
    indices = (tensor.view(as_integers) != base.view(as_integers)).nonzero().view(-1)
    values = tensor[indices] if tensor.element_size() > 1 else tensor.view(as_integers)[indices].view(tensor.dtype)
    if values.to(torch.float64).isnan().any():
        return None
    fits = tensor.numel() <= torch.iinfo(torch.int32).max
    return CheckpointWeightPatch(entry.name, tuple(entry.shape), tensor.dtype, values, indices.to(torch.int32) if fits else indices)
