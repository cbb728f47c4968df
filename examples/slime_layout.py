#!/usr/bin/env python3
"""Convert versions between slime's layout on disk and pairs, in both directions.

slime publishes a version as a folder `weight_v000007` with one zstd frame per changed tensor: the XOR with the version before, or the positions
and values of the bytes that changed. Pairs of the same versions are smaller, and are checked against their base. Tensors are converted
one by one, in bounded memory. Two hooks do it during training:

    --custom-update-weight-post-write-path slime_layout.post_write           # in the trainer: makes a pair of the folder
    --sglang-custom-pull-weights-pre-read-hook slime_layout.pre_read         # beside an engine: makes the folder of the pair

They read `TPDE_SLIME_CHECKPOINT`, the checkpoint of version 0, and `TPDE_SLIME_PAIRS`, the folder of pairs. Without arguments, this program
converts versions of a made-up model and compares them.

    pip install ./python torch zstandard xxhash blake3
    python examples/slime_layout.py
"""

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import blake3
import numpy
import safetensors.numpy
import torch
import xxhash
import zstandard
from safetensors import safe_open

import tpde
import tpde.torch

#: Bytes of tensors that are converted at a time. A larger tensor is converted alone.
GROUP = 1 << 28
INDEX = "model.safetensors.index.json"
CHECKSUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


class BadVersion(ValueError):
    """A folder is no version in slime's layout, or not one of this base."""


