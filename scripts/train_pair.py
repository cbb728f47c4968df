#!/usr/bin/env python3
"""Trains a small language model on the CPU and writes checkpoints that no codec was tuned for.

    python3 -m venv target/venv-train && target/venv-train/bin/pip install jax optax
    target/venv-train/bin/python scripts/train_pair.py [--rate R] OUT_FOLDER

A GPT-2-shaped transformer over bytes (8 blocks of 256, 6.5 M parameters) is trained for 500 steps with AdamW, on the
modules of the Python standard library that are in no package. That is the base. Then it is fine-tuned on the modules of
some packages, with new moments and a constant learning rate (--rate, 1e-5 by default). The script writes

    base_f32  step1_f32  step10_f32  step100_f32      the master weights
    base_bf16 step1_bf16 step10_bf16 step100_bf16     the same, rounded to nearest, ties to even

each with the ending .safetensors, and log.json with the losses and the versions of Python and of its packages.

Everything is seeded, and training runs on one core, so that sums are always formed in the same order. Two runs on one
machine give the same bytes. Another CPU, or another version of Python (other text) or of JAX (other code), gives other
bytes. The script takes some minutes.
"""

import argparse
import json
import os
import platform
import sysconfig
import time
from pathlib import Path

# Before JAX is loaded, which makes its threads as it starts.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from make_variants import write

VOCABULARY, WIDTH, HEADS, BLOCKS, CONTEXT, BATCH = 256, 256, 4, 8, 128, 4
BASE_STEPS, BASE_RATE, WARM_UP = 500, 1e-3, 50
TUNE_STEPS, TUNE_RATE = (1, 10, 100), 1e-5
PACKAGES = "asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "unittest", "urllib", "xml"
SEED = 0


def text(of_packages):
    """The bytes of the modules in no package, or of those in PACKAGES, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    if of_packages:
        files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    else:
        files = sorted(root.glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def initial():
    """Weights as GPT-2 starts with: normal, 0.02, and less for what adds to the residual."""
    rng = np.random.default_rng(SEED)

    def normal(*shape, scale=0.02):
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    less = 0.02 / (2 * BLOCKS) ** 0.5
    weights = {"wte.weight": normal(VOCABULARY, WIDTH), "wpe.weight": normal(CONTEXT, WIDTH)}
    for i in range(BLOCKS):
        for name, rows, columns, scale in (
            ("attn.c_attn", WIDTH, 3 * WIDTH, 0.02),
            ("attn.c_proj", WIDTH, WIDTH, less),
            ("mlp.c_fc", WIDTH, 4 * WIDTH, 0.02),
            ("mlp.c_proj", 4 * WIDTH, WIDTH, less),
        ):
            weights[f"h.{i}.{name}.weight"] = normal(rows, columns, scale=scale)
            weights[f"h.{i}.{name}.bias"] = np.zeros(columns, np.float32)
        for name in "ln_1", "ln_2":
            weights[f"h.{i}.{name}.weight"] = np.ones(WIDTH, np.float32)
            weights[f"h.{i}.{name}.bias"] = np.zeros(WIDTH, np.float32)
    weights["ln_f.weight"] = np.ones(WIDTH, np.float32)
    weights["ln_f.bias"] = np.zeros(WIDTH, np.float32)
    weights["lm_head.weight"] = normal(VOCABULARY, WIDTH)
    return {name: jnp.asarray(weight) for name, weight in weights.items()}


def loss(weights, tokens):
    """Mean cross-entropy of every next byte, in nats."""
    inputs, wanted = tokens[:, :-1], tokens[:, 1:]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    count, length = inputs.shape
    x = weights["wte.weight"][inputs] + weights["wpe.weight"][:length]
    mask = jnp.tril(jnp.ones((length, length), bool))
    for i in range(BLOCKS):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = qkv.reshape(count, length, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2) / (WIDTH // HEADS) ** 0.5, -1e9)
        mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(count, length, WIDTH)
        x = x + linear(mixed, f"h.{i}.attn.c_proj")
        x = x + linear(jax.nn.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj")
    logits = norm(x, "ln_f") @ weights["lm_head.weight"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


def train(weights, rate, steps, data, seed, keep, log, label):
    """Takes `steps` steps, and calls `keep` with the number of each step and the weights after it."""
    # No decay for biases and norms, as is usual.
    decayed = {name: weight.ndim > 1 for name, weight in weights.items()}
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decayed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    @jax.jit
    def step(weights, state, tokens):
        value, gradient = jax.value_and_grad(loss)(weights, tokens)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    rng, state = np.random.default_rng(seed), optimizer.init(weights)
    for number in range(1, steps + 1):
        starts = rng.integers(0, len(data) - CONTEXT, BATCH)
        tokens = np.stack([data[start : start + CONTEXT + 1] for start in starts]).astype(np.int32)
        weights, state, value = step(weights, state, tokens)
        if number in (1, steps) or number % 50 == 0:
            log.append({"part": label, "step": number, "loss": round(float(value), 4)})
            print(f"{label} {number:4} loss {log[-1]['loss']}", flush=True)
        keep(number, weights)
    return weights


def save(folder, name, weights):
    """Writes NAME_f32 and NAME_bf16; the rounding is done on the bits, so that it is plain to see."""
    lanes = {key: np.asarray(weight).view(np.uint32) for key, weight in weights.items()}
    assert all(((bits & 0x7F800000) != 0x7F800000).all() for bits in lanes.values()), "infinity or NaN"
    halves = {key: ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16) for key, bits in lanes.items()}
    for dtype, order, tensors in ("F32", "<u4", lanes), ("BF16", "<u2", halves):
        entries = {key: (dtype, bits.shape, bits.astype(order).tobytes()) for key, bits in tensors.items()}
        write(folder / f"{name}_{dtype.lower()}.safetensors", entries)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=TUNE_RATE, help="learning rate of the fine-tune")
    parser.add_argument("folder", type=Path, metavar="OUT_FOLDER")
    options = parser.parse_args()
    folder, began, log = options.folder, time.monotonic(), []
    folder.mkdir(parents=True, exist_ok=True)
    weights, modules, packages = initial(), text(False), text(True)
    parameters = sum(weight.size for weight in weights.values())
    print(f"{parameters:,} parameters; {len(modules):,} bytes of text, then {len(packages):,}", flush=True)

    schedule = optax.warmup_cosine_decay_schedule(0.0, BASE_RATE, WARM_UP, BASE_STEPS, BASE_RATE / 10)
    weights = train(weights, schedule, BASE_STEPS, modules, SEED + 1, lambda *_: None, log, "base")
    save(folder, "base", weights)

    def keep(number, weights):
        if number in TUNE_STEPS:
            save(folder, f"step{number}", weights)

    train(weights, options.rate, max(TUNE_STEPS), packages, SEED + 2, keep, log, "tune")

    about = {
        "parameters": parameters,
        "tune_rate": options.rate,
        "text_bytes": [len(modules), len(packages)],
        "seconds": round(time.monotonic() - began),
        "python": platform.python_version(),
        **{module.__name__: module.__version__ for module in (jax, optax, np)},
        "losses": log,
    }
    (folder / "log.json").write_text(json.dumps(about, indent=2) + "\n")
    print(f"{about['seconds']} s")


if __name__ == "__main__":
    main()
