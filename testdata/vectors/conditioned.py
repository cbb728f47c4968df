"""Codec 2, `conditioned`: an encoder from section 4 of codecs.md. `Plan` has the choices of a writer."""

import struct
from dataclasses import dataclass

from .data import bytes_of

TOTAL, BLOCK, LEAST = 4096, 128, 1 << 16
TILE = {1: 1024, 2: 1024, 4: 512, 8: 256}  # lanes per tile, by bytes per lane
EXPONENT = {"F16": (10, 31), "BF16": (7, 255), "F32": (23, 255), "C64": (23, 255), "F64": (52, 2047),
            "F8_E4M3": (3, 15), "F8_E4M3FNUZ": (3, 15), "F8_E5M2": (2, 31), "F8_E5M2FNUZ": (2, 31)}


def context_of(u, dtype, w):
    if dtype in EXPONENT:
        shift, mask = EXPONENT[dtype]
        return u >> shift & mask
    if dtype in ("I8", "I16", "I32", "I64") and u >= 1 << 8 * w - 1:
        u = (1 << 8 * w) - 1 - u
    return u.bit_length()


# --- Tables -------------------------------------------------------------------------------------


def row(frequencies):
    """A class from {token: frequency}."""
    assert sum(frequencies.values()) == TOTAL and all(frequencies.values())
    return [frequencies.get(t, 0) for t in range(max(frequencies) + 1)]


def shared_by(tokens, *rare):
    """A class in which `tokens` have equal frequencies, `rare` ones have 1, and the first token has the rest."""
    tokens = list(tokens)
    each = (TOTAL - len(rare)) // len(tokens)
    return row({tokens[0]: TOTAL - len(rare) - each * (len(tokens) - 1)} | dict.fromkeys(tokens[1:], each)
               | dict.fromkeys(rare, 1))


