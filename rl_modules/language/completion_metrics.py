"""Metrics of generations and minibatches of completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.functional.grpo import importance_ratio
from rl_modules.language.scoring import tokens_written, written_mask
from rl_modules.loggers import adapters

if TYPE_CHECKING:
    from rl_modules.language.policy import LanguagePolicy


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of elements that are not NaN, their mean, and their standard deviation (0 for one); scalars."""
    counts = ~x.isnan()
    n = counts.sum()
    mean = torch.where(counts, x, 0.0).sum() / n.clamp(min=1)
    squares = torch.where(counts, (x - mean).square(), 0.0).sum()
    return n, mean, (squares / (n - 1).clamp(min=1)).sqrt()


def length_metrics(length: Tensor, finished: Tensor) -> dict[str, Tensor]:
    """Metrics of the completions' lengths in tokens, [B]; ``finished`` is 1 where one ended by itself."""
    return {
        "completions/mean_length": length.mean(),
        "completions/min_length": length.min(),
        "completions/max_length": length.max(),
        "completions/clipped_ratio": 1 - finished.mean(),
    }


def record_completions(
    module: LanguagePolicy, rollout: dict[str, Any], *columns: Tensor, std: bool = True
) -> list[Tensor]:
    """Records rewards, failures and logs; returns the columns [B], tokens written and finished of all ranks."""
    total = rollout["prompt_length"] + rollout["length"]
    own = [*columns, tokens_written(rollout), rollout["finished"], total]
    table = module.gathered(torch.cat([torch.stack([c.float() for c in own], 1), rollout["rewards"].float()], 1))
    *found, total = table[:, : len(own)].unbind(1)
    module.num_tokens += int(total.sum())
    for name, column in zip(rollout["reward_names"], table[:, len(own) :].unbind(1), strict=True):
        n, mean, deviation = moments(column)
        metrics = {f"rewards/{name}/mean": mean} | ({f"rewards/{name}/std": deviation} if std else {})
        module.record((n > 0).float(), **metrics)
    for name, count in rollout.get("failed", {}).items():
        module.record(**{f"rewards/{name}/failed": count * module._world_size})
    if logged := rollout.get("logged"):
        module.record_logged(logged)
    return found


def table_is_due(module: LanguagePolicy) -> bool:
    """Whether this generation's completions are to be logged: the first one after each ``completions_steps``."""
    step = module.trainer.global_step
    if not module.completions_steps or step < module._table_due_at:
        return False
    module._table_due_at = step - step % module.completions_steps + module.completions_steps
    return True


def record_generation(
    module: LanguagePolicy, rollout: dict[str, Any], fields: dict[str, Tensor], entropy: Tensor | None
) -> None:
    """Records GRPO's generation, and the tokens' ``entropy`` [B, L]; None: its estimate by their log-probabilities."""
    spread = -rollout["log_prob"] if entropy is None else entropy
    spread = torch.where(written_mask(rollout), spread, 0.0).sum(1)
    columns = (rollout["reward"], rollout.get("earned", rollout["reward"]), spread)
    reward, earned, spread, length, finished = record_completions(module, rollout, *columns)
    name = "sampled_entropy" if entropy is None else "entropy"
    metrics = {name: spread.sum() / length.sum(), **length_metrics(length, finished)}
    if (num_generations := rollout["num_generations"]) > 1:  # groups of one, of another baseline, have no spread
        centred = F.group_advantages(reward, num_generations, "none").view(-1, num_generations)
        metrics["frac_reward_zero_std"] = (centred == 0).all(1).float().mean()
    module.record(**metrics)
    ended = finished > 0
    terminated = {
        "completions/mean_terminated_length": torch.where(ended, length, 0.0).sum() / ended.sum().clamp(min=1),
        "completions/min_terminated_length": torch.where(ended, length, torch.inf).min(),
        "completions/max_terminated_length": torch.where(ended, length, 0.0).max(),
    }
    module.record(ended.any().float(), **terminated)
    n, mean, std = moments(earned)
    module.record((n > 0).float(), reward=mean, reward_std=std)
    if "missing" in rollout:
        module.record(**{"dynamic_sampling/missing": rollout["missing"]})
    if table_is_due(module):
        advantage = fields["advantage"]
        if advantage.ndim == 2:
            advantage = F.masked_mean(advantage, written_mask(rollout), 1)
        module.write_completions(rollout, advantage=advantage)
        if module.trainer.loggers and module.trainer.is_global_zero:
            for adapter in adapters(module.trainer):
                adapter.write_histogram("train/completions/length", length, module.trainer.global_step)


def record_clipping(module: LanguagePolicy, log_prob: Tensor, batch: dict[str, Any]) -> None:
    """Records fractions of clipped ratios: their means, and their extremes over completions."""
    mask, advantage, level = batch["mask"], batch["advantage"], module.importance_sampling_level
    weight = batch["micro_rows"] if level == "sequence" else batch["micro_tokens"]
    if module.loss_type == "sapo":
        return
    ratio = importance_ratio(torch.where(mask, log_prob - batch["log_prob"], 0.0), mask, level)
    counts = torch.ones_like(ratio, dtype=torch.bool) if level == "sequence" else mask
    if advantage.ndim == 1:
        advantage = advantage.unsqueeze(1)
    elif level == "sequence":
        advantage = F.masked_mean(advantage, mask, 1).unsqueeze(1)
    share = 1 / torch.as_tensor(weight, device=mask.device).clamp(min=1)
    if module.loss_type == "cispo":
        bounded = (counts & (ratio > module.epsilon_high) & (advantage > 0)).sum()
        module.record(weight, cispo_clip_ratio=bounded * share)
        return
    above = module.epsilon if module.epsilon_high is None else module.epsilon_high
    low = counts & (ratio < 1 - module.epsilon) & (advantage < 0)
    high = counts & (ratio > 1 + above) & (advantage > 0)
    means = {"clip_ratio/low_mean": low.sum() * share, "clip_ratio/high_mean": high.sum() * share}
    means["clip_ratio/region_mean"] = means["clip_ratio/low_mean"] + means["clip_ratio/high_mean"]
    counted, extremes = counts.any(1), dict[str, Tensor]()
    is_whole = len(mask) == batch["micro_rows"]  # else it also has skipped rows, whose ratios are not clipped
    for side, clipped in (("low", low), ("high", high)):
        of_rows = F.masked_mean(clipped.float(), counts, 1)
        least = torch.where(counted, of_rows, 1.0).min() * is_whole * counted.any()
        extremes |= {f"clip_ratio/{side}_min": least, f"clip_ratio/{side}_max": of_rows.max()}
    module.record(weight, **means)
    if module._world_size > 1:  # the end of each name, min or max, says of which kind it is
        extremes = {name: module.trainer.strategy.reduce(x, reduce_op=name[-3:]) for name, x in extremes.items()}
    module.record(**extremes)
