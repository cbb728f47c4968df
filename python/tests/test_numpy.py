"""Tensors as NumPy arrays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tpde
from conftest import Made, SHAPES, raw
from raised import raises

# NumPy dtypes of the tests' arrays. BF16 and F8 are unsigned integers, so ml_dtypes is not needed.
VIEWS = {"BF16": np.uint16, "F8_E4M3": np.uint8, "F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64}


def views(tensors: dict[str, bytes]) -> dict[str, np.ndarray]:
    """Writable arrays of these bytes. BF16 and F8 are integers."""
    return {
        name: np.frombuffer(bytearray(tensors[name]), VIEWS.get(dtype, np.bool_)).reshape(shape)
        for name, (dtype, shape) in SHAPES.items()
    }


def test_get_tensor(made: Made) -> None:
    with tpde.safe_open(made.pair, base=made.base, framework="np") as target:
        assert target.keys() == sorted(SHAPES)
        assert target.metadata() == {"format": "pt", "step": "20"}
        for name, (_, shape) in SHAPES.items():
            array = target.get_tensor(name)
            assert array.shape == shape and raw(array) == made.target_bytes[name]
            assert array.flags.writeable and array.flags.c_contiguous
    with pytest.raises(tpde.InvalidArgument, match="closed"):
        target.get_tensor("scalar")


def test_dtypes_are_those_of_ml_dtypes(made: Made) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = tpde.numpy.load_file(made.pair, base=made.base)
    assert arrays["embed.weight"].dtype == ml_dtypes.bfloat16
    assert arrays["layers.0.scale"].dtype == ml_dtypes.float8_e4m3fn
    assert arrays["layers.1.mask"].dtype == np.bool_


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4"])
@pytest.mark.parametrize("has_package", [True, False])
def test_bits_are_read_as_integers_only_if_asked_for(dtype: str, has_package: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """And are saved again with the dtype of the tensor, without a base and with one."""
    if has_package:
        pytest.importorskip("ml_dtypes")
    code = f"""
import sys
sys.modules["torch"] = None
if not {has_package}:
    sys.modules["ml_dtypes"] = None
import json, numpy as np, struct, tpde, tpde.numpy
dtype, width = {dtype!r}, 2 if {dtype!r} == "BF16" else 1
shape = [6, 8] if dtype == "F4" else [6, 4]
def write(path, value):
    header = json.dumps({{"w": {{"dtype": dtype, "shape": shape, "data_offsets": [0, 24 * width]}}}}).encode()
    data = (np.full(24, 0x3E00 if width == 2 else 0x3E, f"u{{width}}") ^ np.arange(24, dtype=f"u{{width}}") * value).tobytes()
    open(path, "wb").write(struct.pack("<Q", len(header)) + header + data)
    return data
write("base.safetensors", 0)
data = write("next.safetensors", 1)
tpde.encode("next.safetensors", "p", base="base.safetensors")
def load(**how):
    with tpde.safe_open("p", "np", base="base.safetensors", **how) as opened:
        read = [opened.get_tensor("w")]
        if dtype != "F4":
            read.append(opened.get_slice("w")[:])
    return [tpde.numpy.load_file("p", base="base.safetensors", **how)["w"], *read]
if {has_package} and dtype != "F4":
    assert all(one.dtype.kind not in "ui" and one.tobytes() == data for one in load())
else:
    for read in (load, lambda: tpde.numpy.load_file("p", base="base.safetensors")):
        try:
            read()
            raise SystemExit("no error")
        except tpde.InvalidArgument as error:
            assert all(word in str(error) for word in ("'w'", dtype, "ml_dtypes", "as_integers=True")), error
for array in load(as_integers=True):
    assert array.dtype == f"u{{width}}" and array.shape == (6, 4) and array.tobytes() == data
    for saved in (array, array.copy(), array.reshape(6, 4)[:]):
        (report,) = tpde.numpy.save_file({{"w": saved}}, "q", base="base.safetensors", replace=True).tensors
        assert (report.dtype, [*report.shape]) == (dtype, shape), report
        tpde.numpy.save_file({{"w": saved}}, "r", replace=True)
        assert tpde.numpy.load_file("r", as_integers=True)["w"].tobytes() == data
    (report,) = tpde.numpy.save_file({{"w": array[:2]}}, "q", replace=True).tensors
    assert (report.dtype, [*report.shape]) == (dtype, [2, shape[1]])
    base = {{"w": array.copy()}}
    assert tpde.numpy.apply_(base, "p") == "already_applied"
    for other, expected in ((array.astype("u4"), "U32"), (np.array(array.tolist(), f"u{{width}}"), f"U{{8 * width}}")):
        assert tpde.numpy.save_file({{"w": other}}, "q", replace=True).tensors[0].dtype == expected
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_a_base_in_memory(made: Made) -> None:
    base = views(made.base_bytes)
    with tpde.safe_open(made.pair, base=base, framework="np") as target:
        for name in SHAPES:
            assert raw(target.get_tensor(name)) == made.target_bytes[name]
        assert target.metadata() == {"format": "pt", "step": "20"}
        base["embed.weight"][3, 3] ^= 1
        with pytest.raises(tpde.WrongBase):
            target.get_tensor("embed.weight")
        del base["embed.weight"]
        with pytest.raises(tpde.Invalid) as caught:
            target.get_tensor("embed.weight")
        assert caught.value.rule == "base.tensor"


