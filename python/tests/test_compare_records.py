"""`scripts/compare-records`: what it names as a regression, and its exit code."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT, RECORD = ROOT / "scripts" / "compare-records", ROOT / "benches" / "record" / "nvidia-h200.json"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the repository")


def compare(folder: Path, change: Callable[[dict[str, Any]], None], *options: str) -> tuple[int, list[str]]:
    """Compares a record with a changed copy. Returns the exit code and the printed lines."""
    record = copy.deepcopy(json.loads(RECORD.read_text()))
    change(record)
    (folder / "new.json").write_text(json.dumps(record))
    command = [sys.executable, str(SCRIPT), str(RECORD), str(folder / "new.json"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_equal_records_have_no_regression(tmp_path: Path) -> None:
    assert compare(tmp_path, lambda record: None) == (0, ["0 regressions"])


def test_a_slower_row_is_a_regression_beyond_the_tolerance(tmp_path: Path) -> None:
    def slower(record: dict[str, Any]) -> None:
        rows = record["rl20"]["pairs"][0]["rows"]
        row = next(row for row in rows if row["what"] == "out of place" and row["from"] == "device memory")
        row["seconds"] *= 1.05

    code, lines = compare(tmp_path, slower)
    assert code == 1 and len(lines) == 2 and lines[1] == "1 regression"
    assert lines[0].startswith("WORSE    rl20, conditioned, out of place, device memory, device: ") and "(+5.0 %)" in lines[0]
    code, lines = compare(tmp_path, slower, "--tolerance", "6")
    assert (code, lines) == (0, ["0 regressions"])


def test_a_faster_row_is_named_and_is_no_regression(tmp_path: Path) -> None:
    def faster(record: dict[str, Any]) -> None:
        record["nvcomp_sft"]["rows"][0]["seconds"] /= 2

    code, lines = compare(tmp_path, faster)
    assert code == 0 and lines[0].startswith("better   nvcomp_sft, ") and "(-50.0 %)" in lines[0]


def test_a_lower_ratio_is_a_regression(tmp_path: Path) -> None:
    def lower(record: dict[str, Any]) -> None:
        record["sft"]["pairs"][0]["ratio"] *= 0.999

    code, lines = compare(tmp_path, lower)
    assert code == 1 and lines[0].startswith("WORSE    sft, conditioned: ratio ")


def test_a_row_that_is_gone_is_a_regression_with_its_reason(tmp_path: Path) -> None:
    def without(record: dict[str, Any]) -> None:
        del record["layer"]
        record["not_measured"] = {"layers": "no PyTorch"}

    code, lines = compare(tmp_path, without)
    assert code == 1 and any(line.startswith("MISSING  layer, conditioned: ratio") for line in lines)
    assert "not measured: layers: no PyTorch" in lines


def test_another_machine_is_warned_about(tmp_path: Path) -> None:
    def elsewhere(record: dict[str, Any]) -> None:
        record["machine"]["device"] = "NVIDIA H100"

    assert compare(tmp_path, elsewhere) == (0, ["warning: device was NVIDIA H200, is NVIDIA H100", "0 regressions"])


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    for text in ("{", "{}"):
        (tmp_path / "none.json").write_text(text)
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(RECORD), str(tmp_path / "none.json")], capture_output=True, timeout=60
        )
        assert done.returncode == 1 and b"none.json" in done.stderr
