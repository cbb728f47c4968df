"""The exceptions of this package."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


class TpdeError(Exception):
    """The base class of all exceptions of this package, except Python's own for wrong argument types.

    Keyword arguments of the constructor become attributes. A listed attribute that was not passed is ``None`` if the class has
    that default, otherwise it is missing. The text of some errors has a second line with a hint: a likely cause, or what helps.
    """

    _hint: str | None = None

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        self._keep(message, attributes)

    def _keep(self, message: str, attributes: dict[str, Any]) -> None:
        self._message = message
        self._attributes = attributes
        for name, value in attributes.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self._message if self._hint is None else f"{self._message}\nhint: {self._hint}"

    def __reduce__(self) -> Any:
        return _revive, (type(self), self._message, self._attributes)


def _revive(kind: type[TpdeError], message: str, attributes: dict[str, Any]) -> TpdeError:
    return kind(message, **attributes)


def reason_of(error: BaseException) -> str:
    """Type and text of an error on one line, for the text of another one. Without a hint, which is about the arguments of one call."""
    return f"{type(error).__name__}: {error._message if isinstance(error, TpdeError) else error}"


class SystemRefused(TpdeError, OSError):
    """A call of the operating system failed. Attributes: ``action``, ``path``, ``errno`` (``None`` if it gave none)."""

    action: str | None = None
    path: os.PathLike[str] | None = None

    def __init__(self, message: str, **attributes: Any) -> None:
        OSError.__init__(self, attributes.get("errno"), message)
        self._keep(message, attributes)
        self.filename = attributes.get("path")


class NotFound(SystemRefused, FileNotFoundError):
    """A file or folder does not exist."""


class AlreadyExists(SystemRefused, FileExistsError):
    """A file exists and ``replace`` is false."""


@contextlib.contextmanager
def asked(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the operating system in the block become those of this package. ``action`` is a verb."""
    try:
        yield
    except TpdeError:
        raise
    except OSError as error:
        kind = NotFound if isinstance(error, FileNotFoundError) else SystemRefused
        kind = AlreadyExists if isinstance(error, FileExistsError) else kind
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        raise kind(f"cannot {action} {os.fspath(path)}: {reason}", action=action, path=path, errno=error.errno) from error


class Invalid(TpdeError, ValueError):
    """A pair violates the specification, or its bytes are damaged.

    Attributes: ``rule`` (id in the specification), ``section``, ``pair`` (path of the pair, if it is an input of a merge),
    ``tensor``, ``entry`` (index in the tensor table, if the name is not known), ``chunk`` (index in the index map), ``expected``,
    ``found``; pair, tensor, entry and chunk are ``None`` where they do not apply.
    """

    rule: str
    section: str
    pair: str | None = None
    tensor: str | None = None
    entry: int | None = None
    chunk: int | None = None
    expected: str
    found: str


class UnexpectedPair(TpdeError, ValueError):
    """The index does not have the pair digest that ``expect`` states. Nothing else of the pair was read.

    Attributes: ``expected`` and ``found``, the digests in hexadecimal.
    """

    expected: str
    found: str


class WrongBase(TpdeError, ValueError):
    """The base is not the one from which the pair was made.

    Attributes: ``tensor``, the first tensor of the pair whose base differs, ``base``, the name of the base tensor, ``expected`` and
    ``found``, its digests; ``rule``, ``"chunk.base_sum"`` with the ``chunk`` (index in the index map) whose sum differs, or
    ``"tensor.base_digest"``.
    """

    tensor: str
    base: str | None = None
    chunk: int | None = None
    rule: str = "tensor.base_digest"
    expected: str
    found: str


class Repacked(WrongBase):
    """The memory of some modules does not hold the base, and that of others does: a kernel may have changed the layout of their
    weights after they were loaded. Nothing was written.

    Attributes: those of :class:`WrongBase`, and ``modules``, the names of these modules.
    """

    modules: list[str]


