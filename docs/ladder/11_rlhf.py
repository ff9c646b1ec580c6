# %% [markdown]
# # RLHF
#
# In RLHF a reward model replaces the environment. The policy generates answers, the reward model scores them, and PPO
# improves the policy. A KL penalty to a reference policy limits the exploitation of the reward model's errors (Ziegler
# et al. 2019; Ouyang et al. 2022):
#
# ```
# r_t = -β (log π(y_t) - log π_ref(y_t)) + [t is the last token] score
# ```
#
# `functional.rlhf_rewards` computes these rewards, `functional.gae` the advantages, and `functional.ppo_clip_loss` the
# loss.

# %%
import tempfile
from pathlib import Path

import torch
from helpers import fit, plot

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import RLHFPPO, SFT, RewardModel
from rl_modules import functional as F

mask = torch.tensor([[True, True, True]])
log_prob, reference = torch.full((1, 3), -1.0), torch.full((1, 3), -1.5)
print(F.rlhf_rewards(torch.tensor([2.0]), log_prob, reference, mask, beta=0.1))

# %% [markdown]
# This cell runs three stages of a few seconds each: supervised fine-tuning on walks in a hidden graph, a reward model,
# and PPO.

# %%
folder = Path(tempfile.mkdtemp())
config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 2}  # fmt: skip
sft = SFT(model_config=config, learning_rate=3e-3, warmup_steps=10, max_completion_length=16)
fit(sft, InstructionDataModule("paths", batch_size=64, eval_steps=0), max_steps=150)
_ = sft.export(folder / "sft")
judge = RewardModel(model_name_or_path=str(folder / "sft"), learning_rate=1e-3, warmup_steps=10)
fit(judge, PreferenceDataModule("paths", batch_size=64, eval_steps=0), max_steps=150)
_ = judge.export(folder / "judge")

# %%
policy = RLHFPPO(
    model_name_or_path=str(folder / "sft"), reward_model_name_or_path=str(folder / "judge"), learning_rate=3e-4,
    beta=0.05, max_completion_length=16, logging_steps=2,
)  # fmt: skip
data = PromptDataModule("paths", batch_size=64, reward_funcs=[], eval_steps=0)
curves = fit(policy, data, max_steps=60)

# %%
plot({"the reward model's score": curves}, "train/objective/scores", "optimizer steps", "score")

# %%
plot({"KL to the reference": curves}, "train/objective/kl", "optimizer steps", "nats per completion")

# %% [markdown]
# [The pipeline](../language/rlhf.md) runs the stages at full length and compares them with the true optimum.
