"""Constants, lanes and their patterns, steps between them, and the sums of chunks."""

import struct

M64 = 2**64
RAW, ZSTD, CONDITIONED = 0, 1, 2
PLANES, GAPS, ELIAS, NIBBLE_GAPS, NIBBLE_PLANES = range(5)
LAYOUTS = ("planes", "gaps", "elias_delta", "nibble_gaps", "nibble_planes")
NONE, SAME, PREFIX, CAST, DEQUANTISED = range(5)
FP8_BLOCKS, MXFP4, MXFP4_TRANSPOSED = 1, 2, 3  # forms of dequantised bases
DIGESTS, PAYLOAD_LIST, PARTS, DERIVED = 1, 2, 4, 16  # required features
HEADER_OF_BASE, VERBATIM, AS_BASE = 1, 2, 3
ORDERED = {"F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
DTYPES = {  # name: code, bits per element, bytes per lane
    "BOOL": (0, 8, 1), "U8": (1, 8, 1), "I8": (2, 8, 1), "U16": (3, 16, 2), "I16": (4, 16, 2),
    "U32": (5, 32, 4), "I32": (6, 32, 4), "U64": (7, 64, 8), "I64": (8, 64, 8), "F16": (16, 16, 2),
    "BF16": (17, 16, 2), "F32": (18, 32, 4), "F64": (19, 64, 8), "C64": (20, 64, 4),
    "F8_E4M3": (32, 8, 1), "F8_E5M2": (33, 8, 1), "F8_E4M3FNUZ": (34, 8, 1), "F8_E5M2FNUZ": (35, 8, 1),
    "F8_E8M0": (36, 8, 1), "F4": (48, 4, 1), "F6_E2M3": (49, 6, 1), "F6_E3M2": (50, 6, 1)}


def up(x, a):
    """align(x, a)"""
    return (x + a - 1) // a * a


def raw_name(name):
    return name if isinstance(name, bytes) else name.encode("utf-8")


def lanes_of(data, w):
    return list(struct.unpack("<%d%s" % (len(data) // w, {1: "B", 2: "H", 4: "I", 8: "Q"}[w]), data))


def bytes_of(lanes, w):
    return struct.pack("<%d%s" % (len(lanes), {1: "B", 2: "H", 4: "I", 8: "Q"}[w]), *lanes)


def pattern(count, w, seed=0):
    return [(i % 1021 * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03) % M64 >> 64 - 8 * w for i in range(count)]


def rank_of(u, w, ordered):
    """`ordered` of section 9."""
    if not ordered:
        return u
    half = 1 << 8 * w - 1
    return 2 * half - 1 - u if u >= half else u + half


def moved(u, step, w, ordered):
    """The lane `step` steps from `u` in that order."""
    half = 1 << 8 * w - 1
    place = (rank_of(u, w, ordered) + step) % (2 * half)
    if not ordered:
        return place
    return place - half if place >= half else 2 * half - 1 - place


def delta_of(base, target, w, ordered):
    d = (rank_of(target, w, ordered) - rank_of(base, w, ordered)) % (1 << 8 * w)
    return 2 * d if d < 1 << 8 * w - 1 else 2 * ((1 << 8 * w) - d) - 1


def mix(x):
    z = (x + 1) * 0x9E3779B97F4A7C15 % M64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % M64
    return z ^ (z >> 31)


Q = [(mix(c) >> 32) | 1 for c in range(1024)]


def chunk_sum(data):
    total = 0
    for j, word in enumerate(lanes_of(data + bytes(-len(data) % 4), 4)):
        if word:
            total += ((mix(1024 + j // 1024) | 1) * Q[j % 1024] % M64) * word
    return total % M64
