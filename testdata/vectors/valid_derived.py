"""The valid vectors of the feature `derived` of the draft of version 1.3."""

from math import prod

from .conditioned import Plan
from .data import (CONDITIONED, DERIVED, DIGESTS, GAPS, MXFP4, MXFP4_TRANSPOSED, NONE, PARTS, PREFIX, RAW,
                   ZSTD, bytes_of, lanes_of, pattern)
from .derived import ALL, cast_source, fp8_source, infinity, magnitude, model, mxfp4_source, nearest
from .pair import File, Tensor, change, head_of, lone, safetensors
from .parts import along, grid, parts
from .valid_conditioned import FEW, stepped, varied
from .zstd import by_runs

WITH_PARTS = ALL | PARTS
WITHOUT = {"kind": NONE, "scales_name": ""}  # a part without a base


def floats(count, seed=1):
    """Lanes of F32 of many exponents, most of them those of weights."""
    return bytes_of([u & 0x8FFFFFFF | (0x30000000 if i % 9 else 0x40000000) for i, u in enumerate(pattern(count, 4, seed))], 4)


def boundaries(target):
    """Lanes of F32 at and beside the values of lanes of `target`, and the middles between them, at all exponents."""
    top, found = infinity(target), set()
    step = 1 << {"BF16": 7, "F16": 10}[target]
    places = {u for power in range(0, top + 1, step) for u in (power - 1, power, power + 1) if 0 <= u < top}
    places |= set(range(8)) | set(range(top - 8, top))
    for u in places:
        for size in (magnitude(u, target), (magnitude(u, target) + magnitude(u + 1, target)) // 2):
            lane = nearest(size, "F32")
            found |= {lane + d for d in (-1, 0, 1) if lane + d >= 0}
    lanes = sorted(u for u in found if u <= infinity("F32"))
    return [u | sign << 31 for u in lanes for sign in (0, 1)]


# Lanes of F32 that are scales: zeros, the least, subnormals, large ones, infinity, NaNs, negative ones.
SCALES = [0, 1, 3, 0x007FFFFF, 0x00800000, 0x00400001, 0x0B800000, 0x3F800000, 0xBF8CCCCD, 0x7B200000, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
          0x7F800001, 0xFFC12345, 0x80000000]


def tied_scales():
    """Lanes of F32 whose product with 15 / 8 is so close to the middle of two lanes of BF16 that F32 rounds it to the middle."""
    inverse = pow(15, -1, 2**20)
    mantissas = [(2**19 + d) * inverse % 2**20 + (8 + i << 20) for i, d in enumerate((-3, -2, -1, 1, 2, 3))]
    return [120 << 23 | n - 2**23 for n in mantissas]


def nibbles(size):
    return bytes((37 * i + i // 16) % 256 for i in range(size))


def derived_vectors(out):
    def one(name, about, tensors, base, files=True, **options):
        """`base` has the rows of a lone file, or the files of a folder."""
        folder = all(isinstance(value, bytes) for value in base.values())
        path = out.base(f"valid/{name}", base if folder else safetensors(base))
        out.valid(name, about, model(tensors, lone(tensors) if files is True else files or [], **options), path)

    def simple(name, about, source, dtype, shape, files=True, features=ALL, **options):
        one(name, about, [source.tensor("t", dtype, shape, **options)], source.rows, files, features=features)

    def cut(name, about, source, dtype, shape, rectangles, files=True, each=None, **options):
        """The parts of one tensor."""
        target = change(source.formed, dtype, [1, -1, 2], 7)
        tensors = parts("t", dtype, shape, target, source.formed, rectangles, each, **{"codec": RAW, **source.options, **options})
        one(name, about, tensors, source.rows, files, features=WITH_PARTS)

    # --- Casts ---------------------------------------------------------------------------------
    master = cast_source("t", "F32", "BF16", [6, 4], floats(24))
    simple("cast_f32_to_bf16", "A tensor of BF16 from a base tensor of F32.", master, "BF16", [6, 4])
    simple("cast_export", "An export: the target has the formed lanes, so no chunk has a payload.", master, "BF16", [6, 4], steps=[0])
    simple("cast_f32_to_f16", "F16 from F32.", cast_source("t", "F32", "F16", [6, 4], floats(24)), "F16", [6, 4])
    half = bytes_of(pattern(24, 2, 3), 2)
    simple("cast_bf16_to_f32", "F32 from BF16.", cast_source("t", "BF16", "F32", [24], half), "F32", [24])
    simple("cast_f16_to_f32", "F32 from F16.", cast_source("t", "F16", "F32", [24], half), "F32", [24])
    every = bytes(range(256))
    for source in ("F8_E4M3", "F8_E5M2"):
        for target in ("BF16", "F16"):
            simple(f"cast_{source[3:].lower()}_to_{target.lower()}", f"{target} from all lanes of {source}.",
                   cast_source("t", source, target, [16, 16], every), target, [16, 16], p=31)
    for source in ("BF16", "F16"):
        simple(f"cast_all_{source.lower()}", f"F32 from all lanes of {source}, without a change.", cast_source(
            "t", source, "F32", [65536], bytes_of(range(65536), 2)), "F32", [65536], False, steps=[0], log2=16)
    for target in ("BF16", "F16"):
        lanes = boundaries(target)
        simple(f"cast_boundaries_of_{target.lower()}", f"Lanes of F32 at and beside values of {target} and the middles between them: ties, "
               "subnormals, carries, overflow.", cast_source("t", "F32", target, [len(lanes)], bytes_of(lanes, 4)), target, [len(lanes)],
               steps=[0])
        nans = [sign << 31 | 0x7F800000 | payload for payload in (0, 1, 0x1FFF, 0x2000, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x412345,
                0x7FFFFF) for sign in (0, 1)]
        simple(f"cast_nans_to_{target.lower()}", "Infinities and NaNs of F32: sign and upper payload stay, NaNs become quiet.",
               cast_source("t", "F32", target, [20], bytes_of(nans, 4)), target, [20], steps=[0])
    simple("cast_scalar", "A scalar.", cast_source("t", "F32", "BF16", [], floats(1)), "BF16", [], p=1, steps=[5])
    simple("cast_empty", "A tensor without lanes.", cast_source("t", "F32", "BF16", [0, 7], b""), "BF16", [0, 7])
    wide = cast_source("t", "F32", "BF16", [3, 3000], floats(9000, 4))
    simple("cast_chunks", "Three chunks, of which the second has no change.", wide, "BF16", [3, 3000], p=8500, codec=ZSTD, layout=GAPS)
    simple("cast_chunk_size", "Chunks of 8,192 lanes.", wide, "BF16", [3, 3000], p=700, log2=13, codec=ZSTD)
    simple("cast_without_digests", "Feature derived alone: the roots are formed of the formed lanes.", master, "BF16", [6, 4],
           features=DERIVED)
    simple("cast_digests_alone", "Features digests and derived.", master, "BF16", [6, 4], features=DIGESTS | DERIVED)
    one("cast_of_minor_0", "Feature derived in a pair of minor version 0.", [master.tensor("t", "BF16", [6, 4])], master.rows, minor=0)
    one("cast_compressed_sections", "The sections tensors and files are compressed.", [master.tensor("t", "BF16", [6, 4])], master.rows,
        section_frame=by_runs)
    one("cast_base_name", "The base tensor has another name.", [master.tensor("z", "BF16", [6, 4], base_name="t")], master.rows)
    to_half = cast_source("t", "F32", "F16", [6, 4], floats(24))
    one("cast_tied", "Two tensors, of BF16 and of F16, from one base tensor of F32, beside a third one that is the same.", [
        Tensor("t", "F32", [6, 4], change(floats(24), "F32", [1], 5), floats(24), codec=RAW),
        master.tensor("u", "BF16", [6, 4], base_name="t"), to_half.tensor("v", "F16", [6, 4], base_name="t")], master.rows)
    tall = bytes_of(pattern(12, 2, 5), 2)
    mixed = [Tensor("a", "BF16", [2], half[:4], kind=NONE, codec=RAW), Tensor("b", "BF16", [2, 3], tall[:12], tall, PREFIX, rows=4,
             codec=RAW), master.tensor("t", "BF16", [6, 4]), Tensor("w", "I16", [6, 2], tall, tall, codec=RAW)]
    rows = master.rows | {"b": ("BF16", [4, 3], tall), "w": ("I16", [6, 2], tall)}
    one("cast_beside_others", "Tensors of all base kinds but dequantised.", mixed, rows)
    shards = {"x.safetensors": safetensors(master.rows), "y.safetensors": safetensors({"b": rows["b"], "w": rows["w"]})}
    files = [File(0, f"m-{i}.safetensors", head_of(group), [t.name for t in group]) for i, group in enumerate((mixed[:2], mixed[2:]))]
    one("cast_sharded", "The same from two files to two files.", mixed, shards, files)
    equal = bytes_of([0x7F800001, 0x3F800000, 0x7FA00001, 0x3F800001], 4)
    other = bytes_of([0x7F800002, 0x3F800000, 0x7FA0FFFF, 0x3F808000], 4)
    twin = cast_source("t", "F32", "BF16", [4], equal)
    assert twin.formed == cast_source("t", "F32", "BF16", [4], other).formed
    one("cast_equal_formed", "The base has other bytes than that of the writer, and the same formed lanes: it is the right base.",
        [twin.tensor("t", "BF16", [4])], {"t": ("F32", [4], other)})

    def coded(name, about, source, dtype, shape, first, **options):
        """Codec conditioned: contexts are those of formed lanes."""
        target = bytes_of(stepped(dtype, lanes_of(source.formed, 2 if dtype == "BF16" else 4)), 2 if dtype == "BF16" else 4)
        plan = Plan([[1 + i % 3 for i in range(64)]], first, states_log2=3)
        one(name, about, [Tensor("t", dtype, shape, target, source.formed, codec=CONDITIONED, tables=FEW, plan=plan, **source.options)],
            source.rows, **options)

    exponents = bytes_of(varied("F32", 240, 100), 4)
    coded("cast_conditioned_bf16", "Codec conditioned over formed lanes of BF16.", cast_source("t", "F32", "BF16", [240], exponents),
          "BF16", [240], 100)
    exponents = bytes_of(varied("BF16", 240, 100), 2)
    coded("cast_conditioned_f32", "Codec conditioned over formed lanes of F32, whose low bits are zero.", cast_source(
        "t", "BF16", "F32", [240], exponents), "F32", [240], 100)

    cut("cast_parts_rows", "Two parts of rows.", master, "BF16", [6, 4], along(0, [6, 4], [3, 3]))
    cut("cast_parts_columns", "Three parts of columns, of any number.", master, "BF16", [6, 4], along(1, [6, 4], [1, 2, 1]))
    cut("cast_parts_one_alone", "One part in the middle.", master, "BF16", [6, 4], [([2, 1], [3, 2])], False)
    cut("cast_parts_none_first", "The first part has no base, the others are cast.", master, "BF16", [6, 4], along(0, [6, 4], [2, 2, 2]),
        each={0: WITHOUT})
    cut("cast_parts_none_between", "The second of three parts has no base.", master, "BF16", [6, 4], along(0, [6, 4], [2, 2, 2]),
        each={1: WITHOUT})

    # --- FP8 in blocks -------------------------------------------------------------------------
    def fp8(shape, scales, target="BF16", weight=None, scales_name="t_scale_inv"):
        weight = weight or bytes(u if u % 128 != 127 else 63 for u in pattern(prod(shape), 1, 6))
        return fp8_source("t", scales_name, target, shape, weight, bytes_of(scales, 4))

    few = [0x3A83126F, 0x3B03126F, 0x39D1B717, 0x3A9D4952]  # about 0.001, 0.002, 0.0004 and 0.0012
    for target in ("BF16", "F16", "F32"):
        simple(f"fp8_to_{target.lower()}", f"{target} from a block of F8_E4M3 that is cut off on both sides.", fp8([3, 5], few[:1], target),
               target, [3, 5])
    simple("fp8_export", "No change.", fp8([3, 5], few[:1]), "BF16", [3, 5], steps=[0])
    simple("fp8_rows", "130 rows: the last two have a scale of their own.", fp8([130, 3], few[:2]), "BF16", [130, 3], p=31)
    simple("fp8_columns", "259 columns: three scales per row of blocks.", fp8([2, 259], few[:3]), "BF16", [2, 259], p=31)
    square = fp8([129, 130], few)
    simple("fp8_grid", "Four blocks, of which three are cut off.", square, "BF16", [129, 130], p=997, codec=ZSTD)
    signs = bytes(range(256)) * len(SCALES)
    by_column = bytes(signs[128 * (i % len(SCALES) * 2 + i // len(SCALES)) + j] for i in range(2 * len(SCALES)) for j in range(128))
    for target in ("BF16", "F32"):
        simple(f"fp8_scales_at_edges_to_{target.lower()}", "All lanes of F8_E4M3 with zero, subnormal, large, infinite and negative scales and "
               "with NaNs.", fp8([2, 128 * len(SCALES)], SCALES, target, by_column), target, [2, 128 * len(SCALES)], steps=[0])
    simple("fp8_rounded_twice", "Products that F32 rounds to the middle between two lanes of BF16: rounded once, they would differ.",
           fp8([1, 128 * 6], tied_scales(), weight=b"\x3f\xbf" * 64 * 6), "BF16", [1, 128 * 6], steps=[0])
    simple("fp8_empty_rows", "A tensor without rows: its tensor of scales is empty.", fp8([0, 5], []), "BF16", [0, 5])
    simple("fp8_empty_columns", "A tensor without columns.", fp8([5, 0], []), "BF16", [5, 0])
    simple("fp8_scales_name", "A tensor of scales of another name.", fp8([3, 5], few[:1], scales_name="s/\u00e9"), "BF16", [3, 5])
    simple("fp8_scales_name_longest", "A scales name of 4,096 bytes.", fp8([3, 5], few[:1], scales_name="s" * 4096), "BF16", [3, 5])
    block = fp8([3, 5], few[:1])
    one("fp8_shared", "Two tensors from one base tensor with one tensor of scales.", [
        block.tensor("t", "BF16", [3, 5]), block.tensor("u", "BF16", [3, 5], base_name="t", p=3)], block.rows)
    scales = bytes_of(few[:1], 4)
    one("fp8_scales_in_pair", "The tensor of scales is a tensor of the pair too: the base lanes are formed with that of the base.", [
        block.tensor("t", "BF16", [3, 5]), Tensor("t_scale_inv", "F32", [1, 1], bytes_of([0x3F800000], 4), scales, codec=RAW)], block.rows)
    coded("fp8_conditioned", "Codec conditioned over dequantised lanes.", fp8([3, 80], few[:1]), "BF16", [3, 80], 100)
    cut("fp8_parts_rows", "Rows 0 to 128 and 128 to 130.", fp8([130, 3], few[:2]), "BF16", [130, 3], along(0, [130, 3], [128, 2]))
    cut("fp8_parts_columns", "Columns 0 to 256 and the rest.", fp8([2, 259], few[:3]), "BF16", [2, 259], along(1, [2, 259], [256, 3]))
    cut("fp8_parts_grid", "Each block is a part.", square, "BF16", [129, 130], grid([129, 130], [[128], [128]]))
    cut("fp8_parts_last_alone", "The block at the lower right end, and no other part.", square, "BF16", [129, 130], [([128, 128], [1, 2])],
        False)
    cut("fp8_parts_none_first", "The first part has no base: the scales name is stated with the second.", fp8([130, 3], few[:2]), "BF16",
        [130, 3], along(0, [130, 3], [128, 2]), each={0: WITHOUT})

    # --- MXFP4 ---------------------------------------------------------------------------------
    def four(shape, scales=None, form=MXFP4):
        lanes = prod(shape)
        return mxfp4_source("t_blocks", "t_scales", shape, nibbles(lanes // 2), scales or bytes(110 + 7 * i % 20 for i in range(lanes // 32)),
                            form)

    def scaled(name, about, shape, form=MXFP4, scales=None, **options):
        simple(name, about, four(shape, scales, form), "BF16", shape, base_name="t_blocks", **options)

    scaled("mxfp4", "Rows of two blocks.", [3, 64])
    scaled("mxfp4_export", "No change.", [3, 64], steps=[0])
    scaled("mxfp4_all_scales", "All nibbles with all scales: subnormals at one end, infinities at the other.", [256, 32],
           scales=bytes(range(256)), steps=[0])
    scaled("mxfp4_rank_1", "One dim.", [64])
    scaled("mxfp4_rank_4", "Four dims.", [2, 1, 3, 32])
    scaled("mxfp4_rank_32", "The largest rank: the base tensor has a dim more.", [1] * 30 + [2, 32])
    scaled("mxfp4_empty", "A tensor without columns.", [3, 0])
    scaled("mxfp4_transposed", "Two experts of 64 by 3: the base tensor has the blocks along the middle dim of the target.", [2, 64, 3],
           MXFP4_TRANSPOSED)
    scaled("mxfp4_transposed_all_scales", "All nibbles with all scales.", [1, 32, 256], MXFP4_TRANSPOSED, bytes(range(256)), steps=[0])
    scaled("mxfp4_transposed_chunks", "Three chunks, whose bounds are within rows.", [1, 96, 100], MXFP4_TRANSPOSED, p=8500, codec=ZSTD)
    scaled("mxfp4_transposed_empty", "Experts of no rows.", [2, 0, 3], MXFP4_TRANSPOSED)
    scaled("mxfp4_transposed_no_experts", "No experts.", [0, 32, 3], MXFP4_TRANSPOSED)
    both = four([2, 64, 3], None, MXFP4_TRANSPOSED)
    order = four([2, 3, 64])
    one("mxfp4_both_orders", "Two tensors from one base tensor, one in each order.", [
        both.tensor("t", "BF16", [2, 64, 3], base_name="t_blocks"), order.tensor("u", "BF16", [2, 3, 64], base_name="t_blocks")], both.rows)
    named = mxfp4_source("t.blocks", "t.scales", [3, 64], nibbles(96), bytes(range(120, 126)))
    one("mxfp4_names_with_dots", "The names of the first release of gpt-oss.", [named.tensor("t", "BF16", [3, 64], base_name="t.blocks")],
        named.rows)
    cut("mxfp4_parts_rows", "Rows.", four([3, 64]), "BF16", [3, 64], along(0, [3, 64], [1, 2]), base_name="t_blocks")
    cut("mxfp4_parts_columns", "Columns in whole blocks.", four([3, 96]), "BF16", [3, 96], along(1, [3, 96], [32, 64]), base_name="t_blocks")
    for dim, sizes in ((0, [1, 1]), (1, [32, 64]), (2, [1, 2])):
        cut(f"mxfp4_transposed_parts_of_dim_{dim}", f"Parts along dim {dim} of the target.", four([2, 96, 3], None, MXFP4_TRANSPOSED), "BF16",
            [2, 96, 3], along(dim, [2, 96, 3], sizes), base_name="t_blocks")
    cut("mxfp4_parts_none_first", "The first part has no base; base name with the first part, scales name with the second.", four([3, 64]),
        "BF16", [3, 64], along(0, [3, 64], [1, 2]), each={0: WITHOUT}, base_name="t_blocks")


