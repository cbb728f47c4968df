"""Every public function with wrong arguments: what is raised is an error of this package that says what is wrong, or a TypeError."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import torch.distributed.checkpoint as dcp  # noqa: E402 (needs torch)
from groups import Hub, Rank  # noqa: E402
from test_interface import options_of, public  # noqa: E402

import tpde.dcp  # noqa: E402
import tpde.nn  # noqa: E402
import tpde.numpy  # noqa: E402
import tpde.slices  # noqa: E402
import tpde.store  # noqa: E402
import tpde.sync  # noqa: E402
import tpde.torch  # noqa: E402

warnings.filterwarnings("ignore")
BF16 = torch.bfloat16


def weights(change: int = 0) -> dict[str, torch.Tensor]:
    return {"weight": (torch.arange(64.0).view(8, 8) / 7).to(BF16) + change, "bias": torch.arange(8.0) + change}


def odd_tensors() -> dict[str, Any]:
    """What is not a tensor that can be stored, or is one in an unusual way."""
    return {
        "none": None,
        "a number": 3.5,
        "text": "weight",
        "bytes": b"weight",
        "a list": [1, 2],
        "a dict": {"x": 1},
        "meta": torch.empty(8, 8, device="meta"),
        "sparse": torch.eye(8).to_sparse(),
        "csr": torch.eye(8).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(torch.ones(8, 8), 1.0, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "transposed": torch.ones(8, 8).to(BF16).T[:, ::2],
        "expanded": torch.ones(1, dtype=BF16).expand(8, 8),
        "complex128": torch.ones(8, 8, dtype=torch.complex128),
        "conjugated": torch.ones(8, 8, dtype=torch.complex64).conj(),
        "requires grad": torch.ones(8, 8, dtype=BF16, requires_grad=True),
        "other shape": torch.ones(3, dtype=BF16),
        "other dtype": torch.ones(8, 8, dtype=torch.int16),
        "objects": np.array([[object()] * 8] * 8),
        "strings": np.array(["a"] * 8),
        "masked": np.ma.masked_array(np.ones((8, 8)), mask=True),
        "big endian": np.ones((8, 8), ">f4"),
        "times": np.zeros(3, "M8[s]"),
        "lazy": torch.nn.parameter.UninitializedParameter(),
    }


def odd_states() -> Iterator[Any]:
    for value in odd_tensors().values():
        yield {**weights(), "weight": value}
        yield {"extra": value, **weights()}
    yield from ({}, {3: torch.ones(3)}, {None: torch.ones(3)}, {"\ud800": torch.ones(3)}, {"": torch.ones(3)}, [1], [torch.ones(3)])
    yield {**weights(), "_extra_state": {"a": 1}}
    yield torch.nn.Linear(8, 8, device="meta")
    yield torch.nn.Linear(3, 3)


def odd_values(folder: Path) -> Iterator[Any]:
    (folder / "text").write_text("no pair")
    (folder / "empty").mkdir(exist_ok=True)
    yield from (
        None,
        True,
        3,
        -1,
        2.5,
        "",
        "no such file",
        "a\0b",
        "\ud800",
        b"\xff",
        b"",
        object(),
        object,
        [],
        (),
        {},
        set(),
        iter([]),
    )
    yield from (
        [None],
        ["no", "such"],
        {"a": 1},
        {"a": "b"},
        {3: 4},
        lambda *_: None,
        folder,
        folder / "text",
        folder / "empty",
        Path("/"),
    )
    yield from (
        os.fspath(folder / "no" / "such" / "file"),
        folder / "text" / "below",
        1 << 70,
        "main@",
        "main@x",
        "@",
        "main@99",
        "x" * 5000,
    )
    yield from (torch.ones(3), np.ones(3), torch.nn.Linear(2, 2), torch.float32, torch.device("cpu"), "cuda:99", "mps", "nowhere")


class Calls:
    """Each public function with arguments that are right."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, itertools.count()
        base, target = weights(), weights(1)
        tpde.torch.save_file(base, folder / "base-pair")
        tpde.apply(folder / "base-pair", folder / "base.safetensors")
        tpde.torch.save_file(target, folder / "pair", base=base)
        tpde.encode(folder / "base.safetensors", folder / "whole")
        (folder / "a").mkdir()
        tpde.subset(folder / "pair", folder / "half", tensors="weight")
        tpde.subset(folder / "pair", folder / "other-half", tensors="bias")
        self.store = tpde.store.init(folder / "store")
        self.store.put(base)
        self.store.put(target)
        self.channel = tpde.sync.Folder(folder / "run")
        tpde.sync.Publisher(lambda: base, self.channel)

    def new(self) -> Path:
        return self.folder / f"out-{next(self.count)}"

    def map(self) -> tpde.slices.Map:
        live = {name: one.clone() for name, one in weights().items()}

        def load(loaded: Any) -> None:
            for name, one in loaded:
                live[name].copy_(one)

        return tpde.slices.record(load, weights(), live)

    def slices(self) -> list[tpde.Slice]:
        return [tpde.Slice(name, ..., one, one.shape) for name, one in weights().items()]

    def linear(self) -> torch.nn.Module:
        module = torch.nn.Linear(8, 8, dtype=BF16)
        module.weight.data.copy_(weights()["weight"])
        return torch.nn.Sequential(module)

    def arrays(self) -> dict[str, Any]:
        return {"bias": np.arange(8, dtype=np.float32)}

    def right(self, function: Any) -> dict[str, Any]:
        pair, base = self.folder / "pair", weights()
        steps = [self.folder / "whole"]
        store = self.store
        made: dict[Any, Callable[[], dict[str, Any]]] = {
            tpde.encode: lambda: {"target": self.folder / "base.safetensors", "path": self.new(), "base": None},
            tpde.apply: lambda: {"pair": self.folder / "whole", "path": self.new()},
            tpde.verify: lambda: {"pair": self.folder / "whole"},
            tpde.inspect: lambda: {"pair": pair},
            tpde.fold: lambda: {"pairs": steps, "path": self.new()},
            tpde.revert: lambda: {"pairs": steps, "path": self.new()},
            tpde.merge: lambda: {"pairs": [self.folder / "half", self.folder / "other-half"], "path": self.new()},
            tpde.subset: lambda: {"pair": pair, "path": self.new(), "tensors": "bias"},
            tpde.safe_open: lambda: {"pair": pair, "base": base},
            tpde.torch.load_file: lambda: {"pair": pair, "base": base},
            tpde.torch.save_file: lambda: {"tensors": weights(1), "path": self.new(), "base": base},
            tpde.torch.apply_: lambda: {"tensors": base, "pair": pair},
            tpde.torch.apply_slices_: lambda: {"slices": self.slices(), "pair": pair},
            tpde.torch.iter_weights: lambda: {"pair": pair, "base": base},
            tpde.torch.iter_patches: lambda: {"pair": pair, "base": base},
            tpde.torch.DevicePair: lambda: {"pair": pair},
            tpde.torch.Encoder: lambda: {},
            tpde.numpy.load_file: lambda: {"pair": pair, "base": base},
            tpde.numpy.save_file: lambda: {"tensors": self.arrays(), "path": self.new()},
            tpde.numpy.apply_: lambda: {"tensors": base, "pair": pair},
            tpde.numpy.apply_slices_: lambda: {"slices": self.slices(), "pair": pair},
            tpde.nn.attach: lambda: {"model": self.linear(), "pair": pair},
            tpde.slices.record: lambda: {"load_weights": lambda loaded: None, "tensors": base, "parameters": weights()},
            tpde.slices.cut: lambda: {"tensors": base, "rectangles": [self.map().rectangles()]},
            tpde.slices.apply_: lambda: {"weights": self.map(), "pair": pair},
            tpde.slices.check: lambda: {"weights": self.map(), "pair": pair},
            tpde.slices.prepare: lambda: {"weights": self.map(), "pair": pair},
            tpde.slices.Prepared: lambda: {"weights": self.map(), "pair": pair, "kept": None, "reload": None, "expect": None},
            tpde.store.init: lambda: {"location": self.new()},
            tpde.store.Store: lambda: {"location": self.folder / "store"},
            tpde.store.Store.put: lambda: {"self": store, "checkpoint": base},
            tpde.store.Store.put_pair: lambda: {"self": store, "pair": pair},
            tpde.store.Store.get: lambda: {"self": store, "version": "main@0", "path": self.new()},
            tpde.store.Store.load: lambda: {"self": store, "version": "main@0"},
            tpde.dcp.StorageWriter: lambda: {"store": store},
            tpde.dcp.StorageReader: lambda: {"store": store},
            tpde.sync.Folder: lambda: {"path": self.folder / "run"},
            tpde.sync.Group: lambda: {"collective": tpde.sync.Communicator(Rank(Hub(2), 0)), "path": self.new()},
            tpde.sync.TorchGroup: lambda: {},
            tpde.sync.Communicator: lambda: {"communicator": Rank(Hub(2), 0)},
            tpde.sync.Source: lambda: {"tensors": lambda: base},
            tpde.sync.Publisher: lambda: {"source": lambda: base, "channel": tpde.sync.Folder(self.new())},
            tpde.sync.Subscriber: lambda: {"weights": self.map(), "channel": self.channel, "name": "one", "version": 0},
        }
        return made[function]()

    def methods(self) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
        """Methods of what these make."""
        opened = tpde.safe_open(self.folder / "pair", base=weights())
        publisher = tpde.sync.Publisher(lambda: weights(), tpde.sync.Folder(self.new()), timeout=0)
        subscriber = tpde.sync.Subscriber(self.map(), self.channel, "two", version=0)
        found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
            "get_tensor": (opened.get_tensor, {"name": "bias"}),
            "get_slice": (opened.get_slice, {"name": "bias"}),
            "a slice": (lambda index: opened.get_slice("weight")[index], {"index": 3}),
            "publish": (publisher.publish, {"copied": None}),
            "wait": (publisher.wait, {"timeout": 0}),
            "commit": (subscriber.commit, {"answer": True}),
            "check": (self.map().check, {"missing": ""}),
            "bind": (self.map().bind, {"parameters": weights()}),
            "slices": (self.map().slices, {"without": []}),
            "rectangles": (self.map().rectangles, {"kept": None}),
            "keep": (self.map().keep, {"base": weights(), "modules": []}),
            "join": (self.channel.join, {"name": "three", "version": 0, "rectangles": self.map().rectangles()}),
            "drop": (self.channel.drop, {"name": "nobody"}),
        }
        for name, one in {
            "version": {"version": "main"},
            "log": {"branch": "main"},
            "since": {"start": 0, "branch": "main"},
            "create_branch": {"name": f"b{next(self.count)}", "start": "main"},
            "delete_branch": {"name": "none"},
            "fold": {"start": "main@0", "end": "main@1"},
            "prune": {"branch": "none", "keep_every": 2},
            "verify": {"branch": "main"},
        }.items():
            found[f"store.{name}"] = getattr(self.store, name), one
        return found


