"""The memory that a recorder follows: parameters, checkpoint tensors, and tensors made from these."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import torch
from torch.multiprocessing import reductions

from .._core.errors import NotRecorded
from ._contents import Contents, Refusal, Run, Target
from ._model import is_wrapper, memory_range, storage_key, storage_of
from ._strides import Origin, contiguous, follow, loops_of, merged

UNSEEN = "it is of a tensor whose origin was not seen: made in another thread, unpickled, or outside of the loader's reach"

_OWN_FOLDERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<frozen ")
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = (*(os.path.join(_STANDARD, name) + os.sep for name in ("site-packages", "dist-packages")),)


def is_of_loader(file: str) -> bool:
    """Whether code of this file is neither PyTorch's, nor this package's, nor of the standard library."""
    return not file.startswith(_OWN_FOLDERS) and (not file.startswith(_STANDARD) or file.startswith(_INSTALLED))


def where() -> str:
    """The innermost frame of the loader."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_of_loader(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


_weak: Any = reductions.StorageWeakRef


@dataclass(frozen=True)
class Known:
    """A storage with elements of a tensor."""

    storage: Any  # keeps the key unique
    tensor: str
    origin: Origin


@dataclass(frozen=True)
class Refused:
    """A storage with values that no map expresses."""

    storage: Any
    refusal: Refusal
    #: Tensors that have the same memory, in a form that is not followed.
    same_memory: tuple[torch.Tensor, ...] = ()


Source = Union[Known, Refused, Contents]


