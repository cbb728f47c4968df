"""Outcomes of versions, and the time of their stages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sync:
    """The outcome of a version, for the publisher or for a subscriber."""

    version: int
    #: Size of the pairs in bytes.
    bytes: int
    #: Share of the lanes that changed; ``None`` for a whole version.
    changed: float | None
    favor: str
    #: Milliseconds per stage. Those of :meth:`Subscriber.stage` are ``receive`` (from the call until the version is committed),
    #: ``check`` (in a thread, while pairs are received), ``merge`` and ``plan``. :meth:`Subscriber.commit` adds ``apply``.
    #: Versions that were not staged have ``plan`` and ``apply``. Of versions that are applied in one commit, the last one has them.
    milliseconds: dict[str, float] = field(default_factory=dict)
    #: For a subscriber, the modules that the engine loaded again.
    reloaded: list[str] = field(default_factory=list)


class Clock:
    """Measures stages."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    def end(self, stage: str) -> None:
        now = time.perf_counter()
        self.milliseconds[stage] = self.milliseconds.get(stage, 0.0) + 1e3 * (now - self._begin)
        self._begin = now
