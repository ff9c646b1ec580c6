"""ARS on CartPole-v1: a linear policy of eight weights, found from returns alone.

python -m recipes.ars        runs this program, 40 s on one CPU core
python -m recipes.ars fit    trains with configs/ars/cartpole.yaml through the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import ARS


def main(total_timesteps: int = 50_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule("CartPole-v1", n_envs=8, total_timesteps=total_timesteps)
    model = ARS(n_delta=2)
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="ars/cartpole.yaml")
