# %% [markdown]
# # 6. REINFORCE
#
# The algorithms so far learn values, and derive a policy by a maximum over actions. [DQN](05_dqn.ipynb) left the
# question whether a policy can be improved directly. This page derives the gradient of the expected return, and
# follows it.
#
# **Before:** [5b. Distributions of returns](05b_distributions.ipynb) · **Next:** [6b. The policy gradient
# theorem](06b_policy_gradient_theorem.ipynb) · [glossary](glossary.md)
#
# ## The policy gradient theorem
#
# The policy $\pi_\theta(a \mid s)$ is a network with weights $\theta$ that maps a state to a distribution over
# actions. An episode is a **trajectory** $\tau = (s_0, a_0, s_1, a_1, \dots)$ with return
# $G(\tau) = \sum_t \gamma^t r_t$. Its probability is a product,
#
# $$p_\theta(\tau) = p(s_0) \prod_t \pi_\theta(a_t \mid s_t)\, P(s_{t+1} \mid s_t, a_t),$$
#
# with $p(s_0)$ the distribution of the first state. The **objective** is the expected return,
# $J(\theta) = \sum_\tau p_\theta(\tau)\, G(\tau)$. Its gradient is a sum over all trajectories, which cannot be
# computed. It becomes a mean, which can be sampled, by the **log-derivative trick**: from
# $\nabla \log p = \nabla p / p$ follows $\nabla p = p\, \nabla \log p$, and therefore
#
# $$\nabla_\theta J = \sum_\tau \nabla_\theta p_\theta(\tau)\, G(\tau) = \sum_\tau p_\theta(\tau)\, \nabla_\theta
# \log p_\theta(\tau)\, G(\tau) = \mathbb{E}_{\tau}\big[\, \nabla_\theta \log p_\theta(\tau)\; G(\tau) \,\big].$$
#
# The logarithm turns the product into a sum, and the terms of the environment, $\log p(s_0)$ and $\log P$, do not
# contain $\theta$. They vanish:
#
# $$\nabla_\theta J = \mathbb{E}_{\tau}\Big[\, \sum_t \nabla_\theta \log \pi_\theta(a_t \mid s_t)\; G(\tau) \Big].$$
#
# Everything in the bracket can be measured without knowing $P$. Each action taken is made likelier in proportion to
# the return of its episode. Return and reward need not be differentiable.
#
# ## Why a baseline costs nothing
#
# Let $b(s)$ be any number that depends on the state and not on the action. Then
#
# $$\begin{aligned}\mathbb{E}_{a \sim \pi_\theta}\big[\, b(s)\, \nabla_\theta \log \pi_\theta(a \mid s) \,\big] &=
# b(s) \sum_a \pi_\theta(a \mid s) \frac{\nabla_\theta \pi_\theta(a \mid s)}{\pi_\theta(a \mid s)} \\ &= b(s)\,
# \nabla_\theta \sum_a \pi_\theta(a \mid s) = b(s)\, \nabla_\theta 1 = 0.\end{aligned}$$
#
# Two conclusions follow. **Earlier rewards may be dropped:** given the past, $r_k$ with $k < t$ is such a number
# for the action $a_t$, so its product with $\nabla \log \pi_\theta(a_t \mid s_t)$ is 0 on average. What remains of
# $G(\tau)$ is $\gamma^t G_t$, the **reward-to-go**. **A baseline may be subtracted:** $G_t - b(s_t)$ has the same
# mean gradient as $G_t$, and a smaller variance if $b$ is close to the expected return. The natural choice is
# $b = V^\pi$.
#
# The gradient thus has one form with several weights $\Psi_t$ (Schulman et al. 2016,
# [arXiv:1506.02438](https://arxiv.org/abs/1506.02438)):
#
# $$\nabla_\theta J = \mathbb{E}\Big[\, \sum_t \Psi_t\, \nabla_\theta \log \pi_\theta(a_t \mid s_t) \Big]$$
#
# | $\Psi_t$ | argument `psi` | remark |
# |---|---|---|
# | $G_0$, the return of the whole episode | `return` | no bias, largest variance |
# | $G_t$, the reward-to-go | `reward_to_go` | no bias |
# | $G_t - V(s_t)$ | `baseline` | no bias, for any $V$ |
# | $Q^\pi(s_t, a_t)$ | | the mean of $G_t$ given state and action; no bias |
# | $A^\pi(s_t, a_t) = Q^\pi - V^\pi$, the **advantage** | `advantage` | small variance; must be estimated |
# | $r_t + \gamma V(s_{t+1}) - V(s_t)$, the TD error | `advantage`, with `gae_lambda=0` | biased where $V$ is wrong |
#
# In the discounted problem a factor $\gamma^t$ stands before each $\Psi_t$ but that of the first row. Practice
# omits it, because it would nearly ignore the late steps of long episodes; so do the algorithms here.
#
# ## Checked against the exact gradient
#
# In the maze everything can be computed. Here each step costs 1, so that there are rewards before the end. The
# policy is the **softmax** of a table $\theta$,
# $\pi_\theta(a \mid s) = e^{\theta(s, a)} / \sum_b e^{\theta(s, b)}$. The table is 0, so the policy is the random
# walk. The exact gradient comes from differentiating the solution of Bellman's equation, the estimates from 20,000
# walks. The table shows the derivative of $J$ with respect to the entry of "right" in the start cell.

