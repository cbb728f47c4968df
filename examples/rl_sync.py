#!/usr/bin/env python3
"""Keep the weights of two generating workers equal to those of a trainer, by differences.

A trainer process takes optimiser steps and publishes each as a pair. Two worker processes generate text with live weights. As soon
as a pair is published, they patch their weights in place between two tokens. After every step, the digests of all weights are
compared. All processes share one GPU if there is one; otherwise they run on the CPU.

    pip install ./python torch
    python examples/rl_sync.py [--steps 6] [--width 256] [--device cuda]
"""

import argparse
import hashlib
import queue
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

import tpde
import tpde.torch

TOKENS = 2000


class Model(torch.nn.Module):
    """Predicts the next token with an embedding, some layers, and a head tied to the embedding."""

    def __init__(self, width: int, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)  # all processes start with the same base
        self.embed = torch.nn.Embedding(TOKENS, width)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.embed.weight  # tied
        torch.nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.head(self.norm(x))


def digest(state: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all weights."""
    hasher = hashlib.sha256()
    for name in sorted(state):
        hasher.update(name.encode())
        hasher.update(state[name].detach().cpu().contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()


def in_bf16(model: Model) -> dict[str, torch.Tensor]:
    """The weights in the dtype of the workers, on the CPU, where pairs are encoded."""
    return {name: tensor.detach().to("cpu", torch.bfloat16, copy=True) for name, tensor in model.state_dict().items()}


def train(folder: Path, device: str, width: int, steps: int, inboxes: list, answers: object) -> None:
    """Trains weights in F32. Publishes each step as the difference of its BF16 weights from the previous ones."""
    torch.set_num_threads(1)
    model = Model(width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-6, weight_decay=0.0)
    follows = torch.randint(0, TOKENS, (TOKENS, 3), device=device)
    last = in_bf16(model)
    for step in range(1, steps + 1):
        tokens = torch.randint(0, TOKENS, (512,), device=device)
        labels = follows[tokens, torch.randint(0, 3, (512,), device=device)]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        state = in_bf16(model)
        report = tpde.torch.save_file(state, folder / f"step-{step}", base=last)
        last = state
        for inbox in inboxes:
            inbox.put((step, time.monotonic()))
        changed = sum(tensor.changed for tensor in report.tensors) / sum(tensor.lanes for tensor in report.tensors)
        answers.put(
            ("trainer", step, digest(state), f"{changed:5.1%} changed, {report.stored_bytes:,} bytes, {report.ratio:.0f}:1")
        )


def work(number: int, folder: Path, device: str, width: int, steps: int, inbox: object, answers: object) -> None:
    """Generates text, and patches the live weights between two tokens."""
    torch.set_num_threads(1)
    model = Model(width).to(device, torch.bfloat16)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    token, count, step = torch.tensor([number], device=device), 0, 0
    while step < steps:
        with torch.no_grad():
            token = model(token).argmax(-1)
        count += 1
        try:
            step, published = inbox.get_nowait()
        except queue.Empty:
            continue
        begin = time.monotonic()
        assert tpde.torch.apply_(model, folder / f"step-{step}") == "applied"
        end = time.monotonic()
        assert all(parameter.data_ptr() == addresses[name] for name, parameter in model.named_parameters())
        summary = f"after {count} tokens, patched in {1e3 * (end - begin):.1f} ms, {1e3 * (end - published):.1f} ms after the step"
        answers.put((f"worker {number}", step, digest(model.state_dict()), summary))
        count = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that its parent has used
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers, inboxes = context.Queue(), [context.Queue() for _ in range(2)]
        shared = (folder, args.device, args.width, args.steps)
        processes = [context.Process(target=train, args=(*shared, inboxes, answers))]
        for number, inbox in enumerate(inboxes):
            processes.append(context.Process(target=work, args=(number, *shared, inbox, answers)))
        for process in processes:
            process.start()
        digests: dict[int, set[str]] = {}
        try:
            for _ in range(3 * args.steps):
                process_name, step, weights, summary = answers.get(timeout=300)
                digests.setdefault(step, set()).add(weights)
                print(f"step {step}, {process_name:8}: {weights[:16]}  {summary}")
        finally:
            for process in processes:
                process.join(timeout=30)
                process.kill()
    assert all(process.exitcode == 0 for process in processes)
    assert len(digests) == args.steps and all(len(distinct) == 1 for distinct in digests.values())
    print(f"{args.steps} steps: trainer and workers agree on every weight after each, on {args.device}")


if __name__ == "__main__":
    main()
