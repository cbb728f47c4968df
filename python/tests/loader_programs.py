"""Random weight loaders, as programs of statements, to compare their maps with executing them.

A program is made by executing it on small tensors, so every statement is valid. It has what loaders of engines do: views of tensors and
of parameters, parts fused in one parameter, padding, tied and derived parameters, temporary tensors, operations in place, operators
that return nothing, other dtypes of the same memory, branches on values, attributes. Run this file for many programs:
``python loader_programs.py FIRST COUNT``.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from loaders import INTEGERS, changed

import tpde
import tpde.slices

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.int32]
Tensors = dict[str, torch.Tensor]


@torch.library.custom_op("tpde_test::write", mutates_args=("to",))
def write(to: torch.Tensor, values: torch.Tensor) -> None:
    to.copy_(values)


@torch.library.custom_op("tpde_test::write_all", mutates_args=("to",))
def write_all(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for one, other in zip(to, values):
        one.copy_(other)


@torch.library.custom_op("tpde_test::doubled", mutates_args=())
def doubled(values: torch.Tensor) -> torch.Tensor:
    return values + values


@doubled.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


@dataclass
class Run:
    """Names that a program can use while it is executed."""

    parameters: Tensors
    holder: Any
    tensors: Tensors = field(default_factory=dict)
    temporary: Tensors = field(default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        kind = {"w": self.tensors, "p": self.parameters, "t": self.temporary}[name[0]]
        return kind[name] if name[0] != "p" else kind[name].data


@dataclass(frozen=True)
class Expression:
    """A name, and views of it."""

    name: str
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def __call__(self, run: Run) -> torch.Tensor:
        value = run[self.name]
        for view in self.views:
            value = view(value)
        return value


Statement = Callable[[Run], Any]


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


def random_view(source: random.Random, tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A view of a tensor."""
    shape = tuple(tensor.shape)
    if not shape:
        return lambda w: w.unsqueeze(0)
    dim = source.randrange(len(shape))
    size = shape[dim]
    kind = source.choice(VIEWS_OF)
    if kind == "narrow" and size > 1:
        start = source.randrange(size)
        length = source.randint(1, size - start)
        return lambda w: w.narrow(dim, start, length)
    if kind == "slice" and size > 1:
        index = (slice(None),) * dim + (slice(source.randint(0, 1), source.randint(2, size), source.choice([1, 1, 1, 2])),)
        return lambda w: w[index]
    if kind == "half" and size % 2 == 0:
        half = source.randrange(2)
        return lambda w: w.split(size // 2, dim)[half] if half else w.chunk(2, dim)[0]
    if kind == "transpose" and len(shape) > 1:
        other = source.randrange(len(shape))
        return lambda w: w.transpose(dim, other)
    if kind == "select":
        at = source.randrange(size)
        return lambda w: w.select(dim, at) if at else w.unbind(dim)[0]
    if kind == "unflatten" and size % 2 == 0 and len(shape) < 4:
        return lambda w: w.unflatten(dim, (2, size // 2))
    if kind == "flatten" and dim + 1 < len(shape):
        return lambda w: w.flatten(dim, dim + 1)
    if kind == "reshape":
        return lambda w: w.reshape(-1)
    if kind == "unsqueeze" and len(shape) < 4:
        return lambda w: w.unsqueeze(dim)
    if kind == "strided" and tensor.numel() > 1:
        return lambda w: w.as_strided((w.numel() // 2,), (1,), w.storage_offset())
    simple = {
        "clone": lambda w: w.clone(),
        "contiguous": lambda w: w.contiguous(),
        "detach": lambda w: w.detach().data,
        "to": lambda w: w.to("cpu", w.dtype, copy=True),
        "integers": lambda w: w.view(INTEGERS[w.element_size()]),
        "bytes": lambda w: w.view(torch.uint8),
        "expand": lambda w: w.expand(2, *w.shape),
        "flip": lambda w: w.flip(0),
        "deep": lambda w: torch.empty_like(w).copy_(w),
        "squeeze": lambda w: w.squeeze(),
    }
    return simple.get(kind, lambda w: w)


VIEWS_OF = (
    "narrow narrow narrow slice slice half half transpose select unflatten flatten reshape unsqueeze clone contiguous detach to squeeze "
    "narrow slice half transpose select strided integers bytes expand flip deep"
).split()


def bound(function: Callable[..., Any], *expressions: Expression) -> Statement:
    """A statement that calls a function with the values of expressions."""
    return lambda run: function(*(one(run) for one in expressions))


# Kinds of statements. Each one appends a statement to the program.


def copy(self: Program, given: str | None, kind: str) -> None:
    values = self.expression(given, parameters=0.1)
    found = values(self.run)
    to = self.place(tuple(found.shape), found.dtype)
    form = self.random.randrange(3)
    assign = (lambda p, v: p.copy_(v), lambda p, v: p.__setitem__(..., v), lambda p, v: torch.Tensor.copy_(p, v))[form]
    self.append(kind, given, self.needed(values, to), bound(assign, to, values))


def fuse(self: Program, given: str | None, kind: str) -> None:
    """Rows of several tensors in one parameter."""
    parts = [self.expression(given) for _ in range(self.random.randint(2, 3))]
    parts = [one for one in parts if one(self.run).dim() > 0 and one(self.run).shape[1:] == parts[0](self.run).shape[1:]]
    parts = [one for one in parts if one(self.run).dtype == parts[0](self.run).dtype]
    rows = [one(self.run).shape[0] for one in parts]
    name = self.new_parameter((sum(rows) + self.random.choice([0, 0, 1]), *parts[0](self.run).shape[1:]), parts[0](self.run).dtype)
    at = 0
    for part, count in zip(parts, rows):
        to = Expression(name, (lambda p, at=at, count=count: p.narrow(0, at, count),))
        self.append(kind, given, self.needed(part), bound(lambda p, v: p.copy_(v), to, part))
        at += count
    if at < self.specs[name][0][0]:
        self.append(kind, given, (), bound(lambda p: p.zero_(), Expression(name, (lambda p, at=at: p[at:],))))


def between(self: Program, given: str | None, kind: str) -> None:
    """From parameter to parameter."""
    if self.specs:
        values = self.expression(given, parameters=1.0)
        to = self.place(tuple(values(self.run).shape), values(self.run).dtype)
        self.append(kind, given, self.needed(values), bound(lambda p, v: p.copy_(v), to, values))


def fill(self: Program, given: str | None, kind: str) -> None:
    if not self.specs:
        return
    to = Expression(self.random.choice([*self.specs]))
    for _ in range(self.random.randint(0, 2)):
        to = Expression(to.name, (*to.views, random_view(self.random, to(self.run))))
    ways = [
        lambda p: p.zero_(),
        lambda p: p.fill_(3),
        lambda p: p.__setitem__(..., 2),
        lambda p: p.copy_(torch.full_like(p, 4)),
        lambda p: p.copy_(torch.ones(p.shape, dtype=p.dtype)),
        lambda p: torch._foreach_zero_([p]),
    ]
    self.append(kind, given, (), bound(self.random.choice(ways), to))


def temporary(self: Program, given: str | None, kind: str) -> None:
    one, other = self.expression(given), self.expression(given)
    name = f"t{len(self.run.temporary)}"

    def assembled(v: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros((2, *v.shape), dtype=v.dtype)
        memory[0] = v
        return memory

    ways: list[tuple[Callable[..., Any], tuple[Expression, ...]]] = [
        (lambda v: v, (one,)),
        (lambda v: v, (one,)),
        (lambda v: v.clone(), (one,)),
        (lambda v: v.contiguous(), (one,)),
        (lambda v: torch.stack([v, v]), (one,)),
        (lambda v, u: torch.cat([v, u]), (one, other)),
        (lambda v: v * 2, (one,)),
        (lambda v: v.to(torch.float64).to(v.dtype), (one,)),
        (assembled, (one,)),
        (lambda v: torch.zeros_like(v), (one,)),
        (lambda v: v.new_ones(v.shape), (one,)),
        (lambda v: doubled(v), (one,)),
    ]
    function, operands = way = self.random.choice(ways)
    self.is_by_tensor &= ways.index(way) not in (9, 10)  # constants, made when a tensor is given
    make = bound(function, *operands)
    needs = self.needed(*operands)
    self.append(kind, given, needs, lambda run: run.temporary.__setitem__(name, make(run)))
    self.needs[name] = needs


def in_place(self: Program, given: str | None, kind: str) -> None:
    if self.specs:
        to = Expression(self.random.choice([*self.specs]))
        to = Expression(to.name, (random_view(self.random, to(self.run)),))
        ways = [lambda p: p.mul_(2), lambda p: p.add_(1), lambda p: p.add_(p), lambda p: torch._foreach_add_([p], 1)]
        self.append(kind, given, (), bound(self.random.choice(ways), to))


def foreach(self: Program, given: str | None, kind: str) -> None:
    values = [self.expression(given) for _ in range(self.random.randint(1, 3))]
    to = [self.place(tuple(one(self.run).shape), one(self.run).dtype) for one in values]
    copy_all = self.random.choice([torch._foreach_copy_, torch._foreach_copy_, write_all])
    self.is_by_tensor &= len({one.name for one in values}) == 1
    statement: Statement = lambda run: copy_all([one(run) for one in to], [one(run) for one in values])  # noqa: E731
    self.append(kind, given, self.needed(*values), statement)


def operator(self: Program, given: str | None, kind: str) -> None:
    values = self.expression(given)
    to = self.place(tuple(values(self.run).shape), values(self.run).dtype)
    self.append(kind, given, self.needed(values), bound(write, to, values))


def derive(self: Program, given: str | None, kind: str) -> None:
    values = self.expression(given, parameters=0.6)
    ways = [
        lambda p, v: p.copy_(v.amax()),
        lambda p, v: p.fill_(v.amax()),
        lambda p, v: p.copy_(v.reshape(-1)[0] + v.reshape(-1)[-1]),
        lambda p, v: torch.add(v.amax(), 1, out=p),
    ]
    to = self.place((), values(self.run).dtype)
    self.append(kind, given, self.needed(values), bound(self.random.choice(ways), to, values))


def branch(self: Program, given: str | None, kind: str) -> None:
    """Reads values, and may catch the error that this is."""
    values = self.expression(given, parameters=0.5)
    to = self.place((1,), values(self.run).dtype)

    def caught(p: torch.Tensor, v: torch.Tensor) -> None:
        try:
            p.fill_(v.reshape(-1)[0].item())
        except Exception:
            p.fill_(1)

    def listed(p: torch.Tensor, v: torch.Tensor) -> None:
        try:
            p.fill_(v.view(torch.uint8).tolist().count(5))
        except Exception:
            p.fill_(1)

    def array(p: torch.Tensor, v: torch.Tensor) -> None:
        try:
            p.fill_(int(v.contiguous().view(torch.uint8).numpy().sum() % 100))
        except Exception:
            p.fill_(1)

    ways = [caught, listed, array, lambda p, v: p.fill_(1) if v.view(torch.uint8).sum() > 100 else p.fill_(2)]
    self.append(kind, given, self.needed(values), bound(self.random.choice(ways), to, values))


def attribute(self: Program, given: str | None, kind: str) -> None:
    values = self.expression(given)
    needs = self.needed(values)
    way = self.random.randrange(6)
    if way == 0:
        self.append(kind, given, needs, lambda run: setattr(run.holder, "scale", values(run)))
    elif way == 1:
        self.append(kind, given, needs, lambda run: run.holder.cache.__setitem__("new", values(run)))
    elif way == 2:
        self.append(kind, given, needs, lambda run: run.holder.history.append(values(run)))
    elif way == 3:
        self.append(kind, given, needs, lambda run: run.holder.running[:1].copy_(values(run).reshape(-1)[:1]))
    elif way == 4:
        self.append(kind, given, needs, lambda run: setattr(run.holder, "running", values(run)))
    else:
        to = self.place((1,), torch.float32)
        self.append(kind, given, (), lambda run: to(run).copy_(run.holder.running[:1]))


def of_source(self: Program, given: str | None, kind: str) -> None:
    """Writes to a tensor of the checkpoint."""
    if given is not None:
        view = random_view(self.random, self.run[given])
        ways = [lambda w: view(w).zero_(), lambda w: w.view(torch.uint8)[..., :1].zero_(), lambda w: view(w).copy_(view(w).flip(0))]
        way = self.random.choice(ways)
        self.append(kind, given, {given}, lambda run: way(run[given]))


KINDS: dict[str, tuple[float, Callable[[Program, str | None, str], None]]] = {
    "copy": (10, copy),
    "fuse": (3, fuse),
    "between": (5, between),
    "fill": (2, fill),
    "temporary": (2.5, temporary),
    "again": (1, lambda *_: None),
    "foreach": (1, foreach),
    "in place": (0.4, in_place),
    "operator": (0.3, operator),
    "derive": (0.7, derive),
    "branch": (0.3, branch),
    "attribute": (0.5, attribute),
    "of source": (0.3, of_source),
}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are the same."""
    return torch.equal(*(tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for tensor in (one, other)))


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
    except RuntimeError:
        return "not valid"
    before = copies(live)
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