class AlreadyApplied(TpdeError, ValueError):
    """The base already is the target of the pair.

    Attributes: ``tensor``, ``chunk`` and ``rule``, as for :class:`WrongBase`; ``None`` where they are not known.
    """

    tensor: str | None = None
    chunk: int | None = None
    rule: str | None = None


class Step(TpdeError, ValueError):
    """A pair of a chain does not fit the version before it, or is damaged. ``__cause__`` is the error: for example :class:`WrongBase`,
    :class:`AlreadyApplied` or :class:`Invalid`.

    Attributes: ``number`` of the pair in the chain, from 1, and ``pair``, its path.
    """

    number: int
    pair: str


class BadCheckpoint(TpdeError, ValueError):
    """A file or folder is not a readable checkpoint. Attributes: ``path``, ``reason``."""

    path: os.PathLike[str]
    reason: str


class Changed(TpdeError, RuntimeError):
    """A file changed while it was being read. Reading it again may succeed. Attribute: ``what``, the file or the part of a blob."""

    what: str


class NotWritable(TpdeError, ValueError):
    """The target cannot be written as safetensors files. It can be rebuilt in memory. Attribute: ``reason``."""

    reason: str


class NotMergeable(TpdeError, ValueError):
    """Two pairs contradict each other, so they cannot be merged.

    Attributes: ``conflict`` (``"tensor"`` if both have the tensor, ``"type"`` if its dtypes or shapes differ, ``"cuts"`` if its
    parts do not nest, ``"base"`` if the pairs have different bases, or ``"file"``), ``name`` of the tensor, base tensor or file,
    ``pairs``, the two paths, and ``found``, the property in each pair.
    """

    conflict: str
    name: str
    pairs: tuple[str, str]
    found: tuple[str, str]


class Limit(TpdeError, ValueError):
    """A value in a file exceeds the reader's limits. Attributes: ``what``, ``limit``, ``found``."""

    what: str
    limit: int
    found: int


class Poisoned(TpdeError, RuntimeError):
    """An application in place failed after it had started to write. The tensors are a mixture of base and target, or unusable if
    they were being overwritten from another base.

    Attributes: ``written``, the chunks that were written, as indexes into the index map, and ``total``, the number of chunks to
    write; ``[]`` and 0 if the tensors were being overwritten. ``__cause__`` is the first failure.
    """

    written: list[int]
    total: int


class InvalidArgument(TpdeError, ValueError):
    """An argument is wrong: a name, a range, a size, or a kind of tensor."""


class NotContiguous(InvalidArgument):
    """A tensor is not contiguous, or a slice has no rows of contiguous elements at equal distances. ``tensor.contiguous()`` makes a
    contiguous copy. Attribute: ``tensor``."""

    tensor: str


class NotHeld(InvalidArgument):
    """Slices have only some elements of a chunk that is needed, or of a part to be encoded. Nothing was decoded or encoded.

    Attributes: ``tensor``, and ``chunk`` (index in the index map), which is ``None`` for a part.
    """

    tensor: str
    chunk: int | None = None


class NotRecorded(InvalidArgument):
    """A weight loader does what a map of slices cannot express. Nothing was written.

    Attributes: ``operation``, its name in PyTorch, ``tensor``, ``parameter``, and ``where``, file, line and function of the loader;
    ``None`` where they do not apply.
    """

    operation: str | None = None
    tensor: str | None = None
    parameter: str | None = None
    where: str | None = None


class UnknownVersion(InvalidArgument):
    """A channel does not have this version: the version is of another run, the channel was replaced, or the number is too high.

    Attributes: ``version``, and ``expected`` and ``found``, the ids of the channel's version of this number and of the claimed one;
    ``None`` if there is no such version, or its id is not known.
    """

    version: int
    expected: str | None = None
    found: str | None = None


