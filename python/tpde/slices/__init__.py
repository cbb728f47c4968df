"""The slices that a weight loader makes of a checkpoint, and pairs applied to them.

An inference engine loads a checkpoint by a function that takes tuples of name and tensor, and copies slices of these tensors to its
parameters: rows of a rank, several tensors fused in one parameter, experts stacked. :func:`record` runs such a function once,
without data, and finds all of these slices. :func:`apply_` then changes the live parameters by a pair, in place::

    weights = tpde.slices.record(model.load_weights, "step100", model)
    weights.check()
    tpde.slices.apply_(weights, "step100")

Operations that a map of slices cannot express are refused. See :func:`record`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from .._core import errors as _errors
from .._core.arguments import check_kinds, check_needed
from .._core.names import renamed
from .._core.progress import Progress
from .._engine.application import Outcome, SlicesApplication
from .._files.paths import Digest, Inspection, StrPath, inspect
from .._memory.arrays import check_writable, device_of
from .._memory.slices import Slice, device_of_slices
from .._memory.tensor import byte_shape, is_packed
from .._memory.torch_tensors import dtype_of, same_bits
from ..torch import apply_slices_
from . import _map
from ._contents import Elements, Refusal
from ._cuts import Rectangles, cut, index_of, is_within, volume, whole_of, within
from ._kept import Kept, keep
from ._map import Piece, module_of
from ._model import memory_range, parameters_of
from ._recorder import record as _record

__all__ = ["Elements", "Kept", "Map", "Piece", "Prepared", "Refusal", "Report", "apply_", "check", "cut", "prepare", "record"]

State = Mapping[str, torch.Tensor]
#: A function that loads weights, as engines have it.
Loader = Callable[[Iterator[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True, eq=False)
class Map:
    """Where the elements of a checkpoint's tensors are in the parameters of a rank. :func:`record` makes it."""

    #: Rectangles of tensors, and their places in parameters.
    pieces: list[Piece] = field(repr=False)
    #: What the loader does and a map cannot express. Parameters named there are not patched.
    refusals: list[Refusal]
    #: Elements of parameters that the loader writes, but not from a checkpoint, such as the padding of a vocabulary.
    constants: list[Elements]
    #: Elements of parameters that the loader does not write.
    missing: list[Elements]
    #: Tensors of the checkpoint that are copied to no parameter.
    unused: list[str]
    #: Further names of a parameter, by its first name: tied weights are recorded once.
    tied: dict[str, list[str]]
    #: Tensors that each parameter has elements of, also of parameters that are refused.
    tensors_of: dict[str, list[str]] = field(repr=False)
    _shapes: dict[str, tuple[int, ...]] = field(repr=False)
    #: Whether all modules are loaded again in one call, because the loader changes some in every call.
    _loads_once: bool = field(repr=False)
    #: Further names of a tensor, by its first one: pairs may have either.
    _equal: dict[str, list[str]] = field(repr=False)
    _layouts: dict[str, _map.Layout] = field(repr=False)
    _owner: Any = field(repr=False)

    @property
    def refused(self) -> list[str]:
        """Names of the parameters that are not patched."""
        return sorted({one.parameter for one in self.refusals if one.parameter is not None})

    def check(self, *, missing: str | Iterable[str] = (), refused: bool = False) -> None:
        """Raise unless every element of every parameter is written once.

        Args:
            missing: Patterns of parameters that need not be in the checkpoint, such as ``"*lora*"``.
            refused: Whether parameters may be refused, because :class:`Kept` keeps their base.

        Raises:
            NotRecorded: A parameter lacks elements, or is refused.
        """
        patterns = [missing] if isinstance(missing, str) else list(missing)
        lacking = [one for one in self.missing if not any(fnmatchcase(one.parameter, pattern) for pattern in patterns)]
        if not self.pieces and not self.refusals and self._layouts:
            raise _errors.NotRecorded("the loader copies no tensor to a parameter")
        if lacking:
            more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise _errors.NotRecorded(f"the loader does not write {lacking[0]}{more}", parameter=lacking[0].parameter)
        if self.refusals and not refused:
            raise self.refusals[0]._error(f" ({len(self.refusals) - 1} more)" if len(self.refusals) > 1 else "")

    def bind(self, parameters: State | nn.Module) -> Map:
        """The same map of other parameters, such as those of the live model if the loader was recorded on another one.

        Parameters that the map lacks are listed as missing.

        Raises:
            InvalidArgument: A parameter is missing, has another shape, dtype or layout, or shares memory with others than it did.
        """
        live = replace(self, _owner=parameters)._live()
        held = {memory_range(live[name]) for name in self._layouts}
        known = {*self._layouts, *(other for names in self.tied.values() for other in names)}
        more = {name: one for name, one in live.items() if name not in known and memory_range(one) not in held}
        missing = [one for one in self.missing if one.parameter in known]
        missing += [Elements(name, whole_of(tuple(one.shape))) for name, one in more.items() if one.numel()]
        return replace(self, missing=missing, _owner=parameters)

    def replaced(self) -> list[str]:
        """Names of the modules whose parameters are missing, or have another shape, dtype or layout than they had.

        A kernel has replaced them after loading. Such modules are loaded again, see :meth:`keep`.
        """
        live = self._parameters()
        other = {name for name, layout in self._layouts.items() if name not in live or _map.Layout.of(live[name]) != layout}
        return sorted({module_of(name) for name in other})

    def slices(self, *, without: Iterable[str] = ()) -> list[Slice]:
        """The slices of the live parameters, as :func:`tpde.torch.apply_slices_` takes them.

        Args:
            without: Names of modules whose parameters are left out.

        Raises:
            InvalidArgument: A parameter is missing, or has another shape, dtype or layout than it had.
        """
        without = frozenset(without)
        live = self._live(without)
        return [
            Slice(one.tensor, one.index, one.memory(live[one.parameter]), self._shapes[one.tensor])
            for one in self.pieces
            if module_of(one.parameter) not in without
        ]

    def rectangles(self, kept: Kept | None = None) -> Rectangles:
        """The elements of each tensor that the rank holds, as :func:`cut` takes them."""
        check_kinds(kept=kept)
        second = kept.modules if kept is not None else []
        found: dict[str, dict[tuple[tuple[int, int], ...], tuple[slice, ...]]] = {}
        indices = [(one.tensor, one.index) for one in self.pieces if module_of(one.parameter) not in second]
        for name, index in [*indices, *((one.name, one.index) for one in (kept.slices if kept is not None else []))]:
            found.setdefault(name, {})[tuple((one.start, one.stop) for one in index)] = index
        return {name: list(by_bounds.values()) for name, by_bounds in found.items()}

    def keep(self, base: State | Iterable[tuple[str, torch.Tensor]], modules: Iterable[str] = (), *, pinned: bool = False) -> Kept:
        """Keep the base of modules that cannot be patched, in memory of its own, for the engine's own reload.

        Args:
            base: The base's tensors, or tuples of name and tensor, of which one at a time is needed.
            modules: Names of modules whose weights a kernel has repacked, as the error ``"repacked"`` has them. Modules with refused
                parameters are kept in any case.
            pinned: Whether the memory is pinned, which makes copies to a device faster.

        Raises:
            InvalidArgument: A module or a tensor of the base is missing, or has another shape or dtype.
        """
        check_kinds(pinned=pinned)
        return keep(self, base, modules, pinned=pinned)

    def _device(self) -> Any:
        """The CUDA device of the parameters; ``None`` for the CPU."""
        live = self._parameters()
        return device_of(live[name] for name in self._layouts if name in live)

    def _parameters(self) -> Mapping[str, torch.Tensor]:
        """The parameters as they are, under the names that they had."""
        return renamed(parameters_of(self._owner), self._layouts)

    def _addresses(self, without: Container[str] = ()) -> list[Any]:
        """Where parameters are, to notice those that were moved."""
        live = self._parameters()
        held = [(name, live.get(name)) for name in self._layouts if module_of(name) not in without]
        return [(name, one.data_ptr(), _map.Layout.of(one)) if one is not None else name for name, one in held]

    def _live(self, without: Container[str] = ()) -> Mapping[str, torch.Tensor]:
        live = self._parameters()
        for name, layout in self._layouts.items():
            if module_of(name) in without:
                continue
            if name not in live:
                raise _errors.InvalidArgument(f"parameter {name!r} is missing")
            if _map.Layout.of(live[name]) != layout:
                raise _errors.InvalidArgument(f"parameter {name!r} is {_map.Layout.of(live[name])}: expected {layout}, as recorded")
        _map.check_tied(live, self.tied, [name for name in self._layouts if module_of(name) not in without])
        return live


