"""The files of a pair and of its base: section 10 of spec/tpde-format.md, and step 12.4 of its section 13."""

import json
import os
import re
import struct
import tempfile
from collections import Counter, namedtuple
from math import prod
from pathlib import Path

from common import BITS, NONE, Cursor, Refused, check, hash_of, need

# Section 10.1.

File = namedtuple("File", "name kind size digest content")  # content is None if the base has it


def read_files(section, count):
    cursor = Cursor(section, "files.size")
    entries = list(struct.iter_unpack("<2HIQ16sQ", cursor.take(40 * count)))
    names, files = [cursor.take(entry[2]) for entry in entries], []
    for (kind, reserved, _, size, digest, reserved2), name in zip(entries, names):
        check("file", kind=kind <= 3, reserved=reserved == reserved2 == 0, content_size=kind >= 2 or size >= 8)
        check("file", name=is_file_name(name.decode("latin-1"), kind) or (not name and count == 1 and kind <= 1))
        content = cursor.take(size) if kind in (0, 2) else None
        check("file", content_digest=content is None or hash_of(content)[:16] == digest)
        files.append(File(name.decode(), kind, size, digest, content))
    cursor.finish()
    check("file", name=names == sorted(names) and len({name.lower() for name in names}) == count)
    return files


def is_file_name(name, kind):
    ending = ".safetensors" if kind <= 1 else ".safetensors.index.json"
    return len(ending) < len(name) <= 255 and name.endswith(ending) and re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII) is not None


class Base:
    """The files of a base: `tensors` by name, and `contents` of files by name and kind. Section 10.2."""

    def __init__(self, path):
        self.tensors, self.contents = {}, {}
        if path is not None and path.is_dir():
            self.add_folder(path)
        elif path is not None:
            self.add_file("", path.read_bytes())

    def add_folder(self, folder):
        names = sorted(file.name for file in folder.iterdir() if not file.name.startswith(".") and not file.is_dir())
        shards, shard_of = [name for name in names if name.endswith(".safetensors")], {}
        indexes = [name for name in names if name.endswith(".safetensors.index.json")]
        need(len(indexes) <= 1 and all(is_file_name(name, 3) for name in indexes), "base.file", "shard indexes")
        for name in indexes:
            self.contents[name, 3] = (folder / name).read_bytes()
            shard_of = read_weight_map(self.contents[name, 3])
            shards = sorted(set(shard_of.values()))
        need(shards and all(is_file_name(name, 1) and name in names for name in shards), "base.file", "shards")
        found = {(tensor, name) for name in shards for tensor in self.add_file(name, (folder / name).read_bytes())}
        need(found >= shard_of.items(), "base.file", "a tensor is not in its shard")

    def add_file(self, name, data):
        start = 8 + int.from_bytes(data[:8], "little")
        self.contents[name, 1] = data[:start]
        entries = read_head(data[:start], "base.file")
        need(start + (entries[-1].end if entries else 0) == len(data), "base.file", "length of a file")
        for entry in entries:
            need(entry.name not in self.tensors, "base.file", "a tensor in two files")
            self.tensors[entry.name] = entry.dtype, entry.shape, data[start + entry.begin : start + entry.end]
        return [entry.name for entry in entries]

    def bytes_of(self, tensor):
        """The bytes of the base tensor of a tensor of the pair."""
        if tensor.base_kind == NONE:
            return b""
        dtype, shape, data = self.tensors.get(tensor.base_name, (None, None, None))
        need((dtype, shape) == (tensor.dtype.name, tensor.base_shape), "base.tensor", ascii(tensor.base_name))
        return data

    def content_of(self, file):
        """The bytes of a file of the pair, without its tensors."""
        content = self.contents.get((file.name, file.kind)) if file.content is None else file.content
        need(content is not None and (len(content), hash_of(content)[:16]) == (file.size, file.digest), "base.file", file.name)
        return content


