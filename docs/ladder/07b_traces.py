# %% [markdown]
# # 7b. Traces
#
# [A2C](07_a2c.ipynb) looks forward: an advantage is known only after the rewards that follow. This page looks
# backward. Each TD error is handed at once to all states that led to it, in proportion to a trace that they left. Both
# views make the same change, which explains what generalised advantage estimation is.
#
# **Before:** [7. A2C](07_a2c.ipynb) · **Next:** [8. TRPO](08_trpo.ipynb) · [glossary](glossary.md)
#
# ## TD(0): the value of a policy, step by step
#
# Page 3 learns $Q$ to act better. The same idea for $V$ alone, with a policy that stays as it is, is called
# **prediction**, and it is what every critic does. After each step
#
# $$V(s_t) \leftarrow V(s_t) + \alpha\, \delta_t, \qquad \delta_t = r_t + \gamma\, (1 - d_t)\, V(s_{t+1}) - V(s_t).$$
#
# The mean of $\delta_t$ in a state is 0 exactly if $V$ solves Bellman's equation there, so the only table that the
# update leaves alone on average is $V^\pi$. TD(0) learns during the episode and has little noise, but a reward moves
# back one state per visit. Monte Carlo moves it to all states of the episode at once, at the end, with the noise of
# all that happened between.
#
# ## The forward view
#
# The **λ-return** mixes all n-step returns, as GAE mixes their advantages:
#
# $$G_t^\lambda = (1 - \lambda) \sum_{n=1}^{\infty} \lambda^{n-1} G_t^{(n)}.$$
#
# Each $G_t^{(n)} - V(s_t)$ is a sum of TD errors, as page 7 shows, and the same sum of weights gives
#
# $$G_t^\lambda - V(s_t) = \sum_{k=0}^{\infty} (\gamma \lambda)^k\, \delta_{t+k} = \hat A_t.$$
#
# **GAE is the error of the λ-return.** Learning $V$ with the step $\alpha \hat A_t$ is the forward view of TD(λ), and
# the critic of A2C and PPO does it: its target $R_t = \hat A_t + V(s_t)$ is the λ-return. $\lambda = 0$ is TD(0), and
# $\lambda = 1$ is Monte Carlo.
#
# ## The backward view
#
# Each state keeps a number $z_t(s)$, its **eligibility trace**. It fades with every step and grows with a visit,
#
# $$z_t(s) = \gamma \lambda\, z_{t-1}(s) + [s = s_t], \qquad V(s) \leftarrow V(s) + \alpha\, \delta_t\, z_t(s) \quad
# \text{for all } s,$$
#
# where $[\cdot]$ is 1 if true and 0 if not, and the traces start at 0 in each episode. This is **TD(λ)** (Sutton 1988).
# Nothing is stored but one number per state, or one per weight of a network: there the trace is
# $z_t = \gamma \lambda\, z_{t-1} + \nabla_\phi V_\phi(s_t)$.
#
# The two views agree. Over an episode, with $V$ held still, the backward view changes $V(s)$ by
#
# $$\alpha \sum_t \delta_t\, z_t(s) = \alpha \sum_t \delta_t \sum_{k \le t} (\gamma \lambda)^{t-k}\, [s = s_k] = \alpha
# \sum_k\, [s = s_k] \sum_{t \ge k} (\gamma \lambda)^{t-k}\, \delta_t = \alpha \sum_k\, [s = s_k]\, \hat A_k.$$
#
# The middle step exchanges the sums: a TD error seen from all earlier states, or a state that sees all later TD errors.
# The next cell checks this on a random episode over five states, and GAE against the λ-return.

# %%
import matplotlib.pyplot as plt
import torch
from helpers import SHORT, interval

from rl_modules import functional as F

generator = torch.Generator().manual_seed(0)
length, gamma, lam = 12, 0.9, 0.8
visited = torch.randint(5, (length,), generator=generator)
reward, table = torch.randn(length, generator=generator), torch.randn(5, generator=generator)
value = table[visited]
next_value = torch.cat([value[1:], torch.zeros(1)])
end, no = torch.arange(length) == length - 1, torch.zeros(length, dtype=torch.bool)

advantage = F.gae(*(x[:, None] for x in (reward, value, next_value, end, no)), gamma, lam)[:, 0]
forward = torch.zeros(5).index_add(0, visited, advantage)

