# %% [markdown]
# # 0. Bandits
#
# Ten slot machines pay differently, and nobody says how much. Each pull earns something, and tells something about one
# of them. This page has no states yet: it is about the one question that supervised learning never asks, whether to
# use what is known or to find out more.
#
# **Next:** [1. Dynamic programming](01_dynamic_programming.ipynb) · [glossary](glossary.md)
#
# ## The problem
#
# In step $t$ an agent chooses one of $m$ **actions** (arms) $a_t$ and receives a random **reward** $r_t$, whose mean
# $q(a_t)$ depends on the action alone. Let $q^* = \max_a q(a)$ be the best mean, and $\Delta_a = q^* - q(a)$ the
# **gap** of an arm. The **regret** of $n$ steps is what was missed,
#
# $$\sum_{t=1}^{n} \big( q^* - q(a_t) \big) = \sum_a \Delta_a\, n_a,$$
#
# where $n_a$ counts how often $a$ was chosen. A supervised learner gets the right answer of each example. Here only
# the reward of the *chosen* action is seen. An arm that looked bad twice by accident is never corrected, unless
# somebody chooses it again.
#
# The value of an arm is estimated by the mean of its rewards, which can be updated without storing them:
#
# $$Q_{n}(a) = \frac1n \sum_{i=1}^{n} r^{(i)} = Q_{n-1}(a) + \frac1n \big[\, r^{(n)} - Q_{n-1}(a) \,\big].$$
#
# ## Three ways to explore
#
# **$\varepsilon$-greedy.** With probability $\varepsilon$ take a uniformly random arm, otherwise the one with the
# largest $Q$. Once the estimates are right, each step still loses $\varepsilon$ times the mean gap: the regret grows
# in proportion to $n$, forever. With $\varepsilon = 0$, the **greedy** agent, it may grow faster still, since the agent
# can settle on a wrong arm.
#
# **Upper confidence bounds (UCB).** Try an arm in proportion to how good it *may* be. For rewards with a normal
# distribution of variance 1, the mean of $n_a$ of them has variance $1 / n_a$, and exceeds its true value by $b$ or
# more with a probability of at most $e^{-n_a b^2 / 2}$. Set this to $1 / t$ and solve for $b$:
#
# $$a_t = \arg\max_a \Big[\, Q(a) + \sqrt{\frac{2 \log t}{n_a}} \,\Big].$$
#
# An arm that is chosen gets a smaller bonus, and one that is left alone a larger one, slowly. A bad arm is given up
# once its bonus is smaller than its gap, at about $n_a = 2 \log t / \Delta_a^2$ pulls, each of which costs $\Delta_a$.
# The regret is therefore near $\sum_a 2 \log n / \Delta_a$: logarithmic. Lai and Robbins (1985) proved that no
# agent that learns on all such problems does better for large $n$, so this sum is the optimum's growth.
#
# **Gradient bandit.** Instead of values, learn the probabilities. Each arm has a number $h(a)$, and
# $\pi(a) = e^{h(a)} / \sum_b e^{h(b)}$. The expected reward is $\sum_a \pi(a)\, q(a)$. Since
# $\partial \pi(b) / \partial h(a) = \pi(b) \big( [a = b] - \pi(a) \big)$ with $[\cdot]$ for 1 if true and 0 if not,
#
# $$\frac{\partial}{\partial h(a)} \sum_b \pi(b)\, q(b) = \sum_b \pi(b)\, q(b) \big( [a = b] - \pi(a) \big) = \mathbb{E}
# \big[\, r_t\, \big( [a = a_t] - \pi(a) \big) \,\big].$$
#
# The right side is a mean over the agent's own actions, so each step gives an estimate of it. The agent climbs with
# **step size** $\alpha$, after subtracting the mean reward so far, $\bar r$, which changes no mean and much of the
# noise:
#
# $$h(a) \leftarrow h(a) + \alpha\, (r_t - \bar r) \big( [a = a_t] - \pi(a) \big).$$
#
# This is the policy gradient of page 6 in a world with one state. The next cell checks the derivative against
# automatic differentiation, and a step against `functional.policy_gradient_loss`.

# %%
import matplotlib.pyplot as plt
import torch
from helpers import SHORT, interval

from rl_modules import functional as F

q = torch.tensor([1.0, 0.5, 0.0])
h = torch.tensor([0.2, 0.0, -0.1], requires_grad=True)
(h.softmax(0) * q).sum().backward()
policy = h.detach().softmax(0)
by_formula = [float((policy * q * ((torch.arange(3) == a).float() - policy[a])).sum()) for a in range(3)]
print("derivative of the expected reward", [round(x, 4) for x in h.grad.tolist()], "by the formula",
      [round(x, 4) for x in by_formula])  # fmt: skip

