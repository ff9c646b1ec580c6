"""Advantage actor-critic (A2C) on CartPole-v1: one small step every forty transitions.

python -m recipes.a2c        runs this program, 40 s on one CPU core
python -m recipes.a2c fit    trains with configs/a2c/cartpole.yaml through the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import A2C


def main(total_timesteps: int = 500_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule("CartPole-v1", n_envs=8, total_timesteps=total_timesteps)
    model = A2C()
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="a2c/cartpole.yaml")
