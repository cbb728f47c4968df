"""The invalid vectors of codec 2, `conditioned`, of version 1.1."""

from itertools import accumulate

from .cases import flip, put
from .conditioned import Plan, row, set_bytes
from .data import CONDITIONED, NONE, RAW, bytes_of
from .pair import Model, Tensor, safetensors
from .valid_conditioned import EVERY, FEW, coded, stepped, varied, zeros_but_lanes
from .zstd import by_hand, by_runs


def invalid_conditioned_vectors(out):
    invalid_tables(out)
    invalid_payloads(out)


def invalid_tables(out):
    def index(name, about, rule, model, where=None, **edits):
        out.invalid(name, about, rule, "open_index", model, tensor=where, **edits)

    two = [row({0: 4000, 2: 96}), row({0: 2000, 2: 96, 4: 2000})]

    def pair(*tables, **options):
        """Tensors a, b and so on with these tables."""
        return Model([coded("abcd"[i], "U16", None, zeros_but_lanes(40, {i: 1}), t, Plan([[1 if t else 0]]))
                      for i, t in enumerate(tables)], minor=1, **options)

    def tables(name, about, data, model=None, where="a"):
        """`data` are the tables of `where`, instead of those of the model."""
        i = "abcd".index(where)
        index(f"tensor_tables_{name}", about, "tensor.tables", model or pair(two), where, entries=lambda d: (
            d.tables.__setitem__(i, data), d.entry[i].update(tables_size=len(data))))

    one = b"\0\0\1"  # a set of one class
    tables("no_classes", "A set of no classes.", b"\0\0\0")
    tables("16_classes", "A set of 16 classes.", b"\0\0\x10" + b"\1\x80\x20" * 16)
    tables("255_classes", "A set of 255 classes.", b"\0\0\xff" + b"\1\x80\x20" * 255)
    tables("no_tokens", "A class without tokens.", one + b"\0")
    tables("181_tokens", "A class of 181 tokens.", one + b"\xb5" + b"\x80\x1f" + b"\0" * 179 + b"\x80\1")
    tables("255_tokens", "A class of 255 tokens.", one + b"\xff" + b"\x80\x1f" + b"\0" * 253 + b"\x80\1")
    tables("sum_4095", "Frequencies that add up to 4,095.", one + b"\2\xff\x1e\x80\1")
    tables("sum_4097", "Frequencies that add up to 4,097.", one + b"\2\x81\x1f\x80\1")
    tables("sum_wraps", "Frequencies that add up to 4,096 + 2^16.", one + b"\4\x80\xff\x80\xff\x80\x20\x80\2")
    tables("sum_of_second_class", "A right class, and one whose only frequency is 5.", b"\0\0\2\1\x80\x20\1\5")
    tables("frequency_largest", "A frequency of 32,767.", one + b"\1\xff\xff")
    tables("last_frequency_zero", "The last frequency of a class is zero.", one + b"\2\x80\x20\0")
    tables("frequency_not_shortest", "A frequency of 96 in two bytes.", one + b"\2\xa0\x1f\xe0\0")
    tables("frequency_zero_of_two_bytes", "A frequency of zero in two bytes.", one + b"\2\x80\0\x80\x20")
    full = set_bytes(two)
    tables("cut_off_in_frequency", "The set ends within a frequency of two bytes.", full[:-1])
    tables("cut_off_in_class", "The set ends after a frequency, with two more to come.", full[:-3])
    tables("class_missing", "The set has a class less than it says.", b"\0\0\2\1\x80\x20")
    tables("cut_off_before_class", "The tables end after the number of classes.", b"\0\0\1")
    tables("trailing_byte", "A byte follows the set.", full + b"\0")
    tables("one_byte", "The tables have one byte.", b"\0")
    tables("reference_0", "A reference to set 0.", b"\0\0")
    tables("reference_to_itself", "The first tensor refers to set 1.", b"\1\0")
    tables("reference_forward", "A reference to the set of the tensor after it.", b"\1\0", pair(None, two))
    tables("reference_past_the_end", "A reference to set 2, of one.", b"\2\0", pair(two, 1), "b")
    tables("reference_65535", "A reference to set 65,535.", b"\xff\xff", pair(two, 1), "b")
    tables("reference_counts_tensors", "A reference that would be right if references, too, were counted.", b"\3\0",
           pair(two, 1, two, 2), "d")
    tables("reference_with_byte", "A reference of three bytes.", b"\1\0\0", pair(two, 1), "b")
    tables("reference_with_set", "A set after a reference that is not zero.", b"\1\0" + full[2:], pair(two, two), "b")
    tables("of_unchanged_tensor", "A wrong set of a tensor without changes.", b"\0\0\0", Model(
        [Tensor("a", "U16", [5], bytes(10), kind=NONE, codec=CONDITIONED)], minor=1))
    tables("of_empty_tensor", "A wrong set of an empty tensor.", b"\0\0\0", Model(
        [Tensor("a", "U16", [0], b"", kind=NONE, codec=CONDITIONED)], minor=1))

    index("tensor_tables_size_of_codec_raw", "A set for a tensor of codec raw, between two that may have one.",
          "tensor.tables_size", Model([coded("a", "U8", None, [1], two, Plan([[1]])),
                                       Tensor("b", "U8", [1], b"\1", kind=NONE, codec=RAW, tables=two),
                                       coded("c", "U8", None, [1], two, Plan([[1]]))], minor=1), "b")
    index("tensor_tables_size_above", "tables_size of the last tensor reaches beyond the section.", "tensor.tables_size",
          pair(two), entries=put("entry", 0, tables_size=len(full) + 1))
    index("tensor_tables_size_below", "A byte of the section tables that no tensor claims.", "tensor.tables_size",
          pair(two), entries=put("entry", 0, tables_size=len(full) - 1))
    index("tensor_tables_size_wraps", "Two tables_size whose sum is right in 32 bits.", "tensor.tables_size",
          pair(two, two), entries=lambda d: (d.entry[0].update(tables_size=2**31), d.entry[1].update(
              tables_size=2**31 + 2 * len(full))))
    index("tensor_codec_3", "Codec 3, which is not assigned.", "tensor.codec", pair(two), "a",
          entries=put("entry", 0, codec=3))

    def padded(draft):
        entry = draft.section[5]
        assert entry["stored_size"] % 8
        draft.body = flip(-1)(draft.body)

    index("section_padding_tables", "The last byte of the padding after the section tables is not zero.",
          "section.padding", pair(EVERY), sections=padded)

    def frame_case(name, about, function):
        index(f"section_frame_tables_{name}", f"The section tables: {about}.", "section.frame",
              pair(EVERY * 15, section_frame=by_runs), stored=lambda d: d.store.__setitem__(
                  5, function(d.store[5], d.tables_section)))

    frame_case("cut_off", "the frame is cut off", lambda f, c: f[:-1])
    frame_case("trailing_byte", "a byte follows the frame", lambda f, c: f + b"\0")
    frame_case("content_size", "the frame states and has one byte less", lambda f, c: by_runs(c[:-1]))
    frame_case("dictionary", "the frame names a dictionary", lambda f, c: by_hand(c, runs=True, dictionary=7))


