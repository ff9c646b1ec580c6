# %% [markdown]
# # 7. A2C
#
# [REINFORCE](06_reinforce.ipynb) multiplies each log-probability by a return less a baseline. This page learns the
# baseline, and replaces most of the return by it: the advantage actor-critic.
#
# **Before:** [6b. The policy gradient theorem](06b_policy_gradient_theorem.ipynb) · **Next:** [7b.
# Traces](07b_traces.ipynb) · [glossary](glossary.md)
#
# ## Actor and critic
#
# The **actor** is the policy $\pi_\theta$. The **critic** $V_\phi(s)$ is a network with weights $\phi$ that
# estimates $V^\pi(s)$, by regression on returns or on bootstrapped targets, as on page 3. The weight of an action
# is an estimate $\hat A_t$ of its **advantage** $A^\pi(s_t, a_t) = Q^\pi(s_t, a_t) - V^\pi(s_t)$: how much better
# it is than what the policy does on average.
#
# The TD error $\delta_t = r_t + \gamma V_\phi(s_{t+1}) - V_\phi(s_t)$, in which a terminal state has the value 0, is
# such an estimate. If the critic is exact, its mean given state and action is the advantage:
#
# $$\mathbb{E}[\delta_t \mid s_t, a_t] = \mathbb{E}[r_t + \gamma V^\pi(s_{t+1}) \mid s_t, a_t] - V^\pi(s_t) =
# Q^\pi(s_t, a_t) - V^\pi(s_t).$$
#
# ## Generalised advantage estimation
#
# With n rewards before the bootstrap, the estimate is
# $\hat A_t^{(n)} = r_t + \dots + \gamma^{n-1} r_{t+n-1} + \gamma^n V_\phi(s_{t+n}) - V_\phi(s_t)$. It is a sum of
# TD errors, because the values between cancel in pairs:
#
# $$\sum_{k=0}^{n-1} \gamma^k \delta_{t+k} = \sum_{k=0}^{n-1} \gamma^k r_{t+k} + \sum_{k=0}^{n-1} \big[ \gamma^{k+1}
# V_\phi(s_{t+k+1}) - \gamma^k V_\phi(s_{t+k}) \big] = \hat A_t^{(n)}.$$
#
# Small $n$ has bias, large $n$ variance. **GAE** (Schulman et al. 2016,
# [arXiv:1506.02438](https://arxiv.org/abs/1506.02438)) takes all of them, with weights that fall by
# $\lambda \in [0, 1)$ per step and sum to 1; $\lambda = 1$ is the limit:
#
# $$\hat A_t = (1 - \lambda) \sum_{n=1}^{\infty} \lambda^{n-1} \hat A_t^{(n)}.$$
#
# Insert the sum of TD errors. $\delta_{t+k}$ occurs in every $\hat A^{(n)}$ with $n \ge k + 1$, so its total weight
# is
# $\gamma^k (1 - \lambda) (\lambda^k + \lambda^{k+1} + \dots) = \gamma^k (1 - \lambda)\, \lambda^k / (1 - \lambda)$,
# and
#
# $$\hat A_t = \sum_{k=0}^{\infty} (\gamma \lambda)^k\, \delta_{t+k}, \qquad \text{that is} \qquad \hat A_t =
# \delta_t + \gamma \lambda\, (1 - e_t)\, \hat A_{t+1},$$
#
# where $e_t$ is 1 at the end of an episode, terminated or cut off, and 0 otherwise. The right form is one pass
# backwards in time. $\lambda = 0$ is the TD error, $\lambda = 1$ is the return less the baseline. `functional.gae`
# computes it; the next cell checks it against the weighted sum of n-step estimates, on four random steps after
# which the values are known to be 0.

# %%
import torch
from helpers import final, fit, fit_seeds, keep, plot

from datamodules import RolloutDataModule
from rl_modules import A2C
from rl_modules import functional as F

