"""Codec 1, `zstd`: section 3 of codecs.md. One function per layout, with `n` changes among `lanes` lanes of `w` bytes."""

from ..common import Parts, expand, need

HAS_TABLES = False


def sizes_fit(record, w, lanes):
    return 2 <= record.uncompressed_size <= (w + 3) * lanes + 64


def changes(payload, record, tensor, base_lanes):
    parts = Parts(expand(payload, record.uncompressed_size, "payload.frame"), "payload.size")
    (layout,) = parts.take(1)
    need(layout < len(LAYOUTS), "payload.layout")
    positions, deltas = LAYOUTS[layout](parts, record.num_deltas, tensor.dtype.lane_bytes, len(base_lanes))
    parts.finish()
    return positions, deltas


def planes(parts, n, w, lanes):
    return changed(take_planes(parts, lanes, w))


def gaps(parts, n, w, lanes):
    deltas = take_planes(parts, n, w)
    return ascend(take_continued(parts) for _ in range(n)), deltas


def elias_delta(parts, n, w, lanes):
    deltas = take_planes(parts, n, w)
    bits = Parts("".join(f"{byte:08b}" for byte in parts.rest()), "payload.size")
    positions = ascend(take_elias(bits, lanes) - 1 for _ in range(n))
    unused = bits.rest()
    need(len(unused) < 8 and "1" not in unused, "payload.size", "left over")
    return positions, deltas


def nibble_gaps(parts, n, w, lanes):
    tokens = parts.take(n)
    deltas = [v + 1 for v in take_escapes(parts, [token >> 4 for token in tokens], w)]
    low = [token & 15 for token in tokens]
    return ascend(gap if gap < 15 else 15 + take_continued(parts) for gap in low), deltas


def nibble_planes(parts, n, w, lanes):
    z = []
    for _ in range(0, lanes, 64):
        block = parts.take(32)
        z += [token & 15 for token in block] + [token >> 4 for token in block]
    need(not any(z[lanes:]), "payload.positions", "a token past the end")
    return changed(take_escapes(parts, z[:lanes], w))


LAYOUTS = [planes, gaps, elias_delta, nibble_gaps, nibble_planes]


def changed(deltas):
    """Positions and deltas, where there is a delta for every lane."""
    positions = [i for i, delta in enumerate(deltas) if delta]
    return positions, [deltas[i] for i in positions]


def ascend(gaps):
    """The positions that have these gaps before them."""
    positions, next_ = [], 0
    for gap in gaps:
        positions.append(next_ + gap)
        next_ += gap + 1
    return positions


def take_planes(parts, m, w):
    """The `m` lanes of byte planes."""
    rows = [parts.take(m) for _ in range(w)]
    return [int.from_bytes(lane, "little") for lane in zip(*rows)]


def take_continued(parts):
    value = 0
    while (byte := parts.take(1)[0]) == 255:
        value += 255
    return value + byte


def take_escapes(parts, values, w):
    """Parts 2 and 3 of the nibble layouts: what the values of 15 stand for."""
    escaped = [i for i, value in enumerate(values) if value == 15]
    escapes = parts.take(len(escaped))
    far = [i for i, escape in zip(escaped, escapes) if escape == 255]
    need(not far or w > 1, "payload.deltas", "too large for a lane of 8 bits")
    for i, escape in zip(escaped, escapes):
        values[i] += escape
    for i, rest in zip(far, take_planes(parts, len(far), w)):
        values[i] += rest
    return values


def take_elias(bits, most):
    """One number in the code of Elias, from a string of "0" and "1"."""

    def take(count):
        return int("0" + bits.take(count), 2)

    k = 0
    while take(1) == 0:
        k += 1
        need(k <= 4, "payload.positions", "code too long")
    size = (1 << k | take(k)) - 1
    x = 1 << size | take(size)
    need(x <= most, "payload.positions", "gap too long")
    return x
