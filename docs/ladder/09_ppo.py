# %% [markdown]
# # 9. PPO
#
# [TRPO](08_trpo.ipynb) keeps the new policy near the old one with second derivatives and a line search. This page
# reaches the same effect with a loss for any optimizer, which may use each batch several times: proximal policy
# optimization.
#
# **Before:** [8. TRPO](08_trpo.ipynb) · **Next:** [9b. Continuous actions](09b_continuous_actions.ipynb) ·
# [glossary](glossary.md)
#
# ## The clipped surrogate
#
# As before, $\rho_t = \pi_\theta(a_t \mid s_t) / \pi_{\text{old}}(a_t \mid s_t)$, and the surrogate is the mean of
# $\rho_t \hat A_t$. Its maximum over $\theta$ without a constraint is useless: raise $\rho$ without bound wherever
# $\hat A > 0$. PPO (Schulman et al. 2017, [arXiv:1707.06347](https://arxiv.org/abs/1707.06347)) removes the
# incentive. With the **clip range** $\epsilon$, 0.2 for instance,
#
# $$L = -\mathbb{E}\Big[ \min\big( \rho_t \hat A_t,\; \operatorname{clip}(\rho_t, 1 - \epsilon, 1 + \epsilon)\, \hat
# A_t \big) \Big].$$
#
# Go through the cases.
#
# | advantage | ratio | the minimum is | gradient |
# |---|---|---|---|
# | $\hat A > 0$ | $\rho \le 1 + \epsilon$ | $\rho \hat A$ | yes: make the action likelier |
# | $\hat A > 0$ | $\rho > 1 + \epsilon$ | $(1 + \epsilon) \hat A$ | none: it is likely enough |
# | $\hat A < 0$ | $\rho \ge 1 - \epsilon$ | $\rho \hat A$ | yes: make it less likely |
# | $\hat A < 0$ | $\rho < 1 - \epsilon$ | $(1 - \epsilon) \hat A$ | none: it is unlikely enough |
#
# The clip alone would also stop the gradient for $\hat A > 0$ and $\rho < 1 - \epsilon$, and for $\hat A < 0$ and
# $\rho > 1 + \epsilon$, where a step has gone the wrong way. The minimum keeps it there, so that mistakes are
# corrected. In short: the loss is a pessimistic bound, equal to the surrogate to first order at $\rho = 1$, that
# stops rewarding change outside of $1 \pm \epsilon$.
#
# It does not *forbid* change. A sample without gradient can still be moved by the gradients of others, since all
# share weights, and the momentum of the optimizer carries on. The ratio is therefore watched by two numbers: the
# **clip fraction**, the share of samples with $|\rho - 1| > \epsilon$, and the KL. Some runs end an update early
# once the KL exceeds a target.
#
# `functional.ppo_clip_loss` is $L$. By hand, with $\epsilon = 0.2$: $\rho = 1.5$, $\hat A = 1$ gives $-1.2$ with
# gradient 0; $\rho = 1.5$, $\hat A = -1$ gives $+1.5$ with a gradient.

# %%
import matplotlib.pyplot as plt
import torch
from helpers import final, fit, fit_seeds, interval, keep, plot

from datamodules import RolloutDataModule
from rl_modules import PPO
from rl_modules import functional as F

for advantage in (1.0, -1.0):
    log_prob = torch.tensor([1.5]).log().requires_grad_()
    loss = F.ppo_clip_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), 0.2)
    loss.backward()
    print(f"A = {advantage:+.0f}: loss {float(loss):+.1f}, gradient {float(log_prob.grad):+.1f}")

ratio = torch.linspace(0.5, 1.5, 101)
_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for advantage in (1.0, -1.0):
    loss = [F.ppo_clip_loss(r.log()[None], torch.zeros(1), torch.tensor([advantage]), 0.2).item() for r in ratio]
    axes.plot(ratio, loss, label=f"A = {advantage:+.0f}")
