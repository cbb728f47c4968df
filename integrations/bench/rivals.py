"""Other ways of sending weights to receivers, over the same link."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from receivers import Link, Replica, Shapes, Weights

#: Work on all processor cores: zstd.
THREADS = 16


class Rivals:
    """Methods that send all weights or those that have changed. Rank 0 sends, the others load.

    Args:
        weights, last: Rank 0: the weights now, and those that receivers have.
        replica: The other ranks.
    """

    def __init__(self, link: Link, of: Shapes, weights: Weights, last: Weights, replica: Replica | None) -> None:
        self._link, self._shapes, self._weights, self._last, self._replica = link, of, weights, last, replica
        pieces = replica.map(of).pieces if replica is not None else []
        self._pieces = {name: [one for one in pieces if one.tensor == name] for name in of}
        self._threads = ThreadPoolExecutor(THREADS)
        self.methods: dict[str, Callable[[], None]] = {"dense": self.dense, "coo": self.coo, "gaps + zstd": self.gaps}

    def dense(self) -> None:
        """All weights. Receivers load each tensor from a buffer."""
        for name, tensor in self._tensors():
            if self._replica is not None:
                self._replica.load_weights([(name, tensor)])

    def _tensors(self) -> Any:
        """Each tensor on all ranks."""
        largest = max(torch.Size(shape).numel() for shape in self._shapes.values())
        buffer = torch.empty(largest if self._replica is not None else 0, dtype=torch.bfloat16, device=self._link.device)
        for name, shape in self._shapes.items():
            tensor = buffer[: torch.Size(shape).numel()].view(shape) if self._replica is not None else self._weights[name]
            self._link.broadcast(tensor.view(-1).view(torch.uint8))
            yield name, tensor

    def differing(self) -> int:
        """Compares all weights of a receiver with those of rank 0. Returns how many tensors differ."""
        found = 0
        for name, tensor in self._tensors():
            for one in self._pieces[name]:
                memory = one.memory(self._replica.parameters[one.parameter]) if self._replica is not None else tensor
                found += not torch.equal(memory.view(torch.int16), tensor[one.index].view(torch.int16))
        return found

    def _changed(self, name: str) -> torch.Tensor:
        """Positions of changed weights, on rank 0."""
        return (self._weights[name].view(torch.int16) != self._last[name].view(torch.int16)).view(-1).nonzero().view(-1)

    def _put(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Writes values to the parameters of a receiver, of which a rank may have a part."""
        shape = self._shapes[name]
        columns = shape[1] if len(shape) > 1 else 1
        for one in self._pieces[name]:
            assert self._replica is not None
            memory = one.memory(self._replica.parameters[one.parameter]).view(torch.int16)
            if tuple(memory.shape) == shape:
                memory.view(-1)[positions] = values  # a whole tensor, in rows without gaps
                continue
            rows, across = positions // columns, positions % columns
            own = (rows >= one.index[0].start) & (rows < one.index[0].stop)
            own &= (across >= one.index[-1].start) & (across < one.index[-1].stop)
            memory[rows[own] - one.index[0].start, across[own] - one.index[-1].start] = values[own]

    def coo(self) -> None:
        """Positions as int32, and values."""
        for name in self._shapes:
            positions = values = torch.empty(0)
            if self._replica is None:
                found = self._changed(name)
                positions, values = found.to(torch.int32), self._weights[name].view(torch.int16).view(-1)[found]
            size = self._sizes([positions.numel()])[0]
            if size == 0:
                continue
            if self._replica is not None:
                positions = torch.empty(size, dtype=torch.int32, device=self._link.device)
                values = torch.empty(size, dtype=torch.int16, device=self._link.device)
            for buffer in (positions, values):
                self._link.broadcast(buffer.view(torch.uint8))
            if self._replica is not None:
                self._put(name, positions.long(), values)

    def _sizes(self, values: list[int]) -> list[int]:
        sizes = torch.tensor(values, dtype=torch.int64).to(self._link.device)
        self._link.broadcast(sizes.view(torch.uint8))
        return sizes.tolist()

    def gaps(self) -> None:
        """Gaps between positions as u16, or u32 if one is larger, and values; zstd, level 1, as NeMo-RL writes them."""
        import zstandard

        if self._replica is None:
            # Threads compress tensors while others are sent, in order.
            pending = [self._threads.submit(lambda data: zstandard.ZstdCompressor(1).compress(data), one) for one in self._gaps()]
        for at, name in enumerate(self._shapes):
            frame = torch.empty(0, dtype=torch.uint8)
            if self._replica is None:
                frame = torch.frombuffer(bytearray(pending[at].result()), dtype=torch.uint8).to(self._link.device)
            size = self._sizes([frame.numel()])[0]
            if self._replica is not None:
                frame = torch.empty(size, dtype=torch.uint8, device=self._link.device)
            self._link.broadcast(frame)
            if self._replica is not None:
                data = zstandard.ZstdDecompressor().decompress(frame.cpu().numpy().data)
                self._put_gaps(name, torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._link.device))

    def _gaps(self) -> Any:
        for name in self._shapes:
            positions = self._changed(name)
            values = self._weights[name].view(torch.int16).view(-1)[positions]
            gaps = torch.diff(positions, prepend=torch.full((1,), -1, device=positions.device)) - 1
            is_wide = bool(gaps.numel() and gaps.max() > 65535)
            gaps = gaps.to(torch.int32) if is_wide else gaps.to(torch.int32).to(torch.int16)
            header = torch.tensor([positions.numel(), int(is_wide)]).view(torch.uint8)
            parts = [header, *(one.contiguous().view(torch.uint8).cpu() for one in (gaps, values))]
            yield torch.cat(parts).numpy().data

    def _put_gaps(self, name: str, data: torch.Tensor) -> None:
        count, is_wide = data[:16].cpu().view(torch.int64).tolist()
        if not count:
            return
        end = 16 + count * (4 if is_wide else 2)
        gaps = data[16:end].view(torch.int32).long() if is_wide else data[16:end].view(torch.int16).long() & 0xFFFF
        self._put(name, torch.cumsum(gaps + 1, 0) - 1, data[end:].clone().view(torch.int16))
