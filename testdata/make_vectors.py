#!/usr/bin/env python3
"""Writes the test vectors of TPDE, from spec/tpde-format.md and spec/codecs.md alone.

    python=$(scripts/environment)                      # the environment in target/: needs zstandard
    "$python" testdata/make_vectors.py                # write the versions that are not frozen, and compare the frozen ones
    "$python" testdata/make_vectors.py --check        # compare all versions, write nothing
    "$python" testdata/make_vectors.py --freeze v1.4  # turn the folder v1.4 into the archive v1.4.tar.zst

A frozen version never changes. Section 15 of the specification has the SHA-256 of its archive; a test of the crate compares it.

The vectors and what makes them are in the folder `vectors`. Their numbers follow two patterns. Lane i of a base is the top bits of
(i mod 1021) * 9E3779B97F4A7C15 + seed * D1B54A32D192ED03 (mod 2^64), so it repeats with the prime
period 1021. A target changes each lane i with i mod p = r by the next of a short list of steps.

Another version of the zstd library may compress to other bytes. So a comparison reuses the frames of a committed vector if they
expand to the right content, and then compares whole files byte by byte, not the compressed bytes of an archive. All invalid vectors, and some valid ones, have frames made by
hand, without the library.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for versions.py, in this folder
import versions  # noqa: E402
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

VERSIONS = {  # what makes the vectors of a version
    "v1": [
        valid_vectors,
        invalid_vectors,
        valid_conditioned_vectors,
        invalid_conditioned_vectors,
        checkpoint_vectors,
        frame_vectors,
    ],
    "v1.2": [digest_vectors, part_vectors, invalid_digest_vectors, invalid_part_vectors, reading_vectors],
    "v1.3": [derived_vectors, invalid_derived_vectors],
}


def make(name, check):
    """Writes the vectors of a version, or compares them. Returns whether anything differs."""
    check = check or versions.archive(name).exists()
    present = versions.contents(name)
    out = Set(present if check else {})
    for add in VERSIONS[name]:
        add(out)
    out.files["manifest.json"] = (json.dumps({"version": 1, "vectors": out.manifest}, indent=1, ensure_ascii=True) + "\n").encode()
    if not check:
        for path, data in out.files.items():
            (HERE / name / path).parent.mkdir(parents=True, exist_ok=True)
            (HERE / name / path).write_bytes(data)
        present = versions.contents(name)
    stray = sorted(present.keys() - out.files.keys())
    wrong = sorted(path for path, data in out.files.items() if present.get(path) != data)
    for label, paths in (("not ours", stray), ("differs", wrong)):
        for path in paths:
            print(f"{label}: {name}/{path}")
    valid = sum(v["verdict"] == "valid" for v in out.manifest)
    print(
        f"{name}: {valid} valid, {len(out.manifest) - valid} invalid vectors; {len(out.files)} files, "
        f"{sum(map(len, out.files.values()))} bytes"
    )
    return bool(stray or wrong)


def freeze(name):
    """Makes the archive of a version. Returns whether anything is wrong."""
    if versions.archive(name).exists():
        print(f"{name} is frozen: {versions.archive(name)} exists")
        return True
    if make(name, check=True):
        return True
    print(f"SHA-256, for section 15 of spec/tpde-format.md: {versions.freeze(name)}")
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true")
    how.add_argument("--freeze", choices=VERSIONS)
    how = parser.parse_args()
    if how.freeze:
        return int(freeze(how.freeze))
    return int(any([make(name, how.check) for name in VERSIONS]))


if __name__ == "__main__":
    sys.exit(main())
