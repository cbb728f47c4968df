"""Maps of made-up loaders, and pairs applied by them, compared with loading the target."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

import loaders  # noqa: E402 (needs torch)
from raised import raises  # noqa: E402
from loaders import MODELS, Model, Weights  # noqa: E402

import tpde.slices  # noqa: E402
import tpde.torch  # noqa: E402


def same(found: Weights, expected: Weights) -> bool:
    """Whether all bits are the same."""
    assert found.keys() == expected.keys()
    return all(
        torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in found if found[name].numel()
    )


def recorded(model: Model, weights: Weights) -> tpde.slices.Map:
    """The map of a model that holds these weights. Recording writes nothing."""
    before = model.loaded(weights)
    found = tpde.slices.record(model.load_weights, weights, model.parameters)
    assert same(model.parameters, before)
    return found


def write_pair(path: Path, target: Weights, base: Weights, rectangles: Iterable[Any]) -> Path:
    """A pair that is cut where receivers hold slices."""
    tpde.torch.save_file(tpde.slices.cut(target, rectangles), path, base=base)
    return path


class Ranks:
    """All ranks of a model with the base loaded, and a pair for them."""

    def __init__(self, kind: type[Model], ranks: int, folder: Path) -> None:
        self.kind, self.ranks, self.folder = kind, ranks, folder
        self.base = loaders.random_weights(kind.shapes, seed=1)
        self.target = loaders.changed(self.base, seed=2)
        self.models = [kind(rank, ranks) for rank in range(ranks)]
        self.maps = [recorded(model, self.base) for model in self.models]
        self.kept = [one.keep(self.base) if one.refused else None for one in self.maps]
        rectangles = [one.rectangles(kept) for one, kept in zip(self.maps, self.kept)]
        self.pair = write_pair(folder / "pair", self.target, self.base, rectangles)

    def expected(self, rank: int, weights: Weights) -> Weights:
        return self.kind(rank, self.ranks).loaded(weights)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_patched_parameters_equal_loaded_ones(kind: type[Model], ranks: int, tmp_path: Path) -> None:
    every = Ranks(kind, ranks, tmp_path)
    for rank, (model, found, kept) in enumerate(zip(every.models, every.maps, every.kept)):
        found.check(refused=kept is not None)
        addresses = {name: parameter.data_ptr() for name, parameter in model.parameters.items()}
        report = tpde.slices.apply_(found, every.pair, kept=kept, reload=model.load_weights if kept else None)
        assert report.outcome == "applied" and report.patched > 0
        assert same(model.parameters, every.expected(rank, every.target))
        assert addresses == {name: parameter.data_ptr() for name, parameter in model.parameters.items()}
        assert tpde.slices.apply_(found, every.pair, kept=kept, reload=model.load_weights).outcome == "already_applied"


def test_a_map_says_where_slices_are() -> None:
    model = loaders.Llama(1, 4)
    found = recorded(model, loaders.random_weights(model.shapes, 1))
    places = {one.tensor: (one.index, one.parameter, one.offset, one.strides) for one in found.pieces}
    every = slice(0, 32)
    assert places["layers.0.q.weight"] == ((slice(8, 16), every), "layers.0.qkv.weight", 0, (32, 1))
    assert places["layers.0.k.weight"] == ((slice(0, 4), every), "layers.0.qkv.weight", 8 * 32, (32, 1))
    assert places["layers.0.v.weight"] == ((slice(0, 4), every), "layers.0.qkv.weight", 12 * 32, (32, 1))
    assert places["layers.0.o.weight"] == ((every, slice(8, 16)), "layers.0.o.weight", 0, (8, 1))
    assert places["layers.0.up.weight"] == ((slice(12, 24), every), "layers.0.gate_up.weight", 12 * 32, (32, 1))
    assert (found.refusals, found.missing, found.unused) == ([], [], ["lm_head.weight"])
    assert found.tied == {"embed.weight": ["lm_head.weight"]}
    last = recorded(loaders.Llama(3, 4), loaders.random_weights(model.shapes, 1))
    assert [str(one) for one in last.constants] == ["embed.weight[58:64, 0:32]"]


def one_parameter(load: Callable[[Any, Any], Any], shape: Any, parameter: Any) -> tpde.slices.Map:
    """The map of a loader of one tensor, ``w``, and one parameter, ``layer.p``."""
    tensor = torch.empty(shape, device="meta") if isinstance(shape, tuple) else shape

    def load_weights(weights: Any) -> None:
        for _, weight in weights:
            load(weight, parameter)

    before = parameter.clone()
    found = tpde.slices.record(load_weights, {"w": tensor}, {"layer.p": parameter})
    assert parameter.is_meta or torch.equal(parameter, before)
    return found


#: Operations that a map cannot express, and what is said about them.
REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "arithmetic": (lambda w, p: p.copy_(w * 2), "aten.mul of w for parameter layer.p"),
    "addition in place": (lambda w, p: p.add_(w), "aten.add_ of w"),
    "arithmetic on the tensor": (lambda w, p: p.copy_(w.neg_()), "aten.neg_ of w"),
    "cast": (lambda w, p: p.copy_(w.to(torch.float64)), "aten._to_copy of w"),
    "cast by a copy": (lambda w, p: p.copy_(w.view(torch.int32)), "casts torch.int32 to torch.float32"),
    "expansion": (lambda w, p: p.copy_(w[:1].expand(4, 8)), "aten.expand of w"),
    "expansion by a copy": (lambda w, p: p.copy_(w[0]), r"expands shape \(8,\) to \(4, 8\)"),
    "repetition": (lambda w, p: p.copy_(w[:2].repeat_interleave(2, 0)), "aten.expand of w"),
    "concatenation": (lambda w, p: p.copy_(torch.cat([w[:2], w[2:]])), "aten.cat of w"),
    "advanced index": (lambda w, p: p.copy_(w[torch.tensor([0, 1, 2, 3])]), "aten.index of w"),
    "advanced index write": (lambda w, p: p.__setitem__(torch.tensor([0, 1, 2, 3]), w), "aten.index_put_ of w"),
    "flip": (lambda w, p: p.copy_(w.flip(0)), "aten.flip of w"),
    "transposition": (lambda w, p: p.copy_(w.reshape(8, 4).t()), "elements of a row of the tensor are 8 elements apart"),
    "scratch memory": (lambda w, p: p.copy_(torch.empty(4, 8).copy_(w)), "the memory is not that of a parameter"),
    "part of scratch memory": (lambda w, p: scratch(w, p), "the memory is not that of a parameter"),
    "columns of two places": (lambda w, p: (p[:, :4].copy_(w[:, :4]), p[:, 4:].copy_(w[:, 4:])), "its rows are between those"),
    "range of flattened rows": (lambda w, p: p.view(-1)[:20].copy_(w.view(-1)[6:26]), "begins or ends within a row"),
    "rows of another width": (lambda w, p: p[:2, :6].copy_(w.view(-1)[:12].view(2, 6)), "begins or ends within a row"),
    "pickled": (lambda w, p: p.copy_(w.triu()), "aten.triu of w"),
    "sort": (lambda w, p: p.copy_(w.sort().values), "aten.sort of w"),
}


def scratch(w: Any, p: Any) -> None:
    memory = torch.zeros(4, 8)
    memory[1:3] = w[1:3]
    p.copy_(memory)


@pytest.mark.parametrize("name", REFUSED)
def test_other_operations_are_refused_by_name(name: str) -> None:
    load, message = REFUSED[name]
    found = one_parameter(load, (4, 8), torch.zeros(4, 8))
    assert found.refused == ["layer.p"] and found.pieces == []
    (refusal,) = found.refusals
    assert re.search(message, str(refusal)), refusal
    assert refusal.tensors == ("w",) and refusal.parameter == "layer.p" and found.tensors_of == {"layer.p": ["w"]}
    assert re.search(r"test_recorder\.py:\d+ in ", refusal.where), refusal
    with pytest.raises(tpde.NotRecorded, match=message) as caught:
        found.check()
    assert (caught.value.tensor, caught.value.parameter, caught.value.where) == ("w", "layer.p", refusal.where)
    with pytest.raises(tpde.NotRecorded, match="Map.keep keeps the base of its module"):
        tpde.slices.apply_(found, "no pair is opened")


def test_all_tensors_of_a_refused_parameter_are_named() -> None:
    parameter = torch.zeros(4, 8)
    tensors = {"a": torch.empty(2, 8, device="meta"), "b": torch.empty(2, 8, device="meta")}

    def load(weights: Any) -> None:
        (_, a), (_, b) = weights
        memory = torch.zeros(4, 8)
        memory[:2], memory[2:] = a, b
        parameter.copy_(memory + torch.cat([a * 2, b]))

    found = tpde.slices.record(load, tensors, {"p": parameter})
    assert found.refused == ["p"] and sorted(found.tensors_of["p"]) == ["a", "b"]


def test_results_that_reach_no_parameter_are_listed() -> None:
    found = one_parameter(lambda w, p: (w.abs().max(), p.copy_(w)), (4, 8), torch.zeros(4, 8))
    assert len(found.pieces) == 1 and found.refused == []
    assert [(one.operation, one.parameter) for one in found.refusals] == [("aten.abs", None)]


#: Views and copies that a map follows: shape of the tensor, shape of the parameter, loader.
FOLLOWED: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Any, Any], Any]]] = {
    "copy": ((4, 8), (4, 8), lambda w, p: p.copy_(w)),
    "data": ((4, 8), (4, 8), lambda w, p: p.data.copy_(w.data)),
    "index write": ((4, 8), (6, 8), lambda w, p: p.__setitem__(slice(1, 5), w)),
    "integer index": ((3, 4, 8), (4, 8), lambda w, p: p.copy_(w[1])),
    "narrow and chunk": ((8, 8), (2, 4), lambda w, p: p.copy_(w.narrow(0, 2, 4).chunk(2)[1].chunk(2, 1)[0])),
    "split": ((8, 8), (3, 8), lambda w, p: p.copy_(w.split([2, 3, 3])[1])),
    "view": ((8, 8), (2, 4, 8), lambda w, p: p.copy_(w.view(2, 4, 8))),
    "reshape of a slice": ((4, 6, 8), (2, 3, 8), lambda w, p: p.copy_(w[1:3, 2:5].reshape(6, 8).view(2, 3, 8))),
    "flatten": ((4, 8), (32,), lambda w, p: p.copy_(w.flatten())),
    "two transposes": ((4, 8), (3, 8), lambda w, p: p.copy_(w.t()[:, 1:].t())),
    "transposed parameter": ((4, 8), (8, 4), lambda w, p: p.t().reshape(-1)[:0]),
    "squeeze": ((4, 1, 8), (4, 8), lambda w, p: p.copy_(w.squeeze(1))),
    "unsqueeze": ((8,), (1, 8), lambda w, p: p.copy_(w.unsqueeze(0))),
    "leading dim of one": ((1, 4, 8), (4, 8), lambda w, p: p.__setitem__(..., w)),
    "clone and contiguous": ((4, 8), (4, 3), lambda w, p: p.copy_(w.t()[2:5].contiguous().clone().t())),
    "permuted experts": ((4, 3, 8), (3, 4, 8), lambda w, p: p.copy_(w.transpose(0, 1))),
    "interleaved rows": ((8, 4), (4, 4), lambda w, p: p.copy_(w[::2])),
    "rotary": ((8, 4), (8, 4), lambda w, p: p.copy_(w.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4))),
    "one column": ((4, 8), (4, 1), lambda w, p: p.copy_(w[:, 3:4])),
    "scalar": ((), (), lambda w, p: p.copy_(w)),
    "element of a vector": ((5,), (3,), lambda w, p: p[1].copy_(w[2])),
    "to the same dtype": ((4, 8), (4, 8), lambda w, p: p.copy_(w.to("cpu", torch.float32, copy=True))),
    "nothing": ((4, 8), (4, 8), lambda w, p: p[2:2].copy_(w[3:3])),
    "unbind": ((2, 4, 8), (4, 8), lambda w, p: p.copy_(w.unbind()[1])),
    "as_strided": ((4, 8), (2, 8), lambda w, p: p.copy_(w.as_strided((2, 8), (16, 1), 8))),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_views_are_followed(name: str) -> None:
    shape, parameter_shape, load = FOLLOWED[name]
    found = one_parameter(load, shape, torch.zeros(parameter_shape))
    if name == "rotary":  # neighbouring rows are separated, and interleave
        assert found.refused == ["layer.p"]
        return
    weight = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    expected, memory = torch.zeros(parameter_shape), torch.zeros(parameter_shape)
    load(weight, expected)
    for one in found.pieces:
        one.memory(memory).copy_(weight[one.index])
    assert torch.equal(memory, expected) and found.refusals == []
    lacking = sum(int((torch.ones(parameter_shape)[one.index]).sum()) for one in found.missing)
    assert lacking == int((expected == 0).sum())


def test_operations_without_a_result_are_refused_at_once() -> None:
    for load in (lambda w, p: w.sum().item(), lambda w, p: p.copy_(w) if w[0, 0] > 0 else None):
        with pytest.raises(tpde.NotRecorded, match=r"test_recorder\.py:\d+ in .*depends on values") as caught:
            one_parameter(load, (4, 8), torch.zeros(4, 8))
        assert caught.value.tensor == "w" and caught.value.operation == "aten._local_scalar_dense"


def test_failures_of_a_loader_name_the_tensor() -> None:
    with pytest.raises(tpde.NotRecorded, match=r"the loader failed at .*, the last tensor being 'w': KeyError: 'no'") as caught:
        one_parameter(lambda w, p: {}["no"], (4, 8), torch.zeros(4, 8))
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.tensor == "w"
    errors: list[BaseException] = []

    def elsewhere(w: Any, p: Any) -> None:
        def copy() -> None:
            try:
                p.copy_(w)
            except NotImplementedError as error:
                errors.append(error)

        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()

    found = one_parameter(elsewhere, (4, 8), torch.zeros(4, 8))
    assert len(errors) == 1 and [str(one) for one in found.missing] == ["layer.p[0:4, 0:8]"]


def test_replaced_memory_is_refused() -> None:
    parameter = torch.empty(4, 8, device="meta")
    with pytest.raises(tpde.NotRecorded, match="replaced the memory of parameter 'layer.p'"):
        one_parameter(lambda w, p: setattr(p, "data", w), (4, 8), parameter)


def test_elements_that_are_missing_are_listed() -> None:
    found = one_parameter(lambda w, p: p[1:3, 2:6].copy_(w), (2, 4), torch.zeros(4, 8))
    assert {str(one) for one in found.missing} == {
        "layer.p[0:1, 0:8]",
        "layer.p[3:4, 0:8]",
        "layer.p[1:3, 0:2]",
        "layer.p[1:3, 6:8]",
    }
    with pytest.raises(tpde.NotRecorded, match=r"the loader does not write layer.p\[0:1, 0:8\], and 3 more"):
        found.check()
    found.check(missing="layer.*")
    zeros = one_parameter(lambda w, p: (p.zero_(), p[1:3].copy_(w)), (2, 8), torch.ones(4, 8))
    assert {str(one) for one in zeros.constants} == {"layer.p[0:1, 0:8]", "layer.p[3:4, 0:8]"} and zeros.missing == []
    other = one_parameter(lambda w, p: (p[:2].copy_(w), p[2:].copy_(torch.ones(2, 8))), (2, 8), torch.zeros(4, 8))
    assert [str(one) for one in other.constants] == ["layer.p[2:4, 0:8]"]


def test_elements_that_are_written_twice_are_refused() -> None:
    parameter = torch.zeros(4, 8)
    tensors = {"a": torch.empty(4, 8, device="meta"), "b": torch.empty(2, 8, device="meta")}

    def load(weights: Any) -> None:
        for name, weight in weights:
            parameter[4 - len(weight) :].copy_(weight)

    with pytest.raises(tpde.NotRecorded, match=r"layer.p\[2:4, 0:8\] is written twice: from a and b") as caught:
        tpde.slices.record(load, tensors, {"layer.p": parameter})
    assert caught.value.parameter == "layer.p"
    with pytest.raises(tpde.NotRecorded, match=r"layer.p\[0:4, 0:8\] is written twice: from w and constants"):
        one_parameter(lambda w, p: (p.copy_(w), p.zero_()), (4, 8), parameter)
    # The same copy again, as of tied weights.
    found = one_parameter(lambda w, p: (p.copy_(w), p.copy_(w)), (4, 8), parameter)
    assert len(found.pieces) == 1


def test_parameters_that_share_memory() -> None:
    memory = torch.zeros(4, 8)
    with pytest.raises(tpde.NotRecorded, match="'a' and 'b' share memory, but are not the same"):
        tpde.slices.record(lambda _: None, {}, {"a": memory, "b": memory[1:]})
    with pytest.raises(tpde.NotRecorded, match="has gaps in its memory"):
        tpde.slices.record(lambda _: None, {}, {"a": memory[:, 1:]})
    # Views of one buffer are parameters of their own.
    both = {"a": memory[:2], "b": memory[2:]}
    found = tpde.slices.record(lambda _: (memory[:2].zero_(), memory[2:].zero_()), {}, both)
    assert found.refused == [] and [str(one) for one in found.constants] == ["a[0:2, 0:8]", "b[0:2, 0:8]"]
    found = tpde.slices.record(lambda _: memory.zero_(), {}, both)
    assert found.refused == ["a", "b"] and "it is to 2 parameters at once" in str(found.refusals[0])
    assert found.tensors_of == {"a": [], "b": []}


def test_one_tensor_in_two_places(tmp_path: Path) -> None:
    base = {"w": torch.randn(6, 4)}
    target = loaders.changed(base, 5, 0.3)
    parameters = {"embed.p": base["w"].clone(), "head.p": base["w"].clone(), "part.p": torch.zeros(3, 4)}

    def load(weights: Any) -> None:
        for _, weight in weights:
            parameters["embed.p"].copy_(weight)
            parameters["head.p"].copy_(weight)

    found = tpde.slices.record(load, base, parameters)
    pair = write_pair(tmp_path / "pair", target, base, [found.rectangles()])
    parameters["head.p"][1, 1] += 1
    with pytest.raises(tpde.WrongBase, match="tensor 'w' is loaded to two places, which differ"):
        tpde.slices.apply_(found, pair)
    parameters["head.p"][1, 1] = base["w"][1, 1]
    assert tpde.slices.apply_(found, pair).patched == 2
    assert torch.equal(parameters["embed.p"], target["w"]) and torch.equal(parameters["head.p"], target["w"])

    def overlapping(weights: Any) -> None:
        load(weights := list(weights))
        parameters["part.p"].copy_(weights[0][1][:3])

    found = tpde.slices.record(overlapping, base, parameters)
    assert found.refused == ["part.p"] and "parameter embed.p has some of the same elements" in str(found.refusals[0])


class Repacking(loaders.Mixtral):
    """A kernel changes the order of an expert's elements after loading, in memory of the same shape."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        weights = [(name, weight) for name, weight in weights]
        super().load_weights(weights)
        if any("experts" in name for name, _ in weights) and not any(weight.is_meta for _, weight in weights):
            names = {f"{name.split('.experts')[0]}.experts.w13" for name, _ in weights if ".experts." in name}
            for name in names:
                memory = self.parameters[name]
                memory.copy_(memory.flip(1).clone())


