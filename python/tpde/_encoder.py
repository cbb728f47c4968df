"""Encodes tensors on a CUDA device, one pair after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Union

import torch

from . import _state, _tpde
from ._device import Device, SideStream
from ._encoding import Encoding
from ._options import EncodeOptions, check_names, checked
from ._paths import EncodeReport, StrPath, is_path
from ._progress import Progress
from ._slices import Slice

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

Tensors = Union[Mapping[str, torch.Tensor], "nn.Module", Iterable[Slice]]


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
        return _state.save(
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
        target = _state.held(tensors)
        before = base if base is None or is_path(base) else _state.held(base)
        side = SideStream(self.device)
        side.follow()

        def work(told: Any) -> EncodeReport:
            return side.run(lambda: self.save_file(target, path, base=before, progress=told, **how))

        return Encoding(work, progress)