generator = torch.Generator().manual_seed(0)
reward, value = torch.randn(2, 4, 1, generator=generator)
next_value = torch.cat([value[1:], torch.zeros(1, 1)])
terminated, no = torch.tensor([[False], [False], [False], [True]]), torch.zeros(4, 1, dtype=torch.bool)
gamma, lam = 0.9, 0.7

advantage = F.gae(reward, value, next_value, terminated, no, gamma, lam)
estimates = [F.n_step_returns(reward, next_value, terminated, no, gamma, n=n) - value for n in (1, 2, 3, 4)]
# From n = 4 on all estimates of the first step are equal; their weights sum to λ³.
weighted = (1 - lam) * sum(lam**n * estimates[n][0] for n in range(3)) + lam**3 * estimates[3][0]
print("GAE", advantage.squeeze(), "weighted sum at t = 0", weighted)

# %% [markdown]
# By hand: three rewards of 1, all values 0, $\gamma = 1$, the third step terminates. The TD errors are 1, 1, 1.
# $\lambda = 0$ gives (1, 1, 1), $\lambda = 1$ gives (3, 2, 1), and $\lambda = 1/2$ gives (1.75, 1.5, 1).

# %%
one, zero = torch.ones(3, 1), torch.zeros(3, 1)
end = torch.tensor([[False], [False], [True]])
for lam in (0.0, 0.5, 1.0):
    print("λ =", lam, F.gae(one, zero, zero, end, torch.zeros_like(end), gamma=1.0, gae_lambda=lam).squeeze().tolist())

# %% [markdown]
# ## The loss
#
# A2C (Mnih et al. 2016, [arXiv:1602.01783](https://arxiv.org/abs/1602.01783), with synchronous environments)
# minimises
#
# $$L = -\mathbb{E}\big[\hat A_t \log \pi_\theta(a_t \mid s_t)\big] + c_v\, \mathbb{E}\big[(V_\phi(s_t) -
# R_t)^2\big] - c_e\, \mathbb{E}\big[H(\pi_\theta(\cdot \mid s_t))\big], \qquad R_t = \hat A_t + V_\phi(s_t).$$
#
# $\hat A_t$ and $R_t$ are constants here. $c_v$ and $c_e$ are weights, and $H(\pi) = -\sum_a \pi(a) \log \pi(a)$ is
# the entropy, a bonus that keeps the policy from becoming certain too soon. With $\lambda = 1$ the regression
# target $R_t$ is the n-step return. Since the critic stands in for everything after the last step, an update needs
# no finished episode: five steps of eight environments suffice.
#
# The bias of a wrong critic is the price. If $V_\phi$ is off by a constant $c$ everywhere, the TD error is off by
# $(\gamma - 1) c$, for every action alike, which is a baseline and does no harm. (A transition that terminates is off
# by $-c$, because its successor has no value.) Errors that differ between the
# next states of two actions do: they favour the wrong action until the critic has learned.
#
# ## The run


# %%
def train(seed, learning_rate="lin_2e-3", **changes):
    """Trains A2C on CartPole for 150,000 transitions; returns the curves."""
    model = A2C(learning_rate=learning_rate, **changes)
    data = RolloutDataModule("CartPole-v1", seed=seed, n_envs=8, n_steps=5, rollouts_per_epoch=100,
                             total_timesteps=150_000, eval_freq=10_000, n_eval_episodes=10)  # fmt: skip
    return fit(model, data)


runs = {"A2C": fit_seeds(train), "broken: the critic does not learn": fit_seeds(lambda seed: train(seed, vf_coef=0.0))}
plot(runs, "eval/mean_reward", "transitions", "mean return, 10 episodes", best=500)
for name, several in runs.items():
    print(f"{name:34} final returns of three seeds", final(several, "eval/mean_reward"))
keep("A2C", runs["A2C"], "eval/mean_reward")

# %% [markdown]
# **How to read it.** A2C makes an update per 40 transitions, 3,750 in all, each from a tiny batch. Its curve rises
# early and is rough. The step size decays to 0, and the last third is quiet at 500. The **explained variance**,
# $1 - \operatorname{Var}[R - V_\phi] / \operatorname{Var}[R]$, says whether the critic predicts the returns: 1 is
# perfect, 0 is no better than a constant, and below 0 is worse than a constant. It is noisy on batches of 40, and
# near the end, when nearly all returns are equal, there is nothing left to explain: the denominator vanishes and
# the number falls far below 0, which is no fault.

