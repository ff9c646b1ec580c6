# %% [markdown]
# # 12b. R1
#
# [GRPO](12_grpo.ipynb) started from a model that had seen demonstrations of the task. DeepSeek-R1-Zero had seen none:
# it is a pretrained model, two rewards that a program computes, and reinforcement learning, and its completions grow
# into lines of thought. This page repeats that in minutes, explains what grows, and then runs the stages of R1.
#
# **Before:** [12. GRPO](12_grpo.ipynb) · **Next:** [13. Agents](13_agents.ipynb) · [glossary](glossary.md)
#
# ## The task, and a base model
#
# A prompt is a sum of three digits, `7+5+9=`. A completion may answer at once, `21`, or think first: `12,21` computes
# $7 + 5$ on the way. The required **format** has the thought in brackets and the answer after it, `[12]21`. (R1 has the
# tags `<think>` and `<answer>`.)
#
# A base model is trained on text, not on tasks. Its "web" has pages of three kinds: most people answer at once, and
# often err by one or two; fewer write the sum on the way and then are right; and few of these use brackets. The model
# learns to continue text as the web does, the slips included. Nobody has told it that a prompt wants a right answer.

# %%
import json
import random
import re
import tempfile
from pathlib import Path

import helpers as h
import lightning as L
import matplotlib.pyplot as plt
import torch

from datamodules import InstructionDataModule, PromptDataModule
from rl_modules import GRPO, SFT
from rl_modules import functional as F

BASE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4}  # fmt: skip
folder = Path(tempfile.mkdtemp())


def question(rng):
    """A prompt with its answer and the sum of the first two digits."""
    a, b, c = (rng.randrange(10) for _ in range(3))
    return {"prompt": f"{a}+{b}+{c}=", "answer": str(a + b + c), "thought": str(a + b)}


def page(rng):
    """A page of the web, for pretraining."""
    q, kind = question(rng), rng.random()
    if kind < 0.6:
        return q["prompt"] + str(max(0, int(q["answer"]) + rng.choice([-2, -1, 0, 1, 2])))
    between = ("", ",") if kind < 0.9 else ("[", "]")
    return q["prompt"] + between[0] + q["thought"] + between[1] + q["answer"]


def write(name, records):
    """Writes a file of records; returns its path."""
    (folder / name).write_text("\n".join(map(json.dumps, records)), "utf-8")
    return str(folder / name)


def learn(name, path, steps, start=None, config=BASE, learning_rate=3e-3):
    """Trains on texts or demonstrations and exports the model; returns it."""
    L.seed_everything(0, verbose=False)
    given = {"model_name_or_path": start} if start else {"model_config": config}
    model = SFT(**given, learning_rate=learning_rate, lr_scheduler_type="constant_with_warmup", warmup_steps=20,
                max_completion_length=16)  # fmt: skip
    h.fit(model, InstructionDataModule(path=path, batch_size=128, n_eval=0), max_steps=steps)
    model.export(folder / name)
    return model


rng = random.Random(0)
web = write("web.jsonl", [{"text": page(rng)} for _ in range(30_000)])
prompts = [question(rng) for _ in range(4_000)]
asked = write("prompts.jsonl", prompts)
questions = [question(rng) for _ in range(200)]
base = learn("base", web, 800)

# %% [markdown]
# ## Two rewards
#
# **Accuracy** is 1 if the last number of the completion is the sum. **Format** is 1 if the completion has the required
# form, whatever stands in it. No reward mentions length or thinking. Samples of the base model, and what each kind of
# completion is worth to it:


# %%
def form(completions, **_):
    """1 where a completion has a thought in brackets and then an answer."""
    return [float(bool(re.fullmatch(r"\[\d+\]\d+", text))) for text in completions]


def last_number(text):
    """A completion's answer; None without one."""
    return (re.findall(r"\d+", text) or [None])[-1]


def accuracy(completions, answer, **_):
    """1 where the last number is the answer."""
    return [float(last_number(text) == right) for text, right in zip(completions, answer, strict=True)]


@torch.no_grad()
def sample(policy, questions, n, seed=0):
    """Returns n completions of each question, [[text, …], …]."""
    policy.eval()
    ids = [policy.tokenizer(q["prompt"]).input_ids for q in questions]
    written = policy.act(ids, range(seed, seed + n * len(ids)), n)
    texts = [policy.tokenizer.decode(row[:k].tolist(), skip_special_tokens=True)
             for row, k in zip(written.tokens, written.length, strict=True)]  # fmt: skip
    return [texts[i : i + n] for i in range(0, len(texts), n)]


