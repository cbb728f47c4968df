"""Runs the large-GPU bench with a tiny model on the CPU: its steps run, and a failing step does not affect the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent.parent / "bench" / "llama_8b.py"


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Runs the bench. Returns its exit code, the results by step, and its output."""
    out = folder / "out.jsonl"
    out.unlink(missing_ok=True)
    how = ["--small", "--device", "cpu", "--tokens", "2", "--tunes", "2", "--folder", str(folder), "--out", str(out), *arguments]
    done = subprocess.run([sys.executable, str(SCRIPT), *how], stdout=subprocess.PIPE, text=True, timeout=600)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return done.returncode, {line["step"]: line for line in lines}, done.stdout


def test_steps(tmp_path: Path) -> None:
    code, results, printed = run(tmp_path, "--only", "8-dense,8-tpde,swap-40")
    assert code == 0, printed
    assert list(results) == ["reference", "8-dense", "anchor", "8-tpde", "swap-40"]  # prerequisites run first
    for name in ("8-dense", "8-tpde"):
        assert results[name]["ok"] and results[name]["logits_equal"] and results[name]["tokens_per_s"] > 0
        assert results[name]["digest"] == results[name]["reference_digest"]
    assert results["swap-40"]["ok"] and results["swap-40"]["tunes"] == 2
    assert "as fast as dense (1.7 wanted)" in printed

    # Prepared files are used. A failing step is reported, and the others are still measured.
    blob = bytearray((tmp_path / "anchor.tpde-blob").read_bytes())
    blob[len(blob) // 2] ^= 1
    (tmp_path / "anchor.tpde-blob").write_bytes(blob)
    code, results, printed = run(tmp_path, "--only", "8-tpde,12-dfloat11")
    assert code == 1
    assert list(results) == ["8-tpde", "dfloat11", "12-dfloat11"]
    assert results["8-tpde"]["ok"] is False and "Invalid" in results["8-tpde"]["why"]
    assert results["dfloat11"]["ok"] is None and results["12-dfloat11"]["ok"] is None  # needs a GPU
    assert "failed: 8-tpde" in printed


def test_time_that_is_over(tmp_path: Path) -> None:
    code, results, printed = run(tmp_path, "--only", "anchor", "--seconds", "1")
    assert code == 0 and results["anchor"]["ok"] is None and "NOT MEASURED: left out, no time" in printed


def test_names() -> None:
    listed = subprocess.run([sys.executable, str(SCRIPT), "--list"], check=True, capture_output=True, text=True).stdout
    assert [line.split()[0] for line in listed.splitlines()][:4] == ["reference", "anchor", "12-dense", "12-tpde"]
    wrong = subprocess.run([sys.executable, str(SCRIPT), "--only", "13"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "no step '13'" in wrong.stderr
