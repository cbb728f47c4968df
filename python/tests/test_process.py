"""Threads, signals and forks: the effects of a long call on its process, and of the process on a long call."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import gc
import json
import logging
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tpde
from conftest import Made

#: Number of elements that take a considerable part of a second to encode.
LARGE = 32 << 20
#: Factors for retries with larger arrays, if the work ends before the calling thread has checked for signals.
TIMES = (1, 1, 1, 2, 4)
#: Timeout in seconds. Long, because the machine may be busy.
LONG = 600


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter, which must end in time."""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=LONG, env=env, capture_output=True, text=True)


def test_importing_takes_nothing_along() -> None:
    python(
        """
import sys, tpde
assert not {"torch", "numpy", "ml_dtypes", "tqdm", "safetensors"} & set(sys.modules)
loaded = open("/proc/self/maps").read()
assert "libcuda" not in loaded and "libtorch" not in loaded
""",
        CUDA_VISIBLE_DEVICES="",
    )


def test_the_wheel_needs_no_library_that_a_system_lacks() -> None:
    module = Path(tpde._tpde.__file__)
    found = subprocess.run(["ldd", module], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].rsplit("/", 1)[-1].split(".so")[0] for line in found.splitlines()}
    assert names <= {
        "linux-vdso",
        "libc",
        "libgcc_s",
        "libm",
        "libpthread",
        "libdl",
        "librt",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }


def test_other_threads_run_meanwhile(tmp_path: Path) -> None:
    base, target = large()
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    tpde.numpy.save_file(target, tmp_path / "p", base=base)
    meanwhile = ticks - before
    stop.set()
    thread.join()
    assert meanwhile >= 10  # load varies; with the lock held it would be 1 or 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Installs Python's handler for Ctrl-C. A shell that starts the tests in the background makes them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def large(times: int = 1) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    base = np.random.default_rng(1).standard_normal(times * LARGE, dtype=np.float32)
    return {"w": base}, {"w": base * np.float32(1.001)}


def is_writing(folder: Path) -> bool:
    """Whether this process has an open file in the folder. A file has no name there until it is published."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/"):
                return True
    return False


@pytest.mark.usefixtures("interruptible")
def test_a_keyboard_interrupt_ends_encoding_and_leaves_no_file(tmp_path: Path) -> None:
    def interrupt(folder: Path) -> None:
        while not (list(folder.iterdir()) or is_writing(folder)):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    for attempt, times in enumerate(TIMES):
        base, target = large(times)
        folder = tmp_path / str(attempt)
        folder.mkdir()
        thread = threading.Thread(target=interrupt, args=(folder,))
        thread.start()
        is_done = False
        with pytest.raises(KeyboardInterrupt):
            tpde.numpy.save_file(target, folder / "p", base=base)
            is_done = True  # before the other thread ran
            thread.join()
        thread.join()
        if is_done:
            continue
        left = list(folder.iterdir())
        if len(left) == 2:  # the signal came after both files had their names
            tpde.verify(folder / "p")
            continue
        assert not left
        tpde.numpy.save_file(target, folder / "p", base=base)  # a later call succeeds
        return
    pytest.fail("the work was always done first")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A lock on the folder, as held by another process that publishes there."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


class OnWarning(logging.Handler):
    """Calls a function at the first warning of the package."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(logging.WARNING)
        self.call = call
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == 1:
            self.call()

    def __enter__(self) -> OnWarning:
        logging.getLogger("tpde").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("tpde").removeHandler(self)


def mixed(folder: Path) -> Path:
    """The index of one pair beside the blob of another, as between the two renames of a publication."""
    for name, value in (("a", 1), ("b", 2)):
        tpde.numpy.save_file({"w": np.full(9, value, np.int32)}, folder / name)
    os.replace(folder / "b.tpde-blob", folder / "a.tpde-blob")
    os.remove(folder / "b.tpde-index")
    return folder / "a"


