"""BLAKE3 (hash mode, 32 bytes) in pure Python.

One Python integer holds the same state word of many independent compressions, 64 bits apart. The
upper 32 of these bits take carries and shifted-out bits until they are masked off. So a few operations
on long integers hash all whole chunks of an input, and then all parents of a level of the tree. This is
fast enough for test data.
"""

import struct

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
MIXED = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15), (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
CHUNK, BLOCK = 1024, 64


def _spread(words):
    """Packs `words` into one integer, 64 bits apart."""
    return int.from_bytes(struct.pack(f"<{len(words)}Q", *words), "little")


def _gather(value, lanes):
    return struct.unpack(f"<{lanes}Q", value.to_bytes(8 * lanes, "little"))


def _compress(cv, m, counters, block_size, flags, lanes):
    """Compress one block in each lane: eight words `cv`, sixteen words `m`, all spread."""
    ones = _spread([1] * lanes)
    mask = ones * 0xFFFFFFFF
    v = [
        *cv,
        *(ones * word for word in IV[:4]),
        _spread([c & 0xFFFFFFFF for c in counters]),
        _spread([c >> 32 for c in counters]),
        ones * block_size,
        ones * flags,
    ]
    for _ in range(7):
        for i, (ia, ib, ic, id_) in enumerate(MIXED):
            a, b, c, d = v[ia], v[ib], v[ic], v[id_]
            a = (a + b + m[2 * i]) & mask
            d ^= a
            d = ((d >> 16) | (d << 16)) & mask
            c = (c + d) & mask
            b ^= c
            b = ((b >> 12) | (b << 20)) & mask
            a = (a + b + m[2 * i + 1]) & mask
            d ^= a
            d = ((d >> 8) | (d << 24)) & mask
            c = (c + d) & mask
            b ^= c
            b = ((b >> 7) | (b << 25)) & mask
            v[ia], v[ib], v[ic], v[id_] = a, b, c, d
        m = [m[i] for i in PERMUTATION]
    return [v[i] ^ v[i + 8] for i in range(8)]


def _chunks(data, first, size, final):
    """The chaining values of equally long chunks, of `size` bytes each, as lists of eight words."""
    lanes = max(1, len(data) // size) if size else 1
    padded = max(1, -(-size // BLOCK)) * BLOCK
    if padded != size:
        assert lanes == 1
        data = data + bytes(padded - size)
    words = struct.unpack(f"<{len(data) // 4}I", data)
    ones = _spread([1] * lanes)
    cv = [ones * word for word in IV]
    counters = range(first, first + lanes)
    for at in range(0, padded, BLOCK):
        last = at + BLOCK == padded
        flags = (CHUNK_START if at == 0 else 0) | ((CHUNK_END | final) if last else 0)
        m = [_spread(words[at // 4 + i :: padded // 4]) for i in range(16)]
        cv = _compress(cv, m, counters, size - at if last else BLOCK, flags, lanes)
    return [list(lane) for lane in zip(*(_gather(word, lanes) for word in cv))]


def blake3(data):
    """The 32-byte hash of `data`."""
    data = bytes(data)
    whole = max(0, (len(data) - 1) // CHUNK)  # all chunks except the last, which may be partial
    alone = whole == 0
    nodes = _chunks(data[: whole * CHUNK], 0, CHUNK, 0) if whole else []
    nodes += _chunks(data[whole * CHUNK :], whole, len(data) - whole * CHUNK, ROOT if alone else 0)
    while len(nodes) > 1:
        # The left subtree is the largest power of two: combine adjacent pairs, and pass an odd last one up.
        lanes = len(nodes) // 2
        m = [_spread(words) for words in zip(*(nodes[2 * i] + nodes[2 * i + 1] for i in range(lanes)))]
        ones = _spread([1] * lanes)
        flags = PARENT | (ROOT if len(nodes) == 2 else 0)
        cv = _compress([ones * word for word in IV], m, [0] * lanes, BLOCK, flags, lanes)
        nodes = [list(lane) for lane in zip(*(_gather(word, lanes) for word in cv))] + nodes[2 * lanes :]
    return struct.pack("<8I", *nodes[0])
