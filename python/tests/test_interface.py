"""The order of arguments: data, path, then keyword options, as in the functions of safetensors with the same names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Made

import tpde

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import safetensors.numpy  # noqa: E402
import safetensors.torch  # noqa: E402

import tpde.dcp  # noqa: E402 (needs torch)
import tpde.nn  # noqa: E402
import tpde.numpy  # noqa: E402
import tpde.slices  # noqa: E402
import tpde.store  # noqa: E402
import tpde.sync  # noqa: E402
import tpde.torch  # noqa: E402

MODULES = (tpde, tpde.torch, tpde.numpy, tpde.nn, tpde.slices, tpde.store, tpde.dcp, tpde.sync)
#: Positional arguments of each function.
POSITIONAL = {
    tpde.encode: ["target", "path"],
    tpde.apply: ["pair", "path"],
    tpde.verify: ["pair"],
    tpde.inspect: ["pair"],
    tpde.fold: ["pairs", "path"],
    tpde.revert: ["pairs", "path"],
    tpde.merge: ["pairs", "path"],
    tpde.subset: ["pair", "path"],
    tpde.safe_open: ["pair", "framework", "device"],
    tpde.torch.load_file: ["pair", "device"],
    tpde.torch.save_file: ["tensors", "path"],
    tpde.torch.apply_: ["tensors", "pair"],
    tpde.torch.apply_slices_: ["slices", "pair"],
    tpde.torch.iter_weights: ["pair"],
    tpde.torch.iter_patches: ["pair"],
    tpde.torch.DevicePair: ["pair", "device"],
    tpde.torch.Encoder: ["device"],
    tpde.numpy.load_file: ["pair"],
    tpde.numpy.save_file: ["tensors", "path"],
    tpde.numpy.apply_: ["tensors", "pair"],
    tpde.numpy.apply_slices_: ["slices", "pair"],
    tpde.nn.attach: ["model", "pair"],
    tpde.slices.record: ["load_weights", "tensors", "parameters"],
    tpde.slices.cut: ["tensors", "rectangles"],
    tpde.slices.apply_: ["weights", "pair"],
    tpde.slices.check: ["weights", "pair"],
    tpde.slices.prepare: ["weights", "pair"],
    tpde.slices.Prepared: ["weights", "pair"],
    tpde.store.init: ["location"],
    tpde.store.Store: ["location"],
    tpde.store.Store.put: ["self", "checkpoint"],
    tpde.store.Store.put_pair: ["self", "pair"],
    tpde.store.Store.get: ["self", "version", "path"],
    tpde.store.Store.load: ["self", "version", "framework", "device"],
    tpde.dcp.StorageWriter: ["store"],
    tpde.dcp.StorageReader: ["store", "version"],
    tpde.sync.Folder: ["path"],
    tpde.sync.Group: ["collective", "path"],
    tpde.sync.TorchGroup: ["group", "device"],
    tpde.sync.Communicator: ["communicator"],
    tpde.sync.Source: ["tensors"],
    tpde.sync.Publisher: ["source", "channel"],
    tpde.sync.Subscriber: ["weights", "channel", "name"],
}
#: Options shared by several functions. Each function lists its options in this order.
OPTIONS = ["base", "codec", "favor", "chunk_lanes", "layout", "renamed", "mode", "strict", "digests", "replace", "progress"]


def public() -> dict[str, Any]:
    """The public callables of the package and the methods of a store that read or write checkpoints, except exceptions, reports, protocols and types that only functions create."""
    returned = (
        tpde.sync.Collective,
        tpde.SafeSlice,
        tpde.torch.CheckpointWeightPatch,
        tpde.torch.Encoding,
        tpde.nn.Attached,
        tpde.nn.JITCompressedLinear,
    )
    store = tpde.store.Store
    found = {f"tpde.store.Store.{method.__name__}": method for method in (store.put, store.put_pair, store.get, store.load)}
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            is_result = inspect.isclass(value) and (issubclass(value, Exception) or hasattr(value, "__dataclass_fields__"))
            if callable(value) and not is_result and value not in returned:
                found[f"{module.__name__}.{name}"] = value
    return found


def parameters(function: Any, kind: Any) -> list[str]:
    return [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind is kind]


def options_of(function: Any) -> list[str]:
    """The options of encoding that a function takes."""
    kinds = [re.fullmatch(r"Unpack\[(\w+)\]", str(one.annotation)) for one in inspect.signature(function).parameters.values()]
    return [name for kind in kinds if kind for name in getattr(tpde._core.options, kind[1]).__annotations__]


def test_there_are_at_most_ninety_public_names() -> None:
    names = [f"{module.__name__}.{name}" for module in MODULES for name in module.__all__]
    assert len(names) == len(set(names)) <= 90


def test_data_comes_first_then_the_path_and_options_are_keywords() -> None:
    assert set(public().values()) == set(POSITIONAL)
    for name, function in public().items():
        assert parameters(function, inspect.Parameter.POSITIONAL_OR_KEYWORD) == POSITIONAL[function], name
        options = [option for option in parameters(function, inspect.Parameter.KEYWORD_ONLY) if option in OPTIONS]
        assert options == sorted(options, key=OPTIONS.index), name
        signature = inspect.signature(function).parameters
        assert not any(isinstance(signature[one].default, bool) for one in POSITIONAL[function]), name


def test_an_option_that_a_function_does_not_have_is_named(tmp_path: Path) -> None:
    store = tpde.store.init(tmp_path / "store")
    calls = {
        tpde.encode: ("a", "b"),
        tpde.fold: (["a"], "b"),
        tpde.revert: (["a"], "b"),
        tpde.torch.save_file: ({}, "a"),
        tpde.numpy.save_file: ({}, "a"),
        tpde.store.Store.put: (store, "a"),
        tpde.store.Store.fold: (store, "a", "b"),
        tpde.store.Store.prune: (store,),
        tpde.dcp.StorageWriter: (store,),
    }
    for function, arguments in calls.items():
        further = {"keep_every": 1} if function is tpde.store.Store.prune else {}
        for wrong in {"codek", "codec", *options_of(tpde.encode)} - {*options_of(function)}:
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}': expected one of .*codec"):
                function(*arguments, **{wrong: None}, **further)
    assert {one for one in public().values() if options_of(one)} <= {*calls}


def test_save_file_and_load_file_are_called_as_those_of_safetensors(tmp_path: Path) -> None:
    arrays = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(3, np.int64)}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for library in (safetensors, tpde):
        library.numpy.save_file(arrays, tmp_path / f"{library.__name__}-np")
        library.torch.save_file(tensors, tmp_path / f"{library.__name__}-pt")
        read = library.numpy.load_file(tmp_path / f"{library.__name__}-np")
        assert {name: array.tolist() for name, array in read.items()} == {name: array.tolist() for name, array in arrays.items()}
        read = library.torch.load_file(tmp_path / f"{library.__name__}-pt", "cpu")
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_safe_open_is_called_as_that_of_safetensors(made: Made) -> None:
    with safetensors.safe_open(made.target, "pt", "cpu") as file, tpde.safe_open(made.pair, "pt", "cpu", base=made.base) as target:
        assert sorted(file.keys()) == target.keys()
        assert all(torch.equal(file.get_tensor(name), target.get_tensor(name)) for name in target.keys())
