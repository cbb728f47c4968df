"""Pairs and dicts of NumPy arrays. Functions have the names of those in ``safetensors.numpy``.

Dtypes that NumPy lacks (BF16, F8) are those of the package ml_dtypes. F4 and F6 have none. ``as_integers=True`` reads tensors of all
these dtypes as unsigned integers with the same bits. Arrays that are read or changed in place may have either form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._core.options import EncodeOptions, Unpack, checked
from ._core.progress import Progress
from ._engine import state as _state
from ._engine.application import Mode, Outcome, SlicesApplication
from ._files.paths import Digest, EncodeReport, StrPath
from ._memory.slices import Slice

if TYPE_CHECKING:
    import numpy

__all__ = ["apply_", "apply_slices_", "load_file", "save_file"]


def load_file(
    pair: StrPath,
    *,
    base: StrPath | Mapping[str, numpy.ndarray[Any, Any]] | None = None,
    digests: bool = True,
    as_integers: bool = False,
    expect: Digest | None = None,
    progress: Progress = None,
) -> dict[str, numpy.ndarray[Any, Any]]:
    """All tensors of the target of ``pair``, rebuilt from ``base``: name to array. As :func:`tpde.torch.load_file`.

    Args:
        as_integers: Whether tensors of a dtype that NumPy lacks (BF16, F8, F6, F4) are arrays of unsigned integers with the same
            bits. Arrays of F6 and F4 have the last dim in bytes, or one dim if rows are not whole bytes. :func:`save_file` writes
            such an array with the dtype of the tensor, and so a copy or view of it, and what keeps its dtype in NumPy.

    Raises:
        InvalidArgument: A tensor has a dtype that ml_dtypes has, and ml_dtypes is not installed; or one that it lacks.
    """
    return _state.load(
        pair, base=base, framework="np", device="cpu", digests=digests, expect=expect, progress=progress, as_integers=as_integers
    )


def save_file(
    tensors: Mapping[str, numpy.ndarray[Any, Any]] | Iterable[Slice],
    path: StrPath,
    *,
    base: StrPath | Mapping[str, numpy.ndarray[Any, Any]] | Iterable[Slice] | None = None,
    replace: bool = False,
    progress: Progress = None,
    **options: Unpack[EncodeOptions],
) -> EncodeReport:
    """Write the difference of the arrays ``tensors`` from ``base`` as the pair ``path``. As :func:`tpde.torch.save_file`.

    A BF16 tensor is an array of ml_dtypes, or one that was read with ``as_integers``. Other arrays of ``uint16`` are tensors of U16.
    """
    return _state.save(tensors, path, base=base, options=checked(EncodeOptions, options), replace=replace, progress=progress)


def apply_(
    tensors: Mapping[str, numpy.ndarray[Any, Any]],
    pair: StrPath | Sequence[StrPath],
    *,
    mode: Mode = "all_checked",
    strict: bool = True,
    expect: Digest | None = None,
    progress: Progress = None,
) -> Outcome:
    """Turn base arrays into target arrays in place. As :func:`tpde.torch.apply_`; read-only arrays are refused."""
    return _state.apply_(tensors, pair, mode=mode, strict=strict, expect=expect, progress=progress)


def apply_slices_(
    slices: Iterable[Slice],
    pair: StrPath | Sequence[StrPath],
    *,
    base: StrPath | Mapping[str, numpy.ndarray[Any, Any]] | Iterable[Slice] | None = None,
    mode: Mode = "all_checked",
    expect: Digest | None = None,
    progress: Progress = None,
) -> Outcome:
    """Turn slices of base arrays into slices of target arrays in place. As :func:`tpde.torch.apply_slices_`; read-only arrays are
    refused."""
    return SlicesApplication(slices, pair, base=base, mode=mode, expect=expect).apply(progress)
