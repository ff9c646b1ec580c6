"""Proximal policy optimization (PPO) on CartPole-v1: balances the pole after about 40,000 transitions.

python -m recipes.ppo        runs this program, 15 s on one CPU core
python -m recipes.ppo fit    trains with configs/ppo/cartpole.yaml through the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import PPO


def main(total_timesteps: int = 100_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule(
        "CartPole-v1",
        n_envs=8,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        total_timesteps=total_timesteps,
        eval_freq=20_000,
    )
    model = PPO(gamma=0.98, gae_lambda=0.8, learning_rate="lin_1e-3", clip_range="lin_0.2", log_every=4)
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="ppo/cartpole.yaml", target=475)
