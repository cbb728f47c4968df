"""Linear layers that rebuild their weights, and what they check when a state dict is loaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._core.errors import InvalidArgument
from .._memory.torch_tensors import ReadOnly, same_bits
from . import _operator
from ._fixed import Counted
from ._rebuilt import Weight


class JITCompressedLinear(Counted, nn.Linear):
    """A linear layer that rebuilds its weight at every call. :func:`attach` turns an ``nn.Linear`` into one.

    ``y = x Wᵀ + b``, with ``W`` of shape ``(out_features, in_features)``. The output equals that of ``nn.Linear`` with the target
    weight, bit for bit. It is computed by the operator ``tpde::linear(x, bias, key, out_features, cast)``, which ``torch.compile``,
    ``torch.export`` and ``torch.jit.trace`` keep as one operator, so one graph serves all layers of a shape. ``key`` identifies the
    pair, by its digest, and the tensor. A program that is loaded in another process needs a model there to which the same pair is
    attached, on the same device; with another pair it is refused.

    The bias is a parameter without gradients. The weight is not a parameter: ``parameters()`` and optimizers do not see it. The
    state dict has it, rebuilt on the layer's device in memory of its own, and tied weights are tied there too. A deep copy of the
    layer shares the weight. The weight cannot be replaced: ``load_state_dict`` accepts only equal values, also with
    ``strict=False``. Conversions such as ``half()`` apply to the rebuilt weight.

    Raises:
        InvalidArgument: When it is called with an input of another dtype, or one that needs a derivative: one that requires
            gradients, has a tangent, or belongs to a transform of ``torch.func``. When its weight would be replaced, written, moved
            to another device, converted after a conversion with loss, or pickled.
        Invalid: When a payload is damaged, or the base was changed. On a CUDA device it is raised by a later call of any layer of
            the same model, or by :meth:`Attached.check`.
    """

    _weight: Weight
    #: The dtype to which the layer was converted. At first that of the weight.
    _dtype: torch.dtype
    key: torch.Tensor

    def __init__(self) -> None:
        raise InvalidArgument("layers that rebuild their weights are made by tpde.nn.attach")

    @property
    def handle(self) -> int:
        """Identifies the weight in this process."""
        return self._weight.handle

    @property
    def weight(self) -> torch.Tensor:
        """The weight, rebuilt in new memory. It cannot be written, a clone of it can."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return ReadOnly.of(self._weight.rebuilt().to(self._dtype))

    @weight.setter
    def weight(self, _: Any) -> None:
        raise self._is_fixed("replaced")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As for other modules."""
        if name == "weight":
            raise self._is_fixed("replaced")
        super().register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``(…, in_features)``, of the weight's dtype and on its device. Returns ``(…, out_features)``."""
        cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
        if cast:  # as PyTorch does for nn.Linear; explicit for the operator's fake kernel
            x = x.to(torch.get_autocast_dtype(x.device.type))
        elif x.dtype != self._dtype:
            raise InvalidArgument(f"layer with the weight {self._name}: expected an input in {self._dtype}, found {x.dtype}")
        if self._dtype != self._weight.dtype:
            self._check_conversion(x.dtype)
            cast = True
        bias = self.bias
        if _operator.is_plain(x, bias, self._weight.torch_device):
            return _operator.call(self._weight, x, bias, self.out_features, cast)
        y: torch.Tensor = _operator.linear(x, bias, self.key, self.out_features, cast)
        return y

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, tensor={self._name}"
        )

    @property
    def _name(self) -> str:
        return repr(self._weight.entry.name)

    def _is_fixed(self, what: str) -> InvalidArgument:
        return InvalidArgument(
            f"the weight {self._name} is rebuilt from a base and a pair, and cannot be {what}: change the model before "
            "tpde.nn.attach, or load its state_dict() into a model without attached layers"
        )

    def _check_conversion(self, dtype: torch.dtype) -> None:
        """The weight is converted once, from its own dtype. That equals two conversions if the first one is without loss."""
        stored, current = self._weight.dtype, self._dtype
        if dtype != current and not _holds(current, stored):
            raise self._is_fixed(f"converted from {stored} to {current} and then to {dtype}")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> JITCompressedLinear:  # noqa: FBT001, FBT002
        probe = fn(torch.empty((0, 0), dtype=self._dtype, device=self._weight.torch_device))
        if probe.device != self._weight.torch_device:
            raise self._is_fixed(f"moved from {self._weight.torch_device} to {probe.device} (device= of attach chooses its device)")
        self._check_conversion(probe.dtype)
        self._dtype = probe.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        name = f"{prefix}weight"
        # Layers with one weight share it, so that tools see that they are tied.
        earlier, saved = self._weight.saved or ("", None)
        weight: Any = destination.get(earlier)
        if saved is None or weight is None or weight.dtype != self._dtype or weight is not saved():
            weight = self.weight
            self._weight.saved = name, weakref.ref(weight)
        destination[name] = weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,  # noqa: FBT001
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = f"{prefix}weight"
        if strict and name not in state_dict:
            missing_keys.append(name)
        self._check_loaded(state_dict, prefix, "Nothing of this layer was loaded, but tensors of other modules may have been")
        others = {key: value for key, value in state_dict.items() if key != name}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _check_loaded(self, state_dict: Mapping[str, Any], prefix: str, loaded: str) -> None:
        """Raises if loading would change the weight. ``loaded`` says what was loaded before."""
        name = f"{prefix}weight"
        if name not in state_dict:
            return
        given, own = state_dict[name], self.weight
        if isinstance(given, torch.Tensor) and given.shape == own.shape and not given.is_meta:
            if not is_traceable_wrapper_subclass(given) and same_bits(given.detach().to(own.device, own.dtype), own):
                return
        raise InvalidArgument(
            f"{name!r} is not the weight that the attached layer rebuilds, which cannot be replaced. {loaded}: load into a model "
            "without attached layers"
        )


