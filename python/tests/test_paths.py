"""Functions on files, and the errors that they raise."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import pytest

import tpde
from conftest import Made, write_safetensors
from raised import raises


def test_the_version_is_the_crate_s() -> None:
    manifest = Path(__file__).parents[2] / "Cargo.toml"
    assert re.search(r"version = \"(.*?)\"", manifest.read_text())[1] == tpde.__version__


def test_there_and_back(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "rebuilt.safetensors"
    report = tpde.apply(made.pair, out, base=made.base)
    assert out.read_bytes() == made.target.read_bytes()
    assert report.digests_checked and report.tensors == len(made.target_bytes)
    assert made.report.ratio > 3
    assert made.report.stored_bytes == sum(made.pair.with_suffix(end).stat().st_size for end in (".tpde-index", ".tpde-blob"))


def test_paths_may_be_strings(made: Made, tmp_path: Path) -> None:
    tpde.encode(str(made.target), str(tmp_path / "p"), base=str(made.base))
    tpde.apply(str(tmp_path / "p.tpde-index"), str(tmp_path / "o"), base=str(made.base))
    assert (tmp_path / "o").read_bytes() == made.target.read_bytes()


class Named:
    """A path object of another library."""

    def __init__(self, path: str | bytes) -> None:
        self.path = path

    def __fspath__(self) -> str | bytes:
        return self.path


@pytest.mark.parametrize("form", [str, os.fsencode, lambda path: Named(str(path)), lambda path: Named(os.fsencode(path))])
def test_every_form_of_paths(form: object, made: Made, tmp_path: Path) -> None:
    base, target, pair, out = map(form, (made.base, made.target, tmp_path / "p", tmp_path / "o"))
    tpde.encode(target, pair, base=base)
    assert tpde.inspect(pair).tensors
    assert tpde.verify(pair, base=base, target=target).target_checked
    tpde.apply(pair, out, base=base)
    assert (tmp_path / "o").read_bytes() == made.target.read_bytes()
    with pytest.raises(tpde.InvalidArgument, match="is the same as input"):
        tpde.apply(pair, base, base=base, replace=True)
    with tpde.safe_open(pair, base=base, framework="np") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}
    assert {name: array.tobytes() for name, array in arrays.items()} == made.target_bytes
    loaded = tpde.numpy.load_file(pair, base=base)
    tpde.numpy.save_file(loaded, form(tmp_path / "q"), base=base)
    assert tpde.numpy.apply_(loaded, form(tmp_path / "q"), strict=False) == "already_applied"


def test_a_path_that_is_not_text(made: Made, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\xfe"
    tpde.encode(made.target, name, base=made.base)
    for form in (name, os.fsdecode(name), Path(os.fsdecode(name))):
        assert tpde.verify(form, base=made.base).base_checked
    for wrong in ("\ud800", "", b""):
        with pytest.raises(tpde.InvalidArgument):
            tpde.inspect(wrong)
        with pytest.raises(tpde.InvalidArgument):
            tpde.encode(made.target, wrong, base=made.base)


def test_without_a_base(made: Made, tmp_path: Path) -> None:
    tpde.encode(made.target, tmp_path / "p")
    tpde.apply(tmp_path / "p", tmp_path / "o")
    assert (tmp_path / "o").read_bytes() == made.target.read_bytes()


def test_a_choice_of_tensors(made: Made, tmp_path: Path) -> None:
    def names(path: Path) -> set[str]:
        content = path.read_bytes()
        return set(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))

    tpde.apply(made.pair, tmp_path / "a", base=made.base, tensors="layers.0.*")
    assert names(tmp_path / "a") == {name for name in made.target_bytes if name.startswith("layers.0.")}
    tpde.apply(made.pair, tmp_path / "b", base=made.base, tensors=["scalar", "empty"])
    assert names(tmp_path / "b") == {"scalar", "empty"}
    tpde.apply(made.pair, tmp_path / "c", base=made.base, tensors=lambda name: name == "scalar")
    assert names(tmp_path / "c") == {"scalar"}
    with pytest.raises(tpde.InvalidArgument, match="layer.*"):
        tpde.apply(made.pair, tmp_path / "d", base=made.base, tensors="layer_*")


def test_verify(made: Made) -> None:
    alone = tpde.verify(made.pair)
    assert not alone.base_checked and not alone.target_checked and alone.chunks > len(made.target_bytes)
    both = tpde.verify(made.pair, base=made.base, target=made.target)
    assert both.base_checked and both.target_checked
    with pytest.raises(tpde.Invalid) as caught:
        tpde.verify(made.pair, target=made.base)
    assert caught.value.rule == "tensor.target_digest"


def test_verify_says_whether_it_excludes_forgery_and_whether_files_can_be_written(made: Made, tmp_path: Path) -> None:
    def found(report: tpde.VerifyReport) -> tuple[str, bool | None, str | None]:
        return report.payload_authenticity, report.writable, report.not_writable

    assert found(tpde.verify(made.pair)) == ("checked", None, None)
    assert found(tpde.verify(made.pair, target=made.target)) == ("checked", None, None)
    assert found(tpde.verify(made.pair, base=made.base)) == ("checked", True, None)

    # Format 1.1 has no payload digests: only a rebuilt target excludes forgery.
    old = tmp_path / "old"
    tpde.encode(made.target, old, base=made.base, format="1.1")
    assert found(tpde.verify(old)) == ("not_checked", None, None)
    assert found(tpde.verify(old, target=made.target)) == ("not_checked", None, None)
    assert found(tpde.verify(old, base=made.base)) == ("checked", True, None)

    tpde.encode(made.target, tmp_path / "anchor")
    assert found(tpde.verify(tmp_path / "anchor")) == ("checked", None, None)
    anchor = tpde.verify(tmp_path / "anchor", no_base=True)
    assert found(anchor) == ("checked", True, None) and anchor.target_checked and not anchor.base_checked
    with pytest.raises(tpde.Invalid, match="no base") as refused:
        tpde.verify(made.pair, no_base=True)
    assert refused.value.rule == "base.tensor" and refused.value.tensor is not None
    with pytest.raises(tpde.InvalidArgument, match="no_base"):
        tpde.verify(made.pair, base=made.base, no_base=True)

    # The target has the base's header, so the pair does not store it, as it is long. Another base has the same tensors but a
    # different header.
    for name, tensors in (("plain", made.base_bytes), ("tuned", made.target_bytes)):
        path = tmp_path / f"{name}.safetensors"
        write_safetensors(path, tensors)
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        path.write_bytes((size + 8192).to_bytes(8, "little") + content[8 : 8 + size] + b" " * 8192 + content[8 + size :])
    tpde.encode(tmp_path / "tuned.safetensors", tmp_path / "same-header", base=tmp_path / "plain.safetensors")
    authenticity, writable, reason = found(tpde.verify(tmp_path / "same-header", base=made.base))
    assert (authenticity, writable) == ("checked", False) and reason is not None and "base.file" in reason
    with pytest.raises(tpde.Invalid, match="base.file"):
        tpde.apply(tmp_path / "same-header", tmp_path / "out.safetensors", base=made.base)


def test_inspect(made: Made) -> None:
    seen = tpde.inspect(made.pair)
    assert len(seen.pair_digest) == 64 and seen.target_bytes == sum(map(len, made.target_bytes.values()))
    by_name = {tensor.name: tensor for tensor in seen.tensors}
    assert by_name["embed.weight"].shape == (300, 64) and by_name["embed.weight"].dtype == "BF16"
    assert by_name["frozen.weight"].changed == 0
    assert seen.files[0]["kind"] == "safetensors"


def test_options(made: Made, tmp_path: Path) -> None:
    report = tpde.encode(made.target, tmp_path / "z", base=made.base, layout="gaps", chunk_lanes=8192)
    assert {tensor.codec for tensor in report.tensors} == {"zstd"}
    tpde.encode(made.target, tmp_path / "r", base=made.base, renamed={"embed.weight": "layers.0.mlp.weight"})
    tpde.encode(made.target, tmp_path / "s", base=made.base, favor="speed")
    tpde.verify(tmp_path / "s", base=made.base, target=made.target)
    named = ({name: "best"} for name in ("codec", "layout", "favor"))
    odd = ({"codec": 3}, {"layout": b"gaps"}, {"favor": []}, {"renamed": [1]}, {"renamed": {1: "a"}}, {"renamed": {"a": "\udc80"}})
    sizes = ({"chunk_lanes": size} for size in (5000, -1, 1 << 70, 4096.0, "4096"))
    for wrong in (*named, *odd, *sizes, {"renamed": {"a": "b"}}, {"progress": 3}):
        with pytest.raises(tpde.InvalidArgument):
            tpde.encode(made.target, tmp_path / "w", base=made.base, **wrong)
    assert not list(tmp_path.glob("w*"))


def test_progress(made: Made, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    tpde.encode(made.target, tmp_path / "p", base=made.base, progress=lambda done, total: told.append((done, total)))
    total = sum(map(len, made.target_bytes.values()))
    assert told[-1] == (total, total)


def test_progress_in_tqdm(made: Made, tmp_path: Path) -> None:
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(disable=False, file=open(tmp_path / "bar", "w")) as bar:
        tpde.verify(made.pair, base=made.base, progress=bar)
        assert bar.n == bar.total == sum(map(len, made.target_bytes.values()))
    tpde.verify(made.pair, progress=True)


def test_an_exception_of_progress_ends_the_work_and_leaves_nothing(made: Made, tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        tpde.verify(made.pair, base=made.base, progress=fail)


def write_folder(folder: Path, tensors: dict[str, bytes]) -> Path:
    """A checkpoint of two shards."""
    folder.mkdir()
    shards = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(tensors)}
    for shard in set(shards.values()):
        write_safetensors(folder / shard, {name: raw for name, raw in tensors.items() if shards[name] == shard})
    index = {"metadata": {"total_size": sum(map(len, tensors.values()))}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Path and bytes of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestErrors:
    def test_wrong_base(self, made: Made, tmp_path: Path) -> None:
        wrong = bytearray(made.base.read_bytes())
        wrong[-1] ^= 1
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(tpde.WrongBase) as caught:
            tpde.apply(made.pair, tmp_path / "o", base=tmp_path / "wrong")
        assert caught.value.tensor == "scalar" and len(caught.value.expected) == 32
        assert not (tmp_path / "o").exists()

    def test_already_applied(self, made: Made, tmp_path: Path) -> None:
        with pytest.raises(tpde.AlreadyApplied):
            tpde.apply(made.pair, tmp_path / "o", base=made.target, tensors="*")

    def test_invalid_says_where(self, made: Made) -> None:
        with pytest.raises(tpde.Invalid) as caught:
            tpde.verify(made.damaged("layers.0.mlp.weight"))
        assert caught.value.rule == "payload.crc32" and caught.value.section == "6"
        assert caught.value.tensor == "layers.0.mlp.weight" and caught.value.chunk is not None
        assert "payload.crc32" in str(caught.value)

    def test_files(self, made: Made, tmp_path: Path) -> None:
        with raises("not_found") as caught:
            tpde.inspect(tmp_path / "none")
        assert isinstance(caught.value, FileNotFoundError) and caught.value.errno == 2
        with pytest.raises(FileExistsError) as exists:
            tpde.encode(made.target, made.pair, base=made.base)
        assert exists.value.code == "already_exists" and isinstance(exists.value, tpde.SystemRefused)
        tpde.encode(made.target, made.pair, base=made.base, replace=True, chunk_lanes=4096)
        (tmp_path / "text").write_text("no checkpoint at all")
        with pytest.raises(tpde.BadCheckpoint):
            tpde.encode(tmp_path / "text", tmp_path / "p", base=made.base)

    def test_what_is_read_is_not_written(self, made: Made) -> None:
        with pytest.raises(tpde.InvalidArgument, match="is the same as input"):
            tpde.apply(made.pair, made.base, base=made.base, replace=True)

    @pytest.mark.parametrize("base_is", ["file", "link", "hard link", "folder", "link to folder"])
    def test_no_output_is_written_over_a_base(self, base_is: str, made: Made, tmp_path: Path) -> None:
        target = write_folder(tmp_path / "target", made.target_bytes)
        folder = tmp_path / "folder"
        if "folder" in base_is:
            base = write_folder(folder, made.base_bytes)
            outputs = [folder, folder / "inside"]
        else:
            folder.mkdir()
            base = folder / "model-00001-of-00002.safetensors"  # has the name of a shard of the target
            base.write_bytes(made.base.read_bytes())
            outputs = [folder, base]
        given = base
        if base_is == "hard link":
            given = tmp_path / "base.safetensors"
            given.hardlink_to(base)
        elif "link" in base_is:
            given = tmp_path / "linked"
            given.symlink_to(base)
        tpde.encode(target, tmp_path / "p", base=given)
        before = contents(folder)
        for output in outputs:
            with pytest.raises(tpde.InvalidArgument):
                tpde.apply(tmp_path / "p", output, base=given, replace=True)
            assert contents(folder) == before, output
        tpde.apply(tmp_path / "p", tmp_path / "out", base=given, replace=True)
        assert contents(tmp_path / "out") == contents(target)

    def test_no_pair_is_written_over_a_checkpoint(self, made: Made, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "base", made.base_bytes)
        before = contents(folder)
        for base, target in [(folder, made.target), (made.base, folder)]:
            with pytest.raises(tpde.InvalidArgument):
                tpde.encode(target, folder / "p", base=base, replace=True)
        with pytest.raises(tpde.InvalidArgument):
            tpde.numpy.save_file(tpde.numpy.load_file(made.pair, base=made.base), folder / "p", base=folder, replace=True)
        assert contents(folder) == before

    def test_all_are_one_family_and_can_be_sent_to_another_process(self, made: Made, tmp_path: Path) -> None:
        calls = [
            lambda: tpde.verify(made.damaged("embed.weight")),
            lambda: tpde.inspect(tmp_path / "none"),
            lambda: tpde.verify(made.pair, base=made.target),
            lambda: tpde.apply(made.pair, made.base, base=made.base),
        ]
        for call in calls:
            with pytest.raises(tpde.TpdeError) as caught:
                call()
            again = pickle.loads(pickle.dumps(caught.value))
            assert type(again) is type(caught.value) and str(again) == str(caught.value)
            assert {k: v for k, v in vars(again).items() if k != "_attributes"} == {
                k: v for k, v in vars(caught.value).items() if k != "_attributes"
            }

    def test_a_panic_is_an_exception_too(self) -> None:
        with raises("internal", match="a panic for the tests"):
            tpde._tpde._panic()


def test_older_weights_that_loaders_prefer(made: Made, tmp_path: Path) -> None:
    index = "model.safetensors.index.json"
    for name, tensors in (("base", made.base_bytes), ("target", made.target_bytes)):
        (tmp_path / name).mkdir()
        weight_map = {tensor: f"model-{1 + number % 2:05}-of-00002.safetensors" for number, tensor in enumerate(tensors)}
        for shard in sorted(set(weight_map.values())):
            write_safetensors(
                tmp_path / name / shard, {tensor: raw for tensor, raw in tensors.items() if weight_map[tensor] == shard}
            )
        (tmp_path / name / index).write_text(json.dumps({"weight_map": weight_map}))
    tpde.encode(tmp_path / "target", tmp_path / "shards", base=tmp_path / "base")
    served = tmp_path / "served"
    served.mkdir()
    write_safetensors(served / "model.safetensors", made.base_bytes)
    with pytest.raises(tpde.BadCheckpoint, match="model.safetensors"):
        tpde.apply(tmp_path / "shards", served, base=tmp_path / "base")
    assert [path.name for path in served.iterdir()] == ["model.safetensors"]
    tpde.apply(tmp_path / "shards", served, base=tmp_path / "base", replace=True)
    assert sorted(path.name for path in served.iterdir()) == sorted(path.name for path in (tmp_path / "target").iterdir())

    # The mirror image: transformers reads the file, and the library reads the shards.
    write_safetensors(served / "model.safetensors", made.base_bytes)
    with pytest.raises(tpde.BadCheckpoint, match="model.safetensors"):
        tpde.encode(served, tmp_path / "both", base=tmp_path / "base")
    tpde.encode(served / index, tmp_path / "both", base=tmp_path / "base")
    assert [file["name"] for file in tpde.inspect(tmp_path / "both").files][-1] == index
