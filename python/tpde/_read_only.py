"""Tensors that refuse to be written, because the write would have no effect on a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ._errors import InvalidArgument


class ReadOnly(torch.Tensor):
    """A rebuilt weight, in memory of its own. Operators that would write to it are refused before they write.

    Views of it, and what shares its memory otherwise, refuse writes too. Other results are plain tensors, and it is copied and
    pickled as one. As a parameter of a module it belongs to that module, which can write it.
    """

    #: Calls go to the operators without a detour, so that code with a fast path for plain tensors takes it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(tensor: torch.Tensor) -> ReadOnly:
        """The tensor, without a copy."""
        made: ReadOnly = torch.Tensor._make_subclass(ReadOnly, tensor)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        shared: list[Any] = []
        for position, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                protected = list(filter(_is_protected, value if isinstance(value, (list, tuple)) else [value]))
                if protected and argument.alias_info.is_write:
                    raise _refusal(str(operator))
                shared += protected
        with torch._C._DisableTorchDispatch():
            result = operator(*args, **kwargs)
        if not shared:
            return result
        storages = {*map(_storage, shared)}
        return tree_map_only(torch.Tensor, lambda one: cls.of(one) if _storage(one) in storages else one, result)

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, _: torch.Tensor) -> None:
        raise _refusal("an assignment of data")

    def numpy(self, *, force: bool = False) -> Any:
        """An array that shares the memory."""
        return self._plain().numpy(force=force)

    def tolist(self) -> Any:
        """The elements."""
        return self._plain().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            plain = self.detach().as_subclass(torch.Tensor)
        return torch.nn.Parameter(plain, requires_grad=self.requires_grad) if isinstance(self, torch.nn.Parameter) else plain


def _is_protected(value: Any) -> bool:
    return isinstance(value, ReadOnly) and not isinstance(value, torch.nn.Parameter)


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the storage, also one without memory."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _refusal(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what} would write to a copy of the weight of an attached layer, which rebuilds its weight at each call: write to a "
        "clone() instead. To change the model's weights, change the model before tpde.nn.attach, or load its state_dict() into a "
        "model without attached layers"
    )
