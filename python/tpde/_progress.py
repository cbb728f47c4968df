"""Reporting the progress of long work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, Iterator, Union

from ._errors import Misuse

#: ``None`` or ``False``: no report. ``True``: a new tqdm bar; tqdm must be installed. A tqdm bar: that bar. A callable: called with
#: the bytes done and the total.
Progress = Union[None, bool, Callable[[int, int], Any], Any]


@contextmanager
def told(progress: Progress, verb: str) -> Iterator[Callable[[int, int], Any] | None]:
    """The callback for the Rust half."""
    if progress is None or progress is False:
        yield None
    elif progress is True:
        from tqdm.auto import tqdm

        with tqdm(desc=verb, unit="B", unit_scale=True) as bar:
            yield _on(bar)
    elif hasattr(progress, "update") and hasattr(progress, "n"):
        yield _on(progress)
    elif callable(progress):
        yield progress
    else:
        raise Misuse(f"progress is a {type(progress).__name__}: expected True, a tqdm bar or a callable")


def _on(bar: Any) -> Callable[[int, int], None]:
    start = bar.n

    def tell(done: int, total: int) -> None:
        if not start:
            bar.total = total
        bar.update(start + done - bar.n)

    return tell
