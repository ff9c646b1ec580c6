# %% [markdown]
# # 9c. Soft actor-critic
#
# [TD3](09b_continuous_actions.ipynb) explores with noise whose size a person chose. This page adds exploration to the
# objective: among policies with equal return the least decided one is the best. The result swings up a pendulum.
#
# **Before:** [9b. Continuous actions](09b_continuous_actions.ipynb) · **Next:** [10. Reward
# model](10_reward_model.ipynb) · [glossary](glossary.md)
#
# ## Entropy as a reward
#
# The objective of **maximum entropy** reinforcement learning pays for each nat of the policy's entropy $H$,
#
# $$J = \mathbb{E}\Big[ \sum_t \gamma^t \big( r_t + \alpha\, H(\pi(\cdot \mid s_t)) \big) \Big].$$
#
# The **temperature** $\alpha$, in units of reward per nat, is the literature's letter; step sizes have another name on
# this page. The entropy is $\mathbb{E}_a[-\log \pi(a \mid s)]$, so Bellman's equations get one term more:
#
# $$Q^\pi(s, a) = r(s, a) + \gamma\, \mathbb{E}_{s'}[V^\pi(s')], \qquad V^\pi(s) = \mathbb{E}_{a \sim \pi}\big[
# Q^\pi(s, a) - \alpha \log \pi(a \mid s) \big].$$
#
# Which policy is the best for given $Q$? Let $q(a) = e^{Q(s, a) / \alpha} / z$ be a distribution, where $z$ is the sum
# or integral over the actions that makes it one. Insert $Q = \alpha \log q + \alpha \log z$ into $V$:
#
# $$V(s) = \alpha \log z - \alpha\, \mathbb{E}_{a \sim \pi}\Big[ \log \frac{\pi(a \mid s)}{q(a)} \Big] = \alpha \log z -
# \alpha \operatorname{KL}(\pi \,\Vert\, q).$$
#
# The KL is 0 only for $\pi = q$. The best policy is therefore $q$, in proportion to $e^{Q^*(s, a) / \alpha}$, and its
# value the **soft maximum** $V^*(s) = \alpha \log \sum_a e^{Q^*(s, a) / \alpha}$, which tends to the maximum as
# $\alpha \to 0$. The same lines return with language models, where a reference policy takes the place of the uniform
# one. The cell iterates the equation in the maze of page 1.

# %%
import math

import torch
from helpers import fit, fit_seeds, interval, keep, known, plot

from datamodules import ReplayDataModule
from rl_modules import SAC, TD3
from rl_modules import functional as F
from rl_modules.action_noise import NormalActionNoise

maze, gamma = known("Maze-v0"), 0.9
print(
    "without entropy: V of the start", round(float(F.value_iteration(maze.transition, maze.reward, gamma)[0].max()), 3)
)
for temperature in (1.0, 0.5, 0.2):
    q = torch.zeros_like(maze.reward)
    for _ in range(500):
        soft = temperature * (q / temperature).logsumexp(-1)
        soft[-1] = 0.0  # the end: nothing is chosen there
        q = maze.reward + gamma * maze.transition @ soft
    policy = (q[0] / temperature).softmax(-1)
    entropy = -float((policy * policy.clamp_min(1e-30).log()).sum())
    print(f"α = {temperature:<5} soft V of the start {float(soft[0]):.3f}, entropy of its policy {entropy:.3f} nats")

# %% [markdown]
# ## A Gaussian between bounds
#
# A torque lies between bounds, a Gaussian does not. SAC draws $u$ from a Gaussian whose mean and spread are outputs of
# the network, and acts with $a = \tanh u$. The density changes with the slope of the map: an interval $du$ becomes
# $da = (1 - \tanh^2 u)\, du$ with the same probability. For each number of an action
#
# $$\log \pi(a \mid s) = \log \mathcal{N}(u;\, \mu, \sigma^2) - \log\big(1 - \tanh^2 u\big).$$
#
# Without the **correction** this would be no density of $a$. In float32, $1 - \tanh^2 u$ rounds to 0 at $u = 10$.
# `functional.squashed_gaussian_log_prob` uses the equal form $2\,(\log 2 - |u| - \log(1 + e^{-2 |u|}))$. The cell
# integrates both over all actions.

