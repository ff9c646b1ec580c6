"""PQN on CartPole-v1: Q-learning on the rollouts of eight environments, without replay.

python -m recipes.pqn        runs this program, 15 s on one CPU core
python -m recipes.pqn fit    trains with configs/pqn/cartpole.yaml through the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import PQN


def main(total_timesteps: int = 250_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule("CartPole-v1", n_envs=8, n_steps=64, total_timesteps=total_timesteps)
    model = PQN(learning_rate="lin_1e-3")
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="pqn/cartpole.yaml")
