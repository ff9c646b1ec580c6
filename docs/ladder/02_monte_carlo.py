# %% [markdown]
# # 2. Monte Carlo
#
# [Dynamic programming](01_dynamic_programming.ipynb) needs the transition probabilities $P$ and the rewards. An
# agent in an unknown maze has neither. It can act, and see what happens. This page estimates values by averages of
# returns.
#
# **Before:** [1. Dynamic programming](01_dynamic_programming.ipynb) · **Next:** [3. SARSA](03_sarsa.ipynb) ·
# [glossary](glossary.md)
#
# ## A value is a mean, and a mean can be sampled
#
# By definition $Q^\pi(s, a) = \mathbb{E}_\pi[G_t \mid s_t = s, a_t = a]$. Play episodes with the policy $\pi$, and
# note the return $G$ that followed each visit of $(s, a)$. The average of $n$ such returns,
#
# $$Q_n = \frac1n \sum_{i=1}^n G^{(i)},$$
#
# is an estimate of $Q^\pi(s, a)$. Its mean is the true value: it has no **bias**. Its **variance**, the mean
# squared distance from its mean, is $\operatorname{Var}[G] / n$ for independent returns: the error falls as
# $1/\sqrt n$, so ten times the accuracy costs a hundred times the episodes. In one episode a pair may be visited
# several times. Its returns then overlap and are not independent; **first-visit** Monte Carlo counts the first
# only. The average over all visits is slightly biased, because their number is random, too.
#
# The average can be updated without storing the returns:
#
# $$Q_n = \frac{n-1}{n} Q_{n-1} + \frac1n G^{(n)} = Q_{n-1} + \frac1n \big[\, G^{(n)} - Q_{n-1} \,\big].$$
#
# The bracket is the **error** of the old estimate, and $1/n$ is a **step size**. With a constant step size
# $\alpha \in (0, 1]$ instead,
#
# $$Q(s, a) \leftarrow Q(s, a) + \alpha \big[\, G - Q(s, a) \,\big],$$
#
# the newest return has weight $\alpha$, the one before $\alpha (1 - \alpha)$, and so on: old returns are forgotten.
# This is needed as soon as the policy changes, since old returns belong to an old policy. The price is noise that
# never vanishes: for independent returns the variance of $Q$ tends to
# $\frac{\alpha}{2 - \alpha} \operatorname{Var}[G]$.
#
# The returns of an episode are computed backwards, $G_t = r_t + \gamma G_{t+1}$, by
# `functional.discounted_returns`. For three steps whose last reward is 10, with $\gamma = 0.9$, they are 8.1, 9 and
# 10:

# %%
import torch
from helpers import draw, final, fit, fit_seeds, keep, known, plot

from datamodules import RolloutDataModule
from rl_modules import MonteCarlo
from rl_modules import functional as F

reward = torch.tensor([[0.0], [0.0], [10.0]])
ended = torch.tensor([[False], [False], [True]])
print(F.discounted_returns(reward, torch.zeros(3, 1), ended, torch.zeros_like(ended), gamma=0.9).squeeze())

# %% [markdown]
# The next cell plays 20,000 random walks in the maze of the page before, where the exact value of the start is
# known. The error of the average is compared with $1/\sqrt n$ times the standard deviation of the return.

# %%
maze, gamma = known("Maze-v0"), 0.9
walk = torch.full((7, 4), 0.25, dtype=torch.float64)
exact = float(F.policy_evaluation(maze.transition, maze.reward, walk, gamma)[0])

generator = torch.Generator().manual_seed(0)
state, returns = torch.zeros(20_000, dtype=torch.long), torch.zeros(20_000, dtype=torch.float64)
for t in range(200):  # all walks side by side; the last state is the end, where rewards are 0
    action = torch.randint(4, state.shape, generator=generator)
    returns += gamma**t * maze.reward[state, action]
    state = torch.multinomial(maze.transition[state, action], 1, generator=generator)[:, 0]
for n in (10, 100, 1_000, 10_000):
    error = abs(float(returns[:n].mean()) - exact)
    print(f"{n:6} walks: error {error:.3f}, to be expected {float(returns.std()) / n**0.5:.3f}")

# %% [markdown]
# ## From values to a policy
#
# **Policy iteration** alternates two steps: estimate $Q^\pi$, then choose the **greedy** policy
# $\pi'(s) = \arg\max_a Q^\pi(s, a)$. The step never makes the policy worse. By its choice
# $Q^\pi(s, \pi'(s)) \ge V^\pi(s)$ in every state; insert the same inequality for the next state, and again,
#
# $$V^\pi(s) \le \mathbb{E}[r_t + \gamma V^\pi(s_{t+1})] \le \mathbb{E}[r_t + \gamma r_{t+1} + \gamma^2
# V^\pi(s_{t+2})] \le \dots \le V^{\pi'}(s),$$
#
# with actions from $\pi'$. This is the **policy improvement theorem**.
#
# A greedy policy visits only the pairs that it prefers, and the others are never measured. Therefore the agent
# **explores**: an **$\varepsilon$-greedy** policy takes a uniformly random action with probability $\varepsilon$,
# and the greedy one otherwise. The theorem holds within the policies that choose every action at least this often,
# so the iteration leads to the best of these. What it learns is the value *of a policy that explores*, which is
# below $Q^*$. Lowering $\varepsilon$ during training closes the gap.
#
# ## The run
#
# `MonteCarlo` plays episodes in four mazes at once and updates its table whenever one ends. $\varepsilon$ falls
# from 1 to 0.1. After every 400 transitions the exact expected return of the greedy policy is computed from $P$,
# which the agent does not see. This return is undiscounted, so the optimum is 10, although the agent learns with
# $\gamma = 0.9$.


