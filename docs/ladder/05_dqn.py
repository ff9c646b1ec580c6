# %% [markdown]
# # DQN
#
# A table has no entry for an unseen state, whereas a network generalises. Two additions stabilise its training: a
# buffer of past transitions, and a target network that is copied at intervals (Mnih et al. 2015):
#
# ```
# y = r + γ (1 - terminated) max_a' Q_target(s', a')          L = Huber(Q(s, a) - y)
# ```
#
# `functional.dqn_target` computes y, and `functional.td_loss` computes L. With `double=True` the online network selects
# a', and the target network evaluates it.

# %%
import torch
from helpers import fit, plot

from datamodules import ReplayDataModule
from rl_modules import DQN
from rl_modules import functional as F

target = F.dqn_target(torch.tensor([1.0]), torch.tensor([False]), torch.tensor([[2.0, 3.0]]), gamma=0.99,
                      next_q_online=torch.tensor([[5.0, 4.0]]))  # fmt: skip
print("double DQN's target", target, "loss", F.td_loss(torch.tensor([2.0]), target, loss="huber"))

# %%
data = ReplayDataModule(
    "CartPole-v1", buffer_size=20_000, learning_starts=500, train_freq=128, gradient_steps=64, batch_size=64, n_steps=3,
    total_timesteps=12_000, eval_freq=1_500, n_eval_episodes=5,
)  # fmt: skip
model = DQN(learning_rate="lin_2.3e-3", target_update_interval=10, exploration_fraction=0.2, exploration_final_eps=0.04,
            double=True, net_arch=[64, 64])  # fmt: skip
curves = fit(model, data)

# %%
plot({"DQN": curves}, "eval/mean_reward", "transitions", "mean return of 5 episodes", best=500)

# %%
plot({"DQN": curves}, "train/q_mean", "transitions", "mean Q of a minibatch")
