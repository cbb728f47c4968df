"""Random programs on a model with attached layers and on the plain target: both agree after each step, or the step is refused.

`TPDE_NN_PROGRAMS` sets the number of programs; a release uses 3,000.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tpde
from test_torch import raw_of

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402 (needs torch)
import tpde.nn  # noqa: E402

PROGRAMS = int(os.environ.get("TPDE_NN_PROGRAMS", "40"))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDTH = 16


class Small(torch.nn.Module):
    """Linear layers, some with one weight, some under two names, a norm, a buffer, and a head that may be tied."""

    def __init__(self, draw: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(draw.randrange(1000))
        self.embed = torch.nn.Embedding(20, WIDTH, dtype=dtype)
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=dtype)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5, dtype=dtype) for _ in range(draw.randint(1, 4))
        )
        if draw.random() < 0.3:
            self.layers[-1].weight = self.layers[0].weight
        if draw.random() < 0.3:
            self.layers.append(self.layers[0])
        self.head = torch.nn.Linear(WIDTH, 20, bias=False, dtype=dtype)
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones((), dtype=dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x * self.scale)


class Adapter(torch.nn.Module):
    """A layer with an adapter of low rank, which can be merged into it, as PEFT does."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.down = torch.nn.Parameter(torch.ones(2, layer.in_features, dtype=layer.weight.dtype) / 8, requires_grad=False)
        self.up = torch.nn.Parameter(torch.ones(layer.out_features, 2, dtype=layer.weight.dtype) / 8, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.down.T @ self.up.T

    def merged(self) -> torch.nn.Linear:
        self.base_layer.weight.data += self.up @ self.down
        return self.base_layer


Action = Callable[["Program", Any], Any]


class Program:
    """A model with attached layers, the plain target, and the steps so far."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = random.Random(seed)
        self.folder = folder
        self.steps: list[str] = []
        self.refused: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        dtype = self.draw.choice(DTYPES)
        model = Small(self.draw, dtype).requires_grad_(False)
        self.base = copy.deepcopy(model.state_dict())
        moved: dict[int, torch.Tensor] = {}
        self.target = {name: moved.setdefault(one.data_ptr(), self.moved(one)) for name, one in model.state_dict().items()}
        self.plain = copy.deepcopy(model)
        self.plain.load_state_dict(self.target)
        self.pair = folder / "p"
        tpde.torch.save_file(self.target, self.pair, base=self.base, replace=True)
        limit = self.draw.random()
        self.attached = tpde.nn.attach(model, self.pair, only=lambda _: self.draw.random() < 0.3 + limit)
        self.model: Any = model

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.draw.randrange(1000))
        is_changed = torch.rand(tensor.shape, generator=generator) < 0.2
        return torch.where(is_changed, tensor * 1.25 + 0.01, tensor).to(tensor.dtype)

    def both(self, name: str, action: Callable[[Any], Any], *, is_final: bool = False) -> bool:
        """Does the same to both models, unless the attached one refuses. Returns whether the program goes on."""
        self.steps.append(name)
        before = raw_of(self.model.state_dict())
        try:
            found = action(self.model)
        except tpde.TpdeError as error:
            self.refused[name] += 1
            assert str(error)
            if is_final:
                return False
            assert raw_of(self.model.state_dict()) == before, "a refused step changed the model"
            return True
        except Exception as error:
            with pytest.raises(type(error)):
                action(self.plain)
            return False
        expected = action(self.plain)
        self.done[name] += 1
        if isinstance(found, torch.nn.Module):
            self.model, self.plain = found, expected
        else:
            assert found == expected
        return True

    def check(self) -> None:
        found, expected = self.model.state_dict(), self.plain.state_dict()
        assert list(found) == list(expected)
        assert raw_of(found) == raw_of(expected)
        tokens = torch.arange(12).view(2, 6)
        with torch.no_grad():
            assert torch.equal(self.model(tokens), self.plain(tokens))

    def layers(self) -> list[str]:
        """Names of all linear layers."""
        return [name for name, one in self.plain.named_modules() if isinstance(one, torch.nn.Linear)]

    def step(self) -> bool:
        draw = self.draw
        name = draw.choice(self.layers())
        first, _, last = name.rpartition(".")
        match draw.randrange(15):
            case 0:
                dtype = draw.choice([*DTYPES, torch.float64])
                return self.both(f"to {dtype}", lambda one: one.to(dtype), is_final=True)
            case 1:
                copies = draw.choice([copy.deepcopy, lambda one: torch.nn.Sequential(one), lambda one: one.eval()])
                return self.both("copy", copies)
            case 2:
                state = self.state()
                how = {"strict": draw.random() < 0.5, "assign": draw.random() < 0.3}
                return self.both("load", lambda one: one.load_state_dict(copy.deepcopy(state), **how))
            case 3:
                return self.both("pickle", lambda one: pickle.loads(pickle.dumps(one)))
            case 4:
                return self.both("attach", lambda one: tpde.nn.attach(one, self.pair) and None)
            case 5:
                return self.both("save", lambda one: self.saved(one, draw.getstate()))
            case 6:
                value, where = draw.random(), draw.choice(["weight", "data", "state", "row"])
                return self.both(f"write {where}", lambda one: self.written(one.get_submodule(name), value, where))
            case 7:
                return self.both("replace", lambda one: setattr(one.get_submodule(name), "weight", self.parameter(one, name)))
            case 8:

                def adapt(one: Any) -> None:
                    setattr(one.get_submodule(first), last, Adapter(one.get_submodule(name)))

                return self.both("adapt", adapt)
            case 9:
                return self.both("merge", self.merged)
            case 10:
                later = {key: one.clone() + 1 for key, one in self.plain.state_dict().items()}
                tpde.torch.save_file(later, self.folder / "later", base=self.plain.state_dict(), replace=True)
                as_module = draw.random() < 0.5
                given = (lambda one: one) if as_module else lambda one: one.state_dict()
                return self.both("apply_", lambda one: tpde.torch.apply_(given(one), self.folder / "later"))
            case 11:
                state = self.state()
                tokens = torch.arange(6).view(1, 6)
                call = lambda one: torch.func.functional_call(one, state, (tokens,)).tolist()  # noqa: E731
                return self.both("functional_call", call)
            case 12:
                part = draw.choice([name, first])
                state = {key: one * 2 for key, one in self.plain.get_submodule(part).state_dict().items()}
                return self.both("load a part", lambda one: one.get_submodule(part).load_state_dict(state))
            case 13:
                dtype = next(self.plain.parameters()).dtype
                return self.both("convert a layer", lambda one: one.get_submodule(name).double().to(dtype) and None)
            case _:
                return self.both("compile", lambda one: torch.compile(one, backend="eager").state_dict() and None)

    def state(self) -> dict[str, torch.Tensor]:
        """A state dict: the own one, or one of another version, or some of its tensors."""
        own = {name: one.clone() for name, one in self.plain.state_dict().items()}
        other = {name: self.moved(one) for name, one in own.items()}
        kind = self.draw.randrange(4)
        if kind == 0:
            return own
        if kind == 1:
            return other
        chosen = {name: (own if self.draw.random() < 0.8 else other)[name] for name in own}
        return chosen if kind == 2 else {name: one for name, one in chosen.items() if self.draw.random() < 0.7}

    def parameter(self, model: Any, name: str) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.plain.get_submodule(name).weight.detach() * 2, requires_grad=False)

    def written(self, layer: Any, value: float, where: str) -> None:
        with torch.no_grad():
            if where == "weight":
                layer.weight.mul_(value)
            elif where == "data":
                layer.weight.data = layer.weight.data * value
            elif where == "row":
                layer.weight[0].fill_(value)
            else:
                layer.state_dict()["weight"].add_(value)

    def merged(self, model: Any) -> None:
        for name, one in list(model.named_modules()):
            if isinstance(one, Adapter):
                first, _, last = name.rpartition(".")
                setattr(model.get_submodule(first), last, one.merged())
                return

    def saved(self, model: Any, state: Any) -> dict[str, bytes]:
        """The tensors in a file of the model."""
        draw = random.Random()
        draw.setstate(state)
        path = self.folder / "saved"
        match draw.randrange(4):
            case 0:
                buffer = io.BytesIO()
                torch.save(model.state_dict(), buffer)
                buffer.seek(0)
                return raw_of(torch.load(buffer))
            case 1:
                safetensors.torch.save_model(model, str(path))
                return raw_of(safetensors.torch.load_file(path))
            case 2:
                tpde.torch.save_file(model, path, replace=True)
                return raw_of(tpde.torch.load_file(path))
            case _:
                return raw_of(pickle.loads(pickle.dumps(copy.deepcopy(model.state_dict()))))


def test_programs(tmp_path: Path) -> None:
    done: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    steps = 0
    for seed in range(PROGRAMS):
        program = Program(seed, tmp_path)
        try:
            program.check()
            for _ in range(8):
                if not program.step():
                    break
                program.check()
        except BaseException:
            print(f"program {seed}: {program.steps}")
            raise
        steps += len(program.steps)
        done += program.done
        refused += program.refused
    print(f"{PROGRAMS} programs, {steps} steps; done: {dict(done)}; refused: {dict(refused)}")
    assert len(done) > 8 and len(refused) > 5
