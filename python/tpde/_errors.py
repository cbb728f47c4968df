"""The exceptions of this package: one family, apart by who has to act."""

from __future__ import annotations

import os
from typing import Any


class TpdeError(Exception):
    """Everything that this package raises, but for what Python itself does with wrong argument types.

    Attributes are keyword arguments of the constructor; those that a class does not list are ``None`` or missing.
    """

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        self._keep(message, attributes)

    def _keep(self, message: str, attributes: dict[str, Any]) -> None:
        self._message = message
        self._attributes = attributes
        for name, value in attributes.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self._message

    def __reduce__(self) -> Any:
        return _revive, (type(self), self._message, self._attributes)


def _revive(kind: type[TpdeError], message: str, attributes: dict[str, Any]) -> TpdeError:
    return kind(message, **attributes)


class SystemRefused(TpdeError, OSError):
    """The operating system refused. Attributes: ``action``, ``path``, ``errno`` (``None`` if it gave none)."""

    action: str | None = None
    path: os.PathLike[str] | None = None

    def __init__(self, message: str, **attributes: Any) -> None:
        OSError.__init__(self, attributes.get("errno"), message)
        self._keep(message, attributes)
        self.filename = attributes.get("path")


class NotFound(SystemRefused, FileNotFoundError):
    """A file or folder is not there."""


class AlreadyExists(SystemRefused, FileExistsError):
    """A file is there and ``replace`` was not asked for."""


class Invalid(TpdeError, ValueError):
    """A pair breaks the specification, or its bytes are damaged.

    Attributes: ``rule`` (id in the specification), ``section``, ``tensor``, ``chunk`` (place in the index map), ``expected``,
    ``found``; tensor and chunk are ``None`` where they do not apply.
    """

    rule: str
    section: str
    tensor: str | None = None
    chunk: int | None = None
    expected: str
    found: str


class WrongBase(TpdeError, ValueError):
    """The base is not the one that the pair was made from.

    Attributes: ``tensor``, the first base tensor that differs, ``expected`` and ``found``, its digests.
    """

    tensor: str
    expected: str
    found: str


class AlreadyApplied(TpdeError, ValueError):
    """The base is the pair's target: nothing is left to do."""


class BadCheckpoint(TpdeError, ValueError):
    """A checkpoint that was given cannot be read as one. Attributes: ``path``, ``reason``."""

    path: os.PathLike[str]
    reason: str


class Changed(TpdeError, RuntimeError):
    """A file changed while it was read. To read it again may succeed. Attribute: ``what``, the file or the part of a blob."""

    what: str


class NotWritable(TpdeError, ValueError):
    """A target that no file of safetensors can hold. In memory it can be rebuilt. Attribute: ``reason``."""

    reason: str


class Limit(TpdeError, ValueError):
    """A file may be fine but asks for more than a reader's limits. Attributes: ``what``, ``limit``, ``found``."""

    what: str
    limit: int
    found: int


class Poisoned(TpdeError, RuntimeError):
    """An application chunk by chunk failed after it had begun to write: the tensors are a mixture of base and target.

    Attributes: ``written``, the chunks that are the target's, by their place in the index map, and ``total``, how many were to
    be. ``__cause__`` is the first failure.
    """

    written: list[int]
    total: int


class Misuse(TpdeError, ValueError):
    """The call makes no sense: a wrong name, range, size or kind of tensor."""


class NotContiguous(Misuse):
    """A tensor's elements do not lie one after the other. Attribute: ``tensor``. ``tensor.contiguous()`` mends it."""

    tensor: str


class OutOfRange(Misuse, IndexError):
    """An index beyond the tensor."""


class OutOfMemory(TpdeError, MemoryError):
    """There is no memory for a tensor. Attributes: ``tensor``, ``bytes``."""

    tensor: str
    bytes: int


class DeviceUnavailable(TpdeError, RuntimeError):
    """There is no such device, or nothing to use it with: no driver, one too old, none of PyTorch's. Attribute: ``device``."""

    device: str


class DeviceFailed(TpdeError, RuntimeError):
    """The driver of a device refused something, or work on the device died. Attributes: ``action``, ``reason``."""

    action: str
    reason: str


class Internal(TpdeError, RuntimeError):
    """A defect of this package."""
