"""Truncated quantile critics (TQC) on Pendulum-v1.

python -m recipes.tqc        runs this program
python -m recipes.tqc fit    trains with configs/tqc/pendulum.yaml through the command line
"""

from datamodules import ReplayDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import TQC


def main(total_timesteps: int = 20_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = ReplayDataModule("Pendulum-v1", total_timesteps=total_timesteps)
    model = TQC(learning_rate=1e-3)
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="tqc/pendulum.yaml")
