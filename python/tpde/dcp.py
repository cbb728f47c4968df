"""Checkpoints of :mod:`torch.distributed.checkpoint` in a store: each is a version, stored as its difference from the one before::

    import torch.distributed.checkpoint as dcp

    store = tpde.store.Store("s3://bucket/run")
    dcp.save(state, storage_writer=tpde.dcp.StorageWriter(store, metadata={"step": "100"}))
    dcp.load(state, storage_reader=tpde.dcp.StorageReader(store))

Each rank encodes the shards that it holds, where they are in memory, and uploads the pair; the coordinator merges the pairs without
decoding them and creates the version. A rank reads only those parts of the pairs that have elements of its own shards, and writes them
into the tensors of the state dict. So the number of ranks and the sharding may change. Shards on a device are copied to the host to be
encoded, and read into a copy.

A version is an ordinary one: :meth:`tpde.store.Store.get` writes its tensors as one safetensors file, under the names that PyTorch gives
them, such as ``model.layers.0.weight`` and ``optimizer.state.0.exp_avg``. Values that are not tensors are stored as bytes, as PyTorch
pickles them; loading them runs ``torch.load`` as for every checkpoint of PyTorch, so load only what you trust. A tensor of a dtype that
safetensors lacks, such as complex128, has a further dim with the real and the imaginary part, or with the bytes of an element.

A ``checkpoint_id`` names a version: ``dcp.save(state, checkpoint_id="step-100", storage_writer=tpde.dcp.StorageWriter(store))`` stores
the next version of the branch, and ``dcp.load`` finds it by this id. The metadata of the version have it under the key :data:`ID`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import storage as _storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _tpde
from ._core.arguments import check_kinds, check_needed
from ._core.errors import InvalidArgument, StoreError, make_error
from ._core.options import ShardOptions, Unpack, checked
from ._core.scratch import TemporaryFolder
from ._files.merge import merge
from ._files.paths import StrPath, path_or_none
from ._memory.arrays import check_writable, describe
from ._memory.slices import Slice, describe_saved, describe_slices
from ._memory.tensor import Entry
from ._memory.torch_tensors import dtype_of, has_name
from .slices._cuts import index_of
from .slices._model import memory_range
from .store import Store, Version, have_of

__all__ = ["StorageReader", "StorageWriter"]

#: The key of what a version keeps of DCP's metadata, among the metadata of the version.
KEY = "torch.distributed.checkpoint"
#: The key of the ``checkpoint_id`` with which a version was saved, among its metadata.
ID = KEY + ".checkpoint_id"

#: The name in a store of what has the name ``""``, which the format lacks.
_NO_NAME = KEY + ".empty_name"

#: Endings of the names of tensors from which the base of a tensor may be formed, besides the one of its name: FP8 and MXFP4.
_SOURCES = ("_scale_inv", "_blocks", "_scales")


@dataclasses.dataclass(frozen=True)
class _Step:
    """What the coordinator tells all ranks that write."""

    #: The version that ranks encode their shards against; ``None`` for a whole version.
    base: str | None
    #: Whether this is the only rank, which need not upload its pair.
    is_alone: bool


@dataclasses.dataclass(frozen=True)
class _Found:
    """What the coordinator tells all ranks that read."""

    version: str
    #: Dtypes that PyTorch has and safetensors lacks, and the size of the dim that a tensor has more in the store, by name.
    views: dict[str, tuple[str, int]]


def _checked_metadata(metadata: Any) -> Mapping[str, str]:
    check_kinds(metadata=metadata)
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgument(f"metadata has {key!r}: {value!r}, expected a text for a text")
        if key in (KEY, ID):
            raise InvalidArgument(f"metadata has {key!r}, which tpde.dcp.StorageWriter writes: expected another key")
    return metadata or {}


class _WithId:
    """What writer and reader of DCP have: the ``checkpoint_id`` of the next call, and of this one. A call without an id resets neither."""

    _next_id: str | None = None
    _id: str | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._next_id = None if checkpoint_id is None else os.fsdecode(checkpoint_id)


class StorageWriter(_WithId, _storage.StorageWriter):
    """Saves state dicts as versions of a branch, for ``dcp.save(storage_writer=...)``.

    Args:
        store: The store. All ranks can reach it.
        branch: The branch. It is created if it does not exist. A ``checkpoint_id`` of ``dcp.save`` is kept with the version, which
            :class:`StorageReader` finds by it.
        metadata: The caller's own values, kept with the next version.
        options: ``codec``, ``favor``, ``chunk_lanes`` and ``derived``, as for :func:`tpde.encode`.

    ``dcp.save`` raises a ``CheckpointException`` with the errors of the ranks. If another writer has stored a version first, it has
    a :class:`tpde.StoreError`, ``"conflict"``, and nothing was stored.
    """

    def __init__(
        self,
        store: Store,
        *,
        branch: str = "main",
        metadata: Mapping[str, str] | None = None,
        **options: Unpack[ShardOptions],
    ) -> None:
        super().__init__()
        check_needed(store=store)
        _checked_metadata(metadata)
        self.store, self.branch, self.metadata = store, branch, metadata
        #: The version that was saved last, on the coordinator.
        self.version: Version | None = None
        self._options = checked(ShardOptions, options, payload_digests=True)
        self._work: TemporaryFolder | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._clean()

    def _clean(self) -> None:
        if self._work is not None:
            self._work.close()
        self._work = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument("use_collectives is False: ranks save one version together")
        self._id, self._next_id = self._next_id, None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        heads = [head.name for head in self.store.branches() if head.branch == self.branch]
        base = heads[0] if heads and not self.store._store.needs_anchor(heads[0]) else None
        self._parent = heads[0] if heads else None
        return [dataclasses.replace(plan, storage_data=_Step(base, len(plans) == 1)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[_storage.WriteResult]]:
        step: _Step = plan.storage_data
        slices, results = [], []
        for item in plan.items:
            one = _to_save(item, planner)
            results.append(_storage.WriteResult(item.index, one.tensor.numel() * one.tensor.element_size(), None))
            slices.append(one)
        self._work = TemporaryFolder()
        pair = self._work.path / "shards"
        described = describe_saved(slices)
        if described:
            if step.base is None:
                _tpde.encode_memory(described, pair, base=None, options=self._options, replace=False, progress=None)
            else:
                parts: dict[str, list[tuple[list[int], list[int]]]] = {}
                for (name, *_), origin, extent, _ in described:
                    parts.setdefault(name, []).append((origin, extent))
                cache = self._work.path / "base"
                open_base = functools.partial(self.store._store.open_version, step.base, have=[], cache=cache)
                if self._options["derived"]:
                    _add_sources(parts, open_base(parts={}).tensors())
                base = open_base(parts=parts)
                base.encode(described, pair, options=self._options, progress=None)
            if not step.is_alone:
                stored = self.store._store.upload_pair(pair)
                results[0] = dataclasses.replace(results[0], storage_data=stored)
                self._clean()
        done: Future[list[_storage.WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[_storage.WriteResult]]) -> None:
        stored = [one.storage_data for rank in results for one in rank if one.storage_data is not None]
        with self._work or TemporaryFolder() as folder:
            pairs = [self.store._store.download_pair(one, folder) for one in stored] or [folder / "shards"]
            if not Path(f"{pairs[0]}.tpde-index").exists():  # no rank has elements
                _tpde.encode_memory([], pairs[0], base=None, options=self._options, replace=False, progress=None)
            if len(pairs) > 1:
                merge(pairs, folder / "merged", files=False, payload_digests=True)
            pair = folder / "merged" if len(pairs) > 1 else pairs[0]
            values = {**_checked_metadata(self.metadata), KEY: json.dumps(_kept(metadata))}
            if self._id is not None:
                values[ID] = self._id
            self.version = self.store.put_pair(pair, branch=self.branch, parent=self._parent, metadata=values)
        self._work = None


def _add_sources(parts: dict[str, list[tuple[list[int], list[int]]]], tensors: list[tuple[str, str, list[int]]]) -> None:
    """Adds the other tensors of the base from which the base of a tensor may be formed: scales, and weights of less than a byte. They
    are read whole: at most a quarter of the bytes of a tensor in BF16."""
    shapes = {name: shape for name, _, shape in tensors}
    for name in list(parts):
        for ending in _SOURCES:
            source = name + ending
            if source in shapes and source not in parts:
                parts[source] = [([0] * len(shapes[source]), shapes[source])]


def _to_save(item: WriteItem, planner: SavePlanner) -> Slice:
    """A shard in memory, or a value as bytes."""
    name, data = _stored(item.index.fqn), planner.resolve_data(item)
    if item.index.fqn == _NO_NAME:
        raise InvalidArgument(f"a tensor is named {_NO_NAME!r}, which stands for an empty name")
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        raw = torch.tensor(data.getbuffer(), dtype=torch.uint8)
        return Slice(name, ..., raw, raw.shape)
    assert isinstance(data, torch.Tensor) and item.tensor_data is not None
    tensor = data.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or is_traceable_wrapper_subclass(tensor) or tensor.is_meta:
        describe(item.index.fqn, tensor)  # raises
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    chunk = item.tensor_data.chunk
    one = _viewed(Slice(name, index_of(chunk.offsets, chunk.sizes), tensor.reshape(tuple(chunk.sizes)), item.tensor_data.size))
    try:
        describe_saved([one])
    except InvalidArgument as error:
        if error.code != "not_contiguous":
            raise
        one = dataclasses.replace(one, tensor=one.tensor.contiguous())
    return one


def _stored(name: str) -> str:
    return name or _NO_NAME


def _view_of(dtype: torch.dtype) -> tuple[torch.dtype, int] | None:
    """How a tensor of a dtype that safetensors lacks, or that has two elements per byte, is stored: with a further dim of this many
    elements of another dtype. ``None`` for other dtypes."""
    if has_name(dtype) and dtype != getattr(torch, "float4_e2m1fn_x2", None):
        return None
    real = {torch.complex128: torch.float64, torch.complex32: torch.float16}.get(dtype)
    return (torch.uint8, dtype.itemsize) if real is None else (real, 2)


def _viewed(one: Slice) -> Slice:
    """The slice as it is stored."""
    view = _view_of(one.tensor.dtype)
    if view is None or one.tensor.layout != torch.strided or one.tensor.is_quantized:
        return one
    dtype, size = view
    try:
        tensor = one.tensor.unsqueeze(-1).view(dtype)
    except RuntimeError as error:
        reason = f"tensor {one.name!r} of {one.tensor.dtype} cannot be read as {dtype}: {error}"
        raise InvalidArgument(reason) from error
    shape = None if one.shape is None else (*one.shape, size)
    return Slice(one.name, (*one.index, slice(0, size)), tensor, shape)


def _kept(metadata: Metadata) -> dict[str, Any]:
    """What a version keeps of DCP's metadata. The pair has names, dtypes and shapes of tensors with elements."""
    entries = metadata.state_dict_metadata.items()
    views = {
        name: str(entry.properties.dtype).removeprefix("torch.")
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata) and 0 not in entry.size and _view_of(entry.properties.dtype) is not None
    }
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return {
        "bytes": sorted(name for name, entry in entries if isinstance(entry, BytesStorageMetadata)),
        "empty": {
            name: [str(entry.properties.dtype).removeprefix("torch."), list(entry.size)]
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata) and 0 in entry.size
        },
        "paths": {name: list(path) for name, path in planned.items() if _is_path(path)},
        **({"views": views} if views else {}),
    }


