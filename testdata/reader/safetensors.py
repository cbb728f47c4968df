"""The base checkpoint, and the files that are rebuilt from the target tensors: section 10."""

import json
from math import prod
from pathlib import Path

from blake3 import blake3

from .common import Refused, at, need
from .layout import DTYPES, HEADER_OF_BASE, NONE, SAFETENSORS

BITS = {dtype.name: dtype.bits for dtype in DTYPES.values()}
HEADER_LIMIT = 100_000_000


class Base:
    """A lone safetensors file, whose name is then empty, or a folder of them with their shard index; None is no base.

    `tensors` has the dtype, shape and bytes of each tensor, `files` the content and `heads` the first bytes, up to the
    tensors, of each file.
    """

    def __init__(self, path):
        self.tensors, self.heads, self.files = {}, {}, {}
        if path is not None and Path(path).is_file():
            self.add("", Path(path).read_bytes(), True)
        elif path is not None:
            for file in sorted(Path(path).iterdir()):
                self.add(file.name, file.read_bytes(), file.name.endswith(".safetensors"))

    def add(self, name, data, is_safetensors):
        self.files[name] = data
        if is_safetensors:
            start = 8 + int.from_bytes(data[:8], "little")
            self.heads[name] = data[:start]
            for tensor, dtype, shape, begin, end in read_head(data[:start]):
                self.tensors[tensor] = (dtype, shape, data[start + begin:start + end])

    def bytes_of(self, tensor):
        """The bytes of the base tensor of `tensor`; none for base kind `none`."""
        if tensor.entry.base_kind == NONE:
            return b""
        dtype, shape, data = self.tensors.get(tensor.base_name, (None, None, None))
        need((dtype, shape) == (tensor.dtype.name, tensor.base_shape), "base.tensor")
        return data


def read_head(head):
    """The tensors of a safetensors header in the order of their data: name, dtype, shape, begin, end."""
    def unique(pairs):
        need(len(dict(pairs)) == len(pairs), "file.tensors", "a key twice")
        return dict(pairs)

    need(len(head) == 8 + int.from_bytes(head[:8], "little") <= 8 + HEADER_LIMIT, "file.tensors", "header length")
    need(head[8:9] == b"{", "file.tensors", "header start")
    try:
        entries = json.loads(head[8:].decode("utf-8"), object_pairs_hook=unique)
        entries.pop("__metadata__", None)
        tensors = [(name, e["dtype"], e["shape"], *e["data_offsets"]) for name, e in entries.items()]
        tensors.sort(key=lambda tensor: tensor[3:])
        expected = 0
        for name, dtype, shape, begin, end in tensors:
            with at(tensor=name):
                need(all(type(number) is int for number in (*shape, begin, end)), "file.tensors", "not integers")
                need(begin == expected, "file.tensors", "gap or overlap")
                need(8 * (end - begin) == prod(shape) * BITS[dtype], "file.tensors", "size")
            expected = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused("file.tensors", f"header: {error!r}") from None
    return tensors


def rebuild_files(index, targets, base):
    """The content of each file of the pair, by name."""
    files, placed = {}, []
    shapes = {tensor.name: (tensor.dtype.name, tensor.shape) for tensor in index.tensors}
    for file in index.files:
        content = file.content
        if content is None:
            content = (base.heads if file.kind == HEADER_OF_BASE else base.files).get(file.name)
            need(content is not None and len(content) == file.entry.content_size
                 and blake3(content)[:16] == file.entry.content_digest, "base.file")
        if file.kind in (SAFETENSORS, HEADER_OF_BASE):
            head = read_head(content)
            for name, dtype, shape, _, _ in head:
                with at(tensor=name):
                    need(shapes.get(name) == (dtype, shape), "file.tensors")
            placed += [name for name, *_ in head]
            content += b"".join(targets[name] for name, *_ in head)
        files[file.name] = content
    need(not files or sorted(placed) == sorted(shapes), "file.tensors", "not each tensor once")
    return files
