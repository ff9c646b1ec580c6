"""CrossQ on Pendulum-v1.

python -m recipes.crossq        runs this program
python -m recipes.crossq fit    trains with configs/crossq/pendulum.yaml through the command line
"""

from datamodules import ReplayDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import CrossQ


def main(total_timesteps: int = 20_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = ReplayDataModule("Pendulum-v1", total_timesteps=total_timesteps)
    model = CrossQ(policy_delay=2, net_arch=[256, 256])
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="crossq/pendulum.yaml")
