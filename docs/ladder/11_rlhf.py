# %% [markdown]
# # 11. RLHF
#
# [A reward model](10_reward_model.ipynb) scores completions. This page trains a language model to write what it
# scores highly, by PPO on tokens: reinforcement learning from human feedback. A penalty keeps the policy near the
# text that the reward model knows.
#
# **Before:** [10b. Bits and divergences](10b_information.ipynb) · **Next:** [11b. DPO](11b_dpo.ipynb) ·
# [glossary](glossary.md)
#
# ## The objective and its exact solution
#
# A reward model is reliable on texts like those of its comparisons. Maximising it alone leads away from them, to
# texts whose score is an error. RLHF therefore maximises the score less the distance to a fixed **reference
# policy** $\pi_{\text{ref}}$, usually the SFT model from which training starts:
#
# $$J(\pi) = \mathbb{E}_x\Big[\, \mathbb{E}_{y \sim \pi(\cdot \mid x)}\big[ r_\phi(x, y) \big] - \beta
# \operatorname{KL}\big(\pi(\cdot \mid x) \,\Vert\, \pi_{\text{ref}}(\cdot \mid x)\big) \Big].$$
#
# The best policy can be written down. Let $Z(x) = \sum_y \pi_{\text{ref}}(y \mid x)\, e^{r_\phi(x, y) / \beta}$ and
#
# $$\pi^*(y \mid x) = \frac{1}{Z(x)}\, \pi_{\text{ref}}(y \mid x)\, e^{r_\phi(x, y) / \beta}.$$
#
# Solve this for the reward, $r_\phi = \beta \log (\pi^* / \pi_{\text{ref}}) + \beta \log Z$, and insert it for one
# prompt:
#
# $$\mathbb{E}_{y \sim \pi}\Big[ r_\phi - \beta \log \frac{\pi}{\pi_{\text{ref}}} \Big] = \mathbb{E}_{y \sim
# \pi}\Big[ \beta \log Z - \beta \log \frac{\pi}{\pi^*} \Big] = \beta \log Z(x) - \beta
# \operatorname{KL}\big(\pi(\cdot \mid x) \,\Vert\, \pi^*(\cdot \mid x)\big).$$
#
# The last term is 0 for $\pi = \pi^*$ and negative otherwise. So $\pi^*$ is the only optimum, and $J^* =
# \mathbb{E}_x[\beta \log Z(x)]$. For real texts $Z$ cannot be summed. For sums of two digits it can, and is the line
# in the plot below. ([DPO](11b_dpo.ipynb) solves for the reward in the same way and puts it into the Bradley–Terry
# loss, which then trains the policy without a reward model.)
#
# ## The penalty as a reward per token
#
# The KL of two distributions over texts is a mean of a sum over tokens, since the probability of a text is a
# product:
#
# $$\operatorname{KL}(\pi \,\Vert\, \pi_{\text{ref}}) = \mathbb{E}_{y \sim \pi}\Big[ \sum_t \log \frac{\pi(y_t \mid
# x, y_{<t})}{\pi_{\text{ref}}(y_t \mid x, y_{<t})} \Big].$$
#
# So the objective is an expected sum of rewards per token, with the score on the last:
#
# $$r_t = -\beta \log \frac{\pi_{\text{old}}(y_t \mid x, y_{<t})}{\pi_{\text{ref}}(y_t \mid x, y_{<t})} + [\,t =
# n\,]\; r_\phi(x, y).$$
#
# $[\,t = n\,]$ is 1 for the last token and 0 otherwise. No gradient flows through these rewards: they are numbers,
# computed under the policy that sampled. `functional.rlhf_rewards` computes them. By hand: three tokens,
# log-probabilities of -1 under the policy and -1.5 under the reference, $\beta = 0.1$ and a score of 2 give
# $(-0.05, -0.05, 1.95)$.

# %%
import tempfile
from pathlib import Path

import helpers as h
import torch

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules import RLHFPPO, SFT, RewardModel
from rl_modules import functional as F

mask = torch.tensor([[True, True, True]])
print(F.rlhf_rewards(torch.tensor([2.0]), torch.full((1, 3), -1.0), torch.full((1, 3), -1.5), mask, beta=0.1))