def raw_error(call: Callable[[], Any], *, lists: bool = True) -> str | None:
    """What was raised, if it is neither an error of this package nor a TypeError."""
    try:
        found = call()
        if lists and inspect.isgenerator(found):
            list(found)
    except (tpde.TpdeError, TypeError) as error:
        return None if str(error) and getattr(error, "code", None) != "internal" else f"without a text: {error!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


#: Parameters that take tensors.
OF_TENSORS = ("tensors", "base", "checkpoint", "parameters", "slices", "source", "model")


def check(function: Callable[..., Any], right: Callable[[], dict[str, Any]], folder: Path, where: str) -> list[str]:
    found = []
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    for name in (*names, *options_of(function)):
        if name in ("self", "_made", "progress"):
            continue
        for value in (*odd_values(folder), *(odd_states() if name in OF_TENSORS else ())):
            problem = raw_error(lambda n=name, v=value: function(**{**right(), n: v}))
            if problem is not None:
                found.append(f"{where}({name}={value!r:.60}): {problem:.160}")
    return found


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    (tmp_path / "work").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return Calls(tmp_path / "work")


@pytest.mark.parametrize("name", sorted(public()))
def test_public_functions(name: str, calls: Calls, tmp_path: Path) -> None:
    function = public()[name]
    assert check(function, lambda: calls.right(function), tmp_path, name) == []


