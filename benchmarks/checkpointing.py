"""The share of a run that writing checkpoints takes, at the default cadence.

    python -m benchmarks.checkpointing

PPO and DQN on CartPole-v1, DQN with a full replay buffer of 100,000 rows: the time in writes over that of the whole
run, the last write included. What is asked before every batch is timed by itself.
"""

import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch

from datamodules import ReplayDataModule, RolloutDataModule
from recipes.callbacks.checkpoints import Checkpoints
from rl_modules import DQN, PPO


class Timed(Checkpoints):
    """Records the duration of each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes_s: list[float] = []
        self.asked_s: list[float] = []

    def _save_last(self, trainer: L.Trainer, is_final: bool = False) -> None:
        began_s = time.monotonic()
        super()._save_last(trainer, is_final)
        self.writes_s.append(time.monotonic() - began_s)

    def _safe_point(self, trainer: L.Trainer) -> None:
        writes, began_s = len(self.writes_s), time.monotonic()
        super()._safe_point(trainer)
        if len(self.writes_s) == writes:
            self.asked_s.append(time.monotonic() - began_s)


def run(name: str, model: L.LightningModule, data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        timed = Timed()
        trainer = L.Trainer(max_epochs=-1, accelerator="cpu", logger=False, enable_progress_bar=False,
                            enable_model_summary=False, callbacks=[timed], default_root_dir=folder)  # fmt: skip
        began_s = time.monotonic()
        trainer.fit(model, data)
        whole_s = time.monotonic() - began_s
        size = (Path(folder) / "checkpoints/last.ckpt").stat().st_size / 2**20
    share, asked = sum(timed.writes_s) / whole_s, sum(timed.asked_s) / whole_s
    writes = f"{len(timed.writes_s)} writes of {1e3 * statistics.median(timed.writes_s):.0f} ms (median)"
    print(f"{name:18} {size:6.1f} MiB  {writes}  run {whole_s:.1f} s  share {100 * share:.2f} %  asking "
          f"{100 * asked:.3f} %", flush=True)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ppo = {"n_envs": 8, "n_steps": 32, "batch_size": 256, "n_epochs": 20, "eval_freq": 0, "total_timesteps": 40_000}
    run("PPO", PPO(gamma=0.98, gae_lambda=0.8, learning_rate="lin_1e-3", log_every=4), RolloutDataModule(**ppo))
    dqn = {"buffer_size": 100_000, "learning_starts": 90_000, "train_freq": 256, "gradient_steps": 128,
           "batch_size": 64, "eval_freq": 0, "total_timesteps": 120_000}  # fmt: skip
    run("DQN, 100,000 rows", DQN(net_arch=[256, 256], target_update_interval=10), ReplayDataModule(**dqn))


if __name__ == "__main__":
    main()
