"""Records of versions, and pairs as messages between the ranks of a trainer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._core.errors import and_more, make_error
from ..slices._cuts import Rectangles

#: Dtype and shape of each tensor of a version.
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def files_of(path: Path) -> list[Path]:
    """Index and blob of the pair of this name."""
    return [path.with_name(path.name + ending) for ending in (".tpde-index", ".tpde-blob")]


def message_of(path: Path) -> bytes:
    """A pair, for another rank."""
    index, blob = (one.read_bytes() for one in files_of(path))
    return b"".join([len(index).to_bytes(8, "little"), index, blob])


def written(folder: Path, received: list[bytes]) -> list[Path]:
    """Writes the pairs that ranks have sent."""
    paths = []
    for rank, text in enumerate(received):
        if text:
            end = 8 + int.from_bytes(text[:8], "little")
            paths.append(folder / f"rank{rank}")
            paths[-1].with_suffix(".tpde-index").write_bytes(text[8:end])
            paths[-1].with_suffix(".tpde-blob").write_bytes(text[end:])
    return paths


def plain_of(rectangles: Mapping[str, Any]) -> dict[str, Any]:
    """Rectangles, for JSON."""
    return {name: [[[one.start, one.stop] for one in index] for index in indices] for name, indices in rectangles.items()}


def indices_of(plain: dict[str, Any]) -> dict[str, Any]:
    """Rectangles, from JSON."""
    return {name: [tuple(slice(*bounds) for bounds in index) for index in indices] for name, indices in plain.items()}


def stored_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The pairs of a version that its record names: as a difference, as a whole, or both."""
    return [one for one in (record["difference"], record["whole"]) if one is not None]


def digests_of(stored: dict[str, Any]) -> list[str]:
    """Digests of the pairs of a version."""
    return [one["digest"] for one in stored["pairs"]]


def names_of(record: dict[str, Any]) -> list[str]:
    """Names of all pairs of a version."""
    return [one["pair"] for stored in stored_of(record) for one in stored["pairs"]]


def check_record(record: Any) -> None:
    """Raises for what is no record of a version: ``KeyError``, ``TypeError``, ``AttributeError`` or ``ValueError``."""
    _expect(record["bytes"], int), _expect(record["favor"], str)
    _expect(record["changed"], float, int, None), _expect(record.get("id"), str, None)
    for stored in stored_of(record):
        _expect(stored["pairs"], list), _expect(stored["layouts"], list)
        for one in stored["pairs"]:
            _expect(one["pair"], str), _expect(one["digest"], str)
    for dtype, shape in (record.get("tensors") or {}).values():
        _expect(dtype, str)
        _check_numbers(shape)


def check_subscriber(record: Any) -> None:
    """Raises for what is no record of a subscriber."""
    _expect(record["version"], int), _expect(record.get("id"), str, None)
    if not re.fullmatch("[0-9a-f]{32}", record["layout"]):
        raise ValueError("its layout is no digest")


def check_answer(record: Any) -> None:
    """Raises for what is no answer."""
    _expect(record["version"], int), _expect(record.get("id"), str, None), _expect(record["error"], str, None)
    _expect(record["digests"], list)


def check_layout(plain: Any) -> None:
    """Raises for what are no rectangles."""
    for indices in plain.values():
        for index in indices:
            for bounds in index:
                _check_numbers(bounds)
                if len(bounds) != 2:
                    raise ValueError(f"it has the bounds {bounds}")


def _check_numbers(values: Any) -> None:
    _expect(values, list)
    for one in values:
        if _expect(one, int) < 0:
            raise ValueError(f"it has the number {one}")


def _expect(value: Any, *kinds: type | None) -> Any:
    if type(value) not in [type(None) if kind is None else kind for kind in kinds]:
        raise TypeError(f"it has {value!r:.100}: expected {' or '.join('null' if one is None else one.__name__ for one in kinds)}")
    return value


def check_within(rectangles: Rectangles, tensors: Any) -> None:
    """Raises if versions with these tensors lack elements of the rectangles that a subscriber holds. ``None`` are unknown tensors."""
    if tensors is None:
        return
    missing = [name for name in rectangles if name not in tensors]
    changed = [name for name, indices in rectangles.items() if name in tensors and not _is_inside(indices, tensors[name][1])]
    if missing or changed:
        problem = "lack a tensor" if missing else "have another shape of a tensor"
        raise make_error(
            "other_tensors",
            f"the versions of the channel {problem} that the subscriber holds: {_listed(missing or changed)}",
            missing=missing,
            extra=[],
            changed=changed,
        )


def _is_inside(indices: Iterable[tuple[slice, ...]], shape: Iterable[int]) -> bool:
    dims = [*shape]
    return all(len(index) == len(dims) and all(one.stop <= dim for one, dim in zip(index, dims)) for index in indices)


def check_tensors(found: Tensors, expected: Any) -> None:
    """Raises if a version does not have the tensors that the versions before it have."""
    before = {name: (dtype, tuple(shape)) for name, (dtype, shape) in expected.items()}
    missing = [name for name in before if name not in found]
    extra = [name for name in found if name not in before]
    changed = [name for name in before if name in found and before[name] != found[name]]
    problems = [f"it lacks {_listed(missing)}"] if missing else []
    problems += [f"it also has {_listed(extra)}"] if extra else []
    if changed:
        first, more = changed[0], f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        problems.append(f"it has {first!r} as {_described(found[first])} instead of {_described(before[first])}{more}")
    if problems:
        raise make_error(
            "other_tensors",
            f"the source has other tensors than the versions before, so no subscriber could follow: {'; '.join(problems)}",
            missing=missing,
            extra=extra,
            changed=changed,
        )


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + and_more(names, 3)


def _described(tensor: tuple[str, tuple[int, ...]]) -> str:
    return f"{tensor[0]} {[*tensor[1]]}"


def steps(channel: Any, start: int, stop: int, layout: str) -> list[tuple[int, bool]] | None:
    """The versions whose pairs lead from one version to another, and whether each is whole; ``None`` if no pairs lead there."""
    known = {version: channel.version(version) for version in channel.versions() if start < version <= stop}

    def has(version: int, kind: str) -> bool:
        stored = known.get(version, {}).get(kind)
        return stored is not None and layout in stored["layouts"]

    path: list[tuple[int, bool]] = []
    for version in range(stop, start, -1):
        if has(version, "difference"):
            path.append((version, False))
        elif has(version, "whole"):
            return [(version, True), *reversed(path)]
        else:
            # Only a whole version after this one helps.
            later = [at for at, _ in reversed(path) if has(at, "whole")]
            return [(later[-1], True), *((at, False) for at in range(later[-1] + 1, stop + 1))] if later else None
    return list(reversed(path))
