"""Random loaders: chains of views of tensors and parameters, recorded, and compared with loading real tensors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import loader_programs  # noqa: E402 (needs torch)
import loaders  # noqa: E402

import tpde.slices  # noqa: E402
import tpde.torch  # noqa: E402

View = Callable[[Any], Any]


def random_view(source: random.Random, shape: tuple[int, ...]) -> tuple[View, tuple[int, ...]]:
    """A view of a tensor of this shape, and its shape."""
    dim = source.randrange(len(shape))
    size = shape[dim]
    kind = source.choice(
        ["narrow", "narrow", "slice", "chunk", "transpose", "select", "split dim", "join dims", "unsqueeze", "copy"]
    )
    if kind == "narrow" and size > 1:
        start = source.randrange(size)
        length = source.randint(1, size - start)
        return lambda w: w.narrow(dim, start, length), (*shape[:dim], length, *shape[dim + 1 :])
    if kind == "slice" and size > 1:
        stop, step = source.randint(1, size), source.choice([1, 1, 1, 2])
        index = (slice(None),) * dim + (slice(0, stop, step),)
        return lambda w: w[index], (*shape[:dim], -(-stop // step), *shape[dim + 1 :])
    if kind == "chunk" and size % 2 == 0:
        half = source.randrange(2)
        return lambda w: w.chunk(2, dim)[half], (*shape[:dim], size // 2, *shape[dim + 1 :])
    if kind == "transpose" and len(shape) > 1:
        other = source.randrange(len(shape))
        swapped = [*shape]
        swapped[dim], swapped[other] = swapped[other], swapped[dim]
        return lambda w: w.transpose(dim, other), tuple(swapped)
    if kind == "select" and len(shape) > 1:
        at = source.randrange(size)
        return lambda w: w.select(dim, at), (*shape[:dim], *shape[dim + 1 :])
    if kind == "split dim" and size % 2 == 0 and len(shape) < 4:
        parts = (2, size // 2) if source.random() < 0.5 else (size // 2, 2)
        return lambda w: w.unflatten(dim, parts), (*shape[:dim], *parts, *shape[dim + 1 :])
    if kind == "join dims" and dim + 1 < len(shape):
        return lambda w: w.flatten(dim, dim + 1), (*shape[:dim], size * shape[dim + 1], *shape[dim + 2 :])
    if kind == "unsqueeze" and len(shape) < 4:
        return lambda w: w.unsqueeze(dim), (*shape[:dim], 1, *shape[dim:])
    if kind == "copy":
        return lambda w: w.contiguous().clone(), shape
    return lambda w: w, shape


class RandomModel(loaders.Model):
    """One parameter per tensor, of which a part is written."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__(0, 1)
        source = random.Random(seed)
        self.shapes: loaders.Shapes = {}
        for number in range(count):
            name = f"{number:03}"
            shape = tuple(source.randint(1, 8) for _ in range(source.randint(1, 3)))
            self.shapes[name] = shape, source.choice([loaders.BF16, loaders.F32, loaders.FP8])
            views: list[View] = []
            for _ in range(source.randrange(6)):
                view, shape = random_view(source, shape)
                views.append(view)
            before = [source.choice([0, 0, 1, 2]) for _ in shape]
            after = [source.choice([0, 0, 1, 2]) for _ in shape]
            whole = tuple(size + a + b for size, a, b in zip(shape, before, after))
            order = [*range(len(whole))]
            if source.random() < 0.2:  # a parameter whose memory is in another order
                source.shuffle(order)
            memory = torch.empty([whole[dim] for dim in order], dtype=self.shapes[name][1])
            parameter = memory.permute([order.index(dim) for dim in range(len(order))])
            parameter.view(loaders.INTEGERS[parameter.element_size()]).fill_(5)
            self.parameters[f"{number}.p"] = parameter
            index = tuple(slice(a, a + size) for a, size in zip(before, shape))
            self.loaders[name] = self.loader(parameter, index, views)

    def loader(self, parameter: Any, index: Any, views: list[View]) -> Callable[[Any], None]:
        def load(weight: Any) -> None:
            for view in views:
                weight = view(weight)
            parameter[index] = weight

        return load


@pytest.mark.parametrize("seed", range(8))
def test_random_loaders(seed: int, tmp_path: Path) -> None:
    count = 60
    model, expected = RandomModel(seed, count), RandomModel(seed, count)
    base = loaders.random_weights(model.shapes, seed)
    target = loaders.changed(base, seed + 100, 0.3)
    model.load_weights(base.items())
    before = {name: parameter.clone() for name, parameter in model.parameters.items()}
    found = tpde.slices.record(model.load_weights, base, model.parameters)
    for name, parameter in model.parameters.items():
        integers = loaders.INTEGERS[parameter.element_size()]
        assert torch.equal(parameter.view(integers), before[name].view(integers))

    # Elements that are not listed as missing are written, and no others are.
    for name, parameter in expected.parameters.items():
        integers = loaders.INTEGERS[parameter.element_size()]
        if name not in found.refused:
            written = torch.ones(parameter.shape, dtype=torch.bool)
            for one in found.missing:
                if one.parameter == name:
                    written[one.index] = False
            expected.loaders[f"{int(name[:-2]):03}"](torch.zeros(model.shapes[f"{int(name[:-2]):03}"][0], dtype=parameter.dtype))
            assert torch.equal(written, parameter.view(integers) == 0), name

    kept = found.keep(base)
    pair = tmp_path / "pair"
    tpde.torch.save_file(tpde.slices.cut(target, [found.rectangles(kept)]), pair, base=base)
    report = tpde.slices.apply_(found, pair, kept=kept, reload=model.load_weights)
    assert report.outcome == "applied" and report.patched > count / 3 and report.reloaded == kept.modules
    expected.load_weights(target.items())
    for name, parameter in expected.parameters.items():
        integers = loaders.INTEGERS[parameter.element_size()]
        assert torch.equal(model.parameters[name].view(integers), parameter.view(integers)), name


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_programs(first: int) -> None:
    """A map is equal to executing the loader, or says that it is not."""
    results = Counter(loader_programs.check(loader_programs.Program(seed)) for seed in range(first, first + 100))
    assert results["followed"] > 5 and results["kept"] > 5, results


@pytest.mark.parametrize("seed", range(40, 60))
def test_random_programs_by_pairs(seed: int, tmp_path: Path) -> None:
    """The same with a pair that is made for the map."""
    program = loader_programs.Program(seed)
    live, fresh = program.parameters(), program.parameters()
    loads = [program.loader(one, loader_programs.Holder(one)) for one in (live, fresh)]
    loads[0](loader_programs.copies(program.base).items())
    loads[1](loader_programs.copies(program.target).items())
    try:
        found = tpde.slices.record(loads[0], program.base, live)
        found.check(missing="*")
    except tpde.NotRecorded:
        return
    cut = tpde.slices.cut(program.target, [found.rectangles()])
    tpde.torch.save_file(cut, tmp_path / "pair", base=program.base)
    tpde.slices.check(found, tmp_path / "pair")
    tpde.slices.apply_(found, tmp_path / "pair")
    assert all(loader_programs.same_bits(live[name], fresh[name]) for name in live)
