"""A real engine of vLLM that follows a trainer, compared with a fresh engine: all parameters, tokens and log probabilities.

    integrations/test --vllm                        # makes the environment, and runs all of this
    python integrations/vllm/run.py llama 2         # one model, on so many ranks of tensor parallelism
    python integrations/vllm/run.py llama 1 plain   # linear layers use their weights as they are, as on a GPU
    python integrations/vllm/run.py large 1         # peak memory and time, beside a reload from disk

On a processor, vLLM packs the weights of linear layers and experts, and removes or overwrites the parameters. So these modules take the second
way: the engine loads them again. With "plain", linear layers are patched in place.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

PROMPTS = [{"prompt_token_ids": list(range(start, start + 19))} for start in (1, 40)]
VERSIONS = 2
#: A plug-in of vLLM, for "plain".
PLAIN = """
def register():
    import vllm._custom_ops
    import vllm.model_executor.layers.utils
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *of: False
"""


def made(model: str) -> Any:
    """A model of transformers with random weights."""
    import transformers

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 250}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if model == "large":
        shape |= {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "vocab_size": 8192,
        }
    kind, more = {
        "llama": ("Llama", {"tie_word_embeddings": False}),
        "large": ("Llama", {"tie_word_embeddings": False}),
        "tied": ("Llama", {"tie_word_embeddings": True}),
        "qwen": ("Qwen2", {"tie_word_embeddings": True}),
        "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    }[model]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape, **more, dtype="bfloat16")
    built = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, 0, 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return built


def saved(built: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Saves the model. Returns the tensors of its checkpoint."""
    from safetensors import safe_open

    built.save_pretrained(folder)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def stepped(tensors: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """A version of the trainer: a fifth of the weights, changed in the lower six bits. No weight becomes NaN, which equals nothing."""
    found = {}
    for at, (name, tensor) in enumerate(tensors.items()):
        generator = torch.Generator().manual_seed(1000 * version + at)
        mask = torch.rand(tensor.shape, generator=generator) < 0.2
        bits = torch.randint(0, 64, tensor.shape, generator=generator, dtype=torch.int16)
        found[name] = (tensor.view(torch.int16) ^ (bits * mask)).view(torch.bfloat16)
    return found


class Engine:
    """An engine, its answers, and the client of a trainer."""

    def __init__(self, path: Path, ranks: int) -> None:
        from vllm import LLM

        how: dict[str, Any] = {"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 2, "dtype": "bfloat16"}
        how |= {"skip_tokenizer_init": True, "disable_log_stats": True, "weight_transfer_config": {"backend": "tpde"}}
        self.llm = LLM(model=str(path), tensor_parallel_size=ranks, **how)

    def answers(self) -> tuple[dict[str, str], list[Any]]:
        """Checksums of all parameters, and what the engine generates."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        sums: dict[str, str] = {}
        for of_rank in self.llm.collective_rpc("compute_weight_checksums"):
            sums |= of_rank
        params = SamplingParams(temperature=0, max_tokens=16, detokenize=False, logprobs=3, prompt_logprobs=1, ignore_eos=True)
        found = []
        for one in self.llm.generate(PROMPTS, params, use_tqdm=False):
            values = [{token: value.logprob for token, value in at.items()} for at in one.prompt_logprobs[1:]]
            values += [{token: value.logprob for token, value in at.items()} for at in one.outputs[0].logprobs]
            found.append((list(one.outputs[0].token_ids), values))
        return sums, found

    # The client.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()


class Peak:
    """The most memory that the processes of an engine use, above what they use before."""

    def __init__(self) -> None:
        self._processes = [
            one for one in psutil.Process().children(recursive=True) if "torch" in Path(f"/proc/{one.pid}/maps").read_text()
        ]
        self._before = {}
        for one in self._processes:
            Path(f"/proc/{one.pid}/clear_refs").write_text("5")  # the peak becomes what is used now
            self._before[one.pid] = self._field(one, "VmRSS")

    def _field(self, process: psutil.Process, field: str) -> int:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

    def end(self) -> int:
        """Bytes, of all processes."""
        return sum(self._field(one, "VmHWM") - self._before[one.pid] for one in self._processes)


class Trainer:
    """Trains nothing: its weights are those of a version."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self.tensors.items()]

    def __iter__(self) -> Any:
        return iter(self.tensors.items())


def environment(ranks: int, *, plain: bool, folder: Path) -> None:
    """What engines are started with."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(one % (os.cpu_count() or 1)) for one in range(ranks))
    if plain:
        info = folder / "plain_linear-0.dist-info"
        info.mkdir()
        (folder / "plain_linear.py").write_text(PLAIN)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-linear\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nplain_linear = plain_linear:register\n")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, str(folder))


def measured(work: Callable[[], Any]) -> dict[str, Any]:
    """Peak memory and time."""
    peak, begin = Peak(), time.perf_counter()
    work()
    return {"seconds": round(time.perf_counter() - begin, 3), "peak_extra_bytes": peak.end()}


def compare(model: str, ranks: int, *, plain: bool) -> None:
    """Prints a row. Raises if an engine that was updated is not what a fresh one is."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        environment(ranks, plain=plain, folder=folder)
        built = made(model)
        base = saved(built, folder / "base")
        targets = [stepped(base, version) for version in range(1, VERSIONS + 1)]
        target = folder / "target"
        built.save_pretrained(target)
        for path in target.glob("*.safetensors"):
            path.unlink()
        (target / "model.safetensors.index.json").unlink(missing_ok=True)
        save_file(targets[-1], target / "model.safetensors", metadata={"format": "pt"})

        fresh = Engine(target, ranks)
        expected = fresh.answers()
        del fresh

        from tpde_engines.vllm_trainer import TrainerEngine, TrainerInit

        source = Trainer(base)
        engine = Engine(folder / "base", ranks)
        before = engine.answers()
        assert before[1] != expected[1], "both versions give the same answers, so the comparison shows nothing"
        assert "nan" not in repr(expected[1]), "the engine answers NaN"
        how = {"folder": str(folder / "run"), "checkpoint": str(folder / "base")}
        trainer = TrainerEngine.trainer_init(TrainerInit(rank=0, **how), client=engine, source=source)
        row: dict[str, Any] = {"model": model, "ranks": ranks, "linear layers": "plain" if plain else "as vLLM has them"}
        for version in targets:
            source.tensors = version
            row["update"] = measured(trainer.send_weights)
        found = engine.answers()
        modules = engine.llm.collective_rpc(_modules)
        row |= {"parameters": len(found[0]), "patched_modules": len(modules[0][0]), "loaded_again": len(modules[0][1])}
        row["kinds_loaded_again"] = sorted({one.rpartition(".")[2] for one in modules[0][1]})
        row["checksums equal"] = found[0] == expected[0]
        row["tokens and log probabilities equal"] = found[1] == expected[1]
        if model == "large":
            row["bytes"] = sum(one.nbytes for one in base.values())
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(target)}}
            row["reload from disk"] = measured(lambda: engine.llm.collective_rpc(**reload))
            row["equal after it"] = engine.answers() == expected
        print(json.dumps(row), flush=True)
        assert row["checksums equal"], sorted(name for name in expected[0] if found[0].get(name) != expected[0][name])
        assert row["tokens and log probabilities equal"]


def _modules(worker: Any) -> tuple[list[str], list[str]]:
    """Modules of a worker that are patched, and that are loaded again."""
    follower = worker.weight_transfer_engine._follower
    again = follower.subscriber._kept.modules if follower.subscriber._kept is not None else []
    every = {one.parameter.rpartition(".")[0] for one in follower.subscriber._weights.pieces}
    return sorted(every - set(again)), sorted(again)


if __name__ == "__main__":
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # _modules is sent to the workers
    compare(sys.argv[1], int(sys.argv[2]), plain=sys.argv[3:] == ["plain"])
