"""Maps of loaders that read parameters, replace attributes, or load tied and wrapped parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

import loaders  # noqa: E402 (needs torch)
from loaders import BF16, F32, Model  # noqa: E402
from test_recorder import Ranks, same, write_pair  # noqa: E402

import tpde.slices  # noqa: E402
import tpde.torch  # noqa: E402


class Derived(Model):
    """Parameters that the loader makes of others: a tied head that is a copy, two parts of a projection, and a maximum."""

    shapes = {"embed": ((6, 4), BF16), "kv_b": ((8, 4), BF16), "q_scale": ((1,), F32), "k_scale": ((1,), F32)}

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(rank, ranks)
        for name, shape in {"embed.weight": (6, 4), "head.weight": (6, 4), "kv_b.weight": (8, 4)}.items():
            self.parameter(name, shape)
        self.parameter("kv_b.w_kc", (2, 2, 4))
        self.parameter("kv_b.w_vc", (2, 4, 2))
        self.parameter("qkv.scales", (2,), F32)
        self.parameter("qkv.scale", (1,), F32)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = self.parameters
        for name, weight in weights:
            if "scale" in name:
                own["qkv.scales"].data["qk".index(name[0])] = weight[0]
            else:
                own[f"{name}.weight"].data.copy_(weight)
        own["head.weight"].data.copy_(own["embed.weight"].data)
        keys, values = own["kv_b.weight"].data.view(2, 4, 4).split([2, 2], dim=1)
        own["kv_b.w_kc"].copy_(keys)
        own["kv_b.w_vc"].copy_(values.transpose(1, 2))
        own["qkv.scale"].copy_(own["qkv.scales"].max())


def test_parameters_that_are_made_of_others(tmp_path: Path) -> None:
    """Copies are followed, computations are refused, and what is refused is loaded again."""
    every = Ranks(Derived, 1, tmp_path)
    (model,), (found,), (kept,) = every.models, every.maps, every.kept
    places = {(one.tensor, one.parameter) for one in found.pieces}
    assert {("embed", "embed.weight"), ("embed", "head.weight"), ("kv_b", "kv_b.weight")} <= places
    # A part of a tensor that another parameter has as a whole cannot be changed by the same call.
    assert found.constants == [] and found.refused == ["kv_b.w_kc", "kv_b.w_vc", "qkv.scale"]
    assert found.tensors_of["qkv.scale"] == ["q_scale", "k_scale"]
    with pytest.raises(tpde.NotRecorded, match="aten.max of q_scale, k_scale for parameter qkv.scale at "):
        found.check()
    with pytest.raises(tpde.NotRecorded, match="Map.keep keeps the base of its module"):
        tpde.slices.apply_(found, every.pair)
    report = tpde.slices.apply_(found, every.pair, kept=kept, reload=model.load_weights)
    assert report.reloaded == ["kv_b", "qkv"] and same(model.parameters, every.expected(0, every.target))


def two_parameters(load: Callable[[Any, Any, Any], Any], **tensors: Any) -> tpde.slices.Map:
    """The map of a loader of one tensor, ``w``, of 4 × 8 elements, and of parameters of the same shape."""
    p, q = torch.zeros(4, 8), torch.zeros(4, 8)

    def load_weights(weights: Any) -> None:
        for _, weight in weights:
            load(weight, p, q)

    return tpde.slices.record(load_weights, tensors or {"w": torch.empty(4, 8, device="meta")}, {"p": p, "q": q})


#: Loaders of a parameter ``q`` from a parameter ``p``, and the rows of the tensor that it has.
FROM_PARAMETERS: dict[str, tuple[Callable[[Any, Any, Any], Any], list[int]]] = {
    "copy": (lambda w, p, q: (p.copy_(w), q.copy_(p)), [0, 1, 2, 3]),
    "data and detach": (lambda w, p, q: (p.data.copy_(w), q.copy_(p.detach().data)), [0, 1, 2, 3]),
    "clone": (lambda w, p, q: (p.copy_(w), q.copy_(p.clone())), [0, 1, 2, 3]),
    "clone of a part": (lambda w, p, q: (p.copy_(w), q[:2].copy_(p[1:3].clone())), [1, 2]),
    "chain of views": (lambda w, p, q: (p.copy_(w), q.view(-1)[8:16].copy_(p.view(2, 2, 8)[1].chunk(2)[0].view(-1))), [2]),
    "before its other half": (lambda w, p, q: (p[:2].copy_(w[:2]), q[:2].copy_(p[:2]), p[2:].copy_(w[2:])), [0, 1]),
    "parts as they were copied": (lambda w, p, q: (p[:1].copy_(w[:1]), p[1:].copy_(w[1:]), q[2:3].copy_(p[:1].clone())), [0]),
    "of two pieces": (lambda w, p, q: (p[:2].copy_(w[2:]), p[2:].copy_(w[:2]), q.copy_(p)), [0, 1, 2, 3]),
    "and padding": (lambda w, p, q: (p.zero_(), p[:3].copy_(w[:3]), q.copy_(p)), [0, 1, 2]),
    "twice": (lambda w, p, q: (p.copy_(w), q.copy_(w), q.copy_(p)), [0, 1, 2, 3]),
    "foreach": (lambda w, p, q: (torch._foreach_copy_([p], [w]), torch._foreach_copy_([q], [p])), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", FROM_PARAMETERS)
def test_copies_between_parameters_are_followed(name: str) -> None:
    load, rows = FROM_PARAMETERS[name]
    found = two_parameters(load)
    weight, p, q = torch.arange(1.0, 33).reshape(4, 8), torch.zeros(4, 8), torch.zeros(4, 8)
    patched = {"p": torch.zeros(4, 8), "q": torch.zeros(4, 8)}
    load(weight, p, q)
    for one in found.pieces:
        one.memory(patched[one.parameter]).copy_(weight[one.index])
    if name in ("clone of a part", "chain of views"):  # p has the whole tensor
        assert found.refused == ["q"] and "parameter p has some of the same elements" in str(found.refusals[0])
        return
    assert found.refusals == [] and torch.equal(patched["p"], p) and torch.equal(patched["q"], q)
    indices = [one.index for one in found.pieces if one.parameter == "q"]
    assert sorted(row for rows_, _ in indices for row in range(rows_.start, rows_.stop)) == rows


#: Loaders of a parameter ``q`` from a parameter ``p`` that are refused by name.
REFUSED_BETWEEN: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "maximum": (lambda w, p, q: (p.copy_(w), q.copy_(p.amax())), "aten.amax of w for parameter q"),
    "fill with a maximum": (lambda w, p, q: (p.copy_(w), q.fill_(p.amax())), "aten.amax of w for parameter q"),
    "written to a parameter": (lambda w, p, q: (p.copy_(w), torch.mul(p, 2, out=q)), "aten.mul of w for parameter q"),
    "cast": (lambda w, p, q: (p.copy_(w), q.copy_(p.double())), "aten._to_copy of w for parameter q"),
    "cast and back": (lambda w, p, q: (p.copy_(w), q.copy_(p.bfloat16().float())), "aten._to_copy of w for parameter q"),
    "other elements": (lambda w, p, q: (p.copy_(w), q.view(torch.uint8).copy_(p.view(torch.uint8))), "viewed as torch.uint8"),
    "concatenation": (lambda w, p, q: (p.copy_(w), q.copy_(torch.cat([p[2:], p[:2]]))), "aten.cat of w for parameter q"),
    "scratch memory": (lambda w, p, q: (p.copy_(w), q.copy_(torch.empty(4, 8).copy_(p))), "not that of a parameter"),
    "real numbers": (lambda w, p, q: (q.zero_(), torch.view_as_real(q.view(torch.complex64)).copy_(w.view(4, 4, 2))), "a write"),
    "foreach": (lambda w, p, q: (p.copy_(w), torch._foreach_mul_([q], [p])), "aten._foreach_mul_ of w for parameter q"),
}


@pytest.mark.parametrize("name", REFUSED_BETWEEN)
def test_computations_with_parameters_are_refused_by_name(name: str) -> None:
    load, message = REFUSED_BETWEEN[name]
    found = two_parameters(load)
    if name == "real numbers":
        assert found.refused == [] or message in str(found.refusals[0])
        return
    assert found.refused == ["q"] and found.tensors_of["q"] == ["w"]
    assert any(message in str(one) for one in found.refusals), found.refusals
    with pytest.raises(tpde.NotRecorded):
        found.check(missing="*")


def test_order_of_writes_counts() -> None:
    """Nothing is written after a copy, and nothing is read before it."""
    with pytest.raises(tpde.NotRecorded, match=r"q\[2:4, 0:8\] is written twice: from w and constants"):
        two_parameters(lambda w, p, q: (q[2:].zero_(), q.copy_(w), q[2:].zero_()))
    with pytest.raises(tpde.NotRecorded, match=r"p\[0:4, 0:8\] is read before it is written"):
        two_parameters(lambda w, p, q: (q.copy_(p), p.copy_(w)))
    with pytest.raises(tpde.NotRecorded, match=r"p\[1:2, 0:8\] is read before it is written"):
        two_parameters(lambda w, p, q: (p[:1].copy_(w[:1]), q[:2].copy_(p[:2]), p[1:].copy_(w[1:])))
    with pytest.raises(tpde.NotRecorded, match=r"p\[0:4, 0:8\] is read before it is written"):
        two_parameters(lambda w, p, q: (q.fill_(float(p.sum())), p.add_(w)))
    # What the loader does not write is a constant.
    found = two_parameters(lambda w, p, q: (q[:2].copy_(w[:2]), q[2:].fill_(float(p.sum()))))
    assert [str(one) for one in found.constants] == ["q[2:4, 0:8]"] and [one.parameter for one in found.missing] == ["p"]


def test_values_that_are_read_are_refused_even_if_the_loader_catches_the_error() -> None:
    def caught(read: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
        def load(w: Any, p: Any, q: Any) -> None:
            p.copy_(w)
            try:
                q.fill_(read((w, p)))
            except Exception:
                q.fill_(1)

        return load

    reads: list[Callable[[Any], Any]] = [
        lambda both: both[0].sum().item(),
        lambda both: both[1].sum().item(),
        lambda both: both[1].tolist()[0][0],
        lambda both: float(both[1].numpy()[0, 0]),
        lambda both: float(both[0].numpy()[0, 0]),
        lambda both: 1.0 if (both[1] > 0).any() else 0.0,
    ]
    for read in reads:
        with pytest.raises(tpde.NotRecorded, match=r"of w .*test_recorder_memory\.py:\d+ in .*depends on values"):
            two_parameters(caught(read))


@torch.library.custom_op("tpde_test::place", mutates_args=("to",))
def place(to: torch.Tensor, values: torch.Tensor) -> None:
    to.copy_(values)


@torch.library.custom_op("tpde_test::place_and_count", mutates_args=("to",))
def place_and_count(to: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    to.copy_(values)
    return values.clone()


@place_and_count.register_fake
def _(to: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


@torch.library.custom_op("tpde_test::undeclared", mutates_args=())
def undeclared(to: torch.Tensor, values: torch.Tensor) -> None:
    pass


@pytest.mark.parametrize("operator", ["place", "place_and_count", "undeclared"])
def test_operators_that_write_their_arguments_are_refused_by_name(operator: str) -> None:
    call = getattr(torch.ops.tpde_test, operator)
    found = two_parameters(lambda w, p, q: (p.copy_(w), call(q, w)))
    assert "q" in found.refused and f"tpde_test.{operator} of w for parameter q" in " ".join(map(str, found.refusals))


def test_views_of_other_elements_are_compared_by_bytes() -> None:
    parameter = torch.zeros(16, dtype=torch.int32)
    tensors = {f"c{number}": torch.zeros(16, dtype=torch.uint8) for number in range(4)}

    def load(weights: Any) -> None:
        for at, (_, weight) in enumerate(weights):
            parameter.view(torch.uint8)[16 * at :][:16].copy_(weight)

    for some in (tensors, {"c0": tensors["c0"]}):
        found = tpde.slices.record(load, some, {"p": parameter})
        assert found.refused == ["p"] and found.tensors_of == {"p": [*some]}
        assert "the parameter's elements of 4 bytes are viewed as torch.uint8" in str(found.refusals[0])
    found = tpde.slices.record(lambda _: parameter.view(torch.int16).zero_(), {}, {"p": parameter})
    assert found.refused == ["p"] and found.constants == []
    flat = torch.zeros(40)
    both = {"a": flat[8:16], "b": flat[16:24]}
    found = tpde.slices.record(lambda ws: [flat[:16].copy_(w) for _, w in ws], {"w": torch.zeros(16)}, both)
    assert found.refused == ["a"] and "it is to memory beyond parameter a" in str(found.refusals[0])
    found = tpde.slices.record(
        lambda ws: [flat.view(torch.uint8)[40:80].copy_(w) for _, w in ws], {"w": torch.zeros(40).byte()}, both
    )
    assert found.refused == ["a", "b"]


def test_tensors_of_the_checkpoint_that_are_written() -> None:
    for write in (lambda w: w.view(torch.uint8).zero_(), lambda w: w.expand(4, 8).zero_(), lambda w: w[:1].zero_()):
        found = two_parameters(lambda w, p, q, write=write: (write(w), p.copy_(w)))
        assert found.refused == ["p"] and found.tensors_of["p"] == ["w"]


class Attributes(torch.nn.Module):
    """A model with attributes, some of which its loader replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)
        self.layer.scale = torch.ones(1)
        self.layer.cache = {"old": torch.ones(2)}
        self.layer.list = [torch.ones(1)]
        self.register_buffer("running", torch.ones(4, 4), persistent=False)


ASSIGNMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "layer.scale": lambda m, w: setattr(m.layer, "scale", w[0]),
    "layer.new": lambda m, w: setattr(m.layer, "new", w * 2),
    "layer.cache": lambda m, w: m.layer.cache.update(new=w),
    "layer.list": lambda m, w: m.layer.list.append(w),
    "running": lambda m, w: setattr(m, "running", w),
    "other": lambda m, w: m.register_buffer("other", w),
    "layer.bias": lambda m, w: setattr(m.layer, "bias", torch.nn.Parameter(w[0])),
    "layer.of_parameter": lambda m, w: setattr(m.layer, "of_parameter", m.layer.weight.data.t().contiguous()),
    "layer.holder": lambda m, w: setattr(m.layer, "holder", {"a": [(w,)]}),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attributes_that_a_loader_replaces_are_named_and_put_back(name: str, device: str) -> None:
    with torch.device(device):
        model = Attributes()

    def load(weights: Any) -> None:
        for _, weight in weights:
            model.layer.weight.data.copy_(weight)
            ASSIGNMENTS[name](model, weight)

    before = {**vars(model.layer)}, {**model.layer.cache}, [*model.layer.list], model.running, {**model._buffers}
    found = tpde.slices.record(load, {"w": torch.zeros(4, 4)}, model)
    after = {**vars(model.layer)}, {**model.layer.cache}, [*model.layer.list], model.running, {**model._buffers}
    assert all(one is other for one, other in zip(before[0].values(), after[0].values())) and before[0].keys() == after[0].keys()
    assert before[1].keys() == after[1].keys() and len(before[2]) == len(after[2]) and before[3] is after[3]
    assert before[4].keys() == after[4].keys() and model.layer.bias is None
    assert found.refused == [name] and found.tensors_of[name] == ["w"]
    assert f"assignment of w for parameter {name}: the loader keeps the tensor" in str(found.refusals[-1])
    with pytest.raises(tpde.NotRecorded):
        found.check()
    assert found.keep({"w": torch.zeros(4, 4)}).modules == sorted({"layer", name.rpartition(".")[0]})


