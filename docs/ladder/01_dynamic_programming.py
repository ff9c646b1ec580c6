# %% [markdown]
# # 1. Dynamic programming
#
# An agent acts in an environment and receives rewards. This page defines the problem that all later pages solve,
# and solves it exactly for an environment that is known and small. The solution is the line in the plots of the
# next pages.
#
# **Before:** [0. Bandits](00_bandits.ipynb) · **Next:** [2. Monte Carlo](02_monte_carlo.ipynb) ·
# [glossary](glossary.md)
#
# ## The problem
#
# At step $t = 0, 1, 2, \dots$ the agent is in a **state** $s_t$, chooses an **action** $a_t$, and receives a
# **reward** $r_t$, a number. The environment then moves to the state $s_{t+1}$. The next state and the reward
# depend on $s_t$ and $a_t$ only, not on anything earlier (the Markov property). Such an environment is a **Markov
# decision process**:
#
# * $P(s' \mid s, a)$ is the probability that action $a$ in state $s$ leads to state $s'$;
# * $r(s, a)$ is the expected reward of action $a$ in state $s$;
# * $\gamma \in [0, 1]$ is the **discount** per step.
#
# One step, $(s_t, a_t, r_t, s_{t+1})$, is a **transition**; the steps from a start to an end are an **episode**. A
# **policy** $\pi(a \mid s)$ is the probability of action $a$ in state $s$. The **return** from step $t$ is the
# discounted sum of rewards,
#
# $$G_t = r_t + \gamma r_{t+1} + \gamma^2 r_{t+2} + \dots = \sum_{k=0}^{\infty} \gamma^k r_{t+k}.$$
#
# If no reward exceeds $r_{\max}$ in size, then $|G_t| \le r_{\max} \sum_k \gamma^k = r_{\max} / (1 - \gamma)$: a
# discount below 1 makes every return finite. At $\gamma = 1$ a return is finite if its episode ends. After its end an
# episode gives no rewards. In the equations its end is a state that leads to itself with reward 0.
#
# The **value** of a state and the **action value** are expected returns under a policy:
#
# $$V^\pi(s) = \mathbb{E}_\pi[\, G_t \mid s_t = s \,], \qquad Q^\pi(s, a) = \mathbb{E}_\pi[\, G_t \mid s_t = s,\,
# a_t = a \,].$$
#
# $\mathbb{E}_\pi$ is the mean over everything random: the policy's actions and the environment's moves.
#
# ## Bellman's equation for a policy
#
# The definition of the return contains a copy of itself, one step later:
#
# $$G_t = r_t + \gamma\, (r_{t+1} + \gamma r_{t+2} + \dots) = r_t + \gamma\, G_{t+1}.$$
#
# Take the mean on both sides, given $s_t = s$ and $a_t = a$. The mean of $r_t$ is $r(s, a)$. The mean of $G_{t+1}$
# follows from the law of total expectation, by cases of the next state; by the Markov property, its mean given
# $s_{t+1} = s'$ is $V^\pi(s')$, whatever happened before:
#
# $$Q^\pi(s, a) = r(s, a) + \gamma \sum_{s'} P(s' \mid s, a)\, V^\pi(s'), \qquad V^\pi(s) = \sum_a \pi(a \mid s)\,
# Q^\pi(s, a).$$
#
# Insert the first into the second. With $r_\pi(s) = \sum_a \pi(a \mid s)\, r(s, a)$ and
# $P_\pi(s, s') = \sum_a \pi(a \mid s)\, P(s' \mid s, a)$ this is one linear equation per state ($I$ is the identity
# matrix),
#
# $$V^\pi = r_\pi + \gamma P_\pi V^\pi \quad\Longleftrightarrow\quad V^\pi = (I - \gamma P_\pi)^{-1} r_\pi.$$
#
# `functional.policy_evaluation` solves this system. At $\gamma = 1$ the matrix $I - \gamma P_\pi$ has a row of zeros,
# that of the end; the function replaces this equation by $V^\pi = 0$. The example is a maze of 2 × 3 cells. The agent
# starts at S; the goal G gives +10, the trap T gives -10, and both end the episode. A move into a wall changes
# nothing. The discount is 0.9.
#
# ```text
# S . .        states 0 1 2
# . T G               3 4 5
# ```

# %%
import matplotlib.pyplot as plt
import torch
from helpers import draw, known

