"""Learning from comparisons: the loss of a reward model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rl_modules.functional.checks import as_constant, as_float, require_number, require_same_shape


def bradley_terry_loss(
    chosen_reward: Tensor,
    rejected_reward: Tensor,
    margin: Tensor | None = None,
    center_rewards_coefficient: float = 0.0,
) -> Tensor:
    """The negative log-likelihood of the observed preferences.

    L = mean_i [ -log σ(r_c - r_r - m) + c (r_c + r_r)² ]

    Preferences fix only differences of rewards; the second term keeps their mean at zero.

    Args:
        chosen_reward: r_c, the score of the preferred answer, any shape S; receives gradient.
        rejected_reward: r_r, the score of the other one, shape S; receives gradient.
        margin: m, margin of the preferred answer, in units of reward, shape S; None: 0.
        center_rewards_coefficient: c, at least 0.

    Returns:
        Scalar to minimise; log 2 for equal scores of 0 without margin.

    Raises:
        ValueError: shapes differ, or center_rewards_coefficient is negative.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2;
        centring: Eisenstein et al. 2023, arXiv:2312.09244.
    """
    require_same_shape(chosen_reward=chosen_reward, rejected_reward=rejected_reward)
    require_number("center_rewards_coefficient", center_rewards_coefficient)
    chosen_reward, rejected_reward = as_float(chosen_reward), as_float(rejected_reward)
    lead = chosen_reward - rejected_reward
    if margin is not None:
        require_same_shape(chosen_reward=chosen_reward, margin=margin)
        lead = lead - as_constant(margin)
    loss = -F.logsigmoid(lead).mean()
    if center_rewards_coefficient:
        loss = loss + center_rewards_coefficient * (chosen_reward + rejected_reward).square().mean()
    return loss
