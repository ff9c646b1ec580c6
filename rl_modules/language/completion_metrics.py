"""Statistics of the rewards and lengths of completions."""

import torch
from torch import Tensor

from rl_modules import functional as F


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the number of elements that are not NaN, their mean, and their standard deviation (0 for one);
    scalars.
    """
    counts = ~x.isnan()
    n = counts.sum()
    mean = torch.where(counts, x, 0.0).sum() / n.clamp(min=1)
    squares = torch.where(counts, (x - mean).square(), 0.0).sum()
    return n, mean, (squares / (n - 1).clamp(min=1)).sqrt()


def length_metrics(length: Tensor, finished: Tensor) -> dict[str, Tensor]:
    """Metrics of the completions' lengths by name.

    Args:
        length: in tokens, [B].
        finished: 1 where a completion ended by itself, 0 where it was truncated, [B].
    """
    return {
        "completions/mean_length": length.mean(),
        "completions/min_length": length.min(),
        "completions/max_length": length.max(),
        "completions/clipped_ratio": 1 - finished.mean(),
    }


def generation_metrics(
    reward: Tensor, length: Tensor, finished: Tensor, entropy: Tensor, num_generations: int
) -> dict[str, Tensor]:
    """Metrics of the completions of all ranks by name.

    Args:
        reward: [B], completions of a prompt adjacent; NaN: not scored.
        length: in tokens, [B].
        finished: 1 where a completion ended by itself, 0 where it was truncated, [B].
        entropy: sum over each completion's tokens in nats, [B].
        num_generations: completions per prompt.
    """
    metrics = {"entropy": entropy.sum() / length.sum(), **length_metrics(length, finished)}
    if num_generations > 1:  # a baseline of another kind takes groups of one, which have no spread
        centred = F.group_advantages(reward, num_generations, "none").view(-1, num_generations)
        metrics["frac_reward_zero_std"] = (centred == 0).all(1).float().mean()
    return metrics


def quantile(values: Tensor, q: float) -> Tensor:
    """Returns the ``q``-quantile of the numbers among ``values``, interpolated linearly; NaN where there are none.

    ``torch.nanquantile``, which this equals, takes 16 million values at most: a micro-batch of 64 completions of 32,000
    tokens on eight ranks has more.

    Args:
        values: of any shape; NaN elements are ignored.
        q: in [0, 1].
    """
    ordered = values.flatten().sort().values  # NaN comes last
    rank = (values.isnan().logical_not().sum() - 1).clamp(min=0) * q
    below = rank.floor()
    low, high = ordered[torch.stack([below, rank.ceil()]).long()]
    return low.lerp(high, (rank - below).to(low.dtype))


def terminated_lengths(length: Tensor, ended: Tensor) -> dict[str, Tensor]:
    """Mean, smallest and largest length of the completions that ended by themselves.

    Args:
        length: in tokens, [B].
        ended: [B] bool.
    """
    return {
        "completions/mean_terminated_length": torch.where(ended, length, 0.0).sum() / ended.sum().clamp(min=1),
        "completions/min_terminated_length": torch.where(ended, length, torch.inf).min(),
        "completions/max_terminated_length": torch.where(ended, length, 0.0).max(),
    }


def importance_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Returns the ratio that the loss clips, and a mask of the elements that count.

    Args:
        log_prob: [b, L].
        old_log_prob: [b, L].
        mask: which tokens count, [b, L].
        level: ``importance_sampling_level``.

    Returns:
        ρ and bool, [b, L]; [b, 1] for ``sequence``.
    """
    log_ratio = torch.where(mask, log_prob - old_log_prob, 0.0)
    if level == "token":
        return log_ratio.exp(), mask
    of_sequence = F.masked_mean(log_ratio, mask, 1).unsqueeze(1).exp()
    if level == "sequence_token":
        return of_sequence.expand(mask.shape), mask
    return of_sequence, torch.ones_like(of_sequence, dtype=torch.bool)


def clip_metrics(
    low: Tensor, high: Tensor, counts: Tensor, share: Tensor, rows_left_out: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the fraction of ratios that are clipped on either side: means, and extremes over completions.

    Args:
        low: true where the ratio is clipped from below, [b, L] or [b, 1] bool.
        high: true where it is clipped from above, likewise.
        counts: true where a ratio counts, likewise.
        share: 1 / the number of ratios in the whole micro-batch.
        rows_left_out: the micro-batch also has skipped rows, whose ratios are not clipped.
    """
    means = {"clip_ratio/low_mean": low.sum() * share, "clip_ratio/high_mean": high.sum() * share}
    means["clip_ratio/region_mean"] = means["clip_ratio/low_mean"] + means["clip_ratio/high_mean"]
    counted = counts.any(1)
    extremes: dict[str, Tensor] = {}
    for side, clipped in (("low", low), ("high", high)):
        of_rows = F.masked_mean(clipped.float(), counts, 1)
        least = torch.where(counted, of_rows, 1.0).min() * (not rows_left_out) * counted.any()
        extremes |= {f"clip_ratio/{side}_min": least, f"clip_ratio/{side}_max": of_rows.max()}
    return means, extremes
