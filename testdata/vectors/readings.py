"""Vectors for passages of sections 5.2, 7.1 and 10 and of codecs.md that readers could understand in two ways. The pairs have the
form of version 1.0; version 1.2 is the first whose text decides these passages."""

import json
import struct

from .cases import flip
from .checkpoints import INDEX, entries_of, file_of, map_of, small
from .data import ELIAS, NONE, PLANES, bytes_of
from .pair import File, Model, Tensor, change, head_of, lone, safetensors
from .zstd import by_hand, packed_bits


def with_unused_bit(content, runs=False):
    """A frame with the Unused_bit of its descriptor set."""
    frame = by_hand(content, runs=runs)
    return frame[:4] + bytes([frame[4] | 0x10]) + frame[5:]


def reading_vectors(out):
    rows, tensors = small()
    shards = {"x.safetensors": safetensors({"a": rows["a"]}), "y.safetensors": safetensors({"b": rows["b"], "e": rows["e"]})}
    listed = {"a": "x.safetensors", "b": "y.safetensors", "e": "y.safetensors"}
    folder = shards | {INDEX: map_of(listed)}
    some = change(bytes(400), "U16", [1, 2, 3], 3)

    def model(files=None):
        return Model(tensors, lone(tensors) if files is None else files, frame=by_hand)

    def valid(name, about, base):
        out.valid(name, about, model(), out.base(f"valid/{name}", base))

    def invalid(name, about, base):
        out.invalid(name, about, "base.file", "decode", model(), out.base(f"invalid/{name}", base))

    # --- Frames ----------------------------------------------------------------------------------
    out.valid("frame_unused_bit", "A payload's frame with Unused_bit set, which a reader ignores.",
              Model([Tensor("t", "U16", [200], some, kind=NONE, layout=PLANES)], frame=with_unused_bit))
    long_name = [Tensor("z" * 300, "U8", [1], b"\1", kind=NONE)]
    out.valid("sections_unused_bit", "The same in the frames of sections.",
              Model(long_name, lone(long_name), frame=by_hand, section_frame=lambda content: with_unused_bit(content, True)))

    # --- Codes of Elias --------------------------------------------------------------------------
    def elias(name, about, rule, bits):
        count = bits.count("1") + 1
        target = bytes_of([1] * count + [0] * (64 - count), 1)
        content = bytes([ELIAS]) + bytes([2] * count) + packed_bits(bits)
        out.invalid(name, about, rule, "decode", Model([Tensor("t", "U8", [64], target, kind=NONE, layout=ELIAS)], frame=by_hand),
                    tensor="t", chunk=0, contents=lambda draft: draft.content.__setitem__(0, content))

    elias("payload_positions_elias_fifth_zero_last", "The fifth zero of a code is the last bit of the content.", "payload.positions",
          "11100000")
    elias("payload_size_elias_four_zeros", "The content ends after the fourth zero of a code.", "payload.size", "11110000")

    # --- A stored header -------------------------------------------------------------------------
    text, whole = head_of(tensors)[8:].rstrip(b" "), out.base("invalid/readings", safetensors(rows))
    for name, about, stated, stored in [
            ("byte_over", "A stored header is followed by a space that its length does not count.", len(text), text + b" "),
            ("byte_short", "A stored header whose length counts a byte more than there is.", len(text) + 1, text)]:
        out.invalid(f"file_tensors_header_{name}", about, "file.tensors", "apply",
                    model([File(0, "", struct.pack("<Q", stated) + stored)]), whole)

    # --- The files of a base ---------------------------------------------------------------------
    entries = {"": ("U8", [1], b"1"), "n\0": ("U8", [1], b"2"), "n" * 5000: ("U8", [1], b"3")}
    valid("base_file_any_names", "A base with tensors that the pair does not name. Their names are empty, have a NUL, and are longer "
          "than a tensor table allows.", file_of(json.dumps(entries_of(rows | entries)), b"".join(
              row[2] for row in (rows | entries).values())))
    valid("base_folder_unlisted_names", "Beside the shards that the shard index names, a safetensors file whose name has a space: it does "
          "not belong to the base.", folder | {"not listed.safetensors": shards["x.safetensors"]})
    valid("base_folder_of_folders", "Sub-folders whose names end like those of a safetensors file and of a shard index do not belong to "
          "the base.", shards | {"z.safetensors/notes.txt": b"x", INDEX + "/notes.txt": b"x"})
    map_text = json.dumps(listed)
    valid("base_folder_index_escaped_map", "A shard index whose weight_map is written with an escape, with other members of one name, and "
          "with lone surrogates in names and strings within other members.",
          shards | {INDEX: ('{"more": 1, "weight\\u005fmap": ' + map_text + ', "more": {"\\ud800": "\\udc00", "\\ud800": []}}').encode()})
    valid("base_folder_index_nested", "A shard index that is nested 100 deep: its root, and 99 arrays within.",
          shards | {INDEX: ('{"more": ' + "[" * 99 + "]" * 99 + ', "weight_map": ' + map_text + "}").encode()})
    invalid("base_folder_name", "A folder without a shard index, with a safetensors file whose name has a space.",
            {"x.safetensors": shards["x.safetensors"], "y y.safetensors": shards["y.safetensors"]})
    invalid("base_folder_index_name", "A folder whose shard index has a name with a space.",
            shards | {"m m.safetensors.index.json": map_of(listed)})
    invalid("base_folder_index_names_folder", "The shard index names a file in whose place there is a folder.",
            {"x.safetensors": shards["x.safetensors"], "y.safetensors/notes.txt": b"x", INDEX: map_of(listed)})
    invalid("base_folder_index_surrogate_member", "A shard index with a lone surrogate in the name of another member of its root.",
            shards | {INDEX: ('{"\\ud800": 1, "weight_map": ' + map_text + "}").encode()})
    invalid("base_folder_index_surrogate_tensor", "A weight_map with a lone surrogate in the name of a tensor.",
            shards | {INDEX: ('{"weight_map": ' + map_text[:-1] + ', "\\ud800": "x.safetensors"}}').encode()})

    # --- A wrong base ----------------------------------------------------------------------------
    a, b = tensors[:2]
    out.invalid("wrong_base_partly_applied", "The base tensor a is the target's, and b is neither the base's nor the target's: the "
                "pair is not already applied.", "chunk.base_sum", "decode", model(), out.base(
                    "invalid/wrong_base_partly_applied", safetensors(rows | {"a": ("F32", [5], a.target),
                                                                             "b": ("BF16", [3, 40], flip(7)(b.base))})),
                error="wrong_base", tensor="a", chunk=0)
