"""Trust region policy optimization (TRPO) on CartPole-v1: a hundred steps within the trust region.

python -m recipes.trpo        runs this program, 25 s on one CPU core
python -m recipes.trpo fit    trains with configs/trpo/cartpole.yaml through the command line
"""

from datamodules import RolloutDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import TRPO


def main(total_timesteps: int = 100_000) -> float:
    """Trains for ``total_timesteps`` transitions; returns the policy's mean return over the test episodes."""
    data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=512, total_timesteps=total_timesteps)
    model = TRPO(target_kl=0.02, gae_lambda=0.98, cg_damping=1e-3, n_critic_updates=20, batch_size=512)
    trainer = Trainer(accelerator="cpu", evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["test/mean_reward"]


if __name__ == "__main__":
    run_program(main, default_config="trpo/cartpole.yaml")
