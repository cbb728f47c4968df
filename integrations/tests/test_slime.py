"""examples/slime_layout.py refuses folders that are no versions of their base. The example itself compares good ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file

spec = importlib.util.spec_from_file_location("slime_layout", Path(__file__).parents[2] / "examples" / "slime_layout.py")
assert spec is not None and spec.loader is not None
slime: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(slime)


class Made:
    def __init__(self, folder: Path, encoding: str) -> None:
        self.paths = slime.made_up(folder, 3)
        self.folder, self.pair = folder / "weight_v000001", folder / "pair"
        before, after = (slime.Checkpoint(path) for path in self.paths[:2])
        slime.to_slime(before, after, self.folder, 1, encoding, "blake3")
        (self.file,) = self.folder.glob("*.safetensors")
        with safe_open(self.file, "np") as file:
            self.sums = file.metadata()
            self.frames = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)

    def change(self, name: str, data: bytes) -> None:
        """Writes another difference of a tensor."""
        frame = zstandard.ZstdCompressor().compress(data)
        self.frames[name] = slime.numpy.frombuffer(frame, "u1")
        save_file(self.frames, self.file, metadata=self.sums)

    def convert(self, base: int = 0) -> None:
        slime.from_slime(slime.Checkpoint(self.paths[base]), self.folder, self.pair)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_folders_that_do_not_fit_are_refused(encoding: str, tmp_path: Path) -> None:
    made = Made(tmp_path, encoding)
    made.convert()
    name, size = next(iter(made.frames)), 512 * 512 * 2
    # Positions and values can be written to another base, and are still not what the trainer has.
    with pytest.raises(slime.BadVersion, match="Is the base version right"):
        made.convert(base=2)
    wrong = {"xor": (b"\1", "has 1 bytes: expected"), "overwrite": (b"\2\0\0\0\0\0\0\0\7", "a count of 2: expected 14 bytes")}
    made.change(name, wrong[encoding][0])
    with pytest.raises(slime.BadVersion, match=wrong[encoding][1]):
        made.convert()
    made.change(name, bytes(6 * size))
    with pytest.raises(slime.BadVersion, match="expected at most"):
        made.convert()
    if encoding == "overwrite":
        made.change(name, b"\1\0\0\0" + size.to_bytes(4, "little") + b"\7")
        with pytest.raises(slime.BadVersion, match=f"changes byte {size}: expected positions below {size}"):
            made.convert()


def test_indexes_that_say_otherwise_are_refused(tmp_path: Path) -> None:
    made = Made(tmp_path, "xor")
    good = json.loads((made.folder / slime.INDEX).read_text())
    name = next(iter(good["weight_map"]))
    for key, value, message in [
        ("delta_encoding", "arc_v3", "delta_encoding is 'arc_v3': expected one of"),
        ("checksum_format", "md5", "checksum_format is 'md5'"),
        ("compression_format", None, "compression_format is None"),
    ]:
        index = {**good, "metadata": {**good["metadata"], key: value}}
        (made.folder / slime.INDEX).write_text(json.dumps(index))
        with pytest.raises(slime.BadVersion, match=message):
            made.convert()
    for places, message in [
        ({name: "../other.safetensors"}, "outside of its folder"),
        ({"unknown": made.file.name}, "the base lacks"),
    ]:
        (made.folder / slime.INDEX).write_text(json.dumps({**good, "weight_map": places}))
        with pytest.raises(slime.BadVersion, match=message):
            made.convert()
    (made.folder / slime.INDEX).unlink()
    with pytest.raises(slime.BadVersion, match="has no index"):
        made.convert()