def right_of(texts, questions):
    """1 where a sample is right, [questions, n]."""
    return torch.tensor(
        [accuracy(group, [q["answer"]] * len(group)) for group, q in zip(texts, questions, strict=True)]
    )


def measure(policy):
    """pass@1 on 200 questions with a 95 % interval over questions, share of the format, mean length in tokens."""
    texts = sample(policy, questions, 16)
    right, flat = right_of(texts, questions).mean(1), [text for group in texts for text in group]
    half = 1.96 * float(right.std()) / len(right) ** 0.5
    return float(right.mean()), half, sum(form(flat)) / len(flat), sum(map(len, flat)) / len(flat)


def show(name, policy):
    """Prints what :func:`measure` returns."""
    rate, half, share, length = measure(policy)
    print(f"{name:36} pass@1 {rate:.3f} ± {half:.3f}   format {share:.3f}   length {length:.1f}", flush=True)


texts = sample(base, questions, 64)
right = right_of(texts, questions)
print([(q["prompt"], group[0]) for q, group in zip(questions[:6], texts, strict=False)])
for kind, pattern in (("at once", r"\d+"), ("with a thought", r"\d+,\d+"), ("in the format", r"\[\d+\]\d+")):
    those = torch.tensor([[bool(re.fullmatch(pattern, text)) for text in group] for group in texts])
    print(f"{kind:15} share {float(those.float().mean()):.3f}, right {float(right[those].mean()):.3f}")

# %% [markdown]
# ## R1-Zero: the run
#
# GRPO from the base model, accuracy weighed 1 and format 0.2, 16 completions for each of 16 prompts per step. The
# optimum of each reward is 1. The broken run differs in one thing: the reward for accuracy has weight 0.


# %%
def reinforce(name, start, seed=0, steps=150, weights=(1.0, 0.2)):
    """GRPO with both rewards; exports the policy, returns it and its curves."""
    L.seed_everything(seed, verbose=False)
    policy = GRPO(model_name_or_path=str(folder / start), learning_rate=1e-3, lr_scheduler_type="linear",
                  warmup_steps=5, max_completion_length=16, reward_weights=list(weights), logging_steps=5)  # fmt: skip
    data = PromptDataModule(path=asked, reward_funcs=[accuracy, form], num_generations=16, batch_size=256, n_eval=0,
                            seed=seed)  # fmt: skip
    curves = h.fit(policy, data, max_steps=steps)
    policy.export(folder / name)
    return policy, curves


zero, first = reinforce("zero", "base")
runs = {
    "R1-Zero": h.fit_seeds(lambda seed: first if seed == 0 else reinforce("other", "base", seed)[1]),
    "broken: format only": [reinforce("broken", "base", steps=60, weights=(0.0, 1.0))[1]],
}
h.plot(runs, "train/rewards/accuracy/mean", "optimizer steps", "share of right answers, sampled", best=1.0)
h.plot(runs, "train/rewards/form/mean", "optimizer steps", "share in the format", best=1.0)
h.plot(runs, "train/completions/mean_length", "optimizer steps", "tokens of a completion")
for name, several in runs.items():
    for metric in ("rewards/accuracy/mean", "rewards/form/mean", "completions/mean_length"):
        print(f"{name:20} {metric:24}", h.final(several, f"train/{metric}"))
show("base", base)
show("R1-Zero, seed 0", zero)
h.keep("R1-Zero", runs["R1-Zero"], "train/rewards/accuracy/mean")

# %% [markdown]
# **How to read it.** First the format: within twenty steps nearly every completion has it, since it is easy and every
# group has a spread in it. Completions get longer with it. Then accuracy rises to the end, because a completion that
# thinks is right more often, and because the arithmetic improves. Nothing rewarded length: a thought is a way to the
# reward that the base model already knew and rarely took. Reinforcement learning makes likely what was unlikely, and
# what never occurs in the samples it cannot reinforce. The 200 questions are drawn on their own, but of the thousand
# possible ones training has seen most: they measure the policy, not how it generalises.
#
# **What failure looks like.** With the format alone the curves of format and length are as good as before, and the
# share of right answers falls to 0.143: the form is kept, and what stands in it is arbitrary. A completion that looks
# like reasoning is no evidence of it. A format that rises while accuracy stands still or falls says that the reward
# is earned elsewhere.
#
# ## More samples: pass@k and cons@k
#
# pass@k (page 12) asks whether one of $k$ samples is right, and someone must know which. **cons@k** asks no one: it
# takes the answer that most of the $k$ samples give (a majority vote, `functional.cons_at_k`). The vote goes to the
# most likely answer, so cons@k rises towards the share of prompts whose most likely answer is right.

