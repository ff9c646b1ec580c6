# %% [markdown]
# # 11c. Over-optimisation
#
# A reward model is right about texts like those of its comparisons, and optimisation leaves them. [RLHF](11_rlhf.ipynb)
# showed one such run. This page measures the whole way: how much of a judge's score is
# real, at each distance from the reference, and whether it matters how the policy got there.
#
# **Before:** [11b. DPO](11b_dpo.ipynb) · **Next:** [12. GRPO](12_grpo.ipynb) · [glossary](glossary.md)
#
# ## Two rewards and one distance
#
# When a measure becomes a target, it ceases to be a good measure (Goodhart's law, in Strathern's words). There are two
# rewards here: the true one, which people have in mind, and its **proxy**, the reward model. A policy is improved by
# the proxy and judged by the true reward. What can be said of any way to improve it is how far it went,
# $\operatorname{KL}(\pi \,\Vert\, \pi_{\text{ref}})$ (Gao et al. 2022,
# [arXiv:2210.10760](https://arxiv.org/abs/2210.10760)). Three ways follow.
#
# **The best policy at each distance.** By page 11, $\pi_\beta \propto \pi_{\text{ref}}\, e^{r_\phi / \beta}$
# maximises the proxy less $\beta$ times the KL. So no policy of the same KL has a higher proxy score: the curve of
# $\pi_\beta$ over all $\beta$ is the upper bound.
#
# **Best of n.** Draw $n$ completions from the reference, and keep the one that the judge scores highest. Nothing is
# trained. Let $F(y)$ be the probability that a completion of the reference scores at most as much as $y$, and $F^-(y)$
# that it scores less. The best of $n$ scores at most as much as $y$ if all $n$ do, so
#
# $$\pi_n(y) = F(y)^n - F^-(y)^n.$$
#
# Its KL has a closed form. If no two completions have the same score and each is rare, the rank $u = F(y)$ of a
# completion of the reference is uniform in $[0, 1]$, and that of the best one has the density $n u^{n-1}$:
#
# $$\operatorname{KL}(\pi_n \,\Vert\, \pi_{\text{ref}}) = \int_0^1 n u^{n-1} \log\big( n u^{n-1} \big)\, du = \log n -
# \frac{n - 1}{n},$$
#
# since $\int_0^1 n u^{n-1} \log u \, du = -\frac1n$. Where single completions have much probability it is an upper
# bound. So best of a thousand is at most $\log 1000 - 0.999 = 5.91$ nats away, and every further nat takes three
# times as many samples ($e = 2.7$).
#
# **Reinforcement learning.** PPO moves along a path of its own. Without a penalty, time is its distance.
#
# The cell computes $\pi_n$ for a reference of three answers and compares the KL with the bound:

# %%
import tempfile
from pathlib import Path

import helpers as h
import matplotlib.pyplot as plt
import torch

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import RLHFPPO, SFT, RewardModel


def best_of(n, log_ref, score):
    """Returns log π_n of the best of n completions by the score, [prompts, answers] in float64."""
    order = score.argsort(1)
    at_most = log_ref.double().exp().gather(1, order).cumsum(1).clamp(max=1.0)
    less = torch.cat([torch.zeros_like(at_most[:, :1]), at_most[:, :-1]], 1)
    share = (at_most**n - less**n).clamp(min=1e-300)
    return torch.zeros_like(share).scatter(1, order, share).log()


def kl(log_pi, log_ref):
    """The mean over prompts of the KL, nats."""
    return float((log_pi.exp() * (log_pi - log_ref)).sum(1).mean())


three, score = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.0, 2.0, 1.0]])
for n in (1, 2, 8):
    best = best_of(n, three, score)
    bound = torch.tensor(n).log() - (n - 1) / n
    print(f"best of {n}: {best.exp()[0].numpy().round(3)}  KL {kl(best, three):.3f}, at most {bound:.3f}")

# %% [markdown]
# ## The run
#
# Sums of two digits again. The true reward is 0 for the right sum and -2 for each unit away. Two judges learn it,
# from 20,000 comparisons and from 300. The curves of $\pi_\beta$ and of the best of $n$ are exact, by enumeration of
# all 110 answers, and so are the points of PPO, which trains on the poor judge with $\beta = 0$ for 300 steps. The
# optimum is the same family with the *true* reward in the judge's place, $\pi_{\text{ref}}\, e^{r / \beta}$: no
# policy has a higher true reward at its distance.

