"""Reward model: learns from noisy choices which of two walks between two letters is the better one.

python -m recipes.reward_model        runs this program, 3 min on one CPU core
python -m recipes.reward_model fit    trains with configs/reward_model/paths.yaml through the command line
"""

from datamodules import PreferenceDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import RewardModel


def main(max_steps: int = 1200, n_train: int = 50_000) -> float:
    """Trains for ``max_steps`` steps on ``n_train`` pairs; returns the accuracy on held-out pairs."""
    data = PreferenceDataModule(task="paths", n_train=n_train, n_eval=2048, batch_size=64, eval_steps=200)
    model = RewardModel(learning_rate=1e-3, warmup_steps=50, logging_steps=25)
    trainer = Trainer(max_steps=max_steps, accelerator="cpu", threads=None, evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    model.export("exported/reward_model")  # a Hugging Face directory
    return result["eval/accuracy"]


if __name__ == "__main__":
    run_program(main, default_config="reward_model/paths.yaml")
