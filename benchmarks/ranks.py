"""Transitions per second of PPO in two processes, over one process with one thread.

    python -m benchmarks.ranks --pairs 3

Both train on CartPole-v1 with the config's settings, which are per rank: two ranks have twice the environments and
twice the minibatch. Start and compilation are not timed. Rounds alternate, and the median of their ratios is reported.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SETTINGS = {"n_envs": 8, "n_steps": 32, "batch_size": 256, "n_epochs": 20, "eval_freq": 0}


def train(total_timesteps: int, world_size: int) -> float:
    """Transitions per second over all ranks, from the second epoch to the last."""
    import lightning as L
    import torch

    from datamodules import RolloutDataModule
    from rl_modules import PPO

    torch.set_num_threads(1)

    class Clock(L.Callback):
        began_s = ended_s = 0.0
        began_at = 0

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            if trainer.current_epoch == 1:
                self.began_s, self.began_at = time.monotonic(), data.num_timesteps
            self.ended_s = time.monotonic()

    clock, data = Clock(), RolloutDataModule("CartPole-v1", total_timesteps=total_timesteps, **SETTINGS)
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[clock],
    )  # fmt: skip
    trainer.fit(PPO(gamma=0.98, gae_lambda=0.8, learning_rate="lin_1e-3", clip_range="lin_0.2", log_every=4), data)
    return (data.num_timesteps - clock.began_at) / (clock.ended_s - clock.began_s)


def measure(total_timesteps: int, world_size: int) -> float:
    """:func:`train` in as many new processes."""
    port = str(29500 + os.getpid() % 2000)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "speed.json"
        processes = []
        for rank in range(world_size):
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if world_size > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                                "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
                                "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "benchmark"}  # fmt: skip
            arguments = [str(total_timesteps), str(world_size), str(result) if rank == 0 else "-"]
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ranks", "--worker", *arguments]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL,
                                              stderr=subprocess.DEVNULL))  # fmt: skip
        if any(process.wait() for process in processes):
            raise RuntimeError(f"a process of {world_size} failed")
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=3, help="rounds")
    parser.add_argument("--timesteps", type=int, default=40_000, help="transitions per rank")
    parser.add_argument("--worker", nargs=3, metavar=("TIMESTEPS", "RANKS", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        total_timesteps, world_size, file = options.worker
        speed = train(int(total_timesteps), int(world_size))
        if file != "-":
            Path(file).write_text(json.dumps(speed))
        return
    ratios = []
    for _ in range(options.pairs):
        one, two = measure(options.timesteps, 1), measure(2 * options.timesteps, 2)
        ratios.append(two / one)
        print(f"1 rank {one:7,.0f}/s   2 ranks {two:7,.0f}/s   ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
