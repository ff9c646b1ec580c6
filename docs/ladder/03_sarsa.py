# %% [markdown]
# # SARSA
#
# Monte Carlo waits for the end of the episode. SARSA replaces the later rewards by its own estimate of the next state's
# value:
#
# ```
# Q(s, a) ← Q(s, a) + α [ r + γ (1 - terminated) Q(s', a') - Q(s, a) ]
# ```
#
# The target is a one-step return, `functional.n_step_returns(..., n=1)`, with Q of the next action.

# %%
import torch
from helpers import fit, plot, show

from datamodules import RolloutDataModule
from datamodules.envs.model import transition_model
from datamodules.envs.vector import make_env
from recipes.grid_pictures import draw_values
from rl_modules import SARSA
from rl_modules import functional as F

no = torch.zeros(1, 1, dtype=torch.bool)
print(F.n_step_returns(torch.tensor([[-1.0]]), torch.tensor([[-5.0]]), no, no, gamma=1.0, n=1))

# %% [markdown]
# In CliffWalking each step costs 1, and a step off the cliff costs 100. SARSA evaluates its own ε-greedy policy, so it
# learns to keep away from the edge.

# %%
data = RolloutDataModule(
    "CliffWalking-v1", env_kwargs={"max_episode_steps": 200}, n_envs=4, n_steps=4, rollouts_per_epoch=50,
    total_timesteps=16000, eval_freq=1600,
)  # fmt: skip
agent = SARSA(gamma=1.0, learning_rate=0.5, exploration_initial_eps=0.1, exploration_final_eps=0.1)
curves = fit(agent, data)

# %%
plot({"SARSA": curves}, "rollout/ep_rew_mean", "transitions", "return of training")

# %%
model = transition_model(make_env("CliffWalking-v1", {"max_episode_steps": 200}))
show(draw_values(agent.q, model, ("SARSA",)))