# %%
u = torch.linspace(-9, 9, 20_001, dtype=torch.float64)[:, None]
mean, log_std = torch.full_like(u, 0.5), torch.full_like(u, -0.5)
corrected = F.squashed_gaussian_log_prob(mean, log_std, u).exp()
plain = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)[:, 0].exp()
for name, density in (("with the correction", corrected), ("without", plain)):
    print(f"integral over all actions, {name:20} {float(torch.trapezoid(density, u.tanh()[:, 0])):.4f}")
far = torch.tensor([[10.0]])
print("log(1 - tanh² u) at u = 10:", float((1 - far.tanh() ** 2).log()), "and by the equal form",
      round(float(2 * (math.log(2) - far - torch.log1p((-2 * far).exp()))), 3))  # fmt: skip

# %% [markdown]
# ## The algorithm
#
# **SAC** (Haarnoja et al. 2018, [arXiv:1801.01290](https://arxiv.org/abs/1801.01290),
# [arXiv:1812.05905](https://arxiv.org/abs/1812.05905)) keeps TD3's pair of critics, replay and target networks. Three
# losses are minimised in turn.
#
# * **Critics**, with an action $a'$ of the present policy:
#   $y = r + \gamma\, (1 - d) \big( \min_i Q_{\phi_i^-}(s', a') - \alpha \log \pi_\theta(a' \mid s') \big)$.
# * **Policy**, the KL to $e^{Q / \alpha} / z$ times $\alpha$, less what does not depend on $\theta$:
#   $\mathbb{E}\big[ \alpha \log \pi_\theta(a \mid s) - \min_i Q_{\phi_i}(s, a) \big]$. The action is
#   $a = \tanh(\mu + \sigma \xi)$, so the gradient is the reparameterised one of page 9b.
# * **Temperature.** How much a nat is worth depends on the scale of the rewards, and nobody knows it beforehand. SAC
#   fixes the entropy instead: the mean of $-\log \pi$ is to be at least $h$, minus one nat per number of an action. The
#   multiplier of this constraint is $\alpha$. It rises while the entropy is below $h$, and falls while it is above:
#   gradient descent on $-\log \alpha \cdot \big( \mathbb{E}[\log \pi] + h \big)$. (The papers' loss has $\alpha$ where
#   the authors' code, and this project's, has $\log \alpha$; the sign of the gradient is the same.)
#
# `functional.soft_q_target` is $y$. By hand, with $r = 1$, $\gamma = 0.9$, a value 10, $\log \pi = -2$, and
# $\alpha = 0.5$: $1 + 0.9 \cdot (10 + 1) = 10.9$.

# %%
one, no = torch.ones(1), torch.tensor([False])
print("target", float(F.soft_q_target(one, no, 10 * one, -2 * one, alpha=0.5, gamma=0.9)))

# %% [markdown]
# ## The optimum of the pendulum
#
# A pole hangs from a motor that is too weak to lift it at once: it has to swing. Each of 200 steps costs the squared
# angle from the top, plus small terms for speed and torque. Angle and speed are two numbers, so dynamic programming
# still works: values on a grid of 161 speeds and as many angles, read between the points by interpolation, backwards
# from the last step. The best actions are then played from 2,000 random starts. Their mean return is the line of the
# plots.

# %%
n, top_speed = 161, 8.0
angles, speeds = torch.linspace(-math.pi, math.pi, n)[:-1], torch.linspace(-top_speed, top_speed, n)


def move(angle, speed, torque):
    """Returns the next angle and speed, and the reward: the equations of Gymnasium's Pendulum-v1."""
    reward = -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = (speed + 0.05 * (15 * angle.sin() + 3 * torque)).clamp(-top_speed, top_speed)
    return torch.remainder(angle + 0.05 * speed + math.pi, 2 * math.pi) - math.pi, speed, reward


def corners(angle, speed):
    """Returns the four grid points around a state, and their weights."""
    x, y = (angle + math.pi) / (2 * math.pi) * (n - 1), (speed + top_speed) / (2 * top_speed) * (n - 1)
    i, j = x.floor(), y.floor().clamp(max=n - 2)
    right, up = x - i, y - j
    i, j = i.long() % (n - 1), j.long()
    k = (i + 1) % (n - 1)  # angles are periodic
    weight = torch.stack([(1 - right) * (1 - up), right * (1 - up), (1 - right) * up, right * up])
    return torch.stack([i * n + j, k * n + j, i * n + j + 1, k * n + j + 1]), weight


