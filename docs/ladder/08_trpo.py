# %% [markdown]
# # 8. TRPO
#
# A policy gradient gives a direction, and no length. [A2C](07_a2c.ipynb) takes many small steps. This page derives
# how long a step may be, and which direction is the best one at that length: trust region policy optimization.
#
# **Before:** [7b. Traces](07b_traces.ipynb) · **Next:** [9. PPO](09_ppo.ipynb) · [glossary](glossary.md)
#
# ## How much better is another policy?
#
# Let $\pi_{\text{old}}$ be the policy that collected the data, and $\pi$ another one. The difference of their
# objectives is the advantage of the old policy, collected along the way of the new one (Kakade & Langford 2002):
#
# $$J(\pi) - J(\pi_{\text{old}}) = \mathbb{E}_{\tau \sim \pi}\Big[\, \sum_t \gamma^t A^{\text{old}}(s_t, a_t)
# \Big].$$
#
# Proof: $A^{\text{old}}(s_t, a_t)$ is the mean of $r_t + \gamma V^{\text{old}}(s_{t+1}) - V^{\text{old}}(s_t)$. In
# the sum over $t$, with weights $\gamma^t$, the values cancel in pairs, except $-V^{\text{old}}(s_0)$. What remains
# is $\mathbb{E}_\pi[\sum_t \gamma^t r_t] - \mathbb{E}[V^{\text{old}}(s_0)]$, which is the left side.
#
# This is exact, but it needs the states of the new policy, and the data comes from the old one. For the *actions*
# this can be repaired. **Importance sampling** replaces a mean under one distribution by a weighted mean under
# another,
#
# $$\mathbb{E}_{a \sim \pi}[f(a)] = \sum_a \pi_{\text{old}}(a) \frac{\pi(a)}{\pi_{\text{old}}(a)} f(a) =
# \mathbb{E}_{a \sim \pi_{\text{old}}}[\rho\, f(a)], \qquad \rho = \frac{\pi(a \mid s)}{\pi_{\text{old}}(a \mid
# s)}.$$
#
# The mean of the **ratio** $\rho$ is 1. Its variance explodes when the policies differ: in the product over many
# steps an error of a few percent each becomes a factor. For the *states*, TRPO uses the old ones unweighted. The
# result is the **surrogate**
#
# $$S(\pi) = \mathbb{E}_{s, a \sim \pi_{\text{old}}}\big[\rho\, A^{\text{old}}(s, a)\big],$$
#
# whose gradient at $\pi = \pi_{\text{old}}$ is the policy gradient: $\nabla \rho = \rho\, \nabla \log \pi$, and
# $\rho = 1$ there.
#
# **V-trace** is the other answer to the product of ratios (IMPALA, Espeholt et al. 2018,
# [arXiv:1802.01561](https://arxiv.org/abs/1802.01561)). Where many actors play with slightly old policies, the critic's
# target is the λ-return of page 7b with each ratio cut off at 1, once in the TD error and once in the factor that
# carries later errors back:
#
# $$V(s_t) + \sum_{k \ge 0} \gamma^k \Big( \prod_{i=0}^{k-1} \min(1, \rho_{t+i}) \Big) \min(1, \rho_{t+k})\,
# \delta_{t+k}.$$
#
# The cut-off in the TD error decides what is learned: the value of a policy between the old and the new one. The
# cut-off in the factor changes only how fast. With equal policies all ratios are 1, and the target is the return with
# $\lambda = 1$.
#
# ## The trust region
#
# The surrogate errs by as much as the new policy visits other states. How far policies are apart is measured by the
# **Kullback-Leibler divergence**, $\operatorname{KL}(p \,\Vert\, q) = \sum_x p(x) \log \frac{p(x)}{q(x)}$, which is
# 0 for equal distributions and positive otherwise. With $m = \max |A^{\text{old}}|$ and $\operatorname{KL}^{\max}$
# the largest KL over states, Schulman et al. 2015 ([arXiv:1502.05477](https://arxiv.org/abs/1502.05477), theorem 1)
# prove
#
# $$J(\pi) \;\ge\; J(\pi_{\text{old}}) + \frac{S(\pi)}{1 - \gamma} - \frac{4 \gamma m}{(1 - \gamma)^2}
# \operatorname{KL}^{\max}(\pi_{\text{old}} \,\Vert\, \pi)$$
#
# (here $S$ is a mean over the states of the old policy, of which the one at time $t$ has the weight
# $(1 - \gamma) \gamma^t$, so it is divided by $1 - \gamma$; in practice all visited states weigh the same). A step
# that raises the right side raises $J$ for certain. The idea of the proof: if the KL is small, the two policies
# choose the same action in nearly every step; only after a step in which they differ can the states differ, and such
# a step is rare.
#
# The factor is far too careful: with $\gamma = 0.99$ it is 40,000 times the advantage. TRPO keeps the form and
# chooses the size by hand: maximise the surrogate within a **trust region** of mean KL,
#
# $$\max_\theta\; \mathbb{E}[\rho\, \hat A] \qquad \text{subject to} \qquad
# \mathbb{E}\big[\operatorname{KL}(\pi_{\text{old}}(\cdot \mid s) \,\Vert\, \pi_\theta(\cdot \mid s))\big] \le D.$$
#
# ## The step: natural gradient
#
# For a small step $x = \theta - \theta_{\text{old}}$ the surrogate is linear, $g^\top x$ with the policy gradient
# $g$. The KL is 0 at $x = 0$ and has its minimum there, so its first derivative is 0 too, and it is quadratic:
# $\frac12 x^\top F x$. $F$ is the **Fisher matrix**, the second derivative of the KL, equal to
# $\mathbb{E}[\nabla \log \pi\, \nabla \log \pi^\top]$. It remains to maximise $g^\top x$ subject to
# $\frac12 x^\top F x \le D$. With a Lagrange multiplier $\mu$, the derivative $g - \mu F x = 0$ gives the direction
# $x \propto F^{-1} g$, and the constraint its length:
#
# $$x = \sqrt{\frac{2 D}{g^\top F^{-1} g}}\; F^{-1} g.$$
#
# $F^{-1} g$ is the **natural gradient**. An ordinary gradient step depends on how the policy is parametrised; this
# one depends on the distributions only.
#
# By hand: a policy with two actions and one weight, $\pi(1) = \sigma(\theta) = 1/(1 + e^{-\theta})$. Its Fisher
# information is $F = \pi(1)\, \pi(0)$. At $\theta = 0$ it is 1/4, so $D = 0.02$ allows a step of
# $\sqrt{2 \cdot 0.02 / 0.25} = 0.4$. At $\theta = 4$ it is 0.0177, and the step is 1.5. An ordinary gradient would
# do the opposite and move less where the policy is nearly certain. The measured KL is 0.02 for the first; the
# second overshoots, since the KL is quadratic for small steps only:

