"""The losses over a chosen and a rejected answer that :func:`dpo_loss` selects by name, and f-divergences in place of
the KL.

Each reads the answers' scores s, which are log-ratios log π - log π_ref, or f'(π / π_ref) under another divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_modules.functional.checks import bounded


class Constants(NamedTuple):
    """The numbers of a loss; see :func:`dpo_loss`."""

    beta: float
    label_smoothing: float
    discopop_tau: float
    simpo_gamma: float


def _smoothed(lead: Tensor, epsilon: float) -> Tensor:
    """-(1 - ε) log σ(x) - ε log σ(-x), the Bradley-Terry loss of labels that are wrong with probability ε."""
    return -(1 - epsilon) * F.logsigmoid(lead) - epsilon * F.logsigmoid(-lead)


def _robust(lead: Tensor, epsilon: float) -> Tensor:
    return (-(1 - epsilon) * F.logsigmoid(lead) + epsilon * F.logsigmoid(-lead)) / (1 - 2 * epsilon)


def _exo_pair(lead: Tensor, epsilon: float) -> Tensor:
    # KL(p || (1 - ε, ε)) of p = softmax of the two implicit rewards.
    right, wrong = F.logsigmoid(lead), F.logsigmoid(-lead)
    return right.exp() * (right - math.log1p(-epsilon)) + wrong.exp() * (wrong - math.log(epsilon))


def _discopop(lead: Tensor, tau: float) -> Tensor:
    share = torch.sigmoid(lead / tau)
    return (1 - share) * -F.logsigmoid(lead) + share * torch.exp(bounded(-lead))


#: From the scores of the chosen (c) and the rejected answer (r), [B] each, and constants (k) to the loss, [B].
PAIR_LOSSES: dict[str, Callable[[Tensor, Tensor, Constants], Tensor]] = {
    "sigmoid": lambda c, r, k: _smoothed(k.beta * (c - r), k.label_smoothing),
    "robust": lambda c, r, k: _robust(k.beta * (c - r), k.label_smoothing),
    "hinge": lambda c, r, k: torch.relu(1 - k.beta * (c - r)),
    "ipo": lambda c, r, k: (c - r - 1 / (2 * k.beta)).square(),
    "exo_pair": lambda c, r, k: _exo_pair(k.beta * (c - r), k.label_smoothing),
    "nca_pair": lambda c, r, k: -F.logsigmoid(k.beta * c) - (F.logsigmoid(-k.beta * c) + F.logsigmoid(-k.beta * r)) / 2,
    "bco_pair": lambda c, r, k: -F.logsigmoid(k.beta * c) - F.logsigmoid(-k.beta * r),
    "sppo_hard": lambda c, r, k: (c - 0.5 / k.beta).square() + (r + 0.5 / k.beta).square(),
    "apo_zero": lambda c, r, k: torch.sigmoid(-k.beta * c) + torch.sigmoid(k.beta * r),
    "apo_down": lambda c, r, k: torch.sigmoid(k.beta * c) + torch.sigmoid(k.beta * (r - c)),
    "discopop": lambda c, r, k: _discopop(k.beta * (c - r), k.discopop_tau),
    "aot_unpaired": lambda c, r, k: _smoothed(k.beta * (c.sort().values - r.sort().values), k.label_smoothing),
    "simpo": lambda c, r, k: _smoothed(k.beta * (c - r) - k.simpo_gamma, k.label_smoothing),
    "orpo": lambda c, r, k: -k.beta * F.logsigmoid(_log_odds(c) - _log_odds(r)),
}
PAIR_LOSSES |= {
    "sigmoid_norm": PAIR_LOSSES["sigmoid"],
    "cpo": PAIR_LOSSES["sigmoid"],
    # Gets the policy's and the reference's margins, in place of the two answers' scores.
    "aot": PAIR_LOSSES["aot_unpaired"],
}
#: The losses that compare means over tokens.
NORMALISED = frozenset({"ipo", "sigmoid_norm", "simpo", "orpo"})
#: Those that read no reference policy.
REFERENCE_FREE = frozenset({"cpo", "simpo", "orpo"})
#: Those that read ``label_smoothing``.
SMOOTHED = frozenset({"sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired", "cpo", "simpo"})
#: Those of a difference of scores, for which another divergence is defined.
OF_DIFFERENCES = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"})
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def divergence_score(log_ratio: Tensor, f_divergence_type: str, alpha: float) -> Tensor:
    """f'(u) of u = π / π_ref, without its constant: log u, 1 - 1/u, log 2u/(1 + u), or (u^(α-1) - 1) / (α - 1)."""
    if f_divergence_type == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    power = -1.0 if f_divergence_type == "forward_kl" else alpha - 1
    if f_divergence_type == "reverse_kl" or abs(power) < 1e-6:
        return log_ratio
    # Bounded as in TRL: exp(80) is a number in float32.
    return torch.expm1((power * log_ratio).clamp(max=80.0)) / power


def length_desensitized(log_prob: Tensor, chosen_length: Tensor, rejected_length: Tensor, ld_alpha: float) -> Tensor:
    """Log π of both answers of each pair, in which tokens beyond the shorter answer's length count α.

    log π'(y) = Σ_{t ≤ n} log π(y_t) + α Σ_{t > n} log π(y_t),   n = min(|y_c|, |y_r|)

    Args:
        log_prob: log π(y_t) in nats, the chosen answers' rows first, [2b, L], 0 after each answer's end.
        chosen_length: tokens of y_c, [b].
        rejected_length: tokens of y_r, [b].
        ld_alpha: α in [0, 1]; 1: the plain sums.

    Returns:
        [2b].

    Source: Liu et al. 2024 (LD-DPO), arXiv:2409.06411. Equals TRL 1.16.
    """
    shared = torch.minimum(chosen_length, rejected_length).repeat(2).unsqueeze(1)
    is_tail = torch.arange(log_prob.shape[1], device=log_prob.device) >= shared
    return torch.where(is_tail, ld_alpha * log_prob, log_prob).sum(-1)


def _log_odds(x: Tensor) -> Tensor:
    """Log-odds of log P < 0, exact at both ends (Mächler 2012); unused branches get a harmless argument."""
    near = x > -math.log(2.0)
    small = torch.where(near, x, -1.0)
    large = torch.where(near, -1.0, x)
    return x - torch.where(near, (-torch.expm1(small)).log(), torch.log1p(-large.exp()))
