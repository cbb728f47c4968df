"""The collection of vectors, and edits that invalidate a pair."""

from blake3 import blake3

from .data import bytes_of, raw_name
from .pair import Draft
from .zstd import library


class Set:
    """The files to write, by path below the folder of a version, and the manifest. `committed` has files whose frames are reused."""

    def __init__(self, committed):
        self.files, self.manifest, self.committed = {}, [], committed

    def base(self, name, data):
        """A shared base with a name: the bytes of a file, or of a folder's files by name."""
        path = f"{name}.base" + (".safetensors" if isinstance(data, bytes) else "")
        for key, value in {path: data}.items() if isinstance(data, bytes) else data.items():
            self.files[path if isinstance(data, bytes) else f"{path}/{key}"] = value
        return path

    def pair(self, folder, name, model, edits, base, facts):
        stem = f"{folder}/{name}"
        assert all(stem != v["index"][:-11] for v in self.manifest), name
        library.known = {}
        if self.committed:
            for ending in (".tpde-index", ".tpde-blob"):
                library.harvest(self.committed.get(stem + ending, b""))
        draft = Draft(model, edits)
        self.files[stem + ".tpde-index"], self.files[stem + ".tpde-blob"] = draft.index_file, draft.blob_file
        self.manifest.append({"name": name, **facts, "index": stem + ".tpde-index", "blob": stem + ".tpde-blob",
                              "base": base})
        return self.manifest[-1], draft

    def valid(self, name, about, model, base=None):
        model.tensors.sort(key=lambda t: raw_name(t.name))
        entry, _ = self.pair("valid", name, model, {}, base, {"about": about, "verdict": "valid"})
        targets = {t.name: b"" for t in model.tensors}
        for t in model.tensors:
            targets[t.name] += t.target
        entry["tensors"] = {name: blake3(target).hex() for name, target in targets.items()}
        entry["files"] = {f.name: blake3(f.rebuilt(model.tensors)).hex() for f in model.files}

    def invalid(self, name, about, rule, when, model, base=None, *, error=None, tensor=None, chunk=None, **edits):
        entry, draft = self.pair("invalid", name, model, edits, base, {"about": about, "verdict": "invalid"})
        entry.update(rule=rule, when=when)
        entry.update({k: v for k, v in (("error", error), ("tensor", tensor), ("chunk", chunk)) if v is not None})
        return draft


def zeros_but(count, w, changes):
    """Lanes that are zero except {position: lane}."""
    lanes = [0] * count
    for position, lane in changes.items():
        lanes[position] = lane
    return bytes_of(lanes, w)


# Edits of a draft, for the steps of `Draft`.


def put(attribute, i=None, /, **fields):
    """An edit: set fields of a row of the draft."""
    def edit(draft):
        row = getattr(draft, attribute)
        row = row if i is None else row[i]
        assert fields.keys() <= row.keys()
        row.update(fields)
    return edit


def replace(attribute, function):
    """An edit: a function of the old value."""
    return lambda draft: setattr(draft, attribute, function(getattr(draft, attribute)))


def at(i, function):
    """For lists in `replace`: change one element."""
    return lambda values: [function(v) if j == i % len(values) else v for j, v in enumerate(values)]


def flip(i, bits=1):
    return lambda data: data[:i % len(data)] + bytes([data[i % len(data)] ^ bits]) + data[i % len(data) + 1:]


def set_byte(i, value):
    return lambda data: data[:i % len(data)] + bytes([value]) + data[i % len(data) + 1:]
