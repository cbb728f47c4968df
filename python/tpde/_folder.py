"""A folder as the channel between a publisher and its subscribers.

Every file is written once, complete, and is not changed afterwards. A version exists when its record does, which is written last::

    versions/00000007.json            record: names, digests and layouts of the pairs
    pairs/00000007-SESSION-0...       a bucket of the difference from version 6, of this run of the publisher
    pairs/00000007-whole-SESSION-0... a bucket of the whole version, if a subscriber needs it
    layouts/DIGEST.json               rectangles that a subscriber holds
    subscribers/NAME.SESSION.json   who receives, from which version on
    answers/NAME.SESSION/00000007.json
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from ._cuts import Rectangles
from ._errors import BadCheckpoint, InvalidArgument

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Folder:
    """A folder that publisher and subscribers can reach, local or on a network.

    The file system must have links and atomic renames, and show files of other hosts complete or not at all.

    Args:
        path: The folder. It is made if it does not exist.
    """

    #: Whether subscribers take part in each call of the publisher. Those of a folder read it when they like.
    is_live = False
    #: Whether the publisher waits for the answer of this rank.
    owes_answer = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        for name in ("versions", "pairs", "layouts", "subscribers", "answers"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def pair(self, name: str) -> Path:
        """Name of a pair that a record names."""
        if not _NAME.fullmatch(name):
            raise BadCheckpoint(f"a record names the pair {name!r}", path=self.path, reason="no name of a pair")
        return self.path / "pairs" / name

    def versions(self) -> list[int]:
        """Numbers of all versions, ascending."""
        return sorted(int(path.stem) for path in (self.path / "versions").glob("*.json"))

    def version(self, version: int) -> dict[str, Any]:
        """The record of a version."""
        return self._read(self.path / "versions" / f"{version:08}.json")

    def begin(self, record: dict[str, Any]) -> None:
        """Makes version 0, which subscribers load from a checkpoint."""
        Folder.commit(self, 0, record)

    def commit(self, version: int, record: dict[str, Any]) -> None:
        """Makes a version visible, whose pairs are complete.

        Raises:
            InvalidArgument: The version exists: another publisher uses the folder.
        """
        if not self._write(self.path / "versions" / f"{version:08}.json", record):
            raise InvalidArgument(f"version {version} exists already: another publisher uses {self.path}")

    def join(self, name: str, version: int, rectangles: Rectangles) -> tuple[str, str]:
        """Adds a subscriber that has this version, or takes the place of one with the same name. Returns its session and layout."""
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"a subscriber is named {name!r}: expected letters, digits, - and _")
        plain = {tensor: [[[one.start, one.stop] for one in index] for index in indices] for tensor, indices in rectangles.items()}
        layout = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
        self._write(self.path / "layouts" / f"{layout}.json", plain)
        session = uuid4().hex
        self._add(name, session, version, layout)
        return session, layout

    def _add(self, name: str, session: str, version: int, layout: str) -> None:
        self.drop(name)
        (self.path / "answers" / f"{name}.{session}").mkdir(exist_ok=True)
        self._write(self.path / "subscribers" / f"{name}.{session}.json", {"version": version, "layout": layout})

    def collect(self, *, fresh: bool) -> None:
        """Brings joins and answers of subscribers here. Those of a folder are here."""

    def serve(self, versions: list[int]) -> bool:
        """Sends versions that subscribers have missed. False if they read them themselves."""
        return False

    def send(self, names: list[str]) -> None:
        """Sends pairs ahead of the record that names them."""

    def prepare(self, version: int) -> dict[str, str]:
        """Errors of subscribers that have checked the pairs of a version before it is committed, by name."""
        return {}

    def abort(self) -> None:
        """Withdraws the pairs of a version that is not published."""

    def receive(self, on_pair: Callable[[str], None], checked: Callable[[int], str | None], dropped: Callable[[], None]) -> bool:
        """Waits for a version. False if none can come."""
        return False

    def answered(self, version: int) -> None:
        """Sends the answers up to this version."""

    def drop(self, name: str) -> None:
        """Removes a subscriber. The publisher does not wait for it any more."""
        for path in (self.path / "subscribers").glob(f"{name}.*.json"):
            path.unlink(missing_ok=True)

    def subscribers(self) -> dict[str, dict[str, Any]]:
        """Record, session and latest answer of each subscriber."""
        found = {}
        for path in sorted((self.path / "subscribers").glob("*.json")):
            name, session = path.stem.split(".")
            try:
                record = self._read(path)
            except FileNotFoundError:  # dropped meanwhile
                continue
            answers = sorted((self.path / "answers" / f"{name}.{session}").glob("*.json"))
            found[name] = {**record, "session": session, "answer": self._read(answers[-1]) if answers else None}
        return found

    def rectangles(self, layout: str) -> dict[str, list[tuple[slice, ...]]]:
        """The rectangles of a layout."""
        plain = self._read(self.path / "layouts" / f"{layout}.json")
        return {name: [tuple(slice(*bounds) for bounds in index) for index in indices] for name, indices in plain.items()}

    def answer(self, name: str, session: str, version: int, answer: dict[str, Any]) -> None:
        """Reports the outcome of a version to the publisher."""
        folder = self.path / "answers" / f"{name}.{session}"
        count = len(list(folder.glob("*.json")))  # a version that failed may succeed later
        self._write(folder / f"{count:08}.json", {**answer, "version": version})

    def _read(self, path: Path) -> dict[str, Any]:
        text = path.read_bytes()
        try:
            record: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise BadCheckpoint(f"{path} is no record of a channel: {error}", path=path, reason=str(error)) from error
        return record

    def _write(self, path: Path, record: dict[str, Any]) -> bool:
        """Writes a file unless it exists. It appears complete and synced."""
        temporary = path.with_name(f".{uuid4().hex}.tmp")
        try:
            with open(temporary, "xb") as file:
                file.write(json.dumps(record).encode())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True
