"""Chains of pairs: applied one after the other, made into one pair, and made into the pair that leads back."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpde
import tpde.numpy
from conftest import BYTES, SHAPES, make_tensors, write_safetensors
from raised import raises

ROOT = Path(__file__).resolve().parents[2]


class Chain:
    """Four checkpoints, and the three pairs that lead from one to the next."""

    def __init__(self, folder: Path) -> None:
        random = np.random.default_rng(1)
        tensors, _ = make_tensors()
        self.files, self.pairs = [folder / f"{n}.safetensors" for n in range(4)], [folder / f"step-{n}" for n in range(1, 4)]
        for n, file in enumerate(self.files):
            write_safetensors(file, tensors, {"step": str(n)})
            for name in tensors:
                raw = np.frombuffer(tensors[name], np.uint8).copy()
                lowest = raw[:: BYTES[SHAPES[name][0]]]
                lowest ^= (random.random(len(lowest)) < 0.02).astype(np.uint8)
                tensors[name] = raw.tobytes()
        for pair, base, target in zip(self.pairs, self.files, self.files[1:]):
            tpde.encode(target, pair, base=base, chunk_lanes=4096)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("chain"))


def pair_bytes(pair: Path) -> tuple[bytes, bytes]:
    return Path(f"{pair}.tpde-index").read_bytes(), Path(f"{pair}.tpde-blob").read_bytes()


def test_pairs_are_applied_one_after_the_other(chain: Chain, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    report = tpde.apply(chain.pairs, tmp_path / "last", base=chain.files[0], progress=lambda *at: done.append(at))
    assert (tmp_path / "last").read_bytes() == chain.files[3].read_bytes()
    assert report.digests_checked and done[-1] == (report.bytes,) * 2
    tpde.apply(iter(chain.pairs[1:]), tmp_path / "last", base=chain.files[1], replace=True)
    tpde.apply(chain.pairs[:1], tmp_path / "second", base=chain.files[0], expect=tpde.inspect(chain.pairs[0]).pair_digest)
    assert (tmp_path / "second").read_bytes() == chain.files[1].read_bytes()
    tpde.apply(chain.pairs, tmp_path / "some", base=chain.files[0], tensors="layers.*")
    # A chain whose first pair needs no base.
    tpde.encode(chain.files[0], tmp_path / "anchor")
    tpde.apply([tmp_path / "anchor", *chain.pairs], tmp_path / "last", replace=True)
    assert (tmp_path / "last").read_bytes() == chain.files[3].read_bytes()


@pytest.mark.parametrize("how", [{}, {"codec": "conditioned", "favor": "size"}, {"split": "embed.weight=0:3", "format": "1.2"}])
def test_a_folded_pair_has_the_bytes_of_a_direct_one(chain: Chain, tmp_path: Path, how: dict[str, Any]) -> None:
    done: list[tuple[int, int]] = []
    report = tpde.fold(
        chain.pairs, tmp_path / "all", base=chain.files[0], chunk_lanes=4096, progress=lambda *at: done.append(at), **how
    )
    direct = tpde.encode(chain.files[3], tmp_path / "direct", base=chain.files[0], chunk_lanes=4096, **how)
    assert pair_bytes(tmp_path / "all") == pair_bytes(tmp_path / "direct")
    assert report.tensors == direct.tensors and report.blob_bytes == direct.blob_bytes and report.index.endswith("all.tpde-index")
    assert done[-1] == (report.target_bytes,) * 2


def test_a_reverted_pair_leads_back(chain: Chain, tmp_path: Path) -> None:
    digest = tpde.inspect(chain.pairs[2]).pair_digest
    tpde.revert(chain.pairs, tmp_path / "back", base=chain.files[0], chunk_lanes=4096, payload_digests=True, expect=digest)
    tpde.encode(chain.files[0], tmp_path / "direct", base=chain.files[3], chunk_lanes=4096, payload_digests=True)
    assert pair_bytes(tmp_path / "back") == pair_bytes(tmp_path / "direct")
    tpde.apply(tmp_path / "back", tmp_path / "first", base=chain.files[3])
    assert (tmp_path / "first").read_bytes() == chain.files[0].read_bytes()
    tpde.revert(chain.pairs[1], tmp_path / "one", base=chain.files[1])
    tpde.apply([tmp_path / "one"], tmp_path / "second", base=chain.files[2])
    assert (tmp_path / "second").read_bytes() == chain.files[1].read_bytes()


def program() -> str | None:
    """The program ``tpde`` of this checkout."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [path for path in (target / "release" / "tpde", target / "debug" / "tpde") if path.exists()]
    return os.environ.get("TPDE_PROGRAM") or (
        str(max(built, key=lambda path: path.stat().st_mtime)) if built else shutil.which("tpde")
    )