def invalid_payloads(out):
    lanes = varied("BF16", 1100, 100)
    target = stepped("BF16", lanes, p=23)
    base = out.base("invalid/conditioned", safetensors({"t": ("BF16", [1100], bytes_of(lanes, 2))}))
    # The pair that most vectors modify: two tiles, the last of which has one block. Lane i has context
    # 100 + i mod 70; contexts 106, 113 and so on have class 0. Lane i changes where i mod 23 = 2.
    maps = [[1, 2, 3, 1, 2, 3, 0] * 5, [3] * 6 + [0] + [2] * 28]
    activities = [0, 1, 0, 0, 1, 1, 0, 1, 0]
    usual = Plan(maps, 100, activities, states_log2=1, segments_log2=1)
    low = Plan(maps, 100, activities, low_bits=3, center=15, states_log2=2, segments_log2=1)
    uneven = Plan([maps[0][:33]], 100, segments_log2=1)  # with a map of 17 bytes, and so a byte of padding

    def bad(name, about, rule, edit=lambda p: None, plan=usual, tables=FEW, dtype="BF16", old=lanes, new=target,
            when="decode", **edits):
        """`edit` changes the `Payload`; with `old` None there is no base."""
        tensor = coded("t", dtype, old, new, tables, plan)
        out.invalid(name, about, rule, when, Model([tensor], minor=1), base if old is lanes else None, tensor="t", chunk=0,
                    contents=lambda d: edit(d.content[0]), **edits)

    def with_header(**fields):
        return lambda p: p.header.update(fields)

    def with_part(name, function):
        return lambda p: p.edits.update({name: function})

    # The header.
    def header(name, about, **options):
        bad(f"payload_header_{name}", about, "payload.header", **options)

    header("low_bits_17", "17 low bits of lanes of 16.", edit=with_header(low_bits=17))
    header("low_bits_255", "255 low bits.", edit=with_header(low_bits=255))
    header("states_64", "64 states.", plan=Plan(maps[:1], 100, states_log2=6))
    header("states_2_255", "2^255 states, a shift too far.", edit=with_header(states_log2=255))
    header("segments_64", "64 segments of two tiles.", edit=with_header(segments_log2=6))
    header("segments_2_32", "2^32 segments, which a shift may take for 1.", edit=with_header(segments_log2=32))
    header("segments_above_tiles", "Four segments of two tiles, with nine blocks.", plan=Plan(maps[:1], 100, segments_log2=2))
    for dtype, count in (("U8", 1024), ("I16", 1024), ("F32", 512), ("F64", 256)):
        header(f"segments_of_one_tile_{dtype.lower()}", f"Two segments of one whole tile: {count:,} lanes of {dtype}.",
               dtype=dtype, plan=Plan([[1]], segments_log2=1), old=None, new=[1] + [0] * (count - 1))
    header("segments_32_of_31_tiles", "32 segments of 31 tiles.", dtype="I64", plan=Plan([[1]], segments_log2=5), old=None,
           new=[1] + [0] * (31 * 256 - 1))
    header("activity_bits_3", "Activities of three bits.", edit=with_header(activity_bits=3))
    header("activity_bits_255", "Activities of 255 bits.", edit=with_header(activity_bits=255))
    header("context_count_0", "No contexts.", edit=with_header(context_count=0))
    header("context_count_65", "65 contexts.", plan=Plan([[1, 2, 3, 1, 2] * 13], 100))
    header("reserved_1", "The reserved byte is 1.", edit=with_header(reserved=1))
    header("reserved_128", "The reserved byte is 128.", edit=with_header(reserved=128))
    header("exception_count_above_num_deltas", "An exception more than the record has changes.", plan=Plan([[0]]),
           records=put("record", 0, num_deltas=47))
    header("exception_count_largest", "2^32 - 1 exceptions.", edit=with_header(exception_count=2**32 - 1))
    header("center_without_low_bits", "A center where there are no low bits.", edit=with_header(center=1))
    header("center_2_13", "Three low bits of 16, and a center of 2^13.",
           plan=Plan(maps[:1], 100, low_bits=3, center=2**13, states_log2=2), tables=EVERY * 3)
    header("center_with_all_low_bits", "16 low bits, and a center of 1.", edit=with_header(center=1),
           plan=Plan([[0]], low_bits=16))

    # Classes.
    def entry(m, i, value):
        def edit(p):
            p.maps = [list(classes) for classes in p.maps]
            p.maps[m][i] = value
        return edit

    bad("payload_classes_above", "A map with class 4, of three.", "payload.classes", entry(0, 2, 4))
    bad("payload_classes_15", "A map with class 15, of three.", "payload.classes", entry(1, 3, 15))
    bad("payload_classes_unused_entry", "The entry with class 4 is of a context that no lane has.", "payload.classes",
        entry(0, 2, 4), plan=Plan([[1, 0, 1]], 260))
    bad("payload_classes_unused_map", "The map with class 4 is of an activity that no block has.", "payload.classes",
        entry(1, 2, 4), plan=Plan(maps, 100, [0] * 9))
    bad("payload_classes_without_tables", "A map with class 1 for a tensor without tables.", "payload.classes",
        entry(0, 0, 1), plan=Plan([[0, 0]], 100), tables=None)
    bad("payload_classes_of_shared_set", "A map with a class that the other set has, not this tensor's.",
        "payload.classes", entry(0, 0, 2), plan=Plan([[1, 1]]), tables=[row({0: 2048, 2: 2048})], old=None,
        new=[0, 1] * 50)
    bad("payload_classes_rest_of_map", "The half byte that fills the last map is not zero.", "payload.classes",
        with_part("maps", flip(-1, 0x10)))
    bad("payload_classes_rest_of_first_map", "The half byte that fills the first map is not zero.", "payload.classes",
        with_part("maps", flip(17, 0x10)))

    # Sizes of parts.
    def size(name, about, edit, **options):
        bad(f"payload_size_conditioned_{name}", about, "payload.size", edit, **options)

    def cut(part, less):
        """The payload ends `less` bytes before the end of the part."""
        def edit(p):
            sizes, before = {}, b""
            for name, make in p.parts().items():
                sizes[name] = len(make(before))
                before += bytes(sizes[name])
            assert sizes[part] >= less, (part, sizes)
            p.edits["all"] = lambda data: data[:dict(zip(sizes, accumulate(sizes.values())))[part] - less]
        return edit

    size("header", "The payload ends within its header.", cut("header", 1))
    size("one_byte", "The payload has one byte.", cut("header", 15))
    size("maps", "The payload ends within the second map.", cut("maps", 1))
    size("activities", "The payload ends before the activities.", cut("activities", 1))
    size("exceptions", "The payload ends within the deltas of the exceptions.", cut("exceptions", 1))
    size("exceptions_positions", "The payload ends after the first position of the exceptions.",
         lambda p: cut("exceptions", 6 * len(p.exceptions) - 4)(p))
    size("low_bits", "The payload ends within the low bits.", cut("low_bits", 1), plan=low, tables=EVERY * 3)
    size("sizes", "The payload ends within the size of the first segment.", cut("sizes", 1))
    size("padding", "The payload ends before the byte of padding.", cut("padding", 1), plan=uneven)
    size("padding_byte", "The byte of padding is not zero.", with_part("padding", lambda part: b"\1"), plan=uneven)
    size("rest_of_activities", "The rest of the last byte of activities is not zero.", with_part("activities", flip(-1, 2)))
    size("rest_of_low_bits", "The rest of the last byte of low bits is not zero.", with_part("low_bits", flip(-1, 16)),
         plan=low, tables=EVERY * 3)
    size("half_word", "A byte follows the last word.", with_part("streams", lambda part: part + b"\0"))
    size("half_word_missing", "The last word has one byte.", with_part("streams", lambda part: part[:-1]))
    size("segment_too_large", "The first segment has a word more than the payload has left.",
         with_part("sizes", lambda part: bytes_of([1000], 4)))
    size("segment_largest", "The first segment has 2^32 - 1 words.", with_part("sizes", lambda part: b"\xff" * 4))
    size("segments_wrap", "Segment sizes whose sum, in bytes, is right in 32 bits.",
         lambda p: p.edits.update(sizes=lambda part: bytes_of([len(p.streams[0][1]) + 4 + 2**31], 4)))

    # Streams.
    def stream(name, about, edit, **options):
        bad(f"payload_stream_{name}", about, "payload.stream", edit, **options)

    def with_stream(s, function):
        """`function` gives other states and words."""
        def edit(p):
            old, p.streams[s] = p.streams[s], function(*p.streams[s])
            assert p.streams[s] != old
        return edit

    still = Plan([[0, 1], [0, 0]], 100, [0] * 8 + [1], states_log2=2, segments_log2=1)  # segment 1 has no coded lanes
    alone = Plan([[1]], 100, states_log2=5)  # at most 15 coded lanes in a tile, 32 states
    stream("word_missing", "The last word is missing.", with_stream(-1, lambda x, words: (x, words[:-1])))
    stream("word_missing_in_segment", "The last word of the first segment is missing.",
           with_stream(0, lambda x, words: (x, words[:-1])))
    stream("words_missing", "All words of the last segment are missing.", with_stream(-1, lambda x, words: (x, [])))
    stream("word_left", "A word follows the last.", with_stream(-1, lambda x, words: (x, words + [0])))
    stream("word_left_in_segment", "A word follows the last of the first segment.",
           with_stream(0, lambda x, words: (x, words + [1])))
    stream("word_left_without_coded_lanes", "A word in a segment without coded lanes.",
           with_stream(1, lambda x, words: (x, [0])), plan=Plan([[0]], segments_log2=1))
    stream("boundary_early", "The first segment ends a word early; the second one has it.", lambda p: p.edits.update(
        sizes=lambda part: bytes_of([len(p.streams[0][1]) + 3], 4)))
    stream("boundary_late", "The first segment ends a word late, with one that is the second's.", lambda p: p.edits.update(
        sizes=lambda part: bytes_of([len(p.streams[0][1]) + 5], 4)))
    stream("states_cut_off", "The last segment ends within its states.",
           with_part("streams", lambda part: part[:-2]), plan=still)
    stream("states_missing", "The last segment has no bytes.", with_part("streams", lambda part: part[:-16]), plan=still)
    stream("segment_of_no_words", "The first segment has no words.", with_stream(0, lambda x, words: ([], [])))
    stream("segment_of_one_word", "The first segment has one word.", lambda p: p.edits.update(
        sizes=lambda part: b"\1\0\0\0", streams=lambda part: part[:2] + part[2 * (len(p.streams[0][1]) + 4):]))
    stream("state_65535", "A state of 2^16 - 1.", with_stream(0, lambda x, words: ([x[0], 65535], words)))
    stream("state_0", "A state of zero.", with_stream(-1, lambda x, words: ([0, x[1]], words)))
    stream("state_1", "A state of 1, which the first lane leaves as it is and which a word then makes 2^16: all values and "
           "the end are right.", with_stream(0, lambda x, words: ([1], [0])), plan=Plan([[1]], exceptions=(50,)),
           tables=[row({0: 4096})], old=None, new=zeros_but_lanes(100, {50: 1}))
    stream("unused_state_0", "A state that nothing uses is zero.", with_stream(0, lambda x, words: (x[:-1] + [0], words)),
           plan=alone)
    stream("unused_state_not_at_the_end", "A state that nothing uses is 2^16 + 1.",
           with_stream(0, lambda x, words: (x[:-1] + [2**16 + 1], words)), plan=alone)
    stream("end_state", "The states end at 2^16 + 1; all values are right.", lambda p: p.code(2**16 + 1))
    stream("end_state_of_one", "One state of two ends at 2^17, all values are right.",
           lambda p: p.code([2**16, 2**17]), plan=Plan(maps[:1], 100, states_log2=1))

    # Exceptions.
    def exceptions(name, about, function, rule="payload.positions", **options):
        """`function` gives the new pairs of a position and a delta."""
        def edit(p):
            pairs = function(list(p.exceptions.items()))
            p.header["exception_count"] = len(pairs)
            p.edits["exceptions"] = lambda part: bytes_of([i for i, _ in pairs], 4) + bytes_of([d for _, d in pairs], p.w)
        bad(f"{rule.replace('.', '_')}_exception_{name}", about, rule, edit, **options)

    exceptions("order", "Two exceptions exchanged.", lambda e: [e[1], e[0], *e[2:]])
    exceptions("twice", "A position twice.", lambda e: [e[0], e[0], *e[2:]])
    exceptions("past_the_end", "An exception after the last lane, within the size of a whole chunk.",
               lambda e: [*e[:-1], (1100, e[-1][1])])
    exceptions("largest", "An exception at 2^32 - 1.", lambda e: [*e[:-1], (2**32 - 1, e[-1][1])])
    exceptions("of_coded_change", "An exception of a lane whose value is not 0.", lambda e: [(2, 9), *e[1:]])
    exceptions("of_low_bits", "An exception of a lane whose value is 0 and whose low bits are not.",
               lambda e: [(6, 9), *e], plan=low, tables=EVERY * 3, new=[u ^ (i == 6) for i, u in enumerate(target)])
    exceptions("zero", "An exception more, with a delta of zero, of a lane that does not change.", lambda e: sorted(
        [*e, (6, 0)]), "payload.deltas")

    # Values and counts.
    def deltas(name, about, edit=lambda p: None, **options):
        bad(f"payload_deltas_conditioned_{name}", about, "payload.deltas", edit, **options)

    def value(v, i=0, tile=0):
        def edit(p):
            p.tiles[tile][i] = p.tiles[tile][i][0], v
            p.code()
        return edit

    few = lambda count, w=1: [(i % 7 == 0) * 1 for i in range(count)]  # noqa: E731
    deltas("value_256", "A value of 256 in lanes of 8 bits.", value(256, 7), dtype="U8", plan=Plan([[1]]), old=None,
           new=few(100), tables=EVERY)
    deltas("value_32", "A value of 32, a token without extra bits, in lanes of 8 bits with three low bits.", value(32, 1),
           dtype="U8", plan=Plan([[1]], low_bits=3), old=None, new=few(100), tables=EVERY)
    deltas("value_64", "A value of 64 in lanes of 8 bits with two low bits.", value(64, 1), dtype="U8",
           plan=Plan([[1]], low_bits=2), old=None, new=few(100), tables=EVERY)
    deltas("value_2_16", "A value of 2^16 in lanes of 16 bits.", value(2**16, 9, 1), tables=EVERY * 3,
           plan=Plan(maps[:1], 100, segments_log2=1))
    deltas("value_2_32", "A value of 2^32 in lanes of 32 bits.", value(2**32), dtype="F32", plan=Plan([[1]]), old=None,
           new=few(100), tables=EVERY)
    deltas("value_2_64_less_1", "A value of 2^64 - 1 in lanes of 32 bits.", value(2**64 - 1, 99), dtype="I32",
           plan=Plan([[1]]), old=None, new=few(100), tables=EVERY)
    deltas("value_2_13", "A value of 2^13 in lanes of 16 bits with three low bits.", value(2**13), plan=low,
           tables=EVERY * 3)
    deltas("value_2_63", "A value of 2^63 in lanes of 64 bits with one low bit.", value(2**63, 1), dtype="U64",
           plan=Plan([[1]], low_bits=1), old=None, new=few(100), tables=EVERY)
    deltas("value_with_all_low_bits", "A value of 1 where all bits are low bits.", value(1), dtype="U8",
           plan=Plan([[1]], low_bits=8), old=None, new=few(100), tables=[row({0: 4000, 1: 96})])
    deltas("value_zero", "A value of 0 for a lane that changes.", value(0, 2))
    deltas("value_of_unchanged_lane", "A value for a lane that does not change.", value(1, 0))
    deltas("low_bit_of_unchanged_lane", "A low bit of a lane that does not change.", with_part("low_bits", flip(0)), plan=low,
           tables=EVERY * 3)
    deltas("fewer", "A change fewer than the record has.", records=put("record", 0, num_deltas=49))
    deltas("more", "A change more than the record has.", records=put("record", 0, num_deltas=47))
    deltas("exception_missing", "An exception fewer than the record has.", lambda p: (
        p.exceptions.popitem(), p.header.update(exception_count=len(p.exceptions))))

    # The record.
    def sizes(name, about, **options):
        bad(f"record_sizes_conditioned_{name}", about, "record.sizes", when="open_index", **options)

    sizes("above", "uncompressed_size one lane above that of the lanes.", records=put("record", 0, uncompressed_size=2202))
    sizes("below", "uncompressed_size one byte below that of the lanes.", records=put("record", 0, uncompressed_size=2199))
    sizes("of_whole_chunk", "uncompressed_size is that of a whole chunk.",
          records=put("record", 0, uncompressed_size=2 * 4096))
    sizes("of_payload", "uncompressed_size is that of the payload.", records=lambda d: d.record[0].update(
        uncompressed_size=d.record[0]["compressed_size"]))
    sizes("compressed", "One lane with 32 states: the payload is larger than its bound.",
          plan=Plan([[1]], states_log2=5), old=None, new=[1], tables=EVERY)
