# %% [markdown]
# # Monte Carlo control
#
# If P is unknown, Monte Carlo control estimates the value of an action from the returns of whole episodes:
#
# ```
# G_t = r_t + γ G_{t+1}            Q(s, a) ← Q(s, a) + α [ G_t - Q(s, a) ]
# ```
#
# `functional.discounted_returns` computes G. Actions are ε-greedy, and ε decays.

# %%
import torch
from helpers import fit, plot, show

from datamodules import RolloutDataModule
from datamodules.envs.model import transition_model
from datamodules.envs.vector import make_env
from recipes.grid_pictures import draw_values
from rl_modules import MonteCarlo
from rl_modules import functional as F

reward = torch.tensor([[0.0], [0.0], [10.0]])
ended = torch.tensor([[False], [False], [True]])
print(F.discounted_returns(reward, torch.zeros(3, 1), ended, torch.zeros_like(ended), gamma=0.9).squeeze())

# %%
data = RolloutDataModule("Maze-v0", n_envs=4, n_steps=4, rollouts_per_epoch=25, total_timesteps=6000, eval_freq=400)
agent = MonteCarlo(
    gamma=0.9, learning_rate=0.05, exploration_fraction=0.8, exploration_initial_eps=1.0, exploration_final_eps=0.1
)
curves = fit(agent, data)

# %%
model = transition_model(make_env("Maze-v0"))
plot({"greedy policy": curves}, "eval/true_return", "transitions", "exact expected return", model.optimal_return())

# %%
show(draw_values(agent.q, model, ("Q after 6,000 transitions",)))

# %% [markdown]
# The values are those of the ε-greedy policy, which sometimes takes a random step, so they are below V*. The greedy
# policy is nevertheless optimal.
