"""Soft actor-critic (SAC) on Pendulum-v1.

python -m recipes.sac        runs this program
python -m recipes.sac fit    trains with configs/sac/pendulum.yaml through the command line
"""

from datamodules import ReplayDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import SAC


def main(total_timesteps: int = 20_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = ReplayDataModule("Pendulum-v1", total_timesteps=total_timesteps)
    model = SAC(learning_rate=1e-3)
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="sac/pendulum.yaml")
