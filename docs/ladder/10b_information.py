# %% [markdown]
# # 10b. Bits and divergences
#
# [A reward model](10_reward_model.ipynb) judges; the next page trains a policy to please it, and must say how far the
# policy may move. This page defines that distance, from the length of a message, and shows that it has a direction.
#
# **Before:** [10. Reward model](10_reward_model.ipynb) · **Next:** [11. RLHF](11_rlhf.ipynb) ·
# [glossary](glossary.md)
#
# ## Surprise, in bits
#
# An event of probability $p(x)$ has the **information** $-\log_2 p(x)$ **bits**: a coin that falls heads tells 1 bit,
# one of eight equally likely answers tells 3. Probabilities multiply, so information adds. With the natural logarithm
# the unit is the **nat**; 1 nat is $1 / \log 2 = 1.44$ bits. Losses here are in nats, and messages are counted in bits.
#
# The mean information of a distribution is its **entropy**,
#
# $$H(p) = -\sum_x p(x) \log p(x).$$
#
# It is the length of the shortest message on average. Let four answers have $p = (\frac12, \frac14, \frac18,
# \frac18)$, and write them as `0`, `10`, `110` and `111`, so that no word begins another: the lengths 1, 2, 3, 3 are
# $-\log_2 p(x)$, and their mean is 1.75 bits. A code that holds all four for equally likely has two bits for each.
#
# Whoever believes in $q$ gives $x$ a word of $-\log q(x)$. If the answers come from $p$, the mean length is the
# **cross-entropy**, and what it exceeds the entropy by is the **Kullback–Leibler divergence** of page 8:
#
# $$H(p, q) = -\sum_x p(x) \log q(x) = H(p) + \operatorname{KL}(p \,\Vert\, q), \qquad
# \operatorname{KL}(p \,\Vert\, q) = \sum_x p(x) \log \frac{p(x)}{q(x)}.$$
#
# The KL is the price of a wrong belief, in bits per answer. It is never negative: $\log u \le u - 1$ gives
#
# $$-\operatorname{KL}(p \,\Vert\, q) = \sum_x p(x) \log \frac{q(x)}{p(x)} \le \sum_x p(x) \Big( \frac{q(x)}{p(x)} - 1
# \Big) = \sum_{x :\, p(x) > 0} q(x) - 1 \le 0,$$
#
# with equality only at $q = p$. For the uniform belief above it is $2 - 1.75 = 0.25$ bits.

# %%
import json
import random
import tempfile
from pathlib import Path

import helpers as h
import matplotlib.pyplot as plt
import torch

from datamodules import InstructionDataModule
from rl_modules import SFT

BIT = torch.tensor(2.0).log()  # nats
p, q = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8]), torch.full((4,), 1 / 4)
entropy, cross_entropy = -(p * p.log()).sum() / BIT, -(p * q.log()).sum() / BIT
print(f"H(p) = {entropy:.2f} bits, H(p, q) = {cross_entropy:.2f} bits, KL(p‖q) = {cross_entropy - entropy:.2f} bits")

# %% [markdown]
# ## What supervised fine-tuning can reach
#
# The loss of SFT is the mean of $-\log \pi_\theta(y \mid x)$ over demonstrations, the cross-entropy of demonstrations
# and model. So it cannot fall to 0 where people answer differently. It falls to their entropy, and the rest is the KL:
# minimising the loss is minimising $\operatorname{KL}(p \,\Vert\, \pi_\theta)$, since $H(p)$ does not depend on
# $\theta$. This is also why the same loss may be perfect on one set of texts and poor on another. Its exponential,
# the **perplexity**, is the number of equally likely answers that would be as surprising.
#
# The run shows the floor. The demonstrations of `a+b=` are the sum and the next three numbers, with the four
# probabilities above, so that $H(p) = 1.75$ bits is the optimum, known exactly. The cross-entropy is computed from the
# probabilities of all answers. The broken run differs in one thing: it has 200 demonstrations in place of 20,000, and
# passes over them again and again.

# %%
folder = Path(tempfile.mkdtemp())
target = torch.zeros(100, 110)
for i, total in enumerate(h.SUMS):
    target[i, [h.ANSWERS.index(str(total + more)) for more in range(4)]] = p


def demonstrations(n):
    """Writes n demonstrations drawn from the target; returns the file."""
    rng = random.Random(n)
    path = folder / f"{n}.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i in rng.choices(range(100), k=n):
            [more] = rng.choices(range(4), p.tolist())
            file.write(json.dumps({"prompt": h.PROMPTS[i], "completion": str(h.SUMS[i] + more)}) + "\n")
    return str(path)


