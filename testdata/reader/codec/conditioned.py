"""Codec 2, `conditioned`: section 4 of codecs.md. Here *w*, *L* and so on of the text are `w` and `lanes`."""

from itertools import accumulate, chain

from ..common import Parts, need
from ..lanes import unpack_lanes
from ..layout import table

HAS_TABLES = True
TOTAL = 4096  # what the frequencies of a class add up to
BLOCK = 128  # lanes
TILE = {1: 8, 2: 8, 4: 4, 8: 2}  # blocks per tile, by bytes per lane
LEAST = 2**16  # lower bound of a state between two turns, and its final value
MOST_SETS = 65_535

Header = table(
    "ConditionedHeader",
    """
    B low_bits        B states_log2     B segments_log2   B activity_bits
    H first_context   B context_count   B reserved        I exception_count   I center
""",
)

# Section 4.1. Where a float has its exponent: shift and bits; all other dtypes count the bits of the lane.
EXPONENTS = {
    "F16": (10, 5),
    "BF16": (7, 8),
    "F32": (23, 8),
    "C64": (23, 8),
    "F64": (52, 11),
    "F8_E4M3": (3, 4),
    "F8_E4M3FNUZ": (3, 4),
    "F8_E5M2": (2, 5),
    "F8_E5M2FNUZ": (2, 5),
}
SIGNED = {"I8", "I16", "I32", "I64"}


def context(u, dtype):
    if dtype.name in EXPONENTS:
        shift, bits = EXPONENTS[dtype.name]
        return (u >> shift) % 2**bits
    bits = 8 * dtype.lane_bytes
    if dtype.name in SIGNED and u >> bits - 1:
        u ^= 2**bits - 1
    return u.bit_length()


# Section 4.2.


def read_tables(content, owned):
    """The set of the tensor that has this `content`; `owned` lists the sets of the tensors before it, and grows. A set
    is a list of classes, from class 1 on, and a class a list of frequencies."""
    if not content:
        return []
    parts = Parts(content, "tensor.tables")
    number = int.from_bytes(parts.take(2), "little")
    if len(content) == 2:
        need(1 <= number <= len(owned), "tensor.tables", "no such set before")
        return owned[number - 1]
    need(number == 0, "tensor.tables", "a reference with a set of its own")
    (classes,) = parts.take(1)
    need(1 <= classes <= 15, "tensor.tables", "number of classes")
    own = [read_class(parts) for _ in range(classes)]
    parts.finish()
    owned.append(own)
    need(len(owned) <= MOST_SETS, "tensor.tables", "too many sets")
    return own


def read_class(parts):
    (tokens,) = parts.take(1)
    need(1 <= tokens <= 180, "tensor.tables", "number of tokens")
    frequencies = [read_frequency(parts) for _ in range(tokens)]
    need(frequencies[-1] != 0, "tensor.tables", "the last frequency is zero")
    need(sum(frequencies) == TOTAL, "tensor.tables", "sum")
    return frequencies


def read_frequency(parts):
    (low,) = parts.take(1)
    if low < 128:
        return low
    (rest,) = parts.take(1)
    need(rest != 0, "tensor.tables", "a frequency of two bytes that fits in one")
    return 128 * rest + low - 128


def residues_of(frequencies):
    """For each residue of a state the token, its frequency and its `cum`. This is 4,096 entries for what may be three
    bytes of a file, so it is made when a chunk needs it, not when the index is opened."""
    below = accumulate(frequencies, initial=0)
    return [(t, f, cum) for t, (f, cum) in enumerate(zip(frequencies, below)) for _ in range(f)]


# Section 4.4.


def sizes_fit(record, w, lanes):
    return record.uncompressed_size == w * lanes


