"""Calls of an attached model as CUDA graphs, for ``attach(..., graph=True)``.

Two calls are of the same *kind* if their tensors have the same shapes, strides and dtypes, their other arguments are equal or the
same objects, and PyTorch's modes are the same. States of a kind:

    unknown ─ runs, and only memory of the device changes ─▶ tried ─ is captured and replayed ─▶ captured ─ is replayed ─▶ captured
    tried, captured ─ the model, or an object that is passed, has changed ─▶ unknown
    tried ─ the captured call would write to a tensor that is passed ─▶ refused

Every other call runs without a graph, which is as correct, and slower. The first call of a kind is its warm-up. No call runs
twice, so a static cache advances once per call.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Union

import torch
from torch import nn
from torch.nn.modules import module as _modules
from torch.utils import _pytree

from .._core.errors import InvalidArgument, TpdeError
from . import _operator
from ._capture import Graph
from ._fixed import ModelState, ObjectState, is_constant
from ._prefetch import Prefetcher

#: Maximum number of calls that are known of a model. Their graphs share memory, except that each has tensors for arguments and outputs.
MOST_CALLS = 16

#: Attribute of a model with its graphs.
_ATTRIBUTE = "_tpde_graphs"

_Forward = Callable[..., Any]
_Key = tuple[Any, ...]


class _Unfit(Exception):
    """A call that is not for a graph, with the reason."""


class _Call:
    """The arguments of a call."""

    def __init__(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves, self.spec = _pytree.tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self.objects = [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor) and not is_constant(leaf)]
        #: Equal for calls of the same kind.
        self.key: _Key = (self.spec, _modes(device), *(_described(leaf, device) for leaf in self.leaves))

    def with_tensors(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = _pytree.tree_unflatten(leaves, self.spec)
        return arguments

    def check_outputs(self, outputs: Any, device: torch.device) -> None:
        """Raises if a graph could not return these outputs of the call."""
        for leaf in _pytree.tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                _described(leaf, device)
            elif not is_constant(leaf) and not any(leaf is one for one in self.objects):
                raise _Unfit(f"it returns a {type(leaf).__name__} that it made")


def _described(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return (type(leaf), leaf) if is_constant(leaf) else (type(leaf), id(leaf))
    if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout is not torch.strided or leaf.is_nested:
        raise _Unfit(f"a tensor is a {type(leaf).__name__} of layout {leaf.layout}")
    if leaf.device != device:
        raise _Unfit(f"a tensor is on {leaf.device}, and the model on {device}")
    return leaf.dtype, leaf.shape, leaf.stride()


def _modes(device: torch.device) -> Any:
    """Modes of PyTorch that a captured call depends on. Raises if there is one for which no graph is captured."""
    if torch.is_grad_enabled():
        raise _Unfit("gradients are enabled: call the model under torch.no_grad()")
    if torch.is_autocast_enabled(device.type):
        raise _Unfit("autocast is enabled")
    with torch.cuda.device(device):
        is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        raise _Unfit("the current stream is being captured into another graph")
    if _operator.is_observed():
        raise _Unfit("a mode, transform or tracer of PyTorch is active")
    if _modules._global_forward_hooks or _modules._global_forward_pre_hooks:
        raise _Unfit("hooks are registered for all modules")
    defaults = torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()
    return torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(), defaults


class _Tried:
    """A call that ran without a graph, and after which one may be captured."""

    def __init__(self, call: _Call, model: nn.Module) -> None:
        try:
            # Objects are not kept: a cache is freed when its owner drops it. Their states have references to their tensors.
            self._objects = [weakref.ref(one, self._forget) for one in call.objects]
        except TypeError as error:
            raise _Unfit(f"an argument is of a type without weak references: {error}") from error
        self._states = [ObjectState(one) for one in call.objects]
        unknown = next((state.unknown for state in self._states if state.unknown is not None), None)
        if unknown is not None:
            raise _Unfit(f"an argument has a {unknown.__name__}, whose state is unknown")
        self._model = ModelState(model, _ATTRIBUTE)
        if self._model.has_hooks:
            raise _Unfit("modules within the model have hooks")

    def _forget(self, _: Any) -> None:
        self._states = []

    def is_dead(self) -> bool:
        """Whether an object of the call is gone."""
        return any(one() is None for one in self._objects)

    def holds(self) -> bool:
        """Whether model and objects are as they were."""
        return not self.is_dead() and all(state.holds() for state in self._states) and self._model.holds()


class _Passed(NamedTuple):
    """An output that is an argument, with its number among tensors and objects."""

    number: int


class _Captured:
    """A graph of a call, with memory for the tensors that are passed, and for its outputs."""

    def __init__(self, tried: _Tried, call: _Call) -> None:
        self.tried = tried
        with torch.inference_mode(mode=False), torch.no_grad():
            self._given = [torch.empty_like(tensor, requires_grad=False) for tensor in call.tensors]
        self._graph: Any = None
        self._outputs: list[Any] = []
        self._spec: Any = None
        #: What the graph refers to, with the errors of its weights.
        self._used: list[Graph] = []

    def capture(self, forward: _Forward, call: _Call, pool: Any, stream: torch.cuda.Stream) -> None:
        """Captures the call, which does not run."""
        args, kwargs = call.with_tensors(self._given)
        before, versions = set(Graph._kept), [tensor._version for tensor in self._given]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = forward(*args, **kwargs)
        self._graph = graph
        leaves, self._spec = _pytree.tree_flatten(outputs)
        # What was passed is returned as it is, and not kept.
        passed = {id(one): number for number, one in enumerate([*self._given, *call.objects])}
        self._outputs = [_Passed(passed[id(leaf)]) if id(leaf) in passed else leaf for leaf in leaves]
        self._used = [used for number, used in list(Graph._kept.items()) if number not in before]
        if versions != [tensor._version for tensor in self._given]:
            raise _Unfit("it writes to a tensor that is passed")

    def pool(self) -> Any:
        """Memory of the graph, for a further graph. It is valid while this one exists."""
        return self._graph.pool()

    def replay(self, call: _Call) -> Any:
        """Runs the graph on the current stream. Returns copies of its outputs."""
        for own, given in zip(self._given, call.tensors):
            own.copy_(given)
        self._graph.replay()
        passed = [*call.tensors, *call.objects]
        outputs = [passed[one.number] if isinstance(one, _Passed) else _copy(one) for one in self._outputs]
        return _pytree.tree_unflatten(outputs, self._spec)

    def check(self) -> None:
        """Raises an error of the last replay, which must have completed."""
        for used in self._used:
            used.raise_error()


def _tried_of(known: Union[_Tried, _Captured]) -> _Tried:
    return known.tried if isinstance(known, _Captured) else known


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class Graphs:
    """Graphs of a model. Its class is replaced by one whose ``forward`` calls :meth:`call`.

    Attributes:
        replays: Number of calls that were replays.
        reason: Why the last call ran without a graph. Empty after a replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.replays = 0
        self.reason = ""
        #: Calls by their keys. A string is the reason why no graph is captured.
        self._calls: dict[_Key, Union[_Tried, _Captured, str]] = {}
        self._alone = threading.Lock()
        self._model: weakref.ref[nn.Module] | None = None
        #: Stream of all captures.
        self._stream: torch.cuda.Stream | None = None
        #: The last replay whose errors were not looked for.
        self._last: _Captured | None = None
        #: Event behind the last replay, and handle of the stream. ``None`` instead of a handle while a replay is being queued.
        self._done: torch.cuda.Event | None = None
        self._done_on: int | None = None

    @classmethod
    def of(cls, model: nn.Module, devices: set[torch.device]) -> Graphs:
        """Graphs of a model whose layers are on these devices. Raises if its calls cannot be captured."""
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            found = ", ".join(sorted(map(str, devices))) or "no layer whose weight is rebuilt"
            raise InvalidArgument(f"graph=True: expected all layers on one CUDA device, found {found}")
        if "forward" in vars(model):
            raise InvalidArgument(
                "graph=True: expected the forward of the model's class, found one of the model, as accelerate sets it"
            )
        return cls(next(iter(devices)))

    def __deepcopy__(self, _: Any) -> Graphs:
        return Graphs(self.device)  # the copy of a model has other parameters

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return sum(isinstance(one, _Captured) for one in list(self._calls.values()))

    def install(self, model: nn.Module) -> None:
        """Makes calls of the model go through :meth:`call`. A deep copy of the model has graphs of its own."""
        owner: Any = type(model)
        plain = owner.forward

        @functools.wraps(plain)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain(self, *args, **kwargs)
            return getattr(self, _ATTRIBUTE).call(functools.partial(plain, self), self, args, kwargs)

        named = {"__module__": owner.__module__, "__qualname__": owner.__qualname__, "__doc__": owner.__doc__}
        model.__class__ = type(owner.__name__, (owner,), {**named, "forward": forward})
        setattr(model, _ATTRIBUTE, self)

    def call(self, forward: _Forward, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``forward`` of the model, or replays a graph of such a call."""
        if not self._alone.acquire(blocking=False):
            self.reason = "another call is running"
            return forward(*args, **kwargs)
        try:
            self._raise_last()
            try:
                self._check_model(model)
                call = _Call(self.device, args, kwargs)
                known = self._known(call)
                if known is None:
                    tried = _Tried(call, model)
                else:
                    captured = known if isinstance(known, _Captured) else self._capture(forward, call, known)
                    return self._replay(captured, call)
            except _Unfit as unfit:
                self.reason = str(unfit)
                return forward(*args, **kwargs)
            outputs = forward(*args, **kwargs)
            self.reason = self._note(call, tried, outputs)
            return outputs
        finally:
            self._alone.release()

    def _check_model(self, model: nn.Module) -> None:
        if self._model is None:
            self._model = weakref.ref(model)
        if self._model() is not model:
            raise _Unfit("the model is a shallow copy of the one that was attached")

    def release(self) -> None:
        """Drops all graphs, and raises an error of the last replay. Later calls are captured again."""
        if self._done is not None:
            torch.cuda.synchronize(self.device)
        self._calls = {}
        last, self._last = self._last, None
        if last is not None:
            last.check()

    def _known(self, call: _Call) -> Union[_Tried, _Captured, None]:
        """What is known of such calls, unless model or objects have changed."""
        known = self._calls.get(call.key)
        if isinstance(known, str):
            raise _Unfit(known)
        if known is not None and not _tried_of(known).holds():
            self._drop([call.key])
            return None
        if known is not None:
            self._calls[call.key] = self._calls.pop(call.key)  # the last one to be dropped
        return known

    def _note(self, call: _Call, tried: _Tried, outputs: Any) -> str:
        """Notes a call that ran without a graph. Returns the reason why it did."""
        if not tried.holds():
            return "it changed the model or an argument, and not only memory of the device"
        try:
            call.check_outputs(outputs, self.device)
        except _Unfit as unfit:
            return str(unfit)
        calls = list(self._calls.items())
        dead = [key for key, one in calls if not isinstance(one, str) and _tried_of(one).is_dead()]
        kept = [key for key, _ in calls if key not in dead]
        self._drop([*dead, *kept[: max(0, len(kept) + 1 - MOST_CALLS)]])
        self._calls[call.key] = tried
        return "it was the first call of its kind: the next one is captured"

    def _drop(self, keys: list[_Key]) -> None:
        if any(isinstance(self._calls.get(key), _Captured) for key in keys):
            torch.cuda.synchronize(self.device)  # a replay may still use the memory
        for key in keys:
            self._calls.pop(key, None)

    def _capture(self, forward: _Forward, call: _Call, tried: _Tried) -> _Captured:
        for prefetcher in Prefetcher.on(self.device):
            prefetcher.release()  # a graph has scratch memory of its own
        captured = _Captured(tried, call)
        try:
            with torch.cuda.device(self.device):
                if self._stream is None:
                    # Of high priority, so that decoding for later layers does not delay earlier ones.
                    self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
                # Graphs share memory: one at a time runs.
                pools = (one.pool() for one in list(self._calls.values()) if isinstance(one, _Captured))
                captured.capture(forward, call, next(pools, None), self._stream)
        except _Unfit as unfit:
            self._calls[call.key] = str(unfit)
            raise
        except (TpdeError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise InvalidArgument(
                "the model cannot be captured into a CUDA graph. Expected a forward that only queues work on the device, as after "
                f"attach without graph=True. Found: {error}"
            ) from error
        if not tried.holds():
            raise InvalidArgument(
                "an argument or the model was changed by the capture of a graph, but not by the call before: it cannot be used any "
                "more. Make it again, and attach without graph=True"
            )
        self._calls[call.key] = captured
        return captured

    def _replay(self, captured: _Captured, call: _Call) -> Any:
        stream = torch.cuda.current_stream(self.device)
        if self._done is None:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif self._done_on is None:  # the last replay was interrupted
            torch.cuda.synchronize(self.device)
        elif self._done_on != stream.cuda_stream:
            stream.wait_event(self._done)
        self._done_on, self._last = None, captured
        with torch.cuda.device(self.device):
            outputs = captured.replay(call)
        self._done.record(stream)
        self._done_on = stream.cuda_stream
        self.replays, self.reason = self.replays + 1, ""
        return outputs

    def _raise_last(self) -> None:
        """Raises an error of the last replay, if that has completed."""
        last, done = self._last, self._done
        if last is not None and done is not None and self._done_on is not None and done.query():  # type: ignore[no-untyped-call]
            self._last = None
            last.check()
