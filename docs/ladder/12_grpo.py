# %% [markdown]
# # 12. GRPO
#
# [RLHF](11_rlhf.ipynb) trains a value model beside the policy, as large as the policy, and a reward model before
# it. This page removes both: the other completions of the same prompt are the baseline, and a program checks the
# answer. This is group relative policy optimization, the algorithm behind DeepSeek-R1.
#
# **Before:** [11c. Over-optimisation](11c_overoptimisation.ipynb) · **Next:** [12b. R1](12b_r1.ipynb) ·
# [glossary](glossary.md)
#
# ## The group is the baseline
#
# For each prompt $x$ the policy samples $K$ completions $y_1, \dots, y_K$, a **group**. (The literature writes $G$;
# here $G$ is the return.) A reward function scores each: $R_i = 1$ if the answer is right, else 0. Page 6 allows
# any baseline that does not depend on the action. The mean of the *other* rewards is one,
#
# $$b_i = \frac{1}{K - 1} \sum_{j \ne i} R_j,$$
#
# because the completions are independent. It estimates the value $V^\pi(x)$ without a network. With the mean of the
# whole group, $\bar R$,
#
# $$R_i - \bar R = R_i - \frac{R_i + (K - 1)\, b_i}{K} = \frac{K - 1}{K} (R_i - b_i),$$
#
# so the group's mean, though it contains $R_i$, gives the same gradient up to the factor $(K-1)/K$. RLOO
# ([arXiv:2402.14740](https://arxiv.org/abs/2402.14740)) uses $R_i - b_i$. GRPO (Shao et al. 2024,
# [arXiv:2402.03300](https://arxiv.org/abs/2402.03300)) divides by the group's standard deviation $s$ in addition,
# and gives every token of the completion the same advantage:
#
# $$\hat A_i = \frac{R_i - \bar R}{s + 10^{-4}}, \qquad \rho_{i,t} = \frac{\pi_\theta(y_{i,t} \mid x,
# y_{i,<t})}{\pi_{\text{old}}(y_{i,t} \mid x, y_{i,<t})},$$
#
# $$\ell_{i,t} = -\min\big( \rho_{i,t} \hat A_i,\; \operatorname{clip}(\rho_{i,t}, 1 - \epsilon, 1 + \epsilon)\,
# \hat A_i \big) + \beta\, \big( e^{z_{i,t}} - 1 - z_{i,t} \big), \qquad L = \frac1K \sum_i \frac{1}{|y_i|} \sum_t
# \ell_{i,t}.$$
#
# The first term is PPO's. The second is k3 with $z = \log \pi_{\text{ref}} - \log \pi_\theta$, in the loss and not
# in the reward. Plain k3, as here and in the papers, has the gradient of
# $\operatorname{KL}(\pi_{\text{ref}} \,\Vert\, \pi)$ ([page 11](11_rlhf.ipynb)); `GRPO` multiplies it by
# $\rho_{i,t}$ unless `use_bias_correction_kl` is false, and then has that of
# $\operatorname{KL}(\pi \,\Vert\, \pi_{\text{ref}})$. With a reward that cannot be fooled, $\beta$ is often 0. By
# hand: one right answer of four has $\bar R = 1/4$ and $s = 1/2$ (with $K - 1$ in its denominator), so the
# advantages are $(1.5, -0.5, -0.5, -0.5)$. Four right answers have no spread and teach nothing:

# %%
import json
import tempfile
from pathlib import Path

import helpers as h
import torch

from datamodules import InstructionDataModule, PromptDataModule
from rl_modules import GRPO, SFT
from rl_modules import functional as F

reward = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
print("GRPO", F.group_advantages(reward, num_generations=4))
print("RLOO", F.rloo_advantages(reward, num_generations=4))

