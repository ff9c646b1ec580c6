# %% [markdown]
# # 9b. Continuous actions
#
# A torque is a real number. There is no table of probabilities and no maximum over a list, so what the pages before
# use of actions has to be derived again: a distribution with a density, and a policy that climbs its critic's slope.
#
# **Before:** [9. PPO](09_ppo.ipynb) · **Next:** [9c. Soft actor-critic](09c_soft_actor_critic.ipynb) ·
# [glossary](glossary.md)
#
# ## Gaussian policies
#
# A network maps the state to a mean $\mu_\theta(s)$, and the action is drawn from a normal distribution around it with
# standard deviation $\sigma$. With several numbers per action they are independent given the state, and the logarithms
# of their densities add up. For one number
#
# $$\log \pi_\theta(a \mid s) = -\frac{(a - \mu_\theta(s))^2}{2 \sigma^2} - \log \sigma - \tfrac12 \log 2\pi.$$
#
# A density may exceed 1, so its logarithm may be positive, and the entropy $\log \sigma + \tfrac12 \log 2 \pi e$
# negative. Everything on the pages from 6 to 9 stays true with this $\log \pi$: the log-derivative trick, baselines,
# ratios, the clip. The derivatives are
#
# $$\frac{\partial \log \pi}{\partial \mu} = \frac{a - \mu}{\sigma^2}, \qquad
# \frac{\partial \log \pi}{\partial \log \sigma} = \frac{(a - \mu)^2}{\sigma^2} - 1.$$
#
# The mean moves towards actions with a positive advantage. The spread grows if good actions lie more than one $\sigma$
# from the mean, and shrinks otherwise. A policy that learns $\sigma$ thus ends exploration by itself.
#
# ## Three gradients of one mean
#
# Take one state with the reward $f(a)$. The objective is $J = \mathbb{E}_{a \sim \pi}[f(a)]$. The **score function**
# estimate of page 6 needs values of $f$ only. If $f$ can be differentiated, write the action as
# $a = \mu + \sigma \xi$ with $\xi \sim \mathcal{N}(0, 1)$. The distribution of $\xi$ does not depend on the weights,
# so the derivative goes under the mean. This is the **reparameterisation**:
#
# $$\frac{\partial J}{\partial \mu} = \mathbb{E}\Big[f(a)\, \frac{a - \mu}{\sigma^2}\Big] =
# \mathbb{E}_{\xi}\big[ f'(\mu + \sigma \xi) \big] \;\xrightarrow{\;\sigma \to 0\;}\; f'(\mu).$$
#
# The limit needs no randomness at all. The next cell takes $f(a) = -(a - 1)^2$ at $\mu = 0$, whose derivative is 2 for
# every $\sigma$.

# %%
import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from helpers import fit, fit_seeds, interval, keep, plot

from datamodules import ReplayDataModule, RolloutDataModule
from rl_modules import PPO, TD3
from rl_modules.action_noise import NormalActionNoise

xi = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
print("σ      score function: mean, deviation    reparameterised: mean, deviation")
for sigma in (1.0, 0.3, 0.1, 0.03):
    action = sigma * xi
    score, slope = -((action - 1) ** 2) * action / sigma**2, -2 * (action - 1)
    print(f"{sigma:<6} {score.mean():18.2f} {score.std():10.2f} {slope.mean():21.2f} {slope.std():10.2f}")

