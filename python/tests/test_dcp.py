"""Checkpoints of torch.distributed.checkpoint in a store, in one process and in several over gloo."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

import tpde
import tpde.store

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402 (needs torch)

from raised import raises  # noqa: E402
import dcp_rank  # noqa: E402
import tpde.dcp  # noqa: E402
import tpde.torch  # noqa: E402


@pytest.fixture
def store(tmp_path: Path) -> tpde.store.Store:
    return tpde.store.init(tmp_path / "store")


def run(what: str, ranks: int, folder: Path) -> list[str]:
    """What each rank says. Processes are forked from one that has imported PyTorch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])
    results = [folder / f"{what}-{rank}-of-{ranks}" for rank in range(ranks)]
    arguments = [(what, rank, ranks, folder, result) for rank, result in enumerate(results)]
    processes = [context.Process(target=dcp_rank.main, args=one) for one in arguments]
    try:
        for one in processes:
            one.start()
        for one in processes:
            one.join(300)
    finally:
        for one in processes:
            one.kill()
    return [result.read_text() for result in results]


def test_two_ranks_save_and_one_and_four_load(store: tpde.store.Store, tmp_path: Path) -> None:
    assert run("trained", 2, tmp_path) == ["done"] * 2
    versions = store.log()
    assert [one.content for one in versions] == ["difference", "difference", "whole"]
    assert [one.metadata["step"] for one in versions] == ["2", "1", "0"]
    for ranks in (1, 4):
        assert run("loaded", ranks, tmp_path) == ["done"] * ranks
    # The version is an ordinary one, with whole tensors.
    store.get("main", tmp_path / "out.safetensors", tensors="model.*")
    tpde.encode(tmp_path / "out.safetensors", tmp_path / "pair")
    read, expected = tpde.torch.load_file(tmp_path / "pair"), torch.load(tmp_path / "2.pt")["model"]
    assert {name: one.tolist() for name, one in read.items()} == {f"model.{name}": one.tolist() for name, one in expected.items()}
    assert store.verify(rebuild=True).faults == {}


def test_shards_are_saved_against_versions_that_were_cut_otherwise(store: tpde.store.Store, tmp_path: Path) -> None:
    writer = tpde.dcp.StorageWriter(store, chunk_lanes=1 << 14)
    dcp.save(dcp_rank.numbers(0), storage_writer=writer, no_dist=True)
    for ranks in (4, 3):
        read = [[*map(int, one.split())] for one in run("saved_otherwise", ranks, tmp_path)]
        # A shard, and chunks that it shares with others.
        assert all(0 < found < size * (1 / ranks + 0.1) for found, size in read), read
    assert [one.content for one in store.log()] == ["difference", "difference", "whole"]
    for step in range(3):
        found = {name: torch.zeros_like(one) for name, one in dcp_rank.numbers(step).items()}
        dcp.load(found, storage_reader=tpde.dcp.StorageReader(store, f"main@{step}"), no_dist=True)
        assert all(torch.equal(found[name], one) for name, one in dcp_rank.numbers(step).items()), step


def test_a_conflict_is_told_to_all_ranks(store: tpde.store.Store, tmp_path: Path) -> None:
    store.put({"w": torch.zeros(3)})
    assert run("conflict", 2, tmp_path) == ["conflict"] * 2
    assert len(store.log()) == 2


