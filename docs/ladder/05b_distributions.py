# %% [markdown]
# # 5b. Distributions of returns
#
# [DQN](05_dqn.ipynb) learns the mean of a return. A mean of 0 may be a sure 0, or +10 and -10 with equal probability.
# This page learns the whole distribution, in the two usual forms: probabilities of fixed returns (C51), and returns of
# fixed probabilities (quantiles).
#
# **Before:** [5. DQN](05_dqn.ipynb) · **Next:** [6. REINFORCE](06_reinforce.ipynb) · [glossary](glossary.md)
#
# ## Bellman's equation for distributions
#
# Let $G(s, a)$ be the random return after action $a$ in state $s$, whose mean is $Q(s, a)$. A return is a reward and
# the discounted return of the next state, which holds for the random numbers themselves:
#
# $$G(s, a) \overset{d}{=} r + \gamma\, (1 - d)\, G(s', a'),$$
#
# where $\overset{d}{=}$ says that both sides have the same distribution. Three things are random on the right: the
# reward and next state, the next action, and the return from there. The right side shifts a distribution by $r$ and
# shrinks it by $\gamma$. Shrinking brings two distributions closer by the factor $\gamma$, if their distance is the
# effort of moving one into the other (Bellemare et al. 2017, [arXiv:1707.06887](https://arxiv.org/abs/1707.06887)).
# As on page 1, repeating it therefore leads to one fixed point for a given policy. For the best policy this holds for
# the means only.
#
# ## Fixed returns: C51
#
# **C51** gives each of $N$ fixed returns $x_i = x_1 + (i - 1) \Delta$, 51 in the paper, a probability $p_i(s, a)$, by a
# softmax. A shifted and shrunk return $r + \gamma x_j$ falls between two of them. The **projection** shares its
# probability out among both, in proportion to how close they are, which keeps the mean. Returns beyond the ends are
# moved to the ends. The loss is the cross-entropy between the projected target and the prediction.
#
# `functional.categorical_projection` is this step. By hand, with the returns 0, 1, 2, 3, a sure next return of 3,
# $r = 0$ and $\gamma = 0.5$: $1.5$ lies in the middle of 1 and 2, so both get one half. The mean remains $1.5$.

# %%
import matplotlib.pyplot as plt
import torch
from helpers import fit, fit_seeds, interval, keep, known, plot

from datamodules import ReplayDataModule
from rl_modules import C51
from rl_modules import functional as F

zero, no = torch.zeros(1), torch.tensor([False])
print(F.categorical_projection(zero, no, torch.tensor([[0.0, 0.0, 0.0, 1.0]]), gamma=0.5, v_min=0.0, v_max=3.0))

# %% [markdown]
# ## Checked against samples
#
# The random walk in the maze of page 1 ends in the goal (+10) or the trap (-10). The next cell repeats the projected
# equation in a table, with 101 returns from -10 to 10, and compares the distribution at the start with the returns of
# 20,000 walks.

# %%
maze, gamma = known("Maze-v0"), 0.9
returns = torch.linspace(-10, 10, 101, dtype=torch.float64)
nothing = (returns.abs() < 1e-9).double()
table = nothing.expand(7, 101)  # in the end state the return is 0
for _ in range(200):
    after = []
    for action in range(4):
        mixed = maze.transition[:, action] @ table
        pay, going = maze.reward[:, action], torch.zeros(7, dtype=torch.bool)
        after.append(F.categorical_projection(pay, going, mixed, gamma, -10.0, 10.0))
    table = torch.stack(after).mean(0)  # the walk takes each action with probability 1/4
    table = torch.cat([table[:-1], nothing[None]])

generator = torch.Generator().manual_seed(0)
state, sampled = torch.zeros(20_000, dtype=torch.long), torch.zeros(20_000, dtype=torch.float64)
for t in range(200):
    action = torch.randint(4, state.shape, generator=generator)
    sampled += gamma**t * maze.reward[state, action]
    state = torch.multinomial(maze.transition[state, action], 1, generator=generator)[:, 0]