# %% [markdown]
# All estimate the same 2. As exploration ends, the deviation of the score function grows as $1/\sigma$, since it
# compares rewards of actions that hardly differ. The reparameterised one falls to 0. It needs the slope of the return,
# which the environment does not give. A critic does.
#
# ## The deterministic policy gradient
#
# Let the policy be a function, $a = \mu_\theta(s)$, and $Q^\mu$ its action value. Bellman's equation is
# $V^\mu(s) = Q^\mu(s, \mu_\theta(s))$. Differentiate: $\theta$ acts through the action now, and through all later
# actions,
#
# $$\nabla_\theta V^\mu(s) = \nabla_\theta \mu_\theta(s)\, \nabla_a Q^\mu(s, a)\big|_{a = \mu_\theta(s)} + \gamma\,
# \mathbb{E}_{s'}\big[\nabla_\theta V^\mu(s')\big].$$
#
# The second term has the form of the left side. Inserted again and again, from the first state on, it gives
#
# $$\nabla_\theta J = \mathbb{E}\Big[ \sum_t \gamma^t\, \nabla_\theta \mu_\theta(s_t)\; \nabla_a Q^\mu(s_t,
# a)\big|_{a = \mu_\theta(s_t)} \Big],$$
#
# the **deterministic policy gradient** (Silver et al. 2014). It is the limit of the Gaussian policy's gradient as
# $\sigma \to 0$. There is no mean over actions, hence no ratio: the states may come from a replay buffer, at the price
# of being weighted as the buffer has them.
#
# ## A problem with a known optimum
#
# A point is to be held at 0 by pushes: $s' = s + a + w$ with noise $w \sim \mathcal{N}(0, 0.1^2)$, and
# $r = -(s^2 + a^2)$. In such a **linear-quadratic** problem values are quadratic. Insert $V(s) = -(p s^2 + c)$ into
# Bellman's optimality equation,
#
# $$-(p s^2 + c) = \max_a \big\{ -s^2 - a^2 - \gamma\, \big( p\, (s + a)^2 + 0.01\, p + c \big) \big\}.$$
#
# The derivative by $a$ is 0 at $a = -k s$ with $k = \gamma p / (1 + \gamma p)$: the best policy is linear. Comparing
# the coefficients of $s^2$ gives **Riccati's equation** $p = 1 + \gamma p - (\gamma p)^2 / (1 + \gamma p)$, solved by
# iteration. The cell also checks the deterministic policy gradient. For the policy $a = -k s$, $Q$ is known, and
# $\nabla_k \mu\, \nabla_a Q = -s \cdot \big[ 2 k s - 2 \gamma p_k\, (1 - k)\, s \big]$, where $p_k$ belongs to the
# policy. Its sum over the states is compared with the derivative of the exact return.

# %%
gamma, noise = 0.95, 0.1


def exact_return(k, steps=500):
    """Returns J of the policy a = -k s, whose first state is uniform in [-1, 1], and Σ γᵗ E[s²]."""
    square, total, visits = torch.tensor(1 / 3), 0.0, 0.0
    for t in range(steps):
        total = total - gamma**t * (1 + k**2) * square
        visits = visits + gamma**t * square
        square = (1 - k) ** 2 * square + noise**2
    return total, visits


p = 1.0
for _ in range(200):
    p = 1 + gamma * p - (gamma * p) ** 2 / (1 + gamma * p)
best_gain = gamma * p / (1 + gamma * p)
print(f"Riccati: p = {p:.4f}, best gain {best_gain:.4f}")
for gain in (0.2, best_gain, 1.0):
    k = torch.tensor(gain, requires_grad=True)
    value, visits = exact_return(k)
    value.backward()
    p_k = (1 + gain**2) / (1 - gamma * (1 - gain) ** 2)
    theorem = -(2 * gain - 2 * gamma * p_k * (1 - gain)) * float(visits)
    print(f"k = {gain:.3f}: J {float(value):.4f}, derivative {float(k.grad):+.4f}, by the theorem {theorem:+.4f}")