# %%
import torch
from helpers import final, fit, fit_seeds, keep, known, plot

from datamodules import RolloutDataModule
from rl_modules import REINFORCE
from rl_modules import functional as F

maze, gamma = known("Maze-v0"), 0.9
theta = torch.zeros(7, 4, dtype=torch.float64, requires_grad=True)
policy = theta.softmax(-1)
step_reward = maze.reward.clone()
step_reward[:4] -= 1.0  # cells 0 to 3, in which one acts
chain, chain_reward = torch.einsum("sa,sat->st", policy, maze.transition), (policy * step_reward).sum(-1)
value = torch.linalg.solve(torch.eye(7) - gamma * chain, chain_reward)
[exact] = torch.autograd.grad(value[0], theta)  # J is the value of the start

generator = torch.Generator().manual_seed(0)
state, steps = torch.zeros(20_000, dtype=torch.long), []
for _ in range(150):
    action = torch.randint(4, state.shape, generator=generator)
    steps.append((state, action, step_reward[state, action]))
    state = torch.multinomial(maze.transition[state, action], 1, generator=generator)[:, 0]
states, actions, rewards = (torch.stack(column) for column in zip(*steps, strict=True))

no = torch.zeros_like(states, dtype=torch.bool)
to_go = F.discounted_returns(rewards, torch.zeros_like(rewards), no, no, gamma)
discount = gamma ** torch.arange(150, dtype=torch.float64)[:, None]
v = value.detach()[states]
weights = {"return": to_go[0].expand_as(to_go), "reward-to-go": discount * to_go, "baseline": discount * (to_go - v)}
# ∂ log π(a|s) / ∂ θ(start, right) is [a = right] - 1/4 in the start cell, and 0 elsewhere.
score = (states == 0) * ((actions == 2).double() - 0.25)
print(f"exact         {float(exact[0, 2]):.3f}")
for name, psi in weights.items():
    estimate = (score * psi).sum(0)  # one number per walk
    print(f"{name:13} {float(estimate.mean()):.3f} ± {float(estimate.std()) / 20_000**0.5:.3f}   "
          f"standard deviation of one walk {float(estimate.std()):.2f}")  # fmt: skip

# %% [markdown]
# All three agree with the exact gradient within their error, and the standard deviation falls from line to line.
# Half the standard deviation saves three quarters of the episodes.
#
# A program minimises a loss. `functional.policy_gradient_loss` returns
# $L = -\frac1n \sum_i \Psi_i \log \pi_\theta(a_i \mid s_i)$, whose gradient is minus the estimate. Its value says
# nothing about progress. By hand: two log-probabilities with weights 1 and 3 receive the gradients $-1/2$ and
# $-3/2$.

# %%
log_prob = torch.tensor([-0.7, -0.7], requires_grad=True)
F.policy_gradient_loss(log_prob, torch.tensor([1.0, 3.0])).backward()
print("gradient per log-probability", log_prob.grad)

# %% [markdown]
# ## The run: CartPole
#
# Eight poles are balanced side by side. After 256 steps of each, one gradient step is made on all 2,048
# transitions. The weights are shifted and scaled to mean 0 and variance 1 in each batch: the batch mean is a
# baseline, and the scale makes the step size independent of the size of the returns. The optimum is 500.


# %%
def train(seed, psi="reward_to_go", learning_rate="lin_5e-3", normalize=True):
    """Trains REINFORCE on CartPole for 150,000 transitions; returns the curves."""
    model = REINFORCE(psi=psi, normalize_advantage=normalize, learning_rate=learning_rate)
    data = RolloutDataModule("CartPole-v1", seed=seed, n_envs=8, n_steps=256, total_timesteps=150_000,
                             eval_freq=10_000, n_eval_episodes=10)  # fmt: skip
    return fit(model, data)