from rl_modules import functional as F

maze, gamma = known("Maze-v0"), 0.9
n_states, n_actions = maze.reward.shape  # the six cells and the end
random_walk = torch.full((n_states, n_actions), 1 / n_actions, dtype=torch.float64)
value = F.policy_evaluation(maze.transition, maze.reward, random_walk, gamma)
print("V of the random walk", [round(v, 3) for v in value[:6].tolist()])

# %% [markdown]
# ## Bellman's optimality equation
#
# A policy is optimal if no policy has a higher value in any state. $V^*$ and $Q^*$ denote its values. After the
# first action the best that one can do is to go on optimally, so the sum over actions becomes a maximum:
#
# $$Q^*(s, a) = r(s, a) + \gamma \sum_{s'} P(s' \mid s, a)\, \max_{a'} Q^*(s', a').$$
#
# The equation is no longer linear. It is solved by iteration: start with any $Q_0$ and apply the right side to all
# pairs again and again, $Q_{k+1} = T Q_k$; one application is a **sweep**. This is **value iteration**, and it
# converges for $\gamma < 1$. Proof: for two tables $Q$ and $Q'$,
#
# $$\begin{aligned}|TQ(s,a) - TQ'(s,a)| &= \gamma \Big| \sum_{s'} P(s' \mid s,a) \big[\max_{a'} Q(s', a') -
# \max_{a'} Q'(s', a')\big] \Big| \\ &\le \gamma \max_{s', a'} |Q(s', a') - Q'(s', a')|,\end{aligned}$$
#
# because two maxima differ by no more than the largest difference of their entries, and a mean by no more than its
# largest term. One application shrinks the largest difference of any two tables by $\gamma$. So there is only one
# fixed point, $Q^*$, and the error after $k$ sweeps is at most $\gamma^k$ times the error of the start. At
# $\gamma = 1$, as on pages 3 and 4, the proof gives no such bound. The sweeps converge there too, because each step
# costs something and every best way ends.
#
# The policy that takes an action with the highest $Q^*(s, a)$ is optimal: by the equation its value satisfies
# $V(s) = \max_a Q^*(s, a)$, and following it forever collects exactly this value. Whoever knows $Q^*$ needs no $P$
# to act.

# %%
q_star = F.value_iteration(maze.transition, maze.reward, gamma)
print("V* ", [round(v, 3) for v in q_star.amax(-1)[:6].tolist()])
backup = maze.reward + gamma * maze.transition @ q_star.amax(-1)
print("largest difference of the two sides of the equation:", float((backup - q_star).abs().max()))
draw(q_star, maze, "V* and the best actions")

# %% [markdown]
# By hand: the goal is three steps from the start, the reward comes with the third, so
# $V^*(\text{start}) = 0.9^2 \cdot 10 = 8.1$. From cell 3 the way leads back through the start, four steps:
# $0.9^3 \cdot 10 = 7.29$.
#
# ## The run: how fast the sweeps converge
#
# The maze is deterministic and finite, so value iteration reaches $Q^*$ exactly once the reward has travelled along
# the longest best way: four steps from cell 3, and one more for an action there that hits the wall. Evaluating the
# random walk by sweeps, $V_{k+1} = r_\pi + \gamma P_\pi V_k$, takes longer: its error shrinks by a factor per
# sweep, which the proof bounds by $\gamma$.


# %%
def errors(step, x, solution, sweeps=60):
    """The largest error after each sweep."""
    found = []
    for _ in range(sweeps):
        found.append(float((x - solution).abs().max()))
        x = step(x)
    return found


zero = torch.zeros_like(q_star)
chain = torch.einsum("sa,sat->st", random_walk, maze.transition)  # P_π
chain_reward = (random_walk * maze.reward).sum(-1)  # r_π
restarts = chain.clone()  # wrong: the end of an episode leads to the next start
restarts[:, 0] += restarts[:, 6]
restarts[:, 6] = 0
curves = {
    "policy evaluation": errors(lambda v: chain_reward + gamma * chain @ v, zero[:, 0], value),
    "value iteration": errors(lambda q: maze.reward + gamma * maze.transition @ q.amax(-1), zero, q_star),
    "broken: goes on after the end": errors(lambda v: chain_reward + gamma * restarts @ v, zero[:, 0], value),
}
_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name, curve in curves.items():
    axes.semilogy([max(error, 1e-6) for error in curve], label=name)
