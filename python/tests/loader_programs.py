"""Random weight loaders, as programs of statements, to compare their maps with executing them.

A program is made by executing it on small tensors, so every statement is valid. It has what loaders of engines do: views of tensors and
of parameters, parts fused in one parameter, padding, tied and derived parameters, temporary tensors, operations in place, operators
that return nothing, other dtypes of the same memory, branches on values, attributes. Besides, what must not go unnoticed: constants
written to tensors of the checkpoint, tensors made out of sight, operators with the names of PyTorch's, reads of bytes, memory that is
replaced. Run this file for many programs:
``python loader_programs.py FIRST COUNT``.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from loader_statements import KEPT, KINDS, Expression, Run, Statement, Tensors, random_view
from loaders import INTEGERS, changed

import tpde
import tpde.slices

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.int32]


class Holder(torch.nn.Module):
    """A model with parameters and attributes."""

    def __init__(self, parameters: Tensors) -> None:
        super().__init__()
        self.scale = torch.ones(1)
        self.cache: dict[str, torch.Tensor] = {"old": torch.ones(2)}
        self.history: list[torch.Tensor] = []
        self.register_buffer("running", torch.ones(3), persistent=False)
        for name, parameter in parameters.items():
            self.register_buffer(name.replace(".", "_"), parameter)

    def state(self) -> list[Any]:
        """Tensors in attributes, which must be the same after recording."""
        return [self.scale, *self.cache.values(), *self.history, self.running]


class Program:
    """A loader. ``parameters`` makes new parameters, and ``loader`` the function that loads tensors to them."""

    def __init__(self, seed: int) -> None:
        self.random = source = random.Random(seed)
        self.seed = seed
        self.dtype = source.choice(DTYPES)
        self.base: Tensors = {}
        self.statements: list[tuple[str | None, set[str], Statement]] = []
        self.kinds: list[str] = []
        #: Whether each statement is executed if the tensors are given of which it has elements. Only these are loaded again.
        self.is_by_tensor = True
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]] = {}
        self.tied: dict[str, str] = {}
        self.needs: dict[str, set[str]] = {}
        generator = torch.Generator().manual_seed(seed)
        for number in range(source.randint(1, 4)):
            shape = tuple(source.randint(1, 6) for _ in range(source.choice([1, 2, 2, 2, 3])))
            dtype = self.dtype if source.random() < 0.95 else source.choice(DTYPES)
            bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
            self.base[f"w{number}"] = bits.view(dtype).reshape(shape)
        self.target = changed(self.base, seed + 1, 0.5)
        self.run = Run({}, Holder({}))
        rounds: list[str | None] = [*self.base, None]
        for given in rounds:
            if given is not None:
                self.run.tensors[given] = self.base[given].clone()
                self.needs[given] = {given}
            for _ in range(source.choice([0, 1, 1, 2, 3]) if given is None or source.random() < 0.2 else source.choice([1, 1, 2])):
                self.add(given)

    def add(self, given: str | None) -> None:
        """Adds a statement that is executed when a tensor is given, or at the end."""
        names = [*KINDS]
        kind = self.random.choices(names, [KINDS[name][0] for name in names])[0]
        if kind == "again":
            if self.statements:
                _, needs, statement = self.random.choice(self.statements)
                self.append(kind, given, needs, statement)
            return
        try:
            KINDS[kind][1](self, given, kind)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return  # not valid for these operands

    def append(self, kind: str, given: str | None, needs: Iterable[str], statement: Statement) -> None:
        """Executes a statement, and adds it."""
        statement(self.run)
        self.statements.append((given, set(needs), statement))
        self.is_by_tensor &= given is None or given in self.statements[-1][1]
        self.kinds.append(kind)

    def parameters(self, device: str = "cpu") -> Tensors:
        """New parameters."""
        made: Tensors = {}
        for name, (shape, dtype, order) in self.specs.items():
            if name in self.tied:
                made[name] = made[self.tied[name]]
                continue
            memory = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
            parameter = memory.permute([order.index(dim) for dim in range(len(order))])
            made[name] = parameter
            parameter.view(INTEGERS[parameter.element_size()]).fill_(5)
        return made

    def loader(self, parameters: Tensors, holder: Any) -> Callable[[Any], None]:
        """The function that loads tensors."""

        def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            run, have = Run(parameters, holder), set()

            def execute(given: str | None) -> None:
                for on, needs, statement in self.statements:
                    if on == given and needs <= have:
                        statement(run)

            for name, weight in weights:
                run.tensors[name] = weight
                have.add(name)
                execute(name)
            execute(None)

        return load

    # Operands.

    def new_parameter(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        source = self.random
        name = f"p.{len(self.specs)}" if source.random() < 0.3 else f"p{len(self.specs)}.w"
        order = [*range(len(shape))]
        if source.random() < 0.05:
            source.shuffle(order)
        self.specs[name] = shape, dtype, tuple(order)
        memory = torch.empty([shape[dim] for dim in order], dtype=dtype)
        parameter = memory.permute([order.index(dim) for dim in range(len(order))])
        parameter.view(INTEGERS[parameter.element_size()]).fill_(5)
        self.run.parameters[name] = parameter
        if source.random() < 0.05:
            other = f"p{len(self.specs)}.tied"
            self.specs[other], self.tied[other], self.run.parameters[other] = self.specs[name], name, parameter
        return name

    def expression(self, given: str | None, *, parameters: float = 0.35) -> Expression:
        """A random tensor, parameter or temporary tensor, and views of it."""
        source = self.random
        names = [*self.run.temporary]
        name = None
        if names and source.random() < 0.2:
            name = source.choice(names)
        elif self.specs and source.random() < parameters:
            name = source.choice([*self.specs])
        elif given is not None and source.random() < 0.85:
            name = given
        else:
            name = source.choice([*self.run.tensors])
        one = Expression(name)
        for _ in range(source.choice([0, 0, 1, 1, 2, 3])):
            one = Expression(one.name, (*one.views, random_view(source, one(self.run))))
            one(self.run)
        return one

    def needed(self, *expressions: Expression) -> set[str]:
        """Tensors that must have been given."""
        return set().union(*(self.needs.get(one.name, set()) for one in expressions))

    def place(self, shape: tuple[int, ...], dtype: torch.dtype) -> Expression:
        """Elements of a parameter, new or not, in this shape."""
        source = self.random
        count = torch.Size(shape).numel()
        fitting = [name for name, (of, own, _) in self.specs.items() if own == dtype and torch.Size(of).numel() >= count]
        if fitting and source.random() < 0.35:
            name = source.choice(fitting)
            memory = self.run[name]
            if tuple(memory.shape) == shape and source.random() < 0.5:
                return Expression(name)
            if memory.is_contiguous():
                start = source.randint(0, memory.numel() - count)
                if memory.dim() > 1 and source.random() < 0.8:
                    row = memory[0].numel()
                    start = min(start // row * row, memory.numel() - count)
                return Expression(name, (lambda p: p.view(-1)[start : start + count].view(shape),))
        padded = source.random() < 0.3
        before = [source.choice([0, 0, 0, 1]) * padded for _ in shape]
        after = [source.choice([0, 0, 0, 2]) * padded for _ in shape]
        name = self.new_parameter(tuple(size + a + b for size, a, b in zip(shape, before, after)), dtype)
        if not padded and source.random() < 0.7:
            return Expression(name)
        index = tuple(slice(a, a + size) for a, size in zip(before, shape))
        return Expression(name, (lambda p: p[index],))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are the same."""
    return torch.equal(*(tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for tensor in (one, other)))