@pytest.mark.skipif(program() is None, reason="SKIPPED: the program tpde is not built")
def test_the_program_makes_the_same_bytes(chain: Chain, tmp_path: Path) -> None:
    def tpde_program(verb: str, name: str, *options: str) -> None:
        command = [str(program()), verb, str(chain.files[0]), *map(str, chain.pairs), "-o", str(tmp_path / name), *options]
        subprocess.run(command, check=True, capture_output=True)

    tpde_program("fold", "all-program", "--codec", "device", "--favor", "speed")
    tpde.fold(chain.pairs, tmp_path / "all", base=chain.files[0], codec="device", favor="speed")
    assert pair_bytes(tmp_path / "all") == pair_bytes(tmp_path / "all-program")
    tpde_program("revert", "back-program")
    tpde.revert(chain.pairs, tmp_path / "back", base=chain.files[0])
    assert pair_bytes(tmp_path / "back") == pair_bytes(tmp_path / "back-program")
    tpde_program("apply", "last-program.safetensors")
    tpde.apply(chain.pairs, tmp_path / "last.safetensors", base=chain.files[0])
    assert (tmp_path / "last.safetensors").read_bytes() == (tmp_path / "last-program.safetensors").read_bytes()


def test_a_step_that_does_not_fit_is_named(chain: Chain, tmp_path: Path) -> None:
    first, second, third = chain.pairs
    base = chain.files[0]
    for pairs in ([first, third], iter([first, third])):
        with pytest.raises(tpde.Step, match=r"step 2 of the chain, .*step-3.*: wrong base") as caught:
            tpde.apply(pairs, tmp_path / "never", base=base)
    assert caught.value.number == 2 and Path(caught.value.pair).name.startswith("step-3")
    assert isinstance(caught.value.__cause__, tpde.WrongBase)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.number) == (tpde.Step, str(caught.value), 2)
    for make in (tpde.fold, tpde.revert):
        with pytest.raises(tpde.Step) as applied:
            make([first, first], tmp_path / "never", base=base)
        assert isinstance(applied.value.__cause__, tpde.AlreadyApplied) and isinstance(applied.value, ValueError)
        with pytest.raises(tpde.Step) as wrong:
            make(chain.pairs, tmp_path / "never", base=chain.files[2])
        assert wrong.value.number == 1 and isinstance(wrong.value.__cause__, tpde.WrongBase)
        with pytest.raises(tpde.InvalidArgument, match="no pair is given"):
            make([], tmp_path / "never", base=base)
        with raises("unexpected_pair"):
            make(chain.pairs, tmp_path / "never", base=base, expect="00" * 32)
        with pytest.raises(tpde.InvalidArgument):
            make(chain.pairs, second, base=base, replace=True)  # the output is an input
        with pytest.raises(tpde.InvalidArgument, match="codec"):
            make(chain.pairs, tmp_path / "never", base=base, codec="none")
        with raises("already_exists"):
            make(chain.pairs[1:], first, base=chain.files[1])
    with raises("unexpected_pair"):
        tpde.apply(chain.pairs, tmp_path / "never", base=base, expect=tpde.inspect(first).pair_digest)
    with pytest.raises(tpde.InvalidArgument, match="no pair is given"):
        tpde.apply([], tmp_path / "never", base=base)
    assert not list(tmp_path.iterdir())


