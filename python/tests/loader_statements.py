"""Statements of random weight loaders: views of tensors, and what loaders do with them. See :mod:`loader_programs`."""

from __future__ import annotations

import copy as copying
import ctypes
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from loaders import INTEGERS

if TYPE_CHECKING:
    from loader_programs import Program

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


#: Operators with the names of PyTorch's that do something else.
NAMESAKES = torch.library.Library("tpde_named", "DEF")
for schema, function in {
    "clone(Tensor x) -> Tensor": lambda x: x + x,
    "slice(Tensor x) -> Tensor": lambda x: x + x,
    "new_zeros(Tensor x) -> Tensor": lambda x: x + x,
    "detach(Tensor(a) x) -> Tensor(a)": lambda x: x + x,
    "copy_(Tensor(a!) to, Tensor x) -> Tensor(a!)": lambda to, x: to.copy_(x + x),
    "zero_(Tensor(a!) to) -> ()": lambda to: (to.add_(to), None)[1],
}.items():
    NAMESAKES.define(schema)
    NAMESAKES.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def in_thread(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a function that another thread calls."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


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

    def with_constants(v: torch.Tensor) -> torch.Tensor:
        memory = v.clone()
        memory.view(-1)[:2].copy_(torch.ones(2, dtype=v.dtype))
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
        (with_constants, (one,)),
    ]
    function, operands = way = self.random.choice(ways)
    self.is_by_tensor &= ways.index(way) not in (9, 10)  # constants, made when a tensor is given
    make = bound(function, *operands)
    needs = self.needed(*operands)
    self.append(kind, given, needs, lambda run: run.temporary.__setitem__(name, make(run)))
    self.needs[name] = needs


def unseen(self: Program, given: str | None, kind: str) -> None:
    """A tensor that is made out of sight."""
    values = self.expression(given)
    name = f"t{len(self.run.temporary)}"
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda v: in_thread(lambda: v + v),
        lambda v: in_thread(v.clone),
        lambda v: pickle.loads(pickle.dumps(v)),
        lambda v: copying.copy(v),
        lambda v: in_thread(lambda: v + v) + 1,
        lambda v: copying.deepcopy(v),
    ]
    make, needs = bound(self.random.choice(ways), values), self.needed(values)
    self.append(kind, given, needs, lambda run: run.temporary.__setitem__(name, make(run)))
    self.needs[name] = needs


def namesake(self: Program, given: str | None, kind: str) -> None:
    """Operators with the names of others, and with memory for their result."""
    values, own = self.expression(given), torch.ops.tpde_named
    to = self.place(tuple(values(self.run).shape), values(self.run).dtype)
    ways: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda p, v: p.copy_(own.clone(v)),
        lambda p, v: p.copy_(own.slice(v)),
        lambda p, v: p.copy_(own.new_zeros(v)),
        lambda p, v: p.copy_(own.detach(v)),
        lambda p, v: own.copy_(p, v),
        lambda p, v: (p.copy_(v), own.zero_(p)),
        lambda p, v: torch.ops.aten.clone.out(v, out=p),
        lambda p, v: torch.ops.aten.full_like.out(v, 3, out=p),
    ]
    self.append(kind, given, self.needed(values), bound(self.random.choice(ways), to, values))


def read_bytes(self: Program, given: str | None, kind: str) -> None:
    """Bytes of a parameter, which PyTorch does not see being read."""
    if self.specs:
        name = self.random.choice([*self.specs])
        to = self.place((1,), self.run[name].dtype)
        ways: list[Callable[[torch.Tensor], int]] = [
            lambda v: pickle.dumps(v)[-30] % 100,
            lambda v: ctypes.string_at(v.data_ptr(), 1)[0] % 100,
            lambda v: v.untyped_storage()[0] % 100,
        ]
        read = self.random.choice(ways)
        self.append(kind, given, (), bound(lambda p, v: p.fill_(read(v)), to, Expression(name)))


def repoint(self: Program, given: str | None, kind: str) -> None:
    """Memory of a parameter that is replaced, by a part of the same one too."""
    if self.specs and given is None:
        name = self.random.choice([*self.specs])
        view = random_view(self.random, self.run[name])

        def replace(run: Run) -> None:
            run.parameters[name].data = view(run.parameters[name].data)

        self.append(kind, given, (), replace)


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


#: Where loaders keep tensors out of reach.
KEPT: list[torch.Tensor] = []


def attribute(self: Program, given: str | None, kind: str) -> None:
    values = self.expression(given)
    needs = self.needed(values)
    way = self.random.randrange(8)
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
    elif way == 5 and self.specs:
        name = self.random.choice([*self.specs])
        self.append(kind, given, needs, lambda run: setattr(run.parameters[name], "scale", values(run)))
    elif way == 6:
        self.append(kind, given, needs, lambda run: KEPT.append(values(run)))
    else:
        to = self.place((1,), torch.float32)
        self.append(kind, given, (), lambda run: to(run).copy_(run.holder.running[:1]))


def of_source(self: Program, given: str | None, kind: str) -> None:
    """Writes to a tensor of the checkpoint."""
    if given is not None:
        view = random_view(self.random, self.run[given])
        ways: list[Callable[[torch.Tensor], Any]] = [
            lambda w: view(w).zero_(),
            lambda w: w.view(torch.uint8)[..., :1].zero_(),
            lambda w: view(w).copy_(view(w).flip(0)),
            lambda w: view(w).copy_(torch.ones(view(w).shape, dtype=w.dtype)),
            lambda w: w.__setitem__(0, torch.ones(w[0].shape, dtype=w.dtype)),
            lambda w: torch._foreach_copy_([view(w)], [torch.ones(view(w).shape, dtype=w.dtype)]),
        ]
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
    "of source": (0.4, of_source),
    "unseen": (0.4, unseen),
    "namesake": (0.3, namesake),
    "bytes": (0.2, read_bytes),
    "repoint": (0.1, repoint),
}
