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
pickles them; loading them runs ``torch.load`` as for every checkpoint of PyTorch, so load only what you trust.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import tempfile
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

from . import _tpde
from ._entry import Entry
from ._errors import BadManifest, InvalidArgument, NotContiguous
from ._merge import merge
from ._paths import StrPath, options
from ._slices import Slice, describe_saved, describe_slices
from ._torch_memory import dtype_of
from .store import Store, Version

__all__ = ["StorageReader", "StorageWriter"]

#: The key of what a version keeps of DCP's metadata, among the metadata of the version.
KEY = "torch.distributed.checkpoint"

#: Endings of the names of tensors from which the base of a tensor may be formed, besides the one of its name: FP8 and MXFP4.
_SOURCES = ("_scale_inv", "_blocks", "_scales")


@dataclasses.dataclass(frozen=True)
class _Step:
    """What the coordinator tells all ranks that write."""

    #: The version that ranks encode their shards against; ``None`` for a whole version.
    base: str | None
    #: Whether this is the only rank, which need not upload its pair.
    is_alone: bool


class StorageWriter(_storage.StorageWriter):
    """Saves state dicts as versions of a branch, for ``dcp.save(storage_writer=...)``.

    Args:
        store: The store. All ranks can reach it.
        branch: The branch. It is created if it does not exist. A ``checkpoint_id`` of ``dcp.save`` is the branch.
        metadata: The caller's own values, kept with the next version.
        codec, favor, chunk_lanes, derived: As for :func:`tpde.encode`.

    ``dcp.save`` raises a ``CheckpointException`` with the errors of the ranks. If another writer has stored a version first, it has a
    :class:`tpde.Conflict`, and nothing was stored.
    """

    def __init__(
        self,
        store: Store,
        *,
        branch: str = "main",
        metadata: Mapping[str, str] | None = None,
        codec: str | None = None,
        favor: str | None = None,
        chunk_lanes: int | None = None,
        derived: bool = True,
    ) -> None:
        super().__init__()
        self.store, self.branch, self.metadata = store, branch, metadata
        #: The version that was saved last, on the coordinator.
        self.version: Version | None = None
        self._options = options(
            codec=codec,
            favor=favor,
            chunk_lanes=chunk_lanes,
            layout=None,
            renamed=None,
            format=None,
            payload_digests=True,
            derived=derived,
            split=None,
        )
        self._work: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.branch = self.branch if checkpoint_id is None else str(checkpoint_id)
        self._clean()

    def _clean(self) -> None:
        if self._work is not None:
            self._work.cleanup()
        self._work = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument("use_collectives is False: ranks save one version together")

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
        self._work = tempfile.TemporaryDirectory(prefix="tpde-dcp-")
        pair = Path(self._work.name) / "shards"
        described = describe_saved(slices)
        if described:
            if step.base is None:
                _tpde.encode_memory(described, pair, base=None, options=self._options, replace=False, progress=None)
            else:
                parts: dict[str, list[tuple[list[int], list[int]]]] = {}
                for (name, *_), origin, extent, _ in described:
                    parts.setdefault(name, []).append((origin, extent))
                open_base = functools.partial(
                    self.store._store.open_version, step.base, have=[], cache=str(Path(self._work.name) / "base")
                )
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
        work = tempfile.TemporaryDirectory(prefix="tpde-dcp-") if self._work is None else self._work
        with work as folder:
            pairs = [self.store._store.download_pair(one, folder) for one in stored] or [Path(folder) / "shards"]
            if len(pairs) > 1:
                merge(pairs, Path(folder) / "merged", files=False, payload_digests=True)
            pair = Path(folder) / "merged" if len(pairs) > 1 else pairs[0]
            values = {**(self.metadata or {}), KEY: json.dumps(_kept(metadata))}
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
    name, data = item.index.fqn, planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        raw = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
        return Slice(name, ..., raw, raw.shape)
    assert isinstance(data, torch.Tensor) and item.tensor_data is not None
    tensor = data.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    chunk = item.tensor_data.chunk
    index = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
    one = Slice(name, index, tensor.reshape(tuple(chunk.sizes)), item.tensor_data.size)
    try:
        describe_saved([one])
    except NotContiguous:
        one = dataclasses.replace(one, tensor=tensor.contiguous())
    return one


