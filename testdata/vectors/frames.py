"""Vectors of section 5.2: headers of zstd frames, in payloads and in sections."""

from .cases import zeros_but
from .data import NONE, PLANES, RAW, bytes_of
from .pair import Model, Tensor, change, lone
from .zstd import by_hand, by_runs


def with_dictionary(frame, size, dictionary=0):
    """The frame with a Dictionary_ID field of `size` bytes. The field follows the window descriptor."""
    single = frame[4] >> 5 & 1
    at = 5 + (1 - single)
    return frame[:4] + bytes([frame[4] | {1: 1, 2: 2, 4: 3}[size]]) + frame[5:at] + dictionary.to_bytes(size, "little") + frame[at:]


def window(log2, eighths):
    """The descriptor of a window of 2^log2 · (1 + eighths / 8) bytes."""
    return log2 - 10 << 3 | eighths


def run_of_zeros(size, count=1 << 17):
    """A frame of one segment with `size` zeros, in run blocks."""
    blocks = [count] * (size // count) + [size % count] * (size % count > 0)
    return b"\x28\xb5\x2f\xfd\xa0" + size.to_bytes(4, "little") + b"".join(
        (n << 3 | 2 | (i == len(blocks) - 1)).to_bytes(3, "little") + b"\0" for i, n in enumerate(blocks))


def frame_vectors(out):
    some = change(bytes(400), "U16", [1, 2, 3], 3)

    def payload(function):
        return Model([Tensor("t", "U16", [200], some, kind=NONE, layout=PLANES)], frame=function)

    def sections(function=by_runs):
        tensors = [Tensor(f"model.layers.{i}.weight", "BF16", [4, 2], zeros_but(8, 2, {i % 8: 300 + i}), kind=NONE, codec=RAW)
                   for i in range(3)] + [Tensor("z" * 300, "U8", [1], bytes_of([1], 1), kind=NONE, codec=RAW)]
        return Model(tensors, lone(tensors), section_frame=function)

    for size in (1, 2, 4):
        def named(content, runs=False, size=size):
            return with_dictionary(by_hand(content, runs=runs), size)

        out.valid(f"frame_dictionary_id_0_of_{size}", f"A payload's frame with a Dictionary_ID of 0 in {size} byte{'s' * (size > 1)}: no "
                  "dictionary.", payload(named))
        out.valid(f"sections_dictionary_id_0_of_{size}", "The same in the frames of sections.",
                  sections(lambda content, named=named: named(content, True)))
        out.invalid(f"payload_frame_dictionary_of_{size}", f"A payload: the frame names dictionary 5 in {size} byte{'s' * (size > 1)}.",
                    "payload.frame", "decode", payload(lambda content, size=size: with_dictionary(by_hand(content), size, 5)), tensor="t", chunk=0)
        out.invalid(f"section_frame_dictionary_of_{size}", "The same in the frame of the section tensors.", "section.frame", "open_index",
                    sections(), stored=lambda d, size=size: d.store.__setitem__(3, with_dictionary(d.store[3], size, 5)))
    for log2, eighths, label in ((10, 3, "small"), (26, 7, "large")):
        about = f"a window of 2^{log2} bytes and {eighths} eighths more"
        descriptor = window(log2, eighths)
        out.valid(f"frame_window_mantissa_{label}", f"A payload's frame with {about}.",
                  payload(lambda content, descriptor=descriptor: by_hand(content, window=descriptor)))
        out.valid(f"sections_window_mantissa_{label}", f"Frames of sections with {about}.",
                  sections(lambda content, descriptor=descriptor: by_hand(content, runs=True, window=descriptor)))
    above = window(27, 1)
    out.invalid("payload_frame_window_mantissa", "A payload: the window is 2^27 bytes and an eighth more.", "payload.frame", "decode",
                payload(lambda content: by_hand(content, window=above)), tensor="t", chunk=0)
    out.invalid("section_frame_window_mantissa", "The section tensors: the window is 2^27 bytes and an eighth more.", "section.frame",
                "open_index", sections(), stored=lambda d: d.store.__setitem__(3, by_hand(d.tensors_section, runs=True, window=above)))

    def large(draft):
        size = 2**27 + 1
        draft.expanded[3], draft.store[3] = size, run_of_zeros(size)

    out.invalid("section_frame_segment_above_window", "The section tensors: one segment of 2^27 + 1 bytes, which is its window too.",
                "section.frame", "open_index", sections(), stored=large)
