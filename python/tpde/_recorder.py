"""Runs a weight loader over tensors without data, and records what it copies where.

A dispatch mode sees every operation of the loader's thread, also those with parameters alone, such as the zeros of a padded
vocabulary. Nothing is written to parameters. Tensors of the checkpoint are on the device ``meta``. Their storages tell where their
elements come from, through any number of views. Those of a parameter are what was copied to it before. The result of an operation that
is not listed here is *refused*: it has a shape, and a parameter that it is copied to is refused too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Union

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ._contents import Contents, Copy, Refusal, Run, Target
from ._errors import NotRecorded
from ._model import Snapshot, is_wrapper, memory_of, memory_range, parameters_of, storage_key
from ._strides import NotRectangles, Origin, contiguous, follow, loops_of, merged, whole

#: Operations whose result is the same memory.
VIEWS = frozenset(
    "_reshape_alias _unsafe_view alias as_strided detach lift_fresh permute select slice split split_with_sizes squeeze t transpose "
    "unbind unsqueeze view".split()
)
#: Operations whose result has the same values in other memory.
COPIES = frozenset("_to_copy clone contiguous".split())
#: Operations that fill memory with one value.
FILLS = frozenset("fill_ zero_".split())
#: Operations that use the shape of a tensor, and not its values.
SHAPES = frozenset("empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like zeros_like".split())
#: Methods that read the elements of a tensor, and that a dispatch mode does not see.
READS = frozenset("__array__ __dlpack__ numpy tolist".split())

_OWN_FOLDERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


@dataclass(frozen=True)
class Recording:
    """What a loader did."""

    #: Per parameter, what was copied to it.
    contents: list[Contents]
    refusals: list[Refusal]
    #: Whether parameters were refused after the last tensor.
    ends_refused: bool


@dataclass(frozen=True)
class _Known:
    """A storage with elements of a tensor."""

    storage: Any  # keeps the key unique
    tensor: str
    origin: Origin


@dataclass(frozen=True)
class _Refused:
    """A storage with values that no map expresses."""

    storage: Any
    refusal: Refusal
    #: Tensors that have the same memory, in a form that is not followed.
    same_memory: tuple[torch.Tensor, ...] = ()


_Source = Union[_Known, _Refused, Contents]


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _where() -> str:
    """The innermost frame that is neither PyTorch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