def test_waiting_for_a_lock_is_logged(tmp_path: Path) -> None:
    arrays = {"w": np.arange(9, dtype=np.int32)}
    lock = contextlib.ExitStack()
    with lock, OnWarning(lock.close) as warned:
        lock.enter_context(locked(tmp_path))
        tpde.numpy.save_file(arrays, tmp_path / "p")
    assert len(warned.messages) == 1
    assert f"{tmp_path} is locked by another process" in warned.messages[0]
    assert np.array_equal(tpde.numpy.load_file(tmp_path / "p")["w"], arrays["w"])


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("call", ["save_file", "encode", "apply", "verify", "inspect", "safe_open"])
def test_waiting_for_a_lock_ends_on_a_keyboard_interrupt(call: str, made: Made, tmp_path: Path) -> None:
    pair = mixed(tmp_path)
    out = tmp_path / "out"
    before = sorted(tmp_path.iterdir())
    calls: dict[str, Callable[[], object]] = {
        "save_file": lambda: tpde.numpy.save_file({"w": np.arange(9)}, out),
        "encode": lambda: tpde.encode(made.target, out, base=made.base),
        "apply": lambda: tpde.apply(made.pair, out, base=made.base),
        "verify": lambda: tpde.verify(pair),
        "inspect": lambda: tpde.inspect(pair),
        "safe_open": lambda: tpde.safe_open(pair, framework="np"),
    }
    with locked(tmp_path), OnWarning(lambda: os.kill(os.getpid(), signal.SIGINT)) as warned:
        with pytest.raises(KeyboardInterrupt) as caught:
            calls[call]()
    assert len(warned.messages) == 1
    assert caught.value.__cause__ is None  # interrupted, not timed out
    assert sorted(tmp_path.iterdir()) == before


#: A program that sends itself SIGTERM while it has an open file in the folder.
TERMINATED = """
import contextlib, os, signal, sys, threading, time
import numpy as np, tpde
folder, handler, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
if handler == "exit":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

def is_writing():
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith(f"{folder}/"):
                return True
    return False

def end():
    while not is_writing():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

base = np.random.default_rng(1).standard_normal(times << 20, dtype=np.float32)
threading.Thread(target=end, daemon=True).start()
tpde.numpy.save_file({"w": base * np.float32(1.001)}, f"{folder}/p", base={"w": base})
"""


def terminated(folder: Path, handler: str, before: tuple[str, ...] = ()) -> int | None:
    """Exit code of a process that got SIGTERM while it wrote to the folder; ``None`` if it always finished first."""
    for times in TIMES:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        run = [*before, sys.executable, "-c", TERMINATED, str(folder), handler, str(32 * times)]
        code = subprocess.run(run, timeout=LONG, check=False).returncode
        if not (folder / "p.tpde-index").exists():
            return code
    return None


