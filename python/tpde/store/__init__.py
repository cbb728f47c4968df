"""Versions of checkpoints in a folder or an object store, most of them stored as their difference from the version before::

    store = tpde.store.init("versions")
    store.put("step1.safetensors")
    store.put("step2.safetensors", metadata={"step": "2"})
    store.get("main@0", "back.safetensors")

A version is named ``BRANCH@NUMBER``; ``BRANCH`` alone is its newest version. ``docs/stores.md`` of the repository describes the layout,
anchors, and what happens after a failure. Several writers and readers may use a store at the same time.

A location is the path of a folder. If the package was built with the feature ``aws``, ``gcp`` or ``azure``, it may be a URL such as
``s3://BUCKET/PREFIX``; credentials come from the usual environment variables.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import _tpde
from .._core.arguments import check_kinds, check_needed, check_unicode
from .._core.errors import InvalidArgument
from .._core.names import fitting, groups, matching_names, rank_of
from .._core.options import CodecOptions, PutOptions, Unpack, checked
from .._core.progress import Progress, progress_callback
from .._engine.reader import allocator_of
from .._engine.state import saved_of
from .._files.paths import StrPath, is_path, path_of, path_or_none, report
from .._memory.arrays import describe_all
from .._memory.index import rectangles_of
from ._versions import GcReport, PruneReport, RebuiltVersion, Usage, VerifyReport, Version

if TYPE_CHECKING:
    from torch import nn

if not hasattr(_tpde, "Store"):
    raise ImportError("tpde was built without its feature `store`")

__all__ = ["GcReport", "PruneReport", "RebuiltVersion", "Store", "Usage", "Version", "VerifyReport", "init"]

_log = logging.getLogger("tpde")

#: Stores of a parent process. Their threads do not exist here, so ending them would wait for ever.
_OF_PARENTS: list[_tpde.Store] = []


def init(location: StrPath, *, grace: int = 24 * 60 * 60, anchor_every: int = 100, anchor_percent: int = 100) -> Store:
    """Make a store of a folder, which is created, or of a prefix of an object store.

    Args:
        location: Path or URL.
        grace: Seconds for which :meth:`Store.gc` keeps objects that no version uses. A call whose lease is not renewed for so long is
            given up.
        anchor_every: A version is stored whole if this many pairs would lead to it from the last anchor; 0 for never.
        anchor_percent: A version is stored whole if the pairs since the last anchor are larger than this percentage of the anchor; 0
            for never.

    Raises:
        StoreError (already_a_store, request), SystemRefused: As their names say.
        InvalidArgument: A grace below 2 seconds, or a negative number.
    """
    counts = {"grace": grace, "anchor_every": anchor_every, "anchor_percent": anchor_percent}
    check_needed(**counts)
    return Store(location, _made=_tpde.Store.init(_text(path_of(location), "location"), **counts))


class Store:
    """A store. It may be used by several threads, and in processes that are forked.

    Calls raise :class:`tpde.StoreError`, also with the codes ``"request"``, ``"manifest"`` and ``"damaged"``, and ``"no_version"`` for a
    branch or version that does not exist, where they are not listed.
    Ctrl-C ends each call.

    Args:
        location: Path or URL.
        memory: Limit in bytes of the memory for objects that are read or written at the same time. The minimum is 96 MiB, the
            default 320 MiB.

    Raises:
        StoreError (not_a_store, manifest, request): As their codes say.
        InvalidArgument: ``memory`` is no count of bytes.
    """

    def __init__(self, location: StrPath, *, memory: int | None = None, _made: _tpde.Store | None = None) -> None:
        check_kinds(memory=memory)
        self.location, self._memory = _text(path_of(location), "location"), memory
        self._opened = _tpde.Store.open(self.location, memory) if _made is None else _made
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"tpde.store.Store({self.location!r})"

    def __reduce__(self) -> Any:
        return partial(Store, memory=self._memory), (self.location,)

    @property
    def _store(self) -> _tpde.Store:
        if self._process != os.getpid():
            _OF_PARENTS.append(self._opened)
            self._opened, self._process = _tpde.Store.open(self.location, self._memory), os.getpid()
        return self._opened

    def put(
        self,
        checkpoint: StrPath | Mapping[str, Any] | nn.Module,
        *,
        branch: str = "main",
        parent: str | None = None,
        whole: bool = False,
        external: str | None = None,
        have: Mapping[str, StrPath] | None = None,
        metadata: Mapping[str, str] | None = None,
        progress: Progress = None,
        **options: Unpack[PutOptions],
    ) -> Version:
        """Store a checkpoint as the next version of a branch. It is uploaded while it is encoded.

        Args:
            checkpoint: A ``.safetensors`` file; a folder, whose other files are stored too; or a state dict or a module, with NumPy
                arrays or PyTorch tensors on the CPU, which are read where they are. Tied weights are stored under those names that
                the version before has, as by :func:`tpde.torch.save_file`.
            branch: The branch, which is created if it does not exist.
            parent: The version that a new branch begins at. By default a branch begins with a whole version.
            whole: Whether the version is stored without its parent.
            external: Where the checkpoint can be found, such as a name on a hub. Only the other files and the digest of the tensors are
                stored, and readers pass the checkpoint in ``have``.
            have: Checkpoints that are here, by version, so that they need not be read from the store.
            metadata: The caller's own values.
            progress, options: As for :func:`tpde.encode`.

        Raises:
            StoreError (conflict): Another writer has stored the version first. Nothing was overwritten: put again, on top of it.
            StoreError (external): The parent is not in the store, and not in ``have``.
            StoreError (too_slow, unreachable, no_version), BadCheckpoint, InvalidArgument: As their names say. The branch is as it was.
        """
        check_kinds(whole=whole)
        if whole and external is not None:
            raise InvalidArgument("whole and external exclude each other")
        arguments = _put_arguments(branch, parent, have, metadata, whole=whole, external=external)
        how = checked(PutOptions, options, payload_digests=True)
        source = path_of(checkpoint) if is_path(checkpoint) else describe_all(self._tensors(checkpoint, arguments, how))  # type: ignore[arg-type]
        with progress_callback(progress, "put") as callback:
            text = self._store.put(source, arguments=arguments, options=how, progress=callback)
        return report(Version, text)

    def _tensors(self, checkpoint: Any, arguments: dict[str, Any], how: dict[str, Any]) -> Mapping[str, Any]:
        """The tensors of a state dict or a module, under the names that the version before has."""
        if not isinstance(checkpoint, Mapping) and not hasattr(checkpoint, "state_dict"):
            raise InvalidArgument(f"a checkpoint is a {type(checkpoint).__name__}: expected a path, a dict of tensors or a module")
        tensors = saved_of(checkpoint)
        if not groups(tensors):
            return tensors
        heads = {head.branch: head.name for head in self.branches()}
        parent = heads.get(arguments["branch"], arguments["parent"])
        if parent is None:
            return tensors
        before = self._store.open_version(parent, parts={}, have=arguments["have"], cache=None).tensors()
        names = {name for name, *_ in before} | set(how["renamed"])
        return fitting(tensors, names, rank_of(checkpoint, tensors))[0]

    def put_pair(
        self,
        pair: StrPath,
        *,
        branch: str = "main",
        parent: str | None = None,
        have: Mapping[str, StrPath] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Version:
        """Store a pair that was made elsewhere as the next version of a branch, such as one merged from the pairs of several ranks.

        The base of the pair must be the parent. The digests in both indexes are compared; if the two pairs cut tensors differently, the
        pair is decoded instead. The pair must have been made with ``payload_digests=True``. Other arguments are as for :meth:`put`.

        Raises:
            Step, WrongBase: The pair does not fit the parent.
            InvalidArgument: It has no payload digests, or a base and no parent.
            StoreError (conflict, external, too_slow, unreachable, no_version), Invalid: As their names say. The branch is as it was.
        """
        arguments = _put_arguments(branch, parent, have, metadata)
        return report(Version, self._store.put_pair(path_of(pair), arguments=arguments))

    def get(
        self,
        version: str,
        path: StrPath,
        *,
        tensors: str | Iterable[str] | Callable[[str], bool] | None = None,
        parts: Mapping[str, Any] | None = None,
        have: Mapping[str, StrPath] | None = None,
        cache: StrPath | None = None,
        progress: Progress = None,
    ) -> RebuiltVersion:
        """Rebuild a version as ``path``: a file, or a folder if the checkpoint was one. It appears when it is complete and all digests
        were compared. After an interruption, the same call reads only what is missing. If a shortcut is damaged, another way to the
        version is taken, and ``left_out`` of the result names the shortcut.

        Args:
            version: ``BRANCH@NUMBER``, or ``BRANCH``.
            path: Output, which must not exist.
            tensors: Which tensors to rebuild: a pattern with ``*``, several patterns, or a function of the name. The output is then one
                safetensors file, and only the chunks of these tensors are read from the store.
            parts: Rectangles by pattern, such as ``{"*.o_proj.weight": np.s_[:, 1536:2048]}``. Of a tensor whose name matches, only the
                rectangle is rebuilt, and the tensor of the output has its shape. A rectangle is an index as NumPy has it; a number
                counts as a range of one. Only the chunks with elements of it are read.
            have: Checkpoints that are here, by version.
            cache: Folder in which the pairs that were read stay for later calls.
            progress: As for :func:`tpde.encode`.

        Raises:
            SystemRefused (already_exists): ``path`` exists.
            StoreError (external): The base is not in the store, and not in ``have``.
            InvalidArgument: A pattern matches no tensor, or a tensor has several rectangles, or one that is not within it.
            StoreError (no_version, unreachable), WrongBase: As their names say. There is no output then.
        """
        how = _reading(tensors, parts, have, cache)
        with progress_callback(progress, "get") as callback:
            text = self._store.get(_text(version, "version"), path_of(path), **how, progress=callback)
        return report(RebuiltVersion, text)

    def load(
        self,
        version: str,
        framework: str = "pt",
        device: Any = "cpu",
        *,
        tensors: str | Iterable[str] | Callable[[str], bool] | None = None,
        parts: Mapping[str, Any] | None = None,
        have: Mapping[str, StrPath] | None = None,
        cache: StrPath | None = None,
        as_integers: bool = False,
        progress: Progress = None,
    ) -> dict[str, Any]:
        """Rebuild a version in memory: name to PyTorch tensor or NumPy array, each in memory of its own. The tensors are those that
        :meth:`get` writes, and the same digests are compared. Other files of the version are not read.

        Memory: the tensors, the chunks that are being decoded, and the objects that are being read. Disk: the pairs that lead to the
        version, in the folder for temporary files or in ``cache``; no checkpoint is written. If a shortcut is damaged, another way to
        the version is taken, and a warning of the logger ``tpde`` names the shortcut.

        Args:
            framework: ``"pt"`` for PyTorch, ``"np"`` for NumPy.
            device: Where PyTorch's tensors go. They are rebuilt on the CPU, all at once, and copied to another device.
            version, tensors, parts, have, cache, progress: As for :meth:`get`.
            as_integers: As for :func:`tpde.numpy.load_file`.

        Raises:
            StoreError (external): The base is not in the store, and not in ``have``.
            InvalidArgument: A pattern matches no tensor, or a tensor has several rectangles, or one that is not within it; or NumPy
                lacks the dtype of a tensor.
            StoreError (no_version, unreachable), WrongBase, OutOfMemory, DeviceError: As their names say.
        """
        how = _reading(tensors, parts, have, cache)
        target = allocator_of(framework, device, as_integers=as_integers)[0]
        allocator = allocator_of(framework, "cpu", as_integers=as_integers)[1]
        loaded: dict[str, Any] = {}

        def allocate(wanted: list[tuple[str, str, list[int], list[int], list[int]]]) -> list[Any]:
            loaded.clear()  # of another way, which was damaged
            slices = []
            for name, dtype, shape, origin, extent in wanted:
                loaded[name], memory = allocator.empty(name, dtype, extent)
                slices.append(((name, dtype, shape, *memory[3:]), origin, extent, None))
            return slices

        with progress_callback(progress, "load") as callback:
            text = self._store.load(_text(version, "version"), allocate=allocate, **how, progress=callback)
        for pair, fault in report(RebuiltVersion, text).left_out.items():
            _log.warning("%s is damaged, and was not used: %s", pair, fault)
        return loaded if target is None else {name: loaded.pop(name).to(target) for name in list(loaded)}

    def version(self, version: str) -> Version:
        """The version of this name: ``BRANCH@NUMBER``, or ``BRANCH`` for its newest one."""
        return report(Version, self._store.version(_text(version, "version")))

    def log(self, branch: str = "main", *, limit: int | None = None) -> list[Version]:
        """The versions of a branch, the newest first. With ``limit``, only so many, and the manifests of the others are not read.

        Raises:
            InvalidArgument: ``limit`` is no number of at least 0.
        """
        check_kinds(limit=limit)
        return [report(Version, text) for text in self._store.log(_text(branch, "branch"), limit=limit)]

    def since(self, start: int, branch: str = "main") -> list[Version]:
        """The versions of a branch from number ``start`` on, the oldest first; none if there is no such branch."""
        if isinstance(start, bool) or not isinstance(start, int) or start >= 1 << 64:
            raise InvalidArgument(f"start is {start!r}: expected the number of a version")
        return [report(Version, text) for text in self._store.since(_text(branch, "branch"), max(start, 0))]

    def branches(self) -> list[Version]:
        """The newest version of each branch, in ascending order of name."""
        return [report(Version, text) for text in self._store.branches()]

    def create_branch(self, name: str, *, start: str = "main") -> Version:
        """Create a branch at the version ``start``. Nothing is copied.

        Raises:
            InvalidArgument: The branch exists, or cannot have this name.
            StoreError (no_version, conflict, too_slow): As their codes say.
        """
        return report(Version, self._store.create_branch(_text(name, "branch"), _text(start, "version")))

    def delete_branch(self, name: str) -> Version:
        """Delete a branch. Branches that begin at one of its versions lose nothing; :meth:`gc` removes what no branch needs. Returns the
        version that was its newest.

        Raises:
            StoreError (conflict): A writer has stored a version first. The branch stays.
            StoreError (too_slow): As its code says.
        """
        return report(Version, self._store.delete_branch(_text(name, "branch")))

    def fold(
        self,
        start: str,
        end: str,
        *,
        have: Mapping[str, StrPath] | None = None,
        progress: Progress = None,
        **options: Unpack[CodecOptions],
    ) -> int:
        """Store a shortcut: one pair that leads from version ``start`` to version ``end``, which derives from it. Readers that have
        ``start``, or whose way leads through it, read this pair instead of those in between. No checkpoint is written. Returns the
        size of the pair in bytes. If there is a sound one, nothing is stored. Arguments are as for :meth:`put`.

        Raises:
            InvalidArgument: ``end`` does not derive from ``start``, or has the same tensors.
            StoreError (no_version, pruned, external, too_slow): As their codes say.
        """
        how = checked(CodecOptions, options, payload_digests=True)
        names = _text(start, "version"), _text(end, "version")
        with progress_callback(progress, "fold") as callback:
            return self._store.fold(*names, have=have_of(have), options=how, progress=callback)

    def prune(
        self,
        branch: str = "main",
        *,
        keep_every: int,
        have: Mapping[str, StrPath] | None = None,
        **options: Unpack[CodecOptions],
    ) -> PruneReport:
        """Keep those versions of a branch whose number is a multiple of ``keep_every``, the newest, the anchors, and those where another
        branch, or a shortcut into one, begins. The others cannot be named from now on. First, shortcuts are made that skip them.
        :meth:`gc` removes the pairs of these versions once the grace is over. After an interruption, the next call goes on. Other arguments are as for :meth:`put`.

        Raises:
            InvalidArgument: ``keep_every`` is no number of at least 1.
            StoreError (no_version, external, too_slow): As their codes say. All versions that were not pruned can still be read.
        """
        check_needed(keep_every=keep_every)
        how = checked(CodecOptions, options, payload_digests=True)
        text = self._store.prune(_text(branch, "branch"), keep_every, have=have_of(have), options=how)
        return report(PruneReport, text)

    def verify(self, branch: str | None = None, *, rebuild: bool = False) -> VerifyReport:
        """Read all objects of a branch, or of all branches, and compare their digests. With ``rebuild``, also rebuild every version that
        needs nothing from outside, without writing it. Faults of versions are in the report.
        """
        check_kinds(rebuild=rebuild)
        text = self._store.verify(None if branch is None else _text(branch, "branch"), bool(rebuild))
        return report(VerifyReport, text)

    def gc(self) -> GcReport:
        """Remove versions that were pruned or whose branch was deleted, if no other version needs them, and objects that no version
        uses. Whatever is younger than the store's grace is kept. What a running ``put`` has read or uploaded stays."""
        return report(GcReport, self._store.gc())

    def usage(self) -> Usage:
        """Sizes of everything to which the manifests refer."""
        return report(Usage, self._store.usage())

    def watch(self, branch: str = "main", *, start: int = 0, interval: float = 10.0) -> Iterator[Version]:
        """The versions of a branch as they appear, from number ``start`` on, without an end::

            for version in store.watch("main", start=12):
                store.get(version.name, f"{version.number}.safetensors")

        The store is asked every ``interval`` seconds. A branch that does not exist yet is waited for. An error ends the iterator.
        """
        _text(branch, "branch")
        check_kinds(interval=interval)
        while True:
            new = self.since(start, branch)
            for version in new:
                yield version
                start = version.number + 1
            if not new:
                time.sleep(interval)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} is of type {type(value).__name__}: expected text")
    return check_unicode(value, what)


