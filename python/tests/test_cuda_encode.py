"""Encoding and folding on a CUDA device, or on the stand-in for its driver (see `stand_in`, `test_stand_in`)."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpde
from raised import raises
from test_cuda_slices import Chain, chain, moved, pytestmark, shards, torch  # noqa: F401 (a fixture, and the mark of the module)
from test_slices import RANKS, SPLIT, Cut, cut  # noqa: F401 (a fixture)

import tpde.numpy
import tpde.torch
from stand_in import DEVICE, IS_USED, driver, is_busy, spin


def same_pairs(one: Path, other: Path) -> bool:
    """Whether two pairs have the same bytes."""
    return all(Path(f"{one}{end}").read_bytes() == Path(f"{other}{end}").read_bytes() for end in (".tpde-index", ".tpde-blob"))


class TestEncode:
    def test_the_pair_is_that_of_the_cpu(self, cut: Cut, tmp_path: Path) -> None:  # noqa: F811
        base, target = moved(cut.base), moved(cut.target)
        for number, how in enumerate(
            ({}, {"favor": "speed", "payload_digests": True}, {"split": SPLIT}, {"codec": "raw"}, {"codec": "device"})
        ):
            ours, cpu = tmp_path / f"device-{number}", tmp_path / f"cpu-{number}"
            done: list[tuple[int, int]] = []
            progress = lambda at, total: done.append((at, total))  # noqa: B023, E731
            report = tpde.torch.save_file(target, ours, base=base, chunk_lanes=4096, progress=progress, **how)
            expected = tpde.numpy.save_file(cut.target, cpu, base=cut.base, chunk_lanes=4096, **{"codec": "conditioned", **how})
            assert same_pairs(ours, cpu) and report.tensors == expected.tensors
            assert done[-1] == (sum(array.nbytes for array in cut.target.values()),) * 2
        tpde.torch.save_file(target, tmp_path / "device")
        tpde.numpy.save_file(cut.target, tmp_path / "cpu", codec="conditioned")
        assert same_pairs(tmp_path / "device", tmp_path / "cpu")

    def test_bases_of_another_dtype(self, tmp_path: Path) -> None:
        lanes = np.random.default_rng(1).integers(0, 1 << 32, (96, 70), dtype=np.uint32)
        base = {"cast": lanes.view(np.float32)}
        target = {"cast": (lanes >> 16).astype(np.uint16).view(np.float16)}
        for encode in (tpde.torch.save_file, tpde.torch.Encoder(DEVICE).save_file):
            report = encode(moved(target), tmp_path / "device", base=moved(base), replace=True)  # type: ignore[operator]
            tpde.numpy.save_file(target, tmp_path / "cpu", base=base, codec="conditioned", replace=True)
            assert same_pairs(tmp_path / "device", tmp_path / "cpu")
            assert [tensor.base_kind for tensor in report.tensors] == ["cast"]
            encode(moved(target), tmp_path / "device", base=moved(base), derived=False, replace=True)  # type: ignore[operator]
            tpde.numpy.save_file(target, tmp_path / "cpu", base=base, codec="conditioned", derived=False, replace=True)
            assert same_pairs(tmp_path / "device", tmp_path / "cpu")

    def test_slices_of_a_rank(self, cut: Cut, tmp_path: Path) -> None:  # noqa: F811
        for rank in range(RANKS):
            (_, base), (_, target) = (shards(cut, rank, arrays) for arrays in (cut.base, cut.target))
            tpde.torch.save_file(iter(target), tmp_path / "device", base=iter(base), chunk_lanes=4096, replace=True)
            base, target = (cut.shards(rank, arrays)[1] for arrays in (cut.base, cut.target))
            how = {"chunk_lanes": 4096, "codec": "conditioned", "replace": True}
            tpde.numpy.save_file(iter(target), tmp_path / "cpu", base=iter(base), **how)  # type: ignore[arg-type]
            assert same_pairs(tmp_path / "device", tmp_path / "cpu")

    def test_an_encoder_takes_digests_from_the_pair_before(self, cut: Cut, tmp_path: Path) -> None:  # noqa: F811
        encoder = tpde.torch.Encoder(DEVICE)
        versions = [cut.base, cut.target, {name: array.copy() for name, array in cut.target.items()}]
        next(iter(versions[2].values())).reshape(-1).view(np.uint8)[::7] ^= 1
        on_device = [moved(arrays) for arrays in versions]
        encoder.save_file(on_device[0], tmp_path / "whole")
        names = ["whole", "first", "second"]
        for number in (1, 2):
            base, target = on_device[number - 1], on_device[number]
            before = tmp_path / names[number - 1]
            encoder.save_file(target, tmp_path / names[number], base=base, base_pair=before)
            tpde.numpy.save_file(versions[number], tmp_path / "cpu", base=versions[number - 1], codec="conditioned", replace=True)
            assert same_pairs(tmp_path / names[number], tmp_path / "cpu")
        # Digests of another version: readers refuse the base, and the tensors stay.
        encoder.save_file(on_device[2], tmp_path / "forged", base=on_device[1], base_pair=tmp_path / "whole")
        arrays = {name: array.copy() for name, array in versions[1].items()}
        with pytest.raises(tpde.WrongBase):
            tpde.numpy.load_file(tmp_path / "forged", base=arrays)

    def test_an_encoding_in_a_thread(self, cut: Cut, tmp_path: Path) -> None:  # noqa: F811
        encoder, base, target = tpde.torch.Encoder(DEVICE), moved(cut.base), moved(cut.target)
        stream = encoder._device.stream()
        encoding = encoder.start(target, tmp_path / "device", base=base, chunk_lanes=4096)
        # Later work of the stream is not waited for.
        spin(stream)
        report = encoding.wait()
        assert encoding.is_done() and (is_busy(stream) or not IS_USED)
        stream.synchronize() if driver is None else driver.finish(stream.cuda_stream)
        tpde.numpy.save_file(cut.target, tmp_path / "cpu", base=cut.base, codec="conditioned", chunk_lanes=4096)
        assert same_pairs(tmp_path / "device", tmp_path / "cpu")
        assert encoding.wait() is report and len(report.tensors) == len(target)

        # Errors are those of the handle, and leave what there is.
        with raises("already_exists", match="device"):
            encoder.start(target, tmp_path / "device", base=base).wait()
        with pytest.raises(tpde.InvalidArgument, match="zstd"):
            encoder.start(target, tmp_path / "refused", base=base, codec="zstd").wait()
        with pytest.raises(TypeError, match="codek"):
            encoder.start(target, tmp_path / "refused", base=base, codek="raw")

        # One that is cancelled or dropped is complete, or has written nothing.
        for name in ("cancelled", "dropped"):
            encoding = encoder.start(target, tmp_path / name, base=base, chunk_lanes=4096)
            encoding.cancel()
            if name == "cancelled":
                with contextlib.suppress(CancelledError):
                    encoding.wait()
            del encoding
            written = [path for path in tmp_path.iterdir() if path.name.startswith(name)]
            assert not written or same_pairs(tmp_path / name, tmp_path / "cpu")
        encoder.save_file(target, tmp_path / "device", base=base, chunk_lanes=4096, replace=True)
        assert same_pairs(tmp_path / "device", tmp_path / "cpu")

    @pytest.mark.parametrize("how", ["cancel", "drop", "with", "interrupt", "progress"])
    def test_an_encoding_is_ended(self, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        encoder, begun, ended = tpde.torch.Encoder(DEVICE), threading.Event(), threading.Event()

        def encode(tensors: Any, path: Any, *, base: Any = None, progress: Any = None) -> Any:
            try:
                for done in range(1000):
                    begun.set()
                    progress(done, 1000)
                    time.sleep(0.01)
            finally:
                ended.set()

        monkeypatch.setattr(encoder, "save_file", encode)
        fails = {"progress": lambda done, total: 1 / (done - 5)} if how == "progress" else {}
        encoding = encoder.start({}, tmp_path / "pair", **fails)
        assert begun.wait(10)
        if how == "progress":
            pytest.raises(ZeroDivisionError, encoding.wait)
        elif how == "cancel":
            assert not encoding.is_done()
            encoding.cancel()
            pytest.raises(CancelledError, encoding.wait)
        elif how == "drop":
            del encoding
        elif how == "with":
            with encoding:
                pass
        else:
            # A process that a shell runs in the background ignores the signal.
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            pytest.raises(KeyboardInterrupt, encoding.wait)
            signal.signal(signal.SIGINT, before)
            assert encoding.is_done()
        assert ended.is_set()

    def test_memory_that_pytorch_keeps_is_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        emptied: list[int] = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))

        def failing(times: int, reason: str) -> Any:
            left = [times]

            def work(number: int, *, step: int) -> int:
                left[0] -= 1
                if left[0] >= 0:
                    raise tpde.DeviceError("allocate memory: " + reason, action="allocate memory", reason=reason)
                return number + step

            return tpde.torch.Encoder(DEVICE)._device.with_room(work)

        full = "out of memory (CUDA_ERROR_OUT_OF_MEMORY)"
        assert failing(0, full)(1, step=2) == 3 and not emptied
        assert failing(1, full)(1, step=2) == 3 and len(emptied) == 1
        with raises("device", match="OUT_OF_MEMORY"):
            failing(2, full)(1, step=2)
        with raises("device", match="LAUNCH"):
            failing(1, "CUDA_ERROR_LAUNCH_FAILED")(1, step=2)
        assert len(emptied) == 2

    def test_what_a_device_does_not_encode(self, cut: Cut, tmp_path: Path) -> None:  # noqa: F811
        base, target = moved(cut.base), moved(cut.target)
        name = next(iter(target))
        tpde.numpy.save_file(cut.base, tmp_path / "base")
        refused: list[tuple[str, dict[str, Any], Any]] = [
            ("on that device", {"base": str(tmp_path / "base")}, target),
            ("conditioned", {"codec": "zstd"}, target),
            ("zstd", {"layout": "planes"}, target),
            ("on", {"base": {**base, name: torch.from_numpy(cut.base[name].copy())}}, target),
            ("on", {}, {**target, "last": torch.zeros(4)}),
            ("exists", {"base": base}, target),
        ]
        before = sorted(path.name for path in tmp_path.iterdir())
        for what, how, tensors in refused:
            path = tmp_path / ("base" if what == "exists" else "refused")
            with pytest.raises(tpde.TpdeError, match=what):
                tpde.torch.save_file(tensors, path, **how)
            assert sorted(path.name for path in tmp_path.iterdir()) == before


class TestFold:
    def test_a_device_folds_to_the_same_bytes(self, chain: Chain, tmp_path: Path) -> None:  # noqa: F811
        tpde.numpy.save_file(chain.versions[0], tmp_path / "first")
        base = tmp_path / "base.safetensors"
        tpde.apply(tmp_path / "first", base)
        done: list[tuple[int, int]] = []
        for codec, how in (("raw", {}), ("device", {"chunk_lanes": 8192})):
            progress = lambda at, total: done.append((at, total))  # noqa: E731
            on_device = tpde.fold(
                chain.pairs, tmp_path / f"device {codec}", base=base, codec=codec, device="cuda", progress=progress, **how
            )
            assert done[-1][0] == done[-1][1]
            on_cpu = tpde.fold(chain.pairs, tmp_path / f"cpu {codec}", base=base, codec=codec, device="cpu", **how)
            assert on_device.tensors == on_cpu.tensors
            for ending in ("tpde-index", "tpde-blob"):
                found, expected = (tmp_path / f"{where} {codec}.{ending}" for where in ("device", "cpu"))
                assert found.read_bytes() == expected.read_bytes()
        # The default codec is that of devices.
        tpde.fold(chain.pairs, tmp_path / "default", base=base, device="cuda:0", chunk_lanes=8192)
        assert (tmp_path / "default.tpde-blob").read_bytes() == (tmp_path / "cpu device.tpde-blob").read_bytes()

    def test_what_a_device_cannot_fold_is_refused(self, chain: Chain, tmp_path: Path) -> None:  # noqa: F811
        tpde.numpy.save_file(chain.versions[0], tmp_path / "first")
        base = tmp_path / "base.safetensors"
        tpde.apply(tmp_path / "first", base)
        with pytest.raises(tpde.InvalidArgument, match="expected codec device, conditioned or raw, found zstd"):
            tpde.fold(chain.pairs, tmp_path / "out", base=base, device="cuda", codec="zstd")
        with pytest.raises(tpde.InvalidArgument, match="expected device 'cpu', 'cuda' or 'cuda:N', found 'tpu'"):
            tpde.fold(chain.pairs, tmp_path / "out", base=base, device="tpu")
        with raises("no_device"):
            tpde.fold(chain.pairs, tmp_path / "out", base=base, device="cuda:99")
        pairs = [chain.damaged(1, tmp_path) if n == 1 else pair for n, pair in enumerate(chain.pairs)]
        # Outputs are checked before a pair is applied.
        with raises("already_exists"):
            tpde.fold(pairs, tmp_path / "first", base=base, device="cuda")
        with pytest.raises(tpde.Step) as caught:
            tpde.fold(pairs, tmp_path / "out", base=base, device="cuda")
        assert caught.value.number == 2 and isinstance(caught.value.__cause__, tpde.Invalid)
        assert not list(tmp_path.glob("out*"))
