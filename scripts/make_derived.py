#!/usr/bin/env python3
"""Makes checkpoints whose base has another dtype out of two BF16 ones; needs torch and safetensors.

    scripts/make_derived.py BASE FINETUNE OUT_FOLDER

| file | content |
|---|---|
| `master` | F32 weights that round to the base, with random low halves |
| `upcast` | the base in F32 |
| `fp8` | matrices of the base in FP8, in blocks of 128 × 128 with F32 scales |
| `image` | what `fp8` stands for, in BF16 |
| `tuned` | `image`, each weight moved by as many steps as from base to fine-tune |
| `mxfp4`, `mxfp4_image`, `mxfp4_tuned` | the same for MXFP4 |
| `plain`, `finetune` | the matrices of base and fine-tune that `fp8` has |
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
MXFP4_BLOCK = 32
NIBBLES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def master(weights):
    """F32 weights around BF16 ones. A weight that would round to another one gets no low half."""
    bits = weights.view(torch.int16).to(torch.int32) << 16
    moved = (bits + torch.randint(-0x7FFF, 0x8000, weights.shape, dtype=torch.int32)).view(torch.float32)
    rounds_back = moved.to(torch.bfloat16).view(torch.int16) == weights.view(torch.int16)
    return torch.where(rounds_back, moved, bits.view(torch.float32))


def quantised(weights):
    """FP8 blocks, their scales, and the weights that they stand for."""
    weights = weights.float()
    rows, columns = weights.shape
    scales = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
    blocks, image = torch.zeros_like(weights).to(torch.float8_e4m3fn), torch.zeros_like(weights)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(BLOCK * i, BLOCK * (i + 1)), slice(BLOCK * j, BLOCK * (j + 1))
            scales[i, j] = weights[at].abs().max().clamp(min=1e-12) / 448  # the largest number of FP8
            blocks[at] = (weights[at] / scales[i, j]).to(torch.float8_e4m3fn)
            image[at] = blocks[at].float() * scales[i, j]
    return blocks, scales, image.to(torch.bfloat16)


def quantised_mxfp4(weights):
    """MXFP4 blocks, their scales, and the weights that they stand for."""
    blocks = weights.float().reshape(weights.shape[0], -1, MXFP4_BLOCK)
    # The largest weight of a block gets the largest exponent of a nibble, 2.
    exponents = torch.frexp(blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)).exponent - 3
    scaled = (blocks.abs() * torch.exp2(-exponents.float())).contiguous()
    nibbles = torch.bucketize(scaled, (NIBBLES[1:] + NIBBLES[:-1]) / 2)
    image = torch.copysign(NIBBLES[nibbles], blocks) * torch.exp2(exponents.float())
    nibbles = (nibbles + 8 * torch.signbit(blocks)).to(torch.uint8)
    packed = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return packed, (exponents[..., 0] + 127).to(torch.uint8), image.reshape(weights.shape).to(torch.bfloat16)


def tuned_like(image, weights, finetune):
    """The image, each weight moved by as many steps as from `weights` to `finetune`."""
    steps = finetune.view(torch.int16) - weights.view(torch.int16)
    return (image.view(torch.int16) + steps).view(torch.bfloat16)


def main(base, finetune, out):
    torch.manual_seed(1)
    base, finetune, out = load_file(base), load_file(finetune), Path(out)
    base = {name: weights for name, weights in base.items() if weights.dtype == torch.bfloat16}
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: master(weights) for name, weights in base.items()}, out / "master.safetensors")
    save_file({name: weights.float() for name, weights in base.items()}, out / "upcast.safetensors")
    fp8, image, tuned = {}, {}, {}
    mxfp4, mxfp4_image, mxfp4_tuned = {}, {}, {}
    for name, weights in base.items():
        if weights.dim() == 2 and min(weights.shape) >= BLOCK:
            fp8[name], fp8[f"{name}_scale_inv"], image[name] = quantised(weights)
            tuned[name] = tuned_like(image[name], weights, finetune[name])
            mxfp4[f"{name}.blocks"], mxfp4[f"{name}.scales"], mxfp4_image[name] = quantised_mxfp4(weights)
            mxfp4_tuned[name] = tuned_like(mxfp4_image[name], weights, finetune[name])
    save_file(fp8, out / "fp8.safetensors")
    save_file(image, out / "image.safetensors")
    save_file(tuned, out / "tuned.safetensors")
    save_file(mxfp4, out / "mxfp4.safetensors")
    save_file(mxfp4_image, out / "mxfp4_image.safetensors")
    save_file(mxfp4_tuned, out / "mxfp4_tuned.safetensors")
    save_file({name: base[name] for name in image}, out / "plain.safetensors")
    save_file({name: finetune[name] for name in image}, out / "finetune.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
