"""The tensors of a model, and what a loader replaces in it while it is recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._core.arguments import check_name
from .._core.errors import InvalidArgument

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_SCALARS = (str, bytes, int, float)
_CONTAINERS = (dict, list, set, deque, tuple)
#: Dicts of a module whose entries are its attributes.
_OF_MODULES = ("_parameters", "_buffers", "_modules")


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the memory of a wrapper, such as a ``DTensor``: the elements of this rank. A wrapper of several tensors is
    returned as it is."""
    while is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        inner = [one for one in parts if isinstance(one, torch.Tensor)]
        if len(inner) != 1:
            break
        tensor = inner[0]
    return tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether operations are not those of a plain tensor."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage, without a function mode that sees it."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def storage_key(tensor: torch.Tensor) -> int:
    """What tensors of the same storage have in common: its address, or the storage itself if it has none."""
    storage = storage_of(tensor)
    return int(storage.data_ptr() or storage._cdata)


def memory_range(tensor: torch.Tensor) -> tuple[int, range] | None:
    """Address space of a tensor, and its bytes there from the first element to the last; ``None`` if there are none. Memory without
    data, as on the device ``meta``, has an address space per storage. All other memory is in one, also if several storages have it."""
    if is_wrapper(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return None
    storage, size = storage_of(tensor), tensor.element_size()
    address = int(storage.data_ptr())
    first = int(tensor.storage_offset())
    end = first + 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return 0 if address else int(storage._cdata), range(address + first * size, address + end * size)


class Placement(NamedTuple):
    """Where the elements of a tensor are."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Placement:
        """The placement of a tensor that has memory of its own."""
        return cls(
            int(storage_of(tensor)._cdata), int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        )


def parameters_of(owner: Any) -> dict[str, torch.Tensor]:
    """The tensors of a dict, or parameters and persistent buffers of a module, under all of their names. Wrappers are replaced by the
    tensors that have their memory."""
    if isinstance(owner, Mapping):
        for name, tensor in owner.items():
            is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_nested
            if not is_dense or torch.nn.parameter.is_lazy(tensor):
                raise InvalidArgument(f"parameter {name!r} is a {type(tensor).__name__}: expected a dense PyTorch tensor")
        return {check_name(name): memory_of(tensor) for name, tensor in owner.items()}
    if not hasattr(owner, "named_modules"):
        raise InvalidArgument(f"parameters is a {type(owner).__name__}: expected a dict of tensors or a module")
    found: dict[str, torch.Tensor] = {}
    for prefix, module in owner.named_modules(remove_duplicate=False):
        own = [*module._parameters.items()]
        own += [(name, one) for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set]
        found |= {f"{prefix}.{name}" if prefix else name: memory_of(tensor) for name, tensor in own if tensor is not None}
    return found


@dataclass(frozen=True)
class _Container:
    """A dict, list, set, deque or tuple, and a copy of it."""

    name: str
    #: Whether the keys are names of attributes, and the name is that of the module.
    has_names: bool
    value: Any
    before: Any

    def name_of(self, key: Any) -> str:
        """Name of the attribute that an entry is in."""
        return (f"{self.name}.{key}" if self.name else str(key)) if self.has_names else self.name

    def entries(self) -> Iterator[tuple[str, bool, Any]]:
        """Name, whether its keys are names of attributes, and value of each entry."""
        pairs = self.before.items() if isinstance(self.before, dict) else ((None, one) for one in self.before)
        for key, value in pairs:
            if self.has_names and key in _OF_MODULES and isinstance(value, dict):
                yield self.name, True, value
            else:
                yield self.name_of(key), isinstance(value, torch.nn.Module), value


def _container_of(value: Any) -> Any:
    """The container of what a value refers to: the value itself, or its attributes. ``None`` if there is none."""
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, _FUNCTIONS):
        return tuple(_parts_of(value))
    if isinstance(value, (type, ModuleType)):
        return None
    if type(value).__module__.startswith("torch.") and not isinstance(value, (torch.nn.Module, torch.Tensor)):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _parts_of(function: Any) -> Iterator[Any]:
    """What a function, a method or a ``functools.partial`` refers to."""
    if isinstance(function, partial):
        yield from (function.func, function.args, function.keywords)
        return
    yield getattr(function, "__self__", None)
    if (getattr(function, "__module__", None) or "").partition(".")[0] == "torch" and not hasattr(function, "__wrapped__"):
        return
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (getattr(function, name, None) for name in ("__func__", "__wrapped__", "__defaults__", "__kwdefaults__"))


def _within(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [one for one in parts if isinstance(one, torch.Tensor)]


@dataclass(frozen=True)
class _Before:
    """A tensor, and what it was."""

    name: str
    tensor: torch.Tensor
    #: Another tensor with the same memory.
    alias: torch.Tensor
    placement: Placement
    kind: type
    requires_grad: bool
    #: Its ``__dict__``, and a copy of it.
    own: dict[str, Any]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Before:
        own = vars(tensor)
        return cls(name, tensor, tensor.detach(), Placement.of(tensor), type(tensor), tensor.requires_grad, own, {**own})

    @property
    def is_swapped(self) -> bool:
        """Whether it has become another tensor, as ``torch.utils.swap_tensors`` does it."""
        return type(self.tensor) is not self.kind or vars(self.tensor) is not self.own

    def put_back(self) -> None:
        """Gives the tensor its memory again."""
        if not self.is_swapped:
            self.tensor.data = self.alias
            return
        made: torch.Tensor = torch.Tensor._make_subclass(self.kind, self.alias, self.requires_grad)
        vars(made).update(self.attributes)
        torch.utils.swap_tensors(self.tensor, made)  # type: ignore[no-untyped-call]


class Snapshot:
    """The attributes of a model and of its loader, to find and undo what the loader replaces."""

    def __init__(self, owner: Any, load_weights: Any) -> None:
        #: All tensors, with the name of an attribute that has them.
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._containers: list[_Container] = []
        self._known: dict[int, Any] = {}
        pending: list[tuple[str, bool, Any]] = [("", True, load_weights), ("", True, owner)]
        functions: list[tuple[str, bool, Any]] = []
        while pending or functions:
            if not pending:
                # A loader is a method of a model, or has it in a closure. Names are those in the model.
                name, has_names, function = functions.pop()
                pending += [(name, has_names, one) for one in (*_parts_of(function),)[::-1]]
                continue
            name, has_names, value = pending.pop()
            if value is None or isinstance(value, _SCALARS) or id(value) in self._known:
                continue
            self._known[id(value)] = value
            if isinstance(value, _FUNCTIONS):
                functions.append((name, has_names, value))
                continue
            if isinstance(value, torch.Tensor):
                self.tensors.append((name, value))
                pending += [(name, False, one) for one in _within(value)]
                has_names = True
            container = _container_of(value)
            if container is None or (container is not value and id(container) in self._known):
                continue
            self._known[id(container)] = container
            before = next(kind for kind in _CONTAINERS if isinstance(container, kind))(container)
            found = _Container(name, has_names and isinstance(container, dict), container, before)
            self._containers.append(found)
            pending += reversed([*found.entries()])
        self._before = [
            _Before.of(name, one)
            for name, one in self.tensors
            if not is_wrapper(one) and one.layout == torch.strided and not is_lazy(one)
        ]

    def restore(
        self, is_recorded: Callable[[torch.Tensor], bool]
    ) -> tuple[dict[str, list[torch.Tensor]], tuple[str, Exception] | None]:
        """Puts tensors back that were replaced or removed. Returns the recorded tensors that took their places, by attribute, and the
        first tensor that cannot be put back, with the reason."""
        found: dict[str, list[torch.Tensor]] = {}
        lost: tuple[str, Exception] | None = None
        for one in self._before:
            try:
                if not one.is_swapped and Placement.of(one.tensor) == one.placement:
                    continue
                if is_recorded(one.tensor):
                    found.setdefault(one.name, []).append(one.tensor.detach())
                one.put_back()
            except Exception as error:
                lost = lost or (one.name, error)
        for container in self._containers:
            if isinstance(container.value, dict):
                self._restore_dict(container, found, is_recorded)
            elif not isinstance(container.value, tuple):
                self._restore_entries(container, found, is_recorded)
        return found, lost

    def _restore_dict(self, one: _Container, found: dict[str, list[torch.Tensor]], is_recorded: Callable[[Any], bool]) -> None:
        value, before = one.value, one.before
        changed = False
        for key in [*before, *(key for key in [*value] if key not in before)]:
            old, new = before.get(key), value.get(key)
            if key in before and key in value and old is new:
                continue
            recorded = [tensor for tensor in self._new_in(new) if is_recorded(tensor)]
            if recorded:
                found.setdefault(one.name_of(key), []).extend(recorded)
            if recorded or self._has_lost(new) or next(_tensors_in(old, {}), None) is not None:
                changed = True
                if key in before:
                    value[key] = old
                else:
                    del value[key]
        changed |= any(isinstance(one, torch.Tensor) for one in before.values())
        if changed and [key for key in value if key in before] != [key for key in before if key in value]:
            for key in [key for key in before if key in value] + [key for key in value if key not in before]:
                value[key] = value.pop(key)

    def _restore_entries(self, one: _Container, found: dict[str, list[torch.Tensor]], is_recorded: Callable[[Any], bool]) -> None:
        old, new = ({id(entry): entry for entry in entries} for entries in (one.before, one.value))
        if [*map(id, one.before)] == [*map(id, one.value)]:
            return
        added = [entry for key, entry in new.items() if key not in old]
        recorded = [tensor for tensor in self._new_in(added) if is_recorded(tensor)]
        if recorded:
            found.setdefault(one.name, []).extend(recorded)
        if recorded or self._has_lost(added) or next(_tensors_in([*one.before], {}), None) is not None:
            one.value.clear()
            (one.value.update if isinstance(one.value, set) else one.value.extend)(one.before)

    def _new_in(self, value: Any) -> Iterator[torch.Tensor]:
        """The tensors that a value refers to, and the model did not refer to before."""
        return _tensors_in(value, self._known)

    def _has_lost(self, value: Any) -> bool:
        """Whether a new tensor has no data."""
        return any(one.is_meta for one in self._new_in(value))


def _tensors_in(value: Any, known: Mapping[int, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a value refers to, except by those that are known."""
    seen: dict[int, Any] = {}
    pending: list[Any] = [value]
    while pending:
        one = pending.pop()
        if id(one) in known or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            yield one
            pending += _within(one)
        container = _container_of(one)
        if container is not None and id(container) not in known and (container is one or id(container) not in seen):
            seen[id(container)] = container
            pending += container.values() if isinstance(container, dict) else container
