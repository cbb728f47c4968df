"""A trainer's weights in the live parameters of inference engines, version by version.

A :class:`Publisher` encodes the difference of each version from the one before. A :class:`Subscriber` applies it to live parameters,
as :func:`tpde.slices.apply_` does, and answers. A *channel* carries pairs and answers: a :class:`Folder`, or a :class:`Group` of
ranks that ``torch.distributed`` or an engine's communicator connects::

    publisher = tpde.sync.Publisher(trainer, tpde.sync.Folder("/shared/run"), dtype=torch.bfloat16)
    subscriber = tpde.sync.Subscriber(weights, tpde.sync.Folder("/shared/run"), "rank0", version=0)

    publisher.publish()  # after a step
    subscriber.update()  # between two batches

Three rules hold after any failure:

- The parameters of a subscriber are those of one version, never a mixture, except after :class:`tpde.Poisoned`.
- Publishing waits until all subscribers that can reach the last version have it.
- The publisher raises the error of a subscriber that fails.

A subscriber that comes late catches up by the pairs that it missed, or by a whole version.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from . import _errors
from ._checker import Checker
from ._collective import Collective, Communicator, TorchGroup
from ._cuts import Bucket, buckets
from ._device import SideStream
from ._folder import Folder
from ._group import Group
from ._kept import Kept
from ._merge import merge_expected
from ._paths import inspect
from ._records import digests_of, indices_of, message_of, plain_of, steps, written
from ._source import Snapshot, Source, rank_failed, reason_of
from .slices import Loader, Map, Prepared, prepare
from .torch import Encoder, save_file

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Collective", "Communicator", "Folder", "Group", "Publisher", "Source", "Subscriber", "Sync", "TorchGroup"]

State = Mapping[str, torch.Tensor]

_log = logging.getLogger("tpde")


#: Number of buckets that are encoded at a time on a CUDA device.
_ENCODERS = 2


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
    #: Versions that were not staged have ``plan`` and ``apply``.
    milliseconds: dict[str, float] = field(default_factory=dict)
    #: For a subscriber, the modules that the engine loaded again.
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

    A version is encoded in buckets of tensors. A group sends one bucket while the next ones are encoded. On a CUDA device, two
    buckets are encoded at a time, unless the source is sharded. All buckets of a version are committed at once.

    Args:
        source: The trainer's weights: a :class:`Source`, or its first argument.
        channel: Where versions go; ``None`` on all ranks but the first, if the source has a ``group``.
        dtype: As for :class:`Source`.
        favor: As for :func:`tpde.encode`.
        timeout: Seconds to wait for answers. A group waits as long as its transport does.
        bucket: Largest number of elements of a bucket. A tensor with more of them is cut by rows.
    """

    def __init__(
        self,
        source: Source | nn.Module | Callable[[], State],
        channel: Folder | None,
        *,
        dtype: torch.dtype | None = None,
        favor: str | None = None,
        timeout: float = 60.0,
        bucket: int = 1 << 27,
    ) -> None:
        if isinstance(source, Source) and dtype is not None:
            raise _errors.InvalidArgument("dtype is passed twice: expected that of the source only")
        self._source = source if isinstance(source, Source) else Source(source, dtype=dtype)
        if self._source.is_first != (channel is not None):
            raise _errors.InvalidArgument("expected a channel for the first rank of the source, and None for the others")
        self._channel = channel
        self._favor, self._timeout, self._bucket = favor, timeout, bucket
        device = self._source.device
        self._is_on_device = device.type == "cuda"
        self._save = self._source.each(lambda: Encoder(device)).save_file if self._is_on_device else save_file
        self._session = uuid4().hex
        #: The pairs of the last version: their names by bucket, for each list of layouts.
        self._pairs: dict[tuple[str, ...], list[str]] = {}
        #: An error of the first rank that the others do not know yet.
        self._failure: Exception | None = None
        #: The last version that was published.
        self.version = 0
        versions = self._agreed(lambda known: known.versions())
        #: The weights of the last version; ``None`` if they are not known.
        self._last: Snapshot | None = None
        if versions:
            self.version = versions[-1]
        else:
            self._last = self._source.snapshot()
            self._agreed(lambda known: known.begin(self._record()))

    def _record(self) -> dict[str, Any]:
        return {"bytes": 0, "changed": None, "favor": self._favor or "ratio", "difference": None, "whole": None}

    def publish(self, *, copied: Callable[[], None] | None = None) -> Sync:
        """Publish the weights as the next version, once all subscribers that can reach the last one have it.

        Subscribers answer later: :meth:`wait` waits for them. Those of a group check the version before it is committed.

        Args:
            copied: Called when the weights are copied. A trainer that calls this method in a thread may change them from then on.
                On a CUDA device, copies follow the work of the current stream of that thread: a step on another stream must have
                ended.

        Raises:
            NotAcknowledged: A subscriber failed, or did not answer in time. Nothing was published. ``Folder.drop`` removes a subscriber.
            RankFailed: Another rank of the trainer failed. Nothing was published.
            InvalidArgument: Another publisher uses the channel.
            Disconnected: A rank of the group has ended.
        """
        clock = _Clock()
        self._failure = None
        plan = self._agreed(self._plan)
        clock.end("wait")
        target = self._source.snapshot()
        clock.end("snapshot")
        if copied is not None:
            self._source.each(copied)
        version, record = self.version + 1, self._record()
        try:
            if self._last is not None:
                record["difference"] = self._encode(target, version, plan["layouts"], record, whole=False)
            if plan["is_whole"]:
                record["whole"] = self._encode(target, version, plan["layouts"], record, whole=True)
            clock.end("encode")

            def commit(channel: Folder) -> dict[str, Any]:
                self._check(channel, version)
                clock.end("check")
                channel.commit(version, record)
                return record

            record = self._agreed(commit)
        except BaseException:
            if self._channel is not None:
                with contextlib.suppress(_errors.Disconnected):
                    self._channel.abort()
            raise
        stored = [one for one in (record["difference"], record["whole"]) if one is not None]
        pairs = {tuple(one["layouts"]): [pair["pair"] for pair in one["pairs"]] for one in stored}
        # In one statement: the pairs are those of the version.
        self.version, self._last, self._pairs = version, target, pairs
        clock.end("commit")
        sync = Sync(version, record["bytes"], record["changed"], record["favor"], clock.milliseconds)
        _log.info("published %s", sync)
        return sync

    def _agreed(self, work: Callable[[Folder], Any]) -> Any:
        """Calls a function on the rank with the channel. All ranks of the trainer return its result, or raise."""
        if self._channel is None:
            answer = self._source.share()
            if "result" in answer:
                return answer["result"]
            if answer["is_subscriber"]:
                raise _errors.NotAcknowledged(answer["error"], version=self.version, failed={}, waiting=[])
            raise rank_failed(0, answer["error"])
        try:
            result = work(self._channel)
        except Exception as error:
            self._source.share({"error": reason_of(error), "is_subscriber": isinstance(error, _errors.NotAcknowledged)})
            raise
        self._source.share({"result": result})
        return result

    def _plan(self, channel: Folder) -> dict[str, Any]:
        """Waits for subscribers. Returns their layouts, and whether one needs a whole version."""
        behind = self._wait(self._timeout, fresh=True)
        names = sorted({one["layout"] for one in channel.subscribers().values()})
        layouts = {name: plain_of(channel.rectangles(name)) for name in names}
        return {"layouts": layouts, "is_whole": self._last is None or bool(behind)}

    def _check(self, channel: Folder, version: int) -> None:
        """Raises if a bucket has failed, here or at a subscriber."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        failed = channel.prepare(version)
        if failed:
            raise self._not_acknowledged(version, failed, [])

    def _encode(
        self, target: Snapshot, version: int, layouts: dict[str, Any], record: dict[str, Any], *, whole: bool
    ) -> dict[str, Any]:
        """Writes and sends the pairs of a version. Returns the entries of the pairs for the version's record."""
        rectangles = [indices_of(plain) for plain in layouts.values()]
        before = [] if whole else self._pairs.get(tuple(layouts), [])

        def encode(job: tuple[int, Bucket]) -> tuple[str, Any]:
            number, bucket = job
            name = f"{version:08}-{'whole-' if whole else ''}{self._session}-{number}"
            base_pair = before[number] if number < len(before) else None
            return name, self._bucket_pair(name, target, bucket, rectangles, base_pair=base_pair, whole=whole)

        pairs, lanes, changed = [], 0, 0
        # Closed also after an error: then no thread encodes any more.
        with contextlib.closing(self._in_order(encode, enumerate(buckets(target.shapes, self._bucket)))) as encoded:
            for name, report in encoded:
                if self._channel is None or report is None:
                    continue
                record["bytes"] += report.stored_bytes
                lanes += sum(one.lanes for one in report.tensors)
                changed += sum(one.changed for one in report.tensors)
                pairs.append({"pair": name, "digest": report.pair_digest})
                self._channel.send([name])
        if not whole:
            record["changed"] = changed / max(lanes, 1)
        return {"pairs": pairs, "layouts": list(layouts)}

    def _in_order(
        self, encode: Callable[[tuple[int, Bucket]], Any], jobs: Iterator[tuple[int, Bucket]]
    ) -> Generator[Any, None, None]:
        """Calls a function for each bucket, and returns its results in order. On a device, in two threads: one plans or writes files
        while the device works for the other. All ranks of a sharded source encode a bucket together, so they have one thread."""
        if not self._is_on_device or self._source.is_sharded:
            yield from map(encode, jobs)
            return
        stream = torch.cuda.current_stream(self._source.device)

        def on_stream(job: tuple[int, Bucket]) -> Any:
            with torch.cuda.stream(stream):
                return encode(job)

        with ThreadPoolExecutor(_ENCODERS) as threads:
            queued: deque[Future[Any]] = deque()
            try:
                for job in jobs:
                    queued.append(threads.submit(on_stream, job))
                    if len(queued) > _ENCODERS:
                        yield queued.popleft().result()
                while queued:
                    yield queued.popleft().result()
            finally:
                for future in queued:
                    future.cancel()

    def _bucket_pair(
        self, name: str, target: Snapshot, bucket: Bucket, rectangles: Any, *, base_pair: str | None, whole: bool
    ) -> Any:
        """Writes the pair of a bucket. All ranks encode what they hold, and the first one merges it. Returns a report.

        ``base_pair`` is the pair of this bucket of the last version, whose digests are those of the base.

        If the first one fails, others do not know it yet. So it takes part in what follows, and `_check` raises the error everywhere.
        """

        def save(path: Path, **how: Any) -> bool:
            slices = target.slices(bucket, rectangles)
            base = None if whole or self._last is None else self._last.of(slices)
            if slices:
                self._save(slices, path, base=base, favor=self._favor, **how)
            return bool(slices)

        if not self._source.is_sharded:
            assert self._channel is not None
            path = self._channel.pair(name)
            known: dict[str, Any] = {}
            if not whole and base_pair is not None and self._is_on_device:
                # A group keeps the files of some versions only.
                kept = self._channel.pair(base_pair)
                if kept.with_name(kept.name + ".tpde-index").exists():
                    known = {"base_pair": kept}
            # An attempt that failed may have left the pair behind. No record names it yet.
            save(path, replace=True, **known)
            return inspect(path)

        def encode() -> tuple[None, bytes]:
            with tempfile.TemporaryDirectory(prefix="tpde-") as folder:
                own = Path(folder) / "own"
                return None, message_of(own) if save(own) else b""

        _, received = self._source.gather(encode)
        if self._channel is None or self._failure is not None:
            return None
        try:
            path = self._channel.pair(name)
            with tempfile.TemporaryDirectory(prefix="tpde-") as folder:
                merge_expected([(one, None) for one in written(Path(folder), received)], path, replace=True)
            return inspect(path)
        except Exception as error:
            self._failure = error
            return None

    def wait(self, timeout: float | None = None) -> list[str]:
        """Wait until each subscriber that can reach the last version has answered that it holds this version.

        On ranks without the channel, the call returns at once.

        Returns:
            Names of the subscribers that need a whole version. The next version has it.

        Raises:
            NotAcknowledged: A subscriber failed, or did not answer in time.
            Disconnected: A rank of the group has ended.
        """
        return [] if self._channel is None else self._wait(self._timeout if timeout is None else timeout, fresh=False)

    def _wait(self, timeout: float, *, fresh: bool) -> list[str]:
        assert self._channel is not None
        end = time.monotonic() + timeout
        pause, is_served = 0.001, False
        while True:
            self._channel.collect(fresh=fresh)
            waiting: list[str] = []
            failed: dict[str, str] = {}
            behind: list[str] = []
            missed: set[int] = set()
            for name, one in self._channel.subscribers().items():
                answer = one["answer"] or {"version": one["version"], "error": None}
                if answer["error"] is not None:
                    failed[name] = answer["error"]
                elif answer["version"] != self.version:
                    has = answer["version"]
                    path = steps(self._channel, has, self.version, one["layout"]) if has < self.version else None
                    (behind if path is None else waiting).append(name)
                    missed |= {version for version, _ in path or ()}
                elif one["answer"] is not None and not self._is_of_record(answer):
                    failed[name] = "it answered with digests of other pairs"
            if not failed and not waiting:
                return behind
            if failed or is_served or (time.monotonic() >= end and not self._channel.is_live):
                raise self._not_acknowledged(self.version, failed, waiting)
            is_served = self._channel.serve(sorted(missed))
            if not is_served:
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
            fresh = False

    def _is_of_record(self, answer: dict[str, Any]) -> bool:
        assert self._channel is not None
        record = self._channel.version(self.version)
        return answer["digests"] in [digests_of(stored) for stored in (record["difference"], record["whole"]) if stored is not None]

    def _not_acknowledged(self, version: int, failed: dict[str, str], waiting: list[str]) -> _errors.NotAcknowledged:
        problems = [f"{name} failed: {error}" for name, error in failed.items()]
        problems += [f"{name} sent no answer" for name in waiting]
        return _errors.NotAcknowledged(
            f"version {version} is not confirmed by all subscribers: {'; '.join(problems)}",
            version=version,
            failed=failed,
            waiting=waiting,
        )


