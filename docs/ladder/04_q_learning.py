# %% [markdown]
# # 4. Q-learning
#
# [SARSA](03_sarsa.ipynb) learns the value of the policy that explores, and finds the best one only if exploration
# stops. This page learns the value of the best policy while another one acts.
#
# **Before:** [3. SARSA](03_sarsa.ipynb) · **Next:** [5. DQN](05_dqn.ipynb) · [glossary](glossary.md)
#
# ## Sampling the other equation
#
# SARSA samples Bellman's equation for a policy. Q-learning samples the optimality equation,
#
# $$Q^*(s, a) = \mathbb{E}\big[\, r + \gamma \max_{a'} Q^*(s', a') \,\big],$$
#
# whose expectation runs over the environment's answer only: no policy occurs in it. With $d = 1$ at a termination,
#
# $$Q(s, a) \leftarrow Q(s, a) + \alpha \big[\, r + \gamma\, (1 - d) \max_{a'} Q(s', a') - Q(s, a) \,\big].$$
#
# The policy that acts, the **behaviour policy**, and the policy that is learned, here the greedy one, may differ.
# Such an algorithm is **off-policy**; SARSA is **on-policy**. Off-policy algorithms can learn from old experience
# or from someone else's, which DQN will use.
#
# Why is no correction needed for the actions that the greedy policy would not take? Because $Q(s, a)$ conditions on
# the action. The update asks "given that $a$ was taken, what came of it?", and the answer does not depend on why it
# was taken.
#
# ## Why it converges
#
# Let $T$ be the right side of the optimality equation, as on page 1, and write the update as
#
# $$Q(s, a) \leftarrow (1 - \alpha)\, Q(s, a) + \alpha \big[\, (TQ)(s, a) + w \,\big],$$
#
# where $w = r + \gamma \max_{a'} Q(s', a') - (TQ)(s, a)$ is the noise of the sample. Its mean is 0, by the
# definition of $T$. Let $E$ be the largest error $|Q - Q^*|$ of the table. Since $TQ^* = Q^*$ and $T$ shrinks
# differences by $\gamma$, each bracket is within $\gamma E$ of $Q^*$, noise apart. If every pair is updated again
# and again, all entries come within $\gamma E$, then $\gamma^2 E$, and so on. The noise is averaged out if the step
# sizes of each pair satisfy the conditions of Robbins and Monro,
#
# $$\sum_n \alpha_n = \infty, \qquad \sum_n \alpha_n^2 < \infty:$$
#
# the first lets the table travel any distance, the second lets the noise die out. $\alpha_n = 1/n$ satisfies both.
# Where the environment is deterministic, as the cliff is, $w = 0$ and a constant $\alpha$ suffices. What must not
# be missing is exploration: a pair that is never tried keeps its initial value.
#
# ## The function
#
# `functional.dqn_target` is the bracket's first part. It takes the values of all next actions; DQN uses the same
# function with a network. For $r = -1$ and next values -7 and -5 the target is $-1 + \max(-7, -5) = -6$:

# %%
import torch
from helpers import draw, final, fit, fit_seeds, keep, known, plot

from datamodules import RolloutDataModule
from rl_modules import SARSA, QLearning
from rl_modules import functional as F

print(F.dqn_target(torch.tensor([-1.0]), torch.tensor([False]), torch.tensor([[-7.0, -5.0]]), gamma=1.0))

# %% [markdown]
# ## The maximum of noisy numbers is too high
#
# Suppose that the table's entries for $s'$ are the true values plus independent noise. Their maximum is too high on
# average: $\mathbb{E}[\max_a Q(s', a)] \ge \max_a \mathbb{E}[Q(s', a)]$. This **maximisation bias** is bootstrapped
# from state to state. **Double Q-learning** keeps two tables. One chooses the action, the other says what it is worth:
#
# $$Q_1(s, a) \leftarrow Q_1(s, a) + \alpha \big[\, r + \gamma\, Q_2\big(s', \arg\max_{a'} Q_1(s', a')\big) - Q_1(s,
# a) \,\big].$$
#
# The noise of $Q_2$ is independent of the choice, so the value of the chosen action is right on average. But the
# choice is not always the best action: $\mathbb{E}[Q_2(s', \arg\max_a Q_1(s', a))] \le \max_a \mathbb{E}[Q(s', a)]$,
# with equality only where the actions that are chosen are equally good. The single table overestimates, the double one
# underestimates. Ten actions are worth 0, 1/9, …, 1, and the noise has variance 1:

# %%
generator = torch.Generator().manual_seed(0)
worth = torch.linspace(0, 1, 10)
first, second = worth + torch.randn(2, 100_000, 10, generator=generator)
print("the best action's worth        ", round(float(worth.max()), 2))
print("mean of the maximum            ", round(float(first.amax(1).mean()), 2))
print("mean of the other table's value", round(float(second.gather(1, first.argmax(1, keepdim=True)).mean()), 2))

# %% [markdown]
# ## The run: the cliff again
#
# Both algorithms explore with a constant $\varepsilon = 0.1$ and learn with a constant $\alpha = 0.5$. The optimum
# is -13.

# %%
cliff = known("CliffWalking-v1", max_episode_steps=200)


