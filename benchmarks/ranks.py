"""What an algorithm gets through in two processes, over one process with one thread.

    python -m benchmarks.ranks ppo --pairs 3
    python -m benchmarks.ranks ppo_images --pairs 3
    python -m benchmarks.ranks grpo --pairs 3

PPO trains on CartPole-v1, or with ``ppo_images`` on Breakout (transitions per second); GRPO on two-digit addition
(completions per second; a new model of 1.06 million parameters, and a reward that hardly any two completions share, so
that all of them are learned from). The settings are the configs', per rank: two ranks have twice the experience and
twice the minibatch. The first epochs are not timed. Rounds alternate, and the median of their ratios is reported, for
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from recipes.callbacks.checkpoints import Checkpoints

#: Epochs before the clock starts.
WARM_UP = 2


def varied(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Returns rewards that differ between almost all completions."""
    return [sum(map(ord, text)) % 1009 / 1009 for text in completions]


def ppo() -> tuple[Any, Any, int]:
    """configs/ppo/cartpole.yaml: the module, the datamodule, and transitions per epoch and rank."""
    from datamodules import RolloutDataModule
    from rl_modules import PPO

    data = RolloutDataModule("CartPole-v1", n_envs=8, n_steps=32, batch_size=256, n_epochs=20, eval_freq=0,
                             total_timesteps=10**7)  # fmt: skip
    model = PPO(gamma=0.98, gae_lambda=0.8, learning_rate="lin_1e-3", clip_range="lin_0.2", log_every=4)
    return model, data, 8 * 32


def ppo_images() -> tuple[Any, Any, int]:
    """configs/ppo/breakout.yaml, likewise, with the environments in the rank's own process and shorter rollouts."""
    from datamodules import RolloutDataModule
    from rl_modules import PPO

    wrappers = ["AtariPreprocessing", {"class_path": "FrameStackObservation", "init_args": {"stack_size": 4}}]
    data = RolloutDataModule("ALE/Breakout-v5", env_kwargs={"frameskip": 1}, wrappers=wrappers, n_envs=8, n_steps=32,
                             batch_size=256, n_epochs=4, eval_freq=0, total_timesteps=10**7)  # fmt: skip
    return PPO(learning_rate="lin_2.5e-4", clip_range="lin_0.1", ent_coef=0.01), data, 8 * 32


def grpo() -> tuple[Any, Any, int]:
    """configs/grpo/addition.yaml, likewise with completions."""
    from datamodules import PromptDataModule
    from rl_modules import GRPO

    data = PromptDataModule("addition", num_generations=8, batch_size=256, reward_funcs=["benchmarks.ranks:varied"])
    model = GRPO(loss_type="grpo", learning_rate=3e-4, lr_scheduler_type="constant", max_completion_length=6)
    return model, data, 256


#: Per algorithm: its constructor, the counted unit, and the default number of timed epochs.
ALGORITHMS: dict[str, tuple[Callable[[], tuple[Any, Any, int]], str, int]] = {
    "ppo": (ppo, "transitions", 80),
    "ppo_images": (ppo_images, "transitions", 2),
    "grpo": (grpo, "completions", 40),
}


class Clock(L.Callback):
    """Records the times at which the last epoch of the warm-up and the last epoch ended."""

    began_s = ended_s = 0.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ended_s = time.monotonic()
        if trainer.current_epoch < WARM_UP:
            self.began_s = self.ended_s


def train(algorithm: str, epochs: int, world_size: int, folder: Path) -> float:
    """Transitions or completions per second over all ranks, after the warm-up."""
    clock = Clock()
    model, data, per_epoch = ALGORITHMS[algorithm][0]()
    trainer = L.Trainer(
        max_epochs=WARM_UP + epochs, accelerator="cpu", devices=world_size,
        strategy="ddp" if world_size > 1 else "auto", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[clock, Checkpoints()], default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, data)
    return epochs * per_epoch * world_size / (clock.ended_s - clock.began_s)


def measure(algorithm: str, epochs: int, world_size: int) -> float:
    """Runs :func:`train` in ``world_size`` copies of this process, which Lightning treats as torchrun's ranks."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "speed.json"
        pids = [os.fork() or _become(rank, algorithm, epochs, world_size, port, result) for rank in range(world_size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise RuntimeError(f"one of {world_size} processes failed")
        return json.loads(result.read_text())


def _become(rank: int, algorithm: str, epochs: int, world_size: int, port: int, result: Path) -> int:
    code = 1
    try:
        if world_size > 1:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                         "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                         "TORCHELASTIC_RUN_ID": "benchmark"}  # fmt: skip
            os.environ.update({name: str(value) for name, value in variables.items()})
        speed = train(algorithm, epochs, world_size, result.parent)
        if rank == 0:
            result.write_text(json.dumps(speed))
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.ranks", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("algorithm", choices=ALGORITHMS)
    parser.add_argument("--pairs", type=int, default=3, help="rounds")
    parser.add_argument("--epochs", type=int, default=None, help="epochs that are timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    _, counted, epochs = ALGORITHMS[options.algorithm]
    ratios = []
    for _ in range(options.pairs):
        one, two = (measure(options.algorithm, options.epochs or epochs, ranks) for ranks in (1, 2))
        ratios.append(two / one)
        print(f"1 rank {one:7,.0f}/s   2 ranks {two:7,.0f}/s   ratio {ratios[-1]:.2f}", flush=True)
    print(f"{counted} per second: median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
