#!/usr/bin/env python3
"""Compiles spec/tpde.ksy and compares what it reads from every valid vector with testdata/reader.

    pip install zstandard kaitaistruct==0.11
    npm install --prefix target/ksc kaitai-struct-compiler@0.11.0 js-yaml@4.1.0
    python3 tests/python/check_ksy.py [--npm target/ksc]

Run from the root of the repository; needs node.
"""

import argparse
import enum
import importlib
import json
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "testdata"))
import reader  # noqa: E402
from reader.codec import CONDITIONED, conditioned  # noqa: E402
from reader.layout import FURTHER  # noqa: E402
import versions  # noqa: E402
from kaitaistruct import KaitaiStream, ValidationFailedError  # noqa: E402

COMPILE = """
const fs = require("fs");
const compiler = require("kaitai-struct-compiler");
const spec = require("js-yaml").load(fs.readFileSync(process.argv[1], "utf8"));
compiler.compile("python", spec, null, false).then(
  files => { for (const name in files) fs.writeFileSync(process.argv[2] + "/" + name, files[name]); },
  error => { console.error(String(error)); process.exit(1); });
"""


def compiled(npm):
    """The class that the compiler makes of the ksy."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["node", "-e", COMPILE, str(ROOT / "spec/tpde.ksy"), folder], check=True, cwd=npm)
        sys.path.insert(0, folder)
        return importlib.import_module("tpde").Tpde


def plain(value):
    return value.value if isinstance(value, enum.Enum) else value


def fields(parsed, names):
    return {name: plain(getattr(parsed, name)) for name in names}


def same(what, parsed, expected):
    if parsed != expected:
        raise AssertionError(f"{what}: the ksy reads {parsed!r}, the reader {expected!r}")


def row(parsed, expected):
    """Compare all fields of one table row, a named tuple of the reader."""
    values = {k: v for k, v in expected._asdict().items() if k != "reserved2"}
    same(type(expected).__name__, fields(parsed, values), values)


def section(parsed, number, data, kind, *parameters):
    """The parsed section; if it is compressed, its expanded bytes parsed by its type alone. `parameters` are those of the type."""
    name = ("tensors", "files", "tables")[number - 3]
    stored = f"{name}_stored"
    entry = parsed.sections[number]
    frame = getattr(parsed, stored)
    same(stored, frame, data[entry.offset : entry.offset + entry.stored_size])
    if not entry.is_compressed and getattr(parsed, name) is not None:  # the tables are not there without their tensors
        return getattr(parsed, name), 0
    content = reader.expand(frame, entry.expanded_size, "section.frame") if entry.is_compressed else frame
    stream = KaitaiStream(BytesIO(content))
    expanded = kind(*parameters, stream)
    assert stream.is_eof()
    return expanded, int(entry.is_compressed)


def classes_of(sets, parsed):
    """What the reader makes of a tensor's tables: the frequencies of each class. `sets` are those before, and grow."""
    if not getattr(parsed, "reference", None):
        own = getattr(parsed, "table_set", None)
        sets += [[[f.value for f in one.frequencies] for one in own.classes]] if own else []
        return sets[-1] if own else []
    return sets[parsed.reference - 1]