def test_methods(calls: Calls, tmp_path: Path) -> None:
    found = []
    for name, (function, arguments) in calls.methods().items():
        found += check(function, lambda arguments=arguments: dict(arguments), tmp_path, name)
    assert found == []


@pytest.mark.parametrize("what", sorted(odd_tensors()))
def test_errors_name_the_tensor(what: str, calls: Calls) -> None:
    state = {**weights(), "odd one": odd_tensors()[what]}
    for function, arguments in {
        tpde.torch.save_file: {"tensors": state, "path": calls.new()},
        tpde.numpy.save_file: {"tensors": state, "path": calls.new()},
        tpde.store.Store.put: {"self": calls.store, "checkpoint": state},
        tpde.sync.Publisher: {"source": lambda: state, "channel": tpde.sync.Folder(calls.new())},
    }.items():
        try:
            function(**arguments)
        except tpde.TpdeError as error:
            assert "'odd one'" in str(error), error


def stray_files() -> list[tuple[str, str]]:
    names = [
        "foo.json",
        "00000001 (copy).json",
        ".DS_Store",
        "00000001.json~",
        "one.json",
        "a.b.c.json",
        "00000009.json.tmp",
        "é.json",
    ]
    return [(folder, name) for folder in ("versions", "subscribers", "layouts", "pairs", "answers") for name in names]


