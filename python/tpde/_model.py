"""The tensors of a model, and what a loader replaces in it while it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._errors import InvalidArgument
from ._paths import check_name

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
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


def storage_key(tensor: torch.Tensor) -> int:
    """What tensors of the same memory have in common: the address of the storage, or the storage itself if it has none."""
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or storage._cdata)


def memory_range(tensor: torch.Tensor) -> tuple[int, range] | None:
    """Storage of a tensor, and the bytes from its first element to its last; ``None`` if there are none."""
    if is_wrapper(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return None
    first, size = int(tensor.storage_offset()), tensor.element_size()
    end = first + 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return storage_key(tensor), range(first * size, end * size)


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
    """A dict, list, set or tuple, and a copy of it."""

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
    if isinstance(value, (dict, list, set, tuple)):
        return value
    if isinstance(value, _CODE) or (type(value).__module__.startswith("torch.") and not isinstance(value, torch.nn.Module)):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


class Snapshot:
    """The attributes of a model and of its loader, to find and undo what the loader replaces."""

    def __init__(self, owner: Any, load_weights: Any) -> None:
        #: All tensors, with the name of an attribute that has them.
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._containers: list[_Container] = []
        seen: dict[int, Any] = {}
        pending = [("", True, root) for root in (owner, *_owners_of(load_weights))]
        while pending:
            name, has_names, value = pending.pop()
            if isinstance(value, torch.Tensor):
                if id(value) not in seen:
                    seen[id(value)] = value
                    self.tensors.append((name, value))
                continue
            container = _container_of(value)
            if container is None or id(container) in seen:
                continue
            seen[id(container)] = container
            before = next(kind for kind in (dict, list, set, tuple) if isinstance(container, kind))(container)
            found = _Container(name, has_names and isinstance(container, dict), container, before)
            self._containers.append(found)
            pending += reversed([*found.entries()])
        plain = [one for _, one in self.tensors if not is_wrapper(one) and one.layout == torch.strided and not is_lazy(one)]
        self._data = [(one, one.detach()) for one in plain]

    def restore(self, is_recorded: Callable[[torch.Tensor], bool]) -> dict[str, list[torch.Tensor]]:
        """Puts tensors back that were replaced or removed. Returns the recorded tensors that took their places, by attribute."""
        found: dict[str, list[torch.Tensor]] = {}
        for one in self._containers:
            if isinstance(one.value, dict):
                for key in [*one.value.keys() | one.before.keys()]:
                    old, new = one.before.get(key), one.value.get(key)
                    recorded = [] if old is new else [tensor for tensor in _tensors_in(new) if is_recorded(tensor)]
                    if recorded:
                        found.setdefault(one.name_of(key), []).extend(recorded)
                    if recorded or (old is not new and (_tensors_in(old) or self._has_lost(new))):
                        if key in one.before:
                            one.value[key] = old
                        else:
                            del one.value[key]
            elif not isinstance(one.value, tuple):
                recorded = [tensor for value in one.value for tensor in _tensors_in(value) if is_recorded(tensor)]
                if recorded:
                    found.setdefault(one.name, []).extend(recorded)
                if recorded or self._has_lost(one.value):
                    one.value.clear()
                    (one.value.extend if isinstance(one.value, list) else one.value.update)(one.before)
        for tensor, alias in self._data:
            if tensor.untyped_storage()._cdata != alias.untyped_storage()._cdata:
                tensor.data = alias
        return found

    def _has_lost(self, value: Any) -> bool:
        """Whether a new tensor has no data."""
        known = {id(tensor) for _, tensor in self.tensors}
        return any(one.is_meta and id(one) not in known for one in _tensors_in(value))


def _owners_of(load_weights: Any) -> Iterator[Any]:
    """The objects that a loader is a method of, or has in its closure."""
    function = load_weights
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, (ModuleType, dict, list, set)):
        yield owner
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, torch.nn.Module):
            yield value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that a value refers to."""
    found, seen, pending = [], set(), [value]
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif (container := _container_of(one)) is not None and id(container) not in seen:
            seen.add(id(container))
            pending += container.values() if isinstance(container, dict) else container
    return found
