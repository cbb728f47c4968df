"""Decodes the payloads of a TPDE pair, in the order of spec/codecs.md, whose sections the comments name.

Chunks and tensors are those of reader.py.
"""

import struct
from collections import namedtuple
from functools import lru_cache
from itertools import accumulate

import numpy as np
from common import U64, Cursor, align, check, expand, lanes_of, need

# Section 1.

RAW, ZSTD, CONDITIONED = range(3)


def sizes_fit(codec, chunk, width, lanes):
    """Whether the codec allows the sizes of a payload: `record.sizes`."""
    if codec == RAW:
        return chunk.compressed_size == chunk.uncompressed_size == align(4 * chunk.num_deltas, width) + width * chunk.num_deltas
    if codec == ZSTD:
        return 2 <= chunk.uncompressed_size <= (width + 3) * lanes + 64
    return chunk.uncompressed_size == width * lanes


def decode(payload, chunk, tensor, base):
    """The delta of each lane of a chunk with the lanes `base`."""
    width = tensor.dtype.lane_bytes
    if tensor.codec == CONDITIONED:
        deltas = decode_conditioned(payload, chunk, tensor, base)
    elif tensor.codec == ZSTD:
        deltas = decode_zstd(expand(payload, chunk.uncompressed_size, "payload.frame"), chunk.num_deltas, width, len(base))
    else:
        deltas = decode_raw(Cursor(payload, "payload.size"), chunk.num_deltas, width, len(base))
    need(np.count_nonzero(deltas) == chunk.num_deltas, "payload.deltas", "number")
    return deltas


def scatter(positions, deltas, lanes):
    need(len(positions) == 0 or positions[-1] < lanes, "payload.positions", "past the end")
    need(bool((positions[1:] > positions[:-1]).all()), "payload.positions", "order")
    result = np.zeros(lanes, U64)
    result[positions] = deltas
    return result


# Section 2.


def decode_raw(cursor, n, width, lanes):
    positions = cursor.lanes(n, 4)
    need(not any(cursor.take(-4 * n % width)), "payload.positions", "padding")
    return scatter(positions, cursor.lanes(n, width), lanes)


# Section 3.


