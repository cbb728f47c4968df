"""Runs a weight loader over tensors without data, and records what it copies where.

A dispatch mode sees every operation of the loader's thread, also those with parameters alone, such as the zeros of a padded
vocabulary. Nothing is written to parameters. Tensors of the checkpoint are on the device ``meta``. Their storages tell where their
elements come from, through any number of views. The result of an operation that is not listed here is *refused*: it has a shape,
and a parameter that it is copied to is refused too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ._errors import NotRecorded
from ._strides import Loop, NotRectangles, Origin, contiguous, copied, follow, loops_of, whole

#: Operations whose result is the same memory.
VIEWS = frozenset(
    "_reshape_alias _unsafe_view alias as_strided detach lift_fresh permute select slice split split_with_sizes squeeze t transpose "
    "unbind unsqueeze view".split()
)
#: Operations whose result has the same values in other memory.
COPIES = frozenset("_to_copy clone contiguous".split())
#: Operations that fill memory with one value.
FILLS = frozenset("fill_ zero_".split())

_OWN_FOLDERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


@dataclass(frozen=True)
class Refusal:
    """Something that a loader does and a map cannot express."""

    #: Name of the operation in PyTorch, such as ``"aten.mul"``.
    operation: str
    #: The checkpoint's tensors that it has as arguments.
    tensors: tuple[str, ...]
    #: The parameter that lacks its values for this reason; ``None`` if the result was copied to no parameter.
    parameter: str | None
    #: File, line and function of the loader.
    where: str
    reason: str

    def __str__(self) -> str:
        of = f" of {', '.join(self.tensors)}" if self.tensors else ""
        to = f" for parameter {self.parameter}" if self.parameter else ""
        return f"{self.operation}{of}{to} at {self.where}: {self.reason}"


@dataclass(frozen=True)
class Target:
    """A parameter: its names, the first of which counts, and its memory in a storage, in elements."""

    names: list[str]
    tensor: Any
    offset: int
    #: Its dims in the order of memory.
    order: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """A copy from a tensor to a parameter."""

    tensor: str
    parameter: str
    #: Strides in the tensor, and in the parameter's memory.
    loops: tuple[Loop, ...]
    start: int
    #: Offset in the parameter's memory.
    offset: int
    #: Not compared: loaders of tied weights copy twice.
    where: str = field(compare=False)


@dataclass(frozen=True)
class Fill:
    """A write to a parameter that is not from a checkpoint: sizes, strides and offset in the parameter's memory."""

    parameter: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass
class Recording:
    """Everything that a loader did, in its order."""

    writes: list[Copy | Fill] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    targets: dict[str, Target] = field(default_factory=dict)


@dataclass(frozen=True)
class _Known:
    """A storage with elements of a tensor."""

    storage: Any  # keeps the key unique
    tensor: str
    dtype: Any
    origin: Origin


