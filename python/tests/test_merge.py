"""Merging pairs, and making a pair of some tensors of one."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import tpde
from conftest import Made
from raised import raises


def stored(pair: Path) -> tuple[bytes, bytes]:
    index, blob = (pair.with_name(f"{pair.name}.tpde-{end}").read_bytes() for end in ("index", "blob"))
    return index, blob


def halves(made: Made, folder: Path) -> tuple[Path, Path]:
    names = sorted(made.target_bytes)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    reports = [tpde.subset(made.pair, folder / "first", tensors=first), tpde.subset(made.pair, folder / "second", tensors=second)]
    assert [report.tensors for report in reports] == [len(first), len(second)]
    assert [tensor.name for tensor in tpde.inspect(folder / "second").tensors] == second
    return folder / "first", folder / "second"


def test_subsets_merge_back_to_the_pair(made: Made, tmp_path: Path) -> None:
    bare = tpde.merge([made.pair], tmp_path / "bare", files=False)
    assert (bare.tensors, bare.files) == (len(made.target_bytes), 0)
    assert bare.stored_bytes == sum(map(len, stored(tmp_path / "bare")))
    done: list[tuple[int, int]] = []
    report = tpde.merge(
        iter(halves(made, tmp_path)), str(tmp_path / "merged"), progress=lambda *bytes: done.append((bytes[0], bytes[1]))
    )
    assert done[-1] == (report.payload_bytes, report.payload_bytes)
    assert stored(tmp_path / "merged") == stored(tmp_path / "bare")
    found = tpde.verify(tmp_path / "merged", base=made.base)
    assert found.target_checked and found.payload_authenticity == "checked"
    digests = tpde.merge([made.pair], tmp_path / "bare", files=False, payload_digests=True, replace=True)
    assert digests.index_bytes == bare.index_bytes + 16 * bare.chunks


def test_contradictions_and_bad_arguments_are_refused(made: Made, tmp_path: Path) -> None:
    first, second = halves(made, tmp_path)
    with raises("not_mergeable", match="is in two pairs") as refused:
        tpde.merge([first, second, first], tmp_path / "x")
    name = sorted(made.target_bytes)[0]
    assert (refused.value.conflict, refused.value.name, refused.value.pairs) == ("tensor", name, (str(first), str(first)))
    again = pickle.loads(pickle.dumps(refused.value))
    assert (type(again), str(again), again.found) == (tpde.InvalidArgument, str(refused.value), refused.value.found)
    with raises("not_mergeable") as of_files:
        tpde.merge([first, made.pair], tmp_path / "x")
    assert of_files.value.conflict == "file"
    with pytest.raises(tpde.InvalidArgument, match="expected several"):
        tpde.merge(str(first), tmp_path / "x")
    with pytest.raises(tpde.InvalidArgument, match="is the same as input"):
        tpde.merge([first, second], first, replace=True)
    with raises("already_exists"):
        tpde.subset(first, second, tensors="*")
    with pytest.raises(tpde.InvalidArgument, match="matches 'nothing'"):
        tpde.subset(first, tmp_path / "x", tensors=["*", "nothing"])
    with raises("unexpected_pair"):
        tpde.subset(first, tmp_path / "x", tensors="*", expect=bytes(32))
    assert not list(tmp_path.glob("x*"))
    tpde.subset(first, tmp_path / "x", tensors=lambda found: found == name, expect=tpde.inspect(first).pair_digest + "\n")
    assert [tensor.name for tensor in tpde.inspect(tmp_path / "x").tensors] == [name]