class Memory:
    """What is known of each memory. A storage that is neither followed nor a constant has values of unknown origin."""

    def __init__(self) -> None:
        self.values: dict[int, Known | Refused] = {}
        self.contents: list[Contents] = []
        self.refusals: list[Refusal] = []
        #: Names of the tensors that the loader has had.
        self.offered: list[str] = []
        #: Whether the loader has had all tensors.
        self.is_last = False
        #: Whether parameters were refused then. What it does at the end, it does in each call.
        self.ends_refused = False
        self._by_layout: dict[Any, Contents] = {}
        self._storages: set[int] = set()
        #: Parameters in the order of their memory, and where it begins, per address space. No two of them overlap.
        self._spaces: dict[int, tuple[list[int], list[Contents]]] = {}
        #: Storages that operations have made of constants alone. A weak reference keeps the key unique, and no data.
        self._constants: dict[int, Any] = {}

    def add(self, name: str, parameter: torch.Tensor, *, is_listed: bool) -> None:
        """Adds a parameter."""
        if is_wrapper(parameter):
            raise NotRecorded(f"parameter {name!r} is a {type(parameter).__name__} of several tensors", parameter=name)
        try:
            key, span = storage_key(parameter), memory_range(parameter)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise NotRecorded(f"parameter {name!r} has no memory of its own: {error}") from error
        shape, steps = [*parameter.shape], [*parameter.stride()]
        order = tuple(sorted(range(len(shape)), key=lambda dim: (-steps[dim], -shape[dim])))
        sizes, strides = [shape[dim] for dim in order], [steps[dim] for dim in order]
        if any(size > 1 and step != of for size, step, of in zip(sizes, strides, contiguous(sizes))):
            raise NotRecorded(
                f"parameter {name!r} of shape {tuple(parameter.shape)} and strides {parameter.stride()} has gaps in its memory"
            )
        layout = span or key, parameter.dtype, parameter.shape, parameter.stride()
        if known := self._by_layout.get(layout):
            known.target.names.append(name)
            return
        if others := self.of(parameter):
            raise NotRecorded(f"parameters {others[0].name!r} and {name!r} share memory, but are not the same")
        one = Contents(Target([name], parameter, span[1] if span else range(0), order, is_listed))
        self.contents.append(one)
        self._by_layout[layout] = one
        self._storages.add(key)
        if span:
            starts, contents = self._spaces.setdefault(span[0], ([], []))
            at = bisect_left(starts, span[1].start)
            starts.insert(at, span[1].start)
            contents.insert(at, one)

    def is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has elements of a checkpoint, or is in the memory of parameters."""
        if tensor.layout != torch.strided:
            return False
        key = storage_key(tensor)
        return key in self.values or key in self._storages or bool(self.of(tensor))

    def is_constant(self, tensor: Any) -> bool:
        """Whether a tensor or a storage is known to have no elements of a checkpoint: operations made it of constants, or it is a
        parameter that the loader has not written."""
        if isinstance(tensor, torch.UntypedStorage):
            return tensor._cdata in self._constants
        if is_wrapper(tensor) or tensor.layout != torch.strided:
            return False
        if not tensor.numel():
            return True
        if found := self.of(tensor):
            return all(one.is_untouched for one in found)
        return storage_key(tensor) not in self.values and storage_of(tensor)._cdata in self._constants

    def mark(self, tensors: Iterable[torch.Tensor], *, constant: bool) -> None:
        """Notes whether the storages of tensors have constants alone."""
        for tensor in tensors:
            if not is_wrapper(tensor) and tensor.layout == torch.strided and not self.is_followed(tensor):
                storage = storage_of(tensor)
                if constant:
                    self._constants[storage._cdata] = _weak(storage)
                else:
                    self._constants.pop(storage._cdata, None)

    def mark_made(self, tensors: Iterable[torch.Tensor], operation: str) -> None:
        """Notes that an operation made tensors of constants. One without data and values is not, because unpickling makes the same."""
        self.mark((one for one in tensors if "empty" not in operation or not one.is_meta), constant=True)

    def of(self, memory: torch.Tensor) -> list[Contents]:
        """The parameters that have some of this memory."""
        span = memory_range(memory)
        if span is None or span[0] not in self._spaces:
            return []
        starts, contents = self._spaces[span[0]]
        first = max(bisect_right(starts, span[1].start) - 1, 0)
        return [one for one in contents[first : bisect_left(starts, span[1].stop)] if one.target.bytes.stop > span[1].start]

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
        if (span[1].start - target.bytes.start) % memory.element_size():
            return f"its elements begin within those of parameter {found[0].name}"
        return found[0]

    @staticmethod
    def offset(memory: torch.Tensor, one: Contents) -> int:
        """Where elements begin in the memory of the parameter that has them, in elements."""
        span = memory_range(memory)
        return (span[1].start - one.target.bytes.start) // memory.element_size() if span else 0

    def source(self, values: torch.Tensor) -> Source | None:
        """Where a tensor's elements come from; ``None`` if it is not followed."""
        one = self.one_of(values)
        if isinstance(one, Contents) and one.refusals:
            return Refused(None, replace(one.refusals[0], parameter=None, tensors=tuple(one.tensors)))
        if isinstance(one, str):
            return Refused(None, self.refusal("a read", [values], one))
        return one or self.values.get(storage_key(values))

    def runs(self, values: torch.Tensor, source: Known | Contents, to: Sequence[int]) -> list[Run]:
        """The elements of a tensor, with strides of the destination. Leading dims that ``to`` lacks are of one element. Raises
        ``NotRectangles``."""
        skipped = values.dim() - len(to)
        loops = loops_of(values.shape[skipped:], values.stride()[skipped:], to)
        if isinstance(source, Contents):
            return source.read(loops, self.offset(values, source))
        followed, start = follow(loops, int(values.storage_offset()), source.origin)
        return [Run(source.tensor, tuple(merged(followed)), start, 0)]

    def refusal(self, operation: str, tensors: Iterable[torch.Tensor], reason: str) -> Refusal:
        """A refusal of an operation with these arguments, which is not listed yet. A tensor of unknown origin may have elements of each
        tensor that the loader has had."""
        names: list[str] = []
        for tensor in tensors:
            known = self.values.get(storage_key(tensor))
            names += known.refusal.tensors if isinstance(known, Refused) else [known.tensor] if known is not None else []
            names += [name for one in self.of(tensor) for name in one.tensors]
            if not self.is_followed(tensor) and not self.is_constant(tensor):
                names += self.offered
        return Refusal(operation, tuple(dict.fromkeys(names)), None, where(), reason)

    def unreadable(self, operation: str, tensors: Iterable[torch.Tensor]) -> NotRecorded:
        """The error of a read of values that differ without data."""
        return self.refusal(operation, tensors, "the result depends on values")._error()

    def refuse(self, memory: torch.Tensor, refusal: Refusal) -> None:
        """Refuses the parameters that have this memory, or what is read from it later."""
        found = self.of(memory)
        for one in found:
            named = replace(refusal, parameter=one.name, where=refusal.where or where())
            self.refusals = [other for other in self.refusals if other is not refusal]
            if named not in self.refusals:
                self.refusals.append(named)
            one.refuse(named)
            self.ends_refused |= self.is_last
        if not found and memory.numel():
            before = self.values.get(storage_key(memory))
            same_memory = before.same_memory if isinstance(before, Refused) else ()
            self.values[storage_key(memory)] = Refused(storage_of(memory), refusal, same_memory)
            self.refusals.append(refusal)
            for other in same_memory:
                self.refuse(other, refusal)

    def held(self) -> list[str]:
        """Forgets all values. Returns the names of tensors of which something still has elements."""
        names = [(one.tensor,) if isinstance(one, Known) else one.refusal.tensors for one in self.values.values()]
        left = [(_weak(one.storage), of) for one, of in zip(self.values.values(), names)]
        self.values.clear()
        if any(not storage.expired() for storage, _ in left):
            gc.collect()
        return [*dict.fromkeys(name for storage, of in left if not storage.expired() for name in of)]