def record(load_weights: Loader, tensors: StrPath | State, parameters: State | nn.Module) -> Map:
    """Run a weight loader without data, and return what it copies where.

    The loader gets tensors on the device ``meta``. Views of them are followed: slices, ``narrow``, ``chunk``, ``split``, ``view``,
    ``reshape``, transposes, ``squeeze``, and copies without a cast. So are copies from parameters to parameters. Copies to parameters
    are recorded and not done, and attributes that the loader replaces are put back, so the model may be live. Only what the calling
    thread does is seen. A copy of a tensor in another thread fails, because it has no data.

    Refused, by operation, tensor, parameter and line of the loader: arithmetic, casts, expanded and concatenated tensors, advanced
    indices, operators of other libraries, tensors whose origin was not seen, transposed parameters, tensors with elements of less than
    a byte, views of parameters as elements of another size, and attributes that keep tensors. A refused parameter is listed in ``refusals`` of the map. The engine can
    load its module again, see :class:`Kept`.

    Args:
        load_weights: Called with an iterator of tuples of name and tensor.
        tensors: The checkpoint's tensors, for their names, shapes and dtypes: the path of a pair, or a dict, for example of
            tensors on the device ``meta``. Names of the same memory, as of tied weights, are names of one tensor.
        parameters: The parameters that are loaded: a dict, or a module, of which parameters and persistent buffers count. They may
            be on any device, also on ``meta``. They are not written.

    Raises:
        NotRecorded: The loader fails without data, two tensors are copied to the same elements of a parameter, elements are written
            after a copy or read before it, or the loader replaces the memory of a parameter.
    """
    check_needed(load_weights=load_weights)
    if isinstance(tensors, Mapping):
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_nested or torch.nn.parameter.is_lazy(tensor):
                raise _errors.InvalidArgument(
                    f"tensor {name!r} is a {type(tensor).__name__}: expected a PyTorch tensor with a shape"
                )
        offered = {name: (tensor, False) for name, tensor in tensors.items()}
    else:
        offered = _tensors_of_pair(tensors)
    equal = _first_names({name: one for name, (one, _) in offered.items()})
    recording = _record(load_weights, offered, parameters, equal)
    shapes = {name: tuple(one.shape) for name, (one, _) in offered.items()}
    return Map(**_map.build(recording, shapes, offered, equal), _owner=parameters)


