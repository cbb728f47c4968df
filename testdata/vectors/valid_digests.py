"""The valid vectors of the features `digests` and `payload_list` of version 1.2."""

import json

from .conditioned import Plan
from .data import CONDITIONED, DIGESTS, HEADER_OF_BASE, NONE, PAYLOAD_LIST, PLANES, PREFIX, RAW, VERBATIM, bytes_of, pattern
from .pair import File, Model, Tensor, change, head_of, lone, safetensors
from .valid_conditioned import FEW, stepped, varied
from .zstd import by_hand, by_runs

BOTH = DIGESTS | PAYLOAD_LIST


def small():
    """Rows of a base, and tensors: with and without changes, without a base, without lanes, of three chunks."""
    rows = {"a": ("F32", [5], bytes_of(pattern(5, 4, 1), 4)), "b": ("U8", [9000], bytes_of(pattern(9000, 1, 2), 1)),
            "c": ("BF16", [3, 4], bytes_of(pattern(12, 2, 3), 2)), "e": ("I16", [0, 7], b"")}
    a, b, c, e = (row[2] for row in rows.values())
    return rows, [Tensor("a", "F32", [5], change(a, "F32", [1, -1], 2), a, codec=RAW),
                  Tensor("b", "U8", [9000], change(b[:4096], "U8", [3], 1999) + b[4096:8192] + change(b[8192:], "U8", [5], 400),
                  b),
                  Tensor("c", "BF16", [3, 4], c, c), Tensor("e", "I16", [0, 7], e, e),
                  Tensor("n", "I16", [6], bytes_of([0, 1, 2, 3, 0, 65535], 2), kind=NONE, codec=RAW)]


def digest_vectors(out):
    def one(name, about, tensors, base=None, files=(), features=BOTH, **options):
        out.valid(name, about, Model(tensors, list(files), **{"frame": by_hand, "minor": 2, "features": features} | options),
            base)

    one("digests_empty_pair", "No tensors and no chunks: the payload root is that of no bytes, and so are both roots.", [],
        features=DIGESTS)
    one("payload_list_empty_pair", "The same with a payload list, which is empty.", [])
    rows, tensors = small()
    base = out.base("valid/digests", safetensors(rows))
    one("digests", "Feature digests alone: five tensors, one without lanes, one without changes, one without a base.", tensors,
        base,
        lone(tensors), DIGESTS)
    one("payload_list", "The same with a payload list.", tensors, base, lone(tensors))
    one("digests_tensors_only", "Feature digests alone, without files.", tensors, base, features=DIGESTS)
    one("digests_of_minor_0", "Feature digests in a pair of minor version 0: a reader does not compare the two.", tensors, base,
        minor=0)
    one("digests_of_minor_65535", "The highest minor version.", tensors, base, minor=65535)
    one("digests_optional_features", "All optional feature bits.", tensors, base, optional=2**64 - 1)
    one("digests_compressed_sections", "The sections tensors and files are compressed.", tensors, base, lone(tensors),
        section_frame=by_runs)
    one("payload_list_of_zeros", "A tensor of three chunks without changes: an entry of zeros for each.",
        [Tensor("b", "U8", [9000], rows["b"][2], rows["b"][2])], base)
    one("digests_without_payloads", "The same without a list: the payload root is that of zeros.",
        [Tensor("b", "U8", [9000], rows["b"][2], rows["b"][2])], base, features=DIGESTS)
    one("payload_list_empty_tensor", "A tensor without lanes: a list without entries.",
        [Tensor("e", "I16", [0, 7], b"", b"")], base)
    one("digests_without_base", "Two tensors of base kind none: the base root is that of zeros.",
        [Tensor("m", "U8", [3], b"\1\2\3", kind=NONE), Tensor("n", "U8", [3], bytes(3), kind=NONE)])
    tall = rows["b"][2][:60]
    tall_base = out.base("valid/digests_prefix", safetensors({"p": ("I16", [10, 3], tall)}))
    one("digests_prefix", "Base kind prefix: the base digest, which the base root hashes, covers rows that no chunk reads.",
        [Tensor("p", "I16", [4, 3], change(tall[:24], "I16", [1], 4), tall, PREFIX, rows=10)], tall_base)
    same = change(bytes(20), "I16", [7], 3)
    one("payload_list_equal_payloads", "Two tensors with equal payloads: equal entries of the list.",
        [Tensor(name, "I16", [10], same, kind=NONE, codec=RAW) for name in "xy"])
    some = change(bytes(400), "U16", [1, 2, 3], 3)
    for name, about, frame in (("zstd", "codec zstd", by_hand), ("zstd_runs", "codec zstd, run blocks", by_runs)):
        one(f"payload_list_{name}", f"A payload of {about}: the digest is of the frame.",
            [Tensor("t", "U16", [200], some, kind=NONE, layout=PLANES)], frame=frame)
    one("payload_list_raw", "A payload of codec raw that ends without padding.",
        [Tensor("t", "U32", [2], bytes_of([1, 2], 4), kind=NONE, codec=RAW)])
    one("payload_list_raw_padded", "A payload of codec raw with padding, of which the digest takes no notice.",
        [Tensor("t", "U8", [2], b"\1\2", kind=NONE, codec=RAW)])
    lanes = varied("BF16", 300, 100)
    coded = Tensor("t", "BF16", [300], bytes_of(stepped("BF16", lanes), 2), bytes_of(lanes, 2), codec=CONDITIONED, tables=FEW,
                   plan=Plan([[1 + i % 3 for i in range(64)]], 100, states_log2=2))
    base_of_coded = out.base("valid/payload_list_conditioned", safetensors({"t": ("BF16", [300], coded.base)}))
    one("payload_list_conditioned", "A payload of codec conditioned.", [coded], base_of_coded, lone([coded]))
    one("digests_conditioned", "The same without a list.", [coded], base_of_coded, lone([coded]), DIGESTS)
    halves = tensors[:2], tensors[2:]
    files = [File(0, f"m-{i}.safetensors", head_of(half), [t.name for t in half]) for i, half in enumerate(halves)]
    text = json.dumps({"weight_map": {t.name: files[i].name for i, half in enumerate(halves) for t in half}}).encode()
    one("payload_list_sharded", "Two shards and their index.", tensors, base, files + [File(VERBATIM, "m.safetensors.index.json",
        text)])
    based = tensors[:4]
    one("payload_list_header_of_base", "A lone file with the header of the base.", based, base, lone(based, kind=HEADER_OF_BASE))
