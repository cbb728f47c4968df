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
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from .._core import errors as _errors
from .._core.arguments import check_kinds
from .._core.scratch import TemporaryFolder
from .._core.version import Version
from .._files.merge import merge_expected
from .._files.paths import inspect
from ..slices._cuts import Bucket, buckets
from ..torch import Encoder, save_file
from ._collective import Collective, Communicator, TorchGroup
from ._folder import Folder
from ._group import Group
from ._outcome import Clock, Sync
from ._records import check_tensors, check_within, digests_of, files_of, indices_of, message_of, plain_of, steps, stored_of, written
from ._source import Snapshot, Source, rank_failed
from ._subscriber import Subscriber

__all__ = ["Collective", "Communicator", "Folder", "Group", "Publisher", "Source", "Subscriber", "Sync", "TorchGroup"]

State = Mapping[str, torch.Tensor]

_log = logging.getLogger("tpde")


#: Number of buckets that are encoded at a time on a CUDA device.
_ENCODERS = 2


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
        check_kinds(channel=channel, timeout=timeout, bucket=bucket, favor=favor)
        if favor is not None and favor not in ("ratio", "speed"):
            raise _errors.InvalidArgument(f"favor is {favor!r}: expected 'ratio' or 'speed'")
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
        #: The weights of the last version; ``None`` if they are not known.
        self._last: Snapshot | None = None
        begun = self._agreed(_last_of)
        if begun is None:
            self._last = self._source.snapshot()
            if not self._last.tensors:
                raise _errors.InvalidArgument("the source has no tensors: expected those of version 0")
            begun = self._agreed(self._begin)
        #: The last version that was published.
        self.version = Version(begun["version"], begun["id"])
        #: Dtypes and shapes that all versions have; ``None`` if the channel does not tell.
        self._tensors = begun["tensors"]

    def _begin(self, channel: Folder) -> dict[str, Any]:
        assert self._last is not None
        record = {**self._record(), "tensors": self._last.tensors}
        channel.begin(record)
        return {"version": 0, "id": record["id"], "tensors": record["tensors"]}

    def _record(self) -> dict[str, Any]:
        empty = {"bytes": 0, "changed": None, "favor": self._favor or "ratio", "difference": None, "whole": None}
        return {"id": uuid4().hex, **empty}

    def publish(self, *, copied: Callable[[], None] | None = None) -> Sync:
        """Publish the weights as the next version, once all subscribers that can reach the last one have it.

        Subscribers answer later: :meth:`wait` waits for them. Those of a group check the version before it is committed.

        Args:
            copied: Called when the weights are copied. A trainer that calls this method in a thread may change them from then on.
                On a CUDA device, copies follow the work of the current stream of that thread: a step on another stream must have
                ended.

        Raises:
            SyncError (not_acknowledged): A subscriber failed, has a version of another run, or did not answer in time. Nothing was published.
                ``Folder.drop`` removes a subscriber.
            SyncError (other_tensors): The source does not have the tensors of the versions before. Nothing was published.
            SyncError (unknown_version): The channel was replaced by another one.
            SyncError (rank_failed): Another rank of the trainer failed. Nothing was published.
            InvalidArgument: Another publisher uses the channel.
            SyncError (disconnected): A rank of the group has ended.
        """
        check_kinds(copied=copied)
        clock = Clock()
        self._failure = None
        plan = self._agreed(self._plan)
        clock.end("wait")
        target = self._source.snapshot()
        if self._tensors is not None:
            check_tensors(target.tensors, self._tensors)
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
                with contextlib.suppress(ConnectionError):
                    self._channel.abort()
            raise
        pairs = {tuple(one["layouts"]): [pair["pair"] for pair in one["pairs"]] for one in stored_of(record)}
        # In one statement: the pairs are those of the version.
        self.version, self._last, self._pairs, self._tensors = Version(version, record["id"]), target, pairs, target.tensors
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
                raise _errors.make_error("not_acknowledged", answer["error"], version=self.version, failed={}, waiting=[])
            raise rank_failed(0, answer["error"])
        try:
            result = work(self._channel)
        except Exception as error:
            self._source.share(
                {"error": _errors.reason_of(error), "is_subscriber": getattr(error, "code", None) == "not_acknowledged"}
            )
            raise
        self._source.share({"result": result})
        return result

    def _plan(self, channel: Folder) -> dict[str, Any]:
        """Waits for subscribers. Returns their layouts, and whether one needs a whole version."""
        channel.identify(self.version)
        behind = self._wait(self._timeout, fresh=True)
        layouts, failed = {}, {}
        for name, one in sorted(channel.subscribers().items()):
            rectangles = channel.rectangles(one["layout"])
            layouts[one["layout"]] = plain_of(rectangles)
            try:
                check_within(rectangles, self._tensors)
            except _errors.SyncError as error:
                failed[name] = _errors.reason_of(error)
        if failed:
            raise self._not_acknowledged(self.version, failed, [])
        layouts = dict(sorted(layouts.items()))
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
                if files_of(kept)[0].exists():
                    known = {"base_pair": kept}
            # An attempt that failed may have left the pair behind. No record names it yet.
            save(path, replace=True, **known)
            return inspect(path)

        def encode() -> tuple[None, bytes]:
            with TemporaryFolder() as folder:
                own = folder / "own"
                return None, message_of(own) if save(own) else b""

        _, received = self._source.gather(encode)
        if self._channel is None or self._failure is not None:
            return None
        try:
            path = self._channel.pair(name)
            with TemporaryFolder() as folder:
                merge_expected([(one, None) for one in written(folder, received)], path, replace=True)
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
            SyncError (not_acknowledged): A subscriber failed, or did not answer in time.
            SyncError (disconnected): A rank of the group has ended.
        """
        check_kinds(timeout=timeout)
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
                answer = one["answer"] or {**one, "error": None}
                unknown = self._unknown(answer)
                if answer["error"] is not None:
                    failed[name] = answer["error"]
                elif unknown is not None:
                    failed[name] = unknown
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

    def _unknown(self, answer: dict[str, Any]) -> str | None:
        """The error of a subscriber whose version is not one of the channel."""
        assert self._channel is not None
        if answer["version"] == self.version and answer.get("id") == self.version.id:
            return None
        try:
            self._channel.identify(Version(answer["version"], answer.get("id")))
        except _errors.SyncError as error:
            return _errors.reason_of(error)
        return None

    def _is_of_record(self, answer: dict[str, Any]) -> bool:
        assert self._channel is not None
        record = self._channel.version(self.version)
        return answer["digests"] in map(digests_of, stored_of(record))

    def _not_acknowledged(self, version: int, failed: dict[str, str], waiting: list[str]) -> _errors.TpdeError:
        problems = [f"{name} failed: {error}" for name, error in failed.items()]
        problems += [f"{name} sent no answer" for name in waiting]
        return _errors.make_error(
            "not_acknowledged",
            f"version {version} is not confirmed by all subscribers: {'; '.join(problems)}",
            version=version,
            failed=failed,
            waiting=waiting,
        )


def _last_of(channel: Folder) -> dict[str, Any] | None:
    """Number and id of the last version of a channel, and its tensors; ``None`` if there is no version yet."""
    versions = channel.versions()
    if not versions:
        return None
    tensors = channel.version(0).get("tensors") if 0 in versions else None
    return {"version": versions[-1], "id": channel.identify(versions[-1]).id, "tensors": tensors}