def _first_names(tensors: State) -> dict[str, str]:
    """The first name of each tensor that has several, by its further ones: tied weights of a state dict."""
    first: dict[Any, str] = {}
    equal = {}
    for name, tensor in tensors.items():
        if (span := memory_range(tensor)) is not None:
            known = first.setdefault((span, _map.Layout.of(tensor)), name)
            if known != name:
                equal[name] = known
    return equal


def _tensors_of_pair(pair: Any) -> dict[str, tuple[torch.Tensor, bool]]:
    """Tensors on the device ``meta``, and whether their elements are smaller than a byte."""
    tensors = {}
    for one in inspect(pair).tensors:
        shape = one.part["whole"] if one.part else [*one.shape]
        dims = byte_shape(one.dtype, shape) if is_packed(one.dtype) else shape
        dtype = torch.uint8 if is_packed(one.dtype) else dtype_of(one.dtype)
        tensors[one.name] = torch.empty(dims, dtype=dtype, device="meta"), is_packed(one.dtype)
    return tensors


@dataclass(frozen=True)
class Report:
    """Results of :func:`apply_`."""

    #: As :func:`tpde.torch.apply_slices_` returns it.
    outcome: Outcome
    #: Number of parameters that were patched in place.
    patched: int
    #: Modules that were loaded again.
    reloaded: list[str]