def _check_all_loaded(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Called before anything is loaded into the model, so that a refusal leaves it unchanged."""
    of = (
        f"Nothing of {prefix[:-1]!r} was loaded, but tensors of modules around it may have been" if prefix else "Nothing was loaded"
    )
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, JITCompressedLinear):
            layer._check_loaded(state_dict, f"{prefix}{name}." if name else prefix, of)


def _check_part_loaded(part: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    if not prefix:  # it is loaded on its own: the model was not checked
        _check_all_loaded(part, state_dict, prefix)


def add_checks(model: nn.Module) -> None:
    """Adds the checks to a model and to its parts with attached layers."""
    for part in model.modules():
        if part is model:
            part.register_load_state_dict_pre_hook(_check_all_loaded)  # type: ignore[no-untyped-call]
        elif any(isinstance(one, JITCompressedLinear) for one in part.modules()):
            part.register_load_state_dict_pre_hook(_check_part_loaded)  # type: ignore[no-untyped-call]


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether each value of one dtype is a value of the other."""
    try:
        return wide == narrow or torch.promote_types(wide, narrow) == wide
    except RuntimeError:  # of 8 bits, for example
        return False


def convert(plain: nn.Linear, weight: Weight, bias: nn.Parameter | None) -> JITCompressedLinear:
    """Turns a linear layer into one that rebuilds its weight. It stays the same object, with its hooks, its attributes and any
    ``forward`` of the instance, so all references to it see the converted layer."""
    layer: Any = plain
    del layer.weight
    layer.__class__ = JITCompressedLinear
    layer._weight, layer._dtype, layer.bias = weight, weight.dtype, bias
    # Not a buffer, so that it stays on the CPU, where the operator reads it.
    layer.key = torch.tensor(weight.key, dtype=torch.int64, device="cpu")
    converted: JITCompressedLinear = layer
    return converted
