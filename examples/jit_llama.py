#!/usr/bin/env python3
"""Generate with a Llama whose linear weights are compressed. Each is rebuilt just before its layer is called.

Shows two uses: a pair without a base, where only the compressed bytes of a weight are kept; and a fine-tune of a base, which is
not changed. Logits are compared bit for bit with those of the plain model. Weights are random; nothing is downloaded. The model
class is that of transformers, with a small configuration. --config 8b selects that of Llama 3.1 8B, which needs a GPU and 17 GB of
host memory per set of weights.

    pip install ./python torch transformers
    python examples/jit_llama.py [--config 8b] [--device cuda] [--payloads pinned]
"""

import argparse
import copy
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tpde
import tpde.nn
import tpde.torch

CONFIGS = {
    "small": dict(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, vocab_size=2000
    ),
    "8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
}


def make(config: LlamaConfig, device: str = "cpu") -> LlamaForCausalLM:
    """A model with initial weights, in BF16."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return model.eval()


def tuned(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Weights of a fine-tune: 3 % of the lanes change by one unit in the last place."""
    state = {}
    for name, tensor in model.state_dict().items():
        state[name] = tensor.clone()
        lanes = state[name].view(torch.int16)
        lanes += (torch.rand(tensor.shape) < 0.03).to(torch.int16)
    return state


@torch.no_grad()
def generate(model: LlamaForCausalLM, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Tokens, their logits, and tokens per second."""
    cache, logits, generated, begin = None, [], [], 0.0
    for step in range(count + 2):
        if step == 2:  # without the warm-up
            begin = time.perf_counter()
        answer = model(tokens, past_key_values=cache, use_cache=True)
        cache, tokens = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
        logits.append(answer.logits[:, -1].cpu())
        generated.append(tokens.cpu())
    return torch.cat(generated, 1), torch.cat(logits), count / (time.perf_counter() - begin)


def compare(name: str, compressed: tuple, plain: tuple) -> None:
    assert torch.equal(compressed[0], plain[0]) and torch.equal(compressed[1].view(torch.int16), plain[1].view(torch.int16))
    print(f"{name}: {compressed[2]:.1f} tokens per second (plain model: {plain[2]:.1f}), logits equal bit for bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--payloads", choices=["pinned", "device"], default="pinned")
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(2 if args.device == "cpu" else 16)
    config = LlamaConfig(**CONFIGS[args.config], max_position_embeddings=2048, tie_word_embeddings=False, use_cache=True)
    prompt = torch.arange(1, 9, device=args.device).view(1, 8)

    base = make(config)
    dense = sum(parameter.nbytes for parameter in base.parameters())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        # All weights from compressed bytes alone.
        report = tpde.torch.save_file(base, folder / "anchor", codec="conditioned")
        print(f"{dense:,} bytes of weights, {report.stored_bytes:,} without a base")
        expected = generate(copy.deepcopy(base).to(args.device), prompt, args.tokens)
        model = copy.deepcopy(base)
        attached = tpde.nn.attach(model, folder / "anchor", device=args.device, payloads=args.payloads)
        print(f"{len(attached.layers)} layers rebuild their weights, {attached.stored_bytes:,} bytes are kept for them")
        compare("rebuilt without a base", generate(model, prompt, args.tokens), expected)
        attached.check()
        del model, attached

        # A fine-tune. The base is neither changed nor copied.
        state = tuned(base)
        report = tpde.torch.save_file(state, folder / "tune", base=base)
        print(f"the fine-tune takes {report.stored_bytes:,} bytes more")
        plain = copy.deepcopy(base)
        plain.load_state_dict(state)
        del state
        expected = generate(plain.to(args.device), prompt, args.tokens)
        del plain
        model = base.to(args.device)
        attached = tpde.nn.attach(model, folder / "tune", payloads=args.payloads)
        compare("rebuilt from the base", generate(model, prompt, args.tokens), expected)
        attached.check()

    if args.device.startswith("cuda"):
        print(f"peak device memory, with the plain model: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
