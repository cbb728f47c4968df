"""The exceptions of this package."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Sized
from typing import Any


class TpdeError(Exception):
    """The base class of all exceptions of this package, except Python's own for wrong argument types.

    A class groups errors that a caller handles in the same way. ``code`` is the exact kind, a word that stays the same between
    releases. Keyword arguments of the constructor become attributes. A listed attribute is ``None`` where it does not apply. The text
    of some errors has a second line with a hint: a likely cause, or what helps.

    Codes: ``"internal"``, a bug of this package, and ``"other"``.
    """

    code: str = "other"
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
        return _revive, (self.code, self._message, self._attributes)


def _revive(code: str, message: str, attributes: dict[str, Any]) -> TpdeError:
    return make_error(code, message, **attributes)


class InvalidArgument(TpdeError, ValueError):
    """An argument is wrong: a name, a range, a size, or a kind of tensor.

    Codes:

    - ``"invalid_argument"``
    - ``"not_contiguous"``: ``tensor`` is not contiguous, or a slice has no rows of contiguous elements at equal distances.
      ``tensor.contiguous()`` makes a contiguous copy.
    - ``"out_of_range"``: an index beyond the tensor, also an :class:`IndexError`.
    - ``"not_mergeable"``: two pairs contradict each other. Attributes: ``conflict`` (``"tensor"`` if both have the tensor, ``"type"``
      if its dtypes or shapes differ, ``"cuts"`` if its parts do not nest, ``"base"`` if the pairs have different bases, or
      ``"file"``), ``name`` of the tensor, base tensor or file, ``pairs``, the two paths, and ``found``, the property in each pair.
    """

    code = "invalid_argument"
    tensor: str | None = None
    conflict: str | None = None
    name: str | None = None
    pairs: tuple[str, str] | None = None
    found: Any = None


class SystemRefused(TpdeError, OSError):
    """A call of the operating system failed. Attributes: ``action``, ``path``, ``errno`` (``None`` if it gave none).

    Codes: ``"io"``; ``"not_found"``, a file or folder does not exist, also a :class:`FileNotFoundError`; ``"already_exists"``, a file
    exists and ``replace`` is false, also a :class:`FileExistsError`; ``"changed"``, the file or the part of a blob that ``what`` names
    changed while it was being read, so that reading it again may succeed.
    """

    code = "io"
    action: str | None = None
    path: os.PathLike[str] | None = None
    what: str | None = None

    def __init__(self, message: str, **attributes: Any) -> None:
        OSError.__init__(self, attributes.get("errno"), message)
        self._keep(message, attributes)
        self.filename = attributes.get("path")


class Invalid(TpdeError, ValueError):
    """A pair is refused.

    Codes:

    - ``"invalid"``: the pair violates the specification, or its bytes are damaged. Attributes: ``rule`` (id in the specification),
      ``section``, ``pair`` (path of the pair, if it is an input of a merge), ``tensor``, ``entry`` (index in the tensor table, if the
      name is not known), ``chunk`` (index in the index map), ``expected``, ``found``.
    - ``"unexpected_pair"``: the index does not have the pair digest that ``expect`` states. Nothing else of the pair was read.
      Attributes: ``expected`` and ``found``, the digests in hexadecimal.
    - ``"limit"``: a value in a file exceeds the reader's limits. Attributes: ``what``, ``limit``, ``found``.
    """

    code = "invalid"
    rule: str | None = None
    section: str | None = None
    pair: str | None = None
    tensor: str | None = None
    entry: int | None = None
    chunk: int | None = None
    expected: str | None = None
    found: Any = None
    what: str | None = None
    limit: int | None = None


class WrongBase(TpdeError, ValueError):
    """The base is not the one from which the pair was made.

    Attributes: ``tensor``, the first tensor of the pair whose base differs, ``base``, the name of the base tensor, ``expected`` and
    ``found``, its digests; ``rule``, ``"chunk.base_sum"`` with the ``chunk`` (index in the index map) whose sum differs, or
    ``"tensor.base_digest"``.

    Codes: ``"wrong_base"``; ``"repacked"``, the memory of some modules does not hold the base, and that of others does: a kernel may
    have changed the layout of their weights after they were loaded. Nothing was written, and ``modules`` has the names of these
    modules.
    """

    code = "wrong_base"
    tensor: str
    base: str | None = None
    chunk: int | None = None
    rule: str = "tensor.base_digest"
    expected: str
    found: str
    modules: list[str] | None = None


class AlreadyApplied(TpdeError, ValueError):
    """The base already is the target of the pair. Attributes: ``tensor``, ``chunk`` and ``rule``, as for :class:`WrongBase`."""

    code = "already_applied"
    tensor: str | None = None
    chunk: int | None = None
    rule: str | None = None


class Step(TpdeError, ValueError):
    """A pair of a chain does not fit the version before it, or is damaged. ``__cause__`` is the error: for example :class:`WrongBase`,
    :class:`AlreadyApplied` or :class:`Invalid`.

    Attributes: ``number`` of the pair in the chain, from 1, and ``pair``, its path.
    """

    code = "step"
    number: int
    pair: str


class BadCheckpoint(TpdeError, ValueError):
    """Files are no checkpoint, or cannot become one. Attributes: ``path``, ``reason``.

    Codes: ``"bad_checkpoint"``, a file or folder is not a readable checkpoint; ``"not_writable"``, the target cannot be written as
    safetensors files. It can be rebuilt in memory.
    """

    code = "bad_checkpoint"
    path: os.PathLike[str] | None = None
    reason: str


class Poisoned(TpdeError, RuntimeError):
    """An application in place failed after it had started to write. The tensors are a mixture of base and target, or unusable if
    they were being overwritten from another base.

    Attributes: ``written``, the chunks that were written, as indexes into the index map, and ``total``, the number of chunks to
    write; ``[]`` and 0 if the tensors were being overwritten. ``__cause__`` is the first failure.
    """

    code = "poisoned"
    written: list[int]
    total: int


class NotHeld(InvalidArgument):
    """Elements that are needed are missing. Nothing was decoded or encoded. Attribute: ``tensor``.

    Codes: ``"not_held"``, slices have only some elements of the ``chunk`` (index in the index map), or of a part to be encoded;
    ``"incomplete"``, the pair has only some parts of the tensor, and lacks the elements ``missing``, a tuple of slices.
    """

    code = "not_held"
    chunk: int | None = None
    missing: tuple[slice, ...] | None = None


class NotRecorded(InvalidArgument):
    """A weight loader does what a map of slices cannot express. Nothing was written.

    Attributes: ``operation``, its name in PyTorch, ``tensor``, ``parameter``, and ``where``, file, line and function of the loader.
    """

    code = "not_recorded"
    operation: str | None = None
    parameter: str | None = None
    where: str | None = None


class SyncError(TpdeError, RuntimeError):
    """Trainer and receivers cannot go on as they are. Errors of the publisher: nothing was published.

    Codes:

    - ``"not_acknowledged"``: subscribers do not have the last version of a channel. Attributes: ``version``, ``failed``, errors by name
      of the subscriber, and ``waiting``, names of those that have not answered.
    - ``"rank_failed"``: another rank of the trainer failed. Attributes: ``rank``, and ``reason``, type and text of its error.
    - ``"disconnected"``: a rank of a channel's group has ended, or its transport failed, as ``reason`` says. The channel cannot be
      used again; parameters are not changed by this. Also a :class:`ConnectionError`.
    - ``"unknown_version"``: a channel does not have the version: the version is of another run, the channel was replaced, or the number
      is too high. Attributes: ``version``, and ``expected`` and ``found``, the ids of the channel's version of this number and of the
      claimed one. Also an :class:`InvalidArgument`.
    - ``"other_tensors"``: tensors are not those of the versions before. Attributes: ``missing``, ``extra``, and ``changed``, names of
      tensors; those of ``changed`` have another dtype or shape. Also an :class:`InvalidArgument`.
    """

    version: int | None = None
    failed: dict[str, str]
    waiting: list[str]
    rank: int | None = None
    reason: str | None = None
    expected: str | None = None
    found: str | None = None
    missing: list[str]
    extra: list[str]
    changed: list[str]


class OutOfMemory(TpdeError, MemoryError):
    """Not enough memory for a tensor. Attributes: ``tensor``, ``bytes``."""

    code = "out_of_memory"
    tensor: str
    bytes: int


class DeviceError(TpdeError, RuntimeError):
    """A device cannot be used.

    Codes: ``"no_device"``, there is no such ``device``, no recent driver, or PyTorch cannot use the device; ``"no_library"``; and
    ``"device"``, a call of the driver or work on the device failed. Attributes of the last: ``action``, ``reason``.
    """

    code = "device"
    device: str | None = None
    action: str | None = None
    reason: str | None = None


class StoreError(TpdeError):
    """A store does not have what is asked for, or cannot be changed.

    Attributes: ``version``; ``object``, a name below the prefix of the store; ``location``. Codes, and the class of Python that the
    error has too:

    - ``"conflict"`` (:class:`RuntimeError`): another writer has created ``version`` first. Nothing was overwritten: put again, on top
      of it.
    - ``"too_slow"`` (:class:`TimeoutError`): a version took longer to store than half of the store's grace. Nothing was published: put
      again. Attributes: ``seconds``, ``grace``.
    - ``"request"`` (:class:`ConnectionError`): a request failed, also after repetitions. Attributes: ``action``, a verb, ``object``.
    - ``"no_version"`` (:class:`LookupError`): there is no such branch or ``version``.
    - ``"pruned"`` (:class:`LookupError`): ``version`` was pruned. ``kept`` has the nearest versions that were kept: the one before, and
      the one after.
    - ``"external"`` (:class:`LookupError`): ``version`` is not in the store: pass its checkpoint in ``have``. ``hint`` says where it
      can be found, in the words of its writer.
    - ``"unreachable"`` (:class:`ValueError`): ``version`` cannot be rebuilt from what the store has.
    - ``"manifest"`` (:class:`ValueError`): the manifest ``object`` is not valid, or has a schema that this release does not read.
    - ``"damaged"`` (:class:`ValueError`): ``object`` is missing or has other bytes than its name and its manifest state. Attributes:
      ``expected``, ``found``.
    - ``"not_a_store"`` (:class:`FileNotFoundError`): there is no store at ``location``.
    - ``"already_a_store"`` (:class:`FileExistsError`): ``location`` has a store already.
    """

    version: str | None = None
    object: str | None = None
    location: str | None = None
    action: str | None = None
    expected: str | None = None
    found: str | None = None
    kept: list[str]
    hint: str | None = None
    seconds: int | None = None
    grace: int | None = None


#: The codes of each class, with a second class of their errors.
_CODES: dict[type[TpdeError], dict[str, type[Exception] | None]] = {
    TpdeError: {"other": None, "internal": RuntimeError},
    InvalidArgument: {"invalid_argument": None, "not_contiguous": None, "out_of_range": IndexError, "not_mergeable": None},
    SystemRefused: {"io": None, "not_found": FileNotFoundError, "already_exists": FileExistsError, "changed": RuntimeError},
    Invalid: {"invalid": None, "unexpected_pair": None, "limit": None},
    WrongBase: {"wrong_base": None, "repacked": None},
    AlreadyApplied: {"already_applied": None},
    Step: {"step": None},
    BadCheckpoint: {"bad_checkpoint": None, "not_writable": None},
    Poisoned: {"poisoned": None},
    NotHeld: {"not_held": None, "incomplete": None},
    NotRecorded: {"not_recorded": None},
    SyncError: {
        **dict.fromkeys(["not_acknowledged", "rank_failed"]),
        "disconnected": ConnectionError,
        **dict.fromkeys(["unknown_version", "other_tensors"], InvalidArgument),
    },
    OutOfMemory: {"out_of_memory": None},
    DeviceError: {"device": None, "no_device": None, "no_library": None},
    StoreError: {
        "conflict": RuntimeError,
        "too_slow": TimeoutError,
        "request": ConnectionError,
        **dict.fromkeys(["no_version", "pruned", "external"], LookupError),
        **dict.fromkeys(["unreachable", "manifest", "damaged"], ValueError),
        "not_a_store": FileNotFoundError,
        "already_a_store": FileExistsError,
    },
}
_CLASSES = {code: root for root, codes in _CODES.items() for code in codes}
_ALSO = {code: also for codes in _CODES.values() for code, also in codes.items() if also is not None}

#: Classes of release 0.2 that became codes, which are their names in small letters.
_IN_SMALL_LETTERS = (
    "AlreadyAStore AlreadyExists Changed Conflict Disconnected Incomplete Internal Limit NoVersion NotAStore NotAcknowledged "
    "NotContiguous NotFound NotMergeable NotWritable OtherTensors OutOfRange Pruned RankFailed Repacked TooSlow UnexpectedPair "
    "UnknownVersion Unreachable"
).split()
#: The code of each class of release 0.2 that became a code.
_FORMER = {
    "BadManifest": "manifest",
    "DamagedObject": "damaged",
    "DeviceFailed": "device",
    "DeviceUnavailable": "no_device",
    "ExternalVersion": "external",
    "RequestFailed": "request",
    **{name: "".join(f"_{one.lower()}" if one.isupper() else one for one in name)[1:] for name in _IN_SMALL_LETTERS},
}


def make_error(code: str, message: str, /, **attributes: Any) -> TpdeError:
    """The error of this code. The extension makes all its errors here."""
    error = _class_of(code)(message, **attributes)
    if error.code != code:
        error.code = code
    return error


@functools.cache
def _class_of(code: str) -> type[TpdeError]:
    root, also = _CLASSES[code], _ALSO.get(code)
    if also is None:
        return root
    # Caught as both classes.
    return type(root.__name__, (root, also), {"__module__": root.__module__, "__doc__": root.__doc__})


def former(name: str) -> type[TpdeError] | None:
    """The class that errors of a former class have now."""
    code = _FORMER.get(name)
    if code is None:
        return None
    root = _CLASSES[code]
    message = f"tpde.{name} is deprecated: catch tpde.{root.__name__}, and compare its code with {code!r}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return root


def reason_of(error: BaseException) -> str:
    """Code or type, and text of an error on one line, for the text of another one. Without a hint, which is about the arguments of
    one call."""
    return f"{error.code}: {error._message}" if isinstance(error, TpdeError) else f"{type(error).__name__}: {error}"


def and_more(names: Sized, shown: int = 1) -> str:
    """How many of these are not shown: `` and 3 more``, or nothing."""
    return f" and {len(names) - shown} more" if len(names) > shown else ""


@contextlib.contextmanager
def asked(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the operating system in the block become those of this package. ``action`` is a verb."""
    try:
        yield
    except TpdeError:
        raise
    except OSError as error:
        code = "already_exists" if isinstance(error, FileExistsError) else "io"
        code = "not_found" if isinstance(error, FileNotFoundError) else code
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        message = f"cannot {action} {os.fspath(path)}: {reason}"
        raise make_error(code, message, action=action, path=path, errno=error.errno) from error