def layouts_of(tensors: Tensors) -> list[Any]:
    """Where tensors are in their memory."""
    return [(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in tensors.values()]


def copies(tensors: Tensors) -> Tensors:
    """Copies, so that a loader may write what it gets."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def check(program: Program) -> str:
    """Compares the map of a program with executing it. Returns what became of it.

    Raises:
        AssertionError: The map is wrong, and nothing says so.
    """
    live, fresh, again = program.parameters(), program.parameters(), program.parameters()
    owners = {id(one): Holder(one) for one in (live, fresh, again)}
    loads = {id(one): program.loader(one, owners[id(one)]) for one in (live, fresh, again)}
    try:
        loads[id(live)](copies(program.base).items())
        loads[id(fresh)](copies(program.target).items())
        loads[id(again)](copies(program.base).items())
        loads[id(again)](copies(program.target).items())
    except (RuntimeError, IndexError):
        return "not valid"
    KEPT.clear()
    before, layouts = copies(live), layouts_of(live)
    state, running = owners[id(live)].state(), owners[id(live)].running.clone()
    how = program.random.choice(["dict", "module", "meta"])
    load, holder = loads[id(live)], owners[id(live)]
    try:
        if how == "meta":
            meta = program.parameters("meta")
            found = tpde.slices.record(program.loader(meta, Holder(meta)), program.base, meta).bind(live)
        else:
            owner = live if how == "dict" else holder
            found = tpde.slices.record(Method(holder, load).load_weights, program.base, owner)
    except tpde.NotRecorded:
        return "not recorded"
    finally:
        assert all(same_bits(live[name], before[name]) for name in live), "recording wrote a parameter"
        after = holder.state()
        assert all(any(one is other for other in after) for one in state), "recording removed an attribute"
        assert not any(one.is_meta for one in after), "recording left a tensor without data in an attribute"
        assert same_bits(holder.running, running), "recording wrote a buffer"
        assert layouts_of(live) == layouts, "recording replaced the memory of a parameter"
        of_parameters = [one for parameter in live.values() for one in vars(parameter).values()]
        assert not any(one.is_meta for one in of_parameters), "recording left a tensor without data in a parameter"
    named = {name.replace(".", "_") if how == "module" else name: name for name in live}
    values = {own: live[name] for own, name in named.items()}
    for piece in found.pieces:
        piece.memory(values[piece.parameter]).copy_(program.target[piece.tensor][piece.index])
    refused = {named[name] for name in found.refused if name in named}
    refused |= {named[other] for name in found.refused for other in found.tied.get(name, ())}
    for name in live:
        if name not in refused:
            assert same_bits(live[name], fresh[name]), f"parameter {name} differs from a fresh one"
    try:
        found.check(missing="*")
    except tpde.NotRecorded:
        pass
    else:
        assert not refused
        assert how == "meta" or not any(one.is_meta for one in KEPT), "a tensor is kept, and nothing says so"
        assert all(same_bits(live[name], again[name]) for name in live), "parameters differ from reloaded ones"
        return "followed" if found.pieces else "without pieces"
    if refused and program.is_by_tensor and all(same_bits(fresh[name], again[name]) for name in live):
        keep(program, found, load)
        for name in live:
            if name in refused:
                assert same_bits(live[name], fresh[name]), f"kept parameter {name} differs"
        return "kept"
    return "refused"


def keep(program: Program, found: tpde.slices.Map, load: Callable[[Any], None]) -> None:
    """Loads refused modules again."""
    kept = found.keep(program.base)
    for one in kept.slices:
        one.tensor.copy_(program.target[one.name][one.index])
    kept.reload(lambda weights: load((name, weight.clone()) for name, weight in weights))


@dataclass(frozen=True)
class Method:
    """An object whose method loads weights."""

    model: Any
    load: Callable[[Any], None]

    def load_weights(self, weights: Any) -> None:
        self.load(weights)


def main(first: int, count: int) -> None:
    results: Counter[str] = Counter()
    kinds: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for seed in range(first, first + count):
        program = Program(seed)
        try:
            result = check(program)
        except Exception as error:
            wrong += 1
            result = "WRONG"
            if wrong <= 20:
                print(f"seed {seed}: {type(error).__name__}: {str(error)[:200]} {program.kinds}", flush=True)
        results[result] += 1
        kinds.update((kind, result) for kind in set(program.kinds))
    print(count, dict(results))
    for kind in KINDS:
        print(f"  {kind:10}", {result: count for (one, result), count in sorted(kinds.items()) if one == kind})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]))
