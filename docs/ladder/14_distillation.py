# %% [markdown]
# # 14. Distillation
#
# On [the page before](13_agents.ipynb) a group whose dialogues all earn the same taught nothing, and a policy that
# started from all random walks rested near 0, beside a goal that it hardly saw. A return is one number for a whole
# dialogue. What if someone knows the way, and can say at every token what they would have written? This page learns
# from a **teacher**.
#
# **Before:** [13. Agents](13_agents.ipynb) · **Next:** [all curves](15_together.ipynb) · [glossary](glossary.md)
#
# ## Two divergences
#
# The teacher is a policy $p$, the student a policy $q_\theta$ with weights $\theta$. Both give a probability to every
# next token $v$ of the vocabulary in a state, the text so far, $s_t = (x, y_{<t})$. The distance between the two
# distributions can be measured from either side (page 8):
#
# $$\operatorname{KL}(p \,\Vert\, q_\theta) = \sum_v p(v) \log \frac{p(v)}{q_\theta(v)} \quad \text{(forward)}, \qquad
# \operatorname{KL}(q_\theta \,\Vert\, p) = \sum_v q_\theta(v) \log \frac{q_\theta(v)}{p(v)} \quad \text{(reverse)}.$$
#
# Both are 0 only at $q_\theta = p$. A student that cannot equal its teacher chooses differently under each. Let the
# teacher walk around an obstacle, left twice or right twice, and nearly never mix: the completions ll, lr, rl, rr
# have $p = (0.49, 0.01, 0.01, 0.49)$. The student does not remember its first step and has one weight, the
# probability $\theta$ of right: $q_\theta = ((1 - \theta)^2, \theta (1 - \theta), \theta (1 - \theta), \theta^2)$.
#
# **Forward.** The completion with $n$ times r has $\log q_\theta = n \log \theta + (2 - n) \log(1 - \theta)$. Set
# the derivative of $\mathbb{E}_p[\log q_\theta]$ to zero: $\mathbb{E}_p[n] / \theta = (2 - \mathbb{E}_p[n]) / (1 -
# \theta)$, so $\theta = \mathbb{E}_p[n] / 2 = \frac12$. Where $p > 0$ and $q_\theta \to 0$ the forward KL is
# infinite, so the student **covers** both ways, and half of its walks run into the obstacle: $\operatorname{KL}(p
# \,\Vert\, q_{1/2}) = 0.98 \log \frac{0.49}{0.25} + 0.02 \log \frac{0.01}{0.25} = 0.595$.
#
# **Reverse.** The same $\theta = \frac12$ costs $0.5 \log \frac{0.25}{0.49} + 0.5 \log \frac{0.25}{0.01} = 1.273$,
# and $\theta = 1$ costs $\log \frac{1}{0.49} = 0.713$. The reverse KL punishes what the teacher would not write and
# forgives what the student leaves out: it **seeks a mode**.
#
# **Between.** With the mixture $m = w\, p + (1 - w)\, q_\theta$, $0 < w < 1$, the generalised Jensen-Shannon
# divergence ([arXiv:2306.13649](https://arxiv.org/abs/2306.13649), eq. 1) is
#
# $$\operatorname{JSD}_w = w \operatorname{KL}(p \,\Vert\, m) + (1 - w) \operatorname{KL}(q_\theta \,\Vert\, m).$$
#
# It is bounded, because $m \ge w\, p$ and $m \ge (1 - w)\, q_\theta$. The argument `beta` of
# `functional.generalized_jsd` is $w$; there 0 stands for the forward and 1 for the reverse KL.

# %%
import re
import tempfile
from pathlib import Path

import helpers as h
import matplotlib.pyplot as plt
import torch

from datamodules import InstructionDataModule, PromptDataModule
from datamodules.language.worlds import TextMaze
from recipes.agent import write_records
from recipes.one_world import dialogue_return
from rl_modules import SFT, Distillation
from rl_modules import functional as F
from rl_modules.language.scoring import logits_at