# %%
folder = Path(tempfile.mkdtemp())
sums = {"task": "addition", "task_kwargs": {"n_digits": 1}, "n_eval": 0, "eval_steps": 0}
sft = SFT(
    model_config=h.TINY, learning_rate=1e-3, warmup_steps=10, lr_scheduler_type="constant", max_completion_length=4
)
h.fit(sft, InstructionDataModule(**sums, batch_size=64), max_steps=300)
_ = sft.export(folder / "sft")


def train_judge(name, n):
    """Trains a reward model on n comparisons and exports it; returns its scores [100, 110]."""
    h.write_comparisons(folder / f"{name}.jsonl", n, seed=2)
    model = RewardModel(model_name_or_path=str(folder / "sft"), learning_rate=1e-3, warmup_steps=10)
    h.fit(model, PreferenceDataModule(path=str(folder / f"{name}.jsonl"), batch_size=64, eval_steps=0), max_steps=300)
    model.export(folder / name)
    texts = [(prompt, answer) for prompt in h.PROMPTS for answer in h.ANSWERS]
    return model.score(*zip(*texts, strict=True)).view(100, 110)


# What is compared are answers of one or two digits: the reference is the SFT model's distribution over them.
reference = h.log_probs(sft).log_softmax(1)
proxies = {"judge": train_judge("judge", 20_000), "poor judge": train_judge("poor judge", 300)}
true = torch.tensor([[h.true_reward(i, int(answer)) for answer in h.ANSWERS] for i in range(100)])


def place(log_pi, proxy):
    """A policy's distance, mean proxy score over the reference's, probability of the right sum, and true reward."""
    share = log_pi.exp()
    return {"kl": kl(log_pi, reference), "proxy": float(((share - reference.exp()) * proxy).sum(1).mean()),
            "right": float(share[torch.arange(100), h.RIGHT].mean()),
            "true": float((share * true).sum(1).mean())}  # fmt: skip


def train(seed, steps=300):
    """PPO on the poor judge without a penalty; returns the curves."""
    policy = RLHFPPO(
        model_name_or_path=str(folder / "sft"), reward_model_name_or_path=str(folder / "poor judge"), beta=0.0,
        learning_rate=1e-3, max_completion_length=3, missing_eos_penalty=5.0, cliprange_value=None,
    )  # fmt: skip
    data = PromptDataModule(**sums, seed=seed, batch_size=128, num_generations=1)
    measure = h.Enumerated(lambda log_pi: place(log_pi.log_softmax(1), proxies["poor judge"]), every=20)
    return h.fit(policy, data, max_steps=steps, callbacks=[measure])


runs = h.fit_seeds(train, seeds=(0, 1))
betas = torch.logspace(2, -1, 40).tolist()
paths = {"optimum: the true reward": [place((reference + true / beta).log_softmax(1), true) for beta in betas]}
for name, proxy in proxies.items():
    paths[f"{name}, $\\pi_\\beta$"] = [place((reference + proxy / beta).log_softmax(1), proxy) for beta in betas]
    paths[f"{name}, best of n"] = [place(best_of(2**i, reference, proxy), proxy) for i in range(13)]
for seed, run in enumerate(runs):
    points = zip(*(run[key] for key in ("kl", "proxy", "right", "true")), strict=True)
    paths[f"poor judge, PPO, seed {seed}"] = [
        {"kl": a[1], "proxy": b[1], "right": c[1], "true": d[1]} for a, b, c, d in points
    ]
_, both = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for axes, key, label in zip(both, ("proxy", "right"), ("gain in its judge's score", "probability of the right sum"),
                            strict=True):  # fmt: skip
    for name, points in paths.items():
        style = "k--" if "optimum" in name else "." if "PPO" in name else "-" if "beta" in name else "x-"
        if key == "right" or "optimum" not in name:
            axes.plot([point["kl"] for point in points], [point[key] for point in points], style, label=name)
    axes.set(xlabel="KL to the reference (nats)", ylabel=label)
    axes.grid(alpha=0.3)
both[1].legend(fontsize=7)
plt.show()
print("reference", {key: round(value, 3) for key, value in place(reference, true).items()})
for name, points in paths.items():
    best = max(points, key=lambda point: point["right"])
    last = points[-1]
    print(f"{name.replace('$', '').replace(chr(92), ''):26} best {best['right']:.3f} at {best['kl']:.2f} nats; "
          f"farthest {last['right']:.3f} at {last['kl']:.2f} nats")  # fmt: skip

