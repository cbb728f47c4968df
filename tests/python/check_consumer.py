#!/usr/bin/env python3
"""Builds the CUDA consumers of examples/minimal and runs them on every vector, and on pairs with changed bytes.

    python3 tests/python/check_consumer.py                       # on the processor, with sanitizers; needs g++
    python3 tests/python/check_consumer.py --nvcc                # on a CUDA device
    python3 tests/python/check_consumer.py --save-libraries DIR  # only builds libzstd and BLAKE3, with their headers, to DIR
    python3 tests/python/check_consumer.py --libraries DIR       # with the libraries of DIR, on a machine without Rust

With --tpde PROGRAM, the consumers rebuild pairs of the program too. libzstd and BLAKE3 are the C sources that cargo has fetched for the library.
"""

import argparse
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "testdata"))
from blake3 import blake3  # noqa: E402
import versions  # noqa: E402

EXAMPLES = ROOT / "examples/minimal"
REBUILT, REFUSED, OUT_OF_SCOPE = 0, 1, 3  # exit codes

FLIPS = 2000  # per program

# Per program: its CUDA files, the most lines of these together, the least number of vectors that it rebuilds.
PROGRAMS = {"raw": (["raw.cu"], 400, 39), "conditioned": (["raw.cu", "conditioned.cu"], 700, 105)}

# Runs a consumer once per line of arguments, in one process. Prints the exit codes.
DRIVER = """
#define main consumer
#include "%s"
#undef main
#include <iostream>
int main() {
    for (string line; std::getline(std::cin, line);) {
        std::vector<char*> arguments = {(char*)"consumer"};
        for (size_t at = 0, end; at < line.size(); at = end + 1) {
            end = std::min(line.find('\\t', at), line.size());
            line[end] = 0;
            arguments.push_back(&line[at]);
        }
        where = "";
        std::cout << consumer((int)arguments.size(), arguments.data()) << std::endl;
#ifndef __CUDACC__
        device_memory.clear();
#endif
    }
}
"""


def need(holds, message):
    if not holds:
        sys.exit(f"check_consumer: {message}")


def save_libraries(folder):
    """Compiles the C sources in the crates of zstd and BLAKE3, without assembly."""
    command = ["cargo", "metadata", "--format-version=1", "--offline", "--locked"]
    packages = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)["packages"]
    crates = {p["name"]: Path(p["manifest_path"]).parent for p in packages}
    hashes, zstd = crates["blake3"] / "c", crates["zstd-sys"] / "zstd/lib"
    sources = [hashes / f"blake3{part}.c" for part in ("", "_dispatch", "_portable")]
    sources += [*(zstd / "common").glob("*.c"), *(zstd / "decompress").glob("*.c")]
    options = [f"-DBLAKE3_NO_{isa}" for isa in ("SSE2", "SSE41", "AVX2", "AVX512")]
    options += ["-DBLAKE3_USE_NEON=0", "-DZSTD_DISABLE_ASM=1", "-O2", "-fPIC", "-c"]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        subprocess.run([os.environ.get("CC", "gcc"), *options, *sources], cwd=work, check=True)
        subprocess.run(["ar", "rcs", folder / "libraries.a", *Path(work).glob("*.o")], check=True)
    for header in (hashes / "blake3.h", zstd / "zstd.h", zstd / "zstd_errors.h"):
        shutil.copy(header, folder)


def compile_emulator(to):
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-std=c++17", "-O2", "-c", ROOT / "kernels/emulator/block.cpp", "-o", to], check=True)


def build(name, libraries, folder, with_nvcc):
    """The driver of a consumer, as a program."""
    source, program = folder / f"{name}.driver.cu", folder / name
    source.write_text(DRIVER % (EXAMPLES / f"{name}.cu"))
    options = ["-std=c++17", f"-I{ROOT / 'spec'}", f"-I{libraries}", "-o", program]
    if with_nvcc:
        command = [os.environ.get("NVCC", "nvcc"), "-O2", "-arch=native", *options, source]
    else:
        sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
        command = [os.environ.get("CXX", "g++"), *sanitizers, "-Wall", "-Wextra", "-Werror", *options, folder / "block.o"]
        command += ["-x", "c++", source, "-x", "none"]
    subprocess.run([*command, libraries / "libraries.a"], check=True)
    return program


def run(program, jobs):
    """The exit code and the message of each list of arguments."""
    lines = "".join("\t".join(map(str, job)) + "\n" for job in jobs)
    done = subprocess.run([program], input=lines.encode(), capture_output=True)
    codes, messages = [int(code) for code in done.stdout.split()], done.stderr.decode("utf-8", "replace").split("\n")
    need(
        len(codes) == len(jobs) and done.returncode == 0,
        f"{program} ended at {jobs[len(codes) :][:1]}: {done.stderr.decode()[-5000:]}",
    )
    results, lines = [], iter(messages)
    for code in codes:
        results.append((code, "" if code == REBUILT else next(lines)))
    return results