exact = float(F.policy_evaluation(maze.transition, maze.reward, torch.full((7, 4), 0.25), gamma)[0])
mean, half = interval(sampled)
print(f"mean return: table {float(table[0] @ returns):.3f}, exact {exact:.3f}, walks {mean:.3f} ± {half:.3f}")
for bound in (-5.0, 0.0, 5.0):
    print(f"probability of a return below {bound:+.0f}: table {float(table[0][returns < bound].sum()):.3f}, "
          f"walks {float((sampled < bound).double().mean()):.3f}")  # fmt: skip

# %% [markdown]
# ## Fixed probabilities: quantiles
#
# **QR-DQN** (Dabney et al. 2018, [arXiv:1710.10044](https://arxiv.org/abs/1710.10044)) turns it around. The network
# predicts $N$ returns, the quantiles with the levels $w_i = (i - \frac12) / N$, and needs no range. How is a
# quantile learned from samples? Weigh errors by their sign. For a prediction $x$ let
#
# $$L(x) = \mathbb{E}\big[\, (w - [G < x])\, (G - x) \,\big],$$
#
# with $[\cdot]$ for 1 if true and 0 if not. Each sample above $x$ pulls it up with force $w$, each one below pulls it
# down with force $1 - w$. The derivative is $p(G < x) - w$, which is 0 exactly where $x$ is the quantile of level $w$.
# The mean of squared errors gives the mean, this loss gives quantiles; $w = 1/2$ is the median. Near 0 it is rounded
# off as Huber's loss. `functional.quantile_huber_loss` sums it over all quantiles, and over all pairs with the
# target's. The next cell learns eleven quantiles of the walks' returns by gradient descent.

