# %% [markdown]
# # 11b. DPO
#
# [RLHF](11_rlhf.ipynb) fits a reward model to comparisons and then a policy to the reward model, with four models in
# memory. The best policy under its objective is known in closed form. This page uses that form to fit the policy to
# the comparisons at once: direct preference optimization.
#
# **Before:** [11. RLHF](11_rlhf.ipynb) · **Next:** [12. GRPO](12_grpo.ipynb) · [glossary](glossary.md)
#
# ## The partition function cancels
#
# On page 11 the policy that maximises the reward less the KL is the reference, tilted by the reward. Solve it for the
# reward:
#
# $$\pi^*(y \mid x) = \frac{1}{Z(x)}\, \pi_{\text{ref}}(y \mid x)\, e^{r(x, y) / \beta} \quad\Longleftrightarrow\quad
# r(x, y) = \beta \log \frac{\pi^*(y \mid x)}{\pi_{\text{ref}}(y \mid x)} + \beta \log Z(x).$$
#
# $Z(x)$ is a sum over all texts, which nobody can compute. But the Bradley–Terry model (page 10) needs differences of
# rewards for the same prompt only, and $\beta \log Z(x)$ is the same for both answers:
#
# $$P(y_1 \succ y_2 \mid x) = \sigma\big( r(x, y_1) - r(x, y_2) \big) = \sigma\Big( \beta \log \frac{\pi^*(y_1 \mid
# x)}{\pi_{\text{ref}}(y_1 \mid x)} - \beta \log \frac{\pi^*(y_2 \mid x)}{\pi_{\text{ref}}(y_2 \mid x)} \Big).$$
#
# So a policy predicts comparisons, with $\hat r_\theta(x, y) = \beta \log \frac{\pi_\theta(y \mid
# x)}{\pi_{\text{ref}}(y \mid x)}$ in the reward's place, its **implicit reward**. The likelihood of the comparisons
# gives the loss (Rafailov et al. 2023, [arXiv:2305.18290](https://arxiv.org/abs/2305.18290), eq. 7):
#
# $$L(\theta) = -\mathbb{E}\big[ \log \sigma\big( \hat r_\theta(x, y_c) - \hat r_\theta(x, y_r) \big) \big].$$
#
# It is page 10's loss for another network. Nothing is sampled, and no value is learned. By the chain rule, as there,
#
# $$\nabla L = -\beta\, \mathbb{E}\Big[ \sigma\big( \hat r_\theta(x, y_r) - \hat r_\theta(x, y_c) \big) \big( \nabla
# \log \pi_\theta(y_c \mid x) - \nabla \log \pi_\theta(y_r \mid x) \big) \Big]:$$
#
# it raises the chosen and lowers the rejected answer, in proportion to how wrong the implicit rewards are.
# `functional.dpo_loss` is $L$. By hand: at $\pi_\theta = \pi_{\text{ref}}$ it is $\log 2 = 0.6931$, with gradients
# $\mp \beta / 2$.
#
# The cell minimises the exact expected loss for one prompt with three answers and the rewards 1, 0, -1. The minimum
# is $\pi^*$:

# %%
import json
import math
import random
import tempfile
from pathlib import Path

import helpers as h
import torch

from datamodules import InstructionDataModule, PreferenceDataModule
from rl_modules import DPO, SFT
from rl_modules import functional as F

chosen = torch.tensor([-2.0], requires_grad=True)
loss = F.dpo_loss(chosen, torch.tensor([-3.0]), torch.tensor([-2.0]), torch.tensor([-3.0]), beta=0.1)
loss.backward()
print(f"at the reference: loss {float(loss.detach()):.4f}, gradient of the chosen answer {float(chosen.grad):.3f}")

reward, ref, beta = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.2, 0.3, 0.5]).log(), 0.5
pairs = [(c, r) for c in range(3) for r in range(3) if c != r]  # chosen, rejected
wins = torch.stack([torch.sigmoid(reward[c] - reward[r]) for c, r in pairs])
logits = ref.clone().requires_grad_()
for _ in range(500):
    log_pi = logits.log_softmax(0)
    each = [F.dpo_loss(log_pi[[c]], log_pi[[r]], ref[[c]], ref[[r]], beta) for c, r in pairs]
    [gradient] = torch.autograd.grad((wins * torch.stack(each)).sum(), logits)
    logits = (logits - 2 * gradient).detach().requires_grad_()
