# %% [markdown]
# # REINFORCE
#
# The previous algorithms derive a policy from values. REINFORCE optimizes the policy itself: it makes actions with a
# high return likelier (Williams 1992):
#
# ```
# L = -mean_t log π(a_t|s_t) G_t
# ```
#
# `functional.policy_gradient_loss` computes L, whose gradient estimates the gradient of the expected return.

# %%
import torch
from helpers import fit, plot

from datamodules import RolloutDataModule
from rl_modules import REINFORCE
from rl_modules import functional as F

log_prob = torch.tensor([-0.7, -0.7], requires_grad=True)
F.policy_gradient_loss(log_prob, torch.tensor([1.0, 3.0])).backward()
print("gradient per log-probability", log_prob.grad)


# %% [markdown]
# This cell compares two weights: the return of the whole episode, and the reward-to-go. An action does not change
# earlier rewards, so omitting them lowers the variance.


# %%
def cartpole():
    """The same experience for both."""
    return RolloutDataModule("CartPole-v1", n_envs=8, n_steps=256, total_timesteps=60_000, eval_freq=0)


curves = {
    psi: fit(REINFORCE(psi=psi, normalize_advantage=True, learning_rate=3e-3), cartpole())
    for psi in ("return", "reward_to_go")
}

# %%
plot(curves, "rollout/ep_rew_mean", "transitions", "mean return of training", best=500)

# %% [markdown]
# The two hardly differ here: the weights are normalised over the rollout, and in CartPole each step's reward is 1. A2C
# lowers the variance further with a critic.
