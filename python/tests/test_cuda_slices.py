"""Parts and slices of tensors on a CUDA device, or on the stand-in for its driver (see `stand_in`, `test_stand_in`)."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpde
from raised import raises
from test_slices import RANKS, SHAPES, SPLIT, Arrays, Cut, cut, rows  # noqa: F401 (a fixture)

# If TPDE_GPU is set, a missing PyTorch fails here.
torch = importlib.import_module("torch") if "TPDE_GPU" in os.environ else pytest.importorskip("torch")

import tpde.nn  # noqa: E402 (needs torch)
import tpde.torch  # noqa: E402
from stand_in import DEVICE, IS_USED, raw, to_device  # noqa: E402
from tpde._memory.tensor import Entry  # noqa: E402
from tpde._memory.slices import describe_slices  # noqa: E402

has_device = IS_USED or "TPDE_GPU" in os.environ or torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not has_device, reason="SKIPPED: PyTorch shows no CUDA device here")
real = pytest.mark.skipif(IS_USED, reason="SKIPPED: the stand-in has no tensors of PyTorch")
MODES = ["all_checked", "chunk_by_chunk"]
KINDS = ["path", "file", "pinned", "device"]


def of_kind(cut: Cut, kind: str) -> Any:  # noqa: F811
    """The pair of ``cut``, as a path or ready on the device. Payloads that a device cannot expand are not kept there."""
    if kind != "device":
        return opened(cut.pair, kind)
    pair = cut.pair.with_name("expanded by a device")
    if not Path(f"{pair}.tpde-index").exists():
        tpde.numpy.save_file(cut.target, pair, base=cut.base, split=SPLIT, chunk_lanes=4096, codec="device")
    return opened(pair, kind)


def opened(pair: Path, kind: str) -> Any:
    return pair if kind == "path" else tpde.torch.DevicePair(pair, DEVICE, payloads=kind)  # type: ignore[arg-type]


def moved(arrays: Arrays) -> dict[str, Any]:
    return {name: to_device(torch.from_numpy(array.copy())) for name, array in arrays.items()}


def shards(cut: Cut, rank: int, arrays: Arrays) -> tuple[dict[str, Any], list[tpde.Slice]]:  # noqa: F811
    """As :meth:`Cut.shards`, on the device."""
    held, on_cpu = cut.shards(rank, arrays)
    tensors = moved(held)
    qkv, wide = tensors["qkv"], tensors["wide"]
    views = {"q": qkv[:128], "k": qkv[128:160], "v": qkv[160:], "o": wide[:, 10:138]}
    views |= {"stack": tensors["expert"], "norm": tensors["norm"]}
    return tensors, [tpde.Slice(one.name, one.index, views[one.name], one.shape) for one in on_cpu]


def same(tensors: dict[str, Any], expected: Arrays) -> bool:
    return tensors.keys() == expected.keys() and all(raw(tensors[name]) == expected[name].tobytes() for name in tensors)


class TestSlices:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("mode", MODES)
    def test_a_rank_changes_its_slices(self, cut: Cut, mode: Any, kind: str) -> None:  # noqa: F811
        pair = of_kind(cut, kind)
        for rank in range(RANKS):
            for _ in range(2):  # the second time with the plan of the first
                held, slices = shards(cut, rank, cut.base)
                versions = held["qkv"]._version, held["wide"]._version
                done: list[tuple[int, int]] = []
                progress = lambda at, total: done.append((at, total))  # noqa: E731
                assert tpde.torch.apply_slices_(iter(slices), pair, mode=mode, progress=progress) == "applied"
                assert same(held, cut.shards(rank, cut.target)[0])
                assert held["qkv"]._version > versions[0] and held["wide"]._version > versions[1]
                assert done[-1] == (sum(one.tensor.nbytes for one in slices),) * 2
        versions = held["qkv"]._version, held["wide"]._version
        assert tpde.torch.apply_slices_(slices, pair) == "already_applied"
        assert same(held, cut.shards(rank, cut.target)[0])
        assert (held["qkv"]._version, held["wide"]._version) == versions

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("mode", MODES)
    def test_a_rank_needs_no_cut_where_its_slice_has_whole_chunks(self, tmp_path: Path, mode: Any, kind: str) -> None:
        random = np.random.default_rng(3)
        base = random.integers(-30000, 30000, (250, 64), dtype=np.int16)
        target = base + random.integers(0, 2, base.shape, dtype=np.int16)
        tpde.numpy.save_file({"w": target}, tmp_path / "pair", base={"w": base}, chunk_lanes=4096, codec="device")
        pair = opened(tmp_path / "pair", kind)
        for part in (np.s_[:128], np.s_[64:250], np.s_[64:192]):
            held, on_cpu = to_device(torch.from_numpy(base[part].copy())), torch.from_numpy(base[part].copy())
            assert tpde.torch.apply_slices_([tpde.Slice("w", part, held)], pair, mode=mode) == "applied"
            assert raw(held) == target[part].tobytes()
            # A second application fails with the same error on both engines.
            tpde.torch.apply_slices_([tpde.Slice("w", part, on_cpu)], tmp_path / "pair", mode=mode)
            errors = []
            for one, its_pair in ((held, pair), (on_cpu, tmp_path / "pair")):
                with pytest.raises(tpde.TpdeError) as caught:
                    tpde.torch.apply_slices_([tpde.Slice("w", part, one)], its_pair, mode=mode)
                errors.append((type(caught.value), caught.value.code))
            assert errors[0] == errors[1] and raw(held) == target[part].tobytes()
        with raises(tpde.NotHeld, match="a device decodes whole chunks"):
            tpde.torch.apply_slices_([tpde.Slice("w", np.s_[:100], to_device(torch.from_numpy(base[:100].copy())))], pair)

    @pytest.mark.parametrize("kind", ["path", "device"])
    def test_a_rank_rebuilds_its_slices_from_a_base(self, cut: Cut, kind: str) -> None:  # noqa: F811
        pair, whole = of_kind(cut, kind), moved(cut.base)
        for rank in range(RANKS):
            _, of_base = shards(cut, rank, cut.base)
            for base in (whole, of_base, iter(of_base), of_base):
                held, slices = shards(cut, rank, {name: np.zeros_like(array) for name, array in cut.base.items()})
                assert tpde.torch.apply_slices_(slices, pair, base=base) == "applied"
                assert same(held, cut.shards(rank, cut.target)[0])
        assert same(whole, cut.base)
        with pytest.raises(tpde.Poisoned) as caught:
            tpde.torch.apply_slices_(slices, pair, base=moved(cut.target))
        assert isinstance(caught.value.__cause__, tpde.AlreadyApplied)

    @pytest.mark.parametrize("kind", KINDS)
    def test_whole_tensors_are_made_of_their_parts(self, cut: Cut, kind: str) -> None:  # noqa: F811
        pair, base = of_kind(cut, kind), moved(cut.base)
        for _ in range(2):
            assert same(tpde.torch.load_file(pair, device="cuda:0", base=base), cut.target)
        assert same(dict(tpde.torch.iter_weights(pair, base=base, device="cuda:0")), cut.target)
        for mode in MODES:
            live = moved(cut.base)
            assert tpde.torch.apply_(live, pair, mode=mode) == "applied"  # type: ignore[arg-type]
            assert same(live, cut.target)
        assert tpde.torch.apply_(live, pair) == "already_applied"
        out = moved({name: np.zeros_like(array) for name, array in cut.base.items()})
        assert tpde.torch.apply_(out, pair, base=base) == "applied"
        assert same(out, cut.target) and same(base, cut.base)
        with tpde.safe_open(cut.pair, "pt", "cuda:0", base=base) as target:
            assert raw(target.get_slice("o")[5:60, 100:300]) == cut.target["o"][5:60, 100:300].tobytes()

    def test_tied_tensors_in_parts(self, cut: Cut, tmp_path: Path) -> None:  # noqa: F811
        both = {"head": cut.target["q"], "embed": cut.target["q"]}
        tpde.numpy.save_file(both, tmp_path / "tied", base={name: cut.base["q"] for name in both}, split="*=0:4")
        live = to_device(torch.from_numpy(cut.base["q"].copy()))
        assert tpde.torch.apply_(dict.fromkeys(both, live), tmp_path / "tied") == "applied"
        assert raw(live) == cut.target["q"].tobytes()

    def test_a_wrong_base_is_found(self, cut: Cut) -> None:  # noqa: F811
        wrong = {name: array.copy() for name, array in cut.base.items()}
        wrong["o"][50, 130] += 1
        held, slices = shards(cut, 1, wrong)
        with pytest.raises(tpde.WrongBase) as caught:
            tpde.torch.apply_slices_(slices, cut.pair)
        assert caught.value.tensor == "o" and same(held, cut.shards(1, wrong)[0])
        with pytest.raises(tpde.WrongBase) as caught:
            tpde.torch.load_file(cut.pair, device="cuda:0", base=moved(wrong))
        assert caught.value.tensor == "o"
        with pytest.raises(tpde.AlreadyApplied):
            tpde.torch.load_file(cut.pair, device="cuda:0", base=moved(cut.target))
        # A rank whose columns are right is not concerned.
        held, slices = shards(cut, 2, wrong)
        assert tpde.torch.apply_slices_(slices, cut.pair) == "applied"
        assert same(held, cut.shards(2, cut.target)[0])

    def test_a_damaged_payload_changes_nothing(self, cut: Cut, tmp_path: Path) -> None:  # noqa: F811
        for ending in ("tpde-index", "tpde-blob"):
            content = bytearray(Path(f"{cut.pair}.{ending}").read_bytes())
            if ending == "tpde-blob":
                content[len(content) // 2] ^= 1
            (tmp_path / f"bad.{ending}").write_bytes(content)
        errors = []
        for rank in range(RANKS):
            held, slices = shards(cut, rank, cut.base)
            try:
                assert tpde.torch.apply_slices_(slices, tmp_path / "bad") == "applied"
                assert same(held, cut.shards(rank, cut.target)[0])
            except tpde.Invalid as error:
                errors.append(error.rule)
                assert same(held, cut.shards(rank, cut.base)[0])
        assert errors and all(rule.startswith("payload.") for rule in errors)

    @pytest.mark.parametrize("is_early", [False, True])
    def test_payloads_of_a_path_are_read_before_the_launch(self, cut: Cut, tmp_path: Path, is_early: bool) -> None:  # noqa: F811
        from tpde._engine.device import Application, DevicePair

        for ending in ("index", "blob"):
            (tmp_path / f"pair.tpde-{ending}").write_bytes(Path(f"{cut.pair}.tpde-{ending}").read_bytes())
        held, slices = shards(cut, 1, cut.base)
        opened = tpde._tpde.Pair(str(tmp_path / "pair"))
        entries = {entry.name: entry for entry in map(Entry._make, opened.tensors())}
        memories = describe_slices(slices, entries, writable=True, device=DEVICE)
        if is_early:
            os.truncate(tmp_path / "pair.tpde-blob", 64)
        pair = DevicePair._of_opened(tmp_path / "pair", opened, DEVICE)
        application = Application(pair, memories, [], "all_checked")
        if is_early:  # the launch reports what the read has found
            with pytest.raises(tpde.TpdeError):
                application.run(pair, None)
        else:  # the launch waits for the read, and later ones do not read again
            assert application.run(pair, None)
            for one, before in zip(slices, shards(cut, 1, cut.base)[1]):
                one.tensor.copy_(before.tensor)
            os.truncate(tmp_path / "pair.tpde-blob", 64)
            assert application.run(pair, None)
        assert same(held, cut.shards(1, cut.base if is_early else cut.target)[0])

    def test_slices_that_do_not_fit_are_refused(self, cut: Cut) -> None:  # noqa: F811
        held, slices = shards(cut, 1, cut.base)
        pair = opened(cut.pair, "file")

        def refuse(wanted: list[tpde.Slice], error: type[Exception], message: str, **options: Any) -> Any:
            with raises(error, match=message) as caught:
                tpde.torch.apply_slices_(wanted, options.pop("pair", pair), **options)
            assert same(held, cut.shards(1, cut.base)[0])
            return caught.value

        q, o = held["qkv"][:128], held["wide"][:, 10:138]
        error = refuse(
            [tpde.Slice("q", np.s_[130:230], q[:100])], tpde.NotHeld, "a device decodes whole chunks. A pair fits in which"
        )
        assert error.tensor == "q" and isinstance(error.chunk, int)
        other = [tpde.Slice("q", np.s_[:128], to_device(torch.zeros(128, 96)))]
        refuse([slices[0]], tpde.NotHeld, "the base lacks some of", base=other)
        refuse([slices[0]], tpde.InvalidArgument, "no slice of the base tensor q", base={})
        refuse([tpde.Slice("q", np.s_[256:384], q)], "incomplete", "lacks the elements", pair=cut.half)
        refuse([slices[0]], tpde.InvalidArgument, "on that device too, not in files", base=cut.base_file)
        refuse([slices[0], tpde.Slice("k", rows(1, 32), held["qkv"][127:159])], tpde.InvalidArgument, "overlaps")
        refuse([tpde.Slice("o", np.s_[:, 128:256], o[:, ::2])], "not_contiguous", "strides")
        refuse([tpde.Slice("q", np.s_[128:256], q.t())], tpde.InvalidArgument, r"\[96, 128\]|strides")
        refuse([slices[0]], tpde.InvalidArgument, "overlaps the base", base=[slices[0]])
        on_cpu = cut.shards(1, cut.base)[1]
        with pytest.raises(tpde.InvalidArgument, match="the pair is on cuda:0, the slices are on the CPU"):
            tpde.torch.apply_slices_(on_cpu, pair)
        with pytest.raises(tpde.InvalidArgument, match="others are on"):
            tpde.torch.apply_slices_([slices[0], on_cpu[1]], pair)
        assert tpde.torch.apply_slices_([], pair) == "nothing"

    def test_rows_at_two_distances(self, cut: Cut, tmp_path: Path) -> None:  # noqa: F811
        whole = SHAPES["stack"]
        fused = to_device(torch.zeros(4, 100, 64))
        fused[:, 30:70] = to_device(torch.from_numpy(cut.base["stack"].copy()))
        before = raw(fused)
        with raises("not_contiguous", match="pass one slice per index of the first dim"):
            tpde.torch.apply_slices_([tpde.Slice("stack", ..., fused[:, 30:70], whole)], cut.pair)
        # The pair is cut along both inner dims, and the slice has all parts. The error says how the pair must be cut instead.
        blocks = [np.s_[:, y, x] for y in (slice(0, 20), slice(20, 40)) for x in (slice(0, 32), slice(32, 64))]
        one = lambda arrays: [tpde.Slice("stack", at, np.ascontiguousarray(arrays["stack"][at]), whole) for at in blocks]  # noqa: E731
        tpde.torch.save_file(one(cut.target), tmp_path / "blocks", base=one(cut.base))
        held = to_device(torch.from_numpy(cut.base["stack"].copy()))
        with pytest.raises(tpde.InvalidArgument, match="two distances.* cut at each index of dimension 0"):
            tpde.torch.apply_slices_([tpde.Slice("stack", ..., held)], tmp_path / "blocks")
        assert raw(fused) == before and raw(held) == cut.base["stack"].tobytes()
        slices = [tpde.Slice("stack", expert, fused[expert, 30:70]) for expert in range(4)]
        assert tpde.torch.apply_slices_(slices, cut.pair) == "applied"
        expected = np.zeros((4, 100, 64), np.float32)
        expected[:, 30:70] = cut.target["stack"]
        assert raw(fused) == expected.tobytes()

    def test_columns_of_one_parameter(self, tmp_path: Path) -> None:
        """Random columns of one storage. Whether they share a byte is found byte by byte."""
        random = np.random.default_rng(11)
        outcomes = [0, 0]
        for trial in range(24):
            shapes = {name: (int(random.integers(1, 30)), int(random.integers(1, 10))) for name in "abc"}
            base = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            target = {name: array.copy() for name, array in base.items()}
            for array in target.values():
                array.view(np.uint32).reshape(-1)[:: int(random.integers(1, 9))] ^= 1
            tpde.numpy.save_file(target, tmp_path / str(trial), base=base, codec="device")
            pitch = int(random.integers(30, 60))
            before, after, owners = np.full(2000, 7, np.float32), np.full(2000, 7, np.float32), np.zeros(2000, int)
            places = {}
            for name, (count, width) in shapes.items():
                step = width + int(random.integers(0, 20)) if random.random() < 0.2 else pitch
                start = int(random.integers(0, pitch))
                at = (start + step * np.arange(count))[:, None] + np.arange(width)
                before[at], after[at] = base[name], target[name]
                owners[at] += 1
                places[name] = (count, width), (step, 1), start
            is_apart = bool((owners < 2).all())
            outcomes[is_apart] += 1
            for kind in ("path", "file"):
                storage = to_device(torch.from_numpy(before.copy()))
                slices = [tpde.Slice(name, ..., storage.as_strided(*place)) for name, place in places.items()]
                if is_apart:
                    assert tpde.torch.apply_slices_(slices, opened(tmp_path / str(trial), kind)) == "applied"
                else:
                    with pytest.raises(tpde.InvalidArgument, match="overlaps"):
                        tpde.torch.apply_slices_(slices, opened(tmp_path / str(trial), kind))
                assert raw(storage) == (after if is_apart else before).tobytes(), places
        assert min(outcomes) > 2, outcomes

    def test_a_base_between_rows_of_its_target(self, cut: Cut) -> None:  # noqa: F811
        both = to_device(torch.zeros(512, 192))
        both[:, :96] = to_device(torch.from_numpy(cut.base["q"].copy()))
        slices, base = [tpde.Slice("q", ..., both[:, 96:])], [tpde.Slice("q", ..., both[:, :96])]
        assert tpde.torch.apply_slices_(slices, cut.pair, base=base) == "applied"
        assert raw(both) == np.concatenate([cut.base["q"], cut.target["q"]], axis=1).tobytes()

    @real
    def test_work_on_the_current_stream(self, cut: Cut) -> None:  # noqa: F811
        pair = of_kind(cut, "device")
        held, slices = shards(cut, 1, {name: np.zeros_like(array) for name, array in cut.base.items()})
        base = {name: torch.from_numpy(array).pin_memory() for name, array in cut.shards(1, cut.base)[0].items()}
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.cuda._sleep(50_000_000)
                for name, tensor in held.items():
                    tensor.copy_(base[name], non_blocking=True)
                assert tpde.torch.apply_slices_(slices, pair) == "applied"
                copies = {name: tensor.clone() for name, tensor in held.items()}
                assert torch.cuda.current_stream() == stream
            stream.synchronize()
        assert same(copies, cut.shards(1, cut.target)[0])
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(tpde.InvalidArgument, match="captured"), torch.cuda.graph(graph):
            tpde.torch.apply_slices_(slices, pair)

    @real
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int64"])
    def test_dtypes(self, dtype: str, tmp_path: Path) -> None:
        own = getattr(torch, dtype)
        base = (torch.randn(64, 96) * 9).to(own)
        target = base.clone()
        target.view(torch.uint8).view(-1)[::64] ^= 1
        tpde.torch.save_file({"w": target}, tmp_path / "p", base={"w": base}, split="w=1:2")
        wide = torch.zeros(64, 100, dtype=own, device="cuda")
        wide[:, 4:52] = base[:, 48:].cuda()
        assert tpde.torch.apply_slices_([tpde.Slice("w", np.s_[:, 48:], wide[:, 4:52])], tmp_path / "p") == "applied"
        assert raw(wide[:, 4:52]) == target[:, 48:].contiguous().view(torch.uint8).numpy().tobytes()
        assert not wide[:, :4].cpu().view(torch.uint8).any() and not wide[:, 52:].cpu().contiguous().view(torch.uint8).any()

    @real
    @pytest.mark.parametrize("payloads", ["pinned", "device"])
    def test_layers_are_rebuilt_from_parts(self, payloads: str, cut: Cut, tmp_path: Path) -> None:  # noqa: F811
        names = ("k", "q", "v")
        model = torch.nn.ModuleDict({name: torch.nn.Linear(96, SHAPES[name][0], bias=False) for name in names})
        arrays = {f"{name}.weight": cut.target[name] for name in names}
        base = {f"{name}.weight": cut.base[name] for name in names}
        tpde.numpy.save_file(arrays, tmp_path / "layers", base=base, split="*=0:4", codec="device")
        model.load_state_dict({name: torch.from_numpy(array) for name, array in base.items()})
        model.cuda()
        pair = opened(tmp_path / "layers", "file")
        tpde.nn.attach(model, pair, payloads=payloads)
        for name in names:
            assert raw(model[name].weight) == cut.target[name].tobytes()


class Chain:
    """Versions of a model, and the pairs between them, cut for four ranks."""

    def __init__(self, cut: Cut, folder: Path) -> None:  # noqa: F811
        random = np.random.default_rng(5)
        self.cut, self.versions, self.pairs = cut, [cut.base, cut.target], [cut.pair]
        for number in (2, 3):
            version = {name: array.copy() for name, array in self.versions[-1].items()}
            for array in version.values():
                raw = array.reshape(-1).view(np.uint8)
                raw[random.integers(0, raw.size, 20)] ^= 1
            self.pairs.append(folder / f"step {number}")
            tpde.numpy.save_file(version, self.pairs[-1], base=self.versions[-1], split=SPLIT, chunk_lanes=4096)
            self.versions.append(version)

    def damaged(self, number: int, folder: Path) -> Path:
        """A copy of a pair with another byte in a payload."""
        copy = folder / "damaged"
        for ending in ("index", "blob"):
            content = bytearray(Path(f"{self.pairs[number]}.tpde-{ending}").read_bytes())
            if ending == "blob":
                content[70] ^= 1
            Path(f"{copy}.tpde-{ending}").write_bytes(content)
        return copy


@pytest.fixture(scope="module")
def chain(cut: Cut, tmp_path_factory: pytest.TempPathFactory) -> Chain:  # noqa: F811
    return Chain(cut, tmp_path_factory.mktemp("chain"))


class TestSteps:
    @pytest.mark.parametrize("kind", ["path", "pinned"])
    def test_all_steps_are_applied_in_one_commit(self, chain: Chain, kind: str) -> None:
        pairs = [opened(pair, kind) for pair in chain.pairs]
        for first, last in ((0, 3), (1, 3)):
            live = moved(chain.versions[first])
            before = live["q"]._version
            assert tpde.torch.apply_(live, pairs[first:last]) == "applied"
            assert same(live, chain.versions[last]) and live["q"]._version > before
            done: list[tuple[int, int]] = []
            for rank in (0, 3):
                held, slices = shards(chain.cut, rank, chain.versions[first])
                versions = held["qkv"]._version, held["wide"]._version
                progress = lambda at, total: done.append((at, total))  # noqa: E731
                assert tpde.torch.apply_slices_(slices, tuple(pairs[first:last]), progress=progress) == "applied"
                assert same(held, chain.cut.shards(rank, chain.versions[last])[0])
                assert held["qkv"]._version > versions[0] and held["wide"]._version > versions[1]
            assert done[-1] == (sum(one.tensor.nbytes for one in slices),) * 2
            versions = held["qkv"]._version, held["wide"]._version
            assert tpde.torch.apply_slices_(slices, pairs[first:last]) == "already_applied"
            assert (held["qkv"]._version, held["wide"]._version) == versions
        assert tpde.torch.apply_(live, pairs) == "already_applied" and same(live, chain.versions[3])

    def test_a_fault_of_any_step_writes_nothing(self, chain: Chain, tmp_path: Path) -> None:
        live = moved(chain.versions[0])
        held, slices = shards(chain.cut, 1, chain.versions[0])
        for number in range(3):
            pairs = [*chain.pairs[:number], chain.damaged(number, tmp_path), *chain.pairs[number + 1 :]]
            with pytest.raises(tpde.Step, match="crc32") as caught:
                tpde.torch.apply_(live, pairs)
            assert caught.value.number == number + 1 and isinstance(caught.value.__cause__, tpde.Invalid)
        orders = [([0, 2], 2, tpde.Invalid), ([0, 1, 1, 2], 3, tpde.Invalid), ([1, 2], 1, tpde.WrongBase)]
        for order, number, cause in orders:
            for call in (
                lambda pairs: tpde.torch.apply_(live, pairs),
                lambda pairs: tpde.torch.apply_slices_(slices, pairs),
            ):
                with pytest.raises(tpde.Step) as caught:
                    call([chain.pairs[n] for n in order])
                # Sums find it; a part cannot be told from its tensor's digest.
                assert caught.value.number == number and isinstance(caught.value.__cause__, (cause, tpde.Invalid))
        assert same(live, chain.versions[0]) and same(held, chain.cut.shards(1, chain.versions[0])[0])
        with raises("unexpected_pair"):
            tpde.torch.apply_(live, chain.pairs, expect="0" * 64)
        assert tpde.torch.apply_(live, chain.pairs, expect=tpde.inspect(chain.pairs[-1]).pair_digest) == "applied"

    def test_tensors_that_only_some_steps_change(self, tmp_path: Path) -> None:
        versions = [{name: np.arange(600, dtype=np.float32) for name in "ab"} for _ in range(3)]
        versions[1]["a"][7] = versions[2]["a"][7] = 1.5
        versions[2]["b"][9] = 2.5
        pairs = [tmp_path / f"{n}" for n in range(2)]
        for n, pair in enumerate(pairs):
            tpde.numpy.save_file(versions[n + 1], pair, base=versions[n], codec="conditioned")
        live = moved(versions[0])
        before = [live[name]._version for name in "ab"]
        assert tpde.torch.apply_(live, pairs) == "applied" and same(live, versions[2])
        assert all(live[name]._version > old for name, old in zip("ab", before, strict=True))
        # The last pair lacks a tensor that an earlier one changes.
        only_b = tmp_path / "b"
        tpde.subset(pairs[1], only_b, tensors="b")
        live = moved(versions[0])
        with pytest.raises(tpde.InvalidArgument, match="pair 1 has tensor 'a', which the last pair lacks"):
            tpde.torch.apply_(live, [pairs[0], only_b])
        assert same(live, versions[0])
        assert tpde.torch.apply_(live, [pairs[0], only_b], strict=False) == "applied"
        assert same(live, {"a": versions[0]["a"], "b": versions[2]["b"]})

    def test_scratch_memory_is_what_the_caller_allows(self, chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
        from tpde._engine.device import Device

        taken: list[int] = []
        device = type(Device.of(DEVICE))
        scratch = device.scratch
        monkeypatch.setattr(device, "scratch", lambda self, bytes, what: (taken.append(bytes), scratch(self, bytes, what))[1])
        sizes = [array.nbytes for array in chain.versions[0].values()]
        for allowed in (0, 1, max(sizes) + 512, 1 << 40, None):
            live = moved(chain.versions[0])
            assert tpde.torch.apply_(live, chain.pairs, scratch=allowed) == "applied" and same(live, chain.versions[3])
            held, slices = shards(chain.cut, 2, chain.versions[0])
            assert tpde.torch.apply_slices_(slices, chain.pairs, scratch=allowed) == "applied"
            assert same(held, chain.cut.shards(2, chain.versions[3])[0])
        least, again, between, most, by_default = taken[::2]
        assert max(sizes) <= least == again <= between < max(sizes) + 1024 < sum(sizes) <= most == by_default
        # One pair needs none.
        live = moved(chain.versions[0])
        assert tpde.torch.apply_(live, [chain.pairs[0]], scratch=1) == "applied" and len(taken) == 10
        wrong: list[Any] = [-1, True, 1.5, "1", 1 << 63]
        for value in wrong:
            with pytest.raises(tpde.InvalidArgument, match="scratch is .*: expected a number of at least 0"):
                tpde.torch.apply_(live, chain.pairs, scratch=value)
            with pytest.raises(tpde.InvalidArgument, match="scratch is .*: expected a number of at least 0"):
                tpde.torch.apply_slices_(slices, chain.pairs, scratch=value)
        assert same(live, chain.versions[1])

    def test_what_several_pairs_cannot_do_is_refused(self, chain: Chain) -> None:
        live = moved(chain.versions[0])
        on_cpu = {name: torch.from_numpy(array.copy()) for name, array in chain.versions[0].items()}
        refused: list[tuple[str, Any]] = [
            ("no pair is given", lambda: tpde.torch.apply_(live, [])),
            ("expected no base", lambda: tpde.torch.apply_(live, chain.pairs, base=moved(chain.versions[0]))),
            ("expected mode 'all_checked'", lambda: tpde.torch.apply_(live, chain.pairs, mode="chunk_by_chunk")),
            ("tensor norm is F32", lambda: tpde.torch.apply_({**on_cpu, "norm": on_cpu["q"]}, chain.pairs)),
            ("tensor norm is F32", lambda: tpde.torch.apply_({**live, "norm": live["q"]}, chain.pairs)),
        ]
        for why, call in refused:
            with pytest.raises(tpde.InvalidArgument, match=why):
                call()
        assert same(live, chain.versions[0]) and same(on_cpu, chain.versions[0])


@real
class TestGraphs:
    def test_a_captured_graph_sees_the_new_weights(self, tmp_path: Path) -> None:
        """Versions reach parameters over which a CUDA graph was captured: their addresses stay."""
        import loaders

        import tpde.slices
        import tpde.sync

        base = {name: torch.randn(shape).bfloat16() for name, (shape, _) in loaders.Llama.shapes.items()}
        state = {"weights": base}
        publisher = tpde.sync.Publisher(lambda: state["weights"], tpde.sync.Folder(tmp_path))
        model = loaders.Llama(0, 1)
        model.load_weights(base.items())
        for name, tensor in model.parameters.items():
            tensor.data = tensor.data.cuda()
        live = model.parameters
        found = tpde.slices.record(model.load_weights, base, live)
        subscriber = tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path), "one", version=0)
        x = torch.randn(3, live["layers.0.qkv.weight"].shape[1], device="cuda", dtype=torch.bfloat16)

        def forward() -> Any:
            return torch.cat(
                [x @ tensor.t() for tensor in live.values() if tensor.dim() == 2 and tensor.shape[1] == x.shape[1]], dim=1
            )

        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = forward()
        for _ in range(2):
            state["weights"] = {name: tensor + tensor for name, tensor in state["weights"].items()}
            publisher.publish()
            subscriber.stage()
            subscriber.commit()
            graph.replay()
            torch.cuda.synchronize()
            expected = {name: tensor.cuda() for name, tensor in loaders.Llama(0, 1).loaded(state["weights"]).items()}
            assert all(torch.equal(live[name], tensor) for name, tensor in expected.items())
            assert torch.equal(y, forward())
