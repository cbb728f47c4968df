"""Parts of tensors: section 8.4. A part is a rectangle with `origin` and `extent` per dim of a tensor of `shape`."""

from itertools import product
from math import prod

from .common import need


def check_part(shape, origin, extent, bits):
    """The rules of one part of a tensor whose elements have `bits` bits. Python integers do not wrap."""
    for dim, first, count in zip(shape, origin, extent):
        need(count >= 1, "tensor.part", "extent of zero")
        need(first + count <= dim, "tensor.part", "beyond the tensor")
    need(extent != shape, "tensor.part", "the whole tensor")
    if bits % 8:
        d = last_cut(shape, extent)
        t = bits * prod(shape[d + 1 :])
        need(all(x * t % 8 == 0 for x in (origin[d], extent[d], shape[d])), "tensor.part", "a run within a byte")


def last_cut(shape, extent):
    """The last dim that the part does not span."""
    return max(i for i, (dim, count) in enumerate(zip(shape, extent)) if count < dim)


def precedes(a, b):
    """Whether part `a` may come before part `b`. Each is a pair of origins and extents."""
    for origin_a, extent_a, origin_b, extent_b in zip(*a, *b):
        if (origin_a, extent_a) != (origin_b, extent_b):
            return origin_a + extent_a <= origin_b
    return False


def runs(shape, origin, extent, bits):
    """For each run of bytes that the part has in its tensor: its first byte and its size, in the order of the part's bytes."""
    d = last_cut(shape, extent)
    size = extent[d] * bits * prod(shape[d + 1 :]) // 8
    for place in product(*(range(first, first + count) for first, count in zip(origin[:d], extent[:d]))):
        element = 0
        for dim, i in zip(shape, [*place, origin[d]] + origin[d + 1 :]):
            element = element * dim + i
        yield element * bits // 8, size


def cut(data, tensor):
    """The bytes of a part, or of a whole tensor, from the bytes of the tensor."""
    if tensor.origin is None:
        return data
    return b"".join(
        data[start : start + size] for start, size in runs(tensor.shape, tensor.origin, tensor.extent, tensor.dtype.bits)
    )


def join(parts, data):
    """The bytes of a tensor from those of its parts, which tile it."""
    shape, bits = parts[0].shape, parts[0].dtype.bits
    whole = bytearray(prod(shape) * bits // 8)
    for part, content in zip(parts, data):
        at = 0
        for start, size in runs(shape, part.origin, part.extent, bits):
            whole[start : start + size] = content[at : at + size]
            at += size
    return bytes(whole)
