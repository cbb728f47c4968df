#!/usr/bin/env python3
"""Generate with a Llama whose linear weights are compressed, each rebuilt just before its layer is called.

Two ways: from a pair without a base, so that the compressed bytes are all there is of a weight; and as a fine-tune of a base
that stays as it is. Logits are compared bit for bit with those of the plain model. Weights are made up, nothing is downloaded;
the class is that of transformers, with a small configuration unless --config 8b asks for that of Llama 3.1 8B (17 GB of memory
of the host for each set of weights, and a GPU).

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
    """A model with weights as they are at the start of training, in BF16."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return model.eval()


def tuned(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Weights of a fine-tune: some lanes a unit in the last place away."""
    state = {}
    for name, tensor in model.state_dict().items():
        state[name] = tensor.clone()
        lanes = state[name].view(torch.int16)
        lanes += (torch.rand(tensor.shape) < 0.03).to(torch.int16)
    return state


@torch.no_grad()
def generate(model: LlamaForCausalLM, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Tokens, the logits that they were chosen by, and tokens a second."""
    cache, logits, made, begin = None, [], [], 0.0
    for step in range(count + 2):
        if step == 2:  # what is done once is behind us
            begin = time.perf_counter()
        answer = model(tokens, past_key_values=cache, use_cache=True)
        cache, tokens = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
        logits.append(answer.logits[:, -1].cpu())
        made.append(tokens.cpu())
    return torch.cat(made, 1), torch.cat(logits), count / (time.perf_counter() - begin)


def compare(what: str, found: tuple, wanted: tuple) -> None:
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1].view(torch.int16), wanted[1].view(torch.int16))
    print(f"{what}: {found[2]:.1f} tokens a second (the plain model: {wanted[2]:.1f}), logits equal bit for bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--payloads", choices=["pinned", "device"], default="pinned")
    parser.add_argument("--tokens", type=int, default=16)
    how = parser.parse_args()
    torch.set_num_threads(2 if how.device == "cpu" else 16)
    config = LlamaConfig(**CONFIGS[how.config], max_position_embeddings=2048, tie_word_embeddings=False, use_cache=True)
    prompt = torch.arange(1, 9, device=how.device).view(1, 8)

    base = make(config)
    dense = sum(parameter.nbytes for parameter in base.parameters())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        # The whole model from compressed bytes.
        report = tpde.torch.save_file(base, folder / "anchor", codec="conditioned")
        print(f"{dense:,} bytes of weights, {report.stored_bytes:,} without a base")
        wanted = generate(copy.deepcopy(base).to(how.device), prompt, how.tokens)
        model = copy.deepcopy(base)
        attached = tpde.nn.attach(model, folder / "anchor", device=how.device, payloads=how.payloads)
        print(f"{len(attached.layers)} layers rebuild their weights, {attached.stored_bytes:,} bytes are kept for them")
        compare("rebuilt without a base", generate(model, prompt, how.tokens), wanted)
        attached.check()
        del model, attached

        # A fine-tune: the base stays, and is not copied.
        state = tuned(base)
        report = tpde.torch.save_file(state, folder / "tune", base=base)
        print(f"the fine-tune takes {report.stored_bytes:,} bytes more")
        plain = copy.deepcopy(base)
        plain.load_state_dict(state)
        del state
        wanted = generate(plain.to(how.device), prompt, how.tokens)
        del plain
        model = base.to(how.device)
        attached = tpde.nn.attach(model, folder / "tune", payloads=how.payloads)
        compare("rebuilt from the base", generate(model, prompt, how.tokens), wanted)
        attached.check()

    if how.device.startswith("cuda"):
        print(f"at most {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of the device were in use, with the plain model's")


if __name__ == "__main__":
    main()