# %% [markdown]
# ## From DDPG to TD3
#
# **DDPG** (Lillicrap et al. 2016, [arXiv:1509.02971](https://arxiv.org/abs/1509.02971)) is DQN with this gradient. The
# critic regresses on $y = r + \gamma (1 - d)\, Q_{\phi^-}(s', \mu_{\theta^-}(s'))$, with replay and slowly moving
# target networks. The policy climbs $Q_\phi(s, \mu_\theta(s))$. Actions get noise while experience is collected.
#
# The policy stands where DQN has a maximum, and brings the maximisation bias of page 4. It seeks the actions whose
# value the critic overrates, and the target carries the excess backwards. In the next cell the true value is $-a^2$,
# with maximum 0. A critic, here a polynomial, is fitted to 20 noisy values, and a policy takes its best action.

# %%
generator = torch.Generator().manual_seed(0)
grid = torch.linspace(-1, 1, 101, dtype=torch.float64)


def critics(n):
    """Returns n fits of a polynomial of degree 5 to 20 values -a² + noise, on a grid of actions, [n, 101]."""
    a = torch.rand(n, 20, generator=generator, dtype=torch.float64) * 2 - 1
    values = -(a**2) + 0.5 * torch.randn(a.shape, generator=generator, dtype=torch.float64)
    powers = torch.arange(6)
    weights = torch.linalg.lstsq(a[..., None] ** powers, values[..., None]).solution
    return (grid[:, None] ** powers @ weights)[..., 0]


first, second = critics(5_000), critics(5_000)
chosen = first.argmax(1, keepdim=True)
claims = {"one critic": first, "the smaller of two": torch.minimum(first, second)}
for name, claim in claims.items():
    error = claim.gather(1, chosen)[:, 0] + grid[chosen[:, 0]] ** 2
    mean, half = interval(error)
    print(f"{name:20} claimed minus true value of the chosen action {mean:+.2f} ± {half:.2f}")

# %% [markdown]
# **TD3** (Fujimoto et al. 2018, [arXiv:1802.09477](https://arxiv.org/abs/1802.09477)) has three cures.
#
# * **Clipped double Q.** Two critics; the target takes the smaller. It errs downwards instead, and an action that is
#   rated too low is not sought out by the policy.
# * **Delayed updates.** The policy moves once per two updates of the critics, so that it climbs a slope that has
#   settled.
# * **Target smoothing.** The target's action gets clipped noise. A narrow peak of the critic counts only with its
#   surroundings.
#
# $$y = r + \gamma\, (1 - d) \min_{i = 1, 2} Q_{\phi_i^-}\big(s',\; \mu_{\theta^-}(s') + \operatorname{clip}(\xi, -c,
# c) \big).$$
#
# ## The run
#
# The point is an environment of twenty steps. TD3 and PPO, whose policy is a Gaussian, learn it. The line is the
# return of the best gain of each step, from Riccati's recursion backwards from the last step. The broken run changes
# one thing: TD3 has one critic.


