"""Advantages of groups of completions: functions from rewards [P, G] to advantages [P, G], by name or import path.

One with a parameter ``rewards_per_func`` gets the rewards of each function, [P, G, F], and their ``weights`` instead.
Rewards are those of all ranks, one row per prompt. A NaN marks a completion without a score; its advantage is 0.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.common.loading import load_object, name_of
from rl_modules.common.named_code import is_path

if TYPE_CHECKING:
    from rl_modules.language.grpo import GRPO


GroupScores = Callable[..., Tensor]


def grpo(rewards: Tensor) -> Tensor:
    """Returns the group's standardised rewards (arXiv:2402.03300)."""
    return F.group_advantages(rewards.flatten(), rewards.shape[1], "group").view_as(rewards)


def dr_grpo(rewards: Tensor) -> Tensor:
    """Returns rewards minus the group's mean, in units of reward (arXiv:2503.20783)."""
    return F.group_advantages(rewards.flatten(), rewards.shape[1], "none").view_as(rewards)


def rloo(rewards: Tensor) -> Tensor:
    """Returns rewards minus the mean of the group's other rewards (arXiv:2402.14740)."""
    return F.rloo_advantages(rewards.flatten(), rewards.shape[1]).view_as(rewards)


def reinforce_plus_plus(rewards: Tensor) -> Tensor:
    """Returns rewards standardised over the batch, without a baseline per prompt (arXiv:2501.03262)."""
    return F.batch_advantages(rewards.flatten()).view_as(rewards)


def gdpo(rewards_per_func: Tensor, weights: list[float] | None) -> Tensor:
    """Returns each function's rewards standardised by itself, summed and standardised over the batch
    (arXiv:2601.05242).
    """
    prompts, num_generations, functions = rewards_per_func.shape
    flat = rewards_per_func.reshape(-1, functions)
    return F.gdpo_advantages(flat, num_generations, weights).view(prompts, num_generations)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (grpo, dr_grpo, rloo, reinforce_plus_plus, gdpo)
}
#: Functions whose baseline is that of the group, which a group of one completion lacks.
IN_GROUPS = (grpo, dr_grpo, rloo, gdpo)


def load_argument(module: "GRPO") -> GroupScores | None:
    """Returns the function that a module's argument ``advantages`` gives or names."""
    given = module.advantage_function
    return load_advantages(given) if isinstance(given, str) else given


def load_advantages(name: str) -> GroupScores:
    """Returns one of :data:`ADVANTAGES`, or imports ``package.module:function``."""
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    found: GroupScores = load_object(name, "advantages", ADVANTAGES, "a function from rewards [P, G] to advantages")
    return found


def reads_each_function(function: GroupScores) -> bool:
    """Whether a function from rewards to advantages takes those of each reward function, by a parameter's name."""
    with suppress(TypeError, ValueError):  # of a callable without a signature
        return "rewards_per_func" in signature(function).parameters
    return False


def scores_of_each(module: "GRPO", function: GroupScores, rollout: dict[str, Any]) -> Tensor:
    """Returns A of the completions of all ranks, [B], by a function of the rewards of each reward function."""
    rewards = module.gathered(rollout["rewards"])
    rewards = rewards.view(-1, rollout["num_generations"], rewards.shape[1])

    def by_each(_: Tensor) -> Tensor:
        return function(rewards_per_func=rewards, weights=module.reward_weights)

    return scores_by(by_each, rewards[..., 0], module.hparams["advantages"]).flatten()


def scores_by(function: GroupScores, rewards: Tensor, given: Any) -> Tensor:
    """Returns what a function, of which ``given`` is the argument, makes of rewards [P, G]."""
    try:
        scores = function(rewards)
    except Exception as error:
        raise UsageError(
            f"advantages={given!r} raised {type(error).__name__}: {error}; it must take rewards [P, G] as a tensor"
        ) from error
    if not isinstance(scores, Tensor) or scores.shape != rewards.shape:
        came = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise UsageError(
            f"advantages={given!r} returned {came} for rewards of shape {tuple(rewards.shape)}; it must "
            "return a tensor [P, G], one advantage per reward"
        )
    return scores


