"""Parts of tensors, cut byte by byte from whole ones, and payloads that are forged."""

import struct
import zlib

from .data import DIGESTS, DTYPES, PARTS, PAYLOAD_LIST, Q, SAME, bytes_of
from .pair import Model, Tensor
from .zstd import by_hand

ALL = DIGESTS | PAYLOAD_LIST | PARTS


def within(shape, origin, extent, element):
    """Whether the rectangle has the element with this number."""
    for dim, first, count in reversed(list(zip(shape, origin, extent))):
        if not first <= element % dim < first + count:
            return False
        element //= dim
    return True


def cut(data, dtype, shape, origin, extent):
    """The bytes of a rectangle. Each byte is judged by the element that it begins with."""
    bits = DTYPES[dtype][1]
    return bytes(byte for i, byte in enumerate(data) if within(shape, origin, extent, 8 * i // bits))


def parts(name, dtype, shape, target, base, rectangles, each=None, **options):
    """An entry for each rectangle, a pair of origins and extents, of one tensor. `target` and `base` are its bytes. `each` has
    options of single parts, by number."""
    entries = []
    for i, (origin, extent) in enumerate(rectangles):
        own = {"kind": SAME, **options, **(each or {}).get(i, {})}
        if i:
            own.pop("base_name", None)
        entries.append(Tensor(
            name, dtype, shape, cut(target, dtype, shape, origin, extent),
            cut(base, dtype, shape, origin, extent) if base is not None else None,
            part=2 if i else 1, origin=list(origin), extent=list(extent), whole=target, **own))
    return entries


def along(dim, shape, sizes):
    """Rectangles of these sizes along a dim, from its beginning, that span all others."""
    found, at = [], 0
    for size in sizes:
        found.append(([at * (i == dim) for i in range(len(shape))], [size if i == dim else n for i, n in enumerate(shape)]))
        at += size
    return found


def grid(shape, cuts):
    """Rectangles between the cuts of each dim, in order."""
    found = [([], [])]
    for dim, places in zip(shape, cuts):
        edges = [0, *places, dim]
        found = [(origin + [a], extent + [b - a]) for origin, extent in found for a, b in zip(edges, edges[1:])]
    return found


def model(tensors, files=(), **options):
    options = {"features": ALL, "minor": 2, "frame": by_hand} | options
    return Model(tensors, list(files), **options)


# --- Forged payloads ----------------------------------------------------------------------------

PAIRS = 40


def forgeable():
    """Lanes of U32 for a target without a base in codec `raw`, and for each of PAIRS pairs of lanes two other values that leave
    the sum of the chunk as it is: Q[i] times Q[j] is added and subtracted."""
    lanes, other = [], []
    for pair in range(PAIRS):
        i, j = 2 * pair, 2 * pair + 1
        old = 1 + pair, Q[i] + 1 + pair
        new = 1 + pair + Q[j], 1 + pair
        assert all(0 < lane < 2**32 for lane in old + new)
        lanes += old
        other.append(new)
    return lanes, other


def forged():
    """Lanes of U32, and others with the same chunk sum, of which the payloads in codec `raw` have the same CRC-32.

    The CRC is linear over GF(2): each pair of lanes that is exchanged changes it by a fixed word, so some set of 33 or more pairs
    leaves it as it is.
    """
    lanes, other = forgeable()

    def payload(values):
        zigzag = [2 * v if v < 2**31 else 2 * (2**32 - v) - 1 for v in values]
        return struct.pack(f"<{len(values)}I", *range(len(values))) + bytes_of(zigzag, 4)

    def exchanged(chosen):
        return [v for pair in range(PAIRS) for v in (other[pair] if chosen >> pair & 1 else lanes[2 * pair:2 * pair + 2])]

    start, basis = zlib.crc32(payload(lanes)), {}
    for pair in range(PAIRS):
        word, chosen = zlib.crc32(payload(exchanged(1 << pair))) ^ start, 1 << pair
        while word and word.bit_length() in basis:
            w, c = basis[word.bit_length()]
            word, chosen = word ^ w, chosen ^ c
        if not word:
            values = exchanged(chosen)
            assert zlib.crc32(payload(values)) == start and values != lanes
            return lanes, values, payload(values)
        basis[word.bit_length()] = word, chosen
    raise AssertionError("no set of pairs")
