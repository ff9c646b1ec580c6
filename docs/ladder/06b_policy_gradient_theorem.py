# %% [markdown]
# # 6b. The policy gradient theorem
#
# [REINFORCE](06_reinforce.ipynb) derives the policy gradient from whole trajectories. Many texts begin with states
# instead, and their first derivation seems to forget something: a new policy also visits other states. This page shows
# where that change went, and which states the theorem counts how often.
#
# **Before:** [6. REINFORCE](06_reinforce.ipynb) · **Next:** [7. A2C](07_a2c.ipynb) · [glossary](glossary.md)
#
# ## Where a policy spends its time
#
# The **discounted state distribution** of a policy is
#
# $$d^\pi(s) = (1 - \gamma) \sum_{t=0}^{\infty} \gamma^t\, p(s_t = s \mid \pi).$$
#
# The factor makes it sum to 1. It is the distribution of the state in which one finds the agent, if the episode is
# stopped after each step with probability $1 - \gamma$. A reward in step $t$ counts $\gamma^t$, so the objective is a
# mean over it,
#
# $$J(\theta) = \frac{1}{1 - \gamma} \sum_s d^\pi(s) \sum_a \pi_\theta(a \mid s)\, r(s, a).$$
#
# Differentiate the product. There are two terms:
#
# $$\nabla_\theta J = \frac{1}{1 - \gamma} \Big[ \sum_s d^\pi(s) \sum_a \nabla_\theta \pi_\theta(a \mid s)\, r(s, a) +
# \sum_s \nabla_\theta d^\pi(s) \sum_a \pi_\theta(a \mid s)\, r(s, a) \Big].$$
#
# The first is a mean over visited states, and can be sampled. The second asks how the visits change with the policy,
# which depends on $P$. No experience of one policy shows it directly.
#
# ## The theorem
#
# Sutton et al. (1999) found a form without the second term:
#
# $$\nabla_\theta J = \frac{1}{1 - \gamma} \sum_s d^\pi(s) \sum_a \nabla_\theta \pi_\theta(a \mid s)\, Q^\pi(s, a).$$
#
# Proof. Differentiate Bellman's equation $V^\pi(s) = \sum_a \pi_\theta(a \mid s)\, Q^\pi(s, a)$, where
# $Q^\pi(s, a) = r(s, a) + \gamma \sum_{s'} P(s' \mid s, a)\, V^\pi(s')$ depends on $\theta$ only through the last
# factor:
#
# $$\nabla_\theta V^\pi(s) = \underbrace{\sum_a \nabla_\theta \pi_\theta(a \mid s)\, Q^\pi(s, a)}_{f(s)} + \gamma
# \sum_{s'} P_\pi(s, s')\, \nabla_\theta V^\pi(s').$$
#
# This is Bellman's equation of a policy whose "reward" is $f(s)$. Its solution is therefore the discounted sum of $f$
# along the way, $\nabla_\theta V^\pi(s_0) = \mathbb{E}_\pi\big[\sum_t \gamma^t f(s_t)\big]$. Counted by states, this is
# $\sum_s d^\pi(s) f(s) / (1 - \gamma)$.
#
# So nothing was forgotten. Treating $d^\pi$ as a constant is right if the weight of an action is $Q^\pi$, since
# $Q^\pi$ contains what the later states are worth, and wrong if it is the reward $r$. Derivations that write
# $\sum_s d(s) \sum_a \pi Q$ and differentiate $\pi$ alone **ignore two changes**, those of $d^\pi$ and of $Q^\pi$, and
# arrive at the right end because of this theorem. With $\nabla \pi = \pi\, \nabla \log \pi$ it becomes a mean over
# actions, and any baseline $b(s)$ may be subtracted as on page 6.
#
# The cell computes all of it in the maze with a step cost of 1, where the gradient of the exact value is known.

# %%
import matplotlib.pyplot as plt
import torch
from helpers import SHORT, interval, known

from rl_modules import functional as F

maze, gamma = known("Maze-v0"), 0.9
reward = maze.reward.clone()
reward[:4] -= 1.0  # cells 0 to 3, in which one acts
identity, start = torch.eye(7, dtype=torch.float64), torch.eye(7, dtype=torch.float64)[0]


def parts(policy):
    """Returns d of a policy [S] and its action values [S, A], by solving linear equations."""
    chain = torch.einsum("sa,sat->st", policy, maze.transition)
    visits = (1 - gamma) * torch.linalg.solve((identity - gamma * chain).T, start)
    value = torch.linalg.solve(identity - gamma * chain, (policy * reward).sum(-1))
    return visits, reward + gamma * maze.transition @ value


