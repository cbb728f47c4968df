"""Shared code: refusals with their location, parts of byte strings, zstd frames."""

from contextlib import contextmanager

import zstandard

WINDOW_LIMIT = 2**27


class Refused(Exception):
    """The pair, or the supplied base, violates `rule`; `when`, `tensor` and `chunk` say where, if known."""

    def __init__(self, rule, detail=""):
        super().__init__(rule, detail)
        self.rule, self.detail = rule, detail
        self.when = self.tensor = self.chunk = None


def need(holds, rule, detail=""):
    if not holds:
        raise Refused(rule, detail)


@contextmanager
def at(**place):
    """Adds a location to refusals in the block: `when`, `tensor` (a name), `chunk` (index in the pair)."""
    try:
        yield
    except Refused as error:
        vars(error).update(place)
        raise


def align(x, a):
    return -(-x // a) * a


class Parts:
    """Consecutive parts of `content`. A part beyond the end violates `rule`."""

    def __init__(self, content, rule, start=0):
        self.content, self.rule, self.next = content, rule, start

    def take(self, size):
        start, self.next = self.next, self.next + size
        need(self.next <= len(self.content), self.rule, "too short")
        return self.content[start : self.next]

    def rest(self):
        return self.take(len(self.content) - self.next)

    def finish(self):
        need(self.next == len(self.content), self.rule, "left over")


def expand(frame, size, rule):
    """The content of the one standard zstd frame that fills `frame` and states `size`."""
    try:
        need(frame[:4] == b"\x28\xb5\x2f\xfd", rule, "no standard frame")
        header = zstandard.get_frame_parameters(frame)
        need(header.content_size == size, rule, "content size")
        need(header.dict_id == 0, rule, "dictionary")
        need(header.window_size <= WINDOW_LIMIT, rule, "window")
        # The library stops at the end of the frame, so walk its blocks to know where that is.
        parts, last = Parts(frame, rule, zstandard.frame_header_size(frame)), 0
        while not last:
            block = int.from_bytes(parts.take(3), "little")
            last, kind, block_size = block & 1, block >> 1 & 3, block >> 3
            parts.take(1 if kind == 1 else block_size)  # kind 1 is one byte, repeated
        parts.take(4 * header.has_checksum)
        parts.finish()
        content = zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT).decompress(frame)
    except zstandard.ZstdError as error:
        raise Refused(rule, str(error)) from None
    need(len(content) == size, rule)
    return content
