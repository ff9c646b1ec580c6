# %% [markdown]
# # 10. Reward model
#
# [PPO](09_ppo.ipynb) needs a reward. For the helpfulness of an answer nobody can write one down, but people can say
# which of two answers is better. This page moves to language models, and learns a reward from comparisons.
#
# **Before:** [9c. Soft actor-critic](09c_soft_actor_critic.ipynb) · **Next:** [10b. Bits and
# divergences](10b_information.ipynb) ·
# [glossary](glossary.md)
#
# ## A language model is a policy
#
# Text is cut into **tokens**, here single characters. A language model with weights $\theta$ gives the probability
# of the next token after the tokens so far. A **prompt** $x$ is given; a **completion** $y = (y_1, \dots, y_n)$ is
# sampled token by token and ends with a token EOS
# (end of sequence). Its probability is
#
# $$\pi_\theta(y \mid x) = \prod_{t=1}^{n} \pi_\theta(y_t \mid x, y_1, \dots, y_{t-1}).$$
#
# So the state is the prompt with the tokens so far, the action is the next token, and the environment appends it,
# without chance. An episode is a completion. Usually nothing is rewarded until its end, and there is no discount.
#
# The running example is addition of two digits: the prompt is `3+4=`, the right completion `7`. The model is a
# transformer of two layers with random weights. **Supervised fine-tuning** (SFT) shows it demonstrations and
# minimises $-\log \pi_\theta(y \mid x)$ per token. It is stopped early here, so that something remains to be
# learned:

# %%
import tempfile
from pathlib import Path

import helpers as h
import matplotlib.pyplot as plt
import torch

from datamodules import InstructionDataModule, PreferenceDataModule
from rl_modules import SFT, RewardModel
from rl_modules import functional as F

folder = Path(tempfile.mkdtemp())
sft = SFT(
    model_config=h.TINY, learning_rate=1e-3, warmup_steps=10, lr_scheduler_type="constant", max_completion_length=4
)
sums = {"task": "addition", "task_kwargs": {"n_digits": 1}, "n_eval": 0, "eval_steps": 0}
h.fit(sft, InstructionDataModule(**sums, batch_size=64), max_steps=300)
_ = sft.export(folder / "sft")
print("probability of the right sum", round(h.pass_rate(sft), 2))
print("for 3+4=:", {y: round(float(h.log_probs(sft)[34, y].exp()), 2) for y in range(5, 10)})

# %% [markdown]
# ## From comparisons to a likelihood
#
# Someone compares two completions of the prompt $x$ and prefers one. The same pair may be judged differently
# another time: a comparison is random. Suppose that each completion has a reward $r(x, y)$, that the judge
# perceives it with independent noise, and prefers the completion that looks better. $y_1 \succ y_2$ means that
# $y_1$ is preferred. If the noise has a Gumbel distribution, the difference of two such noises has the logistic
# distribution function, and
#
# $$P(y_1 \succ y_2 \mid x) = \sigma\big(r(x, y_1) - r(x, y_2)\big) = \frac{e^{r(x, y_1)}}{e^{r(x, y_1)} + e^{r(x,
# y_2)}}, \qquad \sigma(z) = \frac{1}{1 + e^{-z}}.$$
#
# This is the **Bradley–Terry model** (1952). By the right form the chances are proportional to $e^r$. A difference
# of rewards is the logarithm of the odds: $r_1 - r_2 = 2$ means $e^2 = 7.4$ to 1.
#
# A **reward model** $r_\phi(x, y)$ is a network with weights $\phi$ that returns one number for a text: a
# transformer whose output at the last token goes through a linear layer. Given comparisons with chosen $y_c$ and
# rejected $y_r$, the likelihood of all outcomes is a product of such probabilities. Its negative logarithm, per
# comparison, is the loss
#
# $$L(\phi) = -\mathbb{E}\big[ \log \sigma\big( r_\phi(x, y_c) - r_\phi(x, y_r) \big) \big].$$
#
# With $\Delta = r_\phi(x, y_c) - r_\phi(x, y_r)$ the derivative is
# $\partial L / \partial \Delta = -(1 - \sigma(\Delta)) = -P(\text{the model is surprised})$. A comparison that the
# model already gets right with certainty teaches nothing. A wrong one pulls with at most 1.
#
# Three properties matter later.
#
# * **Only differences count.** Adding any function of the prompt, $r_\phi(x, y) + c(x)$, changes nothing. The zero
#   of a reward model is arbitrary; one fixes it afterwards, for instance so that demonstrations score 0.
# * **The scale is that of the noise.** If the judge is always consistent, the best $\Delta$ is infinite, and only
#   finite data and regularisation stop it.
# * **There is a best possible accuracy.** With the true $r$, the judge's own choice is predicted with probability
#   $\max(p, 1 - p)$, where $p = \sigma(\Delta)$. No model exceeds the mean of this number over the pairs.
#
# `functional.bradley_terry_loss` is $L$. By hand: equal scores give $\log 2 = 0.693$. If A beats B in 3 of 4 games,
# the likelihood is largest where $\sigma(\Delta) = 3/4$, at $\Delta = \log 3 = 1.0986$. The cell finds it by
# gradient descent:

# %%
print("equal scores:", round(float(F.bradley_terry_loss(torch.zeros(1), torch.zeros(1))), 4))
score = torch.zeros(2, requires_grad=True)  # A, B
chosen, rejected = torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, 1, 0])
for _ in range(200):
    loss = F.bradley_terry_loss(score[chosen], score[rejected])
    [gradient] = torch.autograd.grad(loss, score)
    score = (score - gradient).detach().requires_grad_()
print("A - B:", round(float(score[0] - score[1]), 4), " log 3:", 1.0986)

# %% [markdown]
# ## The run
#
# The comparisons are drawn from a known reward: 0 for the right sum, and -2 for each unit away from it. So "off by
# one" loses against the right sum in 7.4 of 8.4 comparisons, and two answers that are equally far off split evenly.
# The reward model sees 20,000 comparisons of answers from 0 to 18 once or twice; it starts from the SFT model,
# which knows something about sums. The best possible accuracy on the 1,000 held-out comparisons is known exactly,
# the optimum line.
#
# The broken run has 300 comparisons and passes over them again and again.

# %%
h.write_comparisons(folder / "test.jsonl", 1_000, seed=1)
h.write_comparisons(folder / "many.jsonl", 20_000, seed=2)
h.write_comparisons(folder / "few.jsonl", 300, seed=3)


def train(name, seed):
    """Trains a reward model on one file of comparisons; returns it and its curves."""
    model = RewardModel(model_name_or_path=str(folder / "sft"), learning_rate=1e-3, warmup_steps=10)
    data = PreferenceDataModule(path=str(folder / f"{name}.jsonl"), eval_path=str(folder / "test.jsonl"), seed=seed,
                                batch_size=64, n_eval=1_000, eval_steps=50)  # fmt: skip
    return model, h.fit(model, data, max_steps=400)


judge, first = train("many", 0)
runs = {"20,000 comparisons": h.fit_seeds(lambda seed: first if seed == 0 else train("many", seed)[1]),
        "broken: 300 comparisons": [train("few", 0)[1]]}  # fmt: skip
best = first["eval/bayes_accuracy"][-1][1]
h.plot(
    runs, "eval/accuracy", "optimizer steps", "accuracy on held-out pairs", best=best, best_name="best possible judge"
)
for name, several in runs.items():
    print(f"{name:24} final accuracy", h.final(several, "eval/accuracy"), "best possible", round(best, 3))
h.keep("Reward model", runs["20,000 comparisons"], "eval/accuracy")

# %% [markdown]
# **How to read it.** Accuracy starts at 1/2 and rises to the best possible. (The line is an expectation; on 1,000
# sampled outcomes the accuracy scatters around it by 0.7 %.) It saturates early, since a pair is predicted rightly
# as soon as the *sign* of the difference is right. The loss on held-out pairs also tells whether its *size* is
# right, that is, whether the probabilities are calibrated:

# %%
h.plot(runs, "eval/loss", "optimizer steps", "loss on held-out pairs (nats)")

# %% [markdown]
# **What failure looks like.** With 300 comparisons the training accuracy goes to 1 and the training loss to 0,
# while the held-out loss turns and rises: the model memorises comparisons and becomes certain. Its accuracy alone
# would not look alarming. A policy that maximises such a reward goes where it is certain and wrong; [the next
# page](11_rlhf.ipynb) shows it. The remedies are more comparisons, fewer passes over them (one is usual), and a
# larger pretrained model.
#
# The learned rewards against the true ones, each less its mean over the answers of the prompt, since only
# differences count:

