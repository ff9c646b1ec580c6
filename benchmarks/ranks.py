"""Transitions per second of PPO in two processes, over one process with one thread.

    python -m benchmarks.ranks --pairs 3

Both train on CartPole-v1 with the config's settings, which are per rank: two ranks have twice the environments and
twice the minibatch. The first epoch is not timed. Rounds alternate, and the median of their ratios is reported, for
machines are noisy; this one needs two idle cores.
"""

import argparse
import json
import logging
import os
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch

from datamodules import RolloutDataModule
from recipes.checkpoints import Checkpoints
from rl_modules import PPO

SETTINGS = {"n_envs": 8, "n_steps": 32, "batch_size": 256, "n_epochs": 20, "eval_freq": 0}


class Clock(L.Callback):
    """Notes when the first and the last epoch ended, and how many transitions there were by then."""

    began_s = ended_s = 0.0
    began_at = 0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.current_epoch == 0:
            self.began_s, self.began_at = time.monotonic(), data.num_timesteps
        self.ended_s = time.monotonic()


def train(total_timesteps: int, world_size: int, folder: Path) -> float:
    """Transitions per second over all ranks, from the second epoch to the last."""
    clock, data = Clock(), RolloutDataModule("CartPole-v1", total_timesteps=total_timesteps, **SETTINGS)
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto",
        logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[clock, Checkpoints()],
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(PPO(gamma=0.98, gae_lambda=0.8, learning_rate="lin_1e-3", clip_range="lin_0.2", log_every=4), data)
    return (data.num_timesteps - clock.began_at) / (clock.ended_s - clock.began_s)


def measure(total_timesteps: int, world_size: int) -> float:
    """:func:`train` in as many copies of this process, which Lightning takes for torchrun's."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "speed.json"
        pids = [os.fork() or _become(rank, total_timesteps, world_size, port, result) for rank in range(world_size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise RuntimeError(f"one of {world_size} processes failed")
        return json.loads(result.read_text())


def _become(rank: int, total_timesteps: int, world_size: int, port: int, result: Path) -> int:
    code = 1
    try:
        if world_size > 1:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                         "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                         "TORCHELASTIC_RUN_ID": "benchmark"}  # fmt: skip
            os.environ.update({name: str(value) for name, value in variables.items()})
        speed = train(total_timesteps, world_size, result.parent)
        if rank == 0:
            result.write_text(json.dumps(speed))
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=3, help="rounds")
    parser.add_argument("--timesteps", type=int, default=20_480, help="transitions per rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ratios = []
    for _ in range(options.pairs):
        one, two = measure(options.timesteps, 1), measure(2 * options.timesteps, 2)
        ratios.append(two / one)
        print(f"1 rank {one:7,.0f}/s   2 ranks {two:7,.0f}/s   ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
