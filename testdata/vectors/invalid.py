"""The invalid vectors of version 1.0."""

import json
import struct
import zlib

from blake3 import blake3

from .cases import at, flip, put, replace, set_byte, zeros_but
from .data import (AS_BASE, DTYPES, ELIAS, GAPS, HEADER_OF_BASE, LAYOUTS, M64, NIBBLE_GAPS, NIBBLE_PLANES, NONE, PLANES,
                   PREFIX, RAW, VERBATIM, ZSTD, bytes_of, lanes_of, moved, pattern, raw_name, up)
from .pair import Draft, File, Model, Tensor, change, head_of, lone, safetensors
from .zstd import by_hand, by_runs, encode, packed_bits, raw_payload


def invalid_vectors(out):
    # Most vectors change one thing in this pair. Records: a 0; b 1 and 2; c 3 and 4 (without changes); d 5.
    rows = {"a": ("F32", [5], bytes_of(pattern(5, 4, 1), 4)), "b": ("BF16", [3, 1400], bytes_of(pattern(4200, 2, 2), 2)),
            "c": ("U8", [4100], bytes_of(pattern(4100, 1, 3), 1))}
    base = out.base("invalid/small", safetensors(rows))

    def small(**options):
        a, b, c = (row[2] for row in rows.values())
        tensors = [Tensor("a", "F32", [5], change(a, "F32", [1, -1], 2), a, codec=RAW),
                   Tensor("b", "BF16", [3, 1400], change(b, "BF16", [1, -1, 40], 599, 5), b, layout=NIBBLE_GAPS),
                   Tensor("c", "U8", [4100], change(c[:4096], "U8", [3], 1999) + c[4096:], c),
                   Tensor("d", "I16", [6], bytes_of([0, 1, 2, 3, 0, 65535], 2), kind=NONE, codec=RAW)]
        model = Model(tensors, lone(tensors), frame=by_hand)
        for key, value in options.items():
            setattr(model, key, value)
        return model

    def bad(name, about, rule, when, *, where=None, chunk=None, model=None, over=base, error=None, **edits):
        return out.invalid(name, about, rule, when, model or small(), over, tensor=where, chunk=chunk, error=error,
                           **edits)

    def index(name, about, rule, where=None, chunk=None, model=None, over=base, **edits):
        return bad(name, about, rule, "open_index", where=where, chunk=chunk, model=model, over=over, **edits)

    # The index file's header.
    index("header_magic", "The first byte has lost its top bit.", "header.magic", header=put("head", magic=b"\x09TPI\r\n\x1a\n"))
    index("header_magic_crlf", "The magic as after a conversion of line ends.", "header.magic",
          header=put("head", magic=b"\x89TPI\n\x1a\n\0"))
    model = small()
    model.tensors[3] = Tensor("d", "I16", [60], bytes_of(range(60), 2), kind=NONE, codec=RAW)
    model.files = lone(model.tensors)
    draft = index("swapped_files", "Index and blob have changed places.", "header.magic", model=model)
    stem = "invalid/swapped_files"
    assert len(draft.blob_file) >= 256
    out.files[stem + ".tpde-index"], out.files[stem + ".tpde-blob"] = draft.blob_file, draft.index_file
    index("header_version_major_2", "Major version 2.", "header.version_major", header=put("head", version_major=2),
          blob_header=put("blob_head", version_major=2))
    index("header_version_major_0", "Major version 0.", "header.version_major", header=put("head", version_major=0),
          blob_header=put("blob_head", version_major=0))

    def big_endian(draft):
        data = struct.pack(">8sHHIQQQQIIII", *draft.head.values()) + b"".join(
            struct.pack(">QQQ", *s.values()) for s in draft.section) + draft.tail
        draft.start = data + struct.pack(">I", zlib.crc32(data))

    index("header_big_endian", "All fields of the header are big-endian.", "header.version_major",
          header_bytes=big_endian)
    index("header_size_252", "header_size 252.", "header.header_size", header=put("head", header_size=252))
    index("header_size_264", "header_size 264.", "header.header_size", header=put("head", header_size=264))
    index("header_crc32", "A bit of the header's CRC is flipped.", "header.crc32", header_bytes=replace("start", flip(255)))
    index("header_crc32_of_flipped_bit", "A bit of an ignored field is flipped; only the CRC shows it.", "header.crc32",
          header_bytes=replace("start", flip(24)))
    index("header_required_features_bit_0", "A required feature that no reader of 1.0 knows.",
          "header.required_features", header=put("head", required_features=1))
    index("header_required_features_bit_63", "The last required feature bit.", "header.required_features",
          header=put("head", required_features=2**63))
    index("header_reserved_60", "The reserved field at 60 is not zero.", "header.reserved", header=put("head", reserved=1))
    index("header_reserved_208", "The first reserved byte at 208 is not zero.", "header.reserved",
          header=replace("tail", flip(0)))
    index("header_reserved_251", "The last reserved byte is not zero.", "header.reserved", header=replace("tail", flip(43, 128)))
    index("header_chunk_count_2_31", "chunk_count 2^31.", "header.chunk_count", header=put("head", chunk_count=2**31))
    index("header_chunk_count_largest", "chunk_count 2^32 - 1, which times 32 overflows 32 bits.", "header.chunk_count",
          header=put("head", chunk_count=2**32 - 1))
    index("header_tensor_count", "tensor_count 2^24 + 1.", "header.tensor_count", header=put("head", tensor_count=2**24 + 1))
    index("header_file_count", "file_count 2^16 + 1.", "header.file_count", header=put("head", file_count=2**16 + 1))
    spare = {"blob_offset": 0, "compressed_size": 0, "uncompressed_size": 0, "num_deltas": 0, "crc32": 0, "output_offset": 0}

    def one_record_more(draft):
        last = draft.record[-1]
        draft.record.append({**spare, "blob_offset": up(last["blob_offset"] + last["compressed_size"], 16)})
        draft.sums.append({"base_sum": 0, "target_sum": 0})

    index("header_chunk_count_one_more", "One record more than the tensors have chunks.", "header.chunk_count",
          records=one_record_more)

    def one_record_less(draft):
        del draft.record[-1], draft.sums[-1]

    model = small()
    model.tensors[3].target = bytes(12)
    index("header_chunk_count_one_less", "One record less than the tensors have chunks.", "header.chunk_count",
          model=model, records=one_record_less)
    index("index_empty", "The index has no bytes.", "header.index_size", index=replace("index_file", lambda data: b""))
    index("index_of_255_bytes", "The index ends within its header.", "header.index_size",
          index=replace("index_file", lambda data: data[:255]))

    def header_alone(draft):
        draft.head["index_size"] = 351
        draft.header_bytes()
        draft.index_file = (draft.start + draft.body)[:351]

    index("index_of_351_bytes", "The index is shorter than any can be, and says so.", "header.index_size",
          index=header_alone)
    index("index_truncated", "The last byte of the index is missing.", "header.index_size",
          index=replace("index_file", lambda data: data[:-1]))
    index("index_truncated_in_records", "The index ends within its records.", "header.index_size",
          index=replace("index_file", lambda data: data[:400]))
    index("index_trailing_byte", "A byte follows the index.", "header.index_size",
          index=replace("index_file", lambda data: data + b"\0"))
    index("index_size_field", "index_size is 8 too large.", "header.index_size",
          header=lambda d: d.head.update(index_size=d.head["index_size"] + 8))
    index("index_gap_before_digest", "Eight zero bytes more before the pair digest, counted in index_size.",
          "header.index_size", sections=replace("body", lambda data: data + bytes(8)))

    # Sections.
    def section(i, key, function):
        return lambda draft: draft.section[i].update({key: function(draft.section[i][key]) % M64})

    def shifted(draft):  # everything after the header 8 bytes later
        draft.body = bytes(8) + draft.body
        for entry in draft.section:
            entry["offset"] += 8

    index("sections_first_offset", "The first section begins at 264, after a gap of zeros.", "header.sections",
          sections=shifted)

    def gap_before_files(draft):
        files = draft.section[4]["offset"] - 256
        draft.body = draft.body[:files] + bytes(8) + draft.body[files:]
        for entry in draft.section[4:]:
            entry["offset"] += 8

    index("sections_gap", "Eight zero bytes too many before the section files.", "header.sections",
          sections=gap_before_files)
    index("sections_overlap", "The section sums begins within the section chunks.", "header.sections",
          sections=section(1, "offset", lambda x: x - 8))
    index("sections_offset_unaligned", "The offset of the section files is not a multiple of 8.", "header.sections",
          sections=section(4, "offset", lambda x: x - 1))
    index("sections_swapped", "The entries of the sections tensors and files have changed places.", "header.sections",
          sections=lambda d: d.section.__setitem__(slice(3, 5), [d.section[4], d.section[3]]))
    index("sections_chunks_expanded_size", "The expanded size of the section chunks is 32 too large.", "header.sections",
          sections=section(0, "expanded_size", lambda x: x + 32))
    index("sections_chunks_stored_size", "The section chunks pretends to be compressed.", "header.sections",
          sections=section(0, "stored_size", lambda x: x - 32))
    index("sections_sums_size", "The section sums is 16 bytes short in both sizes.", "header.sections",
          sections=lambda d: d.section[1].update(stored_size=16 * 5, expanded_size=16 * 5))
    index("sections_digests_size", "The section digests has 32 bytes too many in both sizes.", "header.sections",
          stored=lambda d: (d.store.__setitem__(2, d.store[2] + bytes(32)), d.expanded.__setitem__(2, d.expanded[2] + 32)))
    index("sections_stored_above_expanded", "The stored size of the section tensors is above its expanded one.",
          "header.sections", sections=section(3, "expanded_size", lambda x: x - 1))
    index("sections_size_wraps", "The stored size of the section tensors makes its end wrap to its beginning.",
          "header.sections", sections=lambda d: d.section[3].update(stored_size=M64 - 8, expanded_size=M64 - 8))
    index("sections_align_wraps", "The end of the section tables wraps only once it is aligned.",
          "header.sections", sections=lambda d: d.section[5].update(
              stored_size=M64 - 1 - d.section[5]["offset"], expanded_size=M64 - 1 - d.section[5]["offset"]))
    index("sections_past_the_end", "The section files reaches beyond the file.", "header.sections",
          sections=lambda d: d.section[4].update(stored_size=2**20, expanded_size=2**20))
    index("section_padding_tensors", "A byte of the padding after the section tensors is not zero.", "section.padding",
          sections=lambda d: setattr(d, "body", flip(d.section[4]["offset"] - 256 - 1)(d.body)))

    def padded_last(draft):
        files = draft.section[4]
        assert files["stored_size"] % 8 == 7
        draft.body = flip(files["offset"] - 256 + files["stored_size"])(draft.body)

    model = small()
    model.files[0].name = "x" * 27 + ".safetensors"
    index("section_padding_files", "The padding after the section files, before the empty section tables, is not zero.",
          "section.padding", model=model, sections=padded_last)
    index("index_digest", "A bit of the pair digest is flipped, and the blob quotes it.", "index.digest",
          index=replace("index_file", flip(-1)))
    index("index_digest_of_flipped_sum", "A bit of a chunk's sum is flipped; only the pair digest shows it at opening.",
          "index.digest", index=replace("index_file", flip(256 + 32 * 6 + 3)))
    index("index_digest_truncated_hash", "The pair digest is 16 bytes of the hash and 16 zeros.", "index.digest",
          index=replace("index_file", lambda data: data[:-16] + bytes(16)))

    # Compressed sections.
    def wide(**options):
        model = small(section_frame=by_runs, **options)
        model.tensors[3].name = "d" * 300
        model.files = lone(model.tensors)
        return model

    def stored(i, function):
        return lambda d: d.store.__setitem__(i, function(d.store[i], (d.tensors_section, d.files_section)[i - 3]))

    def frame_case(name, about, function, i=3):
        index(f"section_frame_{name}", f"The section {('tensors', 'files')[i - 3]}: {about}.", "section.frame",
              model=wide(), stored=stored(i, function))

    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
    frame_case("not_zstd", "no zstd magic", lambda f, c: flip(0)(f))
    frame_case("cut_off", "the frame is cut off", lambda f, c: f[:-1])
    frame_case("trailing_byte", "a byte follows the frame", lambda f, c: f + b"\0", 4)
    frame_case("trailing_frame", "an empty frame follows the frame", lambda f, c: f + by_hand(b""))
    frame_case("skippable_after", "a skippable frame follows the frame", lambda f, c: f + skippable)
    frame_case("skippable_before", "a skippable frame precedes the frame", lambda f, c: skippable + f)
    frame_case("dictionary", "the frame names a dictionary", lambda f, c: by_hand(c, runs=True, dictionary=7))
    frame_case("window", "the window is 2^28 bytes", lambda f, c: by_hand(c, runs=True, window=18 << 3))
    frame_case("no_content_size", "the frame states no content size", lambda f, c: by_hand(c, runs=True, size=None), 4)
    frame_case("content_size_low", "the frame states and has one byte less", lambda f, c: by_runs(c[:-1]))
    frame_case("content_size_high", "the frame states and has one byte more", lambda f, c: by_runs(c + b"\0"))
    frame_case("bomb", "the blocks give more than the frame states",
               lambda f, c: by_hand(c + bytes(2**17), runs=True, size=len(c)))
    frame_case("too_little", "the blocks give less than the frame states",
               lambda f, c: by_hand(c[:-1], runs=True, size=len(c)))
    frame_case("checksum", "the content checksum is wrong", lambda f, c: by_hand(c, runs=True, checksum=b"\1\2\3\4"))
    frame_case("empty", "no bytes are stored for a section that is not empty", lambda f, c: b"")
    frame_case("reserved_block", "a block has the reserved kind",
               lambda f, c: reserved_block(f))
    index("limit_section", "The expanded size of the section tensors is 2^40.", "limit", model=wide(),
          stored=lambda d: (d.expanded.__setitem__(3, 2**40),
                            d.store.__setitem__(3, by_hand(d.tensors_section, size=2**40, single=False))))

    # The tensor table.
    index("tensors_size_byte_over", "A byte follows the names.", "tensors.size",
          tensors=replace("tensors_section", lambda data: data + b"\0"))
    index("tensors_size_byte_short", "The last name is cut off.", "tensors.size",
          tensors=replace("tensors_section", lambda data: data[:-1]))
    index("tensors_size_no_room_for_entries", "The section is shorter than its entries.", "tensors.size",
          tensors=replace("tensors_section", lambda data: data[:39]))
    index("tensors_size_empty", "The section is empty, though there are tensors.", "tensors.size",
          tensors=replace("tensors_section", lambda data: b""))
    index("tensors_size_name_size", "name_size reaches beyond the section.", "tensors.size",
          entries=put("entry", 3, name_size=4096))

    def renamed(name, about, rule, value, i=1, **facts):
        model = small()
        model.tensors[i].name = value
        model.files = []
        index(name, about, rule, model=model, **facts)

    renamed("tensor_name_empty", "A tensor without a name.", "tensor.name", b"", 0)
    renamed("tensor_name_long", "A name of 4,097 bytes.", "tensor.name", "b" * 4097)
    renamed("tensor_name_not_utf8", "A name with a lone continuation byte.", "tensor.name", b"b\x80")
    renamed("tensor_name_overlong", "A name with an overlong form of a slash.", "tensor.name", b"b\xc0\xaf")
    renamed("tensor_name_surrogate", "A name with a surrogate in UTF-8.", "tensor.name", b"b\xed\xa0\x80")
    renamed("tensor_name_cut", "A name that ends within a character.", "tensor.name", b"b\xc3")
    renamed("tensor_name_nul", "A name with a NUL.", "tensor.name", b"b\0")
    renamed("tensor_name_order", "The second name is below the first.", "tensor.name_order", "A")
    renamed("tensor_name_twice", "Two tensors of one name.", "tensor.name_order", "a")
    renamed("tensor_name_order_of_bytes", "Names in the order of UTF-16, not of bytes.", "tensor.name_order",
            "\U00010000", 2, entries=lambda d: (d.names.__setitem__(3, "\uffee".encode()),
                                                d.entry[3].update(name_size=3)))

    def based(name, about, value, i=1, size=None):
        model = small()
        model.tensors[i].base_name = value
        index(name, about, "tensor.base_name", where=model.tensors[i].name, model=model)

    based("tensor_base_name_long", "A base name of 4,097 bytes.", "n" * 4097)
    based("tensor_base_name_not_utf8", "A base name that is not UTF-8.", b"\xff")
    based("tensor_base_name_nul", "A base name with a NUL.", b"x\0")
    based("tensor_base_name_equal", "A base name that equals the name.", "b")
    based("tensor_base_name_of_none", "A base name for base kind none.", "x", 3)

    def entry(name, about, rule, i, **fields):
        index(name, about, rule, where="abcd"[i], entries=put("entry", i, **fields))

    entry("tensor_dtype_9", "dtype 9.", "tensor.dtype", 1, dtype=9)
    entry("tensor_dtype_51", "dtype 51.", "tensor.dtype", 1, dtype=51)
    entry("tensor_dtype_private", "A private dtype.", "tensor.dtype", 1, dtype=0x8000)
    index("tensor_rank", "Rank 33, dims all 1.", "tensor.rank", where="d",
          entries=lambda d: (d.entry[3].update(rank=33), d.dims[3].extend([1] * 32)))
    entry("tensor_base_kind_3", "Base kind 3, which is reserved.", "tensor.base_kind", 1, base_kind=3)
    entry("tensor_base_kind_4", "Base kind 4, which is reserved.", "tensor.base_kind", 1, base_kind=4)
    entry("tensor_base_kind_private", "A private base kind.", "tensor.base_kind", 1, base_kind=0x8000)
    # In 1.0 codec 2 was reserved, and the rule was `tensor.codec`. The bytes are unchanged, but a reader of 1.1 reports another rule.
    index("tensor_codec_2", "Codec 2 for chunks that are those of codec zstd.", "record.sizes", where="b", chunk=1,
          entries=put("entry", 1, codec=2))
    entry("tensor_codec_private", "A private codec.", "tensor.codec", 1, codec=0x8001)
    entry("tensor_codec_never", "Codec 0xFFFF, which is never assigned.", "tensor.codec", 1, codec=0xFFFF)
    entry("tensor_chunk_lanes_11", "Chunks of 2^11 lanes.", "tensor.chunk_lanes", 3, chunk_lanes_log2=11)
    entry("tensor_chunk_lanes_0", "Chunks of one lane.", "tensor.chunk_lanes", 3, chunk_lanes_log2=0)
    entry("tensor_chunk_lanes_22", "Chunks of 2^22 lanes of 16 bits: 8 MiB.", "tensor.chunk_lanes", 3, chunk_lanes_log2=22)
    entry("tensor_chunk_lanes_64", "Chunks of 2^64 lanes, which a shift may take for 1.", "tensor.chunk_lanes", 3,
          chunk_lanes_log2=64)
    entry("tensor_chunk_lanes_255", "Chunks of 2^255 lanes.", "tensor.chunk_lanes", 3, chunk_lanes_log2=255)
    entry("tensor_reserved_17", "The first reserved byte is not zero.", "tensor.reserved", 1, part=1)
    entry("tensor_reserved_19", "The last reserved byte is not zero.", "tensor.reserved", 1, reserved=b"\0\x80")
    index("tensor_tables_size", "A byte of tables for a codec that has none.", "tensor.tables_size", where="b",
          entries=put("entry", 1, tables_size=1), files=replace("tables_section", lambda data: b"\0"))
    index("tensor_tables_size_sum", "The section tables has a byte that no tensor claims.", "tensor.tables_size",
          files=replace("tables_section", lambda data: b"\0"))
    entry("tensor_first_chunk", "first_chunk one too large.", "tensor.first_chunk", 2, first_chunk=4)
    entry("tensor_first_chunk_shared", "Two tensors with the same first chunk.", "tensor.first_chunk", 2, first_chunk=1)
    index("tensor_chunk_count_more", "A tensor with one chunk more than its lanes need.", "tensor.chunk_count", where="d",
          records=one_record_more, entries=put("entry", 3, chunk_count=2))
    index("tensor_chunk_count_less", "A tensor with one chunk less than its lanes need.", "tensor.chunk_count", where="c",
          records=lambda d: (d.record.pop(4), d.sums.pop(4)),
          entries=lambda d: (d.entry[2].update(chunk_count=1), d.entry[3].update(first_chunk=4)))
    entry("tensor_base_param_none", "A parameter for base kind none.", "tensor.base_param", 3, base_param=1)
    entry("tensor_base_param_same", "A parameter for base kind same.", "tensor.base_param", 1, base_param=3)
    entry("tensor_base_param_equal_rows", "Base kind prefix with the target's own number of rows.", "tensor.base_param",
          1, base_kind=PREFIX, base_param=3)
    entry("tensor_base_param_overflow", "Base kind prefix with 2^60 rows of 1,400 lanes.", "tensor.base_param", 1,
          base_kind=PREFIX, base_param=2**60)
    entry("tensor_base_param_wraps", "Base kind prefix with rows whose bits wrap to the target's own.",
          "tensor.base_param", 1, base_kind=PREFIX, base_param=2**57 + 3)
    scalar = Tensor("s", "F32", [], b"\1\0\0\0", b"\0\0\0\0")
    index("tensor_base_param_rank_0", "Base kind prefix for a scalar.", "tensor.base_param", where="s",
          model=Model([scalar], frame=by_hand), over=None, entries=put("entry", 0, base_kind=PREFIX, base_param=5))
    nibbles = Tensor("n", "F4", [2, 3], b"\1\2\3", bytes(6), PREFIX, rows=4)
    index("tensor_base_param_packed", "Base kind prefix for F4 with a base of an odd number of elements.",
          "tensor.base_param", where="n", model=Model([nibbles], frame=by_hand), over=None,
          entries=put("entry", 0, base_param=1))

    def shaped(name, about, dtype, shape, target=b"", count=None):
        model = Model([Tensor("t", dtype, shape, target, kind=NONE)], frame=by_hand)
        index(name, about, "tensor.shape", where="t", model=model, over=None)

    shaped("tensor_shape_2_63_bits", "2^60 bytes: 2^63 bits, one too many.", "U8", [2**60])
    shaped("tensor_shape_wraps", "Dims whose product is 2^64: zero in 64 bits.", "U8", [2**32, 2**32])
    shaped("tensor_shape_wraps_to_one", "Dims whose product is 1 in 64 bits.", "U8",
           [3, 0xAAAAAAAAAAAAAAAB], b"\1")
    shaped("tensor_shape_bits_wrap", "Elements that fit, but not times 64 bits.", "F64", [2**58])
    shaped("tensor_shape_f4_odd", "Three elements of F4.", "F4", [3], b"\1\2")
    shaped("tensor_shape_f6_odd", "Six elements of F6_E2M3: 36 bits.", "F6_E2M3", [6], b"\1\2\3\4\5")

    # Digests of tensors without a base.
    index("digest_none", "A base digest for base kind none.", "digest.none", where="d",
          records=put("digests", 3, base_digest=blake3(bytes(12))[:16]))

    # The file table.
    def filed(files, **options):
        return small(files=files, **options)

    tensors = small().tensors
    shard = lone(tensors, "m.safetensors")[0]
    note = File(VERBATIM, "m.safetensors.index.json", b"{}")
    index("files_size_byte_over", "A byte follows the contents.", "files.size", files=replace("files_section", lambda f: f + b"\0"))
    index("files_size_byte_short", "The last content is cut off.", "files.size", files=replace("files_section", lambda f: f[:-1]))
    index("files_size_empty", "The section is empty, though there are files.", "files.size",
          files=replace("files_section", lambda f: b""))
    index("files_size_of_no_files", "file_count 0 and a section that is not empty.", "files.size", model=filed([]),
          files=replace("files_section", lambda f: bytes(40)))
    index("files_size_content_wraps", "A content_size of 2^64 - 8.", "files.size",
          file_entries=put("file_entry", 0, content_size=M64 - 8))
    index("file_kind", "File kind 4.", "file.kind", file_entries=put("file_entry", 0, kind=4))
    index("file_reserved_2", "The reserved field at 2 is not zero.", "file.reserved", file_entries=put("file_entry", 0, reserved=1))
    index("file_reserved_32", "The reserved field at 32 is not zero.", "file.reserved",
          file_entries=put("file_entry", 0, reserved2=2**63))

    def file_name(name, about, value, kind=0):
        file = lone(tensors, value)[0] if kind == 0 else File(VERBATIM, value, b"{}")
        index(f"file_name_{name}", about, "file.name",
              model=filed([file] if kind == 0 else [shard, file] if raw_name(value) > b"m.s" else [file, shard]))

    for name, about, value in [
        ("parent", "A name that climbs out of the folder.", "../x.safetensors"),
        ("slash", "A name with a folder.", "a/x.safetensors"),
        ("backslash", "A name with a backslash.", "a\\x.safetensors"),
        ("absolute", "An absolute name.", "/x.safetensors"),
        ("drive", "A name with a colon.", "C:x.safetensors"),
        ("hidden", "A name that begins with a dot.", ".x.safetensors"),
        ("ending", "A name with another ending.", "x.safetensors.sh"),
        ("only_ending", "A name that is nothing but the ending.", ".safetensors"),
        ("case_of_ending", "A name with the ending in capitals.", "x.SAFETENSORS"),
        ("space", "A name with a space.", "x y.safetensors"),
        ("not_ascii", "A name with a letter beyond ASCII.", "é.safetensors"),
        ("nul", "A name with a NUL.", "x\0.safetensors"),
        ("newline", "A name with a line end after the ending.", "x.safetensors\n"),
        ("long", "A name of 256 characters.", "x" * 244 + ".safetensors"),
    ]:
        file_name(name, about, value)
    file_name("verbatim_of_safetensors", "A verbatim file with the ending of safetensors.", "n.safetensors", VERBATIM)
    index("file_name_header_of_json", "A safetensors file with the ending of an index file.", "file.name",
          model=filed(lone(tensors, "m.safetensors.index.json")))
    index("file_name_empty_of_two", "An empty name beside another file.", "file.name",
          model=filed([lone(tensors, "")[0], note]))
    index("file_name_empty_verbatim", "An empty name of a verbatim file.", "file.name",
          model=filed([File(VERBATIM, "", b"{}")]))
    index("file_name_order", "Names that do not ascend.", "file.name", model=filed([note, shard]))
    halves = [lone(tensors[:2], "m.safetensors")[0], lone(tensors[2:], "m.safetensors")[0]]
    index("file_name_twice", "Two files of one name.", "file.name", model=filed(halves))
    halves = [lone(tensors[:2], "M.safetensors")[0], lone(tensors[2:], "m.safetensors")[0]]
    index("file_name_case", "Two names that differ in case alone.", "file.name", model=filed(halves))
    index("file_content_size", "A header of 7 bytes.", "file.content_size", model=filed([File(0, "", bytes(7))]))
    index("file_content_digest", "The stored header has another digest.", "file.content_digest",
          file_entries=lambda d: d.file_entry[0].update(content_digest=flip(15)(d.file_entry[0]["content_digest"])))
    index("file_content_digest_verbatim", "A stored verbatim file has another digest.", "file.content_digest",
          model=filed([shard, note]), file_entries=put("file_entry", 1, content_digest=blake3(b"{ }")[:16]))

    # Records.
    def record(name, about, rule, chunk, **fields):
        index(name, about, rule, where="abbccd"[chunk], chunk=chunk, records=put("record", chunk, **fields))

    record("record_num_deltas", "More changes than lanes.", "record.num_deltas", 0, num_deltas=6)
    record("record_num_deltas_largest", "2^32 - 1 changes: times 4 they overflow 32 bits.", "record.num_deltas", 3,
           num_deltas=2**32 - 1)
    record("record_num_deltas_of_partial_chunk", "More changes than lanes of the last chunk, fewer than of others.",
           "record.num_deltas", 2, num_deltas=105)
    record("record_empty_num_deltas", "Changes without a payload.", "record.empty", 4, num_deltas=1)
    record("record_empty_uncompressed_size", "A chunk without changes expands to something.", "record.empty", 4,
           uncompressed_size=2)
    record("record_empty_crc32", "A chunk without changes has a CRC.", "record.empty", 4, crc32=1)
    index("record_empty_payload", "A payload without changes.", "record.empty", where="c", chunk=4,
          payloads=lambda d: d.payload.__setitem__(4, b"\1" * 16))
    record("record_sizes_raw_uncompressed", "Codec raw with an expanded size that differs.", "record.sizes", 0,
           uncompressed_size=17)
    index("record_sizes_raw_of_other_num_deltas", "Codec raw with sizes of two changes and a count of three.",
          "record.sizes", where="d", chunk=5, records=put("record", 5, num_deltas=3))
    record("record_sizes_zstd_one", "Codec zstd that expands to one byte.", "record.sizes", 3, uncompressed_size=1)
    record("record_sizes_zstd_zero", "Codec zstd that expands to nothing.", "record.sizes", 3, uncompressed_size=0)
    record("record_sizes_zstd_above", "Codec zstd that expands to one byte more than any layout may take.",
           "record.sizes", 3, uncompressed_size=4 * 4096 + 65)
    record("record_sizes_zstd_of_partial_chunk", "The same for the last chunk of a tensor.", "record.sizes", 2,
           uncompressed_size=5 * 104 + 65)

    def stuffed(draft):  # a frame of many empty blocks
        frame, content = draft.payload[3], draft.content[3]
        spare_blocks = len(content) + len(content) // 64 + 65 - len(frame)
        head = len(frame) - len(content) - 3
        count = -(-spare_blocks // 3)
        draft.payload[3] = frame[:head] + bytes(3 * count) + frame[head:]

    index("record_sizes_compressed", "A payload larger than its bound, padded by empty blocks.", "record.sizes",
          where="c", chunk=3, payloads=stuffed)
    record("record_blob_offset_first", "The first payload begins at 80.", "record.blob_offset", 0, blob_offset=80)
    record("record_blob_offset_header", "The first payload begins in the header.", "record.blob_offset", 0, blob_offset=0)

    def gapped(draft):
        for r in draft.record[3:]:
            r["blob_offset"] += 16
        draft.payload[2] += bytes(16)  # after the record is made, so the blob has the gap too

    index("record_blob_offset_gap", "Sixteen zero bytes too many before a payload.", "record.blob_offset", where="c",
          chunk=3, records=gapped)
    index("record_blob_offset_overlap", "A payload that is that of the chunk before.", "record.blob_offset", where="b",
          chunk=2, records=lambda d: d.record[2].update(d.record[1], output_offset=4096))
    record("record_blob_offset_unaligned", "An offset that is not a multiple of 16.", "record.blob_offset", 1, blob_offset=103)
    record("record_blob_offset_wraps", "An offset that wraps once the size is added.", "record.blob_offset", 3,
           blob_offset=M64 - 16)
    record("record_blob_offset_of_empty", "A chunk without changes that does not keep the running offset.",
           "record.blob_offset", 4, blob_offset=0)
    index("record_blob_offset_swapped", "Two records of a tensor have changed places.", "record.blob_offset", where="b",
          chunk=1, model=swappable(rows), records=lambda d: d.record.__setitem__(slice(1, 3), d.record[2:0:-1]))
    record("record_output_offset", "A chunk that begins a lane late.", "record.output_offset", 2, output_offset=4097)
    record("record_output_offset_of_first", "The first chunk of a tensor counts on from the tensor before.",
           "record.output_offset", 1, output_offset=5)
    record("record_output_offset_of_empty", "A chunk without changes that begins elsewhere.", "record.output_offset", 4,
           output_offset=0)
    index("record_sums_none", "A base sum for base kind none.", "record.sums", where="d", chunk=5,
          records=put("sums", 5, base_sum=1))
    index("record_sums_unchanged", "Two different sums for a chunk without changes.", "record.sums", where="c", chunk=4,
          records=put("sums", 4, target_sum=1))
    index("record_blob_size", "Sixteen bytes more of blob than the records imply, in all places.", "record.blob_size",
          header=lambda d: d.head.update(blob_size=d.head["blob_size"] + 16),
          blob=replace("blob_file", lambda data: data + bytes(16)))
    index("record_blob_size_low", "blob_size without the last padding.", "record.blob_size",
          header=lambda d: d.head.update(blob_size=d.head["blob_size"] - 4),
          blob=replace("blob_file", lambda data: data[:-4]))

    # The blob's header.
    def blob(name, about, rule, **edits):
        bad(name, about, rule, "open_blob", **edits)

    blob("blob_truncated", "The last 16 bytes of the blob are missing.", "blob.blob_size",
         blob=replace("blob_file", lambda data: data[:-16]))
    blob("blob_trailing_byte", "A byte follows the blob.", "blob.blob_size", blob=replace("blob_file", lambda data: data + b"\0"))
    blob("blob_empty", "The blob has no bytes.", "blob.blob_size", blob=replace("blob_file", lambda data: b""))
    blob("blob_of_63_bytes", "The blob ends within its header.", "blob.blob_size", blob=replace("blob_file", lambda data: data[:63]))
    blob("blob_magic", "The blob has the magic of an index.", "blob.magic",
         blob_header=put("blob_head", magic=b"\x89TPI\r\n\x1a\n"))
    blob("blob_is_the_index", "The index is given as the blob too.", "blob.magic",
         blob=lambda d: setattr(d, "blob_file", d.index_file))
    blob("blob_is_text", "The blob is some other, longer file.", "blob.magic",
         blob=replace("blob_file", lambda data: b"version https://example.org/\n" * 99))
    blob("blob_version_major", "The blob has major version 2.", "blob.version_major", blob_header=put("blob_head", version_major=2))
    blob("blob_header_size", "The blob's header_size is 256.", "blob.header_size", blob_header=put("blob_head", header_size=256))
    blob("blob_crc32", "A bit of the CRC of the blob's header is flipped.", "blob.crc32", blob=replace("blob_file", flip(60)))
    blob("blob_reserved", "The reserved field of the blob's header is not zero.", "blob.reserved",
         blob_header=put("blob_head", reserved=1))
    blob("blob_version_minor", "The blob has another minor version than the index.", "blob.version_minor",
         blob_header=put("blob_head", version_minor=1))
    blob("blob_size_field", "blob_size of the blob's header is not the length of the file.", "blob.blob_size",
         blob_header=lambda d: d.blob_head.update(blob_size=d.blob_head["blob_size"] - 16))
    for name, more in (("longer", 16), ("shorter", -16)):
        blob(f"blob_size_{name}", f"The blob is 16 bytes {name} than the index says, and its header agrees with the file.",
             "blob.blob_size", blob_header=lambda d, more=more: d.blob_head.update(blob_size=d.blob_head["blob_size"] + more),
             blob=replace("blob_file", lambda data, more=more: data[:more] if more < 0 else data + bytes(more)))
    blob("blob_pair_digest", "The blob quotes another pair digest.", "blob.pair_digest",
         blob_header=lambda d: d.blob_head.update(pair_digest=flip(31)(d.blob_head["pair_digest"])))
    other = small()
    other.tensors[3].target = bytes_of([0, 1, 2, 3, 0, 65534], 2)
    draft = Draft(other)
    blob("blob_of_another_pair", "The blob belongs to a pair with other changes and the same sizes.",
         "blob.pair_digest", blob=lambda d: setattr(d, "blob_file", draft.blob_file))

    # Payloads. The pair has one tensor of 100 lanes, of which the changed ones are given.
    def decode(name, about, rule, where, chunk, **edits):
        bad(name, about, rule, "decode", where=where, chunk=chunk, **edits)

    decode("payload_crc32", "A bit of a payload is flipped.", "payload.crc32", "b", 1,
           blob=lambda d: setattr(d, "blob_file", flip(d.record[1]["blob_offset"] + 12)(d.blob_file)))
    decode("payload_crc32_field", "A bit of the CRC in a record is flipped.", "payload.crc32", "b", 1,
           records=lambda d: d.record[1].update(crc32=d.record[1]["crc32"] ^ 1))
    decode("payload_crc32_swapped", "Two payloads of the same size have changed places.", "payload.crc32", "b", 1,
           model=swappable(rows), records=lambda d: d.payload.__setitem__(slice(1, 3), d.payload[2:0:-1]))

    def pad(draft):
        end = draft.record[1]["blob_offset"] + draft.record[1]["compressed_size"]
        assert end % 16
        draft.blob_file = flip(end)(draft.blob_file)

    decode("payload_padding", "The first byte of the padding after a payload is not zero.", "payload.padding", "b", 1,
           blob=pad)
    decode("payload_padding_last", "The last byte of the blob is not zero.", "payload.padding", "d", 5,
           blob=replace("blob_file", flip(-1)))

    def payload(name, about, rule, layout, changes, content=None, dtype="U16", frame=None, count=100, **edits):
        """Codec `zstd`, or `raw` if the layout is None; `content` and `frame` are edits of bytes."""
        target = zeros_but(count, DTYPES[dtype][2], changes)
        tensor = Tensor("t", dtype, [count], target, kind=NONE, codec=RAW if layout is None else ZSTD, layout=layout)
        if content:
            edits["contents"] = replace("content", at(0, content))
        if frame:
            edits["payloads"] = lambda d: d.payload.__setitem__(0, frame(d.payload[0], d.content[0]))
        bad(name, about, rule, "decode", where="t", chunk=0, model=Model([tensor], frame=by_hand), over=None, **edits)

    some = {3: 1, 20: 2, 90: 300}  # deltas 2, 4 and 600

    def payload_frame(name, about, function):
        payload(f"payload_frame_{name}", f"A payload: {about}.", "payload.frame", PLANES, some, frame=function)

    payload_frame("not_zstd", "no zstd magic", lambda f, c: flip(3)(f))
    payload_frame("plain", "the content without a frame", lambda f, c: c)
    payload_frame("cut_off", "the frame is cut off", lambda f, c: f[:-1])
    payload_frame("trailing_byte", "a byte follows the frame", lambda f, c: f + b"\0")
    payload_frame("trailing_frame", "an empty frame follows the frame", lambda f, c: f + by_hand(b""))
    payload_frame("two_frames", "two frames, each half the content", lambda f, c: by_hand(c[:100]) + by_hand(c[100:]))
    payload_frame("skippable_before", "a skippable frame precedes the frame", lambda f, c: skippable + f)
    payload_frame("skippable_after", "a skippable frame follows the frame", lambda f, c: f + skippable)
    payload_frame("skippable_alone", "a skippable frame and nothing else", lambda f, c: skippable)
    payload_frame("dictionary", "the frame names a dictionary", lambda f, c: by_hand(c, dictionary=1))
    payload_frame("window", "the window is 2^28 bytes", lambda f, c: by_hand(c, window=18 << 3))
    payload_frame("no_content_size", "the frame states no content size", lambda f, c: by_hand(c, size=None))
    payload_frame("content_size", "the frame states and has one byte more than the record", lambda f, c: by_hand(c + b"\0"))
    payload_frame("bomb", "the blocks give 1.5 MiB more than the frame states",
                  lambda f, c: bomb(c))
    payload_frame("too_little", "the blocks give less than the frame states", lambda f, c: by_hand(c[:-1], size=len(c)))
    payload_frame("checksum", "the content checksum is wrong", lambda f, c: by_hand(c, checksum=b"\1\2\3\4"))
    payload_frame("reserved_bit", "the reserved bit of the frame's header is set", lambda f, c: by_hand(c, reserved_bit=1))
    payload_frame("reserved_block", "a block has the reserved kind", lambda f, c: reserved_block(f))

    payload("payload_layout_5", "Layout 5.", "payload.layout", PLANES, some, set_byte(0, 5))
    payload("payload_layout_255", "Layout 255.", "payload.layout", PLANES, some, set_byte(0, 255))
    for layout, label in enumerate(LAYOUTS):
        payload(f"payload_size_{label}_over", f"A byte too many, {label}.", "payload.size", layout, some, lambda c: c + b"\0")
        payload(f"payload_size_{label}_short", f"A byte too few, {label}.", "payload.size", layout, some, lambda c: c[:-1])
        payload(f"payload_size_{label}_nearly_empty", f"The layout byte and one more, {label}.", "payload.size", layout,
                some, lambda c: c[:2])
    payload("payload_size_elias_delta_bits", "The rest of the last byte is not zeros.", "payload.size", ELIAS, some,
            flip(-1))
    payload("payload_size_gaps_continued", "The last gap ends in a byte 255.", "payload.size", GAPS, {3: 1, 20: 2},
            set_byte(-1, 255), count=4096)

    # Positions.
    def raw_of(positions, deltas, w=2):
        return lambda content: raw_payload(positions, deltas, w)

    payload("payload_positions_raw_order", "Codec raw, two positions exchanged.", "payload.positions", None, some,
            raw_of([20, 3, 90], [4, 2, 600]))
    payload("payload_positions_raw_twice", "Codec raw, a position twice.", "payload.positions", None, some,
            raw_of([3, 3, 90], [2, 4, 600]))
    payload("payload_positions_raw_past_the_end", "Codec raw, a position past the last lane.", "payload.positions", None,
            some, raw_of([3, 20, 100], [2, 4, 600]))
    payload("payload_positions_raw_largest", "Codec raw, position 2^32 - 1.", "payload.positions", None, some,
            raw_of([3, 20, 2**32 - 1], [2, 4, 600]))
    payload("payload_positions_raw_padding", "Codec raw, padding that is not zero.", "payload.positions", None,
            {1: 1, 2: 2, 3: 3}, flip(15), dtype="U64")

    def gaps_of(layout, gaps, deltas=(2, 4, 600)):
        positions = [sum(gaps[:i + 1]) + i for i in range(len(gaps))]
        return lambda content: encode(layout, positions, list(deltas), 2, max(positions) + 1)

    for layout in (GAPS, ELIAS, NIBBLE_GAPS):
        label = LAYOUTS[layout]
        payload(f"payload_positions_{label}_past_the_end", f"The last position is that after the last lane, {label}.",
                "payload.positions", layout, some, gaps_of(layout, [3, 16, 79]))
        payload(f"payload_positions_{label}_first_past_the_end", f"The first gap is as long as the chunk, {label}.",
                "payload.positions", layout, {3: 1}, gaps_of(layout, [100], [2]))
    payload("payload_positions_elias_delta_long_gap", "A gap above the lanes of the chunk: x = 2^20.",
            "payload.positions", ELIAS, some, gaps_of(ELIAS, [3, 16, 2**20 - 1]))
    payload("payload_positions_elias_delta_long_code", "A code of five zeros: N + 1 of six bits.", "payload.positions",
            ELIAS, {3: 1}, lambda c: c[:3] + packed_bits("00000" + "100000" + "0" * 31))
    payload("payload_positions_elias_delta_zeros", "Zeros where a code should begin, for ever.", "payload.positions",
            ELIAS, {3: 1}, lambda c: c[:3] + bytes(20))
    payload("payload_positions_nibble_planes_past_the_end", "A low nibble of a lane past the last.", "payload.positions",
            NIBBLE_PLANES, {3: 1, 20: 2, 60: 300}, lambda c: set_byte(39, c[39] | 0x01)(c), count=70)
    payload("payload_positions_nibble_planes_high_past_the_end", "A high nibble of a lane past the last.",
            "payload.positions", NIBBLE_PLANES, some, lambda c: set_byte(37, c[37] | 0x10)(c))

    # Deltas.
    payload("payload_deltas_raw_zero", "Codec raw, a delta of zero.", "payload.deltas", None, some,
            raw_of([3, 20, 90], [2, 0, 600]))
    payload("payload_deltas_gaps_zero", "Layout gaps, a delta of zero.", "payload.deltas", GAPS, some,
            gaps_of(GAPS, [3, 16, 69], [2, 0, 600]))
    payload("payload_deltas_elias_delta_zero", "Layout elias-delta, a delta of zero.", "payload.deltas", ELIAS, some,
            gaps_of(ELIAS, [3, 16, 69], [2, 0, 600]))
    payload("payload_deltas_planes_fewer", "Layout planes with a change fewer than the record has.", "payload.deltas",
            PLANES, some, lambda c: encode(PLANES, [3, 90], [2, 600], 2, 100))
    payload("payload_deltas_planes_more", "Layout planes with a change more than the record has.", "payload.deltas",
            PLANES, some, lambda c: encode(PLANES, [3, 20, 21, 90], [2, 4, 1, 600], 2, 100))
    payload("payload_deltas_nibble_planes_fewer", "Layout nibble-planes with a change fewer than the record has.",
            "payload.deltas", NIBBLE_PLANES, some, lambda c: encode(NIBBLE_PLANES, [3, 90], [2, 600], 2, 100))
    payload("payload_deltas_nibble_planes_more", "Layout nibble-planes with a change more than the record has.",
            "payload.deltas", NIBBLE_PLANES, some,
            lambda c: encode(NIBBLE_PLANES, [3, 20, 21, 90], [2, 4, 1, 600], 2, 100))
    tail = lambda value: lambda c: c[:-2] + bytes([value & 255, value >> 8])  # noqa: E731  (the one escaped lane)
    close = {3: 1, 4: 2, 5: 300}  # no gap escapes, so the escaped lane comes last
    payload("payload_deltas_nibble_gaps_2_16", "Layout nibble-gaps, v = 2^16 - 1: the delta 2^16 does not fit.",
            "payload.deltas", NIBBLE_GAPS, close, tail(0xFFFF - 270))
    payload("payload_deltas_nibble_gaps_wraps", "Layout nibble-gaps, v - 270 = 2^16 - 1.", "payload.deltas", NIBBLE_GAPS,
            close, tail(0xFFFF))
    payload("payload_deltas_nibble_planes_2_16", "Layout nibble-planes, z = 2^16 does not fit.", "payload.deltas",
            NIBBLE_PLANES, some, tail(0x10000 - 270))
    payload("payload_deltas_nibble_planes_wraps", "Layout nibble-planes, z - 270 = 2^16 - 1.", "payload.deltas",
            NIBBLE_PLANES, some, tail(0xFFFF))
    payload("payload_deltas_nibble_gaps_w64_wraps", "Layout nibble-gaps, v - 270 = 2^64 - 1 in lanes of 64 bits.",
            "payload.deltas", NIBBLE_GAPS, close, lambda c: c[:-8] + b"\xff" * 8, dtype="U64")
    payload("payload_deltas_nibble_gaps_w8", "Layout nibble-gaps, an escape byte 255 in lanes of 8 bits, with its third "
            "part.", "payload.deltas", NIBBLE_GAPS, {3: 1, 4: 100}, lambda c: c[:-1] + b"\xff\0", dtype="U8")
    payload("payload_deltas_nibble_gaps_w8_240", "Layout nibble-gaps, v = 255 in lanes of 8 bits: the delta 256.",
            "payload.deltas", NIBBLE_GAPS, {3: 1, 4: 100}, set_byte(-1, 240), dtype="U8")
    payload("payload_deltas_nibble_planes_w8", "Layout nibble-planes, an escape byte 255 in lanes of 8 bits, with its "
            "third part.", "payload.deltas", NIBBLE_PLANES, {3: 1, 4: 100}, lambda c: c[:-1] + b"\xff\0", dtype="U8")
    payload("payload_deltas_nibble_planes_w8_241", "Layout nibble-planes, z = 256 in lanes of 8 bits.", "payload.deltas",
            NIBBLE_PLANES, {3: 1, 4: 100}, set_byte(-1, 241), dtype="U8")

    # Sums, and the base.
    decode("chunk_base_sum", "The base sum of a chunk is wrong.", "chunk.base_sum", "b", 2,
           records=lambda d: d.sums[2].update(base_sum=d.sums[2]["base_sum"] ^ 1))
    decode("chunk_base_sum_of_unchanged", "Both sums of a chunk without changes are wrong.", "chunk.base_sum", "c", 4,
           records=put("sums", 4, base_sum=1, target_sum=1))
    decode("chunk_target_sum", "The target sum of a chunk is wrong.", "chunk.target_sum", "b", 2,
           records=lambda d: d.sums[2].update(target_sum=d.sums[2]["target_sum"] ^ 2**63))
    decode("chunk_target_sum_of_delta", "A delta is another than that of which the sums were made.", "chunk.target_sum",
           "d", 5, contents=replace("content", at(5, flip(-2, 2))))

    def rebased(name, about, rule, **changed):
        """Another base file, with rows replaced by name, or removed if None."""
        path = out.base(f"invalid/{name}", safetensors({k: v for k, v in (rows | changed.pop("files")).items() if v}))
        bad(name, about, rule, "decode", over=path, **changed)

    late = rows["b"][2]
    rebased("wrong_base", "One lane of the base, in the second chunk of b, is another.", "chunk.base_sum", where="b",
            chunk=2, error="wrong_base", files={"b": ("BF16", [3, 1400], flip(8300)(late))})
    rebased("wrong_base_unchanged_chunk", "One lane of the base, in a chunk without changes, is another.",
            "chunk.base_sum", where="c", chunk=4, error="wrong_base",
            files={"c": ("U8", [4100], flip(4099)(rows["c"][2]))})
    rebased("already_applied", "The base is the target.", "chunk.base_sum", where="a", chunk=0, error="already_applied",
            files={t.name: (t.dtype, t.shape, t.target) for t in small().tensors})
    rebased("wrong_base_half_applied", "Tensor a of the base is the target already, the other tensors are those of the base.",
            "chunk.base_sum", where="a", chunk=0, error="wrong_base",
            files={t.name: (t.dtype, t.shape, t.target) for t in small().tensors if t.name == "a"})
    rebased("base_tensor_missing", "The base has no tensor b.", "base.tensor", where="b", files={"b": None})
    rebased("base_tensor_dtype", "The base's b is F16.", "base.tensor", where="b", files={"b": ("F16", [3, 1400], late)})
    rebased("base_tensor_shape", "The base's b is [1400, 3].", "base.tensor", where="b", files={"b": ("BF16", [1400, 3], late)})
    rebased("base_tensor_rank", "The base's b is [4200].", "base.tensor", where="b", files={"b": ("BF16", [4200], late)})
    bad("base_absent", "No base is given.", "base.tensor", "decode", where="a", over=None)

    # Digests of whole tensors.
    def apply(name, about, rule, **edits):
        bad(name, about, rule, "apply", **edits)

    tall = bytes_of(pattern(50, 2, 4), 2)
    shrunk = lambda: Model([Tensor("p", "I16", [3, 10], change(tall[:60], "I16", [1], 4), tall, PREFIX, rows=5)],  # noqa: E731
                           frame=by_hand)
    path = out.base("invalid/tensor_base_digest_unused_rows", safetensors({"p": ("I16", [5, 10], flip(99)(tall))}))
    apply("tensor_base_digest_unused_rows", "Base kind prefix: the base differs only in rows that no chunk reads.",
          "tensor.base_digest", where="p", error="wrong_base", model=shrunk(), over=path)
    path = out.base("invalid/base_tensor_rows", safetensors({"p": ("I16", [4, 10], tall[:80])}))
    bad("base_tensor_rows", "Base kind prefix: the base has another number of rows.", "base.tensor", "decode", where="p",
        model=shrunk(), over=path)
    apply("tensor_base_digest", "A base digest is wrong, with right sums and roots.", "tensor.base_digest", where="b",
          records=lambda d: d.digests[1].update(base_digest=flip(0)(d.digests[1]["base_digest"])))
    apply("tensor_target_digest", "A target digest is wrong, with right sums and roots.", "tensor.target_digest",
          where="b", records=lambda d: d.digests[1].update(target_digest=flip(15)(d.digests[1]["target_digest"])))
    apply("tensor_target_digest_none", "The same for base kind none.", "tensor.target_digest", where="d",
          records=put("digests", 3, target_digest=bytes(16)))
    empty = Model([Tensor("e", "U8", [0], b"", kind=NONE)], frame=by_hand)
    apply("tensor_target_digest_empty", "An empty tensor with a digest of zeros, not that of no bytes.",
          "tensor.target_digest", where="e", model=empty, over=None, records=put("digests", 0, target_digest=bytes(16)))
    apply("digest_base_root", "The base root is wrong, with right digests.", "digest.base_root",
          records=lambda d: d.roots.update(base_root=flip(0)(d.roots["base_root"])))
    apply("digest_target_root", "The target root is wrong, with right digests.", "digest.target_root",
          records=lambda d: d.roots.update(target_root=flip(31)(d.roots["target_root"])))
    apply("digest_target_root_of_digests", "The target root hashes the 16-byte digests.", "digest.target_root",
          records=lambda d: d.roots.update(target_root=blake3(b"".join(x["target_digest"] for x in d.digests))))
    apply("digest_base_root_without_none", "The base root leaves out the tensor without a base.", "digest.base_root",
          records=lambda d: d.roots.update(base_root=blake3(b"".join(blake3(row[2]) for row in rows.values()))))

    # Rebuilding files.
    apply("base_file_header", "A header said to be the base's, which has another.", "base.file",
          model=filed(lone(tensors, kind=HEADER_OF_BASE)))
    apply("base_file_missing", "A file said to be the base's, which has none of that name.",
          "base.file", model=filed([shard, File(AS_BASE, "m.safetensors.index.json", b"{}")]))

    def headed(name, about, files):
        apply(f"file_tensors_{name}", about, "file.tensors", model=filed(files))

    def head(text=None, **changed):
        """The lone file's header with some entries changed, or all of its text."""
        data = head_of(tensors)
        entries = {k: v | changed.get(k, {}) for k, v in json.loads(data[8:]).items() if changed.get(k, 1) is not None}
        entries |= {k: v for k, v in changed.items() if k not in entries and v is not None}
        return [File(0, "", head_of(tensors, text=text or json.dumps(entries)))]

    ends = json.loads(head_of(tensors)[8:])
    end = ends["d"]["data_offsets"][1]
    headed("unknown", "A header with a tensor that the pair lacks.",
           head(e={"dtype": "U8", "shape": [1], "data_offsets": [end, end + 1]}))
    headed("left_out", "A tensor of the pair that no file has.", lone(tensors[:3]))
    headed("no_file", "Only an index file, so that all tensors are in no file.", [note])
    headed("twice", "A tensor in two files.",
           [lone(tensors, "m.safetensors")[0], lone(tensors[3:], "n.safetensors")[0]])
    headed("dtype", "A header that gives a tensor another dtype of the same size.", head(d={"dtype": "BF16"}))
    headed("shape", "A header that gives a tensor another shape of the same size.", head(d={"shape": [2, 3]}))
    headed("gap", "A header that leaves a gap in the data.",
           head(d={"data_offsets": [end - 12 + 8, end + 8]}))
    headed("overlap", "A header with two tensors in one place.", head(d={"data_offsets": [0, 12]}))
    headed("length", "A header length that is not the rest of the content.",
           [File(0, "", struct.pack("<Q", 1) + head_of(tensors)[8:])])
    headed("not_json", "A header that is not JSON.", head(text=json.dumps(ends)[:-1]))
    headed("key_twice", "A header with one name twice.", head(text=json.dumps(ends)[:-1] + ', "d": '
                                                             + json.dumps(ends["d"]) + "}"))


def reserved_block(frame):
    """The frame with kind 3 for its last block. All frames here begin with a 4-byte magic."""
    single = frame[4] >> 5 & 1
    at = 5 + (1 - single) + (1 if single and not frame[4] >> 6 else 1 << (frame[4] >> 6) if frame[4] >> 6 else 0)
    return frame[:at] + bytes([frame[at] | 6]) + frame[at + 1:]


def bomb(content):
    """A frame that states the size of `content`, followed by twelve run blocks of 128 KiB."""
    block = 1 << 17
    head = by_hand(content)[:-len(content) - 3]
    return (head + (len(content) << 3).to_bytes(3, "little") + content
            + ((block << 3 | 2).to_bytes(3, "little") + b"\0") * 11 + (block << 3 | 3).to_bytes(3, "little") + b"\0")


def swappable(rows):
    """A pair whose records 1 and 2 have payloads of the same size, of one tensor."""
    a, b = rows["a"][2], rows["b"][2]
    lanes = lanes_of(b, 2)
    for position, step in ((5, 1), (4096 + 5, 2)):
        lanes[position] = moved(lanes[position], step, 2, True)
    return Model([Tensor("a", "F32", [5], change(a, "F32", [1, -1], 2), a, codec=RAW),
                  Tensor("b", "BF16", [3, 1400], bytes_of(lanes, 2), b, layout=GAPS)], frame=by_hand)