# %% [markdown]
# **How to read it.** On the left every way raises the score of its judge. $\pi_\beta$ has the highest at each distance,
# as derived; the best of $n$ gets less, and PPO least, because much of its distance buys nothing: one of its seeds went
# more than eight nats in the first twenty steps. On the right is what it was worth. With the good judge the probability
# of the right sum rises from 0.862 to 0.910 by $\pi_\beta$ and to 0.951 by the best of $n$, within 0.2 nats, and falls
# from there on. This judge is right about which of two usual answers is better, and wrong about unusual ones, to which
# only a long way leads. With the poor judge there is next to nothing to gain. The dashed line is what was possible.
# The distance at which a curve of the right figure has its maximum is where to stop, and nothing in the left figure
# marks it.
#
# **What failure looks like.** A score that rises while every reading of the texts gets worse. The signs are the KL, a
# second judge that is not trained on, and samples that a person reads. The remedies are a penalty or a limit on the KL,
# a better judge, comparisons of what the policy now writes, and the mean or the minimum of several judges
# ([arXiv:2310.02743](https://arxiv.org/abs/2310.02743)). Best of $n$ is also a cheap test of a judge before any
# training: if the best of many reads worse than that of a few, PPO will be no better.
#
# ## Exercises
#
# **Exercise 11c.1.** How far from the reference is the best of 4, at most, and how many samples does the double of it
# take?
#
# <details markdown="1"><summary>Answer</summary>
#
# $\log 4 - \frac34 = 0.636$ nats. The double, 1.273, needs $n = 9$: $\log 9 - \frac89 = 1.308$.
#
# ```python
# import math
#
# distance = lambda n: math.log(n) - (n - 1) / n
# assert abs(distance(4) - 0.636) < 1e-3
# assert distance(8) < 2 * distance(4) < distance(9)
# ```
#
# </details>
#
# **Exercise 11c.2.** A reference writes A, B and C with 0.6, 0.3 and 0.1; the judge scores 0, 1 and 2. Compute the best
# of 2, and its mean score.
#
# <details markdown="1"><summary>Answer</summary>
#
# $F = (0.6, 0.9, 1)$, so $\pi_2 = (0.36, 0.81 - 0.36, 1 - 0.81) = (0.36, 0.45, 0.19)$ and the score is 0.83, up from
# 0.5.
#
# ```python
# import itertools
#
# reference, score = (0.6, 0.3, 0.1), (0, 1, 2)
# best = [0.0] * 3
# for one, other in itertools.product(range(3), repeat=2):
#     best[max(one, other, key=lambda i: score[i])] += reference[one] * reference[other]
# assert all(abs(x - y) < 1e-12 for x, y in zip(best, (0.36, 0.45, 0.19)))
# assert abs(sum(p * s for p, s in zip(best, score)) - 0.83) < 1e-12
# ```
#
# </details>
#
# **Exercise 11c.3.** Gao et al. fit the true reward of reinforcement learning by $d\, (a - b \log d)$ with $d =
# \sqrt{\operatorname{KL}}$. Where is its maximum for $a = 1$ and $b = 0.5$, and how large is it?
#
# <details markdown="1"><summary>Answer</summary>
#
# The derivative $a - b \log d - b$ is 0 at $d = e^{a / b - 1} = e$, a KL of $e^2 = 7.389$ nats, where the reward is
# $b\, d = 1.359$.
#
# ```python
# import torch
#
# d = torch.linspace(0.1, 10, 100_000, dtype=torch.float64)
# reward = d * (1 - 0.5 * d.log())
# assert abs(float(d[reward.argmax()] ** 2) - 7.389) < 0.01 and abs(float(reward.max()) - 1.359) < 1e-3
# ```
#
# </details>
#
# ## What is open
#
# Every score of a model of people's taste has this end. Where a program can tell right from wrong the proxy *is* the
# true reward, and [GRPO](12_grpo.ipynb) may go as far as it likes.
#
# **Sources.** Gao et al. 2022, [arXiv:2210.10760](https://arxiv.org/abs/2210.10760); best of n: Stiennon et al. 2020,
# [arXiv:2009.01325](https://arxiv.org/abs/2009.01325); its KL as a bound: Beirami et al. 2024,
# [arXiv:2401.01879](https://arxiv.org/abs/2401.01879); several judges: Coste et al. 2023,
# [arXiv:2310.02743](https://arxiv.org/abs/2310.02743).