# %%
def train(seed, **changes):
    """Trains one agent for 6,000 transitions."""
    settings = {"gamma": 0.9, "learning_rate": 0.05, "exploration_fraction": 0.8, "exploration_initial_eps": 1.0,
                "exploration_final_eps": 0.1, **changes}  # fmt: skip
    agent = MonteCarlo(**settings)
    data = RolloutDataModule(
        "Maze-v0", seed=seed, n_envs=4, n_steps=4, rollouts_per_epoch=25, total_timesteps=6000, eval_freq=400
    )
    return agent, fit(agent, data)


runs = fit_seeds(lambda seed: train(seed)[1])
broken = fit_seeds(lambda seed: train(seed, learning_rate=1.0)[1])
plot({"Monte Carlo": runs, "broken: α = 1": broken}, "eval/true_return", "transitions", "greedy policy, exact",
     maze.optimal_return())  # fmt: skip
print("final returns of three seeds", final(runs, "eval/true_return"), "broken", final(broken, "eval/true_return"))
keep("Monte Carlo", runs, "eval/true_return")

# %% [markdown]
# **How to read it.** The line is the mean of three seeds, the band reaches from the worst to the best. A return of
# 0 means that the greedy policy walks into a wall until the time limit, -10 that it enters the trap. Once the order
# of the action values is right in the cells on the way, the return is 10, although the values themselves still
# change.
#
# **What failure looks like.** The broken run differs in $\alpha = 1$: the table holds the last return instead of an
# average. While the agent explores, the return after the same action is sometimes positive and sometimes negative,
# since the later steps are random, and the greedy policy jumps between 10 and 0. It ends at 10 all the same, because
# $\varepsilon$ has fallen and the returns are hardly random any more: the last point of a curve hides what its middle
# shows. Averages need a step size well below 1 where returns are noisy.

# %%
agent, _ = train(0)
draw(agent.q, maze, "Q after 6,000 transitions")
print("V of the start:", round(float(agent.q[0].max()), 2), "of the best policy: 8.1")

# %% [markdown]
# ## Exercises
#
# **Exercise 2.1.** An episode has the rewards 1, 2, 3, and ends. Compute $G_0, G_1, G_2$ for $\gamma = 0.5$.
#
# <details markdown="1"><summary>Answer</summary>
#
# Backwards: $G_2 = 3$, $G_1 = 2 + 0.5 \cdot 3 = 3.5$, $G_0 = 1 + 0.5 \cdot 3.5 = 2.75$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# end = torch.tensor([[False], [False], [True]])
# g = F.discounted_returns(torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1), end, torch.zeros_like(end), 0.5)
# assert g.squeeze().tolist() == [2.75, 3.5, 3.0]
# ```
#
# </details>
#
# **Exercise 2.2.** Returns are +1 and -1 with probability 1/2 each. Which variance remains in a table entry that is
# updated forever with $\alpha = 0.05$, and which in the average of 400 returns?
#
# <details markdown="1"><summary>Answer</summary>
#
# $\operatorname{Var}[G] = 1$. The update is $Q \leftarrow (1 - \alpha) Q + \alpha G$, so the variance $v$ at rest
# satisfies $v = (1 - \alpha)^2 v + \alpha^2$, which gives $v = \alpha / (2 - \alpha) = 0.0256$. The average has
# $1/400 = 0.0025$.
#
# ```python
# import torch
#
# q, generator = torch.zeros(20_000), torch.Generator().manual_seed(0)
# for _ in range(300):
#     g = torch.randint(2, q.shape, generator=generator) * 2.0 - 1.0
#     q += 0.05 * (g - q)
# assert abs(float(q.var()) - 0.0256) < 0.001
# ```
#
# </details>
#
# **Exercise 2.3.** An episode passes the pair $(s, a)$ twice, with rewards 1, 1, and then ends ($\gamma = 1$).
# Which estimate of $Q(s, a)$ do first-visit and every-visit Monte Carlo take from it?
#
# <details markdown="1"><summary>Answer</summary>
#
# The returns of the two visits are 2 and 1. First-visit counts 2; every-visit averages to 1.5.
#
# ```python
# from rl_modules import MonteCarlo
#
# def visits(first):
#     return [g for _, _, g in MonteCarlo(gamma=1.0, first_visit=first).returns([0, 0], [0, 0], [1.0, 1.0], 0.0)]
#
# assert visits(True) == [2.0] and sum(visits(False)) / 2 == 1.5
# ```
#
# </details>
#
# ## What is open
#
# Monte Carlo learns nothing until an episode ends, and the return of a long episode adds up the noise of all its
# steps. Bellman's equation says that a return is a reward and *the value of the next state*, of which there is an
# estimate already. [SARSA](03_sarsa.ipynb) uses it.
#
# **Sources.** Sutton & Barto 2018, chapter 5; first and every visit: Singh & Sutton 1996.
