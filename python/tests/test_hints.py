"""What a new user meets: each public function in situations that are often wrong, and the hint in the text of its error."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from raised import raises  # noqa: E402
from test_misuse import Calls, public, weights  # noqa: E402

import tpde.nn  # noqa: E402
import tpde.numpy  # noqa: E402
import tpde.slices  # noqa: E402
import tpde.store  # noqa: E402
import tpde.torch  # noqa: E402

#: Functions that look for a CUDA device first.
NEED_A_DEVICE = [tpde.torch.DevicePair, tpde.torch.Encoder]
#: Functions that read a pair later.
READ_LATER = [tpde.slices.Prepared]
#: Functions that change tensors in place if no base is passed.
IN_PLACE = [tpde.torch.apply_, tpde.torch.apply_slices_, tpde.numpy.apply_slices_]
#: Functions that decode no payload of the pair of :class:`Calls`.
DECODE_NOTHING = (tpde.inspect, tpde.slices.prepare, tpde.nn.attach, tpde.store.Store.put_pair)
#: Functions that write a pair without a base if none is passed.
WRITE_PAIRS = [tpde.encode, tpde.torch.save_file, tpde.numpy.save_file]


@dataclass(frozen=True)
class Situation:
    #: The parameters that get the value.
    parameters: tuple[str, ...]
    value: Callable[[Calls], Any]
    #: What the text of the error has.
    hint: str
    #: Functions in which this is no error, or another one.
    but: tuple[Any, ...] = ()


def pickle_of(calls: Calls, *, is_zip: bool = True) -> Path:
    path = calls.folder / "pytorch_model.bin"
    torch.save(weights(), path, _use_new_zipfile_serialization=is_zip)
    return path


def file_of(calls: Calls, name: str, content: bytes) -> Path:
    (calls.folder / name).write_bytes(content)
    return calls.folder / name


def cut(calls: Calls) -> Path:
    """A pair whose index is cut short."""
    copy(calls, "pair", "cut")
    index = calls.folder / "cut.tpde-index"
    index.write_bytes(index.read_bytes()[:-1])
    return calls.folder / "cut"


def mixed(calls: Calls) -> Path:
    """The index of a pair, and the blob of another one."""
    copy(calls, "pair", "mixed")
    blob = bytearray((calls.folder / "pair.tpde-blob").read_bytes())
    shutil.copy(calls.folder / "pair.tpde-index", calls.folder / "mixed.tpde-index")
    other = calls.folder / "other-blob"
    tpde.torch.save_file(weights(1), other, base=weights(), format="1.1")
    blob[:64] = (other.with_suffix(".tpde-blob")).read_bytes()[:64]
    (calls.folder / "mixed.tpde-blob").write_bytes(blob)
    return calls.folder / "mixed"


def damaged(calls: Calls) -> Path:
    """A pair with one wrong bit in its first payload."""
    copy(calls, "pair", "damaged")
    path = calls.folder / "damaged.tpde-blob"
    blob = bytearray(path.read_bytes())
    blob[64 + 3] ^= 16
    path.write_bytes(blob)
    return calls.folder / "damaged"


def copy(calls: Calls, name: str, to: str) -> None:
    for ending in (".tpde-index", ".tpde-blob"):
        shutil.copy(calls.folder / (name + ending), calls.folder / (to + ending))


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    (tmp_path / "work").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return Calls(tmp_path / "work")


CHECKPOINTS = ("base", "target", "checkpoint")
PAIRS = ("pair", "pairs")
HUB = "meta-llama/Llama-3.1-8B"
SITUATIONS = {
    "a name on a hub as a checkpoint": Situation(CHECKPOINTS, lambda _: HUB, "hf download NAME"),
    "a URL as a checkpoint": Situation(CHECKPOINTS, lambda _: "https://host/o/m.safetensors", "download the files first"),
    "a URL of a bucket as a checkpoint": Situation(CHECKPOINTS, lambda _: "s3://bucket/m.safetensors", "Only stores have URLs"),
    "a file of torch.save": Situation(CHECKPOINTS, pickle_of, "load it with torch.load"),
    "an old file of torch.save": Situation(CHECKPOINTS, lambda calls: pickle_of(calls, is_zip=False), "load it with torch.load"),
    "a GGUF file": Situation(
        CHECKPOINTS, lambda calls: file_of(calls, "m.gguf", b"GGUF" + bytes(99)), "give the safetensors files"
    ),
    "a pair as a checkpoint": Situation(CHECKPOINTS, lambda calls: calls.folder / "pair", "are two arguments swapped"),
    "an index as a checkpoint": Situation(
        CHECKPOINTS, lambda calls: calls.folder / "pair.tpde-index", "the index of a pair, not a"
    ),
    "a pair that does not exist": Situation(PAIRS, lambda calls: calls.folder / "no", "named without its endings"),
    "a URL as a pair": Situation(PAIRS, lambda _: "https://host/pair", "download the files first"),
    "a checkpoint as a pair": Situation(PAIRS, lambda calls: calls.folder / "base.safetensors", "are two arguments swapped"),
    "a file of torch.save as a pair": Situation(PAIRS, pickle_of, "are two arguments swapped"),
    "an index that is cut short": Situation(PAIRS, cut, "cut short, or other bytes follow it: fetch it again"),
    "a blob of another pair": Situation(PAIRS, mixed, "index and blob are of two pairs"),
    "a damaged pair": Situation(PAIRS, damaged, "fetch (it|both files) again", DECODE_NOTHING),
    "no base": Situation(("base",), lambda _: None, "pass that as base=", (*IN_PLACE, *WRITE_PAIRS)),
    "another base": Situation(
        ("base",),
        lambda calls: {name: one + 5 for name, one in weights().items()},
        "the one checkpoint that it was made from",
        (tpde.apply, tpde.verify, tpde.fold, tpde.revert, *WRITE_PAIRS),
    ),
    "a file of another base": Situation(
        ("base",), lambda calls: other_checkpoint(calls), "the one checkpoint that it was made from", tuple(WRITE_PAIRS)
    ),
    "a path as tensors": Situation(("tensors",), lambda calls: "pair", "before the path; tpde.encode and tpde.apply work on files"),
    "a bar without tqdm": Situation(("progress",), lambda _: True, "pip install tqdm"),
}


def other_checkpoint(calls: Calls) -> Path:
    path = calls.folder / "other.safetensors"
    if not path.exists():
        tpde.torch.save_file({name: one + 5 for name, one in weights().items()}, calls.folder / "other")
        tpde.apply(calls.folder / "other", path)
    return path


#: Functions whose ``tensors`` are not tensors in memory: patterns, or a pair.
PATTERNS = [
    tpde.apply,
    tpde.subset,
    tpde.store.Store.get,
    tpde.store.Store.load,
    tpde.slices.record,
    tpde.slices.cut,
    tpde.sync.Source,
]


def right(calls: Calls, function: Any) -> dict[str, Any]:
    """The arguments of :class:`Calls`, of functions that need a base also with one."""
    found = calls.right(function)
    pair, base = calls.folder / "pair", calls.folder / "base.safetensors"
    if function in (tpde.apply, tpde.verify):
        found |= {"pair": pair, "base": base}
    elif function in (tpde.fold, tpde.revert):
        found |= {"pairs": [pair], "base": base}
    elif function is tpde.nn.attach:
        state = {f"0.{name}": one for name, one in found["model"][0].state_dict().items()}
        changed = {name: one + 1 for name, one in state.items()}
        tpde.torch.save_file(changed, calls.folder / "linear", base=state, replace=True)
        found |= {"pair": calls.folder / "linear"}
    elif function is tpde.store.Store.put_pair:
        tpde.torch.save_file(weights(2), calls.folder / "next", base=weights(1), payload_digests=True, replace=True)
        found |= {"pair": calls.folder / "next"}
    return found


def cases() -> list[tuple[str, str]]:
    found = []
    for situation, one in SITUATIONS.items():
        for name, function in sorted(public().items()):
            known = inspect.signature(function).parameters
            is_other = one.parameters == ("tensors",) and function in PATTERNS
            if not is_other and function not in (*one.but, *NEED_A_DEVICE, *READ_LATER):
                found += [(situation, f"{name}:{parameter}") for parameter in one.parameters if parameter in known]
    return found


@pytest.mark.parametrize(("situation", "where"), cases())
def test_the_error_has_a_hint(situation: str, where: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    name, parameter = where.split(":")
    function, one = public()[name], SITUATIONS[situation]
    arguments = right(calls, function)
    value = one.value(calls)
    arguments[parameter] = [value] if parameter == "pairs" else value
    if situation == "no base" and function is tpde.verify:
        arguments["no_base"] = True
    if situation == "a bar without tqdm":
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(tpde.TpdeError, match=one.hint) as caught:
        done = function(**arguments)
        if isinstance(done, tpde.safe_open):
            done.get_tensor("bias")
        elif inspect.isgenerator(done):
            list(done)
    assert str(caught.value).count("hint: ") <= 1


def test_errors_with_hints_can_be_pickled(tmp_path: Path) -> None:
    import pickle

    with raises("not_found") as caught:
        tpde.inspect(tmp_path / "no")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and str(again).splitlines()[1].startswith("hint: a pair is named")


@pytest.mark.parametrize("name", sorted(name for name, one in public().items() if "replace" in inspect.signature(one).parameters))
def test_an_output_that_exists(name: str, calls: Calls) -> None:
    arguments = right(calls, public()[name])
    public()[name](**arguments)
    with raises("already_exists", match="hint: replace=True replaces what exists"):
        public()[name](**arguments)


@pytest.mark.parametrize("function", WRITE_PAIRS)
def test_a_base_that_is_passed_as_the_path(function: Any, calls: Calls) -> None:
    other = other_checkpoint(calls)
    with pytest.raises(tpde.InvalidArgument, match="the base is passed as base="):
        function(**{**right(calls, function), "path": other, "base": None})
    folder = calls.folder / "sharded"
    folder.mkdir()
    shutil.copy(other, folder / "model.safetensors")
    with pytest.raises(tpde.InvalidArgument, match="the base is passed as base="):
        function(**{**right(calls, function), "path": folder, "base": None})
    assert not list(calls.folder.glob("*safetensors.tpde*")) and not list(calls.folder.glob("sharded.tpde*"))


def test_a_base_that_is_passed_as_the_device(calls: Calls) -> None:
    with raises("no_device", match="a base is passed as base="):
        tpde.torch.load_file(calls.folder / "pair", str(calls.folder / "base.safetensors"))


def test_a_pair_may_have_the_name_of_its_target(calls: Calls) -> None:
    base = calls.folder / "base.safetensors"
    assert tpde.encode(base, base).index == f"{base}.tpde-index"
    tpde.apply(base, calls.new())


def test_chains_and_merges(calls: Calls) -> None:
    pair, base = calls.folder / "pair", calls.folder / "base.safetensors"
    for function in (tpde.apply, tpde.fold, tpde.revert):
        with pytest.raises(tpde.Step, match="is the order right"):
            function([pair, pair], calls.new(), base=base)
        with pytest.raises(tpde.Step if function is not tpde.apply else tpde.Invalid, match="pass that as base="):
            function([pair], calls.new())
    with raises("not_mergeable", match="subset makes a pair without the tensor"):
        tpde.merge([pair, pair], calls.new())
    tpde.encode(base, calls.folder / "with-file", base=base)
    with raises("not_mergeable", match="files=False merges"):
        tpde.merge([calls.folder / "with-file", calls.folder / "half"], calls.new())


def test_weights_that_are_not_the_base(calls: Calls) -> None:
    wrong, pair = weights(7), calls.folder / "pair"
    arrays = tpde.numpy.load_file(
        calls.folder / "other-half", base={"bias": np.full(8, 1, np.float32) * 0 + np.arange(8, dtype="f4")}
    )
    for call in (
        lambda: tpde.torch.apply_(wrong, pair),
        lambda: tpde.numpy.apply_({"bias": arrays["bias"] + 3}, calls.folder / "other-half"),
        lambda: tpde.torch.apply_slices_([tpde.Slice(name, ..., one) for name, one in wrong.items()], pair),
    ):
        with pytest.raises(tpde.WrongBase, match="hint: a pair fits the one checkpoint that it was made from"):
            call()


def test_stores(calls: Calls, made: Any) -> None:
    for location in (calls.folder, calls.folder / "nothing", calls.folder / "base.safetensors"):
        with raises("not_a_store", match=r"hint: tpde\.store\.init makes a store"):
            tpde.store.Store(location)
    for open_ in (tpde.store.Store, tpde.store.init):
        with pytest.raises(
            tpde.InvalidArgument, match="https:// is no location of a store: expected a folder, s3://, gs:// or az://"
        ):
            open_("https://host/store")
    store, bad = calls.store, HUB
    with raises("no_version", match="hint: list the branches, or the log of one"):
        store.get("rebuilt.safetensors", "main@0")  # swapped
    with raises("already_exists", match="get replaces nothing: choose another output") as caught:
        store.get("main", calls.folder / "base.safetensors")
    assert "replace=True" not in str(caught.value)
    for call in (
        lambda: store.put(weights(2), have={"main@1": bad}),
        lambda: store.get("main", calls.new(), have={"main@0": bad}),
        lambda: store.load("main", have={"main@0": bad}),
        lambda: store.fold("main@0", "main@1", have={"main@0": bad}),
    ):
        with raises("not_found", match="hf download NAME"):
            call()
    store.put(made.base, branch="outside", external="hub/name")
    for call in (
        lambda: store.put(made.target, parent="outside", branch="new"),
        lambda: store.get("outside", calls.new()),
        lambda: store.load("outside"),
    ):
        with raises(
            "external",
            match=re.escape("hint: have={version: path} passes it as a base; if it is this version that is wanted"),
        ):
            call()


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix"])
def test_a_url_of_a_store_without_its_feature(url: str) -> None:
    for open_ in (tpde.store.Store, tpde.store.init):
        try:
            open_(url)
        except tpde.InvalidArgument as error:
            assert 'pip install ./python --config-settings build-args="--features' in str(error)
        except tpde.TpdeError as error:
            pytest.skip(f"the package has the feature: {error}")


def test_a_hint_is_the_last_line_of_errors_with_causes(calls: Calls) -> None:
    with pytest.raises(tpde.Step) as caught:
        tpde.apply([calls.folder / "pair", calls.folder / "pair"], calls.new(), base=calls.folder / "base.safetensors")
    assert str(caught.value).count("hint: ") == 1 and str(caught.value).splitlines()[-1].startswith("hint: ")
    live = weights(7)
    with pytest.raises(tpde.Poisoned) as poisoned:
        tpde.torch.apply_(live, calls.folder / "pair", base=weights(5))
    assert str(poisoned.value).count("hint: ") == 1 and str(poisoned.value).splitlines()[-1].startswith("hint: ")