def _kept(metadata: Metadata) -> dict[str, Any]:
    """What a version keeps of DCP's metadata. The pair has names, dtypes and shapes of tensors with elements."""
    entries = metadata.state_dict_metadata.items()
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return {
        "bytes": sorted(name for name, entry in entries if isinstance(entry, BytesStorageMetadata)),
        "empty": {
            name: [str(entry.properties.dtype).removeprefix("torch."), list(entry.size)]
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata) and 0 in entry.size
        },
        "paths": {name: list(path) for name, path in planned.items() if _is_path(path)},
    }


def _is_path(path: Any) -> bool:
    """Whether this is a path into a nested state dict, as DCP's own planner keeps it."""
    return isinstance(path, tuple) and all(isinstance(one, (str, int)) for one in path)


class StorageReader(_storage.StorageReader):
    """Loads a version into a state dict, for ``dcp.load(storage_reader=...)``.

    Args:
        store: The store. All ranks can reach it.
        version: ``BRANCH@NUMBER``, or ``BRANCH`` for its newest version, which the coordinator looks up for all ranks. A
            ``checkpoint_id`` of ``dcp.load`` is the version. It was saved by :class:`StorageWriter`, or is any other version, whose
            tensors have the names that the state dict asks for.
        have: Checkpoints that are here, by version, as for :meth:`tpde.store.Store.get`.
        cache: Folder in which the pairs that were read stay for later calls. Ranks do not share it.
    """

    def __init__(
        self, store: Store, version: str = "main", *, have: Mapping[str, StrPath] | None = None, cache: StrPath | None = None
    ) -> None:
        super().__init__()
        self.store, self.version = store, version
        self._have: list[tuple[str, str | os.PathLike[str]]] = [(name, os.fsdecode(path)) for name, path in (have or {}).items()]
        self._cache = None if cache is None else os.fsdecode(cache)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.version = self.version if checkpoint_id is None else str(checkpoint_id)

    def _open(self, version: str, parts: dict[str, list[tuple[list[int], list[int]]]]) -> _tpde.OpenVersion:
        return self.store._store.open_version(version, parts=parts, have=self._have, cache=self._cache)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = self.store.version(self.version)
        self._found = found.name
        kept = _checked(found)
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: _described(getattr(torch, dtype), size) for name, (dtype, size) in kept["empty"].items()
        }
        for name, dtype, shape in self._open(found.name, {}).tensors():
            is_bytes = name in kept["bytes"]
            entries[name] = BytesStorageMetadata() if is_bytes else _described(dtype_of(dtype), shape)
        return Metadata(entries, planner_data={name: tuple(path) for name, path in kept["paths"].items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return [dataclasses.replace(plan, storage_data=self._found) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts: dict[str, list[tuple[list[int], list[int]]]] = {}
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        for item in plan.items:
            parts.setdefault(item.storage_index.fqn, [])
            if item.type != LoadItemType.BYTE_IO:
                parts[item.storage_index.fqn].append(([*item.storage_offsets], [*item.lengths]))
        sizes = {name: shape for name, _, shape in self._open(plan.storage_data, {}).tensors() if name in parts} if values else {}
        for item in values:
            name = item.storage_index.fqn
            parts[name] = [([0], [*sizes[name]])]
        version = self._open(plan.storage_data, parts)
        entries = {
            name: Entry(name, dtype, shape, "same", name, changes=True, bases=[]) for name, dtype, shape in version.tensors()
        }
        slices, buffers, copies = [], [], []
        taken: dict[int, list[tuple[int, int]]] = {}
        for item in values:
            raw = torch.empty(tuple(entries[item.storage_index.fqn].shape), dtype=torch.uint8)
            buffers.append((item, raw))
            slices.append(Slice(item.storage_index.fqn, ..., raw))
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            name, target = item.storage_index.fqn, planner.resolve_tensor(item).detach()
            index = tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths))
            one = Slice(name, index, target)
            if not _fits(one, entries, taken):
                one = Slice(name, index, torch.empty(tuple(target.shape), dtype=dtype_of(entries[name].dtype)))
            slices.append(one)
            copies.append((item, target, one.tensor))
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
    except NotContiguous:
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
        is_right = all(isinstance(name, str) for name in kept["bytes"]) and set(kept) == {"bytes", "empty", "paths"}
        for dtype, size in kept["empty"].values():
            is_right &= isinstance(getattr(torch, dtype), torch.dtype) and 0 in size and all(type(one) is int for one in size)
        for path in kept["paths"].values():
            is_right &= all(isinstance(one, (str, int)) for one in path)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadManifest(f"{version.name}: metadata {KEY!r} cannot be read: {error}", object=version.name) from error
    if not is_right:
        raise BadManifest(f"{version.name}: metadata {KEY!r} is not what a StorageWriter keeps", object=version.name)
    return dict(kept)
