"""Group-relative advantages: other answers to the same prompt take the place of a critic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_modules.functional.checks import as_constant, require_choice, require_ndim

# Keeps the quotient finite where rewards hardly differ; the value of DeepSeek's and TRL's code.
_STD_FLOOR = 1e-4


def group_advantages(reward: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Advantage of each answer over the answers to the same prompt.

    A_i = (r_i - mean_g) / (std + 1e-4)

    with the mean over the scored answers of group g, and std (n - 1 in its denominator) over the same group
    ("group"), over all scored answers ("batch"), or no division at all ("none").

    Args:
        reward: one per answer, shape (B,), in units of reward; the G answers to a prompt are adjacent. NaN marks an
            answer that was not scored; mean and std ignore it. An infinite reward makes its group NaN.
        num_generations: G, answers per prompt, at least 2; B is a multiple of it.
        scale_rewards: "group", "batch" or "none".

    Returns:
        A, shape (B,), detached, without unit (in units of reward for "none"). Exactly 0 for answers that were not
        scored, and in groups whose scored rewards are equal or fewer than two, so that rounding of the mean does not
        become a signal.

    Raises:
        ValueError: reward is not one-dimensional or no multiple of num_generations, num_generations is below 2, or
            scale_rewards is unknown.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; "none": Liu et al. 2025, arXiv:2503.20783;
        "batch": Hu et al. 2025, arXiv:2501.03262, and Liu et al. 2025, arXiv:2508.08221.
    """
    require_choice("scale_rewards", scale_rewards, ("group", "batch", "none"))
    group, scored, has_spread = _groups(reward, num_generations)
    mean, std = _moments(group, scored)
    centred = torch.where(has_spread, group - mean, 0.0)
    if scale_rewards == "batch":
        _, std = _moments(group.view(1, -1), scored.view(1, -1))
    return (centred if scale_rewards == "none" else centred / (std + _STD_FLOOR)).view(-1)


def rloo_advantages(reward: Tensor, num_generations: int) -> Tensor:
    """Advantage of each answer over the mean of the *other* answers to its prompt: REINFORCE leave-one-out.

    A_i = r_i - 1 / (n - 1) Σ_{j ≠ i} r_j = n / (n - 1) (r_i - mean_g)

    with the sums over the n scored answers of group g. The baseline does not depend on answer i, so the policy
    gradient is unbiased.

    Args:
        reward: one per answer, shape (B,), in units of reward; the G answers to a prompt stand next to each other.
            NaN says that nothing could score the answer: it counts in no mean.
        num_generations: G, answers per prompt, at least 2; B is a multiple of it.

    Returns:
        A, shape (B,), in units of reward, detached. Exactly 0 for answers that were not scored, and in groups whose
        scored rewards are equal or fewer than two.

    Raises:
        ValueError: reward is not one-dimensional or no multiple of num_generations, or num_generations is below 2.

    Source: Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740, section 3.3. Equals TRL 1.16's RLOO without
        ``normalize_advantages``.
    """
    group, scored, has_spread = _groups(reward, num_generations)
    count = scored.sum(-1, keepdim=True)
    centred = torch.where(has_spread, group - _moments(group, scored)[0], 0.0)
    return (centred * (count / (count - 1).clamp(min=1))).view(-1)


def batch_advantages(reward: Tensor) -> Tensor:
    """Advantage of each answer over the mean of the batch, in standard deviations of the batch: REINFORCE++.

    A_i = (r_i - mean) / (std + 1e-4)

    with mean and std (n - 1 in its denominator) over all scored answers, whatever their prompts.

    Args:
        reward: one per answer, shape (B,), in units of reward. NaN says that nothing could score the answer.

    Returns:
        A, shape (B,), detached, without unit. Exactly 0 for answers that were not scored, and in a batch whose scored
        rewards are equal.

    Raises:
        ValueError: reward is not one-dimensional.

    Source: Hu et al. 2025, arXiv:2501.03262, eq. 9, with the reward of the whole answer as the return of each token.
    """
    require_ndim("reward", reward, 1, "[B]")
    if not len(reward):
        return as_constant(reward)
    group = as_constant(reward).view(1, -1)
    scored, has_spread = _scored(group)
    mean, std = _moments(group, scored)
    return (torch.where(has_spread, group - mean, 0.0) / (std + _STD_FLOOR)).view(-1)


