"""Slices: rectangles of tensors in memory that may have gaps between rows, for the ranks of a distributed job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._core.arguments import check_name
from .._core.errors import InvalidArgument
from .arrays import describe, device_of, strides_of
from .index import rectangle
from .tensor import Entry, SliceMemory, is_packed, pitch_and_size


@dataclass(frozen=True, eq=False)
class Slice:
    """A rectangle of a tensor of a pair, and the memory that holds it, in its own or in a larger parameter::

        qkv = model.layers[0].qkv.weight  # query rows, then key rows, then value rows of this rank
        slices = [
            tpde.Slice("layers.0.q_proj.weight", np.s_[1024:2048], qkv[:1024]),
            tpde.Slice("layers.0.k_proj.weight", np.s_[256:512], qkv[1024:1280]),
            tpde.Slice("layers.0.v_proj.weight", np.s_[256:512], qkv[1280:]),
        ]
        tpde.torch.apply_slices_(slices, "step100")

    Args:
        name: Name of the tensor in the pair.
        index: The elements, as NumPy has them: slices with step 1, integers, and at most one ``...``. Missing dims are whole.
        tensor: A NumPy array or a PyTorch tensor with the shape and dtype of these elements. Elements of its last dim are contiguous,
            and rows are at equal distances, as in a view of columns. Memory between rows is neither read nor written; it may hold rows
            of other slices. A view with rows at two distances, as ``experts[:, :n]`` of three dims can have, is several slices, one
            per index of its first dim.
        shape: Shape of the whole tensor. Needed to encode the slice. A pair that is applied has it.
    """

    name: str
    index: Any
    tensor: Any
    shape: Sequence[int] | None = None


def is_slices(value: Any) -> bool:
    """Whether these are slices, and neither a dict of tensors nor a module. An iterator counts as slices."""
    return not isinstance(value, (Mapping, str, bytes)) and not hasattr(value, "named_parameters") and isinstance(value, Iterable)


def checked(slices: Any) -> list[Slice]:
    """A list of slices."""
    if not is_slices(slices):
        raise InvalidArgument(f"slices is a {type(slices).__name__}: expected several tpde.Slice")
    listed = list(slices)
    for one in listed:
        if not isinstance(one, Slice):
            raise InvalidArgument(f"slices has a {type(one).__name__}: expected tpde.Slice")
        check_name(one.name)
    return listed


def device_of_slices(slices: list[Slice]) -> Any:
    """The CUDA device of the slices; ``None`` for the CPU."""
    return device_of(one.tensor for one in slices)


def describe_slices(
    slices: list[Slice], entries: Mapping[str, Entry], *, writable: bool = False, device: Any = "cpu"
) -> list[SliceMemory]:
    """Checks slices of the tensors of ``entries`` and describes their memory, on this device. Leaves out those without elements."""
    described = []
    for one in slices:
        entry = entries.get(one.name)
        if entry is None:
            raise InvalidArgument(f"no tensor {one.name!r} in the pair")
        if one.shape is not None and [*one.shape] != entry.shape:
            raise InvalidArgument(f"tensor {one.name!r} has shape {[*one.shape]} here, and {entry.shape} in the pair")
        described.append(_describe(one, entry.shape, entry.dtype, writable=writable, device=device))
    return [memory for memory in described if 0 not in memory[2]]


def describe_saved(slices: Any, device: Any = "cpu") -> list[SliceMemory]:
    """Checks slices that are to be encoded and describes their memory, on this device. Leaves out those without elements."""
    described = []
    for one in checked(slices):
        if one.shape is None:
            raise InvalidArgument(f"slice of tensor {one.name!r} has no shape: expected that of the whole tensor")
        described.append(_describe(one, [*one.shape], None, writable=False, device=device))
    return [memory for memory in described if 0 not in memory[2]]


def _describe(one: Slice, shape: list[int], dtype: str | None, *, writable: bool, device: Any = "cpu") -> SliceMemory:
    """Describes the memory of a slice of a tensor of this shape and dtype. ``None`` is the dtype that the memory has."""
    wanted = rectangle(one.name, one.index, shape)
    tensor, dims = one.tensor, wanted.shape
    if len(getattr(tensor, "shape", ())) == len(dims) and not all(wanted.kept):
        tensor, dims = tensor[tuple(slice(None) if is_kept else None for is_kept in wanted.kept)], wanted.extent
    memory = describe(one.name, tensor, None if dtype is None else (dtype, dims), writable=writable, device=device, has_rows=True)
    found = memory[1]
    if is_packed(found if dtype is None else dtype):
        raise InvalidArgument(f"tensor {one.name!r} of {dtype or found} has elements of less than a byte: expected whole tensors")
    if (dtype or found, dims) != (found, memory[2]):
        raise InvalidArgument(
            f"slice {one.index} of tensor {one.name!r} of shape {shape} is {found} {[*one.tensor.shape]}: expected {dtype or found} "
            f"{wanted.shape}"
        )
    pitch = pitch_and_size(one.name, tuple(tensor.shape), strides_of(tensor), tensor.itemsize)[0]
    return (one.name, found, shape, *memory[3:]), wanted.origin, wanted.extent, pitch
