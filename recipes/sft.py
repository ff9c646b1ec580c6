"""Supervised fine-tuning (SFT): a model of a million parameters learns to add numbers of up to two digits.

python -m recipes.sft        runs this program, 5 min on one CPU core
python -m recipes.sft fit    trains with configs/sft/addition.yaml through the command line
"""

from datamodules import InstructionDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import SFT


def main(max_steps: int = 1000, n_eval: int = 512) -> float:
    """Trains for ``max_steps`` steps; returns the share of ``n_eval`` held-out sums that the model adds correctly."""
    data = InstructionDataModule(task="addition", batch_size=256, n_eval=n_eval, eval_steps=100)
    model = SFT(learning_rate=3e-3, warmup_steps=40, max_completion_length=8)
    trainer = Trainer(max_steps=max_steps, accelerator="cpu", threads=None, evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    model.export("exported/sft")  # a Hugging Face directory
    return result["eval/pass@1"]


if __name__ == "__main__":
    run_program(main, default_config="sft/addition.yaml")