trace, backward = torch.zeros(5), torch.zeros(5)
for t in range(length):
    trace = gamma * lam * trace + torch.nn.functional.one_hot(visited[t], 5)
    backward += (reward[t] + gamma * next_value[t] - value[t]) * trace

n_step = [
    F.n_step_returns(*(x[:, None] for x in (reward, next_value, end, no)), gamma, n=n)[0, 0] for n in range(1, 13)
]
lambda_return = (1 - lam) * sum(lam**n * n_step[n] for n in range(11)) + lam**11 * n_step[11]
print("forward  (GAE)   ", [round(x, 4) for x in forward.tolist()])
print("backward (traces)", [round(x, 4) for x in backward.tolist()])
print(f"λ-return less V at t = 0: {float(lambda_return - value[0]):.4f}, GAE {float(advantage[0]):.4f}")

# %% [markdown]
# Online, $V$ changes within the episode, and the two differ by a term of the order $\alpha^2$. *True online* TD(λ) (van
# Seijen & Sutton 2014) corrects the trace so that they agree again.
#
# Why do deep algorithms use the forward view, then? A network's update is made on minibatches, several times, in any
# order, for which advantages in a table of numbers are handy and a trace is not. The backward view remains where a
# learner must update in every step with a constant amount of memory.
#
# ## The run
#
# A walk on 19 states begins in the middle and goes left or right with probability 1/2. The left end pays -1, the right
# end +1, and $\gamma = 1$. The values are known: they rise in equal steps from -0.9 to 0.9. TD(λ) sees ten episodes,
# and the picture shows the root of the mean squared error over states, averaged over these episodes, for several
# $\lambda$ and step sizes. Each point is a mean of 100 runs with its 95 % interval. All runs are played side by side.


# %%
def predict(lambdas, alphas, episodes, runs=100, seed=0):
    """Runs TD(λ); returns the error after each episode [episodes, λ, α, runs] and the last values [λ, α, runs, 21]."""
    generator = torch.Generator().manual_seed(seed)
    lam, alpha = torch.tensor(lambdas)[:, None, None, None], torch.tensor(alphas)[None, :, None, None]
    value, errors = torch.zeros(len(lambdas), len(alphas), runs, 21), []
    for _ in range(episodes):
        place, trace = torch.full((runs,), 10), torch.zeros_like(value)
        while bool((going := (place > 0) & (place < 20)).any()):
            after = place + torch.randint(2, (runs,), generator=generator) * 2 - 1
            after = torch.where(going, after, place)
            pay = (after == 20).float() - (after == 0).float()
            index = torch.stack([place, after]).expand(*value.shape[:2], 2, runs).transpose(2, 3)
            now, then = value.gather(3, index).unbind(-1)
            delta = torch.where(going, pay + then - now, 0.0)
            trace = lam * trace + torch.nn.functional.one_hot(place, 21)
            value[..., 1:20] += (alpha * delta[..., None] * trace)[..., 1:20]
            place = after
        errors.append((value[..., 1:20] - true_value).square().mean(-1).sqrt())
    return torch.stack(errors), value


true_value = torch.arange(-9, 10) / 10
lambdas, alphas = [0.0, 0.4, 0.8, 0.9, 1.0], [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8]
errors, _ = predict(lambdas, alphas, episodes=1 if SHORT else 10)
_, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
for lam, of_lambda in zip(lambdas, errors.mean(0), strict=True):
    pairs = [interval(point) for point in of_lambda]
    mean, half = torch.tensor(pairs).unbind(1)
    mean = torch.where(mean < 0.7, mean, torch.nan)  # larger steps diverge
    axes.errorbar(alphas, mean, half, label=f"λ = {lam}", capsize=2)
    best = int(mean.nan_to_num(9.0).argmin())
    print(f"λ = {lam}: smallest error {mean[best]:.3f} ± {half[best]:.3f} (95 %, 100 runs) at α = {alphas[best]}")
axes.set(xlabel="step size α", ylabel="error of ten episodes", ylim=(0.2, 0.7))
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# **How to read it.** Each $\lambda$ has its best step size, smaller for larger $\lambda$, because traces add up many
# changes; beyond the end of a curve the values diverge. The best errors form a valley over $\lambda$: neither end
# wins. This is why GAE has a $\lambda$ a little below 1.
#
# With a small step the values converge. The next picture shows the mean values after 100 episodes with their intervals,
# and the exact ones as a line. The broken run differs in $\lambda = 1$ at the same step size.

