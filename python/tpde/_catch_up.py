"""Several versions for live weights, in one commit."""

from __future__ import annotations

from pathlib import Path

from . import _map
from ._kept import Kept
from ._paths import open_pair
from ._slices import device_of_slices
from .slices import Map
from .torch import apply_slices_


class CatchUp:
    """The pairs of several versions, with their payloads in pinned memory. All are checked before the first write.

    Args:
        weights: The map, with all parameters on one CUDA device.
        pairs: A pair for each version, with its digest, in their order.
        scratch: As for :func:`tpde.torch.apply_slices_`.
    """

    def __init__(self, weights: Map, pairs: list[tuple[Path, str]], *, scratch: int | None) -> None:
        from ._device import DevicePair

        self._weights, self._scratch = weights, scratch
        device = device_of_slices(weights.slices())
        self._pairs = tuple(
            DevicePair._of_opened(path, open_pair(path, expect=digest), device, payloads="pinned") for path, digest in pairs
        )

    @staticmethod
    def is_possible(weights: Map, kept: Kept | None) -> bool:
        """Whether all parameters can be patched on a CUDA device, each element at one place."""
        if kept is not None or weights._equal or any(one.parameter for one in weights.refusals):
            return False
        slices = weights.slices()
        return bool(slices) and device_of_slices(slices) is not None and not _map.without_copies(slices)[1]

    def apply(self) -> None:
        """Changes the weights from the version before the first pair to the last one.

        Raises:
            TpdeError: As for :func:`tpde.torch.apply_slices_` with several pairs.
        """
        apply_slices_(_map.without_copies(self._weights.slices())[0], self._pairs, scratch=self._scratch)
