"""What the programs of this folder share: refusals, cursors, lanes, hashes, zstd frames, dtypes.

The comments name sections of spec/tpde-format.md. Lanes are arrays of 64-bit integers, which wrap, whatever the dtype.
"""

from collections import namedtuple
from contextlib import contextmanager
from math import prod

import blake3
import numpy as np
import zstandard

U64 = np.uint64


# Section 2: rules, integers, hashes.


class Refused(Exception):
    """The pair or the base breaks `rule` of the specification, or exceeds a `limit`, or needs what is `unsupported` here."""

    def __init__(self, rule, detail=""):
        super().__init__(rule, detail)
        self.rule, self.detail, self.place = rule, detail, ""

    def __str__(self):
        return ": ".join(filter(None, (self.rule, self.place, self.detail)))


def need(holds, rule, detail=""):
    if not holds:
        raise Refused(rule, detail)


def check(prefix, **rules):
    """Refuses under the first rule, `prefix.name`, that does not hold."""
    for name, holds in rules.items():
        need(holds, f"{prefix}.{name}")


@contextmanager
def at(place):
    """Refusals in the block name this place."""
    try:
        yield
    except Refused as refused:
        refused.place = place
        raise


class Cursor:
    """Takes one piece of `data` after the other. It breaks `rule` if a piece is beyond the end, or if bytes are left at the end."""

    def __init__(self, data, rule):
        self.data, self.rule, self.next = data, rule, 0

    def take(self, size):
        need(size <= len(self.data) - self.next, self.rule, "too short")
        self.next += size
        return self.data[self.next - size : self.next]

    def rest(self):
        return self.take(len(self.data) - self.next)

    def lanes(self, count, width):
        return lanes_of(self.take(count * width), width)

    def finish(self):
        need(self.next == len(self.data), self.rule, "bytes are left")


def align(x, a):
    return -(-x // a) * a


def hash_of(data):
    return blake3.blake3(data).digest()


def lanes_of(data, width):
    return np.frombuffer(data, f"<u{width}").astype(U64)


# Section 5.2: frames.


def expand(frame, size, rule):
    """The content of the zstd frame that fills `frame`."""
    try:
        need(frame[:4] == b"\x28\xb5\x2f\xfd", rule, "no zstd frame")
        header = zstandard.get_frame_parameters(frame)
        need(header.content_size == size and header.dict_id == 0 and header.window_size <= 1 << 27, rule, "header of a frame")
        # The library ignores what follows a frame. So the blocks are walked to find its end.
        cursor, last = Cursor(frame, rule), 0
        cursor.take(zstandard.frame_header_size(frame))
        while not last:
            block = int.from_bytes(cursor.take(3), "little")
            last = block & 1
            cursor.take(1 if block >> 1 & 3 == 1 else block >> 3)  # 1 is a byte that is repeated
        cursor.take(4 * header.has_checksum)
        cursor.finish()
        content = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(frame)
    except zstandard.ZstdError as error:
        raise Refused(rule, str(error)) from None
    need(len(content) == size, rule)
    return content


# Section 8.2: base kinds.

NONE, SAME, PREFIX = range(3)

# Section 8.1: dtypes. Of a float also the place of its exponent (codecs.md, section 4.1).

Dtype = namedtuple("Dtype", "name bits lane_bytes ordered mantissa_bits exponent_bits", defaults=(0, 0))
DTYPES = {0: Dtype("BOOL", 8, 1, 0), 1: Dtype("U8", 8, 1, 0), 2: Dtype("I8", 8, 1, 0), 3: Dtype("U16", 16, 2, 0)}
DTYPES |= {4: Dtype("I16", 16, 2, 0), 5: Dtype("U32", 32, 4, 0), 6: Dtype("I32", 32, 4, 0), 7: Dtype("U64", 64, 8, 0)}
DTYPES |= {8: Dtype("I64", 64, 8, 0), 16: Dtype("F16", 16, 2, 1, 10, 5), 17: Dtype("BF16", 16, 2, 1, 7, 8)}
DTYPES |= {18: Dtype("F32", 32, 4, 1, 23, 8), 19: Dtype("F64", 64, 8, 1, 52, 11), 20: Dtype("C64", 64, 4, 1, 23, 8)}
DTYPES |= {32: Dtype("F8_E4M3", 8, 1, 1, 3, 4), 33: Dtype("F8_E5M2", 8, 1, 1, 2, 5), 34: Dtype("F8_E4M3FNUZ", 8, 1, 1, 3, 4)}
DTYPES |= {35: Dtype("F8_E5M2FNUZ", 8, 1, 1, 2, 5), 36: Dtype("F8_E8M0", 8, 1, 0)}
DTYPES |= {48: Dtype("F4", 4, 1, 0), 49: Dtype("F6_E2M3", 6, 1, 0), 50: Dtype("F6_E3M2", 6, 1, 0)}
BITS = {dtype.name: dtype.bits for dtype in DTYPES.values()}


def shape_fits(shape, dtype):
    bits = prod(shape) * dtype.bits  # integers of Python do not wrap
    return bits < 2**63 and bits % 8 == 0
