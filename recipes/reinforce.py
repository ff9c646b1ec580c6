"""REINFORCE on CartPole-v1: the policy gradient weighted by the reward-to-go, without a critic.

python -m recipes.reinforce        runs this program, 15 s on one CPU core
python -m recipes.reinforce fit    trains with configs/reinforce/cartpole.yaml through the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import REINFORCE


def main(total_timesteps: int = 300_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule("CartPole-v1", n_envs=8, n_steps=256, total_timesteps=total_timesteps)
    model = REINFORCE(psi="reward_to_go", normalize_advantage=True, learning_rate=3e-3)
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="reinforce/cartpole.yaml")
