#!/usr/bin/env python3
"""Keep every checkpoint of a training run as a chain of differences, and load any of them.

The first checkpoint is an anchor, a pair without a base. Each later one is the difference from the previous checkpoint. Every
eighth is an anchor again, which bounds the number of pairs to apply. Training keeps only a copy of the last checkpoint.

    pip install ./python torch
    python examples/checkpoint_chain.py
"""

import tempfile
from pathlib import Path

import torch

import tpde
import tpde.torch

ANCHORS = 8  # checkpoints per anchor


class Chain:
    """Checkpoints in a folder, by number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.last: dict[str, torch.Tensor] = {}

    def path(self, number: int) -> Path:
        return self.folder / f"step-{number:04}"

    def append(self, state: dict[str, torch.Tensor]) -> tpde.EncodeReport:
        """Adds a checkpoint. A crash leaves either the complete pair or none."""
        base = None if self.count % ANCHORS == 0 else self.last
        report = tpde.torch.save_file(state, self.path(self.count), base=base)
        self.last = {name: tensor.clone() for name, tensor in state.items()}
        self.count += 1
        return report

    def load(self, number: int) -> dict[str, torch.Tensor]:
        """Loads a checkpoint: its anchor, then each difference up to it, checked and applied in place."""
        anchor = number - number % ANCHORS
        state = tpde.torch.load_file(self.path(anchor))
        for step in range(anchor + 1, number + 1):
            tpde.torch.apply_(state, self.path(step))
        return state


def main(folder: Path) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    # Training uses weights in F32; checkpoints hold them in BF16.
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512))
    teacher = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)

    chain, kept, dense, stored = Chain(folder), [], 0, 0
    for step in range(20):
        x = torch.randn(64, 512)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), teacher(x).detach()).backward()
        optimizer.step()
        state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        report = chain.append(state)
        kept.append({name: tensor.clone() for name, tensor in state.items()})  # to compare with below
        dense, stored = dense + report.target_bytes, stored + report.stored_bytes
        changed = sum(tensor.changed for tensor in report.tensors) / sum(tensor.lanes for tensor in report.tensors)
        kind = "anchor" if step % ANCHORS == 0 else f"{changed:5.1%} changed"
        print(f"step {step:2}: {kind:14} {report.stored_bytes:9,} bytes, {report.ratio:5.1f} times smaller")
    print(f"20 checkpoints: {stored:,} bytes instead of {dense:,}")

    for number in (13, 0, 19, 8):
        state = chain.load(number)
        assert all(torch.equal(state[name], kept[number][name]) for name in state)
        print(f"loaded step {number}: equal bit for bit")

    # A difference fits only the previous checkpoint.
    state = chain.load(9)
    try:
        tpde.torch.apply_(state, chain.path(12))
    except tpde.WrongBase as error:
        assert all(torch.equal(state[name], kept[9][name]) for name in state)
        print("step 12 on step 9, refused with nothing written:", error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
