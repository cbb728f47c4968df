#!/usr/bin/env python3
"""Ship a fine-tune as a small pair to a receiver that has the base.

Trains a small language model on generated text and fine-tunes it. The publisher makes a pair from the fine-tune. The receiver
has the base and rebuilds the fine-tune from the pair: as a file, as tensors, and in a live model.

    pip install ./python torch safetensors
    python examples/ship_a_finetune.py
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import tpde
import tpde.torch


class Model(torch.nn.Module):
    """Predicts the next token with an embedding, four layers, and a head tied to the embedding."""

    def __init__(self, tokens: int = 4000, width: int = 256) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(tokens, width)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(4)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight  # tied
        torch.nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text)
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.head(self.norm(x))


def train(model: Model, steps: int, rate: float, seed: int) -> None:
    """Trains on text in which each token is followed by one of three others."""
    torch.manual_seed(seed)
    follows = torch.randint(0, 4000, (4000, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        text = torch.randint(0, 4000, (512,))
        expected = follows[text, torch.randint(0, 3, (512,))]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(text), expected).backward()
        optimizer.step()


def publish(model: Model, path: Path) -> None:
    """Saves the weights in BF16. The tied head is saved once, as the embedding."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(tensors, path, metadata={"format": "pt"})


def size(*paths: Path) -> str:
    return f"{sum(path.stat().st_size for path in paths):,} bytes"


def main(folder: Path) -> None:
    torch.set_num_threads(2)
    base, tuned, pair = folder / "base.safetensors", folder / "tuned.safetensors", folder / "tuned"

    print("train a base, and a fine-tune of it")
    model = Model()
    train(model, steps=40, rate=3e-4, seed=1)
    publish(model, base)
    train(model, steps=20, rate=1e-5, seed=2)
    publish(model, tuned)

    # The publisher.
    report = tpde.encode(tuned, pair, base=base)
    files = [pair.with_suffix(".tpde-index"), pair.with_suffix(".tpde-blob")]
    print(f"the fine-tune is {size(tuned)}; as a pair {size(*files)}: {report.ratio:.1f} times smaller")
    for tensor in sorted(report.tensors, key=lambda tensor: -tensor.payload_bytes)[:3]:
        print(f"  {tensor.name:20} {tensor.changed / tensor.lanes:6.1%} changed, {tensor.payload_bytes:,} bytes")

    # The receiver has base.safetensors and the two files of the pair.
    tpde.verify(pair, base=base)
    tpde.apply(pair, folder / "rebuilt.safetensors", base=base)
    assert (folder / "rebuilt.safetensors").read_bytes() == tuned.read_bytes()
    print("rebuilt the file: equal byte for byte")

    expected = load_file(tuned)
    tensors = tpde.torch.load_file(pair, base=base)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    with tpde.safe_open(pair, base=base, framework="pt") as target:
        rows = target.get_slice("embed.weight")[1000:1010]
    assert torch.equal(rows, expected["embed.weight"][1000:1010])
    print("rebuilt tensors, and ten rows of one")

    live = Model().to(torch.bfloat16)
    live.load_state_dict({**load_file(base), "head.weight": load_file(base)["embed.weight"]})
    print("live model:", tpde.torch.apply_(live, pair))
    assert all(torch.equal(live.state_dict()[name], expected[name]) for name in expected)
    assert torch.equal(live.head.weight, expected["embed.weight"])  # still tied to the embedding
    print("live model, once more:", tpde.torch.apply_(live, pair))

    # Another base is refused, and its weights stay as they are.
    train(model, steps=1, rate=1e-3, seed=3)
    other = model.to(torch.bfloat16)
    try:
        tpde.torch.apply_(other, pair)
    except tpde.WrongBase as error:
        print("another model:", error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