def _is_path(path: Any) -> bool:
    """Whether this is a path into a nested state dict, as DCP's own planner keeps it."""
    return isinstance(path, tuple) and all(isinstance(one, (str, int)) for one in path)


class StorageReader(_WithId, _storage.StorageReader):
    """Loads a version into a state dict, for ``dcp.load(storage_reader=...)``.

    Args:
        store: The store. All ranks can reach it.
        version: ``BRANCH@NUMBER``, or ``BRANCH`` for its newest version, which the coordinator looks up for all ranks. It was saved
            by :class:`StorageWriter`, or is any other version, whose tensors have the names that the state dict asks for. A
            ``checkpoint_id`` of ``dcp.load`` is the id with which a version of this branch, or of another one, was saved; of several,
            the newest one is loaded. If there is none, it is the name of a version.
        have: Checkpoints that are here, by version, as for :meth:`tpde.store.Store.get`.
        cache: Folder in which the pairs that were read stay for later calls. Ranks do not share it.
    """

    def __init__(
        self, store: Store, version: str = "main", *, have: Mapping[str, StrPath] | None = None, cache: StrPath | None = None
    ) -> None:
        super().__init__()
        check_needed(store=store)
        self.store, self.version = store, version
        self._have = have_of(have)
        self._cache = path_or_none(cache)

    def _wanted(self) -> Version:
        """The version to load."""
        if self._id is None:
            return self.store.version(self.version)
        own = self.version.partition("@")[0]
        heads = [head.branch for head in self.store.branches()]
        for branch in sorted(heads, key=lambda name: (name != own, name)):
            for version in self.store.log(branch):
                if version.branch == branch and version.metadata.get(ID) == self._id:
                    return version
        try:
            return self.store.version(self._id)
        except (StoreError, InvalidArgument) as error:
            if error.code not in ("no_version", "invalid_argument"):
                raise
            message = f"no version was saved with checkpoint_id {self._id!r}, and none has this name"
            raise make_error("no_version", message, version=self._id) from error

    def _open(self, version: str, parts: dict[str, list[tuple[list[int], list[int]]]]) -> _tpde.OpenVersion:
        return self.store._store.open_version(version, parts=parts, have=self._have, cache=self._cache)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if "rank" not in kwargs:  # otherwise PyTorch's second attempt of the same call
            self._id, self._next_id = self._next_id, None
        found = self._wanted()
        kept = _checked(found)
        views = {}
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: _described(getattr(torch, dtype), size) for name, (dtype, size) in kept["empty"].items()
        }
        entries |= {name: BytesStorageMetadata() for name in kept["bytes"]}
        for stored, dtype, shape in self._open(found.name, {}).tensors():
            name = "" if stored == _NO_NAME else stored
            if name not in kept["bytes"]:
                own, dims = dtype_of(dtype), [*shape]
                if name in kept.get("views", {}):
                    original = getattr(torch, kept["views"][name])
                    if not dims or _view_of(original) != (own, dims[-1]):
                        raise make_error(
                            "manifest", f"{found.name}: {name!r} is no {original}, as metadata {KEY!r} has it", object=found.name
                        )
                    views[name] = kept["views"][name], dims[-1]
                    own, dims = original, dims[:-1]
                entries[name] = _described(own, dims)
        self._found = _Found(found.name, views)
        return Metadata(entries, planner_data={name: tuple(path) for name, path in kept["paths"].items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return [dataclasses.replace(plan, storage_data=self._found) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found: _Found = plan.storage_data
        parts: dict[str, list[tuple[list[int], list[int]]]] = {}
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        for item in plan.items:
            name = item.storage_index.fqn
            parts.setdefault(_stored(name), [])
            if item.type != LoadItemType.BYTE_IO:
                further = [found.views[name][1]] if name in found.views else []
                parts[_stored(name)].append(([*item.storage_offsets, *(0 for _ in further)], [*item.lengths, *further]))
        sizes = {name: shape for name, _, shape in self._open(found.version, {}).tensors() if name in parts} if values else {}
        for item in values:
            name = _stored(item.storage_index.fqn)
            parts[name] = [([0], [*sizes.get(name, [0])])]
        version = self._open(found.version, {name: some for name, some in parts.items() if some != [([0], [0])]})
        entries = {
            name: Entry(name, dtype, shape, "same", name, changes=True, bases=[]) for name, dtype, shape in version.tensors()
        }
        slices, buffers, copies = [], [], []
        taken: dict[int, list[tuple[int, int]]] = {}
        for item in values:
            raw = torch.empty(tuple(sizes.get(_stored(item.storage_index.fqn), [0])), dtype=torch.uint8)
            buffers.append((item, raw))
            if raw.numel():
                slices.append(Slice(_stored(item.storage_index.fqn), ..., raw))
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            name, target = _stored(item.storage_index.fqn), planner.resolve_tensor(item).detach()
            index = index_of(item.storage_offsets, item.lengths)
            view = found.views.get(item.storage_index.fqn)
            own = dtype_of(entries[name].dtype) if view is None else getattr(torch, view[0])
            if target.dtype != own or not _fits(_viewed(Slice(name, index, target)), entries, taken):
                source = torch.empty(tuple(target.shape), dtype=own)
            else:
                source = target
            slices.append(_viewed(Slice(name, index, source)))
            copies.append((item, target, source))
        spans = [(item.storage_index.fqn, target.device.type, memory_range(target)) for item, target, _ in copies]
        check_writable((name, span[1].start, len(span[1])) for name, device, span in spans if device == "cpu" and span)
        version.read_slices(describe_slices(slices, entries, writable=True), progress=None)
        for item, raw in buffers:
            planner.load_bytes(item, io.BytesIO(raw.numpy().tobytes()))
        for item, target, source in copies:
            if source is not target:
                target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _fits(one: Slice, entries: Mapping[str, Entry], taken: dict[int, list[tuple[int, int]]]) -> bool:
    """Whether elements can be written straight into the memory of a slice: it has rows, and none of the memory that is ``taken``, by
    storage, as by a tied weight. Takes it then."""
    if one.tensor.device.type != "cpu" or one.tensor.dtype != dtype_of(entries[one.name].dtype):
        return False
    try:
        described = describe_slices([one], entries, writable=True)
    except InvalidArgument as error:
        if error.code != "not_contiguous":
            raise
        return False
    ranges = taken.setdefault(one.tensor.untyped_storage().data_ptr(), [])
    for (_, _, _, address, size, _), *_ in described:
        if any(start < address + size and address < end for start, end in ranges):
            return False
        ranges.append((address, address + size))
    return True


def _described(dtype: torch.dtype, size: Sequence[int]) -> TensorStorageMetadata:
    """Metadata of a tensor. DCP plans reads of any part of a chunk, so the tensor is one."""
    whole = torch.Size(size)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(whole)), whole)
    return TensorStorageMetadata(TensorProperties(dtype), whole, [chunk])


def _checked(version: Version) -> dict[str, Any]:
    """What a version keeps of DCP's metadata, which may come from strangers."""
    if KEY not in version.metadata:
        return {"bytes": [], "empty": {}, "paths": {}}
    try:
        kept = json.loads(version.metadata[KEY])
        is_right = all(isinstance(name, str) for name in kept["bytes"]) and set(kept) - {"views"} == {"bytes", "empty", "paths"}
        is_right &= all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in kept.get("views", {}).values())
        for dtype, size in kept["empty"].values():
            is_right &= isinstance(getattr(torch, dtype), torch.dtype) and 0 in size and all(type(one) is int for one in size)
        for path in kept["paths"].values():
            is_right &= all(isinstance(one, (str, int)) for one in path)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise make_error("manifest", f"{version.name}: metadata {KEY!r} cannot be read: {error}", object=version.name) from error
    if not is_right:
        raise make_error("manifest", f"{version.name}: metadata {KEY!r} is not what a StorageWriter keeps", object=version.name)
    return dict(kept)
