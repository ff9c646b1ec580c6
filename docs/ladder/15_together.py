# %% [markdown]
# # All curves together
#
# The pages before use one example each for a table, a network and a language model, so that their curves can be
# laid over one another. This page draws the curves that the notebooks kept (`curves.json`), each as the mean of its
# seeds with a band from the lowest to the highest.
#
# **Before:** [14. Distillation](14_distillation.ipynb) · [the field guide](index.md)
#
# ## Tables
#
# Monte Carlo solves the maze, whose optimum is 10; SARSA and Q-learning solve the cliff, whose optimum is -13. The
# y-axis is the distance to the optimum.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

curves = json.loads(Path("curves.json").read_text("utf-8"))


def lay_over(optimum, xlabel, ylabel, shift=False):
    """Draws the curves of the named algorithms, with their optimum as a line."""
    _, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, best in optimum.items():
        runs = [dict(map(tuple, run)) for run in curves[name]]
        steps = sorted(set(runs[0]).intersection(*runs[1:]))
        values = torch.tensor([[run[step] for step in steps] for run in runs]) - (best if shift else 0)
        [line] = axes.plot(steps, values.mean(0), label=name)
        axes.fill_between(steps, values.amin(0), values.amax(0), alpha=0.15, color=line.get_color(), linewidth=0)
    axes.axhline(0 if shift else next(iter(optimum.values())), color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend()
    plt.show()


lay_over({"Monte Carlo": 10, "SARSA": -13, "Q-learning": -13}, "transitions", "exact return - optimum", shift=True)

# %% [markdown]
# ## CartPole
#
# The same pole, the same evaluation, the same optimum of 500.
#
# * DQN needs the fewest transitions, because it uses each many times, and the most computation per transition.
# * PPO and TRPO use a rollout for several passes or one long step. A2C makes many short steps. REINFORCE needs the
#   most transitions: each is used once, without a critic.
# * The bands tell how far a single seed can be trusted. Before the plateau they overlap for most pairs of
#   algorithms: a comparison of two runs with one seed each would say nothing.

# %%
optimum = dict.fromkeys(["DQN", "PPO", "TRPO", "A2C", "REINFORCE"], 500)
lay_over(optimum, "transitions", "mean return of 10 episodes")

# %% [markdown]
# ## Pendulum
#
# The two algorithms for real-valued actions. The line is the optimum that page 9c finds by dynamic programming.

# %%
lay_over(dict.fromkeys(["SAC on Pendulum", "TD3 on Pendulum"], -140.7), "transitions", "mean return of 50 episodes")

# %% [markdown]
# ## Sums of two digits
#
# The share of right answers among samples, for the policies of pages 11 and 12. RLHF learns from a judge that was
# trained on noisy comparisons, and levels off below 1, at the optimum of that judge's score less the KL penalty. GRPO
# starts lower, from a shorter SFT, learns from a program that knows the answer, and approaches the optimum of 1.

# %%
lay_over({"RLHF": 1, "GRPO": 1}, "optimizer steps", "share of right answers")

# %% [markdown]
# ## The maze as text
#
# The mean return of a step's dialogues, whose optimum is 10 as in the table's maze. GRPO in turns has to find the goal,
# from walks that did not fall into the trap. A teacher that knows the way brings its student close to the optimum from
# a shorter SFT on all walks.

# %%
lay_over({"GRPO in turns": 10, "Distillation": 10}, "optimizer steps", "mean return of a dialogue, sampled")

# %% [markdown]
# ## What changed on the way
#
# | page | estimate of how good an action is | what is improved | who gives the reward |
# |---|---|---|---|
# | 0 | mean of rewards, with a bonus for few | table of one state | the environment |
# | 1 | exact expectation over $P$ | table | the environment, known |
# | 2 | mean of returns | table | the environment |
# | 3, 4 | reward and the table's next value | table | the environment |
# | 5 | reward and the network's next value | value network | the environment |
# | 6 | return less a mean | policy network | the environment |
# | 7, 8, 9 | GAE with a critic | policy network, with growing care for the length of a step | the environment |
# | 9b, 9c | a critic's slope at the action | policy network | the environment, in 9c with the entropy |
# | 11 | GAE over tokens | language model | a model of human comparisons (10), less the KL |
# | 11b | none: two answers are compared | language model | human comparisons, at once |
# | 12 | reward less the group's mean | language model | a program |
# | 13 | return of a dialogue less the group's mean | language model | the environment |
# | 14 | distance to a teacher's distribution of each token | language model | a teacher |
#
# The same classes run at full size: [results](../results.md), [algorithms](../algorithms/index.md), [the RLHF
# pipeline](../language/rlhf.md), [R1's pipeline](../language/r1.md).