p = torch.tensor([0.49, 0.01, 0.01, 0.49])
theta = torch.linspace(0.001, 0.999, 999)
q = torch.stack([(1 - theta) ** 2, theta * (1 - theta), theta * (1 - theta), theta**2], 1)
_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name, beta in (("forward KL", 0.0), ("JSD, w = 1/2", 0.5), ("reverse KL", 1.0)):
    divergence = F.generalized_jsd(q.log(), p.log().expand_as(q), beta)
    print(f"{name:12} at 1/2: {divergence[499]:.3f}, least at θ = {theta[divergence.argmin()]:.3f}")
    axes.plot(theta, divergence, label=name)
axes.set(xlabel="θ, probability of r", ylabel="nats", ylim=(0, 3))
axes.legend()
plt.show()

# %% [markdown]
# ## Whose text?
#
# The divergence of a token needs a text before it, and that is a second choice.
#
# * **Off-policy:** the teacher, or a data set, writes $y$. With the forward KL this is SFT on the teacher's samples
#   (page 12) with less noise, since every $p(v)$ counts instead of one sample of it. At test time the student
# continues   *its own* text. A student that errs leaves the texts that it has seen, errs more often there, and the
# expected   number of its errors can grow with the square of the length instead of the length
#   ([arXiv:1011.0686](https://arxiv.org/abs/1011.0686)).
# * **On-policy:** the student writes $y$, and the teacher says at each token what it would write there. The student is
#   corrected in the states that it reaches. Generalised knowledge distillation mixes both (`lmbda`).
#
# ## The reverse KL is a policy gradient
#
# Take whole completions $y \sim q_\theta$. By the product rule, and because $\sum_y q_\theta \nabla \log q_\theta =
# \nabla \sum_y q_\theta = 0$ (page 6),
#
# $$\nabla \operatorname{KL}(q_\theta \,\Vert\, p) = \sum_y \nabla q_\theta(y) \log \frac{q_\theta(y)}{p(y)} + \sum_y
# q_\theta(y) \nabla \log q_\theta(y) = - \mathbb{E}_{y \sim q_\theta} \Big[ \nabla \log q_\theta(y) \log
# \frac{p(y)}{q_\theta(y)} \Big].$$
#
# Descending the reverse KL is REINFORCE with the reward $R(y) = \log p(y) - \log q_\theta(y)$. It is the objective of
# page 11 with the reward $\log p$ and the KL's weight 1 against a uniform reference. The reward is a sum over tokens,
#
# $$R(y) = \sum_t A_t, \qquad A_t = \log p(y_t \mid s_t) - \log q_\theta(y_t \mid s_t),$$
#
# so every token has a reward of its own. By causality (page 6) the gradient of token $t$ weighs with $A_t + A_{t+1} +
# \dots$. On-policy distillation keeps $A_t$ alone, a discount of 0: the gradient of each state's KL, without the
# student's influence on which states come next. Where $q_\theta$ can equal $p$ everywhere both end at the same
# policy, because no state then has anything left to gain. At $q_\theta = p$ each $A_t$ is 0 for every sample, so that
# the gradient has no noise there; a reward of right or wrong has noise until the policy is certain.
#
# `functional.distillation_advantage` is $A_t$. By enumeration over four tokens:

# %%
logits = torch.tensor([0.5, 0.0, -0.5, 1.0], requires_grad=True)
log_q = logits.log_softmax(0)
[reverse] = torch.autograd.grad(F.generalized_jsd(log_q, p.log(), 1.0), logits, retain_graph=True)
advantage = F.distillation_advantage(log_q[None], p.log()[None], torch.ones(1, 4))[0]
expected = sum(log_q[v].exp().detach() * advantage[v] * torch.autograd.grad(log_q[v], logits, retain_graph=True)[0]
               for v in range(4))  # fmt: skip
print("-∇ KL      ", (-reverse).numpy().round(4))
print("E[A ∇log q]", expected.numpy().round(4))

