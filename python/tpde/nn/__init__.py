"""Linear layers whose weights are rebuilt just before use.

:func:`attach` turns a model that has the base of a pair into one that has the target: its linear layers keep the base
weights, shared and never copied, and the compressed bytes of the pair. Each call of a layer rebuilds the target weight in scratch
memory that all layers share. Outputs equal those of the plain target model, bit for bit. With a pair that needs no base, only the
compressed bytes of a weight are kept.

On a CUDA device, payloads are kept in pinned memory or on the device. While a layer computes, the next layer's payload is copied
and decoded on side streams. On the CPU, all steps run in sequence. There are no gradients: call models under ``torch.no_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from .._core.arguments import check_kinds, check_needed
from .._core.errors import InvalidArgument, and_more
from .._core.progress import Progress, check_progress
from .._engine.device import DevicePair
from .._engine.reader import Reader, state_of
from .._files.paths import Digest, StrPath, check_digest, open_pair
from .._memory.tensor import Entry
from .._memory.torch_tensors import check_device, dtype_of
from ._capture import Graph
from ._graphed import Graphs
from ._layer import JITCompressedLinear, add_checks, convert
from ._prefetch import DeviceWeight, Prefetcher
from ._rebuilt import HostWeight, Weight
from ._slot import Failures

__all__ = ["Attached", "JITCompressedLinear", "attach"]

Payloads = Literal["pinned", "device"]


class Attached:
    """The result of :func:`attach`.

    Attributes:
        layers: The layers that rebuild their weights, by their names in the model.
        dense: Names of the pair's tensors that were rebuilt once and stay dense: those that are not only weights of linear layers,
            those excluded by ``only``, and those whose codec the device cannot decode by itself. Tensors that the pair does not
            change are not listed.
        stored_bytes: Compressed bytes that are kept for the layers.
        graphs: With ``graph=True`` an object with the attributes ``captured``, the number of graphs; ``replays``, the number of calls
            that were replays; and ``reason``, why the last call was none. Otherwise ``None``.
    """

    def __init__(
        self,
        layers: dict[str, JITCompressedLinear],
        dense: list[str],
        stored_bytes: int,
        failures: Failures | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.layers = layers
        self.dense = dense
        self.stored_bytes = stored_bytes
        self.graphs = graphs
        self._failures = Failures() if failures is None else failures

    def check(self) -> None:
        """Waits for all queued decoding on CUDA devices. Raises the first error of this model's weights that was not raised yet, or
        an error of the last replay of a graph.

        Raises:
            Invalid: A weight could not be rebuilt. Outputs computed with it before the error are not those of the target.
        """
        for device, prefetchers in self._prefetchers().items():
            torch.cuda.synchronize(device)
            for prefetcher in prefetchers:
                prefetcher.settle(wait=True)
        self._failures.throw()
        Graph.check(self._on_device())

    def release(self) -> None:
        """Frees the scratch memory that layers share on CUDA devices, which is two weights and two payloads per stream. It goes
        back to PyTorch's allocator, and the next call allocates it again. Useful before or after capturing a CUDA graph, which has
        its own memory. Graphs of ``graph=True`` are dropped too, and captured again when they are needed.

        Raises:
            Invalid: As :meth:`check`, if queued work failed.
        """
        if self.graphs is not None:
            self.graphs.release()
        for prefetchers in self._prefetchers().values():
            for prefetcher in prefetchers:
                prefetcher.release()
        self._failures.throw()

    def _on_device(self) -> set[DeviceWeight]:
        return {layer._weight for layer in self.layers.values() if isinstance(layer._weight, DeviceWeight)}

    def _prefetchers(self) -> dict[torch.device, list[Prefetcher]]:
        return {device: Prefetcher.on(device) for device in {weight.torch_device for weight in self._on_device()}}


def attach(
    model: nn.Module,
    pair: StrPath | DevicePair,
    *,
    device: str | torch.device | None = None,
    payloads: Payloads | Callable[[str], Payloads] = "pinned",
    only: Callable[[str], bool] | None = None,
    check: bool = True,
    graph: bool = False,
    expect: Digest | None = None,
    progress: Progress = None,
) -> Attached:
    """Turn a model that has the base of ``pair`` into one that gives the target's outputs, with linear weights rebuilt just in
    time.

    Layers of class ``nn.Linear`` whose weight the pair changes become :class:`JITCompressedLinear`. They stay the same objects,
    with their hooks, their attributes and all of their names. Layers that share a weight still share one afterwards. Everything
    else that the pair changes is rebuilt once, into new parameters, including weights that are tied to an embedding. The model's
    own tensors are only read, and may be shared with other models. Modules that are shared change for all models. Tensors must not
    be written while the model is used. To attach another pair, start again from the original model.

    ``model.state_dict()`` has the rebuilt weights under their names, so functions that save a model save the target. It needs memory
    for all of them at once; ``layer.weight`` rebuilds one. Tensors that only serve as the base of a rebuilt weight, such as scales of
    FP8 weights, leave its module. Attach first, then wrap: with PEFT for inference with adapters, for example. An adapter cannot be
    merged into an attached layer.

    Wrappers for distributed training: apply ``DistributedDataParallel`` or FSDP2's ``fully_shard`` after ``attach``, for forwards
    under ``torch.no_grad()``; the wrappers see the model's other parameters. ``attach`` refuses a model that ``fully_shard`` has
    already sharded. It also refuses a ``DistributedDataParallel``, whose tensors have other names: pass ``wrapped.module``.

    Args:
        model: Has the base, under the names of the pair, in parameters and buffers on the CPU or a CUDA device. Tensors for which
            the pair needs no base, or a base of another name, may be on the device ``meta``. A base of another dtype (format 1.3)
            stays as it is: FP8 weights with ``weight_scale_inv``, or MXFP4 ``weight_blocks`` and ``weight_scales`` beside a
            ``weight`` on the device ``meta``, in parameters or buffers of the layer.
        pair: Name of the pair, or either file; or a :class:`tpde.torch.DevicePair`. For a CUDA device, encode it with
            ``codec="conditioned", chunk_lanes=65536``: one thread block decodes one chunk, and a layer should have hundreds.
            Capture CUDA graphs of your own on a stream of high priority, ``torch.cuda.graph(graph,
            stream=torch.cuda.Stream(priority=-1))``: then decoding for later layers slows earlier layers less.
        device: Where the model is to run; ``None``: where each tensor is. For a CUDA device, bases on the CPU stay there in pinned
            memory and are read from there; all other tensors are moved.
        payloads: Where compressed bytes are kept for a CUDA device: in ``"pinned"`` memory of the host, or on the ``"device"``; or
            a function that returns one of the two for the name of a weight. A :class:`tpde.torch.DevicePair` that has its payloads
            on the device keeps them there.
        only: A function of a weight's name: linear weights for which it returns false are rebuilt once and stay dense.
        check: Whether each weight is rebuilt once now, so that a wrong base or damage is raised here. On the CPU, digests are
            compared too.
        graph: Whether calls of the model are captured into CUDA graphs and replayed. This is faster where the host limits the speed.
            All layers must be on one CUDA device. The first call of a kind runs as usual, the second one is captured, and later ones
            are replays: they run the work that was captured, and no Python. Two calls are of the same kind if their tensors have the
            same shapes, strides and dtypes, and their other arguments are equal or the same objects, such as a static cache. Values of
            tensors may change; outputs are copies. Calls run without a graph if they cannot be replayed, for example with gradients,
            autocast, hooks, tensors on the CPU, or a cache that grows. ``Attached.graphs.replays`` counts replays, and
            ``Attached.graphs.reason`` says why the last call was none. A change of the model's modules, parameters, buffers or settings
            like ``train()`` is noticed. Settings in other objects, such as the configuration, are not: call :meth:`Attached.release`
            after changing them. An error of a replay is raised by the next call, if the replay has completed by then, or by
            :meth:`Attached.check`.
        expect: As for :func:`tpde.apply`.
        progress: As for :func:`tpde.encode`, for reading the payloads.

    Raises:
        Invalid, WrongBase, AlreadyApplied, SystemRefused: As their names say. The model is unchanged.
        InvalidArgument: A tensor that cannot be read, is missing, or has another dtype or shape than in the pair; or
            a pair on another device; or ``graph`` with layers that are not all on one CUDA device. With ``graph``, also raised by
            the call of a model whose ``forward`` cannot be captured, because it waits for the device.
        DeviceError, OutOfMemory: There is no such device, it fails, or its memory does not suffice.
    """
    check_needed(model=model)
    check_kinds(check=check, only=only, graph=graph)
    check_progress(progress)
    if not callable(payloads):
        _check_payloads(payloads)
    run_on = None if device is None else check_device(device)
    if graph and run_on is not None:
        Graphs.of(model, {run_on})  # refused before anything is read
    opened = _OpenedPair(_Model(model), pair, payloads, expect, progress)
    weights, dense = opened.decoded(run_on, only, check=check)
    graphs = Graphs.of(model, {weight.torch_device for weight in weights.values()}) if graph else None
    return opened.install(weights, dense, graphs)  # the model is unchanged up to here


def _check_payloads(payloads: Any, of: str = "") -> None:
    if not isinstance(payloads, str) or payloads not in ("pinned", "device"):
        found = f"payloads gives {payloads!r}{of}" if of else f"unknown payloads={payloads!r}"
        raise InvalidArgument(f"{found}: expected 'pinned' or 'device'")


def _is_changed(entry: Entry) -> bool:
    return entry.changes or not entry.is_same


def _check_kind(entry: Entry, name: str, tensor: torch.Tensor, dtype: str, shape: list[int], where: str) -> None:
    """Raises if a tensor of the model, or of its base, has another dtype or shape than in the pair."""
    if entry.base_kind != "prefix" and ([*tensor.shape] != shape or tensor.dtype != dtype_of(dtype)):
        here = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise InvalidArgument(f"tensor {name!r} is {here} here, and {dtype} {tuple(shape)} in {where}")


class _Model:
    """The tensors of a model by all of their names, and the modules that own them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = dict(state_of(model))
        self.modules = dict(model.named_modules(remove_duplicate=False))
        groups: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            groups.setdefault(id(tensor), []).append(name)
        #: Groups of names of the same tensor.
        self.groups = list(groups.values())

    def is_linear(self, names: list[str]) -> bool:
        """Whether these names are all weights of plain linear layers."""
        split = [name.rpartition(".") for name in names]
        return all(last == "weight" and type(self.modules[first]) is nn.Linear for first, _, last in split)

    def set(self, name: str, tensor: torch.Tensor, parameters: dict[int, nn.Parameter]) -> None:
        """Replaces a tensor by one of the same kind. Tied tensors stay tied."""
        first, _, last = name.rpartition(".")
        old = self.tensors[name]
        new: torch.Tensor = tensor
        if isinstance(old, nn.Parameter):
            if id(tensor) not in parameters:
                parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=old.requires_grad)
            new = parameters[id(tensor)]
        setattr(self.modules[first], last, new)

    def drop_base(self, name: str, entries: Mapping[str, Entry]) -> None:
        """Takes a quantised base out of the module of the tensor that was rebuilt from it, except tensors of the target. In a state
        dict it would be an older version of the tensor."""
        owner: Any = self.modules[name.rpartition(".")[0]]
        entry, held = entries.get(name), {*owner._parameters, *owner._buffers}
        for base, _, _ in entry.bases if entry is not None and entry.base_kind == "dequantised" else []:
            first, _, last = base.rpartition(".")
            if self.modules.get(first) is owner and base not in entries and last in held:
                delattr(owner, last)

    def convert(self, weights: Mapping[str, Weight]) -> dict[str, JITCompressedLinear]:
        """Converts each linear layer once, even if it has several names."""
        layers: dict[str, JITCompressedLinear] = {}
        biases: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, weight in weights.items():
            path = name.rpartition(".")[0]
            layer: Any = self.modules[path]
            if not isinstance(layer, JITCompressedLinear):
                bias: Any = layer.bias
                if bias is not None:
                    # A new parameter: other models may train the original one.
                    own = nn.Parameter(bias.detach(), requires_grad=False)
                    _, bias = biases.setdefault(id(bias), (bias, own))
                layer = convert(layer, weight, bias)
            layers[path] = layer
        return layers


