"""State that a captured graph assumes unchanged: of a model, and of objects that are passed to it."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

#: Types of values that cannot change.
_CONSTANT = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, range)
#: Types of values that are compared by identity alone.
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, nn.Module)


def is_constant(value: Any) -> bool:
    """Whether a value cannot change, so that comparing it is enough."""
    return isinstance(value, _CONSTANT)


class Memory:
    """Addresses of tensors, and versions of those on the CPU. Values on a CUDA device may change, because a replay reads them. Values
    on the CPU are part of a graph."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._on_cpu = [tensor for tensor in self._tensors if tensor.device.type == "cpu" and not tensor.is_inference()]
        self._was = self._now()

    def _now(self) -> list[int]:
        return [*(tensor.data_ptr() for tensor in self._tensors), *(tensor._version for tensor in self._on_cpu)]

    def holds(self) -> bool:
        """Whether the memory is the same."""
        return self._was == self._now()


class ObjectState:
    """State of an object: all that is reached through attributes, lists, tuples and dicts."""

    def __init__(self, value: Any) -> None:
        #: Type of a value whose state is unknown.
        self.unknown: type | None = None
        self._containers: list[Any] = []
        self._were: list[list[Any]] = []
        tensors: list[torch.Tensor] = []
        pending, found = [value], set()
        while pending:
            one = pending.pop()
            if id(one) in found or is_constant(one) or isinstance(one, _OPAQUE):
                continue
            found.add(id(one))
            if isinstance(one, torch.Tensor):
                tensors.append(one)
                continue
            container = one if isinstance(one, (list, tuple, dict)) else getattr(one, "__dict__", None)
            if container is None or any(vars(each).get("__slots__") for each in type(one).__mro__):
                self.unknown = type(one)
                continue
            self._containers.append(container)
            self._were.append(_items(container))
            pending += self._were[-1]
        self._memory = Memory(tensors)

    def holds(self) -> bool:
        """Whether the state is the same, except for values of tensors on a CUDA device."""
        return all(_same(_items(now), were) for now, were in zip(self._containers, self._were)) and self._memory.holds()


class Counted(nn.Module):
    """A module whose changes are counted. A graph compares one number, instead of the attributes of hundreds of layers."""

    #: Number of changes of attributes and hooks of all such modules.
    changes = 0

    @classmethod
    def _count(cls) -> None:
        Counted.changes += 1

    def __setattr__(self, name: str, value: Any) -> None:
        """As for other modules."""
        if name not in self.__dict__ or self.__dict__[name] is not value:  # `eval()` may change nothing
            self._count()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """As for other modules."""
        self._count()
        super().__delattr__(name)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As for other modules."""
        self._count()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As for other modules."""
        self._count()
        return super().register_forward_pre_hook(*args, **kwargs)


#: Attributes of every module that hold no state, or dicts whose state is compared.
_COMMON = {*vars(nn.Module())} - {"training"}


class ModelState:
    """State of a model: attributes and hooks of its modules, and its parameters and buffers.

    It is compared before every replay, so it does little per module.
    """

    _HOOKS = ("_forward_hooks", "_forward_pre_hooks")

    def __init__(self, model: nn.Module, except_for: str = "") -> None:
        # The model is not kept: it refers to its graphs, and would not be freed at once. ``except_for`` is that attribute.
        self._model = weakref.ref(model)
        modules = [module for module in model.modules() if module is not model]
        self._modules = [module for module in modules if not isinstance(module, Counted)]
        self._changes = Counted.changes
        names = [name for name in vars(model) if name not in _COMMON and name != except_for]  # one is "training"
        self._of_model = operator.itemgetter("training", *names)
        self._attributes = [(_getter_of(module), vars(module)) for module in self._modules]
        held = [vars(module)[name] for module in (*self._modules, model) for name in ("_parameters", "_buffers", "_modules")]
        hooks = [vars(module)[name] for module in self._modules for name in self._HOOKS]
        self._dicts = [one for one in (*held, *(module._parameters for module in modules if isinstance(module, Counted))) if one]
        self._counted = [*map(vars, self._modules), *held, *hooks]
        self._counts, self._were = [*map(len, self._counted)], self._values()
        self._memory = Memory([*model.parameters(), *model.buffers()])
        #: Whether hooks are called within the model. A graph would not call them.
        self.has_hooks = any(vars(module)[name] for module in modules for name in self._HOOKS)

    def _values(self) -> list[Any]:
        model = self._model()
        own = () if model is None else (len(vars(model)), *self._of_model(vars(model)))
        attributes = [getter(held) for getter, held in self._attributes]
        values = chain.from_iterable(map(dict.values, self._dicts))
        return [*own, *chain.from_iterable(attributes), *map(type, self._modules), *values]

    def holds(self) -> bool:
        """Whether the state is the same, except for values of tensors on a CUDA device."""
        try:
            is_same = (
                self._changes == Counted.changes
                and self._counts == [*map(len, self._counted)]
                and _same(self._values(), self._were)
            )
        except KeyError:  # an attribute was renamed
            return False
        return is_same and self._memory.holds()


def _getter_of(module: nn.Module) -> Callable[[Any], tuple[Any, ...]]:
    """Function from the attributes of a module to the values of those that its outputs depend on."""
    return operator.itemgetter("training", *(name for name in vars(module) if name not in _COMMON))


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _same(now: list[Any], were: list[Any]) -> bool:
    return len(now) == len(were) and all(map(operator.is_, now, were))
