#!/usr/bin/env python3
"""Generates with a Llama 3.1 8B at batch 1 in 12 or 8 GiB of device memory, and switches between fine-tunes of one base.

    python bench/llama_8b.py [--only NAME,...] [--seconds 500] [--tokens 16] [--tunes 8] [--folder FOLDER] [--out FILE]
    python bench/llama_8b.py --list
    python bench/llama_8b.py --small --device cpu        # the same steps on the CPU, to try the script

The model class is that of transformers. Weights are random (normal, 0.02, one seed per weight), and nothing is downloaded. Each
step runs in its own process (`llama_steps.py`): it leaves nothing on the device, and other steps run even if it fails or takes
too long. This process does not use the device.

FOLDER has the results that steps share: the compressed layers, and a digest of the logits of the model without a memory limit.
The logits of every contender are compared with that digest, bit for bit. A folder that is passed is kept, and later runs reuse
its results. After each step, a line of JSON is appended to FILE.

A budget covers the whole device, with context and libraries: PyTorch's allocator is capped, and `mem_get_info` is checked. For
every contender, embedding, head and norms are dense and resident. A contender fills the rest of its budget with resident layers,
spread evenly, and streams the others from pinned memory:

- dense: a layer is resident, or is copied to one of two slots while earlier layers compute;
- tpde: layers are compressed without a base, on the device or in pinned memory, and rebuilt just in time. If all compressed
  layers fit, the rest of the budget holds dense layers. Measured kernel by kernel, and with `attach(..., graph=True)`;
- accelerate: `dispatch_model`, with the layers that do not fit on the CPU, for reference;
- dfloat11: decoder layers compressed by that package, if it is installed. It offloads the layers that do not fit.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Steps in the order in which they run, with what they need.
STEPS: dict[str, tuple[str, ...]] = {
    "reference": (),
    "anchor": (),
    "12-dense": ("reference",),
    "12-tpde": ("reference", "anchor"),
    "8-dense": ("reference",),
    "8-tpde": ("reference", "anchor"),
    "swap-1": (),
    "swap-40": (),
    "12-tpde-graph": ("reference", "anchor"),
    "8-tpde-graph": ("reference", "anchor"),
    "12-accelerate": ("reference",),
    "8-accelerate": ("reference",),
    "dfloat11": (),
    "12-dfloat11": ("reference", "dfloat11"),
    "8-dfloat11": ("reference", "dfloat11"),
}
#: Steps whose results other steps need. They run when a selected step needs them.
PREPARE = {"reference", "anchor", "dfloat11"}
#: Required speed of tpde relative to dense with prefetch, by budget in GiB.
WANTED = {"12": 3.0, "8": 1.7}
#: Free space, in bytes, that the folder of the large model needs.
ROOM = 48 << 30


def selected(only: str) -> list[str]:
    """The steps with these names. A name that is no step stands for all steps that begin with it."""
    names = only.split(",")
    for name in names:
        if not any(step == name or step.startswith(f"{name}-") for step in STEPS):
            raise SystemExit(f"no step {name!r}: see --list")
    wanted = {step for step in STEPS if any(step == name or (name not in STEPS and step.startswith(f"{name}-")) for name in names)}
    return [step for step in STEPS if step in wanted]


def temporary_folder(is_small: bool) -> Path:
    """A temporary folder: in memory if it has enough space."""
    memory = Path("/dev/shm")
    fits = is_small or (memory.is_dir() and shutil.disk_usage(memory).free > ROOM)
    return Path(tempfile.mkdtemp(prefix="llama-8b-", dir=memory if fits and memory.is_dir() else None))


class Driver:
    def __init__(self, how: argparse.Namespace, folder: Path) -> None:
        self.how, self.folder, self.begin = how, folder, time.monotonic()
        self.results: dict[str, dict[str, Any]] = {}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def left(self) -> float:
        """Remaining time in seconds."""
        return float(self.how.seconds - (time.monotonic() - self.begin))

    def settings(self) -> dict[str, Any]:
        """Settings that must be equal for steps whose results are used together."""
        return {"config": "small" if self.how.small else "8b", "device": self.how.device, "tokens": self.how.tokens}

    def is_there(self, name: str) -> bool:
        """Whether an earlier run has left the result of this step."""
        try:
            found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        except (OSError, ValueError):
            return False
        return found.get("ok") is True and found.get("settings") == self.settings()

    def run(self, name: str) -> None:
        """Runs a step, after the steps that it needs."""
        for needed in STEPS[name]:
            if needed not in self.results and not self.is_there(needed):
                self.run(needed)
            if needed in self.results and not self.results[needed]["ok"]:
                self.tell(name, {"ok": None, "why": f"left out, as it needs the step {needed}"})
                return
        if name in self.results:
            return
        if self.left() < 15:
            self.tell(name, {"ok": None, "why": "left out, no time"})
            return
        self.say(f"{name} …")
        begin, file = time.monotonic(), self.folder / f"{name}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("llama_steps.py")), name, "--folder", str(self.folder)]
        for option in ("device", "tokens", "tunes"):
            command += [f"--{option}", str(getattr(self.how, option))]
        command += ["--settings", json.dumps(self.settings()), "--seconds", f"{self.left():.0f}"]
        try:
            code = subprocess.run(command, timeout=self.left(), stdin=subprocess.DEVNULL).returncode
            why = f"the process ended with {code}"
        except subprocess.TimeoutExpired:
            why = "not done in time"
        try:
            result: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError):
            result = {"ok": False, "why": why}
        self.tell(name, {**result, "seconds": round(time.monotonic() - begin, 1)})

    def tell(self, name: str, result: dict[str, Any]) -> None:
        self.results[name] = result
        outcome = {True: "", False: "FAILED: ", None: "NOT MEASURED: "}[result["ok"]]
        self.say(f"{name}: {outcome}{result.get('say') or result.get('why')}")
        if self.how.out:
            with self.how.out.open("a") as out:
                out.write(json.dumps({"step": name, **result}) + "\n")

    def compare(self) -> None:
        """What was measured beside each other."""
        for budget, wanted in WANTED.items():
            speed = {name: r["tokens_per_s"] for name, r in self.results.items() if r["ok"] and "tokens_per_s" in r}
            ours = max((s for name, s in speed.items() if name.startswith(f"{budget}-tpde")), default=None)
            others = {name: s for name, s in speed.items() if name.startswith(f"{budget}-") and "tpde" not in name}
            for name, other in others.items() if ours else ():
                more = f" ({wanted} wanted)" if name.endswith("dense") else ""
                self.say(f"{budget} GiB: tpde is {ours / other:.2f} times as fast as {name.partition('-')[2]}{more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="say which steps there are")
    parser.add_argument("--only", help="these steps and what they need; '12' stands for all that begin with '12-'")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--tunes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=500, help="what is not done after this is given up")
    parser.add_argument("--folder", type=Path, help="keep there what steps prepare")
    parser.add_argument("--out", type=Path, help="append results to this file")
    how = parser.parse_args()
    if how.list:
        print("\n".join(f"{name:14} needs {', '.join(needs)}" if needs else name for name, needs in STEPS.items()))
        return
    names = selected(how.only) if how.only else [name for name in STEPS if name not in PREPARE]
    folder = how.folder or temporary_folder(how.small)
    folder.mkdir(parents=True, exist_ok=True)
    driver = Driver(how, folder)
    try:
        for name in names:
            driver.run(name)
        driver.compare()
    finally:
        if not how.folder:
            shutil.rmtree(folder, ignore_errors=True)
    failed = [name for name, result in driver.results.items() if result["ok"] is False]
    if failed:
        driver.say(f"failed: {', '.join(failed)}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # steps say what they do as they do it
    main()
