#!/usr/bin/env python3
"""Writes the test vectors of TPDE, from spec/tpde-format.md and spec/codecs.md alone.

    python=$(scripts/environment)                      # the environment in target/: needs zstandard
    "$python" testdata/make_vectors.py                 # write testdata/v1, testdata/v1.2 and testdata/v1.3
    "$python" testdata/make_vectors.py --check         # compare with the committed files, write nothing
    "$python" testdata/make_vectors.py --publish v1.2  # add the files of v1.2 that are not in its list of published files yet

Published vectors never change: add new ones, do not edit old ones. published.txt, published-1.2.txt and published-1.3.txt have the
BLAKE3 digests of the files of v1, v1.2 and v1.3, as b3sum writes and checks them; a test of the crate compares them.

The vectors and what makes them are in the folder `vectors`. Their numbers follow two patterns. Lane i of a base is the top bits of
(i mod 1021) * 9E3779B97F4A7C15 + seed * D1B54A32D192ED03 (mod 2^64), so it repeats with the prime
period 1021. A target changes each lane i with i mod p = r by the next of a short list of steps.

Another version of the zstd library may compress to other bytes. So --check reuses the frames of a committed vector if they expand
to the right content, and then compares whole files byte by byte. All invalid vectors, and some valid ones, have frames made by
hand, without the library.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for blake3.py, in this folder
from blake3 import blake3  # noqa: E402
from vectors.cases import Set  # noqa: E402
from vectors.checkpoints import checkpoint_vectors  # noqa: E402
from vectors.frames import frame_vectors  # noqa: E402
from vectors.invalid import invalid_vectors  # noqa: E402
from vectors.invalid_conditioned import invalid_conditioned_vectors  # noqa: E402
from vectors.invalid_derived import invalid_derived_vectors  # noqa: E402
from vectors.invalid_digests import invalid_digest_vectors  # noqa: E402
from vectors.invalid_parts import invalid_part_vectors  # noqa: E402
from vectors.readings import reading_vectors  # noqa: E402
from vectors.valid import valid_vectors  # noqa: E402
from vectors.valid_conditioned import valid_conditioned_vectors  # noqa: E402
from vectors.valid_derived import derived_vectors  # noqa: E402
from vectors.valid_digests import digest_vectors  # noqa: E402
from vectors.valid_parts import part_vectors  # noqa: E402

FOLDERS = {  # folder: list of its published files, what makes its vectors
    "v1": (
        "published.txt",
        [
            valid_vectors,
            invalid_vectors,
            valid_conditioned_vectors,
            invalid_conditioned_vectors,
            checkpoint_vectors,
            frame_vectors,
        ],
    ),
    "v1.2": ("published-1.2.txt", [digest_vectors, part_vectors, invalid_digest_vectors, invalid_part_vectors, reading_vectors]),
    "v1.3": ("published-1.3.txt", [derived_vectors, invalid_derived_vectors]),
}


def publish(files, path):
    """Adds new files to the list. Returns files whose listed digest differs, without changing them."""
    lines = path.read_text().splitlines() if path.exists() else []
    listed = dict(reversed(line.split("  ", 1)) for line in lines)
    digests = {name: blake3(data).hex() for name, data in files.items() if name != "manifest.json"}
    lines += [f"{digest}  {name}" for name, digest in sorted(digests.items()) if name not in listed]
    path.write_text("".join(f"{line}\n" for line in lines))
    return sorted(name for name, digest in listed.items() if digests.get(name) != digest)


def make(name, how):
    """Writes or compares the vectors of one folder. Returns whether anything differs."""
    folder, (published, makers) = HERE / name, FOLDERS[name]
    check = how.check or bool(how.publish)
    out = Set(folder if check else None)
    for add in makers:
        add(out)
    out.files["manifest.json"] = (json.dumps({"version": 1, "vectors": out.manifest}, indent=1, ensure_ascii=True) + "\n").encode()
    if not check:
        for path, data in out.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    stray = sorted(present - out.files.keys())
    wrong = sorted(path for path, data in out.files.items() if path not in present or (folder / path).read_bytes() != data)
    changed = publish(out.files, HERE / published) if how.publish == name and not wrong else []
    for label, paths in (("not ours", stray), ("differs", wrong), ("published otherwise", changed)):
        for path in paths:
            print(f"{label}: {name}/{path}")
    valid = sum(v["verdict"] == "valid" for v in out.manifest)
    print(
        f"{name}: {valid} valid, {len(out.manifest) - valid} invalid vectors; {len(out.files)} files, "
        f"{sum(map(len, out.files.values()))} bytes"
    )
    return bool(stray or wrong or changed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--publish", choices=FOLDERS)
    how = parser.parse_args()
    return int(any([make(name, how) for name in FOLDERS]))


if __name__ == "__main__":
    sys.exit(main())