def test_memory_of_attributes_is_not_written() -> None:
    model = Attributes()

    def load(weights: Any) -> None:
        for _, weight in weights:
            model.layer.weight.data.copy_(weight)
            model.layer.scale.zero_()
            model.running.copy_(weight)

    found = tpde.slices.record(load, {"w": torch.zeros(4, 4)}, model)
    assert torch.equal(model.running, torch.ones(4, 4)) and torch.equal(model.layer.scale, torch.ones(1))
    assert found.refused == ["running"]

    def read_before(weights: Any) -> None:
        for _, weight in weights:
            model.layer.weight.data.copy_(model.running)
            model.running = weight

    with pytest.raises(tpde.NotRecorded, match=r"running\[0:4, 0:4\] is read before it is written"):
        tpde.slices.record(read_before, {"w": torch.zeros(4, 4)}, model)


def test_parameters_that_a_loader_replaces_are_put_back() -> None:
    model = Attributes()
    weight = model.layer.weight

    def load(weights: Any) -> None:
        for _, one in weights:
            model.layer.weight = torch.nn.Parameter(one)

    with pytest.raises(tpde.NotRecorded, match="replaced the memory of parameter 'layer.weight'"):
        tpde.slices.record(load, {"w": torch.zeros(4, 4)}, model)
    assert model.layer.weight is weight
    parameters = {"p": torch.ones(4, 4)}
    one = parameters["p"]
    with pytest.raises(tpde.NotRecorded, match="replaced the memory of parameter 'p'"):
        tpde.slices.record(lambda weights: parameters.update(p=next(weights)[1]), {"w": torch.zeros(4, 4)}, parameters)
    assert parameters["p"] is one
    # Also if the loader fails later.
    with pytest.raises(tpde.NotRecorded, match="KeyError"):
        tpde.slices.record(lambda weights: (setattr(model, "running", next(weights)[1]), {}["no"]), {"w": torch.zeros(4, 4)}, model)
    assert not model.running.is_meta