@pytest.mark.parametrize("ranks", [1, 2])
def test_repacked_modules_take_the_second_way(ranks: int, tmp_path: Path) -> None:
    every = Ranks(Repacking, ranks, tmp_path)
    third = loaders.changed(every.target, seed=9)
    for rank, (model, found) in enumerate(zip(every.models, every.maps)):
        before = model.loaded(every.base)
        with raises("repacked", match="modules do not hold the base: 'layers.0.experts' and 1 more. 10 others hold it") as caught:
            tpde.slices.apply_(found, every.pair)
        assert caught.value.modules == ["layers.0.experts", "layers.1.experts"] and same(model.parameters, before)
        kept = found.keep(every.base, caught.value.modules)
        whole = sum(every.base[name].nbytes for name in every.base if ".experts." in name)
        assert kept.bytes == whole // ranks and kept.modules == caught.value.modules
        loads: list[list[str]] = []

        def reload(weights: Any) -> None:
            weights = list(weights)
            loads.append([name for name, _ in weights])
            model.load_weights(weights)

        report = tpde.slices.apply_(found, every.pair, kept=kept, reload=reload)
        assert report.reloaded == kept.modules and len(loads) == 2
        assert all(name.startswith(f"layers.{layer}.experts.") for layer, names in enumerate(loads) for name in names)
        assert same(model.parameters, every.expected(rank, every.target))
        # The kept base has become the target, so the next pair fits too.
        following = write_pair(tmp_path / f"next-{rank}", third, every.target, [found.rectangles(kept)])
        assert tpde.slices.apply_(found, following, kept=kept, reload=model.load_weights).outcome == "applied"
        assert same(model.parameters, every.expected(rank, third))