# %% [markdown]
# ## The gradient of a token that the student does not write
#
# For a softmax with logits $z$, $\partial \log q_\theta(v) / \partial z_u = \mathbb{1}[u = v] - q_\theta(u)$.
# Insert it:
#
# $$\frac{\partial}{\partial z_u} \operatorname{KL}(p \,\Vert\, q_\theta) = q_\theta(u) - p(u), \qquad
# \frac{\partial}{\partial z_u} \operatorname{KL}(q_\theta \,\Vert\, p) = q_\theta(u) \Big( \log
# \frac{q_\theta(u)}{p(u)} - \operatorname{KL}(q_\theta \,\Vert\, p) \Big).$$
#
# If the teacher is sure of a token that the student gives $q_\theta(u) = 10^{-3}$, the forward gradient is nearly
# $-1$ and the reverse one about $10^{-2}$. The reverse KL learns from what the student writes, as every policy
# gradient does; the forward KL tells it what it does not.
#
# ## The run
#
# The maze and the 64 dialogues per step are those of page 13, the start is a shorter SFT on all walks. The teacher is
# not a network but the optimal policy itself, from value iteration with $\gamma = 0.9$ (page 1). It reads the last
# cell, writes the best direction, then the end token. Each with probability 0.999: with a zero in $p$ the reverse KL
# would be infinite. Its own return is about $10 \cdot 0.994 - 10 \cdot 0.006 = 9.88$, since one wrong token of six
# costs 10. `Distillation` takes a model as its teacher; its method `divergence` is overridden to ask the table.


# %%
def table(gamma):
    """Returns the maze and its optimal policy, [6 cells, 4]; actions that are equally good are equally likely."""
    maze = h.known("Maze-v0", max_episode_steps=8)
    action_value = F.value_iteration(maze.transition, maze.reward, gamma)[:6]
    best = (action_value > action_value.amax(1, keepdim=True) - 1e-6).double()
    return maze, best / best.sum(1, keepdim=True)