def has_unnamed_files(folder: Path) -> bool:
    """Whether the file system supports files without names."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR))
    except OSError:
        return False
    return True


def test_sigterm_leaves_no_file_where_files_need_no_names(tmp_path: Path) -> None:
    if not has_unnamed_files(tmp_path):
        pytest.skip("the file system lacks O_TMPFILE")
    folder = tmp_path / "folder"
    assert terminated(folder, "default") == -signal.SIGTERM
    assert not list(folder.iterdir())


@pytest.mark.parametrize("handler", ["default", "exit"])
def test_sigterm_on_file_systems_without_unnamed_files(handler: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    # Makes the two unnamed files of the pair fail. The folder is opened afterwards by the other call.
    opens = "open" if platform.machine() == "x86_64" else "openat"
    fault = ("-P", str(folder), "-e", f"trace={opens}", "-e", f"inject={opens}:error=EOPNOTSUPP:when=1..2")
    strace = ("strace", "-f", "-qq", "-o", str(tmp_path / "log"), *fault)
    if shutil.which("strace") is None or subprocess.run([*strace, "true"], capture_output=True, check=False).returncode:
        assert os.environ.get("TPDE_NO_SKIP") != "1", "strace is missing or not permitted"
        pytest.skip("strace is missing or not permitted")
    code = terminated(folder, handler, strace)
    left = [path.name for path in folder.iterdir()]
    # The signal may come before the second file is opened.
    assert (tmp_path / "log").read_text().count("O_TMPFILE") in (1, 2)
    if handler == "exit":
        assert code == 143 and not left
    else:
        # Python ends at once. The remaining files are documented as removable.
        assert code == -signal.SIGTERM
        assert left and all(name.startswith(".tpde-") and name.endswith(".tmp") for name in left)


def test_a_target_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    for times in TIMES:
        size = 4 * times * LARGE
        header = json.dumps({"w": {"dtype": "F32", "shape": [times * LARGE], "data_offsets": [0, size]}}).encode()
        target = tmp_path / "target.safetensors"
        with open(target, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            large(times)[0]["w"].tofile(file)
        changed = []

        def change(done: int, total: int) -> None:
            if 0 < done < total and not changed:
                changed.append(done)
                with open(target, "r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"\x55")

        try:
            tpde.encode(target, tmp_path / "p", progress=change, replace=True)
        except tpde.SystemRefused as error:
            assert error.code == "changed"
            assert changed and "target.safetensors" in error.what
            assert not list(tmp_path.glob("p*")) and not list(tmp_path.glob(".*"))
            return
        assert not changed  # the work ended before the calling thread checked for signals
    pytest.fail("the work was always done first")


class Interrupt:
    """A progress callback that interrupts once some bytes are done, as Ctrl-C would."""

    def __call__(self, done: int, total: int) -> None:
        if 0 < done < total:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("mode", ["all_checked", "chunk_by_chunk"])
def test_a_keyboard_interrupt_leaves_weights_as_documented(mode: str, tmp_path: Path) -> None:
    for times in TIMES:
        base, target = large(times)
        tpde.numpy.save_file(target, tmp_path / "p", base=base, codec="raw", replace=True)
        before = base["w"].copy()
        try:
            tpde.numpy.apply_(base, tmp_path / "p", mode=mode, progress=Interrupt())
        except KeyboardInterrupt as error:
            caught = error
            break
    else:
        pytest.fail("the work was always done first")
    if np.array_equal(base["w"], target["w"]):
        # The last chunk was begun before the calling thread checked for signals.
        assert tpde.numpy.apply_(base, tmp_path / "p", mode=mode) == "already_applied"
    elif np.array_equal(base["w"], before):
        assert tpde.numpy.apply_(base, tmp_path / "p", mode=mode) == "applied"
    else:
        assert mode == "chunk_by_chunk"
        changed = base["w"] != before
        assert np.array_equal(base["w"][changed], target["w"][changed])
        assert isinstance(caught.__cause__, tpde.Poisoned) and caught.__cause__.written
        with pytest.raises(tpde.TpdeError):
            tpde.numpy.apply_(base, tmp_path / "p", mode=mode)


def test_what_raises_frees_its_memory(tmp_path: Path, made: Made) -> None:
    base, target = large()
    tpde.numpy.save_file(target, tmp_path / "p", base=base, codec="raw")
    base["w"][0] = 7

    def size() -> int:
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) >> 10

    def fail() -> None:
        with pytest.raises(tpde.WrongBase):
            tpde.numpy.load_file(tmp_path / "p", base=base)

    fail()
    before = size()
    for _ in range(4):
        fail()
    assert size() < before + 64, "MiB"
    gc.collect()  # the caught exception refers to the frames that it passed
    references = sys.getrefcount(base["w"])
    fail()
    gc.collect()
    more = sys.getrefcount(base["w"]) - references
    assert more == 0


def rebuild(pair: str, base: str) -> int:
    """Runs in another process."""
    signal.alarm(LONG)  # a child without threads of its own would wait forever
    return sum(len(array.tobytes()) for array in tpde.numpy.load_file(pair, base=base).values())


def fail(pair: str) -> None:
    """Runs in another process."""
    signal.alarm(LONG)
    tpde.verify(pair)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes(method: str, made: Made) -> None:
    tpde.numpy.load_file(made.pair, base=made.base)  # starts the parent's threads
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        results = list(pool.map(rebuild, [str(made.pair)] * 4, [str(made.base)] * 4, timeout=LONG))
        with pytest.raises(tpde.Invalid) as caught:
            pool.submit(fail, str(made.damaged("embed.weight"))).result(timeout=LONG)
    assert set(results) == {sum(map(len, made.target_bytes.values()))}
    assert caught.value.rule == "payload.crc32" and caught.value.tensor == "embed.weight"


def test_a_fork_while_another_thread_works(made: Made, tmp_path: Path) -> None:
    python(
        f"""
import os, signal, threading, numpy as np, tpde
base = np.random.default_rng(1).standard_normal(8 << 20, dtype=np.float32)
work = threading.Thread(target=tpde.numpy.save_file, args=({{"w": base * 2}}, {str(tmp_path / "p")!r}), kwargs={{"base": {{"w": base}}}})
work.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm({LONG})
        tpde.verify({str(made.pair)!r}, base={str(made.base)!r})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
work.join()
tpde.verify({str(tmp_path / "p")!r})
"""
    )


def test_an_open_pair_survives_a_fork(made: Made) -> None:
    with tpde.safe_open(made.pair, base=made.base, framework="np") as target:
        target.get_tensor("scalar")
        child = os.fork()
        if child == 0:
            status = 1
            signal.alarm(LONG)  # a child without threads of its own would wait forever
            try:
                status = 0 if target.get_tensor("embed.weight").tobytes() == made.target_bytes["embed.weight"] else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert target.get_tensor("embed.weight").tobytes() == made.target_bytes["embed.weight"]


def test_many_threads_at_once(made: Made) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with tpde.safe_open(made.pair, base=made.base, framework="np") as target:
            names = target.keys() * 8
            for name, array in zip(names, pool.map(target.get_tensor, names)):
                assert array.tobytes() == made.target_bytes[name]
