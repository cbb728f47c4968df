"""Slices that are bound to a pair before they are changed: all that needs no writing is done then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._entry import Entry
from ._memory import check_writable, places_of
from ._paths import Digest, StrPath, open_pair
from ._progress import Progress, progress_callback
from ._slices import Slice, describe_slices, device_of_slices
from ._state import Outcome, told_if_written


class PreparedSlices:
    """Slices in place, all on the CPU or on one CUDA device. On a device their payloads are in pinned memory, and the launch is planned.

    Args:
        slices: As for :func:`tpde.torch.apply_slices_`.
        digests: Whether digests of tensors are compared. Sums and the digests of payloads are compared in any case.
        on_written: Called with the tensors if they have, or may have, been written.
    """

    def __init__(
        self,
        slices: list[Slice],
        pair: StrPath,
        *,
        expect: Digest | None,
        digests: bool,
        on_written: Callable[[list[Any]], None],
    ) -> None:
        self._pair, self._digests, self._on_written = open_pair(pair, expect=expect), digests, on_written
        self._tensors = [one.tensor for one in slices]
        entries = {entry.name: entry for entry in map(Entry._make, self._pair.tensors())}
        device = device_of_slices(slices)
        self._memories = describe_slices(slices, entries, writable=True, device="cpu" if device is None else device)
        self._on_device: Any = None
        if device is None:
            check_writable(places_of([memory for memory, *_ in self._memories]))
        elif self._memories:
            from ._device import Application, DevicePair

            self._on_device = DevicePair._of_opened(pair, self._pair, device, payloads="pinned")
            self._application = Application(self._on_device, self._memories, [], "all_checked", digests=digests)

    def check(self) -> None:
        """Checks everything on the device, and writes nothing."""
        self._on_device._device.refuse_capture("checking a pair")
        self._application.run(self._on_device, None, commits=False)

    def apply(self, progress: Progress = None) -> Outcome:
        """Changes the slices."""
        if not self._memories:
            return "nothing"
        with told_if_written(lambda: self._on_written(self._tensors)):
            if self._on_device is not None:
                self._on_device._device.refuse_capture("applying a pair")
                applied = self._application.run(self._on_device, progress)
            else:
                with progress_callback(progress, "apply") as callback:
                    applied = self._pair.apply_slices_in_place(
                        self._memories, checked=True, digests=self._digests, progress=callback
                    )
        if applied:
            self._on_written(self._tensors)
        return "applied" if applied else "already_applied"
