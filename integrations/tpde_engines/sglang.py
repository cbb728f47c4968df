"""A custom weight loader of SGLang, and a receiver. Neither imports SGLang.

Start the server with ``--custom-weight-loader tpde_engines.sglang.load``. Then, between ``/begin_weight_update`` and
``/end_weight_update``, once with the version that the engine has loaded, so that its workers join before the first version is
published, and then after each ``publish``::

    payload = tpde_engines.sglang.payload("/shared/run", tensors=tpde_engines.live.described(trainer.state_dict().items()), version=7)
    engine.update_weights_from_tensor(payload, load_format="tpde_engines.sglang.load")
"""

from __future__ import annotations

import json
import weakref
from typing import Any

import torch

import tpde
import tpde.sync

from . import live

_NAME = "tpde.sync"
_models: weakref.WeakKeyDictionary[Any, Receiver] = weakref.WeakKeyDictionary()


def payload(
    folder: str, *, tensors: live.Tensors, version: int, base: int = 0, name: str = "sglang", checkpoint: str | None = None
) -> list[tuple[str, torch.Tensor]]:
    """The argument ``named_tensors`` of ``update_weights_from_tensor``: where versions are, and which one is wanted.

    Args:
        tensors: :func:`tpde_engines.live.described`.
        version: The version that the parameters have in the end.
        base: The version that the engine has loaded. Used by the first call.
        name: Names of the subscribers begin so. Replicas of one folder have different names.
        checkpoint: The checkpoint that the engine has loaded, for modules that a kernel has repacked.
    """
    listed = [[one, dtype, [*shape]] for one, dtype, shape in tensors]
    values = {"folder": folder, "tensors": listed, "version": version, "base": base, "name": name, "checkpoint": checkpoint}
    return [(_NAME, torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8))]


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Brings a model to the version of a payload. SGLang calls it in each worker.

    Raises:
        tpde.InvalidArgument: The tensors are no payload.
        TpdeError: As :meth:`tpde.sync.Subscriber.update`. The parameters are those of the last version.
    """
    receiver = _models.get(model)
    if receiver is None:
        receiver = _models[model] = Receiver(model)
    receiver.receive(named_tensors)


class Receiver:
    """What a factory of ``--weight-update-receivers`` returns. That option is in branches of SGLang, and in no release."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._follower: live.Follower | None = None

    def receive(self, payload: list[tuple[str, torch.Tensor]]) -> None:
        """As :func:`load`."""
        names = [name for name, _ in payload]
        if names != [_NAME]:
            raise tpde.InvalidArgument(f"the tensors are {names}: expected those of tpde_engines.sglang.payload")
        values = json.loads(payload[0][1].cpu().numpy().tobytes())
        model = self._model()
        if model is None:
            raise tpde.InvalidArgument("the model does not exist any more")
        if self._follower is None:
            self._follower = live.follower(
                model,
                tpde.sync.Folder(values["folder"]),
                f"{values['name']}-rank{_rank()}",
                tensors=values["tensors"],
                version=values["base"],
                checkpoint=values["checkpoint"],
            )
        with torch.no_grad():
            self._follower.commit(values["version"])
        # SGLang takes the session for loaded and does not call this hook after a custom loader.
        hook = getattr(model, "post_load_weights", None)
        if hook is not None:
            hook()

    def destroy(self) -> None:
        """Ends the thread. Parameters stay at their version."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None


def _rank() -> int:
    is_ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_ready else 0