class Vector:
    """A vector of a manifest, with its files in a folder under the names that a consumer expects."""

    def __init__(self, folder, facts, work):
        self.facts, self.name = facts, f"{folder.name}/{facts['name']}"
        self.pair, self.out = work / f"{folder.name}.{facts['name']}", work / f"{folder.name}.{facts['name']}.out"
        self.base = facts["base"] and folder / facts["base"]
        self.index().symlink_to(folder / facts["index"])
        self.blob().symlink_to(folder / facts["blob"])

    def index(self):
        return self.pair.with_name(f"{self.pair.name}.tpde-index")

    def blob(self):
        return self.pair.with_name(f"{self.pair.name}.tpde-blob")

    def job(self):
        return [self.pair, *([self.base] if self.base else []), self.out]

    def is_refusal(self, message):
        """Whether this is the refusal of the manifest. It may name a tensor where the manifest names none."""
        places = [f", {part} {self.facts[part]}" for part in ("tensor", "chunk") if part in self.facts]
        wanted = f"refused: {self.facts.get('rule')}{''.join(places)}"
        return message == wanted or (not places and message.startswith(wanted + ", tensor "))

    def is_exact(self):
        """Whether the target is that of the manifest. Without files it is the bytes of the tensors, in the order of their names."""
        target = self.out.read_bytes()
        if self.facts["files"]:
            return {"": blake3(target).hex()} == self.facts["files"]
        hashes, data = dict(sorted(self.facts["tensors"].items(), key=lambda item: item[0].encode())), target
        for name, size in zip(hashes, tensor_sizes(self.index().read_bytes())):
            if blake3(data[:size]).hex() != hashes[name]:
                return False
            data = data[size:]
        return not data


def tensor_sizes(index):
    """The bytes of each tensor of an index without parts."""
    (count,) = struct.unpack_from("<I", index, 52)
    at, stored, expanded = struct.unpack_from("<3Q", index, 64 + 3 * 24)
    need(stored == expanded, "the tensor table is compressed")
    section = index[at : at + stored]
    dims = 40 * count
    for i in range(count):
        dtype, rank = struct.unpack_from("<HH", section, 40 * i + 8)
        bits = {48: 4, 49: 6, 50: 6}.get(dtype) or (8, 8, 8, 16, 16, 32, 32, 64, 64, *[0] * 7, 16, 16, 32, 64, 64, *[8] * 16)[dtype]
        for dim in struct.unpack_from(f"<{rank}Q", section, dims):
            bits *= dim
        dims += 8 * rank
        yield bits // 8


def check_vectors(name, program, vectors, least):
    """Runs a consumer on every vector. Returns those that it rebuilt."""
    tally, rebuilt, wrong = Counter(), [], []
    for vector, (code, message) in zip(vectors, run(program, [vector.job() for vector in vectors])):
        rule = vector.facts.get("rule")
        if code == REBUILT and rule is None and vector.is_exact():
            tally["rebuilt"] += 1
            rebuilt.append(vector)
        elif code == REFUSED and vector.is_refusal(message):
            tally["refused"] += 1
        elif code == OUT_OF_SCOPE:
            tally[re.sub(r"(, tensor|: /).*", "", message)] += 1
        else:
            wrong.append(f"{vector.name} ({rule or 'valid'}): {code} {message}")
    kept = {path.name for path in vectors[0].out.parent.glob("*.out*")} - {vector.out.name for vector in rebuilt}
    need(not kept, f"{name} failed, and left {kept}")
    need(not wrong, "\n".join(wrong))
    need(tally["rebuilt"] >= least, f"{name} rebuilt {tally['rebuilt']} vectors, expected at least {least}")
    print(f"{name}: {', '.join(f'{count} {what}' for what, count in tally.most_common())}")
    return rebuilt


def with_sums(index, blob):
    """The pair with the sums that its bytes have: of header, payloads and both files. So a changed byte reaches later checks."""
    index, blob = bytearray(index), bytearray(blob)
    (features,) = struct.unpack_from("<Q", index, 16)
    (chunks,) = struct.unpack_from("<I", index, 48)
    listed = b""
    for record in range(256, min(256 + 32 * chunks, len(index) - 63), 32):
        offset, size = struct.unpack_from("<QI", index, record)
        payload = bytes(blob[offset : offset + size])
        struct.pack_into("<I", index, record + 20, zlib.crc32(payload))
        listed += blake3(payload)[:16] if payload else bytes(16)
    if features & 2:
        index[256 + 48 * chunks : 256 + 64 * chunks] = listed
    if features & 1:
        index[208:240] = blake3(listed)
    struct.pack_into("<I", index, 252, zlib.crc32(index[:252]))
    index[-32:] = blob[24:56] = blake3(bytes(index[:-32]))
    struct.pack_into("<I", blob, 60, zlib.crc32(blob[:60]))
    return index, blob


