# %% [markdown]
# # REINFORCE
#
# Until here a policy followed from values. REINFORCE improves the policy itself: make likelier what was followed by a
# high return (Williams 1992),
#
# ```
# L = -mean_t log π(a_t|s_t) G_t
# ```
#
# `functional.policy_gradient_loss`. Its gradient is an estimate of the gradient of the expected return.

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
# The return of the whole episode as weight, and the reward-to-go: rewards before an action say nothing about it, so
# leaving them out lowers the variance.


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
# lowers the variance further, by a critic.