print("learned", logits.softmax(0).detach().numpy().round(4), " π*", (ref + reward / beta).softmax(0).numpy().round(4))

# %% [markdown]
# ## What the loss does not say
#
# It sees $\log \pi_\theta(y_c) - \log \pi_\theta(y_r)$, a difference. Both terms may fall, as long as the rejected one
# falls faster, and their mass goes to texts that no comparison shows. The optimum $\pi^*$ is one of the minima: any
# policy with the same *ratios* among the compared answers has the same loss.
#
# A table has no reason to go elsewhere, but in a network answers share weights. Let the logit of an answer be $w \cdot
# f(y)$ with features $f$. A step of DPO moves $w$ along $f(y_c) - f(y_r)$. If the two answers are alike, it points
# along the small difference, and an answer that nobody compared may have more of it than the chosen one. Below $y_c =
# (1, 0.2)$, $y_r = (1, 0)$, and a third answer $(0, 2)$ is in no comparison. All of the mass goes to it:

# %%
features, w = torch.tensor([[1.0, 0.2], [1.0, 0.0], [0.0, 2.0]]), torch.tensor([2.0, 0.0])
ref = (features @ w).log_softmax(0)
for step in range(31):
    w = w.detach().requires_grad_()
    log_pi = (features @ w).log_softmax(0)
    loss = F.dpo_loss(log_pi[[0]], log_pi[[1]], ref[[0]], ref[[1]], beta=1.0)
    if step % 10 == 0:
        shares = ", ".join(
            f"{name} {float(x.exp()):.3f}" for name, x in zip(("y_c", "y_r", "third"), log_pi.detach(), strict=True)
        )
        print(f"step {step:3}  loss {float(loss.detach()):.3f}  probabilities {shares}")
    w = w - torch.autograd.grad(loss, w)[0]

# %% [markdown]
# This is **likelihood displacement** ([arXiv:2410.08847](https://arxiv.org/abs/2410.08847)). The remedy that the run
# below shows adds what the loss lacks, the level: the negative log-likelihood of the chosen answer per token
# (`rpo_alpha`, [arXiv:2404.19733](https://arxiv.org/abs/2404.19733)).
#
# ## The run
#
# The texts are those of the reward model: sums of two digits, an SFT model that is mostly right, and a judge whose
# reward is 0 for the right sum and -2 for each unit away. He compares 20,000 pairs of different answers that the SFT
# model writes. With $\beta = 0.5$ the optimum $\pi^*$ is known by enumeration, and with it the probability of the right
# sum, the line in the plot. The broken run differs in one thing, it has no likelihood term: it is DPO as published.

# %%
folder = Path(tempfile.mkdtemp())
sums = {"task": "addition", "task_kwargs": {"n_digits": 1}, "n_eval": 0, "eval_steps": 0}
sft = SFT(
    model_config=h.TINY, learning_rate=1e-3, warmup_steps=10, lr_scheduler_type="constant", max_completion_length=4
)
h.fit(sft, InstructionDataModule(**sums, batch_size=64), max_steps=300)
_ = sft.export(folder / "sft")

beta = 0.5
reference = h.log_probs(sft)
true = torch.tensor([[h.true_reward(i, int(answer)) for answer in h.ANSWERS] for i in range(100)])
optimum = (reference + true / beta).log_softmax(1)  # log π*
rng, generator = random.Random(0), torch.Generator().manual_seed(0)
with open(folder / "pairs.jsonl", "w", encoding="utf-8") as file:
    for _ in range(200 if h.SHORT else 20_000):
        i = rng.randrange(100)
        one, other = torch.multinomial(reference[i].exp(), 2, generator=generator).tolist()
        if rng.random() > 1 / (1 + math.exp(float(true[i, other] - true[i, one]))):
            one, other = other, one
        pair = {"prompt": h.PROMPTS[i], "chosen": h.ANSWERS[one], "rejected": h.ANSWERS[other]}
        file.write(json.dumps(pair) + "\n")


