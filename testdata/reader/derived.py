"""Base lanes that are formed from a base tensor of another dtype: section 8.5 of spec/tpde-format.md."""

import struct
from collections import namedtuple
from math import prod

from .common import need
from .floats import F32, FORMATS, cast, microscaled, product
from .lanes import pack_lanes, unpack_lanes
from .layout import CAST, DTYPES

FP8_BLOCKS, MXFP4, MXFP4_TRANSPOSED = 1, 2, 3
CASTS = {"BF16": ("F32", "F8_E4M3", "F8_E5M2"), "F16": ("F32", "F8_E4M3", "F8_E5M2"), "F32": ("BF16", "F16")}
Derivation = namedtuple("Derivation", "base_dtype form scales_name_size base_shape scales_dtype scales_shape block")


def derivation(entry, shape):
    """What the base parameter of an entry of kind 3 or 4 says, for a tensor of this shape."""
    base_dtype, form, reserved, scales_name_size = struct.unpack("<HBBI", entry.base_param.to_bytes(8, "little"))
    need(reserved == 0, "tensor.base_param", "reserved")
    found = (DTYPES[base_dtype].name if base_dtype in DTYPES else None, form, scales_name_size)
    target = DTYPES[entry.dtype].name
    if entry.base_kind == CAST:
        need(form == 0, "tensor.base_param", "form")
        need(found[0] in CASTS.get(target, ()), "tensor.base_param", "no such cast")
        need(scales_name_size == 0, "tensor.base_param", "scales name of a cast")
        return Derivation(*found, shape, None, None, None)
    need(form in (FP8_BLOCKS, MXFP4, MXFP4_TRANSPOSED), "tensor.base_param", "form")
    if form == FP8_BLOCKS:
        need(found[0] == "F8_E4M3" and target in ("BF16", "F16", "F32") and len(shape) == 2, "tensor.base_param", "fp8_blocks")
        return Derivation(*found, shape, "F32", [-(-dim // 128) for dim in shape], [128, 128])
    need(found[0] == "U8" and target == "BF16", "tensor.base_param", "dtypes of mxfp4")
    need(len(shape) >= 1 if form == MXFP4 else len(shape) == 3, "tensor.base_param", "rank of mxfp4")
    order = shape if form == MXFP4 else [shape[0], shape[2], shape[1]]
    need(order[-1] % 32 == 0, "tensor.base_param", "blocks of 32")
    scales = [*order[:-1], order[-1] // 32]
    block = [1] * (len(shape) - 1) + [32] if form == MXFP4 else [1, 32, 1]
    return Derivation(*found, [*scales, 16], "U8", scales, block)


def check_blocks(block, shape, origin, extent):
    """Section 7: a part has whole blocks."""
    for length, dim, first, count in zip(block, shape, origin, extent):
        end = first + count
        need(first % length == 0 and (end % length == 0 or end == dim), "tensor.part", "a block cut")


def formed(tensor, base, scales):
    """The bytes of the formed tensor, from those of the base tensor and of the tensor of scales."""
    kind, dtype = tensor.derivation, tensor.dtype
    to = FORMATS[dtype.name]
    if kind.form == 0:
        origin = FORMATS[kind.base_dtype]
        lanes = [cast(u, origin, to) for u in unpack_lanes(base, 1 + origin.X + origin.M >> 3)]
    elif kind.form == FP8_BLOCKS:
        lanes = fp8_blocks(tensor.shape, base, unpack_lanes(scales, 4))
        lanes = lanes if to is F32 else [cast(u, F32, to) for u in lanes]
    else:
        nibbles = [half for byte in base for half in (byte & 15, byte >> 4)]
        lanes = [microscaled(v, scales[e // 32]) for e, v in enumerate(nibbles)]
        if kind.form == MXFP4_TRANSPOSED:
            _, K, N = tensor.shape
            lanes = [lanes[(x // (K * N) * N + x % N) * K + x // N % K] for x in range(prod(tensor.shape))]
    return pack_lanes(lanes, dtype.lane_bytes)


def fp8_blocks(shape, base, scales):
    rows, columns = shape
    across = -(-columns // 128)
    return [product(base[r * columns + c], scales[r // 128 * across + c // 128]) for r in range(rows) for c in range(columns)]
