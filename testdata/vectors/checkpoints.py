"""Vectors of sections 10.2 to 10.4: files of a base, safetensors headers and shard indexes."""

import json
import struct

from blake3 import blake3

from .cases import put
from .data import AS_BASE, HEADER_OF_BASE, NONE, PREFIX, RAW, VERBATIM, ZSTD, bytes_of, pattern
from .pair import File, Model, Tensor, change, lone, safetensors
from .zstd import by_hand

INDEX = "m.safetensors.index.json"


def small():
    """Base and tensors of all vectors here: two tensors with a base, one without lanes, one without a base."""
    rows = {"a": ("F32", [5], bytes_of(pattern(5, 4, 1), 4)), "b": ("BF16", [3, 40], bytes_of(pattern(120, 2, 2), 2)),
            "e": ("I16", [0, 7], b"")}
    a, b, e = (row[2] for row in rows.values())
    return rows, [Tensor("a", "F32", [5], change(a, "F32", [1, -1], 2), a, codec=RAW),
                  Tensor("b", "BF16", [3, 40], change(b, "BF16", [1, -1, 40], 59, 5), b, codec=RAW),
                  Tensor("e", "I16", [0, 7], e, e, codec=RAW),
                  Tensor("n", "U8", [2], b"\1\2", kind=NONE, codec=RAW)]


def file_of(text, data=b""):
    """A safetensors file with this text as its header."""
    text = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(text)) + text + data


def entries_of(rows):
    """The members of a header for these rows."""
    entries, at = {}, 0
    for name, (dtype, shape, data) in rows.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return entries


def map_of(weight_map, **members):
    return json.dumps(members | {"weight_map": weight_map}).encode()


# Texts that are not valid headers. Each function makes one from a valid text, with the tensors of `small`. The valid text starts
# with `{"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}`.
BAD_TEXTS = {
    "leading_space": ("White space precedes the object.", lambda t: " " + t),
    "byte_order_mark": ("A byte order mark precedes the object.", lambda t: "\ufeff" + t),
    "root_array": ("The header is an array with the object.", lambda t: f"[{t}]"),
    "empty": ("The header has no bytes.", lambda t: ""),
    "cut_off": ("The last brace is missing.", lambda t: t[:-1]),
    "two_objects": ("A second object follows.", lambda t: t + "{}"),
    "trailing_nul": ("Padding by NUL in place of spaces.", lambda t: t + "\0\0\0"),
    "trailing_comma": ("A comma follows the last member.", lambda t: t[:-1] + ",}"),
    "comment": ("A comment.", lambda t: t.replace("{", "{/* */", 1)),
    "not_utf8": ("A byte that is not UTF-8, in a string of the metadata.",
                 lambda t: with_metadata(t, '{"k": "\xff"}').encode("latin-1")),
    "surrogate_bytes": ("A surrogate in UTF-8, in a string of the metadata.",
                        lambda t: with_metadata(t, '{"k": "?"}').encode().replace(b"?", b"\xed\xa0\x80")),
    "surrogate_escape": ("An escape of a lone surrogate, in a string of the metadata.",
                         lambda t: with_metadata(t, '{"k": "\\ud800x"}')),
    "surrogate_escape_in_key": ("An escape of a lone surrogate, in a key of the metadata.",
                                lambda t: with_metadata(t, '{"\\ud800": "x"}')),
    "control_character": ("A line end that is not escaped, in a string of the metadata.",
                          lambda t: with_metadata(t, '{"k": "\n"}')),
    "bad_escape": ("An escape that JSON does not have.", lambda t: with_metadata(t, '{"k": "\\x41"}')),
    "key_twice_escaped": ("A name twice, once with an escape.",
                          lambda t: t[:-1] + ', "\\u0061": ' + t[t.index("{", 1):t.index("}") + 1] + "}"),
    "key_twice_in_entry": ("A member of an entry twice, with one value.",
                           lambda t: t.replace('"dtype"', '"dtype": "F32", "dtype"', 1)),
    "key_twice_in_metadata": ("A key of the metadata twice.", lambda t: with_metadata(t, '{"k": "1", "k": "1"}')),
    "metadata_twice": ("__metadata__ twice.", lambda t: with_metadata(with_metadata(t, "{}"), "{}")),
    "metadata_number": ("A number in the metadata.", lambda t: with_metadata(t, '{"k": 1}')),
    "metadata_null": ("__metadata__ is null.", lambda t: with_metadata(t, "null")),
    "metadata_array": ("__metadata__ is an array.", lambda t: with_metadata(t, "[]")),
    "integer_with_fraction": ("The dim 5.0.", lambda t: t.replace("[5]", "[5.0]")),
    "integer_with_exponent": ("The dim 5e0.", lambda t: t.replace("[5]", "[5e0]")),
    "integer_with_leading_zero": ("The dim 05.", lambda t: t.replace("[5]", "[05]")),
    "integer_negative_zero": ("The offset -0.", lambda t: t.replace("[0, 20]", "[-0, 20]")),
    "integer_of_65_bits": ("A dim of 2^64 beside a dim of 0.", lambda t: t.replace("[0, 7]", "[0, 18446744073709551616]")),
    "integer_as_string": ('The dim "5".', lambda t: t.replace("[5]", '["5"]')),
    "shape_null": ("A shape of null.", lambda t: t.replace("[5]", "null")),
    "offsets_three": ("Three data offsets.", lambda t: t.replace("[0, 20]", "[0, 20, 20]")),
    "offsets_one": ("One data offset.", lambda t: t.replace("[0, 20]", "[0]")),
    "offsets_reversed": ("An end before its begin.", lambda t: t.replace("[0, 20]", "[20, 0]")),
    "offsets_short": ("Offsets of four bytes less than dtype and shape say.", lambda t: t.replace("[5]", "[6]")),
    "offsets_long": ("Offsets of four bytes more than dtype and shape say.", lambda t: t.replace("[5]", "[4]")),
    "entry_array": ("The values of an entry as an array.",
                    lambda t: t.replace('{"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}', '["F32", [5], [0, 20]]')),
    "entry_null": ("An entry of null.", lambda t: t[:-1] + ', "z": null}'),
    "entry_member_missing": ("An entry without a shape.", lambda t: t.replace('"shape": [5], ', "")),
    "entry_member_more": ("An entry with a fourth member.", lambda t: t.replace('"dtype"', '"strides": [1], "dtype"', 1)),
    "dtype_unknown": ("A dtype that has no code.", lambda t: t.replace("F32", "F31")),
    "dtype_case": ("A dtype in small letters.", lambda t: t.replace("F32", "f32")),
    "dtype_number": ("A dtype by its code.", lambda t: t.replace('"F32"', "18")),
}


