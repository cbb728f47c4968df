"""Groups and sharded sources in processes, over gloo."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tpde

torch = pytest.importorskip("torch")

from gloo_rank import COLUMNS, ROWS, fsdp_weights  # noqa: E402 (needs torch)

import tpde.slices  # noqa: E402
import tpde.sync  # noqa: E402


def started(what: str, ranks: int, folder: Path, *how: Any) -> list[subprocess.Popen[str]]:
    script = Path(__file__).with_name("gloo_rank.py")
    return [
        subprocess.Popen(
            [sys.executable, str(script), what, str(rank), str(ranks), str(folder), *map(str, how)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        found = [(one.communicate(timeout=120), one.returncode) for one in processes]
    finally:
        for one in processes:
            one.kill()
    return [(code, out.strip() if code in (0, -signal.SIGKILL) else err) for (out, err), code in found]


def test_processes_follow(tmp_path: Path) -> None:
    assert ended(started("sync", 3, tmp_path, -1, -1)) == [(0, "published 3"), (0, "follows 3"), (0, "follows 3")]


@pytest.mark.parametrize("rank, at", [(0, 15), (1, 13)])
def test_processes_that_are_killed(rank: int, at: int, tmp_path: Path) -> None:
    found = ended(started("sync", 3, tmp_path, rank, at))
    assert found[rank][0] == -signal.SIGKILL
    for other, one in enumerate(found):
        assert other == rank or one == (0, "disconnected"), one
    # Started again, the publisher continues from its folder. Engines have loaded version 0 again.
    (tmp_path / "store").unlink()
    last = tpde.sync.Folder(tmp_path / "rank0").versions()[-1]
    assert last in (0, 1)
    for engine in (1, 2):
        subprocess.run(["rm", "-r", str(tmp_path / f"rank{engine}")], check=True)
    found = ended(started("sync", 3, tmp_path, -1, -1))
    assert found == [(0, f"published {last + 3}"), *[(0, f"follows {last + 3}")] * 2]


@pytest.mark.parametrize("what", ["fsdp", "tp"])
def test_ranks_of_the_trainer_encode_their_shards(what: str, tmp_path: Path) -> None:
    processes = started(what, 2, tmp_path)
    while not (tmp_path / "ready").exists():
        assert all(one.poll() is None for one in processes), ended(processes)
        time.sleep(0.05)
    weights = {version: {name: one.bfloat16() for name, one in fsdp_weights(version).items()} for version in range(3)}
    # Receivers cut elsewhere than the trainer's ranks: thirds of rows, and columns.
    models, subscribers = [], []
    for rank in range(3):
        rows, columns = slice(100 * rank, 100 * (rank + 1)), slice(100 * rank, 100 * (rank + 1))
        live = {
            "fused": torch.zeros(100, COLUMNS, dtype=torch.bfloat16),
            "down": torch.zeros(COLUMNS, 100, dtype=torch.bfloat16),
            "bias": torch.zeros(ROWS + COLUMNS, dtype=torch.bfloat16),
        }

        def load(tensors: Any, live: Any = live, rows: slice = rows, columns: slice = columns) -> None:
            for name, one in tensors:
                if name == "up.weight":
                    live["fused"].copy_(one[rows])
                elif name == "down.weight":
                    live["down"].copy_(one[:, columns])
                else:
                    live["bias"][:ROWS].copy_(one) if name == "up.bias" else live["bias"][ROWS:].copy_(one)

        load(weights[0].items())
        found = tpde.slices.record(load, weights[0], live)
        found.check()
        models.append((live, load))
        subscribers.append(tpde.sync.Subscriber(found, tpde.sync.Folder(tmp_path / "channel"), f"rank{rank}", version=0))
    (tmp_path / "joined").touch()
    while any(one.version < 2 for one in subscribers):
        for subscriber in subscribers:
            subscriber.update()
        assert all(one.poll() in (None, 0) for one in processes), ended(processes)
    assert ended(processes) == [(0, "published 2")] * 2
    for live, load in models:
        before = {name: one.view(torch.int16).clone() for name, one in live.items()}
        load(weights[2].items())
        assert all(torch.equal(one, live[name].view(torch.int16)) for name, one in before.items())


def test_shards_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    assert ended(started("refused", 2, tmp_path)) == [(0, "refused 1")] * 2
