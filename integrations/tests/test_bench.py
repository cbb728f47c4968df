"""The measurement runs, and compares all weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
RECEIVERS = {"folder": ["--receivers", "1"], "group": ["--receivers", "2", "--tensor-parallel", "2", "--gigabits", "0.01"]}


@pytest.mark.parametrize("channel", ["folder", "group"])
def test_a_row_per_share_and_speed(channel: str) -> None:
    how = ["--shape", "1", "256", "512", "1024", "--bucket", "200000", "--channel", channel, *RECEIVERS[channel]]
    command = [sys.executable, str(BENCH / "sync.py"), "--changed", "0.01", "0.2", *how]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(round(row["changed"], 2), row["gigabits"]) for row in rows[:2]] == [(0.01, None), (0.2, None)]
    assert [row["gigabits"] for row in rows[2:]] == ([0.01] if channel == "group" else [])
    for row in rows:
        assert "bare receivers, no engine" in row["receivers"] and row["favor"] == "speed"
        assert (
            row["tpde"]["bytes"] < row["gaps + zstd"]["bytes"] < row["coo"]["bytes"] < row["dense"]["bytes"] == row["target_bytes"]
        )
        if row["gigabits"]:
            for method in ("tpde", "gaps + zstd", "coo", "dense"):
                assert row[method]["ms"] >= 0.99 * row[method]["bytes"] * 8 / 1e4, (
                    "a link of 10 Mb/s carries 10,000 bits per millisecond"
                )


def test_weights_and_changes_have_the_statistics_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from changes import TABLE, Changes

    table = json.loads(TABLE.read_text())
    changes = Changes(torch.device("cpu"))
    base = changes.weights((1000, 500))
    exponents = (base.view(torch.int16) >> 7) & 255
    for at, weights in enumerate(table["weights"]):
        share = float((exponents == table["first"][0] + at).float().mean())
        assert abs(share - weights / sum(table["weights"])) < 0.005
    assert abs(float((base < 0).float().mean()) - 0.5) < 0.01
    # The run that the table is of changed 1.2 % of the weights: each exponent changes as often as it did there.
    own = sum(weights * rate for weights, rate in zip(table["weights"], table["rates"])) / sum(table["weights"])
    for share in (0.002, own, 0.2, 0.4):
        target = base.clone()
        changes.step({"w": target}, share)
        changed = target.view(torch.int16) != base.view(torch.int16)
        assert abs(float(changed.float().mean()) - share) < 0.05 * share + 2e-4
        if share == own:
            for at, rate in enumerate(table["rates"]):
                of_exponent = changed[exponents == table["first"][0] + at].float()
                assert of_exponent.numel() < 1000 or abs(float(of_exponent.mean()) - rate) < 0.05
