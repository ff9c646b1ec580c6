# %% [markdown]
# # A2C
#
# A critic V(s) estimates the expected return. The advantage is the difference between the actual and the expected
# return:
#
# ```
# A_t = Σ_k (γλ)^k δ_{t+k},    δ_t = r_t + γ (1 - terminated) V(s_{t+1}) - V(s_t)
# R_t = A_t + V(s_t)
# L = -mean log π(a|s) A + c_v (V(s) - R)² - c_e entropy
# ```
#
# `functional.gae`, `functional.policy_gradient_loss` and `functional.value_loss` compute them. With a critic, five
# steps suffice for an update, without waiting for the end of an episode.

# %%
import torch
from helpers import fit, plot

from datamodules import RolloutDataModule
from rl_modules import A2C
from rl_modules import functional as F

reward, value, next_value = torch.ones(3, 1), torch.zeros(3, 1), torch.zeros(3, 1)
end, no = torch.tensor([[False], [False], [True]]), torch.zeros(3, 1, dtype=torch.bool)
for lam in (0.0, 1.0):
    print("λ =", lam, F.gae(reward, value, next_value, end, no, gamma=1.0, gae_lambda=lam).squeeze())

# %%
data = RolloutDataModule("CartPole-v1", n_envs=8, n_steps=5, rollouts_per_epoch=50, total_timesteps=60_000, eval_freq=0)
curves = fit(A2C(), data)

# %%
plot({"A2C": curves}, "rollout/ep_rew_mean", "transitions", "mean return of training", best=500)

# %%
plot({"A2C": curves}, "train/entropy_loss", "transitions", "minus the policy's entropy (nats)")
