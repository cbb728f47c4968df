"""Tied tensors: a state dict has several names of one memory, and the files of the model one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tpde
import tpde.store

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402 (needs torch)

import tpde.slices  # noqa: E402
import tpde.sync  # noqa: E402
import tpde.torch  # noqa: E402


class Head(torch.nn.Module):
    """A model whose own files are those of safetensors, which keep the first name in alphabetical order."""

    kept, left_out = "a_head.weight", "embed.weight"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Embedding(2000, 32)
        self.layer = torch.nn.Linear(32, 32)
        self.a_head = torch.nn.Linear(32, 2000, bias=False)
        self.a_head.weight = self.embed.weight

    def save(self, path: Path) -> None:
        safetensors.torch.save_model(self, str(path))


class Transformer(Head):
    """One whose own files are those of Transformers, which leave listed names out."""

    kept, left_out = "embed.weight", "a_head.weight"
    _tied_weights_keys = {"a_head.weight": "embed.weight"}

    def save(self, path: Path) -> None:
        safetensors.torch.save_file(without(self.state_dict(), self.left_out), path)


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: one for name, one in state.items() if name not in names}


def step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(torch.int32).view(-1)
            flat[::50] ^= 1


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture(params=[Head, Transformer])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Head:
    """A model whose files are ``base``, after a step. Its files are then ``next``."""
    made: Head = request.param()
    made.save(tmp_path / "base.safetensors")
    made.before = {name: one.clone() for name, one in made.state_dict().items()}
    step(made)
    made.save(tmp_path / "next.safetensors")
    return made


def check(model: Head, report: tpde.EncodeReport, folder: Path) -> None:
    """The pair fits the files of the model, and is as small as that of the files."""
    files = tpde.encode(folder / "next.safetensors", folder / "files", base=folder / "base.safetensors", replace=True)
    assert report.stored_bytes <= files.stored_bytes + 100 and report.tied == {model.kept: [model.left_out]}
    assert report.removed == []
    tpde.apply(folder / "pair", folder / "out.safetensors", base=folder / "base.safetensors", replace=True)
    expected = safetensors.torch.load_file(folder / "next.safetensors")
    assert same(safetensors.torch.load_file(folder / "out.safetensors"), expected)
    # A tied model gets both names.
    again = type(model)()
    again.load_state_dict(model.before)
    assert tpde.torch.apply_(again, folder / "pair") == "applied" and same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("target", ["module", "state dict"])
@pytest.mark.parametrize("base", ["files", "read files"])
def test_the_base_has_one_name(target: str, base: str, model: Head, tmp_path: Path) -> None:
    state: Any = model if target == "module" else model.state_dict()
    path = tmp_path / "base.safetensors"
    check(
        model,
        tpde.torch.save_file(state, tmp_path / "pair", base=path if base == "files" else safetensors.torch.load_file(path)),
        tmp_path,
    )


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_the_base_is_tied_in_memory(is_tied: bool, is_wrapped: bool, model: Head, tmp_path: Path) -> None:  # noqa: FBT001
    """Both names are stored, as differences from the one that files have."""
    base: torch.nn.Module = type(model)()
    base.load_state_dict(model.before)
    target: Any = model
    if is_wrapped:  # names of Transformers are relative to the module that lists them
        base, target = torch.nn.Sequential(base), torch.nn.Sequential(model)
    if not is_tied:
        target = {name: one.clone() for name, one in target.state_dict().items()}
    report = tpde.torch.save_file(target, tmp_path / "pair", base=base)
    files = tpde.encode(tmp_path / "next.safetensors", tmp_path / "files", base=tmp_path / "base.safetensors")
    assert report.tied == {} and report.removed == [] and report.stored_bytes <= 2 * files.stored_bytes + 100
    prefix = "0." if is_wrapped else ""
    of_files = {prefix + name: one for name, one in safetensors.torch.load_file(tmp_path / "base.safetensors").items()}
    expected = {prefix + name: one for name, one in model.state_dict().items()}
    for known in (of_files, base, base.state_dict()):
        assert same(tpde.torch.load_file(tmp_path / "pair", base=known), expected)
    assert tpde.torch.apply_(base, tmp_path / "pair") == "applied" and same(base.state_dict(), expected)


def test_a_base_with_both_names_keeps_both(model: Head, tmp_path: Path) -> None:
    report = tpde.torch.save_file(model, tmp_path / "pair", base=model.before)
    assert report.tied == {} and {one.name for one in report.tensors} == model.state_dict().keys()
    assert same(tpde.torch.load_file(tmp_path / "pair", base=model.before), model.state_dict())


def test_without_a_base_or_its_names_no_name_is_lost(model: Head, tmp_path: Path) -> None:
    for base in (None, without(model.before, model.kept, model.left_out)):
        report = tpde.torch.save_file(model, tmp_path / "pair", base=base, replace=True)
        assert report.tied == {}
        assert same(tpde.torch.load_file(tmp_path / "pair", base=base), model.state_dict())


def test_a_renamed_base_counts(model: Head, tmp_path: Path) -> None:
    base = {"old": model.before[model.kept], **without(model.before, model.kept, model.left_out)}
    report = tpde.torch.save_file(model, tmp_path / "pair", base=base, renamed={model.kept: "old"})
    assert report.tied == {model.kept: [model.left_out]}


@pytest.mark.parametrize("how", ["offset", "shape", "transposed", "dtype", "equal values"])
def test_memory_that_is_only_shared_in_part_is_not_tied(how: str, tmp_path: Path) -> None:
    whole = torch.randn(9, 8)
    one = whole[:8]
    other = {
        "offset": whole[1:],
        "shape": one.view(64),
        "transposed": one.view(8, 8).view(4, 16),
        "dtype": one.view(torch.int32),
        "equal values": one.clone(),
    }[how]
    target = {"one": one, "other": other}
    report = tpde.torch.save_file(target, tmp_path / "pair", base={"one": one.clone()})
    assert report.tied == {} and same(tpde.torch.load_file(tmp_path / "pair", base={"one": one.clone()}), target)


def test_arrays_are_tied_too(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    import tpde.numpy

    array = np.arange(12.0)
    report = tpde.numpy.save_file({"a": array, "b": array, "c": array[:6]}, tmp_path / "pair", base={"b": array + 1})
    assert report.tied == {"b": ["a"]} and {one.name for one in report.tensors} == {"b", "c"}


@pytest.mark.parametrize("what", ["module", "state dict"])
def test_a_store(what: str, model: Head, tmp_path: Path) -> None:
    store = tpde.store.init(tmp_path / "store")
    store.put(tmp_path / "base.safetensors")
    files = tpde.encode(tmp_path / "next.safetensors", tmp_path / "files", base=tmp_path / "base.safetensors")
    version = store.put(model if what == "module" else model.state_dict())
    assert version.content == "difference" and version.stored_bytes <= files.stored_bytes + 4096
    store.get("main", tmp_path / "out.safetensors")
    expected = safetensors.torch.load_file(tmp_path / "next.safetensors")
    assert same(safetensors.torch.load_file(tmp_path / "out.safetensors"), expected)
    assert store.put(tmp_path / "next.safetensors").state == version.state
    # The parent of a new branch counts, and a branch that begins whole has all names.
    assert store.put(model, branch="tuned", parent="main@0").tensors == len(expected)
    assert store.put(model, branch="whole").tensors == len(expected) + 1


@pytest.mark.parametrize("has_one", [True, False])
def test_a_publisher(has_one: bool, model: Head, tmp_path: Path) -> None:  # noqa: FBT001
    """A subscriber follows, whether its loader was recorded with one name or with both."""
    publisher = tpde.sync.Publisher(model, tpde.sync.Folder(tmp_path / "run"))
    live = type(model)()
    live.load_state_dict(model.state_dict())
    parameters = dict(live.named_parameters())

    def load(weights: Any) -> None:
        for name, weight in weights:
            if name in parameters:
                parameters[name].data.copy_(weight)

    recorded = model.state_dict() if not has_one else without(model.state_dict(), "a_head.weight")
    found = tpde.slices.record(load, recorded, live)
    subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path / "run"), "one", version=0)
    for version in (1, 2):
        step(model)
        publisher.publish()
        assert [one.version for one in subscriber.update()] == [version] and publisher.wait() == []
        assert same(live.state_dict(), model.state_dict())