theta = torch.zeros(7, 4, dtype=torch.float64, requires_grad=True)
policy = theta.softmax(-1)
visits, q = parts(policy)


def gradient(of):
    """Returns the derivative by the table θ."""
    return torch.autograd.grad(of / (1 - gamma), theta, retain_graph=True)[0]


still, still_q = visits.detach(), q.detach()
exact = gradient(visits @ (policy * reward).sum(-1))
by_policy = gradient(still @ (policy * reward).sum(-1))
by_visits = gradient(visits @ (policy.detach() * reward).sum(-1))
theorem = gradient(still @ (policy * still_q).sum(-1))
names = ("exact", "both terms", "reward term alone", "theorem")
for name, found in zip(names, (exact, by_policy + by_visits, by_policy, theorem), strict=True):
    print(f"{name:18} ∂J/∂θ of the start's four actions", [round(x, 3) for x in found[0].tolist()])

# %% [markdown]
# The theorem equals the exact gradient. The reward term alone is 0 in the start cell, where all actions cost the same:
# an agent that followed it would not learn to walk.
#
# ## Which states count how often
#
# The theorem weighs the state of step $t$ with $\gamma^t$. Programs leave this factor out, as page 6 says: they use all
# visited states alike, with discounted values. What they follow is
# $\sum_s \bar d(s) \sum_a \nabla_\theta \pi_\theta\, Q^\pi$, where $\bar d$ counts visits without discount. It is the
# gradient of no function (Nota & Thomas 2020, [arXiv:1906.07073](https://arxiv.org/abs/1906.07073)). It is used because
# it improves every state that is visited, early or late, and in a table the improvement of one state is never harmful
# to another. With a network, states compete for the same weights, and the weighting matters.
#
# Off-policy algorithms go further, and weigh states as a replay buffer has them. Their gradient drops a term that
# contains $\nabla Q$ under other states (Degris et al. 2012), and is right in a table for the same reason.
#
# ## The run
#
# Gradient ascent on the table, from the random walk on. Each step is estimated from 32 walks, ten seeds side by side.
# The line is the value of the best policy. The broken run differs in one thing: its weight is the reward instead of the
# reward-to-go.


