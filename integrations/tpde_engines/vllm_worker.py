"""The worker half of vLLM's weight transfer. Parameters are patched in place: addresses stay, so CUDA graphs and compiled code do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

import tpde
import tpde.sync

from . import live


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What ``init_weight_transfer_engine`` takes. Either ``folder``, or an address of the trainer for NCCL."""

    #: Name, dtype and shape of the checkpoint's tensors: :func:`tpde_engines.live.described`.
    tensors: list[Any] = field(default_factory=list)
    #: The version that the engine has loaded; -1 for one that the trainer does not know.
    version: int = 0
    #: Names of the subscribers begin so. Replicas of one folder have different names.
    name: str = "vllm"
    folder: str | None = None
    #: The checkpoint that the engine has loaded, for modules that a kernel has repacked.
    checkpoint: str | None = None
    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int = 1
    world_size: int | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights`` takes."""

    #: The version that the parameters have in the end; ``None`` for the next one.
    version: int | None = None


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives and checks in a thread while tokens are generated. ``update_weights`` waits for that and applies.

    Workers execute one call after the other, so staging within ``update_weights`` would stop generation. Prefix caches hold values of the
    former weights: reset them (``/reset_prefix_cache``) unless the trainer accepts them.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _follower: live.Follower | None = None
    _communicator: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Records the model's loader, and begins to follow the trainer.

        Raises:
            tpde.InvalidArgument: Neither a folder nor an address, or both.
            tpde.NotRecorded, tpde.WrongBase: The model cannot be patched, or holds another checkpoint.
        """
        self.shutdown()
        rank = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        self._follower = live.follower(
            self.model,
            self._channel(init_info),
            f"{init_info.name}-rank{rank}",
            tensors=init_info.tensors,
            version=init_info.version,
            checkpoint=init_info.checkpoint,
            reload=self._reload,
            device=self.device,
        )

    def _channel(self, init_info: InitInfo) -> tpde.sync.Folder:
        if (init_info.folder is None) == (init_info.master_address is None):
            raise tpde.InvalidArgument("expected either folder or master_address")
        if init_info.folder is not None:
            return tpde.sync.Folder(init_info.folder)
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_process_group

        address = NCCLWeightTransferInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=init_info.rank_offset,
            world_size=init_info.world_size or 0,
        )
        self._communicator = worker_init_process_group(address, self.parallel_config)
        return tpde.sync.Group(tpde.sync.Communicator(self._communicator))

    def _reload(self, tensors: Any) -> None:
        """vLLM's own reload, of the tensors of one module."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self.model.load_weights((name, one.to(self.device)) for name, one in tensors)
        finalize_layerwise_reload(self.model, self.model_config)

    def start_weight_update(self) -> None:
        """Nothing: what comes is received and checked already."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Waits for the version, and applies it."""
        if self._follower is None:
            raise tpde.InvalidArgument("the engine follows no trainer: call init_weight_transfer_engine first")
        with torch.no_grad():
            self._follower.commit(update_info.version)

    def finish_weight_update(self) -> None:
        """Nothing: the version was applied as a whole."""

    def shutdown(self) -> None:
        """Ends the thread. Parameters stay at their version."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None
