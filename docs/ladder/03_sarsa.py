# %% [markdown]
# # 3. SARSA
#
# [Monte Carlo](02_monte_carlo.ipynb) waits for the end of the episode, and its estimates carry the noise of every
# later step. This page replaces the later rewards by the table's own estimate of the next state.
#
# **Before:** [2. Monte Carlo](02_monte_carlo.ipynb) · **Next:** [4. Q-learning](04_q_learning.ipynb) ·
# [glossary](glossary.md)
#
# ## Temporal difference
#
# Bellman's equation for a policy, written for one transition, says
#
# $$Q^\pi(s_t, a_t) = \mathbb{E}\big[\, r_t + \gamma\, Q^\pi(s_{t+1}, a_{t+1}) \,\big], \qquad a_{t+1} \sim
# \pi(\cdot \mid s_{t+1}).$$
#
# Monte Carlo samples the whole return $G_t$. Here only the reward, the next state and the next action are sampled,
# and the rest is the current table $Q$. The number towards which an update moves an entry is its **target**, here
# $r_t + \gamma\, Q(s_{t+1}, a_{t+1})$. Using an estimate inside a target is called **bootstrapping**:
#
# $$Q(s_t, a_t) \leftarrow Q(s_t, a_t) + \alpha\, \delta_t, \qquad \delta_t = r_t + \gamma\, (1 - d_t)\, Q(s_{t+1},
# a_{t+1}) - Q(s_t, a_t).$$
#
# $\delta_t$ is the **temporal-difference error** (TD error). $d_t$ is 1 if the episode **terminated** with this
# transition, so that no reward can follow, and 0 otherwise. An episode that was only cut off by a time limit has
# $d_t = 0$. The name SARSA lists what an update needs: $s, a, r, s', a'$. The action $a'$ in the target must be the
# one that the agent then takes.
#
# `functional.n_step_returns` with $n = 1$ computes the target. With reward -1 and $Q(s', a') = -5$ it is -6, and -1
# at a termination:

# %%
import torch
from helpers import draw, final, fit, fit_seeds, keep, known, plot

from datamodules import RolloutDataModule
from rl_modules import SARSA
from rl_modules import functional as F

no, yes = torch.zeros(1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)
for terminated in (no, yes):
    print(F.n_step_returns(torch.tensor([[-1.0]]), torch.tensor([[-5.0]]), terminated, no, gamma=1.0, n=1))

# %% [markdown]
# ## Bias against variance
#
# The two targets estimate the same number, and err in different ways.
#
# * $G_t$ has no bias, since its mean is $Q^\pi$ by definition. Its variance contains the noise of all later
#   rewards.
# * $r_t + \gamma Q(s', a')$ is biased as long as $Q(s', a')$ is wrong: its mean is off by $\gamma$ times that
#   error. Its variance contains one reward and one transition only.
#
# Between them lie the **n-step returns**, $n$ rewards and then the table:
#
# $$G_t^{(n)} = r_t + \gamma r_{t+1} + \dots + \gamma^{n-1} r_{t+n-1} + \gamma^n Q(s_{t+n}, a_{t+n}).$$
#
# $n = 1$ is SARSA, and $n \to \infty$ is Monte Carlo. The bias shrinks by $\gamma^n$, the variance mostly grows with
# $n$.
#
# The next cell measures this in the maze. It plays 20,000 random walks from the start, whose exact value is known,
# and computes the n-step targets with two tables: $V = 0$, as at the start of learning, and $V$ at 80 % of the
# truth.

# %%
maze, gamma = known("Maze-v0"), 0.9
exact = F.policy_evaluation(maze.transition, maze.reward, torch.full((7, 4), 0.25, dtype=torch.float64), gamma)
generator = torch.Generator().manual_seed(0)
states, rewards = [torch.zeros(20_000, dtype=torch.long)], []
for _ in range(200):  # all walks side by side; state 6 is the end
    action = torch.randint(4, states[-1].shape, generator=generator)
    rewards.append(maze.reward[states[-1], action])
    states.append(torch.multinomial(maze.transition[states[-1], action], 1, generator=generator)[:, 0])