def read(value, place):
    """Interpolates a table."""
    points, weight = place
    return (weight * value.flatten()[points]).sum(0)


*after, reward = move(angles[:, None, None], speeds[None, :, None], torch.linspace(-2, 2, 5))
place, values = corners(*torch.broadcast_tensors(*after)), [torch.zeros(n - 1, n)]
for _ in range(200):
    values.append((reward + read(values[-1], place)).amax(-1))

generator = torch.Generator().manual_seed(0)
start = (torch.rand(2, 2_000, generator=generator) * 2 - 1) * torch.tensor([[math.pi], [1.0]])


def played(torque_of):
    """Returns the returns of 200 steps from all starts; torque_of maps angle, speed and steps left to torques."""
    angle, speed, total = *start, torch.zeros(start.shape[1])
    for left in range(200, 0, -1):
        angle, speed, reward = move(angle, speed, torque_of(angle, speed, left))
        total += reward
    return total


def greedy(angle, speed, left):
    """Returns the best of 41 torques."""
    torques = torch.linspace(-2, 2, 41)
    *after, reward = move(angle[:, None], speed[:, None], torques)
    return torques[(reward + read(values[left - 1], corners(*after))).argmax(1)]


optimal = played(greedy)
best = float(optimal.mean())
print(f"optimum {best:.1f} ± {1.96 * float(optimal.std()) / 2_000**0.5:.1f} over starts; "
      f"the table promises {float(values[-1][:, speeds.abs() <= 1].mean()):.1f}")  # fmt: skip

# %% [markdown]
# ## The run
#
# SAC and TD3 with the same networks, step size and 6,000 transitions, one update each; 1,000 random ones come first.
# The broken run is SAC with a fixed temperature of 10 instead of a learned one.


# %%
def train(seed, algorithm=SAC, **changes):
    """Trains on the pendulum; returns the algorithm and its curves."""
    model = algorithm(gamma=0.98, tau=0.01, learning_rate=2e-3, net_arch=[64, 64], **changes)
    data = ReplayDataModule("Pendulum-v1", seed=seed, learning_starts=1000, batch_size=128, train_freq=2,
                            gradient_steps=2, total_timesteps=6000, eval_freq=1000, n_eval_episodes=50)  # fmt: skip
    return model, fit(model, data)


def torque_of(model):
    """Returns a learned policy as a function of angle and speed."""

    def act(angle, speed, left):
        observation = torch.stack([angle.cos(), angle.sin(), speed], 1).numpy()
        return torch.from_numpy(model.predict(observation, deterministic=True)[0])[:, 0]

    return act


trainings = {
    "SAC": fit_seeds(train),
    "TD3": fit_seeds(lambda seed: train(seed, TD3, action_noise=NormalActionNoise(sigma=0.2))),
    "broken: SAC, α = 10": fit_seeds(lambda seed: train(seed, ent_coef=10.0), seeds=(0, 1)),
}
runs = {name: [curves for _, curves in several] for name, several in trainings.items()}
plot(runs, "eval/mean_reward", "transitions", "mean return, 50 episodes", best=best)
for name, several in trainings.items():
    returns = [played(torque_of(model)) for model, _ in several]
    mean, half = interval([float((one - optimal).mean()) for one in returns])
    print(f"{name:20} return less the optimum of the same starts {mean:8.1f} ± {half:.1f} (95 %, {len(several)} seeds)")
keep("SAC on Pendulum", runs["SAC"], "eval/mean_reward")
keep("TD3 on Pendulum", runs["TD3"], "eval/mean_reward")

# %% [markdown]
# **How to read it.** A policy that does not swing up pays about 6 per step, more than 1,000 in all. Both algorithms
# find the swing within some thousand transitions and end close to dynamic programming; what is left is a less perfect
# swing. The evaluations scatter by some tens around the line, because the cost depends on the start; the printed
# differences are taken on equal starts. The temperature starts at 1 and finds its level by itself.