def apply_(
    weights: Map,
    pair: StrPath,
    *,
    kept: Kept | None = None,
    reload: Loader | None = None,
    strict: bool = True,
    expect: Digest | None = None,
    progress: Progress = None,
) -> Report:
    """Turn live base weights into target weights in place, by the map of their loader.

    All is checked before the first write, also what is kept. Modules of ``kept`` are not patched: their kept base becomes
    the target, and ``reload`` loads them, by modules that share tensors. Parameters and elements that the loader does not write are not
    changed.

    Args:
        weights: The map. Nothing else may read or write its parameters during the call.
        pair: Name of the pair, or either file. It has all elements of the map's rectangles, and its tensors are cut at them, or
            finer: see :func:`tpde.torch.apply_slices_`.
        kept: The base of modules that cannot be patched.
        reload: The engine's loader for these modules. It gets name and tensor of all tensors of a module. Elements of other ranks are
            zero.
        strict: Whether the pair must have every tensor of the map.
        expect, progress: As for :func:`tpde.torch.apply_slices_`.

    Raises:
        WrongBase (repacked): Some modules do not hold the base, and others do. ``modules`` has their names, for :meth:`Map.keep`.
        WrongBase: The weights are not the base.
        NotRecorded: A parameter is refused, and ``kept`` does not have its module; or the map has no pieces.
        Poisoned: ``reload`` failed. All other weights are the target's. :meth:`Kept.reload` repeats the loading.
        InvalidArgument, and others: As for :func:`tpde.torch.apply_slices_`. Nothing was written then.
    """
    return Prepared(weights, pair, kept=kept, reload=reload, strict=strict, expect=expect).apply(progress=progress)


def prepare(
    weights: Map,
    pair: StrPath,
    *,
    kept: Kept | None = None,
    reload: Loader | None = None,
    expect: Digest | None = None,
    digests: bool = True,
) -> Prepared:
    """Make a pair ready for live weights: :func:`apply_` in two steps, of which the second one, :meth:`Prepared.apply`, is short.

    The pair is opened, its payloads are read to pinned memory, and the launch is planned. Parameters are not read. Device memory: the
    payloads, and at most 256 MiB.

    Args:
        weights, pair, kept, reload, expect: As for :func:`apply_`.
        digests: Whether digests of tensors are compared; not needed after :func:`check`. CRC, sums and the digests of payloads are
            compared in any case. On a device, digests are those of targets.

    Raises:
        NotRecorded, Invalid, SystemRefused, InvalidArgument, NotHeld: As for :func:`apply_`.
    """
    check_kinds(digests=digests)
    prepared = Prepared(weights, pair, kept=kept, reload=reload, expect=expect)
    prepared._digests = digests
    prepared._ready = prepared._opened(is_planned=True)
    return prepared