class FromTheTable(Distillation):
    """A student of the maze whose teacher is a table of the cells' policies."""

    def teacher(self, text):
        """Returns log p of the next token after a text, [V]."""
        row, column, word = re.findall(r"(\d),(\d)\n((?:(?!\d,\d\n).)*)", text, re.DOTALL)[-1]
        right = torch.zeros(self.model.config.vocab_size)
        if word:
            right[self.tokenizer.eos_token_id] = 1
        else:
            right[self.tokenizer.convert_tokens_to_ids(list("ldru"))] = self.table[3 * int(row) + int(column)].float()
        return (0.999 * right + 0.001 / len(right)).log()

    def divergence(self, place, beta, input_ids, **inputs):
        """Returns the divergence and the reverse KL after each of the places ``row * width + column``, [m]."""
        log_q = logits_at(self.model, place, input_ids=input_ids, **inputs)[0].log_softmax(-1)
        row, column = (place // input_ids.shape[1]).tolist(), (place % input_ids.shape[1]).tolist()
        texts = [self.tokenizer.decode(input_ids[i, max(0, j - 9) : j + 1]) for i, j in zip(row, column, strict=True)]
        log_p = torch.stack([self.teacher(text) for text in texts])
        return F.generalized_jsd(log_q, log_p, beta), F.generalized_jsd(log_q.detach(), log_p, 1.0)


folder = Path(tempfile.mkdtemp())
write_records("maze", 64 if h.SHORT else 500, 0, folder)
start = SFT(model_config=h.TINY, tokenizer_name_or_path=str(folder / "tokenizer"), learning_rate=3e-3,
            lr_scheduler_type="constant_with_warmup", warmup_steps=10)  # fmt: skip
h.fit(start, InstructionDataModule(path=str(folder / "dialogues.jsonl"), batch_size=64, n_eval=0), max_steps=80)
start = str(start.export(folder / "start"))


def train(seed, beta, steps=80):
    """Distils the optimal policy; returns the student and its curves."""
    student = FromTheTable(start, teacher_model_name_or_path=start, beta=beta, learning_rate=3e-3, warmup_steps=5,
                           lr_scheduler_type="constant_with_warmup", max_completion_length=64,
                           logging_steps=2)  # fmt: skip
    student.table = table(gamma=0.9)[1]
    data = PromptDataModule(
        path=str(folder / "train.jsonl"), environment=TextMaze, environment_kwargs={"brief": True}, max_turns=8,
        max_turn_tokens=3, num_generations=64, batch_size=64, n_eval=0, seed=seed,
    )  # fmt: skip
    return student, h.fit(student, data, max_steps=steps)


runs, students = {}, {}
for name, beta in (("JSD, w = 1/2", 0.5), ("broken: reverse KL", 1.0)):
    trained = [train(seed, beta) for seed in ((0,) if h.SHORT else (0, 1))]
    runs[name], students[name] = [curves for _, curves in trained], trained[-1][0]
    if not h.SHORT:
        print(f"{name:19} exact returns", [round(dialogue_return(student, None), 2) for student, _ in trained])
h.plot(runs, "train/reward", "optimizer steps", "mean return of a dialogue, sampled", best=10.0)
h.plot(runs, "train/reverse_kl", "optimizer steps", "KL(q ‖ p) per token, nats", best=0.0, best_name="the teacher")
h.keep("Distillation", runs["JSD, w = 1/2"], "train/reward")

# %% [markdown]
# **How to read it.** From a longer SFT on such walks GRPO rested near 0 at first (the broken run of the page before).
# Distillation passes a return of 0 after about 30 steps and comes close to the teacher's. The two learn from
# different signals: GRPO from the return of whole dialogues, this student from the teacher's distribution at every
# token. The return measures the task. The loss is the KL of the student's own tokens. It is a mean per token, so that
# it also falls when dialogues grow longer.
#
# **What failure looks like.** The reverse KL falls to 1.2 nats and stays there, at a return of -10. The table below
# shows seed 1 after 80 steps: two directions are right, and in the third cell it gives no character more than two
# per cent. It spreads over all characters, and the teacher excludes all but one of them. Their ratio $q_\theta / p$
# is the same, 1000, so the KL is about $\log 1000 = 6.9$ nats and the bracket above is 0 for each of them; and d,
# the one character that would help, has the gradient of a token that is hardly ever written. Seed 0 left the
# plateau at the end. A KL that rests far above 0 is stuck; one that is near 0 at a low return has a bad teacher.

# %%
for name, student in students.items():
    print(name)
    for text in ("0,0\n", "0,0\nr<eos>0,1\n", "0,0\nr<eos>0,1\nr<eos>0,2\n", "0,0\nd<eos>1,0\n"):
        ids = torch.tensor([student.tokenizer(text).input_ids])
        with torch.no_grad():
            likely, token = student.model(input_ids=ids).logits[0, -1].softmax(-1).topk(3)
        words = [
            f"{student.tokenizer.decode(i)!r} {x:.3f}" for i, x in zip(token.tolist(), likely.tolist(), strict=True)
        ]
        print("  ", text.replace("\n", " ").replace("<eos>", " "), "→", ", ".join(words))
maze, policy = table(gamma=1.0)
print(f"exact return of a teacher with γ = 1: {maze.expected_return(policy):.2f}")

# %% [markdown]
# ## What the student does not learn
#
# *The map.* In the last row of each table the first step went down. The right answer is u, and the student writes
# r, into the trap. It has learned three words in order. On-policy it is corrected where it goes, and it stopped
# going there. Off-policy, on walks of the teacher, it would never have been there at all.
#
# *More than the teacher knows.* With $\gamma = 1$ value iteration finds every step equally good that does not enter
# the trap, and splits ties evenly. That teacher earns 1.69 in eight steps, and a perfect student of it earns 1.69.
# RL on the reward can pass its teacher.
#
# ## Teachers of real size
#
# A teacher that is a network answers for all places of a text in one forward pass. Its vocabulary has $10^5$
# tokens, so the divergence is computed in tiles, or on the likeliest tokens of the teacher with one more entry
# for the probability of all others, the **tail** (`loss_top_k`). Student and teacher must share the tokenizer,
# since $p(v)$ and $q_\theta(v)$ speak of the same $v$. `teacher_model_name_or_path` names it, and `rl serve` runs
# it elsewhere.
#
# ## Exercises
#
# **Exercise 14.1.** The teacher of the first section writes ll, lr, rl, rr with $p = (0.7, 0.05, 0.05, 0.2)$. Which
# $\theta$ minimises the forward KL? Near which end is the least reverse KL?
#
# <details markdown="1"><summary>Answer</summary>
#
# $\mathbb{E}_p[n] = 0.05 + 0.05 + 2 \cdot 0.2 = 0.5$, so $\theta = 0.25$. The reverse KL seeks ll, the larger mode:
# $\theta = 0.095$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# p = torch.tensor([0.7, 0.05, 0.05, 0.2], dtype=torch.float64)
# theta = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
# q = torch.stack([(1 - theta) ** 2, theta * (1 - theta), theta * (1 - theta), theta**2], 1)
# for beta, least in ((0.0, 0.25), (1.0, 0.095)):
#     divergence = F.generalized_jsd(q.log(), p.log().expand_as(q), beta)
#     assert abs(float(theta[divergence.argmin()]) - least) < 1e-3
# ```
#
# </details>
#
# **Exercise 14.2.** Of three tokens the teacher has $p = (0.98, 0.01, 0.01)$, the student $q_\theta = (0.001, 0.998,
# 0.001)$. Compute the gradient of both KLs with respect to the first logit.
#
# <details markdown="1"><summary>Answer</summary>
#
# Forward: $0.001 - 0.98 = -0.979$. Reverse: $\operatorname{KL}(q_\theta \,\Vert\, p) = 4.585$, and $0.001\, (\log
# \frac{0.001}{0.98} - 4.585) = -0.0115$, 85 times smaller.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# log_p = torch.tensor([0.98, 0.01, 0.01]).log()
# for beta, expected in ((0.0, -0.979), (1.0, -0.01147)):
#     logits = torch.tensor([0.001, 0.998, 0.001]).log().requires_grad_()
#     F.generalized_jsd(logits.log_softmax(0), log_p, beta).backward()
#     assert abs(float(logits.grad[0]) - expected) < 1e-4
# ```
#
# </details>
#
# **Exercise 14.3.** With $p = (0.6, 0.3, 0.05, 0.05)$ and $q_\theta = (0.5, 0.3, 0.1, 0.1)$, compute the reverse KL
# over all four tokens, over the teacher's top two with the tail, and over the top two divided by their sum.
#
# <details markdown="1"><summary>Answer</summary>
#
# All: $0.5 \log \frac{0.5}{0.6} + 0.2 \log 2 = 0.0475$. The tail has 0.1 and 0.2, the same ratio as its tokens, so
# nothing is lost: 0.0475. Without it $(\frac23, \frac13)$ and $(0.625, 0.375)$ remain: $0.0038$, because what the
# student puts outside of the top two is not seen.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# log_p, log_q = torch.tensor([[0.6, 0.3, 0.05, 0.05], [0.5, 0.3, 0.1, 0.1]]).log()
# top_p, top_q = log_p[:2], log_q[:2]
# for q, p, expected in (
#     (log_q, log_p, 0.0475),
#     (F.with_tail(top_q), F.with_tail(top_p), 0.0475),
#     (top_q.log_softmax(0), top_p.log_softmax(0), 0.0038),
# ):
#     assert abs(float(F.generalized_jsd(q, p, 1.0)) - expected) < 1e-4
# ```
#
# </details>
#
# ## Where to go from here
#
# [All curves together](15_together.ipynb) closes the guide. [Distillation](../language/distillation.md) lists the
# arguments, teachers and what was measured; [GRPO](12_grpo.ipynb) is the way without a teacher.
#
# **Sources.** Generalised knowledge distillation: Agarwal et al. 2024,
# [arXiv:2306.13649](https://arxiv.org/abs/2306.13649); the reverse KL as a policy gradient: Gu et al. 2024,
# [arXiv:2306.08543](https://arxiv.org/abs/2306.08543), and Lu et al. 2025, [On-policy
# distillation](https://thinkingmachines.ai/blog/on-policy-distillation/); learning in one's own states: Ross et al.
# 2011, [arXiv:1011.0686](https://arxiv.org/abs/1011.0686).
