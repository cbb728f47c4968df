"""Classes and codes of errors, and the names of former classes."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import tpde
from tpde._core import errors as _errors

CODES = list(_errors._CLASSES)


def test_there_are_at_most_fifteen_classes() -> None:
    classes = [
        name for name in tpde.__all__ if isinstance(getattr(tpde, name), type) and issubclass(getattr(tpde, name), Exception)
    ]
    assert len(classes) <= 15 and {kind.__name__ for kind in _errors._CLASSES.values()} == set(classes)


@pytest.mark.parametrize("code", CODES)
def test_an_error_has_the_class_of_its_code_also_after_pickling(code: str) -> None:
    error = _errors.make_error(code, "a message", _hint="help", version="main@1")
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert isinstance(one, _errors._CLASSES[code]) and isinstance(one, _errors._ALSO.get(code, Exception))
        assert (one.code, str(one), one.version) == (code, "a message\nhint: help", "main@1")
    assert type(again) is type(error) and type(error).__name__ == _errors._CLASSES[code].__name__


@pytest.mark.parametrize(("name", "code"), _errors._FORMER.items())
def test_a_former_name_gives_the_class_and_warns(name: str, code: str) -> None:
    kind = _errors._CLASSES[code]
    with pytest.warns(DeprecationWarning, match=f"tpde.{name} is deprecated: catch tpde.{kind.__name__}.* '{code}'") as warned:
        assert getattr(tpde, name) is kind
    assert warned[0].filename == __file__ and name not in tpde.__all__


def test_no_name_is_made_up() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tpde.Nothing


def test_the_document_lists_all_codes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    section = text[text.index("## Errors") : text.index("## Live parameters")]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    found = {code: re.findall(r"`(\w+)`", row[1])[0] for row in rows for code in re.findall(r"`(\w+)`", row[2]) if code != "rule"}
    assert found == {code: kind.__name__ for code, kind in _errors._CLASSES.items()}
