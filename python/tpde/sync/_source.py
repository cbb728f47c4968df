"""A trainer's weights, whole or in shards, under the names of the checkpoint and in the rollout's dtype."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, Union

import torch
from torch import nn

from .._core.arguments import check_name
from .._core.errors import InvalidArgument, TpdeError, make_error, reason_of
from .._memory.arrays import describe
from .._memory.index import rectangle
from .._memory.slices import Slice
from .._memory.torch_tensors import check_device, has_name
from ..slices._cuts import Bucket, Rectangles, grid, index_of, is_within, whole_of, within
from ._collective import Messages, check_collective
from ._records import Tensors

State = Union[Mapping[str, torch.Tensor], Iterable[Slice]]
_Result = TypeVar("_Result")
#: A slice that a rank holds, and its rectangle.
_Held = tuple[Slice, Any]

#: Tensors with fewer elements are encoded whole, by the first rank. A part of a few elements costs more than it saves.
SMALL = 1 << 16


class Source:
    """A trainer's weights. Copies are made per version, so the trainer may change its weights after ``publish``.

    With ``group``, each rank of the trainer passes the elements that it holds and encodes them. All ranks make a
    :class:`Publisher` and call ``publish``; the first one has the channel. Tensors with fewer than 65,536 elements are collected by the
    first rank.

    Args:
        tensors: A module, or a function that returns a dict of tensors, for example after names and layouts were converted to those of
            the checkpoint. With ``group``, tensors may be ``DTensor`` with placements ``Shard`` and ``Replicate``, as FSDP2 has them,
            and the function may return slices with ``shape`` instead, as ranks of tensor parallelism hold them.
        dtype: The rollout's dtype: floating-point tensors are cast to it. ``None`` keeps theirs.
        device: Where the copies are: the CPU, or a CUDA device, which then encodes them.
        group: The trainer's ranks, as :class:`Collective`; its first rank has the channel.
    """

    def __init__(
        self,
        tensors: nn.Module | Callable[[], State],
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        group: Any = None,
    ) -> None:
        if not hasattr(tensors, "state_dict") and not callable(tensors):
            raise InvalidArgument(f"the source is a {type(tensors).__name__}: expected a module, or a function that returns a dict")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise InvalidArgument(f"dtype is a {type(dtype).__name__}: expected one of PyTorch")
        self._tensors, self._dtype = tensors, dtype
        #: Where copies are, and are encoded.
        self.device = check_device(device)
        if group is not None:
            check_collective(group)
        self._messages = None if group is None else Messages(group)
        #: Whether each rank passes what it holds.
        self.is_sharded = self._messages is not None
        #: Whether this rank has the channel.
        self.is_first = self._messages is None or self._messages.rank == 0

    def snapshot(self) -> Snapshot:
        """Copies of the weights that this rank encodes.

        Raises:
            InvalidArgument: Ranks hold overlapping shards that are not equal, or no rank holds some elements, or a ``DTensor`` has
                other placements.
            SyncError (rank_failed): Another rank could not pass or copy its weights.
        """
        if self._messages is None:
            state = self._state()
            if not isinstance(state, Mapping):
                raise InvalidArgument("the source has slices: expected a dict of tensors, or a group of ranks")
            own = {name: [(whole_of(tuple(tensor.shape)), tensor)] for name, tensor in state.items()}
            return self._copied({name: (_text(self._cast(one)), tuple(one.shape)) for name, one in state.items()}, own, [])
        return self._of_ranks()

    def _state(self) -> State:
        state: Any = self._tensors.state_dict() if hasattr(self._tensors, "state_dict") else self._tensors()
        if isinstance(state, Mapping):
            for name, tensor in state.items():
                self._check(check_name(name), tensor)
            return state
        if isinstance(state, (str, bytes)) or not isinstance(state, Iterable):
            raise InvalidArgument(f"the source returned a {type(state).__name__}: expected a dict of tensors, or slices")
        slices = list(state)
        for one in slices:
            if not isinstance(one, Slice):
                raise InvalidArgument(f"the source returned a {type(one).__name__}: expected a tpde.Slice")
            self._check(check_name(one.name), one.tensor)
        return slices

    def _check(self, name: str, tensor: Any) -> None:
        """Raises if a tensor cannot be copied, or its dtype cannot be in a pair."""
        if not isinstance(tensor, torch.Tensor):
            why = (
                ", which a state dict may have beside tensors: pass a function that leaves it out" if "_extra_state" in name else ""
            )
            raise InvalidArgument(f"tensor {name!r} is a {type(tensor).__name__}: expected a PyTorch tensor{why}")
        if hasattr(tensor, "placements"):
            return
        try:
            describe(name, tensor, device=tensor.device)
        except InvalidArgument as error:
            if error.code != "not_contiguous":
                raise
        if not has_name(self._cast(tensor)):
            raise InvalidArgument(f"tensor {name!r} has dtype {self._cast(tensor)}, which cannot be in a pair")

    def _of_ranks(self) -> Snapshot:
        """A function of the trainer, and each copy, may fail on one rank only. So ranks go on after all have done a step."""
        held, described = self.gather(self._held)
        tensors, owners, shards = _owners([json.loads(text) for text in described])
        shapes = {name: shape for name, (_, shape) in tensors.items()}
        own, received = self.gather(lambda: self._divided(held, shapes, owners))
        large = {name: indices for name, indices in shards.items() if math.prod(shapes[name]) >= SMALL}

        def copied() -> Snapshot:
            wholes = _put_together(received, shapes) if self.is_first else {}
            small = {name: [(whole_of(shapes[name]), whole)] for name, whole in wholes.items()}
            return self._copied(tensors, {**own, **small}, [large])

        return self.each(copied)

    def _held(self) -> tuple[list[_Held], bytes]:
        """The slices of this rank, and their description for all ranks."""
        held = [(one, rectangle(one.name, one.index, [*(one.shape or ())])) for one in _slices_of(self._state())]
        plain = [(one.name, [*(one.shape or ())], box.origin, box.extent, _text(self._cast(one.tensor))) for one, box in held]
        return held, json.dumps(plain).encode()

    def _divided(self, held: list[_Held], shapes: Mapping[str, tuple[int, ...]], owners: dict[Any, int]) -> tuple[Any, bytes]:
        """The elements that this rank encodes, and a message with those of small tensors."""
        assert self._messages is not None
        own: dict[str, list[tuple[Any, torch.Tensor]]] = {}
        small: list[Any] = []
        for one, box in held:
            if owners.pop((one.name, (*box.origin,), (*box.extent,)), None) != self._messages.rank:
                continue  # another rank has the same elements
            tensor = one.tensor.detach().reshape(box.extent)
            if math.prod(shapes[one.name]) < SMALL:
                small.append((one.name, box.origin, box.extent, tensor.to("cpu", self._cast(tensor)).contiguous()))
            elif 0 not in box.extent:
                own.setdefault(one.name, []).append((index_of(box.origin, box.extent), tensor))
        header = json.dumps([(name, origin, extent, _text(tensor.dtype)) for name, origin, extent, tensor in small]).encode()
        parts = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for *_, tensor in small]
        return own, b"".join([len(header).to_bytes(8, "little"), header, *parts])

    def _copied(self, tensors: Tensors, own: Any, cuts: list[Rectangles]) -> Snapshot:
        copies = {
            name: [(index, one.detach().to(self.device, self._cast(one), copy=True).contiguous()) for index, one in held]
            for name, held in own.items()
        }
        # From now on the caller may change the weights, also on another stream.
        for device in {one.device for held in own.values() for _, one in held if one.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return Snapshot(tensors, copies, cuts)

    def _cast(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def share(self, plan: Any = None) -> Any:
        """The first rank passes a plan, which all ranks get."""
        if self._messages is None:
            return plan
        return json.loads(bytes(self._messages.broadcast(*[json.dumps(plan).encode()] if self.is_first else [])))

    def gather(self, work: Callable[[], tuple[_Result, bytes]]) -> tuple[_Result, list[bytes]]:
        """Calls a function on each rank of a source with a ``group``. It returns a result and a message. Returns the result of this
        rank, and the messages of all.

        Raises:
            SyncError (rank_failed): The function has raised on another rank. A rank on which it raises gets its own error.
        """
        assert self._messages is not None
        try:
            result, message = work()
        except Exception as error:
            self._messages.gather(b"\0" + reason_of(error).encode())
            raise
        received = self._messages.gather(b"\1" + message)
        for rank, text in enumerate(received):
            if text[:1] != b"\1":
                raise rank_failed(rank, text[1:].decode())
        return result, [text[1:] for text in received]

    def each(self, work: Callable[[], _Result]) -> _Result:
        """Calls a function, on each rank. If it raises on one rank, all raise, as :meth:`gather`."""
        return work() if self._messages is None else self.gather(lambda: (work(), b""))[0]


class Snapshot:
    """Copies of the elements that a rank encodes."""

    def __init__(self, tensors: Tensors, held: Any, cuts: list[Rectangles]) -> None:
        #: Dtypes and shapes of all tensors, also of those of other ranks.
        self.tensors = dict(tensors)
        self.shapes = {name: shape for name, (_, shape) in tensors.items()}
        self._held, self._cuts = held, cuts
        self.bytes = {name: sum(one.numel() * one.element_size() for _, one in parts) for name, parts in held.items()}

    def slices(self, bucket: Bucket, rectangles: Iterable[Rectangles]) -> list[Slice]:
        """The elements of a bucket, cut where receivers and ranks of the trainer hold them."""
        wanted = {name: self.shapes[name] for name in bucket}
        rows = {name: one for name, one in bucket.items() if one != whole_of(wanted[name])}
        every = [*rectangles, *self._cuts, {name: [one] for name, one in rows.items()}]
        cuts = [{name: one[name] for name in wanted if name in one} for one in every]
        return [
            Slice(name, index, tensor[within(index, origin)], self.shapes[name])
            for name, indices in grid(wanted, cuts).items()
            for origin, tensor in self._held.get(name, ())
            for index in indices
            if is_within(index, origin) and (name not in rows or is_within(index, rows[name]))
        ]

    def of(self, slices: Iterable[Slice]) -> list[Slice]:
        """The same elements as those slices, of this snapshot: the base of a difference."""
        found = []
        for one in slices:
            for origin, tensor in self._held.get(one.name, ()):
                if is_within(one.index, origin):
                    found.append(Slice(one.name, one.index, tensor[within(one.index, origin)], self.shapes[one.name]))
        return found


def rank_failed(rank: int, reason: str) -> TpdeError:
    """The error of a rank that has failed, for the others."""
    return make_error("rank_failed", f"rank {rank} of the trainer failed: {reason}", rank=rank, reason=reason)


def _put_together(received: list[bytes], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Small tensors, of the elements that ranks have sent."""
    wholes: dict[str, torch.Tensor] = {}
    for message in received:
        at = 8 + int.from_bytes(message[:8], "little")
        for name, origin, extent, text in json.loads(message[8:at]):
            dtype = getattr(torch, text)
            size = math.prod(extent) * dtype.itemsize
            part = torch.frombuffer(bytearray(message[at : at + size]), dtype=torch.uint8) if size else torch.empty(0)
            at += size
            whole = wholes.setdefault(name, torch.empty(shapes[name], dtype=dtype))
            if size:
                whole[index_of(origin, extent)] = part.view(dtype).view(extent)
    return wholes


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _slices_of(state: State) -> Iterable[Slice]:
    """The elements that a rank holds."""
    if not isinstance(state, Mapping):
        yield from state
        return
    sharded: Mapping[str, Any] = state
    for name, tensor in sharded.items():
        placements, shape = getattr(tensor, "placements", None), tuple(tensor.shape)
        if placements is None:
            yield Slice(name, whole_of(shape), tensor, shape)
            continue
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        # A strided shard is a subclass in some releases: its elements are no rectangle.
        if any(type(one) not in (Shard, Replicate) for one in placements):
            raise InvalidArgument(f"tensor {name!r} has placements {placements}: expected Shard and Replicate")
        extent, origin = compute_local_shape_and_global_offset(shape, tensor.device_mesh, placements)
        yield Slice(name, index_of(origin, extent), tensor.to_local(), shape)


