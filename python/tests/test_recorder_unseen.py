"""What a loader does out of the recorder's sight, or by its names alone, is refused, and leaves the live model as it was."""

from __future__ import annotations

import collections
import copy
import ctypes
import functools
import pickle
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

from loader_programs import Method  # noqa: E402 (needs torch)
from loader_statements import in_thread  # noqa: E402
from test_recorder_memory import Halves, two_parameters  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

import tpde.slices  # noqa: E402
from tpde.slices import _model  # noqa: E402

ONES = torch.ones(2, 8)


class Hiding(torch.Tensor):
    """A tensor whose operations no mode sees."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def without_modes(function: Callable[[], Any]) -> Any:
    with _disable_current_modes():
        return function()


#: Loaders whose parameter ``p`` has other values than those of ``w``.
CHANGED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "constants in a slice": lambda w, p, q: (w.__setitem__(slice(2, 4), torch.ones(2, 8)), p.copy_(w)),
    "constants": lambda w, p, q: (w.copy_(torch.ones(4, 8)), p.copy_(w)),
    "constants in a clone": lambda w, p, q: (c := w.clone(), c[2:].copy_(torch.ones(2, 8)), p.copy_(c)),
    "constants by foreach": lambda w, p, q: (torch._foreach_copy_([w[:2]], [torch.ones(2, 8)]), p.copy_(w)),
    "thread": lambda w, p, q: p.copy_(in_thread(lambda: w * 2)),
    "clone in a thread": lambda w, p, q: p.copy_(in_thread(w.clone)),
    "computed from a thread's": lambda w, p, q: p.copy_(in_thread(lambda: w * 2) + 1),
    "scratch with a thread's": lambda w, p, q: (
        s := torch.zeros(4, 8, device=w.device),
        s[:2].copy_(in_thread(lambda: w[:2] * 2)),
        p.copy_(s),
    ),
    "unpickled": lambda w, p, q: p.copy_(pickle.loads(pickle.dumps(w))),
    "unpickled, a part overwritten": lambda w, p, q: (c := copy.copy(w), c[:2].zero_(), p.copy_(c)),
    "without modes": lambda w, p, q: p.copy_(without_modes(lambda: w * 2)),
    "parameter in a thread": lambda w, p, q: (q.copy_(w), p.copy_(in_thread(lambda: q * 2))),
    "fill with a thread's": lambda w, p, q: (q.copy_(w), p.fill_(in_thread(lambda: q.sum()))),
    "namesake of clone": lambda w, p, q: p.copy_(torch.ops.tpde_named.clone(w)),
    "namesake of slice": lambda w, p, q: p.copy_(torch.ops.tpde_named.slice(w)),
    "namesake of new_zeros": lambda w, p, q: p.copy_(torch.ops.tpde_named.new_zeros(w)),
    "namesake of detach, of a parameter": lambda w, p, q: (q.copy_(w), p.copy_(torch.ops.tpde_named.detach(q))),
    "namesake of copy_": lambda w, p, q: torch.ops.tpde_named.copy_(p, w),
    "namesake of zero_, which returns nothing": lambda w, p, q: (p.copy_(w), torch.ops.tpde_named.zero_(p)),
    "out of clone": lambda w, p, q: torch.ops.aten.clone.out(w + w, out=p),
    "out of full_like": lambda w, p, q: (p.copy_(w), torch.ops.aten.full_like.out(w, 3, out=p)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_values_that_are_not_followed_are_refused_by_name(name: str) -> None:
    found = two_parameters(CHANGED[name])
    assert "p" in found.refused and found.tensors_of["p"] == ["w"], found.refusals
    with pytest.raises(tpde.NotRecorded, match="of w for parameter p"):
        found.check(missing="q")


#: Loaders that fill ``q`` with constants.
CONSTANT: dict[str, Callable[[Any, Any], Any]] = {
    "on the device of the tensor": lambda w, q: q.copy_(torch.ones(4, 8, device=w.device)),
    "empty and filled": lambda w, q: q.copy_(torch.empty(4, 8, device=w.device).fill_(2)),
    "like": lambda w, q: q.copy_(torch.zeros_like(w)),
    "of a list": lambda w, q: q.copy_(torch.tensor([[1.0] * 8] * 4)),
    "of an array": lambda w, q: q.copy_(torch.from_numpy(torch.ones(4, 8).numpy() + 1)),
    "computed": lambda w, q: q.copy_(torch.cat([torch.arange(16.0).view(2, 8), torch.ones(2, 8) * 2])),
    "of a closure": lambda w, q: q[:2].copy_(ONES),
    "an unpickled one, overwritten": lambda w, q: q.copy_(copy.copy(w).zero_()),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_constants_are_known(name: str) -> None:
    ones = ONES
    found = two_parameters(lambda w, p, q, _=ones: (p.copy_(w), CONSTANT[name](w, q)))
    assert found.refused == [] and {one.parameter for one in found.constants} == {"q"}
    found.check(missing="q")


#: Ways to read a written parameter as bytes.
BYTES: dict[str, Callable[[Any], Any]] = {
    "pickle": pickle.dumps,
    "address": lambda q: ctypes.string_at(q.data_ptr(), 4),
    "storage": lambda q: q.untyped_storage()[0],
    "typed storage": lambda q: q.storage()[0],
    "array interface": lambda q: q.__cuda_array_interface__,
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_written_parameter_are_not_read(name: str) -> None:
    with pytest.raises(tpde.NotRecorded, match=r"Tensor\..* of w .*depends on values"):
        two_parameters(lambda w, p, q: (q.copy_(w), BYTES[name](q)))
    if name != "array interface":
        with pytest.raises(tpde.NotRecorded, match="q.* is read before it is written"):
            two_parameters(lambda w, p, q: (BYTES[name](q), q.copy_(w)))
        two_parameters(lambda w, p, q: (p.copy_(w), BYTES[name](q)))


def test_values_of_a_tensor_that_was_not_seen_are_not_read() -> None:
    """Also if the loader catches the error that reading a tensor without data is."""
    reads: list[Callable[[Any], Any]] = [lambda one: one.numpy(), lambda one: one.tolist(), lambda one: one.sum().item()]
    for read in (*reads, lambda one: torch.equal(one, one)):
        for of in (lambda w, q: w * 2, lambda w, q: q * 2):

            def load(w: Any, p: Any, q: Any, *, read: Any = read, of: Any = of) -> None:
                q.copy_(w)
                try:
                    read(in_thread(lambda: of(w, q)))
                    p.fill_(2)
                except Exception:
                    p.fill_(1)

            with pytest.raises(tpde.NotRecorded, match="of w .*depends on values"):
                two_parameters(load)


def test_subclasses_that_hide_operations_are_refused() -> None:
    make = torch.Tensor._make_subclass
    for load in (lambda w, p, q: p.copy_(make(Hiding, w) * 2), lambda w, p, q: make(Hiding, p).zero_()):
        with pytest.raises(tpde.NotRecorded, match="of a Hiding, which has operations of its own"):
            two_parameters(load)


def flat() -> tuple[Any, dict[str, Any]]:
    memory = torch.zeros(8, 8)
    return memory, {
        "p": torch.nn.Parameter(memory[:4], requires_grad=False),
        "q": torch.nn.Parameter(memory[4:], requires_grad=False),
    }


@pytest.mark.parametrize(
    "replace",
    [
        lambda p, q: setattr(p, "data", p.data.view(8, 4)),
        lambda p, q: setattr(p, "data", p.data[:2]),
        lambda p, q: setattr(p, "data", q.data),
        lambda p, q: setattr(p, "data", p.data.view(torch.int32)),
        lambda p, q: torch.utils.swap_tensors(p, torch.nn.Parameter(torch.ones(4, 8, device="meta"))),
        lambda p, q: torch.utils.swap_tensors(p, torch.nn.Parameter(torch.ones(4, 8))),
    ],
)
def test_replaced_memory_is_put_back(replace: Callable[[Any, Any], Any]) -> None:
    memory, parameters = flat()
    p, q = parameters["p"], parameters["q"]
    p.mark = "own"
    before = [(one.data_ptr(), one.shape, one.stride(), one.dtype, type(one)) for one in (p, q)]
    # One that cannot be put back does not keep the others from it.
    with pytest.raises(tpde.NotRecorded, match="replaced the memory of parameter 'p'"):
        tpde.slices.record(lambda ws: [(q.copy_(w), replace(p, q)) for _, w in ws], {"w": torch.zeros(4, 8)}, parameters)
    assert [(one.data_ptr(), one.shape, one.stride(), one.dtype, type(one)) for one in (p, q)] == before
    assert p.mark == "own" and not p.requires_grad


def test_memory_that_cannot_be_put_back_is_named() -> None:
    _, parameters = flat()
    p, q = parameters["p"], parameters["q"]
    q_before = q.data_ptr()

    def load(weights: Any) -> None:
        for _, _ in weights:
            torch.utils.swap_tensors(p, torch.nn.Parameter(torch.ones(4, 8, device="meta")))
            q.data = q.data[:2]
            kept.append(weakref.ref(p))  # which swap_tensors refuses

    kept: list[Any] = []
    with pytest.raises(tpde.NotRecorded, match="the loader replaced the memory of 'p', which cannot be put back"):
        tpde.slices.record(load, {"w": torch.zeros(4, 8)}, parameters)
    assert q.data_ptr() == q_before and q.shape == (4, 8)


class Slots:
    __slots__ = ("kept",)


class Owner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        self.slots, self.queue, self.space = Slots(), collections.deque([1]), types.SimpleNamespace()


KEPT: dict[str, Any] = {}

#: Where a loader keeps a tensor: whether that is put back, and what it does.
KEEPS: dict[str, tuple[bool, Callable[[Any, Any], Any]]] = {
    "attribute of a parameter": (True, lambda m, w: setattr(m.p, "scale", w)),
    "dict of a parameter": (True, lambda m, w: setattr(m.p, "info", {"scale": w})),
    "namespace": (True, lambda m, w: setattr(m.space, "kept", w)),
    "queue": (True, lambda m, w: m.queue.append(w[1:])),
    "wrapper": (True, lambda m, w: setattr(m, "halves", Halves(w[:2], w[2:]))),
    "wrapper within a wrapper": (True, lambda m, w: setattr(m, "halves", Halves(Halves(w[:1], w[1:2]), w[2:]))),
    "slots": (False, lambda m, w: setattr(m.slots, "kept", w)),
    "global": (False, lambda m, w: KEPT.update(w=w[0])),
}


@pytest.mark.parametrize("name", KEEPS)
def test_tensors_that_a_loader_keeps_are_named(name: str) -> None:
    is_put_back, keep = KEEPS[name]
    model = Owner()
    found = tpde.slices.record(lambda ws: [(model.p.copy_(w), keep(model, w)) for _, w in ws], {"w": torch.zeros(4, 8)}, model)
    with pytest.raises(tpde.NotRecorded, match="assignment of w.*: the loader keeps the tensor"):
        found.check()
    if is_put_back:
        assert vars(model.p) == {} and vars(model.space) == {} and [*model.queue] == [1] and not hasattr(model, "halves")
    KEPT.clear()


def free(model: Any, weights: Any) -> None:
    for _, weight in weights:
        model.p.copy_(weight)
        model.scale = weight


#: Ways in which a loader has its model.
REFERENCES: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "partial": lambda m: functools.partial(free, m),
    "method": lambda m: Method(m, lambda ws: free(m, ws)).load_weights,
    "callable object": lambda m: functools.partial(Method(m, functools.partial(free, m)).load_weights),
    "function of a method": lambda m: (lambda load: lambda ws: load(ws))(Method(m, functools.partial(free, m)).load_weights),
    "default": lambda m: lambda ws, model=m: free(model, ws),
    "closure": lambda m: (lambda load: lambda ws: load(ws))(lambda ws: free(m, ws)),
    "keyword": lambda m: functools.partial(lambda ws, *, model: free(model, ws), model=m),
    "decorated": lambda m: torch.no_grad()(lambda ws: free(m, ws)),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("as_dict", [False, True])
def test_attributes_are_put_back_however_a_loader_refers_to_its_model(name: str, as_dict: bool) -> None:
    model = Owner()
    model.scale = scale = torch.ones(4, 8)
    found = tpde.slices.record(
        REFERENCES[name](model), {"w": torch.zeros(4, 8)}, dict(model.named_parameters()) if as_dict else model
    )
    assert model.scale is scale and any(one.endswith("scale") for one in found.refused)


def test_entries_and_their_order_are_put_back() -> None:
    model = Owner()
    model.q = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    model.list, model.set, model.dict = [torch.ones(2), torch.ones(3)], {torch.ones(4)}, {"x": torch.ones(5), "y": 1}
    before = [*model.list], {*model.set}, {**model.dict}, [*model.state_dict()]

    def load(weights: Any) -> None:
        for _, weight in weights:
            p = model.p
            p.copy_(weight)
            model.list[0] = torch.zeros(2)
            model.list.pop()
            model.set.clear()
            model.dict["x"] = torch.zeros(5)
            del model.p
            model.p = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
            model.register_parameter("p", p)

    tpde.slices.record(load, {"w": torch.zeros(4, 8)}, model)
    assert [*map(id, model.list)] == [*map(id, before[0])] and {*map(id, model.set)} == {*map(id, before[1])}
    assert model.dict["x"] is before[2]["x"] and [*model.dict] == ["x", "y"]

    def removed(weights: Any) -> None:
        del model.p
        for _, weight in weights:
            model.p = torch.nn.Parameter(weight)

    with pytest.raises(tpde.NotRecorded, match="replaced the memory of parameter 'p'"):
        tpde.slices.record(removed, {"w": torch.zeros(4, 8)}, model)
    assert [*model.state_dict()] == before[3]


def test_the_time_of_recording_is_linear_in_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each module has its parent in a list."""
    visits = [0]
    container_of = _model._container_of

    def counted(value: Any) -> Any:
        visits[0] += 1
        return container_of(value)

    monkeypatch.setattr(_model, "_container_of", counted)

    def count(modules: int) -> int:
        visits[0] = 0
        root = torch.nn.ModuleList(Owner() for _ in range(modules))
        for one in root:
            object.__setattr__(one, "parent", [root])

        def load(weights: Any) -> None:
            for _, weight in weights:
                for one in root:
                    one.p.copy_(weight)

        tpde.slices.record(load, {"w": torch.zeros(4, 8)}, root)
        return visits[0]

    few, many = count(10), count(40)
    assert many < 5 * few


