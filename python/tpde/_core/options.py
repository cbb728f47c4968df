"""Options of encoding, which many functions take as keywords. :func:`tpde.encode` documents them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from .arguments import check_kinds, check_name
from .errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = dict  # Python 3.10 has none, and annotations are not evaluated


class CodecOptions(TypedDict, total=False):
    """Options of a pair that a store makes on its own."""

    codec: str | None
    favor: str | None


class ShardOptions(CodecOptions, total=False):
    """Options of a pair of the shards that a rank holds."""

    chunk_lanes: int | None
    derived: bool


class PutOptions(ShardOptions, total=False):
    """Options of a version of a store."""

    layout: str | None
    renamed: Mapping[str, str] | None
    split: str | None


class FoldOptions(ShardOptions, total=False):
    """Options of a pair of a chain, in which other pairs say which tensors are renamed."""

    layout: str | None
    format: str | None
    payload_digests: bool
    split: str | None


class EncodeOptions(FoldOptions, total=False):
    """All options."""

    renamed: Mapping[str, str] | None


#: What options are if they are not passed.
_DEFAULTS = {**dict.fromkeys(EncodeOptions.__annotations__), "payload_digests": False, "derived": True}


def check_names(kind: Any, passed: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` if there is an option that this kind, a class like :class:`EncodeOptions`, does not have."""
    for name in passed:
        if name not in kind.__annotations__:
            known = ", ".join(sorted(kind.__annotations__))
            raise TypeError(f"got an unexpected keyword argument {name!r}: expected one of {known}")


def checked(kind: Any, passed: Mapping[str, Any], **fixed: Any) -> dict[str, Any]:
    """Options for the Rust half.

    Args:
        kind: The options that the function takes, a class like :class:`EncodeOptions`.
        passed: Those that were passed.
        fixed: Those that the function sets itself.

    Raises:
        TypeError: The function does not take an option of this name.
        InvalidArgument: An option is of the wrong type.
    """
    check_names(kind, passed)
    how = {**_DEFAULTS, **passed, **fixed}
    check_kinds(**{name: how[name] for name in ("payload_digests", "derived", "renamed")})
    for name in ("codec", "layout", "favor", "format", "split"):
        if how[name] is not None and not isinstance(how[name], str):
            raise InvalidArgument(f"no {'format version' if name == 'format' else name} is named {how[name]!r}")
    lanes, renamed = how["chunk_lanes"], how["renamed"]
    if lanes is not None and (not isinstance(lanes, int) or not 0 <= lanes < 1 << 64):
        raise InvalidArgument(f"chunks of {lanes!r} lanes: expected a power of two of at least 4096")
    how |= {"payload_digests": bool(how["payload_digests"]), "derived": bool(how["derived"])}
    return {**how, "renamed": {check_name(name): check_name(base) for name, base in (renamed or {}).items()}}
