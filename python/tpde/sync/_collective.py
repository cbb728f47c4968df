"""Bytes between the ranks of a group: what a channel needs of a transport. The transports are those of PyTorch and of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from .._core.errors import BadCheckpoint, InvalidArgument, make_error, reason_of
from .._memory.torch_tensors import check_device


class Collective(Protocol):
    """A group of ranks. Rank 0 is the publisher."""

    rank: int
    size: int
    #: Where buffers are.
    device: torch.device

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Fills a U8 buffer of all ranks with that of rank 0."""

    def all_gather(self, buffers: torch.Tensor, own: torch.Tensor) -> None:
        """Fills ``buffers`` of all ranks, of shape ``[size, n]``, with the U8 buffers ``own`` of all ranks."""


def check_collective(value: Any) -> None:
    """Raises for what is no :class:`Collective`."""
    if not all(hasattr(value, name) for name in ("rank", "size", "device", "broadcast", "all_gather")):
        raise InvalidArgument(f"the group is a {type(value).__name__}: expected a TorchGroup or a Communicator")


class TorchGroup:
    """A group of ``torch.distributed``, with the backend gloo or nccl.

    Args:
        group: The group; ``None`` for the default one. Only the channel may use it meanwhile.
        device: Where buffers are: the CPU for gloo, the rank's CUDA device for nccl.
    """

    def __init__(self, group: Any = None, device: str | torch.device = "cpu") -> None:
        from torch import distributed

        self._distributed, self._group, self.device = distributed, group, check_device(device)
        if group is not None and not isinstance(group, distributed.ProcessGroup):
            raise InvalidArgument(f"the group is a {type(group).__name__}: expected one of torch.distributed")
        try:
            self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
            self._source = 0 if group is None else distributed.get_global_rank(group, 0)
        except (RuntimeError, ValueError) as error:
            raise InvalidArgument(f"torch.distributed has no such group: {error}") from error

    def broadcast(self, buffer: torch.Tensor) -> None:
        """As :class:`Collective` has it."""
        self._distributed.broadcast(buffer, self._source, group=self._group)

    def all_gather(self, buffers: torch.Tensor, own: torch.Tensor) -> None:
        """As :class:`Collective` has it."""
        self._distributed.all_gather(list(buffers.unbind(0)), own, group=self._group)


class Communicator:
    """A communicator of an inference engine, such as ``PyNcclCommunicator`` of vLLM.

    Args:
        communicator: An object with ``rank``, ``world_size``, ``device``, ``broadcast(tensor, src)`` and
            ``all_gather(output, input)``. Work is queued on the current stream.
    """

    def __init__(self, communicator: Any) -> None:
        lacking = [name for name in ("rank", "world_size", "device", "broadcast", "all_gather") if not hasattr(communicator, name)]
        if lacking:
            raise InvalidArgument(
                f"a {type(communicator).__name__} has no {', '.join(lacking)}: expected a communicator like PyNccl's"
            )
        if getattr(communicator, "disabled", False):
            raise InvalidArgument("the communicator is disabled: expected one with at least two ranks")
        self._communicator, self.device = communicator, torch.device(communicator.device)
        self.rank, self.size = int(communicator.rank), int(communicator.world_size)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """As :class:`Collective` has it."""
        self._communicator.broadcast(buffer, 0)

    def all_gather(self, buffers: torch.Tensor, own: torch.Tensor) -> None:
        """As :class:`Collective` has it."""
        self._communicator.all_gather(buffers.view(-1), own)


class Messages:
    """Messages of any length over a group. A transport that fails once is not used again, because ranks may disagree on the order."""

    def __init__(self, collective: Collective) -> None:
        self.rank, self.size = collective.rank, collective.size
        self._collective = collective
        self._lost: str | None = None

    def broadcast(self, *parts: bytes | Path) -> memoryview:
        """Rank 0 passes a message in parts, bytes or contents of files, which all ranks get. The others pass nothing."""
        with self._use():
            sizes = [len(part) if isinstance(part, bytes) else part.stat().st_size for part in parts]
            length = self._integers([sum(sizes)])
            self._collective.broadcast(length)
            size = int(length.cpu().view(torch.int64)[0])
            device = self._collective.device
            # A copy between a device and memory that is not pinned is slower, and waits for the stream.
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            message: memoryview = buffer.numpy().data
            at = 0
            for part, length_of_part in zip(parts, sizes):
                _fill(message[at : at + length_of_part], part)
                at += length_of_part
            if size:
                sent = buffer.to(device, non_blocking=True)
                self._collective.broadcast(sent)
                if not parts and sent is not buffer:
                    buffer.copy_(sent)
            return message

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks."""
        with self._use():
            own = self._integers([len(message)])
            every = torch.empty((self.size, own.numel()), dtype=torch.uint8, device=own.device)
            self._collective.all_gather(every, own)
            sizes = every.cpu().view(torch.int64).view(-1).tolist()
            padded = max(sizes)
            if not padded:
                return [b""] * self.size
            buffers = torch.empty((self.size, padded), dtype=torch.uint8, device=own.device)
            self._collective.all_gather(buffers, self._bytes(message.ljust(padded, b"\0")))
            return [row[:size].numpy().tobytes() for row, size in zip(buffers.cpu(), sizes)]

    def _bytes(self, message: bytes) -> torch.Tensor:
        if not message:
            return torch.empty(0, dtype=torch.uint8, device=self._collective.device)
        return torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._collective.device)

    def _integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).view(torch.uint8).to(self._collective.device)

    def _use(self) -> _Use:
        if self._lost is not None:
            raise make_error("disconnected", f"the channel is disconnected: {self._lost}", reason=self._lost)
        return _Use(self)


def _fill(to: memoryview, part: bytes | Path) -> None:
    """Copies bytes, or what a file has."""
    if isinstance(part, bytes):
        to[:] = part
        return
    with open(part, "rb", buffering=0) as file:
        done = 0
        while done < len(to):
            read = file.readinto(to[done:])
            if not read:
                raise BadCheckpoint(f"{part} ends after {done} bytes: expected {len(to)}", path=part, reason="it was cut")
            done += read


class _Use:
    """Names failures of a transport."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._device = messages._collective.device

    def __enter__(self) -> None:
        if self._device.type == "cuda":  # a thread begins on device 0
            torch.cuda.set_device(self._device)

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            return
        self._messages._lost = reason_of(error)
        if isinstance(error, Exception):
            raise make_error(
                "disconnected", f"the channel is disconnected: {self._messages._lost}", reason=self._messages._lost
            ) from error
