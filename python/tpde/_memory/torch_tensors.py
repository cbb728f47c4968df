"""PyTorch tensors as memory for the Rust half. It receives addresses, because exchange protocols such as DLPack lack dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from .. import _tpde
from .._core.errors import InvalidArgument, make_error
from .tensor import BITS, TORCH, Memory, as_expected, byte_shape, is_packed, no_memory, pitch_and_size

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in TORCH.items() if hasattr(torch, own)}
if hasattr(torch, "float4_e2m1fn_x2"):
    _DTYPES["F4"] = torch.float4_e2m1fn_x2
_NAMES = {own: name for name, own in _DTYPES.items()}


def dtype_of(name: str) -> torch.dtype:
    """The PyTorch dtype; ``torch.uint8`` if PyTorch lacks it."""
    return _DTYPES.get(name, torch.uint8)


def has_name(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype can be in a checkpoint."""
    return dtype in _NAMES


#: Integer dtypes by bytes per element.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_device(device: Any) -> torch.device:
    """The device, if its tensors can be read and written. A CUDA device without an index gets one."""
    try:
        parsed: torch.device = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        is_path = isinstance(device, str) and ("/" in device or device.endswith(".safetensors"))
        reason = "a base is passed as base=" if is_path else error
        raise make_error("no_device", f"no device {device!r}: {reason}", device=str(device)) from error
    if parsed.type == "cpu":
        return parsed
    why = "only the CPU and CUDA devices are supported"
    if parsed.type == "cuda":
        try:
            if torch.cuda.is_available():
                number = torch.cuda.current_device() if parsed.index is None else parsed.index
                if number < torch.cuda.device_count():
                    return torch.device("cuda", number)
                why = f"PyTorch finds {torch.cuda.device_count()} CUDA devices"
            else:
                why = "PyTorch finds no CUDA device"
        except RuntimeError as error:  # for example, a process forked after CUDA was used
            raise make_error("no_device", f"PyTorch cannot use {parsed}: {error}", device=str(parsed)) from error
    raise make_error("no_device", f"tensors on {parsed} cannot be read or written: {why}", device=str(parsed))


