"""Temporary folders of processes that are killed: the next process deletes them, and those of live processes stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tpde
from tpde._core.scratch import TemporaryFolder

CODE = """
import sys
sys.modules["torch"] = None
from tpde._core.scratch import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "file").write_text("x")
cycle = [folder]
cycle.append(cycle)
del folder
print(cycle[0].path, flush=True)
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
    (tmp_path / ".tpde-another.dir").symlink_to("/")
    (killed, of_killed), (live, of_live) = start(tmp_path), start(tmp_path)
    killed.kill()
    killed.communicate()
    assert of_killed.exists() and of_live.exists()
    last, of_last = start(tmp_path)
    assert not of_killed.exists() and of_live.exists() and of_last.exists()
    for process in (live, last):
        process.communicate("")
        assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [".tpde-another.dir"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="SKIPPED: this system has no fork")
def test_a_fork_leaves_the_folders_of_its_parent(tmp_path: Path) -> None:
    with TemporaryFolder(tmp_path) as folder:
        code = f"import os, sys, weakref; from tpde._core.scratch import TemporaryFolder as T; one = T({str(tmp_path)!r})\n"
        code += (
            "if child := os.fork():\n    os.waitpid(child, 0); assert one.path.exists(); one.close(); assert not one.path.exists()"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        assert folder.exists() and len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(tpde.SystemRefused, match="temporary folder"):
        TemporaryFolder(tmp_path / "missing")
