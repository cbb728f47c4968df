#!/usr/bin/env python3
"""Writes the pair of a base and a target, safetensors files or folders: python3 writer.py BASE|--no-base TARGET PAIR

It writes version 1.2 of spec/tpde-format.md, with the features `digests` and `payload_list`. Each tensor takes the smallest of
three codecs: raw, zstd with the layout `planes`, and conditioned with one segment and without activities, low bits and exceptions.
The pair is read back before it is published. Base, target and pair are held in memory.
"""

import struct
import sys
import zlib
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import zstandard
from common import DTYPES, NONE, SAME, Refused, align, hash_of, lanes_of, need
from files import Base, publish
from payloads import CONDITIONED, RAW, TILE, ZSTD, bit_length, contexts_of, extra_bits
from reader import ordered, read_pair, sum_of

CHUNK_LANES_LOG2 = 18  # small chunks can be decoded in parallel, large ones take fewer bytes
DIGESTS, PAYLOAD_LIST = 1, 2  # features, section 12.1
CODES = {dtype.name: code for code, dtype in DTYPES.items()}


def compress(content):
    return zstandard.ZstdCompressor(level=9).compress(content)


# Tensors: their lanes, differences and chunks. Sections 6 to 9.


def read_tensor(name, target, base):
    """The tensor of the pair. Its base is the tensor of the same name, if dtype and shape are equal."""
    dtype_name, shape, data = target.tensors[name]
    same = base.tensors.get(name, (None, None, None))[:2] == (dtype_name, shape)
    need(len(shape) <= 32, "tensor.rank", ascii(name))
    code = CODES[dtype_name]
    tensor = SimpleNamespace(name=name, code=code, dtype=DTYPES[code], shape=shape, target=data, base_kind=SAME if same else NONE)
    tensor.base = base.tensors[name][2] if same else bytes(len(data))
    tensor.chunks = [read_chunk(tensor, at) for at in range(0, len(data), tensor.dtype.lane_bytes << CHUNK_LANES_LOG2)]
    return tensor