def check_flips(name, program, rebuilt, work):
    """Changes a byte of rebuilt pairs or of their bases. A consumer refuses such a pair, or rebuilds the same target."""
    random.seed(name)
    small = [vector for vector in rebuilt if vector.index().stat().st_size < 2048]
    jobs, targets = [], []
    for number in range(FLIPS):
        vector = random.choice(small)
        parts = [vector.index().read_bytes(), vector.blob().read_bytes(), vector.base.read_bytes() if vector.base else b""]
        changed = random.choice([part for part in range(3) if parts[part]])
        parts[changed] = bytearray(parts[changed])
        parts[changed][random.randrange(len(parts[changed]))] ^= random.randrange(1, 256)
        if number % 4:
            parts[:2] = with_sums(*parts[:2])
        copy = Vector.__new__(Vector)
        copy.pair, copy.base, copy.out = work / f"{number}", vector.base and work / f"{number}.base", work / f"{number}.out"
        for path, part in zip((copy.index(), copy.blob(), copy.base), parts):
            if path:
                path.write_bytes(part)
        jobs.append(copy.job())
        targets.append(vector.out)
    tally = Counter()
    for job, target, (code, message) in zip(jobs, targets, run(program, jobs)):
        need(code in (REBUILT, REFUSED, OUT_OF_SCOPE), f"{name}, flip {job}: {code} {message}")
        need(code != REBUILT or job[-1].read_bytes() == target.read_bytes(), f"{name}, flip {job}: another target")
        tally[message.split(",")[0].split(":")[0] or "without effect"] += 1
        tally[message.split(",")[0]] += code == REFUSED
    rules = sum(what.startswith("refused: ") for what in tally)
    need(rules >= 20, f"the changed bytes broke {rules} rules, expected at least 20")
    print(
        f"{name}: {FLIPS} changed bytes: {tally['refused']} refused under {rules} rules, {tally['without effect']} without effect"
    )


def check_pairs(name, program, tpde, folder):
    """Rebuilds pairs that the program makes of its demo."""
    quiet = [tpde.absolute(), "--quiet"]
    subprocess.run([*quiet, "demo", "--dir", folder], check=True, stdout=subprocess.DEVNULL)
    base, target = folder / "base.safetensors", folder / "tuned.safetensors"
    options = {"raw": ["--codec", "raw"], "conditioned": ["--codec", "device"]}[name]
    pairs = {
        "usual": [base, target],
        "digests": [base, target, "--payload-digests"],
        "equal": [base, base],
        "alone": [target, "--no-base"],
    }
    jobs = []
    for pair, arguments in pairs.items():
        subprocess.run([*quiet, "encode", *arguments, *options, "-o", folder / pair], check=True, stdout=subprocess.DEVNULL)
        jobs.append([folder / pair, *([] if "--no-base" in arguments else [base]), folder / f"{pair}.out"])
    for job, (code, message) in zip(jobs, run(program, jobs)):
        wanted = base if job[0].name == "equal" else target
        need(code == REBUILT and job[-1].read_bytes() == wanted.read_bytes(), f"{name}, {job[0].name}: {code} {message}")
    print(f"{name}: {len(jobs)} pairs of the program")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", action="store_true", help="build with nvcc, and run on a device")
    parser.add_argument("--libraries", type=Path, help="a folder that --save-libraries has made")
    parser.add_argument("--save-libraries", type=Path)
    parser.add_argument("--tpde", type=Path, help="the program; its pairs are rebuilt too")
    args = parser.parse_args()
    if args.save_libraries:
        return save_libraries(args.save_libraries)
    for name, (sources, most, _) in PROGRAMS.items():
        lines = sum(len((EXAMPLES / source).read_text("utf-8").splitlines()) for source in sources)
        need(lines <= most, f"{' and '.join(sources)} have {lines} lines, more than {most}")
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor() as pool:
        work = Path(work)
        libraries = args.libraries or work / "libraries"
        if not args.libraries:
            save_libraries(libraries)
        if not args.nvcc:
            compile_emulator(work / "block.o")
        list(pool.map(lambda name: check(name, libraries, work, args), PROGRAMS))
    print(f"{len(PROGRAMS)} consumers agree with the manifests")


def check(name, libraries, work, args):
    program = build(name, libraries, work, args.nvcc)
    folders = [work / f"{name}.vectors", work / f"{name}.flips"]
    for folder in folders:
        folder.mkdir()
    vectors = [
        Vector(version, facts, folders[0])
        for version in map(versions.folder, versions.names())
        for facts in json.loads((version / "manifest.json").read_text("utf-8"))["vectors"]
    ]
    rebuilt = check_vectors(name, program, vectors, PROGRAMS[name][2])
    check_flips(name, program, rebuilt, folders[1])
    if args.tpde:
        check_pairs(name, program, args.tpde, work / f"{name}.pairs")


if __name__ == "__main__":
    main()
