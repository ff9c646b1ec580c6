# %% [markdown]
# # Reward model
#
# If a reward is hard to define, people can still compare two answers. The Bradley-Terry model gives the probability of
# a comparison:
#
# ```
# P(chosen beats rejected) = σ(r_c - r_r)            L = -mean log σ(r_c - r_r)
# ```
#
# `functional.bradley_terry_loss` computes L. In a minimal example three players with one strength each replace the
# texts, and the exact solution is known (Zermelo 1929):

# %%
import torch
from helpers import fit, plot

from datamodules import PreferenceDataModule
from recipes.bradley_terry import PLAYERS, WINS, fit_strengths, maximum_likelihood_strengths
from rl_modules import RewardModel
from rl_modules import functional as F

print("loss of a reward that cannot tell", F.bradley_terry_loss(torch.zeros(1), torch.zeros(1)).item(), "= log 2")
fitted, exact = fit_strengths(), maximum_likelihood_strengths(PLAYERS, WINS)
for player, a, b in zip(PLAYERS, fitted.tolist(), exact.tolist(), strict=True):
    print(f"{player}  gradient descent {a:+.6f}   exact {b:+.6f}")

# %% [markdown]
# The same loss trains a language model with a linear head on comparisons of paths in a hidden graph. This cell trains a
# tiny model for a few seconds; [the full run](../language/reward_model.md) reaches an accuracy of .881, where .886 is
# the best possible.

# %%
config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 2}  # fmt: skip
data = PreferenceDataModule("paths", batch_size=64, eval_steps=25, n_eval=256)
model = RewardModel(model_config=config, learning_rate=2e-3, warmup_steps=10, logging_steps=5)
curves = fit(model, data, max_steps=200)

# %%
plot({"loss": curves}, "train/loss", "optimizer steps", "loss (log 2 = 0.693: no idea)")

# %%
plot({"held-out comparisons": curves}, "eval/accuracy", "optimizer steps", "accuracy")