def train(algorithm, seed, **changes):
    """Trains on the cliff; returns the agent and its curves."""
    settings = {"gamma": 1.0, "learning_rate": 0.5, "exploration_initial_eps": 0.1, "exploration_final_eps": 0.1}
    agent = algorithm(**{**settings, **changes})
    data = RolloutDataModule(
        "CliffWalking-v1", env_kwargs={"max_episode_steps": 200}, seed=seed, n_envs=4, n_steps=4,
        rollouts_per_epoch=50, total_timesteps=20_000, eval_freq=1000,
    )  # fmt: skip
    return agent, fit(agent, data)


pessimist = {"initial_value": -200.0, "exploration_initial_eps": 0.0, "exploration_final_eps": 0.0}
runs = {
    "Q-learning": fit_seeds(lambda seed: train(QLearning, seed)[1]),
    "SARSA": fit_seeds(lambda seed: train(SARSA, seed)[1]),
    "broken: does not explore": fit_seeds(lambda seed: train(QLearning, seed, **pessimist)[1]),
}
plot(runs, "eval/true_return", "transitions", "greedy policy, exact", cliff.optimal_return())
for name, several in runs.items():
    print(f"{name:26} final returns of three seeds", final(several, "eval/true_return"))
keep("Q-learning", runs["Q-learning"], "eval/true_return")

# %% [markdown]
# **How to read it.** The greedy policy of Q-learning reaches -13 in all seeds and stays there, while it still
# explores. The next plot shows the returns *of training*, random steps included. There SARSA is better: Q-learning
# walks along the edge, and a random step sometimes sends it over. (SARSA's greedy policy loses its way after falls
# at this large step size; page 3 lowers it.) Both are right, about different policies. Always ask which policy a
# curve shows: the one that explores (`rollout/`), or the one that is learned (`eval/`).

# %%
plot(
    {name: runs[name] for name in ("Q-learning", "SARSA")}, "rollout/ep_rew_mean", "transitions", "returns of training"
)

# %% [markdown]
# **What failure looks like.** The third run starts with pessimistic values of -200 and never acts at random. The
# first way that happens to reach the corner looks better than everything untried. It is repeated forever, and the
# curve is perfectly flat below the optimum. A flat curve does not say that a run has converged to the *best*
# policy. With an initial value of 0, higher than any real value here, the same agent would try everything: optimism
# explores.

# %%
agent, _ = train(QLearning, 0)
draw(agent.q, cliff, "Q-learning: along the edge")

# %% [markdown]
# ## Exercises
#
# **Exercise 4.1.** $Q(s, \cdot) = (1, 4)$, action 0 was taken, $r = 2$, $Q(s', \cdot) = (3, 5)$, $\gamma = 0.5$,
# $\alpha = 0.1$, and the agent takes action 0 in $s'$. Compute the new $Q(s, 0)$ of Q-learning and of SARSA.
#
# <details markdown="1"><summary>Answer</summary>
#
# Q-learning: target $2 + 0.5 \cdot 5 = 4.5$, $Q = 1 + 0.1 \cdot 3.5 = 1.35$. SARSA: target $2 + 0.5 \cdot 3 = 3.5$,
# $Q = 1.25$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# target = float(F.dqn_target(torch.tensor([2.0]), torch.tensor([False]), torch.tensor([[3.0, 5.0]]), gamma=0.5))
# assert abs(1 + 0.1 * (target - 1) - 1.35) < 1e-6 and abs(1 + 0.1 * (2 + 0.5 * 3 - 1) - 1.25) < 1e-6
# ```
#
# </details>
#
# **Exercise 4.2.** Two actions are worth 0; a table holds each value plus or minus 1 with probability 1/2. Compute
# the maximisation bias.
#
# <details markdown="1"><summary>Answer</summary>
#
# The maximum is -1 only if both are, with probability 1/4: $-1/4 + 3/4 = 1/2$.
#
# ```python
# from itertools import product
#
# assert sum(max(pair) for pair in product((-1, 1), repeat=2)) / 4 == 0.5
# ```
#
# </details>
#
# **Exercise 4.3.** Which value does Q-learning give to the start of the cliff, and which has the policy that acts
# with $\varepsilon = 0.1$ around Q-learning's way? (Use `expected_return` for the second.)
#
# <details markdown="1"><summary>Answer</summary>
#
# -13, the value of the greedy policy. The exploring policy earns -45.8 on average (time limit 200): on each of
# about twelve steps beside the cliff a random action goes down with probability $0.1 / 4$, which costs 100 and the
# way back.
#
# ```python
# import torch
# from helpers import known
# from rl_modules import functional as F
#
# cliff = known("CliffWalking-v1", max_episode_steps=200)
# q = F.value_iteration(cliff.transition, cliff.reward, gamma=1.0)
# greedy = torch.nn.functional.one_hot(q.argmax(-1)[:48], 4).double()
# assert cliff.expected_return(greedy) == -13
# assert round(cliff.expected_return(0.9 * greedy + 0.1 / 4), 1) == -45.8
# ```
#
# </details>
#
# ## What is open
#
# A table has one entry per state. A cart with a pole is described by four real numbers, and no state ever occurs
# twice. [DQN](05_dqn.ipynb) replaces the table by a network, and has to repair what breaks.
#
# **Sources.** Watkins 1989; convergence: Jaakkola, Jordan & Singh 1994; double Q-learning: van Hasselt 2010; Sutton
# & Barto 2018, sections 6.5 to 6.7.
