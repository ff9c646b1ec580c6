# %% [markdown]
# # Q-learning
#
# SARSA learns the value of its own policy. Q-learning learns the value of the optimal policy, whatever policy acts:
#
# ```
# Q(s, a) ← Q(s, a) + α [ r + γ (1 - terminated) max_a' Q(s', a') - Q(s, a) ]
# ```
#
# `functional.dqn_target` computes the target; DQN uses the same function with networks.

# %%
import torch
from helpers import fit, plot, show

from datamodules import RolloutDataModule
from datamodules.envs.model import transition_model
from datamodules.envs.vector import make_env
from recipes.grid_pictures import draw_values
from rl_modules import SARSA, QLearning
from rl_modules import functional as F

print(F.dqn_target(torch.tensor([-1.0]), torch.tensor([False]), torch.tensor([[-7.0, -5.0]]), gamma=1.0))


# %%
def cliff():
    """The same experience for both."""
    return RolloutDataModule(
        "CliffWalking-v1", env_kwargs={"max_episode_steps": 200}, n_envs=4, n_steps=4, rollouts_per_epoch=50,
        total_timesteps=16000, eval_freq=1600,
    )  # fmt: skip


settings = {"gamma": 1.0, "learning_rate": 0.5, "exploration_initial_eps": 0.1, "exploration_final_eps": 0.1}
agent = QLearning(**settings)
curves = {"Q-learning": fit(agent, cliff()), "SARSA": fit(SARSA(**settings), cliff())}

# %%
plot(curves, "rollout/ep_rew_mean", "transitions", "return of training")

# %%
model = transition_model(make_env("CliffWalking-v1", {"max_episode_steps": 200}))
show(draw_values(agent.q, model, ("Q-learning: along the edge",)))

# %% [markdown]
# Q-learning's greedy policy is the shortest path, along the edge. During exploration it falls off more often than SARSA
# (Sutton & Barto 2018, example 6.6).

# %%
plot(curves, "eval/true_return", "transitions", "greedy policy, exact", model.optimal_return())

# %% [markdown]
# SARSA's greedy policy takes the longer, safer way. With a constant step size of 0.5 the table keeps changing: after a
# single fall the greedy policy may no longer reach the goal, as at the end of this run. `sarsa/cliffwalking_decay.yaml`
# lowers ε to 0, with a step size of 0.2 and optimistic initial values.