# %% [markdown]
# ## Its biases, and the variants that remove them
#
# **Dead groups.** If the policy is right with probability $p$, a group is all right or all wrong with probability
# $p^K + (1 - p)^K$, and has no gradient. DAPO ([arXiv:2503.14476](https://arxiv.org/abs/2503.14476)) samples again
# until enough groups have a spread (`dynamic_sampling`).
#
# **Difficulty.** The standard deviation of a 0/1 reward is $\sqrt{p (1 - p)}$. Dividing by it weights prompts that
# are nearly always or nearly never solved more than those in the middle. Dr. GRPO
# ([arXiv:2503.20783](https://arxiv.org/abs/2503.20783)) does not divide (`scale_rewards="none"`).
#
# **Length.** $1 / |y_i|$ lets each token of a long completion count less. A long wrong answer is punished less per
# token than a short one, and wrong answers grow. Other divisors:
#
# | `loss_type` | $L$ |
# |---|---|
# | `grpo` | $\frac1K \sum_i \frac{1}{\lvert y_i \rvert} \sum_t \ell_{i,t}$ |
# | `dapo` | $\sum_{i,t} \ell_{i,t} \,/\, \sum_i \lvert y_i \rvert$ over the whole batch |
# | `dr_grpo` | $\sum_{i,t} \ell_{i,t} \,/\, (K \cdot \text{largest allowed length})$ |
#
# **Clipping.** An unlikely token, say $\pi_{\text{old}} = 0.01$, may rise to 0.012 only before the clip stops it, a
# likely one from 0.5 to 0.6. DAPO raises the upper bound alone, to $1 + 0.28$ (`epsilon_high`), which keeps the
# entropy from falling.
#
# **Ratio.** The reward belongs to the completion, the ratio to a token. GSPO
# ([arXiv:2507.18071](https://arxiv.org/abs/2507.18071)) uses one ratio per completion, the geometric mean of the
# tokens' (`importance_sampling_level="sequence"`).
#
# `functional.grpo_loss` composes these pieces. By hand: two completions of 1 and 3 tokens with advantages +1 and -1
# and all ratios 1. `grpo` gives $-\frac12 (1 - 1) = 0$: both completions weigh the same. `dapo` gives
# $-(1 - 3) / 4 = 0.5$: all tokens weigh the same. `dr_grpo` with at most 4 tokens gives $-(1 - 3) / 8 = 0.25$.

# %%
log_prob, advantage = torch.zeros(2, 3), torch.tensor([1.0, -1.0])
mask = torch.tensor([[True, False, False], [True, True, True]])
for loss_type in ("grpo", "dapo", "dr_grpo"):
    loss = F.grpo_loss(log_prob, log_prob, advantage, mask, epsilon=0.2, loss_type=loss_type, max_completion_length=4)
    print(f"{loss_type:8} {float(loss):+.2f}")

# %% [markdown]
# ## The run
#
# The task is that of the last pages, sums of two digits. A reward of 1 means that the text of the completion is the
# right sum; there are no demonstrations and no judge from here on. The start is an SFT model that is right about
# half of the time. A start that is never right would have dead groups only. The probability of the right sum is
# computed exactly before and after; the optimum is 1.

# %%
folder = Path(tempfile.mkdtemp())
sums = {"task": "addition", "task_kwargs": {"n_digits": 1}, "n_eval": 0, "eval_steps": 0}
sft = SFT(
    model_config=h.TINY, learning_rate=1e-3, warmup_steps=10, lr_scheduler_type="constant", max_completion_length=4
)
h.fit(sft, InstructionDataModule(**sums, batch_size=64), max_steps=200)
_ = sft.export(folder / "sft")
print("probability of the right sum after SFT", round(h.pass_rate(sft), 3))


# %%
def train(seed, steps=500, learning_rate=1e-3):
    """Trains GRPO from the SFT model; returns the policy and its curves."""
    policy = GRPO(model_name_or_path=str(folder / "sft"), loss_type="grpo", learning_rate=learning_rate,
                  max_completion_length=4, logging_steps=10)  # fmt: skip
    data = PromptDataModule(**sums, seed=seed, num_generations=16, batch_size=256, dynamic_sampling=2)
    return policy, h.fit(policy, data, max_steps=steps)


policy, first = train(0)
runs = {
    "GRPO": h.fit_seeds(lambda seed: first if seed == 0 else train(seed)[1], seeds=(0, 1)),
    "broken: α = 0.01": train(0, 100, learning_rate=1e-2)[1],
}
h.plot(runs, "train/reward", "optimizer steps", "share of right answers, sampled", best=1.0)
print("final share of two seeds", h.final(runs["GRPO"], "train/reward"))
print("exact probability of the right sum, seed 0:", round(h.pass_rate(policy), 3))
h.keep("GRPO", runs["GRPO"], "train/reward")

