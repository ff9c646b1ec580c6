# %% [markdown]
# # Dynamic programming
#
# In a known environment the values follow from equations, and nothing has to be learned. The optimal action values
# satisfy Bellman's optimality equation,
#
# ```
# Q*(s, a) = r(s, a) + γ Σ_s' P(s'|s, a) max_a' Q*(s', a')
# ```
#
# and the values of a given policy π satisfy
#
# ```
# V(s) = Σ_a π(a|s) [ r(s, a) + γ Σ_s' P(s'|s, a) V(s') ]
# ```
#
# `functional.value_iteration` and `functional.policy_evaluation` solve them. The example is a maze of 2 × 3 cells: +10
# at the goal, -10 in the trap.

# %%
import gymnasium as gym
import torch
from helpers import show

from datamodules.envs.model import transition_model
from recipes.grid_pictures import draw_values
from rl_modules import functional as F

model = transition_model(gym.make("Maze-v0"))
print("states", model.states, "actions", model.reward.shape[1], "P", tuple(model.transition.shape))

# %% [markdown]
# This cell evaluates a random policy and the optimal one:

# %%
gamma = 0.9
n_states, n_actions = model.reward.shape
random_walk = torch.full((n_states, n_actions), 1 / n_actions, dtype=torch.float64)
value = F.policy_evaluation(model.transition, model.reward, random_walk, gamma)
q_star = F.value_iteration(model.transition, model.reward, gamma)
print("V of the random walk ", [round(v, 2) for v in value[: model.states].tolist()])
print("V of the best policy ", [round(v, 2) for v in q_star.amax(-1)[: model.states].tolist()])

# %% [markdown]
# The solution satisfies its own equation:

# %%
backup = model.reward + gamma * model.transition @ q_star.amax(-1)
print("largest residual", float((backup - q_star).abs().max()))

# %%
show(draw_values(q_star[: model.states], model, ("V* and the best actions",)))

# %% [markdown]
# All later pages of the ladder find such values, or a policy, *without* knowing P.