axes.semilogy(
    [curves["policy evaluation"][0] * gamma**k for k in range(60)],
    "k--",
    linewidth=1,
    label="bound of policy evaluation",
)
axes.set(xlabel="sweeps", ylabel="largest error", ylim=(1e-4, 1e2))
axes.legend()
plt.show()
print("errors of value iteration", [round(error, 3) for error in curves["value iteration"][:7]])

# %% [markdown]
# **How to read it.** On a logarithmic axis a constant factor per sweep is a straight line. Policy evaluation lies
# below its bound, the first error times $\gamma^k$, because episodes end and later rewards count less than the
# discount alone says. Value iteration falls to 0 at the fifth sweep.
#
# **What failure looks like.** The third curve solves another equation: after the end of an episode it continues
# with the value of the next start, as an implementation does that ignores the end. It converges as fast, but not to
# the value of the policy. This error shows in a learning curve as a value that settles far from the returns that
# the agent receives.
#
# ## Exercises
#
# **Exercise 1.1.** The policy "right, right, down" is deterministic. Compute its value in the start cell for
# $\gamma = 0.5$ by hand, then with `policy_evaluation`.
#
# <details markdown="1"><summary>Answer</summary>
#
# The only reward, 10, comes with the third action and is discounted twice: $0.5^2 \cdot 10 = 2.5$.
#
# ```python
# import torch
# from helpers import known
# from rl_modules import functional as F
#
# maze = known("Maze-v0")
# policy = torch.zeros(7, 4, dtype=torch.float64)
# policy[:, 2] = 1.0  # right
# policy[2] = torch.tensor([0.0, 1.0, 0.0, 0.0])  # down in cell 2
# value = F.policy_evaluation(maze.transition, maze.reward, policy, 0.5)
# assert abs(float(value[0]) - 2.5) < 1e-9
# ```
#
# </details>
#
# **Exercise 1.2.** Without discount every way to the goal has the return 10. Which probability of reaching the goal
# does the random walk have from the start? (Use $V$ at $\gamma = 1$.)
#
# <details markdown="1"><summary>Answer</summary>
#
# Let $p_i$ be the probability of the goal from cell $i$. The walk ends in the goal or in the trap, so
# $V = 10 p - 10 (1 - p)$ and $p = (V + 10) / 20$. By hand: a wall leaves the walk where it is, so walls drop out of
# the means, and $2 p_0 = p_1 + p_3$, $3 p_1 = p_0 + p_2$, $2 p_2 = p_1 + 1$, $2 p_3 = p_0$. The solution is
# $p_0 = 2/11$.
#
# ```python
# import torch
# from helpers import known
# from rl_modules import functional as F
#
# maze = known("Maze-v0")
# value = F.policy_evaluation(maze.transition, maze.reward, torch.full((7, 4), 0.25, dtype=torch.float64), 1.0)
# assert abs((float(value[0]) + 10) / 20 - 2 / 11) < 1e-9
# ```
#
# </details>
#
# **Exercise 1.3.** Each move now slips: with probability 0.2 the agent stays where it is. What is $V^*$ in the cell
# above the goal (cell 2), where one successful move suffices, with $\gamma = 0.9$?
#
# <details markdown="1"><summary>Answer</summary>
#
# $V = 0.8 \cdot 10 + 0.2 \cdot 0.9\, V$, so $V = 8 / 0.82 = 9.756$.
#
# ```python
# import torch
# from helpers import known
# from rl_modules import functional as F
#
# maze = known("Maze-v0")
# stay = torch.eye(7, dtype=torch.float64)[:, None].expand(7, 4, 7)
# q = F.value_iteration(0.8 * maze.transition + 0.2 * stay, 0.8 * maze.reward, 0.9)
# assert abs(float(q[2].max()) - 8 / 0.82) < 1e-6 and round(8 / 0.82, 3) == 9.756
# ```
#
# </details>
#
# ## What is open
#
# All this needs $P$ and $r$. An agent that is put into an unknown maze has neither; it can only act and see what
# happens. [The next page](02_monte_carlo.ipynb) replaces the expectations of Bellman's equation by averages over
# episodes.
#
# **Sources.** Bellman 1957; Sutton & Barto, *Reinforcement Learning*, 2nd edition 2018, chapters 3 and 4; the error
# bound: Puterman 1994, theorem 6.3.1.