@pytest.mark.parametrize(("folder", "name"), stray_files())
def test_stray_files_in_a_channel(folder: str, name: str, tmp_path: Path) -> None:
    channel = tpde.sync.Folder(tmp_path / "run")
    (channel.path / folder / name).write_text("{}")
    calls_map = Calls.map(None)  # type: ignore[arg-type]
    state = weights()
    publisher = tpde.sync.Publisher(lambda: state, channel, timeout=0)
    subscriber = tpde.sync.Subscriber(calls_map, channel, "one", version=0)
    for version in (1, 2):
        state.update(weights(version))
        assert publisher.publish().version == version
        assert [one.version for one in subscriber.update()] == [version] and publisher.wait() == []
    assert tpde.sync.Publisher(lambda: state, channel).version == 2


BROKEN = [
    "",
    "[]",
    "{}",
    "3",
    "null",
    '"x"',
    "{",
    "\ud800"[:0] + '{"version": []}',
    '{"layout": "../../x", "version": 0}',
    "[" * 5000,
]


@pytest.mark.parametrize("what", ["versions", "layouts", "subscribers", "answers"])
def test_records_that_are_none(what: str, tmp_path: Path) -> None:
    for number, text in enumerate(BROKEN):
        channel = tpde.sync.Folder(tmp_path / str(number))
        publisher = tpde.sync.Publisher(lambda: weights(), channel, timeout=0)
        subscriber = tpde.sync.Subscriber(Calls.map(None), channel, "one", version=0)  # type: ignore[arg-type]
        publisher.publish()
        subscriber.update()
        for path in sorted((channel.path / what).rglob("*.json")):
            path.write_text(text)
        works = (
            lambda: tpde.sync.Publisher(lambda: weights(), channel, timeout=0).publish(),
            publisher.publish,
            publisher.wait,
            subscriber.update,
            channel.subscribers,
            lambda: tpde.sync.Subscriber(Calls.map(None), channel, "two", version=1),  # type: ignore[arg-type]
        )
        for work in works:
            assert raw_error(work) is None, (what, text, raw_error(work))