class Checkpoint:
    """The tensors of a checkpoint, or of a pair and its base, one at a time."""

    def __init__(self, path: Path, pair: Path | None = None) -> None:
        self._stack, self._files = ExitStack(), {}
        if pair is not None:
            opened = [tpde.safe_open(pair, "pt", base=path)]
        else:
            opened = [safe_open(file, "pt") for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])]
        for one in opened:
            file = self._stack.enter_context(one)
            self._files |= dict.fromkeys(file.keys(), file)

    def names(self) -> list[str]:
        return list(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise BadVersion(f"tensor {name!r} is missing in the base")
        return self._files[name].get_tensor(name)

    def close(self) -> None:
        self._stack.close()


def as_bytes(tensor: torch.Tensor) -> numpy.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def frame_of(encoding: str, base: numpy.ndarray, target: numpy.ndarray) -> bytes:
    """The difference between two tensors, as slime writes it."""
    difference = base ^ target
    if encoding == "overwrite":
        positions = numpy.flatnonzero(difference)
        count = numpy.array([positions.size], "<u4")
        difference = numpy.concatenate([count.view("u1"), positions.astype("<u4").view("u1"), target[positions]])
    return zstandard.ZstdCompressor(level=1).compress(difference)


def target_of(encoding: str, base: numpy.ndarray, frame: numpy.ndarray, where: str) -> numpy.ndarray:
    """The target of a frame."""
    limit = base.size if encoding == "xor" else 4 + 5 * base.size
    try:
        size = zstandard.frame_content_size(frame.data)
        if not 0 <= size <= limit:
            raise BadVersion(f"{where} has a frame of {size} bytes: expected at most {limit}")
        difference = numpy.frombuffer(zstandard.ZstdDecompressor().decompress(frame.data), "u1")
    except zstandard.ZstdError as error:
        raise BadVersion(f"{where} is no zstd frame: {error}") from error
    if encoding == "xor":
        if difference.size != base.size:
            raise BadVersion(f"{where} has {difference.size} bytes: expected {base.size}")
        return base ^ difference
    count = int(difference[:4].view("<u4")[0]) if difference.size >= 4 else -1
    if difference.size != 4 + 5 * count:
        raise BadVersion(f"{where} has {difference.size} bytes and a count of {count}: expected {4 + 5 * max(count, 0)} bytes")
    positions = difference[4 : 4 + 4 * count].view("<u4")
    if count and positions.max() >= base.size:
        raise BadVersion(f"{where} changes byte {positions.max()}: expected positions below {base.size}")
    target = base.copy()
    target[positions] = difference[4 + 4 * count :]
    return target


def groups(names: list[str], checkpoint: Checkpoint) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a checkpoint, some at a time."""
    group: dict[str, torch.Tensor] = {}
    for name in names:
        group[name] = checkpoint.tensor(name)
        if sum(one.nbytes for one in group.values()) >= GROUP:
            yield group
            group = {}
    if group:
        yield group


def to_slime(base: Checkpoint, target: Checkpoint, folder: Path, version: int, encoding: str, checksum: str) -> None:
    """Writes the folder of a version. Its index is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = []
    for group in groups(target.names(), target):
        frames, sums = {}, {}
        for name, tensor in group.items():
            before, after = as_bytes(base.tensor(name)), as_bytes(tensor)
            if not numpy.array_equal(before, after):
                frames[name] = numpy.frombuffer(frame_of(encoding, before, after), "u1")
                sums[name] = CHECKSUMS[checksum](after)
        if frames:
            safetensors.numpy.save_file(frames, folder / f"part-{len(files)}.tmp", metadata=sums)
            files.append(list(frames))
    places = {}
    for at, names in enumerate(files):
        name = f"model-{at:05}-of-{len(files):05}.safetensors"
        (folder / f"part-{at}.tmp").rename(folder / name)
        places |= dict.fromkeys(names, name)
    metadata = {"version": f"{version:06}", "base_version": f"{version - 1:06}", "delta_encoding": encoding}
    metadata |= {"compression_format": "zstd", "checksum_format": checksum}
    (folder / "index.tmp").write_text(json.dumps({"metadata": metadata, "weight_map": places}))
    (folder / "index.tmp").rename(folder / INDEX)


def index_of(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Metadata, and the file of each changed tensor."""
    try:
        index = json.loads((folder / INDEX).read_text())
        metadata, places = dict(index["metadata"]), dict(index["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadVersion(f"{folder} has no index: {type(error).__name__}: {error}") from error
    for key, values in {
        "delta_encoding": ["xor", "overwrite"],
        "compression_format": ["zstd"],
        "checksum_format": [*CHECKSUMS],
    }.items():
        if metadata.get(key) not in values:
            raise BadVersion(f"{folder / INDEX}: {key} is {metadata.get(key)!r}: expected one of {values}")
    if any(Path(name).name != name for name in places.values()):
        raise BadVersion(f"{folder / INDEX} names files outside of its folder")
    return metadata, places


def from_slime(base: Checkpoint, folder: Path, pair: Path) -> None:
    """Writes the pair of a version. The checksum of each changed tensor is compared."""
    metadata, places = index_of(folder)
    unknown = set(places) - set(base.names())
    if unknown:
        raise BadVersion(f"{folder} changes {min(unknown)!r} and {len(unknown) - 1} more tensors that the base lacks")
    encoding, checksum = metadata["delta_encoding"], metadata["checksum_format"]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as work:
        opened = {name: stack.enter_context(safe_open(folder / name, "np")) for name in set(places.values())}
        sums = {name: file.metadata() or {} for name, file in opened.items()}
        parts = []
        for group in groups(base.names(), base):
            targets = dict(group)
            for name in group.keys() & places.keys():
                file, before = places[name], as_bytes(group[name])
                where = f"{folder / file}: {name}"
                after = target_of(encoding, before, opened[file].get_tensor(name), where)
                found = CHECKSUMS[checksum](after)
                if found != sums[file].get(name):
                    raise BadVersion(
                        f"{where} has the {checksum} {found}: expected {sums[file].get(name)}. Is the base version right?"
                    )
                targets[name] = torch.from_numpy(after).view(group[name].dtype).view(group[name].shape)
            parts.append(Path(work) / f"part-{len(parts)}")
            tpde.torch.save_file(targets, parts[-1], base=group)
        tpde.merge(parts, pair, replace=True)


class Versions:
    """Pairs in a folder: `v000007` leads from version 6 to 7, `from-base-000007` from version 0 to 7."""

    def __init__(self) -> None:
        self.checkpoint, self.folder = (Path(os.environ[f"TPDE_SLIME_{name}"]) for name in ("CHECKPOINT", "PAIRS"))
        self.folder.mkdir(parents=True, exist_ok=True)

    def pair(self, version: int) -> Path:
        return self.folder / f"v{version:06}"

    def opened(self, version: int) -> Checkpoint:
        """The tensors of a version."""
        if version == 0:
            return Checkpoint(self.checkpoint)
        whole = self.folder / f"from-base-{version:06}"
        if not whole.with_name(whole.name + ".tpde-index").exists():
            former = [self.folder / f"from-base-{version - 1:06}"] if version > 1 else []
            if former:
                self.opened(version - 1).close()
            tpde.fold([*former, self.pair(version)], whole, base=self.checkpoint)
        return Checkpoint(self.checkpoint, whole)


def post_write(args: Any, version_dir: str, rollout_engines: Any) -> None:
    """slime's hook after a version was written. All ranks call it, and the first one works. The first call has an empty folder."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0:
        return
    versions, folder = Versions(), Path(version_dir)
    if not (folder / INDEX).exists():
        shutil.rmtree(versions.folder)  # versions of another run
        return
    version = int(index_of(folder)[0]["version"])
    base = versions.opened(version - 1)
    from_slime(base, folder, versions.pair(version))
    base.close()


def pre_read(source_dir: str, target_version: int) -> None:
    """slime's hook before an engine reads versions up to this one."""
    versions = Versions()
    for version in range(1, target_version + 1):
        folder = Path(source_dir) / f"weight_v{version:06}"
        if not (folder / INDEX).exists():
            base, target = versions.opened(version - 1), versions.opened(version)
            to_slime(base, target, folder, version, "xor", "xxh3-128")
            base.close()
            target.close()


def contents(folder: Path) -> dict[str, Any]:
    """Index, frames and checksums of a version. The order of checksums in a file is not fixed."""
    found: dict[str, Any] = {INDEX: json.loads((folder / INDEX).read_text())}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            found[path.name] = file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    return found


def compare(base: Path, target: Path, work: Path, encoding: str, checksum: str) -> str:
    """Converts a version in both directions, and compares all tensors and frames."""
    before, after = Checkpoint(base), Checkpoint(target)
    folder, again, pair = work / "weight_v000001", work / "again", work / "pair"
    to_slime(before, after, folder, 1, encoding, checksum)
    from_slime(before, folder, pair)
    rebuilt = Checkpoint(base, pair)
    assert all(numpy.array_equal(as_bytes(after.tensor(name)), as_bytes(rebuilt.tensor(name))) for name in after.names())
    to_slime(before, rebuilt, again, 1, encoding, checksum)
    assert contents(folder) == contents(again)
    sizes = [sum(path.stat().st_size for path in paths) for paths in (folder.iterdir(), work.glob("pair.*"))]
    return f"{encoding:9} {checksum:8} {sizes[0]:9,} bytes in slime's layout, {sizes[1]:9,} bytes as a pair"


def made_up(folder: Path, versions: int) -> list[Path]:
    """Versions of a checkpoint, of which each changes a fiftieth of some tensors."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    tensors = {f"layers.{layer}.weight": (torch.randn(512, 512) * 0.02).bfloat16() for layer in range(4)}
    tensors |= {"norm.weight": torch.ones(512), "empty": torch.zeros(0, 3)}
    paths = []
    for version in range(versions):
        paths.append(folder / f"version-{version}.safetensors")
        save_file(tensors, paths[-1])
        for name in [*tensors][version : version + 3]:
            tensors[name] = torch.where(torch.rand(tensors[name].shape) < 0.02, tensors[name] * 1.01, tensors[name]).to(
                tensors[name].dtype
            )
    return paths


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        paths = made_up(work, 3)
        for encoding in ("xor", "overwrite"):
            for checksum in CHECKSUMS:
                with tempfile.TemporaryDirectory() as own:
                    print(compare(paths[0], paths[1], Path(own), encoding, checksum))

        # The hooks: what a trainer writes reaches an engine as pairs.
        os.environ |= {"TPDE_SLIME_CHECKPOINT": str(paths[0]), "TPDE_SLIME_PAIRS": str(work / "pairs")}
        post_write(None, str(work), [])
        for version in (1, 2):
            before, after = Checkpoint(paths[version - 1]), Checkpoint(paths[version])
            to_slime(before, after, work / "trainer" / f"weight_v{version:06}", version, "overwrite", "blake3")
            post_write(None, str(work / "trainer" / f"weight_v{version:06}"), [])
        pre_read(str(work / "engine"), 2)
        for version in (1, 2):
            before, folder = Checkpoint(paths[version - 1]), work / "engine" / f"weight_v{version:06}"
            from_slime(before, folder, work / "check")
            rebuilt, after = Checkpoint(paths[version - 1], work / "check"), Checkpoint(paths[version])
            assert all(numpy.array_equal(as_bytes(after.tensor(name)), as_bytes(rebuilt.tensor(name))) for name in after.names())
        print("2 versions went through both hooks")


if __name__ == "__main__":
    main()