# %%
_, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
ks = [1, 2, 4, 8, 16, 32, 64]
for name, policy in (("base", base), ("R1-Zero", zero)):
    texts = sample(policy, questions, 64)
    count = right_of(texts, questions).sum(1).long()
    passed = torch.stack([F.pass_at_k(64, count, k) for k in ks])
    answers, reference = [[*map(last_number, group)] for group in texts], [q["answer"] for q in questions]
    voted = torch.stack([F.cons_at_k(answers, reference, k) for k in ks])
    for kind, values, style in (("pass@k", passed, "-"), ("cons@k", voted, "--")):
        mean, half = values.mean(1), 1.96 * values.std(1) / len(questions) ** 0.5
        [line] = axes.plot(ks, mean, style, marker=".", label=f"{name}, {kind}")
        axes.fill_between(ks, mean - half, mean + half, alpha=0.15, color=line.get_color(), linewidth=0)
        print(f"{name:8} {kind}", {k: round(float(x), 3) for k, x in zip(ks, mean, strict=True) if k in (1, 8, 64)})
axes.axhline(1, color="gray", linestyle="--", linewidth=1)
axes.set(xscale="log", xlabel="k, samples per question", ylabel="share of 200 questions")
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# The base model finds every answer in 64 samples, and its vote of 64 is twice as good as one sample. Reinforcement
# learning has moved pass@1 to where the base model's pass@4 was, and its own vote of 8 is right for 0.965 of the
# questions. The larger $k$, the less is left of the difference in pass@k: nothing new was found, it is found at once.
#
# ## R1: the stages
#
# R1-Zero writes what earns the reward, in whatever style the base model had. R1 adds demonstrations, and uses
# reinforcement learning to write better ones:
#
# 1. **Cold start**: a short SFT of the base on few good thoughts, here 128.
# 2. **Reinforcement learning**, as above.
# 3. **Rejection sampling**: sample from that policy, keep what is right and in the format, and fine-tune the *base* on
#    it. The result has the policy's ability without its drift.
# 4. **Reinforcement learning** once more.
#
# **Distillation.** The samples of the last stage also teach a smaller model, of half the width. Beside it the same
# small model learns by reinforcement learning alone, as in the paper.

# %%
demonstrations = [{"prompt": q["prompt"], "completion": f"[{q['thought']}]{q['answer']}"} for q in prompts[:128]]
show("base", base)
show("1. cold start", learn("cold", write("cold.jsonl", demonstrations), 40, str(folder / "base"), learning_rate=1e-3))
second, _ = reinforce("second", "cold", steps=100)
show("2. reinforcement learning", second)


def kept(policy, n=2):
    """Rejection sampling: n completions of each training prompt, of which those with both rewards are kept."""
    rows = zip(prompts, sample(policy, prompts, n, seed=10_000), strict=True)
    pairs = [(q, text) for q, group in rows for text in dict.fromkeys(group)]
    good = [
        {"prompt": q["prompt"], "completion": text}
        for q, text in pairs
        if accuracy([text], [q["answer"]]) == form([text]) == [1.0]
    ]
    print(f"kept {len(good)} of {len(pairs)} different completions")
    return demonstrations if h.SHORT else good


show(
    "3. SFT of the base on what is kept",
    learn("third", write("kept.jsonl", kept(second)), 200, str(folder / "base"), learning_rate=1e-3),
)
final, _ = reinforce("final", "third", steps=100)
show("4. reinforcement learning", final)
small = learn("small", web, 500, config={**BASE, "hidden_size": 32, "intermediate_size": 128})
show("small base", small)
show(
    "small base, distilled",
    learn("student", write("taught.jsonl", kept(final)), 200, str(folder / "small"), learning_rate=3e-3),
)
show("small base, reinforcement learning", reinforce("small zero", "small", steps=100)[0])

