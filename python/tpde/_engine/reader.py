"""Reading the target of a pair tensor by tensor."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from functools import cached_property
from itertools import compress
from typing import Any

from .. import _tpde
from .._core.arguments import check_kinds, check_name
from .._core.errors import InvalidArgument, make_error
from .._core.progress import Progress, progress_callback
from .._files.paths import Digest, StrPath, check_digest, is_path, open_pair, path_of
from .._memory.arrays import NumPyAllocator, describe_each, device_of, together
from .._memory.index import complete, selected
from .._memory.tensor import Entry, Memories, SliceMemory, is_packed


def allocator_of(framework: str, device: Any, *, as_integers: bool = False) -> tuple[Any, Any]:
    """The CUDA device that receives tensors, ``None`` for the CPU, and what allocates them there."""
    check_kinds(framework=framework, as_integers=as_integers)
    if framework in ("pt", "torch", "pytorch"):
        from .._memory.torch_tensors import TorchAllocator, check_device

        checked = check_device(device)
        return None if checked.type == "cpu" else checked, TorchAllocator(checked)
    if framework not in ("np", "numpy"):
        raise InvalidArgument(f"unknown framework {framework!r}: expected 'pt' or 'np'")
    if str(device) != "cpu":
        raise make_error("no_device", f"NumPy has no device {device}", device=str(device))
    return None, NumPyAllocator(as_integers=as_integers)


class Reader:
    """A pair and its base, for one framework. `safe_open` and the functions of `tpde.torch` and `tpde.numpy` share it."""

    def __init__(
        self,
        pair: Any,
        base: Any,
        framework: str,
        device: Any = "cpu",
        *,
        expect: Digest | None = None,
        is_read_once: bool = False,
        as_integers: bool = False,
    ) -> None:
        #: The CUDA device that receives the tensors; ``None`` for the CPU.
        self.device: Any
        self.device, self.allocator = allocator_of(framework, device, as_integers=as_integers)
        #: The pair on that device, if tensors are rebuilt there; ``None`` if they are rebuilt on the CPU and copied.
        self.on_device: Any = None
        #: Whether `on_device` belongs to the caller, who may use it for other calls.
        self.on_device_is_kept = False
        self.tensors: Mapping[str, Any] | None = None
        #: The columns of these tensors, if known.
        self.columns: _tpde.Columns | None = None
        path = None
        if is_path(base):
            path = path_of(base)
        elif base is not None:
            self.tensors = state_of(base)
        if self.device is not None:
            # With a base in files or on the CPU, tensors are rebuilt on the CPU and copied to the device.
            if device_of((self.tensors or {}).values()) is not None or base is None:
                self._open_on_device(pair, expect, is_read_once=is_read_once)
            else:
                self.allocator = allocator_of(framework, "cpu")[1]
        if self.on_device is None:
            self.pair = open_pair(pair, path, expect)
        self.has_base_files = path is not None

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """All tensors by name, names ascending."""
        listed = list(map(Entry._make, self.pair.tensors())) if self.on_device is None else self.on_device._entries()
        return {entry.name: entry for entry in listed}

    def _open_on_device(self, pair: Any, expect: Digest | None, *, is_read_once: bool) -> None:
        from .device import DevicePair, open_ahead

        if is_read_once and not isinstance(pair, DevicePair):
            opened, ready, (self.columns,) = open_ahead(pair, expect, self.device, self.tensors)
            self.on_device = ready or DevicePair._of_opened(pair, opened, self.device)
        elif not isinstance(pair, DevicePair):
            self.on_device = DevicePair(pair, self.device, payloads="file", expect=expect)
        elif pair.device == self.device:
            check_digest(pair._pair, expect)
            self.on_device, self.on_device_is_kept = pair, True
        else:
            raise InvalidArgument(f"the pair is on {pair.device}, the tensors go to {self.device}")
        self.pair = self.on_device._pair

    def entry(self, name: str) -> Entry:
        """The tensor of this name."""
        try:
            return self.entries[name]
        except (KeyError, TypeError):  # an invalid name may not be hashable
            raise InvalidArgument(f"no tensor {name!r} in the pair") from None

    def base_of(self, outline: _tpde.Outline) -> Memories | None:
        """The base tensors of these tensors; ``None`` if the base is files."""
        where = "cpu" if self.on_device is None else self.device
        return None if self.tensors is None else bases(outline, self.tensors, where, self.columns)

    def read(self, names: list[str] | None = None, *, digests: bool = True, progress: Progress = None) -> dict[str, Any]:
        """Rebuilds these tensors, or all."""
        if names is None:
            outline = self.pair.outline()
            kinds = [(name, dtype, shape or []) for name, (dtype, shape) in zip(outline.names(), outline.expected())]
        else:
            kinds = [self.entry(name)[:3] for name in names]
            outline = self.pair.outline(names)
        base = self.base_of(outline)
        results = {name: self.allocator.empty(name, dtype, shape) for name, dtype, shape in kinds}
        outputs = [memory for _, memory in results.values()]
        if self.on_device is not None:
            _, application = self.on_device._apply(together(outline, outputs), base or [], "out_of_place", progress)
            if names is None and self.on_device_is_kept:
                shapes = [(name, [*tensor.shape], tensor.dtype) for name, (tensor, _) in results.items()]
                self.on_device._remember(application, None, self.tensors, results=shapes)
            return {name: tensor for name, (tensor, _) in results.items()}
        with progress_callback(progress, "load") as callback:
            self.pair.read(outputs, base=base, digests=digests, progress=callback)
        return {name: self._to_device(tensor) for name, (tensor, _) in results.items()}

    def _to_device(self, tensor: Any) -> Any:
        """Copies a rebuilt tensor to the requested device."""
        return tensor if self.device is None else tensor.to(self.device)

    def read_rectangle(self, entry: Entry, origin: list[int], extent: list[int], shape: list[int], *, digests: bool) -> Any:
        """The elements of a rectangle, in this shape. On the CPU, only the chunks that hold them are decoded."""
        if 0 in shape:
            return self._to_device(self.allocator.empty(entry.name, entry.dtype, shape)[0])
        if self.on_device is not None:
            ends = map(int.__add__, origin, extent)
            return self.read([entry.name])[entry.name][tuple(map(slice, origin, ends))].reshape(shape).clone()
        tensor, memory = self.allocator.empty(entry.name, entry.dtype, shape)
        held: list[SliceMemory] = [((entry.name, entry.dtype, entry.shape, *memory[3:]), origin, extent, None)]
        base = self.base_of(self.pair.outline([entry.name]))
        self.pair.read(held, base=base, digests=digests, progress=None)
        return self._to_device(tensor)


def bases(outline: _tpde.Outline, tensors: Mapping[str, Any], device: Any, columns: _tpde.Columns | None = None) -> Memories:
    """The base tensors of these tensors that are in ``tensors``, without duplicates. ``columns`` are those of ``tensors``."""
    outline = outline.bases()
    described = None if columns is None else outline.plain(columns)
    if described is not None:
        return described
    values = list(map(tensors.get, outline.names()))
    found = [value is not None for value in values]
    if not all(found):
        outline, values = outline.select(found), [*compress(values, found)]
    return describe_each(outline, values, device=device)


def state_of(value: Any) -> Mapping[str, Any]:
    """The tensors of a state dict, or the parameters and buffers of a module, by name."""
    if isinstance(value, Mapping):
        if not {str}.issuperset(map(type, value)):
            list(map(check_name, value))
        return value
    if hasattr(value, "named_parameters") and hasattr(value, "named_buffers"):
        parameters: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        if _walk(value, "", parameters, buffers):
            return {**parameters, **buffers}
        named = dict(value.named_parameters(remove_duplicate=False))
        return {**named, **dict(value.named_buffers(remove_duplicate=False))}
    if is_path(value):
        files = "tpde.encode and tpde.apply work on files"
        raise InvalidArgument(
            f"the tensors are the path {value!r}: expected a dict of tensors or a module, before the path; {files}"
        )
    raise InvalidArgument(f"a {type(value).__name__} is neither a path, nor a dict of tensors, nor a module")


_WALKS = ("named_parameters", "named_buffers", "named_modules", "_named_members")
#: Whether a module class inherits the methods that list tensors from ``torch.nn.Module``.
_ordinary: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _walk(module: Any, prefix: str, parameters: dict[str, Any], buffers: dict[str, Any]) -> bool:
    """Lists parameters and buffers as ``named_parameters`` and ``named_buffers`` do with duplicates, but faster. False if a
    module overrides one of these methods."""
    kind = type(module)
    is_ordinary = _ordinary.get(kind)
    if is_ordinary is None:
        plain = getattr(sys.modules.get("torch.nn"), "Module", None)
        is_ordinary = plain is not None and issubclass(kind, plain) and all(getattr(kind, n) is getattr(plain, n) for n in _WALKS)
        _ordinary[kind] = is_ordinary
    if not is_ordinary:
        return False
    for name, tensor in module._parameters.items():
        if tensor is not None:
            parameters[prefix + name] = tensor
    for name, tensor in module._buffers.items():
        if tensor is not None:
            buffers[prefix + name] = tensor
    for name, child in module._modules.items():
        if child is not None and not _walk(child, f"{prefix}{name}.", parameters, buffers):
            return False
    return True


class safe_open:
    """Opens the target of a pair as ``safetensors.safe_open`` opens a file: each tensor is rebuilt when it is read.

    ::

        with tpde.safe_open("rl20", base="base.safetensors", framework="np") as target:
            for name in target.keys():
                array = target.get_tensor(name)

    Args:
        pair: Name of the pair, or either file.
        framework: ``"pt"`` for PyTorch, ``"np"`` for NumPy.
        device: Where tensors go: ``"cpu"``, or with PyTorch a CUDA device. They are decoded on that device if the base is there
            or none is needed, otherwise on the CPU and copied.
        base: The checkpoint that the pair was made from: a path, or a dict of NumPy or PyTorch tensors. ``None`` if the pair
            needs none. Tensors must be contiguous, on the CPU or all on ``device``, and must not be written while a call reads
            them.
        digests: Whether :meth:`get_tensor` compares base and target with the digests of the pair, on the CPU. Without digests, CRC
            and sums still find damage, but a forged blob is not detected; decoding is about three times as fast. A CUDA device
            always compares the target.
        as_integers: As for :func:`tpde.numpy.load_file`. Without it, BF16 and F8 arrays have the dtypes of ml_dtypes, and F4 and F6
            tensors are refused when they are read.
        expect: As for :func:`tpde.apply`.

    Opening is cheap: only the index and the base's headers are read.

    Raises:
        Invalid, BadCheckpoint, SystemRefused, InvalidArgument, DeviceError: As their names say.
    """

    def __init__(
        self,
        pair: StrPath,
        framework: str = "pt",
        device: Any = "cpu",
        *,
        base: Any = None,
        digests: bool = True,
        as_integers: bool = False,
        expect: Digest | None = None,
    ) -> None:
        check_kinds(digests=digests)
        self._reader: Reader | None = Reader(pair, base, framework, device, expect=expect, as_integers=as_integers)
        self._digests = digests

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader = None

    def _opened(self) -> Reader:
        if self._reader is None:
            raise InvalidArgument("the pair is closed")
        return self._reader

    def keys(self) -> list[str]:
        """Names of all tensors, ascending."""
        return list(self._opened().entries)

    def metadata(self) -> dict[str, str] | None:
        """The ``__metadata__`` of the target's files. ``None`` if the pair was made from tensors, or if the headers are those of
        the base's files and the base was not passed as files."""
        reader = self._opened()
        if not reader.pair.has_files():
            return None
        try:
            return reader.pair.metadata()
        except Exception as error:
            if getattr(error, "rule", None) == "base.file" and not reader.has_base_files:
                return None
            raise

    def get_tensor(self, name: str) -> Any:
        """The tensor of this name, rebuilt: an array or a tensor of its own memory, contiguous.

        Raises:
            WrongBase, AlreadyApplied, Invalid: This tensor's base is not what the pair was made from, or the pair is damaged.
            NotHeld (incomplete): The pair has only some parts of the tensor.
            InvalidArgument: There is no such tensor.
        """
        return self._opened().read([name], digests=self._digests)[name]

    def get_slice(self, name: str) -> SafeSlice:
        """A lazy view of a tensor. Indexing rebuilds the requested part."""
        reader = self._opened()
        return SafeSlice(reader, reader.entry(name), digests=self._digests)


