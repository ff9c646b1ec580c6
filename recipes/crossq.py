"""CrossQ on Pendulum-v1.

python -m recipes.crossq        runs this program
python -m recipes.crossq fit    trains with configs/crossq/pendulum.yaml through the command line
"""

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from datamodules import ReplayDataModule
from recipes.callbacks import Checkpoints, TransitionProgressBar
from recipes.program import run_program
from rl_modules import CrossQ


def main(total_timesteps: int = 20_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    torch.set_num_threads(1)  # one thread is fastest for networks this small
    data = ReplayDataModule("Pendulum-v1", total_timesteps=total_timesteps)
    model = CrossQ(policy_delay=2, net_arch=[256, 256])
    trainer = L.Trainer(
        max_epochs=-1,  # total_timesteps ends the training
        accelerator="cpu",
        logger=TensorBoardLogger("logs", name="CrossQ-Pendulum-v1"),
        callbacks=[Checkpoints(), TransitionProgressBar()],
    )
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="crossq/pendulum.yaml")
