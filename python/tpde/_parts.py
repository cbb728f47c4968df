"""Parts of tensors, by pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._index import rectangle
from ._paths import matching_names


def rectangles(parts: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Origin and extent of the rectangles that each tensor has: an index as NumPy has it, or a list of several."""
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    for pattern, indices in parts.items():
        for name in sorted(matching_names(shapes, [pattern])):
            ones = [rectangle(name, index, shapes[name]) for index in (indices if isinstance(indices, list) else [indices])]
            found.setdefault(name, []).extend((one.origin, one.extent) for one in ones)
    return found