# %%
answers = range(19)
learned = judge.score([p for p in h.PROMPTS for _ in answers], [str(y) for _ in h.PROMPTS for y in answers]).view(
    100, 19
)
true = torch.tensor([[h.true_reward(i, y) for y in answers] for i in range(100)])
x, y = (true - true.mean(1, keepdim=True)).flatten(), (learned - learned.mean(1, keepdim=True)).flatten()
_, axes = plt.subplots(figsize=(4.2, 3.6), layout="constrained")
axes.scatter(x, y, s=3, alpha=0.4)
axes.plot([-20, 12], [-20, 12], "k--", linewidth=1)
axes.set(xlabel="true reward", ylabel="learned reward")
plt.show()
print("correlation", round(float(torch.corrcoef(torch.stack([x, y]))[0, 1]), 3))

# %% [markdown]
# The learned scale flattens where the true difference is large: beyond 4 or so nearly every comparison has the same
# outcome, and the data cannot tell 6 from 12.
#
# ## Exercises
#
# **Exercise 10.1.** The chosen answer scores 2, the rejected one 1. Compute the probability of the choice, the
# loss, and the derivatives of the loss with respect to both scores.
#
# <details markdown="1"><summary>Answer</summary>
#
# $\sigma(1) = 0.7311$, $L = -\log 0.7311 = 0.3133$, and $\mp (1 - 0.7311) = \mp 0.2689$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# chosen, rejected = torch.tensor([2.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
# loss = F.bradley_terry_loss(chosen, rejected)
# loss.backward()
# assert abs(float(loss.detach()) - 0.3133) < 1e-4
# assert abs(float(chosen.grad) + 0.2689) < 1e-4 and abs(float(rejected.grad) - 0.2689) < 1e-4
# ```
#
# </details>
#
# **Exercise 10.2.** A beats B in 9 of 10 comparisons, B beats C in 8 of 10. With which probability does A beat C,
# by the Bradley–Terry model?
#
# <details markdown="1"><summary>Answer</summary>
#
# Odds multiply: $9 \cdot 4 = 36$, so $36 / 37 = 0.973$.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# winner = torch.tensor([0] * 9 + [1] + [1] * 8 + [2] * 2)
# loser = torch.tensor([1] * 9 + [0] + [2] * 8 + [1] * 2)
# score = torch.zeros(3, requires_grad=True)
# for _ in range(3000):
#     [gradient] = torch.autograd.grad(F.bradley_terry_loss(score[winner], score[loser]), score)
#     score = (score - gradient).detach().requires_grad_()
# assert abs(float(torch.sigmoid(score[0] - score[2])) - 36 / 37) < 1e-3
# ```
#
# </details>
#
# **Exercise 10.3.** The true differences of three pairs are 0, 1 and 2. Which accuracy can the best judge reach,
# and which mean loss?
#
# <details markdown="1"><summary>Answer</summary>
#
# $(0.5 + 0.7311 + 0.8808) / 3 = 0.7040$. The loss is the mean entropy of the three coins,
# $(0.6931 + 0.5822 + 0.3653) / 3 = 0.5469$.
#
# ```python
# import torch
#
# p = torch.sigmoid(torch.tensor([0.0, 1.0, 2.0]))
# entropy = -(p * p.log() + (1 - p) * (1 - p).log())
# assert abs(float(p.mean()) - 0.7040) < 1e-4 and abs(float(entropy.mean()) - 0.5469) < 1e-4
# ```
#
# </details>
#
# ## What is open
#
# The reward model can judge completions; it does not write any. [RLHF](11_rlhf.ipynb) trains the language model to
# write what it scores highly, and has to prevent that the policy exploits its errors.
#
# **Sources.** Bradley & Terry 1952; rewards from comparisons: Christiano et al. 2017,
# [arXiv:1706.03741](https://arxiv.org/abs/1706.03741); for language: Ziegler et al. 2019,
# [arXiv:1909.08593](https://arxiv.org/abs/1909.08593), Ouyang et al. 2022,
# [arXiv:2203.02155](https://arxiv.org/abs/2203.02155).
