"""Temporary folders. A process that is killed leaves its own, and the next one that makes such a folder in the same place deletes it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from .. import _tpde


class TemporaryFolder:
    """A folder in ``parent``, by default the system's folder for temporary files. It is deleted by :meth:`close`, with the object, and
    at the end of the process."""

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        folder = _tpde.TemporaryFolder(parent)
        self.path, self.close = Path(folder.path), weakref.finalize(self, folder.close)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: Any) -> None:
        self.close()
