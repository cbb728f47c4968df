"""The valid vectors of version 1.0."""

import json
import struct
from math import prod

from .cases import zeros_but
from .data import (AS_BASE, DTYPES, ELIAS, GAPS, HEADER_OF_BASE, LAYOUTS, NIBBLE_GAPS, NIBBLE_PLANES, NONE, PLANES,
                   PREFIX, RAW, VERBATIM, ZSTD, bytes_of, lanes_of, moved, pattern)
from .pair import File, Model, Tensor, change, head_of, lone, safetensors
from .zstd import by_hand, by_runs, library, with_checksum


def valid_vectors(out):
    def one(name, about, tensors, base=None, files=True, **options):
        out.valid(name, about, Model(tensors, (lone(tensors) if files is True else files or []), **options), base)

    # The worked examples of section 5 of codecs.md.
    data = bytes_of(pattern(4096, 2, 1), 2)
    lanes = lanes_of(data, 2)
    for position, step in ((3, 1), (20, -1), (300, 200)):
        lanes[position] = moved(lanes[position], step, 2, True)
    base = out.base("valid/example", safetensors({"w": ("BF16", [4096], data)}))
    for name, codec, layout in [("raw", RAW, 0)] + [("zstd_" + name, ZSTD, i) for i, name in enumerate(LAYOUTS)]:
        one(f"{name}_example", "The worked example of codecs.md: lanes 3, 20 and 300 of 4,096 change by +1, -1 "
            "and +200 ULP.", [Tensor("w", "BF16", [4096], bytes_of(lanes, 2), data, codec=codec, layout=layout)],
            base, frame=by_hand)

    # Each dtype.
    shape, sources = [13, 8], {}
    for seed, (dtype, (_, bits, w)) in enumerate(DTYPES.items()):
        sources[dtype] = (dtype, shape, bytes_of(pattern(prod(shape) * bits // (8 * w), w, seed), w))
    base = out.base("valid/dtypes", safetensors(sources))
    for i, (dtype, (_, _, data)) in enumerate(sources.items()):
        if dtype == "BOOL":
            data = bytes(byte & 1 for byte in data)  # valid booleans, with their own base
            base_of_bool = out.base("valid/dtype_bool", safetensors({"BOOL": ("BOOL", shape, data)}))
        one(f"dtype_{dtype.lower()}", f"A tensor of {dtype}.",
            [Tensor(dtype, dtype, shape, change(data, dtype, [1, -1, 2, 3, -60], 5, 2) if dtype != "BOOL" else
                    bytes(b ^ (i % 5 == 2) for i, b in enumerate(data)), data, codec=ZSTD if i % 4 else RAW,
                    layout=i % 5)], base_of_bool if dtype == "BOOL" else base)

    # Each width of lanes with each codec and layout; the second chunk has one lane.
    sources = {f"w{8 * w}": (dtype, [4097], bytes_of(pattern(4097, w, w), w))
               for dtype, w in (("U8", 1), ("F16", 2), ("I32", 4), ("F64", 8))}
    base = out.base("valid/lanes", safetensors(sources))
    for name, (dtype, shape, data) in sources.items():
        top = 1 << DTYPES[dtype][1] - 1
        steps = [step for step in (1, -1, 2, -7, 8, 9, -100, 127, 134, 135, -135, 136, 30000, -2**30, 2**60)
                 if abs(step) < top]
        for codec, layout, label in [(RAW, 0, "raw")] + [(ZSTD, i, text) for i, text in enumerate(LAYOUTS)]:
            one(f"lanes_{name}_{label}", f"4,097 lanes of {name[1:]} bits, every seventh changed, {label}.",
                [Tensor(name, dtype, shape, change(data, dtype, steps, 7, 1), data, codec=codec, layout=layout)], base)
            dense = change(data, dtype, steps, 2, 0)
            if codec == ZSTD:
                one(f"lanes_{name}_{label}_dense", f"4,097 lanes of {name[1:]} bits, every second changed, {label}.",
                    [Tensor(name, dtype, shape, dense, data, codec=codec, layout=layout)], base)

    # Sizes at the boundaries of chunks, and of the words of sums.
    for count in (1, 2, 3, 63, 64, 65, 4093, 4094, 4095, 4096, 4097, 8191, 8192, 8193):
        one(f"size_{count}", f"{count} lanes of 8 bits in chunks of 4,096, the last lane changed.",
            [Tensor("t", "U8", [count], zeros_but(count, 1, {count // 2: 9, count - 1: 200}), kind=NONE,
                    layout=NIBBLE_PLANES)])
    data = bytes_of(pattern(12 * 4096 + 1, 1, 5), 1)
    base = out.base("valid/many_chunks", safetensors({"t": ("I8", [12 * 4096 + 1], data)}))
    one("many_chunks", "13 chunks with a different layout each, five of them without changes.",
        [Tensor("t", "I8", [12 * 4096 + 1], b"".join(
            data[i:i + 4096] if k in (0, 3, 4, 9, 11) else change(data[i:i + 4096], "I8", [1, -2, 17, -128], 101, 0)
            for k, i in enumerate(range(0, len(data), 4096))), data, layout=[k % 5 for k in range(13)])], base)
    count = 23 * 4096 + 5
    one("many_chunks_none", "24 chunks without a base, three of them changed.",
        [Tensor("t", "U8", [count], zeros_but(count, 1, {4096: 1, 50000: 2, count - 1: 3}), kind=NONE)])
    one("chunk_lanes_largest", "The largest chunks of each width of lanes, for tensors that fill little of them.",
        [Tensor(f"w{8 * w}", dtype, [600], zeros_but(600, w, {5: 1, 599: 2}), kind=NONE, log2=22 - w.bit_length() + 1,
                layout=GAPS) for dtype, w in (("U8", 1), ("U16", 2), ("U32", 4), ("U64", 8))])
    count = 150_001
    one("chunk_of_many_words", "One chunk of 150,001 bytes: its sum has 37 rows, and the content of its payload more "
        "than one zstd block.", [Tensor("t", "U8", [count], zeros_but(count, 1, {i: i % 251 + 1 for i in
                                                                                range(0, count, 1009)}),
                                        kind=NONE, log2=20, layout=PLANES)])

    # Escapes.
    def spaced(gaps):
        positions, at = [], -1
        for gap in gaps:
            at += gap + 1
            positions.append(at)
        return positions

    gaps = [0, 253, 254, 255, 256, 508, 509, 510, 511, 0]
    one("gaps_continued_bytes", "Gaps of 253 to 256 and 508 to 511, where continued bytes change their number.",
        [Tensor("t", "U16", [4096], zeros_but(4096, 2, dict.fromkeys(spaced(gaps), 3)), kind=NONE, layout=GAPS)])
    gaps = [13, 14, 15, 16, 268, 269, 270, 271, 524, 525, 526]
    one("nibble_gaps_gap_escapes", "Gaps of 13 to 16, 268 to 271 and 524 to 526, where the nibble escapes.",
        [Tensor("t", "U16", [4096], zeros_but(4096, 2, dict.fromkeys(spaced(gaps), 3)), kind=NONE,
                layout=NIBBLE_GAPS)])
    gaps = [0, 1, 2, 3, 4, 6, 7, 8, 14, 15, 16, 30, 31, 32, 62, 63, 64, 254, 255, 256, 510, 511, 512]
    one("elias_delta_gaps", "Gaps about the powers of two, where the lengths of the Elias code change.",
        [Tensor("t", "U16", [4096], zeros_but(4096, 2, dict.fromkeys(spaced(gaps), 3)), kind=NONE, layout=ELIAS)])
    one("elias_delta_longest", "The longest gap of a chunk, and of a large one: x = 4,096 and 2^20 + 1.",
        [Tensor("a", "U8", [4096], zeros_but(4096, 1, {4095: 1}), kind=NONE, layout=ELIAS),
         Tensor("b", "U8", [2**20 + 1], zeros_but(2**20 + 1, 1, {2**20: 1}), kind=NONE, layout=ELIAS, log2=21)],
        files=False)
    values = [13, 14, 15, 16, 17, 254, 255, 256, 268, 269, 270, 271, 272, 524, 525, 526, 65534, 65535]
    steps = {100 + 3 * i: (delta >> 1 if delta % 2 == 0 else -(delta + 1 >> 1)) % 65536
             for i, delta in enumerate(values)}
    for layout in (NIBBLE_GAPS, NIBBLE_PLANES):
        one(f"{LAYOUTS[layout]}_delta_escapes", "Deltas about 15 and 270, where the nibble and its byte escape.",
            [Tensor("t", "I16", [200], zeros_but(200, 2, steps), kind=NONE, layout=layout)])
    for codec, layout, label in [(RAW, 0, "raw")] + [(ZSTD, i, text) for i, text in enumerate(LAYOUTS)]:
        one(f"delta_largest_{label}", f"The largest delta, 2^w - 1, in lanes of each width, {label}.",
            [Tensor(f"w{8 * w}", dtype, [70], zeros_but(70, w, {0: 1 << 8 * w - 1, 64: 1 << 8 * w - 1}), kind=NONE,
                    codec=codec, layout=layout) for dtype, w in (("U8", 1), ("U16", 2), ("U32", 4), ("U64", 8))])
    one("delta_every_lane_w8", "All 255 deltas of lanes of 8 bits, each once, in every layout.",
        [Tensor(f"t{i}", "U8", [255], bytes(range(1, 256)), kind=NONE, layout=i) for i in range(5)])
    one("every_lane_changed", "All lanes of two chunks change, in every layout.",
        [Tensor(f"t{i}", "U16", [4160], bytes_of([i % 500 + 1 for i in range(4160)], 2), kind=NONE, layout=i)
         for i in range(5)])
    one("raw_padding", "Codec raw with lanes of 64 bits and an odd number of changes, so that padding is needed, "
        "and an even one.", [Tensor("even", "U64", [10], zeros_but(10, 8, {1: 5, 9: 6}), kind=NONE, codec=RAW),
                             Tensor("odd", "U64", [10], zeros_but(10, 8, {1: 5, 7: 2**63, 9: 6}), kind=NONE, codec=RAW)])

    # Bit patterns of floats that compare equal or unordered as values.
    specials = {
        "F16": [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFE00, 0x7FFF,
                0xFFFF, 0x3C00],
        "BF16": [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFC0,
                 0x7FFF, 0xFFFF, 0x3F80],
        "F32": [0, 2**31, 1, 2**31 + 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001,
                0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000],
        "F64": [0, 2**63, 1, 2**63 + 1, 2**52 - 1, 2**52, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000,
                0x7FF0000000000001, 0x7FF8000000000000, 0xFFF8000000000000, 2**63 - 1, 2**64 - 1, 0x3FF0000000000000]}
    grid = {dtype: [(a, b) for a in lanes for b in lanes] for dtype, lanes in specials.items()}
    base = out.base("valid/float_specials", safetensors(
        {dtype: (dtype, [15, 15], bytes_of([a for a, _ in pairs], DTYPES[dtype][2])) for dtype, pairs in grid.items()}))
    for i, (dtype, pairs) in enumerate(grid.items()):
        w = DTYPES[dtype][2]
        one(f"float_specials_{dtype.lower()}", f"{dtype} from and to each of zero, -0.0, subnormals, infinities, NaNs "
            "with payloads, and finite numbers.",
            [Tensor(dtype, dtype, [15, 15], bytes_of([b for _, b in pairs], w), bytes_of([a for a, _ in pairs], w),
                    codec=ZSTD if i else RAW, layout=i)], base)
    flips = bytes_of([lane ^ 0x8000 for lane in pattern(225, 2, 9)], 2)
    base = out.base("valid/sign_flips", safetensors({"t": ("BF16", [225], bytes_of(pattern(225, 2, 9), 2))}))
    one("sign_flips", "Every lane of a BF16 tensor changes its sign.",
        [Tensor("t", "BF16", [225], flips, bytes_of(pattern(225, 2, 9), 2), layout=PLANES)], base)

    # Bases.
    short, tall = bytes_of(pattern(3 * 700, 2, 3), 2), bytes_of(pattern(13 * 700, 2, 3), 2)
    base = out.base("valid/bases", safetensors({
        "a": ("I16", [3, 700], short), "b": ("I16", [13, 700], tall), "empty": ("I16", [0, 700], b""),
        "none_in_a_row": ("I16", [5, 0], b""), "nibbles": ("F4", [4, 6], bytes_of(pattern(12, 1, 2), 1))}))
    grown = change(short + bytes(10 * 1400), "I16", [1, -5], 61, 60)
    one("base_same", "Base kind same.", [Tensor("a", "I16", [3, 700], change(short, "I16", [1, -1]), short)], base)
    one("base_same_unchanged", "A tensor without any change: two records of zeros and no payload.",
        [Tensor("b", "I16", [13, 700], tall, tall)], base)
    one("base_none", "Base kind none, the lanes all changed from zero.",
        [Tensor("new", "I16", [40], bytes_of(range(1, 41), 2), kind=NONE)])
    one("base_none_of_zeros", "Base kind none and a target of zeros: no payload.",
        [Tensor("new", "I16", [4100], bytes(8200), kind=NONE)])
    one("base_none_ordered", "Base kind none for floats: deltas count from +0.0.",
        [Tensor("new", "BF16", [6], bytes_of([0x3F80, 0x0000, 0x8000, 0x0001, 0x8001, 0xFFFF], 2), kind=NONE,
                codec=RAW)])
    one("base_prefix_grown", "Base kind prefix, three rows grown to thirteen: a chunk is partly, two wholly beyond "
        "the base.", [Tensor("a", "I16", [13, 700], grown, short, PREFIX, rows=3)], base)
    one("base_prefix_shrunk", "Base kind prefix, thirteen rows shrunk to three; the base digest covers all thirteen.",
        [Tensor("b", "I16", [3, 700], change(tall[:4200], "I16", [1, -1]), tall, PREFIX, rows=13)], base)
    one("base_prefix_of_zero_rows", "Base kind prefix with a base without rows.",
        [Tensor("empty", "I16", [2, 700], change(bytes(2800), "I16", [4]), b"", PREFIX, rows=0)], base)
    one("base_prefix_to_zero_rows", "Base kind prefix to a target without rows: no chunks.",
        [Tensor("a", "I16", [0, 700], b"", short, PREFIX, rows=3)], base)
    one("base_prefix_without_lanes", "Base kind prefix between shapes that both have no elements.",
        [Tensor("none_in_a_row", "I16", [7, 0], b"", b"", PREFIX, rows=5)], base)
    nibbles = bytes_of(pattern(12, 1, 2), 1)
    one("base_prefix_packed", "Base kind prefix for F4: rows of half as many lanes as elements.",
        [Tensor("nibbles", "F4", [6, 6], change(nibbles + bytes(6), "F4", [3], 4), nibbles, PREFIX, rows=4)], base)
    one("base_renamed", "The base tensor has another name.",
        [Tensor("z", "I16", [3, 700], change(short, "I16", [1, -1]), short, base_name="a")], base)
    one("base_tied", "Two targets from the same base tensor, one by its own name.",
        [Tensor("a", "I16", [3, 700], change(short, "I16", [1, -1]), short),
         Tensor("z", "I16", [3, 700], change(short, "I16", [2, -2]), short, base_name="a")], base)
    one("base_crossed", "Two targets that each take the other's namesake as base, both of kind prefix.",
        [Tensor("a", "I16", [3, 700], change(tall[:4200], "I16", [7], 301), tall, PREFIX, rows=13, base_name="b"),
         Tensor("b", "I16", [13, 700], grown, short, PREFIX, rows=3, base_name="a")], base)

    # Shapes.
    one("shape_scalar", "Rank 0: a scalar.", [Tensor("s", "F32", [], struct.pack("<f", 1.5), kind=NONE)])
    one("shape_empty", "A dim of zero: an empty tensor without chunks, between two others.",
        [Tensor("a", "U8", [3], b"\1\2\3", kind=NONE), Tensor("b", "U8", [4, 0, 2], b"", kind=NONE),
         Tensor("c", "U8", [3], b"\1\2\3", kind=NONE)])
    one("shape_empty_huge", "A dim of zero beside dims whose product would not fit in any width.",
        [Tensor("t", "F64", [2**40, 2**63, 0, 2**64 - 1], b"", kind=NONE)], files=False)
    one("shape_rank_32", "The largest rank.", [Tensor("t", "U8", [1] * 31 + [3], b"\1\0\3", kind=NONE)])

    # Sections.
    many = [Tensor(f"model.layers.{i}.weight", "BF16", [4, 2], zeros_but(8, 2, {i % 8: 300 + i}), kind=NONE)
            for i in range(30)]
    one("sections_stored", "30 tensors, sections as they are.", many)
    one("sections_compressed", "30 tensors, the sections tensors and files compressed by zstd.", many,
        section_frame=library)
    one("sections_compressed_by_hand", "The same with frames of raw and run blocks.", many, section_frame=by_runs)
    one("sections_checksum", "The same with content checksums in the sections' frames.", many,
        section_frame=with_checksum)
    one("section_tensors_compressed", "Only the section tensors is compressed.", many, files=False,
        section_frame=library)

    # Frames of payloads.
    some = change(bytes(400), "U16", [1, 2, 3], 3)
    for name, about, frame in [
            ("content_checksum", "a content checksum", with_checksum),
            ("multi_block", "blocks of 41 bytes", lambda c: by_hand(c, block=41)),
            ("run_blocks", "raw and run blocks", by_runs),
            ("window_descriptor", "a window descriptor, not a single segment", lambda c: by_hand(c, single=False)),
            ("window_largest", "a window of 2^27 bytes", lambda c: by_hand(c, single=False, window=17 << 3)),
            ("content_size_8_bytes", "a content size in 8 bytes",
             lambda c: b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", len(c)) + by_hand(c, size=len(c))[len(
                 by_hand(c)) - len(c) - 3:]),
            ("empty_last_block", "an empty last block", lambda c: by_hand(c)[:-len(c) - 3] + (len(c) << 3).to_bytes(
                3, "little") + c + b"\1\0\0")]:
        one(f"frame_{name}", f"A payload's frame with {about}.",
            [Tensor("t", "U16", [200], some, kind=NONE, layout=PLANES)], frame=frame)
    one("frame_larger_than_content", "Stored sizes above expanded ones, the one allowed way round for payloads.",
        [Tensor("t", "U8", [2], b"\5\0", kind=NONE, layout=NIBBLE_GAPS)], frame=by_hand)

    # Names of tensors.
    def named(name, about, names):
        one(name, about, [Tensor(text, "U8", [2], bytes([i + 1, 0]), kind=NONE, codec=RAW)
                          for i, text in enumerate(names)])

    named("names_unicode", "Names of many scripts, and two that differ in normalisation only.",
          ["wéight", "we\u0301ight", "重み", "вес", "وزن", "🧠", "e\u200dx"])
    named("names_byte_order", "Names whose order as bytes is not that of UTF-16 or of a dictionary.",
          ["Z", "a", "a.10", "a.9", "a0", "é", "\uffee", "\U00010000", "~"])
    named("names_long", "Names of 4,096 bytes that differ in the last.", ["x" * 4095 + c for c in "ab"])
    named("names_escapes", "Names with control characters, which a reader must not print as they are.",
          ["\x1b[31mred", "a\nb", "tab\tquote\"back\\slash", "\x7f\u0085\u202e\u2028", " "])
    named("names_like_paths", "A name is a label: these are no paths.", ["../../secret", "/etc/hosts", "C:\\x", ".", ".."])

    # Versions and features.
    some = [Tensor("t", "U8", [5], b"\1\0\2\0\3", kind=NONE)]
    one("version_minor_7", "A higher minor version.", some, minor=7)
    one("optional_features", "Unknown optional feature bits.", some, optional=2**63 + 5)
    out.valid("empty_pair", "No tensors, no files: 352 bytes of index.", Model([]))
    one("empty_file", "No tensors, one file with an empty header.", [])

    # Files.
    rows = {f"layer.{i}": ("BF16", [6, 4], bytes_of(pattern(24, 2, i), 2)) for i in range(4)}
    targets = [Tensor(name, dtype, shape, change(data, dtype, [1, -1], 5), data)
               for name, (dtype, shape, data) in rows.items()]
    base = out.base("valid/file_lone", safetensors(rows))
    one("files_none", "file_count 0: tensors only.", targets, base, files=False)
    one("file_lone", "A lone file with its header stored.", targets, base)
    one("file_lone_header_of_base", "A lone file whose header is the base's.", targets, base,
        lone(targets, kind=HEADER_OF_BASE))
    one("file_lone_named", "A lone file with a name.", targets, base, lone(targets, "Model-1_x.y.safetensors"))
    shuffled = [targets[i] for i in (2, 0, 3, 1)]
    text = json.dumps({t.name: {"shape": t.shape, "data_offsets": [48 * i, 48 * i + 48], "dtype": t.dtype}
                       for i, t in reversed(list(enumerate(shuffled)))} | {"__metadata__": {"format": "pt", "é": "\n"}},
                      indent=1) + " \n  "
    one("file_header_untidy", "A header with spaces, metadata, keys in no order, and data in another order than the "
        "tensor table.", targets, base, [File(0, "", head_of(shuffled, text=text), [t.name for t in shuffled])])

    def sharded(group, **changed):
        """Two shards and their index, as targets; kinds by name in `changed`."""
        halves, files = (targets[:2], targets[2:]), []
        for i, half in enumerate(halves):
            name = f"model-0000{i + 1}-of-00002.safetensors"
            kind = changed.get("heads", 0)
            files.append(File(kind, name, head_of(half, {"format": group}), [t.name for t in half]))
        text = json.dumps({"metadata": {"group": group}, "weight_map": {
            t.name: files[i].name for i, half in enumerate(halves) for t in half}}, indent=2)
        files.append(File(changed.get("map", VERBATIM), "model.safetensors.index.json", text.encode()))
        return files

    def folder(files):
        """A base folder with the same headers and maps as `files`."""
        bases = {t.name: t.base for t in targets}
        return {f.name: f.content + b"".join(bases[name] for name in f.order) for f in files}

    base = out.base("valid/sharded", folder(sharded("one")))
    one("files_sharded", "Two shards and their index file, all stored.", targets, base, sharded("two"))
    one("files_sharded_map_of_base", "Two shards stored, and the base's index file.", targets, base,
        sharded("two")[:2] + sharded("one", map=AS_BASE)[2:])
    one("files_sharded_all_of_base", "Two shards with the base's headers, and the base's index file.", targets, base,
        sharded("one", heads=HEADER_OF_BASE, map=AS_BASE))
    one("files_resharded", "The base's two shards become one lone file.", targets, base, lone(targets))
    one("file_map_alone", "A verbatim index file beside one shard with all tensors, sections compressed.", targets,
        base, sorted(lone(targets, "model.safetensors") + sharded("one")[2:], key=lambda f: f.name),
        section_frame=library)