def _owners(ranks: list[Any]) -> tuple[Tensors, dict[Any, int], dict[str, list[tuple[slice, ...]]]]:
    """Dtypes and shapes of all tensors, the first rank that holds each rectangle, and the rectangles of each tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    owners: dict[Any, int] = {}
    shards: dict[str, list[tuple[slice, ...]]] = {}
    for rank, held in enumerate(ranks):
        for name, shape, origin, extent, dtype in held:
            if shapes.setdefault(name, tuple(shape)) != tuple(shape) or dtypes.setdefault(name, dtype) != dtype:
                raise InvalidArgument(
                    f"rank {rank} has tensor {name!r} as {dtype} {shape}: expected {dtypes[name]} {[*shapes[name]]}, as other ranks"
                )
            if (name, tuple(origin), tuple(extent)) not in owners:
                owners[name, tuple(origin), tuple(extent)] = rank
                shards.setdefault(name, []).append(index_of(origin, extent))
    for name, indices in shards.items():
        elements = sum(math.prod(one.stop - one.start for one in index) for index in indices)
        if elements != math.prod(shapes[name]):
            problem = "lack elements of" if elements < math.prod(shapes[name]) else "hold overlapping shards of"
            raise InvalidArgument(f"the ranks {problem} tensor {name!r} of shape {[*shapes[name]]}")
    return {name: (dtypes[name], shape) for name, shape in sorted(shapes.items())}, owners, shards
