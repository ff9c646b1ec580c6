# %% [markdown]
# # GRPO
#
# GRPO also removes the critic. The mean reward of G answers to the same question replaces its estimate (Shao et al.
# 2024):
#
# ```
# A_i = (r_i - mean of the group) / (std of the group + 1e-4)
# L = Σ over tokens of -min( ρ_t A, clip(ρ_t, 1-ε, 1+ε_high) A ), divided as loss_type says
# ```
#
# `functional.group_advantages` and `functional.grpo_loss` compute them. The reward can be a program that checks the
# answer.

# %%
import tempfile
from pathlib import Path

import torch
from helpers import fit, plot

from datamodules import InstructionDataModule, PromptDataModule
from rl_modules import GRPO, SFT
from rl_modules import functional as F

reward = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
print(F.group_advantages(reward, num_generations=4))

# %% [markdown]
# The second group has equal rewards and therefore advantages of 0. The next cell learns sums of one digit, first from a
# few demonstrations, so that some answers are right, then from the reward only.

# %%
folder = Path(tempfile.mkdtemp())
config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 2}  # fmt: skip
sums = {"task": "addition", "task_kwargs": {"n_digits": 1}, "eval_steps": 0}
sft = SFT(model_config=config, learning_rate=3e-3, warmup_steps=10, max_completion_length=4)
fit(sft, InstructionDataModule(**sums, batch_size=32), max_steps=120)
_ = sft.export(folder / "sft")

# %%
policy = GRPO(model_name_or_path=str(folder / "sft"), learning_rate=1e-3, max_completion_length=4, logging_steps=2)
data = PromptDataModule(**sums, num_generations=8, batch_size=128)
curves = fit(policy, data, max_steps=100)

# %%
plot({"GRPO": curves}, "train/reward", "optimizer steps", "share of right answers, sampled", best=1.0)

# %%
plot({"GRPO": curves}, "train/frac_reward_zero_std", "optimizer steps", "share of groups that teach nothing")

# %% [markdown]
# This is the last page of the ladder. The same class and the same file run on pretrained checkpoints:
# [GRPO](../language/grpo.md), [R1's pipeline](../language/r1.md).
