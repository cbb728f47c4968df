"""Reads a TPDE pair and prints the hashes of its tensors, or reads all vectors and compares them with their manifest.

python3 testdata/reader PAIR_STEM [--base FILE_OR_FOLDER] [--json]
python3 testdata/reader --vectors testdata/v1*.tar.zst
"""

import argparse
import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the folder that contains the package
from blake3 import blake3  # noqa: E402
from reader import Refused, read_pair  # noqa: E402
from versions import unpacked  # noqa: E402


def hashes(contents):
    return {name: blake3(content).hex() for name, content in contents.items()}


def facts_of(refusal):
    return {k: getattr(refusal, k) for k in ("rule", "when", "tensor", "chunk", "detail")}


def check_vector(folder, vector):
    """Differences between reader and manifest; empty if there are none."""
    paths = [vector[part] and folder / vector[part] for part in ("index", "blob", "base")]
    try:
        _, tensors, files = read_pair(*paths)
        seen = {"verdict": "valid", "tensors": hashes(tensors), "files": hashes(files)}
    except Refused as refusal:
        seen = {"verdict": "invalid", **facts_of(refusal)}
    wanted = {k: vector[k] for k in ("verdict", "tensors", "files", "rule", "when", "tensor", "chunk") if k in vector}
    return "" if wanted == {k: seen.get(k) for k in wanted} else f"wanted {wanted}, saw {seen}"


def check_vectors(path):
    folder = path if path.is_dir() else unpacked(path)
    vectors, failed = json.loads((folder / "manifest.json").read_text("utf-8"))["vectors"], 0
    for vector in vectors:
        if difference := check_vector(folder, vector):
            failed += 1
            print(f"{vector['name']}: {difference}")
    print(f"{path}: {len(vectors) - failed} passed, {failed} failed")
    return int(failed > 0)


def check_pair(stem, base, as_json):
    try:
        index, tensors, files = read_pair(stem + ".tpde-index", stem + ".tpde-blob", base)
    except Refused as refusal:
        facts = facts_of(refusal)
        print(
            json.dumps(facts)
            if as_json
            else "\n".join(f"{k}: {v!a}" if k == "tensor" else f"{k}: {v}" for k, v in facts.items() if v not in (None, ""))
        )
        return 1
    of_tensors = hashes(tensors)
    if as_json:
        facts = {t.name: {"dtype": t.dtype.name, "shape": t.shape, "blake3": of_tensors[t.name]} for t in index.tensors}
        print(json.dumps({"tensors": facts, "files": hashes(files)}))
    else:
        for t in {t.name: t for t in index.tensors}.values():
            print(of_tensors[t.name], t.dtype.name, t.shape, json.dumps(t.name))
    return 0


def main():
    parser = argparse.ArgumentParser(prog="reader", description=__doc__.splitlines()[0])
    parser.add_argument("pair", nargs="?", help="the path without .tpde-index")
    parser.add_argument("--base", help="a safetensors file, or a folder of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--vectors", type=Path, nargs="+", help="read all vectors of these archives or folders instead")
    args = parser.parse_args()
    if args.vectors:
        return max(check_vectors(path) for path in args.vectors)
    if not args.pair:
        parser.error("PAIR_STEM or --vectors is needed")
    return check_pair(args.pair, args.base, args.json)


if __name__ == "__main__":
    sys.exit(main())