# %% [markdown]
# ## Three estimates of the KL
#
# With $z = \log \pi_{\text{ref}}(y) - \log \pi(y)$ for a sample $y \sim \pi$ (Schulman 2020):
#
# | name | estimate | mean over samples | in a single sample |
# |---|---|---|---|
# | k1 | $-z$ | the KL | may be negative, noisy |
# | k2 | $z^2 / 2$ | close to it for near policies | never negative |
# | k3 | $e^z - 1 - z$ | the KL | never negative |
#
# k3 is unbiased because $\mathbb{E}_{y \sim \pi}[e^z] = \sum_y \pi \cdot \pi_{\text{ref}} / \pi = 1$, so that
# $e^z - 1$ adds 0 on average, and it is never negative because $e^z \ge 1 + z$. As a *number*, such as a reward or
# a curve, k1 is right on average. As a *loss* that is differentiated it is not: its derivative is
# $\nabla \log \pi$, whose mean is 0 (page 6). Differentiated on samples of $\pi$ itself, k2 gives the gradient of
# $\operatorname{KL}(\pi \,\Vert\, \pi_{\text{ref}})$, and k3 that of the other direction,
# $\operatorname{KL}(\pi_{\text{ref}} \,\Vert\, \pi)$. k3 times the ratio $\rho$ of page 9, which is 1 there but has
# the gradient $\nabla \log \pi$, gives the gradient of $\operatorname{KL}(\pi \,\Vert\, \pi_{\text{ref}})$ again.
# RLHF puts k1 into the reward. GRPO puts k3 into the loss: the papers plain k3, `GRPO` by default $\rho \cdot$ k3
# (`use_bias_correction_kl`). The cell checks all of this by enumeration, for three texts:

# %%
theta = torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
log_pi, log_ref = theta.log_softmax(0), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
pi = log_pi.exp().detach()
forward, backward = (log_pi.exp() * (log_pi - log_ref)).sum(), (log_ref.exp() * (log_ref - log_pi)).sum()


def gradient(loss):
    """The gradient with respect to θ, rounded."""
    return [round(g, 3) for g in torch.autograd.grad(loss, theta, retain_graph=True)[0].tolist()]


print(
    f"KL(π‖ref)  {float(forward.detach()):.3f}  gradient {gradient(forward)}   KL(ref‖π) gradient {gradient(backward)}"
)
for name in ("k1", "k2", "k3"):
    mean = (pi * F.kl_estimate(log_pi, log_ref, name)).sum()  # the samples do not depend on θ
    print(f"{name}         {float(mean.detach()):.3f}  gradient {gradient(mean)}")
rho = (log_pi - log_pi.detach()).exp()
mean = (pi * rho * F.kl_estimate(log_pi, log_ref, "k3")).sum()
print(f"ρ·k3       {float(mean.detach()):.3f}  gradient {gradient(mean)}")

# %% [markdown]
# ## Four models
#
# | model | starts as | trained | used for |
# |---|---|---|---|
# | policy $\pi_\theta$ | SFT model | yes | samples completions |
# | reference $\pi_{\text{ref}}$ | SFT model | no | the penalty |
# | reward model $r_\phi$ | page 10 | no | the score |
# | value model $V$ | a copy of the reward model | yes | baseline of each token, GAE with $\gamma = 1$ |
#
# A round: sample completions for a batch of prompts; score them; compute rewards per token, advantages and returns;
# take PPO steps on all tokens. Log-probabilities are compared as token ids, never as text that is tokenised again.
#
# ## The run
#
# First the two stages of the pages before, as short as possible: SFT until most of the answers are right, and
# two reward models, one from 20,000 comparisons and one from 300.

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
    h.fit(model, PreferenceDataModule(path=str(folder / f"{name}.jsonl"), batch_size=64, eval_steps=0), max_steps=600)
    model.export(folder / name)
    texts = [(prompt, answer) for prompt in h.PROMPTS for answer in h.ANSWERS]
    return model.score(*zip(*texts, strict=True)).view(100, 110)


scores = {"judge": train_judge("judge", 20_000), "poor judge": train_judge("poor judge", 300)}
reference = h.log_probs(sft)
compared = [h.ANSWERS.index(str(answer)) for answer in range(19)]  # comparisons show answers from 0 to 18
for name, score in scores.items():
    of_19, of_110 = (score[:, compared].argmax(1) == torch.tensor(h.SUMS)).sum(), (score.argmax(1) == h.RIGHT).sum()
    print(f"{name}: the right sum scores highest among the 19 compared answers for {of_19} of 100 prompts,")
    print(f"    among all 110 answers for {of_110}")