def check(Tpde, index_path, blob_path):
    """Returns how many sections were compressed."""
    data = index_path.read_bytes()
    wanted = reader.open_index(data)
    file = Tpde.from_file(str(index_path))
    parsed = file.body
    assert isinstance(parsed, Tpde.Index)
    header = {k: v for k, v in wanted.header._asdict().items() if k not in ("magic", "sections", "payload_root", "reserved2")}
    same("header", fields(parsed, header), header)
    same("payload_root", getattr(parsed, "payload_root", bytes(32)), wanted.header.payload_root)
    same("payload_list", getattr(parsed, "payload_list", None), wanted.payload_list)
    same("sections", [(s.offset, s.stored_size, s.expanded_size) for s in parsed.sections], wanted.sections)
    same(
        "lengths",
        [len(parsed.chunks), len(parsed.sums), len(parsed.digests)],
        [len(wanted.records), len(wanted.sums), len(wanted.digests)],
    )
    for rows, expected in ((parsed.chunks, wanted.records), (parsed.sums, wanted.sums), (parsed.digests, wanted.digests)):
        for one, other in zip(rows, expected):
            row(one, other)
    same("roots", [parsed.roots.base_root, parsed.roots.target_root], [wanted.base_root, wanted.target_root])
    same("pair_digest", parsed.pair_digest, wanted.pair_digest)

    tensors, compressed = section(parsed, 3, data, Tpde.TensorsSection, parsed.tensor_count, parsed.has_parts)
    same("tensors", len(tensors.entries), len(wanted.tensors))
    for entry, dims, names, tensor in zip(tensors.entries, tensors.dims, tensors.names, wanted.tensors):
        row(entry, tensor.entry)
        if plain(entry.part) != FURTHER:  # a further part has the shape and the names of the first
            shape, name, base_name = dims.shape, names.name, names.base_name or names.name
        else:
            same("names", [names.name, names.base_name, getattr(dims, "shape", None)], ["", "", None])
        same("tensor", [name, base_name, shape], [tensor.name, tensor.base_name, tensor.shape])
        same("scales_name", names.scales_name, tensor.scales_name)
        same("part", [getattr(dims, "origins", None), getattr(dims, "extents", None)], [tensor.origin, tensor.extent])

    tables, too = section(parsed, 5, data, Tpde.TablesSection, tensors.entries)
    same("tables", len(tables.tables), len(wanted.tensors))
    sets = []
    for one, tensor in zip(tables.tables, wanted.tensors):
        same("tables", classes_of(sets, one), tensor.tables or [])

    files, also = section(parsed, 4, data, Tpde.FilesSection, parsed.file_count)
    same("files", len(files.entries), len(wanted.files))
    for entry, name, content, expected in zip(files.entries, files.names, files.contents, wanted.files):
        row(entry, expected.entry)
        same(
            "file",
            (name.value, plain(entry.kind), content.value if entry.is_stored else None),
            (expected.name, expected.kind, expected.content),
        )
    file.close()

    data = blob_path.read_bytes()
    reader.open_blob(wanted, data)
    file = Tpde.from_file(str(blob_path))
    parsed = file.body
    assert isinstance(parsed, Tpde.Blob)
    (header,) = reader.BlobHeader.rows(data, 1)
    header = {k: v for k, v in header._asdict().items() if k != "magic"}
    same("blob", fields(parsed, header), header)
    same("payloads", parsed.payloads, data[64:])
    file.close()
    for tensor in wanted.tensors:
        for c, _, _ in tensor.chunks():
            record = wanted.records[c]
            if tensor.entry.codec == CONDITIONED and record.num_deltas:
                payload = data[record.blob_offset : record.blob_offset + record.compressed_size]
                row(Tpde.ConditionedHeader.from_bytes(payload), conditioned.Header.rows(payload, 1)[0])
    return compressed + too + also


def refuses(Tpde, index_path, blob_path):
    """Whether reserved bytes that are not zero are seen."""
    try:
        index = Tpde.from_file(str(index_path)).body
        index.tensors, index.files, Tpde.from_file(str(blob_path)).body
    except ValidationFailedError:
        return True
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--npm", default="target/ksc", help="the folder with node_modules")
    Tpde = compiled(parser.parse_args().npm)
    passed = failed = compressed = 0
    folders = [versions.folder(name) for name in versions.names()]
    for folder, vector in [(f, v) for f in folders for v in json.loads((f / "manifest.json").read_text("utf-8"))["vectors"]]:
        paths = folder / vector["index"], folder / vector["blob"]
        if vector["verdict"] != "valid":
            if vector["rule"].endswith(".reserved") and not refuses(Tpde, *paths):
                failed += 1
                print(f"{vector['name']}: {vector['rule']} is not seen")
            continue
        try:
            compressed += check(Tpde, *paths)
            passed += 1
        except Exception as error:  # of the generated code, too
            failed += 1
            print(f"{vector['name']}: {type(error).__name__}: {error}")
    print(f"{compressed} compressed sections")
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
