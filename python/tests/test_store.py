"""Stores in folders: versions, branches, errors, interruption, processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tpde
import tpde.numpy
import tpde.store
from conftest import Made, make_tensors, write_safetensors
from raised import raises


@pytest.fixture
def store(tmp_path: Path) -> tpde.store.Store:
    return tpde.store.init(tmp_path / "store", anchor_percent=0)


def steps(folder: Path, count: int) -> list[Path]:
    """Checkpoints, each the one before with a few bits changed."""
    tensors, paths = make_tensors()[0], []
    for number in range(count):
        embed = bytearray(tensors["embed.weight"])
        embed[number * 200] ^= 1
        tensors = {**tensors, "embed.weight": bytes(embed)}
        paths.append(folder / f"step{number}.safetensors")
        write_safetensors(paths[-1], tensors, {"format": "pt", "step": str(number)})
    return paths


def test_versions_come_back_byte_for_byte(store: tpde.store.Store, tmp_path: Path) -> None:
    paths = steps(tmp_path, 4)
    for number, path in enumerate(paths):
        version = store.put(path, metadata={"step": str(number)})
        assert (version.name, version.parent) == (f"main@{number}", f"main@{number - 1}" if number else None)
        assert version.content == ("difference" if number else "whole") and version.tensors == 10
    seen: list[tuple[int, int]] = []
    for number in (2, 0, 3):
        out = tmp_path / f"out{number}"
        store.get(f"main@{number}", out, progress=lambda done, total: seen.append((done, total)))
        assert out.read_bytes() == paths[number].read_bytes()
    assert seen[-1] == (version.tensor_bytes, version.tensor_bytes)
    assert [one.metadata["step"] for one in store.log()] == ["3", "2", "1", "0"]
    assert store.log(limit=2) == store.log()[:2] and store.log(limit=9) == store.log()
    with pytest.raises(tpde.InvalidArgument, match="limit"):
        store.log(limit=-1)
    assert store.version("main") == store.log()[0] == store.branches()[0] == version
    usage = store.usage()
    assert usage.versions == 4 and usage.difference_bytes == sum(one.stored_bytes for one in store.log()[:-1])
    report = store.verify(rebuild=True)
    assert (report.versions, report.faults, report.external) == (4, {}, [])
    assert store.gc().removed == 0
    # A reader that has a version needs only the pairs behind it.
    store.get("main", tmp_path / "near", have={"main@2": paths[2]})
    assert (tmp_path / "near").read_bytes() == paths[3].read_bytes()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_tensors_are_stored_from_memory(framework: str, store: tpde.store.Store, tmp_path: Path) -> None:
    array = np.arange(70_000, dtype=np.float32)
    tensors = {"w": array, "b": np.ones(3, np.int64)}
    if framework == "torch":
        torch = pytest.importorskip("torch")
        tensors = {name: torch.from_numpy(one) for name, one in tensors.items()}
    store.put(tensors)
    array[::100] *= 2
    version = store.put(tensors, favor="size", progress=lambda done, total: None)
    assert version.content == "difference" and version.stored_bytes < array.nbytes / 20
    store.get("main", tmp_path / "out")
    with tpde.safe_open(encoded(tmp_path / "out", tmp_path), "np") as read:
        assert read.get_tensor("w").tobytes() == array.tobytes() and read.get_tensor("b").tolist() == [1, 1, 1]


def encoded(checkpoint: Path, folder: Path) -> Path:
    tpde.encode(checkpoint, folder / "pair", replace=True)
    return folder / "pair"


def test_some_tensors_are_read(store: tpde.store.Store, tmp_path: Path) -> None:
    for path in steps(tmp_path, 2):
        store.put(path)
    out, cache = tmp_path / "out", tmp_path / "cache"
    for tensors, expected in (("layers.1.*", 3), (["scalar", "*.norm.*"], 2), (lambda name: name == "embed.weight", 1)):
        store.get("main", out, tensors=tensors, cache=cache)
        assert len(tpde.inspect(encoded(out, tmp_path)).tensors) == expected
        out.unlink()
    assert len(list(cache.iterdir())) == 4

    def fail(name: str) -> bool:
        raise KeyError(name)

    with pytest.raises(KeyError):
        store.get("main", out, tensors=fail)
    with pytest.raises(tpde.InvalidArgument, match="no tensor"):
        store.get("main", out, tensors="nothing.*")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "out"))], "nothing is left"


def test_rectangles_of_tensors_are_read(store: tpde.store.Store, tmp_path: Path) -> None:
    save_file, load_file = pytest.importorskip("safetensors.numpy").save_file, pytest.importorskip("safetensors.numpy").load_file
    weights = {"a.weight": np.arange(6000, dtype=np.float32).reshape(60, 100), "b.weight": np.ones((3, 4), np.float16)}
    for number in range(3):
        weights["a.weight"][number::7] += 1
        save_file(weights, tmp_path / "in")
        store.put(tmp_path / "in", chunk_lanes=4096)
    for index in (np.s_[3:9], np.s_[:, 50:], np.s_[-2:, 7], np.s_[..., 1:2]):
        out = store.get("main", tmp_path / "out", tensors="b.*", parts={"a.*": index})
        found = load_file(tmp_path / "out")
        assert found["a.weight"].tobytes() == weights["a.weight"][index].tobytes() and found["a.weight"].ndim == 2
        assert found["b.weight"].tobytes() == weights["b.weight"].tobytes() and out.name == "main@2"
        (tmp_path / "out").unlink()
    for parts, error, match in (
        ({"c.*": np.s_[:1]}, tpde.InvalidArgument, "matches"),
        ({"a.*": np.s_[:61]}, "out_of_range", "61"),
        ({"a.*": [np.s_[:1], np.s_[2:3]]}, tpde.InvalidArgument, "2 rectangles"),
        ([("a.*", np.s_[:1])], tpde.InvalidArgument, "expected a dict"),
    ):
        with raises(error, match=match):
            store.get("main", tmp_path / "out", parts=parts)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "store"], "nothing is left"


def test_a_folder_comes_back_with_all_files(store: tpde.store.Store, tmp_path: Path, made: Made) -> None:
    folder = tmp_path / "model"
    (folder / "nested").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(made.base.read_bytes())
    (folder / "config.json").write_text('{"a":  1}\n')
    (folder / "nested" / "template.jinja").write_bytes(b"\x00\xff")
    first = store.put(folder)
    assert first.files == ["config.json", "nested/template.jinja"]
    (folder / "model.safetensors").write_bytes(made.target.read_bytes())
    store.put(folder)
    store.get("main@1", tmp_path / "back")
    for path in folder.rglob("*"):
        assert path.is_dir() or (tmp_path / "back" / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_branches(store: tpde.store.Store, tmp_path: Path) -> None:
    paths = steps(tmp_path, 3)
    store.put(paths[0])
    assert store.create_branch("tuned").content == "same"
    store.put(paths[1], branch="tuned")
    store.put(paths[2], branch="other", parent="tuned")
    assert [one.name for one in store.branches()] == ["main@0", "other@0", "tuned@1"]
    assert store.delete_branch("tuned").name == "tuned@1"
    store.get("other", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == paths[2].read_bytes()
    with raises("no_version") as caught:
        store.log("tuned")
    assert caught.value.version == "tuned"


def test_versions_are_folded_and_pruned(store: tpde.store.Store, tmp_path: Path) -> None:
    paths = steps(tmp_path, 7)
    for path in paths:
        store.put(path)
    seen: list[tuple[int, int]] = []
    size = store.fold("main@0", "main@4", progress=lambda done, total: seen.append((done, total)))
    assert size == store.fold("main@0", "main@4") == store.usage().shortcut_bytes and seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(tpde.InvalidArgument, match="derive"):
        store.fold("main@4", "main@0")
    report = store.prune(keep_every=4)
    assert report.pruned == ["main@1", "main@2", "main@3", "main@5"] and (report.kept, report.shortcuts) == (3, 1)
    assert [one.name for one in store.log()] == ["main@6", "main@4", "main@0"]
    with raises("pruned") as caught:
        store.version("main@5")
    assert (caught.value.version, caught.value.kept) == ("main@5", ["main@4", "main@6"])
    for number in (0, 4, 6):
        store.get(f"main@{number}", tmp_path / f"out{number}")
        assert (tmp_path / f"out{number}").read_bytes() == paths[number].read_bytes()
    for wrong in (0, True, -1, 1.5):
        with pytest.raises(tpde.InvalidArgument, match="keep_every"):
            store.prune(keep_every=wrong)


def test_a_damaged_shortcut_is_left_out_and_named(store: tpde.store.Store, tmp_path: Path) -> None:
    paths = steps(tmp_path, 4)
    for path in paths:
        store.put(path)
    store.fold("main@0", "main@3")
    (manifest,) = (tmp_path / "store" / "shortcuts").rglob("*.json")
    segment = json.loads(manifest.read_text())["pair"]["blob"]["segments"][0]
    blob = tmp_path / "store" / "objects" / f"{segment['digest']}.{segment['upload']}"
    assert store.get("main", tmp_path / "one").left_out == {}
    blob.write_bytes(blob.read_bytes()[:-1])
    found = store.get("main", tmp_path / "other")
    assert (found.name, list(found.left_out)) == ("main@3", ["the shortcut from main@0 to main@3"])
    assert segment["digest"] in found.left_out["the shortcut from main@0 to main@3"]
    assert (tmp_path / "other").read_bytes() == paths[3].read_bytes()
    assert list(store.verify().shortcuts) == list(found.left_out)
    store.fold("main@0", "main@3")
    assert store.get("main", tmp_path / "anew").left_out == {} and store.verify().shortcuts == {}


def test_an_external_base_is_supplied_by_readers(store: tpde.store.Store, tmp_path: Path, made: Made) -> None:
    external = store.put(made.base, branch="base", external="hub/name")
    assert (external.content, external.hint, external.stored_bytes) == ("external", "hub/name", 0)
    with raises("external"):
        store.put(made.target, parent="base")
    store.put(made.target, parent="base", have={"base": made.base})
    with raises("external") as caught:
        store.get("main", tmp_path / "out")
    assert (caught.value.version, caught.value.hint) == ("base@0", "hub/name")
    store.get("main", tmp_path / "out", have={"base@0": made.base})
    assert (tmp_path / "out").read_bytes() == made.target.read_bytes()
    assert store.verify().external == ["base@0", "main@0"]


def test_a_pair_that_was_made_elsewhere(store: tpde.store.Store, tmp_path: Path) -> None:
    first, second, third = steps(tmp_path, 3)
    store.put(first)
    tpde.encode(second, tmp_path / "one", base=first, payload_digests=True)
    tpde.encode(third, tmp_path / "two", base=second, payload_digests=True)
    with pytest.raises(tpde.Step) as caught:
        store.put_pair(tmp_path / "two")
    assert isinstance(caught.value.__cause__, tpde.WrongBase) and caught.value.number == 2
    with pytest.raises(tpde.InvalidArgument, match="no parent"):
        store.put_pair(tmp_path / "one", branch="other")
    for path, pair in ((second, "one"), (third, "two")):
        version = store.put_pair(tmp_path / pair, metadata={"from": pair})
        store.get(version.name, tmp_path / f"{pair}.out")
        assert (tmp_path / f"{pair}.out").read_bytes() == path.read_bytes()
    tpde.encode(third, tmp_path / "three", base=second)
    with pytest.raises(tpde.InvalidArgument, match="payload digests"):
        store.put_pair(tmp_path / "three")
    tpde.encode(third, tmp_path / "whole", payload_digests=True)
    assert store.put_pair(tmp_path / "whole", branch="other").content == "whole"


def test_errors_are_typed(store: tpde.store.Store, tmp_path: Path, made: Made) -> None:
    with raises("not_a_store") as refused:
        tpde.store.Store(tmp_path / "nothing")
    assert refused.value.location == str(tmp_path / "nothing") and isinstance(refused.value, FileNotFoundError)
    with raises("already_a_store"):
        tpde.store.init(tmp_path / "store")
    with pytest.raises(tpde.InvalidArgument, match="grace"):
        tpde.store.init(tmp_path / "new", grace=1)
    for wrong in (True, -1, 1 << 64, "many"):
        with pytest.raises(tpde.InvalidArgument, match="anchor_every"):
            tpde.store.init(tmp_path / "new", anchor_every=wrong)
    with raises("no_version"):
        store.get("main", tmp_path / "out")
    store.put(made.base)
    with raises("already_exists"):
        store.get("main", made.base)
    with pytest.raises(tpde.BadCheckpoint):
        store.put(made.pair.with_suffix(".tpde-blob"))
    for arguments in (
        {"branch": ".."},
        {"branch": 3},
        {"parent": "main@x"},
        {"metadata": {"a": 1}},
        {"whole": True, "external": "x"},
    ):
        with pytest.raises(tpde.InvalidArgument):
            store.put(made.target, **arguments)
    with pytest.raises(tpde.InvalidArgument, match="expected a path"):
        store.put(3)
    assert len(store.log()) == 1

    objects = sorted((tmp_path / "store" / "objects").iterdir(), key=lambda path: path.stat().st_size)
    objects[-1].write_bytes(objects[-1].read_bytes()[:-1])
    with raises("damaged") as damaged:
        store.get("main", tmp_path / "out")
    assert damaged.value.object == f"objects/{objects[-1].name}" and not (tmp_path / "out").exists()
    assert list(store.verify().faults) == ["main@0"]
    manifest = tmp_path / "store" / "branches" / "main" / "0000000000.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema": "tpde.store.version/9"}))
    with raises("manifest", match="version/9") as bad:
        store.version("main@0")
    assert bad.value.object == "branches/main/0000000000.json"


def test_one_of_two_writers_wins(store: tpde.store.Store, tmp_path: Path) -> None:
    path = steps(tmp_path, 1)[0]
    store.put(path)
    other = tpde.store.Store(store.location)

    def overtake(done: int, total: int) -> None:
        if done < total and len(other.log()) == 1:
            other.put(path)

    for times in (1, 2, 4, 8):  # larger, if the work ends before the calling thread reports progress
        large = np.random.default_rng(1).standard_normal(times << 23, dtype=np.float32)
        try:
            store.put({"w": large}, progress=overtake)
        except tpde.StoreError as error:
            assert error.code == "conflict"
            assert error.version == store.version("main").name and len(store.log()) == 2
            return
        store.delete_branch("main")
        store.put(path)
    pytest.fail("the work was always done first")


def test_a_watcher_sees_versions_in_order(store: tpde.store.Store, tmp_path: Path) -> None:
    paths = steps(tmp_path, 4)
    watcher = tpde.store.Store(store.location).watch(interval=0.01)
    thread = threading.Thread(target=lambda: [store.put(path) for path in paths])
    thread.start()
    assert [next(watcher).number for _ in paths] == [0, 1, 2, 3]
    thread.join()
    assert next(store.watch(start=2)).number == 2
    assert [one.number for one in store.since(2)] == [2, 3] and store.since(0, "nothing") == []


INTERRUPTED = """
import signal, sys, tpde, tpde.store
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture
def silent() -> Iterator[int]:
    """A server that takes requests and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("call", ["next(tpde.store.Store(sys.argv[1]).watch('nothing'))", "tpde.store.Store(sys.argv[2])"])
def test_ctrl_c_ends_a_call_that_waits(call: str, store: tpde.store.Store, silent: int) -> None:
    environment = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent}", "AWS_ALLOW_HTTP": "true"}
    environment |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    command = [sys.executable, "-c", INTERRUPTED.format(call=call), store.location, "s3://bucket/prefix"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        if process.poll() is not None:
            assert "--features aws" in process.communicate()[1]
            pytest.skip("this build has no S3")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert out == "interrupted\n", err
    finally:
        process.kill()


def test_an_exception_of_the_progress_leaves_the_branch_as_it_was(store: tpde.store.Store, tmp_path: Path) -> None:
    path = steps(tmp_path, 1)[0]

    def fail(done: int, total: int) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        store.put(path, progress=fail)
    store.put(path)
    with pytest.raises(KeyError):
        store.get("main", tmp_path / "out", progress=fail)


def count(store: tpde.store.Store, versions: object) -> None:
    """Runs in another process."""
    signal.alarm(600)
    versions.put(len(store.log()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_store_is_used_in_other_processes(method: str, store: tpde.store.Store, tmp_path: Path) -> None:
    store.put(steps(tmp_path, 1)[0])
    context = multiprocessing.get_context(method)
    versions = context.Queue()
    child = context.Process(target=count, args=(store, versions))
    child.start()
    assert versions.get(timeout=600) == 1
    child.join()
    assert len(store.log()) == 1 and pickle.loads(pickle.dumps(store)).location == store.location


def test_memory_of_a_store_is_bounded_also_in_other_processes(store: tpde.store.Store, tmp_path: Path, made: Made) -> None:
    bounded = pickle.loads(pickle.dumps(tpde.store.Store(store.location, memory=96 << 20)))
    path = steps(tmp_path, 1)[0]
    assert bounded.put(path).number == 0
    bounded.get("main", tmp_path / "out")
    assert bounded._memory == 96 << 20 and (tmp_path / "out").read_bytes() == path.read_bytes()
    for wrong in [-1, 0.5, "96"]:
        with pytest.raises((tpde.InvalidArgument, TypeError), match="memory"):
            tpde.store.Store(store.location, memory=wrong)  # type: ignore[arg-type]


def test_a_folder_from_the_store_opens_with_from_pretrained(store: tpde.store.Store, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = "{{ messages }}"
    for number in range(2):
        with torch.no_grad():
            model.lm_head.weight[number] += 1
        model.save_pretrained(tmp_path / f"saved{number}", max_shard_size=8000)  # several shards
        tokenizer.save_pretrained(tmp_path / f"saved{number}")
        store.put(tmp_path / f"saved{number}")
    for number in range(2):
        saved, back = tmp_path / f"saved{number}", tmp_path / f"back{number}"
        store.get(f"main@{number}", back)
        names = sorted(path.name for path in saved.iterdir())
        assert len([name for name in names if name.endswith(".safetensors")]) > 1 and "tokenizer.json" in names
        assert names == sorted(path.name for path in back.iterdir())
        assert all((saved / name).read_bytes() == (back / name).read_bytes() for name in names)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(back)
        expected = transformers.AutoModelForCausalLM.from_pretrained(saved).state_dict()
        assert all(torch.equal(one, expected[name]) for name, one in loaded.state_dict().items())
        assert transformers.AutoTokenizer.from_pretrained(back).chat_template == "{{ messages }}"