# %%
class Point(gymnasium.Env):
    """A point on a line, held at 0 by pushes."""

    observation_space = gymnasium.spaces.Box(-2, 2, (1,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.s = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.s, {}

    def step(self, action):
        reward = -float(self.s[0] ** 2 + action[0] ** 2)
        moved = self.s + action + noise * self.np_random.normal(size=1)
        self.s = np.clip(moved, -2, 2).astype(np.float32)
        return self.s, reward, False, False, {}


gymnasium.register("Point-v0", Point, max_episode_steps=20)
p, c = 0.0, 0.0
for _ in range(20):
    c, p = c + noise**2 * p, 1 + p - p**2 / (1 + p)
best = -(p / 3 + c)  # the mean of s² is 1/3 at the start


def train(seed, algorithm="TD3", **changes):
    """Trains on the point; returns the algorithm and its curves."""
    common = {"seed": seed, "n_eval_episodes": 50}
    if algorithm == "PPO":
        model = PPO(gamma=gamma, gae_lambda=0.9, learning_rate="lin_1e-3", **changes)
        data = RolloutDataModule("Point-v0", n_envs=8, n_steps=64, batch_size=128, n_epochs=10, total_timesteps=20_480,
                                 eval_freq=2048, **common)  # fmt: skip
    else:
        model = TD3(gamma=gamma, tau=0.02, learning_rate="lin_1e-3", net_arch=[64, 64],
                    action_noise=NormalActionNoise(sigma=0.1), **changes)  # fmt: skip
        data = ReplayDataModule("Point-v0", learning_starts=200, batch_size=128, train_freq=4, gradient_steps=4,
                                total_timesteps=3000, eval_freq=400, **common)  # fmt: skip
    return model, fit(model, data)


@torch.no_grad()
def played(model, n=50_000):
    """Returns the mean return of n episodes without exploration."""
    generator = torch.Generator().manual_seed(1)
    s, total = torch.rand(n, 1, generator=generator) * 2 - 1, torch.zeros(n, 1)
    for _ in range(20):
        action = torch.from_numpy(model.predict(s.numpy(), deterministic=True)[0]).clamp(-1, 1)
        total -= s**2 + action**2
        s = (s + action + noise * torch.randn(s.shape, generator=generator)).clamp(-2, 2)
    return float(total.mean())


models, runs = {}, {}
for name, changes in {"TD3": {}, "PPO": {}, "broken: PPO, σ starts at 0.007": {"log_std_init": -5.0}}.items():
    both = fit_seeds(lambda seed, name=name, changes=changes: train(seed, "PPO" if "PPO" in name else "TD3", **changes))
    models[name], runs[name] = zip(*both, strict=True)
    mean, half = interval([played(model) for model in models[name]])
    print(f"{name:30} mean return {mean:.3f} ± {half:.3f} (95 %, {len(both)} seeds), optimum {best:.3f}")
keep("TD3", list(runs["TD3"]), "eval/mean_reward")
for metric in ("TD3", "PPO"):
    shown = {name: list(several) for name, several in runs.items() if metric in name}
    plot(shown, "eval/mean_reward", "transitions", "mean return, 50 episodes", best=best, best_name="Riccati")

# %% [markdown]
# **How to read it.** Both come within a few percent of the optimum. The curves scatter around the line, because an
# evaluation is a mean of 50 random starts; the printed returns are means of 50,000. TD3 saw 3,000 transitions, PPO
# 20,480. Both learned functions of TD3 are known here, and the next picture compares them.

# %%
s = torch.linspace(-1, 1, 81)[:, None]
with torch.no_grad():
    network = models["TD3"][0].network
    action = network.policy(s)
    claimed = network.critics(s, action)[..., 0].amin(0)
p = 1.0
for _ in range(200):
    p = 1 + gamma * p - (gamma * p) ** 2 / (1 + gamma * p)
_, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.2), layout="constrained")
left.plot(s, action, label="TD3")
left.plot(s, -best_gain * s, "--", color="gray", label="best gain")
left.set(xlabel="state", ylabel="action")
right.plot(s, claimed, label="TD3's critics")
right.plot(s, -(p * s**2 + gamma * p * noise**2 / (1 - gamma)), "--", color="gray", label="Riccati")
right.set(xlabel="state", ylabel="value")
for axes in (left, right):
    axes.legend()
    axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# The policy follows the best gain. The critics have the right shape, and lie too low by nearly the same amount
