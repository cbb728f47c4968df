"""Encodes tensors on a CUDA device, one pair after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Union

import torch
from torch import nn

from .. import _tpde
from .._core.options import EncodeOptions, Unpack, check_names, checked
from .._core.progress import Progress, progress_callback
from .._files.paths import EncodeReport, StrPath, is_path
from .._memory.slices import Slice
from . import state
from .device import Device, SideStream

Tensors = Union[Mapping[str, torch.Tensor], nn.Module, Iterable[Slice]]


class _SaveOptions(EncodeOptions, total=False):
    """Keywords of :meth:`Encoder.save_file` that it checks itself."""

    base_pair: StrPath | None
    replace: bool


class Encoder:
    """Encodes tensors on a CUDA device, one pair after the other, as for the versions of a model in training.

    It keeps memory of the device between pairs: the compressed bytes of the largest one, and up to 512 MiB. This memory is not that
    of PyTorch's allocator. Calls at the same time do not share memory.

    Args:
        device: The CUDA device.

    Raises:
        DeviceError: There is no such device, or it fails.
    """

    def __init__(self, device: Any = "cuda") -> None:
        self._device = Device.of(device)
        self._raw = _tpde.Encoder(self._device.raw)

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._device.torch

    def save_file(
        self,
        tensors: Tensors,
        path: StrPath,
        *,
        base: Tensors | None = None,
        base_pair: StrPath | None = None,
        replace: bool = False,
        progress: Progress = None,
        **options: Unpack[EncodeOptions],
    ) -> EncodeReport:
        """Write the difference of ``tensors`` from ``base`` as the pair ``path``. As :func:`tpde.torch.save_file`.

        Args:
            tensors, base: The target and its base, on this device.
            path: Name of the pair.
            base_pair: The pair of which ``base`` is the target. Its target digests become base digests, so that only the digests of
                the target are computed. If ``base`` is not that target, readers refuse the base of the new pair.
            replace, progress, options: As for :func:`tpde.torch.save_file`.

        Raises:
            Invalid, SystemRefused: ``base_pair`` is damaged, too large, or cannot be read.
            Exception: Those of :func:`tpde.torch.save_file`.
        """
        how = checked(EncodeOptions, options)
        return state.save(
            tensors, path, base=base, options=how, replace=replace, progress=progress, encoder=self, base_pair=base_pair
        )

    def start(
        self,
        tensors: Tensors,
        path: StrPath,
        *,
        base: Tensors | None = None,
        progress: Progress = None,
        **how: Unpack[_SaveOptions],
    ) -> Encoding:
        """Start :meth:`save_file` in a thread, and return a handle of it: ``is_done``, ``wait``, ``cancel``.

        The encoding waits for the work that is queued on the current stream now, and for no later work. The tensors must not be
        written until it has ended.

        Args:
            tensors, path, base, progress, how: The arguments of :meth:`save_file`.

        Raises:
            TypeError: ``how`` has an argument that :meth:`save_file` lacks.
            InvalidArgument: The current stream is being captured into a graph.
        """
        check_names(_SaveOptions, how)
        self._device.refuse_capture("starting an encoding")
        target = state.held(tensors)
        before = base if base is None or is_path(base) else state.held(base)
        side = SideStream(self.device)
        side.follow()

        def work(told: Any) -> EncodeReport:
            return side.run(lambda: self.save_file(target, path, base=before, progress=told, **how))

        return Encoding(work, progress)


#: Encodes, and calls its argument with bytes done and total bytes. An exception of that call ends the encoding.
Work = Callable[[Callable[[int, int], None]], EncodeReport]


class Encoding:
    """An encoding that :meth:`tpde.torch.Encoder.start` has started.

    Until it has ended, the tensors must not be written. When the handle is dropped, or its ``with`` block ends, the encoding is
    cancelled, and the host waits until the device does no more work for it.
    """

    def __init__(self, work: Work, progress: Progress) -> None:
        self._outcome, self._is_cancelled = Future[EncodeReport](), threading.Event()
        # The thread has no reference to the handle, so that the handle can be dropped.
        of = self._outcome, self._is_cancelled, work, progress
        self._thread = threading.Thread(target=_run, args=of, name="tpde-encode")
        self._thread.start()

    def is_done(self) -> bool:
        """Whether the encoding has ended. Then :meth:`wait` returns at once."""
        return self._outcome.done()

    def cancel(self) -> None:
        """Ask the encoding to end. It ends within about 50 ms, or is complete before."""
        self._is_cancelled.set()

    def wait(self) -> EncodeReport:
        """Wait until the pair is complete. An exception of a signal handler, such as ``KeyboardInterrupt``, cancels the encoding, and
        is raised when it has ended.

        Raises:
            concurrent.futures.CancelledError: The encoding was cancelled before it was complete. Nothing is written then.
            Exception: Those of :meth:`tpde.torch.Encoder.save_file`.
        """
        try:
            self._outcome.exception()
        except BaseException:
            self.close()
            raise
        return self._outcome.result()

    def close(self) -> None:
        """Cancel the encoding, and wait until it has ended."""
        self.cancel()
        # The last reference may be dropped in any thread.
        if self._thread is not threading.current_thread():
            self._outcome.exception()

    def __enter__(self) -> Encoding:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.close()


def _run(outcome: Future[EncodeReport], is_cancelled: threading.Event, work: Work, progress: Progress) -> None:
    def check() -> None:
        if is_cancelled.is_set():
            raise CancelledError("the encoding was cancelled")

    try:
        check()
        with progress_callback(progress, "encode") as callback:

            def told(done: int, total: int) -> None:
                # After the last byte, the pair may be complete.
                if done < total:
                    check()
                if callback is not None:
                    callback(done, total)

            report = work(told)
    except BaseException as error:
        # The traceback of an error refers to this frame, which would keep the tensors.
        del work
        outcome.set_exception(error)
    else:
        del work
        outcome.set_result(report)