for share in (0.0, 0.8):
    for n, name in ((1, "one step"), (3, "three steps"), (10, "ten steps"), (200, "Monte Carlo")):
        target = sum(gamma**k * rewards[k] for k in range(n)) + gamma**n * share * exact[states[n]]
        bias, spread = float(target.mean() - exact[0]), float(target.std())
        print(f"table {share:3.0%} right, {name:12} bias {bias:5.2f}  standard deviation {spread:.2f}")

# %% [markdown]
# The squared error of one target is its squared bias plus its variance. A better table lowers the bias, and never
# the variance of Monte Carlo, which a small step size has to average out.
#
# ## The run: the cliff
#
# In CliffWalking the agent goes from the lower left to the lower right corner of a 4 × 12 grid. Each step costs 1.
# Between the corners is a cliff: stepping into it costs 100 and leads back to the start. The shortest way runs
# along the edge and has the return -13, the optimum. With a random step in ten ($\varepsilon = 0.1$) that way is
# expensive, and since SARSA evaluates the policy that it follows, it learns to keep away. What is the best return
# *with* the random steps? Replace every action by "with probability $\varepsilon$ a random one". This is another
# known environment, which value iteration solves:

# %%
cliff = known("CliffWalking-v1", max_episode_steps=200)
epsilon = 0.1


def slippery(x):
    """A table under ε-greedy actions: with probability ε a random action replaces the chosen one."""
    return (1 - epsilon) * x + epsilon * x.mean(1, keepdim=True)


soft = F.value_iteration(slippery(cliff.transition), slippery(cliff.reward), gamma=1.0)
safe = torch.nn.functional.one_hot(soft.argmax(-1)[: cliff.states], 4).double()
print("best return without random steps", cliff.optimal_return())
print("best return with random steps   ", round(float(soft[36].max()), 2))
print("the same policy once the random steps stop", cliff.expected_return(safe))


# %%
def train(seed, total_timesteps=48_000, **changes):
    """Trains SARSA on the cliff; returns the agent and its curves."""
    settings = {"gamma": 1.0, "learning_rate": "lin_0.2", "exploration_initial_eps": 0.1, "exploration_final_eps": 0.1}
    agent = SARSA(**{**settings, **changes})
    data = RolloutDataModule(
        "CliffWalking-v1", env_kwargs={"max_episode_steps": 200}, seed=seed, n_envs=4, n_steps=4,
        rollouts_per_epoch=50, total_timesteps=total_timesteps, eval_freq=2400,
    )  # fmt: skip
    return agent, fit(agent, data)


decay = {"learning_rate": 0.2, "initial_value": 50.0, "exploration_fraction": 0.1, "exploration_final_eps": 0.0}
runs = {
    "ε = 0.1": fit_seeds(lambda seed: train(seed)[1]),
    "ε from 0.1 to 0": fit_seeds(lambda seed: train(seed, 60_000, **decay)[1]),
    "broken: α = 1": fit_seeds(lambda seed: train(seed, learning_rate=1.0)[1]),
}
plot(runs, "eval/true_return", "transitions", "greedy policy, exact", cliff.optimal_return())
for name, several in runs.items():
    print(f"{name:16} final returns of three seeds", final(several, "eval/true_return"))
keep("SARSA", runs["ε from 0.1 to 0"], "eval/true_return")