def describe(
    name: str,
    tensor: torch.Tensor,
    expected: tuple[str, list[int]] | None = None,
    device: Any = "cpu",
    *,
    writable: bool = False,
    has_rows: bool = False,
) -> Memory:
    """Checks a tensor on this device and describes its memory. A tensor that ``has_rows`` need not be contiguous."""
    if writable and isinstance(tensor, ReadOnly):
        raise InvalidArgument(
            f"tensor {name!r} is a copy of the weight of an attached layer, which rebuilds its weight at each call: apply the pair to "
            "a model without attached layers"
        )
    without_memory = f"tensor {name!r} is a {type(tensor).__name__} on {tensor.device} without memory of its own"
    if tensor.device.type == "meta" or is_traceable_wrapper_subclass(tensor):
        raise InvalidArgument(without_memory)
    if tensor.device != torch.device(device):
        if tensor.device.type == "cpu":
            raise InvalidArgument(f"tensor {name!r} is on the CPU, others are on {device}")
        check_device(tensor.device)
        if str(device) == "cpu":
            message = f"tensor {name!r} is on {tensor.device}, and only tensors on the CPU can be read here: tensor.cpu() copies it"
            raise make_error("no_device", message, device=str(tensor.device))
        raise InvalidArgument(
            f"tensor {name!r} is on {tensor.device}, others are on {device}: call once per device, with strict=False"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise InvalidArgument(f"tensor {name!r} is sparse or quantized: pass the dense tensors that it consists of")
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise InvalidArgument(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be in a checkpoint")
    item = tensor.element_size()
    if has_rows:
        bytes = pitch_and_size(name, tuple(tensor.shape), tuple(stride * item for stride in tensor.stride()), item)[1]
    elif tensor.is_contiguous():
        bytes = tensor.numel() * item
    else:
        layout = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        raise make_error("not_contiguous", f"tensor {name!r} is not contiguous ({layout})", tensor=name)
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"tensor {name!r} is conjugated or negated lazily: call resolve_conj and resolve_neg first")
    shape: list[int] = [*tensor.shape]
    if dtype == "F4":  # an element of PyTorch's dtype is two elements
        shape = [*shape[:-1], 2 * shape[-1]] if shape else [2]
    dtype, shape = as_expected(name, dtype, shape, expected)
    try:
        storage = tensor.untyped_storage()
        # The storage of a fake tensor is on another device. The storage of a sharded tensor may have been freed by its library.
        needed = tensor.storage_offset() * item + bytes
        if bytes and (storage.device != tensor.device or storage.nbytes() < needed):
            raise InvalidArgument(without_memory)
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise InvalidArgument(without_memory) from error
    # Keeps the storage alive too, because `tensor.data = other` would free it.
    return name, dtype, shape, address, bytes, (tensor, storage)


_PLAIN = {torch.Tensor, torch.nn.Parameter}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
#: Names of the dtypes that are neither packed nor complex. Complex tensors may be conjugated lazily.
_PLAIN_NAMES = {own: name for own, name in _NAMES.items() if name != "F4" and not own.is_complex}
_devices = attrgetter("device")
_dtypes = attrgetter("dtype")
_layouts = attrgetter("layout")
_shapes = attrgetter("shape")


def columns_of(names: list[str], tensors: list[Any], device: Any) -> _tpde.Columns | None:
    """Properties of tensors on this device, for :meth:`_tpde.Outline.plain`. With these, tensors are described as by :func:`describe`, in
    less time. ``None`` if a tensor is not a plain one. The caller then uses :func:`describe`, which finds the reason."""
    try:
        device = torch.device(device)
        if not _PLAIN.issuperset(map(type, tensors)) or not {torch.strided}.issuperset(map(_layouts, tensors)):
            return None
        if device.type not in ("cpu", "cuda") or not all(map(device.__eq__, map(_devices, tensors))):
            return None
        if not all(map(torch.Tensor.is_contiguous, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
            return None
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        return (
            names,
            list(map(_PLAIN_NAMES.get, map(_dtypes, tensors))),
            list(map(_shapes, tensors)),
            list(map(torch.Tensor.data_ptr, tensors)),
            list(map(torch.Tensor.storage_offset, tensors)),
            list(map(torch.UntypedStorage.nbytes, storages)),
            (tensors, storages),  # a storage is kept too, because `tensor.data = other` would free it
        )
    except RuntimeError:  # within torch.vmap or for nested tensors, for example
        return None


def storages_of(values: list[Any]) -> list[int | None]:
    """Addresses of the tensors' storages, which are unique across devices. ``None`` for values that are not tensors or have no
    storage, and for tensors on the device ``meta``."""
    if _PLAIN.issuperset(map(type, values)) and {torch.strided}.issuperset(map(_layouts, values)):
        try:
            return [address or None for address in map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, values))]
        except (RuntimeError, NotImplementedError, ValueError):
            pass
    return list(map(_storage, values))


def _storage(tensor: Any) -> int | None:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type not in ("cpu", "cuda"):
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, not initialized, or no memory of its own
        return None


def in_storages_of(tensors: Mapping[str, Any], written: list[str]) -> list[str]:
    """Names of all tensors in the storages of those that are written."""
    storages = dict(zip(tensors, storages_of(list(tensors.values()))))
    changed = {storages[name] for name in written} - {None}
    return [name for name, storage in storages.items() if storage in changed]


def version_raiser(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """A function that increments the autograd version counter of each tensor once. Those of views are those of their parameters."""
    # Tensors made in inference mode have no version counters.
    counted = [one for one in {id(one): one for one in tensors}.values() if not one.is_inference()]

    def raise_versions() -> None:
        try:
            torch.autograd.graph.increment_version(counted)
        except (AttributeError, TypeError, RuntimeError):  # PyTorch before 2.6 takes a single tensor
            for tensor in counted:
                torch.autograd.graph.increment_version(tensor)

    return raise_versions


class StateSnapshot:
    """A snapshot of the properties of all tensors of a state dict, to detect whether a later state dict has the same tensors.

    It compares what :func:`describe` checks, which is faster than checking again. Addresses alone do not suffice: a storage may have
    been freed, and a smaller one allocated at the same address. An address is on one device, and the offset of a tensor follows from
    the two addresses. Only complex tensors can be conjugated lazily.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.names = list(tensors)
        self.properties = self._properties(list(tensors.values()))

    def same(self, tensors: Mapping[str, Any]) -> bool:
        """Whether these tensors have the same names and properties."""
        if self.properties is None or list(tensors) != self.names:
            return False
        return self._properties(list(tensors.values())) == self.properties

    @staticmethod
    def _properties(tensors: list[Any]) -> tuple[list[Any], ...] | None:
        """``None`` if some are subclasses, sparse, or without storage."""
        if not _PLAIN.issuperset(map(type, tensors)):
            return None
        try:
            storages = list(map(torch.Tensor.untyped_storage, tensors))
            dtypes = list(map(_dtypes, tensors))
            has_complex = not _COMPLEX.isdisjoint(dtypes)
            return (
                list(map(torch.Tensor.data_ptr, tensors)),
                list(map(torch.UntypedStorage.data_ptr, storages)),
                list(map(torch.UntypedStorage.nbytes, storages)),
                list(map(torch.Tensor.is_contiguous, tensors)),
                list(map(torch.Tensor.is_neg, tensors)),
                list(map(torch.Tensor.is_conj, tensors)) if has_complex else [],
                dtypes,
                list(map(_shapes, tensors)),
            )
        except (RuntimeError, NotImplementedError, ValueError):  # sparse, on no device, or not initialized
            return None


class TorchAllocator:
    """Allocates tensors on a device."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = device

    def empty(self, name: str, dtype: str, shape: list[int]) -> tuple[torch.Tensor, Memory]:
        """A new tensor, and its memory."""
        dims = byte_shape(dtype, shape) if is_packed(dtype) else shape
        own = dtype_of(dtype)
        if is_packed(dtype) and len(dims) != len(shape):
            own = torch.uint8  # rows are not whole bytes
        try:
            tensor = torch.empty(dims, dtype=own, device=self.device, requires_grad=False)
        except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
            raise no_memory(name, dtype, shape) from error
        return tensor, (name, dtype, shape, tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)

    def contiguous(self, tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """A contiguous copy in this shape, in memory of its own."""
        return tensor.reshape(shape).clone(memory_format=torch.contiguous_format)


def values_of(raw: bytearray, dtype: str) -> torch.Tensor:
    """The bytes as a tensor of this dtype."""
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype_of(dtype) if BITS[dtype] >= 8 else torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits."""
    integers = INTEGERS[one.element_size()]
    return torch.equal(one.view(integers), other.view(integers))


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
        storages = {*map(_identity, shared)}
        return tree_map_only(torch.Tensor, lambda one: cls.of(one) if _identity(one) in storages else one, result)

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


def _identity(tensor: torch.Tensor) -> int:
    """Identifies the storage, also one without memory."""
    return int(tensor.untyped_storage()._cdata)


def _refusal(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what} would write to a copy of the weight of an attached layer, which rebuilds its weight at each call: write to a "
        "clone() instead. To change the model's weights, change the model before tpde.nn.attach, or load its state_dict() into a "
        "model without attached layers"
    )