class Tied(torch.nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = dict(self.named_parameters(remove_duplicate=False))
        for _, weight in weights:
            for parameter in named.values():
                parameter.data.copy_(weight)


def test_a_map_is_bound_to_parameters_that_are_tied_as_recorded() -> None:
    base = {"embed": torch.zeros(6, 4)}
    with torch.device("meta"):
        tied, separate = Tied(is_tied=True), Tied(is_tied=False)
    maps = [tpde.slices.record(one.load_weights, base, one) for one in (tied, separate)]
    with pytest.raises(tpde.InvalidArgument, match="'embed.weight' and 'head.weight' are not the same memory: expected tied"):
        maps[0].bind(Tied(is_tied=False))
    with pytest.raises(tpde.InvalidArgument, match="'embed.weight' and 'head.weight' share memory: expected separate ones"):
        maps[1].bind(Tied(is_tied=True))
    for found, is_tied in zip(maps, (True, False)):
        live = Tied(is_tied=is_tied)
        found.bind(live).check()
        memory = torch.zeros(30)
        overlapping = {"embed.weight": memory[:24].view(6, 4), "head.weight": memory[4:28].view(6, 4)}
        with pytest.raises(tpde.InvalidArgument, match="memory"):
            found.bind(overlapping)
    # Parameters that the recorded model does not have are missing, not forgotten.
    once = tpde.slices.record(tied.load_weights, base, dict(tied.named_parameters()))
    once.bind(Tied(is_tied=True)).check()
    with pytest.raises(tpde.NotRecorded, match=r"does not write head.weight\[0:6, 0:4\]"):
        once.bind(Tied(is_tied=False)).check()
    # Ties may change after the map was bound.
    live = Tied(is_tied=True)
    bound = maps[0].bind(live)
    live.head.weight = torch.nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(tpde.InvalidArgument, match="expected tied"):
        bound.slices()


def test_a_map_without_pieces_is_not_applied(tmp_path: Path) -> None:
    base, parameter = {"w": torch.zeros(4)}, torch.zeros(4)
    found = tpde.slices.record(lambda _: parameter.zero_(), base, {"p": parameter})
    pair = write_pair(tmp_path / "pair", {"w": torch.ones(4)}, base, [])
    with pytest.raises(tpde.NotRecorded, match="copies no tensor to a parameter"):
        found.check()
    for call in (tpde.slices.apply_, tpde.slices.check, tpde.slices.prepare):
        with pytest.raises(tpde.NotRecorded, match="the map has no pieces"):
            call(found, pair)


def test_the_state_dict_of_a_tied_model(tmp_path: Path) -> None:
    """It has two names of one tensor. Files, and pairs of files, have one of them, or both."""
    live = Tied(is_tied=True)
    base = {name: one.detach().clone() for name, one in live.state_dict().items()}
    target = loaders.changed({"embed.weight": base["embed.weight"]}, 3, 0.5)["embed.weight"]

    def load(weights: Any) -> None:
        live.load_state_dict(dict(weights), strict=False)

    found = tpde.slices.record(load, live.state_dict(), live)
    found.check()
    assert found.unused == [] and {one.tensor for one in found.pieces} == {"embed.weight"}
    for names in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
        load(base.items())
        pair = tmp_path / "-".join(names)
        tpde.torch.save_file({name: target for name in names}, pair, base={name: base[name] for name in names})
        tpde.slices.check(found, pair)
        assert tpde.slices.apply_(found, pair).outcome == "applied"
        assert torch.equal(live.embed.weight, target) and torch.equal(live.head.weight, target)
        assert tpde.slices.apply_(found, pair).outcome == "already_applied"
        load(base.items())
        kept = found.keep({names[0]: base[names[0]]}, ["embed"])
        assert tpde.slices.apply_(found, pair, kept=kept, reload=load).reloaded == ["embed"]
        assert torch.equal(live.embed.weight, target)
    load(base.items())
    other = {"embed.weight": target, "head.weight": loaders.changed({"w": target}, 4, 0.5)["w"]}
    tpde.torch.save_file(other, tmp_path / "other", base=base)
    with pytest.raises(tpde.InvalidArgument, match="'embed.weight' and 'head.weight' are loaded to the same parameter"):
        tpde.slices.apply_(found, tmp_path / "other")
    assert torch.equal(live.embed.weight, base["embed.weight"])


def test_distributed_tensors(tmp_path: Path) -> None:
    """A wrapper of one tensor is loaded and patched where its memory is."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("no gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        base = {"w": torch.randn(8, 4)}
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)]))
        model.derived = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)]))

        def load(weights: Any) -> None:
            with torch.no_grad():
                for _, weight in weights:
                    model.w.copy_(DTensor.from_local(weight, mesh, [Shard(0)]))
                model.derived.copy_(model.w)

        load(base.items())
        found = tpde.slices.record(load, base, model)
        found.check()
        assert [one.parameter for one in found.pieces] == ["w", "derived"] and found.constants == []
        assert torch.equal(model.w.to_local(), base["w"])
        target = loaders.changed(base, 3, 0.5)
        assert tpde.slices.apply_(found, write_pair(tmp_path / "pair", target, base, [])).patched == 2
        assert torch.equal(model.w.to_local(), target["w"]) and torch.equal(model.derived.to_local(), target["w"])
    finally:
        distributed.destroy_process_group()


class Halves(torch.Tensor):
    """A wrapper of two tensors."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Halves:
        return torch.Tensor._make_wrapper_subclass(cls, (2 * len(one), *one.shape[1:]), dtype=one.dtype)

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other

    def __tensor_flatten__(self) -> Any:
        return ["one", "other"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Halves:
        return Halves(inner["one"], inner["other"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            one, other = args[1].chunk(2)
            args[0].one.copy_(one)
            args[0].other.copy_(other)
            return args[0]
        raise NotImplementedError(func)


def test_wrappers_of_several_tensors_are_refused() -> None:
    wrapper = Halves(torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(tpde.NotRecorded, match="parameter 'p' is a Halves of several tensors"):
        tpde.slices.record(lambda _: None, {}, {"p": wrapper})
    # What it does with the tensors inside is followed.
    inner = {"one": wrapper.one, "other": wrapper.other}
    found = tpde.slices.record(lambda ws: [wrapper.copy_(w) for _, w in ws], {"w": torch.zeros(4, 4)}, inner)
    assert [(one.parameter, one.index[0]) for one in found.pieces] == [("one", slice(0, 2)), ("other", slice(2, 4))]
