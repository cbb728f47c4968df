"""Lanes as integers, the arithmetic of section 9, the sums of section 6.1."""

import struct
from operator import mul

TYPES = {1: "B", 2: "H", 4: "I", 8: "Q"}
U64 = 2**64 - 1


def unpack_lanes(data, w):
    return list(struct.unpack(f"<{len(data) // w}{TYPES[w]}", data))


def pack_lanes(lanes, w):
    return struct.pack(f"<{len(lanes)}{TYPES[w]}", *lanes)


def apply_delta(u, delta, bits, ordered):
    """The target lane for base lane `u` and `delta`."""
    top, mask = 1 << bits - 1, (1 << bits) - 1
    d = delta >> 1 ^ -(delta & 1)
    if not ordered:
        return u + d & mask
    x = (mask - u if u & top else u + top) + d & mask
    return x - top if x & top else mask - x


def mix(x):
    z = (x + 1) * 0x9E3779B97F4A7C15 & U64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & U64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & U64
    return z ^ z >> 31


Q = [mix(c) >> 32 | 1 for c in range(1024)]


def lane_sum(data):
    words = unpack_lanes(data + bytes(-len(data) % 4), 4)
    rows = (words[i : i + 1024] for i in range(0, len(words), 1024))
    return sum((mix(1024 + r) | 1) * sum(map(mul, Q, row)) for r, row in enumerate(rows)) & U64
