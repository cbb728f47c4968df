"""The measurement runs, and compares all weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "sync.py"


@pytest.mark.parametrize("channel", ["folder", "group"])
def test_a_row_per_share(channel: str) -> None:
    size = ["--layers", "1", "--width", "256", "--hidden", "512", "--vocabulary", "1024", "--bucket", "200000"]
    command = [sys.executable, str(SCRIPT), "--channel", channel, "--changed", "0.01", "0.2", *size]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [round(row["changed"], 2) for row in rows] == [0.01, 0.2]
    for row in rows:
        assert row["receivers"] == "1 bare receivers, no engine" and row["favor"] == "speed"
        assert row["tpde"]["bytes"] < row["coo"]["bytes"] < row["dense"]["bytes"] == row["target_bytes"]
