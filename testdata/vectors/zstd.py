"""Codec 1: zstd frames, by hand and by the library, and the layouts of their content. Also the payloads of codec 0."""

import zstandard

from .data import ELIAS, GAPS, M64, NIBBLE_GAPS, PLANES, bytes_of


def by_hand(content, *, size="content", single=True, window=None, dictionary=None, checksum=None, runs=False,
            block=1 << 17, magic=b"\x28\xb5\x2f\xfd", reserved_bit=0):
    """A frame of raw blocks (and of run blocks where `runs`), with every field of its header to choose."""
    stated = len(content) if size == "content" else size
    fcs = b"" if stated is None else next(
        (i, stated.to_bytes(n, "little")) for i, n, top in ((2, 4, 2**32), (3, 8, M64)) if stated < top)
    if stated is not None:
        if single and stated < 256:
            fcs = (0, bytes([stated]))
        elif 256 <= stated < 65792:
            fcs = (1, (stated - 256).to_bytes(2, "little"))
    flag, fcs = fcs if fcs else (0, b"")
    single = single and stated is not None and window is None
    descriptor = flag << 6 | single << 5 | reserved_bit << 3 | (checksum is not None) << 2 | (dictionary is not None) * 3
    out = magic + bytes([descriptor])
    if not single:
        out += bytes([window if window is not None else 10 - 2 << 3 if len(content) <= 4096 else 8 << 3])
    if dictionary is not None:
        out += dictionary.to_bytes(4, "little")
    out += fcs
    blocks, at = [], 0
    while at < len(content):
        run = at
        while runs and run < len(content) and content[run] == content[at]:
            run += 1
        if run - at >= 8:
            blocks.append((run - at, 1, content[at:at + 1]))
            at = run
        else:
            end = min(at + block, len(content))
            if runs:
                end = next((i for i in range(at, end) if len(content) - i >= 8 and
                            content[i:i + 8] == content[i:i + 1] * 8), end)
            blocks.append((end - at, 0, content[at:end]))
            at = end
    blocks = blocks or [(0, 0, b"")]
    for i, (length, kind, data) in enumerate(blocks):
        out += (length << 3 | kind << 1 | (i == len(blocks) - 1)).to_bytes(3, "little") + data
    return out + (checksum or b"")


def by_runs(content):
    return by_hand(content, runs=True)


class Library:
    """Frames made by the zstd library, or those that a committed vector already has for the same content."""

    def __init__(self):
        self.known = {}

    def harvest(self, data):
        at = data.find(b"\x28\xb5\x2f\xfd")
        while at >= 0:
            try:
                expander = zstandard.ZstdDecompressor().decompressobj()
                content = expander.decompress(data[at:])
                if expander.eof:
                    end = len(data) - len(expander.unused_data)
                    self.known.setdefault((content, data[at + 4] >> 2 & 1), data[at:end])
            except zstandard.ZstdError:
                pass
            at = data.find(b"\x28\xb5\x2f\xfd", at + 1)

    def __call__(self, content, checksum=False):
        return self.known.get((content, int(checksum))) or zstandard.ZstdCompressor(
            level=19, write_checksum=checksum).compress(content)


library = Library()


def with_checksum(content):
    return library(content, checksum=True)


def planes(values, w):
    data = bytes_of(values, w)
    return b"".join(data[row::w] for row in range(w))


def continued(gap):
    return b"\xff" * (gap // 255) + bytes([gap % 255])


def elias_bits(gap):
    x = gap + 1
    size = x.bit_length() - 1
    head = f"{size + 1:b}"
    return "0" * (len(head) - 1) + head + f"{x:b}"[1:]


def packed_bits(bits):
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i:i + 8], 2) for i in range(0, len(bits), 8))


def escapes(values, w):
    """Parts 2 and 3 of the nibble layouts."""
    return (bytes(min(v - 15, 255) for v in values if v >= 15)
            + planes([v - 270 for v in values if v >= 270], w))


def encode(layout, positions, deltas, w, count):
    """The content of a payload of codec `zstd`."""
    gaps = [p - q - 1 for p, q in zip(positions, [-1] + positions)]
    every = [0] * count
    for position, delta in zip(positions, deltas):
        every[position] = delta
    if layout == PLANES:
        body = planes(every, w)
    elif layout == GAPS:
        body = planes(deltas, w) + b"".join(map(continued, gaps))
    elif layout == ELIAS:
        body = planes(deltas, w) + packed_bits("".join(map(elias_bits, gaps)))
    elif layout == NIBBLE_GAPS:
        values = [delta - 1 for delta in deltas]
        body = (bytes(min(g, 15) | min(v, 15) << 4 for g, v in zip(gaps, values)) + escapes(values, w)
                + b"".join(continued(g - 15) for g in gaps if g >= 15))
    else:
        small = [min(z, 15) for z in every] + [0] * (-count % 64)
        tokens = bytes(small[b + j] | small[b + j + 32] << 4 for b in range(0, len(small), 64) for j in range(32))
        body = tokens + escapes(every, w)
    return bytes([layout]) + body


def raw_payload(positions, deltas, w):
    head = bytes_of(positions, 4)
    return head + bytes(-len(head) % w) + bytes_of(deltas, w)