class Object(dict):
    """An object of JSON, which knows the names that it has twice."""

    def __init__(self, members):
        super().__init__(members)
        self.twice = {name for name, count in Counter(name for name, _ in members).items() if count > 1}


def read_json(data, rule):
    """What a JSON text holds, with bytes for numbers: their texts."""

    def refuse(text):
        raise ValueError(text)

    numbers = {"parse_int": str.encode, "parse_float": str.encode, "parse_constant": refuse}
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=Object, **numbers)
    except (ValueError, RecursionError) as error:
        raise Refused(rule, f"JSON: {error}") from None


def is_text(value):
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None


def is_object(value):
    return isinstance(value, Object) and not value.twice and all(map(is_text, value))


def are_integers(values):
    return isinstance(values, list) and all(
        isinstance(v, bytes) and v.isdigit() and len(v) <= 20 and int(v) < 2**64 for v in values
    )


Placed = namedtuple("Placed", "name dtype shape begin end")


def read_head(data, rule):
    """The tensors of a safetensors header, in the order of their data. Section 10.3."""
    need(len(data) >= 8 and len(data) - 8 == int.from_bytes(data[:8], "little") <= 100_000_000, rule, "length of a header")
    need(data[8:9] == b"{", rule, "first byte of a header")
    root, result = read_json(data[8:], rule), []
    need(is_object(root), rule, "names in a header")
    metadata = root.pop("__metadata__", Object([]))
    need(is_object(metadata) and all(map(is_text, metadata.values())), rule, "__metadata__")
    for name, entry in root.items():
        need(is_object(entry) and entry.keys() == {"dtype", "shape", "data_offsets"}, rule, f"members of {name!a}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        need(
            is_text(dtype) and dtype in BITS and are_integers(shape) and are_integers(offsets) and len(offsets) == 2,
            rule,
            ascii(name),
        )
        placed = Placed(name, dtype, list(map(int, shape)), *map(int, offsets))
        bits = prod(placed.shape) * BITS[dtype]
        need(bits < 2**63 and bits == 8 * (placed.end - placed.begin), rule, f"bytes of {name!a}")
        result.append(placed)
    result.sort(key=lambda placed: (placed.begin, placed.end))
    need(all(placed.begin == end for placed, end in zip(result, [0, *(placed.end for placed in result)])), rule, "gap or overlap")
    return result


def read_weight_map(data):
    """The name of the file of each tensor. Section 10.4."""
    root = read_json(data, "base.file")
    need(isinstance(root, Object) and all(map(is_text, root)) and "weight_map" not in root.twice, "base.file", "shard index")
    shard_of = root.get("weight_map")
    need(is_object(shard_of) and all(map(is_text, shard_of.values())), "base.file", "weight_map")
    return shard_of


def rebuild_files(index, targets, base):
    """Step 12.4."""
    files, placed, shapes = {}, [], {tensor.name: (tensor.dtype.name, tensor.shape) for tensor in index.tensors}
    for file, content in zip(index.files, [base.content_of(file) for file in index.files]):
        entries = read_head(content, "file.tensors") if file.kind <= 1 else []
        need(all(shapes.get(entry.name) == (entry.dtype, entry.shape) for entry in entries), "file.tensors", file.name)
        placed += [entry.name for entry in entries]
        files[file.name] = content + b"".join(targets[entry.name] for entry in entries)
    need(not files or sorted(placed) == sorted(shapes), "file.tensors", "a tensor is not in one file")
    return files


def publish(files, out):
    """Writes a lone file, or a new folder, under a temporary name. Renames it when all is written and synced."""
    if out.exists() and not out.is_file():
        raise FileExistsError(f"{out} exists, and is no file")
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tpde-") as folder:
        complete = Path(folder) / "complete"
        if "" not in files:
            complete.mkdir()
        for name, content in files.items():
            with open(complete / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        complete.rename(out)
