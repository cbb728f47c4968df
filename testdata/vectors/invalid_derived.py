"""The invalid vectors of the feature `derived` of the draft of version 1.3."""

from math import prod

from blake3 import blake3

from .cases import flip, put, replace
from .data import (CAST, DEQUANTISED, DERIVED, DIGESTS, DTYPES, FP8_BLOCKS, MXFP4, MXFP4_TRANSPOSED, NONE, PARTS, PAYLOAD_LIST,
                   PREFIX, RAW, SAME, bytes_of, chunk_sum, lanes_of, pattern)
from .derived import ALL, Source, cast, cast_source, converted, fp8_blocks, fp8_source, model, mxfp4, mxfp4_source
from .pair import Tensor, safetensors
from .parts import along, parts
from .valid_derived import WITHOUT, floats, nibbles

WITH_PARTS = ALL | PARTS


def param(base_dtype, form=0, scales_name_size=0, reserved=0):
    """The eight bytes of a base parameter, as a number."""
    return (DTYPES[base_dtype][0] if isinstance(base_dtype, str) else base_dtype) | form << 16 | reserved << 24 | scales_name_size << 32


def invalid_derived_vectors(out):
    # Most vectors change one thing in this pair. Entries and records: a 0, cast; q 1, of FP8; x 2, of MXFP4.
    few = bytes_of([0x3A83126F, 0x3B03126F, 0x39D1B717, 0x3A9D4952], 4)  # about 0.001, 0.002, 0.0004 and 0.0012
    weight = bytes(u if u % 128 != 127 else 63 for u in pattern(130 * 130, 1, 6))
    master = cast_source("a", "F32", "BF16", [6, 4], floats(24))
    block = fp8_source("q", "q_scale_inv", "BF16", [130, 3], weight[:390], few[:8])
    four = mxfp4_source("x_blocks", "x_scales", [3, 64], nibbles(96), bytes(range(120, 126)))
    rows = master.rows | block.rows | four.rows
    base = out.base("invalid/derived", safetensors(rows))

    def small(**options):
        return model([master.tensor("a", "BF16", [6, 4]), block.tensor("q", "BF16", [130, 3], p=31),
                      four.tensor("x", "BF16", [3, 64], base_name="x_blocks")], **options)

    def bad(name, about, rule, when="open_index", *, where=None, chunk=None, over=base, of=None, error=None, **edits):
        out.invalid(f"derived_{name}", about, rule, when, of or small(), over, tensor=where, chunk=chunk, error=error, **edits)

    def plain(features=ALL):
        return model([Tensor("t", "U8", [3], b"\1\2\3", kind=NONE, codec=RAW)], features=features)

    # The bit.
    features = "header.required_features"
    bad("bit_unused", "Bit 4, and no entry has a derived base.", features, of=plain(), over=None)
    bad("bit_unused_alone", "The same without other bits.", features, of=plain(DERIVED), over=None)
    bad("bit_unused_empty_pair", "Bit 4 in a pair without tensors.", features, of=model([]), over=None)
    bad("bit_3", "Bit 3, which has no meaning, beside bit 4.", features, header=put("head", required_features=ALL | 8))
    bad("bit_5", "Bit 5, which has no meaning, beside bit 4.", features, header=put("head", required_features=ALL | 32))
    bad("bit_36", "Bit 36, which a reader of 32 bits takes for bit 4.", features,
        header=put("head", required_features=DIGESTS | PAYLOAD_LIST | 1 << 36))
    bad("list_without_digests", "Bits 1 and 4 without bit 0.", features, of=small(features=PAYLOAD_LIST | DERIVED))

    # Base kinds.
    kind = "tensor.base_kind"
    bad("cast_without_bit", "Base kind 3 without bit 4.", kind, where="a", of=small(features=DIGESTS | PAYLOAD_LIST))
    bad("dequantised_without_bit", "Base kind 4 without bit 4.", kind, where="q", of=model([block.tensor("q", "BF16", [130, 3])],
        features=DIGESTS | PAYLOAD_LIST))
    bad("cast_without_features", "Base kind 3 without any bit.", kind, where="a", of=small(features=0))
    for value in (5, 0x8000, 0x0300):
        bad(f"kind_{value}", f"Base kind {value}.", kind, where="a", entries=put("entry", 0, base_kind=value))

    # The base parameter.
    def stated(name, about, i, value, rule="tensor.base_param", **fields):
        bad(f"param_{name}", about, rule, where="aqx"[i], entries=put("entry", i, base_param=value, **fields))

    def alone(name, about, dtype, shape, value, base_kind, rule="tensor.base_param", lanes=None):
        """A tensor without changes, whose base parameter cannot be."""
        size = prod(shape) * DTYPES[dtype][1] // 8
        tensor = Tensor("t", dtype, shape, bytes(size), bytes(size), base_kind, codec=RAW, base_dtype="F32", base_name="b",
                        scales_name="s" if base_kind == DEQUANTISED else "")
        bad(f"param_{name}", about, rule, where="t", of=model([tensor]), over=None, entries=put("entry", 0, base_param=value))

    stated("zero_of_cast", "A base parameter of 0 for a cast.", 0, 0)
    stated("zero_of_dequantised", "A base parameter of 0 for a dequantised base.", 1, 0)
    stated("of_same", "Base kind same with the parameter of a cast.", 0, param("F32"), base_kind=SAME)
    stated("of_none", "Base kind none with the parameter of a cast.", 0, param("F32"), base_kind=NONE)
    stated("dtype_9", "A base dtype that has no code.", 0, param(9))
    stated("dtype_private", "A private base dtype.", 0, param(0x8012))
    stated("dtype_of_target", "A cast from BF16 to BF16.", 0, param("BF16"))
    for dtype in ("F16", "F64", "I32", "U16", "C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4"):
        stated(f"{dtype.lower()}_to_bf16", f"A cast from {dtype} to BF16.", 0, param(dtype))
    for dtype, source in (("F16", "BF16"), ("F32", "F32"), ("F32", "F8_E4M3"), ("F32", "F8_E5M2"), ("F32", "F64"), ("F64", "F32"),
                          ("I16", "F32"), ("U16", "F32"), ("C64", "F32"), ("F8_E4M3", "F32"), ("F8_E4M3", "BF16"), ("F8_E5M2", "F16")):
        alone(f"{source.lower()}_to_{dtype.lower()}", f"A cast from {source} to {dtype}.", dtype, [4], param(source), CAST)
    stated("form_of_cast", "A cast with a form.", 0, param("F32", FP8_BLOCKS))
    stated("scales_of_cast", "A cast with the size of a scales name.", 0, param("F32", 0, 1))
    stated("scales_of_cast_last_bit", "A cast with the last bit of that size.", 0, param("F32", 0, 1 << 31))
    stated("reserved_of_cast", "The reserved byte of a cast is not zero.", 0, param("F32", reserved=1))
    stated("reserved_of_dequantised", "The reserved byte of a dequantised base is not zero.", 1, param("F8_E4M3", FP8_BLOCKS, 11, 0x80))
    for form in (0, 4, 255):
        stated(f"form_{form}", f"Form {form} of a dequantised base.", 1, param("F8_E4M3", form, 11))
    for dtype in ("F8_E5M2", "F8_E4M3FNUZ", "U8", "F32"):
        stated(f"fp8_of_{dtype.lower()}", f"fp8_blocks of {dtype}.", 1, param(dtype, FP8_BLOCKS, 11))
    for dtype in ("F4", "I8", "F8_E4M3"):
        stated(f"mxfp4_of_{dtype.lower()}", f"mxfp4 of {dtype}.", 2, param(dtype, MXFP4, 8))
    fp8, packed = param("F8_E4M3", FP8_BLOCKS, 1), param("U8", MXFP4, 1)
    turned = param("U8", MXFP4_TRANSPOSED, 1)
    for name, dtype, shape, value in [
            ("fp8_to_f64", "F64", [3, 5], fp8), ("fp8_to_i16", "I16", [3, 5], fp8), ("fp8_of_rank_1", "BF16", [5], fp8),
            ("fp8_of_rank_3", "BF16", [1, 3, 5], fp8), ("fp8_of_scalar", "BF16", [], fp8),
            ("mxfp4_to_f16", "F16", [3, 32], packed), ("mxfp4_to_f32", "F32", [3, 32], packed), ("mxfp4_of_scalar", "BF16", [], packed),
            ("mxfp4_of_48_columns", "BF16", [2, 48], packed), ("mxfp4_of_rows_of_32", "BF16", [32, 3], packed),
            ("mxfp4_of_one_column", "BF16", [32, 1], packed), ("transposed_of_rank_2", "BF16", [32, 32], turned),
            ("transposed_of_rank_4", "BF16", [1, 32, 32, 32], turned), ("transposed_of_columns_of_32", "BF16", [2, 3, 32], turned),
            ("transposed_of_48", "BF16", [1, 48, 2], turned), ("transposed_to_f16", "F16", [1, 32, 2], turned),
            ("form_4_of_rank_3", "BF16", [1, 32, 32], param("U8", 4, 1))]:
        form = {fp8: "fp8_blocks", packed: "mxfp4", turned: "mxfp4_transposed"}.get(value, "Form 4")
        alone(name, f"{form} for a target of {dtype} and {shape}.", dtype, shape, value, DEQUANTISED)

    # Scales names.
    def named(name, about, content, rule="tensor.scales_name", size=None, i=1):
        def edit(d):
            names = (d.names[i][:1], b"x_blocks" if i == 2 else b"", content)
            d.names[i] = b"".join(names)
            word = d.entry[i]["base_param"] % 2**32
            d.entry[i].update(base_param=word | (len(content) if size is None else size) << 32)
        bad(f"scales_name_{name}", about, rule, where="aqx"[i] if rule != "tensors.size" or size else None, entries=edit)

    named("empty", "A scales name of no bytes.", b"")
    named("empty_of_last", "A scales name of no bytes for the last tensor.", b"", i=2)
    named("long", "A scales name of 4,097 bytes.", b"s" * 4097)
    named("of_2_32_bytes", "A scales name of 2^32 - 1 bytes.", b"s", size=2**32 - 1)
    named("not_utf8", "A scales name that is not UTF-8.", b"q\xff")
    named("surrogate", "A scales name with a surrogate.", b"q\xed\xa0\x80")
    named("nul", "A scales name with NUL.", b"q\0")
    named("of_base_tensor", "The scales name is the name of the base tensor, which is that of the tensor.", b"q")
    named("of_base_name", "The scales name is the base name.", b"x_blocks", i=2)
    named("past_the_end", "A scales name that ends beyond the section.", b"s", "tensors.size", 4096, 2)
    bad("scales_name_byte_over", "A byte follows the last scales name.", "tensors.size", tensors=replace("tensors_section", lambda s: s + b"\0"))
    bad("scales_name_byte_short", "The last scales name lacks a byte.", "tensors.size", where="x",
        tensors=replace("tensors_section", lambda s: s[:-1]))
    bad("scales_name_before_base_name", "Scales name and base name have changed places: the base has other shapes under them.", "base.tensor",
        "decode", where="x", entries=lambda d: d.names.__setitem__(2, b"xx_scalesx_blocks"))

    # The order of checks.
    stated("after_codec", "A codec that is unknown, and a base parameter of 0: the codec is looked at before.", 0, 0, "tensor.codec", codec=9)
    stated("before_scales_name", "A form that is unknown, and no scales name: the form is looked at before.", 1, param("F8_E4M3", 4, 0))

    # Parts.
    def cut(name, about, rule, source, shape, rectangles, each=None, base_name="", entries=None, features=WITH_PARTS, **options):
        tensors = parts("t", "BF16", shape, source.formed, source.formed, rectangles, each, codec=RAW, base_name=base_name,
                        **source.options | options)
        edits = {"entries": entries} if entries else {}
        bad(f"parts_{name}", about, rule, where="t", of=model(tensors, features=features), over=None, **edits)

    wide = fp8_source("t", "s", "BF16", [130, 130], weight, few)
    thin, halves = fp8_source("t", "s", "BF16", [259, 3], weight[:777], few[:12]), along(0, [6, 4], [3, 3])
    cast_t = cast_source("t", "F32", "BF16", [6, 4], floats(24))
    prefix = {1: {"kind": PREFIX, "rows": 5}}
    cut("prefix", "A part of kind prefix beside one of kind cast.", kind, cast_t, [6, 4], halves, prefix)
    cut("cast_and_same", "A part of kind same after one of kind cast.", kind, cast_t, [6, 4], halves, {1: {"kind": SAME}})
    cut("same_and_cast", "A part of kind cast after one of kind same.", kind, cast_t, [6, 4], halves, {0: {"kind": SAME}})
    cut("cast_and_same_after_none", "The same with a part without a base between them.", kind, cast_t, [6, 4], along(0, [6, 4], [2, 2, 2]),
        {1: WITHOUT, 2: {"kind": SAME}})
    cut("cast_and_dequantised", "A dequantised part after one of kind cast.", kind, cast_t, [6, 4], halves,
        {1: {"kind": DEQUANTISED, "base_dtype": "F8_E4M3", "form": FP8_BLOCKS, "scales_name": "s"}})
    cut("without_bit", "Parts of kind cast without bit 4.", kind, cast_t, [6, 4], halves, features=DIGESTS | PAYLOAD_LIST | PARTS)
    cut("base_dtypes", "Parts cast from F32 and from F8_E4M3.", "tensor.base_param", cast_t, [6, 4], halves, {1: {"base_dtype": "F8_E4M3"}})
    cut("base_dtypes_after_none", "The same with a part without a base between them.", "tensor.base_param", cast_t, [6, 4],
        along(0, [6, 4], [2, 2, 2]), {1: WITHOUT, 2: {"base_dtype": "F8_E5M2"}})
    both = mxfp4_source("t_blocks", "s", [2, 32, 64], nibbles(2048), bytes(range(128)))
    cut("forms", "Parts of forms 2 and 3.", "tensor.base_param", both, [2, 32, 64], along(0, [2, 32, 64], [1, 1]),
        {1: {"form": MXFP4_TRANSPOSED}}, base_name="t_blocks")
    cut("param_of_none", "A part without a base, with a base parameter.", "tensor.base_param", cast_t, [6, 4], halves, {1: WITHOUT},
        entries=put("entry", 1, base_param=param("F32")))
    scales = "tensor.scales_name"
    cut("scales_names", "Parts with two scales names.", scales, wide, [130, 130], along(0, [130, 130], [128, 2]), {1: {"scales_name": "r"}})
    cut("scales_name_stated_once", "A further part without a scales name.", scales, wide, [130, 130], along(0, [130, 130], [128, 2]),
        {1: {"scales_name": ""}})
    cut("blocks_before_scales_name", "A block that is cut, and no scales name: the block is looked at before.", "tensor.part", wide, [130, 130],
        along(0, [130, 130], [100, 30]), scales_name="")
    cut("base_dtype_before_blocks", "Two base dtypes, and a block that is cut: the base dtype is looked at before.", "tensor.base_param", wide,
        [130, 130], [([0, 0], [128, 130]), ([129, 0], [1, 130])], {1: {"base_dtype": "F8_E5M2"}})
    for name, about, source, shape, rectangles in [
            ("rows", "A block of FP8 cut after 100 rows.", wide, [130, 130], along(0, [130, 130], [100, 30])),
            ("columns", "A block of FP8 cut after 64 columns.", wide, [130, 130], along(1, [130, 130], [64, 66])),
            ("last_row", "The last rows of a tensor of FP8, from 129 on.", wide, [130, 130], [([129, 0], [1, 130])]),
            ("last_column", "Blocks of FP8 without the last column.", wide, [130, 130], [([0, 0], [130, 129])]),
            ("middle", "128 rows of FP8 from 64 on.", thin, [259, 3], [([64, 0], [128, 3])]),
            ("end", "Rows of FP8 from 128 on, up to 258 of 259.", thin, [259, 3], [([128, 0], [130, 3])])]:
        cut(f"fp8_{name}", about, "tensor.part", source, shape, rectangles)
    flat = mxfp4_source("t_blocks", "s", [3, 96], nibbles(144), bytes(range(9)))
    turned = mxfp4_source("t_blocks", "s", [2, 96, 3], nibbles(288), bytes(range(18)), MXFP4_TRANSPOSED)
    for name, about, source, shape, rectangles in [
            ("columns", "Blocks of MXFP4 cut after 48 columns.", flat, [3, 96], along(1, [3, 96], [48, 48])),
            ("origin", "32 columns of MXFP4 from 16 on.", flat, [3, 96], [([0, 16], [3, 32])]),
            ("to_the_end", "The last 16 columns of MXFP4.", flat, [3, 96], [([0, 80], [3, 16])]),
            ("transposed", "Blocks of MXFP4 cut along the middle dim, of a transposed tensor.", turned, [2, 96, 3], along(
                1, [2, 96, 3], [16, 80]))]:
        cut(f"mxfp4_{name}", about, "tensor.part", source, shape, rectangles, base_name="t_blocks")

    # The base.
    def rebased(name, about, rule, where, error=None, chunk=None, without=(), **changed):
        changed = {key.replace("X", "x_"): value for key, value in changed.items()}
        content = {k: v for k, v in (rows | changed).items() if k not in without}
        bad(f"base_{name}", about, rule, "decode", where=where, chunk=chunk, error=error, over=out.base(
            f"invalid/derived_{name}", safetensors(content)))

    tensor, master_bytes, quantised, scale = "base.tensor", floats(24), weight[:390], few[:8]
    blocks, exponents = nibbles(96), bytes(range(120, 126))
    bad("base_absent", "No base is given.", tensor, "decode", where="a", over=None)
    rebased("cast_missing", "The base has no tensor a.", tensor, "a", without=["a"])
    rebased("cast_dtype_of_target", "The base's a has the dtype of the target.", tensor, "a", a=("BF16", [6, 4], master.formed))
    rebased("cast_dtype", "The base's a is I32.", tensor, "a", a=("I32", [6, 4], master_bytes))
    rebased("cast_shape", "The base's a is [4, 6].", tensor, "a", a=("F32", [4, 6], master_bytes))
    rebased("fp8_missing", "The base has no tensor q.", tensor, "q", without=["q"])
    rebased("fp8_dtype", "The base's q is F8_E5M2.", tensor, "q", q=("F8_E5M2", [130, 3], quantised))
    rebased("fp8_shape", "The base's q is [3, 130].", tensor, "q", q=("F8_E4M3", [3, 130], quantised))
    rebased("scales_missing", "The base has no scales of q.", tensor, "q", without=["q_scale_inv"])
    rebased("scales_dtype", "The scales of q are U32.", tensor, "q", q_scale_inv=("U32", [2, 1], scale))
    rebased("scales_of_bf16", "The scales of q are BF16.", tensor, "q", q_scale_inv=("BF16", [2, 1], scale[:4]))
    rebased("scales_transposed", "The scales of q are [1, 2].", tensor, "q", q_scale_inv=("F32", [1, 2], scale))
    rebased("scales_flat", "The scales of q are [2].", tensor, "q", q_scale_inv=("F32", [2], scale))
    rebased("scales_less", "The scales of q are [1, 1], as if blocks were not begun anew.", tensor, "q", q_scale_inv=("F32", [1, 1], scale[:4]))
    rebased("scales_per_row", "The scales of q are [130, 1].", tensor, "q", q_scale_inv=("F32", [130, 1], scale * 65))
    rebased("blocks_missing", "The base has no blocks of x.", tensor, "x", without=["x_blocks"])
    rebased("blocks_under_name", "The blocks of x are under the name of the tensor.", tensor, "x", without=["x_blocks"], x=rows["x_blocks"])
    rebased("blocks_dtype", "The blocks of x are I8.", tensor, "x", Xblocks=("I8", [3, 2, 16], blocks))
    rebased("blocks_flat", "The blocks of x are [3, 32].", tensor, "x", Xblocks=("U8", [3, 32], blocks))
    rebased("blocks_of_f4", "The blocks of x are [3, 64] of F4.", tensor, "x", Xblocks=("F4", [3, 64], blocks))
    rebased("exponents_missing", "The base has no scales of x.", tensor, "x", without=["x_scales"])
    rebased("exponents_dtype", "The scales of x are F8_E8M0.", tensor, "x", Xscales=("F8_E8M0", [3, 2], exponents))
    rebased("exponents_shape", "The scales of x are [2, 3].", tensor, "x", Xscales=("U8", [2, 3], exponents))
    rebased("exponents_of_rank_3", "The scales of x are [3, 2, 1].", tensor, "x", Xscales=("U8", [3, 2, 1], exponents))

    def over(name, about, source, dtype, shape, content, rule=tensor, **options):
        """A tensor t, over a base with these rows."""
        bad(f"base_{name}", about, rule, "decode", where="t", of=model([source.tensor("t", dtype, shape, **options)]),
            over=out.base(f"invalid/derived_{name}", safetensors(content)))

    nothing = cast_source("t", "F32", "BF16", [0, 7], b"")
    over("empty_missing", "The base has no tensor t; that of the target is empty.", nothing, "BF16", [0, 7], {"u": ("U8", [1], b"u")})
    nothing = fp8_source("t", "s", "BF16", [0, 5], b"", b"")
    over("empty_scales_missing", "The base has no scales of an empty tensor.", nothing, "BF16", [0, 5], {"t": ("F8_E4M3", [0, 5], b"")})
    over("empty_scales_shape", "The scales of an empty tensor have one row.", nothing, "BF16", [0, 5],
         {"t": ("F8_E4M3", [0, 5], b""), "s": ("F32", [1, 1], few[:4])})
    turned = mxfp4_source("t_blocks", "s", [2, 32, 3], nibbles(96), bytes(range(6)), MXFP4_TRANSPOSED)
    over("not_transposed", "The blocks lie along the last dim of the target, and the form is mxfp4_transposed.", turned, "BF16", [2, 32, 3],
         {"t_blocks": ("U8", [2, 1, 3, 16], nibbles(96)), "s": ("U8", [2, 1, 3], bytes(range(6)))}, base_name="t_blocks")

    wrong = {"error": "wrong_base", "rule": "chunk.base_sum"}
    rebased("cast_differs", "A bit of a lane of F32 that its BF16 lane shows.", where="a", chunk=0, a=("F32", [6, 4], flip(3, 8)(master_bytes)),
            **wrong)
    rebased("fp8_differs", "A lane of F8_E4M3 is another.", where="q", chunk=1, q=("F8_E4M3", [130, 3], flip(-1)(quantised)), **wrong)
    rebased("scales_differ", "The second scale of q is another: it is that of two rows.", where="q", chunk=1,
            q_scale_inv=("F32", [2, 1], flip(6, 4)(scale)), **wrong)
    rebased("scales_swapped", "The scales of q have changed places.", where="q", chunk=1, q_scale_inv=("F32", [2, 1], scale[4:] + scale[:4]),
            **wrong)
    rebased("blocks_differ", "A high nibble of x is another.", where="x", chunk=2, Xblocks=("U8", [3, 2, 16], flip(-1, 16)(blocks)), **wrong)
    rebased("exponents_differ", "A scale of x is another.", where="x", chunk=2, Xscales=("U8", [3, 2], flip(-1)(exponents)), **wrong)

    applied = master.tensor("a", "BF16", [6, 4])
    widened = bytes_of([lane << 16 for lane in lanes_of(applied.target, 2)], 4)
    bad("already_applied", "The lanes of F32 of the base have the values of the target.", "chunk.base_sum", "decode", where="a", chunk=0,
        of=model([applied]), error="already_applied", over=out.base("invalid/derived_already_applied",
        safetensors({"a": ("F32", [6, 4], widened)})))

    # Pairs whose writer formed other lanes.
    def otherwise(name, about, source, dtype, shape, lanes, **options):
        """The pair has `lanes` as its base lanes, where the base gives those of `source`."""
        assert lanes != source.formed and len(lanes) == len(source.formed), name
        pair = model([Source(source.rows, lanes, **source.options).tensor("t", dtype, shape, steps=[0], **options)])
        bad(f"lanes_{name}", about, "chunk.base_sum", "decode", where="t", chunk=0, of=pair, error="wrong_base",
            over=out.base(f"invalid/derived_lanes_{name}", safetensors(source.rows)))

    def cast_otherwise(name, about, source, target, lanes, function):
        w = DTYPES[source][2]
        right = cast_source("t", source, target, [len(lanes)], bytes_of(lanes, w))
        otherwise(name, about, right, target, [len(lanes)], bytes_of([function(u) for u in lanes], DTYPES[target][2]))

    ties = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0xBF808000, 0xBF818000]
    cast_otherwise("truncated", "Casts to BF16 that drop the low bits.", "F32", "BF16", ties, lambda u: u >> 16)
    cast_otherwise("ties_away", "Casts to BF16 whose ties go away from zero.", "F32", "BF16", ties, lambda u: u + 0x8000 >> 16)
    cast_otherwise("ties_up", "Casts to BF16 whose ties go to the larger value.", "F32", "BF16", ties, lambda u: u + (
        0x7FFF if u >> 31 else 0x8000) >> 16)
    cast_otherwise("nan_of_pytorch", "NaNs of BF16 as PyTorch has them, where it converts many at once.", "F32", "BF16",
                   [0x7FC00000, 0x7F800001, 0xFF812345], lambda u: 0xFFFF)
    cast_otherwise("nan_became_infinite", "A NaN whose upper payload is zero, cast to infinity.", "F32", "BF16", [0x7F800001, 0x3F800000],
                   lambda u: u >> 16)
    cast_otherwise("nan_became_zero", "A NaN rounded like a number: the carry leaves a zero.", "F32", "BF16", [0x7FFFFFFF, 0x3F800000],
                   lambda u: (u + 0x8000 >> 16) % 65536 if u > 0x7F800000 else u >> 16)
    cast_otherwise("signalling_nan", "A signalling NaN of BF16 that stays one.", "BF16", "F32", [0x7F81, 0x3F80], lambda u: u << 16)
    cast_otherwise("subnormals_of_f32_flushed", "Subnormal lanes of F32 cast to zeros.", "F32", "BF16", [0x00400000, 0x3F800000],
                   lambda u: u >> 16 if u >> 23 else 0)
    cast_otherwise("subnormals_of_f16_flushed", "Lanes that are subnormal in F16 cast to zeros.", "F32", "F16", [0x33800000, 0x3F800000],
                   lambda u: 0x3C00 if u == 0x3F800000 else 0)
    cast_otherwise("subnormals_of_f16_read_as_zero", "Subnormal lanes of F16 read as zeros.", "F16", "F32", [0x0001, 0x3C00],
                   lambda u: 0x3F800000 if u == 0x3C00 else 0)
    cast_otherwise("overflow_saturated", "A lane beyond the largest of F16 cast to the largest.", "F32", "F16", [0x477FF000, 0x3F800000],
                   lambda u: 0x3C00 if u == 0x3F800000 else 0x7BFF)
    cast_otherwise("e4m3_with_infinities", "The lanes 78 to 7E of F8_E4M3 read as infinity and NaNs.", "F8_E4M3", "BF16", list(range(0x70, 0x7F)),
                   lambda u: 0x7F80 | u % 8 << 4 if u >= 0x78 else converted(u, "F8_E4M3", "BF16"))
    cast_otherwise("e4m3_as_fnuz", "Lanes of F8_E4M3 read as those of F8_E4M3FNUZ: half the value.", "F8_E4M3", "BF16",
                   [0x38, 0x39, 0xB8], lambda u: converted(u, "F8_E4M3", "BF16") - 0x80)
    cast_otherwise("e5m2_negative_zero", "The negative zero of F8_E5M2 read as a positive one.", "F8_E5M2", "F16", [0x80, 0x3C],
                   lambda u: 0 if u == 0x80 else u << 8)

    tied = bytes_of([120 << 23 | (2**19 + 1) * pow(15, -1, 2**20) % 2**20 + 8 * 2**20 - 2**23], 4)
    once = fp8_source("t", "s", "BF16", [1, 2], b"\x3f\x38", tied)
    exact = lanes_of(once.formed, 2)
    otherwise("fp8_rounded_once", "A product rounded to BF16 at once.", once, "BF16", [1, 2], bytes_of([exact[0] ^ 1, exact[1]], 2))
    right = fp8_source("t", "s", "BF16", [130, 3], quantised, scale)
    halved = bytes_of([converted(u, "F32", "BF16") for u in lanes_of(scale, 4)], 2)
    otherwise("fp8_scales_rounded", "Products with scales that were rounded to BF16 first.", right, "BF16", [130, 3], fp8_blocks(
        quantised, cast(halved, "BF16", "F32"), [130, 3], "BF16"))
    wide = fp8_source("t", "s", "BF16", [2, 259], weight[:518], few[:12])
    otherwise("fp8_blocks_of_64", "Blocks of 64 columns, of which two share a scale with the next.", wide, "BF16", [2, 259], b"".join(
        fp8_blocks(weight[i:i + 1], few[i % 259 // 64 % 3 * 4:][:4], [1, 1], "BF16") for i in range(518)))
    tiny = fp8_source("t", "s", "F32", [1, 3], b"\x38\x01\x30", bytes_of([0x00400000], 4))
    otherwise("fp8_subnormal_scale_flushed", "A subnormal scale taken as zero.", tiny, "F32", [1, 3], bytes(12))
    four_t = mxfp4_source("t_blocks", "s", [3, 64], blocks, exponents)
    exchanged = bytes(byte >> 4 | byte % 16 << 4 for byte in blocks)
    otherwise("mxfp4_high_nibble_first", "The high nibble of each byte first.", four_t, "BF16", [3, 64], mxfp4(exchanged, exponents),
              base_name="t_blocks")
    apart = bytes(nibble for i in range(0, 96, 16) for half in (0, 4) for nibble in (
        [byte >> half & 15 for byte in blocks[i:i + 16]]))
    joined = bytes(apart[i] | apart[i + 1] << 4 for i in range(0, 192, 2))
    otherwise("mxfp4_halves_of_blocks", "The low nibbles of a block first, then its high ones.", four_t, "BF16", [3, 64],
              mxfp4(joined, exponents), base_name="t_blocks")
    otherwise("mxfp4_bias_128", "Scales less 128.", four_t, "BF16", [3, 64], mxfp4(blocks, bytes(s - 1 for s in exponents)), base_name="t_blocks")
    otherwise("mxfp4_transposed_as_it_is", "Lanes in the order of the base tensor, where the form transposes them.", turned, "BF16", [2, 32, 3],
              mxfp4(nibbles(96), bytes(range(6))), base_name="t_blocks")

    # Digests.
    bad("base_digest_of_base_tensor", "The base digest is that of the bytes of the base tensor.", "tensor.base_digest", "apply", where="a",
        records=lambda d: d.digests[0].update(base_digest=blake3(master_bytes)[:16]))
    bad("base_digest_zero", "The base digest is zero, as for base kind none.", "tensor.base_digest", "apply", where="q",
        records=lambda d: d.digests[1].update(base_digest=bytes(16)))
    bad("base_root_of_base_tensors", "The base root is that of the bytes of the base tensor.", "digest.base_root", rooted=lambda d: d.roots.update(
        base_root=blake3(blake3(master_bytes)[:16] + d.digests[1]["base_digest"] + d.digests[2]["base_digest"])))
    bad("base_root_without_digests", "Without feature digests, the base root is that of the bytes of the base tensor.", "digest.base_root", "apply",
        of=model([master.tensor("a", "BF16", [6, 4])], features=DERIVED), records=lambda d: d.roots.update(base_root=blake3(blake3(master_bytes))))
    bad("target_digest", "The target digest differs.", "tensor.target_digest", "apply", where="x",
        records=lambda d: d.digests[2].update(target_digest=flip(0)(d.digests[2]["target_digest"])))
    bad("record_sums_unchanged", "Two different sums for a tensor without changes.", "record.sums", where="a", chunk=0,
        of=model([master.tensor("a", "BF16", [6, 4], steps=[0])]), records=put("sums", 0, target_sum=1))
    bad("base_sum", "The base sum is that of the bytes of the base tensor: of lanes of F32.", "chunk.base_sum", "decode", where="a", chunk=0,
        records=lambda d: d.sums[0].update(base_sum=chunk_sum(master_bytes)))