axes.set(xlabel="ratio ρ", ylabel="loss of one sample")
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## The adaptive penalty
#
# The same paper describes an alternative that is closer to TRPO: a penalty on the KL instead of a bound,
#
# $$L = -\mathbb{E}\big[\rho_t \hat A_t\big] + \beta\, \mathbb{E}\big[\operatorname{KL}(\pi_{\text{old}}(\cdot \mid
# s_t) \,\Vert\, \pi_\theta(\cdot \mid s_t))\big].$$
#
# No weight $\beta$ fits all tasks and times, so it is adapted after each update towards a target KL: halved if the
# KL was below 2/3 of the target, doubled if it was above 3/2 of it. `functional.ppo_penalty_loss` and
# `functional.adapt_kl_coefficient` implement this, and `PPO(policy_objective="penalty")` uses them. The penalty to
# a *fixed* reference policy returns on the page on RLHF.

# %%
for kl in (0.005, 0.01, 0.02):
    print(f"KL {kl}, target 0.01: β = 1 becomes {F.adapt_kl_coefficient(1.0, kl, 0.01)}")

# %% [markdown]
# ## The algorithm
#
# 1. Collect a rollout, the same number of steps in each of several environments, with
# $\log \pi_{\text{old}}(a_t \mid s_t)$ and $V(s_t)$ noted.
# 2. Compute $\hat A_t$ by GAE and the targets $R_t = \hat A_t + V(s_t)$, once.
# 3. For several **epochs**, which are passes over the rollout: shuffle the transitions, cut them into minibatches,
# and take a gradient step on $L + c_v (V_\phi - R)^2 - c_e H$ with the advantages of the minibatch shifted and
# scaled to mean 0 and variance 1.
#
# In the first step all ratios are 1, and the gradient is A2C's. Only from the second step on does the clip matter:
# it is what makes several passes over the same data safe. [PPO in one page](../ppo_in_one_page.md) is this loop
# without a framework.
#
# ## The run
#
# The settings are those of `ppo/cartpole.yaml`: rollouts of 8 × 32 transitions, 20 epochs, step size and clip range
# decaying to 0. The broken run differs in one thing: its clip range is so wide that nothing is clipped.


# %%
def train(seed, clip_range="lin_0.2"):
    """Trains PPO on CartPole for 80,000 transitions; returns the curves."""
    model = PPO(gamma=0.98, gae_lambda=0.8, learning_rate="lin_1e-3", clip_range=clip_range, log_every=4)
    data = RolloutDataModule("CartPole-v1", seed=seed, n_envs=8, n_steps=32, batch_size=256, n_epochs=20,
                             total_timesteps=80_000, eval_freq=8_000, n_eval_episodes=10)  # fmt: skip
    return fit(model, data)


