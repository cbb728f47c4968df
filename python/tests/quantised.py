"""Models whose weights stay in FP8 or MXFP4, and BF16 fine-tunes of what these weights stand for."""

from __future__ import annotations

import torch

#: Numbers of the nibbles of MXFP4.
NIBBLES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SHAPES = {"up": (384, 256), "down": (256, 384)}


def base_of(kind: str, seed: int = 3) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a quantised release, and the weights that they stand for, in BF16."""
    torch.manual_seed(seed)
    base, image = {}, {}
    for name, (rows, columns) in SHAPES.items():
        if kind == "fp8":
            lanes = (
                torch.randint(0, 0x60, (rows, columns), dtype=torch.uint8)
                | torch.randint(0, 2, (rows, columns), dtype=torch.uint8) << 7
            )
            scales = torch.rand(rows // 128, columns // 128) / 64
            base[f"{name}.weight"] = lanes.view(torch.float8_e4m3fn)
            base[f"{name}.weight_scale_inv"] = scales
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            image[f"{name}.weight"] = (base[f"{name}.weight"].float() * wide).to(torch.bfloat16)
        else:
            blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(115, 122, (rows, columns // 32), dtype=torch.uint8)
            base[f"{name}.weight_blocks"], base[f"{name}.weight_scales"] = blocks, scales
            nibbles = torch.stack([blocks & 15, blocks >> 4], -1).reshape(rows, columns // 32, 32)
            numbers = NIBBLES[nibbles.int()] * torch.exp2(scales.float() - 127)[..., None]
            image[f"{name}.weight"] = numbers.reshape(rows, columns).to(torch.bfloat16)
    return base, image


def finetune_of(image: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights, of which one in 40 moves by a step."""
    torch.manual_seed(4)
    return {
        name: (weight.view(torch.int16) ^ (torch.rand(weight.shape) < 1 / 40).to(torch.int16)).view(torch.bfloat16)
        for name, weight in image.items()
    }


class Resident(torch.nn.Module):
    """Two linear layers whose weights stay quantised."""

    def __init__(self, base: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, (rows, columns) in SHAPES.items():
            layer = torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16, device="meta")
            for key, tensor in base.items():
                if key == f"{name}.weight":
                    layer.weight = torch.nn.Parameter(tensor, requires_grad=False)
                elif key.startswith(f"{name}."):
                    layer.register_buffer(key.rpartition(".")[2], tensor)
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def outputs_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The outputs of the plain fine-tune."""
    linear = torch.nn.functional.linear
    return linear(torch.relu(linear(x, weights["up.weight"])), weights["down.weight"])