def state(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(200, 90, generator=generator)
    weight.view(torch.int32)[:: step + 1] ^= step
    return {
        "nested": {"weight": weight, "list": [torch.full((3,), step, dtype=torch.bfloat16), step / 7]},
        "columns": weight[:, 10:60],  # rows with gaps
        "transposed": weight.T,
        "scalar": torch.tensor(step),
        "flags": torch.tensor([True, step == 2]),
        "text": f"step {step}",
    }


def test_one_process(store: tpde.store.Store) -> None:
    for step in range(3):
        writer = tpde.dcp.StorageWriter(store, favor="speed")
        dcp.save(state(step), storage_writer=writer, no_dist=True)
        assert writer.version == store.version("main")
    for step in (1, 2, 0):
        found = state(9)
        addresses = [found["nested"]["weight"].data_ptr(), found["columns"].data_ptr()]
        dcp.load(found, storage_reader=tpde.dcp.StorageReader(store, f"main@{step}"), no_dist=True)
        assert addresses == [found["nested"]["weight"].data_ptr(), found["columns"].data_ptr()]
        expected = state(step)
        assert all(torch.equal(found[name], expected[name]) for name in ("columns", "scalar", "flags"))
        assert torch.equal(found["transposed"], expected["transposed"])
        assert torch.equal(found["nested"]["list"][0], expected["nested"]["list"][0])
        assert found["nested"]["list"][1] == step / 7 and found["text"] == f"step {step}"


def saved(store: tpde.store.Store, state: dict[str, object], **how: object) -> None:
    dcp.save(state, storage_writer=tpde.dcp.StorageWriter(store, **how.pop("writer", {})), no_dist=True, **how)


def loaded(store: tpde.store.Store, state: dict[str, object], *reader: str, **how: object) -> dict[str, object]:
    dcp.load(state, storage_reader=tpde.dcp.StorageReader(store, *reader), no_dist=True, **how)
    return state


def test_an_id_is_that_of_one_load(store: tpde.store.Store) -> None:
    """A reader that is used again without an id loads the newest version, also after a load that failed."""
    for step in range(3):
        saved(store, {"w": torch.full((3,), float(step))}, checkpoint_id=f"step-{step}")
    reader, found = tpde.dcp.StorageReader(store), []
    for name in ("step-0", None, "step-1", "none", None, "step-1"):
        state = {"w": torch.zeros(3)}
        how = {} if name is None else {"checkpoint_id": name}
        if name == "none":
            with pytest.raises(dcp.api.CheckpointException):
                dcp.load(state, storage_reader=reader, no_dist=True, **how)
        else:
            dcp.load(state, storage_reader=reader, no_dist=True, **how)
            found.append(state["w"][0].item())
    assert found == [0, 2, 1, 2, 1]


def test_each_checkpoint_id_is_a_version_of_one_branch(store: tpde.store.Store, tmp_path: Path) -> None:
    weight = torch.randn(300, 300)
    states = [weight + 1e-6 * step for step in range(4)]
    ids = ["step-0", tmp_path / "step 1", "main@0", "tuned"]
    for name, one in zip(ids, states):
        saved(store, {"w": one}, checkpoint_id=name)
    versions = list(reversed(store.log()))
    assert [one.branch for one in store.branches()] == ["main"]
    assert [one.content for one in versions] == ["whole", "difference", "difference", "difference"]
    assert [one.metadata[tpde.dcp.ID] for one in versions] == list(map(str, ids))
    for name, one in zip(ids, states):
        assert torch.equal(loaded(store, {"w": torch.zeros(300, 300)}, checkpoint_id=name)["w"], one)
    # An id that is used again is that of the newest version. An id of another branch is found too, and one's own comes first.
    saved(store, {"w": weight + 7}, checkpoint_id="step-0")
    saved(store, {"w": weight + 8}, checkpoint_id="step-0", writer={"branch": "other"})
    saved(store, {"w": weight + 9}, checkpoint_id="only here", writer={"branch": "other"})
    for how, more in ((["main"], 7), (["other"], 8), (["other@0"], 8)):
        assert torch.equal(loaded(store, {"w": torch.zeros(300, 300)}, *how, checkpoint_id="step-0")["w"], weight + more)
    assert torch.equal(loaded(store, {"w": torch.zeros(300, 300)}, checkpoint_id="only here")["w"], weight + 9)
    # Without a version of this id, it is the name of a version or of a branch, as of older releases.
    assert torch.equal(loaded(store, {"w": torch.zeros(300, 300)}, checkpoint_id="other")["w"], weight + 9)
    assert torch.equal(loaded(store, {"w": torch.zeros(300, 300)}, checkpoint_id="main@1")["w"], states[1])
    for name in ("step-9", "a b", ""):
        with pytest.raises(dcp.api.CheckpointException, match="no version was saved with checkpoint_id"):
            loaded(store, {"w": torch.zeros(300, 300)}, checkpoint_id=name)
    # One writer for many checkpoints.
    writer = tpde.dcp.StorageWriter(store, branch="again")
    for name in ("a", "b", None):
        dcp.save({"w": weight}, storage_writer=writer, no_dist=True, checkpoint_id=name)
    assert [one.metadata.get(tpde.dcp.ID) for one in store.log("again")] == [None, "b", "a"]


@pytest.mark.parametrize(
    "state", [{}, {"e": torch.zeros(0, 4)}, {"e": torch.zeros(3, 0, dtype=torch.complex128), "f": torch.zeros(0)}]
)
def test_states_without_elements(state: dict, store: tpde.store.Store, tmp_path: Path) -> None:
    for before in ({}, {"w": torch.ones(3)}):
        if before:
            saved(store, before)
        saved(store, state)
        found = loaded(store, {name: torch.ones_like(one) for name, one in state.items()})
        assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
            n: (one.dtype, one.shape) for n, one in state.items()
        }
    saved(store, {"w": torch.ones(3)})
    assert loaded(store, {"w": torch.zeros(3)})["w"].tolist() == [1, 1, 1]
    assert store.verify(rebuild=True).faults == {}


