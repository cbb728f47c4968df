"""Errors of the package by their codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import tpde


@contextlib.contextmanager
def raises(kind: str | type[BaseException], match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """As :func:`pytest.raises`, also with the code of an error of the package."""
    with pytest.raises(tpde.TpdeError if isinstance(kind, str) else kind, match=match) as caught:
        yield caught
    assert not isinstance(kind, str) or caught.value.code == kind, repr(caught.value)
