"""A group of ranks as the channel between a publisher, which is rank 0, and its subscribers.

Each rank has a folder of its own. Rank 0 sends records and pairs; the others send joins and answers. One round::

    rank 0           the others
    GATHER      -->  joins, and answers that were not sent yet
    REFUSE ...  -->  a subscriber whose version is of another run gets the error
    PAIR ...    -->  stored, and checked while the next one is sent
    PREPARE     -->  errors of the checks
    COMMIT      -->  the parameters are changed, and the answers gathered; or
    ABORT       -->  what was sent is dropped

A rank that waits for a message of another one that has ended gets an error of the transport, and the channel is disconnected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from .._core.arguments import check_kinds
from .._core.errors import BadCheckpoint, InvalidArgument, SyncError, asked, make_error
from .._core.scratch import TemporaryFolder
from .._core.version import Version
from ..slices._cuts import Rectangles
from ._collective import Collective, Messages, check_collective
from ._folder import Folder
from ._records import check_layout, files_of, indices_of, names_of


class Group(Folder):
    """A channel over a group of ranks. Rank 0 has the publisher, each other rank a subscriber.

    Args:
        collective: The group: :class:`TorchGroup` or :class:`Communicator`. Nothing else may use it.
        path: A folder of this rank for pairs, such as one in memory (``/dev/shm``). A publisher that is started again continues from
            it. ``None`` makes a temporary one.
        history: Number of versions that are kept for subscribers that come late. Older ones are deleted.
    """

    is_live = True

    def __init__(self, collective: Collective, path: str | os.PathLike[str] | None = None, *, history: int = 4) -> None:
        check_kinds(history=history)
        check_collective(collective)
        if collective.size < 2:
            raise InvalidArgument(f"the group has {collective.size} rank: expected a publisher and at least one subscriber")
        self._temporary = TemporaryFolder() if path is None else None
        super().__init__(path if self._temporary is None else self._temporary.path)  # type: ignore[arg-type]
        self._messages, self._history = Messages(collective), history
        self.rank = self._messages.rank
        # One thread has all collective calls of the publisher, so their order is that of the calls.
        self._sender = ThreadPoolExecutor(1, "tpde-send") if self.rank == 0 else None
        self._answers: Future[None] | None = None
        self._queued: list[Future[Any]] = []
        self._outbox: list[dict[str, Any]] = []
        #: Records that this rank has received. Those in the folder may be of another run.
        self._received: dict[int, dict[str, Any]] = {}
        #: Whether the publisher has closed the channel, on the other ranks.
        self.is_closed = False
        self.owes_answer = False

    # The publisher's half.

    def collect(self, *, fresh: bool) -> None:
        """Waits for the answers to the last commit. ``fresh`` also asks for joins and answers since then."""
        self._only(0)
        if self._answers is not None:
            pending, self._answers = self._answers, None
            pending.result()
        if fresh:
            self._do(self._gather_outboxes)

    def send(self, names: list[str]) -> None:
        """Queues pairs. Subscribers check them while others are encoded."""
        self._only(0)
        self._queue(names, is_new=True)

    def _queue(self, names: list[str], *, is_new: bool) -> None:
        for name in names:
            self._queued.append(self._submit(partial(self._send_pair, name, is_new=is_new)))

    def prepare(self, version: int) -> dict[str, str]:
        """Waits until all subscribers have checked the pairs of a version. Returns errors by name."""
        self._flush()

        def work() -> dict[str, str]:
            self._send("prepare", version=version)
            answers = [json.loads(text) for text in self._messages.gather(b"{}")[1:]]
            return {one["name"]: one["error"] for one in answers if one["error"] is not None}

        errors: dict[str, str] = self._do(work)
        return errors

    def abort(self) -> None:
        """Subscribers drop the pairs of a version that is not published."""
        for one in self._queued:
            one.cancel()
        self._queued.clear()
        self._do(lambda: self._send("abort"))

    def commit(self, version: int, record: dict[str, Any]) -> None:
        """Makes a version visible to all ranks. They apply it, and :meth:`collect` waits for their answers."""
        self._flush()
        super().commit(version, record)
        self._send_commit([(version, record)])
        self._prune(version)

    def serve(self, versions: list[int]) -> bool:
        """Sends versions that subscribers have missed, and waits until they have answered."""
        records = [(version, self.version(version)) for version in versions]
        for _, record in records:
            self._queue([name for name in names_of(record) if self._has(name)], is_new=False)
        self._flush()
        self._send_commit(records)
        self.collect(fresh=False)
        return True

    def close(self) -> None:
        """Ends the channel: subscribers that wait return. Removes a temporary folder."""
        if self._sender is not None:
            try:
                self.collect(fresh=False)
                self._do(lambda: self._send("end"))
            finally:
                self._sender.shutdown()
        if self._temporary is not None:
            self._temporary.close()

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        assert self._sender is not None
        return self._sender.submit(work)

    def _do(self, work: Callable[[], Any]) -> Any:
        return self._submit(work).result()

    def _flush(self) -> None:
        queued, self._queued = self._queued, []
        for one in queued:
            one.result()

    def _send(self, kind: str, *data: Path, **values: Any) -> None:
        header = json.dumps({"kind": kind, **values}).encode()
        self._messages.broadcast(len(header).to_bytes(8, "little"), header, *data)

    def _send_pair(self, name: str, *, is_new: bool) -> None:
        index, blob = self._files(name)
        self._send("pair", index, blob, name=name, index=index.stat().st_size, is_new=is_new)

    def _send_commit(self, records: list[tuple[int, dict[str, Any]]]) -> None:
        def work() -> None:
            self._send("commit", records=records)
            self._receive_outboxes()

        self._answers = self._submit(work)

    def _gather_outboxes(self) -> None:
        self._send("gather")
        self._receive_outboxes()

    def _receive_outboxes(self) -> None:
        for text in self._messages.gather(b"[]")[1:]:
            for one in json.loads(text):
                if one["kind"] == "join":
                    self._write(self.path / "layouts" / f"{one['layout']}.json", one["rectangles"])
                    version = Version(one["version"], one["id"])
                    self._add(one["name"], one["session"], version, one["layout"])
                    self._refuse(one, version)
                else:
                    super().answer(one["name"], one["session"], one["version"], one["answer"])

    def _refuse(self, join: dict[str, Any], version: Version) -> None:
        """Tells a subscriber that cannot follow. It stays among the subscribers, so publishing fails until it joins again or is dropped."""
        try:
            super().admit(version, indices_of(join["rectangles"]))
        except SyncError as error:
            facts = {"error": error.code, "message": error._message, "facts": error._attributes}
            self._send("refuse", session=join["session"], **facts)

    def _has(self, name: str) -> bool:
        return all(path.exists() for path in self._files(name))

    def _prune(self, version: int) -> None:
        for old in self.versions():
            if 0 < old <= version - self._history:
                record = self.version(old)
                (self.path / "versions" / f"{old:08}.json").unlink()
                for path in [path for name in names_of(record) for path in self._files(name)]:
                    path.unlink(missing_ok=True)

    # The subscribers' half.

    def join(self, name: str, version: int, rectangles: Rectangles) -> tuple[str, str]:
        """Adds the rank's subscriber. The publisher learns of it when it publishes next."""
        if self.rank == 0:
            raise InvalidArgument("rank 0 has the publisher: expected a subscriber on another rank")
        version = self.admit(version, rectangles)
        session, layout = super().join(name, version, rectangles)
        self._name, self._session = name, session
        plain = self._read(self.path / "layouts" / f"{layout}.json", check_layout)
        claim = {"version": version, "id": version.id, "layout": layout, "rectangles": plain}
        self._outbox.append({"kind": "join", "name": name, "session": session, **claim})
        return session, layout

    def versions(self) -> list[int]:
        """On rank 0 all versions, on the others those that were received and not applied yet."""
        return super().versions() if self.rank == 0 else sorted(self._received)

    def version(self, version: int) -> dict[str, Any]:
        """The record of a version."""
        return super().version(version) if self.rank == 0 else self._received[version]

    def identify(self, version: int) -> Version:
        """As for :class:`Folder`. On the other ranks, the publisher identifies the version when it gets the join."""
        return super().identify(version) if self.rank == 0 else Version(version, getattr(version, "id", None))

    def answer(self, name: str, session: str, version: int, answer: dict[str, Any]) -> None:
        """Reports the outcome of a version to the publisher, with the next answers."""
        super().answer(name, session, version, answer)
        self._outbox.append({"kind": "answer", "name": name, "session": session, "version": version, "answer": answer})

    def receive(self, on_pair: Callable[[str], None], checked: Callable[[int], str | None], dropped: Callable[[], None]) -> bool:
        """Takes part in the rounds of the publisher until one commits. False if the publisher has closed the channel.

        Args:
            on_pair: Called with the name of each pair of the next version, when it has arrived.
            checked: Called with the version before it is committed. Returns the error of the checks.
            dropped: Called if the version is not published.
        """
        self._send_owed()
        while True:
            message = self._messages.broadcast()
            at = 8 + int.from_bytes(message[:8], "little")
            header = json.loads(bytes(message[8:at]))
            kind = header["kind"]
            if kind == "gather":
                self._send_outbox()
            elif kind == "pair":
                self._store(header["name"], message[at : at + header["index"]], message[at + header["index"] :])
                if header["is_new"]:
                    on_pair(header["name"])
            elif kind == "prepare":
                error = checked(header["version"])
                self._messages.gather(json.dumps({"name": self._name, "error": error}).encode())
            elif kind == "abort":
                dropped()
            elif kind == "commit":
                self._received.update({version: record for version, record in header["records"]})
                self.owes_answer = True
                return True
            elif kind == "refuse":
                if header["session"] == self._session:
                    raise make_error(header["error"], header["message"], **header["facts"])
            elif kind == "end":
                self.is_closed = True
                return False
            else:
                raise BadCheckpoint(f"the publisher sent {kind!r}", path=self.path, reason="no message of a channel")

    def answered(self, version: int) -> None:
        """Sends the answers to a commit. Deletes pairs that were applied."""
        self._send_owed()
        self._received = {number: record for number, record in self._received.items() if number > version}
        with asked("delete pairs in", self.path / "pairs"):
            for path in (self.path / "pairs").iterdir():
                if path.name.partition("-")[0].isdigit() and int(path.name.partition("-")[0]) <= version:
                    path.unlink(missing_ok=True)

    def _send_owed(self) -> None:
        if self.owes_answer:
            self.owes_answer = False
            self._send_outbox()

    def _send_outbox(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._messages.gather(json.dumps(outbox).encode())

    def _store(self, name: str, *parts: memoryview) -> None:
        for path, data in zip(self._files(name), parts):
            with asked("write", path):
                path.write_bytes(data)

    def _files(self, name: str) -> list[Path]:
        return files_of(self.pair(name))

    def _only(self, rank: int) -> None:
        if self.rank != rank:
            raise InvalidArgument(f"this is rank {self.rank}: the publisher is rank 0 of the group")
