"""Both halves of vLLM's transfer and the loader of SGLang, on models with fused parameters and fakes of the engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import loaders
import pytest
import torch
from fakes import Module, Source, Workers, weights_of
from safetensors.torch import save_file
from test_recorder import Repacking, same

import tpde
import tpde.sync
from tpde_engines import live, plugins, sglang


@pytest.mark.parametrize("kind", [loaders.Llama, loaders.Qwen, loaders.Mixtral, Repacking], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_of_vllm_follow(kind: type[loaders.Model], ranks: int, vllm: Any, tmp_path: Path) -> None:
    from tpde_engines.vllm_trainer import TrainerEngine, TrainerInit

    save_file(weights_of(kind, 0), tmp_path / "base.safetensors")
    workers, source = Workers(kind, ranks), Source(kind)
    how = {"checkpoint": str(tmp_path / "base.safetensors")} if kind is Repacking else {}
    trainer = TrainerEngine.trainer_init(TrainerInit(0, folder=str(tmp_path / "run"), **how), client=workers, source=source)
    addresses = [one.data_ptr() for model in workers.models for one in model.inner.parameters.values()]
    for version in (1, 2):
        source.version = version
        sync = trainer.send_weights()
        assert sync is not None and sync.version == version
        workers.check(version)
    assert workers.calls == ["start", "finish"] * 2
    assert addresses == [one.data_ptr() for model in workers.models for one in model.inner.parameters.values()]
    for engine in workers.engines:
        engine.shutdown()
        with pytest.raises(tpde.InvalidArgument, match="follows no trainer"):
            engine.update_weights({})


def test_repacked_weights_without_a_checkpoint_are_refused(vllm: Any, tmp_path: Path) -> None:
    from tpde_engines.vllm_trainer import TrainerEngine, TrainerInit

    workers, source = Workers(Repacking, 1), Source(Repacking)
    trainer = TrainerEngine.trainer_init(TrainerInit(0, folder=str(tmp_path)), client=workers, source=source)
    before = {name: one.clone() for name, one in workers.models[0].inner.parameters.items()}
    source.version = 1
    with pytest.raises(tpde.WrongBase):
        trainer.send_weights()
    assert same(workers.models[0].inner.parameters, before)


def test_another_checkpoint_is_refused(vllm: Any, tmp_path: Path) -> None:
    from tpde_engines.vllm_trainer import TrainerEngine, TrainerInit

    other = loaders.random_weights(loaders.Llama.shapes, 99)
    save_file(other, tmp_path / "other.safetensors")
    how = {"folder": str(tmp_path / "run"), "checkpoint": str(tmp_path / "other.safetensors")}
    with pytest.raises(tpde.WrongBase, match="no module holds the checkpoint"):
        TrainerEngine.trainer_init(TrainerInit(0, **how), client=Workers(loaders.Llama, 1), source=Source(loaders.Llama))
    with pytest.raises(tpde.InvalidArgument, match="either folder or master_address"):
        TrainerEngine.trainer_init(TrainerInit(0), client=Workers(loaders.Llama, 1), source=Source(loaders.Llama))


def test_the_plug_in_registers_both_halves_once(vllm: Any) -> None:
    for _ in range(2):
        plugins.vllm()
    assert vllm.WeightTransferEngineFactory.registry == {"tpde": ("tpde_engines.vllm_worker", "Engine")}
    assert vllm.WeightTransferTrainerFactory.registry == {"tpde": ("tpde_engines.vllm_trainer", "TrainerEngine")}


@pytest.mark.parametrize("engine", ["", "raise OSError('no driver')", "factory = None"])
def test_the_plug_in_is_not_noticed(engine: str, tmp_path: Path) -> None:
    """Without vLLM, with one that cannot be imported, and with one of another release."""
    if engine:
        folder = tmp_path / "vllm" / "distributed" / "weight_transfer"
        folder.mkdir(parents=True)
        for one in (folder.parent.parent, folder.parent):
            (one / "__init__.py").touch()
        (folder / "__init__.py").write_text(engine)
    code = (
        "import sys, tpde_engines.plugins as p; p.vllm(); print([one for one in ('torch', 'tpde', 'numpy') if one in sys.modules])"
    )
    root = Path(plugins.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:{root}", "PATH": ""}
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("kind", [loaders.Llama, loaders.DeepSeek], ids=lambda kind: kind.__name__)
def test_the_loader_of_sglang(kind: type[loaders.Model], tmp_path: Path) -> None:
    state = {"version": 0}
    publisher = tpde.sync.Publisher(lambda: weights_of(kind, state["version"]), tpde.sync.Folder(tmp_path))
    model = Module(kind, 0, 1)
    model.load_weights(weights_of(kind, 0).items())
    tensors = live.described(weights_of(kind, 0).items())
    sglang.load(model, sglang.payload(str(tmp_path), tensors=tensors, version=0))  # joins
    for version in (1, 2):
        state["version"] = version
        publisher.publish()
        sglang.load(model, sglang.payload(str(tmp_path), tensors=tensors, version=version))
        assert same(model.inner.parameters, kind(0, 1).loaded(weights_of(kind, version)))
        assert model.hooks == 1 + version
        assert publisher.wait() == []
    # A version that is applied twice.
    sglang.load(model, sglang.payload(str(tmp_path), tensors=tensors, version=2))
    assert same(model.inner.parameters, kind(0, 1).loaded(weights_of(kind, 2)))
    with pytest.raises(tpde.InvalidArgument, match="expected those of tpde_engines.sglang.payload"):
        sglang.load(model, [("w", torch.zeros(3))])
    sglang._models[model].destroy()


def test_a_version_that_does_not_come(tmp_path: Path) -> None:
    tpde.sync.Publisher(lambda: weights_of(loaders.Llama, 0), tpde.sync.Folder(tmp_path))
    model = Module(loaders.Llama, 0, 1)
    model.load_weights(weights_of(loaders.Llama, 0).items())
    tensors = live.described(weights_of(loaders.Llama, 0).items())
    follower = live.follower(model, tpde.sync.Folder(tmp_path), "one", tensors=tensors)
    with pytest.raises(TimeoutError, match="version 1 did not arrive in time: the parameters are at version 0"):
        follower.commit(1, timeout=0.2)
    follower.close()
