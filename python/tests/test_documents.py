"""The Python code in the documents runs, in a folder with the files that the documents name."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
pytest.importorskip("tqdm")

ROOT = Path(__file__).parents[2]
DOCUMENTS = [path for folder in ("", "docs", "cli", "python") for path in sorted((ROOT / folder).glob("*.md"))]
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: The blocks of each document that has some.
CODE = {str(path.relative_to(ROOT)): blocks for path in DOCUMENTS if (blocks := BLOCKS.findall(path.read_text("utf-8")))}

#: Tensors under the names that the documents use, and their shapes.
SHAPES = {
    "embed.weight": (300, 64),
    "embeddings.word_embeddings.weight": (300, 64),
    "layer.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.weight": (2048, 16),
    "model.layers.0.self_attn.k_proj.weight": (512, 16),
    "model.layers.0.self_attn.v_proj.weight": (512, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 2048),
    "model.norm.weight": (16,),
    "lm_head.weight": (4096, 1024),
}
ATTENTION = "model.layers.0.self_attn"


def model_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module with these tensors as its state dict. Matrices are the weights of linear layers."""
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last, _ = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        layer = torch.nn.Linear(*reversed(tensor.shape), bias=False) if tensor.dim() == 2 else torch.nn.Module()
        layer.weight = torch.nn.Parameter(tensor.clone())
        module.add_module(last, layer)
    return model


def stepped(tensors: dict[str, torch.Tensor], by: int) -> dict[str, torch.Tensor]:
    """The tensors with every twentieth element changed in its lowest bits."""
    stepped = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in stepped.values():
        tensor.view(-1).view(torch.int16)[::20] ^= by
    return stepped


def rank(tensors: dict[str, torch.Tensor], number: int) -> torch.Tensor:
    """The fused query, key and value rows of one rank of four."""
    return torch.cat([tensors[f"{ATTENTION}.{part}_proj.weight"].chunk(4)[number] for part in "qkv"])


@pytest.mark.parametrize("document", CODE)
def test_code_of_a_document_runs(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any("transformers" in block for block in CODE[document]):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    base = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    target = stepped(base, 1)
    following = stepped(target, 2)
    files = {"base": base, "finetune": target, "tuned": target, "rl20": target, "rl21": following}
    for name, tensors in files.items():
        save_file(tensors, f"{name}.safetensors")
    tpde.encode("rl21.safetensors", "rl21", base="rl20.safetensors")
    tpde.encode("rl20.safetensors", "step-1", base="base.safetensors")
    tpde.encode("rl21.safetensors", "step-2", base="rl20.safetensors")

    model = model_of(base)
    object.__setattr__(model, "layers", [SimpleNamespace(qkv=SimpleNamespace(weight=rank(base, 3)))])  # not in the state dict
    names: dict[str, Any] = {"model": model, "trainer": model_of(following)}
    names |= {"norm": target["model.norm.weight"], "head": target["lm_head.weight"][512:1024]}
    for block in CODE[document]:
        exec(block, names)

    if "state" in names:
        assert names["state"].keys() == target.keys()
        assert all(torch.equal(names["state"][name], tensor) for name, tensor in target.items())
    if "rows" in names:
        assert any(torch.equal(names["rows"], tensor[100:200]) for tensor in target.values())
    if "qkv" in names:
        assert torch.equal(names["qkv"], rank(target, 3))
    if "outcome" in names:
        assert names["outcome"] == "applied"
    if Path("rebuilt.safetensors").exists():
        assert Path("rebuilt.safetensors").read_bytes() == Path("rl20.safetensors").read_bytes()


def test_documents_have_code() -> None:
    assert {"README.md", "docs/python.md", "docs/serving-many-finetunes.md", "python/README.md"} <= CODE.keys()


def test_tests_that_a_document_names_exist() -> None:
    text = "".join(path.read_text("utf-8") for path in DOCUMENTS)
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 15
    for file, test in named:
        paths = [one for folder in ("python", "integrations") if (one := ROOT / folder / "tests" / file).exists()]
        assert len(paths) == 1 and re.search(rf"^ *def {test}\(", paths[0].read_text("utf-8"), re.MULTILINE), (
            f"{file} has no {test}"
        )
