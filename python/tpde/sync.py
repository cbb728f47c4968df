"""A trainer's weights in the live parameters of inference engines, version by version.

A :class:`Publisher` encodes the difference of each version from the one before. A :class:`Subscriber` patches live parameters by it,
as :func:`tpde.slices.apply_` does, and answers. A *channel* carries pairs and answers: :class:`Folder`::

    publisher = tpde.sync.Publisher(trainer, tpde.sync.Folder("/shared/run"), dtype=torch.bfloat16)
    subscriber = tpde.sync.Subscriber(weights, tpde.sync.Folder("/shared/run"), "rank0", version=0)

    publisher.publish()  # after a step
    subscriber.update()  # between two batches

Three rules hold, whichever process ends when:

- The parameters of a subscriber are those of one version, never a mixture.
- A version is published when all subscribers have the one before. One that fails says so, and the publisher raises it.
- A subscriber that comes late catches up by the pairs that it missed, or by a whole version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union
from uuid import uuid4

import torch

from . import _errors
from ._folder import Folder
from ._kept import Kept
from ._paths import inspect
from ._slices import Slice
from .slices import Loader, Map, apply_, cut
from .torch import save_file

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Folder", "Publisher", "Subscriber", "Sync"]

State = Mapping[str, torch.Tensor]
#: The trainer's weights: a module, or a function that returns tensors under the names of the checkpoint.
Source = Union["nn.Module", Callable[[], State]]

_log = logging.getLogger("tpde")


@dataclass(frozen=True)
class Sync:
    """What became of a version, for the publisher or for a subscriber."""

    version: int
    #: Size of the pairs in bytes.
    bytes: int
    #: Share of the lanes that changed; ``None`` for a whole version.
    changed: float | None
    favor: str
    #: Milliseconds per stage.
    milliseconds: dict[str, float] = field(default_factory=dict)
    #: Modules that were loaded again by the engine, of a subscriber.
    reloaded: list[str] = field(default_factory=list)


class _Clock:
    """Measures stages."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    def end(self, stage: str) -> None:
        now = time.perf_counter()
        self.milliseconds[stage] = self.milliseconds.get(stage, 0.0) + 1e3 * (now - self._begin)
        self._begin = now


