# %% [markdown]
# # 5. DQN
#
# [Q-learning](04_q_learning.ipynb) finds the best policy with one table entry per state. In CartPole the state is
# four real numbers: position and speed of a cart, angle and angular speed of the pole on it. No state occurs twice.
# This page replaces the table by a network.
#
# **Before:** [4. Q-learning](04_q_learning.ipynb) · **Next:** [5b. Distributions of
# returns](05b_distributions.ipynb) ·
# [glossary](glossary.md)
#
# ## From a table to a regression
#
# A network with weights $\theta$ maps a state to one number per action, $Q_\theta(s, a)$. Q-learning moved an entry
# towards its target. A network is moved by gradient descent on the squared distance,
#
# $$L(\theta) = \tfrac12 \big( Q_\theta(s, a) - y \big)^2, \qquad y = r + \gamma\, (1 - d) \max_{a'} Q_\theta(s',
# a'),$$
#
# where $y$ is treated as a constant, although it contains $\theta$: the target is where the value should go, and
# must not move towards the prediction. With $\nabla_\theta$ for the gradient with respect to $\theta$, a step of
# size $\alpha$ is
#
# $$\theta \leftarrow \theta + \alpha \big[\, y - Q_\theta(s, a) \,\big] \nabla_\theta Q_\theta(s, a).$$
#
# If $\theta$ is a table, $\nabla_\theta Q_\theta(s, a)$ is 1 for the entry $(s, a)$ and 0 for the others, and this
# is Q-learning, letter by letter. Because the derivative of $y$ is left out, the step is called a
# **semi-gradient**. It is not the gradient of any fixed function, and the proof of the last page no longer applies:
# a step for one state also changes the values of others, and may raise the largest error. Three things together can
# make it diverge: a network, bootstrapping, and learning off-policy. Sutton and Barto call them the **deadly
# triad**.
#
# By hand: two states with $Q_\theta(s_1) = \theta$ and $Q_\theta(s_2) = 2 \theta$, one action, reward 0, and a
# transition from $s_1$ to $s_2$ that is updated again and again. Its target is $2 \gamma \theta$, the true values
# are 0, and $\theta \leftarrow \theta + \alpha (2 \gamma \theta - \theta) = \theta\, (1 + \alpha (2 \gamma - 1))$.
# For $\gamma > 1/2$ the weight grows without bound.
#
# ## What DQN adds
#
# Mnih et al. 2015 add two parts that keep the regression stable.
#
# * **Replay.** Transitions are stored in a buffer, and minibatches are drawn from it at random. Consecutive
#   transitions resemble each other; a network trained on them in order forgets the rest. Random draws are close to
#   independent, as stochastic gradient descent assumes, and each transition is used several times. This is allowed
#   because Q-learning is off-policy.
# * **Target network.** The target uses weights $\theta^-$, a copy of $\theta$ that is renewed only now and then.
#   Between two copies the target stands still, and the regression is an ordinary one.
#
# Two more are usual. **Double DQN** ([arXiv:1509.06461](https://arxiv.org/abs/1509.06461)) reduces the maximisation
# bias of page 4: the network chooses the action, and the target network, an older copy and so not independent of it,
# says what it is worth,
#
# $$y = r + \gamma\, (1 - d)\, Q_{\theta^-}\big(s', \arg\max_{a'} Q_\theta(s', a')\big).$$
#
# The **Huber loss** replaces the square of errors above 1 by a straight line, so that its gradient is at most 1: a
# single surprising transition cannot throw the weights far. `functional.dqn_target` computes $y$,
# `functional.td_loss` the loss. By hand, with $r = 1$, $\gamma = 0.9$ and target values (2, 3): plain DQN takes the
# maximum, $1 + 0.9 \cdot 3 = 3.7$. If the network prefers action 0, double DQN takes $1 + 0.9 \cdot 2 = 2.8$. The
# Huber loss of a prediction 2 is $\tfrac12 0.8^2 = 0.32$ for the second, and $1.7 - \tfrac12 = 1.2$ for the first.

# %%
import torch
from helpers import final, fit, fit_seeds, keep, plot

from datamodules import ReplayDataModule
from rl_modules import DQN
from rl_modules import functional as F

reward, no, next_q = torch.tensor([1.0]), torch.tensor([False]), torch.tensor([[2.0, 3.0]])
plain = F.dqn_target(reward, no, next_q, gamma=0.9)
double = F.dqn_target(reward, no, next_q, gamma=0.9, next_q_online=torch.tensor([[5.0, 4.0]]))
for name, target in (("plain", plain), ("double", double)):
    loss = F.td_loss(torch.tensor([2.0]), target, loss="huber")
    print(f"{name:7} target {float(target):.2f}  loss {float(loss):.2f}")

# %% [markdown]
# ## The run: CartPole
#
# The agent pushes the cart left or right. Each step gives a reward of 1 until the pole falls, the cart leaves the
# track, or 500 steps are over. The best possible return is therefore **500**, the line in all CartPole plots of
# this guide. The 500th step is a truncation, not a termination ($d = 0$): the pole still stands, and the later
# rewards are estimated.
#
# The settings follow `dqn/cartpole.yaml`, with smaller networks and a shorter run: 30,000 transitions in rounds of 128
# with 64 gradient steps each, 3-step targets, a step size that decays to 0, and a target network that is renewed in
# each round (`target_update_interval` counts transitions; a round is longer than 10). The network has *dueling*
# heads: the network's last layers compute one number per state and one per action, and $Q$ is their sum,
# less the mean of the second. Three seeds take about a minute.


