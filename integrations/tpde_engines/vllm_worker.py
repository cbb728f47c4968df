"""The worker half of vLLM's weight transfer. Parameters are patched in place: addresses stay, so CUDA graphs and compiled code do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
            recording=_as_loaded(self.model),
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

    def _reload(self, modules: list[str], tensors: dict[str, torch.Tensor]) -> None:
        """vLLM's own reload, of some modules."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        some = _Some([self.model.get_submodule(name) for name in modules])
        for layer in some.modules() if self.device.type == "cpu" else ():
            # With a kernel, 0.32 leaves out the packing of experts for the CPU and would leave unpacked weights.
            if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                layer.quant_method.moe_kernel = None
        initialize_layerwise_reload(some)
        self.model.load_weights((name, one.to(self.device)) for name, one in tensors.items())
        finalize_layerwise_reload(some, self.model_config)

    def _derive(self) -> None:
        """Computes again what layers derive from weights and keep outside of parameters: absorbed projections of MLA, scales of the
        cache, and the packed copies that the CPU backend makes of weights that it keeps, such as those of embeddings."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        for layer in self.model.modules():
            if is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(self.model_config.dtype)
            elif getattr(getattr(layer, "cpu_linear", None), "__closure__", None) and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def start_weight_update(self) -> None:
        """Nothing: what comes is received and checked already."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Waits for the version, and applies it."""
        if self._follower is None:
            raise tpde.InvalidArgument("the engine follows no trainer: call init_weight_transfer_engine first")
        with torch.no_grad():
            try:
                self._follower.commit(update_info.version)
            finally:  # also if a version was applied before another one failed
                self._derive()

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


class _Some:
    """Some modules of a model, as functions of vLLM take a model."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules

    def modules(self) -> Iterator[torch.nn.Module]:
        """The modules, without those below them."""
        return iter(self._modules)


@contextlib.contextmanager
def _as_loaded(model: torch.nn.Module) -> Iterator[None]:
    """Modules whose parameters a kernel has replaced have those that the loader writes, on the device meta."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    saved = []
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if any(_is_other(layer._parameters.get(name), one) for name, one in info.restore_metadata[0].items()):
            saved.append((layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set)))
            restore_layer_on_meta(layer, info)
    try:
        yield
    finally:
        for layer, parameters, buffers, non_persistent in saved:
            for own, former in ((layer._parameters, parameters), (layer._buffers, buffers)):
                own.clear()
                own.update(former)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(non_persistent)


def _is_other(live: torch.Tensor | None, loaded: torch.Tensor) -> bool:
    return live is None or (live.dtype, live.shape, live.stride()) != (loaded.dtype, loaded.shape, loaded.stride())