# %%
plot(runs, "train/explained_variance", "transitions", "explained variance of the critic")

# %% [markdown]
# **What failure looks like.** In the second run the value loss has weight 0. The critic keeps its random start, and
# an advantage over five steps sees neither the fall of the pole later on nor that one state is better than another.
# Here the return shows the fault first: the two runs part in it early, and in the explained variance, noisy on batches
# of 40, late. The explained variance tells the cause. A critic that explains nothing, for whatever reason (its step
# size, its scale of rewards, a wrong target), makes an actor-critic a REINFORCE of five steps.
#
# ## Exercises
#
# **Exercise 7.1.** Rewards 1 and 1, values 2 and 3, and the rollout stops at a state of value 4 ($\gamma = 1$,
# $\lambda = 1/2$). Compute the advantages.
#
# <details markdown="1"><summary>Answer</summary>
#
# $\delta_0 = 1 + 3 - 2 = 2$, $\delta_1 = 1 + 4 - 3 = 2$. So $\hat A_1 = 2$ and $\hat A_0 = 2 + 0.5 \cdot 2 = 3$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# value, next_value = torch.tensor([[2.0], [3.0]]), torch.tensor([[3.0], [4.0]])
# no = torch.zeros(2, 1, dtype=torch.bool)
# assert F.gae(torch.ones(2, 1), value, next_value, no, no, 1.0, 0.5).squeeze().tolist() == [3.0, 2.0]
# ```
#
# </details>
#
# **Exercise 7.2.** An episode is cut off by a time limit after the first step of 7.1; the second step belongs to
# the next episode. Which advantages result?
#
# <details markdown="1"><summary>Answer</summary>
#
# $\delta_0$ keeps its bootstrap, since the state went on: 2. The sum stops there: $\hat A_0 = 2$, $\hat A_1 = 2$.
# Had the episode terminated, $\hat A_0$ would be $1 - 2 = -1$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# value, next_value = torch.tensor([[2.0], [3.0]]), torch.tensor([[3.0], [4.0]])
# no, first = torch.zeros(2, 1, dtype=torch.bool), torch.tensor([[True], [False]])
# assert F.gae(torch.ones(2, 1), value, next_value, no, first, 1.0, 0.5).squeeze().tolist() == [2.0, 2.0]
# assert F.gae(torch.ones(2, 1), value, next_value, first, no, 1.0, 0.5).squeeze().tolist() == [-1.0, 2.0]
# ```
#
# </details>
#
# **Exercise 7.3.** How many steps back does half of the weight of a TD error reach for $\gamma = 0.99$,
# $\lambda = 0.95$?
#
# <details markdown="1"><summary>Answer</summary>
#
# $(\gamma\lambda)^k = 1/2$ at $k = \log 2 / -\log 0.9405 = 11.3$ steps.
#
# ```python
# import math
#
# import torch
# from rl_modules import functional as F
#
# assert round(math.log(2) / -math.log(0.99 * 0.95), 1) == 11.3
# reward, zero, no = torch.zeros(20, 1), torch.zeros(20, 1), torch.zeros(20, 1, dtype=torch.bool)
# reward[15] = 1.0  # the only TD error
# advantage = F.gae(reward, zero, zero, no, no, 0.99, 0.95).squeeze()
# assert advantage[15 - 11] > 0.5 > advantage[15 - 12]
# ```
#
# </details>
#
# ## What is open
#
# Each update makes one small step and throws its experience away. A longer step risks the collapse that page 6
# shows, because the gradient says nothing about where it stops to hold. [TRPO](08_trpo.ipynb) asks how far one may
# go.
#
# **Sources.** Sutton & Barto 2018, section 13.5; Mnih et al. 2016; Schulman et al. 2016.