# %%
import torch
from helpers import final, fit, fit_seeds, keep, plot

from datamodules import RolloutDataModule
from rl_modules import TRPO
from rl_modules import functional as F

for theta in (0.0, 4.0):
    old = torch.sigmoid(torch.tensor(theta))
    fisher = old * (1 - old)
    step = (2 * 0.02 / fisher).sqrt()
    new = torch.sigmoid(theta - step)  # towards the less likely action
    kl = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    print(f"θ = {theta}: Fisher {float(fisher):.4f}, step {float(step):.2f}, KL {float(kl):.4f}")

# %% [markdown]
# A network has thousands of weights, and $F$ cannot be stored. The **conjugate gradient** method solves $F x = g$
# with products $F v$ only, in a few iterations; each is two passes of automatic differentiation.
# `functional.conjugate_gradient` does it. For the matrix ((4, 1), (1, 3)) and $g = (1, 2)$ the solution is
# $(1/11, 7/11)$:

# %%
matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
print("x", F.conjugate_gradient(lambda v: matrix @ v, torch.tensor([1.0, 2.0])), "=", torch.tensor([1 / 11, 7 / 11]))

# %% [markdown]
# Because the quadratic approximation may be wrong, as in the second line above, a **line search** follows: the step
# is taken, and shortened by a factor of 0.8 until the measured KL is at most $D$ and the measured surrogate has
# improved. If no length passes, the policy stays.
#
# ## The run
#
# Four environments, 512 steps each per update, $D = 0.02$, 49 updates in all. A policy that is certain in most states
# makes $F$ nearly singular, so `cg_damping` times the identity is added to it. After the policy's step, the critic
# makes `n_critic_updates` passes over the rollout by Adam.


# %%
def train(seed, target_kl=0.02):
    """Trains TRPO on CartPole for 100,000 transitions; returns the curves."""
    model = TRPO(target_kl=target_kl, gae_lambda=0.98, cg_damping=1e-3, n_critic_updates=20, batch_size=512)
    data = RolloutDataModule("CartPole-v1", seed=seed, n_envs=4, n_steps=512, total_timesteps=100_000,
                             eval_freq=8_000, n_eval_episodes=10)  # fmt: skip
    return fit(model, data)


runs = {"D = 0.02": fit_seeds(train), "broken: D = 1": fit_seeds(lambda seed: train(seed, 1.0))}
plot(runs, "eval/mean_reward", "transitions", "mean return, 10 episodes", best=500)
for name, several in runs.items():
    print(f"{name:14} final returns of three seeds", final(several, "eval/mean_reward"))