# %% [markdown]
# Each stage is at least as good as the one before. The cold start alone is worth as much as all of R1-Zero: 128 good
# thoughts tell the base which of its habits is wanted. Rejection sampling keeps four of five completions, and the
# base that learns from them passes the policy that wrote them, since only its right ones are shown. The last stage
# adds nothing that the intervals could tell apart. Distillation brings the small model from 0.242 to 0.618, and
# reinforcement learning to 0.409: its own samples are right too rarely to learn as much from, as DeepSeek reports for
# small models.
#
# ## Exercises
#
# **Exercise 12b.1.** Of 5 samples, 2 are right and agree, 3 are wrong and all differ. Compute pass@1, pass@2 and
# cons@5.
#
# <details markdown="1"><summary>Answer</summary>
#
# pass@1 is $2/5$, pass@2 is $1 - \binom32 / \binom52 = 0.7$, and the vote is right: two agree, no three do.
#
# ```python
# from rl_modules import functional as F
#
# assert abs(float(F.pass_at_k(5, 2, 1)) - 0.4) < 1e-6 and abs(float(F.pass_at_k(5, 2, 2)) - 0.7) < 1e-6
# assert F.cons_at_k([["7", "7", "1", "2", "3"]], ["7"], 5).tolist() == [1.0]
# ```
#
# </details>
#
# **Exercise 12b.2.** A policy is right with probability 0.6 and wrong with always the same other answer. Compute
# cons@3. What if it is right with 0.4?
#
# <details markdown="1"><summary>Answer</summary>
#
# Two or three of three: $3 \cdot 0.6^2 \cdot 0.4 + 0.6^3 = 0.648$, and $0.352$ for 0.4: a vote helps whoever is right
# more often than wrong, and harms the other.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# drawn = torch.rand(50_000, 3, generator=torch.Generator().manual_seed(0))
# for p, expected in ((0.6, 0.648), (0.4, 0.352)):
#     assert abs(3 * p**2 * (1 - p) + p**3 - expected) < 1e-9
#     voted = F.cons_at_k((drawn < p).long(), torch.ones(50_000, dtype=torch.long), 3)
#     assert abs(float(voted.mean()) - expected) < 0.01
# ```
#
# </details>
#
# **Exercise 12b.3.** A tenth of the base model's completions has the format, and 16 are sampled per prompt. How many
# groups have a spread in the format? How many are it with one in a thousand?
#
# <details markdown="1"><summary>Answer</summary>
#
# $1 - 0.9^{16} - 0.1^{16} = 0.815$, and $1 - 0.999^{16} = 0.016$: what the base hardly ever writes is hardly ever
# reinforced. The cold start of R1 is for that.
#
# ```python
# assert abs(1 - 0.9**16 - 0.1**16 - 0.815) < 1e-3 and abs(1 - 0.999**16 - 0.016) < 1e-3
# ```
#
# </details>
#
# **Exercise 12b.4.** Answers at once are right with probability 0.2, thoughts with 0.8, and the policy thinks with
# probability $q$. Compute the gradient of the expected accuracy with respect to the logit of $q$. Which $q$ has the
# largest?
#
# <details markdown="1"><summary>Answer</summary>
#
# $J = 0.2 + 0.6\, q$ and $dq/dz = q (1 - q)$, so $0.6\, q (1 - q)$, at most $0.15$ at $q = \frac12$ and $0.054$ at $q =
# 0.1$: the growth of length is slow, then fast, then slow.
#
# ```python
# import torch
#
# for q, slope in ((0.1, 0.054), (0.5, 0.15), (0.9, 0.054)):
#     z = torch.logit(torch.tensor(q, dtype=torch.float64)).requires_grad_()
#     (0.2 + 0.6 * z.sigmoid()).backward()
#     assert abs(float(z.grad) - slope) < 1e-9
# ```
#
# </details>
#
# ## Where to go from here
#
# [The next page](13_agents.ipynb) lets the policy act in turns. [The R1 pipeline](../language/r1.md) runs a cold start,
# GRPO and a last stage with a learned reward on countdown, resumes where it was stopped, and has a config for a
# pretrained model of three billion weights; `grpo/sums_smollm.yaml` trains SmolLM2 on sums in minutes on a GPU.
#
# **Sources.** DeepSeek-AI 2025, [arXiv:2501.12948](https://arxiv.org/abs/2501.12948); majority votes: Wang et al. 2022,
# [arXiv:2203.11171](https://arxiv.org/abs/2203.11171); what the base already has: Liu et al. 2025,
# [arXiv:2503.20783](https://arxiv.org/abs/2503.20783), Yue et al. 2025,
# [arXiv:2504.13837](https://arxiv.org/abs/2504.13837).
