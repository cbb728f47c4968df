#!/usr/bin/env python3
"""Writes the test vectors of TPDE, from spec/tpde-format.md and spec/codecs.md alone.

    python3 testdata/make_vectors.py            # write testdata/v1
    python3 testdata/make_vectors.py --check    # compare with the committed files, write nothing
    python3 testdata/make_vectors.py --publish  # list the files that testdata/published.txt does not have yet

Published vectors never change: add new ones, do not edit old ones. published.txt has the BLAKE3 digests of their files, as b3sum
writes and checks them; a test of the crate compares them.

The vectors and what makes them are in the folder `vectors`. Their numbers follow two patterns. Lane i of a base is the top bits of
(i mod 1021) * 9E3779B97F4A7C15 + seed * D1B54A32D192ED03 (mod 2^64), so it repeats with the prime
period 1021. A target changes each lane i with i mod p = r by the next of a short list of steps.

Another version of the zstd library may compress to other bytes. So --check takes the frames it
finds in a committed vector that expand to the content it wants, and then compares whole files byte
by byte. All invalid vectors, and some valid ones, have frames made by hand, without the library.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for blake3.py, in this folder
from blake3 import blake3  # noqa: E402
from vectors.cases import Set  # noqa: E402
from vectors.checkpoints import checkpoint_vectors  # noqa: E402
from vectors.frames import frame_vectors  # noqa: E402
from vectors.invalid import invalid_vectors  # noqa: E402
from vectors.invalid_conditioned import invalid_conditioned_vectors  # noqa: E402
from vectors.valid import valid_vectors  # noqa: E402
from vectors.valid_conditioned import valid_conditioned_vectors  # noqa: E402

V1 = Path(__file__).parent / "v1"
PUBLISHED = Path(__file__).parent / "published.txt"


def publish(files):
    """Adds new files to the list. Returns files whose listed digest differs, without changing them."""
    lines = PUBLISHED.read_text().splitlines() if PUBLISHED.exists() else []
    listed = dict(reversed(line.split("  ", 1)) for line in lines)
    digests = {path: blake3(data).hex() for path, data in files.items() if path != "manifest.json"}
    lines += [f"{digest}  {path}" for path, digest in sorted(digests.items()) if path not in listed]
    PUBLISHED.write_text("".join(f"{line}\n" for line in lines))
    return sorted(path for path, digest in listed.items() if digests.get(path) != digest)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--publish", action="store_true")
    how = parser.parse_args()
    check = how.check or how.publish
    out = Set(V1 if check else None)
    for add in (
        valid_vectors,
        invalid_vectors,
        valid_conditioned_vectors,
        invalid_conditioned_vectors,
        checkpoint_vectors,
        frame_vectors,
    ):
        add(out)
    out.files["manifest.json"] = (json.dumps({"version": 1, "vectors": out.manifest}, indent=1, ensure_ascii=True) + "\n").encode()
    if not check:
        for path, data in out.files.items():
            (V1 / path).parent.mkdir(parents=True, exist_ok=True)
            (V1 / path).write_bytes(data)
    present = {path.relative_to(V1).as_posix() for path in V1.rglob("*") if path.is_file()}
    stray = sorted(present - out.files.keys())
    wrong = sorted(path for path, data in out.files.items() if path not in present or (V1 / path).read_bytes() != data)
    changed = publish(out.files) if how.publish and not wrong else []
    for label, paths in (("not ours", stray), ("differs", wrong), ("published otherwise", changed)):
        for path in paths:
            print(f"{label}: {path}")
    valid = sum(v["verdict"] == "valid" for v in out.manifest)
    print(
        f"{valid} valid, {len(out.manifest) - valid} invalid vectors; {len(out.files)} files, "
        f"{sum(map(len, out.files.values()))} bytes"
    )
    return int(bool(stray or wrong or changed))


if __name__ == "__main__":
    sys.exit(main())