def turn_advantages(module: "GRPO", rollout: dict[str, Any]) -> Tensor:
    """Returns the advantages of dialogues turn by turn, [B, L].

    A_k = f(R_k), where f is the module's ``advantages`` and R_k = r_k + γ R_{k+1} what a dialogue's turns from k on
    earn, γ being ``turn_gamma``. A dialogue that has ended before turn k has R_k = 0; with γ = 1, A_0 is the dialogue's
    advantage.
    """
    if "turn" not in rollout:
        raise UsageError("reward_to_go=true needs dialogues; give the datamodule an environment, or set it to false")
    reward, turn, names = rollout["reward"], rollout["turn"], rollout["reward_names"]
    weight = module.reward_weights[names.index("environment")] if module.reward_weights else 1.0
    turns, own_reward = module.most_over_ranks(int(turn.max()) + 1), rollout["turn_reward"] * weight
    earned = torch.stack([torch.where(turn == k, own_reward, 0.0).sum(1) for k in range(turns)], 1)
    last = torch.where(rollout["written"], turn, 0).amax(1, keepdim=True)
    earned.scatter_add_(1, last, (reward - earned.sum(1)).unsqueeze(1))  # of reward functions
    earned.masked_fill_(reward.isnan().unsqueeze(1), torch.nan)
    columns: list[Tensor] = []
    left = torch.zeros_like(reward)
    for k in reversed(range(turns)):
        left = earned[:, k] + module.turn_gamma * left
        everyone = module.gathered(left)
        own = slice(module.global_rank * len(left), (module.global_rank + 1) * len(left))
        columns.insert(0, require_advantages(module.advantages(everyone, rollout["num_generations"]), everyone, 1)[own])
    return torch.stack(columns, 1).gather(1, turn)


def require_advantages(advantage: Tensor, reward: Tensor, width: int) -> Tensor:
    """Checks the advantages of a generation, which may be a subclass's own; all ranks see the same ones."""
    enough = advantage.ndim == 1 or (advantage.ndim == 2 and advantage.shape[1] >= width)
    if not enough or len(advantage) != len(reward):
        raise UsageError(
            f"advantages have shape {tuple(advantage.shape)} for {len(reward)} completions of up to "
            f"{width} tokens; return one number per completion [B], or per token [B, L]"
        )
    unscored = reward.isnan() if advantage.ndim == 1 else reward.isnan().unsqueeze(1)
    advantage = torch.where(unscored, 0.0, advantage)
    if not bool(advantage.isfinite().all()):
        row = int((~advantage.isfinite()).view(len(reward), -1).any(1).nonzero()[0])
        raise UsageError(
            f"advantages of completion {row}, whose reward is {float(reward[row]):g}, are not finite; a "
            "reward of NaN is none, which nanmean leaves out where mean does not"
        )
    return advantage


def check_scale(name: str, value: Any) -> str:
    """Returns the word for what rewards are scaled by; true and false are words of TRL."""
    word = {True: "group", False: "none"}[value] if isinstance(value, bool) else value
    if word not in ("group", "batch", "none"):
        raise UsageError(f"{name}={value!r} must be one of group, batch, none")
    return str(word)


def path_of(given: Any) -> str | None:
    """Converts a function to its import path, which a checkpoint may hold; names and paths are returned unchanged."""
    if given is None or isinstance(given, str):
        return given
    path = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', '')}"
    if not callable(given) or isinstance(given, type) or "<" in path or path.endswith(":"):
        raise UsageError(
            f"advantages={given!r} has no import path, by which a checkpoint could find it again; give a "
            "function at the first level of a module, or override score_group in a subclass"
        )
    return path


def code_of_advantages(given: Any) -> Iterator[str]:
    """Yields the argument ``advantages`` if it is a function of other code than this project's."""
    path = name_of(given) if callable(given) else given
    if isinstance(path, str) and is_path(path) and path.replace(":", ".") not in map(name_of, ADVANTAGES.values()):
        yield path