runs = {
    "reward-to-go": fit_seeds(train),
    "return": fit_seeds(lambda seed: train(seed, psi="return")),
    "broken: α = 0.1": fit_seeds(lambda seed: train(seed, learning_rate=0.1)),
}
plot(runs, "eval/mean_reward", "transitions", "mean return, 10 episodes", best=500)
for name, several in runs.items():
    print(f"{name:16} final returns of three seeds", final(several, "eval/mean_reward"))
keep("REINFORCE", runs["reward-to-go"], "eval/mean_reward")

# %% [markdown]
# **How to read it.** All seeds reach 500, and whole-episode returns do nearly as well here: every step's reward is
# 1, and the batch mean takes most of the variance away. The curves rise with dips, since each step uses a fresh and
# noisy estimate. The policy's **entropy**, the mean of $-\log \pi_\theta(a \mid s)$ (in **nats**, the unit of the
# natural logarithm), starts at $\log 2 = 0.69$ for two equally likely actions and falls slowly as the policy
# becomes certain.

# %%
for run in [run for several in runs.values() for run in several]:
    run["entropy"] = [(step, -value) for step, value in run["train/entropy_loss"]]
plot(runs, "entropy", "transitions", "entropy of the policy (nats)")

# %% [markdown]
# **What failure looks like.** With a step size 20 times larger the entropy falls to 0 within a few updates. A
# policy that is certain does not explore, and its gradient vanishes: if one action has probability 1, then
# $\nabla_\theta \log \pi_\theta$ of it is 0. The return stays low, and only luck leads out of it, as the wide band
# shows. An entropy that collapses while the return is still bad is the first thing to look for in every
# policy-gradient run. The remedies are a smaller step, or a bonus for entropy in the loss.
#
# ## Exercises
#
# **Exercise 6.1.** A policy is the softmax of two numbers $z = (0, 0)$, its **logits**. Action 0 was taken and has
# the weight $\Psi = 2$. Compute the gradient of `policy_gradient_loss` with respect to the logits.
#
# <details markdown="1"><summary>Answer</summary>
#
# $\partial \log \pi(0) / \partial z_j = [j = 0] - \pi(j)$, so $(1/2, -1/2)$, times $-\Psi$: $(-1, 1)$. Descent
# raises the first logit.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# logits = torch.zeros(1, 2, requires_grad=True)
# F.policy_gradient_loss(logits.log_softmax(-1)[:, 0], torch.tensor([2.0])).backward()
# assert logits.grad.tolist() == [[-1.0, 1.0]]
# ```
#
# </details>
#
# **Exercise 6.2.** One state, two actions with probability 1/2, rewards 101 and 99. Compute mean and variance of
# the estimate $(r - b)\, \partial \log \pi(a) / \partial z_0$ for $b = 0$ and for $b = 100$.
#
# <details markdown="1"><summary>Answer</summary>
#
# The derivative is $+1/2$ for action 0 and $-1/2$ for action 1. With $b = 0$ the estimates are $50.5$ and $-49.5$:
# mean 0.5, variance $50^2 = 2500$. With $b = 100$ they are $0.5$ and $0.5$: mean 0.5, variance 0.
#
# ```python
# import statistics
#
# for b, variance in ((0, 2500), (100, 0)):
#     estimates = [(101 - b) * 0.5, (99 - b) * -0.5]
#     assert statistics.mean(estimates) == 0.5 and statistics.pvariance(estimates) == variance
# ```
#
# </details>
#
# **Exercise 6.3.** May the baseline depend on the action? Take the problem of 6.2 and $b(a) = r(a)$.
#
# <details markdown="1"><summary>Answer</summary>
#
# No. Then every weight is 0, the estimate is always 0, and its mean is not the gradient, 0.5. The proof needs $b$
# outside the sum over actions.
#
# ```python
# rewards, score = (101, 99), (0.5, -0.5)
# gradient = sum(0.5 * r * s for r, s in zip(rewards, score))
# with_action_baseline = sum(0.5 * (r - r) * s for r, s in zip(rewards, score))
# assert gradient == 0.5 and with_action_baseline == 0
# ```
#
# </details>
#
# ## What is open
#
# The best simple baseline is $V^\pi$, which is unknown, and the returns still contain the noise of all later steps.
# [A2C](07_a2c.ipynb) learns $V$ with a second network, and uses it twice: as the baseline, and in place of the
# later rewards.
#
# **Sources.** Williams 1992; Sutton et al. 1999 (policy gradient theorem); Greensmith, Bartlett & Baxter 2004
# (baselines); Sutton & Barto 2018, chapter 13.
