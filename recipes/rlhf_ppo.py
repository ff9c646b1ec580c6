"""RLHF with PPO: a policy of walks learns from a reward model, trained on comparisons, to take the shortest way.

python -m recipes.rlhf_ppo        runs this program with its three stages, 6 min on one CPU core
python -m recipes.rlhf_ppo fit    trains the last stage with configs/rlhf_ppo/paths.yaml through the command line
"""

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from recipes.program import run_program
from rl_modules import RLHFPPO, SFT, RewardModel

SIZE = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
WALKS: dict = {"task": "paths", "task_kwargs": {"template": "{goal}<{start}"}, "batch_size": 128}


def main(sft_steps: int = 500, reward_steps: int = 1600, ppo_steps: int = 800, n_train: int = 50_000) -> float:
    """Trains each stage for its steps, the reward model on ``n_train`` pairs; returns the policy's mean utility."""

    def fit(model: L.LightningModule, data: L.LightningDataModule, max_steps: int) -> L.Trainer:
        logger = TensorBoardLogger("logs", name=f"{type(model).__name__}-paths")
        trainer = L.Trainer(max_steps=max_steps, accelerator="cpu", logger=logger, enable_checkpointing=False)
        trainer.fit(model, datamodule=data)
        return trainer

    policy = SFT(model_config=SIZE, learning_rate=2e-3, warmup_steps=20, max_completion_length=32)
    fit(policy, InstructionDataModule(n_eval=0, **WALKS), sft_steps)
    sft = str(policy.export("exported/rlhf_sft"))

    judge = RewardModel(sft, learning_rate=1e-3, warmup_steps=20)
    fit(judge, PreferenceDataModule(n_train=n_train, n_eval=0, **WALKS), reward_steps)
    reward = str(judge.export("exported/rlhf_reward_model"))

    model = RLHFPPO(
        sft,
        reward_model_name_or_path=reward,
        beta=0.5,
        cliprange_value=None,
        missing_eos_penalty=1.0,
        learning_rate=5e-4,
        warmup_steps=10,
        max_completion_length=32,
        local_rollout_forward_batch_size=512,
    )
    data = PromptDataModule(
        reward_funcs=["accuracy", "utilities"],
        num_generations=1,
        steps_per_generation=4,
        num_iterations=2,
        n_eval=64,
        eval_num_generations=8,
        eval_temperature=1.0,
        **WALKS,
    )
    [result] = fit(model, data, ppo_steps).test(model, datamodule=data)
    return result["eval/rewards/utilities"]


if __name__ == "__main__":
    run_program(main, default_config="rlhf_ppo/paths.yaml")
