"""The invalid vectors of the feature `parts` of version 1.2."""

import json

from blake3 import blake3

from .cases import flip, put, replace
from .conditioned import Plan
from .data import CONDITIONED, DTYPES, M64, NONE, PREFIX, RAW, bytes_of
from .pair import File, Tensor, change, head_of, lone, safetensors
from .parts import ALL, along, cut, grid, model, parts
from .valid_conditioned import FEW, stepped, varied
from .valid_parts import lanes_for


def invalid_part_vectors(out):
    # Most vectors change one thing in this pair: a whole tensor a, then t in three parts of two rows each, then a whole tensor u.
    # Entries and records: a 0; t 1, 2 and 3; u 4.
    shape, data = [6, 4], lanes_for("BF16", [6, 4])
    moved = change(data, "BF16", [1, -1, 2], 3)
    rows = {"a": ("BF16", [2], data[:4]), "t": ("BF16", shape, data), "u": ("BF16", [2], data[:4])}
    base = out.base("invalid/parts", safetensors(rows))

    def tensors(rectangles=None, each=None, name="t", **options):
        return [Tensor("a", "BF16", [2], moved[4:8], data[:4], codec=RAW)] + parts(
            name, "BF16", shape, moved, data, rectangles or along(0, shape, [2, 2, 2]), each, **{"codec": RAW} | options) + [
            Tensor("u", "BF16", [2], moved[4:8], data[:4], codec=RAW)]

    def bad(name, about, rule, when="open_index", *, where="t", chunk=None, entries=None, files=(), over=base, error=None,
        features=ALL, **edits):
        return out.invalid(f"parts_{name}", about, rule, when, model(entries or tensors(), files, features=features), over,
            tensor=where,
                           chunk=chunk, error=error, **edits)

    # Bits without those that they need. The pairs have parts.
    for name, about, features in (("parts_alone", "Bit 2 without the others.", 4), ("parts_without_list",
        "Bits 0 and 2 without bit 1.", 5),
                                  ("parts_without_digests", "Bits 1 and 2 without bit 0.", 6)):
        bad(f"features_{name}", about, "header.required_features", where=None, features=features)

    # The field `part`.
    def field(name, about, i, value):
        out.invalid(f"parts_field_{name}", about, "tensor.part", "open_index", model(tensors()), base, entries=put("entry", i,
            part=value))

    field("3", "Field part is 3.", 2, 3)
    field("255", "Field part is 255.", 2, 255)
    field("3_of_last", "Field part of the last entry is 3.", 4, 3)
    field("further_first", "The first entry describes a further part.", 0, 2)
    field("further_after_whole", "A further part follows a whole tensor.", 1, 2)
    bad("field_without_feature", "Field part without feature parts: a reserved byte.", "tensor.reserved", where="a",
        over=base, features=3, entries=[Tensor("a", "BF16", [2], data[:4], data[:4], codec=RAW)], tensors=lambda d: setattr(
            d, "tensors_section", flip(17)(d.tensors_section)))
    for place, value in ((18, b"\1\0"), (19, b"\0\x80")):
        out.invalid(f"parts_reserved_{place}", f"The reserved byte at {place} is not zero.", "tensor.reserved", "open_index",
            model(tensors()), base,
                    tensor="t", entries=put("entry", 2, reserved=value))

    # Rectangles. The dims of t are [6, 4]; those of an entry are edited as numbers.
    def rectangle(name, about, i, dims, rule="tensor.part"):
        """Other origins and extents of entry `i`; the part keeps its bytes."""
        def edit(d):
            d.dims[i][-4:] = dims
        out.invalid(f"parts_{name}", about, rule, "open_index", model(tensors()), base, tensor="t", entries=edit)

    rectangle("extent_0", "An extent of zero.", 1, [0, 0, 0, 4])
    rectangle("extent_0_of_last_dim", "An extent of zero in the last dim, of a further part.", 2, [2, 0, 2, 0])
    rectangle("extent_0_at_the_end", "A part of no rows after the last one.", 3, [6, 0, 0, 4])
    rectangle("beyond", "Rows from 5 on, two of six.", 3, [5, 0, 2, 4])
    rectangle("beyond_by_origin", "Rows from 6 on, one of six.", 3, [6, 0, 1, 4])
    rectangle("beyond_in_last_dim", "Five columns of four.", 3, [4, 0, 2, 5])
    rectangle("beyond_in_last_dim_by_origin", "Four columns of four from the second on.", 3, [4, 1, 2, 4])
    rectangle("origin_wraps", "The origin 2^64 - 1 and an extent of 2: in 64 bits their sum is 1.", 1, [M64 - 1, 0, 2, 4])
    rectangle("origin_wraps_to_zero", "The origin 2^64 - 2 and an extent of 2: in 64 bits their sum is 0.", 1, [M64 - 2, 0, 2, 4])
    rectangle("extent_wraps", "The origin 2 and an extent of 2^64 - 1: in 64 bits their sum is 1.", 2, [2, 0, M64 - 1, 4])
    rectangle("extent_wraps_in_last_dim", "The origin 1 and an extent of 2^64 - 1, of columns.", 2, [2, 1, 2, M64 - 1])
    rectangle("halves_wrap", "Origin and extent are both 2^63: in 64 bits their sum is 0.", 1, [2**63, 0, 2**63, 4])
    rectangle("extent_largest", "An extent of 2^64 - 1 from 0 on.", 1, [0, 0, M64 - 1, 4])
    rectangle("sum_signed", "Origin and extent whose sum is negative as a signed number.", 1, [2**62, 0, 2**62, 4])

    def alone(name, about, rule, entries, where="t", **options):
        bad(name, about, rule, entries=entries, where=where, over=None, **options)

    def new(dtype, dims, origin, extent, target=None, part=1, **options):
        bits, w = DTYPES[dtype][1:]
        lanes = 1
        for n in extent:
            lanes *= n
        size = -(-lanes * bits // 8) if target is None else 0
        return Tensor("t", dtype, dims, target if target is not None else bytes(range(1, size + 1)), kind=NONE, codec=RAW,
            part=part, origin=origin,
                      extent=extent, **options)

    alone("whole", "A part that is the whole tensor.", "tensor.part", [new("U8", [2, 3], [0, 0], [2, 3])])
    alone("whole_of_one_element", "A part that is the one element of its tensor.", "tensor.part", [new("U8", [1], [0], [1])])
    alone("whole_after_part", "A further part that is the whole tensor.", "tensor.part",
          [new("U8", [2, 3], [0, 0], [1, 3]), new("U8", [2, 3], [0, 0], [2, 3], part=2)])
    alone("of_scalar", "A part of a scalar.", "tensor.rank", [new("U8", [], [], [], b"\1")])
    alone("of_empty_tensor", "A part without elements, of a tensor that has none.", "tensor.part", [new("U8", [0, 3], [0, 0], [0,
        2], b"")])
    alone("of_empty_tensor_with_elements", "A part with elements, of a tensor that has none.", "tensor.part",
          [new("U8", [0, 3], [0, 0], [1, 3], b"\1\2\3")])
    alone("rank_0_further", "A further part of rank 0.", "tensor.rank",
          [new("U8", [4], [0], [2]), Tensor("t", "U8", [], b"\1", kind=NONE, codec=RAW, part=2)])
    alone("rank_33", "A part of rank 33.", "tensor.rank", [new("U8", [1] * 32 + [2], [0] * 33, [1] * 33, b"\1")])
    alone("rank_differs", "A further part of another rank.", "tensor.rank",
          [new("U8", [4], [0], [2]), new("U8", [4, 1], [2, 0], [2, 1], part=2)])
    alone("rank_differs_lower", "A further part of a lower rank.", "tensor.rank",
          [new("U8", [4, 2], [0, 0], [2, 2]), new("U8", [8], [4], [4], part=2)])
    alone("dtype_differs", "A further part of another dtype with the same lanes.", "tensor.dtype",
          [new("BF16", [4], [0], [2]), new("F16", [4], [2], [2], part=2)])
    alone("dtype_differs_in_width", "A further part of another dtype with other lanes.", "tensor.dtype",
          [new("BF16", [4], [0], [2]), new("F32", [4], [2], [2], part=2)])
    alone("dtype_unknown", "A further part of a dtype that has no code.", "tensor.dtype",
          [new("BF16", [4], [0], [2]), new("BF16", [4], [2], [2], part=2)], tensors=lambda d: setattr(
              d, "tensors_section", d.tensors_section[:48] + b"\x33" + d.tensors_section[49:]))
    alone("dtype_unknown_of_both", "Both parts of a dtype that has no code.", "tensor.dtype",
          [new("BF16", [4], [0], [2]), new("BF16", [4], [2], [2], part=2)], tensors=lambda d: setattr(
              d, "tensors_section", d.tensors_section[:8] + b"\x33" + d.tensors_section[9:48] + b"\x33" + d.tensors_section[49:]))

    # Parts of packed dtypes, cut within a byte.
    def packed(name, about, dtype, dims, origin, extent):
        alone(f"packed_{name}", about, "tensor.part", [new(dtype, dims, origin, extent)])

    packed("columns_odd", "F4, columns from 1 on.", "F4", [4, 6], [0, 1], [4, 3])
    packed("columns_odd_even_extent", "F4, two columns from 1 on: whole bytes in number, but not in place.", "F4", [4, 6], [0, 1],
        [4, 2])
    packed("columns_odd_extent", "F4, three columns from 0 on.", "F4", [4, 6], [0, 0], [4, 3])
    packed("row_length", "F4 in rows of three elements, two columns: rows begin within bytes.", "F4", [4, 3], [0, 0], [4, 2])
    packed("rows_odd", "F4 in rows of three elements, two rows from 1 on.", "F4", [6, 3], [1, 0], [2, 3])
    packed("rows_odd_extent", "F4 in rows of three elements, one row.", "F4", [6, 3], [0, 0], [1, 3])
    packed("rank_1", "F4, three elements of eight.", "F4", [8], [0], [3])
    packed("one_element", "F4, one element.", "F4", [2, 2], [0, 0], [1, 1])
    packed("f6_pairs", "F6_E2M3, two columns: 12 bits.", "F6_E2M3", [4, 8], [0, 0], [4, 2])
    packed("f6_origin", "F6_E2M3, four columns from 2 on.", "F6_E2M3", [4, 8], [0, 2], [4, 4])
    packed("f6_middle", "F6_E3M2 with a trailing dim of two, one of four in the middle.", "F6_E3M2", [2, 4, 2], [0, 1, 0], [2, 1,
        2])
    packed("last_cut_only", "F4, rows cut in whole bytes, and columns within a byte.", "F4", [4, 4], [2, 1], [2, 1])

    # The shape of the tensor.
    alone("shape_2_63_bits", "A part of four bytes of a tensor of 2^60 bytes.", "tensor.shape", [new("U8", [2**60], [0], [4])])
    alone("shape_wraps", "A part of a tensor whose number of elements is 0 in 64 bits.", "tensor.shape", [new("U8", [2**32,
        2**32], [0, 0], [2, 2])])
    alone("shape_bits_wrap", "A part of a tensor whose elements fit in 64 bits, but not its bits.", "tensor.shape",
          [new("F64", [2**58], [0], [1])])
    alone("shape_packed", "A part of a tensor of nine elements of F4.", "tensor.shape", [new("F4", [9], [0], [2])])

    # Names and sizes of the section.
    def named(name, about, rule, i, function, where="t"):
        def edit(d):
            function(d.entry[i], d.names, i)
        out.invalid(f"parts_{name}", about, rule, "open_index", model(tensors()), base, tensor=where, entries=edit)

    named("name_of_further", "A further part with the name of its tensor.", "tensor.name", 2, lambda e, names, i: (
        e.update(name_size=1), names.__setitem__(i, b"t")))
    named("name_of_last", "The last part with another name.", "tensor.name", 3, lambda e, names, i: (
        e.update(name_size=2), names.__setitem__(i, b"tt")))
    named("base_name_of_further", "A further part with a base name.", "tensor.base_name", 2, lambda e, names, i: (
        e.update(base_name_size=1), names.__setitem__(i, b"a")))
    named("name_empty", "A first part without a name.", "tensor.name", 1, lambda e, names, i: (
        e.update(name_size=0), names.__setitem__(i, b"")), None)
    named("name_long", "A first part with a name of 4,097 bytes.", "tensor.name", 1, lambda e, names, i: (
        e.update(name_size=4097), names.__setitem__(i, b"t" * 4097)), None)
    named("base_name_equal", "A base name that equals the name.", "tensor.base_name", 1, lambda e, names, i: (
        e.update(base_name_size=1), names.__setitem__(i, b"tt")))
    named("base_name_not_utf8", "A base name that is not UTF-8.", "tensor.base_name", 1, lambda e, names, i: (
        e.update(base_name_size=1), names.__setitem__(i, b"t\xff")))
    named("name_order", "The name of a tensor with parts is below the one before.", "tensor.name_order", 1, lambda e, names,
        i: names.__setitem__(
        i, b"A"), "A")
    named("name_order_after_parts", "The name after a tensor with parts is below it.", "tensor.name_order", 4, lambda e, names,
        i: names.__setitem__(
        i, b"b"), "b")
    named("name_twice_after_parts", "A whole tensor with the name of the parts before it.", "tensor.name_order", 4,
          lambda e, names, i: names.__setitem__(i, b"t"))
    twice = [part for i in range(2) for part in [Tensor("t", "U8", [4], bytes([1, 2]), kind=NONE, codec=RAW, part=1,
        origin=[2 * i], extent=[2])]]
    alone("first_twice", "Two parts of one tensor, both as its first.", "tensor.name_order", twice)
    alone("first_after_whole", "A first part with the name of the whole tensor before it.", "tensor.name_order",
          [Tensor("t", "U8", [4], b"\1\2\3\4", kind=NONE, codec=RAW), new("U8", [4], [0], [2])])

    def section(name, about, rule, function, where=None):
        out.invalid(f"parts_section_{name}", about, rule, "open_index", model(tensors()), base, tensor=where,
            tensors=replace("tensors_section", function))

    section("byte_over", "A byte follows the names.", "tensors.size", lambda s: s + b"\0")
    section("byte_short", "The last name is cut off.", "tensors.size", lambda s: s[:-1])
    section("rank_65535", "A first part whose 3 x 65,535 dims reach beyond the section.", "tensors.size",
            lambda s: s[:50] + b"\xff\xff" + s[52:])
    out.invalid("parts_section_without_extents", "The dims of a first part are its shape and its origin.", "tensors.size",
        "open_index",
                model([new("U8", [4], [0], [2])]), None, tensors=replace("tensors_section", lambda s: s[:56] + s[64:]))
    out.invalid("parts_section_shape_alone", "The dims of a first part are its shape.", "tensors.size", "open_index",
                model([new("U8", [4], [0], [2])]), None, tensors=replace("tensors_section", lambda s: s[:48] + s[64:]))
    out.invalid("parts_section_further_without_extents", "The dims of a further part are its origin.", "tensors.size",
        "open_index",
                model([new("U8", [4], [0], [2]), new("U8", [4], [2], [2], part=2)]), None,
                tensors=replace("tensors_section", lambda s: s[:-9] + s[-1:]))

    # Order.
    def order(name, about, rectangles, dims=shape):
        entries = [new("U8", dims, list(origin), list(extent), part=2 if i else 1) for i, (origin,
            extent) in enumerate(rectangles)]
        alone(f"order_{name}", about, "tensor.part_order", entries)

    upper, lower = along(0, [8, 8], [4, 4])
    square = [8, 8]
    order("twice", "One part twice.", [upper, upper], square)
    order("twice_later", "The last of three parts is that before it again.", [*grid(square, [[4], [4]])[:2], *grid(square, [[4],
        [4]])[1:2]], square)
    order("rows_falling", "Rows from below.", [lower, upper], square)
    order("columns_falling", "Columns from the right.", [([0, 4], [8, 4]), ([0, 0], [8, 4])], square)
    order("by_columns", "A grid in the order of columns.", [grid(square, [[4], [4]])[i] for i in (0, 2, 1, 3)], square)
    order("one_row_shared", "Rows 0 to 5 and 4 to 8.", [([0, 0], [5, 8]), ([4, 0], [4, 8])], square)
    order("one_column_shared", "Columns 0 to 5 and 4 to 8.", [([0, 0], [8, 5]), ([0, 4], [8, 4])], square)
    order("one_element_shared", "Two parts with one element in common.", [([0, 0], [4, 4]), ([3, 3], [4, 4])], square)
    order("contained", "A part within the one before.", [upper, ([1, 1], [2, 2])], square)
    order("containing", "A part around the one before, of the same origin.", [([0, 0], [2, 8]), ([0, 0], [4, 8])], square)
    order("same_origin_other_columns", "Two parts of one origin, the second of more columns.", [([0, 0], [4, 2]), ([0, 0], [4,
        6])], square)
    order("shared_by_third", "The third part has a row of the first.", [([0, 0], [2, 8]), ([2, 0], [2, 8]), ([1, 0], [1, 8])],
        square)
    order("not_nested", "Disjoint parts: the second is beside the first and as high as two.", [([0, 0], [4, 4]), ([0, 4], [8,
        4])], square)
    order("not_nested_below", "Disjoint parts: a column of the whole height, and a lower part beside it.", [([0, 0], [8, 4]), ([4,
        4], [4, 4])],
          square)
    order("not_nested_staggered", "Disjoint parts in columns with rows that overlap in part.", [([0, 0], [4, 4]), ([2, 4], [4,
        4])], square)
    order("not_nested_pinwheel", "Four parts around a fifth, which no cut separates.", [
        ([0, 0], [1, 2]), ([0, 2], [2, 1]), ([1, 0], [2, 1]), ([1, 1], [1, 1]), ([2, 1], [1, 2])], [3, 3])
    order("not_nested_middle",
        "Disjoint parts in three dims: they differ in the middle one's extent and in the last one's place.",
          [([0, 0, 0], [2, 1, 2]), ([0, 0, 2], [2, 2, 2])], [2, 2, 4])
    order("first_dim_falls", "The second part is further right and further up.", [([4, 0], [4, 4]), ([0, 4], [4, 4])], square)
    order("last_dim_falls", "In three dims, only the last one falls.", [([0, 0, 2], [2, 2, 2]), ([0, 0, 0], [2, 2, 2])], [2, 2,
        4])
    far = 2**59
    order("far", "Rows that share one at 2^58.", [([0], [2]), ([far // 2], [4]), ([far // 2 + 3], [2])], [far])

    # Base kinds and base names.
    def entry(name, about, rule, i, **fields):
        out.invalid(f"parts_{name}", about, rule, "open_index", model(tensors()), base, tensor="t", entries=put("entry", i,
            **fields))

    entry("prefix", "Base kind prefix for a first part.", "tensor.base_kind", 1, base_kind=PREFIX, base_param=5)
    entry("prefix_further", "Base kind prefix for a further part.", "tensor.base_kind", 3, base_kind=PREFIX, base_param=5)
    for label, about, count in (("alone", "The only part of a tensor", 1), ("all", "All parts of a tensor", 2)):
        of_t = parts("t", "BF16", shape, moved, data, along(0, shape, [3, 3])[:count], codec=RAW)
        out.invalid(f"parts_prefix_{label}", f"{about}: base kind prefix.", "tensor.base_kind", "open_index", model(of_t), base,
            tensor="t",
            entries=lambda d, count=count: [put("entry", i, base_kind=PREFIX, base_param=5)(d) for i in range(count)])
    entry("base_kind_3", "Base kind 3, which is reserved, for a part.", "tensor.base_kind", 2, base_kind=3)
    entry("base_kind_private", "A private base kind for a part.", "tensor.base_kind", 2, base_kind=0x8000)
    entry("base_param", "A parameter for base kind same of a part.", "tensor.base_param", 2, base_param=1)
    entry("base_param_rows", "The rows of the tensor as parameter of a part.", "tensor.base_param", 1, base_param=6)
    halves = along(0, shape, [3, 3])
    none = {"codec": RAW, "kind": NONE}
    bad("base_name_unused", "A base name, and all parts have base kind none.", "tensor.base_name",
        entries=parts("t", "BF16", shape, moved, None, halves, base_name="x", **none))
    bad("base_name_unused_of_one", "A base name, and the only part has base kind none.", "tensor.base_name",
        entries=parts("t", "BF16", shape, moved, None, halves[:1], base_name="x", **none))
    bad("base_name_unused_among", "The same before another tensor.", "tensor.base_name", entries=parts(
        "t", "BF16", shape, moved, None, halves, base_name="x", **none) + [Tensor("u", "BF16", [2], data[:4], kind=NONE)])
    bad("base_name_unused_before_parts", "The same before another tensor with parts, which have a base.", "tensor.base_name",
        entries=parts(
        "s", "BF16", shape, moved, None, halves, base_name="x", **none) + parts("t", "BF16", shape, moved, data, halves,
        codec=RAW), where="s")

    # Chunks and records.
    entry("chunk_lanes", "Chunks of 2^11 lanes in a further part.", "tensor.chunk_lanes", 2, chunk_lanes_log2=11)
    entry("codec", "A private codec of a further part.", "tensor.codec", 2, codec=0x8001)
    entry("first_chunk", "The first chunk of a further part is that of its tensor.", "tensor.first_chunk", 2, first_chunk=1)
    entry("first_chunk_of_part", "The first chunk of a further part counts from its tensor's.", "tensor.first_chunk", 3,
        first_chunk=2)
    tall = [90, 100]
    wide_data = lanes_for("U8", tall)
    wide = parts("t", "U8", tall, change(wide_data, "U8", [1], 2999), wide_data, along(0, tall, [45, 45]), codec=RAW)
    wide_base = out.base("invalid/parts_wide", safetensors({"t": ("U8", tall, wide_data)}))

    def of_wide(name, about, rule, where="t", chunk=None, when="open_index", **edits):
        out.invalid(f"parts_{name}", about, rule, when, model(wide), wide_base, tensor=where, chunk=chunk, **edits)

    spare = {"compressed_size": 0, "uncompressed_size": 0, "num_deltas": 0, "crc32": 0, "output_offset": 8192}

    def as_whole(d):  # three chunks, as many as the 9,000 lanes of the tensor have
        d.record.insert(2, {"blob_offset": d.record[2]["blob_offset"], **spare})
        d.sums.insert(2, {"base_sum": 0, "target_sum": 0})
        d.payload.insert(2, b"")

    of_wide("chunk_count_of_tensor", "A part with as many chunks as its tensor would have.", "tensor.chunk_count",
        records=as_whole,
            entries=lambda d: (d.entry[0].update(chunk_count=3), d.entry[1].update(first_chunk=3)))
    of_wide("chunk_count_less", "A further part with a chunk less than its lanes need.", "tensor.chunk_count",
            records=lambda d: (d.record.pop(), d.sums.pop(), d.payload.pop()), entries=put("entry", 1, chunk_count=1))
    of_wide("output_offset_of_tensor", "Chunks of a further part count on from the part before.", "record.output_offset", chunk=2,
            records=lambda d: [d.record[i].update(output_offset=d.record[i]["output_offset"] + 4500) for i in (2, 3)])
    of_wide("output_offset_in_tensor", "A chunk of a further part has its place in the tensor as its offset.",
        "record.output_offset", chunk=3,
            records=put("record", 3, output_offset=4500 + 4096))
    of_wide("num_deltas", "More changes than the last chunk of a part has lanes, fewer than a chunk of the tensor would have.",
            "record.num_deltas", chunk=1, records=put("record", 1, num_deltas=405))
    out.invalid("parts_record_sizes", "A part of codec raw with an expanded size that differs.", "record.sizes", "open_index",
        model(tensors()), base,
                tensor="t", chunk=2, records=put("record", 2, uncompressed_size=1))
    mixed = tensors(each={1: {"kind": NONE}})
    bad("record_sums_none", "A base sum for a part of base kind none, beside one of kind same.", "record.sums", chunk=2,
        entries=mixed,
        records=put("sums", 2, base_sum=1))
    bad("digest_none", "A base digest for a part of base kind none, beside one of kind same.", "digest.none", entries=mixed,
        records=lambda d: d.digests[2].update(base_digest=d.digests[1]["base_digest"]))
    bad("record_sums_unchanged", "Two different sums for a part without changes.", "record.sums", chunk=1,
        entries=parts("t", "BF16", shape, data, data, halves, codec=RAW), records=put("sums", 1, target_sum=1))
    bad("payload_digest_zero", "An entry of zeros for the payload of a further part.", "payload.digest", chunk=2, listed=replace(
        "payload_list", lambda e: e[:2] + [bytes(16)] + e[3:]))
    bad("payload_digest", "The entry of the payload of a further part differs.", "payload.digest", "decode", chunk=2,
        listed=replace(
        "payload_list", lambda e: e[:2] + [flip(5)(e[2])] + e[3:]))
    bad("payload_digests_swapped", "The entries of two parts have changed places.", "payload.digest", "decode", chunk=1,
        listed=replace(
        "payload_list", lambda e: [e[0], e[2], e[1], *e[3:]]))

    # Tables.
    lanes = varied("BF16", 240, 100)
    before, after = bytes_of(lanes, 2), bytes_of(stepped("BF16", lanes), 2)
    plan = Plan([[1 + i % 3 for i in range(64)]], 100, states_log2=3)

    def coded(name, about, tables, shown=FEW):
        entries = parts("t", "BF16", [10, 24], after, before, along(0, [10, 24], [5, 5]), {0: {"tables": FEW},
            1: {"tables": shown}},
                        codec=CONDITIONED, plan=plan)
        out.invalid(
            f"parts_{name}", about, "tensor.tables", "open_index", model(entries), None, tensor="t", entries=lambda d: (
                d.tables.__setitem__(slice(0, 2), tables(d.tables)), [e.update(tables_size=len(t)) for e, t in zip(d.entry,
                d.tables)]))

    coded("tables_of_later_part", "The first part refers to the set of the second.", lambda t: [b"\1\0", t[1]])
    coded("tables_by_entry", "The second part refers to the set of the second owner: it counts itself.", lambda t: [t[0],
        b"\2\0"])
    out.invalid(
        "parts_tables_of_raw", "A further part of codec raw has tables.", "tensor.tables_size", "open_index", model(parts(
            "t", "BF16", [10, 24], after, before, along(0, [10, 24], [5, 5]), {0: {"tables": FEW, "codec": CONDITIONED,
            "plan": plan}}, codec=RAW)),
        None, tensor="t", entries=lambda d: (d.tables.__setitem__(1, b"\1\0"), d.entry[1].update(tables_size=2)))

    # The base.
    def rebased(name, about, rule, value, when="decode", chunk=None, error=None, **options):
        rows_ = {k: v for k, v in (rows | {"t": value}).items() if v}
        path = out.base(f"invalid/parts_{name}", safetensors(rows_))
        bad(name, about, rule, when, over=path, chunk=chunk, error=error, **options)

    rebased("base_missing", "The base has no tensor t.", "base.tensor", None)
    rebased("base_dtype", "The base's t is F16.", "base.tensor", ("F16", shape, data))
    rebased("base_of_part", "The base's t has the shape of a part.", "base.tensor", ("BF16", [2, 4], data[:16]))
    rebased("base_transposed", "The base's t is [4, 6].", "base.tensor", ("BF16", [4, 6], data))
    rebased("base_flat", "The base's t has one dim.", "base.tensor", ("BF16", [24], data))
    rebased("base_more_rows", "The base's t has a row more.", "base.tensor", ("BF16", [7, 4], data + data[:8]))
    rebased("wrong_base", "A lane of the base in the second part is another.", "chunk.base_sum", ("BF16", shape, flip(20)(data)),
        chunk=2,
            error="wrong_base")
    rebased("wrong_base_last_lane", "The last lane of the base is another.", "chunk.base_sum", ("BF16", shape, flip(-1)(data)),
        chunk=3,
            error="wrong_base")
    columns = tensors(along(1, shape, [2, 2]))
    rebased("wrong_base_column", "A lane of the base in the second part, of columns, is another.", "chunk.base_sum",
            ("BF16", shape, flip(5)(data)), chunk=2, error="wrong_base", entries=columns)
    swapped = b"".join(cut(data, "BF16", shape, *rectangle_) for rectangle_ in along(1, shape, [2, 2]))
    rebased("base_of_parts_in_a_row", "The base's t has the bytes of the parts one after the other.", "chunk.base_sum", ("BF16",
        shape, swapped),
            chunk=1, error="wrong_base", entries=columns)
    out.invalid("parts_already_applied", "The base is the target.", "chunk.base_sum", "decode", model(tensors()), out.base(
        "invalid/parts_already_applied", safetensors({t.name: (t.dtype, t.shape, t.placed()) for t in tensors() if t.part < 2})),
        tensor="a", chunk=0, error="already_applied")
    bad("base_absent", "No base is given.", "base.tensor", "decode", over=None, entries=parts("t", "BF16", shape, moved, data,
        halves, codec=RAW))
    bad("base_absent_for_second", "No base is given, and only the second part has one.", "base.tensor", "decode", over=None,
        entries=parts("t", "BF16", shape, moved, data, halves, {0: {"kind": NONE}}, codec=RAW))
    bad("chunk_base_sum", "The base sum of a further part is wrong.", "chunk.base_sum", "decode", chunk=2,
        records=lambda d: d.sums[2].update(base_sum=d.sums[2]["base_sum"] ^ 1))
    bad("chunk_target_sum", "The target sum of a further part is wrong.", "chunk.target_sum", "decode", chunk=2,
        records=lambda d: d.sums[2].update(target_sum=d.sums[2]["target_sum"] ^ 1))

    # Digests.
    bad("tensor_target_digest", "The target digest of a further part is wrong.", "tensor.target_digest", "apply",
        records=lambda d: d.digests[2].update(target_digest=flip(0)(d.digests[2]["target_digest"])))
    bad("tensor_target_digest_of_tensor", "The target digest of a part is that of its tensor.", "tensor.target_digest", "apply",
        records=lambda d: d.digests[1].update(target_digest=blake3(moved)[:16]))
    bad("tensor_base_digest_of_tensor", "The base digest of a part is that of its tensor.", "tensor.base_digest", "apply",
        records=lambda d: d.digests[1].update(base_digest=blake3(data)[:16]))
    bad("digests_swapped", "The target digests of two parts have changed places.", "tensor.target_digest", "apply",
        records=lambda d: (
        d.digests.__setitem__(slice(1, 3), [d.digests[1] | {"target_digest": d.digests[2]["target_digest"]},
                                            d.digests[2] | {"target_digest": d.digests[1]["target_digest"]}])))
    bad("digest_target_root", "The target root has one digest for the whole tensor.", "digest.target_root", where=None,
        rooted=lambda d: d.roots.update(
        target_root=blake3(b"".join([d.digests[0]["target_digest"], blake3(moved)[:16], d.digests[4]["target_digest"]]))))

    # Files.
    def filed(name, about, entries, files=None, where="t"):
        bad(f"files_{name}", about, "file.tensors", "apply", where=where, entries=entries,
            files=lone(entries) if files is None else files)

    thirds = along(0, shape, [2, 2, 2])
    filed("gap", "Files, and a gap between the parts of a tensor.", tensors([thirds[0], thirds[2]]))
    filed("first_missing", "Files, and the first rows of a tensor are in no part.", tensors(thirds[1:]))
    filed("last_missing", "Files, and the last rows of a tensor are in no part.", tensors(thirds[:2]))
    filed("one_part", "Files, and one part of a tensor.", tensors(thirds[:1]))
    filed("column_missing", "Files, and a column of a tensor is in no part.", tensors(along(1, shape, [1, 2])))
    filed("corner_missing", "Files, and a part of a grid is missing.", tensors(grid(shape, [[3], [2]])[:3]))
    filed("element_missing", "Files, and one element is in no part.", tensors([([0, 0], [5, 4]), ([5, 0], [1, 3])]))

    def head(**changed):
        entries = json.loads(head_of(tensors())[8:])
        return [File(0, "", head_of(tensors(), text=json.dumps({k: v | changed.get(k, {}) for k, v in entries.items()})), ["a",
            "t", "u"])]

    filed("shape_of_part", "The header gives the tensor the shape of a part.", tensors(), [File(0, "", head_of([
        t if t.name != "t" else Tensor("t", "BF16", [2, 4], t.target) for t in tensors() if t.part < 2]), ["a", "t", "u"])], None)
    filed("shape", "The header gives a tensor with parts another shape of the same size.", tensors(), head(t={"shape": [4, 6]}),
        None)
    filed("dtype", "The header gives a tensor with parts another dtype of the same size.", tensors(), head(t={"dtype": "F16"}),
        None)
    filed("left_out", "A tensor with parts that no file has.", tensors(), lone([t for t in tensors() if t.name != "t"]), None)
    both = [lone(tensors(), "m.safetensors")[0], lone(tensors()[1:4], "n.safetensors")[0]]
    filed("twice", "A tensor with parts in two files.", tensors(), both, None)