def measure(log_pi):
    """The cross-entropy and both divergences in bits, mean over the prompts."""
    share = log_pi.exp()
    log_ratio = target.clamp(min=1e-9).log() - log_pi
    return {"cross_entropy": float(-(target * log_pi).sum(1).mean() / BIT),
            "forward": float((target * log_ratio).sum(1).mean() / BIT),
            "outside": float((share * (target == 0)).sum(1).mean())}  # fmt: skip


def train(seed, n=20_000, steps=400):
    """SFT on n demonstrations; returns the curves."""
    model = SFT(model_config=h.TINY, learning_rate=2e-3, warmup_steps=10, max_completion_length=4)
    data = InstructionDataModule(path=demonstrations(n), batch_size=64, eval_steps=0, seed=seed)
    return h.fit(model, data, max_steps=steps, callbacks=[h.Enumerated(measure, every=20)])


runs = {"20,000 demonstrations": h.fit_seeds(train), "broken: 200 demonstrations": train(0, 200)}
h.plot(runs, "cross_entropy", "optimizer steps", "cross-entropy, bits per answer", best=1.75, best_name="entropy")
for name, several in runs.items():
    several = [several] if isinstance(several, dict) else several
    for metric in ("cross_entropy", "forward", "outside"):
        print(f"{name:27} {metric:14}", h.final(several, metric))

# %% [markdown]
# **How to read it.** The curve falls from the surprise of a random model towards the entropy and not below it. The
# distance to the line is $\operatorname{KL}(p \,\Vert\, \pi_\theta)$, what is left to learn: 0.36 bits after 400
# steps. A training loss can fall below the line, on demonstrations that it has seen.
#
# **What failure looks like.** With 200 demonstrations the curve turns and rises, to 3.461 bits at the end: the model
# becomes certain of the answers that it happened to see, and answers that people give lose their probability. The
# training loss of this run tells nothing, since it falls on. One unlikely event is enough: where $q(x) \to 0$ and
# $p(x) > 0$, $\operatorname{KL}(p \,\Vert\, q)$ is infinite.
#
# ## The direction
#
# $\operatorname{KL}(p \,\Vert\, q)$ averages over $p$, and $\operatorname{KL}(q \,\Vert\, p)$ over $q$. A belief $q$
# that can equal $p$ ends there under both. One that cannot shows the difference. Below, $p$ has two hills, and $q$ may
# be any single bell curve, with mean $m$ and width $w$.
#
# * $\operatorname{KL}(p \,\Vert\, q)$, the **forward** one, is large where $p$ has mass and $q$ has none. The best $q$
#   **covers** both hills, and the valley between them, where $p$ has next to nothing. Its optimum is known: the mean
#   and the width of $p$ itself, since the derivative of $\mathbb{E}_p[\log q]$ is 0 there.
# * $\operatorname{KL}(q \,\Vert\, p)$, the **reverse** one, is large where $q$ has mass and $p$ has none. The best $q$
#   **seeks a mode**: it takes the larger hill and ignores the other.

# %%
x = torch.linspace(-10, 10, 801, dtype=torch.float64)


def bell(mean, width):
    """The logarithm of a bell curve's probabilities on the points x."""
    return (-0.5 * ((x - mean) / width) ** 2).log_softmax(0)


hills = (0.6 * bell(-2.0, 0.6).exp() + 0.4 * bell(2.5, 0.6).exp()).log()
m, w = torch.linspace(-4, 4, 161, dtype=torch.float64), torch.linspace(0.2, 4, 96, dtype=torch.float64)
candidates = torch.stack([bell(mean, width) for mean in m for width in w])  # [n, 801]
found = {
    "forward, KL(p‖q)": (hills.exp() * (hills - candidates)).sum(1).argmin(),
    "reverse, KL(q‖p)": (candidates.exp() * (candidates - hills)).sum(1).argmin(),
}
_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
axes.fill_between(x, hills.exp(), color="lightgray", label="p")
for name, i in found.items():
    print(f"{name}: mean {float(m[i // len(w)]):5.2f}, width {float(w[i % len(w)]):.2f}")
    axes.plot(x, candidates[i].exp(), label=name)
mean = (hills.exp() * x).sum()
print(f"p itself:         mean {float(mean):5.2f}, width {float((hills.exp() * (x - mean) ** 2).sum().sqrt()):.2f}")
axes.set(xlabel="x", ylabel="probability of a point")
axes.legend()
plt.show()

