"""The vectors of each version of the format. A frozen version is an archive, `v1.tar.zst`; a version under construction is a folder.

An archive is unpacked once, into `target/vectors/` and a folder named after its SHA-256. The tests of the crate use the same folder.
Needs the package zstandard or the program zstd.
"""

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

try:
    import zstandard
except ImportError:
    zstandard = None

HERE = Path(__file__).resolve().parent
ENDING = ".tar.zst"


def names():
    """The versions that have vectors, as `v1`, in their order."""
    found = {path.name.removesuffix(ENDING) for path in HERE.iterdir()}
    found = {name for name in found if re.fullmatch(r"v\d+(\.\d+)?", name)}
    return sorted(found, key=lambda name: [int(number) for number in name[1:].split(".")])


def archive(name):
    return HERE / (name + ENDING)


def contents(name):
    """The files of a version, by path below its folder."""
    if archive(name).exists():
        return files_of(archive(name))
    folder = HERE / name
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def folder(name):
    """The folder with the files of a version."""
    return unpacked(archive(name)) if archive(name).exists() else HERE / name


def unpacked(path):
    """The folder with the files of an archive."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent / "target")).resolve() / "vectors"
    place = target / hashlib.sha256(path.read_bytes()).hexdigest()
    if not place.exists():
        files = files_of(path)
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".unpacking-") as temporary:
            whole = Path(temporary) / "whole"
            for name, data in files.items():
                file = whole / top_of(path) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            try:
                whole.rename(place)
            except OSError:
                if not place.exists():  # else another process was faster
                    raise
    return place / top_of(path)


def top_of(path):
    """The only folder at the root of an archive."""
    return path.name.removesuffix(ENDING)


def files_of(path):
    """The files of an archive, by path below its only top folder."""
    files = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(expanded(path))) as tar:
            for member in tar:
                top, _, name = member.name.partition("/")
                if not member.isfile() or top != top_of(path) or not name or ".." in name.split("/"):
                    raise ValueError(f"unexpected member {member.name!a}")
                files[name] = tar.extractfile(member).read()
    except (ValueError, tarfile.TarError) as error:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        right = "Section 15 of spec/tpde-format.md has the right SHA-256"
        raise SystemExit(f"{path}: damaged, {error}. {right}, that of these bytes is {digest}") from None
    return files


def expanded(path):
    if zstandard:
        try:
            return zstandard.ZstdDecompressor().decompress(path.read_bytes(), allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(error) from None
    if not shutil.which("zstd"):
        raise SystemExit("archives of vectors need the Python package zstandard or the program zstd")
    run = subprocess.run(["zstd", "-dcq"], input=path.read_bytes(), capture_output=True)
    if run.returncode:
        raise ValueError(run.stderr.decode(errors="replace").strip())
    return run.stdout


def freeze(name):
    """Makes the archive of a folder, and removes the folder. The bytes follow from the files and from the version of zstd."""
    files, tar = contents(name), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as out:
        for path, data in sorted(files.items()):
            member = tarfile.TarInfo(f"{name}/{path}")  # of time 0, user 0 and group 0
            member.size, member.mode = len(data), 0o644
            out.addfile(member, io.BytesIO(data))
    with archive(name).open("xb") as out:
        out.write(zstandard.ZstdCompressor(level=22, write_checksum=True).compress(tar.getvalue()))
    assert contents(name) == files
    shutil.rmtree(HERE / name)
    return hashlib.sha256(archive(name).read_bytes()).hexdigest()
