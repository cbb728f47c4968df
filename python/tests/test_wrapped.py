"""Names of live tensors within wrappers, such as those of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

import tpde.slices  # noqa: E402 (needs torch)
import tpde.torch  # noqa: E402
from tpde._core.names import renamed  # noqa: E402

PREFIXES = ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod.", "_orig_mod.module."]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)

    def load_weights(self, weights: Any) -> None:
        own = dict(self.named_parameters())
        for name, weight in weights:
            own[name].data.copy_(weight)


@pytest.fixture
def states(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    base = {name: one.detach().clone() for name, one in Model().state_dict().items()}
    target = {name: one + 1 for name, one in base.items()}
    tpde.torch.save_file(target, tmp_path / "pair", base=base)
    return base, target


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_wrappers(prefix: str, states: Any, tmp_path: Path) -> None:
    base, target = states
    live = {prefix + name: one.clone() for name, one in base.items()}
    assert tpde.torch.apply_(live, tmp_path / "pair") == "applied"
    assert all(torch.equal(live[prefix + name], one) for name, one in target.items())
    assert tpde.torch.apply_(live, tmp_path / "pair") == "already_applied"
    # The pair may have the prefix, and the live tensors not.
    tpde.torch.save_file({prefix + name: one for name, one in base.items()}, tmp_path / "back", base=live)
    plain = {name: one.clone() for name, one in target.items()}
    assert tpde.torch.apply_(plain, tmp_path / "back") == "applied" and torch.equal(plain["one.bias"], base["one.bias"])


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled part": lambda model: (setattr(model, "two", torch.compile(model.two, backend="eager")), model)[1],
    "module": lambda model: torch.nn.ModuleDict({"module": model}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_modules(wrapper: str, states: Any, tmp_path: Path) -> None:
    base, target = states
    for by_map in (False, True):
        model = Model()
        model.load_state_dict(base)
        found = tpde.slices.record(model.load_weights, base, model)
        wrapped = WRAPPERS[wrapper](model)
        weights = [*model.named_parameters()]
        if by_map:
            bound = found.bind(wrapped)
            bound.check()
            assert tpde.slices.apply_(bound, tmp_path / "pair").patched == 4 and bound.replaced() == []
        else:
            assert tpde.torch.apply_(wrapped, tmp_path / "pair") == "applied"
        assert all(torch.equal(one, target[name.replace("_orig_mod.", "")]) for name, one in weights)


def test_names_that_are_not_unique_are_refused(states: Any, tmp_path: Path) -> None:
    base, _ = states
    live = {f"module.{name}": one.clone() for name, one in base.items()}
    both = {**live, "_orig_mod.one.bias": base["one.bias"].clone()}
    with pytest.raises(tpde.InvalidArgument, match="no tensor of the pair is among the given ones"):
        tpde.torch.apply_(both, tmp_path / "pair")
    with pytest.raises(tpde.InvalidArgument, match="'a._orig_mod.b.w' and 'a.b._orig_mod.w' differ in the prefix"):
        renamed({"a._orig_mod.b.w": 1, "a.b._orig_mod.w": 2}, ["a.b.w"])
    # An equal name comes first.
    exact = {**live, **{name: one.clone() for name, one in base.items()}}
    assert tpde.torch.apply_(exact, tmp_path / "pair") == "applied"
    assert torch.equal(exact["module.one.bias"], base["one.bias"])
    other = {f"module.{name}x": one.clone() for name, one in base.items()}
    other["two.bias"] = base["two.bias"].clone()
    with pytest.raises(tpde.InvalidArgument, match="missing among the given ones, some of which begin with 'module.'"):
        tpde.torch.apply_(other, tmp_path / "pair")


def test_a_module_that_has_the_name_of_a_prefix_is_no_wrapper(tmp_path: Path) -> None:
    """A wrapper puts its prefix before all names. A tensor of a part named "module" is another one."""
    tpde.torch.save_file({"w": torch.ones(4), "b": torch.ones(2)}, tmp_path / "pair", base={"b": torch.zeros(2)})
    live = {"module.w": torch.zeros(4), "b": torch.zeros(2)}
    assert tpde.torch.apply_(live, tmp_path / "pair", strict=False) == "applied"
    assert torch.equal(live["module.w"], torch.zeros(4)) and torch.equal(live["b"], torch.ones(2))