def changes(payload, record, tensor, base_lanes):
    w, lanes = tensor.dtype.lane_bytes, len(base_lanes)
    blocks, tile = -(-lanes // BLOCK), BLOCK * TILE[w]
    tiles = -(-lanes // tile)
    parts = Parts(payload, "payload.size")
    (header,) = Header.rows(parts.take(16), 1)
    check_header(header, record, w, tiles)
    r, states, segments = header.low_bits, 1 << header.states_log2, 1 << header.segments_log2

    maps = [read_map(parts, header.context_count, len(tensor.tables)) for _ in range(1 << header.activity_bits)]
    activities = take_bits(parts, blocks, header.activity_bits)
    exceptions = unpack_lanes(parts.take(4 * header.exception_count), 4)
    exception_deltas = unpack_lanes(parts.take(w * header.exception_count), w)
    low_bits = take_bits(parts, lanes, r)
    sizes = [2 * size for size in unpack_lanes(parts.take(4 * (segments - 1)), 4)]
    need(not any(parts.take(parts.next % 2)), "payload.size", "padding")
    streams = [parts.take(size) for size in sizes] + [parts.rest()]
    need(len(streams[-1]) % 2 == 0, "payload.size", "half a word")

    def class_of(lane):
        i = max(context(base_lanes[lane], tensor.dtype), header.first_context) - header.first_context
        return maps[activities[lane // BLOCK]][i] if i < header.context_count else 0

    tables = [residues_of(frequencies) for frequencies in tensor.tables]
    deltas = low_bits
    for s, stream in enumerate(streams):
        steps = []
        for q in range(s * tiles // segments, (s + 1) * tiles // segments):
            coded = [(lane, c) for lane in range(tile * q, min(tile * (q + 1), lanes)) if (c := class_of(lane))]
            steps += [coded[j : j + states] for j in range(0, len(coded), states)]
        values = read_stream(stream, [[tables[c - 1] for _, c in step] for step in steps], states)
        for (lane, _), v in zip(chain.from_iterable(steps), values):
            need(v < 1 << 8 * w - r, "payload.deltas", "a value too large")
            deltas[lane] += ((header.center - v) % (1 << 8 * w - r) if r else v) << r

    need(all(a < b for a, b in zip(exceptions, exceptions[1:])), "payload.positions", "order of exceptions")
    for position, delta in zip(exceptions, exception_deltas):
        need(position < lanes and deltas[position] == 0, "payload.positions", "of an exception")
        need(delta != 0, "payload.deltas", "of an exception")
        deltas[position] = delta
    positions = [i for i, delta in enumerate(deltas) if delta]
    return positions, [deltas[i] for i in positions]


def check_header(header, record, w, tiles):
    need(header.low_bits <= 8 * w, "payload.header", "low_bits")
    need(header.states_log2 <= 5, "payload.header", "states_log2")
    need(header.segments_log2 <= 5 and 1 << header.segments_log2 <= tiles, "payload.header", "segments_log2")
    need(header.activity_bits <= 2, "payload.header", "activity_bits")
    need(1 <= header.context_count <= 64, "payload.header", "context_count")
    need(header.reserved == 0, "payload.header", "reserved")
    need(header.exception_count <= record.num_deltas, "payload.header", "exception_count")
    need(header.center < (1 << 8 * w - header.low_bits if header.low_bits else 1), "payload.header", "center")


def read_map(parts, contexts, classes):
    nibbles = [nibble for byte in parts.take(-(-contexts // 2)) for nibble in (byte & 15, byte >> 4)]
    need(not any(nibbles[contexts:]), "payload.classes", "the rest of a map")
    need(max(nibbles) <= classes, "payload.classes", "a class without a table")
    return nibbles[:contexts]


def take_bits(parts, count, size):
    """`count` numbers of `size` bits each, packed from the low bits of each byte up; the rest is zeros."""
    bits = "".join(f"{byte:08b}"[::-1] for byte in parts.take(-(-count * size // 8)))
    need("1" not in bits[count * size :], "payload.size", "the rest of a byte")
    return [int("0" + bits[at : at + size][::-1], 2) for at in range(0, count * size, size)] if size else [0] * count


# Section 4.5.


def read_stream(stream, steps, count):
    """The values of a stream of `count` states; a step is the tables of its coded lanes."""
    need(len(stream) >= 4 * count, "payload.stream", "shorter than its states")
    states = unpack_lanes(stream[: 4 * count], 4)
    need(min(states) >= LEAST, "payload.stream", "a state below 2^16")
    words = iter(unpack_lanes(stream[4 * count :], 2))

    def filled(x):
        if x >= LEAST:
            return x
        word = next(words, None)
        need(word is not None, "payload.stream", "a word is missing")
        return x << 16 | word

    values = []
    for step in steps:
        tokens = []
        for j, residues in enumerate(step):
            x = states[j]
            t, f, cum = residues[x % TOTAL]
            states[j] = filled(f * (x // TOTAL) + x % TOTAL - cum)
            tokens.append(t)
        left = [extra_bits(t) for t in tokens]
        extras = [0] * len(tokens)
        while any(left):
            for j, t in enumerate(tokens):
                if size := min(left[j], 16):
                    extras[j] += states[j] % 2**size << extra_bits(t) - left[j]
                    states[j] = filled(states[j] >> size)
                    left[j] -= size
        values += [t if t < 64 else (2 + t % 2 << extra_bits(t)) + extra for t, extra in zip(tokens, extras)]
    need(all(x == LEAST for x in states), "payload.stream", "a state at the end")
    need(next(words, None) is None, "payload.stream", "words are left")
    return values


def extra_bits(t):
    return 0 if t < 64 else (t - 64) // 2 + 5
