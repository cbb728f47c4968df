"""The operator ``tpde::linear``, which represents layers for compilers, exporters and autograd.

A weight is passed as its key, a tensor of five integers. One compiled graph therefore serves all layers of a shape, and a saved
program identifies the pair and the weight that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .._core.errors import InvalidArgument
from ._rebuilt import Weight, outliving


def _linear(
    x: torch.Tensor, bias: Optional[torch.Tensor], key: torch.Tensor, out_features: int, cast: bool = False
) -> torch.Tensor:
    return call(Weight.find(key, x.device), x, bias, out_features, cast)


def call(weight: Weight, x: torch.Tensor, bias: Optional[torch.Tensor], out_features: int, cast: bool) -> torch.Tensor:
    """What the operator computes, for this weight."""
    if weight.shape != (out_features, x.shape[-1] if x.dim() else 0):
        expected = f"an input of (..., {weight.shape[1]}) and {weight.shape[0]} outputs"
        found = f"an input of {tuple(x.shape)} and {out_features} outputs"
        raise InvalidArgument(f"tpde::linear with the weight {weight.entry.name!r}: expected {expected}, found {found}")
    return weight.linear(x, bias, cast)


def is_plain(x: torch.Tensor, bias: Optional[torch.Tensor], device: torch.device) -> bool:
    """Whether a call of the operator would only call its kernel. Then the kernel can be called directly: the dispatcher takes about
    as long as all else that Python does for a layer. Not for compilers, tracers, transforms, modes, derivatives, and tensors of
    other devices and kinds."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is torch.Tensor
        and (bias is None or type(bias) is torch.nn.Parameter)
        and x.device == device
        and x.layout is torch.strided
        and not x.is_nested
        and not (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
        and not is_observed()
    )


def is_observed() -> bool:
    """Whether a mode, transform or tracer observes operators."""
    return (
        forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() != 0
        or (torch._C._is_torch_function_mode_enabled() and _has_own_mode())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def _has_own_mode() -> bool:
    """Whether a mode for functions is active, except a default device."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _shape_of_linear(
    x: torch.Tensor, bias: Optional[torch.Tensor], key: torch.Tensor, out_features: int, cast: bool = False
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _refuse_gradients(
    x: torch.Tensor, bias: Optional[torch.Tensor], key: torch.Tensor, out_features: int, cast: bool = False
) -> torch.Tensor:
    """The autograd kernel. It refuses derivatives, because scratch memory is overwritten before a backward pass could read it."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise InvalidArgument("a JITCompressedLinear has no gradients: call it under torch.no_grad()")
    if forward_ad._current_level >= 0 and (_has_tangent(x) or (bias is not None and _has_tangent(bias))):
        raise InvalidArgument("a JITCompressedLinear has no tangents: call it outside of forward-mode differentiation")
    with _BelowAutograd():
        y: torch.Tensor = linear(x, bias, key, out_features, cast)
    return y


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _define() -> Any:
    library: Any = torch.library.Library("tpde", "DEF")  # type: ignore[no-untyped-call]
    # Excluded from CUDA graphs of torch.compile: the operator's memory is not from their pool.
    tags = [getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag)]
    library.define("linear(Tensor x, Tensor? bias, Tensor key, SymInt out_features, bool cast=False) -> Tensor", tags=tags)
    kernels: dict[str, Callable[..., torch.Tensor]] = {"CPU": _linear, "CUDA": _linear, "Autograd": _refuse_gradients}
    for where, kernel in kernels.items():
        library.impl("linear", kernel, where)
    torch.library.register_fake("tpde::linear", _shape_of_linear, lib=library)
    return library


_BelowAutograd = torch._C._AutoDispatchBelowAutograd
if not hasattr(torch.ops.tpde, "linear"):
    outliving("_library", _define())
#: The overload, resolved once to save time per call.
linear = torch.ops.tpde.linear.default
