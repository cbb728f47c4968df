"""Records of versions, and pairs as messages between the ranks of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._folder import Folder


def message_of(path: Path) -> bytes:
    """A pair, for another rank."""
    index, blob = (path.with_name(path.name + ending).read_bytes() for ending in (".tpde-index", ".tpde-blob"))
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


def digests_of(stored: dict[str, Any]) -> list[str]:
    """Digests of the pairs of a version."""
    return [one["digest"] for one in stored["pairs"]]


def steps(channel: Folder, start: int, stop: int, layout: str) -> list[tuple[int, bool]] | None:
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
