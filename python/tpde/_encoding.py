"""An encoding that runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from ._paths import EncodeReport
from ._progress import Progress, progress_callback

#: Encodes, and calls its argument with bytes done and total bytes. An exception of that call ends the encoding.
Work = Callable[[Callable[[int, int], None]], EncodeReport]


class Encoding:
    """An encoding that :meth:`tpde.torch.Encoder.start` has started.

    Until it has ended, the tensors must not be written. When the handle is dropped, or its ``with`` block ends, the encoding is
    cancelled, and the host waits until the device does no more work for it.
    """

    def __init__(self, work: Work, progress: Progress) -> None:
        self._outcome = _Outcome()
        # The thread has no reference to the handle, so that the handle can be dropped.
        self._thread = threading.Thread(target=_run, args=(self._outcome, work, progress), name="tpde-encode")
        self._thread.start()

    def is_done(self) -> bool:
        """Whether the encoding has ended. Then :meth:`wait` returns at once."""
        return self._outcome.has_ended.is_set()

    def cancel(self) -> None:
        """Ask the encoding to end. It ends within about 50 ms, or is complete before."""
        self._outcome.is_cancelled = True

    def wait(self) -> EncodeReport:
        """Wait until the pair is complete. An exception of a signal handler, such as ``KeyboardInterrupt``, cancels the encoding, and
        is raised when it has ended.

        Raises:
            concurrent.futures.CancelledError: The encoding was cancelled before it was complete. Nothing is written then.
            Exception: Those of :meth:`tpde.torch.Encoder.save_file`.
        """
        try:
            self._outcome.has_ended.wait()
        except BaseException:
            self.close()
            raise
        if self._outcome.error is not None:
            raise self._outcome.error
        assert self._outcome.report is not None
        return self._outcome.report

    def close(self) -> None:
        """Cancel the encoding, and wait until it has ended."""
        self.cancel()
        # The last reference may be dropped in any thread.
        if self._thread is not threading.current_thread():
            self._outcome.has_ended.wait()

    def __enter__(self) -> Encoding:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.close()


class _Outcome:
    """What the thread of an encoding and its handle share."""

    def __init__(self) -> None:
        self.is_cancelled = False
        #: The end is not seen by joining the thread: a thread whose ``join`` is interrupted counts as ended in some versions of Python.
        self.has_ended = threading.Event()
        self.report: EncodeReport | None = None
        self.error: BaseException | None = None


def _run(outcome: _Outcome, work: Work, progress: Progress) -> None:
    def check() -> None:
        if outcome.is_cancelled:
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

            outcome.report = work(told)
    except BaseException as error:
        outcome.error = error
    finally:
        # The traceback of an error refers to this frame, which would keep the tensors.
        del work
        outcome.has_ended.set()
