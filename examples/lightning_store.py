#!/usr/bin/env python3
"""Keep the checkpoints of a Lightning run in a store, and go on after a crash.

Lightning writes and reads checkpoints through a `CheckpointIO`. The one below puts the tensors of a checkpoint into the store, the
weights and the optimizer's, as their difference from the checkpoint before, and the rest beside them as a file. The result after a
crash has the same bits as that of a run without one.

    pip install ./python torch lightning
    python examples/lightning_store.py
"""

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import tpde
import tpde.store

try:
    import lightning
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.plugins import CheckpointIO
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print(f"skipped: {missing}")
    raise SystemExit from None

EPOCHS, BATCHES, CRASH_AT = 4, 4, 10


class StoreIO(CheckpointIO):
    """Checkpoints as versions of a store. Lightning's path of a checkpoint is the name of its version."""

    def __init__(self, store: tpde.store.Store) -> None:
        self.store = store

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        tensors: dict[str, torch.Tensor] = {}
        with tempfile.TemporaryDirectory() as folder:
            rest = take(checkpoint, "", tensors)
            save_file(tensors, Path(folder) / "model.safetensors")
            torch.save(rest, Path(folder) / "rest.pt")
            version = self.store.put(folder, metadata={"path": str(path), "step": str(checkpoint["global_step"])})
        print(f"  step {checkpoint['global_step']:2}: {version.name} {version.content}, tensors in {version.stored_bytes:,} bytes")

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            self.store.get(str(path), Path(folder) / "checkpoint")
            tensors = load_file(Path(folder) / "checkpoint/model.safetensors")
            rest = torch.load(Path(folder) / "checkpoint/rest.pt", weights_only=False)  # our own
        return put_back(rest, tensors)

    def remove_checkpoint(self, path: Any) -> None:
        """Versions stay."""


def take(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Moves the tensors of nested dicts and lists into one dict, and leaves their names."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.contiguous()
        return Name(name)
    if isinstance(value, dict):
        return {key: take(one, f"{name}.{key}".lstrip("."), tensors) for key, one in value.items()}
    if isinstance(value, list):
        return [take(one, f"{name}.{number}", tensors) for number, one in enumerate(value)]
    return value


class Name(str):
    """Stands for the tensor of this name."""


def put_back(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, Name):
        return tensors[value]
    if isinstance(value, dict):
        return {key: put_back(one, tensors) for key, one in value.items()}
    return [put_back(one, tensors) for one in value] if isinstance(value, list) else value


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[0].flip(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Crash(Callback):
    """Stands for a machine that fails."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        if trainer.global_step == CRASH_AT:
            raise RuntimeError("the machine fails")


def train(store: tpde.store.Store, work: Path, *callbacks: Callback, start: str | None = None) -> Model:
    torch.manual_seed(3)
    model = Model()
    data = torch.randn(16 * BATCHES, 128, generator=torch.Generator().manual_seed(5))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=16)
    keep = ModelCheckpoint(dirpath=work, every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[StoreIO(store)],
        callbacks=[keep, *callbacks],
    )
    trainer.fit(model, loader, ckpt_path=start)
    return model


def main(work: Path) -> None:
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    store = tpde.store.init(work / "store")
    print("training, until the machine fails:")
    try:
        train(store, work, Crash())
    except RuntimeError as error:
        print(f"  {error} at step {CRASH_AT}")

    head = store.version("main")
    print(f"going on from {head.name}, step {head.metadata['step']}:")
    resumed = train(store, work, start=head.name)

    print("the same without a crash:")
    whole = train(tpde.store.init(work / "other"), work)
    expected, found = whole.state_dict(), resumed.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    usage = store.usage()
    print(
        f"equal bit for bit; {usage.versions} versions: {usage.anchor_bytes:,} bytes whole, {usage.difference_bytes:,} as differences"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