class SafeSlice:
    """A lazy view of a tensor. Indexing rebuilds a part of it: ``open.get_slice("w")[10:20, :64]``."""

    def __init__(self, reader: Reader, entry: Entry, *, digests: bool) -> None:
        self._reader = reader
        self._entry = entry
        self._digests = digests

    def get_shape(self) -> list[int]:
        """Dims of the whole tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Its dtype, as safetensors names it: ``"BF16"``."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        """The elements that ``index`` selects: integers, slices with a positive step, and one ``...``.

        Decodes only the chunks with elements from the first to the last index of each dim, checked by CRC and sums. Digests are
        compared only if all chunks of a tensor, or of a part that the pair has, are decoded. Otherwise a forged blob is not detected.

        Raises:
            InvalidArgument (out_of_range): An index beyond the tensor. InvalidArgument: Anything else as index, or a packed dtype.
            NotHeld (incomplete): The pair has only some parts of the tensor, and lacks elements.
            WrongBase, Invalid: The base's chunks are not what the pair was made from, or the pair is damaged.
        """
        shape = self._entry.shape
        if is_packed(self._entry.dtype):
            raise InvalidArgument(
                f"tensor {self._entry.name!r} of {self._entry.dtype} has elements of less than a byte: get_tensor reads it"
            )
        wanted = [selected(one, dim) for one, dim in zip(complete(index, len(shape)), shape)]
        result = [len(positions) for positions, is_one in wanted if not is_one]
        ranges = [positions for positions, _ in wanted]
        if 0 in result:
            return self._reader.read_rectangle(self._entry, [], [], result, digests=self._digests)
        origin, extent = [positions[0] for positions in ranges], [positions[-1] - positions[0] + 1 for positions in ranges]
        has_steps = any(len(positions) < length for positions, length in zip(ranges, extent))
        block = self._reader.read_rectangle(self._entry, origin, extent, extent if has_steps else result, digests=self._digests)
        if not has_steps:
            return block
        every = tuple(slice(None, None, positions.step) for positions in ranges)
        return self._reader.allocator.contiguous(block[every], result)