h.grad = None
F.policy_gradient_loss(h.log_softmax(0)[:1], torch.tensor([2.0])).backward()  # arm 0 paid 2 more than the mean
print("step for arm 0 with r - mean = 2 ", [round(-x, 4) for x in h.grad.tolist()], "by the formula",
      [round(2 * (float(a == 0) - float(policy[a])), 4) for a in range(3)])  # fmt: skip

# %% [markdown]
# ## The run
#
# First a **test bed** of 2,000 random problems with ten arms, whose means are drawn from $\mathcal{N}(0, 1)$ and whose
# rewards have variance 1. All problems are played side by side. The line is the mean of the best arms, which an agent
# would earn that knows them. The broken agent differs from the $\varepsilon$-greedy one in its $\varepsilon = 0$.


# %%
def play(q, steps, explore, setting, seed=0):
    """Plays problems with means q [N, m] side by side; returns the mean reward q(a_t) of each step, [steps, N]."""
    generator = torch.Generator().manual_seed(seed)
    n, arms = q.shape
    rows = torch.arange(n)
    value, count, h, mean = torch.zeros(n, arms), torch.zeros(n, arms), torch.zeros(n, arms), torch.zeros(n)
    earned = torch.empty(steps, n)
    for t in range(1, steps + 1):
        if explore == "gradient":
            action = torch.multinomial(h.softmax(1), 1, generator=generator)[:, 0]
        elif explore == "UCB":  # an arm without a pull has an infinite bonus
            action = (value + (2 * torch.tensor(float(t)).log() / count).sqrt().nan_to_num(1e9, 1e9)).argmax(1)
        else:
            random = torch.rand(n, generator=generator) < setting
            action = torch.where(random, torch.randint(arms, (n,), generator=generator), value.argmax(1))
        earned[t - 1] = q[rows, action]
        reward = earned[t - 1] + torch.randn(n, generator=generator)
        count[rows, action] += 1
        value[rows, action] += (reward - value[rows, action]) / count[rows, action]
        mean += (reward - mean) / t
        if explore == "gradient":
            chosen = torch.nn.functional.one_hot(action, arms)
            h += setting * (reward - mean)[:, None] * (chosen - h.softmax(1))
    return earned


AGENTS = {
    "ε-greedy, ε = 0.1": ("greedy", 0.1),
    "UCB": ("UCB", None),
    "gradient, α = 0.1": ("gradient", 0.1),
    "broken: ε = 0": ("greedy", 0.0),
}
bed = torch.randn(2_000, 10, generator=torch.Generator().manual_seed(1))
steps = 20 if SHORT else 1_000
_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name, agent in AGENTS.items():
    earned = play(bed, steps, *agent)
    mean, half = interval(earned[-100:].mean(0))
    print(f"{name:18} mean reward of the last 100 steps {mean:.3f} ± {half:.3f} (95 %, 2,000 problems)")
    axes.plot(earned.mean(1), label=name)
best = float(bed.amax(1).mean())
print(f"{'optimum':18} {best:.3f}")
axes.axhline(best, color="gray", linestyle="--", linewidth=1, label="best arms")
axes.set(xlabel="step", ylabel="mean reward of the chosen arm")
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# **How to read it.** UCB tries each arm once and is ahead from then on. The gradient agent needs some hundred steps and
# ends as close to the line. The $\varepsilon$-greedy agent levels off below, since a tenth of its steps is random, and
# the greedy one stops to learn within the first steps. For many steps regret is the better picture. The next cell plays
# one problem of five arms for 10,000 steps, 200 times. On its axis of steps a logarithm is a straight line.