def gdpo_advantages(rewards: Tensor, num_generations: int, weights: Sequence[float] | None = None) -> Tensor:
    """Advantage of each answer from several rewards, each standardised by itself before they are summed: GDPO.

    A_i = (s_i - mean) / (std + 1e-4),   s_i = Σ_f w_f (r_if - mean_gf) / (std_gf + 1e-4)

    with mean_gf and std_gf over the answers of group g that reward f scored, and mean and std over the batch.

    Args:
        rewards: one of each function per answer, shape (B, F), in units of reward; the G answers to a prompt are
            adjacent. NaN where one does not apply to an answer.
        num_generations: G, answers per prompt, at least 2; B is a multiple of it.
        weights: w, F numbers; None: all 1.

    Returns:
        A, shape (B,), detached, without unit. Exactly 0 for answers that nothing scored.

    Raises:
        ValueError: rewards does not have two dimensions, or as :func:`group_advantages` and :func:`combine_rewards`.

    Source: Liu et al. 2026, arXiv:2601.05242; TRL's ``multi_objective_aggregation="normalize_then_sum"``.
    """
    require_ndim("rewards", rewards, 2, "[B, F]")
    columns = [group_advantages(column, num_generations, "group") for column in rewards.unbind(1)]
    own = torch.stack(columns, 1).masked_fill(rewards.isnan(), torch.nan)
    return batch_advantages(combine_rewards(own, weights))


def combine_rewards(rewards: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Weighted sum of several rewards per answer.

    r = Σ_f w_f r_f   over the rewards that apply

    Args:
        rewards: shape (B, F), in units of reward; NaN where one does not apply to an answer.
        weights: w, F numbers; None: all 1.

    Returns:
        r, shape (B,), detached; NaN where none applies.

    Raises:
        ValueError: rewards does not have two dimensions, or there is not one weight for each.

    Source: DeepSeek-AI 2025, arXiv:2501.12948, section 2.2.2, where accuracy and format are added; TRL's
        ``reward_weights``.
    """
    require_ndim("rewards", rewards, 2, "[B, F]")
    rewards = as_constant(rewards)
    if weights is not None:
        if len(weights) != rewards.shape[1]:
            raise ValueError(f"weights has {len(weights)} elements, expected {rewards.shape[1]}, one per reward.")
        rewards = rewards * torch.tensor(list(weights), dtype=rewards.dtype, device=rewards.device)
    return rewards.nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)


def _groups(reward: Tensor, num_generations: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rewards in rows of one group each, where they are scored, and where their group has two that differ."""
    require_ndim("reward", reward, 1, "[B]")
    if num_generations < 2:
        raise ValueError(f"num_generations must be at least 2, got {num_generations!r}: one answer has no peers.")
    if len(reward) % num_generations:
        raise ValueError(
            f"reward has {len(reward)} elements, expected a multiple of num_generations = {num_generations}."
        )
    group = as_constant(reward).view(-1, num_generations)
    return group, *_scored(group)


def _scored(group: Tensor) -> tuple[Tensor, Tensor]:
    """Where rewards are scored, and where their row has two that differ besides."""
    scored = ~group.isnan()
    highest = torch.where(scored, group, -torch.inf).amax(-1, keepdim=True)
    lowest = torch.where(scored, group, torch.inf).amin(-1, keepdim=True)
    return scored, scored & (highest > lowest)


def _moments(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the elements that count of each row, with n - 1 in the latter's denominator."""
    n = counts.sum(-1, keepdim=True)
    mean = torch.where(counts, x, 0.0).sum(-1, keepdim=True) / n.clamp(min=1)
    squares = torch.where(counts, x - mean, 0.0).square().sum(-1, keepdim=True)
    return mean, (squares / (n - 1).clamp(min=1)).sqrt()