def test_damage_of_one_pair_names_it(chain: Chain, tmp_path: Path) -> None:
    for ending in ("tpde-index", "tpde-blob"):
        shutil.copy(f"{chain.pairs[1]}.{ending}", tmp_path / f"bad.{ending}")
    pairs = [chain.pairs[0], tmp_path / "bad", chain.pairs[2]]
    blob = bytearray((tmp_path / "bad.tpde-blob").read_bytes())
    blob[len(blob) // 2] ^= 1
    (tmp_path / "bad.tpde-blob").write_bytes(blob)
    with pytest.raises(tpde.Step) as caught:
        tpde.fold(pairs, tmp_path / "never", base=chain.files[0])
    assert caught.value.number == 2 and isinstance(caught.value.__cause__, tpde.Invalid)
    with pytest.raises(tpde.Step) as caught:
        tpde.apply(pairs[:2], tmp_path / "never", base=chain.files[0])
    assert caught.value.number == 2 and caught.value.pair.endswith("bad")
    index = bytearray((tmp_path / "bad.tpde-index").read_bytes())
    index[-1] ^= 1
    (tmp_path / "bad.tpde-index").write_bytes(index)
    for make in (tpde.apply, tpde.fold, tpde.revert):
        with pytest.raises(tpde.Step) as opened:
            make(pairs, tmp_path / "never", base=chain.files[0])
        assert opened.value.number == 2 and opened.value.pair.endswith("bad")
        cause = opened.value.__cause__
        assert isinstance(cause, tpde.Invalid) and cause.rule == "index.digest"


def test_bases_of_another_dtype(tmp_path: Path) -> None:
    """Weights in F32, their F16 export, and a later export: as pairs, folded, and back."""
    random = np.random.default_rng(2)
    master = {"w": (random.standard_normal((64, 300)) * 0.02).astype(np.float16).astype(np.float32)}
    export = {"w": master["w"].astype(np.float16)}
    later = {"w": export["w"].copy()}
    later["w"].view(np.uint16)[::7, ::11] += 1
    for name, arrays in {"master": master, "export": export, "later": later}.items():
        tpde.numpy.save_file(arrays, tmp_path / f"{name}-whole")
        tpde.apply(tmp_path / f"{name}-whole", tmp_path / f"{name}.safetensors")

    def kind(pair: str) -> str:
        (tensor,) = tpde.inspect(tmp_path / pair).tensors
        return tensor.base_kind

    tpde.numpy.save_file(export, tmp_path / "first", base=master)
    tpde.numpy.save_file(later, tmp_path / "second", base=export)
    tpde.numpy.save_file(later, tmp_path / "direct", base=master)
    tpde.numpy.save_file(later, tmp_path / "whole", base=master, derived=False)
    assert [kind(pair) for pair in ("first", "second", "direct", "whole")] == ["cast", "same", "cast", "none"]
    assert np.array_equal(tpde.numpy.load_file(tmp_path / "first", base=master)["w"], export["w"])
    assert np.array_equal(tpde.numpy.load_file(tmp_path / "direct", base=master)["w"], later["w"])

    files = {name: tmp_path / f"{name}.safetensors" for name in ("master", "export", "later")}
    for name, base, target in (("a", "master", "export"), ("b", "export", "later"), ("ab", "master", "later")):
        tpde.encode(files[target], tmp_path / name, base=files[base])
    tpde.encode(files["later"], tmp_path / "ab-whole", base=files["master"], derived=False)
    steps = [tmp_path / "a", tmp_path / "b"]
    tpde.fold(steps, tmp_path / "folded", base=files["master"])
    assert pair_bytes(tmp_path / "folded") == pair_bytes(tmp_path / "ab") and kind("folded") == "cast"
    tpde.fold(steps, tmp_path / "folded-whole", base=files["master"], derived=False)
    assert pair_bytes(tmp_path / "folded-whole") == pair_bytes(tmp_path / "ab-whole") and kind("folded-whole") == "none"
    tpde.revert(steps, tmp_path / "back", base=files["master"])
    assert kind("back") == "cast"
    tpde.apply(tmp_path / "back", tmp_path / "out", base=files["later"])
    assert (tmp_path / "out").read_bytes() == files["master"].read_bytes()
    tpde.revert(steps, tmp_path / "back", base=files["master"], derived=False, replace=True)
    assert kind("back") == "none"


def test_derived_of_torch_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import tpde.torch

    base = {"w": torch.randn(64, 300, generator=torch.Generator().manual_seed(3))}
    target = {"w": base["w"].to(torch.bfloat16)}
    tpde.torch.save_file(target, tmp_path / "pair", base=base)
    tpde.torch.save_file(target, tmp_path / "whole", base=base, derived=False)
    kinds = [tpde.inspect(tmp_path / name).tensors[0].base_kind for name in ("pair", "whole")]
    assert kinds == ["cast", "none"]
    assert torch.equal(tpde.torch.load_file(tmp_path / "pair", base=base)["w"].view(torch.int16), target["w"].view(torch.int16))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_follow_a_chain_in_place(tmp_path: Path, framework: str) -> None:
    """All pairs are applied in one commit: to whole arrays, and to the rows of a rank in a parameter with gaps between rows."""
    functions: Any = tpde.numpy
    live_of: Any = np.asarray
    if framework == "torch":
        live_of = pytest.importorskip("torch").from_numpy
        functions = importlib.import_module("tpde.torch")
    random = np.random.default_rng(3)
    versions = [{"w": random.integers(0, 99, (200, 64)).astype(np.float32), "b": np.arange(5, dtype=np.int64)}]
    pairs: list[Any] = []
    for number in range(3):
        after = {name: array.copy() for name, array in versions[-1].items()}
        after["w"][:: number + 3] += 1
        after["b"][number] = -number
        pairs.append(tmp_path / f"step {number}")
        tpde.numpy.save_file(after, pairs[-1], base=versions[-1], split="w=0:2", chunk_lanes=4096)
        versions.append(after)

    def held(version: int) -> dict[str, Any]:
        return {name: live_of(array.copy()) for name, array in versions[version].items()}

    def same(found: dict[str, Any], version: int) -> bool:
        return all(np.asarray(found[name]).tobytes() == array.tobytes() for name, array in versions[version].items())

    live = held(0)
    done: list[tuple[int, int]] = []
    assert functions.apply_(live, pairs, progress=lambda at, total: done.append((at, total))) == "applied"
    assert same(live, 3) and done[-1][0] == done[-1][1] == 200 * 64 * 4 + 40
    assert functions.apply_(live, pairs) == "already_applied" and same(live, 3)
    assert functions.apply_(held(1), pairs[1:]) == "applied"

    # Tensors that are left out, with the pairs as they are, and a pair that does not follow.
    only = {"b": held(0)["b"]}
    assert (
        functions.apply_(only, pairs, strict=False) == "applied" and np.asarray(only["b"]).tobytes() == versions[3]["b"].tobytes()
    )
    live = held(0)
    for steps, number in (([pairs[0], pairs[2]], 2), (pairs[1:], 1)):
        with pytest.raises(tpde.Step) as raised:
            functions.apply_(live, steps)
        assert raised.value.number == number and isinstance(raised.value.__cause__, tpde.WrongBase) and same(live, 0)
    blob = Path(f"{pairs[1]}.tpde-blob")
    content = blob.read_bytes()
    blob.write_bytes(content[:70] + bytes([content[70] ^ 1]) + content[71:])
    with pytest.raises(tpde.Step) as raised:
        functions.apply_(live, pairs)
    assert raised.value.number == 2 and isinstance(raised.value.__cause__, tpde.Invalid) and same(live, 0)
    blob.write_bytes(content)

    wide = np.full((100, 70), 7, np.float32)
    wide[:, 3:67] = versions[0]["w"][100:]
    memory = live_of(wide)
    rows = tpde.Slice("w", np.s_[100:, :], memory[:, 3:67], (200, 64))
    assert functions.apply_slices_([rows], pairs) == "applied"
    expected = np.full((100, 70), 7, np.float32)
    expected[:, 3:67] = versions[3]["w"][100:]
    assert np.asarray(memory).tobytes() == expected.tobytes()
    assert functions.apply_slices_([rows], pairs) == "already_applied"
    with pytest.raises(tpde.NotHeld):
        functions.apply_slices_([tpde.Slice("w", np.s_[:5], live_of(versions[0]["w"][:5].copy()), (200, 64))], pairs)


def test_tied_weights_follow_a_chain_once(tmp_path: Path) -> None:
    versions = [{name: np.arange(number, 4096 + number, dtype=np.int32) for name in ("head", "embed")} for number in range(3)]
    pairs = [tmp_path / str(number) for number in (1, 2)]
    for pair, base, target in zip(pairs, versions, versions[1:]):
        tpde.numpy.save_file(target, pair, base=base)
    for steps in (pairs, pairs[:1]):
        shared = versions[0]["head"].copy()
        done: list[tuple[int, int]] = []
        progress = lambda at, total: done.append((at, total))  # noqa: E731
        assert tpde.numpy.apply_({"head": shared, "embed": shared}, steps, progress=progress) == "applied"
        assert shared.tobytes() == versions[len(steps)]["head"].tobytes()
        # The memory counts once.
        assert done[-1] == (shared.nbytes, shared.nbytes)
