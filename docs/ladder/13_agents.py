# %% [markdown]
# # 13. Agents
#
# A completion of [GRPO](12_grpo.ipynb) is one long action: the policy writes, and the reward ends the episode. A
# model that calls a tool, plays a game or works in a shell acts several times, and reads an answer in between. This
# page returns to the maze of the first pages, as text, and asks the language model to walk in it.
#
# **Before:** [12b. R1](12b_r1.ipynb) · **Next:** [14. Distillation](14_distillation.ipynb) · [glossary](glossary.md)
#
# ## A dialogue is an episode
#
# The **state** is the dialogue so far, as tokens. In **turn** $k$ the policy writes a message $a_k$, a sequence of
# tokens that ends with the end token; the environment answers with a message $o_{k+1}$ and a reward $r_k$. The
# probability of a message is the product over its tokens,
#
# $$\log \pi_\theta(a_k \mid s_k) = \sum_{t} \log \pi_\theta(a_{k,t} \mid s_k, a_{k,<t}), \qquad s_{k+1} = (s_k, a_k,
# o_{k+1}),$$
#
# and the return of the dialogue is $R = \sum_k r_k$. The policy gradient of page 6 needs nothing else:
#
# $$\nabla J = \mathbb{E} \Big[ \sum_k \sum_t \nabla \log \pi_\theta(a_{k,t} \mid s_k, a_{k,<t})\, \hat A_k \Big].$$
#
# The tokens of $o_{k+1}$ do not occur in it. They are part of the state, drawn by the environment, whose
# probabilities do not depend on $\theta$. In the tensor of a dialogue they stand between the tokens that the policy
# wrote, and a **mask** leaves them out of the loss, of the lengths, of the KL and of the entropy.
#
# Two choices for $\hat A_k$. GRPO's advantage of the whole dialogue, the same in every turn; or the reward to go,
# $\sum_{j \ge k} r_j$, compared with that of the group (`reward_to_go=True`), which does not credit a turn with
# rewards that came before it (page 6).
#
# ## Tokens in, tokens out
#
# The next turn's prompt must be the tokens that the policy wrote, not their text. A tokenizer splits a text in one
# way, and a policy can write it in another. Text that goes through the tokenizer again can become other tokens,
# with other probabilities, and the ratio of page 8 then compares two different actions. A tokenizer that knows the
# token `ab` shows it:

# %%
import json
import tempfile
from pathlib import Path

import helpers as h
import lightning as L
from tokenizers import Tokenizer, models

from datamodules import InstructionDataModule, PromptDataModule
from datamodules.language.calls import calls_of
from datamodules.language.message_reader import message_of
from datamodules.language.tools import Tools
from datamodules.language.worlds import TextMaze
from recipes.agent import write_records
from recipes.one_world import dialogue_return
from rl_modules import GRPO, SFT

pairs = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
written = [0, 1]  # the policy chose "a" and then "b"
print("written", written, "read again", pairs.encode(pairs.decode(written).replace(" ", "")).ids)

# %% [markdown]
# The library therefore continues a dialogue with the tokens themselves, and adds only those that the chat template
# writes between two turns.
#
# ## The environment
#
# An environment has two methods. `reset` returns the messages that open a dialogue, `step` answers what the policy
# wrote. `TextMaze` says the cell, as `row,column`, and takes a direction; any other word costs as much as the trap.
# By value iteration (page 1) the best return is 10. A walk by hand:

# %%
maze = TextMaze(brief=True)
print("reset", maze.reset({}))
for word in ("r", "r", "d"):
    print(word, maze.step({"role": "assistant", "content": word}))

# %% [markdown]
# ## The run
#
# The model starts with random weights, so it writes noise, every dialogue costs 10, and no group has a spread. SFT
# on *random walks* teaches the form of a dialogue and nothing about the goal. Of 2,000 walks it sees those that did not
# fall into the trap. Its loss counts the maze's answers too (`completion_only_loss=False`): a model that predicts the
# next cell has a representation of the present one, on which its policy can depend.
#
# GRPO follows, with 64 dialogues of the one prompt as its group, the reward to go as return of a turn, and advantages
# that are not divided by the group's deviation (`scale_rewards="none"`). Its loss has the KL to the random walk as
# reference, by $\rho \cdot$ k3 of page 11 (the default), weighed by $\beta = 0.1$ in units of reward per nat. As on
# page 11, what maximises $\sum_a \pi(a) Q(s, a) - \beta\, \mathrm{KL}(\pi \,\|\, \pi_{\text{ref}})$ in a state is
#
# $$\pi(a \mid s) \propto \pi_{\text{ref}}(a \mid s)\, e^{Q(s, a) / \beta} ,$$
#
# so that moves of equal value keep the reference's probabilities, and a move that costs 10 has next to none. The
# exact return of the policy that samples its words follows from the probabilities of all sequences of moves
# (`dialogue_return`). The broken run changes one thing: its SFT sees all walks, of which more than half end in the
# trap.

