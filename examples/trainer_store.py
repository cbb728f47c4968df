#!/usr/bin/env python3
"""Keep every checkpoint of a `transformers.Trainer` in a store, and go on after a crash.

Each checkpoint folder goes into the store when it is saved, and is then removed: the weights as their difference from the checkpoint
before, the other files (optimizer, scheduler, random states, configuration) as they are. After a crash the newest version is put
back, and training goes on from there. The result has the same bits as that of a run without a crash.

    pip install ./python torch transformers accelerate
    python examples/trainer_store.py
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import tpde
import tpde.store

try:
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    import accelerate  # noqa: F401 (the trainer needs it)
except ImportError as missing:
    print(f"skipped: {missing}")
    raise SystemExit from None

STEPS, SAVE_EVERY, CRASH_AT = 8, 2, 5


class KeepInStore(TrainerCallback):
    """Moves each checkpoint into the store."""

    def __init__(self, store: tpde.store.Store) -> None:
        self.store = store

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        version = self.store.put(folder, metadata={"step": str(state.global_step)})
        shutil.rmtree(folder)
        print(f"  step {state.global_step:2}: {version.name} {version.content}, weights in {version.stored_bytes:,} bytes")


class Crash(TrainerCallback):
    """Stands for a machine that fails."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == CRASH_AT:
            raise RuntimeError("the machine fails")


def restore(store: tpde.store.Store, output: Path) -> str:
    """Puts the newest checkpoint back, and returns its folder."""
    version = store.version("main")
    folder = output / f"checkpoint-{version.metadata['step']}"
    store.get(version.name, folder)
    return str(folder)


def trainer(output: Path, store: tpde.store.Store, *callbacks: TrainerCallback) -> Trainer:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    data = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(5))
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        per_device_train_batch_size=4,
        learning_rate=1e-5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
    )
    rows = [{"input_ids": row, "labels": row} for row in data]
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[KeepInStore(store), *callbacks])


def main(work: Path) -> None:
    torch.set_num_threads(2)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    store = tpde.store.init(work / "store")
    print("training, until the machine fails:")
    try:
        trainer(work / "run", store, Crash()).train()
    except RuntimeError as error:
        print(f"  {error} at step {CRASH_AT}")
    shutil.rmtree(work / "run")  # the disk is lost too

    print(f"going on from {store.version('main').name}:")
    resumed = trainer(work / "run", store)
    resumed.train(resume_from_checkpoint=restore(store, work / "run"))

    print("the same without a crash:")
    whole = trainer(work / "whole", tpde.store.init(work / "other"))
    whole.train()
    expected, found = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    usage = store.usage()
    print(
        f"equal bit for bit; {usage.versions} versions: {usage.anchor_bytes:,} bytes whole, {usage.difference_bytes:,} as differences"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