# %% [markdown]
# PPO then runs with the good judge and $\beta = 0.5$. Two broken runs change one thing each: the judge, or $\beta$.
# The curves of the first show $J$ as estimated in each round, mean score less $\beta$ times mean KL, and its exact
# optimum from the enumeration of all answers. A completion has at most three tokens, two digits and EOS, and one
# without EOS loses 5, so that the 110 answers of one or two digits are all that can be good.


# %%
def measure(log_pi):
    """The exact probability of the right sum, and the KL to the reference."""
    return {"right": float(log_pi[torch.arange(100), h.RIGHT].exp().mean()),
            "exact_kl": float((log_pi.exp() * (log_pi - reference)).sum(1).mean())}  # fmt: skip


def train(judge, beta, seed):
    """Trains the policy with PPO; returns it and its curves."""
    policy = RLHFPPO(
        model_name_or_path=str(folder / "sft"), reward_model_name_or_path=str(folder / judge), beta=beta,
        learning_rate=1e-3, max_completion_length=3, missing_eos_penalty=5.0, logging_steps=10, cliprange_value=None,
    )  # fmt: skip
    data = PromptDataModule(**sums, seed=seed, batch_size=128, num_generations=1, reward_funcs=["accuracy"])
    curves = h.fit(policy, data, max_steps=600, callbacks=[h.Enumerated(measure, every=30)])
    kl = dict(curves.get("train/objective/kl", []))
    curves["objective"] = [(t, score - beta * kl.get(t, 0.0)) for t, score in curves["train/objective/scores"]]
    return policy, curves


beta = 0.5
optimum = (reference + scores["judge"] / beta).log_softmax(1)  # log π*
best = float(beta * (reference + scores["judge"] / beta).logsumexp(1).mean())  # J*
policy, first = train("judge", beta, 0)
runs = h.fit_seeds(lambda seed: first if seed == 0 else train("judge", beta, seed)[1], seeds=(0, 1))
h.plot({"RLHF": runs}, "objective", "optimizer steps", "score - β KL", best=best)


def objective(log_pi):
    """J of a policy given by its log-probabilities [100, 110]."""
    return float((log_pi.exp() * (scores["judge"] - beta * (log_pi - reference))).sum(1).mean())


for name, log_pi in (("SFT", reference), ("RLHF", h.log_probs(policy)), ("π*", optimum)):
    print(f"{name:5} J {objective(log_pi):.3f}   probability of the right sum {measure(log_pi)['right']:.3f}")
h.keep("RLHF", runs, "train/rewards/accuracy/mean")

# %% [markdown]
# **How to read it.** Within ten steps $J$ falls below the SFT model's: the value model starts as a copy of the reward
# model, which has learned to judge whole completions only. Then $J$ rises to the line. The table has the exact value
# of one run: PPO covers nearly all of the way from the SFT model to $J^*$. The points of the plot are estimates from
# samples.
#
# The probability of the right sum, which training never sees, rises along, but not to 1. The best policy under this
# objective is not always right, because it inherits the judge's errors: even among the answers that comparisons show,
# a wrong sum scores highest for some prompts. Where no comparison looked, the errors are larger: of all 110 answers, a
# wrong one, such as one with a leading 0, scores highest for most prompts. $\pi^*$ hardly ever writes those, because
# the reference hardly ever does, and $\pi^*$ is the reference times $e^{r_\phi / \beta} / Z$.

# %%
all_runs = {
    "judge, β = 0.5": runs,
    "broken: poor judge": [train("poor judge", beta, 0)[1]],
    "broken: β = 0": [train("judge", 0.0, 0)[1]],
}
h.plot(all_runs, "train/objective/scores", "optimizer steps", "mean score, each by its own judge")
h.plot(all_runs, "right", "optimizer steps", "probability of the right sum",
       best=measure(optimum)["right"], best_name="π*")  # fmt: skip
for name, several in all_runs.items():
    print(f"{name:19} right sum {h.final(several, 'right')}  KL to the reference {h.final(several, 'exact_kl')} nats")

