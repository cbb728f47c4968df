"""PyTorch tensors that are refused, each with a typed error."""

from __future__ import annotations

from pathlib import Path

import pytest

import tpde
from conftest import Made
from raised import raises
from test_torch import tensors_of

torch = pytest.importorskip("torch")


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage was freed, as sharding libraries do."""
    tensor.untyped_storage().resize_(0)
    return tensor


class Lying(torch.Tensor):
    """A tensor subclass that misreports its properties."""

    def numel(self) -> int:
        return 1 << 40


class TestRefused:
    @pytest.mark.parametrize(
        "tensor",
        [
            torch.ones(4, 6).t(),
            torch.ones(4, 6)[:, ::2],
            torch.ones(1).expand(5),
            torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        ],
        ids=["transposed", "strided", "expanded", "channels_last"],
    )
    def test_non_contiguous(self, tensor: torch.Tensor, tmp_path: Path) -> None:
        contiguous = tensor.clone(memory_format=torch.contiguous_format)
        with raises("not_contiguous") as caught:
            tpde.torch.save_file({"w": tensor}, tmp_path / "p")
        assert caught.value.tensor == "w"
        assert not list(tmp_path.iterdir())
        tpde.torch.save_file({"w": contiguous + 1}, tmp_path / "p", base={"w": contiguous})
        with raises("not_contiguous"):
            tpde.torch.apply_({"w": tensor}, tmp_path / "p")
        with raises("not_contiguous"):
            tpde.torch.load_file(tmp_path / "p", base={"w": tensor})

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.ones(4, device="meta"),
            lambda: torch.ones(4).to_sparse(),
            lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
            lambda: torch.ones(4, dtype=torch.complex128),
            lambda: torch.ones(4, dtype=torch.complex64).conj(),
            lambda: freed(torch.ones(4)),
            lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(4)),
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            lambda: torch.nn.parameter.UninitializedParameter(),
            lambda: torch.ones(4).as_subclass(Lying),
        ],
        ids=["meta", "sparse", "quantized", "complex128", "conjugated", "freed", "fake", "jagged", "nested", "lazy", "lying"],
    )
    def test_tensors_without_plain_memory(self, make: object, tmp_path: Path) -> None:
        with pytest.raises(tpde.InvalidArgument, match="'w'"):
            tpde.torch.save_file({"w": make()}, tmp_path / "p")
        tpde.torch.save_file({"w": torch.ones(4)}, tmp_path / "p", base={"w": torch.zeros(4)})
        with pytest.raises(tpde.InvalidArgument, match="'w'"):
            tpde.torch.apply_({"w": make()}, tmp_path / "p")
        with pytest.raises(tpde.InvalidArgument, match="'w'"):
            tpde.torch.load_file(tmp_path / "p", base={"w": make()})

    @pytest.mark.parametrize("name", [1, None, b"w", ("w",), 1.5])
    def test_names_that_are_no_strings(self, name: object, made: Made, tmp_path: Path) -> None:
        wrong, right = {name: torch.ones(3)}, {"w": torch.ones(3)}
        for call in (
            lambda: tpde.torch.save_file(wrong, tmp_path / "p"),
            lambda: tpde.torch.save_file(right, tmp_path / "p", base=wrong),
            lambda: tpde.torch.save_file(right, tmp_path / "p", base=right, renamed={"w": name}),
            lambda: tpde.torch.load_file(made.pair, base=wrong),
            lambda: tpde.torch.apply_({**tensors_of(made.base_bytes), **wrong}, made.pair),
            lambda: tpde.torch.apply_(tensors_of(made.base_bytes), made.pair, base=wrong),
        ):
            with pytest.raises(tpde.InvalidArgument, match="a name is a string"):
                call()
        assert not list(tmp_path.iterdir())

    def test_names_that_are_no_text(self, tmp_path: Path) -> None:
        with pytest.raises(tpde.InvalidArgument, match="not Unicode text"):
            tpde.torch.save_file({"a\udc80": torch.ones(3)}, tmp_path / "p")

    def test_devices(self, made: Made) -> None:
        absent = ["meta", "xpu", "no device", "cuda:99"] + (
            [] if torch.cuda.is_available() else ["cuda", "cuda:1", torch.device("cuda", 0)]
        )
        for device in absent:
            with raises("no_device") as caught:
                tpde.torch.load_file(made.pair, base=made.base, device=device)
            assert caught.value.device == str(device)
            with raises("no_device"):
                tpde.torch.DevicePair(made.pair, device)
            with raises("no_device"):
                tpde.safe_open(made.pair, base=made.base, framework="pt", device=device)
            with raises("no_device"):
                next(tpde.torch.iter_weights(made.pair, base=made.base, device=device))

    def test_frameworks(self, made: Made) -> None:
        with pytest.raises(tpde.InvalidArgument):
            tpde.safe_open(made.pair, base=made.base, framework="tf")
        with raises("no_device"):
            tpde.safe_open(made.pair, base=made.base, framework="np", device="cuda")
