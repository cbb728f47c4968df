"""Decoder layers of a Llama in the format of DFloat11, made with its own tables and loaded by its own code.

The encoder of DFloat11 codes weights one by one in Python, which takes hours for a large model. This one codes all lanes together,
on the device, and gives the same bytes.
"""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

#: Weights of a decoder layer, which DFloat11 decodes together.
PARTS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
THREADS, BYTES = 512, 8


def encode(exponents: torch.Tensor, codec: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `dfloat11_utils.encode` gives for these bytes: codes, gaps and output positions."""
    device = exponents.device
    bits, codes = torch.zeros(256, dtype=torch.int64), torch.zeros(256, dtype=torch.int64)
    for symbol, (length, code) in codec._table.items():
        if isinstance(symbol, int):
            bits[symbol], codes[symbol] = length, code
    symbols = exponents.to(torch.int32)
    lengths = bits.to(device)[symbols]
    ends = lengths.cumsum(0)
    total = int(ends[-1])
    starts = ends.sub_(lengths)
    # A code has at most 32 bits, so it is within two adjacent 32-bit words.
    at = starts >> 5
    both = codes.to(device)[symbols] << (64 - (starts & 31) - lengths)
    del symbols, lengths
    words = torch.zeros(total // 32 + 3, dtype=torch.int64, device=device)
    words.scatter_add_(0, at, (both >> 32) & 0xFFFFFFFF)
    words.scatter_add_(0, at.add_(1), both & 0xFFFFFFFF)
    del at, both
    rest = total % 8
    if rest:  # the last byte is filled up with what marks the end
        length, code = codec._table[codec._eof]
        mark = (code << 64 >> length) >> rest & (1 << 64) - 1 if length <= 64 else 0
        last = (mark >> 56) & ((1 << 8 - rest) - 1)
        at_byte = total // 8
        words[at_byte // 4] |= last << 8 * (3 - at_byte % 4)
    encoded = torch.stack([words >> shift & 0xFF for shift in (24, 16, 8, 0)], 1).to(torch.uint8).view(-1)[: (total + 7) // 8]

    def firsts(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Multiples of `step` bits, and for each the first lane whose code begins there or later."""
        begun = int(starts[-1]) if not rest else total
        places = torch.arange(begun // step + 1, device=device) * step
        return places, torch.searchsorted(starts, places)

    places, lanes = firsts(8 * BYTES)
    padded = torch.cat([starts, torch.tensor([total], device=device)])
    gaps = torch.zeros(-(-len(encoded) // (THREADS * BYTES)) * THREADS, dtype=torch.int64, device=device)
    gaps[: len(places)] = padded[lanes] - places
    as_bits = (gaps[:, None] >> torch.arange(4, -1, -1, device=device)) & 1
    positions = torch.cat([firsts(8 * BYTES * THREADS)[1], torch.tensor([len(exponents)], device=device)])
    return (
        encoded.cpu(),
        torch.from_numpy(np.packbits(as_bits.to(torch.uint8).cpu().numpy())),
        torch.from_numpy(positions.cpu().numpy().astype(np.uint32)),
    )


def layer(weights: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The buffers of a decoder layer with these weights."""
    from dfloat11.dfloat11_utils import get_32bit_codec, get_codec, get_luts

    lanes = torch.cat([weight.view(-1) for weight in weights]).view(torch.int16)
    with contextlib.redirect_stdout(io.StringIO()):
        codec, _, table = get_32bit_codec(get_codec(lanes.view(torch.bfloat16))[1])
        luts = get_luts(table)
    encoded, gaps, positions = encode(((lanes >> 7) & 0xFF).to(torch.uint8), codec)
    return {
        "luts": luts,
        "encoded_exponent": encoded,
        "sign_mantissa": ((lanes >> 8) & 0x80 | (lanes & 0x7F)).to(torch.uint8).cpu(),
        "output_positions": positions.view(torch.uint8),
        "gaps": gaps,
        "split_positions": torch.cumsum(torch.tensor([weight.numel() for weight in weights]), 0)[:-1],
    }


def write(folder: Path, layers: int, weight: Callable[[str], torch.Tensor], say: Callable[[str], None]) -> int:
    """Writes the decoder layers; their bytes."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    stored = 0
    for number in range(layers):
        name = f"model.layers.{number}"
        made = layer([weight(f"{name}.{part}.weight") for part in PARTS])
        stored += sum(tensor.nbytes for tensor in made.values())
        save_file({f"{name}.{key}": tensor for key, tensor in made.items()}, folder / f"layer_{number}.safetensors")
    config = {
        "version": "0.5.0",
        "threads_per_block": [THREADS],
        "bytes_per_thread": BYTES,
        "pattern_dict": {r"model\.layers\.\d+": PARTS},
    }
    (folder / "config.json").write_text(json.dumps({"dfloat11_config": config, "stored": stored}))
    say(f"{layers} decoder layers")
    return stored


def load(folder: Path, model: nn.Module, layers: int, dense: int, room: int, say: Callable[[str], None]) -> nn.Module:
    """The model with as many compressed layers resident as fit beside one decoded layer, of ``dense`` bytes; the others are
    offloaded."""
    from dfloat11.dfloat11 import DFloat11Model

    each = json.loads((folder / "config.json").read_text())["stored"] / layers
    offloaded = 0
    if layers * each > room - dense:
        offloaded = min(layers, layers - int((room - dense - each) // each))
    say(f"{layers - offloaded} decoder layers compressed on the device, {offloaded} in pinned memory")
    if offloaded:
        return DFloat11Model.from_pretrained(
            str(folder), device="cuda", bfloat16_model=model, cpu_offload=True, cpu_offload_blocks=offloaded
        )
    return DFloat11Model.from_pretrained(str(folder), device="cuda", bfloat16_model=model)
