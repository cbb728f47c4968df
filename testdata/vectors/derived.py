"""Derived bases: lanes of floats by search among all lanes of a format, and the tensors that they form."""

from functools import cache

from .data import (CAST, DEQUANTISED, DERIVED, DIGESTS, DTYPES, FP8_BLOCKS, MXFP4, MXFP4_TRANSPOSED, PAYLOAD_LIST, bytes_of,
                   lanes_of)
from .pair import Model, Tensor, change
from .zstd import by_hand

FLOATS = {"F32": (8, 23), "BF16": (8, 7), "F16": (5, 10), "F8_E5M2": (5, 2), "F8_E4M3": (4, 3), "E2M1": (2, 1)}  # exponent, mantissa
UNIT = 200  # magnitudes are in units of 2^-200, of which all lanes and products have whole numbers
ALL = DIGESTS | PAYLOAD_LIST | DERIVED


def infinity(dtype):
    """The lane whose exponent is the largest and whose mantissa is 0."""
    exponent, mantissa = FLOATS[dtype]
    return ((1 << exponent) - 1) << mantissa


def is_nan(u, dtype):
    u %= 1 << sum(FLOATS[dtype])
    return u == 127 if dtype == "F8_E4M3" else u > infinity(dtype)


@cache
def magnitude(u, dtype):
    """Of a lane without sign. That of an infinity is what a larger exponent would stand for."""
    exponent, mantissa = FLOATS[dtype]
    power, rest = u >> mantissa, u % (1 << mantissa)
    return (rest + ((power > 0) << mantissa)) << max(power, 1) - ((1 << exponent - 1) - 1) - mantissa + UNIT


def nearest(size, dtype):
    """The lane without sign whose magnitude is nearest to `size`; of two, the even one."""
    low, high = 0, infinity(dtype)
    if size >= magnitude(high, dtype):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if magnitude(middle, dtype) <= size else (low, middle)
    below, above = size - magnitude(low, dtype), magnitude(high, dtype) - size
    return low if below < above or below == above and low % 2 == 0 else high


@cache
def converted(u, source, target):
    sign, u = divmod(u, 1 << sum(FLOATS[source]))
    from_mantissa, to_mantissa = FLOATS[source][1], FLOATS[target][1]
    if is_nan(u, source):
        payload = (u % (1 << from_mantissa) << 32 >> from_mantissa) << to_mantissa >> 32
        found = infinity(target) | payload | 1 << to_mantissa - 1
    elif source != "F8_E4M3" and u == infinity(source):
        found = infinity(target)
    else:
        found = nearest(magnitude(u, source), target)
    return found | sign << sum(FLOATS[target])


@cache
def multiplied(u, v):
    """F8_E4M3 times F32, as F32."""
    sign, a, b = u >> 7 ^ v >> 31, u % 128, v % 2**31
    inf = infinity("F32")
    if a == 127 or b > inf or (a == 0 and b == inf):
        return 0x7FC00000
    found = inf if b == inf else nearest(magnitude(a, "F8_E4M3") * magnitude(b, "F32") >> UNIT, "F32")
    return sign << 31 | found


@cache
def scaled(nibble, scale):
    """A nibble of E2M1 times 2^(scale - 127), as BF16."""
    return nibble >> 3 << 15 | nearest((magnitude(nibble % 8, "E2M1") << scale) >> 127, "BF16")


# --- Bytes of formed tensors --------------------------------------------------------------------


def cast(data, source, target):
    return bytes_of([converted(u, source, target) for u in lanes_of(data, DTYPES[source][2])], DTYPES[target][2])


def fp8_blocks(weight, scales, shape, target):
    rows, columns = shape
    scales, across = lanes_of(scales, 4), -(-columns // 128)
    lanes = [multiplied(weight[r * columns + c], scales[r // 128 * across + c // 128]) for r in range(rows) for c in range(columns)]
    return bytes_of(lanes if target == "F32" else [converted(u, "F32", target) for u in lanes], DTYPES[target][2])


def mxfp4(blocks, scales):
    lanes = []
    for i, scale in enumerate(scales):
        for byte in blocks[16 * i:16 * i + 16]:
            lanes += [scaled(byte % 16, scale), scaled(byte >> 4, scale)]
    return bytes_of(lanes, 2)


def transposed(data, shape):
    """Lanes of 16 bits in the shape [X, N, K] as lanes of the shape [X, K, N]."""
    experts, depth, width = shape
    lanes = lanes_of(data, 2)
    return bytes_of([lanes[(x * width + n) * depth + k] for x in range(experts) for k in range(depth) for n in range(width)], 2)


# --- Tensors ------------------------------------------------------------------------------------


class Source:
    """What a tensor is derived from: rows of the base by name, formed lanes, and what its entries state."""

    def __init__(self, rows, formed, **options):
        self.rows, self.formed, self.options = rows, formed, options

    def tensor(self, name, dtype, shape, steps=(1, -1, 2), p=7, **options):
        """A tensor of these formed lanes, of which each lane i with i mod p = 1 is moved."""
        return Tensor(name, dtype, shape, change(self.formed, dtype, list(steps), p), self.formed,
                      **{"codec": 0, **self.options, **options})


def cast_source(name, source, target, shape, data):
    return Source({name: (source, shape, data)}, cast(data, source, target), kind=CAST, base_dtype=source)


def fp8_source(name, scales_name, target, shape, weight, scales):
    grid = [-(-dim // 128) for dim in shape]
    return Source({name: ("F8_E4M3", shape, weight), scales_name: ("F32", grid, scales)},
                  fp8_blocks(weight, scales, shape, target), kind=DEQUANTISED, base_dtype="F8_E4M3", form=FP8_BLOCKS,
                  scales_name=scales_name)


def mxfp4_source(name, scales_name, shape, blocks, scales, form=MXFP4):
    """`shape` is that of the target."""
    order = shape if form == MXFP4 else [shape[0], shape[2], shape[1]]
    grid = [*order[:-1], order[-1] // 32]
    formed = mxfp4(blocks, scales)
    return Source({name: ("U8", [*grid, 16], blocks), scales_name: ("U8", grid, scales)},
                  transposed(formed, shape) if form == MXFP4_TRANSPOSED else formed, kind=DEQUANTISED, base_dtype="U8", form=form,
                  scales_name=scales_name)


def model(tensors, files=(), **options):
    return Model(tensors, list(files), **{"features": ALL, "minor": 3, "frame": by_hand} | options)