def test_a_channel_that_was_deleted_or_is_read_only(tmp_path: Path) -> None:
    import shutil

    channel = tpde.sync.Folder(tmp_path / "run")
    publisher = tpde.sync.Publisher(lambda: weights(), channel, timeout=0)
    subscriber = tpde.sync.Subscriber(Calls.map(None), channel, "one", version=0)  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "run")
    for work in (publisher.publish, publisher.wait, subscriber.update, subscriber.stage, channel.subscribers):
        with pytest.raises(tpde.TpdeError):
            work()


def test_a_pair_that_needs_a_base_says_so(calls: Calls) -> None:
    pair = calls.folder / "pair"
    for call in (
        lambda: tpde.torch.load_file(pair),
        lambda: tpde.numpy.load_file(pair, as_integers=True),
        lambda: tpde.safe_open(pair).get_tensor("weight"),
        lambda: tpde.safe_open(pair).get_slice("weight")[2:3],
        lambda: list(tpde.torch.iter_weights(pair)),
    ):
        with pytest.raises(tpde.TpdeError, match="base="):
            call()
    with pytest.raises(tpde.TpdeError, match="base="):
        tpde.apply(pair, calls.new())


def test_values_that_would_count_as_others_are_refused(calls: Calls) -> None:
    pair, source, reserved = calls.folder / "pair", lambda: weights(), {tpde.dcp.ID: "a"}
    for name, call in {
        "timeout": lambda value: tpde.sync.Publisher(source, tpde.sync.Folder(calls.new()), timeout=value),
        "digests": lambda value: tpde.slices.prepare(calls.map(), pair, digests=value),
        "metadata": lambda value: tpde.dcp.StorageWriter(calls.store, metadata=value),
        "progress": lambda value: tpde.torch.load_file(pair, base=weights(), progress=value),
    }.items():
        wrong: dict[str, list[Any]] = {
            "timeout": [float("nan"), -1, True],
            "digests": ["no", 0.5],
            "metadata": ["a", 3, {"a": 3}, {3: "a"}, reserved, {tpde.dcp.KEY: "{}"}],
            "progress": [3, "yes"],
        }
        for value in wrong[name]:
            with pytest.raises(tpde.InvalidArgument, match=name):
                call(value)


def test_own_errors_of_functions_of_the_caller_are_passed_on(calls: Calls) -> None:
    class Own(Exception):
        pass

    def fails(*_: Any) -> Any:
        raise Own

    for call in (
        lambda: tpde.sync.Publisher(fails, tpde.sync.Folder(calls.new())),
        lambda: tpde.torch.save_file(weights(), calls.new(), progress=fails),
        lambda: calls.store.get("main", calls.new(), tensors=fails),
        lambda: calls.store.load("main", tensors=fails),
    ):
        with pytest.raises(Own):
            call()


def test_a_state_dict_of_dcp(calls: Calls) -> None:
    for name, value in odd_tensors().items():
        if name in ("lazy", "nested", "csr"):  # refused by PyTorch
            continue
        try:
            dcp.save(
                {"odd one": value},
                storage_writer=tpde.dcp.StorageWriter(calls.store, branch=f"b{threading.get_ident()}"),
                no_dist=True,
            )
        except dcp.api.CheckpointException as caught:
            for error, _ in caught.failures.values():
                assert isinstance(error, tpde.TpdeError) and "'odd one'" in str(error), (name, error)


def test_records_are_json(tmp_path: Path) -> None:
    """Ids and tensors of version 0 can be read by other programs."""
    tpde.sync.Publisher(lambda: weights(), tpde.sync.Folder(tmp_path))
    record = json.loads((tmp_path / "versions" / "00000000.json").read_text())
    assert record["tensors"] == {"weight": ["bfloat16", [8, 8]], "bias": ["float32", [8]]} and len(record["id"]) == 32