class _OpenedPair:
    """State of an attachment: the pair, and its copies on devices."""

    def __init__(
        self,
        model: _Model,
        pair: StrPath | DevicePair,
        payloads: Payloads | Callable[[str], Payloads],
        expect: Digest | None,
        progress: Progress,
    ) -> None:
        self.model, self.source, self.payloads, self.progress = model, pair, payloads, progress
        self.failures = Failures()
        if isinstance(pair, DevicePair):
            check_digest(pair._pair, expect)
        self.pair = pair._pair if isinstance(pair, DevicePair) else open_pair(pair, expect=expect)
        self.entries = {entry[0]: Entry(*entry) for entry in self.pair.tensors()}
        self._on_device: dict[torch.device, DevicePair] = {}
        missing = [name for name in self.entries if name not in model.tensors]
        if missing and isinstance(model.modules.get(missing[0].rpartition(".")[0]), JITCompressedLinear):
            raise InvalidArgument(
                f"{missing[0]!r} is rebuilt from a pair that was attached before: attach to the original model. To attach a chain of "
                "pairs, make one pair of them with tpde.fold"
            )
        if missing:
            raise InvalidArgument(f"tensor {missing[0]!r} of the pair is not in the model")

    def decoded(
        self, run_on: torch.device | None, only: Callable[[str], bool] | None, *, check: bool
    ) -> tuple[dict[str, Weight], dict[str, torch.Tensor]]:
        """The weights that layers rebuild, and the tensors that are rebuilt or moved now, by all of their names."""
        self.check_meta()
        model, weights, dense = self.model, dict[str, Weight](), dict[str, torch.Tensor]()
        with torch.no_grad():
            # Dense tensors first: rebuilding them takes temporary device memory.
            for names in sorted(model.groups, key=model.is_linear):
                entry = self.entry(names)
                tensor = model.tensors[names[0]]
                # A tensor whose base has another name may be on the device meta.
                held = next(iter(self.base_of(entry)), tensor) if entry and tensor.device.type == "meta" else tensor
                where = run_on or held.device
                weight = None
                if entry is None or not _is_changed(entry):
                    if tensor.device != where:
                        dense.update(dict.fromkeys(names, tensor.detach().to(where)))
                    continue
                if model.is_linear(names) and (only is None or any(map(only, names))):
                    weight = self.weight(entry, where)
                if weight is None:
                    dense.update(dict.fromkeys(names, self.rebuilt(entry, where)))
                    continue
                if check:
                    weight.check()
                weights.update(dict.fromkeys(names, weight))
        return weights, dense

    def install(self, weights: dict[str, Weight], dense: dict[str, torch.Tensor], graphs: Graphs | None) -> Attached:
        """Changes the model."""
        model, entries = self.model, self.entries
        stored_bytes = {weight.handle: self.pair.payload_bytes(weight.entry.name) for weight in weights.values()}
        rebuilt = [name for name in dense if name in entries and _is_changed(entries[name])]
        # Weights are registered only when none can be refused any more, so no compiled program finds a weight of a failed call.
        for weight in weights.values():
            weight.register()
        parameters: dict[int, nn.Parameter] = {}
        for name, tensor in dense.items():
            model.set(name, tensor, parameters)
        layers = model.convert(weights)
        for name in {*weights, *rebuilt}:
            model.drop_base(name, entries)
        add_checks(model.model)
        if graphs is not None:
            graphs.install(model.model)
        return Attached(layers, sorted(rebuilt), sum(stored_bytes.values()), self.failures, graphs)

    def entry(self, names: list[str]) -> Entry | None:
        """The pair's entry for the tensor with these names."""
        entries = [self.entries[name] for name in names if name in self.entries]
        for other in entries[1:]:
            if not self.pair.is_same(entries[0].name, other.name):
                raise InvalidArgument(f"{entries[0].name!r} and {other.name!r} are one tensor in the model, but differ in the pair")
        if not entries:
            return None
        entry, tensor = entries[0], self.model.tensors[names[0]]
        # The model has the tensor itself, or its base of another dtype under the same name.
        dtype, shape = next(
            ((dtype, shape) for name, dtype, shape in entry.bases if name == entry.name), (entry.dtype, entry.shape)
        )
        _check_kind(entry, entry.name, tensor, dtype, shape, "the pair")
        return entry

    def check_meta(self) -> None:
        """Raises if tensors on the device meta stay there: the pair does not have them, or has them as their own base."""
        entries = ((names, self.entry(names)) for names in self.model.groups if self.model.tensors[names[0]].device.type == "meta")
        missing = [names[0] for names, entry in entries if entry is None or (entry.is_same and not entry.changes)]
        if missing:
            more = and_more(missing, 3)
            raise InvalidArgument(
                f"on the device meta, and not in the pair: {', '.join(map(repr, missing[:3]))}{more}. Make buffers that a model computes "
                "when it is made, such as those of rotary embeddings, on a real device: accelerate.init_empty_weights() leaves them there"
            )

    def base_of(self, entry: Entry) -> list[torch.Tensor]:
        """The base tensor, and the tensor of scales of a quantised base."""
        missing = [name for name, _, _ in entry.bases if name not in self.model.tensors]
        if missing:
            raise InvalidArgument(f"tensor {entry.name!r} has the base {missing[0]!r}, which is not in the model")
        tensors = [self.model.tensors[name] for name, _, _ in entry.bases]
        for (name, dtype, shape), tensor in zip(entry.bases, tensors):
            _check_kind(entry, name, tensor, dtype, shape, "the base of the pair")
        return tensors

    def on_device(self, device: torch.device) -> DevicePair:
        """The pair on a device."""
        if isinstance(self.source, DevicePair):
            if self.source.device != device:
                raise InvalidArgument(f"the pair is on {self.source.device}, the model is to run on {device}")
            return self.source
        if device not in self._on_device:
            self._on_device[device] = DevicePair(self.source, device, payloads="file", progress=self.progress)
        return self._on_device[device]

    def weight(self, entry: Entry, device: torch.device) -> HostWeight | DeviceWeight | None:
        """The weight, if it can be rebuilt just in time."""
        base = self.base_of(entry)
        stays = self.payloads(entry.name) if callable(self.payloads) else self.payloads
        _check_payloads(stays, f" for {entry.name!r}")
        if entry.base_kind == "prefix":
            return None
        if device.type == "cpu":
            weight = HostWeight(self.pair, entry, base, self.failures)
            weight.base_memory()  # raises if the base does not fit
            return weight
        on_device = self.on_device(device)
        span = on_device._raw.payloads(entry.name)
        if span is None:
            return None
        on_host = [tensor.device.type == "cpu" and not tensor.is_pinned() for tensor in base]
        base = [tensor.detach().pin_memory() if pinned else tensor for tensor, pinned in zip(base, on_host)]
        start, end, first, last = span
        chunks = range(first, last)
        if on_device._blob is not None:
            return DeviceWeight(on_device, entry, base, on_device._blob[start:end], start, chunks, self.failures)
        payload = torch.empty(end - start, dtype=torch.uint8, device="cpu", pin_memory=stays == "pinned")
        on_device._raw.read_payloads(start, ("", "U8", [end - start], payload.data_ptr(), end - start, payload))
        if stays == "device":
            payload = payload.to(device)
        return DeviceWeight(on_device, entry, base, payload, start, chunks, self.failures)

    def rebuilt(self, entry: Entry, device: torch.device) -> torch.Tensor:
        """The tensor of the target."""
        base = self.base_of(entry)
        tensors: Any = {name: tensor.detach() for (name, _, _), tensor in zip(entry.bases, base)} or None
        is_there = all(tensor.device == device for tensor in base)
        pair: Any = self.on_device(device) if device.type == "cuda" and is_there else self.source
        tensor: torch.Tensor = Reader(pair, tensors, "pt", device).read([entry.name])[entry.name]
        return tensor
