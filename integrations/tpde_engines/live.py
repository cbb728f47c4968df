"""A live model that follows the versions of a trainer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

import tpde.slices
import tpde.sync

#: Name, dtype without ``torch.``, and shape of each tensor of the checkpoint, as JSON has them.
Tensors = Iterable[tuple[str, str, Iterable[int]]]


def described(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str, list[int]]]:
    """Names, dtypes and shapes, for :func:`recorded` in another process."""
    return [(name, str(one.dtype).removeprefix("torch."), [*one.shape]) for name, one in tensors]


def recorded(model: torch.nn.Module, tensors: Tensors) -> tpde.slices.Map:
    """The map of a live model. Adapters of LoRA may be attached: they are not part of the checkpoint.

    Raises:
        tpde.NotRecorded: The loader leaves elements out.
    """
    metas = {name: torch.empty([*shape], dtype=getattr(torch, dtype), device="meta") for name, dtype, shape in tensors}
    found = tpde.slices.record(model.load_weights, metas, model)
    # Adapters, and scales of the cache, which engines keep as parameters.
    found.check(missing=["*lora_*", "*_scale", "*.scale*"], refused=True)
    return found


def repacked(
    weights: tpde.slices.Map, base: Iterable[tuple[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]
) -> list[str]:
    """Modules whose memory does not hold the base bit for bit: a kernel has repacked them after loading.

    Raises:
        tpde.WrongBase: No module holds the base, so it is another checkpoint.
    """
    by_tensor: dict[str, list[tpde.slices.Piece]] = {}
    for one in weights.pieces:
        by_tensor.setdefault(one.tensor, []).append(one)
    held: set[str] = set()
    differing: set[str] = set()
    for name, tensor in base:
        for one in by_tensor.get(name, ()):
            memory = one.memory(parameters[one.parameter]).cpu().contiguous().view(torch.uint8)
            same = torch.equal(memory, tensor[one.index].cpu().contiguous().view(torch.uint8))
            (held if same else differing).add(one.parameter.rpartition(".")[0])
    if differing and not held:
        raise tpde.WrongBase(
            f"no module holds the checkpoint: {min(differing)!r} and {len(differing) - 1} more differ",
            tensor=min(by_tensor),
            expected="the checkpoint that the engine has loaded",
            found="another one",
        )
    return sorted(differing)


class Follower:
    """Receives and checks versions in a thread of its own, so that the engine generates meanwhile.

    Args:
        subscriber: The rank's subscriber.
        device: Where the parameters are. On CUDA, checks are queued on a stream of their own.
        pause: Seconds between two looks into a folder.
    """

    def __init__(self, subscriber: tpde.sync.Subscriber, device: Any = "cpu", *, pause: float = 0.01) -> None:
        self.subscriber = subscriber
        self._device, self._pause = torch.device(device), pause
        self._changed = threading.Condition()
        self._staged: list[int] | None = None
        self._error: BaseException | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="tpde-stage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._stream():
            while True:
                staged: list[int] = []
                error: BaseException | None = None
                try:
                    staged = self.subscriber.stage()
                except Exception as raised:
                    error = raised
                with self._changed:
                    if self._ends:
                        return
                    if staged or error is not None or self.subscriber.is_owed:
                        self._staged, self._error = staged, error
                        self._changed.notify_all()
                        self._changed.wait_for(lambda: self._staged is None or self._ends)
                    else:
                        self._changed.wait(self._pause)

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(torch.cuda.Stream(self._device))

    def commit(self, version: int | None = None, timeout: float = 600.0) -> list[tpde.sync.Sync]:
        """Waits until a version has been received and checked, and applies it. Call it in a pause of the engine.

        Args:
            version: The version that the parameters must have in the end; ``None`` for the next one.
            timeout: Seconds.

        Raises:
            TpdeError: As :meth:`tpde.sync.Subscriber.update`.
            TimeoutError: The version did not arrive in time.
        """
        done: list[tpde.sync.Sync] = []
        end = time.monotonic() + timeout
        while not done if version is None else self.subscriber.version < version:
            with self._changed:
                if not self._changed.wait_for(lambda: self._staged is not None, max(0.0, end - time.monotonic())):
                    raise TimeoutError(
                        f"version {version} did not arrive in time: the parameters are at version {self.subscriber.version}"
                    )
                error, self._error = self._error, None
                try:
                    if error is not None:
                        raise error
                    done += self.subscriber.commit()
                finally:
                    self._staged = None
                    self._changed.notify_all()
        return done

    def close(self) -> None:
        """Ends the thread after its current call."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()


def tensors_of_folder(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint on disk, one at a time."""
    from pathlib import Path

    from safetensors import safe_open

    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise tpde.InvalidArgument(f"{path} has no .safetensors files")
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield name, opened.get_tensor(name)


def follower(
    model: torch.nn.Module,
    channel: tpde.sync.Folder,
    name: str,
    *,
    tensors: Tensors,
    version: int = 0,
    checkpoint: str | None = None,
    reload: Callable[[Iterator[tuple[str, torch.Tensor]]], Any] | None = None,
    device: Any = "cpu",
) -> Follower:
    """A live model that follows a channel.

    Args:
        checkpoint: The checkpoint that the engine has loaded. Modules that a kernel has repacked are found by it, and take the second
            way: a copy of their slices is kept, and ``reload`` loads them.
        reload: The engine's loader; ``None`` for ``model.load_weights``.
    """
    weights, kept = recorded(model, tensors), None
    if checkpoint is not None:
        live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        modules = repacked(weights, tensors_of_folder(checkpoint), live)
        if modules or weights.refusals:
            kept = weights.keep(tensors_of_folder(checkpoint), modules)
    else:
        weights.check(missing="*", refused=False)
    load = reload or model.load_weights
    subscriber = tpde.sync.Subscriber(weights, channel, name, version=version, kept=kept, reload=load if kept is not None else None)
    return Follower(subscriber, device)