def unusual(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of all dtypes that PyTorch's own writer saves."""
    made = {}
    for name in sorted(dir(torch)):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype) and not name.startswith(("q", "quint")):  # quantised ones are refused
            raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8).view(4, -1)
            try:
                tensor = (raw % 2 == 0) if dtype == torch.bool else raw.view(dtype)
                dcp.save({"w": tensor}, storage_writer=dcp.FileSystemWriter(folder / name), no_dist=True)
            except (RuntimeError, TypeError, dcp.api.CheckpointException):
                continue
            made[str(dtype)] = tensor
    return made


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_dtypes_that_safetensors_lacks(store: tpde.store.Store, tmp_path: Path) -> None:
    state = unusual(tmp_path)
    assert {"torch.complex128", "torch.float4_e2m1fn_x2"} <= state.keys()
    for step in range(2):
        state["torch.complex128"][step] += 1
        saved(store, state)
    assert store.log()[0].content == "difference"
    found = {name: torch.empty_like(one) for name, one in state.items()}
    loaded(store, found)
    assert {name: bits(one) for name, one in found.items()} == {name: bits(one) for name, one in state.items()}
    # Into another layout, another complex dtype, and of memory that is not contiguous.
    odd = torch.randn(6, 8, dtype=torch.complex128)
    saved(store, {"t": odd.T, "gaps": odd[:, 2:5], "conj": odd.conj(), "scalar": odd[0, 0], "neg": odd.conj().imag})
    found = {
        "t": torch.zeros(6, 8, dtype=torch.complex128).T,
        "gaps": torch.zeros(6, 3, dtype=torch.complex64),
        "conj": torch.zeros(6, 8, dtype=torch.complex128),
        "scalar": torch.zeros((), dtype=torch.complex128),
        "neg": torch.zeros(6, 8, dtype=torch.float64),
    }
    loaded(store, found)
    assert torch.equal(found["t"], odd.T) and torch.equal(found["gaps"], odd[:, 2:5].to(torch.complex64))
    assert torch.equal(found["conj"], odd.conj()) and torch.equal(found["scalar"], odd[0, 0])
    assert torch.equal(found["neg"], odd.conj().imag)


def test_names_and_values(store: tpde.store.Store, tmp_path: Path) -> None:
    for state in ({"": 5}, {"": torch.ones(3)}, {"a": {"": 3}, "b": None}, {"a": "x" * 70000, "é\n": "y"}):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "files"), no_dist=True)
        saved(store, state)
        empty = {name: torch.zeros_like(one) if isinstance(one, torch.Tensor) else None for name, one in state.items()}
        if state.get("a", None).__class__ is dict:
            empty = {"a": {"": 0}, "b": 1}
        found = loaded(store, empty)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[n], one) if isinstance(one, torch.Tensor) else found[n] == one for n, one in state.items())


@pytest.mark.parametrize("odd", [torch.zeros(3).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)])
def test_tensors_that_cannot_be_saved_are_refused_by_name(odd: torch.Tensor, store: tpde.store.Store) -> None:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        saved(store, {"odd": odd})
    (error,) = [one[0] for one in caught.value.failures.values()]
    assert isinstance(error, tpde.InvalidArgument) and "'odd'" in str(error)
    assert store.branches() == []


@pytest.mark.parametrize("kind", [tpde.dcp.StorageWriter, tpde.dcp.StorageReader])
def test_a_path_is_no_store(kind: type, tmp_path: Path) -> None:
    with pytest.raises(tpde.InvalidArgument, match="store is .*: expected a tpde.store.Store"):
        kind(str(tmp_path))