class OtherTensors(InvalidArgument):
    """Tensors are not those of the versions before. Nothing was published.

    Attributes: ``missing``, ``extra``, and ``changed``, names of tensors; those of ``changed`` have another dtype or shape.
    """

    missing: list[str]
    extra: list[str]
    changed: list[str]


class NotAcknowledged(TpdeError, RuntimeError):
    """Subscribers do not have the last version of a channel. Nothing was published.

    Attributes: ``version``, ``failed``, errors by name of the subscriber, and ``waiting``, names of those that have not answered.
    """

    version: int
    failed: dict[str, str]
    waiting: list[str]


class RankFailed(TpdeError, RuntimeError):
    """Another rank of the trainer failed. Nothing was published. Attributes: ``rank``, and ``reason``, type and text of its error."""

    rank: int
    reason: str


class Disconnected(TpdeError, ConnectionError):
    """A rank of a channel's group has ended, or its transport failed. The channel cannot be used again; parameters are not changed by
    this. Attribute: ``reason``."""

    reason: str


class Incomplete(InvalidArgument):
    """The pair has only some parts of a tensor, and lacks elements that are needed. Nothing was decoded. Attributes: ``tensor``,
    ``missing``, the first elements that the pair lacks, as a tuple of slices."""

    tensor: str
    missing: tuple[slice, ...]


class OutOfRange(InvalidArgument, IndexError):
    """An index beyond the tensor."""


class OutOfMemory(TpdeError, MemoryError):
    """Not enough memory for a tensor. Attributes: ``tensor``, ``bytes``."""

    tensor: str
    bytes: int


class DeviceUnavailable(TpdeError, RuntimeError):
    """There is no such device, no recent driver, or PyTorch cannot use the device. Attribute: ``device``."""

    device: str


class DeviceFailed(TpdeError, RuntimeError):
    """A call of the device's driver failed, or work on the device failed. Attributes: ``action``, ``reason``."""

    action: str
    reason: str


class RequestFailed(TpdeError, ConnectionError):
    """A request of a store failed, also after repetitions. Attributes: ``action``, a verb, and ``object``, below the prefix of the
    store."""

    action: str
    object: str


class NotAStore(TpdeError, FileNotFoundError):
    """There is no store at the location. Attribute: ``location``."""

    location: str


class AlreadyAStore(TpdeError, FileExistsError):
    """The location has a store already. Attribute: ``location``."""

    location: str


class BadManifest(TpdeError, ValueError):
    """A manifest of a store is not valid, or has a schema that this version does not read. Attribute: ``object``, its name below the
    prefix of the store."""

    object: str


class DamagedObject(TpdeError, ValueError):
    """An object of a store is missing or has other bytes than its name and its manifest state. Attributes: ``object``, its
    name, ``expected`` and ``found``."""

    object: str
    expected: str
    found: str


class NoVersion(TpdeError, LookupError):
    """A store has no such branch or version. Attribute: ``version``."""

    version: str


class Pruned(TpdeError, LookupError):
    """A version was pruned. Attributes: ``version``, and ``kept``, the nearest versions that were kept: the one before, and the one
    after."""

    version: str
    kept: list[str]


class Conflict(TpdeError, RuntimeError):
    """Another writer has created the version first. Nothing was overwritten: put again, on top of it. Attribute: ``version``."""

    version: str


class Unreachable(TpdeError, ValueError):
    """A version cannot be rebuilt from what the store has. Attribute: ``version``."""

    version: str


class ExternalVersion(TpdeError, LookupError):
    """A version is not in the store: pass its checkpoint in ``have``. Attributes: ``version``, and ``hint``, where it can be found in
    the words of its writer."""

    version: str
    hint: str


class TooSlow(TpdeError, TimeoutError):
    """A version took longer to store than half of the store's grace. Nothing was published: put again. Attributes: ``seconds``,
    ``grace``."""

    seconds: int
    grace: int


class Internal(TpdeError, RuntimeError):
    """A bug of this package."""