# %%
SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4}  # fmt: skip
folder = Path(tempfile.mkdtemp())


def start(seed, least):
    """Trains a model on the random walks that return at least so much; returns its folder."""
    records = folder / f"{seed}{least}"
    write_records("maze", 64 if h.SHORT else 2000, seed, records)
    walks = [json.loads(line) for line in (records / "dialogues.jsonl").read_text("utf-8").splitlines()]
    shown = [json.dumps(walk) for walk in walks if walk["reward"] >= least]
    (records / "shown.jsonl").write_text("\n".join(shown), "utf-8")
    print(f"seed {seed}: SFT on {len(shown)} of {len(walks)} walks")
    L.seed_everything(seed, verbose=False)
    model = SFT(model_config=SMALL, tokenizer_name_or_path=str(records / "tokenizer"), learning_rate=3e-3,
                lr_scheduler_type="constant_with_warmup", warmup_steps=10)  # fmt: skip
    data = InstructionDataModule(path=str(records / "shown.jsonl"), batch_size=64, n_eval=0, seed=seed,
                                 completion_only_loss=False)  # fmt: skip
    h.fit(model, data, max_steps=300)
    model.export(records / "start")
    return records


def train(seed, least=0):
    """Trains from random weights: SFT on random walks, then GRPO in the maze; returns the curves of GRPO."""
    records = start(seed, least)
    L.seed_everything(seed, verbose=False)
    policy = GRPO(model_name_or_path=str(records / "start"), loss_type="dapo", reward_to_go=True, scale_rewards="none",
                  beta=0.1, learning_rate=5e-4, lr_scheduler_type="linear", warmup_steps=5,
                  max_completion_length=64, logging_steps=2)  # fmt: skip
    data = PromptDataModule(
        path=str(records / "train.jsonl"), environment=TextMaze, environment_kwargs={"brief": True, "max_steps": 8},
        max_turns=8, max_turn_tokens=3, num_generations=64, batch_size=64, n_eval=0, seed=seed,
    )  # fmt: skip
    curves = h.fit(policy, data, max_steps=120)
    if not h.SHORT:
        print(f"seed {seed}: exact return {dialogue_return(policy.eval(), None):.3f}", flush=True)
    return curves


runs = {"GRPO in turns": h.fit_seeds(train), "broken: SFT on all walks": train(0, least=-10)}
h.plot(runs, "train/reward", "optimizer steps", "mean return of a dialogue, sampled", best=10.0)
h.keep("GRPO in turns", runs["GRPO in turns"], "train/reward")

# %% [markdown]
# **How to read it.** All three seeds end solved, at exact returns of 9.747, 9.779 and 9.783 of 10; what is missing is
# the KL's share and the chance of a wrong word. At the start some dialogues of the group reach the goal by chance. They
# are far above the mean and are reinforced, and after twenty steps nearly all do. A table explores with
# $\varepsilon$-greedy actions (page 2); a policy that samples its own words explores only as long as it is unsure, and
# the KL keeps it unsure between moves of equal value. The shortest way to the goal has three turns:

# %%
h.plot(runs, "train/environment/turns", "optimizer steps", "turns of a dialogue")

# %% [markdown]
# **What failure looks like.** From a start that also knows the walks into the trap, most dialogues end there, and every
# other end is better. What is learned first is *never down*, in all cells: dialogues become longer, up to seven or
# eight turns, and the return rests near 0. As long as a few of a group still reach the goal there is a way out, and
# this run found it after some forty steps. Once none does, the advantages are nothing but chance, and there is none:
# with the settings of `agent/maze.yaml`, which start from all walks, seed 0 stayed at 0 ([what else was
# tried](../language/agents.md)). `train/frac_reward_zero_std` tells how many groups have no spread at all, as on page
# 12. The cure is before the reinforcement learning, in a start that has less to unlearn.
#
# ## Tools
#
# A tool is an environment's function that the policy calls. Its name, types and docstring become a JSON schema in
# the prompt; the policy writes a call; the answer comes back as a message of role `tool`. A wrong call is answered
# by what is wrong with it, because a policy that has never seen an error cannot learn to recover from one:

# %%
tools = Tools(["datamodules.language.calculator:calculator"])
for text in (
    '<tool_call>{"name": "calculator", "arguments": {"expression": "437*286"}}</tool_call>',
    '<tool_call>{"name": "calculater", "arguments": {"expression": "437*286"}}</tool_call>',
    '<tool_call>{"name": "calculator", "arguments": {"expression": 437}}</tool_call>',
):
    [call] = calls_of(message_of(text))
    print(tools.run(call))

