"""Layers of `tpde.nn` under signals, and in several threads while models are attached, released and damaged.

`TPDE_STORM_CALLS` and `TPDE_STORM_FORWARDS` set the length; a release uses 100,000 and 10,000. In any case a storm ends after
`TPDE_STORM_SECONDS`.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tpde
from test_nn import TOKENS, Deep, deep, loaded, target_of  # noqa: F401 (a fixture)

torch = pytest.importorskip("torch")

import tpde.nn  # noqa: E402 (needs torch)
from fake_cuda import FakeModel, World, install  # noqa: E402
from points import at, marked  # noqa: E402
from tpde.nn import _operator, _rebuilt, _slot  # noqa: E402

CALLS = int(os.environ.get("TPDE_STORM_CALLS", "1000"))
FORWARDS = int(os.environ.get("TPDE_STORM_FORWARDS", "300"))
SECONDS = float(os.environ.get("TPDE_STORM_SECONDS", "inf"))


@pytest.fixture(autouse=True)
def modes_are_restored() -> Iterator[None]:
    """Restores modes: a signal between lines of PyTorch's own code may leave a mode as it was inside a ``with`` block."""
    with torch.inference_mode(False):
        before = torch.is_grad_enabled()
        yield
        torch.set_grad_enabled(before)


class Signalled(Exception):
    """The exception that the handler raises."""


class Storm:
    """Sends one signal after another. During a call, the handler raises, or calls ``beneath``."""

    def __init__(self, seconds: float, beneath: Any = None) -> None:
        self.seconds, self.beneath = seconds, beneath
        self.random = random.Random(0)
        self.is_armed = False
        self.calls = self.interrupted = 0

    def handler(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.random.uniform(self.seconds / 10, self.seconds))
        if not self.is_armed:
            return
        self.is_armed = False
        if self.beneath is None or self.random.random() < 0.5:
            raise Signalled
        self.beneath()

    def run(self, calls: int, call: Callable[[int], None]) -> None:
        before = signal.signal(signal.SIGALRM, self.handler)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        end = time.monotonic() + SECONDS
        while self.calls < calls and time.monotonic() < end:
            try:
                self.is_armed = True
                call(self.calls)
                self.is_armed = False
            except (Signalled, tpde.InvalidArgument) as error:
                assert isinstance(error, Signalled) or isinstance(error.__cause__, Signalled)
                self.interrupted += 1
            self.calls += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    def ended(self, wrong: list[str]) -> None:
        print(f"{self.calls} calls, {self.interrupted} interrupted, {len(wrong)} wrong")
        assert wrong == [] and self.interrupted > self.calls // 200


def under_signals(base: Deep, target: Deep, pair: Path, device: str) -> None:
    """Under signals, each layer's output is that of the target, also for a call made by a signal handler during another call."""
    attached = tpde.nn.attach(base, pair)
    names = list(attached.layers)
    inputs = {name: torch.randn(2, layer.in_features, dtype=torch.bfloat16).to(device) for name, layer in attached.layers.items()}
    wanted = {name: target.get_submodule(name)(x).detach() for name, x in inputs.items()}
    wrong: list[str] = []

    def compare(name: str) -> None:
        with torch.no_grad():
            y = attached.layers[name](inputs[name])
        if not torch.equal(y, wanted[name]):
            wrong.append(name)

    storm = Storm(2e-3, lambda: compare(names[3]))
    storm.run(CALLS, lambda n: compare(names[n % len(names)]))
    attached.check()
    storm.ended(wrong)


def test_signals_on_the_cpu(deep: tuple[Deep, Deep, Path]) -> None:
    under_signals(*deep, "cpu")


@pytest.mark.parametrize("beneath", [False, True])
def test_a_signal_at_every_point_of_a_call(beneath: bool, deep: tuple[Deep, Deep, Path]) -> None:
    base, target, pair = deep
    layers = {name: layer for name, layer in tpde.nn.attach(base, pair).layers.items() if "blocks.0" in name or name == "twin"}
    x = {name: torch.randn(2, layer.in_features, dtype=torch.bfloat16) for name, layer in layers.items()}
    wanted = {name: target.get_submodule(name)(x[name]).detach() for name in layers}
    reached: list[str] = []

    def compare(name: str) -> None:
        assert torch.equal(layers[name](x[name]), wanted[name])

    def handler() -> None:
        reached.append("")
        if not beneath:
            raise Signalled
        compare("blocks.0.down")

    with torch.no_grad(), marked(_rebuilt, _slot, _operator):
        for number in itertools.count(1):
            before = len(reached)
            try:
                with at(number, handler):
                    compare("twin")
            except Signalled:
                pass
            if len(reached) == before:
                break
            for name in layers:
                compare(name)
    assert len(reached) > 20