def test_attributes_with_gaps_are_followed() -> None:
    model = Owner()
    model.cache = torch.ones(4, 16)[:, ::2]
    for write, refused in ((lambda w: model.cache.copy_(w), ["cache"]), (lambda w: model.cache.zero_(), [])):
        found = tpde.slices.record(
            lambda ws, write=write: [(model.p.copy_(w), write(w)) for _, w in ws], {"w": torch.zeros(4, 8)}, model
        )
        assert found.refused == refused and torch.equal(model.cache, torch.ones(4, 8))


def test_parameters_that_share_memory_by_several_storages() -> None:
    np = pytest.importorskip("numpy")
    array = np.zeros(96, np.float32)
    one, other = torch.from_numpy(array), torch.from_numpy(array[32:])
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    weights = {"w": torch.zeros(64)}
    with pytest.raises(tpde.NotRecorded, match="'p' and 'q' share memory, but are not the same"):
        tpde.slices.record(lambda ws: None, weights, {"p": one[:64], "q": other})
    found = tpde.slices.record(lambda ws: [other.copy_(w) for _, w in ws], weights, {"p": one[32:], "q": other})
    assert found.tied == {"p": ["q"]} and [piece.parameter for piece in found.pieces] == ["p"]
    separate = tpde.slices.record(lambda ws: None, {}, {"p": torch.zeros(64), "q": torch.zeros(64)})
    with pytest.raises(tpde.InvalidArgument, match="share memory: expected separate ones"):
        separate.bind({"p": one[:64], "q": other})


def test_the_line_of_a_refusal_is_that_of_the_loader() -> None:
    """Also if the standard library calls the operation."""
    found = two_parameters(lambda w, p, q: (random.Random(0).shuffle(w), p.copy_(w)))
    assert all("test_recorder_unseen.py" in one.where for one in found.refusals) and found.refused == ["p"]
