"""Pairs on CUDA devices, in PyTorch's memory and on its streams.

The Rust half allocates no device memory. It uses tensors that are made here, allocated in the order of the Rust half's copy stream
and recorded with the stream that uses them. So PyTorch reuses their memory only after both streams have finished with it. PyTorch's
current device and stream do not change.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar, Union

import torch

from .. import _tpde
from .._core.arguments import check_kinds
from .._core.errors import AlreadyApplied, DeviceError, InvalidArgument, OutOfMemory, make_error
from .._core.progress import Progress, progress_callback
from .._files.paths import Digest, StrPath, digest_of, open_pair, path_of
from .._memory import torch_tensors
from .._memory.tensor import Entry, Memories, SliceMemory
from .._memory.torch_tensors import StateSnapshot, check_device

#: Scratch memory in bytes for the changes of chunks. With it, all memory of a call besides payloads is at most 64 MiB after
#: PyTorch's rounding. The second value is for an index of more than 1 MiB, for which PyTorch allocates a block of 20 MiB.
_SCRATCH, _SCRATCH_BESIDE_LARGE = 58 << 20, 40 << 20

#: Memory in bytes for the index of a pair that is being opened: as much as PyTorch takes from its blocks for small tensors. A larger index
#: is uploaded when its size is known.
_INDEX_AHEAD = 1 << 20

Payloads = Literal["file", "pinned", "device"]
_Result = TypeVar("_Result")


class Device:
    """A CUDA device, opened in PyTorch and in the Rust half."""

    _opened: dict[tuple[int, int], Device] = {}

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        #: Time of :func:`time.perf_counter` when the last application was queued. After it, the host only waits.
        self.queued = 0.0
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # for example, a process forked after CUDA was initialized
            raise make_error("no_device", f"PyTorch cannot use {device}: {error}", device=str(device)) from error
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            self.raw = self.with_room(_tpde.Device)(device.index)
            self.copies = torch.cuda.ExternalStream(self.raw.copy_stream(), device=device)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, device: Any) -> Device:
        """The device, opened once per process."""
        checked = check_device(device)
        if checked.type != "cuda":
            raise make_error("no_device", f"expected a CUDA device, found {checked}", device=str(checked))
        key = (os.getpid(), checked.index)
        if key not in cls._opened:
            cls._opened[key] = cls(checked)
        return cls._opened[key]

    def stream(self) -> torch.cuda.Stream:
        """PyTorch's current stream of the device."""
        return torch.cuda.current_stream(self.torch)

    def current(self) -> int:
        """Handle of the current stream. Much faster than :meth:`stream`."""
        handle: int = torch._C._cuda_getCurrentRawStream(self.torch.index)
        return handle

    def new_stream(self) -> torch.cuda.Stream:
        """A stream on which work does not wait for other streams."""
        return torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream, work: Callable[[], _Result]) -> _Result:
        """Calls ``work`` with this stream as the current one of the calling thread."""
        return on_stream(stream, work)

    def order(self, stream: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
        """Makes work that is queued on ``stream`` from now on wait for what ``after`` has now. The host does not wait."""
        stream.wait_stream(after)

    def memory(self, bytes: int, what: str) -> torch.Tensor:
        """Memory for the Rust half, never from a graph's pool. PyTorch's allocator aligns it to at least 256 bytes."""
        return self._memory_of(self.copies, bytes, what)

    def scratch(self, bytes: int, what: str) -> torch.Tensor:
        """Memory for work on the current stream, as :meth:`memory` otherwise."""
        return self._memory_of(self.stream(), bytes, what)

    def _memory_of(self, stream: torch.cuda.Stream, bytes: int, what: str) -> torch.Tensor:
        make = partial(torch.empty, max(bytes, 1), dtype=torch.uint8, device=self.torch)
        try:
            with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                return on_stream(stream, partial(self.raw.beside_captures, make))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"no memory on {self.torch} for {what}, {bytes} bytes", tensor=what, bytes=bytes) from error

    def with_room(self, work: Callable[..., _Result]) -> Callable[..., _Result]:
        """``work``, which takes memory from the driver. If there is not enough, it is called again after PyTorch has given back what it
        does not use."""

        def call(*arguments: Any, **how: Any) -> _Result:
            try:
                return work(*arguments, **how)
            except DeviceError as error:
                if "CUDA_ERROR_OUT_OF_MEMORY" not in (error.reason or ""):
                    raise
            torch.cuda.empty_cache()
            return work(*arguments, **how)

        return call

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        # Layers ask at every call. These are much faster than the functions of `torch.cuda`, which see that CUDA is initialized.
        if not torch.cuda._is_in_bad_fork() and torch._C._cuda_getDevice() == self.torch.index:
            return torch._C._cuda_isCurrentStreamCapturing()
        try:
            current = torch.cuda.current_device()
        except RuntimeError as error:  # a process forked after CUDA was used
            raise make_error("no_device", f"PyTorch cannot use {self.torch}: {error}", device=str(self.torch)) from error
        if current == self.torch.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.torch):
            return torch.cuda.is_current_stream_capturing()

    def refuse_capture(self, what: str) -> None:
        """Raises if the current stream is being captured, because a graph cannot wait for an outcome."""
        if self.is_capturing():
            raise InvalidArgument(f"{what} waits for its outcome, so it cannot run while the current stream is being captured")