def test_signals_with_a_prefetcher(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    device = install(world, monkeypatch)
    model = FakeModel(world, device, "m", [1, 2, 3, 8], [True, False, True, False])
    draw = random.Random(1)
    storm = Storm(1e-3)
    storm.run(CALLS, lambda n: model.forward(draw.choice(model.weights) if n % 3 else model.weights[n % 4]))
    world.close()
    storm.ended(world.violations)


def soak(folder: Path, device: str, forwards: int) -> None:
    """Three models in three threads share one base. Each is attached, released, traced, damaged and restored while the others run.
    Programs exported earlier use the weights of these models."""
    wrong: list[str] = []
    raised, raised_by_programs, unseen = [0, 0, 0], [0, 0, 0], [0, 0, 0]
    base, tokens = Deep(), TOKENS.to(device)

    def attached_to(pair: Path) -> tuple[Deep, tpde.nn.Attached]:
        model = Deep().requires_grad_(False)
        model.load_state_dict(base.state_dict())
        return model, tpde.nn.attach(model.to(device), pair)

    pairs, targets, exported = [], [], []
    for number in range(3):
        torch.manual_seed(number)
        target = target_of(base)
        target["blocks.0.norm.bias"] = target["blocks.0.norm.bias"] + number
        target["blocks.2.down.weight"] = target["blocks.2.down.weight"] + number + 1
        tpde.torch.save_file(target, folder / str(number), base=base, codec="conditioned", chunk_lanes=4096)
        pairs.append(folder / str(number))
        targets.append(loaded(target, device))
        # PyTorch cannot export while other threads call modules, so programs are exported first.
        exported.append(torch.export.export(attached_to(pairs[number])[0], (tokens,)).module())
    gc.collect()
    tracing = threading.Lock()

    def work(number: int) -> None:
        draw = random.Random(number)
        with torch.no_grad():
            wanted = targets[number](tokens)
            attached = None
            for turn in range(forwards // 3):
                if attached is None or draw.random() < 0.02:
                    model, attached = attached_to(pairs[number])
                    program = None  # a traced program keeps its model alive
                if draw.random() < 0.05:
                    attached.release()
                if draw.random() < 0.03:
                    with tracing:
                        program = traced(model, tokens)
                call = draw.choice([model, exported[number], program or model])
                damaged = draw.choice(list(attached.layers)) if draw.random() < 0.05 else None
                weight = None if damaged is None else attached.layers[damaged]._weight.bases[0]
                if weight is not None:
                    weight.view(torch.int16)[0, 0] ^= 1
                try:
                    y = call(tokens)
                    attached.check()
                    # A weight that was rebuilt before the damage is still right.
                    unseen[number] += damaged is not None
                    if not torch.equal(y, wanted):
                        wrong.append(f"model {number}, turn {turn}, damaged: {damaged}, by the model: {call is model}")
                except (tpde.TpdeError, RuntimeError) as error:
                    # The interpreter of traced programs raises its own error, which quotes ours.
                    is_ours = isinstance(error, tpde.TpdeError) or re.search(r"\b(WrongBase|Invalid): ", str(error))
                    if damaged is None or not is_ours:
                        wrong.append(f"model {number}, turn {turn}: {error}")
                    (raised if call is model else raised_by_programs)[number] += 1
                if weight is not None:
                    weight.view(torch.int16)[0, 0] ^= 1
                    settle(attached)

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            wrong.append(repr(error))
            raise

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(3)]
    # The fused operators of TorchScript round differently, for plain models too.
    fuses = torch._C._jit_texpr_fuser_enabled()
    torch._C._jit_set_texpr_fuser_enabled(False)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch._C._jit_set_texpr_fuser_enabled(fuses)
    found = f"{sum(raised)} faults raised by models and {sum(raised_by_programs)} by programs, {sum(unseen)} without effect"
    print(f"{forwards} forwards, {found}, {len(wrong)} wrong")
    assert wrong == [] and any(raised) and any(raised_by_programs) and all(map(sum, zip(raised, raised_by_programs)))
    assert 20 * sum(unseen) <= sum(raised) + sum(raised_by_programs)


def traced(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Traces the model. The program contains its layers as operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Callable[[torch.Tensor], torch.Tensor] = torch.jit.trace(lambda tokens: model(tokens), (tokens,), check_trace=False)
    return made


def settle(attached: tpde.nn.Attached) -> None:
    """Repeats until the errors of all damaged decodings were raised, and no damaged weight is left in scratch memory."""
    for step in (attached.check, attached.release):
        for _ in range(100):
            try:
                step()
                break
            except tpde.TpdeError:
                continue


def test_three_models_in_three_threads(tmp_path: Path) -> None:
    soak(tmp_path, "cpu", FORWARDS)