class Prepared:
    """A pair that is ready for live weights. :func:`prepare` makes it."""

    def __init__(
        self,
        weights: Map,
        pair: StrPath,
        *,
        kept: Kept | None,
        reload: Loader | None,
        strict: bool = True,
        expect: Digest | None,
    ) -> None:
        check_needed(weights=weights)
        check_kinds(kept=kept, reload=reload, strict=strict)
        self._weights, self._pair, self._kept, self._reload, self._expect = weights, pair, kept, reload, expect
        self._second = kept.modules if kept is not None else []
        refused = [one for one in weights.refusals if one.parameter and module_of(one.parameter) not in self._second]
        if refused:
            raise refused[0]._error(". Map.keep keeps the base of its module")
        if kept is not None and reload is None:
            raise _errors.InvalidArgument("kept modules need the engine's loader: expected reload")
        _require_pieces(weights, kept)
        self._strict = strict
        self._ready: list[SlicesApplication] = []
        self._digests = True
        self._bind()

    def _bind(self) -> None:
        """Finds the memory of all slices."""
        self._at = self._weights._addresses(self._second)
        slices, of_kept = self._weights.slices(without=self._second), self._kept.slices if self._kept is not None else []
        self._first, copies = _map.without_copies(slices)
        equal = self._weights._equal
        tensors = inspect(self._pair, expect=self._expect).tensors if copies or equal or not self._strict else []
        names = {one.name for one in tensors}
        self._first, self._of_kept = (_map.in_pair(some, equal, names) for some in (self._first, of_kept))
        if not self._strict:
            self._first, self._of_kept = ([one for one in some if one.name in names] for some in (self._first, self._of_kept))
            copies = [(one, other) for one, other in copies if one.name in names]
        written = [other for _, other in copies if other.tensor.device.type == "cpu"]
        check_writable((one.name, one.tensor.data_ptr(), _map.span_of(one.tensor)) for one in written)
        has_base = {one.name for one in tensors if one.base_kind != "none"}
        #: Each further slice of a rectangle, and the first one, and whether the pair needs its base.
        self._copies = [(one, other, one.name in has_base) for one, other in copies]
        #: Each slice of a tensor of which the pair has several names, and its further names.
        further = {name: [other for other in (name, *others) if other in names][1:] for name, others in equal.items()}
        self._equal = [
            (one, replace(one, name=name)) for one in (*self._first, *self._of_kept) for name in further.get(one.name, ())
        ]

    def _opened(self, *, is_planned: bool) -> list[SlicesApplication]:
        how: dict[str, Any] = {"expect": self._expect, "digests": self._digests, "is_planned": is_planned}
        found: list[SlicesApplication] = []
        for some in _groups(self._first, self._of_kept):
            # What is kept is on the CPU, also if the pair is on a device.
            pair = os.fspath(self._pair) if found else self._pair
            found.append(SlicesApplication(some, pair, **how))
        return found

    def apply(self, *, progress: Progress = None) -> Report:
        """Turn the weights into the target, as :func:`apply_`. If parameters were moved meanwhile, they are looked up again.

        Raises:
            TpdeError: As for :func:`apply_`.
        """
        if self._at != self._weights._addresses(self._second):
            self._bind()
            if self._ready:
                self._ready = self._opened(is_planned=True)
        for one, other, has_base in self._copies:
            if has_base and not same_bits(one.tensor, other.tensor):
                raise _errors.WrongBase(
                    f"tensor {one.name!r} is loaded to two places, which differ",
                    tensor=one.name,
                    expected="equal copies",
                    found="others",
                )
        try:
            for one, other in self._equal:
                self._require_equal(one, other)
            outcome = self._change(progress)
        except _errors.WrongBase as error:
            raise _explained(error, self._weights, self._second, self._pair, self._expect) from error
        if outcome == "applied":
            for one, other, _ in self._copies:
                other.tensor.copy_(one.tensor)
        reloaded: list[str] = []
        kept, reload = self._kept, self._reload
        if kept is not None and reload is not None and (outcome == "applied" or kept.is_pending):
            kept.is_pending = True
            reloaded = kept.reload(reload)
        patched = {one.parameter for one in self._weights.pieces if module_of(one.parameter) not in self._second}
        return Report(outcome, len(patched) if outcome == "applied" else 0, reloaded)

    def _require_equal(self, one: Slice, other: Slice) -> None:
        values = []
        for each in (one, other):
            try:
                values += _decode_apart([each], os.fspath(self._pair), self._expect)
            except _errors.AlreadyApplied:
                values.append(each.tensor)
        if not same_bits(values[0], values[1]):
            raise _errors.InvalidArgument(
                f"tensors {one.name!r} and {other.name!r} are loaded to the same parameter, and have other values in the pair"
            )

    def _change(self, progress: Progress) -> Outcome:
        """Changes live parameters, and what is kept. Everything is checked before the first write.

        If live parameters are on a device and what is kept is on the CPU, and a call ends between the two, the next one changes what is
        left.
        """
        first, *rest = self._ready or self._opened(is_planned=False)
        if rest:
            with contextlib.suppress(_errors.AlreadyApplied):
                _decode_apart(self._of_kept, os.fspath(self._pair), self._expect)
        outcomes = [first.apply(progress), *(one.apply() for one in rest)]
        return "applied" if "applied" in outcomes else outcomes[0]