def have_of(have: Mapping[str, StrPath] | None) -> list[tuple[str, str | os.PathLike[str]]]:
    check_kinds(have=have)
    return [(_text(version, "version"), path_of(path)) for version, path in ({} if have is None else have).items()]


def _put_arguments(
    branch: str,
    parent: str | None,
    have: Mapping[str, StrPath] | None,
    metadata: Mapping[str, str] | None,
    *,
    whole: bool = False,
    external: str | None = None,
) -> dict[str, Any]:
    check_kinds(metadata=metadata, whole=whole)
    for key, value in ({} if metadata is None else metadata).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgument(f"metadata has {key!r}: {value!r}: expected texts")
    return {
        "branch": _text(branch, "branch"),
        "parent": None if parent is None else _text(parent, "version"),
        "whole": bool(whole),
        "external": None if external is None else _text(external, "hint"),
        "have": have_of(have),
        "metadata": {} if metadata is None else dict(metadata),
    }


def _reading(
    tensors: str | Iterable[str] | Callable[[str], bool] | None,
    parts: Mapping[str, Any] | None,
    have: Mapping[str, StrPath] | None,
    cache: StrPath | None,
) -> dict[str, Any]:
    """What the Rust half needs to read a version. ``select`` may be called several times; ``None`` if all tensors are wanted."""
    check_kinds(parts=parts)
    if tensors is not None and not isinstance(tensors, str) and not callable(tensors):
        tensors = tuple(tensors)  # an iterator gives its items once

    def select(shapes: dict[str, list[int]]) -> dict[str, tuple[list[int], list[int]]]:
        """Origin and extent of what is selected of tensors of these shapes, by name."""
        names = set() if tensors is None else matching_names(shapes, tensors)
        selection = {name: ([0] * len(shapes[name]), shapes[name]) for name in names}
        for name, found in rectangles_of(parts or {}, shapes).items():
            if len(found) != 1:
                raise InvalidArgument(f"parts selects {len(found)} rectangles of tensor {name!r}: expected one")
            selection[name] = found[0]
        return selection

    is_all = tensors is None and not parts
    return {"select": None if is_all else select, "have": have_of(have), "cache": path_or_none(cache)}