def test_checkpoint_ids_and_dtypes_that_are_converted(store: tpde.store.Store) -> None:
    dcp.save({"w": torch.arange(9.0)}, checkpoint_id="tuned", storage_writer=tpde.dcp.StorageWriter(store), no_dist=True)
    found = {"w": torch.zeros(9, dtype=torch.bfloat16)}
    dcp.load(found, checkpoint_id="tuned", storage_reader=tpde.dcp.StorageReader(store), no_dist=True)
    assert found["w"].tolist() == list(range(9))


def test_a_version_that_was_not_saved_by_pytorch_can_be_loaded(store: tpde.store.Store) -> None:
    store.put({"w": torch.arange(6.0)})
    found = {"w": torch.zeros(6)}
    dcp.load(found, storage_reader=tpde.dcp.StorageReader(store), no_dist=True)
    assert found["w"].tolist() == list(range(6))


@pytest.mark.parametrize(
    "kept",
    [
        "",
        "[]",
        "{}",
        '{"bytes": [], "empty": {"a": ["load", [0]]}, "paths": {}}',
        '{"bytes": [3], "empty": {}, "paths": {}}',
        '{"bytes": [], "empty": {}, "paths": {}, "views": {"w": "complex128"}}',
    ],
)
def test_metadata_of_strangers_is_refused(kept: str, store: tpde.store.Store) -> None:
    store.put({"w": torch.arange(6.0)}, metadata={tpde.dcp.KEY: kept})
    with raises("manifest", match="main@0"):
        tpde.dcp.StorageReader(store).read_metadata()


def test_values_are_kept_as_json(store: tpde.store.Store) -> None:
    dcp.save({"a": {"b": 1}, "none": torch.zeros(0, 4)}, storage_writer=tpde.dcp.StorageWriter(store), no_dist=True)
    kept = json.loads(store.version("main").metadata[tpde.dcp.KEY])
    assert kept == {"bytes": ["a.b"], "empty": {"none": ["float32", [0, 4]]}, "paths": {"a.b": ["a", "b"], "none": ["none"]}}


def quantised(kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights in fewer bits, and what they stand for in BF16."""
    generator = torch.Generator().manual_seed(4)
    if kind == "cast":
        weight = torch.randn(256, 384, generator=generator)
        return {"w": weight}, weight.bfloat16()
    if kind == "fp8":
        weight, scales = (
            torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn),
            torch.rand(2, 3, generator=generator) + 0.5,
        )
        product = weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return {"w": weight, "w_scale_inv": scales}, product.bfloat16()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    blocks = torch.randint(0, 256, (256, 12, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (256, 12), generator=generator, dtype=torch.uint8)
    pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
    product = pairs.reshape(256, 12, 32) * 2.0 ** (scales.float() - 127)[..., None]
    return {"w_blocks": blocks, "w_scales": scales}, product.reshape(256, 384).bfloat16()


@pytest.mark.parametrize("kind", ["cast", "fp8", "mxfp4"])
def test_a_version_with_quantised_weights_is_the_base_of_one_without(kind: str, store: tpde.store.Store) -> None:
    base, target = quantised(kind)
    target.view(torch.int16)[5, 7] ^= 1
    states = [base, {"w": target}, {"w": target.clone()}]
    states[2]["w"].view(torch.int16)[6, 8] ^= 1
    for state in states:
        dcp.save(state, storage_writer=tpde.dcp.StorageWriter(store), no_dist=True)
    # The weights are formed from those before: only the changes are stored.
    assert [one.content for one in store.log()] == ["difference", "difference", "whole"]
    assert store.log()[1].stored_bytes < target.nbytes // 100
    for step, state in enumerate(states):
        found = {name: torch.zeros_like(one) for name, one in state.items()}
        dcp.load(found, storage_reader=tpde.dcp.StorageReader(store, f"main@{step}"), no_dist=True)
        assert all(torch.equal(found[name].view(torch.uint8), one.view(torch.uint8)) for name, one in state.items())
    # Without bases of another dtype, the weights are stored whole.
    writer = tpde.dcp.StorageWriter(store, branch="other", derived=False)
    dcp.save(base, storage_writer=tpde.dcp.StorageWriter(store, branch="other"), no_dist=True)
    dcp.save({"w": target}, storage_writer=writer, no_dist=True)
    assert writer.version is not None and writer.version.stored_bytes > target.nbytes // 4