def on_stream(stream: torch.cuda.Stream, work: Callable[[], _Result]) -> _Result:
    """Calls ``work`` with this stream as the current one. The thread's stream and device are restored even if a signal handler
    raises between any two bytecodes, which the context manager ``torch.cuda.stream`` does not guarantee."""
    device, before = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(stream.device_index)
    switch = torch._C._cuda_setStream
    try:
        switch(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
        return work()
    finally:
        # Both are C functions: a signal handler can raise only after each has returned.
        try:
            switch(stream_id=before[0], device_index=before[1], device_type=before[2])
        finally:
            torch._C._cuda_setDevice(device)


class SideStream:
    """A stream of a device beside PyTorch's current one, for work that must not wait for what is queued there.

    Args:
        device: A CUDA device. With ``None``, for the CPU, work is only called.
    """

    def __init__(self, device: Any) -> None:
        self._device = None if device is None else Device.of(device)
        self.stream = None if self._device is None else self._device.new_stream()

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Calls ``work`` with this stream as the current one of the calling thread."""
        return work() if self._device is None or self.stream is None else self._device.on(self.stream, work)

    def follow(self) -> None:
        """Makes this stream wait for what the current one has now."""
        if self._device is not None and self.stream is not None:
            self._device.order(self.stream, self._device.stream())

    def precede(self) -> None:
        """Makes the current stream wait for what this one has now."""
        if self._device is not None and self.stream is not None:
            self._device.order(self._device.stream(), self.stream)


def copy_on(stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
    """Queues a copy on this stream."""
    on_stream(stream, lambda: to.copy_(source, non_blocking=True))


def _address_and_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


#: Whole tensors, or slices of tensors.
_Memories = Union[Memories, list[SliceMemory]]


def _split(tensors: _Memories) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Of each tensor or slice all but address and owner; and the addresses."""
    listed: Any = tensors.memories() if isinstance(tensors, _tpde.PlainTensors) else tensors
    each = [(one[0], one[1:]) if len(one) == 4 else (one, ()) for one in listed]
    return [(*memory[:3], memory[4], *place) for memory, place in each], [memory[3] for memory, _ in each]


def _same(snapshot: StateSnapshot | None, tensors: Mapping[str, Any] | None) -> bool:
    return snapshot is None if tensors is None else snapshot is not None and snapshot.same(tensors)


class Application:
    """A prepared application of a pair to tensors or slices. It can be run again for the same ones."""

    def __init__(self, pair: DevicePair, tensors: _Memories, base: _Memories, mode: str, *, digests: bool = True) -> None:
        self.mode = mode
        #: Mode, and what tensors must have for it to run on them, if it is kept.
        self.described: Any = None
        device = pair._device
        scratch = _SCRATCH if pair._index.numel() <= 1 << 20 else _SCRATCH_BESIDE_LARGE
        plan = pair._raw.plan_all(tensors, base, mode, scratch_most=scratch, digests=digests)
        self.memory = device.memory(plan.bytes(), "applying a pair")
        self.raw = plan.prepare(_address_and_bytes(self.memory))
        #: Handles of the streams with which its memory is recorded.
        self.streams: set[int] = set()
        #: State dicts of the last run: the target's and the base's.
        self.target: StateSnapshot | None = None
        self.base: StateSnapshot | None = None
        #: Names of the tensors whose autograd version counters are incremented after a run.
        self.versioned: list[str] = []
        #: Whether the target contained all tensors of the pair.
        self.is_complete = True
        #: Name, dims and dtype of the tensors to allocate for results; ``None`` if it writes to the caller's tensors.
        self.results: list[tuple[str, list[int], torch.dtype]] | None = None

    def run(
        self, pair: DevicePair, progress: Progress, *, commits: bool = True, meanwhile: Callable[[], object] | None = None
    ) -> bool:
        """Runs on the current stream and waits. False if tensors in place already were the target. ``pair`` is that of this application.

        Unless it ``commits``, it checks all and writes nothing; the mode is then ``"all_checked"``. ``meanwhile`` is called while the
        device works.
        """
        device = pair._device
        stream = device.stream()
        handle = stream.cuda_stream
        if handle not in self.streams:
            self.streams.add(handle)
            for used in (self.memory, pair._index, pair._blob):
                if used is not None:
                    used.record_stream(stream)
        with progress_callback(progress, "apply") as callback:
            begin = time.perf_counter()
            applied, queued = self.raw.run(handle, callback, commits=commits, meanwhile=meanwhile)
            device.queued = begin + queued
        if not applied and self.mode == "out_of_place":
            raise AlreadyApplied("already applied: the base is the target of this pair")
        return applied

    def fits(
        self, mode: str, base: Mapping[str, Any] | None, target: Mapping[str, Any] | None = None, *, strict: bool = False
    ) -> bool:
        """Whether it is for these tensors. Without ``target``, it makes tensors of its own."""
        is_alike = self.mode == mode and (self.results is None) == (target is not None) and (self.is_complete or not strict)
        return is_alike and _same(self.target, target) and _same(self.base, base)


def open_ahead(
    pair: StrPath, expect: Digest | None, device: Any, *states: Mapping[str, Any] | None
) -> tuple[_tpde.Pair, DevicePair | None, list[_tpde.Columns | None]]:
    """Opens a pair for one call: the pair, the pair on the device unless its index needs more memory, and the columns of state dicts
    there. A thread opens and uploads the pair while columns are made. Other threads read its payloads."""
    path, digest, on, raw = path_of(pair), digest_of(expect), Device.of(device), None
    if not on.is_capturing():  # it is refused when the pair is made ready
        index = on.memory(_INDEX_AHEAD, "the index of a pair")
        raw = _tpde.Opening.start(on.raw, path, digest, _address_and_bytes(index), index)
    columns = [None if one is None else _columns_of(one, on) for one in states]
    opened = None if raw is None else raw.wait()
    if opened is None:
        return open_pair(path, expect=expect), None, columns
    if opened[1] is None:
        return opened[0], None, columns
    made = DevicePair.__new__(DevicePair)
    made._set(path, opened[0], on, index, is_kept=False)
    made._raw = opened[1]
    return opened[0], made, columns


def _columns_of(tensors: Mapping[str, Any], device: Device) -> _tpde.Columns | None:
    items = list(tensors.items())  # once, because another thread may change the mapping
    return torch_tensors.columns_of([name for name, _ in items], [tensor for _, tensor in items], device.torch)


class DevicePair:
    """A pair that is ready on a CUDA device, for pairs that are used there more than once.

    :func:`tpde.torch.apply_`, :func:`tpde.torch.apply_slices_`, :func:`tpde.torch.load_file` and :func:`tpde.nn.attach` take it
    instead of a path. It may describe tensors in parts. Its index is uploaded once, 52 bytes per chunk. CRC, sums and digests of
    targets are compared. The plan and the memory of the last call are kept, so a call with the same tensors starts at once.

    Args:
        pair: Name of the pair, or either file.
        device: The CUDA device.
        payloads: Where the compressed bytes are kept: in ``"pinned"`` memory of the host, from where the device copies them; in
            memory of the ``"device"``; or in their ``"file"``.
        expect: As for :func:`tpde.apply`.
        progress: As for :func:`tpde.encode`, for reading the payloads to memory.

    Raises:
        Invalid, SystemRefused: The pair is damaged, too large, or cannot be read.
        DeviceError, OutOfMemory: There is no such device, it fails, or its memory does not suffice.
    """

    def __init__(
        self,
        pair: StrPath,
        device: Any = "cuda",
        *,
        payloads: Payloads = "pinned",
        expect: Digest | None = None,
        progress: Progress = None,
    ) -> None:
        check_kinds(payloads=payloads)
        if payloads not in ("file", "pinned", "device"):
            raise InvalidArgument(f"unknown payloads={payloads!r}: expected 'file', 'pinned' or 'device'")
        self._open(pair, open_pair(pair, expect=expect), device, payloads, progress)

    @classmethod
    def _of_opened(cls, path: StrPath, pair: _tpde.Pair, device: Any, payloads: Payloads = "file") -> DevicePair:
        """A `DevicePair` for a single call, from an open pair. Threads begin to read the payloads."""
        opened = cls.__new__(cls)
        opened._open(path, pair, device, payloads, None, ahead=True)
        return opened

    def _set(self, path: str, pair: _tpde.Pair, device: Device, index: torch.Tensor, *, is_kept: bool) -> None:
        self._path, self._pair, self._device, self._index = path, pair, device, index
        self._blob: torch.Tensor | None = None
        #: Whether it is used for several calls.
        self._is_kept = is_kept
        self._listed: list[Entry] | None = None
        #: The last application. Removed from the dict while in use: dict operations are atomic, so two threads cannot both take it.
        self._kept: dict[str, Application] = {}

    def _open(
        self, path: StrPath, pair: _tpde.Pair, device: Any, payloads: Payloads, progress: Progress, *, ahead: bool = False
    ) -> None:
        on = Device.of(device)
        on.refuse_capture("making a pair ready")
        self._set(path_of(path), pair, on, on.memory(_tpde.DevicePair.index_bytes(pair), "the index of a pair"), is_kept=not ahead)
        if payloads == "device":
            self._blob = self._device.memory(self._pair.blob_bytes(), "the payloads of a pair")
        with progress_callback(progress, "read") as callback:
            self._raw = _tpde.DevicePair(
                self._device.raw,
                self._pair,
                _address_and_bytes(self._index),
                pinned=payloads == "pinned",
                blob=None if self._blob is None else _address_and_bytes(self._blob),
                ahead=ahead,
                progress=callback,
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

    def _apply(
        self,
        tensors: _Memories,
        base: _Memories,
        mode: str,
        progress: Progress,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> tuple[bool, Application]:
        """Changes tensors or slices on the device, or rebuilds them from ``base``, and waits. Returns whether tensors were changed, and the
        application that ran."""
        self._device.refuse_capture("applying a pair")
        application = self._kept.pop("", None)
        if application is not None or self._is_kept:
            (tensors_as, at), (base_as, base_at) = _split(tensors), _split(base)
            described = mode, tensors_as, base_as
            if application is not None and not (application.described == described and application.raw.move_to(at, base_at)):
                application = None
        if application is None:
            application = Application(self, tensors, base, mode)
        if self._is_kept:
            application.described = described
        return application.run(self, progress, meanwhile=meanwhile), application

    def _apply_after(self, before: list[DevicePair], tensors: _Memories, progress: Progress, *, scratch: int | None) -> bool:
        """Changes tensors or slices on the device by the pairs ``before`` and by this one, in one commit, and waits. Returns whether
        they were changed. ``scratch`` limits the memory in which they are checked."""
        device = self._device
        device.refuse_capture("applying pairs")
        pairs = [*before, self]
        raw = [pair._raw for pair in pairs]
        memory = device.scratch(_tpde.DevicePair.chain_bytes(raw, tensors, scratch=scratch), "applying pairs")
        stream = device.stream()
        for pair in pairs:
            for used in (pair._index, pair._blob):
                if used is not None:
                    used.record_stream(stream)
        with progress_callback(progress, "apply") as callback:
            apply = device.with_room(_tpde.DevicePair.apply_chain)
            return apply(raw, tensors, stream.cuda_stream, _address_and_bytes(memory), progress=callback)

    def _run_again(self, application: Application, progress: Progress, *, meanwhile: Callable[[], object] | None = None) -> bool:
        """Runs a kept application, and keeps it. False if tensors in place already were the target."""
        self._device.refuse_capture("applying a pair")
        applied = application.run(self, progress, meanwhile=meanwhile)
        self._kept[""] = application
        return applied

    def _remember(
        self,
        application: Application,
        target: Mapping[str, Any] | None,
        base: Mapping[str, Any] | None,
        *,
        versioned: list[str] | None = None,
        is_complete: bool = True,
        results: list[tuple[str, list[int], torch.dtype]] | None = None,
    ) -> None:
        """Keeps an application for later calls with the same tensors."""
        application.target = None if target is None else StateSnapshot(target)
        application.base = None if base is None else StateSnapshot(base)
        application.versioned, application.is_complete, application.results = versioned or [], is_complete, results
        self._kept[""] = application

    def _take_kept(self, *of: Any, strict: bool = False) -> Application | None:
        """Takes the kept application if it fits. The arguments are those of :meth:`Application.fits`."""
        application = self._kept.pop("", None)
        if application is None or application.fits(*of, strict=strict):
            return application
        self._kept[""] = application
        return None

    def _load_again(self, base: Mapping[str, Any] | None, device: Any, progress: Progress) -> dict[str, torch.Tensor] | None:
        """All tensors of the target, if the last call loaded them from the same base; otherwise ``None``."""
        own = self._device.torch
        try:
            parsed = torch.device(device)
            is_own = parsed == own or (parsed == torch.device("cuda") and torch.cuda.current_device() == own.index)
        except (RuntimeError, TypeError):  # `check_device` reports it
            return None
        application = self._take_kept("out_of_place", base) if is_own else None
        if application is None or application.results is None:
            return None
        empty = torch.empty
        try:
            tensors = {name: empty(dims, dtype=dtype, device=own, requires_grad=False) for name, dims, dtype in application.results}
        except RuntimeError:  # out of memory; the usual path reports it
            return None
        if not application.raw.move_to(list(map(torch.Tensor.data_ptr, tensors.values()))):
            return None
        self._run_again(application, progress)
        return tensors
