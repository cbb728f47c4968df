"""Tests that need a CUDA device, run on the stand-in for its driver: the Rust half is tested without a device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "kernels" / "emulator" / "build"


@pytest.mark.skipif(not BUILD.exists(), reason="SKIPPED: the sources of the kernels are not here")
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="SKIPPED: needs g++, or the compiler that CXX names")
@pytest.mark.parametrize(
    "name, least, order",
    [
        ("test_cuda_slices.py", 20, "early"),
        ("test_cuda_paths.py", 20, "early"),
        ("test_cuda_paths.py", 20, "late"),
        ("test_cuda_encode.py", 14, "early"),
        ("test_cuda_sync.py", 16, "early"),
        ("test_cuda_sync.py", 16, "late"),
    ],
)
def test_slices_on_the_stand_in(name: str, least: int, order: str) -> None:
    pytest.importorskip("torch")
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "emulator"
    subprocess.run([BUILD, folder, "driver"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "driver"), "TPDE_STAND_IN": order}
    environment.pop("TPDE_GPU", None)
    tests = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tests.parent), str(tests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(done.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed >= least, done.stdout
