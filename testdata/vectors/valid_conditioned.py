"""The valid vectors of codec 2, `conditioned`, of version 1.1."""

from dataclasses import replace

from .cases import zeros_but
from .conditioned import BLOCK, EXPONENT, TILE, Payload, Plan, row, shared_by, token_of
from .data import CONDITIONED, DTYPES, NONE, PREFIX, RAW, SAME, bytes_of, lanes_of, moved, pattern
from .pair import Model, Tensor, change, lone, safetensors
from .zstd import by_hand, by_runs, library

STEPS = [1, -1, 2, 3, -60]  # deltas 2, 1, 4, 6 and 119
FEW = [row({0: 3000, 1: 500, 2: 400, 4: 100, 6: 64, 65: 32}), row({0: 1000, 1: 2000, 2: 1000, 4: 50, 6: 40, 65: 6}),
       row({0: 128, 1: 127, 2: 129, 4: 1, 6: 3583, 65: 128})]
RARE = [row({0: 4000, 2: 96})]
EVERY = [shared_by(range(180))]


def varied(dtype, count, first):
    """Lanes of many contexts: exponents from `first` on, or lengths from none to all bits, complemented every other."""
    bits = 8 * DTYPES[dtype][2]
    lanes = pattern(count, bits // 8, 11)
    if dtype in EXPONENT:
        shift, mask = EXPONENT[dtype]
        return [u & ~(mask << shift) | ((first + i % 70) & mask) << shift for i, u in enumerate(lanes)]
    lanes = [u >> i % (bits + 1) for i, u in enumerate(lanes)]
    return [u ^ ((1 << bits) - 1) if dtype in ("I8", "I16", "I32", "I64") and i % 2 else u for i, u in enumerate(lanes)]


def coded(name, dtype, base, target, tables, plan, **options):
    """A tensor of codec 2 whose shape is one row of lanes; `base` and `target` are lanes."""
    bits, w = DTYPES[dtype][1:]
    shape = [len(target) * 8 * w // bits] if dtype != "C64" else [len(target) // 2]
    return Tensor(name, dtype, shape, bytes_of(target, w), None if base is None else bytes_of(base, w),
                  NONE if base is None else options.pop("kind", SAME), codec=CONDITIONED, tables=tables, plan=plan, **options)


def stepped(dtype, lanes, steps=STEPS, p=5, r=2):
    """`change` for lanes."""
    w = DTYPES[dtype][2]
    return lanes_of(change(bytes_of(lanes, w), dtype, steps, p, r), w)


def valid_conditioned_vectors(out):
    def one(name, about, tensors, base=None, files=False, **options):
        out.valid("conditioned_" + name, about, Model(
            tensors, lone(tensors) if files is True else files or [], minor=1, **options), base)

    def over(name, *tensors):
        """A base file with the bases of `tensors`."""
        return out.base("valid/conditioned_" + name, safetensors(
            {t.base_name or t.name: (t.dtype, t.shape, t.base) for t in tensors if t.base is not None}))

    # The worked example of section 5 of codecs.md.
    example = example_tensor()
    one("example", "The worked example of codecs.md: five lanes, four of them coded, and an exception.", [example],
        over("example", example), files=True)
    walkthrough = walkthrough_tensor()
    one("walkthrough", "The second worked example of codecs.md: two states, two segments, activities, low bits, extra bits in two "
        "rounds, an exception.", [walkthrough], over("walkthrough", walkthrough), files=True)
    out.valid("conditioned_of_minor_0", "Codec 2 in a pair of minor version 0: a reader does not compare the two.",
              Model([example], lone([example]), minor=0), "valid/conditioned_example.base.safetensors")

    # Each dtype: nearly every context has another class than its neighbours, so that a wrong one shows.
    tensors = []
    for i, dtype in enumerate(DTYPES):
        first = {"F64": 1000, "F16": 3, "F8_E5M2": 2, "F8_E5M2FNUZ": 3}.get(dtype, 1 if "F8" in dtype else 90)
        lanes = varied(dtype, 300, first)
        target = stepped(dtype, lanes)
        if dtype == "BOOL":  # booleans proper, with a difference of one only
            lanes = [u & 1 for u in lanes]
            target = [u ^ (j % 5 == 2) for j, u in enumerate(lanes)]
        maps = [[(entry + turn) % 4 for entry in range(64 - i % 2)] for turn in range(1 << i % 3)]
        tensors.append(coded(dtype, dtype, lanes, target, FEW, Plan(
            maps, first + 2 if dtype in EXPONENT else i % 4, [b % len(maps) for b in range(3)] if i % 3 else [],
            states_log2=i % (5 if DTYPES[dtype][2] > 1 else 3))))
    base = over("dtypes", *tensors)
    for tensor in tensors:
        one(f"dtype_{tensor.dtype.lower()}", f"A tensor of {tensor.dtype}, with a map that tells its contexts apart.",
            [tensor], base, files=True)

    # States, steps and blocks.
    lanes = varied("BF16", 1001, 100)
    target = stepped("BF16", lanes)
    classes = [[1 + i % 3 for i in range(64)]]
    made = {}

    def states(name, about, count, plan, changed=target):
        made[name] = about, coded("t", "BF16", lanes[:count], changed[:count], FEW, plan)

    states("states_1", "One state; 1,001 lanes, so that the last block has 105.", 1001, Plan(classes, 100))
    states("states_32", "32 states; the last step is shorter.", 1001, Plan(classes, 100, states_log2=5))
    states("states_more_than_lanes", "32 states for 20 coded lanes: one short step, and twelve states that nothing "
           "uses.", 100, Plan([[1] * 10], 100, states_log2=5))
    states("states_whole_steps", "16 states for 256 coded lanes: every step is whole.", 256,
           Plan([[1, 2, 3]], 300, states_log2=4))
    states("one_lane", "A chunk of one lane.", 1, Plan(classes, 100), [moved(lanes[0], 2, 2, True)])
    states("block_of_one_lane", "129 lanes: the last block has one lane, with an activity of its own.", 129,
           Plan([[1] * 64, [3] * 64], 100, [0, 1]))
    states("blocks_of_128", "256 lanes: two whole blocks.", 256, Plan(classes, 100))

    # Tiles. These tensors have two and a short one. With the map below each tile has an odd number of coded lanes: its last
    # step is shorter for any number of states but one.
    odd, tiled = [1, 2, 1, 1, 0] * 12, []
    for dtype, first, first_context in (("BF16", 100, 99), ("F32", 100, 101), ("F64", 1000, 1000), ("F8_E4M3", 1, 5)):
        w = DTYPES[dtype][2]
        lanes_ = varied(dtype, 2 * TILE[w] + 101, first)
        steps = STEPS + [40] + [2**e + 0x12345678901234 % 2**e for e in (12, 20, 30, 40, 50) if e < 8 * w]
        tokens = sorted({token_of(2 * step if step > 0 else -2 * step - 1)[0] for step in steps})
        tensor = coded(dtype, dtype, lanes_, stepped(dtype, lanes_, steps, 23), [
            shared_by([0], *tokens), shared_by([0, *tokens])], Plan([odd], first_context))
        assert all(len(tile) % 2 for tile in Payload(tensor.plan, tensor.tables, dtype, w, lanes_, {}).tiles)
        tiled.append(tensor)
    base = over("tiles", *tiled)

    def tiles(name, about, tables=None, with_coded=None, **options):
        """Those tensors with another plan; with a map and an activity more where only some tiles have coded lanes."""
        tensors = []
        for t in tiled:
            plan = replace(t.plan, **options)
            if with_coded is not None:
                plan = replace(plan, maps=[[0] * len(odd), odd], activities=[
                    int(lane // TILE[DTYPES[t.dtype][2]] in with_coded) for lane in range(0, t.shape[0], BLOCK)])
            tensors.append(replace(t, tables=tables or t.tables, plan=plan))
        one(name, about, tensors, base)

    for log2 in (0, 1, 3, 4, 5):
        tiles(f"tiles_states_{1 << log2}", "Two tiles and a short one of lanes of each width, each with an odd number of coded "
              f"lanes; {1 << log2} state{'s' * (log2 > 0)}.", states_log2=log2)
    tiles("segments_2_of_3_tiles", "Segments of one and of two tiles, each tile with an odd number of coded lanes; 4 states.",
          states_log2=2, segments_log2=1)
    tiles("tile_without_coded_lanes", "The second of three tiles has no coded lanes; 8 states.", with_coded=(0, 2),
          states_log2=3)
    tiles("tiles_without_coded_lanes", "The first and the last of three tiles have no coded lanes; 8 states.", with_coded=(1,),
          states_log2=3)
    tiles("tiles_low_bits", "Three low bits of the lanes of three tiles; 16 states.", states_log2=4, low_bits=3, center=15,
          tables=[shared_by([15], *range(15), *range(16, 180))] * 2)
    lanes_ = lanes_of(tiled[0].base, 2)
    one("tiles_of_few_coded_lanes", "At most 15 coded lanes in each of three tiles, and 32 states, more than half of them "
        "unused.", [coded("BF16", "BF16", lanes_, stepped("BF16", lanes_, p=140, r=7), FEW, Plan(
            [[0, 1]], 106, states_log2=5))], base)

    def no_base(dtype, tiles, more, plan):
        """All lanes of `tiles` tiles and `more` further lanes have context 0. Few lanes change, and the last one does."""
        count = TILE[DTYPES[dtype][2]] * tiles + more
        changes = {i: 1 for i in (*range(0, count, 37), count - 1)}
        return coded(dtype, dtype, None, zeros_but_lanes(count, changes), RARE, plan, log2=max(12, (count - 1).bit_length()))

    widths = "U8", "U16", "U32", "U64"
    one("tiles_of_whole_steps", "Two whole tiles of lanes of each width, all of them coded; 32 states.",
        [no_base(dtype, 2, 0, Plan([[1]], states_log2=5)) for dtype in widths])
    one("tile_of_one_lane", "A lane more than a tile, for lanes of each width; 8 states.",
        [no_base(dtype, 1, 1, Plan([[1]], states_log2=3)) for dtype in widths])

    # Segments.
    one("segment_of_one_lane", "Two segments of two tiles, the second of which has one lane, for lanes of each width.",
        [no_base(dtype, 1, 1, Plan([[1]], states_log2=1, segments_log2=1)) for dtype in widths])
    for dtype, tiles_, more, log2 in (("U32", 5, -27, 2), ("I64", 7, -27, 2), ("U8", 8, 0, 3), ("U16", 33, -1014, 5)):
        one(f"segments_{1 << log2}_of_{tiles_}_tiles", f"{1 << log2} segments of {tiles_} tiles"
            f"{', the last of which is short' * (more < 0)}; lanes of {DTYPES[dtype][1]} bits.",
            [no_base(dtype, tiles_, more, Plan([[1]], states_log2=log2 % 3, segments_log2=log2))])
    one("segment_without_coded_lanes", "The first and the last of four segments have states and no coded lane.",
        [no_base("I64", 4, 0, Plan([[0], [1]], activities=[0, 0, 1, 1, 1, 1, 0, 0], segments_log2=2))])

    # Contexts, classes and activities.
    states("context_clamped", "first_context above most contexts: those below it count as it.", 300,
           Plan([[3, 1, 2, 1, 2]], 140))
    states("context_largest", "first_context 65,535: every lane counts as it.", 300, Plan([[2]], 65535))
    states("context_above_window", "Three contexts in the map; lanes above them are not coded.", 300, Plan([[1, 0, 2]], 100))
    states("context_count_63", "63 contexts: half a byte of the map is filled with zero.", 300, Plan([classes[0][:63]], 101))
    states("activity_bits_1", "Activities of one bit; eight blocks fill their byte.", 1001,
           Plan([[0] * 40 + [1] * 24, [2] * 64], 100, [0, 1, 1, 0, 1, 0, 0, 1]))
    states("activity_bits_2", "Activities of two bits: five blocks need two bytes; one map is all zero.", 600,
           Plan([[0] * 63, [1] * 63, [2] * 63, [3, 1, 2] * 21], 100, [3, 0, 1, 2, 3], states_log2=2))
    states("activity_unused_map", "Four maps, two of which no block uses.", 600,
           Plan([[1] * 5, [2] * 5, [3] * 5, [1, 2, 3, 2, 1]], 140, [1, 3, 1, 3, 3]))

    # Exceptions, and the padding byte.
    few = stepped("BF16", lanes[:300], [400, -3, 90], 299, 0)
    states("exceptions_first_and_last_lane", "Exceptions of the first and of the last lane, which are not coded.", 300,
           Plan([[0, 1]], 300), few)
    states("exceptions_alone", "No lane is coded: all changes are exceptions.", 300, Plan([[0]]))
    some = stepped("BF16", lanes[:300])
    some[7] = moved(lanes[7], 20000, 2, True)
    states("exception_of_coded_lane", "An exception of a lane that is coded with value 0, for want of a token.", 300,
           Plan(classes, 100, exceptions=(7,)), some)
    small = moved(lanes[3], 1, 2, True)
    states("padding_absent", "Parts of an even number of bytes before the streams: no padding.", 4,
           Plan([[1] * 3], 100), lanes[:3] + [small])
    states("padding_present", "Parts of an odd number of bytes before the streams: a byte of padding.", 4,
           Plan([[1] * 2], 100), lanes[:3] + [small])
    sizes = {}
    for name, (about, tensor) in made.items():
        count, = tensor.shape
        if count not in sizes:
            sizes[count] = over(f"lanes_{count}", tensor)
        one(name, about, [tensor], sizes[count])

    # Low bits.
    def low(name, about, dtype, target, plan, tables=FEW):
        one(name, about, [coded("t", dtype, None, target, tables, plan)])

    floats = [0x3D00 + (i * 37) % 0x180 | (i % 3 == 0) << 15 for i in range(300)]
    low("low_bits_center", "BF16 without a base: mantissa and sign are low bits, exponents count down from the center.",
        "BF16", floats, Plan([[1]], low_bits=8, center=125, states_log2=2), [row({t: 512 for t in range(8)})])
    low("low_bits_wraps", "Values above the center: center less value wraps below zero.", "BF16", floats,
        Plan([[1]], low_bits=8, center=124), [row({0: 1200, 1: 1200, 2: 1000, 67: 696})])
    low("low_bits_all", "All bits are low bits: no tables, and no lane is coded.", "F32",
        pattern(200, 4, 3), Plan([[0]], low_bits=32), None)
    low("low_bits_all_coded", "All bits are low bits, and lanes are coded with value 0 all the same.", "U8",
        pattern(200, 1, 3), Plan([[1]], low_bits=8), [row({0: 4096})])
    for dtype, r in (("U8", 3), ("I16", 11), ("F32", 5), ("U64", 63), ("F64", 1)):
        w = DTYPES[dtype][2]
        lanes_ = [u >> max(8 * w - r - 2, 0) if i % 2 else u for i, u in enumerate(pattern(131, w, 5))]
        low(f"low_bits_{r}_of_{8 * w}", f"{r} low bits of lanes of {8 * w} bits: they end within a byte.", dtype, lanes_,
            Plan([[1]], low_bits=r, center=3 % (1 << 8 * w - r), states_log2=1),
            [shared_by(range(token_of((1 << 8 * w - r) - 1)[0] + 1))])
    lanes_ = varied("BF16", 300, 100)
    target_ = [u ^ (i * 5 & 31) for i, u in enumerate(lanes_)]
    target_[299] = moved(lanes_[299], -30000, 2, True)
    target_[298] = lanes_[298]
    tensor = coded("t", "BF16", lanes_, target_, EVERY, Plan([[1, 2, 0] * 7], 100, low_bits=5, center=1,
                                                               exceptions=(299,)))
    tensor.tables = EVERY * 2
    one("low_bits_of_uncoded_lanes", "Low bits for all lanes, coded or not, and exceptions of lanes whose low bits are zero.",
        [tensor], sizes[300])

    # Tokens and extra bits.
    def span_of(t):
        """The least value of a token, and how many values it has."""
        return (t, 1) if t < 64 else (2 + t % 2 << (t - 64) // 2 + 5, 1 << (t - 64) // 2 + 5)

    each = [least + 0xA5A5A5A5A5A5A5A5 % size for least, size in map(span_of, range(180))]
    mixed = [each[i * 53 % 180] for i in range(180)]

    def inverse(delta, bits=64):
        return (delta >> 1) % (1 << bits) if delta % 2 == 0 else (1 << bits) - (delta + 1 >> 1)

    for log2, values in ((0, each), (3, mixed), (5, mixed)):
        one(f"extra_bits_states_{1 << log2}", f"Every token of lanes of 64 bits, with up to four rounds of extra bits; "
            f"{1 << log2} state{'s' * (log2 > 0)}.", [coded("t", "U64", None, [inverse(v) for v in values], EVERY, Plan(
                [[1]], states_log2=log2))])
    for rounds, sizes_ in ((1, (5, 15, 16)), (2, (17, 31, 32)), (3, (33, 47, 48)), (4, (49, 61, 62))):
        values = [(2 + i % 2 << e) + (1 << e) - 1 - i for i in range(3) for e in sizes_]
        one(f"extra_bits_rounds_{rounds}", f"Lanes with {', '.join(map(str, sizes_))} extra bits: {rounds} round"
            f"{'s' * (rounds > 1)}.", [coded("t", "I64", None, [inverse(v) for v in values], EVERY, Plan(
                [[1]], states_log2=1))])
    tensors = []
    for dtype, count in (("U8", 68), ("U16", 84), ("U32", 116), ("U64", 180)):
        ends = [v for least, size in map(span_of, range(count)) for v in sorted({least, least + size - 1})]
        assert ends[-1] == (1 << DTYPES[dtype][1]) - 1
        tensors.append(coded(dtype, dtype, None, [inverse(v, DTYPES[dtype][1]) for v in ends], [shared_by(range(count))],
                             Plan([[1]], states_log2=2)))
    one("tokens_of_each_width", "The first and the last value of every token that fits in lanes of each width.", tensors)
    tensors = []
    for dtype in "U16", "U32", "U64", "U8":
        bits = DTYPES[dtype][1]
        for r in sorted({0, 1, bits - 7, bits - 6, bits - 5, bits - 1}):
            values = [(1 << bits - r) - 1 - i % min(3, 1 << bits - r) for i in range(9)]
            deltas = [(-v % (1 << bits - r) << r) + i % (1 << r) if r else v for i, v in enumerate(values)]
            tensors.append(coded(f"{dtype}_{r:02}", dtype, None, [inverse(delta, bits) for delta in deltas],
                                 1 if tensors else EVERY, Plan([[1]], low_bits=r)))
    one("value_largest", "The largest values of lanes of each width, with and without low bits.", tensors)

    # Tables.
    ones = [0, 1] * 60
    one("table_of_one_token", "A table whose only token is 0, of frequency 4,096, beside one that codes the changes.",
        [coded("t", "U8", [3] * 64 + [1] * 64, [3] * 64 + [2] * 64, [row({0: 4096}), row({2: 4096})], Plan([[2, 1]], 1))],
        out.base("valid/conditioned_table_of_one_token", safetensors({"t": ("U8", [128], b"\3" * 64 + b"\1" * 64)})))
    one("frequencies_1_and_4095", "A table with frequencies of 1 and of 4,095.",
        [coded("t", "U8", None, ones, [row({0: 1, 2: 4095})], Plan([[1]]))])
    one("frequencies_of_two_bytes", "Frequencies about 128, where the second byte begins, and zeros between them.",
        [coded("t", "U8", None, [u % 5 for u in range(100)], [row({0: 127, 2: 128, 4: 129, 6: 255, 8: 256, 179: 3201})],
               Plan([[1]]))])
    fifteen = [shared_by([0, token_of(2 * max(k, 1))[0], 1], *range(40, 40 + k)) for k in range(15)]
    lanes_ = [u % 2**15 for u in pattern(300, 2, 21)]
    tensor = coded("t", "U16", lanes_, lanes_, fifteen, Plan([list(range(1, 16))], 1))
    tensor.target = bytes_of([u + (max(u.bit_length(), 1) - 1 if u.bit_length() > 1 and i % 3 else 0)
                              for i, u in enumerate(lanes_)], 2)
    one("classes_15", "15 classes, all of them used.", [tensor], over("classes_15", tensor))
    ab = [row({0: 4000, 2: 96}), row({0: 2000, 2: 96, 4: 2000})]
    shared = [coded(name, "U16", None, zeros_but_lanes(200, {i: 1, 150 + i: 1 + k % 2}), tables, Plan([[1 + k % len(set_)]]))
              for i, (k, name, tables, set_) in enumerate((
                  (0, "a", ab, ab), (1, "b", 1, ab), (0, "c", FEW, FEW), (0, "d", 2, FEW), (1, "e", 1, ab),
                  (0, "f", 2, FEW)))]
    one("sets_shared", "Two sets in the tables, of the first and the third tensor; four tensors refer to them.", shared)
    one("sets_several", "Each of three tensors has a set of its own; the first has the same bytes as the last.",
        [coded(name, "U16", None, zeros_but_lanes(150, {i: 1}), tables, Plan([[1]]))
         for i, (name, tables) in enumerate((("a", ab), ("b", FEW), ("c", ab)))])
    one("sets_unused", "Tables of an empty tensor, and of one without changes; a third refers to the first's.",
        [Tensor("a", "U16", [0, 3], b"", kind=NONE, codec=CONDITIONED, tables=ab),
         Tensor("b", "U16", [5], bytes(10), kind=NONE, codec=CONDITIONED, tables=FEW),
         coded("c", "U16", None, zeros_but_lanes(150, {5: 2}), 1, Plan([[2]])),
         Tensor("d", "U16", [5], bytes(10), kind=NONE, codec=CONDITIONED)])
    large = [coded("t", "U64", None, [inverse(v) for v in mixed], EVERY * 15, Plan([[7]], states_log2=1))]
    one("tables_compressed", "The section tables compressed by zstd.", large, section_frame=library)
    one("tables_compressed_by_hand", "The section tables as a frame of raw and run blocks.", large, files=True,
        section_frame=by_runs)

    # Bases.
    lanes_ = varied("BF16", 300, 100)
    grown = stepped("BF16", lanes_ + [0] * 150)
    tensor = coded("t", "BF16", lanes_, grown, FEW, Plan(classes, 100, states_log2=1), kind=PREFIX, rows=300)
    one("base_prefix_grown", "Base kind prefix, 300 lanes grown to 450: beyond the base contexts are those of zero.",
        [tensor], sizes[300])
    tensor = coded("t", "BF16", lanes_, stepped("BF16", lanes_[:200]), FEW, Plan(classes, 100), kind=PREFIX, rows=300)
    one("base_prefix_shrunk", "Base kind prefix, 300 lanes shrunk to 200.", [tensor], sizes[300])
    one("base_none", "Base kind none: all lanes have the context of zero.",
        [coded("t", "F32", None, [moved(0, [0, 1, -1, 3][i % 4], 4, True) for i in range(200)], FEW,
               Plan([[0, 2, 0], [2, 1, 0]], activities=[1, 1]))])

    # Floats that a comparison of values would lose.
    for dtype in ("BF16", "F32"):
        w = DTYPES[dtype][2]
        specials = [u << 8 * (w - 2) for u in (0, 0x8000, 0x0080, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x3F80)] + [
            1, (1 << 8 * w - 1) + 1, (1 << 8 * w - 1) - 1, (1 << 8 * w) - 1, (0x7F80 << 8 * (w - 2)) + 1]
        pairs = [(a, b) for a in specials for b in specials]
        tensor = coded("t", dtype, [a for a, _ in pairs], [b for _, b in pairs], EVERY, Plan(
            [[1] * 64], 192, states_log2=1))
        one(f"float_specials_{dtype.lower()}", f"{dtype} from and to each of zero, -0.0, subnormals, infinities, NaNs with "
            "payloads, and finite numbers.", [tensor], over(f"float_specials_{dtype.lower()}", tensor))

    # Several chunks and codecs.
    lanes_ = varied("BF16", 3 * 4096 + 1, 100)
    target_ = stepped("BF16", lanes_, [1, -1, 2, 3], 41)
    target_[4096:8192] = lanes_[4096:8192]
    target_[-1] = moved(lanes_[-1], 2, 2, True)
    tensor = coded("t", "BF16", lanes_, target_, FEW, [
        Plan([[1] * 64], 100, states_log2=5, segments_log2=2), None,
        Plan([[1, 2] * 16, [0] * 32], 110, [k % 2 for k in range(32)], states_log2=2, segments_log2=1), Plan([[0]])])
    one("chunks", "Four chunks with other maps, states and segments each, one of them without changes, the last of one "
        "lane.", [tensor], over("chunks", tensor), files=True)
    one("beside_other_codecs", "Tensors of all three codecs, the middle one with tables.",
        [Tensor("a", "U16", [150], zeros_but(150, 2, {3: 1}), kind=NONE, codec=RAW),
         coded("b", "U16", None, zeros_but_lanes(150, {3: 1}), FEW, Plan([[1]])),
         Tensor("c", "U16", [150], zeros_but(150, 2, {3: 1}), kind=NONE)], files=True, frame=by_hand)
    one("low_bits_in_one_chunk", "A chunk that is coded and one, of another nature, that is all low bits.",
        [coded("t", "U8", None, [1 if i % 9 == 0 else 0 for i in range(4096)] + pattern(300, 1, 7), FEW, [
            Plan([[1]], states_log2=3, segments_log2=2), Plan([[0]], low_bits=8)])])


def zeros_but_lanes(count, changes):
    return [changes.get(i, 0) for i in range(count)]


def walkthrough_tensor():
    """The second worked example: two states, two segments, activities, low bits, a value with 18 extra bits, an exception."""
    base = [1 << 20] * 260
    base[0:3], base[256:260] = [1, 4, 9], [6, 7, 8, 5]
    deltas = {0: 4 * 1 + 2, 1: 4 * 2, 2: 4 * 2 + 3, 50: 3, 100: 9, 256: 4 * 10 + 1, 257: 4 * (2**62 + 10 - 700_000), 258: 2,
              259: 4 * 1 + 1}
    target = [(u + (delta >> 1 ^ -(delta & 1))) % 2**64 for i, u in enumerate(base) for delta in [deltas.get(i, 0)]]
    tables = [row({0: 2008, 8: 1024, 9: 1000, 10: 64}), row({0: 96, 8: 2992, 9: 600, 10: 400, token_of(700_000)[0]: 8})]
    plan = Plan([[1, 2], [2, 1]], 3, [0, 0, 1], low_bits=2, center=10, states_log2=1, segments_log2=1)
    return coded("w", "I64", base, target, tables, plan)


def example_tensor():
    base = [0x3F80, 0x3C01, 0x3F85, 0x4100, 0xBFFF]
    target = [moved(u, step, 2, True) for u, step in zip(base, (1, 0, 40, -3, -1))]
    return coded("w", "BF16", base, target, [row({0: 3072, 1: 512, 2: 511, 64: 1})], Plan([[1, 0]], 127))
