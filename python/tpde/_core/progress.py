"""Progress of long calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, Iterator, Union

from .errors import InvalidArgument

#: ``None`` or ``False``: no progress. ``True``: a new tqdm bar; tqdm must be installed. A tqdm bar: that bar is updated. A
#: callable: it is called with bytes done and bytes in total.
Progress = Union[None, bool, Callable[[int, int], Any], Any]


def check_progress(progress: Progress) -> None:
    """Raises for other values, and without tqdm for ``True``."""
    if progress is True:
        _tqdm()
    if not isinstance(progress, (bool, type(None))) and not callable(progress) and not _is_bar(progress):
        raise InvalidArgument(f"progress is a {type(progress).__name__}: expected True, a tqdm bar or a callable")


@contextmanager
def progress_callback(progress: Progress, verb: str) -> Iterator[Callable[[int, int], Any] | None]:
    """The progress callback for the Rust half. Its arguments are bytes done and total bytes."""
    check_progress(progress)
    if progress is None or progress is False:
        yield None
    elif progress is True:
        with _tqdm()(desc=verb, unit="B", unit_scale=True) as bar:
            yield _updating(bar)
    elif _is_bar(progress):
        yield _updating(progress)
    else:
        yield progress


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise InvalidArgument(f"progress=True needs tqdm ({error}): pip install tqdm, or pass a callable") from error
    return tqdm


def _is_bar(progress: Any) -> bool:
    return hasattr(progress, "update") and hasattr(progress, "n")


def _updating(bar: Any) -> Callable[[int, int], None]:
    start = bar.n

    def update(done: int, total: int) -> None:
        if not start:
            bar.total = total
        bar.update(start + done - bar.n)

    return update
