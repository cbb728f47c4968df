"""Pairs that describe tensors in parts, and slices of tensors, as the ranks of a distributed job hold them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raised import raises
import tpde
import tpde.numpy

RANKS = 4
SHAPES = {"k": (128, 96), "norm": (96,), "o": (96, 512), "q": (512, 96), "stack": (4, 40, 64), "v": (128, 96)}
SPLIT = "q=0:4,k=0:4,v=0:4,o=1:4,stack=0:4"
Arrays = dict[str, "np.ndarray[Any, Any]"]


def rows(rank: int, size: int) -> slice:
    return slice(size * rank, size * (rank + 1))


def make_arrays() -> tuple[Arrays, Arrays]:
    """Base and target. About 5 % of the elements differ."""
    random = np.random.default_rng(3)
    base = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    target = {name: array.copy() for name, array in base.items()}
    for array in target.values():
        bits = array.view(np.uint32)
        bits ^= (random.random(array.shape) < 0.05).astype(np.uint32)
    return base, target


class Cut:
    """A base, a target, and their pair, whose tensors are cut for four ranks."""

    def __init__(self, folder: Path) -> None:
        self.base, self.target = make_arrays()
        self.pair, self.base_file = folder / "cut", folder / "base"
        tpde.numpy.save_file(self.target, self.pair, base=self.base, split=SPLIT, chunk_lanes=4096)
        # A file with the base: the target of a pair without a base.
        tpde.numpy.save_file(self.base, folder / "whole")
        tpde.apply(folder / "whole", self.base_file)
        tpde.subset(self.pair, folder / "half", tensors="*", parts={"q": np.s_[:256], "o": np.s_[:, :128]})
        self.half = folder / "half"

    def shards(self, rank: int, arrays: Arrays) -> tuple[Arrays, list[tpde.Slice]]:
        """Parameters of a rank with these values, and the slices that they consist of."""
        qkv = np.concatenate([arrays["q"][rows(rank, 128)], arrays["k"][rows(rank, 32)], arrays["v"][rows(rank, 32)]])
        wide = np.full((96, 150), 7, np.float32)
        wide[:, 10:138] = arrays["o"][:, rows(rank, 128)]
        expert, norm = arrays["stack"][rank].copy(), arrays["norm"].copy()
        slices = [
            tpde.Slice("q", np.s_[rows(rank, 128), :], qkv[:128], SHAPES["q"]),
            tpde.Slice("k", rows(rank, 32), qkv[128:160], SHAPES["k"]),
            tpde.Slice("v", np.s_[rows(rank, 32), ...], qkv[160:], SHAPES["v"]),
            tpde.Slice("o", np.s_[:, rows(rank, 128)], wide[:, 10:138], SHAPES["o"]),
            tpde.Slice("stack", rank, expert, SHAPES["stack"]),
            tpde.Slice("norm", ..., norm, SHAPES["norm"]),
        ]
        return {"qkv": qkv, "wide": wide, "expert": expert, "norm": norm}, slices


@pytest.fixture(scope="session")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    return Cut(tmp_path_factory.mktemp("cut"))


def same(found: Arrays, expected: Arrays) -> bool:
    return found.keys() == expected.keys() and all(found[name].tobytes() == expected[name].tobytes() for name in found)


def test_whole_tensors_are_made_of_their_parts(cut: Cut) -> None:
    assert len(tpde.inspect(cut.pair).tensors) == 5 * RANKS + 1
    for base in (cut.base, cut.base_file):
        assert same(tpde.numpy.load_file(cut.pair, base=base), cut.target)
        assert same(tpde.numpy.load_file(cut.pair, base=base, digests=False), cut.target)
        with tpde.safe_open(cut.pair, "np", base=base) as opened:
            assert opened.keys() == sorted(SHAPES)
            assert opened.get_tensor("o").tobytes() == cut.target["o"].tobytes()
            view = opened.get_slice("o")
            assert view.get_shape() == [96, 512]
            for index in (np.s_[:], np.s_[3], np.s_[5:60:7, 100:300], np.s_[..., 500:], np.s_[7, 3], np.s_[2:2], np.s_[-4:, ::3]):
                found = view[index]
                assert found.shape == cut.target["o"][index].shape
                assert found.tobytes() == cut.target["o"][index].tobytes()
    for mode in ("all_checked", "chunk_by_chunk"):
        live = {name: array.copy() for name, array in cut.base.items()}
        assert tpde.numpy.apply_(live, cut.pair, mode=mode) == "applied"
        assert same(live, cut.target)
    assert tpde.numpy.apply_(live, cut.pair) == "already_applied"


def test_a_wrong_base_of_parts_is_found(cut: Cut) -> None:
    wrong = {name: array.copy() for name, array in cut.base.items()}
    wrong["q"][300, 5] += 1
    with pytest.raises(tpde.WrongBase) as caught:
        tpde.numpy.load_file(cut.pair, base=wrong)
    assert caught.value.tensor == "q"
    with pytest.raises(tpde.WrongBase):
        tpde.numpy.apply_({**wrong}, cut.pair)
    with pytest.raises(tpde.AlreadyApplied):
        tpde.numpy.load_file(cut.pair, base=cut.target)
    tied = np.concatenate([cut.base["k"], cut.base["v"]])
    both = {**cut.base, "k": tied[:128], "v": tied[:128]}
    with pytest.raises(tpde.InvalidArgument, match="tensors k and v share memory, but not their values in the pair"):
        tpde.numpy.apply_(both, cut.pair)


def test_parts_with_and_without_a_base_make_one_tensor(cut: Cut, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import tpde.torch

    base, target = {"q": cut.base["q"]}, {"q": cut.target["q"].copy()}
    target["q"][:256] = 0  # smaller without a base
    tpde.numpy.save_file(target, tmp_path / "mixed", base=base, split="q=0:2")
    assert [one.base_kind for one in tpde.inspect(tmp_path / "mixed").tensors] == ["none", "same"]
    assert same(tpde.numpy.load_file(tmp_path / "mixed", base=base), target)
    live = {"q": base["q"].copy()}
    assert tpde.numpy.apply_(live, tmp_path / "mixed") == "applied" and same(live, target)
    # Changes of a part without a base are not changes of the base.
    (patch,) = tpde.torch.iter_patches(tmp_path / "mixed", base={"q": torch.from_numpy(base["q"])})
    assert patch.indices is None and patch.values.numpy().tobytes() == target["q"].tobytes()


def test_tied_tensors_in_parts_are_changed_once(cut: Cut, tmp_path: Path) -> None:
    both = {"head": cut.target["q"], "embed": cut.target["q"]}
    tpde.numpy.save_file(both, tmp_path / "tied", base={name: cut.base["q"] for name in both}, split="*=0:4")
    live = cut.base["q"].copy()
    assert tpde.numpy.apply_(dict.fromkeys(both, live), tmp_path / "tied") == "applied"
    assert live.tobytes() == cut.target["q"].tobytes()


def test_elements_that_a_pair_lacks_are_named(cut: Cut) -> None:
    with tpde.safe_open(cut.half, "np", base=cut.base) as opened:
        assert opened.get_slice("q")[100:256].tobytes() == cut.target["q"][100:256].tobytes()
        with raises("incomplete", match=r"the pair lacks the elements \[256:512, 0:96\] of tensor q") as caught:
            opened.get_tensor("q")
        assert (caught.value.tensor, caught.value.missing) == ("q", (slice(256, 512, 1), slice(0, 96, 1)))
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.missing) == (tpde.NotHeld, str(caught.value), caught.value.missing)
        assert again.code == "incomplete"
        with raises("incomplete", match=r"the elements \[90:91, 128:130\] of tensor o"):
            opened.get_slice("o")[90, 120:130]
    live = {name: array.copy() for name, array in cut.base.items()}
    with raises("incomplete", match="of tensor o"):
        tpde.numpy.apply_(live, cut.half)
    assert same(live, cut.base)
    _, slices = cut.shards(2, live)
    for base in (None, cut.base):
        with raises("incomplete", match=r"lacks the elements .* of tensor"):
            tpde.numpy.apply_slices_(slices, cut.half, base=base)


@pytest.mark.parametrize("mode", ["all_checked", "chunk_by_chunk"])
def test_a_rank_changes_its_slices_in_place(cut: Cut, mode: Any) -> None:
    for rank in range(RANKS):
        held, slices = cut.shards(rank, cut.base)
        expected, _ = cut.shards(rank, cut.target)
        done: list[int] = []
        assert tpde.numpy.apply_slices_(iter(slices), cut.pair, mode=mode, progress=lambda at, _: done.append(at)) == "applied"
        assert same(held, expected) and done == sorted(done)
    assert tpde.numpy.apply_slices_(slices, cut.pair) == "already_applied"
    assert same(held, expected)


def test_a_rank_rebuilds_its_slices_from_a_base(cut: Cut) -> None:
    zeros = {name: np.zeros_like(array) for name, array in cut.base.items()}
    for rank in range(RANKS):
        expected, _ = cut.shards(rank, cut.target)
        _, of_base = cut.shards(rank, cut.base)
        for base in (cut.base, cut.base_file, of_base, iter(of_base)):
            held, slices = cut.shards(rank, zeros)
            assert tpde.numpy.apply_slices_(slices, cut.pair, base=base) == "applied"
            assert same(held, expected)
    # Slices that are not parts of the pair, from a whole base. Two slices belong to one tensor.
    out = np.zeros((2, 100, 96), np.float32)
    halves = [tpde.Slice("q", np.s_[100:200], out[1]), tpde.Slice("q", np.s_[:100], out[0])]
    assert tpde.numpy.apply_slices_(halves, cut.pair, base=cut.base) == "applied"
    assert out.tobytes() == cut.target["q"][:200].tobytes()


def test_slices_without_elements_are_left_out(cut: Cut) -> None:
    none = np.zeros((0, 96), np.float32)
    assert tpde.numpy.apply_slices_([tpde.Slice("q", np.s_[5:5], none)], cut.pair) == "nothing"
    assert tpde.numpy.apply_slices_([], cut.pair, base=cut.base) == "nothing"
    with pytest.raises(tpde.InvalidArgument, match=r"is F32 \[0, 95\]: expected F32 \[0, 96\]"):
        tpde.numpy.apply_slices_([tpde.Slice("q", np.s_[5:5], none[:, :95])], cut.pair)


def refused(cut: Cut, slices: Any, error: type[Exception], message: str, **options: Any) -> Any:
    arrays = [one.tensor for one in slices if isinstance(getattr(one, "tensor", None), np.ndarray)]
    before = [array.copy() for array in arrays]
    with raises(error, match=message) as caught:
        tpde.numpy.apply_slices_(slices, cut.pair, **options)
    assert all(array.tobytes() == kept.tobytes() for array, kept in zip(arrays, before))
    return caught.value


def test_memory_without_regular_rows_is_refused(cut: Cut) -> None:
    index = np.s_[:128]
    array = np.zeros((128, 96), np.float32)
    rows = "expected contiguous rows at equal distances of at least 384 bytes"
    one = lambda tensor: [tpde.Slice("q", index, tensor)]  # noqa: E731
    error = refused(cut, one(np.zeros((128, 192), np.float32)[:, ::2]), "not_contiguous", rf"strides of \(768, 8\) bytes: {rows}")
    assert error.tensor == "q"
    refused(cut, one(array[::-1]), "not_contiguous", rf"strides of \(-384, 4\) bytes: {rows}")
    refused(cut, one(array[:, ::-1]), "not_contiguous", rf"strides of \(384, -4\) bytes: {rows}")
    refused(cut, one(np.zeros((96, 128), np.float32).T), "not_contiguous", rf"strides of \(4, 512\) bytes: {rows}")
    refused(cut, one(np.lib.stride_tricks.as_strided(array, (128, 96), (8, 4))), "not_contiguous", r"strides of \(8, 4\)")
    refused(cut, one(np.broadcast_to(array[0], (128, 96))), "not_contiguous", r"strides of \(0, 4\)")
    uneven = np.zeros((4, 50, 64), np.float32)[:, :40]
    refused(cut, [tpde.Slice("stack", ..., uneven)], "not_contiguous", r"strides of \(12800, 256, 4\) bytes")
    array.flags.writeable = False
    refused(cut, one(array), tpde.InvalidArgument, "tensor 'q' is read-only")
    refused(cut, one(np.zeros((128, 96))), tpde.InvalidArgument, r"shape \[512, 96\] is F64 \[128, 96\]: expected F32 \[128, 96\]")
    refused(
        cut,
        one(np.zeros((96, 128), np.float32)),
        tpde.InvalidArgument,
        r"slice .* of tensor 'q' of shape .* is F32 \[96, 128\]: expected",
    )
    refused(cut, one(np.zeros((128, 96), ">f4")), tpde.InvalidArgument, "cannot be in a checkpoint")
    refused(cut, one([1, 2]), tpde.InvalidArgument, "'q' is a list, neither a NumPy array nor a PyTorch tensor")


def test_rectangles_that_a_tensor_lacks_are_refused(cut: Cut) -> None:
    def one(index: Any, name: str = "q") -> list[tpde.Slice]:
        return [tpde.Slice(name, index, np.zeros((128, 96), np.float32))]

    beyond = r"slice of tensor 'q' of shape \[512, 96\]: "
    refused(cut, one(np.s_[400:528]), "out_of_range", beyond + "index 528 is beyond a dim of 512")
    refused(cut, one(np.s_[-600:]), "out_of_range", beyond + "index -600 is beyond")
    refused(cut, one(512), "out_of_range", beyond + "index 512 is beyond")
    refused(cut, one(np.s_[:, :, :]), "out_of_range", beyond + "3 indices for 2 dims")
    refused(cut, one(np.s_[::4]), tpde.InvalidArgument, beyond + "a slice with a step of 4 selects no rectangle")
    refused(cut, one(np.s_[::-1]), tpde.InvalidArgument, beyond + "slices with a negative step")
    refused(cut, one([1, 2]), tpde.InvalidArgument, beyond + "a list as index")
    refused(cut, one(np.s_[:128], "w"), tpde.InvalidArgument, "no tensor 'w' in the pair")
    for slices in (one(np.s_[:128])[0], {"q": 1}, None, 5):
        with pytest.raises(tpde.InvalidArgument, match="expected several tpde.Slice"):
            tpde.numpy.apply_slices_(slices, cut.pair)  # type: ignore[arg-type]
    refused(cut, ["q"], tpde.InvalidArgument, "slices has a str: expected tpde.Slice")
    refused(cut, one(np.s_[:128], 5), tpde.InvalidArgument, "a tensor is named 5")  # type: ignore[arg-type]
    refused(cut, one(np.s_[:128]), tpde.InvalidArgument, "mode is 'x': expected 'all_checked' or 'chunk_by_chunk'", mode="x")


def test_slices_that_share_memory_are_refused(cut: Cut) -> None:
    array = np.zeros((256, 96), np.float32)
    overlap = [tpde.Slice("q", np.s_[:128], array[:128]), tpde.Slice("k", np.s_[:], array[127:255])]
    refused(cut, overlap, tpde.InvalidArgument, "slices of tensors q and k share memory", base=cut.base)
    refused(cut, overlap, tpde.InvalidArgument, "slices of tensors q and k share memory")
    wide = np.zeros((128, 192), np.float32)
    between = [tpde.Slice("v", np.s_[:], wide[:, :96]), tpde.Slice("k", np.s_[:], wide[:, 96:])]
    assert tpde.numpy.apply_slices_(between, cut.pair, base=cut.base) == "applied"
    assert wide.tobytes() == np.concatenate([cut.target["v"], cut.target["k"]], axis=1).tobytes()
    live = cut.base["q"].copy()
    slices = [tpde.Slice("q", np.s_[:128], live[:128])]
    refused(cut, slices, tpde.InvalidArgument, "tensor q shares memory with the base q", base={**cut.base, "q": live})
    both = np.zeros((512, 192), np.float32)
    beside = [tpde.Slice("q", ..., both[:, 96:])]
    refused(cut, beside, tpde.InvalidArgument, "between its rows: copy the base", base=[tpde.Slice("q", ..., both[:, :96])])


def test_slices_that_cut_chunks_need_a_base(cut: Cut) -> None:
    rows = tpde.Slice("q", np.s_[10:100], cut.base["q"][10:100].copy())
    error = refused(cut, [rows], tpde.NotHeld, "tensor q, chunk .*: the slice lacks some of the lanes")
    assert error.tensor == "q" and isinstance(error.chunk, int)
    refused(cut, [rows], tpde.NotHeld, "the base lacks some of the lanes", base=[rows_of_base(rows)])
    assert tpde.numpy.apply_slices_([rows], cut.pair, base=cut.base) == "applied"
    assert rows.tensor.tobytes() == cut.target["q"][10:100].tobytes()
    missing = [tpde.Slice("q", np.s_[:128], np.zeros((128, 96), np.float32))]
    with pytest.raises(tpde.Poisoned) as caught:
        tpde.numpy.apply_slices_(missing, cut.pair, base=[])
    assert isinstance(caught.value.__cause__, tpde.Invalid) and caught.value.__cause__.rule == "base.tensor"


def rows_of_base(one: tpde.Slice) -> tpde.Slice:
    return tpde.Slice(one.name, one.index, one.tensor.copy())


def test_a_wrong_base_in_slices_is_found_before_a_write(cut: Cut) -> None:
    held, slices = cut.shards(1, cut.base)
    held["wide"][5, 20] += 1
    refused(cut, slices, tpde.WrongBase, "wrong base: tensor o")
    held, slices = cut.shards(1, cut.base)
    _, wrong = cut.shards(1, cut.base)
    wrong[0].tensor[3, 3] += 1
    with pytest.raises(tpde.Poisoned) as caught:
        tpde.numpy.apply_slices_(slices, cut.pair, base=wrong)
    assert isinstance(caught.value.__cause__, tpde.WrongBase) and caught.value.__cause__.tensor == "q"


def test_a_subset_of_parts_is_what_a_rank_needs(cut: Cut, tmp_path: Path) -> None:
    held, slices = cut.shards(3, cut.base)
    parts: dict[str, Any] = {one.name: one.index for one in slices if one.name != "norm"}
    report = tpde.subset(cut.pair, tmp_path / "rank", tensors="norm", parts=parts)
    assert report.tensors == 6 and report.payload_bytes < 0.35 * tpde.inspect(cut.pair).blob_bytes
    assert tpde.numpy.apply_slices_(slices, tmp_path / "rank") == "applied"
    assert same(held, cut.shards(3, cut.target)[0])
    tpde.subset(cut.pair, tmp_path / "two", parts={"[ko]": np.s_[:], "k": np.s_[:32], "q": [np.s_[:128], np.s_[-128:]]})
    assert [one.name for one in tpde.inspect(tmp_path / "two").tensors] == ["k"] * 4 + ["o"] * 4 + ["q"] * 2
    with pytest.raises(
        tpde.InvalidArgument, match=r"\[0:129, 0:96\] of tensor q of \[512, 96\]: only some elements of \[128:256, 0:96\]"
    ):
        tpde.subset(cut.pair, tmp_path / "x", parts={"q": np.s_[:129]})
    with pytest.raises(tpde.InvalidArgument, match=r"no part of the pair is within \[256:384, 0:96\] of tensor q"):
        tpde.subset(cut.half, tmp_path / "x", parts={"q": np.s_[256:384]})
    with pytest.raises(tpde.InvalidArgument, match="of shape .*: index 600 is beyond a dim of 512"):
        tpde.subset(cut.pair, tmp_path / "x", parts={"q": np.s_[:600]})
    with pytest.raises(tpde.InvalidArgument, match="an extent of 0"):
        tpde.subset(cut.pair, tmp_path / "x", parts={"q": np.s_[:0]})
    with pytest.raises(tpde.InvalidArgument, match="no tensor of the pair matches 'w'"):
        tpde.subset(cut.pair, tmp_path / "x", parts={"w": np.s_[:]})
    with pytest.raises(tpde.InvalidArgument, match="neither tensors nor parts"):
        tpde.subset(cut.pair, tmp_path / "x")
    with pytest.raises(tpde.InvalidArgument, match="parts is a list: expected a dict"):
        tpde.subset(cut.pair, tmp_path / "x", parts=["q"])  # type: ignore[arg-type]
    assert not list(tmp_path.glob("x*"))


def test_ranks_encode_their_slices_and_the_pairs_merge(cut: Cut, tmp_path: Path) -> None:
    for rank in range(RANKS):
        _, target = cut.shards(rank, cut.target)
        _, base = cut.shards(rank, cut.base)
        own = slice(0, 6 if rank == 0 else 5)  # one rank encodes the tensor that all ranks have
        report = tpde.numpy.save_file(target[own], tmp_path / f"{rank}", base=iter(base[own]), chunk_lanes=4096)
        assert [one.name for one in report.tensors] == sorted(one.name for one in target[own])
    tpde.merge([tmp_path / f"{rank}" for rank in range(RANKS)], tmp_path / "merged")
    assert same(tpde.numpy.load_file(tmp_path / "merged", base=cut.base), cut.target)
    cuts = [(one.name, one.part) for one in tpde.inspect(cut.pair).tensors]
    assert [(one.name, one.part) for one in tpde.inspect(tmp_path / "merged").tensors] == cuts
    # Parts of a rank that are smaller than its slices, from a base in files.
    _, target = cut.shards(2, cut.target)
    tpde.numpy.save_file(target[:1], tmp_path / "small", base=cut.base_file, split="q=0:8")
    parts = [one.part["origin"] for one in tpde.inspect(tmp_path / "small").tensors if one.part]
    assert parts == [[256, 0], [320, 0]]


def test_slices_that_cannot_be_encoded_are_refused(cut: Cut, tmp_path: Path) -> None:
    _, target = cut.shards(1, cut.target)
    _, base = cut.shards(1, cut.base)

    def refuse(slices: Any, error: type[Exception], message: str, **options: Any) -> Any:
        with raises(error, match=message) as caught:
            tpde.numpy.save_file(slices, tmp_path / "x", **options)
        assert not list(tmp_path.glob("x*"))
        return caught.value

    q = target[0]
    refuse(
        [tpde.Slice("q", q.index, q.tensor)], tpde.InvalidArgument, "slice of tensor 'q' has no shape: expected that of the whole"
    )
    refuse([tpde.Slice("q", q.index, q.tensor, (200, 96))], "out_of_range", r"of shape \[200, 96\]: index 256 is beyond")
    refuse(
        [tpde.Slice("q", q.index, q.tensor[:5], SHAPES["q"])], tpde.InvalidArgument, r"is F32 \[5, 96\]: expected F32 \[128, 96\]"
    )
    refuse([q, q], tpde.InvalidArgument, "q")
    error = refuse([q], tpde.NotHeld, "tensor q: of .* the target has only .*. Cut the tensor there", split="q=0:3")
    assert (error.tensor, error.chunk) == ("q", None)
    refuse(
        [q], tpde.NotHeld, "tensor q: the base has no element of", base=[tpde.Slice("q", np.s_[:128], base[0].tensor, SHAPES["q"])]
    )
    refuse([q, 5], tpde.InvalidArgument, "slices has a int: expected tpde.Slice")
    with pytest.raises(tpde.InvalidArgument, match=r"tensor 'q' has shape \[4, 4\] here, and \[512, 96\] in the pair"):
        tpde.numpy.apply_slices_([tpde.Slice("q", q.index, q.tensor, (4, 4))], cut.pair)


def test_torch_tensors(cut: Cut) -> None:
    torch = pytest.importorskip("torch")
    import tpde.torch

    held, arrays = cut.shards(1, cut.base)
    qkv = torch.nn.Parameter(torch.from_numpy(held["qkv"]))
    wide = torch.from_numpy(held["wide"])
    views = {"q": qkv[:128], "k": qkv[128:160], "v": qkv[160:], "o": wide[:, 10:138]}
    slices = [tpde.Slice(one.name, one.index, views.get(one.name, torch.from_numpy(one.tensor))) for one in arrays]
    versions = qkv._version, wide._version
    assert tpde.torch.apply_slices_(slices, cut.pair) == "applied"
    assert same({**held, "qkv": qkv.detach().numpy()}, cut.shards(1, cut.target)[0])
    assert qkv._version > versions[0] and wide._version > versions[1]
    versions = qkv._version, wide._version
    assert tpde.torch.apply_slices_(slices, cut.pair) == "already_applied"
    assert (qkv._version, wide._version) == versions
    loaded = tpde.torch.load_file(cut.pair, base=cut.base_file)
    assert same({name: tensor.numpy() for name, tensor in loaded.items()}, cut.target)
    for name, tensor in tpde.torch.iter_weights(cut.pair, base=cut.base_file):
        assert tensor.numpy().tobytes() == cut.target[name].tobytes()
    base = {name: torch.from_numpy(array.copy()) for name, array in cut.base.items()}
    for patch in tpde.torch.iter_patches(cut.pair, base=base, kind="sparse"):
        assert patch.indices is not None and bool((patch.indices[1:] > patch.indices[:-1]).all())
        base[patch.name].view(-1)[patch.indices.long()] = patch.values
    assert same({name: tensor.numpy() for name, tensor in base.items()}, cut.target)

    one = lambda tensor: [tpde.Slice("q", np.s_[:128], tensor)]  # noqa: E731
    with raises("not_contiguous", match=r"shape \(128, 96\) and strides of \(4, 512\) bytes"):
        tpde.torch.apply_slices_(one(torch.zeros(96, 128).T), cut.pair)
    with raises("not_contiguous", match=r"strides of \(0, 4\) bytes"):
        tpde.torch.apply_slices_(one(torch.zeros(96).expand(128, 96)), cut.pair)
    with pytest.raises(tpde.InvalidArgument, match=r"is F16 \[128, 96\]: expected F32 \[128, 96\]"):
        tpde.torch.apply_slices_(one(torch.zeros(128, 96, dtype=torch.float16)), cut.pair)
    with pytest.raises(tpde.InvalidArgument, match="without memory of its own"):
        tpde.torch.apply_slices_(one(torch.zeros(128, 96, device="meta")), cut.pair)


def test_layers_are_rebuilt_from_parts(cut: Cut) -> None:
    torch = pytest.importorskip("torch")
    import tpde.nn

    model = torch.nn.ModuleDict({name: torch.nn.Linear(96, SHAPES[name][0], bias=False) for name in ("k", "q", "v")})
    with torch.no_grad():
        for name, layer in model.items():
            layer.weight.copy_(torch.from_numpy(cut.base[name]))
    arrays = {f"{name}.weight": cut.target[name] for name in model}
    folder = cut.pair.parent
    base = {f"{name}.weight": cut.base[name] for name in model}
    tpde.numpy.save_file(arrays, folder / "layers", base=base, split="*=0:4", replace=True)
    tpde.nn.attach(model, folder / "layers")
    for name, layer in model.items():
        assert layer.weight.numpy().tobytes() == cut.target[name].tobytes()


@pytest.mark.parametrize("mode", ["all_checked", "chunk_by_chunk", "from a base"])
def test_columns_of_one_array(tmp_path: Path, mode: Any) -> None:
    """Random columns of one array. Whether they share a byte is found byte by byte."""
    random = np.random.default_rng(11)
    outcomes = [0, 0]
    for trial in range(60):
        shapes = {name: (int(random.integers(1, 30)), int(random.integers(1, 10))) for name in "abc"}
        base = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        target = {name: array.copy() for name, array in base.items()}
        for array in target.values():
            array.view(np.uint32).reshape(-1)[:: int(random.integers(1, 9))] ^= 1
        tpde.numpy.save_file(target, tmp_path / str(trial), base=base)
        pitch = int(random.integers(30, 60))
        before, after, owners = np.full(2000, 7, np.float32), np.full(2000, 7, np.float32), np.zeros(2000, int)
        places = []
        for name, (count, width) in shapes.items():
            step = width + int(random.integers(0, 20)) if random.random() < 0.2 else pitch
            start = int(random.integers(0, pitch))
            at = (start + step * np.arange(count))[:, None] + np.arange(width)
            before[at], after[at] = base[name], target[name]
            owners[at] += 1
            places.append((name, start, (count, width), (4 * step, 4)))
        is_apart = bool((owners < 2).all())
        outcomes[is_apart] += 1
        memory = before.copy()
        strided = np.lib.stride_tricks.as_strided
        slices = [tpde.Slice(name, ..., strided(memory[start:], shape, strides)) for name, start, shape, strides in places]
        options: dict[str, Any] = {"base": base} if mode == "from a base" else {"mode": mode}
        if is_apart:
            assert tpde.numpy.apply_slices_(slices, tmp_path / str(trial), **options) == "applied"
        else:
            with pytest.raises(tpde.InvalidArgument, match="share memory"):
                tpde.numpy.apply_slices_(slices, tmp_path / str(trial), **options)
        assert memory.tobytes() == (after if is_apart else before).tobytes(), places
    assert min(outcomes) > 5, outcomes


def test_views_with_rows_at_two_distances_are_several_slices(cut: Cut) -> None:
    fused = np.zeros((4, 100, 64), np.float32)
    fused[:, 30:70] = cut.base["stack"]
    message = "expected contiguous rows at equal distances of at least 256 bytes: pass one slice per index of the first dim"
    with raises("not_contiguous", match=message):
        tpde.numpy.apply_slices_([tpde.Slice("stack", ..., fused[:, 30:70])], cut.pair)
    slices = [tpde.Slice("stack", expert, fused[expert, 30:70]) for expert in range(4)]
    assert tpde.numpy.apply_slices_(slices, cut.pair) == "applied"
    expected = np.zeros_like(fused)
    expected[:, 30:70] = cut.target["stack"]
    assert fused.tobytes() == expected.tobytes()
