"""Where this package makes temporary folders: in one folder per process, which it locks. A process that is killed leaves its folder, and
the next one that needs such a folder deletes it."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

from .errors import asked

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX = "tpde-of-"
#: Folder and descriptor of its lock, by process and parent folder.
_made: dict[tuple[int, str], tuple[str, int | None]] = {}
_alone = threading.Lock()


def scratch(parent: str | os.PathLike[str] | None = None) -> str:
    """The folder of this process in ``parent``, by default the system's folder for temporary files."""
    parent = os.fspath(tempfile.gettempdir() if parent is None else parent)
    with _alone, asked("create a temporary folder in", parent):
        key = os.getpid(), os.path.abspath(parent)
        if key not in _made or not os.path.isdir(_made[key][0]):
            if not any(pid == key[0] for pid, _ in _made):
                atexit.register(_remove, key[0])
            _delete_left(Path(parent))
            _made[key] = _make(parent)
        return _made[key][0]


def _make(parent: str) -> tuple[str, int | None]:
    """Creates a folder and locks it. Another process may take the folder for one that was left before it is locked."""
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        try:
            lock = _locked(path, waits=True)
        except OSError:  # this file system has no locks, so nothing is deleted here
            return path, None
        if lock is not None and _is_at(lock, path):
            return path, lock
        if lock is not None:
            os.close(lock)


def _locked(path: str, *, waits: bool) -> int | None:
    """A descriptor of the folder with its lock; ``None`` if there is no such folder, or another process has the lock."""
    if fcntl is None:
        raise OSError("no locks")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the folder of a descriptor is the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _delete_left(parent: Path) -> None:
    """Deletes folders of processes of this user that have ended."""
    with contextlib.suppress(OSError):
        for path in [parent / name for name in os.listdir(parent) if name.startswith(_PREFIX)]:
            with contextlib.suppress(OSError):
                if path.stat(follow_symlinks=False).st_uid == os.getuid():
                    lock = _locked(os.fspath(path), waits=False)
                    if lock is not None:
                        try:
                            shutil.rmtree(path, ignore_errors=True)
                        finally:
                            os.close(lock)


def _remove(pid: int) -> None:
    """Deletes the folders of this process at its end."""
    for key in [key for key in _made if key[0] == pid == os.getpid()]:
        path, lock = _made.pop(key)
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)
