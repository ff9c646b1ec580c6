"""Twin delayed deep deterministic policy gradient (TD3) on Pendulum-v1.

python -m recipes.td3        runs this program
python -m recipes.td3 fit    trains with configs/td3/pendulum.yaml through the command line
"""

from datamodules import ReplayDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import TD3
from rl_modules.action_noise import NormalActionNoise


def main(total_timesteps: int = 20_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = ReplayDataModule(
        "Pendulum-v1",
        buffer_size=200_000,
        learning_starts=min(10_000, total_timesteps // 2),
        total_timesteps=total_timesteps,
    )
    model = TD3(gamma=0.98, action_noise=NormalActionNoise(sigma=0.1))
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="td3/pendulum.yaml")