class _Memory:
    """The memory that is followed: that of parameters, of the checkpoint's tensors, and of what is made of them."""

    def __init__(self) -> None:
        self.values: dict[int, _Known | _Refused] = {}
        self.contents: list[Contents] = []
        self.refusals: list[Refusal] = []
        #: Whether the loader has had all tensors.
        self.is_last = False
        #: Whether parameters were refused then. What it does at the end, it does in each call.
        self.ends_refused = False
        self._by_storage: dict[int, list[Contents]] = {}

    def add(self, name: str, parameter: torch.Tensor, *, is_listed: bool) -> None:
        """Adds a parameter."""
        if is_wrapper(parameter):
            raise NotRecorded(f"parameter {name!r} is a {type(parameter).__name__} of several tensors", parameter=name)
        try:
            known = self._by_storage.setdefault(storage_key(parameter), [])
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise NotRecorded(f"parameter {name!r} has no memory of its own: {error}") from error
        shape, steps = [*parameter.shape], [*parameter.stride()]
        order = tuple(sorted(range(len(shape)), key=lambda dim: (-steps[dim], -shape[dim])))
        sizes, strides = [shape[dim] for dim in order], [steps[dim] for dim in order]
        if any(size > 1 and step != of for size, step, of in zip(sizes, strides, contiguous(sizes))):
            raise NotRecorded(
                f"parameter {name!r} of shape {tuple(parameter.shape)} and strides {parameter.stride()} has gaps in its memory"
            )
        target = Target([name], parameter, _offset(parameter), order, is_listed)
        for other in (one.target for one in known):
            layout = (other.offset, other.tensor.dtype, other.tensor.shape, other.tensor.stride())
            if layout == (target.offset, parameter.dtype, parameter.shape, parameter.stride()):
                other.names.append(name)
                return
            if _overlap(target.bytes, other.bytes):
                raise NotRecorded(f"parameters {other.names[0]!r} and {name!r} share memory, but are not the same")
        self.contents.append(Contents(target))
        known.append(self.contents[-1])

    def is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has elements of a checkpoint or of a parameter."""
        return tensor.layout == torch.strided and (storage_key(tensor) in self.values or storage_key(tensor) in self._by_storage)

    def of(self, memory: torch.Tensor) -> list[Contents]:
        """The parameters that have some of this memory."""
        span = memory_range(memory)
        known = self._by_storage.get(span[0], ()) if span else ()
        return [one for one in known if span and _overlap(span[1], one.target.bytes)]

    def one_of(self, memory: torch.Tensor) -> Contents | str | None:
        """The parameter that has this memory; or why it is not followed; ``None`` if no parameter has it."""
        found, span = self.of(memory), memory_range(memory)
        if not found or span is None:
            return None
        if len(found) > 1:
            return f"it is to {len(found)} parameters at once"
        target = found[0].target
        if memory.element_size() != target.tensor.element_size():
            return f"the parameter's elements of {target.tensor.element_size()} bytes are viewed as {memory.dtype}"
        if span[1].start < target.bytes.start or span[1].stop > target.bytes.stop:
            return f"it is to memory beyond parameter {found[0].name}"
        return found[0]

    def source(self, values: torch.Tensor) -> _Source | None:
        """Where a tensor's elements come from; ``None`` if it is not followed."""
        one = self.one_of(values)
        if isinstance(one, Contents) and one.refusals:
            return _Refused(None, replace(one.refusals[0], parameter=None, tensors=tuple(one.tensors)))
        if isinstance(one, str):
            return _Refused(None, self.refusal("a read", [values], one))
        return one or self.values.get(storage_key(values))

    def runs(self, values: torch.Tensor, source: _Known | Contents, to: Sequence[int]) -> list[Run]:
        """The elements of a tensor, with strides of the destination. Leading dims that ``to`` lacks are of one element.

        Raises:
            NotRectangles: As it says.
        """
        skipped = values.dim() - len(to)
        loops, offset = loops_of(values.shape[skipped:], values.stride()[skipped:], to), _offset(values)
        if isinstance(source, Contents):
            return source.read(loops, offset - source.target.offset)
        followed, start = follow(loops, offset, source.origin)
        return [Run(source.tensor, tuple(merged(followed)), start, 0)]

    def refusal(self, operation: str, tensors: Iterable[torch.Tensor], reason: str) -> Refusal:
        """A refusal of an operation with these arguments, which is not listed yet."""
        names: list[str] = []
        for tensor in tensors:
            known = self.values.get(storage_key(tensor))
            names += known.refusal.tensors if isinstance(known, _Refused) else [known.tensor] if known is not None else []
            names += [name for one in self.of(tensor) for name in one.tensors]
        return Refusal(operation, tuple(dict.fromkeys(names)), None, _where(), reason)

    def refuse(self, memory: torch.Tensor, refusal: Refusal) -> None:
        """Refuses the parameters that have this memory, or what is read from it later."""
        found = self.of(memory)
        for one in found:
            named = replace(refusal, parameter=one.name, where=refusal.where or _where())
            self.refusals = [other for other in self.refusals if other is not refusal]
            if named not in self.refusals:
                self.refusals.append(named)
            one.refuse(named)
            self.ends_refused |= self.is_last
        if not found and memory.numel():
            before = self.values.get(storage_key(memory))
            same_memory = before.same_memory if isinstance(before, _Refused) else ()
            self.values[storage_key(memory)] = _Refused(memory.untyped_storage(), refusal, same_memory)
            self.refusals.append(refusal)
            for other in same_memory:
                self.refuse(other, refusal)


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what happens while it is the current mode."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], others: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = _Memory()
        #: The first error, which the loader may have caught.
        self.failure: NotRecorded | None = None
        for name, parameter in parameters.items():
            self.memory.add(name, parameter, is_listed=True)
        for name, tensor in others:
            tensor = memory_of(tensor)
            if not is_wrapper(tensor) and tensor.layout == torch.strided and not self.memory.of(tensor):
                try:
                    self.memory.add(name, tensor, is_listed=False)
                except NotRecorded:
                    continue  # memory with gaps, or of several tensors

    def is_recorded(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made of the checkpoint's or of parameters."""
        tensor = memory_of(tensor)
        if is_wrapper(tensor) or tensor.layout != torch.strided:
            return False
        return storage_key(tensor) in self.memory.values and not self.memory.of(tensor)

    def offer(self, name: str, tensor: torch.Tensor, *, is_packed: bool) -> torch.Tensor:
        """A tensor without data, of the same shape and dtype, whose copies are recorded. One of bytes whose elements are smaller than
        a byte is refused."""
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        refusal = Refusal("copy", (name,), None, "", "the tensor has elements of less than a byte")
        storage = empty.untyped_storage()
        self.memory.values[storage_key(empty)] = (
            _Refused(storage, refusal) if is_packed else _Known(storage, name, whole(tensor.shape))
        )
        return empty

    def fail(self, error: NotRecorded) -> NoReturn:
        """Raises an error, which counts even if the loader catches it."""
        self.failure = self.failure or error
        raise error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(map(is_wrapper, tensors)):
            return NotImplemented  # it calls operations with tensors that have memory
        try:
            return self._dispatch(func, args, kwargs, tensors)
        except NotRecorded as error:
            self.fail(error)

    def _dispatch(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        memory = self.memory
        followed = [tensor for tensor in tensors if memory.is_followed(tensor)]
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        if not followed or name in SHAPES:
            return func(*args, **kwargs)
        is_of_parameters = not any(storage_key(tensor) in memory.values for tensor in followed)
        if _is_followed_view(name, func, args) or (is_of_parameters and _is_view(func)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if not written and not func._schema.returns:
            written = tensors  # an operator that does not say what it writes
        if name == "copy_":
            self._copy(args[0], args[1])
            return args[0]
        if name == "_foreach_copy_":
            for one, values in zip(args[0], args[1]):
                self._copy(one, values)
            return None
        if name in FILLS and is_of_parameters and not any(memory.is_followed(one) for one in tensors[1:]):
            self._fill(args[0])
            return args[0]
        if name in COPIES and (copied := self._copied(args[0], kwargs)) is not None:
            return copied
        if is_of_parameters and not written and all(one.is_untouched for tensor in followed for one in memory.of(tensor)):
            return self._as_it_was(func, args, kwargs, followed)
        with self:  # within a wrapper, operations are not made of simpler ones yet
            result = func.decompose(*args, **kwargs)
        return result if result is not NotImplemented else self._refuse(func, args, kwargs, tensors, written)

    def _as_it_was(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Runs an operation with parameters that the loader has not written. Its result is a constant if it does not write them later."""
        for one in (one for tensor in tensors for one in self.memory.of(tensor)):
            one.read_as_it_was()
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if not any(tensor.is_meta for tensor in tensors):
                raise
            name = func.overloadpacket._qualified_op_name.replace("::", ".")
            refusal = self.memory.refusal(name, tensors, "it reads a parameter before it is written")
            raise NotRecorded(f"{refusal} ({error})", operation=name, where=refusal.where) from error

    def _copied(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """A copy of values in other memory; ``None`` if the values change, or are refused."""
        source = self.memory.source(tensor)
        if source is None or isinstance(source, _Refused) or kwargs.get("dtype") not in (None, tensor.dtype):
            return None
        if tensor.is_conj() or tensor.is_neg() or (isinstance(source, Contents) and source.is_untouched):
            return None
        form = kwargs.get("memory_format") or torch.preserve_format
        empty = torch.empty_like(tensor, device="meta", memory_format=form)
        try:
            runs = self.memory.runs(tensor, source, empty.stride())
        except NotRectangles:
            return None
        if len(runs) != 1 or runs[0].tensor is None:
            return None
        loops = sorted(runs[0].loops, key=lambda loop: -loop.memory)
        if [loop.memory for loop in loops] != [*contiguous([loop.size for loop in loops])]:
            return None
        origin = Origin(tuple(loop.size for loop in loops), tuple(loop.source for loop in loops), runs[0].start)
        self.memory.values[storage_key(empty)] = _Known(empty.untyped_storage(), runs[0].tensor, origin)
        return empty

    def _copy(self, memory: torch.Tensor, values: torch.Tensor) -> None:
        source = self.memory.source(values)
        if source is None:
            if self.memory.is_followed(memory):
                self._fill(memory)
            else:
                memory.copy_(values)
            return
        if not memory.numel():
            return
        target = self.memory.one_of(memory)
        if isinstance(target, str):
            self.memory.refuse(memory, self.memory.refusal("a write", [values], target))
        elif target is None and isinstance(source, Contents) and source.is_untouched and not self.memory.is_followed(memory):
            source.read_as_it_was()
            memory.copy_(values)
        elif target is None:
            # Scratch memory, or a tensor of the checkpoint: what is read from it later is refused.
            refusal = self.memory.refusal("aten.copy_", [memory, values], "the memory is not that of a parameter")
            self.memory.refuse(memory, refusal)
        elif isinstance(source, _Refused):
            self.memory.refuse(memory, source.refusal)
        elif reason := self._copy_to(target, memory, values, source):
            self.memory.refuse(memory, self.memory.refusal("aten.copy_", [values], reason))

    def _copy_to(self, target: Contents, memory: torch.Tensor, values: torch.Tensor, source: _Known | Contents) -> str | None:
        """Records a copy to a parameter. Returns the reason if a map cannot express it."""
        shape = [*values.shape]
        while len(shape) > memory.dim() and shape[0] == 1:
            del shape[0]
        of_memory = [*zip(memory.shape, memory.stride())][memory.dim() - len(shape) :]
        if values.dtype != memory.dtype:
            return f"it casts {values.dtype} to {memory.dtype}"
        if shape != [size for size, _ in of_memory] or values.numel() != memory.numel():
            return f"it expands shape {tuple(values.shape)} to {tuple(memory.shape)}"
        if values.is_conj() or values.is_neg() or memory.is_conj() or memory.is_neg():
            return "it conjugates or negates"
        try:
            offset, where = _offset(memory) - target.target.offset, _where()
            for run in self.memory.runs(values, source, [stride for _, stride in of_memory]):
                if run.tensor is None:
                    if isinstance(source, Contents) and run.unwritten is not None:
                        source.read_as_it_was(run.unwritten)
                    target.fill([loop.size for loop in run.loops], [loop.memory for loop in run.loops], offset + run.offset)
                else:
                    target.copy(Copy(run.tensor, run.loops, run.start, offset + run.offset, where))
        except NotRectangles as error:
            return str(error)
        return None

    def _fill(self, memory: torch.Tensor) -> None:
        """Records a write of constants. Memory that is not a parameter's stays as it is."""
        target = self.memory.one_of(memory)
        reason = target if isinstance(target, str) else None
        if isinstance(target, Contents):
            try:
                target.fill(memory.shape, memory.stride(), _offset(memory) - target.target.offset)
            except NotRectangles as error:
                reason = str(error)
        if reason:
            self.memory.refuse(memory, self.memory.refusal("a write", [], reason))

    def _refuse(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], written: list[torch.Tensor]) -> Any:
        """Runs an operation for the shape of its result alone."""
        name = func.overloadpacket._qualified_op_name.replace("::", ".")
        refusal = self.memory.refusal(name, tensors, "the map has no such operation")
        sources = [self.memory.source(tensor) for tensor in tensors]
        if before := next((one.refusal for one in sources if isinstance(one, _Refused)), None):
            # The first operation is the reason. All tensors count, because all are needed to load the parameter again.
            self.memory.refusals = [one for one in self.memory.refusals if one is not before]
            refusal = replace(before, tensors=refusal.tensors)
        for one in written:
            self.memory.refuse(one, refusal)
        returns = func._schema.returns
        if all(one.alias_info is not None and one.alias_info.is_write for one in returns):
            return _of_returns(func, args, kwargs)
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
        self.memory.refusals.append(refusal)
        same_memory = tuple(tensors) if _is_view(func) else ()
        return tree_map(lambda leaf: self._marked(leaf, refusal, same_memory) if isinstance(leaf, torch.Tensor) else leaf, result)

    def _marked(self, result: torch.Tensor, refusal: Refusal, same_memory: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """A tensor of this shape in memory of its own, which is refused."""
        empty = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
        self.memory.values[storage_key(empty)] = _Refused(empty.untyped_storage(), refusal, same_memory)
        return empty


class _Reads(TorchFunctionMode):
    """Refuses to give elements to what is not PyTorch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and args and isinstance(args[0], torch.Tensor) and not is_wrapper(args[0]):
            memory, tensor = self.recorder.memory, args[0]
            if memory.is_followed(tensor):
                found = memory.of(tensor)
                if storage_key(tensor) in memory.values or not all(one.is_untouched for one in found):
                    refusal = memory.refusal(f"Tensor.{name}", [tensor], "the result depends on values")
                    tensors = refusal.tensors[0] if refusal.tensors else None
                    error = NotRecorded(str(refusal), operation=refusal.operation, where=refusal.where, tensor=tensors)
                    self.recorder.fail(error)
                for one in found:
                    one.read_as_it_was()
        return func(*args, **(kwargs or {}))


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _is_packed(dtype: Any) -> bool:
    return dtype is getattr(torch, "float4_e2m1fn_x2", None)


def _is_view(func: Any) -> bool:
    """Whether an operation returns memory of its arguments, and writes nothing."""
    infos = [one.alias_info for one in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _is_followed_view(name: str, func: Any, args: Any) -> bool:
    if name == "view" and func._overloadname == "dtype":
        return args[0].element_size() == args[1].itemsize and not _is_packed(args[1])
    return name in VIEWS


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes."""
    return [leaf for _, leaves in _written_arguments(func, args, kwargs) for leaf in leaves]


def _written_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or at >= len(args) else args[at]
            yield value, [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _of_returns(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that returns what it writes, or nothing."""
    values = [value for value, _ in _written_arguments(func, args, kwargs)][: len(func._schema.returns)]
    return tuple(values) if len(values) > 1 else values[0] if values else None


def record(
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    tensors: Mapping[str, tuple[torch.Tensor, bool]],
    owner: Any,
    equal: Mapping[str, str],
) -> Recording:
    """Runs the loader. ``tensors`` has tensors for their shape and dtype, and whether their elements are smaller than a byte. ``equal``
    has the first name of a tensor that has several. The owner is as it was before afterwards."""
    parameters = parameters_of(owner)
    snapshot = Snapshot(owner, load_weights)
    recorder = Recorder(parameters, snapshot.tensors)
    name = ""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal name
        for name, (tensor, is_packed) in tensors.items():
            yield name, recorder.offer(equal.get(name, name), tensor, is_packed=is_packed)
        recorder.memory.is_last = True

    addresses = {one: storage_key(parameter) for one, parameter in parameters.items()}
    try:
        with torch.no_grad(), recorder, _Reads(recorder):
            load_weights(weights())
    except NotRecorded:
        raise
    except Exception as error:
        if recorder.failure is not None:
            raise recorder.failure from None
        where = _innermost(error)
        message = f"the loader failed at {where}, the last tensor being {name!r}: {type(error).__name__}: {error}"
        raise NotRecorded(message, where=where, tensor=name or None) from error
    finally:
        after = {one: storage_key(parameter) for one, parameter in parameters_of(owner).items()}
        assigned = snapshot.restore(recorder.is_recorded)
    if recorder.failure is not None:
        raise recorder.failure
    for one, address in addresses.items():
        if after.get(one) != address:
            raise NotRecorded(f"the loader replaced the memory of parameter {one!r}: expected a copy into it")
    reason = "the loader keeps the tensor, and a map changes parameters and persistent buffers alone"
    for attribute, held in assigned.items():
        of = recorder.memory.refusal("", held, "").tensors
        recorder.memory.refusals.append(Refusal("assignment", of, attribute, "", reason))
    for contents in recorder.memory.contents:
        if contents.name in assigned:
            contents.replace()
        if not contents.target.is_listed and contents.copies:
            where = next(iter(contents.copies)).where
            recorder.memory.refusals.append(Refusal("aten.copy_", tuple(contents.tensors), contents.name, where, reason))
    return Recording(recorder.memory.contents, recorder.memory.refusals, recorder.memory.ends_refused)


def _innermost(error: BaseException) -> str:
    """The innermost line of the loader in a traceback."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_OWN_FOLDERS):
            found = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return found
