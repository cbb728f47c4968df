"""CUDA devices: pairs on them, in memory of PyTorch's and on its streams.

The compiled half allocates nothing on a device. What it works in are tensors that are made here: in the order of the stream
that it copies on, and told of the stream that works with them, so that PyTorch gives their memory to others when both have
passed. It leaves PyTorch's current device and stream as they are.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from . import _tpde
from ._errors import AlreadyApplied, DeviceUnavailable, Misuse, OutOfMemory
from ._memory import Memory
from ._paths import StrPath
from ._progress import Progress, told
from ._torch_memory import check_device

Payloads = Literal["file", "pinned", "device"]


class Device:
    """A CUDA device as both PyTorch and the compiled half have it."""

    _opened: dict[tuple[int, int], Device] = {}

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # in a process forked from one that had, for example
            raise DeviceUnavailable(f"PyTorch cannot use {device}: {error}", device=str(device)) from error
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            self.raw = _tpde.Device(device.index)
            self.copies = torch.cuda.ExternalStream(self.raw.copy_stream(), device=device)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, device: Any) -> Device:
        """The device, opened once in a process."""
        checked = check_device(device)
        if checked.type != "cuda":
            raise DeviceUnavailable(f"a CUDA device is wanted, not {checked}", device=str(checked))
        key = (os.getpid(), checked.index)
        if key not in cls._opened:
            cls._opened[key] = cls(checked)
        return cls._opened[key]

    def stream(self) -> torch.cuda.Stream:
        """PyTorch's current stream of the device."""
        return torch.cuda.current_stream(self.torch)

    def memory(self, bytes: int, what: str) -> torch.Tensor:
        """Bytes for the compiled half: at a multiple of 256 at least, as PyTorch's allocator has it."""
        try:
            with torch.inference_mode(False), torch.cuda.stream(self.copies):
                return torch.empty(max(bytes, 1), dtype=torch.uint8, device=self.torch, requires_grad=False)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"no memory on {self.torch} for {what}, {bytes} bytes", tensor=what, bytes=bytes) from error

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        if torch.cuda.current_device() == self.torch.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.torch):
            return torch.cuda.is_current_stream_capturing()

    def refuse_capture(self, what: str) -> None:
        """Raises if the current stream is being captured: a graph cannot wait for an outcome."""
        if self.is_capturing():
            raise Misuse(f"{what} waits for its outcome, which a CUDA graph that is being captured cannot")


def _given(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


class DevicePair:
    """A pair made ready on a CUDA device, for one that is used there more than once.

    :func:`tpde.torch.apply_`, :func:`tpde.torch.load_file` and :func:`tpde.nn.attach` take it in the place of a path. Its index
    is uploaded, 52 bytes a chunk.

    Args:
        pair: Name of the pair, or either file.
        device: The CUDA device.
        payloads: Where the compressed bytes are while they are not used: ``"pinned"`` memory of the host, which the device
            copies from by itself; memory of the ``"device"``, which takes no copy at all; or their ``"file"``.
        progress: As for :func:`tpde.encode`, of reading the payloads.

    Raises:
        Invalid, Limit, SystemRefused: What is wrong with the pair's files.
        DeviceUnavailable, DeviceFailed, OutOfMemory: What is wrong with the device.
    """

    def __init__(
        self, pair: StrPath, device: Any = "cuda", *, payloads: Payloads = "pinned", progress: Progress = None
    ) -> None:
        if payloads not in ("file", "pinned", "device"):
            raise Misuse(f"no place {payloads!r} for payloads: 'file', 'pinned' and 'device' are known")
        self._device = Device.of(device)
        self._device.refuse_capture("making a pair ready")
        self._path = os.fspath(pair)
        self._pair = _tpde.Pair(pair)
        self._index = self._device.memory(_tpde.DevicePair.index_bytes(self._pair), "the index of a pair")
        self._blob = None
        if payloads == "device":
            self._blob = self._device.memory(self._pair.blob_bytes(), "the payloads of a pair")
        with told(progress, "read") as tell:
            self._raw = _tpde.DevicePair(
                self._device.raw,
                self._pair,
                _given(self._index),
                payloads == "pinned",
                None if self._blob is None else _given(self._blob),
                tell,
            )

    def __fspath__(self) -> str:
        """Name of the pair, for what works on files."""
        return self._path

    @property
    def device(self) -> torch.device:
        """The device that the pair is on."""
        return self._device.torch

    def _apply(self, tensors: list[Memory], base: list[Memory], mode: str, progress: Progress) -> bool:
        """Changes tensors on the device, or rebuilds them from ``base``, and waits for the outcome: whether they were changed."""
        self._device.refuse_capture("applying a pair")
        stream = self._device.stream()
        memory = self._device.memory(self._raw.apply_bytes(self._pair, tensors, base, mode), "applying a pair")
        for used in (memory, self._index, self._blob):
            if used is not None:
                used.record_stream(stream)
        with told(progress, "apply") as tell:
            return self._raw.apply(self._pair, tensors, base, mode, _given(memory), stream.cuda_stream, tell)

    def _rebuild(self, outputs: list[Memory], base: list[Memory], progress: Progress) -> None:
        """Rebuilds tensors from others."""
        if not self._apply(outputs, base, "out_of_place", progress):
            raise AlreadyApplied("already applied: the base given is the target of this pair")