# %%
plot({"SAC": runs["SAC"]}, "train/ent_coef", "transitions", "temperature α")

# %% [markdown]
# **What failure looks like.** With $\alpha = 10$ a nat is worth more than a step of hanging costs. The policy learns
# late and stays far below the line: it is paid for being undecided, and gives up return for it. Nothing diverges, and
# the losses look healthy; the return, which contains no entropy, shows it. A temperature that is too small fails the
# other way: the policy becomes certain before the critic knows anything, as in page 6.
#
# ## Exercises
#
# **Exercise 9c.1.** Two actions with $Q = (1, 0)$. Compute the best soft policy, its entropy and its soft value for
# $\alpha = 1$.
#
# <details markdown="1"><summary>Answer</summary>
#
# $\pi = (e, 1) / (e + 1) = (0.731, 0.269)$, $H = 0.582$ nats, $V = \log(e + 1) = 1.313$, which is
# $0.731 \cdot 1 + 0.582$.
#
# ```python
# import torch
#
# q = torch.tensor([1.0, 0.0])
# policy = q.softmax(0)
# entropy = -(policy * policy.log()).sum()
# assert abs(float(policy[0]) - 0.731) < 1e-3 and abs(float(entropy) - 0.582) < 1e-3
# assert torch.allclose(q.logsumexp(0), (policy * q).sum() + entropy)
# ```
#
# </details>
#
# **Exercise 9c.2.** In the linear-quadratic problem of page 9b, $Q(s, a) = -(1 + \gamma p)(a + k s)^2$ plus terms
# without $a$. Which policy is the best for the temperature $\alpha$?
#
# <details markdown="1"><summary>Answer</summary>
#
# $e^{Q / \alpha}$ is a Gaussian with mean $-k s$ and variance $\alpha / (2 (1 + \gamma p))$: the gain stays the same,
# and the spread is the same everywhere, because the value is equally steep everywhere.
#
# ```python
# import torch
#
# temperature, steep, center = 0.4, 2.5, -0.3
# a = torch.linspace(-6, 6, 4001, dtype=torch.float64)
# density = (-steep * (a - center) ** 2 / temperature).softmax(0)
# mean = (density * a).sum()
# assert abs(float(mean) - center) < 1e-9
# assert abs(float((density * (a - mean) ** 2).sum()) - temperature / (2 * steep)) < 1e-9
# ```
#
# </details>
#
# **Exercise 9c.3.** $\mu = 0$, $\sigma = 1$. Compute the density of the action $a = \tanh(1)$.
#
# <details markdown="1"><summary>Answer</summary>
#
# $\mathcal{N}(1; 0, 1) = 0.242$, the slope is $1 - \tanh^2 1 = 0.420$, so the density is 0.576.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# zero = torch.zeros(1, 1)
# assert abs(float(F.squashed_gaussian_log_prob(zero, zero, torch.ones(1, 1)).exp()) - 0.576) < 1e-3
# ```
#
# </details>
#
# **Exercise 9c.4.** The torque's bounds are doubled, and the actions are still scaled to $[-1, 1]$ for the density. A
# uniform policy on $[-1, 1]$ has which entropy, and what does a target of $h = -1$ nat mean compared with it?
#
# <details markdown="1"><summary>Answer</summary>
#
# $\log 2 = 0.693$ nats, for any bounds. A uniform distribution on an interval $e^{1.693} = 5.4$ times shorter has -1.
#
# ```python
# import math
#
# import torch
#
# assert abs(float(torch.distributions.Uniform(-1.0, 1.0).entropy()) - math.log(2)) < 1e-6
# assert abs(math.log(2 / math.exp(math.log(2) + 1)) + 1) < 1e-9 and round(math.exp(math.log(2) + 1), 1) == 5.4
# ```
#
# </details>
#
# ## What is open
#
# The reward of the pendulum is a formula. For "a helpful answer" there is none. [The next
# page](10_reward_model.ipynb) learns a reward from comparisons, and the guide moves on to language models.
#
# **Sources.** Haarnoja et al. 2018; Ziebart 2010 (maximum entropy); a learned temperature: arXiv:1812.05905, section 5;
# what the squashing changes: its appendix C.
