"""Temporary folders of processes that are killed: the next process deletes them, and those of live processes stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
sys.modules["torch"] = None
from tpde._core.scratch import scratch
import tempfile
folder = tempfile.TemporaryDirectory(dir=scratch())
open(folder.name + "/file", "w").write("x")
assert scratch() == scratch()
print(scratch(), flush=True)
sys.stdin.read()
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.skipif(sys.platform != "linux", reason="the locks are those of Linux")
def test_folders_of_killed_processes_are_deleted_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "tpde-of-another").symlink_to("/")
    (killed, of_killed), (live, of_live) = start(tmp_path), start(tmp_path)
    killed.kill()
    killed.communicate()
    assert of_killed.exists() and of_live.exists()
    last, of_last = start(tmp_path)
    assert not of_killed.exists() and of_live.exists() and of_last.exists()
    for process in (live, last):
        process.communicate("")
        assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tpde-of-another"]