# %%
_, values = predict([0.8, 1.0], [0.03], episodes=2 if SHORT else 100)
_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name, of_lambda in zip(("λ = 0.8", "broken: λ = 1"), values[:, 0, :, 1:20], strict=True):
    spread = of_lambda.std(0)
    axes.errorbar(range(1, 20), of_lambda.mean(0), 1.96 * spread / 10, label=f"{name}, mean of 100 runs", capsize=2)
    mean, half = interval((of_lambda - true_value).square().mean(1).sqrt())
    print(f"{name:14} error of one run {mean:.3f} ± {half:.3f} (95 %, 100 runs), optimum 0")
axes.plot(range(1, 20), true_value, "--", color="gray", label="exact")
axes.set(xlabel="state", ylabel="value")
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# **What failure looks like.** With $\lambda = 1$ each visit of an episode adds the whole of what follows, and a state
# that is crossed ten times moves ten times too far. The means of many runs still lie near the line. One run,
# which is all that a user has, is far off. Look at a single run before an average.
#
# ## Exercises
#
# **Exercise 7b.1.** Three steps visit the states A, B, A, then the episode ends. $\gamma = 1$, $\lambda = 1/2$. Which
# traces do A and B have in each step?
#
# <details markdown="1"><summary>Answer</summary>
#
# A: 1, 0.5, 1.25. B: 0, 1, 0.5.
#
# ```python
# traces, z = [], {"A": 0.0, "B": 0.0}
# for visited in "ABA":
#     z = {state: 0.5 * x + (state == visited) for state, x in z.items()}
#     traces.append((z["A"], z["B"]))
# assert traces == [(1.0, 0.0), (0.5, 1.0), (1.25, 0.5)]
# ```
#
# </details>
#
# **Exercise 7b.2.** All values are 0, and only the last step of 7b.1 pays 1. By how much does TD(λ) change A and B with
# $\alpha = 0.1$, and what does GAE say?
#
# <details markdown="1"><summary>Answer</summary>
#
# The only TD error is 1, in the last step: A changes by 0.125, B by 0.05. GAE gives the advantages 0.25, 0.5, 1, so A
# gets $0.1 \cdot (0.25 + 1)$ and B $0.1 \cdot 0.5$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# reward, zero = torch.tensor([[0.0], [0.0], [1.0]]), torch.zeros(3, 1)
# end = torch.tensor([[False], [False], [True]])
# a = F.gae(reward, zero, zero, end, torch.zeros_like(end), 1.0, 0.5).squeeze().tolist()
# assert a == [0.25, 0.5, 1.0]
# assert abs(0.1 * (a[0] + a[2]) - 0.125) < 1e-9 and abs(0.1 * a[1] - 0.05) < 1e-9
# ```
#
# </details>
#
# **Exercise 7b.3.** A chain of ten states leads to a reward of 1 at its end. After one episode from values of 0 with
# $\alpha = 1$ and $\gamma = 1$, how many states have a value above 0.1 for $\lambda = 0$ and for $\lambda = 0.8$?
#
# <details markdown="1"><summary>Answer</summary>
#
# One, and all whose trace is above 0.1 at the end: $0.8^k > 0.1$ for $k \le 10$, so all ten.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# reward, zero = torch.zeros(10, 1), torch.zeros(10, 1)
# reward[9] = 1.0
# end = reward == 1.0
# for lam, count in ((0.0, 1), (0.8, 10)):
#     assert int((F.gae(reward, zero, zero, end, torch.zeros_like(end), 1.0, lam) > 0.1).sum()) == count
# ```
#
# </details>
#
# ## What is open
#
# A critic now has its theory. The actor still makes steps whose length nobody has justified.
# [TRPO](08_trpo.ipynb) asks how far one may go.
#
# **Sources.** Sutton 1988; Sutton & Barto 2018, chapter 12 (the walk: example 7.1); van Seijen & Sutton 2014; GAE:
# [arXiv:1506.02438](https://arxiv.org/abs/1506.02438), where section 3 names TD(λ).