@dataclass(frozen=True)
class _Refused:
    """A storage with values that no map expresses."""

    storage: Any
    refusal: Refusal


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _where() -> str:
    """The innermost frame that is neither PyTorch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what happens while it is the current mode."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._values: dict[int, _Known | _Refused] = {}
        self._targets: dict[int, list[Target]] = {}
        for name, parameter in parameters.items():
            self._add(name, parameter)

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        try:
            known = self._targets.setdefault(_key(parameter), [])
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise NotRecorded(f"parameter {name!r} has no memory of its own: {error}") from error
        shape, steps = [*parameter.shape], [*parameter.stride()]
        order = tuple(sorted(range(len(shape)), key=lambda dim: (-steps[dim], -shape[dim])))
        sizes, strides = [shape[dim] for dim in order], [steps[dim] for dim in order]
        if any(size > 1 and step != of for size, step, of in zip(sizes, strides, contiguous(sizes))):
            raise NotRecorded(
                f"parameter {name!r} of shape {tuple(parameter.shape)} and strides {parameter.stride()} has gaps in its memory"
            )
        begin, end = _offset(parameter), _offset(parameter) + parameter.numel()
        for other in known:
            if (other.offset, other.tensor.shape, other.tensor.stride()) == (begin, parameter.shape, parameter.stride()):
                other.names.append(name)
                self.recording.targets[name] = other
                return
            if max(begin, other.offset) < min(end, other.offset + other.tensor.numel()):
                raise NotRecorded(f"parameters {other.names[0]!r} and {name!r} share memory, but are not the same")
        target = Target([name], parameter, begin, order)
        known.append(target)
        self.recording.targets[name] = target

    def source(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without data, of the same shape and dtype, whose copies are recorded."""
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._values[_key(empty)] = _Known(empty.untyped_storage(), name, tensor.dtype, whole(tensor.shape))
        return empty

    def packed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of bytes whose elements are smaller than a byte. It is refused."""
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        refusal = Refusal("copy", (name,), None, "", "the tensor has elements of less than a byte")
        self._values[_key(empty)] = _Refused(empty.untyped_storage(), refusal)
        return empty

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        has_sources = any(_key(tensor) in self._values for tensor in tensors)
        written = [tensor for tensor in _written(func, args, kwargs) if _key(tensor) in self._targets]
        if not has_sources and not written:
            return func(*args, **kwargs)
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        if name in VIEWS and func._overloadname != "dtype":
            return func(*args, **kwargs)
        if name == "view" and args[0].element_size() == args[1].itemsize and not _is_packed(args[1]):
            return func(*args, **kwargs)
        if name == "copy_":
            self._copy(args[0], args[1])
            return args[0]
        if name in FILLS:
            value = args[1] if len(args) > 1 else 0
            if not isinstance(value, torch.Tensor) and written:
                self._fill(args[0])
                return args[0]
        if name in COPIES and (copy := self._copied(args[0], kwargs)) is not None:
            return copy
        return self._refuse(func, args, kwargs, tensors)

    def _copied(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """A copy of values in other memory; ``None`` if the values change, or are refused."""
        known = self._values.get(_key(tensor))
        if not isinstance(known, _Known) or kwargs.get("dtype") not in (None, tensor.dtype):
            return None
        if kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
            return None
        try:
            origin = copied(tensor.shape, tensor.stride(), _offset(tensor), known.origin)
        except NotRectangles:
            return None
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._values[_key(empty)] = _Known(empty.untyped_storage(), known.tensor, known.dtype, origin)
        return empty

    def _targets_of(self, memory: torch.Tensor) -> list[Target]:
        """The parameters that have some of this memory."""
        if not memory.numel():
            return []
        begin = _offset(memory)
        end = begin + 1 + sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride()))
        return [one for one in self._targets.get(_key(memory), ()) if one.offset < end and begin < one.offset + one.tensor.numel()]

    def _target(self, memory: torch.Tensor, values: list[torch.Tensor]) -> Target | None:
        """The parameter that has this memory. A write to several parameters is refused."""
        targets = self._targets_of(memory)
        if len(targets) == 1 or not targets:
            return targets[0] if targets else None
        refusal = self._refusal("a write", values, f"it is to {len(targets)} parameters at once")
        for target in targets:
            self._add_refusal(refusal, target)
        return None

    def _copy(self, memory: torch.Tensor, values: torch.Tensor) -> None:
        target, known = self._target(memory, [values]), self._values.get(_key(values))
        if known is None:
            self._fill(memory)
            return
        if not memory.numel():
            return
        if target is None:
            # Scratch memory, or a tensor of the checkpoint: what is read from it later is refused.
            self._mark(memory, self._refusal("aten.copy_", [memory, values], "the memory is not that of a parameter"))
            return
        if isinstance(known, _Refused):
            self._add_refusal(known.refusal, target)
            return
        reason = None
        shape, strides = [*values.shape], [*values.stride()]
        while len(shape) > memory.dim() and shape[0] == 1:
            del shape[0], strides[0]
        of_memory = [*zip(memory.shape, memory.stride())][memory.dim() - len(shape) :]
        if values.dtype != memory.dtype:
            reason = f"it casts {values.dtype} to {memory.dtype}"
        elif shape != [size for size, _ in of_memory] or values.numel() != memory.numel():
            reason = f"it expands shape {tuple(values.shape)} to {tuple(memory.shape)}"
        elif values.is_conj() or values.is_neg() or memory.is_conj() or memory.is_neg():
            reason = "it conjugates or negates"
        else:
            try:
                loops, start = follow(loops_of(shape, strides, [stride for _, stride in of_memory]), _offset(values), known.origin)
                offset = _offset(memory) - target.offset
                self.recording.writes.append(Copy(known.tensor, target.names[0], tuple(loops), start, offset, _where()))
                return
            except NotRectangles as error:
                reason = str(error)
        self._add_refusal(self._refusal("aten.copy_", [values], reason), target)

    def _fill(self, memory: torch.Tensor) -> None:
        target = self._target(memory, [])
        if target is not None:
            offset = _offset(memory) - target.offset
            fill = Fill(target.names[0], tuple(memory.shape), tuple(memory.stride()), offset)
            self.recording.writes.append(fill)

    def _refuse(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Runs an operation for the shape of its result alone."""
        name = func.overloadpacket._qualified_op_name.replace("::", ".")
        refusal = self._refusal(name, tensors, "the map has no such operation")
        known = [self._values.get(_key(tensor)) for tensor in tensors]
        if before := next((one.refusal for one in known if isinstance(one, _Refused)), None):
            # The first operation is the reason. All tensors count, because all are needed to load the parameter again.
            self.recording.refusals = [one for one in self.recording.refusals if one is not before]
            refusal = replace(before, tensors=refusal.tensors)
        written = _written(func, args, kwargs)
        for memory in written:
            targets = self._targets_of(memory)
            for target in targets:
                self._add_refusal(refusal, target)
            if not targets:
                self._mark(memory, refusal)
        if written:
            return written[0] if len(written) == 1 else tuple(written)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            args, kwargs = tree_map(_on_meta, (args, kwargs))
            result = func(*args, **kwargs)
        except Exception as error:
            raise NotRecorded(
                f"{refusal}, and its result depends on values ({error})",
                operation=name,
                where=refusal.where,
                tensor=refusal.tensors[0] if refusal.tensors else None,
            ) from error
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            return result
        self.recording.refusals.append(refusal)
        return tree_map(lambda leaf: self._marked(leaf, refusal) if isinstance(leaf, torch.Tensor) else leaf, result)

    def _refusal(self, operation: str, tensors: Iterable[torch.Tensor], reason: str) -> Refusal:
        names: list[str] = []
        for tensor in tensors:
            known = self._values.get(_key(tensor))
            names += known.refusal.tensors if isinstance(known, _Refused) else [known.tensor] if known is not None else []
        return Refusal(operation, tuple(dict.fromkeys(names)), None, _where(), reason)

    def _add_refusal(self, refusal: Refusal, target: Target) -> None:
        name = target.names[0]
        named = replace(refusal, parameter=name, where=refusal.where or _where())
        self.recording.refusals = [one for one in self.recording.refusals if one is not refusal]
        if named not in self.recording.refusals:
            self.recording.refusals.append(named)

    def _mark(self, memory: torch.Tensor, refusal: Refusal) -> None:
        self._values[_key(memory)] = _Refused(memory.untyped_storage(), refusal)
        self.recording.refusals.append(refusal)

    def _marked(self, result: torch.Tensor, refusal: Refusal) -> torch.Tensor:
        """A tensor of this shape in memory of its own, which is refused."""
        empty = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
        self._values[_key(empty)] = _Refused(empty.untyped_storage(), refusal)
        return empty


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _is_packed(dtype: Any) -> bool:
    return dtype is getattr(torch, "float4_e2m1fn_x2", None)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes."""
    written: list[torch.Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or at >= len(args) else args[at]
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


def record(
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    tensors: Mapping[str, tuple[torch.Tensor, bool]],
    parameters: Mapping[str, torch.Tensor],
    current: Callable[[], Mapping[str, torch.Tensor]],
) -> Recording:
    """Runs the loader. ``tensors`` has tensors for their shape and dtype, and whether their elements are smaller than a byte.
    ``current`` returns the parameters as they are afterwards."""
    recorder = Recorder(parameters)
    name = ""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal name
        for name, (tensor, is_packed) in tensors.items():
            yield name, recorder.packed(name, tensor) if is_packed else recorder.source(name, tensor)

    addresses = {one: _key(parameter) for one, parameter in parameters.items()}
    try:
        with torch.no_grad(), recorder:
            load_weights(weights())
    except NotRecorded:
        raise
    except Exception as error:
        where = _innermost(error)
        message = f"the loader failed at {where}, the last tensor being {name!r}: {type(error).__name__}: {error}"
        raise NotRecorded(message, where=where, tensor=name or None) from error
    after = current()
    for one, address in addresses.items():
        if one not in after or _key(after[one]) != address:
            raise NotRecorded(f"the loader replaced the memory of parameter {one!r}: expected a copy into it")
    return recorder.recording


def _innermost(error: BaseException) -> str:
    """The innermost line of the loader in a traceback."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_OWN_FOLDERS):
            found = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return found
