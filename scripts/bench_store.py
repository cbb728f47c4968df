#!/usr/bin/env python3
"""Measures what each further version of a checkpoint takes in a store, beside two other ways of storing the difference.

    target/venv-peers/bin/python scripts/bench_store.py [--tpde target/release/tpde] CHECKPOINT CHECKPOINT...

The checkpoints are put into a new store in the given order, each as the difference from the one before. `tpde store verify
--rebuild` then compares all of them. The other ways are those of `bench_peers.py`: XOR with zstd-1, and gaps as NeMo-RL sends them
with zstd-1. Theirs are bytes of compressed frames alone; those of the store are whole pairs, index and blob.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from bench_peers import nemo, pairs, xor


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpde", default="target/release/tpde")
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"

        def tpde(*words):
            done = subprocess.run([options.tpde, "--json", "store", *map(str, words)], check=True, capture_output=True)
            return json.loads(done.stdout)

        tpde("init", store, "--anchor-every", 0, "--anchor-percent", 0)
        print(f"{'version':24} {'changed':>9} {'store':>12} {'XOR + zstd-1':>13} {'gaps + zstd-1':>13}")
        before, sums = None, np.zeros(3, np.int64)
        for path in options.checkpoints:
            have = ["--have", f"main={before}"] if before else []
            stored = tpde("put", store, path, *have)["stored_bytes"]
            if before is None:
                print(f"{path.stem:24} {'anchor':>9} {stored:12,}", flush=True)
            else:
                both = pairs(before, path)
                lanes = sum(target.size for _, _, target in both)
                moved = sum(int(np.count_nonzero(base != target)) for _, base, target in both)
                sizes = np.array([stored, xor(both), nemo(both)])
                sums += sizes
                print(f"{path.stem:24} {moved / lanes:9.3%} {sizes[0]:12,} {sizes[1]:13,} {sizes[2]:13,}", flush=True)
            before = path
        print(f"{'sum without anchor':24} {'':9} {sums[0]:12,} {sums[1]:13,} {sums[2]:13,}")
        print(f"share of the store{'':16} {'':12} {sums[0] / sums[1]:13.3f} {sums[0] / sums[2]:13.3f}")
        report = tpde("verify", store, "--rebuild")
        print(f"verified {report['versions']} versions, {len(report['faults'])} faults")


if __name__ == "__main__":
    main()