# %% [markdown]
# `python -m recipes.agent --world arithmetic` trains a model of this size to multiply numbers of three digits with
# it.
#
# ## Where it differs from the table
#
# Q-learning needs the state to be Markov, and learns a value for each cell. The language model's state is the whole
# walk, so that the same cell is a different state after every history, and its policy may depend on the history. It
# pays for that with many more steps: the table is right after some hundred. `python -m
# recipes.one_world` draws value iteration, Q-learning, DQN, PPO, recurrent PPO and the language model over one
# axis, the exact regret. What the model gets for it is the interface: the same class walks in any world that
# answers in text.
#
# ## Exercises
#
# **Exercise 13.1.** A dialogue of two turns has 3 and 2 written tokens, and 4 tokens of the environment between
# them. Under `dapo`, with all ratios 1 and the advantage 1, what is the loss, and what would it be if the mask
# counted the environment's tokens too? What is the gradient of one written token in both cases?
#
# <details markdown="1"><summary>Answer</summary>
#
# The loss is $-5/5 = -1$ and $-9/9 = -1$, the same. The gradients differ: $-1/5$ and $-1/9$; and the second pushes up
# four tokens that the policy did not choose.
#
# ```python
# import torch
# from rl_modules import functional as F
#
# written = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 1, 1]]).bool()
# for mask, size in ((written, 5), (torch.ones_like(written), 9)):
#     log_prob = torch.zeros(1, 9, requires_grad=True)
#     loss = F.grpo_loss(log_prob, torch.zeros(1, 9), torch.ones(1), mask, epsilon=0.2, loss_type="dapo")
#     loss.backward()
#     assert abs(float(loss) + 1) < 1e-6
#     assert abs(float(log_prob.grad[0, 0]) + 1 / size) < 1e-6
#     assert (log_prob.grad[0, 3] == 0) == (size == 5)
# ```
#
# </details>
#
# **Exercise 13.2.** A number from 1 to 64 is to be guessed; each wrong guess is answered by *higher* or *lower*.
# How many guesses does the best player need on average, and how many does a player need who guesses at random among
# the numbers still possible?
#
# <details markdown="1"><summary>Answer</summary>
#
# The $k$-th guess can decide $2^{k-1}$ numbers: $\sum_{k=1}^{6} k\, 2^{k-1} = 321$ for the first 63, and 7 for the
# last, so $328 / 64 = 5.125$. The random player needs $2 (1 + \frac1n) H_n - 3 = 6.64$ for $n = 64$, with
# $H_n = 1 + \frac12 + \dots + \frac1n$.
#
# ```python
# from datamodules.language.worlds import Guess, demonstrations
#
# n = 64
# assert Guess.optimum(n) == 328 / 64 == 5.125
# random = 2 * (1 + 1 / n) * sum(1 / i for i in range(1, n + 1)) - 3
# assert abs(random - 6.64) < 0.01
# played = [-d["reward"] for d in demonstrations(Guess(max_guesses=n, mistakes=1.0), Guess.records("train", 3200))]
# assert abs(sum(played) / len(played) - random) < 0.15
# ```
#
# </details>
#
# **Exercise 13.3.** A random walk in the maze of at most 8 moves ends in the trap, at the goal, or nowhere. Compute
# its expected return, and say why a policy that never moves is better.
#
# <details markdown="1"><summary>Answer</summary>
#
# Dynamic programming over 8 steps: $-4.73$, because two cells border on the trap and only one on the goal. A policy
# that bumps into a wall 8 times earns 0. GRPO makes likelier what is better than the group's mean, so it first
# learns to avoid the trap.
#
# ```python
# import gymnasium as gym
# import torch
#
# import datamodules  # registers Maze-v0
# from datamodules.envs.model import transition_model
#
# model = transition_model(gym.make("Maze-v0", max_episode_steps=8))
# walk = model.expected_return(torch.full((6, 4), 0.25))
# assert abs(walk + 4.73) < 0.01
# left = torch.zeros(6, 4)
# left[:, 0] = 1
# assert model.expected_return(left) == 0
# assert model.optimal_return() == 10
# ```
#
# </details>
#
# ## Where to go from here
#
# The return is one number for a whole dialogue, and where no dialogue reaches the goal it tells nothing.
# [The next page](14_distillation.ipynb) asks a teacher. [An environment of your
# own](../how_to/dialogue_environment.md), [tools](../how_to/tools.md), [environments of TRL, verifiers and
# others](../how_to/other_environments.md).
#
# **Sources.** Turns as a decision process: Abdulhai et al. 2023, [arXiv:2311.18232](https://arxiv.org/abs/2311.18232);
# calls of tools: Schick et al. 2023, [arXiv:2302.04761](https://arxiv.org/abs/2302.04761); GRPO: Shao et al. 2024,
# [arXiv:2402.03300](https://arxiv.org/abs/2402.03300).
