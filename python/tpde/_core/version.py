"""Versions of a channel: numbers with an identity."""

from __future__ import annotations

from typing import Any


class Version(int):
    """The number of a version, and the id that its publisher gave it.

    Numbers repeat: a trainer that is started again on a new channel counts from 0. Ids are random, so a version of one run is not taken
    for one of another. A number without an id is the caller's word, such as that of a checkpoint which an engine has loaded.
    """

    #: The id; ``None`` if it is not known.
    id: str | None

    def __new__(cls, number: int, id: str | None = None) -> Version:
        made = super().__new__(cls, number)
        made.id = id
        return made

    def __reduce__(self) -> Any:
        return Version, (int(self), self.id)
