"""The invalid vectors of the features `digests` and `payload_list` of version 1.2."""

import zlib

from blake3 import blake3

from .cases import flip, put, replace
from .conditioned import Plan
from .data import CONDITIONED, DIGESTS, NONE, PARTS, PAYLOAD_LIST, RAW, bytes_of
from .pair import Model, Tensor, lone, safetensors
from .parts import forged, parts
from .valid_conditioned import FEW, stepped, varied
from .valid_digests import small
from .zstd import by_hand

BOTH = DIGESTS | PAYLOAD_LIST


def rooted(function):
    """An edit: another payload root, from the draft."""
    return {"rooted": lambda d: setattr(d, "payload_root", function(d))}


def listed(function):
    """An edit: another payload list, of which the root is formed."""
    return {"listed": replace("payload_list", function)}


def bit(i, which=0):
    """Flips a bit of entry `i`."""
    return lambda entries: entries[:i] + [flip(which)(entries[i])] + entries[i + 1:]


def invalid_digest_vectors(out):
    # Most vectors change one thing in this pair. Records: a 0; b 1, 2 (without changes) and 3; c 4 (without changes); n 5.
    rows, tensors = small()
    base = out.base("invalid/digests", safetensors(rows))

    def bad(name, about, rule, when="open_index", *, features=BOTH, where=None, chunk=None, model=None, over=base, error=None,
        files=True,
            **edits):
        model = model or Model(small()[1], lone(tensors) if files else [], frame=by_hand, minor=2, features=features)
        return out.invalid(name, about, rule, when, model, over, tensor=where, chunk=chunk, error=error, **edits)

    def alone(name, about, rule, when="apply", **options):
        return bad(name, about, rule, when, features=DIGESTS, **options)

    # Bits without what they stand for. These pairs have everything else that the bits demand.
    def bits(name, about, features, stated, **edits):
        edits = {"header": put("head", required_features=stated)} | edits
        bad(f"features_{name}", about, "header.required_features", features=features, files=False, **edits)

    for name, about, features in (("digests", "Bit 0", DIGESTS), ("list", "Bits 0 and 1", BOTH)):
        bad(f"features_{name}_without_root", f"{about} with a payload root of zeros.", "header.required_features",
            features=features,
            header=lambda d: setattr(d, "tail", bytes(44)))
    bits("list_alone", "Bit 1 without bit 0; the payload root is there.", BOTH, 2)
    bits("list_alone_without_root", "Bit 1 without bit 0, and without a payload root.", PAYLOAD_LIST, 2)
    bits("bit_3", "Bit 3, which has no meaning, beside bits 0 and 1.", BOTH, 11)
    bits("bit_3_alone", "Bit 3, which has no meaning.", 0, 8)
    bits("bit_31", "Bit 31 beside bits 0 and 1.", BOTH, 3 | 1 << 31)
    bits("bit_32", "Bit 32, which a reader of 32 bits drops.", BOTH, 3 | 1 << 32)
    bits("bit_63", "Bit 63 beside bits 0 and 1.", BOTH, 3 | 1 << 63)
    bad("parts_unused", "Bit 2, and each entry describes a whole tensor.", "header.required_features", features=BOTH | PARTS)
    bad("parts_unused_empty_pair", "Bit 2 in a pair without tensors.", "header.required_features", over=None,
        model=Model([], minor=2, features=BOTH | PARTS))
    bad("parts_unused_with_tables", "Bit 2 without parts; the tables of a tensor are wrong too, which shows before.",
        "tensor.tables",
        where="t", over=None, model=Model([Tensor("t", "U8", [1], b"\1", kind=NONE, codec=CONDITIONED, tables=b"\0\0\0",
                                                  plan=Plan([[0]]))], frame=by_hand, minor=2, features=BOTH | PARTS))

    # Reserved bytes.
    bad("reserved_payload_root", "A payload root without bit 0.", "header.reserved", header=put("head", required_features=0),
        features=DIGESTS)
    bad("reserved_last_of_payload_root", "The last byte of the payload root is not zero, without bit 0.", "header.reserved",
        features=0,
        header=replace("tail", flip(31)))
    for place, byte in (("240", 32), ("251", 43)):
        bad(f"reserved_{place}", f"With bit 0, the reserved byte at {place} is not zero.", "header.reserved",
            header=replace("tail", flip(byte)))
    bad("reserved_60", "With bit 0, the reserved field at 60 is not zero.", "header.reserved", header=put("head", reserved=1))

    # The section sums.
    def sums(name, about, function, features=BOTH, stated=BOTH):
        bad(f"sums_{name}", about, "header.sections", features=features, header=put("head", required_features=stated),
            stored=lambda d: (
            d.store.__setitem__(1, function(d.store[1])), d.expanded.__setitem__(1, len(d.store[1]))))

    sums("without_list", "Bit 1, and a section sums without a list.", lambda s: s, DIGESTS)
    sums("list_without_bit", "A list without bit 1.", lambda s: s, BOTH, DIGESTS)
    sums("list_one_short", "A list with an entry less than there are chunks.", lambda s: s[:-16])
    sums("list_one_more", "A list with an entry more than there are chunks.", lambda s: s + bytes(16))
    sums("list_of_32_bytes", "A list of digests of 32 bytes.", lambda s: s + bytes(len(s) // 2))
    bad("sums_list_of_empty_pair", "An entry of a list in a pair without chunks.", "header.sections", over=None,
        model=Model([], minor=2, features=BOTH), stored=lambda d: (d.store.__setitem__(1, bytes(16)), d.expanded.__setitem__(1,
        16)))
    bad("sums_list_compressed", "A list of zeros that pretends to be compressed.", "header.sections",
        sections=lambda d: d.section[1].update(
        expanded_size=d.section[1]["expanded_size"] + 16))

    # The payload root, with a list.
    bad("payload_root", "The payload root differs in a bit.", "header.payload_root", **rooted(lambda d: flip(0)(d.payload_root)))
    bad("payload_root_last_bit", "The last bit of the payload root differs.", "header.payload_root",
        **rooted(lambda d: flip(31, 128)(d.payload_root)))
    bad("payload_root_of_16_bytes", "The payload root is 16 bytes of the hash and 16 zeros.", "header.payload_root",
        **rooted(lambda d: d.payload_root[:16] + bytes(16)))
    bad("payload_root_without_zeros", "The payload root leaves out chunks without a payload.", "header.payload_root",
        **rooted(lambda d: blake3(b"".join(entry for entry in d.payload_list if any(entry)))))
    bad("payload_root_of_long_digests", "The payload root is of digests of 32 bytes.", "header.payload_root",
        **rooted(lambda d: blake3(b"".join(blake3(p) if p else bytes(32) for p in d.payload))))
    bad("payload_root_of_payloads", "The payload root is of the payloads themselves.", "header.payload_root",
        **rooted(lambda d: blake3(b"".join(d.payload))))
    bad("payload_root_of_sums", "The payload root is of the whole section sums.", "header.payload_root", header=lambda d: setattr(
        d, "tail", blake3(d.store[1]) + bytes(12)))
    bad("payload_root_of_other_list", "An entry of the list differs from the one that was hashed.", "header.payload_root",
        rooted=lambda d: d.payload_list.__setitem__(0, flip(3)(d.payload_list[0])))
    bad("payload_root_of_swapped_list", "Two entries of the list have changed places after it was hashed.", "header.payload_root",
        rooted=lambda d: d.payload_list.__setitem__(slice(0, 2), d.payload_list[1::-1]))
    bad("payload_root_of_empty_pair", "A pair without chunks with a payload root that is not that of no bytes.",
        "header.payload_root", over=None,
        model=Model([], minor=2, features=BOTH), **rooted(lambda d: blake3(bytes(16))))

    # The payload root alone: readers of all payloads form the list.
    alone("payload_root_alone", "Without a list: the payload root differs in a bit.", "header.payload_root",
          **rooted(lambda d: flip(31, 128)(d.payload_root)))
    alone("payload_root_alone_of_padding", "Without a list: the payload root is of payloads with their padding.",
        "header.payload_root",
          **rooted(lambda d: blake3(b"".join(blake3(p + bytes(-len(p) % 16))[:16] if p else bytes(16) for p in d.payload))))
    alone("payload_root_alone_of_empty_hashes", "Without a list: a chunk without a payload counts as BLAKE3 of no bytes.",
          "header.payload_root", **rooted(lambda d: blake3(b"".join(blake3(p)[:16] for p in d.payload))))
    alone("payload_root_alone_without_zeros", "Without a list: the payload root leaves out chunks without a payload.",
        "header.payload_root",
          **rooted(lambda d: blake3(b"".join(entry for entry in d.payload_list if any(entry)))))
    alone("payload_root_alone_reversed", "Without a list: the payload root takes the chunks from the last one.",
        "header.payload_root",
          **rooted(lambda d: blake3(b"".join(d.payload_list[::-1]))))
    alone("payload_root_alone_of_contents", "Without a list: the payload root is of the contents that the payloads expand to.",
          "header.payload_root", **rooted(lambda d: blake3(b"".join(blake3(c)[:16] if c else bytes(16) for c in d.content))))
    alone("payload_root_alone_of_blob",
        "Without a list: the payload root is BLAKE3 of all payloads and their padding, as they lie in the blob.",
          "header.payload_root", **rooted(lambda d: blake3(b"".join(p + bytes(-len(p) % 16) for p in d.payload))))
    bad("payload_root_alone_of_empty_pair", "Without a list: a pair without chunks with a root that is not that of no bytes.",
        "header.payload_root", "apply", over=None, model=Model([], minor=2, features=DIGESTS),
        **rooted(lambda d: blake3(bytes(16))))

    # Entries of the list that show when the index is opened.
    def entry(name, about, value, chunk, where):
        bad(f"payload_digest_{name}", about, "payload.digest", where=where, chunk=chunk,
            **listed(lambda entries: entries[:chunk] + [value] + entries[chunk + 1:]))

    entry("zero", "An entry of zeros for a chunk with a payload.", bytes(16), 1, "b")
    entry("zero_of_last", "An entry of zeros for the last chunk, which has a payload.", bytes(16), 5, "n")
    entry("of_no_payload", "An entry that is not zero for a chunk without a payload, in its last bit.", bytes(15) + b"\x80", 2,
        "b")
    entry("of_no_payload_first_bit", "The same in its first bit.", b"\1" + bytes(15), 4, "c")
    entry("of_no_bytes", "BLAKE3 of no bytes for a chunk without a payload.", blake3(b"")[:16], 2, "b")

    # Entries that show when a payload is decoded.
    def decoded(name, about, function, chunk=1, where="b", **options):
        bad(f"payload_digest_{name}", about, "payload.digest", "decode", where=where, chunk=chunk, **listed(function), **options)

    decoded("first_bit", "The first bit of an entry differs, and the root is of this list.", bit(1))
    decoded("last_bit", "The last bit of an entry differs.", lambda entries: entries[:1] + [flip(15,
        128)(entries[1])] + entries[2:])
    decoded("of_raw", "An entry of codec raw differs.", bit(0), 0, "a")
    decoded("of_last", "The last entry differs.", bit(5, 7), 5, "n")
    decoded("swapped", "Two entries have changed places.", lambda e: [e[0], e[3], e[2], e[1], *e[4:]])
    decoded("shifted", "The entries of a tensor's chunks stand one place earlier.", lambda e: [e[1], e[3], e[2], e[0], *e[4:]], 0,
        "a")

    def of_payloads(name, about, function, chunk=1, where="b"):
        bad(f"payload_digest_{name}", about, "payload.digest", "decode", where=where, chunk=chunk, listed=lambda d: setattr(
            d, "payload_list", [function(p, c) if i == chunk else entry for i, (p, c, entry) in enumerate(
                zip(d.payload, d.content, d.payload_list))]))

    of_payloads("of_padding", "A digest of the payload with its padding.", lambda p, c: blake3(p + bytes(-len(p) % 16))[:16])
    of_payloads("of_content", "A digest of the content of the frame.", lambda p, c: blake3(c)[:16])
    of_payloads("second_half", "The last 16 bytes of the hash in place of the first.", lambda p, c: blake3(p)[16:])
    of_payloads("of_crc32", "A digest of the CRC of the payload.", lambda p, c: blake3(zlib.crc32(p).to_bytes(4, "little"))[:16])
    lanes = varied("BF16", 300, 100)
    coded = Tensor("t", "BF16", [300], bytes_of(stepped("BF16", lanes), 2), bytes_of(lanes, 2), codec=CONDITIONED, tables=FEW,
                   plan=Plan([[1 + i % 3 for i in range(64)]], 100, states_log2=2))
    path = out.base("invalid/payload_digest_of_conditioned", safetensors({"t": ("BF16", [300], coded.base)}))
    bad("payload_digest_of_conditioned", "An entry of codec conditioned differs.", "payload.digest", "decode", where="t", chunk=0,
        over=path,
        model=Model([coded], frame=by_hand, minor=2, features=BOTH), **listed(bit(0)))

    # What precedes and what follows the digest of a payload.
    def flipped(d):
        d.blob_file = flip(d.record[1]["blob_offset"] + 12)(d.blob_file)

    bad("payload_crc32_before_digest", "A bit of a payload is flipped: its CRC is looked at before its digest.", "payload.crc32",
        "decode",
        where="b", chunk=1, blob=flipped)
    alone("payload_crc32_before_root", "The same without a list.", "payload.crc32", "decode", where="b", chunk=1, blob=flipped)
    bad("payload_padding_with_list", "The last byte of the blob, which is padding, is not zero.", "payload.padding", "decode",
        where="n", chunk=5,
        blob=replace("blob_file", flip(-1)))
    bad("payload_deltas_with_list", "A delta of zero in a payload of which the digest is right.", "payload.deltas", "decode",
        where="n", chunk=5,
        contents=lambda d: d.content.__setitem__(5, d.content[5][:-2] + bytes(2)))
    bad("chunk_target_sum_with_list", "A target sum is wrong, with right digests of payloads.", "chunk.target_sum", "decode",
        where="b", chunk=3,
        records=lambda d: d.sums[3].update(target_sum=d.sums[3]["target_sum"] ^ 1))

    # Forged payloads: sizes, number of deltas, CRC and sums are those of the payload that the index was made for.
    honest, other, payload = forged()

    def forge(name, about, rule, when, features, entries=None, **facts):
        tensors = [Tensor("f", "U32", [len(honest)], bytes_of(honest, 4), kind=NONE, codec=RAW)]
        if entries:
            zeros = bytes(4 * len(honest))
            tensors = parts("f", "U32", [2 * len(honest)], bytes_of(honest, 4) + zeros, zeros * 2, [([0], [len(honest)])],
                codec=RAW)

        def replaced(d):
            start, size = d.record[0]["blob_offset"], d.record[0]["compressed_size"]
            assert size == len(payload) and zlib.crc32(payload) == d.record[0]["crc32"] and payload != d.payload[0]
            d.blob_file = d.blob_file[:start] + payload + d.blob_file[start + size:]

        over = out.base(f"invalid/{name}", safetensors({"f": ("U32", [2 * len(honest)], zeros * 2)})) if entries else None
        bad(name, about, rule, when, model=Model(tensors, [] if entries else lone(tensors), frame=by_hand,
            minor=2 if features else 0,
                                                 features=features), over=over, blob=replaced, where="f", **facts)

    forge("forged_payload", "Another payload with the CRC and the sums of the right one; the index is untouched.",
        "payload.digest", "decode",
          BOTH, chunk=0)
    forge("parts_forged_payload", "The same for a part with a base.", "payload.digest", "decode", BOTH | PARTS, True, chunk=0)
    draft = bad("forged_payload_without_list",
        "The same without a list: the payload root shows it, before the digest of the tensor.",
                "header.payload_root", "apply", over=None, model=Model([Tensor("f", "U32", [len(honest)], bytes_of(honest, 4),
                kind=NONE, codec=RAW)],
                                                                       frame=by_hand, minor=2, features=DIGESTS),
                                                                       blob=lambda d: setattr(
                    d, "blob_file", d.blob_file[:64] + payload + d.blob_file[64 + len(payload):]))
    assert draft.payload[0] != payload and zlib.crc32(draft.payload[0]) == zlib.crc32(payload) and other != honest
    forge("forged_payload_without_features", "The same in a pair of version 1.0: only the digest of the tensor shows it.",
        "tensor.target_digest",
          "apply", 0)

    # Roots and digests of tensors.
    def roots(name, about, rule, function, when="open_index", features=BOTH):
        bad(name, about, rule, when, features=features, rooted=lambda d: d.roots.update(function(d)))

    roots("digest_base_root_opened", "The base root is wrong: with feature digests it is compared at opening.",
        "digest.base_root",
          lambda d: {"base_root": flip(0)(d.roots["base_root"])})
    roots("digest_target_root_opened", "The target root is wrong.", "digest.target_root",
        lambda d: {"target_root": flip(31)(d.roots["target_root"])})
    roots("digest_target_root_opened_alone", "The target root is wrong, without a list.", "digest.target_root",
          lambda d: {"target_root": flip(31)(d.roots["target_root"])}, features=DIGESTS)
    roots("digest_base_root_of_tensors", "The base root as without the feature, of hashes of 32 bytes.", "digest.base_root",
        lambda d: {
        "base_root": blake3(b"".join(bytes(32) if t.kind == NONE else blake3(t.base) for t in d.model.tensors))})
    roots("digest_target_root_of_tensors", "The target root as without the feature, of hashes of 32 bytes.", "digest.target_root",
        lambda d: {
        "target_root": blake3(b"".join(blake3(t.target) for t in d.model.tensors))})
    roots("digest_base_root_skips_none", "The base root leaves out the zeros of the tensor without a base.", "digest.base_root",
        lambda d: {
        "base_root": blake3(b"".join(x["base_digest"] for x in d.digests if any(x["base_digest"])))})
    roots("digest_roots_swapped", "The roots have changed places.", "digest.base_root", lambda d: {
        "base_root": d.roots["target_root"], "target_root": d.roots["base_root"]})
    bad("digest_root_of_changed_digest", "A target digest differs from the one that was hashed.", "digest.target_root",
        rooted=lambda d: d.digests[
        1].update(target_digest=flip(0)(d.digests[1]["target_digest"])))
    roots("digest_target_root_without_features", "Without the features, the target root of digests of 16 bytes.",
        "digest.target_root", lambda d: {
        "target_root": blake3(b"".join(x["target_digest"] for x in d.digests))}, "apply", 0)
    bad("digest_none_with_list", "A base digest for base kind none, which the base root covers.", "digest.none", where="n",
        records=put("digests", 4, base_digest=blake3(bytes(12))[:16]))
    bad("tensor_target_digest_with_list", "A target digest is wrong, and the root is of it.", "tensor.target_digest", "apply",
        where="b",
        records=lambda d: d.digests[1].update(target_digest=flip(0)(d.digests[1]["target_digest"])))
    bad("tensor_base_digest_with_list", "A base digest is wrong, and the root is of it.", "tensor.base_digest", "apply",
        where="b",
        records=lambda d: d.digests[1].update(base_digest=flip(0)(d.digests[1]["base_digest"])))
    late = flip(100)(rows["b"][2])
    path = out.base("invalid/wrong_base_with_list", safetensors(rows | {"b": ("U8", [9000], late)}))
    bad("wrong_base_with_list", "One lane of the base is another.", "chunk.base_sum", "decode", where="b", chunk=1,
        error="wrong_base", over=path)
