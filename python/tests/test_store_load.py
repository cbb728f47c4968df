"""Versions of a store that are loaded into memory: the tensors of `get`, the same checks, and nothing left behind."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import tpde  # noqa: E402
import tpde.store  # noqa: E402
from conftest import Made  # noqa: E402
from raised import raises  # noqa: E402
from test_store import steps  # noqa: E402


@pytest.fixture
def store(tmp_path: Path) -> tpde.store.Store:
    return tpde.store.init(tmp_path / "store", anchor_percent=0)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def check_equal(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    """Names, dtypes, shapes and bits are equal."""
    assert loaded.keys() == expected.keys() and expected
    for name, one in loaded.items():
        assert (type(one), one.dtype, one.shape) == (type(expected[name]), expected[name].dtype, expected[name].shape), name
        if isinstance(one, torch.Tensor):
            assert one.is_contiguous() and torch.equal(bits(one), bits(expected[name])), name
        else:
            assert one.flags.c_contiguous and one.tobytes() == expected[name].tobytes(), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def got(store: tpde.store.Store, version: str, path: Path, **how: Any) -> dict[str, Any]:
    """The tensors of the files that `get` writes."""
    store.get(version, path, **how)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: one for file in files for name, one in safetensors_torch.load_file(file).items()}


def test_tensors_are_those_of_get(store: tpde.store.Store, tmp_path: Path, temporary: Path) -> None:
    for path in steps(tmp_path, 4):
        store.put(path)
    store.create_branch("same", start="main@2")
    before = sorted(tmp_path.rglob("*"))
    seen: list[tuple[int, int]] = []
    for version in ("main", "main@0", "main@2", "same"):
        loaded = store.load(version, progress=lambda done, total: seen.append((done, total)))
        assert sorted(tmp_path.rglob("*")) == before, "nothing is left"
        check_equal(loaded, got(store, version, tmp_path / "out"))
        (tmp_path / "out").unlink()
    assert seen[-1] == (store.version("same").tensor_bytes,) * 2
    loaded["embed.weight"].zero_()  # memory of its own
    check_equal(store.load("main@2"), got(store, "main@2", tmp_path / "again"))


def test_arrays(store: tpde.store.Store, tmp_path: Path) -> None:
    tensors = {"w": torch.randn(70, 100), "b": torch.randn(9).to(torch.bfloat16), "s": torch.tensor(3), "e": torch.empty(0, 7)}
    tensors["f8"] = torch.randn(4, 6).to(torch.float8_e4m3fn)
    store.put(tensors)
    check_equal(store.load("main"), tensors)
    arrays = store.load("main", "np", as_integers=True)
    assert (arrays["b"].dtype, arrays["f8"].dtype) == (np.uint16, np.uint8)
    for name, array in arrays.items():
        assert array.shape == tuple(tensors[name].shape) and array.tobytes() == bits(tensors[name]).numpy().tobytes(), name
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert store.load("main", "np")["b"].dtype == ml_dtypes.bfloat16
    store.put(arrays)  # with the dtypes of the tensors
    assert store.version("main").state == store.version("main@0").state


def test_packed_dtypes(store: tpde.store.Store) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("PyTorch has no F4")
    packed = {"w": torch.arange(48, dtype=torch.uint8).view(6, 8).view(torch.float4_e2m1fn_x2)}
    store.put(packed)
    assert torch.equal(store.load("main")["w"].view(torch.uint8), packed["w"].view(torch.uint8))
    assert store.load("main", "np", as_integers=True)["w"].tobytes() == packed["w"].view(torch.uint8).numpy().tobytes()


def test_some_tensors_and_rectangles(store: tpde.store.Store, tmp_path: Path, temporary: Path) -> None:
    weights = {"a.weight": np.arange(6000, dtype=np.float32).reshape(60, 100), "b.weight": np.ones((3, 4), np.float16)}
    for number in range(3):
        weights["a.weight"][number::7] += 1
        store.put(weights, chunk_lanes=4096)
    for index in (np.s_[3:9], np.s_[:, 50:], np.s_[-2:, 7], np.s_[..., 1:2]):
        how: dict[str, Any] = {"tensors": "b.*", "parts": {"a.*": index}}
        check_equal(store.load("main", **how), got(store, "main", tmp_path / "out", **how))
        (tmp_path / "out").unlink()
    assert list(store.load("main", tensors=["b.*"])) == ["b.weight"]
    # Only the chunks of the rectangle are read.
    large = np.random.default_rng(1).standard_normal((1 << 12, 1 << 10), dtype=np.float32)
    store.put({"a.weight": large}, branch="large")
    whole, part = tmp_path / "whole", tmp_path / "part"
    store.load("large", cache=whole)
    assert np.array_equal(store.load("large", "np", parts={"a.*": np.s_[:1]}, cache=part)["a.weight"], large[:1])
    sizes = [sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file()) for folder in (whole, part)]
    assert 0 < sizes[1] < sizes[0] / 3
    for parts, error, match in (
        ({"c.*": np.s_[:1]}, tpde.InvalidArgument, "matches"),
        ({"a.*": np.s_[:61]}, "out_of_range", "61"),
        ({"a.*": [np.s_[:1], np.s_[2:3]]}, tpde.InvalidArgument, "2 rectangles"),
    ):
        with raises(error, match=match):
            store.load("main", parts=parts)
    assert not list(temporary.iterdir())


def test_sharded_folders_with_other_files(store: tpde.store.Store, tmp_path: Path, made: Made) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    first, second = ({f"{shard}.{n}": torch.randn(64, 64).to(torch.bfloat16) for n in range(3)} for shard in "ab")
    for change in (0, 1):
        names = {}
        for number, shard in enumerate((first, second), 1):
            name = f"model-0000{number}-of-00002.safetensors"
            safetensors_torch.save_file({key: one + change for key, one in shard.items()}, folder / name)
            names |= dict.fromkeys(shard, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        (folder / "config.json").write_text(json.dumps({"step": change}))
        store.put(folder)
    assert store.version("main").files == ["config.json"]
    loaded = store.load("main")
    check_equal(loaded, {name: one + 1 for name, one in (first | second).items()})
    check_equal(loaded, got(store, "main", tmp_path / "out"))


def test_pairs_that_cut_tensors(store: tpde.store.Store, tmp_path: Path) -> None:
    tensors = {f"layers.{n}.self_attn.{name}.weight": torch.randn(64, 64) for n in range(2) for name in ("q_proj", "o_proj")}
    for step in range(2):
        store.put({name: one + step for name, one in tensors.items()}, split="llama:4")
    check_equal(store.load("main"), {name: one + 1 for name, one in tensors.items()})


def test_checkpoints_that_the_caller_has(store: tpde.store.Store, tmp_path: Path, made: Made) -> None:
    store.put(made.base, branch="outside", external="hub/name")
    store.put(made.target, parent="outside", have={"outside": made.base})
    expected = safetensors_torch.load_file(made.target)
    check_equal(store.load("main", have={"outside@0": made.base}), expected)
    with raises("external") as caught:
        store.load("main")
    assert (caught.value.version, caught.value.hint) == ("outside@0", "hub/name")
    for wrong, error in ((made.target, tpde.AlreadyApplied), (steps(tmp_path, 1)[0], tpde.WrongBase)):
        with raises(error):
            store.load("main", have={"outside@0": wrong})
    with pytest.raises(tpde.InvalidArgument, match="was passed as this version, so use it as it is"):
        store.load("outside", have={"outside@0": made.base})
    # The version itself is rebuilt from the store, whatever the caller has under its name.
    paths = steps(tmp_path, 2)
    for path in paths:
        store.put(path, branch="steps")
    check_equal(store.load("steps", have={"steps@1": paths[0]}), safetensors_torch.load_file(paths[1]))


def test_a_damaged_shortcut_is_left_out_and_named(
    store: tpde.store.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = steps(tmp_path, 4)
    for path in paths:
        store.put(path)
    store.fold("main@0", "main@3")
    (manifest,) = (tmp_path / "store" / "shortcuts").rglob("*.json")
    segment = json.loads(manifest.read_text())["pair"]["blob"]["segments"][0]
    blob = tmp_path / "store" / "objects" / f"{segment['digest']}.{segment['upload']}"
    blob.write_bytes(blob.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "tpde"):
        check_equal(store.load("main"), safetensors_torch.load_file(paths[3]))
    assert "the shortcut from main@0 to main@3 is damaged" in caplog.text


def test_damage_is_found(store: tpde.store.Store, tmp_path: Path, temporary: Path) -> None:
    for path in steps(tmp_path, 2):
        store.put(path)
    for blob in (tmp_path / "store" / "objects").iterdir():
        content = blob.read_bytes()
        for wrong in (content[:-1], bytes([content[0] ^ 1]) + content[1:]):
            blob.write_bytes(wrong)
            with raises("damaged") as caught:
                store.load("main")
            assert caught.value.object == f"objects/{blob.name}"
        blob.write_bytes(content)
    store.load("main")
    assert not list(temporary.iterdir())


def test_errors_are_typed(store: tpde.store.Store, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("no_version"):
        store.load("main")
    store.put({"w": torch.randn(1000).to(torch.bfloat16)})
    for arguments, error in (
        ({"framework": "jax"}, tpde.InvalidArgument),
        ({"framework": "np", "device": "cuda"}, "no_device"),
        ({"device": "nowhere"}, "no_device"),
        ({"cache": tmp_path / "store" / "cache"}, tpde.InvalidArgument),
        ({"as_integers": "yes"}, tpde.InvalidArgument),
    ):
        with raises(error):
            store.load("main", **arguments)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises((tpde.OutOfMemory, MemoryError)):
        store.load("main")
    assert not list(temporary.iterdir()) and not (tmp_path / "store" / "cache").exists()


def test_an_iterator_of_names_is_used_more_than_once(store: tpde.store.Store, tmp_path: Path) -> None:
    store.put({"a": torch.randn(5000), "b": torch.randn(4), "c": torch.randn(2)})
    expected = {"a": (5000,), "b": (2,)}
    for names in (["a"], iter(["a"]), (name for name in ["a"])):
        loaded = store.load("main", tensors=names, parts={"b": np.s_[0:2]})
        assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == expected
    store.get("main", tmp_path / "some", tensors=iter(["a"]), parts={"b": np.s_[0:2]})
    assert {name: tuple(one.shape) for name, one in safetensors_torch.load_file(tmp_path / "some").items()} == expected


def test_an_interruption_leaves_nothing(store: tpde.store.Store, tmp_path: Path, temporary: Path) -> None:
    store.put({"w": torch.randn(1 << 22)})

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.load("main", progress=stop)
    assert not list(temporary.iterdir())


def test_a_store_with_a_limit_of_memory_in_a_forked_process(store: tpde.store.Store, tmp_path: Path) -> None:
    paths = steps(tmp_path, 2)
    for path in paths:
        store.put(path)
    small = tpde.store.Store(store.location, memory=96 << 20)
    check_equal(small.load("main"), safetensors_torch.load_file(paths[1]))
    expected = small.load("main", "np", as_integers=True)
    child = os.fork()
    if child == 0:
        again = small.load("main", "np", as_integers=True)
        os._exit(0 if all(one.tobytes() == again[name].tobytes() for name, one in expected.items()) else 1)
    assert expected and os.waitpid(child, 0)[1] == 0


def test_without_pytorch(store: tpde.store.Store) -> None:
    store.put({"w": np.arange(9, dtype=np.float32)})
    program = """
import sys
sys.modules["torch"] = None
import tpde.store
print(tpde.store.Store(sys.argv[1]).load("main", "np")["w"].tolist())
"""
    run = subprocess.run([sys.executable, "-c", program, store.location], capture_output=True, text=True)
    assert run.stdout.strip() == str([float(n) for n in range(9)]), run.stderr
