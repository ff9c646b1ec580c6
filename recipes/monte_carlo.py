"""Monte Carlo control on FrozenLake-v1: crosses slippery ice, learning from whole episodes' returns.

python -m recipes.monte_carlo        runs this program, 70 s on one CPU core
python -m recipes.monte_carlo fit    trains with configs/monte_carlo/frozenlake.yaml through the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import MonteCarlo


def main(total_timesteps: int = 1_500_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule(
        "FrozenLake-v1",
        n_envs=32,
        n_steps=32,
        rollouts_per_epoch=10,
        total_timesteps=total_timesteps,
        eval_freq=150_000,
    )
    model = MonteCarlo(
        gamma=0.999,
        learning_rate="1/n^0.7",
        initial_value=1.0,
        exploration_initial_eps=0.07,
        exploration_final_eps=0.07,
    )
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="monte_carlo/frozenlake.yaml")