# %% [markdown]
# **How to read it.** The reward is the share of right answers among the samples of a step, 16 for each of 16
# prompts, drawn at temperature 1. It drops in the first steps, in which the new optimizer moves far, rises steadily
# while most groups have a spread, and slows down towards the end: the next plot shows the share of dead groups that
# remain after two rounds of replacements. What is left to learn is in few groups, and each step teaches less.

# %%
h.plot(runs, "train/frac_reward_zero_std", "optimizer steps", "share of dead groups")

# %% [markdown]
# **What failure looks like.** A step size ten times larger collapses the policy within a few steps: it writes the
# same few answers to every prompt, nearly all groups are dead, and with no spread there is no gradient that could
# lead back. The share of dead groups near 1 at a *low* reward is the sign. At a high reward it is success.
#
# ## More samples: pass@k
#
# A policy that is right with probability $p$ solves a prompt in at least one of $k$ tries with probability
# $1 - (1 - p)^k$. From $n$ samples with $c$ right ones the unbiased estimate is
# $1 - \binom{n - c}{k} / \binom{n}{k}$ ([arXiv:2107.03374](https://arxiv.org/abs/2107.03374)). RL mostly turns
# pass@k into pass@1: it makes likely what the start could already find sometimes.

# %%
for k in (1, 4, 8):
    print(f"pass@{k} of 2 right answers in 8: {float(F.pass_at_k(8, 2, k)):.3f}")
print("before and after: pass@1 and pass@8, exact, mean over prompts")
for name, model in (("SFT", sft), ("GRPO", policy)):
    p = h.log_probs(model)[torch.arange(100), h.RIGHT].exp()
    print(f"{name:5} {float(p.mean()):.3f}  {float((1 - (1 - p) ** 8).mean()):.3f}")

# %% [markdown]
# ## R1: two pipelines
#
# DeepSeek-R1 ([arXiv:2501.12948](https://arxiv.org/abs/2501.12948)) shows what this loss does to a large model
# whose completions contain a line of thought before the answer.
#
# * **R1-Zero:** GRPO on a pretrained model without any SFT. The reward is the sum of accuracy (the answer in the
#   required place is right) and format (thought and answer stand between the required tags). Completions grow
#   longer during training, without a reward for length.
# * **R1:** (1) a small SFT on good thoughts, the *cold start*; (2) GRPO with accuracy, format and language rewards;
#   (3) sample completions from that policy, keep the right ones, and fine-tune the *base* model on them and on
#   other data (rejection sampling); (4) GRPO once more, with verifiers where there is a right answer and a reward
#   model where there is none.
#
# [The next page](12b_r1.ipynb) runs both at a small scale.
#
# ## Turns and tools
#
# An agent that calls a tool, a search engine or a test, alternates: the policy writes tokens, the environment
# appends its answer, the policy goes on. Nothing in the equations changes. The tokens of the environment are part
# of the *state*, not actions: the mask excludes them from the loss, from $|y_i|$ and from the KL. The reward at the
# end belongs to all tokens that the policy wrote.
#
# ## Distillation
#
# A small model can learn from a large one's samples. Minimising $-\log \pi_\theta(y)$ on
# $y \sim \pi_{\text{teacher}}$ is minimising $\operatorname{KL}(\pi_{\text{teacher}} \,\Vert\, \pi_\theta)$, since
# the two differ by the teacher's entropy, a constant. Filtered by the verifier it is rejection sampling, step 3 of
# R1. The student here has a quarter of the weights and random ones; it sees the right ones of 6,400 samples of the
# policy above, and no demonstration. [Page 14](14_distillation.ipynb) compares whole distributions instead, on the
# student's own samples.

# %%
generator = torch.Generator().manual_seed(0)
sampled = torch.multinomial(h.log_probs(policy).exp(), 64, replacement=True, generator=generator)  # [100, 64]
with open(folder / "samples.jsonl", "w", encoding="utf-8") as file:
    for prompt, total, drawn in zip(h.PROMPTS, h.SUMS, sampled.tolist(), strict=True):
        for answer in [h.ANSWERS[i] for i in drawn]:
            if answer == str(total):  # the verifier
                file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
