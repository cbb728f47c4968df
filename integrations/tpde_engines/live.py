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
    differing = set(weights.replaced())
    by_tensor: dict[str, list[tpde.slices.Piece]] = {}
    for one in weights.pieces:
        if _module(one.parameter) not in differing:
            by_tensor.setdefault(one.tensor, []).append(one)
    held: set[str] = set()
    for name, tensor in base:
        for one in by_tensor.get(name, ()):
            memory = one.memory(parameters[one.parameter]).cpu().contiguous().view(torch.uint8)
            same = torch.equal(memory, tensor[one.index].cpu().contiguous().view(torch.uint8))
            (held if same else differing).add(_module(one.parameter))
    if differing and not held:
        raise tpde.WrongBase(
            f"no module holds the checkpoint: {min(differing)!r} and {len(differing) - 1} more differ",
            tensor=min(by_tensor),
            expected="the checkpoint that the engine has loaded",
            found="another one",
        )
    return sorted(differing)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


class Follower:
    """Receives and checks versions in a thread of its own, so that the engine generates meanwhile.

    Args:
        subscriber: The rank's subscriber.
        pause: Seconds between two looks into a folder.
    """

    def __init__(self, subscriber: tpde.sync.Subscriber, *, pause: float = 0.01) -> None:
        self.subscriber, self._pause = subscriber, pause
        self._changed = threading.Condition()
        self._staged: list[int] | None = None
        self._error: BaseException | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="tpde-stage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
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

    def commit(self, version: int | None = None, timeout: float = 600.0) -> list[tpde.sync.Sync]:
        """Waits until a version has been received and checked, and applies it. Call it in a pause of the engine. The thread then answers.

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
                    done += self.subscriber.commit(answer=False)
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
    reload: Callable[[list[str], dict[str, torch.Tensor]], Any] | None = None,
    recording: contextlib.AbstractContextManager[Any] | None = None,
) -> Follower:
    """A live model that follows a channel.

    Args:
        checkpoint: The checkpoint that the engine has loaded. Modules that a kernel has repacked are found by it, and take the second
            way: a copy of their slices is kept, and ``reload`` loads them.
        reload: Loads modules again. It gets their names and their tensors; ``None`` for ``model.load_weights``.
        recording: Entered while the loader is recorded: parameters have the shapes that it loads.

    Raises:
        tpde.WrongBase (repacked): A kernel has replaced parameters, and there is no checkpoint.
        tpde.NotRecorded, tpde.WrongBase: The model cannot be patched, or holds another checkpoint.
    """
    with recording or contextlib.nullcontext():
        weights, kept = recorded(model, tensors), None
    if checkpoint is not None:
        live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        modules = repacked(weights, tensors_of_folder(checkpoint), live)
        if modules or weights.refusals:
            kept = weights.keep(tensors_of_folder(checkpoint), modules)
    else:
        weights.check(missing="*", refused=False)
        if replaced := weights.replaced():
            raise tpde.WrongBase(
                f"a kernel has replaced the parameters of {replaced[0]!r} and {len(replaced) - 1} more modules: expected checkpoint, of "
                "which their slices are kept",
                code="repacked",
                modules=replaced,
                tensor=None,
                expected="the parameters that the loader writes",
                found="others",
            )

    def load(loaded: Iterator[tuple[str, torch.Tensor]]) -> None:
        if reload is None:
            model.load_weights(loaded)
            return
        own = dict(loaded)
        modules = {_module(name) for name, of in weights.tensors_of.items() if any(tensor in own for tensor in of)}
        reload(sorted(modules), own)

    if kept is not None:
        _try(model, kept, load)
    subscriber = tpde.sync.Subscriber(weights, channel, name, version=version, kept=kept, reload=load if kept is not None else None)
    return Follower(subscriber)


def _try(model: torch.nn.Module, kept: tpde.slices.Kept, load: Callable[[Iterator[tuple[str, torch.Tensor]]], None]) -> None:
    """Loads the modules again with the weights that they have. An engine whose reload gives other parameters would corrupt them silently.

    Raises:
        tpde.NotRecorded: The reload of a module gives other parameters. They are put back.
    """
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: one for name, one in live.items() if _module(name) in set(kept.modules)}
    before = {name: one.detach().clone() for name, one in own.items()}
    with torch.no_grad():
        try:
            kept.reload(load)
        except tpde.Poisoned as error:
            raise (error.__cause__ or error) from None
        differing = [name for name, one in own.items() if not _same(one, before[name])]
        for name in differing:
            own[name].copy_(before[name])
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise tpde.NotRecorded(
            f"the engine's reload of the weights that it has gives other values for {differing[0]!r}{more}: expected the same",
            parameter=differing[0],
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)