# everywhere: they began with the values of a policy that let the point drift away, and slow target networks and the
# smaller of two forget that slowly. The policy sees only the slope, so a constant error does it no harm.
#
# **What failure looks like.** The broken run differs in one number: $\sigma$ starts at $e^{-5} = 0.007$. The KL of two
# normal distributions with equal spread is $(\mu - \mu')^2 / (2 \sigma^2)$. PPO's clip keeps the ratio near 1, and so
# keeps each update within a fraction of $\sigma$. A policy that hardly explores can hardly move, although its gradient
# is large.
#
# ## Exercises
#
# **Exercise 9b.1.** A policy has $\mu = 0$, $\sigma = 0.5$. Compute the log-density of $a = 0.5$, and its derivatives
# by $\mu$ and $\log \sigma$.
#
# <details markdown="1"><summary>Answer</summary>
#
# $-\frac12 + \log 2 - \frac12 \log 2\pi = -0.726$; the derivatives are $0.5 / 0.25 = 2$ and $1 - 1 = 0$: an action one
# $\sigma$ away says nothing about the spread.
#
# ```python
# import torch
#
# mean, log_std = torch.zeros((), requires_grad=True), torch.tensor(0.5).log().requires_grad_()
# log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(torch.tensor(0.5))
# log_prob.backward()
# assert abs(float(log_prob.detach()) + 0.726) < 1e-3
# assert abs(float(mean.grad) - 2) < 1e-5 and abs(float(log_std.grad)) < 1e-5
# ```
#
# </details>
#
# **Exercise 9b.2.** For the point without discount, show that $p$ is the golden ratio $(1 + \sqrt 5) / 2$. What is the
# best gain?
#
# <details markdown="1"><summary>Answer</summary>
#
# With $\gamma = 1$, $p = 1 + p - p^2 / (1 + p)$ becomes $p^2 = 1 + p$. The gain is $p / (1 + p) = 1 / p = 0.618$.
#
# ```python
# p = 0.0
# for _ in range(100):
#     p = 1 + p - p**2 / (1 + p)
# assert abs(p - (1 + 5**0.5) / 2) < 1e-9 and abs(p / (1 + p) - 0.618) < 1e-3
# ```
#
# </details>
#
# **Exercise 9b.3.** In a next state two target critics claim 10 and 8, $r = 1$, $\gamma = 0.9$. Compute the targets of
# DDPG, which has the first critic, and of TD3. Which error does each have if the true value is 9?
#
# <details markdown="1"><summary>Answer</summary>
#
# $1 + 0.9 \cdot 10 = 10$ and $1 + 0.9 \cdot 8 = 8.2$; true is 9.1. DDPG is 0.9 too high, TD3 0.9 too low.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# q, no = torch.tensor([[10.0], [8.0]]), torch.tensor([False])
# for claimed, error in ((q[0], 0.9), (q.amin(0), -0.9)):
#     target = F.soft_q_target(torch.ones(1), no, claimed, torch.zeros(1), alpha=0.0, gamma=0.9)
#     assert abs(float(target) - 9.1 - error) < 1e-5
# ```
#
# </details>
#
# **Exercise 9b.4.** Why may TD3 use transitions of old policies without a ratio, while PPO may not?
#
# <details markdown="1"><summary>Answer</summary>
#
# Its critic regresses on $Q$ of the present policy: the action of a transition is given, and the next action comes from
# the present policy. No mean over the old policy's actions occurs. PPO's estimate is such a mean. On one state with
# $f(a) = -(a - 1)^2$ and data from $\mathcal{N}(-1, 0.5^2)$, the slope at $\mu = 0$ is still found by regression, while
# the unweighted score function of the data's own policy is the slope at -1.
#
# ```python
# import torch
#
# a = -1 + 0.5 * torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# f = -((a - 1) ** 2)
# weights = torch.linalg.lstsq(torch.stack([torch.ones_like(a), a, a**2], 1), f[:, None]).solution[:, 0]
# assert abs(float(weights[1]) - 2) < 1e-6
# assert abs(float((f * (a + 1) / 0.25).mean()) - 4) < 0.2
# ```
#
# </details>
#
# ## What is open
#
# TD3's noise is the same in every state and for all time, chosen by hand. [The next
# page](09c_soft_actor_critic.ipynb) makes exploration a part of what is maximised.
#
# **Sources.** Silver et al. 2014, *Deterministic Policy Gradient Algorithms*; Lillicrap et al. 2016; Fujimoto et al.
# 2018; Gaussian policies: Williams 1992; linear-quadratic control: Bertsekas, *Dynamic Programming and Optimal
# Control*, chapter 4.
