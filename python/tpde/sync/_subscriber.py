"""Keeps live parameters at the versions of a channel."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._core import errors as _errors
from .._core.arguments import check_kinds, check_needed
from .._core.version import Version
from .._engine.device import DevicePair, SideStream
from .._files.paths import open_pair
from .._memory.slices import device_of_slices
from ..slices import Loader, Map, _map, prepare
from ..slices._kept import Kept
from ..torch import apply_slices_
from ._checker import Checker
from ._folder import Folder
from ._outcome import Clock, Sync
from ._records import digests_of, steps

_log = logging.getLogger("tpde")

#: Versions, and whether each is whole.
_Steps = list[tuple[int, bool]]
#: Applies versions, and returns the modules that the engine loaded again.
_Commit = Callable[[], list[str]]


class Subscriber:
    """Keeps live parameters at the published versions.

    :meth:`update` does all at once. An engine can generate meanwhile if it calls :meth:`stage` in a thread and :meth:`commit` in a
    pause. :meth:`stage` only reads parameters.

    Args:
        weights: The map of the parameters.
        channel: Where versions come from.
        name: A name that is unique in the channel: letters, digits, ``-`` and ``_``. A subscriber takes the place of a former one with its name.
        version: The version that the parameters hold: 0 after the engine has loaded the checkpoint of version 0; -1 if they hold none
            of the channel. They are then overwritten by the next whole version. ``version`` of a former subscriber also has the
            identity of the version, so that one of another run is refused.
        kept, reload: As for :func:`tpde.slices.apply_`. ``kept`` must hold the same version.
        scratch: As for :func:`tpde.torch.apply_`, for several versions that are applied in one commit.

    Raises:
        SyncError (unknown_version): The channel does not have ``version``, for example because the trainer has begun a new one. The publisher of
            a group finds this: then :meth:`update` and :meth:`stage` raise it, and :meth:`Publisher.publish` names the subscriber.
        SyncError (other_tensors): The channel's versions lack elements of the parameters. Found as above.
    """

    def __init__(
        self,
        weights: Map,
        channel: Folder,
        name: str,
        *,
        version: int,
        kept: Kept | None = None,
        reload: Loader | None = None,
        scratch: int | None = None,
    ) -> None:
        check_needed(weights=weights, channel=channel)
        check_kinds(kept=kept, reload=reload, scratch=scratch)
        self._weights, self._channel, self._name = weights, channel, name
        self._kept, self._reload, self._scratch = kept, reload, scratch
        rectangles = weights.rectangles(kept)
        #: The version that the parameters hold.
        self.version = channel.admit(version, rectangles)
        self._session, self._layout = channel.join(name, self.version, rectangles)
        self._staged: _Steps = []
        #: Answers to be sent, with their versions.
        self._answers: list[tuple[int, dict[str, Any]]] = []
        #: The staged versions that one commit applies, and what applies them.
        self._planned: tuple[_Steps, _Commit | None] = [], None
        self._clock = Clock()
        self._busy = threading.Lock()
        #: What is staged must not wait for tokens that are generated on the current stream.
        self._side = SideStream(weights._device())
        self._side.follow()  # the parameters may still be loading
        self._checker = Checker(weights, channel, kept, self._side)

    def update(self) -> list[Sync]:
        """Bring the parameters to the last version, through all versions between, and answer.

        With a folder, this returns at once if there is no new version. With a group, it waits until the publisher commits one; the list is
        empty if that version was for other subscribers, or the channel was closed.

        Each version is checked completely before it is written. Nothing else may use the parameters meanwhile. Several versions are
        applied in one commit if all parameters are on a CUDA device and can be patched: all are checked before the first write, and
        all are applied, or none. Otherwise they are applied one after the other.

        Raises:
            TpdeError: A version could not be applied. The publisher gets the error. The parameters are those of ``version``, except
                after :class:`tpde.Poisoned`.
            SyncError (unknown_version): The channel was replaced by one of another run.
            Step: One of several versions in one commit failed a check. ``number`` is its place among them, from 1.
            SyncError (disconnected): A rank of the group has ended. The parameters are those of ``version``.
            InvalidArgument: Another thread updates this subscriber.
        """
        with self._alone():
            self._side.follow()
            self._side.run(lambda: self._stage(check_folder=False))
            try:
                return self._commit()
            finally:
                self._answer()

    def stage(self) -> list[int]:
        """Receive and check what comes next, as :meth:`update`, and write nothing. Returns the versions that :meth:`commit` applies.

        Parameters are only read, so the engine may generate meanwhile. Everything that :meth:`commit` needs is prepared;
        :func:`tpde.slices.prepare` says how, and how much memory this takes. Answers that are not sent yet are sent.

        On a CUDA device, this has a stream of its own. It waits for the last :meth:`commit`, and for what the current stream had when
        the subscriber was made, and for no other work.

        Raises:
            TpdeError: As for :meth:`update`.
        """
        with self._alone():
            self._side.run(lambda: self._stage(check_folder=True))
            return [version for version, _ in self._staged]

    @property
    def is_owed(self) -> bool:
        """Whether the publisher waits for :meth:`commit`, also if it applies nothing."""
        return self._channel.owes_answer

    def commit(self, *, answer: bool = True) -> list[Sync]:
        """Apply what :meth:`stage` has received. Nothing else may use the parameters meanwhile.

        Args:
            answer: Whether to answer too, which waits for the other ranks of a group. Otherwise the next call of :meth:`stage`,
                :meth:`update` or :meth:`answer` does, so that the parameters can be used before.

        Raises:
            TpdeError: As for :meth:`update`.
        """
        check_kinds(answer=answer)
        with self._alone():
            try:
                return self._commit()
            finally:
                if answer:
                    self._answer()

    def answer(self) -> None:
        """Send the answers that ``commit(answer=False)`` has not sent.

        Raises:
            SyncError (disconnected), InvalidArgument: As for :meth:`update`.
        """
        with self._alone():
            self._answer()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise _errors.InvalidArgument(f"subscriber {self._name} is updated by another thread: expected one update at a time")
        try:
            yield
        finally:
            self._busy.release()

    def _path(self) -> _Steps:
        self.version = self._channel.identify(self.version)
        versions = self._channel.versions()
        return (steps(self._channel, self.version, versions[-1], self._layout) or []) if versions else []

    def _stage(self, *, check_folder: bool) -> None:
        if self._answers:
            self._answer()
        self._planned, self._clock = ([], None), Clock()
        self._staged = self._path()
        if not self._staged and self._channel.is_live:
            self._checker.begin(self.version)
            self._channel.receive(self._checker.add, self._checker.error, self._checker.drop)
            self._staged = self._path()
            self._clock.end("receive")
            self._clock.milliseconds["check"] = self._checker.milliseconds
        elif self._staged and check_folder:
            self._checker.begin(self.version)
            version, whole = self._staged[0]
            for one in self._stored(version, whole=whole)["pairs"]:
                self._checker.check(one["pair"], one["digest"])
            self._clock.end("check")
        if self._staged and check_folder:
            # Commit repeats what fails here, and answers with the error.
            with contextlib.suppress(Exception):
                for version, whole in self._staged:
                    self._merged(version, whole=whole)
                self._clock.end("merge")
                self._planned = self._staged, self._plan(self._staged)
                if self._planned[1] is None:
                    self._planned = self._staged[:1], self._plan(self._staged[:1])
                self._clock.end("plan")

    def _plan(self, staged: _Steps) -> _Commit | None:
        """Makes versions ready for one commit; ``None`` if several cannot be applied in one."""
        if len(staged) > 1:
            return self._catch_up(staged)
        version, whole = staged[0]
        pair, expect = self._merged(version, whole=whole)
        # Digests of the targets that a check has compared are not computed again. Sums find parameters that have changed since.
        digests = not self._checker.has_checked(self._stored(version, whole=whole)["pairs"])
        prepared = prepare(self._weights, pair, kept=self._kept, reload=self._reload, expect=expect, digests=digests)
        return lambda: prepared.apply().reloaded

    def _stored(self, version: int, *, whole: bool) -> dict[str, Any]:
        stored: dict[str, Any] = self._channel.version(version)["whole" if whole else "difference"]
        return stored

    def _merged(self, version: int, *, whole: bool) -> tuple[Path, str]:
        return self._checker.merge(version, self._stored(version, whole=whole)["pairs"])

    def _answer_of(self, version: int, *, whole: bool) -> dict[str, Any]:
        """The answer to a version that was applied."""
        digests = digests_of(self._stored(version, whole=whole))
        return {"error": None, "id": self._channel.version(version).get("id"), "digests": digests}

    def _commit(self) -> list[Sync]:
        self._side.precede()
        try:
            done = self._apply(self._staged) if len(self._staged) > 1 else []
            staged, self._staged = self._staged, []
            return done or [sync for one in staged for sync in self._apply([one])]
        finally:
            self._side.follow()  # copies of parameters, and a reload, may still be queued
            self._planned, self._staged = ([], None), []

    def _catch_up(self, staged: _Steps) -> _Commit | None:
        """Makes several versions ready for one commit, in which all are checked before the first write. Their payloads are then in
        pinned memory. ``None`` unless all parameters can be patched on a CUDA device, each element at one place."""
        weights, scratch = self._weights, self._scratch
        if self._kept is not None or weights._equal or any(one.parameter for one in weights.refusals):
            return None
        slices = weights.slices()
        device = device_of_slices(slices)
        if device is None or _map.without_copies(slices)[1]:
            return None
        opened = []
        for path, digest in [self._merged(version, whole=whole) for version, whole in staged]:
            pair = open_pair(path, expect=digest)
            opened.append(DevicePair._of_opened(path, pair, device, payloads="pinned"))

        def commit() -> list[str]:
            apply_slices_(_map.without_copies(weights.slices())[0], tuple(opened), scratch=scratch)
            return []

        return commit

    def _apply(self, staged: _Steps) -> list[Sync]:
        """Applies versions in one commit. Returns nothing if several must be applied one after the other."""
        records = [self._channel.version(version) for version, _ in staged]
        answers = [(version, self._answer_of(version, whole=whole)) for version, whole in staged]
        clock, commit = Clock(), self._planned[1] if self._planned[0] == staged else None
        try:
            if commit is not None:
                self._planned = [], None
                clock.milliseconds.update(self._clock.milliseconds)
            else:
                commit = self._plan(staged)
                clock.end("plan")
            if commit is None:
                return []
            reloaded = commit()
        except BaseException as error:
            if len(staged) > 1 and _is_for_single_versions(error, is_planned=commit is not None):
                _log.info("%s applies versions one after the other: %s", self._name, error)
                return []
            version, answer = answers[error.number - 1 if isinstance(error, _errors.Step) else 0]
            self._answers.append((version, {**answer, "error": _errors.reason_of(error)}))
            raise
        clock.end("apply")
        self.version = Version(staged[-1][0], records[-1].get("id"))
        self._answers += answers
        done = [
            Sync(version, record["bytes"], None if whole else record["changed"], record["favor"])
            for (version, whole), record in zip(staged, records)
        ]
        done[-1].milliseconds.update(clock.milliseconds)
        done[-1].reloaded.extend(reloaded)
        _log.info("%s has applied %s", self._name, done)
        return done

    def _answer(self) -> None:
        """Sends each answer once. Deletes merged pairs, which takes too long for a pause of the engine."""
        if not self._staged:
            self._checker.forget()
        while self._answers:
            version, answer = self._answers.pop(0)
            self._channel.answer(self._name, self._session, version, answer)
        self._channel.answered(self.version)


def _is_for_single_versions(error: BaseException, *, is_planned: bool) -> bool:
    """Whether versions must be applied one after the other to succeed, or to find out which one is at fault. Nothing was written."""
    if not isinstance(error, _errors.TpdeError):
        return False
    if not is_planned:
        return True  # one cannot be opened or merged, or together they need too much memory
    if isinstance(error, _errors.Step):
        # The first version alone is found to be applied already, or the weights to be packed anew.
        return error.number == 1 and isinstance(error.__cause__, _errors.WrongBase | _errors.AlreadyApplied)
    # The versions have other parts or tensors, or need too much memory.
    return isinstance(error, _errors.InvalidArgument | _errors.OutOfMemory)