# %%
def train(seed, total_timesteps=30_000, **changes):
    """Trains DQN on CartPole; returns the curves."""
    settings = {"target_update_interval": 10, "double": True, "dueling": True, **changes}
    settings.setdefault("learning_rate", "lin_2.3e-3")
    model = DQN(exploration_fraction=0.2, exploration_final_eps=0.04, net_arch=[128, 128],
                **settings)  # fmt: skip
    data = ReplayDataModule(
        "CartPole-v1", seed=seed, buffer_size=100_000, learning_starts=1000, train_freq=128, gradient_steps=64,
        batch_size=64, n_steps=3, total_timesteps=total_timesteps, eval_freq=3000, n_eval_episodes=10,
    )  # fmt: skip
    return fit(model, data)


runs = fit_seeds(train)
broken = train(0, learning_rate=0.1, loss="mse", max_grad_norm=None, double=False)
plot({"DQN": runs, "broken: α = 0.1": broken}, "eval/mean_reward", "transitions", "mean return, 10 episodes", best=500)
print("final returns of three seeds", final(runs, "eval/mean_reward"), "broken", final([broken], "eval/mean_reward"))
keep("DQN", runs, "eval/mean_reward")

# %% [markdown]
# **How to read it.** Ten evaluation episodes without random actions are played every 3,000 transitions. Returns of
# 100 to 200 mean that the pole stands but the cart drifts off the track. The next plot shows the mean $Q$ of the
# minibatches. It has a known ceiling: with a reward of 1 per step no value exceeds $1 / (1 - \gamma) = 100$. A mean
# $Q$ far above it is a diverging bootstrap; one that stays near 0 is a target network that is renewed too rarely.

# %%
plot({"DQN": runs, "broken: α = 0.1": broken}, "train/q_mean", "transitions", "mean Q of a minibatch",
     best=100, best_name="highest possible value")  # fmt: skip

# %% [markdown]
# **What failure looks like.** The broken run has a step size 40 times larger, squared errors, and no clipping of
# gradients. It stays below 200: each large step that repairs some states damages others. Its loss is finite and its
# $Q$ stays below the ceiling and looks healthy; only the returns show the fault. A target that is renewed too
# rarely shows in the values instead: each copy extends their horizon by three steps only.
#
# The divergence of the two states above, with $\alpha = 0.1$:

# %%
for gamma in (0.4, 0.5, 0.9):
    theta = 1.0
    for _ in range(100):
        target = F.dqn_target(torch.tensor([0.0]), torch.tensor([False]), torch.tensor([[2 * theta]]), gamma=gamma)
        theta += 0.1 * (float(target) - theta)
    print(f"γ = {gamma}: θ after 100 updates {theta:.3g}")

# %% [markdown]
# ## Exercises
#
# **Exercise 5.1.** The rewards of two transitions are 1, the second terminates. The target network has the values
# (10, 20) in both next states, $\gamma = 0.9$. Compute both targets.
#
# <details markdown="1"><summary>Answer</summary>
#
# $1 + 0.9 \cdot 20 = 19$, and 1: after a termination nothing is added.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# next_q = torch.tensor([[10.0, 20.0], [10.0, 20.0]])
# target = F.dqn_target(torch.ones(2), torch.tensor([False, True]), next_q, gamma=0.9)
# assert target.tolist() == [19.0, 1.0]
# ```
#
# </details>
#
# **Exercise 5.2.** Compute the gradient of squared and Huber loss with respect to the prediction, for a prediction
# that is 3 too low.
#
# <details markdown="1"><summary>Answer</summary>
#
# The functional's squared loss has no factor ½: the gradient is $2 \cdot (-3) = -6$. Huber's is -1, whatever the
# distance beyond 1.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# for loss, gradient in (("mse", -6.0), ("huber", -1.0)):
#     prediction = torch.tensor([2.0], requires_grad=True)
#     F.td_loss(prediction, torch.tensor([5.0]), loss=loss).backward()
#     assert float(prediction.grad) == gradient
# ```
#
# </details>
#
# **Exercise 5.3.** A transition's n-step target uses rewards 1, 1, 1 and then the target network's maximum 50, with
# $\gamma = 0.99$. By how much does an error of 10 in that maximum shift the target, for $n = 1$ and $n = 3$?
#
# <details markdown="1"><summary>Answer</summary>
#
# By $\gamma^n$ times the error: 9.9 for one step, $0.99^3 \cdot 10 = 9.70$ for three. More rewards that are real,
# less that is estimated.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# no = torch.zeros(3, 1, dtype=torch.bool)
# def target(value, n):
#     return float(F.n_step_returns(torch.ones(3, 1), torch.full((3, 1), value), no, no, gamma=0.99, n=n)[0])
# assert abs(target(60.0, 1) - target(50.0, 1) - 9.9) < 1e-4
# assert abs(target(60.0, 3) - target(50.0, 3) - 9.703) < 1e-3
# ```
#
# </details>
#
# ## What is open
#
# DQN learns values and derives the policy by a maximum over actions. The maximum makes the policy jump when two
# values cross, needs few actions, and can only give deterministic policies. [REINFORCE](06_reinforce.ipynb)
# improves the policy itself, by gradient ascent on the return.
#
# **Sources.** Mnih et al. 2015, *Nature* 518; Sutton & Barto 2018, sections 11.2 (the two states above) and 11.3
# (the deadly triad); dueling heads: [arXiv:1511.06581](https://arxiv.org/abs/1511.06581); which parts matter:
# Rainbow, [arXiv:1710.02298](https://arxiv.org/abs/1710.02298).
