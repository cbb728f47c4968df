"""Weights and changes of any size, with the statistics of real ones.

`rates.json` has a row per exponent of BF16 weights: the number of weights, the share that changed in a run of reinforcement learning,
and the distances of these changes. It was made from two checkpoints by

    python integrations/bench/changes.py base.safetensors rl20.safetensors

A larger change scales all steps by 2^n: a weight with exponent e then changes as weights with exponent e - n did.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("rates.json")
#: Quantiles of the moves of an exponent.
MOVES = 32
#: Elements that are drawn at once.
BLOCK = 1 << 27


def measured(base: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> dict[str, list]:
    """Counts, rates and moves by exponent. Moves are in units in the last place, and positive away from zero."""
    before, after = (
        torch.cat([one[name].reshape(-1) for name in base]).view(torch.int16).to(torch.int32) for one in (base, target)
    )
    exponents = (before >> 7) & 255
    table: dict[str, list] = {"first": [], "weights": [], "rates": [], "moves": []}
    for exponent in range(256):
        own = exponents == exponent
        if own.sum() < 5_000:  # too few to tell
            continue
        changed = own & (before != after)
        moves = ((after & 0x7FFF) - (before & 0x7FFF))[changed & ((before ^ after) >= 0)].sort().values
        picks = ((torch.arange(MOVES) + 0.5) / MOVES * len(moves)).long()
        table["first"] = table["first"] or [exponent]
        table["weights"].append(int(own.sum()))
        table["rates"].append(round(float(changed.sum() / own.sum()), 6))
        table["moves"].append(moves[picks].tolist() if len(moves) else [1] * MOVES)
    return table


class Changes:
    """Draws weights and changes on a device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        table = json.loads(TABLE.read_text())
        self._first, self._rates, self._moves = table["first"][0], table["rates"], table["moves"]
        weights = torch.tensor(table["weights"], dtype=torch.float64)
        self._share = weights / weights.sum()
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        # One of 65,536 equally likely entries is an exponent.
        ends = (self._share.cumsum(0) * 65536).round().long()
        counts = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long))
        self._exponents = torch.repeat_interleave(torch.arange(len(weights)) + self._first, counts).to(torch.int16).to(device)

    def weights(self, shape: tuple[int, ...]) -> torch.Tensor:
        """New weights: exponents as often as in the table, all signs and mantissas equally likely."""
        found = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        for block in found.view(torch.int16).view(-1).split(BLOCK):
            block.random_(0, 256, generator=self._generator)  # sign and mantissa
            block.copy_((block & 127) | ((block & 128) << 8))
            block |= self._exponents[self._random(block, 65536)] << 7
        return found

    def _random(self, like: torch.Tensor, end: int) -> torch.Tensor:
        return torch.randint(0, end, like.shape, generator=self._generator, device=self._device, dtype=torch.int32)

    def step(self, weights: dict[str, torch.Tensor], share: float) -> None:
        """Changes about this share of the weights."""
        rates, moves = (one.to(self._device) for one in self._tables(self._shift(share)))
        for tensor in weights.values():
            for block in tensor.view(torch.int16).view(-1).split(BLOCK // 4):
                exponents = ((block >> 7) & 255).to(torch.int32)
                drawn = torch.rand(block.shape, generator=self._generator, device=self._device)
                own = moves.view(-1)[exponents * MOVES + self._random(block, MOVES)]
                own = torch.where(drawn < rates[exponents], own, torch.zeros_like(own))
                magnitude = ((block & 0x7FFF) + own).clamp_(0, 0x7F7F)
                block.copy_((block & -0x8000) | magnitude)

    def _rows(self, exponent: int, shift: float) -> tuple[int, int, float]:
        """Two rows of the table between which an exponent lies, and how far from the first one."""
        below = math.floor(shift)
        first, second = (min(max(exponent - self._first - below - one, 0), len(self._rates) - 1) for one in (0, 1))
        return first, second, shift - below

    def _rate(self, exponent: int, shift: float) -> float:
        first, second, part = self._rows(exponent, shift)
        return (1 - part) * self._rates[first] + part * self._rates[second]

    def _shift(self, share: float) -> float:
        """The power of two by which weights move further, so that this share changes."""
        low, high = -20.0, 20.0
        for _ in range(60):
            middle = (low + high) / 2
            changed = sum(own * self._rate(self._first + at, middle) for at, own in enumerate(self._share.tolist()))
            low, high = (middle, high) if changed < share else (low, middle)
        return high

    def _tables(self, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Rates and moves of all exponents, when all weights move further by this power of two."""
        rates = torch.tensor([self._rate(exponent, shift) for exponent in range(256)])
        moves = torch.empty((256, MOVES))
        mixed = torch.randperm(MOVES, generator=torch.Generator().manual_seed(0))
        for exponent in range(256):
            first, second, part = self._rows(exponent, shift)
            is_second = mixed < round(MOVES * part)
            # Exponents below the table move further.
            further = min(max(0, self._first + math.floor(shift) - exponent), 8)
            own, other = (torch.tensor(self._moves[row]) for row in (first, second))
            moves[exponent] = torch.where(is_second, other, own) * 2**further
        return rates, moves.clamp(-30_000, 30_000).to(torch.int16)


if __name__ == "__main__":
    from safetensors.torch import load_file

    TABLE.write_text(json.dumps(measured(load_file(sys.argv[1]), load_file(sys.argv[2]))) + "\n")