# %% [markdown]
# **How to read it.** The curve shows the greedy policy without random steps; -200 is the time limit. The step size
# `lin_0.2` falls linearly from 0.2 to 0 during the run. At constant $\varepsilon$ SARSA settles on a way two or three
# rows above the cliff, with return -15 or -17. This is right for the policy that it follows: the exact optimum
# under random steps is the way with -15 (printed above), and the longer way costs hardly more there. Once
# $\varepsilon$ falls to 0 the policy that it follows is the greedy one, and all seeds find the shortest way, -13.
# The optimistic initial value of 50 makes untried actions look good, so that all are tried although $\varepsilon$
# vanishes, but it takes longer.
#
# **What failure looks like.** With $\alpha = 1$ each entry is its last target. One fall into the cliff overwrites
# what many steps have learned, and the greedy policy loses its way again and again: the curve never settles.

# %%
agent, _ = train(0)
explores = 0.9 * agent.greedy_policy() + 0.1 / 4
print("exact return of SARSA's policy with its random steps", round(cliff.expected_return(explores), 2))
draw(agent.q, cliff, "SARSA with random steps: the safe way")

# %% [markdown]
# ## Exercises
#
# **Exercise 3.1.** $Q(s, a) = 2$, $r = 1$, $\gamma = 0.9$, $Q(s', a') = 3$, $\alpha = 0.5$. Compute the TD error
# and the new $Q(s, a)$ if the episode goes on, and if the episode ended.
#
# <details markdown="1"><summary>Answer</summary>
#
# The episode goes on: $\delta = 1 + 2.7 - 2 = 1.7$, and $Q = 2.85$.
# The episode ended: $\delta = 1 - 2 = -1$, and $Q = 1.5$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# no = torch.zeros(1, 1, dtype=torch.bool)
# for ended, q in ((no, 2.85), (~no, 1.5)):
#     target = F.n_step_returns(torch.tensor([[1.0]]), torch.tensor([[3.0]]), ended, no, gamma=0.9, n=1)
#     assert abs(2 + 0.5 * (float(target) - 2) - q) < 1e-6
# ```
#
# </details>
#
# **Exercise 3.2.** The rewards of three steps are 1, 1, 1, the values of their successors 10, 20, 30, and the
# rollout stops there without an end of the episode ($\gamma = 1$). Compute $G_0^{(1)}$, $G_0^{(2)}$ and
# $G_0^{(3)}$.
#
# <details markdown="1"><summary>Answer</summary>
#
# $1 + 10 = 11$, $1 + 1 + 20 = 22$, $1 + 1 + 1 + 30 = 33$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# no, value = torch.zeros(3, 1, dtype=torch.bool), torch.tensor([[10.0], [20.0], [30.0]])
# found = [float(F.n_step_returns(torch.ones(3, 1), value, no, no, gamma=1.0, n=n)[0]) for n in (1, 2, 3)]
# assert found == [11.0, 22.0, 33.0]
# ```
#
# </details>
#
# **Exercise 3.3.** The environment cuts off episodes after 200 steps. Which target does the last transition have if
# it was cut off ($r = -1$, $Q(s', a') = -5$, $\gamma = 1$), and which wrong one if the cut is treated as a
# termination?
#
# <details markdown="1"><summary>Answer</summary>
#
# -6: the state goes on to cost 5, the limit only stopped us from watching. Treated as a termination it would be -1,
# and the table would learn that states near the time limit are cheap.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# reward, value, no = torch.tensor([[-1.0]]), torch.tensor([[-5.0]]), torch.zeros(1, 1, dtype=torch.bool)
# assert float(F.n_step_returns(reward, value, no, ~no, gamma=1.0, n=1)) == -6.0  # truncated
# assert float(F.n_step_returns(reward, value, ~no, no, gamma=1.0, n=1)) == -1.0  # terminated
# ```
#
# </details>
#
# ## What is open
#
# SARSA learns the value of the policy that explores. To learn the best policy it had to stop exploring. Can an
# agent explore, and learn the value of the policy that does *not*? [Q-learning](04_q_learning.ipynb) can.
#
# **Sources.** Rummery & Niranjan 1994; Sutton & Barto 2018, chapters 6 and 7 and example 6.6; time limits: Pardo et
# al. 2018, [arXiv:1712.00378](https://arxiv.org/abs/1712.00378).
