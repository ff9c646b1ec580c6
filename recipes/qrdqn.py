"""Quantile regression DQN (QR-DQN) on CartPole-v1, with double and dueling heads and 3-step targets.

python -m recipes.qrdqn        runs this program, two minutes on one CPU core
python -m recipes.qrdqn fit    trains with configs/qrdqn/cartpole.yaml through the command line
"""

from datamodules import ReplayDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import QRDQN


def main(total_timesteps: int = 50_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = ReplayDataModule(
        "CartPole-v1",
        buffer_size=100_000,
        learning_starts=1000,
        train_freq=256,
        gradient_steps=128,
        batch_size=64,
        n_steps=3,
        total_timesteps=total_timesteps,
    )
    model = QRDQN(
        n_quantiles=10,
        learning_rate="lin_2.3e-3",
        target_update_interval=10,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        double=True,
        dueling=True,
        net_arch=[256, 256],
    )
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="qrdqn/cartpole.yaml")