small = {**h.TINY, "hidden_size": 32, "intermediate_size": 64}
student = SFT(model_config=small, learning_rate=3e-3, warmup_steps=10, max_completion_length=4)
h.fit(student, InstructionDataModule(path=str(folder / "samples.jsonl"), batch_size=64, eval_steps=0), max_steps=600)
print("student", round(h.pass_rate(student), 3), "teacher", round(h.pass_rate(policy), 3))

# %% [markdown]
# ## Exercises
#
# **Exercise 12.1.** A group of four has the rewards (1, 1, 0, 0). Compute the advantages of GRPO, of Dr. GRPO and
# of RLOO.
#
# <details markdown="1"><summary>Answer</summary>
#
# The mean is 1/2, and $s = \sqrt{4 \cdot \frac14 / 3} = 0.5774$. GRPO: $\pm 0.5 / 0.5775 = \pm 0.8659$. Dr. GRPO:
# $\pm 0.5$. RLOO: $\pm \frac43 \cdot 0.5 = \pm 0.6667$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# reward = torch.tensor([1.0, 1.0, 0.0, 0.0])
# for found, size in (
#     (F.group_advantages(reward, 4), 0.8659),
#     (F.group_advantages(reward, 4, scale_rewards="none"), 0.5),
#     (F.rloo_advantages(reward, 4), 0.6667),
# ):
#     assert torch.allclose(found, size * torch.tensor([1.0, 1.0, -1.0, -1.0]), atol=1e-4)
# ```
#
# </details>
#
# **Exercise 12.2.** The policy is right with probability 0.18. Which share of groups is dead for $K = 2$ and for
# $K = 8$?
#
# <details markdown="1"><summary>Answer</summary>
#
# $0.18^2 + 0.82^2 = 0.705$, and $0.18^8 + 0.82^8 = 0.204$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# reward = (torch.rand(80_000, generator=torch.Generator().manual_seed(0)) < 0.18).float()
# for k, share in ((2, 0.705), (8, 0.204)):
#     assert abs(0.18**k + 0.82**k - share) < 1e-3
#     advantage = F.group_advantages(reward, k).view(-1, k)
#     assert abs(float((advantage == 0).all(1).float().mean()) - share) < 0.02
# ```
#
# </details>
#
# **Exercise 12.3.** Two completions are wrong ($\hat A = -1$ each, ratios 1), one with 2 tokens and one with 8.
# Compute the gradient of the loss with respect to the log-probability of one token of each, under `grpo` and under
# `dapo`.
#
# <details markdown="1"><summary>Answer</summary>
#
# `grpo`: $\frac12 \cdot \frac12 = 0.25$ and $\frac12 \cdot \frac18 = 0.0625$: the tokens of the long wrong answer
# are pushed down four times less. `dapo`: $1/10$ each.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# mask = torch.arange(8)[None] < torch.tensor([[2], [8]])
# for loss_type, short, long in (("grpo", 0.25, 0.0625), ("dapo", 0.1, 0.1)):
#     log_prob = torch.zeros(2, 8, requires_grad=True)
#     advantage = torch.tensor([-1.0, -1.0])
#     F.grpo_loss(log_prob, torch.zeros(2, 8), advantage, mask, epsilon=0.2, loss_type=loss_type).backward()
#     assert torch.allclose(log_prob.grad[:, 0], torch.tensor([short, long]))
# ```
#
# </details>
#
# ## Where to go from here
#
# [Page 13](13_agents.ipynb) lets the policy act in turns. The same class and the same file train pretrained
# checkpoints: [GRPO](../language/grpo.md), [tasks and rewards of your own](../language/tasks.md), [samplers and
# vLLM](../language/sampling.md).
#
# **Sources.** Shao et al. 2024, [arXiv:2402.03300](https://arxiv.org/abs/2402.03300); DeepSeek-AI 2025,
# [arXiv:2501.12948](https://arxiv.org/abs/2501.12948); the variants as linked.
