"""Descriptions of a pair's tensors."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A tensor of a pair, with all parts that the pair has of it."""

    name: str
    dtype: str
    shape: list[int]
    #: ``"none"``, ``"same"``, ``"prefix"``, ``"cast"`` or ``"dequantised"``; ``"mixed"`` if some parts have a base.
    base_kind: str
    base_name: str
    changes: bool
    #: Name, dtype and shape of the base tensor, and of the tensor of scales of a quantised base.
    bases: list[tuple[str, str, list[int]]]

    @property
    def is_same(self) -> bool:
        """Whether the tensor has a base of the same dtype and shape."""
        return self.base_kind == "same"
