"""Recurrent PPO on CartPole-v1 without velocities, which the policy must remember to know.

python -m recipes.recurrent_ppo        runs this program, 70 s on one CPU core
python -m recipes.recurrent_ppo fit    trains with configs/recurrent_ppo/cartpole_no_velocity.yaml, by the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import RecurrentPPO


def main(total_timesteps: int = 100_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule(
        "CartPole-v1",
        wrappers=["datamodules.envs.velocity.MaskVelocity"],
        n_envs=8,
        n_steps=128,
        batch_size=256,
        n_epochs=10,
        norm_obs=True,
        norm_reward=True,
        total_timesteps=total_timesteps,
        eval_freq=20_000,
    )
    model = RecurrentPPO(
        gae_lambda=0.98,
        max_grad_norm=1.0,
        learning_rate="lin_1e-3",
        lstm_hidden_size=64,
        net_arch={"pi": [], "vf": [64]},
        ortho_init=False,
    )
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="recurrent_ppo/cartpole_no_velocity.yaml")