def measure(log_pi):
    """Shares of the right sum, of other answers of one or two digits, and of all other texts; mean over prompts."""
    right, all_110 = log_pi[torch.arange(100), h.RIGHT].exp(), log_pi.exp().sum(1)
    return {"right": float(right.mean()), "wrong": float((all_110 - right).mean()), "other": float(1 - all_110.mean()),
            "J": float((log_pi.exp() * (true - beta * (log_pi - reference))).sum(1).mean())}  # fmt: skip


def train(seed, likelihood=1.0, steps=300):
    """Trains DPO from the SFT model; returns the curves."""
    policy = DPO(model_name_or_path=str(folder / "sft"), beta=beta, rpo_alpha=likelihood, learning_rate=5e-4,
                 warmup_steps=10, max_completion_length=4)  # fmt: skip
    data = PreferenceDataModule(path=str(folder / "pairs.jsonl"), batch_size=64, n_eval=0, eval_steps=0, seed=seed)
    return h.fit(policy, data, max_steps=steps, callbacks=[h.Enumerated(measure, every=25)])


runs = {
    "DPO with likelihood": h.fit_seeds(train),
    "broken: without": h.fit_seeds(lambda seed: train(seed, likelihood=None)),
}
best = measure(optimum)
h.plot(runs, "right", "optimizer steps", "probability of the right sum", best=best["right"], best_name="π*")
print("SFT", {name: round(value, 3) for name, value in measure(reference).items()})
print("π* ", {name: round(value, 3) for name, value in best.items()})
for name, several in runs.items():
    print(name, {key: h.final(several, key) for key in best})

# %% [markdown]
# **How to read it.** With the likelihood term the right sum gains on all seeds, from 0.824 to 0.92 or more, and comes
# near to $\pi^*$. No reward model, no value model and no sampling were needed, and each step is one forward and
# backward pass. ($J$, the objective of page 11, is summed over the 110 answers: a policy that writes much else misses
# a part of it, so that it can't be compared where `other` is large.) The metric that training logs,
# `train/rewards/accuracies`, is the share of comparisons in which the chosen answer has the larger implicit reward.
# It rises in both runs alike:

# %%
h.plot(runs, "train/rewards/accuracies", "optimizer steps", "accuracy of the implicit reward")
h.plot(runs, "other", "optimizer steps", "probability of all texts but the 110 answers")
h.plot(runs, "train/logps/chosen", "optimizer steps", "mean log π of the chosen answers (nats)")