# %%
levels = (torch.arange(11, dtype=torch.float64) + 0.5) / 11
learned = torch.zeros(1, 11, dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.SGD([learned], lr=2.0)
for _ in range(600):
    optimizer.zero_grad()
    F.quantile_huber_loss(learned, sampled[None, :2_000]).backward()
    optimizer.step()
print("level    ", [round(x, 2) for x in levels.tolist()])
print("learned  ", [round(x, 1) for x in learned[0].tolist()])
print("of sample", [round(x, 1) for x in sampled[:2_000].quantile(levels).tolist()])

_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
axes.plot(returns, table[0].cumsum(0), label="fixed returns")
axes.plot(learned.detach()[0], levels, "o", label="quantiles")
axes.plot(sampled.sort().values, torch.linspace(0, 1, len(sampled)), "--", color="gray", label="20,000 walks")
axes.set(xlabel="return of the random walk", ylabel="probability of a smaller one")
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## What it is good for
#
# The agent still acts by the mean, $\sum_i p_i x_i$, so in a table it would act as before. With a network it learns
# better, for reasons that are not fully understood: the loss asks more of the features, and the cross-entropy has
# gradients of bounded size whatever the scale of returns (Rainbow,
# [arXiv:1710.02298](https://arxiv.org/abs/1710.02298), found C51 to be one of the three parts that matter most). Two
# more uses need the distribution itself: policies that avoid bad luck, and TQC, which cuts off the largest quantiles of
# its critics against the overestimation of page 4.
#
# ## The run: CartPole
#
# C51 with the settings of page 5 and a shorter run. A step pays 1, so with $\gamma = 0.99$ no return exceeds 100: the
# range is 0 to 100. The broken run differs in one number, the upper end of the range.


# %%
def train(seed, v_max=100.0):
    """Trains C51 on CartPole; returns the curves."""
    model = C51(v_min=0.0, v_max=v_max, learning_rate="lin_2.3e-3", exploration_fraction=0.2,
                exploration_final_eps=0.04, target_update_interval=10, double=True, dueling=True,
                net_arch=[128, 128])  # fmt: skip
    data = ReplayDataModule(
        "CartPole-v1", seed=seed, buffer_size=100_000, learning_starts=1000, train_freq=128, gradient_steps=64,
        batch_size=64, n_steps=3, total_timesteps=24_000, eval_freq=3000, n_eval_episodes=10,
    )  # fmt: skip
    return fit(model, data)


runs = {"C51": fit_seeds(train), "broken: range 0 to 10": fit_seeds(lambda seed: train(seed, 10.0), seeds=(0, 1))}
plot(runs, "eval/mean_reward", "transitions", "mean return, 10 episodes", best=500)
for name, several in runs.items():
    finals = [run["eval/mean_reward"][-1][1] for run in several]
    mean, half = interval(finals)
    print(f"{name:22} final returns {finals}, mean {mean:.0f} ± {half:.0f} (95 %)")
keep("C51", runs["C51"], "eval/mean_reward")

# %% [markdown]
# **How to read it.** The three seeds stay at 500 from about the middle of the run on. CartPole, which DQN solves too,
# is too easy to show an advantage; it shows that the machinery works.
#
# **What failure looks like.** With a range from 0 to 10 all returns of a pole that stands for more than some steps are
# the same number, the end of the range. The agent sees a fall that is near, and no difference between a pole that will
# fall somewhat later and one that will stand to the end. It learns early, and then stops improving. The loss is small,
# since the end of the range is easily predicted. Choose the range from the rewards, or use quantiles, which have none.
#
# ## Exercises
#
# **Exercise 5b.1.** The returns are 0, 5, 10. The next return is 0 or 10 with probability 1/2 each, $r = 1$,
# $\gamma = 0.9$. Compute the projected target.
#
# <details markdown="1"><summary>Answer</summary>
#
# 1 lies at $1/5$ of the way from 0 to 5: 0.4 stays at 0, 0.1 goes to 5. $1 + 9 = 10$ goes to 10: $(0.4, 0.1, 0.5)$. The
# mean is 5.5, as is $1 + 0.9 \cdot 5$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# one, no = torch.ones(1), torch.tensor([False])
# target = F.categorical_projection(one, no, torch.tensor([[0.5, 0.0, 0.5]]), 0.9, 0.0, 10.0)
# assert torch.allclose(target, torch.tensor([[0.4, 0.1, 0.5]]))
# ```
#
# </details>
#
# **Exercise 5b.2.** A range from 0 to 10 has the return 10 with certainty at the next state, $r = 1$ and
# $\gamma = 0.9$. What does the projection make of $r = 3$ instead?
#
# <details markdown="1"><summary>Answer</summary>
#
# $1 + 9 = 10$ is the end itself. $3 + 9 = 12$ lies beyond and counts as 10: the mean is 2 too low, and a better
# successor could not be told from this one.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# for reward in (1.0, 3.0, 5.0):
#     target = F.categorical_projection(
#         torch.tensor([reward]), torch.tensor([False]), torch.tensor([[0.0, 0.0, 1.0]]), 0.9, 0.0, 10.0
#     )
#     assert torch.allclose(target, torch.tensor([[0.0, 0.0, 1.0]]))
# ```
#
# </details>
#
# **Exercise 5b.3.** A return is 0 with probability 0.7 and 10 with probability 0.3. Which $x$ minimises the quantile
# loss for $w = 0.5$ and $w = 0.9$, and which the squared error?
#
# <details markdown="1"><summary>Answer</summary>
#
# The median is 0, the quantile of level 0.9 is 10, the mean is 3.
#
# ```python
# import torch
#
# x = torch.linspace(-1, 11, 1201)
# def expected(loss):
#     return 0.7 * loss(0.0 - x) + 0.3 * loss(10.0 - x)
# for w, best in ((0.5, 0.0), (0.9, 10.0)):
#     assert abs(float(x[expected(lambda e: torch.where(e < 0, w - 1, w) * e).argmin()]) - best) < 0.02
# assert abs(float(x[expected(torch.square).argmin()]) - 3) < 0.02
# ```
#
# </details>
#
# ## What is open
#
# All agents so far learn values and take the largest. [REINFORCE](06_reinforce.ipynb) improves the policy itself.
#
# **Sources.** Bellemare, Dabney & Munos 2017; Dabney et al. 2018; Bellemare, Dabney & Rowland 2023, *Distributional
# Reinforcement Learning*; TQC: [arXiv:2005.04269](https://arxiv.org/abs/2005.04269).
