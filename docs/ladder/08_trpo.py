# %% [markdown]
# # TRPO
#
# A gradient gives the direction of a step, but not its length. TRPO takes the largest step that keeps the new policy
# close to the old one (Schulman et al. 2015):
#
# ```
# maximize  mean ρ A    subject to  mean KL(π_old || π) ≤ δ,         ρ = π(a|s) / π_old(a|s)
# step = sqrt(2δ / xᵀHx) x,   H x = g,   H the Fisher matrix, g the gradient
# ```
#
# `functional.conjugate_gradient` solves H x = g with products H v only; a line search then shortens the step until the
# constraint holds.

# %%
import torch
from helpers import fit, plot

from datamodules import RolloutDataModule
from rl_modules import TRPO
from rl_modules import functional as F

matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
solution = F.conjugate_gradient(lambda v: matrix @ v, torch.tensor([1.0, 2.0]))
print("x", solution, "Hx", matrix @ solution)

# %%
data = RolloutDataModule("CartPole-v1", n_envs=2, n_steps=512, total_timesteps=40_960, eval_freq=0)
model = TRPO(target_kl=0.02, gae_lambda=0.98, cg_damping=1e-3, n_critic_updates=20, batch_size=512)
curves = fit(model, data)

# %%
plot({"TRPO": curves}, "rollout/ep_rew_mean", "transitions", "mean return of training", best=500)

# %%
plot({"KL of the accepted step": curves}, "train/approx_kl", "transitions", "nats", best=None)

# %% [markdown]
# No step exceeds δ = 0.02.