# %% [markdown]
# **What failure looks like.** Without the term the policy is right less often than the SFT model, while its accuracy
# on the comparisons is as good as the other's. Wrong answers have become rare, as the comparisons ask. So has the right
# one, since all of them lose to texts that are not one of the 110 answers and occur in no comparison. The last curve
# shows it: log-probabilities of *chosen* answers that fall are the sign. The remedies are the likelihood term, a
# smaller step, a larger $\beta$, and comparisons of what the policy now writes, which show it its new texts.
#
# ## DPO or RLHF
#
# | | RLHF | DPO |
# |---|---|---|
# | trains | reward model, value model, policy | policy |
# | samples while training | yes | no |
# | sees texts of | the current policy | whoever was compared |
# | in theory ends at | $\pi^*$ of the learned reward | $\pi^*$ of the comparisons' reward, where they cover all texts |
#
# RLHF scores what the policy now writes, and a text that no comparison shows gets some score, right or wrong. DPO says
# nothing about it. [DPO and its relatives](../language/dpo.md) has the losses, [measured](../language/dpo_measured.md)
# what rounds of fresh comparisons gain.
#
# ## Exercises
#
# **Exercise 11b.1.** $\beta = 0.5$; the policy has $\log \pi_\theta = (-1, -3)$ for the chosen and the rejected answer,
# the reference $(-2, -2)$. Compute the implicit rewards, the loss, and its gradient with respect to $\log
# \pi_\theta(y_c)$.
#
# <details markdown="1"><summary>Answer</summary>
#
# $\hat r = (0.5, -0.5)$, $L = -\log \sigma(1) = 0.3133$, and $-0.5\, \sigma(-1) = -0.1345$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# chosen, two = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0])
# loss = F.dpo_loss(chosen, torch.tensor([-3.0]), two, two, beta=0.5)
# loss.backward()
# assert abs(float(loss.detach()) - 0.3133) < 1e-4 and abs(float(chosen.grad) + 0.1345) < 1e-4
# ```
#
# </details>
#
# **Exercise 11b.2.** The reference writes A and B equally often, and A is preferred in 9 of 10 comparisons. Which
# policy is optimal for $\beta = 1$, and which for $\beta = 0.5$?
#
# <details markdown="1"><summary>Answer</summary>
#
# The rewards differ by $\log 9$, so the odds are $9^{1 / \beta}$: $\pi^*(A) = 0.9$, and $81 / 82 = 0.988$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# half, wins = torch.tensor([0.5]).log(), torch.tensor([0.9])
# for beta, best in ((1.0, 0.9), (0.5, 81 / 82)):
#     z = torch.zeros(1, requires_grad=True)  # logit of A
#     for _ in range(2000):
#         a, b = torch.nn.functional.logsigmoid(z), torch.nn.functional.logsigmoid(-z)
#         loss = 0.9 * F.dpo_loss(a, b, half, half, beta) + 0.1 * F.dpo_loss(b, a, half, half, beta)
#         z = (z - torch.autograd.grad(loss, z)[0]).detach().requires_grad_()
#     assert abs(float(z.sigmoid()) - best) < 1e-3
# ```
#
# </details>
#
# **Exercise 11b.3.** A judge prefers A always. Where does the loss of DPO lead, and where that of IPO
# ([arXiv:2310.12036](https://arxiv.org/abs/2310.12036)), $(\Delta - \frac{1}{2 \beta})^2$ with $\Delta$ the difference
# of the two log-ratios to the reference?
#
# <details markdown="1"><summary>Answer</summary>
#
# DPO has no minimum: $\Delta \to \infty$, and the policy stops writing B, whatever $\beta$. IPO ends at $\Delta =
# \frac{1}{2 \beta}$, which is 5 nats for $\beta = 0.1$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# zero, one = torch.zeros(1), torch.ones(1)
# def loss(gap, name):
#     length = {"chosen_length": one, "rejected_length": one} if name == "ipo" else {}
#     return float(F.dpo_loss(torch.tensor([gap]), zero, zero, zero, 0.1, name, **length))
#
# assert loss(5.0, "sigmoid") > loss(50.0, "sigmoid") > loss(100.0, "sigmoid") > 0
# assert loss(5.0, "ipo") == 0 < min(loss(4.0, "ipo"), loss(6.0, "ipo"))
# ```
#
# </details>
#
# **Exercise 11b.4.** The policy has the probabilities $(0.4, 0.2, 0.4)$ for the chosen, the rejected and a third
# answer, the reference $(0.5, 0.4, 0.1)$. Is the loss smaller than at the reference? Does the chosen answer gain?
#
# <details markdown="1"><summary>Answer</summary>
#
# With $\beta = 1$, $\Delta = \log \frac{0.4}{0.2} - \log \frac{0.5}{0.4} = 0.470$, so the loss falls from 0.693 to
# 0.486. The chosen answer has lost a fifth of its probability, to the third.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# policy, reference = torch.tensor([0.4, 0.2]).log(), torch.tensor([0.5, 0.4]).log()
# at = [float(F.dpo_loss(p[:1], p[1:], reference[:1], reference[1:], 1.0)) for p in (reference, policy)]
# assert abs(at[0] - 0.6931) < 1e-4 and abs(at[1] - 0.4855) < 1e-4
# ```
#
# </details>
#
# ## What is open
#
# DPO needs no reward model, but it learns from comparisons of texts that exist. For sums, proofs and programs there is
# a check that scores any text. [GRPO](12_grpo.ipynb) uses it.
#
# **Sources.** Rafailov et al. 2023, [arXiv:2305.18290](https://arxiv.org/abs/2305.18290); displacement: Razin et al.
# 2024, [arXiv:2410.08847](https://arxiv.org/abs/2410.08847); the likelihood term: Pang et al. 2024,
# [arXiv:2404.19733](https://arxiv.org/abs/2404.19733).
