"""Runs a weight loader over tensors without data, and records what it copies where.

A dispatch mode sees every operation of the loader's thread, also those with parameters alone, such as the zeros of a padded
vocabulary. Nothing is written to parameters. Tensors of the checkpoint are on the device ``meta``. Their storages tell where their
elements come from, through any number of views. Those of a parameter are what was copied to it before. The result of an operation that
is not listed here is *refused*: it has a shape, and a parameter that it is copied to is refused too. Constants are tensors that
operations were seen to make of nothing but constants; a tensor of unknown origin is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from .._core.errors import NotRecorded, reason_of
from ._contents import Contents, Copy, Refusal
from ._followed import UNSEEN, Known, Memory, Refused, is_of_loader, where
from ._model import Placement, Snapshot, is_wrapper, memory_range, parameters_of, storage_key, storage_of
from ._strides import NotRectangles, Origin, contiguous, whole

#: Operations of PyTorch whose result is the same memory.
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
#: Methods and properties that give the elements of a tensor to what is not PyTorch, or their address. A dispatch mode does not see them.
READS = frozenset(
    "__array__ __cuda_array_interface__ __dlpack__ _typed_storage const_data_ptr data_ptr mutable_data_ptr numpy storage tolist "
    "untyped_storage".split()
)


@dataclass(frozen=True)
class Recording:
    """What a loader did."""

    #: Per parameter, what was copied to it.
    contents: list[Contents]
    refusals: list[Refusal]
    #: Whether parameters were refused after the last tensor.
    ends_refused: bool


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what happens while it is the current mode."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], others: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = Memory()
        #: The first error, which the loader may have caught.
        self.failure: NotRecorded | None = None
        for name, parameter in parameters.items():
            self.memory.add(name, parameter, is_listed=True)
        for name, tensor in others:
            if not is_wrapper(tensor) and tensor.layout == torch.strided and tensor.numel() and not self.memory.of(tensor):
                self.memory.add(name, _without_gaps(tensor), is_listed=False)

    def is_recorded(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made of the checkpoint's or of parameters."""
        if is_wrapper(tensor) or tensor.layout != torch.strided:
            return False
        return storage_key(tensor) in self.memory.values and not self.memory.of(tensor)

    def offer(self, name: str, tensor: torch.Tensor, *, is_packed: bool) -> torch.Tensor:
        """A tensor without data, of the same shape and dtype, whose copies are recorded. One of bytes whose elements are smaller than
        a byte is refused."""
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        refusal = Refusal("copy", (name,), None, "", "the tensor has elements of less than a byte")
        storage = storage_of(empty)
        self.memory.offered.append(name)
        self.memory.values[storage_key(empty)] = (
            Refused(storage, refusal) if is_packed else Known(storage, name, whole(tensor.shape))
        )
        return empty

    def fail(self, error: NotRecorded) -> NoReturn:
        """Raises an error, which counts even if the loader catches it."""
        self.failure = self.failure or error
        raise error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        try:
            if wrappers := [one for one in tensors if is_wrapper(one)]:
                self._check_wrappers(func, wrappers)
                return NotImplemented  # it calls operations with tensors that have memory
            return self._dispatch(func, args, kwargs, tensors)
        except NotRecorded as error:
            self.fail(error)

    def _check_wrappers(self, func: Any, wrappers: list[torch.Tensor]) -> None:
        """Raises if a subclass shares memory that is followed: what it does with it may not be seen."""
        for one in wrappers:
            if not is_traceable_wrapper_subclass(one) and self.memory.is_followed(one):
                reason = f"it is of a {type(one).__name__}, which has operations of its own"
                raise self.memory.refusal(_name_of(func), [one], reason)._error()

    def _dispatch(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        memory = self.memory
        followed = [tensor for tensor in tensors if memory.is_followed(tensor)]
        if not followed:
            return self._run(func, args, kwargs)
        name, written = _own_name(func), _written(func, args, kwargs)
        is_of_parameters = not any(storage_key(tensor) in memory.values for tensor in followed)
        if not written:
            if name in SHAPES:
                result = func(*args, **kwargs)
                memory.mark_made([result], name)
                return result
            if _is_followed_view(name, func, args) or (is_of_parameters and name and _is_view(func)):
                return func(*args, **kwargs)
            if name in COPIES and (copied := self._copied(args[0], kwargs)) is not None:
                return copied
        if name == "copy_":
            self._copy(args[0], args[1])
            return args[0]
        if name == "_foreach_copy_":
            for one, values in zip(args[0], args[1]):
                self._copy(one, values)
            return None
        if name in FILLS and is_of_parameters and all(memory.is_constant(one) for one in tensors[1:]):
            self._fill(args[0])
            return args[0]
        if not written and not func._schema.returns:
            written = tensors  # an operator that does not say what it writes
        if is_of_parameters and not written and all(one.is_untouched for tensor in followed for one in memory.of(tensor)):
            return self._as_it_was(func, args, kwargs, followed)
        with self:  # within a wrapper, operations are not made of simpler ones yet
            result = func.decompose(*args, **kwargs)
        return result if result is not NotImplemented else self._refuse(func, args, kwargs, tensors, written)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that has no elements of a checkpoint, and notes whether what it makes or writes are constants."""
        memory, name, written = self.memory, _own_name(func), _written(func, args, kwargs)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, (torch.Tensor, torch.UntypedStorage))]
        replaces = name in FILLS or name == "copy_"
        read = [one for one in tensors if not (replaces and any(one is other for other in written))]
        # Operators of other libraries may read more than their arguments. What is lifted is new.
        is_seen = name == "lift_fresh" or all(map(memory.is_constant, read))
        is_constant = bool(name) and is_seen
        if not is_seen and func._schema.returns and not any("Tensor" in str(one.type) for one in func._schema.returns):
            raise memory.unreadable(_name_of(func), [one for one in tensors if isinstance(one, torch.Tensor)])
        result = func(*args, **kwargs)
        if not is_constant:
            memory.mark(written, constant=False)
        elif replaces:
            memory.mark((one for one in written if _is_whole(one)), constant=True)
        elif not written:
            memory.mark_made([leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)], name)
        return result

    def _as_it_was(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Runs an operation with parameters that the loader has not written. Its result is a constant if it does not write them later."""
        for one in (one for tensor in tensors for one in self.memory.of(tensor)):
            one.read_as_it_was()
        try:
            return self._run(func, args, kwargs)
        except Exception as error:
            if not any(tensor.is_meta for tensor in tensors):
                raise
            refusal = self.memory.refusal(_name_of(func), tensors, "it reads a parameter before it is written")
            raise refusal._error(f" ({error})") from error

    def _copied(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """A copy of values in other memory; ``None`` if the values change, or are refused."""
        source = self.memory.source(tensor)
        if source is None or isinstance(source, Refused) or kwargs.get("dtype") not in (None, tensor.dtype):
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
        self.memory.values[storage_key(empty)] = Known(storage_of(empty), runs[0].tensor, origin)
        return empty

    def _copy(self, to: torch.Tensor, values: torch.Tensor) -> None:
        memory = self.memory
        source = memory.source(values)
        if source is None and not memory.is_followed(to):
            self._run(torch.ops.aten.copy_.default, (to, values), {})
            return
        if not to.numel():
            return
        if source is None and not memory.is_constant(values):
            source = Refused(None, memory.refusal("aten.copy_", [values], UNSEEN))
        target = memory.one_of(to)
        if isinstance(target, str):
            memory.refuse(to, memory.refusal("a write", [values], target))
        elif source is None and (target is not None or storage_key(to) not in memory.values):
            self._fill(to)
        elif target is None and isinstance(source, Contents) and source.is_untouched and not memory.is_followed(to):
            source.read_as_it_was()
            self._run(torch.ops.aten.copy_.default, (to, values), {})
        elif target is None:
            # Scratch memory, or a tensor of the checkpoint: what is read from it later is refused.
            memory.refuse(to, memory.refusal("aten.copy_", [to, values], "the memory is not that of a parameter"))
        elif isinstance(source, Refused):
            memory.refuse(to, source.refusal)
        elif source is not None and (reason := self._copy_to(target, to, values, source)):
            memory.refuse(to, memory.refusal("aten.copy_", [values], reason))

    def _copy_to(self, target: Contents, memory: torch.Tensor, values: torch.Tensor, source: Known | Contents) -> str | None:
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
            offset, line = self.memory.offset(memory, target), where()
            for run in self.memory.runs(values, source, [stride for _, stride in of_memory]):
                if run.tensor is None:
                    if isinstance(source, Contents) and run.unwritten is not None:
                        source.read_as_it_was(run.unwritten)
                    target.fill([loop.size for loop in run.loops], [loop.memory for loop in run.loops], offset + run.offset)
                else:
                    target.copy(Copy(run.tensor, run.loops, run.start, offset + run.offset, line))
        except NotRectangles as error:
            return str(error)
        return None

    def _fill(self, memory: torch.Tensor) -> None:
        """Records a write of constants. Memory that is not a parameter's stays as it is."""
        target = self.memory.one_of(memory)
        reason = target if isinstance(target, str) else None
        if isinstance(target, Contents):
            try:
                target.fill(memory.shape, memory.stride(), self.memory.offset(memory, target))
            except NotRectangles as error:
                reason = str(error)
        if reason:
            self.memory.refuse(memory, self.memory.refusal("a write", [], reason))

    def _refuse(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], written: list[torch.Tensor]) -> Any:
        """Runs an operation for the shape of its result alone."""
        name = _name_of(func)
        refusal = self.memory.refusal(name, tensors, "the map has no such operation")
        sources = [self.memory.source(tensor) for tensor in tensors]
        if before := next((one.refusal for one in sources if isinstance(one, Refused)), None):
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
            raise refusal._error(f", and its result depends on values ({error})", name) from error
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            return result
        self.memory.refusals.append(refusal)
        same_memory = tuple(tensors) if _is_view(func) else ()
        return tree_map(lambda leaf: self._marked(leaf, refusal, same_memory) if isinstance(leaf, torch.Tensor) else leaf, result)

    def _marked(self, result: torch.Tensor, refusal: Refusal, same_memory: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """A tensor of this shape in memory of its own, which is refused."""
        empty = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
        self.memory.values[storage_key(empty)] = Refused(storage_of(empty), refusal, same_memory)
        return empty


class _Reads(TorchFunctionMode):
    """Refuses to give elements to what is not PyTorch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a property
            name = getattr(getattr(getattr(func, "__self__", None), "fget", None), "__name__", "")
        if name in READS and args and isinstance(args[0], torch.Tensor) and not is_wrapper(args[0]):
            memory, tensor = self.recorder.memory, args[0]
            if not memory.is_constant(tensor):
                self.recorder.fail(memory.unreadable(f"Tensor.{name}", [tensor]))
            for one in memory.of(tensor):
                one.read_as_it_was()
        return func(*args, **(kwargs or {}))


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or all memory from its first element to its last one if it has gaps."""
    steps = sorted(((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1), reverse=True)
    if [stride for stride, _ in steps] == [*contiguous([size for _, size in steps])]:
        return tensor
    span = memory_range(tensor)
    size = len(span[1]) // tensor.element_size() if span else 0
    return tensor.detach().as_strided((size,), (1,), tensor.storage_offset())


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has all of its storage."""
    return tensor.numel() * tensor.element_size() >= storage_of(tensor).nbytes() and _without_gaps(tensor) is tensor


def _name_of(func: Any) -> str:
    name: str = func.overloadpacket._qualified_op_name
    return name.replace("::", ".")


def _own_name(func: Any) -> str:
    """Name of an operation of PyTorch itself; ``""`` for those of other libraries, which may have the same names."""
    return _name_of(func).removeprefix("aten.") if func.namespace == "aten" else ""


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
    memory, name = recorder.memory, ""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal name
        for name, (tensor, is_packed) in tensors.items():
            yield name, recorder.offer(equal.get(name, name), tensor, is_packed=is_packed)
        memory.is_last = True

    before = {one: Placement.of(parameter) for one, parameter in parameters.items()}
    raised: BaseException | None = None
    try:
        with torch.no_grad(), recorder, _Reads(recorder):
            load_weights(weights())
    except BaseException as error:
        raised = error
    after = _placements(owner)
    assigned, lost = snapshot.restore(recorder.is_recorded)
    if lost is not None:
        raise NotRecorded(f"the loader replaced the memory of {lost[0]!r}, which cannot be put back: {lost[1]}") from raised
    if raised is not None:
        _raise(raised, recorder, name)
    if recorder.failure is not None:
        raise recorder.failure
    for one, placement in before.items():
        if after.get(one) != placement:
            raise NotRecorded(f"the loader replaced the memory of parameter {one!r}: expected a copy into it", parameter=one)
    names = {attribute: memory.refusal("", kept, "").tensors for attribute, kept in assigned.items()}
    assigned.clear()
    _add_kept(memory, names)
    return Recording(memory.contents, memory.refusals, memory.ends_refused)


def _placements(owner: Any) -> dict[str, Placement]:
    """Where parameters are after a loader, which may have replaced some by anything."""
    try:
        return {name: Placement.of(parameter) for name, parameter in parameters_of(owner).items()}
    except Exception:
        return {}


def _raise(error: BaseException, recorder: Recorder, name: str) -> NoReturn:
    """Raises what a loader raised, as an error that names its line."""
    if isinstance(error, NotRecorded) or not isinstance(error, Exception):
        raise error
    if recorder.failure is not None:
        raise recorder.failure from None
    line = _innermost(error)
    message = f"the loader failed at {line}, the last tensor being {name!r}: {reason_of(error)}"
    raise NotRecorded(message, where=line, tensor=name or None) from error


def _add_kept(memory: Memory, assigned: Mapping[str, tuple[str, ...]]) -> None:
    """Refuses what the loader keeps outside of parameters: assigned to attributes, written to them, or anywhere else."""
    reason = "the loader keeps the tensor, and a map changes parameters and persistent buffers alone"
    for attribute, tensors in assigned.items():
        memory.refusals.append(Refusal("assignment", tensors, attribute, "", reason))
    for contents in memory.contents:
        if contents.name in assigned:
            contents.replace()
        if not contents.target.is_listed and contents.copies:
            line = next(iter(contents.copies)).where
            memory.refusals.append(Refusal("aten.copy_", tuple(contents.tensors), contents.name, line, reason))
    if left := memory.held():
        memory.refusals.append(Refusal("assignment", tuple(left), None, "", reason))


def _innermost(error: BaseException) -> str:
    """The innermost line of the loader in a traceback."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_of_loader(code.co_filename):
            found = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return found