def read_chunk(tensor, at):
    width = tensor.dtype.lane_bytes
    part = slice(at, at + (width << CHUNK_LANES_LOG2))
    chunk = SimpleNamespace(first=at // width, base_sum=sum_of(tensor.base[part]), target_sum=sum_of(tensor.target[part]))
    chunk.base = lanes_of(tensor.base[part], width)
    chunk.deltas = deltas_of(chunk.base, lanes_of(tensor.target[part], width), tensor.dtype)
    chunk.num_deltas = int(np.count_nonzero(chunk.deltas))
    return chunk


def deltas_of(base, target, dtype):
    bits = 8 * dtype.lane_bytes
    mask = (1 << bits) - 1
    d = ordered(target, dtype) - ordered(base, dtype) & mask
    return (d << 1 ^ 0 - (d >> bits - 1)) & mask


# Payloads: codecs.md. An encoder gives the payload of a chunk that has deltas, and its uncompressed size.


def encode_raw(chunk, tensor):
    width, positions = tensor.dtype.lane_bytes, np.flatnonzero(chunk.deltas)
    head = positions.astype("<u4").tobytes()
    payload = head.ljust(align(len(head), width), b"\0") + chunk.deltas[positions].astype(f"<u{width}").tobytes()
    return payload, len(payload)


def encode_zstd(chunk, tensor):
    planes = [(chunk.deltas >> 8 * row).astype("u1").tobytes() for row in range(tensor.dtype.lane_bytes)]
    content = bytes([0]) + b"".join(planes)
    return compress(content), len(content)


def encode_conditioned(chunk, tensor):
    lanes, width, model = len(chunk.base), tensor.dtype.lane_bytes, tensor.model
    states_log2 = min(5, (chunk.num_deltas // 64).bit_length())  # a state takes 3 bytes, so few changes have few states
    header = struct.pack("<4BH2B2I", 0, states_log2, 0, 0, model.first_context, len(model.classes), 0, 0, 0)
    nibbles = [*model.classes, 0]
    head = header + bytes(low | high << 4 for low, high in zip(nibbles[0:-1:2], nibbles[1::2]))

    # The turns of codecs.md, section 4.5, in the order of the decoder: state, range of its remainder, frequency, cum. A turn
    # for m extra bits is like one for a token of frequency 1 among 2^m.
    class_of, turns = model.class_of(chunk.base, tensor.dtype), []
    coded = np.flatnonzero(class_of)
    classes, values, tokens = (x[coded].tolist() for x in (class_of, chunk.deltas, tokens_of(chunk.deltas)))
    for tile in range(0, lanes, TILE[width]):
        first, end = np.searchsorted(coded, [tile, tile + TILE[width]]).tolist()
        for start in range(first, end, 1 << states_log2):
            step = range(start, min(start + (1 << states_log2), end))
            for k, i in enumerate(step):
                of_class = classes[i] - 1
                turns.append((k, 4096, model.frequencies[of_class][tokens[i]], model.sums[of_class][tokens[i]]))
            sizes = [extra_bits(tokens[i]) for i in step]
            for done in range(0, max(sizes), 16):
                for k, (i, size) in enumerate(zip(step, sizes)):
                    if size > done:
                        m = min(size - done, 16)
                        turns.append((k, 1 << m, 1, (values[i] % (1 << size) >> done) % (1 << m)))

    # Section 4.7: the turns are undone from the last to the first.
    x, words = [2**16] * (1 << states_log2), []
    for k, total, f, cum in reversed(turns):
        if x[k] >= f * 2**32 // total:
            words.append(x[k] % 2**16)
            x[k] >>= 16
        x[k] = x[k] // f * total + cum + x[k] % f
    stream = struct.pack(f"<{len(x)}I{len(words)}H", *x, *reversed(words))
    return head.ljust(align(len(head), 2), b"\0") + stream, width * lanes


def tokens_of(values):
    e = np.maximum(bit_length(values), 7) - 2  # extra bits of values from 64 on
    return np.where(values < 64, values, 64 + 2 * (e - 5) + (values >> e) % 2)


class Model:
    """A map and a table set for all tensors of a dtype that have a base: codecs.md, sections 4.2 and 4.4."""

    def __init__(self, tensors):
        counts = np.zeros((2048, 180), np.int64)  # of lanes, by context and token
        for tensor in tensors:
            for chunk in tensor.chunks:
                np.add.at(counts, (contexts_of(chunk.base, tensor.dtype), tokens_of(chunk.deltas)), 1)
        last = int(np.flatnonzero(counts[:, 1:].any(axis=1))[-1])
        self.first_context = max(0, last - 63)
        counts[self.first_context] = counts[: self.first_context + 1].sum(axis=0)
        counts = counts[self.first_context : last + 1]

        # Contexts whose lanes change about equally often share a class: more than 1 in 2, more than 1 in 4, and so on.
        lanes, changed = counts.sum(axis=1).tolist(), counts[:, 1:].sum(axis=1).tolist()
        rates = [min((n // c).bit_length(), 15) if c else 0 for n, c in zip(lanes, changed)]
        used = sorted(set(rates) - {0})
        self.classes = [used.index(rate) + 1 if rate else 0 for rate in rates]
        of_classes = [counts[np.array(rates) == rate].sum(axis=0) for rate in used]
        self.frequencies = [frequencies_of(of_class.tolist()) for of_class in of_classes]
        self.sums = [list(accumulate(frequencies, initial=0)) for frequencies in self.frequencies]

    def class_of(self, base, dtype):
        i = np.maximum(contexts_of(base, dtype), self.first_context) - self.first_context
        return np.array([*self.classes, 0])[np.minimum(i, len(self.classes))]

    def set_bytes(self):
        result = bytes([len(self.frequencies)])
        for frequencies in self.frequencies:
            result += bytes([len(frequencies)])
            result += b"".join(bytes([f] if f < 128 else [f % 128 | 128, f // 128]) for f in frequencies)
        return result


def frequencies_of(counts):
    """At least 1 for each token that occurs, 4,096 together."""
    while not counts[-1]:
        counts.pop()
    spare = 4096 - sum(map(bool, counts))
    frequencies = [n and 1 + n * spare // sum(counts) for n in counts]
    frequencies[counts.index(max(counts))] += 4096 - sum(frequencies)
    return frequencies


def encode(tensor):
    """Gives all chunks their payloads, with the codec that takes the fewest bytes."""
    candidates = []
    for codec, encoder in ((RAW, encode_raw), (ZSTD, encode_zstd), (CONDITIONED, encode_conditioned)):
        if codec != CONDITIONED or tensor.model:
            payloads = [encoder(chunk, tensor) if chunk.num_deltas else (b"", 0) for chunk in tensor.chunks]
            if all(len(payload) <= size + size // 64 + 64 for payload, size in payloads):
                candidates.append((sum(len(payload) for payload, _ in payloads), codec, payloads))
    _, tensor.codec, payloads = min(candidates)
    for chunk, (payload, size) in zip(tensor.chunks, payloads):
        chunk.payload, chunk.uncompressed_size = payload, size


# Index and blob: sections 5 to 8, 10 and 11.


def pair_of(tensors, files):
    """The bytes of index and blob. `files` has the stored contents by name and kind."""
    chunks, records, blob, first = [chunk for tensor in tensors for chunk in tensor.chunks], [], bytearray(64), 0
    for chunk in chunks:
        sizes = (len(chunk.payload), chunk.uncompressed_size, chunk.num_deltas, zlib.crc32(chunk.payload))
        records.append(struct.pack("<Q4IQ", len(blob), *sizes, chunk.first))
        blob += chunk.payload.ljust(align(len(chunk.payload), 16), b"\0")
    sums = [struct.pack("<2Q", chunk.base_sum, chunk.target_sum) for chunk in chunks]
    payload_list = b"".join(hash_of(chunk.payload)[:16] if chunk.payload else bytes(16) for chunk in chunks)

    base_digests = [hash_of(tensor.base)[:16] if tensor.base_kind == SAME else bytes(16) for tensor in tensors]
    target_digests = [hash_of(tensor.target)[:16] for tensor in tensors]
    digests = [hash_of(b"".join(base_digests)), hash_of(b"".join(target_digests))]
    digests += [digest for pair in zip(base_digests, target_digests) for digest in pair]

    entries, tables, numbers = [], [], {}
    for tensor in tensors:
        own, name = b"", tensor.name.encode()
        if tensor.codec == CONDITIONED:  # the first tensor that uses a set owns it, and others state its number
            own = struct.pack("<H", numbers.get(tensor.code, 0)) + (b"" if tensor.code in numbers else tensor.model.set_bytes())
            numbers.setdefault(tensor.code, len(numbers) + 1)
        shape = (len(name), 0, tensor.code, len(tensor.shape), tensor.base_kind, tensor.codec, CHUNK_LANES_LOG2)
        entries.append(struct.pack("<2I4H2BH3IQ", *shape, 0, 0, len(own), first, len(tensor.chunks), 0))
        tables.append(own)
        first += len(tensor.chunks)
    entries += [struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) for tensor in tensors]
    entries += [tensor.name.encode() for tensor in tensors]

    table = [
        struct.pack("<2HIQ16sQ", kind, 0, len(name), len(files[name, kind]), hash_of(files[name, kind])[:16], 0)
        for name, kind in files
    ]
    table += [name.encode() for name, _ in files] + list(files.values())

    fixed = [b"".join(records), b"".join(sums) + payload_list, b"".join(digests)]
    index, sections = bytearray(256), []
    for k, content in enumerate([*fixed, b"".join(entries), b"".join(table), b"".join(tables)]):
        may_be_frame = k >= 3 and len(content) <= 1 << 27  # above, the window of a frame would be too large
        stored = min(content, compress(content), key=len) if may_be_frame else content
        sections.append(struct.pack("<3Q", len(index), len(stored), len(content)))
        index += stored.ljust(align(len(stored), 8), b"\0")
    sizes = (len(index) + 32, len(blob), len(chunks), len(tensors), len(files), 0)
    head = struct.pack("<8s2HI4Q4I", b"\x89TPI\r\n\x1a\n", 1, 2, 256, DIGESTS | PAYLOAD_LIST, 0, *sizes)
    head += b"".join(sections) + hash_of(payload_list) + bytes(12)
    index[:256] = head + struct.pack("<I", zlib.crc32(head))
    index += hash_of(index)
    head = struct.pack("<8s2HIQ32sI", b"\x89TPB\r\n\x1a\n", 1, 2, 64, len(blob), index[-32:], 0)
    blob[:64] = head + struct.pack("<I", zlib.crc32(head))
    return bytes(index), bytes(blob)


def encode_pair(base, target):
    """Index and blob of the pair of two checkpoints; `base` may be None."""
    old, new = Base(base), Base(target)
    tensors = [read_tensor(name, new, old) for name in sorted(new.tensors, key=str.encode)]
    by_dtype = defaultdict(list)
    for tensor in tensors:
        if tensor.base_kind == SAME and any(chunk.num_deltas for chunk in tensor.chunks):
            by_dtype[tensor.code].append(tensor)
    models = {code: Model(of_dtype) for code, of_dtype in by_dtype.items()}
    for tensor in tensors:
        tensor.model = models.get(tensor.code) if tensor.base_kind == SAME else None
        encode(tensor)
    # Kinds 0 and 2 of section 10.1: the pair stores the header of each file, and the shard index.
    files = {(name, 0 if kind == 1 else 2): content for (name, kind), content in sorted(new.contents.items())}
    return pair_of(tensors, files)


def main(base, target, pair):
    base = None if base == "--no-base" else Path(base)
    index, blob = encode_pair(base, Path(target))
    read_pair(index, blob, base)  # checks names too, of which safetensors allows more than a pair
    # An index with another blob is refused, so a writer that is interrupted between the two leaves no wrong pair.
    for ending, content in ((".tpde-blob", blob), (".tpde-index", index)):
        publish({"": content}, Path(pair + ending))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (Refused, OSError, MemoryError) as error:
        sys.exit(f"refused: {error}")
