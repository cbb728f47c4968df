"""The base checkpoint, and the files that are rebuilt from the target tensors: section 10."""

import json
from collections import namedtuple
from math import prod
from pathlib import Path

from blake3 import blake3

from .common import Refused, at, need
from .derived import formed
from .index import SHARD, SHARD_INDEX, is_file_name
from .layout import DTYPES, HEADER_OF_BASE, NONE, SAFETENSORS
from .parts import cut, join

BITS = {dtype.name: dtype.bits for dtype in DTYPES.values()}
HEADER_LIMIT = 100_000_000

Placed = namedtuple("Placed", "name dtype shape begin end")


class Base:
    """A lone safetensors file, whose name is then empty, or a folder of them with their shard index; None is no base.

    `tensors` has the dtype, shape and bytes of each tensor, `heads` the first bytes of each safetensors file, up to its
    tensors, and `shard_indexes` the content of the shard index, all by name.
    """

    def __init__(self, path):
        self.tensors, self.heads, self.shard_indexes = {}, {}, {}
        if path is not None and Path(path).is_file():
            self.add("", Path(path).read_bytes())
        elif path is not None:
            self.add_folder(Path(path))

    def add_folder(self, folder):
        names = sorted(file.name for file in folder.iterdir() if not file.name.startswith(".") and file.is_file())
        indexes = [name for name in names if name.endswith(SHARD_INDEX)]
        need(len(indexes) <= 1, "base.file", "two shard indexes")
        shards, placed = [name for name in names if name.endswith(SHARD)], {}
        for name in indexes:
            need(is_file_name(name.encode(), SHARD_INDEX), "base.file", "name of the shard index")
            self.shard_indexes[name] = (folder / name).read_bytes()
            placed = read_weight_map(self.shard_indexes[name])
            shards = sorted(set(placed.values()))
        need(shards, "base.file", "no safetensors file")
        found = {}
        for name in shards:
            need(is_file_name(name.encode(), SHARD) and name in names, "base.file", "no such shard")
            found |= dict.fromkeys(self.add(name, (folder / name).read_bytes()), name)
        need(placed.items() <= found.items(), "base.file", "a tensor that is not in its shard")

    def add(self, name, data):
        """Adds the file's tensors, and returns their names."""
        start = 8 + int.from_bytes(data[:8], "little")
        self.heads[name] = data[:start]
        entries = read_head(data[:start], "base.file")
        need(start + (entries[-1].end if entries else 0) == len(data), "base.file", "length")
        for tensor, dtype, shape, begin, end in entries:
            need(tensor not in self.tensors, "base.file", "a tensor twice")
            self.tensors[tensor] = (dtype, shape, data[start + begin : start + end])
        return [entry.name for entry in entries]

    def bytes_of(self, tensor):
        """The base lanes as bytes: of the base tensor, of its part, or formed; none for base kind `none`."""
        if tensor.entry.base_kind == NONE:
            return b""
        data = self.tensor(tensor.base_name, tensor.base_dtype, tensor.base_shape)
        if tensor.derivation:
            kind, scales = tensor.derivation, b""
            if tensor.scales_name:
                scales = self.tensor(tensor.scales_name, kind.scales_dtype, kind.scales_shape)
            data = formed(tensor, data, scales)
        return cut(data, tensor)

    def tensor(self, name, dtype, shape):
        """The bytes of a tensor of the base, which must have this dtype and this shape."""
        found_dtype, found_shape, data = self.tensors.get(name, (None, None, None))
        need((found_dtype, found_shape) == (dtype, shape), "base.tensor", name)
        return data


# Section 10.3. Python's parser accepts more than JSON, and numbers that the profile excludes.


class Members(list):
    """An object, as the list of its members."""


class Number(str):
    """The text of a number."""


def parse_json(data, rule):
    """What one JSON text holds, with `Members` for objects and `Number` for numbers."""

    def no_constant(name):
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=Members, parse_int=Number, parse_float=Number, parse_constant=no_constant
        )
    except (ValueError, RecursionError) as error:
        raise Refused(rule, f"JSON: {error}") from None


def object_of(value, rule):
    """The members of an object by name. Names must be unique."""
    need(isinstance(value, Members), rule, "no object")
    members = dict(value)
    need(len(members) == len(value), rule, "a member twice")
    for name in members:
        string_of(name, rule)
    return members