keep("TRPO", runs["D = 0.02"], "eval/mean_reward")

# %% [markdown]
# **How to read it.** The curve rises fast and without step sizes to tune for the policy, since every update moves
# the distribution by the same amount whatever the scale of rewards or weights. The next plot shows the KL of the
# accepted steps. It must lie at or below $D$, and near it: a KL of 0 in many updates means that the line search
# failed, for instance because the advantages are noise.

# %%
plot({"D = 0.02": runs["D = 0.02"]}, "train/approx_kl", "transitions", "KL of the accepted step (nats)",
     best=0.02, best_name="D")  # fmt: skip

# %% [markdown]
# **What failure looks like.** With $D = 1$ nat every update moves the policy so far that advantages measured under
# the old policy say nothing about the new one. The measured surrogate improves, as the line search demands, and the
# return falls: the surrogate is an estimate on the old states. A surrogate that rises while the return falls is the
# mark of too large a region.
#
# ## Exercises
#
# **Exercise 8.1.** $\pi_{\text{old}} = (0.5, 0.5)$ and $\pi = (0.8, 0.2)$. Compute the ratios, their mean under
# $\pi_{\text{old}}$, and the surrogate for the advantages $(1, -1)$.
#
# <details markdown="1"><summary>Answer</summary>
#
# The ratios are 1.6 and 0.4, their mean is 1. The surrogate is $0.5 \cdot 1.6 - 0.5 \cdot 0.4 = 0.6$, which is
# $\mathbb{E}_{a \sim \pi}[A] = 0.8 - 0.2$.
#
# ```python
# old, new, advantage = (0.5, 0.5), (0.8, 0.2), (1, -1)
# ratio = [n / o for n, o in zip(new, old)]
# assert ratio == [1.6, 0.4] and sum(o * r for o, r in zip(old, ratio)) == 1.0
# assert abs(sum(o * r * a for o, r, a in zip(old, ratio, advantage)) - 0.6) < 1e-12
# ```
#
# </details>
#
# **Exercise 8.2.** Compute $\operatorname{KL}(\pi_{\text{old}} \,\Vert\, \pi)$ and
# $\operatorname{KL}(\pi \,\Vert\, \pi_{\text{old}})$ for these two.
#
# <details markdown="1"><summary>Answer</summary>
#
# $0.5 \log \frac{0.5}{0.8} + 0.5 \log \frac{0.5}{0.2} = 0.2231$, and
# $0.8 \log \frac{0.8}{0.5} + 0.2 \log \frac{0.2}{0.5} = 0.1927$. The KL is not symmetric. TRPO's is the first: the
# mean over the actions that were sampled.
#
# ```python
# import torch
# from torch.distributions import Categorical, kl_divergence
#
# old, new = Categorical(torch.tensor([0.5, 0.5])), Categorical(torch.tensor([0.8, 0.2]))
# assert abs(float(kl_divergence(old, new)) - 0.2231) < 1e-4
# assert abs(float(kl_divergence(new, old)) - 0.1927) < 1e-4
# ```
#
# </details>
#
# **Exercise 8.3.** $g = (1, 1)$, $F$ is diagonal with entries 4 and 1, $D = 0.1$. Compute the step of TRPO, and its
# KL to second order.
#
# <details markdown="1"><summary>Answer</summary>
#
# $F^{-1} g = (1/4, 1)$, $g^\top F^{-1} g = 5/4$, the factor is $\sqrt{0.2 / 1.25} = 0.4$, and the step
# $(0.1, 0.4)$. Its KL is $\frac12 (4 \cdot 0.01 + 0.16) = 0.1 = D$. The direction in which the policy is sensitive
# is taken less far.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# fisher, g = torch.diag(torch.tensor([4.0, 1.0])), torch.tensor([1.0, 1.0])
# direction = F.conjugate_gradient(lambda v: fisher @ v, g)
# step = (2 * 0.1 / (g @ direction)).sqrt() * direction
# assert torch.allclose(step, torch.tensor([0.1, 0.4])) and abs(float(step @ fisher @ step / 2) - 0.1) < 1e-6
# ```
#
# </details>
#
# ## What is open
#
# TRPO needs second derivatives, full batches and a line search, and does not fit a network whose actor and critic
# share weights. [PPO](09_ppo.ipynb) looks for an ordinary loss that has the same effect.
#
# **Sources.** Kakade & Langford 2002; Schulman et al. 2015, [arXiv:1502.05477](https://arxiv.org/abs/1502.05477);
# natural gradient: Amari 1998, Kakade 2001.
