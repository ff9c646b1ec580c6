"""Lightning's introductory autoencoder, resumed with ``ckpt_path="last"``.

The images are random numbers of MNIST's shape: nothing is downloaded, and what is measured does not depend on them.
"""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.resume.trace import Trace, fingerprint, weights_fingerprint


class LitAutoEncoder(L.LightningModule):
    """An autoencoder of 28 × 28 images."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))
        self.trace = trace

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (images,) = batch
        self.trace.write("used", *(fingerprint(image) for image in images))
        return nn.functional.mse_loss(self.decoder(self.encoder(images)), images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Recorder(L.Callback):
    """Writes the weights after every update; a checkpoint's name is its step."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *others: Any) -> None:
        pl_module.trace.write("update", weights_fingerprint(pl_module))
        pl_module.trace.write("checkpoint", trainer.global_step)


class Lightning:
    """The autoencoder.

    Args:
        in_epoch: save every few steps; else after each epoch.
    """

    version = L.__version__
    unit = "examples"
    quote = (
        "Path/URL of the checkpoint from which training is resumed. Could also be one of three special keywords "
        '"last", "hpc" and "registry".'
    )
    link = "https://lightning.ai/docs/pytorch/stable/common/trainer.html#fit"

    def __init__(self, in_epoch: bool) -> None:
        self.every = {"every_n_train_steps": 6} if in_epoch else {"every_n_epochs": 1}
        self.name = f"Lightning's autoencoder, saved {'every 6 steps' if in_epoch else 'after each epoch'}"
        argument = "every_n_train_steps=6" if in_epoch else "every_n_epochs=1"
        self.way = f'`ModelCheckpoint({argument})`; `fit(ckpt_path="last")`'

    def prepare(self, folder: Path) -> None:
        pass

    def train(self, folder: Path, trace: Trace) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        images = torch.rand(256, 28 * 28, generator=torch.Generator().manual_seed(1))
        L.seed_everything(0, verbose=False)
        model = LitAutoEncoder(trace)
        loader = DataLoader(TensorDataset(images), batch_size=8, shuffle=True)
        checkpoints = ModelCheckpoint(folder / "checkpoints", **self.every, save_last=True)
        trainer = L.Trainer(max_epochs=4, accelerator="cpu", logger=False, callbacks=[Recorder(), checkpoints],
                            enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        while True:
            last = self._last(folder, trace)
            trace.write("resume", "start" if last is None else torch.load(last, weights_only=True)["global_step"])
            trainer.fit(model, loader, ckpt_path=last, weights_only=None if last is None else True)
            return model.state_dict()

    @staticmethod
    def _last(folder: Path, trace: Trace) -> Path | None:
        """Returns the newest checkpoint that can be read."""
        for path in sorted(folder.glob("checkpoints/*.ckpt"), key=lambda path: -path.stat().st_mtime):
            try:
                torch.load(path, weights_only=True)
                return path
            except Exception:
                trace.write("damaged", path.name)
                path.unlink()
        return None


CASES = {"lightning-steps": lambda: Lightning(True), "lightning-epochs": lambda: Lightning(False)}
