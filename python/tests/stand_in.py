"""The CUDA device of tests of slices. It is PyTorch's device, or an emulated one if TPDE_STAND_IN is set.

The emulated device replaces the driver (``kernels/emulator``). Its tensors are tensors of the CPU whose memory the driver has allocated.
The package takes them for tensors on a CUDA device. All of the Rust half runs as on a device: kernels, plans, copies and checks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

import tpde
import tpde.slices
import tpde.torch
from tpde import _tpde
from tpde._engine import device as _device, reader as _reader, state as _state
from tpde._memory import slices as _slices, torch_tensors as _torch_memory

IS_USED = "TPDE_STAND_IN" in os.environ
DEVICE = torch.device("cuda", 0)


class Driver:
    """The functions of the stand-in that PyTorch would call."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()
        self.ranges: list[tuple[int, int]] = []
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, (name, code)

    def _in_context(self, name: str, *arguments: Any) -> None:
        self._call("cuCtxPushCurrent_v2", self.context)
        self._call(name, *arguments)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, bytes: int) -> int:
        address = ctypes.c_uint64()
        self._in_context("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(bytes, 1)))
        self.ranges.append((address.value, address.value + max(bytes, 1)))
        return address.value

    def stream(self) -> int:
        handle = ctypes.c_void_p()
        self._in_context("cuStreamCreate", ctypes.byref(handle), 0)
        return handle.value or 0

    def order(self, stream: int, after: int) -> None:
        """Makes a stream wait for another one."""
        event = ctypes.c_void_p()
        self._in_context("cuEventCreate", ctypes.byref(event), 0)
        self._in_context("cuEventRecord", event, ctypes.c_void_p(after))
        self._in_context("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)
        self._in_context("cuEventDestroy_v2", event)

    def spin(self, stream: int) -> None:
        """Queues a kernel that runs until a call waits for it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._in_context("cuModuleLoadDataEx", ctypes.byref(module), b".entry spin(", 0, None, None)
        self._in_context("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
        shape = (1, 1, 1, 1, 1, 1, 0)
        self._in_context("cuLaunchKernel", function, *shape, ctypes.c_void_p(stream), None, None)

    def finish(self, stream: int) -> None:
        self._in_context("cuStreamSynchronize", ctypes.c_void_p(stream))

    def is_busy(self, stream: int) -> bool:
        self._call("cuCtxPushCurrent_v2", self.context)
        code = self.library.cuStreamQuery(ctypes.c_void_p(stream))
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        assert code in (0, 600), code
        return bool(code)

    def captured_copy(self, tensor: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
        """A graph that copies a tensor, as a function, and where it copies it to."""
        stream, graph, ready = self.stream(), ctypes.c_void_p(), ctypes.c_void_p()
        copy = self.empty(tensor.shape, tensor.dtype)
        addresses = (ctypes.c_uint64(copy.data_ptr()), ctypes.c_uint64(tensor.data_ptr()))
        self._in_context("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
        self._in_context("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(tensor.nbytes), ctypes.c_void_p(stream))
        self._in_context("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        self._in_context("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))

        def replay() -> None:
            self._in_context("cuGraphLaunch", ready, ctypes.c_void_p(stream))
            self.finish(stream)

        return replay, copy

    def has(self, value: Any) -> bool:
        """Whether a tensor is in memory of the device."""
        return isinstance(value, torch.Tensor) and any(start <= value.data_ptr() < end for start, end in self.ranges)

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        bytes = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
        memory = (ctypes.c_uint8 * max(bytes, 1)).from_address(self.allocate(bytes))
        return torch.frombuffer(memory, dtype=torch.uint8)[:bytes].view(dtype).view(tuple(shape))


class Block:
    """Working memory, with the methods of a tensor that the package calls."""

    def __init__(self, address: int, bytes: int) -> None:
        self.data_ptr, self.numel = lambda: address, lambda: max(bytes, 1)

    def record_stream(self, _: Any) -> None:
        pass


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class StandIn(_device.Device):
    """The device of the stand-in."""

    def __init__(self, driver: Driver) -> None:
        self.torch, self.queued, self.driver = DEVICE, 0.0, driver
        self.raw, self._default = _tpde.Device(0), Stream(driver.stream())
        self._current = threading.local()

    def stream(self) -> Any:
        return getattr(self._current, "stream", self._default)

    def new_stream(self) -> Any:
        return Stream(self.driver.stream())

    def on(self, stream: Any, work: Callable[[], Any]) -> Any:
        before = self.stream()
        self._current.stream = stream
        try:
            return work()
        finally:
            self._current.stream = before

    def order(self, stream: Any, after: Any) -> None:
        self.driver.order(stream.cuda_stream, after.cuda_stream)

    def memory(self, bytes: int, what: str) -> Any:
        return Block(self.driver.allocate(bytes), bytes)

    def scratch(self, bytes: int, what: str) -> Any:
        return self.memory(bytes, what)

    def is_capturing(self) -> bool:
        return False


def install() -> Driver:
    """Puts the stand-in in the place of PyTorch's device, for the rest of the process."""
    driver = Driver()
    device = StandIn(driver)
    describe, columns_of = _torch_memory.describe, _torch_memory.columns_of
    empty: Callable[..., Any] = _torch_memory.TorchAllocator.empty

    def on_cpu(device: Any, tensors: Iterable[Any]) -> Any:
        tensors = list(tensors)
        for tensor in tensors:
            if (torch.device(device).type == "cuda") != driver.has(tensor) and tensor.numel() > 0:
                raise tpde.InvalidArgument(f"a tensor is not on {device}, others are on {device}")
        return "cpu"

    def described(name: str, tensor: Any, expected: Any = None, device: Any = "cpu", **how: Any) -> Any:
        return describe(name, tensor, expected, on_cpu(device, [tensor]), **how)

    def columns(names: Any, tensors: Any, device: Any) -> Any:
        try:
            return columns_of(names, tensors, on_cpu(device, tensors))
        except tpde.InvalidArgument:
            return None

    def allocated(self: Any, name: str, dtype: str, shape: list[int]) -> Any:
        if torch.device(self.device).type == "cpu":
            return empty(self, name, dtype, shape)
        tensor = driver.empty(shape, _torch_memory.dtype_of(dtype))
        return tensor, (name, dtype, shape, tensor.data_ptr(), tensor.nbytes, tensor)

    for module in (_reader, _slices, _state, tpde.slices):
        vars(module)["device_of"] = lambda values: DEVICE if any(map(driver.has, values)) else None
    vars(_torch_memory).update(describe=described, columns_of=columns, check_device=torch.device)
    _torch_memory.TorchAllocator.empty = allocated  # type: ignore[method-assign]
    _device.Device.of = classmethod(lambda cls, _: device)  # type: ignore[assignment,method-assign]
    return driver


driver = install() if IS_USED else None


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the device."""
    if driver is None:
        return tensor.to(DEVICE, copy=True)
    copy = driver.empty(tensor.shape, tensor.dtype)
    copy.copy_(tensor)
    return copy


def captured_copy(tensor: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
    """A CUDA graph that copies a tensor, as a function, and where it copies it to."""
    if driver is not None:
        return driver.captured_copy(tensor)
    graph, copy = torch.cuda.CUDAGraph(), torch.empty_like(tensor)
    with torch.cuda.graph(graph):
        copy.copy_(tensor)
    return graph.replay, copy


def spin(stream: Any) -> None:
    """Queues work on a stream that takes long: on a device a second, on the stand-in until a call waits for it."""
    if driver is None:
        _device.on_stream(stream, lambda: torch.cuda._sleep(2_000_000_000))
    else:
        driver.spin(stream.cuda_stream)


def waits_for(stream: Any, work: Callable[[], Any], *, seconds: float = 0.3) -> tuple[bool, Any]:
    """Calls ``work`` while a stream is busy. Returns whether it waits for the stream, which ends after ``seconds``, and its result."""
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(work)
        try:
            wait([done], seconds)
            waits = not done.done()
            assert waits or is_busy(stream), "the stream has ended by itself"
        finally:
            stream.synchronize() if driver is None else driver.finish(stream.cuda_stream)
        return waits, done.result(60)


def is_busy(stream: Any) -> bool:
    """Whether a stream has unfinished work."""
    return not stream.query() if driver is None else driver.is_busy(stream.cuda_stream)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor on the device."""
    if driver is None:
        torch.cuda.synchronize()
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
