"""Pairs on CUDA devices, in PyTorch's memory and on its streams.

The Rust half allocates no device memory. This module allocates tensors for it, in the order of the copy stream, and records the
streams that use them, so that PyTorch reuses their memory only after both streams have passed. PyTorch's current device and stream
stay unchanged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch

from . import _tpde
from ._entry import Entry
from ._errors import AlreadyApplied, DeviceUnavailable, Misuse, OutOfMemory
from ._paths import StrPath, path_of
from ._progress import Progress, told
from ._tensor import Memory
from ._torch_memory import Seen, check_device

#: Bytes for lists of changes. They keep a call, without payloads, within 64 MiB as PyTorch rounds allocations: an index of more
#: than 1 MiB takes a block of 20 MiB.
_SCRATCH, _SCRATCH_BESIDE_LARGE = 58 << 20, 40 << 20

Payloads = Literal["file", "pinned", "device"]
_Result = TypeVar("_Result")


class Device:
    """A CUDA device, opened both by PyTorch and by the Rust half."""

    _opened: dict[tuple[int, int], Device] = {}

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        #: When the last application was completely queued, by :func:`time.perf_counter`; the rest is waiting.
        self.queued = 0.0
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
            raise DeviceUnavailable(f"expected a CUDA device, found {checked}", device=str(checked))
        key = (os.getpid(), checked.index)
        if key not in cls._opened:
            cls._opened[key] = cls(checked)
        return cls._opened[key]

    def stream(self) -> torch.cuda.Stream:
        """PyTorch's current stream of the device."""
        return torch.cuda.current_stream(self.torch)

    def memory(self, bytes: int, what: str) -> torch.Tensor:
        """Memory for the Rust half, aligned to 256 by PyTorch's allocator. Never from the pool of a graph."""
        try:
            with torch.inference_mode(False):
                return on_stream(self.copies, lambda: self.raw.beside_captures(lambda: self._empty(bytes)))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"no memory on {self.torch} for {what}, {bytes} bytes", tensor=what, bytes=bytes) from error

    def _empty(self, bytes: int) -> torch.Tensor:
        return torch.empty(max(bytes, 1), dtype=torch.uint8, device=self.torch)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        try:
            current = torch.cuda.current_device()
        except RuntimeError as error:  # in a process forked from one that had used it
            raise DeviceUnavailable(f"PyTorch cannot use {self.torch}: {error}", device=str(self.torch)) from error
        if current == self.torch.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.torch):
            return torch.cuda.is_current_stream_capturing()

    def refuse_capture(self, what: str) -> None:
        """Raises if the current stream is being captured: a graph cannot wait for an outcome."""
        if self.is_capturing():
            raise Misuse(f"{what} waits for its outcome, which a CUDA graph that is being captured cannot")