class Subscriber:
    """Keeps live parameters at the published versions.

    :meth:`update` does all at once. An engine can generate meanwhile if it calls :meth:`stage` in a thread and :meth:`commit` in a
    pause. :meth:`stage` only reads parameters.

    Args:
        weights: The map of the parameters.
        channel: Where versions come from.
        name: A name that is unique in the channel: letters, digits, ``-`` and ``_``. A subscriber takes the place of a former one with its name.
        version: The version that the parameters hold: 0 after the engine has loaded the checkpoint of version 0; -1 if they hold none
            of the channel. They are then overwritten by the next whole version.
        kept, reload: As for :func:`tpde.slices.apply_`. ``kept`` must hold the same version.
    """

    def __init__(
        self, weights: Map, channel: Folder, name: str, *, version: int, kept: Kept | None = None, reload: Loader | None = None
    ) -> None:
        self._weights, self._channel, self._name = weights, channel, name
        self._kept, self._reload = kept, reload
        #: The version that the parameters hold.
        self.version = version
        self._session, self._layout = channel.join(name, version, weights.rectangles(kept))
        self._staged: list[tuple[int, bool]] = []
        #: Answers to be sent, with their versions.
        self._answers: list[tuple[int, dict[str, Any]]] = []
        #: The first staged version, ready to be applied.
        self._prepared: tuple[tuple[int, bool], Prepared] | None = None
        self._clock = _Clock()
        self._busy = threading.Lock()
        #: What is staged must not wait for tokens that are generated on the current stream.
        self._side = SideStream(weights._device())
        self._side.follow()  # the parameters may still be loading
        self._checker = Checker(weights, channel, kept, self._side)

    def update(self) -> list[Sync]:
        """Bring the parameters to the last version, through all versions between, and answer.

        With a folder, this returns at once if there is no new version. With a group, it waits until the publisher commits one; the list is
        empty if that version was for other subscribers, or the channel was closed.

        Each version is checked completely before it is written. Nothing else may use the parameters meanwhile.

        Raises:
            TpdeError: A version could not be applied. The publisher gets the error. The parameters are those of ``version``, except
                after :class:`tpde.Poisoned`.
            Disconnected: A rank of the group has ended. The parameters are those of ``version``.
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
        with self._alone():
            try:
                return self._commit()
            finally:
                if answer:
                    self._answer()

    def answer(self) -> None:
        """Send the answers that ``commit(answer=False)`` has not sent.

        Raises:
            Disconnected, InvalidArgument: As for :meth:`update`.
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

    def _path(self) -> list[tuple[int, bool]]:
        versions = self._channel.versions()
        return (steps(self._channel, self.version, versions[-1], self._layout) or []) if versions else []

    def _stage(self, *, check_folder: bool) -> None:
        if self._answers:
            self._answer()
        self._prepared, self._clock = None, _Clock()
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
                    self._checker.merge(version, self._stored(version, whole=whole)["pairs"])
                self._clock.end("merge")
                self._prepared = self._staged[0], self._prepare(self._staged[0][0], whole=self._staged[0][1])
                self._clock.end("plan")

    def _prepare(self, version: int, *, whole: bool) -> Prepared:
        """Makes a version ready."""
        stored = self._stored(version, whole=whole)["pairs"]
        pair, expect = self._checker.merge(version, stored)
        # Digests of the targets that a check has compared are not computed again. Sums find parameters that have changed since.
        digests = not self._checker.has_checked(stored)
        return prepare(self._weights, pair, kept=self._kept, reload=self._reload, expect=expect, digests=digests)

    def _stored(self, version: int, *, whole: bool) -> dict[str, Any]:
        stored: dict[str, Any] = self._channel.version(version)["whole" if whole else "difference"]
        return stored

    def _commit(self) -> list[Sync]:
        staged, self._staged = self._staged, []
        self._side.precede()
        try:
            return [self._apply(version, whole=whole) for version, whole in staged]
        finally:
            self._side.follow()  # copies of parameters, and a reload, may still be queued
            self._prepared = None

    def _answer(self) -> None:
        """Sends each answer once. Deletes merged pairs, which takes too long for a pause of the engine."""
        if not self._staged:
            self._checker.forget()
        while self._answers:
            version, answer = self._answers.pop(0)
            self._channel.answer(self._name, self._session, version, answer)
        self._channel.answered(self.version)

    def _apply(self, version: int, *, whole: bool) -> Sync:
        record = self._channel.version(version)
        stored = record["whole" if whole else "difference"]
        clock, answer = _Clock(), {"error": None, "digests": digests_of(stored)}
        (staged, prepared), self._prepared = self._prepared or (None, None), None
        try:
            if prepared is None or staged != (version, whole):
                prepared = self._prepare(version, whole=whole)
                clock.end("plan")
            else:
                clock.milliseconds.update(self._clock.milliseconds)
            report = prepared.apply()
        except BaseException as error:
            self._answers.append((version, {**answer, "error": f"{type(error).__name__}: {error}"}))
            raise
        self.version = version
        clock.end("apply")
        self._answers.append((version, answer))
        changed = None if whole else record["changed"]
        sync = Sync(version, record["bytes"], changed, record["favor"], clock.milliseconds, report.reloaded)
        _log.info("%s has applied %s", self._name, sync)
        return sync
