"""The trainer half of vLLM's weight transfer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

import tpde
import tpde.sync

from .plugins import BACKEND


@dataclass
class TrainerInit(TrainerInitInfo):
    """What ``WeightTransferTrainerFactory.trainer_init`` takes. Either ``folder``, or an address for NCCL."""

    backend: ClassVar[str] = BACKEND

    folder: str | None = None
    #: The checkpoint that the workers have loaded, where they can read it.
    checkpoint: str | None = None
    #: The version that the workers have loaded.
    version: int = 0
    #: As for :func:`tpde.encode`.
    favor: str | None = None
    master_address: str | None = None
    master_port: int | None = None
    #: Ranks of the NCCL group: one, and all workers.
    world_size: int | None = None


class TrainerEngine(TrainerWeightTransferEngine[TrainerInit]):
    """Publishes the source's tensors. All ranks iterate over the source, and rank 0 encodes and sends."""

    init_info_cls = TrainerInit

    def __init__(self, *, client: Any, source: Any, is_sender: bool = True) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.publisher: tpde.sync.Publisher | None = None
        self._communicator: Any = None

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> TrainerEngine:
        """Connects the workers. The source's tensors are those of the version that they have loaded."""
        if source is None:
            raise ValueError("backend tpde needs a WeightSource")
        if (init_info.folder is None) == (init_info.master_address is None):
            raise tpde.InvalidArgument("expected either folder or master_address")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        tensors = [(one.name, str(one.dtype).removeprefix("torch."), [*one.shape]) for one in source.metadata()]
        if not init_info.is_sender:
            engine._weights()
            return engine
        names = ("folder", "checkpoint", "version", "master_address", "master_port", "world_size")
        values = {name: getattr(init_info, name) for name in names}
        shared = {"tensors": tensors, **{name: value for name, value in values.items() if value is not None}}
        with ThreadPoolExecutor(1) as executor:  # workers wait for the trainer, which waits for them
            joined = executor.submit(client.init_weight_transfer_engine, shared)
            channel = engine._channel(init_info)
            engine.publisher = tpde.sync.Publisher(engine._weights, channel, favor=init_info.favor)
            joined.result()
        return engine

    def _channel(self, init_info: TrainerInit) -> tpde.sync.Folder:
        if init_info.folder is not None:
            return tpde.sync.Folder(init_info.folder)
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._communicator = trainer_init(init_info)
        return tpde.sync.Group(tpde.sync.Communicator(self._communicator))

    def _weights(self) -> dict[str, torch.Tensor]:
        return dict(self.source)

    def send_weights(self, pause: Callable[[], None] | None = None) -> tpde.sync.Sync | None:
        """Publishes the next version, and has the workers apply it.

        Args:
            pause: Called when all workers have received and checked the version, before they apply it.

        Raises:
            tpde.SyncError (not_acknowledged): A worker failed. See ``docs/operations.md``.
        """
        if self.publisher is None:
            self._weights()  # the collective calls of the source
            return None
        sync = self.publisher.publish()
        if pause is not None:
            pause()
        self.client.start_weight_update()
        self.client.update_weights({"version": sync.version})
        self.client.finish_weight_update()
        self.publisher.wait()
        return sync

    def shutdown(self) -> None:
        """Closes the channel."""
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None
