"""Lossless differences between neural-network checkpoints.

A *base* checkpoint and a *pair* of files, ``NAME.tpde-index`` and ``NAME.tpde-blob``, give back a *target*, bit for bit::

    import tpde

    tpde.encode("tuned.safetensors", "update", base="base.safetensors")
    tpde.apply("update", "rebuilt.safetensors", base="base.safetensors")

    with tpde.safe_open("update", base="base.safetensors", framework="np") as target:
        weight = target.get_tensor("layer.weight")

:mod:`tpde.torch` works on state dicts and live modules, :mod:`tpde.numpy` on dicts of arrays; each is imported on first use.
:mod:`tpde.nn` has layers that rebuild their weights just in time, :mod:`tpde.slices` finds the slices in the parameters of an
inference engine, and :mod:`tpde.sync` keeps them at the versions of a trainer. :mod:`tpde.store` keeps versions of checkpoints, and :mod:`tpde.dcp`
those of :mod:`torch.distributed.checkpoint`. All errors are :class:`TpdeError`. During a call, other Python
threads run, Ctrl-C ends the call, and all processors are used (the environment variable ``RAYON_NUM_THREADS`` sets the number of
threads). Warnings go to the logger ``tpde`` of :mod:`logging`, for example while a call waits for a lock that another process
holds on the output folder.

Python ends at once on SIGTERM and SIGHUP. Files have no names until they are complete, so an interrupted call normally leaves no
files. There are three exceptions: file systems without ``O_TMPFILE`` (NFS, FUSE), checkpoints with more than 64 files, and the
moment in which files get their names. Then files or folders named ``.tpde-*.tmp`` may remain. They can be removed while no process
writes there. A handler in the main thread avoids them, because its exception ends the call, which removes its files::

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
"""

from __future__ import annotations

from typing import Any

from ._core.errors import (
    AlreadyApplied,
    BadCheckpoint,
    DeviceError,
    Invalid,
    InvalidArgument,
    NotHeld,
    NotRecorded,
    OutOfMemory,
    Poisoned,
    Step,
    StoreError,
    SyncError,
    SystemRefused,
    TpdeError,
    WrongBase,
    former,
)
from ._engine.reader import SafeSlice, safe_open
from ._files.merge import MergeReport, fold, merge, revert, subset
from ._files.paths import (
    ApplyReport,
    EncodeReport,
    Inspection,
    TensorReport,
    UnusedBase,
    VerifyReport,
    apply,
    encode,
    inspect,
    verify,
)
from ._memory.slices import Slice
from ._tpde import __version__

__all__ = [
    "AlreadyApplied",
    "ApplyReport",
    "BadCheckpoint",
    "DeviceError",
    "EncodeReport",
    "Inspection",
    "Invalid",
    "InvalidArgument",
    "MergeReport",
    "NotHeld",
    "NotRecorded",
    "OutOfMemory",
    "Poisoned",
    "SafeSlice",
    "Slice",
    "Step",
    "StoreError",
    "SyncError",
    "SystemRefused",
    "TensorReport",
    "TpdeError",
    "UnusedBase",
    "VerifyReport",
    "WrongBase",
    "__version__",
    "apply",
    "dcp",
    "encode",
    "fold",
    "inspect",
    "merge",
    "nn",
    "numpy",
    "revert",
    "safe_open",
    "slices",
    "store",
    "subset",
    "sync",
    "torch",
    "verify",
]


def __getattr__(name: str) -> Any:
    # These modules need packages that may be missing or are slow to import.
    if name in ("dcp", "nn", "numpy", "slices", "store", "sync", "torch"):
        import importlib

        return importlib.import_module(f"tpde.{name}")
    if kind := former(name):
        return kind
    raise AttributeError(f"module 'tpde' has no attribute {name!r}")