def on_stream(stream: torch.cuda.Stream, work: Callable[[], _Result]) -> _Result:
    """Calls ``work`` with this stream as the current one. Restores the current stream and device even if a signal handler raises at any
    bytecode, which the context manager ``torch.cuda.stream`` does not."""
    device, before = torch._C._cuda_getDevice(), torch.cuda.current_stream(stream.device)
    switch = torch._C._cuda_setStream
    try:
        switch(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
        return work()
    finally:
        # Only C calls: signal handlers run after them.
        try:
            switch(stream_id=before.stream_id, device_index=before.device_index, device_type=before.device_type)
        finally:
            torch._C._cuda_setDevice(device)


def copy_on(stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
    """Queues a copy, for example from pinned memory."""
    on_stream(stream, lambda: to.copy_(source, non_blocking=True))


def _given(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _described(tensors: list[Memory]) -> list[tuple[str, str, list[int], int]]:
    return [(name, dtype, shape, bytes) for name, dtype, shape, _, bytes, _ in tensors]


def _same(seen: Seen | None, tensors: Mapping[str, Any] | None) -> bool:
    return seen is None if tensors is None else seen is not None and seen.same(tensors)


class _Ready:
    """An application that can be run again."""

    def __init__(self, pair: DevicePair, tensors: list[Memory], base: list[Memory], mode: str) -> None:
        self.mode = mode
        self.of = (_described(tensors), _described(base))
        device = pair._device
        scratch = _SCRATCH if pair._index.numel() <= 1 << 20 else _SCRATCH_BESIDE_LARGE
        plan = pair._raw.plan_all(tensors, base, mode, scratch)
        self.memory = device.memory(plan.bytes(), "applying a pair")
        self.raw = plan.prepare(_given(self.memory))
        #: Streams recorded with its memory.
        self.streams: set[int] = set()
        #: The state dicts of target and base of the last call, to recognise a call with the same tensors.
        self.seen: Seen | None = None
        self.base: Seen | None = None
        #: Names of tensors that autograd is notified about, and whether all tensors of the pair were present.
        self.told: list[str] = []
        self.is_complete = True
        #: Name, dims and dtype of the tensors to allocate for results.
        self.made: list[tuple[str, list[int], torch.dtype]] | None = None

    def run(self, pair: DevicePair, progress: Progress) -> bool:
        """Runs it on the current stream and waits. Returns whether tensors were changed. ``pair`` is the owner of this application."""
        device = pair._device
        stream = device.stream()
        handle = stream.cuda_stream
        if handle not in self.streams:
            self.streams.add(handle)
            for used in (self.memory, pair._index, pair._blob):
                if used is not None:
                    used.record_stream(stream)
        with told(progress, "apply") as tell:
            begin = time.perf_counter()
            applied, queued = self.raw.run(handle, tell)
            device.queued = begin + queued
        return applied


class DevicePair:
    """A pair made ready on a CUDA device, for one that is used there more than once.

    :func:`tpde.torch.apply_`, :func:`tpde.torch.load_file` and :func:`tpde.nn.attach` accept it instead of a path. Its index
    is uploaded (52 bytes per chunk). Calls compare CRC and sums, but no digests: see :mod:`tpde.torch` about forged blobs. The plan
    and memory of the last call are kept, so a call with the same tensors, or for the same results, starts at once.

    Args:
        pair: Name of the pair, or either file.
        device: The CUDA device.
        payloads: Where the compressed bytes are kept: in ``"pinned"`` host memory, from which the device copies directly; in
            memory of the ``"device"``, without a copy; or in their ``"file"``.
        progress: As for :func:`tpde.encode`, of reading the payloads, unless they stay in their file.

    Raises:
        Invalid, Limit, SystemRefused: What is wrong with the pair's files.
        DeviceUnavailable, DeviceFailed, OutOfMemory: What is wrong with the device.
    """

    def __init__(
        self, pair: StrPath, device: Any = "cuda", *, payloads: Payloads = "pinned", progress: Progress = None
    ) -> None:
        if payloads not in ("file", "pinned", "device"):
            raise Misuse(f"unknown payloads={payloads!r}: expected 'file', 'pinned' or 'device'")
        self._begin(pair, None, device, payloads, progress)

    @classmethod
    def _of_opened(cls, path: StrPath, pair: _tpde.Pair, device: Any) -> DevicePair:
        """One for a single use."""
        made = cls.__new__(cls)
        made._begin(path, pair, device, "file", None)
        return made

    def _begin(self, path: StrPath, pair: _tpde.Pair | None, device: Any, payloads: Payloads, progress: Progress) -> None:
        self._device = Device.of(device)
        self._device.refuse_capture("making a pair ready")
        self._path = path_of(path)
        self._pair = _tpde.Pair(self._path) if pair is None else pair
        self._index = self._device.memory(_tpde.DevicePair.index_bytes(self._pair), "the index of a pair")
        self._blob = None
        self._listed: list[Entry] | None = None
        #: The last application, removed from the dict while in use. A dict, because its operations are atomic.
        self._kept: dict[str, _Ready] = {}
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
        """Name of the pair, for functions on files."""
        return self._path

    @property
    def device(self) -> torch.device:
        """The device that the pair is on."""
        return self._device.torch

    def _entries(self) -> list[Entry]:
        """The tensors of the pair."""
        if self._listed is None:
            self._listed = list(map(Entry._make, self._pair.tensors()))
        return self._listed

    def _apply(self, tensors: list[Memory], base: list[Memory], mode: str, progress: Progress) -> tuple[bool, _Ready]:
        """Changes tensors on the device, or rebuilds them from ``base``, and waits for the outcome. Returns whether they were changed,
        and the application."""
        self._device.refuse_capture("applying a pair")
        ready = self._kept.pop("", None)
        if ready is not None:
            is_like = ready.mode == mode and ready.of == (_described(tensors), _described(base))
            addresses = [memory[3] for memory in tensors], [memory[3] for memory in base]
            if not is_like or not ready.raw.move_to(*addresses):
                ready = None
        if ready is None:
            ready = _Ready(self, tensors, base, mode)
        return ready.run(self, progress), ready

    def _rebuild(self, outputs: list[Memory], base: list[Memory], progress: Progress) -> _Ready:
        """Rebuilds tensors from others."""
        applied, ready = self._apply(outputs, base, "out_of_place", progress)
        if not applied:
            raise AlreadyApplied("already applied: the base is the target of this pair")
        return ready

    def _remember(
        self,
        ready: _Ready,
        seen: Mapping[str, Any] | None,
        base: Mapping[str, Any] | None,
        told: list[str] | None = None,
        is_complete: bool = True,
        made: list[tuple[str, list[int], torch.dtype]] | None = None,
    ) -> None:
        """Keeps an application for later calls with the same tensors."""
        ready.seen = None if seen is None else Seen(seen)
        ready.base = None if base is None else Seen(base)
        ready.told, ready.is_complete, ready.made = told or [], is_complete, made
        self._kept[""] = ready

    def _again(
        self, seen: Mapping[str, Any], base: Mapping[str, Any] | None, mode: str, strict: bool
    ) -> _Ready | None:
        """The application of the last call, if the tensors are the same."""
        ready = self._kept.pop("", None)
        if ready is None:
            return None
        is_like = ready.mode == mode and ready.made is None and (ready.is_complete or not strict)
        if is_like and _same(ready.seen, seen) and _same(ready.base, base):
            return ready
        self._kept[""] = ready
        return None

    def _load_again(self, base: Mapping[str, Any] | None, device: Any, progress: Progress) -> dict[str, torch.Tensor] | None:
        """All tensors of the target, if the last call was for the same base."""
        here = self._device.torch
        try:
            wanted = torch.device(device)
            is_here = wanted == here or (wanted == torch.device("cuda") and torch.cuda.current_device() == here.index)
        except (RuntimeError, TypeError):  # reported when the device is checked
            return None
        ready = self._kept.pop("", None) if is_here else None
        if ready is None:
            return None
        if ready.made is None or not _same(ready.base, base):
            self._kept[""] = ready
            return None
        self._device.refuse_capture("applying a pair")
        empty = torch.empty
        try:
            made = {name: empty(dims, dtype=dtype, device=here, requires_grad=False) for name, dims, dtype in ready.made}
        except RuntimeError:  # out of memory, reported by the first allocation
            return None
        if not ready.raw.move_to(list(map(torch.Tensor.data_ptr, made.values()))):
            return None
        applied = ready.run(self, progress)
        self._kept[""] = ready
        if not applied:
            raise AlreadyApplied("already applied: the base is the target of this pair")
        return made