# %%
def ascend(weight, seeds=10, walks=32, length=40, step=0.2, updates=5 if SHORT else 150):
    """Returns the exact J after each update, [updates, seeds]."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.zeros(seeds, 7, 4, dtype=torch.float64)
    table = torch.arange(seeds)[:, None]
    found = []
    for _ in range(updates):
        policies = theta.softmax(-1)
        state, path = torch.zeros(seeds, walks, dtype=torch.long), []
        for _ in range(length):
            action = torch.multinomial(policies[table, state].flatten(0, 1), 1, generator=generator).view(seeds, walks)
            path.append((state, action, reward[state, action]))
            moves = maze.transition[state, action].flatten(0, 1)
            state = torch.multinomial(moves, 1, generator=generator).view(seeds, walks)
        states, actions, rewards = (torch.stack(column) for column in zip(*path, strict=True))
        flat, no = rewards.flatten(1), torch.zeros_like(rewards.flatten(1), dtype=torch.bool)
        psi = F.discounted_returns(flat, torch.zeros_like(flat), no, no, gamma).view_as(rewards)
        if weight == "reward":
            psi = rewards
        if weight != "all steps alike":
            psi = psi * gamma ** torch.arange(length, dtype=torch.float64)[:, None, None]
        score = torch.nn.functional.one_hot(actions, 4) - policies[table, states]
        row = (table * 7 + states).flatten()  # one row of θ per seed and state
        climb = torch.zeros(seeds * 7, 4, dtype=torch.float64)
        climb.index_add_(0, row, (psi[..., None] * score).flatten(0, 2))
        theta += step * climb.view_as(theta) / walks
        found.append([float(start @ (one * parts(one)[1]).sum(-1)) for one in theta.softmax(-1)])
    return torch.tensor(found)


best = float(F.value_iteration(maze.transition, reward, gamma)[0].max())
_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name, weight in {"theorem": "discounted", "all steps alike": "all steps alike", "broken: reward": "reward"}.items():
    runs = ascend(weight)
    half = 2.26 * runs.std(1) / runs.shape[1] ** 0.5
    [line] = axes.plot(runs.mean(1), label=name)
    axes.fill_between(range(len(runs)), runs.mean(1) - half, runs.mean(1) + half, alpha=0.2, color=line.get_color())
    mean, width = interval(runs[-1])
    print(f"{name:16} J {mean:.2f} ± {width:.2f} (95 %, {runs.shape[1]} seeds), optimum {best:.2f}")
axes.axhline(best, color="gray", linestyle="--", linewidth=1, label="best policy")
axes.set(xlabel="update", ylabel="exact J")
axes.legend(loc="center right")
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# **How to read it.** The bands are 95 % intervals of the mean over seeds. Both weightings approach the optimum, which a
# softmax reaches only in the limit. The practice is a little faster, because it takes larger steps in the late states.
#
# **What failure looks like.** With the reward as its weight an action is never praised for where it leads. Steps that
# end in the goal become likelier and those into the trap rarer, but the way to the goal is not learned. The curve rises
# a little and stops far below the line, in every seed. This is what ignoring $\nabla d^\pi$ does when $Q^\pi$ does not
# make up for it. A discount of 0 in a program has the same effect.
#
# ## Exercises
#
# **Exercise 6b.1.** An agent leaves state 0 for state 1 after each step with probability 1/2, and stays in 1. Compute
# $d^\pi$ for $\gamma = 0.5$.
#
# <details markdown="1"><summary>Answer</summary>
#
# It is in state 0 in step $t$ with probability $2^{-t}$:
# $d^\pi(0) = 0.5 \sum_t 4^{-t} = 0.5 \cdot 4/3 = 2/3$, and $d^\pi(1) = 1/3$.
#
# ```python
# import torch
#
# chain = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
# visits = 0.5 * torch.linalg.solve((torch.eye(2) - 0.5 * chain).T, torch.tensor([1.0, 0.0]))
# assert torch.allclose(visits, torch.tensor([2 / 3, 1 / 3]))
# ```
#
# </details>
#
# **Exercise 6b.2.** In that chain each step in state 0 pays 3, in state 1 nothing. Compute $J$ by $d^\pi$ and by
# Bellman's equation.
#
# <details markdown="1"><summary>Answer</summary>
#
# $\frac{1}{1 - 0.5} \cdot \frac23 \cdot 3 = 4$. Bellman: $V(0) = 3 + 0.5 \cdot 0.5\, V(0)$, so $V(0) = 4$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# transition, reward = torch.tensor([[[0.5, 0.5]], [[0.0, 1.0]]]), torch.tensor([[3.0], [0.0]])
# value = F.policy_evaluation(transition, reward, torch.ones(2, 1), 0.5)
# assert abs(float(value[0]) - 4) < 1e-5 and 2 * (2 / 3) * 3 == 4
# ```
#
# </details>
#
# **Exercise 6b.3.** What does the theorem say for a problem with one state whose episodes end after one step?
#
# <details markdown="1"><summary>Answer</summary>
#
# $\nabla J = \sum_a \nabla \pi(a)\, q(a)$: the gradient bandit of page 0. For a softmax with probabilities
# $(0.5, 0.5)$ and rewards $(2, 0)$ its first entry is $0.25 \cdot 2 = 0.5$.
#
# ```python
# import torch
#
# h = torch.zeros(2, requires_grad=True)
# (h.softmax(0) * torch.tensor([2.0, 0.0])).sum().backward()
# assert h.grad.tolist() == [0.5, -0.5]
# ```
#
# </details>
#
# **Exercise 6b.4.** Without $\gamma^t$, how much more weight does a state visited in step 100 have for $\gamma = 0.99$,
# and after how many steps does the theorem's weight fall below 1 %?
#
# <details markdown="1"><summary>Answer</summary>
#
# $0.99^{-100} = 2.73$ times, and after $\log 0.01 / \log 0.99 = 458.2$, that is 459 steps.
#
# ```python
# import math
#
# assert round(0.99**-100, 2) == 2.73 and math.ceil(math.log(0.01) / math.log(0.99)) == 459
# assert 0.99**458 > 0.01 > 0.99**459
# ```
#
# </details>
#
# ## What is open
#
# The theorem asks for $Q^\pi$, and the run above has only returns, with all their noise. [The next
# page](07_a2c.ipynb) estimates it with a critic.
#
# **Sources.** Sutton, McAllester, Singh & Mansour 1999; Sutton & Barto 2018, section 13.2; Degris, White & Sutton 2012;
# Nota & Thomas 2020.
