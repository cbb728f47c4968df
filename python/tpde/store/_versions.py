"""Versions of a store, and results of its calls."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Version:
    """A version of a checkpoint."""

    #: ``BRANCH@NUMBER``.
    name: str
    branch: str
    number: int
    #: The version before.
    parent: str | None
    #: How it is stored: ``"whole"``, ``"difference"``, ``"external"`` (not at all), or ``"same"`` (the tensors of the parent).
    content: str
    #: Where an external version can be found, in the words of its writer.
    hint: str | None = field(repr=False)
    #: Size of its pair in bytes.
    stored_bytes: int
    #: Size of its tensors in bytes.
    tensor_bytes: int
    tensors: int
    #: Files beside the tensors, such as configuration and tokenizer.
    files: list[str] = field(repr=False)
    #: Seconds since 1970, by the writer's clock.
    created: int = field(repr=False)
    #: Digest of the tensors.
    state: str = field(repr=False)
    #: The caller's own values.
    metadata: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class RebuiltVersion(Version):
    """The result of :meth:`tpde.store.Store.get`: the version that was rebuilt."""

    #: Damaged pairs that were not used, because another way leads past them: their faults by name, as in ``"the shortcut from main@0
    #: to main@10"``. :meth:`tpde.store.Store.fold` makes a shortcut anew.
    left_out: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class VerifyReport:
    """The result of :meth:`tpde.store.Store.verify`."""

    #: Number of versions that were checked.
    versions: int
    #: Number of bytes that were read.
    bytes: int
    #: Versions that are damaged, with the first fault of each.
    faults: dict[str, str]
    #: Shortcuts that are damaged, with the first fault of each. Readers leave them out, and :meth:`tpde.store.Store.fold` makes them anew.
    shortcuts: dict[str, str]
    #: Versions that need a checkpoint which is not in the store. Only their own pairs and files were checked.
    external: list[str]


@dataclass(frozen=True)
class PruneReport:
    """The result of :meth:`tpde.store.Store.prune`."""

    #: The versions that were pruned, in ascending order of number.
    pruned: list[str]
    #: Number of versions of the branch that are left.
    kept: int
    #: Number of shortcuts that were made.
    shortcuts: int
    #: Size of their pairs in bytes.
    shortcut_bytes: int
    #: Versions to which no shortcut could be made, and why. The versions that lead to them were kept.
    skipped: dict[str, str]


@dataclass(frozen=True)
class GcReport:
    """The result of :meth:`tpde.store.Store.gc`."""

    #: Number of removed versions: those that were pruned, and those of deleted branches.
    versions: int
    #: Number of versions that were pruned, or whose branch was deleted, and that stay: the grace is not over, or others need them.
    waiting: int
    #: Number of removed shortcuts.
    shortcuts: int
    #: Number of objects that versions use, also versions that wait.
    used: int
    #: Number of objects that no version uses, and that are too young to be removed.
    young: int
    removed: int
    removed_bytes: int


@dataclass(frozen=True)
class Usage:
    """Sizes of what the manifests of a store name."""

    #: Number of versions that can be named.
    versions: int
    #: Number of versions that were pruned or deleted, and are still stored. Their bytes count.
    waiting: int
    #: When the first version that can be named was stored, in seconds since 1970 by its writer's clock.
    oldest: int | None
    #: When the last one was stored.
    newest: int | None
    #: Number of shortcuts: pairs that :meth:`tpde.store.Store.fold` and :meth:`tpde.store.Store.prune` have made.
    shortcuts: int
    #: Size of the anchors in bytes.
    anchor_bytes: int
    #: Size of the pairs that need their parent, in bytes.
    difference_bytes: int
    #: Size of the pairs of shortcuts in bytes.
    shortcut_bytes: int
    #: Size of the files beside the tensors, each counted once, in bytes.
    file_bytes: int
    #: Size of all of these in bytes.
    stored_bytes: int
    #: Size of all tensors of the versions that can be named, in bytes, without those of external versions.
    tensor_bytes: int