def frequency_bytes(f):
    return bytes([f]) if f < 128 else bytes([128 + f % 128, f // 128])


def set_bytes(tables):
    """The tables of a tensor, from any form of `Tensor.tables`."""
    if tables is None or isinstance(tables, bytes):
        return tables or b""
    if isinstance(tables, int):
        return struct.pack("<H", tables)
    return b"\0\0" + bytes([len(tables)]) + b"".join(
        bytes([len(f)]) + b"".join(map(frequency_bytes, f)) for f in tables)


# --- Streams ------------------------------------------------------------------------------------


def token_of(v):
    """The token of a value, the number of its extra bits, and these."""
    if v < 64:
        return v, 0, 0
    e = v.bit_length() - 2
    return 64 + 2 * (e - 5) + (v >> e & 1), e, v % (1 << e)


def stream_of(tiles, count, start=LEAST):
    """States and words for tiles, which are lists of (frequencies, value). Inverts the decoder's operations, the last
    one first. `start` is the final state of the decoder, one for all or a list."""
    states, words = list(start) if isinstance(start, list) else [start] * count, []

    def ready(j, room):
        """State j, after writing a word if the operation would overflow it."""
        if states[j] >= room:
            words.append(states[j] % (1 << 16))
            states[j] >>= 16
        return states[j]

    steps = [coded[first:first + count] for coded in tiles for first in range(0, len(coded), count)]
    for step in reversed(steps):
        turns = [(frequencies, *token_of(v)) for frequencies, v in step]
        for done in reversed(range(0, max(e for _, _, e, _ in turns), 16)):
            for j, (_, _, e, extra) in reversed(list(enumerate(turns))):
                if size := max(min(e - done, 16), 0):
                    states[j] = ready(j, 1 << 32 - size) << size | (extra >> done) % (1 << size)
        for j, (frequencies, t, _, _) in reversed(list(enumerate(turns))):
            f = frequencies[t]
            x = ready(j, f << 20)
            states[j] = x // f * TOTAL + x % f + sum(frequencies[:t])
    return states, words[::-1]


# --- Payloads -----------------------------------------------------------------------------------


@dataclass
class Plan:
    maps: list  # one list of classes per activity
    first_context: int = 0
    activities: list = ()  # one per block, if there are several maps
    low_bits: int = 0
    center: int = 0
    states_log2: int = 0
    segments_log2: int = 0
    exceptions: tuple = ()  # positions of changes that become exceptions although the tables could code them


def packed(values, size):
    """Packs numbers of `size` bits, least significant bits first."""
    bits = 0
    for i, value in enumerate(values):
        bits |= value << i * size
    return bits.to_bytes(-(-len(values) * size // 8), "little")


class Payload:
    """The parts of a payload. An invalid vector changes some of them before `bytes`, or, in `edits`, a part's bytes."""

    def __init__(self, plan, tables, dtype, w, base, deltas):
        """`deltas` by position."""
        self.w, self.r, self.tables, self.edits = w, plan.low_bits, tables, {}
        self.maps, self.activities, self.low_bits = plan.maps, list(plan.activities), []
        self.exceptions = {}
        r, self.tiles = self.r, [[] for _ in range(0, len(base), TILE[w])]
        assert len(self.maps) in (1, 2, 4) and (len(self.maps) == 1 or len(self.activities) == -(-len(base) // BLOCK))
        for i, u in enumerate(base):
            delta = deltas.get(i, 0)
            c = self.class_of(plan, i, context_of(u, dtype, w))
            if i in plan.exceptions or (not c and delta >> r):
                self.exceptions[i] = delta
                delta = 0
            self.low_bits.append(delta % (1 << r))
            if c:
                v = delta >> r if r == 0 else (plan.center - (delta >> r)) % (1 << 8 * w - r)
                self.tiles[i // TILE[w]].append((c, v))
        self.header = {
            "low_bits": r, "states_log2": plan.states_log2, "segments_log2": plan.segments_log2,
            "activity_bits": len(self.maps).bit_length() - 1, "first_context": plan.first_context,
            "context_count": len(self.maps[0]), "reserved": 0, "exception_count": len(self.exceptions),
            "center": plan.center}
        self.code()

    def class_of(self, plan, i, context):
        a = self.activities[i // BLOCK] if self.activities else 0
        entry = max(context, plan.first_context) - plan.first_context
        return self.maps[a][entry] if entry < len(self.maps[a]) else 0

    def code(self, start=LEAST):
        """Makes the streams; call again after changing `tiles`."""
        tiles = [[(self.tables[c - 1], v) for c, v in tile] for tile in self.tiles]
        count, segments = len(tiles), 1 << self.header["segments_log2"]
        self.streams = [stream_of(tiles[s * count // segments:(s + 1) * count // segments],
                                  1 << self.header["states_log2"], start) for s in range(segments)]

    def parts(self):
        """The name of each part, and how to make its bytes from those of the parts before."""
        streams = [bytes_of(states, 4) + bytes_of(words, 2) for states, words in self.streams]
        return {
            "header": lambda before: struct.pack("<BBBBHBBII", *self.header.values()),
            "maps": lambda before: b"".join(packed(classes, 4) for classes in self.maps),
            "activities": lambda before: packed(self.activities, len(self.maps).bit_length() - 1),
            "exceptions": lambda before: (bytes_of(self.exceptions.keys(), 4)
                                          + bytes_of(self.exceptions.values(), self.w)),
            "low_bits": lambda before: packed(self.low_bits, self.r),
            "sizes": lambda before: bytes_of([len(stream) // 2 for stream in streams[:-1]], 4),
            "padding": lambda before: bytes(len(before) % 2),
            "streams": lambda before: b"".join(streams)}

    def bytes(self):
        out = b""
        for name, make in self.parts().items():
            out += self.edits.get(name, lambda part: part)(make(out))
        return self.edits.get("all", lambda data: data)(out)