INDICES = [
    np.s_[:],
    np.s_[0],
    np.s_[-1],
    np.s_[3:9],
    np.s_[100:217],
    np.s_[5:290:7],
    np.s_[..., 2],
    np.s_[7, 3],
    np.s_[7, 3:40],
    np.s_[40:41, 3:40:3],
    np.s_[10:20, ::5],
    np.s_[10:20, 5:5],
    np.s_[50:20],
    np.s_[500:600],
    np.s_[-20:, -3:],
    (...,),
    (np.int64(4), np.uint8(5)),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slices(made: Made, index: object) -> None:
    whole = np.frombuffer(made.target_bytes["embed.weight"], np.uint16).reshape(300, 64)
    with tpde.safe_open(made.pair, base=made.base, framework="np") as target:
        view = target.get_slice("embed.weight")
        assert view.get_shape() == [300, 64] and view.get_dtype() == "BF16"
        found = view[index]
    assert found.shape == whole[index].shape and raw(found) == whole[index].tobytes()


def test_slices_of_few_dims(made: Made) -> None:
    with tpde.safe_open(made.pair, base=made.base, framework="np") as target:
        assert raw(target.get_slice("scalar")[()]) == raw(target.get_slice("scalar")[...]) == made.target_bytes["scalar"]
        assert raw(target.get_slice("layers.0.norm.weight")[7]) == made.target_bytes["layers.0.norm.weight"][28:32]
        assert target.get_slice("empty")[:, 3:5].shape == (0, 2)
        view = target.get_slice("embed.weight")
        for index in (300, (0, 64), (0, 0, 0), -301):
            with pytest.raises(IndexError):
                view[index]
        for index in (None, [1, 2], slice(None, None, -1), "a", 1.5, True, (..., ...), slice("a"), np.array([1, 2])):
            with pytest.raises(tpde.InvalidArgument):
                view[index]


def test_a_slice_reads_the_chunks_that_it_needs_and_no_others(made: Made) -> None:
    damaged = made.damaged("embed.weight")  # in its first chunk: rows 0 to 63
    whole = np.frombuffer(made.target_bytes["embed.weight"], np.uint16).reshape(300, 64)
    with tpde.safe_open(damaged, base=made.base, framework="np") as target:
        view = target.get_slice("embed.weight")
        assert raw(view[64:]) == whole[64:].tobytes()
        with pytest.raises(tpde.Invalid) as caught:
            view[63:65]
        assert caught.value.rule == "payload.crc32" and caught.value.chunk is not None


def test_save_load_apply(made: Made, tmp_path: Path) -> None:
    base, target = views(made.base_bytes), views(made.target_bytes)
    report = tpde.numpy.save_file(target, tmp_path / "p", base=base, chunk_lanes=4096)
    assert report.ratio > 3
    loaded = tpde.numpy.load_file(tmp_path / "p", base=base)
    assert {name: raw(array) for name, array in loaded.items()} == made.target_bytes
    with tpde.safe_open(tmp_path / "p", base=base, framework="np") as opened:
        assert opened.metadata() is None
    with pytest.raises(tpde.AlreadyApplied):
        tpde.numpy.load_file(tmp_path / "p", base=target)
    assert tpde.numpy.apply_(base, tmp_path / "p") == "applied"
    assert {name: raw(array) for name, array in base.items()} == made.target_bytes
    assert tpde.numpy.apply_(base, tmp_path / "p") == "already_applied"


def test_a_base_in_files_for_a_target_in_memory(made: Made, tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    target = views(made.target_bytes)
    target["embed.weight"] = target["embed.weight"].view(ml_dtypes.bfloat16)
    target["layers.0.mlp.weight"] = target["layers.0.mlp.weight"].view(ml_dtypes.bfloat16)
    target["layers.0.scale"] = target["layers.0.scale"].view(ml_dtypes.float8_e4m3fn)
    report = tpde.numpy.save_file(target, tmp_path / "p", base=made.base)
    assert {tensor.base_kind for tensor in report.tensors} == {"same"}


def test_rows_that_were_added(tmp_path: Path) -> None:
    base = {"w": np.arange(10_000, dtype=np.float32).reshape(1000, 10)}
    target = {"w": np.concatenate([base["w"], np.ones((3, 10), np.float32)])}
    report = tpde.numpy.save_file(target, tmp_path / "p", base=base)
    assert report.tensors[0].base_kind == "prefix"
    assert raw(tpde.numpy.load_file(tmp_path / "p", base=base)["w"]) == raw(target["w"])
    with pytest.raises(tpde.InvalidArgument):
        tpde.numpy.apply_(base, tmp_path / "p")


@pytest.mark.parametrize(
    "array",
    [
        np.ones((4, 4), np.float32).T[1:],
        np.ones((4, 4), np.float32)[:, ::2],
        np.ones((4, 4), ">f4"),
        np.ones(4, np.complex128),
        np.array(["text"]),
        np.zeros(3, [("a", "f4")]),
        np.zeros(3, object),
        np.zeros(3, "V2"),
        np.zeros(3, "M8[s]"),
        np.ones(4)[::-1],
        np.broadcast_to(np.ones(1), (4,)),
        np.float32(1),
        [1.0, 2.0],
        None,
    ],
    ids=lambda array: f"{type(array).__name__} {getattr(array, 'dtype', '')}",
)
def test_arrays_that_cannot_be_read_are_refused(array: object, tmp_path: Path) -> None:
    with pytest.raises(tpde.InvalidArgument) as caught:
        tpde.numpy.save_file({"w": array}, tmp_path / "p")
    strided = isinstance(array, np.ndarray) and not array.flags.c_contiguous
    assert (caught.value.code == "not_contiguous") == strided and "'w'" in str(caught.value)


def test_a_tensor_that_no_file_can_hold(tmp_path: Path) -> None:
    with raises("not_writable") as caught:
        tpde.numpy.save_file({"__metadata__": np.ones(3)}, tmp_path / "p")
    assert "__metadata__" in caught.value.reason and not list(tmp_path.iterdir())


def test_masked_arrays_are_refused(made: Made, tmp_path: Path) -> None:
    masked = np.ma.masked_array(views(made.base_bytes)["layers.0.norm.weight"], np.arange(96) % 2)
    base = {**views(made.base_bytes), "layers.0.norm.weight": masked}
    for call in (
        lambda: tpde.numpy.save_file(base, tmp_path / "p"),
        lambda: tpde.numpy.save_file(views(made.target_bytes), tmp_path / "p", base=base),
        lambda: tpde.numpy.load_file(made.pair, base=base),
        lambda: tpde.numpy.apply_(base, made.pair),
    ):
        with pytest.raises(tpde.InvalidArgument, match="'layers.0.norm.weight' is a masked array"):
            call()
    assert not list(tmp_path.iterdir()) and raw(masked.data) == made.base_bytes["layers.0.norm.weight"]


def test_arrays_of_other_classes_are_their_memory(tmp_path: Path) -> None:
    class Own(np.ndarray):
        def reshape(self, *shape: object, **how: object) -> object:
            raise RuntimeError("of no use here")

    mapped = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=(10,))
    base = {"own": np.ones(10, np.float32).view(Own), "matrix": np.asmatrix(np.ones((2, 3))), "mapped": mapped}
    target = {name: np.asarray(array) + 1 for name, array in base.items()}
    tpde.numpy.save_file(target, tmp_path / "p", base=base)
    assert tpde.numpy.apply_(base, tmp_path / "p") == "applied"
    assert {name: raw(array) for name, array in base.items()} == {name: raw(array) for name, array in target.items()}


def test_read_only_arrays_are_read_and_not_written(made: Made) -> None:
    base = {name: np.frombuffer(bytes(array), array.dtype).reshape(array.shape) for name, array in views(made.base_bytes).items()}
    assert len(tpde.numpy.load_file(made.pair, base=base)) == len(SHAPES)
    with pytest.raises(tpde.InvalidArgument, match="read-only"):
        tpde.numpy.apply_(base, made.pair)
    assert {name: raw(array) for name, array in base.items()} == made.base_bytes


def test_buffers_are_held_while_in_use(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    base = {"w": random.standard_normal(16 << 20, dtype=np.float32)}
    wanted = random.standard_normal(16 << 20, dtype=np.float32)
    target: dict[str, np.ndarray] = {}
    told: list[int] = []

    def take_away(done: int, total: int) -> None:
        told.append(done)
        if target:
            with pytest.raises(ValueError):
                target["w"].resize(1)
            target.clear()  # now nothing else refers to the array
            np.zeros(16 << 20, np.float32).fill(7)

    for _ in range(10):
        told.clear()
        target["w"] = wanted.copy()
        tpde.numpy.save_file(target, tmp_path / "p", base=base, progress=take_away, replace=True)
        assert not target and np.array_equal(tpde.numpy.load_file(tmp_path / "p", base=base)["w"], wanted)
        if told[0] < wanted.nbytes:  # reported before all was read
            return
    pytest.fail("the work was always done first")