# %%
one = torch.tensor([1.0, 0.6, 0.5, 0.3, 0.0])
steps = 20 if SHORT else 10_000
growth = float((2 / (1 - one[1:])).sum())
_, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
t = torch.arange(1, steps + 1)
for name, agent in AGENTS.items():
    regret = (1 - play(one.expand(200, 5), steps, *agent)).cumsum(0)
    half = 1.96 * regret.std(1) / 200**0.5
    [line] = axes.plot(t, regret.mean(1), label=name)
    axes.fill_between(t, regret.mean(1) - half, regret.mean(1) + half, alpha=0.2, color=line.get_color(), linewidth=0)
    last, width = interval(regret[-1])
    added = float((regret[-1] - regret[steps // 10 - 1]).mean())
    print(f"{name:18} regret {last:6.1f} ± {width:.1f} (95 %, 200 runs), of it in the last factor of 10: {added:.1f}")
factor = float(torch.tensor(10.0).log()) * growth
print(f"{'Lai and Robbins':18} growth per factor of 10: {factor:.1f}")
axes.plot(t, growth * t.log(), "--", color="gray", linewidth=1, label="slope of the optimum")
axes.set(xlabel="step", ylabel="regret", xscale="log", ylim=(0, 500))
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# UCB's regret is logarithmic, and its slope nears the optimum's from above. The $\varepsilon$-greedy curve grows in
# proportion to the steps, which is an exponential on this axis. The gradient agent ends flatter than the optimum: it
# has become nearly certain, of the right arm here. With smaller gaps some of its runs become certain of a wrong one,
# and Lai and Robbins speak of agents that learn on all problems. The greedy agent's interval is wide, because a run
# has either found the best arm at once or never.
#
# **What failure looks like.** The greedy agent's mean reward looks stable, and so does each single run. Some runs have
# settled on a wrong arm, whose value they know well; the right one they saw too rarely. Nothing in the agent's own
# estimates shows this. It is found by comparing seeds.
#
# ## Exercises
#
# **Exercise 0.1.** An arm paid 1, 3 and 2. Compute its value step by step with the update.
#
# <details markdown="1"><summary>Answer</summary>
#
# $0 + 1 = 1$; $1 + \frac12 (3 - 1) = 2$; $2 + \frac13 (2 - 2) = 2$, the mean.
#
# ```python
# value, values = 0.0, []
# for n, reward in enumerate((1, 3, 2), 1):
#     value += (reward - value) / n
#     values.append(value)
# assert values == [1.0, 2.0, 2.0]
# ```
#
# </details>
#
# **Exercise 0.2.** Five arms have the means 1, 0.6, 0.5, 0.3, 0. What does a step of an $\varepsilon$-greedy agent with
# $\varepsilon = 0.1$ cost on average once its estimates are right, and after how many steps is that more than 10
# $\log$-factors of the optimum's growth?
#
# <details markdown="1"><summary>Answer</summary>
#
# The mean gap over all five arms is $2.6 / 5 = 0.52$, so 0.052 per step. The optimum grows by
# $2 (1/0.4 + 1/0.5 + 1/0.7 + 1/1) \log n = 13.9 \log n$; ten times $13.9 = 139$ are passed after 2,665 steps.
#
# ```python
# gaps = [0.0, 0.4, 0.5, 0.7, 1.0]
# cost, growth = 0.1 * sum(gaps) / 5, sum(2 / gap for gap in gaps[1:])
# assert abs(cost - 0.052) < 1e-9 and round(growth, 1) == 13.9 and int(10 * growth / cost) == 2664
# ```
#
# </details>
#
# **Exercise 0.3.** After 100 steps arm A has the value 1.0 from 80 pulls, arm B 0.6 from 20. Which does UCB choose?
#
# <details markdown="1"><summary>Answer</summary>
#
# $2 \log 100 = 9.21$. A has $1 + \sqrt{9.21 / 80} = 1.34$, B has $0.6 + \sqrt{9.21 / 20} = 1.28$: A, just.
#
# ```python
# import math
#
# a, b = (value + math.sqrt(2 * math.log(100) / n) for value, n in ((1.0, 80), (0.6, 20)))
# assert round(a, 2) == 1.34 and round(b, 2) == 1.28
# ```
#
# </details>
#
# **Exercise 0.4.** Two arms, $h = (0, 0)$, $\alpha = 0.5$. Arm 1 was chosen and paid 3; the mean so far is 1. Compute
# the new probabilities.
#
# <details markdown="1"><summary>Answer</summary>
#
# $h(1) = 0 + 0.5 \cdot 2 \cdot (1 - 0.5) = 0.5$ and $h(0) = -0.5$, so $\pi(1) = 1 / (1 + e^{-1}) = 0.731$.
#
# ```python
# import torch
#
# h = torch.zeros(2)
# h = h + 0.5 * (3 - 1) * (torch.tensor([0.0, 1.0]) - h.softmax(0))
# assert abs(float(h.softmax(0)[1]) - 0.731) < 1e-3
# ```
#
# </details>
#
# ## What is open
#
# A pull changes nothing but the purse. In most problems an action also changes where one stands, and what can be
# earned later. [The next page](01_dynamic_programming.ipynb) adds states, at first with everything known.
#
# **Sources.** Sutton & Barto 2018, chapter 2 (test bed, gradient bandit); Auer, Cesa-Bianchi & Fischer 2002 (UCB1);
# Lai & Robbins 1985.