runs = {"PPO": fit_seeds(train), "broken: no clip": fit_seeds(lambda seed: train(seed, 100.0))}
plot(runs, "eval/mean_reward", "transitions", "mean return, 10 episodes", best=500)
for name, several in runs.items():
    mean, half = interval(final(several, "eval/mean_reward"))
    print(f"{name:15} final returns", final(several, "eval/mean_reward"), f"mean {mean:.0f} ± {half:.0f} (95 %)")
    points = [run["eval/mean_reward"] for run in several]
    lowest = [round(min(value for _, value in of_run[-(len(of_run) // 2) :]), 1) for of_run in points]
    print(f"{'':15} lowest return after half of the run", lowest)
keep("PPO", runs["PPO"], "eval/mean_reward")

# %% [markdown]
# **How to read it.** All seeds reach 500 and stay there. The mean clip fraction lies around 0.1 at first and falls,
# since step size and clip range decay together. Between 0.01 and 0.2 is usual. A clip fraction of 0 throughout means
# that the epochs are wasted or the step too small; one above 0.3 means that much of the batch no longer counts.

# %%
plot(runs, "train/clip_fraction", "transitions", "clip fraction")

# %% [markdown]
# **What failure looks like.** Without the clip, twenty epochs on 256 transitions move the policy as far as the
# optimizer can. Two seeds end at 500 all the same, and one does not; which one it is cannot be foreseen. All three fall
# back on the way, and they settle when the step size has decayed. The KL of an update, drawn below, is far larger at
# first. A detail like this one shows in the spread of the seeds: who tries one seed may conclude that the clip is not
# needed. (The clip fraction of that run is 0 since nothing lies outside a range of ±100: read a diagnostic together
# with its setting.)

# %%
plot(runs, "train/approx_kl", "transitions", "KL of an update (nats)")

# %% [markdown]
# ## Exercises
#
# **Exercise 9.1.** Four samples, $\epsilon = 0.2$: ratios (1.1, 1.5, 0.5, 0.5), advantages (1, 1, 1, -1). Compute
# the loss, and say which samples have a gradient.
#
# <details markdown="1"><summary>Answer</summary>
#
# The minima are 1.1, 1.2, 0.5, -0.8, so $L = -(1.1 + 1.2 + 0.5 - 0.8) / 4 = -0.5$. The first and the third have
# one.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# log_prob = torch.tensor([1.1, 1.5, 0.5, 0.5]).log().requires_grad_()
# loss = F.ppo_clip_loss(log_prob, torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, -1.0]), 0.2)
# loss.backward()
# assert abs(float(loss) + 0.5) < 1e-6 and (log_prob.grad != 0).tolist() == [True, False, True, False]
# ```
#
# </details>
#
# **Exercise 9.2.** Show on an example that the loss has the gradient of `policy_gradient_loss` while the policy is
# unchanged.
#
# <details markdown="1"><summary>Answer</summary>
#
# At $\rho = 1$, $\nabla (\rho \hat A) = \rho\, \hat A\, \nabla \log \pi = \hat A\, \nabla \log \pi$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# advantage = torch.tensor([1.0, -2.0, 3.0])
# a = torch.tensor([-0.1, -0.5, -2.0], requires_grad=True)
# b = a.detach().clone().requires_grad_()
# F.ppo_clip_loss(a, a.detach(), advantage, 0.2).backward()
# F.policy_gradient_loss(b, advantage).backward()
# assert torch.equal(a.grad, b.grad)
# ```
#
# </details>
#
# **Exercise 9.3.** One state, two actions, $\pi_{\text{old}} = (0.5, 0.5)$, $\hat A = (1, -1)$. Which policies
# minimise the clipped loss for $\epsilon = 0.2$, and which minimises the penalised loss for $\beta = 1$?
#
# <details markdown="1"><summary>Answer</summary>
#
# Clipped: every $\pi(0) \ge 0.6$. There both samples are clipped, and the loss is flat at -0.2. Penalised, with
# $p = \pi(0)$: the loss is $-(2p - 1) + 0.5 \log \frac{0.5}{p} + 0.5 \log \frac{0.5}{1 - p}$; its derivative
# $-2 - \frac{1}{2p} + \frac{1}{2(1-p)}$ is 0 at $p = (1 + \sqrt 5) / 4 = 0.809$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# old, advantage = torch.tensor([0.5, 0.5]), torch.tensor([1.0, -1.0])
# p = torch.linspace(0.5, 0.99, 491)
# new = torch.stack([p, 1 - p], 1)
# kl = (old * (old / new).log()).sum(1)
# clipped = torch.stack([F.ppo_clip_loss(row.log(), old.log(), advantage, 0.2) for row in new])
# penalised = torch.stack([F.ppo_penalty_loss(row.log(), old.log(), advantage, k, 1.0) for row, k in zip(new, kl)])
# assert torch.allclose(clipped[p > 0.601], torch.tensor(-0.2)) and bool((clipped[p < 0.599] > -0.2).all())
# assert abs(float(p[penalised.argmin()]) - (1 + 5**0.5) / 4) < 1e-3
# ```
#
# </details>
#
# ## What is open
#
# CartPole's actions are two. A torque or a speed is a real number, and none of the formulas so far names a density.
# [The next page](09b_continuous_actions.ipynb) does.
#
# **Sources.** Schulman et al. 2017, [arXiv:1707.06347](https://arxiv.org/abs/1707.06347); what decides whether it
# works: Engstrom et al. 2020, [arXiv:2005.12729](https://arxiv.org/abs/2005.12729), Andrychowicz et al. 2021,
# [arXiv:2006.05990](https://arxiv.org/abs/2006.05990).
