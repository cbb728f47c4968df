"""Checks of pairs that arrive, and what they are merged to."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .._core.errors import reason_of
from .._core.scratch import TemporaryFolder
from .._engine.device import SideStream
from .._files.merge import merge_expected
from .._files.paths import digest_of, inspect
from ..slices import Map, check
from ..slices._kept import Kept
from ._folder import Folder


class Checker:
    """Checks the pairs of a version in a thread while others arrive, and merges them. The stream of checks is ``side``."""

    def __init__(self, weights: Map, channel: Folder, kept: Kept | None, side: SideStream) -> None:
        self._weights, self._channel, self._kept, self._side = weights, channel, kept, side
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[float]] = []
        self._failure: Exception | None = None
        self._version = -1
        #: Digests of the pairs that were checked.
        self._checked: dict[str, str] = {}
        #: Time of the checks of the last version.
        self.milliseconds = 0.0
        self._merged: dict[tuple[str, ...], tuple[Path, str]] = {}
        self._folder: TemporaryFolder | None = None

    def begin(self, version: int) -> None:
        """Pairs that arrive from now on belong to the version after this one."""
        self._version, self._failure = version, None
        self._checked.clear()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tpde-check")

    def add(self, name: str) -> None:
        """Checks a pair, unless it is the difference from a version that the parameters do not hold."""
        assert self._thread is not None
        if "-whole-" in name or int(name.partition("-")[0]) == self._version + 1:
            self._pending.append(self._thread.submit(self.check, name))

    def check(self, name: str, expect: str | None = None) -> float:
        """Checks a pair. Returns the time."""
        begin = time.perf_counter()
        pair = self._channel.pair(name)
        self._side.run(lambda: check(self._weights, pair, kept=self._kept, expect=expect))
        self._checked[name] = expect or inspect(pair).pair_digest
        return 1e3 * (time.perf_counter() - begin)

    def has_checked(self, stored: list[dict[str, str]]) -> bool:
        """Whether all pairs of a version have been checked, with the digests of its record."""
        return all(self._checked.get(one["pair"]) == one["digest"] for one in stored)

    def error(self, version: int) -> str | None:
        """Waits for all checks. Returns the first error."""
        pending, self._pending = self._pending, []
        total = 0.0
        for one in pending:
            try:
                total += one.result()
            except Exception as error:
                self._failure = self._failure or error
        self.milliseconds = total
        return None if self._failure is None else reason_of(self._failure)

    def drop(self) -> None:
        """Forgets a version that is not published. Raises the error if a check failed on this rank."""
        for one in self._pending:
            one.cancel()
        self._pending.clear()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def merge(self, version: int, stored: list[dict[str, str]]) -> tuple[Path, str]:
        """Makes one pair of all buckets, which must have the digests of the record. Returns it, and the digest that it must have."""
        if len(stored) == 1:
            return self._channel.pair(stored[0]["pair"]), stored[0]["digest"]
        digests = tuple(one["digest"] for one in stored)
        if digests not in self._merged:
            if self._folder is None:
                # A group's folder belongs to this rank, and may be in memory.
                self._folder = TemporaryFolder(self._channel.path if self._channel.is_live else None)
            path = self._folder.path / f"{version:08}-{len(self._merged)}"
            merge_expected([(self._channel.pair(one["pair"]), digest_of(one["digest"])) for one in stored], path)
            self._merged[digests] = path, inspect(path).pair_digest
        return self._merged[digests]

    def forget(self) -> None:
        """Deletes merged pairs."""
        self._merged.clear()
        if self._folder is not None:
            self._folder.close()
            self._folder = None
