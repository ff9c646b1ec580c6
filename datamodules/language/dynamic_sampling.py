"""Dynamic sampling: new prompts replace groups of completions whose rewards are all equal (DAPO, arXiv:2503.14476)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from datamodules.language.rows import RowLengths, cut
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import on

if TYPE_CHECKING:
    from datamodules.language.prompt import PromptDataModule


def replenished(data: "PromptDataModule", rollout: dict[str, Any], n_prompts: int) -> dict[str, Any]:
    """Returns as many groups, those with a signal first, and the share of groups that lack one as ``missing``."""
    if rollout["reward"].ndim > 1:
        raise UsageError(
            f"dynamic_sampling={data.dynamic_sampling} compares one reward per completion, and a reward "
            "function returned one per token; set it to 0"
        )
    lacking = n_prompts - int(has_signal(rollout["reward"], data.num_generations).sum())
    for _ in range(data.dynamic_sampling):
        # Every rank draws equally many, because otherwise the ranks' collectives would not match.
        wanted = int(data._largest_over_ranks(lacking))
        if wanted == 0:
            break
        rollout = joined(rollout, data._round(wanted))
        informative = has_signal(rollout["reward"], data.num_generations).tolist()
        # The first groups with a signal, filled up with the first of those without.
        groups = sorted(range(len(informative)), key=lambda group: not informative[group])[:n_prompts]
        rollout = groups_of(rollout, groups, data.num_generations)
        lacking = n_prompts - sum(informative[group] for group in groups)
    if lacking and not data._warned_of_lacking:
        data._warned_of_lacking = True
        print(
            f"dynamic_sampling: {lacking} of {n_prompts} groups are without signal after {data.dynamic_sampling} "
            "rounds of replacements; from here on see the metric train/dynamic_sampling/missing"
        )
    return {**rollout, "missing": lacking / n_prompts}


def has_signal(reward: Tensor, num_generations: int) -> Tensor:
    """Whether the scored rewards of each group differ, [P] bool; groups of equal rewards give no gradient."""
    groups = reward.view(-1, num_generations)
    highest = groups.nan_to_num(nan=-torch.inf).amax(-1)
    lowest = groups.nan_to_num(nan=torch.inf).amin(-1)
    return highest > lowest


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two rollouts as one; the narrower one's tokens and per-token fields are padded with zeros."""
    result: dict[str, Any] = {}
    for name, left in one.items():
        right = other[name]
        if isinstance(left, Tensor):
            if left.ndim > 1 and left.shape[1] != right.shape[1]:
                width = max(left.shape[1], right.shape[1])
                further = (0, 0) * (left.ndim - 2)  # a field may have several numbers per token
                left, right = (torch.nn.functional.pad(x, (*further, 0, width - x.shape[1])) for x in (left, right))
            result[name] = torch.cat([left, right])
        elif isinstance(left, list) and name != "reward_names":
            result[name] = left + right
        else:
            result[name] = left
    return result


def groups_of(rollout: dict[str, Any], groups: Sequence[int], num_generations: int) -> dict[str, Any]:
    """Some groups of a rollout, in the order given; what has one entry per group is chosen by group."""
    rows = [g * num_generations + j for g in groups for j in range(num_generations)]
    n_rows = len(rollout["length"])
    chosen: dict[str, Any] = {}
    for name, value in rollout.items():
        if name == "reward_names" or not isinstance(value, Tensor | list):
            chosen[name] = value
            continue
        numbers = rows if len(value) == n_rows else list(groups)
        if isinstance(value, list):
            chosen[name] = [value[i] for i in numbers]
        else:
            chosen[name] = value[on(value.device, numbers)]
    extent = RowLengths.of(chosen).extent(range(len(rows)))
    return cut(chosen, extent, before=rollout["log_prob"].shape[1])