class Publisher:
    """Publishes versions of a trainer's weights. There is one publisher per channel.

    On a new channel, the weights at this moment are version 0, which subscribers load from a checkpoint. On a channel with
    versions, for example after the trainer was restarted, the next version is published whole.

    Args:
        source: The trainer's weights.
        channel: Where versions go.
        dtype: The rollout's dtype: floating-point tensors are cast to it. ``None`` keeps theirs.
        favor: As for :func:`tpde.encode`.
        timeout: Seconds to wait for answers.
    """

    def __init__(
        self,
        source: Source,
        channel: Folder,
        *,
        dtype: torch.dtype | None = None,
        favor: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._source, self._channel, self._dtype = source, channel, dtype
        self._favor, self._timeout = favor, timeout
        self._session = uuid4().hex
        versions = channel.versions()
        #: The weights of the last version; ``None`` if it is not known.
        self._last: dict[str, torch.Tensor] | None = None
        if not versions:
            self._last = self._current()
            channel.commit(0, {"bytes": 0, "changed": None, "favor": favor or "ratio", "difference": None, "whole": None})
        #: The last version that was published.
        self.version = versions[-1] if versions else 0

    def _current(self) -> dict[str, torch.Tensor]:
        """A copy of the trainer's weights on the CPU, in the dtype of the rollout."""
        tensors = self._source.state_dict() if hasattr(self._source, "state_dict") else self._source()
        copies = {}
        for name, tensor in tensors.items():
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            copies[name] = tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        return copies

    def publish(self) -> Sync:
        """Publish the source's weights as the next version, once all subscribers have the last one.

        Subscribers answer later: :meth:`wait` waits for them.

        Raises:
            NotAcknowledged: A subscriber failed, or did not answer in time. Nothing was published. ``Folder.drop`` removes it.
            InvalidArgument: Another publisher uses the channel.
        """
        clock = _Clock()
        behind = self.wait()
        clock.end("wait")
        target = self._current()
        clock.end("snapshot")
        version, favor = self.version + 1, self._favor or "ratio"
        layouts = sorted({one["layout"] for one in self._channel.subscribers().values()})
        slices = cut(target, [self._channel.rectangles(layout) for layout in layouts])
        record: dict[str, Any] = {"bytes": 0, "changed": None, "favor": favor, "difference": None, "whole": None}
        if self._last is not None:
            record["difference"] = self._encode(slices, version, layouts, record, whole=False)
        if self._last is None or behind:
            record["whole"] = self._encode(slices, version, layouts, record, whole=True)
        clock.end("encode")
        self._channel.commit(version, record)
        self.version, self._last = version, target
        clock.end("commit")
        sync = Sync(version, record["bytes"], record["changed"], favor, clock.milliseconds)
        _log.info("published %s", sync)
        return sync

    def _encode(
        self, slices: list[Slice], version: int, layouts: list[str], record: dict[str, Any], *, whole: bool
    ) -> dict[str, Any]:
        """Writes a pair. Returns what its record says of it."""
        name = f"{version:08}-whole-{self._session}" if whole else f"{version:08}-{self._session}"
        path = self._channel.pair(name)
        # An attempt that failed may have left the pair behind. No record names it yet.
        report = save_file(slices, path, base=None if whole else self._last, favor=self._favor, replace=True)
        record["bytes"] += report.stored_bytes
        if not whole:
            lanes = sum(one.lanes for one in report.tensors)
            record["changed"] = sum(one.changed for one in report.tensors) / max(lanes, 1)
        return {"pair": name, "digest": inspect(path).pair_digest, "layouts": layouts}

    def wait(self, timeout: float | None = None) -> list[str]:
        """Wait until all subscribers that can have the last version have answered that they do.

        Returns:
            Names of the subscribers that need a whole version. The next version has it.

        Raises:
            NotAcknowledged: A subscriber failed, or did not answer in time.
        """
        end = time.monotonic() + (self._timeout if timeout is None else timeout)
        pause = 0.001
        while True:
            waiting: list[str] = []
            failed: dict[str, str] = {}
            behind: list[str] = []
            for name, one in self._channel.subscribers().items():
                answer = one["answer"] or {"version": one["version"], "error": None}
                if answer["error"] is not None:
                    failed[name] = answer["error"]
                elif answer["version"] != self.version:
                    has = answer["version"]
                    can = steps(self._channel, has, self.version, one["layout"]) if has < self.version else None
                    (behind if can is None else waiting).append(name)
            if not failed and not waiting:
                return behind
            if failed or time.monotonic() >= end:
                problems = [f"{name} failed: {error}" for name, error in failed.items()]
                problems += [f"{name} has not answered" for name in waiting]
                raise _errors.NotAcknowledged(
                    f"version {self.version} is not everywhere: {'; '.join(problems)}",
                    version=self.version,
                    failed=failed,
                    waiting=waiting,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.1)


def steps(channel: Folder, start: int, stop: int, layout: str) -> list[tuple[int, bool]] | None:
    """The pairs that lead from one version to another, as versions and whether they are whole; ``None`` if there are none."""
    path: list[tuple[int, bool]] = []
    for version in range(stop, start, -1):
        record = channel.version(version)
        if record["difference"] is not None and layout in record["difference"]["layouts"]:
            path.append((version, False))
        elif record["whole"] is not None and layout in record["whole"]["layouts"]:
            return [(version, True), *reversed(path)]
        else:
            # Only a whole version behind this one helps.
            later = [at for at, _ in reversed(path) if (whole := channel.version(at)["whole"]) and layout in whole["layouts"]]
            return [(later[-1], True), *((at, False) for at in range(later[-1] + 1, stop + 1))] if later else None
    return list(reversed(path))


class Subscriber:
    """Keeps live parameters at the published versions.

    Args:
        weights: The map of the parameters.
        channel: Where versions come from.
        name: A name of its own per channel: letters, digits, ``-`` and ``_``. A subscriber takes the place of a former one with its name.
        version: The version that the parameters hold: 0 after the engine has loaded the checkpoint of version 0; -1 if they hold none
            of the channel. They are then overwritten by the next whole version.
        kept, reload: As for :func:`tpde.slices.apply_`. What is kept must be of the same version.
    """

    def __init__(
        self, weights: Map, channel: Folder, name: str, *, version: int, kept: Kept | None = None, reload: Loader | None = None
    ) -> None:
        self._weights, self._channel, self._name = weights, channel, name
        self._kept, self._reload = kept, reload
        #: The version that the parameters hold.
        self.version = version
        self._session, self._layout = channel.join(name, version, weights.rectangles(kept))

    def update(self) -> list[Sync]:
        """Bring the parameters to the last version, through all versions between. Returns at once if there is none.

        Each version is checked completely before it is written, and answered. Nothing else may use the parameters meanwhile.

        Raises:
            TpdeError: A version could not be applied. The publisher gets the error. The parameters are those of ``version``, except
                after :class:`tpde.Poisoned`.
        """
        done: list[Sync] = []
        versions = self._channel.versions()
        path = steps(self._channel, self.version, versions[-1], self._layout) if versions else None
        for version, whole in path or ():
            done.append(self._apply(version, whole=whole))
        return done

    def _apply(self, version: int, *, whole: bool) -> Sync:
        clock, record = _Clock(), self._channel.version(version)
        stored = record["whole" if whole else "difference"]
        pair, expect = self._channel.pair(stored["pair"]), stored["digest"]
        try:
            report = apply_(self._weights, pair, kept=self._kept, reload=self._reload, expect=expect)
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            self._channel.answer(self._name, self._session, version, {"error": message, "digest": expect})
            raise
        self.version = version
        clock.end("apply")
        self._channel.answer(self._name, self._session, version, {"error": None, "digest": expect})
        clock.end("answer")
        changed = None if whole else record["changed"]
        sync = Sync(version, record["bytes"], changed, record["favor"], clock.milliseconds, report.reloaded)
        _log.info("%s has applied %s", self._name, sync)
        return sync
