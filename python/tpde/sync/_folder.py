"""A folder as the channel between a publisher and its subscribers.

Every file is written once, complete, and is not changed afterwards. A version exists when its record does, which is written last::

    versions/00000000.json            record: id, and dtypes and shapes of the tensors
    versions/00000007.json            record: id, and names, digests and layouts of the pairs
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from .. import _tpde
from .._core.errors import BadCheckpoint, InvalidArgument, asked, make_error
from .._core.version import Version
from .._files.paths import path_of
from ..slices._cuts import Rectangles
from ._records import check_answer, check_layout, check_record, check_subscriber, check_within, indices_of, plain_of

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
#: Names of files. Others are not those of a channel, such as copies that a person has made.
_VERSION = re.compile(r"[0-9]{8,}")
_SUBSCRIBER = re.compile(rf"({_NAME.pattern})\.([0-9a-f]{{32}})")


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
        self.path = Path(path_of(path))
        for name in ("versions", "pairs", "layouts", "subscribers", "answers"):
            with asked("create", self.path / name):
                (self.path / name).mkdir(parents=True, exist_ok=True)

    def pair(self, name: str) -> Path:
        """Name of a pair that a record names."""
        if not _NAME.fullmatch(name):
            raise BadCheckpoint(f"a record names the pair {name!r}", path=self.path, reason="no name of a pair")
        return self.path / "pairs" / name

    def versions(self) -> list[int]:
        """Numbers of all versions, ascending."""
        return sorted(int(path.stem) for path in self._listed("versions") if _VERSION.fullmatch(path.stem))

    def version(self, version: int) -> dict[str, Any]:
        """The record of a version."""
        return self._read(self.path / "versions" / f"{version:08}.json", check_record)

    def identify(self, version: int) -> Version:
        """A version with the id that the channel has for it. That of -1, no version, is the id of version 0. A channel whose publisher
        has not begun has no ids.

        Raises:
            SyncError (unknown_version): The channel has no version of this number, or has another one.
        """
        claimed = getattr(version, "id", None)
        versions = self.versions()
        if version > (versions[-1] if versions else version) or (not versions and claimed is not None):
            last = f"its last one is {versions[-1]}" if versions else "it has no versions"
            raise make_error(
                "unknown_version", f"the channel {self.path} has no version {version}: {last}", version=int(version), found=claimed
            )
        if max(version, 0) not in versions:
            return Version(version, claimed)  # not begun, or deleted: only a whole version leads on from it
        found = self.version(max(version, 0)).get("id")
        if claimed is not None and claimed != found:
            raise make_error(
                "unknown_version",
                f"version {version} of the channel {self.path} is of another run: expected id {claimed}, found {found}",
                version=int(version),
                expected=found,
                found=claimed,
            )
        return Version(version, found)

    def admit(self, version: int, rectangles: Rectangles) -> Version:
        """The version of a subscriber that joins, with its id.

        Raises:
            SyncError (unknown_version): The channel does not have it.
            SyncError (other_tensors): The versions of the channel lack elements that the subscriber holds.
        """
        if isinstance(version, bool) or not isinstance(version, int) or version < -1:
            raise InvalidArgument(f"a subscriber has version {version!r}: expected a number of at least 0, or -1 for none")
        known = self.identify(Version(-1) if version == -1 else version)
        if 0 in self.versions():
            check_within(rectangles, self.version(0).get("tensors"))
        return known

    def begin(self, record: dict[str, Any]) -> None:
        """Makes version 0, which subscribers load from a checkpoint."""
        Folder.commit(self, 0, record)

    def commit(self, version: int, record: dict[str, Any]) -> None:
        """Makes a version visible, whose pairs are complete. Raises if it exists: another publisher uses the folder."""
        if not self._write(self.path / "versions" / f"{version:08}.json", record):
            raise InvalidArgument(f"version {version} exists already: another publisher uses {self.path}")

    def join(self, name: str, version: int, rectangles: Rectangles) -> tuple[str, str]:
        """Adds a subscriber that has this version, or takes the place of one with the same name. Returns its session and layout.
        Raises as :meth:`admit`."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgument(f"a subscriber is named {name!r}: expected letters, digits, - and _")
        if not isinstance(rectangles, Mapping):
            raise InvalidArgument(f"rectangles is a {type(rectangles).__name__}: expected those of Map.rectangles")
        version, plain = self.admit(version, rectangles), plain_of(rectangles)
        layout = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
        self._write(self.path / "layouts" / f"{layout}.json", plain)
        session = uuid4().hex
        self._add(name, session, version, layout)
        return session, layout

    def _add(self, name: str, session: str, version: Version, layout: str) -> None:
        self.drop(name)
        answers = self.path / "answers" / f"{name}.{session}"
        with asked("create", answers):
            answers.mkdir(exist_ok=True)
        self._write(self.path / "subscribers" / f"{name}.{session}.json", {"version": version, "id": version.id, "layout": layout})

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
        if not isinstance(name, str):
            raise InvalidArgument(f"a subscriber is named {name!r}: expected a text")
        for path in self._listed("subscribers"):
            if path.stem.partition(".")[0] == name:
                with asked("delete", path):
                    path.unlink(missing_ok=True)

    def subscribers(self) -> dict[str, dict[str, Any]]:
        """Record, session and latest answer of each subscriber."""
        found = {}
        for path in self._listed("subscribers"):
            parsed = _SUBSCRIBER.fullmatch(path.stem)
            if parsed is None:
                continue
            try:
                record = self._read(path, check_subscriber)
            except FileNotFoundError:  # dropped meanwhile
                continue
            name, session = parsed.groups()
            answers = self._answers_of(name, session)
            found[name] = {**record, "session": session, "answer": self._read(answers[-1], check_answer) if answers else None}
        return found

    def rectangles(self, layout: str) -> dict[str, list[tuple[slice, ...]]]:
        """The rectangles of a layout."""
        return indices_of(self._read(self.path / "layouts" / f"{layout}.json", check_layout))

    def answer(self, name: str, session: str, version: int, answer: dict[str, Any]) -> None:
        """Reports the outcome of a version to the publisher."""
        count = len(self._answers_of(name, session))  # a version that failed may succeed later
        self._write(self.path / "answers" / f"{name}.{session}" / f"{count:08}.json", {**answer, "version": version})

    def _answers_of(self, name: str, session: str) -> list[Path]:
        return [path for path in self._listed(f"answers/{name}.{session}") if _VERSION.fullmatch(path.stem)]

    def _listed(self, folder: str) -> list[Path]:
        """The records in a folder, by name."""
        with asked("list", self.path / folder):
            names = os.listdir(self.path / folder)
        return [self.path / folder / name for name in sorted(names) if name.endswith(".json") and not name.startswith(".")]

    def _read(self, path: Path, check: Callable[[Any], None]) -> dict[str, Any]:
        """A record, if ``check`` finds it to be one."""
        with asked("read", path):
            text = path.read_bytes()
        try:
            record: dict[str, Any] = json.loads(text)
            check(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise BadCheckpoint(f"{path} is no record of a channel: {reason}", path=path, reason=reason) from error
        return record

    def _write(self, path: Path, record: Mapping[str, Any]) -> bool:
        """Writes a file unless it exists. It appears complete and synced."""
        return _tpde.write_new(path, json.dumps(record).encode())
