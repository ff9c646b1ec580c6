"""Group relative policy optimization (GRPO): a policy that adds one answer in three correctly improves by reward alone.

python -m recipes.grpo        runs this program, the supervised start included: 6 min on one CPU core
python -m recipes.grpo fit    trains with configs/grpo/addition.yaml through the command line
"""

import lightning as L

from datamodules import InstructionDataModule, PromptDataModule
from recipes import Trainer
from recipes.program import run_program
from rl_modules import GRPO, SFT


def main(start_steps: int = 400, max_steps: int = 1000, n_eval: int = 512) -> float:
    """Trains ``start_steps`` steps of SFT and ``max_steps`` of GRPO; returns pass@1 on ``n_eval`` held-out sums."""
    demonstrations = InstructionDataModule(task="addition", batch_size=256, n_eval=0)
    start = SFT(learning_rate=1e-3, lr_scheduler_type="constant", max_completion_length=8)
    trainer = L.Trainer(max_steps=start_steps, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(start, datamodule=demonstrations)
    folder = start.export("exported/grpo_start")

    data = PromptDataModule(
        task="addition",
        num_generations=8,
        batch_size=256,
        dynamic_sampling=2,
        n_eval=n_eval,
        eval_steps=100,
        eval_num_generations=4,
        eval_temperature=1.0,
    )
    model = GRPO(str(folder), loss_type="grpo", learning_rate=3e-4, warmup_steps=10, max_completion_length=6)
    trainer = Trainer(max_steps=max_steps, accelerator="cpu", threads=None, evaluate=False)
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    return result["eval/pass@1"]


if __name__ == "__main__":
    run_program(main, default_config="grpo/addition.yaml")