def with_metadata(text, metadata):
    return '{"__metadata__": ' + metadata + ", " + text[1:]


def checkpoint_vectors(out):
    rows, tensors = small()
    a, b, e = (row[2] for row in rows.values())
    data = a + b + e
    plain = json.dumps(entries_of(rows))

    def model(files=None, tensors=tensors):
        return Model(tensors, lone(tensors) if files is None else files, frame=by_hand)

    def valid(name, about, base, files=None, tensors=tensors):
        out.valid(name, about, model(files, tensors), out.base(f"valid/{name}", base) if base is not None else None)

    def invalid(name, about, rule, when, base=None, files=None, tensors=tensors, where=None, **edits):
        path = plain_base if base is None else out.base(f"invalid/{name}", base)
        out.invalid(name, about, rule, when, model(files, tensors), path, tensor=where, **edits)

    # --- Headers -------------------------------------------------------------------------------
    whole = safetensors(rows)
    untidy = ('{\n\t"\\u0065" :{"data_offsets":[260,260],"shape":[0 ,\r\n7],"dtype":"I16"} , "__metadata__": {"\\"":"\\ud83e\\udde0", "":'
              '"\\u0000"},"b":{ "shape":[3,40],"dtype":"\\u0042F16","data_offsets":[20,260]},\n"a":'
              '{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}\r\n\t ')
    valid("base_file_untidy", "A base file whose header has white space, escapes in names and in a dtype, metadata, and tensors in no "
          "order.", file_of(untidy, data))
    order = ["a", "b", "e", "n"]
    target_head = untidy.rstrip()[:-1] + ', "n": {"dtype": "U8", "shape": [2], "data_offsets": [260, 262]}}'
    valid("file_header_escapes", "A stored header with escapes in names, in a dtype and in metadata.", whole,
          [File(0, "", file_of(target_head), order)])
    shared = [Tensor(name, "U8", shape, bytes(range(1, 1 + (shape == [2]) * 2)), kind=NONE, codec=RAW)
              for name, shape in (("a", [0]), ("b", [2]), ("c", [0, 5]), ("d", [2]), ("e", [0]))]
    offsets = {"d": [2, 4], "c": [2, 2], "b": [0, 2], "e": [4, 4], "a": [0, 0]}
    text = json.dumps({name: {"dtype": "U8", "shape": next(t.shape for t in shared if t.name == name), "data_offsets": at}
                       for name, at in offsets.items()})
    valid("file_header_empty_tensors", "Empty tensors at the offsets of others, before, between and after them, and listed after them.",
          None, [File(0, "", file_of(text), ["b", "d"])], shared)
    valid("file_header_huge_empty_dims", "A header with the largest integer, as a dim of an empty tensor.", None,
          [File(0, "", file_of('{"t": {"dtype": "F64", "shape": [18446744073709551615, 0, 9223372036854775808], '
                               '"data_offsets": [0, 0]}}'), ["t"])],
          [Tensor("t", "F64", [2**64 - 1, 0, 2**63], b"", kind=NONE)])
    valid("file_verbatim_not_json", "A verbatim file that is no JSON: what a target's shard index holds is not looked at.", whole,
          sorted(lone(tensors, "m.safetensors") + [File(VERBATIM, INDEX, b"\xff\0{")], key=lambda f: f.name))
    target_text = json.dumps(entries_of({t.name: (t.dtype, t.shape, t.target) for t in tensors}))
    plain_base = out.base("invalid/checkpoint", whole)
    for name, (about, bad) in BAD_TEXTS.items():
        broken, broken_target = bad(plain), bad(target_text)
        assert broken not in (plain, plain.encode())
        invalid(f"file_tensors_{name}", f"A stored header: {about}", "file.tensors", "apply",
                files=[File(0, "", file_of(broken_target))])
        # A reader may parse headers in two ways, so some are headers of base files too.
        if name in ("leading_space", "root_array", "key_twice_escaped", "key_twice_in_entry", "key_twice_in_metadata", "not_utf8",
                    "surrogate_escape", "surrogate_escape_in_key", "integer_with_fraction", "integer_with_exponent", "entry_array", "entry_member_more",
                    "dtype_unknown", "cut_off", "two_objects", "offsets_short"):
            invalid(f"base_file_{name}", f"The header of the base: {about}", "base.file", "decode", base=file_of(broken, data))
    invalid("file_tensors_content_of_8_bytes", "A stored header that is its length alone.", "file.tensors", "apply",
            files=[File(0, "", bytes(8))])

    # --- A lone base file ----------------------------------------------------------------------
    more = rows | {"unused": ("U8", [3], b"xyz")}

    def beside(name, dtype, shape, size=0):
        """A base with a further tensor, named as in JSON, of this size."""
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        return file_of(json.dumps(entries_of(rows))[:-1] + f', {name}: {json.dumps(entry)}}}', data + bytes(size))

    valid("base_file_more_tensors", "A base with a tensor that the pair does not name.", safetensors(more))
    for name, about, content in [
            ("no_bytes", "The base file has no bytes.", b""),
            ("of_7_bytes", "The base file ends within the length of its header.", bytes(7)),
            ("header_past_the_end", "The base file ends within its header.", whole[:40]),
            ("header_of_2_63_bytes", "A base file that states a header of 2^63 bytes.", struct.pack("<Q", 2**63) + whole[8:]),
            ("byte_short", "The last byte of the base file is missing.", whole[:-1]),
            ("byte_over", "A byte follows the data of the base file.", whole + b"\0"),
            ("gap", "The tensors of the base file leave a gap.", file_of(
                json.dumps(entries_of(rows)).replace("[20, 260]", "[21, 261]"), a + b"\0" + b)),
            ("unused_dtype_unknown", "A dtype without a code, of a tensor that the pair does not name.", file_of(
                json.dumps(entries_of(more)).replace('"U8"', '"U9"'), data + b"xyz")),
            ("surrogate_escape_in_name", "An escape of a lone surrogate in the name of a tensor that the pair does not name.",
             beside('"\\ud800"', "U8", [0])),
            ("bits_2_63", "A tensor of 2^63 bits, whose data are not there.", beside('"x"', "U8", [2**60])),
            ("bits_2_64", "A tensor of 2^64 bits: in 64 bits their number is 0.", beside('"x"', "U8", [2**61])),
            ("bytes_2_64", "A tensor of 2^64 bytes: in 64 bits their number is 0.", beside('"x"', "U8", [2**32, 2**32])),
            ("half_byte_dropped", "A tensor of a byte and a half, with the data of one byte.", beside('"x"', "F4", [3], 1)),
            ("half_byte_padded", "A tensor of a byte and a half, with the data of two bytes.", beside('"x"', "F4", [3], 2)),
            ("text", "The base is a text.", b"version https://example.org/\n" * 9)]:
        invalid(f"base_file_{name}", about, "base.file", "decode", base=content)

    # Content taken from the base, of the right size.
    based = tensors[:3]
    invalid("base_file_header_of_same_size", "A header said to be the base's, which has another of the same size.", "base.file", "apply",
            files=lone(based, kind=HEADER_OF_BASE), tensors=based, base=safetensors(rows),
            file_entries=put("file_entry", 0, content_digest=blake3(b"another")[:16]))
    shards = {"x.safetensors": safetensors({"a": rows["a"]}), "y.safetensors": safetensors({"b": rows["b"], "e": rows["e"]})}
    split = map_of({"a": "x.safetensors", "b": "y.safetensors", "e": "y.safetensors"})
    folder = shards | {INDEX: split}
    invalid("base_file_map_of_same_size", "A shard index said to be the base's, which has another of the same size.", "base.file", "apply",
            base=folder, files=sorted(lone(tensors, "m.safetensors") + [File(AS_BASE, INDEX, split.replace(b"{", b"[", 1))],
                                      key=lambda f: f.name))
    invalid("base_file_empty_name_of_folder", "A header said to be that of the base's lone file, and the base is a folder.", "base.file",
            "apply", base=shards, files=lone(based, kind=HEADER_OF_BASE), tensors=based)
    invalid("base_file_name_of_lone", "A header said to be that of the base's file of a name, and the base is a lone file: its name is "
            "empty, whatever the file is called.", "base.file", "apply", base=whole, tensors=based,
            files=lone(based, "base_file_name_of_lone.base.safetensors", kind=HEADER_OF_BASE))

    # --- A folder as the base ------------------------------------------------------------------
    wrong = safetensors({"a": ("F32", [5], bytes(20)), "b": ("F16", [3, 40], bytes(240))})
    valid("base_folder_without_index", "A folder of two safetensors files without a shard index; what else is in it is no part of the base.",
          shards | {"config.json": b"{}", "notes.txt": b"x", "model.SAFETENSORS": b"x", "sub/z.safetensors": wrong,
                    ".hidden.safetensors": wrong, "z.safetensors.bak": wrong})
    valid("base_folder_with_index", "A folder whose shard index names two of its three safetensors files; the third has tensors of the "
          "same names.", folder | {"consolidated.safetensors": wrong})
    valid("base_folder_unlisted_tensor", "A shard has a tensor that the shard index does not list: it is part of the base.",
          shards | {INDEX: map_of({"a": "x.safetensors", "e": "y.safetensors"})})
    valid("base_folder_index_any_metadata", "A shard index with metadata of all types, numbers with fractions, nested names twice.",
          shards | {INDEX: b'\r\n{"metadata": {"total_size": 280.0, "n": [1e3, -0, null, true, [{"k": 1, "k": "\\ud800"}]]}, "more": [], '
                           b'"weight_map"\t: {"a": "x.safetensors", "b": "y.safetensors", "\\u0065": "y.safetensors"}}\n'})
    valid("base_folder_hidden_index", "A folder with a hidden shard index, which is not looked at.",
          shards | {".m.safetensors.index.json": b"{}"})

    def in_folder(name, about, changes, without=(), start=folder):
        content = {k: v for k, v in (start | changes).items() if k not in without}
        invalid(f"base_folder_{name}", about, "base.file", "decode", base=content)

    in_folder("no_safetensors", "A folder without a safetensors file.", {"config.json": b"{}"}, shards, shards)
    in_folder("tensor_twice", "Two safetensors files of a folder have a tensor of one name.", {"z.safetensors": safetensors(
        {"a": rows["a"]})}, start=shards)
    in_folder("tensor_twice_with_index", "Two shards have a tensor of one name, which the shard index lists once.",
              {"y.safetensors": whole})
    in_folder("two_indexes", "A folder with two shard indexes.", {"n.safetensors.index.json": split})
    in_folder("shard_missing", "The shard index names a file that is not there.", {}, ["y.safetensors"])
    in_folder("index_wrong_shard", "The shard index has a tensor in the other shard.",
              {INDEX: map_of({"a": "y.safetensors", "b": "y.safetensors", "x": "x.safetensors"})})
    in_folder("index_unknown_tensor", "The shard index lists a tensor that its shard does not have.",
              {INDEX: map_of({"a": "x.safetensors", "b": "y.safetensors", "q": "y.safetensors"})})
    in_folder("index_climbs", "The shard index names a file outside of the folder.",
              {INDEX: map_of({"a": "../checkpoint.base.safetensors"})})
    in_folder("index_not_json", "A shard index that is not JSON.", {INDEX: split[:-1]})
    in_folder("index_empty_map", "A shard index that names no files.", {INDEX: map_of({})})
    in_folder("index_no_map", "A shard index without a weight_map.", {INDEX: b'{"metadata": {}}'})
    in_folder("index_two_maps", "A shard index with a weight_map twice.", {INDEX: split[:-1] + b", " + split[1:]})
    in_folder("index_key_twice", "A tensor twice in the weight_map, in one shard.",
              {INDEX: split.replace(b'"a"', b'"a": "x.safetensors", "\\u0061"')})
    in_folder("index_array", "A shard index that is an array with the map.", {INDEX: b"[" + split[split.index(b"{", 1):-1] + b"]"})
    in_folder("index_map_of_numbers", "A weight_map to numbers.", {INDEX: b'{"weight_map": {"a": 1}}'})
    in_folder("index_not_utf8", "A byte that is not UTF-8 in the metadata of a shard index.",
              {INDEX: b'{"metadata": "\xff", ' + split[1:]})
    in_folder("index_nan", "A shard index with NaN, which is no JSON.", {INDEX: b'{"metadata": NaN, ' + split[1:]})
    in_folder("shard_malformed", "A shard whose length is not what its header says.", {"y.safetensors": shards["y.safetensors"] + b"\0"})

    # --- Base tensors --------------------------------------------------------------------------
    valid("base_same_empty", "Base kind same for an empty tensor, by another name.", whole, [],
          [Tensor("z", "I16", [0, 7], b"", b"", base_name="e")])

    def base_tensor(name, about, tensor, changed):
        invalid(f"base_tensor_{name}", about, "base.tensor", "decode", files=[], tensors=tensors[:2] + [tensor], where=tensor.name,
                base=safetensors({k: v for k, v in (rows | {"e": changed}).items() if v}))

    empty = tensors[2]
    base_tensor("empty_missing", "The base has no tensor e; the target's is empty and has no chunk.", empty, None)
    base_tensor("empty_dtype", "The base's e is F16; both are empty.", empty, ("F16", [0, 7], b""))
    base_tensor("empty_shape", "The base's e is [7, 0]; both are empty.", empty, ("I16", [7, 0], b""))
    base_tensor("empty_prefix", "Base kind prefix to a target without rows: the base has another number of rows.",
                Tensor("e", "I16", [0, 7], b"", bytes(42), PREFIX, rows=3, codec=ZSTD), ("I16", [2, 7], bytes(28)))
    for name, about, value in [
            ("base_name_longest", "A base name of 4,096 bytes.", "n" * 4096),
            ("base_name_byte_order_mark", "A name and a base name that begin with U+FEFF: no character is stripped.", "\ufeffe")]:
        tensor = Tensor("\ufeffa" if "mark" in name else "a", "F32", [5], change(a, "F32", [3], 2), a, codec=RAW, base_name=value)
        valid(name, about, safetensors({value: rows["a"], "e": ("U8", [1], b"e")}), None, [tensor])
