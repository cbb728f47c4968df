"""The valid vectors of the feature `parts` of version 1.2."""

from math import prod

from .conditioned import Plan
from .data import (CONDITIONED, DTYPES, ELIAS, GAPS, HEADER_OF_BASE, NIBBLE_GAPS, NIBBLE_PLANES, NONE, PLANES, RAW, ZSTD,
    bytes_of,
                   pattern)
from .pair import File, Tensor, change, head_of, lone, safetensors
from .parts import along, grid, model, parts
from .valid_conditioned import FEW, stepped, varied
from .zstd import by_runs


def lanes_for(dtype, shape, seed=1):
    """A pattern for all bytes of a tensor."""
    bits, w = DTYPES[dtype][1:]
    return bytes_of(pattern(prod(shape) * bits // (8 * w), w, seed), w)


def part_vectors(out):
    def one(name, about, tensors, base=None, files=True, **options):
        out.valid(f"parts_{name}", about, model(tensors, lone(tensors) if files is True else files or [], **options), base)

    def of(name, about, dtype, shape, rectangles, files=True, each=None, steps=(1, -1, 2), p=3, **options):
        """A vector of one tensor and a base of its own."""
        data = lanes_for(dtype, shape)
        path = out.base(f"valid/parts_{name}", safetensors({"t": (dtype, shape, data)}))
        tensors = parts("t", dtype, shape, change(data, dtype, list(steps), p), data, rectangles, each,
            **{"codec": RAW} | options)
        one(name, about, tensors, path, files)

    one("example", "The second example of section 14: a tensor in two parts, of which one has no change.", parts(
        "t", "U8", [2, 3], b"\0\0\0\0\5\0", None, along(1, [2, 3], [1, 2]), codec=RAW, kind=NONE), files=False)

    # Cuts.
    of("rows", "Two parts of rows, which tile the tensor.", "BF16", [6, 4], along(0, [6, 4], [3, 3]))
    of("columns", "Two parts of columns.", "BF16", [6, 4], along(1, [6, 4], [2, 2]))
    of("middle", "Two parts of a middle dim.", "BF16", [3, 4, 5], along(1, [3, 4, 5], [2, 2]))
    of("last_of_three", "Three parts of the last of three dims.", "I16", [2, 3, 6], along(2, [2, 3, 6], [2, 2, 2]))
    of("rows_uneven", "Seven rows in parts of three, three and one.", "F32", [7, 3], along(0, [7, 3], [3, 3, 1]))
    of("columns_uneven", "Seven columns in parts of three, three and one.", "F32", [3, 7], along(1, [3, 7], [3, 3, 1]))
    of("eight", "Eight parts of columns, the last one shorter.", "BF16", [2, 15], along(1, [2, 15], [2] * 7 + [1]))
    of("grid", "A grid of two by two.", "BF16", [6, 6], grid([6, 6], [[3], [2]]))
    of("grid_of_three_dims", "A grid in three dims.", "U8", [4, 3, 5], grid([4, 3, 5], [[1], [2], [2, 3]]))
    upper, lower = along(0, [8, 8], [4, 4])
    of("nested", "Rows cut at 4, and the lower half cut by columns.", "BF16", [8, 8], [upper, ([4, 0], [4, 4]), ([4, 4], [4, 4])])
    of("nested_first", "Rows cut at 4, and the upper half cut by columns.", "BF16", [8, 8], [([0, 0], [4, 4]), ([0, 4], [4, 4]),
        lower])
    of("nested_apart", "Three slabs of rows, each with other columns.", "U8", [6, 6], [
        ([0, 0], [2, 1]), ([0, 1], [2, 5]), ([2, 0], [1, 6]), ([3, 0], [3, 3]), ([3, 3], [3, 2]), ([3, 5], [3, 1])])
    of("nested_three_dims", "A slab cut in dim 1, one of its slabs cut in dim 2.", "I16", [4, 4, 4], [
        ([0, 0, 0], [2, 4, 4]), ([2, 0, 0], [2, 2, 4]), ([2, 2, 0], [2, 2, 1]), ([2, 2, 1], [2, 2, 3])])
    of("rank_1", "Parts of a tensor with one dim.", "BF16", [10], along(0, [10], [4, 6]))
    of("of_one_element", "Each element is a part.", "F32", [2, 3], grid([2, 3], [[1], [1, 2]]))
    of("column_vector", "A dim of 1 that is not cut.", "BF16", [9, 1], along(0, [9, 1], [4, 5]))
    of("dims_of_one", "Dims of 1 around the one that is cut.", "I16", [1, 1, 6, 1, 2], along(2, [1, 1, 6, 1, 2], [4, 2]))
    shape = [1] * 15 + [2] + [1] * 15 + [3]
    of("rank_32", "The largest rank, cut in two dims.", "U8", shape, grid(shape,
        [[1] if n == 2 else [2] if n == 3 else [] for n in shape]))
    of("many", "A hundred parts.", "U8", [100, 3], along(0, [100, 3], [1] * 100), p=7)

    # Sets of parts that do not tile their tensor.
    of("one_alone", "One part, and no other of its tensor.", "BF16", [6, 4], [([2, 1], [3, 2])], False)
    of("first_element", "The first element of a tensor.", "BF16", [6, 4], [([0, 0], [1, 1])], False, p=1, steps=[5])
    of("last_element", "The last element of a tensor.", "BF16", [6, 4], [([5, 3], [1, 1])], False)
    of("gap", "Two parts of rows with rows between them.", "BF16", [6, 4], [([0, 0], [2, 4]), ([4, 0], [2, 4])], False)
    of("gap_of_columns", "Two parts of columns with a column between and one after them.", "BF16", [4, 6], [
        ([0, 0], [4, 2]), ([0, 3], [4, 2])], False)
    of("corner_missing", "A grid without its last part.", "BF16", [6, 6], grid([6, 6], [[3], [2]])[:3], False)
    of("corners", "Two parts at opposite corners.", "BF16", [6, 6], [([0, 0], [2, 2]), ([4, 4], [2, 2])], False)
    of("corners_falling", "Two parts at opposite corners: the second one begins further left.", "BF16", [6, 6], [
        ([0, 4], [2, 2]), ([4, 0], [2, 2])], False)
    of("slabs_apart", "Rows of other columns: the slabs share none.", "U8", [4, 9], [([0, 6], [1, 3]), ([1, 0], [1, 3]), ([2, 3],
        [2, 3])], False)
    of("tiling_without_files", "Parts that tile a tensor of a pair without files.", "BF16", [6, 4], along(0, [6, 4], [3, 3]),
        False)
    huge = [2**40, 2**19]
    far = [([0, 0], [1, 3]), ([2**39, 5], [2, 1]), ([2**40 - 1, 2**19 - 2], [1, 2])]
    tensors = [Tensor("t", "U8", huge, bytes([i + 1]) * prod(extent), kind=NONE, codec=RAW, part=1 if i == 0 else 2,
        origin=origin, extent=extent)
               for i, (origin, extent) in enumerate(far)]
    one("of_a_huge_tensor", "Three parts without a base, of a tensor of 2^59 bytes: a reader of parts has no need of the whole.",
        tensors,
        files=False)
    edge = [Tensor("t", "F64", [2**57 - 1], bytes(8) + bytes_of([1], 8), kind=NONE, codec=RAW, part=1, origin=[2**57 - 3],
        extent=[2])]
    one("at_the_largest_origin", "A part at the end of the largest tensor of F64.", edge, files=False)

    # Base kinds and base names.
    shape, data = [6, 4], lanes_for("BF16", [6, 4])
    moved, halves = change(data, "BF16", [1, -1, 2], 3), along(0, [6, 4], [3, 3])
    base = out.base("valid/parts_bases", safetensors({"s": ("BF16", shape, data), "t": ("BF16", shape, data)}))
    one("kinds_mixed", "The first part has a base, the second has none.",
        parts("t", "BF16", shape, moved, data, halves, {1: {"kind": NONE}}, codec=RAW), base)
    one("kinds_mixed_none_first", "The first part has no base, the second has one.",
        parts("t", "BF16", shape, moved, data, halves, {0: {"kind": NONE}}, codec=RAW), base)
    one("kind_none", "No part has a base.", parts("t", "BF16", shape, moved, None, halves, codec=RAW, kind=NONE))
    one("base_name", "The base tensor has another name, stated with the first part.",
        parts("z", "BF16", shape, moved, data, halves, codec=RAW, base_name="t"), base)
    one("base_name_none_first", "The base name is stated with a part without a base, for the part after it.",
        parts("z", "BF16", shape, moved, data, halves, {0: {"kind": NONE}}, codec=RAW, base_name="t"), base)
    one("base_name_none_last", "The same, and the last part has no base.",
        parts("z", "BF16", shape, moved, data, halves, {1: {"kind": NONE}}, codec=RAW, base_name="t"), base)
    one("tied", "Two tensors from one base tensor, cut in different ways.",
        parts("y", "BF16", shape, moved, data, halves, codec=RAW, base_name="t")
        + parts("z", "BF16", shape, moved, data, along(1, shape, [1, 3]), codec=RAW, base_name="t"), base)
    one("crossed", "Two tensors, each with the other's namesake as base.",
        parts("s", "BF16", shape, moved, data, halves, codec=RAW, base_name="t")
        + parts("t", "BF16", shape, data, data, halves, codec=RAW, base_name="s"), base)
    elsewhere = bytearray(data)
    elsewhere[0] ^= 1
    other = out.base("valid/parts_base_elsewhere", safetensors({"t": ("BF16", shape, bytes(elsewhere))}))
    one("base_differs_elsewhere",
        "The base is another one, but not in the rows that the pair has: it is the right base of the part.",
        parts("t", "BF16", shape, moved, data, halves[1:], codec=RAW), other, False)
    whole = Tensor("m", "BF16", [6], data[:12], bytes(12), codec=RAW)
    rows = {name: ("BF16", shape, data) for name in ("a", "t")} | {"m": ("BF16", [6], bytes(12)), "x": ("BF16", [2], data[:4])}
    among = out.base("valid/parts_among_tensors", safetensors(rows))
    tensors = parts("a", "BF16", shape, moved, data, along(1, shape, [1, 3]), codec=RAW) + [whole] + parts(
        "t", "BF16", shape, moved, data, halves, codec=RAW) + [Tensor("x", "BF16", [2], data[:4], data[:4])]
    one("among_tensors", "Tensors with parts before and after whole ones.", tensors, among)
    files = [File(0, f"m-{i}.safetensors", head_of(group), [t.name for t in group if t.part < 2]) for i,
        group in enumerate((tensors[:3], tensors[3:]))]
    one("sharded", "The same in two shards.", tensors, among, files)
    both = parts("s", "BF16", shape, moved, data, halves, codec=RAW) + parts("t", "BF16", shape, data, data, along(1, shape, [2,
        2]), codec=RAW)
    one("header_of_base", "A lone file with the header of the base.", both, base, lone(both, kind=HEADER_OF_BASE))
    one("whole_tensor_same_rows", "A whole tensor whose neighbour has parts, without files.", tensors[2:5], among, False)
    name = "n" * 4096
    one("name_longest", "A name of 4,096 bytes, stated once for three parts.",
        parts(name, "BF16", shape, moved, None, along(0, shape, [2, 2, 2]), codec=RAW, kind=NONE), files=False)
    one("minor_0", "Feature parts in a pair of minor version 0.", parts("t", "BF16", shape, moved, data, halves, codec=RAW), base,
        False, minor=0)
    one("compressed_sections", "The sections tensors and files are compressed.",
        parts("t", "BF16", shape, moved, data, along(0, shape, [1] * 6), codec=RAW), base, section_frame=by_runs)

    # Changes, chunks and codecs.
    of("unchanged", "No part has a change: the list is zeros.", "BF16", [6, 4], halves, steps=[0])
    half = data[:24] + moved[24:]
    one("one_unchanged", "The first part has no change.", parts("t", "BF16", shape, half, data, halves, codec=RAW), base)
    wide = [66, 128]
    of("chunks", "Columns of two chunks and of one.", "U8", wide, along(1, wide, [70, 58]), p=911, codec=ZSTD, layout=GAPS)
    of("chunk_sizes", "Parts with chunks of different sizes.", "U8", [2, 6000], along(0, [2, 6000], [1, 1]),
        each={1: {"log2": 13}}, p=1499,
       codec=ZSTD, layout=GAPS)
    of("chunk_unchanged", "The second of three chunks of a part has no change.", "U8", [9000, 2], [([0, 1], [9000, 1])], False,
        p=16400, codec=ZSTD)
    of("codecs", "Codec raw and each layout of codec zstd, for one part each.", "BF16", [6, 20], along(0, [6, 20], [1] * 6),
       each={0: {"codec": RAW}} | {i + 1: {"layout": layout} for i, layout in enumerate((PLANES, GAPS, ELIAS, NIBBLE_GAPS,
       NIBBLE_PLANES))},
       codec=ZSTD)

    def conditioned(name, about, dtype, first, shape, rectangles, tables):
        lanes = varied(dtype, prod(shape), first)
        w = DTYPES[dtype][2]
        before, after = bytes_of(lanes, w), bytes_of(stepped(dtype, lanes), w)
        path = out.base(f"valid/parts_{name}", safetensors({"t": (dtype, shape, before)}))
        plan = Plan([[1 + i % 3 for i in range(64)]], first, states_log2=3)
        one(name, about, parts("t", dtype, shape, after, before, rectangles, {i: {"tables": own} for i, own in enumerate(tables)},
                               codec=CONDITIONED, plan=plan), path)

    for dtype, first in (("BF16", 100), ("F32", 100), ("F64", 1000), ("F8_E4M3", 1)):
        conditioned(f"conditioned_{dtype.lower()}",
            f"Codec conditioned for {dtype}: columns, of which all share the set of the first part.", dtype,
                    first, [10, 24], along(1, [10, 24], [8, 8, 8]), [FEW, 1, 1])
    conditioned("conditioned_own_sets", "Codec conditioned: each part owns a set.", "BF16", 100, [10, 24], along(0, [10, 24], [5,
        5]),
                [FEW, FEW[::-1]])
    conditioned("conditioned_second_set", "Codec conditioned: the third part refers to the set of the second.", "BF16", 100, [12,
        24],
                along(0, [12, 24], [4, 4, 4]), [FEW, FEW[::-1], 2])

    # Dtypes.
    for dtype, sizes in (("BOOL", [3, 5]), ("I8", [1, 7]), ("U64", [4, 4]), ("F16", [5, 3]), ("F8_E5M2", [2, 6]), ("C64", [3,
        5])):
        of(f"dtype_{dtype.lower()}", f"Columns of {dtype}.", dtype, [4, 8], along(1, [4, 8], sizes), p=5)
    of("f4_columns", "Columns of F4: each cut lies between bytes.", "F4", [5, 8], along(1, [5, 8], [2, 6]))
    of("f4_rows_of_odd_size", "Rows of three elements of F4, cut after two rows.", "F4", [6, 3], along(0, [6, 3], [2, 4]))
    of("f4_element_pairs", "One pair of elements of F4.", "F4", [4, 6], [([1, 2], [2, 2])], False)
    of("f6_columns", "Columns of F6_E2M3, in groups of four elements.", "F6_E2M3", [3, 12], along(1, [3, 12], [4, 8]))
    of("f6_middle", "A middle dim of F6_E3M2, whose rows of two elements have 12 bits.", "F6_E3M2", [3, 4, 2], along(1, [3, 4, 2],
        [2, 2]))
