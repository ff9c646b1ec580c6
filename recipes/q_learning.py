"""Q-learning on FrozenLake-v1: finds the best policy across slippery ice.

python -m recipes.q_learning        runs this program, 20 s on one CPU core
python -m recipes.q_learning fit    trains with configs/q_learning/frozenlake.yaml through the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import QLearning


def main(total_timesteps: int = 300_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule(
        "FrozenLake-v1",
        n_envs=32,
        n_steps=32,
        rollouts_per_epoch=10,
        total_timesteps=total_timesteps,
        eval_freq=30_000,
    )
    model = QLearning(gamma=0.99, learning_rate="lin_0.1", exploration_fraction=0.5, exploration_final_eps=0.1)
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    # Of 50 episodes of the best policy, whose expected return is .74, all but one set in a hundred return more.
    run_program(main, default_config="q_learning/frozenlake.yaml", target=0.6)