def decode_zstd(content, n, width, lanes):
    cursor, most = Cursor(content, "payload.size"), (1 << 8 * width) - 1
    (layout,) = cursor.take(1)
    need(layout <= 4, "payload.layout")
    if layout == 0:  # 3.1, planes
        deltas = planes(cursor, lanes, width)
    elif layout == 1:  # 3.2, gaps
        deltas = planes(cursor, n, width)
        deltas = scatter(ascend(continued(cursor, n)), deltas, lanes)
    elif layout == 2:  # 3.3, elias-delta
        deltas = planes(cursor, n, width)
        deltas = scatter(ascend(elias_delta(cursor.rest(), n)), deltas, lanes)
    elif layout == 3:  # 3.4, nibble-gaps
        tokens = cursor.lanes(n, 1)
        deltas = escaped(cursor, tokens >> 4, width, most - 1) + U64(1)
        gaps = tokens & 15
        gaps[gaps == 15] += continued(cursor, np.count_nonzero(gaps == 15))
        deltas = scatter(ascend(gaps), deltas, lanes)
    else:  # 3.5, nibble-planes
        groups = -(-lanes // 64)
        tokens = cursor.lanes(32 * groups, 1).reshape(groups, 32)
        q = np.hstack([tokens & 15, tokens >> 4]).ravel()
        need(not q[lanes:].any(), "payload.positions", "a token past the end")
        deltas = escaped(cursor, q[:lanes], width, most)
    cursor.finish()
    return deltas


def planes(cursor, m, width):
    return sum((cursor.lanes(m, 1) << U64(8 * row) for row in range(width)), np.zeros(m, U64))


def ascend(gaps):
    return np.cumsum(gaps + 1, dtype=U64) - 1


def continued(cursor, n):
    """`n` numbers in continued bytes: a number ends with the first byte that is not 255."""
    left = np.frombuffer(cursor.data, np.uint8, offset=cursor.next)
    ends = np.flatnonzero(left != 255)[:n]
    need(len(ends) == n, cursor.rule, "too short")
    totals = np.cumsum(cursor.lanes(ends[-1] + 1 if n else 0, 1))[ends]
    return np.diff(totals, prepend=U64(0))


def elias_delta(data, n):
    bits, gaps, at = "".join(f"{byte:08b}" for byte in data), [], 0
    for _ in range(n):
        need(not bits.startswith("00000", at), "payload.positions", "five zeros")
        first = bits.find("1", at)
        need(first >= 0, "payload.size", "too short")
        after = 2 * first - at + 1
        at = after + int(bits[first:after], 2) - 1
        need(at <= len(bits), "payload.size", "too short")
        gaps.append(int("1" + bits[after:at], 2) - 1)
    need(len(bits) - at < 8 and "1" not in bits[at:], "payload.size", "bits are left")
    return np.array(gaps, U64)


def escaped(cursor, q, width, most):
    """Items 2 and 3 of both layouts of nibbles: what follows the values 15."""
    far = np.flatnonzero(q == 15)
    escapes = cursor.lanes(len(far), 1)
    q[far] += escapes
    far = far[escapes == 255]
    need(width > 1 or len(far) == 0, "payload.deltas", "3.6: too large for a lane of 8 bits")
    beyond = planes(cursor, len(far), width)
    need(not (beyond > max(most - 270, 0)).any(), "payload.deltas", "too large")
    q[far] += beyond
    need(not (q > most).any(), "payload.deltas", "too large")
    return q


# Section 4.1.


def contexts_of(lanes, dtype):
    if dtype.exponent_bits:
        return lanes >> dtype.mantissa_bits & (1 << dtype.exponent_bits) - 1
    if dtype.name in ("I8", "I16", "I32", "I64"):
        bits = 8 * dtype.lane_bytes
        lanes = np.where(lanes >> bits - 1, (1 << bits) - 1 - lanes, lanes)
    return bit_length(lanes)


def bit_length(lanes):
    return sum(((lanes >> k > 0).astype(U64) for k in range(64)), np.zeros(len(lanes), U64))


# Section 4.2.


def read_tables(tables, owned):
    """The table set of a tensor: for each class its frequencies. `owned` has the sets of the tensors before, and grows."""
    if not tables:
        return []
    cursor = Cursor(tables, "tensor.tables")
    number = int.from_bytes(cursor.take(2), "little")
    if len(tables) == 2:
        check("tensor", tables=1 <= number <= len(owned))
        return owned[number - 1]
    (classes,) = cursor.take(1)
    check("tensor", tables=number == 0 and 1 <= classes <= 15)
    owned.append([read_class(cursor) for _ in range(classes)])
    cursor.finish()
    check("tensor", tables=len(owned) < 2**16)
    return owned[-1]


def read_class(cursor):
    (tokens,) = cursor.take(1)
    frequencies = []
    for _ in range(tokens):
        low, high = *cursor.take(1), 0
        if low >= 128:
            (high,) = cursor.take(1)
            check("tensor", tables=high > 0)
        frequencies.append(low % 128 + 128 * high)
    check("tensor", tables=1 <= tokens <= 180 and frequencies[-1] > 0 and sum(frequencies) == 4096)
    return tuple(frequencies)


@lru_cache(maxsize=64)
def slots_of(frequencies):
    """For each of the 4,096 remainders of a state: token, frequency, cum."""
    sums = accumulate(frequencies, initial=0)
    return [(token, f, cum) for token, (f, cum) in enumerate(zip(frequencies, sums)) for _ in range(f)]


# Section 4.3.


def extra_bits(token):
    return 0 if token < 64 else (token - 64) // 2 + 5


# Section 4.4.

TILE = {1: 1024, 2: 1024, 4: 512, 8: 256}  # lanes per tile, by bytes per lane
Header = namedtuple("Header", "low_bits states segments activity_bits first_context contexts reserved exceptions center")


def decode_conditioned(payload, chunk, tensor, base):
    width, lanes, classes = tensor.dtype.lane_bytes, len(base), len(tensor.table_set)
    bits, tile = 8 * width, TILE[width]
    blocks, tiles = -(-lanes // 128), -(-lanes // tile)
    cursor = Cursor(payload, "payload.size")
    h = Header._make(struct.unpack("<4BH2B2I", cursor.take(16)))
    r = h.low_bits
    need(r <= bits and h.states <= 5 and h.segments <= 5 and 1 << h.segments <= tiles and h.activity_bits <= 2, "payload.header")
    need(1 <= h.contexts <= 64 and h.reserved == 0 and h.exceptions <= chunk.num_deltas, "payload.header")
    need(h.center < (1 << bits - r if r else 1), "payload.header")
    states, segments, maps = 1 << h.states, 1 << h.segments, 1 << h.activity_bits

    nibbles = cursor.lanes(maps * -(-h.contexts // 2), 1).reshape(maps, -1)
    map_of = np.stack([nibbles & 15, nibbles >> 4], axis=2).reshape(maps, -1)
    need(not map_of[:, h.contexts :].any() and map_of.max() <= classes, "payload.classes")
    activities = bit_string(cursor, blocks, h.activity_bits)
    positions, exceptions = cursor.lanes(h.exceptions, 4), cursor.lanes(h.exceptions, width)
    deltas = bit_string(cursor, lanes, r)
    sizes = cursor.lanes(segments - 1, 4).tolist()
    need(not any(cursor.take(cursor.next % 2)), "payload.size", "padding")
    streams = [cursor.take(2 * size) for size in sizes] + [cursor.rest()]
    need(len(streams[-1]) % 2 == 0, "payload.size", "half a word")

    context = np.maximum(contexts_of(base, tensor.dtype), h.first_context) - h.first_context
    activity = np.repeat(activities, 128)[:lanes]
    class_of = np.where(context < h.contexts, map_of[activity, np.minimum(context, h.contexts - 1)], 0)

    coded, values, slots = np.flatnonzero(class_of), [], [slots_of(frequencies) for frequencies in tensor.table_set]
    for s, stream in enumerate(streams):
        ends = np.searchsorted(coded, np.arange(s * tiles // segments, (s + 1) * tiles // segments + 1) * tile)
        of_tiles = [[slots[c - 1] for c in class_of[coded[a:b]].tolist()] for a, b in zip(ends, ends[1:])]
        steps = [of_tile[j : j + states] for of_tile in of_tiles for j in range(0, len(of_tile), states)]
        values += read_stream(stream, steps, states)

    # Section 4.6.
    need(max(values, default=0) < 1 << bits - r, "payload.deltas", "a value is too large")
    high = np.array(values, U64)
    if r:
        high = h.center - high & (1 << bits - r) - 1
    deltas[coded] += high << r
    added = scatter(positions, exceptions, lanes)
    need(exceptions.all(), "payload.deltas", "an exception of zero")
    need(not deltas[added > 0].any(), "payload.positions", "an exception of a changed lane")
    return deltas + added


def bit_string(cursor, count, size):
    """`count` numbers of `size` bits each."""
    bits = np.unpackbits(np.frombuffer(cursor.take(-(-count * size // 8)), np.uint8), bitorder="little")
    need(not bits[count * size :].any(), cursor.rule, "the rest of a byte")
    return sum((bits[k : count * size : size].astype(U64) << k for k in range(size)), np.zeros(count, U64))


# Section 4.5.


def read_stream(stream, steps, states):
    """The values of the coded lanes of a segment. A step has the slots of the class of each of its lanes."""
    need(len(stream) >= 4 * states, "payload.stream", "shorter than its states")
    x, words, values = lanes_of(stream[: 4 * states], 4).tolist(), iter(lanes_of(stream[4 * states :], 2).tolist()), []
    need(min(x) >= 2**16, "payload.stream", "a state is too small")

    def refill(state):
        if state >= 2**16:
            return state
        word = next(words, None)
        need(word is not None, "payload.stream", "no word is left")
        return state << 16 | word

    for step in steps:
        extra, first = [], len(values)
        for k, slots in enumerate(step):
            token, f, cum = slots[x[k] % 4096]
            x[k] = refill(f * (x[k] // 4096) + x[k] % 4096 - cum)
            extra.append(extra_bits(token))
            values.append(token if token < 64 else (2 + token % 2) << extra[k])
        for done in range(0, max(extra), 16):
            for k, e in enumerate(extra):
                if e > done:
                    m = min(e - done, 16)
                    values[first + k] += x[k] % 2**m << done
                    x[k] = refill(x[k] >> m)
    need(all(state == 2**16 for state in x) and next(words, None) is None, "payload.stream", "bits are left")
    return values