def test_what_is_kept_is_on_the_cpu_and_parameters_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls change them. Both are checked before the first write, and one that ends between the two is continued."""
    monkeypatch.setattr(tpde.slices, "_groups", lambda live, kept: [live, kept] if live and kept else [[*live, *kept]])
    every = Ranks(Repacking, 1, tmp_path)
    (model,), (found,) = every.models, every.maps
    model.load_weights(every.base.items())
    kept = found.keep(every.base, ["layers.0.experts", "layers.1.experts"])
    before = {name: one.clone() for name, one in model.parameters.items()}
    tpde.slices.check(found, every.pair, kept=kept)
    # A wrong copy is found before the parameters are written.
    kept.slices[0].tensor.view(torch.uint8)[0] ^= 1
    with pytest.raises(tpde.WrongBase):
        tpde.slices.apply_(found, every.pair, kept=kept, reload=model.load_weights)
    assert same(model.parameters, before)
    kept.slices[0].tensor.view(torch.uint8)[0] ^= 1
    change, calls = tpde.slices.SlicesApplication.apply, []

    def end_before_the_last(application: Any, *how: Any) -> Any:
        calls.append(application)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return change(application, *how)

    monkeypatch.setattr(tpde.slices.SlicesApplication, "apply", end_before_the_last)
    with pytest.raises(KeyboardInterrupt):
        tpde.slices.apply_(found, every.pair, kept=kept, reload=model.load_weights)
    report = tpde.slices.apply_(found, every.pair, kept=kept, reload=model.load_weights)
    assert (report.outcome, report.reloaded) == ("applied", kept.modules)
    assert same(model.parameters, every.expected(0, every.target))


def test_a_reload_that_fails_is_repeated(tmp_path: Path) -> None:
    every = Ranks(Repacking, 1, tmp_path)
    model, found = every.models[0], every.maps[0]
    kept = found.keep(every.base, ["layers.0.experts", "layers.1.experts"])
    with pytest.raises(tpde.InvalidArgument, match="expected reload"):
        tpde.slices.apply_(found, every.pair, kept=kept)
    left = [1]

    def failing(weights: Any) -> None:
        if not left:
            raise OSError("device lost")
        left.pop()
        model.load_weights(weights)

    with pytest.raises(tpde.Poisoned, match="loading module 'layers.1.experts' again failed, after 1 others: OSError: device lost"):
        tpde.slices.apply_(found, every.pair, kept=kept, reload=failing)
    assert kept.is_pending
    report = tpde.slices.apply_(found, every.pair, kept=kept, reload=model.load_weights)
    assert report.outcome == "already_applied" and report.reloaded == kept.modules and not kept.is_pending
    assert same(model.parameters, every.expected(0, every.target))


def test_a_wrong_base_writes_nothing(tmp_path: Path) -> None:
    every = Ranks(loaders.Llama, 1, tmp_path)
    model, found = every.models[0], every.maps[0]
    for name, parameter in model.parameters.items():
        if name != "lm_head.weight":  # tied
            parameter.view(torch.int16).bitwise_xor_(1)
    before = {name: parameter.clone() for name, parameter in model.parameters.items()}
    with pytest.raises(tpde.WrongBase) as caught:
        tpde.slices.apply_(found, every.pair)
    assert caught.value.code != "repacked" and same(model.parameters, before)
    (tmp_path / "gpt").mkdir()
    gpt = Ranks(loaders.GptOss, 1, tmp_path / "gpt")
    model, kept = gpt.models[0], gpt.kept[0]
    assert kept is not None
    kept.slices[0].tensor.view(torch.int16).bitwise_xor_(1)
    before = {name: parameter.clone() for name, parameter in model.parameters.items()}
    with pytest.raises(tpde.WrongBase):
        tpde.slices.apply_(gpt.maps[0], gpt.pair, kept=kept, reload=model.load_weights)
    assert same(model.parameters, before) and not kept.is_pending


def test_refused_parameters_are_kept(tmp_path: Path) -> None:
    found = Ranks(loaders.GptOss, 2, tmp_path).maps[1]
    assert found.refused == ["experts.w13", "experts.w2"]
    with pytest.raises(tpde.NotRecorded, match=r"aten.copy_ of experts.gate_up for parameter experts.w13 at .*loaders.py:\d+"):
        found.check()
    base = loaders.random_weights(loaders.GptOss.shapes, 1)
    kept = found.keep(iter(base.items()))
    names = {one.name: one.index for one in kept.slices}
    assert kept.modules == ["experts"] and names["experts.down"] == (slice(0, 4), slice(0, 32), slice(0, 32))
    assert names["experts.gate_up_bias"] == (slice(0, 4), slice(32, 64))
    assert "experts.down_bias" not in names  # zeros on this rank
    with pytest.raises(tpde.InvalidArgument, match="the base lacks tensor 'experts.down'"):
        found.keep({name: one for name, one in base.items() if name != "experts.down"})
    with pytest.raises(tpde.InvalidArgument, match="no module 'other' in the map"):
        found.keep(base, ["other"])
    with pytest.raises(tpde.InvalidArgument, match=r"'experts.down' of the base has shape \[3, 32, 32\]: expected \[4, 32, 32\]"):
        found.keep({**base, "experts.down": base["experts.down"][:3]})


def test_replaced_parameters_are_named_and_take_the_second_way(tmp_path: Path) -> None:
    """A kernel has packed the weights of a module into memory of another shape after they were loaded."""
    base = loaders.random_weights(loaders.Llama.shapes, 1)
    model = loaders.Llama(0, 1)
    model.load_weights(base.items())
    found = recorded(model, base)
    assert found.replaced() == []
    live = {**model.parameters}
    live["layers.0.qkv.weight"] = torch.empty(0, dtype=torch.bfloat16)
    del live["layers.1.o.weight"]
    with pytest.raises(tpde.InvalidArgument, match=r"'layers.0.qkv.weight' is torch.bfloat16 \[0\].*expected .* as recorded"):
        found.bind(live)
    bound = replace(found, _owner=live)
    assert bound.replaced() == ["layers.0.qkv", "layers.1.o"]
    kept = bound.keep(base, bound.replaced())
    target = loaders.changed(base, 2)
    pair = write_pair(tmp_path / "pair", target, base, [bound.rectangles(kept)])
    loaded: loaders.Weights = {}
    report = tpde.slices.apply_(bound, pair, kept=kept, reload=loaded.update)
    assert report.reloaded == bound.replaced() and sorted(loaded) == [
        "layers.0.k.weight",
        "layers.0.q.weight",
        "layers.0.v.weight",
        "layers.1.o.weight",
    ]
    assert same(loaded, {name: target[name] for name in loaded})
    expected = loaders.Llama(0, 1).loaded(target)
    patched = live.keys() - {"layers.0.qkv.weight"}
    assert same({name: live[name] for name in patched}, {name: expected[name] for name in patched})


class Layer(torch.nn.Module):
    """A module with parameters, buffers, and an adapter that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.tied = torch.nn.Linear(8, 4)
        self.tied.weight = self.linear.weight
        self.lora = torch.nn.Parameter(torch.zeros(4, 2))
        self.register_buffer("running", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(7), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "running":
                self.running.copy_(weight)
            else:
                self.get_parameter(name).data.copy_(weight)


def test_modules(tmp_path: Path) -> None:
    base = {name: torch.randn(shape) for name, shape in {"linear.weight": (4, 8), "linear.bias": (4,), "running": (4,)}.items()}
    target = loaders.changed(base, 3, 0.5)
    model = Layer()
    with torch.device("meta"):
        other = Layer()
    found = tpde.slices.record(other.load_weights, {name: one.to("meta") for name, one in base.items()}, other)
    assert found.tied == {"linear.weight": ["tied.weight"]}
    assert [one.parameter for one in found.missing] == ["lora", "tied.bias"]
    with pytest.raises(tpde.NotRecorded, match="does not write lora"):
        found.check(missing="tied.*")
    found.check(missing=["tied.*", "*lora*"])
    pair = write_pair(tmp_path / "pair", target, base, [found.rectangles()])
    model.load_weights(base.items())
    bound = found.bind(model)
    # Parameters may move, for example when an engine sleeps and wakes. Compiled code and graphs see the same tensors.
    model.linear.weight.data = model.linear.weight.data.clone()
    version = model.linear.weight._version
    compiled = torch.compile(model.linear, backend="eager")
    compiled(torch.ones(8))
    assert tpde.slices.apply_(bound, pair).outcome == "applied"
    assert torch.equal(model.linear.weight, target["linear.weight"]) and model.linear.weight._version > version
    assert torch.equal(model.running, target["running"]) and torch.equal(model.tied.weight, target["linear.weight"])
    assert torch.equal(compiled(torch.ones(8)), model.linear(torch.ones(8)))
    # The map of the pair's own tensors is the same.
    again = tpde.slices.record(model.load_weights, pair, model)
    assert again.pieces == found.pieces
    model.linear.weight = torch.nn.Parameter(torch.zeros(5, 8))
    with pytest.raises(tpde.InvalidArgument, match=r"parameter 'linear.weight' is torch.float32 \[5, 8\] .*: expected .*\[4, 8\]"):
        tpde.slices.apply_(bound, pair)
    del model.linear
    with pytest.raises(tpde.InvalidArgument, match="parameter 'linear.weight' is missing"):
        bound.slices()
    with pytest.raises(tpde.InvalidArgument, match="parameters is a list"):
        tpde.slices.record(lambda _: None, base, [])  # type: ignore[arg-type]


def test_dtypes_of_the_same_size(tmp_path: Path) -> None:
    base = {"w": torch.randint(0, 120, (4, 8), dtype=torch.uint8).view(torch.float8_e4m3fn)}
    target = loaders.changed(base, 3, 0.5)
    parameter = base["w"].view(torch.uint8).clone()

    def load(weights: Any) -> None:
        for _, weight in weights:
            parameter.copy_(weight.view(torch.uint8))

    found = tpde.slices.record(load, base, {"p": parameter})
    assert tpde.slices.apply_(found, write_pair(tmp_path / "pair", target, base, [])).outcome == "applied"
    assert torch.equal(parameter, target["w"].view(torch.uint8))


def test_pairs_with_some_of_the_tensors(tmp_path: Path) -> None:
    every = Ranks(loaders.Qwen, 2, tmp_path)
    tpde.subset(every.pair, tmp_path / "norms", tensors="*norm*")
    model, found = every.models[0], every.maps[0]
    with pytest.raises(tpde.InvalidArgument, match="no tensor 'embed.weight' in the pair"):
        tpde.slices.apply_(found, tmp_path / "norms")
    assert tpde.slices.apply_(found, tmp_path / "norms", strict=False).outcome == "applied"
    expected, base = every.expected(0, every.target), every.expected(0, every.base)
    assert same(model.parameters, {name: expected[name] if "norm" in name else base[name] for name in base})


def test_cuts_that_are_not_within_a_tensor_are_refused() -> None:
    tensors = {"w": torch.zeros(4, 8), "scalar": torch.zeros(()), "empty": torch.zeros(0, 3)}
    assert [one.index for one in tpde.slices.cut(tensors, [])] == [(slice(0, 4), slice(0, 8)), ..., ...]
    with pytest.raises(tpde.InvalidArgument, match="slices of tensor 'v', which is missing"):
        tpde.slices.cut(tensors, [{"v": [(slice(0, 4),)]}])
    with pytest.raises(tpde.InvalidArgument, match="which is not within it"):
        tpde.slices.cut(tensors, [{"w": [(slice(0, 5), slice(0, 8))]}])