# %% [markdown]
# The direction is a choice about errors: say something of everything, or only what is surely right.
#
# | method | minimises | page |
# |---|---|---|
# | SFT, distillation from texts | $\operatorname{KL}(p \,\Vert\, \pi_\theta)$, forward | pages 10, 12 and 14 |
# | RLHF: from the policy to the best one, up to a constant | reverse | page 11 |
# | penalty of GRPO, by default: from the policy to the reference | reverse | page 12 |
# | the same in the papers: from the reference to the policy | forward | page 12 |
# | TRPO's trust region | $\operatorname{KL}(\pi_{\text{old}} \,\Vert\, \pi_\theta)$ | page 8 |
#
# So SFT makes a model that knows many answers, good and bad, and reinforcement learning one that prefers few. For
# small steps the directions agree: to second order both are $\frac12 x^\top F x$ (page 8).
#
# ## Exercises
#
# **Exercise 10b.1.** A die is loaded: 6 has probability 1/2, the others 1/10 each. How many bits has a throw, and how
# many does a code for a fair die waste?
#
# <details markdown="1"><summary>Answer</summary>
#
# $H = \frac12 \cdot 1 + \frac12 \log_2 10 = 2.161$ bits. The fair code has $\log_2 6 = 2.585$, so it wastes
# $\operatorname{KL} = 0.424$ bits.
#
# ```python
# import torch
#
# p = torch.tensor([0.1] * 5 + [0.5])
# entropy = -(p * p.log2()).sum()
# assert abs(float(entropy) - 2.161) < 1e-3
# assert abs(float((p * (p * 6).log2()).sum()) - 0.424) < 1e-3
# assert abs(float(torch.tensor(6.0).log2() - entropy) - 0.424) < 1e-3
# ```
#
# </details>
#
# **Exercise 10b.2.** $p = (0.9, 0.1)$ and $q = (0.5, 0.5)$. Compute both directions in bits. What happens to each as
# $p \to (1, 0)$?
#
# <details markdown="1"><summary>Answer</summary>
#
# $\operatorname{KL}(p \,\Vert\, q) = 1 - H(p) = 0.531$ bits and $\operatorname{KL}(q \,\Vert\, p) = -1 - \frac12
# \log_2 0.09 = 0.737$ bits. The first goes to 1 bit, the second to infinity.
#
# ```python
# import torch
#
# p, q = torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.5])
# assert abs(float((p * (p / q).log2()).sum()) - 0.531) < 1e-3
# assert abs(float((q * (q / p).log2()).sum()) - 0.737) < 1e-3
# sure = torch.tensor([1 - 1e-12, 1e-12], dtype=torch.float64)
# assert abs(float((sure * (sure / q).log2()).sum()) - 1) < 1e-6 and float((q * (q / sure).log2()).sum()) > 18
# ```
#
# </details>
#
# **Exercise 10b.3.** A model has a loss of 0.35 nats per token on texts whose entropy is 0.25 nats per token. Compute
# its KL to the texts in bits for a text of 20 tokens, and its perplexity per token.
#
# <details markdown="1"><summary>Answer</summary>
#
# The KL of a text is the sum over its tokens: $20 \cdot 0.10 = 2$ nats, $2 / \log 2 = 2.885$ bits. The perplexity is
# $e^{0.35} = 1.419$.
#
# ```python
# import math
#
# assert abs(20 * (0.35 - 0.25) / math.log(2) - 2.885) < 1e-3
# assert abs(math.exp(0.35) - 1.419) < 1e-3
# ```
#
# </details>
#
# **Exercise 10b.4.** Of two answers $p$ gives $(0.8, 0.2)$. A policy must be certain: $q = (1, 0)$ or $(0, 1)$. Which
# direction can compare the two, and what does it say?
#
# <details markdown="1"><summary>Answer</summary>
#
# The forward KL is infinite for both. The reverse one is $\log \frac{1}{0.8} = 0.223$ and $\log \frac{1}{0.2} = 1.609$
# nats: be certain of the likelier answer.
#
# ```python
# import torch
# from torch.distributions import Categorical, kl_divergence
#
# p = Categorical(torch.tensor([0.8, 0.2]))
# for q, reverse in (([1.0, 0.0], 0.2231), ([0.0, 1.0], 1.6094)):
#     q = Categorical(torch.tensor(q))
#     assert torch.isinf(kl_divergence(p, q)) and abs(float(kl_divergence(q, p)) - reverse) < 1e-4
# ```
#
# </details>
#
# ## What is open
#
# The distance of two policies has a unit and a direction. [RLHF](11_rlhf.ipynb) takes the reverse one, from the
# policy to a reference, as the price of leaving the texts that the reward model knows.
#
# **Sources.** Shannon 1948, [A Mathematical Theory of
# Communication](https://doi.org/10.1002/j.1538-7305.1948.tb01338.x); Kullback & Leibler 1951, [On Information and
# Sufficiency](https://doi.org/10.1214/aoms/1177729694); the two directions: Minka 2005, *Divergence measures and
# message passing*, Microsoft Research technical report MSR-TR-2005-173.
