"""SARSA on CliffWalking-v1: with a constant ε it learns the safe path, away from the cliff.

python -m recipes.sarsa        runs this program, 5 s on one CPU core
python -m recipes.sarsa fit    trains with configs/sarsa/cliffwalking.yaml through the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import SARSA


def main(total_timesteps: int = 20_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule(
        "CliffWalking-v1",
        n_envs=4,
        n_steps=4,
        rollouts_per_epoch=50,
        total_timesteps=total_timesteps,
        eval_freq=2000,
        env_kwargs={"max_episode_steps": 200},  # CliffWalking has no time limit of its own
    )
    model = SARSA(gamma=1.0, learning_rate="lin_0.5", exploration_initial_eps=0.1, exploration_final_eps=0.1)
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="sarsa/cliffwalking.yaml", target=-17)