def check(weights: Map, pair: StrPath, *, kept: Kept | None = None, expect: Digest | None = None) -> None:
    """Decode a pair from live base weights, with all checks, and write nothing. Weights that already are the target's pass.

    The pair may have only some tensors of the map, or only some parts of them. Memory: on a device the payloads and at most 256 MiB; on
    the CPU the slices.

    Args:
        weights, kept, expect: As for :func:`apply_`. The parameters may be read meanwhile.

    Raises:
        WrongBase: The weights are not the base.
        Invalid, SystemRefused, InvalidArgument: As for :func:`tpde.torch.apply_slices_`.
    """
    check_needed(weights=weights)
    check_kinds(kept=kept)
    _require_pieces(weights, kept)
    inspection = inspect(pair, expect=expect)
    names = {one.name for one in inspection.tensors}
    first, _ = _map.without_copies(weights.slices(without=kept.modules if kept is not None else ()))
    of_kept = kept.slices if kept is not None else []
    first, of_kept = (_map.in_pair(some, weights._equal, names) for some in (first, of_kept))
    first, of_kept = (_held_by(inspection, [one for one in some if one.name in names]) for some in (first, of_kept))
    for some in _groups(first, of_kept):
        with contextlib.suppress(_errors.AlreadyApplied):
            _check(some, pair, expect)


def _require_pieces(weights: Map, kept: Kept | None) -> None:
    if not weights.pieces and not (kept is not None and kept.slices):
        raise _errors.NotRecorded("the map has no pieces: the loader copies no tensor to a parameter")


def _held_by(pair: Inspection, slices: list[Slice]) -> list[Slice]:
    """The slices, without elements of which the pair has no part."""
    parts: dict[str, list[tuple[slice, ...]]] = {}
    for one in pair.tensors:
        if one.part is not None:
            parts.setdefault(one.name, []).append(index_of(one.part["origin"], one.shape))
    held: list[Slice] = []
    for each in slices:
        own = [index for index in parts.get(each.name, ()) if is_within(index, each.index)]
        if each.name not in parts or sum(map(volume, own)) == volume(each.index):
            held.append(each)
        else:
            held += [replace(each, index=index, tensor=each.tensor[within(index, each.index)]) for index in own]
    return held


def _groups(live: list[Slice], kept: list[Slice]) -> list[list[Slice]]:
    """Slices of one call each: live parameters may be on a device, and what is kept is on the CPU."""
    return [live, kept] if live and kept and device_of_slices(live) is not None else [[*live, *kept]]


def _check(slices: list[Slice], pair: Any, expect: Digest | None) -> None:
    """Checks slices, and writes nothing."""
    if device_of_slices(slices) is None:
        _decode_apart(slices, pair, expect)
    else:
        SlicesApplication(slices, pair, expect=expect, is_planned=True).check()


def _decode_apart(slices: list[Slice], pair: Any, expect: Digest | None) -> list[torch.Tensor]:
    """Decodes slices into other memory."""
    scratch = [replace(one, tensor=torch.empty_like(one.tensor, memory_format=torch.contiguous_format)) for one in slices]
    try:
        apply_slices_(scratch, pair, base=slices, expect=expect)
    except _errors.Poisoned as poisoned:  # the other memory
        raise (poisoned.__cause__ or poisoned) from None
    return [one.tensor for one in scratch]


def _explained(error: _errors.WrongBase, weights: Map, without: list[str], pair: Any, expect: Digest | None) -> _errors.TpdeError:
    """Compares each module with the base alone, and names those that do not hold it. Writes nothing."""
    failed, held = [], 0
    modules = [module for one in weights.pieces if (module := module_of(one.parameter)) not in without]
    by_module: dict[str, list[Slice]] = {}
    for module, one in zip(modules, weights.slices(without=without)):
        by_module.setdefault(module, []).append(one)
    names = {one.name for one in inspect(pair, expect=expect).tensors}
    for module, slices in by_module.items():
        first, _ = _map.without_copies(_map.in_pair(slices, weights._equal, names))
        try:
            _check(first, pair, expect)
            held += 1
        except (_errors.WrongBase, _errors.AlreadyApplied):
            failed.append(module)
    if not failed or not held:
        return error
    return _errors.make_error(
        "repacked",
        f"modules do not hold the base: {failed[0]!r}{_errors.and_more(failed)}. {held} others hold it, so a kernel may have repacked the "
        "weights after loading. Map.keep keeps the base of such modules",
        modules=failed,
        tensor=error.tensor,
        base=error.base,
        chunk=error.chunk,
        rule=error.rule,
        expected=error.expected,
        found=error.found,
    )
