# %% [markdown]
# # PPO
#
# PPO reaches the same effect with a plain loss, which does not improve further once the ratio is beyond 1 ± ε (Schulman
# et al. 2017):
#
# ```
# L = -mean min( ρ A, clip(ρ, 1-ε, 1+ε) A )
# ```
#
# `functional.ppo_clip_loss` computes L. The loss has a gradient if the ratio is inside the range, or outside on the
# side that lowers the objective:

# %%
import matplotlib.pyplot as plt
import torch
from helpers import fit, plot

from datamodules import RolloutDataModule
from rl_modules import PPO
from rl_modules import functional as F

ratio = torch.linspace(0.5, 1.5, 101)
_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for advantage in (1.0, -1.0):
    loss = [F.ppo_clip_loss(r.log()[None], torch.zeros(1), torch.tensor([advantage]), 0.2).item() for r in ratio]
    axes.plot(ratio, loss, label=f"A = {advantage:+.0f}")
axes.set(xlabel="ratio ρ", ylabel="loss")
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %%
data = RolloutDataModule(
    "CartPole-v1", n_envs=8, n_steps=32, batch_size=256, n_epochs=20, total_timesteps=30_000, eval_freq=0
)
model = PPO(gamma=0.98, gae_lambda=0.8, learning_rate="lin_1e-3", clip_range="lin_0.2", log_every=4)
curves = fit(model, data)

# %%
plot({"PPO": curves}, "rollout/ep_rew_mean", "transitions", "mean return of training", best=500)

# %%
plot({"PPO": curves}, "train/clip_fraction", "transitions", "share of clipped ratios")

# %% [markdown]
# [PPO in one page](../ppo_in_one_page.md) is the same algorithm as one loop without Lightning.