def string_of(value, rule):
    need(type(value) is str and not any("\ud800" <= c <= "\udfff" for c in value), rule, "no string, or a lone surrogate")
    return value


def strings_of(value, rule):
    return {name: string_of(text, rule) for name, text in object_of(value, rule).items()}


def integer_of(value, rule):
    need(isinstance(value, Number) and value.isdecimal() and len(value) <= 20 and int(value) < 2**64, rule, "no integer")
    return int(value)


def integers_of(value, rule):
    need(type(value) is list, rule, "no array")
    return [integer_of(number, rule) for number in value]


def read_head(head, rule):
    """The tensors of a safetensors header in the order of their data."""
    need(len(head) == 8 + int.from_bytes(head[:8], "little") <= 8 + HEADER_LIMIT, rule, "header length")
    need(head[8:9] == b"{", rule, "header start")
    members = object_of(parse_json(head[8:], rule), rule)
    strings_of(members.pop("__metadata__", Members()), rule)
    tensors = []
    for name, value in members.items():
        with at(tensor=name):
            entry = object_of(value, rule)
            need(entry.keys() == {"dtype", "shape", "data_offsets"}, rule, "members")
            dtype, shape = string_of(entry["dtype"], rule), integers_of(entry["shape"], rule)
            offsets = integers_of(entry["data_offsets"], rule)
            need(dtype in BITS, rule, "dtype")
            need(len(offsets) == 2, rule, "data_offsets")
            bits = prod(shape) * BITS[dtype]
            need(bits < 2**63 and 8 * (offsets[1] - offsets[0]) == bits, rule, "size")
            tensors.append(Placed(name, dtype, shape, *offsets))
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    expected = 0
    for tensor in tensors:
        with at(tensor=tensor.name):
            need(tensor.begin == expected, rule, "gap or overlap")
        expected = tensor.end
    return tensors


def read_weight_map(content):
    """Shard by tensor, of a shard index. Other members are ignored."""
    root = parse_json(content, "base.file")
    need(isinstance(root, Members), "base.file", "no object")
    maps = [value for name, value in root if string_of(name, "base.file") == "weight_map"]
    need(len(maps) == 1, "base.file", "not one weight_map")
    return strings_of(maps[0], "base.file")


def rebuild_files(index, targets, base):
    """The content of each file of the pair, by name. `targets` are the target bytes of each entry of the tensor table."""
    files, placed = {}, []
    shapes = {tensor.name: (tensor.dtype.name, tensor.shape) for tensor in index.tensors}
    contents = [content_of(file, base) for file in index.files]
    whole = whole_tensors(index, targets) if index.files else {}
    for file, content in zip(index.files, contents):
        if file.kind in (SAFETENSORS, HEADER_OF_BASE):
            head = read_head(content, "file.tensors")
            for name, dtype, shape, _, _ in head:
                with at(tensor=name):
                    need(shapes.get(name) == (dtype, shape), "file.tensors")
            placed += [name for name, *_ in head]
            content += b"".join(whole[name] for name, *_ in head)
        files[file.name] = content
    need(not files or sorted(placed) == sorted(shapes), "file.tensors", "not each tensor once")
    return files


def content_of(file, base):
    """What the pair or the base stores of a file."""
    if file.content is not None:
        return file.content
    content = (base.heads if file.kind == HEADER_OF_BASE else base.shard_indexes).get(file.name)
    need(content is not None and len(content) == file.entry.content_size, "base.file")
    need(blake3(content)[:16] == file.entry.content_digest, "base.file")
    return content


def whole_tensors(index, targets):
    """The target bytes of each tensor by name. Parts must tile their tensors: they are disjoint, so their elements are counted."""
    parts = {}
    for tensor, target in zip(index.tensors, targets):
        parts.setdefault(tensor.name, []).append((tensor, target))
    whole = {}
    for name, found in parts.items():
        tensors, data = zip(*found)
        if tensors[0].origin is not None:
            with at(tensor=name):
                need(sum(prod(part.extent) for part in tensors) == prod(tensors[0].shape), "file.tensors", "parts do not tile")
        whole[name] = data[0] if tensors[0].origin is None else join(tensors, data)
    return whole
