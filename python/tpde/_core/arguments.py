"""Kinds of the arguments of public functions, by the name of the parameter. One table, so that each has one meaning everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import InvalidArgument


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def _is_named(*names: str) -> Callable[[Any], bool]:
    """Whether a value is an instance of a class of this package, which may need PyTorch."""
    return lambda value: any(one.__name__ in names and one.__module__.partition(".")[0] == "tpde" for one in type(value).__mro__)


def _count(least: int) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63,
        f"a number of at least {least}",
    )


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, str) and value in words, " or ".join(map(repr, words))


_FLAG = (_is_flag, "True or False")
_TEXT = (lambda value: isinstance(value, str), "a text")
_MAPPING = (lambda value: isinstance(value, Mapping), "a dict")
_FUNCTION = (callable, "a function")
_SECONDS = (
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0,  # NaN is not
    "a number of seconds of at least 0",
)
#: What each parameter takes beside its default.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ["answer", "as_integers", "derived", "digests", "files", "no_base", "payload_digests", "rebuild", "replace"], _FLAG
    ),
    **dict.fromkeys(["strict", "whole", "refused", "pinned", "check", "graph"], _FLAG),
    **dict.fromkeys(["device", "favor", "framework", "payloads"], _TEXT),
    **dict.fromkeys(["have", "metadata", "parts", "renamed"], _MAPPING),
    **dict.fromkeys(["copied", "load_weights", "only", "reload"], _FUNCTION),
    **dict.fromkeys(["timeout", "interval"], _SECONDS),
    **dict.fromkeys(["bucket", "history", "keep_every"], _count(1)),
    **dict.fromkeys(["anchor_every", "anchor_percent", "grace", "limit", "memory", "scratch"], _count(0)),
    "kind": _one_of("all", "sparse", "dense"),
    "mode": _one_of("all_checked", "chunk_by_chunk"),
    "channel": (_is_named("Folder"), "a tpde.sync.Folder or Group"),
    "weights": (_is_named("Map"), "a map, as tpde.slices.record makes it"),
    "kept": (_is_named("Kept"), "what Map.keep returns"),
    "store": (_is_named("Store"), "a tpde.store.Store, as tpde.store.Store(path) opens it"),
    "model": (lambda value: hasattr(value, "named_modules") and not isinstance(value, type), "a module"),
}


def check_kinds(**arguments: Any) -> None:
    """Raises :class:`tpde.InvalidArgument` for the first argument of the wrong kind. ``None`` is left to the function, which may take
    it as "not passed"."""
    for name, value in arguments.items():
        fits, expected = _KINDS[name]
        if value is not None and not fits(value):
            given = f"{value!r:.100}" if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
            raise InvalidArgument(f"{name} is {given}: expected {expected}")


def check_needed(**arguments: Any) -> None:
    """As :func:`check_kinds`, and ``None`` is wrong too."""
    check_kinds(**arguments)
    for name, value in arguments.items():
        if value is None:
            raise InvalidArgument(f"{name} is None: expected {_KINDS[name][1]}")


def check_name(name: Any) -> str:
    """The name of a tensor, which is Unicode text."""
    if not isinstance(name, str):
        raise InvalidArgument(f"a tensor is named {name!r}, which is of type {type(name).__name__}: a name is a string")
    return check_unicode(name, "tensor")


def check_unicode(name: str, what: str) -> str:
    """The name of a ``what``, if it is Unicode text: strings may have parts of characters."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a {what} is named {name!r}, which is not Unicode text: {error.reason}") from error
    return name