# %% [markdown]
# **What failure looks like.** In both broken runs the score rises as nicely as in the good one, and the policy ends up
# right less often than the SFT model, whose 0.824 is the start of all curves. Each change is a cause of its own. The
# poor judge overrates some wrong answers by more than the penalty costs. Without the penalty the good judge gives no
# more score than with it, but the policy has gone nine times as far, to texts of which the judge knows less. This is
# **over-optimisation** of the reward, and no curve of the score shows it; [page 11c](11c_overoptimisation.ipynb)
# measures it. Watch a measure that is not trained on, or the KL: a large KL at a rising score is the warning. The
# remedies are a larger $\beta$, a better judge, and new comparisons of what the policy now writes.
#
# $\beta$ itself can be adapted. Ziegler et al. raise or lower it in proportion to the distance of the KL from a
# target, by at most 2 % per round: `functional.proportional_kl_coefficient`.
#
# ## Exercises
#
# **Exercise 11.1.** Two completions with $\pi_{\text{ref}} = (0.5, 0.5)$, scores $(1, 0)$, $\beta = 1$. Compute
# $\pi^*$ and $J^*$.
#
# <details markdown="1"><summary>Answer</summary>
#
# $\pi^* = (e, 1) / (e + 1) = (0.731, 0.269)$. $Z = (e + 1)/2$ and $J^* = \log Z = 0.620$, more than the reference's
# 0.5.
#
# ```python
# import torch
#
# ref, score = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
# best = (ref.log() + score).softmax(0)
# assert torch.allclose(best, torch.tensor([0.7311, 0.2689]), atol=1e-4)
# assert abs(float((best * (score - (best / ref).log())).sum()) - 0.620) < 1e-3
# assert abs(float((ref * score.exp()).sum().log()) - 0.620) < 1e-3
# ```
#
# </details>
#
# **Exercise 11.2.** A completion of two tokens has log-probabilities $(-1, -2)$ under the policy and $(-1, -1)$
# under the reference, and the score 3. Compute the rewards for $\beta = 0.5$, and the return of the first token.
#
# <details markdown="1"><summary>Answer</summary>
#
# The differences are $0$ and $-1$, so the rewards are $0$ and $0.5 + 3 = 3.5$: the policy is *rewarded* for a token
# that the reference likes more. The return of the first token is 3.5.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# policy, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]])
# reward = F.rlhf_rewards(torch.tensor([3.0]), policy, reference, torch.tensor([[True, True]]), beta=0.5)
# assert reward.tolist() == [[0.0, 3.5]] and float(reward.sum()) == 3.5
# ```
#
# </details>
#
# **Exercise 11.3.** Compute k1, k2 and k3 for a sample with $\pi = 0.4$ and $\pi_{\text{ref}} = 0.2$, and the mean
# of k3 over samples if the other completion has $0.6$ and $0.8$.
#
# <details markdown="1"><summary>Answer</summary>
#
# $z = \log 0.5 = -0.693$: k1 = 0.693, k2 = 0.240, k3 = $0.5 - 1 + 0.693 = 0.193$. For the other, $z = 0.2877$ and
# k3 = 0.0457. The mean is $0.4 \cdot 0.1931 + 0.6 \cdot 0.0457 = 0.1046$, the exact KL.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# pi, ref = torch.tensor([0.4, 0.6]), torch.tensor([0.2, 0.8])
# k1, k2, k3 = (F.kl_estimate(pi.log(), ref.log(), name) for name in ("k1", "k2", "k3"))
# assert [round(float(k[0]), 3) for k in (k1, k2, k3)] == [0.693, 0.24, 0.193]
# assert abs(float((pi * k3).sum()) - 0.1046) < 1e-4 and abs(float((pi * (pi / ref).log()).sum()) - 0.1046) < 1e-4
# ```
#
# </details>
#
# ## What is open
#
# Four models are in memory, two of them trained, and a judge that can be fooled gives the reward. For sums, proofs
# and programs there is a check that cannot be fooled. [GRPO](12_grpo.ipynb) uses it, and drops the value model.
#
# **Sources.** Ziegler et al. 2019, [arXiv:1909.08593](https://arxiv.org/abs/1909.08593); Ouyang et al. 2022,
# [arXiv:2203.02155](https://arxiv.org/abs/2203.02155); details: Huang et al. 2024,
# [arXiv:2403.17031](https://arxiv.org/abs/2403.17031); KL estimators: Schulman 2020,
# <http://joschu.net/blog/kl-approx.html>.
